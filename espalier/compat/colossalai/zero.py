"""``colossalai.zero``: models and optimizers wrapped one by one, as before there was ``Booster``."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from espalier.compat.absent import or_absent
from espalier.compat.colossalai.booster.plugin import SCALES, GeminiPlugin, LowLevelZeroPlugin, Plugin
from espalier.compat.colossalai.interface import show
from espalier.compat.colossalai.nn.optimizer import HybridAdam
from espalier.compat.common import LateModule, world_size
from espalier.tensor import deferred
from espalier.tensor.deferred import make_parameters_real
from espalier.texts import refuse


class TensorShardStrategy:
    """Each tensor is cut: so it is here."""


class BucketTensorShardStrategy(TensorShardStrategy):
    """Tensors are cut together: so it is here."""


class LazyInitContext:
    """While open, modules are built without memory: ``booster.boost`` then builds each rank's part.

    Args:
        options: devices and the like, which the plan says.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        self._stack = ExitStack()

    def __enter__(self) -> LazyInitContext:
        self._stack.enter_context(deferred())
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()

    @staticmethod
    def materialize(module: nn.Module, verbose: bool = False) -> nn.Module:
        """Let a model have its values now, whole on this rank."""
        make_parameters_real([p for p in module.parameters() if p.is_meta])
        return module


# a dtype has no effect there: that of wrapped models is said by their wrapper, or by model.half()
ZeroInitContext = ColoInitContext = LazyInitContext
_DTYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


class ZeroModule(LateModule):
    """A model whose plan a plugin says; its optimizer says the rest.

    Calls take and give this rank's rows, and ``optimizer.backward(loss)`` goes back.

    Args:
        kind: the plugin.
        options: its arguments.
    """

    def __init__(self, module: nn.Module, kind: type[Plugin], options: Mapping[str, Any]) -> None:
        super().__init__(module, "own", {}, kind(**options).plan(world_size()))
        self._kind, self._options = kind, dict(options)

    def take(self, optimizer: torch.optim.Optimizer, options: Mapping[str, Any]) -> torch.optim.Optimizer:
        """Let an optimizer say more of the plan; it is given back, with ``backward``.

        Raises:
            MistakeError: an argument that is none, or that would change the result.
            ValueError: the model was called already.
        """
        if self.is_made:
            raise ValueError("The model was called already: wrap its optimizer before.")
        self._options |= options
        self.more = self._kind(**self._options).plan(world_size())
        show(optimizer, lambda: self.engine)
        return optimizer


def _without(options: Mapping[str, Any], idle: str) -> dict[str, Any]:
    """What is left without arguments that have no effect."""
    return {key: x for key, x in options.items() if key not in idle.split()}


def GeminiDDP(module: nn.Module, *args: Any, **options: Any) -> ZeroModule:
    """As :class:`GeminiPlugin` lays a model out.

    Args:
        options: those of the plugin; ``mixed_precision`` is a dtype. ``device``, ``zero_group``,
            ``scatter_after_inference``, ``search_range_mb`` and ``verbose`` have no effect.
    """
    known = dict(zip(("chunk_config_dict", "chunk_init_device", "placement_policy"), args, strict=False))
    options = {**known, **options}
    if isinstance(manager := options.pop("placement_policy", "static"), str):  # or of a former GeminiManager
        options["placement_policy"] = "device" if manager == "const" else manager
    if (dtype := options.pop("mixed_precision", None)) is not None:
        options["precision"] = _DTYPES.get(dtype, str(dtype))
    idle = "device scatter_after_inference zero_group search_range_mb verbose"
    return ZeroModule(module, GeminiPlugin, _without(options, idle))


