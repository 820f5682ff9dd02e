"""A pipeline's schedule as data: what each rank does, action by action.

The stages of a model are numbered 0 .. n-1 in the order of its layers. A schedule gives each pipe rank one
row of actions, done in order. It is generated or read from a table (``generate``), checked (``check``),
simulated and drawn (``simulate``), and executed from the same object.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple


class ActionKind(StrEnum):
    """What an action does.

    A backward pass is whole (``B``) or in two parts: gradients of a stage's inputs (``I``), which the
    stage before waits for, and gradients of its weights (``W``), which nobody waits for.
    """

    F = "F"
    B = "B"
    I = "I"  # noqa: E741 - the papers' letter
    W = "W"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"

    @property
    def computes(self) -> bool:
        """True for what computes, False for messages."""
        return len(self) == 1


class Action(NamedTuple):
    """One action on one micro-batch.

    ``SEND_F`` of stage s sends its outputs to the stage after, ``RECV_F`` of stage s receives its inputs from
    the stage before; ``SEND_B`` of stage s sends its inputs' gradients to the stage before, ``RECV_B`` of
    stage s receives its outputs' gradients from the stage after.
    """

    kind: ActionKind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """The action of a text such as ``1F0``: stage, kind, micro-batch (also how torch writes them)."""
        match = re.fullmatch(r"(\d+)([A-Z_]+)(\d+)", text.strip())
        if not match or match[2] not in ActionKind.__members__:
            kinds = ", ".join(ActionKind)
            raise ValueError(
                f"{text.strip()!r} is no action: expected stage, kind, micro-batch, as 0F3 (kinds: {kinds})"
            )
        return cls(ActionKind[match[2]], int(match[1]), int(match[3]))


# ---- when each action of a schedule happens: rows done in order, each action as soon as what it needs is
# there
#
# The one interpreter beneath the checker, the simulator and the placing of messages.


@dataclass(frozen=True)
class Schedule:
    """What each rank of a pipeline does in one step.

    Attributes:
        kind: its name, ``"1f1b"`` say.
        ranks: pipe ranks.
        micro_batches: of the step.
        stage_to_rank: the rank that has each stage.
        actions: one row a rank, in the order in which it does them. Messages may be left out:
            `with_messages` adds them.
    """

    kind: str
    ranks: int
    micro_batches: int
    stage_to_rank: tuple[int, ...]
    actions: tuple[tuple[Action, ...], ...]

    @property
    def stages(self) -> int:
        """Number of stages, of all ranks together."""
        return len(self.stage_to_rank)

    @cached_property
    def has_messages(self) -> bool:
        """True where sends and receives are among the actions."""
        return any(not action.kind.computes for row in self.actions for action in row)

    def rank_of(self, stage: int) -> int:
        """The rank that has a stage."""
        return self.stage_to_rank[stage]

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that a rank has, in the order of the model."""
        return tuple(stage for stage, owner in enumerate(self.stage_to_rank) if owner == rank)

    def peer(self, action: Action) -> int:
        """The rank at the other end of a message."""
        ahead = action.kind in (ActionKind.SEND_F, ActionKind.RECV_B)
        return self.stage_to_rank[action.stage + (1 if ahead else -1)]

    def __str__(self) -> str:
        width = len(str(self.ranks - 1))
        head = f"{self.kind}: {self.stages} stages on {self.ranks} ranks, {self.micro_batches} micro-batches"
        rows = (
            f"rank {rank:>{width}}: {' '.join(map(str, row))}".rstrip()
            for rank, row in enumerate(self.actions)
        )
        return "\n".join([head, *rows])


