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

from espalier.layout.layout import AxisState, Layout, R, V, is_partial
from espalier.layout.transitions import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    REDUCE_SCATTER,
    operation,
)


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
    goal, sizes = (dst.axes, dst.cuts), dst.mesh.shape
    # what a rank holds where all axes cut: no step along an axis sends less than this to each of the others
    least = math.prod(dst.shape) / math.prod(sizes)
    units = [least * (n - 1) for n in sizes]
    ticket = itertools.count()
    # elements and steps, those included that at least are still to come; elements, steps, node, local shape
    queue = [(0, 0, next(ticket), 0, 0, (src.axes, src.cuts), tuple(src.padded_shape))]
    best: dict[_Node, tuple[int, int]] = {(src.axes, src.cuts): (0, 0)}
    came: dict[_Node, tuple[_Node, str, int]] = {}
    while queue:
        _, _, _, cost, steps, here, lengths = heapq.heappop(queue)
        if here == goal:
            return Route(_unwind(came, src, goal), cost)
        if (cost, steps) > best[here]:
            continue
        for op, axis, node, after in _neighbours(here, lengths, dst):
            total = (cost + sent(op, sizes[axis], lengths, after), steps + 1)
            if node not in best or total < best[node]:
                best[node] = total
                came[node] = here, op, axis
                left, ahead = _ahead(node[0], dst.axes, units, sizes)
                estimate = total[0] + left, total[1] + ahead
                heapq.heappush(queue, (*estimate, next(ticket), *total, node, after))
    raise ValueError(
        f"No route from {src!r} to {dst!r}: a value cannot be turned into a Partial of max, min or product."
    )


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


def _unwind(came: dict[_Node, tuple[_Node, str, int]], src: Layout, node: _Node) -> tuple[Step, ...]:
    steps = []
    after = Layout.of(src.mesh, *node, src.shape)
    while node != (src.axes, src.cuts):
        node, op, axis = came[node]
        before = Layout.of(src.mesh, *node, src.shape)
        steps.append(Step(op, axis, before, after))
        after = before
    return tuple(reversed(steps))


def _neighbours(
    here: _Node, lengths: tuple[int, ...], goal: Layout
) -> Iterator[tuple[str, int, _Node, tuple[int, ...]]]:
    """The steps from a node: operation, axis, the next node and its local shape."""
    axes, cuts = here
    sizes = goal.mesh.shape
    for axis, state in enumerate(axes):
        base, whole = cuts, lengths
        if isinstance(state, int):
            # only the innermost cut of a dim can be undone alone
            if cuts[state][-1] != axis:
                continue
            left = cuts[state][:-1]
            length = goal.shape[state]
            for a in left:
                length = -(-length // sizes[a])
            base = (*cuts[:state], left, *cuts[state + 1 :])
            whole = (*lengths[:state], length, *lengths[state + 1 :])
        elif is_partial(state) and _must_wait(axis, axes):
            continue
        for target in _targets(state, goal.axes[axis], len(cuts)):
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
        return [R, *([goal] if goal == V else [])]
    targets: list[AxisState] = [R, *range(ndim)]
    if goal == V or goal in SUMS:
        targets.append(goal)
    return targets
