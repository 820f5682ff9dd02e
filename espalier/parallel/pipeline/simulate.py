"""What a schedule takes: each rank's timeline, predicted from costs or measured in a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from espalier.parallel.pipeline.actions import Action, Kind, Schedule
from espalier.parallel.pipeline.order import Costs, each, missing_message, order


class Span(NamedTuple):
    """An action and when it was done, in seconds."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """When each rank does what, in one step.

    Attributes:
        schedule: what is done.
        spans: of each rank, its computing actions in order. The first of all ranks starts at 0.
    """

    schedule: Schedule
    spans: tuple[tuple[Span, ...], ...]

    @cached_property
    def step_time(self) -> float:
        """Seconds from the first action of any rank to the end of the last."""
        return max((row[-1].end for row in self.spans if row), default=0.0)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Seconds that each rank computes."""
        return tuple(sum(span.end - span.start for span in row) for row in self.spans)

    @property
    def bubble(self) -> float:
        """Seconds that the busiest rank does not compute."""
        return self.step_time - max(self.busy)

    @property
    def bubble_fraction(self) -> float:
        """The part of all ranks' time in which they do not compute."""
        return 1 - sum(self.busy) / (len(self.spans) * self.step_time) if self.step_time else 0.0

    @property
    def idle_within(self) -> tuple[float, ...]:
        """Seconds that each rank does nothing between its first and its last action."""
        return tuple(
            row[-1].end - row[0].start - busy if row else 0.0
            for row, busy in zip(self.spans, self.busy, strict=True)
        )

    def peak_bytes(self, activations: float | Sequence[float]) -> tuple[float, ...]:
        """Bytes of activations that each rank holds at its fullest.

        Args:
            activations: bytes that a stage keeps of one micro-batch, from its forward to the end of its
                backward (of its `W` where that is apart): one number, or one a stage.
        """
        size = each(activations, self.schedule.stages)
        peaks = []
        for row in self.spans:
            held = peak = 0.0
            for (kind, stage, _), _, _ in row:
                if kind is Kind.F:
                    held += size[stage]
                    peak = max(peak, held)
                elif kind is not Kind.I:
                    held -= size[stage]
            peaks.append(peak)
        return tuple(peaks)

    def costs(self) -> Costs:
        """The mean time of each stage's actions, to predict a step from a measured one; messages are free."""
        n = self.schedule.stages
        took: dict[tuple[Kind, int], list[float]] = {}
        for row in self.spans:
            for (kind, stage, _), start, end in row:
                took.setdefault((kind, stage), []).append(end - start)
        mean = {key: sum(times) / len(times) for key, times in took.items()}
        # a whole backward stands as I with nothing left for W: together they are its time
        inputs = [mean.get((Kind.I, s), 0.0) + mean.get((Kind.B, s), 0.0) for s in range(n)]
        return Costs(
            [mean[Kind.F, s] for s in range(n)], inputs, [mean.get((Kind.W, s), 0.0) for s in range(n)]
        )

    def predicted(self) -> Timeline:
        """What the schedule takes where each action takes its stage's mean time, and messages none."""
        return simulate(self.schedule, self.costs())


def simulate(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """The timeline that a schedule has with these costs.

    Args:
        schedule: the object that is executed.
        costs: seconds of actions and messages; 1 for `F`, `I` and `W` each if not given. Sending and
            receiving take none of a rank's own time.

    Raises:
        ValueError: when the schedule deadlocks.
    """
    found = order(schedule, costs)
    if found.stuck:
        raise ValueError(f"The schedule {schedule.kind} deadlocks.\n{missing_message(schedule, found)}")
    return Timeline(
        schedule,
        tuple(tuple(map(Span, *of)) for of in zip(found.rows, found.starts, found.ends, strict=True)),
    )
