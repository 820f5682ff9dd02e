"""Whatever is given, the user gets a sentence that says what to do: never a traceback, nothing executed.

A few hundred examples, the same each time. ``ESPALIER_FUZZ=50 pytest tests/pure/test_fuzz.py`` tries fifty
times as many, and others each time.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import espalier
from espalier.checkpoint.folder import Seal
from espalier.checkpoint.index import FormatError
from espalier.checkpoint.sinks import export
from espalier.checkpoint.sources import open_any
from espalier.cli import app
from espalier.models import build
from espalier.train.building import check_buildable
from espalier.train.job import Job, JobError
from espalier.train.sections import OptimizerSection, TextData, TrainSection
from tests.pure.fuzzing import changed, damaged, mutated, tries
from tests.pure.test_formats import STATE, Payload, same

JOB: dict[str, Any] = {
    "model": {"kind": "gpt", "vocab_size": 37, "layers": 1, "hidden": 8, "heads": 2, "max_positions": 8},
    "data": {"kind": "tokens"},
    "plan": {"data": 2, "offload": {"states": "host"}, "precision": {"compute": "float16"}},
    "optimizer": {"name": "AdamW", "lr": 1e-3, "betas": [0.9, 0.9]},
    "train": {"sequence": 4, "batch_size": 4, "steps": 1},
    "verify": {"steps": 2},
}
TOML = """
[model]
kind = "gpt"
vocab_size = 37
layers = 1
hidden = 8
heads = 2
max_positions = 8

[data]
kind = "tokens"

[train]
sequence = 4
batch_size = 4
steps = 1
"""
KEYS = sorted(
    {
        *espalier.Plan.model_fields,
        *TrainSection.model_fields,
        *OptimizerSection.model_fields,
        *TextData.model_fields,
    }
    | {
        "kind",
        "class",
        "config",
        "ffn",
        "dropout",
        "kv_heads",
        "weights",
        "fused",
        "amsgrad",
        "directory",
        "every",
    }
)


# ---- jobs


@tries(60)
@given(changed(JOB, KEYS))
def test_jobs(tables: dict[str, Any]) -> None:
    try:
        check_buildable(Job.from_dict(tables))
    except JobError as error:
        assert error.mistakes and all(line.strip() for line in str(error).splitlines())


@tries(50)
@given(damaged(TOML.encode()))
def test_job_files(content: bytes) -> None:
    path = Path("job.toml")
    path.write_bytes(content)
    try:
        Job.load(path)
    except JobError as error:
        assert str(error).startswith("job.toml: ")


# ---- plans

VALUES: dict[str, list[Any]] = {
    "data": [2, 3, 8],
    "expert": [2],
    "branch": [2],
    "zero": [1, 2, 3],
    "replicate": [2, 3],
    "tensor": [2, 3, 4, 8],
    "sequence_parallel": [True, "auto"],
    "async_tensor_parallel": [True],
    "tensor_mode": ["2d", "2.5d", "3d"],
    "depth": [2],
    "context": [2, 3],
    "context_kind": ["ring", "ulysses", "gather"],
    "pipe": [2, 3],
    "schedule": ["naive", "gpipe", "1f1b", "interleaved", "zb-h1", "zbv"],
    "stages_per_rank": [2],
    "balance": ["measured"],
    "clip": [0.5],
    "accumulate": [2, 3, 7],
    "chunk_megabytes": [1e-4],
    "prefetch_megabytes": [0.0, 1e-4],
    "precision": ["bfloat16", "float16", "autocast-bfloat16", {"compute": "bfloat16", "reduce": "float32"}],
    "offload": [
        {"states": "host"},
        {"parameters": "host", "gradients": "host"},
        {"states": "disk", "directory": "away"},
        {"states": "auto", "budget_gigabytes": 1e-6},
    ],
    "gradients": ["in-place"],
    "recompute": ["full", "selective", {"blocks.0": "full"}],
    "recompute_inputs": ["sharded", "host"],
}
NEEDS: dict[str, dict[str, Any]] = {
    "depth": {"tensor_mode": "2.5d", "tensor": 8},
    "tensor_mode": {"tensor": 8},
    "async_tensor_parallel": {"tensor": 2, "sequence_parallel": True},
    "expert": {"data": 8},
    "gradients": {"precision": "bfloat16"},
    "recompute_inputs": {"recompute": "selective"},
    "schedule": {"pipe": 2, "accumulate": 4},
    "stages_per_rank": {"pipe": 2, "accumulate": 4, "schedule": "interleaved"},
    "balance": {"pipe": 2, "accumulate": 4},
}


@st.composite
def plans(draw: st.DrawFn) -> dict[str, Any]:
    """Two or three keys, and most often what the one needs."""
    keys = draw(st.lists(st.sampled_from(sorted(VALUES)), min_size=2, max_size=3, unique=True))
    plan = {key: draw(st.sampled_from(VALUES[key])) for key in keys}
    for key in keys:
        if key in NEEDS and draw(st.integers(0, 3)):
            plan = {**NEEDS[key], **plan}
    return plan


@tries(16)
@given(st.sampled_from(["gpt", "moe", "vit"]), plans())
def test_keys_of_plans_go_together_or_say_why_not(kind: str, plan: dict[str, Any]) -> None:
    sizes: dict[str, Any] = {"hidden": 24, "heads": 4, "layers": 4 if "pipe" in plan else 1}
    with torch.device("meta"):
        if kind == "vit":
            net = build(kind, {**sizes, "image": 8, "patch": 4, "classes": 5})
            batch = {"pixel_values": torch.empty(12, 3, 8, 8), "labels": torch.empty(12, dtype=torch.int64)}
        else:
            more = {"experts": 4, "ffn": 16} if kind == "moe" else {}
            net = build(kind, {**sizes, **more, "vocab_size": 37, "max_positions": 16})
            ids = torch.empty(12, 12, dtype=torch.int64)
            batch = {"input_ids": ids, "labels": torch.empty_like(ids)}
    branches = {"blocks.*.attention": 0, "blocks.*.mlp": 1} if "branch" in plan else None
    given: dict[str, Any] = {"branches": branches, "count": count if kind == "moe" else None}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            found = espalier.dry_run(net, plan, batch, optimizer=torch.optim.AdamW(net.parameters()), **given)
        except ValueError as error:
            said = str(error)
            named = [*plan, "count", "branches", "Branches"]  # what is to be given with them
            assert any(key in said for key in named) and len(said) > 30, (plan, said)
        else:
            assert found.peak_bytes > 0


def count(batch: Any) -> Any:
    return (batch["labels"] != -100).sum()


# ---- checkpoints


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same weights in each format."""
    at = tmp_path_factory.mktemp("weights")
    torch.save({"model": STATE, "lr": 0.5}, at / "torch.pt")
    for form in ("dcp", "espalier", "safetensors"):
        export(at / "torch.pt", at / form, form)
    export(at / "torch.pt", at / "sharded", shard_gigabytes=1e-7)
    return {path.name: path for path in sorted(at.iterdir())}


