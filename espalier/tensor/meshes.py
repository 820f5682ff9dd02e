"""The mesh of a call: its tensors lie on one, or are brought to one from stages and branches of it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch

from espalier.layout import Layout
from espalier.layout.layout import R
from espalier.mesh import Mesh
from espalier.tensor.dtensor import DTensor, plain, redistribute, stamp, up_to_date
from espalier.tensor.fallback import GatherWarning, writes
from espalier.tensor.observers import user_frame
from espalier.torch_private import raw
from espalier.trees import tensors_in, tree_map


class SeveralMeshesError(ValueError):
    """The DTensors of a call lie on several meshes."""


def mesh_of(func: Callable[..., Any], args: Any, kwargs: Any) -> Mesh:
    """The one mesh on which the DTensors of a call lie.

    Raises:
        SeveralMeshesError: they lie on several.
    """
    meshes = {id(t._layout.mesh): t._layout.mesh for t in tensors_in((args, kwargs)) if type(t) is DTensor}
    if len(meshes) != 1:
        raise SeveralMeshesError(
            f"{getattr(func, '__name__', func)}: its DTensors lie on {len(meshes)} meshes: "
            f"{', '.join(map(repr, meshes.values()))}. x.redistribute(mesh, placements) brings them to one."
        )
    return next(iter(meshes.values()))


def together(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """The arguments of a call on one mesh, where they lie in stages or branches of it; else None.

    It is where what is written to lies, or all that has dims while numbers beside it are known there; else
    the outermost. A collective, where something has to be brought: every rank of that must make the call.
    """
    tensors = [t for t in tensors_in((args, kwargs)) if type(t) is DTensor]
    meshes = {id(t._layout.mesh): t._layout.mesh for t in tensors}
    wholes = {id(whole): whole for whole in (mesh.outermost for mesh in meshes.values())}
    if len(wholes) != 1 or kwargs.get("out") is not None:
        return None
    (whole,) = wholes.values()
    target = whole
    with_dims = {id(t._layout.mesh): t._layout.mesh for t in tensors if t._layout.shape}
    if writes(func):
        if not args or type(args[0]) is not DTensor:
            return None
        target = args[0]._layout.mesh
    elif len({mesh.ranks for mesh in meshes.values()}) == 1:
        target = next(mesh for mesh in meshes.values() if mesh.is_alike)
    elif len(with_dims) == 1 and all(_is_seen(t, *with_dims.values()) for t in tensors):
        (target,) = with_dims.values()
    if not all(_is_seen(t, target) for t in tensors):
        _tell(getattr(func, "__name__", str(func)), meshes.values(), whole)

    def bring(x: Any) -> Any:
        return brought(x, target) if type(x) is DTensor else x

    return tree_map(bring, (args, kwargs))


def _tell(call: str, meshes: Iterable[Mesh], whole: Mesh) -> None:
    """See that all ranks find the tensors of a call where this one does, and say that they are brought.

    Raises:
        SeveralMeshesError: there are copies, which some ranks find here, and others elsewhere.
    """
    if whole.copied and not all(mesh is whole or mesh.is_alike for mesh in meshes):
        raise SeveralMeshesError(
            f"{call} takes tensors of several stages, and stages have copies of "
            f"{', '.join(whole.copied[:3])}: the ranks would not make the same calls. Compute with what "
            "engine.full_state_dict() or engine.full_gradients() gives, on every rank."
        )
    places = " and ".join(str(list(m.ranks)) for m in meshes)
    warnings.warn(
        f"{call} takes tensors that lie on ranks {places}, in several stages or "
        "branches: each is brought to all ranks, for this call. It is quicker to compute a number of each "
        "tensor by itself, and to put these together; engine.full_state_dict() brings all weights at once.",
        GatherWarning,
        stacklevel=user_frame()[0],
    )


def everywhere(call: str, x: DTensor) -> torch.Tensor:
    """The whole of a tensor, plain, for a call that all ranks make; a collective of the outermost mesh."""
    mesh = x._layout.mesh
    if mesh.outermost is not mesh:
        _tell(call, [mesh], mesh.outermost)
    return brought(x, mesh.outermost).full_tensor()


def brought(x: DTensor, mesh: Mesh) -> DTensor:
    """A tensor on another part of its mesh, or on all of it, where it is whole.

    A collective of the outermost mesh, but where each rank of the other one has it already.
    """
    if x._layout.mesh is mesh:
        return x
    is_seen = _is_seen(x, mesh)
    x = up_to_date(x)
    if not is_seen:
        # on its own ranks first: the others need not know how it is cut there
        shape, whole = x._layout.shape, mesh.outermost
        x = redistribute(x, Layout.replicated(x._layout.mesh, shape))
        x = redistribute(x, Layout.replicated(whole, shape))
    return x if x._layout.mesh is mesh else seen_on(x, mesh)


def _is_seen(x: DTensor, mesh: Mesh) -> bool:
    """Whether each rank of a mesh has of a tensor what it would have of one there; no gradient returns."""
    on, axes = x._layout.mesh, x._layout.own.axes
    if x.__dict__.get("_copies") is mesh:
        return not torch.is_grad_enabled()
    return on is mesh or (
        not (x.requires_grad and torch.is_grad_enabled())
        and on.outermost is mesh.outermost
        and set(on.ranks).issuperset(mesh.ranks)
        and all(n == m or s == R for n, m, s in zip(on.shape, mesh.shape, axes, strict=True))
    )


def seen_on(x: DTensor, mesh: Mesh) -> DTensor:
    """The same memory as a tensor on some of the ranks that have it; without any on others."""
    layout = x._layout.own
    layout = Layout.of(mesh, layout.axes, layout.cuts, layout.shape)
    with raw():
        if mesh.is_member:
            return stamp(plain(x).view_as(plain(x)), layout)
        return stamp(torch.empty(layout.local_shape, dtype=x.dtype, device="meta"), layout)
