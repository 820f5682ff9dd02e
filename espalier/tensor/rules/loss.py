"""Losses: means over global counts; cross-entropy over a sharded vocabulary without its logits."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from espalier.comm import collectives as door
from espalier.comm import move
from espalier.layout import Layout, local_box
from espalier.layout.layout import R
from espalier.tensor.rules.pointwise import found, letters
from espalier.tensor.rules.spec import DONE, Dims, Operand, Placed, Rules, Spec


def elementwise_loss(input: Operand, target: Operand, *args: Any, **kwargs: Any) -> Spec | None:
    """Losses that compare element by element (mse, l1, bce, ...), reduced to mean, sum or not."""
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
            return func(*args, **kwargs)  # type: ignore[no-any-return]
        args = tuple("sum" if a == "mean" else a for a in args) if "mean" in _words(args) else args
        total = func(*args, **({**kwargs, "reduction": "sum"} if "sum" not in _words(args) else kwargs))
        return total / count  # type: ignore[no-any-return]

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
    """input [n.., c, d..] or [c] with target of classes; the class dim may be sharded."""
    if size_average is not None or reduce is not None or reduction not in ("mean", "sum", "none"):
        return None
    if target.shape == input.shape:  # probabilities
        return None
    at = 0 if input.ndim == 1 else 1
    names: Dims = tuple("c" if i == at else ("n", i) for i in range(input.ndim))
    tokens = tuple(n for n in names if n != "c")
    ins: list[Dims] = [names, tokens]
    if weight is not None:
        ins.append((None,))
    special = weight is not None or label_smoothing != 0
    shape = target.shape if reduction == "none" else ()
    out = tokens if reduction == "none" else ()
    reduced: dict[Any, str] = {"c": DONE} if not special else {}
    if reduction != "none":
        reduced |= dict.fromkeys(tokens, "sum")
    return Spec(
        ins,
        [out],
        [shape],
        reduce=reduced,
        blocked=frozenset(["c"]) if special else frozenset(),
        run=_cross_entropy,
    )


_SIGNATURE = inspect.signature(F.cross_entropy)


def _cross_entropy(func: Callable[..., Any], args: Any, kwargs: Any, placed: Placed) -> torch.Tensor:
    bound = _SIGNATURE.bind(*args, **kwargs).arguments
    logits, target, reduction = bound["input"], bound["target"], bound.get("reduction", "mean")
    weight, ignored = bound.get("weight"), bound.get("ignore_index", -100)
    lay = placed.ins[0]
    at = 0 if lay.ndim == 1 else 1
    class_axes = placed.axes_of(lay, (at,))
    token_axes = placed.axes_of(lay, [i for i in range(lay.ndim) if i != at])
    if class_axes:
        losses = _VocabularyParallel.apply(logits.movedim(at, -1), target, ignored, lay, at, class_axes)  # type: ignore[no-untyped-call]
    elif not token_axes or reduction != "mean":
        return func(*args, **kwargs)  # type: ignore[no-any-return]
    else:
        losses = F.cross_entropy(
            logits, target, weight, ignore_index=ignored, reduction="none",
            label_smoothing=bound.get("label_smoothing", 0.0),
        )  # fmt: skip
    if reduction == "none":
        return losses  # type: ignore[no-any-return]
    if reduction == "sum":
        return losses.sum()  # type: ignore[no-any-return]
    valid = target != ignored
    counts = valid if weight is None else weight[target.masked_fill(~valid, 0)] * valid
    # each rank's share of the global count: a sum over the axes that cut the tokens
    count = counts.sum(dtype=torch.float64 if logits.dtype == torch.float64 else torch.float32)
    for axis in token_axes:
        count = door.all_reduce(count, lay.mesh, axis)
    return losses.sum() / count  # type: ignore[no-any-return]


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
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        softmax, index, mine, valid = ctx.saved_tensors
        scale = (grad * valid).unsqueeze(-1)
        out = softmax * scale
        if out.shape[-1]:
            out.scatter_add_(-1, index, -(scale * mine.unsqueeze(-1)))
        return out, None, None, None, None, None


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
    if size_average is not None or reduce is not None or weight is not None:
        return None
    at = 0 if input.ndim == 1 else 1
    names: Dims = tuple(None if i == at else ("n", i) for i in range(input.ndim))
    tokens = tuple(n for n in names if n is not None)
    if reduction == "none":
        return Spec([names, tokens], [tokens], [target.shape])
    axes_run = _nll_mean if reduction == "mean" else None
    return Spec([names, tokens], [()], [()], reduce=dict.fromkeys(tokens, "sum"), run=axes_run)


def _nll_mean(func: Callable[..., Any], args: Any, kwargs: Any, placed: Placed) -> torch.Tensor:
    bound = inspect.signature(F.nll_loss).bind(*args, **kwargs).arguments
    input, target, ignored = bound["input"], bound["target"], bound.get("ignore_index", -100)
    lay = placed.ins[1]
    total = F.nll_loss(input, target, ignore_index=ignored, reduction="sum")
    count = (target != ignored).sum().to(total.dtype)
    for axis in placed.axes_of(lay, range(lay.ndim)):
        count = door.all_reduce(count, lay.mesh, axis)
    return total / count


def log_sum_exp(x: Operand, dim: Any, keepdim: bool = False) -> Spec | None:
    """logsumexp over a dim that may be sharded: an all-reduce of the maxima and one of the sums."""
    from espalier.tensor.rules.reduction import normal_dims, reduced

    dims = normal_dims(dim, x.ndim)
    out, shape = reduced(x, dims, keepdim)

    def run(func: Callable[..., Any], args: Any, kwargs: Any, placed: Placed) -> torch.Tensor:
        local = args[0] if args else kwargs["input"]
        axes = placed.axes_of(placed.ins[0], dims)
        if not axes or 0 in local.shape:
            assert not axes, "empty shards of a reduced dim are gathered by the rule"
            return torch.logsumexp(local, dims, keepdim)
        top = local.detach().amax(dims, keepdim=True)
        for axis in axes:
            top = door.all_reduce(top, placed.mesh, axis, "max")
        top = top.masked_fill(~top.isfinite(), 0)
        part = (local - top).exp().sum(dims, keepdim)
        lay = placed.outs[0]
        partial = Layout.of(
            lay.mesh, tuple("sum" if a in axes else s for a, s in enumerate(lay.axes)), lay.cuts, lay.shape
        )
        done = Layout.of(
            lay.mesh, tuple(R if a in axes else s for a, s in enumerate(lay.axes)), lay.cuts, lay.shape
        )
        return move(part, partial, done).log() + (top if keepdim else top.squeeze(dims))

    empty = any(
        x.layout.shape[d] < math.prod(x.layout.mesh.shape[a] for a in x.layout.cuts[d]) for d in dims
    )
    reduce = {} if empty else {("d", i): DONE for i in dims}
    blocked = frozenset(("d", i) for i in dims) if empty else frozenset()
    return Spec([x.dims()], [out], [shape], reduce=reduce, blocked=blocked, run=run)


def register(rules: Rules) -> None:
    """Put the rules of this file into the table."""
    rules.add(F.cross_entropy, cross_entropy)
    rules.add(F.nll_loss, nll_loss)
    for f in (
        F.mse_loss,
        F.l1_loss,
        F.smooth_l1_loss,
        F.huber_loss,
        F.binary_cross_entropy,
        F.binary_cross_entropy_with_logits,
        F.soft_margin_loss,
    ):
        rules.add(f, elementwise_loss)
    rules.name("logsumexp")(log_sum_exp)
