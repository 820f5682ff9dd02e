"""A plain model becomes an engine: what is asked for, what the model is looked at for, where it is laid."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from espalier.blocks import named_parameters_in, parameters_in
from espalier.device import is_accelerator, use
from espalier.engine.accumulation import Count
from espalier.engine.compiling import compilable
from espalier.engine.engine import Engine
from espalier.engine.given import check_kinds, check_options
from espalier.engine.model_call import LossFunction
from espalier.engine.norm import Guard
from espalier.engine.recompute import Policy
from espalier.engine.tied import refuse_shared
from espalier.engine.update import check_optimizer
from espalier.faults.settings import Faults, Spikes
from espalier.faults.watchdog import watched
from espalier.mesh import Mesh
from espalier.mesh.mesh import MeshLike, as_mesh
from espalier.mesh.parts import with_axes
from espalier.parallel import Plan
from espalier.parallel.several import Optimizers, as_one
from espalier.tensor.compiled import Backend
from espalier.tensor.copies import run_as_written
from espalier.tensor.modules import see_all_rows
from espalier.tensor.observers import tell
from espalier.texts import few


def initialize(
    model: nn.Module,
    optimizer: Optimizers | None = None,
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
    compile: bool | str | Backend = False,  # as torch calls it
) -> Engine:
    """Lay a plain model on a mesh and give the engine that trains it there.

    The model is changed in place: its parameters become DTensors, under the same names, in the
    same objects, so that the optimizer goes on holding them.

    Args:
        model: written for one device; ``model(**batch)``, ``model(*batch)`` or ``model(batch)`` is called.
        optimizer: built on ``model.parameters()``; several as a list, each with its own parameters; None
            to evaluate only. It may hold others beside: of a loss, or a head that the loop calls.
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
        compile: whether each block of the model (an element of its lists of blocks) is compiled, its
            collectives included, as by :func:`espalier.compile`; a backend in place of inductor's name.

    Raises:
        ValueError: mesh and plan differ, no parameter of the optimizer is the model's, ...
    """
    plan = _plan(model, plan)
    check_options(loss_fn, layouts, branches, count, recompute_policy, faults, spikes, compile)
    if mesh is None:
        _stay_on_device(model)
    whole_mesh = as_mesh(mesh) if mesh is not None else Mesh.from_env(plan.axes)
    on = with_axes(whole_mesh, plan.axes if "tensor" in whole_mesh.names else plan.bare_axes)
    if on is None:
        raise ValueError(
            f"The mesh is {whole_mesh!r} but the plan asks for {plan}. Build the mesh from plan.axes, "
            "or leave mesh= out."
        )
    on = on.telling(**plan.words)
    _see_trainable(model)
    if optimizer is not None:
        optimizer = as_one(optimizer)
        check_optimizer(optimizer, model, plan)
    for meet in (_make_dense, see_all_rows, _warn_of_compiled):
        meet(model)
    to_compile = compilable(model, plan) if compile else []
    arranged = {"table": layouts, "branches": branches}
    engine = Engine(model, optimizer, plan, on, loss_fn, arranged, max_grad_norm, count, recompute_policy)
    engine.guard = None if spikes is None else Guard(spikes)
    if compile:  # else torch's compiler is not even imported
        engine._compile(to_compile, "inductor" if compile is True else compile)
    if not on.is_dry:
        engine.passes.pulse = watched(faults)
        engine.pulse.step = 1
    engine.lay_out(None if example is None else engine.cut(example)[0])
    return engine


def _plan(model: nn.Module, plan: Plan | Mapping[str, Any] | None) -> Plan:
    check_kinds(model, plan)
    if isinstance(plan, Plan):
        return plan
    if plan is not None:
        return Plan.from_dict(plan)
    if torch.distributed.is_initialized():
        return Plan(data=torch.distributed.get_world_size())
    return Plan(data=int(os.environ.get("WORLD_SIZE", "1")))


def _stay_on_device(model: nn.Module) -> None:
    """Let a process alone use the accelerator that its model is on, if the machine has several."""
    alone = not torch.distributed.is_initialized() and "RANK" not in os.environ
    there = next((p.device for p in parameters_in(model) if is_accelerator(p.device)), None)
    if alone and there is not None:
        use(there)


def _see_trainable(model: nn.Module) -> None:
    """See that a model's parameters can be laid out.

    Raises:
        ValueError: some cannot.
    """
    for refuse in (_refuse_lazy, _refuse_scripted, refuse_shared):
        refuse(model)


def _refuse_lazy(model: nn.Module) -> None:
    """See that all parameters have a shape."""
    lazy = [name for name, p in named_parameters_in(model) if is_lazy(p)]
    if lazy:
        raise ValueError(
            f"{few(lazy)}: lazy, without a shape yet. Call the plain model on a batch once, then make the "
            "optimizer, and then the engine."
        )


def _refuse_scripted(model: nn.Module) -> None:
    """See that no part of a model that has parameters runs in TorchScript, which keeps its own."""
    scripted = [
        name or type(module).__name__
        for name, module in model.named_modules()
        if isinstance(module, torch.jit.ScriptModule) and any(True for _ in parameters_in(module))
    ]
    if scripted:
        raise ValueError(
            f"{few(scripted)}: compiled by torch.jit, which keeps parameters of its own: they would be "
            "neither laid out nor trained. Give the module itself, without torch.jit.script or trace; "
            "initialize(..., compile=True) compiles its blocks."
        )


def _make_dense(model: nn.Module) -> None:
    """Have the gradients of tables be dense, which are summed in flat buffers: updates are the same."""
    kinds = (nn.Embedding, nn.EmbeddingBag)
    sparse = {name: m for name, m in model.named_modules() if isinstance(m, kinds) and m.sparse}
    for module in sparse.values():
        module.sparse = False
    if sparse:
        tell(
            f"{few([*map(repr, sparse)])}: sparse=True is left out, as sparse gradients are not summed over "
            "ranks. Dense ones give the same updates."
        )


def _warn_of_compiled(model: nn.Module) -> None:
    """Tell what torch compiled of a model, which runs uncompiled."""
    if compiled := run_as_written(model):
        tell(
            f"{', '.join(repr(name) if name else 'The model' for name in compiled[:3])} "
            f"{'and others ' if len(compiled) > 3 else ''}was compiled by torch.compile, which cannot follow "
            "DTensors: it runs as it is written. espalier.compile(module) compiles it, collectives included."
        )
