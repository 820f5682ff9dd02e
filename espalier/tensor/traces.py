"""That a run of a program beside the user's own leaves no traces outside of the copy that it runs on.

A copy of a module shares with it the generators of random numbers, and what its functions reach by name: what
they close over, globals, attributes of classes. All that is put back.
"""

from __future__ import annotations

import argparse
import builtins
import contextlib
import copy
import enum
import functools
import random
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from espalier.blocks import parameters_in
from espalier.device import get_rng_state, is_accelerator, set_rng_state
from espalier.tensor.dtensor import DETACHED, set_by_program
from espalier.torch_private import (
    HOOKS,
    TABLES,
    call_as_written,
    disable_modes,
    hooks_of_all_modules,
    lazy_clone,
    memory_id,
    raw,
)

_LIBRARIES = sys.stdlib_module_names | {"torch", "numpy", "espalier", "transformers", "torchvision", "timm"}
_MOST = 100_000
_CONTAINERS = (dict, list, set, deque)


@contextmanager
def names_put_back(*modules: nn.Module) -> Iterator[None]:
    """After it, what the functions of the modules' classes, and their hooks, use by name is as before.

    That are numbers, containers, tensors and generators: closed over, globals, attributes of classes.
    """
    traces = _Traces()
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
        stack.enter_context(names_put_back(*modules))
        stack.callback(Generators().restore)
        stack.enter_context(_torch_generators(modules))
        for hooks in hooks_of_all_modules(HOOKS):
            stack.enter_context(_emptied(hooks))
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
            return [] if is_known(x) else self._of_function(x)
        if isinstance(x, type):
            return [] if is_known(x) else self._of_class(x)
        inner = _inner_functions(x)
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
        elif hasattr(x, "__dict__") and (isinstance(x, nn.Module) or not is_known(type(x))):
            return [vars(x), type(x)]
        return []

    def _of_function(self, f: types.FunctionType) -> list[Any]:
        values = [f.__defaults__, f.__kwdefaults__]
        for cell in f.__closure__ or ():
            values += self._of_name(Cell(cell), "cell_contents")
        names = set(names_in(f.__code__))
        for name in names:
            values += self._of_name(f.__globals__, name)
        for module in [x for x in values if isinstance(x, types.ModuleType) and not is_known(x)]:
            for name in names & vars(module).keys():
                values += self._of_name(vars(module), name)
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


def put_back(x: Any) -> Callable[[], Any] | None:
    """What brings a container, an array, or a generator to where it is now; None of others."""
    if isinstance(x, _CONTAINERS):
        copy_of_it = _held(x) if isinstance(x, dict) else set(x) if isinstance(x, set) else list(x)
        return functools.partial(_refill, x, copy_of_it)
    if isinstance(x, random.Random):
        return functools.partial(x.setstate, x.getstate())
    if isinstance(x, torch.Generator):
        return functools.partial(x.set_state, x.get_state())
    if is_array(x):
        return functools.partial(_write, x, x.copy())
    if type(x).__module__.startswith("numpy.random"):
        if hasattr(x, "bit_generator"):
            return functools.partial(setattr, x.bit_generator, "state", x.bit_generator.state)
        if hasattr(x, "set_state"):
            return functools.partial(x.set_state, x.get_state())
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
            if getattr(x, key, held) is not y:
                object.__setattr__(x, key, y)
        for put in inner:
            if put is not None:
                put()

    return back


def made_in(hook: Any, *packages: str) -> bool:
    """Whether a function, or an object that can be called, is of one of these packages."""
    return (getattr(hook, "__module__", None) or "").partition(".")[0] in packages


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
        while waiting and len(self._seen) < _MOST:
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

    def now(self) -> list[Any]:
        """The values that stand there."""
        return [_value_in(table, name) for _, table, name in self.places]

    def _found(self, x: Any) -> Iterable[Any]:
        if not isinstance(x, types.FunctionType | type):
            return _inner_functions(x) or ()
        if is_known(x):
            return ()
        if isinstance(x, type):
            of_class = [name for name in vars(x) if not name.startswith("__")]
            return [*self._noted(x, vars(x), of_class), *x.__bases__]
        values, names = [], set(names_in(x.__code__))
        for cell in x.__closure__ or ():
            values += self._noted(cell, Cell(cell), ["cell_contents"])
        values += self._noted(x.__globals__, x.__globals__, names)
        for name in names:
            module = x.__globals__.get(name)
            if isinstance(module, types.ModuleType) and not is_known(module):
                values += self._noted(module, vars(module), names)
        return values

    def _noted(self, owner: Any, table: Any, names: Iterable[str]) -> list[Any]:
        """Note what stands there; gives the functions and classes among it."""
        inner = []
        for name in names:
            value = _value_in(table, name)
            if isinstance(value, types.FunctionType | type) or _inner_functions(value) is not None:
                inner.append(value)
            elif value is not ABSENT and not isinstance(value, types.ModuleType | nn.Module):
                self._places[id(owner), name] = (owner, table), name
        return inner


