"""The layout: mesh + one state per axis + global shape; immutable and interned.

Inside, an axis' state is a small code, so that layouts are cheap to build, hash and compare:

====================  ==============================================================
``R``                 replicated; so is the gradient
``D``                 replicated, *deferred*: its gradient is left Partial (a sum over ranks)
``0, 1, 2, ...``      sharded on that dim
``"sum"``, ``"avg"``  Partial: the value is that reduction of what the ranks hold
====================  ==============================================================

Of several Partial axes, the last is reduced first, where that makes a difference (max beside sum).

``D`` is a value whose gradient's reduction is put off: to where it was computed from ``R``, or, for a
parameter, to the engine. The distinction is that of Megatron's f operator and of ``pvary`` in JAX's
shard_map; the letters of others stand in :mod:`espalier.layout.transitions`.
"""

from __future__ import annotations

import math
import operator
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from espalier.mesh import Mesh
from espalier.mesh.mesh import MeshLike, as_mesh
from espalier.texts import expect

AxisState = int | str
R: Final = "R"
D: Final = "D"
REDUCTIONS: Final = ("sum", "avg", "max", "min", "product")

_interned: weakref.WeakValueDictionary[Any, Layout] = weakref.WeakValueDictionary()


class Layout:
    """How one global tensor lies on a mesh. Equal layouts are one object.

    Args:
        mesh: an :class:`espalier.Mesh` or torch ``DeviceMesh``.
        placements: one of ``Replicate()``, ``Shard(dim)``, ``Partial(op)`` for each mesh axis.
        shape: the global shape.
        order: the axes in the order in which they cut, outermost first, where two shard the same
            dim; by default the mesh's own order.
        deferred: axes (index or name), replicated ones, whose gradient is left Partial.
        varied: the old name of ``deferred``.

    Attributes:
        axes: one state code per axis (see the module's docstring).
        cuts: for each dim the axes that cut it, outermost first.
        local_shape: the shape of what this rank holds.
        padded_shape: the largest local shape on any rank.
        is_plain: every rank holds the whole value (axes of size 1 aside).
        is_firm: no axis is Partial.
        own: this layout; of a loan's layout (see :meth:`loan`) that of the tensor itself.

    Raises:
        ValueError: wrong number of placements, a dim out of range, an unknown placement.
    """

    __slots__ = (
        "__weakref__",
        "_gradient",
        "_loan",
        "_placements",
        "_summed",
        "axes",
        "cuts",
        "is_firm",
        "is_plain",
        "local_shape",
        "mesh",
        "own",
        "padded_shape",
        "shape",
        "stride",
    )

    mesh: Mesh
    shape: tuple[int, ...]
    axes: tuple[AxisState, ...]
    cuts: tuple[tuple[int, ...], ...]
    local_shape: tuple[int, ...]
    padded_shape: tuple[int, ...]
    stride: tuple[int, ...]
    is_plain: bool
    is_firm: bool
    own: Layout
    _loan: weakref.ref[Layout] | None
    _gradient: Layout | None
    _summed: Layout | None
    _placements: tuple[Placement, ...]

    def __new__(
        cls,
        mesh: MeshLike,
        placements: Sequence[Placement],
        shape: Sequence[int],
        *,
        order: Sequence[int | str] | None = None,
        deferred: Sequence[int | str] = (),
        varied: Sequence[int | str] | None = None,
    ) -> Layout:
        if varied is not None:
            warnings.warn("Layout(varied=) is now called deferred=.", DeprecationWarning, stacklevel=2)
            deferred = varied
        mesh = as_mesh(mesh)
        shape = _sizes(shape)
        axes = _states(mesh, placements, shape)
        for axis in deferred:
            i = mesh.axis(axis)
            if axes[i] not in (R, D):
                raise ValueError(
                    f"Axis {mesh.names[i]!r} cannot be deferred: the tensor is {placements[i]} along it, "
                    "and only a replicated value has a gradient that can be left Partial."
                )
            axes[i] = D
        if isinstance(order, str | int):
            raise TypeError(
                f"order is {order!r}, expected axes in the order in which they cut: ['tensor', 'data']."
            )
        rank = {mesh.axis(a): i for i, a in enumerate(order)} if order is not None else {}
        cutting: list[list[int]] = [[] for _ in shape]
        for i, state in enumerate(axes):
            if isinstance(state, int):
                cutting[state].append(i)
        cuts = tuple(tuple(sorted(c, key=lambda a: (rank.get(a, len(axes)), a))) for c in cutting)
        return Layout.of(mesh, tuple(axes), cuts, shape)

    @staticmethod
    def of(
        mesh: Mesh, axes: tuple[AxisState, ...], cuts: tuple[tuple[int, ...], ...], shape: tuple[int, ...]
    ) -> Layout:
        """The layout with these state codes and cuts, which must agree (the library's own door)."""
        shape = torch.Size(shape)
        key = (id(mesh), axes, cuts, shape)
        layout = _interned.get(key)
        if layout is None:
            layout = _build(mesh, axes, cuts, shape)
            _interned[key] = layout
        return layout

    @staticmethod
    def replicated(mesh: Mesh, shape: Sequence[int]) -> Layout:
        """The layout that holds everything everywhere."""
        shape = tuple(shape)
        return Layout.of(mesh, (R,) * mesh.ndim, ((),) * len(shape), shape)

    @property
    def placements(self) -> tuple[Placement, ...]:
        """Torch's placements, one per axis."""
        return self._placements

    @property
    def ndim(self) -> int:
        """Number of dims of the tensor."""
        return len(self.shape)

    @property
    def deferred(self) -> tuple[int, ...]:
        """The replicated axes along which the gradient is left Partial."""
        return tuple(i for i, s in enumerate(self.axes) if s == D)

    @property
    def partial(self) -> tuple[int, ...]:
        """The axes along which the value is a reduction still to be done."""
        return tuple(i for i, s in enumerate(self.axes) if is_partial(s))

    @property
    def order(self) -> tuple[int, ...]:
        """The cutting axes, dim by dim, outermost first."""
        return tuple(a for cut in self.cuts for a in cut)

    def with_axis(self, axis: int, state: AxisState) -> Layout:
        """This layout with one axis in another state; a new cut goes innermost."""
        axes = (*self.axes[:axis], state, *self.axes[axis + 1 :])
        cuts = tuple(tuple(a for a in cut if a != axis) for cut in self.cuts)
        if isinstance(state, int):
            cuts = (*cuts[:state], (*cuts[state], axis), *cuts[state + 1 :])
        return Layout.of(self.mesh, axes, cuts, self.shape)

    @property
    def undeferred(self) -> Layout:
        """This layout, of a value whose gradient is reduced where it is made."""
        if not self.deferred:
            return self
        return Layout.of(self.mesh, tuple(R if s == D else s for s in self.axes), self.cuts, self.shape)

    @property
    def summed(self) -> Layout:
        """This layout where nothing is left to sum: along axes of one rank."""
        if self._summed is None:
            sizes = self.mesh.shape
            axes = tuple(R if n == 1 and is_partial(s) else s for n, s in zip(sizes, self.axes, strict=True))
            self._summed = Layout.of(self.mesh, axes, self.cuts, self.shape)
        return self._summed

    def with_deferred(self, axes: Sequence[int]) -> Layout:
        """This layout with the replicated ones among ``axes`` deferred."""
        states = tuple(D if i in axes and s == R else s for i, s in enumerate(self.axes))
        return Layout.of(self.mesh, states, self.cuts, self.shape)

    def whole_stride(self, local: Sequence[int]) -> tuple[int, ...]:
        """The strides of the global tensor whose part here has the strides ``local``.

        Its dims have the same order in memory, and the same gaps between them. Of equal strides that of a dim
        of one row is the inner one. Of a part without elements the order is not always known.
        """
        here, padded, whole = self.local_shape, self.padded_shape, self.shape
        strides = [0] * len(whole)
        # of the next dim if there is no gap before it: its strides here, and in the whole
        dense, grown = {1}, 1
        last = 1, 1  # what a gap is measured by
        for d in sorted(range(len(whole)), key=lambda d: (local[d], here[d] > 1, -d)):
            step = local[d]
            if step == 0 and 0 not in here:
                continue  # expanded
            strides[d] = grown if step in dense or 0 in here else step * last[1] // last[0]
            # a part that is smaller than others may lie in as much room
            dense = {step * max(n, 1) for n in (here[d], padded[d])} | {strides[d] * max(whole[d], 1)}
            grown = strides[d] * max(whole[d], 1)
            last = (step, strides[d]) if here[d] == whole[d] else (step * max(here[d], 1), grown)
        return tuple(strides)

    def loan(self) -> Layout:
        """A twin of this layout, not equal to it: what views of a moved copy bear.

        The dispatcher keeps calls apart by layouts. So it comes upon such a view where it looks a call up,
        and other calls pay nothing for that (see ``espalier.tensor.loans``).
        """
        twin = self._loan() if self._loan is not None else None
        if twin is None:
            twin = object.__new__(Layout)
            for name in Layout.__slots__:
                if name != "__weakref__":
                    setattr(twin, name, getattr(self, name))
            twin.own = self
            self._loan = weakref.ref(twin)
        return twin

    def __reduce__(self) -> Any:
        layout = self.own
        return known_layout, (layout.mesh, layout.axes, layout.cuts, tuple(layout.shape))

    def __copy__(self) -> Layout:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Layout:
        return self

    def __repr__(self) -> str:
        parts = []
        for name, n, state in zip(self.mesh.names, self.mesh.shape, self.axes, strict=True):
            parts.append(f"{name}{n}:{state_name(state)}")
        swapped = [cut for cut in self.cuts if list(cut) != sorted(cut)]
        if swapped:
            names = self.mesh.names
            parts.append("cut " + ", ".join(" then ".join(names[a] for a in cut) for cut in swapped))
        return f"Layout({list(self.shape)} {' '.join(parts)})"


