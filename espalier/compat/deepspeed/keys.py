"""Every key of DeepSpeed's configuration (0.19), and what becomes of it: the table of docs/deepspeed.md.

``honoured``: done, with the same result. ``no effect``: read, and told once with its reason. ``refused``: an
error, unless its value asks for nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal, NamedTuple

from pydantic import BeforeValidator, Field

from espalier.texts import Count, Positive


def _whole(value: Any) -> Any:
    """Counts are often written as 5e8."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Number = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Elements = Annotated[int, BeforeValidator(_whole), Field(ge=0)]
Device = Literal["none", "cpu", "nvme"]
Dtype = Literal["fp32", "fp16", "bf16"]
Named = dict[str, Any]
Fate = Literal["honoured", "no effect", "refused"]


class Key(NamedTuple):
    """A key, dotted.

    Attributes:
        fate: what becomes of it.
        reason: how it is honoured, or why it has no effect, or what to do in its place.
        kind: the type of its values; None where these are not looked at.
        harmless: values of a refused key that ask for nothing.
    """

    name: str
    fate: Fate
    reason: str
    kind: Any = None
    harmless: tuple[Any, ...] = (False, None, 0)


def _yes(section: str, **keys: tuple[Any, str]) -> Iterator[Key]:
    for name, (kind, reason) in keys.items():
        yield Key(section + name, "honoured", reason, kind)


def _idle(section: str, reason: str, names: str) -> Iterator[Key]:
    for name in names.split():
        yield Key(section + name, "no effect", reason)


def _no(section: str, reason: str, names: str, harmless: tuple[Any, ...] = (False, None, 0)) -> Iterator[Key]:
    for name in names.split():
        yield Key(section + name, "refused", reason, None, harmless)