def _value_in(table: Any, name: str) -> Any:
    return table[name] if name in table else ABSENT  # noqa: SIM401 - a cell has no get()


def may_change(x: Any) -> bool:
    """Whether it is what :func:`put_back` or :func:`put_back_held` puts back."""
    return put_back(x) is not None or held_by(x) is not None


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
    held = {key: getattr(x, key) for key in slots if hasattr(x, key)}
    return {**held, **getattr(x, "__dict__", {})}


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


# ---- copies of models to look at: they share nothing with the user's own, but memory while nobody writes


Stand = Callable[[torch.Tensor], torch.Tensor | None]
Instead = Callable[[nn.Module], Mapping[str, Any]]
ABSENT = object()


class NotCopiedError(ValueError):
    """A model cannot be copied, so that nothing can be looked at without traces in it."""


class Apart:
    """A copy of a module, and of what is given beside it.

    Args:
        module: any module whose parameters are plain tensors, unless others stand for them.
        extra: its arguments, say.
        stand: gives what stands in the copy for a parameter or buffer; None: a copy.
        instead: gives for a module the attributes of which the copy has others, namely copies of those given;
            :data:`ABSENT` for none.

    Attributes:
        module, extra: the copies.

    Raises:
        NotCopiedError: one cannot be copied; it names the attribute.
    """

    def __init__(
        self,
        module: nn.Module,
        extra: Any = None,
        stand: Stand = lambda x: None,
        instead: Instead = lambda module: {},
    ) -> None:
        memo: dict[Any, Any] = {DETACHED: True}
        tensors = _Tensors()
        originals: list[Any] = [*parameters_in(module), *module.buffers()]
        other_attributes = [instead(part) for part in module.modules()]
        for part, attributes in zip(module.modules(), other_attributes, strict=True):
            memo.update({id(vars(part)[name]): None for name in attributes if name in vars(part)})
        with torch.no_grad():
            for x in originals:
                other = stand(x)
                if other is not None:
                    vars(other).update(set_by_program(x))
                    memo[id(x)] = other
                elif type(x) in (nn.Parameter, torch.Tensor):
                    memo[id(x)] = tensors.held(x)
        try:
            with torch.no_grad(), tensors:
                self.module = copy.deepcopy(module, memo)
                for part, attributes in zip(self.module.modules(), other_attributes, strict=True):
                    for name, value in attributes.items():
                        if value is ABSENT:
                            vars(part).pop(name, None)
                        else:
                            vars(part)[name] = copy.deepcopy(value, memo)
                self.extra = copy.deepcopy(extra, memo)
        except Exception as error:
            raise NotCopiedError(_refused(module, error)) from error
        ids = {id(x) for x in originals}
        if self.module is module or any(id(x) in ids for x in parameters_in(self.module)):
            raise NotCopiedError(
                f"{type(module).__name__} cannot be copied: a __deepcopy__ in it gives the same parameters."
            )
        with torch.no_grad(), tensors:
            rebound = _Rebound(memo)
            for part in self.module.modules():
                rebound.attributes(part)
        run_as_written(self.module)
        originals += memo.get(id(memo), ())
        self._originals = {id(memo[id(x)]): x for x in originals if memo.get(id(x)) is not None}
        self._memo, self._tensors = memo, tensors  # kept, so that no id names two

    def original(self, x: Any) -> Any:
        """What a part of the copy is a copy of; itself if it is none."""
        return self._originals.get(id(x), x)

    def forget(self) -> None:
        """Let go of the originals, and share no memory with them: the copy goes on alone."""
        self._originals.clear()
        self._memo.clear()  # tensors in it may hold the graph that made them
        self._tensors.part()

    def release(self) -> None:
        """Let go of the copy: its parameters and buffers are emptied, whoever holds them."""
        with torch.no_grad(), raw():
            for x in self._tensors.copies:
                x.data = torch.empty(0, dtype=x.dtype, device=x.device)
        self.forget()


@contextmanager
def apart(module: nn.Module, extra: Any = None, *how: Any, **more: Any) -> Iterator[Apart]:
    """A copy of a module, to be run while this is open: see :class:`Apart`, :func:`~.traces.untraced`."""
    with untraced(module):
        twin = Apart(module, extra, *how, **more)
        try:
            yield twin
        finally:
            twin.release()


def run_as_written(module: nn.Module) -> list[str]:
    """Let modules that ``torch.compile`` compiles run uncompiled, in place; gives their names."""
    return [name for name, part in module.named_modules() if call_as_written(part)]


def on_meta(x: torch.Tensor) -> torch.Tensor:
    """Stands for a parameter or buffer: its shape alone."""
    with raw():
        bare = torch.empty_like(x, device="meta")
    return nn.Parameter(bare, x.requires_grad) if isinstance(x, nn.Parameter) else bare


