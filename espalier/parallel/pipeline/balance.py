"""Where to cut a line of pieces so that the slowest part is as fast as can be."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from espalier.parallel.pipeline.record import SplitError
from espalier.tensor.dry_runs import OpCost

_GAIN = 0.03  # of the slowest stage's cost, for which a block is divided


class Segment(NamedTuple):
    """A part of a model between two places where it may be cut.

    Attributes:
        name: of the place where it begins; empty for what the model does itself before its first module.
        cost: of its forward pass, in any unit.
        parameters: bytes of the parameters that it uses, by name.
        work: what is counted of it.
        passing: bytes that a cut at its beginning would send on.
        within: whether it begins within a block, which a cut there would divide.
    """

    name: str
    cost: float
    parameters: Mapping[str, int]
    work: OpCost
    passing: int
    within: bool = False


def balance(segments: Sequence[Segment], number: int, memory: float | None = None) -> list[str]:
    """The places where stages begin, but for the first: the cost of the most expensive one is the least.

    Among these choices (of those that cost at most a hundredth more) it takes the one that sends the fewest
    bytes, and then the most even one. A block is divided only where that makes the most expensive stage
    cheaper by three hundredths. By dynamic programming over the cuts.

    Args:
        memory: bytes of parameters that a stage may hold; one that is used twice in it counts once.

    Raises:
        SplitError: there are fewer pieces than stages, or no choice keeps within the memory.
    """
    if number > len(segments):
        names = ", ".join(p.name or "its beginning" for p in segments)
        raise SplitError(
            f"{number} stages, but only {len(segments)} places where one may begin: {names}. "
            "Use fewer stages."
        )
    whole = whole_blocks(segments)
    plain, least = _cheapest(whole, number, memory)
    within, less = (plain, least) if len(whole) == len(segments) else _cheapest(segments, number, memory)
    if less == float("inf"):
        raise SplitError(
            f"No choice of {number} stages holds at most {memory:,.0f} bytes of parameters in each. "
            "Use more stages, or more memory."
        )
    return within if less < (1 - _GAIN) * least else plain


def whole_blocks(segments: Sequence[Segment]) -> list[Segment]:
    """The pieces where no block is divided."""
    return joined(segments, lambda segment: not segment.within)


def joined(segments: Sequence[Segment], begins: Callable[[Segment], bool]) -> list[Segment]:
    """The pieces where only some begin one; the others go with those before them."""
    groups: list[Segment] = []
    for p in segments:
        if not groups or begins(p):
            groups.append(p)
            continue
        before = groups[-1]
        groups[-1] = before._replace(
            cost=before.cost + p.cost,
            parameters={**before.parameters, **p.parameters},
            work=before.work.plus(p.work),
        )
    return groups


def _cheapest(segments: Sequence[Segment], number: int, memory: float | None) -> tuple[list[str], float]:
    """The best cuts and the cost of the slowest stage; that is infinite where there are none."""
    n = len(segments)
    sums = [0.0]
    for p in segments:
        sums.append(sums[-1] + p.cost)
    fits = _fitting(segments, memory)
    # best[k][j]: the least cost of the slowest of k parts that make the first j pieces
    best = [[0.0] + [float("inf")] * n]
    for k in range(1, number + 1):
        row = [float("inf")] * (n + 1)
        for j in range(k, n + 1):
            row[j] = min(
                (max(best[k - 1][i], sums[j] - sums[i]) for i in range(max(k - 1, fits[j]), j)),
                default=float("inf"),
            )
        best.append(row)
    least = best[number][n]
    return ([] if least == float("inf") else _lightest(segments, number, sums, fits, least * 1.01)), least


def _fitting(segments: Sequence[Segment], memory: float | None) -> list[int]:
    """For each number of pieces, the first one from which on they fit into the memory together."""
    firsts = [0]
    for j in range(1, len(segments) + 1):
        bytes_by_name: dict[str, int] = {}
        i = j
        while i > 0:
            bytes_by_name.update(segments[i - 1].parameters)
            if memory is not None and sum(bytes_by_name.values()) > memory:
                break
            i -= 1
        firsts.append(i)
    return firsts


def _lightest(
    segments: Sequence[Segment], number: int, sums: Sequence[float], fits: Sequence[int], limit: float
) -> list[str]:
    """Of the choices within a limit of cost, that which sends least, and then the most even one."""
    n = len(segments)
    none = (float("inf"), 0.0, 0)
    # bytes that are sent, the sum of the squares of costs, where the last part begins
    best: list[list[tuple[float, float, int]]] = [[(0.0, 0.0, 0)] + [none] * n]
    for k in range(1, number + 1):
        row = [none] * (n + 1)
        for j in range(k, n + 1):
            ways = [
                (
                    best[k - 1][i][0] + (segments[i].passing if i else 0),
                    best[k - 1][i][1] + (sums[j] - sums[i]) ** 2,
                    i,
                )
                for i in range(max(k - 1, fits[j]), j)
                if sums[j] - sums[i] <= limit
            ]
            row[j] = min(ways, default=none)
        best.append(row)
    cuts: list[str] = []
    j = n
    for k in range(number, 1, -1):
        j = best[k][j][2]
        cuts.append(segments[j].name)
    return cuts[::-1]
