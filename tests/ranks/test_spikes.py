"""Steps that must not be made: one answer on all ranks, the culprits named, all else as if they were not."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import espalier
from espalier.engine.norm import Guard
from espalier.mesh import Mesh

STEPS, NAN, LEAP = 9, 5, 7
SKIPS = espalier.Spikes(on_nan="skip", on_spike="skip", least=3, window=8)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(step)
    x, y = (torch.randn(8, n, generator=draw, dtype=torch.float64) for n in (6, 4))
    return x, y * (1e4 if step == LEAP else 1.0)


def model_of_all() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def trained(rank: int, world: int, plan: dict[str, Any], spikes: espalier.Spikes) -> tuple[Any, ...]:
    model, optimizer = model_of_all()
    poisoned = model[2].bias
    engine = espalier.initialize(model, optimizer, plan, loss_fn=nn.functional.mse_loss, spikes=spikes)
    told, norms = [], []
    poisoned.register_hook(lambda grad: grad * math.nan if engine.steps + 1 == NAN else grad)
    for step in range(1, STEPS + 1):
        engine.train_step(batch(step))
        told.append((engine.guard.told, engine.guard.culprits if engine.guard.told else ()))
        norms.append(float(engine.grad_norm))
    state = {name: x.clone() for name, x in engine.full_state_dict().items()}
    return told, state, engine.guard.skipped, engine.steps, norms[-1]


def plain() -> dict[str, torch.Tensor]:
    model, optimizer = model_of_all()
    for step in range(1, STEPS + 1):
        if step not in (NAN, LEAP):
            x, y = batch(step)
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
    return model.state_dict()


PLANS = (
    {"data": 2},
    {"data": 2, "zero": 3, "accumulate": 2},
    {"tensor": 2},
    {"data": 2, "tensor": 2, "zero": 1, "clip": 1e6},
    {"pipe": 2, "accumulate": 2},
)


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_skipped_steps_leave_no_trace(ranks, plan):
    world = plan.get("data", 1) * plan.get("tensor", 1) * plan.get("pipe", 1)
    of_ranks = ranks(world, trained, plan, SKIPS)
    told, state, skipped, steps, _ = of_ranks[0]
    assert all(other[0] == told for other in of_ranks)
    assert [bool(text) for text, _ in told] == [step in (NAN, LEAP) for step in range(1, STEPS + 1)]
    assert (skipped, steps) == (2, STEPS)
    text, culprits = told[NAN - 1]
    assert culprits == ("2.bias",)
    assert text.startswith(
        "the gradient norm is nan; not finite are the gradients of 2.bias (in the part of rank"
    )
    text, culprits = told[LEAP - 1]
    assert "the loss leaps to" in text and "the gradient norm leaps to" in text
    assert culprits[0].startswith("2.")  # the gradient of a last layer is the first to see wrong targets
    for name, x in plain().items():
        torch.testing.assert_close(state[name], x, rtol=0, atol=1e-11)


def stopped(rank: int, world: int, on_nan: str) -> tuple[Any, ...]:
    try:
        trained(rank, world, {"data": 2}, espalier.Spikes(on_nan=on_nan))
    except espalier.SpikeError as error:
        return str(error), error.step, error.rollback, error.culprits
    return ()


@pytest.mark.parametrize("answer", ["stop", "rollback"])
def test_all_ranks_raise_alike(ranks, answer):
    first, second = ranks(2, stopped, answer)
    assert first == second
    assert first[1:] == (NAN, answer == "rollback", ("2.bias",))


def judge(values: list[float], **settings: Any) -> list[str]:
    guard = Guard(espalier.Spikes(on_nan="skip", on_spike="skip", **settings))
    mesh, found = Mesh.single(), []
    for step, x in enumerate(values):
        guard.admits(step + 1, x, 1.0, {"w": torch.ones(2)}, ["w"], mesh)
        found.append(guard.told.partition(";")[0])
        again = Guard(guard.settings)
        again.load_state_dict(guard.state_dict())
        assert again.state_dict() == guard.state_dict()
    return found


def test_what_a_spike_is():
    calm = [2.0, 2.1, 1.9, 2.0, 2.05, 1.95]
    assert judge([*calm, 2.4], least=6) == [""] * 7
    leaps = judge([*calm, 9.0, 2.0], least=6)
    assert leaps[6].startswith("the loss leaps to 9, ") and "its median of 2" in leaps[6] and leaps[7] == ""
    assert judge([*calm, 9.0], least=7) == [""] * 7  # too few before
    assert judge([2.0] * 8 + [2.9], least=6) == [""] * 9  # what never moved may move by a little
    assert judge([5.0, 4.0, 3.0, 2.0, 1.0, 0.5], least=2) == [""] * 6  # falling is no leap
    assert judge([math.inf]) == ["the loss is inf"]


def test_too_many_in_a_row_stop():
    guard = Guard(espalier.Spikes(on_nan="skip", limit=2))
    given = ({"w": torch.ones(2)}, ["w"], Mesh.single())
    assert not guard.admits(1, math.nan, 1.0, *given) and not guard.admits(2, math.nan, 1.0, *given)
    with pytest.raises(espalier.SpikeError, match="number 3 in a row: spikes.limit = 2"):
        guard.admits(3, math.nan, 1.0, *given)


def test_settings_are_checked_at_once():
    with pytest.raises(ValueError, match=r"(?s)on_nan = 'hope'.*factor = 0.*least = 9: .* window = 3"):
        espalier.Spikes(on_nan="hope", factor=0, least=9, window=3)  # type: ignore[arg-type]
