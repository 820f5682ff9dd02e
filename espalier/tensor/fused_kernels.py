"""Where kernels of our own run (:mod:`espalier.tensor.triton_kernels`), and calls of them.

They are for accelerators with Triton, outside of recorded and traced programs: there the plain operations
stand, which a compiler fuses. Values are the same, so that nobody has to know which it was.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib import import_module
from typing import Any, NamedTuple

import torch

from espalier.comm.custom_ops import observed
from espalier.device import has_triton, on_device_of
from espalier.layout import Layout, local_box
from espalier.tensor.random import Key, addends
from espalier.torch_private import FakeTensor, open_transform

_BLOCK = 1024  # elements of a dropout that one program takes
_DIMS = 4  # that it can tell apart
# the widest heads of attention, whose tiles fit into the memory (99 KiB) of the smallest units from 8.0 on
_WIDEST = {torch.float16: 256, torch.bfloat16: 256, torch.float32: 128}
_ALIGNED = 16  # bytes: what begins there is read in whole vectors
_TILE = 16  # the least side of a product of tiles
# by kernel and bytes of a row, the queries and keys that are taken at once, warps, stages: those of up to 256
# bytes as measured on an H200
_SIDES: Mapping[str, Mapping[int, tuple[int, int, int, int]]] = {
    "attend": {128: (64, 64, 4, 3), 256: (64, 32, 4, 3), 512: (32, 32, 4, 1)},
    "attend_back_queries": {128: (64, 32, 4, 3), 256: (64, 32, 4, 3), 512: (32, 32, 4, 1)},
    "attend_back_keys": {128: (32, 64, 4, 3), 256: (32, 64, 4, 3), 512: (32, 32, 4, 1)},
}


def serve(x: torch.Tensor) -> bool:
    """Whether kernels of our own may take a tensor now."""
    return has_triton(x.device) and type(x) is not FakeTensor and not observed() and open_transform() is None


def _kernels() -> Any:
    return import_module("espalier.tensor.triton_kernels")


@lru_cache(maxsize=4096)
def _compiled(*of: Any) -> list[Any]:
    """Where the kernel that Triton compiled for such arguments is held, with its constants."""
    return []


def launch(
    name: str, grid: tuple[int, ...], tensors: Sequence[torch.Tensor], key: tuple[int, int],
    numbers: tuple[float, ...], **constants: Any,
) -> None:  # fmt: skip
    """Start a kernel on the device of the tensors.

    Triton looks at each argument to find the kernel that it compiled, in about 40 us. Here calls with the
    same ``numbers``, and another ``key``, find it by these.
    """
    if 0 in grid:
        return
    looks = [(x.dtype, x.data_ptr() % _ALIGNED) for x in tensors]
    narrow = [-(1 << 31) <= part < 1 << 31 for part in key]
    held = _compiled(name, tensors[0].device, *looks, *narrow, numbers, *constants.values())
    with on_device_of(tensors[0]):
        if held:
            kernel, fixed = held
            kernel[*grid, *(1,) * (3 - len(grid))](*tensors, *key, *numbers, *fixed)
            return
        function = getattr(_kernels(), name)
        kernel = function[grid](*tensors, *key, *numbers, **constants)
        if kernel is not None:  # the interpreter compiles none
            held += kernel, [constants[x] for x in function.arg_names if x in constants]


# ---- dropout


class Drawn(NamedTuple):
    """What elements are dropped by.

    Attributes:
        first, second: of the key, see :func:`espalier.tensor.random.addends`.
        threshold: of the hash's upper 24 bits, from which on an element stays.
    """

    first: int
    second: int
    threshold: int

    @classmethod
    def of(cls, key: int, p: float) -> Drawn:
        """By a key, with probability p; as ``uniform(..., float32) >= p``."""
        first, second = addends(key)
        rounded: float = struct.unpack("f", struct.pack("f", p))[0]
        assert isinstance(first, int) and isinstance(second, int)
        return cls(first, second, math.ceil(rounded * (1 << 24)))


class Numbering(NamedTuple):
    """The global numbers of this rank's elements.

    Attributes:
        sizes: of its part.
        base: that of the first.
        dims: how many dims can be told apart.
        steps: sizes from the inside out but for the outermost dim's, and steps, of ``_DIMS`` dims.
    """

    sizes: tuple[int, ...]
    base: int
    dims: int
    steps: tuple[int, ...]

    @classmethod
    def of(cls, sizes: Sequence[int], base: int, along: Sequence[int]) -> Numbering | None:
        """Of elements a step apart along each dim; None: these are too many."""
        dims: list[tuple[int, int]] = []
        for n, step in reversed(list(zip(sizes, along, strict=True))):
            if dims and step == dims[-1][0] * dims[-1][1]:
                dims[-1] = dims[-1][0] * n, dims[-1][1]
            elif n > 1:
                dims.append((n, step))
        if len(dims) > _DIMS:
            return None
        count = max(len(dims), 1)
        dims = dims or [(1, 1)]
        dims += [(1, 0)] * (_DIMS - count)
        steps = [n for n, _ in dims[:-1]] + [step for _, step in dims]
        return cls(tuple(sizes), base, count, tuple(steps))


@lru_cache(maxsize=4096)
def _numbering(layout: Layout) -> Numbering | None:
    """That of a layout."""
    box = local_box(layout)
    base = sum(o * step for o, step in zip(box.offsets, layout.stride, strict=True))
    return Numbering.of(box.sizes, base, layout.stride)


def dropped(x: torch.Tensor, layout: Layout, key: Key, p: float, inplace: bool) -> torch.Tensor | None:
    """``x``, which lies so, without what a key drops, times 1/(1-p); None: plain operations must do it."""
    if not isinstance(key, int) or not x.is_floating_point() or not serve(x):
        return None
    numbering = _numbering(layout)
    if numbering is None or x.shape != numbering.sizes or (inplace and not x.is_contiguous()):
        return None
    out: torch.Tensor = _Dropped.apply(x, Drawn.of(key, p), 1 / (1 - p), numbering, inplace)
    return out


class _Dropped(torch.autograd.Function):
    """Keeps nothing for the backward pass but the key."""

    espalier = True

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, drawn: Drawn, scale: float, numbering: Numbering, inplace: bool
    ) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.given = drawn, scale, numbering
        if inplace:
            ctx.mark_dirty(x)
        given = x.contiguous()
        out = x if inplace else torch.empty_like(given)
        bits = struct.unpack("q", struct.pack("d", scale))[0]
        numbers = given.numel(), drawn.threshold, bits, numbering.base, *numbering.steps
        grid = (-(-given.numel() // _BLOCK),)
        launch("drop", grid, (given, out), drawn[:2], numbers, DIMS=numbering.dims, BLOCK=_BLOCK)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> Any:
        drops = None if grad is None else _Dropped.apply(grad, *ctx.given, False)
        return drops, None, None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, *_: Any) -> torch.Tensor:
        drops: torch.Tensor = _Dropped.apply(tangent, *ctx.given, False)
        return drops


# ---- attention


class Dropout(NamedTuple):
    """Which weights [b, h, s, t] are dropped, by their global numbers.

    Attributes:
        base: of the first one.
        steps: from one to the next along b, h and s.
        p: the probability.
    """

    key: int
    base: int
    steps: tuple[int, int, int]
    p: float


def attends(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether :func:`attention` takes such queries, keys and values."""
    alike = q.dtype == k.dtype == v.dtype
    return alike and max(q.shape[-1], v.shape[-1]) <= _WIDEST.get(q.dtype, 0) and serve(q)