def any_alive() -> bool:
    """Whether there is any layout, and so may be a DTensor."""
    return bool(_interned)


def known_layout(
    mesh: Mesh, axes: Sequence[AxisState], cuts: Sequence[Sequence[int]], shape: Sequence[int]
) -> Layout:
    """The layout that a pickle names."""
    axes = [D if state == "V" else state for state in axes]  # as it was called once
    return Layout.of(mesh, tuple(axes), tuple(map(tuple, cuts)), tuple(shape))


def same_data(a: Layout, b: Layout) -> bool:
    """Whether two layouts differ in nothing but axes of size 1, forward and backward."""
    if a is b:
        return True
    sizes = a.mesh.shape
    return all(n == 1 or s == t for n, s, t in zip(sizes, a.axes, b.axes, strict=True)) and all(
        [x for x in cut if sizes[x] > 1] == [x for x in other if sizes[x] > 1]
        for cut, other in zip(a.cuts, b.cuts, strict=True)
    )


def is_partial(state: AxisState) -> bool:
    """Whether a state code says Partial."""
    return state in REDUCTIONS


def state_name(state: AxisState) -> str:
    """A state code in print: ``R``, ``D``, ``S(0)``, ``P(sum)``."""
    return f"S({state})" if isinstance(state, int) else f"P({state})" if is_partial(state) else state


