"""Parts of a mesh, and axes taken together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from espalier.mesh.mesh import Mesh, _array
from espalier.mesh.mesh import known_mesh as known_mesh  # pickles of before name it here


def at(mesh: Mesh, axis: int | str, coordinate: int) -> Mesh:
    """The ranks at one coordinate of an axis, which stays, of size 1; the two share groups and ledgers.

    On ranks at other coordinates it is dry.
    """
    return _taken(mesh, mesh.axis(axis), [coordinate], is_alike=False)


def among(mesh: Mesh, axis: int | str, coordinates: Sequence[int]) -> Mesh:
    """The ranks at some coordinates of an axis, in their order along it; at all of them, the mesh itself.

    On ranks at others it is dry. Nothing can be sent along the axis among some of its coordinates.
    """
    a = mesh.axis(axis)
    coordinates = sorted(coordinates)
    if len(coordinates) == mesh.shape[a]:
        return mesh
    return _taken(mesh, a, coordinates, is_alike=True)


def _taken(mesh: Mesh, a: int, coordinates: list[int], *, is_alike: bool) -> Mesh:
    """The ranks at some coordinates of an axis; ``is_alike``: as :attr:`Mesh.is_alike`."""
    key = (f"{mesh.names[a]} {'in' if is_alike else 'at'} {coordinates}",)
    if key not in mesh._parts:
        inside = mesh.is_member and mesh.coordinate[a] in coordinates
        places = _array(mesh.ranks, mesh.shape).index_select(a, torch.tensor(coordinates, device="cpu"))
        part = Mesh(
            mesh.names,
            (*mesh.shape[:a], len(coordinates), *mesh.shape[a + 1 :]),
            coordinate=tuple(
                (coordinates.index(c) if i == a else c) if inside else 0
                for i, c in enumerate(mesh.coordinate)
            ),
            device_type=mesh.device_type if inside else "meta",
            is_dry=mesh.is_dry or not inside,
            ranks=places.flatten().tolist(),
            world_rank=mesh.world_rank,
        )
        part.ledgers, part.words, part.within, part.is_alike = mesh.ledgers, mesh.words, mesh, is_alike
        if inside:
            part._groups = [None if i == a else group for i, group in enumerate(mesh._groups)]
            part._orders = [None if i == a else order for i, order in enumerate(mesh._orders)]
        mesh._parts[key] = part
    return mesh._parts[key]


def joined(mesh: Mesh, axes: Sequence[int]) -> Mesh:
    """Several axes of a mesh as the one axis of another, the last varying fastest; the two share ledgers.

    All ranks must ask for the same, in one order: a process group is made.
    """
    names = tuple(mesh.names[a] for a in axes)
    if mesh.within is not None and mesh.is_member:
        return joined(mesh.within, axes)
    key = ("joined", *names)
    if key not in mesh._parts:
        part = mesh[names]
        one = Mesh(
            (",".join(names),),
            (part.size(),),
            coordinate=(max(part.rank, 0),),
            device_type=mesh.device_type,
            is_dry=mesh.is_dry,
            ranks=part.ranks,
            world_rank=mesh.world_rank,
        )
        one.ledgers = mesh.ledgers
        if not mesh.is_dry:
            one._groups = [part.whole_group()]
            one._orders = [one._order(0, one._groups[0])]
        mesh._parts[key] = one
    return mesh._parts[key]


def with_axes(mesh: Mesh, axes: Mapping[str, int]) -> Mesh | None:
    """A mesh with these axes over the same ranks: axes of one rank come and go; None if others differ.

    The two share ledgers. All ranks must ask for the same, in one order: process groups may be made.
    """
    has = dict(zip(mesh.names, mesh.shape, strict=True))
    if has == dict(axes):
        return mesh
    wide, wanted = ({name: n for name, n in of.items() if n > 1} for of in (has, axes))
    if wide != wanted:
        return None
    if list(wide) != list(wanted):  # the ranks go on lying as they do
        axes = {**wide, **axes}
    if mesh.is_dry:
        other = Mesh.dry(axes, device_type=mesh.device_type, ranks=mesh.ranks, world_rank=mesh.world_rank)
    elif mesh.size() == 1 and not dist.is_initialized():
        other = Mesh.single(tuple(axes), mesh.device_type)
    else:
        other = Mesh.from_env(axes, mesh.device_type, ranks=mesh.ranks)
    other.ledgers = mesh.ledgers
    return other
