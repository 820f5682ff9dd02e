"""Training goes on across torch's FSDP (both of them), torch's distributed checkpoint, and engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import FullOptimStateDictConfig, FullStateDictConfig, StateDictType, fully_shard
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

import espalier

PLANS: list[dict[str, Any]] = [{"data": 2, "zero": 3}, {"tensor": 2}, {"data": 2, "zero": 1}]


def rows(number: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(number), dtype=torch.float64)


def loss_of(out: torch.Tensor, _: Any = None) -> torch.Tensor:
    return out.square().mean()


def net(kind: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer as ``kind`` has them: with two groups, but for flat parameters."""
    torch.manual_seed(seed)
    model: nn.Module = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3)).double()
    if kind.startswith("fsdp1"):
        given: dict[str, Any] = {"use_orig_params": kind == "fsdp1 named", "device_id": torch.device("cpu")}
        model[0] = FSDP(model[0], **given)
        model = FSDP(model, **given)
    elif kind == "fsdp2":
        for layer in (model[0], model):
            fully_shard(layer, mesh=torch.distributed.init_device_mesh("cpu", (2,)))
    groups = [{"params": list(model.parameters())}]
    if not kind.endswith("flat"):
        named = list(model.named_parameters())
        groups = [
            {"params": [p for name, p in named if name.endswith("weight")], "weight_decay": 0.3 / seed},
            {"params": [p for name, p in named if name.endswith("bias")], "lr": 0.05 * seed},
        ]
    return model, torch.optim.AdamW(groups, lr=0.02 * seed, weight_decay=0.1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, start: int, rank: int, world: int) -> None:
    """Three steps, of a rank's own rows."""
    for number in range(start, start + 3):
        loss_of(model(rows(number).chunk(world)[rank])).backward()
        optimizer.step()
        optimizer.zero_grad()


def whole(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Weights and states by name."""
    weights, states = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    found = dict(weights)
    for name, state in states["state"].items():
        found |= {f"{name}.{key}": x for key, x in state.items()}
    return {name: x.clone() for name, x in found.items()}


def near(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, x in found.items():
        torch.testing.assert_close(x, expected[name], rtol=1e-12, atol=1e-15)


def parts_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))


def written(
    kind: str, model: nn.Module, optimizer: torch.optim.Optimizer, folder: str, rank: int
) -> list[str]:
    """Saved in each way that torch has; gives the paths."""
    dcp.save(parts_of(model, optimizer), checkpoint_id=folder)
    if not kind.startswith("fsdp1"):
        return [folder]
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        parts = {"model": model.state_dict(), "optim": FSDP.optim_state_dict(model, optimizer)}
        dcp.save(parts, checkpoint_id=f"{folder} types")
    options = FullStateDictConfig(), FullOptimStateDictConfig(offload_to_cpu=False)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, *options):
        parts = {"model": model.state_dict(), "optim": FSDP.optim_state_dict(model, optimizer)}
        if rank == 0:
            torch.save(parts, f"{folder}.pt")
    torch.distributed.barrier()
    return [folder, f"{folder} types", f"{folder}.pt"]


def onward(rank: int, world: int, folder: str, kind: str) -> None:
    """Theirs trains on, and so does ours from what they saved; and theirs from what ours saved."""
    plain = "plain flat" if kind.endswith("flat") else "plain"
    theirs, adam = net(kind, seed=1)
    train(theirs, adam, 0, rank, world)
    paths = written(kind, theirs, adam, f"{folder}/saved", rank)
    train(theirs, adam, 3, rank, world)
    middle = whole(theirs, adam)
    train(theirs, adam, 6, rank, world)
    end = whole(theirs, adam)
    if rank == 0:
        espalier.checkpoint.export(paths[-1], f"{folder}/imported", "espalier", optimizer=True)
    torch.distributed.barrier()
    for i, path in enumerate((*paths, f"{folder}/imported")):
        model, optimizer = net(plain, seed=2)
        engine = espalier.initialize(model, optimizer, PLANS[i % 3], loss_fn=loss_of, example=rows(0))
        if path == f"{folder}/imported":
            engine.load(path)
            assert engine.steps == 3
        else:
            engine.load_weights(path, optimizer=True)
        for number in range(3, 6):
            engine.train_step((rows(number), None))
        found = engine.full_state_dict()
        near(found, {name: middle[name] for name in found})
    kept = engine.save(f"{folder}/ours")
    if rank == 0:
        espalier.checkpoint.export(kept, f"{folder}/out", "dcp")
    torch.distributed.barrier()
    for again, part in (kind, (rank, world)), (plain, (0, 1)):
        other, adam = net(again, seed=3)
        train(other, adam, 0, *part)
        parts = parts_of(other, adam)
        dcp.load(parts, checkpoint_id=f"{folder}/out")
        set_state_dict(other, adam, model_state_dict=parts["model"], optim_state_dict=parts["optimizer"])
        near(whole(other, adam), middle)
        train(other, adam, 6, *part)
        near(whole(other, adam), end)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("kind", ["fsdp1 flat", "fsdp1 named", "fsdp2"])
def test_training_goes_on(ranks: Any, tmp_path: Path, kind: str) -> None:
    ranks(2, onward, str(tmp_path), kind)


def cut_by_torch(rank: int, world: int) -> None:
    """It ended in a crash, or in an error from within."""
    for kind in ("fsdp1 flat", "fsdp2"):
        with pytest.raises(ValueError, match=r"torch's \w+(.|\n)*Give the plain model"):
            espalier.initialize(*net(kind, 1), {"data": world}, loss_fn=loss_of)


def test_a_model_that_torch_has_cut_is_refused_in_words(ranks: Any) -> None:
    ranks(2, cut_by_torch)
