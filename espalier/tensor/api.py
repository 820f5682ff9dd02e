"""Public functions over DTensors, under torch.distributed.tensor's names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as raw

from espalier.comm import collectives as door
from espalier.comm import move
from espalier.comm.moves import as_addend
from espalier.layout import Layout, Placement, Replicate, Shard, gradient_layout, local_box
from espalier.layout.layout import R, V, is_partial
from espalier.mesh import Mesh
from espalier.mesh.mesh import MeshLike, as_mesh
from espalier.tensor.dtensor import DTensor, layout_of, plain, redistribute, stamp, up_to_date
from espalier.tensor.rules import RULES
from espalier.tensor.rules.spec import RuleFunction
from espalier.tensor.unsaid import compared
from espalier.tensor.watch import claim


def distribute_tensor(
    tensor: torch.Tensor,
    device_mesh: MeshLike | None = None,
    placements: Sequence[Placement] | None = None,
    *,
    src_data_rank: int | Sequence[int] | None = 0,
    order: Sequence[int | str] | None = None,
) -> DTensor:
    """Lay a global tensor on a mesh; a leaf that needs gradients if ``tensor`` does.

    Args:
        tensor: the global tensor, a leaf. Its values count on the source alone, unless that is None. One on
            the meta device (on all ranks) gives a DTensor on it, to be filled later.
        device_mesh: by default the mesh whose ``with`` block is open.
        placements: one for each axis; replicated by default. Partial: addends whose sum it is.
        src_data_rank: whose values are sent: the rank at this coordinate on *every* axis, as in torch, or a
            coordinate for each axis. None: every rank holds the same values already, and nothing is sent.
        order: where several axes cut one dim, the axes (names or indices) in the order in which they cut,
            outermost first; by default the mesh's own.

    Raises:
        ValueError: there is no such source, or the tensor is no leaf.
    """
    mesh = as_mesh(device_mesh)
    if placements is None:
        placements = [Replicate()] * mesh.ndim
    if isinstance(tensor, DTensor):
        return tensor.redistribute(mesh, placements, order=order)
    if not tensor.is_leaf:
        raise ValueError(
            "distribute_tensor makes a new leaf, so that gradients would not reach what this tensor was "
            "computed from. Give a leaf (tensor.detach() is one); inside a computation use from_local."
        )
    layout = Layout(mesh, placements, tuple(tensor.shape), order=order)
    return lay_out(tensor, layout, source=src_data_rank)


def lay_out(tensor: torch.Tensor, layout: Layout, *, source: int | Sequence[int] | None = 0) -> DTensor:
    """Get this rank's part of a global tensor that the source has (None: that every rank has).

    An ``nn.Parameter`` stays one: the result is parameter and DTensor at once.
    """
    mesh = layout.mesh
    start = None if source is None else _coordinate(source, mesh)
    value = tensor.detach()
    if start is None:
        claim(value, Layout.replicated(mesh, tuple(value.shape)), "a tensor laid out as equal on all ranks")
    if mesh.is_dry:
        value = torch.empty(value.shape, dtype=value.dtype, device=mesh.device_type)
    if value.is_meta and not mesh.is_dry:
        local = value.new_empty(layout.local_shape)
    else:
        local = _cut(value, layout) if start is None else _sent(value, layout, start)
        local = as_addend(local, layout)
    out = stamp(local, layout)
    with raw():
        torch.Tensor.requires_grad_(out, tensor.requires_grad)
    if isinstance(tensor, torch.nn.Parameter):
        out._is_param = True
    return out


def _coordinate(source: int | Sequence[int], mesh: Mesh) -> tuple[int, ...]:
    given = [source if n > 1 else 0 for n in mesh.shape] if isinstance(source, int) else list(source)
    if len(given) != mesh.ndim or not all(0 <= at < n for at, n in zip(given, mesh.shape, strict=True)):
        raise ValueError(
            f"src_data_rank={source}: no rank of {mesh!r} has the coordinate {tuple(given)}. A number is the "
            "coordinate on every axis; a sequence holds one for each."
        )
    return tuple(given)


def _cut(value: torch.Tensor, layout: Layout) -> torch.Tensor:
    own = value[local_box(layout).slices].to(layout.mesh.device())
    return own.clone(memory_format=torch.contiguous_format)


def _sent(value: torch.Tensor, layout: Layout, source: tuple[int, ...]) -> torch.Tensor:
    """This rank's part of what the rank at ``source`` has: cut first, then copied, axis by axis."""
    mesh = layout.mesh
    if mesh.size() == 1:
        return _cut(value, layout)
    local: torch.Tensor | None = value.to(mesh.device()) if mesh.coordinate == source else None
    cutting = layout.order
    axes = [*cutting, *(a for a in range(mesh.ndim) if a not in cutting)]
    part = Layout.replicated(mesh, layout.shape)
    while axes:
        axis, before = axes.pop(0), part.local_shape
        if axis in cutting:
            part = part.with_axis(axis, layout.axes[axis])
        if any(mesh.coordinate[a] != source[a] for a in axes):
            door.pass_by("scatter" if axis in cutting else "broadcast", value, mesh, axis, before)
            continue  # the value is yet to come along these
        if local is None:
            local = torch.empty(0 if axis in cutting else before, dtype=value.dtype, device=mesh.device())
        if axis in cutting:
            dim = layout.axes[axis]
            assert isinstance(dim, int)
            local = door.scatter(local, mesh, axis, dim, before, source[axis])
        else:
            local = door.broadcast(local, mesh, axis, source[axis])
    assert local is not None and tuple(local.shape) == layout.local_shape
    return local


