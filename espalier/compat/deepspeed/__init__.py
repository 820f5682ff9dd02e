"""DeepSpeed's interface: ``from espalier.compat import deepspeed`` in place of ``import deepspeed``.

The configuration becomes a plan, an optimizer and a schedule (``config``, ``keys``); ``initialize`` gives an
engine under DeepSpeed's names (``engine``). docs/deepspeed.md says what maps to what.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from espalier.compat.absent import or_absent
from espalier.later import on_use

if TYPE_CHECKING:
    import argparse

    from espalier.compat.deepspeed import (
        accelerator,
        checkpointing,
        comm,
        inference,
        launcher,
        moe,
        monitor,
        ops,
        pipe,
        profiling,
        runtime,
        sequence,
        utils,
        zero,
    )
    from espalier.compat.deepspeed.accelerator import get_accelerator
    from espalier.compat.deepspeed.config import Config, DeepSpeedConfig, DeepSpeedConfigError, read
    from espalier.compat.deepspeed.engine import DeepSpeedEngine
    from espalier.compat.deepspeed.groups import init_distributed
    from espalier.compat.deepspeed.inference import InferenceEngine, init_inference
    from espalier.compat.deepspeed.pipe import LayerSpec, PipelineEngine, PipelineModule, TiedLayerSpec
    from espalier.compat.deepspeed.starting import initialize, tp_model_init
    from espalier.compat.deepspeed.utils import OnDevice, log_dist, logger
else:  # what starts the ranks needs none of it
    __getattr__ = or_absent(
        __name__,
        "deepspeed",
        {
            "DeepSpeedHybridEngine": "engine.engine.generate(ids, n) writes text under any plan",
            "DualPipeVEngine DualPipeVModule": 'plan={"schedule": "dualpipe-v"} says it of a PipelineModule',
            "DeepSpeedTransformerLayer DeepSpeedTransformerConfig replace_transformer_layer module_inject": (
                "models run as they are written: engine.compile() compiles their blocks"
            ),
            "DeepSpeedInferenceConfig default_inference_config": "init_inference(config={...}) takes a dict",
            "DeepSpeedOptimizer": "engine.optimizer is torch's own",
            "set_autotp_mode set_optimizer_flags resolve_per_head_muon_after_sharding": "leave it out: "
            "tensor_parallel.autotp_size in the configuration is enough",
            "autotuning": "`espalier plan JOB.toml` searches for the fastest plan",
            "compile": "engine.compile() compiles the model's blocks, collectives included",
            "model_implementations": "models run as they are written: engine.compile() compiles their blocks",
            "datastates": "engine.engine.save(folder, asynchronous=True) writes beside the training",
            "elasticity": "DeepSpeed has dropped it. Say the batch; a checkpoint loads on any number of "
            "ranks",
            "compat constants git_version_info git_version_info_installed": (
                "deepspeed.__version__ says whose interface this is"
            ),
            "compression": "weights are not quantised or pruned in training",
            "nvme io": "Offload(directory=) says where states lie on a disk",
            "linear": "peft's LoRA is laid out as it is",
            "checkpoint": "engine.load_checkpoint and `espalier import` read what DeepSpeed wrote",
            "env_report": "`espalier doctor` tells of the machine",
        },
        on_use(
            __name__,
            {
                "": "accelerator checkpointing comm inference launcher moe monitor ops pipe profiling "
                "runtime sequence utils zero",
                "accelerator": "get_accelerator",
                "config": "Config DeepSpeedConfig DeepSpeedConfigError read",
                "engine": "DeepSpeedEngine",
                "groups": "init_distributed",
                "inference": "InferenceEngine init_inference",
                "pipe": "LayerSpec PipelineEngine PipelineModule TiedLayerSpec",
                "starting": "initialize tp_model_init",
                "utils": "OnDevice log_dist logger",
            },
        ),
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
    "DeepSpeedConfig",
    "DeepSpeedConfigError",
    "DeepSpeedEngine",
    "InferenceEngine",
    "LayerSpec",
    "OnDevice",
    "PipelineEngine",
    "PipelineModule",
    "TiedLayerSpec",
    "accelerator",
    "add_config_arguments",
    "checkpointing",
    "comm",
    "get_accelerator",
    "inference",
    "init_distributed",
    "init_inference",
    "initialize",
    "launcher",
    "log_dist",
    "logger",
    "moe",
    "monitor",
    "ops",
    "pipe",
    "profiling",
    "read",
    "runtime",
    "sequence",
    "tp_model_init",
    "utils",
    "zero",
]
