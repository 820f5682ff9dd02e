"""Models that no pipeline can divide: the last stage has them, and all is as on one process."""

from __future__ import annotations

import random
import warnings
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import espalier
from espalier.parallel.compose import Undivided, UndividedWarning

TOLERANCE = 1e-10


class Follows(nn.Module):
    """Writes to a follower's parameters and to a buffer, counts, and draws as values and its count say."""

    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
        self.follower = nn.Linear(6, 4).requires_grad_(False)
        self.register_buffer("mean", torch.zeros(4))
        self.steps = 0

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        out = self.net(x)
        self.steps += 1
        if out.std() > 0.01 and self.steps % 2:
            out = out + 0.1 * torch.randn(4, dtype=out.dtype) * random.random() + numpy.random.rand()  # noqa: NPY002
        with torch.no_grad():
            self.mean.lerp_(out.mean(0), 0.1)
            self.follower.bias.lerp_(self.net[2].bias, 0.5)
        return {"loss": F.mse_loss(out + self.follower(x), y), "out": out + self.mean}


class Penalised(nn.Module):
    """Takes gradients within its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Softplus(), nn.Linear(8, 4))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            out = self.net(x)
            (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return {"loss": F.mse_loss(out, y) + 0.1 * slope.square().mean(), "out": out}


class Slopes(nn.Module):
    """Takes gradients within a block, as it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.block, self.out = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.enter(x)
        (slope,) = torch.autograd.grad(self.block(h).tanh().square().sum(), h, create_graph=True)
        return self.out(h - 0.1 * slope)


