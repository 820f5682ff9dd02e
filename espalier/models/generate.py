"""Sampling text from any model that maps token ids to logits."""

import torch
from torch import nn


@torch.no_grad()
def generate(
    model: nn.Module,
    ids: torch.Tensor,
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    generator: torch.Generator | None = None,
    max_positions: int | None = None,
) -> torch.Tensor:
    """Continue ``ids`` token by token.

    Args:
        model: called as ``model(ids)``; its output has ``.logits`` [batch, sequence, vocabulary].
        ids: [batch, sequence] integer prompt with at least one token.
        max_new_tokens: how many tokens to add.
        temperature: logits are divided by it; 0 takes the likeliest token.
        top_k: draw among the ``top_k`` likeliest tokens only.
        generator: source of the random draws.
        max_positions: longest context to show the model; earlier tokens are dropped.

    Returns:
        [batch, sequence + max_new_tokens], the prompt included.

    Raises:
        ValueError: for an empty prompt, a negative temperature or ``top_k`` below 1.
    """
    if ids.dim() != 2 or ids.shape[1] == 0:
        raise ValueError(
            f"ids must be [batch, sequence] with at least one token to continue, got {list(ids.shape)}"
        )
    if temperature < 0:
        raise ValueError(f"temperature must be 0 (likeliest token) or above, got {temperature}")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k must be at least 1, or None for no limit, got {top_k}")
    was_training = model.training
    model.eval()
    try:
        for _ in range(max_new_tokens):
            context = ids if max_positions is None else ids[:, -max_positions:]
            logits = model(context).logits[:, -1, :]
            ids = torch.cat((ids, _pick(logits, temperature, top_k, generator)), dim=1)
    finally:
        model.train(was_training)
    return ids


def _pick(
    logits: torch.Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None
) -> torch.Tensor:
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    logits = logits.float() / temperature
    if top_k is not None:
        smallest = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < smallest, float("-inf"))
    return torch.multinomial(logits.softmax(-1), 1, generator=generator)
