"""``deepspeed.runtime.pipe.topology``: grids of ranks."""

from espalier.compat.absent import or_absent
from espalier.compat.deepspeed.pipe import (
    PipeDataParallelTopology,
    PipeModelDataParallelTopology,
    ProcessTopology,
)

__all__ = ["PipeDataParallelTopology", "PipeModelDataParallelTopology", "ProcessTopology"]

__getattr__ = or_absent(
    __name__,
    "deepspeed.runtime.pipe.topology",
    {
        "PipelineParallelGrid": "the engine makes the groups: engine.get_data_parallel_group(), "
        "engine.engine.mesh.get_group(axis), or deepspeed.utils.groups"
    },
)
