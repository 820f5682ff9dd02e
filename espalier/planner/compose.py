"""A deep model's dry run, composed of shallow ones.

Blocks that are alike cost alike: FLOPs, bytes of each collective, parameters, states and the peak of each
phase are affine in the number of blocks, and in the number of micro-batches once a pipeline is full. So a
few dry runs of a model that has lost most of its blocks tell those of the whole, to the byte. One more of
them is a check: where it is not what the others say, or where blocks are not alike, the whole is run.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import nn

from espalier.blocks import blocks, parameters_in
from espalier.engine.dry import DryReport, Line, Lined, Shared, dry_run
from espalier.parallel import Plan
from espalier.parallel.data.chunks import Filling, smallest_within
from espalier.parallel.data.residency import Carried
from espalier.torch_private import MODULES, own_modules
from espalier.trees import leaves, tree_map

_DEPTHS = ((2, 1, 2), (4, 1, 3))  # least blocks, and how many more those of the second run and the check have
# by which a block knows its place
_NUMBERS = frozenset({"layer_idx", "layer_id", "layer_number", "layer_index", "index", "idx"})
Sent = tuple[str, str]


@dataclass(frozen=True)
class Totals:
    """What one step costs one rank.

    Attributes:
        plan: the plan.
        rank: which rank, by the mesh axes' names.
        flops: floating-point operations.
        sent: bytes that the rank sends, by axis and operation.
        calls: the number of such collectives.
        parameter_bytes, state_bytes: held.
        peaks: the most bytes that live at once, by phase.
        slots, lines: see :class:`~espalier.engine.dry.DryReport`; where it is composed, the lines of a run.
        carried, away_bytes: see there, too.
        runs: dry runs that it took; 1: it is that of the whole model.
        why: why it was not composed; empty if it was.
    """

    plan: Plan
    rank: Mapping[str, int]
    flops: int
    sent: Mapping[Sent, int]
    calls: Mapping[Sent, int]
    parameter_bytes: int
    state_bytes: int
    peaks: Mapping[str, int]
    slots: Mapping[int, int] = field(default_factory=dict)
    lines: Sequence[Line] = ()
    carried: Mapping[Carried, int] = field(default_factory=dict)
    away_bytes: Mapping[str, int] = field(default_factory=dict)
    runs: int = 1
    why: str = ""

    @property
    def peak_bytes(self) -> int:
        """The most of all phases."""
        return max(self.peaks.values(), default=0)

    @staticmethod
    def of(report: DryReport, why: str = "") -> Totals:
        """Those of a dry run."""
        entries = report.ledger.by_op()
        return Totals(
            report.plan,
            report.rank,
            report.flops,
            {key: sent for key, (_, sent) in entries.items()},
            {key: calls for key, (calls, _) in entries.items()},
            report.parameter_bytes,
            report.state_bytes,
            dict(report.peaks),
            dict(report.slots),
            report.lines,
            dict(report.carried),
            dict(report.away_bytes),
            why=why,
        )

    def to_dict(self) -> dict[str, Any]:
        """All but the plan, as JSON takes it."""
        names = ("rank", "flops", "parameter_bytes", "state_bytes", "peaks", "away_bytes", "runs", "why")
        table = {name: getattr(self, name) for name in names}
        for name in ("sent", "calls", "carried"):
            table[name] = [[*key, n] for key, n in getattr(self, name).items()]
        return table | {"slots": list(self.slots.items()), "lines": self.lines}

    @staticmethod
    def from_dict(plan: Plan, table: Mapping[str, Any]) -> Totals:
        """Those of a plan, of what :meth:`to_dict` gave."""
        values = dict(table)
        for name in ("sent", "calls"):
            values[name] = {(axis, op): n for axis, op, n in table[name]}
        values["slots"] = dict(table["slots"])
        values["carried"] = {Carried(kind, place, way): n for kind, place, way, n in table["carried"]}
        values["lines"] = [[Lined(*x) for x in line] for line in table["lines"]]
        return Totals(plan, **values)

    def numbers(self) -> dict[Any, int]:
        """All counts, under keys; the peak of an update without the pieces that are copied for it.

        How many pieces have so many bytes follows from the depth as all else does. What of them is copied
        does not: as many as fit in a chunk.
        """
        counts: dict[Any, int] = {name: getattr(self, name) for name in _COUNTS}
        for name in _TABLES:
            counts.update({(name, key): n for key, n in getattr(self, name).items()})
        if _UPDATE in counts:
            counts[_UPDATE] -= _copied(self.slots, self.plan)
        return counts

    def slack(self, key: Any) -> int:
        """By how much a number that is composed may be off: what a whole model rounds once.

        With ZeRO-0 the last chunk has a flag for each parameter, and is padded to the number of ranks.
        """
        plan = self.plan
        ranks = plan.data * plan.replicate * plan.context
        return 16 * ranks if plan.zero == 0 and ranks > 2 and key[0] in ("sent", "peaks") else 0

    def differs(self, other: Totals) -> list[str]:
        """Where two are not the same, but for what is rounded (see :meth:`slack`)."""
        ours, theirs = self.numbers(), other.numbers()
        differing = []
        for key in sorted(ours.keys() | theirs.keys(), key=str):
            here, there = ours.get(key, 0), theirs.get(key, 0)
            if abs(here - there) > self.slack(key):
                differing.append(f"{_name(key)}: {here:,} and {there:,}")
        return differing


_COUNTS = ("flops", "parameter_bytes", "state_bytes")
_TABLES = ("sent", "calls", "peaks", "slots", "carried", "away_bytes")
_UPDATE = ("peaks", "step")


def _name(key: Any) -> str:
    """A count's, in words."""
    if isinstance(key, str):
        return key
    table, of = key
    return f"{table} {' '.join(of) if isinstance(of, tuple) else of}"


