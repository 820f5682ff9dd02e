"""Plugins: each says a plan. What they say beside is honoured, has no effect (``idle``), or is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch.utils.data import DataLoader, Dataset

from espalier.compat.absent import one_by_one, or_absent
from espalier.compat.colossalai.config import offload_of, scale_of
from espalier.compat.colossalai.interface import Boosted
from espalier.compat.colossalai.pipeline import PipelineStageManager
from espalier.compat.colossalai.utils import sampler_of, share_of
from espalier.compat.common import Axes
from espalier.mesh import Mesh
from espalier.mesh.process import running_rank, running_size
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
    _otherwise = "fp32"  # the precision where none is asked for
    _first: tuple[str, ...] = ()  # those that come without a name

    @classmethod
    def idle_because(cls, key: str) -> str | None:
        """Why an argument has no effect here; None of one that has."""
        return cls._without.get(key)

    @classmethod
    def mistake_in(cls, key: str, value: Any) -> Mistake | None:
        """What is wrong with an argument, if it can be seen by itself."""
        names = (*cls._known, *cls._without, *cls._refused)
        if key not in names:
            return unknown_key(key, value, names)
        if key in cls._refused and value != cls._refused[key][0] and value is not None:
            return Mistake(key, value, f"not to be had here: {cls._refused[key][1]}")
        return None

    def __init__(self, *args: Any, **options: Any) -> None:
        if len(args) > len(self._first):
            raise TypeError(
                f"{type(self).__name__} takes {len(self._first)} argument(s) without a name: name the others."
            )
        options = {**dict(zip(self._first, args, strict=False)), **options}
        found = [self.mistake_in(key, value) for key, value in options.items()]
        mistakes = [mistake for mistake in found if mistake is not None]
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
        of_one = {"zero": 0, "offload": {}, "cuts": None, "expert": 1}
        each = Plan(**{**self._arguments, **of_one}).world_size
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

    # ---- what programs ask of it: this rank's place by what ranks share

    def _axes(self, *names: str) -> Axes:
        return Axes.among(Mesh.from_env(self.plan(running_size()).axes), names)

    @property
    def precision(self) -> str:
        """As it was asked for."""
        return str(self.options.get("precision") or self._otherwise)

    @property
    def zero_stage(self) -> int:
        """What is cut over the data axis."""
        return int(self._arguments.get("zero", 0))

    @property
    def dp_size(self) -> int:
        """Ranks that share the batch, or a sequence of it."""
        return self._axes(*self.plan(running_size()).data_axes).size

    @property
    def tp_size(self) -> int:
        """Ranks that share each layer."""
        return self._axes("tensor").size

    @property
    def pp_size(self) -> int:
        """Ranks of a pipeline."""
        return self._axes("pipe").size

    @property
    def sp_size(self) -> int:
        """Ranks that share a sequence."""
        return self._axes("context").size

    @property
    def dp_group(self) -> Any:
        """The ranks that share the batch: all of them must ask."""
        return self._axes(*self.plan(running_size()).batch_axes).group()

    @property
    def mixed_dp_group(self) -> Any:
        """Those of ``dp_size``: all of them must ask."""
        return self._axes(*self.plan(running_size()).data_axes).group()

    @property
    def tp_group(self) -> Any:
        """Those of ``tp_size``: all of them must ask."""
        return self._axes("tensor").group()

    @property
    def pp_group(self) -> Any:
        """Those of ``pp_size``: all of them must ask."""
        return self._axes("pipe").group()

    @property
    def sp_group(self) -> Any:
        """Those of ``sp_size``: all of them must ask."""
        return self._axes("context").group()

    @property
    def enable_pipeline_parallelism(self) -> bool:
        """Whether the model is cut into stages."""
        return self.pp_size > 1

    @property
    def stage_manager(self) -> PipelineStageManager | None:
        """Which stage this rank has; None without a pipeline."""
        return None

    @property
    def rows_of_micro_batch(self) -> int | None:
        """So many rows of this rank make a micro-batch; None where their number is said."""
        return None

    def supported_precisions(self) -> list[str]:
        """As ``precision=`` takes them."""
        return [name for name in _PRECISIONS if name is not None]

    def control_precision(self) -> bool:
        """Whether ``Booster(mixed_precision=)`` has nothing to say."""
        return bool("precision" in self._arguments)

    def control_device(self) -> bool:
        """Yes: ranks are on the mesh's devices."""
        return True

    def support_no_sync(self) -> bool:
        """Yes."""
        return True

    def support_lora(self) -> bool:
        """Yes: peft's adapters are laid out as they are."""
        return True

    def __getattr__(self, name: str) -> Any:
        if name in _ELSEWHERE:
            raise AttributeError(f"{type(self).__name__}.{name} is not there: {_ELSEWHERE[name]}.")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _precision(self) -> dict[str, Any]:
        named = self.options.get("precision", self._otherwise)
        if named not in _PRECISIONS:
            self._mistakes.append(Mistake("precision", named, "expected fp16, bf16 or fp32"))
            return {}
        precision: dict[str, Any] = {"compute": _PRECISIONS[named]}
        if named == "fp16":
            usual = {"initial_scale": self._first_scale, "min_scale": 1.0, "growth_interval": 1000}
            precision["loss_scale"] = scale_of({**usual, "hysteresis": 2, **self.options})
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
        ranks, rank = running_size(), running_rank()
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


