"""The model as on one process: plain and whole, without what a plan has put around it.

For losses of derivatives (penalties, equations) of a model in stages it is computed once more so, on every
rank, with parameters that are brought there: the graph of a pass through stages is on several ranks, and is
gone after it, and gradients go back through this one to parameters where they lie.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from espalier.blocks import as_it_was, called, named_parameters_in
from espalier.layout import Layout
from espalier.mesh import Mesh
from espalier.parallel.pipeline.arguments import mapped
from espalier.parallel.pipeline.objects import closed
from espalier.parallel.pipeline.observed import Observed
from espalier.tensor import DTensor, full_tensor, stamp
from espalier.tensor.dtensor import is_sparse, set_by_program, set_class
from espalier.tensor.meshes import brought
from espalier.tensor.names import made_in
from espalier.torch_private import COMPILED_CALL, HOOK_OPTIONS, HOOKS, TABLES, forward_hooks, raw
from espalier.trees import tensors_in


def full_copy(
    module: nn.Module,
    everywhere: Callable[[str, torch.Tensor], torch.Tensor],
    inner: Mapping[nn.Module, nn.Module] | None = None,
) -> nn.Module:
    """A copy of a module with plain whole parameters and buffers.

    Args:
        everywhere: gives the whole value, on every rank, of a parameter or buffer with that name.
        inner: modules in it that are copied already.
    """
    memo: dict[int, Any] = {id(m): full for m, full in (inner or {}).items()}
    if not memo:
        _note_whole(module, everywhere, memo)
    full = copy.deepcopy(module, memo)
    for m in full.modules():
        as_it_was(m)
        _leave_out_our_hooks(m)
        vars(m).pop(COMPILED_CALL, None)
    return full


@torch.no_grad()
def _note_whole(
    module: nn.Module, everywhere: Callable[[str, torch.Tensor], torch.Tensor], memo: dict[int, Any]
) -> None:
    """Have a copy find a module's tensors plain and whole, those too that a forward has set."""
    for name, x in (*nn.Module.named_parameters(module), *nn.Module.named_buffers(module)):
        # sparse ones lie whole on every rank
        whole = (x.detach() if is_sparse(x) else everywhere(name, x.detach())).clone()
        held = nn.Parameter(whole, x.requires_grad) if isinstance(x, nn.Parameter) else whole
        vars(held).update(copy.deepcopy(set_by_program(x)))
        if (kind := vars(held).pop("_kind", None)) is not None:
            set_class(held, kind)
        memo[id(x)] = held
    for x in tensors_in([*map(_own, module.modules())]):
        lies_here = type(x) is not DTensor or x._layout.mesh.is_member
        if id(x) not in memo and lies_here and (type(x) is DTensor or x.requires_grad):
            memo[id(x)] = full_tensor(x.detach()).clone()


def _own(module: nn.Module) -> list[Any]:
    """A module's attributes, but for what is registered."""
    return [x for name, x in vars(module).items() if name not in TABLES]


def _leave_out_our_hooks(module: nn.Module) -> None:
    for name in HOOKS:
        for key, hook in [*vars(module)[name].items()]:
            function = hook.func if isinstance(hook, functools.partial) else hook
            if made_in(function, "espalier"):
                for table in (name, *HOOK_OPTIONS):
                    vars(module)[table].pop(key, None)


def whole_output(
    model: nn.Module, everywhere: Callable[[str, torch.Tensor], torch.Tensor], mesh: Mesh, inputs: Any
) -> Any:
    """What a model in stages gives, as DTensors of all ranks, with a graph (a collective).

    Args:
        everywhere: gives the whole value, on every rank, of a parameter or buffer with that name.
        mesh: all of it.
    """
    full = full_copy(model, everywhere)
    _leave_out_lookers(model, full)
    return _called_whole(model, full, mesh, inputs)


def output_with_stand_ins(
    model: nn.Module, everywhere: Callable[[str, torch.Tensor], torch.Tensor], mesh: Mesh, inputs: Any
) -> Any:
    """:func:`whole_output` of a model in the place of whose parameters other tensors stand, for one call.

    The buffers that it has in that call are written to as on one process.
    """
    of_call = {name for name, _ in named_parameters_in(model)}

    def value(name: str, x: torch.Tensor) -> torch.Tensor:
        return torch.empty(x.shape, dtype=x.dtype) if name in of_call else everywhere(name, x)

    full = full_copy(model, value)
    before = [b.clone() for b in full.buffers()]  # norms write to theirs without a mark
    out = _called_whole(model, full, mesh, inputs)
    with torch.no_grad():
        for b, new, was in zip(model.buffers(), full.buffers(), before, strict=True):
            if not (b.is_meta or is_sparse(new) or torch.equal(full_tensor(new), was)):
                b.copy_(full_tensor(new))
    return out


def _leave_out_lookers(model: nn.Module, full: nn.Module) -> None:
    for m, copied in zip(model.modules(), full.modules(), strict=True):  # hooks that look have seen this call
        for hooks, those in zip(forward_hooks(m), forward_hooks(copied), strict=True):
            for key in [key for key, hook in hooks.items() if isinstance(hook, Observed)]:
                those.pop(key, None)


def _called_whole(model: nn.Module, full: nn.Module, mesh: Mesh, inputs: Any) -> Any:
    """What a copy gives, computed on all ranks with the model's parameters."""
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
