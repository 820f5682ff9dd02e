"""Reductions over dims, and functions that need some dims whole."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from espalier.layout import local_box
from espalier.layout.layout import normal_dim
from espalier.tensor.rules.spec import DONE, Dims, Operand, Placed, Spec, of_nothing
from espalier.tensor.rules.table import rule, rule_with

DimsArgument = int | Sequence[int] | None


def normal_dims(dim: DimsArgument, ndim: int) -> tuple[int, ...]:
    """The dims of a ``dim`` argument, counted from the front; None and () are all."""
    if dim is None or (not isinstance(dim, int) and len(dim) == 0):
        return tuple(range(ndim))
    found = tuple(normal_dim(d, ndim) for d in ((dim,) if isinstance(dim, int) else dim))
    return found if ndim else ()  # a tensor without dims takes 0 and -1


def exact(given: torch.dtype, wanted: torch.dtype | None) -> bool:
    """Whether a cast rounds nothing away, so that it may be done to addends."""
    return wanted is None or torch.promote_types(given, wanted) == wanted


def reduced(x: Operand, dims: tuple[int, ...], keepdim: bool) -> tuple[Dims, tuple[int, ...]]:
    """Letters and shape of the result of reducing ``dims``."""
    kept = [i for i in range(x.ndim) if i not in dims]
    if keepdim:
        return (
            tuple(None if i in dims else ("d", i) for i in range(x.ndim)),
            tuple(1 if i in dims else n for i, n in enumerate(x.shape)),
        )
    return tuple(("d", i) for i in kept), tuple(x.shape[i] for i in kept)


@rule("sum")
def sum_(x: Operand, dim: DimsArgument = None, keepdim: bool = False, *, dtype: Any = None) -> Spec:
    """The sum: Partial where a summed dim is sharded."""
    dims = normal_dims(dim, x.ndim)
    out, shape = reduced(x, dims, keepdim)
    reduce = {("d", i): "sum" for i in dims}
    return Spec([x.dims()], [out], [shape], reduce=reduce, linear=[(0,)] if exact(x.dtype, dtype) else [])


@rule("nansum")
def nansum(x: Operand, dim: DimsArgument = None, keepdim: bool = False, *, dtype: Any = None) -> Spec:
    """The sum of what is a number, so not linear."""
    spec = sum_(x, dim, keepdim)
    spec.linear = []
    return spec


@rule("mean")
def mean(x: Operand, dim: DimsArgument = None, keepdim: bool = False, *, dtype: Any = None) -> Spec | None:
    """The mean: each rank divides its sum by the global count."""
    kind = x.dtype if dtype is None else dtype
    if not (kind.is_floating_point or kind.is_complex):
        return None  # torch refuses it
    spec = sum_(x, dim, keepdim)
    dims = normal_dims(dim, x.ndim)
    count = math.prod(x.shape[i] for i in dims)

    def run(func: Callable[..., Any], args: Any, kwargs: Any, placed: Placed) -> torch.Tensor:
        if not placed.axes_of(placed.ins[0], dims):
            return func(*args, **kwargs)
        return torch.sum(args[0] if args else kwargs["input"], dims, keepdim, dtype=dtype) / count

    spec.run = run
    return spec


@rule("amax amin")
def extreme(x: Operand, dim: DimsArgument = (), keepdim: bool = False) -> Spec:
    """amax and amin: sharded dims are reduced by a collective that keeps ties' gradients right."""
    dims = normal_dims(dim, x.ndim)
    out, shape = reduced(x, dims, keepdim)
    return Spec([x.dims()], [out], [shape], blocked=frozenset(("d", i) for i in dims))


@rule("prod count_nonzero")
def whole(
    x: Operand, dim: DimsArgument = None, keepdim: bool = False, *, outs: int = 1, everything: bool = False
) -> Spec:
    """A reduction that needs the reduced dims whole; other dims may be sharded."""
    dims = tuple(range(x.ndim)) if everything else normal_dims(dim, x.ndim)
    out, shape = reduced(x, dims, keepdim)
    return Spec([x.dims()], [out] * outs, [shape] * outs, blocked=frozenset(("d", i) for i in dims))


@rule_with("cumprod logcumsumexp softmax log_softmax softmin", 1, loose=True)
@rule_with("sort cummax cummin", 2)
@rule_with("argsort", 1)
def _along(outs: int, default: int = -1) -> Callable[..., Spec]:
    """Same-shape functions along one dim (softmax, cumsum, sort): that dim must be whole."""

    def rule(x: Operand, dim: Any = default, *args: Any, **kwargs: Any) -> Spec:
        if x.ndim == 0:
            return Spec([()], [()] * outs, [()] * outs)
        at = normal_dim(default if dim is None else dim, x.ndim)
        return Spec([x.dims()], [x.dims()] * outs, [x.shape] * outs, blocked=frozenset([("d", at)]))

    return rule


