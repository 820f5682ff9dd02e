"""What is measured of links, on real ranks."""

from __future__ import annotations

from typing import Any

from espalier import Mesh
from espalier.planner.calibrate.links import collectives
from espalier.planner.calibrate.timing import taken_by_others


def measure(rank: int, world: int) -> dict[str, Any]:
    said: list[str] = []
    found = collectives(Mesh.from_env({"data": world}), said.append, (64, 1024))
    assert len(said) == 3 and 0 <= taken_by_others(0.01) <= 1
    return found


def test_collectives_are_measured_by_what_they_send(ranks: Any) -> None:
    for found in ranks(2, measure):
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
