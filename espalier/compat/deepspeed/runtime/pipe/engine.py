"""``deepspeed.runtime.pipe.engine``."""

from espalier.compat.absent import or_absent
from espalier.compat.deepspeed.pipe_engine import PipelineEngine

__all__ = ["PipelineEngine"]

__getattr__ = or_absent(
    __name__, "deepspeed.runtime.pipe.engine", {"is_even": "it is DeepSpeed's own: leave it out"}
)
