"""A prediction beside real steps, term by term: time, memory, and what is sent."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from espalier.comm import all_reduce, ledger
from espalier.comm.collectives import sum_whole
from espalier.comm.waits import Waits, waiting
from espalier.device import is_accelerator, keep_busy, synchronize
from espalier.engine.engine import Engine
from espalier.parallel.plan import PLACES
from espalier.parallel.schedules import Timeline
from espalier.planner.prediction import Prediction, plan_table
from espalier.texts import in_columns
from espalier.torch_private import TorchDispatchMode, raw

_WARM, _LOOKED_INTO = 2, 3
_HELD = ("parameters", "gradients", "states")
_LIVING = "activations and transient"
_OTHER = "(several axes)"


@dataclass(frozen=True)
class Measured:
    """What steps of a plan took here.

    Attributes:
        seconds: the median of the steps, each the slowest rank's.
        scatter: how far apart the middle half of them is, as a share.
        terms: what they were spent on, by the names that a :class:`~espalier.planner.Prediction` has, on the
            rank that waits least. ``"compute"`` is time within torch's operations, on an accelerator what its
            stream does behind work that keeps it busy until the host is ahead; ``"host"`` is what is left.
        beside: seconds, by axis, in which something was under way while that rank went on: at most so much
            of what is sent was hidden.
        memory: bytes on the fullest rank, by kind, at the fullest time.
        sent: bytes that a rank sends in a step, the most along each axis, and to and from host and disk.
        steps: how many were timed.
        timeline: of the last step's pipeline, where there is one.
    """

    seconds: float
    scatter: float
    terms: Mapping[str, float]
    beside: Mapping[str, float]
    memory: Mapping[str, float]
    sent: Mapping[str, float]
    steps: int
    timeline: Timeline | None = None

    @property
    def bytes(self) -> float:
        """On the fullest rank."""
        return sum(self.memory.values())


def measure(engine: Engine, batch: Callable[[], Sequence[Any]], steps: int) -> Measured:
    """Train, and see where the time goes; all ranks call this.

    Args:
        engine: that trains; what it trains on is waited for around each step, and by nobody within.
        batch: gives the parts of the next one, as :meth:`~espalier.engine.engine.Engine.cut` does.
        steps: that are timed, after some that are not, and before some that are looked into.

    Raises:
        ValueError: there are no steps.
    """
    mesh, device = engine.mesh, engine.mesh.device()
    if steps < 1:
        raise ValueError(f"--steps {steps}: expected 1 or more")
    for _ in range(_WARM):
        _step(engine, batch())
    took: list[float] = []
    updates: list[float] = []
    waits: list[tuple[dict[str, float], dict[str, float]]] = []
    with waiting(device) as clock:
        for _ in range(steps):
            all_of = batch()
            _meet(engine)
            clock.clear()
            began = time.perf_counter()
            updated = _step(engine, all_of, clock)
            clock.settle()
            took.append(time.perf_counter() - began)
            updates.append(updated())
            waits.append((dict(clock.waited), dict(clock.beside)))
        timeline = engine.timeline() if engine.plan.pipe > 1 else None
        if is_accelerator(device):
            computed = _computed_there(engine, batch, clock, statistics.median(took))
        else:
            computed = _computed(engine, batch, clock)
    held, sent = _memory(engine, batch())
    names = [*mesh.names, ",".join(mesh.names)]
    own = [
        *took,
        computed,
        statistics.median(updates),
        *(statistics.median(x.get(n, 0.0) for x, _ in waits) for n in names),
        *(statistics.median(x.get(n, 0.0) for _, x in waits) for n in names),
    ]
    times = _of_all(engine, own)
    rest = steps + 2
    slowest = [max(row[i] for row in times) for i in range(steps)]
    row = min(times, key=lambda row: sum(row[rest : rest + len(names)]))
    memory = max(_of_all(engine, [*held.values()]), key=sum)
    ways = (*names, _OTHER, *PLACES[1:])
    of_ranks = _of_all(engine, [sent.get(n, 0.0) for n in ways])
    by_axis = [max(column) for column in zip(*of_ranks, strict=True)]
    seconds = statistics.median(slowest)
    waited = _named(engine, names, row[rest : rest + len(names)])
    waited["bubble"] = waited.pop("pipe", 0.0)
    compute, update = row[steps : steps + 2]
    host = max(0.0, seconds - compute - update - sum(waited.values()))
    low, middle, high = statistics.quantiles(slowest, n=4) if steps > 1 else (seconds,) * 3
    terms = {"compute": compute, "host": host, **waited, "update": update}
    return Measured(
        seconds,
        (high - low) / middle,
        {name: x for name, x in terms.items() if x},
        _named(engine, names, row[rest + len(names) :]),
        dict(zip(held, memory, strict=True)),
        {n: x for n, x in zip(ways, by_axis, strict=True) if x},
        steps,
        timeline,
    )


def _meet(engine: Engine) -> None:
    """Let all ranks be here, with nothing left to do."""
    synchronize(engine.mesh.device())
    for axis in range(engine.mesh.ndim):
        all_reduce(torch.zeros(1), engine.mesh, axis)


def _step(engine: Engine, parts: Sequence[Any], clock: Waits | None = None) -> Callable[[], float]:
    """A step; what says the seconds of its update that were not waited."""
    engine.accumulate(parts)
    engine.finish_gradients()
    return (clock or Waits()).spent(engine.step)


class _Computed(TorchDispatchMode):
    """Takes the time of torch's operations, but for those that are part of what is sent.

    Attributes:
        seconds: of them all.
    """

    looks_on = True

    def __init__(self, clock: Waits) -> None:
        super().__init__()
        self.seconds, self._clock = 0.0, clock

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with raw():
            began = time.perf_counter()
            out = func(*args, **(kwargs or {}))
            if not self._clock.now:
                self.seconds += time.perf_counter() - began
        return out


def _computed(engine: Engine, batch: Callable[[], Sequence[Any]], clock: Waits) -> float:
    """Seconds of a step's forward and backward passes within torch's operations."""
    took = []
    for _ in range(_LOOKED_INTO):
        parts = batch()
        with _Computed(clock) as mode:
            engine.accumulate(parts)
            engine.finish_gradients()
        engine.step()
        took.append(mode.seconds)
    return min(took)


def _computed_there(
    engine: Engine, batch: Callable[[], Sequence[Any]], clock: Waits, seconds: float
) -> float:
    """The same of an accelerator, whose stream is kept busy while the host asks for it all, for so long."""

    def passes(parts: Sequence[Any]) -> None:
        engine.accumulate(parts)
        engine.finish_gradients()

    took = []
    for _ in range(_LOOKED_INTO):
        parts = batch()
        _meet(engine)
        clock.clear()
        keep_busy(engine.mesh.device(), seconds)
        spent = clock.spent(partial(passes, parts))
        engine.step()
        clock.settle()
        took.append(spent())
    return min(took)


def _memory(engine: Engine, parts: Sequence[Any]) -> tuple[dict[str, float], dict[str, float]]:
    """What this rank holds at its fullest, by kind, and what it sends, by axis."""
    watch, held = engine.watch(), dict.fromkeys((*_HELD, _LIVING), 0.0)
    carried = engine.carried()
    with ledger(engine.mesh) as book, watch:
        engine.accumulate(parts)
        engine.finish_gradients()
        for kind in engine.memory().kinds:
            name = "states" if kind.name == "masters" else kind.name
            if name in held:
                held[name] += kind.bytes.get("device", 0)
        engine.step()
    held[_LIVING] = max(0.0, watch.peak - sum(held.values()))
    sent: dict[str, float] = {}
    names = {*engine.mesh.names, ",".join(engine.mesh.names)}
    for axis, n in book.by_axis().items():
        axis = axis if axis in names else _OTHER
        sent[axis] = sent.get(axis, 0.0) + n
    for way, n in (engine.carried() - carried).items():
        sent[way.place] = sent.get(way.place, 0.0) + n
    return held, sent


def _of_all(engine: Engine, own: Sequence[float]) -> list[list[float]]:
    """The numbers of all ranks, each a row."""
    mesh = engine.mesh
    table = torch.zeros(mesh.size(), len(own), dtype=torch.float64)
    table[mesh.ranks.index(mesh.world_rank)] = torch.tensor(own, dtype=torch.float64)
    rows: list[list[float]] = sum_whole(table, mesh).tolist()
    return rows


def _named(engine: Engine, names: Sequence[str], times: Sequence[float]) -> dict[str, float]:
    """Seconds by axis; what goes among all ranks at once is the data axis' matter, as norms are."""
    seconds: dict[str, float] = {}
    for name, x in zip(names, times, strict=True):
        name = name if name in engine.mesh.names and name != "replicate" else "data"
        if x:
            seconds[name] = seconds.get(name, 0.0) + x
    return seconds


