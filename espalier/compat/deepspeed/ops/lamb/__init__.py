"""``deepspeed.ops.lamb``."""

from espalier.compat.absent import or_absent
from espalier.compat.deepspeed.optimizers import Lamb as FusedLamb

__all__ = ["FusedLamb"]

__getattr__ = or_absent(
    __name__,
    "deepspeed.ops.lamb",
    {},
    elsewhere={"fused_lamb": __name__},
)
