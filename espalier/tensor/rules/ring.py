"""Causal attention over a sequence cut into stretches, in which all ranks have as much to do.

The first stretches see few keys, the last ones all. Where a later stretch sees an earlier one, either rank
can compute the block: that of the queries, to which the keys come; or that of the keys, which then *helps*:
queries come to it, and what it found goes back (Li et al. 2023, DISTFLASHATTN). In round r = 1, ..., N // 2
rank i is sent something by rank i - r, counted round the axis: its keys, if it is an earlier one, else its
queries. So each two ranks meet once. Where N is even those of the last round meet twice, and each computes
half of the queries.

Of its own stretch a rank computes while the first messages are under way, and of each round while those of
the next are. Backward goes the same way. A rank holds no more than what one other sent, and the next.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.overrides import handle_torch_function

from espalier.comm import collectives
from espalier.comm.custom_ops import recorders, symbolic
from espalier.comm.row_exchange import Spans, exchange
from espalier.device import has_efficient_attention, has_flash_attention
from espalier.layout import Layout, local_box
from espalier.mesh import Mesh
from espalier.tensor import fused_kernels
from espalier.tensor.dry_runs import autocast_dtype, without_autocast
from espalier.tensor.random import Key, uniform_at

Parts = list[torch.Tensor]
Shapes = list[tuple[Sequence[int], torch.dtype]]


class RoundJob(NamedTuple):
    """What a rank computes in a round.

    Attributes:
        late, early: whose queries and whose keys.
        rows: of the queries, start and end.
    """

    late: int
    early: int
    rows: tuple[int, int]

    @property
    def idle(self) -> bool:
        """Whether there are no queries."""
        return self.rows[0] >= self.rows[1]


def job(sizes: Sequence[int], rank: int, step: int) -> RoundJob:
    """The job of a rank in a round, with the rank so many steps before it; ``sizes``: of all stretches."""
    other = (rank - step) % len(sizes)
    late, early = max(rank, other), min(rank, other)
    if 2 * step < len(sizes):
        return RoundJob(late, early, (0, sizes[late]))
    middle = (sizes[late] + 1) // 2
    return RoundJob(late, early, (0, middle) if rank == late else (middle, sizes[late]))


def _helped(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, key: Key | None, way: RingLayout
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and lse of this rank's queries, in what blocks are added up in."""
    passes = _Forward(q, k, v, key, way)
    passes.run()
    return passes.out, passes.lse


