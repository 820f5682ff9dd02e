"""What keeps a checkpoint from being loaded into an engine, all at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from espalier.checkpoint import Checkpoint
from espalier.checkpoint.sources import Entry, Source

_SHOWN = 40


def is_value(name: str) -> bool:
    """Whether an item of a state dict is what a module's ``get_extra_state`` gave."""
    return name.rpartition(".")[2] == "_extra_state"


def state_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """A model's parameters and buffers, as its state dict names them."""
    return {name: x for name, x in module.state_dict(keep_vars=True).items() if not is_value(name)}


def states_of(checkpoint: Source) -> dict[str, dict[str, Entry]]:
    """The optimizer's states that are tensors, by parameter and kind."""
    states: dict[str, dict[str, Entry]] = {}
    for name, entry in checkpoint.under("optimizer.state.").items():
        parameter, _, key = name.rpartition(".")
        states.setdefault(parameter, {})[key] = entry
    return states


def conflicts(
    checkpoint: Checkpoint,
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None,
) -> list[str]:
    """One line for each."""
    own = state_tensors(module)
    saved = checkpoint.under("model.")
    lines = [f"missing from it: {n} {list(x.shape)}" for n, x in own.items() if n not in saved]
    lines += [f"not in the model: {n} {list(e.shape)}" for n, e in saved.items() if n not in own]
    lines += [
        f"{name}: {list(entry.shape)} in it, {list(own[name].shape)} in the model"
        for name, entry in saved.items()
        if name in own and tuple(own[name].shape) != entry.shape
    ]
    if optimizer is not None:
        lines += _of_optimizer(checkpoint.values, module, optimizer)
    return lines


def _of_optimizer(
    values: Mapping[str, Any], module: nn.Module, optimizer: torch.optim.Optimizer
) -> list[str]:
    known = values.get("optimizer")
    if known is None:
        return ["it has no optimizer: initialize the engine without one, or load(..., model_only=True)"]
    if known["class"] != type(optimizer).__name__:
        return [f"its optimizer is {known['class']}, not {type(optimizer).__name__}"]
    names = {id(p): name for name, p in module.named_parameters()}
    saved = {name: group["options"] for group in known["groups"] for name in group["names"]}
    lines = []
    for i, group in enumerate(optimizer.param_groups):
        held = [names[id(p)] for p in group["params"]]
        lines += [f"its optimizer does not hold {name}" for name in held if name not in saved]
        options = [saved[name] for name in held if name in saved]
        differ = {key for o in options for key in o if repr(o[key]) != repr(options[0].get(key))}
        lines += [f"parameters of the optimizer's group {i} differ in {key} there" for key in sorted(differ)]
    return lines


def raise_conflicts(checkpoint: Checkpoint, lines: Sequence[str]) -> None:
    """Tell all of them.

    Raises:
        ValueError: there are some.
    """
    if not lines:
        return
    more = [f"and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
    raise ValueError(
        "\n  ".join(
            [f"{checkpoint.path} does not fit this engine; nothing was changed:", *lines[:_SHOWN], *more]
        )
    )
