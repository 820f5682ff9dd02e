"""Weights in the formats of others: read and written under plans, exactly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import espalier
from espalier.models import build
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
CHOSEN = {"gpt2": list(PLANS), "llama": ["zero3", "2d"]}


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
    for i, word in enumerate(CHOSEN[name]):
        plan = PLANS[word]
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
    for word in CHOSEN[name]:
        same(torch.load(tmp_path / f"{word}.pt", weights_only=True), dict(plain.state_dict()))
        ours = json.loads((tmp_path / word / index).read_text())["weight_map"]
        assert ours.keys() == theirs.keys(), "tied weights as theirs"
        assert len(set(ours.values())) > 1, "several files"
        again = type(plain).from_pretrained(tmp_path / word)
        assert torch.equal(again(**batch).logits, logits)
    assert not [x.name for x in tmp_path.rglob("*.partial")]


def net(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3)).double()


def step_of(model: Any, optimizer: torch.optim.Optimizer) -> None:
    model(torch.arange(24.0, dtype=torch.float64).view(4, 6) / 24).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def whole_states(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Weights and states, whole and plain, whatever they are made of."""
    found = dict(model.state_dict())
    for name, p in model.named_parameters():
        found |= {f"{name}.{key}": x for key, x in optimizer.state[p].items()}
    return {
        n: (x.full_tensor() if hasattr(x, "full_tensor") else x).detach().clone() for n, x in found.items()
    }


def sharded(rank: int, world: int, folder: str) -> None:
    """FSDP2 to Espalier, and back, by torch's own distributed checkpoint."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.fsdp import fully_shard

    def theirs(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = net(seed)
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=torch.distributed.init_device_mesh("cpu", (world,)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1 * seed)
        step_of(model, optimizer)
        return model, optimizer

    model, optimizer = theirs(1)
    saved = dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))
    dcp.save(saved, checkpoint_id=f"{folder}/theirs")
    expected = whole_states(model, optimizer)
    if rank == 0:
        torch.save({name: expected[name] for name in model.state_dict()}, f"{folder}/whole.pt")
    for i, plan in enumerate(({"data": 2, "zero": 3}, {"tensor": 2}, {"data": 2, "zero": 1})):
        own = net(2)
        ours = torch.optim.AdamW(own.parameters(), lr=1.0)
        engine = espalier.initialize(own, ours, plan, loss_fn=lambda y, _: y.square().mean(), example=BATCH)
        engine.load_weights(f"{folder}/theirs", optimizer=True)
        same(whole_states(own, ours), expected)
        assert ours.param_groups[0]["lr"] == 1e-3 and ours.param_groups[0]["weight_decay"] == 0.1

        again, other = theirs(3)
        parts = dict(zip(("model", "optimizer"), get_state_dict(again, other), strict=True))
        if i == 0:
            kept = engine.save(f"{folder}/ours")
            if rank == 0:
                espalier.checkpoint.export(kept, f"{folder}/exported0", "dcp")
            torch.distributed.barrier()
            dcp.load(parts, checkpoint_id=f"{folder}/exported0")
            set_state_dict(again, other, model_state_dict=parts["model"], optim_state_dict=parts["optimizer"])
            same(whole_states(again, other), expected)
            assert other.param_groups[0]["weight_decay"] == 0.1
        else:
            engine.export(f"{folder}/exported{i}", "dcp")
        dcp.load({"model": parts["model"]}, checkpoint_id=f"{folder}/exported{i}")
        again.load_state_dict(parts["model"])
        full = {name: x.full_tensor() for name, x in again.state_dict().items()}
        same(full, {name: expected[name] for name in full})


BATCH = torch.arange(24.0, dtype=torch.float64).view(4, 6) / 24


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_fsdp2_and_back(ranks: Any, tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    ranks(2, sharded, str(tmp_path))
    expected = torch.load(tmp_path / "whole.pt")
    for folder in (*(tmp_path / "ours").iterdir(), *tmp_path.glob("exported*")):
        state = {"model": net(5).state_dict()}
        dcp.load(state, checkpoint_id=folder, no_dist=True)
        same(state["model"], expected)


SIZES = {"vocab_size": 37, "hidden": 24, "heads": 4, "layers": 2, "max_positions": 16}  # the head is tied
APART: list[dict[str, Any]] = [
    {"pipe": 2, "accumulate": 2, "data": 2, "zero": 1, "precision": "bfloat16"},
    {"pipe": 2, "accumulate": 2, "tensor": 2},
    {"branch": 2, "data": 2},
]


def apart(rank: int, world: int, folder: str) -> None:
    """Weights to and from stages and branches, which other ranks don't hold."""
    torch.manual_seed(2)
    expected = build("gpt2", SIZES).state_dict()
    if rank == 0:
        torch.save(expected, f"{folder}/plain.pt")
    ids = torch.arange(48).view(4, 12) % 37
    for i, plan in enumerate(APART):
        torch.manual_seed(3)
        net = build("gpt2", SIZES)
        branches = {"blocks.*.attention": 0, "blocks.*.mlp": 1} if "branch" in plan else None
        optimizer = torch.optim.AdamW(net.parameters())
        batch = {"input_ids": ids, "labels": ids}
        engine = espalier.initialize(net, optimizer, plan, example=batch, branches=branches)
        engine.train_step(batch)
        engine.load_weights(f"{folder}/plain.pt")
        same(engine.full_state_dict(), expected)
        engine.export(f"{folder}/{i}.pt", "torch")
        same(torch.load(f"{folder}/{i}.pt", weights_only=True), expected)


def test_stages_and_branches(ranks: Any, tmp_path: Path) -> None:
    ranks(4, apart, str(tmp_path))
