"""Models in stages that write to parameters, or go back by themselves, in forwards: as on one process."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

import espalier
from espalier.engine.looks import tell_of_writes
from espalier.parallel.compose import UndividedWarning
from tests.pure.test_left import MODELS, Restarted
from tests.pure.test_split_odd import AroundTrunk, ReversibleTrunk
from tests.ranks.habits import as_it_is, numbers

pytestmark = [
    pytest.mark.filterwarnings("ignore:A value is asked for that lies on ranks:espalier.GatherWarning"),
    pytest.mark.filterwarnings("ignore:.*in several stages or branches:espalier.GatherWarning"),
]
TOLERANCE = 1e-10
Make = Callable[[], nn.Module]


def net(part: Make, at: int) -> nn.Module:
    layers: list[nn.Module] = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)]
    layers.insert(at, part())
    return nn.Sequential(*layers, nn.Linear(6, 4)).double()


def trained(make: Make, wide: int, parts: int, lay: Callable[..., Any], is_alone: bool = False) -> list[Any]:
    """Losses, gradients, weights and buffers of some steps; without a plan micro-batch after micro-batch.

    Args:
        is_alone: no step has several micro-batches: a penalty on weights is added.
    """
    torch.manual_seed(0)
    model = make()
    model, optimizer = lay(model, torch.optim.SGD(model.parameters(), 0.1))
    seen: list[Any] = []
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(8, wide, generator=generator, dtype=torch.float64)
        y = torch.randint(0, 4, (8,), generator=generator)
        losses = []
        for some, of in zip(x.chunk(parts), y.chunk(parts), strict=True):
            loss = F.cross_entropy(model(some), of) / parts
            if is_alone:  # of what the forward has written
                loss = loss + 0.1 * sum(p.square().sum() for p in model.parameters())
            loss.backward()
            losses.append(loss.item())
        seen.append(sum(losses))
        seen += [p.grad.clone() for p in model.parameters() if p.requires_grad and p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    return [*seen, *model.parameters(), *model.buffers()]


def same(make: Make, wide: int, plan: dict[str, Any]) -> None:
    parts = plan.get("accumulate", 1)
    expected = numbers(trained(make, wide, parts, as_it_is, parts == 1))
    given = numbers(trained(make, wide, 1, partial(espalier.prepare, plan=plan), parts == 1))
    apart = (given - expected).abs().max().item()
    assert apart < TOLERANCE, f"{make} under {plan}: {apart}"


class NormalisedLinear(nn.Module):
    """Its weight gets other memory each time."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.linear.weight
        weight.data = F.normalize(weight.data + 0.1 * x.detach().mean(0), dim=1)
        out: torch.Tensor = self.linear(x).tanh()
        return out


class Clamped(nn.Module):
    """Writes to a weight itself, so that it lies in one stage."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.first.weight.clamp_(-0.3, 0.2)
        out: torch.Tensor = self.last(self.first(x).tanh())
        return out


class ClampedByData(Clamped):
    """Writes without a mark, and is not divided."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.first.weight.data.clamp_(-0.3, 0.2)
        x = self.first(x)
        out: torch.Tensor = self.last(x.tanh() if x.std() > 0 else x)
        return out


def written(rank: int, world: int) -> None:
    same(lambda: ClampedByData().double(), 6, {"pipe": 2})
    for plan in ({}, {"zero": 3}):
        same(lambda: Clamped().double(), 6, {"pipe": 2, **plan})
        same(partial(net, NormalisedLinear, 4), 6, {"pipe": 2, **plan})
    tell_of_writes.cache_clear()
    with pytest.warns(UserWarning, match="With accumulate = 2 it writes what it makes of a micro-batch"):
        for at in (1, 4):
            for plan in ({}, {"accumulate": 2}, {"accumulate": 2, "recompute": "full"}):
                same(partial(net, NormalisedLinear, at), 6, {"pipe": 2, **plan})
    for make in MODELS:
        same(partial(net, make, 1), 6, {"pipe": 2, "accumulate": 2})
    for plan in ({"schedule": "zb-h1"}, {"recompute": "full"}, {"schedule": "gpipe"}):
        for make in (MODELS[0], MODELS[1], MODELS[3], Restarted):
            same(partial(net, make, 1), 6, {"pipe": 2, "accumulate": 4, **plan})
    same(partial(net, MODELS[0], 4), 6, {"pipe": 2, "accumulate": 2})


@pytest.mark.filterwarnings("ignore:A loss is one of all rows")  # parts that average them
@pytest.mark.filterwarnings("ignore:The model's forward writes to its own weights")
@pytest.mark.filterwarnings("ignore::espalier.parallel.compose.UndividedWarning")
def test_what_forwards_write_to(ranks: Any) -> None:
    ranks(2, written)


