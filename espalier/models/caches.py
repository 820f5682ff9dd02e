"""Keys and values that attention keeps of earlier tokens, so that each token is computed once.

What is kept lives in the attention modules' calls, on whichever rank computes them: a model's own arguments
and outputs are as ever, but for the positions of its tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import nn

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
    found = [m for m in model.modules() if m in taking and not any(x in taking for x in _inner(m))]
    return found if all(getattr(m, "is_causal", False) for m in found) else []


@contextmanager
def keeping(modules: list[nn.Module]) -> Iterator[None]:
    """While open, attention modules keep keys and values, beginning with none."""
    before = [(m, vars(m).get("forward")) for m in modules]
    for m in modules:
        name = _name(m)
        assert name is not None
        m.forward = _with(m.forward, name, Past())
    try:
        yield
    finally:
        for m, forward in before:
            if forward is None:
                del m.forward
            else:
                m.forward = forward


def _with(forward: Callable[..., Any], name: str, past: Past) -> Callable[..., Any]:
    return lambda *args, **kwargs: forward(*args, **{**kwargs, name: past})


def _name(m: nn.Module) -> str | None:
    """What a module's forward calls earlier keys and values."""
    given = inspect.signature(type(m).forward).parameters
    return next((name for name in _NAMES if name in given), None)


def _inner(m: nn.Module) -> Iterator[nn.Module]:
    inner = m.modules()
    next(inner)
    return inner


__all__ = ["KNOWN", "Past", "keepers", "keeping"]
