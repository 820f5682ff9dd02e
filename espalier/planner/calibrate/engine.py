"""What the engine's own steps take: beside their operations, on a model so small that little else is left,
and with them, on models whose products take most of the time."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch

from espalier.device import is_accelerator, synchronize
from espalier.engine.engine import Engine
from espalier.engine.start import initialize
from espalier.mesh import Mesh
from espalier.models import GPT, GPTConfig
from espalier.parallel import Plan
from espalier.planner.calibrate.timing import level, quiet
from espalier.planner.cells import Cell, Recorder
from espalier.planner.prices import VIEW, Prices
from espalier.planner.recording import Event, Op

_STEPS = 12


class Trial(NamedTuple):
    """A model and its batch."""

    config: GPTConfig
    rows: int

    def build(self, device: str) -> tuple[GPT, dict[str, torch.Tensor]]:
        """It, and a batch."""
        with torch.device(device):
            net = GPT(self.config)
            tokens = torch.zeros(self.rows, self.config.max_positions, dtype=torch.int64)
        return net, {"input_ids": tokens, "labels": tokens}

    def engine(self, plan: Plan, mesh: Mesh) -> tuple[Engine, dict[str, torch.Tensor]]:
        """An engine that trains it, and a batch."""
        net, batch = self.build("cpu")
        optimizer = torch.optim.AdamW(net.parameters(), foreach=None)
        return initialize(net, optimizer, plan, mesh=mesh, max_grad_norm=1.0), batch

    def recorder(self) -> Recorder:
        """What notes the dry steps of such engines."""
        net, batch = self.build("meta")
        return Recorder(net, torch.optim.AdamW(net.parameters()), batch, {"max_grad_norm": 1.0})


SMALL = Trial(GPTConfig(vocab_size=64, max_positions=8, layers=6, hidden=16, heads=2), 2)
LARGE = (
    Trial(GPTConfig(vocab_size=512, max_positions=64, layers=3, hidden=128, heads=4), 12),
    Trial(GPTConfig(vocab_size=768, max_positions=128, layers=2, hidden=256, heads=4), 6),
)
LARGE_THERE = (
    Trial(GPTConfig(vocab_size=8192, max_positions=1024, layers=4, hidden=1024, heads=16), 4),
    Trial(GPTConfig(vocab_size=8192, max_positions=512, layers=2, hidden=2048, heads=16), 8),
)


def large(device_type: str) -> tuple[Trial, ...]:
    """Models whose products take a device most of the time."""
    return LARGE_THERE if is_accelerator(device_type) else LARGE


def phases(mesh: Mesh, trial: Trial, *, by_host: bool = False) -> dict[str, float]:
    """Seconds of a step's phases, of the same model on every rank, each by itself.

    Args:
        by_host: an accelerator is not waited for: what its host takes to start it all.
    """
    device = mesh.device()
    there = is_accelerator(device)
    engine, batch = trial.engine(Plan(), Mesh.single(tuple(Plan().axes), mesh.device_type))
    took: dict[str, list[float]] = {}
    # the first stands while others have the core; an accelerator's backward pass has a thread of its own
    clock = time.perf_counter if there else time.thread_time
    for i in range(_STEPS + 2):
        synchronize(device)
        level(mesh)
        now: list[tuple[str, float]] = []

        def phase(name: str, now: list[tuple[str, float]] = now) -> None:
            if not by_host:
                synchronize(device)
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
    return {name: quiet(times).seconds for name, times in took.items()}


def visit(mesh: Mesh) -> list[dict[str, float]]:
    """:func:`phases` of the small model, by the host, and of the large ones."""
    trials = large(mesh.device_type)
    return [phases(mesh, SMALL, by_host=True), *(phases(mesh, trial) for trial in trials)]


def quietest(visits: Sequence[Sequence[dict[str, float]]]) -> list[dict[str, float]]:
    """Of each model the visit in which its step took least.

    What others do with a machine slows a core for a tenth of a second or for minutes, and shows in no clock:
    a virtual machine's core shares a real one.
    """
    return [min(of_one, key=lambda spent: sum(spent.values())) for of_one in zip(*visits, strict=True)]


def counts(trial: Trial) -> Mapping[str, Counter[Event]]:
    """What such a step does, by phase: the engine's dry step."""
    return trial.recorder().whole(Cell(rows=trial.rows))


def overhead(prices: Prices, took: Mapping[str, float]) -> dict[str, float]:
    """Microseconds of the host an operation, in forward and backward, and of a step's update.

    Args:
        prices: with which operations are priced, of a cluster whose host takes no time.
        took: what :func:`phases` gave of the small model, by the host where that runs ahead of the device.
    """
    waits = prices.cluster.device.waits
    by_phase = {}
    for phase, events in counts(SMALL).items():
        ops = [(op, n) for op, n in events.items() if isinstance(op, Op)]
        done = sum(n * (VIEW if op.kind == "view" else 1.0) for op, n in ops)
        computed = prices.of({phase: events}, phase).compute if waits or phase == "step" else 0.0
        left = max(0.0, took[phase] - computed) * 1e6
        by_phase[phase] = left if phase == "step" else left / done
    return by_phase


def share(prices: Prices, trial: Trial, took: Mapping[str, float]) -> float:
    """What operations reach in a step, of what they reach by themselves, one after the other on warm memory.

    Args:
        prices: with which a step is priced, with the host's time where the device waits for it.
        took: what :func:`phases` gave of that model.
    """
    spent = [prices.of({phase: events}, phase) for phase, events in counts(trial).items() if phase != "step"]
    alone, idle = sum(x.compute for x in spent), sum(x.idle for x in spent)
    real = sum(seconds for phase, seconds in took.items() if phase != "step") - idle
    return min(1.0, alone / real) if real > 0 else 1.0
