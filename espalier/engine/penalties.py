"""Losses of gradients (gradient penalties) of a model in stages: its output with a graph, on every rank.

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
from espalier.parallel.pipeline.objects import closed
from espalier.parallel.pipeline.observed import Observed
from espalier.parallel.pipeline.record import called, mapped
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
    """A plain tensor that all ranks have, as a DTensor."""
    if isinstance(x, DTensor):
        return x
    with raw():
        return stamp(x.view_as(x), Layout.replicated(mesh, tuple(x.shape)))


def with_graph(
    loss: Kept, sought: Sequence[torch.Tensor], allow_unused: bool | None, materialize_grads: bool
) -> tuple[torch.Tensor | None, ...]:
    """``torch.autograd.grad`` of a loss with respect to inputs of the model, of which losses may be made.

    Args:
        sought: tensors that all ranks have, whole.
    """
    warnings.warn(_WHOLE, stacklevel=user_frame()[0])
    source = loss._source
    with torch.enable_grad():
        stand = {id(x): source.on_all(x) for x in sought}
        given = {id(x): source.on_all(x) for x in captured(with_writes(loss, Kept._made_of))}
        output = source.whole_output(stand)
        value = evaluated(loss, given | stand, lambda: output, fresh=True)
        wanted = [stand[id(x)] for x in sought]
        return torch.autograd.grad(
            value,
            wanted,
            create_graph=True,
            allow_unused=allow_unused,
            materialize_grads=materialize_grads,
        )


def replaced(inputs: Any, stand: Mapping[int, torch.Tensor], mesh: Mesh) -> Any:
    """Inputs with what stands for some of their tensors, on all ranks."""
    return mapped(
        lambda x: stand.get(id(x), on_all_ranks(x, mesh)) if isinstance(x, torch.Tensor) else x, inputs
    )


def is_of_inputs(source: Source, sought: Sequence[torch.Tensor]) -> bool:
    """Whether what is sought are inputs, which all ranks give whole, of a call that meets no other."""
    if source.is_own or source.made_by:
        return False
    inputs = {id(x) for x in source.wanting() if not isinstance(x, DTensor)}
    return bool(sought) and inputs.issuperset(map(id, sought)) and source.may_be_whole()


_WHOLE = (
    "torch.autograd.grad(..., create_graph=True) in a pipeline: for it the model is computed once more, "
    "whole, on every rank, with all its weights. Right, but slow. Models with penalties on gradients train "
    "quicker under a plan without pipe."
)
