"""What a forward may change beside its outputs, as it was: for runs that find it so, or leave no trace."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from espalier.tensor.dtensor import plain
from espalier.tensor.loans import StandIn, await_values, written_mark
from espalier.tensor.names import made_in
from espalier.tensor.traces import Generators, put_back, put_back_held
from espalier.torch_private import (
    forward_hooks,
    own_buffers,
    own_parameters,
    raw,
    set_versions,
    setter,
    version_of,
)

_set_data = setter("data")
Slot = tuple[dict[str, Any], str, Any]
# attributes that no forward sets
_INTERNAL = vars(nn.Module()).keys() - {"training"} | {"forward"}


class Before:
    """What a block's forward may write to beside its outputs, as it is now.

    Values of parameters and buffers; attributes of modules whose forward is not torch's, what lists, dicts,
    sets and objects of the program's among these hold, and the states of generators; those of Python's and
    NumPy's own. And the tensors that stand in the place of parameters (``torch.func.functional_call``).

    Args:
        tensors: the parameters and buffers, by name.
        written: of those that the block is known to write to, the names; None: all may be.
        slots: what stands where parameters do: each dict, its key, and the tensor.
        whole: whether attributes with a history count, too, whoever has put them there.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        tensors: Mapping[str, torch.Tensor],
        written: set[str] | None,
        slots: list[Slot],
        whole: bool = False,
    ) -> None:
        self._slots = slots
        attributes = [vars(m) for m in modules if not is_of_torch(m)]
        tables = [*attributes, *(own_buffers(m) for m in modules if own_buffers(m) or not is_of_torch(m))]
        self._entries = [(table, _Entries(table, whole)) for table in tables]
        inner = [x for table in attributes for name, x in table.items() if name not in _INTERNAL]
        self._inner = _put_back(inner)
        self._hooks = [(hooks, frozenset(hooks)) for m in modules for hooks in forward_hooks(m)]
        self._generators: Generators | None = Generators()
        # a parameter off the device is gathered within the block; who writes to it has it kept by its owner
        tensors = {name: x for name, x in tensors.items() if not _is_elsewhere(x)}
        # to what was made in inference mode nothing is written any more, but it may be given other data
        self._inferred = {name: (x, _data_of(x)) for name, x in tensors.items() if x.is_inference()}
        tensors = {name: x for name, x in tensors.items() if name not in self._inferred}
        self._tensors, self._known = tensors, written
        self._late: dict[str, torch.Tensor] = {}
        if written is None:
            self._held = dict(tensors)
        else:
            self._held = {name: tensors[name] for name in written if name in tensors}
        self._values = values_of(self._held)
        self._marks = {name: written_mark(x) for name, x in tensors.items()}

    def settle(self) -> set[str]:
        """After the first computation: the names of what was written to; what was not needs not be kept."""
        self._slots = [slot for slot in self._slots if slot[0].get(slot[1]) is slot[2]]
        for table, then in self._entries:
            then.settle(table)
        if self._generators is not None and self._generators.as_now():
            self._generators = None
        self._inferred = {
            name: (x, data) for name, (x, data) in self._inferred.items() if not x.is_inference()
        }
        if self._known is not None:
            late = {name: x for name, x in self._tensors.items() if written_mark(x) != self._marks[name]}
            # what they were is not known: so they are left as the first computation leaves them, and no more
            self._late = {name: x for name, x in late.items() if name not in self._held}
            return self._known | self._late.keys() | self._inferred.keys()
        with raw():
            now = {name: plain(x.detach()) for name, x in self._held.items()}
        before = self._values
        # of other shapes are parameters that are gathered within the block
        same = {n: x for n, x in now.items() if x.shape == before[n].shape}
        # what is written may have had that value: a teacher that begins as its student
        marked = {n for n in same if written_mark(self._held[n]) != self._marks[n]}
        names = marked | {n for n, x in same.items() if not torch.equal(x, before[n])}
        self._held = {name: self._held[name] for name in names}
        self._values = {name: self._values[name] for name in names}
        return names | self._inferred.keys()

    def swap(self) -> Callable[[], None]:
        """Let all be as it was; gives what puts it back as it is now."""
        slots = [(table, key, table.get(key)) for table, key, x in self._slots if table.get(key) is not x]
        entries = [(table, _Entries(table, whole=True)) for table, _ in self._entries]
        inner = _put_back(x for x, _ in self._inner)
        drawn = None if self._generators is None else Generators()
        before = {**self._held, **self._late}
        values = values_of(before)
        given = [(x, _data_of(x)) for x, _ in self._inferred.values()]
        with raw():
            versions = {x: version_of(x) for x in before.values() if not x.is_inference()}
        hooks = [(hooks, dict(hooks)) for hooks, _ in self._hooks]
        self.put()

        def back() -> None:
            put_values(before, values)
            _give_data(given)
            if set_versions is not None:  # else torch refuses what has saved them meanwhile: a penalty
                with raw():
                    set_versions(tuple(versions), tuple(versions.values()))
            for held, later in hooks:
                _take_new(held, later)
                held.update({key: hook for key, hook in later.items() if key not in held})
            if drawn is not None:
                drawn.restore()
            for _, put in inner:
                put()
            for table, now in entries:
                now.put(table)
            _stand(slots)

        return back

    def put(self) -> None:
        """Let all be as it was."""
        if any(table.get(key) is not x for table, key, x in self._slots):
            _stand(self._slots)
        for table, then in self._entries:
            then.put(table)
        for _, put in self._inner:
            put()
        for hooks, known in self._hooks:  # what was put with a flag that says so goes with it
            _take_new(hooks, known)
        if self._generators is not None:
            self._generators.restore()
        put_values(self._held, self._values)
        _give_data(self._inferred.values())


