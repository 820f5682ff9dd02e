"""That a run of a program beside the user's own leaves no traces outside of the copy that it runs on.

A copy of a module shares with it the generators of random numbers, and what its functions reach by name: what
they close over, globals, attributes of classes. All that is put back.
"""

from __future__ import annotations

import builtins
import functools
import random
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch._C import DisableTorchFunctionSubclass as raw
from torch.utils import _python_dispatch

_LIBRARIES = sys.stdlib_module_names | {"torch", "numpy", "espalier", "transformers", "torchvision", "timm"}
_MOST = 100_000
_CONTAINERS = (dict, list, set, deque)
_GLOBAL_HOOKS = (
    "_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks",
    "_global_backward_pre_hooks",
)  # fmt: skip


@contextmanager
def untraced(*modules: nn.Module) -> Iterator[None]:
    """While open, a run of modules, or of copies of them, leaves no traces outside of these.

    After it, the generators of Python, NumPy and torch (that of the modules' device, too) are as before. So
    is what the functions of the modules' classes, their hooks, and what these call use by name: numbers,
    containers, tensors and generators that they close over, globals, attributes of classes. torch's dispatch
    modes, and hooks that are called for every module, do not see the run. What is not put back: files,
    iterators, the insides of objects without ``__dict__``, and of libraries.
    """
    traces = _Traces()
    for module in modules:
        for part in module.modules():
            traces.note(type(part))
            traces.note([x for x in vars(part).values() if _may_call(x)])
    with ExitStack() as stack:
        stack.callback(traces.undo)
        stack.callback(Generators().restore)
        stack.enter_context(_torch_generators(modules))
        for name in _GLOBAL_HOOKS:
            stack.enter_context(_emptied(getattr(nn.modules.module, name, {})))
        stack.enter_context(getattr(_python_dispatch, "_disable_current_modes", nullcontext)())
        yield


@contextmanager
def _torch_generators(modules: Iterable[nn.Module]) -> Iterator[None]:
    devices = {p.device for m in modules for p in m.parameters() if p.device.type not in ("cpu", "meta")}
    before = [(torch.get_device_module(d.type), d) for d in devices]
    states = [(m, d, m.get_rng_state(d)) for m, d in before]
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            for module, device, state in states:
                module.set_rng_state(state, device)


@contextmanager
def _emptied(table: MutableMapping[Any, Any]) -> Iterator[None]:
    before = dict(table)
    table.clear()
    try:
        yield
    finally:
        table.clear()
        table.update(before)


class Generators:
    """The states of the generators of random numbers that are Python's and NumPy's, as they are now."""

    def __init__(self) -> None:
        self._python = random.getstate()
        numpy = _numpy()
        self._state = None if numpy is None else numpy.get_state()

    def restore(self) -> None:
        """Put them back."""
        random.setstate(self._python)
        if self._state is not None and (numpy := _numpy()) is not None:
            numpy.set_state(self._state)

    def as_now(self) -> bool:
        """Whether nothing was drawn since."""
        if random.getstate() != self._python:
            return False
        if self._state is None:
            return True
        (_, keys, *rest), (_, before, *others) = _numpy().get_state(), self._state
        return rest == others and bool((keys == before).all())


def _numpy() -> Any:
    return sys.modules.get("numpy.random")


