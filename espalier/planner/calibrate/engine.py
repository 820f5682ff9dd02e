"""What the engine's own steps take beside their operations, on a model so small that little else is left."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Mapping
from itertools import pairwise

import torch

from espalier.engine.engine import initialize
from espalier.mesh import Mesh
from espalier.models import GPT, GPTConfig
from espalier.parallel import Plan
from espalier.planner.calibrate.timing import level
from espalier.planner.cells import Cell, Recorder
from espalier.planner.prices import VIEW, Prices
from espalier.planner.recording import Event, Op

_SEQUENCE, _ROWS, _STEPS = 8, 2, 12
_CONFIG = GPTConfig(vocab_size=64, max_positions=_SEQUENCE, layers=6, hidden=16, heads=2)


def _model(device: str) -> tuple[GPT, dict[str, torch.Tensor]]:
    with torch.device(device):
        net = GPT(_CONFIG)
        tokens = torch.zeros(_ROWS, _SEQUENCE, dtype=torch.int64)
    return net, {"input_ids": tokens, "labels": tokens}


def phases(mesh: Mesh) -> dict[str, float]:
    """Seconds of a step's phases, of the same small model on every rank, each by itself."""
    net, batch = _model("cpu")
    optimizer = torch.optim.AdamW(net.parameters(), foreach=None)
    engine = initialize(net, optimizer, Plan(), mesh=Mesh.single(tuple(Plan().axes)), max_grad_norm=1.0)
    took: dict[str, list[float]] = {}
    clock = time.thread_time  # it stands while others have the core
    for i in range(_STEPS + 2):
        level(mesh)
        now: list[tuple[str, float]] = []

        def phase(name: str, now: list[tuple[str, float]] = now) -> None:
            now.append((name, clock()))

        engine.accumulate(engine.cut(batch), phase=phase)
        engine.finish_gradients()
        phase("step")
        engine.step()
        phase("")
        if i < 2:
            continue
        spent: dict[str, float] = {}
        for (name, began), (_, ended) in pairwise(now):
            spent[name] = spent.get(name, 0.0) + ended - began
        for name, seconds in spent.items():
            took.setdefault(name, []).append(seconds)
    return {name: statistics.median(times) for name, times in took.items()}


def counts() -> Mapping[str, Counter[Event]]:
    """What such a step does, by phase: the engine's dry step."""
    net, batch = _model("meta")
    optimizer = torch.optim.AdamW(net.parameters())
    recorder = Recorder(net, optimizer, batch, {"max_grad_norm": 1.0})
    return recorder.whole(Cell(rows=_ROWS))


def overhead(prices: Prices, took: Mapping[str, float]) -> dict[str, float]:
    """Microseconds of the host an operation, in forward and backward, and of a step's update.

    Args:
        prices: with which operations are priced, of a cluster whose host takes no time.
        took: what :func:`phases` gave.
    """
    found = {}
    for phase, events in counts().items():
        ops = [(op, n) for op, n in events.items() if isinstance(op, Op)]
        done = sum(n * (VIEW if op.kind == "view" else 1.0) for op, n in ops)
        left = max(0.0, took[phase] - prices.of({phase: events}, phase).compute) * 1e6
        found[phase] = left if phase == "step" else left / done
    return found
