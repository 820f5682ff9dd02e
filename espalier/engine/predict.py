"""What a model gives, as plain tensors on every rank; and text, token by token."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import torch

from espalier.layout import Layout
from espalier.models.generate import generate as continued
from espalier.parallel.pipeline.trees import leaves, mapped
from espalier.tensor import DTensor, full_tensor, stamp
from espalier.tensor.fallback import tree_map

if TYPE_CHECKING:
    from espalier.engine.engine import Engine


def entered(engine: Engine, inputs: Any) -> Any:
    """A model's inputs as DTensors: their rows cut, if there is one for each rank that shares the batch."""
    mesh, axes = engine._here, engine._batches.axes
    rows = [x.shape[0] for x in leaves(inputs, torch.Tensor) if x.ndim]
    if min(rows, default=0) >= math.prod(mesh.shape[a] for a in axes):
        return tree_map(engine._cast, engine._batches.typed(inputs))

    def whole(x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or isinstance(x, DTensor) or not x.ndim:
            return x
        return stamp(x.to(mesh.device()).view_as(x), Layout.replicated(mesh, tuple(x.shape)))

    return tree_map(lambda x: engine._cast(whole(x)), inputs)


def called(engine: Engine, inputs: Any) -> Any:
    """What the engine's module gives."""
    with engine._autocast():
        if isinstance(inputs, Mapping):
            return engine.module(**inputs)
        return engine.module(*inputs) if isinstance(inputs, tuple | list) else engine.module(inputs)


def plain_output(output: Any) -> Any:
    """A model's output with whole tensors, of this rank alone."""
    return mapped(lambda x: full_tensor(x).detach() if isinstance(x, torch.Tensor) else x, output)


def generate(engine: Engine, ids: torch.Tensor, max_new_tokens: int, **options: Any) -> torch.Tensor:
    """See :meth:`Engine.generate`."""
    # on the host, whose generator of random numbers is in the same state on all ranks
    model = cast(Any, _Asked(engine))
    return continued(model, ids.cpu(), max_new_tokens, **options).to(ids.device)


class _Asked:
    """An engine as ``espalier.models.generate`` asks a model."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def training(self) -> bool:
        return self._engine.module.training

    def train(self, mode: bool) -> None:
        self._engine.module.train(mode)

    def eval(self) -> None:
        self._engine.module.eval()

    def __call__(self, ids: torch.Tensor) -> Any:
        output = self._engine.predict({"input_ids": ids})
        return mapped(lambda x: x.cpu() if isinstance(x, torch.Tensor) else x, output)
