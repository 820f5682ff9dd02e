"""The backend of dry meshes: nothing moves; results have their shapes, and no content."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from espalier.comm.backend import Backend, Summing, Work
from espalier.comm.ledger import Waiting
from espalier.layout import chunk_bounds
from espalier.mesh import Mesh
from espalier.torch_private import raw
from espalier.trees import tree_map

# ---- values of tensors without data, where they are known
#
# Masks and positions are small, and programs branch on what is in them. A storage on the ``meta`` device may
# bear the values that it would have, as a storage on the CPU: so all views of it have theirs.


def values_of(x: torch.Tensor) -> torch.Tensor | None:
    """The values of a tensor, on the CPU; None: they are not known."""
    with raw():
        if not x.is_meta:
            return x.detach().cpu()
        storage = getattr(x.untyped_storage(), "values", None)
        if storage is None:
            return None
        return torch.empty(0, dtype=x.dtype).set_(storage, x.storage_offset(), x.shape, x.stride())


def know(x: torch.Tensor, values: torch.Tensor | None) -> torch.Tensor:
    """The same tensor without data, with values from now on, or with none."""
    with raw():
        storage: Any = x.untyped_storage()
        if values is None:
            storage.values = None
            return x
        if getattr(storage, "values", None) is None:
            storage.values = torch.zeros(storage.nbytes(), dtype=torch.uint8).untyped_storage()
        here = torch.empty(0, dtype=x.dtype).set_(storage.values, x.storage_offset(), x.shape, x.stride())
        here.copy_(values)
        return x


def without_data(batch: Any) -> Any:
    """A batch on the ``meta`` device; of what was none of it, and is no float, the values are known."""

    def bare(x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or x.is_meta:
            return x
        other = torch.empty_like(x, device="meta")
        return other if x.is_floating_point() or x.is_complex() else know(other, x)

    return tree_map(bare, batch)


def _gathered(x: torch.Tensor, shape: Sequence[int], dim: int) -> torch.Tensor:
    """What ranks give when all are as this one."""
    whole, values = x.new_empty(shape), values_of(x)
    if values is None or not x.shape[dim]:
        return whole
    along = torch.arange(shape[dim]) % x.shape[dim]
    return know(whole, values.index_select(dim, along))


# ---- the backend


class Dry(Backend):
    """No backend at all."""

    def all_reduce(self, x: torch.Tensor, mesh: Mesh, axis: int, op: str, *, beside: bool) -> Work[Any]:
        if op == "sum" and (values := values_of(x)) is not None and not x.is_floating_point():
            know(x, values * mesh.shape[axis])
        return Work()

    def sum_whole(self, x: torch.Tensor, mesh: Mesh, axis: int, *, beside: bool) -> Work[Any]:
        return Work()

    def all_gather(
        self, x: torch.Tensor, mesh: Mesh, axis: int, dim: int, size: int, *, beside: bool
    ) -> Work[torch.Tensor]:
        shape = [*x.shape[:dim], size, *x.shape[dim + 1 :]]
        if math.prod(x.shape[:dim]) == 1:
            return Work.done(_gathered(x, shape, dim))
        # pieces that don't lie one behind the other are put together when they are there
        return Work(rest=lambda: _gathered(x, shape, dim))

    def reduce_scatter(self, x: torch.Tensor, mesh: Mesh, axis: int, dim: int) -> torch.Tensor:
        return _piece(x, mesh, axis, dim, x.shape)

    def all_to_all(
        self, pieces: Sequence[torch.Tensor], shapes: Sequence[Sequence[int]], dim: int, mesh: Mesh, axis: int
    ) -> torch.Tensor:
        whole = list(shapes[0])
        whole[dim] = sum(shape[dim] for shape in shapes)
        return pieces[0].new_empty(whole)

    def exchange(
        self, flat: torch.Tensor, mesh: Mesh, axis: int, gets: list[int], gives: list[int]
    ) -> torch.Tensor:
        return flat.new_empty(sum(gets))

    def broadcast(self, x: torch.Tensor, mesh: Mesh, axis: int, source: int) -> Work[Any]:
        return Work()

    def reduce(self, x: torch.Tensor, mesh: Mesh, axis: int, target: int) -> Work[Any]:
        return Work()

    def scatter(
        self, x: torch.Tensor, mesh: Mesh, axis: int, dim: int, shape: Sequence[int], source: int
    ) -> torch.Tensor:
        return _piece(x, mesh, axis, dim, shape)

    def pass_on(self, x: torch.Tensor, mesh: Mesh, axis: int, gets: int, step: int) -> Work[torch.Tensor]:
        out = x.new_empty(gets)

        def come() -> torch.Tensor:
            for observer in mesh.ledgers:
                if isinstance(observer, Waiting):
                    observer.waits(mesh.names[axis])
            return out

        return Work(rest=come)

    def send(self, xs: Sequence[torch.Tensor], mesh: Mesh, axis: int, to: int, tag: int) -> Work[Any]:
        return Work()

    def receive(self, xs: Sequence[torch.Tensor], mesh: Mesh, axis: int, source: int, tag: int) -> Work[Any]:
        return Work()

    def gather_rows(self, rows: torch.Tensor, own: torch.Tensor | None, mesh: Mesh, axis: int) -> Work[Any]:
        return Work()

    def sum_rows(self, rows: torch.Tensor, mesh: Mesh, axis: int) -> Summing:
        # what ranks of one host take, who read others' rows where these lie; NCCL takes one row
        here = mesh.coordinate[axis]
        if len(rows) == 2:
            got = torch.empty_like(rows[0])
            return Summing((rows[0], got) if here == 0 else (got, rows[1]), Work(), place=got)
        # two rows stand for others': the memory is the same however many are added up, and time is not spent
        return Summing((rows[0], rows[1], *([rows[here]] if here > 1 else ())), Work(), rows)


def _piece(x: torch.Tensor, mesh: Mesh, axis: int, dim: int, shape: Sequence[int]) -> torch.Tensor:
    length = chunk_bounds(shape[dim], mesh.shape[axis], mesh.coordinate[axis])[1]
    return x.new_empty([*shape[:dim], length, *shape[dim + 1 :]])
