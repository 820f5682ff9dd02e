"""What a language model returns."""

from typing import NamedTuple

import torch
import torch.nn.functional as F


class LanguageModelOutput(NamedTuple):
    """Output of a language model.

    Attributes:
        logits: [batch, sequence, vocabulary], unnormalized log-probabilities.
        loss: scalar mean cross-entropy in nats over the labels that are not
            -100; None where no labels were given.
    """

    logits: torch.Tensor
    loss: torch.Tensor | None = None


def token_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy in nats of aligned labels.

    Args:
        logits: [batch, sequence, vocabulary].
        labels: [batch, sequence]; ``labels[:, t]`` is the token that is to be told at
            position t (already shifted, if it is the next), or -100 to leave the position out.

    Logits of 16 bits are taken to float32 first: the loss would have three digits otherwise.
    """
    if logits.dtype.itemsize == 2:
        logits = logits.float()
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
