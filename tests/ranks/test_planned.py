"""Plans that a search chose, on real ranks: with experts apart, and with states off the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from espalier.planner import Cluster
from espalier.train.foresight import planned
from espalier.train.job import Job
from espalier.train.model_spec import HuggingFaceSpec
from tests.asked import left_to_sweeps
from tests.ranks.test_jobs_hf import results, same, trained

MIXTRAL = {
    "model_type": "mixtral",
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 24,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
OWN = {"vocab_size": 101, "max_positions": 24, "layers": 2, "hidden": 32, "heads": 4, "ffn": 96, "experts": 4}
MODELS: dict[str, dict[str, Any]] = {
    "own": {"kind": "moe", **OWN},
    "mixtral": {"kind": "hf", "config": MIXTRAL},
}


def tables(model: dict[str, Any], out: Path, plan: dict[str, Any]) -> dict[str, Any]:
    return {
        "model": model,
        "data": {"kind": "tokens"},
        "plan": plan,
        "optimizer": {"lr": 1e-2, "weight_decay": 0.1},
        "train": {
            "steps": 3,
            "batch_size": 8,
            "sequence": 18,
            "clip": 1.0,
            "log_every": 1,
            "dtype": "float64",
            "out": str(out),
        },
    }


def small(folder: Path, memory: float) -> str:
    """The file of a cluster whose devices have so many bytes."""
    h100 = Cluster.load("h100-sxm")
    device = h100.device.model_copy(update={"memory_gb": memory / 1e9, "reserved_gb": 0.0})
    text = h100.model_copy(update={"device": device, "unusual": ("device.memory_gb",)}).to_toml()
    (folder / "cluster.toml").write_text(text, "utf-8")
    return str(folder / "cluster.toml")


def trains(rank: int, world: int, given: dict[str, Any]) -> None:
    """As ``espalier train`` does on a rank, with products that take float64."""
    build = HuggingFaceSpec.build

    def eager(spec: HuggingFaceSpec) -> Any:
        model: Any = build(spec)
        model.config._experts_implementation = "eager"
        return model

    with patch.object(HuggingFaceSpec, "build", eager):
        trained(rank, world, given)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ESPALIER_CACHE", str(tmp_path / "cache"))
    return tmp_path


AUTO = {"auto": True, "cluster": "h100-sxm", "pipe": 1, "tensor": 1, "recompute": "none", "accumulate": 1}
AUTO |= {"chunk_megabytes": 0.05}


@pytest.mark.world(4)
@pytest.mark.parametrize(
    ("kind", "world"),
    left_to_sweeps([("own", 2), ("own", 4), ("mixtral", 4)], 0, why="four ranks have two and more"),
)
def test_a_mixture_of_experts_trains_under_its_plan(ranks: Any, kind: str, world: int, folder: Path) -> None:
    if kind == "mixtral":
        pytest.importorskip("transformers")
    job = Job.from_dict(tables(MODELS[kind], folder / "chosen", AUTO | {"ranks": world}))
    chosen = planned(job)
    # a step of so small a Mixtral is the host's time: with its experts apart or not, it is a tie
    assert chosen.plan.expert > 1 or kind == "mixtral", chosen.plan
    assert chosen.plan.why.startswith("best of")
    ranks(world, trains, chosen.raw, timeout=240.0)
    ranks(1, trains, tables(MODELS[kind], folder / "one", {}), timeout=240.0)
    same(results(folder / "chosen"), results(folder / "one"))


def test_a_model_that_fits_nowhere_trains_with_what_is_off_the_device(ranks: Any, folder: Path) -> None:
    model = {"kind": "gpt", "vocab_size": 101, "max_positions": 24, "layers": 4, "hidden": 64, "heads": 4}
    plan = AUTO | {"ranks": 2, "zero": 1}
    whole = planned(Job.from_dict(tables(model, folder / "x", plan)))
    assert str(whole.plan.offload) == ""
    chosen = planned(
        Job.from_dict(tables(model, folder / "chosen", plan | {"cluster": small(folder, 7.0e6)}))
    )
    assert chosen.plan.offload.states.place == "host", chosen.plan
    ranks(2, trained, chosen.raw, timeout=240.0)
    ranks(1, trained, tables(model, folder / "one", {}), timeout=240.0)
    same(results(folder / "chosen"), results(folder / "one"))
