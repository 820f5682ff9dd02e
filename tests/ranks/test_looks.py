"""What looks at a model beforehand leaves no traces in it, and reads no parametrization: in float64."""

from __future__ import annotations

import copy
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


def compared(make: Callable[[], nn.Module], plan: dict[str, Any], facts: Callable[..., Any] = len) -> None:
    """Two steps of a plan against one process, which does as many micro-batches."""
    found, wanted = trained(make, plan, facts), trained(make, None, facts, plan.get("accumulate", 1))
    for step, ((loss, state, seen), (loss_, state_, seen_)) in enumerate(zip(found, wanted, strict=True)):
        gaps = {name: (state[name] - x).abs().max().item() for name, x in state_.items()}
        gap = max(gaps.values())
        assert abs(loss - loss_) < TOLERANCE, (step, loss, loss_)
        assert gap < TOLERANCE, (step, gaps)
        assert seen == seen_, (step, seen, seen_)


def trained(
    make: Callable[[], nn.Module],
    plan: dict[str, Any] | None,
    facts: Callable[..., Any],
    micro_batches: int = 1,
) -> list[tuple[float, dict[str, torch.Tensor], Any]]:
    """Of each step: the loss, the state after it, and what the model remembers."""
    forget()
    torch.manual_seed(0)
    net = make().double()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    engine = None if plan is None else espalier.initialize(net, optimizer, plan, max_grad_norm=1.0)
    found = []
    for step in range(2):
        ids = torch.randint(0, 16, (8, 6), generator=torch.Generator().manual_seed(step))
        seeded(step)
        if engine is not None:
            loss = float(engine.train_step(ids))
            state = engine.full_state_dict()
        else:
            loss = 0.0
            for part in ids.chunk(micro_batches):
                one = net(part) / micro_batches
                one.backward()
                loss += float(one.detach())
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            state = net.state_dict()
        state = {name: x.clone() for name, x in state.items()}
        found.append((loss, state, facts(list(net.modules()))))
    return found


def seeded(step: int) -> None:
    torch.manual_seed(step)
    random.seed(step)
    np.random.seed(step)  # noqa: NPY002


CALLS: list[int] = []
COUNT = 0
TABLE = {"sum": torch.zeros(3)}


class Stateful(nn.Module):
    """Remembers its calls in all ways, and what it computes hangs on how many there were."""

    total = 0

    def __init__(self, width: int, shares: bool, draws: bool) -> None:
        super().__init__()
        self.shares, self.draws = shares, draws
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.norm = nn.LayerNorm(width)
        self.teacher = nn.Linear(width, width).requires_grad_(False)
        self.aside = [nn.Linear(width, width).double()]  # no submodule
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(()))
        self.calls, self.log, self.state = 0, [], {"n": 0}
        self.last: Any = None
        self.generator = torch.Generator().manual_seed(3)
        closed = [0]

        def bump(x: torch.Tensor) -> torch.Tensor:
            closed[0] += 1
            return x * (1 + 0.01 * closed[0])

        self.bump, self.closed = bump, closed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        global COUNT
        factor = 1.0
        if self.shares:
            COUNT += 1
            Stateful.total += 1
            CALLS.append(COUNT)
            TABLE["sum"].add_(1)
            factor += 0.01 * (COUNT + Stateful.total + len(CALLS) + float(TABLE["sum"][0]))
            x = self.bump(x)
        if self.draws:
            factor += random.random() + np.random.rand()  # noqa: NPY002
        self.calls += 1
        self.log.append(self.calls)
        self.state["n"] += 1
        factor += 0.01 * (self.calls + len(self.log) + self.state["n"])
        factor += float(torch.rand((), generator=self.generator, dtype=torch.float64))
        with torch.no_grad():
            self.teacher.weight.mul_(0.9).add_(0.1)
            self.teacher.bias.add_(0.5)
            self.aside[0].weight.mul_(0.5)
            self.seen.add_(1)
            self.mean = self.mean * 0.5 + self.seen
            target = self.teacher(x)
        h = self.down(F.gelu(self.up(self.norm(x))))
        self.last = h + 0.1 * target * self.mean
        return x + self.last * factor


class Remembering(nn.Module):
    def __init__(self, shares: bool, draws: bool, width: int = 8) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(16, width), nn.Linear(width, 16)
        self.blocks = nn.ModuleList([Stateful(width, shares, draws) for _ in range(2)])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def forget() -> None:
    global COUNT
    COUNT = Stateful.total = 0
    CALLS.clear()
    TABLE["sum"].zero_()


def remembered(modules: list[nn.Module]) -> Any:
    """What Python remembers of calls, of the blocks that were called here."""
    of = [m for m in modules if isinstance(m, Stateful)]
    inner = [(m.calls, m.log, m.state, m.closed, float(m.aside[0].weight.detach().sum())) for m in of]
    return copy.deepcopy((COUNT, Stateful.total, CALLS, float(TABLE["sum"][0]), inner))


def stateful_under(rank: int, world: int, names: list[str]) -> list[str]:
    wrong = []
    for name in names:
        # what a block is computed again for, and stages of other processes, share no globals with it
        shares, draws = name not in ("pipe", "recompute"), name != "pipe"
        try:
            make = partial(Remembering, shares, draws)
            compared(make, PLANS[name], len if name == "pipe" else remembered)
        except Exception as error:
            wrong.append(f"{name}: {type(error).__name__}: {error}")
    return wrong


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


@pytest.mark.world(2)
def test_forward_runs_as_often_as_it_is_called(ranks: Any) -> None:
    assert ranks(2, stateful_under, TWO) == [[], []]


@pytest.mark.world(4)
def test_forward_runs_as_often_on_four_ranks(ranks: Any) -> None:
    assert ranks(4, stateful_under, FOUR) == [[]] * 4