def _copied(slots: Mapping[int, int], plan: Plan) -> int:
    """Bytes of the pieces that are copied for an update."""
    return smallest_within(slots, plan.chunk_megabytes * 1e6)[1]


class NotComposed(Exception):
    """A step of this model and plan is not that of shallower ones; says why."""


def composed(
    model: nn.Module,
    plan: Plan | Mapping[str, Any],
    batch: Any,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    coordinate: tuple[int, ...] | Mapping[str, int] | None = None,
    **options: Any,
) -> Totals:
    """What :func:`~espalier.dry_run` tells, from dry runs of the model with few of its blocks.

    Args:
        model, plan, batch, optimizer, coordinate, options: as for :func:`~espalier.dry_run`. A pipeline is
            composed where ``Plan(cuts=...)`` names blocks.
    """
    plan = plan if isinstance(plan, Plan) else Plan.from_dict(plan)
    options["optimizer"] = optimizer
    options.setdefault("shared", Shared(model))
    try:
        family = _Family(model, plan, batch, coordinate, options)
        why = "the check found other numbers"
        for depths in _DEPTHS:
            totals = family.totals(*depths)
            if totals is not None:
                return totals
    except NotComposed as error:
        why = str(error)
    return Totals.of(dry_run(model, plan, batch, coordinate=coordinate, **options), why)


