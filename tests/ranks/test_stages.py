"""ZeRO's stages and hybrid sharding against the same model on one process, in float64."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import espalier
from tests.ranks.test_engine import model, same_steps


def trains(rank: int, world: int, kind: str, plan: dict[str, Any], optimizer: str = "AdamW") -> None:
    net = model(kind, tied=kind == "gpt2")
    plain = copy.deepcopy(net)
    make = getattr(torch.optim, optimizer)
    groups = (
        [[p for p in m.parameters() if p.ndim > 1] for m in (net, plain)],
        [[p for p in m.parameters() if p.ndim <= 1] for m in (net, plain)],
    )
    ours, theirs = (
        make([{"params": groups[0][i], "lr": 1e-2}, {"params": groups[1][i], "lr": 3e-3}]) for i in (0, 1)
    )
    engine = espalier.initialize(net, ours, {**plan, "clip": 0.5})
    same_steps(engine, plain, theirs, 4)
    assert all(p.grad is None for p in net.parameters())


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("kind", ["gpt", "gpt2"])
@pytest.mark.parametrize(
    "plan", [{"data": 4}, {"data": 2, "tensor": 2}, {"replicate": 2, "data": 2}, {"data": 3}], ids=str
)
def test_stages_equal_one_process(ranks: Any, kind: str, plan: dict[str, int], zero: int) -> None:
    world = espalier.Plan.from_dict(plan).world_size
    ranks(world, trains, kind, {**plan, "zero": zero, "chunk_megabytes": 0.02})
