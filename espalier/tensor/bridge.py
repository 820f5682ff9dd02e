"""The bridge to torch's own DTensor: the same local memory under the other type, and gradients flow."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed.tensor as theirs
from torch._C import DisableTorchFunctionSubclass as raw
from torch.distributed.tensor import placement_types as kinds

from espalier.comm import move
from espalier.layout import Layout, Placement, Shard
from espalier.layout.layout import R, V
from espalier.mesh import Mesh
from espalier.tensor.dtensor import DTensor, plain, stamp

# torch's word for a dim that a later axis of the mesh cuts first
_Strided: Any = getattr(kinds, "_StridedShard", None)


def to_torch(x: DTensor) -> theirs.DTensor:
    """See :meth:`DTensor.to_torch`."""
    own = x._layout
    # what is varied is replicated there: its gradient comes back whole
    states = tuple(R if s == V else s for s in own.axes)
    typed = Layout.of(own.mesh, states, own.cuts, own.shape)
    with raw():
        local = plain(move(x, own, typed))
        return theirs.DTensor.from_local(
            local,
            own.mesh.to_torch(),
            _placements(typed),
            run_check=False,
            shape=torch.Size(own.shape),
            stride=own.whole_stride(local.stride()),
        )


def from_torch(x: theirs.DTensor) -> DTensor:
    """See :meth:`DTensor.from_torch`."""
    if not isinstance(x, theirs.DTensor):
        raise TypeError(f"from_torch expects a torch.distributed.tensor.DTensor, got {type(x).__name__}.")
    mesh, shape = Mesh.from_torch(x.device_mesh), tuple(x.shape)
    placements = [Shard(p.dim) if _is_strided(p) else p for p in x.placements]  # type: ignore[attr-defined]
    layout = Layout(mesh, placements, shape, order=_order(x.placements, mesh, shape))
    local = x.to_local()
    if hasattr(local, "wait"):  # a collective under way
        local = _Waited.apply(local)
    if tuple(local.shape) != layout.local_shape:
        raise ValueError(
            f"from_torch: the local part has the shape {list(local.shape)}, but {layout!r} gives this rank "
            f"{list(layout.local_shape)}. Redistribute it in torch first."
        )
    return stamp(local.view_as(local), layout)


class _Waited(torch.autograd.Function):
    espalier = True

    @staticmethod
    def forward(ctx: Any, x: Any) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        out: torch.Tensor = x.wait()
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> torch.Tensor | None:
        return grad


def spec_of(x: DTensor) -> Any:
    """See :attr:`DTensor._spec`."""
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    own = x._layout
    meta = TensorMeta(torch.Size(own.shape), x.stride(), x.dtype)
    return DTensorSpec(own.mesh.to_torch(), tuple(_placements(own)), tensor_meta=meta)


def _is_strided(placement: Placement) -> bool:
    return _Strided is not None and isinstance(placement, _Strided)


def _placements(layout: Layout) -> list[Placement]:
    """torch's placements, with its word for dims whose cuts do not come in the mesh's order."""
    sizes, placements = layout.mesh.shape, list(layout.placements)
    for d, cut in enumerate(layout.cuts):
        if list(cut) == sorted(cut):
            continue
        _check_even(layout.shape[d], math.prod(sizes[a] for a in cut), d)
        for at, axis in enumerate(cut):
            before = math.prod(sizes[a] for a in cut[:at] if a > axis)
            if before > 1:
                placements[axis] = _Strided(d, split_factor=before)
    return placements


def _order(placements: tuple[Placement, ...], mesh: Mesh, shape: tuple[int, ...]) -> list[int]:
    """The axes in the order in which they cut."""
    order: list[int] = []
    for axis in reversed(range(mesh.ndim)):
        placement = placements[axis]
        if not isinstance(placement, Shard) and not _is_strided(placement):
            continue
        dim = placement.dim  # type: ignore[attr-defined]
        later = [a for a in order if placements[a].dim == dim]  # type: ignore[attr-defined]
        factor = placement.split_factor if _is_strided(placement) else 1  # type: ignore[attr-defined]
        at, before = 0, 1
        while before < factor and at < len(later):
            before *= mesh.shape[later[at]]
            at += 1
        if before != factor:
            raise ValueError(
                f"from_torch: {placement} on axis {mesh.names[axis]!r} is cut by no later axes of the mesh "
                f"first (placements {list(placements)}, sizes {list(mesh.shape)}). Redistribute it first."
            )
        if factor > 1:
            cutting = [a for a, p in enumerate(placements) if getattr(p, "dim", None) == dim]
            _check_even(shape[dim], math.prod(mesh.shape[a] for a in cutting), dim)
        order.insert(order.index(later[at]) if at < len(later) else len(order), axis)
    return order


def _check_even(size: int, pieces: int, dim: int) -> None:
    if size % pieces:
        raise ValueError(
            f"Dim {dim} of size {size} is cut into {pieces} pieces by axes that are not in the mesh's order. "
            "Where the pieces are uneven, torch's DTensor cuts elsewhere: redistribute first."
        )
