"""What operations and collectives take on a cluster."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from espalier.planner.cluster import Cluster, Level
from espalier.planner.recording import Counts, Op, Sent

_TILES = ((256, 128), (128, 128), (128, 64), (64, 64))  # of matrix products, rows and columns
_UNITS = 132  # that work on tiles at once, of today's devices
_HALVES = ("bfloat16", "float16")
_EIGHT = "float8"  # of which no rates are known: priced as bfloat16
_FORWARD, _BACKWARD = 11, 14  # bytes a score that attention written out reads and writes
_LATE = 0.3  # of what the host takes longer than the device for single operations is waited for
VIEW = 0.25  # of the host's time for an operation is a view's
HIDDEN = 0.9  # of the computation behind which what is sent can hide
_LIKE = {"broadcast": "send", "reduce": "send", "scatter": "send", "receive": "", "pass_on": "send"}
_PROLOGUE = 64  # columns of the contracted dim that filling a pipeline of loads takes


@dataclass(frozen=True)
class Spent:
    """Seconds of one rank.

    Attributes:
        compute: of the device.
        host: that the host takes to start it all.
        sent: of collectives that are waited for, by axis.
        idle: in which the device has nothing to do for want of the host.
        hidden: of messages that go on while the program computes, by axis.
    """

    compute: float = 0.0
    host: float = 0.0
    sent: Mapping[str, float] = field(default_factory=dict)
    idle: float = 0.0
    hidden: Mapping[str, float] = field(default_factory=dict)

    @property
    def alone(self) -> float:
        """Where what is sent along the axes is waited for."""
        return self.compute + self.idle + sum(self.sent.values())

    def plus(self, other: Spent, times: float = 1.0) -> Spent:
        """With the other's, so many times."""
        sent, hidden = (_sum(*both, times) for both in ((self.sent, other.sent), (self.hidden, other.hidden)))
        compute, host = self.compute + times * other.compute, self.host + times * other.host
        return Spent(compute, host, sent, self.idle + times * other.idle, hidden)

    def under(self, host: float, compute: float) -> Spent:
        """The same where the host and the device take so many times as long."""
        return replace(self, compute=self.compute * compute, host=self.host * host, idle=self.idle * host)


def _sum(a: Mapping[str, float], b: Mapping[str, float], times: float) -> dict[str, float]:
    return {key: a.get(key, 0.0) + times * b.get(key, 0.0) for key in dict.fromkeys((*a, *b))}


class Stage(NamedTuple):
    """What a stage spends on a micro-batch, and the seconds of both phases."""

    forward: Spent
    backward: Spent
    took: tuple[float, float]

    @staticmethod
    def of(forward: Spent, backward: Spent) -> Stage:
        """Of what both phases spend."""
        return Stage(forward, backward, (forward.alone, backward.alone))


def spent_on(stages: Iterable[Stage], micro_batches: int) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds that a rank's stages spend on a step by term, but for the bubble; and what hides under them."""
    terms, hidden = {"compute": 0.0, "host": 0.0}, dict[str, float]()
    for x in (phase for stage in stages for phase in (stage.forward, stage.backward)):
        terms["compute"] += micro_batches * x.compute
        terms["host"] += micro_batches * x.idle
        terms, hidden = _sum(terms, x.sent, micro_batches), _sum(hidden, x.hidden, micro_batches)
    return terms, hidden


