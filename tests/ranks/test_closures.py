"""LBFGS, which asks for the loss as often as it likes, on an equation in derivatives."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # through which an optimizer's step goes, once it is there
from torch import nn

import espalier

TOLERANCE = 1e-9
PLANS: tuple[dict[str, Any], ...] = (
    {"data": 2},
    {"data": 2, "zero": 1},
    {"data": 2, "zero": 2},
    {"data": 2, "zero": 3},
    {"tensor": 2},
)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 1)).double()


def late() -> nn.Sequential:
    """With a first stage that has no parameters, where one begins at its second module."""
    return nn.Sequential(nn.Tanh(), *net())


class Turns(nn.Module):
    """Layers in turn, so that stages have copies of them, and a parameter that nothing is made of."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.unused = nn.Parameter(torch.ones(3))
        self.one, self.other, self.last = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 1)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = torch.tanh(self.other(torch.tanh(self.one(x))))
        out: torch.Tensor = self.last(x)
        return out


def residual(model: Any, step: int) -> torch.Tensor:
    x = torch.rand(8, 2, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    x.requires_grad_()
    u = model(x)
    (du,) = torch.autograd.grad(u.sum(), x, create_graph=True)
    return (du[:, :1] + u * du[:, 1:] - torch.sin(3 * x[:, :1])).square().mean()


def error(model: Any, step: int) -> torch.Tensor:
    x = torch.rand(8, 2, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    return (model(x) - torch.sin(3 * x[:, :1])).square().mean()


def solve(
    model: Any,
    optimizer: torch.optim.Optimizer,
    steps: int = 3,
    loss_of: Callable[[Any, int], torch.Tensor] = residual,
) -> list[float]:
    losses = []
    for step in range(steps):

        def closure(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, step)
            loss.backward()
            return loss

        loss: Any = optimizer.step(closure)  # type: ignore[arg-type]
        losses.append(loss.detach().item())
    return losses + [p.norm().item() for p in model.parameters()]


def lbfgs(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=5, line_search_fn="strong_wolfe")


def on_two(rank: int, world: int) -> None:
    plain = net()
    expected = solve(plain, lbfgs(plain))
    for plan in PLANS:
        ours = net()
        model, optimizer = espalier.prepare(ours, lbfgs(ours), plan=plan)
        assert solve(model, optimizer) == pytest.approx(expected, abs=TOLERANCE), plan
        for name, x in model.engine.full_state_dict().items():
            assert (x - plain.state_dict()[name]).abs().max() < TOLERANCE, (plan, name)
        assert model.engine.steps == 3


def in_stages(rank: int, world: int, net: Callable[[], nn.Module] = net) -> None:
    """All ranks have all parameters and gradients while the step goes."""
    plain = net()
    expected = solve(plain, lbfgs(plain), 3, error)
    of_two: tuple[dict[str, Any], ...] = ({"pipe": 2}, {"pipe": 2, "accumulate": 2})
    of_two = ({"pipe": 2, "cuts": ("1",)},) if net is late else of_two
    cut = {"pipe": 2, "data": 2, "zero": 2, "accumulate": 2, "schedule": "zb-h1", "chunk_megabytes": 0.001}
    cut = {"pipe": 2, "data": 2, "zero": 3} if net is Turns else cut
    for plan in of_two if world == 2 else (cut,):
        ours = net()
        with pytest.warns(UserWarning, match=r"LBFGS.step\(closure\) .* send one another all"):
            model, optimizer = espalier.prepare(ours, lbfgs(ours), plan=plan)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 1.0)
        assert solve(model, optimizer, 3, error) == pytest.approx(expected, abs=TOLERANCE), plan
        schedule.step()
        for name, x in model.engine.full_state_dict().items():
            assert (x - plain.state_dict()[name]).abs().max() < TOLERANCE, (plan, name)
        assert model.engine.steps == 3 and all(p.requires_grad for p in optimizer.param_groups[0]["params"])
        assert net is not Turns or model.unused.grad is None


def resumed(rank: int, world: int, folder: str) -> None:
    """With the curvature that it has gathered, under another plan too."""
    for plan in PLANS[2:]:
        first, second = net(), net()
        model, optimizer = espalier.prepare(first, lbfgs(first), plan=plan)
        solve(model, optimizer, 2)
        path = f"{folder}/{'-'.join(map(str, plan.items()))}"
        model.engine.save(path)
        again, other = espalier.prepare(second, lbfgs(second), plan={"data": 2, "zero": 1})
        again.engine.load(path)
        assert solve(again, other) == pytest.approx(solve(model, optimizer), abs=TOLERANCE), plan


def resumed_in_stages(rank: int, world: int) -> None:
    """With curvature of one process, as state dicts have it."""
    plain, ours = net(), net()
    alone = lbfgs(plain)
    solve(plain, alone, 2, error)
    model, optimizer = espalier.prepare(ours, lbfgs(ours), plan={"pipe": 2})
    model.load_state_dict(plain.state_dict())
    optimizer.load_state_dict(copy.deepcopy(alone.state_dict()))
    assert solve(model, optimizer, 2, error) == pytest.approx(solve(plain, alone, 2, error), abs=TOLERANCE)


def refused(rank: int, world: int) -> None:
    for plan, why in (
        ({"data": 2, "precision": "bfloat16"}, "precision = bfloat16"),
        ({"data": 2, "clip": 1.0, "offload": {"states": "host"}}, r"clip = 1.0, offload"),
    ):
        model = net()
        with pytest.raises(ValueError, match=rf"LBFGS(.|\n)*does not go with {why}"):
            espalier.initialize(model, lbfgs(model), plan)
    model = net()
    halves = [lbfgs(model[0]), torch.optim.SGD(model[2:].parameters(), 0.1)]
    with pytest.raises(ValueError, match=r"does not go with another optimizer of the same model"):
        espalier.initialize(model, halves, {"data": 2})
    engine = espalier.initialize(model, lbfgs(model), {"data": 2}, loss_fn=nn.functional.mse_loss)
    with pytest.raises(ValueError, match=r"Write optimizer.step\(closure\)"):
        engine.train_step((torch.ones(8, 2).double(), torch.ones(8, 1).double()))


def test_a_closure_is_called_as_on_one_process(ranks: Any) -> None:
    ranks(2, on_two)


@pytest.mark.filterwarnings("ignore:A value is asked for that lies on ranks:espalier.GatherWarning")
def test_a_closure_is_called_with_all_stages(ranks: Any) -> None:
    for made in (net, Turns, late):
        ranks(2, in_stages, made)


@pytest.mark.world(4)
@pytest.mark.filterwarnings("ignore:A value is asked for that lies on ranks:espalier.GatherWarning")
def test_a_closure_is_called_with_gradients_that_are_cut(ranks: Any) -> None:
    for made in (net, Turns):
        ranks(4, in_stages, made)


@pytest.mark.filterwarnings("ignore:A value is asked for that lies on ranks:espalier.GatherWarning")
@pytest.mark.filterwarnings("ignore:LBFGS.step")
def test_a_run_with_closures_goes_on(ranks: Any, tmp_path: Path) -> None:
    ranks(2, resumed, str(tmp_path))
    ranks(2, resumed_in_stages, timeout=30.0)


def test_what_closures_do_not_go_with(ranks: Any) -> None:
    ranks(2, refused)
