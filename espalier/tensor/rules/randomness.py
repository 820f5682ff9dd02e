"""Random functions: values by global element index (see ``espalier.tensor.random``)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from espalier.comm.control import looks
from espalier.comm.redistribute import as_addend
from espalier.layout import Layout
from espalier.layout.layout import R
from espalier.sharding.spec import (
    Dims,
    Operand,
    Placed,
    Spec,
    bound_to,
    composed_with,
    rule,
    rule_in_place,
    rule_with,
)
from espalier.tensor import fused_kernels
from espalier.tensor.random import draw_key, integers, kept, normal, uniform
from espalier.tensor.rules.pointwise import letters, operands_in


@rule(torch.nn.functional.dropout, torch.dropout, loose=True)
@rule_in_place(torch.dropout_, loose=True)
def dropout(input: Operand, p: float = 0.5, training: bool = True, inplace: bool = False) -> Spec:
    """The same mask under every layout."""
    dims = input.dims()
    # a product with the mask, so linear
    written = input.index if inplace is True else None
    return Spec([dims], [dims], [input.shape], linear=[(0,)], run=_drop, inplace=written)


_IDLE = "drops nothing"


def _drop(func: Callable[..., Any], args: Any, kwargs: Any, placed: Placed) -> torch.Tensor:
    if _IDLE in placed.notes:  # which are of calls alike in all but the tensor
        return args[0] if args else kwargs["input"]
    bound = bound_to(f"input p {'training' if func is not torch.dropout else 'train'} inplace", args, kwargs)
    x, p = bound["input"], bound.get("p", 0.5)
    if not 0 <= p <= 1:
        raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")
    if not bound.get("training", bound.get("train", True)) or p == 0:
        placed.notes[_IDLE] = True
        return x
    return dropped(x, placed, p, bool(bound.get("inplace")) or func is torch.dropout_)


def dropped(x: torch.Tensor, placed: Placed, p: float, inplace: bool = False) -> torch.Tensor:
    """``x``, which lies as the first output, times :func:`keep_mask`; saved for backward as one byte each.

    Where there is a kernel of our own for it nothing is saved but the key.
    """
    if p == 1:
        mask, scale = x.new_zeros(x.shape, dtype=torch.bool), 1.0
    else:
        key = draw_key(placed.mesh)
        by_kernel = fused_kernels.dropped(x, placed.outs[0], key, p, inplace)
        if by_kernel is not None:
            return by_kernel
        mask, scale = kept(placed.outs[0], key, p, x.device), 1 / (1 - p)
    return (x.mul_(mask) if inplace else x * mask).mul_(scale)


def keep_mask(placed: Placed, p: float, like: torch.Tensor) -> torch.Tensor:
    """1/(1-p) with probability 1-p, else 0, for each element of the first output."""
    if p == 1:
        return torch.zeros_like(like)
    lay = placed.outs[0]
    return kept(lay, draw_key(placed.mesh), p, like.device).to(like.dtype).div_(1 - p)


def _features(placed: Placed) -> Placed:
    """One value for each sample and channel of the first output."""
    lay = placed.outs[0]
    axes = tuple(R if isinstance(s, int) and s > 1 else s for s in lay.axes)
    cuts = tuple(cut if d < 2 else () for d, cut in enumerate(lay.cuts))
    few = Layout.of(lay.mesh, axes, cuts, tuple(n if d < 2 else 1 for d, n in enumerate(lay.shape)))
    return Placed(placed.mesh, placed.ins, (few,))


@rule_with(torch.feature_dropout, True, False)
@rule_with(torch.alpha_dropout, False, True)
@rule_with(torch.feature_alpha_dropout, True, True)
def _dropping(features: bool, alpha: bool) -> Callable[..., Spec]:
    """The forms that drop whole channels, or keep mean and variance (Klambauer et al., 2017)."""

    def run(func: Callable[..., Any], args: Any, kwargs: Any, placed: Placed) -> torch.Tensor:
        bound = bound_to("input p train", args, kwargs)
        x, p = bound["input"], bound["p"]
        if not bound["train"] or not 0 < p < 1:
            return func(*args, **kwargs)
        noted = _features(placed) if features else placed
        mask = keep_mask(noted, p, x.new_empty(noted.outs[0].local_shape))
        if not alpha:
            return x * mask
        ones, low = mask * (1 - p), -1.7580993408473766  # what SELU tends to, far below zero
        scale = 1 / math.sqrt((low * low * p + 1) * (1 - p))
        shift = (1 - ones - p) * (low * scale)
        return x * (ones * scale) + shift

    def rule(input: Operand, p: float, train: bool) -> Spec:
        dims = input.dims()
        linear = [] if alpha and train and 0 < p < 1 else [(0,)]
        return Spec([dims], [dims], [input.shape], linear=linear, run=run)

    return rule


@rule(torch.rrelu)
def rrelu(
    input: Operand, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, generator: Any = None
) -> Spec:
    """What is below zero is multiplied by slopes that are the same under every layout."""

    def run(func: Callable[..., Any], args: Any, kwargs: Any, placed: Placed) -> torch.Tensor:
        bound = bound_to("input lower upper training generator", args, kwargs)
        x = bound["input"]
        if not bound.get("training", False):
            return func(*args, **kwargs)
        low, high = bound.get("lower", 1 / 8), bound.get("upper", 1 / 3)
        func(x.new_empty(0), low, high, True)  # torch's own word on the slopes
        drawn = uniform(placed.outs[0], draw_key(placed.mesh, bound.get("generator")), x.dtype, x.device)
        slopes = torch.where(x.detach() <= 0, drawn * (high - low) + low, 1)
        return x * slopes

    return Spec([input.dims()], [input.dims()], [input.shape], run=run)


@composed_with(torch.feature_dropout_, torch.feature_dropout)
@composed_with(torch.alpha_dropout_, torch.alpha_dropout)
@composed_with(torch.feature_alpha_dropout_, torch.feature_alpha_dropout)
@composed_with(torch.rrelu_, torch.rrelu)
def _written(func: Callable[..., Any]) -> Callable[..., Any]:
    def body(input: Any, *args: Any, **kwargs: Any) -> Any:
        return input.copy_(func(input, *args, **kwargs))

    return body


def letters_of_all(operands: list[Operand]) -> list[Dims]:
    """Letters of operands that are broadcast to the first."""
    return [letters(o.shape, operands[0].shape) for o in operands]


def _filler(draw: Callable[..., torch.Tensor]) -> Callable[..., Spec]:
    """An in-place random function: operand 0 takes the values."""

    def rule(x: Operand, *args: Any, **kwargs: Any) -> Spec:
        others = operands_in(args, kwargs)

        def run(func: Callable[..., Any], args: Any, kwargs: Any, placed: Placed) -> torch.Tensor:
            if not others:
                func(args[0].new_empty(0), *args[1:], **kwargs)  # torch's own word on the parameters
            drawn = draw(placed, args[0], *args[1:], **kwargs)
            return args[0].copy_(as_addend(drawn, placed.outs[0]))

        full = letters_of_all([x, *others])
        return Spec(full, full[:1], [x.shape], linear=[(0,)], run=run, inplace=x.index)

    return rule


def _wide(drawn: torch.Tensor) -> torch.Tensor:
    """What is drawn, in a precision in which the CPU and devices round what is done to it alike."""
    return drawn.float() if drawn.element_size() < 4 else drawn


@rule(torch.Tensor.uniform_)
@_filler
def _uniform(
    placed: Placed, x: torch.Tensor, a: float = 0.0, b: float = 1.0, *, generator: Any = None, **kw: Any
) -> torch.Tensor:
    a, b = kw.get("from", a), kw.get("to", b)
    return _wide(uniform(placed.outs[0], draw_key(placed.mesh, generator), x.dtype, x.device)) * (b - a) + a


@rule(torch.Tensor.normal_)
@_filler
def _normal(
    placed: Placed, x: torch.Tensor, mean: float = 0.0, std: float = 1.0, *, generator: Any = None
) -> torch.Tensor:
    return _wide(normal(placed.outs[0], draw_key(placed.mesh, generator), x.dtype, x.device)) * std + mean


@rule(torch.Tensor.bernoulli_)
@_filler
def _bernoulli(placed: Placed, x: torch.Tensor, p: Any = 0.5, *, generator: Any = None) -> torch.Tensor:
    return uniform(placed.outs[0], draw_key(placed.mesh, generator), torch.float32, x.device) < p


@rule(torch.Tensor.random_)
@_filler
def _integers(
    placed: Placed, x: torch.Tensor, low: int = 0, high: int | None = None, *, generator: Any = None
) -> torch.Tensor:
    if high is None:
        low, high = (0, low) if low else (0, 2**24 if x.is_floating_point() else torch.iinfo(x.dtype).max)
    return integers(placed.outs[0], draw_key(placed.mesh, generator), low, high, x.device)


@rule(torch.Tensor.exponential_)
@_filler
def _exponential(
    placed: Placed, x: torch.Tensor, lambd: float = 1.0, *, generator: Any = None
) -> torch.Tensor:
    drawn = _wide(uniform(placed.outs[0], draw_key(placed.mesh, generator), x.dtype, x.device))
    return -torch.log1p(-drawn) / lambd


@rule(torch.Tensor.geometric_)
@_filler
def _geometric(placed: Placed, x: torch.Tensor, p: float, *, generator: Any = None) -> torch.Tensor:
    drawn = uniform(placed.outs[0], draw_key(placed.mesh, generator), torch.float64, x.device)
    return torch.log1p(-drawn).div_(math.log1p(-p)).ceil_().clamp_min_(1)


@rule(torch.Tensor.cauchy_)
@_filler
def _cauchy(
    placed: Placed, x: torch.Tensor, median: float = 0.0, sigma: float = 1.0, *, generator: Any = None
) -> torch.Tensor:
    drawn = _wide(uniform(placed.outs[0], draw_key(placed.mesh, generator), x.dtype, x.device))
    return drawn.sub_(0.5).mul_(math.pi).tan_() * sigma + median


@rule(torch.Tensor.log_normal_)
@_filler
def _log_normal(
    placed: Placed, x: torch.Tensor, mean: float = 1.0, std: float = 2.0, *, generator: Any = None
) -> torch.Tensor:
    drawn = _wide(normal(placed.outs[0], draw_key(placed.mesh, generator), x.dtype, x.device))
    return (drawn * std + mean).exp_()


@rule_with(torch.rand_like, uniform)
@rule_with(torch.randn_like, normal)
def _like(draw: Callable[..., torch.Tensor]) -> Callable[..., Spec]:
    """rand_like and randn_like: a new tensor that lies as the given one."""

    def rule(x: Operand, **kwargs: Any) -> Spec:
        def run(func: Callable[..., Any], args: Any, kwargs: Any, placed: Placed) -> torch.Tensor:
            x, generator = args[0], kwargs.get("generator")
            dtype, device = kwargs.get("dtype") or x.dtype, kwargs.get("device") or x.device
            out = draw(placed.outs[0], draw_key(placed.mesh, generator), dtype, torch.device(device))
            return out.requires_grad_(kwargs.get("requires_grad", False))

        return Spec([x.dims()], [x.dims()], [x.shape], run=run)

    return rule


@rule(torch.randint_like)
def randint_like(x: Operand, *bounds: Any, **kwargs: Any) -> Spec:
    """Whole numbers, which lie as the given tensor."""

    def run(func: Callable[..., Any], args: Any, kwargs: Any, placed: Placed) -> torch.Tensor:
        x, *bounds = args
        func(x.new_empty(0), *bounds, **kwargs)  # torch's own word on the bounds
        names = "low high" if len(bounds) > 1 or "high" in kwargs else "high"
        bound = bound_to(names, tuple(bounds), kwargs)
        low, high = bound.get("low", 0), bound["high"]
        device = torch.device(kwargs.get("device") or x.device)
        drawn = integers(placed.outs[0], draw_key(placed.mesh, kwargs.get("generator")), low, high, device)
        return drawn.to(kwargs.get("dtype") or x.dtype).requires_grad_(kwargs.get("requires_grad", False))

    return Spec([x.dims()], [x.dims()], [x.shape], run=run)


def _flat(drawn: torch.Tensor, *inputs: Any) -> torch.Tensor:
    """The values, whose gradient is zero."""
    for x in inputs:
        if isinstance(x, torch.Tensor) and x.requires_grad:
            drawn = torch.where(x.new_zeros((), dtype=torch.bool), x, drawn)
    return drawn


@rule("bernoulli")
def bernoulli(x: Operand, p: Any = None, *, generator: Any = None, out: Any = None) -> Spec | None:
    """Each element is the probability of its own 1, or p is that of all."""
    if out is not None:
        return None

    def run(func: Callable[..., Any], args: Any, kwargs: Any, placed: Placed) -> torch.Tensor:
        x, p = args[0], args[1] if len(args) > 1 else kwargs.get("p")
        key = draw_key(placed.mesh, kwargs.get("generator"))
        if x.device.type != "meta":  # torch's own word on it, from a generator that nobody else draws from
            aside = torch.Generator(x.device)
            func(*((x.new_empty(0), p) if p is not None else (x.detach(),)), generator=aside)
        drawn = uniform(placed.outs[0], key, torch.float32, x.device)
        return _flat((drawn < (x if p is None else p)).to(x.dtype), x)

    return Spec([x.dims()], [x.dims()], [x.shape], run=run, fails=(0,) if p is None else ())


@rule(torch.normal)
def normal_of(mean: Any, std: Any = 1.0, *, generator: Any = None, out: Any = None) -> Spec | None:
    """torch.normal: each element has a mean and a deviation of its own."""
    operands = operands_in((mean, std), {})
    if out is not None or not operands:
        return None
    shape = tuple(torch.broadcast_shapes(*(x.shape for x in operands)))

    def run(func: Callable[..., Any], args: Any, kwargs: Any, placed: Placed) -> torch.Tensor:
        bound = {"std": 1.0} | bound_to("mean std", args, kwargs)
        both = [x for x in (bound["mean"], bound["std"]) if isinstance(x, torch.Tensor)]
        mean, std = (x.detach() if isinstance(x, torch.Tensor) else x for x in (bound["mean"], bound["std"]))
        dtype = both[0].dtype
        drawn = normal(placed.outs[0], draw_key(placed.mesh, bound.get("generator")), dtype, both[0].device)
        if not drawn.is_meta and (torch.as_tensor(std) < 0).any():
            raise RuntimeError("normal expects all elements of std >= 0.0")
        return _flat(drawn * std + mean, *both)

    dims = [letters(x.shape, shape) for x in operands]
    return Spec(dims, [letters(shape, shape)], [shape], run=run, fails=range(len(operands)))


@rule(torch.poisson)
def poisson(input: Operand, generator: Any = None) -> Spec:
    """Each element is the mean of its own count: the least k whose distribution function reaches a uniform
    value, found by halving."""

    def run(func: Callable[..., Any], args: Any, kwargs: Any, placed: Placed) -> torch.Tensor:
        rate, generator = args[0].detach(), args[1] if len(args) > 1 else kwargs.get("generator")
        key, wide = draw_key(placed.mesh, generator), rate.double()
        few = rate[rate < 0] if looks(placed.mesh) else rate.reshape(-1)[:0]
        func(few[:1])  # torch's own word on it
        drawn = uniform(placed.outs[0], key, torch.float64, rate.device)
        low, high = torch.full_like(wide, -1), (wide + 20 * wide.sqrt() + 60).ceil_()
        for _ in range(64 if rate.numel() else 0):
            middle = ((low + high) / 2).floor_()
            enough = torch.special.gammaincc(middle + 1, wide) > drawn
            low, high = torch.where(enough, low, middle), torch.where(enough, middle, high)
        return _flat(high.to(rate.dtype), args[0])

    return Spec([input.dims()], [input.dims()], [input.shape], run=run, fails=(0,))


@rule("multinomial")
def multinomial(
    input: Operand, num_samples: int, replacement: bool = False, *, generator: Any = None, out: Any = None
) -> Spec | None:
    """Samples of each row; its weights lie together."""
    if out is not None:
        return None

    def run(func: Callable[..., Any], args: Any, kwargs: Any, placed: Placed) -> torch.Tensor:
        bound = bound_to("input num_samples replacement", args, kwargs)
        x, count, again = bound["input"].detach(), bound["num_samples"], bound.get("replacement", False)
        key, wide = draw_key(placed.mesh, bound.get("generator")), x.double()
        if not x.is_meta:  # torch's own word on it, from a generator that nobody else draws from
            func(x, count, again, generator=torch.Generator(x.device))
        if again:
            sums = wide.cumsum(-1)
            drawn = uniform(placed.outs[0], key, torch.float64, x.device)
            return torch.searchsorted(sums, drawn * sums[..., -1:], right=True)
        # waiting times at these rates: those who come first (Efraimidis and Spirakis, 2006)
        drawn = uniform(placed.ins[0], key, torch.float64, x.device)
        times = torch.where(wide > 0, -torch.log1p(-drawn) / wide, torch.inf)
        return times.topk(count, -1, largest=False).indices

    dims = (*input.dims()[:-1], None)
    return Spec([dims], [dims], [(*input.shape[:-1], num_samples)], run=run, fails=(0,))
