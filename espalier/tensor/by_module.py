"""What the modules of a model send: forward, and in the backward pass of what they computed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from espalier.comm import Collective, observed
from espalier.tensor.watch import Trail, in_backward


class ByModule:
    """Bytes that this rank sent, by the innermost module whose ``forward`` computed what they serve.

    Attributes:
        sent: a module's name to bytes forward and backward; ``""`` for what stands outside.
    """

    def __init__(self) -> None:
        self.sent: dict[str, list[int]] = {}
        self._running: list[tuple[str, ExitStack]] = []
        self._trail: Trail[str] = Trail()

    def saw(self, event: Collective) -> None:
        """Enter a collective."""
        back = in_backward()
        # what is computed again for the backward pass runs in a module too
        name = self._running[-1][0] if self._running else self._trail.here() if back else None
        self.sent.setdefault(name or "", [0, 0])[back] += event.sent

    def _enters(self, name: str) -> None:
        stack = ExitStack()
        stack.enter_context(self._trail.made_by(name))
        self._running.append((name, stack))

    def _leaves(self) -> None:
        self._running.pop()[1].close()


@contextmanager
def by_module(model: nn.Module) -> Iterator[ByModule]:
    """Record what the modules of ``model`` send while the context is open."""
    found = ByModule()

    def hooks(name: str, module: nn.Module) -> list[Any]:
        return [
            module.register_forward_pre_hook(lambda *_: found._enters(name), prepend=True),
            module.register_forward_hook(lambda *_: found._leaves(), always_call=True),
        ]

    handles = [handle for name, module in model.named_modules() for handle in hooks(name, module)]
    try:
        with observed(found):
            yield found
    finally:
        for handle in handles:
            handle.remove()


__all__ = ["ByModule", "by_module"]