@dataclass(frozen=True)
class Costs:
    """What actions and messages take. Only ratios matter to an order; the simulator's seconds are these.

    Attributes:
        forward, backward_input, backward_weight: seconds of `F`, `I` and `W` of a stage and one micro-batch:
            one number for all stages, or one a stage. A whole backward (`B`) takes the last two together.
        latency: seconds a message takes, of any size.
        message: bytes that a stage's outputs have (their gradients as many): one number, or one a stage.
        bandwidth: bytes a second between two ranks, one way; messages between them wait for each other.
    """

    forward: float | Sequence[float] = 1.0
    backward_input: float | Sequence[float] = 1.0
    backward_weight: float | Sequence[float] = 1.0
    latency: float = 0.0
    message: float | Sequence[float] = 0.0
    bandwidth: float = float("inf")

    def seconds(self, stages: int) -> dict[ActionKind, list[float]]:
        """Seconds by kind, one a stage."""
        f, i, w = (each(times, stages) for times in (self.forward, self.backward_input, self.backward_weight))
        return {
            ActionKind.F: f,
            ActionKind.I: i,
            ActionKind.W: w,
            ActionKind.B: [a + b for a, b in zip(i, w, strict=True)],
        }

    def message_seconds(self, stages: int) -> list[float]:
        """Seconds that a link is busy with a message between stage s and s + 1."""
        return [size / self.bandwidth for size in each(self.message, stages)]


def read_times(text: str) -> Costs:
    """The costs of a text such as ``1,1,0.5``: seconds of `F`, `I` and `W`.

    Raises:
        ValueError: when these are not three numbers above 0.
    """
    try:
        forward, inputs, weights = map(float, text.split(","))
        if not min(forward, inputs, weights) > 0 or forward + inputs + weights == float("inf"):
            raise ValueError
    except ValueError:
        raise ValueError(f"times {text!r}: expected three numbers above 0, of F, I and W, as 1,1,1") from None
    return Costs(forward, inputs, weights)


def each(times: float | Sequence[float], stages: int) -> list[float]:
    """One number a stage."""
    if isinstance(times, int | float):
        return [float(times)] * stages
    if len(times) != stages:
        raise ValueError(f"{len(times)} costs for {stages} stages: expected one number, or one a stage")
    return [float(cost) for cost in times]


@dataclass
class ActionTimes:
    """When the computing actions of a schedule happen.

    Attributes:
        starts, ends: of each action, by rank, in the order of its row (messages left out).
        rows: the actions that these are of.
        stuck: the ranks that cannot go on, with the place in `rows` and what is missing there.
    """

    rows: list[list[Action]]
    starts: list[list[float]]
    ends: list[list[float]]
    stuck: dict[int, tuple[int, Action]] = field(default_factory=dict)


def order(schedule: Schedule, costs: Costs | None = None) -> ActionTimes:
    """Go through a schedule. Messages that it lists are passed over; what stage s + 1 needs takes a message.

    Time and memory are linear in the number of actions.
    """
    costs = costs or Costs()
    n, owner = schedule.stages, schedule.stage_to_rank
    took, busy = costs.seconds(n), costs.message_seconds(n)
    rows = [[a for a in row if a.kind.computes] for row in schedule.actions]
    result = ActionTimes(rows, [[] for _ in rows], [[] for _ in rows])
    # When an action's result is where it is needed: by (is it of a backward, stage, micro-batch).
    here: dict[tuple[bool, int, int], float] = {}
    forwards: dict[tuple[int, int], float] = {}
    inputs: dict[tuple[int, int], float] = {}
    free: dict[tuple[int, int], float] = {}
    waiting: dict[tuple[bool, int, int], int] = {}
    ready = list(range(len(rows)))
    F, W = ActionKind.F, ActionKind.W
    while ready:
        rank = ready.pop()
        row, starts, ends = rows[rank], result.starts[rank], result.ends[rank]
        now = ends[-1] if ends else 0.0
        while len(ends) < len(row):
            kind, stage, micro = row[len(ends)]
            back = kind is not F
            if back and (stage, micro) not in (inputs if kind is W else forwards):
                missing = Action(ActionKind.I if kind is W else F, stage, micro)
                result.stuck[rank] = (len(ends), missing)
                break
            to = stage + (-1 if back else 1)
            if kind is not W:
                need = (back, stage, micro)
                if 0 <= 2 * stage - to < n:
                    at = here.get(need)
                    if at is None:
                        waiting[need] = rank
                        result.stuck[rank] = (len(ends), Action(kind, 2 * stage - to, micro))
                        break
                    now = max(now, at)
            starts.append(now)
            now += took[kind][stage]
            ends.append(now)
            if kind is W:
                continue
            (inputs if back else forwards)[stage, micro] = now
            if 0 <= to < n:
                there = now
                link = (rank, owner[to])
                if link[0] != link[1]:
                    there = max(now, free.get(link, 0.0)) + busy[min(stage, to)]
                    free[link] = there
                    there += costs.latency
                needed = (back, to, micro)
                here[needed] = there
                woken = waiting.pop(needed, None)
                if woken is not None:
                    result.stuck.pop(woken)
                    if woken != rank:
                        ready.append(woken)
        else:
            continue
    return result


