"""What ranks ask of NCCL can be carried out, in the order in which they ask for it."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch

import espalier
from espalier.comm import nccl
from tests.ranks.nccl_order import Call, Program, Wait, as_on_nccl, stuck
from tests.ranks.test_engine import batch
from tests.ranks.test_pipeline import model


def trains(rank: int, world: int, plan: dict[str, Any], changes: dict[str, Any]) -> Program:
    with as_on_nccl() as program:
        net = model("gpt2", **changes)
        engine = espalier.initialize(net, torch.optim.SGD(net.parameters(), lr=0.1), plan, max_grad_norm=1.0)
        for step in range(2):
            engine.train_step(batch(8, step))
    return program


TIED = {"layers": 4, "tied": True}
PLANS: list[dict[str, Any]] = [
    {"pipe": 2, "schedule": "1f1b"},
    {"pipe": 2, "schedule": "zbv", "stages_per_rank": 2},
    {"pipe": 2, "schedule": "interleaved", "stages_per_rank": 2},
]


@pytest.mark.world(2)
@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_a_pipeline_with_tied_weights(ranks: Any, plan: dict[str, Any]) -> None:
    programs = ranks(2, trains, {**plan, "accumulate": 4}, TIED)
    assert any(isinstance(call, Call) for call in programs[0])
    assert stuck(programs) == []


@pytest.mark.world(4)
@pytest.mark.parametrize("plan", [{"pipe": 4}, {"pipe": 2, "data": 2, "zero": 3}], ids=str)
def test_of_four_ranks(ranks: Any, plan: dict[str, Any]) -> None:
    assert stuck(ranks(4, trains, {**plan, "accumulate": 4}, TIED)) == []


def in_one_queue(rank: int, world: int) -> Program:
    def one(self: nccl.Nccl, mesh: Any, axis: int, source: int, to: int, device: torch.device) -> Any:
        return mesh.backend(axis, device), mesh.order(axis) or range(mesh.shape[axis])

    with patch.object(nccl.Nccl, "lane", one):
        return trains(rank, world, {"pipe": 4, "accumulate": 4}, TIED)


@pytest.mark.world(4)
def test_receives_ahead_need_lanes(ranks: Any) -> None:
    """In the one queue of the axis' communicator what is to be sent stands behind what is awaited."""
    assert stuck(ranks(4, in_one_queue))


def test_two_that_send_before_they_receive_are_stuck() -> None:
    def program(other: int) -> Program:
        return [
            Call(0, "pipe", (0, 1), (("send", other),)),
            Call(1, "pipe", (0, 1), (("receive", other),)),
            Wait(1),
        ]

    assert len(stuck([program(1), program(0)])) == 4
    together: list[Program] = [
        [Call(0, "pipe", (0, 1), (("send", other), ("receive", other))), Wait(0)] for other in (1, 0)
    ]
    assert stuck(together) == []
