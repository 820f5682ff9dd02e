"""Arguments given by torch's names for them, which a rule's parameters need not have."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from espalier.tensor.rules import RULES

# NumPy's names, which torch takes too
ALIASES = {"axis": "dim", "keepdims": "keepdim"}


def by_place(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """The call with arguments by their places, where its rule does not know their names; None if it does."""
    known = RULES.signature(func).parameters if RULES.get(func) is not None else {}
    strange = {k for k in kwargs if k not in known and k not in ALIASES and k not in ("input", "out")}
    if not known or not strange or any(p.kind is p.VAR_KEYWORD for p in known.values()):
        return None
    for names in _overloads(getattr(func, "__name__", "")):
        placed, rest = list(args), dict(kwargs)
        for name in names[len(args) :]:
            if name not in rest and not (name == "self" and "input" in rest):
                break
            placed.append(rest.pop(name if name in rest else "input"))
        if not strange & rest.keys():
            return tuple(placed), rest
    return None


@lru_cache(maxsize=1024)
def _overloads(name: str) -> tuple[tuple[str, ...], ...]:
    """Of each form of an operator the names of what may be given by its place."""
    packet = getattr(torch.ops.aten, name, None) if name and not name.startswith("_") else None
    if packet is None:
        return ()
    schemas = (getattr(packet, overload)._schema for overload in packet.overloads())
    return tuple(tuple(a.name for a in schema.arguments if not a.kwarg_only) for schema in schemas)
