"""Pipelines against the same model on one process, in float64."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import espalier
from tests.ranks.test_engine import SIZES, batch, model

TOLERANCE = 1e-10
Trial = tuple[dict[str, Any], str, dict[str, Any]]


def dry(plan: dict[str, Any], kind: str, changes: dict[str, Any], rows: int, coordinate: Any) -> Any:
    with torch.device("meta"):
        twin = espalier.models.build(kind, {**SIZES[kind], **changes}).double()
    data = {k: torch.empty_like(v, device="meta") for k, v in batch(rows).items()}
    optimizer = torch.optim.AdamW(twin.parameters())
    given: dict[str, Any] = {"optimizer": optimizer, "max_grad_norm": 0.5, "coordinate": coordinate}
    return espalier.dry_run(twin, plan, data, **given)


def trains(rank: int, world: int, trials: list[Trial]) -> None:
    """The same losses, gradients, norms and parameters as one process, and the ledger a dry run foretells."""
    for plan, kind, changes in trials:
        net = model(kind, **changes)
        plain = copy.deepcopy(net)
        ours, theirs = (torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (net, plain))
        engine = espalier.initialize(net, ours, plan, max_grad_norm=0.5)
        for step in range(2):
            data = batch(9, step)
            expected = plain(**data).loss
            expected.backward()
            engine.accumulate(engine.cut(data))
            engine.finish_gradients()
            assert abs(engine.loss.item() - expected.item()) < TOLERANCE, (plan, kind, step)
            found = engine.full_gradients()
            for name, q in plain.named_parameters():
                assert (found[name] - q.grad).abs().max() < TOLERANCE, (plan, kind, step, name)
            norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
            theirs.step()
            theirs.zero_grad()
            assert engine.step()
            assert abs(engine.grad_norm.item() - norm.item()) < TOLERANCE, (plan, kind, step)
        data = batch(9, 7)
        expected = plain(**data).loss
        expected.backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        theirs.step()
        with espalier.ledger(engine.mesh) as book:
            assert abs(engine.train_step(data).item() - expected.item()) < TOLERANCE
        state = engine.full_state_dict()
        for name, value in plain.state_dict().items():
            assert (state[name] - value).abs().max() < TOLERANCE, (plan, kind, name)
        with torch.no_grad():
            parts = [batch(5, 8), batch(3, 9)]
            whole = {k: torch.cat([part[k] for part in parts]) for k in data}
            assert abs(engine.evaluate(parts).item() - plain(**whole).loss.item()) < TOLERANCE
            assert abs(engine(parts[0]).item() - plain(**parts[0]).loss.item()) < TOLERANCE
        foretold = dry(plan, kind, changes, 9, engine.mesh.coordinate)
        assert book.entries == foretold.ledger.entries, (plan, kind)


FOUR = {"layers": 4}
TIED = {"layers": 4, "tied": True}


@pytest.mark.parametrize(
    ("world", "trials"),
    [
        (2, [({"pipe": 2, "accumulate": 4}, "gpt", {}), ({"pipe": 2, "accumulate": 3}, "gpt2", TIED)]),
        (
            4,
            [
                ({"pipe": 2, "data": 2, "accumulate": 4, "schedule": "gpipe"}, "gpt", {}),
                ({"pipe": 2, "data": 2, "accumulate": 4, "schedule": "naive", "zero": 1}, "gpt2", TIED),
            ],
        ),
    ],
    ids=["2", "4"],
)
def test_equals_one_process(ranks: Any, world: int, trials: list[Trial]) -> None:
    ranks(world, trains, trials)
