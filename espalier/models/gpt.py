"""A GPT of the modern kind: rotary positions, RMSNorm, SwiGLU, grouped-query attention."""

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from espalier.models.config import (
    LanguageModelOutput,
    initialize_weights,
    logits_and_loss,
    positions_in,
)
from espalier.models.sampling import Generates, Past
from espalier.models.sizes import GPTConfig


class Attention(nn.Module):
    """Causal self-attention with rotary positions: [b, s, hidden] to [b, s, hidden]."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.is_causal = True
        self.head_dim = config.size_of_head
        self.grouped = config.size_of_kv != config.heads
        self.dropout = config.dropout
        q, kv = config.heads * self.head_dim, config.size_of_kv * self.head_dim
        self.q_proj = nn.Linear(config.hidden, q, bias=config.bias)
        self.k_proj = nn.Linear(config.hidden, kv, bias=config.bias)
        self.v_proj = nn.Linear(config.hidden, kv, bias=config.bias)
        self.o_proj = nn.Linear(q, config.hidden, bias=config.bias)

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, past_key_values: Past | None = None
    ) -> torch.Tensor:
        b, s, _ = x.shape
        q = self.q_proj(x).view(b, s, -1, self.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(b, s, -1, self.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(b, s, -1, self.head_dim).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if past_key_values is not None:
            k, v = past_key_values.update(k, v)
        y = F.scaled_dot_product_attention(
            q,
            k,
            v,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=past_key_values is None or s > 1,
            enable_gqa=self.grouped,
        )
        return self.o_proj(y.transpose(1, 2).reshape(b, s, -1))


class MLP(nn.Module):
    """SwiGLU feed-forward: [b, s, hidden] to [b, s, hidden]."""

    def __init__(self, config: GPTConfig, inner: int | None = None) -> None:
        super().__init__()
        inner = inner or config.size_of_ffn
        self.gate_proj = nn.Linear(config.hidden, inner, bias=config.bias)
        self.up_proj = nn.Linear(config.hidden, inner, bias=config.bias)
        self.down_proj = nn.Linear(inner, config.hidden, bias=config.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """Attention and feed-forward, each on the normalized residual stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden, eps=config.norm_eps)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.hidden, eps=config.norm_eps)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x), cos, sin))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class GPT(Generates):
    """A decoder-only language model for one device.

    Called as ``model(input_ids, labels=None, position_ids=None)``: ``input_ids`` [batch, sequence]
    integers below ``vocab_size``; ``labels`` [batch, sequence] are already
    shifted (``labels[:, t]`` follows position t), -100 where none counts;
    ``position_ids`` [batch, sequence], by default from 0 on. Returns a `LanguageModelOutput`.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    block: ClassVar[type[nn.Module]] = Block

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.hidden)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(self.block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.hidden, eps=config.norm_eps)
        self.head = nn.Linear(config.hidden, config.vocab_size, bias=False)
        if config.tied:
            self.head.weight = self.embed.weight
        cos, sin = rotary_tables(config.max_positions, config.size_of_head, config.rope_base)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        initialize_weights(self, config.layers)

    def embedded(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The first block's input [b, s, hidden], and the cosines and sines of its positions."""
        s = positions_in(input_ids, self.config.max_positions)
        x = self.dropout(self.embed(input_ids))
        if position_ids is None:
            return x, self.cos[:s], self.sin[:s]
        cos, sin = (F.embedding(position_ids, table).unsqueeze(1) for table in (self.cos, self.sin))
        return x, cos, sin

    def forward(
        self,
        input_ids: torch.Tensor,
        labels: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
    ) -> LanguageModelOutput:
        x, cos, sin = self.embedded(input_ids, position_ids)
        for block in self.blocks:
            x = block(x, cos, sin)
        return LanguageModelOutput(
            *logits_and_loss(self.head, self.norm(x), labels, self.config.chunked_loss)
        )


def rotary_tables(positions: int, head_dim: int, base: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of the rotary angles, each [positions, head_dim] (arXiv 2104.09864)."""
    frequency = base ** -(torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angle = torch.outer(torch.arange(positions, dtype=torch.float32), frequency)
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos(), angle.sin()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn x [b, heads, s, head_dim] by the angles of positions, cos and sin: [s, ...] or [b, 1, s, ...]."""
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)
