"""What a program asks of a model, answered by its engine: modes, parameters, state dicts, the device."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Self

import torch
from torch import nn

from espalier.blocks import Arguments, parameters_in
from espalier.checkpoint.sources import is_extra_state
from espalier.engine.by_model import loads_by_itself, with_notes_of
from espalier.mesh import Mesh
from espalier.parallel.pipeline.arguments import mapped
from espalier.tensor.dtensor import is_sparse
from espalier.tensor.loans import Written
from espalier.tensor.observers import tell
from espalier.texts import expect, few
from espalier.torch_private import memory_id, raw


class Keys(NamedTuple):
    """Names of a state dict that did not fit."""

    missing_keys: list[str]
    unexpected_keys: list[str]


class StateDictError(ValueError, RuntimeError):
    """A state dict is of another model; as torch, which raises a ``RuntimeError``, programs may expect it."""


class Surface(ABC):
    """The names of ``nn.Module`` that training programs use, for the engine's model."""

    module: nn.Module
    mesh: Mesh
    lays_out = True  # what calls it is not compiled

    def train(self, mode: bool = True) -> Self:
        """Let the model be in training mode, or not."""
        self.module.train(mode)
        return self

    def eval(self) -> Self:
        """Let the model be in evaluation mode."""
        return self.train(False)

    @property
    def training(self) -> bool:
        """Whether the model is in training mode."""
        return self.module.training

    @property
    def device(self) -> torch.device:
        """This rank's, where inputs are computed."""
        return self.mesh.device()

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """The model's, as for an optimizer; DTensors once they are laid out."""
        return self.module.parameters(recurse)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """The model's, under its own names."""
        return self.module.named_parameters(*args, **kwargs)

    def buffers(self, recurse: bool = True) -> Iterator[torch.Tensor]:
        """The model's."""
        return self.module.buffers(recurse)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """The model's, under its own names."""
        return self.module.named_buffers(*args, **kwargs)

    def modules(self) -> Iterator[nn.Module]:
        """The model and all in it."""
        return self.module.modules()

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        """The model and all in it, by name."""
        return self.module.named_modules(*args, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        """The model's, with plain whole tensors under its own names, as one process has it.

        A collective where a plan cuts or casts anything: then every rank must call. (Without an engine's
        help, ``engine.module.state_dict()`` has this rank's parts.)
        """
        return self.full_state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, **options: Any) -> Any:
        """Take over a state dict of whole tensors, the same on all ranks, or of DTensors (a collective).

        Hooks of the model, and its own ways of loading, run as on one process.

        Args:
            options: more for a model that has its own ``load_state_dict``.

        Raises:
            StateDictError: it is of another model.
        """
        expect("load_state_dict: the state dict", state_dict, Mapping, "a dict of names to tensors")
        state = self._whole_values(state_dict)
        if loads_by_itself(self.module):
            noted = with_notes_of(state_dict, state)
            given = options if strict else {"strict": strict, **options}  # its own may be another by default
            return self._take_state(partial(self.module.load_state_dict, noted, **given))
        own = self.module.state_dict(keep_vars=True)
        missing = [name for name in own if name not in state]
        unexpected = [name for name in state if name not in own]
        if strict and (lost := [name for name in missing if is_extra_state(name)]):
            said = f"The state dict lacks {', '.join(lost)}: give all of it, or say strict=False."
            raise StateDictError(said)
        if not strict:
            held = self.full_state_dict() if missing else {}
            # a file has one name of a tied weight, perhaps
            by_tensor = {id(own[name]): x for name, x in state.items() if name in own}
            state = {name: state.get(name, by_tensor.get(id(x), held.get(name))) for name, x in own.items()}
        try:
            self.load_weights(state)
        except ValueError as error:
            raise StateDictError(str(error)) from error
        return Keys([] if strict else missing, [] if strict else unexpected)

    @abstractmethod
    def _whole_values(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """A state dict whose DTensors are plain and global on every rank, also those that lie as parameters
        do."""

    @abstractmethod
    def _take_state(self, load: Callable[[], Any]) -> Any:
        """Have the model take a state dict by its own ``load_state_dict``."""

    @abstractmethod
    def full_state_dict(self) -> dict[str, Any]:
        """The model's state dict with plain whole tensors."""

    @abstractmethod
    def load_weights(self, path: Any) -> None:
        """Take the model's weights."""


class GivenState:
    """Sees whether a program writes to what a state dict gave it, where these are copies; it holds none."""

    def __init__(self, state: Mapping[str, Any], model: nn.Module) -> None:
        with raw():
            live = {memory_id(x) for x in (*parameters_in(model), *model.buffers()) if not is_sparse(x)}
            self._copies = {
                name: Written(x)
                for name, x in state.items()
                if type(x) is torch.Tensor and not (is_sparse(x) or x.is_inference() or memory_id(x) in live)
            }

    def tell(self) -> None:
        """Warn of what was written to."""
        written = [name for name, copy in self._copies.items() if copy.is_new()]
        if written:
            tell(
                f"What model.state_dict() gave was written to ({few(written)}), and these are copies here: "
                "the model's parameters are as they were. Give it back, on all ranks: model.load_state_dict("
                "state); or write to the parameters (with torch.no_grad(): p.copy_(x))."
            )


class AsModel:
    """An engine as :func:`espalier.models.generate` asks a model, on the host.

    Args:
        predict: the engine's.
    """

    def __init__(self, module: nn.Module, predict: Callable[[Any], Any]) -> None:
        self._module, self._predict = module, predict

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def __call__(self, ids: torch.Tensor, **more: torch.Tensor) -> Any:
        output = self._predict({"input_ids": ids, **more})
        return mapped(lambda x: x.cpu() if isinstance(x, torch.Tensor) else x, output)


def bound(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The arguments of a call of a module as its inputs: a tuple, or a dict where some have names."""
    if not kwargs:
        return tuple(args)
    if not args:
        return dict(kwargs)
    of_own = type(module).__call__ is not nn.Module.__call__
    call = inspect.signature(module.__call__ if of_own else module.forward).bind(*args, **kwargs)
    named: dict[str, Any] = {}
    for name, value in call.arguments.items():
        kind = call.signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            named |= value
        elif kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.POSITIONAL_ONLY):
            return Arguments(tuple(args), dict(kwargs))
        else:
            named[name] = value
    return named
