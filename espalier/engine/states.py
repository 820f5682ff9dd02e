"""States of optimizers: how they lie, and what state dicts give and take of them."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NoReturn

import torch

from espalier.comm.control import gather_objects
from espalier.engine.all_stages import step_by_closure
from espalier.engine.beside import held_by
from espalier.layout import Layout
from espalier.mesh import Mesh
from espalier.parallel.data.zero import ZeroState
from espalier.parallel.several import inner_of, parts_of
from espalier.tensor import DTensor, full_tensor, lay_out, redistribute
from espalier.tensor.deferred import make_values_real
from espalier.tensor.dtensor import is_sparse
from espalier.tensor.loans import is_whole
from espalier.tensor.stored import parts_are_asked_for
from espalier.trees import tree_map


@torch.no_grad()
def sum_states(optimizer: torch.optim.Optimizer) -> None:
    """Do what sums are still to be done in states that an optimizer has made by itself (a collective)."""

    def summed(x: Any) -> Any:
        if type(x) is not DTensor or not x._layout.partial:
            return x
        return redistribute(x, Layout.replicated(x._layout.mesh, tuple(x.shape)))

    for state in optimizer.state.values():
        for name, x in state.items():
            state[name] = tree_map(summed, x)


def lay_out_states(
    optimizer: torch.optim.Optimizer,
    data: ZeroState,
    whole_among: Callable[[], Mesh | None],
    has_masters: bool,
) -> None:
    """States that an optimizer held before its parameters were laid out lie as these do, where planned.

    So do, at the next update, those that others have made or loaded since.

    Args:
        whole_among: gives the mesh among whose ranks ``optimizer.state_dict()`` is to be whole; None: it has
            what this rank holds. Held weakly.
        has_masters: parameters show less of their values than is updated.

    Raises:
        ValueError: one has no memory, and is on no tape.
    """
    _take_whole(optimizer)
    with data.updating(keep=True, exchange=False, gradients=False):
        for p, state in optimizer.state.items():
            if isinstance(p, DTensor):
                if not p._layout.mesh.is_dry:
                    make_values_real(state)
                for name, x in state.items():
                    is_plain = isinstance(x, torch.Tensor) and not isinstance(x, DTensor)
                    if is_plain and x.ndim and x.shape == p.shape:
                        state[name] = lay_out(x, p._layout.own)
        parts = parts_of(optimizer)
        for part in (*parts, *filter(None, map(inner_of, parts))):  # which may answer for it
            if has_masters:
                _keep_precision(part)
            _exchange_states(part, weakref.WeakMethod(whole_among))
    data.place(optimizer)
    if "pipe" in data.mesh.outermost.names and data.strangers is None:
        data.strangers = Strangers(whole_among)
        data.mesh.outermost.strangers.add(data.strangers)


def _take_whole(optimizer: torch.optim.Optimizer) -> None:
    """Make states whole, on all ranks, that come of another plan and are of a pipeline's parameters now.

    Later the ranks of one stage alone would ask for them.
    """
    for p, state in optimizer.state.items():
        if not isinstance(p, DTensor) or "pipe" not in (whole := p._layout.mesh.outermost).names:
            continue
        for name, x in state.items():
            others = x._layout.mesh if isinstance(x, DTensor) and x.ndim else whole
            if "pipe" not in others.outermost.names and others.size() == whole.size():
                state[name] = full_tensor(x)


class Strangers:
    """Optimizers that step by themselves on an engine's parameters: they were made when it had one.

    On each rank they have the states of its stages; what they give and are given is of all of them, too.

    Args:
        whole_among: as of :func:`lay_out_states`.
    """

    def __init__(self, whole_among: Callable[[], Mesh | None]) -> None:
        self._whole_among = weakref.WeakMethod(whole_among)
        self._known: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

    def see_step(self, optimizer: torch.optim.Optimizer) -> None:
        """It is about to step by itself."""
        if optimizer not in self._known:
            self._known.add(optimizer)
            _exchange_states(optimizer, self._whole_among)
        if optimizer.__dict__.pop("_has_others_states", False):
            take_over(optimizer, [p for p in held_by(optimizer) if type(p) is DTensor])

    def step(self, optimizer: torch.optim.LBFGS, step: Callable[..., Any], closure: Callable[[], Any]) -> Any:
        """It steps by itself, and makes one thing of the parameters of all stages (a collective)."""
        if vars(optimizer).get("_takes_all_stages") and optimizer not in self._known:
            return step(optimizer, closure)  # an engine sees to that
        optimizer._takes_all_stages = True  # type: ignore[attr-defined]
        self.see_step(optimizer)
        return step_by_closure(optimizer, closure, step)


def _exchange_states(
    optimizer: torch.optim.Optimizer, whole_among: weakref.WeakMethod[Callable[[], Mesh | None]]
) -> None:
    """Let states that it is given, or has, be met, and those that it gives be as they are asked for."""
    meet_others_states(optimizer)
    optimizer.register_load_state_dict_post_hook(meet_others_states)
    optimizer.register_state_dict_post_hook(partial(_give, whole_among))


def _give(
    whole_among: weakref.WeakMethod[Callable[[], Mesh | None]],
    optimizer: torch.optim.Optimizer,
    state_dict: dict[str, Any],
) -> dict[str, Any]:
    """What ``optimizer.state_dict()`` gives: whole plain tensors, or this rank's parts."""
    state_dict = {**state_dict, "state": _own_states(optimizer, state_dict)}
    asked = whole_among()
    mesh = None if asked is None or parts_are_asked_for() else asked()
    if mesh is not None:
        return whole_states(state_dict, mesh)
    # what every rank has whole is plain: so it is read where there are no ranks
    held = tree_map(
        lambda x: x.to_local() if type(x) is DTensor and is_whole(x._layout) else x, state_dict["state"]
    )
    return {**state_dict, "state": held}


