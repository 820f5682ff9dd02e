"""Windows over sharded space: each rank fetches the rows that its own outputs look at."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from espalier.comm import Spans, exchange, pieces
from espalier.layout import Layout, local_box
from espalier.tensor.rules.spec import Operand, Placed
from espalier.tensor.rules.table import Decorator, Definition, rule_with

Reach = Callable[[int, int], tuple[int, int]]


class Window(NamedTuple):
    """A window along one dim of space.

    Attributes:
        taps: how many rows it looks at.
        step: how many rows it goes on from one output to the next.
        edge: how many rows the first stands beyond the border.
        gap: how far apart the rows are that it looks at.
    """

    taps: int
    step: int
    edge: int = 0
    gap: int = 1

    @classmethod
    def each(cls, nd: int, *given: Any) -> list[Window]:
        """A window for each dim; its attributes are given once for all dims or one by one."""
        return [cls(*one) for one in zip(*(several(a, nd) for a in given), strict=True)]

    def reach(self, a: int, b: int) -> tuple[int, int]:
        """The first and the last row that the outputs a to b look at."""
        return a * self.step - self.edge, b * self.step - self.edge + self.gap * (self.taps - 1)


@dataclass(slots=True)
class Halo:
    """What this rank's outputs look at: rows of its own, and of its neighbours (the halo).

    Attributes:
        rows: the input's rows (and all of its other dims), none where this rank has no outputs.
        cut: the dims of space that axes cut; beyond the borders their rows are filled in.
        first: for each dim of space the global number of the first row.
        edges: for each dim of space the padding that is left to do.
    """

    rows: torch.Tensor
    cut: list[int]
    first: list[int]
    edges: list[int]


def with_halo(
    x: torch.Tensor,
    placed: Placed,
    windows: Sequence[Window | None],
    fill: Any = 0,
    reach: Callable[[Window, int, int], tuple[int, int]] = Window.reach,
) -> Halo:
    """What this rank's outputs look at, through a window for each of the last dims.

    Args:
        x: the local part of the first input.
        windows: those of a dim that is looked at as a whole: None.
        fill: what stands beyond the borders.
        reach: the first and the last row that a window of outputs looks at.
    """
    front, lay = x.ndim - len(windows), placed.ins[0]
    reaches: dict[int, Reach] = {front + i: partial(reach, w) for i, w in enumerate(windows) if w is not None}
    rows, first = fetched(x, lay, placed.outs[0], reaches, fill)
    cut = cut_dims(placed, lay, reaches)
    edges = [0 if w is None or front + i in cut else w.edge for i, w in enumerate(windows)]
    return Halo(rows, cut, [first.get(d, 0) for d in range(front, x.ndim)], edges)


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


def cut_dims(placed: Placed, layout: Layout, dims: Iterable[int]) -> list[int]:
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
