"""When each action of a schedule happens: rows done in order, each action as soon as what it needs is there.

The one interpreter beneath the checker, the simulator and the placing of messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from espalier.parallel.pipeline.actions import Action, Kind, Schedule


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

    def seconds(self, stages: int) -> dict[Kind, list[float]]:
        """Seconds by kind, one a stage."""
        f, i, w = (each(given, stages) for given in (self.forward, self.backward_input, self.backward_weight))
        return {Kind.F: f, Kind.I: i, Kind.W: w, Kind.B: [a + b for a, b in zip(i, w, strict=True)]}

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


def each(given: float | Sequence[float], stages: int) -> list[float]:
    """One number a stage."""
    if isinstance(given, int | float):
        return [float(given)] * stages
    if len(given) != stages:
        raise ValueError(f"{len(given)} costs for {stages} stages: expected one number, or one a stage")
    return [float(cost) for cost in given]


@dataclass
class Order:
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


def order(schedule: Schedule, costs: Costs | None = None) -> Order:
    """Go through a schedule. Messages that it lists are passed over; what stage s + 1 needs takes a message.

    Time and memory are linear in the number of actions.
    """
    costs = costs or Costs()
    n, owner = schedule.stages, schedule.stage_to_rank
    took, busy = costs.seconds(n), costs.message_seconds(n)
    rows = [[a for a in row if a.kind.computes] for row in schedule.actions]
    result = Order(rows, [[] for _ in rows], [[] for _ in rows])
    # When an action's result is where it is needed: by (is it of a backward, stage, micro-batch).
    here: dict[tuple[bool, int, int], float] = {}
    forwards: dict[tuple[int, int], float] = {}
    inputs: dict[tuple[int, int], float] = {}
    free: dict[tuple[int, int], float] = {}
    waiting: dict[tuple[bool, int, int], int] = {}
    ready = list(range(len(rows)))
    F, W = Kind.F, Kind.W
    while ready:
        rank = ready.pop()
        row, starts, ends = rows[rank], result.starts[rank], result.ends[rank]
        now = ends[-1] if ends else 0.0
        while len(ends) < len(row):
            kind, stage, micro = row[len(ends)]
            back = kind is not F
            if back and (stage, micro) not in (inputs if kind is W else forwards):
                missing = Action(Kind.I if kind is W else F, stage, micro)
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
                given = (back, to, micro)
                here[given] = there
                woken = waiting.pop(given, None)
                if woken is not None:
                    result.stuck.pop(woken)
                    if woken != rank:
                        ready.append(woken)
        else:
            continue
    return result


def missing_message(schedule: Schedule, found: Order) -> str:
    """One line for each rank that cannot go on."""
    lines = []
    for rank, (place, missing) in sorted(found.stuck.items()):
        owner = schedule.stage_to_rank[missing.stage]
        lines.append(
            f"rank {rank} waits for ever at its action {place}, {found.rows[rank][place]}: "
            f"it needs {missing} of rank {owner}, which has not been done by then"
        )
    return "\n".join(lines)
