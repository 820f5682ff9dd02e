"""``deepspeed.runtime.engine``."""

from espalier.compat.absent import or_absent
from espalier.compat.deepspeed.engine import DeepSpeedEngine

__all__ = ["DeepSpeedEngine"]

__getattr__ = or_absent(
    __name__,
    "deepspeed.runtime.engine",
    {"EngineTimers split_half_float_double_sparse": "engine.timers(name) are the engine's timers"},
)
