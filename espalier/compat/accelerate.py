"""accelerate's ``Accelerator`` on a plan: a subclass of its own, whose models go through engines.

Loaders, optimizers, schedules, accumulation, metrics, trackers and files are accelerate's. Each rank that
reads rows of its own gives them to the model and gets what comes of them, as under DistributedDataParallel;
ranks that share a model's layers read the same ones.
"""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import accelerate
import torch
from accelerate.data_loader import DataLoaderShard, prepare_data_loader
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.state import PartialState
from accelerate.utils import (
    PROFILE_PATTERN_NAME,
    AutocastKwargs,
    DistributedDataParallelKwargs,
    DistributedType,
    DynamoBackend,
    ProfileKwargs,
    convert_to_fp32,
    recursively_apply,
)
from torch import nn

from espalier.comm.control import any_says, gather_objects
from espalier.compat.common import NO_SCALER, Readers, plan_for_world, precision_of
from espalier.compat.torch.fsdp import sharding_of
from espalier.engine import EngineModule, initialize
from espalier.engine.awaited import Awaited
from espalier.engine.lengths import AlikeBatches
from espalier.meanwhile import having
from espalier.mesh import Mesh
from espalier.parallel import Plan
from espalier.tensor import DTensor
from espalier.tensor.meshes import everywhere
from espalier.texts import refuse
from espalier.torch_private import steps_of
from espalier.trees import tree_map

_LOW: Mapping[str, str] = MappingProxyType({"bf16": "bfloat16", "fp16": "float16"})
_HOOKS: Mapping[str, str] = MappingProxyType({"fp16": "float16", "bf16": "bfloat16"})
_PLAN = "the plan says what is parallel: leave it out, and write Accelerator(plan={...})"
_LAUNCHED = "`accelerate launch` asked for it: start by `espalier run`, and write plan={...}"
_THEIRS = ("deepspeed_plugin", "deepspeed_plugins", "megatron_lm_plugin", "torch_tp_plugin")


@contextmanager
def _one_process() -> Iterator[None]:
    """While open, what models ask of accelerate is one process: they have the rows of all ranks.

    Such as the losses of transformers for boxes and masks, whose number they take from all processes.
    """
    with having(PartialState(), num_processes=1, distributed_type=DistributedType.NO):
        yield


class PreparedModel(EngineModule):
    """A prepared model."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model gives for this rank's rows; in float32 under autocast, as accelerate's.

        A loss that the model divides by what all ranks' batches have is a sum over all ranks here. Programs
        multiply it by the number of processes, as accelerate's is one rank's part, and gradients a mean.
        """
        count = kwargs.get("num_items_in_batch")
        if count is not None and self.rows == "own":
            readers = self.engine.mesh[self.engine.plan.batch_axes]
            kwargs["num_items_in_batch"] = count * readers.size()
        with _one_process():
            outputs = super().forward(*args, **kwargs)
        if not self.engine.plan.precision.autocast:
            return outputs
        return outputs._by(convert_to_fp32) if isinstance(outputs, Awaited) else convert_to_fp32(outputs)


