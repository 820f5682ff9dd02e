"""Products: linear layers, matrix products, embeddings, einsum."""

from __future__ import annotations

import math
import string
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from espalier.comm.redistribute import carry_out
from espalier.layout import Layout, local_box
from espalier.layout.layout import AxisState, R
from espalier.sharding.spec import DONE, Dims, Operand, Placed, Spec, bound_to, composed, of_nothing, rule
from espalier.tensor.random import draw_key
from espalier.tensor.rules.joint_failure import with_one, within
from espalier.tensor.rules.pointwise import broadcast, letters
from espalier.tensor.rules.randomness import keep_mask
from espalier.tensor.rules.summa import ADDMM, LINEAR, MATMUL, REVERSED, lay_on_grid


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
    lead = torch.broadcast_shapes(a[:-2], b[:-2])
    left: Dims = (*letters(a[:-2], lead, "b"), "m", "k") if len(a) > 1 else ("k",)
    right: Dims = (*letters(b[:-2], lead, "b"), "k", "n") if len(b) > 1 else ("k",)
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


def added(bias: Operand, ins: list[Dims], out: Dims, shape: tuple[int, ...], summed: Dims) -> Spec:
    """A product of two, and a bias that is broadcast to it."""
    named, sums = broadcast(out, bias.shape, shape), dict.fromkeys(summed, "sum")
    return Spec([named, *ins], [out], [shape], reduce=sums, linear=[(0, 1), (0, 2)], addends=(0,))


@rule("addmm baddbmm", loose=True)
def addmm(bias: Operand, x: Operand, y: Operand, *, beta: Any = 1, alpha: Any = 1) -> Spec | None:
    """beta·bias + alpha·x[m, k]·y[k, n]; also addbmm's batched sister baddbmm."""
    lead: Dims = ("z",) if x.ndim == 3 else ()
    shape = (*x.shape[:-1], y.shape[-1])
    out: Dims = (*lead, "m", "n")
    spec = added(bias, [(*lead, "m", "k"), (*lead, "k", "n")], out, shape, ("k",))
    if beta != 1 or alpha != 1 or bias.ndim != 1 or not spec.ins[0][0]:
        return spec
    return lay_on_grid(spec, ADDMM, x, y, bias)


@rule("outer ger", loose=True)
def outer(x: Operand, y: Operand) -> Spec:
    """x[m] ⊗ y[n]."""
    return Spec([("m",), ("n",)], [("m", "n")], [(*x.shape, *y.shape)], linear=[(0,), (1,)])


@rule(torch.einsum, torch.functional.einsum, loose=True)
def einsum(equation: str, *operands: Any) -> Spec | None:
    """Any equation in letters, without repeated letters in one operand."""
    tensors: list[Operand] = list(operands[0]) if isinstance(operands[0], list | tuple) else list(operands)
    if not isinstance(equation, str):
        return None
    left, _, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if "->" not in equation:
        letters = left.replace(".", "")
        once = sorted(c for c in set(letters) - {","} if letters.count(c) == 1)
        right = "".join(["..." if "..." in left else "", *once])
    if "..." in left:
        terms, right = _without_ellipsis(terms, right, [len(x.shape) for x in tensors])
    if any(len(set(t)) != len(t) for t in terms) or [*map(len, terms)] != [len(x.shape) for x in tensors]:
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


def _without_ellipsis(terms: Sequence[str], right: str, dims: Sequence[int]) -> tuple[list[str], str]:
    """Operands, and what comes of them, with letters for the dims that ``...`` stands for."""
    unused = [c for c in string.ascii_letters if all(c not in term for term in terms)]
    counts = [n - len(term.replace("...", "")) for n, term in zip(dims, terms, strict=False)]
    most = max((n for n, term in zip(counts, terms, strict=False) if "..." in term), default=0)
    dims_of = "".join(unused[:most])
    spelled = [
        term.replace("...", dims_of[most - n :] if n > 0 else "")
        for n, term in zip(counts, terms, strict=False)
    ]
    return spelled, right.replace("...", dims_of)


_NAMES_OF_LOOKUP = "input weight padding_idx max_norm norm_type scale_grad_by_freq sparse"
_NAMES_OF_TABLE = "weight indices padding_idx scale_grad_by_freq sparse"
_NAMES_OF_BAGS = (
    "input weight offsets max_norm norm_type scale_grad_by_freq mode sparse per_sample_weights "
    "include_last_offset padding_idx"
)


