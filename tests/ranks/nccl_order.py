"""Whether NCCL could carry out what ranks ask for, told from the calls that they make over gloo.

Each communicator of NCCL does what it is asked for in the order of the calls; a collective needs all its
ranks, a message both ends, and what is batched goes together. A wait holds up all calls that come after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import torch.distributed as dist

from espalier.comm import collectives, nccl
from espalier.mesh import Mesh
from espalier.parallel.pipeline import runtime


class Call(NamedTuple):
    """A call of a communicator; ``parts`` are ("send" | "receive" | a collective, the other rank or -1)."""

    number: int
    group: str
    ranks: tuple[int, ...]
    parts: tuple[tuple[str, int], ...]


class Wait(NamedTuple):
    """For a call."""

    number: int


Program = list[Call | Wait]


class _Work:
    def __init__(self, works: Sequence[Any], wait: Callable[[], object]) -> None:
        self._works, self._told = works, wait

    def is_completed(self) -> bool:
        return False  # as far as the host can say

    def wait(self) -> None:
        self._told()
        for work in self._works:
            work.wait()


class _Backend:
    """A backend of a group, of which calls are noted."""

    def __init__(self, backend: Any, group: Any, note: Callable[..., Any]) -> None:
        self._backend, self._group, self._note = backend, group, note

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def _noted(self, name: str, parts: Sequence[tuple[str, int]], *given: Any) -> Any:
        return self._note(self._group, parts, [getattr(self._backend, name)(*given)])

    def allreduce(self, *given: Any) -> Any:
        return self._noted("allreduce", [("allreduce", -1)], *given)

    def broadcast(self, *given: Any) -> Any:
        return self._noted("broadcast", [("broadcast", -1)], *given)

    def reduce(self, *given: Any) -> Any:
        return self._noted("reduce", [("reduce", -1)], *given)

    def send(self, xs: Any, to: int, tag: int) -> Any:
        return self._noted("send", [("send", dist.get_global_rank(self._group, to))], xs, to, tag)

    def recv(self, xs: Any, source: int, tag: int) -> Any:
        return self._noted("recv", [("receive", dist.get_global_rank(self._group, source))], xs, source, tag)


class _Lane(_Backend):
    """One in which each two ranks have a communicator."""

    def __init__(self, backend: Any, group: Any, note: Callable[..., Any], up: bool) -> None:
        super().__init__(backend, group, note)
        self._way = "up" if up else "down"

    def _noted(self, name: str, parts: Sequence[tuple[str, int]], *given: Any) -> Any:
        pair = tuple(sorted((dist.get_rank(), parts[0][1])))
        return self._note((f"{self._way} {pair}", pair), parts, [getattr(self._backend, name)(*given)])


@contextmanager
def as_on_nccl() -> Iterator[Program]:
    """While open, tensors of the CPU go the ways of an accelerator's; gives the program of this rank."""
    program: Program = []

    def note(group: Any, parts: Sequence[tuple[str, int]], works: Sequence[Any]) -> _Work:
        group = group or dist.group.WORLD
        number = len(program)
        if not isinstance(group, tuple):
            group = group.group_name, tuple(dist.get_process_group_ranks(group))
        program.append(Call(number, *group, tuple(parts)))
        return _Work(works, lambda: program.append(Wait(number)))

    def noted(name: str, call: Any) -> Any:
        def do(*args: Any, group: Any = None, async_op: bool = False, **kwargs: Any) -> Any:
            work = note(group, [(name, -1)], [call(*args, group=group, async_op=True, **kwargs)])
            return work if async_op else work.wait()

        return do

    def batched(ops: Any) -> Any:
        parts = [("send" if op.op is dist.isend else "receive", op.peer) for op in ops]
        return [note(ops[0].group, parts, batch(ops))]

    batch, backend = dist.batch_isend_irecv, Mesh.backend
    with ExitStack() as stack:
        for module in (collectives, runtime):
            stack.enter_context(patch.object(module, "is_accelerator", lambda device: True))
        for module, name in (
            (nccl, "gather_into"),
            (nccl, "scatter_from"),
            (dist, "all_to_all_single"),
            (dist, "scatter"),
            (dist, "all_reduce"),
        ):
            stack.enter_context(patch.object(module, name, noted(name, getattr(module, name))))
        stack.enter_context(patch.object(dist, "batch_isend_irecv", batched))

        def of_axis(mesh: Mesh, axis: int, device: Any) -> Any:
            return _Backend(backend(mesh, axis, device), mesh.group(axis), note)

        def of_lane(of: Any, mesh: Mesh, axis: int, source: int, to: int, device: Any) -> Any:
            # made as ranks meet, for each two anew
            lane, places = plainly(of, mesh, axis, source, to, device)
            if axis in mesh.lanes:
                lane = _Lane(lane, mesh.group(axis), note, source < to)
            return lane, places

        plainly = nccl.Nccl.lane
        stack.enter_context(patch.object(nccl.Nccl, "lane", of_lane))
        stack.enter_context(patch.object(Mesh, "backend", of_axis))
        yield program


def stuck(programs: Sequence[Program]) -> list[str]:
    """What NCCL would never be done with; empty: it carries all out."""
    at, done = [0] * len(programs), [set[int]() for _ in programs]
    queues: list[dict[str, list[tuple[Call, set[int]]]]] = [{} for _ in programs]  # with the parts done

    def head(rank: int, group: str) -> tuple[Call, set[int]] | None:
        queue = queues[rank].get(group)
        return queue[0] if queue else None

    def end(rank: int, group: str) -> None:
        done[rank].add(queues[rank][group].pop(0)[0].number)

    def match(rank: int, call: Call, parts: set[int]) -> bool:
        heads = {other: head(other, call.group) for other in call.ranks}
        (first, peer), moved = call.parts[0], False
        if peer < 0:
            there = all(other is not None and other[0].parts[0][0] == first for other in heads.values())
            for other in call.ranks if there else ():
                end(other, call.group)
            return there
        for i, (kind, peer) in enumerate(call.parts):
            other = heads.get(peer)
            if kind != "send" or i in parts or other is None:
                continue
            wanted = [
                j for j, part in enumerate(other[0].parts) if part == ("receive", rank) and j not in other[1]
            ]
            if wanted:
                parts.add(i)
                other[1].add(wanted[0])
                moved = True
                if len(other[1]) == len(other[0].parts) and other[0] is not call:
                    end(peer, call.group)
        if len(parts) == len(call.parts):
            end(rank, call.group)
        return moved

    moves = True
    while moves:
        moves = False
        for rank, program in enumerate(programs):
            while at[rank] < len(program):
                step = program[at[rank]]
                if isinstance(step, Wait):
                    if step.number not in done[rank]:
                        break
                else:
                    queues[rank].setdefault(step.group, []).append((step, set()))
                at[rank] += 1
                moves = True
            for group in queues[rank]:
                found = head(rank, group)
                moves = (found is not None and match(rank, *found)) or moves
    return [f"rank {r}: {p[at[r]]}" for r, p in enumerate(programs) if at[r] < len(p)] + [
        f"rank {r}: {queue[0][0]}" for r, of in enumerate(queues) for queue in of.values() if queue
    ]
