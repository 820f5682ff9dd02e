"""``torch.vmap`` and ``torch.func``'s transforms on DTensors: functions without a rule.

Transforms wrap tensors in C++, where the type would be lost. So what goes into one is gathered, every
rank computes all of it on plain tensors, and what comes out is replicated again; gradients flow. DTensors
that the transformed function finds elsewhere (a module's parameters, what a closure holds) are gathered
when it uses them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.func
from torch.overrides import TorchFunctionMode

from espalier.comm import move
from espalier.comm.custom_ops import recorders, recording
from espalier.comm.redistribute import on_dry
from espalier.layout import Layout, any_alive
from espalier.meanwhile import having
from espalier.tensor.dtensor import DTensor, layout_of, plain, stamp, up_to_date
from espalier.tensor.fallback import GatherWarning, cut_again, writes
from espalier.tensor.meshes import brought, refuse_copies
from espalier.tensor.observers import tell
from espalier.torch_private import (
    JVP,
    VJP,
    close_saving_hooks,
    function_mode_stack,
    functorch_apis,
    functorch_transforms,
    open_saving_hooks,
    outside_transforms,
    raw,
    saved_tensors_hooks,
    version_of,
    without_torch_functions,
)
from espalier.trees import flat_map, flatten

# where transforms begin, looked up at each call
_DOORS = (
    (functorch_apis, "vmap_impl"),
    (functorch_transforms, "grad_impl"),
    (functorch_transforms, "grad_and_value_impl"),
    (functorch_transforms, JVP),
    (functorch_transforms, VJP),
    (functorch_transforms, "linearize"),
    (torch.func, "linearize"),
)


class Inside(TorchFunctionMode):
    """While on, calls of DTensors are calls of whole plain tensors.

    Args:
        apart: the axes along which the ranks use them differently.

    Attributes:
        held: the layouts of what was gathered.
        is_idle: whether one within it gathers something.
    """

    is_idle = False

    def __init__(self, apart: Sequence[int] = ()) -> None:
        super().__init__()
        self.held: list[Layout] = []
        self._apart = apart
        self._known: dict[int, tuple[DTensor, int, torch.Tensor]] = {}

    def whole(self, x: Any) -> Any:
        """A DTensor's values on every rank, plain; gathered once. Of what holds tensors for ``vmap``, all."""
        if type(x) is not DTensor:
            return x.apply(self.whole) if _holds_for_vmap(x) else x
        with outside_transforms(), raw(), _idle():
            known = self._known.get(id(x))
            count = version_of(x)
            if known is None or known[1] != count or count < 0:
                now = up_to_date(x)
                mesh = now._layout.mesh
                if mesh.outermost.beside is not None and mesh.outermost is not mesh:
                    # of a stage, to which other ranks come, too: it is not the stage that computes
                    refuse_copies("torch.vmap, or a transform of torch.func,", [now], mesh.outermost)
                    now = brought(now, mesh.outermost)
                layout = layout_of(now)
                self.held.append(layout)
                to = Layout.replicated(layout.mesh, layout.shape).with_deferred(self._apart)
                known = self._known[id(x)] = (x, count, plain(move(now, layout, to)))
        return known[2]

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if DTensor not in types or self.is_idle:
            return func(*args, **kwargs)
        if writes(func) and type(args[0]) is DTensor:
            raise NotImplementedError(
                f"{getattr(func, '__name__', func)} writes to a DTensor ({args[0]._layout!r}) inside of "
                "torch.vmap or a transform of torch.func. Give it back instead, and write to it outside."
            )
        args, kwargs = flat_map(self.whole, (args, kwargs))
        mesh = self.held[-1].mesh
        if mesh.is_dry:
            with without_torch_functions():  # the program has not called this
                args, kwargs = flat_map(lambda x: x.to(mesh.device_type), (args, kwargs), torch.Tensor)
        return func(*args, **kwargs)


