"""The dry run: one step of the very same engine on a dry mesh, what it would cost, and how parameters lie.

Parameters and activations live on the ``meta`` device; collectives move nothing. What is counted
is therefore the program itself: each collective's bytes, each local operation's FLOPs, each
storage from its first use to its release."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from espalier.blocks import named_parameters_in, parameters_in
from espalier.comm import Ledger, ledger
from espalier.comm.dry import without_data
from espalier.engine.accumulation import Count
from espalier.engine.engine import Engine
from espalier.engine.model_call import LossFunction
from espalier.engine.recompute import Policy
from espalier.engine.report import local_bytes, state_bytes
from espalier.engine.start import initialize
from espalier.layout import Layout
from espalier.layout.layout import state_name
from espalier.meanwhile import setting
from espalier.mesh import Mesh
from espalier.parallel import Plan
from espalier.parallel.data.residency import Carried
from espalier.parallel.data.zero import ZeroState
from espalier.parallel.several import Optimizers, as_one
from espalier.parallel.tensor.infer import Choices, choices
from espalier.tensor.copies import Apart, NotCopiedError
from espalier.tensor.dry_runs import Recalled
from espalier.tensor.dtensor import DTensor, recorded_layout
from espalier.tensor.live_memory import LiveMemory
from espalier.tensor.observers import by_module, tell
from espalier.texts import expect, in_columns, shown


class Lined(NamedTuple):
    """A parameter among those that go into chunks by size.

    Attributes:
        name: of the parameter.
        kind: each chunk has one.
        size: bytes by which it is given to a chunk.
        slot: bytes of this rank's piece, with what is left free behind it.
        ranks: that have pieces of it.
    """

    name: str
    kind: int
    size: int
    slot: int
    ranks: int


Line = Sequence[Lined]


@dataclass(frozen=True)
class DryReport:
    """What one step would cost one rank.

    Attributes:
        plan: the plan.
        ledger: the collectives, in order.
        flops: floating-point operations of forward and backward on this rank.
        parameter_bytes: of this rank's parts, in a pipeline those of its stages.
        state_bytes: of the optimizer's states, and of float32 masters.
        peak_bytes: the most that lives at once: parameters, gradients, states, activations.
        peak_at: ``"forward"``, ``"backward"`` or ``"step"``.
        parameters: number of parameters of the whole model.
        rank: the coordinate that was played, by the mesh axes' names.
        peaks: the most that lives at once in each phase, as ``peak_at`` names them.
        slots: bytes of this rank's pieces of parameters that stay whole, and how many have so many: the
            smallest of them, a chunk's bytes at most, are copied while the optimizer updates.
        lines: of each part of the model the parameters in the order in which they go into chunks, where these
            are by size.
        carried: bytes that go between the device and other places, by kind, place and way
            (:class:`~espalier.parallel.data.residency.Carried`).
        away_bytes: what lies off the device between its uses, by place.
    """

    plan: Plan
    ledger: Ledger
    flops: int
    parameter_bytes: int
    state_bytes: int
    peak_bytes: int
    peak_at: str
    parameters: int
    rank: Mapping[str, int] = field(default_factory=dict)
    peaks: Mapping[str, int] = field(default_factory=dict)
    slots: Mapping[int, int] = field(default_factory=dict)
    lines: Sequence[Line] = ()
    carried: Mapping[Carried, int] = field(default_factory=dict)
    away_bytes: Mapping[str, int] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain values, as JSON takes them."""
        sizes = ("parameter_bytes", "state_bytes", "peak_bytes", "peak_at", "parameters", "flops")
        sent = [
            {"axis": axis, "op": op, "calls": calls, "bytes": n}
            for (axis, op), (calls, n) in sorted(self.ledger.by_op().items())
        ]
        plan = {"words": str(self.plan), "axes": self.plan.axes, "ranks": self.plan.world_size}
        values = {name: getattr(self, name) for name in sizes}
        carried = [{**x._asdict(), "bytes": n} for x, n in sorted(self.carried.items())]
        away = {"carried": carried, "away_bytes": dict(self.away_bytes)}
        return {"plan": plan, "rank": dict(self.rank), **values, "sent": sent, **away}

    def __str__(self) -> str:
        played = " ".join(f"{name}={i}" for name, i in self.rank.items() if i)
        rows = [
            ("plan", f"{self.plan} ({self.plan.world_size:,} ranks)"),
            ("parameters", f"{self.parameters:,}"),
            (f"rank {played}:" if played else "a rank:", ""),
            ("  parameters", _size(self.parameter_bytes)),
            ("  states", _size(self.state_bytes)),
            ("  peak memory", f"{_size(self.peak_bytes)} (in {self.peak_at})"),
            ("  FLOPs a step", f"{self.flops:.3e}"),
        ]
        sent = [(f"    {axis}", _size(n)) for axis, n in self.ledger.by_axis().items()]
        lines = [*in_columns(rows, "<"), "  bytes sent a step:", *in_columns(sent, "<")]
        if self.carried:
            there = [(f"    on {place}", _size(n)) for place, n in self.away_bytes.items()]
            lines += ["  off the device:", *in_columns(there, "<"), "  bytes a step between places:"]
            moved = [(f"    {x.kind}, {x.place}, {x.way}", _size(n)) for x, n in sorted(self.carried.items())]
            lines += in_columns(moved, "<")
        lines += ["", str(self.ledger)]
        return "\n".join(lines)


