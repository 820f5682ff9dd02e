"""The dispatcher: from a torch call on DTensors to the same call on local tensors.

A call is looked up by (function, layouts of its tensors, its other arguments). The first time a
rule is asked and its answer solved into an *entry*; from then on the entry is carried out: bring
the inputs where they must be, call, stamp the outputs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as raw

from espalier.comm import move
from espalier.layout import Layout, route, same_data
from espalier.layout.layout import R, V
from espalier.layout.transitions import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL
from espalier.mesh import Mesh
from espalier.tensor.dtensor import DTensor, layout_of, stamp
from espalier.tensor.fallback import enter_or_gather
from espalier.tensor.rules import RULES
from espalier.tensor.rules.solve import solve
from espalier.tensor.rules.spec import Operand, Placed, Spec
from espalier.tensor.saved import saving_shards

_plain_call = torch._C._disabled_torch_function_impl
_CACHE_LIMIT = 50_000

Path = tuple[Any, ...]


class Move:
    """One input's way from the layout it has to the one the call needs."""

    __slots__ = ("dst", "gathers", "only_varies", "path", "remember", "src")

    def __init__(self, path: Path, src: Layout, dst: Layout) -> None:
        self.path, self.src, self.dst = path, src, dst
        self.only_varies = all(a == b or (a == R and b == V) for a, b in zip(src.axes, dst.axes, strict=True))
        ops = {step.operation for step in route(src, dst).steps}
        self.gathers = bool(ops & {ALL_GATHER, ALL_TO_ALL}) and ALL_REDUCE not in ops
        self.remember = self.only_varies or bool(ops & {ALL_GATHER, ALL_TO_ALL, ALL_REDUCE})


class Entry:
    """How one kind of call is carried out."""

    __slots__ = ("moves", "out", "outs", "placed", "run", "simple", "tail", "written")

    def __init__(self, spec: Spec, placed: Placed, operands: list[Operand]) -> None:
        self.placed = placed
        self.run = spec.run
        self.tail = spec.tail(placed) if spec.tail is not None else None
        self.outs = placed.outs
        self.out = placed.outs[0] if len(placed.outs) == 1 else None
        self.written = operands[spec.inplace].path if spec.inplace is not None else None
        self.moves = tuple(
            Move(o.path, o.layout, dst)
            for o, dst in zip(operands, placed.ins, strict=True)
            if o.path != self.written and not same_data(o.layout, dst)
        )
        self.simple = not self.moves and self.run is None and self.tail is None and self.out is not None

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Carry the call out; torch functions are not intercepted meanwhile."""
        with raw():
            gathered: list[tuple[torch.Tensor, torch.Tensor, Move]] = []
            for m in self.moves:
                x = _at(args, kwargs, m.path)
                if m.only_varies and not (x.requires_grad and torch.is_grad_enabled()):
                    continue
                moved = _moved(x, m)
                if moved is x:
                    continue
                args, kwargs = _with(args, kwargs, m.path, moved)
                if m.gathers and moved.requires_grad:
                    gathered.append((x, moved, m))
            if gathered:
                with saving_shards([(x, moved, m.src, m.dst) for x, moved, m in gathered]):
                    out = self._local(func, args, kwargs)
            else:
                out = self._local(func, args, kwargs)
        return self._stamped(out, args, kwargs)

    def _local(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.tail is not None:
            return func(args[0], *self.tail)
        if self.run is not None:
            return self.run(func, args, kwargs, self.placed)
        return func(*args, **kwargs)

    def _stamped(self, out: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.written is not None and type(_at(args, kwargs, self.written)) is not DTensor:
            return out
        if self.out is not None:
            if isinstance(out, torch.Tensor):
                return stamp(out, self.out)
            if isinstance(out, tuple | list) and len(out) == 1:
                stamp(out[0], self.out)
            return out
        for x, layout in zip(out, self.outs, strict=True):
            if isinstance(x, torch.Tensor):
                stamp(x, layout)
        return out


_entries: dict[Any, Entry | None] = {}

_NO_KWARGS: dict[str, Any] = {}
_special = RULES.special
_typed = RULES.typed


def forget() -> None:
    """Drop all cached entries (a rule was added)."""
    _entries.clear()


def dispatch(
    cls: type, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
) -> Any:
    """``DTensor.__torch_function__``."""
    special = _special(func)
    if special is not None:
        return special(func, types, args, kwargs or {})
    key: list[Any] = [func]
    for a in args:
        t = type(a)
        if t is DTensor:
            key.append(a._layout)
        elif t is int or t is str:
            key.append(a)
        else:
            key.append(_key(a))
    if kwargs:
        for name, a in kwargs.items():
            key.append(name)
            key.append(_key(a))
    else:
        kwargs = _NO_KWARGS
    if func in _typed:
        key.append(tuple(a.dtype for a in args if type(a) is DTensor))
    frozen = tuple(key)
    try:
        entry = _entries[frozen]
    except KeyError:
        return _first(frozen, func, types, args, kwargs)
    if entry is None:
        return _unruled(func, types, args, kwargs)
    if entry.simple:
        out = _plain_call(func, types, args, kwargs)
        if isinstance(out, torch.Tensor) and entry.written is None:
            out.__class__ = DTensor
            out._layout = entry.out  # type: ignore[attr-defined]
            return out
        return entry._stamped(out, args, kwargs)
    return entry.call(func, args, kwargs)


def _key(a: Any) -> Any:
    t = type(a)
    if t is DTensor:
        return (a._layout, a.dtype)
    if t is float or t is complex:
        return t  # a scalar's value never decides a layout
    if isinstance(a, torch.Tensor):
        return (t, a.shape, a.dtype)
    if t is tuple or t is list or t is torch.Size:
        return (t, *[_key(x) for x in a])
    if t is slice:
        return (slice, _key(a.start), _key(a.stop), _key(a.step))
    if isinstance(a, dict):
        return (dict, *[(k, _key(v)) for k, v in a.items()])
    try:
        hash(a)
    except TypeError:
        return t
    return a


def _first(
    key: Any, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    if len(_entries) >= _CACHE_LIMIT:
        _entries.clear()
    entry = _build(func, args, kwargs)
    _entries[key] = entry
    return _unruled(func, types, args, kwargs) if entry is None else entry.call(func, args, kwargs)


def _build(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Entry | None:
    rule = RULES.get(func)
    if rule is None or kwargs.get("out") is not None:
        return None
    mesh = mesh_of(func, args, kwargs)
    operands: list[Operand] = []
    seen_args = tuple(_operands(a, mesh, operands, (i,)) for i, a in enumerate(args))
    seen_kwargs = {k: _operands(a, mesh, operands, (k,)) for k, a in kwargs.items()}
    with raw():
        if "input" in seen_kwargs and "input" not in inspect.signature(rule).parameters:
            seen_args = (seen_kwargs.pop("input"), *seen_args)
        spec = rule(*seen_args, **seen_kwargs)
        if spec is None:
            return None
        placed = solve(spec, operands, mesh)
    return None if placed is None else Entry(spec, placed, operands)


def _operands(a: Any, mesh: Mesh, found: list[Operand], path: Path) -> Any:
    if isinstance(a, torch.Tensor):
        found.append(Operand(len(found), layout_of(a, mesh), a.dtype, path))
        return found[-1]
    if isinstance(a, tuple | list) and not isinstance(a, torch.Size):
        return type(a)(_operands(x, mesh, found, (*path, i)) for i, x in enumerate(a))
    return a


def mesh_of(func: Callable[..., Any], args: Any, kwargs: Any) -> Mesh:
    """The one mesh on which the DTensors of a call lie.

    Raises:
        ValueError: they lie on several.
    """
    meshes = {id(t._layout.mesh): t._layout.mesh for t in tensors_in((args, kwargs)) if type(t) is DTensor}
    if len(meshes) != 1:
        raise ValueError(
            f"{getattr(func, '__name__', func)}: its DTensors lie on {len(meshes)} meshes: "
            f"{', '.join(map(repr, meshes.values()))}. Bring them to one mesh first."
        )
    return next(iter(meshes.values()))


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """All tensors in nested tuples, lists and dicts."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, tuple | list):
        return []
    return [t for x in tree for t in tensors_in(x)]


