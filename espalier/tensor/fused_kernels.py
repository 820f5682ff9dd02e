"""Where kernels of our own run (:mod:`espalier.tensor.triton_kernels`), and calls of them.

They are for accelerators with Triton, outside of recorded and traced programs: there the plain operations
stand, which a compiler fuses. Values are the same, so that nobody has to know which it was.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from importlib import import_module
from operator import mul
from typing import Any, NamedTuple

import torch

from espalier.comm.custom_ops import observed
from espalier.comm.functions import OwnFunction
from espalier.device import has_triton, on_device_of
from espalier.layout import Layout, local_box
from espalier.tensor.random import Key, halves, threshold
from espalier.torch_private import FakeTensor, getter, method, open_transform

_BLOCK = 1024  # elements of a dropout that one program takes
_DIMS = 4  # that it can tell apart
# the widest heads of attention, whose tiles fit into the memory (99 KiB) of the smallest units from 8.0 on
_WIDEST = {torch.float16: 256, torch.bfloat16: 256, torch.float32: 128}
_ALIGNED = 16  # bytes: what begins there is read in whole vectors
_LOW = 1 << 32  # numbers below have no upper half
_PLACES = 1 << 31  # elements that 32 bits tell apart with all that a program may add
_TILE = 16  # the least side of a product of tiles
# the C functions themselves: this is the way of every call
_address, _stride = method("data_ptr"), method("stride")
_device, _dtype, _shape = (getter(name) for name in ("device", "dtype", "shape"))
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


class _Compiled:
    """A kernel that Triton compiled, once it has, with its constants."""

    __slots__ = ("_call", "_driver", "_hooks", "_kernel", "fixed", "is_known")

    def __init__(self) -> None:
        self.is_known = False

    def keep(self, kernel: Any, fixed: Sequence[Any]) -> None:
        """Note it; it was launched."""
        self._kernel, self._call = kernel, (kernel.function, kernel.packed_metadata, None, None, None)
        self._driver = import_module("triton.runtime.driver").driver
        self._hooks = import_module("triton").knobs.runtime
        self.fixed, self.is_known = tuple(fixed), True

    def start(self, grid: tuple[int, ...], args: Sequence[Any]) -> None:
        """On the current device and stream, as Triton does it, but for hooks that nobody set."""
        kernel, hooks = self._kernel, self._hooks
        x, y, z = (*grid, 1, 1)[:3]
        if _is_heard(hooks.launch_enter_hook) or _is_heard(hooks.launch_exit_hook):
            kernel[x, y, z](*args)
            return
        driver = self._driver.active
        stream = driver.get_current_stream(driver.get_current_device())
        kernel.run(x, y, z, stream, *self._call, *args)


def _is_heard(hook: Any) -> bool:
    """Whether a hook of Triton's, or a chain of such, calls anyone."""
    return bool(getattr(hook, "calls", hook))


@lru_cache(maxsize=4096)
def _compiled(*of: Any) -> _Compiled:
    """The kernel for such arguments."""
    return _Compiled()


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
    looks = [address % _ALIGNED for address in map(_address, tensors)]
    device = _device(tensors[0])
    held = _compiled(name, device, *map(_dtype, tensors), *looks, numbers, *constants.values())
    with on_device_of(tensors[0]):
        if held.is_known:
            held.start(grid, (*tensors, *key, *numbers, *held.fixed))
            return
        function = getattr(_kernels(), name)
        kernel = function[grid](*tensors, *key, *numbers, **constants)
        if kernel is not None:  # the interpreter compiles none
            held.keep(kernel, [constants[x] for x in function.arg_names if x in constants])


# ---- dropout


class Drawn(NamedTuple):
    """What elements are dropped by.

    Attributes:
        first, second: of the key, see :func:`espalier.tensor.random.halves`.
        threshold: see :func:`espalier.tensor.random.threshold`.
    """

    first: int
    second: int
    threshold: int

    @classmethod
    def of(cls, key: int, p: float) -> Drawn:
        """By a key, with probability p; as :func:`espalier.tensor.random.kept`."""
        first, second = halves(key)
        assert isinstance(first, int) and isinstance(second, int)
        return cls(first, second, threshold(p))


@lru_cache(maxsize=64)
def _bits_of(x: float) -> int:
    bits: int = struct.unpack("q", struct.pack("d", x))[0]
    return bits