class Shared:
    """What dry runs of one model have in common, found out once: with fewer of its blocks, too.

    Args:
        model: with all of its blocks.

    Attributes:
        recalled: what operations give.
        choices: layouts on the tensor axis.
    """

    def __init__(self, model: nn.Module) -> None:
        self.recalled, self.choices = Recalled(), Choices(model)
        self._meshes: dict[Any, Mesh] = {}

    def mesh(self, axes: Mapping[str, int], coordinate: tuple[int, ...] | None) -> Mesh:
        """One of these axes, seen from there: one for all runs, by which calls on it are known again."""
        key = tuple(axes.items()), coordinate
        if key not in self._meshes:
            self._meshes[key] = Mesh.dry(axes, coordinate)
        return self._meshes[key]


def dry_run(
    model: nn.Module,
    plan: Plan | Mapping[str, Any],
    batch: Any,
    *,
    loss_fn: LossFunction | None = None,
    optimizer: Optimizers | None = None,
    max_grad_norm: float | None = None,
    layouts: Mapping[str, str] | None = None,
    branches: Mapping[str, int] | None = None,
    count: Count | None = None,
    coordinate: tuple[int, ...] | Mapping[str, int] | None = None,
    recompute_policy: Policy | None = None,
    shared: Shared | None = None,
) -> DryReport:
    """A step of training as one rank of a plan would do it, without other processes or data.

    It is the second step that is measured: the first has made the optimizer's states.

    Args:
        model: on the ``meta`` device (``with torch.device("meta"): ...``); a copy of it is laid out and run.
        plan: a :class:`Plan` or a dict of its arguments.
        batch: the global batch, as meta tensors. A program may look into masks and other integers that are
            given with their values, on the CPU, and into what it computes of them; other ranks' rows are
            then taken to be like the played one's.
        optimizer: built on the model's parameters, or several as a list; copied, too.
        loss_fn, max_grad_norm, layouts, branches, count, recompute_policy: as for :func:`initialize`.
        coordinate: which rank to play, by its number along each axis in their order, or by names,
            ``{"pipe": 3}``, the others being 0; by default the first, which holds the most but in a pipeline;
            where the last stage has all of the model, that of the last stage.
        shared: what earlier runs of this model found out, which this one need not.

    Raises:
        ValueError: a parameter is not on ``meta``, or there is no such rank.
    """
    check_dry(model, optimizer, batch)
    whole, batch = sum(p.numel() for p in parameters_in(model)), without_data(batch)
    options: dict[str, Any] = {"layouts": layouts, "max_grad_norm": max_grad_norm, "count": count}
    options.update(loss_fn=loss_fn, recompute_policy=recompute_policy, branches=branches, shared=shared)
    engine = dry_engine(model, plan, batch, optimizer=optimizer, coordinate=coordinate, **options)
    given_optimizer = optimizer
    plan, mesh, optimizer = engine.plan, engine.mesh, engine.optimizer
    # the counter of FLOPs takes operations apart: beneath the memory, which sees those of a real step
    memory, work = engine.watch().live, Recalled() if shared is None else shared.recalled
    with work, memory:
        # a first step, so that the optimizer's states exist and are counted
        _step(engine, batch, memory)
    if coordinate is None and engine.passes.is_idle:
        at_work = tuple(plan.pipe - 1 if name == "pipe" else 0 for name in mesh.names)
        return dry_run(model, plan, batch, optimizer=given_optimizer, coordinate=at_work, **options)
    memory.peak = 0
    memory.peaks.clear()
    work.flops = 0
    before = engine.carried()
    with ledger(mesh) as book, work, memory:
        _step(engine, batch, memory)
    states = 0 if optimizer is None else sum(map(state_bytes, optimizer.state.values()))
    return DryReport(
        plan,
        book,
        work.flops,
        sum(local_bytes(m.p) for m in engine._laid_out().members),
        states + sum(map(local_bytes, engine.masters())),
        memory.peak,
        memory.peak_at,
        whole,
        dict(zip(mesh.names, mesh.coordinate, strict=True)),
        dict(memory.peaks),
        dict(engine._laid_out().copies),
        _lines(engine._laid_out()),
        dict(engine.carried() - before),
        engine._laid_out().away_bytes,
    )


