"""``deepspeed.zero``: models built without memory, and parameters whole for a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from espalier.comm.control import gather_objects
from espalier.layout import Layout
from espalier.parallel.data.chunks import show
from espalier.tensor import DTensor, deferred, plain
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
    without it what was changed is dropped.
    """
    if isinstance(params, torch.Tensor):
        params = [params]
    elif isinstance(params, nn.Module):
        params = params.parameters()
    held = _distinct(params) if enabled else []
    wholes = [p.full_tensor().detach().clone() for p in held]
    with raw():
        before = [(p, plain(p.data), p._layout) for p in held]
        for (p, _, layout), whole in zip(before, wholes, strict=True):
            show(p, plain(whole), Layout.replicated(layout.mesh, layout.shape))
    try:
        yield
    finally:
        with raw():
            values = [plain(p.data) for p in held]
            for p, data, layout in before:
                show(p, data, layout)
    if modifier_rank is not None:
        for p, x in zip(held, values, strict=True):
            x = gather_objects(x, p._layout.mesh)[modifier_rank]
            with torch.no_grad():
                p.copy_(x)


def _distinct(params: Iterable[Any]) -> list[DTensor]:
    return [p for p in {id(p): p for p in params}.values() if isinstance(p, DTensor)]
