"""Gradients that a compiled graph must not give: of what no output hangs on that a loss uses.

AOTAutograd takes zeros for the gradient of an output that no loss uses, and so gives zeros to a parameter
that nothing else hangs on, which weight decay then changes. There are no gradients without a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch


class Reached:
    """Which outputs of a graph, by number, hang on an input, of those that only some hang on.

    Args:
        outputs: by the number of the input.
        trained: all outputs that have gradients.
    """

    def __init__(self, outputs: Mapping[int, frozenset[int]], trained: frozenset[int]) -> None:
        self._outputs, self._trained = outputs, trained if outputs else frozenset[int]()

    def call(self, compiled: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> Any:
        """What a graph gives for these, with the gradients that there are."""
        if not self._trained:
            return compiled(*inputs)
        given: set[int] = set()  # which outputs were, in the backward pass
        entered = list(inputs)
        for i, outputs in self._outputs.items():
            entered[i] = _Entering.apply(inputs[i], given, outputs)
        results = compiled(*entered)
        for i in self._trained:
            results[i].register_hook(partial(_note, given, i))
        return results


def _note(given: set[int], output: int, gradient: torch.Tensor | None) -> None:
    if gradient is not None:
        given.add(output)


class _Entering(torch.autograd.Function):
    """An input as it enters a graph."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, given: set[int], outputs: frozenset[int]) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.given, ctx.outputs = given, outputs
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> Any:
        return None if ctx.given.isdisjoint(ctx.outputs) else gradient, None, None
