"""What modules remember of their forwards, in attributes and buffers: set by stages, told to all ranks.

Tensors travel as tensors. What else there is, names, numbers and the tensors' shapes, is pickled on the host,
and sent where it is not as it was after the last pass.
"""

from __future__ import annotations

import pickle
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
from torch import nn

from espalier.comm.collectives import broadcast_
from espalier.comm.control import bytes_of_all, numbers_of_all, speaks_on
from espalier.meanwhile import having
from espalier.mesh import Mesh
from espalier.parallel.pipeline.model_stand_ins import (
    DICTS,
    ModelStandIns,
    hooks_in,
    is_flag_of_hooks,
    newly_hooked,
)
from espalier.parallel.pipeline.record import Trace
from espalier.parallel.pipeline.unset import Hidden
from espalier.tensor import DTensor, full_tensor
from espalier.tensor.before import is_of_torch
from espalier.tensor.loans import written_mark
from espalier.tensor.names import Reads
from espalier.tensor.observers import tell
from espalier.tensor.traces import generator_state, is_array
from espalier.torch_private import own_buffers

_TOLD = (
    torch.Tensor, int, float, complex, bool, str, bytes, type(None), torch.Size, torch.dtype, torch.device,
)  # fmt: skip
_CONTAINERS = (list, tuple, set, deque, *DICTS)
# modules whose generators of random numbers travel by their pickles
_GENERATORS = frozenset({"random", "torch._C", "numpy.random._generator", "numpy.random.mtrand"})
_SMALL = 1 << 16  # bytes of a tensor that shares a message with others
_MUCH = 1 << 25  # bytes of a pass that are told of


class _Gone:
    """In the place of an attribute that was taken away."""


class Place(NamedTuple):
    """Where something is remembered: the module's name, the attribute's or buffer's."""

    module: str
    key: str
    is_buffer: bool


