"""Schedules by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from espalier.parallel.pipeline.actions import Action, Kind, Schedule

F, B, I, W = Kind.F, Kind.B, Kind.I, Kind.W  # noqa: E741 - the papers' letters


def generate(kind: str, ranks: int, micro_batches: int, stages_per_rank: int = 1) -> Schedule:
    """A schedule by its name.

    Bubbles are given for stages that take equally long, F, B = I + W and W being a rank's time for all its
    stages and one micro-batch; live is how many micro-batches' activations the fullest rank holds; p ranks,
    m micro-batches, v stages a rank. ``tests/pure/test_schedules.py`` proves each figure.

    Args:
        kind: one of

            * ``"naive"``: a micro-batch at a time, one stage after another. Bubble m(p-1)(F+B), live 1.
            * ``"gpipe"``: all forwards, then all backwards (Huang et al., 1811.06965). Bubble (p-1)(F+B),
              live m.
            * ``"1f1b"``: as soon as a backward can be done it is (Narayanan et al., PipeDream-flush,
              2006.09503). Bubble (p-1)(F+B), live p.
            * ``"interleaved"``: 1F1B with v stages a rank, depth first (Narayanan et al., 2104.04473). Bubble
              (p-1)(F+B)/v, v times the messages, live p + (p-1)/v where p divides m; else the bubble is
              the same, and micro-batches go in groups of up to g > p, the evenest there are, with
              (g-p)(v-1)/v more live.
            * ``"zb-h1"``: 1F1B whose weight gradients fill the bubble (Qi et al., 2401.10241). Bubble
              (p-1) max(F+B-2W, B-W, F), live p.
            * ``"zbv"``: two stages a rank, the second on the way back (Qi et al., 2405.15362). No rank idles
              between its first and its last action where F = I = W and m >= 2p-1 (it idles for (2p-1-m) F/2
              if m is less); as ranks begin one after another the bubble is (p-1) F/2; live p.
        ranks: pipe ranks, p.
        micro_batches: of the step, m; any number.
        stages_per_rank: v. One, but for ``"interleaved"`` (any) and ``"zbv"`` (2).

    Raises:
        ValueError: for a name, or sizes, that there is no schedule of.
    """
    if kind not in KINDS:
        raise ValueError(
            f"schedule = {kind!r}: expected one of {', '.join(KINDS)}, or a table's file, which must exist"
        )
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
    forwards = [Action(F, rank, micro) for micro in range(m)]
    backwards = [Action(B, rank, micro) for micro in range(m)]
    return _one_by_one(forwards, backwards, ahead)


def _one_by_one(forwards: list[Action], backwards: list[Action], ahead: int) -> Iterator[Action]:
    """So many forwards ahead, then one forward and one backward in turns, then the backwards left."""
    for step in range(len(forwards) + ahead):
        if step < len(forwards):
            yield forwards[step]
        if step >= ahead:
            yield backwards[step - ahead]


def _zb_h1(rank: int, p: int, m: int) -> Iterator[Action]:
    # Rank r has p - r micro-batches on the way, as in 1F1B, and may keep r more for their weights: so the
    # last rank is never idle once it has begun, and inputs' gradients reach the first as early as can be.
    for action in _1f1b(rank, p, m):
        if action.kind is F:
            yield action
            continue
        micro = action.micro_batch
        yield Action(I, rank, micro)
        if micro >= rank:
            yield Action(W, rank, micro - rank)
    for micro in range(max(0, m - rank), m):
        yield Action(W, rank, micro)


def _interleaved(p: int, m: int, v: int) -> Schedule:
    number = max(1, m // p)
    sizes = [m // number + (group < m % number) for group in range(number)]
    first = [sum(sizes[:group]) for group in range(number)]
    turns = [
        (chunk, micro)
        for begin, size in zip(first, sizes, strict=True)
        for chunk in range(v)
        for micro in range(begin, begin + size)
    ]
    rows = []
    for rank in range(p):
        forwards = [Action(F, chunk * p + rank, micro) for chunk, micro in turns]
        backwards = [Action(B, (v - 1 - chunk) * p + rank, micro) for chunk, micro in turns]
        # A micro-batch's first backward comes back 2(p - 1 - rank) actions after its last forward here.
        ahead = (v - 1) * sizes[0] + (2 if v > 1 else 1) * (p - 1 - rank)
        # fewer micro-batches than ranks: chunks cannot follow each other without a gap
        ahead = m * v if m < p and v > 1 else min(m * v, ahead)
        rows.append(tuple(_one_by_one(forwards, backwards, ahead)))
    return Schedule("interleaved", p, m, tuple(range(p)) * v, tuple(rows))


def _zbv(p: int, m: int, v: int) -> Schedule:
    if v != 2:
        raise ValueError(f"schedule zbv has 2 stages a rank, not {v}")
    rows = tuple(tuple(_zbv_row(rank, p, m)) for rank in range(p))
    return Schedule("zbv", p, m, (*range(p), *reversed(range(p))), rows)


def _zbv_row(rank: int, p: int, m: int) -> Iterator[Action]:
    stages = {"a": rank, "b": 2 * p - 1 - rank}  # on the way there, on the way back
    done = {(kind, way): 0 for kind in (F, I, W) for way in stages}

    def do(*actions: tuple[Kind, str]) -> Iterator[Action]:
        for which in actions:
            if done[which] < m:
                yield Action(which[0], stages[which[1]], done[which])
                done[which] += 1

    there = [(F, "a"), (I, "a"), (W, "a")]
    back = [(F, "b"), (I, "b"), (W, "b")]
    # Until the first micro-batch comes back; until its gradient does; until that comes back from the end.
    for _ in range(2 * (p - rank) - 1):
        yield from do((F, "a"))
    for _ in range(rank):
        yield from do((F, "b"), (F, "a"))
    for _ in range(p - rank):
        yield from do(*back)
    # The rank now holds 2p - 1 stages' activations: each forward is followed by what frees as much.
    while done[F, "b"] < m:
        yield from do(*there, *back)
    # No more forwards: gradients of inputs go first where another rank waits, those of weights fill gaps.
    for _ in range(rank):
        yield from do((I, "a"), (I, "b"))
    while done[I, "a"] < m:
        yield from do((I, "a"), (W, "a"))
    while done[W, "a"] < m or done[W, "b"] < m:
        yield from do((W, "b"), (W, "a"))


# Name to generator of (ranks, micro-batches, stages a rank).
KINDS: dict[str, Callable[[int, int, int], Schedule]] = {
    "naive": _plain("naive", _naive),
    "gpipe": _plain("gpipe", _gpipe),
    "1f1b": _plain("1f1b", _1f1b),
    "interleaved": _interleaved,
    "zb-h1": _plain("zb-h1", _zb_h1),
    "zbv": _zbv,
}
