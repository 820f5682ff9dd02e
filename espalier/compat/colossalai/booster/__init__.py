"""``colossalai.booster``: today's interface of Colossal-AI."""

from espalier.compat.colossalai.booster import plugin
from espalier.compat.colossalai.booster.booster import Booster

__all__ = ["Booster", "plugin"]
