"""Windows over sharded space: each rank fetches the rows that its own outputs look at."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from espalier.comm import Spans, exchange, spans_of
from espalier.layout import Layout, local_box
from espalier.sharding.spec import (
    Decorator,
    Definition,
    Dims,
    Operand,
    Placed,
    Spec,
    bound_to,
    of_nothing,
    rule,
    rule_of_each,
    rule_with,
)
from espalier.torch_private import nn_built_in

Reach = Callable[[int, int], tuple[int, int]]


class Window(NamedTuple):
    """A window along one dim of space.

    Attributes:
        taps: how many rows it looks at.
        step: how many rows it goes on from one output to the next.
        edge: how many rows the first stands beyond the border.
        gap: how far apart the rows are that it looks at.
    """

    taps: int
    step: int
    edge: int = 0
    gap: int = 1

    @classmethod
    def each(cls, nd: int, *attributes: Any) -> list[Window]:
        """A window for each dim; its attributes are given once for all dims or one by one."""
        return [cls(*one) for one in zip(*(several(a, nd) for a in attributes), strict=True)]

    def reach(self, a: int, b: int) -> tuple[int, int]:
        """The first and the last row that the outputs a to b look at."""
        return a * self.step - self.edge, b * self.step - self.edge + self.gap * (self.taps - 1)


@dataclass(slots=True)
class Halo:
    """What this rank's outputs look at: rows of its own, and of its neighbours (the halo).

    Attributes:
        rows: the input's rows (and all of its other dims), none where this rank has no outputs.
        cut: the dims of space that axes cut; beyond the borders their rows are filled in.
        first: for each dim of space the global number of the first row.
        edges: for each dim of space the padding that is left to do.
    """

    rows: torch.Tensor
    cut: list[int]
    first: list[int]
    edges: list[int]


def with_halo(
    x: torch.Tensor,
    placed: Placed,
    windows: Sequence[Window | None],
    fill: Any = 0,
    reach: Callable[[Window, int, int], tuple[int, int]] = Window.reach,
) -> Halo:
    """What this rank's outputs look at, through a window for each of the last dims.

    Args:
        x: the local part of the first input.
        windows: those of a dim that is looked at as a whole: None.
        fill: what stands beyond the borders.
        reach: the first and the last row that a window of outputs looks at.
    """
    front, lay = x.ndim - len(windows), placed.ins[0]
    reaches: dict[int, Reach] = {front + i: partial(reach, w) for i, w in enumerate(windows) if w is not None}
    rows, first = fetched(x, lay, placed.outs[0], reaches, fill)
    cut = cut_dims(placed, lay, reaches)
    edges = [0 if w is None or front + i in cut else w.edge for i, w in enumerate(windows)]
    return Halo(rows, cut, [first.get(d, 0) for d in range(front, x.ndim)], edges)


def several(value: Any, nd: int) -> tuple[Any, ...]:
    """An argument for each of ``nd`` dims, given once for all or one by one."""
    if isinstance(value, int) or value is None:
        return (value,) * nd
    return tuple(value) if len(value) == nd else tuple(value) * nd


def meta_shapes(func: Callable[..., Any], *args: Any, **kwargs: Any) -> list[tuple[int, ...]]:
    """The shapes that a function gives, asked of torch itself: operands are stood for by meta tensors."""

    def stand_in(a: Any) -> Any:
        if isinstance(a, Operand):
            return torch.empty(a.shape, dtype=a.dtype, device="meta")
        return [stand_in(x) for x in a] if isinstance(a, list) else a

    out = func(*map(stand_in, args), **{k: stand_in(v) for k, v in kwargs.items()})
    return [tuple(x.shape) for x in (out if isinstance(out, tuple | list) else (out,))]


def fetched(
    x: torch.Tensor, source: Layout, goal: Layout, reach: dict[int, Reach], fill: Any = 0
) -> tuple[torch.Tensor, dict[int, int]]:
    """The rows that this rank's outputs look at, what lies beyond the global borders filled in.

    Args:
        x: the local part of a tensor that lies as ``source``.
        goal: the layout of the output, whose dims are cut as those of ``source``.
        reach: for a dim, from the first and the last output row to the first and the last input row
            looked at; dims that no axis cuts are left alone.

    Returns:
        The rows, none where this rank has no outputs; and the (global) first row of each dim fetched.
    """
    pads = [0] * (2 * x.ndim)
    first: dict[int, int] = {}
    for dim, of in reach.items():
        if not any(source.mesh.shape[a] > 1 for a in source.cuts[dim]):
            continue
        size, have, outs = source.shape[dim], spans_of(source, dim), spans_of(goal, dim)
        ends = [of(a, b - 1) if a < b else (0, -1) for ((a, b),) in outs]
        want: list[Spans] = []
        for a, b in ends:
            start = min(max(a, 0), size)
            want.append(((start, max(min(b + 1, size), start)),))
        x = exchange(x, source.mesh, source.cuts[dim], dim, have, want)
        box = local_box(goal)
        rows = ((box.offsets[dim], box.offsets[dim] + box.sizes[dim]),)
        a, b = ends[outs.index(rows)] if goal.local_shape[dim] else (0, -1)
        first[dim] = a
        left = min(max(-a, 0), b + 1 - a)
        at = 2 * (x.ndim - 1 - dim)
        pads[at : at + 2] = left, b + 1 - a - left - x.shape[dim]
    return (F.pad(x, pads, value=fill) if any(pads) else x), first


def cut_dims(placed: Placed, layout: Layout, dims: Iterable[int]) -> list[int]:
    """Those of the dims that some axis of more than one rank cuts."""
    return [d for d in dims if placed.axes_of(layout, (d,))]


def rule_of_dims(named: str, *args: Any) -> Decorator:
    """What the function below makes of a count of dims, and of ``args``, is the rule for these names.

    In ``named`` the counts 1, 2 and 3 stand in place of ``{}``.
    """

    def register(maker: Definition) -> Definition:
        for nd in (1, 2, 3):
            rule_with(named.format(nd), nd, *args)(maker)
        return maker

    return register


# ---- convolutions: batch, channels and groups sharded as in a product; space by fetching borders


_NAMES = "input weight bias stride padding dilation groups"
_TRANSPOSED = "input weight bias stride padding output_padding groups dilation"
_CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_CONV_TRANSPOSE = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


def _refused(stride: Any, padding: Any, dilation: Any) -> bool:
    """Whether torch refuses what a rank without work to do would not notice."""
    edges = 0 if isinstance(padding, str) else padding
    step, gap, edge = (a if isinstance(a, int) else min(a) for a in (stride, dilation, edges))
    return step < 1 or gap < 1 or edge < 0


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
        if _refused(stride, padding, dilation):
            return None
        (shape,) = meta_shapes(_CONV[nd], input, weight, None, stride, padding, dilation, groups)
        options = stride, padding, dilation
        return _spec(nd, input, weight, bias, groups, shape, transposed=False, attributes=options)

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
        options = stride, padding, output_padding, groups, dilation
        if _refused(stride, padding, dilation):
            return None
        (shape,) = meta_shapes(_CONV_TRANSPOSE[nd], input, weight, None, *options)
        return _spec(
            nd, input, weight, bias, groups, shape, transposed=True, attributes=(stride, padding, dilation)
        )

    return rule


def _spec(
    nd: int, x: Operand, weight: Operand, bias: Operand | None, groups: int, shape: tuple[int, ...],
    *, transposed: bool, attributes: tuple[Any, Any, Any],
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
    stride, padding, dilation = attributes
    taps = weight.shape[2:]
    if padding == "same":
        padding = tuple(d * (k - 1) // 2 for d, k in zip(several(dilation, nd), taps, strict=True))
    windows = Window.each(nd, taps, stride, 0 if padding == "valid" else padding, dilation)
    run = _transposed(nd, windows) if transposed else _convolved(nd, windows, attributes[1] == "same")
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
            return _convolved_nothing(placed, nd, x, weight, bias)
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
            return _convolved_nothing(placed, nd, x, weight, bias)
        padding = several(bound.get("output_padding", 0), nd)
        more = [0 if front + i in halo.cut else n for i, n in enumerate(padding)]
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


def _convolved_nothing(
    placed: Placed, nd: int, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    # torch convolves no empty tensors
    out = of_nothing(placed, x, weight)
    return out if bias is None else out + bias.view(-1, *[1] * nd)


# ---- pooling: batch and channels by themselves; space by fetching the rows of a window


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
            return _pooled_nothing(halo, placed)
        return _with_indices(func(halo.rows, taps, steps, halo.edges, gaps, ceil_mode), halo, placed)

    return run


def _pooled_nothing(halo: Halo, placed: Placed) -> Any:
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
    flat = torch.zeros_like(indices)
    for i in range(len(local)):
        inner = math.prod(local[i + 1 :])
        along = indices.div(inner, rounding_mode="floor") % local[i] + offsets[i]
        flat += along * math.prod(whole[i + 1 :])
    return flat


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
        options = kernel_size, kernel_size if stride is None else stride, padding, ceil_mode
        if not input.dtype.is_floating_point:
            return None  # of whole numbers the mean is cut down
        (shape,) = meta_shapes(getattr(F, f"avg_pool{nd}d"), input, *options)
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
@rule_with(nn_built_in.adaptive_max_pool2d, 2, "max")
@rule_with(nn_built_in.adaptive_max_pool3d, 3, "max")
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
        for size, n, m in zip(x.shape[-nd:], placed.ins[0].shape[-nd:], out.shape[-nd:], strict=True):
            if m == 1:
                share *= size / max(n, 1)
            windows.append(None if m == 1 else Window(n // max(m, 1), n // max(m, 1)))
        halo = with_halo(x, placed, windows)
        if not halo.rows.numel() or 0 in out.local_shape:
            return _pooled_nothing(halo, placed)
        y = func(halo.rows, out.local_shape[-nd:])
        return _with_indices(y if share == 1 else y * share, halo, placed)

    return run


@rule_with(nn_built_in.max_unpool2d, 2)
@rule_with(nn_built_in.max_unpool3d, 3)
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


# ---- resampling and rearranging of images: batch and channels sharded, space whole unless said


_UPSAMPLE = (
    "upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d "
    "_upsample_nearest_exact2d _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d "
    "upsample_trilinear3d upsample_bicubic2d _upsample_bilinear2d_aa _upsample_bicubic2d_aa"
).split()


def _empty(func: Callable[..., Any], args: Any, kwargs: Any, placed: Placed) -> torch.Tensor:
    """For a rank without a part: torch resamples no empty tensors."""
    return of_nothing(placed, *(a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)))


@rule_of_each(tuple(getattr(nn_built_in, name) for name in _UPSAMPLE if hasattr(nn_built_in, name)))
def upsample(function: Callable[..., Any]) -> Callable[..., Spec]:
    """input[b, c, s...]; linear."""

    def rule(input: Operand, *args: Any, **kwargs: Any) -> Spec:
        space: Dims = (None,) * (input.ndim - 2)
        dims: Dims = ("b", "c", *space)
        shapes = meta_shapes(function, input, *args, **kwargs)
        return Spec([dims], [dims], shapes, linear=[(0,)], run=_empty, when=Placed.lacks)

    return rule


@rule(torch.grid_sampler)
def grid_sampler(input: Operand, grid: Operand, *args: Any) -> Spec:
    """input[b, c, s...] sampled at grid[b, o..., :], whose points may be sharded; linear in input."""
    points: Dims = tuple(("o", i) for i in range(grid.ndim - 2))
    space: Dims = (None,) * (input.ndim - 2)
    return Spec(
        [("b", "c", *space), ("b", *points, None)],
        [("b", "c", *points)],
        [(*input.shape[:2], *grid.shape[1:-1])],
        linear=[(0,)],
        run=_empty,
        when=Placed.lacks,
    )


@rule(torch.affine_grid_generator)
def affine_grid(theta: Operand, size: Any, align_corners: bool) -> Spec:
    """A grid for each theta[b, :, :]; linear."""

    def run(func: Callable[..., Any], args: Any, kwargs: Any, placed: Placed) -> torch.Tensor:
        local = bound_to("theta size align_corners", args, kwargs)["theta"]
        return func(local, (local.shape[0], *size[1:]), align_corners)

    space = tuple(size[2:])
    out: Dims = ("b", *(None,) * len(space), None)
    return Spec([("b", None, None)], [out], [(size[0], *space, len(space))], linear=[(0,)], run=run)


@rule(nn_built_in.im2col)
def im2col(input: Operand, kernel_size: Any, *args: Any) -> Spec:
    """Patches of input[b, c, h, w] (F.unfold): a patch of a channel stays together; linear."""
    (shape,) = meta_shapes(nn_built_in.im2col, input, kernel_size, *args)
    batch: Dims = ("b",) if input.ndim == 4 else ()
    return _patches((*batch, "c", None, None), (*batch, "c", None), input.shape[-3], shape, shape[-2])


@rule(nn_built_in.col2im)
def col2im(input: Operand, output_size: Any, kernel_size: Any, *args: Any) -> Spec:
    """Patches added up to [b, c, h, w] (F.fold); linear."""
    (shape,) = meta_shapes(nn_built_in.col2im, input, output_size, kernel_size, *args)
    batch: Dims = ("b",) if input.ndim == 3 else ()
    return _patches((*batch, "c", None), (*batch, "c", None, None), shape[-3], shape, input.shape[-2])


def _patches(dims: Dims, out: Dims, channels: int, shape: tuple[int, ...], rows: int) -> Spec:
    factors = {"c": [(channels, 1), (channels, rows // channels)]}
    return Spec([dims], [out], [shape], factors=factors, linear=[(0,)], run=_empty, when=Placed.lacks)


@rule("pixel_shuffle")
def pixel_shuffle(input: Operand, upscale_factor: int) -> Spec:
    """[..., c·r², h, w] to [..., c, h·r, w·r]: every dim may be sharded between whole groups; linear."""
    return _shuffled(input, upscale_factor, 1)


@rule("pixel_unshuffle")
def pixel_unshuffle(input: Operand, downscale_factor: int) -> Spec:
    """[..., c, h·r, w·r] to [..., c·r², h, w]: every dim may be sharded between whole groups; linear."""
    return _shuffled(input, 1, downscale_factor)


def _shuffled(x: Operand, up: int, down: int) -> Spec:
    r = up * down
    *lead, c, h, w = x.shape
    shape = (*lead, c * down**2 // up**2, h * up // down, w * up // down)
    small = (min(c, shape[-3]), min(h, shape[-2]), min(w, shape[-1]))
    many, one, pair = (small[0], r**2), (small[0], 1), [(n, f) for n in small[1:] for f in (1, r)]
    dims: Dims = tuple(("d", i) for i in range(x.ndim))
    factors = {dims[-3]: [many, one], dims[-2]: pair[:2], dims[-1]: pair[2:]}
    return Spec([dims], [dims], [shape], factors=factors, linear=[(0,)], run=_empty, when=Placed.lacks)


@rule("channel_shuffle")
def channel_shuffle(input: Operand, groups: int) -> Spec:
    """The channels, dim 1, must be whole; linear."""
    dims = input.dims()
    return Spec([dims], [dims], [input.shape], linear=[(0,)], blocked=frozenset([dims[1]]))
