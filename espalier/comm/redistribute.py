"""Moves: routes carried out on local tensors, differentiable to any order.

A move to another mesh is a route, a crossing and another route (see ``espalier.layout.routes``); on
ranks outside a mesh, what lies on it is without content.

The backward of a move is the move of the gradient between the gradient layouts (see
``espalier.layout.transitions``), again by the cheapest route.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import cache, lru_cache
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.overrides import handle_torch_function

from espalier.comm import collectives
from espalier.comm.backend import Work
from espalier.comm.custom_ops import recorders, tracers
from espalier.comm.functions import MeetingFunction, OwnFunction
from espalier.layout import (
    Layout,
    Step,
    chunk_bounds,
    crossing,
    gradient_layout,
    local_box,
    route,
    same_data,
)
from espalier.layout.layout import AxisState, D, R
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
from espalier.mesh import Mesh
from espalier.torch_private import (
    base_of,
    disable_modes,
    getter,
    memory_uses,
    method,
    raw,
    takes_tangents,
    use_count,
)

_unpack_dual: Callable[[torch.Tensor], Any] = forward_ad.unpack_dual
# of C alone: a subclass' own cost more than all the questions asked here
_requires_grad, _is_leaf = getter("requires_grad"), getter("is_leaf")
_is_contiguous = method("is_contiguous")
_grad_enabled = torch.is_grad_enabled
_CONTIGUOUS = torch.contiguous_format
_renamed: Callable[..., torch.Tensor] = torch.ops.aten._unsafe_view.default  # no view to autograd
_STAY = frozenset([IDENTITY, SLICE, PAD, KEEP])  # what sends nothing
LocalStep = Callable[[torch.Tensor], torch.Tensor]


class RedistributePlan:
    """Everything about a move that its two layouts decide, worked out once.

    Attributes:
        forward: what to do to the local tensor, step by step.
        scale, late: what the input and the result are to be multiplied by, where there are averages.
        idle: on this rank neither forward nor backward does anything.
        sums: the axes, if forward is all-reduces of sums along them.
        sums_back: backward is all-reduces.
        summed: the same, if also backward does nothing to data.
        cleared: forward leaves zeros here, backward does nothing to data.
        kinds: the operations of forward, on whatever rank.
        sends: whether forward or backward sends anything, on whatever rank.
        unsummed: a reduction without gradient that the source still lacks.
    """

    __slots__ = (
        "_back",
        "_dst",
        "_src",
        "cleared",
        "forward",
        "idle",
        "kinds",
        "late",
        "mesh",
        "scale",
        "sends",
        "summed",
        "sums",
        "sums_back",
        "unsummed",
    )  # fmt: skip

    def __init__(self, src: Layout, dst: Layout) -> None:
        if src.mesh is not dst.mesh:
            dst = _other_names(src, dst)
        self.scale, self.late = _average_factor(src, dst), 1.0
        if self.scale is not None:
            if "product" in src.axes:
                self.scale, self.late = _around_products(src, dst)
            # an average is a sum of parts already divided
            src, dst = _as_sums(src), _as_sums(dst)
        self._src, self._dst, self.mesh = src, dst, src.mesh
        self._back: RedistributePlan | None = None
        lacking = [s for s in src.axes if s in ("max", "min", "product")]
        self.unsummed = lacking[0] if lacking else None
        if src.mesh is not dst.mesh:
            self.idle = self.cleared = False
            self.sums: tuple[int, ...] = ()
            self.summed: tuple[int, ...] = ()
            self.sums_back, self.sends = False, True
            self.forward = _across(src, dst)
            return
        steps = () if same_data(src, dst) else route(src, dst).steps
        self.kinds = frozenset(step.operation for step in steps)
        self.forward = tuple(_compiled(step) for step in steps if not _idle(step))
        back_src, back_dst = gradient_layout(dst), gradient_layout(src)
        back = () if same_data(back_src, back_dst) else route(back_src, back_dst).steps
        returns = any(not _idle(step) for step in back)
        self.sends = any(step.operation not in _STAY and not _idle(step) for step in (*steps, *back))
        self.idle = not self.forward and not returns and self.scale is None
        busy = [step for step in steps if not _idle(step)]
        sums = all(s.operation == ALL_REDUCE and s.src.axes[s.axis] == "sum" for s in busy)
        self.sums = tuple(s.axis for s in busy) if sums else ()
        self.summed = () if returns else self.sums
        self.sums_back = returns and all(s.operation == ALL_REDUCE for s in back if not _idle(s))
        self.cleared = bool(busy) and not returns and all(s.operation == KEEP for s in busy)

    @property
    def operations(self) -> list[str] | None:
        """What is done forward along the axes (see ``espalier.layout.transitions``); None to another mesh."""
        if self._src.mesh is not self._dst.mesh:
            return None
        return [step.operation for step in route(self._src, self._dst).steps if not _idle(step)]

    def back(self, grad: torch.Tensor, *, alone: bool = False) -> torch.Tensor:
        """The gradient taken the other way; ``alone``: nobody else holds it, or will read it again."""
        back = self._back
        if back is None:
            back = self._back = redistribute_plan(gradient_layout(self._dst), gradient_layout(self._src))
        return redistribute_by(grad, back, alone)

    def back_again(self, grads: tuple[torch.Tensor | None, ...]) -> tuple[torch.Tensor] | None:
        """:meth:`back` as a hook before a node that hands the gradient on as it is: to record it."""
        grad = grads[0]
        return None if grad is None or not _requires_grad(grad) else (self.back(grad),)


@lru_cache(maxsize=65536)
def redistribute_plan(src: Layout, dst: Layout) -> RedistributePlan:
    """The (cached) steps between two layouts of one global shape.

    Raises:
        ValueError: there is no route.
    """
    return RedistributePlan(src, dst)


def move(x: torch.Tensor, src: Layout, dst: Layout) -> torch.Tensor:
    """Take a local tensor from one layout to another, recorded by autograd.

    Args:
        x: this rank's local tensor, of ``src.local_shape``.

    Raises:
        ValueError: there is no route, or a reduction other than sum and avg needs a gradient.
    """
    return x if src is dst else redistribute_by(x, redistribute_plan(src, dst))


def redistribute_by(x: torch.Tensor, plan: RedistributePlan, alone: bool = False) -> torch.Tensor:
    """:func:`move` by a plan at hand; ``alone``: ``x`` may be written to, for nobody will read it again."""
    if plan.idle:
        return x
    if recorders():
        recorded: torch.Tensor = handle_torch_function(redistribute_by, (), x, plan)
        return recorded
    if plan.scale not in (None, 1):
        if not (x.is_floating_point() or x.is_complex()):
            raise ValueError(
                f"A Partial(avg) value of {x.dtype} cannot be moved: an average needs a floating-point "
                "dtype. Convert it first (x.float()), or use Partial(sum)."
            )
        x = x * plan.scale
    dual = takes_tangents() and _unpack_dual(x).tangent is not None
    if not (dual or (_requires_grad(x) and _grad_enabled())):
        if plan.sums and x.is_floating_point() and not tracers():
            if not (alone and _is_contiguous(x)):
                x = x.clone(memory_format=_CONTIGUOUS)
            collectives.sum_here(x, plan.mesh, plan.sums)
        else:
            for step in plan.forward:
                x = step(x)
        return x * plan.late if plan.late != 1 else x
    if plan.unsummed is not None:
        raise ValueError(
            f"A Partial({plan.unsummed}) value that needs a gradient cannot be reduced: only sums and "
            "averages have one. Reduce over an unsharded dim, or redistribute before the operation."
        )
    if plan.summed and not dual:
        # the backward of both, in C++, is the identity, which is what the data of the gradient needs
        here = alone and _is_contiguous(x)
        out = _renamed(x, x.shape) if here else x.clone(memory_format=_CONTIGUOUS)
        out.grad_fn.register_prehook(plan.back_again)  # type: ignore[union-attr]
        collectives.sum_here(out.detach(), plan.mesh, plan.summed)
        return out
    if plan.cleared and not dual:
        out = x.clone()
        out.grad_fn.register_prehook(plan.back_again)  # type: ignore[union-attr]
        out.detach().zero_()
        return out
    moved: torch.Tensor = _apply(x, plan)
    return moved


def sums_here(x: torch.Tensor, plan: RedistributePlan) -> bool:
    """Whether :func:`redistribute_by` may sum a recorded result in its own memory: none but Python holds it.

    What Python holds the caller must see to.
    """
    if not plan.summed or plan.scale is not None or not _requires_grad(x) or _is_leaf(x):
        return False
    if not _grad_enabled() or takes_tangents() or recorders() or tracers():
        return False
    return x.is_floating_point() and _is_contiguous(x) and not x.retains_grad and has_own_memory(x)


def summed(x: torch.Tensor, mesh: Mesh, axes: Iterable[int]) -> torch.Tensor:
    """The sum over the axes, which each rank then uses differently; differentiable to any order.

    P → D: an all-reduce along each axis, forward and backward.
    """
    return _varying(x, mesh, axes, "sum")


def deferred(x: torch.Tensor, mesh: Mesh, axes: Iterable[int]) -> torch.Tensor:
    """A value equal along the axes, which each rank then uses differently; differentiable to any order."""
    return _varying(x, mesh, axes, R)


def _varying(x: torch.Tensor, mesh: Mesh, axes: Iterable[int], state: AxisState) -> torch.Tensor:
    over = tuple(sorted(axes))
    return redistribute_by(x, _along(mesh, over, tuple(x.shape), state)) if over else x


@lru_cache(maxsize=4096)
def _along(mesh: Mesh, axes: tuple[int, ...], shape: tuple[int, ...], state: AxisState) -> RedistributePlan:
    # on the mesh of these axes alone: along others the values may differ, so no route may lead that way
    part = mesh[tuple(mesh.names[a] for a in axes)]
    src, dst = (Layout.of(part, (s,) * len(axes), ((),) * len(shape), shape) for s in (state, D))
    return redistribute_plan(src, dst)


def carry_out(x: torch.Tensor, src: Layout, dst: Layout) -> torch.Tensor:
    """Take a local tensor from one layout to another, without autograd."""
    plan = redistribute_plan(src, dst)
    return _carried(x if plan.scale in (None, 1) else x * plan.scale, plan)


def begin(x: torch.Tensor, src: Layout, dst: Layout) -> Work[torch.Tensor] | None:
    """:func:`carry_out` begun, if it is one gathering."""
    gather = _gathering(src, dst)
    return None if gather is None else collectives.gathering(x, *gather)


@lru_cache(maxsize=65536)
def _gathering(src: Layout, dst: Layout) -> tuple[Mesh, int, int, int] | None:
    """Along which axis a dim of which size is gathered, if that is all."""
    if src.mesh is not dst.mesh or redistribute_plan(src, dst).scale is not None:
        return None
    steps = [step for step in route(src, dst).steps if not _idle(step)]
    if [step.operation for step in steps] != [ALL_GATHER]:
        return None
    (step,) = steps
    dim = step.src.axes[step.axis]
    assert isinstance(dim, int)
    return src.mesh, step.axis, dim, step.dst.local_shape[dim]


def _carried(x: torch.Tensor, plan: RedistributePlan) -> torch.Tensor:
    for step in plan.forward:
        x = step(x)
    return x


def as_addend(x: torch.Tensor, layout: Layout) -> torch.Tensor:
    """This rank's part in the reductions, along the axes where ``layout`` is Partial, that give ``x``."""
    for op, rest in (("sum", torch.zeros_like), ("product", torch.ones_like)):
        if any(s == op and layout.mesh.coordinate[a] for a, s in enumerate(layout.axes)):
            return rest(x)
    return x  # the average, maximum or minimum of equal values is the value


