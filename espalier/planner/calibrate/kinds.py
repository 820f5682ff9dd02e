"""What steps of each kind of plan take beside what their parts say, two ranks along an axis.

Python finds its way for tensors that are cut, blocks that are recomputed meet what was kept of them, ranks
wait for one another at each collective, and share caches and memory: no part by itself has that. So short
steps of a small and of a larger model are taken under each kind, in turns with plain data parallelism.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from espalier.comm import all_reduce
from espalier.device import is_accelerator, synchronize
from espalier.mesh import Mesh
from espalier.models import GPTConfig
from espalier.parallel import Plan
from espalier.planner.calibrate.engine import Trial
from espalier.planner.calibrate.timing import level, quiet
from espalier.planner.cells import Recorder
from espalier.planner.cluster import Cluster
from espalier.planner.prediction import Prediction
from espalier.planner.search import Search

STEPS = (20, 11)  # of each of the trials
_WARM = 2
_ROWS = 4  # of the batch, for each rank
_PLAIN = "plain"
_LEAST, _MOST = 0.5, 20.0  # what noise may make of a factor


_SMALL = GPTConfig(vocab_size=64, max_positions=16, layers=4, hidden=32, heads=4)
_LARGE = GPTConfig(vocab_size=768, max_positions=96, layers=4, hidden=160, heads=4)
_LARGE_THERE = GPTConfig(vocab_size=8192, max_positions=512, layers=4, hidden=1024, heads=16)


def trials(ranks: int, device_type: str = "cpu") -> tuple[Trial, Trial]:
    """One of which the host takes most of the time, and one of which products do."""
    small, large = _SMALL, _LARGE_THERE if is_accelerator(device_type) else _LARGE
    return Trial(small, _ROWS * ranks), Trial(large, _ROWS * ranks)


def plans(ranks: int) -> dict[str, Plan]:
    """One of each kind; on an odd number of ranks those that need no axis but the data axis."""
    options: dict[str, dict[str, Any]] = {_PLAIN: {}, "full": {"recompute": "full"}}
    options["selective"] = {"recompute": "selective"}
    if ranks > 1:
        options |= {"zero-2": {"zero": 2, "accumulate": 2}, "zero-3": {"zero": 3}}
    if ranks % 2 == 0:
        pipe = {"pipe": 2, "cuts": ("blocks.2",), "accumulate": 4}
        options |= {
            "tensor": {"tensor": 2},
            "sequence": {"tensor": 2, "sequence_parallel": True},
            "context": {"context": 2},
            "pipe": {**pipe, "schedule": "1f1b"},
            "divided": {**pipe, "schedule": "zb-h1"},
        }
    inner = {name: x.get("tensor", 1) * x.get("context", 1) * x.get("pipe", 1) for name, x in options.items()}
    return {name: Plan(data=ranks // inner[name], **x) for name, x in options.items()}


def measure(mesh: Mesh, trial: Trial, steps: int) -> dict[str, float]:
    """Seconds of a step under each kind, the slower rank's, all kinds in turns."""
    engines = {}
    for name, plan in plans(mesh.size()).items():
        kind = mesh.device_type
        around = Mesh.from_env(plan.axes) if mesh.size() > 1 else Mesh.single(tuple(plan.axes), kind)
        engines[name], batch = trial.engine(plan, around)
    took: dict[str, list[float]] = {name: [] for name in engines}
    for i in range(_WARM + steps):
        for name, engine in engines.items():
            level(mesh)
            began = time.perf_counter()
            engine.train_step(batch)
            synchronize(mesh.device())
            if i >= _WARM:
                took[name].append(time.perf_counter() - began)
    slower = all_reduce(torch.tensor(list(took.values()), dtype=torch.float64), mesh, 0, "max")
    return {name: quiet(times).seconds for name, times in zip(took, slower.tolist(), strict=True)}


def recorders(ranks: int, device_type: str = "cpu") -> list[Recorder]:
    """Those of :func:`trials`."""
    return [trial.recorder() for trial in trials(ranks, device_type)]


def predicted(recorder: Recorder, cluster: Cluster) -> dict[str, Prediction]:
    """What the search says of a trial under each kind."""
    search, rows = Search(recorder, cluster, Plan()), _ROWS * cluster.ranks
    predictions = {}
    for name, plan in plans(cluster.ranks).items():
        prediction = search.score(plan, rows // (plan.data * plan.accumulate))
        if prediction is not None:
            predictions[name] = search.simulated(prediction)
    return predictions


def factors(
    cluster: Cluster, took: Sequence[Mapping[str, float]], known: Sequence[Recorder]
) -> dict[str, tuple[float, float]]:
    """By kind, what the host's time and the computation are, of what they are in plain data parallelism.

    Args:
        cluster: of this machine, with no such factors.
        took: what :func:`measure` gave of each of :func:`trials`.
        known: their recorders.
    """
    said = [predicted(recorder, cluster) for recorder in known]
    missing = []  # of each trial, seconds that the parts do not have, by kind
    for times, predictions in zip(took, said, strict=True):
        plain = predictions[_PLAIN].seconds / times[_PLAIN]
        missing.append({name: times[name] * plain - x.seconds for name, x in predictions.items()})
    by_kind = {}
    for name in said[0].keys() - {_PLAIN}:
        parts = [[_whole(predictions[name], term) for term in ("host", "compute")] for predictions in said]
        more = torch.linalg.solve(torch.tensor(parts), torch.tensor([lost[name] for lost in missing]))
        host, compute = (1 + more).clamp(_LEAST, _MOST).tolist()
        by_kind[name] = (host, compute)
    return by_kind


def _whole(x: Prediction, term: str) -> float:
    """Seconds that a term takes of a step, with its part of the bubble."""
    both = x.terms["compute"] + x.terms["host"]
    return x.terms[term] * (1 + x.terms.get("bubble", 0.0) / both)
