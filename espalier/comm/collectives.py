"""Collectives along one mesh axis, and what crosses to another mesh: the only callers of c10d in the library.

Every function takes local tensors (no autograd), returns a new one and leaves its input alone
unless it says so. On a dry mesh nothing moves: the result has the right shape, its content
is undefined. On an axis of size 1 the input comes back. Ranks outside a mesh send nothing along it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist

from espalier.comm.backend import ALL_REDUCE, Backend, Summing, Work, as_wire, in_floats, in_order
from espalier.comm.custom_ops import collective, recorders, traced, tracers
from espalier.comm.dry import Dry
from espalier.comm.gloo import Gloo, is_gloo, wires_of
from espalier.comm.hosts import Hosts
from espalier.comm.ledger import Collective
from espalier.comm.nccl import Nccl
from espalier.comm.shared import Shared
from espalier.comm.shared_memory import Host
from espalier.device import is_accelerator
from espalier.layout import chunk_bounds
from espalier.mesh import Mesh
from espalier.mesh.process import first_line
from espalier.torch_private import backend_for, timeout_of

_DRY: Final = Dry()
_NCCL: Final = Nccl()
_SUM: Final = ALL_REDUCE["sum", False]


def carrier(mesh: Mesh, axis: int, device: torch.device) -> Backend:
    """The backend that carries a device's tensors along an axis of a mesh; -1: among all its ranks."""
    if mesh.is_dry:
        return _DRY
    if is_accelerator(device):
        timed: Backend = mesh.timed.get(axis, _NCCL)
        return timed
    backend: Backend | None = mesh.carriers.get(axis)
    if backend is None:
        backend = mesh.carriers[axis] = _among(mesh, axis)
    return backend


def _among(mesh: Mesh, axis: int) -> Backend:
    """What carries an axis' tensors of the CPU."""
    group = mesh.group(axis) if axis >= 0 else mesh.whole_group()
    ranks = mesh.along(axis) if axis >= 0 else list(mesh.ranks)
    backend: Any = backend_for(group, torch.device("cpu"))
    host = Host.here()
    homes = host.homes(ranks) if is_gloo(backend) else []
    if len(homes) in (0, len(ranks)):  # none shares memory with another
        return Gloo(host.elsewhere(ranks), len(ranks))
    here, limit = ranks.index(mesh.world_rank), timeout_of(backend).total_seconds()
    if len(homes) == 1:
        return Shared(host, ranks, here, group.group_name, limit)
    places = [dist.get_group_rank(group, rank) for rank in ranks]
    return Hosts(host, ranks, here, group.group_name, limit, homes, places)


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


