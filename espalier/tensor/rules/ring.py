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
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch.overrides import handle_torch_function

from espalier.comm import collectives
from espalier.comm.custom_ops import recorders
from espalier.comm.functions import MeetingFunction
from espalier.comm.row_exchange import Spans, exchange
from espalier.tensor.dry_autocast import autocast_dtype, without_autocast
from espalier.tensor.random import Key
from espalier.tensor.rules.attention_blocks import (
    Block,
    Kept,
    RingLayout,
    backward,
    forward,
    merge,
    nothing,
    numbers,
    size_of,
    wide,
)

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


class _Ring(MeetingFunction):
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
        block = _at_once(q, k, v, bias, key, way)
        if block is not None:
            out, lse = forward(block)
            out = out if out.dtype is q.dtype else out.to(q.dtype)
            ctx.save_for_backward(q, k, v, None, out, lse)
            return out
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
        block = _at_once(q, k, v, bias, ctx.key, ctx.way)
        if block is not None:
            return *_backward_at_once(block, grad, out, lse, None), None, None
        if ctx.way.balanced:
            grads = _helped_back(q, k, v, out, lse, grad, ctx.key, ctx.way)
            return *(x.to(q.dtype) for x in grads), None, None, None
        dq, dk, dv, db = _backward(q, k, v, bias, out, lse, grad, ctx.key, ctx.way, ctx.needs_input_grad[3])
        return dq, dk, dv, db, None, None


def _at_once(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, key: Key | None,
    way: RingLayout,
) -> Block | None:  # fmt: skip
    """All queries and keys, where they are one block without a bias, in which each query sees a key."""
    if bias is not None or way.axis is not None:
        return None
    only = _only_product(way.queries, way.keys[0], way.causal)
    if only is None or only.cut == "masked":
        return None
    kept = None if key is None else Kept(way, way.queries, way.keys[0], key)
    return Block(q, k, v, way.scale, None, only.cut == "same", kept)


@lru_cache(maxsize=4096)
def _only_product(queries: Spans, keys: Spans, causal: bool) -> RingProduct | None:
    """The product of all rows and keys, where there is no other; else None."""
    todo = calls(queries, keys, causal)
    is_one = [call[:2] for call in todo] == [((0, size_of(queries)), (0, size_of(keys)))]
    return todo[0] if is_one else None


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
    only = _only_product(way.queries, way.keys[here], way.causal) if n == 1 else None
    if only is not None:
        block = _block(q, k, v, bias, key, way, here, only, wants_bias)
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
    return _as(dq, q), _as(dk, k), _as(dv, v), db


def _as(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return grad if grad.dtype is x.dtype else grad.to(x.dtype)


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
