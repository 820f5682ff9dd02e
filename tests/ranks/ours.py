"""Our DTensor for the sweep (``tests/ranks/sweep.py``)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from espalier import DTensor, Mesh
from espalier.tensor import dispatch, fallback


class Ours:
    """Our DTensor."""

    type = DTensor

    def mesh(self, world: int) -> Mesh:
        """A mesh over the process group, or over this process alone."""
        return Mesh.single(("axis",)) if world == 1 else Mesh.from_env({"axis": world})

    @contextmanager
    def watch(self) -> Iterator[list[str]]:
        """Notes what the fallback does."""
        seen: list[str] = []
        enter, gather = dispatch.enter_or_gather, fallback._gather

        def entered(*args: Any) -> Any:
            seen.append("entered")
            return enter(*args)

        def gathered(*args: Any) -> Any:
            seen.append("gathered")
            return gather(*args)

        with (
            mock.patch.object(dispatch, "enter_or_gather", entered),
            mock.patch.object(fallback, "_gather", gathered),
        ):
            yield seen

    def is_refusal(self, error: BaseException) -> bool:
        """Raised on purpose, by us."""
        return isinstance(error, NotImplementedError) and "DTensor" in str(error)
