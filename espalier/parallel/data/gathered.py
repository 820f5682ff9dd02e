"""The whole parameters of a chunk that is cut between its uses (ZeRO-3): gathered, shown, released."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch._C import DisableTorchFunctionSubclass as raw

from espalier.comm import Pending
from espalier.comm.flat import Fetching, start_gather
from espalier.parallel.data.chunks import Chunk, Member, show
from espalier.parallel.data.inplace import values_of
from espalier.parallel.data.masters import merge
from espalier.parallel.data.residency import Shelf
from espalier.tensor import plain
from espalier.tensor.loans import is_handed_out, written_mark

_address = torch._C.TensorBase.data_ptr
_version = vars(torch._C.TensorBase)["_version"].__get__
# private, so it may go
_set_versions: Any = getattr(torch._C._autograd, "_unsafe_set_version_counter", None)


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


class Gathered:
    """The storage of a chunk's whole parameters: filled while they are used, of no size between.

    Attributes:
        wholes: views of it, one for each member.
        users: modules that are running and use it.
        marks: uses in a forward pass whose backward is to come, and will tell when it is done.
        rows, pending: what is on its way to it; ``rows``, too, have memory only then.
        bring: has it filled, with what comes next.
    """

    def __init__(self, number: int, chunk: Chunk, shelf: Shelf | None, bring: Callable[[], None]) -> None:
        self.number, self.chunk, self._shelf, self.bring = number, chunk, shelf, bring
        with raw():
            elements = sum(m.size for m in chunk.members)
            self._flat = torch.empty(elements, dtype=chunk.dtype, device=chunk.device)
            self.wholes = chunk.wholes(self._flat)
            self.storage = self._flat.untyped_storage()
            self._bytes = self.storage.nbytes()
            lane = chunk.lane
            fetches = Fetching.serves(lane.mesh, lane.axis, chunk.device)
            own = [m.piece(whole) for m, whole in zip(chunk.members, self.wholes, strict=True)]
            but = lane.here if fetches else None
            places = chunk.in_wholes(self.wholes, but)
            self.storage.resize_(0)
            # views last, though what they look at comes and goes
            self.rows = chunk.rows(lane.n, chunk.dtype)
            # what is fetched from others comes after what is here
            self._into = [*(own if fetches else ()), *(view for there in places for view in there)]
            self._outof = chunk.in_rows(self.rows, places, but)
            self._fetching = Fetching(self.rows, lane.mesh, lane.axis) if fetches else None
            self._own: torch.Tensor | None = None
            self._arriving = self.rows.untyped_storage()
            self._arriving_bytes = self._arriving.nbytes()
            self._arriving.resize_(0)
            self._ps = [m.p for m in chunk.members]
            self._cut = tuple(m.p for m in chunk.members if m.dim is not None)
            self._uncut = [m.p for m in chunk.members if m.dim is None]
            self._count_versions(1)
        # what is to be seen of the parameters when they began to be whole, or their pieces to be sent
        self._times, self._marks = 0, _Marks(0, [], [], [])
        self.is_whole = False
        self._hidden: list[torch.Tensor] | None = None  # what the parameters show in place of their pieces
        self.users = self.marks = 0
        self.pending: Pending | None = None
        # of the whole parameters, on the rank that has most of them
        self.nbytes = chunk.largest * chunk.dtype.itemsize

    @property
    def storages(self) -> list[torch.UntypedStorage]:
        """All that are emptied and filled."""
        return [self.storage, self._arriving]

    @property
    def is_away(self) -> bool:
        """Whether this rank's pieces are off the device."""
        return "parameters" in self.chunk.places

    @property
    def _key(self) -> str:
        return f"parameters-{self.chunk.number}"

    def read(self) -> None:
        """Start to read this rank's pieces, where they are on disk."""
        if self.is_away and not self.is_whole and self.pending is None:
            assert self._shelf is not None
            self._shelf.start(self._key, home_of(self.chunk))

    def start(self) -> None:
        """Start to gather, unless that is done or under way."""
        if self.is_whole or self.pending is not None:
            return
        assert self.chunk.home is not None
        self.adopt()
        with raw():
            self._marks = self._marks_now()
            own = self.chunk.home
            if self.is_away:
                assert self._shelf is not None
                (own,) = self._shelf.take(self._key, home_of(self.chunk))
            if self.chunk.lent:
                own = values_of(self.chunk)
            lane = self.chunk.lane
            self._arriving.resize_(self._arriving_bytes)
            if self._fetching is None:
                self.pending = start_gather(self.rows, own, lane.mesh, lane.axis)
            else:
                self.pending, self._own = self._fetching.start(own), own

    def fill(self) -> None:
        """Wait for what is under way, and let the parameters be whole."""
        if self.is_whole:
            return
        assert self.pending is not None
        self.pending.wait()
        if self._marks_now() != self._marks:  # what came is out of date, on all ranks
            self._let_go()
            self.start()
            self.pending.wait()
        with raw():
            self.storage.resize_(self._bytes)
            outof = self._outof if self._own is None else [*self.chunk.pieces(self._own), *self._outof]
            if self._into:
                torch._foreach_copy_(self._into, outof)
            self._count_versions(-1)
            for m, whole in zip(self.chunk.members, self.wholes, strict=True):
                show(m.p, whole, m.full)
            self._marks = self._marks_now()
        self._let_go()
        self.is_whole = True

    def _let_go(self) -> None:
        self.pending = self._own = None
        self._arriving.resize_(0)

    def release(self) -> None:
        """Let the parameters be pieces again, with what was written to them, and give the memory back."""
        if not self.is_whole:
            return
        assert self.chunk.home is not None
        if self.is_open or self._marks_now() != self._marks:
            self._keep_written()
        # a parameter that changed its device before backward would get a second accumulator of gradients
        hides = self.chunk.home.device != self.chunk.device and torch.is_grad_enabled()
        with raw():
            home = self.chunk.home
            if hides:
                nothing = float("nan") if home.is_floating_point() else 0
                home = self._flat.new_full((), nothing).expand(home.shape)
            self._count_versions(1)
            pieces = self.chunk.pieces(home)
            for m, piece in zip(self.chunk.members, pieces, strict=True):
                show(m.p, piece, m.rest)
            self._hidden = pieces if hides else None
        self.storage.resize_(0)
        self.is_whole = False
        if self.is_away:
            self.chunk.marks = list(map(written_mark, self._ps))

    def reveal(self) -> None:
        """No backward pass is to come: let the parameters be their pieces, where these are off the device."""
        if self._hidden is not None and not self.is_whole:
            assert self.chunk.home is not None
            self.adopt()
            show_pieces(self.chunk, self.chunk.home)
            self._hidden = None

    def drop(self) -> None:
        """Let go of what was gathered for nothing, and of parameters that no module is using."""
        self.marks = 0
        if self.pending is not None:
            self.pending.wait()
            self._let_go()
        if not self.users:
            self.release()
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
            return _Marks(self._times, list(map(_version, self._ps)), list(map(_address, self._ps)), uncut)

    def _keep_written(self) -> None:
        """Let this rank's pieces have what was written to the whole parameters: the same on all ranks."""
        now, before = self._marks_now(), self._marks
        every = self.is_open or now.times != before.times or now.uncut != before.uncut
        with raw(), torch.no_grad():
            for i, m in enumerate(self.chunk.members):
                same = now.versions[i] == before.versions[i] and now.addresses[i] == before.addresses[i]
                if every or not same:
                    self._keep(m, m.piece(plain(m.p.detach())))

    def adopt(self) -> None:
        """Take in what somebody has put in place of a cut parameter's data (``p.data = ...``)."""
        assert self.chunk.home is not None
        if self.is_whole:
            return
        with raw(), torch.no_grad():
            pieces = self.chunk.pieces(self.chunk.home) if self._hidden is None else self._hidden
            if list(map(_address, self._ps)) == list(map(_address, pieces)):
                return
            for m, piece in zip(self.chunk.members, pieces, strict=True):
                if m.p.data_ptr() != piece.data_ptr() and piece.numel():
                    new = plain(m.p.data)
                    show(m.p, piece, m.rest)
                    self._keep(m, new)

    def _keep(self, m: Member, piece: torch.Tensor) -> None:
        """Let this rank's piece of a parameter be these values."""
        chunk = self.chunk
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

    def _count_versions(self, by: int) -> None:
        """Let autograd take a released parameter for one that was written to.

        If backward asks for it, and no hook has had it gathered, that is an error, never a wrong number.
        """
        if _set_versions is not None:
            _set_versions(self._cut, tuple([_version(p) + by for p in self._cut]))


def bring_home(chunk: Chunk) -> None:
    """Put the pieces of a chunk's parameters into one buffer."""
    with raw():
        chunk.home = chunk.flat(chunk.dtype)
        for m, piece in zip(chunk.members, chunk.pieces(chunk.home), strict=True):
            piece.copy_(plain(m.p.detach()))
            show(m.p, piece, m.shard)


def show_pieces(chunk: Chunk, home: torch.Tensor) -> None:
    """Let the parameters of a chunk be this rank's pieces, as they stand in a flat ``home``."""
    chunk.home = home
    with raw():
        for m, piece in zip(chunk.members, chunk.pieces(home), strict=True):
            show(m.p, piece, m.rest)
    chunk.marks = [written_mark(m.p) for m in chunk.members]


def home_of(chunk: Chunk) -> list[torch.Tensor]:
    """This rank's pieces off the device; copied, where a parameter was written to since it showed them."""
    assert chunk.home is not None
    if chunk.places["parameters"] == "host":
        return [chunk.home]
    ps = [m.p for m in chunk.members]
    written = chunk.marks != list(map(written_mark, ps)) or any(map(is_handed_out, ps))
    chunk.is_written = chunk.is_written or written
    return [chunk.home.clone() if chunk.is_written else chunk.home]
