"""Where to cut a line of pieces so that the slowest part is as fast as can be."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from espalier.parallel.pipeline.record import SplitError
from espalier.tensor.flops import Work

_GAIN = 0.03  # of the slowest stage's cost, for which a block is divided


class Piece(NamedTuple):
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
    work: Work
    passing: int
    within: bool = False


def balance(pieces: Sequence[Piece], number: int, memory: float | None = None) -> list[str]:
    """The places where stages begin, but for the first: the cost of the most expensive one is the least.

    Among these choices (of those that cost at most a hundredth more) it takes the one that sends the fewest
    bytes, and then the most even one. A block is divided only where that makes the most expensive stage
    cheaper by three hundredths. By dynamic programming over the cuts.

    Args:
        memory: bytes of parameters that a stage may hold; one that is used twice in it counts once.

    Raises:
        SplitError: there are fewer pieces than stages, or no choice keeps within the memory.
    """
    if number > len(pieces):
        names = ", ".join(p.name or "its beginning" for p in pieces)
        raise SplitError(
            f"{number} stages, but only {len(pieces)} places where one may begin: {names}. Use fewer stages."
        )
    whole = whole_blocks(pieces)
    plain, least = _cheapest(whole, number, memory)
    within, less = (plain, least) if len(whole) == len(pieces) else _cheapest(pieces, number, memory)
    if less == float("inf"):
        raise SplitError(
            f"No choice of {number} stages holds at most {memory:,.0f} bytes of parameters in each. "
            "Use more stages, or more memory."
        )
    return within if less < (1 - _GAIN) * least else plain


def whole_blocks(pieces: Sequence[Piece]) -> list[Piece]:
    """The pieces where no block is divided."""
    return joined(pieces, lambda piece: not piece.within)


def joined(pieces: Sequence[Piece], begins: Callable[[Piece], bool]) -> list[Piece]:
    """The pieces where only some begin one; the others go with those before them."""
    found: list[Piece] = []
    for p in pieces:
        if not found or begins(p):
            found.append(p)
            continue
        before = found[-1]
        found[-1] = before._replace(
            cost=before.cost + p.cost,
            parameters={**before.parameters, **p.parameters},
            work=before.work.plus(p.work),
        )
    return found


def _cheapest(pieces: Sequence[Piece], number: int, memory: float | None) -> tuple[list[str], float]:
    """The best cuts and the cost of the slowest stage; that is infinite where there are none."""
    n = len(pieces)
    sums = [0.0]
    for p in pieces:
        sums.append(sums[-1] + p.cost)
    fits = _fitting(pieces, memory)
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
    return ([] if least == float("inf") else _lightest(pieces, number, sums, fits, least * 1.01)), least


def _fitting(pieces: Sequence[Piece], memory: float | None) -> list[int]:
    """For each number of pieces, the first one from which on they fit into the memory together."""
    found = [0]
    for j in range(1, len(pieces) + 1):
        held: dict[str, int] = {}
        i = j
        while i > 0:
            held.update(pieces[i - 1].parameters)
            if memory is not None and sum(held.values()) > memory:
                break
            i -= 1
        found.append(i)
    return found


def _lightest(
    pieces: Sequence[Piece], number: int, sums: Sequence[float], fits: Sequence[int], limit: float
) -> list[str]:
    """Of the choices within a limit of cost, that which sends least, and then the most even one."""
    n = len(pieces)
    none = (float("inf"), 0.0, 0)
    # bytes that are sent, the sum of the squares of costs, where the last part begins
    best: list[list[tuple[float, float, int]]] = [[(0.0, 0.0, 0)] + [none] * n]
    for k in range(1, number + 1):
        row = [none] * (n + 1)
        for j in range(k, n + 1):
            ways = [
                (
                    best[k - 1][i][0] + (pieces[i].passing if i else 0),
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
        cuts.append(pieces[j].name)
    return cuts[::-1]
