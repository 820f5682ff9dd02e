"""What carries tensors between ranks: the one interface behind all collectives, and what is under way.

:func:`espalier.comm.collectives.carrier` says which backend carries a tensor along an axis:

* ``shared.Shared`` tensors of the CPU among ranks of one host, through memory that they share;
* ``hosts.Hosts`` those among ranks of several hosts, several on one: memory within a host, gloo between;
* ``gloo.Gloo`` other tensors of the CPU, straight from rank to rank where gloo would go round a ring;
* ``nccl.Nccl`` those of accelerators, by the backend's own collectives;
* ``dry.Dry`` nothing: the results have their shapes, and no content.

What goes the same way on gloo and NCCL (all of c10d) stands in :class:`C10d`. A further backend is a class in
a file of its own, of :class:`Backend`, or of one of these if it does only some things another way, and a line
in ``carrier``. Ledgers, checks and axes of size 1 are the callers': no backend sees them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist

from espalier.layout import chunk_bounds
from espalier.mesh import Mesh
from espalier.torch_private import is_all_zero, memory_id, neg_view

T = TypeVar("T")

_OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}


def _all_reduce_options(op: Any, beside: bool) -> dist.AllreduceOptions:
    options = dist.AllreduceOptions()
    options.reduceOp = op
    # if the program waits at once NCCL takes its stream, without an event and a stream of its own
    options.asyncOp = beside
    return options


ALL_REDUCE = {
    (name, beside): _all_reduce_options(op, beside) for name, op in _OPS.items() for beside in (True, False)
}


class Work(Generic[T]):
    """What is under way; :meth:`wait` ends it, does here what is left to do, and gives the result.

    Args:
        works: of c10d, to wait for; None for what is on the current stream, as NCCL gives where nothing was
            to go on beside it.
        rest: what is left to do then; it gives the result.
    """

    def __init__(self, works: Sequence[Any] = (), rest: Callable[[], T] | None = None) -> None:
        self._works = [work for work in works if work is not None]
        self._rest = rest
        self._result: Any = None

    @classmethod
    def done(cls, result: T) -> Work[T]:
        """One that has ended."""
        work = cls()
        work._result = result
        return work

    @property
    def has_ended(self) -> bool:
        """Whether a wait would be over at once, so far as c10d can say without one."""
        return all(work.is_completed() for work in self._works)

    def wait(self) -> T:
        """The result, when it is in place (on accelerators: when the stream may use it); again, the same."""
        for work in self._works:
            work.wait()
        self._works.clear()
        if self._rest is not None:
            self._result, self._rest = self._rest(), None
        return self._result  # type: ignore[no-any-return]


class Summing:
    """A sum over an axis under way, of which this rank gets its row.

    Attributes:
        everywhere: whether every rank gets all of it, in place of what was sent; then ``rows`` are None.
        place: memory that may hold the sum; None where there is none that nothing else stands in.
    """

    def __init__(
        self,
        rows: Sequence[torch.Tensor] | None,
        work: Work[Any],
        sent: torch.Tensor | None = None,
        place: torch.Tensor | None = None,
    ) -> None:
        self._rows, self._work, self._sent, self.place = rows, work, sent, place
        self.everywhere = rows is None

    def wait(self, out: torch.Tensor, *, add: bool = False) -> None:
        """Put the sum into flat ``out``, or add it to what is there. 16-bit rows are added up in float32."""
        self._work.wait()
        self._sent = None
        if self._rows is not None:
            self._add_up(self._rows, out, add)

    @staticmethod
    def _add_up(rows: Sequence[torch.Tensor], out: torch.Tensor, add: bool) -> None:
        narrow = len(rows) > 1 and rows[0].element_size() == 2
        wide = torch.float32 if narrow else rows[0].dtype
        if not add and len(rows) > 1 and out.dtype == rows[0].dtype == wide:
            # what is added later may lie where the sum is to go
            later = [row.clone() if _is_same(row, out) else row for row in rows[2:]]
            torch.add(rows[0], rows[1], out=out)
            for row in later:
                out.add_(row)
            return
        total = rows[0].to(wide)
        for i, row in enumerate(rows[1:]):
            total = total + row if i == 0 else total.add_(row)
        (out.add_ if add else out.copy_)(total)


def _is_same(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether two rows of equal length are the same memory."""
    is_shared = memory_id(x) == memory_id(y)
    return is_shared and int(x.storage_offset()) == int(y.storage_offset())


