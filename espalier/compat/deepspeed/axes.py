"""The world, and an engine's ranks by what they share: the batch, a tensor, a sequence, experts."""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch.distributed as dist

from espalier.engine import Engine
from espalier.mesh import Mesh
from espalier.mesh.mesh import group_among
from espalier.mesh.process import World, start

# what a program asks for, and axes of the plan
_NAMES: Final = {
    "tensor": ("tensor",),
    "sequence": ("context",),
    "pipe": ("pipe",),
    "expert": ("expert",),
}


def init_distributed(dist_backend: str | None = None, *args: Any, **kwargs: Any) -> None:
    """Join the world that the environment describes; nothing happens where that is done, or there is none."""
    if not dist.is_initialized() and "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        start("cpu" if dist_backend == "gloo" else None)


class Axes(NamedTuple):
    """The ranks that differ from this one along some axes of a mesh."""

    mesh: Mesh
    axes: tuple[int, ...]

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
        """Their process group, made when it is asked for: all of them must ask. None without a world."""
        if not dist.is_initialized():
            return None
        if self.size == dist.get_world_size():
            return dist.group.WORLD
        if self.size == 1:
            return group_among([self.mesh.world_rank])
        return self.mesh[tuple(self.mesh.names[axis] for axis in self.axes)].whole_group()


def axes_of(engine: Engine, kind: str) -> Axes:
    """Those that share a ``"tensor"``, a ``"sequence"``, ``"expert"``s, a ``"pipe"`` of stages; or the batch
    (``"data"``), and sequences too (``"data and sequence"``), or none but experts (``"data of experts"``)."""
    mesh, plan = engine.mesh, engine.plan
    names: Sequence[str] = _NAMES.get(kind, plan.batch_axes)
    if kind == "data and sequence":
        names = [*names, "context"]
    elif kind == "data of experts":
        names = [name for name in names if name != "expert"]
    there = [mesh.axis(name) for name in names if name in mesh.names]
    return Axes(mesh, tuple(axis for axis in there if mesh.shape[axis] > 1))


def note_newest(engine: Engine) -> None:
    """Let DeepSpeed's functions that are told of no engine speak of this one, in the running world."""
    World.own()[_NEWEST] = weakref.ref(engine)


def newest_axes(kind: str) -> Axes | None:
    """:func:`axes_of` the engine that was made last in the running world; None while there is none."""
    engine = World.own().get(_NEWEST, lambda: None)()
    return None if engine is None else axes_of(engine, kind)


_NEWEST: Final = "newest engine of deepspeed"
