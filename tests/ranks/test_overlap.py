"""What moves along the data axis while a step computes: in which order, and how much at once."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import espalier
from espalier.parallel.data.prefetch import Prefetcher
from espalier.parallel.data.unshard import Unsharded
from tests.ranks.test_engine import TOLERANCE, apart


class Shuffled(nn.Module):
    """Uses its layers in an order that is the caller's."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))

    def forward(self, x: torch.Tensor, order: list[int]) -> torch.Tensor:
        for i in order:
            x = torch.tanh(self.layers[i](x))
        return x.square().mean()


def sums(engine: Any) -> list[int]:
    moved = [m for m in engine.order() if m.what == "sum gradients"]
    return list(dict.fromkeys(int(m.parameters[0].split(".")[1]) for m in moved))


def orders(rank: int, world: int, zero: int) -> None:
    torch.manual_seed(0)
    net = Shuffled().double()
    plain = copy.deepcopy(net)
    plan = {"data": world, "zero": zero, "chunk_megabytes": 1e-6, "prefetch_megabytes": 0.0013}
    engine = espalier.initialize(net, torch.optim.SGD(net.parameters(), lr=0.1), plan)
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1)
    one, held = 72 * 8, []

    def started(self: Unsharded, *args: Any) -> None:
        begin(self, *args)
        held.append(sum(g.nbytes for g in engine._data.prefetcher.held if g.pending is not None))

    begin, Unsharded.start = Unsharded.start, started  # type: ignore[method-assign, assignment]
    try:
        early = []
        first = [3, 0, 5, 1, 4, 2]
        # as in the first step; other orders, layers used twice or not at all; without a backward pass
        for order in (first, first, first, [0, 1, 2, 3, 4, 5], [3, 3, 0], first, None, first, first):
            x = torch.randn(4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
            if order is None:
                with torch.no_grad():
                    assert abs(engine((x, [5, 4])).item() - plain(x, [5, 4]).item()) < TOLERANCE
                continue
            with espalier.ledger(engine.mesh) as book:
                last = net.layers[order[0]].weight
                hook = last.register_post_accumulate_grad_hook(
                    lambda p, book=book: early.append(
                        sum(e.op in ("reduce_scatter", "all_reduce") for e in book.entries)
                    )
                )
                assert abs(engine.train_step((x, order)).item() - plain(x, order).item()) < TOLERANCE
                hook.remove()
            plain(x, order).backward()
            theirs.step()
            theirs.zero_grad()
            assert apart(net, plain, gradients=False) < TOLERANCE
            assert sums(engine) == first[::-1]
    finally:
        Unsharded.start = begin  # type: ignore[method-assign]
    # in the order in which they are ready all but what the last layer brings are sent by then
    assert early[1] >= 5 and early[2] >= 5, early
    if zero == 3:
        # those ahead, below the bound, and one that is needed though nobody expected it
        assert 2 * one <= max(held) <= 1300 + one, held


@pytest.mark.parametrize("zero", [0, 2, 3])
def test_order_is_that_of_the_first_step(ranks: Any, zero: int) -> None:
    ranks(2, orders, zero)


def first_differs(rank: int, world: int) -> list[int]:
    torch.manual_seed(0)
    net = Shuffled()
    engine = espalier.initialize(
        net, torch.optim.SGD(net.parameters()), {"data": world, "chunk_megabytes": 1e-6}
    )
    for _ in range(3):
        engine.train_step((torch.ones(4, 8), [0, 1, 2, 3, 4, 5] if rank else [3, 0, 5, 1, 4, 2]))
    return sums(engine)


def test_ranks_agree_on_rank_0s_order(ranks: Any) -> None:
    assert ranks(2, first_differs) == [[2, 4, 1, 5, 0, 3]] * 2


def early(rank: int, world: int, megabytes: float) -> tuple[int, int]:
    """How many gathers of a step are under way when they are needed, and of how many."""
    torch.manual_seed(0)
    net = Shuffled()
    plan = {"data": world, "zero": 3, "chunk_megabytes": 1e-6, "prefetch_megabytes": megabytes}
    engine = espalier.initialize(net, torch.optim.SGD(net.parameters()), plan)
    needed: list[bool] = []

    def need(self: Prefetcher, g: Unsharded) -> None:
        if not g.is_whole:
            needed.append(g.pending is not None)
        go(self, g)

    go, Prefetcher._need = Prefetcher._need, need  # type: ignore[method-assign]
    try:
        for _ in range(3):
            needed.clear()
            engine.train_step((torch.ones(4, 8), [0, 1, 2, 3, 4, 5]))
    finally:
        Prefetcher._need = go  # type: ignore[method-assign]
    return sum(needed), len(needed)


def test_the_next_block_is_always_under_way(ranks: Any) -> None:
    """Though it is larger than what may be gathered ahead: all but the first of a pass are begun early."""
    assert ranks(2, early, 1e-5)[0] == (10, 12)
    assert ranks(2, early, 0.0)[0] == (0, 12)