def _helped_back(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    grad: torch.Tensor, key: Key | None, way: RingLayout,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """The gradients of this rank's queries, keys and values, in what blocks are added up in."""
    passes = _Backward(q, k, v, key, way)
    passes.of_rows = [lse, q, grad, out]
    passes.run()
    return passes.dq, passes.dk, passes.dv


def sends(n: int, keys: float, queries: float) -> float:
    """Elements that a rank of n sends on average, forward and backward.

    Args:
        keys: elements of a rank's keys and values.
        queries: of its queries and their output.
    """
    jobs = [(rank, job([2] * n, rank, step)) for rank in range(n) for step in range(1, n // 2 + 1)]
    shares = (keys if of.late == rank else queries * (of.rows[1] - of.rows[0]) / 2 for rank, of in jobs)
    return 3 * sum(shares) / n


class _Pass:
    """One pass over all jobs: forward or backward.

    Attributes:
        q, k, v: of this rank.
        of_rows: what travels of queries, [b, h, s, ...].
        sizes: of all stretches.
    """

    def __init__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, key: Key | None, way: RingLayout
    ) -> None:
        self.q, self.k, self.v, self._key, self._way = q, k, v, key, way
        self.of_rows = [q]
        self.sizes = [size_of(spans) for spans in way.keys]

    def compute(
        self, job: RoundJob, of_rows: Sequence[torch.Tensor], k: torch.Tensor, v: torch.Tensor
    ) -> Parts:
        """Do a job, and keep what belongs to this rank; what is left is the other's."""
        raise NotImplementedError

    def back(self, job: RoundJob) -> Shapes:
        """What :meth:`compute` leaves for this rank where another does the job."""
        raise NotImplementedError

    def take(self, job: RoundJob, parts: Parts) -> None:
        """Keep that."""
        raise NotImplementedError

    def block(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, job: RoundJob) -> Block:
        """That of a job, whose queries are ``q``."""
        kept = None
        if self._key is not None:
            late, early = self._way.keys[job.late], self._way.keys[job.early]
            kept = Kept(self._way, late, early, self._key, job.rows)
        return Block(q, k, v, self._way.scale, None, job.late == job.early, kept)

    def run(self) -> None:
        """Do all jobs of this rank, and take what others found for it."""
        here, n = self._way.here, len(self.sizes)
        rounds = range(1, n // 2 + 1)
        coming = self._start(1) if rounds else None
        if self.sizes[here]:
            self.compute(RoundJob(here, here, (0, self.sizes[here])), self.of_rows, self.k, self.v)
        returning: tuple[RoundJob, _Message] | None = None
        for step in rounds:
            ahead = self._start(step + 1) if step + 1 in rounds else None
            mine, theirs = job(self.sizes, here, step), job(self.sizes, (here + step) % n, step)
            assert coming is not None
            left: Parts = []
            if not mine.idle:
                got = coming.wait()
                late = mine.late == here
                of_rows = [x[:, :, slice(*mine.rows)] for x in self.of_rows] if late else got
                left = self.compute(mine, of_rows, *(got if late else (self.k, self.v)))
            else:
                coming.wait()
            went = _Message(self._way, left, [] if theirs.idle else self.back(theirs), -step, self.q)
            if returning is not None:
                self._take(*returning)
            returning, coming = (theirs, went), ahead
        if returning is not None:
            self._take(*returning)

    def _start(self, step: int) -> _Message:
        """Start to send the rank so many steps on what it needs, and to get what this one needs."""
        here, n = self._way.here, len(self.sizes)
        mine, theirs = job(self.sizes, here, step), job(self.sizes, (here + step) % n, step)
        gives: Parts = []
        if not theirs.idle:
            rows = [x[:, :, slice(*theirs.rows)] for x in self.of_rows]
            gives = rows if theirs.late == here else [self.k, self.v]
        gets: Shapes = []
        if not mine.idle:
            late, height = mine.late == here, mine.rows[1] - mine.rows[0]
            like = [self.k, self.v] if late else self.of_rows
            gets = [_rows_of(x, self.sizes[mine.early] if late else height, x.dtype) for x in like]
        return _Message(self._way, gives, gets, step, self.q)

    def _take(self, job: RoundJob, went: _Message) -> None:
        parts = went.wait()
        if parts:
            self.take(job, parts)


class _Forward(_Pass):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.out, self.lse = nothing(self.q, self.v, wide(self.q.dtype))

    def compute(
        self, job: RoundJob, of_rows: Sequence[torch.Tensor], k: torch.Tensor, v: torch.Tensor
    ) -> Parts:
        out, lse = forward(self.block(of_rows[0], k, v, job))
        if job.early == job.late:
            # copied: it will be written to, and who recomputes may have kept what the kernel gave
            self.out, self.lse = (x.to(self.lse.dtype, copy=True) for x in (out, lse))
        elif job.late == self._way.here:
            self.take(job, [lse, out])
        else:
            return [lse.to(self.lse.dtype), out.to(self.q.dtype)]
        return []

    def back(self, job: RoundJob) -> Shapes:
        if job.late != self._way.here:
            return []
        height = job.rows[1] - job.rows[0]
        return [_rows_of(self.lse, height, self.lse.dtype), _rows_of(self.out, height, self.q.dtype)]

    def take(self, job: RoundJob, parts: Parts) -> None:
        rows = slice(*job.rows)
        merge(self.out[:, :, rows], self.lse[:, :, rows], parts[1], parts[0])


class _Backward(_Pass):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        acc = wide(self.q.dtype)
        self.dq, self.dk, self.dv = (torch.zeros_like(x, dtype=acc) for x in (self.q, self.k, self.v))

    def compute(
        self, job: RoundJob, of_rows: Sequence[torch.Tensor], k: torch.Tensor, v: torch.Tensor
    ) -> Parts:
        lse, q, grad, out = of_rows
        dq, dk, dv, _ = backward(self.block(q, k, v, job), grad, out, lse)
        if job.late == self._way.here:
            self.dq[:, :, slice(*job.rows)] += dq
        if job.early == self._way.here:
            self.dk += dk
            self.dv += dv
        if job.early == job.late:
            return []
        return [x.to(self.dq.dtype) for x in ([dk, dv] if job.late == self._way.here else [dq])]

    def back(self, job: RoundJob) -> Shapes:
        if job.late == self._way.here:
            return [_rows_of(self.dq, job.rows[1] - job.rows[0], self.dq.dtype)]
        return [(x.shape, x.dtype) for x in (self.dk, self.dv)]

    def take(self, job: RoundJob, parts: Parts) -> None:
        if job.late == self._way.here:
            self.dq[:, :, slice(*job.rows)] += parts[0]
        else:
            self.dk += parts[0]
            self.dv += parts[1]


def _rows_of(x: torch.Tensor, rows: int, dtype: torch.dtype) -> tuple[Sequence[int], torch.dtype]:
    return (*x.shape[:2], rows, *x.shape[3:]), dtype


_ALIGNED = 16  # bytes


class _Message:
    """Tensors on their way to the rank so many steps on, as bytes, and others from the one so far back.

    Each begins at a multiple of ``_ALIGNED`` bytes: kernels of accelerators read whole vectors.
    """

    def __init__(self, way: RingLayout, gives: Parts, gets: Shapes, step: int, like: torch.Tensor) -> None:
        assert way.axis is not None
        fill, wires = like.new_zeros(_ALIGNED, dtype=torch.uint8), []
        for x in gives:
            wires += [x.contiguous().view(-1).view(torch.uint8), fill[: -x.nbytes % _ALIGNED]]
        self._sent = torch.cat(wires) if wires else like.new_empty(0, dtype=torch.uint8)
        self._gets = gets
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in gets]
        self._slots = [size + -size % _ALIGNED for size in sizes]
        self._coming = collectives.passing(self._sent, way.mesh, way.axis, sum(self._slots), step)

    def wait(self) -> Parts:
        """What came: views of one buffer."""
        got = self._coming.wait()
        parts = got.split(self._slots) if self._slots else ()
        return [
            part[: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
            for part, (shape, dtype) in zip(parts, self._gets, strict=True)
        ]


# ---- attention over a sharded sequence: blocks of keys and values travel round the axis
#
# Ring attention (Liu, Zaharia, Abbeel, 2023). Each rank computes its own queries against the block that is
# with it, while the next one is on its way. In the backward pass the blocks travel again, and their
# gradients go with them and end at home. A rank holds its own block and two more, whatever the number of
# ranks.
#
# A causal sequence cut into stretches would leave the first ranks idle: see ``balanced`` for what is done
# there.


class RingProduct(NamedTuple):
    """Rows ``q`` and keys ``k`` (start and end, as this rank has them) that are computed at once.

    ``cut``: ``""``, each row sees all; ``"same"``, rows and keys are the same, causal; ``"masked"``, causal.
    """

    q: tuple[int, int]
    k: tuple[int, int]
    cut: str


@lru_cache(maxsize=65536)
def calls(queries: Spans, keys: Spans, causal: bool) -> tuple[RingProduct, ...]:
    """What is to be computed of a stretch of rows against a block of keys, in few calls."""
    rows, columns = size_of(queries), size_of(keys)
    if not causal:
        return (RingProduct((0, rows), (0, columns), ""),) if rows and columns else ()
    if queries == keys:
        return (RingProduct((0, rows), (0, rows), "same"),) if rows else ()
    ((start, end),), ((first, _),) = queries, keys
    below, upto = (min(max(stop - first, 0), columns) for stop in (start, end))
    products = [RingProduct((0, rows), (0, below), "")] if rows and below else []
    if rows and upto > below:
        products.append(RingProduct((0, rows), (below, upto), "same" if upto - below == rows else "masked"))
    return tuple(products)


def ring(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    key: Key | None,
    way: RingLayout,
) -> torch.Tensor:
    """Attention of this rank's queries over all keys; differentiable to any order.

    Args:
        q, k, v: [b, h, s, d], [b, g, t, d], [b, g, t, e] with this rank's rows of s and t.
        bias: broadcast to [b, h, s, t], with this rank's rows and all columns; of bools, what may be seen.
        key: of the random stream, where there is dropout.
    """
    if recorders():
        return handle_torch_function(ring, (), q, k, v, bias, key, way)
    low = autocast_dtype(q.device.type)
    if low is None:
        return _apply(q, k, v, bias, key, way)
    # as of torch's own function: the inputs are cast, and what is computed of them is left alone
    q, k, v = (x if x.dtype is torch.float64 else x.to(low) for x in (q, k, v))
    with without_autocast(q.device.type):
        return _apply(q, k, v, bias, key, way)


class _Ring(torch.autograd.Function):
    espalier = True
    meets = True  # others, backward

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        bias: torch.Tensor | None,
        key: Key | None,
        way: RingLayout,
    ) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.way, ctx.key = way, key
        out, lse = _helped(q, k, v, key, way) if way.balanced else _round(q, k, v, bias, key, way)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, bias, out, lse.masked_fill(lse == -math.inf, 0.0))
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> Any:
        if grad is None:
            return (None,) * 6
        q, k, v, bias, out, lse = ctx.saved_tensors
        wanted = [x for x, needed in zip((q, k, v, bias), ctx.needs_input_grad, strict=False) if needed]
        if torch.is_grad_enabled():
            # the gradient is to be differentiated: by the formula itself, on all keys
            again = _plainly(q, k, v, bias, ctx.key, ctx.way)
            got = iter(torch.autograd.grad(again, wanted, grad, create_graph=True))
            return *(next(got) if needed else None for needed in ctx.needs_input_grad[:4]), None, None
        if ctx.way.balanced:
            grads = _helped_back(q, k, v, out, lse, grad, ctx.key, ctx.way)
            return *(x.to(q.dtype) for x in grads), None, None, None
        dq, dk, dv, db = _backward(q, k, v, bias, out, lse, grad, ctx.key, ctx.way, ctx.needs_input_grad[3])
        return dq, dk, dv, db, None, None


def _round(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    key: Key | None,
    way: RingLayout,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and lse of this rank's queries, as the keys come by."""
    plainly = bias is not None and bias.requires_grad
    acc = wide(q.dtype)
    sofar: tuple[torch.Tensor, torch.Tensor] | None = None
    is_own = False
    for place, kb, vb in _rounds(k, v, way):
        for call in calls(way.queries, way.keys[place], way.causal):
            block = _block(q, kb, vb, bias, key, way, place, call, plainly)
            if block.unseen:
                continue
            out, sums = forward(block)
            if sofar is None:
                sofar, is_own = (out, sums), False
                continue
            if not is_own:
                # copied, for it is written to: who recomputes may have kept what the kernel gave
                sofar, is_own = (sofar[0].to(acc, copy=True), sofar[1].to(acc, copy=True)), True
            merge(*sofar, out, sums)
    return nothing(q, v, acc) if sofar is None else sofar


_apply: Callable[..., torch.Tensor] = super(torch.autograd.Function, _Ring).apply


def _backward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor,
    lse: torch.Tensor, grad: torch.Tensor, key: Key | None, way: RingLayout, wants_bias: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:  # fmt: skip
    acc, n, here = wide(q.dtype), len(way.keys), way.here
    todo = calls(way.queries, way.keys[here], way.causal)
    if n == 1 and [call[:2] for call in todo] == [((0, q.shape[2]), (0, k.shape[2]))]:
        block = _block(q, k, v, bias, key, way, here, todo[0], wants_bias)
        if not block.unseen:
            return _backward_at_once(block, grad, out, lse, bias if wants_bias else None)
    dq = torch.zeros_like(q, dtype=acc)
    db = torch.zeros_like(bias, dtype=acc) if bias is not None and wants_bias else None
    own = coming = None
    for i, (place, kb, vb) in enumerate(_rounds(k, v, way)):
        parts = kb.new_zeros(kb.numel() + vb.numel(), dtype=acc)
        dk, dv = _pair(parts, kb.shape, vb.shape)
        for call in calls(way.queries, way.keys[place], way.causal):
            rows, columns = slice(*call.q), slice(*call.k)
            block = _block(q, kb, vb, bias, key, way, place, call, wants_bias)
            if block.unseen:
                continue
            got = backward(block, grad[:, :, rows], out[:, :, rows], lse[:, :, rows])
            dq[:, :, rows] += got[0]
            dk[:, :, columns] += got[1]
            dv[:, :, columns] += got[2]
            if db is not None and got[3] is not None:
                part = _of_bias(db, way.keys[place], call)
                part += got[3].sum_to_size(part.shape)
        if i == 0:
            own = parts
            continue
        if coming is not None:
            parts += coming.wait()
        # the gradients of this block go on with it; what the rank before has is of the next one here
        assert way.axis is not None
        ahead = size_of(way.keys[(here - i - 1) % n])
        coming = collectives.passing(parts, way.mesh, way.axis, ahead * _width(k, v))
    assert own is not None
    if coming is not None:
        own += coming.wait()
    dk, dv = _pair(own, k.shape, v.shape)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None if db is None else db.to(bias.dtype)  # type: ignore[union-attr]


def _backward_at_once(
    block: Block, grad: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The gradients of a block of all queries and keys, and of a bias: nothing is added up."""
    q, k, v = block[:3]
    dq, dk, dv, of_scores = backward(block, grad, out, lse, q.dtype)
    db = None if bias is None or of_scores is None else of_scores.sum_to_size(bias.shape).to(bias.dtype)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), db


def _rounds(
    k: torch.Tensor, v: torch.Tensor, way: RingLayout
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Whose block is here, and its keys and values, round by round, while the next one is on its way."""
    n, here, wire = len(way.keys), way.here, None
    for i in range(n):
        place, coming = (here - i) % n, None
        if i + 1 < n:
            assert way.axis is not None
            wire = torch.cat([k.reshape(-1), v.reshape(-1)]) if wire is None else wire
            rows = size_of(way.keys[(place - 1) % n])
            coming = collectives.passing(wire, way.mesh, way.axis, rows * _width(k, v))
        yield place, k, v
        if coming is not None:
            wire = coming.wait()
            k, v = _pair(wire, (*k.shape[:2], rows, k.shape[3]), (*v.shape[:2], rows, v.shape[3]))


def _width(k: torch.Tensor, v: torch.Tensor) -> int:
    """Elements of one row of keys and values."""
    return k.shape[0] * k.shape[1] * k.shape[3] + v.shape[0] * v.shape[1] * v.shape[3]


def _pair(wire: torch.Tensor, k: Any, v: Any) -> tuple[torch.Tensor, torch.Tensor]:
    keys, values = wire.split([math.prod(k), math.prod(v)])
    return keys.view(k), values.view(v)


def _block(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, key: Key | None,
    way: RingLayout, place: int, call: RingProduct, plainly: bool,
) -> Block:  # fmt: skip
    rows, columns = slice(*call.q), slice(*call.k)
    part = None if bias is None else _of_bias(bias, way.keys[place], call)
    ahead = None
    if call.cut == "masked":
        ahead = way.queries[0][0] + call.q[0] - way.keys[place][0][0] - call.k[0]
    kept = None if key is None else Kept(way, way.queries, way.keys[place], key, call.q, call.k)
    return Block(
        q[:, :, rows],
        k[:, :, columns],
        v[:, :, columns],
        way.scale,
        part,
        call.cut == "same",
        kept,
        plainly,
        ahead,
    )


def _of_bias(bias: torch.Tensor, keys: Spans, call: RingProduct) -> torch.Tensor:
    """The part of the bias that belongs to a call, a view."""
    if bias.shape[-2] > 1:
        bias = bias[:, :, slice(*call.q)]
    if bias.shape[-1] == 1:
        return bias
    ((start, _),) = keys
    return bias[..., start + call.k[0] : start + call.k[1]]


def _plainly(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    key: Key | None,
    way: RingLayout,
) -> torch.Tensor:
    """The same by the formula, on all keys."""
    spans = way.keys[0]
    if way.axis is not None:
        everything = ((0, way.weights.shape[-1]),)
        whole = (everything,) * len(way.keys)
        k, v = (exchange(x, way.mesh, (way.axis,), 2, way.keys, whole) for x in (k, v))
        spans = everything
    if way.causal:
        bias = numbers(way.queries, q.device).unsqueeze(-1) >= numbers(spans, q.device)
    kept = None if key is None else Kept(way, way.queries, spans, key)
    return forward(Block(q, k, v, way.scale, bias, False, kept, True))[0].to(q.dtype)


# ---- attention of some queries over some of their keys, with what it takes to put such blocks together
#
# A block gives its output and, for each query, the logarithm of the sum of its weights (*lse*). Two blocks
# of the same queries are merged by these (Milakov and Gimelshein, 2018; Dao et al., 2022). In the backward
# pass each block needs the lse and the output of the whole only.


_OPS = torch.ops.aten
_CPU: Any = getattr(_OPS, "_scaled_dot_product_flash_attention_for_cpu", None)
_CPU_BACK: Any = getattr(_OPS, "_scaled_dot_product_flash_attention_for_cpu_backward", None)
_FLASH: Any = getattr(_OPS, "_scaled_dot_product_flash_attention", None)
_FLASH_BACK: Any = getattr(_OPS, "_scaled_dot_product_flash_attention_backward", None)
_WIDEST = 192  # heads that flash attention differentiates on every device that has it
_EFFICIENT: Any = getattr(_OPS, "_scaled_dot_product_efficient_attention", None)
_EFFICIENT_BACK: Any = getattr(_OPS, "_scaled_dot_product_efficient_attention_backward", None)
_ROWS = 32  # of which the efficient kernel gives lse in multiples


class Block(NamedTuple):
    """Queries [b, h, s, d], keys [b, g, t, d] and values [b, g, t, e]; g divides h.

    Attributes:
        bias: added to the scores, broadcast to [b, h, s, t], or, of bools, what may be seen; None: nothing.
        causal: query i sees the keys up to i.
        keep: what weights are dropped; None: none.
        plainly: no kernel will do, say because the bias needs a gradient.
        ahead: without a bias: query i sees the keys up to i + ahead; None: all, or as ``causal`` says.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    scale: float
    bias: torch.Tensor | None = None
    causal: bool = False
    keep: Kept | None = None
    plainly: bool = False
    ahead: int | None = None

    @property
    def unseen(self) -> bool:
        """Whether a mask hides it all: then it need not be computed.

        Not asked where values are not known, nor of an accelerator, as the host would wait for the answer.
        """
        if self.bias is None or self.bias.device.type != "cpu" or symbolic():
            return False
        seen = self.bias if self.bias.dtype is torch.bool else self.bias > -math.inf
        return not seen.any()

    @property
    def kernel(self) -> str:
        """Which computes it: ``"flash"``, ``"efficient"``, the ``"cpu"``'s, our ``"own"``, or ``"plain"``."""
        q, device = self.q, self.q.device.type
        if self.plainly:
            return "plain"
        special = self.keep is not None or q.shape[-1] != self.v.shape[-1]
        if device in ("cpu", "meta") and _CPU is not None and not special:
            return "cpu"
        masked = self.bias is not None or self.ahead is not None
        fits = q.dtype is not torch.float64 and q.shape[-1] % 8 == 0 and not masked and not special
        # of queries and keys that differ in number it sees other keys as causal than torch does
        square = not self.causal or q.shape[-2] == self.k.shape[-2]
        if fits and square and q.dtype.itemsize == 2 and q.shape[-1] <= _WIDEST and flash_serves(q.device):
            return "flash"
        if has_efficient_attention(device) and _EFFICIENT is not None and fits:
            return "efficient"
        numbered = self.keep is None or self.keep.numbered() is not None
        return "own" if numbered and fused_kernels.attends(q, self.k, self.v) else "plain"

    @property
    def mask(self) -> torch.Tensor | None:
        """The bias, spelled out."""
        if self.ahead is None:
            return self.bias
        row, column = (torch.arange(n, device=self.q.device) for n in (self.q.shape[-2], self.k.shape[-2]))
        return row.unsqueeze(-1) + self.ahead >= column

    def told(
        self,
    ) -> tuple[
        torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, int | None, float,
        fused_kernels.Dropout | None,
    ]:  # fmt: skip
        """As :func:`fused_kernels.attention` takes it."""
        drops = None if self.keep is None else self.keep.numbered()
        return self.q, self.k, self.v, self.bias, 0 if self.causal else self.ahead, self.scale, drops


def flash_serves(device: torch.device) -> bool:
    """Whether flash attention is there, and nobody turned it off."""
    return _FLASH is not None and has_flash_attention(device)


def wide(dtype: torch.dtype) -> torch.dtype:
    """What blocks of a dtype are added up in."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def forward(block: Block) -> tuple[torch.Tensor, torch.Tensor]:
    """The output [b, h, s, e], and lse [b, h, s]: minus infinity for a query that sees no key."""
    kernel = block.kernel
    if kernel == "plain":
        return _plain(block)
    if kernel == "flash":
        out, lse, *_ = _FLASH(block.q, block.k, block.v, 0.0, block.causal, scale=block.scale)
        return out, lse
    if kernel == "own":
        return fused_kernels.attention(*block.told())
    q, k, v = block.q, _spread(block.k, block.q), _spread(block.v, block.q)
    if kernel == "cpu":
        bias = _full(block)
        out, lse = _CPU(q, k, v, 0.0, block.causal, attn_mask=bias, scale=block.scale)
        if bias is not None:
            # the kernel says 0 of a query that sees nothing
            lse = lse.masked_fill(bias.isneginf().all(-1), -math.inf)
        return out, lse
    out, lse, *_ = _EFFICIENT(q, k, v, None, True, 0.0, block.causal, scale=block.scale)
    return out, lse[..., : q.shape[-2]]


def fused(block: Block) -> torch.Tensor:
    """The output alone, by the CPU's kernel, which takes keys of fewer heads as they are: differentiable."""
    q, k, v = block.q, block.k, block.v
    out: torch.Tensor = _CPU(q, k, v, 0.0, block.causal, attn_mask=_full(block), scale=block.scale)[0]
    return out


def merge(out: torch.Tensor, lse: torch.Tensor, block_out: torch.Tensor, block_lse: torch.Tensor) -> None:
    """Add a block to the output and lse so far, in place."""
    total = torch.logaddexp(lse, block_lse)
    share = (block_lse - total.masked_fill(total == -math.inf, 0.0)).exp_()
    out.lerp_(block_out.to(out.dtype), share.unsqueeze(-1))
    lse.copy_(total)


def backward(
    block: Block,
    grad: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The gradients of queries, keys, values, and scores ([b, h, s, t]; by the plain formula only).

    Args:
        grad: of the output of all
        out, lse: of all blocks, finite.
        dtype: of the gradients by a kernel of our own: that in which they are added up, or the queries'.
    """
    kernel = block.kernel
    if kernel == "plain":
        return _plain_back(block, grad, out, lse)
    if kernel == "flash":
        unused = torch.empty((), dtype=torch.int64, device=grad.device)  # where there is no dropout
        rows, columns = block.q.shape[-2], block.k.shape[-2]
        dq, dk, dv = _FLASH_BACK(
            grad, block.q, block.k, block.v, out, lse.contiguous(), None, None, rows, columns, 0.0,
            block.causal, unused, unused, scale=block.scale,
        )  # fmt: skip
        return dq, dk, dv, None
    if kernel == "own":
        return (*fused_kernels.attention_back(grad, out, lse, *block.told(), dtype=dtype), None)
    q, k, v = block.q, _spread(block.k, block.q), _spread(block.v, block.q)
    if kernel == "cpu":
        dq, dk, dv = _CPU_BACK(
            grad, q, k, v, out, lse, 0.0, block.causal, attn_mask=_full(block), scale=block.scale
        )
    else:
        lse = F.pad(lse.contiguous(), (0, -lse.shape[-1] % _ROWS), value=math.inf)
        seed = torch.zeros((), dtype=torch.int64)
        dq, dk, dv, _ = _EFFICIENT_BACK(
            grad, q, k, v, None, out, lse, seed, seed, 0.0, [True, True, True, False], block.causal,
            scale=block.scale,
        )  # fmt: skip
    return dq, _gathered(dk, block.k), _gathered(dv, block.v), None


def _spread(x: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Keys or values, once for each head of the queries."""
    times = q.shape[1] // max(x.shape[1], 1)
    return x if times == 1 else x.repeat_interleave(times, 1)


def _gathered(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The gradient of what was spread."""
    times = grad.shape[1] // max(x.shape[1], 1)
    return grad if times == 1 else grad.unflatten(1, (x.shape[1], times)).sum(2, dtype=wide(grad.dtype))


def _full(block: Block) -> torch.Tensor | None:
    mask = block.mask
    if mask is None:
        return None
    return _added(mask, block.q.dtype).expand(*block.q.shape[:-1], block.k.shape[-2])


def _added(bias: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if bias.dtype is not torch.bool:
        return bias.to(dtype)
    return torch.zeros(bias.shape, dtype=dtype, device=bias.device).masked_fill_(~bias, -math.inf)


def _scores(block: Block) -> torch.Tensor:
    dtype = wide(block.q.dtype)
    scores = block.q.to(dtype) @ _spread(block.k, block.q).to(dtype).mT * block.scale
    if block.causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril_()
        scores = scores.masked_fill(~seen, -math.inf)
    mask = block.mask
    return scores if mask is None else scores + _added(mask, dtype)


def _plain(block: Block) -> tuple[torch.Tensor, torch.Tensor]:
    scores = _scores(block)
    blind = scores.isneginf().all(-1, keepdim=True)
    scores = scores.masked_fill(blind, 0.0)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.unsqueeze(-1)).exp().masked_fill(blind, 0.0)
    if block.keep is not None:
        weights = weights * block.keep.factors(block.q)
    return weights @ _spread(block.v, block.q).to(weights.dtype), lse.masked_fill(
        blind.squeeze(-1), -math.inf
    )


def _plain_back(
    block: Block, grad: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    weights = (_scores(block) - lse.unsqueeze(-1)).exp()
    dtype = weights.dtype
    grad, out, q = grad.to(dtype), out.to(dtype), block.q.to(dtype)
    k, v = _spread(block.k, block.q).to(dtype), _spread(block.v, block.q).to(dtype)
    keep = None if block.keep is None else block.keep.factors(block.q)
    dv = (weights if keep is None else weights * keep).mT @ grad
    moved = grad @ v.mT
    if keep is not None:
        moved = moved * keep
    scores = weights * (moved - (grad * out).sum(-1, keepdim=True))
    dq, dk = scores @ k * block.scale, scores.mT @ q * block.scale
    return dq, _gathered(dk, block.k), _gathered(dv, block.v), scores


# ---- how one call of attention over a cut sequence goes: who has which rows, and what they draw


@dataclass(frozen=True)
class RingLayout:
    """How one call goes.

    Attributes:
        axis: along which queries or keys travel; None: all keys are here.
        queries: the rows that this rank has.
        keys: those that each rank of the axis has.
        weights: the layout of the scores [..., h, s, t], whose last two dims are taken from the spans.
        scale: of the scores.
        causal: row i sees the keys up to i.
        dropout: probability that a weight is dropped.
        balanced: causal, of queries that lie as the keys do: ranks take work off each other.
    """

    mesh: Mesh
    axis: int | None
    queries: Spans
    keys: tuple[Spans, ...]
    weights: Layout
    scale: float
    causal: bool
    dropout: float
    balanced: bool = False

    @property
    def here(self) -> int:
        """This rank's place on the axis."""
        return 0 if self.axis is None else self.mesh.coordinate[self.axis]


def size_of(spans: Spans) -> int:
    """Number of rows."""
    return sum(max(end - start, 0) for start, end in spans)


def numbers(spans: Spans, device: torch.device) -> torch.Tensor:
    """The global numbers of rows."""
    parts = [torch.arange(start, end, device=device) for start, end in spans]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


class Kept(NamedTuple):
    """What weights a call drops, by their global numbers.

    Attributes:
        queries, keys: whose weights they are.
        rows, columns: the part of these; None: all.
    """

    way: RingLayout
    queries: Spans
    keys: Spans
    key: Key
    rows: tuple[int, int] | None = None
    columns: tuple[int, int] | None = None

    def factors(self, like: torch.Tensor) -> torch.Tensor:
        """What the weights of queries ``like`` are multiplied by, [b, h, s, t]."""
        way, device = self.way, like.device
        box = local_box(way.weights)
        indices = [
            torch.arange(o, o + n, device=device)
            for o, n in zip(box.offsets[:-2], box.sizes[:-2], strict=True)
        ]
        for spans, part in ((self.queries, self.rows), (self.keys, self.columns)):
            numbered = numbers(spans, device)
            indices.append(numbered if part is None else numbered[slice(*part)])
        index = torch.zeros((), dtype=torch.int64, device=device)
        for d, (along, step) in enumerate(zip(indices, way.weights.stride, strict=True)):
            index = index + (along * step).view([-1 if i == d else 1 for i in range(len(indices))])
        kept = uniform_at(index.contiguous(), self.key, torch.float32) >= way.dropout
        scale = 0.0 if way.dropout == 1 else 1 / (1 - way.dropout)
        return (kept.to(wide(like.dtype)) * scale).reshape(like.shape[0], like.shape[1], *kept.shape[-2:])

    def numbered(self) -> fused_kernels.Dropout | None:
        """The same as a start and steps; None: there are no such."""
        if not isinstance(self.key, int):
            return None
        numbers = _numbered(self.way, self.queries, self.keys, self.rows, self.columns)
        return None if numbers is None else fused_kernels.Dropout(self.key, *numbers, self.way.dropout)


@lru_cache(maxsize=4096)
def _numbered(
    way: RingLayout,
    queries: Spans,
    keys: Spans,
    rows: tuple[int, int] | None,
    columns: tuple[int, int] | None,
) -> tuple[int, tuple[int, int, int]] | None:
    """The number of a call's first weight, and the steps from one to the next; None: there are no such."""
    box, steps = local_box(way.weights), way.weights.stride
    if max(len(queries), len(keys)) > 1:
        return None
    batch = 0
    for n, step in reversed(list(zip(box.sizes[:-3], steps[:-3], strict=True))):
        if n > 1 and batch:
            return None  # of two dims that count as one
        batch = step if n > 1 else batch
    starts = [*box.offsets[:-2], queries[0][0], keys[0][0]]
    starts[-2] += rows[0] if rows else 0
    starts[-1] += columns[0] if columns else 0
    base = sum(start * step for start, step in zip(starts, steps, strict=True))
    return base, (batch, steps[-3], steps[-2])


def nothing(q: torch.Tensor, v: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and lse of no keys."""
    out = torch.zeros((*q.shape[:-1], v.shape[-1]), dtype=dtype, device=q.device)
    return out, torch.full(q.shape[:-1], -math.inf, dtype=dtype, device=q.device)