class One(nn.Linear):
    """Has no places for two stages."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:  # type: ignore[override]
        out = super().forward(x)
        return {"loss": F.mse_loss(out, y), "out": out}


MODELS: dict[str, Any] = {"follows": Follows, "penalised": Penalised, "one": lambda: One(6, 4)}


def numbers(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(8, 6, dtype=torch.float64, generator=generator)
    return {"x": x, "y": torch.randn(8, 4, dtype=torch.float64, generator=generator)}


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed)  # noqa: NPY002


def run(kind: str, plan: dict[str, Any], folder: Path) -> list[Any]:
    """What training, evaluation, prediction and a checkpoint give, and what is drawn after it."""
    torch.manual_seed(1)
    net = MODELS[kind]().double()
    trained = [p for p in net.parameters() if p.requires_grad]
    engine = espalier.initialize(
        net, torch.optim.AdamW(trained, lr=0.05), plan, max_grad_norm=0.5, count=lambda rows: len(rows["x"])
    )
    seed_all(3)
    found: list[Any] = [engine.train_step(numbers(i)) for i in range(3)]
    found.append(engine.grad_norm)
    found.append(engine.evaluate([numbers(7)]))
    found.append(engine.predict(numbers(8))["out"])
    drawn = torch.rand(3, dtype=torch.float64), torch.tensor([random.random(), numpy.random.rand()])  # noqa: NPY002
    engine.save(folder)
    found.append(engine.train_step(numbers(4)))
    found += [x.clone() for _, x in sorted(engine.full_state_dict().items())]
    engine.load(folder)
    found += [x.clone() for _, x in sorted(engine.full_state_dict().items())]
    if plan.get("pipe", 1) > 1:
        assert isinstance(engine.stages.split, Undivided)
    plain = [espalier.full_tensor(torch.as_tensor(x)) for x in (*found, *drawn)]
    return [x.detach().double().reshape(-1).cpu() for x in plain]


def follow(rank: int, world: int, plans: list[dict[str, Any]], folder: Path) -> Any:
    told = {}
    for i, plan in enumerate(plans):
        for kind in [*MODELS][: len(MODELS) - i]:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                told[kind, i] = run(kind, plan, folder / f"{kind}{i}")
            words = {str(w.message) for w in caught if w.category is UndividedWarning}
            assert len(words) == (plan.get("pipe", 1) > 1), words
            assert all("the last stage computes and holds the whole model" in said for said in words)
    return told


def test_equals_one_process(ranks: Any, tmp_path: Path) -> None:
    pipe = {"pipe": 2, "accumulate": 4}
    plans = {
        2: [pipe, {**pipe, "schedule": "gpipe"}, {**pipe, "schedule": "interleaved", "stages_per_rank": 2}],
        4: [{**pipe, "data": 2, "zero": 3}, {**pipe, "tensor": 2}, {"pipe": 4, "accumulate": 4}],
    }
    (right,) = ranks(1, follow, [{"accumulate": 4}], tmp_path / "one")
    for world, some in plans.items():
        for told in ranks(world, follow, some, tmp_path / str(world)):
            for (kind, i), found in told.items():
                for j, (a, b) in enumerate(zip(found, right[kind, 0], strict=True)):
                    assert a.shape == b.shape and (a - b).abs().max() < TOLERANCE, (kind, some[i], j)


def takes_gradients(rank: int, world: int) -> None:
    """Where an output is asked for, the forward takes gradients as it does in training."""
    found = []
    for plan in (None, {"pipe": 2}):
        torch.manual_seed(0)
        net: Any = nn.Sequential(nn.Linear(6, 6), Slopes(), nn.Linear(4, 4)).double()
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        if plan is not None:
            net, optimizer = espalier.prepare(net, optimizer, plan=plan)
        losses = []
        for step in range(2):
            loss = F.mse_loss(net(numbers(step)["x"]), numbers(step)["y"])
            losses.append(loss.item())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        found.append(torch.tensor([*losses, net(numbers(3)["x"]).sum().item()], dtype=torch.float64))
    assert (found[0] - found[1]).abs().max() < TOLERANCE


def tells_of_later_parameters(rank: int, world: int) -> None:
    """Of parameters that came later each rank has its own: they are told."""
    net: Any = One(6, 4).double()
    model, _ = espalier.prepare(net, torch.optim.SGD(net.parameters(), 0.1), plan={"pipe": 2})
    model(**numbers(0))["loss"].backward()
    net.weight = nn.Parameter(torch.ones(4, 6, dtype=torch.float64))
    with pytest.raises(ValueError, match="'weight' came later"):
        model(**numbers(1))["loss"].backward()
    takes_gradients(rank, world)


def takes_parametrizations(rank: int, world: int) -> None:
    """That come later, whose gradients all ranks see."""
    found = []
    for plan in (None, {"pipe": 2}):
        torch.manual_seed(0)
        net: Any = Penalised().double()
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        if plan is not None:
            net, optimizer = espalier.prepare(net, optimizer, plan=plan)
        told = []
        for step in range(3):
            optimizer.zero_grad()
            loss = net(**numbers(step))["loss"]
            loss.backward()
            told += [p.grad.norm() for p in net.parameters() if p.grad is not None]
            told.append(sum(p.grad.square().sum() for p in net.parameters() if p.grad is not None).item())
            optimizer.step()
            if step == 0:
                weight_norm(net.net[2])
                optimizer = torch.optim.SGD(net.parameters(), 0.1)
        told += [x.sum() for x in net.state_dict().values()]
        found.append(torch.stack([espalier.full_tensor(torch.as_tensor(x)).detach() for x in told]))
    assert (found[0] - found[1]).abs().max() < TOLERANCE


@pytest.mark.filterwarnings("ignore:.*:espalier.parallel.compose.UndividedWarning")
@pytest.mark.filterwarnings("ignore:A value is asked for that lies on ranks:espalier.GatherWarning")
def test_loops_around_them(ranks: Any) -> None:
    ranks(2, tells_of_later_parameters)
    ranks(2, takes_parametrizations, timeout=40.0)


def test_a_dry_run_plays_the_rank_that_computes() -> None:
    with torch.device("meta"):
        net = Penalised()
        data = {key: torch.empty(x.shape) for key, x in numbers(0).items()}
    with pytest.warns(UndividedWarning, match="takes gradients|depends on the values"):
        told = espalier.dry_run(net, {"pipe": 2, "accumulate": 2}, data, count=lambda rows: len(rows["x"]))
    assert told.parameter_bytes == 4 * told.parameters and told.flops > 0


def test_cuts_that_were_said_are_not_passed_over(ranks: Any) -> None:
    ranks(2, cut)


def cut(rank: int, world: int) -> None:
    net = Penalised().double()
    plan = {"pipe": 2, "accumulate": 2, "cuts": ["net.2"]}
    engine = espalier.initialize(net, torch.optim.SGD(net.parameters(), lr=0.1), plan)
    with pytest.raises(ValueError, match="cannot be split"):
        engine.train_step(numbers(0))
