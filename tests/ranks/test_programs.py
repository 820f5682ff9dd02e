"""Programs drawn by lot, under plans drawn by lot, against one process in float64.

Each seed draws a model of the bricks in ``tests/zoo/drawn.py``, or of many more (``drawn_widely.py``), and a
plan, and trains three steps: losses, gradient norms, parameters and buffers are those of one process, or the
plan is refused with words that say what to do. ``ESPALIER_SWEEP=300`` in the environment draws 300 more.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import espalier
from tests.asked import ASKED
from tests.pool import RankError
from tests.zoo import drawn, drawn_widely
from tests.zoo.cases import case
from tests.zoo.train import TrialError, Verdict, reference, trial

FOUND = (1005, 1039, 1046, 2013, 2027, 4191, 31595)  # ended otherwise once
FOUND_WIDELY = (204, 416, 644)
PLANS = {"drawn": drawn.plan, "wide": drawn_widely.plan}
SEEDS = [("drawn", seed) for seed in (*range(8), *FOUND, *range(2000, 2000 + ASKED))]
SEEDS += [("wide", seed) for seed in (*range(4), *FOUND_WIDELY, *range(2000, 2000 + ASKED))]


def ended(ranks: Any, n: int, function: Any, *args: Any) -> Verdict:
    """How it ended on all ranks: a refusal by one is one by all."""
    try:
        found = ranks(n, function, *args, timeout=240.0)
    except RankError as error:
        if not isinstance(error.original, TrialError):
            raise
        return error.original.verdict
    return next((v for v in found if v is not None and v.end != "exact"), Verdict("exact"))


@pytest.mark.world(4)
@pytest.mark.parametrize(("group", "seed"), SEEDS)
def test_a_drawn_program(ranks: Any, group: str, seed: int, tmp_path: Path) -> None:
    name, plan, file = f"{group}/{seed}", PLANS[group](seed), tmp_path / "one-process"
    alone = ended(ranks, 1, reference, name, plan.get("accumulate", 1), file)
    if alone.end == "unfit" and group == "wide" and seed >= 2000:
        pytest.skip(str(alone))
    assert alone.end == "exact", alone
    found = ended(ranks, espalier.Plan(**plan).world_size, trial, name, plan, file)
    said = f"{case(name).build().names} under {plan}: {found}"
    assert found.end in ("exact", "refused"), said
    if found.end == "refused":
        assert found.says_what_to_do, said
        pytest.skip(said)
