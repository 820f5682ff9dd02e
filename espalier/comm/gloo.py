"""Messages straight from rank to rank along an axis, all at once, where gloo would go round a ring.

gloo's own collectives hand pieces on from rank to rank, by threads of their own: of a small or middling
message most of the time is waiting. Here each rank sends every other what is for it. The bytes are the same.

What is begun here must be waited for before it is let go: gloo forgets a message whose buffer is gone, and
the link with it. So it is for what is waited for at once; the rest is left to the threads of gloo.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from espalier.comm.backend import C10d, Summing, Work, all_reduced, as_it_lies, as_wire, sent_from, summable
from espalier.layout import chunk_bounds
from espalier.mesh import Mesh
from espalier.torch_private import backend_for

_Gloo: Any = getattr(dist, "ProcessGroupGloo", ())
# a tag says of which collective a message is, and its bytes: where ranks differ in what they call they wait
# for one another, as in gloo's own, and the watch tells why; a message longer than expected would end them
# (a program's own messages have small tags)
_KINDS = ("", "all_gather", "reduce_scatter", "all_to_all", "all_reduce", "hosts")
_BITS = 28
# bytes of a tensor up to which its reduction goes so: beyond, a ring that adds while it receives is as fast
_MOST = 1 << 21
# ranks, and bytes of what is summed over all of a mesh, up to which each sends all to each other
_FEW, _LITTLE = 8, 1 << 10

TWO: dict[str, Callable[..., torch.Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "product": torch.mul,
}


def is_gloo(backend: Any) -> bool:
    """Whether a backend of a process group is gloo's own."""
    return isinstance(backend, _Gloo)


def exchange(
    kind: str, gives: Sequence[torch.Tensor], gets: Sequence[torch.Tensor], mesh: Mesh, axis: int
) -> Work[Any]:
    """Start to send each coordinate of an axis what is for it, and to receive from each; the own stays.

    Args:
        kind: the collective of which this is a part.
        gives, gets: contiguous, one for each coordinate; what is given must stay as it is until the wait.
    """
    here, n = mesh.coordinate[axis], mesh.shape[axis]
    backend = mesh.backend(axis, gets[here].device)
    return exchange_among(kind, gives, gets, backend, here, mesh.order(axis) or range(n))


def exchange_among(
    kind: str,
    gives: Sequence[torch.Tensor],
    gets: Sequence[torch.Tensor],
    backend: Any,
    here: int,
    order: Sequence[int],
) -> Work[Any]:
    """:func:`exchange` among the ranks of a group that ``order`` names, of which this is the one ``here``."""
    n, works = len(order), []

    def tag(x: torch.Tensor) -> int:
        return _KINDS.index(kind) << _BITS | x.nbytes % (1 << _BITS)

    for i in range(1, n):
        # to the next one first: at no moment do all send to one
        to, source = (here + i) % n, (here - i) % n
        if gives[to].numel():
            works.append(backend.send([as_wire(gives[to])], order[to], tag(gives[to])))
        if gets[source].numel():
            works.append(backend.recv([as_wire(gets[source])], order[source], tag(gets[source])))
    return Work(works)