class Backend(ABC):
    """What every backend does, along an axis of more than one rank; this rank is of the mesh.

    Attributes:
        fetches: whether :meth:`share` is there.
    """

    fetches = False

    def beyond(self, op: str, sent: int, dtype: torch.dtype | None, to: int | None) -> int:
        """Bytes that leave this rank's host by it, for what a ledger notes.

        Args:
            op, sent, dtype: as of :class:`espalier.comm.ledger.Collective`.
            to: the coordinate to which all goes; None: it goes to all.
        """
        return 0

    @abstractmethod
    def all_reduce(self, x: torch.Tensor, mesh: Mesh, axis: int, op: str, *, beside: bool) -> Work[Any]:
        """Start to reduce contiguous ``x`` in place; all ranks get the same bits.

        Args:
            beside: the program goes on before it waits.
        """

    @abstractmethod
    def sum_whole(self, x: torch.Tensor, mesh: Mesh, axis: int, *, beside: bool) -> Work[Any]:
        """Start to sum contiguous ``x`` over all ranks, in place; axis -1: they lie along several."""

    @abstractmethod
    def all_gather(
        self, x: torch.Tensor, mesh: Mesh, axis: int, dim: int, size: int, *, beside: bool
    ) -> Work[torch.Tensor]:
        """Start to gather the pieces of a dim of ``size``; ``beside``: as of :meth:`all_reduce`."""

    @abstractmethod
    def reduce_scatter(self, x: torch.Tensor, mesh: Mesh, axis: int, dim: int) -> torch.Tensor:
        """This rank's piece, along ``dim``, of the sum of ``x``."""

    @abstractmethod
    def all_to_all(
        self, pieces: Sequence[torch.Tensor], shapes: Sequence[Sequence[int]], dim: int, mesh: Mesh, axis: int
    ) -> torch.Tensor:
        """Give each coordinate its piece; what they give, of these shapes, along ``dim`` together."""

    @abstractmethod
    def exchange(
        self, flat: torch.Tensor, mesh: Mesh, axis: int, gets: list[int], gives: list[int]
    ) -> torch.Tensor:
        """What the ranks send this one of their flat buffers, so many elements from and to each."""

    @abstractmethod
    def broadcast(self, x: torch.Tensor, mesh: Mesh, axis: int, source: int) -> Work[Any]:
        """Start to overwrite contiguous ``x`` with that of one coordinate."""

    @abstractmethod
    def reduce(self, x: torch.Tensor, mesh: Mesh, axis: int, target: int) -> Work[Any]:
        """Start to sum contiguous ``x``, in place, on one coordinate."""

    @abstractmethod
    def scatter(
        self, x: torch.Tensor, mesh: Mesh, axis: int, dim: int, shape: Sequence[int], source: int
    ) -> torch.Tensor:
        """This rank's piece of the value, of ``shape``, that one coordinate has."""

    @abstractmethod
    def pass_on(self, x: torch.Tensor, mesh: Mesh, axis: int, gets: int, step: int) -> Work[torch.Tensor]:
        """Start to send flat ``x`` so many coordinates on, and to get such a buffer from as many back."""

    @abstractmethod
    def send(self, xs: Sequence[torch.Tensor], mesh: Mesh, axis: int, to: int, tag: int) -> Work[Any]:
        """Start to send contiguous tensors to one coordinate."""

    @abstractmethod
    def receive(self, xs: Sequence[torch.Tensor], mesh: Mesh, axis: int, source: int, tag: int) -> Work[Any]:
        """Start to fill contiguous tensors with what one coordinate sends."""

    def swap(
        self,
        x: torch.Tensor,
        outs: Sequence[torch.Tensor],
        mesh: Mesh,
        axis: int,
        peers: Sequence[int],
        tag: int,
    ) -> Work[Any]:
        """Start to send ``x`` to coordinates, and to fill contiguous ``outs`` with what these send."""
        sent = [self.send([x], mesh, axis, peer, tag) for peer in peers]
        got = [self.receive([out], mesh, axis, peer, tag) for out, peer in zip(outs, peers, strict=True)]
        return Work([*got, *sent])

    @abstractmethod
    def gather_rows(self, rows: torch.Tensor, own: torch.Tensor | None, mesh: Mesh, axis: int) -> Work[Any]:
        """Start to fill ``rows`` with that of each coordinate; None: its row there has it already."""

    @abstractmethod
    def sum_rows(self, rows: torch.Tensor, mesh: Mesh, axis: int) -> Summing:
        """Start to send each coordinate its row; those that come are added up in the coordinates' order."""

    def share(self, own: torch.Tensor, wires: Sequence[torch.Tensor], mesh: Mesh, axis: int) -> Work[Any]:
        """Start to send ``own`` to all, and to fill the others' wires: from any memory to any other.

        Only of backends that have :attr:`fetches`.
        """
        raise NotImplementedError(f"{type(self).__name__} does not send from any memory: see Backend.fetches")


