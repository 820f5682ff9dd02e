"""What looks at a model beforehand leaves no traces in it, and reads no parametrization: in float64."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import espalier
from tests.ranks.test_engine import TOLERANCE

PLANS: dict[str, dict[str, Any]] = {
    "data": {"data": 2},
    "zero 3": {"data": 2, "zero": 3},
    "tensor": {"tensor": 2},
    "sequence parallel": {"tensor": 2, "sequence_parallel": True},
    "pipe": {"pipe": 2, "accumulate": 4},
    "context": {"context": 2},
    "recompute": {"data": 2, "recompute": "full"},
    "data and tensor": {"data": 2, "tensor": 2},
    "2d": {"tensor": 4, "tensor_mode": "2d"},
}
TWO = [name for name, plan in PLANS.items() if name not in ("data and tensor", "2d")]
FOUR = ["data and tensor", "2d"]


class Scaled(nn.Module):
    """A parametrization of a user's own, with a parameter, and a buffer that each use writes to."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.2))
        self.register_buffer("uses", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.uses.add_(1)
        return x * self.scale * (1 + 0.01 * self.uses)


def parametrized(layer: nn.Module, how: str) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if how == "weight_norm, hooks":
            return nn.utils.weight_norm(layer)
        if how == "spectral_norm, hooks":
            return nn.utils.spectral_norm(layer)
        if how == "own":
            parametrize.register_parametrization(layer, "weight", Scaled())
            return layer
        return getattr(parametrizations, how)(layer)


HOWS = ["weight_norm, hooks", "spectral_norm, hooks", "weight_norm", "spectral_norm", "own"]


class Block(nn.Module):
    def __init__(self, how: str, width: int = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = parametrized(nn.Linear(width, 2 * width), how)
        self.down = parametrized(nn.Linear(2 * width, width), how)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, how: str, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, width)
        self.blocks = nn.ModuleList([Block(how, width) for _ in range(2)])
        self.head = nn.Linear(width, 16)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def compared(make: Callable[[], nn.Module], plan: dict[str, Any]) -> None:
    """Three steps of a plan against one process, which does as many micro-batches."""
    torch.manual_seed(0)
    plain = make().double()
    torch.manual_seed(0)
    net = make().double()
    ours, theirs = (torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (net, plain))
    engine = espalier.initialize(net, ours, plan, max_grad_norm=1.0)
    for step in range(3):
        ids = torch.randint(0, 16, (8, 6), generator=torch.Generator().manual_seed(step))
        seeded(step)
        loss = engine.train_step(ids)
        seeded(step)
        expected = torch.zeros(())
        for part in ids.chunk(plan.get("accumulate", 1)):
            one = plain(part) / plan.get("accumulate", 1)
            one.backward()
            expected = expected + one.detach()
        nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        theirs.step()
        theirs.zero_grad()
        found, wanted = engine.full_state_dict(), plain.state_dict()
        gap = max((found[name] - x).abs().max().item() for name, x in wanted.items())
        assert abs(float(loss) - float(expected)) < TOLERANCE, (step, float(loss), float(expected))
        assert gap < TOLERANCE, (step, gap)


def seeded(step: int) -> None:
    torch.manual_seed(step)
    random.seed(step)
    np.random.seed(step)  # noqa: NPY002


def parametrizations_under(rank: int, world: int, names: list[str], hows: list[str]) -> list[str]:
    wrong = []
    for name in names:
        for how in hows:
            try:
                compared(partial(Net, how), PLANS[name])
            except Exception as error:
                wrong.append(f"{name}, {how}: {type(error).__name__}: {error}")
    return wrong


@pytest.mark.world(2)
def test_parametrizations_run_as_often_as_the_model(ranks: Any) -> None:
    assert ranks(2, parametrizations_under, TWO, HOWS) == [[], []]


@pytest.mark.world(4)
def test_parametrizations_run_as_often_on_four_ranks(ranks: Any) -> None:
    assert ranks(4, parametrizations_under, FOUR, HOWS) == [[]] * 4
