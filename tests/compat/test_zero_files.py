"""Checkpoints as DeepSpeed writes them: read whole, and trained on from."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from espalier.checkpoint.sinks import export
from espalier.checkpoint.zero_files import read_zero, run_of, tagged
from espalier.compat import deepspeed


class ZeroStageEnum(int):
    """A class of theirs that a file names: it must not be needed, nor called."""

    def __reduce__(self) -> Any:
        return _explode, ()


def _explode() -> None:
    raise AssertionError("what was pickled is executed")


def net() -> nn.Module:
    """An odd number of elements, a buffer, a frozen parameter."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 1))
    model[2].bias.requires_grad_(False)
    return model


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    """One of a plain loop."""
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(number))
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Two groups: matrices and the rest."""
    held = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in held if p.ndim > 1]},
        {"params": [p for p in held if p.ndim == 1], "lr": 0.1},
    ]
    return torch.optim.AdamW(groups, lr=0.02)


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    """After three steps."""
    model = net()
    optimizer = optimizer_of(model)
    for number in range(3):
        step(model, optimizer, number)
    return model, optimizer


def write(folder: Path, stage: int, ranks: int) -> None:
    """The files of ``ranks`` ranks, by the rules that DeepSpeed's own zero_to_fp32 tells."""
    model, optimizer = trained()
    names = {id(p): name for name, p in model.named_parameters()}
    groups = [[p.detach() for p in group["params"]] for group in optimizer.param_groups]
    states = [[optimizer.state[p] for p in group["params"]] for group in optimizer.param_groups]
    shapes = [{names[id(p)]: p.shape for p in group["params"]} for group in optimizer.param_groups]
    frozen = model[2].bias.detach()
    common = {
        "buffer_names": [name for name, _ in model.named_buffers()],
        "param_shapes": shapes,
        "frozen_param_shapes": {"2.bias": frozen.shape},
        "shared_params": {},
        "global_steps": 3,
        "global_samples": 12,
        "lr_scheduler": {"last_batch_iteration": 2},
        "ds_version": "0.19.8",
        "epoch": 7,
    }
    (folder / "tag").mkdir(parents=True)
    (folder / "latest").write_text("tag")
    options = [{k: x for k, x in group.items() if k != "params"} for group in optimizer.param_groups]
    for rank in range(ranks):

        def part(xs: list[torch.Tensor], rank: int = rank) -> torch.Tensor:
            if stage == 3:
                flats = [x.flatten() for x in xs]
                sizes = [math.ceil(x.numel() / ranks) for x in flats]
                padded = [
                    torch.cat([x, x.new_zeros(n * ranks - x.numel())])
                    for x, n in zip(flats, sizes, strict=True)
                ]
                return torch.cat([x.view(ranks, n)[rank] for x, n in zip(padded, sizes, strict=True)])
            row = torch.cat([x.flatten() for x in xs])
            row = torch.cat([row, row.new_zeros(-len(row) % (2 * ranks))])
            return row.chunk(ranks)[rank]

        weights = [part(group) for group in groups]
        base = {
            "state": {
                i: {
                    "step": torch.tensor(3.0),
                    **{k: part([s[k] for s in of]) for k in ("exp_avg", "exp_avg_sq")},
                }
                for i, of in enumerate(states)
            },
            "param_groups": [{**given, "params": [i]} for i, given in enumerate(options)],
        }
        keys = ("fp32_flat_groups", "optimizer_state_dict") if stage == 3 else (
            "single_partition_of_fp32_groups", "base_optimizer_state")  # fmt: skip
        told = {
            "zero_stage": ZeroStageEnum(stage),
            "partition_count": ranks if stage == 3 else [ranks] * len(groups),
        }
        torch.save(
            {"optimizer_state_dict": {**told, **dict(zip(keys, (weights, base), strict=True))}},
            folder / "tag" / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt",
        )
        cut = -(-frozen.numel() // ranks)
        fragment = frozen.flatten()[rank * cut : rank * cut + cut] if stage == 3 else frozen
        state = {**common, "module": model.state_dict(), "frozen_param_fragments": {"2.bias": fragment}}
        prefix = f"zero_pp_rank_{rank}_" if stage == 3 else ""
        if rank == 0 or stage == 3:
            torch.save(state, folder / "tag" / f"{prefix}mp_rank_00_model_states.pt")


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_read(tmp_path: Path, stage: int, ranks: int) -> None:
    """Weights, buffers, what is frozen, states and options by name, bit by bit; nothing is executed."""
    write(tmp_path, stage, ranks)
    model, optimizer = trained()
    found = read_zero(tagged(tmp_path))
    right = model.state_dict()
    assert found["model"].keys() == right.keys()
    assert all(torch.equal(found["model"][name], x) for name, x in right.items())
    for name, p in model.named_parameters():
        if p.requires_grad:
            own, theirs = optimizer.state[p], found["optimizer"]["state"][name]
            assert own.keys() == theirs.keys() and all(torch.equal(own[key], theirs[key]) for key in own)
    assert [group["lr"] for group in found["optimizer"]["param_groups"]] == [0.02, 0.1]
    run = run_of(tagged(tmp_path))
    assert run.counters == {"global_steps": 3, "global_samples": 12} and run.client_state == {"epoch": 7}


@pytest.mark.parametrize("stage", [1, 3])
def test_training_goes_on(tmp_path: Path, stage: int) -> None:
    """As if it had begun there; and the weights go through ``espalier import``."""
    write(tmp_path / "theirs", stage, 2)
    config = {"train_batch_size": 4, "zero_optimization": {"stage": stage}}
    config["scheduler"] = {
        "type": "WarmupLR",
        "params": {"warmup_num_steps": 1, "warmup_max_lr": [0.02, 0.1]},
    }
    model = net()
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer_of(model), config=config)
    path, state = engine.load_checkpoint(tmp_path / "theirs")
    assert path == str(tmp_path / "theirs" / "tag") and state == {"epoch": 7}
    assert (engine.global_steps, engine.lr_scheduler.last_batch_iteration) == (3, 2)
    right, optimizer = trained()
    for number in range(3, 6):
        step(right, optimizer, number)
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(number))
        engine.backward(engine(x).square().mean())
        engine.step()
    for name, x in engine.state_dict().items():
        torch.testing.assert_close(x, right.state_dict()[name], rtol=1e-6, atol=1e-7)
    assert export(tmp_path / "theirs" / "tag", tmp_path / "ours", "espalier", tree="model") == 9


def test_what_cannot_be_read(tmp_path: Path) -> None:
    """Parts of tensor-parallel ranks, and missing files, are told."""
    write(tmp_path, 1, 2)
    (tmp_path / "tag" / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(ValueError, match=r"has 1 files .*optim_states.pt, expected 2"):
        read_zero(tagged(tmp_path))
    torch.save({}, tmp_path / "tag" / "mp_rank_01_model_states.pt")
    with pytest.raises(ValueError, match="several tensor-parallel ranks"):
        read_zero(tagged(tmp_path))
