"""Attention over a sharded sequence: blocks of keys and values travel round the axis.

Ring attention (Liu, Zaharia, Abbeel, 2023). Each rank computes its own queries against the block that is
with it, while the next one is on its way. In the backward pass the blocks travel again, and their gradients
go with them and end at home. A rank holds its own block and two more, whatever the number of ranks.

A causal sequence cut into stretches would leave the first ranks idle. So for the time of the attention rank
i of N takes the stretches i and 2N - 1 - i of 2N (*zigzag*): then each rank sees as much in each round.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch.overrides import handle_torch_function

from espalier.comm import collectives as door
from espalier.comm.spans import Spans, exchange
from espalier.comm.traced import recorders
from espalier.layout import Layout, local_box
from espalier.mesh import Mesh
from espalier.tensor.random import Key, uniform_at
from espalier.tensor.rules import blocks
from espalier.tensor.rules.blocks import Block


@dataclass(frozen=True)
class Way:
    """How one call goes.

    Attributes:
        axis: that the blocks travel along; None: all keys are here.
        queries: the rows that this rank has.
        keys: those that each rank of the axis has.
        weights: the layout of the scores [..., h, s, t], whose last two dims are taken from the spans.
        scale: of the scores.
        causal: row i sees the keys up to i.
        dropout: probability that a weight is dropped.
    """

    mesh: Mesh
    axis: int | None
    queries: Spans
    keys: tuple[Spans, ...]
    weights: Layout
    scale: float
    causal: bool
    dropout: float

    @property
    def here(self) -> int:
        """This rank's place in the ring."""
        return 0 if self.axis is None else self.mesh.coordinate[self.axis]


class Call(NamedTuple):
    """Rows ``q`` and keys ``k`` (start and end, as this rank has them) that are computed at once.

    ``cut``: ``""``, each row sees all; ``"same"``, rows and keys are the same, causal; ``"masked"``, causal.
    """

    q: tuple[int, int]
    k: tuple[int, int]
    cut: str


@lru_cache(maxsize=65536)
def calls(queries: Spans, keys: Spans, causal: bool) -> tuple[Call, ...]:
    """What is to be computed of some rows against a block of keys, in few calls."""
    rows, columns = _size(queries), _size(keys)
    if not causal:
        return (Call((0, rows), (0, columns), ""),) if rows and columns else ()
    if queries == keys:
        return (Call((0, rows), (0, rows), "same"),) if rows else ()
    found: list[Call] = []
    at = 0
    for start, end in queries:
        if end <= start:
            continue
        below, upto = (_size(tuple((s, min(e, stop)) for s, e in keys)) for stop in (start, end))
        row, at = (at, at + end - start), at + end - start
        last = found[-1] if found else None
        if below and last is not None and last.k == (0, below) and last.q[1] == row[0] and not last.cut:
            found[-1] = last._replace(q=(last.q[0], row[1]))
        elif below:
            found.append(Call(row, (0, below), ""))
        if upto > below:
            found.append(Call(row, (below, upto), "same" if upto - below == end - start else "masked"))
    return tuple(found)


def _size(spans: Spans) -> int:
    return sum(max(end - start, 0) for start, end in spans)


def zigzag(spans: tuple[Spans, ...]) -> tuple[Spans, ...]:
    """The rows that each rank takes, of ranks that have one stretch each."""
    halves = []
    for ((start, end),) in spans:
        middle = (start + end + 1) // 2
        halves += [(start, middle), (middle, end)]
    return tuple((halves[i], halves[-1 - i]) for i in range(len(spans)))


