"""Arguments and outputs of modules as trees: whatever containers they come in."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import nn

from espalier.blocks import parameters_in
from espalier.trees import leaves as leaves_of
from espalier.trees import tree_map


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


_SOUGHT = (torch.Tensor, Ref)


def mapped(fn: Callable[[Any], Any], tree: Any) -> Any:
    """``fn`` on every leaf of tuples, lists, dicts, slices, and dataclasses that hold tensors."""
    return tree_map(fn, tree, _SOUGHT)


def refilled(tree: Any, tensors: Iterable[Any]) -> Any:
    """The same with others in the place of its tensors, in their order."""
    remaining = iter(tensors)
    return mapped(lambda x: next(remaining) if isinstance(x, torch.Tensor) else x, tree)


def leaves(tree: Any, kind: type | tuple[type, ...] = object) -> list[Any]:
    """The leaves of a kind, in the order of :func:`mapped`."""
    return leaves_of(tree, kind, _SOUGHT)


def cloned(tree: Any) -> Any:
    """The same, of tensors that may be written to."""
    return mapped(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, tree)


def floats_as_parameters(module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Inputs of a module in the dtype of its parameters, for a hook before its forward."""
    dtype = next((p.dtype for p in parameters_in(module) if p.is_floating_point()), None)

    def cast(x: Any) -> Any:
        is_float = isinstance(x, torch.Tensor) and x.is_floating_point() and dtype is not None
        return x.to(dtype) if is_float else x

    return tree_map(cast, args), tree_map(cast, kwargs)
