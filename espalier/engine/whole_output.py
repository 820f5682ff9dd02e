"""A model in stages computed whole on every rank, with a graph, as DTensors of all ranks.

The graph of a pass through stages is on several ranks, each with its own part, and is gone after it. So for
losses of derivatives (penalties, equations) the model is computed once more, whole, on every rank, with
parameters that are brought there: gradients go back to those where they lie.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from espalier.blocks import named_parameters_in
from espalier.engine.full_model import full_copy
from espalier.layout import Layout
from espalier.mesh import Mesh
from espalier.parallel.pipeline.arguments import called, mapped
from espalier.parallel.pipeline.objects import closed
from espalier.parallel.pipeline.observed import Observed
from espalier.tensor import DTensor, stamp
from espalier.tensor.meshes import brought
from espalier.torch_private import forward_hooks, raw


def whole_output(
    model: nn.Module, everywhere: Callable[[str, torch.Tensor], torch.Tensor], mesh: Mesh, inputs: Any
) -> Any:
    """What a model in stages gives, as DTensors of all ranks, with a graph (a collective).

    Args:
        everywhere: gives the whole value, on every rank, of a parameter or buffer with that name.
        mesh: all of it.
    """
    full = full_copy(model, everywhere)
    for m, copied in zip(model.modules(), full.modules(), strict=True):  # hooks that look have seen this call
        for hooks, those in zip(forward_hooks(m), forward_hooks(copied), strict=True):
            for key in [key for key, hook in hooks.items() if isinstance(hook, Observed)]:
                those.pop(key, None)
    parameters: dict[str, torch.Tensor] = {
        name: brought(p, mesh) if isinstance(p, DTensor) else p for name, p in named_parameters_in(model)
    }
    return called(lambda *args, **named: functional_call(full, parameters, args, named), closed(inputs))


def on_all_ranks(x: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """A plain tensor that all ranks have, or one of a stage, as a DTensor of all."""
    if isinstance(x, DTensor):
        return x if x._layout.mesh is mesh else brought(x, mesh)
    with raw():
        return stamp(x.view_as(x), Layout.replicated(mesh, tuple(x.shape)))


def replaced(inputs: Any, stand: Mapping[int, torch.Tensor], mesh: Mesh) -> Any:
    """Inputs, or what stands for some of their tensors, on all ranks."""
    return mapped(
        lambda x: on_all_ranks(stand.get(id(x), x), mesh) if isinstance(x, torch.Tensor) else x, inputs
    )
