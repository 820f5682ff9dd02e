"""What the search says of plans, as data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from espalier.parallel import Plan
from espalier.planner.cluster import Cluster

DIVIDED = ("zb-h1", "zbv")
"""Schedules whose backward pass is divided in two."""
UNPRICED = ("branch",)
"""Keys of a plan that have no price."""
SEARCHED = tuple(
    "tensor tensor_mode depth context pipe data replicate expert accumulate sequence_parallel "
    "async_tensor_parallel recompute zero schedule stages_per_rank offload".split()
)
"""Those that are searched."""


@dataclass(frozen=True)
class Prediction:
    """What a plan takes on a cluster.

    Attributes:
        plan: the plan.
        rows: of a micro-batch on a rank.
        seconds: of a step.
        terms: what they are spent on: ``"compute"``, ``"host"`` (what the device waits for it), ``"bubble"``,
            ``"update"``, and what is waited for along each axis.
        memory: bytes on the fullest rank, by kind.
        by_rank: the same of each rank along the pipe axis.
        away: bytes of that rank that lie off the device, by place.
        beside: seconds, by axis, of what is sent while the program goes on.
        sent: bytes that a rank sends in a step, by axis.
        fits: whether the cluster's devices have so much memory, and its hosts and disks room for the rest.
        error: by how much the seconds may be off, as a share.
        stage_seconds: of each stage, forward and backward of a micro-batch.
        data: of what is sent along the data axis, the seconds in all and those that are waited for: of
            ``"sums"``, with which ZeRO-3's gathers are, and of ``"gathers"`` after the update.
    """

    plan: Plan
    rows: int
    seconds: float
    terms: Mapping[str, float]
    memory: Mapping[str, float]
    sent: Mapping[str, float]
    fits: bool
    error: float
    stage_seconds: tuple[tuple[float, float], ...] = ()
    by_rank: tuple[Mapping[str, float], ...] = ()
    beside: Mapping[str, float] = field(default_factory=dict)
    away: Mapping[str, float] = field(default_factory=dict)
    data: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def bytes(self) -> float:
        """On the fullest rank."""
        return sum(self.memory.values())

    def to_dict(self) -> dict[str, Any]:
        """As plain values, as JSON takes them."""
        table = plan_table(self.plan)
        names = ["rows", "seconds", "terms", "beside", "memory", "sent", "fits", "error", "stage_seconds"]
        names += ["by_rank", "away"]
        return {"plan": table, **{name: getattr(self, name) for name in names}}


def plan_table(plan: Plan) -> dict[str, Any]:
    """What of a plan is not by default, as TOML takes it."""
    table = plan.model_dump(exclude_defaults=True, mode="json", exclude={"why"})
    precision = table.get("precision")
    if isinstance(precision, dict) and set(precision) == {"compute"}:
        table["precision"] = precision["compute"]
    if offload := table.get("offload"):
        table["offload"] = {key: _lone(x) for key, x in offload.items()}
    return {key: list(x) if isinstance(x, tuple) else x for key, x in table.items()}


def _lone(share: Any) -> Any:
    """A share of all of a kind of state as the place that stands for it."""
    return share["place"] if isinstance(share, dict) and set(share) == {"place"} else share


def kinds_of(plan: Plan) -> list[str]:
    """Those of :data:`~espalier.planner.cluster.KINDS` that a plan is of."""
    of = {
        str(plan.recompute): plan.recompute != "none",
        f"zero-{plan.zero}": plan.zero >= 2 and plan.data * plan.context > 1,
        "sequence" if plan.sequence_parallel else "tensor": plan.tensor > 1,
        "context": plan.context > 1,
        "divided" if plan.schedule in DIVIDED else "pipe": plan.pipe > 1,
    }
    return [kind for kind, holds in of.items() if holds]


@dataclass(frozen=True)
class Found:
    """What a search found.

    Attributes:
        best: those that fit, best first.
        plain: pure data parallelism and ZeRO-3, whether they fit or not.
        least: of those that don't fit, what needs least memory; None where some fit.
        scored: candidates of which the cost is known.
        recorded: dry runs that it took.
        refused: what the engine does not run, and why.
        fixed: keys of the plan that were not searched.
        limit: bytes that a plan may take of a device.
        tried: keys of the plan for which several values were scored.
        flops: floating-point operations of the plain model's step: three times those of its forward pass.
        peak: what a device can do of these in a second, by its data sheet.
    """

    cluster: Cluster
    batch: int
    best: Sequence[Prediction]
    plain: Sequence[Prediction]
    least: Prediction | None
    scored: int
    recorded: int
    refused: Mapping[str, str] = field(default_factory=dict)
    fixed: frozenset[str] = frozenset()
    limit: float = math.inf
    tried: frozenset[str] = frozenset()
    flops: float = 0.0
    peak: float = math.inf

    def mfu(self, x: Prediction) -> float:
        """The share of the devices' peak that the plain model's operations are in a plan's step."""
        return self.flops / (x.seconds * x.plan.world_size * self.peak)
