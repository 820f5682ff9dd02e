"""Losses: means over global counts; cross-entropy over a sharded vocabulary without its logits."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F

from espalier.comm import collectives
from espalier.comm.control import REFUSALS, agree, looks
from espalier.comm.custom_ops import recorders
from espalier.comm.functions import MeetingFunction
from espalier.comm.redistribute import deferred, summed
from espalier.layout import Layout, local_box
from espalier.sharding.spec import DONE, Dims, Operand, Placed, Spec, bound_to, of_nothing, rule, rule_with
from espalier.tensor.rules.joint_failure import CountKind, TargetCount, counted, counts_ahead, within
from espalier.tensor.rules.pointwise import letters, operands_in

# where a list is, means over tokens put there what they divide by, the same on all ranks; of nothing they
# are then zero, and no NaN
divisors: ContextVar[list[torch.Tensor] | None] = ContextVar("divisors", default=None)


@rule(F.mse_loss, F.l1_loss)
def weighted_loss(input: Operand, target: Operand, *args: Any, **kwargs: Any) -> Spec | None:
    """As :func:`elementwise_loss`; with weights torch's own formula is entered, for its mean is another."""
    if kwargs.get("weight") is not None:
        return None
    return elementwise_loss(input, target, *args, **kwargs)


def reduction_of(args: Any, kwargs: Any) -> str | None:
    """What a loss makes of its elements; None where the words say it that were there before ``reduction``."""
    if any(kwargs.get(k) is not None for k in ("size_average", "reduce")):
        return None
    said: str = kwargs.get("reduction", next((a for a in args if isinstance(a, str)), "mean"))
    return said


@rule(
    F.smooth_l1_loss,
    F.huber_loss,  # whose mean is not divided by weights
    F.binary_cross_entropy_with_logits,
    F.soft_margin_loss,
    F.kl_div,
    F.poisson_nll_loss,
    F.hinge_embedding_loss,
    F.margin_ranking_loss,
)
def elementwise_loss(input: Operand, target: Operand, *args: Any, **kwargs: Any) -> Spec | None:
    """Losses that compare element by element (bce, ...), reduced to mean, sum or not."""
    reduction = reduction_of(args, kwargs)
    if reduction is None:
        return None
    operands = operands_in(input, target, args, kwargs)
    shape = tuple(torch.broadcast_shapes(*(o.shape for o in operands)))
    names: Dims = tuple(("d", i) for i in range(len(shape)))
    ins = [letters(o.shape, shape) for o in operands]
    if reduction == "none":
        return Spec(ins, [names], [shape])
    count = {"mean": math.prod(shape), "batchmean": operands[0].shape[0] if shape else 1}.get(reduction)

    def run(func: Callable[..., Any], args: Any, kwargs: Any, placed: Placed) -> torch.Tensor:
        if count is None:
            return func(*args, **kwargs)
        return _summing(func, args, kwargs) / count

    return Spec(ins, [()], [()], reduce=dict.fromkeys(names, "sum"), run=run)


@rule(F.binary_cross_entropy)
def probability_loss(input: Operand, target: Operand, *args: Any, **kwargs: Any) -> Spec | None:
    """binary_cross_entropy, which refuses what is no probability."""
    spec = elementwise_loss(input, target, *args, **kwargs)
    if spec is not None:
        spec.fails = (0, 1)
    return spec


def _summing(func: Callable[..., Any], args: Any, kwargs: Any) -> torch.Tensor:
    """The call with its reduction, the only word among the arguments, a sum."""
    if any(isinstance(a, str) for a in args):
        return func(*("sum" if isinstance(a, str) else a for a in args), **kwargs)
    return func(*args, **{**kwargs, "reduction": "sum"})


@rule(F.cross_entropy)
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
    """input [n.., c, d..] or [c] with target of classes or of probabilities; every dim may be sharded."""
    if size_average is not None or reduce is not None or reduction not in ("mean", "sum", "none"):
        return None
    soft = target.shape == input.shape
    return _of_classes(input, weight, reduction, "c", soft, _cross_entropy)


@rule(F.nll_loss)
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
    return _of_classes(input, weight, reduction, None, False, _nll)


