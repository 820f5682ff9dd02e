"""Normalisations. Where what is averaged over is sharded, the ranks share the two moments.

Then the statistics are those of the whole batch (or row, or group), whatever the layout: of each
the ranks add up their part of the mean and of the variance, never the activations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from espalier.comm import collectives
from espalier.comm.functions import MeetingFunction
from espalier.comm.redistribute import summed
from espalier.layout.layout import normal_dim
from espalier.mesh import Mesh
from espalier.sharding.spec import Dims, Letter, Operand, Placed, Spec, bound_to, of_nothing, of_one, rule


class _Standardize(MeetingFunction):
    """(x - mean) / sqrt(variance + eps) over dims that the ranks of some axes share.

    Two all-reduces of the size of the statistics forward (Chan, Golub, LeVeque 1983, for the variance
    of parts), one of twice that backward. What is saved is the result, not the input.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, dims: tuple[int, ...], mesh: Mesh, axes: tuple[int, ...], count: int,
        eps: float, centred: bool,
    ) -> tuple[torch.Tensor, ...]:  # fmt: skip
        elements = math.prod(x.shape[d] for d in dims)
        wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x

        def total(part: torch.Tensor) -> torch.Tensor:
            for axis in axes:
                part = collectives.all_reduce(part, mesh, axis)
            return part / count

        if not wide.numel():
            mean = spread = wide.sum(dims, keepdim=True)
        elif centred:
            spread, mean = torch.var_mean(wide, dims, correction=0, keepdim=True)
        else:
            spread, mean = wide.square().mean(dims, keepdim=True), wide.new_zeros(())
        if centred:
            part, mean = mean, total(mean * elements)
            spread = spread + (part - mean).square()
        variance = total(spread * elements)
        scale = (variance + eps).rsqrt()
        out = ((wide - mean) * scale if centred else wide * scale).to(x.dtype)
        ctx.arguments = dims, mesh, axes, count, centred
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(mean, variance)
        ctx.save_for_backward(out, scale)
        return out, scale, mean, variance

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None, of_scale: torch.Tensor | None, *rest: Any) -> Any:
        # in terms of the outputs alone, and of what can be differentiated: so for every order
        out, scale = ctx.saved_tensors
        dims, mesh, axes, count, centred = ctx.arguments
        grad_x = None
        if grad is not None:
            wide = grad.to(scale.dtype)
            sums = torch.stack([(wide * out).sum(dims, keepdim=True), wide.sum(dims, keepdim=True)])
            along, level = (summed(sums if centred else sums[:1], mesh, axes) / count).expand(
                2, *sums.shape[1:]
            )
            grad_x = scale * (wide - out * along - level if centred else wide - out * along)
        if of_scale is not None:
            part = out * scale.square() * (summed(of_scale, mesh, axes) / -count)
            grad_x = part if grad_x is None else grad_x + part
        return (None if grad_x is None else grad_x.to(out.dtype), *[None] * 6)