@tries(80)
@given(st.data())
def test_files_of_checkpoints(folders: dict[str, Path], data: st.DataObject) -> None:
    """What is damaged is told; in a format with checksums nothing wrong is ever read."""
    whole = folders[data.draw(st.sampled_from(sorted(folders)))]
    files = sorted(p for p in whole.rglob("*") if p.is_file()) or [whole]
    chosen = data.draw(st.sampled_from(files))
    content = chosen.read_bytes()
    try:
        chosen.write_bytes(data.draw(damaged(content)))
        read_all(whole)
    finally:
        chosen.write_bytes(content)


def read_all(path: Path) -> None:
    try:
        source = open_any(path)
        for name in source.entries:
            found = source.read(name)
            if path.name == "espalier" and name.startswith("model."):
                assert same(found, STATE[name.removeprefix("model.")])
        dict(source.values)
    except FormatError as error:
        assert str(path) in str(error) and len(str(error)) > 40


@tries(80)
@given(st.data())
def test_indexes_of_checkpoints(folders: dict[str, Path], data: st.DataObject) -> None:
    """An index and its seal that somebody made to deceive."""
    step = folders["espalier"] / "step-00000000"
    kept = [(step / name, (step / name).read_bytes()) for name in ("index.json", "whole.json")]
    values = [
        1,
        {"$tuple": [{"$dtype": "float32"}, {"$device": "cpu"}]},
        {"$dict": [[1, 2]]},
        {"$bytes": "AA=="},
    ]
    tree = {**json.loads(kept[0][1]), "more": None}
    tree["values"]["x"] = values
    try:
        content = json.dumps(data.draw(mutated(tree))).encode()
        (step / "index.json").write_bytes(content)
        (step / "whole.json").write_bytes(Seal.on(content, 1).to_json())
        try:
            source = open_any(folders["espalier"])
            for name in source.entries:
                source.read(name)
        except FormatError as error:
            assert str(step.parent) in str(error) and len(str(error)) > 40
    finally:
        for file, content in kept:
            file.write_bytes(content)


