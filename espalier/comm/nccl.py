"""Collectives of a backend whose own send equal pieces, all in one call: NCCL's."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from espalier.comm.backend import C10d, Summing, Work, as_it_lies, as_wire, pad_to, summable
from espalier.layout import chunk_bounds
from espalier.mesh import Mesh
from espalier.mesh.mesh import group_among
from espalier.torch_private import backend_for

T = TypeVar("T")

# torch 2.13 renamed both; 2.11 knows the old names only
gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
scatter_from = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Nccl(C10d):
    """Tensors of accelerators."""

    def all_gather(
        self, x: torch.Tensor, mesh: Mesh, axis: int, dim: int, size: int, *, beside: bool
    ) -> Work[torch.Tensor]:
        n, order = mesh.shape[axis], mesh.order(axis)
        piece = -(-size // n)
        x = pad_to(x, dim, piece)
        shape = x.shape
        out = x.new_empty([n * shape[0], *shape[1:]])
        work = gather_into(as_wire(out), as_wire(x), group=mesh.group(axis), async_op=beside)

        def together() -> torch.Tensor:
            if _is_first(shape, dim) and size == n * piece and order is None:
                return out.view([*shape[:dim], size, *shape[dim + 1 :]])
            parts = _by_coordinate(out.view(n, *shape).unbind(0), order)
            return torch.cat(
                [p.narrow(dim, 0, chunk_bounds(size, n, i)[1]) for i, p in enumerate(parts)], dim
            )

        return Work((work,), together)

    def reduce_scatter(self, x: torch.Tensor, mesh: Mesh, axis: int, dim: int) -> torch.Tensor:
        n, size, order = mesh.shape[axis], x.shape[dim], mesh.order(axis)
        piece = -(-size // n)
        length = chunk_bounds(size, n, mesh.coordinate[axis])[1]
        shape = [*x.shape[:dim], piece, *x.shape[dim + 1 :]]
        if _is_first(x.shape, dim):
            wire = pad_to(x, dim, n * piece)
        elif size == n * piece:
            wire = _by_pieces(x, dim, n)
        else:
            wire = torch.cat([pad_to(x.narrow(dim, *chunk_bounds(size, n, i)), dim, piece) for i in range(n)])
        if order is not None:
            wire = torch.cat(_by_place(wire.view(n, *shape).unbind(0), order))
        wire, op = summable(wire.resolve_conj(), "sum")
        out = x.new_empty(shape)
        how = dist.ReduceOp.MAX if op == "max" else dist.ReduceOp.SUM
        # flat, as pieces may lie behind each other along any dim
        scatter_from(summable(out, "sum")[0].view(-1), wire.view(-1), how, group=mesh.group(axis))
        return out if length == piece else out.narrow(dim, 0, length).contiguous()

    def all_to_all(
        self, pieces: Sequence[torch.Tensor], shapes: Sequence[Sequence[int]], dim: int, mesh: Mesh, axis: int
    ) -> torch.Tensor:
        counts = [torch.Size(shape).numel() for shape in shapes]
        flat = _side_by_side(pieces)
        out = self.exchange(flat, mesh, axis, counts, [p.numel() for p in pieces])
        parts = zip(torch.split(out, counts), shapes, strict=True)
        return torch.cat([p.view(tuple(shape)) for p, shape in parts], dim)

    def exchange(
        self, flat: torch.Tensor, mesh: Mesh, axis: int, gets: list[int], gives: list[int]
    ) -> torch.Tensor:
        order, wire = mesh.order(axis), flat.resolve_conj().resolve_neg()
        if order is not None:
            wire = torch.cat(_by_place(torch.split(wire, gives), order))
            gets, gives = _by_place(gets, order), _by_place(gives, order)
        out = wire.new_empty(sum(gets))
        scale = wire.element_size() // as_wire(wire).element_size()
        into, outof = ([n * scale for n in counts] for counts in (gets, gives))
        dist.all_to_all_single(as_wire(out), as_wire(wire), into, outof, group=mesh.group(axis))
        return out if order is None else torch.cat(_by_coordinate(torch.split(out, gets), order))

    def open_lanes(self, mesh: Mesh, axis: int, pairs: Iterable[tuple[int, int]]) -> None:
        """See :func:`espalier.comm.collectives.open_lanes`."""
        if axis in mesh.lanes:
            return
        here, ranks, device = mesh.coordinate[axis], mesh.along(axis), mesh.device()
        up, down = (backend_for(group_among(ranks, by_pairs=True), device) for _ in range(2))
        # the axis' own group need not be in order: torch 2.15 splits it off as it is
        in_group = sorted(ranks)
        mesh.lanes[axis] = up, down, [in_group.index(rank) for rank in ranks]
        # NCCL joins two ranks as they first meet, which holds up both: now, in an order that all keep
        word = torch.zeros(1, device=device)
        for pair in sorted(set(pairs) | {(to, source) for source, to in pairs}):
            if here == pair[0]:
                self.send([word], mesh, axis, pair[1], 0).wait()
            elif here == pair[1]:
                self.receive([word], mesh, axis, pair[0], 0).wait()

    def lane(
        self, mesh: Mesh, axis: int, source: int, to: int, device: torch.device
    ) -> tuple[Any, Sequence[int]]:
        lanes = mesh.lanes.get(axis)
        if lanes is None:
            return super().lane(mesh, axis, source, to, device)
        up, down, places = lanes
        return down if to < source else up, places

    def swap(
        self,
        x: torch.Tensor,
        outs: Sequence[torch.Tensor],
        mesh: Mesh,
        axis: int,
        peers: Sequence[int],
        tag: int,
    ) -> Work[Any]:
        # one batch: messages that are posted one by one are done one by one, on both sides
        order, group = mesh.order(axis) or range(mesh.shape[axis]), mesh.group(axis)
        ops = [dist.P2POp(dist.isend, as_wire(x), group=group, group_peer=order[peer]) for peer in peers]
        ops += [
            dist.P2POp(dist.irecv, as_wire(out), group=group, group_peer=order[peer])
            for out, peer in zip(outs, peers, strict=True)
        ]
        return Work(dist.batch_isend_irecv(ops))

    def gather_rows(self, rows: torch.Tensor, own: torch.Tensor | None, mesh: Mesh, axis: int) -> Work[Any]:
        here, order, group = rows[mesh.coordinate[axis]], mesh.order(axis), mesh.group(axis)
        if own is not None:
            here.copy_(own)
        if order is None:
            return Work((gather_into(as_wire(rows.view(-1)), as_wire(here), group=group, async_op=True),))
        swapped = torch.empty_like(rows)
        work = gather_into(as_wire(swapped.view(-1)), as_wire(here), group=group, async_op=True)
        return Work((work,), lambda: rows.copy_(swapped[list(order)]))

    def sum_rows(self, rows: torch.Tensor, mesh: Mesh, axis: int) -> Summing:
        order = mesh.order(axis)
        if order is not None:
            rows = rows[[order.index(place) for place in range(len(order))]]
        done = torch.empty_like(rows[0])
        work = scatter_from(done.view(-1), rows.view(-1), group=mesh.group(axis), async_op=True)
        return Summing((done,), Work((work,)), place=done)


def _is_first(shape: Sequence[int], dim: int) -> bool:
    """Whether the pieces of a dim lie one behind the other in contiguous memory."""
    return math.prod(shape[:dim]) == 1


def _by_pieces(x: torch.Tensor, dim: int, n: int) -> torch.Tensor:
    """The ``n`` equal pieces of a dim one behind the other, by one copy."""
    return as_it_lies(torch.unflatten(x, dim, (n, x.shape[dim] // n)).movedim(dim, 0))


def _side_by_side(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    """All elements of some tensors; equal ones, which lie in strides, take one copy."""
    if all(p.shape == pieces[0].shape for p in pieces):
        return torch.stack([*pieces]).view(-1)
    return torch.cat([p.reshape(-1) for p in pieces])


def _by_coordinate(of_places: Sequence[T], order: tuple[int, ...] | None) -> list[T]:
    """What belongs to the places of a process group, in the order of the axis' coordinates."""
    return list(of_places) if order is None else [of_places[place] for place in order]


def _by_place(of_coordinates: Sequence[T], order: tuple[int, ...]) -> list[T]:
    """What belongs to the coordinates of an axis, in the order of its process group's places."""
    return [of_coordinates[order.index(place)] for place in range(len(order))]
