"""Linear algebra on batches of matrices: the batch may be sharded, each matrix is whole."""

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
    of_one,
    outcome,
    rule,
    rule_of_each,
)
from espalier.tensor.rules.matmul import added
from espalier.tensor.rules.pointwise import broadcast, letters, operands_in

MATRIX = """
    cholesky cholesky_ex cholesky_inverse cholesky_solve qr svd svdvals eigvals eigh eigvalsh inv inverse
    inv_ex det slogdet logdet lu_factor lu_factor_ex ldl_factor ldl_factor_ex matrix_exp matrix_power
    solve_triangular triangular_solve geqrf
"""

# what refuses a matrix that is singular, not positive, or not finite
FAILING = frozenset(
    """
    cholesky eig eigh eigvals eigvalsh inv inverse linalg_cholesky linalg_cond linalg_eig linalg_eigh
    linalg_eigvals linalg_eigvalsh linalg_inv linalg_lstsq linalg_matrix_rank linalg_matrix_sqrth
    linalg_pinv linalg_polar linalg_solve linalg_svd linalg_svdvals pinverse svd
    """.split()
)

# from torch 2.14 on
_LATER = tuple(vars(torch.linalg)[name] for name in ("matrix_sqrth", "polar") if name in vars(torch.linalg))

# of which the second operand may be vectors
_SOLVES = frozenset({torch.linalg.solve, torch.linalg.solve_ex, torch.linalg.lstsq})


# what is given as a function: torch has others of these names, removed or of another kind
@rule_of_each((MATRIX, torch.linalg.eig, torch.linalg.lu, *_LATER, *_SOLVES), 2)
@rule_of_each("householder_product orgqr lu_unpack", 2, 1)
@rule_of_each("ormqr ldl_solve", 2, 1, 2)
@rule_of_each("vander", 1)
@rule_of_each(("pinv pinverse", torch.linalg.matrix_rank), 2, 0)
@rule_of_each(torch.linalg.lu_solve, 2, 1, 2)
@rule_of_each((torch.lu_solve, torch.Tensor.lu_solve), 2, 2, 1)
def batched(function: Any, *cores: int) -> RuleFunction:
    """The rule of a function whose operands end in so many dims of their own, after dims of the batch.

    The batches are broadcast; the outputs begin with them. The numbers stand for the operands in the order
    of the parameters, the last for those that follow too.
    """

    def rule(*args: Any, **kwargs: Any) -> Spec | None:
        operands = operands_in(args, kwargs)
        core_dims = [*cores, *cores[-1:] * len(operands)][: len(operands)]
        if function in _SOLVES and _is_vector(operands):
            core_dims[1] = 1
        spec = _over_batch(function, args, kwargs, operands, core_dims)
        if spec is not None and len(operands) > 1 and not spec.fails:
            spec.run, spec.when = _nothing, Placed.lacks
        return spec

    return rule


def _nothing(func: Callable[..., Any], args: Any, kwargs: Any, placed: Placed) -> Any:
    """Of no matrices torch may leave out the gradient of an operand."""
    out = func(*args, **kwargs)
    tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
    return out + of_nothing(placed, *tensors) if isinstance(out, torch.Tensor) else out


def _over_batch(
    function: Any, args: Any, kwargs: Any, operands: Sequence[Operand], cores: Sequence[int]
) -> Spec | None:
    if any(o.ndim < c for o, c in zip(operands, cores, strict=True)):
        return None  # torch says what is wrong
    leads = [o.shape[: o.ndim - c] for o, c in zip(operands, cores, strict=True)]
    batch = tuple(torch.broadcast_shapes(*leads))
    ins: list[Dims] = []
    for lead, core in zip(leads, cores, strict=True):
        ins.append((*letters(lead, batch, "b"), *(None,) * core))
    shapes = outcome(function, *args, **kwargs)
    outs: list[Dims] = []
    for shape in shapes:
        named = tuple(
            ("b", i) if i < len(batch) and len(shape) >= len(batch) and n == batch[i] else None
            for i, n in enumerate(shape)
        )
        outs.append(named)
    # an output of no elements is the same everywhere
    empty = all(math.prod(shape) == 0 for shape, dims in zip(shapes, outs, strict=True) if not any(dims))
    reduce = {("b", i): DONE for i in range(len(batch))} if empty else {}
    fails = range(len(operands)) if getattr(function, "__name__", "") in FAILING else ()
    return Spec(ins, outs, shapes, reduce=reduce, fails=fails)


