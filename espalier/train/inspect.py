"""What is in a folder of checkpoints, for people."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from espalier.checkpoint import Checkpoint, CheckpointError, checkpoints
from espalier.checkpoint.folder import INDEX
from espalier.parallel import Plan, PlanError
from espalier.train.memory import readable_bytes


class Row(NamedTuple):
    """One checkpoint.

    Attributes:
        name: of its folder.
        cells: step, plan, ranks, tensors, bytes; empty where its index cannot be read.
        problem: why it cannot be loaded; None if it can.
    """

    name: str
    cells: tuple[str, ...]
    problem: str | None


HEAD: tuple[str, ...] = ("checkpoint", "step", "saved under", "ranks", "tensors", "bytes", "whole")


def rows(directory: Path, *, verify: bool = False) -> Iterator[Row]:
    """A row for each checkpoint, the one that was saved last first.

    Args:
        directory: one of them, or a folder of them.
        verify: compare all values with their checksums.

    Raises:
        ValueError: there are none.
    """
    if not directory.is_dir():
        raise ValueError(f"{directory} is no folder. Give one that engine.save, or espalier train, wrote to.")
    found = [directory] if (directory / INDEX).exists() else checkpoints(directory)
    if not found:
        raise ValueError(f"There is no checkpoint in {directory}.")
    for path in found:
        cells: tuple[str, ...] = ()
        try:
            index = Checkpoint(path).index
            cells = (
                f"{index.step:,}",
                _plan(index.plan),
                str(index.ranks),
                f"{len(index.tensors):,}",
                readable_bytes(index.nbytes),
            )
            if verify:
                Checkpoint(path).verify()
        except CheckpointError as error:
            yield Row(path.name, cells, str(error))
        else:
            yield Row(path.name, cells, None)


def _plan(given: dict[str, object]) -> str:
    try:
        return str(Plan.from_dict(given))
    except PlanError:  # of a later version
        return ", ".join(f"{key} = {value}" for key, value in given.items())