class Numbering(NamedTuple):
    """The global numbers of this rank's elements.

    Attributes:
        sizes: of its part.
        base: that of the first.
        dims: how many dims can be told apart.
        steps: sizes from the inside out but for the outermost dim's, and steps, of ``_DIMS`` dims.
        wide: whether 32 bits are too few for them.
    """

    sizes: tuple[int, ...]
    base: int
    dims: int
    steps: tuple[int, ...]
    wide: bool

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
        wide = base + sum((n - 1) * step for n, step in dims) >= _LOW or math.prod(sizes) >= _PLACES
        return cls(tuple(sizes), base, count, tuple(steps), wide)


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
    return _apply(x, Drawn.of(key, p), 1 / (1 - p), numbering, inplace)


class _Dropped(OwnFunction):
    """Keeps nothing for the backward pass but the key."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, drawn: Drawn, scale: float, numbering: Numbering, inplace: bool
    ) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.given = drawn, scale, numbering
        if inplace:
            ctx.mark_dirty(x)
        return _drop(x, drawn, scale, numbering, inplace)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> Any:
        drops = None
        if grad is not None:
            drawn, scale, numbering = ctx.given
            drop = _apply if torch.is_grad_enabled() else _drop
            drops = drop(grad, drawn, scale, numbering, False)
        return drops, None, None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, *_: Any) -> torch.Tensor:
        return _apply(tangent, *ctx.given, False)


# nobody is to see these calls: :func:`serve` has seen to it
_apply: Callable[..., torch.Tensor] = super(torch.autograd.Function, _Dropped).apply


def _drop(x: torch.Tensor, drawn: Drawn, scale: float, numbering: Numbering, inplace: bool) -> torch.Tensor:
    given = x.contiguous()
    out = x if inplace else torch.empty_like(given)
    count = given.numel()
    numbers = count, drawn.threshold, _bits_of(scale), numbering.base, *numbering.steps
    constants = {"DIMS": numbering.dims, "WIDE": numbering.wide, "BLOCK": _BLOCK}
    launch("drop", (-(-count // _BLOCK),), (given, out), drawn[:2], numbers, **constants)
    return out


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
    dtype = q.dtype
    alike = dtype is k.dtype and dtype is v.dtype
    return alike and max(q.shape[-1], v.shape[-1]) <= _WIDEST.get(dtype, 0) and serve(q)


class _Lies(NamedTuple):
    """How queries, keys, values or a gradient [b, h, s, d] lie in memory."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, x: torch.Tensor) -> _Lies:
        return cls(_shape(x), _stride(x))

    def rows_of(self, width: int) -> _Lies:
        """Of a new tensor of rows of a width, whose dims lie in memory in the order of these."""
        sizes = (*self.shape[:3], width)
        return _Lies(sizes, _dense(sizes, self.stride))


