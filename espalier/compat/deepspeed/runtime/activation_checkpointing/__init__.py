"""``deepspeed.runtime.activation_checkpointing``."""

from espalier.compat.absent import or_absent
from espalier.compat.deepspeed.runtime.activation_checkpointing import checkpointing

__all__ = ["checkpointing"]

__getattr__ = or_absent(
    __name__,
    "deepspeed.runtime.activation_checkpointing",
    {
        "config": "say the section activation_checkpointing as a dict: deepspeed.initialize(config=)",
        "offload_activations": 'plan={"recompute_inputs": "host"} lays them on the host',
    },
)
