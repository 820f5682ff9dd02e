"""``deepspeed.ops.lion``: one class, wherever it updates."""

from espalier.compat.deepspeed.optimizers import Lion as DeepSpeedCPULion
from espalier.compat.deepspeed.optimizers import Lion as FusedLion

__all__ = ["DeepSpeedCPULion", "FusedLion"]
