"""``deepspeed.runtime``: what programs take from there."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext as noop_context  # noqa: F401
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, RandomSampler, Sampler
from torch.utils.data.distributed import DistributedSampler

from espalier.compat.absent import or_absent
from espalier.compat.common import make_folder_of as ensure_directory_exists  # noqa: F401
from espalier.compat.common import seed_all as set_random_seed  # noqa: F401
from espalier.compat.deepspeed.accelerator import get_accelerator
from espalier.compat.deepspeed.utils import RepeatingLoader
from espalier.device import process_memory
from espalier.engine.seen import gradients_seen
from espalier.mesh.process import running_rank
from espalier.trees import tree_map

_GB = 2**30


class DummyOptim:
    """Stands for an optimizer that the configuration makes.

    Args:
        params: what it is to update.
    """

    def __init__(self, params: Iterable[Any]) -> None:
        self.param_groups = [{"params": list(params)}]


def noop_decorator(func: Callable[..., Any]) -> Callable[..., Any]:
    """The function."""
    return func


def is_model_parallel_parameter(p: Any) -> bool:
    """Whether the program says that each rank has its own part; of parameters that the engine cuts it is not
    to be asked: they are whole to what is computed of them."""
    return bool(getattr(p, "model_parallel", False) or getattr(p, "tensor_model_parallel", False))


def move_to_device(item: Any, device: Any, criterion_func: Callable[[Any], bool] | None = None) -> Any:
    """The tensors in it, those of ``criterion_func`` alone, on a device."""

    def moved(x: Any) -> Any:
        wanted = isinstance(x, torch.Tensor) and (criterion_func is None or criterion_func(x))
        return x.to(device) if wanted else x

    return tree_map(moved, item)


def copy_to_device(item: Any, device: Any, criterion_func: Callable[[Any], bool]) -> Any:
    """Copies of the tensors of ``criterion_func`` on a device; else what there is."""

    def copied(x: Any) -> Any:
        wanted = isinstance(x, torch.Tensor) and criterion_func(x)
        return x.detach().clone().to(device) if wanted else x

    return tree_map(copied, item)


# ---- norms, of whole tensors: operations on what is cut over ranks see all of it


def clip_grad_norm_(parameters: Any, max_norm: float, norm_type: float = 2, mpu: Any = None) -> torch.Tensor:
    """Torch's; ``mpu`` is not asked: what is cut counts whole."""
    return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)


def get_global_norm(norm_list: Iterable[float]) -> float:
    """Of norms of parts."""
    return float(sum(norm**2.0 for norm in norm_list) ** 0.5)


def get_grad_norm(parameters: Any, norm_type: float = 2, mpu: Any = None) -> float:
    """Of the gradients; -1 if one is not finite."""
    return _told(nn.utils.get_total_norm(gradients_seen(parameters), norm_type))


get_flattened_grad_norm = get_grad_norm


def get_weight_norm(parameters: Any, norm_type: float = 2, mpu: Any = None) -> float:
    """Of parameters; -1 if one is not finite."""
    return _told(nn.utils.get_total_norm([p.detach() for p in _several(parameters)], norm_type))


def get_grad_zeros(parameters: Any, mpu: Any = None) -> float:
    """How many elements of the gradients are zero."""
    return float(sum((grad == 0).sum() for grad in gradients_seen(parameters)))


def get_global_norm_of_tensors(
    input_tensors: Sequence[torch.Tensor], norm_type: float = 2, mpu: Any = None, **options: Any
) -> float:
    """Of tensors together; -1 if one is not finite."""
    return _told(nn.utils.get_total_norm(input_tensors, norm_type))


def clip_tensors_by_global_norm(
    input_tensors: Sequence[torch.Tensor],
    max_norm: float = 1.0,
    global_norm: float | None = None,
    mpu: Any = None,
    eps: float = 1e-6,
) -> float:
    """Scale tensors in place, so that their norm together is ``max_norm`` at most; gives that of before."""
    norm = get_global_norm_of_tensors(input_tensors) if global_norm is None else global_norm
    factor = max_norm / (norm + eps)
    if norm >= 0 and factor < 1:
        for x in input_tensors:
            x.detach().mul_(factor)
    return norm


