"""Libraries that sum over ranks by themselves, wherever ``torch.distributed`` runs, count each row once.

What a program gives to a metric is of all rows, on each rank, or of this rank's, which others have too where
they share a model's layers. The libraries take each rank for one that has rows of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, Protocol
from weakref import WeakSet

import torch
import torch.distributed as dist

from espalier.mesh import Mesh
from espalier.parallel import Plan
from espalier.tensor.dtensor import DTensor
from espalier.trees import tensors_in

_OURS = "_espalier_sharing"


class Laid(Protocol):
    """What is asked of an engine."""

    mesh: Mesh
    plan: Plan
    gives_own_rows: bool


class Sharing:
    """What the engines of a program have it know: all rows on each rank, or some.

    Attributes:
        engines: those that are there.
    """

    def __init__(self) -> None:
        self.engines: WeakSet[Laid] = WeakSet()

    def is_alone(self, *given: Any) -> bool:
        """Whether what is to be added up is of all rows already."""
        if not self.engines:
            return False
        if any(isinstance(x, DTensor) for x in tensors_in(given)):
            return True
        parts = [_reading(engine) for engine in self.engines if engine.gives_own_rows]
        return not parts or all(mesh.size() == 1 for mesh in parts)

    def among(self) -> dist.ProcessGroup | None:
        """Those that have other rows than this rank; None: all other ranks."""
        for engine in self.engines:
            reading = _reading(engine)
            if engine.gives_own_rows and 1 < reading.size() < engine.mesh.size():
                return reading.whole_group()
        return None


def _reading(engine: Laid) -> Mesh:
    return engine.mesh[engine.plan.batch_axes]


def tell_libraries(engine: Laid) -> None:
    """Have the libraries that are loaded know what an engine's program is given."""
    for name, teach in _LIBRARIES:
        module = sys.modules.get(name)
        if module is None or engine.mesh.is_dry or engine.mesh.size() == 1:
            continue
        sharing: Sharing | None = vars(module).get(_OURS)
        if sharing is None:
            sharing = vars(module)[_OURS] = Sharing()
            teach(module, sharing)
        sharing.engines.add(engine)


def _torchmetrics(module: Any, sharing: Sharing) -> None:
    """``Metric.sync``, which every metric asks for its states, unless the program says how it is done."""
    theirs = module.Metric.sync

    @wraps(theirs)
    def sync(
        self: Any,
        dist_sync_fn: Any = None,
        process_group: Any = None,
        should_sync: bool = True,
        distributed_available: Any = None,
    ) -> None:
        said = (process_group, self.process_group, dist_sync_fn)
        if should_sync and all(x is None for x in said):
            should_sync = not sharing.is_alone([getattr(self, name) for name in self._reductions])
            process_group = sharing.among() if should_sync else None
        theirs(self, dist_sync_fn, process_group, should_sync, distributed_available)

    module.Metric.sync = sync


# of ignite, what adds up what the program gives it; of the rest, ranks are ranks (who writes a file)
_ADDING = ("ignite.metrics", "ignite.handlers.lr_finder")


def _ignite(module: Any, sharing: Sharing) -> None:
    """``ignite.distributed``, where metrics ask it."""

    def put(name: str, answer: Callable[..., Any], takes_group: bool = False) -> None:
        theirs = getattr(module, name)

        @wraps(theirs)
        def asked(*args: Any, **kwargs: Any) -> Any:
            if not sys._getframe(1).f_globals.get("__name__", "").startswith(_ADDING):
                return theirs(*args, **kwargs)
            if sharing.is_alone(args):
                return answer(*args, **kwargs)
            group = sharing.among()
            if group is not None and name == "get_world_size":
                return dist.get_world_size(group)
            if group is not None and takes_group and kwargs.get("group") is None:
                kwargs["group"] = group
            return theirs(*args, **kwargs)

        setattr(module, name, asked)

    put("get_world_size", lambda: 1)
    put("get_rank", lambda: 0)
    put("all_reduce", lambda tensor, *_, **__: tensor, takes_group=True)
    put("all_gather", lambda x, *_, **__: x if isinstance(x, torch.Tensor) else [x], takes_group=True)
    put("broadcast", lambda tensor, *_, **__: tensor)


_LIBRARIES: tuple[tuple[str, Callable[[Any, Sharing], None]], ...] = (
    ("torchmetrics.metric", _torchmetrics),
    ("ignite.distributed", _ignite),
)
