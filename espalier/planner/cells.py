"""Cells: what plans share that compute with the same local shapes, recorded once."""

from __future__ import annotations

import os
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from espalier.blocks import blocks, parameters_in
from espalier.comm.dry import know, values_of, without_data
from espalier.device import cores
from espalier.engine.dry import Shared, dry_engine, dry_run
from espalier.parallel import Plan
from espalier.parallel.experts import stacked, stacks
from espalier.parallel.plan import Offload
from espalier.planner.compose import NotComposed, Totals, composed, kind_of, one_list, pipe_rank, shallow
from espalier.planner.kept import Kept
from espalier.planner.recording import Counts, Event, NotAlike, Op, Recording, Sent, added, grown, record
from espalier.trees import leaves, tree_map

LEAST_ZERO = {"states": 0, "gradients": 1, "parameters": 3}
"""The least ZeRO stage with which a kind of state may be off the device, where several ranks share it."""
_SHALLOW = 2  # blocks; and one more tells what a block adds
_WORTH_A_PROCESS = 6  # recordings
_EXCHANGES = {
    "expert": ("all_to_all", "send", "receive"),
    "context": ("all_to_all", "send", "receive", "pass_on", "all_gather", "reduce_scatter"),
}
"""What is sent along axes while a model computes: of tokens, and of keys and values."""


@dataclass(frozen=True)
class Cell:
    """What changes the local shapes.

    Attributes:
        tensor, tensor_mode, depth, sequence_parallel, async_tensor_parallel, context, context_kind,
            recompute, precision, expert: as of a plan.
        rows: of a micro-batch on a rank.
    """

    tensor: int = 1
    sequence_parallel: bool = False
    context: int = 1
    recompute: str = "none"
    precision: str = "float32"
    rows: int = 1
    tensor_mode: str = "1d"
    depth: int = 1
    expert: int = 1
    context_kind: str = "auto"
    async_tensor_parallel: bool = False

    @property
    def plan(self) -> dict[str, Any]:
        """The arguments of a plan that it needs."""
        fields = asdict(self)
        del fields["rows"]
        return {**fields, "data": self.expert}


@dataclass(frozen=True)
class Costs:
    """What a micro-batch costs in a cell.

    Attributes:
        block: what one block does, by phase.
        rest: what all does that is in no block.
        block_bytes, rest_bytes: of parameters on a rank.
        block_kept, rest_kept: bytes that live between forward and backward.
        transient: bytes more that live at the fullest time before a block's backward pass is done.
        late: the same at the fullest time of the blocks' backward passes, where what is in no block has gone:
            beyond all that was kept, so it may be less than nothing.
        waiting: what a backward pass that is divided holds of gradients between its two parts, as a share of
            what is kept: of the outputs of products and norms, from which weights' gradients are taken.
        block_experts: bytes of a block's experts on a rank, which are among its parameters.
        block_casts: of what a block keeps, what autocast has made of parameters, of which ZeRO-3 keeps none.
    """

    block: Counts
    rest: Counts
    block_bytes: int
    rest_bytes: int
    block_kept: int
    rest_kept: int
    transient: int
    late: int
    waiting: float = 0.0
    block_experts: float = 0.0
    block_casts: int = 0

    def sent(self, micro_batches: int, layers: int) -> dict[str, float]:
        """Bytes that passes through so many blocks and the rest send, by axis."""
        by_axis: dict[str, float] = {}
        for sends, times in zip(self._sends, (micro_batches * layers, micro_batches), strict=True):
            for axis, size in sends:
                by_axis[axis] = by_axis.get(axis, 0.0) + float(times * size)
        return by_axis

    @cached_property
    def _sends(self) -> tuple[list[tuple[str, int]], ...]:
        """What a block and the rest send: axes, and bytes of all that are alike."""
        both = (
            [pair for events in counts.values() for pair in events.items()]
            for counts in (self.block, self.rest)
        )
        return tuple(
            [(event.axis, n * event.bytes) for event, n in pairs if isinstance(event, Sent)] for pairs in both
        )


