"""``colossalai.booster``: today's interface of Colossal-AI."""

from espalier.compat.absent import or_absent
from espalier.compat.colossalai.booster import mixed_precision, plugin
from espalier.compat.colossalai.booster.booster import Booster
from espalier.compat.colossalai.booster.plugin import Plugin

__all__ = ["Booster", "Plugin", "mixed_precision", "plugin"]

__getattr__ = or_absent(
    __name__,
    "colossalai.booster",
    {"Accelerator": "colossalai.accelerator.get_accelerator() tells of the device"},
    elsewhere={"accelerator": __name__},
)
