"""What code finds by name, and what objects hold: what functions hang on beside their arguments."""

from __future__ import annotations

import argparse
import enum
import functools
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

_LIBRARIES = sys.stdlib_module_names | {"torch", "numpy", "espalier", "transformers", "torchvision", "timm"}
MOST = 100_000  # that are looked at
ABSENT = object()


class Cell:
    """A cell of a closure as a table with one name."""

    def __init__(self, cell: types.CellType) -> None:
        self._cell = cell

    def __contains__(self, name: str) -> bool:
        try:
            return self._cell.cell_contents is not self
        except ValueError:
            return False

    def __getitem__(self, name: str) -> Any:
        return self._cell.cell_contents

    def __setitem__(self, name: str, value: Any) -> None:
        self._cell.cell_contents = value

    def pop(self, name: str, default: Any) -> None:
        """Empty it."""
        if name in self:
            del self._cell.cell_contents


def tables_of(f: types.FunctionType) -> Iterator[tuple[Any, Any, list[str]]]:
    """Where a function finds what it names: an owner, its table, and names that may stand there.

    That are what it closes over, its globals, and modules of the program among them.
    """
    for cell in f.__closure__ or ():
        yield cell, Cell(cell), ["cell_contents"]
    names = list(dict.fromkeys(names_in(f.__code__)))
    yield f.__globals__, f.__globals__, names
    for name in names:
        module = f.__globals__.get(name)
        if isinstance(module, types.ModuleType) and not is_known(module):
            yield module, vars(module), [name for name in names if name in vars(module)]


class Reads:
    """What functions of the classes of some modules find by name: what a program may change between calls.

    Globals, what they close over, attributes of classes; also of the functions and classes that they find so.
    Those of libraries are not looked into.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._places: dict[tuple[int, str], tuple[tuple[Any, Any], str]] = {}
        self._seen: dict[int, Any] = {}  # kept, so that an id never names two
        waiting: list[Any] = []
        for module in modules:
            own = [x for x in vars(module).values() if isinstance(x, types.FunctionType)]
            waiting += [type(module), *own]
        while waiting and len(self._seen) < MOST:
            x = waiting.pop()
            if id(x) not in self._seen:
                self._seen[id(x)] = x
                waiting += self._found(x)

    @property
    def keys(self) -> set[tuple[int, str]]:
        """What tells places apart, also those of other modules."""
        return set(self._places)

    @property
    def places(self) -> list[tuple[Any, Any, str]]:
        """Whose they are (a class, say), in which table they stand, and under which name."""
        return [(owner, table, name) for (owner, table), name in self._places.values()]

    def says(self, name: str) -> bool:
        """Whether one of the functions has that name in its code, an attribute's say."""
        functions = (x for x in self._seen.values() if isinstance(x, types.FunctionType))
        return any(name in names_in(f.__code__) for f in functions if not is_known(f))

    def now(self) -> list[Any]:
        """The values that stand there."""
        return [_value_in(table, name) for _, table, name in self.places]

    def _found(self, x: Any) -> Iterable[Any]:
        if not isinstance(x, types.FunctionType | type):
            return inner_functions(x) or ()
        if is_known(x):
            return ()
        if isinstance(x, type):
            of_class = [name for name in vars(x) if not name.startswith("__")]
            return [*self._noted(x, vars(x), of_class), *x.__bases__]
        return [inner for table in tables_of(x) for inner in self._noted(*table)]

    def _noted(self, owner: Any, table: Any, names: Iterable[str]) -> list[Any]:
        """Note what stands there; gives the functions and classes among it."""
        inner = []
        for name in names:
            value = _value_in(table, name)
            if isinstance(value, types.FunctionType | type) or inner_functions(value) is not None:
                inner.append(value)
            elif value is not ABSENT and not isinstance(value, types.ModuleType | nn.Module):
                self._places[id(owner), name] = (owner, table), name
        return inner


def _value_in(table: Any, name: str) -> Any:
    return table[name] if name in table else ABSENT  # noqa: SIM401 - a cell has no get()


def inner_functions(x: Any) -> list[Any] | None:
    """The functions that something which can be called is made of, and what they are given."""
    if isinstance(x, types.MethodType):
        return [x.__func__, type(x.__self__)]
    if isinstance(x, staticmethod | classmethod):
        return [x.__func__]
    if isinstance(x, functools.partial):
        return [x.func, x.args, x.keywords]
    if isinstance(x, property):
        return [x.fget, x.fset]
    return None


def names_in(code: types.CodeType) -> Iterator[str]:
    """The names that a function's code, and what is written within it, finds by name."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from names_in(inner)


def is_known(x: Any) -> bool:
    """Whether a function, class or module is of a library whose functions keep nothing that matters."""
    name = x.__name__ if isinstance(x, types.ModuleType) else getattr(x, "__module__", None)
    return (name or "").partition(".")[0] in _LIBRARIES


MOST_HELD = 256  # what of an object is looked at: one that holds more (a trainer) is no configuration
_NAMESPACES = (types.SimpleNamespace, argparse.Namespace)
_OPAQUE = sys.stdlib_module_names | {"torch", "numpy", "espalier", "tqdm"}


def held_by(x: Any) -> dict[str, Any] | None:
    """The attributes of an object of the program's own, or of a configuration; None of what is none."""
    kind = type(x)
    if kind.__module__.partition(".")[0] in _OPAQUE and kind not in _NAMESPACES:
        return None
    if isinstance(x, type | nn.Module | torch.Tensor | dict | enum.Enum):
        return None
    slots = [key for base in kind.__mro__ for key in _slots_of(base) if not key.startswith("__")]
    held = {key: own(x, key, ABSENT) for key in slots}
    return {**{key: y for key, y in held.items() if y is not ABSENT}, **own(x, "__dict__", {})}


def own(x: Any, name: str, default: Any) -> Any:
    """An object's attribute, past what its class does where one is read (transformers' may refuse some)."""
    try:
        return object.__getattribute__(x, name)
    except AttributeError:
        return default


def shown_by(x: Any) -> dict[str, Any] | None:
    """The same, with what its class has for it where it has none of its own."""
    held = held_by(x)
    if held is None:
        return None
    of_class: dict[str, Any] = {}
    for base in reversed(type(x).__mro__):
        if not is_known(base):
            of_class |= {k: y for k, y in vars(base).items() if not k.startswith("__") and _is_value(y)}
    return {**of_class, **held}


def _is_value(x: Any) -> bool:
    """Whether an attribute of a class is nothing by which it does something."""
    return not (callable(x) or hasattr(x, "__get__"))


def _slots_of(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def made_in(hook: Any, *packages: str) -> bool:
    """Whether a function, or an object that can be called, is of one of these packages."""
    return (getattr(hook, "__module__", None) or "").partition(".")[0] in packages
