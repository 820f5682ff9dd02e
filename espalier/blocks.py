"""The blocks of a model, between which it may be cut, gathered, or computed again; and calls around them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial, wraps
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import nn

from espalier.torch_private import parameters_within

Call = Callable[[Any, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]

_UNCALLED = (nn.ModuleList, nn.ModuleDict)  # their elements are called
_LISTS = (*_UNCALLED, nn.Sequential)


def parameters_in(module: nn.Module) -> Iterator[nn.Parameter]:
    """The parameters of a module and of all in it, also where its ``parameters()`` gives fewer.

    In the order of :func:`named_parameters_in`, and sooner: steps ask for them several times.
    """
    return iter(parameters_within(module))


def named_parameters_in(
    module: nn.Module, *, remove_duplicate: bool = True
) -> Iterator[tuple[str, nn.Parameter]]:
    """The same by name, as in a state dict, also where its ``named_parameters()`` gives other names."""
    return nn.Module.named_parameters(module, remove_duplicate=remove_duplicate)


def named_tensors_in(model: nn.Module, *, remove_duplicate: bool = True) -> list[tuple[str, torch.Tensor]]:
    """The parameters and buffers of a module and of all in it, by name as above."""
    buffers = nn.Module.named_buffers(model, remove_duplicate=remove_duplicate)
    return [*named_parameters_in(model, remove_duplicate=remove_duplicate), *buffers]


class Arguments(NamedTuple):
    """What a model is called with where some arguments can have no name, and others have one."""

    args: tuple[Any, ...]
    named: dict[str, Any]


def called(model: Callable[..., Any], batch: Any) -> Any:
    """What a model gives for a batch: a dict (keywords), a tuple or list, :class:`Arguments`, one value."""
    if isinstance(batch, Arguments):
        return model(*batch.args, **batch.named)
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple | list) else model(batch)


def units(model: nn.Module) -> list[nn.Module]:
    """The modules whose parameters are gathered together while their forward runs, in order.

    They are the elements of the outermost lists of blocks, and what stands beside these lists. A module
    that is divided so is a unit for the parameters that are its own.
    """
    gathered_together: list[nn.Module] = []

    def visit(module: nn.Module) -> None:
        if not _has_blocks(module):
            gathered_together.append(module)
            return
        if any(True for _ in module.parameters(recurse=False)):
            gathered_together.append(module)
        for child in module.children():
            if not any(True for _ in parameters_in(child)):
                continue
            if isinstance(module, _LISTS):
                gathered_together.append(child)
            else:
                visit(child)

    visit(model)
    return gathered_together


def blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The elements of the outermost lists of blocks, by name; those without parameters are left out."""
    by_name: dict[str, nn.Module] = {}

    def visit(module: nn.Module, prefix: str) -> None:
        for name, child in module.named_children():
            if not any(True for _ in parameters_in(child)):
                continue
            if isinstance(module, _LISTS):
                by_name[prefix + name] = child
            else:
                visit(child, f"{prefix}{name}.")

    visit(model, "")
    return by_name


def parts(model: nn.Module) -> dict[str, nn.Module]:
    """The :func:`blocks`, by name; of a model without lists its children that have parameters.

    A module with one such child is taken for a wrapper of it; a model that has none is one part, named "".
    """
    return blocks(model) or _children(model)


def segments(model: nn.Module) -> dict[str, nn.Module]:
    """Modules that are called and between which little is kept, by name.

    They are the :func:`parts`; where all of these are single layers, in lists, what the lists stand in, but
    for lists that nobody calls, whose elements are.
    """
    called = parts(model)
    if isinstance(model, _LISTS) or any(_with_parameters(m) for m in called.values()):
        return called
    children = _children(model)
    outer = {name: m for name, m in children.items() if not isinstance(m, _UNCALLED)}
    if not any(_with_parameters(m) for m in outer.values()):
        return called
    return outer | {
        name: m for name, m in called.items() if name.rpartition(".")[0] in children.keys() - outer
    }


def _children(model: nn.Module) -> dict[str, nn.Module]:
    prefix, inner = "", _with_parameters(model)
    while len(inner) == 1:
        ((name, child),) = inner.items()
        if not _with_parameters(child):
            break
        prefix, inner = f"{prefix}{name}.", _with_parameters(child)
    return {prefix + name: child for name, child in inner.items()} or {"": model}


def _with_parameters(module: nn.Module) -> dict[str, nn.Module]:
    return {name: m for name, m in module.named_children() if any(True for _ in parameters_in(m))}


def _has_blocks(module: nn.Module) -> bool:
    for m in module.modules():
        if isinstance(m, _LISTS) and sum(any(True for _ in parameters_in(c)) for c in m.children()) > 1:
            return True
    return False


def around(module: nn.Module, call: Call) -> Callable[[], None]:
    """Let ``call(module, own, args, kwargs)`` stand for a module's ``forward``, in place.

    ``own`` is what stood there before: of several calls the one put there last is outermost. So in an engine
    stand, from the outside in: recomputation, where sequences are cut, branches, the exchange of experts.

    The module's hooks stay outside of all. A copy of the module has the calls around its own ``forward``,
    a pickle of it none.

    Returns:
        What takes it away again; what was put around later goes first.
    """
    before: Any = vars(module).get("forward")
    is_method = isinstance(before, MethodType) and before.__self__ is module
    inner = before.__func__ if is_method else before

    @wraps(type(module).forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if inner is None:
            module_forward = partial(type(self).forward, self)
        else:
            module_forward = partial(inner, self) if is_method else inner
        return call(self, module_forward, args, kwargs)

    def undo() -> None:
        if before is None:
            del module.forward
        else:
            module.forward = before

    forward._in_place_of = before  # type: ignore[attr-defined]
    # a method, so that a copy of the module gets one of its own
    module.forward = MethodType(forward, module)
    return undo


def as_it_was(module: nn.Module) -> None:
    """Take all calls away that :func:`around` has put around a module's own ``forward``; of a copy, too."""
    while hasattr(put := vars(module).get("forward", module), "_in_place_of"):
        before: Any = put._in_place_of
        del module.forward
        if before is not None:
            is_method = isinstance(before, MethodType)
            module.forward = MethodType(before.__func__, module) if is_method else before
