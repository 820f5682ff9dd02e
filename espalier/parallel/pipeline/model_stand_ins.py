"""What stands for a model's parameters while it is traced, and what of the model is another afterwards."""

from __future__ import annotations

import pickle
import sys
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import nn

from espalier.blocks import named_parameters_in
from espalier.meanwhile import having
from espalier.parallel.pipeline.arguments import Ref, leaves, mapped
from espalier.parallel.pipeline.objects import some
from espalier.parallel.pipeline.observed import Observed
from espalier.parallel.pipeline.record import SplitError, Trace
from espalier.tensor import DTensor, full_tensor
from espalier.tensor.copies import Apart, apart
from espalier.tensor.names import ABSENT, MOST_HELD, Reads, is_known, made_in, shown_by
from espalier.tensor.observers import tell
from espalier.tensor.traces import generator_state, is_array, may_change
from espalier.torch_private import (
    HOOK_OPTIONS,
    HOOKS,
    STATE_HOOKS,
    TABLES,
    FakeTensor,
    FakeTensorMode,
    forward_hooks,
    own_buffers,
    own_parameters,
    raw,
    version_of,
)
from espalier.trees import tensors_in

DICTS = (dict, OrderedDict, defaultdict, Counter)  # what modules may remember things in


class ModelStandIns:
    """A model as its author made it: made before anything is laid out, hooked in or replaced.

    Args:
        model: the model.
        device: on which stand-ins claim to be.
        dtype: of parameters' stand-ins, if these are floats; None: their own.
    """

    def __init__(self, model: nn.Module, device: torch.device, dtype: torch.dtype | None = None) -> None:
        self.model, self.device, self._dtype = model, device, dtype
        self._forwards = {id(m): vars(m)["forward"] for m in model.modules() if "forward" in vars(m)}

    def hooked(self, module: nn.Module) -> bool:
        """Whether a module has hooks, but for this library's and transformers' own."""
        hooks = [hook for of in hooks_of(module) for hook in of.values()]
        if module is self.model:  # whose arguments and output are known to all who look
            hooks = [hook for hook in hooks if not isinstance(hook, Observed)]
        return any(not made_in(hook, "espalier", "transformers") for hook in hooks)

    @contextmanager
    def apart(self, fake: FakeTensorMode, extra: Any = None) -> Iterator[Apart]:
        """A copy of the model as its author made it, to be run while this is open, and of ``extra``.

        Its parameters are fakes.

        Raises:
            SplitError: it has other parameters.
        """
        with apart(self.model, extra, partial(self._stand, fake), self._as_made) as twin:
            names, others = ([n for n, _ in named_parameters_in(m)] for m in (self.model, twin.module))
            if names != others:
                raise SplitError(
                    f"{type(self.model).__name__} cannot be split: a copy of it (copy.deepcopy) is made "
                    "anew, with parameters of other names. A model is split by what a copy of it does."
                )
            with uncached(caching(twin.module.modules()), extra):
                yield twin

    @staticmethod
    def snapshot(model: nn.Module) -> dict[str, dict[str, Any]]:
        """The Python attributes of all modules, and what their buffers are, for :meth:`changes`."""
        marks = Marks()
        return {name: _remembered(m, marks) for name, m in model.named_modules()}

    @staticmethod
    def changes(model: nn.Module, before: Mapping[str, Mapping[str, Any]]) -> dict[str, list[str]]:
        """The names of attributes and buffers that are others now, by module.

        Raises:
            SplitError: a module was made meanwhile.
        """
        changed, marks = {}, Marks()
        for name, m in model.named_modules():
            if name not in before:
                raise SplitError(
                    f"{name!r} ({type(m).__name__}) was made within the forward pass: stages hold the "
                    "modules that the model had when it was divided. Let it have them all before the first "
                    "batch (call what makes it before espalier.prepare), or train under a plan without pipe."
                )
            was, now = before[name], _remembered(m, marks)
            keys = [k for k in {**was, **now} if k not in was or k not in now or not equal(was[k], now[k])]
            if keys:
                changed[name] = keys
        return changed

    @staticmethod
    def sharing(model: nn.Module, changes: Mapping[str, Iterable[str]]) -> dict[str, set[str]]:
        """For modules whose attributes have changed, all that hold one of these objects."""
        holders: dict[int, set[str]] = {}
        for name, m in model.named_modules():
            for key, x in vars(m).items():
                if key not in TABLES and (isinstance(x, torch.Tensor) or may_change(x)):
                    holders.setdefault(id(x), set()).add(name)
        sharing: dict[str, set[str]] = {}
        for name, keys in changes.items():
            attributes = vars(model.get_submodule(name))
            sharing[name] = set().union(*(holders.get(id(attributes.get(key)), set()) for key in keys))
        return {name: holding for name, holding in sharing.items() if len(holding) > 1}

    def _as_made(self, m: nn.Module) -> dict[str, Any]:
        """What a module's author made of it, where this library has put its own."""
        attributes: dict[str, Any] = {}
        for name in HOOKS:
            hooks = vars(m).get(name, {})
            others = {k: hook for k, hook in hooks.items() if not made_in(hook, "espalier")}
            if len(others) < len(hooks):
                attributes[name] = type(hooks)(others)
        now, then = vars(m).get("forward"), self._forwards.get(id(m))
        if now is not then:
            attributes["forward"] = ABSENT if then is None else then
        return attributes

    def _stand(self, fake: FakeTensorMode, x: torch.Tensor) -> torch.Tensor:
        """What stands for a parameter or buffer."""
        if not isinstance(x, nn.Parameter):
            return self._copied(x, fake)
        cast = self._dtype is not None and x.is_floating_point()
        stand = self._fake(x, fake, self._dtype if cast else None).requires_grad_(x.requires_grad)
        stand._is_param = True
        return stand

    def _fake(self, x: torch.Tensor, fake: FakeTensorMode, dtype: torch.dtype | None = None) -> torch.Tensor:
        # made as torch makes it of an operation, and in a fifth of the time
        bare = torch.empty(tuple(x.shape), dtype=dtype or x.dtype, device="meta")
        return FakeTensor(fake, bare, self.device)

    def _copied(self, b: torch.Tensor, fake: FakeTensorMode) -> torch.Tensor:
        if type(b) is DTensor and not b.is_meta:
            b = full_tensor(b)
        return self._fake(b, fake) if b.is_meta else b.detach().clone().to(self.device)


