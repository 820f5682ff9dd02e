"""Colossal-AI's interfaces: ``from espalier.compat import colossalai`` in place of ``import colossalai``.

The configuration of its paper, with ``launch``, ``initialize`` and ``Trainer``; and ``Booster`` with its
plugins. docs/colossal-ai.md says what maps to what.
"""

from espalier.compat.colossalai import amp, booster, core, logging, nn, trainer, utils, zero
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