class _Call:
    """What forward and backward kernels are told alike."""

    def __init__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None,
        ahead: int | None, scale: float, drops: Dropout | None,
    ) -> None:  # fmt: skip
        q, k, v = self.given = _rowwise(q), _rowwise(k), _rowwise(v)
        self.bias = q if bias is None else bias.expand(*q.shape[:3], k.shape[2])
        self.strides = (0,) * 4 if bias is None else self.bias.stride()
        self.key, drawn = (0, 0), (0, 1.0, 0, 0, 0, 0)
        if drops is not None:
            factor = 0.0 if drops.p == 1 else 1 / (1 - drops.p)
            first, second, threshold = Drawn.of(drops.key, drops.p)
            self.key, drawn = (first, second), (threshold, factor, drops.base, *drops.steps)
        heads, rows, columns = q.shape[1], q.shape[2], k.shape[2]
        self.numbers = heads, heads // max(k.shape[1], 1), rows, columns, scale, ahead or 0, *drawn
        d, e = q.shape[3], v.shape[3]
        padded = [max(_TILE, 1 << (n - 1).bit_length()) for n in (d, e)]
        self.row = max(padded) * q.dtype.itemsize  # bytes: they limit how many rows are taken at once
        self.constants = {
            "D": d, "E": e, "DP": padded[0], "EP": padded[1],
            "BIAS": "none" if bias is None else "bool" if bias.dtype is torch.bool else "float",
            "CAUSAL": ahead is not None, "DROPS": drops is not None,
            "PRECISION": "ieee" if q.dtype is torch.float32 else "tf32",
        }  # fmt: skip

    def launch(
        self, name: str, of: torch.Tensor, side: str, tensors: Sequence[torch.Tensor],
        by_row: Sequence[torch.Tensor],
    ) -> None:  # fmt: skip
        """Start a kernel whose programs each take a tile of rows of ``of``.

        Args:
            side: the tile's, "M" of queries or "N" of keys.
            tensors: that it takes beside those given; of ``by_row`` it is told the strides.
        """
        taken = _taken(name, self.row)
        strides = [n for x in (*self.given, *by_row) for n in x.stride()[:3]]
        strides[9:9] = self.strides
        grid = (of.shape[0] * of.shape[1], -(-of.shape[2] // taken[side]))  # of the second: up to 65,535
        numbers = (*strides, *self.numbers)
        launch(name, grid, (*self.given, self.bias, *tensors), self.key, numbers, **self.constants, **taken)


def _taken(name: str, row: int) -> dict[str, int]:
    """How many queries M and keys N a kernel takes at once, of so many bytes each, by how many warps.

    What the tiles of a stage take fits into the memory (99 KiB) of the smallest units from 8.0 on.
    """
    m, n, warps, stages = _SIDES[name][min(max(row, 128), 512)]
    return {"M": m, "N": n, "num_warps": warps, "num_stages": stages}


def _rowwise(x: torch.Tensor) -> torch.Tensor:
    """With elements of a row side by side."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _lying_as(x: torch.Tensor, width: int, dtype: torch.dtype) -> torch.Tensor:
    """A new tensor of rows of a width, whose dims lie in memory in the order of those of ``x``."""
    sizes = (*x.shape[:3], width)
    return x.new_empty_strided(sizes, _dense(sizes, x.stride()), dtype=dtype)


@lru_cache(maxsize=4096)
def _dense(sizes: tuple[int, ...], like: tuple[int, ...]) -> tuple[int, ...]:
    """Strides without gaps in the order of others; those of the last dim are 1."""
    steps, step = [1] * len(sizes), sizes[-1]
    for dim in sorted(range(len(sizes) - 1), key=lambda dim: (like[dim], -dim)):
        steps[dim], step = step, step * sizes[dim]
    return tuple(steps)


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, ahead: int | None,
    scale: float, drops: Dropout | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Attention in one kernel.

    Args:
        q, k, v: [b, h, s, d], [b, g, t, d], [b, g, t, e]; g divides h.
        bias: added to the scores, broadcast to [b, h, s, t], or, of bools, what may be seen.
        ahead: query i sees the keys up to i + ahead; None: all.
        scale: of the scores.

    Returns:
        the output [b, h, s, e], and lse [b, h, s] in float32: minus infinity for a query that sees no key.
    """
    call = _Call(q, k, v, bias, ahead, scale, drops)
    out = _lying_as(q, v.shape[3], q.dtype)
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    call.launch("attend", q, "M", (out, lse), (out,))
    return out, lse


def attention_back(
    grad: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, q: torch.Tensor, k: torch.Tensor,
    v: torch.Tensor, bias: torch.Tensor | None, ahead: int | None, scale: float, drops: Dropout | None,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """The gradients of queries, keys and values, by two kernels.

    Args:
        grad: of the output; out, lse: of all blocks of keys, finite. The rest: as of :func:`attention`.
        dtype: of the gradients: that in which they are added up, or that of the queries.
    """
    call = _Call(q, k, v, bias, ahead, scale, drops)
    grad, out, lse = _rowwise(grad), _rowwise(out), lse.float().contiguous()
    delta = torch.empty_like(lse)
    dq, dk, dv = (_lying_as(x, x.shape[3], dtype) for x in (q, k, v))
    call.launch("attend_back_queries", q, "M", (grad, out, lse, delta, dq), (grad, out, dq))
    call.launch("attend_back_keys", k, "N", (grad, lse, delta, dk, dv), (grad, dk, dv))
    return dq, dk, dv
