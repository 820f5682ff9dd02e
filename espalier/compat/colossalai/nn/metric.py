"""``colossalai.nn.metric``."""

import torch
from torch import nn

from espalier.compat.absent import or_absent

__path__: list[str] = []  # there are modules in it


class Accuracy(nn.Module):
    """How many of the highest logits are the labels."""

    def forward(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Their number."""
        return (logits.argmax(-1) == targets).sum()


__all__ = ["Accuracy"]

__getattr__ = or_absent(
    __name__,
    "colossalai.nn.metric",
    {"Accuracy2D Accuracy2p5D Accuracy3D calc_acc": "Accuracy counts whole rows under any plan"},
    elsewhere={"accuracy_2d accuracy_2p5d accuracy_3d": __name__},
)
