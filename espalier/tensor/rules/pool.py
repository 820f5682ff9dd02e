"""Pooling: batch and channels by themselves; space by fetching the rows of a window."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from espalier.layout import local_box
from espalier.tensor.rules.space import Halo, Window, cut_dims, meta_shapes, rule_of_dims, several, with_halo
from espalier.tensor.rules.spec import Dims, Operand, Placed, Spec, bound_to, of_nothing
from espalier.tensor.rules.table import rule_with

_MAX = "input kernel_size stride padding dilation ceil_mode return_indices"
_AVG = "input kernel_size stride padding ceil_mode count_include_pad divisor_override"


def _lead(x: Operand, nd: int) -> Dims:
    return tuple(("b", i) for i in range(x.ndim - nd))


def _space(nd: int) -> Dims:
    return tuple(("s", i) for i in range(nd))


def _needed(nd: int) -> Callable[[Placed], Any]:
    """Whether space is cut, or something empty; else the plain function serves."""
    return lambda p: p.lacks() or cut_dims(p, p.ins[0], range(p.ins[0].ndim - nd, p.ins[0].ndim))


@rule_of_dims("max_pool{}d")
def max_pool(nd: int) -> Callable[..., Spec]:
    """input[..., s...]; indices are those of the whole of space."""

    def rule(
        input: Operand,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: bool = False,
        return_indices: bool = False,
    ) -> Spec:
        function = getattr(F, f"max_pool{nd}d_with_indices")
        shape = meta_shapes(function, input, kernel_size, stride, padding, dilation, ceil_mode)[0]
        dims = (*_lead(input, nd), *_space(nd))
        windows = _windows(nd, kernel_size, stride, padding, dilation)
        run = _max_pooled(windows, ceil_mode)
        return Spec([dims], [dims], [shape], run=run, when=_needed(nd))

    return rule


@rule_of_dims("max_pool{}d_with_indices")
def max_pool_with_indices(nd: int) -> Callable[..., Spec]:
    """As :func:`max_pool`; two outputs."""
    one = max_pool(nd)

    def rule(*args: Any, **kwargs: Any) -> Spec:
        spec = one(*args, **kwargs)
        return Spec(spec.ins, [*spec.outs] * 2, [*spec.shapes] * 2, run=spec.run, when=spec.when)

    return rule


def _windows(nd: int, kernel: Any, stride: Any, padding: Any, dilation: Any = 1) -> list[Window]:
    steps = kernel if stride is None or (not isinstance(stride, int) and not len(stride)) else stride
    return Window.each(nd, kernel, steps, padding, dilation)


def _max_pooled(windows: Sequence[Window], ceil_mode: bool) -> Callable[..., Any]:
    taps, steps, _, gaps = zip(*windows, strict=True)

    def run(func: Callable[..., Any], args: Any, kwargs: Any, placed: Placed) -> Any:
        x = bound_to(_MAX, args, kwargs)["input"]
        lowest = -math.inf if x.is_floating_point() else torch.iinfo(x.dtype).min
        halo = with_halo(x, placed, windows, lowest)
        if not halo.rows.numel() or 0 in placed.outs[0].local_shape:
            return _nothing(halo, placed)
        return _with_indices(func(halo.rows, taps, steps, halo.edges, gaps, ceil_mode), halo, placed)

    return run


def _nothing(halo: Halo, placed: Placed) -> Any:
    none = of_nothing(placed, halo.rows)
    return none if len(placed.outs) == 1 else (none, none.detach().long())


def _with_indices(out: Any, halo: Halo, placed: Placed) -> Any:
    """The outputs; the indices, if they are among them, into all of space."""
    if len(placed.outs) == 1:
        return out
    front = halo.rows.ndim - len(halo.first)
    return out[0], _globally(out[1], halo.rows.shape[front:], halo.first, placed.ins[0].shape[front:])


def _globally(
    indices: torch.Tensor, local: Sequence[int], offsets: Sequence[int], whole: Sequence[int]
) -> torch.Tensor:
    """Flat indices into a box of space as flat indices into all of it."""
    found = torch.zeros_like(indices)
    for i in range(len(local)):
        inner = math.prod(local[i + 1 :])
        along = indices.div(inner, rounding_mode="floor") % local[i] + offsets[i]
        found += along * math.prod(whole[i + 1 :])
    return found


@rule_of_dims("avg_pool{}d")
def avg_pool(nd: int) -> Callable[..., Spec | None]:
    """input[..., s...]; linear."""

    def rule(
        input: Operand,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Spec | None:
        given = kernel_size, kernel_size if stride is None else stride, padding, ceil_mode
        if not input.dtype.is_floating_point:
            return None  # of whole numbers the mean is cut down
        (shape,) = meta_shapes(getattr(F, f"avg_pool{nd}d"), input, *given)
        dims = (*_lead(input, nd), *_space(nd))
        run = _avg_pooled(_windows(nd, kernel_size, stride, padding))
        return Spec([dims], [dims], [shape], linear=[(0,)], run=run, when=_needed(nd))

    return rule


def _avg_pooled(windows: Sequence[Window]) -> Callable[..., torch.Tensor]:
    taps, steps, _, _ = zip(*windows, strict=True)

    def run(func: Callable[..., Any], args: Any, kwargs: Any, placed: Placed) -> torch.Tensor:
        bound = bound_to(_AVG, args, kwargs)
        halo = with_halo(bound.pop("input"), placed, windows)
        lay, out = placed.ins[0], placed.outs[0]
        if not halo.rows.numel() or 0 in out.local_shape:
            return of_nothing(placed, halo.rows)
        bound |= {"kernel_size": taps, "stride": steps, "padding": halo.edges}
        y = func(halo.rows, **bound)
        if bound.get("divisor_override"):
            return y
        start = local_box(out).offsets
        for dim in halo.cut:
            k, step, edge, _ = windows[dim - lay.ndim]
            rows = torch.arange(start[dim], start[dim] + y.shape[dim]) * step - edge
            size = lay.shape[dim]
            if bound.get("count_include_pad", True):
                count = (rows + k).clamp(max=size + edge) - rows
            else:
                count = (rows + k).clamp(max=size) - rows.clamp(min=0)
            if bool((count != k).any()):
                scale = (k / count.to(torch.float64)).to(dtype=y.dtype, device=y.device)
                y = y * scale.view(-1, *[1] * (y.ndim - 1 - dim))
        return y

    return run


@rule_of_dims("adaptive_avg_pool{}d", "avg")
@rule_of_dims("adaptive_max_pool{}d_with_indices", "max")
# torch's own give the indices too
@rule_with(torch.adaptive_max_pool1d, 1, "max")
@rule_with(torch._C._nn.adaptive_max_pool2d, 2, "max")
@rule_with(torch._C._nn.adaptive_max_pool3d, 3, "max")
def adaptive(nd: int, kind: str) -> Callable[..., Spec | None]:
    """To given sizes. Space may be sharded where all windows are equal, or where a mean is one for all."""

    def rule(input: Operand, output_size: Any, return_indices: bool = False) -> Spec | None:
        sizes = tuple(
            n if m is None else m for n, m in zip(input.shape[-nd:], several(output_size, nd), strict=True)
        )
        if min(sizes) < 0:
            return None  # torch refuses it
        lead, space = _lead(input, nd), _space(nd)
        shape = (*input.shape[: input.ndim - nd], *sizes)
        pairs = list(zip(space, input.shape[-nd:], sizes, strict=True))
        alone = [s for s, _, m in pairs if m == 1]
        averaged = kind == "avg"
        blocked = frozenset(s for s, n, m in pairs if n % max(m, 1) or (m == 1 and not averaged))
        out = (*lead, *(None if m == 1 else s for s, _, m in pairs))
        count = 1 if averaged else 2
        return Spec(
            [(*lead, *space)],
            [out] * count,
            [shape] * count,
            reduce=dict.fromkeys(alone, "sum") if averaged else {},
            linear=[(0,)] if averaged else [],
            blocked=blocked - set(alone if averaged else ()),
            run=_adapted(nd),
            when=_needed(nd),
        )

    return rule


@rule_with(F.adaptive_max_pool1d, 1)
@rule_with(F.adaptive_max_pool2d, 2)
@rule_with(F.adaptive_max_pool3d, 3)
def adaptive_max(nd: int) -> Callable[..., Spec | None]:
    """Adaptive maxima without their indices."""
    both = adaptive(nd, "max")

    def rule(*args: Any, **kwargs: Any) -> Spec | None:
        spec = both(*args, **kwargs)
        if spec is None:
            return None
        return Spec(
            spec.ins, spec.outs[:1], spec.shapes[:1], blocked=spec.blocked, run=spec.run, when=spec.when
        )

    return rule


def _adapted(nd: int) -> Callable[..., Any]:
    def run(func: Callable[..., Any], args: Any, kwargs: Any, placed: Placed) -> Any:
        x = bound_to("input output_size return_indices", args, kwargs)["input"]
        out, share = placed.outs[0], 1.0
        windows: list[Window | None] = []
        for own, n, m in zip(x.shape[-nd:], placed.ins[0].shape[-nd:], out.shape[-nd:], strict=True):
            if m == 1:
                share *= own / max(n, 1)
            windows.append(None if m == 1 else Window(n // max(m, 1), n // max(m, 1)))
        halo = with_halo(x, placed, windows)
        if not halo.rows.numel() or 0 in out.local_shape:
            return _nothing(halo, placed)
        y = func(halo.rows, out.local_shape[-nd:])
        return _with_indices(y if share == 1 else y * share, halo, placed)

    return run


@rule_with(torch._C._nn.max_unpool2d, 2)
@rule_with(torch._C._nn.max_unpool3d, 3)
def max_unpool(nd: int) -> Callable[..., Spec | None]:
    """input and indices[..., s...] to a given size of space, which is whole."""

    def rule(input: Operand, indices: Operand, output_size: Sequence[int], *args: Any) -> Spec | None:
        if indices.shape != input.shape:
            return None  # torch refuses it
        dims = (*_lead(input, nd), *(None,) * nd)
        shape = (*input.shape[: input.ndim - nd], *output_size[-nd:])

        def run(func: Callable[..., Any], args: Any, kwargs: Any, placed: Placed) -> torch.Tensor:
            return of_nothing(placed, bound_to("input indices", args, kwargs)["input"])

        return Spec([dims, dims], [dims], [shape], run=run, when=Placed.lacks, fails=(1,))

    return rule
