"""Gradients of linear layers' weights that are put off until a stage's inputs have theirs.

The stage before waits for the latter alone: they are sent first. The same products are computed and added up
in the same order as by ``torch.nn.functional.linear``, so nothing is computed twice and no bit differs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch._C import DisableTorchFunctionSubclass as raw


class _Product(NamedTuple):
    """A linear layer's weights, what entered it, and the gradient of what it gave; as matrices."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    x: torch.Tensor
    grad: torch.Tensor


class Later:
    """What was put off."""

    def __init__(self) -> None:
        self._products: list[_Product] = []

    def add(self, product: _Product) -> None:
        """One more."""
        self._products.append(product)

    def forget(self) -> None:
        """Nothing is to be done any more."""
        self._products.clear()

    def do(self) -> None:
        """Add to the gradients of the weights."""
        with torch.no_grad(), raw():
            for weight, bias, x, grad in self._products:
                _add(weight, grad.t().mm(x))
                if bias is not None:
                    _add(bias, grad.sum(0))
        self.forget()

    @contextmanager
    def of(self, parameters: Iterable[torch.Tensor]) -> Iterator[None]:
        """While open, gradients of plain parameters are put off to here."""
        chosen: list[Any] = [p for p in dict.fromkeys(parameters) if _fits(p)]
        for p in chosen:
            p.__class__, p.later = _Weight, self
        try:
            yield
        finally:
            self.forget()
            for p in chosen:
                del p.later
                p.__class__ = nn.Parameter


class _Weight(nn.Parameter):
    """A parameter of which ``F.linear`` puts the gradient off.

    Attributes:
        later: to when.
    """

    later: Later

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with raw():
            if func is F.linear and not kwargs and len(args) == 3 and torch.is_grad_enabled():
                x, weight, bias = args
                weighs = type(weight) is _Weight and (bias is None or type(bias) is _Weight)
                if weighs and x.dtype is weight.dtype and not torch.is_autocast_enabled(x.device.type):
                    return _apply(x, weight, bias)
            return func(*args, **(kwargs or {}))


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: _Weight, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.bias = bias
        return F.linear(x, weight, bias).data  # to a view nobody could write

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        with raw():
            rows = grad.reshape(-1, grad.shape[-1])
            weight.later.add(_Product(weight, ctx.bias, x.reshape(-1, x.shape[-1]), rows))
            return rows.mm(weight).view(x.shape) if ctx.needs_input_grad[0] else None, None, None


# past what autograd does for functions within transforms, and for DTensors
_apply = super(torch.autograd.Function, _Linear).apply


def _fits(p: torch.Tensor) -> bool:
    """Whether autograd would add up its gradients in its own dtype, unseen."""
    return type(p) is nn.Parameter and p.requires_grad and p.grad_dtype is p.dtype


def _add(p: torch.Tensor, grad: torch.Tensor) -> None:
    if p.grad is None:
        p.grad = grad
    else:
        p.grad.add_(grad)


__all__ = ["Later"]
