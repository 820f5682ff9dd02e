"""The search: which mixes there are for a model on a cluster, what each takes, and which is best."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from pydantic import model_validator

from espalier.later import uncollected
from espalier.parallel import Plan
from espalier.parallel.fused import has_host_kernel
from espalier.parallel.plan import Offload, Precision, known_as
from espalier.parallel.schedules import Costs as Times
from espalier.parallel.schedules import Schedule, Timeline, find_schedule, live, simulate
from espalier.planner.cells import Away, Cell, Costs, Recorder, Refused, Update
from espalier.planner.cluster import Cluster
from espalier.planner.compose import pipe_rank
from espalier.planner.events import Step, step_of
from espalier.planner.memory import NOTHING, carried, memory_by_rank, share_here, ways
from espalier.planner.prediction import (
    DIVIDED,
    SEARCHED,
    UNPRICED,
    Found,
    Prediction,
    kinds_of,
    plan_table,
)
from espalier.planner.prices import HIDDEN, Prices, Spent, Stage, spent_on
from espalier.planner.recording import Op
from espalier.planner.space import Space, divisors
from espalier.texts import few
from espalier.trees import leaves

_TIMELINES = 10  # of the best are simulated, schedule by schedule
_CLOSER = 4  # kinds of the best that are tried otherwise: with experts on fewer ranks, asynchronously


class _Given(Plan):
    """Values of a plan, each by itself: if they go together is seen when plans are made of them."""

    @model_validator(mode="after")
    def _fits(self) -> _Given:
        return self


class Search:
    """The search for one model, batch and cluster.

    Args:
        recorder: of the model.
        cluster: where it runs.
        base: a plan whose values hold where nothing is searched: precision, clip, offload.
        ranks: how many of the cluster's are used; all by default.
        fixed: values of the plan that are not searched.
        memory: the share of a device's memory that may be taken.
    """

    def __init__(
        self,
        recorder: Recorder,
        cluster: Cluster,
        base: Plan,
        *,
        ranks: int | None = None,
        fixed: Mapping[str, Any] | None = None,
        memory: float = 0.92,
    ) -> None:
        self._recorder, self.cluster, self._base = recorder, cluster, base
        self.ranks = cluster.ranks if ranks is None else ranks
        if self.ranks > cluster.ranks:
            raise ValueError(f"--ranks {ranks}: the cluster has {cluster.ranks}.")
        if self.ranks < 1:
            raise ValueError(f"ranks = {ranks}: expected 1 or more, of the cluster's {cluster.ranks}.")
        if not 0 < memory <= 1:
            raise ValueError(f"--memory {memory}: expected a share of the device's memory, as 0.92")
        self._share = memory
        self._fixed, self.limit = known_as(fixed or {}), memory * cluster.memory_bytes  # bytes of a rank
        _Given(**self._fixed)
        sizes = {x.shape[0] for x in leaves(recorder.batch, torch.Tensor) if x.ndim}
        if not sizes:
            raise ValueError("The batch has no tensors: expected its inputs and labels, on the meta device.")
        if len(sizes) != 1:
            raise ValueError(f"The batch's tensors have {sorted(sizes)} rows: expected as many in each.")
        self._batch = sizes.pop()
        self.refused: dict[str, str] = {}
        self.space = Space(recorder, cluster, base, self._batch, self.ranks, self._fixed, self.refused)
        self._prices: dict[tuple[tuple[str, int], ...], Prices] = {}
        self._spent: dict[Any, Spent] = {}
        self._lives: dict[Any, Sequence[float]] = {}
        self._updates: dict[int, Update | None] = {}
        self._aways: dict[tuple[int, int], Away | None] = {}
        self._has_kernel = has_host_kernel(recorder.optimizer)
        self._precision = base.precision.compute
        self._schedules: dict[tuple[Any, ...], Schedule | None] = {}
        self._stages: dict[Any, Stage] = {}
        self._cut_layers: dict[tuple[tuple[str, ...] | None, int], list[int]] = {}
        self._ranks_of: dict[tuple[bool, int, int], list[int]] = {}
        self._spreads = {
            "compute": max(cluster.source(f"device.{x}").spread for x in ("tflops", "ceiling")),
            "host": cluster.source("device.host_us_per_op").spread,
            "bubble": 0.05,
            "update": cluster.source("device.memory_share").spread,
            "offload": max(cluster.source(x).spread for x in ("host", "disk")),
        }
        self._link = cluster.source("level").spread

    def again(
        self, cluster: Cluster | None = None, ranks: int | None = None, precision: Precision | None = None
    ) -> Search:
        """The same search on another cluster, with other ranks, or in another precision."""
        return Search(
            self._recorder,
            cluster or self.cluster,
            self._base if precision is None else self._base.model_copy(update={"precision": precision}),
            ranks=ranks or self.ranks,
            fixed=self._fixed,
            memory=self._share,
        )

    # ---- what one takes

    def _layers_of(self, plan: Plan, stages: int) -> list[int]:
        """Blocks of each of a plan's stages: by its cuts where they name blocks."""
        key = plan.cuts, stages
        if key not in self._cut_layers:
            depth, names = self._recorder.blocks, self._recorder.names
            if plan.cuts is None or not set(plan.cuts) <= set(names):
                self._cut_layers[key] = self.space.layers(stages) if stages > 1 else [depth]
            else:
                starts = [0, *map(names.index, plan.cuts), depth]
                self._cut_layers[key] = [b - a for a, b in pairwise(starts)]
        return self._cut_layers[key]

    def _pipe_ranks(self, plan: Plan, stages: int) -> list[int]:
        """The rank of each of a plan's stages."""
        key = plan.schedule == "zbv", plan.pipe, stages
        if key not in self._ranks_of:
            self._ranks_of[key] = [pipe_rank(plan, i) for i in range(stages)]
        return self._ranks_of[key]

    def of(self, plan: Plan) -> Prediction:
        """What one plan takes, its pipeline done action by action, whether it would be searched or not.

        Raises:
            ValueError: it has what is not priced, or the engine does not run it; says what.
        """
        table = plan_table(plan)
        unpriced = [key for key in UNPRICED if key in table]
        if unpriced:
            raise ValueError(f"plan.{unpriced[0]} = {table[unpriced[0]]}: the planner does not price it yet.")
        rows, left = divmod(self._batch, plan.data * plan.replicate * plan.accumulate)
        if left or not rows:
            raise ValueError(
                f"A batch of {self._batch} rows is not divided evenly by data = {plan.data}, replicate = "
                f"{plan.replicate} and accumulate = {plan.accumulate}: change train.batch_size or the plan."
            )
        prediction = self.score(plan, rows)
        if prediction is None:
            why = "; ".join(f"{key}: {reason}" for key, reason in self.refused.items())
            raise ValueError(f"The planner cannot price this plan: {why}")
        return self.simulated(prediction)

    def score(self, plan: Plan, rows: int) -> Prediction | None:
        """What a plan takes; None where the engine does not run it."""
        cell = self._cell(plan, rows)
        try:
            costs = self._recorder.costs(cell)
        except Refused as error:
            self.refused.setdefault(f"tensor {plan.tensor}, {plan.recompute}, {rows} rows", str(error))
            return None
        update = self._update(plan.zero)
        if update is None:
            return None
        prices = self._priced(plan)
        stages = plan.pipe * plan.stages_per_rank
        layers = self._layers_of(plan, stages)
        # the head is at the end; looking tokens up costs next to nothing
        kinds = {n: self._stage(prices, cell, costs, n, False) for n in set(layers)}
        spent = [kinds[n] for n in layers]
        spent[-1] = self._stage(prices, cell, costs, layers[-1], True)
        if shares := [x for kind in kinds_of(plan) if (x := self.cluster.device.kinds.get(kind))]:
            host, compute = (math.prod(x) for x in zip(*shares, strict=True))
            spent = [Stage.of(x.forward.under(host, compute), x.backward.under(host, compute)) for x in spent]
        return self._whole(plan, rows, costs, update, prices, layers, spent)

    def _cell(self, plan: Plan, rows: int) -> Cell:
        sequence, recompute = bool(plan.sequence_parallel), str(plan.recompute)
        mode = (plan.tensor_mode, plan.depth) if plan.tensor > 1 else ("1d", 1)
        kind = plan.context_kind if plan.context > 1 else "auto"
        shapes = plan.tensor, sequence, plan.context
        asynchronous = bool(plan.async_tensor_parallel and plan.tensor > 1)
        return Cell(*shapes, recompute, self._precision, rows, *mode, plan.expert, kind, asynchronous)

    def _whole(
        self,
        plan: Plan,
        rows: int,
        costs: Costs,
        update: Update,
        prices: Prices,
        layers: Sequence[int],
        spent: Sequence[Stage],
    ) -> Prediction | None:
        p, m, ranks = plan.pipe, plan.accumulate, plan.data * plan.context
        took = tuple(stage.took for stage in spent)
        rank_of = self._pipe_ranks(plan, len(layers))
        each = [0.0] * p  # of a rank and a micro-batch
        for rank, (f, b) in zip(rank_of, took, strict=True):
            each[rank] += f + b
        busiest = max(range(p), key=lambda rank: each[rank])
        pipeline = self._closed(plan, each)
        # parameters of the fullest rank
        deep = [0] * p
        for rank, n in zip(rank_of, layers, strict=True):
            deep[rank] += n
        sizes = [n * float(costs.block_bytes) for n in deep]
        ends = {rank_of[0], rank_of[-1]}
        for rank in ends:
            sizes[rank] += costs.rest_bytes / len(ends)
        size = max(sizes)
        of_experts = costs.block_experts * deep[sizes.index(size)]
        sent, seconds, calls, cut = self._summed(plan, size, of_experts, prices, update)
        backward = sum(b for i, (_, b) in enumerate(took) if rank_of[i] == busiest)
        passes = m * each[busiest], each[busiest] - backward, backward
        along = self._exposed(plan, seconds, calls, *passes)
        exposed = sum(waited for _, waited in along.values())
        hidden = sum(n for n, _ in along.values()) - exposed
        updated = self._updated(prices, update, size, cut, plan.zero)
        moved = NOTHING
        if plan.offload.away:
            away = self._away(plan)
            if away is None:
                return None
            behind = HIDDEN * m * each[busiest]
            given = {"size": size, "ranks": cut, "moved": update.moved, "behind": behind, "updated": updated}
            moved = carried(plan, away, prices, **given, has_kernel=self._has_kernel)
            updated *= moved.update
        # a ceiling that was not measured is one of whole steps, in which these copies are
        if ranks > 1 and self.cluster.device.operations:
            copied = (
                prices.of({"": update.work_once}, "").alone + m * prices.of({"": update.work_each}, "").alone
            )
            exposed += copied * size / update.size
        own = [stage for rank, stage in zip(rank_of, spent, strict=True) if rank == busiest]
        terms, under = spent_on(own, m)
        terms["bubble"] = max(0.0, pipeline - m * each[busiest])
        terms["data"] = exposed
        terms["update"] = updated
        terms["offload"] = moved.waited
        live = self._live(plan, costs.waiting)
        by_rank = memory_by_rank(plan, costs, update, deep, rank_of[-1], sizes, cut, live, self._has_kernel)
        memory = max(by_rank, key=lambda kinds: sum(kinds.values()))
        total = pipeline + exposed + updated + moved.waited
        among = {"replicate": sent.pop("replicate")} if plan.replicate > 1 else {}
        bytes_sent = {"data": sum(sent.values()), **among, **moved.sent}
        for axis, more in costs.sent(m, max(layers)).items():
            bytes_sent[axis] = bytes_sent.get(axis, 0.0) + more
        shown = {key: n for key, n in terms.items() if n}
        return Prediction(
            plan,
            rows,
            total,
            shown,
            memory,
            bytes_sent,
            self._holds(sum(memory.values()), moved.rests),
            self._error(shown, total),
            took,
            by_rank,
            {key: x for key, x in {**under, "data": hidden, "offload": moved.hidden}.items() if x > 0},
            moved.rests,
            along,
        )

    def _exposed(
        self,
        plan: Plan,
        seconds: Mapping[str, float],
        calls: float,
        all_passes: float,
        forward: float,
        backward: float,
    ) -> dict[str, tuple[float, float]]:
        """The seconds along the data axis, and those of them that are waited for, as passes don't hide them.

        Args:
            all_passes: of a step; the others are of one micro-batch.
        """
        behind = HIDDEN * (all_passes if plan.zero == 3 else backward)
        early = sum(n for op, n in seconds.items() if plan.zero == 3 or op != "all_gather")
        late = 0.0 if plan.zero == 3 else seconds.get("all_gather", 0.0)
        beside = self.cluster.span(max(plan.data * plan.context, 1), plan.tensor)[0].beside
        # what was updated comes under the next forward pass, but on CPUs; the first of it is waited for
        ahead = 0.0 if self.cluster.device.waits or not plan.zero else HIDDEN * forward
        parts = {"sums": (early, behind), "gathers": (late, ahead)}
        return {
            name: (n, max(n - beside * min(n, under), n / calls)) for name, (n, under) in parts.items() if n
        }

    def _holds(self, device: float, away: Mapping[str, float]) -> bool:
        """Whether so much fits, on the device and off it; a CPU's memory is its host's."""
        if self.cluster.device.waits:
            device += away.get("host", 0.0)
        rooms = all(n <= self._share * self.cluster.room(place, self.ranks) for place, n in away.items())
        return device <= self.limit and rooms

    def _summed(
        self, plan: Plan, size: float, of_experts: float, prices: Prices, update: Update
    ) -> tuple[dict[str, float], dict[str, float], float, float]:
        """What is sent along the data axis for so many bytes of parameters, some of them of experts.

        Those are summed by fewer ranks, which stand further apart.

        Returns:
            bytes and seconds by operation; calls; and how many ranks share what is cut, on average.
        """
        ranks, experts = plan.data * plan.context, min(size, of_experts) if plan.expert > 1 else 0.0
        every = prices if plan.expert == 1 else self._priced(plan.model_copy(update={"expert": 1}))
        sums = [(size - experts, ranks, every), (experts, ranks // plan.expert, prices)]
        sent, seconds = dict.fromkeys(update.once, 0.0), dict.fromkeys(update.once, 0.0)
        calls = max(1.0, size / (plan.chunk_megabytes * 1e6))
        for n, among, along in sums:
            for op, once in update.once.items() if n else ():
                bytes_each = n * (once + plan.accumulate * update.each[op])
                # where experts lie apart, what stays gathered is taken as a share
                share = 1 / plan.tensor if plan.expert == 1 else n / update.size
                bytes_each += plan.accumulate * update.fixed.get(op, 0.0) * share
                part = 2 * (among - 1) / among * max(0.0, bytes_each)
                sent[op] += part
                if part > n * 1e-3:
                    seconds[op] += along.sent(op, "data", part, max(1.0, calls * n / size))
        cut = size / sum(n / among for n, among, _ in sums)
        if plan.replicate > 1:
            among = plan.replicate
            part = (
                size / cut * 4 * (among - 1) / among * self._recorder.replicated(plan.zero, self._precision)
            )
            sent["replicate"] = part
            seconds["replicate"] = prices.sent("all_reduce", "replicate", part, calls)
        return sent, seconds, calls, cut

    def _updated(self, prices: Prices, update: Update, size: float, ranks: float, zero: int) -> float:
        """Seconds of the update of so many bytes of parameters, of which ZeRO gives each rank its part."""
        device = self.cluster.device
        step = device.step_us * 1e-6
        if not device.operations:
            moved = size * update.moved / (ranks if zero else 1)
            return step + moved / (device.bandwidth_gbs * 1e9 * device.memory_share)
        for op, n in update.work_step.items():
            copies = "copy" in op.name
            if not (copies and ranks == 1):
                cut = 2 / ranks if zero and not copies else 1.0
                step += n * prices.moved(op.name, op.moved) * cut * size / update.size
        return step

    def _live(self, plan: Plan, waiting: float) -> Sequence[float]:
        """Micro-batches that each rank keeps at its fullest, as the schedules' ``live`` counts them."""
        p, m, v = plan.pipe, plan.accumulate, plan.stages_per_rank
        if plan.schedule in DIVIDED:
            # a block that is recomputed has its backward pass whole
            more = waiting if plan.recompute == "none" else 0.0
            schedule = self._schedule(plan, min(m, 3 * p)) if p > 1 else None
            if schedule is None:
                return [min(m, p)] * p
            key = schedule.kind, p, schedule.micro_batches, v, more
            if key not in self._lives:
                self._lives[key] = live(schedule, more)
            return self._lives[key]
        if v > 1:
            return [min(m, ((v - 1) * p + 2 * (p - 1 - rank) + 1) / v) for rank in range(p)]
        return [min(m, p - rank) for rank in range(p)]

    def _schedule(self, plan: Plan, micro: int) -> Schedule | None:
        key = plan.schedule, plan.pipe, micro, plan.stages_per_rank
        if key not in self._schedules:
            try:
                self._schedules[key] = find_schedule(*key)
            except ValueError as error:
                self.refused.setdefault(f"{plan.schedule}, pipe {plan.pipe}", str(error))
                self._schedules[key] = None
        return self._schedules[key]

    def _closed(self, plan: Plan, each: Sequence[float]) -> float:
        """Seconds of a pipeline by its closed form; the best ones are simulated."""
        p, m = plan.pipe, plan.accumulate
        busiest, mean = max(each), sum(each) / p
        if p == 1:
            return m * busiest
        fill = {"1f1b": 1.0, "zb-h1": 1 / 3, "zbv": 0.0}.get(str(plan.schedule), 1 / plan.stages_per_rank)
        return m * busiest + (p - 1) * mean * fill

    def timeline(self, found: Prediction, micro_batches: int) -> Timeline | None:
        """A pipeline's step, done action by action.

        Args:
            found: its stages' times are taken.
            micro_batches: that it has, whatever the plan's are.

        Returns:
            None where the plan has no pipeline, or there is no such schedule.
        """
        return self._actions(found, micro_batches) if found.plan.pipe > 1 else None

    def _actions(self, found: Prediction, micro_batches: int) -> Timeline | None:
        plan = found.plan
        schedule = self._schedule(plan, micro_batches)
        if schedule is None:
            return None
        split = plan.schedule in DIVIDED
        forward = [f for f, _ in found.stage_seconds]
        inputs = [b / 2 if split else b for _, b in found.stage_seconds]
        weights = [b / 2 if split else 0.0 for _, b in found.stage_seconds]
        level, _ = self.cluster.span(plan.pipe, plan.world_size // plan.pipe)
        return simulate(schedule, Times(forward, inputs, weights, latency=level.latency_us * 1e-6))

    def step(self, found: Prediction, micro_batches: int) -> Step | None:
        """A step, event by event.

        Args:
            micro_batches: that it has, whatever the plan's are.

        Returns:
            None where there is no such schedule.
        """
        timeline = self._actions(found, micro_batches)
        if timeline is None:
            return None
        layers = self._layers_of(found.plan, found.plan.pipe * found.plan.stages_per_rank)
        order = self._recorder.order(self._cell(found.plan, found.rows))
        return step_of(found, timeline, layers, order, self._priced(found.plan))

    def simulated(self, found: Prediction) -> Prediction:
        """The same with its pipeline's time from the schedule itself, done action by action."""
        p, m = found.plan.pipe, found.plan.accumulate
        few = min(m, 3 * p)
        steps = [few] if few == m else [few, few + p]
        timelines = [self.timeline(found, n) for n in steps]
        took = [timeline.step_time for timeline in timelines if timeline is not None]
        if len(took) < len(steps):
            return found
        pipeline = took[0] + (took[-1] - took[0]) / p * (m - few)

        rest = found.seconds - sum(found.terms.get(name, 0.0) for name in ("data", "update", "offload"))
        bubble = max(0.0, found.terms.get("bubble", 0.0) + pipeline - rest)

        terms, sent = {**found.terms, "bubble": bubble}, {**found.sent, **self._between(found)}
        return replace(found, seconds=found.seconds + pipeline - rest, terms=terms, sent=sent)

    def _between(self, found: Prediction) -> dict[str, float]:
        """Bytes along the pipe axis, of the rank that sends the most; nothing where they are not known."""
        if found.plan.pipe == 1 or not self._recorder.blocks:
            return {}
        try:
            boundary = self._recorder.boundary(self._cell(found.plan, found.rows))
        except Refused:
            return {}
        return {"pipe": float(max(boundary.sent(found.plan)))}

    def _error(self, terms: Mapping[str, float], total: float) -> float:
        """The spreads of the constants, each by its share of the time."""
        squares = [(self._spreads.get(name, self._link) * x / total) ** 2 for name, x in terms.items()]
        return math.sqrt(sum(squares))

    def _priced(self, plan: Plan) -> Prices:
        key = tuple(plan.axes.items())
        if key not in self._prices:
            self._prices[key] = Prices(self.cluster, plan.axes)
        return self._prices[key]

    def _stage(self, prices: Prices, cell: Cell, costs: Costs, blocks: int, last: bool) -> Stage:
        inner = tuple((n, x) for n, x in prices.axes.items() if n not in ("data", "pipe"))
        key = cell, blocks, last, inner
        if key not in self._stages:
            both = []
            for phase in _PHASES:
                names = "block", "rest"
                for part in names:
                    if (cell, part, phase, inner) not in self._spent:
                        spent = prices.of(getattr(costs, part), phase)
                        self._spent[cell, part, phase, inner] = spent
                block, rest = (self._spent[cell, part, phase, inner] for part in names)
                both.append(Spent().plus(block, blocks).plus(rest, float(last)))
            forward, backward = both
            self._stages[key] = Stage.of(forward, backward)
        return self._stages[key]

    def _update(self, zero: int) -> Update | None:
        if zero not in self._updates:
            try:
                self._updates[zero] = self._recorder.update(zero, self._precision)
            except Refused as error:
                self.refused[f"zero {zero}"] = str(error)
                self._updates[zero] = None
        return self._updates[zero]

    def _away(self, plan: Plan) -> Away | None:
        """What offloading at a plan's ZeRO stage carries; None where the engine does not do it."""
        ranks = min(plan.data * plan.context, 2)
        key = plan.zero if ranks > 1 else 0, ranks
        if key not in self._aways:
            try:
                self._aways[key] = self._recorder.away(key[0], self._precision, ranks)
            except Refused as error:
                self.refused[f"offload at zero {plan.zero}"] = str(error)
                self._aways[key] = None
        return self._aways[key]

    # ---- the best

    @uncollected()
    def run(self) -> Found:
        """Score all, simulate the best."""
        candidates = list(self.space.candidates())
        cells = dict.fromkeys(self._cell(plan, rows) for plan, rows in candidates)
        self._recorder.ahead(cells, {plan.zero for plan, _ in candidates}, self._precision)
        scored = self._scored(candidates)
        if not scored:
            alike: dict[str, list[str]] = {}
            for key, reason in self.refused.items():
                alike.setdefault(reason, []).append(key)
            why = "; ".join(
                reason.rstrip(".") if len(alike) == 1 else f"{few(keys, 1)}: {reason.rstrip('.')}"
                for reason, keys in list(alike.items())[:4]
            )
            fixed = ", ".join(f"{key} = {value}" for key, value in self._fixed.items())
            raise ValueError(
                f"No plan uses {self.ranks} ranks for a batch of {self._batch} rows"
                f"{f', where {fixed}' if fixed else ''}{': ' + why if why else ''}. "
                f"Change {'the ranks, the batch, or what is fixed' if fixed else 'the ranks or the batch'}."
            )
        scored += self._asynchronous(scored)
        scored += self._fewer_experts_apart(scored)
        scored += self._offloaded(scored)
        fit = sorted((x for x in scored if x.fits), key=lambda x: x.seconds)
        best = sorted(map(self.simulated, fit[:_TIMELINES]), key=lambda x: x.seconds) + fit[_TIMELINES:]
        least = None if fit else min(scored, key=lambda x: x.bytes)
        plain = [self._plain(scored, zero) for zero in (0, 3)]
        tried = [key for key in SEARCHED if len({str(getattr(x.plan, key)) for x in scored}) > 1]
        return Found(
            self.cluster,
            self._batch,
            best,
            [x for x in plain if x is not None],
            least,
            len(scored),
            self._recorder.recorded,
            self.refused,
            frozenset(self._fixed),
            self.limit,
            frozenset(tried),
            *self._work(scored),
        )

    def _work(self, scored: Sequence[Prediction]) -> tuple[float, float]:
        """Floating-point operations of the plain model's step, and a device's peak in most of them's dtype.

        As the cell that cuts the model least has them; of a causal attention's none is left out.
        """
        x = min(scored, key=lambda x: (x.plan.context, x.plan.expert, x.plan.tensor, x.plan.depth, x.rows))
        costs, count = self._recorder.costs(self._cell(x.plan, x.rows)), Counter[str]()
        for events, times in ((costs.block, self._recorder.blocks), (costs.rest, 1)):
            for event, n in events.get("forward", {}).items():
                if isinstance(event, Op):
                    count[event.dtype] += n * times * event.flops * (2 if event.is_causal else 1)
        share = x.rows / (self._batch * x.plan.tensor * x.plan.context)
        dtype = max(count, key=lambda dtype: count[dtype], default="float32")
        return 3 * sum(count.values()) / share, self._priced(x.plan).peak(dtype)

    def _asynchronous(self, scored: Sequence[Prediction]) -> list[Prediction]:
        """Plans whose tensor ranks multiply while sequences travel, where that may be the best, or nearly.

        All that it can save is what is waited for along the tensor axis.
        """
        if "async_tensor_parallel" in self._fixed:
            return []
        fit = [x for x in scored if x.fits]
        best = min((x.seconds for x in fit), default=math.inf)
        able = [x for x in fit if x.plan.sequence_parallel and x.plan.tensor > 1 and x.plan.context == 1]
        able = [x for x in able if x.seconds - x.terms.get("tensor", 0.0) < best]
        by_cell: dict[Cell, list[Prediction]] = {}
        for x in sorted(able, key=lambda x: x.seconds):
            by_cell.setdefault(self._cell(x.plan, x.rows), []).append(x)
        cells = list(by_cell)[:_CLOSER]
        self._recorder.ahead([replace(c, async_tensor_parallel=True) for c in cells], (), self._precision)
        tried = (x for cell in cells for x in by_cell[cell][:_TIMELINES])
        return self._scored(
            (x.plan.model_copy(update={"async_tensor_parallel": True}), x.rows) for x in tried
        )

    def _scored(self, plans: Iterable[tuple[Plan, int]]) -> list[Prediction]:
        return [x for plan, rows in plans if (x := self.score(plan, rows)) is not None]

    def _fewer_experts_apart(self, scored: Sequence[Prediction]) -> list[Prediction]:
        """The best of those that divide experts among as many ranks as can be, with fewer such ranks."""
        apart = [] if "expert" in self._fixed else [x for x in scored if x.fits and x.plan.expert > 1]
        by_cell: dict[Cell, Prediction] = {}
        for x in sorted(apart, key=lambda x: x.seconds):
            by_cell.setdefault(self._cell(x.plan, x.rows), x)
        tried = ((x, n) for x in list(by_cell.values())[:_CLOSER] for n in divisors(x.plan.expert)[1:-1])
        return self._scored((x.plan.model_copy(update={"expert": n}), x.rows) for x, n in tried)

    def _offloaded(self, scored: Sequence[Prediction]) -> list[Prediction]:
        """What fits with something off the device and would be the best, and what the best would take so.

        A plan is never faster with offload than without. So it is tried where what does not fit would be
        faster than what does.
        """
        if "offload" in self._fixed or self._base.offload != Offload():
            return []
        found: list[Prediction] = []
        fit = sorted((x for x in scored if x.fits), key=lambda x: x.seconds)
        for x in fit[:_TIMELINES]:
            offload = next(ways(x.plan, self.cluster.disk.directory))
            found += [y for y in [self._with_offload(x, offload)] if y is not None]
        best = fit[0].seconds if fit else math.inf
        for x in sorted((x for x in scored if not x.fits), key=lambda x: x.seconds):
            if x.seconds >= best:
                break
            fitting = math.inf
            for offload in ways(x.plan, self.cluster.disk.directory):
                if offload.directory and fitting < math.inf:
                    break  # a disk is no faster than the host's memory
                y = self._with_offload(x, offload) if self._may_fit(x, offload) else None
                if y is not None:
                    found.append(y)
                    fitting = min(fitting, y.seconds if y.fits else math.inf)
            best = min(best, fitting)
        return found

    def _may_fit(self, x: Prediction, offload: Offload) -> bool:
        """Whether what is left on the device, if all that leaves it took nothing, is little enough."""
        gone = sum(x.memory[kind] * (1 - share_here(offload, kind)) for kind in offload.shares)
        return x.bytes - gone <= self.limit

    def _with_offload(self, x: Prediction, offload: Offload) -> Prediction | None:
        return self.score(x.plan.model_copy(update={"offload": offload}), x.rows)

    def _plain(self, scored: Sequence[Prediction], zero: int) -> Prediction | None:
        """The best of all that have a data axis alone; where none fits, what needs least."""
        plain = [
            x
            for x in scored
            if x.plan.pipe * x.plan.tensor * x.plan.context * x.plan.expert * x.plan.replicate == 1
            and x.plan.zero == zero
            and x.plan.offload == self._base.offload
        ]
        fit = [x for x in plain if x.fits]
        if fit:
            return min(fit, key=lambda x: x.seconds)
        return min(plain, key=lambda x: x.bytes, default=None)


_PHASES = ("forward", "backward")
