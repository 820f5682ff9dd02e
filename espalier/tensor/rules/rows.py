"""flip, roll, pad, unfold: along a sharded dim the ranks exchange the rows that change places."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from espalier.comm import Spans, exchange, spans_of
from espalier.layout import Layout, local_box
from espalier.layout.layout import normal_dim
from espalier.sharding.spec import Dims, Operand, Placed, Spec, composed, of_nothing, rule
from espalier.tensor.rules.views import sizes

# rows [start, end) to the spans where they land
Landing = Callable[[int, int], Spans]


def _reordered(x: Operand, moves: Sequence[tuple[int, Callable[..., torch.Tensor] | None, Landing]]) -> Spec:
    """The rule of a function that reorders the rows of dims, one after another.

    Args:
        moves: the dim, what is done to the rows of a rank by themselves, and where they land.
    """

    def run(func: Callable[..., Any], args: Any, kwargs: Any, placed: Placed) -> torch.Tensor:
        out, lay = args[0] if args else kwargs["input"], placed.ins[0]
        for d, local, landing in moves:
            out = out if local is None else local(out)
            have = [landing(*span) for (span,) in spans_of(lay, d)]
            out = exchange(out, lay.mesh, lay.cuts[d], d, have, spans_of(lay, d)) if lay.cuts[d] else out
        return out

    return Spec([x.dims()], [x.dims()], [x.shape], linear=[(0,)], run=run)


@rule("flip")
def flip(x: Operand, *some: Any, dims: Any = ()) -> Spec:
    """Reversed along dims."""
    flipped = some or ((dims,) if isinstance(dims, int) else dims)
    whole = {normal_dim(d, x.ndim) for d in sizes(flipped)} if x.ndim else set()
    cut = [d for d in whole if x.layout.cuts[d]]

    def landing(n: int) -> Landing:
        return lambda start, end: ((n - end, n - start),)

    spec = _reordered(x, [(d, None, landing(x.shape[d])) for d in cut])
    exchanged = spec.run
    assert exchanged is not None

    def run(func: Callable[..., Any], args: Any, kwargs: Any, placed: Placed) -> torch.Tensor:
        return exchanged(func, (func(*args, **kwargs),), {}, placed)

    spec.run = run if cut else None
    return spec


@rule("roll")
def roll(x: Operand, shifts: Any, dims: Any = None) -> Spec | None:
    """Rolled along dims."""
    if dims is None:
        return None
    if isinstance(dims, int):
        shifts, dims = (shifts if isinstance(shifts, int) else shifts[0],), (dims,)
    dims = [normal_dim(d, x.ndim) for d in dims]
    if not any(x.layout.cuts[d] for d in dims):
        return Spec([x.dims()], [x.dims()], [x.shape], linear=[(0,)])
    return _reordered(x, [_rolled(x, shift, d) for shift, d in zip(shifts, dims, strict=True)])


def _rolled(x: Operand, shift: int, dim: int) -> tuple[int, Any, Landing]:
    n = x.shape[dim]

    def landing(start: int, end: int) -> Spans:
        length, start = end - start, (start + shift) % n if n else 0
        over = max(start + length - n, 0)
        return ((start, start + length - over), (0, over))

    return dim, None if x.layout.cuts[dim] else lambda local: torch.roll(local, shift, dim), landing


@composed("roll")
def roll_flat(x: Any, shifts: Any, dims: Any = None) -> Any:
    """Rolled as one row."""
    return x.flatten().roll(shifts, 0).view(x.shape) if dims is None else NotImplemented


@rule("pad")
def padding(x: Operand, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Spec:
    """F.pad: along a sharded dim with a constant, else also with what x has. Linear but for constants."""
    ends = {x.ndim - 1 - i: (pad[2 * i], pad[2 * i + 1]) for i in range(len(pad) // 2)}
    ends = {d: lengths for d, lengths in ends.items() if lengths != (0, 0)}
    shape = tuple(n + sum(ends.get(d, ())) for d, n in enumerate(x.shape))

    def run(func: Callable[..., Any], args: Any, kwargs: Any, placed: Placed) -> torch.Tensor:
        local = args[0] if args else kwargs["input"]
        cut = [d for d in ends if placed.axes_of(placed.ins[0], (d,))]
        lengths = dict(ends)
        for d in cut:
            local, lengths[d] = _padded(local, placed, d, ends[d][0])
        if mode == "constant":
            flat = [n for d in reversed(range(x.ndim)) for n in lengths.get(d, (0, 0))]
            return torch.constant_pad_nd(local, flat, value or 0)
        # reflect and its like take no empty tensors
        return func(*args, **kwargs) if local.numel() else of_nothing(placed, local)

    blocked = frozenset(("d", d) for d in ends) if mode != "constant" else frozenset()
    linear = [(0,)] if mode != "constant" or not value else []
    return Spec([x.dims()], [x.dims()], [shape], linear=linear, run=run, blocked=blocked)


def _padded(x: torch.Tensor, placed: Placed, dim: int, before: int) -> tuple[torch.Tensor, tuple[int, int]]:
    """The rows of the input that this rank has in the output, and how many to pad on either side."""
    lay, out = placed.ins[0], placed.outs[0]
    n, total = lay.shape[dim], out.shape[dim]

    def kept(start: int, end: int) -> tuple[int, int]:
        # in rows of the output, those that a negative length cuts off left out
        first = min(max(start, before, 0), end)
        return first, max(min(end, before + n, total), first)

    have = [(kept(a + before, b + before),) for ((a, b),) in spans_of(lay, dim)]
    want = [(kept(*span),) for (span,) in spans_of(out, dim)]
    (start, end), place = kept(*_own(lay, dim, before)), local_box(lay).offsets[dim] + before
    x = exchange(x.narrow(dim, start - place, end - start), lay.mesh, lay.cuts[dim], dim, have, want)
    begin, stop = _own(out, dim)
    first, last = kept(begin, stop)
    return x, (first - begin, stop - last)


def _own(lay: Layout, dim: int, shift: int = 0) -> tuple[int, int]:
    box = local_box(lay)
    return box.offsets[dim] + shift, box.offsets[dim] + box.sizes[dim] + shift


@rule("constant_pad_nd")
def constant_pad(input: Operand, pad: Sequence[int], value: Any = 0) -> Spec:
    """torch.constant_pad_nd."""
    return padding(input, pad, "constant", value)


@rule("unfold_copy", torch.Tensor.unfold)
def unfold(x: Operand, dimension: int, size: int, step: int) -> Spec | None:
    """Windows along a dim: a rank has some of them, and fetches the rows that they reach beyond its own."""
    if x.ndim == 0:
        return None
    at = normal_dim(dimension, x.ndim)
    count = (x.shape[at] - size) // step + 1
    if count < 1:
        return None

    def run(func: Callable[..., Any], args: Any, kwargs: Any, placed: Placed) -> torch.Tensor:
        lay, out = placed.ins[0], placed.outs[0]
        if not placed.axes_of(lay, (at,)):
            return func(*args, **kwargs)
        want = [
            ((a * step, (b - 1) * step + size if b > a else a * step),) for ((a, b),) in spans_of(out, at)
        ]
        rows = exchange(args[0], lay.mesh, lay.cuts[at], at, spans_of(lay, at), want)
        if not rows.shape[at]:
            return rows.unsqueeze(-1).expand(*rows.shape, size)
        return rows.unfold(at, size, step)

    shape = (*x.shape[:at], count, *x.shape[at + 1 :], size)
    run_ = run if x.layout.cuts[at] else None
    return Spec([x.dims()], [(*x.dims(), None)], [shape], linear=[(0,)], run=run_)


# ---- cat, stack and their inverses: the rows of a sharded dim are exchanged


@rule("cat concat concatenate", loose=True)
def cat(tensors: Sequence[Operand], dim: int = 0) -> Spec | None:
    """Put together along a dim; jointly linear. Empty 1-d tensors join anything, as in torch.

    Along a sharded dim each rank puts together its rows of all, and those are exchanged.
    """
    real = [x for x in tensors if x.shape != (0,)]
    if not real or any(x.ndim != real[0].ndim for x in real):
        return None
    first = real[0]
    at = normal_dim(dim, first.ndim)
    if any(
        n != m for x in real for i, (n, m) in enumerate(zip(x.shape, first.shape, strict=True)) if i != at
    ):
        return None  # torch refuses it; of some ranks the parts may fit
    dims = first.dims()
    shape = tuple(sum(x.shape[at] for x in real) if i == at else n for i, n in enumerate(first.shape))
    ins = [(None,) if x.shape == (0,) else dims for x in tensors]

    def run(func: Callable[..., Any], args: Any, kwargs: Any, placed: Placed) -> torch.Tensor:
        joined, out = func(*args, **kwargs), placed.outs[0]
        if not placed.axes_of(out, (at,)):
            return joined
        lays = [lay for x, lay in zip(tensors, placed.ins, strict=True) if x.shape != (0,)]
        starts = list(itertools.accumulate((lay.shape[at] for lay in lays), initial=0))
        have: list[Spans] = [
            tuple((start + a, start + b) for start, ((a, b),) in zip(starts, own, strict=False))
            for own in zip(*(spans_of(lay, at) for lay in lays), strict=True)
        ]
        if not out.mesh.rows.isdisjoint(out.cuts[at]):
            out.mesh.put_together.setdefault(out.shape[at], tuple(lay.shape[at] for lay in lays))
        return exchange(joined, out.mesh, out.cuts[at], at, have, spans_of(out, at))

    apart = any(x.layout.cuts[at] for x in real)
    return Spec(ins, [dims], [shape], linear=[tuple(range(len(tensors)))], run=run if apart else None)


@rule("stack", loose=True)
def stack(tensors: Sequence[Operand], dim: int = 0) -> Spec | None:
    """Put together along a new dim; jointly linear."""
    first = tensors[0]
    if any(x.shape != first.shape for x in tensors):
        return None  # torch refuses it
    at = normal_dim(dim, first.ndim + 1)
    dims = first.dims()
    return Spec(
        [dims] * len(tensors),
        [(*dims[:at], None, *dims[at:])],
        [(*first.shape[:at], len(tensors), *first.shape[at:])],
        linear=[tuple(range(len(tensors)))],
    )


def _pieces(x: Operand, dim: int, lengths: Sequence[int]) -> Spec:
    """Along a sharded dim the ranks exchange rows, so that each piece is sharded as the whole was.

    A fused query-key-value projection is split so, and each rank gets its heads of all three.
    """
    at = normal_dim(dim, x.ndim)
    dims = x.dims()
    shapes = [(*x.shape[:at], n, *x.shape[at + 1 :]) for n in lengths]

    def run(func: Callable[..., Any], args: Any, kwargs: Any, placed: Placed) -> Any:
        axes = placed.axes_of(placed.ins[0], (at,))
        if not axes:
            return func(*args, **kwargs)
        starts = list(itertools.accumulate(lengths, initial=0))
        spans = [spans_of(out, at) for out in placed.outs]
        want: list[Spans] = [
            tuple((start + a, start + b) for start, ((a, b),) in zip(starts, each, strict=False))
            for each in zip(*spans, strict=True)
        ]
        x, lay = args[0] if args else kwargs["input"], placed.ins[0]
        got = exchange(x, lay.mesh, lay.cuts[at], at, spans_of(lay, at), want)
        return got.split([out.local_shape[at] for out in placed.outs], at)

    return Spec([dims], [dims] * len(lengths), shapes, linear=[(0,)], run=run)


@rule(
    "split split_with_sizes split_copy split_with_sizes_copy unsafe_split unsafe_split_with_sizes", loose=True
)
def split(x: Operand, split_size: Any, dim: int = 0) -> Spec:
    """Pieces of a size, or of given sizes."""
    total = x.shape[normal_dim(dim, x.ndim)]
    if isinstance(split_size, int):
        step = max(split_size, 1)
        lengths = [min(step, total - i) for i in range(0, total, step)] or [0]
    else:
        lengths = list(split_size)
    return _pieces(x, dim, lengths)


@rule("chunk unsafe_chunk", loose=True)
def chunk(x: Operand, chunks: int, dim: int = 0) -> Spec:
    """At most so many pieces."""
    total = x.shape[normal_dim(dim, x.ndim)]
    step = max(-(-total // chunks), 1)
    return _pieces(x, dim, [min(step, total - i) for i in range(0, total, step)] or [0] * chunks)


@rule("tensor_split", loose=True)
def tensor_split(x: Operand, indices_or_sections: Any, dim: int = 0) -> Spec | None:
    """Pieces of nearly equal sizes, or between given indices."""
    shape = torch.empty(x.shape, device="meta")
    if isinstance(indices_or_sections, Operand):
        return None
    at = normal_dim(dim, x.ndim)
    return _pieces(x, dim, [p.shape[at] for p in torch.tensor_split(shape, indices_or_sections, at)])


@rule("unbind unbind_copy", loose=True)
def unbind(x: Operand, dim: int = 0) -> Spec:
    """One tensor for each index of a whole dim."""
    at = normal_dim(dim, x.ndim)
    dims: Dims = tuple(None if i == at else d for i, d in enumerate(x.dims()))
    out = dims[:at] + dims[at + 1 :]
    n = x.shape[at]
    return Spec([dims], [out] * n, [x.shape[:at] + x.shape[at + 1 :]] * n, linear=[(0,)])
