"""Hooks of a program's on parameters of a pipeline wait until a backward pass has made gradients whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from espalier.engine.seen import SeenGradients, gradient_seen
from espalier.meanwhile import having
from espalier.parallel.data.zero import ZeroState


class WaitingForStages:
    """Calls them, on all ranks alike."""

    def __init__(self, data: ZeroState, seen: SeenGradients, *, is_dry: bool) -> None:
        self._data, self._seen, self._is_dry = data, seen, is_dry
        self._is_together = False  # what goes back is a part of a loss

    @property
    def are_due(self) -> bool:
        """Whether there are any, which the pass under way is to call."""
        return not (self._is_dry or self._is_together) and self._data.hooks_wait

    def hand(self) -> None:
        """Call those that see gradients, of the last pass alone, and may put others in their place."""
        if self.are_due:
            self._data.hand_gradients(gradient_seen)
            self._seen.note()

    def tell(self) -> None:
        """Call those that see parameters, with all that has been added up."""
        if self.are_due:
            self._data.tell_of_gradients(gradient_seen)
            self._seen.note()

    @contextmanager
    def together(self, taken: Callable[[], Any], add: Callable[[Any], None]) -> Iterator[None]:
        """While open, backward passes make one gradient.

        Args:
            taken: gives the gradients that there are, which are then set aside.
            add: adds them again.
        """
        if not self.are_due:
            yield
            return
        earlier = taken()
        with having(self, _is_together=True):
            yield
        self.hand()
        add(earlier)