def caching(modules: Iterable[nn.Module]) -> list[Any]:
    """Configurations of transformers' models that ask for a cache of keys and values.

    A cache is an object that blocks write to, and would have to travel from stage to stage.
    """
    configs = {
        id(c): c for m in modules if getattr(c := getattr(m, "config", None), "use_cache", None) is True
    }
    return list(configs.values())


@contextmanager
def uncached(configs: Sequence[Any], inputs: Any) -> Iterator[None]:
    """While open, a call of models that ask for caches of keys and values, unasked by its inputs, fills none.

    Their masks stay those of a call that fills one: transformers takes positions that begin anew within a row
    for those of several sequences only where there is no cache.
    """
    given = inputs if isinstance(inputs, Mapping) else {}
    unasked = given.get("use_cache") is None and given.get("position_ids") is not None
    masks = sys.modules.get("transformers.masking_utils")
    with ExitStack() as stack:
        for config in configs:
            stack.enter_context(having(config, use_cache=False))
        if configs and unasked and hasattr(masks, "find_packed_sequence_indices"):
            stack.enter_context(having(masks, find_packed_sequence_indices=lambda position_ids: None))
        yield


def _remembered(m: nn.Module, marks: Marks) -> dict[str, Any]:
    """What a forward may set: of tensors, how often they were written to, too; of buffers, which they are."""
    with raw():
        held = {k: marks.of(x) for k, x in vars(m).items() if k not in OF_TORCH}
    return {**held, **own_buffers(m)}


