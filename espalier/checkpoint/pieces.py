"""Who writes what: each box of a tensor once, by one of the ranks that hold it, all about as much."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch

from espalier.checkpoint.frames import LARGEST
from espalier.layout import Layout, chunk_bounds, local_box
from espalier.layout.regions import Box

SHARED = 1 << 20  # bytes of a box from which on those that hold it write a part each


class Lying(NamedTuple):
    """A tensor, as this rank holds it.

    Attributes:
        local: what is here, plain; None where only the others' part is to be told.
        layout: how it lies.
        steady: whether nothing but updates changes it.
    """

    local: torch.Tensor
    layout: Layout
    steady: bool = False


class Piece(NamedTuple):
    """What this rank writes of a tensor: the values of a box of it."""

    name: str
    box: Box
    values: torch.Tensor
    steady: bool = False


class _Place(NamedTuple):
    """What is here of tensors that lie alike: a box, as which of how many copies, among whom."""

    box: Box
    n: int
    here: int
    group: tuple[object, ...]
    first: bool


def pieces(tree: Mapping[str, Lying]) -> list[Piece]:
    """What this rank writes. All ranks have the tree in one order.

    Raises:
        ValueError: a tensor is Partial.
    """
    found = []
    written: dict[tuple[object, ...], list[int]] = {}  # bytes, of the ranks that hold the same
    places: dict[Layout, _Place] = {}  # parameters share layouts with states
    for name, (local, layout, steady) in tree.items():
        if not layout.is_firm:
            raise ValueError(f"{name} is {layout!r}: sums that are still to be done cannot be saved.")
        if not layout.mesh.is_member:
            continue
        if layout not in places:
            first = not any(layout.mesh.coordinate[a] for a in layout.order)
            places[layout] = _Place(local_box(layout), *_copies(layout), first)
        box, n, here, group, first = places[layout]
        size = math.prod(box.sizes) * local.element_size()
        share: Box | None = box
        if size >= SHARED and n > 1:
            share = next(iter(_cut(box, n, here)), None)
        else:
            loads = written.setdefault(group, [0] * n)
            least = loads.index(min(loads))
            loads[least] += size
            if least != here:
                share = None
        if share is not None and (size or first):
            for part in share.parts(LARGEST // local.element_size()):
                found.append(Piece(name, part, local[part.within(box)], steady))
    return found


def _copies(layout: Layout) -> tuple[int, int, tuple[object, ...]]:
    """How many ranks hold the same box, which of them this is, and what they have in common."""
    mesh = layout.mesh
    cut = set(layout.order)
    along = [a for a in range(mesh.ndim) if a not in cut and mesh.shape[a] > 1]
    here = 0
    for a in along:
        here = here * mesh.shape[a] + mesh.coordinate[a]
    return math.prod(mesh.shape[a] for a in along), here, (tuple(mesh.ranks), tuple(along))


def _cut(box: Box, n: int, index: int) -> Iterator[Box]:
    """Part ``index`` of n along the longest dim; none if that is too short."""
    dim = max(range(len(box.sizes)), key=lambda d: box.sizes[d])
    start, length = chunk_bounds(box.sizes[dim], n, index)
    if length:
        yield box.narrowed(dim, start, length)
