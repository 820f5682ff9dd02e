"""Hooks that programs put on parameters see gradients of the whole batch, once a backward pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.ranks.habits import Lay, compare, loss_of, trained
from tests.ranks.habitual import net


class Tied(nn.Module):
    """Its last layer looks up in the table of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer, self.other = nn.Embedding(20, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.other(self.layer(self.table(ids)).tanh()).tanh())


def step_of_tied(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> float:
    ids = torch.randint(0, 20, (8, 5), generator=torch.Generator().manual_seed(step))
    loss = F.cross_entropy(model(ids).flatten(0, 1), ids.roll(1, 1).flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def clamp(grad: torch.Tensor) -> torch.Tensor:
    return grad.clamp(-0.01, 0.01)


def shrink(p: torch.Tensor) -> None:
    assert p.grad is not None
    p.grad.clamp_(-0.01, 0.01).mul_(0.9)


def before_and_after(lay: Lay) -> list[Any]:
    """Some are put on before the model is laid out, some later, and some are taken away."""
    model, norms = net(), []
    handles = [p.register_hook(lambda g: g * 2) for p in model.parameters()]
    more = [p.register_post_accumulate_grad_hook(shrink) for p in model.parameters()]
    model, optimizer = lay(model, torch.optim.SGD(model.parameters(), 0.5))
    out = [trained(model, optimizer, 0).item()]
    handles[0].remove()
    more[1].remove()
    for p in model.parameters():
        p.register_hook(clamp)
        p.register_post_accumulate_grad_hook(lambda p: norms.append(p.grad.norm().item()))
    out += [trained(model, optimizer, step).item() for step in (1, 2)]
    return [*out, *sorted(norms), *model.parameters()]


def several_passes(lay: Lay) -> list[Any]:
    """Gradients of two are added up: hooks of gradients see those of each, the others what there is then."""
    model = net()
    for p in model.parameters():
        p.register_hook(clamp)
        p.register_post_accumulate_grad_hook(shrink)
    model, optimizer = lay(model, torch.optim.SGD(model.parameters(), 0.5))
    out = []
    for step in range(2):
        optimizer.zero_grad()
        for half in range(2):
            loss = loss_of(model, 2 * step + half)
            loss.backward()
            out.append(loss.item())
        optimizer.step()
    return [*out, *model.parameters()]


def sums(lay: Lay) -> list[Any]:
    """Of two calls and a penalty, which go back as one loss; and of the penalty alone."""
    model = net()
    for p in model.parameters():
        p.register_hook(clamp)
    model, optimizer = lay(model, torch.optim.SGD(model.parameters(), 0.5))
    out = [loss_of(model, 0).item()]
    for step in range(3):
        optimizer.zero_grad()
        loss = 0.1 * sum(p.square().sum() for p in model.parameters())
        if step < 2:
            loss = loss_of(model, step) + 0.5 * loss_of(model, step + 5) + loss
        loss.backward()
        optimizer.step()
    return [*out, *model.parameters()]


def shared_weights(lay: Lay) -> list[Any]:
    """A table that several modules use gets one gradient."""
    model = Tied()
    model.table.weight.register_hook(lambda g: g.clamp(-0.002, 0.002))
    model.layer.weight.register_post_accumulate_grad_hook(shrink)
    model, optimizer = lay(model, torch.optim.SGD(model.parameters(), 0.5))
    model.table.weight.register_post_accumulate_grad_hook(shrink)
    return [*[step_of_tied(model, optimizer, step) for step in range(3)], *model.parameters()]


def optimizers_in_hooks(lay: Lay) -> list[Any]:
    model = net()
    of = {p: torch.optim.SGD([p], 0.5, momentum=0.9) for p in model.parameters()}

    def step(p: torch.Tensor) -> None:
        of[p].step()
        of[p].zero_grad()

    for p in of:
        p.register_post_accumulate_grad_hook(step)
    model, *_ = lay(model, *of.values())
    out = []
    for at in range(3):
        loss = loss_of(model, at)
        loss.backward()
        out.append(loss.item())
    return [*out, *model.parameters()]


PROGRAMS = before_and_after, several_passes, sums, shared_weights, optimizers_in_hooks
PLANS: tuple[dict[str, Any], ...] = (
    {"data": 2},
    {"data": 2, "zero": 1},
    {"data": 2, "zero": 3},
    {"tensor": 2, "offload": {"parameters": "host"}},
    {"pipe": 2},
    {"pipe": 2, "accumulate": 2, "offload": {"parameters": "host", "states": "host"}},
)


def compared(rank: int, world: int, at: int) -> None:
    compare(PROGRAMS[at], [(plan, {}) for plan in PLANS])


@pytest.mark.filterwarnings("ignore:clamp_ has no sharding rule")  # of addends
@pytest.mark.filterwarnings("ignore:The tensor-parallel layouts of")
@pytest.mark.filterwarnings("ignore:A value is asked for that lies on ranks:espalier.GatherWarning")
@pytest.mark.filterwarnings("ignore:.*in several stages or branches:espalier.GatherWarning")
@pytest.mark.parametrize("at", range(len(PROGRAMS)), ids=[program.__name__ for program in PROGRAMS])
def test_hooks_of_parameters(ranks: Any, at: int) -> None:
    ranks(2, compared, at)
