"""Models that take state dicts by code of their own: by hooks, or by methods in the place of torch's.

That code is written for whole plain tensors, and sets what it likes. So while it runs the model has such
tensors as parameters, on every rank; afterwards the real ones take over what they are then.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from espalier.blocks import named_parameters_in
from espalier.torch_private import STATE_NOTES, keeps_state_its_own_way

Values = Mapping[str, nn.Parameter]


def loads_by_itself(module: nn.Module) -> bool:
    """Whether state dicts go by code of the model, or of a module in it."""
    own = (module.state_dict, nn.Module.state_dict), (module.load_state_dict, nn.Module.load_state_dict)
    if any(getattr(method, "__func__", None) is not of_torch for method, of_torch in own):
        return True
    return any(map(keeps_state_its_own_way, module.modules()))


def load_by_model(module: nn.Module, values: Values, load: Callable[[], Any]) -> tuple[Any, Values]:
    """Have a model load a state dict while it has these values; gives what that gave, and the new values.

    Args:
        values: plain and whole, by the names of the parameters, all names of each.
    """
    held: dict[str, torch.Tensor] = {f"model.{name}": p for name, p in values.items()}
    given, after = functional_call(_Loads(module), held, (load,))
    return given, after


class _Loads(nn.Module):
    """Has a state dict be loaded where tensors stand in the place of parameters."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, load: Callable[[], Any]) -> tuple[Any, Values]:
        given = load()
        return given, dict(named_parameters_in(self.model, remove_duplicate=False))


def with_notes_of(state: Mapping[str, Any], values: Mapping[str, Any], prefix: str = "") -> Any:
    """Values as a state dict that has the notes (versions of modules) that another has beside its tensors.

    Args:
        prefix: before the names in ``values``, not in those of ``state``.
    """
    out = OrderedDict(values)
    add_notes(state, out, prefix)
    return out


def add_notes(state: Mapping[str, Any], to: Any, prefix: str = "") -> None:
    """Give a state dict those that another has, too; see :func:`with_notes_of`."""
    for at, note in getattr(state, STATE_NOTES, {}).items():
        if not hasattr(to, STATE_NOTES):
            setattr(to, STATE_NOTES, OrderedDict())
        getattr(to, STATE_NOTES)[(prefix + at).rstrip(".")] = note
