"""Exchanges of spans of rows on real ranks: values, gradients of two orders, bytes, dry ledgers."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import pytest
import torch

import espalier
from espalier import Mesh, Shard
from espalier.comm import exchange, spans_of
from espalier.layout import Layout, local_box

F64 = torch.float64
Spans = tuple[tuple[int, int], ...]


def shared_out(chance: random.Random, total: int, n: int) -> tuple[Spans, ...]:
    """All rows shared out among n ranks, in stretches, in no order."""
    ends = sorted({total, *(chance.randrange(1, total + 1) for _ in range(chance.randrange(7)))})
    stretches = list(itertools.pairwise([0, *ends]))
    chance.shuffle(stretches)
    owners = [chance.randrange(n) for _ in stretches]
    return tuple(tuple(s for s, o in zip(stretches, owners, strict=True) if o == i) for i in range(n))


def any_spans(chance: random.Random, total: int, n: int) -> tuple[Spans, ...]:
    """Some stretches for each rank: rows stand twice, or nowhere, or run over the ends."""
    made = []
    for _ in range(n):
        starts = [chance.randrange(-1, total + 1) for _ in range(chance.randrange(4))]
        made.append(tuple((a, a + chance.randrange(0, total)) for a in starts))
    return tuple(made)


def rows_of(spans: Spans) -> list[int]:
    return [row for start, end in spans for row in range(start, end)]


def expected(parts: list[torch.Tensor], have: Any, want: Any, dim: int) -> list[torch.Tensor]:
    """What every rank gets: the sum of what all ranks have of each row."""
    held = [row for spans in have for row in rows_of(spans)]
    every = torch.cat(parts, dim)
    found = []
    for spans in want:
        matrix = torch.tensor([[float(w == h) for h in held] for w in rows_of(spans)], dtype=F64)
        matrix = matrix.view(len(rows_of(spans)), len(held))
        found.append(torch.tensordot(matrix, every, ([1], [dim])).movedim(0, dim))
    return found


def twice(outs: list[Any], parts: list[Any]) -> list[torch.Tensor]:
    """The gradient of a loss of outputs and inputs, and the gradient of a loss of that gradient."""
    loss = sum((o**3).sum() for o in [*outs, *parts])
    first = torch.autograd.grad(loss, parts, create_graph=True)
    return [*first, *torch.autograd.grad(sum((g**2).sum() for g in first), parts)]


def random_cases(rank: int, axes: dict[str, int], count: int) -> None:
    mesh = Mesh.from_env(axes)
    twin = Mesh.dry(axes, mesh.coordinate)
    chance = random.Random(17)
    n = mesh.size()
    for case in range(count):
        total = chance.randrange(1, 9)
        have = (any_spans if case % 3 == 2 else shared_out)(chance, total, n)
        want = (shared_out if case % 3 == 0 else any_spans)(chance, total, n)
        shape = chance.choice([(), (3,), (2, 2), (0,)])
        dim = chance.randrange(len(shape) + 1)
        sizes = [(*shape[:dim], len(rows_of(spans)), *shape[dim:]) for spans in have]
        generator = torch.Generator().manual_seed(case)
        parts = [torch.randn(s, generator=generator, dtype=F64).requires_grad_() for s in sizes]
        right = expected(parts, have, want, dim)
        own = parts[rank].detach().clone().requires_grad_()
        with espalier.ledger(mesh) as book:
            got = exchange(own, mesh, range(mesh.ndim), dim, have, want)
            grads = twice([got], [own])
        torch.testing.assert_close(got, right[rank])
        derived = twice(right, parts)
        for found, wanted in zip(grads, (derived[rank], derived[n + rank]), strict=True):
            torch.testing.assert_close(found, wanted)
        with espalier.ledger(twin) as guess:
            shadow = own.detach().to("meta").requires_grad_()
            dry = exchange(shadow, twin, range(mesh.ndim), dim, have, want)
            again = twice([dry], [shadow])
        assert dry.shape == got.shape and again[1].shape == own.shape
        assert guess == book, (case, have, want)
        if mesh.ndim == 1:
            with espalier.ledger(mesh) as book:
                exchange(own.detach(), mesh, (0,), dim, have, want)
            shared = [
                max(0, min(b, d) - max(a, c))
                for other in range(n)
                for (a, b), (c, d) in itertools.product(have[rank], want[other])
                if other != rank
            ]
            assert sum(e.bytes for e in book.entries) == sum(shared) * math.prod(shape) * 8


def on_axes(rank: int, world: int, axes: dict[str, int]) -> None:
    random_cases(rank, axes, 30)


@pytest.mark.parametrize(
    ("world", "axes"),
    [(1, {"a": 1}), (2, {"a": 2}), (3, {"a": 3}), (4, {"a": 2, "b": 2}), (6, {"a": 3, "one": 1, "b": 2})],
)
def test_exchange(ranks: Any, world: int, axes: dict[str, int]) -> None:
    ranks(world, on_axes, axes)


def halos(rank: int, world: int) -> None:
    """A border of two rows around uneven and empty shards, on axes that cut in either order."""
    mesh = Mesh.from_env({"a": 2, "b": 2})
    for size, order in itertools.product((1, 3, 5, 9), ((0, 1), (1, 0))):
        lay = Layout(mesh, [Shard(1), Shard(1)], (2, size), order=order)
        have = spans_of(lay, 1)
        start, length = local_box(lay).offsets[1], lay.local_shape[1]
        assert ((start, start + length),) in have
        value = torch.arange(2.0 * size).view(2, size)
        want = [((max(a - 2, 0), min(b + 2, size)),) if a < b else () for ((a, b),) in have]
        got = exchange(value[:, start : start + length], mesh, lay.cuts[1], 1, have, want)
        right = value[:, max(start - 2, 0) : start + length + 2] if length else value[:, :0]
        assert torch.equal(got, right)


def test_borders_of_nested_shards(ranks: Any) -> None:
    ranks(4, halos)


def carried(rank: int, world: int) -> None:
    """Rows that come once are carried bit by bit, whatever their dtype."""
    mesh = Mesh.from_env({"a": world})
    have, want = (((0, 2),), ((2, 4),)), (((1, 3),), ((3, 4), (0, 1)))
    for dtype in (torch.bool, torch.int8, torch.float8_e5m2, torch.complex64, torch.bfloat16):
        value = torch.tensor([-0.0, 1, 0, 2]).to(dtype)
        got = exchange(value[2 * rank : 2 * rank + 2], mesh, (0,), 0, have, want)
        right = torch.cat([value[a:b] for a, b in want[rank]])
        assert torch.equal(got.view(torch.uint8), right.view(torch.uint8)) and got.dtype == dtype


def test_every_dtype_is_carried(ranks: Any) -> None:
    ranks(2, carried)
