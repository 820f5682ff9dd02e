"""Losses of derivatives (penalties, equations) of a model in stages: its output with a graph, on every rank.

The graph of a pass through stages is on several ranks, each with its own part, and is gone after it. So for
``torch.autograd.grad(..., create_graph=True)`` the model is computed once more, whole, on every rank, with
parameters that are brought there: gradients go back to those where they lie.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from espalier.blocks import named_parameters_in
from espalier.engine.awaited_source import Source
from espalier.engine.full_model import full_copy
from espalier.engine.kept import Kept, captured, evaluated, with_writes
from espalier.layout import Layout
from espalier.mesh import Mesh
from espalier.parallel.pipeline.arguments import called, mapped
from espalier.parallel.pipeline.objects import closed
from espalier.parallel.pipeline.observed import Observed
from espalier.tensor import DTensor, stamp
from espalier.tensor.meshes import brought
from espalier.tensor.observers import user_frame
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


def with_graph(
    loss: Kept, sought: Sequence[torch.Tensor], allow_unused: bool | None, materialize_grads: bool
) -> tuple[torch.Tensor | None, ...]:
    """``torch.autograd.grad`` of a loss with respect to inputs of the model, of which losses may be made.

    Args:
        sought: tensors that all ranks have, whole.
    """
    with torch.enable_grad():
        grads = torch.autograd.grad(
            whole_loss(loss, {}),
            sought,
            create_graph=True,
            allow_unused=allow_unused,
            materialize_grads=materialize_grads,
        )
        return tuple(None if grad is None else loss._source.on_all(grad) for grad in grads)


def whole_loss(loss: Kept, stand: Mapping[int, torch.Tensor]) -> torch.Tensor:
    """What a program has made of the output, with a graph, as a DTensor of all ranks.

    Args:
        stand: for inputs, and for what it is made of beside the output; by ``id``.
    """
    warnings.warn(_WHOLE, stacklevel=user_frame()[0])
    source = loss._source
    with torch.enable_grad():
        beside = captured(with_writes(loss, Kept._made_of))
        given = {id(x): source.on_all(stand.get(id(x), x)) for x in beside}
        output = source.whole_output(stand)
        value: torch.Tensor = evaluated(loss, given, lambda: output, fresh=True)
        return value


def replaced(inputs: Any, stand: Mapping[int, torch.Tensor], mesh: Mesh) -> Any:
    """Inputs, or what stands for some of their tensors, on all ranks."""
    return mapped(
        lambda x: on_all_ranks(stand.get(id(x), x), mesh) if isinstance(x, torch.Tensor) else x, inputs
    )


def is_of_inputs(source: Source, sought: Sequence[torch.Tensor]) -> bool:
    """Whether what is sought are inputs, or what they are made of, which all ranks have whole."""
    if source.made_by or not source.may_be_whole():
        return False
    return bool(sought) and all(type(x) is torch.Tensor and x.requires_grad for x in sought)


_WHOLE = (
    "torch.autograd.grad(..., create_graph=True) in a pipeline, or a loss that multiplies an output with its "
    "derivatives or with parameters of the model: for it the model is computed once more, whole, on every "
    "rank, with all its weights. Right, but slow. Such losses (penalties on gradients, equations in "
    "derivatives) train quicker under a plan without pipe, or computed in the model's forward."
)
