"""The optimizer step on local tensors.

An optimizer that works element by element gives the same result on each rank's part as on the
whole, wherever gradients lie as their parameters do. So its step runs with torch functions left
alone, at the speed of plain tensors. Other optimizers (norms, factorizations) step on DTensors.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch._C import DisableTorchFunctionSubclass as raw

from espalier.engine.norm import scale_gradients
from espalier.tensor import DTensor, lay_out, stamp
from espalier.tensor.deferred import make_values_real

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


def update(optimizer: torch.optim.Optimizer, factor: torch.Tensor | float | None = None) -> None:
    """``optimizer.step()``, of gradients times ``factor``; its states lie as their parameters do."""
    parameters = [p for group in optimizer.param_groups for p in group["params"] if type(p) is DTensor]
    if factor is not None:
        scale_gradients(parameters, factor)
    if type(optimizer) not in ELEMENTWISE:
        optimizer.step()
        return
    with raw():
        # as plain parameters they are spared DTensor's Python getters, and on CUDA torch's choice of
        # the foreach implementation, which goes by class, falls as for any other model
        for p in parameters:
            p.__class__ = nn.Parameter  # type: ignore[assignment]
        try:
            with _lined_up(optimizer):
                optimizer.step()
        finally:
            for p in parameters:
                p.__class__ = DTensor
    for p in parameters:
        for x in optimizer.state.get(p, {}).values():
            if type(x) is torch.Tensor and x.ndim and x.shape == p._layout.local_shape:
                stamp(x, p._layout)


@contextmanager
def _lined_up(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """While open, what a fused kernel updates is contiguous: it goes through memory and asks for no strides.

    A piece of a parameter that is cut on another dim than the first is not.
    """
    kept = []
    for p in (p for group in optimizer.param_groups if group.get("fused") for p in group["params"]):
        grad = p.grad
        if grad is None or (p.is_contiguous() and grad.is_contiguous()):
            continue  # and so are states, made like it
        state = {name: x for name, x in optimizer.state.get(p, {}).items() if isinstance(x, torch.Tensor)}
        kept.append((p, p.data))
        p.data, p.grad = p.data.contiguous(), grad.contiguous()
        for name, x in state.items():
            optimizer.state[p][name] = x.contiguous()
    try:
        yield
    finally:
        for p, data in kept:
            p.data = data.copy_(p.data)


__all__ = ["ELEMENTWISE", "lay_out_states", "update"]
