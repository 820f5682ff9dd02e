"""Sample arguments of the brute force: tensors are described, and made when it is known where they lie."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from espalier.trees import tree_map


@dataclass(frozen=True)
class X:
    """A tensor in sample arguments: floats in [low, high), or integers, or booleans."""

    shape: tuple[int, ...]
    low: float = -2.0
    high: float = 2.0
    dtype: torch.dtype = torch.float64
    grad: bool = True
    values: tuple[Any, ...] | None = None

    @property
    def differentiable(self) -> bool:
        """Whether its gradient is compared."""
        return self.grad and self.is_real_or_complex

    @property
    def is_real_or_complex(self) -> bool:
        """Whether it may be made of addends, and have a gradient."""
        return self.dtype.is_floating_point or self.dtype.is_complex


def ints(shape: tuple[int, ...], low: int, high: int) -> X:
    """Integers in [low, high)."""
    return X(shape, low, high, torch.int64)


def bools(shape: tuple[int, ...]) -> X:
    """Booleans."""
    return X(shape, 0, 2, torch.bool)


class A:
    """Sample arguments."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args, self.kwargs = args, kwargs

    def __repr__(self) -> str:
        words = [_short(a) for a in self.args] + [f"{k}={_short(v)}" for k, v in self.kwargs.items()]
        return f"({', '.join(words)})"


def _short(a: Any) -> str:
    if isinstance(a, X):
        return f"{str(a.dtype)[6:]}{list(a.shape)}"
    if isinstance(a, list | tuple):
        return "[" + ", ".join(map(_short, a)) + "]"
    return repr(a)


def put(tree: Any, tensors: Iterator[Any]) -> Any:
    """The arguments with the tensors in place of their descriptions."""
    if isinstance(tree, X):
        return next(tensors)
    if isinstance(tree, dict):
        return {k: put(v, tensors) for k, v in tree.items()}
    if isinstance(tree, tuple | list):
        return type(tree)(put(v, tensors) for v in tree)
    return tree


def described(tree: Any) -> list[X]:
    """The tensors that arguments describe, in order."""
    if isinstance(tree, X):
        return [tree]
    if isinstance(tree, dict):
        tree = tuple(tree.values())
    return [x for v in tree for x in described(v)] if isinstance(tree, tuple | list) else []


def without_gradient(tree: Any) -> Any:
    """The arguments for a function that torch cannot differentiate."""
    if isinstance(tree, X):
        return replace(tree, grad=False)
    if isinstance(tree, dict):
        return {k: without_gradient(v) for k, v in tree.items()}
    return type(tree)(map(without_gradient, tree)) if isinstance(tree, tuple | list) else tree


def others(samples: Sequence[A]) -> Iterator[A]:
    """The samples with other numbers, and in single precision: not to be taken for those seen before."""
    for sample in samples:
        trees = (sample.args, sample.kwargs)
        for change in (_other_number, _single):
            changed = [tree_map(change, tree) for tree in trees]
            if tuple(changed) != trees:
                yield A(*changed[0], **changed[1])


def _other_number(leaf: Any) -> Any:
    if type(leaf) is not float:
        return leaf
    return leaf / 2 if abs(leaf) > 1e-3 else leaf * 1000


def _single(leaf: Any) -> Any:
    return replace(leaf, dtype=torch.float32) if isinstance(leaf, X) and leaf.dtype == torch.float64 else leaf
