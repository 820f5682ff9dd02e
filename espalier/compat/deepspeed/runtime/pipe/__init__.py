"""``deepspeed.runtime.pipe``: what ``deepspeed.pipe`` has, under the names of its modules."""

from espalier.compat.absent import or_absent
from espalier.compat.deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from espalier.compat.deepspeed.runtime.pipe import engine, module, topology
from espalier.compat.deepspeed.topologies import ProcessTopology

__all__ = [
    "LayerSpec",
    "PipelineModule",
    "ProcessTopology",
    "TiedLayerSpec",
    "engine",
    "module",
    "topology",
]

__getattr__ = or_absent(
    __name__,
    "deepspeed.runtime.pipe",
    {
        "schedule": 'plan={"schedule": name} of deepspeed.initialize says it: espalier schedules shows them',
        "dualpipev DualPipeVModule": 'plan={"schedule": "dualpipe-v"} says it of a PipelineModule',
        "p2p": "stages send by the engine; torch.distributed has send and recv",
    },
)
