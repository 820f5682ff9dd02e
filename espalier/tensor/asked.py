"""Values of one stage that all ranks ask for: those that have one tell it, and the others wait for it.

A number of each parameter, as programs write it down (``p.grad.norm().item()``), lies on some of the ranks.
These can't know whether one rank alone asks, so nothing is exchanged: the first of them leaves the value in
the store that all ranks share, under what it was made of, and goes on. A rank that has no such value waits
for one that was made in the same way of the same, and so gets none that another call was for.
"""

from __future__ import annotations

import functools
import hashlib
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from numbers import Number
from types import CodeType
from typing import Any, TypeVar

import torch

from espalier.comm.control import Answers
from espalier.meanwhile import having
from espalier.mesh import Mesh
from espalier.tensor.compare import fingerprint
from espalier.tensor.dtensor import DTensor, absent, is_sparse, plain
from espalier.tensor.fallback import GatherWarning, writes
from espalier.tensor.loans import is_view, is_whole
from espalier.tensor.meshes import as_all_find, found_by_all, into_plain
from espalier.tensor.observers import (
    Go,
    Watcher,
    asked_by_program,
    called_by_program,
    called_now,
    tell,
    watching,
)
from espalier.torch_private import memory_id, raw
from espalier.trees import leaves, tensors_in

_LARGEST = 1 << 16  # bytes of a value that goes through the store
_BESIDE = 1 << 20  # bytes of a tensor beside, by which values are told apart
_SMALL = 64  # elements of one that is told as it is
DRAWS = ("rand", "dropout", "bernoulli", "normal", "multinomial", "poisson", "sample")  # parts of names
# what gives the tensor itself, or the same values beside it, as ranks may find it
_SAME = frozenset("bfloat16 contiguous cpu data.__get__ detach double float half to type_as".split())
_SHARING = _SAME | frozenset("flatten ravel reshape reshape_as view_as".split())
_CONSTANTS = (Number, str, slice, type(None), type(...), torch.dtype, torch.layout, torch.memory_format)
Named = TypeVar("Named", bound=torch.Tensor)


