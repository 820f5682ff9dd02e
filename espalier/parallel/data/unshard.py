"""The whole parameters of a chunk that is cut between its uses (ZeRO-3): gathered, shown, released."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch

from espalier.comm import Work
from espalier.comm.collectives import Fetching, start_gather
from espalier.device import beside, wait_for
from espalier.parallel.data.chunks import Appearance, Chunk, ShardedParam, show
from espalier.parallel.data.float8_rows import Float8Rows, agree_on_scales
from espalier.parallel.data.masters import merge, values_of
from espalier.parallel.data.residency import MEMORIES, OffloadStore
from espalier.tensor import plain
from espalier.tensor.loans import is_handed_out, keep_apart, written_mark
from espalier.torch_private import (
    foreach_copy_,
    method,
    raw,
    read_version,
    set_versions,
)

_address = method("data_ptr")


class _Marks(NamedTuple):
    """What tells whether a chunk's parameters were written to: see ``written_mark``.

    Attributes:
        times: how often data of those that are cut was handed out.
        versions, addresses: of all.
        uncut: the marks of those that are not cut.
    """

    times: int
    versions: list[int]
    addresses: list[int]
    uncut: list[tuple[int, int, int]]


class Unsharded:
    """The storage of a chunk's whole parameters: filled while they are used, of no size between.

    Attributes:
        is_whole: whether the parameters show it, as they do for modules that are running and use it.
        is_kept: whether it is filled while they show their pieces: a module is to use it soon.
        users: modules that are running and use it.
        marks: uses in a forward pass whose backward is to come, and will tell when it is done.
        open: calls whose backward has begun, and is not known to be done.
        is_recorded: whether a backward of such a call has a graph, whose own backward, to come, needs them.
        rows, pending: what is on its way to it; ``rows``, too, have memory only then.
        bring: has it filled, with what comes next.
    """

    def __init__(
        self,
        number: int,
        chunk: Chunk,
        store: OffloadStore | None,
        bring: Callable[[], None],
        float8: Collection[str] = (),
    ) -> None:
        self.number, self.chunk, self._store, self.bring = number, chunk, store, bring
        eight = float8 and chunk.shard_group.n > 1 and any(m.name in float8 for m in chunk.members)
        self.float8 = Float8Rows(chunk, float8) if eight else None
        with raw():
            self._flat = chunk.line(chunk.dtype)
            self._whole = chunk.whole_in(self._flat)
            self.storage = self._flat.untyped_storage()
            self._bytes = self.storage.nbytes()
            shard_group = chunk.shard_group
            fetches = Fetching.serves(shard_group.mesh, shard_group.axis, chunk.device) and not eight
            own = [m.piece(whole) for m, whole in zip(chunk.members, self._whole.tensors, strict=True)]
            but = shard_group.here if fetches else None
            places = chunk.in_wholes(self._whole.tensors, but)
            self.storage.resize_(0)
            # views last, though what they look at comes and goes
            self.rows = chunk.rows(shard_group.n, chunk.dtype)
            # what is fetched from others comes after what is here
            self._into = [*(own if fetches else ()), *(view for there in places for view in there)]
            self._outof = chunk.in_rows(self.rows, places, but)
            self._fetching = Fetching(self.rows, shard_group.mesh, shard_group.axis) if fetches else None
            self._own: torch.Tensor | None = None
            self._taken: list[torch.Tensor] = []  # from off the device, until they are sent
            self._row: torch.Tensor | None = None  # in 8 bits, while it is sent
            self._arriving = _Room(self.rows)
            self._carried = self._arriving if self.float8 is None else _Room(self.float8.rows)
            self._ps = [m.p for m in chunk.members]
            self._cut = tuple(m.p for m in chunk.members if m.dim is not None)
            self._uncut = [m.p for m in chunk.members if m.dim is None]
            self._count_versions(1)
        # what is to be seen of the parameters when they began to be whole, or their pieces to be sent
        self._times, self._marks = 0, _Marks(0, [], [], [])
        self.is_whole = self.is_kept = False
        self._hidden: Appearance | None = None  # what the parameters show in place of their pieces
        self.users = self.marks = 0
        self.open = set[object]()
        self.is_recorded = False
        self.pending: Work[Any] | None = None
        self._brought: torch.Event | None = None
        # of the whole parameters, on the rank that has most of them
        self.nbytes = chunk.largest * chunk.dtype.itemsize

    @property
    def storages(self) -> list[torch.UntypedStorage]:
        """All that are emptied and filled."""
        rooms = [self._arriving] if self.float8 is None else [self._arriving, self._carried]
        return [self.storage, *(room.storage for room in rooms)]

    @property
    def is_away(self) -> bool:
        """Whether this rank's pieces are off the device."""
        return "parameters" in self.chunk.places

    @property
    def is_filled(self) -> bool:
        """Whether the parameters are whole, or can be without a gather."""
        return self.is_whole or self.is_kept

    @property
    def _key(self) -> str:
        return f"parameters-{self.chunk.number}"

    def read(self) -> None:
        """Start to read this rank's pieces, where they are on disk."""
        if self.is_away and not self.is_filled and self.pending is None:
            assert self._store is not None
            self._store.start(self._key, home_of(self.chunk))

    def start(self) -> None:
        """Start to gather, unless that is done or under way."""
        if self.is_whole or self.pending is not None:
            return
        assert self.chunk.home is not None
        self._recheck()
        if self.is_kept:
            return
        with raw():
            self._marks = self._marks_now()
            own = self.chunk.home
            shard_group = self.chunk.shard_group
            mesh, axis = shard_group.mesh, shard_group.axis
            self._carried.open()
            # what computes meanwhile waits neither for the copy nor for the gather; these are of one stream
            stream = None if self._store is None or not self.is_away else self._store.bringing
            if mesh.shape[axis] > 1 and mesh.order(axis) is not None:
                stream = None  # the ranks' rows are sorted when they are there, by the stream that asked
            with beside(stream, self.chunk.device):
                if self.is_away:
                    assert self._store is not None
                    (own,) = self._taken = self._store.take(self._key, home_of(self.chunk))
                if self.chunk.lent:
                    own = values_of(self.chunk)
                if self.float8 is not None:
                    if not self.float8.is_scaled:
                        agree_on_scales([self.float8])
                    self._row = self.float8.pack(own)
                    self.pending = start_gather(self.float8.rows, self._row, mesh, axis)
                elif self._fetching is None:
                    self.pending = start_gather(self.rows, own, mesh, axis)
                else:
                    self.pending, self._own = self._fetching.start(own), own
            self._brought = None if stream is None else stream.record_event()

    def _await(self) -> None:
        """Wait for what is under way; on an accelerator its stream does."""
        assert self.pending is not None
        self.pending.wait()
        wait_for(self._brought, self.chunk.device)
        self._brought = None

    def fill(self) -> None:
        """Wait for what is under way, and let the parameters be whole."""
        if self.is_whole:
            return
        if not self.is_kept:
            self._take_in()
        with raw():
            self._count_versions(-1)
            self.chunk.show(self._whole)
            self._marks = self._marks_now()
        self.is_whole, self.is_kept = True, False

    def _take_in(self) -> None:
        self._await()
        if self._marks_now() != self._marks:  # what came is out of date, on all ranks
            self._let_go()
            self.start()
            self._await()
        with raw():
            self.storage.resize_(self._bytes)
            if self.float8 is not None:
                self._arriving.open()
                self.float8.unpack(self.rows)
            outof = self._outof if self._own is None else [*self.chunk.pieces(self._own), *self._outof]
            if self._into:
                foreach_copy_(self._into, outof)
        self._let_go()

    def _let_go(self) -> None:
        self.pending = self._own = self._row = None
        if self._taken and self._store is not None:
            self._store.tell_outside(self._taken)  # of a CPU it is what lies on the host
        self._taken = []
        self._arriving.close()
        self._carried.close()

    def release(self) -> None:
        """Let the parameters be pieces again, with what was written to them, and give the memory back."""
        self.rest()
        self._empty()

    def unused(self) -> None:
        """Let the parameters be pieces again, if no module computes with them, or will in a backward pass."""
        if self.is_whole and not self.users and not self.marks and not self.is_recorded:
            self.open.clear()
            self.release()

    def _recheck(self) -> None:
        """Let go of what is kept, if the pieces were written to: so they were on all ranks."""
        self.adopt()
        if self.is_kept and (self.is_open or self._marks_now() != self._marks):
            self._empty()

    def _empty(self) -> None:
        self.storage.resize_(0)
        self.is_kept = False

    def rest(self) -> None:
        """Let the parameters be pieces again, and keep the memory filled for the next use.

        Who uses them meanwhile is no module that has them gathered for its backward pass.
        """
        if not self.is_whole:
            return
        assert self.chunk.home is not None
        is_replaced = (self.is_open or self._marks_now() != self._marks) and self._keep_written()
        # a parameter that changed its device before backward would get a second accumulator of gradients
        is_off = self.chunk.home.device != self.chunk.device
        hides = is_off and (torch.is_grad_enabled() or self._hidden is not None)
        with raw():
            home = self.chunk.home
            if hides:
                nothing = float("nan") if home.is_floating_point() else 0
                home = self._flat.new_full((), nothing).expand(home.shape)
            self._count_versions(1)
            resting = self.chunk.resting_in(home)
            self.chunk.show(resting)
            self._hidden = resting if hides else None
        self.is_whole, self.is_kept = False, True
        if self.is_away:
            self.chunk.marks = list(map(written_mark, self._ps))
        self._marks = self._marks_now()
        if is_replaced:
            self._empty()

    def copy_of(self, m: ShardedParam) -> torch.Tensor | None:
        """A copy of a whole parameter whose values are kept here while it shows its piece, if they are."""
        if self.float8 is not None:
            return None
        self._recheck()
        with raw():
            return self._whole.tensors[m.number].clone() if self.is_kept else None

    def fetched(self, m: ShardedParam) -> torch.Tensor | None:
        """A copy of a whole parameter whose pieces are off the device, for a call that is recorded."""
        if self.float8 is not None:
            return None
        self.start()
        self.fill()
        with raw():
            whole = self._whole.tensors[m.number].clone()
        if not self.users and not self.marks:
            self.release()
        return whole

    def hidden(self, m: ShardedParam) -> torch.Tensor | None:
        """This rank's piece of a parameter that shows another on the device for the time being."""
        if self._hidden is None or self.is_whole:
            return None
        assert self.chunk.home is not None
        with raw():
            return list(self.chunk.pieces(self.chunk.home))[m.number]

    def reveal(self) -> None:
        """No backward pass is to come: let the parameters be their pieces, where these are off the device."""
        if self._hidden is not None and not self.is_whole:
            assert self.chunk.home is not None
            self.adopt()
            show_pieces(self.chunk, self.chunk.home)
            self._hidden = None

    def drop(self, *, reveals: bool, is_over: bool = True) -> None:
        """Let go of what was gathered for nothing, and of parameters that no module is using.

        Args:
            is_over: a backward pass has been, whatever is recorded.
        """
        if self.is_recorded and not is_over:
            return
        self.marks, self.is_recorded = 0, False
        self.open.clear()
        if self.pending is not None:
            self._await()
            self._let_go()
        if not self.users:
            self.release()
            if reveals:
                self.reveal()

    @property
    def is_open(self) -> bool:
        """Whether somebody may write to the parameters so that no version counts it."""
        return any(map(is_handed_out, self._ps if self._times else self._uncut))

    def handed_out(self) -> None:
        """Be told that somebody gets an alias of a cut parameter's data."""
        self._times += 1

    def _marks_now(self) -> _Marks:
        uncut = list(map(written_mark, self._uncut))
        with raw():
            return _Marks(
                self._times, list(map(read_version, self._ps)), list(map(_address, self._ps)), uncut
            )

    def _keep_written(self) -> bool:
        """Let this rank's pieces have what was written to the whole parameters: the same on all ranks.

        Whether it is elsewhere than what was gathered, which is out of date then: ``p.data = ...``.
        """
        now, before = self._marks_now(), self._marks
        every = self.is_open or now.times != before.times or now.uncut != before.uncut
        with raw(), torch.no_grad():
            for i, m in enumerate(self.chunk.members):
                same = now.versions[i] == before.versions[i] and now.addresses[i] == before.addresses[i]
                if every or not same:
                    self._keep(m, m.piece(plain(m.p.detach())))
        return now.addresses != before.addresses

    def adopt(self) -> None:
        """Take in what somebody has put in place of a cut parameter's data (``p.data = ...``)."""
        assert self.chunk.home is not None
        if self.is_whole:
            return
        with raw(), torch.no_grad():
            pieces = self.chunk.pieces(self.chunk.home) if self._hidden is None else self._hidden.tensors
            if list(map(_address, self._ps)) == list(map(_address, pieces)):
                return
            for m, piece in zip(self.chunk.members, pieces, strict=True):
                if m.p.data_ptr() != piece.data_ptr() and piece.numel():
                    new = plain(m.p.data)
                    keep_apart(m.p, piece)
                    show(m.p, piece, m.rest)
                    self._keep(m, new)
            self._empty()

    def _keep(self, m: ShardedParam, piece: torch.Tensor) -> None:
        """Let this rank's piece of a parameter be these values."""
        chunk = self.chunk
        if self.is_whole and self.float8 is not None:
            before = chunk.pieces(self.float8.own())[m.number]
            piece = self.float8.unrounded(m, before, piece.to(before))
        if chunk.lent:  # gradients stand in its place
            assert chunk.master is not None
            merge(chunk.pieces(chunk.master)[m.number], piece)
            return
        assert chunk.home is not None
        here = chunk.pieces(chunk.home)[m.number]
        values = piece.to(here)
        if here.is_meta or not torch.equal(here, values):
            here.copy_(values)
            m.is_written = chunk.is_written = True
            if m.dim is not None:
                m.p._source.forget()  # type: ignore[attr-defined]

    def _count_versions(self, by: int) -> None:
        """Let autograd take a released parameter for one that was written to.

        If backward asks for it, and no hook has had it gathered, that is an error, never a wrong number.
        """
        if set_versions is not None:
            set_versions(self._cut, tuple([read_version(p) + by for p in self._cut]))