def ShardedModelV2(
    module: nn.Module, shard_strategy: Any = None, tensor_placement_policy: str = "device", **options: Any
) -> ZeroModule:
    """As :func:`GeminiDDP`.

    Args:
        shard_strategy: no effect, as process groups, ``reduce_scatter_bucket_size_mb``,
            ``fp32_reduce_scatter``, ``gradient_predivide_factor`` and ``reuse_fp16_shard`` have none.
    """
    idle = "process_group reduce_scatter_process_group reduce_scatter_bucket_size_mb fp32_reduce_scatter "
    options = _without(options, idle + "gradient_predivide_factor reuse_fp16_shard")
    return GeminiDDP(module, placement_policy=tensor_placement_policy, **options)


def GeminiOptimizer(
    optim: torch.optim.Optimizer, module: ZeroModule, **options: Any
) -> torch.optim.Optimizer:
    """The optimizer of a :func:`GeminiDDP`, with ``backward``.

    Args:
        options: ``initial_scale`` and the like, ``max_norm``; ``gpu_margin_mem_ratio``, ``max_scale``,
            ``verbose`` and ``tp_group`` have no effect.
    """
    if not isinstance(module, ZeroModule):
        refuse("GeminiOptimizer", [("module", type(module), "expected what GeminiDDP(model) gave")])
    options = {"initial_scale": 2.0**32, **options}
    options["max_norm"] = options.pop("clipping_norm", options.get("max_norm", 0.0))
    return module.take(
        optim, _without(options, "gpu_margin_mem_ratio max_scale verbose tp_group params_info")
    )


ZeroOptimizer = GeminiOptimizer


def ShardedOptimizerV2(
    sharded_model: ZeroModule, optimizer: torch.optim.Optimizer, **options: Any
) -> torch.optim.Optimizer:
    """As :func:`GeminiOptimizer`; process groups have no effect."""
    options = _without(options, "dp_process_group mp_process_group")
    return GeminiOptimizer(optimizer, sharded_model, **options)


def GeminiAdamOptimizer(model: ZeroModule, **defaults: Any) -> torch.optim.Optimizer:
    """:func:`GeminiOptimizer` of ``HybridAdam``."""
    of_scale = (*SCALES, "max_norm", "clipping_norm", "gpu_margin_mem_ratio", "max_scale", "norm_type")
    options = {key: defaults.pop(key) for key in of_scale if key in defaults}
    return GeminiOptimizer(HybridAdam(model.parameters(), **defaults), model, **options)


def zero_model_wrapper(
    model: nn.Module,
    zero_stage: int = 1,
    gemini_config: Mapping[str, Any] | None = None,
    verbose: bool = False,
) -> ZeroModule:
    """A model under ZeRO 1, 2 or, as by :func:`GeminiDDP`, 3.

    Args:
        gemini_config: with stage 3, the options of :func:`GeminiDDP`.
    """
    if zero_stage not in (1, 2, 3):
        refuse("zero_model_wrapper", [("zero_stage", zero_stage, "expected 1, 2 or 3")])
    if zero_stage == 3:
        return GeminiDDP(model, **(gemini_config or {}))
    precision = _DTYPES.get(next(model.parameters()).dtype, "fp32")
    return ZeroModule(model, LowLevelZeroPlugin, {"stage": zero_stage, "precision": precision})