class Asked(Watcher):
    """What is known of values that lie on parts of a mesh, between the passes through its stages.

    All ranks make the same calls there, wherever the values lie. ``_made_of`` of a tensor is the name of a
    parameter or gradient (a tuple), whose values change, or a digest of how it was computed.

    Args:
        mesh: all of it. All its ranks make this.
    """

    inside = traffic = passes = False

    def __init__(self, mesh: Mesh) -> None:
        self._answers = None if mesh.is_dry else Answers(mesh, "asked")
        self._rank = mesh.world_rank
        self._turn = self._changes = self._depth = self._engines = self._users = 0
        self._watch: AbstractContextManager[None] | None = None
        self._counts: dict[bytes, int] = {}
        self._is_used = self._has_warned = self._is_asking = False
        self._sees_own: CodeType | None = None  # what finds this rank's own gradients

    # ---- when it watches

    def joined(self, user: object) -> int:
        """Another has its stages on the mesh, as long as it lives; gives its number."""
        self._engines += 1
        self._users += 1
        weakref.finalize(user, self._left).atexit = False
        self._open()
        return self._engines

    def _left(self) -> None:
        self._users -= 1
        if not self._users:
            self._close()

    @contextmanager
    def apart(self) -> Iterator[None]:
        """While open, each rank makes calls of its own. All ranks come to it, and told all that they tell."""
        if not self._close():  # it is open already
            yield
            return
        assert self._answers is not None
        self._answers.go_on(tells=self._is_used)
        self._turn, self._is_used = self._turn + 1, False
        self._counts.clear()
        try:
            yield
        finally:
            self._changes, self._sees_own = 0, None  # each rank has met what it has
            if self._users:
                self._open()

    def _open(self) -> None:
        if self._watch is None and self._answers is not None:
            self._watch = watching(self)
            self._watch.__enter__()

    def _close(self) -> bool:
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.__exit__(None, None, None)
        return watch is not None

    # ---- what values are made of

    def changed(self) -> None:
        """Something was written to, on all ranks."""
        self._changes += 1

    def sees(self, own: bool) -> None:
        """A gradient is asked for: by the program, or by what finds this rank's ``own`` (torch's clipping).

        What that writes to, until it is done, other ranks may not.
        """
        if self._sees_own is not None and not own:
            self.changed()
        self._sees_own = called_now() if own else None

    def _is_of_own(self) -> bool:
        """Whether what finds this rank's own gradients is at work."""
        if self._sees_own is not None and self._sees_own is not called_now():
            self.sees(own=False)
        return self._sees_own is not None

    def around(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], go: Go) -> Any:
        """Let what a call of the program gives lie where all ranks find it, and note what it is made of."""
        if self._depth:
            return go()
        given = tensors_in((args, kwargs))
        in_stages = [x for x in given if self._lies_in_stage(x)]
        if not in_stages or not called_by_program():
            return go()
        # an optimizer's states, and what is made of them: a rank has those of its stages, and calls no others
        if self._is_of_own() or not any("_memory" in x.__dict__ for x in in_stages):
            return self._found(func, args, kwargs, go)
        if func in _ANSWERS:
            return self._answered(_ANSWERS[func], args, kwargs)
        self._is_used = True
        name, first = _name(func), args[0] if args and type(args[0]) is DTensor else None
        written = _written(func, args, kwargs)
        made_of = None
        if written is None or any(map(_is_own, written)):
            made_of = self._made_by(name, func, [args, kwargs])
        out = self._found(func, args, kwargs, go)
        if any(d in name for d in DRAWS) or not (written is None or (written and all(map(_is_own, written)))):
            self.changed()
        for x in written or ():
            if _is_own(x):
                x._memory.write(made_of)  # type: ignore[attr-defined]
        held = set(map(id, given))
        for i, x in enumerate(x for x in leaves([out], DTensor, (torch.Tensor,)) if id(x) not in held):
            x._memory = _memory_of(x, func, args, given)
            is_same = name in _SAME or name == x.device.type
            if first is not None and (written is not None or (is_same and x.dtype is first.dtype)):
                _note(x, name_of(first))
            else:
                _note(x, None if made_of is None else _digest(made_of, i))
        return out

    def _answered(
        self, number: Callable[..., torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> bool:
        """What a call that gives a bool says, on all ranks."""
        out = self.around(number, args, kwargs, lambda: number(*args, **kwargs))
        with having(self, _is_asking=True):
            return bool(out)

    def _found(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        go: Go,
    ) -> Any:
        """What a call gives, where all ranks find it."""
        self._depth += 1
        try:
            found = into_plain(func, *as_all_find(func, args, kwargs))
            out = go() if found[0] is args else func(*found[0], **found[1])
            return found_by_all(out, func, args, kwargs)
        finally:
            self._depth -= 1

    def _lies_in_stage(self, x: torch.Tensor) -> bool:
        if type(x) is not DTensor or (mesh := x._layout.mesh).within is None:
            return False
        return mesh.outermost.asked is self  # other meshes have their own

    def _made_by(self, name: str, func: Callable[..., Any], arguments: Any) -> bytes | None:
        """What a call gives; None where that hangs on what may be another thing on another rank."""
        if not (getattr(func, "__module__", None) or "torch").startswith("torch"):
            return None
        said = self._said(arguments)
        return None if said is None else _digest(name, said, self._turn, self._changes)

    def _said(self, x: Any) -> Any:
        if type(x) is DTensor and ((key := self._key(x)) is not None or x._layout.mesh.within is not None):
            return key
        if isinstance(x, torch.Tensor):
            return _content(x)
        if isinstance(x, torch.device):
            return "device"  # each rank's own
        if isinstance(x, dict):
            x = [*x.items()]
        if isinstance(x, tuple | list):
            said = [self._said(one) for one in x]
            return None if any(one is None for one in said) else said
        return repr(x) if isinstance(x, _CONSTANTS) else None

    def _key(self, x: DTensor) -> bytes | None:
        """Under what the value of a tensor is told; None where it can't be."""
        if (made_of := name_of(x)) is None:
            return None
        # what shares the memory of a parameter changes with that
        written = x._memory.written if _is_own(x) else (self._turn, self._changes)  # type: ignore[attr-defined]
        return _digest(made_of, written)

    def copied(self, x: DTensor, copy: torch.Tensor) -> None:
        """All ranks have made a copy of a tensor, without a call that this is shown."""
        self._is_of_own()
        copy._memory = _Memory()  # type: ignore[attr-defined]
        _note(copy, None if (key := self._key(x)) is None else _digest(key, "copied"))

    # ---- telling and asking

    def tell(self, x: DTensor, value: torch.Tensor) -> None:
        """Leave the value of a tensor for who asks, if this rank is the first of those that have it."""
        if self._answers is None or x._layout.mesh.ranks[0] != self._rank:
            return
        if (key := self._key_asked(x)) is not None:
            held = value.detach().cpu().reshape(-1).contiguous().view(torch.uint8)
            self._answers.tell(self._numbered(key), held.numpy().tobytes())

    def ask(self, x: DTensor) -> torch.Tensor:
        """The value of a tensor of other ranks, which ask for it too.

        Raises:
            ValueError: they do not, or may have another.
        """
        layout, key = x._layout.own, self._key_asked(x)
        if self._answers is None or key is None:
            raise absent(layout)
        self._warn(layout.mesh)
        teller = layout.mesh.ranks[0]
        said = self._answers.ask(self._numbered(key), teller)
        if said is None:
            raise ValueError(
                f"The values of {layout!r} are on ranks {list(layout.mesh.ranks)}; this is rank "
                f"{self._rank}, which has asked for one, and rank {teller} has gone on without asking. All "
                "ranks must ask for it (item(), float(), bool(), tolist()), also those that do not use it."
            )
        with raw():
            value = torch.frombuffer(bytearray(said), dtype=torch.uint8).view(x.dtype)
            return value.view(layout.shape).to(layout.mesh.outermost.device())

    def _key_asked(self, x: DTensor) -> bytes | None:
        """Under what a value is told that the program asks for now; None if it is not."""
        if self._watch is None or self._depth or self._is_of_own():
            return None
        is_short = math.prod(x._layout.shape) * x.dtype.itemsize <= _LARGEST
        return self._key(x) if is_short and (self._is_asking or asked_by_program()) else None

    def _numbered(self, key: bytes) -> str:
        """The key, and how often it was asked for here: values may change by what nobody sees."""
        count = self._counts[key] = self._counts.get(key, 0) + 1
        return f"{key.hex()}/{count}"

    def _warn(self, mesh: Mesh) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        tell(
            f"A value is asked for that lies on ranks {list(mesh.ranks)}, in another stage: this rank waits "
            "until they ask for it, too. Of many it is quicker to put them together (torch.stack of the "
            "norms, say) and to ask once, for all.",
            GatherWarning,
        )


def name_value(x: Named, *name: Any) -> Named:
    """Let values be told by what is read of this tensor, which all ranks know by this name; gives it."""
    x._made_of, x._memory = name, None  # type: ignore[attr-defined]
    return x


def name_of(x: torch.Tensor) -> Any:
    """That by which all ranks know a tensor; None if it has none."""
    return x.__dict__.get("_made_of")


def apart(mesh: Mesh) -> AbstractContextManager[None]:
    """While open, each rank makes calls of its own on what lies on parts of a mesh."""
    asked: Asked | None = mesh.asked
    return nullcontext() if asked is None else asked.apart()


@contextmanager
def each_for_itself(parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """While open, each rank makes calls of its own on what lies on parts of these parameters' meshes."""
    with ExitStack() as stack:
        for mesh in {p._layout.mesh.outermost: None for p in parameters if type(p) is DTensor}:
            stack.enter_context(apart(mesh))
        yield


def _note(x: torch.Tensor, made_of: Any) -> None:
    x._made_of = made_of  # type: ignore[attr-defined]


class _Memory:
    """That of a result and of its views: nothing that the program knows by name changes with it.

    Attributes:
        written: what was written to it.
    """

    def __init__(self) -> None:
        self.written = b""

    def write(self, what: bytes | None) -> None:
        """Something is written to it, of which that is known."""
        self.written = _digest(self.written, what)


def _is_own(x: torch.Tensor) -> bool:
    """Whether nothing that the program knows by name changes when this is written to."""
    return x.__dict__.get("_memory") is not None


def _memory_of(
    x: DTensor, func: Callable[..., Any], args: tuple[Any, ...], given: Sequence[torch.Tensor]
) -> _Memory | None:
    """That in which a result may lie; None where an argument lies in it that has none of its own."""
    if is_view(func, args) or _name(func) in _SHARING:
        return given[0].__dict__.get("_memory")  # where there is no data nothing is copied
    with raw():
        memory = memory_id(x)
        of = [y.__dict__.get("_memory") for y in given if memory_id(y) == memory]
    return of[0] if of else _Memory()


@functools.wraps(torch.equal)
def _equal(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return (x == other).all() if x.shape == other.shape else torch.zeros((), dtype=torch.bool)


@functools.wraps(torch.allclose)
def _close(*args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.isclose(*args, **kwargs).all()


# calls that give a bool of values: as tensors, whose values can be told
_ANSWERS: dict[Any, Callable[..., torch.Tensor]] = {
    torch.equal: _equal,
    torch.Tensor.equal: _equal,
    torch.allclose: _close,
    torch.Tensor.allclose: _close,
}


def _written(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[torch.Tensor] | None:
    """What a call writes to; None if it does not."""
    if (out := kwargs.get("out")) is not None:
        return tensors_in(out)
    if writes(func) or kwargs.get("inplace") is True:
        return tensors_in(args[0] if args else kwargs.get("tensor"))
    return None


def _name(func: Callable[..., Any]) -> str:
    name, of = getattr(func, "__name__", ""), getattr(func, "__self__", None)
    return f"{getattr(of, '__name__', '')}.{name}" if name.startswith("__") else name


def _content(x: torch.Tensor) -> Any:
    """What a tensor holds that all ranks have; None where it is much, or a device would be waited for."""
    is_known = type(x) is not DTensor or is_whole(x._layout)
    if not is_known or x.numel() * x.itemsize > _BESIDE or x.device.type != "cpu" or is_sparse(x):
        return None
    with raw():
        x = plain(x)
        if x.numel() <= _SMALL:
            return str(x.dtype), list(x.shape), x.tolist()
        return str(x.dtype), list(x.shape), fingerprint(x).item()


def _digest(*parts: Any) -> bytes:
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).digest()
