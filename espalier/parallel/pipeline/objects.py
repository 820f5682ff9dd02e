"""Objects of other classes than containers in what a model gives or is given, with tensors: a cache, say.

Trees end at such an object. So that its tensors travel, and have gradients, as all of an output, it is taken
apart where an output comes from: into a list of tensors, and what is left of it; and put together where a
program gets it.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from espalier.parallel.pipeline.arguments import Ref, leaves, mapped
from espalier.trees import attributes, object_map, tree_map
from espalier.trees import leaves as leaves_of

PLAIN = (
    torch.Tensor, Ref, torch.Size, torch.dtype, torch.device, torch.layout, torch.memory_format,
    torch.Generator, nn.Module, str, bytes, int, float, complex, bool, type(None), type(Ellipsis), type,
)  # fmt: skip
_DEPTH = 4  # objects one within another


class Opened(NamedTuple):
    """An object whose tensors are beside it, in a container.

    Attributes:
        tensors: its own, each once.
        form: a copy of it with a :class:`_Hole` for each; other ranks take it by ``pickle``.
    """

    tensors: list[Any]
    form: Any


@dataclass(frozen=True)
class _Hole:
    number: int


def opened_inputs(tree: Any) -> Any:
    """What a model is given with its objects taken apart, dataclasses too: so their rows are seen."""
    if all(isinstance(x, PLAIN) for x in leaves_of(tree)):
        return tree
    return opened(tree, is_object=lambda x: _is_unsendable(x) or (is_dataclass(x) and holds_tensors(x)))


def opened(
    tree: Any,
    is_known: Callable[[torch.Tensor], bool] = lambda x: True,
    is_object: Callable[[Any], bool] | None = None,
) -> Any:
    """An output with its objects taken apart; those that cannot be, or have others than known ones, stay."""

    def one(x: Any) -> Any:
        if not (is_object or _is_unsendable)(x):
            # a distribution is not to be made anew for nothing, of other tensors
            return mapped(one, x) if any(map(_is_unsendable, leaves(x))) else x
        tensors: dict[int, torch.Tensor] = {}

        def hole(inner: torch.Tensor) -> _Hole:
            tensors.setdefault(id(inner), inner)
            return _Hole([*tensors].index(id(inner)))

        try:
            form = object_map(hole, x, torch.Tensor, _DEPTH, (nn.Module,))
            pickle.dumps(form)
        except Exception:  # classes say in ways of their own that they cannot be copied
            return x
        is_whole = not holds_tensors(form) and all(map(is_known, tensors.values()))
        return Opened([*tensors.values()], form) if is_whole else x

    return tree_map(one, tree)


def closed(tree: Any) -> Any:
    """An output with the objects that were taken apart."""

    def one(x: Any) -> Any:
        if not isinstance(x, Opened):
            return x
        return object_map(lambda hole: x.tensors[hole.number], x.form, _Hole, _DEPTH, (nn.Module,))

    return tree_map(one, tree, (Opened,))


def sendable(tree: Any) -> Any:
    """An output for other ranks; in its place an error, if it has tensors that cannot be sent."""
    for x in leaves(tree):
        if isinstance(x, Unsent):
            return x._error()
        if _is_unsendable(x):
            return Unsent(x)._error()
    return tree


def traced_output(tree: Any) -> Any:
    """The output of a trace; what has tensors that cannot be sent says so when it is used."""
    return mapped(lambda x: Unsent(x) if _is_unsendable(x) else x, tree)


def _is_unsendable(x: Any) -> bool:
    if isinstance(x, (Unsent, *PLAIN)):
        return False
    inner = leaves(x)
    return len(inner) == 1 and inner[0] is x and holds_tensors(x)


class Unsent:
    """Stands for an object in a model's output that is made of tensors in a way of its own."""

    def __init__(self, x: Any) -> None:
        self._kind = type(x).__name__

    def _error(self) -> TypeError:
        return TypeError(
            f"The model gives a {self._kind}, which holds tensors, and cannot be copied or pickled: in a "
            "pipeline it is not where other ranks are. Let the model give the tensors, in tuples, dicts or a "
            f"dataclass, and make the {self._kind} of them outside."
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise self._error()


def holds_tensors(x: Any, depth: int = _DEPTH) -> bool:
    """Whether an object has tensors, or something in it does."""
    if isinstance(x, torch.Tensor):
        return True
    if depth == 0 or isinstance(x, PLAIN):
        return False
    inner: Any = ()
    if isinstance(x, Mapping):
        inner = x.values()
    elif isinstance(x, list | tuple | set):
        inner = x
    else:
        inner = [*attributes(x).values()]
    return any(holds_tensors(y, depth - 1) for y in inner)


def refuse_objects(inputs: Any) -> None:
    """See that there are tensors for stages in what a model is given.

    Raises:
        TypeError: there is none, but objects that may have some.
    """
    others = [
        x for x in leaves(inputs) if not isinstance(x, int | float | complex | str | bytes | type(None))
    ]
    if others and not any(isinstance(x, torch.Tensor) for x in others):
        kinds = ", ".join(sorted({type(x).__name__ for x in others}))
        held = _names_of_tensors(others[0])
        such = f": model({', '.join(f'batch.{name}' for name in held)}), say" if held else ""
        raise TypeError(
            f"The model is called with {kinds}, in which no tensor is seen. In a pipeline each stage takes "
            f"its part of the batch: give tensors, or tuples, lists, dicts or dataclasses of them{such}."
        )


def _names_of_tensors(x: Any, depth: int = 3) -> list[str]:
    """By which names an object, or what it keeps, has tensors: the first such ones."""
    held = x if isinstance(x, dict) else getattr(x, "__dict__", {})
    names = [name for name, value in held.items() if isinstance(value, torch.Tensor)]
    inner = (_names_of_tensors(value, depth - 1) for value in held.values()) if depth else ()
    return names or next(filter(None, inner), [])


def some(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of values that mean nothing."""
    if dtype.is_floating_point:
        return torch.randn(shape, dtype=dtype, device=device)
    return torch.zeros(shape, dtype=dtype, device=device)
