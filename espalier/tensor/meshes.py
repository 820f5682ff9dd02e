"""The mesh of a call: its tensors lie on one, or are brought to one from stages and branches of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from espalier.layout import Layout
from espalier.layout.layout import R
from espalier.mesh import Mesh
from espalier.sharding.spec import RULES
from espalier.tensor.dtensor import Arguments, DTensor, plain, redistribute, stamp, up_to_date
from espalier.tensor.fallback import GatherWarning, writes
from espalier.tensor.observers import tell
from espalier.texts import few
from espalier.torch_private import raw
from espalier.trees import leaves, tensors_in, tree_map


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


def together(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
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
        _tell(getattr(func, "__name__", str(func)), tensors, whole)

    def bring(x: Any) -> Any:
        return brought(x, target) if type(x) is DTensor else x

    return tree_map(bring, (args, kwargs))


def _tell(call: str, tensors: Iterable[DTensor], whole: Mesh) -> None:
    """See that all ranks find the tensors of a call where this one does, and say that they are brought.

    Raises:
        SeveralMeshesError: there are copies, which some ranks find here, and others elsewhere.
    """
    tensors = list(tensors)
    refuse_copies(call, tensors, whole)
    places = " and ".join({str(list(t._layout.mesh.ranks)): None for t in tensors})
    tell(
        f"{call} takes tensors that lie on ranks {places}, in several stages or "
        "branches: each is brought to all ranks, for this call. It is quicker to compute a number of each "
        "tensor by itself, and to put these together; engine.full_state_dict() brings all weights at once.",
        GatherWarning,
    )


def refuse_copies(call: str, tensors: Iterable[DTensor], whole: Mesh) -> None:
    """See that all ranks find the tensors of a call where this one does.

    Raises:
        SeveralMeshesError: there are copies, which some ranks find here, and others elsewhere.
    """
    if whole.copied and not all(map(_is_alike, tensors)):
        raise SeveralMeshesError(
            f"{call} takes tensors of several stages, and stages have copies of "
            f"{few(whole.copied)}: the ranks would not make the same calls. Compute with what "
            "engine.full_state_dict() or engine.full_gradients() gives, on every rank."
        )


def _is_alike(x: DTensor) -> bool:
    """Whether a tensor lies where each other rank finds it, too."""
    mesh, place = x._layout.mesh, place_of(x)
    return mesh.within is None or mesh.is_alike or (place is not None and place.ranks == mesh.ranks)


def everywhere(call: str, x: DTensor) -> torch.Tensor:
    """The whole of a tensor, plain, for a call that all ranks make; a collective of the outermost mesh."""
    mesh = x._layout.mesh
    if mesh.outermost is not mesh:
        _tell(call, [x], mesh.outermost)
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


# ---- parameters of which stages have copies, in calls of the program
#
# Each rank finds a copy in its own stage, and what is made of it would lie in as many places as there are.
# So each parameter beside copies has a place: the ranks of all stages that have it. A call computes with the
# copy that this rank has, and what it gives lies in that place, the same on each rank. So has a batch.


def place_of(x: torch.Tensor) -> Mesh | None:
    """Where all ranks find a parameter beside copies; None of other tensors, which have but one place."""
    place: Mesh | None = x.__dict__.get("_place")
    return place


def lie_in_each_stage(batch: Any, mesh: Mesh) -> None:
    """Let all ranks find the rows that they have of a batch, as each stage has all of them."""
    for x in _dtensors(batch):
        x._place = mesh  # type: ignore[attr-defined]


def as_all_find(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """The arguments of a call on several tensors, with what lies where all ranks find it for parameters.

    One that is written to stays itself, and so do all beside what a stage has for itself (an optimizer's
    states). Of a call on one parameter :func:`found_by_all` takes the results.
    """
    tensors = _dtensors((args, kwargs))
    if len(tensors) < 2 or not (_computes(func) and all(map(_is_found, tensors))):
        return args, kwargs
    target = args[0] if writes(func) else kwargs.get("out")
    written = tensors_in(target)
    held = set(map(id, written))

    def found(x: Any, into: torch.Tensor | None = None) -> Any:
        if type(x) is not DTensor or id(x) in held:
            return x
        x = _in_its_place(x)
        if into is None or (place := place_of(into)) is None:
            return x
        if not _is_seen(x, place):
            _tell(func.__name__, [x], place.outermost)
            x = brought(x, place.outermost)
        return brought(x, into._layout.mesh)  # type: ignore[attr-defined]

    def beside(x: Any) -> Any:
        if x is target:
            return x
        if isinstance(x, list | tuple) and isinstance(target, list | tuple) and len(x) == len(written):
            return [found(*pair) for pair in zip(x, written, strict=True)]
        return tree_map(partial(found, into=target if isinstance(target, torch.Tensor) else None), x)

    return tuple(map(beside, args)), {name: beside(x) for name, x in kwargs.items()}


def into_plain(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """The arguments of a call that writes to what each rank has for itself (a teacher, averages): the whole.

    A collective, where they lie in a stage: all ranks make such calls.
    """
    if kwargs.get("out") is not None:
        written = tensors_in(kwargs["out"])
    else:
        written = tensors_in(args[0]) if args and writes(func) else []
    if not written or any(type(x) is DTensor or x.is_meta for x in written):
        return args, kwargs

    def bring(x: Any) -> Any:
        if type(x) is not DTensor:
            return x
        x = _in_its_place(x)
        if x._layout.mesh.outermost is x._layout.mesh:
            return x
        whole = everywhere(func.__name__, x)  # as a DTensor, for rules that take more than torch does
        return DTensor.from_local(whole, x._layout.mesh.outermost) if "lerp" in func.__name__ else whole

    found: Arguments = tree_map(bring, (args, kwargs))
    return found


def found_by_all(out: Any, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Let what was made of one parameter lie in the place where all ranks find that; gives it."""
    if func is torch.autograd.grad:
        sought = kwargs["inputs"] if len(args) < 2 else args[1]
        for x, p in zip(out, [sought] if isinstance(sought, torch.Tensor) else sought, strict=True):
            _put_as(x, p)
    elif len(tensors := _dtensors((args, kwargs))) == 1:
        for x in leaves([out], DTensor, (torch.Tensor,)):
            _put_as(x, tensors[0])
    return out


def _in_its_place(x: DTensor) -> DTensor:
    """The same where all ranks find it."""
    return x if place_of(x) is None else _put_as(x.view_as(x), x)


def _put_as(x: Any, p: Any) -> Any:
    """Let what lies in this rank's stage, as a parameter, lie in that one's place."""
    place = place_of(p)
    if place is not None and type(x) is DTensor and x is not p and x._layout.mesh is p._layout.mesh:
        lies = x._layout
        own = Layout.of(place, lies.axes, lies.cuts, lies.shape)
        x._layout = own if lies.own is lies else own.loan()
    return x


def _dtensors(given: Any) -> list[DTensor]:
    """Each once."""
    return list({id(x): x for x in tensors_in(given) if type(x) is DTensor}.values())


def _is_found(x: DTensor) -> bool:
    return place_of(x) is not None or _is_alike(x)


def _computes(func: Callable[..., Any]) -> bool:
    """Whether a call is about the values of all its tensors, not about graphs, hooks or memory."""
    is_list = getattr(func, "__name__", "").startswith("_foreach_")
    return is_list or RULES.special(func) is None or func == torch.Tensor.data.__set__  # type: ignore[attr-defined]
