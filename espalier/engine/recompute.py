"""Activation recomputation: what a block computed is dropped, and computed again for its backward pass.

Chen et al. 2016 (Training Deep Nets with Sublinear Memory Cost); selective: Korthikanti et al. 2022.
It is torch's non-reentrant checkpointing around the ``forward`` of each block, so that modules and
parameters keep their names, and hooks of modules (gathering along the data axis) fall outside of it.
"""

from __future__ import annotations

import copy
import difflib
import fnmatch
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial, wraps
from types import MappingProxyType, MethodType
from typing import Any

import torch
from torch import nn
from torch._C import DisableTorchFunctionSubclass as raw
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import _get_current_function_mode_stack
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)

from espalier.comm.moves import carry_out
from espalier.comm.traced import recorders, recording
from espalier.layout import Layout
from espalier.layout.layout import R, V
from espalier.parallel import Plan
from espalier.parallel.data.chunks import cut_dim
from espalier.parallel.data.units import blocks
from espalier.tensor import DTensor, plain
from espalier.tensor.dispatch import tensors_in
from espalier.tensor.fallback import tree_map
from espalier.tensor.functions import layouts_of, stamped
from espalier.tensor.saved import Outer, outer_hooks

Policy = Callable[..., Any]

_aten = torch.ops.aten
_BATCHED = (_aten.bmm.default, _aten.baddbmm.default)
_KEPT = frozenset(
    getattr(_aten, name).default
    for name in (
        "mm",
        "addmm",
        "convolution",
        "_grouped_mm",
        "_scaled_mm",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_fused_attention_overrideable",
    )
    if hasattr(_aten, name)
)


def keep_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """The policy of ``"selective"``: matrix products and outputs of attention are kept, the rest recomputed.

    A batched product that is larger than what it is made of is recomputed: the scores of an attention.
    """
    keep = op in _KEPT
    if op in _BATCHED:
        a, b = args[-2:]
        keep = a.shape[-2] * b.shape[-1] <= max(a.shape[-2] * a.shape[-1], b.shape[-2] * b.shape[-1])
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def chosen(model: nn.Module, plan: Plan) -> dict[str, str]:
    """For each block that is to be recomputed, by name, ``"full"`` or ``"selective"``.

    Raises:
        ValueError: the model has no lists of blocks, or patterns match none of them.
    """
    if plan.recompute == "none":
        return {}
    names = list(blocks(model))
    if not names:
        raise ValueError(
            f"recompute = {plan.recompute!r}: {type(model).__name__} has no list of blocks (nn.ModuleList, "
            "nn.Sequential, nn.ModuleDict) to recompute one by one. Put its layers into one, or leave it out."
        )
    if isinstance(plan.recompute, str):
        return dict.fromkeys(names, plan.recompute)
    wrong = [
        f"{pattern!r} matches no block{_close(pattern, names)}"
        for pattern in plan.recompute
        if not fnmatch.filter(names, pattern)
    ]
    if wrong:
        raise ValueError("\n  ".join([f"recompute: blocks of {type(model).__name__}:", *wrong]))
    found = {}
    for name in names:
        kind = next((k for p, k in plan.recompute.items() if fnmatch.fnmatchcase(name, p)), "none")
        if kind != "none":
            found[name] = kind
    return found


def _close(pattern: str, names: Sequence[str]) -> str:
    close = difflib.get_close_matches(pattern, names, 3, 0.4) or names[:3]
    return f"; close: {', '.join(close)}"


def recompute(model: nn.Module, kinds: Mapping[str, str], inputs: str, policy: Policy | None = None) -> None:
    """Let blocks be recomputed, in place.

    Args:
        kinds: see :func:`chosen`.
        inputs: what is kept of a block's inputs: see ``Plan.recompute_inputs``.
        policy: in place of :func:`keep_products`.
    """
    contexts = partial(create_selective_checkpoint_contexts, policy or keep_products)
    for name, kind in kinds.items():
        _wrap(model.get_submodule(name), contexts if kind == "selective" else noop_context_fn, inputs)


