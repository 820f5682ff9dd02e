"""DeepSpeed's interface: ``from espalier.compat import deepspeed`` in place of ``import deepspeed``.

The configuration becomes a plan, an optimizer and a schedule (``config``, ``keys``); ``initialize`` gives an
engine under DeepSpeed's names (``engine``). docs/deepspeed.md says what maps to what.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from espalier.later import on_use

if TYPE_CHECKING:
    import argparse

    from espalier.compat.deepspeed import (
        accelerator,
        checkpointing,
        comm,
        moe,
        ops,
        pipe,
        runtime,
        utils,
        zero,
    )
    from espalier.compat.deepspeed.accelerator import get_accelerator
    from espalier.compat.deepspeed.config import Config, read
    from espalier.compat.deepspeed.engine import DeepSpeedEngine, init_distributed
    from espalier.compat.deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
    from espalier.compat.deepspeed.pipe_engine import PipelineEngine
    from espalier.compat.deepspeed.starting import initialize
else:  # what starts the ranks needs none of it
    __getattr__ = on_use(
        __name__,
        {
            "": "accelerator checkpointing comm moe ops pipe runtime utils zero",
            "accelerator": "get_accelerator",
            "config": "Config read",
            "engine": "DeepSpeedEngine init_distributed",
            "pipe": "LayerSpec PipelineModule TiedLayerSpec",
            "pipe_engine": "PipelineEngine",
            "starting": "initialize",
        },
    )

__version__ = "0.19.0"  # whose interface this is


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """``--deepspeed`` and ``--deepspeed_config`` for a program's arguments."""
    group = parser.add_argument_group("DeepSpeed")
    group.add_argument("--deepspeed", action="store_true", help="Train by DeepSpeed's interface.")
    group.add_argument("--deepspeed_config", default=None, type=str, help="The configuration, a JSON file.")
    return parser


__all__ = [
    "Config",
    "DeepSpeedEngine",
    "LayerSpec",
    "PipelineEngine",
    "PipelineModule",
    "TiedLayerSpec",
    "accelerator",
    "add_config_arguments",
    "checkpointing",
    "comm",
    "get_accelerator",
    "init_distributed",
    "initialize",
    "moe",
    "ops",
    "pipe",
    "read",
    "runtime",
    "utils",
    "zero",
]
