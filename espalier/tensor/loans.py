"""Views of a moved copy, whose writes must reach the tensor that they are views of; and addresses of memory.

``x[0]`` of an ``x`` whose rows are sharded is a view of the gathered rows, not of ``x``. Such a result is
a *loan*: it bears the twin of its layout (``Layout.loan``) and remembers where it came from. The twin is
another key to the dispatcher's cache, so that a call with a loan, and no other call, comes here. Then

* what is written to a loan is written to its source too (and to that one's source);
* a loan whose source was written to meanwhile takes its values from it again;
* a view of a loan is a loan.

The same twin marks a tensor whose values are *elsewhere*: a parameter that is cut between its uses, or on
their way.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, cast

import torch

from espalier.comm import move
from espalier.layout import Layout
from espalier.layout.layout import D, R
from espalier.sharding.spec import RULES, VIEWS, spellings
from espalier.tensor.dtensor import Arguments, DTensor, is_sparse, plain, stamp, up_to_date
from espalier.torch_private import (
    OpOverload,
    OpOverloadPacket,
    is_a_view,
    memory_id,
    method,
    raw,
    read_version,
    schema_of,
    version_of,
)
from espalier.trees import tensors_in, tree_map

Call = Callable[..., Any]
# the C getters themselves: to be called where torch functions are not intercepted
_address = method("data_ptr")


class ViewSource:
    """Where a loan comes from: ``take(base)`` is the view; None if they share their data."""

    __slots__ = ("base", "take", "version")

    def __init__(self, base: DTensor, take: Callable[[torch.Tensor], torch.Tensor] | None) -> None:
        self.base, self.take = base, take
        self.version = version_of(base)


class StandIn(ABC):
    """In place of a :class:`ViewSource`: a tensor of which this rank holds a part for the time being.

    Attributes:
        recorded: the layout by which autograd knows it.
    """

    recorded: Layout

    @abstractmethod
    def stand_in(self, func: Call | None) -> DTensor:
        """What a call of ``func`` is to compute with in its place: no loan."""

    def part(self) -> DTensor | None:
        """This rank's part, through which gradients flow, without a message; None: by the stand-in."""
        return None

    def takes(self, func: Call) -> bool:
        """Whether its stand-in is to be written to, too, where ``func`` writes to it."""
        return False

    @property
    def is_elsewhere(self) -> bool:
        """Whether the part lies in another memory now than that in which the model computes."""
        return False

    def unused(self) -> None:
        """Be told that a backward pass is over that has gone to the tensor, and added nothing to it."""
        return None

    def handed_out(self) -> None:
        """Be told that somebody gets an alias of the tensor's data (see :func:`hand_out`)."""
        return None

    def arrive(self) -> None:
        """Let what this rank holds of the tensor be there, if it is still on its way."""
        return None


class HandedOut:
    """What others have of a tensor's data: aliases (``x.data``) through which torch counts no writes.

    Attributes:
        times: how often it was handed out, or was given other data.
        before: is called before it is handed out again; None: nothing is.
    """

    def __init__(self) -> None:
        self.times, self.before = 0, cast("Callable[[], None] | None", None)
        self._aliases: list[weakref.ref[torch.Tensor]] = []

    def to(self, alias: torch.Tensor) -> None:
        """One more of them."""
        self.times += 1
        self._aliases = [ref for ref in self._aliases if ref() is not None]
        self._aliases.append(weakref.ref(alias))
        if type(alias) is DTensor:
            alias.__dict__["_lent_by"] = weakref.ref(self)

    def drop(self, alias: torch.Tensor) -> None:
        """It is none any more."""
        self._aliases = [ref for ref in self._aliases if ref() is not alias]

    @property
    def held(self) -> list[torch.Tensor]:
        """Those that somebody still has."""
        return [alias for ref in self._aliases if (alias := ref()) is not None]

    @property
    def is_held(self) -> bool:
        """Whether somebody still has one."""
        return bool(self.held)


class Written:
    """Sees whether a tensor is written to, without holding its memory."""

    def __init__(self, x: torch.Tensor) -> None:
        self._of = weakref.ref(x)
        with raw(), torch.no_grad():
            self._mark = plain(x.detach())  # which counts what is written to x
            self._mark.data = self._mark.new_empty(0)
        self._version = version_of(self._mark)

    @property
    def is_held(self) -> bool:
        """Whether somebody still has it."""
        return self._of() is not None

    def is_new(self) -> bool:
        """Whether it was written to since this was asked last."""
        before, self._version = self._version, version_of(self._mark)
        return self._version != before


