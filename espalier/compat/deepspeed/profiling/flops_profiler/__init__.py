"""``deepspeed.profiling.flops_profiler``: the arithmetic of a model."""

from espalier.compat.deepspeed.profiling.flops_profiler import profiler
from espalier.compat.deepspeed.profiling.flops_profiler.profiler import FlopsProfiler, get_model_profile

__all__ = ["FlopsProfiler", "get_model_profile", "profiler"]

__getattr__ = profiler.__getattr__
