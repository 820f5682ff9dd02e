"""A GPT of GPT-2's kind: learned positions, LayerNorm, GELU, biases, a tied head."""

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
from espalier.models.sizes import BlockSizes, GPT2Config


class Attention(nn.Module):
    """Self-attention, causal or to both sides: [b, s, hidden] to [b, s, hidden]."""

    def __init__(self, config: BlockSizes, causal: bool = True) -> None:
        super().__init__()
        self.is_causal = causal
        self.head_dim = config.hidden // config.heads
        self.dropout = config.dropout
        self.q_proj = nn.Linear(config.hidden, config.hidden, bias=config.bias)
        self.k_proj = nn.Linear(config.hidden, config.hidden, bias=config.bias)
        self.v_proj = nn.Linear(config.hidden, config.hidden, bias=config.bias)
        self.o_proj = nn.Linear(config.hidden, config.hidden, bias=config.bias)

    def forward(self, x: torch.Tensor, past_key_values: Past | None = None) -> torch.Tensor:
        b, s, _ = x.shape
        q = self.q_proj(x).view(b, s, -1, self.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(b, s, -1, self.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(b, s, -1, self.head_dim).transpose(1, 2)
        if past_key_values is not None:
            k, v = past_key_values.update(k, v)
        is_causal = self.is_causal and (past_key_values is None or s > 1)
        y = F.scaled_dot_product_attention(
            q, k, v, dropout_p=self.dropout if self.training else 0.0, is_causal=is_causal
        )
        return self.o_proj(y.transpose(1, 2).reshape(b, s, -1))


class MLP(nn.Module):
    """GELU feed-forward: [b, s, hidden] to [b, s, hidden]."""

    def __init__(self, config: BlockSizes) -> None:
        super().__init__()
        self.up_proj = nn.Linear(config.hidden, config.size_of_ffn, bias=config.bias)
        self.down_proj = nn.Linear(config.size_of_ffn, config.hidden, bias=config.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.gelu(self.up_proj(x), approximate="tanh"))


class Block(nn.Module):
    """Attention and feed-forward, each on the normalized residual stream."""

    def __init__(self, config: BlockSizes, causal: bool = True) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.hidden, eps=config.norm_eps, bias=config.bias)
        self.attention = Attention(config, causal)
        self.mlp_norm = nn.LayerNorm(config.hidden, eps=config.norm_eps, bias=config.bias)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class GPT2(Generates):
    """A decoder-only language model for one device.

    Called as ``model(input_ids, labels=None, position_ids=None)``: ``input_ids`` [batch, sequence]
    integers below ``vocab_size``; ``labels`` [batch, sequence] are already
    shifted (``labels[:, t]`` follows position t), -100 where none counts;
    ``position_ids`` [batch, sequence], by default from 0 on. Returns a `LanguageModelOutput`.
    """

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.hidden)
        self.position = nn.Embedding(config.max_positions, config.hidden)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.hidden, eps=config.norm_eps, bias=config.bias)
        self.head = nn.Linear(config.hidden, config.vocab_size, bias=False)
        if config.tied:
            self.head.weight = self.embed.weight
        initialize_weights(self, config.layers)

    def forward(
        self,
        input_ids: torch.Tensor,
        labels: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
    ) -> LanguageModelOutput:
        s = positions_in(input_ids, self.config.max_positions)
        positions = torch.arange(s, device=input_ids.device) if position_ids is None else position_ids
        x = self.dropout(self.embed(input_ids) + self.position(positions))
        for block in self.blocks:
            x = block(x)
        return LanguageModelOutput(
            *logits_and_loss(self.head, self.norm(x), labels, self.config.chunked_loss)
        )