def missing_message(schedule: Schedule, times: ActionTimes) -> str:
    """One line for each rank that cannot go on."""
    lines = []
    for rank, (place, missing) in sorted(times.stuck.items()):
        owner = schedule.stage_to_rank[missing.stage]
        lines.append(
            f"rank {rank} waits for ever at its action {place}, {times.rows[rank][place]}: "
            f"it needs {missing} of rank {owner}, which has not been done by then"
        )
    return "\n".join(lines)


# ---- where a schedule's messages are sent and received


def without_messages(schedule: Schedule) -> Schedule:
    """The schedule with computing actions alone."""
    rows = tuple(tuple(a for a in row if a.kind.computes) for row in schedule.actions)
    return replace(schedule, actions=rows)


def messages_of(schedule: Schedule, action: Action) -> tuple[Action, Action] | None:
    """The send that follows a computing action, and its receive; None where nothing crosses ranks."""
    kind, stage, micro = action
    if kind is ActionKind.W:
        return None
    to = stage + (1 if kind is ActionKind.F else -1)
    if not 0 <= to < schedule.stages or schedule.stage_to_rank[to] == schedule.stage_to_rank[stage]:
        return None
    if kind is ActionKind.F:
        return Action(ActionKind.SEND_F, stage, micro), Action(ActionKind.RECV_F, to, micro)
    return Action(ActionKind.SEND_B, stage, micro), Action(ActionKind.RECV_B, to, micro)


def with_messages(schedule: Schedule) -> Schedule:
    """The schedule with a send and a receive for each value that crosses ranks.

    A send follows what computes its value. Its receive stands in the peer's row where that rank is at
    that time, so before the action that needs it, often well before: a runtime that does not block posts
    it there and waits where it is needed. All messages together are in one order that every row keeps
    (that of time, all stages alike), so blocking ones cannot deadlock either, and between two ranks
    messages arrive in the order in which they are sent.

    Args:
        schedule: any; messages that it has are left as they are.

    Raises:
        ValueError: when the schedule deadlocks, with what each rank waits for.
    """
    if schedule.has_messages:
        return schedule
    times = order(schedule)
    if times.stuck:
        raise ValueError(f"The schedule {schedule.kind} deadlocks.\n{missing_message(schedule, times)}")
    # (time, messages before what starts at that time, tie by rank and place): keys of all events
    rows: list[list[tuple[tuple[float, int, int, int], Action]]] = [[] for _ in times.rows]
    for rank, row in enumerate(times.rows):
        for place, action in enumerate(row):
            rows[rank].append(((times.starts[rank][place], 1, rank, place), action))
            pair = messages_of(schedule, action)
            if pair is not None:
                key = (times.ends[rank][place], 0, rank, place)
                rows[rank].append((key, pair[0]))
                rows[schedule.peer(pair[0])].append((key, pair[1]))
    ordered = tuple(tuple(action for _, action in sorted(row)) for row in rows)
    return replace(schedule, actions=ordered)