def has_inf_or_nan(x: torch.Tensor) -> torch.Tensor:
    """Whether an element is not finite."""
    return x.isfinite().all().logical_not()


def _several(parameters: Any) -> list[torch.Tensor]:
    return [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)


def _told(norm: torch.Tensor) -> float:
    value = float(norm)
    return value if value - value == 0 else -1.0


# ---- parts of a list


def prefix_sum_inc(weights: Iterable[float]) -> list[float]:
    """Sums of the first one, two, ..."""
    return list(itertools.accumulate(weights))


def partition_uniform(num_items: int, num_parts: int) -> list[int]:
    """Where parts begin, and the last one ends; the first have one more where it does not come out even."""
    if num_items <= num_parts:
        return [min(part, num_items) for part in range(num_parts + 1)]
    each, more = divmod(num_items, num_parts)
    return [part * each + min(part, more) for part in range(num_parts + 1)]


# ---- memory


def empty_cache() -> None:
    """Give back what the accelerator's allocator keeps, and begin a new peak."""
    get_accelerator().empty_cache()
    get_accelerator().reset_peak_memory_stats()


def see_memory_usage(message: str, force: bool = False) -> None:
    """Print, on rank 0, bytes of the accelerator and the host; nothing without ``force``."""
    if force and not running_rank():
        _print_memory(message)


def _print_memory(message: str) -> None:
    gc.collect()
    device = get_accelerator()
    peak = device.max_memory_allocated() / _GB
    print(f"{message}\nallocated {device.memory_allocated() / _GB:.2f} GB, at most {peak:.2f} GB, ", end="")
    host = process_memory("VmRSS") or 0
    print(f"kept {device.memory_reserved() / _GB:.2f} GB; this process on the host {host / _GB:.2f} GB")
    device.reset_peak_memory_stats()


def memory_status(msg: str, print_rank: int = -1, reset_max: bool = False) -> None:
    """:func:`see_memory_usage`, on a rank, or on all."""
    if print_rank in (-1, running_rank()):
        _print_memory(msg)


def get_ma_status() -> int:
    """Bytes of the accelerator that are allocated; 0 on all ranks but the first."""
    return get_accelerator().memory_allocated() if running_rank() == 0 else 0


def call_to_str(base: str, *args: Any, **kwargs: Any) -> str:
    """A call, as it is written."""
    words = [*map(repr, args), *(f"{key}={x!r}" for key, x in kwargs.items())]
    return f"{base}({', '.join(words)})"


