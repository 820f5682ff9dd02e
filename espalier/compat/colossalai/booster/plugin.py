"""Plugins: each says a plan. What they say beside is honoured, has no effect (``idle``), or is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from espalier.compat.colossalai.config import offload_of, scale_of
from espalier.compat.colossalai.utils import sampler_of, share_of
from espalier.parallel import Plan
from espalier.texts import Mistake, MistakeError, unknown_key

_PRECISIONS = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32", None: "float32"}
_DTYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
_MEGA = 1024**2


class Plugin:
    """Keyword arguments of Colossal-AI as a plan.

    Attributes:
        idle: arguments that have no effect here, with the reason.
    """

    _known: tuple[str, ...] = ()  # honoured
    _without: ClassVar[Mapping[str, str]] = {}  # no effect, and why
    _refused: ClassVar[
        Mapping[str, tuple[Any, str]]
    ] = {}  # the value that asks for nothing; what to do instead
    _first_scale = 2.0**16

    def __init__(self, **options: Any) -> None:
        names, mistakes = (*self._known, *self._without, *self._refused), []
        for key, value in options.items():
            if key not in names:
                mistakes.append(unknown_key(key, value, names))
            elif key in self._refused and value != self._refused[key][0] and value is not None:
                mistakes.append(Mistake(key, value, f"not to be had here: {self._refused[key][1]}"))
        self.options = options
        self.idle = {key: reason for key, reason in self._without.items() if key in options}
        self._mistakes: list[Mistake] = []
        if not mistakes:
            self._arguments = self._plan()
            mistakes = self._mistakes
        if mistakes:
            raise MistakeError(type(self).__name__, mistakes)

    def _plan(self) -> dict[str, Any]:
        """Arguments of the plan, but for ``data``."""
        return {}

    def plan(self, ranks: int) -> Plan:
        """The plan, on so many ranks.

        Raises:
            ValueError: they are no multiple of what the plugin asks for.
        """
        each = Plan(**{**self._arguments, "zero": 0, "offload": {}, "cuts": None}).world_size
        if ranks % each:
            raise ValueError(
                f"{type(self).__name__}: {ranks} ranks are no multiple of the {each} it asks for."
            )
        return Plan(**self._arguments, data=ranks // each)

    @property
    def max_norm(self) -> float | None:
        """The largest norm of gradients."""
        clip: float | None = self._arguments.get("clip")
        return clip

    def _precision(self, otherwise: str) -> dict[str, Any]:
        named = self.options.get("precision", otherwise)
        if named not in _PRECISIONS:
            self._mistakes.append(Mistake("precision", named, "expected fp16, bf16 or fp32"))
            return {}
        precision: dict[str, Any] = {"compute": _PRECISIONS[named]}
        if named == "fp16":
            scale = {
                "initial_scale": self._first_scale,
                "min_scale": 1.0,
                "growth_interval": 1000,
                "hysteresis": 2,
            }
            precision["loss_scale"] = scale_of({**scale, **self.options})
        dtype = self.options.get("communication_dtype")
        if dtype is not None and _DTYPES.get(dtype) != precision["compute"]:
            precision["reduce"] = _DTYPES.get(dtype)
        return precision

    def _clip(self) -> float | None:
        return self.options.get("max_norm") or None

    def prepare_dataloader(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        shuffle: bool = False,
        seed: int = 1024,
        drop_last: bool = False,
        pin_memory: bool = False,
        num_workers: int = 0,
        distributed_sampler_cls: Callable[..., Any] | None = None,
        **options: Any,
    ) -> DataLoader[Any]:
        """A loader of this rank's rows, ``batch_size`` of them."""
        ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
        share, here = share_of(self.plan(ranks), rank)
        if distributed_sampler_cls is not None:
            sampler = distributed_sampler_cls(dataset, num_replicas=share, rank=here, shuffle=shuffle)
        else:
            sampler = sampler_of(dataset, share, here, shuffle, seed, drop_last)
        return DataLoader(
            dataset,
            batch_size,
            sampler=sampler,
            drop_last=drop_last,
            pin_memory=pin_memory,
            num_workers=num_workers,
            **options,
        )


