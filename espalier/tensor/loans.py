"""Views of a moved copy: what is written to them must reach the tensor that they are views of.

``x[0]`` of an ``x`` whose rows are sharded is a view of the gathered rows, not of ``x``. Such a result is
a *loan*: it bears the twin of its layout (``Layout.loan``) and remembers where it came from. The twin is
another key to the dispatcher's cache, so that a call with a loan, and no other call, comes here. Then

* what is written to a loan is written to its source too (and to that one's source);
* a loan whose source was written to meanwhile takes its values from it again;
* a view of a loan is a loan.

The same twin marks a tensor whose values are *elsewhere*: a parameter that is cut between its uses.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as raw

from espalier.comm import move
from espalier.layout import Layout
from espalier.tensor.dtensor import DTensor, plain, stamp
from espalier.tensor.rules.table import VIEWS
from espalier.trees import tree_map

Call = Callable[..., Any]
# the C getters themselves: to be called where torch functions are not intercepted
_version = vars(torch._C.TensorBase)["_version"].__get__
_address = torch._C.TensorBase.data_ptr


class Source:
    """Where a loan comes from: ``take(base)`` is the view; None if they share their data."""

    __slots__ = ("base", "take", "version")

    def __init__(self, base: DTensor, take: Callable[[torch.Tensor], torch.Tensor] | None) -> None:
        self.base, self.take = base, take
        self.version = version(base)


class Elsewhere(ABC):
    """In place of a :class:`Source`: a tensor of which this rank holds a part for the time being.

    Attributes:
        recorded: the layout by which autograd knows it.
    """

    recorded: Layout

    @abstractmethod
    def stand_in(self, func: Call | None) -> DTensor:
        """What a call of ``func`` is to compute with in its place: no loan."""

    def takes(self, func: Call) -> bool:
        """Whether its stand-in is to be written to, too, where ``func`` writes to it."""
        return False

    def handed_out(self) -> None:
        """Be told that somebody gets an alias of the tensor's data (see :func:`hand_out`)."""
        return None


class HandedOut:
    """What others have of a tensor's data: aliases (``x.data``) through which torch counts no writes.

    Attributes:
        times: how often it was handed out.
    """

    def __init__(self) -> None:
        self.times = 0
        self._aliases: list[weakref.ref[torch.Tensor]] = []

    def to(self, alias: torch.Tensor) -> None:
        """One more of them."""
        self.times += 1
        self._aliases = [ref for ref in self._aliases if ref() is not None]
        self._aliases.append(weakref.ref(alias))

    @property
    def is_held(self) -> bool:
        """Whether somebody still has one."""
        return any(ref() is not None for ref in self._aliases)


def hand_out(x: torch.Tensor, alias: torch.Tensor) -> None:
    """Note that somebody gets an alias of a tensor's data. What was moved of it may be out of date soon."""
    own, mesh = x.__dict__, x._layout.mesh  # type: ignore[attr-defined]
    own.pop("_moved", None)
    if mesh.lately is not None and mesh.lately[0]() is x:
        mesh.lately = None
    handed = own.get("_handed_out")
    if handed is None:
        handed = own["_handed_out"] = HandedOut()
    handed.to(alias)
    source = own.get("_source")
    if isinstance(source, Elsewhere):
        source.handed_out()


def written_mark(x: torch.Tensor) -> tuple[int, int, int]:
    """Changes when a tensor is written to, is given other data, or its data is handed out."""
    handed = x.__dict__.get("_handed_out")
    with raw():
        return _version(x), _address(x), 0 if handed is None else handed.times


def is_handed_out(x: torch.Tensor) -> bool:
    """Whether somebody may write to a tensor now so that its mark stays the same."""
    handed = x.__dict__.get("_handed_out")
    return handed is not None and handed.is_held


def is_view(func: Call, args: Sequence[Any]) -> bool:
    """Whether torch promises that a call gives views of its first argument."""
    if func is torch.Tensor.__getitem__:
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        return not any(isinstance(i, torch.Tensor | list | bool) for i in index)
    return func in VIEWS or (isinstance(func, _OPS) and _says_view(func))


_OPS = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)


@lru_cache(maxsize=1024)
def _says_view(op: Any) -> bool:
    """Whether an operator's schema says that it gives views."""
    one = op if isinstance(op, torch._ops.OpOverload) else getattr(op, op.overloads()[0])
    return any(r.alias_info is not None and not r.alias_info.is_write for r in one._schema.returns)


def loans_in(tensors: Sequence[torch.Tensor]) -> list[DTensor]:
    """Those among tensors that are loans, each once."""
    return list({id(t): t for t in tensors if type(t) is DTensor and t._layout.own is not t._layout}.values())


