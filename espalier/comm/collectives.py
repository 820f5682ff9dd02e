"""Collectives along one mesh axis, and what crosses to another mesh: the only callers of c10d in the library.

Every function takes local tensors (no autograd), returns a new one and leaves its input alone
unless it says so. On a dry mesh nothing moves: the result has the right shape, its content
is undefined. On an axis of size 1 the input comes back. Ranks outside a mesh send nothing along it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from espalier.comm.direct import Works, exchange, reduced, reduction
from espalier.comm.ledger import Collective
from espalier.comm.traced import collective, recorders, tracers
from espalier.comm.wire import as_it_lies, as_wire, in_floats, in_order, pad_to, summable
from espalier.layout import chunk_bounds
from espalier.mesh import Mesh
from espalier.mesh.process import first_line

T = TypeVar("T")

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

# torch 2.13 renamed both; 2.11 knows the old names only
_gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter_from = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


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
    direct = None if beside else reduction(wire, mesh, axis, op)
    if direct is not None:
        return Pending(*direct)
    # the backend itself: dist.all_reduce costs several times as much in checks, on the hottest collective
    return Pending(mesh.backend(axis, wire.device).allreduce([wire], _ALL_REDUCE[op]))


def sum_whole(x: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """The sum of ``x`` over all ranks of the mesh, on every rank: one message, whatever its axes."""
    if mesh.size() == 1:
        return x
    out = x.clone(memory_format=torch.contiguous_format)
    sum_whole_(out, mesh).wait()
    return out


def sum_whole_(x: torch.Tensor, mesh: Mesh) -> Pending:
    """Start such a sum of contiguous ``x`` in place."""
    n = mesh.size()
    if n == 1:
        return Pending()
    axis = mesh.shape.index(n) if n in mesh.shape else -1
    _record(mesh, "all_reduce", axis, 2 * (n - 1) * -(-x.numel() // n) * x.element_size(), x, x.shape)
    return Pending() if mesh.is_dry else Pending(dist.all_reduce(x, group=mesh.whole_group(), async_op=True))


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
    n = mesh.shape[axis]
    if n == 1:
        return x
    piece = -(-size // n)
    shape = [*x.shape[:dim], piece, *x.shape[dim + 1 :]]
    whole = [*x.shape[:dim], size, *x.shape[dim + 1 :]]
    _record(mesh, "all_gather", axis, (n - 1) * math.prod(shape) * x.element_size(), x, whole)
    if mesh.is_dry:
        return x.new_empty(whole)
    if not x.is_cuda:
        return _gathered(as_it_lies(x), mesh, axis, dim, size)
    x, order = pad_to(x, dim, piece), mesh.order(axis)
    out = x.new_empty([n * shape[0], *shape[1:]])
    _gather_into(as_wire(out), as_wire(x), group=mesh.group(axis))
    if dim == 0 and size == n * piece and order is None:
        return out
    parts = _by_coordinate(out.view(n, *shape).unbind(0), order)
    return torch.cat([p.narrow(dim, 0, chunk_bounds(size, n, i)[1]) for i, p in enumerate(parts)], dim)


def _gathered(x: torch.Tensor, mesh: Mesh, axis: int, dim: int, size: int) -> torch.Tensor:
    n, here = mesh.shape[axis], mesh.coordinate[axis]
    whole = [*x.shape[:dim], size, *x.shape[dim + 1 :]]
    sizes = [chunk_bounds(size, n, i)[1] for i in range(n)]
    if math.prod(x.shape[:dim]) == 1:
        # one piece lies behind the other
        out = x.new_empty(whole)
        parts = list(torch.split(out, sizes, dim))
        parts[here].copy_(x)
        exchange("all_gather", [x] * n, parts, mesh, axis).wait()
        return out
    parts = [
        x if i == here else x.new_empty([*x.shape[:dim], k, *x.shape[dim + 1 :]]) for i, k in enumerate(sizes)
    ]
    exchange("all_gather", [x] * n, parts, mesh, axis).wait()
    return torch.cat(parts, dim)


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
    if not x.is_cuda:
        return _summed(x.resolve_conj().resolve_neg(), mesh, axis, dim)
    if dim == 0:
        wire = pad_to(x, 0, n * piece)
    else:
        wire = torch.cat([pad_to(x.narrow(dim, *chunk_bounds(size, n, i)), dim, piece) for i in range(n)])
    order = mesh.order(axis)
    if order is not None:
        wire = torch.cat(_by_place(wire.view(n, *shape).unbind(0), order))
    wire, op = summable(wire.resolve_conj(), "sum")
    out = x.new_empty(shape)
    _scatter_from(summable(out, "sum")[0], wire, _OPS[op], group=mesh.group(axis))
    return out if own == piece else out.narrow(dim, 0, own).contiguous()


def _summed(x: torch.Tensor, mesh: Mesh, axis: int, dim: int) -> torch.Tensor:
    """A reduce-scatter on gloo: its own would all-reduce, and send twice as much."""
    n, here = mesh.shape[axis], mesh.coordinate[axis]
    pieces = [x.narrow(dim, *chunk_bounds(x.shape[dim], n, i)) for i in range(n)]
    gives = [p if i == here else as_it_lies(p) for i, p in enumerate(pieces)]
    gets = [p if i == here else x.new_empty(pieces[here].shape) for i, p in enumerate(pieces)]
    exchange("reduce_scatter", gives, gets, mesh, axis).wait()
    return reduced(gets, "max" if x.dtype is torch.bool else "sum")


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
    if not x.is_cuda:
        gives = [as_it_lies(p) for p in pieces]
        parts = [gives[i] if i == here else x.new_empty(shape) for i, shape in enumerate(shapes)]
        exchange("all_to_all", gives, parts, mesh, axis).wait()
        return torch.cat(parts, join_dim)
    counts = [math.prod(shape) for shape in shapes]
    wire = torch.cat([p.reshape(-1) for p in pieces])
    out = _exchanged(wire, mesh, axis, counts, [p.numel() for p in pieces])
    parts = list(torch.split(out, counts))
    return torch.cat([p.view(s) for p, s in zip(parts, shapes, strict=True)], join_dim)


def _exchanged(wire: torch.Tensor, mesh: Mesh, axis: int, gets: list[int], gives: list[int]) -> torch.Tensor:
    """What the ranks send this one of flat ``wire``, so many elements from and to each."""
    order, wire = mesh.order(axis), wire.resolve_conj().resolve_neg()
    if not wire.is_cuda:
        out, here = wire.new_empty(sum(gets)), mesh.coordinate[axis]
        parts, sent = torch.split(out, gets), torch.split(wire, gives)
        parts[here].copy_(sent[here])
        exchange("all_to_all", sent, parts, mesh, axis).wait()
        return out
    if order is not None:
        wire = torch.cat(_by_place(torch.split(wire, gives), order))
        gets, gives = _by_place(gets, order), _by_place(gives, order)
    out = wire.new_empty(sum(gets))
    scale = wire.element_size() // as_wire(wire).element_size()
    into, outof = ([n * scale for n in given] for given in (gets, gives))
    dist.all_to_all_single(as_wire(out), as_wire(wire), into, outof, group=mesh.group(axis))
    return out if order is None else torch.cat(_by_coordinate(torch.split(out, gets), order))


def _by_coordinate(of_places: Sequence[T], order: tuple[int, ...] | None) -> list[T]:
    """What belongs to the places of a process group, in the order of the axis' coordinates."""
    return list(of_places) if order is None else [of_places[place] for place in order]


