"""The usual schedules, made for so many stages and micro-batches, and schedules kept in tables."""

from __future__ import annotations

import csv
import io
import tomllib
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from espalier.parallel.schedules.actions import Action, ActionKind, Schedule
from espalier.parallel.schedules.simulate import check

F, B, I, W = ActionKind.F, ActionKind.B, ActionKind.I, ActionKind.W  # noqa: E741 - the papers' letters


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
    return one_by_one(forwards, backwards, ahead)


def one_by_one(forwards: list[Action], backwards: list[Action], ahead: int) -> Iterator[Action]:
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
        rows.append(tuple(one_by_one(forwards, backwards, ahead)))
    return Schedule("interleaved", p, m, tuple(range(p)) * v, tuple(rows))


def _zbv(p: int, m: int, v: int) -> Schedule:
    if v != 2:
        raise ValueError(f"schedule zbv has 2 stages a rank, not {v}")
    rows = tuple(tuple(_zbv_row(rank, p, m)) for rank in range(p))
    return Schedule("zbv", p, m, (*range(p), *reversed(range(p))), rows)


def _zbv_row(rank: int, p: int, m: int) -> Iterator[Action]:
    stages = {"a": rank, "b": 2 * p - 1 - rank}  # on the way there, on the way back
    done = {(kind, way): 0 for kind in (F, I, W) for way in stages}

    def do(*actions: tuple[ActionKind, str]) -> Iterator[Action]:
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


# ---- schedules as tables that a user writes: CSV or TOML text
#
# CSV: one line a rank, actions between commas; empty cells are passed over, so columns may be lined up by
# time. This is the form that torch.distributed.pipelining writes too.
#
# TOML: ``rows = ["0F0 0F1 0B0 0B1", ...]``, one string a rank, and ``kind``, a name.
#
# Which rank has a stage is where its actions stand, and the number of micro-batches the largest plus one.


def to_csv(schedule: Schedule) -> str:
    """The CSV text of a schedule."""
    return "".join(",".join(map(str, row)) + "\n" for row in schedule.actions)


def to_toml(schedule: Schedule) -> str:
    """The TOML text of a schedule."""
    rows = "".join(f'    "{" ".join(map(str, row))}",\n' for row in schedule.actions)
    return f'kind = "{schedule.kind}"\nrows = [\n{rows}]\n'


def from_csv(text: str, kind: str = "table") -> Schedule:
    """The schedule of a CSV text.

    Raises:
        ValueError: with the line and the cell that cannot be read.
    """
    lines = [line for line in csv.reader(io.StringIO(text)) if any(cell.strip() for cell in line)]
    return _schedule([[cell for cell in line if cell.strip()] for line in lines], kind)


def from_toml(text: str) -> Schedule:
    """The schedule of a TOML text.

    Raises:
        ValueError: when it is no TOML, has other keys, or an action cannot be read.
    """
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"not valid TOML: {error}") from None
    other = set(table) - {"kind", "rows"}
    rows = table.get("rows")
    if other or not isinstance(rows, list) or not all(isinstance(row, str) for row in rows):
        raise ValueError(
            'expected rows = ["0F0 0B0", "1F0 1B0"], one string a rank, and kind = "a name"'
            + (f"; unknown: {', '.join(sorted(other))}" if other else "")
        )
    return _schedule([row.split() for row in rows], str(table.get("kind", "table")))


def _schedule(rows: list[list[str]], kind: str) -> Schedule:
    actions: list[tuple[Action, ...]] = []
    owner: dict[int, int] = {}
    for rank, cells in enumerate(rows):
        row = []
        for place, cell in enumerate(cells):
            try:
                row.append(Action.parse(cell))
            except ValueError as error:
                raise ValueError(f"rank {rank}, action {place}: {error}") from None
        actions.append(tuple(row))
        for action in row:
            if owner.setdefault(action.stage, rank) != rank:
                raise ValueError(
                    f"rank {rank} has {action}, but stage {action.stage} is on rank {owner[action.stage]}: "
                    "expected all actions of a stage in one row"
                )
    stages = max(owner, default=-1) + 1
    absent = sorted(set(range(stages)) - set(owner))
    if absent or not stages:
        raise ValueError(f"no rank has stage {absent[0] if absent else 0}")
    micro_batches = 1 + max(action.micro_batch for row in actions for action in row)
    return Schedule(kind, len(rows), micro_batches, tuple(owner[s] for s in range(stages)), tuple(actions))


def load(path: str | Path) -> Schedule:
    """Read a table, ``*.toml`` or CSV, and check it.

    Raises:
        ValueError: when it cannot be read, or is no schedule that works, with what is wrong where.
    """
    path = Path(path)
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not text"
        raise ValueError(f"The schedule {path} cannot be read: {why}.") from None
    try:
        schedule = from_toml(text) if path.suffix == ".toml" else from_csv(text, path.stem)
        check(schedule)
    except ValueError as error:
        raise ValueError(f"The schedule {path}: {error}") from None
    return schedule


def write_table(path: str | Path, schedule: Schedule) -> None:
    """Write a table, ``*.toml`` or ``*.csv``."""
    path = Path(path)
    path.write_text(TABLES[path.suffix](schedule), "utf-8")


