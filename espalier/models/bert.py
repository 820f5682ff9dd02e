"""A BERT-like encoder: attention to both sides, trained to fill in masked tokens (arXiv 1810.04805)."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from espalier.models.config import positions_in
from espalier.models.gpt2 import Block, GPT2Config
from espalier.models.initialize import initialize_weights
from espalier.models.output import LanguageModelOutput, token_loss


@dataclass(frozen=True, kw_only=True)
class BERTConfig(GPT2Config):
    """Sizes of a `BERT`: those of a `GPT2`."""


class BERT(nn.Module):
    """A masked language model for one device, with each block's norms before its halves.

    Called as ``model(input_ids, labels=None)``: ``input_ids`` [batch, sequence] integers below
    ``vocab_size``; ``labels`` [batch, sequence] are the tokens that stood at the masked positions, -100
    elsewhere. Returns a `LanguageModelOutput`.
    """

    def __init__(self, config: BERTConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.hidden)
        self.position = nn.Embedding(config.max_positions, config.hidden)
        self.embed_norm = nn.LayerNorm(config.hidden, eps=config.norm_eps, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config, causal=False) for _ in range(config.layers))
        self.transform = nn.Linear(config.hidden, config.hidden, bias=config.bias)
        self.norm = nn.LayerNorm(config.hidden, eps=config.norm_eps, bias=config.bias)
        self.head = nn.Linear(config.hidden, config.vocab_size, bias=config.bias)
        if config.tied:
            self.head.weight = self.embed.weight
        initialize_weights(self, residual=("o_proj", "down_proj"), additions=2 * config.layers)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> LanguageModelOutput:
        s = positions_in(input_ids, self.config.max_positions)
        positions = torch.arange(s, device=input_ids.device)
        x = self.dropout(self.embed_norm(self.embed(input_ids) + self.position(positions)))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(F.gelu(self.transform(x))))
        return LanguageModelOutput(logits, None if labels is None else token_loss(logits, labels))
