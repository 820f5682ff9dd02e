"""torch._foreach_* and torch._fused_*: what optimizers call on lists of tensors.

Both work element by element, so where the tensors at one place of all lists lie alike, the call
runs on the local tensors. Where they do not (a gradient that still is Partial), the tensors of
the later lists are brought to the layout of the first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as raw

from espalier.comm import collectives as door
from espalier.comm import move
from espalier.layout import Layout
from espalier.layout.layout import R
from espalier.tensor.dtensor import DTensor, layout_of, stamp
from espalier.tensor.rules.spec import Rules


def foreach(
    func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """An elementwise function over lists of tensors."""
    layouts = [_firm(x._layout) if type(x) is DTensor else None for x in args[0]]
    written = func.__name__.endswith("_")
    with raw():
        args = tuple(_aligned(a, layouts, written and i == 0) for i, a in enumerate(args))
        kwargs = {k: _aligned(a, layouts, False) for k, a in kwargs.items()}
        out = func(*args, **kwargs)
    if isinstance(out, tuple | list) and not written:
        for x, lay in zip(out, layouts, strict=False):
            if lay is not None:
                stamp(x, lay)
    return out


def _firm(layout: Layout) -> Layout:
    """Without Partials: these functions are not linear."""
    axes = tuple(s if isinstance(s, int) or s == "V" else R for s in layout.axes)
    return Layout.of(layout.mesh, axes, layout.cuts, layout.shape)


def _aligned(a: Any, layouts: list[Layout | None], written: bool) -> Any:
    if not isinstance(a, tuple | list) or len(a) != len(layouts):
        return a
    out = []
    for x, lay in zip(a, layouts, strict=True):
        if not isinstance(x, torch.Tensor) or lay is None or (type(x) is not DTensor and x.ndim == 0):
            out.append(x)
            continue
        own = layout_of(x, lay.mesh)
        if own is not lay and own.axes != lay.axes and own.shape == lay.shape:
            if written:
                raise ValueError(
                    f"An optimizer writes to a tensor that lies as {own!r}; a Partial cannot be updated "
                    "element by element. Redistribute it first."
                )
            x = move(x, own, lay)
        out.append(x)
    return type(a)(out) if type(a) in (tuple, list) else out


def foreach_norm(
    func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The norm of each tensor, global."""
    ord_ = args[1] if len(args) > 1 else kwargs.get("ord", 2)
    return tuple(torch.linalg.vector_norm(x, ord_, dtype=kwargs.get("dtype")) for x in args[0])


def unscale(
    func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """GradScaler's check: an overflow anywhere is an overflow everywhere."""
    grads, found, scale = args
    with raw():
        func(grads, found, scale)
        for x in grads:
            if type(x) is DTensor:
                mesh = x._layout.mesh
                for axis in range(mesh.ndim):
                    found.copy_(door.all_reduce(found, mesh, axis, "max"))
                break
    return None


def register(rules: Rules) -> None:
    """Put the handlers of this file into the table."""
    for name in dir(torch):
        if name.startswith(("_foreach_", "_fused_")) and callable(getattr(torch, name)):
            rules.add_special(getattr(torch, name), foreach)
    rules.add_special(torch._foreach_norm, foreach_norm)
    rules.add_special(torch._amp_foreach_non_finite_check_and_unscale_, unscale)