class Prices:
    """What things cost on a cluster.

    Args:
        cluster: its devices and links.
        axes: sizes of a mesh's axes, outermost first: an axis' ranks stand as far apart as the axes inside of
            it have ranks.
    """

    def __init__(self, cluster: Cluster, axes: Mapping[str, int]) -> None:
        self.cluster, self.axes = cluster, dict(axes)
        self._known: dict[Op, float] = {}
        device = cluster.device
        self._products = {dtype: Grid(rows, 3) for dtype, rows in device.products.items()}
        self._attentions = {
            (dtype, backward): Grid(rows, 2, int(backward))
            for dtype, rows in device.attentions.items()
            for backward in (False, True)
        }
        self._curves = {name: [(x, y) for x, y in rows] for name, rows in device.operations.items()}

    def op(self, op: Op) -> float:
        """Seconds of the device."""
        if op not in self._known:
            self._known[op] = self._op(op)
        return self._known[op]

    def _op(self, op: Op) -> float:
        device = self.cluster.device
        if op.kind in ("view", "other"):
            return self.moved(op.name, op.moved) * device.unfused if op.kind == "other" else 0.0
        memory = op.moved / (device.bandwidth_gbs * 1e9 * device.memory_share)
        measured = self._rate(op)
        if measured is not None:
            return op.flops / (measured * device.in_steps)
        peak = self.peak(op.dtype)
        if op.kind == "attention" and device.attention == "math":
            batches, heads, sequence, _ = op.sizes
            written = batches * heads * sequence**2 * (_BACKWARD if "backward" in op.name else _FORWARD)
            memory += written / (device.bandwidth_gbs * 1e9 * device.memory_share)
            return memory + 2 * op.flops / (peak * device.ceiling)  # it knows of no causal half
        ceiling = device.ceiling
        if op.kind == "attention":
            ceiling = device.attention_ceiling or ceiling
            sequence, width = op.sizes[-2], op.sizes[-1]
            share = sequence / (sequence + 512) * (1.0 if width % 8 == 0 else 0.5)
            share *= 0.8 if "backward" in op.name else 1.0
        else:
            share = self._share(op)
        return max(op.flops / (peak * ceiling * share), memory)

    def moved(self, name: str, nbytes: float) -> float:
        """Seconds of an operation that is bound by memory, and reads and writes so many bytes."""
        device = self.cluster.device
        if self._curves:
            names = name, name.rstrip("_"), "add"
            curve = next(self._curves[x] for x in names if x in self._curves)
            return between(curve, nbytes) * 1e-6 / device.in_steps
        return nbytes / (device.bandwidth_gbs * 1e9 * device.memory_share)

    def _rate(self, op: Op) -> float | None:
        """Operations a second of a product or of attention of these sizes; None: it was not measured."""
        if op.kind == "attention":
            grid = self._attentions.get((op.dtype, "backward" in op.name))
            return grid.at(*op.sizes[-2:]) * 1e9 if grid else None
        grid = self._products.get("bfloat16" if op.dtype.startswith(_EIGHT) else op.dtype)
        return grid.at(*op.sizes[1:]) * 1e9 if grid else None

    def peak(self, dtype: str) -> float:
        """Operations a second; of 16 bits where a device has one kind of them, and of 8, those of that."""
        tflops = self.cluster.device.tflops
        halves = _HALVES if dtype in _HALVES or dtype.startswith(_EIGHT) else ()
        kinds = (dtype, *halves, "float32", *tflops)
        return next(tflops[kind] for kind in kinds if kind in tflops) * 1e12

    def _share(self, op: Op) -> float:
        """The part of what large matrix products reach that one of these sizes does."""
        b, m, n, k = op.sizes
        if not b * m * n * k:
            return 1.0
        best = 0.0
        for rows, columns in _TILES:
            tiles = b * math.ceil(m / rows) * math.ceil(n / columns)
            waves = math.ceil(tiles / _UNITS)
            filled = b * m * n / (waves * _UNITS * rows * columns)
            best = max(best, filled * (rows * columns / (256 * 128)) ** 0.1)
        aligned = 1.0 if m % 8 == n % 8 == k % 8 == 0 else 0.5
        return max(0.02, best * k / (k + _PROLOGUE) * aligned)

    def sent(self, op: str, axis: str, sent: float, calls: float = 1.0) -> float:
        """Seconds of so many calls that send so many bytes in all along an axis, alone on the links."""
        level, n, inside = self._level(axis)
        if n == 1 or not calls:
            return 0.0
        if measured := self._measured(level, op, n, sent / calls):
            return calls * measured
        bandwidth = level.bandwidth_gbs * level.efficiency * 1e9
        # of a group's ranks in one node one at a time sends to the next node: over the links of them all
        inner = [x for x in self.cluster.level if x.ranks < level.ranks]
        if inside > 1 and inner:
            within = inner[-1]
            bandwidth = min(bandwidth * inside, within.bandwidth_gbs * within.efficiency * 1e9)
        rounds = {"all_reduce": 2, "send": 1, "receive": 0, "pass_on": 0}.get(op, 1) * math.ceil(math.log2(n))
        return calls * max(rounds, 1) * level.latency_us * 1e-6 + sent / bandwidth

    def hidden(self, event: Sent) -> float:
        """Seconds of a message in which the program computes; none where the ranks' cores carry it, too."""
        if not event.under or self.cluster.device.waits:
            return 0.0
        meanwhile = sum(self.op(op) / messages for op, messages in event.under)
        takes = self.sent(event.op, event.axis, event.bytes)
        return self._level(event.axis)[0].beside * min(takes, HIDDEN * meanwhile)

    def _level(self, axis: str) -> tuple[Level, int, int]:
        """The outermost links that an axis crosses; its ranks, and those of them inside."""
        names = list(self.axes)
        n = self.axes.get(axis, 1) if axis in self.axes else math.prod(self.axes.values())
        stride = math.prod(self.axes[x] for x in names[names.index(axis) + 1 :]) if axis in names else 1
        level, inside = self.cluster.span(n, stride)
        return level, n, inside

    @staticmethod
    def _measured(level: Level, op: str, ranks: int, sent: float) -> float | None:
        """Seconds of a call by what was measured with the nearest number of ranks; None: nothing was."""
        rows = level.collectives.get(_LIKE.get(op, op))
        if not rows:
            return None
        near = min((row[0] for row in rows), key=lambda n: abs(math.log(n / ranks)))
        return between([(size, took) for n, size, took in rows if n == near], sent) * 1e-6

    def issue(self, phase: str) -> float:
        """Seconds of the host for an operation of a phase."""
        device = self.cluster.device
        backward = device.backward_us_per_op if phase == "backward" else None
        return (device.host_us_per_op if backward is None else backward) * 1e-6

    def of(self, counts: Counts, phase: str) -> Spent:
        """All that is counted in a phase.

        A host that runs ahead is waited for where it takes longer in all, and, for it cannot be ahead by any
        number of operations, in part where it takes longer for one.
        """
        device, each = self.cluster.device, self.issue(phase)
        compute = host = late = 0.0
        sent: dict[str, float] = {}
        beside: dict[str, float] = {}
        for event, n in counts.get(phase, {}).items():
            if isinstance(event, Sent):
                took, hides = self.sent(event.op, event.axis, event.bytes * n, n), n * self.hidden(event)
                sent[event.axis] = sent.get(event.axis, 0.0) + took - hides
                if hides:
                    beside[event.axis] = beside.get(event.axis, 0.0) + hides
                host += n * each
            else:
                takes, starts = self.op(event), each * (VIEW if event.kind == "view" else 1.0)
                compute += n * takes
                host += n * starts
                late += n * max(0.0, starts - takes)
        idle = host if device.waits else _LATE * late + (1 - _LATE) * max(0.0, host - compute)
        return Spent(compute, host, sent, idle, beside)


