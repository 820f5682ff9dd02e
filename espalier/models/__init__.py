"""Plain single-device models, with no word of parallelism in them.

Nothing here imports the rest of Espalier: each model is what a person would
write for one device, and must train under any plan just as it stands.
"""

from espalier.models.config import ConfigError, config_from_dict, nearest
from espalier.models.generate import generate
from espalier.models.gpt import GPT, GPTConfig
from espalier.models.gpt2 import GPT2, GPT2Config
from espalier.models.output import LanguageModelOutput
from espalier.models.registry import build, kinds

__all__ = [
    "GPT",
    "GPT2",
    "ConfigError",
    "GPT2Config",
    "GPTConfig",
    "LanguageModelOutput",
    "build",
    "config_from_dict",
    "generate",
    "kinds",
    "nearest",
]
