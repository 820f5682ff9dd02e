"""``deepspeed.utils.groups``: the ranks of the newest engine by what they share: numbers and process groups.

``get_data_parallel_world_size()``, ``_get_sequence_parallel_group()``, ``_get_expert_parallel_rank(name)``
and the like. Before there is an engine, all ranks share the batch.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import torch.distributed as dist

from espalier.compat.absent import Absent
from espalier.compat.common import Axes
from espalier.engine import Engine
from espalier.mesh.process import World, running_rank, running_size, start

# DeepSpeed's word, and what its ranks share
_KINDS: Final = {
    "tensor_model_parallel": "tensor",
    "model_parallel": "tensor",
    "sequence_parallel": "sequence",
    "sequence_data_parallel": "data and sequence",
    "data_parallel": "data",
    "expert_parallel": "expert",
    "expert_data_parallel": "data of experts",
    "pipe_parallel": "pipe",
}
_BEGINNINGS: Final = ("get_", "set_", "_get_", "_create_", "_clone_", "_init_", "_zero_param_")
_ANSWERS: Final[dict[str, Callable[[Axes], Any]]] = {
    "group": Axes.group,
    "world_size": lambda axes: axes.size,
    "rank": lambda axes: axes.rank,
    "group_ranks": lambda axes: axes.ranks,
    "src_rank": lambda axes: axes.ranks[0],
}
_ALONE: Final[dict[str, Callable[[], Any]]] = {
    "group": lambda: dist.group.WORLD,
    "world_size": running_size,
    "rank": running_rank,
    "group_ranks": lambda: list(range(_ALONE["world_size"]())),
    "src_rank": lambda: 0,
}


def _answer(name: str, kind: str, what: str, group_name: str = "") -> Any:
    """One of them; a group of experts has a name in DeepSpeed: all layers' experts lie on the same ranks."""
    axes = newest_axes(kind)
    if axes is not None:
        return _ANSWERS[what](axes)
    if kind.startswith("data"):
        return _ALONE[what]()
    if what in ("world_size", "rank"):
        return int(what == "world_size")
    raise ValueError(
        f"deepspeed.utils.groups.{name}(): expected an engine: call deepspeed.initialize before it."
    )


def initialize(ep_size: int = 1, mpu: Any = None) -> None:
    """Nothing: a layer of experts says ``ep_size``, and the engine makes the groups."""


def __getattr__(name: str) -> Any:
    if not name.startswith(_BEGINNINGS):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    word = name.removeprefix("_").removeprefix("get_")
    for theirs, kind in _KINDS.items():
        what = word.removeprefix(f"{theirs}_")
        if what != word and what in _ANSWERS:
            return partial(_answer, name, kind, what)
    mesh = "engine.engine.mesh has the axes and their groups: mesh.get_group(axis), mesh.size(axis)"
    return Absent(f"deepspeed.utils.groups.{name}", mesh)


# DOC """The world, and an engine's ranks by what they share: the batch, a tensor, a sequence, experts."""
# DOC

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
