"""Scaled dot-product attention over sharded batch, heads and sequence."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from espalier.comm import move
from espalier.comm.row_exchange import Spans, spans_of
from espalier.layout import Layout, local_box, same_cuts
from espalier.layout.layout import AxisState, D, R
from espalier.sharding.spec import Dims, Letter, Operand, Placed, Spec, bound_to, of_nothing, rule
from espalier.tensor import fused_kernels
from espalier.tensor.dry_autocast import autocast_dtype
from espalier.tensor.dtensor import left
from espalier.tensor.random import draw_key
from espalier.tensor.rules.attention_blocks import Block, RingLayout, fused
from espalier.tensor.rules.pointwise import broadcast, letters
from espalier.tensor.rules.randomness import dropped
from espalier.tensor.rules.ring import ring, sends

_NAMES = "query key value attn_mask dropout_p is_causal"


@rule(F.scaled_dot_product_attention, loose=True)
def attention(
    query: Operand,
    key: Operand,
    value: Operand,
    attn_mask: Operand | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Spec | None:
    """query [..., h, s, d], key [..., g, t, d], value [..., g, t, e]; g heads serve h (grouped queries).

    Heads may be sharded if the cuts of g serve those of h; else g stays whole and each rank takes
    the ones that its h need. Other dims before the last two are broadcast. Queries may be sharded where
    keys and values are whole. Where all are sharded along the sequence, so they stay: see
    :func:`_over_sequence` (a ring) and :func:`_by_heads` (Ulysses). The mesh may say which of the two, or
    that keys and values are to be gathered (``Mesh.telling``).
    """
    if query.ndim < 3:
        return None
    if not _serves(query, key, value):
        return _stretched(query, key, value, attn_mask)
    lead: Dims = tuple(("b", i) for i in range(query.ndim - 3))
    h, g = query.shape[-3], key.shape[-3]
    axes = [query.layout.mesh.shape[a] for a in query.layout.cuts[query.ndim - 3]]
    together = h == g or (h % g == 0 and same_cuts(g, h // g, tuple(axes)))
    kv_heads: Letter | None = "h" if together else None
    names: Dims = (*lead, "h", "s", None)
    ins: list[Dims] = [names, (*lead, kv_heads, None, None), (*lead, kv_heads, None, None)]
    rows = query.ndim - 2
    along: list[AxisState] = [rows, rows, rows]
    if attn_mask is not None:
        full = (*query.shape[:-1], key.shape[-2])
        ins.append(broadcast(names, attn_mask.shape, full))
        along.append(ins[-1].index("s") if "s" in ins[-1] else R)
    return Spec(
        ins,
        [names],
        [(*query.shape[:-1], value.shape[-1])],
        factors={"h": [(g, 1), (g, h // g)]} if together and h != g else {},
        run=_attend,
        when=None if dropout_p > 0 or h != g else _is_special,
        ways=[] if "gather" in query.layout.mesh.words.values() else [(tuple(along), (rows,))],
        # as much as where keys and values are gathered; that this leaves them where they are tips the scales
        passes={("way", 0): (1, 2)},
    )


def _serves(query: Operand, key: Operand, value: Operand) -> bool:
    """Whether all are alike but for fewer heads of keys and values."""
    alike = (
        query.ndim == key.ndim and query.shape[:-3] == key.shape[:-3] and key.shape[:-2] == value.shape[:-2]
    )
    return alike and key.shape[-3] > 0 and query.shape[-3] % key.shape[-3] == 0


def _stretched(query: Operand, key: Operand, value: Operand, attn_mask: Operand | None) -> Spec | None:
    """Of operands whose dims before the last two are broadcast: keys of one head for all queries, say."""
    try:
        lead = tuple(torch.broadcast_shapes(*(x.shape[:-2] for x in (query, key, value))))
    except RuntimeError:
        return None
    out = tuple(("b", i) for i in range(len(lead)))
    ins: list[Dims] = [(*letters(x.shape[:-2], lead), None, None) for x in (query, key, value)]
    ins[0] = (*ins[0][:-2], "s", None)
    rows: list[AxisState] = [x.ndim - 2 for x in (query, key, value)]
    full = (*lead, query.shape[-2], key.shape[-2])
    if attn_mask is not None:
        ins.append((*letters(attn_mask.shape, full)[:-1], None) if attn_mask.ndim else ())
        ins[-1] = tuple("s" if d == ("d", len(lead)) else d for d in ins[-1])
        rows.append(ins[-1].index("s") if "s" in ins[-1] else R)
    ins = [tuple(("b", d[1]) if isinstance(d, tuple) else d for d in dims) for dims in ins]
    sent = (math.prod(key.shape) + math.prod(value.shape)) // 2 - 1
    gather = "gather" in query.layout.mesh.words.values()
    return Spec(
        ins,
        [(*out, "s", None)],
        [(*lead, query.shape[-2], value.shape[-1])],
        run=_attend_stretched,
        ways=[] if gather else [(tuple(rows), (len(lead),))],
        sends={("way", 0): max(sent, 0)},
    )


def _attend_stretched(func: Callable[..., Any], args: Any, kwargs: Any, placed: Placed) -> torch.Tensor:
    """As if queries, keys and values had been given whole: what is broadcast takes no memory."""
    bound = bound_to(_NAMES, args, kwargs)
    out, ins = placed.outs[0], list(placed.ins)
    lead = out.ndim - 2
    for i, name in enumerate(("query", "key", "value")):
        x, layout = bound[name], placed.ins[i]
        skip = out.ndim - layout.ndim
        alone = [d for d in range(lead) if d < skip or layout.shape[d - skip] != out.shape[d]]
        axes = [s + skip if isinstance(s, int) else s for s in layout.axes]
        cuts = [()] * skip + list(layout.cuts)
        for d in alone:
            cuts[d] = out.cuts[d]
            for axis in out.cuts[d]:
                axes[axis] = d
        shape = (*out.shape[:lead], *layout.shape[-2:])
        ins[i] = Layout.of(placed.mesh, tuple(axes), tuple(cuts), shape)
        bound[name] = x.expand(*ins[i].local_shape[:lead], *x.shape[-2:])
    return _attend(func, (), bound, Placed(placed.mesh, tuple(ins), placed.outs))


def _is_special(placed: Placed) -> bool:
    """Whether the local call is not the same call."""
    cut = any(placed.axes_of(x, [x.ndim - 2]) for x in placed.ins[:2])
    return cut or placed.mesh.is_dry or placed.lacks()


def _attend(func: Callable[..., Any], args: Any, kwargs: Any, placed: Placed) -> torch.Tensor:
    bound = bound_to(_NAMES, args, kwargs)
    q, k, v = bound["query"], bound["key"], bound["value"]
    whole_q, whole_k = placed.ins[0], placed.ins[1]
    heads, kv = whole_q.shape[-3], whole_k.shape[-3]
    if heads != kv and not bound.get("enable_gqa"):
        if kv != 1:
            raise ValueError(
                f"scaled_dot_product_attention: {heads} query heads but {kv} key heads; "
                "pass enable_gqa=True for grouped queries."
            )
        bound["enable_gqa"] = True  # broadcast or grouped, that is the same
    cut = placed.axes_of(whole_k, [whole_k.ndim - 2])
    if cut and (times := _heads_are_cut(placed, cut[0], bool(bound.get("is_causal")))):
        return _by_heads(func, bound, placed, cut[0], times)
    if heads != kv and k.shape[-3] == kv and q.shape[-3] != heads:
        start = local_box(whole_q).offsets[-3]
        pick = torch.arange(start, start + q.shape[-3], device=q.device) // (heads // kv)
        k, v = k.index_select(-3, pick), v.index_select(-3, pick)
        bound["enable_gqa"] = False
    bound |= {"query": q, "key": k, "value": v}
    if cut or (bound.get("is_causal") and placed.axes_of(whole_q, [whole_q.ndim - 2])):
        return _over_sequence(func, bound, placed, cut)
    if q.numel() == 0:
        # kernels differ on empty heads
        if bound.get("dropout_p", 0.0) > 0:
            draw_key(placed.mesh)  # all ranks draw alike
        mask = bound.get("attn_mask")
        return of_nothing(placed, q, k, v, *([] if mask is None else [mask]))
    if (rate := bound.get("dropout_p", 0.0)) > 0:
        # a kernel of our own, or the plain formula: the mask of torch's kernels depends on what a rank holds
        mask = bound.get("attn_mask")
        if rate < 1 and not (mask is not None and mask.requires_grad) and fused_kernels.attends(q, k, v):
            return _over_sequence(func, bound, placed, ())
        return _with_dropout(bound, placed)
    return _dry(func, bound) if placed.mesh.is_dry else func(**bound)


def _dry(func: Callable[..., Any], bound: dict[str, Any]) -> torch.Tensor:
    """On tensors without data torch would compute the plain formula, which keeps all scores; ranks do not."""
    q, k, v, mask = bound["query"], bound["key"], bound["value"], bound.get("attn_mask")
    if (low := autocast_dtype(q.device.type)) is not None:
        q, k, v = (x if x.dtype is torch.float64 else x.to(low) for x in (q, k, v))
        mask = mask if mask is None or not mask.is_floating_point() else mask.to(low)
        bound |= {"query": q, "key": k, "value": v, "attn_mask": mask}
    learnt = mask is not None and mask.requires_grad
    block = Block(
        _four(q), _four(k), _four(v), 1.0, _bias(mask, q), bool(bound.get("is_causal")), None, learnt
    )
    return fused(block).view(*q.shape[:-1], v.shape[-1]) if block.kernel == "cpu" else func(**bound)


def _heads_are_cut(placed: Placed, axis: int, causal: bool) -> int:
    """Whether heads are to be cut in place of the sequence: if the mesh says so, or that sends less.

    Counted are the elements that a rank sends, forward and backward: of queries, keys, values and output
    n - 1 parts of n each way; by the ring the n - 1 other blocks of keys and values forward, with their
    gradients backward, or, of causal ones, what :func:`sends` says.

    Returns:
        how many times each head of keys and values is needed for it; 0: heads are not to be cut.

    Raises:
        ValueError: the mesh says so, and there are too few heads.
    """
    word = placed.mesh.words.get(placed.mesh.names[axis], "auto")
    if word == "ring":
        return 0
    lay_q, lay_k, n = placed.ins[0], placed.ins[1], placed.mesh.shape[axis]
    at = lay_q.ndim - 3
    h, g = lay_q.shape[at], lay_k.shape[at]
    ranks = math.prod(placed.mesh.shape[a] for a in (*lay_q.cuts[at], axis))
    times = _times(placed, axis)
    if word == "ulysses":
        if times == 0:
            raise ValueError(
                f'context_kind = "ulysses" cuts heads in place of the sequence, but {h} heads cannot be cut '
                f"among {ranks} ranks. Use a context of at most {max(h * n // ranks, 1)} ranks, or "
                'context_kind = "ring".'
            )
        return times
    if times != 1 or g % ranks:
        return 0
    q, k, v, out = (math.prod(x.padded_shape) for x in (*placed.ins[:3], placed.outs[0]))
    around = sends(n, k + v, q + out) if causal else 3 * (n - 1) * (k + v)
    return int(2 * (q + k + v + out) * (n - 1) / n <= around)


def _times(placed: Placed, axis: int) -> int:
    """The least copies of each head of keys and values with which heads can be cut along an axis too.

    Cut so, they serve the queries of their rank. 0: there are too few heads.
    """
    lay_q, lay_k = placed.ins[0], placed.ins[1]
    at, shape = lay_q.ndim - 3, placed.mesh.shape
    h, g = lay_q.shape[at], lay_k.shape[at]
    before = tuple(shape[a] for a in lay_q.cuts[at])
    sizes, ranks = (*before, shape[axis]), math.prod(before) * shape[axis]
    if h % max(g, 1):
        return 0
    for times in (r for r in range(1, h // g) if h // g % r == 0 and lay_q.cuts[at] == lay_k.cuts[at]):
        if (
            g * times >= ranks
            and same_cuts(g, times, before)
            and same_cuts(g * times, h // (g * times), sizes)
        ):
            return times
    return h // g if h >= ranks else 0


def _by_heads(
    func: Callable[..., Any], bound: dict[str, Any], placed: Placed, axis: int, times: int
) -> torch.Tensor:
    """Heads cut along an axis in place of the sequence, for the time of the attention (Ulysses).

    Jacobs et al., 2023: two all-to-alls, before and after. Of keys and values so many copies are sent.
    """
    at = placed.ins[0].ndim - 3
    here = list(placed.ins)
    if times > 1:
        every = here[1].shape[at] * times
        for i, name in ((1, "key"), (2, "value")):
            bound = bound | {name: _copies(bound[name], here[i], here[0], every)}
            cuts = tuple(here[0].cuts[d] if d == at else cut for d, cut in enumerate(here[i].cuts))
            shape = tuple(every if d == at else size for d, size in enumerate(here[i].shape))
            axes = tuple(at if a in here[0].cuts[at] else s for a, s in enumerate(here[i].axes))
            here[i] = Layout.of(placed.mesh, axes, cuts, shape)
    there = [lay.with_axis(axis, at) for lay in here[:3]]
    if len(here) > 3:
        mask = here[3]
        heads_dim = mask.ndim - 3
        there.append(mask.with_axis(axis, heads_dim if heads_dim >= 0 and mask.shape[heads_dim] > 1 else D))
    names = ("query", "key", "value", "attn_mask")
    bound = bound | {
        name: move(bound[name], lay, to) for name, lay, to in zip(names, here, there, strict=False)
    }
    done = placed.outs[0].with_axis(axis, at)
    out = _attend(func, (), bound, Placed(placed.mesh, tuple(there), (done,)))
    return move(out, done, placed.outs[0])


def _copies(x: torch.Tensor, lay: Layout, queries: Layout, every: int) -> torch.Tensor:
    """Keys or values with so many heads in all, of which this rank has those that its queries need."""
    at = lay.ndim - 3
    if lay.cuts[at] == queries.cuts[at]:
        return x.repeat_interleave(every // lay.shape[at], at - lay.ndim)
    box = local_box(queries)
    start, end = box.offsets[at], box.offsets[at] + box.sizes[at]
    pick = torch.arange(start, end, device=x.device) // (queries.shape[at] // lay.shape[at])
    return x.index_select(at - lay.ndim, pick)


def _over_sequence(
    func: Callable[..., Any], bound: dict[str, Any], placed: Placed, cut: tuple[int, ...]
) -> torch.Tensor:
    """Queries cut along the sequence; so are keys and values, along the axes ``cut``, if there are any.

    Of these the outermost is the ring's axis; along the others keys and values are gathered.
    """
    q, k, v, mask = bound["query"], bound["key"], bound["value"], bound.get("attn_mask")
    causal, rate = bool(bound.get("is_causal")), bound.get("dropout_p", 0.0)
    if causal and mask is not None:
        return func(**bound)  # torch's own word on it
    mesh, lay_k = placed.mesh, placed.ins[1]
    for axis in cut[1:]:
        k, v = (_gathered(x, lay, axis) for x, lay in ((k, placed.ins[1]), (v, placed.ins[2])))
        lay_k = lay_k.with_axis(axis, D)
    scale = bound.get("scale")
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    known = scale, causal, rate
    if known not in placed.notes:
        placed.notes[known] = _way(placed, lay_k, cut[0] if cut else None, scale, causal, rate)
    way = placed.notes[known]
    key = draw_key(mesh) if rate > 0 else None
    attended = ring(_four(q), _four(k), _four(v), _bias(mask, q), key, way)
    return attended if placed.outs[0].ndim == 4 else attended.view(*q.shape[:-1], attended.shape[-1])


def _way(
    placed: Placed, lay_k: Layout, around: int | None, scale: float, causal: bool, rate: float
) -> RingLayout:
    """How calls on such layouts go, along the axis ``around`` if there is one."""
    mesh, lay_q, out = placed.mesh, placed.ins[0], placed.outs[0]
    rows = lay_q.ndim - 2
    box = local_box(lay_q)
    queries: Spans = ((box.offsets[rows], box.offsets[rows] + box.sizes[rows]),)
    keys = (((0, lay_k.shape[rows]),),) if around is None else spans_of(lay_k, rows)
    balanced = causal and around is not None and keys == spans_of(lay_q, rows)
    weights = Layout.of(mesh, out.axes, out.cuts, (*out.shape[:-1], lay_k.shape[rows]))
    return RingLayout(mesh, around, queries, keys, weights, scale, causal, rate, balanced)


def _gathered(x: torch.Tensor, layout: Layout, axis: int) -> torch.Tensor:
    return move(x, layout, layout.with_axis(axis, D))


def _four(x: torch.Tensor) -> torch.Tensor:
    """As [b, h, s, d]; plain, for what is saved of it is looked at where torch functions are intercepted."""
    return left(x) if x.ndim == 4 else x.reshape(math.prod(x.shape[:-3]), *x.shape[-3:])


def _bias(mask: torch.Tensor | None, q: torch.Tensor) -> torch.Tensor | None:
    """A mask in four dims."""
    if mask is None:
        return None
    mask = mask[(None,) * (q.ndim - mask.ndim)]
    if q.ndim > 4 and any(n > 1 for n in mask.shape[:-3]):
        mask = mask.expand(*q.shape[:-3], *mask.shape[-3:])
    return mask.reshape(math.prod(mask.shape[:-3]), *mask.shape[-3:])


def _with_dropout(bound: dict[str, Any], placed: Placed) -> torch.Tensor:
    """The plain formula."""
    q, k, v, mask = bound["query"], bound["key"], bound["value"], bound.get("attn_mask")
    if k.shape[-3] != q.shape[-3]:
        k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
    scale = bound.get("scale") or 1 / math.sqrt(q.shape[-1])
    scores = q @ k.transpose(-2, -1) * scale
    if bound.get("is_causal"):
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~allowed, -math.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype is torch.bool else scores + mask
        # rows that see nothing, of padding, say, are zeros, as torch's
        gone = scores.isneginf().all(-1, keepdim=True)
        weights = F.softmax(scores.masked_fill(gone, 0.0), -1).masked_fill(gone, 0.0)
    else:
        weights = F.softmax(scores, -1)
    out = placed.outs[0]
    shape = (*out.shape[:-1], placed.ins[1].shape[-2])
    lay = Layout.of(out.mesh, out.axes, out.cuts, shape)
    return dropped(weights, Placed(out.mesh, (), (lay,)), bound["dropout_p"]) @ v
