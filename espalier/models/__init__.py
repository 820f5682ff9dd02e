"""Plain single-device models, with no word of parallelism in them.

Nothing here imports the rest of Espalier: each model is what a person would
write for one device, and must train under any plan just as it stands.
"""

from espalier.models.bert import BERT, BERTConfig
from espalier.models.config import ConfigError, config_from_dict, nearest
from espalier.models.generate import generate
from espalier.models.gpt import GPT, GPTConfig
from espalier.models.gpt2 import GPT2, GPT2Config
from espalier.models.moe import MoE, MoEConfig, MoEOutput
from espalier.models.output import LanguageModelOutput
from espalier.models.registry import build, config_class, kinds
from espalier.models.vit import ImageOutput, ViT, ViTConfig

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
