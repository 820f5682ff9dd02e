"""Plain single-device models, with no word of parallelism in them.

Nothing here imports the rest of Espalier, but for the texts of mistakes and what stands around a module's
forward: each model is what a person would write for one device, and must train under any plan just as it
stands.
"""

from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from espalier.later import on_use
from espalier.models.sizes import (
    BERTConfig,
    ConfigError,
    GPT2Config,
    GPTConfig,
    MoEConfig,
    ViTConfig,
    config_from_dict,
)
from espalier.texts import did_you_mean, nearest

if TYPE_CHECKING:
    from torch import nn

    from espalier.models.config import LanguageModelOutput
    from espalier.models.encoders import BERT, ImageOutput, ViT
    from espalier.models.gpt import GPT
    from espalier.models.gpt2 import GPT2
    from espalier.models.moe import MoE, MoEOutput
    from espalier.models.sampling import generate
else:
    __getattr__ = on_use(
        __name__,
        {
            "config": "LanguageModelOutput",
            "encoders": "BERT ImageOutput ViT",
            "gpt": "GPT",
            "gpt2": "GPT2",
            "moe": "MoE MoEOutput",
            "sampling": "generate",
        },
    )

# the sizes of a kind of model, and where the model is
_KINDS: Mapping[str, tuple[type, str, str]] = MappingProxyType(
    {
        "gpt": (GPTConfig, "gpt", "GPT"),
        "gpt2": (GPT2Config, "gpt2", "GPT2"),
        "moe": (MoEConfig, "moe", "MoE"),
        "bert": (BERTConfig, "encoders", "BERT"),
        "vit": (ViTConfig, "encoders", "ViT"),
    }
)

__all__ = [
    "BERT",
    "GPT",
    "GPT2",
    "BERTConfig",
    "ConfigError",
    "GPT2Config",
    "GPTConfig",
    "ImageOutput",
    "LanguageModelOutput",
    "MoE",
    "MoEConfig",
    "MoEOutput",
    "ViT",
    "ViTConfig",
    "build",
    "config_class",
    "config_from_dict",
    "generate",
    "kinds",
    "nearest",
]


def kinds() -> tuple[str, ...]:
    """The names that `build` knows."""
    return tuple(_KINDS)


def build(kind: str, config: Mapping[str, Any]) -> "nn.Module":
    """Build a plain model by name.

    Args:
        kind: one of `kinds()`.
        config: fields of that model's config dataclass; what is left out has its default.

    Raises:
        ConfigError: naming every unknown key with the nearest known one, every
            value of the wrong type, or every size that does not fit another.
    """
    if kind not in _KINDS:
        hint = did_you_mean(kind, _KINDS, lead="; ")
        raise ConfigError("models", [("kind", kind, f"expected one of {', '.join(_KINDS)}{hint}")])
    kind_of_config, module, name = _KINDS[kind]
    model: nn.Module = getattr(import_module(f"{__name__}.{module}"), name)(
        config_from_dict(kind_of_config, config)
    )
    return model


def config_class(kind: str) -> type:
    """The config dataclass of one of `kinds()`."""
    return _KINDS[kind][0]
