"""Chunks: the parameters of some modules as one flat buffer, which moves as one.

Along the data axis a parameter is cut on one dim, like any ``Shard``. What a chunk sends are rows, one
for each coordinate: the pieces of all its members, one after the other, each padded to the largest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, repeat
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn
from torch._C import DisableTorchFunctionSubclass as raw

from espalier.layout import Layout, chunk_bounds
from espalier.mesh import Mesh
from espalier.mesh.parts import joined
from espalier.parallel.offload import Place
from espalier.tensor import plain, stamp

if TYPE_CHECKING:
    from espalier.parallel.data.inplace import Lent

_address, _as_strided = torch._C.TensorBase.data_ptr, torch._C.TensorBase.as_strided
_set_data = vars(torch._C.TensorBase)["data"].__set__


class Lane(NamedTuple):
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
    def along(mesh: Mesh, axes: Sequence[int]) -> Lane:
        """That of some axes; those of size 1 cut nothing."""
        busy = tuple(a for a in axes if mesh.shape[a] > 1) or (axes[-1],)
        sizes = tuple(mesh.shape[a] for a in busy)
        return (
            Lane(mesh, busy[0], busy, sizes) if len(busy) == 1 else Lane(joined(mesh, busy), 0, busy, sizes)
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


class Member:
    """One parameter in a chunk.

    Attributes:
        name: of the parameter.
        p: the parameter.
        full: its layout while the model computes with it: whole along the data axis.
        shard: its layout cut along the data axis; equal to ``full`` for a parameter without dims.
        outer: the mesh axes along which it is the same, and so is all that belongs to it, once the addends of
            its gradient are summed.
        lane: those along which it is the same while the model computes with it, and is cut.
        dim: the dim that is cut; None for one without dims, which every rank holds.
        counts: whether no coordinate before this one, along any axis, holds the same piece.
        largest: its elements on the rank that has most of it, by which all ranks decide alike.
        slot: elements that it takes in each row.
        grains: the largest powers of two, up to 64, that divide the elements it takes whole, and in a row.
        dtype: in which the model computes with it.
        is_cast: whether that is not the dtype given.
        rest: the layout that it bears while it is cut; a twin of ``shard`` where it is gathered for its uses.
        number: among the members of its chunk.
        is_written: whether others have changed its values so that its version does not tell.
    """

    def __init__(
        self,
        name: str,
        p: nn.Parameter,
        full: Layout,
        outer: tuple[int, ...],
        lane: Lane,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.name, self.p, self.full, self.outer, self.lane = name, p, full, outer, lane
        self.is_cast = dtype is not None and p.is_floating_point()
        self.dtype = dtype if dtype is not None and self.is_cast else p.dtype
        self._n = lane.n
        self.dim = cut_dim(full.padded_shape, self._n)  # the same on all ranks
        self.shard = full
        if self.dim is not None:
            for axis in lane.axes:
                self.shard = self.shard.with_axis(axis, self.dim)
        shared = set(range(full.mesh.ndim)) - set(self.shard.order)
        self.counts = not any(full.mesh.coordinate[a] for a in shared)
        shape = full.local_shape
        self.rest = self.shard
        self.number, self.is_written = 0, False
        self.slot = 1
        if self.dim is not None:
            self.slot = math.prod(shape[: self.dim]) * -(-shape[self.dim] // self._n)
            self.slot *= math.prod(shape[self.dim + 1 :])
            self._bounds = lane.piece(shape[self.dim], lane.here)
        self.grains = self._grains()
        self.even = self.dim == 0 and shape[0] % self._n == 0
        self.size, self.largest = math.prod(shape), math.prod(full.padded_shape)

    def _grains(self) -> tuple[int, int]:
        full = self.full
        parts = [math.prod(full.mesh.shape[a] for a in cut) for cut in full.cuts]
        sizes = zip(full.padded_shape, parts, full.shape, strict=True)
        alike = [n if n * k == whole else 1 for n, k, whole in sizes]  # on all ranks
        whole = math.prod(alike)
        if self.dim is not None:
            alike[self.dim] = -(-alike[self.dim] // self._n)
        return math.gcd(whole, 64), math.gcd(math.prod(alike), 64)

    def piece(self, full: torch.Tensor, coordinate: int | None = None) -> torch.Tensor:
        """The view, of a local tensor that is whole along the axis, that a coordinate holds."""
        if self.dim is None:
            return full
        if coordinate is None:
            return full.narrow(self.dim, *self._bounds)
        return full.narrow(self.dim, *self.lane.piece(full.shape[self.dim], coordinate))

    def in_whole(self, full: torch.Tensor, but: int | None = None) -> list[torch.Tensor]:
        """Views of a tensor whole along the axis, of all coordinates or all ``but`` one: as ``in_rows``."""
        if self.even and full.is_contiguous():
            return _without(full.view(self._n, self.slot), but)
        return [self.piece(full, i) for i in self._filled() if i != but]

    def in_rows(
        self, rows: torch.Tensor, like: Sequence[torch.Tensor], but: int | None = None
    ) -> list[torch.Tensor]:
        """Views of rows [n, slot] in the shapes of what ``in_whole`` gave."""
        parts = _without(rows, but)
        if [part.shape for part in parts] == [x.shape for x in like]:
            return parts
        both = zip((i for i in self._filled() if i != but), like, strict=True)
        return [rows[i, : piece.numel()].view(piece.shape) for i, piece in both]

    def _filled(self) -> list[int]:
        """The coordinates that have something of it."""
        if self.dim is None or not self.size:
            return list(range(self._n)) if self.size else []
        size = self.full.local_shape[self.dim]
        return [i for i in range(self._n) if self.lane.piece(size, i)[1]]


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


class Places(NamedTuple):
    """Of tensors one after the other in a flat buffer: their shapes, their strides, where each begins."""

    shapes: list[tuple[int, ...]]
    strides: list[tuple[int, ...]]
    starts: list[int]

    @staticmethod
    def of_sizes(
        shapes: Sequence[tuple[int, ...]], sizes: Sequence[int], order: Sequence[int] | None = None
    ) -> Places:
        """Of tensors that take so many elements each; ``order``: in which they lie, if not as given."""
        strides = [tuple(math.prod(shape[d + 1 :]) for d in range(len(shape))) for shape in shapes]
        order = range(len(sizes)) if order is None else order
        ends = accumulate(sizes[i] for i in order)
        starts = {i: end - sizes[i] for i, end in zip(order, ends, strict=True)}
        return Places(list(shapes), strides, [starts[i] for i in range(len(sizes))])

    def of(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Them, as views."""
        if flat.stride() != (1,):  # one element for all, where there are no values
            parts = zip(self.shapes, self.starts, strict=True)
            return [flat[start : start + math.prod(shape)].view(shape) for shape, start in parts]
        first = flat.storage_offset()
        starts = [first + start for start in self.starts] if first else self.starts
        return list(map(_as_strided, repeat(flat), self.shapes, self.strides, starts))


