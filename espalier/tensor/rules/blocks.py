"""Attention of some queries over some of their keys, with what it takes to put such blocks together.

A block gives its output and, for each query, the logarithm of the sum of its weights (*lse*). Two blocks
of the same queries are merged by these (Milakov and Gimelshein, 2018; Dao et al., 2022). In the backward
pass each block needs the lse and the output of the whole only.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from espalier.comm.traced import symbolic

_OPS = torch.ops.aten
_CPU: Any = getattr(_OPS, "_scaled_dot_product_flash_attention_for_cpu", None)
_CPU_BACK: Any = getattr(_OPS, "_scaled_dot_product_flash_attention_for_cpu_backward", None)
_CUDA: Any = getattr(_OPS, "_scaled_dot_product_efficient_attention", None)
_CUDA_BACK: Any = getattr(_OPS, "_scaled_dot_product_efficient_attention_backward", None)
_ROWS = 32  # of which the kernel on CUDA gives lse in multiples


class Block(NamedTuple):
    """Queries [b, h, s, d], keys [b, g, t, d] and values [b, g, t, e]; g divides h.

    Attributes:
        bias: added to the scores, broadcast to [b, h, s, t], or, of bools, what may be seen; None: nothing.
        causal: query i sees the keys up to i.
        keep: what weights are multiplied by (dropout), [b, h, s, t]; None: nothing.
        plainly: no kernel will do, say because the bias needs a gradient.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    scale: float
    bias: torch.Tensor | None = None
    causal: bool = False
    keep: torch.Tensor | None = None
    plainly: bool = False

    @property
    def unseen(self) -> bool:
        """Whether a mask hides it all: then it need not be computed. Not asked where values are not known."""
        if self.bias is None or self.bias.device.type == "meta" or symbolic():
            return False
        seen = self.bias if self.bias.dtype is torch.bool else self.bias > -math.inf
        return not seen.any()

    @property
    def kernel(self) -> str:
        """Which kernel computes it: that of ``"cpu"``, of ``"cuda"``, or the ``"plain"`` formula."""
        q, device = self.q, self.q.device.type
        if self.plainly or self.keep is not None or q.shape[-1] != self.v.shape[-1]:
            return "plain"
        if device in ("cpu", "meta") and _CPU is not None:
            return "cpu"
        fits = q.dtype is not torch.float64 and q.shape[-1] % 8 == 0 and self.bias is None
        return "cuda" if device == "cuda" and _CUDA is not None and fits else "plain"


def wide(dtype: torch.dtype) -> torch.dtype:
    """What blocks of a dtype are added up in."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def forward(block: Block) -> tuple[torch.Tensor, torch.Tensor]:
    """The output [b, h, s, e], and lse [b, h, s]: minus infinity for a query that sees no key."""
    kernel = block.kernel
    if kernel == "plain":
        return _plain(block)
    q, k, v = block.q, _spread(block.k, block.q), _spread(block.v, block.q)
    if kernel == "cpu":
        bias = _full(block)
        out, lse = _CPU(q, k, v, 0.0, block.causal, attn_mask=bias, scale=block.scale)
        if bias is not None:
            # the kernel says 0 of a query that sees nothing
            lse = lse.masked_fill(bias.isneginf().all(-1), -math.inf)
        return out, lse
    out, lse, *_ = _CUDA(q, k, v, None, True, 0.0, block.causal, scale=block.scale)
    return out, lse[..., : q.shape[-2]]


def fused(block: Block) -> torch.Tensor:
    """The output alone, by the CPU's kernel: differentiable."""
    k, v = _spread(block.k, block.q), _spread(block.v, block.q)
    out: torch.Tensor = _CPU(block.q, k, v, 0.0, block.causal, attn_mask=_full(block), scale=block.scale)[0]
    return out


