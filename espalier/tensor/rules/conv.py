"""Convolutions: batch, channels and groups sharded as in a product; space by fetching borders."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from espalier.layout import local_box
from espalier.tensor.rules.space import cut_dims, fetched, meta_shapes, rule_of_dims, several
from espalier.tensor.rules.spec import Dims, Operand, Placed, Spec, bound_to, of_nothing

_NAMES = "input weight bias stride padding dilation groups"
_TRANSPOSED = "input weight bias stride padding output_padding groups dilation"
_CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_CONV_TRANSPOSE = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


def _refused(operands: tuple[Operand | None, ...], stride: Any, padding: Any, dilation: Any) -> bool:
    """Whether torch refuses what a rank without work to do would not notice."""
    mixed = len({x.dtype for x in operands if x is not None}) > 1
    edges = 0 if isinstance(padding, str) else padding
    step, gap, edge = (a if isinstance(a, int) else min(a) for a in (stride, dilation, edges))
    return mixed or step < 1 or gap < 1 or edge < 0


@rule_of_dims("conv{}d")
def convolution(nd: int) -> Callable[..., Spec | None]:
    """input[b, c, s...] with weight[o, c/groups, k...]: all dims but those of the kernel may be sharded.

    Where there are groups, it is they that are shared out, not the channels within them.
    """

    def rule(
        input: Operand,
        weight: Operand,
        bias: Operand | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Spec | None:
        if _refused((input, weight, bias), stride, padding, dilation):
            return None
        (shape,) = meta_shapes(_CONV[nd], input, weight, None, stride, padding, dilation, groups)
        given = stride, padding, dilation
        return _spec(nd, input, weight, bias, groups, shape, transposed=False, given=given)

    return rule


@rule_of_dims("conv_transpose{}d")
def transposed(nd: int) -> Callable[..., Spec | None]:
    """input[b, c, s...] with weight[c, o/groups, k...]."""

    def rule(
        input: Operand,
        weight: Operand,
        bias: Operand | None = None,
        stride: Any = 1,
        padding: Any = 0,
        output_padding: Any = 0,
        groups: int = 1,
        dilation: Any = 1,
    ) -> Spec | None:
        given = stride, padding, output_padding, groups, dilation
        if _refused((input, weight, bias), stride, padding, dilation):
            return None
        (shape,) = meta_shapes(_CONV_TRANSPOSE[nd], input, weight, None, *given)
        return _spec(
            nd, input, weight, bias, groups, shape, transposed=True, given=(stride, padding, dilation)
        )

    return rule


def _spec(
    nd: int, x: Operand, weight: Operand, bias: Operand | None, groups: int, shape: tuple[int, ...],
    *, transposed: bool, given: tuple[Any, Any, Any],
) -> Spec | None:  # fmt: skip
    batch: Dims = ("b",) if x.ndim == nd + 2 else ()
    space: Dims = tuple(("s", i) for i in range(nd))
    kernel: Dims = (None,) * nd
    if groups == 1:
        c, o = "c", "o"
        filters: Dims = (c, o) if transposed else (o, c)
        factors = {}
    else:
        c = o = "g"
        filters = ("g", None)
        inner, outer = x.shape[len(batch)] // groups, shape[len(batch)] // groups
        factors = {"g": [(groups, inner), (groups, outer)]}
    ins: list[Dims] = [(*batch, c, *space), (*filters, *kernel)]
    if bias is not None:
        ins.append((o,))
    stride, padding, dilation = given
    taps = tuple(weight.shape[2:])
    steps, gaps = several(stride, nd), several(dilation, nd)
    if padding == "same":
        edges = tuple(d * (k - 1) // 2 for d, k in zip(gaps, taps, strict=True))
    else:
        edges = several(0 if padding == "valid" else padding, nd)
    windows = tuple(zip(taps, steps, edges, gaps, strict=True))
    run = _transposed(nd, windows) if transposed else _convolved(nd, windows, padding == "same")
    return Spec(
        ins,
        [(*batch, o, *space)],
        [shape],
        reduce={"c": "sum"},
        linear=[(0,), (1,)] if bias is None else [(0, 2), (1, 2)],
        addends=(2,),
        factors=factors,
        run=run,
        when=lambda placed: (
            groups > 1 or placed.lacks() or cut_dims(placed, placed.ins[0], range(len(batch) + 1, x.ndim))
        ),
    )


Windows = tuple[tuple[int, int, int, int], ...]


def _convolved(nd: int, windows: Windows, same: bool) -> Callable[..., torch.Tensor]:
    def run(func: Callable[..., Any], args: Any, kwargs: Any, placed: Placed) -> torch.Tensor:
        bound = bound_to(_NAMES, args, kwargs)
        x, weight, bias, groups = bound["input"], bound["weight"], bound.get("bias"), bound.get("groups", 1)
        lay, out = placed.ins[0], placed.outs[0]
        front = x.ndim - nd
        cut = cut_dims(placed, lay, range(front, x.ndim))
        reach = {front + i: _looking(w) for i, w in enumerate(windows)}
        x, _ = fetched(x, lay, out, reach)
        if not x.numel() or not weight.numel() or 0 in out.local_shape:
            return _nothing(placed, nd, x, weight, bias)
        edges = [0 if front + i in cut else w[2] for i, w in enumerate(windows)]
        # an even kernel needs one row more on the far side
        uneven = [
            (w[3] * (w[0] - 1)) % 2 if same and front + i not in cut else 0 for i, w in enumerate(windows)
        ]
        if any(uneven):
            x = F.pad(x, [n for extra in reversed(uneven) for n in (0, extra)])
        _, steps, _, gaps = zip(*windows, strict=True)
        if groups > 1:
            groups = groups * weight.shape[0] // placed.ins[1].shape[0]
        return func(x, weight, bias, steps, edges, gaps, groups)

    return run


def _looking(window: tuple[int, int, int, int]) -> Callable[[int, int], tuple[int, int]]:
    taps, step, edge, gap = window
    return lambda a, b: (a * step - edge, b * step - edge + gap * (taps - 1))


def _transposed(nd: int, windows: Windows) -> Callable[..., torch.Tensor]:
    def run(func: Callable[..., Any], args: Any, kwargs: Any, placed: Placed) -> torch.Tensor:
        bound = bound_to(_TRANSPOSED, args, kwargs)
        x, weight, bias, groups = bound["input"], bound["weight"], bound.get("bias"), bound.get("groups", 1)
        lay, out = placed.ins[0], placed.outs[0]
        front = x.ndim - nd
        cut = cut_dims(placed, lay, range(front, x.ndim))
        reach = {front + i: _sources(w) for i, w in enumerate(windows)}
        x, first = fetched(x, lay, out, reach)
        if not x.numel() or not weight.numel() or 0 in out.local_shape:
            return _nothing(placed, nd, x, weight, bias)
        edges = [0 if front + i in cut else w[2] for i, w in enumerate(windows)]
        given = several(bound.get("output_padding", 0), nd)
        more = [0 if front + i in cut else n for i, n in enumerate(given)]
        _, steps, _, gaps = zip(*windows, strict=True)
        if groups > 1:
            groups = groups * weight.shape[0] // placed.ins[1].shape[0]
        y = func(x, weight, bias, steps, edges, more, groups, gaps)
        for dim in cut:
            _, step, edge, _ = windows[dim - front]
            start = local_box(out).offsets[dim] + edge - first[dim] * step
            y = y.narrow(dim, start, out.local_shape[dim])
        return y

    return run


def _sources(window: tuple[int, int, int, int]) -> Callable[[int, int], tuple[int, int]]:
    """Input rows i with i·step - edge + t·gap among the output rows; so many that they reach the last."""
    taps, step, edge, gap = window
    extent = gap * (taps - 1)

    def of(a: int, b: int) -> tuple[int, int]:
        last = (b + edge) // step
        return (a + edge - extent) // step, last if last * step - edge + extent >= b else last + 1

    return of


def _nothing(
    placed: Placed, nd: int, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    # torch convolves no empty tensors
    out = of_nothing(placed, x, weight)
    return out if bias is None else out + bias.view(-1, *[1] * nd)
