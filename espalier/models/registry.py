"""Models by name."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from torch import nn

from espalier.models.bert import BERT, BERTConfig
from espalier.models.config import ConfigError, config_from_dict, nearest
from espalier.models.gpt import GPT, GPTConfig
from espalier.models.gpt2 import GPT2, GPT2Config
from espalier.models.moe import MoE, MoEConfig
from espalier.models.vit import ViT, ViTConfig

_KINDS: Mapping[str, tuple[type, Callable[[Any], nn.Module]]] = MappingProxyType(
    {
        "gpt": (GPTConfig, GPT),
        "gpt2": (GPT2Config, GPT2),
        "moe": (MoEConfig, MoE),
        "bert": (BERTConfig, BERT),
        "vit": (ViTConfig, ViT),
    }
)


def kinds() -> tuple[str, ...]:
    """The names that `build` knows."""
    return tuple(_KINDS)


def build(kind: str, config: Mapping[str, Any]) -> nn.Module:
    """Build a plain model by name.

    Args:
        kind: one of `kinds()`.
        config: fields of that model's config dataclass; what is left out has its default.

    Raises:
        ConfigError: naming every unknown key with the nearest known one, every
            value of the wrong type, or every size that does not fit another.
    """
    if kind not in _KINDS:
        close = nearest(kind, _KINDS)
        hint = f"did you mean {close!r}? " if close else ""
        raise ConfigError("models", [f"unknown kind {kind!r}: {hint}known kinds are {', '.join(_KINDS)}"])
    _, model = _KINDS[kind]
    return model(config_from_dict(config_class(kind), config))


def config_class(kind: str) -> type:
    """The config dataclass of one of `kinds()`."""
    return _KINDS[kind][0]