def _of_classes(
    input: Operand, weight: Operand | None, reduction: str, classes: str | None, soft: bool,
    run: Callable[..., Any],
) -> Spec:  # fmt: skip
    at = 0 if input.ndim == 1 else 1
    names: Dims = tuple(classes if i == at else ("n", i) for i in range(input.ndim))
    tokens: Dims = tuple(("n", i) for i in range(input.ndim) if i != at)
    ins: list[Dims] = [names, names if soft else tokens]
    if weight is not None:
        ins.append((classes,))
    kept = reduction == "none"
    shape = tuple(n for i, n in enumerate(input.shape) if i != at)
    reduced: dict[Any, str] = {"c": DONE} if classes else {}
    if not kept:
        reduced |= dict.fromkeys(tokens, "sum")
    # a mean agrees on it by the sum that it divides by
    fails = () if soft or reduction == "mean" else (1,)
    return Spec(ins, [tokens if kept else ()], [shape if kept else ()], reduce=reduced, run=run, fails=fails)


_NAMES = "input target weight size_average ignore_index reduce reduction label_smoothing"

# losses over classes, and the names of what they are given by place
OF_CLASSES: dict[Callable[..., Any], str] = {F.cross_entropy: _NAMES, F.nll_loss: _NAMES}
if hasattr(F, "linear_cross_entropy"):  # from torch 2.13 on
    OF_CLASSES[F.linear_cross_entropy] = "input linear_weight target"