def check_dry(model: Any, optimizer: Any, batch: Any) -> None:
    """See that there is a model on the meta device, with its optimizer and batch.

    Raises:
        TypeError, ValueError: there is not; says what is there.
    """
    expect("The model", model, nn.Module, "a torch.nn.Module on the meta device")
    if optimizer is not None:
        as_one(optimizer)
    if batch is None or isinstance(batch, str | bool | int | float):
        raise TypeError(
            f"The batch is {shown(batch)}, expected the tensors of a global batch, on the meta device."
        )
    real = [name for name, p in named_parameters_in(model) if p.device.type != "meta"]
    if real:
        raise ValueError(
            f"A dry run needs a model on the meta device, but {real[0]} is on "
            f"{model.get_parameter(real[0]).device}. Build it under `with torch.device('meta'):`, or give "
            "copy.deepcopy(model).to('meta')."
        )


def _lines(data: ZeroState) -> list[Line]:
    """What goes into chunks by size."""
    kinds: dict[Any, int] = {}
    return [
        [
            Lined(m.name, kinds.setdefault(m.kind, len(kinds)), m.chunk_bytes, m.slot_bytes, m.shard_group.n)
            for m in line
        ]
        for line in data.lines
    ]


def dry_engine(
    model: nn.Module,
    plan: Plan | Mapping[str, Any],
    batch: Any,
    *,
    optimizer: Optimizers | None = None,
    coordinate: tuple[int, ...] | Mapping[str, int] | None = None,
    shared: Shared | None = None,
    **options: Any,
) -> Engine:
    """An engine on a mesh without processes, a copy of a model laid out on it.

    Args:
        model, plan, batch, optimizer, coordinate, shared: as for :func:`dry_run`.
        options: more for :func:`initialize`.

    Raises:
        ValueError: a parameter is not on ``meta``.
    """
    check_dry(model, optimizer, batch)
    batch = without_data(batch)
    model, optimizer = _copied(model, None if optimizer is None else as_one(optimizer))
    for group in () if optimizer is None else optimizer.param_groups:
        # kernels that need a device; without, it is the same update
        group.update({key: said for key, said in (("fused", None), ("capturable", False)) if group.get(key)})
    plan = plan if isinstance(plan, Plan) else Plan.from_dict(plan)
    if isinstance(coordinate, Mapping):
        coordinate = _place(plan, coordinate)
    if shared is None:
        mesh = Mesh.dry(plan.axes, coordinate)
        return initialize(model, optimizer, plan, mesh=mesh, example=batch, **options)
    with setting(choices, shared.choices):
        mesh = shared.mesh(plan.axes, coordinate)
        return initialize(model, optimizer, plan, mesh=mesh, example=batch, **options)


