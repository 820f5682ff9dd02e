"""What a compiled region hangs on beside its arguments: tensors and attributes of modules and functions."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from copy import copy
from operator import is_
from types import FunctionType
from typing import Any, NamedTuple

import torch

from espalier.tensor.names import ABSENT, MOST_HELD, Reads, own, shown_by, tables_of
from espalier.torch_private import COMPILED_CALL, HOOKS, own_buffers, own_modules, own_parameters

CONSTANTS = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, type(None))
_INTERNAL = (vars(torch.nn.Module()).keys() | {COMPILED_CALL}) - {"training"}


class HolderSlot(NamedTuple):
    """Where a tensor is kept that is no argument: ``holder[key]``."""

    holder: Any
    key: Any

    def get(self) -> Any:
        """What is there now; None if nothing is."""
        try:
            return self.holder[self.key]
        except (KeyError, IndexError, ValueError):
            return None


AttributeGuard = tuple[Any, Any, Any]  # holder, key, value


def watched(owner: Any, places: dict[int, HolderSlot], given: Sequence[Any] = ()) -> Iterator[AttributeGuard]:
    """All that the program may hang on beside its arguments; tensors go into ``places``.

    Args:
        given: arguments that are no tensors: what the program's own objects among them hold counts, too.
    """
    if isinstance(owner, torch.nn.Module):
        yield from _of_module(owner, places, set())
    else:
        yield from _of_function(owner, places, set())
    seen: set[int] = set()
    for x in given:
        yield from _of_object(x, places, seen)


def _of_function(function: Any, places: dict[int, HolderSlot], seen: set[int]) -> Iterator[AttributeGuard]:
    function = inspect.unwrap(function)
    bound = getattr(function, "__self__", None)
    if isinstance(bound, torch.nn.Module):
        yield from _of_module(bound, places, seen)
    function = getattr(function, "__func__", function)
    if not isinstance(function, FunctionType) or id(function) in seen:
        return
    seen.add(id(function))
    if function.__module__.split(".")[0] in ("torch", "espalier"):
        return
    for owner, table, names in tables_of(function):
        for name in names:
            if name in table:
                yield from _of_name(_Named(owner, table), name, places, seen)


def _of_name(
    holder: _Named, name: str, places: dict[int, HolderSlot], seen: set[int]
) -> Iterator[AttributeGuard]:
    value = holder[name]
    yield from _of_value(holder, name, value, places, seen)
    if isinstance(value, torch.nn.Module):
        yield from _of_module(value, places, seen)
    elif isinstance(value, FunctionType):
        yield from _of_function(value, places, seen)


def _of_module(
    root: torch.nn.Module, places: dict[int, HolderSlot], seen: set[int]
) -> Iterator[AttributeGuard]:
    for module in root.modules():
        for holder in (own_parameters(module), own_buffers(module), own_modules(module), module.__dict__):
            for key, value in holder.items():
                if key not in _INTERNAL:
                    yield from _of_value(holder, key, value, places, seen)
        for name in HOOKS:
            yield module.__dict__, name, module.__dict__[name].copy()
        # one that comes later may stand before what its class has: a forward, a number
        yield _Size(module.__dict__), SIZE, len(module.__dict__)
    for owner, table, name in Reads(root.modules()).places:
        if name in table:
            yield from _of_value(_Named(owner, table), name, table[name], places, seen)


def _of_value(
    holder: Any, key: Any, value: Any, places: dict[int, HolderSlot], seen: set[int]
) -> Iterator[AttributeGuard]:
    if isinstance(value, torch.Tensor):
        places.setdefault(id(value), HolderSlot(holder, key))
        return
    if not isinstance(value, tuple | list | dict):
        yield holder, key, value
        yield from _of_object(value, places, seen)
        return
    yield holder, key, copy(value)
    if id(value) in seen:
        return
    seen.add(id(value))
    for k, x in value.items() if isinstance(value, dict) else enumerate(value):
        if isinstance(x, torch.Tensor):
            places.setdefault(id(x), HolderSlot(value, k))
        elif isinstance(x, tuple | list | dict):
            yield from _of_value(value, k, x, places, seen)
        else:
            yield from _of_object(x, places, seen)


def _of_object(x: Any, places: dict[int, HolderSlot], seen: set[int]) -> Iterator[AttributeGuard]:
    """What an object of the program's own has; one that has much (a trainer) is known by which it is."""
    held = shown_by(x)
    if held is None or id(x) in seen or len(held) > MOST_HELD:
        return
    seen.add(id(x))
    for name, value in held.items():
        yield from _of_value(_Object(x), name, value, places, seen)


class _Named:
    """What somebody (a class, a variable of an enclosing function) has under names."""

    def __init__(self, owner: Any, table: Any) -> None:
        self.owner, self._table = owner, table

    def __getitem__(self, name: str) -> Any:
        return self._table[name]


SIZE = object()  # in the place of a key


class _Size:
    """How many names there are."""

    def __init__(self, owner: dict[str, Any]) -> None:
        self.owner = owner

    def __getitem__(self, key: Any) -> int:
        return len(self.owner)


class _Object:
    """An object's attributes, read as a mapping is."""

    def __init__(self, owner: Any) -> None:
        self.owner = owner

    def __getitem__(self, name: str) -> Any:
        value = own(self.owner, name, ABSENT)
        if value is ABSENT:
            raise KeyError(name)
        return value


def identity(holder: Any) -> int:
    """What tells holders apart."""
    return id(holder.owner if type(holder) in (_Named, _Object, _Size) else holder)


def same(a: Any, b: Any) -> bool:
    """Whether a program that hangs on a value finds the same one."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return isinstance(a, CONSTANTS) and bool(a == b)


class Surroundings:
    """Attributes as they were when a region was recorded; most are the very same objects at each call."""

    def __init__(self, guards: Sequence[AttributeGuard]) -> None:
        sizes = [guard for guard in guards if guard[1] is SIZE]
        self._tables, self._sizes = [holder.owner for holder, _, _ in sizes], [n for _, _, n in sizes]
        guards = [guard for guard in guards if guard[1] is not SIZE]
        fillable = [guard for guard in guards if isinstance(guard[2], list | dict)]
        empty = [guard for guard in fillable if not guard[2]]  # hooks, most of all
        self._filled, self._empty = [guard for guard in fillable if guard[2]], len(empty)
        self._rest = [*empty, *(guard for guard in guards if not isinstance(guard[2], list | dict))]
        self._held = [holder[key] for holder, key, _ in self._rest]

    def are_same(self) -> bool:
        """Whether they are now as they were.

        Raises:
            KeyError, IndexError, ValueError: one is gone.
        """
        if list(map(len, self._tables)) != self._sizes:
            return False
        now = [holder[key] for holder, key, _ in self._rest]
        if all(map(is_, now, self._held)):
            if any(now[: self._empty]):
                return False
        elif not all(map(same, now, [value for _, _, value in self._rest])):
            return False
        return all(same(holder[key], value) for holder, key, value in self._filled)
