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
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, MutableMapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from espalier.blocks import parameters_in
from espalier.device import get_rng_state, is_accelerator, set_rng_state
from espalier.tensor.names import MOST, MOST_HELD, held_by, inner_functions, is_known, own, tables_of
from espalier.torch_private import HOOKS, disable_modes, hooks_of_all_modules, parametrized_values, raw

_CONTAINERS = (dict, list, set, deque)


@contextmanager
def names_put_back(*modules: nn.Module, leaves: bool = True) -> Iterator[None]:
    """After it, what the functions of the modules' classes, and their hooks, use by name is as before.

    That are numbers, containers, tensors and generators: closed over, globals, attributes of classes.

    Args:
        leaves: what the modules have themselves is left, though a name leads to it: that of a list of all
            that there are of a class, say.
    """
    traces = _Traces({id(part) for module in modules for part in module.modules()} if leaves else ())
    for module in modules:
        for part in module.modules():
            traces.note(type(part))
            traces.note([x for x in vars(part).values() if _may_call(x)])
    try:
        yield
    finally:
        traces.undo()


@contextmanager
def untraced(*modules: nn.Module) -> Iterator[None]:
    """While open, a run of modules, or of copies of them, leaves no traces outside of these.

    After it, the generators of Python, NumPy and torch (that of the modules' device, too) are as before. So
    is what the functions of the modules' classes, their hooks, and what these call use by name: numbers,
    containers, tensors and generators that they close over, globals, attributes of classes. torch's dispatch
    modes, and hooks that are called for every module, do not see the run. What is not put back: files,
    iterators, the insides of objects without ``__dict__``, and of libraries.
    """
    with ExitStack() as stack:
        stack.enter_context(names_put_back(*modules, leaves=False))
        stack.callback(Generators().restore)
        stack.enter_context(_torch_generators(modules))
        for hooks in hooks_of_all_modules(HOOKS):
            stack.enter_context(_emptied(hooks))
        stack.enter_context(_emptied(parametrized_values()))
        stack.enter_context(disable_modes())
        yield


@contextmanager
def _torch_generators(modules: Iterable[nn.Module]) -> Iterator[None]:
    devices = {p.device for m in modules for p in parameters_in(m) if is_accelerator(p.device)}
    states = [(device, get_rng_state(device)) for device in devices]
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            for device, state in states:
                set_rng_state(device, state)


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
    """What is to be put back; ``left``: what is not, by ``id``."""

    def __init__(self, left: Collection[int]) -> None:
        self._left = left
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
        while waiting and len(self._seen) < MOST:
            x = waiting.pop()
            if id(x) not in self._seen and not isinstance(x, int | float | str | bytes | type(None)):
                self._seen[id(x)] = x
                waiting += self._noted(x)

    def _noted(self, x: Any) -> list[Any]:
        if isinstance(x, types.FunctionType):
            return [] if is_known(x) else self._of_function(x)
        if isinstance(x, type):
            return [] if is_known(x) else self._of_class(x)
        inner = inner_functions(x)
        if inner is not None:
            return inner
        if isinstance(x, tuple | frozenset):
            return list(x)
        if (back := put_back(x)) is not None:
            self._undo.append(back)
            held = dict.values(x) if isinstance(x, dict) else x if isinstance(x, _CONTAINERS) else ()
            return list(held)
        if isinstance(x, torch.Tensor):
            self._of_tensor(x)
        elif (
            id(x) not in self._left
            and hasattr(x, "__dict__")
            and (isinstance(x, nn.Module) or not is_known(type(x)))
        ):
            return [vars(x), type(x)]
        return []

    def _of_function(self, f: types.FunctionType) -> list[Any]:
        values = [f.__defaults__, f.__kwdefaults__]
        for _, table, names in tables_of(f):
            for name in names:
                values += self._of_name(table, name)
        return values

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


def put_back(x: Any) -> Callable[[], Any] | None:
    """What brings a container, an array, or a generator to where it is now; None of others."""
    if isinstance(x, _CONTAINERS):
        copy_of_it = _held(x) if isinstance(x, dict) else set(x) if isinstance(x, set) else list(x)
        return functools.partial(_refill, x, copy_of_it)
    if is_array(x):
        return functools.partial(_write, x, x.copy())
    if (found := generator_state(x)) is not None:
        set_state, state = found
        return functools.partial(set_state, state)
    return None


def generator_state(x: Any) -> tuple[Callable[[Any], Any], Any] | None:
    """What sets the state of a generator of random numbers, and its state now; None of others."""
    if isinstance(x, random.Random) and not isinstance(x, random.SystemRandom):
        return x.setstate, x.getstate()
    if isinstance(x, torch.Generator):
        return x.set_state, x.get_state()
    if type(x).__module__.startswith("numpy.random"):
        if hasattr(x, "bit_generator"):
            return functools.partial(setattr, x.bit_generator, "state"), x.bit_generator.state
        if hasattr(x, "set_state"):
            return x.set_state, x.get_state()
    return None


def put_back_held(x: Any, seen: dict[int, Any]) -> Callable[[], Any] | None:
    """The same of an object of the program's own, and of what it holds.

    Args:
        seen: objects that were met before, by id: they are put back once.
    """
    held = held_by(x)
    if held is None or id(x) in seen or len(seen) > MOST_HELD:
        return None
    seen[id(x)] = x
    inner = [put_back(y) or put_back_held(y, seen) for y in held.values()]

    def back() -> None:
        for key in held_by(x) or {}:
            if key not in held:
                object.__delattr__(x, key)
        for key, y in held.items():
            if own(x, key, held) is not y:
                object.__setattr__(x, key, y)
        for put in inner:
            if put is not None:
                put()

    return back


def may_change(x: Any) -> bool:
    """Whether it is what :func:`put_back` or :func:`put_back_held` puts back."""
    return put_back(x) is not None or held_by(x) is not None


def is_array(x: Any) -> bool:
    """Whether it is one of NumPy's arrays."""
    return type(x).__module__ == "numpy" and type(x).__name__ == "ndarray"


def _write(x: Any, before: Any) -> None:
    if x.flags.writeable:
        x[...] = before


def _held(x: dict[Any, Any]) -> dict[Any, Any]:
    """What a dict holds; of a class of its own it may give something else (transformers' ``ACT2FN`` does)."""
    return {k: dict.__getitem__(x, k) for k in list(x)}


def _refill(x: Any, before: Any) -> None:
    if isinstance(x, dict):
        now = _held(x)
        if list(now) != list(before) or any(now[k] is not v for k, v in before.items()):
            kind: Any = OrderedDict if isinstance(x, OrderedDict) else dict
            kind.clear(x)
            for k, v in before.items():
                kind.__setitem__(x, k, v)
    elif isinstance(x, set):
        if x != before:
            x.clear()
            x.update(before)
    elif len(x) != len(before) or any(a is not b for a, b in zip(x, before, strict=True)):
        if isinstance(x, list):
            list.__setitem__(x, slice(None), before)
        else:
            x.clear()
            x.extend(before)


def _may_call(x: Any) -> bool:
    """Whether a module's attribute is, or holds, functions: hooks are kept in dicts."""
    if isinstance(x, dict):
        return any(map(_may_call, x.values()))
    return isinstance(x, types.FunctionType) or inner_functions(x) is not None
