"""What is measured on a device: by marks in its stream; the host waits around what is timed, never within."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import espalier
from espalier import Mesh, Plan, device
from espalier.cli.main import app
from espalier.models import GPTConfig
from espalier.planner import Cluster, Search, compare
from espalier.planner import calibrate as calibration
from espalier.planner.calibrate import engine, kinds, links, local
from espalier.planner.compare import Measured
from espalier.planner.explain import report
from espalier.train import run as running
from espalier.train.building import batch_on_meta, on_meta
from espalier.train.job import Job
from espalier.train.run import measured
from tests.ranks.test_compare import JOB, waits
from tests.sim.transport import Shared

Told = Counter[tuple[str, str]]

AROUND = {
    "device.py:synchronize",
    "planner/calibrate/timing.py:_timed_there",
    "planner/calibrate/timing.py:together",
    "planner/calibrate/local.py:beside_host",
}
"""Where the host waits for the device while it measures."""
TOLD = pytest.mark.skipif(torch.__version__ < "2.13", reason="torch does not tell a device of synchronize()")

FEW = ("plain", "full", "zero-3")  # kinds of plans
TINY = GPTConfig(vocab_size=16, max_positions=4, layers=2, hidden=8, heads=2)


@contextmanager
def little() -> Iterator[None]:
    """Measure little: this device is a slow one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local, "ON_ACCELERATOR", local.Sizes((4, 8), (16,), (8,), 2, (64, 512), 99, 1))
        patch.setattr(links.speeds, "__defaults__", (2**12,))
        every = kinds.plans
        patch.setattr(kinds, "plans", lambda n: {x: plan for x, plan in every(n).items() if x in FEW})
        for module, name, value in (
            *(
                (local, "_ROUNDS", 1),
                (local, "_EACH", 0.0),
                (local, "_COPIED", 2**12),
                (local, "_UPDATED", 2**10),
            ),
            *((links, "_SIZES_THERE", (64, 1024)), (links, "_SIDE_THERE", 8), (links, "_TRIES", 1)),
            *((links, "_FEWEST", 3), (links, "_MOST", 3)),
            *((engine, "_STEPS", 2), (engine, "SMALL", engine.Trial(TINY, 2))),
            (engine, "LARGE_THERE", (engine.Trial(replace(TINY, hidden=16), 2),)),
            *((kinds, "STEPS", (2, 2)), (kinds, "_WARM", 1), (kinds, "_SMALL", TINY)),
            (kinds, "_LARGE_THERE", replace(TINY, hidden=16)),
            *((device, "_LEAD_SIDE", 8), (device, "_MOST_LEADS", 3)),
        ):
            patch.setattr(module, name, value)
        yield


def on_rank(
    shared: Shared, rank: int, world: int, fn: Callable[..., Any], axes: dict[str, int], *args: Any
) -> tuple[Any, Told]:
    """What ``fn(mesh, *args)`` gives, and what the device tells meanwhile."""
    with little(), shared.sim.watched() as told:
        found = fn(Mesh.from_env(axes), *args)
    return found, short(told)


def short(told: Counter[Any]) -> Told:
    """By kind and the innermost function of the library's."""
    places: Told = Counter()
    for (kind, _, where), n in told.items():
        places[kind, where.split(" < ")[0]] += n
    return places


