"""Colossal-AI's interfaces: ``from espalier.compat import colossalai`` in place of ``import colossalai``.

The configuration of its paper, with ``launch``, ``initialize`` and ``Trainer``; and ``Booster`` with its
plugins. docs/colossal-ai.md says what maps to what.
"""

from espalier.compat.absent import or_absent
from espalier.compat.colossalai import (
    accelerator,
    booster,
    cluster,
    core,
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
from espalier.later import on_use

__version__ = "0.5.0"  # whose interface this is

__all__ = [
    "Booster",
    "Engine",
    "accelerator",
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
        "_analyzer": "`espalier plan` runs a model dry: it needs no memory and no other rank",
        "auto_parallel": "`espalier plan` searches for the fastest plan",
        "autochunk": "Plan(recompute=...) spares activations",
        "checkpoint_io": "booster.save_model, save_checkpoint and the like write checkpoints",
        "cli": "`espalier run -n 4 train.py` starts ranks, `espalier doctor` looks at the machine",
        "communication": "torch.distributed has collectives; stages of a pipeline send by themselves",
        "constants global_variables": "plans and their axes are named: engine.plan, engine.mesh",
        "device": "espalier.Mesh has named axes and their groups; `espalier calibrate` measures links",
        "fx": "`espalier plan` runs a model dry; stages are found in the model",
        "gemini": "Booster with GeminiPlugin lays parameters, gradients and states out",
        "inference": "engine.predict and engine.generate answer under any plan",
        "moe": "MoeHybridParallelPlugin(ep_size=n), or Plan(expert=n): experts are found in the model",
        "quantization": "weights are not quantised in training",
        "registry": "say the class where it is used: configurations name no classes here",
        "testing": "espalier.spawn(function, {'data': 2}) runs a function on ranks",
    },
    on_use(__name__, {"": "engine interface kernel pipeline shardformer tensor"}),
    elsewhere={
        "amp context": f"{__name__}.config",
        "builder": f"{__name__}.pipeline",
        "initialize legacy": __name__,
        "lazy": f"{__name__}.zero",
    },
)
