"""x[index] and its like: slices of a sharded dim exchange rows, single indices and few of them sum."""

from __future__ import annotations

import math
import operator
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, get_args

import torch
import torch.nn.functional as F

from espalier.comm import exchange, spans_of
from espalier.layout import Layout, local_box
from espalier.layout.layout import normal_dim
from espalier.sharding.spec import Dims, Letter, Operand, Placed, Spec, bound_to, composed, rule
from espalier.tensor.rules.joint_failure import with_one, within

Tensors = Operand | torch.Tensor
_LONG = 32  # from so many items on torch takes a list for a tensor


def items_of(index: Any, ndim: int) -> list[Any] | None:
    """An index as one item for each dim (slice, integer or tensor) and None for each new dim.

    Lists become tensors. None: the shape of the result hangs on values, or the index is of another kind.
    """
    items: list[Any] = []
    for item in _as_tuple(index):
        if isinstance(item, list):
            item = torch.tensor(item) if item else torch.zeros(0, dtype=torch.int64)
        if isinstance(item, Tensors):
            if item.dtype in (torch.bool, torch.uint8):
                return None
        elif isinstance(item, bool):
            return None
        elif isinstance(item, slice):
            if any(isinstance(v, Tensors) for v in (item.start, item.stop, item.step)):
                return None
        elif item is not None and item is not Ellipsis:
            try:
                item = operator.index(item)
            except TypeError:
                return None
        items.append(item)
    used = sum(1 for i in items if i is not None and i is not Ellipsis)
    at = next((k for k, i in enumerate(items) if i is Ellipsis), len(items))
    return [*items[:at], *[slice(None)] * (ndim - used), *items[at + 1 :]]


def _as_tuple(index: Any) -> tuple[Any, ...]:
    """One item for each dim that an index names. torch takes some lists, x[[rows, columns]], for tuples."""
    if isinstance(index, tuple):
        return index
    is_short = isinstance(index, list) and len(index) < _LONG
    return tuple(index) if is_short and any(map(_names_dims, index)) and _lists_are_tuples() else (index,)


def _names_dims(item: Any) -> bool:
    return item is None or item is Ellipsis or isinstance(item, (*get_args(Tensors), Sequence, slice))