def _is_vector(operands: Sequence[Operand]) -> bool:
    a, b = operands
    return b.ndim == 1 or (a.ndim - 1 == b.ndim and b.shape == a.shape[:-1])


@rule_of_each((torch.cross, torch.linalg.cross, torch.Tensor.cross))
def cross(function: Any) -> RuleFunction:
    """Vectors of three along a whole dim; linear in each."""

    def rule(x: Operand, other: Operand, dim: int | None = None) -> Spec:
        shape = tuple(torch.broadcast_shapes(x.shape, other.shape))
        fixed = -1 if function is torch.linalg.cross else None
        at = dim if dim is not None else fixed
        at = shape.index(3) if at is None else normal_dim(at, len(shape))
        names: Dims = tuple(None if i == at else ("d", i) for i in range(len(shape)))
        ins = [broadcast(names, o.shape, shape) for o in (x, other)]

        def run(func: Callable[..., Any], args: Any, kwargs: Any, placed: Placed) -> torch.Tensor:
            bound = bound_to("input other", args, kwargs)
            # which dim has three elements hangs on the global shape
            return torch.linalg.cross(bound["input"], bound["other"], dim=at)

        return Spec(ins, [names], [shape], linear=[(0,), (1,)], run=run)

    return rule


@rule(torch.linalg.vecdot)
def vecdot(x: Operand, y: Operand, *, dim: int = -1) -> Spec:
    """Products summed along a dim that may be sharded."""
    shape = tuple(torch.broadcast_shapes(x.shape, y.shape))
    at = normal_dim(dim, len(shape))
    ins = [letters(o.shape, shape) for o in (x, y)]
    kept = [i for i in range(len(shape)) if i != at]
    out: Dims = tuple(("d", i) for i in kept)
    short = not all(("d", at) in dims for dims in ins)  # a stretched dim is not summed piece by piece
    blocked = frozenset([("d", at)]) if short else frozenset()
    return Spec(
        ins, [out], [tuple(shape[i] for i in kept)], reduce={("d", at): "sum"}, linear=[(0,), (1,)],
        blocked=blocked,
    )  # fmt: skip


@rule(torch.tensordot)
def tensordot(x: Operand, y: Operand, dims: Any = 2, out: Any = None) -> Spec | None:
    """Dims of x contracted with dims of y."""
    if isinstance(dims, Operand) or out is not None:
        return None
    if isinstance(dims, int):
        left, right = list(range(x.ndim - dims, x.ndim)), list(range(dims))
    else:
        pair = [[d] if isinstance(d, int) else list(d) for d in dims]
        left = [normal_dim(d, x.ndim) for d in pair[0]]
        right = [normal_dim(d, y.ndim) for d in pair[1]]
    a, b = list(x.dims("x")), list(y.dims("y"))
    summed: dict[Any, str] = {}
    for i, j in zip(left, right, strict=True):
        if x.shape[i] != y.shape[j]:  # a dim of size 1, stretched
            a[i] = b[j] = None
        else:
            b[j] = a[i]
            summed[a[i]] = "sum"
    free = [(a[i], x.shape[i]) for i in range(x.ndim) if i not in left]
    free += [(b[j], y.shape[j]) for j in range(y.ndim) if j not in right]
    return Spec(
        [tuple(a), tuple(b)], [tuple(d for d, _ in free)], [tuple(n for _, n in free)], reduce=summed,
        linear=[(0,), (1,)],
    )  # fmt: skip


@rule("inner")
def inner(x: Operand, y: Operand) -> Spec | None:
    """The last dims contracted; a 0-d operand multiplies."""
    if not x.ndim or not y.ndim:
        whole = x if x.ndim else y
        return Spec([x.dims(), y.dims()], [whole.dims()], [whole.shape], linear=[(0,), (1,)])
    return tensordot(x, y, ([-1], [-1]))


@rule("addmv", inplace=True)
def addmv(bias: Operand, x: Operand, y: Operand, *, beta: Any = 1, alpha: Any = 1) -> Spec:
    """beta·bias + alpha·x[m, k]·y[k]."""
    return added(bias, [("m", "k"), ("k",)], ("m",), (x.shape[0],), ("k",))