def _refuse_sparse(table: torch.Tensor) -> None:
    """Asked at each call: what is remembered of a call without gradients serves those with them, too."""
    if torch.is_grad_enabled() and table.requires_grad:
        raise NotImplementedError(
            "embedding(..., sparse=True) of a DTensor gives sparse gradients, which are not summed over "
            "ranks. Leave it out: SGD and Adagrad make the same updates of dense ones."
        )


def _dense(spec: Spec | None, names: str) -> Spec | None:
    """A look-up that asks for sparse gradients: refused if there are any, else the word is left out."""
    if spec is None:
        return None  # torch puts it together from others, which are asked
    lookup, when = spec.run, spec.when

    def run(func: Callable[..., Any], args: Any, kwargs: Any, placed: Placed) -> torch.Tensor:
        bound = {**bound_to(names, args, kwargs), "sparse": False}
        _refuse_sparse(bound["weight"])
        if lookup is None or (when is not None and not when(placed)):
            out: torch.Tensor = func(**bound)
            return out
        found: torch.Tensor = lookup(func, (), bound, placed)
        return found

    spec.run, spec.when = run, None
    return spec


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
    if sparse:
        spec = embedding(input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq)
        return _dense(spec, _NAMES_OF_LOOKUP)
    if max_norm is not None:
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
    if input.ndim != 2 or offsets is not None or max_norm is not None or scale_grad_by_freq:
        return None
    ins: list[Dims] = [("b", None), (None, "h")]
    if per_sample_weights is not None:
        ins.append(("b", None))

    def run(func: Callable[..., Any], args: Any, kwargs: Any, placed: Placed) -> torch.Tensor:
        bound = bound_to("input weight", args, kwargs)
        scale = bound.get("per_sample_weights")
        return of_nothing(placed, bound["weight"], *([] if scale is None else [scale]))

    shape = (input.shape[0], weight.shape[1])
    spec = Spec(ins, [("b", "h")], [shape], run=run, when=Placed.lacks, fails=(0,))
    return _dense(spec, _NAMES_OF_BAGS) if sparse else spec


@composed(torch.embedding_bag)
def bags_apart(
    weight: Any, indices: Any, offsets: Any, scale_grad_by_freq: bool = False, mode: int = 0,
    sparse: bool = False, *rest: Any, **named: Any,
) -> Any:  # fmt: skip
    """What torch makes of bags that no rule takes; no more is known of it than this."""
    if not sparse:
        return NotImplemented
    _refuse_sparse(weight)
    return torch.embedding_bag(weight, indices, offsets, scale_grad_by_freq, mode, False, *rest, **named)


