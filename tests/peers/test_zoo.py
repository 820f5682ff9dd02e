"""Real models train unchanged, equal to one process in float64.

Well-known ones on data 2 × tensor 2, under the layouts that the engine infers, and in a plain loop under
layouts drawn at random for every parameter on both axes: those no one would choose, and the results must be
the same. And a sample of what ``benchmarks/zoo.py`` tries: models and plans drawn by a seed
(``ESPALIER_SEED``; with ``ESPALIER_SWEEP=n`` n of them).
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch

import espalier
from tests.asked import ASKED
from tests.pool import RankError
from tests.zoo.cases import GROUPS, case, names
from tests.zoo.named import MODELS
from tests.zoo.plans import PLANS, applies, world
from tests.zoo.train import TrialError, Verdict, compared, reference, trial

PRELOAD = ["tests.zoo", "transformers.modeling_utils"]
SEED = int(os.environ.get("ESPALIER_SEED", "0"))
SAMPLE = max(ASKED, 6)


@pytest.mark.world(4)
@pytest.mark.parametrize("plan", [{"data": 2, "tensor": 2}, None], ids=["engine", "drawn"])
@pytest.mark.parametrize("name", MODELS)
def test_equals_one_process(ranks: Any, name: str, plan: dict[str, Any] | None) -> None:
    for wrong, _ in ranks(4, compared, f"named/{name}", plan, timeout=300):
        assert not wrong


@pytest.mark.world(4)
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "vit", "t5"])
def test_on_a_grid(ranks: Any, name: str) -> None:
    plan = {"tensor": 4, "tensor_mode": "2d"}
    for wrong, gathered in ranks(4, compared, f"named/{name}", plan, timeout=300):
        assert not wrong and not gathered


@pytest.mark.world(8)
@pytest.mark.parametrize("plan", [{"tensor_mode": "2.5d", "depth": 2}, {"tensor_mode": "3d"}], ids=str)
def test_on_a_stack_and_a_cube(ranks: Any, plan: dict[str, Any]) -> None:
    if "depth" in plan and not ASKED:
        pytest.skip("ESPALIER_SWEEP=1 runs it")
    for wrong, _ in ranks(8, compared, "named/t5", {"tensor": 8, **plan}, timeout=300):
        assert not wrong


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


def called(ranks: Any, n: int, function: Any, *args: Any) -> Verdict:
    """How a call on ranks ended."""
    try:
        found = ranks(n, function, *args, timeout=300)
    except RankError as error:
        if not isinstance(error.original, TrialError):
            raise
        return error.original.verdict
    return next((v for v in found if v is not None and v.end != "exact"), Verdict("exact"))


@pytest.mark.world(4)
def test_a_sample_of_the_zoo(ranks: Any, tmp_path: Path) -> None:
    """None is wrong, none fails, and refusals say what to do."""
    models, varied = [name for group in GROUPS for name in names(group)], names("varied")
    lot, tried, bad = random.Random(SEED), 0, []
    while tried < SAMPLE:
        name = lot.choice(varied if tried % 3 == 2 and varied else models)
        plan = lot.choice([plan for plan in PLANS if applies(plan, case(name))])
        file = tmp_path / f"{tried}.pt"
        alone = called(ranks, 1, reference, name, PLANS[plan].get("accumulate", 1), file)
        if alone.end == "unfit":
            continue
        found = called(ranks, world(plan), trial, name, PLANS[plan], file)
        tried += 1
        if found.end != "exact" and not (found.end == "refused" and found.says_what_to_do):
            bad.append(f"{name} under {plan} (ESPALIER_SEED={SEED}): {found}")
    assert not bad, "\n".join(bad)