def zero_optim_wrapper(
    model: ZeroModule,
    optimizer: torch.optim.Optimizer,
    initial_scale: float = 2**16,
    growth_factor: float = 2,
    backoff_factor: float = 0.5,
    growth_interval: int = 1000,
    hysteresis: int = 2,
    min_scale: float = 1,
    max_scale: float = 2**32,
    max_norm: float = 0.0,
    norm_type: float = 2.0,
    optim_config: Mapping[str, Any] | None = None,
    verbose: bool = False,
) -> torch.optim.Optimizer:
    """The optimizer of what :func:`zero_model_wrapper` gave, with ``backward``.

    Args:
        optim_config: ``reduce_bucket_size``, ``communication_dtype``, ``cpu_offload``;
            ``overlap_communication``, ``gpu_margin_mem_ratio`` and ``verbose`` have no effect.
    """
    if not isinstance(model, ZeroModule):
        refuse("zero_optim_wrapper", [("model", type(model), "expected what zero_model_wrapper gave")])
    options = _without(optim_config or {}, "overlap_communication gpu_margin_mem_ratio verbose")
    if "reduce_bucket_size" in options:
        options["reduce_bucket_size_in_m"] = options.pop("reduce_bucket_size") / 1024**2
    options |= {
        "initial_scale": initial_scale,
        "growth_factor": growth_factor,
        "backoff_factor": backoff_factor,
        "growth_interval": growth_interval,
        "hysteresis": hysteresis,
        "min_scale": min_scale,
        "max_norm": max_norm,
        "norm_type": norm_type,
    }
    return model.take(optimizer, options)


def convert_to_zero_v2(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    model_config: Mapping[str, Any] | None = None,
    optimizer_config: Mapping[str, Any] | None = None,
) -> tuple[ZeroModule, torch.optim.Optimizer]:
    """:func:`ShardedModelV2` and :func:`ShardedOptimizerV2`."""
    made = ShardedModelV2(model, **(model_config or {}))
    return made, ShardedOptimizerV2(made, optimizer, **(optimizer_config or {}))


ZeroDDP = GeminiDDP
_CHUNKS = "chunks follow the model's blocks: leave it out, and wrap by GeminiDDP(model)"


__all__ = [
    "BucketTensorShardStrategy",
    "ColoInitContext",
    "GeminiAdamOptimizer",
    "GeminiDDP",
    "GeminiOptimizer",
    "LazyInitContext",
    "ShardedModelV2",
    "ShardedOptimizerV2",
    "TensorShardStrategy",
    "ZeroDDP",
    "ZeroInitContext",
    "ZeroOptimizer",
    "convert_to_zero_v2",
    "zero_model_wrapper",
    "zero_optim_wrapper",
]

__getattr__ = or_absent(
    __name__,
    "colossalai.zero",
    {
        "chunk": "chunks follow the model's blocks",
        "memory_tracer": "the first steps are measured; `espalier plan` tells of memory before",
        "placement_policy": "GeminiPlugin(placement_policy=) says it",
        "bookkeeping sharded_param zero_hook ZeroHook": (
            "Booster with LowLevelZeroPlugin or GeminiPlugin lays parameters, gradients and states out"
        ),
        "layers": "torch.nn.Embedding is cut by the plan: layouts={'pattern': 'vocab'}",
        "reducer": "gradients are summed by the layouts of their parameters",
        "LowLevelZeroOptimizer": (
            "a model that is called by itself is laid out by nobody: "
            "zero_model_wrapper(model, 1) and zero_optim_wrapper, or Booster with LowLevelZeroPlugin"
        ),
        "ChunkManager GeminiManager TensorInfo TensorState search_chunk_configuration": _CHUNKS,
        "ColoDDP": "Booster with TorchDDPPlugin shares the batch",
        "BaseShardStrategy": "TensorShardStrategy stands for how tensors are cut",
        "no_shard_zero_context no_shard_zero_decrator post_process_colo_init_ctx": "leave it out",
        "get_static_torch_model": "model.state_dict() has whole weights, for a model of your own",
        "LazyTensor": "parameters of models without memory are on torch's device meta",
        "ConstructorManager PretrainedManager": "from_pretrained of transformers reads weights",
    },
    elsewhere={
        "base_shard_strategy bucket_tensor_shard_strategy colo_init_context data_parallel gemini gemini_ddp "
        "gemini_mgr gemini_optimizer gemini_parallel init_context init_ctx legacy low_level low_level_optim "
        "shard_utils sharded_model sharded_model_v2 sharded_optim sharded_optim_v2 tensor_shard_strategy "
        "utils wrapper zero_wrapper construction lazy_init pretrained": __name__
    },
)
