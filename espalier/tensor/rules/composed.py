"""Functions put together from others that have rules; each as torch's documentation defines it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from espalier.layout.layout import normal_dim
from espalier.sharding.spec import composed, composed_with
from espalier.tensor.dtensor import DTensor, plain
from espalier.tensor.observers import distributions_check
from espalier.tensor.rules.reduction import normal_dims
from espalier.torch_private import ALL_TRUE, ANY_TRUE, fused_weight_norm


def _many(tensors: tuple[Any, ...]) -> tuple[Any, ...]:
    """Tensors given one by one or as one sequence."""
    return tuple(tensors[0]) if len(tensors) == 1 and isinstance(tensors[0], tuple | list) else tensors


def _at_least_1d(x: Any) -> Any:
    return x.reshape(1) if x.ndim == 0 else x


def _at_least_2d(x: Any) -> Any:
    return _at_least_1d(x).unsqueeze(0) if x.ndim < 2 else x


def _at_least_3d(x: Any) -> Any:
    return _at_least_2d(x).unsqueeze(-1) if x.ndim < 3 else x


@composed_with("atleast_1d", _at_least_1d)
@composed_with("atleast_2d", _at_least_2d)
@composed_with("atleast_3d", _at_least_3d)
def _of_each(one: Callable[[Any], Any]) -> Callable[..., Any]:
    def body(*tensors: Any) -> Any:
        if len(tensors) == 1 and isinstance(tensors[0], torch.Tensor):
            return one(tensors[0])
        return tuple(map(one, _many(tensors)))

    return body


@composed("hstack")
def hstack(tensors: Sequence[Any]) -> Any:
    """Side by side: along dim 1, of vectors along dim 0."""
    tensors = [_at_least_1d(x) for x in tensors]
    return torch.cat(tensors, 0 if tensors[0].ndim == 1 else 1)


@composed("vstack row_stack")
def vstack(tensors: Sequence[Any]) -> Any:
    """One below the other."""
    return torch.cat([_at_least_2d(x) for x in tensors], 0)


@composed("dstack")
def dstack(tensors: Sequence[Any]) -> Any:
    """One behind the other."""
    return torch.cat([_at_least_3d(x) for x in tensors], 2)


@composed("column_stack")
def column_stack(tensors: Sequence[Any]) -> Any:
    """Side by side, vectors as columns."""
    return torch.cat([x.reshape(-1, 1) if x.ndim < 2 else x for x in tensors], 1)


@composed_with("hsplit", lambda n: 0 if n == 1 else 1, 1)
@composed_with("vsplit", lambda n: 0, 2)
@composed_with("dsplit", lambda n: 2, 3)
def _splitting(dim: Callable[[int], int], least: int) -> Callable[..., Any]:
    def body(x: Any, indices_or_sections: Any = None, *rest: Any, **named: Any) -> Any:
        cut = named.get("sections", named.get("indices", indices_or_sections))
        if rest:
            cut = (cut, *rest)
        at = dim(x.ndim)
        if x.ndim < least or (isinstance(cut, int) and (cut < 1 or x.shape[at] % cut)):
            return NotImplemented  # torch says what is wrong
        return torch.tensor_split(x, cut, at)

    return body


@composed("fliplr")
def fliplr(x: Any) -> Any:
    """Dim 1 reversed."""
    return x.flip(1) if x.ndim > 1 else NotImplemented


@composed("flipud")
def flipud(x: Any) -> Any:
    """Dim 0 reversed."""
    return x.flip(0) if x.ndim else NotImplemented


@composed("rot90")
def rot90(x: Any, k: int = 1, dims: Sequence[int] = (0, 1)) -> Any:
    """Turned by quarters in the plane of two dims."""
    if len(dims) != 2 or x.ndim < 2:
        return NotImplemented
    a, b = dims
    if k % 4 == 2:
        return x.flip(a, b)
    if k % 2 == 0:
        return x.clone()
    return x.flip(b).transpose(a, b) if k % 4 == 1 else x.transpose(a, b).flip(b)


@composed("tile")
def tile(x: Any, *dims: Any) -> Any:
    """Repeated; of the dims given too few count the last."""
    times = tuple(dims[0]) if len(dims) == 1 and not isinstance(dims[0], int) else dims
    return x.repeat(*(1,) * (x.ndim - len(times)), *times)


@composed("adjoint", torch.Tensor.mH.__get__)  # type: ignore[attr-defined]
def adjoint(x: Any) -> Any:
    """The last two dims swapped, conjugate."""
    return x.transpose(-2, -1).conj()


@composed(torch.Tensor.H.__get__)  # type: ignore[attr-defined]
def hermitian(x: Any) -> Any:
    """x.H."""
    return x.transpose(0, 1).conj() if x.ndim == 2 else x.conj() if x.ndim == 0 else NotImplemented


@composed("kron")
def kron(x: Any, y: Any) -> Any:
    """Each element of x times all of y."""
    n = max(x.ndim, y.ndim)
    x, y = (t.reshape((1,) * (n - t.ndim) + tuple(t.shape)) for t in (x, y))
    shape = [a * b for a, b in zip(x.shape, y.shape, strict=True)]
    if not n:
        return x * y
    left = x.reshape([s for a in x.shape for s in (a, 1)])
    right = y.reshape([s for b in y.shape for s in (1, b)])
    return (left * right).reshape(shape)


@composed(torch.block_diag)
def block_diag(*tensors: Any) -> Any:
    """Matrices along the diagonal of one."""
    blocks = [_at_least_2d(x) for x in _many(tensors)]
    width, rows, before = sum(b.shape[1] for b in blocks), [], 0
    for block in blocks:
        rows.append(F.pad(block, (before, width - before - block.shape[1])))
        before += block.shape[1]
    return torch.cat(rows, 0)


@composed(torch.cartesian_prod)
def cartesian_prod(*tensors: Any) -> Any:
    """All combinations of one element of each vector."""
    vectors = _many(tensors)
    if len(vectors) == 1:
        return vectors[0]
    return torch.stack([g.reshape(-1) for g in torch.meshgrid(*vectors, indexing="ij")], 1)


@composed("combinations")
def combinations(x: Any, r: int = 2, with_replacement: bool = False) -> Any:
    """All choices of r elements of a vector."""
    if x.ndim != 1 or r < 1:
        return NotImplemented
    choose = itertools.combinations_with_replacement if with_replacement else itertools.combinations
    chosen = torch.tensor(list(choose(range(x.shape[0]), r)), device=x.device, dtype=torch.int64)
    return x.index_select(0, chosen.reshape(-1)).reshape(-1, r)


def _select_index(x: Any, dim: int, index: int) -> tuple[Any, ...]:
    return (*[slice(None)] * normal_dim(dim, x.ndim), index)


def _slice_index(x: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> tuple[Any, ...]:
    return (*[slice(None)] * normal_dim(dim, x.ndim), slice(start, end, step))


@composed_with("select_scatter", _select_index)
@composed_with("slice_scatter", _slice_index)
def _scattered(place: Callable[..., Any]) -> Callable[..., Any]:
    def body(x: Any, src: Any, *args: Any, **kwargs: Any) -> Any:
        index = place(x, *args, **kwargs)
        if src.shape != torch.empty(x.shape, device="meta")[index].shape:
            return NotImplemented  # torch says what is wrong
        out = x.clone()
        out[index] = src
        return out

    return body


@composed("sum_to_size")
def sum_to_size(x: Any, *size: Any) -> Any:
    """Summed over the dims along which x would have been stretched from that size."""
    wanted = tuple(size[0]) if len(size) == 1 and not isinstance(size[0], int) else size
    skip = x.ndim - len(wanted)
    if skip < 0 or any(n not in (1, x.shape[i + skip]) for i, n in enumerate(wanted)):
        return NotImplemented
    dims = [i for i in range(x.ndim) if i < skip or (wanted[i - skip] == 1 != x.shape[i])]
    return x.sum(dims, keepdim=True).reshape(wanted) if dims else x


# ---- arithmetic


@composed("dist")
def dist(x: Any, other: Any, p: float = 2) -> Any:
    """The p-norm of a difference."""
    return torch.linalg.vector_norm(x - other, p)


@composed("diff")
def diff(x: Any, n: int = 1, dim: int = -1, prepend: Any = None, append: Any = None) -> Any:
    """Differences of neighbours, n times."""
    if x.ndim == 0 or n < 0:
        return NotImplemented
    if n == 0:
        return x.clone()
    at = normal_dim(dim, x.ndim)
    ends = [t for t in (prepend, x, append) if t is not None]
    x = torch.cat(ends, at) if len(ends) > 1 else x
    for _ in range(min(n, x.shape[at])):
        length = x.shape[at] - 1
        if length < 0:
            break
        later, sooner = x.narrow(at, 1, length), x.narrow(at, 0, length)
        x = later ^ sooner if x.dtype == torch.bool else later - sooner
    return x


def _steps(y: Any, x: Any, dx: Any, dim: int) -> Any:
    """The areas of the trapezoids between neighbours."""
    if not y.ndim or not y.shape[dim] or (x is not None and x.ndim not in (1, y.ndim)):
        return NotImplemented
    at, n = normal_dim(dim, y.ndim), y.shape[dim]
    sums = y.narrow(at, 1, n - 1) + y.narrow(at, 0, n - 1)
    if x is None:
        return sums * dx / 2
    if x.ndim == 1:
        x = x.reshape(-1, *[1] * (y.ndim - 1 - at))
        width = x.narrow(0, 1, n - 1) - x.narrow(0, 0, n - 1)
    else:
        width = x.narrow(dim % x.ndim, 1, n - 1) - x.narrow(dim % x.ndim, 0, n - 1)
    return sums * width / 2


@composed("trapezoid trapz")
def trapezoid(y: Any, x: Any = None, *, dx: Any = 1, dim: int = -1) -> Any:
    """The integral by trapezoids."""
    areas = _steps(y, x, dx, dim)
    return areas if areas is NotImplemented else areas.sum(dim)


@composed("cumulative_trapezoid")
def cumulative_trapezoid(y: Any, x: Any = None, *, dx: Any = 1, dim: int = -1) -> Any:
    """The integral up to each point."""
    areas = _steps(y, x, dx, dim)
    return areas if areas is NotImplemented else areas.cumsum(dim)


@composed("renorm")
def renorm(x: Any, p: float, dim: int, maxnorm: float) -> Any:
    """Slices of a larger norm scaled down."""
    if x.ndim < 2:
        return NotImplemented
    others = [d for d in range(x.ndim) if d != normal_dim(dim, x.ndim)]
    norms = torch.linalg.vector_norm(x, p, others, keepdim=True)
    return x * torch.where(norms > maxnorm, maxnorm / (norms + 1e-7), 1.0).to(x.dtype)


@composed("renorm_")
def renorm_(x: Any, p: float, dim: int, maxnorm: float) -> Any:
    """renorm in place."""
    scaled = renorm(x.clone(), p, dim, maxnorm)
    return scaled if scaled is NotImplemented else x.copy_(scaled)


@composed("cov")
def cov(x: Any, *, correction: int = 1, fweights: Any = None, aweights: Any = None) -> Any:
    """Covariances of the rows."""
    if x.ndim > 2 or not (x.is_floating_point() or x.is_complex()):
        return NotImplemented
    for weighting in (fweights, aweights):
        if weighting is not None and (weighting.ndim > 1 or bool((weighting < 0).any())):
            return NotImplemented
    rows = x if x.ndim == 2 else x.reshape(1, -1)
    weights = fweights
    if aweights is not None:
        weights = aweights if fweights is None else fweights * aweights
    n = rows.shape[1]
    total = n if weights is None else weights.sum()
    mean = rows.mean(1, True) if weights is None else (rows * weights).sum(1, True) / total
    if correction == 0 or aweights is None:
        free = total - correction
    else:
        free = total - correction * (weights * aweights).sum() / total
    free = max(free, 0) if weights is None else free.clamp(min=0)
    away = rows - mean
    out = (away if weights is None else away * weights) @ away.mT.conj() / free
    return out.squeeze()


@composed("corrcoef")
def corrcoef(x: Any) -> Any:
    """Correlations of the rows."""
    if x.ndim > 2:
        return NotImplemented
    c = torch.cov(x)
    if not c.ndim:
        return c / c
    d = torch.diagonal(c).real.sqrt() if c.is_complex() else torch.diagonal(c).sqrt()
    c = c / d[:, None] / d[None, :]
    return c if c.is_complex() else c.clip(-1, 1)


@composed_with("var_mean", torch.var)
@composed_with("std_mean", torch.std)
def _moments(variance: Callable[..., Any]) -> Callable[..., Any]:
    def body(x: Any, dim: Any = None, *args: Any, **kwargs: Any) -> Any:
        flat = isinstance(dim, bool)
        keepdim = kwargs.get("keepdim", args[1] if len(args) > 1 and not flat else False)
        dims = None if flat else dim
        return variance(x, dim, *args, **kwargs), x.mean(normal_dims(dims, x.ndim), keepdim)

    return body


@composed(ALL_TRUE)
def is_all_true(x: Any) -> Any:
    """Whether each is; where distributions ask of their arguments, of this rank's part.

    They check on some ranks alone, it may be: torch's compiler turns that off in a process that has compiled.
    """
    mesh = x._layout.mesh if type(x) is DTensor else None
    if mesh is not None and mesh.is_member and not mesh.is_dry and distributions_check():
        return plain(x).all()
    return x.all()


@composed(ANY_TRUE)
def is_any_true(x: Any) -> Any:
    """Whether one is."""
    return x.any()


@composed("aminmax")
def aminmax(x: Any, *, dim: Any = None, keepdim: bool = False) -> Any:
    """The least and the largest."""
    if dim is None:
        dim = tuple(range(x.ndim))
    return torch.return_types.aminmax((x.amin(dim, keepdim), x.amax(dim, keepdim)))


@composed("nanmean")
def nanmean(x: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    """The mean of what is a number."""
    dims = normal_dims(dim, x.ndim)
    return x.nansum(dims, keepdim, dtype=dtype) / (~x.isnan()).sum(dims, keepdim)


@composed("msort")
def msort(x: Any) -> Any:
    """Sorted along dim 0."""
    return x.sort(0).values


@composed("allclose")
def allclose(x: Any, other: Any, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False) -> bool:
    """Whether all elements are close."""
    return bool(torch.isclose(x, other, rtol, atol, equal_nan).all())


@composed("equal")
def equal(x: Any, other: Any) -> bool:
    """Whether shapes and all elements are equal."""
    return x.shape == other.shape and bool((x == other).all())


@composed("is_nonzero")
def is_nonzero(x: Any) -> bool:
    """Whether the one element is not zero."""
    if math.prod(x.shape) != 1:
        raise RuntimeError(f"is_nonzero of a tensor of {list(x.shape)}: it takes one of one element.")
    return bool(x)


@composed("glu")
def glu(x: Any, dim: int = -1) -> Any:
    """Half of a dim by the sigmoid of the other half."""
    if not x.ndim or x.shape[dim] % 2:
        return NotImplemented
    value, gate = x.chunk(2, dim)
    return value * gate.sigmoid()


@composed("pairwise_distance")
def pairwise_distance(x1: Any, x2: Any, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False) -> Any:
    """The p-norm of the differences along the last dim."""
    return torch.linalg.vector_norm(x1 - x2 + eps, p, -1, keepdim)


@composed("cosine_similarity")
def cosine_similarity(x1: Any, x2: Any, dim: int = 1, eps: float = 1e-8) -> Any:
    """The cosine of the angle between vectors along a dim."""
    x1, x2 = torch.broadcast_tensors(x1, x2)
    lengths = [torch.linalg.vector_norm(x, 2, dim, True) for x in (x1, x2)]
    # the gradient of the norm is that of the vector, also where it is held to eps
    lengths = [n + (n.detach().clamp(min=eps) - n.detach()) for n in lengths]
    return (x1 / lengths[0] * (x2 / lengths[1])).sum(dim)


@composed("bincount")
def bincount(x: Any, weights: Any = None, minlength: int = 0) -> Any:
    """How often each number occurs; how many there are must be known, so the largest is fetched."""
    if x.ndim != 1 or not x.shape[0] or int(x.min()) < 0:
        return NotImplemented
    n = max(int(x.max()) + 1, minlength)
    if weights is None:
        weights = torch.ones_like(x, dtype=torch.int64)
    elif weights.dtype != torch.float32:
        weights = weights.double()
    return weights.new_zeros(n).index_add(0, x.long(), weights.detach())


@composed("fill")
def fill(x: Any, value: Any) -> Any:
    """torch.fill."""
    return x.clone().fill_(value)


@composed(torch.norm_except_dim)
def norm_except_dim(x: Any, pow: int = 2, dim: int = 0) -> Any:
    """The norms of the slices along a dim; of all of it for -1."""
    if dim == -1:
        return torch.linalg.vector_norm(x, pow)
    return torch.linalg.vector_norm(x, pow, [d for d in range(x.ndim) if d != dim % x.ndim], True)


@composed(fused_weight_norm)
def weight_norm(v: Any, g: Any, dim: int = 0) -> Any:
    """Slices of lengths ``g`` (Salimans and Kingma 2016)."""
    return v * (g / norm_except_dim(v, 2, dim))