@dataclass(frozen=True)
class _Sent:
    """In the place of a tensor that travels as one."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    is_on_host: bool

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class Snapshot(NamedTuple):
    """What modules remember as a pass begins: what their attributes and buffers are.

    Their hooks; and marks of buffers, where one rank computes all and nobody knows to which it is to write.
    That rank knows of which modules the buffers may be written to without a mark.
    """

    remembered: Mapping[str, Mapping[str, Any]]
    hooks: Mapping[str, list[int]]
    marks: Mapping[str, Any] | None
    unmarked: Collection[str]


def snapshot(model: nn.Module, is_whole: bool, unmarked: Collection[str] = ()) -> Snapshot:
    """What the modules of a model remember now; ``is_whole``: with marks."""
    marks = {name: written_mark(b) for name, b in model.named_buffers()} if is_whole else None
    return Snapshot(ModelStandIns.snapshot(model), hooks_in(model), marks, unmarked)


class Memory:
    """The attributes and buffers that passes set on ranks whose stages have the modules.

    Told are tensors, numbers, names and containers of these. All ranks have whole plain tensors then, without
    a history.

    Args:
        mesh: with the axis ``pipe``.

    Attributes:
        hidden: of what was found to be set, what is asked for too early.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh, self._axis = mesh, mesh.axis("pipe")
        self.hidden = Hidden()
        # what each coordinate along the axis has set in the last pass, pickled
        self._said: list[dict[Place, bytes]] = [{} for _ in range(mesh.shape[self._axis])]
        self._is_kept = True
        self._told: set[tuple[str, str]] = set()  # asked for too early
        self._has_warned = False

    def undone(self) -> AbstractContextManager[None]:
        """While open, who makes passes undoes what they set: tensors need no values elsewhere."""
        return having(self, _is_kept=False)

    def tell(self, model: nn.Module, before: Snapshot, has_failed: bool) -> None:
        """After a pass: all ranks come here.

        Args:
            before: of the model, when the pass began.
            has_failed: whether this rank has: then nobody tells anything.
        """
        here = self._mesh.coordinate[self._axis]
        found = {} if has_failed else _found(model, before)
        if before.marks is not None and not has_failed:
            found |= _written(model, before.marks, before.unmarked)
        if not self._hears({place: self._form(x) for place, x in found.items()}, has_failed):
            return
        told = [{place: pickle.loads(form) for place, form in said.items()} for said in self._said]
        holding = {p: sent for said in told for p, x in said.items() if (sent := _leaves(x, _Sent))}
        set_now = {(place.module, place.key) for values in told for place in values}
        tensors = {(place.module, place.key) for place in holding if not place.is_buffer}
        self.hidden.note(set_now, tensors, is_step=self._is_kept and torch.is_grad_enabled())
        if self._is_kept:
            self._warn_of_asked(set_now)
            self._warn_of_size(holding)
        modules = dict(model.named_modules())
        for i, values in enumerate(told):
            like = [x for value in values.values() for x in _leaves(value, _Sent)]
            if i == here:
                own = [x for value in found.values() for x in _leaves(value, torch.Tensor) if _travels(x)]
                came = iter(self._passed(i, like, [*map(_whole, own)]) if self._is_kept else own)
            else:
                came = iter(self._passed(i, like, None) if self._is_kept else map(self._room, like))
            for place, value in values.items():
                value = _each(partial(self._made, came), value)
                # a part of a tensor on each rank of a stage is the whole one from now on
                if i != here or (self._is_kept and _is_in_parts(place, found[place])):
                    put(modules[place.module], place.key, value, place.is_buffer)

    def tell_buffers(self, model: nn.Module, homes: Mapping[str, int]) -> None:
        """After a pass: buffers that stages have written to get these values on all ranks, which come here.

        Args:
            homes: of each, by name, the coordinate along the axis that has written to it.
        """
        if not self._is_kept:
            return
        here, buffers = self._mesh.coordinate[self._axis], dict(model.named_buffers())
        for home in sorted(set(homes.values())):
            of_home = [x for name, x in buffers.items() if homes.get(name) == home and _travels(x)]
            like = [self._sent(x) for x in of_home]
            came = self._passed(home, like, of_home if here == home else None)
            for x, value in zip(of_home, came, strict=True) if here != home else ():
                with torch.no_grad():
                    x.copy_(value)

    def _hears(self, forms: dict[Place, bytes], has_failed: bool) -> bool:
        """Know what each rank along the axis has set; whether all is well on all ranks of the mesh."""
        mesh, here = self._mesh, self._mesh.coordinate[self._axis]
        was = self._said[here]
        news = {place: form for place, form in forms.items() if was.get(place) != form}
        said = pickle.dumps((list(forms), news)) if news or list(forms) != list(was) else b""
        numbers = numbers_of_all([int(has_failed), len(said)], mesh)
        of_all = torch.tensor(numbers, device="cpu").view(*mesh.shape, 2)
        if of_all[..., 0].any():
            return False
        sizes = of_all[tuple(slice(None) if a == self._axis else c for a, c in enumerate(mesh.coordinate))]
        if sizes[:, 1].any():
            for i, of in enumerate(bytes_of_all(said, sizes[:, 1].tolist(), mesh["pipe"])):
                if of:
                    places, news = pickle.loads(of)
                    self._said[i] = {place: news.get(place, self._said[i].get(place)) for place in places}
        return True

    def _form(self, value: Any) -> bytes:
        """A value, pickled, without the tensors that travel as such."""

        def form(x: Any) -> Any:
            if not isinstance(x, torch.Tensor):
                return x
            if not _travels(x):
                return x.detach().cpu()
            return self._sent(x)

        return pickle.dumps(_each(form, value))

    def _sent(self, x: torch.Tensor) -> _Sent:
        return _Sent(tuple(x.shape), x.dtype, x.device.type != self._mesh.device_type)

    def _made(self, came: Iterator[torch.Tensor], x: Any) -> Any:
        if type(x) is _Sent:
            return next(came)
        return x.to(self._mesh.device()) if isinstance(x, torch.Tensor) else x

    def _way(self, x: _Sent) -> torch.device:
        """The device from which it travels."""
        return speaks_on(self._mesh) if x.is_on_host else self._mesh.device()

    def _room(self, x: _Sent) -> torch.Tensor:
        return torch.empty(x.shape, dtype=x.dtype, device=self._way(x))

    def _passed(
        self, source: int, like: Sequence[_Sent], own: Sequence[torch.Tensor] | None
    ) -> list[torch.Tensor]:
        """The tensors of one coordinate along the axis, which are its own, on all."""
        if own is None:
            xs = [self._room(x) for x in like]
        else:
            xs = [_bare(x.to(self._way(of))) for x, of in zip(own, like, strict=True)]
        messages: list[list[torch.Tensor]] = []
        for is_on_host in (False, True):
            travel = [x for x, of in zip(xs, like, strict=True) if of.is_on_host is is_on_host and x.numel()]
            messages += [[x] for x in travel if x.nbytes > _SMALL]
            messages.append([x for x in travel if x.nbytes <= _SMALL])
        for message in filter(None, messages):
            wire = message[0].view(-1)
            if len(message) > 1:
                parts = [x.view(-1).view(torch.uint8) for x in message]
                wire = torch.cat(parts)
            broadcast_(wire, self._mesh, self._axis, source).wait()
            if len(message) > 1 and own is None:
                for part, came in zip(parts, wire.split([x.numel() for x in parts]), strict=True):
                    part.copy_(came)
        return [x.cpu() if of.is_on_host else x for x, of in zip(xs, like, strict=True)]

    def _warn_of_size(self, holding: Mapping[Place, Sequence[_Sent]]) -> None:
        """Tell once of tensors that take long to send."""
        nbytes = sum(x.nbytes for sent in holding.values() for x in sent)
        if nbytes < _MUCH or self._has_warned:
            return
        self._has_warned = True
        first, *others = holding
        said = ".".join(filter(None, first[:2])) + (f" and {len(others)} more" if others else "")
        tell(
            f"The model's forward sets {said}. In a pipeline that goes to all ranks after each pass, "
            f"{nbytes >> 20} MiB. What nobody reads between steps, keep in evaluation alone (if not "
            "self.training: ...), or in an object of a class of your own: such are each rank's own."
        )

    def _warn_of_asked(self, set_now: set[tuple[str, str]]) -> None:
        """Tell once of what was asked for too early, and is another now."""
        late = sorted(".".join(filter(None, place)) for place in self.hidden.asked & set_now - self._told)
        self._told |= self.hidden.asked & set_now
        self.hidden.asked.clear()
        if late:
            tell(
                f"{', '.join(late)} was asked for between the call of the model and loss.backward(), and was "
                "what the step before has left: in a pipeline the forward, which sets it, runs with the "
                "backward pass. Ask for it after that."
            )


