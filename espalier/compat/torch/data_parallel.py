"""``DataParallel`` and ``DistributedDataParallel``, and the optimizer that cuts its states."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy

from espalier.comm.control import gather_objects
from espalier.compat.common import LateModule, plan_for_world, precision_of, tell_of_ranks, world_size
from espalier.device import accelerator, backend_of, current
from espalier.engine.states import whole_states
from espalier.mesh import Mesh
from espalier.parallel import Plan
from espalier.tensor import DTensor
from espalier.texts import refuse
from espalier.torch_private import current_graph_task_id

Said = Plan | Mapping[str, Any] | None


class _Prefixed(LateModule):
    """Parameters, buffers and state dicts have the names that torch's wrapper gives them: ``module.NAME``."""

    def _fqn_modifiers(self) -> dict[str, str]:
        """``torch.distributed.checkpoint.state_dict`` knows by its own rules what names begin with."""
        return {}

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """As torch's wrapper names them."""
        return nn.Module.named_parameters(self, *args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """As torch's wrapper names them."""
        return nn.Module.named_buffers(self, *args, **kwargs)

    def state_dict(self, *args: Any, destination: Any = None, prefix: str = "", **kwargs: Any) -> Any:
        """With plain whole tensors, each ``module.NAME``."""
        return super().state_dict(destination=destination, prefix=f"{prefix}module.")

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False, **options: Any
    ) -> Any:
        """Of whole tensors, the same on all ranks, each ``module.NAME``."""
        own = {name.removeprefix("module."): x for name, x in state_dict.items()}
        return super().load_state_dict(own, strict, **options)