@dataclass(frozen=True)
class Comparison:
    """A plan's prediction beside what it took.

    Attributes:
        predicted, measured: both.
        dry: bytes on the fullest rank by a whole dry run, if there was one.
    """

    predicted: Prediction
    measured: Measured
    dry: int | None = None

    @property
    def error(self) -> float:
        """Of the predicted step's time, as a share of the real one's."""
        return self.predicted.seconds / self.measured.seconds - 1

    def rows(self) -> dict[str, list[tuple[str, float, float]]]:
        """Name, predicted and measured number, of ``"time"``, ``"memory"`` and ``"sent"``; the sum last."""
        predicted, real = self.predicted, self.measured
        time_ = _beside(predicted.terms, real.terms)
        hidden = _beside(predicted.beside, real.beside)
        memory = {n: x for n, x in predicted.memory.items() if n in _HELD}
        memory[_LIVING] = predicted.bytes - sum(memory.values())
        return {
            "time": [
                *time_,
                ("step", predicted.seconds, real.seconds),
                *((f"({name}, beside the program)", x, y) for name, x, y in hidden),
            ],
            "memory": [
                *_beside(memory, real.memory),
                ("fullest rank", predicted.bytes, real.bytes),
                *([] if self.dry is None else [("(the same, run dry)", float(self.dry), real.bytes)]),
            ],
            "sent": _beside(predicted.sent, real.sent),
        }

    def to_dict(self) -> dict[str, Any]:
        """As JSON takes it."""
        real = {k: x for k, x in vars(self.measured).items() if k != "timeline"}
        rows = {
            key: [{"name": name, "predicted": x, "measured": y} for name, x, y in table]
            for key, table in self.rows().items()
        }
        return {
            "plan": plan_table(self.predicted.plan),
            "error": self.error,
            "predicted": self.predicted.to_dict(),
            "measured": real,
            **rows,
        }

    def lines(self) -> list[str]:
        """Tables, as text."""
        real, lines = self.measured, []
        for key, unit, scale in (("time", "ms", 1e3), ("memory", "MB", 1e-6), ("sent", "MB", 1e-6)):
            table = [(_HEADS[key], f"predicted {unit}", f"measured {unit}", "off by")]
            for name, x, y in self.rows()[key]:
                table.append((name, f"{x * scale:.4g}", f"{y * scale:.4g}", off_by(x, y)))
            lines += [*in_columns(table, "<>"), ""]
        lines.append(
            f"{real.steps} steps, whose middle half is {real.scatter:.1%} apart; predicted ± "
            f"{self.predicted.error:.0%}. Terms are those of the rank that waits least."
        )
        return lines


_HEADS = {"time": "a step's time", "memory": "memory", "sent": "sent by a rank in a step"}


def off_by(predicted: float, measured: float) -> str:
    """By how much, as a share of what is real."""
    if not predicted and measured:
        return "not predicted"
    return f"{predicted / measured - 1:+.1%}" if measured else ""


def _beside(predicted: Mapping[str, float], real: Mapping[str, float]) -> list[tuple[str, float, float]]:
    return [
        (name, predicted.get(name, 0.0), real.get(name, 0.0)) for name in dict.fromkeys((*predicted, *real))
    ]