def ring(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, key: Key | None, way: Way
) -> torch.Tensor:
    """Attention of this rank's queries over all keys; differentiable to any order.

    Args:
        q, k, v: [b, h, s, d], [b, g, t, d], [b, g, t, e] with this rank's rows of s and t.
        bias: broadcast to [b, h, s, t], with this rank's rows and all columns; of bools, what may be seen.
        key: of the random stream, where there is dropout.
    """
    if recorders():
        return handle_torch_function(ring, (), q, k, v, bias, key, way)
    device = q.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return _apply(q, k, v, bias, key, way)
    # as of torch's own function: the inputs are cast, and what is computed of them is left alone
    low = torch.get_autocast_dtype(device)
    q, k, v = (x if x.dtype is torch.float64 else x.to(low) for x in (q, k, v))
    with torch.autocast(device, enabled=False):
        return _apply(q, k, v, bias, key, way)


class _Ring(torch.autograd.Function):
    espalier = True

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        bias: torch.Tensor | None,
        key: Key | None,
        way: Way,
    ) -> torch.Tensor:
        ctx.way, ctx.key = way, key
        plainly = bias is not None and bias.requires_grad
        acc = blocks.wide(q.dtype)
        sofar: tuple[torch.Tensor, torch.Tensor] | None = None
        for place, kb, vb in _rounds(k, v, way):
            for call in calls(way.queries, way.keys[place], way.causal):
                block = _block(q, kb, vb, bias, key, way, place, call, plainly)
                if block.unseen:
                    continue
                found, sums = blocks.forward(block)
                if sofar is None and block.q.shape == q.shape:
                    # copied, for it will be written to: who recomputes may have kept what the kernel gave
                    sofar = found.to(acc, copy=True), sums.to(acc, copy=True)
                    continue
                sofar = _nothing(q, v, acc) if sofar is None else sofar
                rows = slice(*call.q)
                blocks.merge(sofar[0][:, :, rows], sofar[1][:, :, rows], found, sums)
        out, lse = _nothing(q, v, acc) if sofar is None else sofar
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, bias, out, lse.masked_fill_(lse == -math.inf, 0.0))
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        q, k, v, bias, out, lse = ctx.saved_tensors
        wanted = [x for x, needed in zip((q, k, v, bias), ctx.needs_input_grad, strict=False) if needed]
        if torch.is_grad_enabled():
            # the gradient is to be differentiated: by the formula itself, on all keys
            again = _plainly(q, k, v, bias, ctx.key, ctx.way)
            got = iter(torch.autograd.grad(again, wanted, grad, create_graph=True))
            return *(next(got) if needed else None for needed in ctx.needs_input_grad[:4]), None, None
        dq, dk, dv, db = _backward(q, k, v, bias, out, lse, grad, ctx.key, ctx.way, ctx.needs_input_grad[3])
        return dq, dk, dv, db, None, None


