"""``deepspeed.zero``: models built without memory, and parameters whole for a time."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from espalier.comm import collectives
from espalier.compat.deepspeed.axes import init_distributed
from espalier.layout import Layout
from espalier.mesh import Mesh
from espalier.parallel.data.chunks import show
from espalier.tensor import DTensor, deferred, lay_out, plain
from espalier.tensor.deferred import make_parameters_real
from espalier.torch_private import raw


class Init:
    """While open, modules are built without memory: ``deepspeed.initialize`` then builds each rank's part.

    Args:
        module: laid out by ``deepspeed.initialize`` in any case.
        enabled: else it does nothing.
        options: DeepSpeed's others; where parameters lie and in which dtype says the configuration.
    """

    def __init__(
        self, module: nn.Module | None = None, *args: Any, enabled: bool = True, **options: Any
    ) -> None:
        self._stack, self._enabled = ExitStack(), enabled

    def __enter__(self) -> None:
        if self._enabled:
            self._stack.enter_context(deferred())

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)


@contextmanager
def GatheredParameters(
    params: Any, modifier_rank: int | None = None, fwd_module: Any = None, enabled: bool = True
) -> Iterator[None]:
    """While open, parameters show their whole values, which this rank may read and change by itself.

    Every rank must enter and leave. What ``modifier_rank`` has made of them all ranks hold afterwards;
    without it what was changed is dropped. Parameters that :class:`Init` left without memory have it from
    then on, on each rank, until ``deepspeed.initialize`` cuts them.
    """
    if isinstance(params, torch.Tensor):
        params = [params]
    elif isinstance(params, nn.Module):
        params = params.parameters()
    params = list(params) if enabled else []
    with _not_yet_cut(params, modifier_rank), _cut(_distinct(params), modifier_rank):
        yield


@contextmanager
def _not_yet_cut(params: Iterable[Any], modifier_rank: int | None) -> Iterator[None]:
    """Of ``GatheredParameters``, what it does before ``deepspeed.initialize``."""
    held = [p for p in params if isinstance(p, nn.Parameter) and not isinstance(p, DTensor) and p.is_meta]
    make_parameters_real(held)
    before = [] if modifier_rank is not None else [p.detach().clone() for p in held]
    yield
    if modifier_rank is None:
        values: Iterable[torch.Tensor] = before
    else:
        init_distributed()
        changed = [p.detach() for p in held]
        ranks = dist.get_world_size() if held and dist.is_initialized() else 1
        mesh = Mesh.from_env({"data": ranks}) if ranks > 1 else None
        values = [x if mesh is None else collectives.broadcast(x, mesh, 0, modifier_rank) for x in changed]
    with torch.no_grad():
        for p, value in zip(held, values, strict=True):
            p.copy_(value)


@contextmanager
def _cut(held: list[DTensor], modifier_rank: int | None) -> Iterator[None]:
    """Of ``GatheredParameters``, what it does with parameters of an engine."""
    wholes = [p.full_tensor().detach().clone() for p in held]
    with raw():
        before = [(p, plain(p.data), p._layout) for p in held]
        for (p, _, layout), whole in zip(before, wholes, strict=True):
            show(p, plain(whole), Layout.replicated(layout.mesh, layout.shape))
    _say(held, ZeroParamStatus.AVAILABLE)
    try:
        yield
    finally:
        _say(held, ZeroParamStatus.NOT_AVAILABLE)
        with raw():
            values = [plain(p.data) for p in held]
            for p, data, layout in before:
                show(p, data, layout)
    if modifier_rank is not None:
        for p, x in zip(held, values, strict=True):
            own = p._layout.own
            at = [int(i) for i in torch.unravel_index(torch.tensor(modifier_rank), own.mesh.shape)]
            with torch.no_grad():
                p.copy_(lay_out(x, own, source=at))  # each rank is sent its part


class ZeroParamType(enum.Enum):
    """How DeepSpeed keeps a parameter."""

    NORMAL = 1
    PARTITIONED = 2
    REMOTE = 3


class ZeroParamStatus(enum.Enum):
    """``p.ds_status`` of a parameter that stage 3 cuts: whole under :func:`GatheredParameters`."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


def mark_as_cut(module: nn.Module) -> None:
    """Give the parameters that stage 3 cuts what programs ask of them: ``ds_id``, ``ds_status``, ..."""
    for i, p in enumerate(module.parameters()):
        if isinstance(p, DTensor):
            vars(p).update(ds_id=i, ds_shape=p.shape, ds_numel=p.numel())
            vars(p)["ds_param_type"] = ZeroParamType.PARTITIONED
            _say([p], ZeroParamStatus.NOT_AVAILABLE)


def _say(held: Iterable[DTensor], status: ZeroParamStatus) -> None:
    for p in held:
        if hasattr(p, "ds_id"):
            vars(p)["ds_status"] = status


def _distinct(params: Iterable[Any]) -> list[DTensor]:
    return [p for p in {id(p): p for p in params}.values() if isinstance(p, DTensor)]


def register_external_parameter(module: nn.Module, parameter: Any) -> None:
    """Nothing: a parameter is gathered wherever it is used."""


def unregister_external_parameter(module: nn.Module, parameter: Any) -> None:
    """Nothing, either."""