@rule("addr", inplace=True)
def addr(bias: Operand, x: Operand, y: Operand, *, beta: Any = 1, alpha: Any = 1) -> Spec:
    """beta·bias + alpha·x[m] ⊗ y[n]."""
    return added(bias, [("m",), ("n",)], ("m", "n"), (*x.shape, *y.shape), ())


@rule("addbmm", inplace=True)
def addbmm(bias: Operand, x: Operand, y: Operand, *, beta: Any = 1, alpha: Any = 1) -> Spec:
    """beta·bias + alpha·Σ x[b, m, k]·y[b, k, n]."""
    shape = (x.shape[1], y.shape[2])
    return added(bias, [("b", "m", "k"), ("b", "k", "n")], ("m", "n"), shape, ("b", "k"))


@rule("bilinear")
def bilinear(x: Operand, y: Operand, weight: Operand, bias: Operand | None = None) -> Spec:
    """x[..., i] · weight[o, i, j] · y[..., j] + bias[o]."""
    lead: Dims = tuple(("b", i) for i in range(x.ndim - 1))
    ins: list[Dims] = [(*lead, "i"), (*lead, "j"), ("o", "i", "j")]
    groups: list[tuple[int, ...]] = [(0,), (1,), (2,)]
    if bias is not None:
        ins.append(("o",))
        groups = [(*g, 3) for g in groups]
    return Spec(
        ins, [(*lead, "o")], [(*x.shape[:-1], weight.shape[0])], reduce={"i": "sum", "j": "sum"},
        linear=groups, addends=(3,), run=_bilinear,
    )  # fmt: skip


def _bilinear(func: Callable[..., Any], args: Any, kwargs: Any, placed: Placed) -> torch.Tensor:
    bound = bound_to("input1 input2 weight bias", args, kwargs)
    # torch's own refuses empty shards
    out = torch.einsum("...i,oij,...j->...o", bound["input1"], bound["weight"], bound["input2"])
    return out if bound.get("bias") is None else out + bound["bias"]


@rule("trace")
def trace(x: Operand) -> Spec:
    """The sum of what falls on the diagonal of each rank's box."""

    def run(func: Callable[..., Any], args: Any, kwargs: Any, placed: Placed) -> torch.Tensor:
        row, column = local_box(placed.ins[0]).offsets
        return (args[0] if args else kwargs["input"]).diagonal(row - column).sum()

    return Spec([("m", "n")], [()], [()], reduce={"m": "sum", "n": "sum"}, linear=[(0,)], run=run)


@composed(torch.linalg.matrix_norm)
def matrix_norm(
    x: Any, ord: Any = "fro", dim: Any = (-2, -1), keepdim: bool = False, *, dtype: Any = None
) -> Any:
    """By sums and singular values: every order is a norm of a norm."""
    if dtype is not None:
        x = x.to(dtype)
    a, b = (normal_dim(d, x.ndim) for d in dim)
    if ord == "fro":
        return torch.linalg.vector_norm(x, 2, (a, b), keepdim)
    if ord in (1, -1, math.inf, -math.inf):
        first, last = (a, b) if abs(ord) == 1 else (b, a)
        sums = x.abs().sum(first, keepdim=True)
        out = sums.amax(last, keepdim=True) if ord > 0 else sums.amin(last, keepdim=True)
    elif ord in (2, -2, "nuc"):
        values = torch.linalg.svdvals(x.movedim((a, b), (-2, -1)))
        out = values.sum(-1) if ord == "nuc" else values.amax(-1) if ord > 0 else values.amin(-1)
        first, last = sorted((a, b))
        return out.unsqueeze(first).unsqueeze(last) if keepdim else out
    else:
        return NotImplemented
    return out if keepdim else out.squeeze((a, b))


