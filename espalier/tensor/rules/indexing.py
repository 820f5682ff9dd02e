"""Slices, indices, gathers and scatters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from espalier.layout import local_box
from espalier.layout.layout import normal_dim
from espalier.tensor.rules.spec import Dims, Letter, Operand, Placed, Rules, Spec


def getitem(x: Operand, index: Any) -> Spec | None:
    """x[index]: dims taken whole keep their shards; indexed ones must be whole.

    Index tensors may be sharded: the result is, too.
    """
    items = index if isinstance(index, tuple) else (index,)
    if any(_is_mask(i) or isinstance(i, list | bool) for i in items):
        return None
    ins, out, shape, ops = _indexed(x, items)
    if ins is None:
        return None
    linear = [(x.index,)]
    return Spec([ins, *(dims for _, dims in ops)], [out], [shape], linear=linear)


def setitem(x: Operand, index: Any, value: Any) -> Spec | None:
    """x[index] = value for integers and slices: each rank writes what falls into its box."""
    items = index if isinstance(index, tuple) else (index,)
    if len(items) == 1 and _is_mask(items[0]):
        return _masked(x, items[0], value)
    if any(_is_mask(i) or isinstance(i, list | Operand | bool) for i in items):
        return None
    if any(i is None for i in items) and isinstance(value, Operand):
        return None
    letters, out, shape, _ = _indexed(x, items)
    if letters is None:
        return None
    # a dim that is not taken whole may be sharded: x has it alone
    ins = tuple(("part", i) if d is None else d for i, d in enumerate(letters))
    operands: list[Dims] = [ins]
    if isinstance(value, Operand):
        skip = len(shape) - value.ndim
        operands.append(
            tuple(
                out[i + skip] if i + skip >= 0 and n == shape[i + skip] else None
                for i, n in enumerate(value.shape)
            )
        )
    linear = [(0, 1)] if len(operands) == 2 else []
    return Spec(operands, [ins], [x.shape], linear=linear, inplace=0, run=_set_part)


def _masked(x: Operand, mask: Operand, value: Any) -> Spec | None:
    """x[mask] = one value: masked_fill_, the mask spanning the first dims."""
    if isinstance(value, Operand) and value.ndim:
        return None
    dims = x.dims()
    ins = [dims, dims[: mask.ndim], *([()] if isinstance(value, Operand) else [])]
    return Spec(ins, [dims], [x.shape], inplace=0)


def _set_part(func: Callable[..., Any], args: Any, kwargs: Any, placed: Placed) -> None:
    x, index, value = args
    box = local_box(placed.ins[0])
    full = placed.ins[0].shape
    if box.sizes == full:
        func(x, index, value)
        return
    given = [i for i in (index if isinstance(index, tuple) else (index,)) if i is not None]
    at = next((k for k, i in enumerate(given) if i is Ellipsis), len(given))
    rest = len(full) - sum(1 for i in given if i is not Ellipsis)
    items = [*given[:at], *[slice(None)] * rest, *given[at + 1 :]]
    here: list[slice] = []
    for d in reversed(range(len(full))):
        item, right = items[d], len(full) - 1 - d
        if not isinstance(item, slice):
            item = slice(int(item) % full[d], int(item) % full[d] + 1)
            if isinstance(value, torch.Tensor) and value.ndim >= right:
                value = value.unsqueeze(value.ndim - right)
        start, stop, step = item.indices(full[d])
        count = len(range(start, stop, step))
        # those of the positions start + k * step that fall into the box
        first = min(max(-((start - box.offsets[d]) // step), 0), count)
        last = min(max(-((start - box.offsets[d] - box.sizes[d]) // step), first), count)
        begin = start + first * step - box.offsets[d]
        here.insert(0, slice(begin, begin + (last - first) * step, step) if last > first else slice(0, 0))
        if isinstance(value, torch.Tensor) and value.ndim > right and value.shape[-1 - right] == count != 1:
            value = value.narrow(-1 - right, first, last - first)
    func(x, tuple(here), value)


def _is_mask(i: Any) -> bool:
    return isinstance(i, Operand) and i.dtype in (torch.bool, torch.uint8)


def _indexed(
    x: Operand, items: tuple[Any, ...]
) -> tuple[Dims | None, Dims, tuple[int, ...], list[tuple[int, Dims]]]:
    """Letters of x, letters and shape of x[items], and the index operands with theirs."""
    used = sum(1 for i in items if i is not None and i is not Ellipsis)
    if any(i is Ellipsis for i in items):
        at = next(k for k, i in enumerate(items) if i is Ellipsis)
        items = (*items[:at], *[slice(None)] * (x.ndim - used), *items[at + 1 :])
    else:
        items = (*items, *[slice(None)] * (x.ndim - used))
    ins: list[Letter | None] = list(x.dims("x"))
    parts: list[tuple[Letter | None, int] | Operand] = []
    dim = 0
    for item in items:
        if item is None:
            parts.append((None, 1))
            continue
        n = x.shape[dim]
        if isinstance(item, slice):
            if any(isinstance(v, Operand) for v in (item.start, item.stop, item.step)):
                return None, (), (), []
            length = len(range(*item.indices(n)))
            if length != n or item.step not in (None, 1):
                ins[dim] = None
            parts.append((ins[dim], length))
        elif isinstance(item, Operand):
            ins[dim] = None
            parts.append(item)
        else:
            normal_dim(int(item), n, "index")
            ins[dim] = None
        dim += 1
    return _result(tuple(ins), parts, items)


def _result(
    ins: Dims, parts: list[tuple[Letter | None, int] | Operand], items: tuple[Any, ...]
) -> tuple[Dims | None, Dims, tuple[int, ...], list[tuple[int, Dims]]]:
    tensors = [p for p in parts if isinstance(p, Operand)]
    if not tensors:
        out = tuple(p[0] for p in parts if not isinstance(p, Operand))
        return ins, out, tuple(p[1] for p in parts if not isinstance(p, Operand)), []
    # integers count among the advanced indices when tensors stand beside them
    advanced = [k for k, i in enumerate(items) if isinstance(i, Operand | int)]
    adjacent = advanced == list(range(advanced[0], advanced[-1] + 1))
    joint = tuple(torch.broadcast_shapes(*(t.shape for t in tensors)))
    names: Dims = tuple(("i", k) for k in range(len(joint)))
    operands = [
        (
            t.index,
            tuple(
                names[k + len(joint) - t.ndim] if n == joint[k + len(joint) - t.ndim] else None
                for k, n in enumerate(t.shape)
            ),
        )
        for t in tensors
    ]
    plain = [p for p in parts if not isinstance(p, Operand)]
    before = sum(1 for i in items[: advanced[0]] if not isinstance(i, int)) if adjacent else 0
    out = (*(p[0] for p in plain[:before]), *names, *(p[0] for p in plain[before:]))
    shape = (*(p[1] for p in plain[:before]), *joint, *(p[1] for p in plain[before:]))
    return ins, out, shape, operands


def index_select(x: Operand, dim: int, index: Operand) -> Spec:
    """Whole along dim; the index may be sharded."""
    at = normal_dim(dim, x.ndim)
    dims = x.dims()
    ins = tuple(None if i == at else d for i, d in enumerate(dims))
    picked: Dims = ("i",) if index.ndim else (None,)
    out = tuple(picked[0] if i == at else d for i, d in enumerate(dims))
    shape = tuple((index.shape[0] if index.ndim else 1) if i == at else n for i, n in enumerate(x.shape))
    return Spec([ins, picked if index.ndim else ()], [out], [shape], linear=[(0,)])


def gather(x: Operand, dim: int, index: Operand, *, sparse_grad: bool = False) -> Spec:
    """Whole along dim; where the index spans another dim fully, that may be sharded."""
    at = normal_dim(dim, x.ndim)
    shared = [("d", i) if i != at and x.shape[i] == index.shape[i] else None for i in range(x.ndim)]
    own = tuple(("i", i) if i == at else s for i, s in enumerate(shared))
    return Spec([tuple(shared), own], [own], [index.shape], linear=[(0,)])


def take_along_dim(x: Operand, indices: Operand, dim: int | None = None) -> Spec | None:
    """gather with broadcasting; without a dim left to the fallback."""
    if dim is None or x.ndim != indices.ndim:
        return None
    at = normal_dim(dim, x.ndim)
    if any(i != at and a != b for i, (a, b) in enumerate(zip(x.shape, indices.shape, strict=True))):
        return None
    return gather(x, dim, indices)


def scatter(x: Operand, dim: int, index: Operand, src: Any = None, *args: Any, **kwargs: Any) -> Spec | None:
    """Whole along dim; where x, index and src span another dim fully, that may be sharded."""
    at = normal_dim(dim, x.ndim)
    source = src if isinstance(src, Operand) else None
    dims = tuple(
        ("d", i)
        if i != at and x.shape[i] == index.shape[i] and (source is None or source.shape[i] == x.shape[i])
        else None
        for i in range(x.ndim)
    )
    ins: list[Dims] = [dims, dims]
    if source is not None:
        ins.append(dims)
    return Spec(ins, [dims], [x.shape])


def narrow(x: Operand, dim: int, start: Any, length: int) -> Spec | None:
    """A stretch of a whole dim."""
    if isinstance(start, Operand):
        return None
    at = normal_dim(dim, x.ndim)
    first = start % x.shape[at] if start < 0 else start
    return getitem(x, (*[slice(None)] * at, slice(first, first + length)))


def select(x: Operand, dim: int, index: Any) -> Spec | None:
    """One index of a whole dim."""
    if isinstance(index, Operand):
        return None
    return getitem(x, (*[slice(None)] * normal_dim(dim, x.ndim), int(index)))


def one_hot(x: Operand, num_classes: int = -1) -> Spec | None:
    """A new last dim of classes."""
    if num_classes == -1:
        return None
    return Spec([x.dims()], [(*x.dims(), None)], [(*x.shape, num_classes)])


def register(rules: Rules) -> None:
    """Put the rules of this file into the table."""
    # a mask is not an index
    rules.add(torch.Tensor.__getitem__, getitem, typed=True)
    rules.add(torch.Tensor.__setitem__, setitem, typed=True)
    rules.name("index_select")(index_select)
    rules.name("gather")(gather)
    rules.name("take_along_dim")(take_along_dim)
    rules.name("scatter", "scatter_add", "scatter_reduce", inplace=True)(scatter)
    rules.name("narrow")(narrow)
    rules.name("select")(select)
    rules.name("one_hot")(one_hot)