def reversible(rank: int, world: int) -> None:
    def several() -> nn.Module:
        return nn.Sequential(
            nn.Linear(8, 8), *(ReversibleTrunk(2) for _ in range(4)), nn.Linear(8, 4)
        ).double()

    def around() -> nn.Module:
        return nn.Sequential(AroundTrunk(), nn.Linear(8, 4)).double()

    for make in (several, around):
        for plan in ({"pipe": 2}, {"pipe": 2, "accumulate": 2}):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UndividedWarning)
                same(make, 8, plan)


@pytest.mark.filterwarnings("ignore:The autograd function Reversible has no rule")
def test_reversible_blocks(ranks: Any) -> None:
    ranks(2, reversible)


class Gathered(torch.autograd.Function):
    """The tokens of all ranks, of which each goes on with its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        of_all = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(of_all, x.contiguous())
        return torch.cat(of_all)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0].chunk(dist.get_world_size())[dist.get_rank()]


class Gathers(nn.Module):
    """Of a library: it sums and gathers wherever torch.distributed runs."""

    is_on = False

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_on:
            x = Gathered.apply(x).chunk(dist.get_world_size())[dist.get_rank()]
        return x + self.linear(x)


class OnFirst(nn.Module):
    """Does something else on one rank."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if dist.get_rank() == 0:
            self.seen = True
        return x + self.linear(x)


