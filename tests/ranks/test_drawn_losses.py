"""Random numbers that the loss of a pipeline draws, or that are drawn of its output: as under other plans."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Categorical, Normal

import espalier
from tests.ranks.habits import batch, numbers
from tests.ranks.habitual import net

TOLERANCE = 1e-10
Drawn = Callable[[Any, torch.Tensor], tuple[Any, list[Any]]]  # of outputs and classes: a loss, and values


def dropped(out: Any, y: torch.Tensor) -> tuple[Any, list[Any]]:
    return F.cross_entropy(F.dropout(out, 0.3), y), []


def relaxed(out: Any, y: torch.Tensor) -> tuple[Any, list[Any]]:
    return (F.gumbel_softmax(out, tau=0.5) * y.unsqueeze(1)).square().mean(), []


def noised(out: Any, y: torch.Tensor) -> tuple[Any, list[Any]]:
    return (out - torch.randn_like(out)).square().mean(), []


def chosen(out: Any, y: torch.Tensor) -> tuple[Any, list[Any]]:
    """A sample that the program reads before the loss is made of it."""
    sample = torch.multinomial(out.softmax(-1), 1)
    number = sample.sum().item()
    return -(out.log_softmax(-1).gather(1, sample) * (sample - 1.5)).mean(), [number, sample]


def acted(out: Any, y: torch.Tensor) -> tuple[Any, list[Any]]:
    """A policy's gradient, of a distribution's samples."""
    policy = Categorical(logits=out)
    action = policy.sample()
    return -(policy.log_prob(action) * (action - y)).mean() - 0.1 * policy.entropy().mean(), [action]


def switched(out: Any, y: torch.Tensor) -> tuple[Any, list[Any]]:
    bits = torch.bernoulli(out.sigmoid())
    return F.binary_cross_entropy_with_logits(out, bits), [bits]


def spread(out: Any, y: torch.Tensor) -> tuple[Any, list[Any]]:
    mean, width = out.chunk(2, -1)
    sample = Normal(mean, width.exp()).sample()
    again = torch.zeros_like(mean.detach()).uniform_(-1, 1)
    return ((mean - sample - again).square() * width).mean(), [sample, again]


def crossed(out: Any, y: torch.Tensor) -> tuple[Any, list[Any]]:
    """What is drawn first stands last in the loss."""
    first, second = F.dropout(out, 0.3), F.dropout(out, 0.6)
    return F.cross_entropy(second - 0.5 * first, y), []


DRAWN: tuple[Drawn, ...] = (dropped, relaxed, noised, chosen, acted, switched, spread, crossed)
IN_PARTS = chosen, switched  # values that are there at once are cut as others are


def dropping() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 12), nn.Dropout(0.3), nn.Tanh(), net(12, 4), nn.Dropout(0.1))


def trained(build: Callable[[], nn.Module], drawn: Drawn, plan: dict[str, Any]) -> torch.Tensor:
    torch.manual_seed(0)
    model, out = build(), list[Any]()
    model, optimizer = espalier.prepare(model, torch.optim.SGD(model.parameters(), 0.2), plan=plan)
    for step in range(3):
        x, y = batch(step)
        loss, values = drawn(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        out += [loss.item(), *values, torch.rand(2)]  # all ranks go on alike
    return numbers([*out, *model.parameters()])


def of_engines(training: bool, plan: dict[str, Any]) -> torch.Tensor:
    """The same of a loss function that an engine is given, with micro-batches beside."""

    def loss_fn(out: Any, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(F.dropout(out, 0.3, training), y)

    torch.manual_seed(0)
    model, out = net(), list[Any]()
    optimizer = torch.optim.SGD(model.parameters(), 0.2)
    engine = espalier.initialize(model, optimizer, plan, loss_fn=loss_fn)
    for step in range(3):
        out += [engine.train_step(batch(step)), torch.rand(2)]
    return numbers([*out, *engine.full_state_dict().values()])


def compared(rank: int, world: int) -> None:
    torch.set_default_dtype(torch.float64)
    for drawn in DRAWN:
        expected = trained(net, drawn, {"data": 2})
        plans: list[dict[str, Any]] = [{"pipe": 2}]
        plans += [{"pipe": 2, "accumulate": 2}] * (drawn in IN_PARTS)
        for plan in plans:
            apart = (trained(net, drawn, plan) - expected).abs().max()
            assert apart < TOLERANCE, f"{drawn.__name__} under {plan}: {apart}"
    for drawn in (dropped, chosen, acted):  # behind what the model draws
        apart = (trained(dropping, drawn, {"pipe": 2}) - trained(dropping, drawn, {"data": 2})).abs().max()
        assert apart < TOLERANCE, f"{drawn.__name__} of a model that draws: {apart}"
    apart = (of_engines(True, {"pipe": 2}) - of_engines(True, {"data": 2})).abs().max()
    assert apart < TOLERANCE, f"a loss function: {apart}"


@pytest.mark.filterwarnings("ignore:A value is asked for that lies on ranks:espalier.GatherWarning")
@pytest.mark.filterwarnings("ignore:multinomial has no sharding rule:espalier.GatherWarning")
def test_as_other_plans(ranks: Any) -> None:
    ranks(2, compared)


def of_parts(rank: int, world: int) -> list[float]:
    """Numbers that each micro-batch's loss draws by itself: all ranks go on from there."""
    numbers_after = []
    torch.set_default_dtype(torch.float64)
    for make in (
        partial(trained, net, dropped),
        partial(trained, dropping, dropped),
        partial(of_engines, True),
    ):
        make({"pipe": 2, "accumulate": 2})
        numbers_after.append(torch.rand(()).item())
    return numbers_after


@pytest.mark.filterwarnings("ignore:A value is asked for that lies on ranks:espalier.GatherWarning")
def test_ranks_go_on_alike(ranks: Any) -> None:
    first, second = ranks(2, of_parts)
    assert first == second


def consistent(rank: int, world: int) -> None:
    """A value that is read before the loss goes back is of the numbers that the loss is of."""
    torch.manual_seed(0)
    model = dropping()
    model, optimizer = espalier.prepare(model, torch.optim.SGD(model.parameters(), 0.2), plan={"pipe": 2})
    for step in range(3):
        out = model(batch(step)[0].float())
        before = out.square().mean().item()
        torch.rand(3)
        loss = out.square().mean()
        loss.backward()
        optimizer.step()
        assert abs(loss.item() - before) < 1e-6
    hard = F.gumbel_softmax(model(batch(0)[0].float()), hard=True)
    with pytest.raises(TypeError, match="gumbel_softmax draws random numbers"):
        hard.sum().item()


def test_values_before(ranks: Any) -> None:
    ranks(2, consistent)
