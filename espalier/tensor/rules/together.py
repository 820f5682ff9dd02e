"""Failing together: what torch refuses for its values on one rank, it refuses on all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from espalier.comm.agreement import REFUSALS, agree, looks
from espalier.layout import may_be_empty
from espalier.layout.layout import R, V
from espalier.mesh import Mesh
from espalier.tensor.rules.spec import Placed, Runner, Spec


def together(spec: Spec, run: Runner | None, placed: Placed) -> Runner | None:
    """``run``, after which the ranks agree on whether it failed, where only some may have met a reason to.

    Along the axes of its own collectives ``run`` fails on all ranks or on none: a dim that an axis cuts and
    an index that it cuts are not of one call, unless they are of one letter.
    """
    uneven = any(map(may_be_empty, (*placed.ins, *placed.outs)))  # what is empty may not be looked at
    asked = placed.ins if uneven else [placed.ins[i] for i in spec.fails]
    axes = tuple(
        a for a, n in enumerate(placed.mesh.shape) if n > 1 and any(x.axes[a] not in (R, V) for x in asked)
    )
    if not axes:
        return run

    def runner(func: Callable[..., Any], args: Any, kwargs: Any, placed: Placed) -> Any:
        out: Any = None
        met: Exception | None = None
        try:
            out = func(*args, **kwargs) if run is None else run(func, args, kwargs, placed)
        except REFUSALS as error:
            met = error
        if looks(placed.mesh):
            agree(met, placed.mesh, axes)
        elif met is not None:
            raise met
        return out

    return runner


def within(
    index: torch.Tensor, n: int, mesh: Mesh, ask: Callable[[int], Any], but: int | None = None
) -> bool:
    """Look for indices of a dim of ``n``, other than ``but``, that torch refuses.

    ``ask(i)`` has torch say so of one of them. Gives whether it is sure that all are in range, none ``but``.
    """
    if not looks(mesh) or not index.numel():
        return False
    low, high = map(int, torch.aminmax(index))
    if low >= 0 and high < n:
        return but is None or not low <= but <= high
    if but is None:
        ask(low if low < 0 else high)
    else:
        within(index.masked_fill(index == but, 0), n, mesh, ask)
    return False


def with_one(x: torch.Tensor, i: int) -> torch.Tensor:
    """A tensor of one element of this dtype and these many dims."""
    return torch.full((1,) * x.ndim, i, dtype=x.dtype)
