"""Messages straight from rank to rank along an axis, all at once, where gloo would go round a ring.

gloo's own collectives hand pieces on from rank to rank, by threads of their own: of a small or middling
message most of the time is waiting. Here each rank sends every other what is for it. The bytes are the same.

What is begun here must be waited for before it is let go: gloo forgets a message whose buffer is gone, and
the link with it. So it is for what is waited for at once; the rest is left to the threads of gloo.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from espalier.comm.wire import as_it_lies, as_wire
from espalier.layout import chunk_bounds
from espalier.mesh import Mesh

_Gloo: Any = getattr(dist, "ProcessGroupGloo", ())
# a tag says of which collective a message is, and its bytes: where ranks differ in what they call they wait
# for one another, as in gloo's own, and the watch tells why; a message longer than expected would end them
# (a program's own messages have small tags)
_KINDS = ("", "all_gather", "reduce_scatter", "all_to_all", "all_reduce")
_BITS = 28
# bytes of a tensor up to which its reduction goes so: beyond, a ring that adds while it receives is as fast
_MOST = 1 << 21
# ranks, and bytes of what is summed over all of a mesh, up to which each sends all to each other
_FEW, _LITTLE = 8, 1 << 10

_TWO: dict[str, Callable[..., torch.Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "product": torch.mul,
}


class Works:
    """Several works as one."""

    def __init__(self, works: Sequence[Any]) -> None:
        self._works = works

    def wait(self) -> None:
        """Wait for all."""
        for work in self._works:
            work.wait()


def exchange(
    kind: str, gives: Sequence[torch.Tensor], gets: Sequence[torch.Tensor], mesh: Mesh, axis: int
) -> Works:
    """Start to send each coordinate of an axis what is for it, and to receive from each; the own stays.

    Args:
        kind: the collective of which this is a part.
        gives, gets: contiguous, one for each coordinate; what is given must stay as it is until the wait.
    """
    here, n = mesh.coordinate[axis], mesh.shape[axis]
    backend = mesh.backend(axis, gets[here].device)
    return _exchange(kind, gives, gets, backend, here, mesh.order(axis) or range(n))


def _exchange(
    kind: str,
    gives: Sequence[torch.Tensor],
    gets: Sequence[torch.Tensor],
    backend: Any,
    here: int,
    order: Sequence[int],
) -> Works:
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
    return Works(works)


def gather(
    x: torch.Tensor, mesh: Mesh, axis: int, dim: int, size: int
) -> tuple[Works, Callable[[], torch.Tensor]]:
    """Start to gather a dim of ``size``: what to wait for, and what then gives the whole."""
    n, here = mesh.shape[axis], mesh.coordinate[axis]
    x = as_it_lies(x)
    sizes = [chunk_bounds(size, n, i)[1] for i in range(n)]
    if math.prod(x.shape[:dim]) == 1:
        # one piece lies behind the other
        out = x.new_empty([*x.shape[:dim], size, *x.shape[dim + 1 :]])
        parts = list(torch.split(out, sizes, dim))
        parts[here].copy_(x)
        return exchange("all_gather", [x] * n, parts, mesh, axis), lambda: out
    parts = [
        x if i == here else x.new_empty([*x.shape[:dim], k, *x.shape[dim + 1 :]]) for i, k in enumerate(sizes)
    ]
    return exchange("all_gather", [x] * n, parts, mesh, axis), partial(torch.cat, parts, dim)


def scatter_sum(x: torch.Tensor, mesh: Mesh, axis: int, dim: int) -> torch.Tensor:
    """This rank's piece, along ``dim``, of the sum of ``x``. gloo's own would send twice as much."""
    n, here, x = mesh.shape[axis], mesh.coordinate[axis], x.resolve_conj().resolve_neg()
    pieces = [x.narrow(dim, *chunk_bounds(x.shape[dim], n, i)) for i in range(n)]
    gives = [p if i == here else as_it_lies(p) for i, p in enumerate(pieces)]
    gets = [p if i == here else x.new_empty(pieces[here].shape) for i, p in enumerate(pieces)]
    exchange("reduce_scatter", gives, gets, mesh, axis).wait()
    return reduced(gets, "max" if x.dtype is torch.bool else "sum")


def swap(
    pieces: Sequence[torch.Tensor], shapes: Sequence[Sequence[int]], mesh: Mesh, axis: int
) -> list[torch.Tensor]:
    """Give each coordinate its piece; what they give, of these shapes."""
    here, gives = mesh.coordinate[axis], [as_it_lies(p) for p in pieces]
    parts = [gives[i] if i == here else gives[i].new_empty(shape) for i, shape in enumerate(shapes)]
    exchange("all_to_all", gives, parts, mesh, axis).wait()
    return parts


def send(wire: torch.Tensor, mesh: Mesh, axis: int, gets: list[int], gives: list[int]) -> torch.Tensor:
    """What the ranks send this one of flat ``wire``, so many elements from and to each."""
    here, wire = mesh.coordinate[axis], wire.resolve_conj().resolve_neg()
    out = wire.new_empty(sum(gets))
    parts, sent = torch.split(out, gets), torch.split(wire, gives)
    parts[here].copy_(sent[here])
    exchange("all_to_all", sent, parts, mesh, axis).wait()
    return out


def reduction(x: torch.Tensor, mesh: Mesh, axis: int, op: str) -> tuple[Works, Callable[[], object]] | None:
    """Start to reduce contiguous ``x`` in place: what to wait for, and what is left to do then.

    All ranks get the same bits. None where a ring is the better way.
    """
    if x.nbytes > _MOST or op not in _TWO or not isinstance(mesh.backend(axis, x.device), _Gloo):
        return None
    n, here = mesh.shape[axis], mesh.coordinate[axis]
    if n == 2:
        got = torch.empty_like(x)
        return exchange("all_reduce", (x, x), (got, got), mesh, axis), partial(_TWO[op], x, got, out=x)
    parts = _split(x.view(-1), n)
    gets = [torch.empty_like(parts[here]) for _ in range(n)]
    gets[here] = parts[here]

    def rest() -> None:
        parts[here].copy_(reduced(gets, op))
        exchange("all_reduce", [parts[here]] * n, parts, mesh, axis).wait()

    return exchange("all_reduce", parts, gets, mesh, axis), rest


def whole_sum(x: torch.Tensor, mesh: Mesh) -> tuple[Works, Callable[[], object]] | None:
    """Start to sum a few numbers ``x`` over all ranks of a mesh, in place, as :func:`reduction` does.

    All ranks add in the same order. None where there are many of them, or of ranks.
    """
    group, n = mesh.whole_group(), mesh.size()
    backend = group._get_backend(x.device)
    if n > _FEW or x.nbytes > _LITTLE or not isinstance(backend, _Gloo):
        return None
    here, gets = dist.get_rank(group), list(torch.empty(n, *x.shape, dtype=x.dtype).unbind())
    gets[here] = x
    works = _exchange("all_reduce", [x] * n, gets, backend, here, range(n))
    return works, lambda: x.copy_(reduced(gets, "sum"))


def _split(flat: torch.Tensor, n: int) -> list[torch.Tensor]:
    piece = -(-flat.numel() // n)
    return [flat[i * piece : (i + 1) * piece] for i in range(n)]


def reduced(rows: Sequence[torch.Tensor], op: str) -> torch.Tensor:
    """The reduction of rows, in their order; 16-bit floats are reduced in float32."""
    dtype = rows[0].dtype
    total = rows[0].float() if dtype.is_floating_point and dtype.itemsize == 2 else rows[0]
    for i, row in enumerate(rows[1:]):
        total = _TWO[op](total, row) if i == 0 else _TWO[op](total, row, out=total)
    return total.to(dtype)
