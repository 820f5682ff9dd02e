"""Chunks: the parameters of some modules as one flat buffer, which moves as one.

Along the data axis a parameter is cut on one dim, like any ``Shard``. What a chunk sends are rows, one
for each coordinate: the pieces of all its members, one after the other, each padded to the largest, and to
whole vectors. So every parameter begins where torch would let a tensor of its own begin, and kernels and
views (``view_as_complex``) take it as they would take that.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate, repeat
from typing import NamedTuple, Protocol

import torch
from torch import nn

from espalier.blocks import parameters_in, units
from espalier.layout import Layout, chunk_bounds
from espalier.mesh import Mesh
from espalier.mesh.parts import joined
from espalier.parallel.fused import whole_vectors
from espalier.parallel.plan import Place
from espalier.tensor import plain, stamp
from espalier.torch_private import (
    foreach_copy_,
    foreach_zero_,
    memory_id,
    method,
    own_parameters,
    parameters_within,
    raw,
    setter,
)

_address, _as_strided = method("data_ptr"), method("as_strided")
_set_data = setter("data")
_set_grad = setter("grad")


class ShardGroup(NamedTuple):
    """The ranks among which something is cut: those of one axis of a mesh, or of several as one.

    Attributes:
        mesh, axis: along which they send.
        axes: of the parameters' mesh, outermost first.
        sizes: of those axes.
    """

    mesh: Mesh
    axis: int
    axes: tuple[int, ...]
    sizes: tuple[int, ...]

    @staticmethod
    def along(mesh: Mesh, axes: Sequence[int]) -> ShardGroup:
        """That of some axes; those of size 1 cut nothing."""
        busy = tuple(a for a in axes if mesh.shape[a] > 1) or (axes[-1],)
        sizes = tuple(mesh.shape[a] for a in busy)
        return (
            ShardGroup(mesh, busy[0], busy, sizes)
            if len(busy) == 1
            else ShardGroup(joined(mesh, busy), 0, busy, sizes)
        )

    @property
    def n(self) -> int:
        """Number of ranks."""
        return self.mesh.shape[self.axis]

    @property
    def here(self) -> int:
        """This rank's place among them."""
        return self.mesh.coordinate[self.axis]

    def piece(self, size: int, place: int) -> tuple[int, int]:
        """Start and length of one's piece of a dim: each axis cuts the pieces of those before it."""
        start = 0
        inner = self.n
        for n in self.sizes:
            inner //= n
            at, place = divmod(place, inner)
            begin, size = chunk_bounds(size, n, at)
            start += begin
        return start, size


