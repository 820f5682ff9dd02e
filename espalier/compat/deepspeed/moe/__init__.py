"""``deepspeed.moe``: layers of experts with DeepSpeed's own gates, on :mod:`espalier.parallel.experts`."""

from espalier.compat.absent import or_absent
from espalier.compat.deepspeed.moe import experts, layer, sharded_moe, utils
from espalier.compat.deepspeed.moe.layer import MoE

__all__ = ["MoE", "experts", "layer", "sharded_moe", "utils"]

_PLAN = "experts are a stack that the plan cuts: MoE(ep_size=n), or plan={'expert': n}"

__getattr__ = or_absent(
    __name__,
    "deepspeed.moe",
    {
        "ep_count ep_experts ep_kernels ep_repack ep_router ep_tp_dispatch fused_expert_layout": _PLAN,
        "mappings": "tokens are cut and gathered over the tensor axis by the layouts of the layers",
    },
)
