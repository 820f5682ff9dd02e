"""Parts of a mesh."""

from __future__ import annotations

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
        part.ledgers, part.words = mesh.ledgers, mesh.words
        if inside:
            part._groups = [None if i == a else group for i, group in enumerate(mesh._groups)]
            part._orders = [None if i == a else order for i, order in enumerate(mesh._orders)]
        mesh._parts[key] = part
    return mesh._parts[key]


__all__ = ["at"]
