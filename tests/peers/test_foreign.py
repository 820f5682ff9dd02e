"""Weights in the formats of others: read and written under plans, exactly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import espalier
from tests.peers.test_transformers import small

PLANS: dict[str, dict[str, Any]] = {
    "tensor": {"data": 2, "tensor": 2},
    "zero3": {"data": 4, "zero": 3},
    "masters": {"data": 2, "tensor": 2, "zero": 1, "precision": "bfloat16"},
    "host": {
        "data": 4,
        "zero": 3,
        "offload": {"parameters": "host", "states": "host"},
        "precision": "bfloat16",
    },
    "2d": {"tensor": 4, "tensor_mode": "2d"},
}


def built(name: str, seed: int) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(seed)
    model, batch = small(name)
    return model, {key: x.repeat(4, *(1,) * (x.ndim - 1)) for key, x in batch.items()}


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, x in found.items():
        assert x.dtype is expected[name].dtype and torch.equal(x, expected[name]), name


def loaded(rank: int, world: int, name: str, paths: list[str], out: str) -> None:
    """Under each plan train another model, load the weights into it, and export them again."""
    expected = built(name, seed=9)[0].state_dict()
    for i, (word, plan) in enumerate(PLANS.items()):
        model, batch = built(name, seed=5)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        engine = espalier.initialize(model, optimizer, plan, example=batch)
        if i:
            engine.train_step(batch)
        engine.load_weights(paths[i % len(paths)])
        same(engine.full_state_dict(), expected)
        engine.export(f"{out}/{word}", shard_gigabytes=1e-4)
        engine.export(f"{out}/{word}.pt", "torch")


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_hugging_face_and_torch_files_under_plans(ranks: Any, tmp_path: Path, name: str) -> None:
    pytest.importorskip("transformers")
    plain, batch = built(name, seed=9)
    plain.save_pretrained(tmp_path / "theirs", max_shard_size="60KB")
    torch.save({"model": plain.state_dict(), "epoch": 3}, tmp_path / "theirs.pt")
    index = "model.safetensors.index.json"
    theirs = json.loads((tmp_path / "theirs" / index).read_text())["weight_map"]
    ranks(4, loaded, name, [str(tmp_path / "theirs"), str(tmp_path / "theirs.pt")], str(tmp_path))

    logits = plain.eval()(**batch).logits
    for word in PLANS:
        same(torch.load(tmp_path / f"{word}.pt", weights_only=True), dict(plain.state_dict()))
        ours = json.loads((tmp_path / word / index).read_text())["weight_map"]
        assert ours.keys() == theirs.keys(), "tied weights as theirs"
        assert len(set(ours.values())) > 1, "several files"
        again = type(plain).from_pretrained(tmp_path / word)
        assert torch.equal(again(**batch).logits, logits)
    assert not [x.name for x in tmp_path.rglob("*.partial")]
