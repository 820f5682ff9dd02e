"""Weights in the formats of others: read and written under plans, exactly."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import espalier
from tests.peers.test_transformers import small

PLANS: dict[str, dict[str, Any]] = {
    "data": {"data": 2, "tensor": 2},
    "zero3": {"data": 4, "zero": 3},
    "zero1, masters": {"data": 2, "tensor": 2, "zero": 1, "precision": "bfloat16"},
    "zero3, masters": {"data": 2, "tensor": 2, "zero": 3, "precision": "bfloat16"},
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
    return small(name)


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name, x in a.items():
        assert x.dtype is b[name].dtype and torch.equal(x, b[name]), name


def train(engine: espalier.Engine, batch: dict[str, torch.Tensor]) -> None:
    engine.train_step({name: x.repeat(4, *(1,) * (x.ndim - 1)) for name, x in batch.items()})


def loaded(
    rank: int, world: int, name: str, plan: dict[str, Any], path: str, out: str, train_first: bool
) -> None:
    """Load what another model saved, train before if asked to, and export it again in both formats."""
    model, batch = built(name, seed=5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    folder = {**plan, "offload": plan["offload"]} if "offload" in plan else plan
    engine = espalier.initialize(
        model, optimizer, folder, example={k: x.repeat(4, *(1,) * (x.ndim - 1)) for k, x in batch.items()}
    )
    if train_first:
        train(engine, batch)
    engine.load_weights(path)
    engine.export(out, shard_gigabytes=1e-4)
    engine.export(f"{out}.pt", "torch")
    expected, _ = built(name, seed=9)
    same(engine.full_state_dict(), expected.state_dict())


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_hugging_face_and_torch_files_under_a_plan(ranks: Any, tmp_path: Path, name: str, plan: str) -> None:
    import transformers as hf
    from safetensors.torch import load_file

    plain, batch = built(name, seed=9)
    plain.save_pretrained(tmp_path / "theirs", max_shard_size="60KB")
    torch.save(plain.state_dict(), tmp_path / "theirs.pt")
    sharded = tmp_path / "theirs" / "model.safetensors.index.json"
    assert len(set(json.loads(sharded.read_text())["weight_map"].values())) > 1
    path = tmp_path / ("theirs" if name == "gpt2" else "theirs.pt")
    ranks(4, loaded, name, PLANS[plan], str(path), str(tmp_path / "ours"), plan != "data")

    same(torch.load(tmp_path / "ours.pt", weights_only=True), dict(plain.state_dict()))
    written = json.loads((tmp_path / "ours" / sharded.name).read_text())["weight_map"]
    assert written.keys() == json.loads(sharded.read_text())["weight_map"].keys(), "tied weights as theirs"
    assert len(set(written.values())) > 1
    again = type(plain).from_pretrained(tmp_path / "ours")
    assert type(again.config) is type(plain.config)
    assert torch.equal(again(**batch).logits, plain.eval()(**batch).logits)
    assert not [x.name for x in tmp_path.rglob("*.partial")]
