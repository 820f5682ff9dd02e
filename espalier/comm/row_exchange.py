"""Spans: rows of a dim sent from the ranks that have them to those that want them.

Where a function needs more of a sharded dim than a rank holds (a convolution's halo), or cuts it
elsewhere than ``torch.chunk`` does (a slice, a split), the ranks exchange just the rows in question.
What each has and wants is said in *spans*, (start, end) pairs of global row numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate, chain, product
from typing import Any, NamedTuple

import torch
from torch.overrides import handle_torch_function

from espalier.comm import collectives
from espalier.comm.collectives import send
from espalier.comm.custom_ops import recorders
from espalier.comm.functions import MeetingFunction
from espalier.layout import Layout
from espalier.layout.layout import bounds
from espalier.mesh import Mesh

Spans = tuple[tuple[int, int], ...]


@lru_cache(maxsize=4096)
def spans_of(layout: Layout, dim: int) -> tuple[Spans, ...]:
    """What each rank has of a dim, as one span: the ranks of ``layout.cuts[dim]``, the first axis slowest."""
    mesh, cut = layout.mesh, layout.cuts[dim]
    spans: list[Spans] = []
    for at in product(*(range(mesh.shape[a]) for a in cut)):
        where = list(mesh.coordinate)
        for axis, index in zip(cut, at, strict=True):
            where[axis] = index
        start, length = bounds(layout.shape[dim], cut, mesh.shape, tuple(where))
        spans.append(((start, start + length),))
    return tuple(spans)


def exchange(
    x: torch.Tensor, mesh: Mesh, axes: Sequence[int], dim: int, have: Sequence[Spans], want: Sequence[Spans]
) -> torch.Tensor:
    """Rows of a global dim from the ranks that have them to those that want them; differentiable.

    A collective of all ranks of ``axes``, with bytes only between ranks that share rows. Several
    ranks may want one row, or none. A row that several have is the sum of theirs; one that nobody
    has is zero. So the backward pass is the same with ``have`` and ``want`` swapped: each gradient
    goes back to where its row came from, and those of a row wanted by several are added up. That
    holds for every order of differentiation.

    In the ``run`` of a rule, to fetch a border of one row on either side of a dim that the axes
    ``layout.cuts[dim]`` cut (``layout`` is that of the input, ``placed.ins[0]``)::

        have = pieces(layout, dim)
        want = [((max(start - 1, 0), min(end + 1, layout.shape[dim])),) for ((start, end),) in have]
        x = exchange(x, layout.mesh, layout.cuts[dim], dim, have, want)

    Args:
        x: what this rank has: along ``dim`` the rows of its spans, one span after another; in the
            other dims of equal size on all ranks.
        axes: the mesh axes whose ranks take part.
        have: for each rank of ``axes`` (the first axis counted slowest) the spans that it has.
        want: likewise what each is to get. Both must be the same on all ranks.

    Returns:
        The rows of this rank's wanted spans, one span after another; ``x`` itself if no rank wants
        anything else than it has.
    """
    have, want = tuple(have), tuple(want)
    if have == want:
        return x
    if recorders():
        recorded: torch.Tensor = handle_torch_function(exchange, (), x, mesh, axes, dim, have, want)
        return recorded
    axis, *inner = axes
    if not inner:
        return _apply(x, mesh, axis, dim, have, want)
    # along the first axis each gets what its own column has for its whole row, along the others its own
    m = math.prod(mesh.shape[a] for a in inner)
    there, column = mesh.coordinate[axis], mesh.place(inner)
    wanted = [_union(want[i * m : (i + 1) * m]) for i in range(mesh.shape[axis])]
    between = [[_common(w, _union(have[j::m])) for j in range(m)] for w in wanted]
    x = exchange(x, mesh, (axis,), dim, have[column::m], [row[column] for row in between])
    return exchange(x, mesh, inner, dim, between[there], want[there * m : (there + 1) * m])


class _Exchange(MeetingFunction):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, mesh: Mesh, axis: int, dim: int, have: Any, want: Any
    ) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.way = mesh, (axis,), dim, want, have
        return _exchanged(x, mesh, axis, dim, have, want)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> Any:
        grad_in = None if grad is None else exchange(grad, *ctx.way)
        return grad_in, None, None, None, None, None


_apply: Callable[..., torch.Tensor] = super(torch.autograd.Function, _Exchange).apply


class _Block(NamedTuple):
    """A stretch that one rank has and another wants: where it starts in each one's buffer."""

    source: int
    target: int
    length: int


class _ExchangePlan(NamedTuple):
    """What one rank does in an exchange.

    Attributes:
        sends: for each rank the blocks that it is sent.
        gets: for each rank the blocks that come from it.
        total: the rows of the result.
        copies: each row comes once: none is zero, none a sum.
        silent: no rank has anything for another.
    """

    sends: tuple[tuple[_Block, ...], ...]
    gets: tuple[tuple[_Block, ...], ...]
    total: int
    copies: bool
    silent: bool


