"""The engine's optimizer step: on local tensors (``espalier.tensor.optimizer_steps``), fused and joined."""

from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from functools import lru_cache, partial
from itertools import repeat
from operator import is_, itemgetter
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.autograd.graph import increment_version

from espalier.blocks import named_parameters_in
from espalier.engine.all_stages import of_all_stages, take_all_stages
from espalier.engine.beside import beside_model, check_beside, held_by
from espalier.engine.norm import scale_gradients
from espalier.engine.seen import SeenGradients
from espalier.engine.states import has_strays, meet_others_states, settle, take_over
from espalier.engine.together import refuse_cut_elsewhere
from espalier.meanwhile import having
from espalier.parallel.apart import holds_others, makes_one_of_all
from espalier.parallel.data.zero import ZeroState
from espalier.parallel.fused import Substitute, fuse, holding, may_fuse
from espalier.parallel.plan import Offload, Plan
from espalier.parallel.rounded_products import rounding_as_one
from espalier.parallel.several import Several, parts_of
from espalier.tensor import DTensor, plain, redistribute, stamp
from espalier.tensor.observers import tell
from espalier.tensor.optimizer_steps import ELEMENTWISE, on_locals, stamp_states
from espalier.torch_private import (
    foreach_copy_,
    getter,
    has_hooks_of_all_steps,
    has_step_hooks,
    method,
    raw,
    setter,
    step_is_replaced,
    without_step_hooks,
)

_set_grad = setter("grad")


def steps_by_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it computes the loss itself, as often as it likes (LBFGS)."""
    return _needs_closure(type(optimizer).step)


@lru_cache(maxsize=64)
def _needs_closure(step: Callable[..., Any]) -> bool:
    closure = inspect.signature(step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def check_closures(optimizer: torch.optim.Optimizer, plan: Plan) -> None:
    """See that an optimizer that :func:`steps_by_closure` sees whole parameters and finished gradients.

    Raises:
        ValueError: the plan has what only the engine's own step knows how to take.
    """
    for part in filter(steps_by_closure, parts_of(optimizer)):
        check_plan_of_closures(part, plan, is_one_of=part is not optimizer)


def check_plan_of_closures(
    optimizer: torch.optim.Optimizer, plan: Plan, *, is_one_of: bool = False, stages: bool = False
) -> None:
    """See that a step that calls for gradients itself goes with the plan.

    Args:
        is_one_of: there are others of the same model.
        stages: it works on what the program sees of a pipeline, too.

    Raises:
        ValueError: it does not.
    """
    precision, offload = plan.precision, plan.offload
    against = {
        f"pipe = {plan.pipe}": plan.pipe > 1 and not (stages or isinstance(optimizer, torch.optim.LBFGS)),
        f"branch = {plan.branch}": plan.branch > 1,
        # all micro-batches go through stages in one backward pass
        f"accumulate = {plan.accumulate}": plan.accumulate > 1 and plan.pipe == 1,
        f"clip = {plan.clip}": plan.clip is not None,
        f"precision = {precision}": precision.parameters is not None or precision.scales,
        "offload": bool(offload.away) or offload.is_by_budget,
        "another optimizer of the same model": is_one_of,
    }
    reasons = [said for said, holds in against.items() if holds]
    if reasons:
        raise ValueError(
            f"{type(optimizer).__name__}.step(closure) asks for the loss as often as it likes, and works on "
            f"whole parameters. It does not go with {', '.join(reasons)}: leave that out, or use another "
            "optimizer."
        )


def _tell_of_replaced(
    beside: Sequence[torch.Tensor], optimizer: torch.optim.Optimizer, model: nn.Module
) -> None:
    """Warn of parameters that were the model's when the optimizer was made, and are no more."""
    held = {id(p) for p in held_by(optimizer)}
    missing = {name: p for name, p in named_parameters_in(model) if p.requires_grad and id(p) not in held}
    if missing and Counter(p.shape for p in missing.values()) <= Counter(p.shape for p in beside):
        tell(
            f"The optimizer does not hold {', '.join(list(missing)[:4])} of the model, but {len(beside)} "
            "tensor(s) of such shapes that are none of its: were modules put in, or parameters made anew, "
            "after the optimizer was made? They would not be trained. Make the optimizer then."
        )


