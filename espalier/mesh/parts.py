"""Parts of a mesh, and axes taken together."""

from __future__ import annotations

from collections.abc import Sequence

from espalier.mesh.mesh import Mesh, _array


def at(mesh: Mesh, axis: int | str, coordinate: int) -> Mesh:
    """The ranks at one coordinate of an axis, which stays, of size 1; the two share groups and ledgers.

    On ranks at other coordinates it is dry.
    """
    a = mesh.axis(axis)
    key = (f"{mesh.names[a]} = {coordinate}",)
    if key not in mesh._parts:
        inside = mesh.is_member and mesh.coordinate[a] == coordinate
        part = Mesh(
            mesh.names,
            (*mesh.shape[:a], 1, *mesh.shape[a + 1 :]),
            coordinate=tuple(c if inside and i != a else 0 for i, c in enumerate(mesh.coordinate)),
            device_type=mesh.device_type if inside else "meta",
            is_dry=mesh.is_dry or not inside,
            ranks=_array(mesh.ranks, mesh.shape).narrow(a, coordinate, 1).flatten().tolist(),
            world_rank=mesh.world_rank,
        )
        part.ledgers, part.words, part.within = mesh.ledgers, mesh.words, mesh
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


__all__ = ["at", "joined"]
