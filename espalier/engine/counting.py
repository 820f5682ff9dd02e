"""What a loss is a mean over: seen while the model computes it.

Micro-batches make one batch if each one's mean is weighed by the number of elements that it is a mean over.
A watcher of the forward pass marks what comes out of the reductions over the batch's rows: *means* with
their counts, *sums*, and *mixtures*, of which neither can be told. A mark goes along with the value through
arithmetic that keeps its meaning; any other makes a mixture, so that nothing is guessed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch._C import DisableTorchFunctionSubclass as raw

from espalier.comm.traced import recording
from espalier.layout import Layout
from espalier.layout.layout import is_partial
from espalier.tensor import DTensor, plain, stamp
from espalier.tensor.rules import RULES
from espalier.tensor.rules.loss import divisors, mean_alone
from espalier.tensor.rules.spec import bound_to
from espalier.tensor.watch import Go, Watcher


class Mean(NamedTuple):
    """A mean, or a sum of means; ``counts``: over how many elements (a 0-d tensor where values decide)."""

    counts: tuple[int | torch.Tensor, ...]


class Sum(NamedTuple):
    """A sum over rows, and the number that it is as a divisor."""

    value: DTensor


class Rows(NamedTuple):
    """Rows that are no longer cut among the ranks; ``apart``: surely nothing was made of several of them."""

    apart: bool


class Mixture(NamedTuple):
    """What depends on several rows otherwise than by a mean or a sum."""

    of: str


Mark = Mean | Sum | Rows | Mixture

_CLASSES = "input target weight size_average ignore_index reduce reduction label_smoothing"
_OF_CLASSES = (F.cross_entropy, F.nll_loss)
_ELEMENTS = frozenset(
    {
        F.mse_loss, F.l1_loss, F.huber_loss, F.smooth_l1_loss, F.binary_cross_entropy,
        F.binary_cross_entropy_with_logits, F.soft_margin_loss, F.kl_div, F.poisson_nll_loss,
        F.hinge_embedding_loss, F.margin_ranking_loss,
    }
)  # fmt: skip
_ROWS = frozenset(
    {F.cosine_embedding_loss, F.triplet_margin_loss, F.multi_margin_loss, F.multilabel_margin_loss}
)
_WEIGHTED = frozenset({F.mse_loss, F.l1_loss, F.huber_loss})  # by their weights a mean is divided too

_SAME = frozenset(
    "view reshape squeeze unsqueeze flatten view_as to float double half bfloat16 type type_as contiguous "
    "clone detach cpu cuda requires_grad_ alias".split()
)
_ADD = frozenset("add __add__ __radd__ __iadd__ add_ sub __sub__ __rsub__ __isub__ sub_ subtract".split())
_MUL = frozenset("mul __mul__ __rmul__ __imul__ mul_ multiply".split())
_DIV = frozenset("div __truediv__ __itruediv__ div_ divide true_divide".split())
_BY_ROWS = frozenset(
    "linear embedding layer_norm rms_norm group_norm dropout pad scaled_dot_product_attention conv1d "
    "cross_entropy nll_loss mse_loss l1_loss huber_loss smooth_l1_loss binary_cross_entropy_with_logits "
    "conv2d conv3d max_pool1d max_pool2d avg_pool1d avg_pool2d adaptive_avg_pool2d".split()
)
_ALONG = frozenset(
    "sum mean prod amax amin max min argmax argmin any all std var norm vector_norm logsumexp median cumsum "
    "cumprod softmax log_softmax sort topk normalize".split()
)  # along dims
_FRESH = frozenset(
    "new_zeros new_ones new_full new_empty new_tensor zeros_like ones_like full_like empty_like "
    "backward register_hook retain_grad size dim".split()
)  # their values are not the given ones'


class Counting(Watcher):
    """Marks the results of a forward pass.

    Args:
        axes: of the mesh, those that share the batch's rows.
    """

    inside = traffic = False

    def __init__(self, axes: tuple[int, ...]) -> None:
        self._axes = axes

    def around(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], go: Go) -> Any:
        """Carry a call out and mark what comes of it."""
        if recording():
            return go()
        given = list(_tensors(args)) + list(_tensors(kwargs.values())) if kwargs else list(_tensors(args))
        before = [x.__dict__.get("_mark") for x in given]
        marked = any(before)
        mixed = next((m for m in before if type(m) is Mixture), None) if marked else None
        if mixed is None and func in _OF_CLASSES:
            out = _of_classes(args, kwargs, go)
        else:
            out = go()
        unmarked = not marked and type(out) is DTensor and "_mark" not in out.__dict__
        if unmarked and (self._cut(out._layout) or not any(self._cut(x._layout) for x in given)):
            return out  # rows stay rows, or there are none: so for most calls
        for x in (out,) if type(out) is DTensor else tuple(_tensors((out,))):
            inner = mark_of(x)
            if inner is not None and all(x is not y for y in given):
                continue  # made by a call inside this one
            mark = mixed or self._mark(func, args, kwargs, given, before, x)
            if mark is not None:
                x.__dict__["_mark"] = mark
        if out is None and given and mixed is not None:
            given[0].__dict__["_mark"] = mixed  # x[i] = mixture
        return out

    def _cut(self, layout: Layout) -> bool:
        return any(type(layout.axes[a]) is int for a in self._axes)

    def _mark(
        self, func: Any, args: Any, kwargs: Any, given: list[DTensor], before: list[Mark | None], out: DTensor
    ) -> Mark | None:
        name = getattr(func, "__name__", "")
        if any(type(m) in (Mean, Sum) for m in before):
            return _combined(name, args, kwargs, given, before, out)
        rowed = [x for x, m in zip(given, before, strict=True) if m is not None or self._cut(x._layout)]
        if not rowed or name in _FRESH or self._cut(out._layout):
            return None
        if not out._layout.shape:
            apart = all(m is None or m.apart for m in before)  # type: ignore[union-attr]
            return _reduced(func, name, args, kwargs, given, out, apart) or Mixture(name)
        # on a grid the axes that share rows cut features, too: addends of a linear layer are of one row
        summed = [a for a in self._axes if is_partial(out._layout.axes[a])]
        if name not in _BY_ROWS and any(
            all(not is_partial(x._layout.axes[a]) for x in given) for a in summed
        ):
            return Mixture(name)
        mark = _of_rows(func, name, args, kwargs, out)
        together = any(type(m) is Rows and not m.apart for m in before)
        return Rows(False) if together and type(mark) is Rows else mark


def _of_rows(func: Any, name: str, args: Any, kwargs: Any, out: DTensor) -> Mark:
    """The mark of what a call makes of rows, where it is not cut into rows itself."""
    first = args[0] if args else kwargs.get("input")
    if name in _ALONG and isinstance(first, DTensor):
        dims = kwargs.get("dim", args[1] if len(args) > 1 else None)
        dims = dims if isinstance(dims, tuple | list) else (dims,)
        if all(isinstance(d, int) and d % first.ndim for d in dims):
            return Rows(True)
        return Rows(True) if any(isinstance(d, torch.Tensor) for d in dims) else Mixture(name)
    if name == "__getitem__":
        masked = any(x.dtype == torch.bool for x in _tensors((args[1],)))
        return Rows(masked or out.ndim == args[0].ndim)
    module = getattr(RULES.get(func), "__module__", "").rpartition(".")[2]
    return Rows(module in ("pointwise", "views", "joining") or name in _BY_ROWS)


def mark_of(x: Any) -> Mark | None:
    """What is known of a result."""
    found: Mark | None = x.__dict__.get("_mark") if type(x) is DTensor else None
    return found


def _sum(out: DTensor) -> Sum:
    """The mark of a sum: apart from the graph, and not the sum itself, which would hold itself."""
    with raw():
        return Sum(stamp(plain(out.detach()), out._layout))


def _tensors(items: Any) -> Iterator[DTensor]:
    for x in items:
        if type(x) is DTensor:
            yield x
        elif isinstance(x, tuple | list):
            yield from _tensors(x)


def _of_classes(args: Any, kwargs: Any, go: Go) -> Any:
    """cross_entropy or nll_loss, marked."""
    bound = bound_to(_CLASSES, args, kwargs)
    token = divisors.set([])
    try:
        out = go()
        told = divisors.get()
    finally:
        divisors.reset(token)
    if type(out) is not DTensor or out._layout.shape:
        return out
    logits, reduction = bound["input"], bound.get("reduction", "mean")
    mark: Mark = Mixture("cross_entropy")
    if told:
        mark = Mean((told[0],))
    elif reduction == "sum":
        mark = _sum(out)
    elif reduction == "mean" and bound["target"].shape == logits.shape:  # probabilities
        mark = Mean((logits.numel() // logits.shape[1 if logits.ndim > 1 else 0],))
    out.__dict__["_mark"] = mark
    return out


def mean_on_one_rank(func: Callable[..., Any], made: torch.Tensor) -> Callable[..., torch.Tensor] | None:
    """What does, on plain tensors, what a call did that made a mean over tokens, and marks what it makes.

    None if it has made something else.
    """
    mark = mark_of(made)
    if func not in _OF_CLASSES or type(mark) is not Mean or not isinstance(mark.counts[0], torch.Tensor):
        return None

    def mean(*args: Any, **kwargs: Any) -> torch.Tensor:
        out, divisor = mean_alone(func, args, kwargs)
        out.__dict__["_mark"] = Mean((divisor,))
        return out

    return mean


def _reduced(
    func: Any, name: str, args: Any, kwargs: Any, given: list[DTensor], out: DTensor, apart: bool
) -> Mark | None:
    """The mark of the number that a call makes of tensors with rows, which are ``apart`` or may not be."""
    x = given[0]
    if name == "mean":
        return Mean((x.numel(),)) if apart else None
    if name in ("sum", "count_nonzero"):
        return _sum(out) if apart else None
    losses = func in _ELEMENTS or func in _ROWS or func is F.ctc_loss
    if not losses or any(kwargs.get(k) is not None for k in ("size_average", "reduce")):
        return None
    reduction = kwargs.get("reduction", next((a for a in args if isinstance(a, str)), "mean"))
    if reduction == "sum":
        return _sum(out)
    if func in _WEIGHTED and kwargs.get("weight") is not None:
        return None
    if func is F.ctc_loss:
        return Mean((x.shape[1],)) if x.ndim == 3 else None
    if func in _ROWS or reduction == "batchmean":
        return Mean((x.shape[0],)) if x.ndim else None
    if reduction == "mean" and func in _ELEMENTS:
        target = args[1] if len(args) > 1 else kwargs.get("target", x)
        return Mean((torch.broadcast_shapes(x.shape, target.shape).numel(),))
    return None


def _combined(
    name: str, args: Any, kwargs: Any, given: list[DTensor], before: list[Mark | None], out: DTensor
) -> Mark:
    """The mark of what a call makes of marked values (none of them a mixture)."""
    marks = [m for m in before if isinstance(m, Mean | Sum)]
    means = [m for m in marks if isinstance(m, Mean)]
    sums = [m for m in marks if isinstance(m, Sum)]
    alone = len(given) == 1
    if alone and (name in _SAME or (name in ("mean", "sum") and given[0].numel() == 1)):
        return marks[0]
    if out._layout.shape or any(x._layout.shape for x in given):
        return Mixture(name)
    if name in _ADD:
        if not sums:
            return Mean(tuple(n for m in means for n in m.counts))
        if len(sums) == len(args) == 2:
            return _sum(out)
    if name in ("neg", "__neg__") or (name in _MUL and len(marks) == 1):
        return means[0] if means else _sum(out)
    if name in _DIV and len(args) == 2:
        if means and not sums and len(means) == 1 and before[0] is means[0] and args[0] is given[0]:
            return means[0]
        if len(sums) == 2:
            return Mean((sums[1].value,))
    if name in ("clamp", "clamp_min", "clip") and alone and sums:
        low, high = _bounds(args, kwargs)
        if high is None and isinstance(low, int | float) and low <= 1:
            return sums[0]  # against a division by zero
    return Mixture(name)


def _bounds(args: Any, kwargs: Any) -> tuple[Any, Any]:
    low, high = (*args[1:], None, None)[:2]
    return kwargs.get("min", low), kwargs.get("max", high)


__all__ = ["Counting", "Mark", "Mean", "Mixture", "Sum", "mark_of", "mean_on_one_rank"]
