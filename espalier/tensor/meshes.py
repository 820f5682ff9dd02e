"""The mesh of a call: its tensors lie on one, or are brought to one from stages and branches of it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from espalier.layout import Layout
from espalier.mesh import Mesh
from espalier.tensor.dtensor import DTensor, redistribute
from espalier.tensor.fallback import GatherWarning, writes
from espalier.tensor.observers import user_frame
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

    A collective: every rank of that mesh must make the call. What is written to stays where it is: so calls
    that write are none.
    """
    meshes = {id(t._layout.mesh): t._layout.mesh for t in tensors_in((args, kwargs)) if type(t) is DTensor}
    wholes = {id(whole): whole for whole in map(_outermost, meshes.values())}
    if len(wholes) != 1 or writes(func) or kwargs.get("out") is not None:
        return None
    (whole,) = wholes.values()
    if whole.copied:  # some find them here, and others elsewhere
        raise SeveralMeshesError(
            f"{getattr(func, '__name__', func)} takes tensors of several stages, and stages have copies of "
            f"{', '.join(whole.copied[:3])}: the ranks would not make the same calls. Compute with what "
            "engine.full_state_dict() or engine.full_gradients() gives, on every rank."
        )
    places = " and ".join(str(list(m.ranks)) for m in meshes.values())
    warnings.warn(
        f"{getattr(func, '__name__', func)} takes tensors that lie on ranks {places}, in several stages or "
        "branches: each is brought to all ranks, for this call. It is quicker to compute a number of each "
        "tensor by itself, and to put these together; engine.full_state_dict() brings all weights at once.",
        GatherWarning,
        stacklevel=user_frame()[0],
    )

    def bring(x: Any) -> Any:
        if type(x) is not DTensor or x._layout.mesh is whole:
            return x
        # on its own ranks first: the others need not know how it is cut there
        shape = x._layout.shape
        x = redistribute(x, Layout.replicated(x._layout.mesh, shape))
        return redistribute(x, Layout.replicated(whole, shape))

    return tree_map(bring, (args, kwargs))


def _outermost(mesh: Mesh) -> Mesh:
    while mesh.within is not None:
        mesh = mesh.within
    return mesh