def _own_states(optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]) -> dict[Any, Any]:
    """Without those of parameters in stages of other ranks: some optimizers make such, of no values."""
    groups = zip(state_dict["param_groups"], optimizer.param_groups, strict=False)
    numbered = {n: p for said, own in groups for n, p in zip(said["params"], own["params"], strict=False)}
    elsewhere = {n for n, p in numbered.items() if type(p) is DTensor and not p._layout.mesh.is_member}
    return {n: states for n, states in state_dict["state"].items() if n not in elsewhere}


@torch.no_grad()
def whole_states(state: Mapping[str, Any], mesh: Mesh | None = None) -> dict[str, Any]:
    """An optimizer's state dict with whole plain tensors (a collective).

    Args:
        mesh: of all ranks, whose stages have states of their own if it has an axis ``pipe``.
    """
    whole: dict[Any, Any] = {}
    for key, states in _in_order(state["state"]):
        held = dict(_in_order(states)) if isinstance(states, dict) else {"": states}
        values = apart(tree_map(lambda x: x.full_tensor() if type(x) is DTensor else x, held))
        whole[key] = values if isinstance(states, dict) else values[""]
    if mesh is not None and "pipe" in mesh.names:
        of_stages = gather_objects(whole, mesh["pipe"])
        whole = dict(_in_order({key: x for states in reversed(of_stages) for key, x in states.items()}))
    return {**state, "state": whole}


def _in_order(of: Mapping[Any, Any]) -> list[tuple[Any, Any]]:
    """Ranks have filled them in their own order; some optimizers have names beside numbers."""
    return sorted(of.items(), key=lambda item: (isinstance(item[0], str), item[0]))


def meet_others_states(optimizer: torch.optim.Optimizer) -> None:
    """Have states looked at before the next update: some may lie as others left them.

    Raises:
        ValueError: all are of parameters in stages of other ranks.
    """
    _take_whole(optimizer)
    held = held_by(optimizer)
    elsewhere = {p for p in held if isinstance(p, DTensor) and not p._layout.mesh.is_member}
    strange = elsewhere & set(optimizer.state)
    # frozen ones have none, and LBFGS has all its states with the first
    lacks = any(p.requires_grad for p in held if p not in elsewhere)
    lacks = lacks and not vars(optimizer).get("_takes_all_stages")
    if strange and lacks and elsewhere.issuperset(optimizer.state):
        raise ValueError(
            "optimizer.load_state_dict: these states are of another rank's stages. Load what this rank "
            "saved; or write engine.save(path) and engine.load(path), of all stages and for any plan."
        )
    for p in strange:
        del optimizer.state[p]
    if elsewhere and type(vars(optimizer).get("state")) is defaultdict:
        optimizer.state = _StatesOfStages(dict, optimizer.state)
    optimizer._has_others_states = True  # type: ignore[attr-defined]


class _StatesOfStages(defaultdict[Any, Any]):
    """States by parameters; of one in a stage of other ranks there are none here, and a look adds none."""

    def __missing__(self, p: Any) -> Any:
        if isinstance(p, DTensor) and not p._layout.mesh.is_member:
            return _Elsewhere(self, p)
        return super().__missing__(p)

    def __delitem__(self, p: Any) -> None:
        self.pop(p)

    def pop(self, p: Any, *default: Any) -> Any:
        """Drop a state, where it is: all ranks may."""
        if p not in self and not default and isinstance(p, DTensor) and not p._layout.mesh.is_member:
            return _Elsewhere(self, p)
        return super().pop(p, *default)


