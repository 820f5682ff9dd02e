"""Whether NCCL could do what ranks asked for, in that order.

A communicator does its calls in the order in which they were asked for, and a message needs both ends at its
head at once: it is not put away till somebody wants it. Messages of one batch go together. A rank comes past
a wait when its call is done.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import NamedTuple


class Asked(NamedTuple):
    """A call: of ``group``, which has ``size`` ranks, this one being its ``rank``.

    ``beside``: it has the communicator's stream, and not that of the program, which waits at once.
    """

    number: int
    group: str
    size: int
    rank: int
    kind: str
    peer: int | None
    bytes: int
    batch: int | None
    beside: bool = True


class Waited(NamedTuple):
    """A wait for the call of a number."""

    number: int


Entry = Asked | Waited


class Deadlock(Exception):
    """Nobody can go on; where everybody stands."""


def check(logs: Sequence[Sequence[Entry]]) -> int:
    """How many calls were done, all of them.

    Args:
        logs: of each rank, in the order in which it asked.

    Raises:
        Deadlock: some cannot be done, or the two ends of one differ in size.
    """
    return _Run(logs).through()


class _Run:
    def __init__(self, logs: Sequence[Sequence[Entry]]) -> None:
        self._logs, self._next, self._calls = logs, [0] * len(logs), 0
        self._done: list[set[int]] = [set() for _ in logs]
        self._queues: list[dict[str, deque[Asked]]] = [defaultdict(deque) for _ in logs]
        # of each group: its ranks, to those of the world
        self._members: dict[str, dict[int, int]] = defaultdict(dict)
        for place, log in enumerate(logs):
            for entry in log:
                if isinstance(entry, Asked):
                    self._members[entry.group][entry.rank] = place

    def through(self) -> int:
        while self._programs_go_on() | self._groups_go_on():
            pass
        if any(at < len(log) for at, log in zip(self._next, self._logs, strict=True)) or any(
            queue for queues in self._queues for queue in queues.values()
        ):
            raise Deadlock(self._story())
        return self._calls

    def _programs_go_on(self) -> bool:
        moved = False
        for place, log in enumerate(self._logs):
            while self._next[place] < len(log):
                entry = log[self._next[place]]
                if isinstance(entry, Asked):
                    self._queues[place][entry.group].append(entry)
                elif entry.number not in self._done[place]:
                    break
                self._next[place] += 1
                moved = True
        return moved

    def _groups_go_on(self) -> bool:
        return sum(self._goes_on(name, members) for name, members in self._members.items()) > 0

    def _goes_on(self, name: str, members: dict[int, int]) -> bool:
        heads = {rank: self._head(place, name) for rank, place in members.items()}
        moved = False
        for rank, head in heads.items():
            for call in [c for c in head if c.kind == "send"]:
                assert call.peer is not None
                ends = [c for c in heads.get(call.peer, []) if c.kind == "recv" and c.peer == rank]
                if ends:
                    self._finish(members[rank], call, members[call.peer], ends[0])
                    head.remove(call)
                    heads[call.peer].remove(ends[0])
                    moved = True
        firsts = [head[0] for head in heads.values() if head and head[0].kind not in ("send", "recv")]
        if firsts and len(firsts) == firsts[0].size:
            if len({(c.kind, c.bytes if c.kind == "all_reduce" else 0) for c in firsts}) > 1:
                raise Deadlock(f"{name}: the ranks ask for different calls: {firsts}")
            for call in firsts:
                self._finish(members[call.rank], call)
            moved = True
        return moved

    def _head(self, place: int, group: str) -> list[Asked]:
        """What a rank's communicator is at: the first call of its queue, or the batch that it begins."""
        queue = self._queues[place][group]
        if not queue or queue[0].batch is None:
            return [queue[0]] if queue else []
        return [call for call in queue if call.batch == queue[0].batch]

    def _finish(self, place: int, call: Asked, other: int | None = None, end: Asked | None = None) -> None:
        if end is not None and end.bytes != call.bytes:
            raise Deadlock(f"{call} and {end}: the bytes differ")
        for at, done in ((place, call), (other, end)):
            if at is not None and done is not None:
                self._queues[at][done.group].remove(done)
                self._done[at].add(done.number)
        self._calls += 1

    def _story(self) -> str:
        lines = []
        for place, log in enumerate(self._logs):
            at = log[self._next[place]] if self._next[place] < len(log) else "its end"
            heads = [queue[0] for queue in self._queues[place].values() if queue]
            lines.append(f"rank {place} stands at {at}; its communicators at {heads}")
        return "\n".join(lines)
