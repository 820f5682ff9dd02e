"""Convolutions: batch, channels and groups sharded as in a product; space by fetching borders."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from espalier.layout import local_box
from espalier.tensor.rules.space import Window, cut_dims, meta_shapes, rule_of_dims, several, with_halo
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
    taps = weight.shape[2:]
    if padding == "same":
        padding = tuple(d * (k - 1) // 2 for d, k in zip(several(dilation, nd), taps, strict=True))
    windows = Window.each(nd, taps, stride, 0 if padding == "valid" else padding, dilation)
    run = _transposed(nd, windows) if transposed else _convolved(nd, windows, given[1] == "same")
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


def _convolved(nd: int, windows: Sequence[Window], same: bool) -> Callable[..., torch.Tensor]:
    def run(func: Callable[..., Any], args: Any, kwargs: Any, placed: Placed) -> torch.Tensor:
        bound = bound_to(_NAMES, args, kwargs)
        weight, bias = bound["weight"], bound.get("bias")
        halo = with_halo(bound["input"], placed, windows)
        x = halo.rows
        if not x.numel() or not weight.numel() or 0 in placed.outs[0].local_shape:
            return _nothing(placed, nd, x, weight, bias)
        if same:
            # an even kernel needs one row more on the far side
            uneven = [
                (w.gap * (w.taps - 1)) % 2 if d not in halo.cut else 0
                for d, w in enumerate(windows, x.ndim - nd)
            ]
            if any(uneven):
                x = F.pad(x, [n for extra in reversed(uneven) for n in (0, extra)])
        steps, gaps = [w.step for w in windows], [w.gap for w in windows]
        return func(x, weight, bias, steps, halo.edges, gaps, _groups(bound, placed))

    return run


def _transposed(nd: int, windows: Sequence[Window]) -> Callable[..., torch.Tensor]:
    def run(func: Callable[..., Any], args: Any, kwargs: Any, placed: Placed) -> torch.Tensor:
        bound = bound_to(_TRANSPOSED, args, kwargs)
        weight, bias, out = bound["weight"], bound.get("bias"), placed.outs[0]
        halo = with_halo(bound["input"], placed, windows, reach=_sources)
        x, front = halo.rows, halo.rows.ndim - nd
        if not x.numel() or not weight.numel() or 0 in out.local_shape:
            return _nothing(placed, nd, x, weight, bias)
        given = several(bound.get("output_padding", 0), nd)
        more = [0 if front + i in halo.cut else n for i, n in enumerate(given)]
        steps, gaps = [w.step for w in windows], [w.gap for w in windows]
        y = func(x, weight, bias, steps, halo.edges, more, _groups(bound, placed), gaps)
        for dim in halo.cut:
            window, first = windows[dim - front], halo.first[dim - front]
            start = local_box(out).offsets[dim] + window.edge - first * window.step
            y = y.narrow(dim, start, out.local_shape[dim])
        return y

    return run


def _groups(bound: dict[str, Any], placed: Placed) -> int:
    """How many of the groups are this rank's."""
    groups: int = bound.get("groups", 1)
    return groups * bound["weight"].shape[0] // placed.ins[1].shape[0] if groups > 1 else groups


def _sources(window: Window, a: int, b: int) -> tuple[int, int]:
    """Input rows i with i·step - edge + t·gap among the output rows; so many that they reach the last."""
    extent = window.gap * (window.taps - 1)
    last = (b + window.edge) // window.step
    end = last if last * window.step - window.edge + extent >= b else last + 1
    return (a + window.edge - extent) // window.step, end


def _nothing(
    placed: Placed, nd: int, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    # torch convolves no empty tensors
    out = of_nothing(placed, x, weight)
    return out if bias is None else out + bias.view(-1, *[1] * nd)
