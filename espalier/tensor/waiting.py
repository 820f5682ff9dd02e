"""What a program has called with the gradients of parameters, where these are not whole while they come."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

Hooks = dict[int, Callable[..., Any]]
Seen = Callable[[torch.Tensor], torch.Tensor | None]


class LastHook(partial[Any]):
    """A hook of the library on a parameter, called after those of the program: it takes the gradient away."""


class WaitingHooks:
    """A program's hooks on a parameter, which wait until its gradient is that of the whole batch.

    Attributes:
        before: called with the gradient, in whose place what they give comes; None: these do not wait.
        after: called with the parameter, when it has its gradient.
    """

    def __init__(self, before: Hooks | None, after: Hooks) -> None:
        self.before = before
        self.after = after

    @property
    def are_there(self) -> bool:
        """Whether there are any."""
        return bool(self.before or self.after)

    @torch.no_grad()
    def hand(self, p: torch.Tensor, seen: Seen) -> None:
        """Call those with the parameter's gradient, as it is ``seen``."""
        for hook in [*(self.before or {}).values()]:
            grad = seen(p)
            if grad is None:
                return
            given = hook(grad)
            if given is not None and given is not grad:
                p.grad = given

    @torch.no_grad()
    def tell(self, p: torch.Tensor, seen: Seen) -> None:
        """Call those with the parameter, if it has a gradient."""
        for hook in [*self.after.values()] if seen(p) is not None else ():
            hook(p)


def wait(hooks: Hooks, hook: Callable[..., Any]) -> RemovableHandle:
    """One more of the hooks that wait."""
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle


def waiting_hooks(x: torch.Tensor) -> WaitingHooks | None:
    """Where hooks on a parameter wait, if they do."""
    return x.__dict__.get("_waiting")


def put_last(hooks: Hooks) -> None:
    """Let those of the library be called after others that came later."""
    for key in [key for key, hook in hooks.items() if isinstance(hook, LastHook)]:
        hooks[key] = hooks.pop(key)
