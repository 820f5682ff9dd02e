"""Whole parameters, gradients and optimizer states of a ``DeepSpeedEngine``, read and written by parameter.

Every rank must call: what is cut over the ranks is gathered, or given to each.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from espalier.comm.collectives import all_gather
from espalier.compat.deepspeed.axes import Axes, axes_of
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


def safe_set_full_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Let its gradient, as :func:`safe_get_full_grad` gives it, be a whole tensor, the same on all ranks.

    Raises:
        ValueError: it has none.
    """
    if safe_get_full_grad(param) is None:
        raise ValueError("safe_set_full_grad: expected a gradient: call it between backward and step.")
    assert param.grad is not None
    with torch.no_grad():
        param.grad.copy_(value.to(param.grad.dtype))


def safe_update_full_grad_vectorized(
    param_list: Sequence[nn.Parameter],
    update_func: Callable[[torch.Tensor, nn.Parameter], torch.Tensor | None],
) -> None:
    """Let the gradients be what ``update_func(gradient, parameter)`` makes of them, or in them."""
    for param in param_list:
        grad = safe_get_full_grad(param)
        if grad is not None:
            made = update_func(grad, param)
            safe_set_full_grad(param, grad if made is None else made)


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


# ---- this rank's part, as DeepSpeed's stage 3 cuts: equal runs of the flat parameter, the last filled up


def safe_get_local_fp32_param(param: nn.Parameter) -> torch.Tensor:
    """This rank's run of :func:`safe_get_full_fp32_param`."""
    return _run_of(param, safe_get_full_fp32_param(param))


def safe_get_local_grad(param: nn.Parameter) -> torch.Tensor | None:
    """This rank's run of :func:`safe_get_full_grad`."""
    grad = safe_get_full_grad(param)
    return None if grad is None else _run_of(param, grad)


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """This rank's run of :func:`safe_get_full_optimizer_state`."""
    state = safe_get_full_optimizer_state(param, optim_state_key)
    return None if state is None else _run_of(param, state)


def safe_set_local_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Let each rank's run be what that rank gives."""
    safe_set_full_fp32_param(param, _whole_of(param, value))


def safe_set_local_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Let each rank's run be what that rank gives."""
    safe_set_full_grad(param, _whole_of(param, value))


def safe_set_local_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Let each rank's run be what that rank gives."""
    safe_set_full_optimizer_state(param, _whole_of(param, value), optim_state_key)


def _shares(param: nn.Parameter) -> tuple[Axes, int]:
    """The ranks that share the batch, and how long a run is."""
    sharing = axes_of(_engine_of(param), "data")
    return sharing, -(-param.numel() // sharing.size)


def _run_of(param: nn.Parameter, whole: torch.Tensor) -> torch.Tensor:
    sharing, size = _shares(param)
    filled = nn.functional.pad(whole.flatten(), (0, sharing.size * size - whole.numel()))
    return filled.view(sharing.size, size)[sharing.rank].clone()


def _whole_of(param: nn.Parameter, run: torch.Tensor) -> torch.Tensor:
    """All ranks' runs, as the parameter's shape.

    Raises:
        ValueError: it is not as long as one.
    """
    sharing, size = _shares(param)
    if run.numel() != size:
        raise ValueError(
            f"This rank's part of a parameter of the shape {list(param.shape)} has {size} elements, as "
            f"safe_get_local_fp32_param gives them; got {run.numel()}."
        )
    runs = run.detach().reshape(1, size)
    for axis in reversed(sharing.axes):
        runs = all_gather(runs, sharing.mesh, axis, 0, runs.shape[0] * sharing.mesh.shape[axis])
    return runs.flatten()[: param.numel()].view(param.shape)


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