_ALWAYS = "always so"
_CHOSEN = "there is no such choice here"
_LIKE_DDP = {
    "broadcast_buffers": "buffers are the same on all ranks by how they are made",
    "find_unused_parameters": "parameters without a gradient are not waited for",
    "check_reduction": _CHOSEN,
    "gradient_as_bucket_view": _ALWAYS,
    "static_graph": _CHOSEN,
}
_AS_THEY_ARE = (False, "gradients travel in the dtype of communication_dtype")
_FP8 = {"fp8_communication": _AS_THEY_ARE, "use_fp8": _AS_THEY_ARE}
_SCALES = ("initial_scale", "min_scale", "growth_factor", "backoff_factor", "growth_interval", "hysteresis")


class TorchDDPPlugin(Plugin):
    """``Plan(data=...)``."""

    _known = ("bucket_cap_mb",)
    _without = _LIKE_DDP
    _refused = _FP8

    def _plan(self) -> dict[str, Any]:
        return {"chunk_megabytes": float(self.options.get("bucket_cap_mb", 25))}


class TorchFSDPPlugin(Plugin):
    """``Plan(data=..., zero=3)``."""

    _known = ("cpu_offload", "mixed_precision", "sharding_strategy")
    _without: ClassVar[Mapping[str, str]] = {
        "auto_wrap_policy": "the model's blocks are found",
        "backward_prefetch": _ALWAYS,
        "ignored_modules": _CHOSEN,
        "param_init_fn": "espalier.deferred() builds models without memory",
        "sync_module_states": "parameters are rank 0's",
        "process_group": "the mesh is the plan's",
    }
    _refused = _FP8

    def _plan(self) -> dict[str, Any]:
        plan_fields: dict[str, Any] = {"zero": 3}
        strategy = getattr(self.options.get("sharding_strategy"), "name", "FULL_SHARD")
        stages = {"FULL_SHARD": 3, "SHARD_GRAD_OP": 2, "NO_SHARD": 0}
        if strategy not in stages:
            expected = (
                "expected FULL_SHARD, SHARD_GRAD_OP or NO_SHARD; Plan(replicate=n, zero=3) is the hybrid"
            )
            self._mistakes.append(Mistake("sharding_strategy", strategy, expected))
        else:
            plan_fields["zero"] = stages[strategy]
        offload = self.options.get("cpu_offload")
        if getattr(offload, "offload_params", offload):
            plan_fields["offload"] = dict.fromkeys(("parameters", "gradients", "states"), "host")
        policy = self.options.get("mixed_precision")
        if (dtype := getattr(policy, "param_dtype", None)) is not None:
            reduce = getattr(policy, "reduce_dtype", None)
            plan_fields["precision"] = {"compute": _DTYPES[dtype]}
            if reduce not in (None, dtype):
                plan_fields["precision"]["reduce"] = _DTYPES[reduce]
        return plan_fields


class LowLevelZeroPlugin(Plugin):
    """``Plan(data=..., zero=1 or 2)``."""

    _known = (
        "stage",
        "precision",
        *_SCALES,
        "max_norm",
        "reduce_bucket_size_in_m",
        "communication_dtype",
        "cpu_offload",
        "extra_dp_size",
    )
    _first_scale = 2.0**32
    _without: ClassVar[Mapping[str, str]] = {
        "max_scale": "the scale falls again where it grows too far",
        "overlap_communication": _ALWAYS,
        "overlap_allgather": _ALWAYS,
        "verbose": _CHOSEN,
        "cast_inputs": _ALWAYS,
    }
    _refused: ClassVar[Mapping[str, tuple[Any, str]]] = {
        "master_weights": (True, "masters are float32, or the update is another"),
        "norm_type": (2.0, "gradients are clipped by the 2-norm: torch.nn.utils.clip_grad_norm_ has others"),
        **_FP8,
    }

    def _plan(self) -> dict[str, Any]:
        precision = self._precision("fp16")
        wide = 2 if precision.get("compute") != "float32" else 4
        plan_fields: dict[str, Any] = {
            "zero": self.options.get("stage", 1),
            "replicate": self.options.get("extra_dp_size", 1),
            "precision": precision,
            "clip": self._clip(),
            "chunk_megabytes": self.options.get("reduce_bucket_size_in_m", 12) * _MEGA * wide / 1e6,
        }
        if self.options.get("cpu_offload"):
            plan_fields["offload"] = {"states": "host"}
        return plan_fields


