"""Attention of some queries over some of their keys, by the best kernel there is, and what they drop.

A block gives its output and, for each query, the logarithm of the sum of its weights (*lse*). Two blocks
of the same queries are merged by these (Milakov and Gimelshein, 2018; Dao et al., 2022). In the backward
pass each block needs the lse and the output of the whole only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from espalier.comm.custom_ops import symbolic
from espalier.comm.row_exchange import Spans
from espalier.device import has_efficient_attention, has_flash_attention
from espalier.layout import Layout, local_box
from espalier.mesh import Mesh
from espalier.tensor import fused_kernels
from espalier.tensor.random import Key, kept_at

_OPS = torch.ops.aten
_CPU: Any = getattr(_OPS, "_scaled_dot_product_flash_attention_for_cpu", None)
_CPU_BACK: Any = getattr(_OPS, "_scaled_dot_product_flash_attention_for_cpu_backward", None)
_FLASH: Any = getattr(_OPS, "_scaled_dot_product_flash_attention", None)
_FLASH_BACK: Any = getattr(_OPS, "_scaled_dot_product_flash_attention_backward", None)
_WIDEST = 192  # heads that flash attention differentiates on every device that has it
_EFFICIENT: Any = getattr(_OPS, "_scaled_dot_product_efficient_attention", None)
_EFFICIENT_BACK: Any = getattr(_OPS, "_scaled_dot_product_efficient_attention_backward", None)
_ROWS = 32  # of which the efficient kernel gives lse in multiples


class Block(NamedTuple):
    """Queries [b, h, s, d], keys [b, g, t, d] and values [b, g, t, e]; g divides h.

    Attributes:
        bias: added to the scores, broadcast to [b, h, s, t], or, of bools, what may be seen; None: nothing.
        causal: query i sees the keys up to i.
        keep: what weights are dropped; None: none.
        plainly: no kernel will do, say because the bias needs a gradient.
        ahead: without a bias: query i sees the keys up to i + ahead; None: all, or as ``causal`` says.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    scale: float
    bias: torch.Tensor | None = None
    causal: bool = False
    keep: Kept | None = None
    plainly: bool = False
    ahead: int | None = None

    @property
    def unseen(self) -> bool:
        """Whether a mask hides it all: then it need not be computed.

        Not asked where values are not known, nor of an accelerator, as the host would wait for the answer.
        """
        if self.bias is None or self.bias.device.type != "cpu" or symbolic():
            return False
        seen = self.bias if self.bias.dtype is torch.bool else self.bias > -math.inf
        return not seen.any()

    @property
    def kernel(self) -> str:
        """Which computes it: ``"flash"``, ``"efficient"``, the ``"cpu"``'s, our ``"own"``, or ``"plain"``."""
        q, device = self.q, self.q.device.type
        if self.plainly:
            return "plain"
        special = self.keep is not None or q.shape[-1] != self.v.shape[-1]
        if device in ("cpu", "meta") and _CPU is not None and not special:
            return "cpu"
        masked = self.bias is not None or self.ahead is not None
        fits = q.dtype is not torch.float64 and q.shape[-1] % 8 == 0 and not masked and not special
        # of queries and keys that differ in number it sees other keys as causal than torch does
        square = not self.causal or q.shape[-2] == self.k.shape[-2]
        if fits and square and q.dtype.itemsize == 2 and q.shape[-1] <= _WIDEST and flash_serves(q.device):
            return "flash"
        if has_efficient_attention(device) and _EFFICIENT is not None and fits:
            return "efficient"
        numbered = self.keep is None or self.keep.numbered() is not None
        return "own" if numbered and fused_kernels.attends(q, self.k, self.v) else "plain"

    @property
    def mask(self) -> torch.Tensor | None:
        """The bias, spelled out."""
        if self.ahead is None:
            return self.bias
        row, column = (torch.arange(n, device=self.q.device) for n in (self.q.shape[-2], self.k.shape[-2]))
        return row.unsqueeze(-1) + self.ahead >= column

    def told(
        self,
    ) -> tuple[
        torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, int | None, float,
        fused_kernels.Dropout | None,
    ]:  # fmt: skip
        """As :func:`fused_kernels.attention` takes it."""
        drops = None if self.keep is None else self.keep.numbered()
        return self.q, self.k, self.v, self.bias, 0 if self.causal else self.ahead, self.scale, drops


def flash_serves(device: torch.device) -> bool:
    """Whether flash attention is there, and nobody turned it off."""
    return _FLASH is not None and has_flash_attention(device)