def from_local(
    local: torch.Tensor,
    device_mesh: MeshLike | None = None,
    placements: Sequence[Placement] | None = None,
    *,
    run_check: bool = False,
    shape: Sequence[int] | None = None,
    grad_placements: Sequence[Placement] | None = None,
    order: Sequence[int | str] | None = None,
) -> DTensor:
    """See :meth:`DTensor.from_local`."""
    mesh = as_mesh(device_mesh)
    placements = placements if placements is not None else [Replicate()] * mesh.ndim
    if isinstance(local, DTensor):
        raise TypeError("from_local expects this rank's plain part, got a DTensor already.")
    if shape is None:
        grown = list(local.shape)
        for n, placement in zip(mesh.shape, placements, strict=False):
            if isinstance(placement, Shard):
                grown[placement.dim] *= n
        shape = grown
    layout = Layout(mesh, placements, shape, order=order)
    wrong = tuple(local.shape) != layout.local_shape
    if run_check:
        check_parts(local, layout, wrong)
    if wrong:
        raise ValueError(
            f"from_local: rank {mesh.rank} gave a part of the shape {list(local.shape)}, but {layout!r} "
            f"gives it {list(layout.local_shape)}. Pieces are cut as torch.chunk does; pass the right shape=."
        )
    if local.device.type != mesh.device_type and not local.is_meta:
        local = local.to(mesh.device())
    if run_check:
        local = _first_of_all(local, layout)
    claim(local, layout, "from_local's part")
    held = layout if grad_placements is None else _held(layout, grad_placements, "from_local")
    return stamp(move(local.view_as(local), held, layout), layout)


_DTYPES = sorted((x for x in vars(torch).values() if isinstance(x, torch.dtype)), key=str)