@rule("cumsum")
def cumsum(x: Operand, dim: int, *, dtype: Any = None) -> Spec:
    """Linear in x; the dim must be whole."""
    at = normal_dim(dim, x.ndim)
    return Spec(
        [x.dims()],
        [x.dims()],
        [x.shape],
        linear=[(0,)] if exact(x.dtype, dtype) else [],
        blocked=frozenset([("d", at)] if x.ndim else []),
    )


@rule("topk")
def topk(x: Operand, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Spec:
    """The k largest along a whole dim."""
    if x.ndim == 0:
        return Spec([()], [()] * 2, [()] * 2)
    at = normal_dim(dim, x.ndim)
    out = tuple(None if i == at else ("d", i) for i in range(x.ndim))
    shape = tuple(k if i == at else n for i, n in enumerate(x.shape))
    return Spec([x.dims()], [out] * 2, [shape] * 2, blocked=frozenset([("d", at)]))


@rule("max min")
def max_(x: Operand, dim: Any = None, keepdim: bool = False) -> Spec | None:
    """max/min: of all elements, along a dim (values and indices), or of two tensors."""
    if isinstance(dim, Operand):
        from espalier.tensor.rules.pointwise import elementwise

        return elementwise([x, dim])
    return whole(x, dim, keepdim, outs=1 if dim is None else 2)


@rule("argmax argmin")
def argmax(x: Operand, dim: int | None = None, keepdim: bool = False) -> Spec:
    """Index of the largest."""
    if dim is None and keepdim:
        return Spec([x.dims()], [(None,) * x.ndim], [(1,) * x.ndim], blocked=frozenset(x.dims()))
    return whole(x, dim, keepdim)


@rule("var std")
def variance(x: Operand, dim: Any = None, unbiased: Any = None, keepdim: bool = False, **kw: Any) -> Spec:
    """var and std: var(x, unbiased) and var(x, dim, unbiased, keepdim), or correction by keyword."""
    spec = whole(x, None if isinstance(dim, bool) else dim, keepdim)

    def run(func: Callable[..., Any], args: Any, kwargs: Any, placed: Placed) -> torch.Tensor:
        local = args[0] if args else kwargs["input"]
        # of nothing torch warns that it has too few degrees of freedom
        if local.numel() or not math.prod(placed.ins[0].shape):
            return func(*args, **kwargs)
        return of_nothing(placed, local.real if local.is_complex() else local)

    spec.run = run
    return spec


@rule("all any")
def truth(x: Operand, dim: DimsArgument = None, keepdim: bool = False) -> Spec:
    """all and any, over whole dims."""
    return whole(x, dim, keepdim)


@rule("vector_norm")
def vector_norm(
    x: Operand, ord: Any = 2, dim: DimsArgument = None, keepdim: bool = False, *, dtype: Any = None
) -> Spec:
    """The p-norm; over sharded dims each rank's part joins by one all-reduce of the result's size."""
    dims = normal_dims(dim, x.ndim)
    out, shape = reduced(x, dims, keepdim)
    ok = isinstance(ord, int | float) and 1 <= ord < math.inf

    def run(func: Callable[..., Any], args: Any, kwargs: Any, placed: Placed) -> torch.Tensor:
        axes = placed.axes_of(placed.ins[0], dims)
        local = torch.linalg.vector_norm(args[0], ord, dims, keepdim, dtype=dtype)
        if not axes:
            return local
        total = placed.total(local.pow(ord), axes)
        none = total == 0  # where the root has no gradient, and torch's norm has zero
        return total.masked_fill(none, 1).pow(1 / ord).masked_fill(none, 0)

    reduce = {("d", i): DONE for i in dims} if ok else {}
    blocked = frozenset() if ok else frozenset(("d", i) for i in dims)
    return Spec([x.dims()], [out], [shape], reduce=reduce, blocked=blocked, run=run)


@rule("tril triu", inplace=True)
def triangle(x: Operand, diagonal: int = 0) -> Spec:
    """tril and triu: each rank's diagonal starts where its box does."""

    def run(func: Callable[..., Any], args: Any, kwargs: Any, placed: Placed) -> torch.Tensor:
        row, column = local_box(placed.ins[0]).offsets[-2:]
        return func(args[0] if args else kwargs["input"], diagonal + row - column)

    return Spec([x.dims()], [x.dims()], [x.shape], linear=[(0,)], run=run)