def _nothing(q: torch.Tensor, v: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and lse of no keys."""
    out = torch.zeros((*q.shape[:-1], v.shape[-1]), dtype=dtype, device=q.device)
    return out, torch.full(q.shape[:-1], -math.inf, dtype=dtype, device=q.device)


_apply: Callable[..., torch.Tensor] = super(torch.autograd.Function, _Ring).apply


def _backward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor,
    lse: torch.Tensor, grad: torch.Tensor, key: Key | None, way: Way, wants_bias: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:  # fmt: skip
    acc, n, here = blocks.wide(q.dtype), len(way.keys), way.here
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
            got = blocks.backward(block, grad[:, :, rows], out[:, :, rows], lse[:, :, rows])
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
            coming[1].wait()
            parts += coming[0]
        # the gradients of this block go on with it; what the rank before has is of the next one here
        assert way.axis is not None
        ahead = _size(way.keys[(here - i - 1) % n])
        coming = door.passing(parts, way.mesh, way.axis, ahead * _width(k, v))
    assert own is not None
    if coming is not None:
        coming[1].wait()
        own += coming[0]
    dk, dv = _pair(own, k.shape, v.shape)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None if db is None else db.to(bias.dtype)  # type: ignore[union-attr]


def _rounds(k: torch.Tensor, v: torch.Tensor, way: Way) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Whose block is here, and its keys and values, round by round, while the next one is on its way."""
    n, here, wire = len(way.keys), way.here, None
    for i in range(n):
        place, coming = (here - i) % n, None
        if i + 1 < n:
            assert way.axis is not None
            wire = torch.cat([k.reshape(-1), v.reshape(-1)]) if wire is None else wire
            rows = _size(way.keys[(place - 1) % n])
            coming = door.passing(wire, way.mesh, way.axis, rows * _width(k, v))
        yield place, k, v
        if coming is not None:
            wire, under_way = coming
            under_way.wait()
            k, v = _pair(wire, (*k.shape[:2], rows, k.shape[3]), (*v.shape[:2], rows, v.shape[3]))


def _width(k: torch.Tensor, v: torch.Tensor) -> int:
    """Elements of one row of keys and values."""
    return k.shape[0] * k.shape[1] * k.shape[3] + v.shape[0] * v.shape[1] * v.shape[3]


def _pair(wire: torch.Tensor, k: Any, v: Any) -> tuple[torch.Tensor, torch.Tensor]:
    keys, values = wire.split([math.prod(k), math.prod(v)])
    return keys.view(k), values.view(v)


def _block(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, key: Key | None, way: Way,
    place: int, call: Call, plainly: bool,
) -> Block:  # fmt: skip
    rows, columns = slice(*call.q), slice(*call.k)
    part = None if bias is None else _of_bias(bias, way.keys[place], call)
    if call.cut == "masked":
        row, column = (_numbers(s, q.device) for s in (way.queries, way.keys[place]))
        part = row[rows].unsqueeze(-1) >= column[columns]
    keep = None
    if key is not None:
        keep = _keep(way, way.keys[place], key, q)[..., rows, columns]
    return Block(
        q[:, :, rows], k[:, :, columns], v[:, :, columns], way.scale, part, call.cut == "same", keep, plainly
    )


def _of_bias(bias: torch.Tensor, keys: Spans, call: Call) -> torch.Tensor:
    """The part of the bias that belongs to a call, a view."""
    if bias.shape[-2] > 1:
        bias = bias[:, :, slice(*call.q)]
    if bias.shape[-1] == 1:
        return bias
    ((start, _),) = keys
    return bias[..., start + call.k[0] : start + call.k[1]]


def _numbers(spans: Spans, device: torch.device) -> torch.Tensor:
    """The global numbers of rows."""
    parts = [torch.arange(start, end, device=device) for start, end in spans]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _keep(way: Way, keys: Spans, key: Key, like: torch.Tensor) -> torch.Tensor:
    """What the weights are multiplied by, a value for each global element."""
    box, device = local_box(way.weights), like.device
    numbers = [
        torch.arange(o, o + n, device=device) for o, n in zip(box.offsets[:-2], box.sizes[:-2], strict=True)
    ]
    numbers += [_numbers(way.queries, device), _numbers(keys, device)]
    index = torch.zeros((), dtype=torch.int64, device=device)
    for d, (along, step) in enumerate(zip(numbers, way.weights.stride, strict=True)):
        index = index + (along * step).view([-1 if i == d else 1 for i in range(len(numbers))])
    kept = uniform_at(index.contiguous(), key, torch.float32) >= way.dropout
    scale = 0.0 if way.dropout == 1 else 1 / (1 - way.dropout)
    return (kept.to(blocks.wide(like.dtype)) * scale).reshape(like.shape[0], like.shape[1], *kept.shape[-2:])


def _plainly(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, key: Key | None, way: Way
) -> torch.Tensor:
    """The same by the formula, on all keys."""
    spans = way.keys[0]
    if way.axis is not None:
        everything = ((0, way.weights.shape[-1]),)
        whole = (everything,) * len(way.keys)
        k, v = (exchange(x, way.mesh, (way.axis,), 2, way.keys, whole) for x in (k, v))
        spans = everything
    if way.causal:
        bias = _numbers(way.queries, q.device).unsqueeze(-1) >= _numbers(spans, q.device)
    keep = None if key is None else _keep(way, spans, key, q)
    return blocks.forward(Block(q, k, v, way.scale, bias, False, keep, True))[0].to(q.dtype)
