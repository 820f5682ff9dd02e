"""A machine as a cluster: what is measured, what is made of it, and what is said where it cannot be."""

from __future__ import annotations

import math
import tomllib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from espalier import Mesh, Plan
from espalier.cli.main import app
from espalier.models import GPT, GPTConfig
from espalier.planner import Cluster, Recorder, Search
from espalier.planner import calibrate as calibration
from espalier.planner.calibrate import engine, kinds, links, local
from espalier.planner.calibrate.timing import Taken, slowed
from espalier.planner.cluster import here
from espalier.planner.explain import report
from espalier.planner.prices import Grid, Prices, between
from espalier.planner.recording import Op, Sent

POINTS = [(100.0, 2.0), (1000.0, 3.0), (100_000.0, 90.0)]


def test_curves_go_through_their_points_and_grow() -> None:
    assert [between(POINTS, x) for x, _ in POINTS] == pytest.approx([y for _, y in POINTS])
    assert between(POINTS, 1) == 2.0 and between(POINTS, 200_000) == pytest.approx(180)
    assert between(POINTS, 10_000) == pytest.approx(math.sqrt(3 * 90))
    along = [between(POINTS, 1.3**i) for i in range(60)]
    assert along == sorted(along)


def test_rates_between_those_that_were_measured() -> None:
    grid = Grid([(m, n, m * n, -m) for m in (2, 8) for n in (4, 16, 64)], 2)
    assert grid.at(8, 16) == pytest.approx(128) and grid.at(4, 8) == pytest.approx(32)
    assert grid.at(1, 1000) == pytest.approx(128), "outside it is that of the edge"
    assert Grid([(2, 7.0, 9.0)], 1, 1).at(5) == pytest.approx(9)


def measured() -> dict[str, Any]:
    sizes = (16.0, 64.0)
    return {
        "lost": [0.0, 0.02],
        "uneven": 0.0,
        "products": {"float32": [(m, n, k, m + n + k) for m in sizes for n in sizes for k in sizes]},
        "attentions": {"float32": [(16.0, 16.0, 4.0, 2.0)]},
        "operations": {"add": [(10.0, 1.0), (1000.0, 0.9)], "copy_": [(1000.0, 2.0)]},
        "spreads": {"products": [0.01, 0.2], "operations": [0.04]},
        "links": {
            "collectives": {"all_reduce": [(8.0, 50.0), (800.0, 70.0)], "send": [(8.0, 20.0), (8e6, 1e3)]},
            "spreads": [0.3],
            "beside": 0.25,
        },
    }


def test_what_ranks_measured_becomes_a_cluster() -> None:
    slower = measured()
    slower["operations"]["copy_"] = [(1000.0, 4.0)]
    made = calibration.combined([measured(), slower], 0.5)
    assert made == Cluster.from_dict(tomllib.loads(made.to_toml()))
    assert made.device.operations["copy_"] == ((1000.0, 3.0),), "the mean of the ranks"
    assert made.device.operations["add"] == ((10.0, 1.0), (1000.0, 1.0)), "more never takes less"
    assert made.ranks == 2 and made.level[0].beside == 0.25 and made.level[0].bandwidth_gbs == 8.0
    assert made.source("level.bandwidth_gbs").spread == 0.8, "with what others had of the core"
    prices = Prices(made, {"data": 1, "tensor": 2})
    product = Op("mm", "matmul", (1, 64, 16, 16), "float32", 2 * 64 * 16 * 16, 999)
    assert prices.op(product) == pytest.approx(2 * 64 * 16 * 16 / 96e9)
    seen = Op("flash_backward", "attention", (1, 4, 16, 16), "float32", 8000, 1)
    assert prices.op(seen) == pytest.approx(4e-6)
    assert prices.op(Op("copy_", "other", (), "float32", 0, 1000)) == pytest.approx(3e-6)
    assert prices.op(Op("unheard", "other", (), "float32", 0, 1000)) == pytest.approx(1e-6)
    assert prices.sent("all_reduce", "tensor", 80, 10) == pytest.approx(500e-6)
    assert prices.sent("all_reduce", "data", 80, 10) == 0
    device = made.device.model_copy(update={"host_us_per_op": 2.0, "backward_us_per_op": 1.0})
    prices = Prices(made.model_copy(update={"device": device}), {"tensor": 2})
    add = Op("add", "other", (), "float32", 0, 1000)
    events = {
        phase: Counter({add: 3, Sent("all_reduce", "tensor", 8): 1}) for phase in ("forward", "backward")
    }
    assert prices.of(events, "forward").alone == pytest.approx((3 + 4 * 2 + 50) * 1e-6)
    assert prices.of(events, "backward").alone == pytest.approx((3 + 4 * 1 + 50) * 1e-6)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"operations": {"mul": [[1.0, 2.0]]}}, '"add", which stands for all others'),
        ({"products": {"float32": [[1.0, 2.0, 3.0]]}}, "expected rows of m, n, k"),
        ({"kinds": {"tensr": [1.0, 1.0]}}, "did you mean 'tensor'"),
        ({"kinds": {"tensor": [1.0, 0.0]}}, "greater than 0"),
        ({"attentions": {"float32": []}}, "expected rows of sequence, width"),
        (
            {"products": {"float32": [[1.0, 2.0, 3.0, 4.0], [2.0, 3.0, 4.0, 5.0]]}},
            "a row for every mix of these sizes",
        ),
    ],
)
def test_points_that_are_none_get_a_sentence(change: dict[str, Any], told: str) -> None:
    made = calibration.combined([measured(), measured()], 0.0).model_dump(exclude_none=True)
    with pytest.raises(ValueError, match=told):
        Cluster.from_dict({**made, "device": {**made["device"], **change}})


