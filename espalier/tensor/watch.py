"""Watching the dispatcher: explanations and the sanitizer are watchers.

While a watcher is open, ``DTensor.__torch_function__`` is another function, which shows each call
to the watchers and hands it on to the dispatcher; when the last one closes, the dispatcher is back
in its place. So a program that nobody watches pays nothing.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, Generic, TypeVar

import torch

from espalier.comm import Collective, observed
from espalier.layout import Layout
from espalier.tensor.dtensor import DTensor

Go = Callable[[], Any]


class Watcher:
    """What one may watch. All methods do nothing but let things happen.

    Attributes:
        inside: see the calls inside compiled regions too, which then run as they are written.
        traffic: see collectives.
    """

    inside = True
    traffic = True

    def around(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], go: Go) -> Any:
        """A torch call on DTensors; ``go()`` carries it out and gives its result."""
        return go()

    def saw(self, event: Collective) -> None:
        """A collective is about to start, on any mesh."""

    def claimed(self, x: torch.Tensor, layout: Layout, what: str) -> None:
        """A plain tensor enters that is said to lie so."""


@contextmanager
def watching(watcher: Watcher) -> Iterator[None]:
    """Show ``watcher`` all calls and all traffic of this process while the context is open.

    One that is open already stays so, and sees each once.
    """
    if any(other is watcher for other in watchers()):
        yield
        return
    _install((*watchers(), watcher))
    try:
        with observed(watcher) if watcher.traffic else nullcontext():
            yield
    finally:
        _install(tuple(other for other in watchers() if other is not watcher))


def watchers() -> tuple[Watcher, ...]:
    """The open watchers."""
    found: tuple[Watcher, ...] = getattr(_installed(), "watchers", ())
    return found


def claim(x: torch.Tensor, layout: Layout, what: str) -> None:
    """Tell the watchers of a plain tensor that is taken to lie so: equal where it is replicated."""
    for watcher in watchers():
        watcher.claimed(x, layout, what)


def _installed() -> Any:
    return vars(DTensor)["__torch_function__"].__func__


def _install(wanted: tuple[Watcher, ...]) -> None:
    base = getattr(_installed(), "base", _installed())
    DTensor.__torch_function__ = classmethod(_watched(base, wanted) if wanted else base)  # type: ignore


def _watched(base: Callable[..., Any], wanted: tuple[Watcher, ...]) -> Callable[..., Any]:
    def watched(cls: type, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        go: Go = partial(base, cls, func, types, args, kwargs)
        for watcher in wanted:
            go = partial(watcher.around, func, args, kwargs, go)
        return go()

    watched.base, watched.watchers = base, wanted  # type: ignore[attr-defined]
    return watched


# ---- which call a node of the backward graph belongs to

Item = TypeVar("Item")
_next_number: Callable[[], int] | None = getattr(torch._C._autograd, "_get_sequence_nr", None)
_current_node: Callable[[], Any] | None = getattr(torch._C, "_current_autograd_node", None)
_LEAF = 2**64 - 1  # the number of all nodes that accumulate into leaves
_TRAIL = 200_000  # so many calls are remembered
_DEPTH = 2_000  # so many calls may stand in one


class Trail(Generic[Item]):
    """From the nodes that autograd records to the calls that made them.

    Autograd numbers the nodes of a thread in the order in which they are made; a call made those
    between the next number before it and the next one after.
    """

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._items: list[Item] = []
        self._open = 0

    @contextmanager
    def made_by(self, item: Item) -> Iterator[None]:
        """The nodes made while the context is open are ``item``'s, but for those of contexts inside."""
        if not self._open and len(self._starts) > _TRAIL:
            self.__init__()  # type: ignore[misc]
        start, place = _number(), len(self._starts)
        self._starts.append(start)
        self._ends.append(start)
        self._items.append(item)
        self._open += 1
        try:
            yield
        finally:
            self._open -= 1
            self._ends[place] = _number()
            if self._ends[place] == start:
                del self._starts[place:], self._ends[place:], self._items[place:]

    def here(self) -> Item | None:
        """The item whose node the backward pass is at."""
        node = _current_node() if _current_node is not None else None
        number: int = node._sequence_nr() if node is not None and hasattr(node, "_sequence_nr") else _LEAF
        if number == _LEAF:
            return None
        at = bisect_right(self._starts, number)
        # the last one to start before; it, or one of those that it stands in
        for i in range(at - 1, max(at - _DEPTH, 0) - 1, -1):
            if self._starts[i] <= number < self._ends[i]:
                return self._items[i]
        return None


def _number() -> int:
    return _next_number() if _next_number is not None else 0


def in_backward() -> bool:
    """Whether the backward pass is running in this thread."""
    return _current_node is not None and _current_node() is not None
