"""Products: linear layers, matrix products, embeddings, einsum."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from espalier.comm.moves import carry_out
from espalier.layout import Layout, local_box
from espalier.layout.layout import AxisState, R
from espalier.tensor.rules.grids import ADDMM, LINEAR, MATMUL, REVERSED, lay_on_grid
from espalier.tensor.rules.spec import DONE, Dims, Operand, Placed, Spec, bound_to, of_nothing
from espalier.tensor.rules.table import rule
from espalier.tensor.rules.together import with_one, within


@rule("linear", loose=True)
def linear(x: Operand, weight: Operand, bias: Operand | None = None) -> Spec:
    """x[..., k] · weight[n, k]ᵀ + bias[n]."""
    batch: Dims = tuple(("b", i) for i in range(x.ndim - 1))
    rows: Dims = ("n",) if weight.ndim == 2 else ()
    ins = [(*batch, "k"), (*rows, "k")]
    shape = (*x.shape[:-1], *weight.shape[:-1])
    if bias is None:
        spec = Spec(ins, [(*batch, *rows)], [shape], reduce={"k": "sum"}, linear=[(0,), (1,)])
        return lay_on_grid(spec, LINEAR, x, weight)
    spec = Spec(
        [*ins, rows if bias.ndim else ()],
        [(*batch, *rows)],
        [shape],
        reduce={"k": "sum"},
        linear=[(0, 2), (1, 2)],
        addends=(2,),
    )
    return lay_on_grid(spec, LINEAR, x, weight, bias)


@rule("matmul mm bmm mv dot vdot", loose=True)
def matmul(x: Operand, y: Operand) -> Spec:
    """torch.matmul with all its broadcasting."""
    a, b = x.shape, y.shape
    depth = max(len(a), len(b)) - 2
    lead = torch.broadcast_shapes(a[:-2], b[:-2])

    def batch(shape: tuple[int, ...]) -> Dims:
        skip = depth - len(shape[:-2])
        return tuple(("b", i + skip) if n == lead[i + skip] else None for i, n in enumerate(shape[:-2]))

    left: Dims = (*batch(a), "m", "k") if len(a) > 1 else ("k",)
    right: Dims = (*batch(b), "k", "n") if len(b) > 1 else ("k",)
    out: Dims = tuple(("b", i) for i in range(len(lead)))
    shape = tuple(lead)
    if len(a) > 1:
        out, shape = (*out, "m"), (*shape, a[-2])
    if len(b) > 1:
        out, shape = (*out, "n"), (*shape, b[-1])
    first, second = (left, right) if x.index < y.index else (right, left)
    spec = Spec([first, second], [out], [shape], reduce={"k": "sum"}, linear=[(0,), (1,)])
    return lay_on_grid(spec, MATMUL if x.index < y.index else REVERSED, x, y)


@rule(torch.Tensor.__rmatmul__, loose=True)
def reverse_matmul(x: Operand, y: Operand) -> Spec:
    """y @ x."""
    return matmul(y, x)


@rule("addmm baddbmm", loose=True)
def addmm(bias: Operand, x: Operand, y: Operand, *, beta: Any = 1, alpha: Any = 1) -> Spec | None:
    """beta·bias + alpha·x[m, k]·y[k, n]; also addbmm's batched sister baddbmm."""
    lead: Dims = ("z",) if x.ndim == 3 else ()
    shape = (*x.shape[:-1], y.shape[-1])
    out: Dims = (*lead, "m", "n")
    skip = len(out) - bias.ndim
    added = tuple(out[i + skip] if n == shape[i + skip] else None for i, n in enumerate(bias.shape))
    spec = Spec(
        [added, (*lead, "m", "k"), (*lead, "k", "n")],
        [out],
        [shape],
        reduce={"k": "sum"},
        linear=[(0, 1), (0, 2)],
        addends=(0,),
    )
    if beta != 1 or alpha != 1 or bias.ndim != 1 or not added[0]:
        return spec
    return lay_on_grid(spec, ADDMM, x, y, bias)


@rule("outer ger", loose=True)
def outer(x: Operand, y: Operand) -> Spec:
    """x[m] ⊗ y[n]."""
    return Spec([("m",), ("n",)], [("m", "n")], [(*x.shape, *y.shape)], linear=[(0,), (1,)])


@rule(torch.einsum, torch.functional.einsum, loose=True)
def einsum(equation: str, *operands: Any) -> Spec | None:
    """Any equation in letters, without ellipsis or repeated letters in one operand."""
    tensors: list[Operand] = list(operands[0]) if isinstance(operands[0], list | tuple) else list(operands)
    if "." in equation or not isinstance(equation, str):
        return None
    left, _, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if "->" not in equation:
        right = "".join(sorted(c for c in set(left) - {","} if left.count(c) == 1))
    if any(len(set(t)) != len(t) for t in terms) or len(terms) != len(tensors):
        return None
    sizes: dict[str, int] = {}
    for term, x in zip(terms, tensors, strict=True):
        for c, n in zip(term, x.shape, strict=True):
            sizes[c] = max(n, sizes.get(c, 1))
    ins = [
        tuple(c if n == sizes[c] else None for c, n in zip(term, x.shape, strict=True))
        for term, x in zip(terms, tensors, strict=True)
    ]
    contracted = {c: "sum" for c in sizes if c not in right}
    return Spec(
        ins,
        [tuple(right)],
        [tuple(sizes[c] for c in right)],
        reduce=contracted,
        linear=[(i,) for i in range(len(tensors))],
    )


