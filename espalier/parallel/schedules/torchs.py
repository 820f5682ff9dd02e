"""Schedules that torch.distributed.pipelining has and a plan has no name for, made as tables."""

from __future__ import annotations

from collections.abc import Iterator

from espalier.parallel.schedules.actions import Action, ActionKind, Schedule
from espalier.parallel.schedules.generate import one_by_one

F, B, I, W = ActionKind.F, ActionKind.B, ActionKind.I, ActionKind.W  # noqa: E741 - the papers' letters


def looped_bfs(p: int, m: int, v: int) -> Schedule:
    """Breadth first (Lamy-Poirier, 2211.05953): a rank's stages one after the other, all micro-batches each.

    Bubble (p-1)(F+B)/v where m >= p, live m.

    Args:
        p, m, v: pipe ranks, micro-batches of a step, stages a rank.
    """
    rows = tuple(
        tuple(
            [Action(F, chunk * p + rank, micro) for chunk in range(v) for micro in range(m)]
            + [Action(B, chunk * p + rank, micro) for chunk in reversed(range(v)) for micro in range(m)]
        )
        for rank in range(p)
    )
    return Schedule("looped-bfs", p, m, tuple(range(p)) * v, rows)


def interleaved_zero_bubble(p: int, m: int, v: int) -> Schedule:
    """Interleaved 1F1B whose weight gradients fill the bubble (Qi et al., 2401.10241, ZB1P).

    Bubble (p-1)(F+B-2W)/v where p divides m and W is no longer than F and I, live p.

    Args:
        p, m, v: pipe ranks, micro-batches of a step, stages a rank.

    Raises:
        ValueError: micro-batches do not go in rounds of one size.
    """
    rounds = max(1, m // p)
    if m % rounds:
        raise ValueError(
            f"{m} micro-batches on {p} pipe ranks: expected a multiple of the {rounds} rounds that they make"
        )
    size = m // rounds
    turns = [(c, begin + i) for begin in range(0, m, size) for c in range(v) for i in range(size)]
    rows = tuple(tuple(_zero_bubble_row(rank, p, v, size, turns)) for rank in range(p))
    return Schedule("interleaved-zero-bubble", p, m, tuple(range(p)) * v, rows)


def _zero_bubble_row(rank: int, p: int, v: int, size: int, turns: list[tuple[int, int]]) -> Iterator[Action]:
    forwards = [Action(F, chunk * p + rank, micro) for chunk, micro in turns]
    backwards = [Action(I, (v - 1 - chunk) * p + rank, micro) for chunk, micro in turns]
    ahead = min(len(turns), (v - 1) * size + p - 1 - rank)
    waiting = []
    for action in one_by_one(forwards, backwards, ahead):
        yield action
        if action.kind is I:
            waiting.append(action)
            if len(waiting) > rank:
                yield waiting.pop(0)._replace(kind=W)
    for action in waiting:
        yield action._replace(kind=W)
