"""Order and counting: along a whole dim, with the others sharded; counts over sharded ones are Partial."""

from __future__ import annotations

from typing import Any

import torch

from espalier.layout.layout import normal_dim
from espalier.tensor.rules.pointwise import found, letters
from espalier.tensor.rules.reduction import reduced, whole
from espalier.tensor.rules.spec import (
    Dims,
    Operand,
    Placed,
    RuleFunction,
    Spec,
    bound_to,
    of_nothing,
    outcome,
)
from espalier.tensor.rules.table import composed, rule, rule_of_each


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
    ins = [o.dims() if o is elements else (None,) * o.ndim for o in found(elements, test_elements, kwargs)]
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
    given = range(x.ndim) if dim is None else (dim,) if isinstance(dim, int) else dim
    gone = {normal_dim(d, x.ndim) for d in given}
    dims: Dims = tuple(None if i in gone else d for i, d in enumerate(x.dims()))
    ins = [dims, *[(None,) * o.ndim for o in found(spacing)]]
    n = len(list(given))
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
    given: list[Operand] = found(tensors)
    names = [("d", i) if x.ndim else None for i, x in enumerate(given)]
    ins: list[Dims] = [(name,) if x.ndim else () for name, x in zip(names, given, strict=True)]
    shape = [x.shape[0] if x.ndim else 1 for x in given]
    if indexing == "xy" and len(given) > 1:
        names[:2], shape[:2] = names[1::-1], shape[1::-1]
    n = len(given)
    return Spec(ins, [tuple(names)] * n, [tuple(shape)] * n, linear=[tuple(range(n))])
