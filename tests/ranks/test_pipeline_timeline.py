"""The measured timeline of a real run, and what is predicted of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import espalier
from espalier.parallel.pipeline import Action, ActionKind
from espalier.train.job import Job
from espalier.train.trainer import train
from espalier.train.verify import verify
from tests.ranks.test_engine import batch, model
from tests.ranks.test_resume import job


def timelines(rank: int, world: int, plan: dict[str, Any]) -> None:
    """All actions of all ranks are there, in an order in which they can have happened."""
    net = model("gpt", layers=4)
    engine = espalier.initialize(net, torch.optim.AdamW(net.parameters()), plan)
    with pytest.raises(ValueError, match="train_step"):
        engine.timeline()
    for step in range(2):
        engine.train_step(batch(8, step))
    engine.evaluate([batch(8, 2)])  # is no step
    timeline = engine.timeline()
    schedule = timeline.schedule
    starts, ends = {}, {}
    for done, row in zip(timeline.spans, schedule.actions, strict=True):
        assert [span.action for span in done] == [action for action in row if action.kind.computes]
        moment = 0.0
        for action, start, end in done:
            assert moment <= start < end
            moment = end
            starts[action], ends[action] = start, end
    # ranks of one machine have one clock: a stage does not begin before what it needs has been done
    for done in timeline.spans:
        for (kind, stage, micro), start, _ in done:
            if kind is ActionKind.F and stage:
                assert ends[Action(ActionKind.F, stage - 1, micro)] <= start
            if kind is ActionKind.I and stage + 1 < schedule.stages:
                assert ends[Action(kind, stage + 1, micro)] <= start
            if (
                kind is ActionKind.B and stage + 1 < schedule.stages
            ):  # inputs' gradients are sent before its end
                assert starts[Action(kind, stage + 1, micro)] < start
    assert min(row[0].start for row in timeline.spans) == 0
    assert timeline.step_time == max(ends.values())
    predicted = timeline.predicted()
    assert predicted.schedule is schedule
    # the same work; with every action as long as its stage's mean and nothing lost to messages
    assert sum(predicted.busy) == pytest.approx(sum(timeline.busy))
    assert 0 < timeline.bubble_fraction < 1


@pytest.mark.parametrize(
    ("world", "plan"),
    [
        (2, {"pipe": 2, "accumulate": 4}),
        (4, {"pipe": 2, "data": 2, "accumulate": 4, "schedule": "zbv", "stages_per_rank": 2}),
    ],
    ids=["1f1b", "zbv"],
)
def test_a_real_run_is_measured(ranks: Any, world: int, plan: dict[str, Any]) -> None:
    ranks(world, timelines, plan)


def trained(rank: int, world: int, folder: Path) -> None:
    """`espalier train`'s own, with a pipeline."""
    found = train(job(folder, {"pipe": 2, "accumulate": 4}))
    if rank == 0:
        assert found is not None and found.bubble is not None
        measured, predicted = found.bubble
        assert 0 < measured < 1 and 0 < predicted < 1
        drawn = Path(found.files["timeline"]).read_text("utf-8")
        assert drawn.count("<svg") == 1 and len(drawn) > 20_000
    else:
        assert found is None


def test_the_trainer_draws_it(ranks: Any, tmp_path: Path) -> None:
    ranks(2, trained, tmp_path)


def verified(rank: int, world: int, schedule: str, each: int) -> Any:
    """`espalier verify`'s own, with a pipeline and rows that cannot be parted evenly."""
    plan = {"pipe": 2, "data": 1, "tensor": 1, "accumulate": 4}
    changes = [f"plan.{axis}={size}" for axis, size in plan.items()]
    changes += [f"plan.schedule={schedule}", f"plan.stages_per_rank={each}", "model.layers=4"]
    found = verify(Job.load("gpt", changes))
    return None if found is None else (found.passed, found.worst)


@pytest.mark.parametrize(("schedule", "each"), [("1f1b", 1), ("zbv", 2)])
def test_plans_with_a_pipeline_are_verified(ranks: Any, schedule: str, each: int) -> None:
    passed, worst = ranks(2, verified, schedule, each)[0]
    assert passed and worst < 1e-9
