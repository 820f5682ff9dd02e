"""``deepspeed.utils.z3_leaf_module``: modules that stage 3 is to gather as one.

Parameters are gathered where they are used, so that it is only noted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torch import nn

from espalier.compat.absent import or_absent

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
    "get_z3_leaf_modules",
    "set_z3_leaf_module",
    "set_z3_leaf_modules",
    "set_z3_leaf_modules_by_name",
    "set_z3_leaf_modules_by_suffix",
    "unset_z3_leaf_modules",
    "z3_leaf_module",
    "z3_leaf_parameter",
]

__getattr__ = or_absent(
    __name__,
    "deepspeed.utils.z3_leaf_module",
    {"apply_zero_leaf_module_config": "leave it out: parameters are gathered where they are used"},
)
