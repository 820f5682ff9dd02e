"""Crossings: what goes where between layouts of one global shape on two meshes.

The two meshes may have any axes and any ranks of the world, in common or not. A crossing has three
stages: on the first mesh the tensor is brought to a layout without Partials; then each rank of the
second mesh gets the boxes that it wants from ranks that hold them; then the second mesh brings it to
the layout asked for. Only the middle one crosses. What a rank holds itself it never receives; what
several ranks hold, each sends an equal share of.

Which layouts stand at the crossing is chosen, from a few, by the most elements that any rank sends in
all three stages: Partials may be scattered along a dim before, what is wanted whole gathered behind.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from espalier.layout.layout import AxisState, Layout, R, is_partial
from espalier.layout.regions import Box, bounds, local_box
from espalier.layout.routes import route


class Parcel(NamedTuple):
    """A box of the global tensor that one rank of the world hands to another, or keeps."""

    giver: int
    getter: int
    box: Box


class Crossing(NamedTuple):
    """How a tensor goes from one mesh to another.

    Attributes:
        leaving: its layout on the first mesh when it leaves.
        landing: its layout on the second mesh when it lands.
        parcels: what is handed over.
        elements: the most elements that any rank sends, the routes before and behind included.
    """

    leaving: Layout
    landing: Layout
    parcels: tuple[Parcel, ...]
    elements: int


@lru_cache(maxsize=1024)
def crossing(src: Layout, dst: Layout) -> Crossing:
    """The cheapest crossing between two layouts of one global shape, averages written as sums.

    Raises:
        ValueError: the shapes differ, or ``dst`` asks for a reduction (max, min, product) that no
            value can be turned into.
    """
    if src.shape != dst.shape:
        raise ValueError(f"No way from {src!r} to {dst!r}: the global shape must be the same.")
    best: tuple[tuple[int, int], Crossing] | None = None
    for leaving, landing in itertools.product(_leaving(src), _landing(dst)):
        before, behind = route(src, leaving), route(landing, dst)
        parcels = tuple(hand_over(leaving, landing))
        sent: dict[int, int] = {}
        for giver, getter, box in parcels:
            if giver != getter:
                sent[giver] = sent.get(giver, 0) + math.prod(box.sizes)
        elements = before.elements + max(sent.values(), default=0) + behind.elements
        price = elements, len(before.steps) + len(behind.steps)
        if best is None or price < best[0]:
            best = price, Crossing(leaving, landing, parcels, elements)
    assert best is not None
    return best[1]


def _leaving(src: Layout) -> Iterator[Layout]:
    """The source with its Partials reduced: to whole values, or scattered along one dim."""
    open_axes = [a for a in src.partial if src.mesh.shape[a] > 1]
    return _forms(src, open_axes, R)


def _landing(dst: Layout) -> Iterator[Layout]:
    """The target, or it with all that is not sharded sharded along one dim."""
    open_axes = [a for a, s in enumerate(dst.axes) if not isinstance(s, int) and dst.mesh.shape[a] > 1]
    wrong = [dst.axes[a] for a in open_axes if is_partial(dst.axes[a]) and dst.axes[a] != "sum"]
    if wrong:
        raise ValueError(f"No way to {dst!r}: a value cannot be turned into a Partial of {wrong[0]}.")
    return _forms(dst, open_axes, None)


def _forms(layout: Layout, open_axes: list[int], state: AxisState | None) -> Iterator[Layout]:
    for target in (state, *range(len(layout.shape))) if open_axes else (None,):
        form = layout
        for axis in open_axes if target is not None else ():
            form = form.with_axis(axis, target)
        yield form


def hand_over(leaving: Layout, landing: Layout) -> Iterator[Parcel]:
    """Who hands which box to whom; for each getter the boxes are disjoint and cover what it wants.

    Along axes where ``landing`` is Partial, coordinate 0 gets the value, the others nothing.
    """
    wanted: dict[Box, list[int]] = {}
    for place, at in enumerate(itertools.product(*map(range, landing.mesh.shape))):
        box = local_box(landing, at)
        if math.prod(box.sizes) and not any(at[a] for a in landing.partial):
            wanted.setdefault(box, []).append(landing.mesh.ranks[place])
    orders: dict[tuple[int, ...], list[tuple[int, Box]]] = {}
    stretches = [_stretches(leaving, d) for d in range(leaving.ndim)]
    for box, getters in wanted.items():
        overlaps = [_overlaps(s, o, n) for s, o, n in zip(stretches, *box, strict=True)]
        for cell in itertools.product(*overlaps):
            part = Box(tuple(c[0] for c in cell), tuple(c[1] for c in cell))
            cut = dict(itertools.chain(*(c[2].items() for c in cell)))
            holders = _holders(leaving, cut)
            for getter in getters:
                if getter in holders:
                    yield Parcel(getter, getter, part)
                else:
                    orders.setdefault(holders, []).append((getter, part))
    for holders, order in orders.items():
        yield from _shared_out(holders, order)


def _stretches(layout: Layout, dim: int) -> list[tuple[int, int, dict[int, int]]]:
    """The stretches of a dim: start, length and the coordinates that hold them."""
    cut, shape = layout.cuts[dim], layout.mesh.shape
    found = []
    for index in itertools.product(*(range(shape[a]) for a in cut)):
        where = dict(zip(cut, index, strict=True))
        start, length = bounds(layout.shape[dim], cut, shape, where)
        if length:
            found.append((start, length, where))
    return found


def _overlaps(
    stretches: list[tuple[int, int, dict[int, int]]], start: int, length: int
) -> list[tuple[int, int, dict[int, int]]]:
    found = []
    for begin, n, where in stretches:
        low, high = max(begin, start), min(begin + n, start + length)
        if low < high:
            found.append((low, high - low, where))
    return found


def _holders(layout: Layout, cut: dict[int, int]) -> tuple[int, ...]:
    """The world's ranks at these coordinates of the cutting axes, and any of the others."""
    choices = [(cut[a],) if a in cut else range(n) for a, n in enumerate(layout.mesh.shape)]
    places = [0]
    for n, choice in zip(layout.mesh.shape, choices, strict=True):
        places = [place * n + i for place in places for i in choice]
    return tuple(layout.mesh.ranks[place] for place in places)


def _shared_out(holders: tuple[int, ...], order: list[tuple[int, Box]]) -> Iterator[Parcel]:
    """Shares of equal size: the boxes laid end to end and cut, each along its longest dim."""
    h, total = len(holders), sum(math.prod(box.sizes) for _, box in order)
    begin = 0
    for getter, box in order:
        n = math.prod(box.sizes)
        rows = max(box.sizes, default=1)
        first = begin * h // total
        row = 0
        while row < rows:
            # share number `first` ends at element (first + 1) * total / h, here to the nearest row
            end = min(rows, max(row, (2 * ((first + 1) * total - begin * h) * rows + h * n) // (2 * h * n)))
            if first == h - 1:
                end = rows
            if end > row:
                yield Parcel(holders[first], getter, _rows(box, row, end))
            row, first = end, first + 1
        begin += n


def _rows(box: Box, start: int, end: int) -> Box:
    if not box.sizes:
        return box
    dim = box.sizes.index(max(box.sizes))
    offsets, sizes = list(box.offsets), list(box.sizes)
    offsets[dim] += start
    sizes[dim] = end - start
    return Box(tuple(offsets), tuple(sizes))
