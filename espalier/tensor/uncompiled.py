"""What ``torch.compile`` compiled cannot follow DTensors: where it would meet some, it runs as written."""

from __future__ import annotations

import functools
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

from torch import nn
from torch.optim import Optimizer

from espalier.blocks import parameters_in
from espalier.comm.custom_ops import recorders
from espalier.layout import any_alive
from espalier.mesh.process import World
from espalier.tensor.dtensor import DTensor
from espalier.tensor.names import is_known, names_in
from espalier.tensor.observers import tell
from espalier.torch_private import dispatch_modes, function_mode_stack, let_calls_be_written

_MOST = 10_000  # so much is looked at
_BARE = (int, float, bool, str, bytes, complex)


def follow_compiler(engine: Any = None) -> None:
    """Let what torch compiled run as it is written where it would meet DTensors, or an engine."""
    let_calls_be_written(_runs_as_written)
    if engine is not None:
        _of_world("engines").add(engine)  # its model may not be laid out yet


def _of_world(name: str) -> weakref.WeakSet[Any]:
    """What is known of the running world: its ``"engines"``, and what was ``"told"`` of in it."""
    found: weakref.WeakSet[Any] = World.own().setdefault(f"uncompiled: {name}", weakref.WeakSet())
    return found


def _runs_as_written(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call of what is compiled is left uncompiled, for who looks on or for what it meets."""
    if dispatch_modes() or (recorders() and any(map(_is_ours, function_mode_stack()))):
        return True
    if not (any_alive() or _of_world("engines")) or not _meets_dtensors(function, args, kwargs):
        return False
    owner = getattr(function, "__self__", None)
    named = owner if isinstance(owner, nn.Module) else getattr(function, "__code__", function)
    told = _of_world("told")
    if named not in told:
        told.add(named)
        tell(
            f"{getattr(function, '__qualname__', function)} was compiled by torch.compile, which cannot "
            "follow DTensors: it runs as it is written. initialize(..., compile=True), or engine.compile(), "
            "compiles the blocks of a model, collectives included; espalier.compile(function) a function."
        )
    return True


def _is_ours(x: Any) -> bool:
    return type(x).__module__.startswith("espalier")


def _meets_dtensors(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a DTensor, or an engine, is in what a call is given, closes over or finds by a name."""
    waiting, seen = deque([function, args, kwargs]), set[int]()
    while waiting and len(seen) < _MOST:
        x = waiting.popleft()
        if type(x) is DTensor or getattr(type(x), "lays_out", False):
            return True
        if x is None or type(x) in _BARE or id(x) in seen:
            continue
        seen.add(id(x))
        waiting += _within(x)
    return False


def _within(x: Any) -> Iterable[Any]:
    if isinstance(x, nn.Module):
        return chain(parameters_in(x), x.buffers())
    if isinstance(x, dict):
        return dict.values(x)
    if isinstance(x, tuple | list):
        return x
    if isinstance(x, Optimizer):
        return x.param_groups
    if isinstance(x, functools.partial):
        return (x.func, x.args, x.keywords)
    if isinstance(x, types.MethodType):
        return (x.__func__, x.__self__)
    if isinstance(x, types.FunctionType):
        names = () if is_known(x) else names_in(x.__code__)
        cells = [cell.cell_contents for cell in x.__closure__ or () if _is_filled(cell)]
        return cells + [x.__globals__[name] for name in names if name in x.__globals__]
    if isinstance(x, type | types.ModuleType) or (is_known(type(x)) and not _is_ours(x)):
        return ()
    return vars(x).values() if hasattr(x, "__dict__") else ()


def _is_filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False
