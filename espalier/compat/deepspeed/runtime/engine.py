"""``deepspeed.runtime.engine``."""

from espalier.compat.deepspeed.engine import DeepSpeedEngine

__all__ = ["DeepSpeedEngine"]