def _take_new(hooks: dict[int, Any], known: Container[int]) -> None:
    """Take away the hooks of a module that are new, but for this library's."""
    if any(key not in known for key in hooks):
        for key in [k for k, hook in hooks.items() if k not in known and not made_in(hook, "espalier")]:
            del hooks[key]


def _put_back(values: Iterable[Any]) -> list[tuple[Any, Callable[[], Any]]]:
    """What brings each value to where it is now, of those that are not what they are for good."""
    seen: dict[int, Any] = {}
    return [(x, back) for x in values if (back := put_back(x) or put_back_held(x, seen)) is not None]


def is_of_torch(module: nn.Module) -> bool:
    """Whether it is one of torch's own modules, which remember in buffers alone, but by hooks of others."""
    if not type(module).__module__.startswith("torch."):
        return False
    hooks = [hook for of in forward_hooks(module) for hook in of.values()]
    return not hooks or all(made_in(hook, "espalier") for hook in hooks)


class _Entries:
    """What a dict of attributes or buffers has.

    Of values with a history, unless all are asked for as a ``whole``, those that are still there after a
    computation: somebody else has put them there. What the block itself puts there may hang on its past.
    """

    def __init__(self, table: dict[str, Any], whole: bool = False) -> None:
        self._names = frozenset(table)
        with raw():
            held = {name: x for name, x in table.items() if name not in _INTERNAL}
            historic = {} if whole else {name: x for name, x in held.items() if _has_history(x)}
        self._values = {name: x for name, x in held.items() if name not in historic} if historic else held
        self._with_history = historic

    def settle(self, table: dict[str, Any]) -> None:
        """After a computation."""
        if self._with_history:
            self._values |= {name: x for name, x in self._with_history.items() if table.get(name) is x}
            self._with_history = {}

    def put(self, table: dict[str, Any]) -> None:
        """Let it have that again."""
        for name in table.keys() - self._names:
            del table[name]
        for name, x in self._values.items():
            if table.get(name, _INTERNAL) is not x:
                table[name] = x


def _has_history(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.requires_grad


def _stand(slots: Sequence[Slot]) -> None:
    """Let tensors stand in their places."""
    for table, key, x in slots:
        if x is not None:
            table[key] = x
        else:
            table.pop(key, None)


def reached(block: nn.Module) -> list[nn.Module]:
    """The modules in a block, and those that it keeps in lists and dicts, as no submodules."""
    modules: dict[nn.Module, None] = {}
    waiting = [block]
    while waiting:
        module = waiting.pop()
        if module not in modules:
            modules[module] = None
            waiting += module.children()
            for x in vars(module).values():
                if isinstance(x, list | tuple | dict):
                    inner = x.values() if isinstance(x, dict) else x
                    waiting += [m for m in inner if isinstance(m, nn.Module)]
    return list(modules)


def places(modules: Sequence[nn.Module]) -> list[tuple[str, dict[str, Any], str]]:
    """Where modules hold parameters, buffers and other tensors: of each a name, the dict, its name there.

    Not those with a history: a forward makes them, and does not write to them.
    """
    places, seen = [], set()
    for i, module in enumerate(modules):
        beside = {} if is_of_torch(module) else vars(module)
        for table in (own_parameters(module), own_buffers(module), beside):
            for key, x in table.items():
                if not isinstance(x, torch.Tensor) or (table is beside and _has_history(x)):
                    continue
                if id(x) not in seen:
                    seen.add(id(x))
                    places.append((f"{i}.{key}", table, key))
    return places


def slots(modules: Sequence[nn.Module]) -> list[tuple[dict[str, Any], str]]:
    """Where tensors stand that may be swapped for others, as parameters or in their place."""
    slots = [
        (own_parameters(m), key) for m in modules for key, x in own_parameters(m).items() if x is not None
    ]
    torchs = (vars(m) for m in modules if is_of_torch(m))
    return slots + [
        (table, key) for table in torchs for key, x in table.items() if isinstance(x, torch.Tensor)
    ]


def _is_elsewhere(x: torch.Tensor) -> bool:
    source = getattr(x, "_source", None)
    return isinstance(source, StandIn) and source.is_elsewhere


def values_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A copy of what this rank has of tensors."""
    await_values(tensors.values())
    with raw(), torch.no_grad():
        return {name: plain(x.detach()).clone() for name, x in tensors.items()}


def _data_of(x: torch.Tensor) -> torch.Tensor:
    """The memory that this rank has of a tensor."""
    with raw():
        return plain(x.detach())


def _give_data(tensors: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Let tensors have memory that they had."""
    with raw(), torch.no_grad():
        for x, data in tensors:
            _set_data(x, data)


def put_values(tensors: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor]) -> None:
    """Let tensors have values that they had."""
    await_values(tensors.values())
    with raw(), torch.no_grad():
        for name, value in values.items():
            here = plain(tensors[name].data)
            if here.shape == value.shape:  # else it is a parameter that is gathered within the block
                here.copy_(value)  # what is saved for backward does not count it as written to
