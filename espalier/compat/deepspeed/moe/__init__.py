"""``deepspeed.moe``: layers of experts with DeepSpeed's own gates, on :mod:`espalier.parallel.experts`."""

from espalier.compat.deepspeed.moe import layer, utils
from espalier.compat.deepspeed.moe.layer import MoE

__all__ = ["MoE", "layer", "utils"]