def hand_out(x: torch.Tensor, alias: torch.Tensor) -> None:
    """Note that somebody gets an alias of a tensor's data. What was moved of it may be out of date soon."""
    attributes = x.__dict__
    forget_moved(x)
    handed = attributes.get("_handed_out")
    if handed is None:
        handed = attributes["_handed_out"] = HandedOut()
    if handed.before is not None:
        handed.before()
    handed.to(alias)
    source = attributes.get("_source")
    if isinstance(source, StandIn):
        source.handed_out()


def before_handing_out(x: torch.Tensor, call: Callable[[], None]) -> None:
    """From now on a function is called before somebody gets an alias of a tensor's data."""
    x.__dict__.setdefault("_handed_out", HandedOut()).before = call


def note_given(x: torch.Tensor) -> None:
    """Note that a tensor is given other data, whose memory may lie where that before it did."""
    forget_moved(x)
    x.__dict__.setdefault("_handed_out", HandedOut()).times += 1


def pass_on(alias: torch.Tensor, x: torch.Tensor) -> None:
    """Note that a tensor is given the data of another, which may be an alias of one's that was handed out."""
    lender = alias.__dict__.get("_lent_by")
    handed = None if lender is None else lender()
    if handed is not None and handed is not x.__dict__.get("_handed_out"):
        handed.to(x)


def forget_moved(x: torch.Tensor) -> None:
    """What was moved of a tensor is out of date, or may be so soon."""
    mesh = x._layout.mesh  # type: ignore[attr-defined]
    x.__dict__.pop("_moved", None)
    if mesh.lately is not None and mesh.lately[0]() is x:
        mesh.lately = None


def keep_apart(x: torch.Tensor, place: torch.Tensor) -> None:
    """Let aliases of what a tensor held in a place keep its values: others are about to be written there."""
    handed = x.__dict__.get("_handed_out")
    if handed is None:
        return
    with raw(), torch.no_grad():
        for alias in handed.held:
            if _address(alias) == _address(place):
                alias.data = alias.data.clone()
                handed.drop(alias)


def written_mark(x: torch.Tensor) -> tuple[int, int, int]:
    """Changes when a tensor is written to, is given other data, or its data is handed out."""
    if type(x) is DTensor and not x._layout.is_firm:
        x._saved = True  # type: ignore[attr-defined]  # who asks knows it by its addends (see the dispatcher)
    handed = x.__dict__.get("_handed_out")
    with raw():
        return read_version(x), 0 if is_sparse(x) else _address(x), 0 if handed is None else handed.times


def is_handed_out(x: torch.Tensor) -> bool:
    """Whether somebody may write to a tensor now so that its mark stays the same."""
    handed = x.__dict__.get("_handed_out")
    return handed is not None and handed.is_held


def was_handed_out(x: torch.Tensor) -> bool:
    """Whether somebody was ever given an alias of a tensor's data, and may have written to it."""
    handed = x.__dict__.get("_handed_out")
    return handed is not None and handed.times > 0


def is_view(func: Call, args: Sequence[Any]) -> bool:
    """Whether torch promises that a call gives views of its first argument."""
    if func is torch.Tensor.__getitem__:
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        return not any(isinstance(i, torch.Tensor | list | bool) for i in index)
    return func in VIEWS or (isinstance(func, _OPS) and _says_view(func))


_OPS = (OpOverload, OpOverloadPacket)


@lru_cache(maxsize=1024)
def _says_view(op: Any) -> bool:
    """Whether an operator's schema says that it gives views."""
    one = op if isinstance(op, OpOverload) else getattr(op, op.overloads()[0])
    return any(r.alias_info is not None and not r.alias_info.is_write for r in schema_of(one).returns)


def loans_in(tensors: Sequence[torch.Tensor]) -> list[DTensor]:
    """Those among tensors that are loans, each once."""
    return list({id(t): t for t in tensors if type(t) is DTensor and t._layout.own is not t._layout}.values())


def await_values(tensors: Iterable[torch.Tensor]) -> None:
    """Let those be there that are on their way, for who reads their memory past the dispatcher."""
    for x in loans_in([*tensors]):
        source = x.__dict__.get("_source")
        if isinstance(source, StandIn):
            source.arrive()


def part_of(x: DTensor) -> DTensor | None:
    """This rank's part of a tensor that is elsewhere, without a message, if there is a way."""
    source = x.__dict__.get("_source")
    return source.part() if isinstance(source, StandIn) and x._layout.own is not x._layout else None


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
            view = func(whole, *[_whole(a) for a in args[1:]], **{k: _whole(a) for k, a in words.items()})
            return view[i] if several else view

        x._layout = x._layout.own.loan()
        x._source = ViewSource(base, take)  # type: ignore[attr-defined]
    return out