class Marks:
    """What values are like now, to compare with later: with what containers and the program's objects hold.

    Each object is looked at once.

    Args:
        counts: whether of tensors it is told, too, how often they were written to, and of generators of
            random numbers what they have drawn.
    """

    def __init__(self, *, counts: bool = True) -> None:
        self._counts = counts
        self._known: dict[int, Any] = {}  # by id of objects, which stay where they are meanwhile
        self._left = 0

    def of(self, x: Any) -> Any:
        """Of an attribute."""
        self._left = MOST_HELD
        return self._mark(x)

    def _mark(self, x: Any) -> Any:
        if type(x) in _PLAIN:
            return x
        if isinstance(x, torch.Tensor):
            return (x, version_of(x)) if self._counts and not isinstance(x, nn.Parameter) else x
        if type(x) in (list, tuple, deque):
            return [*map(self._mark, x)]
        if is_array(x):
            return x.dtype, x.shape, x.tobytes()
        if type(x) in DICTS:
            return {k: self._mark(y) for k, y in x.items()}
        if type(x) is set:
            return set(x)
        if self._counts and (state := generator_state(x)) is not None:
            drawn = state[1]
            return drawn.numpy().tobytes() if isinstance(drawn, torch.Tensor) else pickle.dumps(drawn)
        held = shown_by(x)
        if held is None:
            return x
        if id(x) not in self._known:
            self._known[id(x)] = type(x)  # where it is within itself
            if hasattr(type(x), "save_pretrained"):
                held = {k: y for k, y in held.items() if k not in _NOTED_BY_A_SAVE}
            self._left -= len(held)
            marked = (type(x), {k: self._mark(y) for k, y in held.items()}) if self._left > 0 else x
            self._known[id(x)] = x if self._left <= 0 else marked
        return self._known[id(x)]


OF_TORCH = frozenset({*TABLES, *HOOKS, *HOOK_OPTIONS, *STATE_HOOKS})  # attributes of modules
# in a configuration of transformers, on the one rank that saves the model; no forward asks for it
_NOTED_BY_A_SAVE = frozenset({"architectures", "dtype"})
_PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size})


def hooks_in(model: nn.Module) -> dict[str, list[int]]:
    """By the names of modules that have any, which hooks their forwards have."""
    found: dict[str, list[int]] = {}
    for name, module in model.named_modules():
        before, after = forward_hooks(module)
        if before or after:
            found[name] = [*before, *after]
    return found


def program_hooks(module: nn.Module) -> set[int]:
    """Those of a module's forward, but for this library's and transformers' own."""
    return {
        key
        for hooks in forward_hooks(module)
        for key, hook in hooks.items()
        if not made_in(hook, "espalier", "torch", "transformers")
    }


def hooks_of(module: nn.Module) -> list[Mapping[int, Any]]:
    """What is called before and after a module's forward and backward: torch's own tables."""
    return [vars(module).get(name, {}) for name in HOOKS]


