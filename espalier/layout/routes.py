"""Routes: the cheapest way, in bytes a rank sends, from one layout to another.

Each step changes one axis by one operation of the table. The costs are those of the ring
algorithms (Thakur, Rabenseifner, Gropp 2005): with n ranks and a buffer of B elements,
all-gather, reduce-scatter and all-to-all send (n-1)/n·B, all-reduce twice that. The search is
Dijkstra's over layouts; among routes of equal bytes the one with fewest steps wins.

A value that is whole is never split into addends on the way (padded with zeros and summed again),
though that can send less where two axes change one dim: a move then carries every bit of every
dtype as it is, a negative zero, a bool or a float8 too, and adds nothing up.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from espalier.layout.layout import AxisState, Layout, R, V, is_partial
from espalier.layout.transitions import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    IDENTITY,
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
        return step_elements(self.operation, self.axis, self.src, self.dst)


class Route(NamedTuple):
    """The steps from one layout to another and the elements that each rank sends on the way."""

    steps: tuple[Step, ...]
    elements: int


def step_elements(op: str, axis: int, src: Layout, dst: Layout) -> int:
    """Elements each rank sends for one step, uneven pieces padded to the largest."""
    n = src.mesh.shape[axis]
    if n == 1:
        return 0
    if op == ALL_REDUCE:
        return 2 * (n - 1) * -(-math.prod(src.padded_shape) // n)
    if op == ALL_GATHER:
        return (n - 1) * math.prod(src.padded_shape)
    if op == REDUCE_SCATTER:
        return (n - 1) * math.prod(dst.padded_shape)
    if op == ALL_TO_ALL:
        return (n - 1) * math.prod(exchange_shape(axis, src, dst))
    return 0


def exchange_shape(axis: int, src: Layout, dst: Layout) -> tuple[int, ...]:
    """The (padded) shape of the block that one rank sends to each other in an all-to-all."""
    whole = src.with_axis(axis, R).padded_shape
    old, new = src.axes[axis], dst.axes[axis]
    assert isinstance(old, int) and isinstance(new, int)
    shape = list(whole)
    shape[old], shape[new] = src.padded_shape[old], dst.padded_shape[new]
    return tuple(shape)


@lru_cache(maxsize=65536)
def route(src: Layout, dst: Layout) -> Route:
    """The cheapest route between two layouts of one global shape on one mesh.

    Raises:
        ValueError: the shapes or the meshes differ, or ``dst`` asks for a reduction (max, min,
            product) that no value can be turned into.
    """
    if src is dst:
        return Route((), 0)
    if src.mesh is not dst.mesh or src.shape != dst.shape:
        raise ValueError(f"No route from {src!r} to {dst!r}: mesh and global shape must be the same.")
    ticket = itertools.count()
    queue: list[tuple[int, int, int, Layout]] = [(0, 0, next(ticket), src)]
    best: dict[Layout, tuple[int, int]] = {src: (0, 0)}
    came: dict[Layout, Step] = {}
    while queue:
        cost, steps, _, here = heapq.heappop(queue)
        if here is dst:
            return Route(_unwind(came, src, dst), cost)
        if (cost, steps) > best[here]:
            continue
        for step in _neighbours(here, dst):
            total = (cost + step.elements, steps + 1)
            if step.dst not in best or total < best[step.dst]:
                best[step.dst] = total
                came[step.dst] = step
                heapq.heappush(queue, (*total, next(ticket), step.dst))
    raise ValueError(
        f"No route from {src!r} to {dst!r}: a value cannot be turned into a Partial of max, min or product."
    )


def _unwind(came: dict[Layout, Step], src: Layout, dst: Layout) -> tuple[Step, ...]:
    steps = []
    while dst is not src:
        steps.append(came[dst])
        dst = came[dst].src
    return tuple(reversed(steps))


def _neighbours(here: Layout, goal: Layout) -> Iterator[Step]:
    for axis, state in enumerate(here.axes):
        # only the innermost cut of a dim can be undone alone
        if isinstance(state, int) and here.cuts[state][-1] != axis:
            continue
        for target in _targets(here, state, goal.axes[axis]):
            nxt = here.with_axis(axis, target)
            if nxt is not here:
                op = operation(state, target) if here.mesh.shape[axis] > 1 else IDENTITY
                yield Step(op, axis, here, nxt)


def _targets(here: Layout, state: AxisState, goal: AxisState) -> list[AxisState]:
    dims: list[AxisState] = list(range(len(here.shape)))
    if is_partial(state) and state != "sum":
        # an unsummed reduction can only be finished
        return [R, *([goal] if goal in (V, state) else [])]
    targets: list[AxisState] = [R, *dims]
    if goal in (V, "sum"):
        targets.append(goal)
    return targets