def share(x: DTensor, loan: DTensor) -> DTensor:
    """Make a loan of what shares the data of one."""
    if isinstance(loan._source, StandIn):  # type: ignore[attr-defined]
        return x
    x._layout = x._layout.own.loan()
    x._source = ViewSource(loan, None)  # type: ignore[attr-defined]
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
        if not isinstance(x._source, StandIn):  # type: ignore[attr-defined]
            refresh(x)
        elif not (one and x is args[0]) or x._source.takes(func):
            stand[id(x)] = here = x._source.stand_in(func)  # type: ignore[attr-defined]
            if any(x is t for t in tensors_in(kwargs.get("out"))):
                hand_out(x, here)  # which is written to
            here._of = x  # type: ignore[attr-defined]
    first = args[0] if args else None
    if stand:
        args, kwargs = tree_map(lambda a: stand.get(id(a), a), (args, kwargs))
        loans = [x for x in loans if id(x) not in stand]
        if one and args[0] is not first:
            out = dispatch(DTensor, func, (), args, kwargs)
            return first if out is args[0] else out
    if not writes and RULES.get(func) is not None and torch.is_grad_enabled() and not is_view(func, args):
        args, kwargs = _without_sources(args, kwargs, loans)
    before = [(x, x._layout, x._layout.own, version_of(x)) for x in loans]
    for x, _, own, _ in before:
        x._layout = own
    try:
        out = dispatch(DTensor, func, (), args, kwargs)
    finally:
        for x, loan, own, _ in before:
            if x._layout is own:
                x._layout = loan
    before = [b for b in before if not isinstance(b[0]._source, StandIn)]  # type: ignore[attr-defined]
    loans = [b[0] for b in before]
    for x, _, _, count in before:
        # loans that are views of one copy are counted together, so a name is the better witness
        if x._layout.own is not x._layout and (x is args[0] if one else version_of(x) != count):
            _write_back(x)
    for y in out if isinstance(out, tuple | list) else (out,):
        if type(y) is DTensor and y._layout.own is y._layout:
            of = next((x for x in loans if x is not y and _share(x, y)), None)
            if of is not None:
                share(y, of)
    return out


def _without_sources(args: Any, kwargs: Any, loans: Sequence[DTensor]) -> Any:
    """The arguments with others in place of loans, of the same data: what is computed of.

    Autograd keeps what it saves as it is, and a loan would have its source live until the backward pass.
    """
    with raw():
        others = {id(x): stamp(x.view_as(x), x._layout.own) for x in loans}
    return tree_map(lambda a: others.get(id(a), a), (args, kwargs))


def refresh(x: DTensor) -> DTensor:
    """A loan with its source's values, taken again if that was written to; recorded by autograd."""
    if isinstance(x._source, StandIn):  # type: ignore[attr-defined]
        return x._source.stand_in(None)  # type: ignore[attr-defined]
    source: ViewSource = x._source  # type: ignore[attr-defined]
    base = source.base
    if base._layout.own is not base._layout:
        refresh(base)
    if source.take is None or source.version == version_of(base):
        return x
    layout = x._layout.own
    with raw():
        value = source.take(_whole(base))
        x.copy_(move(value, Layout.replicated(layout.mesh, layout.shape), layout))
    source.version = version_of(base)
    return x


def _write_back(x: DTensor) -> None:
    """Write a loan's values to its source."""
    source: ViewSource = x._source  # type: ignore[attr-defined]
    base = source.base
    if source.take is not None:
        layout = base._layout.own
        with raw():
            full = _whole(base).clone()
            source.take(full).copy_(_whole(x))
            base.copy_(move(full, Layout.replicated(layout.mesh, layout.shape), layout))
        source.version = version_of(base)
    if base._layout.own is not base._layout:
        _write_back(base)


def _whole(a: Any) -> Any:
    if type(a) is DTensor:
        return plain(move(a, a._layout.own, Layout.replicated(a._layout.mesh, a._layout.shape)))
    return a


def _share(x: torch.Tensor, y: torch.Tensor) -> bool:
    with raw():
        return memory_id(x) == memory_id(y)


# ---- what hands out memory: right where this rank holds the whole value, refused elsewhere
#
# Who takes an address believes the shape that stands beside it, and would read past the end of this rank's
# part: ``safetensors`` and kernels of one's own do. Nothing can be gathered here, as often one rank asks
# alone.


def is_whole(layout: Layout) -> bool:
    """Whether every rank of the mesh holds the whole value."""
    return layout.mesh.is_member and all(
        n == 1 or s in (R, D) for n, s in zip(layout.mesh.shape, layout.axes, strict=True)
    )


def here(x: DTensor) -> tuple[Layout, torch.Tensor]:
    """How a tensor lies, and what this rank holds of it, plain and outside autograd."""
    if not isinstance(x.__dict__.get("_source"), StandIn):
        x = up_to_date(x)
    await_values((x,))
    with raw():
        return x._layout.own, plain(x.detach())


