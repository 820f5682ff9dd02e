"""Schedules by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from espalier.parallel.pipeline.actions import Action, Kind, Schedule

F, B = Kind.F, Kind.B


def generate(kind: str, ranks: int, micro_batches: int, stages_per_rank: int = 1) -> Schedule:
    """A schedule by its name.

    Args:
        kind: ``"naive"`` (a micro-batch at a time, one stage after another), ``"gpipe"`` (all forwards, then
            all backwards), ``"1f1b"`` (one forward, one backward: no more live than ranks).
        ranks: pipe ranks.
        micro_batches: of the step.
        stages_per_rank: stages that each rank has.

    Raises:
        ValueError: for a name, or sizes, that there is no schedule of.
    """
    if kind not in KINDS:
        raise ValueError(f"schedule = {kind!r}: expected one of {', '.join(KINDS)}, or a table")
    if min(ranks, micro_batches, stages_per_rank) < 1:
        raise ValueError(
            f"{ranks} ranks, {micro_batches} micro-batches, {stages_per_rank} stages a rank: "
            "expected 1 or more of each"
        )
    return KINDS[kind](ranks, micro_batches, stages_per_rank)


def _plain(
    kind: str, row: Callable[[int, int, int], Iterator[Action]]
) -> Callable[[int, int, int], Schedule]:
    """The generator of a schedule of one stage a rank, by what one rank of it does."""

    def generator(p: int, m: int, v: int) -> Schedule:
        if v != 1:
            raise ValueError(f"schedule {kind} has one stage a rank, not {v}: interleaved has more")
        rows = tuple(tuple(row(rank, p, m)) for rank in range(p))
        return Schedule(kind, p, m, tuple(range(p)), rows)

    return generator


def _naive(rank: int, p: int, m: int) -> Iterator[Action]:
    for micro in range(m):
        yield Action(F, rank, micro)
        yield Action(B, rank, micro)


def _gpipe(rank: int, p: int, m: int) -> Iterator[Action]:
    for kind in (F, B):
        for micro in range(m):
            yield Action(kind, rank, micro)


def _1f1b(rank: int, p: int, m: int) -> Iterator[Action]:
    ahead = min(m, p - 1 - rank)
    for step in range(m + ahead):
        if step < m:
            yield Action(F, rank, step)
        if step >= ahead:
            yield Action(B, rank, step - ahead)


# Name to generator of (ranks, micro-batches, stages a rank).
KINDS: dict[str, Callable[[int, int, int], Schedule]] = {
    "naive": _plain("naive", _naive),
    "gpipe": _plain("gpipe", _gpipe),
    "1f1b": _plain("1f1b", _1f1b),
}
