"""A loop that makes losses of its rank's own rows, and uses the model's parameters beside what it gave.

``F.cross_entropy(model.module.scale.exp() * features, labels)``, ``model.module.head(features)``: features
are this rank's own, and plain. Beside a DTensor a plain tensor is taken as the same on all ranks. So the
DTensor becomes what the program means: its whole value, plain, of whose gradient each rank has an addend.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from espalier.mesh import Mesh
from espalier.tensor import DTensor
from espalier.tensor.fallback import writes
from espalier.tensor.observers import DOOR, Go, Watcher
from espalier.trees import tensors_in, tree_map


class OwnLoop(Watcher):
    """Sees the calls of such a loop, from what the model gives to the next backward pass or call.

    Args:
        mesh: of the parameters.
        taken: a method that gives the plain value of a DTensor; held weakly.
    """

    inside = traffic = passes = False

    def __init__(self, mesh: Mesh, taken: Callable[[DTensor], torch.Tensor]) -> None:
        self._mesh, self._taken = mesh, weakref.WeakMethod(taken)

    def open(self) -> None:
        """Watch from now on."""
        if all(other is not self for other in DOOR.watchers):
            DOOR.watchers = (*DOOR.watchers, self)

    @staticmethod
    def close() -> None:
        """Nobody's loop computes: a model does, or a backward pass."""
        if any(type(other) is OwnLoop for other in DOOR.watchers):
            DOOR.watchers = tuple(other for other in DOOR.watchers if type(other) is not OwnLoop)

    def around(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], go: Go) -> Any:
        """The call, on plain tensors where it has some of this rank's own."""
        tensors = tensors_in((args, kwargs))
        own = [x for x in tensors if type(x) is not DTensor and (x.requires_grad or x.ndim)]
        if not own or (taken := self._taken()) is None or (writes(func) and type(args[0]) is DTensor):
            return go()
        if any(type(x) is DTensor and x._layout.mesh is not self._mesh for x in tensors):
            return go()

        def plain(x: Any) -> Any:
            return taken(x) if type(x) is DTensor else x

        return func(*tree_map(plain, args), **tree_map(plain, kwargs))
