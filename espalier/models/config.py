"""What the models share: configs that tell every mistake, first weights, output and loss."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn


def positions_in(input_ids: torch.Tensor, most: int) -> int:
    """The length of sequences [batch, sequence].

    Raises:
        ValueError: it is above ``most``.
    """
    s = input_ids.shape[1]
    if s > most:
        raise ValueError(
            f"a sequence of {s} tokens is longer than max_positions = {most}; "
            "shorten it or build the model with more positions"
        )
    return s


def initialize_weights(model: nn.Module, layers: int) -> None:
    """Draw all Linear, Conv2d and Embedding weights from a normal distribution, biases zero.

    Its deviation is 0.02; of the Linear modules that add to the residual stream, two in each of the
    ``layers``, ``0.02 / sqrt(2 * layers)``, so that the stream's variance does not grow with depth.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding | nn.Conv2d):
            adds = name.rpartition(".")[2] in ("o_proj", "down_proj")
            nn.init.normal_(module.weight, std=0.02 / math.sqrt(2 * layers) if adds else 0.02)
        if isinstance(module, nn.Linear | nn.Conv2d) and module.bias is not None:
            nn.init.zeros_(module.bias)


class LanguageModelOutput(NamedTuple):
    """Output of a language model.

    Attributes:
        logits: [batch, sequence, vocabulary], unnormalized log-probabilities; None of a model with
            ``chunked_loss`` that is given labels.
        loss: scalar mean cross-entropy in nats over the labels that are not
            -100; None where no labels were given.
    """

    logits: torch.Tensor | None
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


def logits_and_loss(
    head: nn.Linear, x: torch.Tensor, labels: torch.Tensor | None, chunked: bool
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """What a language model's head makes of its last hidden states, and the loss where there are labels.

    Args:
        x: [batch, sequence, hidden].
        chunked: with labels the loss is taken for a part of the tokens after the other, and there are no
            logits: they are never held for all tokens.

    Raises:
        ValueError: chunked, before torch 2.13.
    """
    if labels is None or not chunked:
        logits = head(x)
        return logits, None if labels is None else token_loss(logits, labels)
    if not (hasattr(F, "linear_cross_entropy") and hasattr(nn, "LinearCrossEntropyOptions")):
        raise ValueError(f"chunked_loss needs torch 2.13 or newer; this is {torch.__version__}")
    rows, options = x.flatten(0, 1), nn.LinearCrossEntropyOptions()
    loss = F.linear_cross_entropy(rows, head.weight, labels.flatten(), linear_bias=head.bias, options=options)
    return None, loss
