"""Sampling text from any model that maps token ids to logits."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from espalier.models.caches import keepers, keeping


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
    cache: bool = True,
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
        cache: whether attention keeps keys and values of earlier tokens, in models that are known to allow
            it (see ``caches``), as long as no tokens are dropped; else all are computed anew for each token.

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
    caches = ExitStack()
    try:
        found = keepers(model) if cache else []
        caches.enter_context(keeping(found))
        seen = 0  # tokens whose keys and values are kept
        for _ in range(max_new_tokens):
            context = ids if max_positions is None else ids[:, -max_positions:]
            if found and context.shape == ids.shape:
                positions = torch.arange(seen, ids.shape[1], device=ids.device).repeat(len(ids), 1)
                logits = model(ids[:, seen:], position_ids=positions).logits[:, -1, :]
                seen = ids.shape[1]
            else:
                caches.close()
                logits = model(context).logits[:, -1, :]
            ids = torch.cat((ids, _pick(logits, temperature, top_k, generator)), dim=1)
    finally:
        caches.close()
        model.train(was_training)
    return ids


class Generates(nn.Module):
    """A model that maps token ids to logits, of at most ``config.max_positions`` tokens."""

    config: Any

    def generate(
        self,
        ids: torch.Tensor,
        max_new_tokens: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        generator: torch.Generator | None = None,
        cache: bool = True,
    ) -> torch.Tensor:
        """Continue ``ids`` [batch, sequence] by ``max_new_tokens``; see `espalier.models.generate`."""
        return generate(
            self,
            ids,
            max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            generator=generator,
            max_positions=self.config.max_positions,
            cache=cache,
        )


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
