"""The world, and an engine's ranks by what they share: the batch, a tensor, a sequence, experts."""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from typing import Any, Final

import torch.distributed as dist

from espalier.compat.axes import Axes
from espalier.engine import Engine
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


def axes_of(engine: Engine, kind: str) -> Axes:
    """Those that share a ``"tensor"``, a ``"sequence"``, ``"expert"``s, a ``"pipe"`` of stages; or the batch
    (``"data"``), and sequences too (``"data and sequence"``), or none but experts (``"data of experts"``)."""
    mesh, plan = engine.mesh, engine.plan
    names: Sequence[str] = _NAMES.get(kind, plan.batch_axes)
    if kind == "data and sequence":
        names = [*names, "context"]
    elif kind == "data of experts":
        names = [name for name in names if name != "expert"]
    return Axes.among(mesh, names)


def note_newest(engine: Engine) -> None:
    """Let DeepSpeed's functions that are told of no engine speak of this one, in the running world."""
    World.own()[_NEWEST] = weakref.ref(engine)


def newest_axes(kind: str) -> Axes | None:
    """:func:`axes_of` the engine that was made last in the running world; None while there is none."""
    engine = World.own().get(_NEWEST, lambda: None)()
    return None if engine is None else axes_of(engine, kind)


_NEWEST: Final = "newest engine of deepspeed"
