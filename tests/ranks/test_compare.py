"""A plan's prediction beside real steps of it: what is timed, counted, and said."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import espalier
from espalier import Mesh
from espalier.cli.main import app
from espalier.comm import all_reduce
from espalier.comm.collectives import all_reduce_
from espalier.comm.waits import waiting
from espalier.planner.compare import Measured
from espalier.planner.explain import to_toml
from espalier.train.building import batch_on_meta, build_model, on_meta
from espalier.train.job import Job
from espalier.train.run import measured

CLUSTER = """
[device]
kind = "CPU"
memory_gb = 8.0
bandwidth_gbs = 10.0
tflops = {float32 = 0.05}
waits = true
[[level]]
name = "machine"
ranks = 2
bandwidth_gbs = 5.0
"""
JOB: dict[str, Any] = {
    "model": {"kind": "gpt", "layers": 4, "hidden": 32, "heads": 4, "vocab_size": 128, "max_positions": 16},
    "data": {"kind": "tokens"},
    "train": {"batch_size": 8, "sequence": 16, "clip": 1.0},
}
PLANS: dict[str, dict[str, Any]] = {
    "zero-2": {"data": 2, "zero": 2, "accumulate": 2},
    "tensor": {"tensor": 2, "recompute": "full"},
    "pipe": {"pipe": 2, "cuts": ["blocks.2"], "accumulate": 4},
    "away": {"data": 2, "zero": 1, "offload": {"states": "host", "gradients": "host"}},
}


def waits(rank: int, world: int) -> tuple[dict[str, float], dict[str, float]]:
    mesh = Mesh.from_env({"data": world})
    x = torch.ones(8, device=mesh.device())
    all_reduce(x, mesh, 0)
    with waiting(mesh.device()) as clock:
        time.sleep(0.3 * rank)
        all_reduce(x, mesh, 0)
        work = all_reduce_(x, mesh, 0, beside=True)
        time.sleep(0.2)
        work.wait()
        work.wait()
        clock.settle()
    before = dict(clock.waited)
    all_reduce(x, mesh, 0)
    assert clock.waited == before, "nothing is timed when it is over"
    return before, dict(clock.beside)


def test_who_waits_and_what_is_beside(ranks: Any) -> None:
    (first, beside), (last, _) = ranks(2, waits)
    assert first["data"] > 0.2 and last["data"] < first["data"], "the first waited for the last"
    assert beside["data"] > 0.15


def steps(rank: int, world: int, name: str) -> Measured | None:
    return measured(Job.from_dict({**JOB, "plan": PLANS[name]}, source="job.toml"), 2)


@pytest.mark.parametrize("name", PLANS)
def test_a_run_is_what_its_dry_run_says(
    ranks: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, other = ranks(2, steps, name)
    assert other is None and isinstance(found, Measured)
    job = Job.from_dict({**JOB, "plan": PLANS[name]}, source="job.toml")
    model, plan, given = on_meta(job)
    given["max_grad_norm"] = job.clip
    reports = [
        espalier.dry_run(
            model, plan, batch_on_meta(job), coordinate={"pipe": i} if plan.pipe > 1 else None, **given
        )
        for i in range(plan.pipe)
    ]
    assert abs(found.bytes / max(x.peak_bytes for x in reports) - 1) < 0.01
    sent: dict[str, int] = {}
    for report in reports:
        for axis, n in report.ledger.by_axis().items():
            sent[axis] = max(n, sent.get(axis, 0))
        for way, n in report.carried.items():
            sent[way.place] = sent.get(way.place, 0) + n
    assert found.sent == {axis: n for axis, n in sent.items() if n}
    # of a rank whose waits were long nothing may be left for the host
    assert {"compute", "update"} <= found.terms.keys() and min(found.terms.values()) > 0
    assert ("bubble" in found.terms) == (found.timeline is not None) == (name == "pipe")
    assert ("tensor" in found.terms) == (name == "tensor")
    # the command says it
    monkeypatch.setenv("ESPALIER_CACHE", str(tmp_path))
    (tmp_path / "c.toml").write_text(CLUSTER, "utf-8")
    (tmp_path / "job.toml").write_text(toml({**JOB, "plan": PLANS[name]}), "utf-8")
    monkeypatch.setattr("espalier.train.run.run", lambda *given, **more: found)
    files = {x: str(tmp_path / f"out.{x}") for x in ("json", "html")}
    call = ["compare", str(tmp_path / "job.toml"), "--cluster", str(tmp_path / "c.toml")]
    call += ["--json", files["json"], "--html", files["html"], "--trace", str(tmp_path / "trace.json")]
    done = CliRunner().invoke(app, call)
    assert done.exit_code == 0, done.output
    table = json.loads((tmp_path / "out.json").read_text("utf-8"))
    times = {row["name"]: row for row in table["time"]}
    assert times["step"]["measured"] == found.seconds and times["step"]["predicted"] > 0
    memory = {row["name"]: row for row in table["memory"]}
    held = memory["parameters"]
    assert abs(held["predicted"] / held["measured"] - 1) < 0.02
    if name == "away":
        (host,) = [row for row in table["sent"] if row["name"] == "host"]
        assert abs(host["predicted"] / host["measured"] - 1) < 0.02
    dry = memory["(the same, run dry)"]
    assert abs(dry["predicted"] / dry["measured"] - 1) < 0.01
    assert "a step's time" in done.output and "sent by a rank in a step" in done.output
    page = (tmp_path / "out.html").read_text("utf-8")
    assert page.count("</svg><ul") == (2 if name == "pipe" else 0) and "Term by term" in page
    assert (tmp_path / "trace.json").exists() == (name == "pipe")
    assert ("the plan has no pipeline" in done.output) == (name != "pipe")


QUARTERS = ["blocks.1", "blocks.2", "blocks.3"]
FULLER: list[dict[str, Any]] = [
    {"pipe": 2, "schedule": "interleaved", "stages_per_rank": 2, "cuts": QUARTERS, "accumulate": 4},
    {
        "pipe": 2,
        "schedule": "zbv",
        "stages_per_rank": 2,
        "cuts": QUARTERS,
        "accumulate": 8,
        "recompute": "full",
    },
    {"pipe": 2, "cuts": ["blocks.2"], "accumulate": 4, "recompute": "selective", "precision": "bfloat16"},
    {"data": 2, "zero": 1, "offload": {"states": "host"}},
]


def peaks(rank: int, world: int) -> list[int]:
    """The most that lives at once on this rank, plan by plan."""
    found = []
    for plan in FULLER:
        job = Job.from_dict({**JOB, "plan": plan}, source="job.toml")
        net = build_model(job.model, 0, torch.float32)
        optimizer = torch.optim.AdamW(net.parameters())
        engine = espalier.initialize(net, optimizer, job.plan, max_grad_norm=job.clip)
        batch = {name: torch.zeros(x.shape, dtype=x.dtype) for name, x in batch_on_meta(job).items()}
        engine.train_step(batch)
        watch = engine.watch()
        with watch:
            engine.train_step(batch)
        found.append(watch.peak)
    return found


def test_real_peaks_are_dry_ones(ranks: Any) -> None:
    for rank, found in enumerate(ranks(2, peaks)):
        for plan, real in zip(FULLER, found, strict=True):
            job = Job.from_dict({**JOB, "plan": plan}, source="job.toml")
            model, made, _ = on_meta(job)
            place = {"pipe" if made.pipe > 1 else "data": rank}
            given = {"optimizer": torch.optim.AdamW(model.parameters()), "max_grad_norm": job.clip}
            told = espalier.dry_run(model, made, batch_on_meta(job), coordinate=place, **given).peak_bytes
            assert abs(real / told - 1) < 0.01, (plan, rank, real, told)


def toml(tables: dict[str, Any]) -> str:
    return "\n".join(to_toml(table).replace("[plan]", f"[{name}]", 1) for name, table in tables.items())


def test_what_is_not_priced_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ESPALIER_CACHE", str(tmp_path))
    (tmp_path / "c.toml").write_text(CLUSTER, "utf-8")
    for plan, told in (
        ({"branch": 2}, "plan.branch"),
        ({"data": 1, "accumulate": 3}, "A batch of 8 rows is not divided evenly"),
        ({"data": 4}, "the cluster has 2"),
    ):
        (tmp_path / "job.toml").write_text(toml({**JOB, "plan": plan}), "utf-8")
        done = CliRunner().invoke(
            app, ["compare", str(tmp_path / "job.toml"), "--cluster", str(tmp_path / "c.toml")]
        )
        assert done.exit_code == 2 and told in done.output, done.output
    done = CliRunner().invoke(app, ["compare", str(tmp_path / "job.toml")])
    assert done.exit_code == 2 and "run espalier calibrate first" in done.output
