"""``flex_attention`` on DTensors: batch, heads and queries may be cut.

Without ``torch.compile`` torch computes the plain formula, which keeps all scores; so does each rank for
its part, with the batch, heads and queries counted from where its part begins. What a score or mask
function captures is gathered where it is a DTensor.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention import flex_attention as flex

from espalier.comm.custom_ops import recording
from espalier.layout import local_box, same_cuts
from espalier.sharding.spec import Dims, Letter, Operand, Placed, Spec
from espalier.tensor.dispatch import carry_out
from espalier.tensor.dtensor import DTensor, plain
from espalier.tensor.rules import RULES
from espalier.tensor.transforms import Inside, not_recorded
from espalier.torch_private import UNBOUNDED_BLOCK, math_attention, same_score, with_torch_functions

_LN2 = math.log(2.0)


class _Functions:
    """What changes scores and what masks them: no part of the key to the dispatcher's cache."""

    def __init__(self, score: Callable[..., Any], mask: Callable[..., Any]) -> None:
        self.score, self.mask = score, mask

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Functions)

    def __hash__(self) -> int:
        return 0


def install_attention() -> None:
    """Let ``torch.nn.attention.flex_attention`` take DTensors (a second call does nothing)."""
    original = flex.flex_attention
    if getattr(original, "_espalier", False):
        return

    @functools.wraps(original)
    def flex_attention(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        if recording():
            raise not_recorded("flex_attention is called")
        if torch.compiler.is_compiling() or not any(type(x) is DTensor for x in (query, key, value)):
            return original(query, key, value, *args, **kwargs)
        return _on_dtensors(query, key, value, *args, **kwargs)

    flex_attention._espalier = True  # type: ignore[attr-defined]
    flex.flex_attention = flex_attention
    RULES.add(_attended, _rule, loose=True)


def _on_dtensors(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Callable[..., Any] | None = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Any = None,
    *,
    return_aux: Any = None,
) -> Any:
    if query.dim() != 4 or key.dim() != 4 or value.dim() != 4:
        raise NotImplementedError("NYI: query, key, and value must be 4D tensors")
    if query.size(1) != key.size(1) and not (enable_gqa and query.size(1) % key.size(1) == 0):
        raise ValueError(
            "Expect query and key/value to have the same number of heads, or with enable_gqa=True a multiple "
            f"of them, but got Hq={query.size(1)} and Hkv={key.size(1)}."
        )
    bounded = block_mask is not None and max(block_mask.BLOCK_SIZE) < UNBOUNDED_BLOCK
    if bounded and tuple(block_mask.shape[-2:]) != (query.size(-2), key.size(-2)):
        raise ValueError(
            f"block_mask was created for block_mask.shape={block_mask.shape} but got "
            f"q_len={query.size(-2)} and kv_len={key.size(-2)}."
        )
    functions = _Functions(
        score_mod or same_score, flex.noop_mask if block_mask is None else block_mask.mask_mod
    )
    scale = 1 / math.sqrt(query.size(-1)) if scale is None else scale
    out, lse, most = carry_out(DTensor, _attended, (), (query, key, value, functions, scale))
    if return_aux is not None:
        aux = flex.AuxOutput(
            lse=lse * _LN2 if return_aux.lse else None,
            max_scores=most * _LN2 if return_aux.max_scores else None,
        )
        return out, aux
    return (out, lse * _LN2) if return_lse else out


def _rule(query: Operand, key: Operand, value: Operand, functions: _Functions, scale: float) -> Spec:
    """query [b, h, s, d], key [b or 1, g, t, d], value [b or 1, g, t, e]."""
    h, g = query.shape[1], key.shape[1]
    axes = tuple(query.layout.mesh.shape[a] for a in query.layout.cuts[1])
    together = h == g or same_cuts(g, h // g, axes)
    heads: Letter | None = "h" if together else None
    ins: list[Dims] = [("b", "h", "s", None)]
    ins += [("b" if x.shape[0] == query.shape[0] else None, heads, None, None) for x in (key, value)]
    rows = tuple(query.shape[:3])
    return Spec(
        ins,
        [("b", "h", "s", None), ("b", "h", "s"), ("b", "h", "s")],
        [(*rows, value.shape[-1]), rows, rows],
        factors={"h": [(g, 1), (g, h // g)]} if together and h != g else {},
        run=_run,
    )


def _attended(query: Any, key: Any, value: Any, functions: _Functions, scale: float) -> Any:
    """The output, and for each query the logarithm of the sum of all and the largest score, to base 2."""
    return math_attention(
        query, key, value, functions.score, (functions.mask,), scale, {"OUTPUT_LOGSUMEXP": True}
    )


def _run(func: Callable[..., Any], args: Any, kwargs: Any, placed: Placed) -> Any:
    q, k, v = map(plain, args[:3])
    functions, scale = args[3:]
    whole_q, whole_k = placed.ins[:2]
    first = local_box(whole_q).offsets[:3]
    if k.shape[1] == whole_k.shape[1] and q.shape[1] != whole_q.shape[1]:
        pick = torch.arange(first[1], first[1] + q.shape[1], device=q.device)
        pick = pick // (whole_q.shape[1] // whole_k.shape[1])
        k, v = k.index_select(1, pick), v.index_select(1, pick)

    def score(x: Any, b: Any, h: Any, s: Any, t: Any, *more: Any) -> Any:
        return functions.score(x, b + first[0], h + first[1], s + first[2], t, *more)

    def mask(b: Any, h: Any, s: Any, t: Any, *more: Any) -> Any:
        return functions.mask(b + first[0], h + first[1], s + first[2], t, *more)

    # the ranks use differently what these functions capture
    apart = placed.axes_of(whole_q, range(3))
    with with_torch_functions(), Inside(apart):
        return func(q, k, v, _Functions(score, mask), scale)
