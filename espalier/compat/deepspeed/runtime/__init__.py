"""``deepspeed.runtime``: what programs take from there."""

from espalier.compat.deepspeed.runtime import lr_schedules

__all__ = ["lr_schedules"]