_MONITOR = "what DeepSpeed writes (`Train/Samples/train_loss`, `lr`, `loss_scale`), by rank 0"
_ALWAYS = "always so"
_GROWS = "of a scale that follows the gradients"
_TABLE: Final = (
    # ---- the batch
    *_yes(
        "",
        train_batch_size=(Count, "checked: micro-batch × accumulation × ranks that share the batch"),
        train_micro_batch_size_per_gpu=(Count, "checked; `training_data` comes in such batches"),
        gradient_accumulation_steps=(
            Count,
            "micro-batches of a step; each backward is divided by it, as there",
        ),
        dataloader_drop_last=(bool, "`DataLoader(drop_last=)`"),
    ),
    *_no(
        "",
        "without it the program says where a step ends: use `engine.no_sync()`, and no accumulation",
        "managed_gradient_accumulation",
        harmless=(True, None),
    ),
    # ---- optimizer and schedule
    *_yes(
        "optimizer.",
        type=(str, "Adam, AdamW, Adagrad, Lamb, Lion, Muon, or the name of one of `torch.optim`'s"),
        params=(
            Named,
            "its arguments, unknown ones refused; Adam is AdamW but with `adam_w_mode: false`, as there",
        ),
    ),
    *_idle("optimizer.", "kernels are chosen by what is there", "legacy_fusion"),
    *_yes(
        "scheduler.",
        type=(str, "WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest, or one of torch's"),
        params=(Named, "its arguments, unknown ones refused"),
    ),
    *_yes(
        "",
        gradient_clipping=(
            Number,
            "`Plan(clip=)`; 0 is none, and 1.0 where it is left out, as there (older releases of it: 0)",
        ),
    ),
    *_idle("", "any optimizer is exact under each stage", "zero_allow_untested_optimizer"),
    *_idle("", "any optimizer updates where its states lie, on the host too", "zero_force_ds_cpu_optimizer"),
    # ---- precision
    *_yes(
        "fp16.",
        enabled=(bool, "`Plan(precision=)`: parameters in float16, masters in float32"),
        auto_cast=(bool, "inputs are cast in any case"),
        loss_scale=(Number, "a fixed scale; 0: one that follows the gradients"),
        initial_scale_power=(int, f"`init_scale = 2 ** power`, {_GROWS}"),
        loss_scale_window=(Count, f"`growth_interval`, {_GROWS}"),
        hysteresis=(Count, "`hysteresis`: overflows before the scale falls"),
        consecutive_hysteresis=(bool, '`refill = "always"`: a good step fills the count again'),
        min_loss_scale=(
            Positive,
            "`min_scale`: below it training ends, and the parameters that overflow are named",
        ),
    ),
    *_no("fp16.", "masters are float32, or the update is another", "fp16_master_weights_and_grads"),
    *_yes(
        "bf16.",
        enabled=(bool, "`Plan(precision=)`: parameters in bfloat16, masters in float32"),
        check_grad_overflow=(bool, '`Spikes(on_nan="skip")`: such a step is skipped'),
    ),
    *_idle("bf16.", "gradients are added up as they come", "immediate_grad_update"),
    *_no("bf16.", "masters are float32, or the update is another", "bf16_master_weights_and_grads"),
    *_no("bf16.", "states are float32, or the update is another", "bf16_optimizer_states"),
    *_yes(
        "torch_autocast.",
        enabled=(bool, '`Plan(precision="autocast-...")`'),
        dtype=(str, "of the autocast; bfloat16 by default"),
    ),
    *_idle(
        "torch_autocast.",
        "gradients travel in the parameters' dtype, or in `communication_data_type`",
        "lower_precision_safe_modules",
    ),
    *_yes(
        "data_types.",
        grad_accum_dtype=(Dtype, "`Precision(reduce=)`, where `communication_data_type` is not given"),
        buffer_dtype=(Dtype, "`Precision(buffers=)`; else buffers stay as they are"),
    ),
    *_no("data_types.", "parameters have the dtype that fp16, bf16 or the model say", "param_dtype"),
    *_no(
        "data_types.",
        "cast inside of the model what has to be float32; or use torch_autocast",
        "keep_in_fp32_modules",
        harmless=("auto", None, []),
    ),
    # ---- gradients on their way
    *_yes("", communication_data_type=(Dtype, "`Precision(reduce=)`")),
    *_idle(
        "",
        "sums along a sequence are made in the dtype of what is summed",
        "seq_parallel_communication_data_type",
    ),
    *_idle(
        "",
        "another order of the same division; `communication_data_type: fp32` is what keeps small gradients",
        "prescale_gradients gradient_predivide_factor",
    ),
    *_no(
        "",
        "gradients are the mean over ranks: multiply the loss",
        "gradient_allreduce_op",
        harmless=("mean", None),
    ),
    *_no("", "parameters would stay as they were", "disable_allgather"),
    # ---- ZeRO
    *_yes(
        "zero_optimization.",
        stage=(Literal[0, 1, 2, 3], "`Plan(zero=)`"),
        reduce_bucket_size=(
            Elements,
            "`Plan(chunk_megabytes=)`; at stage 3, where whole chunks are gathered, at most its default",
        ),
        allgather_bucket_size=(Elements, "the same; the smaller of both"),
        offload_optimizer=(Named | None, "`Plan(offload=)`: states, and from stage 2 on gradients too"),
        offload_param=(Named | None, "`Plan(offload=)`: parameters (stage 3)"),
        cpu_offload=(bool, "`offload_optimizer: {device: cpu}`"),
        cpu_offload_param=(bool, "`offload_param: {device: cpu}`"),
        stage3_prefetch_bucket_size=(Elements, "`Plan(prefetch_megabytes=)`"),
        zero_hpz_partition_size=(
            Elements,
            "`Plan(data=, replicate=)`: all is cut inside of groups of so many ranks",
        ),
        stage3_gather_16bit_weights_on_model_save=(
            bool,
            "`save_16bit_model` writes whole weights; without it, at stage 3, it returns False, as there",
        ),
    ),
    *_idle(
        "zero_optimization.",
        _ALWAYS,
        "contiguous_gradients reduce_scatter allgather_partitions overlap_comm compute_grad_norm "
        "round_robin_gradients use_multi_rank_bucket_allreduce cpu_offload_use_pin_memory "
        "load_from_fp32_weights elastic_checkpoint",
    ),
    *_idle(
        "zero_optimization.",
        "chunks are gathered as they are used, small parameters too, and let go after their block",
        "stage3_param_persistence_threshold stage3_model_persistence_threshold "
        "stage3_max_live_parameters stage3_max_reuse_distance stage3_module_granularity_threshold "
        "stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential sub_group_size leaf_module",
    ),
    *_idle(
        "zero_optimization.",
        "there is no such choice here",
        "legacy_stage1 parameter_alignment memory_efficient_linear pipeline_loading_checkpoint "
        "override_module_apply log_trace_cache_warnings enable_sanity_checks "
        "save_muon_momentum_buffer_in_memory",
    ),
    *_idle("zero_optimization.", "parameters without a gradient are not updated", "ignore_unused_parameters"),
    *_no(
        "zero_optimization.",
        "weights and gradients travel whole, so that the results are the same",
        "zero_quantized_weights zero_quantized_nontrainable_weights zero_quantized_gradients "
        "zeropp_loco_param",
    ),
    *_no("zero_optimization.", "an update is made before the next step begins", "zenflow"),
    *_no(
        "zero_optimization.",
        "DeepSpeed has dropped MiCS: `zero_hpz_partition_size` cuts inside of groups",
        "mics_shard_size mics_hierarchical_params_gather",
        harmless=(False, None, 0, -1),
    ),
    *_yes(
        "zero_optimization.offload_optimizer.",
        device=(Device, "`host` for cpu, `disk` for nvme"),
        nvme_path=(str | None, "`Offload(directory=)`"),
        ratio=(Annotated[float, Field(ge=0, le=1)], "the share of the bytes that lies there"),
    ),
    *_yes(
        "zero_optimization.offload_param.",
        device=(Device, "`host` for cpu, `disk` for nvme"),
        nvme_path=(str | None, "`Offload(directory=)`"),
    ),
    *(
        key
        for section in ("zero_optimization.offload_optimizer.", "zero_optimization.offload_param.")
        for key in _idle(
            section,
            "buffers are made as large as chunks are; host memory is pinned",
            "pin_memory buffer_count buffer_size max_in_cpu pipeline_read pipeline_write fast_init",
        )
    ),
    *_idle(
        "zero_optimization.offload_optimizer.",
        "the update is one of torch's on the host",
        "super_offload cpuadam_cores_perc",
    ),
    *_idle(
        "aio.",
        "files are read and written by threads of the process, past no kernel module",
        "block_size queue_depth thread_count intra_op_parallelism single_submit overlap_events use_gds",
    ),
    # ---- other axes
    *_yes(
        "tensor_parallel.",
        autotp_size=(Elements, "`Plan(tensor=)`; 0 is 1"),
    ),
    *_idle(
        "tensor_parallel.",
        "how layers are cut is seen in the model, or said by `layouts=`",
        "preset_model vocab_parallel_lm_head vocab_parallel_ce_backend dtype tp_overlap_comm "
        "keep_module_on_host replace_with_kernel_inject kernel_inject tp.tp_size tp.tp_grain_size",
    ),
    *_no(
        "tensor_parallel.",
        'say it by name patterns: `deepspeed.initialize(..., layouts={"*.q_proj": "column"})`',
        "partition_config injection_policy_tuple",
        harmless=(None,),
    ),
    *_no(
        "tensor_parallel.",
        "the mesh is made of `autotp_size`",
        "tp.mpu tp.tp_group",
        harmless=(None,),
    ),
    *_yes("", sequence_parallel_size=(Count, '`Plan(context=, context_kind="ulysses")`')),
    *_idle("", "the axes' order is the plan's", "use_data_before_expert_parallelism"),
    *_no(
        "",
        'say `deepspeed.initialize(..., plan={"expert": n})`: experts are found in the model',
        "expert_parallel",
        harmless=(None, {}),
    ),
    *_yes(
        "pipeline.",
        stages=(Count | Literal["auto"], "checked against `PipelineModule(num_stages=)`"),
        partition=(str, "`best` and `uniform`: stages of about equal cost; see `PipelineModule`"),
        activation_checkpoint_interval=(Elements, 'above 0: `Plan(recompute="full")`'),
    ),
    *_idle("pipeline.", "what stages send is whole", "pipe_partitioned grad_partitioned"),
    *_idle("pipeline.", "recomputation is torch's, not reentrant", "use_reentrant"),
    *_idle("pipeline.", "what a model draws is the same on any ranks", "seed_layers"),
    # ---- activations
    *_yes(
        "activation_checkpointing.",
        partition_activations=(bool, '`Plan(recompute_inputs="sharded")`, where the plan recomputes'),
        cpu_checkpointing=(bool, '`Plan(recompute_inputs="host")`, where the plan recomputes'),
    ),
    *_idle(
        "activation_checkpointing.",
        "`deepspeed.checkpointing.checkpoint` is torch's, not reentrant",
        "number_checkpoints contiguous_memory_optimization synchronize_checkpoint_boundary profile",
    ),
    # ---- what is told
    *_yes(
        "",
        steps_per_print=(
            Elements | None,
            "so often rank 0 prints step, skipped steps, learning rate, momentum; by default never, as there",
        ),
        dump_state=(bool, "prints what the configuration became"),
        memory_breakdown=(bool, "prints `engine.memory()` with it"),
        wall_clock_breakdown=(bool, "prints the times of forward, backward and step with it"),
    ),
    *_yes(
        "comms_logger.",
        enabled=(bool, "every step's ledger is kept: `engine.engine.ledger()`"),
        verbose=(bool, "prints it at `steps_per_print`"),
    ),
    *_idle("comms_logger.", "the ledger has all operations", "prof_all prof_ops debug"),
    *_yes(
        "flops_profiler.",
        enabled=(
            bool,
            "at `profile_step`, rank 0 tells parameters, floating-point operations and time of a step",
        ),
        profile_step=(Count, "which"),
        output_file=(str | None, "where; else it is printed"),
    ),
    *_idle(
        "flops_profiler.",
        "operations are counted as they are called: `torch.profiler` breaks them down",
        "module_depth top_modules detailed recompute_fwd_factor",
    ),
    *(
        key
        for section in ("tensorboard.", "csv_monitor.")
        for key in _yes(
            section, enabled=(bool, _MONITOR), output_path=(str, "where"), job_name=(str, "folder")
        )
    ),
    *_yes(
        "wandb.",
        enabled=(bool, _MONITOR),
        team=(str | None, "`entity`"),
        group=(str | None, "`group`"),
        project=(str, "`project`"),
    ),
    *_no("comet.", "write `engine.monitor.writers.append(...)` with a `write_events` of your own", "enabled"),
    *_idle(
        "comet.",
        "see `comet.enabled`",
        "samples_log_interval project workspace api_key experiment_name experiment_key online mode",
    ),
    *_idle("timers.", "see `wall_clock_breakdown`", "throughput.enabled throughput.synchronized"),
    *_idle("", "logging is Python's own", "log_level"),
    *_idle("", "garbage is collected as the program says", "disable_python_gc"),
    *_idle("", "any size of vocabulary is cut", "vocabulary_size"),
    # ---- checkpoints
    *_idle("checkpoint.", "all ranks write one checkpoint, under one name", "tag_validation"),
    *_idle("checkpoint.", "every checkpoint loads under any plan on any number of ranks", "load_universal"),
    *_no("checkpoint.", "checkpoints are one folder that every rank sees", "use_node_local_storage"),
    *_idle(
        "checkpoint.",
        "each rank writes its part",
        "parallel_write.pipeline_stage checkpoint_serialization writer.type writer.io_buffer_size "
        "writer.io_buffer_double writer.show_statistics writer.data_parallel writer.decoupled "
        "writer.io_multiplier",
    ),
    *_yes("", datastates_ckpt=(Named | bool | None, "`engine.save(asynchronous=True)`")),
    # ---- what is another thing
    *_no("compile.", "`espalier.compile(module)` compiles it, collectives included", "deepcompile"),
    *_idle(
        "compile.",
        "see `compile.deepcompile`",
        "autoep_non_moe free_activation free_activation_threshold offload_activation "
        "offload_activation_pin_memory offload_opt_states double_buffer symmetric_memory debug_log "
        "offload_parameters sync_before_reduce sync_after_reduce sync_before_allgather "
        "sync_after_allgather keep_int_input_tensors keep_all_input_tensors passes",
    ),
    *_no(
        "",
        "`espalier plan` searches for the fastest plan",
        "autotuning",
        harmless=(None, {}, {"enabled": False}),
    ),
    *_no(
        "",
        "`engine.generate` writes text under any plan",
        "hybrid_engine",
        harmless=(None, {}, {"enabled": False}),
    ),
    *_no(
        "",
        "choose data and sequence lengths in the data set",
        "data_efficiency curriculum_learning",
        harmless=(None, {}, {"enabled": False}),
    ),
    *_no(
        "",
        "weights are not quantised in training",
        "weight_quantization compression_training quantize_training",
        harmless=(None, {}),
    ),
    *_no(
        "",
        "DeepSpeed has dropped it. Say the batch here; a checkpoint loads on any number of ranks",
        "elasticity",
        harmless=(None, {}, {"enabled": False}),
    ),
    *_no(
        "",
        "DeepSpeed has dropped it: use `fp16`, `bf16` or `torch_autocast`",
        "amp",
        harmless=(None, {}, {"enabled": False}),
    ),
    *_no(
        "",
        "DeepSpeed has dropped it",
        "nebula eigenvalue sparse_attention graph_harvesting progressive_layer_drop sparse_gradients",
        harmless=(None, {}, {"enabled": False}, False),
    ),
)
KEYS: Final = MappingProxyType({key.name: key for key in _TABLE})
# other spellings, as DeepSpeed takes them
ALIASES: Final = MappingProxyType(
    {
        "bfloat16": "bf16",
        "train_micro_batch_size": "train_micro_batch_size_per_gpu",
        "zero_optimization.prefetch_bucket_size": "zero_optimization.stage3_prefetch_bucket_size",
        "zero_optimization.gather_16bit_weights_on_model_save": (
            "zero_optimization.stage3_gather_16bit_weights_on_model_save"
        ),
        "zero_optimization.stage3_gather_fp16_weights_on_model_save": (
            "zero_optimization.stage3_gather_16bit_weights_on_model_save"
        ),
        **{
            f"zero_optimization.{name}": f"zero_optimization.stage3_{name}"
            for name in (
                "param_persistence_threshold model_persistence_threshold max_live_parameters "
                "max_reuse_distance module_granularity_threshold use_all_reduce_for_fetch_params "
                "allgather_sequential"
            ).split()
        },
    }
)


