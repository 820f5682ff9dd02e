"""What NCCL is to CUDA: collectives and messages of the simulated device, on a stream of their own.

As there, a call waits for the stream that it is made from, and ``wait()`` lets the current stream, not the
host, wait for the call. Gloo carries the bytes; the device sees them where the program waits, so what is
never waited for never comes. Each group is a communicator, and notes what it is asked for: :mod:`order` says
whether NCCL could do it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from espalier.comm import nccl
from tests.sim.device import Simulated
from tests.sim.order import Asked, Entry, Waited

NAME = "simccl"
_ids = itertools.count()
_gather_options: Any = getattr(dist.distributed_c10d, "AllgatherOptions")  # noqa: B009
_ProcessGroup: Any = dist.ProcessGroup  # torch's stubs know only a part of what it asks of its subclasses


class Call(dist.Work):
    """One under way."""

    def __init__(
        self,
        group: Group,
        stream: torch.Stream,
        number: int,
        begun: Any,
        finish: Callable[[], object],
        holds: Sequence[torch.Tensor],
    ) -> None:
        super().__init__()
        self._group, self._stream, self._number = group, stream, number
        self._begun, self._finish = begun, finish
        self._holds = holds
        self._ended = False

    def wait(self, timeout: timedelta | None = None) -> bool:
        group = self._group
        group.shared.log.append(Waited(self._number))
        if not self._ended:
            self._ended = True
            self._begun.wait()
            with self._stream, group.shared.sim.emulating():
                self._finish()
        if group.shared.waits:
            torch.accelerator.current_stream().wait_event(self._stream.record_event())
        self._finish, self._holds = (lambda: None), ()  # NCCL, too, holds the tensors till then
        return True

    def is_completed(self) -> bool:
        return self._ended

    def is_success(self) -> bool:
        return True


class Shared:
    """What all groups of a process share: the device, the notes of what they were asked for.

    Attributes:
        waits: whether the current stream waits for a call at its end. A test takes that away.
        batch: the number of the batch of messages that is being put together.
        unbound: groups are made that are told of no device.
    """

    def __init__(self, sim: Simulated) -> None:
        self.sim = sim
        self.log: list[Entry] = []
        self.waits = True
        self.batch: int | None = None
        self.unbound = False

    @contextmanager
    def without_waits(self) -> Iterator[None]:
        """A fault, put in on purpose."""
        self.waits = False
        try:
            yield
        finally:
            self.waits = True


class Group(_ProcessGroup):
    """One communicator. What it does with tensors of the CPU is gloo's."""

    def __init__(
        self,
        shared: Shared,
        store: Any,
        rank: int,
        size: int,
        timeout: timedelta,
        name: str = "world",
        eager: bool = True,
    ) -> None:
        super().__init__(rank, size)
        # not one that was made while no device was known: there each two have a communicator, and a stream
        self._eager = eager
        self._of_pairs: dict[tuple[int, int], torch.Stream] = {}
        self.shared, self._store, self._timeout, self._name = shared, store, timeout, name
        self._rank, self._size = rank, size
        self.gloo: Any = dist.ProcessGroupGloo(dist.PrefixStore(name, store), rank, size, timeout)
        self.stream = torch.Stream(torch.device("sim", torch.accelerator.current_device_index()))
        self.bound_device_id = None

    # ---- what torch asks of any group

    def getBackendName(self) -> str:
        return NAME

    def name(self) -> str:
        return NAME

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def group_desc(self) -> str:
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name  # by which torch finds it again

    def _set_group_desc(self, name: str) -> None:
        pass

    def _get_backend(self, device: torch.device) -> Any:
        return self if torch.device(device).type == "sim" else self.gloo

    def new_group(self, ranks: Sequence[int], *, group_name: str, **_: Any) -> Group | None:
        if self._rank not in ranks:
            return None
        place = sorted(ranks).index(self._rank)
        eager = not self.shared.unbound
        return Group(self.shared, self._store, place, len(ranks), self._timeout, str(group_name), eager)

    # ---- calls

    def _start(
        self,
        by: str,
        reads: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor],
        start: Callable[[], Any],
        finish: Callable[[], object] = lambda: None,
        peer: int | None = None,
        beside: bool = True,
    ) -> Call | None:
        """Begin a call, on this group's stream; on the current one, without a handle, if nothing goes beside.

        Args:
            start: gives gloo's work, on copies; ``finish`` puts its result where it belongs.
            beside: the program does not wait at once.
        """
        shared, number = self.shared, next(_ids)
        size = sum(t.nbytes for t in (reads or writes))
        name, stream = self._name, self.stream
        if peer is not None and shared.batch is None and not self._eager:
            pair = min(peer, self._rank), max(peer, self._rank)
            name = f"{name}, {pair}"
            stream = self._of_pairs.setdefault(pair, torch.Stream(self.stream.device))
        shared.log.append(Asked(number, name, self._size, self._rank, by, peer, size, shared.batch, beside))
        stream = stream if beside else torch.accelerator.current_stream()
        if beside:
            stream.wait_event(torch.accelerator.current_stream().record_event())
        with stream:
            for tensors, write in ((reads, False), (writes, True)):
                for t in tensors:
                    if t.device.type != "sim" or not t.is_contiguous():
                        raise ValueError(f"{by}: NCCL takes contiguous tensors of its device")
                    shared.sim.access(t, write=write, by=by)
            with shared.sim.emulating():
                begun = start()
        call = Call(self, stream, number, begun, finish, reads)
        if beside:
            return call
        call.wait()
        return None

    def _in_place(
        self, by: str, xs: Sequence[torch.Tensor], go: Callable[[torch.Tensor], Any], options: Any
    ) -> Call | None:
        (x,) = xs
        copies: list[torch.Tensor] = []

        def start() -> Any:
            copies.append(x.cpu())
            return go(copies[0])

        return self._start(by, [x], [x], start, lambda: _put(copies[0], x), beside=options.asyncOp)

    def _into(
        self, by: str, out: torch.Tensor, reads: Sequence[torch.Tensor], go: Callable[..., Any], **more: Any
    ) -> Call | None:
        result = torch.empty(out.shape, dtype=out.dtype, device="cpu")

        def start() -> Any:
            return go(result, *(x.cpu() for x in reads))

        return self._start(by, reads, [out], start, lambda: _put(result, out), **more)

    def allreduce(self, xs: Sequence[torch.Tensor], options: Any = None) -> Any:
        options = dist.AllreduceOptions() if options is None else options
        if xs[0].is_cpu:
            return self.gloo.allreduce(xs, options)
        return self._in_place("all_reduce", xs, lambda x: self.gloo.allreduce([x], options), options)

    def broadcast(self, xs: Sequence[torch.Tensor], options: Any) -> Any:
        if xs[0].is_cpu:
            return self.gloo.broadcast(xs, options)
        return self._in_place("broadcast", xs, lambda x: self.gloo.broadcast([x], options), options)

    def reduce(self, xs: Sequence[torch.Tensor], options: Any) -> Any:
        if xs[0].is_cpu:
            return self.gloo.reduce(xs, options)
        return self._in_place("reduce", xs, lambda x: self.gloo.reduce([x], options), options)

    def allgather(self, outs: Any, xs: Any, options: Any = None) -> Any:
        assert xs[0].is_cpu, "on the device: all_gather_single"
        return self.gloo.allgather(outs, xs, _gather_options() if options is None else options)

    def all_gather_single(self, out: torch.Tensor, x: torch.Tensor, options: Any = None) -> Any:
        def go(out: torch.Tensor, x: torch.Tensor) -> Any:
            return self.gloo._allgather_base(out, x, _gather_options())

        beside = options is None or options.asyncOp
        return go(out, x) if x.is_cpu else self._into("all_gather", out, [x], go, beside=beside)

    def reduce_scatter_single(self, out: torch.Tensor, x: torch.Tensor, options: Any = None) -> Any:
        options = dist.ReduceScatterOptions() if options is None else options

        def go(out: torch.Tensor, x: torch.Tensor) -> Any:
            return self.gloo._reduce_scatter_base(out, x, options)

        return go(out, x) if x.is_cpu else self._into("reduce_scatter", out, [x], go)

    _allgather_base = allgather_single = all_gather_single
    _reduce_scatter_base = reduce_scatter_single

    def alltoall_base(self, out: torch.Tensor, x: torch.Tensor, gets: Any, gives: Any, options: Any) -> Any:
        def go(out: torch.Tensor, x: torch.Tensor) -> Any:
            return self.gloo.alltoall_base(out, x, gets, gives, options)

        return go(out, x) if x.is_cpu else self._into("all_to_all", out, [x], go)

    def scatter(self, outs: Any, inputs: Any, options: Any) -> Any:
        if outs[0].is_cpu:
            return self.gloo.scatter(outs, inputs, options)
        given = list(inputs[0]) if inputs else []

        def go(out: torch.Tensor, *xs: torch.Tensor) -> Any:
            return self.gloo.scatter([out], [list(xs)] if xs else [], options)

        return self._into("scatter", outs[0], given, go)

    def send(self, xs: Sequence[torch.Tensor], to: int, tag: int) -> Any:
        (x,) = xs
        if x.is_cpu:
            return self.gloo.send(xs, to, tag)
        return self._start("send", [x], [], lambda: self.gloo.send([x.cpu()], to, tag), peer=to)

    def recv(self, xs: Sequence[torch.Tensor], source: int, tag: int) -> Any:
        if xs[0].is_cpu:
            return self.gloo.recv(xs, source, tag)
        return self._into("recv", xs[0], [], lambda out: self.gloo.recv([out], source, tag), peer=source)

    def barrier(self, options: Any = None) -> Any:
        return self.gloo.barrier(dist.BarrierOptions())


def _put(result: torch.Tensor, into: torch.Tensor) -> None:
    """As NCCL does: past autograd, which counts no version."""
    with torch.autograd._unsafe_preserve_version_counter(into):
        into.copy_(result)


def register(sim: Simulated) -> Shared:
    """Give torch.distributed the backend; messages of one ``batch_isend_irecv`` go together."""
    shared = Shared(sim)
    batches, together = itertools.count(), dist.batch_isend_irecv

    def batch_isend_irecv(p2p_op_list: list[dist.P2POp]) -> list[dist.Work]:
        shared.batch = next(batches)
        try:
            return together(p2p_op_list)
        finally:
            shared.batch = None

    module: Any = nccl
    among = module.group_among

    def group_among(ranks: Sequence[int], **how: bool) -> dist.ProcessGroup:
        shared.unbound = True
        try:
            return among(ranks, **how)
        finally:
            shared.unbound = False

    def make(store: Any, rank: int, size: int, timeout: timedelta) -> Group:
        return Group(shared, store, rank, size, timeout)

    dist.batch_isend_irecv, module.group_among = batch_isend_irecv, group_among
    dist.Backend.register_backend(NAME, make, devices=["sim"])
    return shared
