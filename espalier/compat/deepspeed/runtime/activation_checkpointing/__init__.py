"""``deepspeed.runtime.activation_checkpointing``."""

from espalier.compat.deepspeed.runtime.activation_checkpointing import checkpointing

__all__ = ["checkpointing"]
