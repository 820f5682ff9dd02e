"""``deepspeed.runtime.pipe.module``."""

from espalier.compat.absent import or_absent
from espalier.compat.deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

__all__ = ["LayerSpec", "PipelineModule", "TiedLayerSpec"]

__getattr__ = or_absent(
    __name__, "deepspeed.runtime.pipe.module", {"PipelineError": "errors of a pipeline are ValueError"}
)
