"""Losses that a program makes itself are known to all ranks once they have gone back, and numbers of which
nothing goes back at once: one rank may ask alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import espalier

Say = Callable[..., None]
Program = Callable[[nn.Module, torch.Tensor, torch.Tensor, Say], None]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 5)).double()


def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    draw = torch.Generator().manual_seed(1)
    for _ in range(3):
        yield (
            torch.randn(8, 4, generator=draw, dtype=torch.float64),
            torch.randint(0, 5, (8,), generator=draw),
        )


def one(net: nn.Module, x: torch.Tensor, y: torch.Tensor, say: Say) -> None:
    loss = F.cross_entropy(net(x), y)
    loss.backward()
    say(loss, loss.detach(), loss.detach().cpu() * 2, loss.float().clone())
    assert f"{loss:.4f}" == f"{loss.item():.4f}"


def half(net: nn.Module, x: torch.Tensor, y: torch.Tensor, say: Say) -> None:
    """What goes back is made of what is printed."""
    loss = F.cross_entropy(net(x), y)
    (loss / 2).backward()
    say(loss)


def parts(net: nn.Module, x: torch.Tensor, y: torch.Tensor, say: Say) -> None:
    """Averages and sums, of which some are dropped, and one is not of the rows."""
    logits = net(x)
    cross, square, large = F.cross_entropy(logits, y), logits.square().mean(), logits.abs().sum()
    decay = sum(p.square().sum() for p in net.parameters())
    loss = (cross + 0.1 * square - large / 100) * 2 + 0.01 * decay
    torch.autograd.backward([loss])
    say(cross, square, large, loss)


def in_place(net: nn.Module, x: torch.Tensor, y: torch.Tensor, say: Say) -> None:
    logits = net(x)
    loss = F.cross_entropy(logits, y)
    loss += logits.square().mean()
    loss *= 2
    loss.backward()
    loss += 1
    say(loss)


def again(net: nn.Module, x: torch.Tensor, y: torch.Tensor, say: Say) -> None:
    """A second pass goes through what is known by then; gradients of gradients, too."""
    x.requires_grad_()
    loss = F.cross_entropy(net(x), y)
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    steep = loss + slope.square().sum()
    steep.backward(retain_graph=True)
    say(loss, steep)
    (0.5 * loss).square().backward()
    say(loss)


def running(net: nn.Module, x: torch.Tensor, y: torch.Tensor, say: Say) -> None:
    """Some backward passes, and a sum of them."""
    total = torch.zeros((), dtype=torch.float64)
    for rows in (slice(0, 4), slice(4, 8)):
        loss = F.cross_entropy(net(x[rows]), y[rows]) / 2
        loss.backward()
        total = total + loss.detach()
    say(loss, total)


PROGRAMS: dict[str, Program] = {each.__name__: each for each in (one, half, parts, in_place, again, running)}


def trained(net: nn.Module, optimizer: Any, program: Program, rank: int) -> list[float]:
    said: list[float] = []

    def say(*numbers: torch.Tensor) -> None:
        if rank == 0:
            said.extend(x.item() for x in numbers)

    for x, y in batches():
        program(net, x, y, say)
        kept = [p.grad for p in net.parameters()] if rank == 0 else None
        optimizer.step()
        optimizer.zero_grad()
        del kept
    return said


def _are_known(rank: int, world: int, plan: dict[str, Any]) -> None:
    for name, program in PROGRAMS.items():
        alone = model()
        expected = trained(alone, torch.optim.AdamW(alone.parameters(), 0.05), program, 0)
        net = model()
        net, optimizer = espalier.prepare(net, torch.optim.AdamW(net.parameters(), 0.05), plan=plan)
        said = trained(net, optimizer, program, rank)
        assert rank or said == pytest.approx(expected, rel=1e-6 if name == "one" else 1e-11), name
        for p, own in zip(net.parameters(), alone.parameters(), strict=True):
            assert torch.allclose(espalier.full_tensor(p), own, rtol=0, atol=1e-11), name


@pytest.mark.parametrize(
    ("world", "plan"), [(2, {"data": 2}), (2, {"data": 2, "zero": 3}), (4, {"data": 2, "tensor": 2})]
)
def test_one_rank_may_ask_for_a_loss_that_has_gone_back(ranks: Any, world: int, plan: dict[str, Any]) -> None:
    ranks(world, _are_known, plan)


def _sent(rank: int, world: int) -> None:
    """One message a pass that finishes gradients, whatever ranks keep; none in others."""
    net = model()
    net, optimizer = espalier.prepare(net, torch.optim.SGD(net.parameters(), 0.1), plan={"data": 2})
    mesh, kept = next(net.parameters()).device_mesh, []
    for x, y in batches():
        logits = net(x)
        cross, square = F.cross_entropy(logits, y), logits.square().mean()
        if rank == 0:
            kept += [cross, cross.detach(), 2 * square.detach()]
        loss = cross + square
        del square
        with espalier.ledger(mesh) as book:
            loss.backward()
        # it goes before gradients do, beside the pass
        assert [entry.bytes < 64 for entry in book.entries] == [True, *[False] * (len(book.entries) - 1)]
        with espalier.ledger(mesh) as book:
            assert loss.item() > cross.item() > 0
        assert not book.entries
        optimizer.step()
    with net.no_sync():
        loss = F.cross_entropy(net(x), y)
        with espalier.ledger(mesh) as book:
            loss.backward()
    assert not book.entries


def test_they_are_told_in_one_message(ranks: Any) -> None:
    ranks(2, _sent)


class Centred(nn.Module):
    """Looks at its batch as it computes, which is nobody's business."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = model()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            scale = x.abs().mean()
        return self.inner(x / scale)