@rule(torch.embedding, loose=True)
def table_embedding(
    weight: Operand,
    indices: Operand,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Spec | None:
    """torch.embedding: the same, the table first; -1 is no padding."""
    spec = embedding(indices, weight, None, None, 2.0, scale_grad_by_freq)
    if spec is not None and spec.run is not None:
        spec.run = _table_lookup
    return _dense(spec, _NAMES_OF_TABLE) if sparse else spec


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
    indices, layout = placed.ins
    if padding is not None:
        padding %= layout.shape[0]
    start, length = local_box(layout).offsets[0], table.shape[0]
    axes = placed.axes_of(layout, (0,))
    if any(a in axes for cut in indices.cuts for a in cut):
        ids = carry_out(ids, indices, _gathered(indices, axes))

    def ask(i: int) -> torch.Tensor:
        return F.embedding(with_one(ids, i), table.detach().new_empty(()).expand(layout.shape[0], 1))

    within(ids, layout.shape[0], layout.mesh, ask)
    if length == 0:
        rows = of_nothing(Placed(placed.mesh, placed.ins, (_gathered(placed.outs[0], axes),)), table)
    else:
        local = ids - start
        elsewhere = (local < 0) | (local >= length)
        if padding is not None:
            padding = padding - start if start <= padding < start + length else None
        rows = F.embedding(local.masked_fill(elsewhere, 0), table, padding)
        rows = rows.masked_fill(elsewhere.unsqueeze(-1), 0)
    # summed at once: left Partial, it would flow down the residual stream, and every norm sum it again
    return placed.total(rows, axes)


def _gathered(layout: Layout, axes: Sequence[int]) -> Layout:
    for axis in axes:
        layout = layout.with_axis(axis, R)
    return layout


# ---- recurrent layers: the batch sharded, time, features and weights whole
#
# Packed sequences have no batch dim to shard; they have no rule and are gathered.


_NAMES = "input hx params has_biases num_layers dropout train bidirectional batch_first"


@rule("lstm gru rnn_tanh rnn_relu")
def recurrent(
    input: Operand, hx: Any, params: Any, has_biases: Any, num_layers: Any, *rest: Any, **kwargs: Any
) -> Spec | None:
    """lstm, gru, rnn_tanh and rnn_relu: input[t, b, i] or [b, t, i], states[layers, b, h]."""
    states = [hx] if isinstance(hx, Operand) else list(hx)
    if not isinstance(params, tuple | list) or any(s.ndim != 3 for s in states):
        return None  # packed: data, batch_sizes, hx, params, ...
    named = bound_to(_NAMES, (input, hx, params, has_biases, num_layers, *rest), kwargs)
    layers, ways = num_layers, 2 if named["bidirectional"] else 1
    state: Dims = (None, "b", None)
    dims: Dims = ("b", None, None) if named["batch_first"] else state
    ins = [dims, *(state for _ in states), *((None,) * p.ndim for p in params)]
    shape = (*input.shape[:2], ways * states[0].shape[2])

    def run(func: Callable[..., Any], args: Any, kwargs: Any, placed: Placed) -> Any:
        bound = bound_to(_NAMES, args, kwargs)
        x, hx, params = bound["input"], bound["hx"], list(bound["params"])
        drops = bound["dropout"] if bound["train"] else 0.0
        if not x.numel():
            for _ in range(layers - 1 if drops else 0):
                draw_key(placed.mesh)  # all ranks draw alike
            operands = (x, *([hx] if isinstance(hx, torch.Tensor) else hx), *params)
            return tuple(of_nothing(placed, *operands, out=k) for k in range(1 + len(states)))
        if not drops or layers == 1:
            return func(*args, **kwargs)
        return _layered(func, bound, placed, layers, ways)

    return Spec(ins, [dims, *(state for _ in states)], [shape, *(s.shape for s in states)], run=run)


def _layered(func: Callable[..., Any], bound: dict[str, Any], placed: Placed, layers: int, ways: int) -> Any:
    """Layer by layer, for the mask of torch's dropout depends on what one rank holds."""
    x, params = bound["input"], list(bound["params"])
    alone = isinstance(bound["hx"], torch.Tensor)
    states = [bound["hx"]] if alone else list(bound["hx"])
    per = len(params) // layers
    last: list[Sequence[torch.Tensor]] = []
    for i in range(layers):
        if i:
            x = x * keep_mask(placed, bound["dropout"], x)
        layer_states = [s[i * ways : (i + 1) * ways] for s in states]
        x, *ends = func(
            x, layer_states[0] if alone else layer_states, params[i * per : (i + 1) * per],
            bound["has_biases"], 1, 0.0,
            bound["train"], bound["bidirectional"], bound["batch_first"],
        )  # fmt: skip
        last.append(ends)
    return (x, *(torch.cat(each) for each in zip(*last, strict=True)))


@rule("lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell")
def cell(
    input: Operand, hx: Any, w_ih: Operand, w_hh: Operand, b_ih: Operand | None = None,
    b_hh: Operand | None = None,
) -> Spec:  # fmt: skip
    """One step: input[b, i], states[b, h]."""
    states = [hx] if isinstance(hx, Operand) else list(hx)
    rows: Dims = ("b", None)
    small = [(None,) * o.ndim for o in (w_ih, w_hh, b_ih, b_hh) if isinstance(o, Operand)]

    def run(func: Callable[..., Any], args: Any, kwargs: Any, placed: Placed) -> Any:
        bound = bound_to("input hx w_ih w_hh b_ih b_hh", args, kwargs)
        x, hx = bound["input"], bound["hx"]
        if x.numel():
            return func(*args, **kwargs)
        weights = [p for name, p in bound.items() if name not in ("input", "hx") and p is not None]
        weights = [x, *([hx] if len(states) == 1 else hx), *weights]
        out = tuple(of_nothing(placed, *weights, out=k) for k in range(len(states)))
        return out[0] if len(states) == 1 else out

    return Spec(
        [rows, *(rows for _ in states), *small], [rows] * len(states), [s.shape for s in states], run=run
    )
