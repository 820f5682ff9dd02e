"""Schedules as tables that a user writes: CSV or TOML text.

CSV: one line a rank, actions between commas; empty cells are passed over, so columns may be lined up by
time. This is the form that torch.distributed.pipelining writes too.

TOML: ``rows = ["0F0 0F1 0B0 0B1", ...]``, one string a rank, and ``kind``, a name.

Which rank has a stage is where its actions stand, and the number of micro-batches the largest plus one.
"""

from __future__ import annotations

import csv
import io
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path

from espalier.parallel.pipeline.actions import Action, Schedule
from espalier.parallel.pipeline.check import check
from espalier.parallel.pipeline.generate import KINDS, generate


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