def move_as(
    x: torch.Tensor, src: Layout, dst: Layout, forward_dtype: torch.dtype, backward_dtype: torch.dtype
) -> torch.Tensor:
    """:func:`move` in other dtypes than that of ``x``.

    Args:
        forward_dtype: that of the communication and of the result.
        backward_dtype: that of the communication of the gradient, which then takes that of ``x``.
    """
    plan = redistribute_plan(src, dst)
    if plan.unsummed is not None and x.requires_grad and torch.is_grad_enabled():
        redistribute_by(x, plan)  # raises
    moved: torch.Tensor = _MoveAs.apply(x, plan, forward_dtype, backward_dtype)  # type: ignore[no-untyped-call, unused-ignore]
    return moved


class _MoveAs(MeetingFunction):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        plan: RedistributePlan,
        forward_dtype: torch.dtype,
        backward_dtype: torch.dtype,
    ) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.plan, ctx.dtypes = plan, (x.dtype, backward_dtype)
        out = redistribute_by(x.to(forward_dtype), plan)
        return out.detach() if out is x else out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, None, None, None]:
        if grad is None:
            return None, None, None, None
        before, passing = ctx.dtypes
        back = ctx.plan.back(grad.to(passing))
        return (back if ctx.plan.scale is None else back * ctx.plan.scale).to(before), None, None, None


