"""Which plans there are for a model on a cluster: the candidates of a search."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

from espalier.parallel import Plan, PlanError
from espalier.parallel.plan import ROWS, Mode
from espalier.planner.cells import Recorder
from espalier.planner.cluster import Cluster
from espalier.planner.prediction import SEARCHED, plan_table

_ZEROS = (0, 1, 2, 3)
_RECOMPUTES = ("none", "selective", "full")
_GRIDS: tuple[tuple[Mode, int, int], ...] = (("2d", 1, 4), ("2.5d", 2, 8), ("3d", 1, 8))
"""Modes beside 1D that are searched: how deep, and on how many ranks, which is the least of each."""


class Space:
    """The plans for a model, a batch and the ranks of a cluster.

    Args:
        recorder: of the model.
        cluster: where it runs.
        base: a plan whose values hold where nothing is searched.
        batch: its rows.
        ranks: how many are used.
        fixed: values of the plan that are not searched.
        refused: gets what the plan's own checks refuse, with the reason.
    """

    def __init__(
        self,
        recorder: Recorder,
        cluster: Cluster,
        base: Plan,
        batch: int,
        ranks: int,
        fixed: Mapping[str, Any],
        refused: dict[str, str],
    ) -> None:
        self._recorder, self._cluster, self._base = recorder, cluster, base
        self._batch, self._ranks, self._fixed, self._refused = batch, ranks, fixed, refused

    def candidates(self) -> Iterator[tuple[Plan, int]]:
        """All plans, each with the rows of its micro-batches."""
        node = self._cluster.level[0].ranks
        depth = self._recorder.blocks
        for tensor in self._values("tensor", [n for n in _powers(self._ranks) if n <= max(node, 8)]):
            for context in self._values("context", [1]):
                for pipe in self._values("pipe", divisors(self._ranks) if depth else [1]):
                    rest, left = divmod(self._ranks, tensor * context * pipe)
                    wanted = self._fixed.get("data", 0) * self._fixed.get("replicate", 1) or rest
                    if left or pipe > max(depth, 1) or wanted != rest:
                        continue
                    yield from self._with(tensor, context, pipe, rest)

    def _with(self, tensor: int, context: int, pipe: int, data: int) -> Iterator[tuple[Plan, int]]:
        each, left = divmod(self._batch, data)
        if left or not each:
            return
        replicas = self._replicas(tensor, context, pipe, data)
        base = plan_table(self._base)
        for key in (*SEARCHED, "cuts"):
            if key != "offload":  # the base's holds for all
                base.pop(key, None)
        for schedule, virtual in self._schedules_of(pipe):
            for rows in [n for n in _powers(each) if each % n == 0 and n <= 16]:
                micro = each // rows
                if self._fixed.get("accumulate", micro) != micro or (pipe > 1 and micro < pipe):
                    continue
                cuts = self._cuts(pipe * virtual)
                for way, recompute in self._ways(tensor, schedule):
                    zeros = self._values("zero", list(_ZEROS if data * context > 1 else (0,)))
                    mixes = itertools.product(zeros, self._experts(data, way), replicas)
                    for zero, expert, replicate in mixes:
                        if replicate > 1 and "replicate" not in self._fixed and (zero < 3 or expert > 1):
                            continue  # what is cut is sent once a step
                        if pipe > 1 and zero > 1 and "zero" not in self._fixed:
                            continue  # gathered or reduced for each micro-batch
                        plan = self._plan(
                            **base,
                            tensor=tensor,
                            context=context,
                            pipe=pipe,
                            data=data // replicate,
                            replicate=replicate,
                            expert=expert,
                            accumulate=micro,
                            **way,
                            recompute=recompute,
                            zero=zero,
                            schedule=schedule,
                            stages_per_rank=virtual,
                            cuts=cuts,
                        )
                        if plan is not None and self._divides(plan, rows):
                            yield plan, rows

    def _plan(self, **fields: Any) -> Plan | None:
        """The plan of these values, but for those that are not searched; None: its own checks refuse it."""
        try:
            return Plan(**{**fields, **self._fixed})
        except PlanError as error:
            self._refused.setdefault(error.mistakes[0].text(), "the plan's own checks")
            return None

    def _divides(self, plan: Plan, rows: int) -> bool:
        """Whether the tensor axes divide a micro-batch's rows, and leave each rank few of them."""
        unit = math.prod(plan.axes[x] for x in ROWS[plan.tensor_mode])
        few = unit == 1 or rows <= 2 * unit or "tensor_mode" in self._fixed
        return few and rows % unit == 0

    def _replicas(self, tensor: int, context: int, pipe: int, data: int) -> list[int]:
        """Into how many groups that hold the same the data axis is divided: one, or one a host."""
        fixed = self._fixed.get("replicate")
        if fixed is not None:
            return [fixed] if data % fixed == 0 else []
        inside = self._cluster.level[0].ranks // (tensor * context)
        crosses = inside > 1 and data > inside and data % inside == 0
        return [1, data // inside] if crosses and pipe == 1 and "data" not in self._fixed else [1]

    def _experts(self, data: int, way: Mapping[str, Any]) -> list[int]:
        """Among how many ranks a model's experts are divided: one, or as many as can be."""
        most = math.gcd(data, self._recorder.experts or 1) if way["tensor_mode"] == "1d" else 1
        return self._values("expert", [1, most] if most > 1 else [1])

    def _ways(self, tensor: int, schedule: str) -> Iterator[tuple[dict[str, Any], str]]:
        """How tensor ranks share layers, each with a kind of recomputation."""
        modes: list[tuple[Any, int]] = [("1d", 1)]
        if schedule == "1f1b" and tensor <= self._cluster.level[0].ranks:
            modes += [(mode, deep) for mode, deep, n in _GRIDS if n == tensor]
        if (fixed := self._fixed.get("tensor_mode")) is not None:
            modes = [(fixed, self._fixed.get("depth", 1))]
        for mode, deep in modes:
            line = mode == "1d"
            sequences = [False, True] if line and tensor > 1 else [False]
            recomputes = list(_RECOMPUTES) if line else ["none", "full"]
            for sequence in self._values("sequence_parallel", sequences):
                if sequence and not line:
                    continue
                for recompute in self._values("recompute", recomputes):
                    yield {"tensor_mode": mode, "depth": deep, "sequence_parallel": sequence}, recompute

    def _values(self, key: str, all_of: list[Any]) -> list[Any]:
        return [self._fixed[key]] if key in self._fixed else all_of

    def _schedules_of(self, pipe: int) -> list[tuple[str, int]]:
        if pipe == 1:
            return [("1f1b", 1)]
        depth, known = self._recorder.blocks, [("1f1b", 1), ("zb-h1", 1)]
        known += [("interleaved", v) for v in (2, 3, 4, 6) if pipe * v <= depth]
        known += [("zbv", 2)] if 2 * pipe <= depth else []
        asked = [self._fixed.get(key) for key in ("schedule", "stages_per_rank")]
        return [x for x in known if all(a is None or a == b for a, b in zip(asked, x, strict=True))]

    def _cuts(self, stages: int) -> tuple[str, ...] | None:
        if stages == 1:
            return None
        if "cuts" in self._fixed:
            return tuple(self._fixed["cuts"])
        layers = self.layers(stages)
        names = self._recorder.names
        return tuple(names[sum(layers[: i + 1])] for i in range(stages - 1))

    def layers(self, stages: int) -> list[int]:
        """Blocks of each stage: as even as can be, the last ones, which end in the head, with fewer."""
        few, more = divmod(self._recorder.blocks, stages)
        return [few + (i < more) for i in range(stages)]


def _powers(most: int) -> list[int]:
    return [2**i for i in range(most.bit_length()) if 2**i <= most]


def divisors(n: int) -> list[int]:
    return [i for i in range(1, min(n, 128) + 1) if n % i == 0]