def lend(out: Any, func: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Make loans of the views that came out of a call and do not share the data of its first argument."""
    words = dict(kwargs)
    base = args[0] if args else words.pop("input", None)
    if type(base) is not DTensor:
        return out
    several = isinstance(out, tuple | list)
    for i, x in enumerate(out if several else (out,)):
        if type(x) is not DTensor or _share(x, base):
            continue

        def take(whole: torch.Tensor, i: int = i) -> torch.Tensor:
            found = func(whole, *[_whole(a) for a in args[1:]], **{k: _whole(a) for k, a in words.items()})
            return found[i] if several else found

        x._layout = x._layout.own.loan()
        x._source = Source(base, take)  # type: ignore[attr-defined]
    return out


def share(x: DTensor, loan: DTensor) -> DTensor:
    """Make a loan of what shares the data of one."""
    if isinstance(loan._source, Elsewhere):  # type: ignore[attr-defined]
        return x
    x._layout = x._layout.own.loan()
    x._source = Source(loan, None)  # type: ignore[attr-defined]
    return x


def stamp_alias(alias: torch.Tensor, x: DTensor) -> DTensor:
    """Make what shares the local data of a DTensor one that lies as it, a loan too if it is one."""
    typed = stamp(alias, x._layout.own)
    return typed if x._layout.own is x._layout else share(typed, x)


def call(
    dispatch: Call,
    func: Call,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    loans: list[DTensor],
    writes: bool,
) -> Any:
    """A call with loans among its arguments; ``writes``: its name says that it writes to the first."""
    if writes and "tensor" in kwargs:  # torch.nn.init names all its arguments
        args, kwargs = (kwargs["tensor"], *args), {k: x for k, x in kwargs.items() if k != "tensor"}
    one = writes and isinstance(args[0], torch.Tensor)
    stand: dict[int, torch.Tensor] = {}
    for x in loans:
        if not isinstance(x._source, Elsewhere):  # type: ignore[attr-defined]
            refresh(x)
        elif not (one and x is args[0]) or x._source.takes(func):
            stand[id(x)] = x._source.stand_in(func)  # type: ignore[attr-defined]
    first = args[0] if args else None
    if stand:
        args, kwargs = tree_map(lambda a: stand.get(id(a), a), (args, kwargs))
        loans = [x for x in loans if id(x) not in stand]
        if one and args[0] is not first:
            out = dispatch(DTensor, func, (), args, kwargs)
            return first if out is args[0] else out
    before = [(x, x._layout, x._layout.own, version(x)) for x in loans]
    for x, _, own, _ in before:
        x._layout = own
    try:
        out = dispatch(DTensor, func, (), args, kwargs)
    finally:
        for x, loan, own, _ in before:
            if x._layout is own:
                x._layout = loan
    before = [b for b in before if not isinstance(b[0]._source, Elsewhere)]  # type: ignore[attr-defined]
    loans = [b[0] for b in before]
    for x, _, _, count in before:
        # loans that are views of one copy are counted together, so a name is the better witness
        if x._layout.own is not x._layout and (x is args[0] if one else version(x) != count):
            _write_back(x)
    for y in out if isinstance(out, tuple | list) else (out,):
        if type(y) is DTensor and y._layout.own is y._layout:
            of = next((x for x in loans if x is not y and _share(x, y)), None)
            if of is not None:
                share(y, of)
    return out


def refresh(x: DTensor) -> DTensor:
    """A loan with its source's values, taken again if that was written to; recorded by autograd."""
    if isinstance(x._source, Elsewhere):  # type: ignore[attr-defined]
        return x._source.stand_in(None)  # type: ignore[attr-defined]
    source: Source = x._source  # type: ignore[attr-defined]
    base = source.base
    if base._layout.own is not base._layout:
        refresh(base)
    if source.take is None or source.version == version(base):
        return x
    own = x._layout.own
    with raw():
        value = source.take(_whole(base))
        x.copy_(move(value, Layout.replicated(own.mesh, own.shape), own))
    source.version = version(base)
    return x


def _write_back(x: DTensor) -> None:
    """Write a loan's values to its source."""
    source: Source = x._source  # type: ignore[attr-defined]
    base = source.base
    if source.take is not None:
        own = base._layout.own
        with raw():
            full = _whole(base).clone()
            source.take(full).copy_(_whole(x))
            base.copy_(move(full, Layout.replicated(own.mesh, own.shape), own))
        source.version = version(base)
    if base._layout.own is not base._layout:
        _write_back(base)


def _whole(a: Any) -> Any:
    if type(a) is DTensor:
        return plain(move(a, a._layout.own, Layout.replicated(a._layout.mesh, a._layout.shape)))
    return a


def _share(x: torch.Tensor, y: torch.Tensor) -> bool:
    with raw():
        return x.untyped_storage()._cdata == y.untyped_storage()._cdata


def version(x: torch.Tensor) -> int:
    """How often a tensor was written to; of inference tensors it is not known."""
    return -1 if x.is_inference() else x._version
