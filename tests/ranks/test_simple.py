"""The simple versions that stand before the fast ones give what these give, and what one process gives."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import espalier
from espalier.mesh import Mesh
from espalier.parallel.data import SimpleZeRO
from espalier.parallel.pipeline import gpipe

STEPS = 3


def model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3), nn.Tanh(), nn.Linear(3, 3), nn.Linear(3, 2)]
    return nn.Sequential(*layers).double()


def data(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A global batch of 8 rows."""
    given = torch.Generator().manual_seed(step)
    return tuple(torch.randn(8, n, dtype=torch.float64, generator=given) for n in (5, 2))  # type: ignore[return-value]


def loss_of(net: nn.Module, rows: Any) -> torch.Tensor:
    return mse_loss(net(rows[0]), rows[1])


def one_process() -> tuple[nn.Module, list[float]]:
    net = model()
    optimizer, losses = torch.optim.AdamW(net.parameters(), lr=0.1), []
    for step in range(STEPS):
        loss = loss_of(net, data(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return net, losses


def simple_zero(rank: int, world: int) -> None:
    mesh = Mesh.from_env({"data": world})
    plain, expected = one_process()
    for stage in range(4):
        net, fast = model(), model()
        simple = SimpleZeRO(net, partial(torch.optim.AdamW, lr=0.1), mesh, stage)
        plan = {"data": world, "zero": stage, "accumulate": 2}
        optimizer = torch.optim.AdamW(fast.parameters(), lr=0.1)
        engine = espalier.initialize(fast, optimizer, plan, mesh=mesh, loss_fn=mse_loss)
        for step in range(STEPS):
            own = [x.chunk(world)[rank].chunk(2) for x in data(step)]
            loss = simple.train_step(list(zip(*own, strict=True)), loss_of)
            assert loss == pytest.approx(expected[step], abs=1e-12)
            assert loss == pytest.approx(engine.train_step(data(step)).item(), abs=1e-12)
        held = sum(p.numel() for p in net.parameters())
        assert held == (0 if stage == 3 else sum(p.numel() for p in plain.parameters()))
        simple._gather() if stage == 3 else None
        for ours, theirs in zip(net.parameters(), plain.parameters(), strict=True):
            assert torch.allclose(ours, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("world", [2, 4])
def test_simple_zero(ranks: Any, world: int) -> None:
    ranks(world, simple_zero)


def simple_pipeline(rank: int, world: int) -> None:
    mesh = Mesh.from_env({"pipe": world})
    plain, expected = one_process()
    cuts = [0, 2, 6] if world == 2 else [0, 2, 4, 5, 6]
    stage = model()[cuts[rank] : cuts[rank + 1]]
    widths = {2: 7, 4: 3, 5: 3}
    optimizer = torch.optim.AdamW(stage.parameters(), lr=0.1)
    for step in range(STEPS):
        parts = list(zip(*(x.chunk(4) for x in data(step)), strict=True))
        like = (2, widths.get(cuts[rank], 5)), torch.float64
        loss = gpipe(stage, parts, mse_loss, mesh, lambda i, like=like: like)
        optimizer.step()
        optimizer.zero_grad()
        assert loss == pytest.approx(expected[step] if rank == world - 1 else 0.0, abs=1e-12)
    theirs = plain[cuts[rank] : cuts[rank + 1]]  # type: ignore[index]
    for own, one in zip(stage.parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(own, one, rtol=0, atol=1e-12)


@pytest.mark.parametrize("world", [2, 4])
def test_simple_pipeline(ranks: Any, world: int) -> None:
    ranks(world, simple_pipeline)
