"""Strict mode: a plain tensor among DTensors is an error instead of being taken as replicated."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from espalier.tensor.dtensor import DTensor

is_strict: ContextVar[bool] = ContextVar("espalier.strict", default=False)


@contextmanager
def strict() -> Iterator[None]:
    """While open, a call of DTensors and a plain tensor raises; 0-d tensors, being scalars, are allowed.

    >>> with espalier.strict():                                       # doctest: +SKIP
    ...     loss = model(batch)
    """
    token = is_strict.set(True)
    try:
        yield
    finally:
        is_strict.reset(token)


@contextmanager
def implicit_replication() -> Iterator[None]:
    """While open, a plain tensor among DTensors is taken as replicated, also inside :func:`strict`."""
    token = is_strict.set(False)
    try:
        yield
    finally:
        is_strict.reset(token)


def refuse_plain(func: Callable[..., Any], tensors: Iterable[torch.Tensor]) -> None:
    """Raise for a plain tensor with dims.

    Raises:
        ValueError: there is one (torch's operators would swallow a TypeError).
    """
    for i, x in enumerate(tensors):
        if x.ndim and not isinstance(x, DTensor):
            raise ValueError(
                f"{getattr(func, '__name__', func)}: tensor argument {i} (shape {list(x.shape)}) is plain "
                "among DTensors, which espalier.strict() refuses. Say how it lies: distribute_tensor or "
                "DTensor.from_local."
            )
