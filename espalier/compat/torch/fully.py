"""``fully_shard``: the module itself, of a class that goes through an engine, and what torch says is cut."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import (
    CPUOffload,
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
)

from espalier.blocks import parameters_in
from espalier.comm.control import any_says
from espalier.compat.common import LateModule, axis_of_styles, plan_for_world, precision_of, world_size
from espalier.compat.torch.cut_parameters import (
    OWNER,
    cut_all,
    cut_when_asked,
    is_cut,
    left_plain,
    made_whole,
)
from espalier.compat.torch.data_parallel import Said, refuse_within_backward
from espalier.engine import Engine
from espalier.engine.beside import held_by
from espalier.engine.module import optimizer_of
from espalier.engine.surface import bound
from espalier.layout import Layout, Replicate, Shard
from espalier.mesh import Mesh
from espalier.mesh.mesh import as_mesh
from espalier.parallel import Plan
from espalier.parallel.data.chunks import cut_dim
from espalier.tensor import DTensor
from espalier.tensor.loans import Written
from espalier.tensor.observers import tell
from espalier.texts import few, refuse
from espalier.torch_private import as_written, current_graph_task_id, own_apply, own_load
from espalier.trees import tree_map

_STAGES: Mapping[ShardingStrategy, int] = {
    ShardingStrategy.FULL_SHARD: 3,
    ShardingStrategy.SHARD_GRAD_OP: 2,
    ShardingStrategy.NO_SHARD: 0,
    ShardingStrategy.HYBRID_SHARD: 3,
    ShardingStrategy["_HYBRID_SHARD_ZERO2"]: 2,
}


def _axes(mesh: Any, hybrid: bool) -> dict[str, int]:
    """The sizes of a plan's ``replicate`` and ``data``."""
    if mesh is not None and mesh.ndim == 2:
        return {"replicate": mesh.size(0), "data": mesh.size(1)}
    if not hybrid:
        return {}
    inside = int(os.environ.get("LOCAL_WORLD_SIZE", str(world_size())))
    return {"replicate": max(world_size() // inside, 1), "data": inside}


def _away(zero: int) -> dict[str, Any]:
    """What is on the host with ``CPUOffload``: all that is cut."""
    kinds = {3: ("parameters", "gradients", "states"), 2: ("gradients", "states")}
    return dict.fromkeys(kinds.get(zero, ("states",)), "host")


def sharding_of(
    reshards: ShardingStrategy | bool, offload: CPUOffload | OffloadPolicy | None, mesh: Any = None
) -> dict[str, Any]:
    """What is cut and what is on the host, as keys of a plan.

    Args:
        reshards: a strategy, or whether parameters are cut again after the forward pass.
        mesh: of one axis, or of two: copies, pieces.
    """
    if isinstance(reshards, ShardingStrategy):
        hybrid = reshards in (ShardingStrategy.HYBRID_SHARD, ShardingStrategy["_HYBRID_SHARD_ZERO2"])
        zero = _STAGES[reshards]
    else:
        hybrid, zero = False, 3 if reshards else 2
    said: dict[str, Any] = {"zero": zero, **_axes(mesh, hybrid)}
    if isinstance(offload, CPUOffloadPolicy) or getattr(offload, "offload_params", False):
        said["offload"] = _away(zero)
    return said


def mesh_of(plan: Plan) -> Mesh:
    """The mesh of a plan, without ``tensor`` if that has one rank: as torch's scripts have it."""
    return Mesh.from_env(plan.bare_axes)


class FSDPModule:
    """What ``fully_shard`` makes of a module's class."""

    _fully: _Fully

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Through the engine; within it, the module's own."""
        of = self._fully
        if of.is_inside or current_graph_task_id() != -1:  # a backward pass calls what it computes once more
            part, of.part = of.part, None
            call = super().__call__ if part is None else part  # type: ignore[misc]
            return call(*args, **kwargs)
        return _through_engine(self, args, kwargs)

    def state_dict(self, *args: Any, keep_vars: bool = False, **kwargs: Any) -> Any:
        """The module's own, of DTensors: of the float32 masters of parameters that have some."""
        of = self._fully
        of.cut(self)
        made = of.made(self)
        if keep_vars or made is None or not made.engine(self).masters():
            return super().state_dict(*args, keep_vars=keep_vars, **kwargs)  # type: ignore[misc]
        states = super().state_dict(*args, keep_vars=True, **kwargs)  # type: ignore[misc]
        made.hand_out_masters(states)
        return states

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own; with ``assign`` it may put others in the place of parameters."""
        out = super().load_state_dict(*args, **kwargs)  # type: ignore[misc]
        self._fully.mark(self)
        return out

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Into the masters, too, of all in it: what is copied into parameters is rounded."""
        made = self._fully.made(self)
        if made is not None:
            local_metadata["assign_to_params_buffers"] = False  # parameters are the engine's
        own_load(FSDPModule, self)(state_dict, prefix, local_metadata, *args, **kwargs)
        if made is not None and (engine := made.engine(self)).masters():
            named = nn.Module.named_parameters(cast("nn.Module", self))
            given = {p: state_dict.get(f"{prefix}{name}") for name, p in named}
            engine.set_parameters({p: x for p, x in given.items() if x is not None and x.shape == p.shape})

    def _apply(self, fn: Callable[[Any], Any], recurse: bool = True) -> Any:
        """``to_empty`` and its like, which may put other parameters in the place of those that are there."""
        out = own_apply(FSDPModule, self)(fn, recurse)
        self._fully.mark(self)
        return out

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Whether backward passes sum gradients over the ranks, or leave it to the next that does."""
        for part in cast("nn.Module", self).modules() if recurse else (self,):
            if isinstance(part, FSDPModule):
                part._fully.syncs = requires_gradient_sync

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """No effect: gradients are summed as soon as they are there."""

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """No effect: parameters go after their last use."""

    def set_modules_to_forward_prefetch(self, modules: Any) -> None:
        """No effect: what comes next is gathered in time (``Plan(prefetch_megabytes=...)``)."""

    set_modules_to_backward_prefetch = set_modules_to_forward_prefetch

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """No effect: parameters are gathered when they are used."""
        return UnshardHandle() if async_op else None

    def reshard(self) -> None:
        """No effect: parameters go after their last use."""

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether parameters are cut again after the forward pass, until the first call; the results are the
        same."""
        self._fully.said["zero"] = 3 if reshard_after_forward else 2

    def set_gradient_divide_factor(self, factor: float) -> None:
        """By what the sum of the ranks' gradients is divided, in place of their number.

        All modules that ``fully_shard`` was called on have the same when the outermost one is called, or this
        is refused there.
        """
        self._fully.divisor = factor

    set_reduce_scatter_divide_factor = set_gradient_divide_factor

    def set_all_reduce_hook(self, hook: Callable[..., Any], *, stream: Any = None) -> None:
        """Refused: gradients are summed by the engine.

        Raises:
            MistakeError: always.
        """
        reason = "gradients are summed by the engine: change p.grad before optimizer.step()"
        refuse("fully_shard", [("all_reduce_hook", getattr(hook, "__name__", "..."), reason)])

    def set_custom_all_gather(self, comm: Any) -> None:
        """Refused: messages are the engine's.

        Raises:
            MistakeError: always.
        """
        refuse("fully_shard", [("custom communication", type(comm).__name__, "leave it out")])

    set_custom_reduce_scatter = set_custom_all_gather

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """No effect: sums over copies add up to the same, whenever they are made."""

    def finalize_backward(self, *, async_op: bool = False) -> GradientReductionHandle | None:
        """Sum over the ranks what backward passes have left (:meth:`set_requires_gradient_sync`).

        Raises:
            MistakeError: a backward pass is under way.
        """
        refuse_within_backward("fully_shard")
        of = self._fully
        made = of.made(self)
        if made is not None and of.syncs:
            made.finish(self)
        return GradientReductionHandle() if async_op else None

    def _fsdp_chooses(self, *args: Any, **kwargs: Any) -> None:
        """No effect: how and when messages go is chosen by the engine."""

    reset_iter_state = set_post_optim_event = set_force_sum_reduction_for_comms = _fsdp_chooses
    set_reduce_scatter_unused_params = set_reduce_scatter_max_input_buffers = _fsdp_chooses
    set_separate_reduce_scatter_group = set_unshard_in_backward = set_symm_mem_for_comm = _fsdp_chooses
    set_allocate_memory_from_process_group_for_comm = set_keep_unsharded_storage = _fsdp_chooses
    set_manual_backward_finalization = _fsdp_chooses

    @property
    def engine(self) -> Engine:
        """The engine that trains the model."""
        whole = self._fully.outermost(self)
        engine: Engine = whole._fully.engine(whole)
        return engine


class UnshardHandle:
    """What ``unshard(async_op=True)`` gives."""

    def wait(self) -> None:
        """No effect: parameters are gathered when they are used."""


class GradientReductionHandle:
    """What ``finalize_backward(async_op=True)`` gives."""

    def wait(self) -> None:
        """No effect: gradients are waited for when they are used."""


class _Fully:
    """What was said of a module, and its engine once it is called as the outermost one.

    Attributes:
        divisor: of the sum of the ranks' gradients; None: their number.
        part: of the module, what is called in its place by the next call.
        outer: the module around it that ``fully_shard`` was called on last, weakly, or one that holds several
            parts of one optimizer.
    """

    divisor: float | None = None
    part: Any = None
    outer: Callable[[], Any] | None = None

    def __init__(self, said: dict[str, Any], plan: Said, output: torch.dtype | None, mesh: Any) -> None:
        self.is_inside, self.syncs, self._output = False, True, output
        self.said, self._plan, self._mesh = said, plan, mesh
        self._made: LateModule | None = None
        self._copies: dict[str, Written] = {}

    def mark(self, module: Any) -> None:
        """Let parameters that are plain be cut when they are asked how, until the model is laid out."""
        if self.made(module) is not None:
            return
        for p in parameters_in(module):
            vars(p)[OWNER] = weakref.ref(module)
        if self._plan is None:
            cut_when_asked(module, self._early_layout)

    def cut(self, module: Any) -> None:
        """Let all parameters be cut."""
        if self.made(module) is None:
            cut_all(module)

    def _around(self, module: Any) -> Iterator[Any]:
        """A module, and those around it that ``fully_shard`` was called on, the outermost last."""
        yield (whole := module)
        while (outer := whole._fully.outer) is not None and (found := outer()) is not None:
            if all(part is not module for part in found.modules()):  # a copy knows the original's
                return
            yield (whole := found)

    def made(self, module: Any) -> _Fully | None:
        """What has the engine that trains the module, if it is there."""
        return next((x._fully for x in self._around(module) if x._fully._made is not None), None)

    def hand_out_masters(self, states: dict[str, Any]) -> None:
        """Put masters in the place of their parameters, and see later whether a program writes to them.

        Where parameters are whole between steps, they are copies: the ranks would have to tell each other
        what is written to them. So they are where states are off the device.
        """
        assert self._made is not None
        engine = self._made.engine
        self._tell_of_written()
        masters = engine.held_masters()
        for name, x in states.items():
            if isinstance(x, torch.Tensor):
                master = masters.get(id(x))
                states[name] = x.detach() if master is None else master
                if master is not None and not engine.shares_masters:
                    self._copies[name] = Written(master)

    def _tell_of_written(self) -> None:
        """Warn of what was written to copies of masters that a state dict gave."""
        copies, self._copies = self._copies, {}
        if written := [name for name, x in copies.items() if x.is_new()]:
            tell(
                f"What model.state_dict() gave was written to ({few(written)}), and these are "
                "copies of float32 masters: the parameters are as they were. Give it back, on all ranks: "
                "model.load_state_dict(state)."
            )

    def outermost(self, module: Any) -> Any:
        """The module whose engine makes the calls of this one."""
        *_, found = self._around(module)
        if found is not module or self._made is not None:
            return found
        return _with_others(module) or module

    def _early_layout(self, p: torch.Tensor) -> Layout:
        """How torch cuts a parameter, but that a dim that comes out even goes before the first."""
        mesh = mesh_of(plan_for_world(self.said)) if self._mesh is None else as_mesh(self._mesh)
        dim = cut_dim(p.shape, mesh.shape[-1])
        cut = Replicate() if dim is None else Shard(dim)
        return Layout(mesh, [*[Replicate()] * (mesh.ndim - 1), cut], tuple(p.shape))

    def _settle_early(self, module: nn.Module) -> None:
        """Have all ranks go on with parameters that are cut, if a program has asked of some on any rank."""
        mesh = mesh_of(plan_for_world(self.said, self._plan))
        if not any_says(is_cut(module), mesh):
            left_plain(module)
            return
        cut_all(module)
        here = mesh if self._mesh is None else as_mesh(self._mesh)
        for p in parameters_in(module):
            if type(p) is DTensor and p.device_mesh in (mesh, here):
                p._is_cut_early = True

    def engine(self, module: Any) -> Engine:
        if self._made is None:
            self.said, layouts = axis_of_styles("fully_shard", module, self.said, self._plan, mesh_of)
            self._settle_early(module)
            for p in parameters_in(module):
                vars(p).pop(OWNER, None)
            self._made = LateModule(module, "own", self.said, self._plan, mesh_of)
            self._made.layouts = layouts
            self._inside(module, True)
            try:
                # as those of the module itself, which is the model
                self._made.engine.gives_whole_states = False
            finally:
                self._inside(module, False)
        return self._made.engine

    def finish(self, module: Any) -> None:
        """Sum the gradients that wait for it."""
        engine = self.engine(module)
        engine.passes.one_by_one("finalize_backward()").is_syncing = True
        engine.finish_gradients()

    def called(self, module: Any, args: Any, kwargs: Any, method: Any = None, part: Any = None) -> Any:
        """What the module gives, or one of its methods, or a part of it, through the engine."""
        engine = self.engine(module)
        if self._copies:
            self._tell_of_written()
        factor = self._factor(module, engine)
        lacks = torch.is_grad_enabled() and engine.optimizer is None
        if lacks and (optimizer := optimizer_of(module)) is not None:
            engine.attach(optimizer)
        part = module if part is None else part
        engine.passes.one_by_one("a call of a fully sharded module").is_syncing = part._fully.syncs
        if factor != 1:  # of the gradients of parameters, not of those that go on to what made the inputs
            args, kwargs = tree_map(partial(_scaled_back, 1 / factor), (args, kwargs))
        before = vars(part).get("forward")  # a program's own
        self._inside(module, True)
        try:
            if method is not None:
                part.forward = method
            self.part = None if part is module else part
            outputs = engine.outputs(bound(part, args, kwargs), "own")
        finally:
            self.part = None
            if method is not None:
                vars(part).pop("forward", None)
                vars(part).update({} if before is None else {"forward": before})
            self._inside(module, False)
        if factor != 1:
            tree_map(partial(_scale_gradient, factor), outputs)
        own = part._fully
        return outputs if own._output is None else tree_map(own._cast, outputs)

    def _factor(self, module: Any, engine: Engine) -> float:
        """Of gradients, for what they are divided by.

        Raises:
            MistakeError: it is another in a part of the module.
        """
        of = (x for x in module.modules() if isinstance(x, FSDPModule) and not isinstance(x, _Parts))
        told = {part._fully.divisor for part in of}
        if len(told) > 1:
            given = ", ".join("the number of ranks" if x is None else str(x) for x in told)
            expected = "one for all modules: call it on each of them, or multiply a part's gradients by hand"
            refuse("fully_shard", [("gradient_divide_factor", given, expected)])
        (divisor,) = told
        readers = engine.passes.call.batches.readers
        return 1.0 if divisor is None else readers / divisor

    def _cast(self, x: Any) -> Any:
        return x.to(self._output) if isinstance(x, torch.Tensor) and x.is_floating_point() else x

    def _inside(self, module: Any, is_inside: bool) -> None:
        for part in module.modules():
            if isinstance(part, FSDPModule):
                part._fully.is_inside = is_inside


class _Parts(nn.ModuleList):
    """Sharded modules that the loop calls one by one, and one optimizer trains: an engine needs them all."""


def _with_others(module: Any) -> Any:
    """A module that has all that are trained with this one; None if there are no others."""
    optimizer = optimizer_of(module)
    trained = [] if optimizer is None else held_by(optimizer)
    known: dict[int, Any] = {}
    for p in (*parameters_in(module), *trained):
        of = vars(p).get(OWNER)
        if of is not None and (found := of()) is not None:
            known[id(found)] = found
    if len(known) < 2:
        return None
    whole: Any = fully_shard(_Parts(known.values()))
    whole._fully.said = module._fully.said
    for part in known.values():
        part._fully.outer = lambda: whole  # who has a part has all
    return whole


@as_written
def _through_engine(module: Any, args: Any, kwargs: Any, method: Any = None) -> Any:
    """A call that the loop makes of a module, or of one of its methods; torch's compiler leaves it alone."""
    whole = module._fully.outermost(module)
    return whole._fully.called(whole, args, kwargs, method, module)


def _scaled_back(factor: float, x: Any) -> Any:
    """An input with so many times the gradient."""
    is_recorded = isinstance(x, torch.Tensor) and x.requires_grad and torch.is_grad_enabled()
    return _scale_gradient(factor, x.view_as(x)) if is_recorded else x


def _scale_gradient(factor: float, x: Any) -> Any:
    """Let the gradient of an output be so many times what it is."""
    if isinstance(x, torch.Tensor) and x.requires_grad:
        x.register_hook(lambda grad: grad * factor)
    return x


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Have another method go through the engine as ``forward`` does; no effect but after ``fully_shard``."""
    if not isinstance(module, FSDPModule):
        return
    method = getattr(module, method_name)

    def through(*args: Any, **kwargs: Any) -> Any:
        if module._fully.is_inside:
            return method(*args, **kwargs)
        return _through_engine(module, args, kwargs, method)

    setattr(module, method_name, through)


def released(module: nn.Module) -> dict[str, Any]:
    """Undo ``fully_shard`` of a module and of what is in it; gives what was said of the outermost."""
    said: dict[str, Any] = {}
    for part in module.modules():
        if isinstance(part, FSDPModule):
            said = said or part._fully.said
            made_whole(part)
            object.__delattr__(part, "_fully")
            part.__class__ = type(part).__bases__[1]
    return said


def _parameters_of(modules: Any) -> list[nn.Parameter]:
    """Those of a module, or of several in a list."""
    given = modules if isinstance(modules, list | tuple) else [modules]
    return [p for module in given for p in module.parameters()]


def _misplaced(modules: Any, place: Callable[[nn.Parameter], Any]) -> list[tuple[str, Any, str] | None]:
    """The mistake of a function that lets parameters lie on meshes of their own."""
    placements = map(place, _parameters_of(modules))
    odd = next((x for x in placements if x is not None and not isinstance(x, Shard)), None)
    expected = "all parameters lie on one mesh, as plan = {...} says: expected None or Shard(dim) of each"
    return [] if odd is None else [("shard_placement_fn", type(odd).__name__, expected)]


def _recast(policy: MixedPrecisionPolicy, modules: Any) -> list[tuple[str, Any, str] | None]:
    """The mistake of a policy that keeps some parameters in a dtype of their own."""
    compute, own = policy.param_dtype, getattr(policy, "param_dtype_override_fn", None)
    dtypes = () if compute is None or own is None else map(own, _parameters_of(modules))
    odd = next((x for x in dtypes if x not in (None, compute)), None)
    expected = "a plan's parameters have one dtype: leave it out, or param_dtype, or use torch.autocast"
    return [] if odd is None else [("param_dtype_override_fn", odd, expected)]


def _reduced_in(policy: MixedPrecisionPolicy, modules: Any) -> torch.dtype | None:
    """In which dtype gradients are summed: from torch 2.15 on, if nothing is said, in that of parameters."""
    if policy.reduce_dtype is not None or not hasattr(policy, "param_dtype_override_fn"):
        return policy.reduce_dtype
    return torch.float32 if any(p.dtype is torch.float32 for p in _parameters_of(modules)) else None


def _is_odd(ranks: bool | int | None) -> bool:
    """Whether it is a number of ranks, and no groups of so many make up the world."""
    return not isinstance(ranks, bool | None) and (ranks < 1 or world_size() % ranks != 0)


def share_comm_ctx(modules: list[Any]) -> None:
    """No effect: the engine of what is called sends all messages."""


def fully_shard(
    module: Any,
    *,
    mesh: Any = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Any = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008
    ignored_params: Any = None,
    dp_mesh_dims: Any = None,
    plan: Said = None,
) -> Any:
    """As ``torch.distributed.fsdp.fully_shard``: the module itself, its parameters cut over the ranks.

    What was said of the module that is called, the outermost, holds for all in it. It is laid out at its
    first call, by when its optimizer was made. A parameter that is asked before how it lies is cut then, each
    rank's piece of its own values. What ``parallelize_module`` has said of it becomes the plan's ``tensor``.

    Args:
        module: a module, or a list of them.
        mesh: of one axis, or of two: copies, pieces.
        reshard_after_forward: False keeps parameters gathered between forward and backward (``zero=2``). A
            number of ranks, over which torch cuts them meanwhile, is as True: they are cut over all.
        mp_policy: ``Plan(precision=...)``; outputs of the module that is called are cast to ``output_dtype``.
            Without ``reduce_dtype`` gradients are summed as the torch that is there does it.
        shard_placement_fn: no effect where it says along which dim a parameter is cut: the engine cuts all
            alike, and a parameter answers for the whole.
        offload_policy: ``Plan(offload=...)``.
        plan: keys of a :class:`~espalier.Plan`: what else there is to be beside ``data``.
    """
    mistakes = [
        *(_misplaced(module, shard_placement_fn) if shard_placement_fn is not None else []),
        *_recast(mp_policy, module),
        ("ignored_params", "...", "all parameters are the engine's: expected None")
        if ignored_params
        else None,
        ("dp_mesh_dims", "...", "axes are said by plan = {...}") if dp_mesh_dims is not None else None,
        ("reshard_after_forward", reshard_after_forward, "expected a number that divides that of the ranks")
        if _is_odd(reshard_after_forward)
        else None,
    ]
    refuse("fully_shard", [x for x in mistakes if x is not None])
    said = sharding_of(reshard_after_forward is not False, offload_policy, mesh)
    if mp_policy.param_dtype is not None or mp_policy.reduce_dtype is not None:
        said["precision"] = precision_of(mp_policy.param_dtype, _reduced_in(mp_policy, module))
    for one in module if isinstance(module, list | tuple) else [module]:
        kind = type(one)
        one.__class__ = type(f"FSDP{kind.__name__}", (FSDPModule, kind), {})
        # its own: what torch.compile puts around a module sets attributes on that
        object.__setattr__(one, "_fully", own := _Fully(said, plan, mp_policy.output_dtype, mesh))
        own.mark(one)
        for part in one.modules():
            if part is not one and isinstance(part, FSDPModule):
                part._fully.outer = weakref.ref(one)
    return module