def check_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module, plan: Plan) -> None:
    """See that an optimizer can be stepped, and is the model's; it may have others beside (a loss's)."""
    check_closures(optimizer, plan)
    _refuse_sparse(optimizer)
    _refuse_replaced_steps(optimizer, plan)
    beside = beside_model(model, optimizer)
    if beside and len(beside) == len(held_by(optimizer)):
        raise ValueError(
            f"None of the {len(beside)} parameters that the optimizer holds is the model's. Build it on "
            "model.parameters() of the very model given."
        )
    _tell_of_replaced(beside, optimizer, model)
    check_beside(beside, plan)
    refuse_cut_elsewhere(optimizer, model, beside)
    if plan.pipe > 1:
        for part in filter(steps_by_closure, parts_of(optimizer)):
            tell(_BY_CLOSURE.format(type(part).__name__))
            take_all_stages(part)
    if plan.pipe > 1 or plan.branch > 1:
        for part in filter(makes_one_of_all, parts_of(optimizer)):
            _let_take_all(part, plan)


_BY_CLOSURE = (
    "{}.step(closure) asks for the loss as often as it likes. In a pipeline the ranks send one another all "
    "parameters and states for each step, and all gradients after each call of the closure, and each updates "
    "them all: that takes time, and memory while it lasts."
)


def _let_take_all(optimizer: torch.optim.Optimizer, plan: Plan) -> None:
    """Let an optimizer step with the parameters of all stages.

    Raises:
        ValueError: the plan has others than stages, or moves them off the device; or others are within it.
    """
    does = (
        f"The step of {type(optimizer).__name__} makes something of all its parameters or gradients (a norm, "
        "say), or draws random numbers for each of them, as a trial on small tensors shows."
    )
    against = {
        f"branch = {plan.branch}": plan.branch > 1,
        "offload": bool(plan.offload.away) or plan.offload.is_by_budget,
        f"pipe = {plan.pipe}": holds_others(optimizer),
    }
    reasons = [said for said, holds in against.items() if holds]
    if reasons:
        raise ValueError(
            f"{does} A rank's optimizer has those of its own stages and branches alone, and the result would "
            "be another. Leave it out of the step (torch.nn.utils.clip_grad_norm_, or clip=..., take the "
            f"norm of all gradients), or train under a plan without {' and '.join(reasons)}."
        )
    tell(
        f"{does} In a pipeline the ranks send one another all parameters, gradients and states before each "
        "step then, and each updates them all: that takes time, and memory while it lasts. Quicker is an "
        "optimizer that updates each parameter by itself (torch.nn.utils.clip_grad_norm_, or clip=..., take "
        "the norm of all gradients)."
    )
    take_all_stages(optimizer)


def _refuse_sparse(optimizer: torch.optim.Optimizer) -> None:
    """See that an optimizer works on dense gradients."""
    if any(isinstance(part, torch.optim.SparseAdam) for part in parts_of(optimizer)):
        raise ValueError(
            "SparseAdam works on sparse gradients, which are not summed over ranks: they are dense here. "
            "Train with Adam (whose moments decay in rows that no batch has), Adagrad or SGD."
        )


def _refuse_replaced_steps(optimizer: torch.optim.Optimizer, plan: Plan) -> None:
    """See that nothing of the program's is around a step that would see pieces within it."""
    whole = plan.zero == 0 and plan.tensor == plan.pipe == plan.branch == plan.expert == 1
    if whole and plan.precision.parameters is None and plan.offload == Offload():
        return
    for part in parts_of(optimizer):
        if step_is_replaced(part) and not hasattr(part.step, "engine"):
            raise ValueError(
                f"{type(part).__name__}.step was replaced before the optimizer was prepared. What stands in "
                f"its place would run within the engine's step, and see this rank's pieces ({plan}). Replace "
                "it afterwards: then it sees whole parameters and gradients; or use "
                "optimizer.register_step_pre_hook and register_step_post_hook."
            )


