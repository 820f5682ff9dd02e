"""Collectives along one mesh axis, and what crosses to another mesh: the only callers of c10d in the library.

Every function takes local tensors (no autograd), returns a new one and leaves its input alone
unless it says so. On a dry mesh nothing moves: the result has the right shape, its content
is undefined. On an axis of size 1 the input comes back. Ranks outside a mesh send nothing along it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from espalier.comm import batched, direct
from espalier.comm.direct import Works
from espalier.comm.ledger import Collective
from espalier.comm.traced import collective, recorders, tracers
from espalier.comm.wire import as_wire, in_floats, in_order, pad_to, summable
from espalier.layout import chunk_bounds
from espalier.mesh import Mesh
from espalier.mesh.process import first_line

_OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}


def _all_reduce_options(op: Any) -> dist.AllreduceOptions:
    options = dist.AllreduceOptions()
    options.reduceOp = op
    return options


_ALL_REDUCE = {name: _all_reduce_options(op) for name, op in _OPS.items()}

_SUM = _ALL_REDUCE["sum"]


class Pending:
    """A collective under way; ``wait()`` ends it, and does ``then`` what is left to do here."""

    def __init__(self, work: Any = None, then: Callable[[], Any] | None = None) -> None:
        self._work, self._then = work, then

    def wait(self) -> None:
        """Return when the result is in place (on CUDA: when the stream may use it)."""
        if self._work is not None:
            self._work.wait()
            if self._then is not None:
                self._then()
            self._work = self._then = None


@collective
def all_reduce(x: torch.Tensor, mesh: Mesh, axis: int, op: str = "sum") -> torch.Tensor:
    """The reduction of ``x`` over the axis, on every rank; NaN wins in a maximum or minimum.

    Raises:
        ValueError: a maximum or minimum of complex values.
    """
    n = mesh.shape[axis]
    if n == 1:
        return x
    if op in ("max", "min"):
        if x.is_complex():
            raise ValueError(f"Partial({op}) of {x.dtype}: complex values have no order.")
        if x.is_floating_point():
            # backends lose a NaN, or not, as it comes; integers in the same order don't
            return in_floats(all_reduce(in_order(x, op), mesh, axis, op), x.dtype)
    if op == "product" and x.is_complex():
        # no backend multiplies them
        return all_gather(x.unsqueeze(0), mesh, axis, 0, n).prod(0)
    if x.dtype is torch.int16:
        return all_reduce(x.int(), mesh, axis, op).short()
    out = x.clone(memory_format=torch.contiguous_format)
    all_reduce_(out, mesh, axis, op).wait()
    return out


def all_reduce_(x: torch.Tensor, mesh: Mesh, axis: int, op: str = "sum", *, beside: bool = False) -> Pending:
    """Start reducing contiguous ``x`` in place; ``beside`` the program, which goes on before it waits."""
    n = mesh.shape[axis]
    if n == 1:
        return Pending()
    if tracers() and not mesh.is_dry and type(x) is not torch.Tensor:  # traced, and not only watched
        x.copy_(all_reduce(x, mesh, axis, op))
        return Pending()
    if mesh.ledgers:
        _record(mesh, "all_reduce", axis, 2 * (n - 1) * -(-x.numel() // n) * x.element_size(), x, x.shape)
    if mesh.is_dry:
        return Pending()
    wire, op = summable(x, op)
    at_once = None if beside else direct.reduction(wire, mesh, axis, op)
    if at_once is not None:
        return Pending(*at_once)
    # the backend itself: dist.all_reduce costs several times as much in checks, on the hottest collective
    return Pending(mesh.backend(axis, wire.device).allreduce([wire], _ALL_REDUCE[op]))


def sum_whole(x: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """The sum of ``x`` over all ranks of the mesh, on every rank: one message, whatever its axes."""
    if mesh.size() == 1:
        return x
    out = x.clone(memory_format=torch.contiguous_format)
    sum_whole_(out, mesh, beside=False).wait()
    return out


def sum_whole_(x: torch.Tensor, mesh: Mesh, *, beside: bool = True) -> Pending:
    """Start such a sum of contiguous ``x``, in place; ``beside``: as of :func:`all_reduce_`."""
    n = mesh.size()
    if n == 1:
        return Pending()
    axis = mesh.shape.index(n) if n in mesh.shape else -1
    _record(mesh, "all_reduce", axis, 2 * (n - 1) * -(-x.numel() // n) * x.element_size(), x, x.shape)
    if mesh.is_dry:
        return Pending()
    begun = None if beside else direct.whole_sum(x, mesh)
    if begun is None and axis >= 0:
        return Pending(mesh.backend(axis, x.device).allreduce([x], _SUM))
    return Pending(*(begun or (dist.all_reduce(x, group=mesh.whole_group(), async_op=True),)))


def sum_here(x: torch.Tensor, mesh: Mesh, axes: Iterable[int]) -> None:
    """Sum contiguous ``x`` over the axes, in place; done most of all, so the way to it is short."""
    for axis in axes:
        if mesh.ledgers or not x.is_cuda or tracers() or not x.is_floating_point():
            all_reduce_(x, mesh, axis).wait()
        else:
            mesh.backend(axis, x.device).allreduce([x], _SUM).wait()


@collective
def all_gather(x: torch.Tensor, mesh: Mesh, axis: int, dim: int, size: int) -> torch.Tensor:
    """Put together, along ``dim``, the pieces that the ranks hold of a dim of ``size``."""
    return x if mesh.shape[axis] == 1 else _gathering(x, mesh, axis, dim, size)()


def gathering(x: torch.Tensor, mesh: Mesh, axis: int, dim: int, size: int) -> Callable[[], torch.Tensor]:
    """:func:`all_gather` begun: gives what waits for its result. Until then ``x`` must stay as it is."""
    if mesh.shape[axis] == 1 or recorders() or (tracers() and not mesh.is_dry):
        out = all_gather(x, mesh, axis, dim, size)
        return lambda: out
    return _gathering(x, mesh, axis, dim, size)


def _gathering(x: torch.Tensor, mesh: Mesh, axis: int, dim: int, size: int) -> Callable[[], torch.Tensor]:
    n = mesh.shape[axis]
    shape = [*x.shape[:dim], -(-size // n), *x.shape[dim + 1 :]]
    whole = [*x.shape[:dim], size, *x.shape[dim + 1 :]]
    _record(mesh, "all_gather", axis, (n - 1) * math.prod(shape) * x.element_size(), x, whole)
    if mesh.is_dry:
        out = x.new_empty(whole)
        return lambda: out
    work, together = _ways(x).gather(x, mesh, axis, dim, size)

    def gathered() -> torch.Tensor:
        work.wait()
        found: torch.Tensor = together()
        return found

    return gathered


def _ways(x: torch.Tensor) -> Any:
    """How a tensor's backend does what the two do differently."""
    return batched if x.is_cuda else direct