def _place(plan: Plan, named: Mapping[str, int]) -> tuple[int, ...]:
    axes = plan.axes
    wrong = [f"{name}={i}" for name, i in named.items() if not 0 <= i < axes.get(name, 0)]
    if wrong:
        has = ", ".join(f"{name} 0 to {n - 1}" for name, n in axes.items())
        raise ValueError(f"There is no rank {' '.join(wrong)}: this plan's mesh has {has}.")
    return tuple(named.get(name, 0) for name in axes)


def _copied(
    model: nn.Module, optimizer: torch.optim.Optimizer | None
) -> tuple[nn.Module, torch.optim.Optimizer | None]:
    """Copies of both, which belong together."""
    try:
        twin = Apart(model, None if optimizer is None else vars(optimizer))
    except NotCopiedError as error:
        tell(
            f"{error}. So the dry run lays out the model itself: give others one of their own, or let it "
            "have a __deepcopy__."
        )
        return model, optimizer
    twin.forget()
    if optimizer is None:
        return twin.module, None
    other = object.__new__(type(optimizer))  # not as it is pickled: that leaves out what subclasses have
    other.__dict__.update(twin.extra)
    return twin.module, other


def _step(engine: Engine, batch: Any, memory: LiveMemory) -> None:
    engine.accumulate(engine.cut(batch), phase=lambda name: setattr(memory, "phase", name))
    memory.phase = "backward"
    engine.passes.finish()
    engine.passes.counted()
    memory.phase = "step"
    if engine.optimizer is not None:
        try:
            engine.step()
        except RuntimeError as error:
            if "meta" not in str(error):
                raise
            raise ValueError(
                f"{type(engine.optimizer).__name__} cannot be run dry: its step asks for values, and nothing "
                "has any here. Give another optimizer that keeps as much, or none."
            ) from error
    else:
        engine.zero_grad()


def _size(n: int) -> str:
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if n < 1024 or unit == "TiB":
            return f"{n:,.1f} {unit}" if unit != "B" else f"{n} B"
        n /= 1024  # type: ignore[assignment]
    raise AssertionError


# ---- the table of layouts


_OUTSIDE = "(outside)"
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # of a list's element


@dataclass(frozen=True)
class LayoutRow:
    """A parameter of a module, or a module that has none and sends.

    Attributes:
        module: its name.
        parameter: its name in the module; empty if it has none.
        layout: what each axis cuts; ``"whole"`` if none does.
        forward, backward: bytes that the first rank sends for the module in a step, along all axes; with
            the module's first row.
        why: who decided, or what a trial showed.
    """

    module: str
    parameter: str
    layout: str
    forward: int
    backward: int
    why: str


@dataclass(frozen=True)
class LayoutTable:
    """What :func:`explain_layouts` found; printed, a table in which layers that are alike stand once.

    In a pipeline each module's bytes are those of the first rank of its stage.

    Attributes:
        plan: the plan.
        sequence: whether activations between blocks are cut over the sequence.
        why: the reason for that.
        rows: one for each parameter.
    """

    plan: Plan
    sequence: bool
    why: str
    rows: list[LayoutRow] = field(default_factory=list)

    def __str__(self) -> str:
        shown: dict[tuple[Any, ...], int] = {}
        for row in self.rows:
            module = _NUMBER.sub("*", row.module)
            key = module, row.parameter, row.layout, f"{row.forward:,}", f"{row.backward:,}", row.why
            shown[key] = shown.get(key, 0) + 1
        head = ("module", "parameter", "layout", "forward", "backward", "why")
        lines = [head, *((f"{m} × {n}" if n > 1 else m, *rest) for (m, *rest), n in shown.items())]
        sent = [sum(getattr(row, way) for row in self.rows) for way in ("forward", "backward")]
        lines.append(("(all)", "", "", *(f"{n:,}" for n in sent), ""))
        widths = [max(len(line[i]) for line in lines) for i in range(5)]
        form = "  ".join(f"{{:{'>' if i in (3, 4) else '<'}{w}}}" for i, w in enumerate(widths))
        printed = [f"{form}  {{}}".format(*line).rstrip() for line in lines]
        between = "cut over the sequence" if self.sequence else "whole"
        reason = f" ({self.why})" if self.why else ""
        return "\n".join(
            [
                f"plan            {self.plan}",
                f"between blocks  {between}{reason}",
                "bytes sent      by one rank in a step; of modules that stand several times (×), by each",
                "",
                *printed,
            ]
        )