def observed(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Those of modules that have hooks which a program has put there, and no library, nor themselves."""

    def is_of_program(hook: Any) -> bool:
        is_own = isinstance(getattr(hook, "__self__", None), nn.Module) or isinstance(hook, Observed)
        return not is_own and not made_in(hook, "espalier", "torch", "transformers")

    return [m for m in modules if any(is_of_program(h) for of in hooks_of(m) for h in of.values())]


def newly_hooked(model: nn.Module, before: Mapping[str, list[int]]) -> list[str]:
    """The names of modules that have other hooks now than :func:`hooks_in` said."""
    return [name for name, keys in hooks_in(model).items() if keys != before.get(name)]


def is_flag_of_hooks(value: Any, name: str, hooked: Iterable[str]) -> bool:
    """Whether an attribute that a forward has set says, as it seems, that it has put hooks.

    They are those of each model and copy, so that the flag is told to no other, which has none.

    Args:
        name: the module's.
        hooked: the modules that have got hooks.
    """
    return type(value) is bool and any(not name or f"{inner}.".startswith(f"{name}.") for inner in hooked)


def equal(a: Any, b: Any) -> bool:
    """Whether attributes are the same; tensors, if they are one."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if type(a) in (list, tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    if isinstance(a, weakref.ref):  # whose == is that of what they refer to: an operation, of tensors
        return a() is b()
    if type(a) is dict:
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    try:
        return not isinstance(a, torch.Tensor) and bool(a == b)
    except Exception:
        return False


_COMPARED = (int, float, complex, str, type(None), torch.dtype)


def unlike(first: Trace, again: Trace) -> list[str]:
    """The modules that compute something else in a second run: not only what depends on the batch alone."""
    one, other = _by_module(first), _by_module(again)
    return [name for name in one if not equal(one[name], other.get(name))]


def _by_module(trace: Trace) -> dict[str, list[Any]]:
    """What each module's forward does itself, with shapes in the place of tensors."""

    def described(x: Any) -> Any:
        if not isinstance(x, Ref):
            return x if isinstance(x, _COMPARED) else type(x)
        value = trace.values[x.number]
        return "local" if value.local else tuple(value.tensor.shape)

    done: dict[str, list[Any]] = {}
    for op in trace.ops:
        if not op.local:
            name = trace.calls[op.call].name if op.call >= 0 else ""
            given = leaves(mapped(described, (op.args, op.kwargs)))
            done.setdefault(name, []).append([op.func, *given])
    return done


class Outside:
    """What the code of a model's modules finds by name, as it is now: globals, attributes of classes."""

    def __init__(self, model: nn.Module) -> None:
        by_kind: dict[Any, Reads] = {}
        self._read: dict[str, Reads] = {}
        for name, module in model.named_modules():
            has_own = any(isinstance(x, FunctionType) for x in vars(module).values())
            if has_own or not is_known(type(module)):
                kind = module if has_own else type(module)
                self._read[name] = by_kind.setdefault(kind, Reads([module]))
        self._then = self._now()

    def _now(self) -> dict[tuple[int, str], Any]:
        marks = Marks()
        found = {}
        for read in dict.fromkeys(self._read.values()):
            values = zip(read.places, read.now(), strict=True)
            some = [at for at in values if not isinstance(at[1], torch.Generator)]  # see Trace.drawing
            found.update({(id(owner), name): marks.of(x) for (owner, _, name), x in some})
        return found

    def tell_of_tensors(self, changed: Mapping[str, set[str]]) -> None:
        """Tell of what a forward has put there for a loss to take: it comes too late."""
        for key in changed:
            reads = (self._read[name] for name in changed[key])
            values = [table[name] for of in reads for _, table, name in of.places if name == key]
            if any(x.is_floating_point() for x in tensors_in(values, objects=2)):
                tell(
                    f"The model's forward puts tensors into {key!r}, which is none of its attributes. In a "
                    "pipeline the forward runs with loss.backward(): they are not there when the loss is "
                    "made. What belongs to the loss let the forward return, and make the loss of its output."
                )

    def changes(self) -> dict[str, set[str]]:
        """By names of what is another now, the modules whose code finds it."""
        now = self._now()
        changed = {key for key, was in self._then.items() if not equal(was, now.get(key))}
        found: dict[str, set[str]] = {}
        for module, read in self._read.items() if changed else ():
            for _, name in read.keys & changed:
                found.setdefault(name, set()).add(module)
        return found


@contextmanager
def stand_in_values(modules: Iterable[nn.Module]) -> Iterator[dict[torch.Tensor, torch.Tensor]]:
    """While open, the fake parameters of modules have some values: these, by what they stand in for."""
    kept: list[tuple[Any, str, torch.Tensor]] = []
    table: Any
    stood: dict[torch.Tensor, torch.Tensor] = {}
    for m in modules:
        for table in (own_parameters(m), own_buffers(m)):
            for key, x in table.items():
                if isinstance(x, FakeTensor):
                    kept.append((table, key, x))
                    if x not in stood:
                        stood[x] = valued(x).requires_grad_(x.requires_grad)
                    table[key] = stood[x]
    try:
        yield stood
    finally:
        for table, key, x in kept:
            table[key] = x


def valued(x: Any) -> Any:
    """Some values in the place of none."""
    return some(x.shape, x.dtype, x.device) if isinstance(x, FakeTensor) else x
