"""Steps of torch's optimizers on DTensors.

An optimizer that works element by element gives the same result on each rank's part as on the whole,
wherever parameters, gradients and states lie alike. So its step runs on the local tensors with torch
functions left alone, at the speed of plain tensors. Any other step goes operation by operation through
the dispatcher.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from espalier.layout import gradient_layout, same_data
from espalier.tensor.asked import each_for_itself
from espalier.tensor.dtensor import DTensor, set_class, stamp
from espalier.torch_private import getter, raw, torch_functions_on

# the C getter itself: to be called where torch functions are not intercepted
_grad = getter("grad")
ELEMENTWISE = (
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.ASGD,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
)


@contextmanager
def on_locals(parameters: Sequence[torch.Tensor]) -> Iterator[None]:
    """While open, these DTensors and their gradients are plain, and torch functions are left alone.

    So they are spared DTensor's Python getters; and on accelerators torch's choice of the foreach
    implementation, which goes by class, falls as for any other model.
    """
    with raw():
        grads = [g for g in map(_grad, parameters) if type(g) is DTensor]
        for p in parameters:
            set_class(p, nn.Parameter)
        for g in grads:
            set_class(g, torch.Tensor)
        try:
            yield
        finally:
            for p in parameters:
                set_class(p, DTensor)
            for g in grads:
                set_class(g, DTensor)


def stamp_states(optimizer: Optimizer) -> None:
    """Let the states that a step on local tensors has made lie as their parameters do."""
    for p, state in optimizer.state.items():
        if type(p) is DTensor and state and type(next(reversed(state.values()))) is not DTensor:
            layout = p._layout.own  # others than those of this step may be cut now
            for x in state.values():  # what a step has made comes last
                if type(x) is torch.Tensor and x.ndim and x.shape == layout.local_shape:
                    stamp(x, layout)


def install_steps() -> None:
    """Let torch's optimizers step on local tensors where they can (a second call does nothing)."""
    for optimizer in (*ELEMENTWISE, torch.optim.LBFGS):
        step = vars(optimizer).get("step")
        if step is None or getattr(step, "_espalier", False):
            continue
        made = _stepping_by_closure if optimizer is torch.optim.LBFGS else _stepping
        # within torch's own wrapper, which calls hooks: these see DTensors
        if getattr(step, "hooked", False):
            step = Optimizer.profile_hook_step(made(step.__wrapped__))
            step.hooked = True  # type: ignore[attr-defined]
        else:
            step = made(step)
        step._espalier = True  # type: ignore[attr-defined]
        optimizer.step = step  # type: ignore[method-assign]


def _stepping(step: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(step)
    def wrapped(self: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        if torch.compiler.is_compiling() or not torch_functions_on() or type(self) not in ELEMENTWISE:
            return step(self, closure)
        held = [p for group in self.param_groups for p in group["params"] if type(p) is DTensor]
        if not held:
            return step(self, closure)
        for strangers in [*held[0]._layout.mesh.outermost.strangers]:
            strangers.see_step(self)
        loss = None if closure is None else torch.enable_grad()(closure)()
        parameters = _alike(self)
        with each_for_itself(held):  # as each finds gradients of its own
            if parameters is None:
                step(self)
            else:
                with on_locals(parameters):
                    step(self)
                stamp_states(self)
        return loss

    return wrapped


def _stepping_by_closure(step: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(step)
    def wrapped(self: torch.optim.LBFGS, closure: Callable[[], Any]) -> Any:
        held = [p for group in self.param_groups for p in group["params"] if type(p) is DTensor]
        for strangers in [*held[0]._layout.mesh.outermost.strangers] if held else ():
            return strangers.step(self, step, closure)
        return step(self, closure)

    return wrapped


def _alike(optimizer: Optimizer) -> list[DTensor] | None:
    """Its DTensors, if each lies as its gradient and its states do."""
    dtensors: list[DTensor] = []
    states = optimizer.state
    with raw():
        for group in optimizer.param_groups:
            if group.get("differentiable") or any(type(x) is DTensor for x in group.values()):
                return None
            for p in group["params"]:
                if type(p) is not DTensor:
                    continue
                layout = p._layout
                if layout.own is not layout or not layout.is_firm or "_reduced" in p.__dict__:
                    return None
                grad = _grad(p)
                if grad is not None:
                    grad_layout = grad._layout if type(grad) is DTensor else gradient_layout(layout)
                    if grad_layout is not layout and not same_data(grad_layout, layout):
                        return None
                for x in states.get(p, _NONE).values():
                    if type(x) is DTensor:
                        if x._layout is not layout and not same_data(x._layout, layout):
                            return None
                    elif isinstance(x, torch.Tensor) and x.ndim and x.shape != layout.local_shape:
                        return None
                dtensors.append(p)
    return dtensors


_NONE: dict[str, Any] = {}