class ShardedParam:
    """One parameter in a chunk.

    Attributes:
        name: of the parameter.
        p: the parameter.
        full: its layout while the model computes with it: whole along the data axis.
        shard: its layout cut along the data axis; equal to ``full`` for a parameter without dims.
        outer: the mesh axes along which it is the same, and so is all that belongs to it, once the addends of
            its gradient are summed.
        shard_group: those along which it is the same while the model computes with it, and is cut.
        by_piece: whether the optimizer updates this rank's piece alone: the stage cuts states.
        updated: the layout of what it updates, ``shard`` or ``full``.
        dim: the dim that is cut; None for one without dims, which every rank holds.
        counts: whether no coordinate before this one, along any axis, holds the same piece.
        largest: its elements on the rank that has most of it, by which all ranks decide alike.
        slot: elements that it takes in each row.
        room: those that it takes whole, with others in one buffer.
        dtype: in which the model computes with it.
        is_cast: whether that is not the dtype given.
        rest: the layout that it bears while it is cut; a twin of ``shard`` where it is gathered for its uses.
        number: among the members of its chunk.
        is_written: whether others have changed its values so that its version does not tell.
        seen: its mark (see ``written_mark``) when it last was what its master says.
    """

    def __init__(
        self,
        name: str,
        p: nn.Parameter,
        full: Layout,
        outer: tuple[int, ...],
        shard_group: ShardGroup,
        dtype: torch.dtype | None = None,
        by_piece: bool = False,
    ) -> None:
        self.name, self.p, self.full, self.outer, self.shard_group = name, p, full, outer, shard_group
        self.is_cast = dtype is not None and p.is_floating_point()
        self.dtype = dtype if dtype is not None and self.is_cast else p.dtype
        self._n = shard_group.n
        self.dim = cut_dim(full.padded_shape, self._n)  # the same on all ranks
        self.shard = full
        if self.dim is not None:
            for axis in shard_group.axes:
                self.shard = self.shard.with_axis(axis, self.dim)
        shared = set(range(full.mesh.ndim)) - set(self.shard.order)
        self.counts = not any(full.mesh.coordinate[a] for a in shared)
        shape = full.local_shape
        self.rest = self.shard
        self.by_piece, self.updated = by_piece, self.shard if by_piece else full
        self.number, self.is_written, self.seen = 0, False, (0, 0, 0)
        self._most = 1
        if self.dim is not None:
            self._most = math.prod(shape[: self.dim]) * -(-shape[self.dim] // self._n)
            self._most *= math.prod(shape[self.dim + 1 :])
            self._bounds = shard_group.piece(shape[self.dim], shard_group.here)
        self.even = self.dim == 0 and shape[0] % self._n == 0
        self.size, self.largest = math.prod(shape), math.prod(full.padded_shape)
        self.slot, self.room = whole_vectors(self._most, self.dtype), whole_vectors(self.size, self.dtype)

    @property
    def kind(self) -> ParamKind:
        """What is the same of all parameters of a chunk."""
        return self.dtype, self.full.mesh.device(), self.shard_group, self.outer, self.p.requires_grad

    @property
    def slot_bytes(self) -> int:
        """Of what it takes in each row."""
        return self.slot * self.dtype.itemsize

    @property
    def chunk_bytes(self) -> int:
        """Those by which it is given to chunks."""
        return self.largest * self.dtype.itemsize

    def piece(self, full: torch.Tensor, coordinate: int | None = None) -> torch.Tensor:
        """The view, of a local tensor that is whole along the axis, that a coordinate holds."""
        if self.dim is None:
            return full
        if coordinate is None:
            return full.narrow(self.dim, *self._bounds)
        return full.narrow(self.dim, *self.shard_group.piece(full.shape[self.dim], coordinate))

    def in_whole(self, full: torch.Tensor, but: int | None = None) -> list[torch.Tensor]:
        """Views of a tensor whole along the axis, of all coordinates or all ``but`` one: as ``in_rows``."""
        if self.even and full.is_contiguous():
            return _without(full.view(self._n, self._most), but)
        return [self.piece(full, i) for i in self._filled() if i != but]

    def in_rows(
        self, rows: torch.Tensor, like: Sequence[torch.Tensor], but: int | None = None
    ) -> list[torch.Tensor]:
        """Views of rows [n, slot] in the shapes of what ``in_whole`` gave."""
        parts = _without(rows[:, : self._most], but)
        if [part.shape for part in parts] == [x.shape for x in like]:
            return parts
        both = zip((i for i in self._filled() if i != but), like, strict=True)
        return [rows[i, : piece.numel()].view(piece.shape) for i, piece in both]

    def _filled(self) -> list[int]:
        """The coordinates that have something of it; without data, one stands for all."""
        most = 1 if self.full.mesh.is_dry else self._n
        if self.dim is None or not self.size:
            return list(range(most)) if self.size else []
        size = self.full.local_shape[self.dim]
        return [i for i in range(most) if self.shard_group.piece(size, i)[1]]


def _without(rows: torch.Tensor, but: int | None) -> list[torch.Tensor]:
    """Rows as they are, or what stands before and after one of them."""
    if but is None:
        return [rows]
    return [part for part in (rows[:but], rows[but + 1 :]) if len(part)]


def cut_dim(shape: Sequence[int], n: int) -> int | None:
    """The dim to cut into n: the first of those whose pieces need the least padding."""
    if not shape:
        return None
    return min(range(len(shape)), key=lambda d: (-(-shape[d] // n) * n / max(shape[d], 1), d))


class Views(NamedTuple):
    """Of parameters that are whole: their data, this rank's pieces of it, and where ``unpack`` puts each."""

    wholes: list[torch.Tensor]
    pieces: list[torch.Tensor]
    places: list[list[torch.Tensor]]


class Appearance(NamedTuple):
    """What the parameters of a chunk show for the time being.

    Attributes:
        tensors: what is their data, for each member.
        layouts: how that lies.
        gradients: what is their ``grad``; None where that is left as it is.
    """

    tensors: list[torch.Tensor]
    layouts: list[Layout]
    gradients: Sequence[torch.Tensor | None] | None = None


class BufferLayout(NamedTuple):
    """Of tensors one after the other in a flat buffer: shapes, strides, where each begins, gaps between."""

    shapes: list[tuple[int, ...]]
    strides: list[tuple[int, ...]]
    starts: list[int]
    gaps: list[tuple[int, int]]

    @staticmethod
    def of_sizes(shapes: Sequence[tuple[int, ...]], sizes: Sequence[int]) -> BufferLayout:
        """Of tensors that take so many elements each."""
        strides = [tuple(math.prod(shape[d + 1 :]) for d in range(len(shape))) for shape in shapes]
        ends = list(accumulate(sizes))
        starts = [end - size for end, size in zip(ends, sizes, strict=True)]
        filled = [start + math.prod(shape) for start, shape in zip(starts, shapes, strict=True)]
        gaps = [(i, j) for i, j in zip(filled, ends, strict=True) if i < j]
        return BufferLayout(list(shapes), strides, starts, gaps)

    def of(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Them, as views."""
        if flat.stride() != (1,):  # one element for all, where there are no values
            parts = zip(self.shapes, self.starts, strict=True)
            return [flat[start : start + math.prod(shape)].view(shape) for shape, start in parts]
        first = flat.storage_offset()
        starts = [first + start for start in self.starts] if first else self.starts
        return list(map(_as_strided, repeat(flat), self.shapes, self.strides, starts))

    def fill(self, flat: torch.Tensor) -> None:
        """Zeros into what is between them."""
        if self.gaps:
            foreach_zero_([flat[..., i:j] for i, j in self.gaps])


class InPlaceStandIn(Protocol):
    """What stands in for a parameter whose memory holds its gradient."""

    def take_over(self) -> None:
        """Let the master have what was written to it."""

    def end(self) -> None:
        """The parameter is itself again."""


class Chunk:
    """Members of one dtype and device, cut and summed alike, and the flat buffers that they share.

    Attributes:
        members: in the order of their slots.
        outer, shard_group, by_piece: theirs.
        dtype: in which the model computes with them.
        device: on which it does.
        size: elements of a row.
        elements: of the members, whole along the axis; ``largest``: on the rank that has most of them.
        gradient: flat [size], this rank's pieces of the sums; where the stage keeps gradients whole, these,
            as in ``line_up``, until the parameters have them; None while there are none.
        home: flat [size], this rank's pieces of the parameters, where the stage cuts these.
        copied: the numbers of those members, where the stage cuts states alone, of whose pieces the optimizer
            updates copies, each with room for its slot; ``own``: the pieces and copies, while it does.
        whole: flat [elements], the parameters, where the optimizer updates all of them.
        master: flat, the parameters in float32, where the optimizer is to update these: [size], this rank's
            pieces, where the stage cuts states, else whole.
        is_trained: whether its members needed gradients when it was made, or one has come to need one.
        number: of the chunk, the same on all ranks.
        places: where each kind lies between its uses, if not on the device: "parameters" (``home``),
            "gradients" (``gradient``), "states" (the optimizer's, and ``master``).
        marks: of the members (see ``written_mark``), when they began to show what is off the device.
        is_written: whether somebody has written to what they show, which is no longer what is in the file.
        stays: whether, once gathered in a pass of training, it stays so to its end.
        look: what the parameters show while :func:`shown` is open.
        came: the members whose gradient this backward pass has brought, as parameters.
        in_place: whether finished gradients take the place of the parameters.
        lent: what stands in for the parameters while they do.
    """

    def __init__(self, members: Sequence[ShardedParam]) -> None:
        self.members = members
        self.outer, self.shard_group, self.by_piece = (
            members[0].outer,
            members[0].shard_group,
            members[0].by_piece,
        )
        self.dtype, self.device = members[0].dtype, members[0].full.mesh.device()
        self.size = sum(m.slot for m in members)
        self.elements, self.largest = sum(m.room for m in members), sum(m.largest for m in members)
        self.gradient: torch.Tensor | None = None
        self.home: torch.Tensor | None = None
        self.copied: list[int] = []
        self.own: list[torch.Tensor] | None = None
        self.whole: torch.Tensor | None = None
        self.master: torch.Tensor | None = None
        self.is_trained = members[0].p.requires_grad
        self.number = 0
        self.places: dict[str, Place] = {}
        self.marks: list[tuple[int, int, int]] = []
        self.is_written = False
        self.stays = False
        self.came: list[torch.Tensor] = []
        self.in_place = False
        self.lent: list[InPlaceStandIn] = []
        self._cut: tuple[torch.Tensor, list[torch.Tensor]] | None = None
        self._views: tuple[list[int], Views] | None = None
        self.look: Appearance | None = None
        for i, m in enumerate(members):
            m.number = i
        self._in_row = BufferLayout.of_sizes(
            [m.shard.local_shape for m in members], [m.slot for m in members]
        )
        self._in_line = BufferLayout.of_sizes(
            [m.full.local_shape for m in members], [m.room for m in members]
        )

    @property
    def has_master(self) -> bool:
        """Whether the optimizer updates masters of it."""
        return self.members[0].is_cast and self.is_trained

    @property
    def has_turn(self) -> bool:
        """Whether the optimizer updates it by itself, not with the others."""
        return self.in_place or bool(self.places)

    @property
    def missing(self) -> bool:
        """Whether this backward pass has yet to bring a gradient."""
        return len(self.came) < len(self.members) or len(set(map(id, self.came))) < len(self.members)

    def rows(self, n: int, dtype: torch.dtype, extra: int = 0) -> torch.Tensor:
        """A buffer for what is sent; ``extra`` elements at the end of each row are the caller's."""
        return torch.empty(n, self.size + extra, dtype=dtype, device=self.device)

    def flat(self, dtype: torch.dtype, extra: int = 0) -> torch.Tensor:
        """A buffer for this rank's pieces."""
        flat = torch.empty(self.size + extra, dtype=dtype, device=self.device)
        self._in_row.fill(flat)
        return flat

    def line(self, dtype: torch.dtype) -> torch.Tensor:
        """A buffer for the members, whole along the axis."""
        flat = torch.empty(self.elements, dtype=dtype, device=self.device)
        self._in_line.fill(flat)
        return flat

    def buffer(self, dtype: torch.dtype) -> torch.Tensor:
        """A buffer for what the optimizer updates here."""
        return self.flat(dtype) if self.by_piece else self.line(dtype)

    def slots(self, flat: torch.Tensor) -> Sequence[torch.Tensor]:
        """The members' parts of a flat [..., size]."""
        flat = flat if flat.shape[-1] == self.size else flat[..., : self.size]
        return flat.split([m.slot for m in self.members], -1)

    def pieces(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """This rank's piece of each member in a flat [size], in its own shape."""
        if self._cut is not None and self._cut[0] is flat:
            return self._cut[1]
        views = self._in_row.of(flat)
        if flat is self.home and not self.places:
            self._cut = flat, views  # it stays where it is
        return views

    def wholes(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The members in a flat buffer [elements], each whole along the axis, in its own shape."""
        return self._in_line.of(flat)

    def parts(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """What the optimizer updates of each member here, in such a ``buffer``."""
        return self.pieces(flat) if self.by_piece else self.wholes(flat)

    @property
    def masters(self) -> list[torch.Tensor]:
        """The members' parts of the master, each in its own shape."""
        assert self.master is not None
        return self.parts(self.master)

    def kept(self) -> list[torch.Tensor]:
        """Where the parameters have what the masters are of."""
        if self.home is not None:
            return self.pieces(self.home)
        return self.views().pieces if self.by_piece else self.views().wholes

    # ---- what the parameters show

    def whole_in(self, flat: torch.Tensor) -> Appearance:
        """Whole along the axis, as the model computes with them, in a flat [elements]."""
        return Appearance(self.wholes(flat), [m.full for m in self.members])

    def resting_in(self, home: torch.Tensor) -> Appearance:
        """This rank's pieces between the uses, in a flat [size]."""
        return Appearance(self.pieces(home), [m.rest for m in self.members])

    def updated(self, gradients: Sequence[torch.Tensor | None] | None = None) -> Appearance:
        """What the optimizer updates here: masters, or parameters; whole, or this rank's pieces of either."""
        with raw():
            if self.master is not None:
                tensors = self.masters
            else:
                tensors = self.kept() if self.own is None else self.own
        return Appearance(tensors, [m.updated for m in self.members], gradients)

    def cut_out(self) -> None:
        """Find this rank's pieces to update; copies of those that are ``copied``, one after the other."""
        if not self.copied or self.places:
            return
        with raw(), torch.no_grad():
            self.own = pieces = list(self.views().pieces)
            before = [pieces[i] for i in self.copied]
            slots = [self.members[i].slot for i in self.copied]
            places = BufferLayout.of_sizes([tuple(piece.shape) for piece in before], slots)
            copies = torch.empty(sum(slots), dtype=self.dtype, device=self.device)
            places.fill(copies)
            after = places.of(copies)
            foreach_copy_(after, before)
        for i, copy in zip(self.copied, after, strict=True):
            pieces[i] = copy

    def now(self) -> Appearance:
        """What the parameters show, but for gradients."""
        if self.look is not None:
            return self.look._replace(gradients=None)
        with raw():
            whole = self.views().wholes if self.home is None else None
            tensors = [plain(m.p.data) for m in self.members] if whole is None else whole
            return Appearance(tensors, [m.p._layout for m in self.members])  # type: ignore[attr-defined]

    def show(self, look: Appearance) -> None:
        """Let the parameters show it (called with torch functions left alone)."""
        for m, x, layout in zip(self.members, look.tensors, look.layouts, strict=True):
            show(m.p, x, layout)
        for m, grad in zip(self.members, look.gradients or (), strict=look.gradients is not None):
            _set_grad(m.p, grad)

    def bring_together(self, look: Appearance) -> None:
        """Copy the parameters to what stands in one buffer, and let them show that."""
        with raw():
            for m, part in zip(self.members, look.tensors, strict=True):
                part.copy_(plain(m.p.detach()))
            self.show(look)

    def rooms(self) -> dict[int, int]:
        """By ``id``, the elements that each member has for itself where it is now, if in a flat buffer."""
        if self.own is not None:
            return {id(self.members[i].p): self.members[i].slot for i in self.copied}
        flat = self.master if self.master is not None else self.home if self.by_piece else self.whole
        if flat is None:
            return {}
        starts = (self._in_row if self.by_piece else self._in_line).starts
        first = flat.data_ptr()
        return {
            id(m.p): m.slot if self.by_piece else m.room
            for m, start in zip(self.members, starts, strict=True)
            if _address(m.p) == first + start * flat.itemsize
        }

    def line_up(
        self, n: int, dtype: torch.dtype, tensors: Sequence[torch.Tensor | None], extra: int
    ) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        """Tensors that are whole along the axis one after the other, zeros for those that are missing.

        Returns:
            a buffer [n, rest], cut anywhere; of it ``extra`` elements after the last member, and the members.
        """
        width = -(-(self.elements + extra) // n)
        rows = torch.empty(n, width, dtype=dtype, device=self.device)
        flat = rows.view(-1)
        flat[self.elements :].zero_()
        self._in_line.fill(flat)
        into, outof = [], []
        wholes = self.wholes(flat)
        for part, here in zip(wholes, tensors, strict=True):
            if here is None:
                part.zero_()
            else:
                into.append(part)
                outof.append(here)
        if into:
            foreach_copy_(into, outof)
        return rows, flat[self.elements : self.elements + extra], wholes

    def pack(self, rows: torch.Tensor, wholes: Sequence[torch.Tensor | None]) -> None:
        """Fill rows from tensors that are whole along the axis; zeros for those that are missing."""
        into: list[torch.Tensor] = []
        outof: list[torch.Tensor] = []
        self._in_row.fill(rows)
        for m, part, whole in zip(self.members, self.slots(rows), wholes, strict=True):
            if whole is None:
                part.zero_()
                continue
            here = m.in_whole(whole)
            into += m.in_rows(part, here)
            outof += here
        if into:
            foreach_copy_(into, outof)

    def views(self) -> Views:
        """Of the members as they are, whole along the axis; kept until one has other data."""
        with raw(), torch.no_grad():
            where = [_address(m.p) for m in self.members]
            if self._views is None or self._views[0] != where:
                wholes = [plain(m.p.data) for m in self.members]
                pieces = [m.piece(whole) for m, whole in zip(self.members, wholes, strict=True)]
                self._views = where, Views(wholes, pieces, self.in_wholes(wholes))
            return self._views[1]

    @property
    def memories(self) -> list[int]:
        """Where the members lie that :meth:`views` has seen."""
        return [] if self._views is None else [memory_id(x) for x in self._views[1].wholes]

    def in_wholes(self, wholes: Sequence[torch.Tensor], but: int | None = None) -> list[list[torch.Tensor]]:
        """Where ``unpack`` is to put each member, in tensors that are whole along the axis."""
        return [m.in_whole(whole, but) for m, whole in zip(self.members, wholes, strict=True)]

    def in_rows(
        self, rows: torch.Tensor, places: Sequence[list[torch.Tensor]], but: int | None = None
    ) -> list[torch.Tensor]:
        """Where rows have what belongs to the places that ``in_wholes`` gave."""
        views: list[torch.Tensor] = []
        for m, part, there in zip(self.members, self.slots(rows), places, strict=True):
            views += m.in_rows(part, there, but)
        return views

    def unpack(self, rows: torch.Tensor, places: Sequence[list[torch.Tensor]]) -> None:
        """Copy rows to what ``in_wholes`` gave."""
        into = [view for there in places for view in there]
        if into:
            foreach_copy_(into, self.in_rows(rows, places))


def show(p: torch.Tensor, data: torch.Tensor, layout: Layout) -> None:
    """Let a parameter hold other data, and say how it lies (called with torch functions left alone)."""
    _set_data(p, data)
    stamp(p, layout)


def set_gradient(p: torch.Tensor, grad: torch.Tensor | None) -> None:
    """Give a parameter a gradient, also one on the device while it is off that (called in ``raw``)."""
    if grad is None or grad.device == p.device:
        _set_grad(p, grad)
        return
    data = p.data
    _set_data(p, grad.detach())
    _set_grad(p, grad)
    _set_data(p, data)


@contextmanager
def shown(looks: Sequence[tuple[Chunk, Appearance]]) -> Iterator[None]:
    """While open, the parameters of chunks show this; then what they did, without the gradients shown."""
    before = [(chunk, chunk.look, chunk.now()) for chunk, _ in looks]
    try:
        with raw():
            for chunk, look in looks:
                chunk.look = look
                chunk.show(look)
        yield
    finally:
        with raw():
            for m in (m for chunk, look in looks if look.gradients is not None for m in chunk.members):
                _set_grad(m.p, None)
            for chunk, outer, now in before:
                chunk.look = outer
                chunk.show(now)


ParamKind = tuple[torch.dtype, torch.device, ShardGroup, tuple[int, ...], bool]


def by_unit(members: Sequence[ShardedParam], model: nn.Module) -> list[tuple[list[nn.Module], Chunk]]:
    """Chunks of the parameters of each unit, and the modules that use them.

    A parameter that several units share belongs to the first, and all that hold it use its chunk. What is
    small beside the others (a last norm, say) shares a chunk that stays whole for a pass: less to wait for.
    Of a unit that has but some of its parameters here, the others being on another stage, the modules in it
    are units: it is never called itself.
    """
    by_id = {id(m.p): m for m in members}
    taken: dict[int, Chunk] = {}
    parts: list[tuple[list[nn.Module], list[ShardedParam]]] = []
    within = [part for unit in units(model) for part in _called(unit, by_id.keys())]
    known = {id(unit) for unit in within}
    for unit in within:
        own = parameters_within(unit, but=known - {id(unit)})  # a shared embedding may be in several
        fresh = [m for p in own if (m := by_id.pop(id(p), None)) is not None]
        parts += (([unit], alike) for alike in _alike(fresh).values())
    small = _small([sum(m.chunk_bytes for m in part) for _, part in parts])
    pools: dict[ParamKind, tuple[list[nn.Module], list[ShardedParam]]] = {}
    together: list[tuple[list[nn.Module], list[ShardedParam]]] = []
    for i, (modules, part) in enumerate(parts):
        pool = pools.get(part[0].kind) if i in small else None
        if pool is not None:
            pool[0].extend(modules)
            pool[1].extend(part)
            continue
        together.append((modules, part))
        if i in small:  # where the first stands: as gradients come from the last on, these are whole late
            pools[part[0].kind] = together[-1]
    chunks = [(modules, Chunk(part)) for modules, part in together]
    pooled = {id(part[0]) for _, part in pools.values()}
    for _, chunk in chunks:
        chunk.stays = any(id(m) in pooled for m in chunk.members)
        taken.update({id(m.p): chunk for m in chunk.members})
    users = {id(chunk): modules for modules, chunk in chunks}
    parents: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        for child in module.children():
            parents.setdefault(id(child), []).append(module)
    for module in model.modules():
        for p in own_parameters(module).values():
            shared = None if p is None else taken.get(id(p))
            if shared is not None and not _is_within(module, users[id(shared)], parents):
                users[id(shared)].append(module)
    return chunks


def _is_within(module: nn.Module, users: Sequence[nn.Module], parents: Mapping[int, list[nn.Module]]) -> bool:
    """Whether a module is called by these alone: a module may stand in several others."""
    if any(module is user for user in users):
        return True
    above = parents.get(id(module), ())
    return bool(above) and all(_is_within(parent, users, parents) for parent in above)


def _called(unit: nn.Module, here: Collection[int]) -> list[nn.Module]:
    """A unit, or if only some of its parameters are here, itself and the units within it."""
    is_here = [id(p) in here for p in parameters_in(unit)]
    if all(is_here) or not any(is_here):
        return [unit]
    return [unit, *(part for child in unit.children() for part in _called(child, here))]


class Filling:
    """Which of the parameters that come one after the other share a chunk of about so many megabytes.

    The first chunk is a tenth, so that sending starts early.
    """

    def __init__(self, megabytes: float) -> None:
        self._bytes, self._chunks = megabytes * 1e6, 0
        self._limit = self._bytes / 10
        self._open: dict[Hashable, tuple[int, float]] = {}

    def place(self, kind: Hashable, size: int) -> int:
        """The number of the chunk of the next parameter, with others of its kind."""
        number, filled = self._open.get(kind, (-1, 0.0))
        if number < 0 or filled + size > self._limit:
            self._limit = self._bytes if self._chunks else self._bytes / 10
            number, filled, self._chunks = self._chunks, 0.0, self._chunks + 1
        self._open[kind] = number, filled + size
        return number

    @property
    def state(self) -> Hashable:
        """What decides which chunks all that comes next goes to."""
        filled = {kind: n for kind, (_, n) in self._open.items()}
        return self._limit, frozenset(filled.items())


def by_size(members: Sequence[ShardedParam], megabytes: float) -> list[Chunk]:
    """Chunks of about that size (see :class:`Filling`)."""
    filling, groups = Filling(megabytes), dict[int, list[ShardedParam]]()
    for m in members:
        groups.setdefault(filling.place(m.kind, m.chunk_bytes), []).append(m)
    return [Chunk(group) for group in groups.values()]


def by_part(members: Sequence[ShardedParam], parts: Sequence[Collection[str]]) -> list[list[ShardedParam]]:
    """The members of each part alone, and, last, the others."""
    members_by_part: list[list[ShardedParam]] = [[] for _ in (*parts, None)]
    for m in members:
        numbers = [i for i, names in enumerate(parts) if m.name in names]
        members_by_part[numbers[0] if len(numbers) == 1 else -1].append(m)
    return members_by_part


def copy_smallest(chunks: Sequence[Chunk], most: float) -> Counter[int]:
    """Have the smallest pieces updated as copies, so many that their bytes are at most these.

    Gives how many of all pieces have slots of so many bytes.
    """
    members = sorted(((c, m) for c in chunks for m in c.members), key=lambda both: both[1].slot_bytes)
    counts = Counter(m.slot_bytes for _, m in members)
    for chunk, m in members[: smallest_within(counts, most)[0]]:
        chunk.copied.append(m.number)
    for chunk in chunks:
        chunk.copied.sort()
    return counts


def smallest_within(counts: Mapping[int, int], most: float) -> tuple[int, int]:
    """How many of the smallest slots, and how many bytes of them, are within so many bytes."""
    number = taken = 0
    for size in sorted(counts):
        fit = min(counts[size], int((most - taken) // size) if size else counts[size])
        number, taken = number + fit, taken + fit * size
        if fit < counts[size]:
            break
    return number, taken


def _small(sizes: Sequence[int]) -> set[int]:
    """The numbers of the smallest parts, together no more than a tenth of the largest one."""
    number, _ = smallest_within(Counter(sizes), max(sizes, default=0) / 10)
    return set(sorted(range(len(sizes)), key=lambda i: sizes[i])[:number])


def _alike(members: Sequence[ShardedParam]) -> dict[ParamKind, list[ShardedParam]]:
    """Members apart by dtype, device, axes, and whether they are trained."""
    groups: dict[ParamKind, list[ShardedParam]] = {}
    for m in members:
        groups.setdefault(m.kind, []).append(m)
    return groups