def _by_place(of_coordinates: Sequence[T], order: tuple[int, ...]) -> list[T]:
    """What belongs to the coordinates of an axis, in the order of its process group's places."""
    return [of_coordinates[order.index(place)] for place in range(len(order))]


@collective
def send(wire: torch.Tensor, mesh: Mesh, axis: int, gets: list[int], gives: list[int]) -> torch.Tensor:
    """What the ranks of the axis send this one, of flat buffers, so many elements from and to each."""
    here = mesh.coordinate[axis]
    _record(mesh, "all_to_all", axis, (sum(gives) - gives[here]) * wire.element_size())
    return wire.new_empty(sum(gets)) if mesh.is_dry else _exchanged(wire, mesh, axis, gets, gives)


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
        pieces = _by_place(cut, tuple(order))
    out = x.new_empty(padded)
    dist.scatter(as_wire(out), pieces, group_src=order[source], group=mesh.group(axis))
    return out if own == piece else out.narrow(dim, 0, own).contiguous()


@collective
def pass_on(x: torch.Tensor, mesh: Mesh, axis: int, gets: int) -> torch.Tensor:
    """What the rank before this one on the axis gives, a flat buffer of ``gets``, for flat ``x`` to the next.

    The last is followed by the first.
    """
    out, under_way = _passing(x, mesh, axis, gets)
    under_way.wait()
    return out


def passing(x: torch.Tensor, mesh: Mesh, axis: int, gets: int) -> tuple[torch.Tensor, Pending]:
    """:func:`pass_on` begun: the buffer, filled after the wait; until then ``x`` must stay as it is."""
    if recorders() or (tracers() and not mesh.is_dry):
        return pass_on(x, mesh, axis, gets), Pending()
    return _passing(x, mesh, axis, gets)


def _passing(x: torch.Tensor, mesh: Mesh, axis: int, gets: int) -> tuple[torch.Tensor, Pending]:
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
        ops.append(dist.P2POp(dist.isend, as_wire(x), group=group, group_peer=order[(here + 1) % n]))
    if gets:
        ops.append(dist.P2POp(dist.irecv, as_wire(out), group=group, group_peer=order[(here - 1) % n]))
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
