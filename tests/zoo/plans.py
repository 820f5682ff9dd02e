"""The plans that every model of the zoo is tried under."""

from __future__ import annotations

import math
import tempfile
from typing import Any

from espalier import Plan
from tests.zoo.cases import Case

PLANS: dict[str, dict[str, Any]] = {
    "data": {"data": 2},
    "zero 3": {"data": 2, "zero": 3, "chunk_megabytes": 0.01, "prefetch_megabytes": 0.01},
    "recompute": {"data": 2, "recompute": "full"},
    "tensor": {"tensor": 2},
    "sequence": {"tensor": 2, "sequence_parallel": True},
    "pipe": {"pipe": 2, "accumulate": 4},
    "context": {"context": 2},
    "data × tensor": {"data": 2, "tensor": 2},
    "2d": {"tensor": 4, "tensor_mode": "2d"},
}


ALL = ("parameters", "gradients", "states")
ON_DISK = {"parameters": "disk", "states": "disk", "directory": tempfile.gettempdir()}
ZERO = {"zero": 3, "chunk_megabytes": 0.01, "prefetch_megabytes": 0.01}
RARE: dict[str, dict[str, Any]] = {
    "tensor × pipe": {"tensor": 2, "pipe": 2, "accumulate": 4},
    "data × pipe": {"data": 2, "pipe": 2, "accumulate": 2, "zero": 1},
    "zero 3 × pipe": {"data": 2, "pipe": 2, "accumulate": 2, **ZERO},
    "context × pipe": {"context": 2, "pipe": 2, "accumulate": 2},
    "interleaved": {"pipe": 2, "accumulate": 4, "schedule": "interleaved", "stages_per_rank": 2},
    "zb-h1": {"pipe": 2, "accumulate": 4, "schedule": "zb-h1"},
    "zbv": {"pipe": 2, "accumulate": 4, "schedule": "zbv", "stages_per_rank": 2},
    "pipe, recompute": {"pipe": 2, "accumulate": 2, "recompute": "full"},
    "zero 3 × sequence, recompute": {
        "data": 2,
        "tensor": 2,
        **ZERO,
        "sequence_parallel": True,
        "recompute": "full",
    },
    "selective": {"tensor": 2, "sequence_parallel": True, "recompute": "selective", "accumulate": 2},
    "zero 3 × context": {"data": 2, "context": 2, **ZERO},
    "ulysses": {"context": 2, "context_kind": "ulysses", "recompute": "full"},
    "expert × zero 3": {"data": 2, "expert": 2, **ZERO},
    "expert × pipe": {"data": 2, "expert": 2, "pipe": 2, "accumulate": 2},
    "off to host": {"data": 2, **ZERO, "offload": dict.fromkeys(ALL, "host")},
    "off to disk": {"data": 2, **ZERO, "offload": ON_DISK},
    "hybrid": {"replicate": 2, "data": 2, **ZERO},
    "2.5d": {"tensor": 8, "tensor_mode": "2.5d", "depth": 2},
    "3d": {"tensor": 8, "tensor_mode": "3d"},
}
"""Plans that are rarely combined: `benchmarks/zoo.py --rare`, on a drawn share of the pairs."""


def plan_of(name: str) -> dict[str, Any]:
    """A plan by its name."""
    return PLANS[name] if name in PLANS else RARE[name]


def applies(plan: str, case: Case) -> bool:
    """Whether a model may be tried under a plan at all."""
    return "context" not in plan_of(plan) or case.causal


def world(plan: str) -> int:
    """Ranks of a plan."""
    return math.prod(Plan(**plan_of(plan)).axes.values())
