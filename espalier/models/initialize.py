"""Initial weights, as GPT-2 draws them."""

import math
from collections.abc import Collection

from torch import nn


def initialize_weights(
    model: nn.Module, *, residual: Collection[str], additions: int, std: float = 0.02
) -> None:
    """Draw all Linear, Conv2d and Embedding weights from a normal distribution, biases zero.

    Args:
        model: changed in place.
        residual: last names of the Linear modules that add to the residual stream.
        additions: how many of them there are; their deviation is ``std / sqrt(additions)``,
            so that the stream's variance does not grow with depth.
        std: standard deviation of all other weights.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding | nn.Conv2d):
            scaled = name.rpartition(".")[2] in residual
            nn.init.normal_(module.weight, std=std / math.sqrt(additions) if scaled else std)
        if isinstance(module, nn.Linear | nn.Conv2d) and module.bias is not None:
            nn.init.zeros_(module.bias)
