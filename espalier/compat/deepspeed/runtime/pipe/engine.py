"""``deepspeed.runtime.pipe.engine``."""

from espalier.compat.deepspeed.pipe_engine import PipelineEngine

__all__ = ["PipelineEngine"]
