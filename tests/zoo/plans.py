"""The plans that every model of the zoo is tried under."""

from __future__ import annotations

import math
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


def applies(plan: str, case: Case) -> bool:
    """Whether a model may be tried under a plan at all."""
    return plan != "context" or case.causal


def world(plan: str) -> int:
    """Ranks of a plan."""
    return math.prod(Plan(**PLANS[plan]).axes.values())
