"""``deepspeed.utils``: what training programs take from there."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

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
from espalier.mesh.process import running_rank
from espalier.tensor import deferred

logger = logging.getLogger("deepspeed")


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log on some ranks; by default on all."""
    rank = running_rank()
    if not ranks or -1 in ranks or rank in ranks:
        logger.log(level, "[Rank %d] %s", rank, message)


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


# ---- stage 3 gathers parameters where they are used: that a module is to be gathered as one is only noted

_LEAF = "_z3_leaf"


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type[nn.Module] | str]
) -> list[nn.Module]:
    """The modules of these classes; it has no effect, as parameters are gathered where they are used."""
    return _of_classes(model, leaf_module_classes, True)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type[nn.Module] | str]
) -> list[nn.Module]:
    """The modules of these classes; nothing is set."""
    return _of_classes(model, leaf_module_classes, False)


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Note it of one module."""
    setattr(model, _LEAF, flag)


def z3_leaf_module(model: nn.Module) -> bool:
    """Whether it is noted."""
    return bool(getattr(model, _LEAF, False))


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """All of which it is."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def z3_leaf_parameter(parameter: nn.Parameter) -> bool:
    """No parameter is gathered with others."""
    return False


def _of_classes(model: nn.Module, kinds: Sequence[type[nn.Module] | str], flag: bool) -> list[nn.Module]:
    names = {x if isinstance(x, str) else x.__name__ for x in kinds}
    found = [module for module in model.modules() if names & {kind.__name__ for kind in type(module).__mro__}]
    for module in found:
        set_z3_leaf_module(module, flag)
    return found


__all__ = [
    "OnDevice",
    "RepeatingLoader",
    "get_z3_leaf_modules",
    "groups",
    "instrument_w_nvtx",
    "log_dist",
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
    "tensors",
    "timer",
    "unset_z3_leaf_modules",
    "z3_leaf_module",
    "z3_leaf_parameter",
]

_WHOLE = "safe_get_full_fp32_param(p), safe_get_full_grad(p) and their kin give whole values"

__getattr__ = or_absent(
    __name__,
    "deepspeed.utils",
    {
        "tensor_fragment fragment_address get_full_hp_param set_full_hp_param get_full_hp_grad "
        "set_full_hp_grad get_hp_fragment_mapping map_to_flat_opt_states link_hp_params": _WHOLE,
        "get_numactl_cmd": "torchrun and numactl start ranks beside their memory",
        "set_z3_leaf_modules_by_name set_z3_leaf_modules_by_suffix": "leave it out: parameters are gathered "
        "where they are used",
    },
    lambda name: getattr(groups, name),
)