class _Room:
    """The memory of a buffer, which comes and goes."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self.storage = buffer.untyped_storage()
        self._nbytes = self.storage.nbytes()
        self.close()

    def open(self) -> None:
        """Let it have its size."""
        self.storage.resize_(self._nbytes)

    def close(self) -> None:
        """Give the memory back."""
        self.storage.resize_(0)


def bring_home(chunk: Chunk) -> None:
    """Put the pieces of a chunk's parameters into one buffer."""
    with raw():
        chunk.home = chunk.flat(chunk.dtype)
        chunk.bring_together(chunk.resting_in(chunk.home))


def show_pieces(chunk: Chunk, home: torch.Tensor) -> None:
    """Let the parameters of a chunk be this rank's pieces, as they stand in a flat ``home``."""
    chunk.home = home
    with raw():
        chunk.show(chunk.resting_in(home))
    chunk.marks = [written_mark(m.p) for m in chunk.members]


def home_of(chunk: Chunk) -> list[torch.Tensor]:
    """This rank's pieces off the device; copied, where a parameter was written to since it showed them."""
    assert chunk.home is not None
    if chunk.places["parameters"] in MEMORIES:
        return [chunk.home]
    ps = [m.p for m in chunk.members]
    written = chunk.marks != list(map(written_mark, ps)) or any(map(is_handed_out, ps))
    chunk.is_written = chunk.is_written or written
    return [chunk.home.clone() if chunk.is_written else chunk.home]
