"""Checkpoints: what any plan saved, every other loads, exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

import espalier
from espalier.checkpoint import newest
from tests.ranks.test_engine import batch, model

ROWS = 8


def engine_of(plan: dict[str, Any]) -> espalier.Engine:
    net = model("gpt", tied=True)
    matrices = [p for p in net.parameters() if p.ndim > 1]
    vectors = [p for p in net.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW([{"params": matrices, "lr": 1e-2}, {"params": vectors, "lr": 3e-3}])
    engine = espalier.initialize(net, optimizer, {**plan, "chunk_megabytes": 0.02})
    engine.lay_out(batch(ROWS))
    return engine


def copies(engine: espalier.Engine) -> dict[str, torch.Tensor]:
    """Model and states, whole."""
    found = {name: x.clone() for name, x in engine.full_state_dict().items()}
    assert engine.optimizer is not None
    for name, p in engine.module.named_parameters():
        for key, x in engine.optimizer.state[p].items():
            found[f"{name} {key}"] = espalier.full_tensor(x).clone()
    return found


def save_all(rank: int, world: int, plans: list[dict[str, Any]], folder: Path) -> None:
    for i, plan in enumerate(plans):
        engine = engine_of(plan)
        for step in range(2):
            engine.train_step(batch(ROWS, step))
        here = folder / f"{world}-{i}"
        saved = engine.save(here / "checkpoints", note=("a", {"b": 1.5}))
        assert newest(here / "checkpoints") == saved
        wanted = copies(engine)
        losses = [engine.train_step(batch(ROWS, step)).item() for step in range(2, 4)]
        if rank == 0:
            torch.save({"state": wanted, "losses": losses}, here / "wanted.pt")


def load_all(rank: int, world: int, plans: list[dict[str, Any]], folder: Path) -> None:
    for i, plan in enumerate(plans):
        engine = engine_of(plan)
        for here in sorted(folder.iterdir()):
            wanted = torch.load(here / "wanted.pt")
            assert engine.load(here / "checkpoints") == {"note": ("a", {"b": 1.5})}
            assert engine.steps == 2
            found = copies(engine)
            assert found.keys() == wanted["state"].keys()
            for name, x in found.items():
                assert torch.equal(x, wanted["state"][name]), (plan, here.name, name)
            losses = [engine.train_step(batch(ROWS, step)).item() for step in range(2, 4)]
            assert max(abs(a - b) for a, b in zip(losses, wanted["losses"], strict=True)) < 1e-9
            assert here.name != f"{world}-{i}" or losses == wanted["losses"]


PLANS: dict[int, list[dict[str, Any]]] = {
    1: [{}],
    2: [{"data": 2, "zero": 3}, {"tensor": 2}],
    4: [{"data": 2, "tensor": 2, "zero": 1}, {"data": 4, "zero": 2}],
}


def test_every_plan_loads_what_others_saved(ranks: Any, tmp_path: Path) -> None:
    for world, plans in PLANS.items():
        ranks(world, save_all, plans, tmp_path)
    for world, plans in PLANS.items():
        ranks(world, load_all, plans, tmp_path)


def refuses(rank: int, world: int, folder: Path) -> None:
    engine = engine_of({"data": 2})
    saved = engine.save(folder)
    other = model("gpt", tied=True, hidden=32)
    other.extra = nn.Linear(2, 3)
    found = espalier.initialize(other, torch.optim.SGD(other.parameters(), lr=0.1), {"data": 2})
    before = {name: x.clone() for name, x in found.full_state_dict().items()}
    try:
        found.load(saved)
    except ValueError as error:
        told = str(error)
    for words in ("missing from it: extra.weight [3, 2]", "[37, 24] in it, [37, 32]", "AdamW, not SGD"):
        assert words in told, told
    assert all(torch.equal(x, before[name]) for name, x in found.full_state_dict().items())


def test_another_model_is_told_all_that_differs(ranks: Any, tmp_path: Path) -> None:
    ranks(2, refuses, tmp_path)
