"""``deepspeed.sequence``: attention over sequences that ranks share."""

from espalier.compat.absent import or_absent
from espalier.compat.deepspeed.sequence import layer

__all__ = ["layer"]

_PLAN = "say sequence_parallel_size in the configuration: the model's own attention is cut"

__getattr__ = or_absent(
    __name__,
    "deepspeed.sequence",
    {
        "auto_sp autosp_detector autosp_fusion autosp_vit fpdt_layer": _PLAN,
        "cross_entropy linear_cross_entropy vocab_parallel_ops": (
            "call torch.nn.functional.cross_entropy: it takes logits that are cut over ranks"
        ),
    },
)
