"""A linear layer and the cross-entropy of its classes in one, for a chunk of rows after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from espalier.comm.functions import OwnFunction
from espalier.layout import Layout
from espalier.sharding.spec import DONE, Dims, Operand, Placed, Spec, composed, rule
from espalier.tensor.rules.loss import in_range, mean_of, softmaxed
from espalier.torch_private import keeps_graph

# from torch 2.13 on
_CHUNKED = (F.linear_cross_entropy,) if hasattr(F, "linear_cross_entropy") else ()

# rows that are worth a pass over the classes' weights, and over the sum of their gradients
_FEWEST = 1024


@rule(_CHUNKED)
def linear_cross_entropy(
    input: Operand,
    linear_weight: Operand,
    target: Operand,
    *,
    linear_bias: Operand | None = None,
    weight: Operand | None = None,
    reduction: str = "mean",
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    options: Any = None,
) -> Spec | None:
    """input [n, k] by linear_weight [c, k], and target [n] of classes; rows and classes may be sharded.

    Without options, and where torch computes no chunks either, the two functions are called one by one.
    """
    single = reduction in ("mean", "sum") and not label_smoothing and target.dtype == torch.int64
    if options is None or not single or input.ndim != 2 or linear_weight.ndim != 2 or target.ndim != 1:
        return None
    ins: list[Dims] = [("n", None), ("c", None), ("n",)]
    ins += [("c",)] if linear_bias is not None else []
    ins += [(None,)] if weight is not None else []

    def run(func: Callable[..., Any], args: Any, kwargs: Any, placed: Placed) -> torch.Tensor:
        return _in_chunks(*args, placed=placed, **kwargs)

    fails = () if reduction == "mean" else (2,)
    return Spec(ins, [()], [()], reduce={"n": "sum", "c": DONE}, run=run, fails=fails)


@composed(_CHUNKED)
def one_by_one(
    input: Any, linear_weight: Any, target: Any, *, linear_bias: Any = None, weight: Any = None,
    reduction: str = "mean", ignore_index: int | None = None, label_smoothing: float = 0.0,
    options: Any = None,
) -> Any:  # fmt: skip
    """The linear layer, and the loss of what it gives."""
    if linear_weight.ndim != 2:
        return NotImplemented
    return F.cross_entropy(
        F.linear(input, linear_weight, linear_bias), target, weight, reduction=reduction,
        ignore_index=-100 if ignore_index is None else ignore_index, label_smoothing=label_smoothing,
    )  # fmt: skip


def _in_chunks(
    input: torch.Tensor, linear_weight: torch.Tensor, target: torch.Tensor, *, placed: Placed, options: Any,
    linear_bias: torch.Tensor | None = None, weight: torch.Tensor | None = None, reduction: str = "mean",
    ignore_index: int | None = None, label_smoothing: float = 0.0,
) -> torch.Tensor:  # fmt: skip
    ignored, classes = -100 if ignore_index is None else ignore_index, placed.ins[1]

    def total() -> torch.Tensor:
        in_range(target, ignored, classes, 0)
        share = (target != ignored).to(linear_weight.dtype)
        if weight is not None:
            share = share * weight.detach()[target.masked_fill(target == ignored, 0)]
        rows = _rows(options, input.shape[0], input.shape[1], linear_weight.shape[0])
        cut = placed.axes_of(classes, (0,))
        loss: torch.Tensor
        loss = _Chunked.apply(
            input, linear_weight, linear_bias, target, share, rows, classes, cut, torch.is_grad_enabled()
        )
        return loss

    if reduction == "sum":
        return total()
    return mean_of(total, input.dtype, target, ignored, weight, classes.shape[0], placed.ins[2]).to(
        input.dtype
    )


def _rows(options: Any, rows: int, features: int, classes: int) -> int:
    """The rows of a chunk: as the options say, else so many that their logits take half the input's room."""
    if options.batch_chunk_size is not None:
        return int(options.batch_chunk_size)
    parts = (
        2
        if options.chunking_method in (None, "auto")
        else int(options.chunking_method.partition(":")[2] or 1)
    )
    return max(rows * features // max(classes * parts, 1), min(_FEWEST, rows), 1)


class _Chunked(OwnFunction):
    """The sum over rows of ``share`` · -log softmax(x · headᵀ + bias)[target].

    The gradients are made with the loss, for of a sum of losses they are known up to a factor: so no logits
    are kept, and none are made again (as Liger Kernel's and torch's own do, arXiv 2410.10989, section 3.2).
    Gradients of 16-bit weights are added up in float32. Nothing is kept but the gradients: neither the
    weight, which may be taken away meanwhile, nor the input.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, head: torch.Tensor, bias: torch.Tensor | None, target: torch.Tensor,
        share: torch.Tensor, rows: int, classes: Layout, cut: tuple[int, ...], trains: bool,
    ) -> torch.Tensor:  # fmt: skip
        operands = (x, head, bias)
        wanted = [trains and t is not None and t.requires_grad for t in operands]
        grads = [
            torch.zeros_like(t, dtype=t.dtype if t is x else _wide(t.dtype))
            if t is not None and wants
            else None
            for t, wants in zip(operands, wanted, strict=True)
        ]
        of_x, of_head, of_bias = grads
        loss = x.new_zeros((), dtype=_wide(x.dtype))
        for start in range(0, x.shape[0], rows):
            here = slice(start, start + rows)
            logits = F.linear(x[here], head, bias)
            losses, slope, *_ = softmaxed(logits.to(_wide(logits.dtype)), target[here], None, classes, 0, cut)
            some, dtype = share[here].to(losses.dtype), logits.dtype
            del logits
            loss += (losses * some).sum()
            slope = slope.mul_(some.unsqueeze(-1))
            if of_bias is not None:
                of_bias += slope.sum(0)
            slope = slope.to(dtype)
            if of_x is not None:
                of_x[here] = slope @ head
            if of_head is not None:
                of_head += slope.t() @ x[here]
        ctx.grads, ctx.dtypes = grads, [None if t is None else t.dtype for t in operands]
        return loss.to(x.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        kept = keeps_graph()
        gradients = [
            None if x is None else (x * grad if kept else x.mul_(grad)).to(dtype)
            for x, dtype in zip(ctx.grads, ctx.dtypes, strict=True)
        ]
        if not kept:
            ctx.grads = [None] * 3
        return (*gradients, *[None] * 6)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
