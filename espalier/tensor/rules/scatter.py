"""Gathers and scatters along a dim by an index tensor; along a sharded dim each rank does what falls to it.

Reading, a rank gives nothing where the index points to another, and the output is Partial. Writing,
what is another rank's goes to a row too many. Over a sharded index sums are Partial.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from espalier.layout.layout import normal_dim
from espalier.tensor.rules.indexing import absent, local_index, one_more
from espalier.tensor.rules.spec import Dims, Operand, Placed, Spec, bound_to
from espalier.tensor.rules.table import composed, rule
from espalier.tensor.rules.together import with_one


def _reading(
    x: Operand, at: int, ins: Sequence[Dims], shape: tuple[int, ...], out: Dims, names: str,
    read: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], wraps: bool = False,
) -> Spec:  # fmt: skip
    """The rule of a read along dim ``at`` of the first of ``names`` by the one called index or indices.

    With ``wraps`` no index is out of range: they go round.
    """
    letter = ins[0][at]
    # a gather sends all of x once, a sum the result twice
    few = 2 * math.prod(shape) <= math.prod(x.shape)

    def run(func: Callable[..., Any], args: Any, kwargs: Any, placed: Placed) -> torch.Tensor:
        if not placed.axes_of(placed.ins[0], (at,)):
            return func(*args, **kwargs)
        bound = bound_to(names, args, kwargs)
        local, given = bound["input"], bound["index" if "index" in bound else "indices"]
        given = given.remainder(x.shape[at]) if wraps else given

        def ask(i: int) -> torch.Tensor:
            return read(local.detach().new_empty(()).expand(_alone(x, at)), with_one(given, i))

        index, away = local_index(given, placed.ins[0], at, 0, ask)
        found = read(local if local.shape[at] else one_more(local, at), index)
        away = away if away.ndim == found.ndim else away.view(-1, *[1] * (found.ndim - 1 - at))
        return found.masked_fill(away, absent(found))

    return Spec(
        ins, [out], [shape], linear=[(0,)], run=run if x.layout.cuts[at] else None,
        reduce={letter: "sum"} if few else {}, blocked=frozenset() if few else frozenset([letter]),
        fails=() if wraps else (1,),
    )  # fmt: skip


def _alone(x: Operand, at: int) -> list[int]:
    """The shape of dim ``at`` without others."""
    return [n if d == at else 1 for d, n in enumerate(x.shape)]


@rule("index_select")
def index_select(x: Operand, dim: int, index: Operand) -> Spec | None:
    """The index may be sharded; few indices of a sharded dim leave a Partial."""
    if x.ndim == 0:
        return None
    at = normal_dim(dim, x.ndim)
    dims = x.dims()
    picked: Dims = ("i",) if index.ndim else (None,)
    out = (*dims[:at], *picked, *dims[at + 1 :])
    shape = (*x.shape[:at], index.shape[0] if index.ndim else 1, *x.shape[at + 1 :])
    return _reading(
        x, at, [dims, picked if index.ndim else ()], shape, out, "input dim index",
        lambda local, i: torch.index_select(local, at, i),
    )  # fmt: skip


@rule("gather")
def gather(x: Operand, dim: int, index: Operand, *, sparse_grad: bool = False) -> Spec | None:
    """Where the index spans another dim fully, that may be sharded; so may dim, for few indices."""
    if x.ndim != index.ndim or x.ndim == 0:
        return None
    at = normal_dim(dim, x.ndim)
    own = tuple(("i", i) if i == at or n != index.shape[i] else ("d", i) for i, n in enumerate(x.shape))
    # a dim of which the index takes a part begins where x begins: it must be whole
    ins = tuple(("d", i) if i == at or n == index.shape[i] else None for i, n in enumerate(x.shape))
    return _reading(
        x, at, [ins, own], index.shape, own, "input dim index",
        lambda local, i: torch.gather(local, at, i),
    )  # fmt: skip


@rule("take_along_dim")
def take_along_dim(x: Operand, indices: Operand, dim: int | None = None) -> Spec | None:
    """gather with broadcasting."""
    if dim is None or x.ndim != indices.ndim:
        return None
    at = normal_dim(dim, x.ndim)
    shape = tuple(
        n if i == at else max(n, m) if n and m else 0
        for i, (m, n) in enumerate(zip(x.shape, indices.shape, strict=True))
    )
    out = tuple(("i", i) if i == at else ("d", i) for i in range(x.ndim))
    ins = [
        tuple(("d", i) if i == at or m == shape[i] else None for i, m in enumerate(x.shape)),
        tuple(
            ("i", i) if i == at else ("d", i) if n == shape[i] else None for i, n in enumerate(indices.shape)
        ),
    ]
    return _reading(
        x, at, ins, shape, out, "input indices dim",
        lambda local, i: torch.take_along_dim(local, i, at), wraps=True,
    )  # fmt: skip


@composed("take_along_dim")
def flat_take_along_dim(x: Any, indices: Any, dim: Any = None) -> Any:
    """take_along_dim without a dim."""
    return torch.take_along_dim(x.flatten(), indices.flatten(), 0) if dim is None else NotImplemented


@composed("take")
def take(x: Any, index: Any) -> Any:
    """x as one row, read at flat indices."""
    found = x.reshape(x.shape or (1,))[_coordinates(index, x.shape)]
    return found if index.ndim else found.clone()  # one index makes a view


@composed("put")
def put(x: Any, index: Any, source: Any, accumulate: bool = False) -> Any:
    """x as one row, written at flat indices."""
    if not x.shape:
        return put(x.reshape(1), index, source, accumulate).reshape(())
    return x.index_put(_coordinates(index, x.shape), source.reshape(index.shape), accumulate)


@composed("put_")
def put_(x: Any, index: Any, source: Any, accumulate: bool = False) -> Any:
    """put in place."""
    if not x.shape:
        return x.copy_(put(x, index, source, accumulate))
    return x.index_put_(_coordinates(index, x.shape), source.reshape(index.shape), accumulate)


def _coordinates(index: Any, shape: tuple[int, ...]) -> tuple[Any, ...]:
    """Flat indices as one index for each dim; the first is out of range if they are."""
    rest = torch.where(index < 0, index + math.prod(shape), index)
    found: list[Any] = []
    for n in reversed(shape[1:]):
        found.insert(0, rest % n)
        rest = rest // n
    return (rest, *found)


def _writing(
    x: Operand,
    at: int,
    ins: list[Dims],
    *,
    linear: bool = False,
    summed: Any = None,
    like: Operand | None = None,
) -> Spec:
    """The rule of a write along dim ``at`` by operand 1."""
    groups = [(0,)] if like is None else [(0, like.index)]
    alone = _alone(x, at)

    def run(func: Callable[..., Any], args: Any, kwargs: Any, placed: Placed) -> torch.Tensor:
        lay = placed.ins[0]
        if not placed.axes_of(lay, (at,)):
            return func(*args, **kwargs)
        x = args[0] if args else kwargs["input"]
        index = args[2] if len(args) > 2 else kwargs["index"]

        def ask(i: int) -> None:
            some = tuple(with_one(a, 0) if isinstance(a, torch.Tensor) else a for a in args)
            named = {k: with_one(a, 0) if isinstance(a, torch.Tensor) else a for k, a in kwargs.items()}
            some, named = _instead(some, named, x.detach().new_zeros(alone), with_one(index, i))
            func(*some, **named)

        local, _ = local_index(index, lay, at, lay.local_shape[at], ask)
        more = one_more(x, at)
        args, kwargs = _instead(args, kwargs, more, local)
        out = func(*args, **kwargs).narrow(at, 0, lay.local_shape[at])
        return x.copy_(out) if func.__name__.endswith("_") else out

    return Spec(
        ins, [ins[0]], [x.shape], linear=groups if linear else [], reduce={summed: "sum"} if summed else {},
        addends=(0,) if summed else (), run=run if x.layout.cuts[at] else None, fails=(1,),
    )  # fmt: skip


def _instead(args: tuple[Any, ...], kwargs: dict[str, Any], x: Any, index: Any) -> tuple[Any, Any]:
    """The arguments with another x and index."""
    for name, place, value in (("input", 0, x), ("index", 2, index)):
        if len(args) > place:
            args = (*args[:place], value, *args[place + 1 :])
        else:
            kwargs = {**kwargs, name: value}
    return args, kwargs


@rule("scatter scatter_reduce", inplace=True)
def scatter(x: Operand, dim: int, index: Operand, src: Any = None, *args: Any, **kwargs: Any) -> Spec | None:
    """Where x, index and src span another dim fully, that may be sharded; dim itself too."""
    return _scattered(x, dim, index, src, linear=False)


@rule("scatter_add", inplace=True)
def scatter_add(x: Operand, dim: int, index: Operand, src: Operand) -> Spec | None:
    """As scatter, and linear: over a sharded index the output is Partial."""
    return _scattered(x, dim, index, src, linear=True)


def _scattered(x: Operand, dim: int, index: Operand, src: Any, linear: bool) -> Spec | None:
    if x.ndim == 0 or index.ndim != x.ndim:
        return None
    at = normal_dim(dim, x.ndim)
    source = src if isinstance(src, Operand) and src.ndim else None
    sizes = [x.shape, index.shape, *([source.shape] if source else [])]
    whole = [all(s[i] == x.shape[i] for s in sizes) for i in range(x.ndim)]
    # where index and src are of one size they may be cut alike
    along = ("j", at) if linear and source and source.shape[at] == index.shape[at] else None
    dims: Dims = tuple(("d", i) if i == at or whole[i] else None for i in range(x.ndim))
    given: Dims = tuple(along if i == at else ("d", i) if whole[i] else None for i in range(x.ndim))
    ins = [dims, given, *([given] if source else [()] if isinstance(src, Operand) else [])]
    return _writing(x, at, ins, linear=linear, summed=along, like=source)


@rule("index_add", inplace=True)
def index_add(x: Operand, dim: int, index: Operand, source: Operand, *, alpha: Any = 1) -> Spec | None:
    """Rows added; over a sharded index the output is Partial."""
    return _rows(x, dim, index, source, summed="j", linear=True)


@rule("index_copy", inplace=True)
def index_copy(x: Operand, dim: int, index: Operand, source: Operand) -> Spec | None:
    """Rows put in place of others."""
    return _rows(x, dim, index, source, linear=True)


@rule("index_reduce", inplace=True)
def index_reduce(
    x: Operand, dim: int, index: Operand, source: Operand, reduce: str, *, include_self: bool = True
) -> Spec | None:
    """Rows multiplied, averaged, ..."""
    return _rows(x, dim, index, source)


def _rows(
    x: Operand, dim: int, index: Operand, source: Operand, summed: Any = None, linear: bool = False
) -> Spec | None:
    if x.ndim == 0 or x.ndim != source.ndim or index.ndim != 1:
        return None
    at = normal_dim(dim, x.ndim)
    dims = x.dims()
    ins = [dims, (summed,), (*dims[:at], summed, *dims[at + 1 :])]
    return _writing(x, at, ins, linear=linear, summed=summed, like=source)


@rule("index_fill", inplace=True)
def index_fill(x: Operand, dim: int, index: Operand, value: Any) -> Spec | None:
    """One value in some rows."""
    if x.ndim == 0 or index.ndim != 1:
        return None
    ins: list[Dims] = [x.dims(), (None,), *([()] if isinstance(value, Operand) else [])]
    like = value if isinstance(value, Operand) else None
    return _writing(x, normal_dim(dim, x.ndim), ins, linear=like is not None, like=like)