class _Tensors(TorchFunctionMode):
    """Copies the tensors that ``deepcopy`` meets: also those that are not leaves, as leaves.

    Copies share memory with what they are copies of until one of both is written to, where torch can do that;
    what shares memory goes on to.
    """

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self.copies: list[torch.Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__deepcopy__ and type(args[0]) is torch.Tensor:
            x, memo = args
            copied = self.of(x).requires_grad_(x.requires_grad)
            copied.__dict__.update(copy.deepcopy(vars(x), memo))
            return copied
        return func(*args, **(kwargs or {}))

    def held(self, x: torch.Tensor) -> torch.Tensor:
        """A copy of a parameter or buffer."""
        copied = self.of(x).requires_grad_(x.requires_grad)
        if isinstance(x, nn.Parameter):
            copied = nn.Parameter(copied.detach(), x.requires_grad)
        vars(copied).update(set_by_program(x))
        self.copies.append(copied)
        return copied

    def part(self) -> None:
        """Share no memory any more: torch cannot resize what is shared so, and ZeRO does."""
        storages, self._storages = list(self._storages.values()), {}
        while storages:
            storage, twin = storages.pop()
            del twin
            if storage.nbytes() and storage.device.type != "meta":
                torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).data_ptr()

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """A copy of a tensor, without its history."""
        x = x.detach()
        if x.layout is not torch.strided or x.is_conj() or x.is_neg():
            return x.clone()
        storage = x.untyped_storage()
        if memory_id(storage) not in self._storages:
            whole = torch.empty(0, dtype=torch.uint8, device=x.device).set_(storage)
            twin = None
            # what is not resizable (a file's, NumPy's) has no allocator: torch crashes when it parts them
            if storage.resizable():
                with contextlib.suppress(RuntimeError):  # memory that torch has not made: shared, say
                    twin = lazy_clone(whole)
            if twin is None:
                twin = whole.clone()
            self._storages[memory_id(storage)] = storage, twin.untyped_storage()
            if x.is_meta and (values := getattr(storage, "values", None)) is not None:
                twin.untyped_storage().values = values.clone()  # type: ignore[attr-defined]
        twin_storage = self._storages[memory_id(storage)][1]
        bare = torch.empty(0, dtype=x.dtype, device=x.device)
        return bare.set_(twin_storage, x.storage_offset(), x.size(), x.stride())


class _Rebound:
    """Lets the functions among a copy's attributes (hooks, say) close over copies, too."""

    def __init__(self, memo: dict[int, Any]) -> None:
        self._memo = memo
        self._known: dict[int, tuple[Any, Any]] = {}

    def attributes(self, module: nn.Module) -> None:
        """Those of a module."""
        for name, value in vars(module).items():
            if name not in TABLES and (other := self._of(value)) is not value:
                vars(module)[name] = other

    def _of(self, x: Any) -> Any:
        if isinstance(x, types.FunctionType):
            return self._function(x)
        if isinstance(x, types.MethodType) and isinstance(x.__func__, types.FunctionType):
            func = self._function(x.__func__)
            return x if func is x.__func__ else types.MethodType(func, x.__self__)
        if type(x) is functools.partial:
            func = self._of(x.func)
            return x if func is x.func else functools.partial(func, *x.args, **x.keywords)
        if isinstance(x, dict):
            for key, value in x.items():
                if (other := self._of(value)) is not value:
                    x[key] = other
        elif type(x) is list:
            x[:] = map(self._of, x)
        return x

    def _function(self, f: types.FunctionType) -> types.FunctionType:
        if id(f) in self._known:
            return self._known[id(f)][1]
        if not (f.__closure__ or f.__defaults__ or f.__kwdefaults__):
            return f
        cells = tuple(types.CellType() for _ in f.__closure__ or ())
        twin = types.FunctionType(f.__code__, f.__globals__, f.__name__, None, cells or None)
        self._known[id(f)] = f, twin
        twin.__dict__.update(vars(f))
        twin.__module__, twin.__qualname__ = f.__module__, f.__qualname__
        twin.__defaults__ = self._copied(f.__defaults__)
        twin.__kwdefaults__ = self._copied(f.__kwdefaults__)
        for cell, original_cell in zip(cells, f.__closure__ or (), strict=True):
            try:
                cell.cell_contents = self._copied(original_cell.cell_contents)
            except ValueError:
                continue  # it is empty
        return twin

    def _copied(self, x: Any) -> Any:
        try:
            return self._of(copy.deepcopy(x, self._memo))
        except Exception:
            return x  # it is shared


def _refused(module: nn.Module, error: Exception) -> str:
    said = f"{type(module).__name__} cannot be copied"
    for name, part in module.named_modules():
        for key, value in vars(part).items():
            if key in TABLES:
                continue
            try:
                with torch.no_grad(), _Tensors():
                    copy.deepcopy(value)
            except Exception as met:
                at = f"{name}.{key}" if name else key
                return f"{said}, for its attribute {at} ({type(value).__name__}) cannot be: {met}"
    return f"{said}: {type(error).__name__}: {error}"
