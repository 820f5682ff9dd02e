"""The configuration of Colossal-AI's paper as a plan: a dict, or a Python file whose names are its keys."""

from __future__ import annotations

import runpy
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from espalier.compat.absent import or_absent
from espalier.device import accelerator
from espalier.parallel import Plan
from espalier.texts import Mistake, MistakeError, similar, unknown_key

_OWNER = "Colossal-AI's configuration"
_TENSOR = {"size", "mode", "depth"}
_SCALE = set(
    "init_scale initial_scale growth_factor backoff_factor growth_interval min_scale hysteresis "
    "max_scale enabled log_num_zeros_in_grad verbose clip_grad_norm opt_level".split()
)
_KNOWN = tuple(
    "parallel fp16 zero gradient_accumulation clip_grad_norm gradient_handler cudnn_benchmark "
    "cudnn_deterministic use_zero torch_ddp".split()
)
# of these only the placement, and what scales losses, has an effect: how state is cut is the plan's
_OF_ZERO = {
    "model_config": (
        "tensor_placement_policy shard_strategy reduce_scatter_bucket_size_mb fp32_reduce_scatter "
        "gradient_predivide_factor reuse_fp16_shard"
    ),
    "optimizer_config": (
        "initial_scale min_scale growth_factor backoff_factor growth_interval hysteresis max_scale "
        "gpu_margin_mem_ratio verbose"
    ),
}
_TENSOR_MODES = ("1d", "2d", "2.5d", "3d", "sequence")


class Settings(dict[str, Any]):
    """A configuration whose keys are attributes too."""

    def __getattr__(self, name: str) -> Any:
        try:
            value = self[name]
        except KeyError:
            raise AttributeError(f"The configuration has no {name!r}.") from None
        if type(value) is dict:  # and stays the same object: programs take out of it what they have used
            value = self[name] = Settings(value)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value


def load(config: str | Path | Mapping[str, Any] | None) -> Settings:
    """A configuration: a dict, or a Python file, whose names are its keys.

    Raises:
        ValueError: there is no such file.
    """
    if config is None:
        return Settings()
    if isinstance(config, Mapping):
        return Settings(config)
    path = Path(config)
    if not path.is_file():
        raise ValueError(f"{_OWNER} {str(config)!r}: expected a dict or the path of a Python file.")
    names = runpy.run_path(str(path))
    return Settings(
        {k: x for k, x in names.items() if not k.startswith("_") and not hasattr(x, "__loader__")}
    )


def plan_of(config: Mapping[str, Any], ranks: int) -> Plan:
    """The plan of a configuration; keys of the program's own are left alone.

    Raises:
        ValueError: listing every mistake.
    """
    mistakes: list[Mistake] = []
    for key in config:
        if key.islower() and key not in _KNOWN and similar(key, _KNOWN, least=0.8):
            mistakes.append(unknown_key(key, config[key], _KNOWN))
    axes = _axes(config.get("parallel") or {}, ranks, mistakes)
    plan_fields: dict[str, Any] = {**axes}
    accumulate = config.get("gradient_accumulation", 1)
    micro = config.get("NUM_MICRO_BATCHES", 1)
    plan_fields["accumulate"] = (micro if axes.get("pipe", 1) > 1 else 1) * accumulate
    table = config.get("fp16") or {}
    plan_fields["clip"] = config.get("clip_grad_norm") or table.get("clip_grad_norm") or None
    plan_fields["precision"] = _precision(config, mistakes)
    if (zero := config.get("zero")) is not None:
        plan_fields.update(_zero(zero, mistakes))
    if config.get("gradient_handler"):
        expected = "gradients are summed by the layouts of their parameters: leave it out"
        mistakes.append(Mistake("gradient_handler", config["gradient_handler"], expected))
    if mistakes:
        raise MistakeError(_OWNER, mistakes)
    return Plan(**plan_fields)