@cache
def _lists_are_tuples() -> bool:
    """Whether this torch does: it has announced that it will not."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.zeros(1, 1)[[[0], [0]]].ndim == 1


@dataclass
class Reading:
    """What an index makes of a tensor.

    Attributes:
        ins: a letter for each dim of x.
        out: the letters of x[index], ``shape`` its shape.
        joint: where in the result the index tensors' own dims begin, and their shape.
        tensors: the letters of each index tensor.
        singles: the letters of the dims that integers and tensors index.
        sliced: dim of x to dim of the result, where a part of it is taken.
    """

    ins: list[Letter | None]
    out: list[Letter | None]
    shape: list[int]
    joint: tuple[int, tuple[int, ...]]
    tensors: list[Dims]
    singles: list[Letter]
    sliced: dict[int, int]


def read(shape: tuple[int, ...], items: Sequence[Any]) -> Reading:
    """How the dims of x[items] stem from those of x.

    Raises:
        IndexError: an integer is out of range.
    """
    ins: list[Letter | None] = [("x", i) for i in range(len(shape))]
    singles: list[Letter] = []
    partly: dict[Letter, int] = {}
    out: list[Letter | None] = []
    sizes: list[int] = []
    index_tensors = [i for i in items if isinstance(i, Tensors)]
    joint = tuple(torch.broadcast_shapes(*(t.shape for t in index_tensors)))
    names: Dims = tuple(("i", k) for k in range(len(joint)))
    # integers count among the advanced indices when tensors stand beside them
    advanced = [k for k, i in enumerate(items) if isinstance(i, Tensors | int)] if index_tensors else []
    adjacent = bool(advanced) and advanced == list(range(advanced[0], advanced[-1] + 1))
    place = 0
    dim = 0
    for k, item in enumerate(items):
        if index_tensors and k == advanced[0]:
            place = len(out) if adjacent else 0
        if item is None:
            out.append(None)
            sizes.append(1)
            continue
        n, letter = shape[dim], ins[dim]
        if isinstance(item, slice):
            taken = range(*item.indices(n))
            if len(taken) != n or (n > 1 and taken.step != 1):
                partly[letter] = dim
            out.append(letter)
            sizes.append(len(taken))
        else:
            if isinstance(item, int) and not -n <= item < n:
                raise IndexError(f"index {item} is out of bounds for dimension {dim} with size {n}")
            singles.append(letter)
        dim += 1
    out[place:place] = names
    sizes[place:place] = joint
    tensors = [
        tuple(
            names[k + len(joint) - t.ndim] if n == joint[k + len(joint) - t.ndim] else None
            for k, n in enumerate(t.shape)
        )
        for t in index_tensors
    ]
    sliced = {d: out.index(letter) for letter, d in partly.items()}
    return Reading(ins, out, sizes, (place, joint), tensors, singles, sliced)


# a mask is not an index
@rule(torch.Tensor.__getitem__)
def getitem(x: Operand, index: Any) -> Spec | None:
    """x[index]. Along a sharded dim a slice exchanges rows; an integer, or few indices, leave a Partial."""
    items = items_of(index, x.ndim)
    return None if items is None else taking(x, items, lambda args, kwargs: items_of(args[1], x.ndim))


def taking(
    x: Operand, items: Sequence[Any], again: Callable[[Any, Any], Sequence[Any] | None] | None = None
) -> Spec:
    """The rule of x[items]; ``again`` gives the items of the local call (where there are tensors)."""
    seen = read(x.shape, items)
    operands = [dims for dims, t in zip(seen.tensors, _tensors(items), strict=True) if isinstance(t, Operand)]
    # a gather sends all of x once, a sum the result twice
    few = not seen.tensors or 2 * math.prod(seen.shape) <= math.prod(x.shape)

    def run(func: Callable[..., Any], args: Any, kwargs: Any, placed: Placed) -> Any:
        local = args[0] if args else kwargs["input"]
        return _take(local, (again and again(args, kwargs)) or items, seen, placed)

    touched = [d for d, letter in enumerate(seen.ins) if letter in seen.singles or d in seen.sliced]
    return Spec(
        [tuple(seen.ins), *operands],
        [tuple(seen.out)],
        [tuple(seen.shape)],
        reduce=dict.fromkeys(seen.singles, "sum") if few else {},
        linear=[(x.index,)],
        blocked=frozenset() if few else frozenset(seen.singles),
        run=run if any(x.layout.cuts[d] for d in touched) or again is None else None,
        fails=range(1, 1 + len(operands)),
    )


def _tensors(items: Sequence[Any]) -> list[Any]:
    return [i for i in items if isinstance(i, Tensors)]


def _take(x: torch.Tensor, items: Sequence[Any], seen: Reading, placed: Placed) -> torch.Tensor:
    lay, out = placed.ins[0], placed.outs[0]
    box = local_box(lay)
    here: list[Any] = []
    away: torch.Tensor | None = None
    d = 0
    for item in items:
        if item is None:
            here.append(None)
            continue
        if placed.axes_of(lay, (d,)):
            offset, size = box.offsets[d], box.sizes[d]
            if isinstance(item, slice):
                if d in seen.sliced:
                    x = sliced(x, item, lay, d, out, seen.sliced[d])
                item = slice(None)
            elif isinstance(item, int):
                item = item % lay.shape[d] - offset
                # a copy on its own rank too, or the ranks would differ in whether the result is a view
                is_here = 0 <= item < size
                x = x.narrow(d, item, 1).clone() if is_here else one_more(x.narrow(d, 0, 0), d)
                item = 0
            else:
                item, outside = local_index(item, lay, d, 0, _read_at(lay, d))
                away = outside if away is None else away | outside
                x = x if size else one_more(x, d)
        here.append(item)
        d += 1
    rows = x[tuple(here)]
    if away is None:
        return rows
    place, joint = seen.joint
    return rows.masked_fill(away[(..., *[None] * (rows.ndim - place - len(joint)))], absent(rows))


def absent(x: torch.Tensor) -> float:
    """What adds nothing: not even to a negative zero."""
    return -0.0 if x.is_floating_point() or x.is_complex() else 0


def one_more(x: torch.Tensor, dim: int) -> torch.Tensor:
    """A copy with one more index along a dim, which holds nothing."""
    return F.pad(x, (*[0, 0] * (x.ndim - 1 - dim), 0, 1), value=absent(x))


def local_index(
    index: torch.Tensor, lay: Layout, dim: int, outside: int, ask: Callable[[int], Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Global indices of a dim as local ones; ``outside`` for those on other ranks, and which these are.

    Indices out of range are refused as by torch (see ``together.within``).
    """
    n, box = lay.shape[dim], local_box(lay)
    within(index, n, lay.mesh, ask)
    local = torch.where(index < 0, index + n, index) - box.offsets[dim]
    away = (local < 0) | (local >= box.sizes[dim])
    return local.masked_fill(away, outside), away


