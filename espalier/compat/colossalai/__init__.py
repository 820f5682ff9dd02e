"""Colossal-AI's interfaces: ``from espalier.compat import colossalai`` in place of ``import colossalai``.

The configuration of its paper, with ``launch``, ``initialize`` and ``Trainer``; and ``Booster`` with its
plugins. docs/colossal-ai.md says what maps to what.
"""

from espalier.compat.absent import or_absent
from espalier.compat.colossalai import (
    amp,
    booster,
    cluster,
    core,
    lazy,
    logging,
    nn,
    trainer,
    utils,
    zero,
)
from espalier.compat.colossalai.booster import Booster
from espalier.compat.colossalai.core import (
    global_context,
    launch,
    launch_from_openmpi,
    launch_from_slurm,
    launch_from_torch,
)
from espalier.compat.colossalai.engine import Engine, initialize
from espalier.compat.colossalai.utils import get_default_parser

__all__ = [
    "Booster",
    "Engine",
    "amp",
    "booster",
    "cluster",
    "core",
    "get_default_parser",
    "global_context",
    "initialize",
    "launch",
    "launch_from_openmpi",
    "launch_from_slurm",
    "launch_from_torch",
    "lazy",
    "logging",
    "nn",
    "trainer",
    "utils",
    "zero",
]

__getattr__ = or_absent(
    __name__,
    "colossalai",
    {
        "shardformer pipeline checkpoint_io interface": "Booster and its plugins cut, run and save models",
        "legacy": "its names are those of colossalai itself here: colossalai.trainer, colossalai.core",
        "context": "colossalai.core.global_context tells of ranks",
        "accelerator": "colossalai.utils.get_current_device(), or torch.accelerator",
        "moe": "plan={'expert': n}: experts are found in the model",
        "tensor fx auto_parallel builder": "models are plain modules; `espalier plan` searches for a plan",
        "inference": "engine.predict and engine.generate answer under any plan",
    },
)