def judged(net: nn.Module, rank: int) -> list[Any]:
    """What one rank says of an evaluation, and of numbers beside a loss."""
    said = list[Any]()
    total, right, hits = 0.0, 0, torch.zeros(5, dtype=torch.int64)
    largest = torch.tensor(-9.0, dtype=torch.float64)
    for x, y in batches():
        with torch.no_grad():
            out = net(x)
            total += F.cross_entropy(out, y)
            right += (out.argmax(1) == y).sum()
            largest = torch.maximum(largest, out.max())
            hits = hits + ((out > 0) & (F.one_hot(y, 5) > 0)).sum(dim=0)
            kinds = torch.bincount(out.argmax(1), minlength=5)
            table = F.one_hot(out.argmax(1), 5).T @ F.one_hot(y, 5)
        sure = net(x).detach().softmax(-1).amax(-1).mean()
        if rank == 0:
            said += [f"{total / 3:.9f}", int(right), float(right / 24), largest.item(), sure.item()]
            said += [hits.tolist(), kinds.tolist(), table.tolist()]
    return said


def _are_known_at_once(rank: int, world: int, plan: dict[str, Any]) -> None:
    expected = judged(Centred(), 0)
    net = Centred()
    net, _ = espalier.prepare(net, torch.optim.SGD(net.parameters(), 0.1), plan=plan)
    said = judged(net, rank)
    assert rank or said == [x if isinstance(x, str | list) else pytest.approx(x, rel=1e-12) for x in expected]


@pytest.mark.parametrize(
    ("world", "plan"), [(2, {"data": 2}), (2, {"data": 2, "zero": 3}), (4, {"data": 2, "tensor": 2})]
)
def test_one_rank_may_ask_for_numbers_of_an_evaluation(ranks: Any, world: int, plan: dict[str, Any]) -> None:
    ranks(world, _are_known_at_once, plan)


def _judges_alone(rank: int, world: int, plan: dict[str, Any]) -> None:
    expected = judged(Centred(), 0)
    net = Centred()
    net, optimizer = espalier.prepare(net, torch.optim.SGD(net.parameters(), 0.1), plan=plan)
    net(next(batches())[0])
    if rank == 0:
        assert judged(net.module, rank) == [
            x if isinstance(x, str | list) else pytest.approx(x, rel=1e-12) for x in expected
        ]
    F.cross_entropy(net(torch.ones(4, 4, dtype=torch.float64)), torch.arange(4)).backward()
    optimizer.step()


@pytest.mark.parametrize("plan", [{"data": 2}, {"data": 2, "zero": 2}])
def test_one_rank_may_evaluate_alone_by_the_module_within(ranks: Any, plan: dict[str, Any]) -> None:
    ranks(2, _judges_alone, plan)


def _sent_at_once(rank: int, world: int) -> None:
    """One message a number, of the loop's alone: what the model makes within, and gradients, wait for it."""
    net = Centred()
    net, optimizer = espalier.prepare(net, torch.optim.SGD(net.parameters(), 0.1), plan={"data": 2})
    mesh = net(next(batches())[0]).device_mesh
    for x, y in batches():
        with espalier.ledger(mesh) as book, torch.no_grad():
            out = net(x)
        assert len(book.entries) == 1  # of the scale, when it is used
        with espalier.ledger(mesh) as book, torch.no_grad():
            right = (out.argmax(1) == y).sum()
        assert [entry.bytes for entry in book.entries] == [16]
        loss = F.cross_entropy(net(x), y)
        with espalier.ledger(mesh) as book:
            kept = [loss.detach(), 2 * loss] if rank == 0 else None
        assert not book.entries and right <= 8
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        del kept


def test_numbers_of_a_loop_are_sent_once(ranks: Any) -> None:
    ranks(2, _sent_at_once)
