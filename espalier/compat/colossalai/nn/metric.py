"""``colossalai.nn.metric``."""

import torch
from torch import nn


class Accuracy(nn.Module):
    """How many of the highest logits are the labels."""

    def forward(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Their number."""
        return (logits.argmax(-1) == targets).sum()
