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
from espalier.layout import Layout, same_data
from espalier.layout.layout import R
from espalier.tensor.dtensor import DTensor, layout_of, stamp
from espalier.tensor.rules.table import special

_plain_call = torch._C._disabled_torch_function_impl


@special(
    *(
        getattr(torch, name)
        for name in dir(torch)
        if name.startswith(("_foreach_", "_fused_")) and callable(getattr(torch, name))
    )
)
def foreach(
    func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """An elementwise function over lists of tensors."""
    layouts = [x._layout if type(x) is DTensor else None for x in args[0]]
    name = func.__name__
    written = name.endswith("_")
    if not _alike((*args, *kwargs.values()), layouts):
        layouts = [None if lay is None else _firm(lay) for lay in layouts]
        # fused optimizers write all lists but the gradients, the others only the first
        fused = name.startswith("_fused_")
        with raw():
            args = tuple(
                _aligned(a, layouts, written and (i == 0 or (fused and i != 1))) for i, a in enumerate(args)
            )
            kwargs = {k: _aligned(a, layouts, False) for k, a in kwargs.items()}
    out = _plain_call(func, types, args, kwargs)
    if isinstance(out, tuple | list) and not written:
        for x, lay in zip(out, layouts, strict=False):
            if lay is not None:
                stamp(x, lay)
    return out


def _alike(lists: tuple[Any, ...], layouts: list[Layout | None]) -> bool:
    """Whether nothing has to move: all lists of tensors lie as the first, none is Partial."""
    if not all(lay is None or lay.is_firm for lay in layouts):
        return False
    for a in lists:
        if isinstance(a, tuple | list) and len(a) == len(layouts) and a and isinstance(a[0], torch.Tensor):
            own = [x._layout if type(x) is DTensor else None for x in a]
            if own != layouts and not all(lay is None and not x.ndim for lay, x in zip(own, a, strict=True)):
                return False
    return True


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
        if own is not lay and own.shape == lay.shape and not same_data(own, lay):
            if written:
                raise ValueError(
                    f"An optimizer writes to a tensor that lies as {own!r} beside one that lies as {lay!r}; "
                    "element by element both must lie alike, and none be Partial. Redistribute it first."
                )
            x = move(x, own, lay)
        out.append(x)
    return type(a)(out) if type(a) in (tuple, list) else out


@special(torch._foreach_norm)
def foreach_norm(
    func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The norm of each tensor, global."""
    ord_ = args[1] if len(args) > 1 else kwargs.get("ord", 2)
    return tuple(torch.linalg.vector_norm(x, ord_, dtype=kwargs.get("dtype")) for x in args[0])


@special(torch._amp_foreach_non_finite_check_and_unscale_)
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
