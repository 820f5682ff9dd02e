"""A call on gathered inputs of which the backward pass keeps the shards.

The dispatcher does so for one function. Here it is done for a stretch of program, a module's ``forward``
say: what it saves of a gathered input, or of a view of it, is replaced by the shard.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from torch._C import DisableTorchFunctionSubclass as raw

from espalier.layout import Layout
from espalier.tensor.dispatch import Move, _moved, _shard_of
from espalier.tensor.dtensor import DTensor, stamp, up_to_date
from espalier.tensor.saved import Shard, close_saving, gather_before_backward, open_saving
from espalier.trees import tree_map


def call_on_whole(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    wanted: Callable[[DTensor], Layout | None],
) -> Any:
    """``function(*args, **kwargs)``, its DTensors brought first to the layouts that are wanted.

    A tensor that several calls in a row bring to one layout is moved once, and so is its gradient.

    Args:
        wanted: the layout of an input during the call; None: as it is.
    """
    shards: list[Shard] = []

    def brought(x: Any) -> Any:
        if type(x) is not DTensor:
            return x
        x = up_to_date(x)
        layout = wanted(x)
        if layout is None or layout is x._layout.own:
            return x
        with raw():
            way = _way(x._layout.own, layout)
            moved = _moved(x, way)
            if way.gathers and moved.requires_grad:
                shards.append(_shard_of(x, moved, way))
            return stamp(moved, layout)

    args, kwargs = tree_map(brought, args), tree_map(brought, kwargs)
    if not shards:
        return function(*args, **kwargs)
    hooks = open_saving(shards)
    try:
        out = function(*args, **kwargs)
    finally:
        close_saving(hooks)
    with raw():
        gather_before_backward(out, shards)
    return out


@lru_cache(maxsize=4096)
def _way(src: Layout, dst: Layout) -> Move:
    return Move((), src, dst)


__all__ = ["call_on_whole"]