def _cross_entropy(func: Callable[..., Any], args: Any, kwargs: Any, placed: Placed) -> torch.Tensor:
    bound = bound_to(_NAMES, args, kwargs)
    logits, target, reduction = bound["input"], bound["target"], bound.get("reduction", "mean")
    weight, ignored = bound.get("weight"), bound.get("ignore_index", -100)
    lay = placed.ins[0]
    at = 0 if lay.ndim == 1 else 1
    class_axes = placed.axes_of(lay, (at,))
    smoothing = bound.get("label_smoothing", 0.0)
    soft = placed.ins[1].shape == lay.shape
    if class_axes and (soft or smoothing or weight is not None):
        if not soft:
            _agree_on(target, ignored, placed, at)
        part, divisor = _shares(logits, target, weight, ignored, smoothing, placed, at, class_axes)
        total = placed.total(part if reduction == "none" else part.sum(), class_axes)
        return _by(total, divisor) if reduction == "mean" else total
    if class_axes:
        rows = logits if at == lay.ndim - 1 else logits.movedim(at, -1)

        def losses() -> torch.Tensor:
            none_ignored = in_range(target, ignored, lay, at)
            return _parallel(rows, target, None if none_ignored else ignored, lay, at, class_axes)[0]

        if reduction != "mean":
            return losses() if reduction == "none" else losses().sum()
        return mean_of(
            lambda: losses().sum(), logits.dtype, target, ignored, None, lay.shape[at], placed.ins[1]
        )
    if reduction != "mean" or not (placed.axes_of(lay, range(lay.ndim)) or divisors.get() is not None):
        return func(*args, **kwargs)

    def total_loss() -> torch.Tensor:
        return F.cross_entropy(
            logits, target, weight, ignore_index=ignored, reduction="sum", label_smoothing=smoothing
        )

    if soft:
        return total_loss() / (math.prod(lay.shape) // lay.shape[at])
    return mean_of(total_loss, logits.dtype, target, ignored, weight, lay.shape[at], placed.ins[1])


def _nll(func: Callable[..., Any], args: Any, kwargs: Any, placed: Placed) -> torch.Tensor:
    bound = bound_to(_NAMES, args, kwargs)
    cut = placed.axes_of(placed.ins[1], range(placed.ins[1].ndim))
    if bound.get("reduction", "mean") != "mean" or not (cut or divisors.get() is not None):
        return func(*args, **kwargs)
    input, target, weight = bound["input"], bound["target"], bound.get("weight")
    ignored, shape = bound.get("ignore_index", -100), placed.ins[0].shape
    return mean_of(
        lambda: F.nll_loss(input, target, weight, ignore_index=ignored, reduction="sum"),
        input.dtype, target, ignored, weight, shape[0 if len(shape) == 1 else 1], placed.ins[1],
    )  # fmt: skip


def mean_of(
    total: Callable[[], torch.Tensor], dtype: torch.dtype, target: torch.Tensor, ignored: int,
    weight: torch.Tensor | None, classes: int, lay: Layout,
) -> torch.Tensor:  # fmt: skip
    """``total()`` by the number (or weights) of all tokens that count, on whatever rank.

    Where some rank's targets, which lie as ``lay``, make it fail it fails on all: such a rank counts NaN.
    """
    axes = tuple(a for cut in lay.cuts for a in cut if lay.mesh.shape[a] > 1)
    kind = CountKind(ignored, classes, _exact(dtype), axes)
    known = counts_ahead.get()
    count = known.find(target, kind) if known is not None and weight is None else None
    if count is None:
        count = TargetCount(target, kind, lay.mesh, weight)
    try:
        value = total()
    except REFUSALS as error:
        count.refuse(error)
    return _by(value, count.wait())


def mean_alone(func: Callable[..., Any], args: Any, kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """A mean of a loss over classes, as of DTensors on one rank, and what it divides by."""
    bound = {**bound_to(OF_CLASSES[func], args, kwargs), "reduction": "sum"}
    input, target, ignored = bound["input"], bound["target"], bound.get("ignore_index")
    ignored = -100 if ignored is None else ignored
    divisor = counted(target, ignored, _exact(input.dtype), bound.get("weight"))
    return func(**bound) / _of_some(divisor), divisor


def _exact(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _by(total: torch.Tensor, divisor: Any) -> torch.Tensor:
    number = divisors.get()
    if number is None or not isinstance(divisor, torch.Tensor):
        return total / divisor
    number.append(divisor)
    return total / _of_some(divisor)


def _of_some(divisor: torch.Tensor) -> torch.Tensor:
    """A divisor under which the mean of nothing is zero, and no NaN."""
    return torch.where(divisor == 0, 1, divisor)


def in_range(target: torch.Tensor, ignored: int, lay: Layout, at: int) -> bool:
    """Look for targets that are no classes of logits whose classes are sharded: see :func:`within`."""
    n = lay.shape[at]

    def ask(i: int) -> torch.Tensor:
        return F.nll_loss(torch.empty(()).expand(1, n), torch.tensor([i]))

    return within(target, n, lay.mesh, ask, but=ignored)


def _agree_on(target: torch.Tensor, ignored: int, placed: Placed, at: int) -> None:
    """:func:`in_range` on all ranks, before the first of several collectives."""
    lay, met = placed.ins[1], None
    try:
        in_range(target, ignored, placed.ins[0], at)
    except REFUSALS as error:
        met = error
    if looks(lay.mesh):
        agree(met, lay.mesh, placed.axes_of(lay, range(lay.ndim)))


def softmaxed(
    logits: torch.Tensor, target: torch.Tensor, ignored: int | None, lay: Layout, at: int, axes: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Of local ``logits`` [.., classes], whose classes lie along dim ``at`` of ``lay``, cut by ``axes``.

    Returns:
        each row's loss; the derivative of it, the softmax less one at the target; where its target would
        be here, and less how much it is here; which rows don't count, if any may not.
    """

    def reduced(x: torch.Tensor, op: str) -> torch.Tensor:
        # in place, for x is our own; a NaN that a maximum loses comes back in the sum
        for axis in axes:
            collectives.all_reduce_(x, lay.mesh, axis, op).wait()
        return x

    start, length = local_box(lay).offsets[at], logits.shape[-1]
    dead = None if ignored is None else target == ignored
    local = target - start if start else target
    inside = local.clamp(0, max(length - 1, 0))
    elsewhere, index = local != inside, inside.unsqueeze(-1)
    largest = logits.amax(-1) if length else logits.new_full(target.shape, -math.inf)
    if largest.dtype in (torch.float16, torch.bfloat16):
        # not every backend finds the largest of these
        largest = reduced(largest.float(), "max").to(logits.dtype)
    else:
        largest = reduced(largest, "max")
    slope = logits - largest.unsqueeze(-1)
    if length:
        hit = slope.gather(-1, index).squeeze(-1).masked_fill_(elsewhere, 0)
    else:
        hit = torch.zeros_like(largest)
    slope.exp_()
    total, hit = reduced(torch.stack((slope.sum(-1), hit)), "sum")
    slope.div_(total.unsqueeze(-1))
    minus = elsewhere.to(slope.dtype).sub_(1).unsqueeze(-1)
    if length:
        slope.scatter_add_(-1, index, minus)
    losses = total.log().sub_(hit)
    return losses if dead is None else losses.masked_fill_(dead, 0), slope, index, minus, dead


class _VocabularyParallel(MeetingFunction):
    """-log softmax(logits)[target] with the classes sharded: two all-reduces, of [tokens] and [2, tokens].

    Largest logit, sum of exponentials, target's logit (Shoeybi et al. 2019, Megatron-LM, section 3).
    Keeps one tensor of the logits' size, its second output: the derivative of each loss, the softmax less
    one at the target.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, target: torch.Tensor, ignored: int | None, lay: Layout, at: int,
        axes: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        losses, slope, index, minus, dead = softmaxed(logits, target, ignored, lay, at, axes)
        ctx.save_for_backward(slope, index, minus, dead)
        ctx.set_materialize_grads(False)
        ctx.across = lay.mesh, axes
        return losses, slope

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None, of_slope: torch.Tensor | None) -> Any:
        # in terms of an output, and of what can be differentiated: so for every order
        slope, index, minus, dead = ctx.saved_tensors
        mesh, axes = ctx.across
        out = None
        if grad is not None:
            # each rank uses it for its own classes, which only its own derivative has to know
            grad = deferred(grad, mesh, axes) if torch.is_grad_enabled() else grad
            out = slope * (grad if dead is None else grad.masked_fill(dead, 0)).unsqueeze(-1)
        if of_slope is not None:
            softmax = slope.scatter_add(-1, index, -minus) if slope.shape[-1] else slope
            along = summed((of_slope * softmax).sum(-1, keepdim=True), mesh, axes)
            part = softmax * (of_slope - along)
            out = part if out is None else out + part
        return out, None, None, None, None, None


_apply: Callable[..., tuple[torch.Tensor, torch.Tensor]] = super(
    torch.autograd.Function, _VocabularyParallel
).apply


def _parallel(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    # else straight to C: the Python apply in between serves functorch
    losses: tuple[torch.Tensor, torch.Tensor]
    losses = (_VocabularyParallel.apply if recorders() else _apply)(*args)
    return losses


def _shares(
    logits: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, ignored: int, smoothing: float,
    placed: Placed, at: int, axes: tuple[int, ...],
) -> tuple[torch.Tensor, Any]:  # fmt: skip
    """This rank's addend of each token's loss, from its own classes, and what a mean divides by."""
    lay, mesh = placed.ins[0], placed.mesh
    x, classes = logits.movedim(at, -1), lay.shape[at]
    length = x.shape[-1]
    top = x.detach().amax(-1, keepdim=True) if length else x.new_full((*x.shape[:-1], 1), -math.inf)
    for axis in axes:
        top = collectives.all_reduce(top, mesh, axis, "max")
    top = top.masked_fill(~top.isfinite(), 0)
    shifted = x - top
    logs = shifted - summed(shifted.exp().sum(-1, keepdim=True), mesh, axes).log()
    if placed.ins[1].shape == lay.shape:
        share = target.movedim(at, -1) * (1 - smoothing) + smoothing / classes
        share = share if weight is None else share * weight
        return -(share * logs).sum(-1), math.prod(lay.shape) // classes
    local = target - local_box(lay).offsets[at]
    valid = target != ignored
    mine = (local >= 0) & (local < length) & valid
    if length:
        index = local.masked_fill(~mine, 0)
        hit = logs.gather(-1, index.unsqueeze(-1)).squeeze(-1)
        counts = mine.to(x.dtype) if weight is None else weight.detach()[index] * mine
        part = -(1 - smoothing) * hit * counts
    else:
        part = logs.sum(-1)
        counts = torch.zeros_like(part)
    if smoothing:
        every = (logs if weight is None else logs * weight).sum(-1)
        part = part - every.masked_fill(~valid, 0) * (smoothing / classes)
    divisor = counts.detach().sum()
    tokens = placed.ins[1]
    for axis in (*axes, *placed.axes_of(tokens, range(tokens.ndim))):
        divisor = collectives.all_reduce(divisor, mesh, axis)
    return part, divisor


@rule("logsumexp")
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
            top = collectives.all_reduce(top, placed.mesh, axis, "max")
        top = top.masked_fill(~top.isfinite(), 0)
        part = (local - top).exp().sum(dims, keepdim)
        return placed.total(part, axes).log() + (top if keepdim else top.squeeze(dims))

    # complex numbers have no maximum
    reduce = {} if x.dtype.is_complex else {("d", i): DONE for i in dims}
    return Spec([x.dims()], [out], [shape], reduce=reduce, run=run)


@rule_with(F.cosine_embedding_loss, "n_", "n_", "n")
@rule_with(F.triplet_margin_loss, "n_", "n_", "n_")
@rule_with(F.multi_margin_loss, "n_", "n", "_")
@rule_with(F.multilabel_margin_loss, "n_", "n_")
def row_loss(*letters: str) -> Callable[..., Spec | None]:
    """Losses of rows: for each tensor its dims (``n`` rows, ``_`` whole); a mean is one over the rows."""

    def rule(*args: Any, **kwargs: Any) -> Spec | None:
        operands = operands_in(args, kwargs)
        reduction = reduction_of(args, kwargs)
        if reduction not in ("mean", "sum", "none"):
            return None
        if 0 in operands[0].shape[1:] or operands[0].shape == (0,):
            return None
        single = operands[0].ndim == len(letters[0]) - 1  # one row, without its dim
        ins: list[Dims] = []
        for dims, x in zip(letters, operands, strict=False):
            dims = dims.replace("n", "") if single else dims
            if x.ndim != len(dims) or ("n" in dims and x.shape[dims.index("n")] != operands[0].shape[0]):
                return None
            ins.append(tuple("n" if d == "n" else None for d in dims))
        rows = 1 if single else operands[0].shape[0]
        kept = reduction == "none" and not single

        def run(func: Callable[..., Any], args: Any, kwargs: Any, placed: Placed) -> torch.Tensor:
            tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)]
            if tensors[0].numel() == 0:
                return of_nothing(placed, *tensors)
            if reduction != "mean":
                return func(*args, **kwargs)
            return _summing(func, args, kwargs) / rows

        out: Dims = ("n",) if kept else ()
        reduce = {} if kept else {"n": "sum"}
        return Spec(
            ins,
            [out],
            [(rows,) if kept else ()],
            reduce=reduce,
            run=run,
            fails=[i for i, x in enumerate(operands) if not x.dtype.is_floating_point],  # classes
            when=lambda placed: placed.lacks() or placed.axes_of(placed.ins[0], range(operands[0].ndim)),
        )

    return rule


@rule(F.ctc_loss)
def ctc_loss(
    log_probs: Operand, targets: Operand, input_lengths: Any, target_lengths: Any, blank: int = 0,
    reduction: str = "mean", zero_infinity: bool = False,
) -> Spec | None:  # fmt: skip
    """log_probs[t, n, c], targets[n, s], lengths[n]; the batch may be sharded."""
    lengths = [x for x in (input_lengths, target_lengths) if isinstance(x, Operand)]
    if log_probs.ndim != 3 or targets.ndim != 2 or any(x.ndim != 1 for x in lengths):
        return None
    n = log_probs.shape[1]
    kept = reduction == "none"

    def run(func: Callable[..., Any], args: Any, kwargs: Any, placed: Placed) -> torch.Tensor:
        bound = bound_to("log_probs targets input_lengths target_lengths blank", args, kwargs)
        start, length = local_box(placed.ins[0]).offsets[1], bound["log_probs"].shape[1]
        if length == 0:
            return of_nothing(placed, bound["log_probs"])
        for name in ("input_lengths", "target_lengths"):
            if not isinstance(bound[name], torch.Tensor):
                bound[name] = bound[name][start : start + length]
        bound |= {"reduction": "none", "zero_infinity": zero_infinity}
        losses = F.ctc_loss(**bound)
        if kept:
            return losses
        if reduction == "sum":
            return losses.sum()
        sizes = torch.as_tensor(bound["target_lengths"], device=losses.device).clamp(min=1)
        return (losses / sizes).sum() / n

    return Spec(
        [(None, "n", None), ("n", None), *(("n",) for _ in lengths)],
        [("n",) if kept else ()],
        [(n,) if kept else ()],
        reduce={} if kept else {"n": "sum"},
        run=run,
        when=lambda placed: placed.axes_of(placed.ins[0], (1,)),
        fails=(0,),  # lengths, tensors or numbers, are as long as its batch
    )