class Unordered(nn.Module):
    """Goes through the names in a set, whose order is another in each process, as transformers' models do."""

    is_local = True

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.scales = nn.ParameterDict({name: torch.randn(6) for name in "abcdef"})

    def names(self, unordered: bool) -> list[str]:
        return sorted(self.scales, reverse=unordered and dist.get_rank() == 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        masks = {}  # calls of two kinds: their order is seen
        for name in self.names(self.is_local):
            of = x[:, :1] > ord(name) - 100 if ord(name) % 2 else x[:, :1] < 100 - ord(name)
            masks[name] = of.to(x.dtype)
        h = self.first(x).tanh()
        parts = {name: h * self.scales[name] for name in self.names(not self.is_local)}
        h = self.second(h)
        for name in sorted(self.scales):
            h = h + parts[name] * masks[name]
        return self.last(h)


def unordered(rank: int, world: int) -> None:
    """What each stage makes of the batch itself may come in any order; all else is compared."""
    plan = partial(espalier.prepare, plan={"pipe": 2, "cuts": ["second"]})
    expected, given = (numbers(trained(lambda: Unordered().double(), 6, 1, lay)) for lay in (as_it_is, plan))
    assert (given - expected).abs().max().item() < TOLERANCE
    with (
        patch.object(Unordered, "is_local", False),
        pytest.raises(ValueError, match="not the same on all ranks.*\n*.*PYTHONHASHSEED"),
    ):
        trained(lambda: Unordered().double(), 6, 1, plan)


def test_orders_of_sets(ranks: Any) -> None:
    ranks(2, unordered)


class Scored(nn.Module):
    """Asks for a value after a function was transformed that uses what lies outside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.distributions.Laplace(
            self.linear(x), x.new_ones(())
        ).mean  # which looks at its arguments
        scores = torch.vmap(lambda times: (hidden * times).sum(-1))(torch.arange(4))
        if (scores > 1e9).any():
            return x
        return x + scores.t() @ scores.tanh() @ hidden


class Matched(nn.Module):
    """Lets NumPy say which rows meet which."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        order = numpy.asarray(x.detach().cpu())[:, 0].argsort()
        first = x.detach().numpy().argmax(0)
        out: torch.Tensor = self.linear(x)[torch.as_tensor(order)] + x[torch.as_tensor(first)].mean(0)
        return out


def scored(rank: int, world: int) -> None:
    same(partial(net, Matched, 3), 6, {"pipe": 2})
    same(partial(net, Scored, 3), 6, {"pipe": 2, "accumulate": 2})


def test_values_asked_after_transforms(ranks: Any) -> None:
    ranks(2, scored)


def gathering(rank: int, world: int) -> None:
    for at in (1, 4):
        make = partial(net, Gathers, at)
        expected = numbers(trained(make, 6, 1, as_it_is))
        with patch.object(Gathers, "is_on", True):
            given = numbers(trained(make, 6, 1, partial(espalier.prepare, plan={"pipe": 2})))
        assert (given - expected).abs().max().item() < TOLERANCE
    with pytest.raises(ValueError, match=r"not the same on all ranks(.|\n)*get_rank"):
        trained(partial(net, OnFirst, 1), 6, 1, partial(espalier.prepare, plan={"pipe": 2}))


@pytest.mark.filterwarnings("ignore:torch.distributed.all_gather of a DTensor gives it once for each rank")
def test_collectives_and_ranks_in_forwards(ranks: Any) -> None:
    ranks(2, gathering)


class Centred(nn.Linear):
    """Adds a mean of what it was given so far."""

    def __init__(self) -> None:
        super().__init__(6, 6)
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = 0.5 * self.mean + 0.5 * x.detach().mean(0)
        return super().forward(x + self.mean)


class Critic(nn.Module):
    """What it gives hangs on what its calls before have left in buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6), Centred(), nn.Linear(6, 6), Centred()])
        spectral_norm(self.layers[2])
        self.out = nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x).tanh()
        score: torch.Tensor = self.out(x)
        return score


def penalised(lay: Callable[..., Any], together: bool) -> list[Any]:
    """WGAN-GP, and R1: in one loss, or going back one after the other."""
    torch.manual_seed(0)
    model: Any = Critic().double()
    model, optimizer = lay(model, torch.optim.SGD(model.parameters(), 0.01))
    seen: list[Any] = []
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        real, fake = torch.randn(2, 8, 6, generator=generator, dtype=torch.float64).unbind()
        between = (0.3 * real + 0.7 * fake).requires_grad_()
        scores = model(between)
        (slope,) = torch.autograd.grad(
            scores, between, grad_outputs=torch.ones_like(scores), create_graph=True, retain_graph=True
        )
        penalty = ((slope.view(slope.size(0), -1).norm(2, dim=1) - 1) ** 2).mean()
        real.requires_grad_()
        of_real = model(real)
        (of_first,) = torch.autograd.grad(of_real.sum(), real, create_graph=True)
        r1 = of_first.square().sum(1).mean()
        losses = [model(fake).mean() - of_real.mean(), 10 * penalty, 0.5 * r1, of_real.square().mean()]
        optimizer.zero_grad()
        for loss in [sum(losses)] if together else losses:
            loss.backward(retain_graph=True)
        optimizer.step()
        seen += [penalty.item(), r1.item(), real.grad]
    return [*seen, *model.parameters(), *model.buffers()]


def penalties(rank: int, world: int, plan: dict[str, Any]) -> None:
    for together in (True, False):
        expected = numbers(penalised(as_it_is, together))
        with pytest.warns(UserWarning, match="the model is computed once more, whole"):
            given = numbers(penalised(partial(espalier.prepare, plan=plan), together))
        apart = (given - expected).abs().max().item()
        assert apart < TOLERANCE, f"{together} under {plan}: {apart}"


def test_penalties_on_gradients_of_inputs(ranks: Any) -> None:
    ranks(2, penalties, {"pipe": 2})


@pytest.mark.world(4)
def test_penalties_on_gradients_where_rows_are_cut(ranks: Any) -> None:
    ranks(4, penalties, {"pipe": 2, "data": 2, "zero": 3})


def asked(rank: int, world: int) -> None:
    """States of other stages' parameters; a look at them changes nothing."""
    model = net(nn.Tanh, 1)
    model, optimizer = espalier.prepare(model, torch.optim.Adam(model.parameters(), 0.1), plan={"pipe": 2})
    F.cross_entropy(
        model(torch.ones(8, 6, dtype=torch.float64)), torch.zeros(8, dtype=torch.int64)
    ).backward()
    optimizer.step()
    told = 0
    for p in model.parameters():
        if p in optimizer.state:
            assert optimizer.state[p]["exp_avg"].shape == p.shape
            continue
        told += 1
        assert "exp_avg" not in optimizer.state[p] and p not in optimizer.state
        with pytest.raises(ValueError, match=r"in a pipeline's stage of another rank(.|\n)*state_dict\(\)"):
            optimizer.state[p]["exp_avg"]
    assert 0 < told < len([*model.parameters()])
    states = optimizer.state_dict()["state"]
    assert len(states) == len([*model.parameters()])
    assert all({"exp_avg", "exp_avg_sq", "step"} == {*state} for state in states.values())
    optimizer.load_state_dict(optimizer.state_dict())
    (elsewhere, *_) = (p for p in model.parameters() if p not in optimizer.state)
    with pytest.raises(ValueError, match="in a pipeline's stage of another rank"):
        optimizer.state[elsewhere]["exp_avg"]


def test_states_of_other_stages_are_asked_for(ranks: Any) -> None:
    ranks(2, asked)