def wide(dtype: torch.dtype) -> torch.dtype:
    """What blocks of a dtype are added up in."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def forward(block: Block) -> tuple[torch.Tensor, torch.Tensor]:
    """The output [b, h, s, e], and lse [b, h, s]: minus infinity for a query that sees no key."""
    kernel = block.kernel
    if kernel == "plain":
        return _plain(block)
    block = _in_rows(block)
    if kernel == "flash":
        out, lse, *_ = _FLASH(block.q, block.k, block.v, 0.0, block.causal, scale=block.scale)
        return out, lse
    if kernel == "own":
        return fused_kernels.attention(*block.told())
    q, k, v = block.q, _spread(block.k, block.q), _spread(block.v, block.q)
    if kernel == "cpu":
        bias = _full(block)
        out, lse = _CPU(q, k, v, 0.0, block.causal, attn_mask=bias, scale=block.scale)
        if bias is not None:
            # the kernel says 0 of a query that sees nothing
            lse = lse.masked_fill(bias.isneginf().all(-1), -math.inf)
        return out, lse
    out, lse, *_ = _EFFICIENT(q, k, v, None, True, 0.0, block.causal, scale=block.scale)
    return out, lse[..., : q.shape[-2]]


def fused(block: Block) -> torch.Tensor:
    """The output alone, by the CPU's kernel, which takes keys of fewer heads as they are: differentiable."""
    block = _in_rows(block)
    q, k, v = block.q, block.k, block.v
    out: torch.Tensor = _CPU(q, k, v, 0.0, block.causal, attn_mask=_full(block), scale=block.scale)[0]
    return out


def merge(out: torch.Tensor, lse: torch.Tensor, block_out: torch.Tensor, block_lse: torch.Tensor) -> None:
    """Add a block to the output and lse so far, in place."""
    total = torch.logaddexp(lse, block_lse)
    share = (block_lse - total.masked_fill(total == -math.inf, 0.0)).exp_()
    out.lerp_(block_out.to(out.dtype), share.unsqueeze(-1))
    lse.copy_(total)


