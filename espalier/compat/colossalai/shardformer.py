"""``colossalai.shardformer``: what configurations of plugins hold; how models are cut is seen in them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from espalier.compat.absent import or_absent


@dataclass
class GradientCheckpointConfig:
    """Blocks are computed again: all of them, as a plan says it. Results do not hang on it."""

    gradient_checkpointing_ratio: float = 0.0

    def get_num_ckpt_layers(self, num_layers: int) -> int:
        """How many Colossal-AI would compute again."""
        return int(self.gradient_checkpointing_ratio * num_layers)


@dataclass
class PipelineGradientCheckpointConfig(GradientCheckpointConfig):
    """As :class:`GradientCheckpointConfig`."""

    num_ckpt_layers_per_stage: list[int] | None = None


@dataclass
class SubModuleReplacementDescription:
    """Of a :class:`Policy`."""

    suffix: str
    target_module: Any
    kwargs: dict[str, Any] | None = None
    ignore_if_not_exist: bool = False


@dataclass
class ModulePolicyDescription:
    """Of a :class:`Policy`."""

    attribute_replacement: dict[str, Any] | None = None
    param_replacement: list[Callable[..., Any]] | None = None
    sub_module_replacement: list[SubModuleReplacementDescription] | None = None
    method_replacement: dict[str, Callable[..., Any]] | None = None


class Policy:
    """How a program would have its model cut: it is kept, and not asked.

    ``HybridParallelPlugin(custom_policy=)`` takes it without effect: how layers are cut is seen in the
    model, or said by ``boost(..., layouts={...})``.
    """

    model: nn.Module | None = None
    shard_config: Any = None

    def set_model(self, model: nn.Module) -> None:
        """Keep a model."""
        self.model = model

    def set_shard_config(self, shard_config: Any) -> None:
        """Keep a configuration."""
        self.shard_config = shard_config


class AutoPolicy(Policy):
    """Of a model of any kind."""


def get_autopolicy(model: nn.Module) -> Policy:
    """One for ``custom_policy=``, where it has no effect."""
    policy = AutoPolicy()
    policy.set_model(model)
    return policy


__all__ = [
    "AutoPolicy",
    "GradientCheckpointConfig",
    "ModulePolicyDescription",
    "PipelineGradientCheckpointConfig",
    "Policy",
    "SubModuleReplacementDescription",
    "get_autopolicy",
]

__getattr__ = or_absent(
    __name__,
    "colossalai.shardformer",
    {
        "layer": "write the model for one device, of torch.nn's layers: the plan cuts it",
        "modeling": "models run as they are written: engine.compile() compiles their blocks",
        "bert blip2 bloom chatglm2 command deepseek deepseek_v3 falcon gpt2 gptj llama mistral mixtral opt "
        "qwen2 sam t5 vit whisper": "how layers are cut is seen in the model, whatever its kind",
        "ShardConfig ShardFormer ModelSharder": (
            "Booster with HybridParallelPlugin(tp_size=..., pp_size=...) cuts models of any kind"
        ),
    },
    elsewhere={"auto_policy base_policy grad_ckpt_config policies shard shard_config sharder": __name__},
)
