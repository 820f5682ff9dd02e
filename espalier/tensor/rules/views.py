"""Views and reshapes: how the dims of the result stem from those of the input.

Where a view splits a dim or merges several, a shard stays a shard if the cut falls between whole
groups of the inner dims: then only the outermost dim of the group carries the letter, with a
factor (see ``Spec.factors``). All of these functions are linear.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any

import torch

from espalier.comm import Spans, exchange, spans_of
from espalier.layout import Layout, local_box
from espalier.layout.layout import R, normal_dim
from espalier.mesh import Mesh
from espalier.sharding.spec import Dims, Letter, Operand, Placed, Spec, rule

# of so many a rank's rows may be made up, where dims are merged
_STRETCHES = 1024


def linear_view(
    x: Operand,
    ins: Dims,
    out: Dims,
    shape: Sequence[int],
    *,
    tail: Callable[[Placed], tuple[Any, ...]] | None = None,
    factors: dict[Letter, list[tuple[int, int]]] | None = None,
) -> Spec:
    """The spec of a view of one tensor."""
    return Spec([ins], [out], [tuple(shape)], linear=[(0,)], tail=tail, factors=factors or {})


def sizes(shape: tuple[Any, ...]) -> tuple[int, ...]:
    """The sizes of a ``*shape`` argument, given one by one or as one sequence."""
    if len(shape) == 1 and isinstance(shape[0], tuple | list | torch.Size):
        shape = tuple(shape[0])
    return tuple(int(n) for n in shape)


def regroup(old: tuple[int, ...], new: tuple[int, ...]) -> list[tuple[list[int], list[int]]]:
    """Pair the dims of two shapes of equal numel into the smallest groups of equal product."""
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(old) or j < len(new):
        left, right = ([i], [j]) if i < len(old) and j < len(new) else ([], [])
        if not left:
            # what is left over on one side are dims of size 1
            groups.append((list(range(i, len(old))), list(range(j, len(new)))))
            break
        a, b = old[i], new[j]
        i, j = i + 1, j + 1
        while a != b:
            if a < b:
                a, i = a * old[i], i + 1
                left.append(i - 1)
            else:
                b, j = b * new[j], j + 1
                right.append(j - 1)
        groups.append((left, right))
    return groups


@rule("view reshape view_copy", loose=True)
def view(x: Operand, *shape: Any, **by_name: Any) -> Spec | None:
    """view and reshape."""
    # called shape, size or dtype
    shape = shape or tuple(by_name.values())
    if len(shape) == 1 and isinstance(shape[0], torch.dtype):
        return None
    wanted = list(sizes(shape))
    total = math.prod(x.shape)
    if -1 in wanted:
        rest = math.prod(n for n in wanted if n != -1)
        if rest == 0 or total % rest:
            raise ValueError(f"A tensor of the shape {list(x.shape)} cannot be viewed as {wanted}.")
        wanted[wanted.index(-1)] = total // rest
    if math.prod(wanted) != total:
        raise ValueError(f"A tensor of the shape {list(x.shape)} cannot be viewed as {wanted}.")
    new = tuple(wanted)
    if total == 0:
        same = x.shape == new
        return linear_view(
            x, x.dims() if same else (None,) * x.ndim, x.dims() if same else (None,) * len(new), new
        )
    ins: list[Letter | None] = [None] * x.ndim
    outs: list[Letter | None] = [None] * len(new)
    factors: dict[Letter, list[tuple[int, int]]] = {}
    for g, (left, right) in enumerate(regroup(x.shape, new)):
        big_left = [i for i in left if x.shape[i] != 1]
        big_right = [j for j in right if new[j] != 1]
        if not big_left or not big_right:
            continue
        i, j = big_left[0], big_right[0]
        base = math.gcd(x.shape[i], new[j])
        if base not in (x.shape[i], new[j]):
            continue
        ins[i] = outs[j] = g
        factors[g] = [(base, x.shape[i] // base), (base, new[j] // base)]
    spec = linear_view(
        x, tuple(ins), tuple(outs), new, tail=lambda p: (p.outs[0].local_shape,), factors=factors
    )
    spec.ways = _merging(x, new)
    if spec.ways:
        spec.tail, spec.run = None, _merged
        sent = math.prod(x.layout.padded_shape) // 2
        spec.sends = {("way", k): sent for k in range(len(spec.ways))}
    return spec


def _merging(x: Operand, new: tuple[int, ...]) -> list[tuple[tuple[int], tuple[int]]]:
    """The dims that are cut and merged into others before them, and what they become a part of."""
    cut = {s for s in x.layout.axes if isinstance(s, int)}
    ways = []
    for left, right in regroup(x.shape, new):
        big = [j for j in right if new[j] != 1]
        if len(big) == 1:
            for i in left[1:]:
                before = math.prod(x.shape[left[0] : i])
                if i in cut and 1 < before <= _STRETCHES:
                    ways.append(((i,), (big[0],)))
    return ways


def _merged(func: Callable[..., Any], args: Any, kwargs: Any, placed: Placed) -> torch.Tensor:
    """Dims merged, an inner one of which is cut: a rank's rows are many stretches, and change places."""
    src, out = placed.ins[0], placed.outs[0]
    groups = [
        (left, [j for j in right if out.shape[j] != 1]) for left, right in regroup(src.shape, out.shape)
    ]
    merged = [(left, big[0]) for left, big in groups if len(left) > 1 and len(big) == 1]
    shape = list(out.local_shape)
    for left, j in merged:
        shape[j] = math.prod(src.local_shape[i] for i in left)
    x: torch.Tensor = args[0].reshape(shape)
    for left, j in merged:
        have = [_stretches(src, left, where) for where in _places(out.mesh, out.cuts[j])]
        if not out.mesh.rows.isdisjoint(out.cuts[j]):
            inner = next((i for i in left if src.cuts[i]), left[0])
            before = math.prod(src.shape[left[0] : inner])
            if before > 1:
                out.mesh.put_together.setdefault(out.shape[j], (out.shape[j] // before,) * before)
        x = exchange(x, out.mesh, out.cuts[j], j, have, spans_of(out, j)) if out.cuts[j] else x
    return x


def _places(mesh: Mesh, axes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """The coordinates of the ranks that share these axes with this one, the first axis slowest."""
    for at in product(*(range(mesh.shape[a]) for a in axes)):
        where = list(mesh.coordinate)
        for axis, index in zip(axes, at, strict=True):
            where[axis] = index
        yield tuple(where)


def _stretches(layout: Layout, dims: Sequence[int], where: tuple[int, ...]) -> Spans:
    """What a rank has of some neighbouring dims, these taken as one."""
    box, full = local_box(layout, where), layout.shape
    offsets, have = [box.offsets[d] for d in dims], [box.sizes[d] for d in dims]
    last = max((k for k, d in enumerate(dims) if have[k] < full[d]), default=0)
    rest = math.prod(full[d] for d in dims[last + 1 :])
    spans = []
    for at in product(*(range(o, o + n) for o, n in zip(offsets[:last], have[:last], strict=True))):
        row = 0
        for d, index in zip(dims, (*at, offsets[last]), strict=False):
            row = row * full[d] + index
        spans.append((row * rest, (row + have[last]) * rest))
    return tuple(spans)


@rule("view_as reshape_as", loose=True)
def view_as(x: Operand, other: Operand) -> Spec | None:
    """view_as and reshape_as: the other tensor lends its global shape."""
    spec = view(x, other.shape)
    if spec is not None:
        spec.ins, spec.unread = [spec.ins[0], (None,) * other.ndim], (1,)
        spec.ways = [((*ins, R), outs) for ins, outs in spec.ways]
        spec.tail, spec.run = None, _merged if spec.ways else _reshaped
    return spec


def _reshaped(func: Callable[..., Any], args: Any, kwargs: Any, placed: Placed) -> torch.Tensor:
    out: torch.Tensor = args[0].reshape(placed.outs[0].local_shape)
    return out.clone() if func.__name__.endswith("_copy") else out


@rule("flatten", loose=True)
def flatten(x: Operand, start_dim: int = 0, end_dim: int = -1) -> Spec | None:
    """Merge the dims from start to end."""
    if x.ndim == 0:
        spec = view(x, (1,))
    else:
        a, b = normal_dim(start_dim, x.ndim), normal_dim(end_dim, x.ndim)
        spec = view(x, (*x.shape[:a], math.prod(x.shape[a : b + 1]), *x.shape[b + 1 :]))
    return _reshaping(spec)


@rule("ravel", loose=True)
def ravel(x: Operand) -> Spec | None:
    """All dims merged."""
    return _reshaping(view(x, (-1,)))


@rule("unflatten", loose=True)
def unflatten(x: Operand, dim: int, sizes: Any) -> Spec | None:
    """Split one dim."""
    at = normal_dim(dim, x.ndim)
    return _reshaping(view(x, (*x.shape[:at], *_filled(x.shape[at], tuple(sizes)), *x.shape[at + 1 :])))


def _filled(total: int, parts: tuple[int, ...]) -> tuple[int, ...]:
    rest = math.prod(n for n in parts if n != -1)
    return tuple(total // rest if n == -1 else n for n in parts)


def _reshaping(spec: Spec | None) -> Spec | None:
    if spec is not None and not spec.ways:
        spec.tail = None
        spec.run = _reshaped
    return spec


@rule("transpose swapaxes swapdims transpose_copy", loose=True)
def transpose(x: Operand, dim0: int, dim1: int) -> Spec:
    """Swap two dims."""
    order = list(range(x.ndim))
    if order:
        a, b = normal_dim(dim0, x.ndim), normal_dim(dim1, x.ndim)
        order[a], order[b] = order[b], order[a]
    return _permuted(x, order)


@rule("permute permute_copy", loose=True)
def permute(x: Operand, *order: Any, dims: Any = ()) -> Spec:
    """Any order of the dims."""
    return _permuted(x, [normal_dim(d, x.ndim) for d in sizes(order or dims)])


@rule("movedim moveaxis", loose=True)
def movedim(x: Operand, source: Any, destination: Any) -> Spec:
    """Dims moved, the rest in order."""
    src = [normal_dim(d, x.ndim) for d in ([source] if isinstance(source, int) else source)]
    dst = [normal_dim(d, x.ndim) for d in ([destination] if isinstance(destination, int) else destination)]
    order: list[int] = [-1] * x.ndim
    for s, d in zip(src, dst, strict=True):
        if x.ndim:  # a number has none, and takes 0 and -1
            order[d] = s
    rest = iter(i for i in range(x.ndim) if i not in src)
    return _permuted(x, [next(rest) if o == -1 else o for o in order])


@rule("t t_copy", torch.Tensor.T.__get__, loose=True)  # type: ignore[attr-defined]
def t(x: Operand) -> Spec:
    """A matrix transposed (also .T)."""
    return _permuted(x, list(range(x.ndim))[::-1])


@rule(torch.Tensor.mT.__get__, loose=True)  # type: ignore[attr-defined]
def mt(x: Operand) -> Spec:
    """The last two dims swapped (.mT)."""
    return transpose(x, -2, -1)


def _permuted(x: Operand, order: list[int]) -> Spec:
    dims = x.dims()
    return linear_view(x, dims, tuple(dims[i] for i in order), [x.shape[i] for i in order])


@rule("unsqueeze unsqueeze_copy", loose=True)
def unsqueeze(x: Operand, dim: int) -> Spec:
    """A new dim of size 1."""
    at = normal_dim(dim, x.ndim + 1)
    dims = x.dims()
    return linear_view(x, dims, (*dims[:at], None, *dims[at:]), (*x.shape[:at], 1, *x.shape[at:]))


@rule("squeeze squeeze_copy", loose=True)
def squeeze(x: Operand, dim: Any = None) -> Spec:
    """Dims of size 1 gone (such a dim cannot stay sharded)."""
    some = (dim,) if isinstance(dim, int) else dim
    candidates = range(x.ndim) if some is None else [normal_dim(d, x.ndim) for d in some]
    gone = {d for d in candidates if x.shape[d] == 1} if x.ndim else set()
    kept = [i for i in range(x.ndim) if i not in gone]
    dims = tuple(None if i in gone else d for i, d in enumerate(x.dims()))
    spec = linear_view(x, dims, tuple(dims[i] for i in kept), [x.shape[i] for i in kept])
    # a local shard may have size 1 where the global dim has not
    return _reshaping(spec) or spec


@rule("expand expand_copy", loose=True)
def expand(x: Operand, *shape: Any, size: Any = (), implicit: bool = False) -> Spec:
    """Dims of size 1 stretched, new ones in front."""
    wanted = sizes(shape or size)
    skip = len(wanted) - x.ndim
    new = tuple(x.shape[i - skip] if n == -1 else n for i, n in enumerate(wanted))
    dims = tuple(d if x.shape[i] == new[i + skip] else None for i, d in enumerate(x.dims()))
    return linear_view(x, dims, (*(None,) * skip, *dims), new, tail=lambda p: (p.outs[0].local_shape,))


@rule("expand_as", loose=True)
def expand_as(x: Operand, other: Operand) -> Spec:
    """Stretched to the other's global shape."""
    spec = expand(x, other.shape)
    spec.ins, spec.unread = [spec.ins[0], (None,) * other.ndim], (1,)
    spec.tail = None
    spec.run = lambda func, args, kwargs, placed: args[0].expand(placed.outs[0].local_shape)
    return spec


@rule("broadcast_to", loose=True)
def broadcast_to(x: Operand, size: Any) -> Spec:
    """torch.broadcast_to."""
    return expand(x, size)


@rule("repeat", loose=True)
def repeat(x: Operand, *counts: Any, repeats: Any = ()) -> Spec:
    """Tiled: dims repeated once may be sharded, and one of the others, whose copies are put together."""
    times = sizes(counts or repeats)
    skip = len(times) - x.ndim
    several = [i for i in range(x.ndim) if times[i + skip] > 1 and x.layout.cuts[i]]
    at = several[0] if len(several) == 1 else None
    dims = tuple(d if times[i + skip] == 1 or i == at else None for i, d in enumerate(x.dims()))
    shape = [n * (x.shape[i - skip] if i >= skip else 1) for i, n in enumerate(times)]
    spec = linear_view(x, dims, (*(None,) * skip, *dims), shape)
    if at is not None:
        spec.tail, spec.run = None, partial(_copies_of_rows, at, at + skip)
    return spec


def _copies_of_rows(
    at: int, j: int, func: Callable[..., Any], args: Any, kwargs: Any, placed: Placed
) -> torch.Tensor:
    """Copies one after the other of a dim that is cut: a rank has stretches of each, which change places."""
    copies, src, out = func(*args, **kwargs), placed.ins[0], placed.outs[0]
    if not placed.axes_of(out, (j,)):
        return copies
    n, times = src.shape[at], out.shape[j] // src.shape[at]
    have = [tuple((i * n + a, i * n + b) for i in range(times)) for ((a, b),) in spans_of(src, at)]
    if not out.mesh.rows.isdisjoint(out.cuts[j]):
        out.mesh.put_together.setdefault(out.shape[j], (n,) * times)
    return exchange(copies, out.mesh, out.cuts[j], j, have, spans_of(out, j))


@rule("repeat_interleave", loose=True)
def repeat_interleave(
    x: Operand, repeats: Any, dim: int | None = None, *, output_size: int | None = None
) -> Spec | None:
    """Each element of a dim repeated in place: a shard of it gives the shard of the result."""
    if not isinstance(repeats, int) or dim is None:
        return None
    at = normal_dim(dim, x.ndim)
    shape = tuple(n * repeats if i == at else n for i, n in enumerate(x.shape))
    spec = linear_view(x, x.dims(), x.dims(), shape)
    spec.factors = {("d", at): [(x.shape[at], repeats)]}
    spec.run = lambda func, args, kwargs, placed: torch.repeat_interleave(args[0], repeats, at)
    return spec