class _Move(MeetingFunction):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, plan: RedistributePlan) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.plan = plan
        out = _carried(x, plan)
        # not view_as: a view holds its base, which may remember the view (a cycle no collector sees);
        # detach shares data and version counter alone
        return out.detach() if out is x else out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:
        if grad is None:
            return None, None
        alone = ctx.plan.sums_back and is_alone(grad)  # by itself: an argument that waits is held, too
        return ctx.plan.back(grad, alone=alone), None

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, plan: None) -> torch.Tensor:
        return redistribute_by(tangent, ctx.plan)


class _Shadow(OwnFunction):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, device: str) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.device = x.device
        return x.to(device)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:
        return None if grad is None else torch.zeros_like(grad, device=ctx.device), None


def on_dry(x: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """A plain tensor as an operand on a dry mesh: its shape. Its gradient there is zero."""
    if x.device.type == mesh.device_type:
        return x
    shadow: torch.Tensor = _Shadow.apply(x, mesh.device_type)  # type: ignore[no-untyped-call, unused-ignore]
    return shadow


class _Written(OwnFunction):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, shadow: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.mark_dirty(x)
        ctx.device = shadow.device
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        return grad, None if grad is None else torch.zeros_like(grad, device=ctx.device)


def written_on_dry(x: torch.Tensor, shadow: torch.Tensor) -> None:
    """Let a plain tensor hang on what was written to :func:`on_dry` of it, as on a mesh with ranks."""
    if shadow is not x and shadow.requires_grad and torch.is_grad_enabled():
        _Written.apply(x, shadow)  # type: ignore[no-untyped-call, unused-ignore]


# straight to C: the Python apply in between serves functorch and costs as much as the call
_apply: Callable[[torch.Tensor, RedistributePlan], torch.Tensor] = super(torch.autograd.Function, _Move).apply


def _idle(step: Step) -> bool:
    """Whether a step leaves the local tensor as it is on this rank."""
    op, axis, src, _ = step
    if src.mesh.shape[axis] == 1 or op == IDENTITY:
        return True
    return op == KEEP and src.mesh.coordinate[axis] == 0


def _compiled(step: Step) -> LocalStep:
    op, axis, src, dst = step
    mesh, old, new = src.mesh, src.axes[axis], dst.axes[axis]
    if op == ALL_REDUCE:
        return lambda x: collectives.all_reduce(x, mesh, axis, str(old))
    if op == ALL_GATHER:
        assert isinstance(old, int)
        return lambda x: collectives.all_gather(x, mesh, axis, old, dst.local_shape[old])
    if op == REDUCE_SCATTER:
        assert isinstance(new, int)
        return lambda x: collectives.reduce_scatter(x, mesh, axis, new)
    if op == ALL_TO_ALL:
        assert isinstance(old, int) and isinstance(new, int)
        return lambda x: collectives.all_to_all(x, mesh, axis, new, old, dst.local_shape[old])
    if op == SLICE:
        assert isinstance(new, int)
        piece = chunk_bounds(src.local_shape[new], mesh.shape[axis], mesh.coordinate[axis])
        return lambda x: x.narrow(new, *piece).clone()
    if op == PAD:
        assert isinstance(old, int)
        piece = chunk_bounds(dst.local_shape[old], mesh.shape[axis], mesh.coordinate[axis])
        return lambda x: _among_zeros(x, dst, old, piece)
    assert op == KEEP
    return torch.zeros_like


def _other_names(src: Layout, dst: Layout) -> Layout:
    """``dst`` on the mesh of ``src``, if its own has the same ranks in the same places."""
    src.mesh.check_same_world(dst.mesh)
    if (src.mesh.ranks, src.mesh.shape) != (dst.mesh.ranks, dst.mesh.shape):
        return dst
    return Layout.of(src.mesh, dst.axes, dst.cuts, dst.shape)


def _across(src: Layout, dst: Layout) -> tuple[LocalStep, ...]:
    """The steps of a move to another mesh."""
    leaving, landing, parcels, _ = crossing(src, dst)
    before, behind = route(src, leaving).steps, route(landing, dst).steps
    here, start, end = src.mesh.world_rank, local_box(leaving), local_box(landing)
    gives: dict[int, list[Any]] = {}
    gets: dict[int, list[Any]] = {}
    kept = []
    for giver, taker, box in parcels:
        if giver == taker == here:
            kept.append((box.within(start), box.within(end)))
        elif giver == here:
            gives.setdefault(taker, []).append(box.within(start))
        elif taker == here:
            gets.setdefault(giver, []).append(box.within(end))
    concerned = src.mesh.is_member or dst.mesh.is_member
    travels = concerned and any(giver != taker for giver, taker, _ in parcels)

    def cross(x: torch.Tensor) -> torch.Tensor:
        # along axes where it lands as addends, coordinate 0 alone gets the value
        out = torch.zeros if landing.partial else torch.empty
        landed = out(landing.local_shape, dtype=x.dtype, device=landing.mesh.device())
        for here, there in kept:
            landed[there].copy_(x[here])
        if travels:
            collectives.deliver(x, landed, src.mesh, dst.mesh, gives, gets, src.shape)
        return landed

    return (
        *(_compiled(step) for step in before if not _idle(step)),
        cross,
        *(_compiled(step) for step in behind if not _idle(step)),
    )


def _among_zeros(x: torch.Tensor, dst: Layout, dim: int, piece: tuple[int, int]) -> torch.Tensor:
    out = x.new_zeros(dst.local_shape)
    out.narrow(dim, *piece).copy_(x)
    return out


def _average_factor(src: Layout, dst: Layout) -> float | None:
    """What to multiply by when averages in either layout are written as sums; None without any."""
    if "avg" not in src.axes and "avg" not in dst.axes:
        return None
    factor = 1.0
    for axis, (n, old) in enumerate(zip(src.mesh.shape, src.axes, strict=True)):
        if old == "avg" and (src.mesh is not dst.mesh or dst.axes[axis] != old):
            factor /= n
    for axis, (n, new) in enumerate(zip(dst.mesh.shape, dst.axes, strict=True)):
        if new == "avg" and (src.mesh is not dst.mesh or src.axes[axis] != new):
            factor *= n
    return factor


def _around_products(src: Layout, dst: Layout) -> tuple[float, float]:
    """The factors before and after a route that reduces products: an average is taken inside or outside.

    Raises:
        ValueError: it would have to be taken in between.
    """
    before, after, sizes = 1.0, 1.0, dst.mesh.shape
    products = [a for a, s in enumerate(src.axes) if s == "product"]
    for axis in (a for a, s in enumerate(src.axes) if s == "avg"):
        if axis > max(products):
            before /= src.mesh.shape[axis]
        elif axis < min(products):
            after /= src.mesh.shape[axis]
        else:
            raise ValueError(f"{src!r}: redistribute the last axis alone first, to Replicate.")
    averages = [a for a, s in enumerate(dst.axes) if s == "avg"]
    for axis in averages:
        after *= sizes[axis]
    if after != 1 and averages and "product" in dst.axes[averages[0] :]:
        raise ValueError(
            f"No way from {src!r} to {dst!r}: products cannot be turned into averages of products."
        )
    return before, after


def _as_sums(layout: Layout) -> Layout:
    axes: tuple[AxisState, ...] = tuple("sum" if s == "avg" else s for s in layout.axes)
    return Layout.of(layout.mesh, axes, layout.cuts, layout.shape)


# ---- whether nobody else holds a gradient, or a result, so that a sum may be done in place of it
#
# Autograd hands one tensor to all who are to get the same: both sides of a sum, a hook of the program's.
# Python counts who holds its objects, and torch who holds tensors and their memory. What the counts are where
# nobody else holds it hangs on versions of both, so a probe is sent through a graph, once, and asked.

Uses = tuple[int, ...]


def is_alone(x: torch.Tensor) -> bool:
    """Of a gradient, asked by the ``backward`` that is given it, which will not use it afterwards."""
    return _uses(x) in _unshared()


def has_own_memory(x: torch.Tensor) -> bool:
    """Of a result: no other tensor shares its memory, and no graph holds it; Python may."""
    return _graph_uses(x) in _unsaved()


def _uses(x: torch.Tensor) -> Uses:
    uses = _graph_uses(x)
    return (sys.getrefcount(x), *uses) if uses else ()


def _graph_uses(x: torch.Tensor) -> Uses:
    if use_count is None or memory_uses is None:
        return ()
    base = base_of(x)
    # a program that holds the base of a view is known by Python's count alone
    of_base = () if base is None else (sys.getrefcount(base), use_count(base))
    return use_count(x), memory_uses(x), *of_base


@cache
def _unsaved() -> frozenset[Uses]:
    """The uses of what came out of a kernel, and of a view of such a one, as graphs see them."""
    with raw(), disable_modes(), torch.enable_grad():
        x = torch.zeros(2, 2, device="cpu", requires_grad=True)
        uses = [_graph_uses(x * 1), _graph_uses((x * 1).view(4))]
    return frozenset(each for each in uses if each[:1] == (1,))


def _unshared() -> frozenset[Uses]:
    # who traces the program holds what its frames hold
    if sys.gettrace() is not None or sys.getprofile() is not None or use_count is None:
        return frozenset()
    return _probed()


@cache
def _probed() -> frozenset[Uses]:
    """The uses of a gradient that came out of a kernel, and of a view of such a one.

    Torch 2.11 counts the list of a node's arguments as a holder, 2.13 does not. So one that a second node
    gets is probed, too: counts that both have say nothing.
    """
    own: list[Uses] = []
    shared: list[Uses] = []
    with raw(), disable_modes(), torch.enable_grad():
        x = torch.zeros(2, 2, device="cpu", requires_grad=True)
        for out in (
            _probe(x, own) * 1,
            _probe(x, own).view(4) * 1,
            (_probe(x, shared) + _probe(x, shared)) * 1,
            (_probe(x, shared) + _probe(x, shared)).view(4) * 1,
        ):
            torch.autograd.backward(out, torch.ones_like(out))
    return frozenset(own) - frozenset(shared)


def _asked(x: torch.Tensor) -> Uses:
    """As :func:`is_alone` asks."""
    return _uses(x)


class _Probe(OwnFunction):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seen: list[Uses]) -> torch.Tensor:
        ctx.seen = seen
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.seen.append(_asked(grad))
        return grad, None


_probe: Callable[..., torch.Tensor] = super(torch.autograd.Function, _Probe).apply
