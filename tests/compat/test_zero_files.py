"""Checkpoints as DeepSpeed writes them: read whole, and trained on from."""

from __future__ import annotations

import importlib.util
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from espalier.checkpoint.index import FormatError
from espalier.checkpoint.sinks import export
from espalier.checkpoint.sources import open_any
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
    if stage == 0:
        state = {**common, "param_shapes": None, "module": model.state_dict()}
        state["optimizer"] = optimizer.state_dict()
        torch.save(state, folder / "tag" / "mp_rank_00_model_states.pt")
        return
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


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_training_goes_on(tmp_path: Path, stage: int) -> None:
    """As if it had begun there; and the weights go through ``espalier import``."""
    write(tmp_path / "theirs", stage, 2)
    config = {"train_batch_size": 4, "gradient_clipping": 0.0, "zero_optimization": {"stage": stage}}
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
    out = tmp_path / "ours"
    if stage == 0:
        with pytest.raises(FormatError, match="their names are not in it: load it into the model"):
            export(tmp_path / "theirs" / "tag", out, "espalier", tree="model", optimizer=True)
        return
    assert export(tmp_path / "theirs" / "tag", out, "espalier", tree="model", optimizer=True) == 9 + 3 * 5
    found, (model, optimizer) = open_any(out), trained()
    assert found.values["steps"] == 3
    assert [group["options"]["lr"] for group in found.values["optimizer"]["groups"]] == [0.02, 0.1]
    for name, p in model.named_parameters():
        for key, x in optimizer.state[p].items():
            assert torch.equal(found.read(f"optimizer.state.{name}.{key}"), x)


# ---- out, as DeepSpeed's universal checkpoint


def batch_of(number: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(number))


def plain_steps(model: nn.Module, optimizer: torch.optim.Optimizer, numbers: range) -> None:
    for number in numbers:
        model(batch_of(number)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def universal(folder: Path) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Three steps, saved by names and written so; gives what was saved."""
    model = unwritten()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    plain_steps(model, optimizer, range(3))
    names = [name for name, _ in model.named_parameters()]
    state = optimizer.state_dict()
    state["state"] = {name: state["state"][i] for i, name in enumerate(names)}
    state["param_groups"][0]["params"] = names
    torch.save({"model": model.state_dict(), "optimizer": state}, folder / "named.pt")
    export(folder / "named.pt", folder / "ours", "espalier", optimizer=True)
    assert export(folder / "ours", folder / "theirs", "universal") == 3 * len(names)
    return model, optimizer


def unwritten() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 3))


def test_universal_files(tmp_path: Path) -> None:
    """Whole tensors in float32, and what is common."""
    model, optimizer = universal(tmp_path)
    assert (tmp_path / "theirs" / "latest_universal").read_text() == "universal"
    zero = tmp_path / "theirs" / "universal" / "zero"
    for name, p in model.named_parameters():
        for key, right in {"fp32": p, **optimizer.state[p]}.items():
            found = torch.load(zero / name / f"{key}.pt")
            assert torch.equal(found if key == "step" else found["param"], right)
    (group,) = torch.load(zero / "optimizer_state.pt")["param_groups"]
    assert group["lr"] == 0.02 and group["params"] == [0]
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    with pytest.raises(ValueError, match="has no optimizer"):
        export(tmp_path / "weights.pt", tmp_path / "out", "universal")
    assert not (tmp_path / "out").exists()


REFERENCE = """
import logging, sys
sys.path.insert(0, {root!r})
import deepspeed
import torch
from deepspeed.utils import logger
from tests.compat.test_zero_files import batch_of, unwritten

logger.setLevel(logging.ERROR)
deepspeed.init_distributed(dist_backend="gloo")
rank = torch.distributed.get_rank()
for stage in (1, 2, 3):
    model = unwritten()
    given = {{"train_batch_size": 4, "zero_force_ds_cpu_optimizer": False}}
    given |= {{"zero_allow_untested_optimizer": True}}
    given |= {{"zero_optimization": {{"stage": stage}}, "checkpoint": {{"load_universal": True}}}}
    adam = torch.optim.AdamW(model.parameters(), lr=0.5)
    engine = deepspeed.initialize(model=model, optimizer=adam, config=given)[0]
    engine.load_checkpoint({folder!r})
    assert engine.global_steps == 3
    for number in range(3, 6):
        engine.backward(engine(batch_of(number)[2 * rank : 2 * rank + 2]).square().mean())
        engine.step()
    with deepspeed.zero.GatheredParameters(list(model.parameters()), enabled=stage == 3):
        if rank == 0:
            found = {{name: p.detach().clone() for name, p in model.named_parameters()}}
            torch.save(found, f"{{sys.argv[1]}}/{{stage}}.pt")
"""


def test_deepspeed_goes_on(tmp_path: Path) -> None:
    """From it, on two ranks, under each stage."""
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip(
            "needs DeepSpeed: pip install --no-deps deepspeed einops hjson msgpack ninja psutil py-cpuinfo"
        )
    model, optimizer = universal(tmp_path)
    script = tmp_path / "reference.py"
    root = str(Path(__file__).parents[2])
    script.write_text(REFERENCE.format(root=root, folder=str(tmp_path / "theirs")))
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--rdzv-backend",
        "c10d",
    ]
    done = subprocess.run(
        [*launch, "--rdzv-endpoint", "localhost:0", str(script), str(tmp_path)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"},
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    plain_steps(model, optimizer, range(3, 6))
    for stage in (1, 2, 3):
        found = torch.load(tmp_path / f"{stage}.pt")
        for name, p in model.named_parameters():
            torch.testing.assert_close(found[name], p.detach(), rtol=1e-5, atol=1e-6)


def test_what_cannot_be_read(tmp_path: Path) -> None:
    """Parts of tensor-parallel ranks, and missing files, are told."""
    write(tmp_path, 1, 2)
    (tmp_path / "tag" / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(ValueError, match=r"has 1 files .*optim_states.pt, expected 2"):
        read_zero(tagged(tmp_path))
    torch.save({}, tmp_path / "tag" / "mp_rank_01_model_states.pt")
    with pytest.raises(ValueError, match="several tensor-parallel ranks"):
        read_zero(tagged(tmp_path))
    (tmp_path / "tag" / "mp_rank_01_model_states.pt").unlink()
    torch.save({}, tmp_path / "tag" / "layer_0_expert_1_mp_rank_00_model_states.pt")
    with pytest.raises(ValueError, match=r"experts of DeepSpeed's MoE(.|\n)*one state dict"):
        read_zero(tagged(tmp_path))
    (tmp_path / "tag" / "layer_0_expert_1_mp_rank_00_model_states.pt").unlink()
    torch.save({}, tmp_path / "tag" / "layer_01-model_00-model_states.pt")
    with pytest.raises(ValueError, match=r"saved by a pipeline(.|\n)*layer_LAYER-model_00"):
        read_zero(tagged(tmp_path))
