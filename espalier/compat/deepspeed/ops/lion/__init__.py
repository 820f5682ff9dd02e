"""``deepspeed.ops.lion``: one class, wherever it updates."""

from espalier.compat.absent import or_absent
from espalier.compat.deepspeed.optimizers import Lion as DeepSpeedCPULion
from espalier.compat.deepspeed.optimizers import Lion as FusedLion

__all__ = ["DeepSpeedCPULion", "FusedLion"]

__getattr__ = or_absent(
    __name__,
    "deepspeed.ops.lion",
    {"multi_tensor_apply multi_tensor_applier": "updates are of many tensors at a time"},
    elsewhere={"fused_lion cpu_lion": __name__},
)