def _read_at(lay: Layout, dim: int) -> Callable[[int], Any]:
    return lambda i: torch.empty(()).expand((1,) * dim + (lay.shape[dim],))[..., torch.tensor([i])]


def overlap(wanted: range, start: int, end: int) -> tuple[int, int]:
    """Which of the positions ``wanted`` (rising) fall into [start, end): the first and the one after."""
    first = min(max(-((wanted.start - start) // wanted.step), 0), len(wanted))
    return first, min(max(-((wanted.start - end) // wanted.step), first), len(wanted))


def sliced(x: torch.Tensor, item: slice, lay: Layout, dim: int, out: Layout, to: int) -> torch.Tensor:
    """A slice of a sharded dim: each rank takes what falls into its rows, then they are spread anew."""
    wanted = range(*item.indices(lay.shape[dim]))
    have = [(overlap(wanted, *span),) for (span,) in spans_of(lay, dim)]
    offset, size = (values[dim] for values in local_box(lay))
    first, last = overlap(wanted, offset, offset + size)
    begin = wanted.start + first * wanted.step - offset
    local = slice(begin, begin + (last - first) * wanted.step, wanted.step) if last > first else slice(0, 0)
    return exchange(x[(*[slice(None)] * dim, local)], lay.mesh, lay.cuts[dim], dim, have, spans_of(out, to))


@rule(torch.Tensor.__setitem__)
def setitem(x: Operand, index: Any, value: Any) -> Spec | None:
    """x[index] = value: each rank writes what falls into its box."""
    if isinstance(index, tuple) and len(index) == 1:
        (index,) = index
    if isinstance(index, Operand) and index.dtype in (torch.bool, torch.uint8):
        return _masked(x, index, value)
    items = items_of(index, x.ndim)
    if items is None:
        return None

    def run(func: Callable[..., Any], args: Any, kwargs: Any, placed: Placed) -> None:
        written, index, value = args
        items = items_of(index, x.ndim)
        assert items is not None
        if not _tensors(items):
            _set_part(func, written, items, value, placed)
        elif not _write_among(written, items, placed, lambda x, i: func(x, i, value)):
            func(written, index, value)

    return _putting(x, items, value, run)


def _putting(x: Operand, items: Sequence[Any], value: Any, run: Callable[..., Any]) -> Spec:
    """The rule of writing ``value`` to x[items]."""
    seen = read(x.shape, items)
    # a slice of a sharded dim beside tensors is not worked out: that dim must be whole
    gone = {d for d in seen.sliced if seen.tensors}
    ins = tuple(None if d in gone else letter for d, letter in enumerate(seen.ins))
    operands: list[Dims] = [ins, *[(None,) * t.ndim for t in _tensors(items) if isinstance(t, Operand)]]
    fails = range(1, len(operands))
    if isinstance(value, Operand):
        skip = len(seen.shape) - value.ndim
        whole = {letter for d, letter in enumerate(seen.ins) if d not in seen.sliced}
        operands.append(
            tuple(
                seen.out[i + skip]
                if i + skip >= 0 and n == seen.shape[i + skip] and seen.out[i + skip] in whole
                else None
                for i, n in enumerate(value.shape)
            )
        )
    linear = [(0, len(operands) - 1)] if isinstance(value, Operand) else []
    return Spec(operands, [ins], [x.shape], linear=linear, inplace=0, run=run, fails=fails)


def _masked(x: Operand, mask: Operand, value: Any) -> Spec | None:
    """x[mask] = one value: masked_fill_, the mask spanning the first dims."""
    if isinstance(value, Operand) and value.ndim:
        return None
    dims = x.dims()
    ins = [dims, dims[: mask.ndim], *([()] if isinstance(value, Operand) else [])]
    return Spec(ins, [dims], [x.shape], inplace=0)


def _set_part(
    func: Callable[..., Any], x: torch.Tensor, items: Sequence[Any], value: Any, placed: Placed
) -> None:
    """For integers and slices, which the box cuts down; the value with them."""
    lay = placed.ins[0]
    box = local_box(lay)
    here: list[slice | int] = []
    d, right = len(lay.shape), 0  # right: dims of the result behind this one
    for item in reversed(items):
        stands = isinstance(value, torch.Tensor) and value.ndim > right
        if item is None:
            value = value.squeeze(-1 - right) if stands else value
            continue
        d -= 1
        if isinstance(item, int):
            at = item % lay.shape[d] - box.offsets[d]
            if 0 <= at < box.sizes[d]:  # as torch's: the value may be the very memory (x[i, 1:] += 1)
                here.insert(0, at)
                continue
            item = slice(item % lay.shape[d], item % lay.shape[d] + 1)
            if isinstance(value, torch.Tensor) and value.ndim >= right:
                value = value.unsqueeze(value.ndim - right)
                stands = False
        wanted = range(*item.indices(lay.shape[d]))
        first, last = overlap(wanted, box.offsets[d], box.offsets[d] + box.sizes[d])
        begin = wanted.start + first * wanted.step - box.offsets[d]
        end = begin + (last - first) * wanted.step
        here.insert(0, slice(begin, end, wanted.step) if last > first else slice(0, 0))
        if stands and value.shape[-1 - right] == len(wanted) != 1:
            value = value.narrow(-1 - right, first, last - first)
        right += 1
    func(x, tuple(here), value)


def _write_among(
    x: torch.Tensor, items: Sequence[Any], placed: Placed, write: Callable[[torch.Tensor, Any], Any]
) -> bool:
    """Write to x by index tensors; what is another rank's goes to a row too many. False: none is sharded."""
    lay = placed.ins[0]
    box = local_box(lay)
    more, here, d = x, [], 0
    for item in items:
        if item is not None:
            if placed.axes_of(lay, (d,)) and not isinstance(item, slice):
                if isinstance(item, int):
                    item = item % lay.shape[d] - box.offsets[d]
                    item = item if 0 <= item < box.sizes[d] else box.sizes[d]
                else:
                    item, _ = local_index(item, lay, d, box.sizes[d], _read_at(lay, d))
                more = one_more(more, d)
            d += 1
        here.append(item)
    if more is x:
        return False
    write(more, tuple(here))
    x.copy_(more[tuple(slice(n) for n in box.sizes)])
    return True


@rule("index_put", inplace=True)
def index_put(x: Operand, indices: Any, values: Any, accumulate: bool = False) -> Spec | None:
    """x with values at x[indices]: as x[indices] = values."""
    items = items_of(tuple(indices), x.ndim)
    if items is None:
        return None

    def run(func: Callable[..., Any], args: Any, kwargs: Any, placed: Placed) -> torch.Tensor:
        bound = bound_to("self indices values accumulate", args, kwargs)
        written, add = bound["self" if "self" in bound else "input"], bound.get("accumulate", False)
        if func is not torch.Tensor.index_put_ and func is not torch.index_put_:
            written = written.clone()
        items = items_of(tuple(bound["indices"]), x.ndim)
        assert items is not None

        def write(target: torch.Tensor, index: Any) -> None:
            target.index_put_([i for i in index if isinstance(i, torch.Tensor)], bound["values"], add)

        if not _write_among(written, items, placed, write):
            write(written, items)
        return written

    spec = _putting(x, items, values, run)
    spec.inplace = None
    return spec


@rule("narrow narrow_copy")
def narrow(x: Operand, dim: int, start: Any, length: int) -> Spec | None:
    """A stretch of a dim."""
    if isinstance(start, Operand):
        return None
    at = normal_dim(dim, x.ndim)
    first = start + x.shape[at] if start < 0 else start
    if not 0 <= first <= first + length <= x.shape[at]:
        raise IndexError(f"narrow: {first} to {first + length} is out of bounds for size {x.shape[at]}.")
    return _of_dim(x, at, slice(first, first + length))


@rule("select select_copy")
def select(x: Operand, dim: int, index: Any) -> Spec | None:
    """One index of a dim."""
    return None if isinstance(index, Operand) else _of_dim(x, normal_dim(dim, x.ndim), operator.index(index))


def _of_dim(x: Operand, at: int, item: Any) -> Spec:
    spec = taking(x, [item if d == at else slice(None) for d in range(x.ndim)])
    if not x.layout.cuts[at]:
        spec.run = None
    return spec


@rule("one_hot")
def one_hot(x: Operand, num_classes: int = -1) -> Spec | None:
    """A new last dim of classes."""
    if num_classes == -1:
        return None
    return Spec([x.dims()], [(*x.dims(), None)], [(*x.shape, num_classes)], fails=(0,))


# ---- gathers and scatters along a dim by an index tensor; along a sharded dim each rank does what falls to
# it
#
# Reading, a rank gives nothing where the index points to another, and the output is Partial. Writing, what
# is another rank's goes to a row too many. Over a sharded index sums are Partial.


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
        local, index_local = bound["input"], bound["index" if "index" in bound else "indices"]
        index_local = index_local.remainder(x.shape[at]) if wraps else index_local

        def ask(i: int) -> torch.Tensor:
            return read(local.detach().new_empty(()).expand(_alone(x, at)), with_one(index_local, i))

        index, away = local_index(index_local, placed.ins[0], at, 0, ask)
        values = read(local if local.shape[at] else one_more(local, at), index)
        away = away if away.ndim == values.ndim else away.view(-1, *[1] * (values.ndim - 1 - at))
        return values.masked_fill(away, absent(values))

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
    index_dims = tuple(
        ("i", i) if i == at or n != index.shape[i] else ("d", i) for i, n in enumerate(x.shape)
    )
    # a dim of which the index takes a part begins where x begins: it must be whole
    ins = tuple(("d", i) if i == at or n == index.shape[i] else None for i, n in enumerate(x.shape))
    return _reading(
        x, at, [ins, index_dims], index.shape, index_dims, "input dim index",
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
    values = x.reshape(x.shape or (1,))[_coordinates(index, x.shape)]
    return values if index.ndim else values.clone()  # one index makes a view


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
    indices: list[Any] = []
    for n in reversed(shape[1:]):
        indices.insert(0, rest % n)
        rest = rest // n
    return (rest, *indices)


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
    index_dims: Dims = tuple(along if i == at else ("d", i) if whole[i] else None for i in range(x.ndim))
    ins = [dims, index_dims, *([index_dims] if source else [()] if isinstance(src, Operand) else [])]
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
