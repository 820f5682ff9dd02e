"""torch's own wrappers, by their names and arguments, on an engine.

A program goes on as it is after a change of its imports: ``from espalier.compat.torch import
DistributedDataParallel as DDP``, or ``from espalier.compat.torch import nn`` for ``nn.DataParallel``.
"""

from espalier.compat.torch import distributed, fsdp, nn, pipelining
from espalier.compat.torch.data_parallel import (
    DataParallel,
    DistributedDataParallel,
    ZeroRedundancyOptimizer,
)
from espalier.compat.torch.fsdp import FullyShardedDataParallel, fully_shard
from espalier.compat.torch.pipe import Pipe
from espalier.compat.torch.pipelining import PipelineStage, SplitPoint, pipeline

__all__ = [
    "DataParallel",
    "DistributedDataParallel",
    "FullyShardedDataParallel",
    "Pipe",
    "PipelineStage",
    "SplitPoint",
    "ZeroRedundancyOptimizer",
    "distributed",
    "fsdp",
    "fully_shard",
    "nn",
    "pipeline",
    "pipelining",
]