def explain_layouts(
    model: nn.Module,
    plan: Plan | Mapping[str, Any],
    batch: Any,
    *,
    loss_fn: LossFunction | None = None,
    optimizer: Optimizers | None = None,
    layouts: Mapping[str, str] | None = None,
    count: Count | None = None,
) -> LayoutTable:
    """How a plan lays a model out, and what each module sends for it: forward and backward of one dry step.

    Args:
        model, plan, batch, loss_fn, optimizer, layouts, count: as for :func:`~espalier.dry_run`.

    Raises:
        ValueError: a parameter is not on ``meta``.
    """
    plan = plan if isinstance(plan, Plan) else Plan.from_dict(plan)
    check_dry(model, optimizer, batch)
    options: dict[str, Any] = {"loss_fn": loss_fn, "optimizer": optimizer, "layouts": layouts, "count": count}
    if plan.pipe == 1:
        return _explained(model, plan, batch, None, options)
    rows: dict[tuple[str, str], LayoutRow] = {}
    for stage in range(plan.pipe):
        place = tuple(stage if name == "pipe" else 0 for name in plan.axes)
        table = _explained(model, plan, batch, place, options)
        for row in table.rows:
            if row.module == _OUTSIDE:
                row = replace(row, module=f"{_OUTSIDE}, rank {stage} of the pipe")
            key = row.module, row.parameter
            before = rows.get(key, replace(row, forward=0, backward=0))
            sent = {way: getattr(row, way) + getattr(before, way) for way in ("forward", "backward")}
            rows[key] = replace(row, **sent)
    return replace(table, rows=list(rows.values()))


def _explained(
    model: nn.Module, plan: Plan, batch: Any, coordinate: tuple[int, ...] | None, options: Mapping[str, Any]
) -> LayoutTable:
    """The table as one rank sees it."""
    batch = without_data(batch)
    engine = dry_engine(model, plan, batch, coordinate=coordinate, **options)
    model = engine.module
    with Recalled(), by_module(model) as traffic:
        engine.accumulate(engine.cut(batch))
        engine.finish_gradients()
    assert engine.arrangement is not None
    chosen = engine.arrangement.chosen
    table = LayoutTable(engine.plan, chosen.sequence, chosen.why.get("", ""))
    names = {id(p): name for name, p in named_parameters_in(model)}  # the first of those that are tied
    for name, module in model.named_modules():
        forward, backward = traffic.sent.get(name, (0, 0))
        for key, p in module.named_parameters(recurse=False):
            if not isinstance(p, DTensor):
                continue
            full_name = f"{name}.{key}" if name else key
            why = chosen.why.get(names[id(p)], chosen.rest)
            if names[id(p)] != full_name:
                why = f"tied to {names[id(p)]}"
            table.rows.append(LayoutRow(name, key, _shown(recorded_layout(p)), forward, backward, why))
            forward = backward = 0
        if forward or backward:
            table.rows.append(LayoutRow(name or _OUTSIDE, "", "", forward, backward, ""))
    return table


def _shown(layout: Layout) -> str:
    names, sizes = layout.mesh.names, layout.mesh.shape
    cut = [f"{names[a]}:{state_name(layout.axes[a])}" for a in layout.order if sizes[a] > 1]
    return " ".join(cut) or "whole"