@contextmanager
def _finished(
    optimizer: torch.optim.Optimizer, came_later: list[DTensor], owners: Sequence[ZeroState]
) -> Iterator[None]:
    """Inside, parameters that the engine does not know (copies of its own) have whole gradients."""
    for state in owners:
        state.set_apart(came_later)
    before = [(p, p._layout, p.grad) for p in came_later]
    for p, layout, grad in before:
        p._layout = layout.undeferred
        p.grad = None if grad is None else redistribute(cast(DTensor, grad), p._layout)
        state = optimizer.state.get(p, {})
        for name, x in state.items():
            if isinstance(x, torch.Tensor) and x.ndim:  # of a parameter whose states are off the device
                state[name] = x.to(p.device)
    take_over(optimizer, came_later)
    try:
        yield
    finally:
        for p, layout, grad in before:
            p._layout = layout
            p.grad = grad


def update(
    optimizer: torch.optim.Optimizer,
    factor: torch.Tensor | float | None = None,
    runs: FlatParams | None = None,
    own: Set[int] | None = None,
    owners: Sequence[ZeroState] = (),
) -> None:
    """``optimizer.step()``, of gradients times ``factor``; its states lie as their parameters do.

    Args:
        runs: joins parameters that lie one after the other.
        own: the ``id`` of each parameter whose gradients are finished; by default all are.
        owners: whose these are.
    """
    if isinstance(optimizer, Several):
        optimizer.step_by(partial(update, factor=factor, runs=runs, own=own, owners=owners))
        return
    held = held_by(optimizer)
    parameters = [p for p in held if type(p) is DTensor]
    if own is not None:
        came_later = [p for p in parameters if id(p) not in own and p._layout.mesh.is_member]
        if came_later:
            with _finished(optimizer, came_later, owners):
                update(optimizer, factor, runs)
            return
    if optimizer.__dict__.pop("_has_others_states", False) or has_strays(optimizer):
        take_over(optimizer, parameters)
    if type(optimizer) not in ELEMENTWISE:
        if factor is not None:
            scale_gradients(held, factor)
        with of_all_stages(optimizer), rounding_as_one(optimizer, parameters):
            optimizer.step()
        settle(optimizer, parameters)
        return

    @contextmanager
    def prepared() -> Iterator[None]:
        with holding(optimizer) as substitutes:
            if runs is not None:
                runs.join(optimizer, substitutes)
            if factor is not None:
                scale_gradients(held_by(optimizer), factor)
            fuse(optimizer, substitutes)
            yield

    with on_locals(parameters), prepared():
        optimizer.step()
    stamp_states(optimizer)


def forget_gradients(optimizer: torch.optim.Optimizer) -> None:
    """``optimizer.zero_grad()``, past DTensor's Python getters."""
    for part in parts_of(optimizer):
        if type(part).zero_grad is not torch.optim.Optimizer.zero_grad:
            part.zero_grad(set_to_none=True)
            continue
        with raw():
            for p in held_by(part):
                p.__dict__.pop("_reduced", None)
                _set_grad(p, None)


def update_model(
    optimizer: torch.optim.Optimizer,
    whole: torch.optim.Optimizer,
    data: ZeroState,
    factor: torch.Tensor | float | None,
    seen: SeenGradients,
    runs: FlatParams | None,
    *,
    keep: bool,
    others: Sequence[ZeroState] = (),
) -> None:
    """:func:`update` of parameters wherever they lie, between the optimizer's hooks.

    Args:
        whole: the optimizer, or all of several of which it is one.
        keep: gradients stay.
        others: those of other models whose parameters it updates, too.
    """
    for state in (data, *others):
        if state.has_thawed:
            state.has_thawed = False
            for part in parts_of(whole):
                meet_others_states(part)
    hooked = _has_hooks(optimizer)
    own = data.own.union(*(state.own for state in others)) if others else data.own
    step: Callable[[torch.optim.Optimizer], None] = partial(
        update, factor=None if hooked else factor, runs=runs, own=own, owners=(data, *others)
    )
    for state in others:
        step = partial(state.update, step=step, keep=keep, states=whole.state)
    stepping = partial(data.update, optimizer, step, keep, whole.state)
    if hooked:
        _between_hooks(optimizer, factor, seen, stepping)
    else:
        stepping()


