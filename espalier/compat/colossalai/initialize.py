"""``colossalai.initialize``, a module whose name is also that of one of its functions."""

from espalier.compat.colossalai.core import (
    launch,
    launch_from_openmpi,
    launch_from_slurm,
    launch_from_torch,
)
from espalier.compat.colossalai.engine import initialize
from espalier.compat.colossalai.utils import get_default_parser

__all__ = [
    "get_default_parser",
    "initialize",
    "launch",
    "launch_from_openmpi",
    "launch_from_slurm",
    "launch_from_torch",
]
