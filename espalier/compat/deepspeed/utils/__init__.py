"""``deepspeed.utils``: what training programs take from there."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import cache
from typing import Any

import torch
from torch import nn

from espalier.compat.absent import or_absent
from espalier.compat.deepspeed import groups, timers
from espalier.compat.deepspeed.utils import tensors
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


_LEAF = "_z3_leaf"


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type[nn.Module] | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """The modules of these classes; it has no effect, as parameters are gathered where they are used.

    Raises:
        ValueError: there is none, unless ``raise_if_not_found`` is false.
    """
    return _of_classes(model, leaf_module_classes, True, raise_if_not_found)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type[nn.Module] | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """The modules of these classes; nothing is set.

    Raises:
        ValueError: there is none, unless ``raise_if_not_found`` is false.
    """
    return _of_classes(model, leaf_module_classes, False, raise_if_not_found)


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Iterable[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """The modules of these names, and the names of which there is none.

    Raises:
        ValueError: there are such, unless ``raise_if_not_found`` is false.
    """
    return _of_names(model, module_names, str.__eq__, flag, raise_if_not_found)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Iterable[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """The modules whose names end so, and the endings of which there is none.

    Raises:
        ValueError: there are such, unless ``raise_if_not_found`` is false.
    """
    return _of_names(model, module_name_suffixes, str.endswith, flag, raise_if_not_found)


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


def _of_classes(
    model: nn.Module, kinds: Sequence[type[nn.Module] | str], flag: bool, must: bool
) -> list[nn.Module]:
    names = {x if isinstance(x, str) else x.__name__ for x in kinds}
    found = [module for module in model.modules() if names & {kind.__name__ for kind in type(module).__mro__}]
    if must and not found:
        raise ValueError(f"set_z3_leaf_modules: the model has no module of {', '.join(sorted(names))}.")
    for module in found:
        set_z3_leaf_module(module, flag)
    return found


def _of_names(
    model: nn.Module, words: Iterable[str], fits: Callable[[str, str], bool], flag: bool, must: bool
) -> tuple[list[nn.Module], list[str]]:
    named, missing = dict(model.named_modules()), []
    modules: dict[str, nn.Module] = {}
    for word in words:
        found = {name: module for name, module in named.items() if fits(name, word)}
        if not found:
            missing.append(word)
        modules |= found
    if missing and must:
        raise ValueError(f"set_z3_leaf_modules: no module of the model is named {', '.join(missing)}.")
    for module in modules.values():
        set_z3_leaf_module(module, flag)
    return list(modules.values()), missing


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
        "LoggerFactory get_current_level get_dist_msg get_log_level_from_string print_configuration "
        "print_dist print_json_dist should_log_le warning_once": (
            'logging is Python\'s own: logging.getLogger("deepspeed"), and log_dist(message, ranks)'
        ),
        "apply_zero_leaf_module_config": "leave it out: parameters are gathered where they are used",
    },
    lambda name: getattr(groups, name),
    elsewhere={
        "init_on_device logging nvtx z3_leaf_module": __name__,
        "groups": groups.__name__,
        "tensor_fragment": tensors.__name__,
        "timer": timers.__name__,
    },
)
