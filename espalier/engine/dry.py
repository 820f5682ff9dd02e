"""The dry run: one step of the very same engine on a dry mesh, and what it would cost.

Parameters and activations live on the ``meta`` device; collectives move nothing. What is counted
is therefore the program itself: each collective's bytes, each local operation's FLOPs, each
storage from its first use to its release.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from espalier.comm import Ledger, ledger
from espalier.engine.accumulation import Count
from espalier.engine.engine import Engine
from espalier.engine.live import LiveMemory
from espalier.engine.pipeline import PipelineEngine
from espalier.engine.recompute import Policy
from espalier.engine.start import initialize
from espalier.engine.tables import local_bytes, state_bytes
from espalier.mesh import Mesh
from espalier.parallel import Plan
from espalier.parallel.pipeline.undivided import Undivided
from espalier.tensor.apart import Apart, NotCopiedError
from espalier.tensor.caller import user_frame
from espalier.tensor.flops import ATTENTION


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
    """

    plan: Plan
    ledger: Ledger
    flops: int
    parameter_bytes: int
    state_bytes: int
    peak_bytes: int
    peak_at: str
    parameters: int

    def __str__(self) -> str:
        sent = self.ledger.by_axis().items()
        width = max((len(axis) for axis, _ in sent), default=0)
        rows = [
            f"plan            {self.plan} ({self.plan.world_size:,} ranks)",
            f"parameters      {self.parameters:,}",
            "a rank:",
            f"  parameters    {_size(self.parameter_bytes)}",
            f"  states        {_size(self.state_bytes)}",
            f"  peak memory   {_size(self.peak_bytes)} (in {self.peak_at})",
            f"  FLOPs a step  {self.flops:.3e}",
            "  bytes sent a step:",
            *(f"    {axis:<{width}}  {_size(n)}" for axis, n in sent),
        ]
        return "\n".join([*rows, "", str(self.ledger)])


def dry_run(
    model: nn.Module,
    plan: Plan | Mapping[str, Any],
    batch: Any,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    max_grad_norm: float | None = None,
    layouts: Mapping[str, str] | None = None,
    branches: Mapping[str, int] | None = None,
    count: Count | None = None,
    coordinate: tuple[int, ...] | None = None,
    recompute_policy: Policy | None = None,
) -> DryReport:
    """A step of training as one rank of a plan would do it, without other processes or data.

    It is the second step that is measured: the first has made the optimizer's states.

    Args:
        model: on the ``meta`` device (``with torch.device("meta"): ...``); a copy of it is laid out and run.
        plan: a :class:`Plan` or a dict of its arguments.
        batch: the global batch, as meta tensors.
        optimizer: built on the model's parameters; copied, too.
        max_grad_norm, layouts, branches, count, recompute_policy: as for :func:`initialize`.
        coordinate: which rank to play; by default the first, which holds the most; of a pipeline whose last
            stage has all of the model, that of the last stage.

    Raises:
        ValueError: a parameter is not on ``meta``.
    """
    whole = sum(p.numel() for p in model.parameters())
    given: dict[str, Any] = {"layouts": layouts, "max_grad_norm": max_grad_norm, "count": count}
    given.update(recompute_policy=recompute_policy, branches=branches)
    engine = dry_engine(model, plan, batch, optimizer=optimizer, coordinate=coordinate, **given)
    given_optimizer = optimizer
    plan, mesh, optimizer = engine.plan, engine.mesh, engine.optimizer
    memory, flops = engine.watch().live, FlopCounterMode(display=False, custom_mapping=ATTENTION)
    flops.mod_tracker = _Untold()  # type: ignore[assignment]
    with memory:
        # a first step, so that the optimizer's states exist and are counted
        _step(engine, batch, memory)
    idle = isinstance(engine, PipelineEngine) and isinstance(engine.stages.split, Undivided)
    if coordinate is None and idle:
        at_work = tuple(plan.pipe - 1 if name == "pipe" else 0 for name in mesh.names)
        return dry_run(model, plan, batch, optimizer=given_optimizer, coordinate=at_work, **given)
    memory.peak = 0
    # the counter of FLOPs takes operations apart: beneath the memory, which sees those of a real step
    with ledger(mesh) as book, flops, memory:
        _step(engine, batch, memory)
    states = 0 if optimizer is None else sum(map(state_bytes, optimizer.state.values()))
    return DryReport(
        plan,
        book,
        int(flops.get_total_flops()),
        sum(local_bytes(m.p) for m in engine._laid_out().members),
        states + sum(map(local_bytes, engine.masters())),
        memory.peak,
        memory.peak_at,
        whole,
    )


def dry_engine(
    model: nn.Module,
    plan: Plan | Mapping[str, Any],
    batch: Any,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    coordinate: tuple[int, ...] | None = None,
    **given: Any,
) -> Engine:
    """An engine on a mesh without processes, a copy of a model laid out on it.

    Args:
        model, plan, batch, optimizer, coordinate: as for :func:`dry_run`.
        given: more for :func:`initialize`.

    Raises:
        ValueError: a parameter is not on ``meta``.
    """
    real = [name for name, p in model.named_parameters() if p.device.type != "meta"]
    if real:
        raise ValueError(
            f"A dry run needs a model on the meta device, but {real[0]} is on "
            f"{model.get_parameter(real[0]).device}. Build it under `with torch.device('meta'):`."
        )
    model, optimizer = _copied(model, optimizer)
    for group in () if optimizer is None else optimizer.param_groups:
        # kernels that need a device; without, it is the same update
        group.update({key: said for key, said in (("fused", None), ("capturable", False)) if group.get(key)})
    plan = plan if isinstance(plan, Plan) else Plan.from_dict(plan)
    mesh = Mesh.dry(plan.axes, coordinate)
    return initialize(model, optimizer, plan, mesh=mesh, example=batch, **given)


def _copied(
    model: nn.Module, optimizer: torch.optim.Optimizer | None
) -> tuple[nn.Module, torch.optim.Optimizer | None]:
    """Copies of both, which belong together."""
    try:
        twin = Apart(model, None if optimizer is None else vars(optimizer))
    except NotCopiedError as error:
        warnings.warn(
            f"{error}. So the dry run lays out the model itself: give others one of their own, or let it "
            "have a __deepcopy__.",
            stacklevel=user_frame()[0],
        )
        return model, optimizer
    twin.forget()
    if optimizer is None:
        return twin.module, None
    other = object.__new__(type(optimizer))  # not as it is pickled: that leaves out what subclasses have
    other.__dict__.update(twin.given)
    return twin.module, other


def _step(engine: Engine, batch: Any, memory: LiveMemory) -> None:
    engine.accumulate(engine.cut(batch), phase=lambda name: setattr(memory, "phase", name))
    memory.phase = "backward"
    engine._finished()
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


class _Untold(nullcontext[None]):
    """In place of what tells the counter of FLOPs the module: its hooks keep what is recomputed alive."""

    parents = frozenset({"Global"})


def _size(n: int) -> str:
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if n < 1024 or unit == "TiB":
            return f"{n:,.1f} {unit}" if unit != "B" else f"{n} B"
        n /= 1024  # type: ignore[assignment]
    raise AssertionError


__all__ = ["DryReport", "dry_engine", "dry_run"]