class DeepSpeedDataLoader(DataLoader[Any]):
    """A loader of torch's, of this rank's rows.

    Args:
        local_rank: below 0: of all rows, in any order.
        tput_timer: is started before each batch.
        num_local_io_workers: by default none: rows are read by this process.
        data_parallel_world_size, data_parallel_rank: by default all ranks share the rows.
        deepspeed_dataloader_config: of curricula, which are not there.

    Raises:
        ValueError: a curriculum is asked for.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        pin_memory: bool,
        local_rank: int,
        tput_timer: Any,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_local_io_workers: int | None = None,
        data_sampler: Sampler[Any] | None = None,
        data_parallel_world_size: int | None = None,
        data_parallel_rank: int | None = None,
        dataloader_drop_last: bool = False,
        deepspeed_dataloader_config: Mapping[str, Any] | None = None,
    ) -> None:
        if (deepspeed_dataloader_config or {}).get("curriculum_learning"):
            raise ValueError(
                "DeepSpeedDataLoader: there is no curriculum: expected a data_sampler that chooses the rows."
            )
        if data_sampler is None:
            data_sampler = (
                DistributedSampler(dataset, data_parallel_world_size, data_parallel_rank)
                if local_rank >= 0
                else RandomSampler(dataset)  # type: ignore[arg-type]  # it has a length
            )
        super().__init__(
            dataset,
            batch_size,
            sampler=data_sampler,
            pin_memory=pin_memory,
            collate_fn=collate_fn,
            num_workers=num_local_io_workers or 0,
            drop_last=dataloader_drop_last,
        )
        self.tput_timer, self.data_sampler = tput_timer, data_sampler

    def __iter__(self) -> Any:
        for batch in super().__iter__():
            if self.tput_timer:
                self.tput_timer.start()
            yield batch


__all__ = ["DeepSpeedDataLoader", "RepeatingLoader"]

__getattr__ = or_absent(
    __name__,
    "deepspeed.runtime",
    {
        "fp16 bf16_optimizer base_optimizer": "engine.optimizer, torch's own, has cur_scale and overflow",
        "compiler": "engine.compile() compiles the model's blocks",
        "data_pipeline": "choose data and sequence lengths in the data set",
        "hybrid_engine hybrid_engine_graph rollout": "engine.engine.generate(ids, n) writes text under "
        "any plan",
        "tensor_parallel domino": "say tensor_parallel.autotp_size in the configuration",
        "sequence_parallel": "say sequence_parallel_size in the configuration",
        "swap_tensor superoffload zenflow": "`offload_optimizer` and `offload_param` of the configuration",
        "checkpoint_engine model_checkpointing state_dict_factory": "engine.save_checkpoint, load_checkpoint",
        "weight_quantizer quantize": "weights are not quantised",
        "chunked_cross_entropy": "call torch.nn.functional.cross_entropy",
        "comm": "gradients are summed by backward() and step()",
        "eigenvalue progressive_layer_drop sparse_tensor": "DeepSpeed has dropped it, or its use: leave "
        "it out",
        "keep_in_fp32 precision_config torch_autocast": "Plan(precision=), or fp16, bf16, torch_autocast "
        "of the "
        "configuration, say the dtypes",
        "python_gc": "engine.collect_python_gc()",
        "config_utils": "deepspeed.initialize(config=) takes a dict",
        "constants": "the configuration's keys are words: see docs/deepspeed.md",
        "OutputBackwardHookManager TLinear check_internal_apis_for_count_used_parameters "
        "combine_grad_norm_groups "
        "compare_tensors_in_structures count_used_parameters_in_backward filter_empty_parameters "
        "get_checkpoint_folder_size get_inactive_params get_only_unique_item get_tensor_bytes "
        "is_invalid_grad_norm is_optimized_parameter is_transformers_cache mask_nan_or_inf_with_val_inplace "
        "maybe_loss_for_backward register_output_backward_hooks": "it is DeepSpeed's own: leave it out",
        "get_norm_with_moe_layers get_norm_with_moe_layers_fast": "engine.get_global_grad_norm() has experts",
        "CheckOverflow": "engine.skipped_steps and engine.was_step_applied() tell of gradients that were not "
        "finite",
        "PartitionedTensor": "espalier.DTensor is a tensor that is cut over ranks",
        "partition_balanced": 'PipelineModule(partition_method="parameters") balances stages; '
        'plan={"cuts": [...]} says where they begin',
        "all_gather_dp_groups all_gather_into_tensor_dp_groups align_dense_tensors": "the engine gathers "
        "parameters: see engine.plan.zero",
        "offload_adam_states reload_adam_states": "Plan(offload=) lays states on the host: "
        "`offload_optimizer` of the configuration",
    },
    elsewhere={
        "activation_checkpointing": "espalier.compat.deepspeed.checkpointing",
        "config": "espalier.compat.deepspeed.config",
        "dataloader utils": __name__,
        "engine": "espalier.compat.deepspeed.engine",
        "lr_schedules": "espalier.compat.deepspeed.schedules",
        "pipe": "espalier.compat.deepspeed.pipe",
        "zero": "espalier.compat.deepspeed.zero",
    },
)
