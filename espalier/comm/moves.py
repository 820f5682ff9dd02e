"""Moves: routes carried out on local tensors, differentiable to any order.

The backward of a move is the move of the gradient between the gradient layouts (see
``espalier.layout.transitions``), again by the cheapest route.
"""

from __future__ import annotations

from typing import Any

import torch

from espalier.comm import collectives as door
from espalier.layout import Layout, Step, chunk_bounds, gradient_layout, route, same_data
from espalier.layout.layout import AxisState, V
from espalier.layout.transitions import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    IDENTITY,
    KEEP,
    PAD,
    REDUCE_SCATTER,
    SLICE,
)


def move(x: torch.Tensor, src: Layout, dst: Layout) -> torch.Tensor:
    """Take a local tensor from one layout to another, recorded by autograd.

    Args:
        x: this rank's local tensor, of ``src.local_shape``.

    Raises:
        ValueError: there is no route, or a reduction other than sum and avg needs a gradient.
    """
    if same_data(src, dst):
        return x
    scale = _average_factor(src, dst)
    if scale is not None:
        # an average is a sum of parts already divided
        x = x * scale if x.is_floating_point() else x
        src, dst = _as_sums(src), _as_sums(dst)
        if src is dst:
            return x
    if torch.is_grad_enabled() and x.requires_grad:
        unsummed = [s for s in src.axes if s in ("max", "min", "product")]
        if unsummed:
            raise ValueError(
                f"A Partial({unsummed[0]}) value that needs a gradient cannot be reduced: only sums and "
                "averages have one. Reduce over an unsharded dim, or redistribute before the operation."
            )
        out: torch.Tensor = _Move.apply(x, src, dst)  # type: ignore[no-untyped-call]
        return out
    return carry_out(x, src, dst)


def carry_out(x: torch.Tensor, src: Layout, dst: Layout) -> torch.Tensor:
    """Take a local tensor from one layout to another, without autograd."""
    for step in route(src, dst).steps:
        x = _do(x, step)
    return x


class _Move(torch.autograd.Function):
    espalier = True

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, src: Layout, dst: Layout) -> torch.Tensor:
        ctx.ends = src, dst
        out = carry_out(x, src, dst)
        return out.view_as(out) if out is x else out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        src, dst = ctx.ends
        return move(grad, gradient_layout(dst), gradient_layout(src)), None, None


def _do(x: torch.Tensor, step: Step) -> torch.Tensor:
    op, axis, src, dst = step
    mesh = src.mesh
    if op == IDENTITY:
        return x
    old, new = src.axes[axis], dst.axes[axis]
    if op == ALL_REDUCE:
        return door.all_reduce(x, mesh, axis, str(old))
    if op == ALL_GATHER:
        assert isinstance(old, int)
        return door.all_gather(x, mesh, axis, old, dst.local_shape[old])
    if op == REDUCE_SCATTER:
        assert isinstance(new, int)
        return door.reduce_scatter(x, mesh, axis, new)
    if op == ALL_TO_ALL:
        assert isinstance(old, int) and isinstance(new, int)
        return door.all_to_all(x, mesh, axis, new, old, dst.local_shape[old])
    n, here = mesh.shape[axis], mesh.coordinate[axis]
    if op == SLICE:
        assert isinstance(new, int)
        return x.narrow(new, *chunk_bounds(x.shape[new], n, here)).clone()
    if op == PAD:
        assert isinstance(old, int)
        out = x.new_zeros(dst.local_shape)
        out.narrow(old, *chunk_bounds(dst.local_shape[old], n, here)).copy_(x)
        return out
    assert op == KEEP
    return x if here == 0 else torch.zeros_like(x)


def _average_factor(src: Layout, dst: Layout) -> float | None:
    """What to multiply by when averages in either layout are written as sums; None without any."""
    factor = 1.0
    for n, old, new in zip(src.mesh.shape, src.axes, dst.axes, strict=True):
        if old != new:
            factor *= (1 / n if old == "avg" else 1) * (n if new == "avg" else 1)
    return factor if "avg" in src.axes or "avg" in dst.axes else None


def _as_sums(layout: Layout) -> Layout:
    axes: tuple[AxisState, ...] = tuple("sum" if s == "avg" else s for s in layout.axes)
    return Layout.of(layout.mesh, axes, layout.cuts, layout.shape)


def vary(x: torch.Tensor, layout: Layout, axes: tuple[int, ...]) -> tuple[torch.Tensor, Layout]:
    """Mark that ranks along ``axes`` will use a replicated value differently."""
    varied = layout.with_varied(axes)
    assert all(varied.axes[a] == V for a in axes)
    return move(x, layout, varied), varied