class _Elsewhere(dict[str, Any]):
    """States of a parameter in a stage of other ranks: nothing, until an optimizer puts it there."""

    def __init__(self, states: dict[Any, Any], p: DTensor) -> None:
        super().__init__()
        self._states, self._p = states, p

    def __setitem__(self, name: str, x: Any) -> None:
        self._states[self._p] = self
        super().__setitem__(name, x)

    def __missing__(self, name: str) -> NoReturn:
        raise ValueError(
            f"optimizer.state[p][{name!r}] of a parameter of the shape {list(self._p.shape)} that lies in a "
            "pipeline's stage of another rank: its states are there alone. Where all ranks call it, "
            "optimizer.state_dict()['state'] has those of all parameters, by their numbers. Where each rank "
            "is to work on those it has, ask first: if p in optimizer.state."
        )


def _keep_precision(optimizer: torch.optim.Optimizer) -> None:
    """Have states stay in the dtypes in which they are loaded: torch gives them that of the parameter."""
    under_way: list[dict[str, Any]] = []
    optimizer._has_masters = True  # type: ignore[attr-defined]

    def begin(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        under_way[:] = [state_dict]

    def end(optimizer: torch.optim.Optimizer) -> None:
        came = under_way.pop()
        numbers = [number for group in came["param_groups"] for number in group["params"]]
        held = [p for group in optimizer.param_groups for p in group["params"]]
        for number, p in zip(numbers, held, strict=True):
            state = optimizer.state.get(p, {})
            for name, x in came["state"].get(number, {}).items():
                if isinstance(x, torch.Tensor) and _is_wider(x.dtype, state[name].dtype):
                    state[name] = x.to(state[name].device)

    optimizer.register_load_state_dict_pre_hook(begin)
    optimizer.register_load_state_dict_post_hook(end)


def _is_wider(dtype: torch.dtype, other: torch.dtype) -> bool:
    return dtype is not other and torch.promote_types(dtype, other) is dtype


@torch.no_grad()
def take_over(optimizer: torch.optim.Optimizer, parameters: list[DTensor]) -> None:
    """Bring states that others gave it to where those lie that an update makes.

    Plain ones are whole, and the same on every rank: ``load_state_dict`` of what one process saved. An
    optimizer may keep some in fewer bits than its parameters have.
    """
    has_masters = optimizer.__dict__.get("_has_masters", False)
    for p in parameters:
        layout, state = p._layout.own, optimizer.state.get(p, {})
        for name, x in state.items():
            if not isinstance(x, torch.Tensor) or not x.ndim:
                continue
            if has_masters and x.is_floating_point() and _is_wider(p.dtype, x.dtype):
                x = state[name] = x.to(p.dtype)  # of a master, which torch takes for its parameter
            if x.shape != layout.shape:
                continue
            if not isinstance(x, DTensor):
                state[name] = lay_out(x, layout, source=None)
            elif x._layout.own is not layout:
                state[name] = redistribute(x, layout)


def has_strays(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the program has put a state in an optimizer's that lies otherwise than its parameter."""
    for p, state in optimizer.state.items():
        if type(p) is not DTensor:
            continue
        layout = p._layout.own
        for x in state.values():
            if type(x) is DTensor:
                lies = x._layout
                if lies is not layout and lies.own is not layout and lies.shape == layout.shape:
                    return True
            elif isinstance(x, torch.Tensor) and x.ndim and tuple(x.shape) == layout.shape:
                return True
    return False


def like_parameter(layout: Layout, shape: tuple[int, ...]) -> Layout:
    """How a state of that shape lies, of a parameter that lies so: alike, or, of another shape, whole."""
    return layout if tuple(layout.shape) == shape else Layout.replicated(layout.mesh, shape)


@torch.no_grad()
def settle(optimizer: torch.optim.Optimizer, parameters: list[DTensor]) -> None:
    """Bring states that a step has made of other shapes (Adafactor's rows) to where a load puts them.

    So a run that goes on from a checkpoint sums in the order of one that was never broken off.
    """
    for p in parameters:
        state = optimizer.state.get(p, {})
        for name, x in state.items():
            if type(x) is DTensor and x.ndim:
                layout = like_parameter(p._layout.own, tuple(x.shape))
                if x._layout.own != layout:
                    state[name] = redistribute(x, layout)


def apart(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict whose tensors have memory of their own, and tied ones one memory.

    A file of a part of a larger memory, such as a chunk, holds all of it, or is refused.
    """
    copies: dict[Any, torch.Tensor] = {}

    def own(x: torch.Tensor) -> torch.Tensor:
        if is_sparse(x):
            return x.clone()
        if x.is_meta or x.untyped_storage().nbytes() == x.numel() * x.element_size():
            return x
        key = (x.data_ptr(), x.dtype, x.shape, x.stride())
        if key not in copies:
            copies[key] = x.clone()
        return copies[key]

    return {name: own(x) if isinstance(x, torch.Tensor) else x for name, x in state.items()}
