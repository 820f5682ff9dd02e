"""Our DTensor for the sweep (``tests/ranks/sweep.py``)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from espalier import DTensor, Mesh
from espalier.tensor import dispatch, fallback
from espalier.tensor.rules import RULES


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


# second names of functions, which add nothing to a count
_ALIASES = frozenset(
    """
    absolute alias arccos arccosh arcsin arcsinh arctan arctan2 arctanh clip concat concatenate divide expit
    fix floordiv ger greater greater_equal inverse less less_equal moveaxis multiply negative not_equal orgqr
    row_stack subtract swapaxes swapdims true_divide truediv type_as
    """.split()
)


def ruled_names() -> set[str]:
    """Names of torch's public functions that have a rule.

    One name stands for all spellings (torch, Tensor, nn.functional, torch.linalg, torch.special); in-place
    forms, operators and second names do not count.
    """
    names = {getattr(function, "__name__", "") for function in RULES.functions()}
    found = {name.removeprefix("special_").removeprefix("linalg_") for name in names}
    return {
        name
        for name in found
        if name
        and not name.startswith("_")
        and not name.endswith(("_", "_with_indices"))
        and name not in _ALIASES
    }