def all_reduce_(
    x: torch.Tensor, mesh: Mesh, axis: int, op: str = "sum", *, beside: bool = False
) -> Work[Any]:
    """Start reducing contiguous ``x`` in place; ``beside`` the program, which goes on before it waits."""
    n = mesh.shape[axis]
    if n == 1:
        return Work()
    if traced(mesh) and type(x) is not torch.Tensor:
        x.copy_(all_reduce(x, mesh, axis, op))
        return Work()
    if mesh.ledgers:
        record(mesh, "all_reduce", axis, 2 * (n - 1) * -(-x.numel() // n) * x.element_size(), x, x.shape)
    return carrier(mesh, axis, x.device).all_reduce(x, mesh, axis, op, beside=beside)


def sum_whole(x: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """The sum of ``x`` over all ranks of the mesh, on every rank: one message, whatever its axes."""
    if mesh.size() == 1:
        return x
    out = x.clone(memory_format=torch.contiguous_format)
    sum_whole_(out, mesh, beside=False).wait()
    return out


def sum_whole_(x: torch.Tensor, mesh: Mesh, *, beside: bool = True) -> Work[Any]:
    """Start such a sum of contiguous ``x``, in place; ``beside``: as of :func:`all_reduce_`."""
    n = mesh.size()
    if n == 1:
        return Work()
    axis = mesh.shape.index(n) if n in mesh.shape else -1
    record(mesh, "all_reduce", axis, 2 * (n - 1) * -(-x.numel() // n) * x.element_size(), x, x.shape)
    return carrier(mesh, axis, x.device).sum_whole(x, mesh, axis, beside=beside)


def sum_here(x: torch.Tensor, mesh: Mesh, axes: Iterable[int]) -> None:
    """Sum contiguous ``x`` over the axes, in place; done most of all, so the way to it is short."""
    for axis in axes:
        watched = mesh.ledgers or mesh.timed
        if watched or x.is_cpu or mesh.is_dry or tracers() or not x.is_floating_point():
            all_reduce_(x, mesh, axis).wait()
        else:
            work = mesh.backend(axis, x.device).allreduce([x], _SUM)
            if work is not None:  # None of NCCL: the sum is on the current stream
                work.wait()


@collective
def all_gather(x: torch.Tensor, mesh: Mesh, axis: int, dim: int, size: int) -> torch.Tensor:
    """Put together, along ``dim``, the pieces that the ranks hold of a dim of ``size``."""
    return x if mesh.shape[axis] == 1 else _gathering(x, mesh, axis, dim, size, False).wait()


def gathering(x: torch.Tensor, mesh: Mesh, axis: int, dim: int, size: int) -> Work[torch.Tensor]:
    """:func:`all_gather` begun. Until it is waited for ``x`` must stay as it is."""
    if mesh.shape[axis] == 1 or recorders() or traced(mesh):
        return Work.done(all_gather(x, mesh, axis, dim, size))
    return _gathering(x, mesh, axis, dim, size, True)


def _gathering(
    x: torch.Tensor, mesh: Mesh, axis: int, dim: int, size: int, beside: bool
) -> Work[torch.Tensor]:
    n = mesh.shape[axis]
    shape = [*x.shape[:dim], -(-size // n), *x.shape[dim + 1 :]]
    whole = [*x.shape[:dim], size, *x.shape[dim + 1 :]]
    record(mesh, "all_gather", axis, (n - 1) * math.prod(shape) * x.element_size(), x, whole)
    return carrier(mesh, axis, x.device).all_gather(x, mesh, axis, dim, size, beside=beside)


@collective
def reduce_scatter(x: torch.Tensor, mesh: Mesh, axis: int, dim: int) -> torch.Tensor:
    """This rank's piece, along ``dim``, of the sum of ``x`` over the axis."""
    n = mesh.shape[axis]
    if n == 1:
        return x
    if x.dtype is torch.int16:
        return reduce_scatter(x.int(), mesh, axis, dim).short()
    shape = [*x.shape[:dim], -(-x.shape[dim] // n), *x.shape[dim + 1 :]]
    record(mesh, "reduce_scatter", axis, (n - 1) * math.prod(shape) * x.element_size(), x, x.shape)
    return carrier(mesh, axis, x.device).reduce_scatter(x, mesh, axis, dim)


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
    record(mesh, "all_to_all", axis, sent, x, [*x.shape[:join_dim], join_size, *x.shape[join_dim + 1 :]])
    length = pieces[here].shape[split_dim]
    shapes = []
    for i in range(n):
        shape = list(x.shape)
        shape[split_dim], shape[join_dim] = length, chunk_bounds(join_size, n, i)[1]
        shapes.append(shape)
    return carrier(mesh, axis, x.device).all_to_all(pieces, shapes, join_dim, mesh, axis)


@collective
def send(wire: torch.Tensor, mesh: Mesh, axis: int, gets: list[int], gives: list[int]) -> torch.Tensor:
    """What the ranks of the axis send this one, of flat buffers, so many elements from and to each."""
    here = mesh.coordinate[axis]
    record(mesh, "all_to_all", axis, (sum(gives) - gives[here]) * wire.element_size())
    return carrier(mesh, axis, wire.device).exchange(wire, mesh, axis, gets, gives)


@collective
def broadcast(x: torch.Tensor, mesh: Mesh, axis: int, source: int = 0) -> torch.Tensor:
    """The value of one coordinate of the axis, on every rank."""
    if mesh.shape[axis] == 1:
        return x
    out = x if mesh.is_dry else x.clone(memory_format=torch.contiguous_format)
    broadcast_(out, mesh, axis, source).wait()
    return out


def broadcast_(x: torch.Tensor, mesh: Mesh, axis: int, source: int) -> Work[Any]:
    """Start to overwrite contiguous ``x`` with that of one coordinate of the axis.

    Each rank hands it on to the next; the last one sends nothing.
    """
    n = mesh.shape[axis]
    if n == 1:
        return Work()
    if traced(mesh):
        sent = broadcast(x, mesh, axis, source)
        if mesh.coordinate[axis] != source:  # whose own is not written to
            x.copy_(sent)
        return Work()
    ends = (mesh.coordinate[axis] - source) % n == n - 1
    record(mesh, "broadcast", axis, 0 if ends else x.numel() * x.element_size(), x, x.shape)
    return carrier(mesh, axis, x.device).broadcast(x, mesh, axis, source)


@collective
def reduce(x: torch.Tensor, mesh: Mesh, axis: int, target: int) -> torch.Tensor:
    """The sum over the axis, on one coordinate; what the others get is undefined."""
    out = x.clone(memory_format=torch.contiguous_format)
    reduce_(out, mesh, axis, target).wait()
    return out


def reduce_(x: torch.Tensor, mesh: Mesh, axis: int, target: int) -> Work[Any]:
    """Start to sum contiguous ``x`` over the axis, in place, on one coordinate; on others it is lost.

    Each rank hands the sum so far on to the next; the target, which is the last, sends nothing.
    """
    if mesh.shape[axis] == 1:
        return Work()
    if traced(mesh):
        x.copy_(reduce(x, mesh, axis, target))
        return Work()
    sent = 0 if mesh.coordinate[axis] == target else x.numel() * x.element_size()
    record(mesh, "reduce", axis, sent, x, x.shape)
    return carrier(mesh, axis, x.device).reduce(x, mesh, axis, target)


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
    padded = [*shape[:dim], -(-shape[dim] // n), *shape[dim + 1 :]]
    sent = (n - 1) * math.prod(padded) * x.element_size() if here == source else 0
    record(mesh, "scatter", axis, sent, x, shape)
    return carrier(mesh, axis, x.device).scatter(x, mesh, axis, dim, shape, source)


@collective
def pass_on(x: torch.Tensor, mesh: Mesh, axis: int, gets: int, step: int = 1) -> torch.Tensor:
    """Flat ``x`` to the rank so many steps on; gives the flat buffer, of ``gets``, of the one so many back.

    The last is followed by the first.
    """
    return _passing(x, mesh, axis, gets, step).wait()


def passing(x: torch.Tensor, mesh: Mesh, axis: int, gets: int, step: int = 1) -> Work[torch.Tensor]:
    """:func:`pass_on` begun; until it is waited for ``x`` must stay as it is."""
    if recorders() or traced(mesh):
        return Work.done(pass_on(x, mesh, axis, gets, step))
    return _passing(x, mesh, axis, gets, step)


def _passing(x: torch.Tensor, mesh: Mesh, axis: int, gets: int, step: int) -> Work[torch.Tensor]:
    if mesh.shape[axis] == 1:
        return Work.done(x)
    to = (mesh.coordinate[axis] + step) % mesh.shape[axis]
    record(mesh, "pass_on", axis, x.numel() * x.element_size(), to=to)
    return carrier(mesh, axis, x.device).pass_on(x, mesh, axis, gets, step)


def pass_by(op: str, x: torch.Tensor, mesh: Mesh, axis: int, shape: Sequence[int]) -> None:
    """Note a collective in which this rank has no part: all ranks of a mesh note the same, in one order."""
    if mesh.shape[axis] > 1:
        record(mesh, op, axis, 0, x, shape)


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
    away = set() if src.is_dry else Host.here().elsewhere(list(wires))
    beyond = sum(wire.nbytes for i, wire in enumerate(wires.values()) if i in away)
    event = Collective(src, "deliver", -1, sent, x.dtype, tuple(shape), dst, beyond)
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


def record(
    mesh: Mesh,
    op: str,
    axis: int,
    sent: int,
    x: torch.Tensor | None = None,
    whole: Sequence[int] | None = None,
    to: int | None = None,
) -> None:
    """Tell those who watch what is about to be sent.

    Args:
        whole: a shape that all ranks agree on.
        to: the coordinate that gets it, where one does.
    """
    if mesh.ledgers and mesh.is_member:
        dtype = None if x is None else x.dtype
        beyond = 0
        if mesh.device_type == "cpu" and not mesh.is_dry:
            beyond = carrier(mesh, axis, torch.device("cpu")).beyond(op, sent, dtype, to)
        whole = None if whole is None else tuple(whole)
        event = Collective(mesh, op, axis, sent, dtype, whole, beyond=beyond)
        for book in mesh.ledgers:
            book.saw(event)


# ---- messages from one rank to another along an axis; they arrive in the order in which they are sent


def send_to(xs: Sequence[torch.Tensor], mesh: Mesh, axis: int, to: int, tag: int) -> Work[Any]:
    """Start to send tensors to a coordinate of the axis; they must stay as they are until the wait.

    Args:
        tag: of this and its :func:`receive_from`. Messages of one tag arrive in the order in which they are
            sent. NCCL knows no tags: there all messages between two ranks do.
    """
    xs = [x.contiguous().resolve_conj() for x in xs if x.numel()]
    if not xs:
        return Work()
    record(mesh, "send", axis, sum(x.numel() * x.element_size() for x in xs), to=to)
    return carrier(mesh, axis, xs[0].device).send(xs, mesh, axis, to, tag)


def open_lanes(mesh: Mesh, axis: int, pairs: Iterable[tuple[int, int]]) -> None:
    """Give messages from a coordinate of the axis to another a way of their own (a collective along it).

    A communicator that NCCL makes when the device is known has one queue, in which each message stands until
    its other end is there. One that is made as ranks meet is made anew for each two of them. So with one such
    for each direction a message waits for none but those of the same two ranks, the same way. Elsewhere
    nothing is done.

    Args:
        pairs: coordinates that have something for each other.
    """
    if not mesh.is_dry and is_accelerator(mesh.device_type):
        _NCCL.open_lanes(mesh, axis, pairs)


def swap_with(
    x: torch.Tensor, mesh: Mesh, axis: int, peers: Sequence[int], tag: int
) -> Work[list[torch.Tensor]]:
    """Start to send a tensor to coordinates of the axis that send this one theirs, alike; gives these.

    All of it at once: where messages are done in the order in which they are posted, two ranks that send
    before they receive would wait for each other.
    """
    x = x.contiguous().resolve_conj()
    outs = [torch.empty_like(x) for _ in peers]
    if not x.numel():
        return Work.done(outs)
    for op, nbytes in (("send", x.nbytes), ("receive", 0)):
        for _ in peers:
            record(mesh, op, axis, nbytes)
    return Work((carrier(mesh, axis, x.device).swap(x, outs, mesh, axis, peers, tag),), lambda: outs)


def receive_from(
    like: Sequence[tuple[Sequence[int], torch.dtype]], mesh: Mesh, axis: int, source: int, tag: int
) -> Work[list[torch.Tensor]]:
    """Start to receive tensors of these shapes and dtypes from a coordinate of the axis."""
    outs = [torch.empty(tuple(shape), dtype=dtype, device=mesh.device()) for shape, dtype in like]
    filled = [x for x in outs if x.numel()]
    if not filled:
        return Work.done(outs)
    record(mesh, "receive", axis, 0)
    coming = carrier(mesh, axis, filled[0].device).receive(filled, mesh, axis, source, tag)
    return Work((coming,), lambda: outs)


# ---- flat buffers along one axis: gathered and summed while the program goes on
#
# What is sent are *rows*: a matrix [n, size], one row for each coordinate of the axis.
#
# Sums are taken in the order of the coordinates, element by element. So a value does not depend on where
# in a buffer it stood, nor on how many buffers there were: that is what makes ZeRO's stages bit-equal. On
# NCCL, whose rings add in an order of their own, the order depends on the owner of a value alone.


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


def start_gather(rows: torch.Tensor, own: torch.Tensor | None, mesh: Mesh, axis: int) -> Work[Any]:
    """Start to fill ``rows`` with the flat ``own`` of each coordinate; None: its row there has it already."""
    if mesh.shape[axis] == 1:
        if own is not None:
            rows[0].copy_(own)
        return Work()
    _record_gather(rows, mesh, axis)
    return carrier(mesh, axis, rows.device).gather_rows(rows, own, mesh, axis)


class Fetching:
    """Gathers into the same ``rows`` again and again, without a copy of what is here.

    Args:
        rows: their storage may be emptied between the times.
    """

    def __init__(self, rows: torch.Tensor, mesh: Mesh, axis: int) -> None:
        self._rows, self._mesh, self._axis = rows, mesh, axis
        self._wires = wires_of(rows)

    @staticmethod
    def serves(mesh: Mesh, axis: int, device: torch.device) -> bool:
        """Whether there is something to fetch, by a backend that sends from anywhere (gloo)."""
        return mesh.shape[axis] > 1 and carrier(mesh, axis, device).fetches

    def start(self, own: torch.Tensor) -> Work[Any]:
        """Start to send flat ``own`` to all, and to fill the others' rows; its own row is left as it is."""
        _record_gather(self._rows, self._mesh, self._axis)
        return carrier(self._mesh, self._axis, own.device).share(own, self._wires, self._mesh, self._axis)


def _record_gather(rows: torch.Tensor, mesh: Mesh, axis: int) -> None:
    n, size = rows.shape
    record(mesh, "all_gather", axis, (n - 1) * size * rows.element_size(), rows, rows.shape)


def start_sum(rows: torch.Tensor, mesh: Mesh, axis: int) -> Summing:
    """Start to sum ``rows`` over the axis; each coordinate gets its own row (a reduce-scatter)."""
    n = mesh.shape[axis]
    if n == 1:
        return Summing(rows.unbind(0), Work())
    record(mesh, "reduce_scatter", axis, (n - 1) * rows[0].numel() * rows.element_size(), rows, rows.shape)
    return carrier(mesh, axis, rows.device).sum_rows(rows, mesh, axis)


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
