"""Pipeline schedules: what they do, what they promise, and that faults in them are found."""

from __future__ import annotations

import pytest

from espalier.parallel.pipeline import KINDS, Action, Kind, generate, with_messages


@pytest.mark.parametrize("kind", KINDS)
def test_messages_come_in_pairs_and_in_the_same_order(kind: str) -> None:
    """Between two ranks what is sent first is received first."""
    schedule = with_messages(generate(kind, 4, 6))
    sent: dict[tuple[int, int], list[Action]] = {}
    received: dict[tuple[int, int], list[Action]] = {}
    for rank, row in enumerate(schedule.actions):
        for action in row:
            if action.kind in (Kind.SEND_F, Kind.SEND_B):
                step = 1 if action.kind is Kind.SEND_F else -1
                meets = Kind.RECV_F if step == 1 else Kind.RECV_B
                arrives = Action(meets, action.stage + step, action.micro_batch)
                sent.setdefault((rank, schedule.peer(action)), []).append(arrives)
            elif not action.kind.computes:
                received.setdefault((schedule.peer(action), rank), []).append(action)
    assert sent == received
    assert sum(map(len, sent.values())) == 2 * 6 * 3