def merge(out: torch.Tensor, lse: torch.Tensor, block_out: torch.Tensor, block_lse: torch.Tensor) -> None:
    """Add a block to the output and lse so far, in place."""
    total = torch.logaddexp(lse, block_lse)
    share = (block_lse - total.masked_fill(total == -math.inf, 0.0)).exp_()
    out.lerp_(block_out.to(out.dtype), share.unsqueeze(-1))
    lse.copy_(total)


def backward(
    block: Block, grad: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The gradients of queries, keys, values, and scores ([b, h, s, t]; by the plain formula only).

    Args:
        grad: of the output of all blocks.
        out, lse: of all blocks, finite.
    """
    kernel = block.kernel
    if kernel == "plain":
        return _plain_back(block, grad, out, lse)
    q, k, v = block.q, _spread(block.k, block.q), _spread(block.v, block.q)
    if kernel == "cpu":
        dq, dk, dv = _CPU_BACK(
            grad, q, k, v, out, lse, 0.0, block.causal, attn_mask=_full(block), scale=block.scale
        )
    else:
        lse = F.pad(lse.contiguous(), (0, -lse.shape[-1] % _ROWS), value=math.inf)
        seed = torch.zeros((), dtype=torch.int64)
        dq, dk, dv, _ = _CUDA_BACK(
            grad, q, k, v, None, out, lse, seed, seed, 0.0, [True, True, True, False], block.causal,
            scale=block.scale,
        )  # fmt: skip
    return dq, _gathered(dk, block.k), _gathered(dv, block.v), None


def _spread(x: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Keys or values, once for each head of the queries."""
    times = q.shape[1] // max(x.shape[1], 1)
    return x if times == 1 else x.repeat_interleave(times, 1)


def _gathered(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The gradient of what was spread."""
    times = grad.shape[1] // max(x.shape[1], 1)
    return grad if times == 1 else grad.unflatten(1, (x.shape[1], times)).sum(2, dtype=wide(grad.dtype))


def _full(block: Block) -> torch.Tensor | None:
    if block.bias is None:
        return None
    return _added(block.bias, block.q.dtype).expand(*block.q.shape[:-1], block.k.shape[-2])


def _added(bias: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if bias.dtype is not torch.bool:
        return bias.to(dtype)
    return torch.zeros(bias.shape, dtype=dtype, device=bias.device).masked_fill_(~bias, -math.inf)


def _scores(block: Block) -> torch.Tensor:
    dtype = wide(block.q.dtype)
    scores = block.q.to(dtype) @ _spread(block.k, block.q).to(dtype).mT * block.scale
    if block.causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril_()
        scores = scores.masked_fill(~seen, -math.inf)
    return scores if block.bias is None else scores + _added(block.bias, dtype)


def _plain(block: Block) -> tuple[torch.Tensor, torch.Tensor]:
    scores = _scores(block)
    blind = scores.isneginf().all(-1, keepdim=True)
    scores = scores.masked_fill(blind, 0.0)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.unsqueeze(-1)).exp().masked_fill(blind, 0.0)
    if block.keep is not None:
        weights = weights * block.keep
    return weights @ _spread(block.v, block.q).to(weights.dtype), lse.masked_fill(
        blind.squeeze(-1), -math.inf
    )


def _plain_back(
    block: Block, grad: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    weights = (_scores(block) - lse.unsqueeze(-1)).exp()
    dtype = weights.dtype
    grad, out, q = grad.to(dtype), out.to(dtype), block.q.to(dtype)
    k, v = _spread(block.k, block.q).to(dtype), _spread(block.v, block.q).to(dtype)
    kept = weights if block.keep is None else weights * block.keep
    dv = kept.mT @ grad
    moved = grad @ v.mT
    if block.keep is not None:
        moved = moved * block.keep
    scores = weights * (moved - (grad * out).sum(-1, keepdim=True))
    dq, dk = scores @ k * block.scale, scores.mT @ q * block.scale
    return dq, _gathered(dk, block.k), _gathered(dv, block.v), scores
