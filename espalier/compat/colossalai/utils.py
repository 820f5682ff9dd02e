"""``colossalai.utils``: loaders of a rank's rows, and small things that programs take from there."""

from __future__ import annotations

import argparse
import functools
import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, cast

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as _checkpoint
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

from espalier.compat.absent import or_absent
from espalier.compat.colossalai.accelerator import get_accelerator
from espalier.compat.colossalai.config import ParallelMode, plan_of
from espalier.compat.colossalai.core import global_context
from espalier.compat.common import make_folder_of as ensure_path_exists  # noqa: F401
from espalier.compat.common import seed_all as set_seed  # noqa: F401
from espalier.device import accelerator, current
from espalier.engine.seen import gradients_seen
from espalier.mesh.mesh import coordinate_at, place_at
from espalier.mesh.process import running_rank, running_size
from espalier.parallel import Plan
from espalier.texts import refuse


def get_default_parser() -> argparse.ArgumentParser:
    """A parser that knows ``--config`` and what ``launch`` takes."""
    parser = argparse.ArgumentParser()
    for name, kind in (("config", str), ("host", str), ("port", int), ("world_size", int), ("rank", int)):
        parser.add_argument(f"--{name}", type=kind)
    parser.add_argument("--local_rank", type=int)
    parser.add_argument("--backend", type=str, default=None)
    return parser


def get_dataloader(
    dataset: Dataset[Any],
    shuffle: bool = False,
    seed: int = 1024,
    add_sampler: bool = True,
    drop_last: bool = False,
    pin_memory: bool = False,
    num_workers: int = 0,
    **options: Any,
) -> DataLoader[Any]:
    """A loader of this rank's rows, under the plan of the configuration that ``launch`` was given.

    ``batch_size`` counts, as there, the rows of all ranks that share a model.

    Args:
        add_sampler: else it gives the same to all ranks.
    """
    options |= {"drop_last": drop_last, "pin_memory": pin_memory, "num_workers": num_workers}
    if not add_sampler:
        return DataLoader(dataset, shuffle=shuffle, **options)
    ranks, rank = running_size(), running_rank()
    plan = plan_of(global_context.config, ranks)
    share, here = share_of(plan, rank)
    among, size = share // plan.data, options.get("batch_size", 1)
    if size % among:
        raise ValueError(
            f"get_dataloader(batch_size={size}): expected a multiple of {among}, as {plan} cuts it so."
        )
    options["batch_size"] = size // among
    return DataLoader(dataset, sampler=sampler_of(dataset, share, here, shuffle, seed, drop_last), **options)


def share_of(plan: Plan, rank: int) -> tuple[int, int]:
    """How many ranks share the batch, and which of them a rank is.

    Those are the ranks of the data axis; under 2D, 2.5D and 3D the tensor axes that cut rows share it too.
    """
    places = dict(zip(plan.axes, coordinate_at(rank, [*plan.axes.values()]), strict=True))
    sizes = [plan.axes[name] for name in plan.batch_axes]
    return math.prod(sizes), place_at((places[name] for name in plan.batch_axes), sizes)


def sampler_of(
    dataset: Dataset[Any], share: int, here: int, shuffle: bool, seed: int, drop_last: bool
) -> DistributedSampler[Any]:
    """Which rows a rank loads."""
    return DistributedSampler(
        cast(Any, dataset), num_replicas=share, rank=here, shuffle=shuffle, seed=seed, drop_last=drop_last
    )


def get_current_device() -> torch.device:
    """This process's."""
    return current(accelerator() or "cpu")


def is_dp_rank_0() -> bool:
    """Whether this rank has the first rows of a batch."""
    ranks, rank = running_size(), running_rank()
    return share_of(plan_of(global_context.config, ranks), rank)[1] == 0


def is_tp_rank_0() -> bool:
    """Whether this rank is the first of those that share each layer."""
    return global_context.is_first_rank(ParallelMode.TENSOR)


def is_no_pp_or_last_stage() -> bool:
    """Whether this rank has the end of the model."""
    return global_context.is_pipeline_last_stage()


def is_using_ddp() -> bool:
    """Whether several ranks share the batch."""
    return global_context.data_parallel_size > 1