class _Call:
    """What forward and backward kernels are told alike of tensors that lie so, and of what is dropped.

    Attributes:
        out: how the output lies.
        grads: how the gradients of queries, keys and values do.
    """

    def __init__(
        self, q: _Lies, k: _Lies, v: _Lies, bias: tuple[int, ...], kind: str, ahead: int | None,
        scale: float, drops: Dropout | None, dtype: torch.dtype,
    ) -> None:  # fmt: skip
        (batch, heads, rows, d), (_, groups, columns, e) = q.shape, v.shape
        drawn: tuple[float, ...] = (0, 1.0, 0, 0, 0, 0)
        end = 0
        if drops is not None:
            factor = 0.0 if drops.p == 1 else 1 / (1 - drops.p)
            drawn = (threshold(drops.p), factor, drops.base, *drops.steps)
            end = drops.base + columns + sum(map(mul, (batch, heads, rows), drops.steps))
        self._numbers = heads, heads // max(groups, 1), rows, columns, scale, ahead or 0, *drawn
        self._strides = *q.stride[:3], *k.stride[:3], *v.stride[:3], *bias
        padded = [max(_TILE, 1 << (n - 1).bit_length()) for n in (d, e)]
        self._row = max(padded) * dtype.itemsize  # bytes: they limit how many rows are taken at once
        self._constants = {
            "D": d, "E": e, "DP": padded[0], "EP": padded[1],
            "BIAS": kind, "CAUSAL": ahead is not None, "DROPS": drops is not None, "WIDE": end >= _LOW,
            "PRECISION": "ieee" if dtype is torch.float32 else "tf32",
        }  # fmt: skip
        self._tiles = {"M": (batch * heads, rows), "N": (batch * groups, columns)}
        self.out = q.rows_of(e)
        self.grads = q.rows_of(d), k.rows_of(d), v.rows_of(e)

    def told(self, name: str, side: str, by_row: Sequence[_Lies]) -> _Told:
        """What a kernel is whose programs each take a tile of rows.

        Args:
            side: the tile's, "M" of queries or "N" of keys.
            by_row: whose strides it is told.
        """
        taken = _taken(name, self._row)
        count, rows = self._tiles[side]
        numbers = (*self._strides, *(n for x in by_row for n in x.stride[:3]), *self._numbers)
        grid = (count, -(-rows // taken[side]))  # of the second: up to 65,535
        return _Told(name, grid, numbers, {**self._constants, **taken})


class _Told(NamedTuple):
    """A kernel's call, but for tensors and key."""

    name: str
    grid: tuple[int, ...]
    numbers: tuple[float, ...]
    constants: dict[str, Any]

    def launch(self, tensors: Sequence[torch.Tensor], key: tuple[int, int]) -> None:
        """Start it."""
        launch(self.name, self.grid, tensors, key, self.numbers, **self.constants)


@lru_cache(maxsize=4096)
def _forward_of(*of: Any) -> tuple[_Lies, _Told]:
    """How the output lies, and the kernel that makes it, of what a :class:`_Call` is made of."""
    call = _Call(*of)
    return call.out, call.told("attend", "M", [call.out])


@lru_cache(maxsize=4096)
def _backward_of(grad: _Lies, out: _Lies, *of: Any) -> tuple[tuple[_Lies, ...], _Told, _Told]:
    """How the gradients lie, and the kernels that make them, of a gradient and an output."""
    call = _Call(*of)
    dq, dk, dv = call.grads
    queries = call.told("attend_back_queries", "M", [grad, out, dq])
    return call.grads, queries, call.told("attend_back_keys", "N", [grad, dk, dv])


def _given(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, ahead: int | None,
    scale: float, drops: Dropout | None,
) -> tuple[tuple[torch.Tensor, ...], tuple[int, int], tuple[Any, ...]]:  # fmt: skip
    """The tensors, with elements of a row side by side; the key; and what a :class:`_Call` is made of."""
    q, k, v = map(_rowwise, (q, k, v))
    key = (0, 0)
    if drops is not None:
        first, second, _ = Drawn.of(drops.key, drops.p)
        key, drops = (first, second), drops._replace(key=0)
    lies = _Lies.of(q), _Lies.of(k), _Lies.of(v)
    if bias is None:
        return (q, k, v, q), key, (*lies, (0,) * 4, "none", ahead, scale, drops, _dtype(q))
    bias = bias.expand(*lies[0].shape[:3], lies[1].shape[2])
    kind = "bool" if bias.dtype is torch.bool else "float"
    return (q, k, v, bias), key, (*lies, _stride(bias), kind, ahead, scale, drops, _dtype(q))


def _taken(name: str, row: int) -> dict[str, int]:
    """How many queries M and keys N a kernel takes at once, of so many bytes each, by how many warps.

    What the tiles of a stage take fits into the memory (99 KiB) of the smallest units from 8.0 on.
    """
    m, n, warps, stages = _SIDES[name][min(max(row, 128), 512)]
    return {"M": m, "N": n, "num_warps": warps, "num_stages": stages}


def _rowwise(x: torch.Tensor) -> torch.Tensor:
    """With elements of a row side by side."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _new(like: torch.Tensor, lies: _Lies, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(*lies, dtype=dtype, device=_device(like))


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
    tensors, key, of = _given(q, k, v, bias, ahead, scale, drops)
    lies, kernel = _forward_of(*of)
    out = _new(q, lies, _dtype(q))
    lse = torch.empty(lies.shape[:3], dtype=torch.float32, device=_device(q))
    kernel.launch((*tensors, out, lse), key)
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
    tensors, key, of = _given(q, k, v, bias, ahead, scale, drops)
    grad, out, lse = _rowwise(grad), _rowwise(out), lse.float().contiguous()
    lies, of_queries, of_keys = _backward_of(_Lies.of(grad), _Lies.of(out), *of)
    delta = torch.empty_like(lse)
    dq, dk, dv = (_new(q, of_one, dtype) for of_one in lies)
    of_queries.launch((*tensors, grad, out, lse, delta, dq), key)
    of_keys.launch((*tensors, grad, lse, delta, dk, dv), key)
    return dq, dk, dv
