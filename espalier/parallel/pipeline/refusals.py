"""What stages cannot do again, and so refuse, in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from espalier.parallel.pipeline.record import Call, SplitError, Trace
from espalier.parallel.pipeline.standing import Standing, name_of
from espalier.parallel.pipeline.steps import Unit
from espalier.parallel.pipeline.trees import Ref, leaves

_PLAIN = (
    torch.Tensor, Ref, torch.Size, torch.dtype, torch.device, torch.layout, torch.memory_format,
    torch.Generator, nn.Module, str, bytes, int, float, complex, bool, type(None), type(Ellipsis), type,
)  # fmt: skip


def refuse_lost(
    trace: Trace,
    bounds: Sequence[int],
    units: Sequence[Unit],
    modules: Mapping[str, nn.Module],
    standing: Standing,
) -> None:
    """Refuse what the stages would lose of a forward pass.

    Raises:
        SplitError: a module that is divided has hooks or changes itself, or one that is called whole uses
            what it was not given.
    """
    divided = {c.name for c in trace.calls if any(c.start < b < c.end for b in bounds)}
    for name in sorted(divided.union(c.name for u in units if u.call is None for c in trace.chain(u.start))):
        said = f"{name or 'the model'!r} ({type(modules[name]).__name__})"
        if standing.hooked(modules[name]):
            raise SplitError(
                f"{said} has hooks, and is divided among stages: they would never be called. Hook modules "
                "that lie in one stage, or give cuts at modules outside of it."
            )
        if name in trace.changed:
            raise SplitError(
                f"The forward of {said}, which is divided among stages, {', '.join(trace.changed[name])}. "
                "The stages compute only its tensors again: this would be lost. Give cuts at modules outside "
                "of it, or move this into a module that lies in one stage."
            )
    held = {v.storage: v.source for v in trace.values if v.source[0] in ("parameter", "buffer", "constant")}
    for unit in units:
        if unit.call is not None:
            _refuse_hidden(trace, unit, unit.call)
            continue
        op = trace.ops[unit.start]
        for s in op.writes & held.keys():
            kind, name = held[s]
            raise SplitError(
                f"{name_of(op.func)} in {trace.where(unit.start)}, which is divided among stages, writes to "
                "the "
                f"{kind} {name!r}: each stage would have another one. Give cuts at modules outside of it, or "
                "let "
                "a module that lies in one stage do it."
            )


def _refuse_hidden(trace: Trace, unit: Unit, call: Call) -> None:
    given = {r.number for r in leaves((call.args, call.kwargs), Ref)}
    for i in range(unit.start, unit.end):
        for n in trace.ops[i].reads:
            value = trace.values[n]
            kind, at = value.source
            outside = kind == "batch" or (kind == "op" and not unit.start <= at < unit.end)
            if outside and n not in given:
                raise SplitError(
                    f"{call.name!r} uses a tensor of the shape {list(value.tensor.shape)} that was made "
                    "outside "
                    "of it and is none of its arguments. A stage hands modules their arguments: pass it as "
                    "one."
                )
    for x in leaves((call.args, call.kwargs)):
        if not isinstance(x, _PLAIN) and _holds_tensors(x):
            raise SplitError(
                f"{call.name!r} is given a {type(x).__name__} that holds tensors, which cannot travel "
                "between "
                "stages. Pass the tensors themselves; for a cache of keys and values, use_cache=False."
            )


def _holds_tensors(x: Any, depth: int = 4) -> bool:
    if isinstance(x, torch.Tensor):
        return True
    if depth == 0 or isinstance(x, _PLAIN):
        return False
    inner: Any = ()
    if isinstance(x, Mapping):
        inner = x.values()
    elif isinstance(x, list | tuple | set):
        inner = x
    elif hasattr(x, "__dict__"):
        inner = list(vars(x).values())
    return any(_holds_tensors(y, depth - 1) for y in inner)
