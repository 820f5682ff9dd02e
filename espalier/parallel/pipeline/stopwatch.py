"""When a rank's actions really happen, and all ranks' as one timeline."""

from __future__ import annotations

import platform
import statistics
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from espalier.comm import all_gather
from espalier.mesh import Mesh
from espalier.parallel.pipeline.actions import Action, Schedule
from espalier.parallel.pipeline.simulate import Span, Timeline

_ROUNDS = 7  # of looks at the clocks of several machines


class Stopwatch:
    """Takes the time of a rank's actions.

    On an accelerator by events of its stream, so without waiting for it; else by the clock.

    Args:
        device: that computes.
        clock: in seconds; what :meth:`spans` are by, and what is looked at where there is no accelerator.
    """

    def __init__(self, device: torch.device, clock: Callable[[], float] = time.perf_counter) -> None:
        self._device, self._clock = device, clock
        self._by_events = device.type not in ("cpu", "meta")
        self._taken: list[tuple[Action, Any, Any]] = []
        self._began: Any = None

    def start(self) -> None:
        """An action begins now, if it has not done anything before but wait."""
        self._began = self._now()

    def stop(self, action: Action) -> None:
        """It ends."""
        self._taken.append((action, self._began, self._now()))

    def _now(self) -> Any:
        if not self._by_events:
            return self._clock()
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event

    def spans(self) -> list[Span]:
        """What has been done, by the clock."""
        if not self._by_events:
            return [Span(*taken) for taken in self._taken]
        last = self._now()
        last.synchronize()
        now = self._clock()
        return [
            Span(action, *(now - moment.elapsed_time(last) / 1e3 for moment in moments))
            for action, *moments in self._taken
        ]


def gathered(own: list[Span], schedule: Schedule, mesh: Mesh, axis: int) -> Timeline:
    """The timeline of all ranks along an axis, which all call this.

    Clocks of other machines are set by looking at them right after collectives, a few times.

    Args:
        own: this rank's spans.
        schedule: that they are of.
    """

    def all_of(values: list[float]) -> list[list[float]]:
        table = torch.tensor([values], dtype=torch.float64, device=mesh.device())
        return all_gather(table, mesh, axis, 0, mesh.shape[axis]).tolist()

    looks = []
    for _ in range(_ROUNDS):
        all_of([0.0])
        looks.append(time.perf_counter())
    told = all_of([_machine(), *looks])
    ahead = [
        0.0
        if row[0] == told[0][0]
        else statistics.median(a - b for a, b in zip(row[1:], told[0][1:], strict=True))
        for row in told
    ]
    rows = [[action for action in row if action.kind.computes] for row in schedule.actions]
    times = [moment for span in own for moment in span[1:]]
    times += [0.0] * (2 * max(map(len, rows)) - len(times))
    table = all_of(times)
    begin = min(row[0] - late for row, late, done in zip(table, ahead, rows, strict=True) if done)
    return Timeline(
        schedule,
        tuple(
            tuple(
                Span(action, row[2 * i] - late - begin, row[2 * i + 1] - late - begin)
                for i, action in enumerate(done)
            )
            for row, late, done in zip(table, ahead, rows, strict=True)
        ),
    )


def _machine() -> float:
    """A number that is the same where clocks are."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    name = boot.read_text() if boot.exists() else platform.node()
    return float(zlib.crc32(name.encode()))
