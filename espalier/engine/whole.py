"""What an engine's ranks hold together, whole on each of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._C import DisableTorchFunctionSubclass as raw

from espalier.comm.collectives import sum_whole
from espalier.mesh import Mesh

Everywhere = Callable[[str, torch.Tensor], torch.Tensor]


def state_of(model: nn.Module, everywhere: Everywhere) -> dict[str, Any]:
    """A model's state dict.

    Args:
        everywhere: gives the whole value, on every rank, of what has a name and lies somehow.
    """
    with torch.no_grad():
        return {
            name: everywhere(name, x) if isinstance(x, torch.Tensor) else x
            for name, x in model.state_dict().items()
        }


def gradients_of(model: nn.Module, mesh: Mesh, everywhere: Everywhere) -> dict[str, torch.Tensor | None]:
    """The gradients of its parameters; None where no rank has one."""
    parameters = dict(model.named_parameters())
    grads = {name: p.grad for name, p in parameters.items()}
    with raw():
        has = [float(g is not None) for g in grads.values()]
        used = sum_whole(torch.tensor(has, device=mesh.device()), mesh).tolist()
    found: dict[str, torch.Tensor | None] = {}
    with torch.no_grad():
        for (name, p), n in zip(parameters.items(), used, strict=True):
            grad = grads[name]
            found[name] = everywhere(name, p if grad is None else grad) if n else None
    return found


__all__ = ["gradients_of", "state_of"]
