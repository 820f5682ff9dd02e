"""Where a schedule's messages are sent and received."""

from __future__ import annotations

from dataclasses import replace

from espalier.parallel.pipeline.actions import Action, Kind, Schedule
from espalier.parallel.pipeline.order import missing_message, order


def without_messages(schedule: Schedule) -> Schedule:
    """The schedule with computing actions alone."""
    rows = tuple(tuple(a for a in row if a.kind.computes) for row in schedule.actions)
    return replace(schedule, actions=rows)


def messages_of(schedule: Schedule, action: Action) -> tuple[Action, Action] | None:
    """The send that follows a computing action, and its receive; None where nothing crosses ranks."""
    kind, stage, micro = action
    if kind is Kind.W:
        return None
    to = stage + (1 if kind is Kind.F else -1)
    if not 0 <= to < schedule.stages or schedule.stage_to_rank[to] == schedule.stage_to_rank[stage]:
        return None
    if kind is Kind.F:
        return Action(Kind.SEND_F, stage, micro), Action(Kind.RECV_F, to, micro)
    return Action(Kind.SEND_B, stage, micro), Action(Kind.RECV_B, to, micro)


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
    found = order(schedule)
    if found.stuck:
        raise ValueError(f"The schedule {schedule.kind} deadlocks.\n{missing_message(schedule, found)}")
    # (time, messages before what starts at that time, tie by rank and place): keys of all events
    rows: list[list[tuple[tuple[float, int, int, int], Action]]] = [[] for _ in found.rows]
    for rank, row in enumerate(found.rows):
        for place, action in enumerate(row):
            rows[rank].append(((found.starts[rank][place], 1, rank, place), action))
            pair = messages_of(schedule, action)
            if pair is not None:
                key = (found.ends[rank][place], 0, rank, place)
                rows[rank].append((key, pair[0]))
                rows[schedule.peer(pair[0])].append((key, pair[1]))
    ordered = tuple(tuple(action for _, action in sorted(row)) for row in rows)
    return replace(schedule, actions=ordered)