class Gloo(C10d):
    """Tensors of the CPU.

    Args:
        elsewhere: the coordinates that are not on this rank's host.
        size: of the axis.
    """

    fetches = True

    def __init__(self, elsewhere: Collection[int] = (), size: int = 2) -> None:
        self._elsewhere, self._size = elsewhere, size

    def beyond(self, op: str, sent: int, dtype: torch.dtype | None, to: int | None) -> int:
        if to is not None or not self._elsewhere:
            return sent if to in self._elsewhere else 0
        return sent * len(self._elsewhere) // (self._size - 1)

    def all_reduce(self, x: torch.Tensor, mesh: Mesh, axis: int, op: str, *, beside: bool) -> Work[Any]:
        x, op = summable(x, op)
        few = x.nbytes <= _MOST and op in TWO and is_gloo(mesh.backend(axis, x.device))
        if beside or not few:
            return all_reduced(x, op, mesh, axis)  # a ring is the better way
        n, here = mesh.shape[axis], mesh.coordinate[axis]
        if n == 2:
            got = torch.empty_like(x)
            sent = exchange("all_reduce", (x, x), (got, got), mesh, axis)
            return Work((sent,), partial(TWO[op], x, got, out=x))
        parts = split(x.view(-1), n)
        gets = [torch.empty_like(parts[here]) for _ in range(n)]
        gets[here] = parts[here]

        def rest() -> None:
            parts[here].copy_(reduced(gets, op))
            exchange("all_reduce", [parts[here]] * n, parts, mesh, axis).wait()

        return Work((exchange("all_reduce", parts, gets, mesh, axis),), rest)

    def sum_whole(self, x: torch.Tensor, mesh: Mesh, axis: int, *, beside: bool) -> Work[Any]:
        group, n = mesh.whole_group(), mesh.size()
        backend = backend_for(group, x.device)
        if beside or n > _FEW or x.nbytes > _LITTLE or not is_gloo(backend):
            return super().sum_whole(x, mesh, axis, beside=beside)
        # all ranks add in the same order
        here, gets = dist.get_rank(group), list(torch.empty(n, *x.shape, dtype=x.dtype).unbind())
        gets[here] = x
        sent = exchange_among("all_reduce", [x] * n, gets, backend, here, range(n))
        return Work((sent,), lambda: x.copy_(reduced(gets, "sum")))

    def all_gather(
        self, x: torch.Tensor, mesh: Mesh, axis: int, dim: int, size: int, *, beside: bool
    ) -> Work[torch.Tensor]:
        n, here = mesh.shape[axis], mesh.coordinate[axis]
        x = as_it_lies(x)
        sizes = [chunk_bounds(size, n, i)[1] for i in range(n)]
        if math.prod(x.shape[:dim]) == 1:
            # one piece lies behind the other
            out = x.new_empty([*x.shape[:dim], size, *x.shape[dim + 1 :]])
            parts = list(torch.split(out, sizes, dim))
            parts[here].copy_(x)
            return Work((exchange("all_gather", [x] * n, parts, mesh, axis),), lambda: out)
        shapes = [[*x.shape[:dim], k, *x.shape[dim + 1 :]] for k in sizes]
        parts = [x if i == here else x.new_empty(shape) for i, shape in enumerate(shapes)]
        return Work((exchange("all_gather", [x] * n, parts, mesh, axis),), partial(torch.cat, parts, dim))

    def reduce_scatter(self, x: torch.Tensor, mesh: Mesh, axis: int, dim: int) -> torch.Tensor:
        # gloo's own would send twice as much
        n, here, x = mesh.shape[axis], mesh.coordinate[axis], x.resolve_conj().resolve_neg()
        pieces = [x.narrow(dim, *chunk_bounds(x.shape[dim], n, i)) for i in range(n)]
        gives = [p if i == here else as_it_lies(p) for i, p in enumerate(pieces)]
        gets = [p if i == here else x.new_empty(pieces[here].shape) for i, p in enumerate(pieces)]
        exchange("reduce_scatter", gives, gets, mesh, axis).wait()
        return reduced(gets, "max" if x.dtype is torch.bool else "sum")

    def all_to_all(
        self, pieces: Sequence[torch.Tensor], shapes: Sequence[Sequence[int]], dim: int, mesh: Mesh, axis: int
    ) -> torch.Tensor:
        here, gives = mesh.coordinate[axis], [as_it_lies(p) for p in pieces]
        parts = [gives[i] if i == here else gives[i].new_empty(shape) for i, shape in enumerate(shapes)]
        exchange("all_to_all", gives, parts, mesh, axis).wait()
        return torch.cat(parts, dim)

    def exchange(
        self, flat: torch.Tensor, mesh: Mesh, axis: int, gets: list[int], gives: list[int]
    ) -> torch.Tensor:
        here, flat = mesh.coordinate[axis], flat.resolve_conj().resolve_neg()
        out = flat.new_empty(sum(gets))
        parts, sent = torch.split(out, gets), torch.split(flat, gives)
        parts[here].copy_(sent[here])
        exchange("all_to_all", sent, parts, mesh, axis).wait()
        return out

    def gather_rows(self, rows: torch.Tensor, own: torch.Tensor | None, mesh: Mesh, axis: int) -> Work[Any]:
        # gloo's own all-gather works on copies
        here = rows[mesh.coordinate[axis]]
        if own is not None:
            here.copy_(own)
        return self.share(here, wires_of(rows), mesh, axis)

    def share(self, own: torch.Tensor, wires: Sequence[torch.Tensor], mesh: Mesh, axis: int) -> Work[Any]:
        here, own = mesh.coordinate[axis], as_wire(own)
        if len(wires) == 2:
            return Work((_swap(own, wires[1 - here], mesh, axis),))
        each = (own if i == here else wire for i, wire in enumerate(wires))
        return Work([sent_from(wire, mesh, axis, i) for i, wire in enumerate(each)])

    def sum_rows(self, rows: torch.Tensor, mesh: Mesh, axis: int) -> Summing:
        n, here, order = mesh.shape[axis], mesh.coordinate[axis], mesh.order(axis)
        if n == 2:
            got = torch.empty_like(rows[0])
            work = Work[Any]((_swap(rows[1 - here], got, mesh, axis),) if rows.numel() else ())
            return Summing((rows[0], got) if here == 0 else (got, rows[1]), work, place=got)
        if order is not None:
            rows = rows[[order.index(place) for place in range(n)]]
        # gloo has no reduce-scatter of its own: it would all-reduce, and send twice as much
        got = torch.empty_like(rows)
        backend, options = mesh.backend(axis, rows.device), dist.AllToAllOptions()
        sent = backend.alltoall_base(as_wire(got.view(-1)), as_wire(rows.view(-1)), [], [], options)
        if order is None:
            return Summing(got.unbind(0), Work((sent,)))
        swapped = torch.empty_like(got)
        return Summing(swapped.unbind(0), Work((sent,), lambda: swapped.copy_(got[list(order)])))