@TOLD
@pytest.mark.long
@pytest.mark.world(2)
def test_calibrate_measures_the_accelerator(
    on_sim: Callable[..., list[Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that a cluster file has, of the device; and a search takes it."""
    seen: Told = Counter()

    def spawned(fn: Any, axes: dict[str, int], say: Any, *args: Any, device_type: str) -> list[Any]:
        assert device_type == "sim"
        of_ranks = on_sim(2, on_rank, fn, axes, calibration._nothing, *args)
        for _, told in of_ranks:
            seen.update(told)
        return [found for found, _ in of_ranks]

    monkeypatch.setenv("ESPALIER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(calibration, "spawn", spawned)
    monkeypatch.setattr(calibration, "accelerator", lambda: "sim")  # of the ranks; here is none
    call = ["calibrate", "--device", "sim", "-n", "2", "--anyway", "--disk", str(tmp_path / "disk")]
    with little():
        done = CliRunner().invoke(app, call)
    assert done.exit_code == 0, done.output
    # beside the engines' own starts
    assert {kind for kind, _ in seen} == {"sync"} and {where for _, where in seen} >= AROUND
    made = Cluster.load("here")
    known = made.device
    assert not known.waits and known.kind == "a simulated device" and made.ranks == 2
    counted, took = known.operations["copy_"][-1]
    assert known.bandwidth_gbs == pytest.approx(2 / 3 * counted / took / 1e3, rel=1e-3), "not what is written"
    assert known.memory_gb == pytest.approx((1 << 34) / 1e9, abs=1e-3) and known.reserved_gb < 0.1
    assert {len(rows) for rows in known.products.values()} == {8} and set(known.tflops) == {*known.products}
    assert {"add", "copy_", "_log_softmax", "_fused_adamw_"} <= known.operations.keys()
    assert known.host_us_per_op >= 0 and known.backward_us_per_op is not None  # as noise lets them be
    assert known.kinds.keys() == {*FEW[1:]}
    assert made.level[0].collectives.keys() == {
        *("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")
    }
    sources = {made.source(key).source for key in ("device", "level", "host.to_device_gbs", "disk.read_gbs")}
    assert sources == {"measured"} and made.disk.directory == str(tmp_path / "disk")
    recorder = engine.Trial(TINY, 4).recorder()
    found = Search(recorder, made, Plan(), fixed={"recompute": "none"}).run()
    assert found.best and "assumed  ±" not in report(found)


@pytest.mark.world(2)
def test_who_waits_on_a_stream_and_what_is_beside(on_sim: Callable[..., list[Any]]) -> None:
    (first, beside), (last, _) = on_sim(2, waited)
    assert first["data"] > 0.2 and last["data"] < first["data"], "the first waited for the last"
    assert beside["data"] > 0.15


def waited(shared: Shared, rank: int, world: int) -> tuple[dict[str, float], dict[str, float]]:
    return waits(rank, world)


STEPS, LOOKED_INTO = 2, 3


def compared(
    shared: Shared, rank: int, world: int, plan: dict[str, Any]
) -> tuple[Measured | None, Told, list[float], int]:
    """A run of a plan, what the device tells, for how long it was kept busy, and what lay there before."""
    gc.collect()
    left = device.module_of("sim").memory_allocated()
    leads: list[float] = []
    told: Counter[Any] = Counter()

    def watched(*given: Any) -> Measured:
        with shared.sim.watched() as seen:
            found = compare.measure(*given)
        told.update(seen)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compare, "keep_busy", lambda device, seconds: leads.append(seconds))
        patch.setattr(running, "measure", watched)
        found = measured(Job.from_dict({**JOB, "plan": plan}, source="job.toml"), STEPS)
    return found, short(told), leads, left


@TOLD
@pytest.mark.world(2)
@pytest.mark.parametrize("axis", ["tensor", "pipe"])
def test_compare_runs_on_the_accelerator(on_sim: Callable[..., list[Any]], axis: str) -> None:
    """Memory and messages are those of the dry run; each timed step is waited for at its ends alone."""
    plan = {"tensor": 2} if axis == "tensor" else {"pipe": 2, "cuts": ["blocks.2"], "accumulate": 2}
    of_ranks = on_sim(2, compared, plan)
    for _, told, leads, _ in of_ranks:
        around = {("sync", "device.py:synchronize"): 2 * (STEPS + LOOKED_INTO)}
        for where in ("note", "check"):  # of batches, the first times
            told.pop(("sync", f"engine/given_batches.py:GivenBatches.{where}"), None)
        # a pipeline follows its first batch, and tells when all is over who did what when
        assert told.items() >= around.items() and {kind for kind, _ in told} == {"sync"}
        assert axis == "pipe" or told == around
        assert len(leads) == LOOKED_INTO and min(leads) > 0
    found = of_ranks[0][0]
    assert found is not None and of_ranks[1][0] is None
    assert {"compute", "update", "tensor" if axis == "tensor" else "bubble"} <= found.terms.keys()
    assert min(found.terms.values()) > 0 and (found.timeline is not None) == (axis == "pipe")
    job = Job.from_dict({**JOB, "plan": plan}, source="job.toml")
    model, made, given = on_meta(job)
    given["max_grad_norm"] = job.clip
    dry = [espalier.dry_run(model, made, batch_on_meta(job), coordinate={axis: i}, **given) for i in range(2)]
    # this device writes attention's scores, and messages come and go beside the program
    taken = found.bytes - max(left for *_, left in of_ranks)
    assert 0 <= taken / max(x.peak_bytes for x in dry) - 1 < 0.2
    sent: dict[str, int] = {}
    for one in dry:
        for name, n in one.ledger.by_axis().items():
            sent[name] = max(n, sent.get(name, 0))
    # a pipeline's hosts tell each other by a word whether all went well
    assert found.sent == pytest.approx({name: n for name, n in sent.items() if n}, abs=8)
