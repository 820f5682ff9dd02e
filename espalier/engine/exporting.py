"""torch's tracers and exporters are given the model as on one process."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from espalier.engine.engine import Engine
from espalier.engine.full_model import full_copy
from espalier.engine.module import EngineModule
from espalier.tensor import DTensor
from espalier.tensor.loans import is_whole
from espalier.tensor.meshes import everywhere
from espalier.torch_private import own_modules
from espalier.trees import leaves, tree_map

_MODELS = (nn.Module, Engine)


def install() -> None:
    """Let ``torch.jit.trace``, ``torch.export`` and ``torch.onnx`` take models of any plan."""
    import torch.onnx

    for place, name in ((torch.jit, "trace"), (torch.export, "export"), (torch.onnx, "export")):
        setattr(place, name, _taking(getattr(place, name)))


def _taking(export: Callable[..., Any]) -> Callable[..., Any]:
    """An exporter that takes whole models, and batches of prepared loaders.

    Where each rank has all of a model nothing is sent: one rank may export alone, on its own rows.
    """

    @functools.wraps(export)
    def exported(*args: Any, **kwargs: Any) -> Any:
        given = [list(args), kwargs]
        models = leaves(given, _MODELS, _MODELS)
        held = [x for model in models for x in _tensors(model) if type(x) is DTensor]
        if not held and not any(isinstance(model, Engine) or _prepared(model) for model in models):
            return export(*args, **kwargs)
        is_here = all(is_whole(x._layout) for x in held)

        def as_on_one_process(x: Any) -> Any:
            if isinstance(x, _MODELS):
                return _full(x)
            if type(x) is not DTensor:
                return x
            return x.to_local() if is_here else x.full_tensor()

        args, kwargs = tree_map(as_on_one_process, given, (*_MODELS, DTensor))
        return export(*args, **kwargs)

    return exported


def _tensors(model: nn.Module | Engine) -> Iterator[torch.Tensor]:
    module = model.module if isinstance(model, Engine) else model
    yield from module.parameters()
    yield from module.buffers()


def _full(model: nn.Module | Engine) -> nn.Module:
    if isinstance(model, Engine):
        return model.full_model()
    if isinstance(model, EngineModule):
        return model.engine.full_model()
    return full_copy(model, _whole, {m: m.engine.full_model() for m in _prepared(model)})


def _prepared(module: nn.Module) -> list[EngineModule]:
    """Those in a module, or itself."""
    if isinstance(module, EngineModule):
        return [module]
    return [m for inner in own_modules(module).values() if inner is not None for m in _prepared(inner)]


def _whole(name: str, x: torch.Tensor) -> torch.Tensor:
    return everywhere(name, x) if type(x) is DTensor else x
