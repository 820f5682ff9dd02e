"""Numbers of parameters and gradients in stages: all ranks that ask for one are told it, and no other."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import espalier
from tests.asked import ASKED
from tests.ranks.test_gradients_of_stages import Net, batch

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*in several stages or branches:espalier.GatherWarning"),
    pytest.mark.filterwarnings("ignore:A value is asked for that lies on:espalier.GatherWarning"),
    pytest.mark.filterwarnings("ignore:The tensor-parallel layouts of"),
]


def unlike(rank: int, world: int) -> None:
    """No rank gets a value that was asked for by another call, or of another tensor."""
    net = Net(False).double()
    model, optimizer = espalier.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1), plan={"pipe": 2})
    inputs, labels = batch(0)
    head, last = net.head.weight, net.blocks[3].weight
    weights = torch.arange(6.0, dtype=torch.float64)
    asks: tuple[tuple[Callable[[], Any], Callable[[], Any]], ...] = (
        (lambda: head.grad.norm(), lambda: last.grad.norm()),
        (lambda: head.grad.norm(), lambda: head.grad.norm(1)),
        (lambda: head.grad.norm(), lambda: head.norm()),
        (lambda: (head.grad * weights).sum(), lambda: (head.grad * (weights + 1)).sum()),
        (lambda: head.grad.mul_(2.0).norm(), lambda: head.grad.norm()),
        (lambda: (head.grad.mul_(2.0), head.grad.norm())[1], lambda: head.grad.norm()),
    )
    for mine, others in asks:
        nn.functional.cross_entropy(model(*inputs), labels).backward()
        if rank == 0:
            with pytest.raises(ValueError, match="rank 1 has gone on without asking"):
                mine().item()
        else:
            others().item()
        optimizer.step()
        optimizer.zero_grad()
    nn.functional.cross_entropy(model(*inputs), labels).backward()
    torch.manual_seed(3)
    drawn = [torch.rand_like(head.grad).norm().item() for _ in range(2)]
    drawn += [torch.nn.functional.dropout(head.grad).norm().item() for _ in range(2)]
    assert len(set(drawn)) == 4
    every: list[Any] = [None] * world
    torch.distributed.all_gather_object(every, drawn)
    assert every[0] == every[1]
    if rank == 0:
        # what can't be told apart, and what is large, is asked of the engine
        much = torch.ones(8, 20, dtype=torch.float64)
        for ask in (lambda: (head.grad.T @ much).sum().item(), lambda: head.repeat(20, 20).tolist()):
            with pytest.raises(ValueError, match=r"are on ranks \[1\](.|\n)*engine.full_gradients"):
                ask()
    value = (head * 1).full_tensor()
    every = [None] * world
    torch.distributed.all_gather_object(every, (value.requires_grad, value.tolist()))
    assert every[0] == every[1] and value.requires_grad
    if rank == 0:
        with pytest.raises(ValueError, match="no gradient can go back from this rank"):
            value.sum().backward()


def after_a_penalty(rank: int, world: int) -> None:
    """What the engine does between the program's calls, on each rank to another number of tensors."""
    torch.manual_seed(0)
    net = Net(False).double()
    plain = copy.deepcopy(net)
    model, _ = espalier.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1), plan={"pipe": 2})
    inputs, labels = batch(1)
    for _ in range(2):
        for m in (model, plain):
            loss = nn.functional.cross_entropy(m(*inputs), labels)
            (loss + 0.01 * sum(p.square().sum() for p in m.parameters())).backward()
        trained_ones = ([p for p in m.parameters() if p.requires_grad] for m in (net, plain))
        ours, theirs = ([(p.grad**2).sum().item() for p in some] for some in trained_ones)
        assert ours == pytest.approx(theirs, rel=1e-12)


# ---- loops drawn by lot: what they ask of what, and what they write to in between