def _found(model: nn.Module, before: Snapshot) -> dict[Place, Any]:
    """What the modules of this rank have set since, and may be told."""
    modules, found = dict(model.named_modules()), {}
    changes = ModelStandIns.changes(model, before.remembered)
    hooked = newly_hooked(model, before.hooks) if changes else []
    for name, keys in changes.items():
        module = modules[name]
        for key in () if is_of_torch(module) else keys:
            value = value_at(model, name, key)
            if may_be_told(value) and not is_flag_of_hooks(value, name, hooked):
                found[Place(name, key, key in own_buffers(module))] = value
    return found


def _is_in_parts(place: Place, x: Any) -> bool:
    """Whether what this rank has set is to be a plain one; a buffer of this rank alone is as it is to be."""
    is_own = place.is_buffer and type(x) is DTensor and x._layout.mesh.size() == 1 and not x.requires_grad
    return bool(_leaves(x, DTensor)) and not is_own


def says_data(module: nn.Module) -> bool:
    """Whether a module's code says ``.data``: it may write to what it holds, and torch does not count it."""
    return not is_of_torch(module) and Reads([module]).says("data")


def _written(
    model: nn.Module, marks: Mapping[str, Any], unmarked: Collection[str]
) -> dict[Place, torch.Tensor]:
    """The buffers of modules that have written to one: to running means torch writes and does not say so."""
    buffers = [(*name.rpartition(".")[::2], name, b) for name, b in model.named_buffers()]
    owners = {
        owner for owner, _, name, b in buffers if owner in unmarked or marks.get(name) != written_mark(b)
    }
    return {Place(owner, key, True): b for owner, key, _, b in buffers if owner in owners}


def value_at(model: nn.Module, name: str, key: str) -> Any:
    """What an attribute or buffer of a module of the model is; if there is none, what says so."""
    module = model.get_submodule(name)
    return (own_buffers(module) if key in own_buffers(module) else vars(module)).get(key, _Gone())


