"""Real models train unchanged on data 2 × tensor 2, equal to one process in float64.

Under the layouts that the engine infers, and in a plain loop under layouts drawn at random for
every parameter on both axes: those no one would choose, and the results must be the same.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

import espalier
from tests.peers.zoo import MODELS, compared

PRELOAD = ["transformers.modeling_utils"]
TOLERANCE = 1e-9


@pytest.mark.world(4)
@pytest.mark.parametrize("drawn", [False, True], ids=["engine", "drawn"])
@pytest.mark.parametrize("name", MODELS)
def test_equals_one_process(ranks: Any, name: str, drawn: bool) -> None:
    for worst, _ in ranks(4, compared, name, drawn, timeout=300):
        assert max(worst.values()) < TOLERANCE, worst


@pytest.mark.world(4)
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "vit", "t5"])
def test_on_a_grid(ranks: Any, name: str) -> None:
    for worst, gathered in ranks(4, compared, name, False, {"tensor": 4, "tensor_mode": "2d"}, timeout=300):
        assert max(worst.values()) < TOLERANCE, worst
        assert not gathered


@pytest.mark.world(8)
@pytest.mark.parametrize("plan", [{"tensor_mode": "2.5d", "depth": 2}, {"tensor_mode": "3d"}], ids=str)
def test_on_a_stack_and_a_cube(ranks: Any, plan: dict[str, Any]) -> None:
    if "depth" in plan and not os.environ.get("ESPALIER_SWEEP"):
        pytest.skip("ESPALIER_SWEEP=1 runs it")
    for worst, _ in ranks(8, compared, "t5", False, {"tensor": 8, **plan}, timeout=300):
        assert max(worst.values()) < TOLERANCE, worst


def test_rows_are_told_from_features_on_a_grid() -> None:
    """The grid's rows share the batch, and cut features of layers too: addends of these are of one row."""
    build, draw = MODELS["t5"]
    given = draw(torch.Generator())
    batch = {key: given[key][:3].to("meta") for key in ("input_ids", "labels")}
    with torch.device("meta"):
        net = build()
    plan = espalier.Plan(tensor=4, tensor_mode="2d")
    engine = espalier.initialize(net, None, plan, mesh=espalier.Mesh.dry(plan.axes), example=batch)
    assert engine.evaluate([batch]).shape == ()