class Chunk:
    """Members of one dtype and device, cut and summed alike, and the flat buffers that they share.

    Attributes:
        members: in the order of their slots (whole, they lie in another).
        outer, lane: theirs.
        dtype: in which the model computes with them.
        device: on which it does.
        size: elements of a row.
        elements: of the members, whole along the axis; ``largest``: on the rank that has most of them.
        gradient: flat [size], this rank's pieces of the sums; where the stage keeps gradients whole, these,
            as in ``line_up``, until the parameters have them; None while there are none.
        home: flat [size], this rank's pieces of the parameters, where the stage cuts these.
        own: this rank's pieces of the parameters while they are updated, where the stage cuts states alone.
        master: flat, the parameters in float32, where the optimizer is to update these: [size], this rank's
            pieces, where the stage cuts states, else whole.
        number: of the chunk, the same on all ranks.
        places: where each kind lies between its uses, if not on the device: "parameters" (``home``),
            "gradients" (``gradient``), "states" (the optimizer's, and ``master``).
        marks: of the members (see ``written_mark``), when they began to show what is off the device.
        is_written: whether somebody has written to what they show, which is no longer what is in the file.
        stays: whether, once gathered in a pass of training, it stays so to its end.
        came: the members whose gradient this backward pass has brought, as parameters.
        in_place: whether finished gradients take the place of the parameters.
        lent: what stands in for the parameters while they do.
    """

    def __init__(self, members: Sequence[Member]) -> None:
        # those of round sizes first: so each begins where a multiple of its grain is, and nothing is padded
        self.members = members = sorted(members, key=lambda m: -m.grains[1])
        self.outer, self.lane = members[0].outer, members[0].lane
        self.dtype, self.device = members[0].dtype, members[0].full.mesh.device()
        self.size = sum(m.slot for m in members)
        self.elements, self.largest = sum(m.size for m in members), sum(m.largest for m in members)
        self.gradient: torch.Tensor | None = None
        self.home: torch.Tensor | None = None
        self.own: list[torch.Tensor] | None = None
        self.master: torch.Tensor | None = None
        self.number = 0
        self.places: dict[str, Place] = {}
        self.marks: list[tuple[int, int, int]] = []
        self.is_written = False
        self.stays = False
        self.came: list[torch.Tensor] = []
        self.in_place = False
        self.lent: list[Lent] = []
        self._cut: tuple[torch.Tensor, list[torch.Tensor]] | None = None
        self._views: tuple[list[int], Views] | None = None
        for i, m in enumerate(members):
            m.number = i
        self._in_row = Places.of_sizes([m.shard.local_shape for m in members], [m.slot for m in members])
        in_line = sorted(range(len(members)), key=lambda i: -members[i].grains[0])
        shapes = [m.full.local_shape for m in members]
        self._in_line = Places.of_sizes(shapes, [m.size for m in members], in_line)

    @property
    def has_master(self) -> bool:
        """Whether the optimizer updates masters of it."""
        return self.members[0].is_cast and self.members[0].p.requires_grad

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
        return torch.empty(self.size + extra, dtype=dtype, device=self.device)

    def slots(self, flat: torch.Tensor) -> Sequence[torch.Tensor]:
        """The members' parts of a flat [..., size]."""
        flat = flat if flat.shape[-1] == self.size else flat[..., : self.size]
        return flat.split([m.slot for m in self.members], -1)

    def pieces(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """This rank's piece of each member in a flat [size], in its own shape."""
        if self._cut is not None and self._cut[0] is flat:
            return self._cut[1]
        found = self._in_row.of(flat)
        if flat is self.home and not self.places:
            self._cut = flat, found  # it stays where it is
        return found

    def wholes(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The members in a flat buffer, without gaps, each whole along the axis, in its own shape."""
        return self._in_line.of(flat)

    def line_up(
        self, n: int, dtype: torch.dtype, given: Sequence[torch.Tensor | None], extra: int
    ) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        """Tensors that are whole along the axis one after the other, zeros for those that are missing.

        Returns:
            a buffer [n, rest], cut anywhere; of it ``extra`` elements after the last member, and the members.
        """
        width = -(-(self.elements + extra) // n)
        rows = torch.empty(n, width, dtype=dtype, device=self.device)
        flat = rows.view(-1)
        flat[self.elements :].zero_()
        into, outof = [], []
        wholes = self.wholes(flat)
        for part, here in zip(wholes, given, strict=True):
            if here is None:
                part.zero_()
            else:
                into.append(part)
                outof.append(here)
        if into:
            torch._foreach_copy_(into, outof)
        return rows, flat[self.elements : self.elements + extra], wholes

    def pack(self, rows: torch.Tensor, wholes: Sequence[torch.Tensor | None]) -> None:
        """Fill rows from tensors that are whole along the axis; zeros for those that are missing."""
        into: list[torch.Tensor] = []
        outof: list[torch.Tensor] = []
        for m, part, whole in zip(self.members, self.slots(rows), wholes, strict=True):
            if whole is None:
                part.zero_()
                continue
            here = m.in_whole(whole)
            into += m.in_rows(part, here)
            outof += here
        if into:
            torch._foreach_copy_(into, outof)

    def views(self) -> Views:
        """Of the members as they are, whole along the axis; kept until one has other data."""
        with raw(), torch.no_grad():
            where = [_address(m.p) for m in self.members]
            if self._views is None or self._views[0] != where:
                wholes = [plain(m.p.data) for m in self.members]
                pieces = [m.piece(whole) for m, whole in zip(self.members, wholes, strict=True)]
                self._views = where, Views(wholes, pieces, self.in_wholes(wholes))
            return self._views[1]

    def in_wholes(self, wholes: Sequence[torch.Tensor], but: int | None = None) -> list[list[torch.Tensor]]:
        """Where ``unpack`` is to put each member, in tensors that are whole along the axis."""
        return [m.in_whole(whole, but) for m, whole in zip(self.members, wholes, strict=True)]

    def in_rows(
        self, rows: torch.Tensor, places: Sequence[list[torch.Tensor]], but: int | None = None
    ) -> list[torch.Tensor]:
        """Where rows have what belongs to the places that ``in_wholes`` gave."""
        found: list[torch.Tensor] = []
        for m, part, there in zip(self.members, self.slots(rows), places, strict=True):
            found += m.in_rows(part, there, but)
        return found

    def unpack(self, rows: torch.Tensor, places: Sequence[list[torch.Tensor]]) -> None:
        """Copy rows to what ``in_wholes`` gave."""
        into = [view for there in places for view in there]
        if into:
            torch._foreach_copy_(into, self.in_rows(rows, places))


def show(p: torch.Tensor, data: torch.Tensor, layout: Layout) -> None:
    """Let a parameter hold other data, and say how it lies (called with torch functions left alone)."""
    _set_data(p, data)
    stamp(p, layout)


def line_up(chunk: Chunk) -> None:
    """Put a chunk's parameters, whole, into one buffer."""
    with raw():
        flat = torch.empty(chunk.elements, dtype=chunk.dtype, device=chunk.device)
        for m, part in zip(chunk.members, chunk.wholes(flat), strict=True):
            part.copy_(plain(m.p.detach()))
            show(m.p, part, m.full)
