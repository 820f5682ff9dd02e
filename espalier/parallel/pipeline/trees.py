"""Arguments and outputs of modules as trees: whatever containers they come in."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch


class Ref(NamedTuple):
    """A value of a trace, in the place of the tensor."""

    number: int


class Part:
    """A module of the model, in its place: one that is given to another module.

    Attributes:
        name: the module's.
    """

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


_MEANT = (torch.Tensor, Ref)


def mapped(fn: Callable[[Any], Any], tree: Any) -> Any:
    """``fn`` on every leaf of tuples, lists, dicts, dataclasses and slices, also within one another.

    A container of a class of its own (a named tuple, transformers' ``ModelOutput``) is copied with what is
    in it changed. What is nothing of that is a leaf.
    """
    if isinstance(tree, torch.Tensor | torch.Size | str | Ref):
        return fn(tree)
    if isinstance(tree, dict):
        if type(tree) is dict:
            return {k: mapped(fn, v) for k, v in tree.items()}
        other = copy.copy(tree)
        for k, v in tree.items():
            other[k] = mapped(fn, v)
        return other
    if isinstance(tree, tuple | list):
        parts = [mapped(fn, x) for x in tree]
        return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
    if isinstance(tree, slice):
        return slice(mapped(fn, tree.start), mapped(fn, tree.stop), mapped(fn, tree.step))
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type) and leaves(tree, _MEANT):
        changed = copy.copy(tree)
        for field in dataclasses.fields(tree):
            object.__setattr__(changed, field.name, mapped(fn, getattr(tree, field.name)))
        return changed
    return fn(tree)


def leaves(tree: Any, kind: type | tuple[type, ...] = object) -> list[Any]:
    """The leaves of a kind, in the order of :func:`mapped`."""
    if isinstance(tree, torch.Tensor | torch.Size | str | Ref):
        return [tree] if isinstance(tree, kind) else []
    if isinstance(tree, dict):
        return [x for v in tree.values() for x in leaves(v, kind)]
    if isinstance(tree, tuple | list):
        return [x for v in tree for x in leaves(v, kind)]
    if isinstance(tree, slice):
        return [x for v in (tree.start, tree.stop, tree.step) for x in leaves(v, kind)]
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        found = [x for f in dataclasses.fields(tree) for x in leaves(getattr(tree, f.name), object)]
        if any(isinstance(x, _MEANT) for x in found):
            return [x for x in found if isinstance(x, kind)]
    return [tree] if isinstance(tree, kind) else []


def called(model: Callable[..., Any], batch: Any) -> Any:
    """What a model gives for a batch: a dict (keywords), a tuple or list, or one value."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple | list) else model(batch)