MAKE: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    lambda x: x.norm(),
    lambda x: x.abs().max(),
    lambda x: x.float().sum(),
    lambda x: x.detach().square().mean(),
    lambda x: torch.linalg.vector_norm(x.data),
    lambda x: x.flatten()[0],
    lambda x: (x > 0).sum(),
    lambda x: x.mean(0).sum(),
    lambda x: x.cpu().contiguous().double().pow(2).sum().sqrt(),
    lambda x: torch.isfinite(x).all(),
    lambda x: x.clone().mul_(3).sum(),
    lambda x: x.view(-1).topk(1)[0].sum(),
)
ASK: tuple[Callable[[torch.Tensor], Any], ...] = (
    lambda x: x.item(),
    lambda x: float(x.detach()),
    lambda x: bool(x.detach()),
    lambda x: x.tolist(),
    lambda x: float(f"{x.detach().double():.12f}"),
    lambda x: x.detach().numpy().item(),
)


def between(lot: random.Random, net: nn.Module, has_grads: bool, kept: list[torch.Tensor]) -> Any:
    """What a loop does before a step, or after it: a number that it asks for, or None."""
    parameters = [p for p in net.parameters() if p.grad is not None or not has_grads]
    p, make, ask, kind = lot.choice(parameters), lot.choice(MAKE), lot.choice(ASK), lot.randrange(12)
    x: Any = p.grad if has_grads and lot.random() < 0.6 else p
    if kind < 5:
        return ask(make(x))
    if kind == 5:
        with torch.no_grad():
            x.mul_(0.9)
    elif kind == 6 and has_grads:
        p.grad = x.detach() * 0.5
    elif kind == 7 and has_grads:
        return float(nn.utils.clip_grad_norm_(net.parameters(), 1.0))
    elif kind == 8 and has_grads:
        torch._foreach_mul_([p.grad for p in parameters], 0.8)
    elif kind == 9:
        kept.append(make(x).detach().clone())
    elif kind == 10 and kept:
        return ask(lot.choice(kept))
    elif isinstance(x, espalier.DTensor) and espalier.layout_of(x).mesh.is_member:
        make(x).item()  # by the ranks that have it alone
    return None


def loop(model: nn.Module, net: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> list[float]:
    lot, asked, kept = random.Random(seed), list[float](), list[torch.Tensor]()
    for step in range(3):
        inputs, labels = batch(step)
        for _ in range(1 + (step == 1)):
            loss = nn.functional.cross_entropy(model(*inputs), labels)
            if lot.random() < 0.3:
                loss = loss + 0.01 * sum(p.square().sum() for p in net.parameters())
            loss.backward()
        for has_grads in (True, False):
            told = [between(lot, net, has_grads, kept) for _ in range(lot.randint(1, 12))]
            asked += [float(x) for x in told if x is not None]
            if has_grads:
                optimizer.step()
                optimizer.zero_grad(set_to_none=lot.random() < 0.5)
    return asked


def drawn(rank: int, world: int, plans: list[dict[str, Any]]) -> None:
    for number, plan in enumerate(plans):
        for seed in range(number, number + 3 * max(ASKED, 1)):
            torch.manual_seed(seed)
            net = Net(tied=False).double()
            plain = copy.deepcopy(net)
            ours, theirs = (torch.optim.AdamW(m.parameters(), lr=0.05) for m in (net, plain))
            model, _ = espalier.prepare(net, ours, plan=plan)
            told = loop(model, net, ours, seed)
            assert told == pytest.approx(loop(plain, plain, theirs, seed), rel=1e-5, abs=1e-9), (plan, seed)


def on_two(rank: int, world: int) -> None:
    unlike(rank, world)
    after_a_penalty(rank, world)
    drawn(rank, world, [{"pipe": 2}, {"pipe": 2, "accumulate": 2}])


def on_four(rank: int, world: int) -> None:
    drawn(rank, world, [{"pipe": 2, "data": 2, "zero": 3}, {"pipe": 2, "tensor": 2}, {"pipe": 4}])


def test_numbers_are_those_of_one_process(ranks: Any) -> None:
    ranks(2, on_two)
    ranks(4, on_four)
