"""Values of one stage that all ranks ask for: those that have one tell it, and the others wait for it.

A number of each parameter, as programs write it down (``p.grad.norm().item()``), lies on some of the ranks.
These can't know whether one rank alone asks, so nothing is exchanged: the first of them leaves the value in
the store that all ranks share, under what it was made of, and goes on. A rank that has no such value waits
for one that was made in the same way of the same, and so gets none that another call was for.
"""

from __future__ import annotations

import hashlib
import math
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from numbers import Number
from typing import Any, TypeVar

import torch

from espalier.comm.control import Answers
from espalier.mesh import Mesh
from espalier.tensor.dtensor import DTensor, absent, plain
from espalier.tensor.fallback import GatherWarning, writes
from espalier.tensor.observers import Go, Watcher, asked_by_program, called_by_program, user_frame, watching
from espalier.torch_private import memory_id, raw
from espalier.trees import leaves, tensors_in

_LARGEST = 1 << 16  # bytes of a value that goes through the store
_SMALL = 64  # elements of a tensor beside, by which values are told apart
_DRAWS = ("rand", "dropout", "bernoulli", "normal", "multinomial", "poisson", "sample")
# what gives the tensor itself, or the same values beside it, as ranks may find it
_SAME = frozenset("bfloat16 contiguous cpu data.__get__ detach double float half to type_as".split())
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
        self._is_used = self._sees_own = self._has_warned = False

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
        was_open = self._close()
        if self._answers is not None:
            self._answers.go_on(tells=self._is_used)
        self._turn, self._changes, self._is_used, self._sees_own = self._turn + 1, 0, False, False
        self._counts.clear()
        try:
            yield
        finally:
            if was_open and self._users:
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

        What that writes to, until the program asks again, other ranks may not.
        """
        if self._sees_own and not own:
            self.changed()
        self._sees_own = own

    def around(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], go: Go) -> Any:
        """Note what the results of a call that the program makes are made of."""
        given = tensors_in((args, kwargs))
        is_seen = not self._depth and not self._sees_own and any(map(self._lies_in_stage, given))
        if not is_seen or not called_by_program():
            return go()
        self._is_used = True
        name, first = _name(func), args[0] if args and type(args[0]) is DTensor else None
        is_written = writes(func) or kwargs.get("out") is not None or kwargs.get("inplace") is True
        self._depth += 1
        try:
            made_of = None if is_written else self._made_by(name, func, [args, kwargs])
            out = go()
        finally:
            self._depth -= 1
        written = tensors_in(args[0]) if is_written and args else []
        if (is_written and not (written and all(map(_is_own, written)))) or any(d in name for d in _DRAWS):
            self.changed()
        for x in written:
            if type(before := _made_of(x)) is bytes:
                _note(x, _digest(before, name, self._turn, self._changes))
        held = set(map(id, given))
        for i, x in enumerate(x for x in leaves([out], DTensor, (torch.Tensor,)) if id(x) not in held):
            x._has_own_memory = x._layout.own is x._layout and not _shares(x, given)
            is_same = name in _SAME or name == x.device.type
            if first is not None and (is_written or (is_same and x.dtype is first.dtype)):
                _note(x, _made_of(first))
            else:
                _note(x, None if made_of is None else _digest(made_of, i))
        return out

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
        made_of = _made_of(x)
        return _digest(made_of, self._turn, self._changes) if type(made_of) is tuple else made_of

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
        if self._watch is None or self._depth or self._sees_own:
            return None
        is_short = math.prod(x._layout.shape) * x.dtype.itemsize <= _LARGEST
        return self._key(x) if is_short and asked_by_program() else None

    def _numbered(self, key: bytes) -> str:
        """The key, and how often it was asked for here: values may change by what nobody sees."""
        count = self._counts[key] = self._counts.get(key, 0) + 1
        return f"{key.hex()}/{count}"

    def _warn(self, mesh: Mesh) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        warnings.warn(
            f"A value is asked for that lies on ranks {list(mesh.ranks)}, in another stage: this rank waits "
            "until they ask for it, too. Of many it is quicker to put them together (torch.stack of the "
            "norms, say) and to ask once, for all.",
            GatherWarning,
            stacklevel=user_frame()[0],
        )


def name_value(x: Named, *name: Any) -> Named:
    """Let values be told by what is read of this tensor, which all ranks know by this name; gives it."""
    _note(x, name)
    x._has_own_memory = False  # type: ignore[attr-defined]
    return x


def apart(mesh: Mesh) -> AbstractContextManager[None]:
    """While open, each rank makes calls of its own on what lies on parts of a mesh."""
    asked: Asked | None = mesh.asked
    return nullcontext() if asked is None else asked.apart()


def _made_of(x: torch.Tensor) -> Any:
    return x.__dict__.get("_made_of")


def _note(x: torch.Tensor, made_of: Any) -> None:
    x._made_of = made_of  # type: ignore[attr-defined]


def _is_own(x: torch.Tensor) -> bool:
    """Whether nothing that the program knows by name changes when this is written to."""
    return bool(x.__dict__.get("_has_own_memory"))


def _shares(x: torch.Tensor, given: Iterable[torch.Tensor]) -> bool:
    """Whether a result lies in the memory of an argument that has none of its own."""
    with raw():
        memory = memory_id(x)
        return any(not _is_own(y) and memory_id(y) == memory for y in given)


def _name(func: Callable[..., Any]) -> str:
    name, of = getattr(func, "__name__", ""), getattr(func, "__self__", None)
    return f"{getattr(of, '__name__', '')}.{name}" if name.startswith("__") else name


def _content(x: torch.Tensor) -> Any:
    """What a tensor holds that all ranks have; None where it is much, or a device would be waited for."""
    is_whole = type(x) is not DTensor or x._layout.is_plain
    if not is_whole or x.numel() > _SMALL or x.device.type != "cpu":
        return None
    with raw():
        x = plain(x)
        return str(x.dtype), list(x.shape), x.tolist()


def _digest(*parts: Any) -> bytes:
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).digest()
