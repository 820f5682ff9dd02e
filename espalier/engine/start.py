"""``initialize``: from a plain model to the engine that trains it on a mesh."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from espalier.comm.verdict import Faults
from espalier.comm.watch import watched
from espalier.engine.accumulation import Count
from espalier.engine.engine import Engine, LossFunction
from espalier.engine.pipeline import PipelineEngine
from espalier.engine.recompute import Policy
from espalier.engine.spikes import Guard, Spikes
from espalier.engine.update import refuse_closures
from espalier.mesh import Mesh
from espalier.mesh.mesh import MeshLike, as_mesh
from espalier.mesh.parts import with_axes
from espalier.parallel import Plan
from espalier.tensor.apart import run_as_written
from espalier.tensor.caller import user_frame


def initialize(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    plan: Plan | Mapping[str, Any] | None = None,
    *,
    mesh: MeshLike | None = None,
    loss_fn: LossFunction | None = None,
    layouts: Mapping[str, str] | None = None,
    branches: Mapping[str, int] | None = None,
    max_grad_norm: float | None = None,
    count: Count | None = None,
    example: Any = None,
    recompute_policy: Policy | None = None,
    faults: Faults | None = None,
    spikes: Spikes | None = None,
) -> Engine:
    """Lay a plain model on a mesh and give the engine that trains it there.

    The model is changed in place: its parameters become DTensors, under the same names, in the
    same objects, so that the optimizer goes on holding them.

    Args:
        model: written for one device; ``model(**batch)``, ``model(*batch)`` or ``model(batch)`` is called.
        optimizer: built on ``model.parameters()``; None to evaluate only.
        plan: a :class:`Plan` or a dict of its arguments; by default all ranks on the data axis.
        mesh: where to lay it; by default the running world (torchrun's environment). It may leave out
            those of the plan's axes that have one rank.
        loss_fn: ``loss_fn(output, batch)``, or, where the batch is a pair ``(inputs, targets)``,
            ``loss_fn(model(inputs), targets)``; by default the output's ``loss``, or the output itself.
        layouts: name patterns of modules to ``"column"``, ``"row"``, ``"vocab"`` or ``"whole"`` on the
            tensor axis; by default the model's table, or what a first run on a batch shows.
        branches: with ``Plan(branch=n)``: name patterns of modules to the number, below n, of their branch.
        max_grad_norm: another way to say ``Plan(clip=...)``.
        count: with ``Plan(accumulate=...)``: of a micro-batch (as the engine is called on it), the number of
            tokens, or rows, that its loss is a mean over, the same on all ranks; ``"sum"`` for a loss that
            is a sum. By default the engine sees it: the mean-reduced losses of ``torch.nn.functional``,
            ``x.mean()`` and ``x.sum() / y.sum()`` say it. Where it cannot be seen, that is an error.
        example: a batch to infer layouts from; by default the first batch is.
        recompute_policy: for blocks of ``recompute="selective"``, as for torch's
            ``create_selective_checkpoint_contexts``: ``policy(context, op, *args, **kwargs)``; it sees the
            operations on this rank's local tensors.
        faults: how ranks that die or hang are looked for from now on.
        spikes: what to do about steps whose loss or gradients leap or are not finite; by default nothing.

    Raises:
        ValueError: mesh and plan differ, a parameter of the optimizer is not the model's, ...
    """
    plan = _plan(plan)
    given = as_mesh(mesh) if mesh is not None else Mesh.from_env(plan.axes)
    on = with_axes(given, plan.axes)
    if on is None:
        raise ValueError(
            f"The mesh is {given!r} but the plan asks for {plan}. Build the mesh from plan.axes, "
            "or leave mesh= out."
        )
    on = on.telling(**plan.words)
    if optimizer is not None:
        refuse_closures(optimizer)
        own = {id(p) for p in model.parameters()}
        foreign = sum(id(p) not in own for group in optimizer.param_groups for p in group["params"])
        if foreign:
            raise ValueError(
                f"The optimizer holds {foreign} parameter(s) that are not the model's. "
                "Build it on model.parameters() of the very model given."
            )
    if compiled := run_as_written(model):
        warnings.warn(
            f"{', '.join(repr(name) if name else 'The model' for name in compiled[:3])} "
            f"{'and others ' if len(compiled) > 3 else ''}was compiled by torch.compile, which cannot follow "
            "DTensors: it runs as it is written. espalier.compile(module) compiles it, collectives included.",
            stacklevel=user_frame()[0],
        )
    arranged = {"table": layouts, "branches": branches}
    kind = PipelineEngine if plan.pipe > 1 else Engine
    engine = kind(model, optimizer, plan, on, loss_fn, arranged, max_grad_norm, count, recompute_policy)
    engine.guard = None if spikes is None else Guard(spikes)
    if not on.is_dry:
        engine.pulse = watched(faults)
        engine.pulse.step = 1
    engine.lay_out(None if example is None else engine.cut(example)[0])
    return engine


def _plan(plan: Plan | Mapping[str, Any] | None) -> Plan:
    if isinstance(plan, Plan):
        return plan
    if plan is not None:
        return Plan.from_dict(plan)
    if torch.distributed.is_initialized():
        return Plan(data=torch.distributed.get_world_size())
    return Plan(data=int(os.environ.get("WORLD_SIZE", "1")))
