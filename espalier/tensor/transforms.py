"""``torch.vmap`` and ``torch.func``'s transforms on DTensors: functions without a rule.

Transforms wrap tensors in C++, where the type would be lost. So what goes into one is gathered, every rank
computes all of it on plain tensors, and what comes out is replicated again; gradients flow. DTensors that the
transformed function finds elsewhere (a module's parameters, what a closure holds) are gathered when it uses
them.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as raw
from torch._functorch import apis, eager_transforms
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from espalier.comm import move
from espalier.comm.moves import on_dry
from espalier.comm.traced import recorders
from espalier.layout import Layout, any_alive, same_data
from espalier.tensor.caller import user_frame
from espalier.tensor.dtensor import DTensor, layout_of, plain, stamp, up_to_date
from espalier.tensor.fallback import GatherWarning, cut_again, writes
from espalier.trees import flat_map, flatten

# where transforms begin, looked up at each call
_DOORS = (
    (apis, "vmap_impl"),
    (eager_transforms, "grad_impl"),
    (eager_transforms, "grad_and_value_impl"),
    (eager_transforms, "_jvp_with_argnums"),
    (eager_transforms, "_vjp_with_argnums"),
    (eager_transforms, "linearize"),
    (torch.func, "linearize"),
)


class Inside(TorchFunctionMode):
    """While on, calls of DTensors are calls of whole plain tensors.

    Args:
        apart: the axes along which the ranks use them differently.

    Attributes:
        held: the layouts of what was gathered.
    """

    def __init__(self, apart: Sequence[int] = ()) -> None:
        super().__init__()
        self.held: list[Layout] = []
        self._apart = apart
        self._known: dict[int, tuple[DTensor, int, torch.Tensor]] = {}

    def whole(self, x: Any) -> Any:
        """A DTensor's values on every rank, plain; gathered once."""
        if type(x) is not DTensor:
            return x
        with temporarily_clear_interpreter_stack(), raw():
            known = self._known.get(id(x))
            count = -1 if x.is_inference() else x._version
            if known is None or known[1] != count or count < 0:
                now = up_to_date(x)
                own = layout_of(now)
                self.held.append(own)
                to = Layout.replicated(own.mesh, own.shape).with_varied(self._apart)
                known = self._known[id(x)] = (x, count, plain(move(now, own, to)))
        return known[2]

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if DTensor not in types:
            return func(*args, **kwargs)
        if writes(func) and type(args[0]) is DTensor:
            raise NotImplementedError(
                f"{getattr(func, '__name__', func)} writes to a DTensor ({args[0]._layout!r}) inside of "
                "torch.vmap or a transform of torch.func. Give it back instead, and write to it outside."
            )
        args, kwargs = flat_map(self.whole, (args, kwargs))
        mesh = self.held[-1].mesh
        if mesh.is_dry:
            args, kwargs = flat_map(lambda x: x.to(mesh.device_type), (args, kwargs), torch.Tensor)
        return func(*args, **kwargs)


_GIVING = ("_vjp_with_argnums", "linearize")  # a value and a function


def open_doors() -> None:
    """Let transforms take DTensors."""
    for module, name in _DOORS:
        if hasattr(module, name):  # private, so it may go
            setattr(module, name, _transform(getattr(module, name), name in _GIVING))


def _transform(door: Callable[..., Any], gives: bool = False) -> Callable[..., Any]:
    @functools.wraps(door)
    def entered(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return door(*args, **kwargs)
        given = any(type(x) is DTensor for x in flatten((args, kwargs))[0])
        if not given and (not any_alive() or around() is not None):
            return door(*args, **kwargs)
        out = _on_wholes(door, args, kwargs)
        return (out[0], _transform(out[1]), *out[2:]) if gives else out

    return entered


def around() -> Inside | None:
    """The mode of the transform that is at work."""
    modes = _get_current_function_mode_stack() if recorders() else ()
    return next((mode for mode in modes if isinstance(mode, Inside)), None)


def _on_wholes(call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    mode = Inside()
    args, kwargs = flat_map(mode.whole, (args, kwargs))
    if mode.held and mode.held[0].mesh.is_dry:
        mesh = mode.held[0].mesh
        args, kwargs = flat_map(lambda x: on_dry(x, mesh), (args, kwargs), torch.Tensor)
    with mode:
        out = call(*args, **kwargs)
    if not mode.held or around() is not None:
        return out
    if any(not same_data(lay, Layout.replicated(lay.mesh, lay.shape)) for lay in mode.held):
        _warn()
    mesh, of_args = mode.held[0].mesh, tuple(mode.held)

    def typed(x: torch.Tensor) -> torch.Tensor:
        if type(x) is DTensor or x.layout is not torch.strided:
            return x
        with raw():
            return cut_again(stamp(x.view_as(x), Layout.replicated(mesh, tuple(x.shape))), of_args)

    return flat_map(typed, out, torch.Tensor)


@functools.lru_cache(maxsize=1)
def _warn() -> None:
    # cached: once
    warnings.warn(
        "torch.vmap or a transform of torch.func is given DTensors that are not replicated: they are "
        "gathered and every rank computes all. The result is right, but slow. Where rows are independent, "
        "espalier.local_map(torch.vmap(f), out_placements=[...]) lets each rank compute its own.",
        GatherWarning,
        stacklevel=user_frame()[0],
    )


__all__ = ["Inside", "open_doors"]