class Order(NamedTuple):
    """What is done in a phase, in order.

    Attributes:
        before, block, after: before the blocks, in each of them, and after them.
        more: blocks that are in ``after``: the last ones may be unlike the others.
    """

    before: tuple[Event, ...]
    block: tuple[Event, ...] = ()
    after: tuple[Event, ...] = ()
    more: int = 0

    @staticmethod
    def of(less: Sequence[Event], more: Sequence[Event], depth: int) -> Order:
        """Of what so many blocks do, and one more; all as one where no block stands out.

        Some of what a block adds may stand apart from it: small gradients of all blocks are summed together.
        """
        few, many = ([event[:2] for event in events] for events in (less, more))
        longer = len(many) - len(few)
        for n in range(longer, longer * 3 // 4, -1):
            alike = "".join("=" if a == b else " " for a, b in zip(many, many[n:], strict=False))
            for known in range(depth, 0, -1):
                start = alike.find("=" * (n * known))
                if start >= 0:
                    block, end = tuple(more[start : start + n]), start + n * (known + 1)
                    return Order(tuple(more[:start]), block, tuple(more[end:]), depth - known)
        return Order(tuple(less))


class Update(NamedTuple):
    """What the data axis and the update cost at a ZeRO stage, per byte of parameters.

    Attributes:
        once, each: bytes sent a byte of parameters on two ranks, by operation: in a step, and for each
            micro-batch.
        moved: bytes that the update of a rank alone reads and writes.
        states: bytes of states and masters.
        work_once, work_each: operations on two ranks beside those of a rank alone, with ``size`` bytes of
            parameters: what is copied for it, in a step and for each micro-batch.
        work_step: the update's operations there.
        size: bytes of parameters of these.
        fixed: bytes sent on two ranks whatever the parameters, by operation, for each micro-batch: less than
            nothing, of chunks that stay gathered from forward to backward.
    """

    once: Mapping[str, float]
    each: Mapping[str, float]
    moved: float
    states: float
    work_once: Counter[Event]
    work_each: Counter[Event]
    work_step: Counter[Op]
    size: int
    fixed: Mapping[str, float] = {}


class Boundary(NamedTuple):
    """Bytes that a rank sends to another stage.

    Attributes:
        forward, backward: of a micro-batch: activations to the next stage, their gradients to the one before.
        once: in a step, of the first and of the last stage: gradients of parameters that both have.
    """

    forward: int
    backward: int
    once: int

    def sent(self, plan: Plan) -> list[int]:
        """Of each rank along the pipe axis in a step: its micro-batches' messages and what is sent once."""
        stages = plan.pipe * plan.stages_per_rank
        rank_of = [pipe_rank(plan, i) for i in range(stages)]
        sent = [0] * plan.pipe
        for stage, rank in enumerate(rank_of):
            if stage + 1 < stages and rank_of[stage + 1] != rank:
                sent[rank] += plan.accumulate * self.forward
            if stage and rank_of[stage - 1] != rank:
                sent[rank] += plan.accumulate * self.backward
        for rank in {rank_of[0], rank_of[-1]} if rank_of[0] != rank_of[-1] else ():
            sent[rank] += self.once
        return sent


class Away(NamedTuple):
    """What goes between the device and other places at a ZeRO stage, where all that may be is off the device.

    Attributes:
        once, each: bytes a byte of parameters, in ``"passes"`` or in the ``"step"``, by kind and way (see
            :class:`~espalier.parallel.data.residency.Carried`): in a step, and for each micro-batch.
        rests: bytes a byte of parameters that lie there between their uses, by kind.
        ranks: on so many it was recorded.
    """

    once: Mapping[tuple[str, str, str], float]
    each: Mapping[tuple[str, str, str], float]
    rests: Mapping[str, float]
    ranks: int

    def total(self, micro_batches: int) -> dict[tuple[str, str, str], float]:
        """Bytes a byte of parameters in a step of so many micro-batches."""
        return {key: n + micro_batches * self.each.get(key, 0.0) for key, n in self.once.items()}


class Refused(Exception):
    """The engine does not run a cell; says why."""


class _Wanted(NamedTuple):
    """A recording: its name among those of the model, the plan, rows, depth, and if the update is in it."""

    name: str
    plan: Plan
    rows: int
    depth: int
    steps: bool = False

    def __hash__(self) -> int:
        return hash(self.name)


def _output(event: Event) -> float:
    """Bytes of the output of a product with weights, or of a norm; 0 of all else."""
    if not isinstance(event, Op):
        return 0
    if event.kind == "matmul" and event.sizes[0] == 1:
        return event.sizes[1] * event.sizes[2] * int(getattr(torch, event.dtype).itemsize)
    return event.moved / 2 if "norm" in event.name else 0


def _of_cell(cell: Cell, depth: int) -> _Wanted:
    return _Wanted(f"{asdict(cell)}{depth}", Plan(**cell.plan), cell.rows * cell.expert, depth)


def _without_sums(run: Recording) -> Recording:
    """A run without sums of gradients along the axes of its cell: those of the data axis are these, too."""

    def is_sum(phase: str, event: Event) -> bool:
        if phase != "backward" or not isinstance(event, Sent):
            return False
        return event.op not in _EXCHANGES.get(event.axis, (event.op,))

    return replace(run, events=tuple(x for x in run.events if not is_sum(*x)))


def _of_zero(zero: int, precision: str, accumulate: int, depth: int) -> _Wanted:
    plan = Plan(data=2, zero=zero, precision=precision, accumulate=accumulate)
    return _Wanted(f"zero {zero} {precision} {accumulate} {depth}", plan, 2 * accumulate, depth, True)


def _of_away(zero: int, precision: str, accumulate: int, depth: int, ranks: int) -> _Wanted:
    kinds = [kind for kind, least in LEAST_ZERO.items() if ranks == 1 or zero >= least]
    offload = Offload.model_validate(dict.fromkeys(kinds, "host"))
    plan = Plan(data=ranks, zero=zero, precision=precision, accumulate=accumulate, offload=offload)
    name = f"away {zero if ranks > 1 else 0} {precision} {accumulate} {depth} {ranks}"
    return _Wanted(name, plan, ranks * accumulate, depth, True)


def _alone(precision: str, depth: int) -> _Wanted:
    return _Wanted(f"alone {precision} {depth}", Plan(precision=precision), 1, depth, True)


class Recorder:
    """Records a model's cells; kept in a folder for the next time.

    Args:
        model, optimizer, batch: as for :func:`~espalier.dry_run`.
        given: more for it.
        folder: for recordings; None: they are kept nowhere.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        batch: Any,
        given: Mapping[str, Any],
        folder: Path | None = None,
    ) -> None:
        batch = without_data(batch)
        self.model, self.optimizer, self.batch, self._options = model, optimizer, batch, dict(given)
        self.recorded = 0
        self.why = ""  # no pipeline can be composed
        self._list = ""
        listed = blocks(model)
        try:
            self._list = one_list(listed)
            if len(set(map(kind_of, listed.values()))) > 1:
                raise NotComposed("there are several kinds of blocks")
        except NotComposed as error:
            self.why = str(error)
        self.blocks = 0 if self.why else len(listed)
        if self.blocks <= _SHALLOW + 1:
            self.why = self.why or f"it has {self.blocks} blocks"
            self.blocks = 0
        one_row = tree_map(lambda x: _cut(x, 1), batch)
        values = [values_of(x) for x in leaves(batch, torch.Tensor)]
        self._store = Kept(folder, model, optimizer, one_row, values, self._options)
        self.experts = min((int(m.num_experts) for m in stacks(model).values()), default=0)  # type: ignore[arg-type]
        self._expert_sizes = self._count_experts(listed)
        self._costs: dict[Cell, Costs | Refused] = {}
        self._runs: dict[tuple[Cell, int], Recording] = {}
        self._recordings: dict[str, Recording] = {}
        self._boundaries: dict[Cell, Boundary] = {}
        self._shared = Shared(model)
        self._least_rows: int | None = None

    def _count_experts(self, listed: Mapping[str, nn.Module]) -> int:
        """Elements of a block's experts."""
        block = next(iter(listed.values()), None)
        own = {} if block is None else dict(block.named_parameters())
        return sum(own[name].numel() for name in ([] if block is None else stacked(block)))

    @cached_property
    def names(self) -> list[str]:
        """Of the blocks."""
        return [f"{self._list}.{i}" if self._list else str(i) for i in range(self.blocks)]

    def costs(self, cell: Cell) -> Costs:
        """What a cell costs.

        Raises:
            Refused: the engine does not run it.
        """
        if cell not in self._costs:
            try:
                self._costs[cell] = self._of(cell)
            except Refused as error:
                self._costs[cell] = error
        costs = self._costs[cell]
        if isinstance(costs, Refused):
            raise costs
        return costs

    def order(self, cell: Cell) -> dict[str, Order]:
        """What a micro-batch does in a cell whose costs are known, in order, by phase."""
        runs = self._both(cell)
        by_phase: dict[str, Order] = {}
        for phase in ("forward", "backward"):
            events = [[event for of, event in run.events if of == phase] for run in runs]
            by_phase[phase] = Order.of(events[0], events[-1], self._depths()[0])
        return by_phase

    def whole(self, cell: Cell) -> dict[str, Counter[Event]]:
        """All that a step of the whole model does on one rank, its update too, by phase.

        Raises:
            Refused: the engine does not run it.
        """
        depth = len(blocks(self.model))
        plan = Plan(**cell.plan)
        return self._kept(_Wanted(f"whole {asdict(cell)}", plan, cell.rows, depth, True)).counts()

    def _of(self, cell: Cell) -> Costs:
        whole = self._both(cell)
        shallow_run, deep = whole[0], whole[-1]
        if not self.blocks:
            kept = shallow_run.kept
            rest = shallow_run.counts()
            over = max(0, shallow_run.peak - shallow_run.held - kept)
            return Costs({}, rest, 0, shallow_run.parameters, 0, kept, over, over)
        try:
            block = added(shallow_run.counts(), deep.counts())
            rest = added(block, shallow_run.counts(), _SHALLOW)
        except NotAlike:
            raise Refused("a deeper model does not do more of the same") from None
        size, kept = deep.parameters - shallow_run.parameters, deep.kept - shallow_run.kept
        over = shallow_run.peak - shallow_run.held - shallow_run.kept
        more = deep.peak - deep.held - deep.kept
        # gradients of what is shallow are among it
        return Costs(
            block,
            rest,
            size,
            shallow_run.parameters - _SHALLOW * size,
            kept,
            shallow_run.kept - _SHALLOW * kept,
            max(0, over - _SHALLOW * (more - over)),
            (deep.later or deep.peak) - deep.held - deep.kept,
            sum(n * _output(op) for op, n in block.get("forward", {}).items()) / kept if kept > 0 else 0.0,
            self._expert_bytes(cell),
            self._block_casts(cell),
        )

    def _block_casts(self, cell: Cell) -> int:
        """Bytes that a block keeps of parameters that autocast has cast: what it keeps whatever the rows."""
        if Plan(**cell.plan).precision.autocast is None:
            return 0
        rows = self._recorded(cell)[0]
        shallow, deep = (
            2 * self._run(replace(cell, rows=rows), depth).kept
            - self._run(replace(cell, rows=2 * rows), depth).kept
            for depth in self._depths()
        )
        return max(0, deep - shallow)

    def _expert_bytes(self, cell: Cell) -> float:
        """Bytes of a block's experts on a rank."""
        if not self._expert_sizes:
            return 0.0
        low = Plan(**cell.plan).precision.parameters
        sizes = {p.element_size() for p in parameters_in(self.model)}
        each = max(sizes, default=4) if low is None else getattr(torch, low).itemsize
        return self._expert_sizes * each / (cell.expert * cell.tensor)

    def _depths(self) -> tuple[int, ...]:
        return (_SHALLOW, _SHALLOW + 1) if self.blocks else (0,)

    def _both(self, cell: Cell) -> list[Recording]:
        """Its recordings, of fewer rows where that is known to be the same."""
        try:
            return [self._at(cell, depth) for depth in self._depths()]
        except NotAlike:
            return [self._run(cell, depth) for depth in self._depths()]

    def _at(self, cell: Cell, depth: int) -> Recording:
        few = self._recorded(cell)
        if few == (cell.rows,):
            return self._run(cell, depth)
        less, more = (self._run(replace(cell, rows=n), depth) for n in few)
        return grown(less, more, cell.rows, (few[0], few[1]))

    def _recorded(self, cell: Cell) -> tuple[int, ...]:
        """Rows of the micro-batches that are recorded for a cell: its own, or some and twice as many.

        In 2D to 3D tensor modes what is cheapest to move hangs on the rows: more of them are another program.
        """
        if cell.rows <= 2 or cell.tensor_mode != "1d":
            return (cell.rows,)
        first = self._first(cell)
        return (cell.rows,) if cell.rows <= 2 * first else (first, 2 * first)

    def _first(self, cell: Cell) -> int:
        """The rows from which on more of them are the same program.

        Tensors of one row lie in memory as others don't: a program may copy those of two.
        """
        if self._least_rows is None:
            try:
                one, two = (
                    self._run(Cell(precision=cell.precision, rows=n), self._depths()[-1]) for n in (1, 2)
                )
                grown(one, two, 3)
                self._least_rows = 1
            except NotAlike:
                self._least_rows = 2
            except Refused:
                return 1
        return self._least_rows

    def _run(self, cell: Cell, depth: int) -> Recording:
        key = cell, depth
        if key not in self._runs:
            run = self._found(_of_cell(cell, depth))
            self._runs[key] = _without_sums(run)
        return self._runs[key]

    def _kept(self, wanted: _Wanted) -> Recording:
        if wanted.name not in self._recordings:
            self._recordings[wanted.name] = self._found(wanted)
        return self._recordings[wanted.name]

    def _found(self, wanted: _Wanted) -> Recording:
        if isinstance(table := self._store.get(wanted.name), list):
            return Recording.from_list(table)
        if isinstance(table, str):
            raise Refused(table)
        try:
            recording = self._dry(*wanted[1:])
        except Refused as error:
            self._store.put(wanted.name, str(error))
            raise
        self._store.put(wanted.name, recording.to_list())
        return recording

    def ahead(self, cells: Iterable[Cell], zeros: Iterable[int], precision: str) -> None:
        """Record what cells and ZeRO stages take, in as many processes as there are cores.

        Does nothing where little is missing, where recordings are kept nowhere, or where this process has
        threads, which a copy of it would lack. What a process cannot record is left to :meth:`costs`.

        Args:
            cells, zeros: for which :meth:`costs` and :meth:`update` will be asked.
            precision: of the ZeRO stages.
        """
        wanted = [
            _of_cell(replace(cell, rows=rows), depth)
            for cell in cells
            for depth in self._depths()
            for rows in self._recorded(cell)
        ]
        wanted += [_alone(precision, self._depths()[-1])]
        wanted += [_of_zero(zero, precision, m, self._depths()[-1]) for zero in zeros for m in (1, 2)]
        wanted += [_of_zero(3, precision, 1, _SHALLOW)] if self.blocks and 3 in zeros else []
        missing = [x for x in dict.fromkeys(wanted) if self._store.lacks(x.name)]
        # those that find the same things out are one process's
        groups: dict[Any, list[_Wanted]] = {}
        for x in missing:
            alike = tuple(x.plan.axes.items()), x.plan.sequence_parallel, x.rows if x.plan.tensor > 1 else 0
            groups.setdefault(alike, []).append(x)
        works = [partial(self._record, group) for group in groups.values()]
        self._in_processes(works, [len(group) for group in groups.values()])
        self.recorded += sum(not self._store.lacks(x.name) for x in missing)

    def boundary(self, cell: Cell) -> Boundary:
        """What ranks send between two stages that are cut at blocks.

        Raises:
            Refused: the engine does not run it.
        """
        cell = replace(cell, recompute="none", expert=1)  # which have nothing to do with it
        if cell not in self._boundaries:
            self._boundaries[cell] = self._sent_between(cell)
        return self._boundaries[cell]

    def _sent_between(self, cell: Cell) -> Boundary:
        name = f"boundary {asdict(cell)}"
        if (sent := self._store.get(name)) is None:
            plan = Plan(**cell.plan, pipe=2, accumulate=2, cuts=(self.names[1],))
            batch = tree_map(lambda x: _cut(x, 2 * cell.rows), self.batch)
            options = {"optimizer": self.optimizer, "shared": self._shared, **self._options}
            sent = []
            try:
                with shallow(self.model, self.optimizer, self._list, _SHALLOW):
                    for stage in (0, 1):
                        report = dry_run(self.model, plan, batch, coordinate={"pipe": stage}, **options)
                        entries = report.ledger.entries
                        sizes = Counter(x.bytes for x in entries if x.axis == "pipe" and x.op == "send")
                        sent.append(sum(n // 2 * size for size, n in sizes.items()))
                        once = sum(n % 2 * size for size, n in sizes.items())
            except (ValueError, NotImplementedError, NotComposed) as error:
                raise Refused(str(error)) from error
            self.recorded += 2
            sent.append(once)
            self._store.put(name, sent)
        return Boundary(*sent)

    def totals(self, plan: Plan, coordinate: Mapping[str, int]) -> Totals:
        """What a dry run of the whole tells of a rank (see :func:`~espalier.planner.composed`).

        Args:
            coordinate: the rank, by the names of the plan's axes.
        """
        name = self._totals_name(plan, coordinate)
        if (table := self._store.get(name)) is not None:
            return Totals.from_dict(plan, table)
        options = {"optimizer": self.optimizer, "shared": self._shared, **self._options}
        totals = composed(self.model, plan, self.batch, coordinate=coordinate, **options)
        self._store.put(name, totals.to_dict())
        return totals

    def totals_ahead(self, asked: Sequence[tuple[Plan, Mapping[str, int]]]) -> None:
        """Find totals out in as many processes as there are cores, as :meth:`ahead` records."""

        def find(plan: Plan, coordinate: Mapping[str, int]) -> None:
            with suppress(ValueError, NotImplementedError):  # told where it is asked for
                self.totals(plan, coordinate)

        missing = [x for x in asked if self._store.lacks(self._totals_name(*x))]
        self._in_processes([partial(find, *x) for x in missing], [_WORTH_A_PROCESS] * len(missing))

    def _totals_name(self, plan: Plan, coordinate: Mapping[str, int]) -> str:
        shapes = [tuple(x.shape) for x in leaves(self.batch, torch.Tensor)]
        return f"totals {plan.model_dump_json(exclude={'why'})} {dict(coordinate)} {shapes}"

    def _in_processes(self, works: Sequence[Callable[[], object]], sizes: Sequence[int]) -> None:
        """Do works, whose results are kept, in as many processes as there are cores, if that is worth it."""
        count = min(cores(), sum(sizes) // _WORTH_A_PROCESS, len(works))
        if count < 2 or threading.active_count() > 1:
            return
        shares: list[list[Callable[[], object]]] = [[] for _ in range(count)]
        taken = [0] * count
        for size, work in sorted(zip(sizes, works, strict=True), key=lambda x: -x[0]):
            least = taken.index(min(taken))
            shares[least].append(work)
            taken[least] += size
        others = [_apart(share) for share in shares[1:]]
        for work in shares[0]:
            work()
        for process in others:
            os.waitpid(process, 0)

    def _record(self, wanted: Iterable[_Wanted]) -> None:
        before = self.recorded
        for x in wanted:
            with suppress(Refused):
                self._kept(x)
        self.recorded = before

    def _dry(self, plan: Plan, rows: int, depth: int, steps: bool) -> Recording:
        batch = tree_map(lambda x: _cut(x, rows), self.batch)
        self.recorded += 1

        def run() -> Recording:
            options = {"optimizer": self.optimizer, "shared": self._shared, **self._options}
            engine = dry_engine(self.model, plan, batch, **options)
            return record(engine, batch, steps=steps, recalled=self._shared.recalled)

        try:
            if not depth:
                return run()
            with shallow(self.model, self.optimizer, self._list, depth):
                return run()
        except (ValueError, NotImplementedError, NotComposed) as error:
            raise Refused(str(error)) from error

    def update(self, zero: int, precision: str) -> Update:
        """What a ZeRO stage costs, by runs on two ranks.

        Raises:
            Refused: the engine does not run it.
        """
        depth = self._depths()[-1]
        runs = []
        for m in (1, 2):
            runs.append(self._kept(_of_zero(zero, precision, m, depth)))
        alone = self._kept(_alone(precision, depth))
        low = self._run(Cell(precision=precision), depth)
        size = max(low.parameters, 1)
        sent = [_sent(run) for run in runs]
        fixed = self._fixed(precision, sent[0], size) if zero == 3 and self.blocks else {}
        each = {op: (n - sent[0].get(op, 0) - fixed.get(op, 0.0)) / size for op, n in sent[1].items()}
        once = {op: (n - fixed.get(op, 0.0)) / size - each.get(op, 0.0) for op, n in sent[0].items()}
        micro, (one, two) = _work(low), map(_work, runs)
        work_each = two - one - micro
        step = Counter({e: n for e, n in runs[0].counts().get("step", {}).items() if isinstance(e, Op)})
        states = max(0, alone.held - size) / size
        moved = sum(getattr(e, "moved", 0) for phase, e in alone.events if phase == "step") / size
        return Update(once, each, moved, states, one - micro - work_each, work_each, step, size, fixed)

    def _fixed(self, precision: str, sent: Mapping[str, int], size: int) -> dict[str, float]:
        """What of the bytes that ZeRO-3 sends for a micro-batch is not in proportion to the parameters."""
        less = _sent(self._kept(_of_zero(3, precision, 1, _SHALLOW)))
        block = size - self._run(Cell(precision=precision), _SHALLOW).parameters
        if block <= 0:
            return {}
        return {op: n - (n - less[op]) * size / block for op, n in sent.items() if op == "all_gather"}

    def replicated(self, zero: int, precision: str) -> float:
        """Bytes a byte of parameters that are sent among groups which hold the same, by two groups of two.

        Raises:
            Refused: the engine does not run it.
        """
        depth = self._depths()[-1]
        size = max(self._run(Cell(precision=precision), depth).parameters, 1)
        plan = Plan(data=2, replicate=2, zero=zero, precision=precision)
        run = self._kept(_Wanted(f"replicated {zero} {precision} {depth}", plan, 4, depth, True))
        sent = sum(x.bytes for _, x in run.events if isinstance(x, Sent) and x.axis == "replicate")
        return sent / size

    def away(self, zero: int, precision: str, ranks: int) -> Away:
        """What offloading at a ZeRO stage carries, by runs on two ranks, or on one where there is no other.

        Raises:
            Refused: the engine does not run it.
        """
        depth, n = self._depths()[-1], min(ranks, 2)
        size = max(self._run(Cell(precision=precision), depth).parameters, 1)
        one, two = (_passes(self._kept(_of_away(zero, precision, m, depth, n))) for m in (1, 2))
        each = {key: (two[key] - one[key]) / size for key in dict.fromkeys((*one, *two))}
        once = {key: one[key] / size - x for key, x in each.items()}
        rests: dict[str, float] = {}
        for (part, kind, way), x in once.items():
            if part == "step" and way != "away":
                rests[kind] = rests.get(kind, 0.0) + x
        return Away(once, each, rests, n)


def _passes(run: Recording) -> Counter[tuple[str, str, str]]:
    """What goes between places, both passes as one."""
    counts: Counter[tuple[str, str, str]] = Counter()
    for (phase, kind, way), n in run.carried.items():
        counts["step" if phase == "step" else "passes", kind, way] += n
    return counts


def _cut(x: Any, rows: int) -> Any:
    """As many rows as a part of a batch has."""
    if not isinstance(x, torch.Tensor) or not x.ndim:
        return x
    values = values_of(x)
    part = x.new_empty((rows, *x.shape[1:]))
    return part if values is None else know(part, values[torch.arange(rows) % len(values)])


def _apart(works: Iterable[Callable[[], object]]) -> int:
    """Do works in another process; gives its number."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads that torch keeps, which sleep
        process = os.fork()
    if process:
        return process
    try:
        for work in works:
            work()
    finally:
        os._exit(0)


def _work(run: Recording) -> Counter[Event]:
    """What is bound by memory in forward and backward, and how often it is done."""
    counts: Counter[Event] = Counter()
    for phase, event in run.events:
        if phase != "step" and isinstance(event, Op) and event.kind == "other":
            counts[event] += 1
    return counts


def _sent(run: Recording) -> Counter[str]:
    sent: Counter[str] = Counter()
    for _, event in run.events:
        if isinstance(event, Sent):
            sent[event.op] += event.bytes
    return sent