def whole(x: DTensor, what: str) -> torch.Tensor:
    """The plain tensor over the memory of one that this rank holds all of.

    Raises:
        ValueError: it holds but a part.
    """
    layout, local = here(x)
    if not is_whole(layout):
        raise ValueError(
            f"{what} of a DTensor would give the memory of this rank's part ({layout!r}) for all of it. "
            "x.full_tensor() is the whole value (call it on all ranks), x.to_local() this rank's part. To "
            "tell tensors apart, in an optimizer say, take them for keys themselves (optimizer.state[p]). To "
            "write a model's weights: engine.export(path), or give what writes them "
            "state_dict=engine.full_state_dict(), on all ranks."
        )
    return local


def address(
    func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """``data_ptr`` and DLPack."""
    x = args[0]
    return func(whole(x, func.__name__).requires_grad_(x.requires_grad), *args[1:], **kwargs)


def interface(
    func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """``__cuda_array_interface__``, which is not there, for those who try, where it is refused."""
    try:
        local = whole(args[0], "__cuda_array_interface__")
    except ValueError as error:
        raise AttributeError(str(error)) from None
    return func(local.requires_grad_(args[0].requires_grad))


def storage(
    func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """``untyped_storage`` and its like."""
    return func(_apart(whole(args[0], func.__name__)), *args[1:], **kwargs)


def storage_offset(
    func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Where the tensor begins in what ``untyped_storage`` gives."""
    local = here(args[0])[1]
    return 0 if _is_member(local) else local.storage_offset()


def _apart(local: torch.Tensor) -> torch.Tensor:
    """The same memory; what is one of many tensors in a flat buffer has a storage of its own.

    So tensors in one buffer are not taken for tied, and each for complete.
    """
    if not _is_member(local):
        return local
    start, n = local.storage_offset() * local.element_size(), local.numel() * local.element_size()
    memory = local.untyped_storage()[start : start + n]
    return torch.empty(0, dtype=local.dtype, device=local.device).set_(
        memory, 0, local.size(), local.stride()
    )


def _is_member(local: torch.Tensor) -> bool:
    if local.is_meta or not local.is_contiguous() or is_a_view(local):
        return False
    return local.untyped_storage().nbytes() > local.numel() * local.element_size()


# ---- numbers given as tensors: sizes, bounds of slices, places
#
# Torch takes a 0-dim tensor of integers wherever it takes such a number. Its value decides about the call,
# and is no part of the dispatcher's key: so it is read first, and the call made with the number.


_NAMES = """
    view reshape view_copy expand expand_copy broadcast_to repeat tile unflatten flatten narrow narrow_copy
    permute transpose swapaxes swapdims movedim moveaxis unsqueeze select select_copy unfold roll chunk split
    split_with_sizes split_copy tensor_split unsafe_chunk unsafe_split topk kthvalue resize_ new_zeros
    new_ones new_empty new_full diagonal tril triu pad interpolate one_hot rot90 as_strided
    adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d
    adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d
"""
_MAKERS = "zeros ones empty full rand randn randint randperm eye arange range linspace logspace"
_MAKING = frozenset(getattr(torch, name) for name in _MAKERS.split())
_TAKING = frozenset(f for name in _NAMES.split() for f in spellings(name)) | {torch.split}
_INDEXING = frozenset({torch.Tensor.__getitem__, torch.Tensor.__setitem__})


def are_tensors(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a number that the call takes is given as a tensor."""
    if func in _INDEXING:
        return _among(args[1], False)
    if func in _TAKING:
        return any(_among(a, True) for a in (*args[1:], *kwargs.values()))
    return func in _MAKING and _among([*args, *kwargs.values()], True)


def read(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """The arguments with these numbers as numbers (a collective for each DTensor that is not replicated)."""
    if func in _INDEXING:
        return (args[0], _number(args[1], False), *args[2:]), kwargs
    named = {k: v if k in ("input", "self") else _number(v, True) for k, v in kwargs.items()}
    first = tuple(_number(a, True) for a in args[:1]) if func in _MAKING else args[:1]
    return (*first, *(_number(a, True) for a in args[1:])), named


def _is_number(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and not x.ndim and x.dtype in _INTEGERS


_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def _among(x: Any, here: bool) -> bool:
    if isinstance(x, slice):
        return any(map(_is_number, (x.start, x.stop, x.step)))
    if type(x) in (tuple, list):
        return any(_among(y, here) for y in x)
    return here and _is_number(x)


def _number(x: Any, here: bool) -> Any:
    if isinstance(x, slice):
        return slice(*(_number(y, True) for y in (x.start, x.stop, x.step)))
    if type(x) in (tuple, list):
        return type(x)(_number(y, here) for y in x)
    return int(x) if here and _is_number(x) else x