@rule(F.embedding, loose=True)
def embedding(
    input: Operand,
    weight: Operand,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Spec | None:
    """weight[v, h] looked up at input[...]; over a sharded vocabulary each rank adds what it has."""
    if max_norm is not None or sparse:
        return None
    ids = input.dims("i")
    if scale_grad_by_freq:
        # how often an index stands in all of the input decides
        ends: list[Dims] = [(None,) * input.ndim, (None, "h")]
        if input.index > weight.index:
            ends.reverse()
        return Spec(ends, [(*(None,) * input.ndim, "h")], [(*input.shape, weight.shape[1])])
    ins: list[Dims] = [ids, ("v", "h")]
    if input.index > weight.index:  # torch.embedding
        ins.reverse()
    spec = Spec(
        ins,
        [(*ids, "h")],
        [(*input.shape, weight.shape[1])],
        reduce={"v": DONE},
        linear=[(weight.index,)],
        ways=[_shared_lookup(d, input.index) for d in range(input.ndim)],
        run=_lookup,
        when=lambda placed: placed.axes_of(placed.ins[weight.index], (0,)) or placed.lacks(),
    )
    # along an axis that cuts both, the indices stay: what is smaller moves, the table or what is looked up
    rows = "v" if math.prod(input.shape) < weight.shape[0] else None
    for axis, (state, other) in enumerate(zip(input.layout.axes, weight.layout.axes, strict=True)):
        if isinstance(state, int) and isinstance(other, int) and ("v", "h")[other] != rows:
            states = (state, R) if input.index < weight.index else (R, state)
            spec.decided[axis] = states, (state,), ids[state]
    return spec


def _shared_lookup(dim: int, place: int) -> tuple[tuple[AxisState, ...], tuple[AxisState, ...]]:
    """One axis cuts ids and vocabulary: all ids go to every rank, and each gets its own ids' sums back."""
    return ((dim, 0) if place == 0 else (0, dim)), (dim,)


@rule(F.embedding_bag)
def embedding_bag(
    input: Operand,
    weight: Operand,
    offsets: Operand | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Operand | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Spec | None:
    """Sums, means or maxima of weight[v, h] over bags input[b, n]; features and bags may be sharded."""
    if input.ndim != 2 or offsets is not None or max_norm is not None or scale_grad_by_freq or sparse:
        return None
    ins: list[Dims] = [("b", None), (None, "h")]
    if per_sample_weights is not None:
        ins.append(("b", None))

    def run(func: Callable[..., Any], args: Any, kwargs: Any, placed: Placed) -> torch.Tensor:
        bound = bound_to("input weight", args, kwargs)
        scale = bound.get("per_sample_weights")
        return of_nothing(placed, bound["weight"], *([] if scale is None else [scale]))

    shape = (input.shape[0], weight.shape[1])
    return Spec(ins, [("b", "h")], [shape], run=run, when=Placed.lacks, fails=(0,))


@rule(torch.embedding, loose=True)
def table_embedding(
    weight: Operand,
    indices: Operand,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Spec | None:
    """torch.embedding: the same, the table first; -1 is no padding."""
    spec = embedding(indices, weight, None, None, 2.0, scale_grad_by_freq, sparse)
    if spec is not None and spec.run is not None:
        spec.run = _table_lookup
    return spec


@rule(torch.embedding_renorm_)
def embedding_renorm(weight: Operand, indices: Operand, max_norm: float, norm_type: float) -> Spec | None:
    """Rows of weight[v, h] cut to a norm: on every rank those that any of all the indices names."""
    if any(weight.layout.cuts):
        return None
    ends: list[Dims] = [(None, None), (None,) * indices.ndim]
    return Spec(ends, [ends[0]], [weight.shape], inplace=weight.index)


def _table_lookup(func: Callable[..., Any], args: Any, kwargs: Any, placed: Placed) -> torch.Tensor:
    bound = bound_to("weight indices padding_idx", args, kwargs)
    padding = bound.get("padding_idx", -1)
    ends = Placed(placed.mesh, placed.ins[::-1], placed.outs)
    return _lookup(func, (bound["indices"], bound["weight"], None if padding < 0 else padding), {}, ends)


def _lookup(func: Callable[..., Any], args: Any, kwargs: Any, placed: Placed) -> torch.Tensor:
    bound = bound_to("input weight padding_idx", args, kwargs)
    ids, table, padding = bound["input"], bound["weight"], bound.get("padding_idx")
    given, layout = placed.ins
    if padding is not None:
        padding %= layout.shape[0]
    start, length = local_box(layout).offsets[0], table.shape[0]
    axes = placed.axes_of(layout, (0,))
    if any(a in axes for cut in given.cuts for a in cut):
        ids = carry_out(ids, given, _gathered(given, axes))

    def ask(i: int) -> torch.Tensor:
        return F.embedding(with_one(ids, i), table.detach().new_empty(()).expand(layout.shape[0], 1))

    within(ids, layout.shape[0], layout.mesh, ask)
    if length == 0:
        found = of_nothing(Placed(placed.mesh, placed.ins, (_gathered(placed.outs[0], axes),)), table)
    else:
        local = ids - start
        elsewhere = (local < 0) | (local >= length)
        if padding is not None:
            padding = padding - start if start <= padding < start + length else None
        found = F.embedding(local.masked_fill(elsewhere, 0), table, padding)
        found = found.masked_fill(elsewhere.unsqueeze(-1), 0)
    # summed at once: left Partial, it would flow down the residual stream, and every norm sum it again
    return placed.total(found, axes)


def _gathered(layout: Layout, axes: Sequence[int]) -> Layout:
    for axis in axes:
        layout = layout.with_axis(axis, R)
    return layout