def _wrap(block: nn.Module, contexts: Callable[..., Any], inputs: str) -> None:
    replaced = block.__dict__.get("forward")
    written = _Written(contexts)

    @wraps(type(block).forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        own = partial(type(self).forward, self) if replaced is None else replaced
        if not torch.is_grad_enabled():
            return own(*args, **kwargs)
        found = {id(x): x for x in tensors_in((args, kwargs))}
        places = {key: _Place(i) for i, key in enumerate(found)}
        tree = tree_map(lambda x: places.get(id(x), _held(x)), (args, kwargs))
        del args, kwargs
        call = _Call(own, tree, list(found.values()))
        with raw():
            tensors = [plain(x) for x in found.values()]
        with _keeping(inputs, list(found.values())):
            return checkpoint(call, *tensors, use_reentrant=False, context_fn=partial(written.contexts, self))

    # a method, so that a copy of the block gets one of its own
    block.forward = MethodType(forward, block)


class _Place:
    """Stands for a tensor among a call's arguments."""

    def __init__(self, number: int) -> None:
        self.number = number


class _Call:
    """A block's call, given its local tensors: the first time, and again for the backward pass.

    Both times the block sees new DTensors: what is remembered on one (its moved form) must not tell the two
    apart. And what autograd keeps is plain, so that modes find local shapes only. Function modes (a default
    device, say) do not reach into a backward pass: those of the first time hold the second time too.
    """

    def __init__(self, own: Callable[..., Any], tree: Any, inputs: Sequence[torch.Tensor]) -> None:
        self._own, self._tree, self._layouts = own, tree, layouts_of(inputs)
        self._modes = _get_current_function_mode_stack() if recorders() else ()

    def __call__(self, *tensors: torch.Tensor) -> Any:
        inputs = stamped(tensors, self._layouts)

        def value(x: Any) -> Any:
            if isinstance(x, _Place):
                return inputs[x.number]
            return x.take() if isinstance(x, _Cache) else x

        args, kwargs = tree_map(value, self._tree)
        with ExitStack() as stack:
            if self._modes and not recorders():
                for mode in self._modes:
                    stack.enter_context(mode)
            return self._own(*args, **kwargs)


class _Written:
    """The buffers and parameters that a block writes to, by which modules are in training mode."""

    def __init__(self, contexts: Callable[..., Any]) -> None:
        self._contexts = contexts
        self._names: dict[tuple[bool, ...], list[str]] = {}

    def contexts(self, block: nn.Module) -> tuple[Any, Any]:
        """Around the first computation of a block and the later ones, in ``torch.utils.checkpoint``'s sense.

        These find what is written to as the first did, and leave it as it is.
        """
        first, again = self._contexts()
        modes = tuple(m.training for m in block.modules())
        known = self._names.get(modes)
        every = dict((*block.named_buffers(), *block.named_parameters())) if known != [] else {}
        held = {n: x for n, x in every.items() if not x.is_meta and (known is None or n in known)}
        if not held or recording():
            return first, again
        before = _values(held)

        def settle() -> None:
            now = _values(held)
            for name in held:
                if torch.equal(now[name], before[name]):
                    del before[name]
            self._names[modes] = list(before)

        return _Around(first, at_end=settle) if known is None else first, _Around(again, held, before)


class _Around:
    """A context within which some tensors have other values.

    Args:
        at_end: is called when it closes without an error.
    """

    def __init__(
        self,
        inner: AbstractContextManager[Any],
        held: Mapping[str, torch.Tensor] = MappingProxyType({}),
        values: Mapping[str, torch.Tensor] = MappingProxyType({}),
        at_end: Callable[[], None] = lambda: None,
    ) -> None:
        self._inner, self._held, self._values, self._at_end = inner, held, values, at_end
        self._now: Mapping[str, torch.Tensor] = {}

    def __enter__(self) -> None:
        self._now = _values({name: self._held[name] for name in self._values})
        _put(self._held, self._values)
        self._inner.__enter__()

    def __exit__(self, *error: Any) -> Any:
        told = self._inner.__exit__(*error)
        _put(self._held, self._now)
        if error[0] is None:
            self._at_end()
        return told


def _values(held: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    with raw(), torch.no_grad():
        return {name: plain(x.detach()).clone() for name, x in held.items()}


def _put(held: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor]) -> None:
    with raw(), torch.no_grad():
        for name, value in values.items():
            plain(held[name].data).copy_(value)  # what is saved for backward does not count it as written to


class _Cache:
    """A cache of keys and values (transformers'), to which blocks write."""

    def __init__(self, given: Any) -> None:
        self._given, self._before = given, _copied(given)

    def take(self) -> Any:
        """The cache given; from the second time on, one as that was before the first."""
        given, self._given = self._given, None
        return _copied(self._before) if given is None else given


def _held(x: Any) -> Any:
    return _Cache(x) if hasattr(x, "get_seq_length") and hasattr(x, "update") else x


def _copied(x: Any) -> Any:
    """A copy of a cache, its layers and lists; tensors and all else are shared."""
    if isinstance(x, dict | list | tuple):
        return tree_map(_copied, x)
    if isinstance(x, torch.Tensor | nn.Module) or not hasattr(x, "update"):
        return x
    twin = copy.copy(x)
    vars(twin).update({name: _copied(value) for name, value in vars(x).items()})
    return twin


# ---- what is kept of a block's inputs


def _keeping(inputs: str, tensors: Sequence[torch.Tensor]) -> AbstractContextManager[Any]:
    """While open, what is saved of the inputs that need gradients is saved as the plan says."""
    if inputs == "whole":
        return nullcontext()
    kept: dict[Any, Layout | None] = {}
    for x in tensors:
        if x.requires_grad and not isinstance(x, nn.Parameter):
            with raw():
                kept[_identity(x)] = _sharded(x) if inputs == "sharded" else None
    outer = outer_hooks(True)

    def pack(x: torch.Tensor) -> Any:
        with raw():
            key = _identity(x)
        if key not in kept or (inputs == "sharded" and kept[key] is None):
            return x if outer is None else Outer(outer[0](x), outer[1])
        return _OnHost(x) if inputs == "host" else _Piece(x, kept[key], outer)

    def unpack(held: Any) -> torch.Tensor:
        return held if isinstance(held, torch.Tensor) else held.get()

    return saved_tensors_hooks(pack, unpack)


def _identity(x: torch.Tensor) -> Any:
    return x.untyped_storage()._cdata, x.storage_offset(), tuple(x.shape), tuple(x.stride())


def _sharded(x: torch.Tensor) -> Layout | None:
    """Where ``x`` lies when it is cut along the tensor axis; None if it cannot be, or is already."""
    if type(x) is not DTensor or "tensor" not in x._layout.mesh.names:
        return None
    layout = x._layout.own
    axis = layout.mesh.axis("tensor")
    n = layout.mesh.shape[axis]
    whole = [d for d, cut in enumerate(layout.cuts) if not cut and layout.shape[d] >= n]
    if n == 1 or layout.axes[axis] not in (R, V) or not whole:
        return None
    dim = cut_dim([layout.shape[d] for d in whole], n)
    assert dim is not None
    return layout.with_axis(axis, whole[dim])


class _Piece:
    """This rank's slice of an input that is replicated along the tensor axis."""

    def __init__(self, x: torch.Tensor, layout: Layout | None, outer: Any) -> None:
        assert layout is not None
        self._layout = layout
        self._full, self._stride = layout.with_axis(layout.mesh.axis("tensor"), R), x.stride()
        with torch.no_grad(), raw():
            piece = plain(carry_out(plain(x.detach()), self._full, layout)).clone()
        self._held: Any = piece if outer is None else Outer(outer[0](piece), outer[1])

    def get(self) -> torch.Tensor:
        piece = self._held.get() if isinstance(self._held, Outer) else self._held
        with torch.no_grad(), raw():
            return _in_memory(carry_out(piece, self._layout, self._full), self._stride)


class _OnHost:
    """An input in (pinned) host memory."""

    def __init__(self, x: torch.Tensor) -> None:
        self._device, self._dry = x.device, x.is_meta
        with torch.no_grad(), raw():
            self._stride = x.stride()
            if self._dry:
                self._held = torch.empty((), dtype=x.dtype, device=x.device).expand(x.shape)
                return
            self._held = torch.empty_like(x, device="cpu", pin_memory=x.is_cuda)
            self._held.copy_(x, non_blocking=True)

    def get(self) -> torch.Tensor:
        here = self._held if self._dry else self._held.to(self._device, non_blocking=True)
        return _in_memory(here, self._stride)


def _in_memory(x: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    """``x`` with its elements where they were: a block that is run again must find it as the first time."""
    if x.stride() == stride:
        return x
    own = [1 if step == 0 else n for n, step in zip(x.shape, stride, strict=True)]
    out = torch.empty_strided(own, stride, dtype=x.dtype, device=x.device)
    return out.copy_(x[tuple(slice(n) for n in own)]).expand(x.shape)


__all__ = ["chosen", "keep_products", "recompute"]
