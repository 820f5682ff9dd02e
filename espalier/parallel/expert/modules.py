"""Which modules of a model are stacks of experts.

Espalier's own, and those of transformers (Mixtral, Qwen, DeepSeek, GPT-OSS, ...), hold the weights of all
experts of a layer as parameters [experts, ...] and are called on tokens and their routing:
``experts(hidden [tokens, h], index [tokens, k], weights [tokens, k])``. They are known by that shape, so that
models need no change, and a user's own module is one of them if it is built so.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

_ROUTING = (("top_k_index", "top_k_weights"), ("router_indices", "routing_weights"))


def is_experts(module: nn.Module) -> bool:
    """Whether a module is a stack of experts."""
    n = getattr(module, "num_experts", None)
    own = list(module.parameters(recurse=False))
    if not isinstance(n, int) or not own or any(p.ndim < 2 or p.shape[0] != n for p in own):
        return False
    names = tuple(inspect.signature(type(module).forward).parameters)
    return names[2:4] in _ROUTING


def stacks(model: nn.Module) -> dict[str, nn.Module]:
    """The stacks of experts in a model, by name."""
    return {name: module for name, module in model.named_modules() if is_experts(module)}


@contextmanager
def left_out(model: nn.Module) -> Iterator[None]:
    """While open, the stacks of experts in a model hand tokens on: to see how all else computes."""

    def forward(x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return x * weights.sum(-1, keepdim=True).to(x.dtype)

    found = [(module, vars(module).get("forward")) for module in stacks(model).values()]
    for module, _ in found:
        module.forward = forward
    try:
        yield
    finally:
        for module, own in found:
            if own is None:
                del module.forward
            else:
                module.forward = own


def stacked(model: nn.Module) -> set[str]:
    """The names of the parameters that hold one entry for each expert."""
    return {
        f"{name}.{own}" if name else own
        for name, module in stacks(model).items()
        for own, _ in module.named_parameters(recurse=False)
    }
