"""By which ways a recomputed block's calls of compiled regions went, and go again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, ClassVar, Protocol

from espalier.meanwhile import setting


class Region(Protocol):
    """What may be called in several ways."""

    def called(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, str]:
        """What it gives, and by which way."""

    def as_written(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What it gives, without a graph."""

    def as_recorded(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The same as while it was recorded."""


class Ways:
    """How the calls of regions within a block went, which is recomputed: what each keeps is its own.

    By a ``"graph"``, ``"recorded"`` as they ran, or as ``"written"``.
    """

    now: ClassVar[ContextVar[Ways | None]] = ContextVar("ways", default=None)

    def __init__(self) -> None:
        self._went: list[str] = []
        self._again: Iterator[str] | None = None

    @contextmanager
    def followed(self) -> Iterator[None]:
        """While open, calls are noted, the first time; later they go as then."""
        try:
            with setting(Ways.now, self):
                yield
        finally:
            self._again = iter(self._went)

    def call(self, region: Region, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a region."""
        if self._again is not None:
            way = next(self._again, "written")
            if way == "graph":
                return region.called(args, kwargs)[0]
            return (region.as_recorded if way == "recorded" else region.as_written)(args, kwargs)
        place = len(self._went)
        self._went.append("written")
        out, self._went[place] = region.called(args, kwargs)
        return out
