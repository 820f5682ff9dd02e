"""What programs ask of Colossal-AI's optimizers, on torch's own."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn


def show(optimizer: torch.optim.Optimizer, engine: Callable[[], Any]) -> None:
    """Let an optimizer have the methods of an ``OptimizerWrapper``.

    Args:
        engine: gives the one that it trains by, when it is asked.
    """
    here = weakref.ref(optimizer)

    def parameters() -> Iterator[torch.Tensor]:
        made = here()
        assert made is not None
        return (p for group in made.param_groups for p in group["params"])

    def backward(loss: torch.Tensor, inputs: Any = None, retain_graph: bool = False) -> None:
        loss.backward(inputs=inputs, retain_graph=retain_graph)

    def backward_by_grad(
        tensor: torch.Tensor, grad: torch.Tensor, inputs: Any = None, retain_graph: bool = False
    ) -> None:
        tensor.backward(grad, retain_graph=retain_graph, inputs=inputs)

    def get_grad_norm(norm_type: float = 2.0, **_: Any) -> float | None:
        norm = getattr(engine(), "grad_norm", None)
        return None if norm is None else float(norm)

    vars(optimizer).update(
        backward=backward,
        backward_by_grad=backward_by_grad,
        clip_grad_by_norm=lambda max_norm, *args, **options: nn.utils.clip_grad_norm_(
            list(parameters()), max_norm, *args, **options
        ),
        clip_grad_by_value=lambda clip_value, *args, **options: nn.utils.clip_grad_value_(
            list(parameters()), clip_value, *args, **options
        ),
        get_grad_norm=get_grad_norm,
        optim=weakref.proxy(optimizer),
        sync_grad=lambda: None,  # done behind the backward pass
        unwrap=here,
    )