class _Traces:
    """What is to be put back."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], Any]] = []
        self._seen: dict[int, Any] = {}  # kept, so that an id never names two

    def undo(self) -> None:
        """Put it back."""
        for one in self._undo:
            one()
        self._undo.clear()
        self._seen.clear()

    def note(self, x: Any) -> None:
        """Note how a value is now, and what can be reached from it."""
        waiting = [x]
        while waiting and len(self._seen) < _MOST:
            x = waiting.pop()
            if id(x) not in self._seen and not isinstance(x, int | float | str | bytes | type(None)):
                self._seen[id(x)] = x
                waiting += self._noted(x)

    def _noted(self, x: Any) -> list[Any]:
        if isinstance(x, types.FunctionType):
            return [] if _is_known(x) else self._of_function(x)
        if isinstance(x, type):
            return [] if _is_known(x) else self._of_class(x)
        inner = _inner_functions(x)
        if inner is not None:
            return inner
        if isinstance(x, tuple | frozenset):
            return list(x)
        if (back := put_back(x)) is not None:
            self._undo.append(back)
            return list(x.values()) if isinstance(x, dict) else list(x) if isinstance(x, _CONTAINERS) else []
        if isinstance(x, torch.Tensor):
            self._of_tensor(x)
        elif hasattr(x, "__dict__") and (isinstance(x, nn.Module) or not _is_known(type(x))):
            return [vars(x), type(x)]
        return []

    def _of_function(self, f: types.FunctionType) -> list[Any]:
        found = [f.__defaults__, f.__kwdefaults__]
        for cell in f.__closure__ or ():
            found += self._of_name(_Cell(cell), "cell_contents")
        names = set(_names(f.__code__))
        for name in names:
            found += self._of_name(f.__globals__, name)
        for module in [x for x in found if isinstance(x, types.ModuleType) and not _is_known(x)]:
            for name in names & vars(module).keys():
                found += self._of_name(vars(module), name)
        return found

    def _of_name(self, table: Any, name: str) -> list[Any]:
        """A name in a table, which may be given another value, or one at all."""
        if name not in table:
            if not hasattr(builtins, name):
                self._undo.append(lambda: table.pop(name, None))
            return []
        before = table[name]

        def back() -> None:
            if name not in table or table[name] is not before:
                table[name] = before

        self._undo.append(back)
        return [before]

    def _of_class(self, of: type) -> list[Any]:
        before = {k: x for k, x in vars(of).items() if not (k.startswith("__") and k.endswith("__"))}
        special = [x for k, x in vars(of).items() if k in ("__call__", "__init__", "__getattr__")]

        def back() -> None:
            for k in [k for k in vars(of) if k not in before and not k.startswith("__")]:
                type.__delattr__(of, k)
            for k, x in before.items():
                if vars(of).get(k) is not x:
                    type.__setattr__(of, k, x)

        self._undo.append(back)
        return [*before.values(), *special, *of.__bases__]

    def _of_tensor(self, x: torch.Tensor) -> None:
        if type(x) not in (torch.Tensor, nn.Parameter) or x.is_meta or x.layout is not torch.strided:
            return
        with torch.no_grad(), raw():
            before = x.detach().clone()

        def back() -> None:
            with torch.no_grad(), raw():
                if x.shape != before.shape or x.dtype != before.dtype:
                    x.data = before
                elif not torch.equal(x, before):
                    x.data.copy_(before)

        self._undo.append(back)


class _Cell:
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


def put_back(x: Any) -> Callable[[], Any] | None:
    """What brings a container, or a generator of random numbers, to where it is now; None of others."""
    if isinstance(x, _CONTAINERS):
        held = dict(x) if isinstance(x, dict) else set(x) if isinstance(x, set) else list(x)
        return functools.partial(_refill, x, held)
    if isinstance(x, random.Random):
        return functools.partial(x.setstate, x.getstate())
    if isinstance(x, torch.Generator):
        return functools.partial(x.set_state, x.get_state())
    if type(x).__module__.startswith("numpy.random"):
        if hasattr(x, "bit_generator"):
            return functools.partial(setattr, x.bit_generator, "state", x.bit_generator.state)
        if hasattr(x, "set_state"):
            return functools.partial(x.set_state, x.get_state())
    return None


def _refill(x: Any, before: Any) -> None:
    if isinstance(x, dict):
        if list(x) != list(before) or any(x[k] is not v for k, v in before.items()):
            dict.clear(x)
            dict.update(x, before)
    elif isinstance(x, list):
        if len(x) != len(before) or any(a is not b for a, b in zip(x, before, strict=True)):
            list.__setitem__(x, slice(None), before)
    elif isinstance(x, set):
        if x != before:
            x.clear()
            x.update(before)
    elif len(x) != len(before) or any(a is not b for a, b in zip(x, before, strict=True)):
        x.clear()
        x.extend(before)


def _may_call(x: Any) -> bool:
    """Whether a module's attribute is, or holds, functions: hooks are kept in dicts."""
    if isinstance(x, dict):
        return any(map(_may_call, x.values()))
    return isinstance(x, types.FunctionType) or _inner_functions(x) is not None


def _inner_functions(x: Any) -> list[Any] | None:
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


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _names(inner)


def _is_known(x: Any) -> bool:
    """Whether a function, class or module is of a library whose functions keep nothing that matters."""
    name = x.__name__ if isinstance(x, types.ModuleType) else getattr(x, "__module__", None)
    return (name or "").partition(".")[0] in _LIBRARIES


__all__ = ["Generators", "put_back", "untraced"]
