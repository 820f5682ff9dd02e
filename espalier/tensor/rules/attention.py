"""Scaled dot-product attention over sharded batch, heads and (not causal) queries."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from espalier.layout import Layout, local_box, same_cuts
from espalier.tensor.rules.randomness import keep_mask
from espalier.tensor.rules.spec import Dims, Letter, Operand, Placed, Rules, Spec, bound_to, of_nothing

_NAMES = "query key value attn_mask dropout_p is_causal"


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
    the ones that its h need.
    """
    if query.ndim < 3 or query.ndim != key.ndim or query.shape[:-3] != key.shape[:-3]:
        return None
    lead: Dims = tuple(("b", i) for i in range(query.ndim - 3))
    h, g = query.shape[-3], key.shape[-3]
    axes = [query.layout.mesh.shape[a] for a in query.layout.cuts[query.ndim - 3]]
    together = h == g or (h % g == 0 and same_cuts(g, h // g, tuple(axes)))
    queries: Letter | None = None if is_causal else "s"
    kv_heads: Letter | None = "h" if together else None
    ins: list[Dims] = [
        (*lead, "h", queries, None),
        (*lead, kv_heads, None, None),
        (*lead, kv_heads, None, None),
    ]
    if attn_mask is not None:
        names = (*lead, "h", queries, None)
        full = (*query.shape[:-1], key.shape[-2])
        skip = len(names) - attn_mask.ndim
        ins.append(
            tuple(names[i + skip] if n == full[i + skip] else None for i, n in enumerate(attn_mask.shape))
        )
    factors = {"h": [(g, 1), (g, h // g)]} if together and h != g else {}
    return Spec(
        ins,
        [(*lead, "h", queries, None)],
        [(*query.shape[:-1], value.shape[-1])],
        factors=factors,
        run=_attend,
        when=None if dropout_p > 0 or h != g else Placed.lacks,
    )


def _attend(func: Callable[..., Any], args: Any, kwargs: Any, placed: Placed) -> torch.Tensor:
    bound = bound_to(_NAMES, args, kwargs)
    q, k, v = bound["query"], bound["key"], bound["value"]
    if q.numel() == 0:
        # kernels differ on empty heads
        mask = bound.get("attn_mask")
        return of_nothing(placed, q, k, v, *([] if mask is None else [mask]))
    whole_q, whole_k = placed.ins[0], placed.ins[1]
    heads, kv = whole_q.shape[-3], whole_k.shape[-3]
    if heads != kv:
        if not bound.get("enable_gqa"):
            raise ValueError(
                f"scaled_dot_product_attention: {heads} query heads but {kv} key heads; "
                "pass enable_gqa=True for grouped queries."
            )
        if k.shape[-3] == kv and q.shape[-3] != heads:
            start = local_box(whole_q).offsets[-3]
            pick = torch.arange(start, start + q.shape[-3], device=q.device) // (heads // kv)
            k, v = k.index_select(-3, pick), v.index_select(-3, pick)
            bound["enable_gqa"] = False
    bound |= {"query": q, "key": k, "value": v}
    if bound.get("dropout_p", 0.0) > 0:
        return _with_dropout(bound, placed)
    return func(**bound)


def _with_dropout(bound: dict[str, Any], placed: Placed) -> torch.Tensor:
    """The plain formula, for the mask of torch's kernels depends on what one rank holds."""
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
    weights = F.softmax(scores, -1)
    out = placed.outs[0]
    shape = (*out.shape[:-1], placed.ins[1].shape[-2])
    lay = Layout.of(out.mesh, out.axes, out.cuts, shape)
    dropped = weights * keep_mask(Placed(out.mesh, (), (lay,)), bound["dropout_p"], weights)
    return dropped @ v


def register(rules: Rules) -> None:
    """Put the rules of this file into the table."""
    rules.add(F.scaled_dot_product_attention, attention, loose=True)
