"""Measured points, and what lies between them."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Sequence


def between(points: Sequence[tuple[float, float]], size: float) -> float:
    """What a size takes, of rows of sizes and times: on straight lines of their logarithms.

    Below the first it takes as much as the first; above the last as many times more as it is larger.
    """
    sizes = [x for x, _ in points]
    i = bisect_left(sizes, size)
    if i == 0:
        return points[0][1]
    if i == len(points):
        last, took = points[-1]
        return took * size / last
    (low, less), (high, more) = points[i - 1], points[i]
    if low <= 0 or less <= 0 or more <= 0:
        return less + (more - less) * (size - low) / (high - low)
    along = math.log(size / low) / math.log(high / low)
    return less * (more / less) ** along


class Grid:
    """Rates that were measured at every mix of some sizes.

    Args:
        rows: sizes, and a rate of them.
        axes: how many sizes a row has.
        column: which number after them is the rate.
    """

    def __init__(self, rows: Sequence[Sequence[float]], axes: int, column: int = 0) -> None:
        self._sizes = [sorted({row[i] for row in rows}) for i in range(axes)]
        self._rates = {tuple(row[:axes]): row[axes + column] for row in rows}

    def at(self, *sizes: float) -> float:
        """The rate of other sizes, linear in all logarithms; outside of the grid that of its edge."""
        ends: list[tuple[tuple[float, float], ...]] = []
        for known, size in zip(self._sizes, sizes, strict=True):
            within = min(max(size, known[0]), known[-1])
            i = max(1, bisect_left(known, within))
            if len(known) == 1:
                ends.append(((known[0], 1.0),))
                continue
            low, high = known[i - 1], known[i]
            along = math.log(within / low) / math.log(high / low)
            ends.append(((low, 1 - along), (high, along)))
        total = 0.0
        for corner in itertools.product(*ends):
            weight = math.prod(w for _, w in corner)
            if weight:
                total += weight * math.log(self._rates[tuple(x for x, _ in corner)])
        return math.exp(total)
