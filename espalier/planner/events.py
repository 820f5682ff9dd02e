"""The events of a predicted step: what a rank's device, its host and its links do when.

A pipeline's actions are those of the schedule's simulation. Within an action the operations and messages that
were recorded are played in their order, by the prices that the prediction is made of; each action is as long
as it is priced, so what is drawn adds up to the predicted step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from espalier.parallel.schedules import Timeline
from espalier.parallel.schedules.actions import ActionKind
from espalier.planner.cells import Order
from espalier.planner.prediction import Prediction
from espalier.planner.prices import VIEW, Prices
from espalier.planner.recording import Event, Sent

COMPUTE, HOST = "compute", "host"
_FINE = 1 / 600  # of a step: what is nearer is drawn as one
_PHASE = {ActionKind.F: "forward", ActionKind.B: "backward", ActionKind.I: "backward"}
_MARKS = {"forward": "F", "backward": "B", "weights": "W", "update": "U", "copies": "C"}


class Happening(NamedTuple):
    """What goes on in a lane: ``"compute"``, ``"host"``, ``"offload"``, or an axis of the mesh."""

    lane: str
    name: str
    start: float
    end: float


@dataclass(frozen=True)
class Step:
    """A step, event by event.

    Attributes:
        ranks: what happens on each rank along the pipe axis; what is near to one another there is one.
        seconds: of the step.
        micro_batches: that it has, maybe fewer than the plan's.
        block: of a block, forward and then backward, each operation and each message.
    """

    ranks: tuple[tuple[Happening, ...], ...]
    seconds: float
    micro_batches: int
    block: tuple[Happening, ...] = ()

    def trace(self, first: int = 0) -> list[dict[str, Any]]:
        """As Chrome's trace events: a process a rank, a thread a lane, microseconds.

        Args:
            first: number of the first process.
        """
        processes = {f"rank {i}": row for i, row in enumerate(self.ranks)}
        if self.block:
            processes["a block, operation by operation"] = self.block
        events: list[dict[str, Any]] = []
        for pid, (title, row) in enumerate(processes.items(), first):
            events.append({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": title}})
            threads = lanes(row)
            for tid, lane in enumerate(threads):
                named = {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": lane}}
                events.append(named)
            for x in row:
                place = {"pid": pid, "tid": threads.index(x.lane), "ts": x.start * 1e6}
                events.append({"ph": "X", "name": x.name, "dur": (x.end - x.start) * 1e6, **place})
        return events


def lanes(row: Iterable[Happening]) -> list[str]:
    """The lanes that there are: the device, its host, then links."""
    there = dict.fromkeys(x.lane for x in row)
    return [*(x for x in (COMPUTE, HOST) if x in there), *sorted(there.keys() - {COMPUTE, HOST})]


# ---- an action, by what was recorded of it


def played(events: Sequence[Event], prices: Prices, phase: str) -> list[Happening]:
    """When the events of a phase take place, from 0 on, if nothing was before them.

    The host issues one after the other; the device does what was issued, and waits for messages, but for
    those that are passed on: for these it waits after what the program does under them.
    """
    each, waits = prices.issue(phase), prices.cluster.device.waits
    happened: list[Happening] = []
    host = free = 0.0
    links: dict[str, float] = {}
    under_way: list[tuple[int, float]] = []  # operations until it is waited for, and when it is there
    for event in events:
        is_view = not isinstance(event, Sent) and event.kind == "view"
        issued = max(host, free) if waits else host
        host = issued + each * (VIEW if is_view else 1.0)
        happened.append(Happening(HOST, event[0], issued, host))
        if isinstance(event, Sent):
            start = max(host, free, links.get(event.axis, 0.0))
            end = links[event.axis] = start + prices.sent(event.op, event.axis, event.bytes)
            happened.append(Happening(event.axis, event.op, start, end))
            if event.under and not waits:
                under_way.append((len(event.under), end))
            else:
                free = end
        elif not is_view:
            start = max(host, free)
            free = start + prices.op(event)
            happened.append(Happening(COMPUTE, event.name, start, free))
            under_way = [(n - 1, end) for n, end in under_way]
            free = max([free, *(end for n, end in under_way if n == 0)])
            under_way = [x for x in under_way if x[0]]
    return [x for x in happened if x.end > x.start]


def scaled(happened: Sequence[Happening], seconds: float) -> list[Happening]:
    """The same in so many seconds."""
    by = seconds / max((x.end for x in happened), default=1.0)
    return [x._replace(start=x.start * by, end=x.end * by) for x in happened]


def _joined(happened: Iterable[Happening], name: str, gap: float) -> list[Happening]:
    """Lane by lane, what is less than a gap apart as one."""
    by_lane: dict[str, list[Happening]] = {}
    for x in sorted(happened, key=lambda x: x.start):
        row = by_lane.setdefault(x.lane, [])
        if row and x.start - row[-1].end <= gap:
            row[-1] = row[-1]._replace(end=max(row[-1].end, x.end))
        else:
            row.append(x._replace(name=name))
    return [x for row in by_lane.values() for x in row]


# ---- a step


class _Action(NamedTuple):
    """A kind of action of a stage, and its seconds: what is played once for all micro-batches."""

    kind: ActionKind
    stage: int
    seconds: float


def step_of(
    found: Prediction,
    timeline: Timeline,
    layers: Sequence[int],
    order: Mapping[str, Order],
    prices: Prices,
) -> Step:
    """A predicted step.

    Args:
        timeline: of its actions, maybe of fewer micro-batches than the plan's.
        layers: blocks of each stage.
        order: of what a stage does, by phase.
    """
    end = timeline.step_time
    after = sum(found.terms.get(name, 0.0) for name in ("data", "update", "offload"))
    gap = _FINE * (end + after)
    actions: dict[_Action, list[Happening]] = {}
    ranks = []
    for row in timeline.spans:
        happened: list[Happening] = []
        for (kind, stage, number), start, stop in row:
            action = _Action(kind, stage, stop - start)
            if action not in actions:
                events = _of(action, layers, order)
                inner = scaled(played(events, prices, _PHASE.get(kind, "backward")), stop - start)
                actions[action] = _joined(inner, "", gap)
            name = _PHASE.get(kind, "weights")
            of = f"{name} of micro-batch {number}, stage {stage}" if len(layers) > 1 else f"{name} {number}"
            inner = actions[action] or [Happening(COMPUTE, "", 0.0, stop - start)]
            happened += [Happening(x.lane, of, start + x.start, start + x.end) for x in inner]
        ranks.append((*happened, *_around(found, happened, end)))
    block = []
    at = 0.0
    for phase, of_phase in order.items():
        takes = played(of_phase.block, prices, phase)
        block += [x._replace(start=at + x.start, end=at + x.end) for x in takes]
        at = max((x.end for x in block), default=0.0)
    return Step(tuple(ranks), end + after, timeline.schedule.micro_batches, tuple(block))


def _of(action: _Action, layers: Sequence[int], order: Mapping[str, Order]) -> list[Event]:
    """The events of an action, in their order."""
    if action.kind is ActionKind.W or not (of := order.get(_PHASE[action.kind])):
        return []
    at_front, at_end = action.stage == 0, action.stage == len(layers) - 1
    if _PHASE[action.kind] == "backward":
        at_front, at_end = at_end, at_front
    blocks = layers[action.stage] - (of.more if at_end else 0)
    return [*(of.before if at_front else ()), *of.block * blocks, *(of.after if at_end else ())]


def _around(found: Prediction, passes: Sequence[Happening], end: float) -> list[Happening]:
    """What is sent along the data axis and to places off the device, and the update."""
    happened: list[Happening] = []
    now, waited = end, 0.0
    parts = dict(found.data)
    early, late = (parts.get(name, (0.0, 0.0)) for name in ("sums", "gathers"))
    name = "sums of gradients" if found.plan.zero < 3 else "gathers of parameters and sums of gradients"
    hidden = early[0] - early[1]
    if found.plan.zero < 3:
        happened.append(Happening("data", name, max(0.0, now - hidden), now + early[1]))
    else:
        happened += _spread("data", name, passes, hidden)
        happened.append(Happening("data", name, now, now + early[1]))
    now, waited = now + early[1], early[1] + late[1]
    if (copied := found.terms.get("data", 0.0) - waited) > 1e-12:
        happened.append(Happening(COMPUTE, "copies for the data axis", now, now + copied))
        now += copied
    happened += _spread("offload", "to and from the device", passes, found.beside.get("offload", 0.0))
    for term, lane, says in (
        ("offload", "offload", "to and from the device"),
        ("update", COMPUTE, "update"),
    ):
        took = found.terms.get(term, 0.0)
        happened.append(Happening(lane, says, now, now + took))
        now += took
    gathers = "gathers of what was updated"
    happened.append(Happening("data", gathers, now, now + late[1]))
    happened.append(Happening("data", f"{gathers} in the step before", 0.0, late[0] - late[1]))
    return [x for x in happened if x.end > x.start]


def _spread(lane: str, name: str, passes: Sequence[Happening], seconds: float) -> list[Happening]:
    """So many seconds under what is computed, evenly."""
    under = [x for x in passes if x.lane == COMPUTE]
    share = seconds / (sum(x.end - x.start for x in under) or 1.0)
    return (
        [Happening(lane, name, x.start, x.start + share * (x.end - x.start)) for x in under] if share else []
    )


# ---- as text


def drawn(row: Sequence[Happening], seconds: float, width: int) -> list[str]:
    """A rank's lanes, a line each: ``F``, ``B``, ``W``, ``U`` (update), ``C`` (copies), ``=`` on links."""
    names = lanes(row)
    room = width - max(map(len, names)) - 2
    lines = []
    for lane in names:
        cells = [" "] * room
        for x in row:
            if x.lane == lane:
                mark = _MARKS.get(x.name.split()[0], "=") if lane == COMPUTE else "-" if lane == HOST else "="
                start = min(room - 1, int(x.start / seconds * room))
                cells[start : max(start + 1, round(x.end / seconds * room))] = mark * max(
                    1, round(x.end / seconds * room) - start
                )
        lines.append(f"{lane:<{width - room}}{''.join(cells)}".rstrip())
    return lines