def _axes(parallel: Mapping[str, Any], ranks: int, mistakes: list[Mistake]) -> dict[str, Any]:
    for key in parallel:
        if key not in ("data", "pipeline", "tensor"):
            mistakes.append(unknown_key(f"parallel.{key}", parallel[key], ("data", "pipeline", "tensor")))
    sizes: dict[str, int] = {}
    for key in ("data", "pipeline", "tensor"):
        setting = parallel.get(key)
        size = setting.get("size", 1) if isinstance(setting, Mapping) else setting
        sizes[key] = 1 if size is None else size
        if not isinstance(sizes[key], int) or sizes[key] < 1:
            mistakes.append(
                Mistake(f"parallel.{key}", setting, "expected a number of ranks, or dict(size=...)")
            )
            return {}
    tensor = parallel.get("tensor")
    options = dict(tensor) if isinstance(tensor, Mapping) else {}
    for key in options.keys() - _TENSOR:
        mistakes.append(unknown_key(f"parallel.tensor.{key}", options[key], _TENSOR))
    mode = options.get("mode") or "1d"
    if mode not in _TENSOR_MODES:
        expected = f"expected one of {', '.join(_TENSOR_MODES)}"
        mistakes.append(Mistake("parallel.tensor.mode", mode, expected))
        return {}
    each = sizes["pipeline"] * sizes["tensor"]
    if ranks % each:
        problem = f"{ranks} ranks are no multiple of pipeline {sizes['pipeline']} × tensor {sizes['tensor']}"
        mistakes.append(Mistake("parallel", dict(parallel), problem))
        return {}
    if parallel.get("data") is not None and sizes["data"] != ranks // each:
        problem = f"expected {ranks // each}: what {ranks} ranks leave"
        mistakes.append(Mistake("parallel.data", sizes["data"], problem))
    plan_fields: dict[str, Any] = {"pipe": sizes["pipeline"], "data": ranks // each}
    if mode == "sequence":
        return {**plan_fields, "context": sizes["tensor"]}
    plan_fields |= {"tensor": sizes["tensor"], "tensor_mode": mode if sizes["tensor"] > 1 else "1d"}
    if mode == "2.5d" and sizes["tensor"] > 1:
        plan_fields["depth"] = options.get("depth", 1)
    return plan_fields


def _precision(config: Mapping[str, Any], mistakes: list[Mistake]) -> Any:
    table = config.get("fp16")
    if table is None:
        if (zero := config.get("zero")) is None:
            return "float32"
        return {"compute": "float16", "loss_scale": scale_of(zero.get("optimizer_config") or {})}
    mode = table.get("mode")
    for key in table.keys() - _SCALE - {"mode"}:
        mistakes.append(unknown_key(f"fp16.{key}", table[key], sorted(_SCALE | {"mode"})))
    named = mode.name if isinstance(mode, AMP_TYPE) else str(mode or "torch").upper()
    if named not in AMP_TYPE.__members__:
        mistakes.append(
            Mistake("fp16.mode", mode, "expected AMP_TYPE.TORCH, AMP_TYPE.NAIVE or AMP_TYPE.APEX")
        )
        return "float32"
    whole = named == "NAIVE" or (named == "APEX" and table.get("opt_level", "O1") in ("O2", "O3"))
    if not table.get("enabled", True):  # the scaler: it stays at 1
        table = {"init_scale": 1.0, "growth_factor": 1.0, "backoff_factor": 1.0}
    return {"compute": "float16" if whole else "autocast-float16", "loss_scale": scale_of(table)}


def scale_of(table: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a loss scale, under the names that Colossal-AI has for them."""
    names = {
        "initial_scale": ("init_scale", float),
        "init_scale": ("init_scale", float),
        "growth_factor": ("growth_factor", float),
        "backoff_factor": ("backoff_factor", float),
        "growth_interval": ("growth_interval", int),
        "min_scale": ("min_scale", float),
        "hysteresis": ("hysteresis", int),
    }
    return {names[key][0]: names[key][1](x) for key, x in table.items() if key in names and x is not None}


def _zero(zero: Mapping[str, Any], mistakes: list[Mistake]) -> dict[str, Any]:
    for key in zero.keys() - {"model_config", "optimizer_config"}:
        mistakes.append(unknown_key(f"zero.{key}", zero[key], ("model_config", "optimizer_config")))
    for section, known in _OF_ZERO.items():
        for key in (zero.get(section) or {}).keys() - {*known.split()}:
            mistakes.append(unknown_key(f"zero.{section}.{key}", zero[section][key], known.split()))
    policy = (zero.get("model_config") or {}).get("tensor_placement_policy", "device")
    return {"zero": 3, **offload_of(policy, mistakes, "zero.model_config.tensor_placement_policy")}


def offload_of(policy: str, mistakes: list[Mistake], key: str) -> dict[str, Any]:
    """Where state lies, by a placement policy: ``"cpu"``, ``"auto"``, else on the device."""
    if policy == "cpu":
        return {"offload": dict.fromkeys(("parameters", "gradients", "states"), "host")}
    kind = accelerator()
    if policy == "auto":
        if kind is None:
            return {}  # a CPU's memory is the host's
        return {"offload": dict.fromkeys(("parameters", "gradients", "states"), "auto")}
    if policy not in ("device", kind, None):
        mistakes.append(Mistake(key, policy, "expected cpu, auto, or the accelerator's name"))
    return {}


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


class AMP_TYPE(Enum):
    """Under autocast (TORCH, APEX), or with parameters in float16 (NAIVE)."""

    APEX = "apex"
    TORCH = "torch"
    NAIVE = "naive"


__all__ = [
    "AMP_TYPE",
    "Config",
    "ConfigException",
    "ParallelMode",
]

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
        "apex_amp torch_amp": "the configuration, or Booster(mixed_precision=), says the precision",
        "naive_amp": "Plan(precision={'compute': 'float16', 'loss_scale': {...}}) scales losses",
        "convert_to_amp convert_to_apex_amp convert_to_naive_amp convert_to_torch_amp": (
            "fp16 = dict(mode=AMP_TYPE.TORCH) in the configuration says it"
        ),
    },
    elsewhere={"amp_type config moe_context parallel_context parallel_mode random seed_manager": __name__},
)