class GeminiPlugin(Plugin):
    """``Plan(data=..., zero=3, offload=...)``."""

    _known = (
        "placement_policy",
        "offload_optim_frac",
        "offload_param_frac",
        "shard_param_frac",
        "precision",
        *_SCALES,
        "max_norm",
        "tp_size",
        "extra_dp_size",
        "enable_gradient_accumulation",
    )
    _without: ClassVar[Mapping[str, str]] = {
        "chunk_config_dict": "chunks follow the model's blocks",
        "chunk_init_device": _CHOSEN,
        "max_prefetch": "Plan(prefetch_megabytes=) says it in bytes",
        "warmup_non_model_data_ratio": "the first steps are measured",
        "steady_cuda_cap_ratio": "the first steps are measured",
        "gpu_margin_mem_ratio": "the first steps are measured",
        "pin_memory": _ALWAYS,
        "force_outputs_fp32": "outputs have the dtype that the model gives them",
        "strict_ddp_mode": _CHOSEN,
        "search_range_m": "chunks follow the model's blocks",
        "hidden_dim": "chunks follow the model's blocks",
        "min_chunk_size_m": "chunks follow the model's blocks",
        "memstats": _CHOSEN,
        "max_scale": "the scale falls again where it grows too far",
        "enable_all_optimization": "models stay as they are",
        "enable_fused_normalization": "models stay as they are",
        "enable_flash_attention": "torch chooses the kernel",
        "enable_sequence_parallelism": "say it by HybridParallelPlugin",
        "enable_jit_fused": "espalier.compile(module) compiles",
        "enable_sequence_overlap": _ALWAYS,
        "enable_async_reduce": _ALWAYS,
        "verbose": _CHOSEN,
    }
    _refused: ClassVar[Mapping[str, tuple[Any, str]]] = {
        "master_weights": (True, "masters are float32, or the update is another"),
        "norm_type": (2.0, "gradients are clipped by the 2-norm: torch.nn.utils.clip_grad_norm_ has others"),
        **_FP8,
    }

    def _plan(self) -> dict[str, Any]:
        get = self.options.get
        plan_fields: dict[str, Any] = {
            "zero": 3 if get("shard_param_frac", 1.0) > 0 else 2,
            "precision": self._precision("fp16"),
            "clip": self._clip(),
            "tensor": get("tp_size", 1),
            "replicate": get("extra_dp_size", 1),
        }
        policy = get("placement_policy", "static")
        if policy == "static":
            states, parameters = get("offload_optim_frac", 0.0), get("offload_param_frac", 0.0)
            offload = {"states": states, "parameters": parameters if plan_fields["zero"] == 3 else 0.0}
            plan_fields["offload"] = {key: {"place": "host", "ratio": x} for key, x in offload.items() if x}
        else:
            plan_fields |= offload_of(policy, self._mistakes, "placement_policy")
        return plan_fields


