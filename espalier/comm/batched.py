"""Collectives of a backend whose own send equal pieces, all in one call: NCCL's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from espalier.comm.wire import as_wire, pad_to, summable
from espalier.layout import chunk_bounds
from espalier.mesh import Mesh

T = TypeVar("T")

# torch 2.13 renamed both; 2.11 knows the old names only
gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
scatter_from = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def gather(
    x: torch.Tensor, mesh: Mesh, axis: int, dim: int, size: int
) -> tuple[Any, Callable[[], torch.Tensor]]:
    """Start to gather a dim of ``size``: what to wait for, and what then gives the whole."""
    n, order = mesh.shape[axis], mesh.order(axis)
    piece = -(-size // n)
    x = pad_to(x, dim, piece)
    shape = x.shape
    out = x.new_empty([n * shape[0], *shape[1:]])
    work = gather_into(as_wire(out), as_wire(x), group=mesh.group(axis), async_op=True)

    def together() -> torch.Tensor:
        if dim == 0 and size == n * piece and order is None:
            return out
        parts = by_coordinate(out.view(n, *shape).unbind(0), order)
        return torch.cat([p.narrow(dim, 0, chunk_bounds(size, n, i)[1]) for i, p in enumerate(parts)], dim)

    return work, together


def scatter_sum(x: torch.Tensor, mesh: Mesh, axis: int, dim: int) -> torch.Tensor:
    """This rank's piece, along ``dim``, of the sum of ``x``."""
    n, size, order = mesh.shape[axis], x.shape[dim], mesh.order(axis)
    piece = -(-size // n)
    own = chunk_bounds(size, n, mesh.coordinate[axis])[1]
    shape = [*x.shape[:dim], piece, *x.shape[dim + 1 :]]
    if dim == 0:
        wire = pad_to(x, 0, n * piece)
    else:
        wire = torch.cat([pad_to(x.narrow(dim, *chunk_bounds(size, n, i)), dim, piece) for i in range(n)])
    if order is not None:
        wire = torch.cat(_by_place(wire.view(n, *shape).unbind(0), order))
    wire, op = summable(wire.resolve_conj(), "sum")
    out = x.new_empty(shape)
    how = dist.ReduceOp.MAX if op == "max" else dist.ReduceOp.SUM
    scatter_from(summable(out, "sum")[0], wire, how, group=mesh.group(axis))
    return out if own == piece else out.narrow(dim, 0, own).contiguous()


def swap(
    pieces: Sequence[torch.Tensor], shapes: Sequence[Sequence[int]], mesh: Mesh, axis: int
) -> list[torch.Tensor]:
    """Give each coordinate its piece; what they give, of these shapes."""
    counts = [torch.Size(shape).numel() for shape in shapes]
    wire = torch.cat([p.reshape(-1) for p in pieces])
    out = send(wire, mesh, axis, counts, [p.numel() for p in pieces])
    return [p.view(s) for p, s in zip(torch.split(out, counts), shapes, strict=True)]


def send(wire: torch.Tensor, mesh: Mesh, axis: int, gets: list[int], gives: list[int]) -> torch.Tensor:
    """What the ranks send this one of flat ``wire``, so many elements from and to each."""
    order, wire = mesh.order(axis), wire.resolve_conj().resolve_neg()
    if order is not None:
        wire = torch.cat(_by_place(torch.split(wire, gives), order))
        gets, gives = _by_place(gets, order), _by_place(gives, order)
    out = wire.new_empty(sum(gets))
    scale = wire.element_size() // as_wire(wire).element_size()
    into, outof = ([n * scale for n in given] for given in (gets, gives))
    dist.all_to_all_single(as_wire(out), as_wire(wire), into, outof, group=mesh.group(axis))
    return out if order is None else torch.cat(by_coordinate(torch.split(out, gets), order))


def by_coordinate(of_places: Sequence[T], order: tuple[int, ...] | None) -> list[T]:
    """What belongs to the places of a process group, in the order of the axis' coordinates."""
    return list(of_places) if order is None else [of_places[place] for place in order]


def _by_place(of_coordinates: Sequence[T], order: tuple[int, ...]) -> list[T]:
    """What belongs to the coordinates of an axis, in the order of its process group's places."""
    return [of_coordinates[order.index(place)] for place in range(len(order))]
