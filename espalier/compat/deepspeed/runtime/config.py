"""``deepspeed.runtime.config``: a configuration that programs ask by attributes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

from espalier.compat.absent import or_absent
from espalier.compat.deepspeed import answers
from espalier.compat.deepspeed.config import Config, load, read
from espalier.compat.deepspeed.monitor.config import get_monitor_config
from espalier.mesh.process import running_rank, running_size
from espalier.texts import MistakeError as DeepSpeedConfigError

# sections that DeepSpeed has under another name
_SECTIONS: Final = {
    "zero_config": "zero_optimization",
    "float16_config": "fp16",
    "bfloat16_config": "bf16",
    "activation_checkpointing_config": "activation_checkpointing",
    "flops_profiler_config": "flops_profiler",
    "comms_config": "comms_logger",
    "tensor_parallel_config": "tensor_parallel",
    "checkpoint_config": "checkpoint",
    "pipeline": "pipeline",
}


class DeepSpeedConfig:
    """What a configuration says, by DeepSpeed's names.

    Args:
        config: a dict, or the path of a JSON file.
        mpu: its ``get_data_parallel_world_size()`` ranks share the batch.

    Attributes:
        settings: as :func:`espalier.compat.deepspeed.read` gives it.
        world_size: ranks that share the batch.
        train_batch_size, train_micro_batch_size_per_gpu, gradient_accumulation_steps: all three.
        zero_config, float16_config, bfloat16_config, ...: the keys of a section that were given.

    What DeepSpeed's engine answers by methods (``gradient_clipping``, ``optimizer_params``, ...) is an
    attribute here.

    Raises:
        DeepSpeedConfigError: listing every mistake.
    """

    def __init__(
        self, config: str | Path | Mapping[str, Any], mpu: Any = None, mesh_device: Any = None
    ) -> None:
        self._param_dict = load(config)
        ranks = running_size()
        self.global_rank = running_rank()
        if mpu is not None:
            ranks = mpu.get_data_parallel_world_size()
        self.settings: Config = read(self._param_dict, ranks)
        plan = self.settings.plan
        self.train_batch_size = self.settings.train_batch
        self.train_micro_batch_size_per_gpu = self.settings.micro_batch
        self.gradient_accumulation_steps = plan.accumulate
        self.world_size = self.train_batch_size // (self.settings.micro_batch * plan.accumulate)
        self.zero_optimization_stage, self.zero_enabled = int(plan.zero), bool(plan.zero)
        self.gradient_clipping = plan.clip or 0.0
        chosen = self.settings.optimizer
        self.optimizer_name = None if chosen is None else answers.optimizer_name(chosen.name)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        given = self.settings.configured
        if name == "monitor_config":
            return get_monitor_config(self._param_dict)
        if name in _SECTIONS:
            start = f"{_SECTIONS[name]}."
            found = {key.removeprefix(start): x for key, x in given.items() if key.startswith(start)}
            if name == "zero_config":
                found |= {"stage": self.zero_optimization_stage}
            elif "16" in name:
                found.setdefault("enabled", False)
            return SimpleNamespace(**{key: x for key, x in found.items() if "." not in key})
        if name in answers.GIVEN or name in answers.OFF:
            return answers.answer(name, given)
        if name in given:
            return given[name]
        raise AttributeError(answers.missing(name, type(self).__name__))

    def print(self, name: str) -> None:
        """Print what was given."""
        print(f"{name}:", *(f"  {key} = {x!r}" for key, x in self.settings.configured.items()), sep="\n")


__all__ = ["DeepSpeedConfig", "DeepSpeedConfigError"]

__getattr__ = or_absent(
    __name__,
    "deepspeed.runtime.config",
    {
        "DeepSpeedConfigWriter DtypeEnum HybridEngineConfig get_checkpoint_parallel_write_pipeline "
        "get_checkpoint_params get_checkpoint_tag_validation_mode get_communication_data_type "
        "get_data_types_params get_dataloader_drop_last get_disable_allgather get_disable_python_gc "
        "get_dump_state get_expert_data_topo_config get_expert_parallel_config "
        "get_gradient_accumulation_steps get_gradient_allreduce_op get_gradient_clipping "
        "get_gradient_predivide_factor get_hybrid_engine_config get_log_level "
        "get_lower_precision_safe_modules get_managed_gradient_accumulation get_memory_breakdown "
        "get_optimizer_gradient_clipping get_optimizer_legacy_fusion get_optimizer_name get_optimizer_params "
        "get_pipeline_config get_prescale_gradients get_scheduler_name get_scheduler_params "
        "get_steps_per_print get_torch_autocast_dtype get_torch_autocast_enabled get_train_batch_size "
        "get_train_micro_batch_size_per_gpu get_wall_clock_breakdown get_zero_allow_untested_optimizer "
        "get_zero_force_ds_cpu_optimizer": "DeepSpeedConfig(config) has each key as an attribute",
    },
)
