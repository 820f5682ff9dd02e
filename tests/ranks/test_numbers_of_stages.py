"""Numbers of parameters and gradients in stages: all ranks that ask for one are told it, and no other."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import espalier
from espalier.comm.control import Board
from tests.asked import ASKED
from tests.ranks.test_gradients_of_stages import Net, batch
from tests.zoo.drawn_bricks import Handled
from tests.zoo.drawn_mixes import Routed
from tests.zoo.drawn_turns import Slow

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
        much = torch.ones(8, 20_000, dtype=torch.float64)
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


def of_averages(rank: int, world: int) -> None:
    """Numbers of copies made before the first batch and after it, by some ranks more than by others."""
    torch.manual_seed(0)
    net = Net(True).double()
    plain = copy.deepcopy(net)
    told: list[list[float]] = []
    for m in (net, plain):
        optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
        model, _ = espalier.prepare(m, optimizer, plan={"pipe": 2}) if m is net else (m, optimizer)
        if rank == 0:
            copy.deepcopy(model)
        averages = [copy.deepcopy(model), torch.optim.swa_utils.AveragedModel(model)]
        told.append([])
        for step in range(3):
            inputs, labels = batch(step)
            nn.functional.cross_entropy(model(*inputs), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 0:
                average = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
                averages.append(torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=average))
            with torch.no_grad():
                for a, p in zip(averages[0].parameters(), m.parameters(), strict=True):
                    a.lerp_(p, 0.1 * (step + 1))
            for of in averages[1:]:
                of.update_parameters(model)
            told[-1] += [p.norm().item() for of in averages for p in of.parameters()]
            told[-1] += [
                float(espalier.full_tensor(torch.stack([p.norm() for p in of.parameters()]).sum()).detach())
                for of in averages
            ]
    assert told[0] == pytest.approx(told[1], rel=1e-12)


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


INTERLEAVED = {"pipe": 2, "data": 2, "schedule": "interleaved", "stages_per_rank": 2}
# of several tensors in one call
TOGETHER: tuple[Callable[[list[Any]], Any], ...] = (
    lambda xs: torch.stack([x.norm() for x in xs]).sum(),
    lambda xs: torch.cat([x.flatten() for x in xs]).abs().max(),
    lambda xs: torch.stack(torch._foreach_norm(xs)).max(),
    lambda xs: sum(x.square().sum() for x in xs),
    lambda xs: torch.stack([torch.dot(x.flatten()[:4], y.flatten()[:4]) for x, y in pairwise(xs)]).sum(),
)


class Loop:
    """What a loop holds beside its optimizer: values that it keeps, and averages of the weights."""

    def __init__(self, model: nn.Module, net: nn.Module) -> None:
        self.model, self.net = model, net
        self.kept: list[torch.Tensor] = []
        self.average: nn.Module | None = None

    def between(self, lot: random.Random, has_grads: bool) -> Any:
        """What a loop does before a step, or after it: a number that it asks for, or None."""
        parameters = [p for p in self.net.parameters() if p.grad is not None or not has_grads]
        p, make, ask, kind = lot.choice(parameters), lot.choice(MAKE), lot.choice(ASK), lot.randrange(18)
        q, of_all, on_gradients = (
            lot.choice(parameters),
            lot.choice(TOGETHER),
            has_grads and lot.random() < 0.6,
        )
        x: Any = p.grad if on_gradients else p
        if kind < 4:
            return ask(make(x))
        if kind < 6:
            every: list[Any] = [y.grad if on_gradients else y for y in parameters]
            return float(espalier.full_tensor(of_all(every)).detach())
        if kind == 6:
            with torch.no_grad():
                x.mul_(0.9)
        elif kind == 7:
            with torch.no_grad():
                x.mul_(1 + 0.01 * q.norm().clamp(max=1))
                p.data = p.data * q.mean().clamp(0.9, 1)
        elif kind == 8 and has_grads:
            p.grad = x.detach() * 0.5
        elif kind == 9 and has_grads:
            return float(nn.utils.clip_grad_norm_(self.net.parameters(), 1.0))
        elif kind == 10 and has_grads:
            torch._foreach_mul_([y.grad for y in parameters], 0.8)
            with torch.no_grad():
                torch._foreach_add_(parameters, [y.grad for y in parameters], alpha=-0.01)
        elif kind == 11:
            self.kept.append(make(x).detach().clone())
        elif kind == 12 and self.kept:
            return ask(lot.choice(self.kept))
        elif kind == 13:
            self.average = self.average or copy.deepcopy(self.model)
            with torch.no_grad():
                for y, of in zip(self.average.parameters(), self.net.parameters(), strict=True):
                    y.lerp_(of, 0.1)
        elif kind == 14 and self.average is not None:
            averages = [*self.average.parameters()]
            return float(espalier.full_tensor(of_all(averages)).detach()) + ask(make(lot.choice(averages)))
        elif kind == 15 and p.requires_grad:
            (grad,) = torch.autograd.grad(p.norm() * q.norm() + p.square().sum(), [p])
            return ask(make(grad))
        elif kind == 16:
            snap = copy.deepcopy(self.net.state_dict())
            return ask(make(snap[lot.choice([*snap])]))
        elif isinstance(x, espalier.DTensor) and espalier.layout_of(x).mesh.is_member:
            make(x.clone().mul_(2)).item()  # by the ranks that have it alone
        return None


def of_states(rank: int, world: int, folder: str) -> None:
    """An optimizer has states of all parameters, which are written to; a buffer is a tensor of its rank."""
    torch.manual_seed(0)
    # the second stage has experts, and so runs on DTensors: one comes in the place of its buffer
    second = nn.Linear(8, 8), Routed("two"), Handled("anew"), nn.Linear(8, 4)
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), *second).double()
    told: list[list[Any]] = []
    for m in (copy.deepcopy(net), net):
        optimizer = Slow(m.parameters())
        model, _ = (
            espalier.prepare(m, optimizer, plan={"pipe": 2, "cuts": ["2"]}) if m is net else (m, optimizer)
        )
        kept: list[Any] = []
        for step in range(3):
            x = torch.randn(8, 8, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 0:
                average = torch.optim.swa_utils.AveragedModel(model)
            for state in optimizer.state.values():
                for held in state.values():
                    held[:2].mul_(0.9) if held.ndim else None
            kept += [(p * p).sum() for p in model.parameters()]
        average.update_parameters(model)
        model.load_state_dict(average.module.state_dict())
        states = optimizer.state_dict()["state"]
        kept += [states[n][name] for n in sorted(states) for name in sorted(states[n])]
        kept += [x for _, x in sorted(model.state_dict().items())]
        told.append([espalier.full_tensor(x).detach() for x in kept])
    for ours, theirs in zip(*told, strict=True):
        assert torch.allclose(ours, theirs, rtol=0, atol=1e-12)
    model(x).sum().item()
    model.engine.export(f"{folder}/weights.pt", "torch")
    written = torch.load(f"{folder}/weights.pt")
    assert all(torch.equal(written[name], x) for name, x in model.state_dict().items())


def where_none_are(rank: int, world: int) -> None:
    """A rank whose stage has no parameters hears of others' behind steps, and the last of what is said."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 4)).double()
    model, optimizer = espalier.prepare(
        net, torch.optim.Adagrad(net.parameters(), lr=0.1), plan={"pipe": 2, "cuts": ["1"]}
    )
    for later in (False, True):
        if later:
            optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
        model(torch.ones(8, 6, dtype=torch.float64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert all(p.norm().item() > 0 for p in model.parameters())
        for state in optimizer.state.values():
            state["sum"][:2].mul_(0.9)
        assert all(p.sum().item() for p in model.parameters())
    board = Board(model.engine.mesh, "what is tested")
    if rank == 0:
        board.say(0, b"later in the alphabet")
        board.say(0, b"at last")
    torch.distributed.barrier()
    board.turn()
    assert board.said(0) == b"at last"


def loop(model: nn.Module, net: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> list[float]:
    lot, asked, held = random.Random(seed), list[float](), Loop(model, net)
    for step in range(3):
        inputs, labels = batch(step)
        for _ in range(1 + (step == 1)):
            loss = nn.functional.cross_entropy(model(*inputs), labels)
            if lot.random() < 0.3:
                loss = loss + 0.01 * sum(p.square().sum() for p in net.parameters())
            loss.backward()
        for has_grads in (True, False):
            told = [held.between(lot, has_grads) for _ in range(lot.randint(1, 12))]
            asked += [float(x) for x in told if x is not None]
            if has_grads:
                optimizer.step()
                optimizer.zero_grad(set_to_none=lot.random() < 0.5)
    return asked


def drawn(rank: int, world: int, plans: list[dict[str, Any]]) -> None:
    for number, plan in enumerate(plans):
        for seed in range(number, number + 3 * max(ASKED, 1)):
            torch.manual_seed(seed)
            net = Net(tied=seed % 3 > 0).double()
            plain = copy.deepcopy(net)
            ours, theirs = (torch.optim.AdamW(m.parameters(), lr=0.05) for m in (net, plain))
            model, _ = espalier.prepare(net, ours, plan=plan)
            told = loop(model, net, ours, seed)
            assert told == pytest.approx(loop(plain, plain, theirs, seed), rel=1e-5, abs=1e-9), (plan, seed)


def beside(rank: int, world: int, folder: str) -> None:
    warnings.simplefilter("ignore")  # of gradients of other stages, and of what is gathered
    of_states(rank, world, folder)
    where_none_are(rank, world)


def on_two(rank: int, world: int) -> None:
    unlike(rank, world)
    after_a_penalty(rank, world)
    of_averages(rank, world)
    drawn(rank, world, [{"pipe": 2}, {"pipe": 2, "accumulate": 2}])


def on_four(rank: int, world: int) -> None:
    drawn(
        rank, world, [{"pipe": 2, "data": 2, "zero": 3}, {"pipe": 2, "tensor": 2}, {"pipe": 4}, INTERLEAVED]
    )


def test_numbers_are_those_of_one_process(ranks: Any, tmp_path: Path) -> None:
    ranks(2, beside, str(tmp_path))
    ranks(2, on_two)
    ranks(4, on_four)