class DataParallel(_Prefixed):
    """As ``torch.nn.DataParallel``: whole batches in, whole outputs out, computed by all ranks.

    Ranks are processes: ``espalier run -n 4 script.py``. All of them run the script; torch's random numbers
    go on as on rank 0, so that all draw the same batches. A plain ``python script.py`` is one process: if
    it has several devices, torch's own class cuts the batch over them, with a thread for each.

    Args:
        device_ids, output_device: for a process without ranks, as torch takes them; a rank has one device.
        dim: along which the batch is cut: 0, or another in a process without ranks and with several devices.
        plan: keys of a :class:`~espalier.Plan`: what else there is to be beside ``data``.
    """

    _threads: nn.DataParallel[nn.Module] | None = None

    def __init__(
        self,
        module: nn.Module,
        device_ids: Any = None,
        output_device: Any = None,
        dim: int = 0,
        *,
        plan: Said = None,
    ) -> None:
        super().__init__(module, "whole", {}, plan)
        if world_size() == 1 and plan is None:
            threads = nn.DataParallel(module, device_ids, output_device, dim)
            if len(threads.device_ids) > 1:
                tell_of_ranks("DataParallel runs a thread for each of {devices} devices in one process")
                self.__dict__["_threads"] = threads  # no module of this one: names are torch's
        if dim != 0 and self._threads is None:
            refuse("DataParallel", [("dim", dim, "rows are cut: expected 0")])
        if world_size() > 1:
            torch.set_rng_state(
                gather_objects(torch.get_rng_state(), Mesh.from_env(plan_for_world({}, plan).axes))[0]
            )
            take_first_values(module)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Outputs of the whole batch."""
        if self._threads is not None and not self.is_made:
            return self._threads(*args, **kwargs)
        return super().forward(*args, **kwargs)


# torch's stock hooks, of DDP and of FSDP
_HOOKS: Mapping[str, str | None] = MappingProxyType(
    {
        "allreduce_hook": None,
        "fp16_compress_hook": "float16",
        "bf16_compress_hook": "bfloat16",
        "reduce_scatter_hook": None,
    }
)


class DistributedDataParallel(_Prefixed):
    """As ``torch.nn.parallel.DistributedDataParallel``: each rank gives its rows, and gets theirs.

    Gradients are those of the mean of the ranks' losses. Parameters and buffers are rank 0's from the start;
    the model is laid out at the first call. Batch norm sees the whole batch.

    Args:
        bucket_cap_mb: ``Plan(chunk_megabytes=...)``.
        mixed_precision: ``Plan(precision=...)``.
        device_mesh: of one axis.
        process_group: all of the world; around a pipeline's stage, the ranks that have the same.
        init_sync: whether parameters and buffers are rank 0's before the first call, too.
        device_ids, output_device, broadcast_buffers, find_unused_parameters, check_reduction,
        gradient_as_bucket_view, static_graph, skip_all_reduce_unused_params, batched_grad_copy,
        forward_sync_buffers, lazy_bucket_allocation: no effect: parameters and buffers are in step, unused
        parameters are seen, and chunks of gradients are there as long as they are needed.
        plan: keys of a :class:`~espalier.Plan`: what else there is to be beside ``data``.

    Attributes:
        require_manual_backward_finalization: no effect: backward passes sum gradients before they end.
    """

    require_manual_backward_finalization = False

    @property  # type: ignore[misc]  # not to be written to
    def __class__(self) -> Any:
        """Torch's, for who asks whether names begin with ``module.``: ``isinstance`` says yes to both."""
        return nn.parallel.DistributedDataParallel

    def __init__(
        self,
        module: nn.Module,
        device_ids: Any = None,
        output_device: Any = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: Any = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: Any = None,
        param_to_hook_all_reduce: Any = None,
        mixed_precision: Any = None,
        device_mesh: Any = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: list[int] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        lazy_bucket_allocation: bool = False,
        *,
        plan: Said = None,
    ) -> None:
        whole = "gradients are summed by the engine alone: expected None"
        mistakes = [
            ("dim", dim, "rows are cut: expected 0") if dim else None,
            ("delay_all_reduce_named_params", "...", whole) if delay_all_reduce_named_params else None,
            ("param_to_hook_all_reduce", "...", whole) if param_to_hook_all_reduce else None,
            ("bucket_cap_mb_list", bucket_cap_mb_list, "chunks are alike: bucket_cap_mb = ...")
            if bucket_cap_mb_list
            else None,
            ("device_mesh", device_mesh, "expected one axis; more of them are said by plan = {...}")
            if device_mesh is not None and device_mesh.ndim != 1
            else None,
        ]
        refuse("DistributedDataParallel", [x for x in mistakes if x is not None])
        said: dict[str, Any] = {}
        if bucket_cap_mb is not None:
            said["chunk_megabytes"] = float(bucket_cap_mb)
        if mixed_precision is not None:
            said["precision"] = precision_of(mixed_precision.param_dtype, mixed_precision.reduce_dtype)
        super().__init__(module, "own", said, plan)
        self.mistakes += of_group(process_group)
        self.device_ids, self.output_device = device_ids, output_device
        self.static_graph, self.find_unused_parameters = static_graph, find_unused_parameters
        if init_sync:
            take_first_values(module, process_group)

    def register_comm_hook(self, state: Any, hook: Callable[..., Any]) -> None:
        """In which dtype gradients travel, by one of torch's stock hooks.

        Raises:
            MistakeError: it is another, or the model was called already.
        """
        take_hook(self, hook)

    def will_sync_module_buffers(self) -> bool:
        """It need not: buffers are in step."""
        return False

    @property
    def should_finalize_after_backward(self) -> bool:
        """Whether :meth:`finalize_backward` is to be called behind a backward pass, not in it."""
        return self.require_manual_backward_finalization

    def finalize_backward(self) -> None:
        """No effect: a backward pass has summed the gradients when it ends.

        Raises:
            MistakeError: it has not ended.
        """
        refuse_within_backward("DistributedDataParallel")

    def _set_static_graph(self) -> None:
        """No effect: unused parameters are seen."""

    def join(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: ranks call the model equally often.

        Raises:
            MistakeError: always.
        """
        reason = (
            "every rank calls the model equally often, with as many rows as it likes: leave join() out. A "
            "DistributedSampler gives every rank as many batches; engine.local_batch(None) stands for none"
        )
        refuse("DistributedDataParallel", [("join", "()", reason)])


def take_hook(module: LateModule, hook: Callable[..., Any]) -> None:
    """Let gradients travel in the dtype that one of torch's stock hooks stands for.

    Raises:
        MistakeError: it is another, or the model was called already.
    """
    owner, name = type(module).__name__, getattr(hook, "__name__", repr(hook))
    is_torchs = getattr(hook, "__module__", "").startswith("torch.distributed.algorithms.")
    if not is_torchs or name not in _HOOKS:
        known = ", ".join(_HOOKS)
        reason = f"gradients are summed by the engine: expected torch's {known}, each of which is a dtype"
        refuse(owner, [("hook", name, reason)])
    if module.is_made:
        refuse(owner, [("hook", name, "register it before the first call")])
    if (dtype := _HOOKS[name]) is not None:
        module.said["precision"] = {**module.said.get("precision", {}), "reduce": dtype}


def take_first_values(module: nn.Module, group: Any = None) -> None:
    """Let parameters and buffers be those of a group's first rank: programs copy them before the first call.

    A collective, where the program has process groups. Ranks whose modules differ keep what they have.
    """
    if not dist.is_initialized() or dist.get_world_size(group) < 2:
        return
    values = [
        x.detach()
        for x in (*module.parameters(), *module.buffers())
        if not (isinstance(x, DTensor) or is_lazy(x)) and x.layout == torch.strided
    ]
    kinds = [(tuple(x.shape), str(x.dtype), x.is_meta) for x in values]
    of_all: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(of_all, kinds, group=group)
    if any(kinds != of_all[0] for kinds in of_all):
        return  # which the engine tells, where it lays them out together
    first = dist.get_process_group_ranks(group)[0]
    for x in values:
        if x.numel() and not x.is_meta:
            travels = backend_of(x.device.type, group) is not None
            sent = x.contiguous().to(x.device if travels else current(accelerator() or "cpu"))
            dist.broadcast(sent.view(-1).view(torch.uint8), first, group=group)
            x.copy_(sent)


def refuse_within_backward(owner: str) -> None:
    """See that no backward pass is under way, whose gradients are not there yet.

    Raises:
        MistakeError: one is.
    """
    if current_graph_task_id() != -1:
        reason = "gradients are summed when the backward pass ends: call it behind loss.backward()"
        refuse(owner, [("finalize_backward()", "in a backward pass", reason)])


def of_group(group: Any) -> list[tuple[str, Any, str]]:
    """The mistake of a process group that is not the whole world."""
    if group is None or not isinstance(group, dist.ProcessGroup) or group.size() == world_size():
        return []
    expected = "a part of the world: expected all of it; other axes are said by plan = {'tensor': ...}"
    return [("process_group", f"of {group.size()} ranks", expected)]


class _OfZero(type):
    """What :class:`ZeroRedundancyOptimizer` has made is its instance."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, torch.optim.Optimizer) and hasattr(instance, "consolidate_state_dict")


class ZeroRedundancyOptimizer(metaclass=_OfZero):
    """As ``torch.distributed.optim.ZeroRedundancyOptimizer``: an optimizer with states cut over the ranks.

    It is an ``optimizer_class`` that has the model's engine be one of ``zero=1``, unless more is asked for.

    Args:
        optimizer_class, defaults: the optimizer and its options.
        process_group: all of the world.
        parameters_as_bucket_view, overlap_with_ddp: no effect: updates are exchanged in chunks.
    """

    def __new__(  # type: ignore[misc]
        cls,
        params: Any,
        optimizer_class: type[torch.optim.Optimizer],
        process_group: Any = None,
        parameters_as_bucket_view: bool = False,
        overlap_with_ddp: bool = False,
        **defaults: Any,
    ) -> torch.optim.Optimizer:
        """The optimizer."""
        refuse("ZeroRedundancyOptimizer", of_group(process_group))
        optimizer: Any = optimizer_class(params, **defaults)
        optimizer.asks_for = {"zero": 1}
        plain: Callable[[], dict[str, Any]] = optimizer.state_dict

        def consolidate_state_dict(to: int = 0) -> None:
            """Gather the states, which ``state_dict()`` gives until the next one (a collective)."""
            whole = whole_states(plain())
            optimizer.state_dict = lambda: whole

        optimizer.consolidate_state_dict = consolidate_state_dict
        made: torch.optim.Optimizer = optimizer
        return made