@contextmanager
def _idle() -> Iterator[None]:
    """While open, transforms around the one that gathers something leave its calls alone."""
    with ExitStack() as stack:
        for mode in function_mode_stack():
            if isinstance(mode, Inside):
                stack.enter_context(having(mode, is_idle=True))
        yield


_GIVING = (VJP, "linearize")  # a value and a function
_BESIDE_HOOKS = ("vmap_impl", JVP, "linearize")  # these mind none


_KEPT = (
    "A transform of torch.func in a block that is computed again in the backward pass, or has its "
    "activations elsewhere until then: what these calls save is kept as it is, since torch's transforms "
    "take no hooks. The numbers are right, and this part of the block needs the memory that it needs without "
    "a plan. To save it, write what is transformed out."
)


def _holds_for_vmap(x: Any) -> bool:
    """Whether it is a container that itself gives its tensors to ``vmap``, as tensordict's do."""
    return hasattr(type(x), "_add_batch_dim") and hasattr(type(x), "apply")


def open_transforms() -> None:
    """Let transforms take DTensors."""
    for module, name in _DOORS:
        if hasattr(module, name):  # private, so it may go
            setattr(module, name, _transform(getattr(module, name), name in _GIVING))


def _transform(door: Callable[..., Any], gives: bool = False) -> Callable[..., Any]:
    @functools.wraps(door)
    def entered(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return door(*args, **kwargs)
        if recording():
            raise not_recorded(f"a function is transformed (torch.vmap, torch.func.grad: {door.__name__})")
        if door.__name__ not in _BESIDE_HOOKS and saved_tensors_hooks(True) is not None:
            tell(_KEPT)
            with _without_hooks():
                return entered(*args, **kwargs)
        has_dtensors = any(type(x) is DTensor for x in flatten((args, kwargs))[0])
        if not has_dtensors and (not any_alive() or in_transform() is not None):
            return door(*args, **kwargs)
        out = _on_wholes(door, args, kwargs)
        return (out[0], _transform(out[1]), *out[2:]) if gives else out

    return entered


@contextmanager
def _without_hooks() -> Iterator[None]:
    """While open, what autograd saves is kept as it is: torch's transforms take no hooks on that."""
    opened: list[tuple[Any, Any]] = []
    while (hooks := saved_tensors_hooks(True)) is not None:
        opened.append(hooks)
        close_saving_hooks()
    try:
        yield
    finally:
        for pack, unpack in reversed(opened):
            open_saving_hooks(pack, unpack)


def not_recorded(what: str) -> NotImplementedError:
    """What says that a compiled region calls something that no graph has."""
    return NotImplementedError(
        f"espalier.compile: {what} inside the compiled region. A graph is recorded of calls on tensors, not "
        "of functions that are called for each row or score. Leave this part out of the region: compile the "
        "modules around it, each on its own. Or write it on whole batches; attention as "
        "F.scaled_dot_product_attention(..., attn_mask=...), whose mask may be an argument or a buffer."
    )


def in_transform() -> Inside | None:
    """The mode of the transform that is at work."""
    modes = function_mode_stack() if recorders() else ()
    return next((mode for mode in modes if isinstance(mode, Inside)), None)


def _on_wholes(call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    mode = Inside()
    args, kwargs = flat_map(mode.whole, (args, kwargs))
    if mode.held and mode.held[0].mesh.is_dry:
        mesh = mode.held[0].mesh
        args, kwargs = flat_map(lambda x: on_dry(x, mesh), (args, kwargs), torch.Tensor)
    with mode:
        out = call(*args, **kwargs)
    if not mode.held or in_transform() is not None:
        return out
    if any(not lay.is_plain for lay in mode.held):
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
    tell(
        "torch.vmap or a transform of torch.func is given DTensors that are not replicated: they are "
        "gathered and every rank computes all. The result is right, but slow. Where rows are independent, "
        "espalier.local_map(torch.vmap(f), out_placements=[...]) lets each rank compute its own.",
        GatherWarning,
    )