@composed(torch.linalg.norm)
def norm(x: Any, ord: Any = None, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    """torch.linalg.norm: of vectors or of matrices."""
    if dim is None and ord is not None and x.ndim == 2:
        dim = (0, 1)
    if isinstance(ord, str) or (
        dim is not None and not isinstance(dim, int) and len(dim) == 2 and ord is not None
    ):
        return torch.linalg.matrix_norm(x, ord, dim if dim is not None else (-2, -1), keepdim, dtype=dtype)
    return torch.linalg.vector_norm(x, 2 if ord is None else ord, dim, keepdim, dtype=dtype)


@composed(torch.linalg.multi_dot)
def multi_dot(matrices: Sequence[Any]) -> Any:
    """The products in the cheapest order (Cormen, Leiserson, Rivest: matrix-chain order)."""
    first, last = matrices[0], matrices[-1]
    chain = [first.unsqueeze(0) if first.ndim == 1 else first, *matrices[1:]]
    if last.ndim == 1:
        chain[-1] = last.unsqueeze(1)
    size = [m.shape[0] for m in chain] + [chain[-1].shape[1]]
    best: dict[tuple[int, int], tuple[int, Any]] = {(i, i + 1): (0, None) for i in range(len(chain))}
    for length in range(2, len(chain) + 1):
        for i in range(len(chain) - length + 1):
            j = i + length
            best[i, j] = min(
                (best[i, k][0] + best[k, j][0] + size[i] * size[k] * size[j], k) for k in range(i + 1, j)
            )

    def product(i: int, j: int) -> Any:
        cut = best[i, j][1]
        return chain[i] if cut is None else product(i, cut) @ product(cut, j)

    out = product(0, len(chain))
    gone = [d for d, m in ((0, first), (1, last)) if m.ndim == 1]
    return out.squeeze(tuple(gone)) if gone else out


@rule(torch.linalg.cond)
def condition(A: Operand, p: Any = None) -> Spec | None:
    """torch.linalg.cond, which of no matrices has no gradient."""
    spec = _over_batch(torch.linalg.cond, (A, p), {}, [A], [2])
    if spec is not None:
        spec.run, spec.when = of_one, Placed.lacks
    return spec


@composed(torch.chain_matmul, torch.functional.chain_matmul)
def chain_matmul(*matrices: Any) -> Any:
    """torch.chain_matmul: the matrices one by one."""
    return multi_dot(matrices) if len(matrices) > 1 else matrices[0]


# ---- fourier transforms: linear; the dims transformed are whole, the others may be sharded


@rule_of_each("fft ifft rfft irfft hfft ihfft", (-1,))
@rule_of_each("fft2 ifft2 rfft2 irfft2 hfft2 ihfft2", (-2, -1))
@rule_of_each("fftn ifftn rfftn irfftn hfftn ihfftn", None)
def transform(function: Any, default: tuple[int, ...] | None) -> RuleFunction:
    """The rule of ``function(x, n, dim, norm)``, which transforms these dims by default.

    None: all, or as many of the last as there are sizes.
    """

    def rule(x: Operand, n: Any = None, dim: Any = None, norm: str | None = None, **kw: Any) -> Spec:
        n = kw.pop("s", n)
        dims = (dim,) if isinstance(dim, int) else dim if dim is not None else default
        if dims is None:
            count = x.ndim if n is None else len(n)
            dims = range(x.ndim - count, x.ndim)
        whole = {normal_dim(d, x.ndim) for d in dims}
        words = {} if dim is None else {"dim": dim}
        return _over_others(x, whole, outcome(function, x, n, **words)[0])

    return rule


def _over_others(x: Operand, whole: set[int], shape: tuple[int, ...]) -> Spec:
    dims: Dims = tuple(None if i in whole else d for i, d in enumerate(x.dims()))
    out = (*dims, *(None,) * (len(shape) - x.ndim))
    return Spec([dims], [out], [shape], linear=[(0,)], run=of_one, when=Placed.lacks)


@rule(torch.fft.fftshift, torch.fft.ifftshift)
def shift(x: Operand, dim: Any = None) -> Spec:
    """fftshift and ifftshift."""
    dims = range(x.ndim) if dim is None else (dim,) if isinstance(dim, int) else dim
    return _over_others(x, {normal_dim(d, x.ndim) for d in dims}, x.shape)


@rule_of_each("stft istft")
def short_time(function: Any) -> RuleFunction:
    """stft and istft: the batch may be sharded, the window is whole."""

    def rule(x: Operand, *args: Any, **kwargs: Any) -> Spec:
        shape = outcome(function, x, *args, **kwargs)[0]
        single = x.ndim == (1 if function.__name__ == "stft" else 2)
        lead: Dims = () if single else ("b",)
        window = [(None,)] if any(isinstance(a, Operand) for a in (*args, *kwargs.values())) else []
        dims_in, result = ((*lead, *(None,) * (n - len(lead))) for n in (x.ndim, len(shape)))
        return Spec([dims_in, *window], [result], [shape], linear=[(0,)], run=of_one, when=Placed.lacks)

    return rule
