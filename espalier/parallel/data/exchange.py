"""Parameters that are whole between steps, of which each rank updates its pieces (ZeRO-1 and 2): gathered.

On an accelerator that goes on beside the program, on a stream of its own, from the step into the next forward
pass. All is begun in the step, in the order of use, and nothing more is to be done by the host: whoever
first uses a parameter, a module or anybody else, has its stream wait for the gather that brings it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from espalier.comm import Work
from espalier.comm.collectives import start_gather
from espalier.device import beside, current_stream, new_stream, wait_for
from espalier.parallel.data.chunks import Chunk, ShardedParam
from espalier.tensor import stamp
from espalier.tensor.dtensor import DTensor
from espalier.tensor.loans import StandIn
from espalier.torch_private import current_graph_task_id, foreach_copy_

_AT_ONCE = 3
"""So many chunks have buffers for their gathers at a time."""


class Exchange:
    """Gathers chunks.

    Args:
        place: of a parameter, by ``id``, in the order of use.

    Attributes:
        arriving: by number, the chunks that the program has yet to wait for.
    """

    def __init__(self, device: torch.device, place: dict[int, int], *, is_dry: bool) -> None:
        self._device, self._place = device, place
        self._stream = None if is_dry else new_stream(device)
        self._asked: torch.Stream | None = None  # the one that the step was made on
        self.arriving: dict[int, tuple[Chunk, torch.Event]] = {}
        self._stand_ins: dict[int, tuple[list[int], list[_Arriving]]] = {}

    def gather(self, chunks: Sequence[Chunk]) -> None:
        """Let all ranks have what each has updated (called with torch functions left alone)."""
        # a backward pass that is under way reads what lies beside a parameter that is updated within it
        is_apart = self._stream is not None and current_graph_task_id() == -1
        apart = [chunk for chunk in chunks if is_apart and not chunk.has_turn]
        _gather([chunk for chunk in chunks if chunk not in apart], lambda chunk: None)
        if self._stream is None or not apart:
            return
        self._asked = current_stream(self._device)
        with beside(self._stream, self._device):
            _gather(sorted(apart, key=self._first_use), self._landed, self._keep)

    def _first_use(self, chunk: Chunk) -> int:
        return min(self._place[id(m.p)] for m in chunk.members)

    def _keep(self, chunk: Chunk) -> None:
        """Let memory that the stream here works on, and that is another's, not be given away meanwhile."""
        assert self._stream is not None
        wholes, copies = chunk.views().wholes, [] if chunk.own is None else chunk.own
        for i in chunk.copied[:1] if copies else ():
            copies[i].record_stream(self._stream)  # they are all in one buffer
        lasting = wholes if chunk.master is None else [*wholes, chunk.master]
        ids = [x.data_ptr() for x in lasting]
        if self._stand_ins.get(chunk.number, ((), None))[0] == ids:
            return
        for x in lasting:
            x.record_stream(self._stream)
        self._stand_ins[chunk.number] = ids, [_Arriving(self, chunk, m) for m in chunk.members]

    def _landed(self, chunk: Chunk) -> None:
        assert self._stream is not None
        self.arriving[chunk.number] = chunk, self._stream.record_event()
        for stand_in in self._stand_ins[chunk.number][1]:
            stand_in.begin()

    def arrive(self, number: int) -> None:
        """Let what follows on the current stream find a chunk's parameters as they are on all ranks."""
        if number not in self.arriving:
            return
        _, event = self.arriving.pop(number)
        wait_for(event, self._device)
        if self._asked is not None and self._asked != current_stream(self._device):
            self._asked.wait_event(event)  # what goes on there takes them for its own
        for stand_in in self._stand_ins[number][1]:
            stand_in.end()

    def finish(self) -> None:
        """The same, of all."""
        for number in list(self.arriving):
            self.arrive(number)


def _gather(
    chunks: Sequence[Chunk],
    landed: Callable[[Chunk], None],
    begins: Callable[[Chunk], None] = lambda chunk: None,
) -> None:
    """Gather each chunk's pieces into the parameters, a few chunks at a time."""
    under_way = deque[tuple[Chunk, torch.Tensor, Work[Any]]]()

    def land() -> None:
        chunk, rows, pending = under_way.popleft()
        pending.wait()
        chunk.unpack(rows, chunk.views().places)
        landed(chunk)

    for chunk in chunks:
        begins(chunk)
        shard_group = chunk.shard_group
        rows = chunk.rows(shard_group.n, chunk.dtype)
        if chunk.master is not None:
            rows[shard_group.here].copy_(chunk.master)
        else:
            foreach_copy_(chunk.pieces(rows[shard_group.here]), chunk.updated().tensors)
            chunk.own = None
        under_way.append((chunk, rows, start_gather(rows, None, shard_group.mesh, shard_group.axis)))
        if len(under_way) == _AT_ONCE:
            land()
    while under_way:
        land()


class _Arriving(StandIn):
    """A parameter whose values are on their way: it is itself once they are waited for."""

    def __init__(self, exchange: Exchange, chunk: Chunk, m: ShardedParam) -> None:
        self._exchange, self._number, self.member, self.recorded = exchange, chunk.number, m, m.full
        self._loan = m.full.loan()  # held: the dispatcher knows it
        m.p._source = self  # type: ignore[attr-defined]

    def begin(self) -> None:
        """From now on it bears the twin of its layout, so that every use is seen."""
        stamp(self.member.p, self._loan)

    def end(self) -> None:
        """It is there."""
        stamp(self.member.p, self.member.full)

    def stand_in(self, func: Callable[..., Any] | None) -> DTensor:
        """The parameter itself, which is waited for."""
        self.arrive()
        return self.member.p  # type: ignore[return-value]

    def takes(self, func: Callable[..., Any]) -> bool:
        """It is the parameter, so what is written is written to it."""
        return True

    def arrive(self) -> None:
        """Wait for it, with its chunk."""
        self._exchange.arrive(self._number)