def wires_of(rows: torch.Tensor) -> list[torch.Tensor]:
    """The rows as the network may carry them."""
    return [as_wire(row) for row in (rows.unbind(0) if rows.numel() else ())]


def _swap(own: torch.Tensor, other: torch.Tensor, mesh: Mesh, axis: int) -> Any:
    """Start to send contiguous ``own`` to the other of two ranks and to get ``other``: one work of gloo."""
    own, other, sizes = as_wire(own), as_wire(other), [0, 0]
    sizes[(mesh.order(axis) or (0, 1))[1 - mesh.coordinate[axis]]] = own.numel()
    return mesh.backend(axis, own.device).alltoall_base(other, own, sizes, sizes, dist.AllToAllOptions())


def split(flat: torch.Tensor, n: int) -> list[torch.Tensor]:
    """A flat tensor in so many parts, of which the last may be shorter, or empty."""
    piece = -(-flat.numel() // n)
    return [flat[i * piece : (i + 1) * piece] for i in range(n)]


def reduced(rows: Sequence[torch.Tensor], op: str) -> torch.Tensor:
    """The reduction of rows, in their order; 16-bit floats are reduced in float32."""
    dtype = rows[0].dtype
    total = rows[0].float() if dtype.is_floating_point and dtype.itemsize == 2 else rows[0]
    for i, row in enumerate(rows[1:]):
        total = TWO[op](total, row) if i == 0 else TWO[op](total, row, out=total)
    return total.to(dtype)
