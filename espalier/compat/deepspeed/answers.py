"""What DeepSpeed's engine answers of its configuration, and why it does not what it does not.

``engine.zero_reduce_scatter()``, say, is what the configuration says, or DeepSpeed's own default. How a model
is laid out say ``engine.plan`` and the engine's own methods.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any, Final

from espalier.compat.absent import one_by_one

_ZERO: Final = "zero_optimization."
_WORDS: Final = MappingProxyType({"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"})
# the method; the key; DeepSpeed's default
GIVEN: Final[Mapping[str, tuple[str, Any]]] = MappingProxyType(
    {
        "autotp_size": ("tensor_parallel.autotp_size", 0),
        "bf16_master_weights_and_gradients": ("bf16.bf16_master_weights_and_grads", False),
        "bf16_optimizer_states": ("bf16.bf16_optimizer_states", False),
        "checkpoint_serialization_enabled": ("checkpoint.checkpoint_serialization", True),
        "cpuadam_cores_perc": (f"{_ZERO}offload_optimizer.cpuadam_cores_perc", 0.9),
        "dataloader_drop_last": ("dataloader_drop_last", False),
        "dump_state": ("dump_state", False),
        "flops_profiler_detailed": ("flops_profiler.detailed", True),
        "flops_profiler_enabled": ("flops_profiler.enabled", False),
        "flops_profiler_module_depth": ("flops_profiler.module_depth", -1),
        "flops_profiler_output_file": ("flops_profiler.output_file", None),
        "flops_profiler_profile_step": ("flops_profiler.profile_step", 1),
        "flops_profiler_recompute_fwd_factor": ("flops_profiler.recompute_fwd_factor", 0.0),
        "flops_profiler_top_modules": ("flops_profiler.top_modules", 1),
        "fp16_auto_cast": ("fp16.auto_cast", False),
        "fp16_master_weights_and_gradients": ("fp16.fp16_master_weights_and_grads", False),
        "gradient_predivide_factor": ("gradient_predivide_factor", 1.0),
        "is_sanity_checks_enabled": (f"{_ZERO}enable_sanity_checks", False),
        "load_universal_checkpoint": ("checkpoint.load_universal", False),
        "log_level": ("log_level", None),
        "managed_gradient_accumulation": ("managed_gradient_accumulation", True),
        "memory_breakdown": ("memory_breakdown", False),
        "optimizer_legacy_fusion": ("optimizer.legacy_fusion", False),
        "optimizer_params": ("optimizer.params", None),
        "scheduler_name": ("scheduler.type", None),
        "scheduler_params": ("scheduler.params", None),
        "super_offload": (f"{_ZERO}offload_optimizer.super_offload", False),
        "torch_autocast_enabled": ("torch_autocast.enabled", False),
        "use_node_local_storage": ("checkpoint.use_node_local_storage", False),
        "wall_clock_breakdown": ("wall_clock_breakdown", False),
        "zenflow_config": (f"{_ZERO}zenflow", None),
        "zero_allgather_bucket_size": (f"{_ZERO}allgather_bucket_size", 500_000_000),
        "zero_allgather_partitions": (f"{_ZERO}allgather_partitions", True),
        "zero_allgather_sequential": (f"{_ZERO}stage3_allgather_sequential", False),
        "zero_allow_untested_optimizer": ("zero_allow_untested_optimizer", False),
        "zero_compute_grad_norm": (f"{_ZERO}compute_grad_norm", True),
        "zero_contiguous_gradients": (f"{_ZERO}contiguous_gradients", True),
        "zero_elastic_checkpoint": (f"{_ZERO}elastic_checkpoint", False),
        "zero_force_ds_cpu_optimizer": ("zero_force_ds_cpu_optimizer", True),
        "zero_gather_16bit_weights_on_model_save": (
            f"{_ZERO}stage3_gather_16bit_weights_on_model_save",
            False,
        ),
        "zero_hpz_partition_size": (f"{_ZERO}zero_hpz_partition_size", 1),
        "zero_ignore_unused_parameters": (f"{_ZERO}ignore_unused_parameters", True),
        "zero_legacy_stage1": (f"{_ZERO}legacy_stage1", False),
        "zero_load_from_fp32_weights": (f"{_ZERO}load_from_fp32_weights", True),
        "zero_log_trace_cache_warnings": (f"{_ZERO}log_trace_cache_warnings", False),
        "zero_max_live_parameters": (f"{_ZERO}stage3_max_live_parameters", 1_000_000_000),
        "zero_max_reuse_distance": (f"{_ZERO}stage3_max_reuse_distance", 1_000_000_000),
        "zero_model_persistence_threshold": (f"{_ZERO}stage3_model_persistence_threshold", 2**63 - 1),
        "zero_module_granularity_threshold": (f"{_ZERO}stage3_module_granularity_threshold", 0),
        "zero_multi_rank_bucket_allreduce": (f"{_ZERO}use_multi_rank_bucket_allreduce", True),
        "zero_param_persistence_threshold": (f"{_ZERO}stage3_param_persistence_threshold", 100_000),
        "zero_parameter_alignment": (f"{_ZERO}parameter_alignment", False),
        "zero_partial_offload": (f"{_ZERO}offload_optimizer.ratio", 1.0),
        "zero_prefetch_bucket_size": (f"{_ZERO}stage3_prefetch_bucket_size", 50_000_000),
        "zero_quantized_gradients": (f"{_ZERO}zero_quantized_gradients", False),
        "zero_quantized_nontrainable_weights": (f"{_ZERO}zero_quantized_nontrainable_weights", False),
        "zero_quantized_weights": (f"{_ZERO}zero_quantized_weights", False),
        "zero_reduce_bucket_size": (f"{_ZERO}reduce_bucket_size", 500_000_000),
        "zero_reduce_scatter": (f"{_ZERO}reduce_scatter", True),
        "zero_round_robin_gradients": (f"{_ZERO}round_robin_gradients", False),
        "zero_save_muon_momentum_buffer_in_memory": (f"{_ZERO}save_muon_momentum_buffer_in_memory", False),
        "zero_sub_group_size": (f"{_ZERO}sub_group_size", 1_000_000_000),
    }
)
# whose names DeepSpeed makes small
OPTIMIZERS: Final = frozenset({"adagrad", "adam", "adamw", "lamb", "lion", "muon"})
# what a configuration cannot ask for here: it is off
OFF: Final = frozenset(
    "autotuning_enabled autotuning_profile_model_info compile_autosp compile_autotp "
    "compile_zero_optimization_stage curriculum_learning_enabled data_efficiency_enabled "
    "data_sampling_enabled is_deepcompile_active is_deepcompile_enabled random_ltd_enabled "
    "uses_parallelization_pass_only".split()
)
_SUMS: Final = (
    "gradients are summed over the ranks by backward() and step(), and by allreduce_gradients(); for sums of "
    "your own call torch.distributed"
)
_TUNING: Final = "`espalier plan JOB.toml` searches for the fastest plan"
_DATA: Final = "choose data and sequence lengths in the data set, or in its sampler"
_GRAPHS: Final = "engine.compile() compiles the model's blocks, collectives included"
# what DeepSpeed's engine has besides, and what to do in its place
INSTEAD: Final[Mapping[str, str]] = MappingProxyType(
    one_by_one(
        {
            "all_gather_scalar allreduce_and_copy allreduce_bucket allreduce_no_retain "
            "buffered_allreduce_fallback sparse_all_gather sparse_allreduce sparse_allreduce_bucket "
            "sparse_allreduce_no_retain": _SUMS,
            "autotuning_end_profile_step autotuning_metric autotuning_metric_path autotuning_model_info_path "
            "autotuning_start_profile_step": _TUNING,
            "curriculum_learning_config data_efficiency_config data_sampling_config random_ltd_config "
            "random_ltd_initialize set_custom_curriculum_learning_schedule set_data_post_process_func": _DATA,
            "get_autosp_backend get_autotp_backend get_compile_time get_deepcompile_backend "
            "get_deepspeed_compile_backend register_compile_pass": _GRAPHS,
            "aio_config": "threads read and write files of offloaded states: see Offload(directory=)",
            "clip_fp32_gradients": "step() clips by gradient_clipping; torch.nn.utils.clip_grad_norm_ before",
            "coalesce_grad_reduction": "`with engine.no_sync():` around all backward passes but the last",
            "get_additional_losses": "add them up in the model, or in loss_fn",
            "get_optimizer_configuration": "the configuration says which optimizer: engine.optimizer is it",
            "log_for_device tput_log": "logging is Python's own",
            "load_moe_state_dict": "engine.load_checkpoint takes experts along, from any number of ranks",
            "offload_states reload_states": (
                "Plan(offload=) lays states on the host: `offload_optimizer` of the configuration"
            ),
            "print_forward_breakdown": "wall_clock_breakdown, or torch.profiler",
            "set_batch_fn": "map the batches: engine.train_batch(map(fn, data_iter))",
            "set_has_attention_mask": "stages send what the model's layers hand on, masks too",
            "swap_tensor_config": "Offload(directory=) says where states lie on a disk",
            "tensor_parallel_config": "engine.plan.tensor, or engine.autotp_size()",
            "torch_autocast_lower_precision_safe_modules": "torch.autocast chooses by operation",
        }
    )
)


def answer(name: str, options: Mapping[str, Any]) -> Any:
    """What a method of :data:`GIVEN` or :data:`OFF` gives.

    Args:
        options: each key of the configuration that was given, dotted, with its value.
    """
    if name in OFF:
        return False
    key, default = GIVEN[name]
    if name == "cpuadam_cores_perc" and offload(options, "offload_optimizer") is not None:
        default = 0.8  # that of the section, which is there
    return options.get(key, default)


def optimizer_name(name: str) -> str:
    """A configuration's word for an optimizer, as DeepSpeed gives it."""
    return name.lower() if name.lower() in OPTIMIZERS else name


def offload(options: Mapping[str, Any], kind: str) -> SimpleNamespace | None:
    """``offload_optimizer`` or ``offload_param`` as a configuration says it; None where it does not."""
    section = f"{_ZERO}{kind}."
    fields = {key.removeprefix(section): value for key, value in options.items() if key.startswith(section)}
    if options.get(f"{_ZERO}cpu_offload" if kind == "offload_optimizer" else f"{_ZERO}cpu_offload_param"):
        fields["device"] = "cpu"
    if not fields and not options.get(f"{_ZERO}{kind}"):
        return None
    return SimpleNamespace(**{"device": "none", "nvme_path": None, "ratio": 1.0, **fields})


def missing(name: str, kind: str) -> str:
    """Why there is no such attribute."""
    if name in INSTEAD:
        return f"DeepSpeed's engine.{name} is not there: {INSTEAD[name]}."
    return (
        f"{kind!r} object has no attribute {name!r}, nor has the model. engine.engine is Espalier's own, "
        "engine.plan says how the model is laid out; docs/deepspeed.md lists what there is."
    )


def dtype_word(word: str) -> str:
    """A dtype of the configuration as torch names it."""
    return _WORDS.get(word, word)