class C10d(Backend):
    """What all backends of torch.distributed do alike."""

    def all_reduce(self, x: torch.Tensor, mesh: Mesh, axis: int, op: str, *, beside: bool) -> Work[Any]:
        return all_reduced(*summable(x, op), mesh, axis, beside)

    def sum_whole(self, x: torch.Tensor, mesh: Mesh, axis: int, *, beside: bool) -> Work[Any]:
        if axis >= 0:
            return all_reduced(x, "sum", mesh, axis, beside)
        return Work((dist.all_reduce(x, group=mesh.whole_group(), async_op=beside),))

    def broadcast(self, x: torch.Tensor, mesh: Mesh, axis: int, source: int) -> Work[Any]:
        return Work((sent_from(x, mesh, axis, source),)) if x.numel() else Work()

    def reduce(self, x: torch.Tensor, mesh: Mesh, axis: int, target: int) -> Work[Any]:
        if not x.numel():
            return Work()
        options, order = dist.ReduceOptions(), mesh.order(axis)
        wire, op = summable(x, "sum")
        options.reduceOp = _OPS[op]  # type: ignore[assignment, unused-ignore]
        options.rootRank, options.rootTensor = target if order is None else order[target], 0
        return Work((mesh.backend(axis, wire.device).reduce([wire], options),))

    def scatter(
        self, x: torch.Tensor, mesh: Mesh, axis: int, dim: int, shape: Sequence[int], source: int
    ) -> torch.Tensor:
        n, here, size = mesh.shape[axis], mesh.coordinate[axis], shape[dim]
        piece = -(-size // n)
        pieces, order = None, mesh.order(axis) or range(n)
        if here == source:
            cut = [as_wire(pad_to(x.narrow(dim, *chunk_bounds(size, n, i)), dim, piece)) for i in range(n)]
            pieces = [cut[order.index(place)] for place in range(n)]
        out = x.new_empty([*shape[:dim], piece, *shape[dim + 1 :]])
        dist.scatter(as_wire(out), pieces, group_src=order[source], group=mesh.group(axis))
        length = chunk_bounds(size, n, here)[1]
        return out if length == piece else out.narrow(dim, 0, length).contiguous()

    def pass_on(self, x: torch.Tensor, mesh: Mesh, axis: int, gets: int, step: int) -> Work[torch.Tensor]:
        n, here, out = mesh.shape[axis], mesh.coordinate[axis], x.new_empty(gets)
        order, group = mesh.order(axis) or range(n), mesh.group(axis)
        # both sides know which messages are empty, and leave them out
        ops = []
        if x.numel():
            ops.append(dist.P2POp(dist.isend, as_wire(x), group=group, group_peer=order[(here + step) % n]))
        if gets:
            ops.append(dist.P2POp(dist.irecv, as_wire(out), group=group, group_peer=order[(here - step) % n]))
        return Work(dist.batch_isend_irecv(ops) if ops else (), lambda: out)

    def send(self, xs: Sequence[torch.Tensor], mesh: Mesh, axis: int, to: int, tag: int) -> Work[Any]:
        backend, places = self.lane(mesh, axis, mesh.coordinate[axis], to, xs[0].device)
        wires = [as_wire(x) for x in xs]
        # held until the wait, and no longer
        return Work([backend.send([w], places[to], tag) for w in wires], wires.clear)

    def receive(self, xs: Sequence[torch.Tensor], mesh: Mesh, axis: int, source: int, tag: int) -> Work[Any]:
        backend, places = self.lane(mesh, axis, source, mesh.coordinate[axis], xs[0].device)
        return Work([backend.recv([as_wire(x)], places[source], tag) for x in xs])

    def lane(
        self, mesh: Mesh, axis: int, source: int, to: int, device: torch.device
    ) -> tuple[Any, Sequence[int]]:
        """What of c10d carries messages between two coordinates, and the place there of each coordinate."""
        return mesh.backend(axis, device), mesh.order(axis) or range(mesh.shape[axis])


def all_reduced(x: torch.Tensor, op: str, mesh: Mesh, axis: int, beside: bool = True) -> Work[Any]:
    """The start of c10d's own all-reduce."""
    # the backend itself: dist.all_reduce costs several times as much in checks, on the hottest collective
    return Work((mesh.backend(axis, x.device).allreduce([x], ALL_REDUCE[op, beside]),))


def sent_from(x: torch.Tensor, mesh: Mesh, axis: int, source: int) -> Any:
    """The start of c10d's own broadcast."""
    options, wire, order = dist.BroadcastOptions(), as_wire(x), mesh.order(axis)
    options.rootRank, options.rootTensor = source if order is None else order[source], 0
    return mesh.backend(axis, wire.device).broadcast([wire], options)


# ---- what tensors are on the wire: as backends carry them, reduce them, and keep their order


# what every backend carries; the rest goes as bytes
_CARRIED = frozenset(
    {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8}
)


def as_wire(x: torch.Tensor) -> torch.Tensor:
    """Contiguous ``x`` as the network may carry it, where nothing is computed on the way."""
    return x if x.dtype in _CARRIED else x.reshape(-1).view(torch.uint8)


def as_it_lies(x: torch.Tensor) -> torch.Tensor:
    """``x``, contiguous, in memory, with no conjugation or sign that is still to come."""
    if is_all_zero(x):  # a gradient of sgn: all zero, and nowhere
        return x.clone(memory_format=torch.contiguous_format)
    return x.contiguous().resolve_conj().resolve_neg()


def summable(x: torch.Tensor, op: str) -> tuple[torch.Tensor, str]:
    """The same memory in a dtype that every backend reduces, and the operation to do on it."""
    if x.dtype is torch.bool:
        # True and True are True: bytes must stay 0 or 1
        return x.view(torch.uint8), {"sum": "max", "product": "min"}.get(op, op)
    if x.is_neg() and op in ("sum", "avg"):
        x = neg_view(x)  # as it lies in memory
    if x.dtype.is_complex and op in ("sum", "avg"):
        return torch.view_as_real(x.conj() if x.is_conj() else x), op
    return x, op


def in_order(x: torch.Tensor, op: str) -> torch.Tensor:
    """Integers in the order of the floats; NaN is the largest of all for max, the smallest for min."""
    wide = x if x.dtype is torch.float64 else x.float()
    key = _flipped(wide.view(torch.int64 if wide.dtype is torch.float64 else torch.int32))
    worst = torch.iinfo(key.dtype).max if op == "max" else torch.iinfo(key.dtype).min
    return key.masked_fill(wide.isnan(), worst)


def in_floats(key: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The floats that :func:`in_order` took."""
    wide = _flipped(key).view(torch.float64 if key.dtype is torch.int64 else torch.float32)
    return wide.to(dtype)


def _flipped(bits: torch.Tensor) -> torch.Tensor:
    """From the bits of floats, sign and magnitude, to integers that count up; and back."""
    info = torch.iinfo(bits.dtype)
    return bits ^ ((bits >> (info.bits - 1)) & info.max)


def pad_to(x: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """Contiguous ``x`` with zeros at the end of a dim, up to a size."""
    if x.shape[dim] == size:
        return as_it_lies(x)
    out = x.new_zeros([*x.shape[:dim], size, *x.shape[dim + 1 :]])
    out.narrow(dim, 0, x.shape[dim]).copy_(x)
    return out
