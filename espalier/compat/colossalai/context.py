"""``colossalai.context``: configurations, and by what ranks are grouped."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from espalier.compat.absent import or_absent
from espalier.compat.colossalai.config import Settings, load

__path__: list[str] = []  # there are modules in it


class ParallelMode(Enum):
    """What the ranks of a group share."""

    GLOBAL = "global"
    DATA = "data"
    MODEL = "model"
    PIPELINE = "pipe"
    TENSOR = "tensor"
    SEQUENCE = "sequence"
    SEQUENCE_DP = "sequence_dp"
    PARALLEL_1D = "1d"
    PARALLEL_2D_ROW = "2d_row"
    PARALLEL_2D_COL = "2d_col"
    PARALLEL_3D_INPUT = "3d_input"
    PARALLEL_3D_WEIGHT = "3d_weight"
    PARALLEL_3D_OUTPUT = "3d_output"
    PARALLEL_3D_INPUT_X_WEIGHT = "3d_input_x_weight"
    PARALLEL_3D_OUTPUT_X_WEIGHT = "3d_output_x_weight"
    PARALLEL_2P5D_ROW = "2p5d_row"
    PARALLEL_2P5D_COL = "2p5d_col"
    PARALLEL_2P5D_DEP = "2p5d_dep"
    PARALLEL_2P5D_XZ = "2p5d_xz"


class ConfigException(Exception):
    """Never raised: a wrong configuration is a ValueError that lists what is wrong."""


class Config(Settings):
    """A configuration whose keys are attributes."""

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        super().__init__(config or {})

    @staticmethod
    def from_file(filename: str | Path) -> Config:
        """The names of a Python file."""
        return Config(load(filename))


__all__ = ["Config", "ConfigException", "ParallelMode"]

__getattr__ = or_absent(
    __name__,
    "colossalai.context",
    {
        "process_group_initializer": "engine.mesh has the axes and their groups",
        "Initializer_1D Initializer_2D Initializer_2p5D Initializer_3D Initializer_Data Initializer_Model "
        "Initializer_Pipeline Initializer_Sequence Initializer_Tensor ProcessGroupInitializer": (
            "engine.mesh has the axes and their groups"
        ),
        "ParallelContext": "colossalai.core.global_context is the only one",
        "seed set_mode with_seed add_seed get_seeds get_states get_current_mode set_seed_states sync_states "
        "moe_set_seed reset_seeds SeedManager": (
            "random values are those of the model on one device, whatever its layout: leave it out"
        ),
        "MOE_CONTEXT": "Plan(expert=n): experts are found in the model",
    },
    elsewhere={"config moe_context parallel_context parallel_mode random seed_manager": __name__},
)
