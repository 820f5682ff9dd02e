"""The engine's optimizer step: on local tensors (see ``espalier.tensor.stepping``), fused and joined."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as raw
from torch.optim import optimizer as _base

from espalier.engine.norm import scale_gradients
from espalier.engine.runs import Runs
from espalier.parallel.fused import fused
from espalier.tensor import DTensor, lay_out, redistribute
from espalier.tensor.deferred import make_values_real
from espalier.tensor.stepping import ELEMENTWISE, on_locals, stamp_states

_set_grad = vars(torch._C.TensorBase)["grad"].__set__


def refuse_closures(optimizer: torch.optim.Optimizer) -> None:
    """Check that an optimizer steps once for each backward pass.

    Raises:
        ValueError: it wants to compute the loss itself, as often as it likes (LBFGS).
    """
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"{type(optimizer).__name__}.step needs a closure, and the engine steps once for each backward "
            "pass. Use another optimizer."
        )


def lay_out_states(optimizer: torch.optim.Optimizer) -> None:
    """States that the optimizer held before its parameters were laid out lie as these do.

    So do, at the next update, those that others have made or loaded since.

    Raises:
        ValueError: one has no memory, and is on no tape.
    """
    for p, state in optimizer.state.items():
        if isinstance(p, DTensor):
            if not p._layout.mesh.is_dry:
                make_values_real(state)
            for name, x in state.items():
                if isinstance(x, torch.Tensor) and x.ndim and x.shape == p.shape:
                    state[name] = lay_out(x, p._layout)
    _meet_others_states(optimizer)
    optimizer.register_load_state_dict_post_hook(_meet_others_states)


def _meet_others_states(optimizer: torch.optim.Optimizer) -> None:
    optimizer._has_others_states = True  # type: ignore[attr-defined]


@torch.no_grad()
def _take_over(optimizer: torch.optim.Optimizer, parameters: list[DTensor]) -> None:
    """Bring states that others gave it to where those lie that an update makes.

    Plain ones are whole, and the same on every rank: ``load_state_dict`` of what one process saved.
    """
    for p in parameters:
        layout, state = p._layout.own, optimizer.state.get(p, {})
        for name, x in state.items():
            if not isinstance(x, torch.Tensor) or x.shape != layout.shape or not x.ndim:
                continue
            if not isinstance(x, DTensor):
                state[name] = lay_out(x, layout, source=None)
            elif x._layout.own is not layout:
                state[name] = redistribute(x, layout)
            if x.dtype is not p.dtype and torch.promote_types(x.dtype, p.dtype) is p.dtype:
                state[name] = state[name].to(p.dtype)  # of a master, which torch takes for its parameter


def update(
    optimizer: torch.optim.Optimizer,
    factor: torch.Tensor | float | None = None,
    runs: Runs | None = None,
) -> None:
    """``optimizer.step()``, of gradients times ``factor``; its states lie as their parameters do.

    Args:
        runs: joins parameters that lie one after the other.
    """
    held = _held(optimizer)
    parameters = [p for p in held if type(p) is DTensor]
    if optimizer.__dict__.pop("_has_others_states", False):
        _take_over(optimizer, parameters)
    if type(optimizer) not in ELEMENTWISE:
        if factor is not None:
            scale_gradients(parameters, factor)
        optimizer.step()
        return
    outside = {id(p) for p in held if type(p) is not DTensor}
    alone: list[Any] = list(parameters)

    @contextmanager
    def prepared() -> Iterator[None]:
        nonlocal alone
        with nullcontext(alone) if runs is None else runs.joined(optimizer) as alone:
            if factor is not None and not watched:
                scale_gradients([p for p in _held(optimizer) if id(p) not in outside], factor)
            with fused(optimizer):
                yield

    with on_locals(parameters):
        watched = _is_watched(optimizer)
        if watched and factor is not None:
            scale_gradients(parameters, factor)
        with _within_hooks(optimizer, prepared()) if watched else prepared():
            optimizer.step()
    stamp_states(optimizer, alone)


def _held(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def forget_gradients(optimizer: torch.optim.Optimizer) -> None:
    """``optimizer.zero_grad()``, past DTensor's Python getters."""
    if type(optimizer).zero_grad is not torch.optim.Optimizer.zero_grad:
        optimizer.zero_grad(set_to_none=True)
        return
    with raw():
        for p in _held(optimizer):
            p.__dict__.pop("_reduced", None)
            _set_grad(p, None)


def _is_watched(optimizer: torch.optim.Optimizer) -> bool:
    """Whether somebody looks at its parameters in a step."""
    of_all = (getattr(_base, f"_global_optimizer_{when}_hooks", None) for when in ("pre", "post"))
    own = (getattr(optimizer, f"_optimizer_step_{when}_hooks", None) for when in ("pre", "post"))
    return getattr(optimizer.step, "hooked", True) and any((*of_all, *own))


@contextmanager
def _within_hooks(optimizer: torch.optim.Optimizer, around: AbstractContextManager[None]) -> Iterator[None]:
    """While open, a step enters ``around`` after all hooks before it, and leaves it before all after it."""
    entered = ExitStack()

    def enter(*_: Any) -> None:
        entered.enter_context(around)

    before = optimizer.register_step_pre_hook(enter)
    after = optimizer.register_step_post_hook(lambda *_: entered.close())
    optimizer._optimizer_step_post_hooks.move_to_end(after.id, last=False)  # type: ignore[attr-defined]
    try:
        with entered:
            yield
    finally:
        before.remove()
        after.remove()


__all__ = ["ELEMENTWISE", "forget_gradients", "lay_out_states", "update"]
