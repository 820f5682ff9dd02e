"""``deepspeed.moe.sharded_moe``: the gate and the layer around it."""

from espalier.compat.absent import or_absent
from espalier.compat.deepspeed.moe.gate import TopKGate
from espalier.compat.deepspeed.moe.layer import MOELayer

__all__ = ["MOELayer", "TopKGate"]

__getattr__ = or_absent(
    __name__,
    "deepspeed.moe.sharded_moe",
    {
        "top1gating top2gating topkgating multiplicative_jitter gumbel_rsample einsum": (
            "TopKGate(model_dim, num_experts, k) gives each token's experts and weights"
        )
    },
)
