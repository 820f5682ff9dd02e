"""``deepspeed.ops.lamb``."""

from espalier.compat.deepspeed.optimizers import Lamb as FusedLamb

__all__ = ["FusedLamb"]
