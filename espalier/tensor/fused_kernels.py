"""Where kernels of our own run (:mod:`espalier.tensor.triton_kernels`), and calls of them.

They are for accelerators with Triton, outside of recorded and traced programs: there the plain operations
stand, which a compiler fuses. Values are the same, so that nobody has to know which it was.
"""

from __future__ import annotations

import math
import struct
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
_TILE = 16  # the least side of a product of tiles


def serve(x: torch.Tensor) -> bool:
    """Whether kernels of our own may take a tensor now."""
    return has_triton(x.device) and type(x) is not FakeTensor and not observed() and open_transform() is None


def _kernels() -> Any:
    return import_module("espalier.tensor.triton_kernels")


def launch(name: str, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """Start a kernel on the device of its first argument."""
    if 0 not in grid:
        with on_device_of(args[0]):
            getattr(_kernels(), name)[grid](*args, **constants)


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


@lru_cache(maxsize=4096)
def _numbering(layout: Layout) -> tuple[int, tuple[tuple[int, int], ...]] | None:
    """The global number of this rank's first element; sizes and steps, from the inside out, of few dims.

    None: they are too many.
    """
    box = local_box(layout)
    base = sum(o * step for o, step in zip(box.offsets, layout.stride, strict=True))
    dims: list[tuple[int, int]] = []
    for n, step in reversed(list(zip(box.sizes, layout.stride, strict=True))):
        if dims and step == dims[-1][0] * dims[-1][1]:
            dims[-1] = dims[-1][0] * n, dims[-1][1]
        elif n > 1:
            dims.append((n, step))
    return None if len(dims) > _DIMS else (base, tuple(dims or [(1, 1)]))


def dropped(x: torch.Tensor, layout: Layout, key: Key, p: float, inplace: bool) -> torch.Tensor | None:
    """``x``, which lies so, without what a key drops, times 1/(1-p); None: plain operations must do it."""
    if not isinstance(key, int) or not x.is_floating_point() or not serve(x):
        return None
    numbering = _numbering(layout)
    if numbering is None or x.shape != local_box(layout).sizes or (inplace and not x.is_contiguous()):
        return None
    out: torch.Tensor = _Dropped.apply(x, Drawn.of(key, p), 1 / (1 - p), numbering, inplace)
    return out


class _Dropped(torch.autograd.Function):
    """Keeps nothing for the backward pass but the key."""

    espalier = True

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, drawn: Drawn, scale: float, numbering: tuple[int, Any], inplace: bool
    ) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.given = drawn, scale, numbering
        if inplace:
            ctx.mark_dirty(x)
        given = x.contiguous()
        out = x if inplace else torch.empty_like(given)
        base, dims = numbering
        sizes = [n for n, _ in dims] + [1] * (_DIMS - len(dims))
        steps = [step for _, step in dims] + [0] * (_DIMS - len(dims))
        bits = struct.unpack("q", struct.pack("d", scale))[0]
        launch(
            "drop", (-(-given.numel() // _BLOCK),), given, out, given.numel(), *drawn, bits, base,
            *sizes[:-1], *steps, DIMS=len(dims), BLOCK=_BLOCK,
        )  # fmt: skip
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
        self.q, self.k, self.v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        self.bias = q if bias is None else bias.expand(*q.shape[:3], k.shape[2])
        heads, (rows, columns) = q.shape[1], (q.shape[2], k.shape[2])
        strides = [n for x in (self.q, self.k, self.v) for n in x.stride()[:3]]
        strides += [0] * 4 if bias is None else self.bias.stride()
        drawn = (0, 0, 0, 1.0, 0, 0, 0, 0)
        if drops is not None:
            factor = 0.0 if drops.p == 1 else 1 / (1 - drops.p)
            drawn = (*Drawn.of(drops.key, drops.p), factor, drops.base, *drops.steps)
        self.numbers = (
            *strides, heads, heads // max(k.shape[1], 1), rows, columns, scale, ahead or 0, *drawn
        )  # fmt: skip
        d, e = q.shape[3], v.shape[3]
        padded = [max(_TILE, 1 << (n - 1).bit_length()) for n in (d, e)]
        weight = max(padded) * q.dtype.itemsize  # bytes of a row: they limit how many are taken at once
        side = 64 if weight <= 256 else 32
        kind = "none" if bias is None else "bool" if bias.dtype is torch.bool else "float"
        self.side, self.constants = side, {
            "D": d, "E": e, "DP": padded[0], "EP": padded[1], "M": side, "N": side, "BIAS": kind,
            "CAUSAL": ahead is not None, "DROPS": drops is not None,
            "PRECISION": "ieee" if q.dtype is torch.float32 else "tf32",
            "num_stages": 2 if weight <= 256 else 1,
        }  # fmt: skip

    def launch(self, name: str, rows: int, heads: int, *more: torch.Tensor) -> None:
        grid = (self.q.shape[0] * heads, -(-rows // self.side))  # of the second there may be 65,535
        launch(name, grid, self.q, self.k, self.v, self.bias, *more, *self.numbers, **self.constants)


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
    out = q.new_empty(*q.shape[:3], v.shape[3])
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    call.launch("attend", q.shape[2], q.shape[1], out, lse)
    return out, lse


def attention_back(
    grad: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, q: torch.Tensor, k: torch.Tensor,
    v: torch.Tensor, bias: torch.Tensor | None, ahead: int | None, scale: float, drops: Dropout | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """The gradients of queries, keys and values, in float32, by two kernels.

    Args:
        grad: of the output; out, lse: of all blocks of keys, finite. The rest: as of :func:`attention`.
    """
    call = _Call(q, k, v, bias, ahead, scale, drops)
    delta = (grad.float() * out.float()).sum(-1)
    grad, lse = grad.to(q.dtype).contiguous(), lse.float().contiguous()
    dq, dk, dv = (x.new_empty(x.shape, dtype=torch.float32) for x in (q, k, v))
    call.launch("attend_back_keys", k.shape[2], k.shape[1], grad, lse, delta, dk, dv)
    call.launch("attend_back_queries", q.shape[2], q.shape[1], grad, lse, delta, dq)
    return dq, dk, dv
