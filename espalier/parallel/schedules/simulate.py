"""Schedules tried: the timeline that one has, by times of its actions; its pictures; whether it is right."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from espalier.parallel.schedules.actions import (
    Action,
    ActionKind,
    Costs,
    Schedule,
    each,
    messages_of,
    missing_message,
    order,
    with_messages,
)
from espalier.texts import listed

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.text import Text


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
            now = peak = 0.0
            for (kind, stage, _), _, _ in row:
                if kind is ActionKind.F:
                    now += size[stage]
                    peak = max(peak, now)
                elif kind is not ActionKind.I:
                    now -= size[stage]
            peaks.append(peak)
        return tuple(peaks)

    def costs(self) -> Costs:
        """The mean time of each stage's actions, to predict a step from a measured one; messages are free."""
        n = self.schedule.stages
        took: dict[tuple[ActionKind, int], list[float]] = {}
        for row in self.spans:
            for (kind, stage, _), start, end in row:
                took.setdefault((kind, stage), []).append(end - start)
        mean = {key: sum(times) / len(times) for key, times in took.items()}
        # a whole backward stands as I with nothing left for W: together they are its time
        inputs = [mean.get((ActionKind.I, s), 0.0) + mean.get((ActionKind.B, s), 0.0) for s in range(n)]
        return Costs(
            [mean[ActionKind.F, s] for s in range(n)],
            inputs,
            [mean.get((ActionKind.W, s), 0.0) for s in range(n)],
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
    times = order(schedule, costs)
    if times.stuck:
        raise ValueError(f"The schedule {schedule.kind} deadlocks.\n{missing_message(schedule, times)}")
    return Timeline(
        schedule,
        tuple(tuple(map(Span, *of)) for of in zip(times.rows, times.starts, times.ends, strict=True)),
    )


# ---- timelines as pictures: on a terminal, and as SVG or PNG


# Face of a rank's stages in turn, dark to light, by kind.
_FACES = {
    ActionKind.F: ("#2f5d8c", "#7fa8d1", "#1d3f66", "#b3cce6"),
    ActionKind.B: ("#2a6f4e", "#7fb897", "#174a32", "#b6d9c5"),
    ActionKind.I: ("#1f7f86", "#8cc7ca", "#125358", "#bfe0e2"),
    ActionKind.W: ("#c98a1b", "#e6c07a", "#93630e", "#f1dcb2"),
}
# On terminals the same from the 16 colours that all have.
_STYLES = {
    ActionKind.F: ("white on blue", "black on bright_blue"),
    ActionKind.B: ("white on green", "black on bright_green"),
    ActionKind.I: ("white on cyan", "black on bright_cyan"),
    ActionKind.W: ("black on yellow", "black on bright_yellow"),
}
_NAMES = {
    ActionKind.F: "forward",
    ActionKind.B: "backward",
    ActionKind.I: "backward, of inputs",
    ActionKind.W: "of weights",
}
_INK, _FAINT, _IDLE = "#22302a", "#8b968f", "#eef1ef"


def _look(looks: Mapping[ActionKind, Sequence[str]], timeline: Timeline, span: Span) -> str:
    """Of a table of looks, that of a span."""
    kind, stage, _ = span.action
    schedule = timeline.schedule
    its = looks[kind]
    return its[schedule.stages_of(schedule.rank_of(stage)).index(stage) % len(its)]


def _on(face: str) -> str:
    """A colour to write with on a face."""
    light = sum(int(face[at : at + 2], 16) for at in (1, 3, 5)) > 380
    return _INK if light else "#ffffff"


def terminal(timeline: Timeline, width: int, *, colours: bool = True) -> list[Text]:
    """One line a rank, a cell an action, as wide as it took, its micro-batch in it where that fits.

    Args:
        timeline: predicted or measured.
        width: characters of a line; the drawing takes no more than it needs for all numbers.
        colours: False for a terminal that has none: cells then say ``F0``, ``B0``.
    """
    from rich.text import Text

    spans = [span for row in timeline.spans for span in row]
    names = [f"rank {rank:>{len(str(len(timeline.spans) - 1))}} " for rank in range(len(timeline.spans))]
    shortest = min((span.end - span.start for span in spans if span.end > span.start), default=1.0)
    label = len(str(timeline.schedule.micro_batches - 1)) + (0 if colours else 1)
    room = max(10, width - len(names[0]))
    fits = room * shortest / timeline.step_time if timeline.step_time else 1.0
    # cells of one width where there is room for all numbers
    scale = (min(label + 1, int(fits)) if fits >= label else fits) / shortest
    lines = []
    for name, row in zip(names, timeline.spans, strict=True):
        line, at = Text(name), 0
        for span in row:
            start, end = (min(room, round(time * scale)) for time in (span.start, span.end))
            line.append(" " * (start - at))
            number = f"{'' if colours else span.action.kind}{span.action.micro_batch}"
            cell = f"{number if len(number) <= end - start else '':<{end - start}}"
            line.append(cell, style=_look(_STYLES, timeline, span) if colours else "")
            at = max(at, end)
        lines.append(line)
    if colours:
        legend = Text(" " * len(names[0]))
        for kind in _kinds([timeline]):
            legend.append("  ", style=_STYLES[kind][0]).append(f" {_NAMES[kind]}   ")
        if timeline.schedule.stages > timeline.schedule.ranks:
            legend.append("  ", style=_STYLES[ActionKind.F][1]).append(" lighter: a rank's second stage")
        lines.append(legend)
    return lines


def _kinds(timelines: Iterable[Timeline]) -> list[ActionKind]:
    """The kinds of actions that there are."""
    kinds = {span.action.kind for timeline in timelines for row in timeline.spans for span in row}
    return [kind for kind in _FACES if kind in kinds]


def can_draw() -> bool:
    """Whether there is what draws pictures (the extra ``report``); pages need none."""
    return find_spec("matplotlib") is not None


def figure(timelines: Mapping[str, Timeline], columns: int = 1) -> Figure:
    """A picture of timelines, one below the other on one scale, each with its title.

    Args:
        timelines: by title; predicted and measured ones, or several schedules.
        columns: beside each other.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    ranks = max(len(timeline.spans) for timeline in timelines.values())
    rows = -(-len(timelines) // columns)
    drawn = Figure(
        figsize=(9.6 * columns, rows * (0.75 + 0.34 * ranks) + 0.5), layout="constrained", facecolor="#ffffff"
    )
    grid = drawn.subplots(rows, columns, squeeze=False, sharex=True)
    longest = max(timeline.step_time for timeline in timelines.values())
    for axes, (title, timeline) in zip(grid.flat, timelines.items(), strict=False):
        _panel(axes, title, timeline, longest)
    for axes in list(grid.flat)[len(timelines) :]:
        axes.set_visible(False)
    several = any(timeline.schedule.stages > timeline.schedule.ranks for timeline in timelines.values())
    kinds = _kinds(timelines.values())
    patches = [Patch(facecolor=_FACES[kind][0], label=_NAMES[kind]) for kind in kinds]
    if several:
        patches += [Patch(facecolor=_FACES[ActionKind.F][1], label="lighter: a rank's second stage")]
    drawn.legend(handles=patches, loc="outside lower center", ncols=len(patches), frameon=False, fontsize=9)
    return drawn


def _panel(axes: Any, title: str, timeline: Timeline, longest: float) -> None:
    """One timeline."""
    per_unit = 880 / longest / 7.0  # about as many characters fit a unit of time
    for rank, row in enumerate(timeline.spans):
        axes.barh(rank, timeline.step_time, 0.84, color=_IDLE, linewidth=0)
        faces = [_look(_FACES, timeline, span) for span in row]
        widths = [span.end - span.start for span in row]
        axes.barh(
            [rank] * len(row),
            widths,
            0.84,
            left=[span.start for span in row],
            color=faces,
            edgecolor="#ffffff",
            linewidth=0.5,
        )
        for span, wide, face in zip(row, widths, faces, strict=True):
            label = str(span.action.micro_batch)
            if wide * per_unit >= len(label) + 0.3:
                middle = (span.start + span.end) / 2
                axes.text(middle, rank, label, ha="center", va="center_baseline", size=7.5, color=_on(face))
    axes.set(xlim=(0, longest), ylim=(len(timeline.spans) - 0.4, -0.6))
    axes.set_yticks(
        range(len(timeline.spans)), [f"rank {rank}" for rank in range(len(timeline.spans))], size=8.5
    )
    axes.tick_params(length=0, axis="y")
    axes.tick_params(labelsize=8, colors=_FAINT, axis="x")
    axes.spines[["top", "right", "left", "bottom"]].set_visible(False)
    axes.set_title(title, loc="left", size=10.5, color=_INK, weight="bold")
    axes.set_title(summary(timeline), loc="right", size=9, color=_FAINT)


def summary(timeline: Timeline) -> str:
    """Bubble and live micro-batches in a line."""
    most = max(live(timeline.schedule))
    return f"{timeline.bubble_fraction:.0%} of the time idle, {most:.3g} live micro-batch{'es' * (most != 1)}"


def draw(path: str | Path, timelines: Mapping[str, Timeline], columns: int = 1) -> None:
    """Write a picture of timelines, or a trace that Perfetto and Chrome (``chrome://tracing``) open.

    Args:
        path: ``*.svg``, ``*.png``, or ``*.json``, the trace.
        timelines, columns: see `figure`.

    Raises:
        ValueError: for another ending, and for a picture where matplotlib is not installed.
    """
    path = Path(path)
    if path.suffix not in PICTURES:
        raise ValueError(f"{path}: expected a name that ends in .svg, .png or .json")
    if path.suffix == ".json":
        path.write_text(json.dumps(trace(timelines)), "utf-8")
        return
    if not can_draw():
        raise ValueError(
            f"{path} is drawn by matplotlib, which is not installed: pip install 'espalier[report]', or name "
            "a file that ends in .json"
        )
    figure(timelines, columns).savefig(path, dpi=150)


PICTURES: Sequence[str] = (".svg", ".png", ".json")


def trace(timelines: Mapping[str, Timeline]) -> dict[str, Any]:
    """Timelines in the form of Chrome's trace events: a process each, a thread a rank, microseconds."""
    events: list[dict[str, Any]] = []
    for process, (title, timeline) in enumerate(timelines.items()):
        events.append({"ph": "M", "name": "process_name", "pid": process, "args": {"name": title}})
        for rank, row in enumerate(timeline.spans):
            name = {"name": f"rank {rank}"}
            events.append({"ph": "M", "name": "thread_name", "pid": process, "tid": rank, "args": name})
            for (kind, stage, micro_batch), start, end in row:
                events.append(
                    {
                        "ph": "X",
                        "name": f"{kind}{micro_batch}",
                        "cat": _NAMES[kind],
                        "pid": process,
                        "tid": rank,
                        "ts": start * 1e6,
                        "dur": (end - start) * 1e6,
                        "args": {"stage": stage, "micro-batch": micro_batch},
                    }
                )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


# ---- a checker of schedules: what it lets through computes the right thing and ends


F, B, I, W = ActionKind.F, ActionKind.B, ActionKind.I, ActionKind.W  # noqa: E741 - the papers' letters
SENDS = (ActionKind.SEND_F, ActionKind.SEND_B)


class ScheduleError(ValueError):
    """A schedule that cannot be executed.

    Attributes:
        kind: the schedule's.
        faults: one line each: which rank, which action, what is missing.
    """

    def __init__(self, kind: str, faults: list[str]) -> None:
        self.kind, self.faults = kind, tuple(faults)
        super().__init__(listed(f"schedule {kind}: {len(faults)} fault(s)", faults, 20))

    def __reduce__(self) -> Any:
        return type(self), (self.kind, list(self.faults))


@dataclass(frozen=True)
class Report:
    """What a schedule promises, all stages taking equally long (1 for F, I and W each).

    Attributes:
        bubble: time that the busiest rank does nothing in a step, in F + B of one rank and micro-batch.
        live: micro-batches whose activations each rank holds at its fullest; a rank's stages count a part.
        messages: that cross ranks in a step.
    """

    bubble: float
    live: tuple[float, ...]
    messages: int


def check(schedule: Schedule, costs: Costs | None = None) -> Report:
    """Prove that a schedule does each action once, in an order that its data allow, and ends.

    What is proved: each micro-batch goes once forward and once backward through each stage, on the rank that
    has it; a backward comes after its forward, `W` after its `I`, and what another rank gives is there when
    it is needed; each value that crosses ranks is sent once, after it is computed, and received once, before
    it is used; between two ranks, values arrive in the order in which they are sent; and no rank waits for
    ever, whether a send waits for its receive (rendezvous) or not (buffered). Messages that the schedule
    does not list are where `with_messages` puts them.

    Args:
        schedule: any.
        costs: for the bubble of the report; equal stages if not given.

    Raises:
        ScheduleError: with all faults found.
    """
    faults = _sizes(schedule) or _each_once(schedule) or _local_order(schedule)
    if faults:
        raise ScheduleError(schedule.kind, faults)
    times = order(schedule, costs)
    if times.stuck:
        raise ScheduleError(schedule.kind, missing_message(schedule, times).splitlines())
    full = with_messages(schedule)
    faults = _matched(full) or _runs(full, rendezvous=False) or _runs(full, rendezvous=True)
    if faults:
        raise ScheduleError(schedule.kind, faults)
    ends = max(ends[-1] for ends in times.ends if ends)
    busy = [
        sum(end - start for start, end in zip(*spans, strict=True))
        for spans in zip(times.starts, times.ends, strict=True)
    ]
    messages = sum(not action.kind.computes for row in full.actions for action in row) // 2
    return Report(
        ends / max(busy) * schedule.micro_batches - schedule.micro_batches, live(schedule), messages
    )


def live(schedule: Schedule, waiting: float = 0.0) -> tuple[float, ...]:
    """Micro-batches whose activations each rank holds at its fullest: kept from `F` to the end of `B` or `W`.

    A rank with v stages counts 1/v for each.

    Args:
        waiting: what a micro-batch holds more from `I` to `W`, for its activations: gradients, from which
            those of weights are still to be taken.
    """
    more = {**dict.fromkeys(ActionKind, 0.0), F: 1.0, B: -1.0, I: waiting, W: -1.0 - waiting}
    peaks = []
    for rank, row in enumerate(schedule.actions):
        held = accumulate([more[kind] for kind, _, _ in row], initial=0.0)
        peaks.append(max(held) / max(1, schedule.stage_to_rank.count(rank)))
    return tuple(peaks)


def _sizes(schedule: Schedule) -> list[str]:
    faults = []
    if len(schedule.actions) != schedule.ranks:
        faults.append(
            f"{len(schedule.actions)} rows of actions for {schedule.ranks} ranks: expected one each"
        )
    if schedule.micro_batches < 1 or not schedule.stages:
        faults.append(
            f"{schedule.micro_batches} micro-batches, {schedule.stages} stages: expected 1 or more of each"
        )
    for stage, rank in enumerate(schedule.stage_to_rank):
        if not 0 <= rank < schedule.ranks:
            faults.append(f"stage {stage} is on rank {rank}: expected one of {schedule.ranks}")
    for rank in range(schedule.ranks):
        if rank not in schedule.stage_to_rank:
            faults.append(f"rank {rank} has no stage: expected one or more")
    return faults


def _each_once(schedule: Schedule) -> list[str]:
    """Every action where it belongs, none twice, none missing."""
    faults = []
    seen: dict[Action, int] = {}
    n, m = schedule.stages, schedule.micro_batches
    for rank, row in enumerate(schedule.actions):
        for place, action in enumerate(row):
            where = f"rank {rank}, action {place}, {action}"
            if not (0 <= action.stage < n and 0 <= action.micro_batch < m):
                faults.append(f"{where}: there are {n} stages and {m} micro-batches, counted from 0")
            elif schedule.stage_to_rank[action.stage] != rank:
                owner = schedule.stage_to_rank[action.stage]
                faults.append(f"{where}: stage {action.stage} is on rank {owner}")
            elif action in seen:
                faults.append(f"{where}: done before, at action {seen[action]}; expected once")
            seen.setdefault(action, place)
    for stage, rank in enumerate(schedule.stage_to_rank):
        for micro in range(m):
            f, b, i, w = (Action(kind, stage, micro) in seen for kind in (F, B, I, W))
            what = f"rank {rank}, stage {stage}, micro-batch {micro}"
            if not f:
                faults.append(f"{what}: its forward, {stage}F{micro}, is missing")
            if b and (i or w):
                faults.append(f"{what}: has a whole backward (B) and one in parts (I, W); expected either")
            elif not b and not (i and w):
                absent = "B (or I and W)" if i == w else "W" if i else "I"
                faults.append(f"{what}: {absent} of its backward is missing")
    return faults


def _local_order(schedule: Schedule) -> list[str]:
    """What a rank needs of itself comes before."""
    faults = []
    for rank, row in enumerate(schedule.actions):
        places = {action: place for place, action in enumerate(row)}
        for place, action in enumerate(row):
            for need in _needs_here(schedule, places, action):
                if places[need] > place:
                    faults.append(
                        f"rank {rank}, action {place}, {action}: needs {need}, which this rank does only "
                        f"later, at action {places[need]}"
                    )
    return faults


def _needs_here(schedule: Schedule, places: dict[Action, int], action: Action) -> list[Action]:
    """The actions of the same rank that must come before."""
    kind, stage, micro = action
    n = schedule.stages
    if kind is F:
        needs = [(F, stage - 1), (ActionKind.RECV_F, stage)] if stage else []
    elif kind is W:
        needs = [(I, stage)]
    elif kind is ActionKind.SEND_F:
        needs = [(F, stage)]
    elif kind is ActionKind.SEND_B:
        needs = [(B, stage), (I, stage)]
    elif kind.computes:
        after = [(B, stage + 1), (I, stage + 1), (ActionKind.RECV_B, stage)] if stage + 1 < n else []
        needs = [(F, stage), *after]
    else:
        needs = []
    return [need for which, of in needs if (need := Action(which, of, micro)) in places]


def _matched(schedule: Schedule) -> list[str]:
    """Each value that crosses ranks is sent once and received once, in the same order between two ranks."""
    faults = []
    listed = [
        {action: place for place, action in enumerate(row) if not action.kind.computes}
        for row in schedule.actions
    ]
    expected: list[set[Action]] = [set() for _ in listed]
    sent: dict[tuple[int, int], list[Action]] = defaultdict(list)
    received: dict[tuple[int, int], list[Action]] = defaultdict(list)
    meets: dict[Action, Action] = {}
    for rank, row in enumerate(schedule.actions):
        for action in row:
            pair = messages_of(schedule, action) if action.kind.computes else None
            if pair is None:
                continue
            meets[pair[0]] = pair[1]
            peer = schedule.peer(pair[0])
            for who, message, other in ((rank, pair[0], pair[1]), (peer, pair[1], pair[0])):
                expected[who].add(message)
                if message not in listed[who]:
                    at = peer if who == rank else rank
                    faults.append(f"rank {who}: {message} is missing, the other end of {other} of rank {at}")
    for rank, its in enumerate(listed):
        for message, place in its.items():
            if message not in expected[rank]:
                faults.append(f"rank {rank}, action {place}, {message}: nothing crosses ranks there")
            elif message.kind in SENDS:
                sent[rank, schedule.peer(message)].append(meets[message])
            else:
                received[schedule.peer(message), rank].append(message)
    if faults:
        return faults
    for (source, target), messages in sent.items():
        for number, (one, other) in enumerate(zip(messages, received[source, target], strict=True)):
            if one != other:
                faults.append(
                    f"rank {target}, {other}: receives message {number} of rank {source}, "
                    f"which sends what {one} expects"
                )
                break
    return faults


def _runs(schedule: Schedule, *, rendezvous: bool) -> list[str]:
    """Go through all rows, each message blocking; a send until its receive if ``rendezvous``."""
    rows = [[action for action in row if not action.kind.computes] for row in schedule.actions]
    peers = [[schedule.peer(action) for action in row] for row in rows]
    at = [0] * len(rows)
    sent: dict[tuple[int, int], int] = defaultdict(int)
    ready = list(range(len(rows)))
    while ready:
        rank = ready.pop()
        while at[rank] < len(rows[rank]):
            action, peer = rows[rank][at[rank]], peers[rank][at[rank]]
            if rendezvous:
                there = rows[peer][at[peer]] if at[peer] < len(rows[peer]) else None
                # orders between two ranks agree, so two that stand at messages for each other meet if one
                # sends and the other receives the same way
                ends = {action.kind, there.kind} if there is not None else set()
                if there is None or peers[peer][at[peer]] != rank or ends not in _MEET:
                    break
                at[rank] += 1
                at[peer] += 1
                ready.append(peer)
                continue
            if action.kind in SENDS:
                sent[rank, peer] += 1
                ready.append(peer)
            elif not sent[peer, rank]:
                break
            else:
                sent[peer, rank] -= 1
            at[rank] += 1
    way = "sends wait for their receives" if rendezvous else "sends do not wait"
    return [
        f"rank {rank} waits for ever at {row[at[rank]]}, where {way}: rank {peers[rank][at[rank]]} "
        + (
            f"stands at {rows[peers[rank][at[rank]]][at[peers[rank][at[rank]]]]}"
            if at[peers[rank][at[rank]]] < len(rows[peers[rank][at[rank]]])
            else "has ended"
        )
        for rank, row in enumerate(rows)
        if at[rank] < len(row)
    ]


_MEET = ({ActionKind.SEND_F, ActionKind.RECV_F}, {ActionKind.SEND_B, ActionKind.RECV_B})
