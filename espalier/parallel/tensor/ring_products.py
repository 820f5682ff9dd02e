"""Asynchronous tensor parallelism: products that go on while sequences are gathered, or sums are cut.

Under sequence parallelism a column layer gathers its input, and a row layer's addends are reduce-scattered;
the product waits for the one, and the other waits for it. Here both go round the ring of ranks piece by
piece (Wang et al. 2023, Overlap Communication with Dependent Computation via Decomposition): a piece of the
sequence is multiplied while the next one is on its way, and a sum travels on while the next addend is
computed. Backward is the mirror image. As many bytes are sent, and the pieces' products are those of the
whole.

Of several layers that share an input the first gathers it. Where a layer is not a plain linear one, its
tensors lie otherwise, or it is recorded, the layer goes the way of ``call_on_whole``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import nn

from espalier.comm.custom_ops import recorders
from espalier.comm.functions import MeetingFunction, OwnFunction
from espalier.comm.redistribute import redistribute_by, redistribute_plan
from espalier.comm.ring import SEQUENCE, Ring, gathered_products, multiply, summed_products
from espalier.layout import Layout
from espalier.layout.layout import D, R
from espalier.tensor.dry_autocast import autocast_dtype
from espalier.tensor.dtensor import DTensor, plain, stamp, up_to_date
from espalier.tensor.inputs import Move, known_gathered, remember_gathered
from espalier.tensor.saved import Shard, gather_before_backward
from espalier.torch_private import raw, takes_tangents

_FEATURES = 2  # of [batch, sequence, features]


class _Way(NamedTuple):
    """How a layer's input lies, how that is whole along the axis, and how what it gives lies."""

    src: Layout
    whole: Layout
    out: Layout
    ring: Ring


@lru_cache(maxsize=4096)
def _column(x: Layout, weight: Layout, bias: Layout | None, axis: int) -> _Way | None:
    """Of a layer whose weight is cut over the features that it gives."""
    cut = (axis,)
    fits = x.ndim == 3 and x.axes[axis] == SEQUENCE and x.cuts[1:] == (cut, ())
    if not (fits and weight.cuts == (cut, ()) and (bias is None or bias.cuts == (cut,))):
        return None
    if not _alike(x, weight, bias, axis):
        return None
    states = tuple(_FEATURES if a == axis else s for a, s in enumerate(x.axes))
    out = Layout.of(x.mesh, states, (x.cuts[0], (), cut), (*x.shape[:2], weight.shape[0]))
    return _Way(x, x.with_axis(axis, D), out, Ring(x.mesh, axis, x.shape[SEQUENCE]))


@lru_cache(maxsize=4096)
def _row(x: Layout, weight: Layout, bias: Layout | None, axis: int) -> _Way | None:
    """Of one whose weight is cut over the features that it is given."""
    cut = (axis,)
    fits = x.ndim == 3 and x.axes[axis] == _FEATURES and x.cuts[1:] == ((), cut)
    if not (fits and weight.cuts == ((), cut) and (bias is None or bias.axes[axis] == R)):
        return None
    if not _alike(x, weight, bias, axis) or x.shape[SEQUENCE] < x.mesh.shape[axis]:
        return None
    shape = (*x.shape[:2], weight.shape[0])
    states = tuple(SEQUENCE if a == axis else s for a, s in enumerate(x.axes))
    out = Layout.of(x.mesh, states, (x.cuts[0], cut, ()), shape)
    return _Way(x, out.with_axis(axis, D), out, Ring(x.mesh, axis, x.shape[SEQUENCE]))


def _alike(x: Layout, weight: Layout, bias: Layout | None, axis: int) -> bool:
    """Whether nothing is to be done along other axes than that of the product."""
    if x.mesh is not weight.mesh or x.mesh.shape[axis] == 1 or not x.mesh.is_member:
        return False
    for a, n in enumerate(x.mesh.shape):
        of_x, of_weight = x.axes[a], weight.axes[a]
        is_deferred = of_weight == D and (of_x == D or of_x == 0)
        if n > 1 and a != axis and not (is_deferred or of_x == of_weight == R):
            return False
        if n > 1 and a != axis and bias is not None and bias.axes[a] != of_weight:
            return False
    return True


def product(module: nn.Module, own: Callable[..., Any], x: Any, axis: int) -> DTensor | None:
    """What a linear layer gives for an input, of which pieces travel while others are multiplied.

    None where it is to be called as it is.
    """
    is_plain = getattr(own, "func", None) is nn.Linear.forward and type(x) is DTensor
    if not is_plain or recorders() or takes_tangents() or torch.is_inference_mode_enabled():
        return None
    weight, bias = module.weight, module.bias
    if type(weight) is not DTensor or (bias is not None and type(bias) is not DTensor):
        return None
    x, weight = up_to_date(x), up_to_date(weight)
    bias = None if bias is None else up_to_date(bias)
    if x.dtype is not weight.dtype and autocast_dtype(x.device.type) is None:
        return None  # as torch says of it
    layouts = x._layout.own, weight._layout.own, None if bias is None else bias._layout.own
    if (way := _column(*layouts, axis)) is not None:
        return None if is_known(x, way) else _gathered(x, weight, bias, way)
    way = _row(*layouts, axis)
    return None if way is None else _scattered(x, weight, bias, way)