_ELSEWHERE = {
    "pg_mesh": "plugin.dp_group, tp_group, pp_group and sp_group, and engine.mesh, have ranks and groups",
    "shard_config": "how layers are cut is seen in the model, or said by boost(..., layouts={...})",
    "scheduler": "schedules are the plan's: model.engine.plan.schedule",
    "schedule": "schedules are the plan's: model.engine.plan.schedule",
    "checkpoint_io": "booster.save_model, save_checkpoint and the like write checkpoints",
    "get_checkpoint_io": "booster.save_model, save_checkpoint and the like write checkpoints",
    "configure": "booster.boost lays a model out",
}
_ALWAYS = "always so"
_CHOSEN = "there is no such choice here"
_MEASURED = "the first steps are measured"
_OF_BLOCKS = "chunks follow the model's blocks"
_LIKE_DDP = {
    "broadcast_buffers": "buffers are the same on all ranks by how they are made",
    "find_unused_parameters": "parameters without a gradient are not waited for",
    "check_reduction": _CHOSEN,
    "gradient_as_bucket_view": _ALWAYS,
    "static_graph": _CHOSEN,
}
_AS_THEY_ARE = (False, "gradients travel in the dtype of communication_dtype")
_FP8 = {"fp8_communication": _AS_THEY_ARE, "use_fp8": _AS_THEY_ARE}
_OF_ZERO = {
    "master_weights": (True, "masters are float32, or the update is another"),
    "norm_type": (2.0, "gradients are clipped by the 2-norm: torch.nn.utils.clip_grad_norm_ has others"),
    **_FP8,
}
SCALES = ("initial_scale", "min_scale", "growth_factor", "backoff_factor", "growth_interval", "hysteresis")


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

    _first = ("stage", "precision")
    _otherwise = "fp16"
    _known = (
        *SCALES,
        *"stage precision max_norm reduce_bucket_size_in_m communication_dtype cpu_offload".split(),
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
    _refused = _OF_ZERO

    def _plan(self) -> dict[str, Any]:
        precision = self._precision()
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

    _otherwise = "fp16"
    _known = (
        *SCALES,
        *"placement_policy offload_optim_frac offload_param_frac shard_param_frac precision max_norm tp_size "
        "extra_dp_size enable_gradient_accumulation".split(),
    )
    _without: ClassVar[Mapping[str, str]] = one_by_one(
        {
            "device": "the device is the mesh's",
            "chunk_config_dict search_range_m hidden_dim min_chunk_size_m": _OF_BLOCKS,
            "chunk_init_device strict_ddp_mode memstats verbose": _CHOSEN,
            "max_prefetch": "Plan(prefetch_megabytes=) says it in bytes",
            "warmup_non_model_data_ratio steady_cuda_cap_ratio gpu_margin_mem_ratio": _MEASURED,
            "pin_memory enable_sequence_overlap enable_async_reduce": _ALWAYS,
            "force_outputs_fp32": "outputs have the dtype that the model gives them",
            "max_scale": "the scale falls again where it grows too far",
            "enable_all_optimization enable_fused_normalization": "models stay as they are",
            "enable_flash_attention": "torch chooses the kernel",
            "enable_sequence_parallelism": "say it by HybridParallelPlugin",
            "enable_jit_fused": "espalier.compile(module) compiles",
        }
    )
    _refused = _OF_ZERO

    def _plan(self) -> dict[str, Any]:
        get = self.options.get
        plan_fields: dict[str, Any] = {
            "zero": 3 if get("shard_param_frac", 1.0) > 0 else 2,
            "precision": self._precision(),
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


_NOT_OF_EXPERTS = ("dp_outside", "inner_ring_size")


class HybridParallelPlugin(Plugin):
    """``Plan(data=..., tensor=..., pipe=..., context=..., zero=0 to 2)``."""

    _first: tuple[str, ...] = ("tp_size", "pp_size", "sp_size", "precision", "zero_stage")
    _otherwise = "fp16"
    _known: tuple[str, ...] = (
        *SCALES,
        *"tp_size pp_size sp_size precision zero_stage enable_sequence_parallelism sequence_parallelism_mode "
        "num_microbatches microbatch_size max_norm ddp_bucket_cap_mb zero_bucket_size_in_m cpu_offload "
        "communication_dtype pp_style num_model_chunks gradient_checkpoint_config".split(),
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
        "scheduler_nodes": "a schedule makes its own table; Plan(schedule=) takes the file of one",
        "num_layers_per_stage": "stages are balanced by what they cost; Plan(cuts=) says otherwise",
    }
    _refused = _FP8

    def _plan(self) -> dict[str, Any]:
        get = self.options.get
        for key in ("tp_size", "pp_size"):
            if key not in self.options:
                self._mistakes.append(Mistake(key, None, "is needed"))
                return {}
        precision = self._precision()
        wide = 2 if precision.get("compute") != "float32" else 4
        stage = get("zero_stage", 0)
        bucket = get("zero_bucket_size_in_m", 12) * _MEGA * wide / 1e6
        plan_fields: dict[str, Any] = {
            "tensor": get("tp_size"),
            "pipe": get("pp_size"),
            "zero": stage,
            "precision": precision,
            "clip": self._clip(),
            "chunk_megabytes": bucket if stage else float(get("ddp_bucket_cap_mb", 25)),
        }
        if self.options["pp_size"] > 1:
            if not get("num_microbatches") and not get("microbatch_size"):
                told = "is needed with a pipeline, or microbatch_size"
                self._mistakes.append(Mistake("num_microbatches", None, told))
            plan_fields["accumulate"] = get("num_microbatches") or get("pp_size")
            style, several = get("pp_style", "1f1b"), get("num_model_chunks", 1)
            plan_fields["schedule"] = style
            if style in ("interleaved", "zbv"):
                plan_fields["stages_per_rank"] = several if several > 1 else 2
        plan_fields |= self._sequence()
        if get("cpu_offload"):
            plan_fields["offload"] = {"states": "host"}
        if get("gradient_checkpoint_config") is not None:
            plan_fields["recompute"] = "full"
        return plan_fields

    @property
    def rows_of_micro_batch(self) -> int | None:
        """So many rows of this rank make a micro-batch; None where their number is said."""
        rows = None if self.options.get("num_microbatches") else self.options.get("microbatch_size")
        return rows if self.options["pp_size"] > 1 else None

    @property
    def stage_manager(self) -> PipelineStageManager | None:
        """Which stage this rank has; None without a pipeline."""
        if self.options["pp_size"] == 1:
            return None
        style, several = self.options.get("pp_style", "1f1b"), self.options.get("num_model_chunks", 1)
        return PipelineStageManager(self._axes("pipe"), style, several)

    @property
    def pp_style(self) -> str:
        """The schedule's."""
        return str(self.options.get("pp_style", "1f1b"))

    def _sequence(self) -> dict[str, Any]:
        get = self.options.get
        if not get("enable_sequence_parallelism"):
            return {}
        mode = get("sequence_parallelism_mode") or "all_to_all"
        if mode in ("split_gather", "ring"):  # along the tensor axis, as in Megatron-LM
            return {"sequence_parallel": self.options["tp_size"] > 1}
        kinds = {"all_to_all": "ulysses", "ring_attn": "ring"}
        if mode not in kinds:
            expected = "expected split_gather, ring, all_to_all or ring_attn"
            self._mistakes.append(Mistake("sequence_parallelism_mode", mode, expected))
            return {}
        return {"context": get("sp_size") or 1, "context_kind": kinds[mode]}


class MoeHybridParallelPlugin(HybridParallelPlugin):
    """``HybridParallelPlugin``, and ``Plan(expert=...)`` of the ranks that share the batch."""

    _first = ("tp_size", "pp_size", "ep_size", "sp_size", "precision", "zero_stage")
    _known: tuple[str, ...] = (*HybridParallelPlugin._known, "ep_size")
    _without: ClassVar[Mapping[str, str]] = {
        **{key: why for key, why in HybridParallelPlugin._without.items() if key not in _NOT_OF_EXPERTS},
        "moe_dp_outside": "the axes' order is the plan's",
    }

    def _plan(self) -> dict[str, Any]:
        if "ep_size" not in self.options:
            self._mistakes.append(Mistake("ep_size", None, "is needed"))
            return {}
        return {**super()._plan(), "expert": self.options["ep_size"]}

    @property
    def ep_size(self) -> int:
        """Ranks that hold different experts."""
        return int(self.options["ep_size"])

    @property
    def ep_group(self) -> Any:
        """Those of ``ep_size``: all of them must ask."""
        return self._axes("expert").group()

    @property
    def moe_dp_group(self) -> Any:
        """Those that share experts: all of them must ask."""
        return self._axes("data").group()


# what boosted models are, by the plugin
GeminiModel = LowLevelZeroModel = TorchDDPModel = TorchFSDPModel = HybridParallelModule = Boosted

__all__ = [
    "GeminiPlugin",
    "HybridParallelPlugin",
    "LowLevelZeroPlugin",
    "MoeHybridParallelPlugin",
    "Plugin",
    "TorchDDPPlugin",
    "TorchFSDPPlugin",
]

_OPTIMIZERS = "optimizers stay torch's: type(optimizer) tells which"
__getattr__ = or_absent(
    __name__,
    "colossalai.booster.plugin",
    {
        "DPPluginBase PipelinePluginBase": "plugins are subclasses of Plugin",
        "GeminiCheckpointIO LowLevelZeroCheckpointIO TorchDDPCheckpointIO TorchFSDPCheckpointIO": (
            "booster.save_model, save_checkpoint and the like write checkpoints"
        ),
        "HybridParallelAMPOptimizer HybridParallelNaiveOptimizer HybridParallelZeroOptimizer "
        "MoeHybridParallelZeroOptimizer LowLevelZeroOptimizer FSDPOptimizerWrapper": _OPTIMIZERS,
    },
    elsewhere={
        "dp_plugin_base gemini_plugin hybrid_parallel_plugin low_level_zero_plugin "
        "moe_hybrid_parallel_plugin plugin_base pp_plugin_base torch_ddp_plugin torch_fsdp_plugin": __name__
    },
)