def put(module: nn.Module, key: str, value: Any, is_buffer: bool = False) -> None:
    """Let an attribute or buffer be a value, in the same container if it is one of that kind."""
    table: dict[str, Any] = own_buffers(module) if is_buffer else vars(module)
    if isinstance(value, _Gone):
        table.pop(key, None)
        return
    was: Any = table.get(key)
    if is_array(was) and is_array(value) and was.shape == value.shape and was.flags.writeable:
        was[...] = value
    elif type(was) is type(value) and (now := generator_state(value)) is not None:
        state = generator_state(was)
        assert state is not None
        state[0](now[1])  # the program may hold it, and other modules
    elif type(was) is type(value) and isinstance(value, list | dict | set | deque):
        was.clear()  # others may hold it
        (was.extend if isinstance(value, list | deque) else was.update)(value)
    else:
        table[key] = value


def copied(value: Any) -> Any:
    """A value that may be told, with its own memory, and nothing in parts."""

    def other(x: Any) -> Any:
        if type(x) is DTensor:
            return torch.empty(x.shape, dtype=x.dtype, device="meta")
        return x.detach().clone() if isinstance(x, torch.Tensor) else x.copy() if is_array(x) else x

    return _each(other, value)


def form_of(value: Any) -> Hashable:
    """What of a value may tell a forward to go another way than the last time: that it is there, say."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype
    if is_array(value):
        return value.shape, value.dtype.str
    if type(value) is tuple:
        return tuple(map(form_of, value))
    if isinstance(value, str | type(None)):
        return value
    return type(value), bool(value) if isinstance(value, (int, float, *_CONTAINERS)) else True


def _each(fn: Callable[[Any], Any], x: Any) -> Any:
    """``fn`` on what is in containers that are told; of sets, which hold no tensors, on the set."""
    if isinstance(x, dict):
        values = {key: _each(fn, y) for key, y in x.items()}
        return defaultdict(x.default_factory, values) if type(x) is defaultdict else type(x)(values)
    if type(x) is deque:
        return deque([_each(fn, y) for y in x], x.maxlen)
    return type(x)([_each(fn, y) for y in x]) if type(x) in (list, tuple) else fn(x)


def _leaves(x: Any, kind: type) -> list[Any]:
    if type(x) in (list, tuple, deque, *DICTS):
        return [leaf for y in (x.values() if isinstance(x, dict) else x) for leaf in _leaves(y, kind)]
    return [x] if isinstance(x, kind) else []


def _travels(x: torch.Tensor) -> bool:
    """Whether it is sent as a tensor: the numbers are all that there is to it."""
    if type(x) is DTensor:
        return True
    is_dense = type(x) is torch.Tensor and x.layout is torch.strided
    return is_dense and not (x.is_meta or x.is_quantized or x.is_nested)


def _whole(x: torch.Tensor) -> torch.Tensor:
    return full_tensor(x).detach()


def _bare(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().resolve_conj().resolve_neg()


def may_be_told(x: Any) -> bool:
    """Whether a value is one that all ranks can have."""
    if isinstance(x, nn.Parameter):
        return False
    if type(x) is set:
        return all(may_be_told(y) and not isinstance(y, torch.Tensor) for y in x)
    if is_array(x):
        return not x.dtype.hasobject
    if generator_state(x) is not None:
        return type(x).__module__ in _GENERATORS
    if type(x) is defaultdict and not isinstance(x.default_factory, type | None):
        return False  # a function: others have no name for it
    if type(x) in _CONTAINERS:
        return all(map(may_be_told, [*x.keys(), *x.values()] if isinstance(x, dict) else x))
    return isinstance(x, (*_TOLD, _Gone))


def gradients_left(model: nn.Module, of: Trace) -> Callable[[Trace], None]:
    """What tells, of another trace, of the gradients that a forward leaves in buffers for the next one."""
    held = {id(value.tensor) for value in of.values if value.grad}
    left = sorted(name for name, b in model.named_buffers() if id(b) in held)

    def compare(again: Trace) -> None:
        read = {number for op in again.ops for number in op.reads}
        for name in (name for name in left if again.sources["buffer", name] in read):
            tell(
                f"The model's forward finds in its buffer {name!r} what the call before has left there, with "
                "a gradient. In a pipeline that does not go back into the call before. Leave it detached, "
                "x.detach(); to train through several steps of time, let one call make them all."
            )

    return compare