def find_schedule(
    given: str | Schedule,
    ranks: int | None = None,
    micro_batches: int | None = None,
    stages_per_rank: int | None = None,
) -> Schedule:
    """A schedule by its name, of a table by its path, or itself.

    Args:
        given: any of these.
        ranks, micro_batches, stages_per_rank: its sizes; by default a table's own, and for names 4, 8 and
            the least there may be.

    Raises:
        ValueError: when there is no such schedule, when it has faults, or when a table has other sizes.
    """
    if isinstance(given, str):
        if given in KINDS or not Path(given).is_file():
            least = 2 if given in ("interleaved", "zbv") else 1
            return generate(given, ranks or 4, micro_batches or 8, stages_per_rank or least)
        given = load(given)
    else:
        check(given)
    for what, own, wanted in (
        ("ranks", given.ranks, ranks),
        ("micro-batches", given.micro_batches, micro_batches),
        ("stages", given.stages, (stages_per_rank or 0) * (ranks or given.ranks)),
    ):
        if wanted and own != wanted:
            raise ValueError(f"The schedule {given.kind} is for {own} {what}: expected {wanted}")
    return given


# Ending of a file to what writes it.
TABLES: Mapping[str, Callable[[Schedule], str]] = {".csv": to_csv, ".toml": to_toml}


# ---- schedules that torch.distributed.pipelining has and a plan has no name for, made as tables

F, B, I, W = ActionKind.F, ActionKind.B, ActionKind.I, ActionKind.W  # noqa: E741 - the papers' letters


def looped_bfs(p: int, m: int, v: int) -> Schedule:
    """Breadth first (Lamy-Poirier, 2211.05953): a rank's stages one after the other, all micro-batches each.

    Bubble (p-1)(F+B)/v where m >= p, live m.

    Args:
        p, m, v: pipe ranks, micro-batches of a step, stages a rank.
    """
    rows = tuple(
        tuple(
            [Action(F, chunk * p + rank, micro) for chunk in range(v) for micro in range(m)]
            + [Action(B, chunk * p + rank, micro) for chunk in reversed(range(v)) for micro in range(m)]
        )
        for rank in range(p)
    )
    return Schedule("looped-bfs", p, m, tuple(range(p)) * v, rows)


def interleaved_zero_bubble(p: int, m: int, v: int) -> Schedule:
    """Interleaved 1F1B whose weight gradients fill the bubble (Qi et al., 2401.10241, ZB1P).

    Bubble (p-1)(F+B-2W)/v where p divides m and W is no longer than F and I, live p.

    Args:
        p, m, v: pipe ranks, micro-batches of a step, stages a rank.

    Raises:
        ValueError: micro-batches do not go in rounds of one size.
    """
    rounds = max(1, m // p)
    if m % rounds:
        raise ValueError(
            f"{m} micro-batches on {p} pipe ranks: expected a multiple of the {rounds} rounds that they make"
        )
    size = m // rounds
    turns = [(c, begin + i) for begin in range(0, m, size) for c in range(v) for i in range(size)]
    rows = tuple(tuple(_zero_bubble_row(rank, p, v, size, turns)) for rank in range(p))
    return Schedule("interleaved-zero-bubble", p, m, tuple(range(p)) * v, rows)


def _zero_bubble_row(rank: int, p: int, v: int, size: int, turns: list[tuple[int, int]]) -> Iterator[Action]:
    forwards = [Action(F, chunk * p + rank, micro) for chunk, micro in turns]
    backwards = [Action(I, (v - 1 - chunk) * p + rank, micro) for chunk, micro in turns]
    ahead = min(len(turns), (v - 1) * size + p - 1 - rank)
    waiting = []
    for action in one_by_one(forwards, backwards, ahead):
        yield action
        if action.kind is I:
            waiting.append(action)
            if len(waiting) > rank:
                yield waiting.pop(0)._replace(kind=W)
    for action in waiting:
        yield action._replace(kind=W)


def dual_pipe_v(p: int, m: int, v: int) -> Schedule:
    """DualPipe (DeepSeek-V3, 2412.19437) cut in half: two stages a rank, laid out as a V.

    What it has overlap, a forward and a backward pass of two micro-batches, are one behind the other here.

    Args:
        p, m, v: pipe ranks, micro-batches of a step, stages a rank.

    Raises:
        ValueError: there are not two stages a rank, or fewer micro-batches than stages.
    """
    if v != 2 or m < 2 * p:
        raise ValueError(
            f"{v} stages a rank and {m} micro-batches on {p} pipe ranks: expected 2 stages a rank, and at "
            f"least as many micro-batches as stages, {2 * p}"
        )
    ranks = tuple(range(p))
    return Schedule("dual-pipe-v", p, m, ranks + ranks[::-1], tuple(tuple(_dual_row(r, p, m)) for r in ranks))


def _dual_row(rank: int, p: int, m: int) -> Iterator[Action]:
    down, up, behind = rank, 2 * p - 1 - rank, p - 1 - rank
    done: Counter[tuple[int, bool]] = Counter()
    waiting: deque[Action] = deque()

    def passes(*kinds: tuple[ActionKind, int]) -> Iterator[Action]:
        for kind, stage in kinds:
            if kind is W:
                if waiting:
                    yield waiting.popleft()
                continue
            micro = done[stage, kind is F]
            done[stage, kind is F] += 1
            yield Action(kind, stage, micro)
            if kind is I:
                waiting.append(Action(W, stage, micro))

    yield from passes(*[(F, down)] * (2 * behind))
    yield from passes(*[(F, down), (F, up)] * (rank + 1))
    yield from passes(*[(I, up), (W, up), (F, up)] * behind)
    yield from passes(*[(F, down), (B, up), (F, up), (B, down)] * (m - 2 * p + rank + 1))
    yield from passes(*[(B, up), (F, up), (B, down)] * behind)
    half, odd = (rank + 1) // 2, rank % 2
    last = B
    for i in range(rank + 1):
        last = I if i == half and odd else last
        yield from passes((last, up))
        last = I if i == half and not odd else last
        yield from passes((last, down))
    yield from passes(*[(W, down), (last, down)] * behind)
    yield from passes(*[(W, down)] * (rank + 1))
