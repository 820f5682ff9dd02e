"""A checker of schedules: what it lets through computes the right thing and ends."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from espalier.parallel.pipeline.actions import Action, Kind, Schedule
from espalier.parallel.pipeline.messages import messages_of, with_messages
from espalier.parallel.pipeline.order import Costs, missing_message, order

F, B, I, W = Kind.F, Kind.B, Kind.I, Kind.W  # noqa: E741 - the papers' letters
SENDS = (Kind.SEND_F, Kind.SEND_B)


class ScheduleError(ValueError):
    """A schedule that cannot be executed.

    Attributes:
        kind: the schedule's.
        faults: one line each: which rank, which action, what is missing.
    """

    def __init__(self, kind: str, faults: list[str]) -> None:
        self.kind, self.faults = kind, tuple(faults)
        shown = faults[:20] + ([f"and {len(faults) - 20} more"] if len(faults) > 20 else [])
        super().__init__("\n  ".join([f"schedule {kind}: {len(faults)} fault(s)", *shown]))

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
    found = order(schedule, costs)
    if found.stuck:
        raise ScheduleError(schedule.kind, missing_message(schedule, found).splitlines())
    full = with_messages(schedule)
    faults = _matched(full) or _runs(full, rendezvous=False) or _runs(full, rendezvous=True)
    if faults:
        raise ScheduleError(schedule.kind, faults)
    ends = max(ends[-1] for ends in found.ends if ends)
    busy = [
        sum(end - start for start, end in zip(*spans, strict=True))
        for spans in zip(found.starts, found.ends, strict=True)
    ]
    messages = sum(not action.kind.computes for row in full.actions for action in row) // 2
    return Report(
        ends / max(busy) * schedule.micro_batches - schedule.micro_batches, live(schedule), messages
    )


def live(schedule: Schedule) -> tuple[float, ...]:
    """Micro-batches whose activations each rank holds at its fullest: kept from `F` to the end of `B` or `W`.

    A rank with v stages counts 1/v for each.
    """
    peaks = []
    for rank, row in enumerate(schedule.actions):
        held = peak = 0
        for kind, _, _ in row:
            if kind is F:
                held += 1
                peak = max(peak, held)
            elif kind is B or kind is W:
                held -= 1
        peaks.append(peak / max(1, schedule.stage_to_rank.count(rank)))
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
        needs = [(F, stage - 1), (Kind.RECV_F, stage)] if stage else []
    elif kind is W:
        needs = [(I, stage)]
    elif kind is Kind.SEND_F:
        needs = [(F, stage)]
    elif kind is Kind.SEND_B:
        needs = [(B, stage), (I, stage)]
    elif kind.computes:
        after = [(B, stage + 1), (I, stage + 1), (Kind.RECV_B, stage)] if stage + 1 < n else []
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


_MEET = ({Kind.SEND_F, Kind.RECV_F}, {Kind.SEND_B, Kind.RECV_B})
