"""What is measured of links, on real ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from espalier import Mesh
from espalier.planner.calibrate import kinds
from espalier.planner.calibrate.links import collectives, speeds
from espalier.planner.calibrate.timing import taken_by_others
from espalier.planner.cluster import KINDS, Cluster


def measure(rank: int, world: int, folder: Path) -> dict[str, Any]:
    said: list[str] = []
    mesh = Mesh.from_env({"data": world})
    found = collectives(mesh, said.append, (64, 1024))
    assert len(said) == 3 and 0 <= taken_by_others(0.01).share <= 1
    stored = speeds(mesh, folder / "disk", 2**14)
    assert min(stored["read_gbs"], stored["write_gbs"], stored["capacity_gb"]) > 0
    (folder / "file").touch()
    in_the_way = folder / "file" if rank else folder / "disk"
    assert speeds(mesh, in_the_way, 2**14) == {}, "one of them can write nothing"
    return found


def test_collectives_are_measured_by_what_they_send(ranks: Any, tmp_path: Path) -> None:
    for found in ranks(2, measure, tmp_path):
        sent = {name: [size for size, _ in rows] for name, rows in found["collectives"].items()}
        assert sent == {
            "all_reduce": [256, 4096],
            "all_gather": [128, 2048],
            "reduce_scatter": [128, 2048],
            "all_to_all": [128, 2048],
            "send": [256, 4096],
        }
        assert all(took > 0 for rows in found["collectives"].values() for _, took in rows)
        assert 0 <= found["beside"] <= 1 and len(found["spreads"]) == 8


def steps(rank: int, world: int) -> dict[str, float]:
    return kinds.measure(Mesh.from_env({"data": world}), kinds.trials(world)[0], 3)


def test_steps_of_each_kind_of_plan_are_measured(ranks: Any) -> None:
    first, second = ranks(2, steps)
    assert first == second and first.keys() == {"plain", *KINDS} == kinds.plans(2).keys()
    assert all(took > 0 for took in first.values())


def host_bound(**given: Any) -> Cluster:
    """Two ranks whose host does all work itself."""
    device = {"kind": "CPU", "memory_gb": 8.0, "bandwidth_gbs": 10.0, "tflops": {"float32": 0.05}}
    device |= {"waits": True, "host_us_per_op": 20.0, "ceiling": 1.0, **given}
    level = {"name": "machine", "ranks": 2, "bandwidth_gbs": 5.0}
    return Cluster.from_dict({"device": device, "level": [level]})


def test_what_a_kind_takes_beside_its_parts_is_found_again() -> None:
    given = {name: (1 + 0.1 * i, 1 + 0.03 * i) for i, name in enumerate(KINDS)}
    slow, known = host_bound(kinds=given), kinds.recorders(2)
    # a machine that is a tenth slower in all is no kind's matter
    took = [{n: 1.1 * x.seconds for n, x in kinds.predicted(recorder, slow).items()} for recorder in known]
    found = kinds.factors(host_bound(), took, known)
    assert found.keys() == given.keys()
    for name, (host, compute) in found.items():
        assert host == pytest.approx(given[name][0], rel=0.02), name
        assert compute == pytest.approx(given[name][1], rel=0.02), name