def placement_of(state: AxisState) -> Placement:
    """Torch's placement for a state code."""
    if isinstance(state, int):
        return Shard(state)
    return Replicate() if state in (R, D) else Partial(state)


def normal_dim(dim: int, ndim: int, what: str = "dim") -> int:
    """A dim counted from the front.

    Raises:
        ValueError: the dim is out of range.
    """
    if not -max(ndim, 1) <= dim < max(ndim, 1):
        raise ValueError(f"{what} {dim} is out of range for a tensor of {ndim} dims ({-ndim} to {ndim - 1}).")
    return dim % ndim if ndim else 0


def _sizes(shape: Sequence[int]) -> tuple[int, ...]:
    """A shape, in Python's numbers.

    Raises:
        TypeError: these are no whole numbers.
        ValueError: one is below 0.
    """
    try:
        sizes = tuple(map(operator.index, shape))
    except TypeError:
        given = list(shape) if isinstance(shape, list | tuple) else shape
        raise TypeError(f"The shape is {given!r}, expected whole numbers, one for each dim.") from None
    if any(n < 0 for n in sizes):
        raise ValueError(f"The shape is {list(sizes)}, expected numbers of 0 or more.")
    return sizes


def _states(mesh: Mesh, placements: Sequence[Placement], shape: tuple[int, ...]) -> list[AxisState]:
    if not isinstance(placements, list | tuple):
        expect(
            "placements", placements, Sequence, f"a list, one for each of the axes {', '.join(mesh.names)}"
        )
    if len(placements) != mesh.ndim:
        raise ValueError(
            f"{len(placements)} placement(s) {list(placements)} given for {mesh!r}; expected {mesh.ndim}, "
            f"one for each of the axes {', '.join(mesh.names)}."
        )
    states: list[AxisState] = []
    for name, placement in zip(mesh.names, placements, strict=True):
        if isinstance(placement, Shard):
            if not shape:
                raise ValueError(f"{placement} on axis {name!r}: a tensor without dims cannot be sharded.")
            states.append(normal_dim(placement.dim, len(shape), f"{placement} on axis {name!r}: dim"))
        elif isinstance(placement, Replicate):
            states.append(R)
        # not isinstance: torch's private kinds of Partial reduce otherwise than their reduce_op says
        elif type(placement) is Partial and placement.reduce_op in REDUCTIONS:
            states.append(placement.reduce_op)
        else:
            raise ValueError(
                f"Axis {name!r}: unknown placement {placement!r}; expected Replicate(), Shard(dim) or "
                f"Partial(op) with op one of {', '.join(REDUCTIONS)}."
            )
    return states


