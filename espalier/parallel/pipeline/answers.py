"""What a forward pass asks of tensors (``bool(x)``, ``x[:, i]``), for runs on tensors without data.

A module that lies within one stage may decide by values. Where the model is traced, it runs by itself on some
values, and what it asks is noted; where a stage runs without data, to agree on shapes, it gets the same
answers, and so goes the same way. What it computes is not touched by them: there it asks what it has.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch._C import DisableTorchFunctionSubclass as raw
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from espalier.parallel.pipeline.trees import leaves, mapped

_NAMES = """
    __bool__ __int__ __float__ __index__ __complex__ __contains__ item tolist equal allclose is_nonzero
    """.split()
ASKING = frozenset(
    getattr(owner, name) for name in _NAMES for owner in (torch, torch.Tensor) if hasattr(owner, name)
)
# answers that shapes and dtypes give
METADATA = frozenset(
    """
    size stride dim ndimension numel nelement element_size storage_offset is_contiguous is_floating_point
    is_complex is_signed is_inference is_conj is_neg is_same_size get_device is_set_to dim_order result_type
    untyped_storage is_shared is_pinned is_tensor is_storage can_cast has_names is_coalesced type _is_view
    __len__ __hash__ __repr__ __format__ __class__ broadcast_shapes broadcast_tensors_shapes
    """.split()
)
_QUIET = METADATA | {"__get__", "__set__"}


class Answer(NamedTuple):
    """What one call was told, of those that may ask.

    Attributes:
        out: what a function that does nothing else gave; None of another one.
        read: of another one, the numbers that torch read out of its tensors of no dimension, by their
            places among these.
    """

    out: Any
    read: dict[int, Any]


class _Read(TorchDispatchMode):
    """Notes which tensors torch reads, and what."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[torch.Tensor, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._local_scalar_dense.default:
            self.found.append((args[0], out))
        return out


def _scalars(args: Any, kwargs: Any) -> list[torch.Tensor]:
    with raw():
        return [x for x in leaves((args, kwargs), torch.Tensor) if not x.ndim]


def heard(func: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, Answer | None]:
    """What a function gives, and what it was told; None if it is none that may ask."""
    if func in ASKING:
        out = func(*args, **kwargs)
        return out, Answer(out, {})
    if getattr(func, "__name__", "") in _QUIET or not (scalars := _scalars(args, kwargs)):
        return func(*args, **kwargs), None
    with _Read() as read:
        out = func(*args, **kwargs)
    places = {id(x): i for i, x in enumerate(scalars)}
    return out, Answer(None, {places[id(x)]: said for x, said in read.found if id(x) in places})


class Heard(TorchFunctionMode):
    """Notes the answers.

    Attributes:
        answers: in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.answers: list[Answer] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out, answer = heard(func, args, kwargs or {})
        if answer is not None:
            self.answers.append(answer)
        return out


class _Answers(TorchFunctionMode):
    """Gives them again to what asks a tensor without data."""

    def __init__(self, answers: Iterable[Answer]) -> None:
        super().__init__()
        self._left = deque(answers)

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        asks = func in ASKING
        quiet = not asks and (getattr(func, "__name__", "") in _QUIET or not _scalars(args, kwargs))
        if quiet or not self._left:
            return func(*args, **kwargs)
        answer = self._left.popleft()
        if asks:
            bare = any(x.is_meta for x in leaves((args, kwargs), torch.Tensor))
            return answer.out if bare else func(*args, **kwargs)
        if answer.read:
            places = iter(range(len(_scalars(args, kwargs))))

            def told(x: Any) -> Any:
                if not isinstance(x, torch.Tensor) or x.ndim:
                    return x
                return answer.read.get(next(places), x)

            args, kwargs = mapped(told, (args, kwargs))
        return func(*args, **kwargs)


def answered(func: Callable[..., Any], answers: Iterable[Answer], *args: Any, **kwargs: Any) -> Any:
    """Call a function whose questions to tensors without data have these answers."""
    with _Answers(answers):
        return func(*args, **kwargs)


__all__ = ["Answer", "Heard", "answered", "heard"]
