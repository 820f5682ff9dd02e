"""``deepspeed.runtime.pipe``: what ``deepspeed.pipe`` has, under the names of its modules."""

from espalier.compat.deepspeed.pipe import LayerSpec, PipelineModule, ProcessTopology, TiedLayerSpec
from espalier.compat.deepspeed.runtime.pipe import engine, module, topology

__all__ = [
    "LayerSpec",
    "PipelineModule",
    "ProcessTopology",
    "TiedLayerSpec",
    "engine",
    "module",
    "topology",
]