def _has_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether hooks run around its step."""
    return has_hooks_of_all_steps() or any(map(has_step_hooks, parts_of(optimizer)))


def _between_hooks(
    optimizer: torch.optim.Optimizer,
    factor: torch.Tensor | float | None,
    seen: SeenGradients,
    step: Callable[[], None],
) -> None:
    """``step()``, which runs no hooks, after the optimizer's hooks before a step, and before those after it.

    So these see what the program sees before and after ``optimizer.step()``: parameters and gradients of the
    whole model, those times ``factor``.
    """
    if factor is not None:
        scale_gradients(held_by(optimizer), factor)
    parts = parts_of(optimizer)

    def stepped() -> None:
        with without_step_hooks(parts), having(seen, is_stepping=True):
            step()

    for part in reversed(parts):
        stepped = partial(_hooked, part, stepped)
    with having(seen, is_stepping=False, is_scaled=False):
        stepped()


def _hooked(optimizer: torch.optim.Optimizer, step: Callable[[], None]) -> None:
    """``step()`` as torch runs an optimizer's: it calls the hooks."""
    torch.optim.Optimizer.profile_hook_step(lambda *_: step())(optimizer)


# ---- parameters that lie one after the other in memory, updated as one
#
# Chunks put parameters, gradients and this rank's pieces of either into flat buffers. An optimizer that
# works element by element does to a stretch of such buffers, bit by bit, what it does to each parameter in
# it, in a dozen calls instead of a dozen for each. Its states then lie in flat buffers too, of which every
# parameter has its view: what ``optimizer.state`` says of a parameter is what it would say anyway.


State = dict[str, Any]
Rooms = Callable[[], Mapping[int, int]]

# elements of a run, if no fused kernel updates it: so what is computed on the way stays in a cache, and small
_MOST = 2**18
_APART = object()
_OTHERWISE = ("foreach", "capturable", "differentiable")
# the C functions themselves: the way of every step, and a gradient is a DTensor
_address, _in_a_row = method("data_ptr"), method("is_contiguous")
_grad = getter("grad")
_dtype = getter("dtype")


class _Group(NamedTuple):
    """What the parameters of a group are: in runs of so many elements at most, in none, without gradients."""

    ids: list[int]
    most: float
    runs: list[_FlatRun]
    alone: list[torch.Tensor]
    idle: list[torch.Tensor]

    def is_valid(
        self, params: Sequence[torch.Tensor], optimizer: torch.optim.Optimizer, most: float, rooms: Rooms
    ) -> bool:
        """Whether it would be the same again."""
        return (
            list(map(id, params)) == self.ids
            and self.most == most
            and all(_grad(p) is None for p in self.idle)
            and not any(map(is_, map(_grad, self.alone), repeat(None)))
            and all(run.is_valid(optimizer, rooms) for run in self.runs)
        )


class FlatParams:
    """The runs of an optimizer's parameters.

    Torch functions are to be left alone, and parameters to be plain (their class is ``nn.Parameter``), while
    its methods are called.

    Args:
        rooms: tells, by ``id``, how many elements are a parameter's alone where it begins, if that is known
            (see :meth:`ZeroState.rooms`).
    """

    def __init__(self, rooms: Rooms = dict) -> None:
        self._rooms = rooms
        self._groups: dict[int, dict[int, _Group]] = {}  # by optimizer

    def join(self, optimizer: torch.optim.Optimizer, substitutes: list[Substitute]) -> None:
        """Let the optimizer hold runs in place of what is in them; it is ``holding`` what is noted."""
        before = self._groups.get(id(optimizer), {})
        groups = self._groups[id(optimizer)] = dict[int, _Group]()
        for i, group in enumerate(optimizer.param_groups):
            params = group["params"]
            if any(group.get(name) for name in _OTHERWISE):
                continue
            group_runs, most = before.get(i), math.inf if may_fuse(optimizer, group) else _MOST
            if group_runs is None or not group_runs.is_valid(params, optimizer, most, self._rooms):
                group_runs = _joined(params, optimizer, most, self._rooms())
            groups[i] = group_runs
            group["params"] = [
                *[run.open(optimizer) for run in group_runs.runs],
                *group_runs.alone,
                *group_runs.idle,
            ]
            substitutes += group_runs.runs


