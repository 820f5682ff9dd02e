"""The ranks that differ from this one along some axes, as programs of other systems ask for them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist

from espalier.mesh import Mesh
from espalier.mesh.mesh import group_among
from espalier.mesh.process import World, running_size


class Axes(NamedTuple):
    """The ranks that differ from this one along some axes of a mesh."""

    mesh: Mesh
    axes: tuple[int, ...]

    @classmethod
    def among(cls, mesh: Mesh, names: Iterable[str]) -> Axes:
        """Those of these names that the mesh has, and that have several ranks."""
        there = [mesh.axis(name) for name in names if name in mesh.names]
        return cls(mesh, tuple(axis for axis in there if mesh.shape[axis] > 1))

    @property
    def size(self) -> int:
        """How many there are."""
        return math.prod(self.mesh.shape[axis] for axis in self.axes)

    @property
    def rank(self) -> int:
        """This one among them."""
        return self.mesh.place(self.axes)

    @property
    def ranks(self) -> list[int]:
        """The world's numbers of them."""
        names = tuple(self.mesh.names[axis] for axis in self.axes)
        return list(self.mesh[names].ranks) if names else [self.mesh.world_rank]

    def group(self) -> Any:
        """Their process group, see :func:`group_of`."""
        if 1 < self.size < running_size():
            return self.mesh[tuple(self.mesh.names[axis] for axis in self.axes)].whole_group()
        return group_of(self.ranks)


def group_of(ranks: Sequence[int]) -> dist.ProcessGroup | None:
    """A process group, made when it is first asked for: all of its ranks must ask. None without a world."""
    if not dist.is_initialized():
        return None
    if len(ranks) == dist.get_world_size():
        return dist.group.WORLD
    groups: dict[tuple[int, ...], dist.ProcessGroup] = World.own().setdefault("groups", {})
    among = tuple(sorted(ranks))
    if among not in groups:
        groups[among] = group_among(among)
    return groups[among]