def is_using_pp() -> bool:
    """Whether the model is cut into stages."""
    return global_context.pipeline_parallel_size > 1


def is_using_sequence() -> bool:
    """Whether sequences are cut."""
    return global_context.get_world_size(ParallelMode.SEQUENCE) > 1


def print_rank_0(msg: Any, logger: Any = None) -> None:
    """Print, or log, on the first rank."""
    if running_rank() == 0:
        print(msg, flush=True) if logger is None else logger.info(msg)


def sync_model_param(model: nn.Module, parallel_mode: Any = None) -> None:
    """Nothing: all ranks take rank 0's parameters."""


def checkpoint(
    function: Callable[..., Any], activation_offload: bool, *args: Any, use_reentrant: bool = True
) -> Any:
    """Call a function whose inside the backward pass computes again.

    Args:
        activation_offload: expected False; ``Plan(recompute_inputs="host")`` keeps inputs in the host's
            memory.
        use_reentrant: no effect: what is within is seen by autograd.
    """
    if activation_offload:
        expected = 'expected False: Plan(recompute="full", recompute_inputs="host") says it'
        refuse("checkpoint", [("activation_offload", activation_offload, expected)])
    return _checkpoint(function, *args, use_reentrant=False)


def clip_grad_norm_fp32(
    parameters: Iterable[torch.Tensor] | torch.Tensor, max_norm: float, norm_type: float = 2
) -> torch.Tensor:
    """``torch.nn.utils.clip_grad_norm_``, which sees whole gradients."""
    return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)


def count_zeros_fp32(parameters: Iterable[torch.Tensor] | torch.Tensor) -> int:
    """Elements of gradients that are 0."""
    return int(sum((grad == 0).sum() for grad in gradients_seen(parameters)))


# ---- memory


def colo_device_memory_capacity(device: torch.device) -> int:
    """Bytes that a device has; of the CPU, that the host has."""
    return get_accelerator().total_memory(device.index if device.type != "cpu" else None)


def colo_device_memory_used(device: torch.device) -> int:
    """Bytes of tensors on a device; 0 on the CPU, whose allocator does not count."""
    return get_accelerator().memory_allocated(device.index)


def colo_set_process_memory_fraction(ratio: float) -> None:
    """The share of a device that this process may take; nothing on the CPU."""
    if get_accelerator().is_available():
        get_accelerator().set_per_process_memory_fraction(ratio)


def report_memory_usage(message: str, logger: Any = None, report_cpu: bool = False) -> None:
    """Print, or log, what is taken of the device."""
    device = get_accelerator()
    taken = [device.memory_allocated(), device.max_memory_allocated(), device.memory_reserved()]
    shown = ", ".join(
        f"{name} {size / 1024**2:.2f} MB"
        for name, size in zip(("allocated", "at most", "reserved"), taken, strict=True)
    )
    text = f"{message}: {shown}"
    print(text, flush=True) if logger is None else logger.info(text)


def synchronize() -> None:
    """Wait for the device."""
    get_accelerator().synchronize()


def empty_cache() -> None:
    """Give back what the device's allocator keeps."""
    get_accelerator().empty_cache()


def set_to_cuda(models: Any) -> Any:
    """A model, or each of a list, on the device."""
    return get_accelerator().set_to_device(models)


def free_storage(data: torch.Tensor) -> None:
    """Let a tensor's memory go."""
    data.untyped_storage().resize_(0)


# ---- small things


@contextmanager
def conditional_context(context_manager: AbstractContextManager[Any], enable: bool = True) -> Iterator[None]:
    """A context, or none."""
    if enable:
        with context_manager:
            yield
    else:
        yield


def disposable(func: Callable[..., Any]) -> Callable[..., Any]:
    """A function that is called once, and gives None then."""
    left = [func]

    @functools.wraps(func)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return left.pop()(*args, **kwargs) if left else None

    return wrapper


def is_ddp_ignored(p: torch.Tensor) -> bool:
    """Whether a program has marked a parameter so."""
    return bool(getattr(p, "_ddp_to_ignore", False))