@dataclass
class _Family:
    """A model, and the same with fewer blocks and micro-batches.

    Attributes:
        layers: blocks of each stage.
        own: the numbers of the stages that the rank has.
    """

    model: nn.Module
    plan: Plan
    batch: Any
    coordinate: Any
    options: Mapping[str, Any]
    layers: list[int] = field(init=False)
    own: list[int] = field(init=False)
    _runs: dict[tuple[int, int], Totals] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        plan, every_block = self.plan, blocks(self.model)
        self.list = one_list(every_block)
        if isinstance(plan.recompute, dict):
            raise NotComposed("recompute names blocks")
        if any(any(map(str.isdigit, str(name))) for name in (self.options.get("layouts") or {})):
            raise NotComposed("layouts name blocks")
        if self.options.get("branches"):
            raise NotComposed("there are branches")
        if any(share.ratio != 1 for share in plan.offload.away.values()):
            raise NotComposed("a share of the chunks is off the device: which, all of them decide")
        kinds = set(map(kind_of, every_block.values()))
        if len(kinds) > 1:
            raise NotComposed(f"there are {len(kinds)} kinds of blocks")
        if plan.data * plan.replicate * plan.context > 1:
            self._check_chunks(next(iter(every_block.values())))
        number, self.own = len(every_block), [0]
        self.layers = [number]
        if plan.pipe > 1:
            self._divide(number)
        self.most = min(self.layers[i] for i in self.own)

    def _check_chunks(self, block: nn.Module) -> None:
        """Where chunks have several blocks, another moment may be the fullest one in a deeper model."""
        plan = self.plan
        low = plan.precision.parameters
        each = 0 if low is None else getattr(torch, low).itemsize
        size = sum(p.numel() * (each or p.element_size()) for p in parameters_in(block)) / plan.tensor
        if plan.zero < 3 and size < plan.chunk_megabytes * 1e6:
            raise NotComposed("several blocks go into one chunk (plan.chunk_megabytes)")
        if plan.zero == 3 and size * _DEPTHS[0][0] < plan.prefetch_megabytes * 1e6:
            raise NotComposed("several blocks are gathered ahead (plan.prefetch_megabytes)")

    def _divide(self, number: int) -> None:
        plan = self.plan
        names = [f"{self.list}.{i}" if self.list else str(i) for i in range(number)]
        if plan.cuts is None or not set(plan.cuts) <= set(names):
            raise NotComposed("stages do not begin at blocks that the plan names")
        if not isinstance(plan.schedule, str) or plan.schedule not in _FULL:
            raise NotComposed(
                "only peaks of naive, gpipe, 1f1b, zb-h1 and zbv are known to be affine so early"
            )
        starts = [0, *map(names.index, plan.cuts), number]
        self.layers = [b - a for a, b in pairwise(starts)]
        axes, at = plan.axes, self.coordinate
        here = (
            0 if at is None else at.get("pipe", 0) if isinstance(at, Mapping) else at[[*axes].index("pipe")]
        )
        self.own = [i for i in range(len(self.layers)) if pipe_rank(plan, i) == here]

    def totals(self, least: int, more: int, most: int) -> Totals | None:
        """The whole's, of runs with so many blocks at least, and more, by steps; None: the check fails."""
        few, step = self._micro_batches()
        micro = few, few + step
        shared = self.plan.data * self.plan.replicate * self.plan.context > 1
        first, every = (0, 1)
        if shared and self.most > least + most:
            first, every = self._rhythm(self._run(least, few), least)
        low = max(least, first)
        low += (self.most - low) % every
        # where chunks span blocks what grows slower at first is overtaken late
        high, check = low + more * every, low + (most if every == 1 else most + 1) * every
        if self.most <= check and few == self.plan.accumulate:
            raise NotComposed(
                "it is not deep" + (f": chunks are alike every {every} blocks" if every > 1 else "")
            )
        deep = self.most > check
        depths = (low, high) if deep else (self.most, self.most)
        runs = {(k, m): self._run(k, m) for k in depths for m in micro}
        grid = _Grid(depths, micro, runs)
        point = (check if deep else self.most, few + 2 * step)
        tested = self._run(*point)
        totals = grid.at(*point)
        if totals is None or tested.differs(_with(tested, totals)):
            return None
        numbers = grid.at(self.most, self.plan.accumulate)
        if numbers is None:
            return None
        return replace(_with(tested, numbers), plan=self.plan, runs=len(self._runs))

    def _rhythm(self, run: Totals, depth: int) -> tuple[int, int]:
        """From which depth on, and after how many blocks each time, blocks are put into chunks alike.

        Args:
            run: of so many blocks.
        """
        parts = [self._part(line, depth) for line in run.lines]
        beats = [part.beat(self.most, self.plan.chunk_megabytes) for part in parts]
        first = max((x for x, _ in beats), default=0)
        every = math.lcm(*(x for _, x in beats))
        if run.slots:
            late = [_late(parts, n, self.plan) for n in range(first, self.most + 1)]
            first += next((len(late) - i for i, x in enumerate(reversed(late)) if x != late[-1]), 0)
        return first, every

    def _part(self, line: Line, depth: int) -> _Part:
        """A line of a run of so many blocks, as one of any number of them."""
        numbers = [self._block_of(x.name) for x in line]
        own = list(dict.fromkeys(i for i in numbers if i is not None))
        if not own:
            return _Part(line, (), (), 0)
        start = numbers.index(own[0])
        end = len(numbers) - numbers[::-1].index(own[-1])
        one = [x for x, i in zip(line, numbers, strict=True) if i == own[0]]
        return _Part(line[:start], one, line[end:], len(own) - depth)

    def _block_of(self, parameter: str) -> str | None:
        """The place of the block that has a parameter of that name; None: none has it."""
        start = f"{self.list}." if self.list else ""
        place = parameter.removeprefix(start).partition(".")[0]
        return place if parameter.startswith(start) and place.isdigit() else None

    def _micro_batches(self) -> tuple[int, int]:
        """So many, from which on each more costs the same, and how many more at a time; 0: they are all."""
        plan, m = self.plan, self.plan.accumulate
        few, step = (3, 1) if plan.pipe == 1 else _FULL[str(plan.schedule)](plan.pipe)
        sizes = {x.shape[0] for x in _tensors(self.batch)}
        ranks = 1
        for name in plan.batch_axes:
            ranks *= plan.axes[name]
        even = all(n % (m * ranks) == 0 for n in sizes)
        if m <= few + 2 * step or (m - few) % step or not even:
            return m, 0
        return few, step

    def _run(self, depth: int, micro_batches: int) -> Totals:
        point = depth, micro_batches
        if point not in self._runs:
            self._runs[point] = self._dry(*point)
        return self._runs[point]

    def _dry(self, depth: int, micro_batches: int) -> Totals:
        layers = [1] * len(self.layers)
        for i in self.own:
            layers[i] = self.layers[i] - self.most + depth
        plan, m = self.plan, self.plan.accumulate
        change: dict[str, Any] = {"accumulate": micro_batches}
        if plan.pipe > 1:
            starts = [sum(layers[: i + 1]) for i in range(len(layers) - 1)]
            change["cuts"] = tuple(f"{self.list}.{i}" if self.list else str(i) for i in starts)

        def fewer(x: Any) -> Any:
            if not isinstance(x, torch.Tensor) or not x.ndim or micro_batches == m:
                return x
            return x[: x.shape[0] * micro_batches // m]

        batch = tree_map(fewer, self.batch)
        with shallow(self.model, self.options["optimizer"], self.list, sum(layers)):
            changed = plan.model_copy(update=change)
            return Totals.of(dry_run(self.model, changed, batch, coordinate=self.coordinate, **self.options))


class _Part(NamedTuple):
    """A line of parameters that go into chunks.

    Chunks span blocks: where those begin within a block hangs on all that goes into them before it. After
    some blocks it is as it was before.

    Attributes:
        head, block, tail: those before the first block's, of each block, and after the last block's.
        more: blocks that it has more than the model is deep.
    """

    head: Line
    block: Line
    tail: Line
    more: int

    def at(self, depth: int) -> list[Lined]:
        """The line of a model that is so deep."""
        return [*self.head, *(x for _ in range(depth + self.more) for x in self.block), *self.tail]

    def beat(self, most: int, megabytes: float) -> tuple[int, int]:
        """From which depth on, and after how many blocks each time, chunks begin at the same places."""
        if not self.block:
            return 0, 1
        filling = Filling(megabytes)
        for x in self.head:
            filling.place(x.kind, x.size)
        seen = {filling.state: 0}
        for done in range(1, most + self.more + 1):
            for x in self.block:
                filling.place(x.kind, x.size)
            before = seen.setdefault(filling.state, done)
            if before < done:
                return before - self.more, done - before
        return most, most


def _late(parts: Sequence[_Part], depth: int, plan: Plan) -> int:
    """Bytes more that live while an update is gathered than of pieces that are copied for it.

    Each chunk's rows are made before its copies are let go, and three chunks are under way.
    """
    chunks: list[list[Lined]] = []
    for part in parts:
        filling, groups = Filling(plan.chunk_megabytes), dict[int, list[Lined]]()
        for x in part.at(depth):
            groups.setdefault(filling.place(x.kind, x.size), []).append(x)
        chunks += groups.values()
    pieces = sorted(((x.slot, i) for i, chunk in enumerate(chunks) for x in chunk), key=lambda x: x[0])
    number, copied = smallest_within(Counter(slot for slot, _ in pieces), plan.chunk_megabytes * 1e6)
    freed = Counter[int]()
    for slot, i in pieces[:number]:
        freed[i] += slot
    rows = [sum(x.slot * x.ranks for x in chunk) for chunk in chunks]
    gone, most = 0, -copied
    for i in range(len(chunks)):
        most = max(most, sum(rows[max(0, i - 2) : i + 1]) - gone)
        gone += freed[i]
    return most


class _Grid:
    """Numbers at the corners of a rectangle of depths and micro-batches."""

    def __init__(
        self, depths: tuple[int, int], micro: tuple[int, int], runs: Mapping[tuple[int, int], Totals]
    ) -> None:
        self._depths, self._micro = depths, micro
        self._runs = {point: totals.numbers() for point, totals in runs.items()}

    def at(self, depth: int, micro_batches: int) -> dict[Any, int] | None:
        """The numbers elsewhere; None where these are none of integers."""
        (low, high), (few, more) = self._depths, self._micro
        x = Fraction(depth - low, high - low) if high > low else Fraction(0)
        y = Fraction(micro_batches - few, more - few) if more > few else Fraction(0)
        weights: dict[tuple[int, int], Fraction] = {}
        for k, a in ((low, 1 - x), (high, x)):
            for m, b in ((few, 1 - y), (more, y)):
                if a * b:
                    weights[k, m] = weights.get((k, m), Fraction(0)) + a * b
        numbers: dict[Any, int] = {}
        for key in set().union(*(self._runs[point].keys() for point in weights)):
            value = sum(w * self._runs[point].get(key, 0) for point, w in weights.items())
            if value.denominator != 1 or value < 0:
                return None
            numbers[key] = int(value)
        return numbers


def _with(like: Totals, numbers: Mapping[Any, int]) -> Totals:
    """The same rank's, with other numbers."""
    tables: dict[str, dict[Any, int]] = {name: {} for name in _TABLES}
    for key, n in numbers.items():
        if not isinstance(key, str):
            tables[key[0]][key[1]] = n
    if _UPDATE[1] in tables["peaks"]:
        tables["peaks"][_UPDATE[1]] += _copied(tables["slots"], like.plan)
    counts: dict[str, Any] = {name: numbers[name] for name in _COUNTS}
    return replace(like, **(counts | tables))


# micro-batches that fill a pipeline of p ranks, and steps in which more may come
_FULL = {
    "naive": lambda p: (3, 1),
    "gpipe": lambda p: (3, 1),
    "1f1b": lambda p: (p + 1, 1),
    "zb-h1": lambda p: (2 * p + 1, 1),
    "zbv": lambda p: (2 * p + 1, 1),
}


def pipe_rank(plan: Plan, stage: int) -> int:
    """Which rank of the pipe has a stage."""
    if plan.schedule == "zbv":
        return min(stage, 2 * plan.pipe - 1 - stage)
    return stage % plan.pipe


def _tensors(batch: Any) -> list[torch.Tensor]:
    return [x for x in leaves(batch, torch.Tensor) if x.ndim]


# ---- the same model with fewer blocks


def one_list(listed: Mapping[str, nn.Module]) -> str:
    """The name of the list that has all blocks."""
    lists = {name.rpartition(".")[0] for name in listed}
    places = [name.rpartition(".")[2] for name in listed]
    if len(lists) != 1 or places != [str(i) for i in range(len(places))]:
        raise NotComposed("blocks do not stand in one list")
    return lists.pop()


def kind_of(block: nn.Module) -> Any:
    """What is the same of blocks that are alike."""

    def plain(module: nn.Module) -> tuple[Any, ...]:
        said = ((k, x) for k, x in vars(module).items() if isinstance(x, int | float | str | bool))
        return tuple(sorted((k, x) for k, x in said if k not in _NUMBERS))

    parameters = ((name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in block.named_parameters())
    modules = ((name, type(m), m.extra_repr(), plain(m)) for name, m in block.named_modules())
    return tuple(parameters), tuple(modules)


@contextmanager
def shallow(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, name: str, number: int
) -> Iterator[None]:
    """While open, a model has so many blocks of its list, and an optimizer their parameters.

    Raises:
        NotComposed: blocks share parameters with what stays.
    """
    held = model.get_submodule(name)
    before = dict(own_modules(held))
    groups = [] if optimizer is None else optimizer.param_groups
    listed = [group["params"] for group in groups]
    try:
        vars(held)[MODULES] = dict(list(before.items())[:number])
        kept = {id(p) for p in parameters_in(model)}
        gone = {id(p) for m in list(before.values())[number:] if m is not None for p in parameters_in(m)}
        if kept & gone:
            raise NotComposed("blocks share parameters")
        for group, params in zip(groups, listed, strict=True):
            group["params"] = [p for p in params if id(p) not in gone]
        yield
    finally:
        vars(held)[MODULES] = before
        for group, params in zip(groups, listed, strict=True):
            group["params"] = params
