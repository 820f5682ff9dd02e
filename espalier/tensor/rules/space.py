"""Windows over sharded space: each rank fetches the rows that its own outputs look at."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from espalier.comm import Spans, exchange, pieces
from espalier.layout import Layout, local_box
from espalier.tensor.rules.spec import Operand, Placed
from espalier.tensor.rules.table import Decorator, Definition, rule_with

Reach = Callable[[int, int], tuple[int, int]]


def several(value: Any, nd: int) -> tuple[Any, ...]:
    """An argument for each of ``nd`` dims, given once for all or one by one."""
    if isinstance(value, int) or value is None:
        return (value,) * nd
    return tuple(value) if len(value) == nd else tuple(value) * nd


def meta_shapes(func: Callable[..., Any], *args: Any, **kwargs: Any) -> list[tuple[int, ...]]:
    """The shapes that a function gives, asked of torch itself: operands are stood for by meta tensors."""

    def stand_in(a: Any) -> Any:
        if isinstance(a, Operand):
            return torch.empty(a.shape, dtype=a.dtype, device="meta")
        return [stand_in(x) for x in a] if isinstance(a, list) else a

    out = func(*map(stand_in, args), **{k: stand_in(v) for k, v in kwargs.items()})
    return [tuple(x.shape) for x in (out if isinstance(out, tuple | list) else (out,))]


def fetched(
    x: torch.Tensor, source: Layout, goal: Layout, reach: dict[int, Reach], fill: Any = 0
) -> tuple[torch.Tensor, dict[int, int]]:
    """The rows that this rank's outputs look at, what lies beyond the global borders filled in.

    Args:
        x: the local part of a tensor that lies as ``source``.
        goal: the layout of the output, whose dims are cut as those of ``source``.
        reach: for a dim, from the first and the last output row to the first and the last input row
            looked at; dims that no axis cuts are left alone.

    Returns:
        The rows, none where this rank has no outputs; and the (global) first row of each dim fetched.
    """
    pads = [0] * (2 * x.ndim)
    first: dict[int, int] = {}
    for dim, of in reach.items():
        if not any(source.mesh.shape[a] > 1 for a in source.cuts[dim]):
            continue
        size, have, outs = source.shape[dim], pieces(source, dim), pieces(goal, dim)
        ends = [of(a, b - 1) if a < b else (0, -1) for ((a, b),) in outs]
        want: list[Spans] = []
        for a, b in ends:
            start = min(max(a, 0), size)
            want.append(((start, max(min(b + 1, size), start)),))
        x = exchange(x, source.mesh, source.cuts[dim], dim, have, want)
        box = local_box(goal)
        rows = ((box.offsets[dim], box.offsets[dim] + box.sizes[dim]),)
        a, b = ends[outs.index(rows)] if goal.local_shape[dim] else (0, -1)
        first[dim] = a
        left = min(max(-a, 0), b + 1 - a)
        at = 2 * (x.ndim - 1 - dim)
        pads[at : at + 2] = left, b + 1 - a - left - x.shape[dim]
    return (F.pad(x, pads, value=fill) if any(pads) else x), first


def cut_dims(placed: Placed, layout: Layout, dims: Sequence[int]) -> list[int]:
    """Those of the dims that some axis of more than one rank cuts."""
    return [d for d in dims if placed.axes_of(layout, (d,))]


def rule_of_dims(named: str, *given: Any) -> Decorator:
    """What the function below makes of a count of dims, and of ``given``, is the rule for these names.

    In ``named`` the counts 1, 2 and 3 stand in place of ``{}``.
    """

    def register(maker: Definition) -> Definition:
        for nd in (1, 2, 3):
            rule_with(named.format(nd), nd, *given)(maker)
        return maker

    return register