class HybridParallelPlugin(Plugin):
    """``Plan(data=..., tensor=..., pipe=..., context=..., zero=0 to 2)``."""

    _known = (
        "tp_size",
        "pp_size",
        "sp_size",
        "precision",
        "zero_stage",
        "enable_sequence_parallelism",
        "sequence_parallelism_mode",
        "num_microbatches",
        *_SCALES,
        "max_norm",
        "ddp_bucket_cap_mb",
        "zero_bucket_size_in_m",
        "cpu_offload",
        "communication_dtype",
        "pp_style",
        "num_model_chunks",
        "gradient_checkpoint_config",
    )
    _without: ClassVar[Mapping[str, str]] = {
        **_LIKE_DDP,
        "enable_all_optimization": "models stay as they are",
        "enable_fused_normalization": "models stay as they are",
        "enable_flash_attention": "torch chooses the kernel",
        "enable_jit_fused": "espalier.compile(module) compiles",
        "parallel_output": "a loss of cut logits never gathers them",
        "max_scale": "the scale falls again where it grows too far",
        "overlap_communication": _ALWAYS,
        "overlap_allgather": _ALWAYS,
        "overlap_p2p": _ALWAYS,
        "enable_sequence_overlap": _ALWAYS,
        "enable_metadata_cache": _CHOSEN,
        "make_vocab_size_divisible_by": "any size of vocabulary is cut",
        "dp_outside": "the axes' order is the plan's",
        "inner_ring_size": "there is one ring",
        "custom_policy": "how layers are cut is seen in the model, or said by boost(..., layouts={...})",
        "num_layers_per_stage": "stages are balanced by what they cost; Plan(cuts=) says otherwise",
    }
    _refused: ClassVar[Mapping[str, tuple[Any, str]]] = {
        "microbatch_size": (None, "say num_microbatches"),
        "scheduler_nodes": (None, "Plan(schedule=) takes a schedule, or the file of its table"),
        **_FP8,
    }

    def _plan(self) -> dict[str, Any]:
        get, plan_fields = self.options.get, {}
        for key in ("tp_size", "pp_size"):
            if key not in self.options:
                self._mistakes.append(Mistake(key, None, "is needed"))
                return {}
        precision = self._precision("fp16")
        wide = 2 if precision.get("compute") != "float32" else 4
        stage = get("zero_stage", 0)
        bucket = get("zero_bucket_size_in_m", 12) * _MEGA * wide / 1e6
        plan_fields = {
            "tensor": get("tp_size"),
            "pipe": get("pp_size"),
            "zero": stage,
            "precision": precision,
            "clip": self._clip(),
            "chunk_megabytes": bucket if stage else float(get("ddp_bucket_cap_mb", 25)),
        }
        if self.options["pp_size"] > 1:
            if not get("num_microbatches"):
                self._mistakes.append(Mistake("num_microbatches", None, "is needed with a pipeline"))
            plan_fields["accumulate"] = get("num_microbatches") or 1
            style, several = get("pp_style", "1f1b"), get("num_model_chunks", 1)
            plan_fields["schedule"] = {"1f1b": "1f1b", "interleaved": "interleaved", "zbv": "zbv"}.get(
                style, style
            )
            if style in ("interleaved", "zbv"):
                plan_fields["stages_per_rank"] = several if several > 1 else 2
        plan_fields |= self._sequence()
        if get("cpu_offload"):
            plan_fields["offload"] = {"states": "host"}
        if get("gradient_checkpoint_config") is not None:
            plan_fields["recompute"] = "full"
        return plan_fields

    def _sequence(self) -> dict[str, Any]:
        get = self.options.get
        if not get("enable_sequence_parallelism"):
            return {}
        mode = get("sequence_parallelism_mode")
        if mode in ("split_gather", "ring"):  # along the tensor axis, as in Megatron-LM
            return {"sequence_parallel": self.options["tp_size"] > 1}
        kinds = {"all_to_all": "ulysses", "ring_attn": "ring"}
        if mode not in kinds:
            expected = "expected split_gather, ring, all_to_all or ring_attn"
            self._mistakes.append(Mistake("sequence_parallelism_mode", mode, expected))
            return {}
        return {"context": get("sp_size") or 1, "context_kind": kinds[mode]}


__all__ = [
    "GeminiPlugin",
    "HybridParallelPlugin",
    "LowLevelZeroPlugin",
    "Plugin",
    "TorchDDPPlugin",
    "TorchFSDPPlugin",
]
