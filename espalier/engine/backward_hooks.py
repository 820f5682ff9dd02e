"""Backward passes, whoever makes them: each begins before its first gradient, and ends after its last."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from espalier.comm.functions import OwnFunction
from espalier.meanwhile import call_if_there
from espalier.torch_private import after_backward, current_graph_task_id, raw


class BackwardHooks:
    """Tells of backward passes, whoever makes them.

    Args:
        begin: called before the first gradient of each; is told whether the engine was asked for the pass.
        end: called after the last, and told so, too.
        refused: says why a pass that the engine is not asked for must not be, if it must not; is told whether
            it goes through what the engine gave away for losses made elsewhere.
        have: says whether there are gradients.
    """

    def __init__(
        self,
        begin: Callable[[bool], None],
        end: Callable[[bool], None],
        refused: Callable[[bool], str],
        have: Callable[[], bool],
    ) -> None:
        # hooks on a graph hold this, and the collector does not see through a graph
        self._begin, self._end = weakref.WeakMethod(begin), weakref.WeakMethod(end)
        self._refused, self._have = weakref.WeakMethod(refused), weakref.WeakMethod(have)
        self.is_open = False
        self._of: int | None = None  # the graph task of a pass that was not asked for

    @contextmanager
    def open(self) -> Iterator[None]:
        """A pass that the engine was asked for: while open, it is made."""
        call_if_there(self._begin, True)
        self.is_open = True
        try:
            yield
        finally:
            self.is_open = False
        call_if_there(self._end, True)

    def follow(self, x: torch.Tensor) -> None:
        """Let a backward pass through a tensor be one of the engine's."""
        if x.requires_grad:
            with raw():
                x.register_hook(lambda _: self.come())

    def come_late(self, is_finished: bool) -> None:
        """A gradient has come, of what does not say so itself.

        Raises:
            ValueError: the engine must be asked for the pass.
            RuntimeError: the gradient was added to one that is finished.
        """
        if reason := call_if_there(self._refused, False):
            raise ValueError(reason)
        if is_finished:
            raise RuntimeError(
                "A backward pass that is none of the engine's adds to gradients that are finished. Call the "
                "model by loss = engine(batch), or engine.follow(output) on what you have it give; or drop "
                "the gradients before, by optimizer.zero_grad()."
            )
        self.come()

    def come(self, is_known: bool = False) -> None:
        """Within a backward pass, before its first gradient: it begins, if it has not.

        Args:
            is_known: as for ``refused``.
        """
        task = current_graph_task_id()
        if self.is_open or self._of == task:
            return
        self._of = task
        over: Callable[[], None] = self._over
        if reason := call_if_there(self._refused, is_known):
            # if gradients come: it may be a look
            over = partial(self._refuse, reason, call_if_there(self._have))
        else:
            call_if_there(self._begin, False)
        after_backward(over)

    def _refuse(self, reason: str, had: bool) -> None:
        self._of = None
        if not had and call_if_there(self._have):
            raise ValueError(reason)

    def _over(self) -> None:
        self._of = None
        call_if_there(self._end, False)


class _Times(OwnFunction):
    """A factor of a gradient that says how ranks share a loss: no part of what a second derivative is of."""

    @staticmethod
    def forward(ctx: Any, grad: torch.Tensor, factor: float) -> torch.Tensor:
        return grad * factor

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


def times(grad: torch.Tensor, factor: float) -> torch.Tensor:
    """A gradient, times what says how ranks share a loss."""
    with raw():
        return grad if factor == 1 else _Times.apply(grad, factor)


def gone_back(passes: weakref.WeakMethod[Any], share: float, grad: torch.Tensor) -> torch.Tensor:
    """The gradient of an output, as it goes on into the model."""
    return grad if passes() is None else call_if_there(passes, grad, share)
