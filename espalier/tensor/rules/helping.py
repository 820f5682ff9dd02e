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
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from espalier.comm import collectives as door
from espalier.tensor.random import Key
from espalier.tensor.rules import blocks
from espalier.tensor.rules.blocks import Block
from espalier.tensor.rules.way import Way, keep, nothing, size_of

Parts = list[torch.Tensor]
Shapes = list[tuple[Sequence[int], torch.dtype]]


class Job(NamedTuple):
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


def job(sizes: Sequence[int], rank: int, step: int) -> Job:
    """The job of a rank in a round, with the rank so many steps before it; ``sizes``: of all stretches."""
    other = (rank - step) % len(sizes)
    late, early = max(rank, other), min(rank, other)
    if 2 * step < len(sizes):
        return Job(late, early, (0, sizes[late]))
    middle = (sizes[late] + 1) // 2
    return Job(late, early, (0, middle) if rank == late else (middle, sizes[late]))


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, key: Key | None, way: Way
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and lse of this rank's queries, in what blocks are added up in."""
    found = _Forward(q, k, v, key, way)
    found.run()
    return found.out, found.lse


def backward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    grad: torch.Tensor, key: Key | None, way: Way,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """The gradients of this rank's queries, keys and values, in what blocks are added up in."""
    found = _Backward(q, k, v, key, way)
    found.of_rows = [lse, q, grad, out]
    found.run()
    return found.dq, found.dk, found.dv


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

    def __init__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, key: Key | None, way: Way) -> None:
        self.q, self.k, self.v, self._key, self._way = q, k, v, key, way
        self.of_rows = [q]
        self.sizes = [size_of(spans) for spans in way.keys]

    def compute(self, job: Job, of_rows: Sequence[torch.Tensor], k: torch.Tensor, v: torch.Tensor) -> Parts:
        """Do a job, and keep what belongs to this rank; what is left is the other's."""
        raise NotImplementedError

    def back(self, job: Job) -> Shapes:
        """What :meth:`compute` leaves for this rank where another does the job."""
        raise NotImplementedError

    def take(self, job: Job, parts: Parts) -> None:
        """Keep that."""
        raise NotImplementedError

    def block(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, job: Job) -> Block:
        """That of a job, whose queries are ``q``."""
        kept = None
        if self._key is not None:
            late, early = self._way.keys[job.late], self._way.keys[job.early]
            kept = keep(self._way, late, early, self._key, q)[..., slice(*job.rows), :]
        return Block(q, k, v, self._way.scale, None, job.late == job.early, kept)

    def run(self) -> None:
        """Do all jobs of this rank, and take what others found for it."""
        here, n = self._way.here, len(self.sizes)
        rounds = range(1, n // 2 + 1)
        coming = self._start(1) if rounds else None
        if self.sizes[here]:
            self.compute(Job(here, here, (0, self.sizes[here])), self.of_rows, self.k, self.v)
        returning: tuple[Job, _Message] | None = None
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

    def _take(self, job: Job, went: _Message) -> None:
        parts = went.wait()
        if parts:
            self.take(job, parts)


class _Forward(_Pass):
    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.out, self.lse = nothing(self.q, self.v, blocks.wide(self.q.dtype))

    def compute(self, job: Job, of_rows: Sequence[torch.Tensor], k: torch.Tensor, v: torch.Tensor) -> Parts:
        out, lse = blocks.forward(self.block(of_rows[0], k, v, job))
        if job.early == job.late:
            # copied: it will be written to, and who recomputes may have kept what the kernel gave
            self.out, self.lse = (x.to(self.lse.dtype, copy=True) for x in (out, lse))
        elif job.late == self._way.here:
            self.take(job, [lse, out])
        else:
            return [lse.to(self.lse.dtype), out.to(self.q.dtype)]
        return []

    def back(self, job: Job) -> Shapes:
        if job.late != self._way.here:
            return []
        height = job.rows[1] - job.rows[0]
        return [_rows_of(self.lse, height, self.lse.dtype), _rows_of(self.out, height, self.q.dtype)]

    def take(self, job: Job, parts: Parts) -> None:
        rows = slice(*job.rows)
        blocks.merge(self.out[:, :, rows], self.lse[:, :, rows], parts[1], parts[0])


class _Backward(_Pass):
    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        acc = blocks.wide(self.q.dtype)
        self.dq, self.dk, self.dv = (torch.zeros_like(x, dtype=acc) for x in (self.q, self.k, self.v))

    def compute(self, job: Job, of_rows: Sequence[torch.Tensor], k: torch.Tensor, v: torch.Tensor) -> Parts:
        lse, q, grad, out = of_rows
        dq, dk, dv, _ = blocks.backward(self.block(q, k, v, job), grad, out, lse)
        if job.late == self._way.here:
            self.dq[:, :, slice(*job.rows)] += dq
        if job.early == self._way.here:
            self.dk += dk
            self.dv += dv
        if job.early == job.late:
            return []
        return [x.to(self.dq.dtype) for x in ([dk, dv] if job.late == self._way.here else [dq])]

    def back(self, job: Job) -> Shapes:
        if job.late == self._way.here:
            return [_rows_of(self.dq, job.rows[1] - job.rows[0], self.dq.dtype)]
        return [(x.shape, x.dtype) for x in (self.dk, self.dv)]

    def take(self, job: Job, parts: Parts) -> None:
        if job.late == self._way.here:
            self.dq[:, :, slice(*job.rows)] += parts[0]
        else:
            self.dk += parts[0]
            self.dv += parts[1]


def _rows_of(x: torch.Tensor, rows: int, dtype: torch.dtype) -> tuple[Sequence[int], torch.dtype]:
    return (*x.shape[:2], rows, *x.shape[3:]), dtype


class _Message:
    """Tensors on their way to the rank so many steps on, as bytes, and others from the one so far back."""

    def __init__(self, way: Way, gives: Parts, gets: Shapes, step: int, like: torch.Tensor) -> None:
        assert way.axis is not None
        wires = [x.contiguous().view(-1).view(torch.uint8) for x in gives]
        self._sent = torch.cat(wires) if wires else like.new_empty(0, dtype=torch.uint8)
        self._gets = gets
        self._sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in gets]
        self._got, self._pending = door.passing(self._sent, way.mesh, way.axis, sum(self._sizes), step)

    def wait(self) -> Parts:
        """What came: views of one buffer."""
        self._pending.wait()
        parts = self._got.split(self._sizes) if self._sizes else ()
        return [part.view(dtype).view(shape) for part, (shape, dtype) in zip(parts, self._gets, strict=True)]
