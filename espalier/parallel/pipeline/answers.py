"""What a forward pass asks of tensors (``bool(x)``, ``x[:, i]``), for runs on tensors without data.

A module that lies within one stage may decide by values. Where the model is traced, it runs by itself on some
values, and what it asks is noted; where a stage runs without data, to agree on shapes, it gets the same
answers, and so goes the same way; and what a tensor's values give a size (``x[mask]``, ``nonzero``) has the
same one. What it computes is not touched by them: there it asks what it has.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch._C import DisableTorchFunctionSubclass as raw
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from espalier.layout import Layout
from espalier.parallel.pipeline.trees import leaves, mapped
from espalier.tensor import DTensor, stamp
from espalier.tensor.dtensor import full_value, layout_of

_NAMES = """
    __bool__ __int__ __float__ __index__ __complex__ __contains__ item tolist equal allclose is_nonzero
    """.split()
ASKING = frozenset(
    getattr(owner, name) for name in _NAMES for owner in (torch, torch.Tensor) if hasattr(owner, name)
)
_SIZED = """
    nonzero argwhere masked_select unique unique_consecutive bincount where __getitem__
    """.split()
SIZED = frozenset(
    getattr(owner, name) for name in _SIZED for owner in (torch, torch.Tensor) if hasattr(owner, name)
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
_QUIET = METADATA | {"__get__", "__set__", full_value.__name__}


class Answer(NamedTuple):
    """What one call was told, of those that may ask.

    Attributes:
        out: what a function that does nothing else gave; None of another one.
        read: of another one, the numbers that torch read out of its tensors of no dimension, by their
            places among these.
        sized: of one whose sizes are told by values, what it gave, with a :class:`_Sized` for each tensor.
    """

    out: Any
    read: dict[int, Any]
    sized: Any = None


class _Sized(NamedTuple):
    """A tensor of a size that values told."""

    shape: tuple[int, ...]
    dtype: torch.dtype


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


def _is_sized(func: Callable[..., Any], args: Any, kwargs: Any) -> bool:
    """Whether the sizes of what a function gives are told by values."""
    if func not in SIZED:
        return False
    name = func.__name__
    if name == "where":
        return len(args) + len(kwargs) == 1
    if name != "__getitem__":
        return True
    with raw():
        return any(x.dtype in (torch.bool, torch.uint8) and x.ndim for x in leaves(args[1], torch.Tensor))


def _sized(x: Any) -> Any:
    return _Sized(tuple(x.shape), x.dtype) if isinstance(x, torch.Tensor) else x


def _made(answer: Any, given: Sequence[torch.Tensor]) -> Any:
    """What hangs on the tensors given, without data, of the sizes that were told."""
    like = next((x for x in given if type(x) is DTensor), None)
    graded = [x for x in given if x.requires_grad]

    def made(x: Any) -> Any:
        if type(x) is not _Sized:
            return x
        out: torch.Tensor = torch.empty(x.shape, dtype=x.dtype, device="meta")
        if like is not None:
            out = stamp(out, Layout.replicated(layout_of(like).mesh, x.shape))
        for one in graded if x.dtype.is_floating_point else ():
            out = out + 0 * one.sum().to(x.dtype)
        return out

    return tuple(map(made, answer)) if type(answer) is tuple else made(answer)


def heard(func: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, Answer | None]:
    """What a function gives, and what it was told; None if it is none that may ask."""
    if func in ASKING:
        out = func(*args, **kwargs)
        return out, Answer(out, {})
    if _is_sized(func, args, kwargs):
        out = func(*args, **kwargs)
        return out, Answer(None, {}, tuple(map(_sized, out)) if isinstance(out, tuple) else _sized(out))
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
        asks, sized = func in ASKING, _is_sized(func, args, kwargs)
        quiet = (
            not asks and not sized and (getattr(func, "__name__", "") in _QUIET or not _scalars(args, kwargs))
        )
        if quiet or not self._left:
            return func(*args, **kwargs)
        answer = self._left.popleft()
        if asks or sized:
            given = leaves((args, kwargs), torch.Tensor)
            if not any(x.is_meta for x in given):
                return func(*args, **kwargs)
            return _made(answer.sized, given) if sized else answer.out
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