def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure in this process, and little."""

    def spawned(fn: Callable[..., Any], axes: dict[str, int], *args: Any, device_type: str) -> list[Any]:
        return [fn(Mesh.single(tuple(axes)), *args)]

    monkeypatch.setattr(local, "ON_CPU", local.Sizes((4, 8), (16,), (8,), 4, (64, 512), 999, 2**23))
    monkeypatch.setattr(local, "_EACH", 0.0)
    monkeypatch.setattr(local, "_ROUNDS", 1)
    monkeypatch.setattr(engine, "_STEPS", 4)
    monkeypatch.setattr(kinds, "STEPS", (4, 2))
    monkeypatch.setattr(links.speeds, "__defaults__", (2**12,))
    monkeypatch.setattr(calibration, "spawn", spawned)


def test_a_disk_that_takes_nothing_is_left_as_assumed(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way", "utf-8")
    assert links.speeds(Mesh.single(("data",)), tmp_path / "file") == {}
    made = calibration.combined([measured() | {"disk": {}}], 0.0)
    assert made.source("disk").source == "assumed" and made.source("host").source == "measured"


def test_of_several_rounds_the_quietest_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    quiet, slow = measured(), measured()
    slow["products"] = {"float32": [(*row[:-1], row[-1] / 2) for row in quiet["products"]["float32"]]}
    slow["operations"] = {"add": [(10.0, 0.8), (1000.0, 3.0)], "copy_": [(1000.0, 3.0)]}
    rounds = iter([slow, quiet, slow])
    monkeypatch.setattr(local, "_ROUNDS", 3)
    monkeypatch.setattr(local, "_round", lambda *given: next(rounds))
    best = local.alone(Mesh.single(("data",)), (torch.float32,), print)
    assert best["products"] == quiet["products"] and best["attentions"] == quiet["attentions"]
    assert best["operations"] == {"add": [(10.0, 0.8), (1000.0, 0.9)], "copy_": [(1000.0, 2.0)]}
    assert best["spreads"] == {"products": [0.01, 0.2] * 3, "operations": [0.04] * 3}
    visits = [[{"forward": 3.0, "step": 1.0}, {"step": 1.0}], [{"forward": 1.0, "step": 2.0}, {"step": 2.0}]]
    assert engine.quietest(visits) == [{"forward": 1.0, "step": 2.0}, {"step": 1.0}]
    assert slowed([2.0, 2.0, 3.0, 3.2, 3.4]) == 0.5


def test_a_busy_machine_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    small(monkeypatch)
    monkeypatch.setattr(calibration, "taken_by_others", lambda: Taken(0.4, [1.0]))
    with pytest.raises(calibration.BusyError, match="others had 40% of a core .* --anyway"):
        calibration.calibrate(1)


def test_the_command_measures_and_plan_takes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ESPALIER_CACHE", str(tmp_path / "cache"))
    with pytest.raises(ValueError, match="run espalier calibrate first"):
        Cluster.load("here")
    small(monkeypatch)
    monkeypatch.setattr(calibration, "taken_by_others", lambda: Taken(0.0, [1.0, 2.0, 2.0]))
    folder = tmp_path / "scratch"
    done = CliRunner().invoke(app, ["calibrate", "-n", "1", "--anyway", "--disk", str(folder)])
    assert done.exit_code == 0, done.output
    assert not list(folder.iterdir()), "files are removed"
    assert "matrix products in float32" in done.output and "--cluster here" in done.output
    assert "cores took 100% longer" in done.output
    made = Cluster.load("here")
    assert made.source("level").spread > 1, "as uncertain as the cores"
    assert made == Cluster.load(here()) and made.device.waits and made.ranks == 1
    assert {"add", "silu_backward", "_log_softmax", "_fused_adamw_"} <= made.device.operations.keys()
    assert all(len(row) == 4 and min(row) > 0 for row in made.device.attentions["float32"])
    assert made.device.step_us > 0 and made.device.backward_us_per_op is not None
    assert made.disk.directory == str(folder) and min(made.disk.read_gbs, made.disk.write_gbs) > 0
    assert made.source("disk").source == made.source("host.update_gbs").source == "measured"
    (nbytes, took) = made.device.operations["_fused_adamw_"][-1]
    assert made.host.update_gbs == pytest.approx(nbytes / took / 1e3, rel=1e-3)
    with torch.device("meta"):
        net = GPT(GPTConfig(vocab_size=64, max_positions=8, layers=4, hidden=16, heads=2))
        x = torch.empty(4, 8, dtype=torch.int64)
    recorder = Recorder(net, torch.optim.AdamW(net.parameters()), {"input_ids": x, "labels": x}, {})
    found = Search(recorder, made, Plan(), fixed={"recompute": "none"}).run()
    text = report(found)
    assert "measured" in text and "assumed  ±" not in text and "shipped" not in text
    assert found.best[0].terms["host"] > 0 and found.best[0].terms["update"] >= made.device.step_us * 1e-6