class _Whole(nn.Module):
    """What there is to save of a model."""

    def __init__(self, states: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self._states = states

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """With plain whole tensors."""
        return self._states


class _Schedule(AcceleratedScheduler):
    """A prepared schedule, where fewer ranks than there are read rows of their own."""

    readers = 1

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Once for each rank that reads rows, when the optimizer has stepped."""
        for i in range(self.readers if self.gradient_state.sync_gradients else 1):
            total = getattr(self.scheduler, "total_steps", None)
            if i and total is not None and steps_of(self.scheduler) > total:
                return
            super().step(*args, **kwargs)


class OfWholes(accelerate.Accelerator):
    """accelerate's, for what lies on several ranks, or is yet to be computed in a pipeline."""

    @property
    def is_last_process(self) -> bool:
        """True for one rank of all."""
        return bool(self.state.process_index == self.state.num_processes - 1)

    def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """As ever, of the whole values."""
        return super().reduce(whole_values(tensor, "reduce"), *args, **kwargs)

    def pad_across_processes(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """As ever, of the whole values."""
        return super().pad_across_processes(whole_values(tensor, "pad_across_processes"), *args, **kwargs)


class Accelerator(OfWholes):
    """As ``accelerate.Accelerator``: ``espalier run -n 4 script.py``, or torchrun.

    Args:
        args, kwargs: of accelerate's own. ``mixed_precision`` is autocast, unless the plan says a precision;
            ``fsdp_plugin`` is ``zero=2`` or ``3``, with what lies on the host and what is recomputed;
            ``parallelism_config`` the axes ``replicate``, ``data``, ``tensor`` and ``context``;
            a ``dynamo_backend`` has the model's blocks compiled. The Accelerator accumulates and clips; in a
            pipeline ``accumulate`` of the plan cuts each batch into micro-batches.
        plan: a :class:`~espalier.Plan`, or keys of one, which hold. Without it all ranks are on the data
            axis.

    Raises:
        MistakeError: other libraries are asked for, or what the plan leaves to the Accelerator.
    """

    def __init__(self, *args: Any, plan: Plan | Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        kwargs = dict(inspect.signature(accelerate.Accelerator).bind(*args, **kwargs).arguments)
        mistakes = [(name, value, _PLAN) for name in _THEIRS if (value := kwargs.get(name)) is not None]
        if os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG", "false").lower() == "true":
            mistakes.append(("ACCELERATE_USE_PARALLELISM_CONFIG", "true", _LAUNCHED))
        asked = kwargs.get("mixed_precision")
        low = str(os.environ.get("ACCELERATE_MIXED_PRECISION", "no") if asked is None else asked).lower()
        if low == "fp8":
            mistakes.append(("mixed_precision", low, "expected no, bf16 or fp16"))
        handlers = kwargs.get("kwargs_handlers") or ()
        said = {
            **_of_fsdp(kwargs.pop("fsdp_plugin", None), mistakes),
            **_of_axes(kwargs.pop("parallelism_config", None)),
            **_of_handlers(handlers, mistakes),
        }
        casts = all(handler.enabled for handler in handlers if isinstance(handler, AutocastKwargs))
        if casts and (precision := autocast_of(low)):
            said["precision"] = {**said.get("precision", {}), **precision}
        self.plan = plan_for_world(said, plan)
        if self.plan.pipe > 1 and low == "fp16":
            mistakes.append(("mixed_precision", low, NO_SCALER))
        if self.plan.accumulate > 1 and self.plan.pipe == 1:
            known = "say gradient_accumulation_steps=, by which losses are divided: expected 1"
            mistakes.append(("plan.accumulate", self.plan.accumulate, known))
        refuse("Accelerator", mistakes)
        self._mesh = mesh = Mesh.from_env(self.plan.axes, "cpu" if kwargs.get("cpu") else None)
        if mesh.device().type == "cpu":
            kwargs["cpu"] = True
        self._readers = Readers(mesh, self.plan)
        super().__init__(**kwargs)
        if self.distributed_type.value in ("DEEPSPEED", "FSDP", "MEGATRON_LM"):
            refuse("Accelerator", [("distributed_type", self.distributed_type.value, _LAUNCHED)])

    # ---- by what programs multiply and divide, and which rows of gathered ones are theirs

    @property
    def num_processes(self) -> int:
        """How many ranks read rows of their own: so many batches a step has, and parts a gathered tensor."""
        return self._readers.size

    @property
    def process_index(self) -> int:
        """Which of them this is; ranks that share a batch have the same."""
        return self._readers.place

    @contextmanager
    def profile(self, profile_handler: ProfileKwargs | None = None) -> Iterator[Any]:
        """As ever; each rank writes a file of its own."""
        handler = profile_handler or self.profile_handler or ProfileKwargs()
        with super().profile(replace(handler, output_trace_dir=None)) as profiler:
            yield profiler
        if handler.output_trace_dir is not None:
            folder = Path(handler.output_trace_dir)
            folder.mkdir(parents=True, exist_ok=True)
            name = PROFILE_PATTERN_NAME.format(suffix=self._mesh.rank)
            profiler.export_chrome_trace(str(folder / name))
            self.wait_for_everyone()

    # ---- what is prepared

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        """The model on an engine of its own, ``model.engine``."""
        if not isinstance(model, EngineModule):
            compiler = self.state.dynamo_plugin.backend
            compile = compiler != DynamoBackend.NO and compiler.value.lower()
            model = PreparedModel(initialize(model, None, self.plan, mesh=self._mesh, compile=compile), "own")
        if all(model is not known for known in self._models):
            self._models.append(model)
        self._join()
        return model

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> AcceleratedOptimizer:
        """The optimizer, which its model's engine steps."""
        if not isinstance(optimizer, AcceleratedOptimizer):
            optimizer = AcceleratedOptimizer(optimizer, False, self.scaler)
        if all(optimizer is not known for known in self._optimizers):
            self._optimizers.append(optimizer)
        self._join()
        return optimizer

    def _join(self) -> None:
        """Attach each optimizer to the engine that has its parameters."""
        owner = {id(p): model.engine for model in self._models for p in model.parameters()}
        for optimizer in self._optimizers:
            own = optimizer.optimizer
            held = [owner[id(p)] for group in own.param_groups for p in group["params"] if id(p) in owner]
            for engine in dict.fromkeys(held):
                if not engine.has_optimizer(own):
                    engine.attach(own)

    def prepare_data_loader(
        self, data_loader: Any, device_placement: bool | None = None, slice_fn_for_dispatch: Any = None
    ) -> Any:
        """A loader of this rank's rows, which are as long as those of the others."""
        if getattr(data_loader, "_is_accelerate_prepared", False):
            return super().prepare_data_loader(data_loader, device_placement, slice_fn_for_dispatch)
        if not self._readers.is_shared:
            prepared = super().prepare_data_loader(data_loader, device_placement, slice_fn_for_dispatch)
            return self._alike(prepared)
        prepared = prepare_data_loader(
            data_loader,
            self.device,
            num_processes=self._readers.size,
            process_index=self._readers.place,
            split_batches=self.split_batches,
            put_on_device=self.device_placement if device_placement is None else device_placement,
            rng_types=self.rng_types.copy(),
            dispatch_batches=False,  # rank 0 would send rows to each rank
            even_batches=self.even_batches,
            use_seedable_sampler=self.use_seedable_sampler,
            data_seed=self.dataloader_config.data_seed,
            non_blocking=self.non_blocking,
            use_stateful_dataloader=self.use_stateful_dataloader,
        )
        self._dataloaders.append(prepared)
        return self._alike(prepared)

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """A loader that begins later."""
        later = super().skip_first_batches(dataloader, num_batches)
        return self._alike(later) if getattr(dataloader, "_is_accelerate_prepared", False) else later

    def _alike(self, loader: Any) -> Any:
        """A loader whose batches are as long on all ranks, where each collates its own."""
        if self._readers.size > 1 and isinstance(loader, DataLoaderShard):
            loader.base_dataloader = AlikeBatches(loader.base_dataloader, self._mesh, self._models)
        return loader

    def prepare_scheduler(self, scheduler: Any) -> AcceleratedScheduler:
        """A schedule that steps when the optimizer does."""
        if not self._readers.is_shared or self.split_batches or isinstance(scheduler, AcceleratedScheduler):
            return super().prepare_scheduler(scheduler)
        own = [x for x in self._optimizers if x.optimizer is getattr(scheduler, "optimizer", None)]
        schedule = _Schedule(
            scheduler, own[0] if own else self._optimizers, self.step_scheduler_with_optimizer, True
        )
        schedule.readers = self._readers.size if self.step_scheduler_with_optimizer else 1
        self._schedulers.append(schedule)
        return schedule

    def unwrap_model(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """The plain model. Its parameters lie as the plan says; ``get_state_dict(model)`` has whole ones."""
        if isinstance(model, EngineModule):
            return model.module
        return super().unwrap_model(model, *args, **kwargs)

    def get_state_dict(self, model: Any, unwrap: bool = True) -> Any:
        """With plain whole tensors (a collective). A model that was unwrapped is known as well."""
        of = next((known for known in self._models if model in (known, known.module)), None)
        return super().get_state_dict(model, unwrap) if of is None else of.state_dict()

    def save_model(self, model: Any, *args: Any, **kwargs: Any) -> None:
        """Write the model's whole weights (a collective)."""
        if isinstance(model, EngineModule):  # parameters of other stages have no memory here
            model = _Whole(model.state_dict())
        super().save_model(model, *args, **kwargs)

    @staticmethod
    def trigger_sync_in_backward(model: Any) -> AbstractContextManager[None]:
        """While open, a backward pass sums gradients over the ranks within :meth:`no_sync`, too."""
        if not isinstance(model, EngineModule) or model.engine.plan.pipe > 1:
            return nullcontext()
        return model.engine.passes.one_by_one("trigger_sync_in_backward").syncing(True)

    def join_uneven_inputs(self, joinables: Any, even_batches: bool | None = None) -> Any:
        """Refused: ranks call the model equally often.

        Raises:
            MistakeError: always.
        """
        reason = "prepared loaders give every rank as many batches (even_batches=True): leave it out"
        refuse("Accelerator", [("join_uneven_inputs", "...", reason)])

    def backward(self, loss: Any, **kwargs: Any) -> None:
        """As ever; in a pipeline the model runs here."""
        with _one_process():
            super().backward(loss, **kwargs)

    # ---- values of all ranks: of each that reads rows

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """This rank's part of inputs; ranks that share a model's layers have the same."""
        if not self._readers.is_shared:
            with super().split_between_processes(inputs, apply_padding) as part:
                yield part
            return
        state = PartialState()
        before = state.num_processes, state.process_index
        state.num_processes, state.process_index = self._readers.size, self._readers.place
        try:
            with state.split_between_processes(inputs, apply_padding) as part:
                state.num_processes, state.process_index = before
                yield part
        finally:
            state.num_processes, state.process_index = before

    def check_trigger(self) -> bool:
        """Whether any rank has set the trigger; then it is set no more (a collective)."""
        flag: Any = getattr(self, "flag_tensor", None)
        is_set = flag is not None and bool(flag.item())
        if not any_says(is_set, self._mesh):
            return False
        self.flag_tensor = None
        return True

    def gather(self, tensor: Any) -> Any:
        """The rows of all ranks, one behind the other; those of ranks that share a batch once."""
        return self._each_once(super().gather(whole_values(tensor, "gather")))

    def _each_once(self, gathered: Any) -> Any:
        if not self._readers.is_shared:
            return gathered

        def chosen(x: torch.Tensor) -> torch.Tensor:
            parts = x.chunk(self._mesh.size())
            return torch.cat([parts[i] for i in self._readers.firsts])

        return recursively_apply(chosen, gathered)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """As :meth:`gather`, without the rows that fill up the last batch; objects too."""
        input_data = whole_values(input_data, "gather_for_metrics")
        if not self._readers.is_shared:
            return super().gather_for_metrics(input_data, use_gather_object)
        try:
            recursively_apply(lambda x: x, input_data, error_on_other_type=True)
            is_plain = use_gather_object
        except TypeError:
            is_plain = True
        if is_plain:
            of_all = gather_objects(input_data, self._mesh)
            gathered: Any = [x for i in self._readers.firsts for x in of_all[i]]
        else:
            gathered = self.gather(input_data)
        rest = self.gradient_state.remainder if self.gradient_state.end_of_dataloader else -1
        if rest <= 0:
            return gathered
        return gathered[:rest] if is_plain else recursively_apply(lambda x: x[:rest], gathered)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """The sum or mean of all ranks' tensors; of ranks that share a batch one counts."""
        reduced = super().reduce(tensor, reduction, scale)
        if not self._readers.is_shared or reduction != "sum":
            return reduced
        return recursively_apply(self._readers.one_of_each, reduced)


def whole_values(values: Any, call: str) -> Any:
    """Parameters, and what is made of them, as plain whole tensors: c10d would send this rank's pieces."""

    def plain(x: Any) -> Any:
        x = x._value() if isinstance(x, Awaited) else x  # of a pipeline: what comes of all stages
        return everywhere(call, x) if isinstance(x, DTensor) else x

    return tree_map(plain, values)


def autocast_of(mixed_precision: str) -> dict[str, Any] | None:
    """A plan's precision of what accelerate calls mixed precision; accelerate scales losses itself."""
    if mixed_precision not in _LOW:
        return None
    fixed = {"loss_scale": {"init_scale": 1.0, "growth_factor": 1.0}} if mixed_precision == "fp16" else {}
    return {"compute": f"autocast-{_LOW[mixed_precision]}", **fixed}


def _of_fsdp(plugin: Any, mistakes: list[Any]) -> dict[str, Any]:
    """What accelerate's FSDP is asked for, as keys of a plan."""
    if plugin is None:
        return {}
    if plugin.ignored_modules:
        mistakes.append(
            ("fsdp_plugin.ignored_modules", "...", "all parameters are the engine's: leave it out")
        )
    strategy = plugin.reshard_after_forward
    if plugin.fsdp_version == 1 and plugin.sharding_strategy is not None:
        strategy = plugin.sharding_strategy
    said = sharding_of(strategy, plugin.cpu_offload)
    policy = plugin.mixed_precision_policy
    if policy is not None:
        said["precision"] = precision_of(policy.param_dtype, policy.reduce_dtype)
    if plugin.activation_checkpointing:
        said["recompute"] = "full"
        if getattr(plugin, "activation_checkpointing_offload", False):  # accelerate has it since 1.15
            said["recompute_inputs"] = "host"
    return said


def _of_axes(config: Any) -> dict[str, Any]:
    """accelerate's axes, as keys of a plan."""
    if config is None:
        return {}
    sizes = {
        "replicate": config.dp_replicate_size,
        "data": config.dp_shard_size,
        "tensor": config.tp_size,
        "context": math.prod((config.cp_size, config.sp_size)),
    }
    said: dict[str, Any] = {name: n for name, n in sizes.items() if n and n > 1}
    if "data" not in said and "replicate" in said:
        said["data"] = said.pop("replicate")
    elif "data" in said:
        said["zero"] = 3
    return said


def _of_handlers(handlers: Any, mistakes: list[Any]) -> dict[str, Any]:
    """What DistributedDataParallel is asked for, as keys of a plan."""
    said: dict[str, Any] = {}
    for handler in handlers:
        if not isinstance(handler, DistributedDataParallelKwargs):
            continue
        if handler.bucket_cap_mb != DistributedDataParallelKwargs().bucket_cap_mb:
            said["chunk_megabytes"] = float(handler.bucket_cap_mb)
        hook = str(handler.comm_hook.value)
        if hook in _HOOKS:
            said["precision"] = {"reduce": _HOOKS[hook]}
        elif hook != "no":
            mistakes.append(
                ("comm_hook", hook, "gradients are summed by the engine: expected no, fp16 or bf16")
            )
    return said


def __getattr__(name: str) -> Any:
    return getattr(accelerate, name)


__all__ = ["Accelerator"]