def check_parts(local: torch.Tensor, layout: Layout, wrong: bool) -> None:
    """Raise on all ranks if any has a part that does not fit, or they disagree on global shape or dtype."""
    mesh = layout.mesh
    said = torch.tensor(
        [_DTYPES.index(local.dtype), len(layout.shape), *layout.shape, *[0] * 64][:64], device="cpu"
    )
    most = torch.cat([torch.tensor([int(wrong)], device="cpu"), said, -said]).to(mesh.device())
    for axis in range(mesh.ndim):
        most = door.all_reduce(most, mesh, axis, "max")
    if not mesh.is_dry and (most[0] or not torch.equal(most[1:65], -most[65:])):
        raise ValueError(
            f"from_local(run_check=True): the parts do not make one tensor. Rank {mesh.rank} gave "
            f"{list(local.shape)} of {local.dtype}, for {layout!r}. Parts must be of one dtype, and cut as "
            "torch.chunk does; where they are uneven, pass shape=."
        )


def _first_of_all(local: torch.Tensor, layout: Layout) -> torch.Tensor:
    """``local`` with the values of coordinate 0 on the axes where it is replicated; gradients stay here."""
    first = local.detach()
    for axis, state in enumerate(layout.axes):
        if state == R:
            first = door.broadcast(first, layout.mesh, axis)
    out = local.clone()
    out.detach().copy_(first)
    return out


def to_local(x: DTensor, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
    """See :meth:`DTensor.to_local`."""
    layout = x._layout.own
    x = up_to_date(x)
    if x._layout.own is not layout:
        x = redistribute(x, layout)
    mesh = layout.mesh
    recorded = x.requires_grad and torch.is_grad_enabled()
    if grad_placements is None:
        unsaid = [a for a, s in enumerate(layout.axes) if s == R and mesh.shape[a] > 1] if recorded else []
        with raw():
            out = plain(x)
        return compared(out, layout, unsaid, "to_local") if unsaid else out
    held = _held(layout, grad_placements, "to_local")
    with raw():
        return plain(move(x, layout, held) if recorded else x)


def _held(layout: Layout, grads: Sequence[Placement], what: str) -> Layout:
    """The layout of the same local data whose gradients lie as said.

    Raises:
        ValueError: there is none.
    """
    wanted = Layout(layout.mesh, grads, layout.shape, order=layout.order)
    states = [
        s if s not in (R, V) else V if is_partial(g) else R
        for s, g in zip(layout.axes, wanted.axes, strict=True)
    ]
    held = Layout.of(layout.mesh, tuple(states), layout.cuts, layout.shape)
    if gradient_layout(held).placements != wanted.placements:
        raise ValueError(
            f"{what}: grad_placements {list(grads)} do not fit a value that lies as {layout!r}: the "
            "gradient of a shard is a shard of the same dim, that of a Partial is replicated, that of a "
            "replicated value replicated or Partial."
        )
    return held


def full_tensor(x: torch.Tensor) -> torch.Tensor:
    """The plain global tensor of a DTensor (a collective); a plain tensor comes back."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def register_rule(*functions: Callable[..., Any]) -> Callable[[RuleFunction], RuleFunction]:
    """Teach the dispatcher a function: the decorated rule says how its dims relate.

    >>> @register_rule(my_op)                                         # doctest: +SKIP
    ... def _(x, scale):
    ...     return Spec(ins=[x.dims()], outs=[x.dims()], shapes=[x.shape], linear=[(0,)])

    See :class:`espalier.Spec` for the words. ``my_op`` must be a function that honours
    ``__torch_function__``: torch's own, a ``torch.library`` op, or Python made of them and
    wrapped by ``torch.overrides.wrap_torch_function``; or a ``torch.autograd.Function``, whose
    ``apply`` the rule then describes: forward and backward see local tensors.
    """

    def register(rule: RuleFunction) -> RuleFunction:
        from espalier.tensor.dispatch import forget

        for function in functions:
            if isinstance(function, type) and issubclass(function, torch.autograd.Function):
                function = function.apply
            RULES.add(function, rule)
        forget()
        return rule

    return register


__all__ = [
    "distribute_tensor",
    "from_local",
    "full_tensor",
    "lay_out",
    "layout_of",
    "register_rule",
    "to_local",
]
