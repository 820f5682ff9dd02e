"""Whole parameters, gradients and optimizer states of a ``DeepSpeedEngine``, read and written by parameter.

Every rank must call: what is cut over the ranks is gathered, or given to each.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn

from espalier.engine import Engine
from espalier.tensor import full_tensor

_OWNER = "_of_deepspeed"


def own_by(engine: Engine) -> None:
    """Let what follows find the engine of its parameters."""
    for p in engine.module.parameters():
        setattr(p, _OWNER, weakref.ref(engine))


def safe_get_full_fp32_param(param: nn.Parameter) -> torch.Tensor:
    """A parameter as the optimizer updates it: its float32 master, where it has one."""
    return _engine_of(param).full_parameter(param).float()


def safe_get_full_grad(param: nn.Parameter) -> torch.Tensor | None:
    """Its gradient over all ranks, between ``backward`` and ``step``, times the loss scale; None if it has
    none."""
    engine = _engine_of(param)
    if engine.passes.may_step and not engine.passes.is_complete:
        engine.finish_gradients()
    grad = param.grad
    return None if grad is None else full_tensor(grad).float()


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """One of its optimizer states, as ``exp_avg``; None if there is none."""
    state = _states_of(param).get(optim_state_key)
    return None if state is None else full_tensor(state)


def safe_set_full_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Let a parameter, and its float32 master, be a whole tensor, the same on all ranks."""
    engine = _engine_of(param)
    name = next(name for name, p in engine.module.named_parameters() if p is param)
    engine.load_state_dict({name: value}, strict=False)


def safe_set_full_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Let one of its optimizer states be a whole tensor, the same on all ranks.

    Raises:
        ValueError: there is no such state.
    """
    states = _states_of(param)
    if optim_state_key not in states:
        known = ", ".join(sorted(states)) or "none before the first step"
        raise ValueError(
            f"safe_set_full_optimizer_state(optim_state_key={optim_state_key!r}): expected one of the states "
            f"that there are: {known}."
        )
    with torch.no_grad():
        states[optim_state_key].copy_(value)


def _states_of(param: nn.Parameter) -> dict[str, Any]:
    optimizer = _engine_of(param).optimizer
    return {} if optimizer is None else dict(optimizer.state.get(param, {}))


def _engine_of(param: nn.Parameter) -> Engine:
    engine = getattr(param, _OWNER, lambda: None)()
    if engine is None:
        raise ValueError(
            f"This parameter of the shape {list(param.shape)} is of no engine: expected one of "
            "engine.module, behind deepspeed.initialize."
        )
    assert isinstance(engine, Engine)
    return engine
