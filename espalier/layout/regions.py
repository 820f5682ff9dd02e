"""Regions: which box of the global tensor each rank holds.

A dim is cut as ``torch.chunk`` cuts it: pieces of ``ceil(size / n)``, the last ones smaller or
empty. Where two axes cut one dim, the inner axis cuts each piece of the outer one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from espalier.layout.layout import Layout


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
