"""Arguments and outputs of modules as trees: whatever containers they come in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

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


def leaves(tree: Any, kind: type | tuple[type, ...] = object) -> list[Any]:
    """The leaves of a kind, in the order of :func:`mapped`."""
    return leaves_of(tree, kind, _SOUGHT)


def called(model: Callable[..., Any], batch: Any) -> Any:
    """What a model gives for a batch: a dict (keywords), a tuple or list, or one value."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple | list) else model(batch)
