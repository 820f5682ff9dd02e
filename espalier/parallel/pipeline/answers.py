"""What a forward pass asks of tensors (``bool(x)``, ``x.item()``), for runs on tensors without data.

A module that lies within one stage may decide by values. Where the model is traced, it runs by itself on some
values, and what it asks is noted; where a stage runs without data, to agree on shapes, it gets the same
answers, and so goes the same way. What it computes is not touched by them: there it asks what it has.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_NAMES = """
    __bool__ __int__ __float__ __index__ __complex__ __contains__ item tolist equal allclose is_nonzero
    """.split()
ASKING = frozenset(
    getattr(owner, name) for name in _NAMES for owner in (torch, torch.Tensor) if hasattr(owner, name)
)


class Heard(TorchFunctionMode):
    """Notes the answers.

    Attributes:
        answers: in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.answers: list[Any] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in ASKING:
            self.answers.append(out)
        return out


class _Answers(TorchFunctionMode):
    """Gives them again to what asks a tensor without data."""

    def __init__(self, answers: Iterable[Any]) -> None:
        super().__init__()
        self._left = deque(answers)

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func not in ASKING:
            return func(*args, **(kwargs or {}))
        noted = [self._left.popleft()] if self._left else []
        bare = any(isinstance(x, torch.Tensor) and x.is_meta for x in args)
        return noted[0] if noted and bare else func(*args, **(kwargs or {}))


def answered(func: Callable[..., Any], answers: Iterable[Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function whose questions to tensors without data have these answers."""
    with _Answers(answers):
        return func(*args, **kwargs)


__all__ = ["ASKING", "Heard", "answered"]
