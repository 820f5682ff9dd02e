"""Attention over a sharded sequence: blocks of keys and values travel round the axis.

Ring attention (Liu, Zaharia, Abbeel, 2023). Each rank computes its own queries against the block that is
with it, while the next one is on its way. In the backward pass the blocks travel again, and their gradients
go with them and end at home. A rank holds its own block and two more, whatever the number of ranks.

A causal sequence cut into stretches would leave the first ranks idle: see ``helping`` for what is done there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch.overrides import handle_torch_function

from espalier.comm import collectives as door
from espalier.comm.spans import Spans, exchange
from espalier.comm.traced import recorders
from espalier.tensor.dry_autocast import autocast_dtype, without_autocast
from espalier.tensor.random import Key
from espalier.tensor.rules import blocks, helping
from espalier.tensor.rules.blocks import Block
from espalier.tensor.rules.way import Way, keep, nothing, numbers, size_of


class Call(NamedTuple):
    """Rows ``q`` and keys ``k`` (start and end, as this rank has them) that are computed at once.

    ``cut``: ``""``, each row sees all; ``"same"``, rows and keys are the same, causal; ``"masked"``, causal.
    """

    q: tuple[int, int]
    k: tuple[int, int]
    cut: str


@lru_cache(maxsize=65536)
def calls(queries: Spans, keys: Spans, causal: bool) -> tuple[Call, ...]:
    """What is to be computed of a stretch of rows against a block of keys, in few calls."""
    rows, columns = size_of(queries), size_of(keys)
    if not causal:
        return (Call((0, rows), (0, columns), ""),) if rows and columns else ()
    if queries == keys:
        return (Call((0, rows), (0, rows), "same"),) if rows else ()
    ((start, end),), ((first, _),) = queries, keys
    below, upto = (min(max(stop - first, 0), columns) for stop in (start, end))
    found = [Call((0, rows), (0, below), "")] if rows and below else []
    if rows and upto > below:
        found.append(Call((0, rows), (below, upto), "same" if upto - below == rows else "masked"))
    return tuple(found)


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
        way: Way,
    ) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.way, ctx.key = way, key
        out, lse = helping.forward(q, k, v, key, way) if way.helping else _round(q, k, v, bias, key, way)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, bias, out, lse.masked_fill_(lse == -math.inf, 0.0))
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
        if ctx.way.helping:
            found = helping.backward(q, k, v, out, lse, grad, ctx.key, ctx.way)
            return *(x.to(q.dtype) for x in found), None, None, None
        dq, dk, dv, db = _backward(q, k, v, bias, out, lse, grad, ctx.key, ctx.way, ctx.needs_input_grad[3])
        return dq, dk, dv, db, None, None


def _round(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, key: Key | None, way: Way
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and lse of this rank's queries, as the keys come by."""
    plainly = bias is not None and bias.requires_grad
    acc = blocks.wide(q.dtype)
    sofar: tuple[torch.Tensor, torch.Tensor] | None = None
    for place, kb, vb in _rounds(k, v, way):
        for call in calls(way.queries, way.keys[place], way.causal):
            block = _block(q, kb, vb, bias, key, way, place, call, plainly)
            if block.unseen:
                continue
            found, sums = blocks.forward(block)
            if sofar is None:
                # copied, for it will be written to: who recomputes may have kept what the kernel gave
                sofar = found.to(acc, copy=True), sums.to(acc, copy=True)
            else:
                blocks.merge(*sofar, found, sums)
    return nothing(q, v, acc) if sofar is None else sofar


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
        ahead = size_of(way.keys[(here - i - 1) % n])
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
            rows = size_of(way.keys[(place - 1) % n])
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
        row, column = (numbers(s, q.device) for s in (way.queries, way.keys[place]))
        part = row[rows].unsqueeze(-1) >= column[columns]
    kept = None
    if key is not None:
        kept = keep(way, way.queries, way.keys[place], key, q)[..., rows, columns]
    return Block(
        q[:, :, rows], k[:, :, columns], v[:, :, columns], way.scale, part, call.cut == "same", kept, plainly
    )


def _of_bias(bias: torch.Tensor, keys: Spans, call: Call) -> torch.Tensor:
    """The part of the bias that belongs to a call, a view."""
    if bias.shape[-2] > 1:
        bias = bias[:, :, slice(*call.q)]
    if bias.shape[-1] == 1:
        return bias
    ((start, _),) = keys
    return bias[..., start + call.k[0] : start + call.k[1]]


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
        bias = numbers(way.queries, q.device).unsqueeze(-1) >= numbers(spans, q.device)
    kept = None if key is None else keep(way, way.queries, spans, key, q)
    return blocks.forward(Block(q, k, v, way.scale, bias, False, kept, True))[0].to(q.dtype)