def _joined(
    params: Sequence[torch.Tensor], optimizer: torch.optim.Optimizer, most: float, rooms: Mapping[int, int]
) -> _Group:
    joined = _Group(list(map(id, params)), most, [], [], [p for p in params if p.grad is None])
    for members in _adjacent([p for p in params if p.grad is not None], most, rooms):
        room_of = [_room(p, rooms) for p in members]
        is_joined = len(members) > 1 or (room_of[0] > members[0].numel() and _may_join(members[0]))
        run = _FlatRun.of(members, optimizer, room_of) if is_joined else None
        if run is None:
            joined.alone.extend(members)
        else:
            joined.runs.append(run)
    return joined


class _FlatRun:
    """Parameters one after the other.

    Args:
        states: theirs.
        rooms: elements that are each one's alone, with what is left free behind it.
    """

    def __init__(self, members: list[torch.Tensor], states: list[State], rooms: list[int]) -> None:
        self._members, self._states = members, states
        grads = list(map(_grad, members))
        self._places = _steps(members), _steps(grads)
        self._starts = [step // members[0].itemsize for step in self._places[0]]
        self._rooms, self._address = rooms, _address(members[0])
        self._n = self._starts[-1] + rooms[-1]
        if not all(_reaches(x[0], self._n) for x in (members, grads)):
            self._n = self._starts[-1] + members[-1].numel()
        self._state: State = {}
        self._flat: torch.Tensor | None = None
        # by name: those of the members that are views of a buffer, and of single numbers that buffer
        self._views: dict[str, list[torch.Tensor]] = {}
        self._numbers: dict[str, torch.Tensor] = {}

    @staticmethod
    def of(
        members: list[torch.Tensor], optimizer: torch.optim.Optimizer, rooms: list[int]
    ) -> _FlatRun | None:
        """A run, if the states of its members allow it."""
        states: list[State] = [optimizer.state.get(p, {}) for p in members]
        if any(state.keys() != states[0].keys() for state in states):
            return None
        run = _FlatRun(members, states, rooms)
        if len(members) == 1 and run._n == members[0].numel():
            return None  # what is free behind it is not behind its gradient, too
        joined = {name: run._join([state[name] for state in states]) for name in states[0]}
        if any(x is _APART for x in joined.values()):
            return None
        run._state = joined
        for name in joined:
            run._share(name)
        return run

    def _join(self, values: list[Any]) -> Any:
        """One of the states of all, from those of the members; ``_APART`` where they cannot be one."""
        first = values[0]
        if not isinstance(first, torch.Tensor):
            return _APART if any(x is not first and x != first for x in values) else first
        if any(not isinstance(x, torch.Tensor) or _dtype(x) is not _dtype(first) for x in values):
            return _APART
        tensors = [plain(x) for x in values]
        if all(x.ndim == 0 and x.equal(tensors[0]) for x in tensors):
            return tensors[0].clone()
        if not all(x.shape == p.shape and x.is_cpu for x, p in zip(tensors, self._members, strict=True)):
            return _APART
        flat = tensors[0].new_zeros(self._n)
        foreach_copy_(self._parts(flat), tensors)
        return flat

    def _parts(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The members' parts of a flat tensor."""
        parts = zip(self._members, self._starts, strict=True)
        return [flat[start : start + p.numel()].view(p.shape) for p, start in parts]

    def is_valid(self, optimizer: torch.optim.Optimizer, rooms: Rooms) -> bool:
        """Whether its members still follow each other, and have the states that it gave them."""
        grads = list(map(_grad, self._members))
        if any(grad is None for grad in grads) or not all(map(_in_a_row, grads)):
            return False
        if (_steps(self._members), _steps(grads)) != self._places:
            return False
        if not (_reaches(self._members[0], self._n) and _reaches(grads[0], self._n)):
            return False
        if _address(self._members[0]) != self._address:
            now = rooms()
            if [_room(p, now) for p in self._members] != self._rooms:
                return False
            self._address = _address(self._members[0])
        # there are none before the first step, or after a load of none
        held = zip(map(optimizer.state.get, self._members), self._states, strict=True)
        if not all(now is states or not (now or states) for now, states in held):
            return False
        try:
            for name, parts in self._views.items():
                if not all(map(is_, map(itemgetter(name), self._states), parts)):
                    return False
        except KeyError:
            return False
        return all(x.equal(self._state[name].expand_as(x)) for name, x in self._numbers.items())

    def open(self, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        """The flat tensor that is all its members, with its gradient and state."""
        first = self._members[0]
        assert first.grad is not None
        self._flat = first.detach().as_strided((self._n,), (1,))
        self._flat.grad = plain(first.grad).as_strided((self._n,), (1,))
        if self._state:
            optimizer.state[self._flat] = self._state
        return self._flat

    def close(self, optimizer: torch.optim.Optimizer) -> None:
        """Give the members their parts of what the optimizer has made of the run."""
        assert self._flat is not None
        before, self._state = dict(self._state), optimizer.state.pop(self._flat, {})
        self._flat = None
        for name, x in self._state.items():
            if name not in before or x is not before[name]:
                self._share(name)
                optimizer.state.update(zip(self._members, self._states, strict=True))
            elif name in self._numbers:
                self._numbers[name].fill_(x)
        increment_version(self._members)

    def _share(self, name: str) -> None:
        """Let each member have its part of one of the states of all."""
        x = self._state[name]
        parts: list[Any] = [x] * len(self._members)
        if isinstance(x, torch.Tensor) and not x.ndim:
            self._numbers[name] = x.repeat(len(parts))
            parts = self._views[name] = list(self._numbers[name].unbind())
            self._state[name] = parts[0]
        elif isinstance(x, torch.Tensor):
            parts = self._views[name] = self._parts(x)
            for p, part in zip(self._members, parts, strict=True):
                if (layout := getattr(p, "_layout", None)) is not None:
                    stamp(part, layout)
        for states, part in zip(self._states, parts, strict=True):
            states[name] = part


def _steps(tensors: Sequence[torch.Tensor]) -> list[int]:
    """How far each lies behind the first, in bytes."""
    start = _address(tensors[0])
    return [_address(x) - start for x in tensors]


def _in_one(first: torch.Tensor, last: torch.Tensor) -> bool:
    """Whether memory that begins with a tensor goes on to the end of another."""
    return _reaches(first, (_address(last) - _address(first)) // first.itemsize + plain(last).numel())


def _reaches(first: torch.Tensor, elements: int) -> bool:
    """Whether so many elements are there from the first of a tensor on."""
    storage = plain(first).untyped_storage()
    return _address(first) + elements * first.itemsize <= storage.data_ptr() + storage.nbytes()


def _room(p: torch.Tensor, rooms: Mapping[int, int]) -> int:
    return max(rooms.get(id(p), 0), p.numel())


def _may_join(p: torch.Tensor) -> bool:
    """Whether it and its gradient may be parts of flat tensors."""
    grad = _grad(p)
    return p.ndim > 0 and p.is_cpu and _dtype(grad) is p.dtype and p.is_contiguous() and _in_a_row(grad)


def _adjacent(
    params: Sequence[torch.Tensor], most: float, rooms: Mapping[int, int]
) -> list[list[torch.Tensor]]:
    """Parameters with gradients, by stretches in which both lie one after the other."""
    stretches: list[list[torch.Tensor]] = []
    ours = theirs = free = 0  # where the last ones end, and how many bytes are free behind them
    left = 0.0
    for address, _, p in sorted([(p.data_ptr(), i, p) for i, p in enumerate(params)]):
        grad, n = _grad(p), p.numel()
        at, joins = _address(grad), _may_join(p)
        follows = address - ours == at - theirs and 0 <= address - ours <= free
        fits = joins and 0 < n <= left and follows and p.dtype is stretches[-1][0].dtype
        if fits and _in_one(stretches[-1][0], p) and _in_one(_grad(stretches[-1][0]), grad):
            stretches[-1].append(p)
        else:
            stretches.append([p])
            left = most if joins else 0
        ours, theirs, left = address + p.nbytes, at + p.nbytes, left - n
        free = (_room(p, rooms) - n) * p.itemsize
    return stretches