_SUBJECTS = MappingProxyType(
    {
        "train_batch_size": "The batch",
        "optimizer.type": "Optimizer, schedule, clipping",
        "fp16.enabled": "Precision, and how gradients travel",
        "zero_optimization.stage": "ZeRO and offload",
        "tensor_parallel.autotp_size": "Cuts of layers and sequences",
        "pipeline.stages": "Pipelines and recomputation",
        "steps_per_print": "Logs, profiles, monitors",
        "checkpoint.tag_validation": "Files of checkpoints",
        "compile.deepcompile": "Compilation",
        "autotuning": "What is not done here",
    }
)
"""Of the page's tables the first key, and the heading."""


def markdown(keys: Iterable[Key] = _TABLE) -> str:
    """The tables as docs/deepspeed.md has them: neighbours of one table that share their fate share a row."""
    lines: list[str] = []

    def shared(key: Key) -> tuple[str, str, str]:
        return key.fate, key.reason, key.name.rpartition(".")[0]

    for (fate, reason, table), group in groupby(keys, shared):
        names = [key.name for key in group]
        if subject := _SUBJECTS.get(names[0]):
            lines += ["", f"### {subject}", "", "| key | | how, or why |", "|---|---|---|"]
        names[1:] = [name.removeprefix(f"{table}.") for name in names[1:]]
        lines.append(f"| {', '.join(f'`{name}`' for name in names)} | {fate} | {reason} |")
    return "\n".join(lines).strip()
