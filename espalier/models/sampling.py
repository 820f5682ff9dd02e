"""Sampling text from any model that maps token ids to logits.

Keys and values of earlier tokens are kept, so that each token is computed once. They live in the attention
modules' calls, on whichever rank computes them: a model's own arguments and outputs are as ever, but for the
positions of its tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Final

import torch
from torch import nn

from espalier.blocks import around


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
        model: called as ``model(ids)``; see :func:`logits_of`.
        ids: [batch, sequence] integer prompt with at least one token.
        max_new_tokens: how many tokens to add.
        temperature: logits are divided by it; 0 takes the likeliest token.
        top_k: draw among the ``top_k`` likeliest tokens only.
        generator: source of the random draws.
        max_positions: longest context to show the model; earlier tokens are dropped.
        cache: whether attention keeps keys and values of earlier tokens, in models that are known to allow
            it (``KNOWN``), as long as no tokens are dropped; else all are computed anew for each token.

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
        caching = keepers(model) if cache else []
        caches.enter_context(keeping(caching))
        seen = 0  # tokens whose keys and values are kept
        for _ in range(max_new_tokens):
            context = ids if max_positions is None else ids[:, -max_positions:]
            if caching and context.shape == ids.shape:
                positions = torch.arange(seen, ids.shape[1], device=ids.device).repeat(len(ids), 1)
                logits = logits_of(model(ids[:, seen:], position_ids=positions))[:, -1, :]
                seen = ids.shape[1]
            else:
                caches.close()
                logits = logits_of(model(context))[:, -1, :]
            ids = torch.cat((ids, _pick(logits, temperature, top_k, generator)), dim=1)
    finally:
        caches.close()
        model.train(was_training)
    return ids


def logits_of(output: Any) -> torch.Tensor:
    """The logits [batch, sequence, vocabulary] in what a model gives: itself, or its ``logits``.

    Raises:
        ValueError: it has none.
    """
    if isinstance(output, torch.Tensor):
        return output
    logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    if isinstance(logits, torch.Tensor):
        return logits
    raise ValueError(
        f"The model returned {type(output).__name__} without logits. Let model(input_ids) return them, or an "
        "output (or a dict) that has them as logits."
    )


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


# ---- what attention keeps

# transformers' models that are known to see earlier tokens by their attention alone, by model_type
KNOWN: Final = frozenset("gpt2 gpt_neox gptj llama mistral phi qwen2 qwen3".split())
_NAMES = ("past_key_values", "layer_past")  # what attention calls it


class Past:
    """Keys and values of one attention module, [b, heads, tokens, head_dim] each; as transformers' caches."""

    def __init__(self) -> None:
        self._kept: tuple[torch.Tensor, torch.Tensor] | None = None

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Those of all tokens so far, of which these are the last."""
        if self._kept is not None:
            keys = torch.cat((self._kept[0], keys), dim=2)
            values = torch.cat((self._kept[1], values), dim=2)
        self._kept = keys, values
        return keys, values

    def get_seq_length(self, *_: Any) -> int:
        """How many tokens there were."""
        return 0 if self._kept is None else self._kept[0].shape[2]


def keepers(model: Any) -> list[nn.Module]:
    """The attention modules that can keep keys and values; none if not all that a token sees is in these."""
    config = getattr(model, "config", None)
    kind = getattr(config, "model_type", None)
    ours = (type(config).__module__ or "").partition(".")[0] == "espalier"
    if not (ours or kind in KNOWN) or "position_ids" not in inspect.signature(model.forward).parameters:
        return []
    if getattr(config, "sliding_window", None) is not None and getattr(config, "use_sliding_window", True):
        return []
    if getattr(config, "capacity", None) is not None:
        return []  # whether an expert has room for a token depends on the earlier ones, beside attention
    taking = {m for m in model.modules() if _name(m) is not None}
    layers = [m for m in model.modules() if m in taking and not any(x in taking for x in _inner(m))]
    return layers if all(getattr(m, "is_causal", False) for m in layers) else []


@contextmanager
def keeping(modules: list[nn.Module]) -> Iterator[None]:
    """While open, attention modules keep keys and values, beginning with none."""
    with ExitStack() as put_around:
        for m in modules:
            name = _name(m)
            assert name is not None
            put_around.callback(around(m, partial(_with, {name: Past()})))
        yield


def _with(past: dict[str, Past], _: Any, own: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    return own(*args, **kwargs | past)


def _name(m: nn.Module) -> str | None:
    """What a module's forward calls earlier keys and values."""
    parameters = inspect.signature(type(m).forward).parameters
    return next((name for name in _NAMES if name in parameters), None)


def _inner(m: nn.Module) -> Iterator[nn.Module]:
    inner = m.modules()
    next(inner)
    return inner
