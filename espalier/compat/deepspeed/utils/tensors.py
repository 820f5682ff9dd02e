"""Parameters, gradients and optimizer states of a ``DeepSpeedEngine``, read and written by parameter.

Every rank must call. ``safe_get_full_...`` gather what is cut over the ranks; ``safe_get_local_...`` send
what other ranks hold of a run, and that is nothing where the rows of a parameter are divided evenly.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import nn

from espalier.comm.redistribute import carry_out
from espalier.comm.row_exchange import Spans, exchange, spans_of
from espalier.compat.absent import or_absent
from espalier.compat.deepspeed.groups import axes_of
from espalier.engine import Engine
from espalier.engine.seen import gradient_seen
from espalier.layout import Layout, Replicate, Shard
from espalier.tensor import DTensor, full_tensor, plain, stamp
from espalier.tensor.meshes import brought
from espalier.torch_private import raw

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
    grad = _gradient_seen(param)
    if isinstance(grad, DTensor):
        grad = brought(grad, grad.device_mesh.outermost)
    return None if grad is None else full_tensor(grad).float()


def _gradient_of(param: nn.Parameter) -> torch.Tensor | None:
    _finish(param)
    return param.grad


def _gradient_seen(param: nn.Parameter) -> torch.Tensor | None:
    """What stands for it on ranks of other stages, too."""
    _finish(param)
    return gradient_seen(param)


def _finish(param: nn.Parameter) -> None:
    engine = _engine_of(param)
    if engine.passes.may_step and not engine.passes.is_complete:
        engine.finish_gradients()


def safe_set_full_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Let its gradient, as :func:`safe_get_full_grad` gives it, be a whole tensor, the same on all ranks.

    Raises:
        ValueError: it has none.
    """
    grad = _gradient_seen(param)
    if grad is None:
        raise ValueError("safe_set_full_grad: expected a gradient: call it between backward and step.")
    with torch.no_grad():
        grad.copy_(value.to(grad.dtype))


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
    _engine_of(param).set_parameter(param, value.view(param.shape))


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
    engine = _engine_of(param)
    x = engine.held_parameter(param)
    return _run_of(param, x if _is_of(engine, x) else engine.full_parameter(param)).float()


def safe_get_local_grad(param: nn.Parameter) -> torch.Tensor | None:
    """This rank's run of :func:`safe_get_full_grad`."""
    grad = _gradient_of(param)
    return None if grad is None else _run_of(param, grad.detach()).float()


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """This rank's run of :func:`safe_get_full_optimizer_state`."""
    state = _states_of(param).get(optim_state_key)
    return None if state is None else _run_of(param, state)


def safe_set_local_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Let each rank's run be what that rank gives."""
    _engine_of(param).set_parameter(param, _rows_of(param, value))


def safe_set_local_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Let each rank's run be what that rank gives."""
    safe_set_full_grad(param, _rows_of(param, value))


def safe_set_local_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Let each rank's run be what that rank gives."""
    safe_set_full_optimizer_state(param, _rows_of(param, value), optim_state_key)


class _Runs:
    """Where the runs of a parameter are, beside its rows.

    Attributes:
        sharing: the ranks that share the batch.
        rows: the layout that is cut into rows over them, whole along the other axes.
        size: of a run.
        held: of the flat parameter, where each rank's rows are.
        wanted: where its run is.
    """

    def __init__(self, param: nn.Parameter) -> None:
        engine = _engine_of(param)
        mesh, shape, numel = engine.mesh, tuple(param.shape), param.numel()
        self.sharing = axes_of(engine, "data")
        states = [
            Shard(0) if shape and axis in self.sharing.axes else Replicate() for axis in range(mesh.ndim)
        ]
        self.rows, ranks = Layout(mesh, states, shape), range(self.sharing.size)
        self.size = -(-numel // self.sharing.size)
        self.wanted = [((min(r * self.size, numel), min((r + 1) * self.size, numel)),) for r in ranks]
        if shape:
            each = math.prod(shape[1:])
            spans = [spans for (spans,) in spans_of(self.rows, 0)]
            self.held: list[Spans] = [((start * each, stop * each),) for start, stop in spans]
        else:
            self.held = [((0, 1),)] * len(ranks)

    @property
    def here(self) -> int:
        """How much of this rank's run is not filling."""
        ((start, stop),) = self.wanted[self.sharing.rank]
        return stop - start

    def send(self, x: torch.Tensor, have: Sequence[Spans], want: Sequence[Spans]) -> torch.Tensor:
        """What is wanted of the flat parameter."""
        return exchange(x, self.sharing.mesh, self.sharing.axes, 0, have, want) if self.sharing.axes else x


def _run_of(param: nn.Parameter, x: torch.Tensor) -> torch.Tensor:
    """This rank's run of what has a parameter's shape: whole on every rank, or a DTensor."""
    runs = _Runs(param)
    if isinstance(x, DTensor) and _is_of(_engine_of(param), x) and x.ndim:
        with raw():
            rows = carry_out(plain(x.detach()), x._layout.own, runs.rows).flatten()
        run = runs.send(rows, runs.held, runs.wanted)
    else:
        ((start, stop),) = runs.wanted[runs.sharing.rank]
        run = full_tensor(x).flatten()[start:stop]
    return nn.functional.pad(run, (0, runs.size - run.numel())).clone()


def _rows_of(param: nn.Parameter, run: torch.Tensor) -> torch.Tensor:
    """All ranks' runs as one tensor of the parameter's shape, cut into rows; whole for one in a stage.

    Raises:
        ValueError: this rank's is not as long as one.
    """
    runs = _Runs(param)
    if run.numel() != runs.size:
        raise ValueError(
            f"This rank's part of a parameter of the shape {list(param.shape)} has {runs.size} elements, as "
            f"safe_get_local_fp32_param gives them; got {run.numel()}."
        )
    rows = runs.send(run.detach().flatten()[: runs.here], runs.wanted, runs.held)
    value = stamp(rows.view(runs.rows.local_shape), runs.rows)
    return value if _is_of(_engine_of(param), param) else full_tensor(value)


def _is_of(engine: Engine, x: torch.Tensor) -> bool:
    """Whether it lies on all ranks, and not on those of a stage or branch."""
    return not isinstance(x, DTensor) or x._layout.mesh is engine.mesh


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


WHOLE: Final = "safe_get_full_fp32_param(p), safe_get_full_grad(p) and their kin give whole values"
FRAGMENTS: Final = MappingProxyType(
    {
        "fragment_address get_full_hp_param set_full_hp_param get_full_hp_grad set_full_hp_grad "
        "get_hp_fragment_mapping map_to_flat_opt_states": WHOLE
    }
)

__getattr__ = or_absent(__name__, "deepspeed.utils.tensor_fragment", {**FRAGMENTS, "tensor_fragment": WHOLE})
