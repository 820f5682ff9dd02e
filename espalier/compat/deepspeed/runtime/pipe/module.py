"""``deepspeed.runtime.pipe.module``."""

from espalier.compat.deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

__all__ = ["LayerSpec", "PipelineModule", "TiedLayerSpec"]
