"""Gradients of linear layers' weights that are put off until a stage's inputs have theirs.

The stage before waits for the latter alone: they are sent first. Products are those of
``torch.nn.functional.linear``, each computed once; of a weight that is used several times they are added up
in another order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch._C import DisableTorchFunctionSubclass as raw


class _Product(NamedTuple):
    """A linear layer's weights, what entered it (and its version then), and the gradient of what it gave."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    x: torch.Tensor
    version: int
    grad: torch.Tensor


class Later:
    """What was put off."""

    def __init__(self) -> None:
        self._products: deque[_Product] = deque()

    def add(
        self, weight: torch.Tensor, bias: torch.Tensor | None, x: torch.Tensor, version: int, grads: Any
    ) -> None:
        """One more, if a gradient has come."""
        if grads[0] is not None:
            self._products.append(_Product(weight, bias, x, version, grads[0]))

    def do(self) -> None:
        """Add to the gradients of the weights.

        Raises:
            RuntimeError: what entered a layer was written to.
        """
        with torch.no_grad(), raw():
            while self._products:
                weight, bias, x, version, grad = self._products.popleft()
                if x._version != version:
                    raise RuntimeError(
                        f"A tensor of the shape {list(x.shape)} that entered a linear layer has been written "
                        "to since, and the gradient of the layer's weight needs it as it was."
                    )
                _add(weight, grad.t().mm(x.reshape(-1, x.shape[-1])))
                if bias is not None:
                    _add(bias, grad.sum(0))

    @contextmanager
    def of(self, parameters: Iterable[torch.Tensor]) -> Iterator[None]:
        """While open, what plain parameters compute has their gradients put off to here."""
        chosen: list[Any] = [p for p in dict.fromkeys(parameters) if _fits(p)]
        for p in chosen:
            p.bare, p.later = p.detach(), self
            p.__class__ = _Weight
        try:
            yield
        finally:
            for p in chosen:
                p.__class__ = nn.Parameter
                del p.bare, p.later


class _Weight(nn.Parameter):
    """A parameter of which ``F.linear`` puts the gradient off: its class in a forward pass.

    Attributes:
        bare: itself, of which autograd does not know.
        later: to when.
    """

    bare: torch.Tensor
    later: Later

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with raw():
            if func is F.linear and not kwargs and len(args) == 3 and torch.is_grad_enabled():
                x, weight, bias = args
                weighs = type(weight) is _Weight and (bias is None or type(bias) is _Weight)
                if weighs and x.requires_grad and x.dtype is weight.dtype:
                    out = F.linear(x, weight.bare, None if bias is None else bias.bare)
                    node = _product_of(out)
                    if node is not None and out.dtype is x.dtype:  # no autocast
                        node.register_prehook(partial(weight.later.add, weight, bias, x, x._version))
                        return out
            return func(*args, **(kwargs or {}))


def _product_of(out: torch.Tensor) -> Any:
    """The node of the graph that is a linear layer's product, behind that of a view."""
    node: Any = out.grad_fn
    if type(node).__name__ in _VIEWS:
        node = node.next_functions[0][0]
    return node if type(node).__name__ in _PRODUCTS else None


_VIEWS = ("ViewBackward0", "UnsafeViewBackward0")
_PRODUCTS = ("AddmmBackward0", "MmBackward0")


def _fits(p: torch.Tensor) -> bool:
    """Whether autograd would add up its gradients in its own dtype, unseen."""
    return type(p) is nn.Parameter and p.requires_grad and p.grad_dtype is p.dtype


def _add(p: torch.Tensor, grad: torch.Tensor) -> None:
    if p.grad is None:
        p.grad = grad
    else:
        p.grad.add_(grad)


__all__ = ["Later"]
