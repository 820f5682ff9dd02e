"""``deepspeed.profiling``."""

from espalier.compat.absent import or_absent
from espalier.compat.deepspeed.profiling import flops_profiler

__all__ = ["flops_profiler"]

__getattr__ = or_absent(
    __name__,
    "deepspeed.profiling",
    {"config constants": "say the section flops_profiler as a dict: deepspeed.initialize(config=)"},
)