def _standardized(
    x: torch.Tensor, dims: Sequence[int], mesh: Mesh, axes: tuple[int, ...], count: int, eps: float,
    centred: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Normalised, and the mean and the (biased) variance, with the dims kept as ones."""
    out, _, mean, variance = _Standardize.apply(x, tuple(dims), mesh, axes, count, eps, centred)
    return out, mean, variance


def _affine(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, shape: Sequence[int]
) -> torch.Tensor:
    dtype = x.dtype
    x = x if weight is None else x * weight.view(shape)
    return (x if bias is None else x + bias.view(shape)).to(dtype)


# ---- batches and instances


@rule(torch.nn.functional.batch_norm)
def batch_norm(
    input: Operand,
    running_mean: Operand | None,
    running_var: Operand | None,
    weight: Operand | None = None,
    bias: Operand | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Spec | None:
    """input[b, c, s...]: every dim may be sharded; the statistics are those of the global batch.

    Raises:
        ValueError: there is one value for each channel.
    """
    if input.ndim < 2:
        return None
    if training and math.prod(input.shape) == input.shape[1]:
        # as torch says it
        raise ValueError(
            f"Expected more than 1 value per channel when training, got input size {input.shape}"
        )
    return _tracking(input, [running_mean, running_var, weight, bias], training, each_sample=False)


@rule(torch.batch_norm)
def torch_batch_norm(
    input: Operand, weight: Any, bias: Any, running_mean: Any, running_var: Any, training: bool, *rest: Any
) -> Spec | None:
    """torch.batch_norm: other names for the same."""
    spec = batch_norm(input, running_mean, running_var, weight, bias, training)
    return _reordered(spec, [weight, bias, running_mean, running_var])


@rule(torch.nn.functional.instance_norm)
def instance_norm(
    input: Operand,
    running_mean: Operand | None = None,
    running_var: Operand | None = None,
    weight: Operand | None = None,
    bias: Operand | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Spec | None:
    """input[b, c, s...] over space, every sample by itself; every dim may be sharded.

    Raises:
        ValueError: space has one element.
    """
    if use_input_stats and math.prod(input.shape[2:]) == 1:
        raise ValueError(
            f"Expected more than 1 spatial element when training, got input size {list(input.shape)}"
        )
    return _tracking(input, [running_mean, running_var, weight, bias], use_input_stats, each_sample=True)


@rule(torch.instance_norm)
def torch_instance_norm(
    input: Operand, weight: Any, bias: Any, running_mean: Any, running_var: Any, use_input_stats: bool,
    *rest: Any,
) -> Spec | None:  # fmt: skip
    """torch.instance_norm: other names for the same."""
    spec = instance_norm(input, running_mean, running_var, weight, bias, use_input_stats)
    return _reordered(spec, [weight, bias, running_mean, running_var])


def _tracking(
    x: Operand, small: Sequence[Operand | None], training: bool, *, each_sample: bool
) -> Spec | None:  # fmt: skip
    """The rule of batches, or of each sample; ``small``: running mean and variance, weight, bias."""
    spec = _by_channel(x, small, ("c",))
    over: list[int] = []
    if training:
        written = _buffers(*small[:2])
        if written is None:
            return None
        spec.buffers = written
        samples, channels = x.layout.padded_shape[:2]
        names = spec.ins[0][2:] if each_sample else ("b", *spec.ins[0][2:])
        spec.sends = dict.fromkeys(names, 2 * channels * (samples if each_sample else 1))
        over = [*([] if each_sample and small[0] is None else [0]), *range(2, x.ndim)]
    # parameters of a model that computes in 16 bits, whose buffers stay as they are: torch refuses the two
    dtypes = {o.dtype for o in small if isinstance(o, Operand)}
    spec.run = partial(_normed, each_sample)
    spec.when = lambda placed: len(dtypes) > 1 or placed.lacks() or placed.axes_of(placed.ins[0], over)
    return spec


def _by_channel(x: Operand, small: Sequence[Operand | None], channel: Dims) -> Spec:
    dims: Dims = ("b", *channel, *(("s", i) for i in range(x.ndim - 2)))
    return Spec([dims, *(channel for o in small if isinstance(o, Operand))], [dims], [x.shape])


def _reordered(spec: Spec | None, small: Sequence[Operand | None]) -> Spec | None:
    """For a function that takes the running statistics last."""
    if spec is not None and spec.buffers:
        n = sum(isinstance(o, Operand) for o in small)
        spec.buffers = [n - 1, n]
    return spec


def _buffers(mean: Operand | None, variance: Operand | None) -> list[int] | None:
    """What is written to besides; None if the two lie differently, or are Partial."""
    if not (isinstance(mean, Operand) and isinstance(variance, Operand)):
        return []
    return [mean.index, variance.index] if mean.layout is variance.layout and mean.layout.is_firm else None


_BATCH = "input running_mean running_var weight bias training momentum eps"
_TORCH_BATCH = "input weight bias running_mean running_var training momentum eps"


def _named(func: Callable[..., Any], args: Any, kwargs: Any) -> dict[str, Any]:
    """The arguments of either spelling by name."""
    bound = bound_to(_BATCH if hasattr(func, "__code__") else _TORCH_BATCH, args, kwargs)
    if "use_input_stats" in bound:
        bound["training"] = bound["use_input_stats"]
    return bound


def _normed(
    each_sample: bool, func: Callable[..., Any], args: Any, kwargs: Any, placed: Placed
) -> torch.Tensor:  # fmt: skip
    bound = _named(func, args, kwargs)
    x, weight, bias = bound["input"], bound.get("weight"), bound.get("bias")
    lay = placed.ins[0]
    over = [*([] if each_sample else [0]), *range(2, x.ndim)]
    axes, apart = placed.axes_of(lay, over), placed.axes_of(lay, [0]) if each_sample else ()
    tracks = bound.get("running_mean") is not None
    if not bound.get("training", each_sample) or not (axes or (tracks and apart)):
        if placed.lacks():
            return of_nothing(placed, x, *(p for p in (weight, bias) if p is not None))
        dtype = bound["running_mean"].dtype
        alike = {id(p): p.to(dtype) for p in (weight, bias) if p is not None}
        args = [alike.get(id(a), a) for a in args]
        return func(*args, **{name: alike.get(id(a), a) for name, a in kwargs.items()})
    count = math.prod(lay.shape[d] for d in over)
    out, mean, variance = _standardized(x, over, placed.mesh, axes, count, bound.get("eps", 1e-5))
    if tracks:
        # of each sample by itself: what is followed is the mean over the samples
        each = torch.stack([mean.flatten(1), variance.flatten(1) * (count / max(count - 1, 1))]).sum(1)
        for axis in apart:
            each = collectives.all_reduce(each, placed.mesh, axis)
        _follow(bound, *(each / (lay.shape[0] if each_sample else 1)))
    return _affine(out, weight, bias, (1, -1, *[1] * (x.ndim - 2)))


def _follow(bound: dict[str, Any], mean: torch.Tensor, variance: torch.Tensor) -> None:
    """Running statistics take their share of the new ones, alike on all ranks."""
    share = bound.get("momentum", 0.1)
    for name, new in (("running_mean", mean), ("running_var", variance)):
        running = bound.get(name)
        if running is not None:
            with torch.no_grad():  # in .data, as torch's kernels don't count it as a write to what they saved
                running.data.mul_(1 - share).add_(new.to(running.dtype), alpha=share)


# ---- groups and rows


@rule("group_norm")
def group_norm(x: Operand, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Spec:
    """x[b, c, s...], every sample and group by itself; whole groups and space may be sharded."""
    spec = _by_channel(x, [weight, bias], ("g",))
    spec.factors = {"g": [(num_groups, x.shape[1] // num_groups)]}
    rows, channels = x.layout.padded_shape[:2]
    groups = -(-num_groups * channels // max(x.shape[1], 1))
    spec.sends = {("s", i): 2 * rows * groups for i in range(x.ndim - 2)}

    def run(func: Callable[..., Any], args: Any, kwargs: Any, placed: Placed) -> torch.Tensor:
        bound = bound_to("input num_groups weight bias eps", args, kwargs)
        local, weight, bias = bound["input"], bound.get("weight"), bound.get("bias")
        if 0 in local.shape[:2]:
            return of_nothing(placed, local, *(p for p in (weight, bias) if p is not None))
        groups = num_groups * local.shape[1] // x.shape[1]
        axes = placed.axes_of(placed.ins[0], range(2, local.ndim))
        if not axes:
            return func(local, groups, weight, bias, eps)
        grouped = local.unflatten(1, (groups, -1))
        count = math.prod(x.shape[1:]) // num_groups
        out, _, _ = _standardized(grouped, range(2, grouped.ndim), placed.mesh, axes, count, eps)
        return _affine(out.flatten(1, 2), weight, bias, (-1, *[1] * (local.ndim - 2)))

    spec.run = run
    return spec


@rule("layer_norm", loose=True)
def layer_norm(
    x: Operand, normalized_shape: Sequence[int], weight: Any = None, bias: Any = None, eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Spec:  # fmt: skip
    """Over the last dims, which may be sharded; weight and bias as they are."""
    return _over_last(x, normalized_shape, [weight, bias], True)


@rule("rms_norm", loose=True)
def rms_norm(
    x: Operand, normalized_shape: Sequence[int], weight: Any = None, eps: float | None = None
) -> Spec:
    """Over the last dims, which may be sharded; the weight as they are."""
    return _over_last(x, normalized_shape, [weight], False)


def _over_last(x: Operand, normalized_shape: Sequence[int], small: Sequence[Any], centred: bool) -> Spec:
    dims, front = x.dims(), x.ndim - len(normalized_shape)
    last: Dims = dims[front:]
    rows = math.prod(x.layout.padded_shape[:front])
    count = math.prod(x.shape[front:])
    names = ("weight", "bias")[: len(small)]
    signature = f"input normalized_shape {' '.join(names)} eps"

    def run(func: Callable[..., Any], args: Any, kwargs: Any, placed: Placed) -> torch.Tensor:
        axes = placed.axes_of(placed.ins[0], range(front, x.ndim))
        bound = bound_to(signature, args, kwargs)
        local, eps = bound["input"], bound.get("eps", 1e-5 if centred else None)
        eps = torch.finfo(local.dtype).eps if eps is None else eps
        over = range(front, x.ndim)
        out, _, _ = _standardized(local, over, placed.mesh, axes, count, eps, centred)
        return _affine(out, bound.get("weight"), bound.get("bias"), local.shape[front:])

    return Spec(
        [dims, *(last for o in small if isinstance(o, Operand))],
        [dims],
        [x.shape],
        sends=dict.fromkeys(last, (2 if centred else 1) * rows),
        run=run,
        when=lambda placed: placed.axes_of(placed.ins[0], range(front, x.ndim)),
    )


@rule("normalize")
def normalize(x: Operand, p: float = 2.0, dim: Any = 1, eps: float = 1e-12, out: Any = None) -> Spec:
    """F.normalize: over a sharded dim the ranks add up the powers."""
    named = {normal_dim(d, x.ndim) for d in ([dim] if isinstance(dim, int) else dim)}
    over = tuple(sorted(named)) if x.ndim else ()
    dims = x.dims()
    letters: list[Letter] = [dims[d] for d in over]
    rows = math.prod(n for d, n in enumerate(x.layout.padded_shape) if d not in over)
    added = isinstance(p, int | float) and 0 < p < math.inf

    def run(func: Callable[..., Any], args: Any, kwargs: Any, placed: Placed) -> torch.Tensor:
        axes = placed.axes_of(placed.ins[0], over)
        local = args[0] if args else kwargs["input"]
        powers = summed(torch.linalg.vector_norm(local, p, over, keepdim=True).pow(p), placed.mesh, axes)
        # a root has no derivative at zero, where the norm's is taken to be zero
        some = powers > 0
        norm = powers.masked_fill(~some, 1).pow(1 / p).masked_fill(~some, 0)
        return local / norm.clamp_min(eps)

    return Spec(
        [dims],
        [dims],
        [x.shape],
        blocked=frozenset() if added else frozenset(letters),
        sends=dict.fromkeys(letters, rows),
        run=run,
        when=lambda placed: placed.axes_of(placed.ins[0], over),
    )


@rule("local_response_norm")
def local_response_norm(x: Operand, *args: Any, **kwargs: Any) -> Spec | None:
    """x[b, c, s...] over neighbouring channels, which are whole."""
    if 0 in x.shape:
        return None  # given back as it is
    dims = x.dims()
    return Spec([dims], [dims], [x.shape], blocked=frozenset([dims[1]]), run=of_one, when=Placed.lacks)