def is_known(x: DTensor, way: _Way) -> bool:
    """Whether an input has been gathered already, for another layer."""
    return known_gathered(x, _move(way.src, way.whole)) is not None


@lru_cache(maxsize=4096)
def _move(src: Layout, dst: Layout) -> Move:
    return Move((), src, dst)


def _gathered(x: DTensor, weight: DTensor, bias: DTensor | None, way: _Way) -> DTensor:
    with raw():
        operands = _cast(weight, bias)
        held: list[Shard] = []
        source = plain(x)
        if source.requires_grad and torch.is_grad_enabled():
            source = _Node.apply(source)
        out, whole = _GatheredProduct.apply(source, *operands, way, held)
        if whole.requires_grad and torch.is_grad_enabled():
            held.append(Shard(x, whole, way.src, way.whole, source.grad_fn))
            whole._shard = held[0]
            gather_before_backward(out, held)
        remember_gathered(x, _move(way.src, way.whole), stamp(whole, way.whole))
        return stamp(out, way.out)


def _scattered(x: DTensor, weight: DTensor, bias: DTensor | None, way: _Way) -> DTensor:
    with raw():
        return stamp(_ScatteredProduct.apply(plain(x), *_cast(weight, bias), way), way.out)


def _cast(*tensors: torch.Tensor | None) -> list[torch.Tensor | None]:
    """Parameters, plain, in the dtype that autocast would give them."""
    locals_ = [None if t is None else plain(t) for t in tensors]
    dtype = autocast_dtype(next(t for t in locals_ if t is not None).device.type)
    if dtype is None:
        return locals_
    return [None if t is None else t if t.dtype is torch.float64 else t.to(dtype) for t in locals_]


def _flat(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, x.shape[-1])


class _Node(OwnFunction):
    """Nothing but a place in the graph: backward comes by when a gathered product is done."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> torch.Tensor | None:
        return grad


class _GatheredProduct(MeetingFunction):
    """A column layer's product, and its whole input, which others share."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        way: _Way,
        held: list[Shard],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.set_materialize_grads(False)
        ctx.way, ctx.held, ctx.dtype = way, held, x.dtype
        whole, out = gathered_products(way.ring, x, [weight.t()], [bias])
        if ctx.needs_input_grad[0]:  # who goes back from it has the shard
            ctx.save_for_backward(weight)
        else:
            ctx.save_for_backward(weight, whole)
            ctx.mark_non_differentiable(whole)
        return out, whole

    @staticmethod
    def backward(
        ctx: Any, grad: torch.Tensor | None, of_whole: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        weight, *kept = ctx.saved_tensors
        way, needs = ctx.way, ctx.needs_input_grad
        of_x = of_weight = of_bias = None
        if grad is None:
            if of_whole is not None:
                of_x = redistribute_plan(way.src, way.whole).back(of_whole)
            return of_x, None, None, None, None
        if needs[0] and torch.is_grad_enabled():
            total = (grad @ weight).to(ctx.dtype)
            total = total if of_whole is None else total + of_whole
            of_x = redistribute_plan(way.src, way.whole).back(total)
        elif needs[0]:

            def addend(start: int, length: int) -> torch.Tensor:
                part = multiply(grad.narrow(SEQUENCE, start, length), weight).to(ctx.dtype)
                return part if of_whole is None else part.add_(of_whole.narrow(SEQUENCE, start, length))

            of_x = way.ring.summed(addend)
        if needs[1]:
            of_weight = _flat(grad).t() @ _flat((kept[0] if kept else ctx.held[0].get()).to(weight.dtype))
        if needs[2]:
            of_bias = grad.sum((0, 1))
        return of_x, of_weight, of_bias, None, None


class _ScatteredProduct(MeetingFunction):
    """A row layer's product, of whose sum over the ranks each has a piece."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, way: _Way
    ) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight)
        ctx.way = way
        out = summed_products(way.ring, [x], [weight.t()])
        return out if bias is None else out.add_(bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if grad is None:
            return None, None, None, None
        x, weight = ctx.saved_tensors
        way, needs = ctx.way, ctx.needs_input_grad
        of_x = of_weight = of_bias = None
        if torch.is_grad_enabled():
            whole = redistribute_by(grad, redistribute_plan(way.out, way.whole))
            of_x = (whole @ weight).to(x.dtype) if needs[0] else None
        else:
            whole, *products = gathered_products(way.ring, grad, [weight] if needs[0] else [])
            of_x = products[0].to(x.dtype) if products else None
        if needs[1]:
            of_weight = _flat(whole).t() @ _flat(x.to(weight.dtype))
        if needs[2]:
            of_bias = whole.sum((0, 1))
        return of_x, of_weight, of_bias, None
