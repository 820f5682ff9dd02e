"""Backward passes and steps, whoever makes them: the engine's calls, or those of a plain loop.

A backward pass begins before its first gradient and ends after its last, when gradients are those of the
whole batch on all ranks. What the engine gives away says so itself: a hook runs when its gradient comes, and
has autograd call back at the end. And ``optimizer.step()`` is the engine's.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch._C import DisableTorchFunctionSubclass as raw


class Passes:
    """The backward passes of an engine.

    Args:
        begin: called before the first gradient of each.
        end: called after the last; is told whether the engine was asked for the pass.
        refused: says why a pass that the engine is not asked for must not be, if it must not.
        have: says whether there are gradients.
    """

    def __init__(
        self,
        begin: Callable[[], None],
        end: Callable[[bool], None],
        refused: Callable[[], str],
        have: Callable[[], bool],
    ) -> None:
        # hooks on a graph hold this, and the collector does not see through a graph
        self._begin, self._end = weakref.WeakMethod(begin), weakref.WeakMethod(end)
        self._refused, self._have = weakref.WeakMethod(refused), weakref.WeakMethod(have)
        self._is_open = False
        self._of: int | None = None  # the graph task of a pass that was not asked for

    @contextmanager
    def open(self) -> Iterator[None]:
        """A pass that the engine was asked for: while open, it is made."""
        _called(self._begin)
        self._is_open = True
        try:
            yield
        finally:
            self._is_open = False
        _called(self._end, True)

    def follow(self, x: torch.Tensor) -> None:
        """Let a backward pass through a tensor be one of the engine's."""
        if x.requires_grad:
            with raw():
                x.register_hook(self._come)

    def come_late(self, is_finished: bool) -> None:
        """A gradient has come, of what does not say so itself.

        Raises:
            ValueError: the engine must be asked for the pass.
            RuntimeError: the gradient was added to one that is finished.
        """
        if reason := _called(self._refused):
            raise ValueError(reason)
        if is_finished:
            raise RuntimeError(
                "A backward pass that is none of the engine's adds to gradients that are finished. Call the "
                "model by loss = engine(batch), or engine.follow(output) on what you have it give; or drop "
                "the gradients before, by optimizer.zero_grad()."
            )
        self._come()

    def _come(self, *_: torch.Tensor) -> None:
        """Within a backward pass, before its first gradient: it begins, if it has not."""
        task = torch._C._current_graph_task_id()
        if self._is_open or self._of == task:
            return
        self._of = task
        over: Callable[[], None] = self._over
        if reason := _called(self._refused):
            over = partial(self._refuse, reason, _called(self._have))  # if gradients come: it may be a look
        else:
            _called(self._begin)
        torch.autograd.Variable._execution_engine.queue_callback(over)

    def _refuse(self, reason: str, had: bool) -> None:
        self._of = None
        if not had and _called(self._have):
            raise ValueError(reason)

    def _over(self) -> None:
        self._of = None
        _called(self._end, False)


def _called(method: weakref.WeakMethod[Any], *args: Any) -> Any:
    found = method()
    return None if found is None else found(*args)


class Steps(Protocol):
    """Makes the steps of an optimizer."""

    @property
    def is_stepping(self) -> bool:
        """Whether it makes one."""

    def step_in_loop(self) -> bool:
        """Make one that the program has asked the optimizer for; False: there is nothing that it would do."""


def bind(optimizer: torch.optim.Optimizer, engine: Steps) -> None:
    """Let ``optimizer.step()`` be the engine's step; as a scheduler's wrapper it holds neither."""
    held_by, made_by = weakref.ref(optimizer), weakref.ref(engine)
    around = getattr(optimizer.step, "__func__", optimizer.step)
    is_method = around is not optimizer.step

    @functools.wraps(around)
    def method(self: torch.optim.Optimizer, *args: Any, **options: Any) -> Any:
        engine, own = made_by(), around.__get__(self, type(self)) if is_method else around
        if engine is None or self is not held_by() or engine.is_stepping:
            return own(*args, **options)
        closure, found = args[0] if args else options.get("closure"), None
        if closure is not None:
            with torch.enable_grad():
                found = closure()
        # within, the optimizer's own step, without what others have put around it: that runs now
        outermost, self.step = self.step, own  # type: ignore[method-assign]
        try:
            if not engine.step_in_loop():
                own()
        finally:
            self.step = outermost  # type: ignore[method-assign]
        return found

    @functools.wraps(around)
    def step(*args: Any, **options: Any) -> Any:
        return method(held_by(), *args, **options)  # type: ignore[arg-type]

    step.__func__ = method  # type: ignore[attr-defined]
    optimizer.step = step  # type: ignore[method-assign]


__all__ = ["Passes", "bind"]
