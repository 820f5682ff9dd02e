"""cat, stack and their inverses: the rows of a sharded dim are exchanged."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from espalier.comm import Spans, exchange, pieces
from espalier.layout.layout import normal_dim
from espalier.tensor.rules.spec import Dims, Operand, Placed, Spec
from espalier.tensor.rules.table import rule


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
            for own in zip(*(pieces(lay, at) for lay in lays), strict=True)
        ]
        return exchange(joined, out.mesh, out.cuts[at], at, have, pieces(out, at))

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
        own = [pieces(out, at) for out in placed.outs]
        want: list[Spans] = [
            tuple((start + a, start + b) for start, ((a, b),) in zip(starts, each, strict=False))
            for each in zip(*own, strict=True)
        ]
        x, lay = args[0] if args else kwargs["input"], placed.ins[0]
        got = exchange(x, lay.mesh, lay.cuts[at], at, pieces(lay, at), want)
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
