"""Losses: means over global counts; cross-entropy over a sharded vocabulary without its logits."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from espalier.comm import collectives as door
from espalier.layout import Layout, local_box
from espalier.tensor.rules.pointwise import found, letters
from espalier.tensor.rules.spec import DONE, Dims, Operand, Placed, Rules, Spec


def weighted_loss(input: Operand, target: Operand, *args: Any, **kwargs: Any) -> Spec | None:
    """As :func:`elementwise_loss`; with weights torch's own formula is entered, for its mean is another."""
    if kwargs.get("weight") is not None:
        return None
    return elementwise_loss(input, target, *args, **kwargs)


def elementwise_loss(input: Operand, target: Operand, *args: Any, **kwargs: Any) -> Spec | None:
    """Losses that compare element by element (bce, ...), reduced to mean, sum or not."""
    reduction = kwargs.get("reduction", next((a for a in args if a in ("mean", "sum", "none")), "mean"))
    if reduction not in ("mean", "sum", "none") or any(
        kwargs.get(k) is not None for k in ("size_average", "reduce")
    ):
        return None
    operands = found(input, target, args, kwargs)
    shape = tuple(torch.broadcast_shapes(*(o.shape for o in operands)))
    names: Dims = tuple(("d", i) for i in range(len(shape)))
    ins = [letters(o.shape, shape) for o in operands]
    if reduction == "none":
        return Spec(ins, [names], [shape])
    count = math.prod(shape)

    def run(func: Callable[..., Any], args: Any, kwargs: Any, placed: Placed) -> torch.Tensor:
        if reduction == "sum":
            return func(*args, **kwargs)
        args = tuple("sum" if a == "mean" else a for a in args) if "mean" in _words(args) else args
        total = func(*args, **({**kwargs, "reduction": "sum"} if "sum" not in _words(args) else kwargs))
        return total / count

    return Spec(ins, [()], [()], reduce=dict.fromkeys(names, "sum"), run=run)


def _words(args: tuple[Any, ...]) -> list[str]:
    return [a for a in args if isinstance(a, str)]


