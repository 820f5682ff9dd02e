"""``deepspeed.profiling``."""

from espalier.compat.deepspeed.profiling import flops_profiler

__all__ = ["flops_profiler"]
