"""Schedules that torch.distributed.pipelining has and a plan has no name for, made as tables."""

from __future__ import annotations

from collections import Counter, deque
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


def dual_pipe_v(p: int, m: int, v: int) -> Schedule:
    """DualPipe (DeepSeek-V3, 2412.19437) cut in half: two stages a rank, laid out as a V.

    What it has overlap, a forward and a backward pass of two micro-batches, are one behind the other here.

    Args:
        p, m, v: pipe ranks, micro-batches of a step, stages a rank.

    Raises:
        ValueError: there are not two stages a rank, or fewer micro-batches than stages.
    """
    if v != 2 or m < 2 * p:
        raise ValueError(
            f"{v} stages a rank and {m} micro-batches on {p} pipe ranks: expected 2 stages a rank, and at "
            f"least as many micro-batches as stages, {2 * p}"
        )
    ranks = tuple(range(p))
    return Schedule("dual-pipe-v", p, m, ranks + ranks[::-1], tuple(tuple(_dual_row(r, p, m)) for r in ranks))


def _dual_row(rank: int, p: int, m: int) -> Iterator[Action]:
    down, up, behind = rank, 2 * p - 1 - rank, p - 1 - rank
    done: Counter[tuple[int, bool]] = Counter()
    waiting: deque[Action] = deque()

    def passes(*kinds: tuple[ActionKind, int]) -> Iterator[Action]:
        for kind, stage in kinds:
            if kind is W:
                if waiting:
                    yield waiting.popleft()
                continue
            micro = done[stage, kind is F]
            done[stage, kind is F] += 1
            yield Action(kind, stage, micro)
            if kind is I:
                waiting.append(Action(W, stage, micro))

    yield from passes(*[(F, down)] * (2 * behind))
    yield from passes(*[(F, down), (F, up)] * (rank + 1))
    yield from passes(*[(I, up), (W, up), (F, up)] * behind)
    yield from passes(*[(F, down), (B, up), (F, up), (B, down)] * (m - 2 * p + rank + 1))
    yield from passes(*[(B, up), (F, up), (B, down)] * behind)
    half, odd = (rank + 1) // 2, rank % 2
    last = B
    for i in range(rank + 1):
        last = I if i == half and odd else last
        yield from passes((last, up))
        last = I if i == half and not odd else last
        yield from passes((last, down))
    yield from passes(*[(W, down), (last, down)] * behind)
    yield from passes(*[(W, down)] * (rank + 1))
