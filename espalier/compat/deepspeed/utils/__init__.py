"""``deepspeed.utils``: what training programs take from there."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import cache
from typing import Any

import torch

from espalier.compat.absent import or_absent
from espalier.compat.deepspeed.utils import groups, tensors, timer
from espalier.compat.deepspeed.utils.tensors import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_grad,
    safe_set_local_optimizer_state,
    safe_update_full_grad_vectorized,
)
from espalier.compat.deepspeed.utils.z3_leaf_module import (
    get_z3_leaf_modules,
    set_z3_leaf_module,
    set_z3_leaf_modules,
    set_z3_leaf_modules_by_name,
    set_z3_leaf_modules_by_suffix,
    unset_z3_leaf_modules,
    z3_leaf_module,
    z3_leaf_parameter,
)
from espalier.mesh.process import running_rank
from espalier.tensor import deferred

logger = logging.getLogger("deepspeed")


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log on some ranks; by default on all."""
    rank = running_rank()
    if not ranks or -1 in ranks or rank in ranks:
        logger.log(level, "[Rank %d] %s", rank, message)


def log_dist_once(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """:func:`log_dist`, of each message once."""
    _log_once(message, None if ranks is None else tuple(ranks), level)


@cache
def _log_once(message: str, ranks: tuple[int, ...] | None, level: int) -> None:
    log_dist(message, ranks, level)


class RepeatingLoader:
    """A loader that begins anew when it ends."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self.data_iter: Iterator[Any] = iter(loader)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return next(self.data_iter)
        except StopIteration:
            self.data_iter = iter(self.loader)
            return next(self.data_iter)


def set_log_level_from_string(log_level_str: str, custom_logger: logging.Logger | None = None) -> None:
    """``"info"``, say, for DeepSpeed's logger."""
    (custom_logger or logger).setLevel(log_level_str.upper())


def instrument_w_nvtx(func: Callable[..., Any]) -> Callable[..., Any]:
    """The function: ``torch.profiler`` marks what is called."""
    return func


class OnDevice:
    """While open, modules are built in a dtype and on a device; on ``"meta"`` without memory.

    What is built without memory draws its values when ``deepspeed.initialize`` or ``init_inference`` lays it
    out, each rank its part.

    Args:
        enabled: else it does nothing.
    """

    def __init__(self, dtype: torch.dtype, device: Any = "meta", enabled: bool = True) -> None:
        self._dtype, self._device, self._enabled = dtype, device, enabled
        self._stack = ExitStack()

    def __enter__(self) -> None:
        if not self._enabled:
            return
        before = torch.get_default_dtype()
        if self._dtype.is_floating_point:
            torch.set_default_dtype(self._dtype)
            self._stack.callback(torch.set_default_dtype, before)
        is_meta = torch.device(self._device).type == "meta"
        self._stack.enter_context(deferred() if is_meta else torch.device(self._device))

    def __exit__(self, *error: Any) -> None:
        self._stack.close()


__all__ = [
    "OnDevice",
    "RepeatingLoader",
    "get_z3_leaf_modules",
    "groups",
    "instrument_w_nvtx",
    "log_dist",
    "log_dist_once",
    "logger",
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_get_local_fp32_param",
    "safe_get_local_grad",
    "safe_get_local_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
    "safe_set_local_fp32_param",
    "safe_set_local_grad",
    "safe_set_local_optimizer_state",
    "safe_update_full_grad_vectorized",
    "set_log_level_from_string",
    "set_z3_leaf_module",
    "set_z3_leaf_modules",
    "set_z3_leaf_modules_by_name",
    "set_z3_leaf_modules_by_suffix",
    "tensors",
    "timer",
    "unset_z3_leaf_modules",
    "z3_leaf_module",
    "z3_leaf_parameter",
]

__getattr__ = or_absent(
    __name__,
    "deepspeed.utils",
    {
        **tensors.FRAGMENTS,
        "link_hp_params lazy_init_hp_params_optimizer_state mixed_precision_linkage": tensors.WHOLE,
        "get_numactl_cmd numa": "torchrun and numactl start ranks beside their memory",
        "comms_logging get_caller_func": "engine.engine.ledger() tells what a step has sent",
        "pin_memory pin_memory_tracker": "get_accelerator().pin_memory(tensor), or tensor.pin_memory()",
        "module_utils recursive_getattr recursive_setattr": "model.get_submodule(name), get_parameter(name)",
        "bwc": "engine.plan says how many ranks share what",
        "torch": "torch.__version__ says it",
        "config debug exceptions static_cache types zero_to_torch": "it is DeepSpeed's own: leave it out",
    },
    lambda name: getattr(groups, name),
    elsewhere={"init_on_device nvtx": __name__, "tensor_fragment": tensors.__name__},
)
