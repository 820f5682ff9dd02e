"""Copies of a model that lies in stages (averages of its weights, teachers): called through them, too."""

from __future__ import annotations

import copy
import weakref
from collections import Counter
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn

from espalier.blocks import parameters_in
from espalier.engine.model_call import ModelCall
from espalier.engine.surface import bound
from espalier.meanwhile import having
from espalier.parallel.pipeline.arguments import cloned
from espalier.parallel.pipeline.record import TorchState
from espalier.parallel.several import holders
from espalier.tensor.asked import name_of, name_value
from espalier.tensor.observers import program_lines
from espalier.torch_private import own_buffers, own_parameters


class Caller(Protocol):
    """Calls a model that lies in stages."""

    call: ModelCall

    def output(self, inputs: Any, model: nn.Module | None = None) -> Any:
        """What the model gives for inputs, or a copy of it: plain, on every rank."""


class Copies:
    """Those of one model.

    Args:
        passes: call the model; held weakly.
    """

    def __init__(self, passes: Caller) -> None:
        self._passes = weakref.ref(passes)
        # made before the model was laid out: where in the program, and how often there
        self._early: weakref.WeakKeyDictionary[nn.Module, Hashable] = weakref.WeakKeyDictionary()
        self._made: Counter[Hashable] = Counter()
        self.is_laid_out = self.is_running = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Copies:
        return self  # of a copy's copy, too

    def made(self, model: nn.Module, memo: dict[int, Any]) -> nn.Module:
        """A copy of the model, or of a copy."""
        own = type(model)
        of_model = own.__bases__[1] if issubclass(own, _Copy) else own
        model.__class__ = of_model
        try:
            twin: nn.Module = copy.deepcopy(model, memo)
        finally:
            model.__class__ = own
        twin.__class__ = type(of_model.__name__, (_Copy, of_model), {"__module__": of_model.__module__})
        twin._copies = self  # type: ignore[assignment]
        if not self.is_laid_out:
            site = program_lines()
            self._made[site] += 1
            self._early[twin] = site, self._made[site]
        return twin

    def lay_out(self, model: nn.Module) -> None:
        """The model is laid out now: so are its copies, each with its own values."""
        self.is_laid_out = True
        for twin, made in self._early.items():
            laid_out = copy.deepcopy(model)
            for own, other in zip(twin.modules(), laid_out.modules(), strict=True):
                _replace(own_parameters(own), own_parameters(other))
                _replace(own_buffers(own), own_buffers(other))
            for p, x in zip(parameters_in(model), parameters_in(twin), strict=True):
                name_value(x, "copy", made, name_of(p))
        self._early.clear()

    def output(self, twin: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a copy gives for inputs of the whole batch, without gradients, on every rank."""
        passes = self._passes()
        if passes is None:
            raise ValueError("This is a copy of a model in stages whose engine is gone: keep the engine.")
        if torch.is_grad_enabled():
            _refuse_trained(twin)
        call = passes.call
        now = TorchState.now(call.mesh.device_type)
        inputs, is_inference = bound(call.module, args, kwargs), torch.is_inference_mode_enabled()
        modes = self._modes_of(twin, call.module)
        with having(call, asked=now), torch.inference_mode(False), torch.no_grad(), modes:
            return passes.output(cloned(inputs) if is_inference else inputs, twin)

    @contextmanager
    def _modes_of(self, twin: nn.Module, model: nn.Module) -> Iterator[None]:
        """While open, the model trains or evaluates as its copy does: the stages follow from it.

        And the copy's parameters need gradients where the model's do: so it was agreed what stages send.
        """
        before = [(m, m.training) for m in model.modules()]
        for (m, _), own in zip(before, twin.modules(), strict=True):
            m.training = own.training
        both = zip(parameters_in(twin), parameters_in(model), strict=True)
        others = [p for p, of_model in both if p.requires_grad is not of_model.requires_grad]
        for p in others:
            p.requires_grad_(not p.requires_grad)
        self.is_running = True
        try:
            yield
        finally:
            self.is_running = False
            for p in others:
                p.requires_grad_(not p.requires_grad)
            for m, was in before:
                m.training = was


def _replace(mine: dict[str, Any], new: dict[str, Any]) -> None:
    """Put laid-out tensors in the place of a copy's, with its values."""
    for name, x in new.items():
        value = mine.get(name)
        if isinstance(x, nn.Parameter) and value is not None:
            x.requires_grad_(value.requires_grad)  # the program may have frozen it
        # what was deferred had the model's values; what has none here lies on other ranks
        if x is not None and value is not None and not (x.is_meta or value.is_meta):
            with torch.no_grad():
                x.copy_(value)
    mine.update(new)


def _refuse_trained(twin: nn.Module) -> None:
    """See, at the first call with gradients, that no optimizer is to train a copy.

    Raises:
        ValueError: one is.
    """
    if twin.__dict__.get("_is_looked_at"):
        return
    twin.__dict__["_is_looked_at"] = True
    if trainers := holders(p for p in parameters_in(twin) if p.requires_grad):
        raise ValueError(
            f"{type(trainers[0]).__name__} is to train a copy of a model in stages, and no gradients come "
            "from calls of copies. Build another plain model, load engine.full_state_dict() into it, and "
            "give it an engine of its own (espalier.prepare); or train under a plan without pipe."
        )


class _Copy(nn.Module):
    """Beside the class of the model: calls go through the stages."""

    _copies: Copies

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        copies = self._copies
        return super().__call__(*args, **kwargs) if copies.is_running else copies.output(self, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        return self._copies.made(self, memo)
