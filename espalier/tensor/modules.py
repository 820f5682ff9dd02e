"""Modules whose parameters are DTensors: torch's distribute_module."""

from __future__ import annotations

import functools
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
    _become(p, lay_out(p, layout, source=source))


def _become(p: nn.Parameter, made: DTensor) -> None:
    """Let a plain parameter be a DTensor."""
    with raw():
        p.grad = None
        p.data = made.detach().as_subclass(torch.Tensor)
    stamp(p, made._layout.own)._is_param = True


def typed_conversion(apply: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """torch's ``nn.Module._apply``, whose function may make DTensors of plain parameters, in place.

    torch alone would put a DTensor's local memory behind the plain parameter, and drop the type.
    """

    @functools.wraps(apply)
    def wrapped(self: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        def typed(x: torch.Tensor) -> torch.Tensor:
            out = fn(x)
            if type(out) is DTensor and type(x) is not DTensor and isinstance(x, nn.Parameter):
                _become(x, out)
                return x
            return out

        typed._espalier = True  # type: ignore[attr-defined]
        # the modules inside are given the wrapped function
        return apply(self, fn if getattr(fn, "_espalier", False) else typed, recurse)

    return wrapped


@contextmanager
def unwatched(model: nn.Module) -> Iterator[None]:
    """While open, nobody sees whether weights are exchanged for others: torch exchanges no tensor then.

    Recurrent modules do so by weak references. What a module has computed of its weights before (that of
    torch's ``weight_norm``, say) does by its graph, which is let go of.
    """
    for m in model.modules():
        for name in [k for k, x in vars(m).items() if isinstance(x, torch.Tensor) and not x.is_leaf]:
            vars(m)[name] = vars(m)[name].detach()
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
        partition_fn: ``partition_fn(name, submodule, device_mesh)``, called for each submodule; one of two
            arguments is not given the name. It may lay out parameters one by one, or all by
            ``submodule._apply(lambda t: distribute_tensor(t, device_mesh, placements))``, which keeps the
            parameters' identity.
        input_fn: ``input_fn(module, inputs, device_mesh)`` gives the inputs in place of a forward's own; one
            of two arguments is not given the module.
        output_fn: ``output_fn(module, outputs, device_mesh)``, likewise for the outputs.

    Raises:
        ValueError: it was called for this module before, or a function takes another number of arguments.
    """
    if getattr(module, "_distribute_module_applied", False):
        raise ValueError(
            f"distribute_module was called for this {type(module).__name__} before; it can be called once."
        )
    partition, enter, leave = (
        None if function is None else _of_three(function, name)
        for name, function in (
            ("partition_fn", partition_fn),
            ("input_fn", input_fn),
            ("output_fn", output_fn),
        )
    )
    mesh = as_mesh(device_mesh)
    given = mesh if device_mesh is None else device_mesh
    for name, part in module.named_modules():
        if partition is not None:
            partition(name, part, given)
        for p in part._parameters.values():
            if p is not None and not isinstance(p, DTensor):
                lay_out_parameter(p, Layout.replicated(mesh, tuple(p.shape)))
        for key, buffer in part._buffers.items():
            if buffer is not None and not isinstance(buffer, DTensor):
                part._buffers[key] = lay_out(buffer, Layout.replicated(mesh, tuple(buffer.shape)))
    if enter is not None:
        module.register_forward_pre_hook(lambda part, inputs: enter(part, inputs, given))
    if leave is not None:
        module.register_forward_hook(lambda part, inputs, outputs: leave(part, outputs, given))
    module._distribute_module_applied = True  # type: ignore[assignment]
    return module


def _of_three(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """A function of three arguments; one of two is not given the first.

    Raises:
        ValueError: it takes another number.
    """
    kinds = [p.kind for p in inspect.signature(function).parameters.values()]
    taken = kinds.count(inspect.Parameter.POSITIONAL_ONLY)
    taken += kinds.count(inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if taken == 3 or inspect.Parameter.VAR_POSITIONAL in kinds:
        return function
    if taken == 2:
        return lambda first, *rest: function(*rest)
    first = "the submodule's name, the submodule" if name == "partition_fn" else "the module, what passes"
    raise ValueError(
        f"{name} takes {taken} argument(s); expected three ({first}, device_mesh), or the last two of them."
    )