def _sent_from(x: torch.Tensor, mesh: Mesh, axis: int, source: int) -> Any:
    options, wire, order = dist.BroadcastOptions(), as_wire(x), mesh.order(axis)
    options.rootRank, options.rootTensor = source if order is None else order[source], 0
    return mesh.backend(axis, wire.device).broadcast([wire], options)


@collective
def reduce_scatter(x: torch.Tensor, mesh: Mesh, axis: int, dim: int) -> torch.Tensor:
    """This rank's piece, along ``dim``, of the sum of ``x`` over the axis."""
    n = mesh.shape[axis]
    if n == 1:
        return x
    if x.dtype is torch.int16:
        return reduce_scatter(x.int(), mesh, axis, dim).short()
    size = x.shape[dim]
    piece = -(-size // n)
    own = chunk_bounds(size, n, mesh.coordinate[axis])[1]
    shape = [*x.shape[:dim], piece, *x.shape[dim + 1 :]]
    _record(mesh, "reduce_scatter", axis, (n - 1) * math.prod(shape) * x.element_size(), x, x.shape)
    if mesh.is_dry:
        return x.new_empty([*x.shape[:dim], own, *x.shape[dim + 1 :]])
    out: torch.Tensor = _ways(x).scatter_sum(x, mesh, axis, dim)
    return out


@collective
def all_to_all(
    x: torch.Tensor, mesh: Mesh, axis: int, split_dim: int, join_dim: int, join_size: int
) -> torch.Tensor:
    """Exchange: give away ``split_dim`` in pieces, put the pieces received together along ``join_dim``.

    Args:
        x: holds all of ``split_dim`` and this rank's piece of ``join_dim``.
        join_size: the whole size of ``join_dim``.
    """
    n, here = mesh.shape[axis], mesh.coordinate[axis]
    if n == 1:
        return x
    pieces = [x.narrow(split_dim, *chunk_bounds(x.shape[split_dim], n, i)) for i in range(n)]
    sent = sum(p.numel() for i, p in enumerate(pieces) if i != here) * x.element_size()
    _record(mesh, "all_to_all", axis, sent, x, [*x.shape[:join_dim], join_size, *x.shape[join_dim + 1 :]])
    own = pieces[here].shape[split_dim]
    shapes = []
    for i in range(n):
        shape = list(x.shape)
        shape[split_dim], shape[join_dim] = own, chunk_bounds(join_size, n, i)[1]
        shapes.append(shape)
    if mesh.is_dry:
        whole = list(x.shape)
        whole[split_dim], whole[join_dim] = own, join_size
        return x.new_empty(whole)
    return torch.cat(_ways(x).swap(pieces, shapes, mesh, axis), join_dim)


@collective
def send(wire: torch.Tensor, mesh: Mesh, axis: int, gets: list[int], gives: list[int]) -> torch.Tensor:
    """What the ranks of the axis send this one, of flat buffers, so many elements from and to each."""
    here = mesh.coordinate[axis]
    _record(mesh, "all_to_all", axis, (sum(gives) - gives[here]) * wire.element_size())
    return wire.new_empty(sum(gets)) if mesh.is_dry else _ways(wire).send(wire, mesh, axis, gets, gives)


@collective
def broadcast(x: torch.Tensor, mesh: Mesh, axis: int, source: int = 0) -> torch.Tensor:
    """The value of one coordinate of the axis, on every rank."""
    if mesh.shape[axis] == 1:
        return x
    out = x if mesh.is_dry else x.clone(memory_format=torch.contiguous_format)
    broadcast_(out, mesh, axis, source).wait()
    return out


def broadcast_(x: torch.Tensor, mesh: Mesh, axis: int, source: int) -> Pending:
    """Start to overwrite contiguous ``x`` with that of one coordinate of the axis.

    Each rank hands it on to the next; the last one sends nothing.
    """
    n = mesh.shape[axis]
    if n == 1:
        return Pending()
    if tracers() and not mesh.is_dry:
        sent = broadcast(x, mesh, axis, source)
        if mesh.coordinate[axis] != source:  # whose own is not written to
            x.copy_(sent)
        return Pending()
    ends = (mesh.coordinate[axis] - source) % n == n - 1
    _record(mesh, "broadcast", axis, 0 if ends else x.numel() * x.element_size(), x, x.shape)
    if mesh.is_dry or not x.numel():
        return Pending()
    return Pending(_sent_from(x, mesh, axis, source))


@collective
def reduce(x: torch.Tensor, mesh: Mesh, axis: int, target: int) -> torch.Tensor:
    """The sum over the axis, on one coordinate; what the others get is undefined."""
    out = x.clone(memory_format=torch.contiguous_format)
    reduce_(out, mesh, axis, target).wait()
    return out


def reduce_(x: torch.Tensor, mesh: Mesh, axis: int, target: int) -> Pending:
    """Start to sum contiguous ``x`` over the axis, in place, on one coordinate; on others it is lost.

    Each rank hands the sum so far on to the next; the target, which is the last, sends nothing.
    """
    if mesh.shape[axis] == 1:
        return Pending()
    if tracers() and not mesh.is_dry:
        x.copy_(reduce(x, mesh, axis, target))
        return Pending()
    sent = 0 if mesh.coordinate[axis] == target else x.numel() * x.element_size()
    _record(mesh, "reduce", axis, sent, x, x.shape)
    if mesh.is_dry or not x.numel():
        return Pending()
    options, order = dist.ReduceOptions(), mesh.order(axis)
    wire, op = summable(x, "sum")
    options.reduceOp = _OPS[op]  # type: ignore[assignment]
    options.rootRank, options.rootTensor = target if order is None else order[target], 0
    return Pending(mesh.backend(axis, wire.device).reduce([wire], options))


@collective
def scatter(
    x: torch.Tensor, mesh: Mesh, axis: int, dim: int, shape: Sequence[int], source: int = 0
) -> torch.Tensor:
    """This rank's piece, along ``dim``, of the value that one coordinate of the axis has.

    Args:
        x: on the source the value, of ``shape``; of the others its dtype and device count alone.
    """
    n, here = mesh.shape[axis], mesh.coordinate[axis]
    if n == 1:
        return x
    size = shape[dim]
    piece = -(-size // n)
    own = chunk_bounds(size, n, here)[1]
    padded = [*shape[:dim], piece, *shape[dim + 1 :]]
    sent = (n - 1) * math.prod(padded) * x.element_size() if here == source else 0
    _record(mesh, "scatter", axis, sent, x, shape)
    if mesh.is_dry:
        return x.new_empty([*shape[:dim], own, *shape[dim + 1 :]])
    pieces, order = None, mesh.order(axis) or range(n)
    if here == source:
        cut = [as_wire(pad_to(x.narrow(dim, *chunk_bounds(size, n, i)), dim, piece)) for i in range(n)]
        pieces = [cut[order.index(place)] for place in range(n)]
    out = x.new_empty(padded)
    dist.scatter(as_wire(out), pieces, group_src=order[source], group=mesh.group(axis))
    return out if own == piece else out.narrow(dim, 0, own).contiguous()


@collective
def pass_on(x: torch.Tensor, mesh: Mesh, axis: int, gets: int, step: int = 1) -> torch.Tensor:
    """Flat ``x`` to the rank so many steps on; gives the flat buffer, of ``gets``, of the one so many back.

    The last is followed by the first.
    """
    out, under_way = _passing(x, mesh, axis, gets, step)
    under_way.wait()
    return out


def passing(x: torch.Tensor, mesh: Mesh, axis: int, gets: int, step: int = 1) -> tuple[torch.Tensor, Pending]:
    """:func:`pass_on` begun: the buffer, filled after the wait; until then ``x`` must stay as it is."""
    if recorders() or (tracers() and not mesh.is_dry):
        return pass_on(x, mesh, axis, gets, step), Pending()
    return _passing(x, mesh, axis, gets, step)


def _passing(x: torch.Tensor, mesh: Mesh, axis: int, gets: int, step: int) -> tuple[torch.Tensor, Pending]:
    n, here = mesh.shape[axis], mesh.coordinate[axis]
    if n == 1:
        return x, Pending()
    _record(mesh, "pass_on", axis, x.numel() * x.element_size())
    out = x.new_empty(gets)
    if mesh.is_dry:
        return out, Pending()
    order, group = mesh.order(axis) or range(n), mesh.group(axis)
    # both sides know which messages are empty, and leave them out
    ops = []
    if x.numel():
        ops.append(dist.P2POp(dist.isend, as_wire(x), group=group, group_peer=order[(here + step) % n]))
    if gets:
        ops.append(dist.P2POp(dist.irecv, as_wire(out), group=group, group_peer=order[(here - step) % n]))
    return out, Pending(Works(dist.batch_isend_irecv(ops)) if ops else None)


def pass_by(op: str, x: torch.Tensor, mesh: Mesh, axis: int, shape: Sequence[int]) -> None:
    """Note a collective in which this rank has no part: all ranks of a mesh note the same, in one order."""
    if mesh.shape[axis] > 1:
        _record(mesh, op, axis, 0, x, shape)


Slices = tuple[slice, ...]


def deliver(
    x: torch.Tensor,
    out: torch.Tensor,
    src: Mesh,
    dst: Mesh,
    gives: Mapping[int, Sequence[Slices]],
    gets: Mapping[int, Sequence[Slices]],
    shape: Sequence[int],
) -> None:
    """Send parts of ``x`` from one mesh to ranks of another, and put into ``out`` what they send here.

    Messages go between the pairs of ranks that have something for each other; no others take part.

    Args:
        gives: for each rank of the world, the parts of ``x`` that it gets.
        gets: for each rank of the world, the parts of ``out`` that it sends, in its own order.
        shape: the global shape.

    Raises:
        RuntimeError: a rank did not send its part, or take it, in the time that the world allows.
    """
    wires = {peer: torch.cat([x[part].reshape(-1) for part in parts]) for peer, parts in gives.items()}
    sent = sum(wire.numel() for wire in wires.values()) * x.element_size()
    event = Collective(src, "deliver", -1, sent, x.dtype, tuple(shape), dst)
    for book in {id(book): book for book in (*src.ledgers, *dst.ledgers)}.values():
        book.saw(event)
    if src.is_dry and dst.is_dry:
        return
    ops = [dist.P2POp(dist.isend, as_wire(wire.resolve_conj()), peer) for peer, wire in wires.items()]
    buffers = {peer: out.new_empty(sum(out[part].numel() for part in parts)) for peer, parts in gets.items()}
    ops += [dist.P2POp(dist.irecv, as_wire(buffer), peer) for peer, buffer in buffers.items()]
    works = dist.batch_isend_irecv(ops) if ops else []
    for i, work in enumerate(works):
        try:
            work.wait()
        except RuntimeError as error:
            peer = ops[i].peer if len(works) == len(ops) else "another"
            raise RuntimeError(
                f"Rank {src.world_rank} waited in vain for rank {peer} while a tensor of shape {list(shape)} "
                f"went from {src!r} to {dst!r}: {first_line(error)}\n"
                "Every rank of both meshes must make the same calls, in the same order; also backward()."
            ) from error
    for peer, parts in gets.items():
        at = 0
        for part in parts:
            place = out[part]
            place.copy_(buffers[peer][at : at + place.numel()].view(place.shape))
            at += place.numel()


def _record(
    mesh: Mesh,
    op: str,
    axis: int,
    sent: int,
    x: torch.Tensor | None = None,
    whole: Sequence[int] | None = None,
) -> None:
    """Tell those who watch what is about to be sent; ``whole`` is a shape that all ranks agree on."""
    if mesh.ledgers and mesh.is_member:
        event = Collective(
            mesh, op, axis, sent, None if x is None else x.dtype, None if whole is None else tuple(whole)
        )
        for book in mesh.ledgers:
            book.saw(event)
