"""``colossalai.lazy``: models built without memory."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from torch import nn

from espalier.compat.absent import or_absent
from espalier.tensor import deferred
from espalier.tensor.deferred import make_parameters_real

__path__: list[str] = []  # there are modules in it


class LazyInitContext:
    """While open, modules are built without memory: ``booster.boost`` then builds each rank's part.

    Args:
        options: devices and the like, which the plan says.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        self._stack = ExitStack()

    def __enter__(self) -> LazyInitContext:
        self._stack.enter_context(deferred())
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()

    @staticmethod
    def materialize(module: nn.Module, verbose: bool = False) -> nn.Module:
        """Let a model have its values now, whole on this rank."""
        make_parameters_real([p for p in module.parameters() if p.is_meta])
        return module


__all__ = ["LazyInitContext"]

__getattr__ = or_absent(
    __name__,
    "colossalai.lazy",
    {
        "LazyTensor": "parameters of models without memory are on torch's device meta",
        "ConstructorManager PretrainedManager": "from_pretrained of transformers reads weights",
    },
    elsewhere={"construction lazy_init pretrained": __name__},
)
