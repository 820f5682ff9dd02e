"""Steps of torch's optimizers on DTensors.

An optimizer that works element by element gives the same result on each rank's part as on the whole, wherever
parameters, gradients and states lie alike. So its step runs on the local tensors with torch functions left
alone, at the speed of plain tensors. Any other step goes operation by operation through the dispatcher.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._C import DisableTorchFunctionSubclass as raw
from torch.optim import Optimizer

from espalier.layout import gradient_layout, same_data
from espalier.tensor.dtensor import DTensor, stamp

_intercepted = torch._C._is_torch_function_enabled
# the C getter itself: to be called where torch functions are not intercepted
_grad = vars(torch._C.TensorBase)["grad"].__get__

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

    So they are spared DTensor's Python getters; and on CUDA torch's choice of the foreach implementation,
    which goes by class, falls as for any other model.
    """
    with raw():
        grads = [g for g in map(_grad, parameters) if type(g) is DTensor]
        for p in parameters:
            p.__class__ = nn.Parameter
        for g in grads:
            g.__class__ = torch.Tensor  # type: ignore[assignment]
        try:
            yield
        finally:
            for p in parameters:
                p.__class__ = DTensor
            for g in grads:
                g.__class__ = DTensor


def stamp_states(optimizer: Optimizer, parameters: Iterable[torch.Tensor]) -> None:
    """Let the states that a step on local tensors has made lie as their parameters do."""
    states = optimizer.state
    for p in parameters:
        if type(p) is DTensor:
            for state in states.get(p, _NONE).values():
                if type(state) is torch.Tensor and state.ndim and state.shape == p._layout.local_shape:
                    stamp(state, p._layout)


def install() -> None:
    """Let torch's optimizers step on local tensors where they can (a second call does nothing)."""
    for optimizer in ELEMENTWISE:
        step = vars(optimizer).get("step")
        if step is None or getattr(step, "_espalier", False):
            continue
        # within torch's own wrapper, which calls hooks: these see DTensors
        if getattr(step, "hooked", False):
            step = Optimizer.profile_hook_step(_stepping(step.__wrapped__))
            step.hooked = True  # type: ignore[attr-defined]
        else:
            step = _stepping(step)
        step._espalier = True  # type: ignore[attr-defined]
        optimizer.step = step  # type: ignore[method-assign]


def _stepping(step: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(step)
    def wrapped(self: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        if torch.compiler.is_compiling() or not _intercepted() or type(self) not in ELEMENTWISE:
            return step(self, closure)
        if not any(type(p) is DTensor for group in self.param_groups for p in group["params"]):
            return step(self, closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        parameters = _alike(self)
        if parameters is None:
            step(self)
        else:
            with on_locals(parameters):
                step(self)
            stamp_states(self, parameters)
        return loss

    return wrapped


def _alike(optimizer: Optimizer) -> list[DTensor] | None:
    """Its DTensors, if each lies as its gradient and its states do."""
    found: list[DTensor] = []
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
                    own = grad._layout if type(grad) is DTensor else gradient_layout(layout)
                    if own is not layout and not same_data(own, layout):
                        return None
                for x in states.get(p, _NONE).values():
                    if type(x) is DTensor:
                        if x._layout is not layout and not same_data(x._layout, layout):
                            return None
                    elif isinstance(x, torch.Tensor) and x.ndim and x.shape != layout.local_shape:
                        return None
                found.append(p)
    return found


_NONE: dict[str, Any] = {}


__all__ = ["ELEMENTWISE", "install", "on_locals", "stamp_states"]