@lru_cache(maxsize=4096)
def _plan(have: tuple[Spans, ...], want: tuple[Spans, ...], here: int) -> _ExchangePlan:
    sends = tuple(_blocks(have[here], spans) for spans in want)
    gets = tuple(_blocks(spans, want[here]) for spans in have)
    total = sum(end - start for start, end in want[here])
    filled = sorted((b.target, b.length) for b in chain(*gets))
    ends = [0, *(start + length for start, length in filled)]
    copies = [start for start, _ in filled] == ends[:-1] and ends[-1] == total
    pairs = product(enumerate(have), enumerate(want))
    silent = not any(i != j and _blocks(h, w) for (i, h), (j, w) in pairs)
    return _ExchangePlan(sends, gets, total, copies, silent)


def _blocks(have: Spans, want: Spans) -> tuple[_Block, ...]:
    blocks = []
    a = 0
    for h0, h1 in have:
        b = 0
        for w0, w1 in want:
            start, end = max(h0, w0), min(h1, w1)
            if start < end:
                blocks.append(_Block(a + start - h0, b + start - w0, end - start))
            b += w1 - w0
        a += h1 - h0
    return tuple(blocks)


def _exchanged(
    x: torch.Tensor, mesh: Mesh, axis: int, dim: int, have: tuple[Spans, ...], want: tuple[Spans, ...]
) -> torch.Tensor:
    here = mesh.coordinate[axis]
    sends, gets, total, copies, silent = _plan(have, want, here)
    assert x.shape[dim] == sum(end - start for start, end in have[here]), "rows and spans differ"
    shape = (*x.shape[:dim], total, *x.shape[dim + 1 :])
    width = math.prod(shape[:dim] + shape[dim + 1 :])
    result = x.new_empty(shape) if copies else x.new_zeros(shape)

    def put(block: _Block, rows: torch.Tensor) -> None:
        place = result.narrow(dim, block.target, block.length)
        place.copy_(rows) if copies else place.add_(rows)

    received: tuple[torch.Tensor, ...] = ()
    if not silent:
        parts = [[] if i == here else blocks for i, blocks in enumerate(sends)]
        flat = [x.narrow(dim, b.source, b.length).reshape(-1) for b in chain(*parts)]
        lengths = [[0 if i == here else width * b.length for b in blocks] for i, blocks in enumerate(gets)]
        wire = torch.cat(flat) if flat else x.new_empty(0)
        counts = [sum(width * b.length for b in blocks) for blocks in parts]
        arrived = send(wire, mesh, axis, [sum(n) for n in lengths], counts)
        received = torch.split(arrived, list(chain(*lengths)))
    if mesh.is_dry:
        return result
    taken = 0
    for i, blocks in enumerate(gets):
        for block in blocks:
            if i == here:
                put(block, x.narrow(dim, block.source, block.length))
            else:
                put(block, received[taken].view(*shape[:dim], block.length, *shape[dim + 1 :]))
            taken += 1
    return result


def _union(of: Sequence[Spans]) -> Spans:
    """All rows of several spans, in order."""
    merged: list[tuple[int, int]] = []
    for start, end in sorted(span for spans in of for span in spans if span[0] < span[1]):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return tuple(merged)


def _common(a: Spans, b: Spans) -> Spans:
    """The rows that two ordered unions share."""
    pairs = ((max(s, t), min(e, f)) for (s, e), (t, f) in product(a, b))
    return tuple(sorted((s, e) for s, e in pairs if s < e))


# ---- rows sent along an axis, to each coordinate as many as it is to get: differentiable, to any order


def send_rows(x: torch.Tensor, mesh: Mesh, axis: int, gets: list[int], gives: list[int]) -> torch.Tensor:
    """The rows that the coordinates of an axis have for this one: an uneven all-to-all.

    Backward, each gradient goes back to where its row came from.

    Args:
        x: [rows, ...]: first those for coordinate 0, then those for 1, and so on.
        gets, gives: how many come from and go to each.
    """
    return x if mesh.shape[axis] == 1 else _apply_rows(x, mesh, axis, gets, gives)


class _Send(MeetingFunction):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, mesh: Mesh, axis: int, gets: list[int], gives: list[int]
    ) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.back = mesh, axis, gives, gets
        each = math.prod(x.shape[1:])
        flat = collectives.send(
            x.reshape(-1), mesh, axis, [n * each for n in gets], [n * each for n in gives]
        )
        return flat.view(sum(gets), *x.shape[1:])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> Any:
        return None if grad is None else send_rows(grad, *ctx.back), None, None, None, None


_apply_rows: Callable[..., torch.Tensor] = super(torch.autograd.Function, _Send).apply


def overlaps(have: Sequence[int], want: Sequence[int]) -> list[list[int]]:
    """How much of each stretch of one division of a line lies in each of another."""
    ends, starts = list(accumulate(have)), list(accumulate(want))
    return [
        [max(0, min(end, stop) - max(end - n, stop - m)) for stop, m in zip(starts, want, strict=True)]
        for end, n in zip(ends, have, strict=True)
    ]
