"""Flat buffers along one axis: gathered and summed while the program goes on.

What is sent are *rows*: a matrix [n, size], one row for each coordinate of the axis.

Sums are taken in the order of the coordinates, element by element. So a value does not depend on where
in a buffer it stood, nor on how many buffers there were: that is what makes ZeRO's stages bit-equal. On
NCCL, whose rings add in an order of their own, the order depends on the owner of a value alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from espalier.comm.batched import gather_into, scatter_from
from espalier.comm.collectives import Pending, _record, _sent_from, all_reduce_
from espalier.comm.direct import Works
from espalier.comm.wire import as_wire
from espalier.mesh import Mesh


class Summing:
    """A sum over the axis under way, of which this rank gets its row.

    Attributes:
        everywhere: whether every rank gets all of it, in place of what was sent; then ``rows`` are None.
        place: memory that may hold the sum; None where there is none that nothing else stands in.
    """

    def __init__(
        self,
        rows: Sequence[torch.Tensor] | None,
        pending: Pending,
        sent: torch.Tensor | None = None,
        place: torch.Tensor | None = None,
    ) -> None:
        self._rows, self._pending, self._sent, self.place = rows, pending, sent, place
        self.everywhere = rows is None

    def wait(self, out: torch.Tensor, *, add: bool = False) -> None:
        """Put the sum into flat ``out``, or add it to what is there. 16-bit rows are added up in float32."""
        self._pending.wait()
        self._sent = None
        if self._rows is None:
            return
        rows = self._rows
        narrow = len(rows) > 1 and rows[0].element_size() == 2
        wide = torch.float32 if narrow else rows[0].dtype
        if not add and len(rows) > 1 and out.dtype == rows[0].dtype == wide:
            torch.add(rows[0], rows[1], out=out)
            for row in rows[2:]:
                out.add_(row)
            return
        total = rows[0].to(wide)
        for i, row in enumerate(rows[1:]):
            total = total + row if i == 0 else total.add_(row)
        (out.add_ if add else out.copy_)(total)


def start_total(rows: torch.Tensor, mesh: Mesh, axis: int) -> Summing | None:
    """Start to sum ``rows`` over the axis, in place, on every rank, as the backend does it.

    None where that would not be the bits of the order above: of two addends either order gives them.
    """
    if not _either_order(rows, mesh, axis):
        return None
    return Summing(None, all_reduce_(rows, mesh, axis, beside=True))


def _either_order(x: torch.Tensor, mesh: Mesh, axis: int) -> bool:
    """Whether any order of addition gives the same bits: of two addends, if the backend rounds them once."""
    return mesh.shape[axis] == 2 and x.element_size() >= 4


def start_gather(rows: torch.Tensor, own: torch.Tensor | None, mesh: Mesh, axis: int) -> Pending:
    """Start to fill ``rows`` with the flat ``own`` of each coordinate; None: its row there has it already."""
    n, here = mesh.shape[axis], mesh.coordinate[axis]
    if mesh.is_dry and n > 1:
        _record_gather(rows, mesh, axis)
        return Pending()
    if own is not None:
        rows[here].copy_(own)
    if n == 1:
        return Pending()
    _record_gather(rows, mesh, axis)
    if not rows.is_cuda:
        return share_rows(rows, mesh, axis)
    order = mesh.order(axis)
    own = as_wire(rows[here])
    if order is None:
        return Pending(gather_into(as_wire(rows.view(-1)), own, group=mesh.group(axis), async_op=True))
    swapped = torch.empty_like(rows)
    work = gather_into(as_wire(swapped.view(-1)), own, group=mesh.group(axis), async_op=True)
    return Pending(work, then=lambda: rows.copy_(swapped[list(order)]))


def share_rows(rows: torch.Tensor, mesh: Mesh, axis: int) -> Pending:
    """Start to send each coordinate's row to all, in place, on gloo: its all-gather works on copies."""
    return _shared(rows[mesh.coordinate[axis]], _wires(rows), mesh, axis)


def _wires(rows: torch.Tensor) -> list[torch.Tensor]:
    return [as_wire(row) for row in (rows.unbind(0) if rows.numel() else ())]


def _shared(own: torch.Tensor, wires: Sequence[torch.Tensor], mesh: Mesh, axis: int) -> Pending:
    """Start to send ``own`` to all, and to fill the others' wires."""
    here, own = mesh.coordinate[axis], as_wire(own)
    if len(wires) == 2:
        return Pending(_swap(own, wires[1 - here], mesh, axis))
    each = (own if i == here else wire for i, wire in enumerate(wires))
    return Pending(Works([_sent_from(wire, mesh, axis, i) for i, wire in enumerate(each)]))