def _build(
    mesh: Mesh, axes: tuple[AxisState, ...], cuts: tuple[tuple[int, ...], ...], shape: tuple[int, ...]
) -> Layout:
    self = object.__new__(Layout)
    self.mesh, self.axes, self.cuts, self.shape = mesh, axes, cuts, shape
    self.local_shape = local_sizes(shape, cuts, mesh.shape, mesh.coordinate)
    self.padded_shape = local_sizes(shape, cuts, mesh.shape, (0,) * mesh.ndim)
    self._gradient = self._loan = self._summed = None
    self.own = self
    self.is_firm = not any(is_partial(s) for s in axes)
    self.is_plain = all(n == 1 or s == R for n, s in zip(mesh.shape, axes, strict=True))
    self._placements = tuple(placement_of(s) for s in axes)
    stride, step = [], 1
    for n in reversed(shape):
        stride.append(step)
        step *= max(n, 1)
    self.stride = tuple(reversed(stride))
    return self


# ---- which box of the global tensor each rank holds


class Box(NamedTuple):
    """A box of the global tensor: where it starts and how long it is along each dim."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def slices(self) -> tuple[slice, ...]:
        """The index that takes this box from the global tensor."""
        return tuple(slice(o, o + n) for o, n in zip(self.offsets, self.sizes, strict=True))

    def within(self, outer: Box) -> tuple[slice, ...]:
        """The index that takes this box from what holds ``outer``."""
        return Box(
            tuple(o - at for o, at in zip(self.offsets, outer.offsets, strict=True)), self.sizes
        ).slices

    def parts(self, most: int) -> Iterator[Box]:
        """Boxes of at most so many elements, or of one, each contiguous in this one; in order."""
        if math.prod(self.sizes) <= max(most, 1):
            yield self
            return
        dim = next(d for d, n in enumerate(self.sizes) if n > 1)
        rows = max(1, most // math.prod(self.sizes[dim + 1 :]))
        for start in range(0, self.sizes[dim], rows):
            yield from self.narrowed(dim, start, min(rows, self.sizes[dim] - start)).parts(most)

    def narrowed(self, dim: int, start: int, length: int) -> Box:
        """Part of it along a dim."""
        offsets, sizes = list(self.offsets), list(self.sizes)
        offsets[dim] += start
        sizes[dim] = length
        return Box(tuple(offsets), tuple(sizes))


def overlap(a: Box, b: Box) -> Box | None:
    """What two boxes have in common; None if that is nothing."""
    offsets = tuple(map(max, a.offsets, b.offsets))
    ends = [min(o + n, p + m) for o, n, p, m in zip(a.offsets, a.sizes, b.offsets, b.sizes, strict=True)]
    sizes = tuple(end - start for start, end in zip(offsets, ends, strict=True))
    return Box(offsets, sizes) if all(n > 0 for n in sizes) else None


def local_box(layout: Layout, coordinate: tuple[int, ...] | None = None) -> Box:
    """The box that the rank at ``coordinate`` (by default this one) holds."""
    where = layout.mesh.coordinate if coordinate is None else coordinate
    pairs = [
        bounds(n, cut, layout.mesh.shape, where) for n, cut in zip(layout.shape, layout.cuts, strict=True)
    ]
    return Box(tuple(p[0] for p in pairs), tuple(p[1] for p in pairs))


def may_be_empty(layout: Layout) -> bool:
    """Whether some rank holds nothing of a tensor that has elements."""
    last = tuple(n - 1 for n in layout.mesh.shape)  # it holds the smallest piece of each dim
    return 0 in local_sizes(layout.shape, layout.cuts, layout.mesh.shape, last) and 0 not in layout.shape


# ---- how a dim is cut: as ``torch.chunk`` does, in pieces of ``ceil(size / n)``, the last smaller or empty
#
# Where two axes cut one dim, the inner axis cuts each piece of the outer one.


def chunk_bounds(size: int, n: int, index: int) -> tuple[int, int]:
    """Start and length of piece ``index`` of ``n`` of a dim of ``size``, as ``torch.chunk`` cuts."""
    piece = -(-size // n)
    start = min(index * piece, size)
    return start, min(piece, size - start)


def bounds(
    size: int, cut: tuple[int, ...], shape: tuple[int, ...], coordinate: Sequence[int] | Mapping[int, int]
) -> tuple[int, int]:
    """Start and length of a dim that the axes ``cut`` (outermost first) have cut."""
    start = 0
    for axis in cut:
        begin, size = chunk_bounds(size, shape[axis], coordinate[axis])
        start += begin
    return start, size


def local_sizes(
    global_shape: tuple[int, ...],
    cuts: tuple[tuple[int, ...], ...],
    shape: tuple[int, ...],
    coordinate: tuple[int, ...],
) -> tuple[int, ...]:
    """The local shape at a coordinate of a mesh of that shape."""
    return torch.Size(
        bounds(n, cut, shape, coordinate)[1] if cut else n for n, cut in zip(global_shape, cuts, strict=True)
    )


def same_cuts(size: int, factor: int, sizes: tuple[int, ...]) -> bool:
    """Whether cutting ``size * factor`` by the axis sizes, one after another, cuts at multiples of factor.

    True means that a dim may be split into (size, factor), or merged from it, with each rank on its own.
    """
    pieces = {size}
    for n in sizes:
        nxt = set()
        for piece in pieces:
            for index in range(n):
                start, length = chunk_bounds(piece, n, index)
                if (start * factor, length * factor) != chunk_bounds(piece * factor, n, index):
                    return False
                nxt.add(length)
        pieces = nxt
    return True
