"""What a model gives, as plain tensors on every rank; and text, token by token."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, cast

import torch

from espalier.layout import Layout
from espalier.models.caches import keepers
from espalier.models.generate import generate as continued
from espalier.parallel.pipeline.trees import called as given_to
from espalier.parallel.pipeline.trees import leaves, mapped
from espalier.tensor import DTensor, full_tensor, stamp
from espalier.trees import tree_map

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
        return given_to(engine.module, inputs)


def plain_output(output: Any) -> Any:
    """A model's output with whole tensors, of this rank alone."""
    return mapped(lambda x: full_tensor(x).detach() if isinstance(x, torch.Tensor) else x, output)


def generate(engine: Engine, ids: torch.Tensor, max_new_tokens: int, **options: Any) -> torch.Tensor:
    """See :meth:`Engine.generate`."""
    inputs = {"input_ids": ids}
    engine.lay_out(inputs if engine._loss_fn is None else (inputs, None))
    options["cache"] = options.get("cache", True) and _may_keep(engine)
    # on the host, whose generator of random numbers is in the same state on all ranks
    model = cast(Any, _Asked(engine))
    return continued(model, ids.cpu(), max_new_tokens, **options).to(ids.device)


def _may_keep(engine: Engine) -> bool:
    """Whether attention has each sequence whole, and is not divided among stages."""
    if engine.plan.context > 1:
        return False
    stages = getattr(engine, "_stages", None)
    whole = None if stages is None else {m for program in stages.split.stages for m in program.inner}
    return whole is None or whole.issuperset(keepers(engine.module))


class _Asked:
    """An engine as ``espalier.models.generate`` asks a model."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine.module, name)

    def __call__(self, ids: torch.Tensor, **more: torch.Tensor) -> Any:
        output = self._engine.predict({"input_ids": ids, **more})
        return mapped(lambda x: x.cpu() if isinstance(x, torch.Tensor) else x, output)
