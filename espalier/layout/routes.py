"""Routes: the cheapest way, in bytes a rank sends, from one layout to another.

Each step changes one axis by one operation of the table. The costs are those of the ring
algorithms (Thakur, Rabenseifner, Gropp 2005): with n ranks and a buffer of B elements,
all-gather, reduce-scatter and all-to-all send (n-1)/n·B, all-reduce twice that. The search is
A* over layouts (Hart, Nilsson, Raphael 1968); among routes of equal bytes the one with fewest steps wins.

Where axes are Partial with reductions that do not commute, the last axis is reduced first, so that the
value is defined: along axes a (max) and b (sum) it is the maximum over a of sums over b.

A value that is whole is never split into addends on the way (padded with zeros and summed again),
though that can send less where two axes change one dim: a move then carries every bit of every
dtype as it is, a negative zero, a bool or a float8 too, and adds nothing up.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from espalier.layout.layout import AxisState, Box, D, Layout, R, bounds, is_partial, local_box, local_sizes
from espalier.layout.transitions import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER, operation


class Step(NamedTuple):
    """One operation along one axis, from one layout to the next."""

    operation: str
    axis: int
    src: Layout
    dst: Layout

    @property
    def elements(self) -> int:
        """Elements that each rank sends."""
        n = self.src.mesh.shape[self.axis]
        return sent(self.operation, n, self.src.padded_shape, self.dst.padded_shape)


class Route(NamedTuple):
    """The steps from one layout to another and the elements that each rank sends on the way.

    Of axes of size 1 they know nothing: in their layouts these are replicated.
    """

    steps: tuple[Step, ...]
    elements: int


def sent(op: str, n: int, before: Sequence[int], after: Sequence[int]) -> int:
    """Elements each of ``n`` ranks sends for one step between local shapes, padded to the largest."""
    if op == ALL_REDUCE:
        return 2 * (n - 1) * -(-math.prod(before) // n)
    if op == ALL_GATHER:
        return (n - 1) * math.prod(before)
    if op == REDUCE_SCATTER:
        return (n - 1) * math.prod(after)
    if op == ALL_TO_ALL:
        # the block for one rank: the old dim cut as before, the new one as after
        return (n - 1) * math.prod(map(min, before, after))
    return 0


# an average is a sum but for a factor, which whoever takes the route sees to
SUMS = ("sum", "avg")

# a layout on its way: the states of the axes, and for each dim the axes that cut it
_Node = tuple[tuple[AxisState, ...], tuple[tuple[int, ...], ...]]


@lru_cache(maxsize=65536)
def route(src: Layout, dst: Layout) -> Route:
    """The cheapest route between two layouts of one global shape on one mesh.

    Raises:
        ValueError: the shapes or the meshes differ, or ``dst`` asks for a reduction (max, min,
            product) that no value can be turned into.
    """
    if src.mesh is not dst.mesh or src.shape != dst.shape:
        raise ValueError(f"No route from {src!r} to {dst!r}: mesh and global shape must be the same.")
    # an axis of size 1 among those that cut a dim would else be in the way of the ones outside of it
    src, dst = _bare(src), _bare(dst)
    if src is dst:
        return Route((), 0)
    found = _search(src.mesh.shape, src.shape, (src.axes, src.cuts), (dst.axes, dst.cuts))
    if found is None:
        raise ValueError(
            f"No route from {src!r} to {dst!r}: a value cannot be turned into a Partial of max, min or "
            "product."
        )
    steps, before = [], src
    for op, axis, node in found.steps:
        after = Layout.of(src.mesh, *node, src.shape)
        steps.append(Step(op, axis, before, after))
        before = after
    return Route(tuple(steps), found.elements)


class _Found(NamedTuple):
    """A route on any mesh of such sizes: the operation, the axis and the next node of each step."""

    steps: tuple[tuple[str, int, _Node], ...]
    elements: int


@lru_cache(maxsize=65536)
def _search(sizes: tuple[int, ...], shape: tuple[int, ...], start: _Node, goal: _Node) -> _Found | None:
    """The cheapest route; None if there is none. Programs and dry runs have many meshes of a few sizes."""
    # what a rank holds where all axes cut: no step along an axis sends less than this to each of the others
    least = math.prod(shape) / math.prod(sizes)
    units = [least * (n - 1) for n in sizes]
    ticket, lengths = itertools.count(), local_sizes(shape, start[1], sizes, (0,) * len(sizes))
    # elements and steps, those included that at least are still to come; elements, steps, node, local shape
    queue = [(0, 0, next(ticket), 0, 0, start, lengths)]
    best: dict[_Node, tuple[int, int]] = {start: (0, 0)}
    came: dict[_Node, tuple[_Node, str, int]] = {}
    while queue:
        _, _, _, cost, steps, here, lengths = heapq.heappop(queue)
        if here == goal:
            return _Found(_unwind(came, start, goal), cost)
        if (cost, steps) > best[here]:
            continue
        for op, axis, node, after in _neighbours(here, lengths, sizes, shape, goal[0]):
            total = (cost + sent(op, sizes[axis], lengths, after), steps + 1)
            if node not in best or total < best[node]:
                best[node] = total
                came[node] = here, op, axis
                left, ahead = _ahead(node[0], goal[0], units, sizes)
                estimate = total[0] + left, total[1] + ahead
                heapq.heappush(queue, (*estimate, next(ticket), *total, node, after))
    return None


def _bare(layout: Layout) -> Layout:
    """The same data, replicated along axes of size 1."""
    sizes = layout.mesh.shape
    states = tuple(R if n == 1 else s for n, s in zip(sizes, layout.axes, strict=True))
    cuts = tuple(tuple(a for a in cut if sizes[a] > 1) for cut in layout.cuts)
    return Layout.of(layout.mesh, states, cuts, layout.shape)


def _ahead(
    states: tuple[AxisState, ...], goals: tuple[AxisState, ...], units: list[float], sizes: tuple[int, ...]
) -> tuple[int, int]:
    """The elements and steps that are still to come at least, each axis taken for itself."""
    elements, steps = 0.0, 0
    for state, goal, unit, n in zip(states, goals, units, sizes, strict=True):
        if state == goal:
            continue
        steps += 1
        if isinstance(state, int):
            elements += unit / n if isinstance(goal, int) else 0 if is_partial(goal) else unit
        elif is_partial(state):
            elements += 0 if goal in SUMS else unit if isinstance(goal, int) else 2 * unit
    return math.ceil(elements - 1e-6), steps


def _unwind(
    came: dict[_Node, tuple[_Node, str, int]], start: _Node, node: _Node
) -> tuple[tuple[str, int, _Node], ...]:
    steps = []
    while node != start:
        before, op, axis = came[node]
        steps.append((op, axis, node))
        node = before
    return tuple(reversed(steps))


def _neighbours(
    here: _Node,
    lengths: tuple[int, ...],
    sizes: tuple[int, ...],
    shape: tuple[int, ...],
    goals: tuple[AxisState, ...],
) -> Iterator[tuple[str, int, _Node, tuple[int, ...]]]:
    """The steps from a node: operation, axis, the next node and its local shape."""
    axes, cuts = here
    for axis, state in enumerate(axes):
        base, whole = cuts, lengths
        if isinstance(state, int):
            # only the innermost cut of a dim can be undone alone
            if cuts[state][-1] != axis:
                continue
            left = cuts[state][:-1]
            length = shape[state]
            for a in left:
                length = -(-length // sizes[a])
            base = (*cuts[:state], left, *cuts[state + 1 :])
            whole = (*lengths[:state], length, *lengths[state + 1 :])
        elif is_partial(state) and _must_wait(axis, axes):
            continue
        for target in _targets(state, goals[axis], len(cuts)):
            if target == state:
                continue
            op = operation(state, target)
            states = (*axes[:axis], target, *axes[axis + 1 :])
            if isinstance(target, int):
                cut = (*base[:target], (*base[target], axis), *base[target + 1 :])
                piece = -(-whole[target] // sizes[axis])
                yield op, axis, (states, cut), (*whole[:target], piece, *whole[target + 1 :])
            else:
                yield op, axis, (states, base), whole


def _must_wait(axis: int, axes: tuple[AxisState, ...]) -> bool:
    """Whether a later axis is to be reduced before this one."""
    here = axes[axis]
    return any(
        is_partial(state) and state != here and not (state in SUMS and here in SUMS)
        for state in axes[axis + 1 :]
    )


def _targets(state: AxisState, goal: AxisState, ndim: int) -> list[AxisState]:
    if is_partial(state) and state not in SUMS:
        # an unsummed reduction can only be finished
        return [R, *([goal] if goal == D else [])]
    targets: list[AxisState] = [R, *range(ndim)]
    if goal == D or goal in SUMS:
        targets.append(goal)
    return targets


# ---- crossings: what goes where between layouts of one global shape on two meshes
#
# The two meshes may have any axes and any ranks of the world, in common or not. A crossing has three
# stages: on the first mesh the tensor is brought to a layout without Partials; then each rank of the second
# mesh gets the boxes that it wants from ranks that hold them; then the second mesh brings it to the layout
# asked for. Only the middle one crosses. What a rank holds itself it never receives; what several ranks
# hold, each sends an equal share of.
#
# Which layouts stand at the crossing is chosen, from a few, by the most elements that any rank sends in all
# three stages: Partials may be scattered along a dim before, what is wanted whole gathered behind.


class Parcel(NamedTuple):
    """A box of the global tensor that one rank of the world hands to another, or keeps."""

    giver: int
    getter: int
    box: Box


class CrossMeshRoute(NamedTuple):
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
def crossing(src: Layout, dst: Layout) -> CrossMeshRoute:
    """The cheapest crossing between two layouts of one global shape, averages written as sums.

    Raises:
        ValueError: the shapes differ, or ``dst`` asks for a reduction (max, min, product) that no
            value can be turned into.
    """
    if src.shape != dst.shape:
        raise ValueError(f"No way from {src!r} to {dst!r}: the global shape must be the same.")
    best: tuple[tuple[int, int], CrossMeshRoute] | None = None
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
            best = price, CrossMeshRoute(leaving, landing, parcels, elements)
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
    stretches = []
    for index in itertools.product(*(range(shape[a]) for a in cut)):
        where = dict(zip(cut, index, strict=True))
        start, length = bounds(layout.shape[dim], cut, shape, where)
        if length:
            stretches.append((start, length, where))
    return stretches


def _overlaps(
    stretches: list[tuple[int, int, dict[int, int]]], start: int, length: int
) -> list[tuple[int, int, dict[int, int]]]:
    overlaps = []
    for begin, n, where in stretches:
        low, high = max(begin, start), min(begin + n, start + length)
        if low < high:
            overlaps.append((low, high - low, where))
    return overlaps


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
