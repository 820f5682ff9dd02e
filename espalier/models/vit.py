"""A vision transformer: patches of an image as tokens, attended to from both sides (arXiv 2010.11929)."""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from espalier.models.config import below_one, no_probability, raise_if
from espalier.models.gpt2 import Block
from espalier.models.initialize import initialize_weights


@dataclass(frozen=True, kw_only=True)
class ViTConfig:
    """Sizes of a `ViT`.

    Attributes:
        image: height and width of an image, a multiple of ``patch``.
        patch: height and width of a patch.
        channels: of an image.
        classes: number of classes.
        layers: number of blocks.
        hidden: width of the residual stream, a multiple of ``heads``.
        heads: number of attention heads.
        ffn: inner width of the feed-forward layer; ``4 hidden`` when None.
        dropout: probability, after the embeddings, in attention and after each block's two halves.
        bias: whether Linear, Conv2d and LayerNorm have biases.
        norm_eps: added to the variance in LayerNorm.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    image: int = 32
    patch: int = 4
    channels: int = 3
    classes: int = 10
    layers: int = 4
    hidden: int = 192
    heads: int = 6
    ffn: int | None = None
    dropout: float = 0.0
    bias: bool = True
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        raise_if("ViTConfig", self._mistakes())

    def _mistakes(self) -> list[str]:
        positive = ("image", "patch", "channels", "classes", "layers", "hidden", "heads", "ffn")
        found = below_one(self, positive)
        if not found and self.hidden % self.heads:
            found.append(f"hidden = {self.hidden} is not a multiple of heads = {self.heads}")
        if not found and self.image % self.patch:
            found.append(f"image = {self.image} is not a multiple of patch = {self.patch}")
        return found + no_probability(self.dropout)

    @property
    def size_of_ffn(self) -> int:
        """Inner width of the feed-forward layer."""
        return self.ffn or 4 * self.hidden


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
        initialize_weights(self, residual=("o_proj", "down_proj"), additions=2 * config.layers)

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