def _unruled(
    func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    return enter_or_gather(func, args, kwargs, mesh_of(func, args, kwargs))


def _at(args: tuple[Any, ...], kwargs: dict[str, Any], path: Path) -> Any:
    value: Any = kwargs[path[0]] if isinstance(path[0], str) else args[path[0]]
    for i in path[1:]:
        value = value[i]
    return value


def _with(args: tuple[Any, ...], kwargs: dict[str, Any], path: Path, value: Any) -> tuple[Any, Any]:
    if isinstance(path[0], str):
        return args, {**kwargs, path[0]: _replaced(kwargs[path[0]], path[1:], value)}
    i = path[0]
    return (*args[:i], _replaced(args[i], path[1:], value), *args[i + 1 :]), kwargs


def _replaced(tree: Any, path: Path, value: Any) -> Any:
    if not path:
        return value
    parts = list(tree)
    parts[path[0]] = _replaced(parts[path[0]], path[1:], value)
    return type(tree)(parts)


def _moved(x: torch.Tensor, m: Move) -> torch.Tensor:
    """``x`` in its new layout; what was moved once is remembered on it (never on a leaf).

    So that Q, K and V share one gather and one backward all-reduce. A leaf lives longer than a
    step: its moved form would hold memory, and a reference cycle through its gradient accumulator.
    """
    if not m.remember or type(x) is not DTensor or (x.is_leaf and x.requires_grad):
        return move(x, m.src, m.dst)
    known = x.__dict__.setdefault("_moved", {})
    tag = (m.dst, x._version, torch.is_grad_enabled())
    if tag not in known:
        known[tag] = move(x, m.src, m.dst)
    return known[tag]  # type: ignore[no-any-return]


DTensor.__torch_function__ = classmethod(dispatch)  # type: ignore[assignment, method-assign]
