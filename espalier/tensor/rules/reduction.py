"""Reductions over dims, and functions that need some dims whole."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from espalier.layout import local_box
from espalier.layout.layout import normal_dim
from espalier.sharding.spec import (
    DONE,
    Dims,
    Operand,
    Placed,
    RuleFunction,
    Spec,
    bound_to,
    composed,
    of_nothing,
    outcome,
    rule,
    rule_of_each,
    rule_with,
)
from espalier.tensor.rules.pointwise import letters, operands_in

DimsArgument = int | Sequence[int] | None


def normal_dims(dim: DimsArgument, ndim: int) -> tuple[int, ...]:
    """The dims of a ``dim`` argument, counted from the front; None and () are all."""
    if dim is None or (not isinstance(dim, int) and len(dim) == 0):
        return tuple(range(ndim))
    dims = tuple(normal_dim(d, ndim) for d in ((dim,) if isinstance(dim, int) else dim))
    return dims if ndim else ()  # a tensor without dims takes 0 and -1


def exact(dtype: torch.dtype, wanted: torch.dtype | None) -> bool:
    """Whether a cast rounds nothing away, so that it may be done to addends."""
    return wanted is None or torch.promote_types(dtype, wanted) == wanted


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


# ---- order and counting: along a whole dim, with the others sharded; counts over sharded ones are Partial


@rule("median nanmedian")
def middle(x: Operand, dim: Any = None, keepdim: bool = False) -> Spec:
    """median and nanmedian: of all, or along a dim with the index."""
    return whole(x, dim, keepdim, outs=1 if dim is None else 2)


@rule("mode")
def mode(x: Operand, dim: int = -1, keepdim: bool = False) -> Spec:
    """The commonest value along a dim, and its index."""
    return whole(x, dim if x.ndim else None, keepdim, outs=2)


@rule("kthvalue")
def kthvalue(x: Operand, k: Any, dim: int = -1, keepdim: bool = False) -> Spec:
    """The k-th smallest along a dim, and its index."""
    return whole(x, dim if x.ndim else None, keepdim, outs=2)


@rule("quantile nanquantile")
def quantile(
    x: Operand, q: Any, dim: int | None = None, keepdim: bool = False, *, interpolation: str = "linear"
) -> Spec:
    """Along a whole dim, or of all; several q come first."""
    dims = tuple(range(x.ndim)) if dim is None else (normal_dim(dim, x.ndim),)
    out, shape = reduced(x, dims, keepdim)
    several = isinstance(q, Operand) and q.ndim == 1
    ins: list[Dims] = [x.dims(), *([(None,) * q.ndim] if isinstance(q, Operand) else [])]
    lead = (q.shape[0],) if several else ()
    return Spec(
        ins,
        [(*(None,) * several, *out)],
        [(*lead, *shape)],
        blocked=frozenset(("d", i) for i in dims),
        run=lambda func, args, kwargs, placed: of_nothing(placed, args[0] if args else kwargs["input"]),
        when=Placed.lacks,
    )


@rule("searchsorted")
def searchsorted(sequence: Operand, input: Any, *args: Any, **kwargs: Any) -> Spec:
    """Where values belong in a whole sorted dim."""
    many = sequence.ndim > 1
    lead: Dims = tuple(("b", i) for i in range(sequence.ndim - 1)) if many else ()
    ins: list[Dims] = [(*lead, None)]
    out: Dims = ()
    if isinstance(input, Operand):
        out = (*lead, "v") if many else input.dims("v")
        ins.append(out)
    sorter = kwargs.get("sorter")
    if isinstance(sorter, Operand):
        ins.append(ins[0])
    fails = (len(ins) - 1,) if isinstance(sorter, Operand) else ()
    return Spec(ins, [out], [input.shape if isinstance(input, Operand) else ()], fails=fails)


@rule("bucketize")
def bucketize(input: Any, boundaries: Operand, *args: Any, **kwargs: Any) -> Spec | None:
    """Between which boundaries values lie."""
    if boundaries.ndim != 1:
        return None  # torch refuses it
    if not isinstance(input, Operand):
        return Spec([(None,)], [()], [()])
    return Spec([input.dims(), (None,)], [input.dims()], [input.shape])


@rule("isin")
def isin(elements: Any, test_elements: Any, **kwargs: Any) -> Spec:
    """Whether elements are among others, which are whole."""
    shape = elements.shape if isinstance(elements, Operand) else ()
    ins = [
        o.dims() if o is elements else (None,) * o.ndim for o in operands_in(elements, test_elements, kwargs)
    ]
    return Spec(ins, [tuple(("d", i) for i in range(len(shape)))], [shape])


# whether two bounds differ hangs on their values
@rule("histc")
def histc(x: Operand, bins: int = 100, min: Any = 0, max: Any = 0) -> Spec:
    """Counts in bins; of the given range they are Partial, else the range is that of all elements."""
    known = min != max
    dims = x.dims()
    return Spec(
        [dims], [(None,)], [(bins,)], reduce=dict.fromkeys(dims, "sum") if known else {},
        blocked=frozenset() if known else frozenset(dims),
    )  # fmt: skip


@rule("gradient")
def gradient(x: Operand, *, spacing: Any = 1, dim: Any = None, edge_order: int = 1) -> Spec:
    """Differences along whole dims, one output for each."""
    chosen = range(x.ndim) if dim is None else (dim,) if isinstance(dim, int) else dim
    gone = {normal_dim(d, x.ndim) for d in chosen}
    dims: Dims = tuple(None if i in gone else d for i, d in enumerate(x.dims()))
    ins = [dims, *[(None,) * o.ndim for o in operands_in(spacing)]]
    n = len(list(chosen))
    return Spec(ins, [dims] * n, [x.shape] * n, linear=[(0,)])


@rule("cdist")
def cdist(x1: Operand, x2: Operand, p: float = 2.0, compute_mode: Any = None) -> Spec:
    """Distances of all rows of one from all rows of the other."""
    lead = tuple(torch.broadcast_shapes(x1.shape[:-2], x2.shape[:-2]))
    a, b = letters(x1.shape[:-2], lead), letters(x2.shape[:-2], lead)
    names: Dims = tuple(("d", i) for i in range(len(lead)))
    return Spec(
        [(*a, "p", None), (*b, "r", None)], [(*names, "p", "r")], [(*lead, x1.shape[-2], x2.shape[-2])]
    )  # fmt: skip


@rule_of_each((torch.diagonal, torch.Tensor.diagonal, torch.diagonal_copy))
def whole_matrix(function: Any) -> RuleFunction:
    """diagonal and its like: some dims whole, others kept, the new ones last; linear."""

    def rule(x: Operand, *args: Any, **kwargs: Any) -> Spec:
        first, second = (0, 1)
        named = bound_to("offset dim1 dim2", args, kwargs)
        first, second = named.get("dim1", first), named.get("dim2", second)
        gone = {normal_dim(first, x.ndim), normal_dim(second, x.ndim)}
        dims: Dims = tuple(None if i in gone else d for i, d in enumerate(x.dims()))
        kept = tuple(d for i, d in enumerate(dims) if i not in gone)
        return Spec([dims], [(*kept, None)], outcome(function, x, *args, **kwargs), linear=[(0,)])

    return rule


@rule(torch.linalg.diagonal)
def diagonal_of_matrix(x: Operand, *, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Spec:
    """torch.linalg.diagonal."""
    return whole_matrix(torch.diagonal)(x, offset, dim1, dim2)  # type: ignore[return-value]


@rule("diag_embed")
def diag_embed(x: Operand, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Spec:
    """The last dim on the diagonal of two new ones; linear."""
    dims = x.dims()
    n = x.ndim + 1
    at = {normal_dim(dim1, n), normal_dim(dim2, n)}
    rest = iter(dims[:-1])
    out = tuple(None if i in at else next(rest) for i in range(n))
    shape = outcome(torch.diag_embed, x, offset, dim1, dim2)
    return Spec([(*dims[:-1], None)], [out], shape, linear=[(0,)])


@composed("diag")
def diag(x: Any, diagonal: int = 0) -> Any:
    """A matrix of a vector, or a vector of a matrix."""
    if x.ndim == 1:
        return torch.diag_embed(x, diagonal)
    return torch.diagonal(x, diagonal).clone() if x.ndim == 2 else NotImplemented


@composed("diagflat")
def diagflat(x: Any, offset: int = 0) -> Any:
    """A matrix with all elements on its diagonal."""
    return torch.diag_embed(x.flatten(), offset)


@rule("diagonal_scatter")
def diagonal_scatter(x: Operand, src: Operand, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Spec:
    """Other values on a diagonal; jointly linear."""
    spec = whole_matrix(torch.diagonal)(x, offset, dim1, dim2)
    assert spec is not None
    return Spec([*spec.ins, *spec.outs], spec.ins, [x.shape], linear=[(0, 1)])


@rule("meshgrid")
def meshgrid(*tensors: Any, indexing: str | None = None) -> Spec:
    """Vectors (or numbers) spread along dims of their own; jointly linear."""
    operands: list[Operand] = operands_in(tensors)
    names = [("d", i) if x.ndim else None for i, x in enumerate(operands)]
    ins: list[Dims] = [(name,) if x.ndim else () for name, x in zip(names, operands, strict=True)]
    shape = [x.shape[0] if x.ndim else 1 for x in operands]
    if indexing == "xy" and len(operands) > 1:
        names[:2], shape[:2] = names[1::-1], shape[1::-1]
    n = len(operands)
    return Spec(ins, [tuple(names)] * n, [tuple(shape)] * n, linear=[tuple(range(n))])