class Fetching:
    """Gathers into the same ``rows`` again and again, without a copy of what is here.

    Args:
        rows: their storage may be emptied between the times.
    """

    def __init__(self, rows: torch.Tensor, mesh: Mesh, axis: int) -> None:
        self._rows, self._mesh, self._axis = rows, mesh, axis
        self._wires = _wires(rows)

    @staticmethod
    def serves(mesh: Mesh, axis: int, device: torch.device) -> bool:
        """Whether there is something to fetch, by a backend that sends from anywhere (gloo)."""
        return mesh.shape[axis] > 1 and not mesh.is_dry and device.type == "cpu"

    def start(self, own: torch.Tensor) -> Pending:
        """Start to send flat ``own`` to all, and to fill the others' rows; its own row is left as it is."""
        _record_gather(self._rows, self._mesh, self._axis)
        return _shared(own, self._wires, self._mesh, self._axis)


def _record_gather(rows: torch.Tensor, mesh: Mesh, axis: int) -> None:
    n, size = rows.shape
    _record(mesh, "all_gather", axis, (n - 1) * size * rows.element_size(), rows, rows.shape)


def start_sum(rows: torch.Tensor, mesh: Mesh, axis: int) -> Summing:
    """Start to sum ``rows`` over the axis; each coordinate gets its own row (a reduce-scatter)."""
    n = mesh.shape[axis]
    if n == 1:
        return Summing(rows.unbind(0), Pending())
    _record(mesh, "reduce_scatter", axis, (n - 1) * rows[0].numel() * rows.element_size(), rows, rows.shape)
    if n == 2 and not rows.is_cuda:
        here, got = mesh.coordinate[axis], torch.empty_like(rows[0])
        work = None if mesh.is_dry or not rows.numel() else _swap(rows[1 - here], got, mesh, axis)
        return Summing((rows[0], got) if here == 0 else (got, rows[1]), Pending(work), place=got)
    if mesh.is_dry:
        return Summing(torch.empty_like(rows).unbind(0), Pending(), rows)  # what gloo takes; NCCL one row
    order = mesh.order(axis)
    if order is not None:
        rows = rows[[order.index(place) for place in range(n)]]
    if rows.is_cuda:
        group, done = mesh.group(axis), torch.empty_like(rows[:1])
        scattered = scatter_from(done.view(-1), rows.view(-1), group=group, async_op=True)
        return Summing(done.unbind(0), Pending(scattered))
    # gloo has no reduce-scatter of its own: it would all-reduce, and send twice as much
    got = torch.empty_like(rows)
    backend, options = mesh.backend(axis, rows.device), dist.AllToAllOptions()
    work = backend.alltoall_base(as_wire(got.view(-1)), as_wire(rows.view(-1)), [], [], options)
    if order is None:
        return Summing(got.unbind(0), Pending(work))
    swapped = torch.empty_like(got)
    return Summing(swapped.unbind(0), Pending(work, then=lambda: swapped.copy_(got[list(order)])))


def _swap(own: torch.Tensor, other: torch.Tensor, mesh: Mesh, axis: int) -> Any:
    """Start to send contiguous ``own`` to the other of two ranks and to get ``other``: one work of gloo."""
    own, other, sizes = as_wire(own), as_wire(other), [0, 0]
    sizes[(mesh.order(axis) or (0, 1))[1 - mesh.coordinate[axis]]] = own.numel()
    return mesh.backend(axis, own.device).alltoall_base(other, own, sizes, sizes, dist.AllToAllOptions())


def sum_everywhere(x: torch.Tensor, mesh: Mesh, axis: int) -> None:
    """Sum flat ``x`` over the axis, in place, on every coordinate (an all-reduce in the order above)."""
    n = mesh.shape[axis]
    if n == 1:
        return
    if _either_order(x, mesh, axis):
        all_reduce_(x, mesh, axis).wait()
        return
    size = -(-x.numel() // n)
    rows = x.new_zeros(n, size)
    rows.view(-1)[: x.numel()].copy_(x)
    start_sum(rows, mesh, axis).wait(rows[mesh.coordinate[axis]])
    start_gather(rows, None, mesh, axis).wait()
    x.copy_(rows.view(-1)[: x.numel()])