def cross_entropy(
    input: Operand,
    target: Operand,
    weight: Operand | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Spec | None:
    """input [n.., c, d..] or [c] with target of classes or of probabilities.

    The class dim may be sharded if there are neither weights, nor smoothing, nor probabilities.
    """
    if size_average is not None or reduce is not None or reduction not in ("mean", "sum", "none"):
        return None
    soft = target.shape == input.shape
    whole = soft or weight is not None or label_smoothing != 0
    return _of_classes(input, target, weight, reduction, None if whole else "c", soft, _cross_entropy)


def nll_loss(
    input: Operand,
    target: Operand,
    weight: Operand | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
) -> Spec | None:
    """nll_loss of log-probabilities whose classes are whole."""
    if size_average is not None or reduce is not None or reduction not in ("mean", "sum", "none"):
        return None
    return _of_classes(input, target, weight, reduction, None, False, _nll)


def _of_classes(
    input: Operand, target: Operand, weight: Operand | None, reduction: str, classes: str | None, soft: bool,
    run: Callable[..., Any],
) -> Spec:  # fmt: skip
    at = 0 if input.ndim == 1 else 1
    names: Dims = tuple(classes if i == at else ("n", i) for i in range(input.ndim))
    tokens: Dims = tuple(("n", i) for i in range(input.ndim) if i != at)
    ins: list[Dims] = [names, names if soft else tokens]
    if weight is not None:
        ins.append((None,))
    kept = reduction == "none"
    shape = tuple(n for i, n in enumerate(input.shape) if i != at)
    reduced: dict[Any, str] = {"c": DONE} if classes else {}
    if not kept:
        reduced |= dict.fromkeys(tokens, "sum")
    return Spec(ins, [tokens if kept else ()], [shape if kept else ()], reduce=reduced, run=run)


_SIGNATURE = inspect.signature(F.cross_entropy)
_NLL_SIGNATURE = inspect.signature(F.nll_loss)


def _cross_entropy(func: Callable[..., Any], args: Any, kwargs: Any, placed: Placed) -> torch.Tensor:
    bound = _SIGNATURE.bind(*args, **kwargs).arguments
    logits, target, reduction = bound["input"], bound["target"], bound.get("reduction", "mean")
    weight, ignored = bound.get("weight"), bound.get("ignore_index", -100)
    lay = placed.ins[0]
    at = 0 if lay.ndim == 1 else 1
    class_axes = placed.axes_of(lay, (at,))
    if class_axes:
        losses = _VocabularyParallel.apply(logits.movedim(at, -1), target, ignored, lay, at, class_axes)
        if reduction == "none":
            return losses
        total = losses.sum()
        return total if reduction == "sum" else total / _weight_of(target, ignored, weight, total, placed)
    if reduction != "mean" or not placed.axes_of(lay, range(lay.ndim)):
        return func(*args, **kwargs)
    total = F.cross_entropy(
        logits, target, weight, ignore_index=ignored, reduction="sum",
        label_smoothing=bound.get("label_smoothing", 0.0),
    )  # fmt: skip
    if placed.ins[1].shape == lay.shape:
        return total / (math.prod(lay.shape) // lay.shape[at])
    return total / _weight_of(target, ignored, weight, total, placed)


def _nll(func: Callable[..., Any], args: Any, kwargs: Any, placed: Placed) -> torch.Tensor:
    bound = _NLL_SIGNATURE.bind(*args, **kwargs).arguments
    if bound.get("reduction", "mean") != "mean" or not placed.axes_of(
        placed.ins[1], range(placed.ins[1].ndim)
    ):
        return func(*args, **kwargs)
    input, target, weight = bound["input"], bound["target"], bound.get("weight")
    ignored = bound.get("ignore_index", -100)
    total = F.nll_loss(input, target, weight, ignore_index=ignored, reduction="sum")
    return total / _weight_of(target, ignored, weight, total, placed)


def _weight_of(
    target: torch.Tensor, ignored: int, weight: torch.Tensor | None, like: torch.Tensor, placed: Placed
) -> torch.Tensor:
    """What a mean divides by: the number (or weights) of all tokens that count, on whatever rank."""
    valid = target != ignored
    counts = valid if weight is None else weight[target.masked_fill(~valid, 0)] * valid
    count = counts.sum(dtype=torch.float64 if like.dtype == torch.float64 else torch.float32)
    lay = placed.ins[1]
    for axis in placed.axes_of(lay, range(lay.ndim)):
        count = door.all_reduce(count, lay.mesh, axis)
    return count


class _VocabularyParallel(torch.autograd.Function):
    """-log softmax(logits)[target] with the classes sharded: three all-reduces of [tokens].

    Largest logit, sum of exponentials, target's logit (Shoeybi et al. 2019, Megatron-LM, section 3).
    Keeps the local softmax alone.
    """

    espalier = True

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, target: torch.Tensor, ignored: int, lay: Layout, at: int, axes: Any
    ) -> torch.Tensor:
        def reduced(x: torch.Tensor, op: str) -> torch.Tensor:
            for axis in axes:
                x = door.all_reduce(x, lay.mesh, axis, op)
            return x

        start, length = local_box(lay).offsets[at], logits.shape[-1]
        local = target - start
        mine = (local >= 0) & (local < length) & (target != ignored)
        if length:
            largest = reduced(logits.amax(-1), "max")
        else:
            largest = reduced(logits.new_full(target.shape, -math.inf), "max")
        shifted = logits - largest.unsqueeze(-1)
        index = local.masked_fill(~mine, 0).unsqueeze(-1)
        if length:
            hit = shifted.gather(-1, index).squeeze(-1).masked_fill(~mine, 0)
        else:
            hit = torch.zeros_like(largest)
        exps = shifted.exp_()
        total = reduced(exps.sum(-1), "sum")
        hit = reduced(hit, "sum")
        softmax = exps.div_(total.unsqueeze(-1))
        ctx.save_for_backward(softmax, index, mine, target != ignored)
        return (total.log() - hit).masked_fill(target == ignored, 0)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "create_graph=True through cross-entropy over sharded classes: its backward keeps only the "
                "softmax and has no second derivative. Redistribute the logits to Replicate() first."
            )
        softmax, index, mine, valid = ctx.saved_tensors
        scale = (grad * valid).unsqueeze(-1)
        out = softmax * scale
        if out.shape[-1]:
            out.scatter_add_(-1, index, -(scale * mine.unsqueeze(-1)))
        return out, None, None, None, None, None


def log_sum_exp(x: Operand, dim: Any, keepdim: bool = False) -> Spec | None:
    """logsumexp over a dim that may be sharded: an all-reduce of the maxima and one of the sums."""
    from espalier.tensor.rules.reduction import normal_dims, reduced

    dims = normal_dims(dim, x.ndim)
    out, shape = reduced(x, dims, keepdim)

    def run(func: Callable[..., Any], args: Any, kwargs: Any, placed: Placed) -> torch.Tensor:
        local = args[0] if args else kwargs["input"]
        axes = placed.axes_of(placed.ins[0], dims)
        if not axes:
            return func(*args, **kwargs)
        kept = [1 if d in dims else n for d, n in enumerate(local.shape)]
        empty = any(local.shape[d] == 0 for d in dims)
        top = local.new_full(kept, -math.inf) if empty else local.detach().amax(dims, keepdim=True)
        for axis in axes:
            top = door.all_reduce(top, placed.mesh, axis, "max")
        top = top.masked_fill(~top.isfinite(), 0)
        part = (local - top).exp().sum(dims, keepdim)
        return placed.total(part, axes).log() + (top if keepdim else top.squeeze(dims))

    # complex numbers have no maximum
    reduce = {} if x.dtype.is_complex else {("d", i): DONE for i in dims}
    return Spec([x.dims()], [out], [shape], reduce=reduce, run=run)


def register(rules: Rules) -> None:
    """Put the rules of this file into the table."""
    rules.add(F.cross_entropy, cross_entropy)
    rules.add(F.nll_loss, nll_loss)
    for weighted in (F.mse_loss, F.l1_loss, F.huber_loss):
        rules.add(weighted, weighted_loss)
    for f in (
        F.smooth_l1_loss,
        F.binary_cross_entropy,
        F.binary_cross_entropy_with_logits,
        F.soft_margin_loss,
    ):
        rules.add(f, elementwise_loss)
    rules.name("logsumexp", typed=True)(log_sum_exp)
