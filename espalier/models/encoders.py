"""Encoders, whose tokens attend to both sides: a vision transformer and a BERT."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from espalier.models.config import (
    LanguageModelOutput,
    initialize_weights,
    logits_and_loss,
    positions_in,
)
from espalier.models.gpt2 import Block
from espalier.models.sizes import BERTConfig, ViTConfig

# ---- a vision transformer: patches of an image as tokens (Dosovitskiy et al. 2020, arXiv 2010.11929)


class ImageOutput(NamedTuple):
    """Output of a model of images.

    Attributes:
        logits: [batch, classes], unnormalized log-probabilities.
        loss: scalar mean cross-entropy in nats; None where no labels were given.
    """

    logits: torch.Tensor
    loss: torch.Tensor | None = None


class ViT(nn.Module):
    """An image classifier for one device; the class is told from the mean of all patches.

    Called as ``model(pixel_values, labels=None)``: ``pixel_values`` [batch, channels, height, width],
    ``labels`` [batch] integers below ``classes``. Returns an `ImageOutput`.
    """

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Conv2d(
            config.channels, config.hidden, config.patch, stride=config.patch, bias=config.bias
        )
        self.position = nn.Embedding((config.image // config.patch) ** 2, config.hidden)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config, causal=False) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.hidden, eps=config.norm_eps, bias=config.bias)
        self.head = nn.Linear(config.hidden, config.classes, bias=config.bias)
        initialize_weights(self, config.layers)

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor | None = None) -> ImageOutput:
        c = self.config
        if tuple(pixel_values.shape[1:]) != (c.channels, c.image, c.image):
            raise ValueError(
                f"pixel_values is {list(pixel_values.shape)}, expected [batch, {c.channels}, {c.image}, "
                f"{c.image}]: resize the images, or build the model for theirs"
            )
        patches = self.embed(pixel_values).flatten(2).transpose(1, 2)
        x = self.dropout(patches + self.position.weight)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x).mean(1))
        return ImageOutput(logits, None if labels is None else F.cross_entropy(logits, labels))


# ---- a BERT-like encoder, trained to fill in masked tokens (Devlin et al. 2018, arXiv 1810.04805)


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
        initialize_weights(self, config.layers)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> LanguageModelOutput:
        s = positions_in(input_ids, self.config.max_positions)
        positions = torch.arange(s, device=input_ids.device)
        x = self.dropout(self.embed_norm(self.embed(input_ids) + self.position(positions)))
        for block in self.blocks:
            x = block(x)
        x = self.norm(F.gelu(self.transform(x)))
        return LanguageModelOutput(*logits_and_loss(self.head, x, labels, self.config.chunked_loss))
