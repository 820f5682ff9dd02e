"""Who is told how a run goes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from espalier.train.metrics import Record


class Run(Protocol):
    """A run, as callbacks see it: a :class:`~espalier.train.runlog.RunLog`.

    Attributes:
        folder: of the run.
        name: of the run.
        first: whether this rank writes.
        engine: that trains.
    """

    folder: Path
    name: str
    first: bool
    engine: Any

    @property
    def records(self) -> Sequence[Record]:
        """So far; on the first rank also those from before the run was resumed."""


@dataclass(frozen=True)
class Event:
    """Something that happened to a run.

    Attributes:
        kind: ``"spike"``, ``"rollback"``, ``"restart"``, ``"resume"``, ``"sample"``, ``"left"``
            or ``"failed"``.
        text: in words; of a sample, what the model wrote.
        step: steps done.
        at: when, as ISO 8601 in UTC.
    """

    kind: str
    text: str
    step: int
    at: str


class Callback(Protocol):
    """Told how a run goes, on every rank, each of which calls it at the same steps.

    A subclass overrides what it wants to hear; a tracker writes where ``run.first`` holds.
    """

    def begin(self, run: Run) -> None:
        """The run begins, or goes on."""

    def record(self, record: Record) -> None:
        """A step was measured."""

    def event(self, event: Event) -> None:
        """Something happened."""

    def end(self, status: str) -> None:
        """The run is over: ``"finished"``, ``"left"`` or ``"failed"``."""