# ---- measured points, and what lies between them


def between(points: Sequence[tuple[float, float]], size: float) -> float:
    """What a size takes, of rows of sizes and times: on straight lines of their logarithms.

    Below the first it takes as much as the first; above the last as many times more as it is larger.
    """
    sizes = [x for x, _ in points]
    i = bisect_left(sizes, size)
    if i == 0:
        return points[0][1]
    if i == len(points):
        last, took = points[-1]
        return took * size / last
    (low, less), (high, more) = points[i - 1], points[i]
    if low <= 0 or less <= 0 or more <= 0:
        return less + (more - less) * (size - low) / (high - low)
    along = math.log(size / low) / math.log(high / low)
    return less * (more / less) ** along


class Grid:
    """Rates that were measured at every mix of some sizes.

    Args:
        rows: sizes, and a rate of them.
        axes: how many sizes a row has.
        column: which number after them is the rate.
    """

    def __init__(self, rows: Sequence[Sequence[float]], axes: int, column: int = 0) -> None:
        self._sizes = [sorted({row[i] for row in rows}) for i in range(axes)]
        self._rates = {tuple(row[:axes]): row[axes + column] for row in rows}

    def at(self, *sizes: float) -> float:
        """The rate of other sizes, linear in all logarithms; outside of the grid that of its edge."""
        ends: list[tuple[tuple[float, float], ...]] = []
        for known, size in zip(self._sizes, sizes, strict=True):
            within = min(max(size, known[0]), known[-1])
            i = max(1, bisect_left(known, within))
            if len(known) == 1:
                ends.append(((known[0], 1.0),))
                continue
            low, high = known[i - 1], known[i]
            along = math.log(within / low) / math.log(high / low)
            ends.append(((low, 1 - along), (high, along)))
        total = 0.0
        for corner in itertools.product(*ends):
            weight = math.prod(w for _, w in corner)
            if weight:
                total += weight * math.log(self._rates[tuple(x for x, _ in corner)])
        return math.exp(total)
