"""Modules whose parameters are DTensors: torch's distribute_module."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._C import DisableTorchFunctionSubclass as raw

from espalier.layout import Layout
from espalier.mesh.mesh import MeshLike, as_mesh
from espalier.tensor.api import lay_out
from espalier.tensor.dtensor import DTensor, stamp


def lay_out_parameter(p: nn.Parameter, layout: Layout, *, source: int | Sequence[int] | None = 0) -> None:
    """Make a parameter a DTensor in place: who holds it (an optimizer, a tied module) goes on holding it.

    Raises:
        ValueError: it is a DTensor already, and lies otherwise.
    """
    if isinstance(p, DTensor):
        if p._layout is not layout:
            raise ValueError(
                f"A parameter that lies as {p._layout!r} is to lie as {layout!r} too: it was laid out "
                "before, or two modules share it. Say the same of both."
            )
        return
    local = lay_out(p, layout, source=source)
    with raw():
        p.grad = None
        p.data = local.detach().as_subclass(torch.Tensor)
    stamp(p, layout)._is_param = True


@contextmanager
def unwatched(model: nn.Module) -> Iterator[None]:
    """While open, recurrent modules don't see whether their weights are exchanged for others.

    They do so by weak references, and torch exchanges no tensor that has some.
    """
    watching: list[Any] = [m for m in model.modules() if isinstance(m, nn.RNNBase)]
    for m in watching:
        m._flat_weight_refs = []
    try:
        yield
    finally:
        for m in watching:
            m._flat_weight_refs = [None if w is None else weakref.ref(w) for w in m._flat_weights]


def distribute_module(
    module: nn.Module,
    device_mesh: MeshLike | None = None,
    partition_fn: Callable[..., None] | None = None,
    input_fn: Callable[..., Any] | None = None,
    output_fn: Callable[..., Any] | None = None,
) -> nn.Module:
    """Make a module's parameters and buffers DTensors, in place, and prepare what goes in and comes out.

    Args:
        module: what ``partition_fn`` leaves plain in it is replicated, with rank 0's values.
        device_mesh: by default the mesh whose ``with`` block is open.
        partition_fn: ``partition_fn(name, submodule, device_mesh)``, called for each submodule.
        input_fn: ``input_fn(module, inputs, device_mesh)`` gives the inputs in place of a forward's own.
        output_fn: ``output_fn(module, outputs, device_mesh)``, likewise for the outputs.

    Raises:
        ValueError: it was called for this module before, or a function takes another number of arguments.
    """
    if getattr(module, "_distribute_module_applied", False):
        raise ValueError(
            f"distribute_module was called for this {type(module).__name__} before; it can be called once."
        )
    for name, function in (("input_fn", input_fn), ("output_fn", output_fn)):
        taken = 3 if function is None else len(inspect.signature(function).parameters)
        if taken != 3:
            raise ValueError(
                f"{name} takes {taken} argument(s); expected 3: module, what passes, device_mesh."
            )
    mesh = as_mesh(device_mesh)
    given = mesh if device_mesh is None else device_mesh
    for name, part in module.named_modules():
        if partition_fn is not None:
            partition_fn(name, part, given)
        for p in part._parameters.values():
            if p is not None and not isinstance(p, DTensor):
                lay_out_parameter(p, Layout.replicated(mesh, tuple(p.shape)))
        for key, buffer in part._buffers.items():
            if buffer is not None and not isinstance(buffer, DTensor):
                part._buffers[key] = lay_out(buffer, Layout.replicated(mesh, tuple(buffer.shape)))
    if input_fn is not None:
        module.register_forward_pre_hook(lambda part, inputs: input_fn(part, inputs, given))
    if output_fn is not None:
        module.register_forward_hook(lambda part, inputs, outputs: output_fn(part, outputs, given))
    module._distribute_module_applied = True  # type: ignore[assignment]
    return module
