"""A run that is stopped and resumed is the run that never stopped."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from espalier.train.job import Job
from espalier.train.metrics import Silent
from espalier.train.trainer import train

STEPS = 6


def job(folder: Path, plan: dict[str, Any], **changes: Any) -> Job:
    tables: dict[str, Any] = {
        "model": {"kind": "gpt", "vocab_size": 40, "layers": 2, "hidden": 16, "heads": 2, "dropout": 0.1},
        "data": {"kind": "tokens"},
        "plan": {"chunk_megabytes": 0.01, **plan},
        "optimizer": {"lr": 1e-2, "warmup": 2, "schedule": "cosine"},
        "train": {"steps": STEPS, "batch_size": 8, "sequence": 12, "clip": 1.0, "log_every": 1},
        "checkpoint": {"every": 3},
    }
    tables["model"]["max_positions"] = 12
    tables["train"].update(dtype="float64", eval_every=2, eval_batches=1, out=str(folder / "out"))
    for key, value in changes.items():
        table, _, name = key.partition("_")
        tables[table][name] = value
    return Job.from_dict(tables)


class Said(Silent):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, message: str) -> None:
        self.lines.append(message)


def trained(rank: int, world: int, folder: Path, plan: dict[str, Any], resume: bool, changes: Any) -> str:
    said = Said()
    train(job(folder, plan, **changes), said, resume=resume)
    return "\n".join(said.lines)


def stopped(folder: Path, at: Path) -> Path:
    """A copy of a run, as if it had been stopped after step 3, and had logged one step more."""
    shutil.copytree(folder, at)
    shutil.rmtree(at / "out" / "checkpoints" / f"step-{STEPS:08}")
    (at / "out" / "model.safetensors").unlink()
    lines = (at / "out" / "metrics.jsonl").read_text().splitlines(keepends=True)
    (at / "out" / "metrics.jsonl").write_text("".join(lines[:4]) + lines[4][:30])
    return at


def results(folder: Path) -> tuple[list[list[Any]], dict[str, torch.Tensor]]:
    lines = (folder / "out" / "metrics.jsonl").read_text().splitlines()
    kept = ("step", "loss", "grad_norm", "lr", "val_loss")
    return [[json.loads(line)[k] for k in kept] for line in lines], load_file(
        folder / "out" / "model.safetensors"
    )


def same(a: Any, b: Any, tolerance: float) -> None:
    assert len(a[0]) == len(b[0]) == STEPS
    for one, other in zip(a[0], b[0], strict=True):
        assert [x is None for x in one] == [x is None for x in other]
        assert all(abs(x - y) <= tolerance for x, y in zip(one, other, strict=True) if x is not None)
    assert a[1].keys() == b[1].keys()
    for name, x in a[1].items():
        assert (x - b[1][name]).abs().max() <= tolerance, name


PLAN = {"data": 2, "zero": 2, "accumulate": 2}


def test_resumed_is_never_stopped(ranks: Any, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    ranks(2, trained, whole, PLAN, False, {})
    for i, plan in enumerate((PLAN, {"accumulate": 2}, {"tensor": 2, "zero": 3, "accumulate": 2})):
        world = 1 if i == 1 else 2
        folder = stopped(whole, tmp_path / str(i))
        told = ranks(world, trained, folder, plan, True, {})[0]
        assert "resumed after step 3, 24 samples" in told
        same(results(folder), results(whole), 0.0 if i == 0 else 1e-9)
        assert ("plan.data: 2 then, not given now" in told) == (i > 0)


def test_resumed_with_a_scaler(ranks: Any, tmp_path: Path) -> None:
    whole, changes = tmp_path / "whole", {"train_dtype": "float32"}
    plan = {"data": 2, "zero": 1, "precision": {"compute": "float16", "loss_scale": {"growth_interval": 2}}}
    ranks(2, trained, whole, plan, False, changes)
    folder = stopped(whole, tmp_path / "again")
    ranks(2, trained, folder, plan, True, changes)
    same(results(folder), results(whole), 0.0)


def test_what_the_job_says_otherwise_holds(ranks: Any, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    ranks(1, trained, whole, {}, False, {})
    folder = stopped(whole, tmp_path / "again")
    told = ranks(1, trained, folder, {}, True, {"optimizer_lr": 5e-3, "train_steps": 8})[0]
    assert "optimizer.lr: 0.01 then, 0.005 now" in told and "train.steps: 6 then, 8 now" in told
    rates = [line[3] for line in results(folder)[0]]
    assert len(rates) == 8 and rates[2] == pytest.approx(1e-2) and rates[3] < 5e-3
    with pytest.raises(Exception, match="has checkpoints of an earlier run"):
        ranks(1, trained, folder, {}, False, {})
    with pytest.raises(Exception, match="there is nothing left to do"):
        ranks(1, trained, folder, {}, True, {"train_steps": 8})
    told = ranks(1, trained, tmp_path / "new", {}, True, {})[0]
    assert "starting at the beginning" in told


def test_a_run_that_was_killed_after_its_last_step_writes_its_results(ranks: Any, tmp_path: Path) -> None:
    plan = {"pipe": 2, "accumulate": 2}
    ranks(2, trained, tmp_path, plan, False, {})
    out, before = tmp_path / "out", results(tmp_path)
    said = json.loads((out / "run.json").read_text())
    (out / "run.json").write_text(json.dumps({**said, "status": "running"}))
    (out / "model.safetensors").unlink()
    assert "resumed after step 6" in ranks(2, trained, tmp_path, plan, True, {})[0]
    same(results(tmp_path), before, 0.0)
    again = json.loads((out / "run.json").read_text())
    assert again["status"] == "finished" and again["plan"] == said["plan"]
    with pytest.raises(Exception, match="there is nothing left to do"):
        ranks(2, trained, tmp_path, plan, True, {})


def test_where_no_checkpoint_can_be_written_no_step_is_made(ranks: Any, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for resume in (False, True):
        with pytest.raises(Exception, match="No checkpoint can be written to .*: Not a directory"):
            ranks(1, trained, tmp_path, {}, resume, {"checkpoint_directory": str(tmp_path / "file" / "in")})
    assert not (tmp_path / "out" / "metrics.jsonl").exists()


def test_no_run_begins_anew_over_checkpoints_that_are_all_damaged(ranks: Any, tmp_path: Path) -> None:
    ranks(1, trained, tmp_path, {}, False, {"checkpoint_keep": 1})
    saved = sorted((tmp_path / "out" / "checkpoints").iterdir())
    for path in saved:
        (path / "index.json").write_bytes(b"")
    before = results(tmp_path)[0]
    with pytest.raises(Exception, match="No other in .* is whole, so there is nothing to go on from"):
        ranks(1, trained, tmp_path, {}, True, {"train_steps": 8})
    assert results(tmp_path)[0] == before
    assert sorted((tmp_path / "out" / "checkpoints").iterdir()) == saved