@tries(60)
@given(st.data())
def test_pickles_are_never_executed(folders: dict[str, Path], data: st.DataObject) -> None:
    """A call in a pickle, wherever it is put into metadata that is damaged besides."""
    proof = folders["dcp"].parent / "proof"
    whole = folders["dcp"] / ".metadata"
    content = whole.read_bytes()
    call = pickle.dumps(Payload(proof), protocol=data.draw(st.integers(0, 4)))
    at = data.draw(st.integers(0, len(content)))
    try:
        whole.write_bytes(
            content[:at] + data.draw(st.sampled_from([call, call[2:], call[2:-1]])) + content[at:]
        )
        read_all(folders["dcp"])
    finally:
        whole.write_bytes(content)
    assert not proof.exists()


# ---- command lines

PATHS = [
    "job.toml",
    "none.toml",
    "dir",
    "empty",
    "binary.toml",
    "twice.toml",
    "list.toml",
    "weights.pt",
    "saved",
]
PATHS += [
    "saved/step-00000000",
    "dangling",
    "loop",
    "table.csv",
    "/",
    "..",
    "/proc/self/mem",
    "/dev/null",
    "é✓😀",
]
PATHS += ["x" * 300, "", "-", "--", "new", "new/below", "../outside"]
WORDS = [
    "2",
    "0",
    "-1",
    "nan",
    "inf",
    "[]",
    "{}",
    "{a=1}",
    "'x'",
    "true",
    "1e999",
    "[1,",
    '"',
    "9" * 21,
    "gpt2",
    "../x",
]
SET = [
    "plan.data",
    "plan.tensor",
    "plan.pipe",
    "plan.offload",
    "plan",
    "model",
    "model.kind",
    "model.weights",
]
SET += [
    "train.steps",
    "optimizer.name",
    "data.kind",
    "checkpoint.directory",
    "faults.x",
    "a.b.c",
    "plan.schedule",
]
VALUED = [
    "--set",
    "-n",
    "--port",
    "--format",
    "--dtype",
    "--tree",
    "--like",
    "--shard-gigabytes",
    "--kind",
    "--costs",
]
COMMANDS = ["train", "verify", "dry", "explain", "export", "import", "checkpoint", "schedule", "unknown"]


@st.composite
def lines(draw: st.DrawFn) -> list[str]:
    found = [draw(st.sampled_from(COMMANDS)), *draw(st.lists(st.sampled_from(PATHS), max_size=3))]
    words = st.sampled_from(PATHS + WORDS) | st.text(st.characters(exclude_characters="\0"), max_size=5)
    for _ in range(draw(st.integers(0, 3))):
        option = draw(st.sampled_from([*VALUED, "--set", "--resume", "--verify", "-h", "--unknown"]))
        found.append(option)
        if option == "--set" and draw(st.booleans()):
            found.append(f"{draw(st.sampled_from(SET))}={draw(words)}")
        elif option in VALUED:
            found.append(draw(words))
    return found


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with files of all kinds, in which commands are called; no ranks are started."""
    at = tmp_path / "place"
    at.mkdir()
    monkeypatch.chdir(at)
    for name in ("execute", "_launch", "prepare"):
        monkeypatch.setattr(f"espalier.train.run.{name}", lambda *_, **__: None)
    (at / "job.toml").write_text(TOML)
    (at / "dir").mkdir()
    (at / "empty").touch()
    (at / "binary.toml").write_bytes(bytes(range(256)))
    (at / "twice.toml").write_text("[model]\nkind = 1\n[model]\n")
    (at / "list.toml").write_text("model = [1, 2]\nplan = 'x'\n")
    (at / "table.csv").write_text("a,b\n1,2\n")
    torch.save({"model": {"w": torch.ones(2)}}, at / "weights.pt")
    export(at / "weights.pt", at / "saved", "espalier")
    os.symlink("nowhere", at / "dangling")
    os.symlink("loop", at / "loop")
    yield at


@tries(80)
@given(lines())
def test_command_lines(place: Path, line: list[str]) -> None:
    before = sorted(place.rglob("*"))
    outside = sorted(place.parent.iterdir())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = CliRunner().invoke(app, line, env={"COLUMNS": "200"})
    said = result.stdout + result.stderr
    assert result.exception is None or isinstance(result.exception, SystemExit), (line, result.exception)
    assert result.exit_code in (0, 1, 2) and "Traceback" not in said and "not foreseen" not in said, (
        line,
        said,
    )
    assert result.exit_code == 0 or len(said) > 25, (line, said)
    asked = {part for word in line for part in (word, word.partition("=")[2])}
    for path in sorted(set(place.rglob("*")) - set(before)):
        above = {
            str(parent.relative_to(place)) for parent in (path, *path.parents) if place in parent.parents
        }
        assert above & asked, (line, path)
    for path in sorted(set(place.rglob("*")) - set(before), reverse=True):
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    for path in set(place.parent.iterdir()) - set(outside):
        assert f"../{path.name}" in line, (line, path)
        shutil.rmtree(path) if path.is_dir() else path.unlink()


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