def backward(
    block: Block,
    grad: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The gradients of queries, keys, values, and scores ([b, h, s, t]; by the plain formula only).

    Args:
        grad: of the output of all
        out, lse: of all blocks, finite.
        dtype: of the gradients by a kernel of our own: that in which they are added up, or the queries'.
    """
    kernel = block.kernel
    if kernel == "plain":
        return _plain_back(block, grad, out, lse)
    block, grad, out = _in_rows(block), _in_row(grad), _in_row(out)
    if kernel == "flash":
        unused = torch.empty((), dtype=torch.int64, device=grad.device)  # where there is no dropout
        rows, columns = block.q.shape[-2], block.k.shape[-2]
        dq, dk, dv = _FLASH_BACK(
            grad, block.q, block.k, block.v, out, lse.contiguous(), None, None, rows, columns, 0.0,
            block.causal, unused, unused, scale=block.scale,
        )  # fmt: skip
        return dq, dk, dv, None
    if kernel == "own":
        return (*fused_kernels.attention_back(grad, out, lse, *block.told(), dtype=dtype), None)
    q, k, v = block.q, _spread(block.k, block.q), _spread(block.v, block.q)
    if kernel == "cpu":
        dq, dk, dv = _CPU_BACK(
            grad, q, k, v, out, lse, 0.0, block.causal, attn_mask=_full(block), scale=block.scale
        )
    else:
        lse = F.pad(lse.contiguous(), (0, -lse.shape[-1] % _ROWS), value=math.inf)
        seed = torch.zeros((), dtype=torch.int64)
        dq, dk, dv, _ = _EFFICIENT_BACK(
            grad, q, k, v, None, out, lse, seed, seed, 0.0, [True, True, True, False], block.causal,
            scale=block.scale,
        )  # fmt: skip
    return dq, _gathered(dk, block.k), _gathered(dv, block.v), None


def _in_rows(block: Block) -> Block:
    """With features one beside the other, as kernels take for granted."""
    return block._replace(q=_in_row(block.q), k=_in_row(block.k), v=_in_row(block.v))


def _in_row(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _spread(x: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Keys or values, once for each head of the queries."""
    times = q.shape[1] // max(x.shape[1], 1)
    return x if times == 1 else x.repeat_interleave(times, 1)


def _gathered(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The gradient of what was spread."""
    times = grad.shape[1] // max(x.shape[1], 1)
    return grad if times == 1 else grad.unflatten(1, (x.shape[1], times)).sum(2, dtype=wide(grad.dtype))


def _full(block: Block) -> torch.Tensor | None:
    mask = block.mask
    if mask is None:
        return None
    return _added(mask, block.q.dtype).expand(*block.q.shape[:-1], block.k.shape[-2])


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
    mask = block.mask
    return scores if mask is None else scores + _added(mask, dtype)


def _plain(block: Block) -> tuple[torch.Tensor, torch.Tensor]:
    scores = _scores(block)
    blind = scores.isneginf().all(-1, keepdim=True)
    scores = scores.masked_fill(blind, 0.0)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.unsqueeze(-1)).exp().masked_fill(blind, 0.0)
    if block.keep is not None:
        weights = weights * block.keep.factors(block.q)
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
    keep = None if block.keep is None else block.keep.factors(block.q)
    dv = (weights if keep is None else weights * keep).mT @ grad
    moved = grad @ v.mT
    if keep is not None:
        moved = moved * keep
    scores = weights * (moved - (grad * out).sum(-1, keepdim=True))
    dq, dk = scores @ k * block.scale, scores.mT @ q * block.scale
    return dq, _gathered(dk, block.k), _gathered(dv, block.v), scores


# ---- how one call of attention over a cut sequence goes: who has which rows, and what they draw


@dataclass(frozen=True)
class RingLayout:
    """How one call goes.

    Attributes:
        axis: along which queries or keys travel; None: all keys are here.
        queries: the rows that this rank has.
        keys: those that each rank of the axis has.
        weights: the layout of the scores [..., h, s, t], whose last two dims are taken from the spans.
        scale: of the scores.
        causal: row i sees the keys up to i.
        dropout: probability that a weight is dropped.
        balanced: causal, of queries that lie as the keys do: ranks take work off each other.
    """

    mesh: Mesh
    axis: int | None
    queries: Spans
    keys: tuple[Spans, ...]
    weights: Layout
    scale: float
    causal: bool
    dropout: float
    balanced: bool = False

    @property
    def here(self) -> int:
        """This rank's place on the axis."""
        return 0 if self.axis is None else self.mesh.coordinate[self.axis]

    @cached_property
    def numbering(self) -> tuple[int, tuple[int, int, int]] | None:
        """The number of this rank's first weight of row and column 0, and the steps along b, h and s.

        None: two dims count as one b, and no step leads from one to the next.
        """
        box, steps = local_box(self.weights), self.weights.stride
        along = [step for n, step in zip(box.sizes[:-3], steps[:-3], strict=True) if n > 1]
        if len(along) > 1:
            return None
        base = sum(start * step for start, step in zip(box.offsets[:-2], steps[:-2], strict=True))
        return base, (along[0] if along else 0, steps[-3], steps[-2])


def size_of(spans: Spans) -> int:
    """Number of rows."""
    return sum(max(end - start, 0) for start, end in spans)


def numbers(spans: Spans, device: torch.device) -> torch.Tensor:
    """The global numbers of rows."""
    parts = [torch.arange(start, end, device=device) for start, end in spans]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


class Kept(NamedTuple):
    """What weights a call drops, by their global numbers.

    Attributes:
        queries, keys: whose weights they are.
        rows, columns: the part of these; None: all.
    """

    way: RingLayout
    queries: Spans
    keys: Spans
    key: Key
    rows: tuple[int, int] | None = None
    columns: tuple[int, int] | None = None

    def factors(self, like: torch.Tensor) -> torch.Tensor:
        """What the weights of queries ``like`` are multiplied by, [b, h, s, t]."""
        way, device = self.way, like.device
        box = local_box(way.weights)
        indices = [
            torch.arange(o, o + n, device=device)
            for o, n in zip(box.offsets[:-2], box.sizes[:-2], strict=True)
        ]
        for spans, part in ((self.queries, self.rows), (self.keys, self.columns)):
            numbered = numbers(spans, device)
            indices.append(numbered if part is None else numbered[slice(*part)])
        index = torch.zeros((), dtype=torch.int64, device=device)
        for d, (along, step) in enumerate(zip(indices, way.weights.stride, strict=True)):
            index = index + (along * step).view([-1 if i == d else 1 for i in range(len(indices))])
        kept = kept_at(index, self.key, way.dropout)
        scale = 0.0 if way.dropout == 1 else 1 / (1 - way.dropout)
        return (kept.to(wide(like.dtype)) * scale).reshape(like.shape[0], like.shape[1], *kept.shape[-2:])

    def numbered(self) -> fused_kernels.Dropout | None:
        """The same as a start and steps; None: there are no such."""
        numbering = self.way.numbering
        if not isinstance(self.key, int) or numbering is None or max(len(self.queries), len(self.keys)) > 1:
            return None
        base, steps = numbering
        row = self.queries[0][0] + (self.rows[0] if self.rows else 0)
        column = self.keys[0][0] + (self.columns[0] if self.columns else 0)
        base += row * steps[-1] + column * self.way.weights.stride[-1]
        return fused_kernels.Dropout(self.key, base, steps, self.way.dropout)


def nothing(q: torch.Tensor, v: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and lse of no keys."""
    out = torch.zeros((*q.shape[:-1], v.shape[-1]), dtype=dtype, device=q.device)
    return out, torch.full(q.shape[:-1], -math.inf, dtype=dtype, device=q.device)