class Timer:
    """Times from ``start`` to ``stop``, in seconds, with what the device is at done."""

    def __init__(self) -> None:
        self._begun, self._last, self._history = 0.0, 0.0, list[float]()

    @property
    def has_history(self) -> bool:
        """Whether one was kept."""
        return bool(self._history)

    @property
    def current_time(self) -> float:
        """Now."""
        synchronize()
        return time.perf_counter()

    def start(self) -> None:
        """Begin."""
        self._last, self._begun = 0.0, self.current_time

    def lap(self) -> float:
        """So far."""
        return self.current_time - self._begun

    def stop(self, keep_in_history: bool = False) -> float:
        """End."""
        self._last = self.lap()
        if keep_in_history:
            self._history.append(self._last)
        return self._last

    def get_history_mean(self) -> float:
        """Of those that were kept."""
        return sum(self._history) / len(self._history)

    def get_history_sum(self) -> float:
        """Of those that were kept."""
        return sum(self._history)

    def get_elapsed_time(self) -> float:
        """The last."""
        return self._last

    def reset(self) -> None:
        """Forget all."""
        self._last, self._history = 0.0, []


class MultiTimer:
    """Timers by name."""

    def __init__(self, on: bool = True) -> None:
        self._on, self._timers = on, dict[str, Timer]()

    def start(self, name: str) -> None:
        """Begin."""
        if self._on:
            self._timers.setdefault(name, Timer()).start()

    def stop(self, name: str, keep_in_history: bool = False) -> float | None:
        """End."""
        return self._timers[name].stop(keep_in_history) if self._on and name in self._timers else None

    def get_timer(self, name: str) -> Timer:
        """That one."""
        return self._timers[name]

    def get_elapsed_time(self, name: str) -> float:
        """The last, in seconds."""
        return self._timers[name].get_elapsed_time()

    def history(self, name: str) -> list[float]:
        """All that were kept, in seconds."""
        return [*self._timers[name]._history] if name in self._timers else []

    def reset(self, name: str | None = None) -> None:
        """Forget one's times, or all."""
        for key, timer in self._timers.items():
            if self._on and name in (None, key):
                timer.reset()

    def is_on(self) -> bool:
        """Whether it counts."""
        return self._on

    def set_status(self, mode: bool) -> None:
        """Whether it is to count."""
        self._on = mode

    def __iter__(self) -> Iterator[tuple[str, Timer]]:
        return iter(self._timers.items())


_SAVES = "booster.save_model, or engine.engine.save(folder), writes checkpoints"
__getattr__ = or_absent(
    __name__,
    "colossalai.utils",
    {
        "checkpoint checkpoint_io checkpointing": _SAVES,
        "moe": "Plan(expert=n) finds experts in the model",
        "profiler rank_recorder": "torch.profiler sees all; engine.ledger counts bytes",
        "safetensors": "booster.save_model(..., use_safetensors=True) writes them",
        "tensor_detector": "`espalier plan` tells of the memory of parameters, gradients and states",
        "save_checkpoint load_checkpoint": _SAVES,
        "DataParallelSampler BaseSampler": "utils.get_dataloader loads this rank's rows",
        "multi_tensor_applier MultiTensorApply": "torch._foreach functions work on lists of tensors",
        "free_port": "`espalier run` finds a port",
        "TensorDetector": "`espalier plan` tells of the memory of parameters, gradients and states",
        "copy_tensor_parallel_attributes is_model_parallel_parameter "
        "param_is_not_tensor_parallel_duplicate": "parameters know how they lie: p.layout",
        "switch_virtual_pipeline_parallel_rank": "stages are the plan's",
        "colo_get_cpu_memory_capacity colo_set_cpu_memory_capacity": "Plan(offload=) says where state lies",
        "get_non_persistent_buffers_set": "module.state_dict() leaves them out",
        "compute_grad_norm clip_grad_norm": "torch.nn.utils.clip_grad_norm_ sees whole gradients",
    },
    elsewhere={
        "activation_checkpoint base_sampler common cuda data_parallel_sampler data_sampler memory model "
        "multi_tensor_apply timer utils": __name__,
        "colo_init_context experimental lazy_init_context": "espalier.compat.colossalai.zero",
    },
)
