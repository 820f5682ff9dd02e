"""``deepspeed.checkpointing``: recomputation, which is torch's here."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint as recomputed

from espalier.compat.absent import or_absent


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What ``function(*args)`` gives; it is computed again in the backward pass."""
    return recomputed(function, *args, use_reentrant=False, **kwargs)


non_reentrant_checkpoint = checkpoint


def configure(*args: Any, **kwargs: Any) -> None:
    """Nothing: what the configuration says of recomputation is in the plan."""


def is_configured() -> bool:
    """Yes."""
    return True


def reset() -> None:
    """Nothing is kept between steps."""


def set_num_layers(nlayers: int) -> None:
    """Nothing: memory for what is kept is made as it is needed."""


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    """Nothing: ``activation_checkpointing.partition_activations`` of the configuration says it."""


class CudaRNGStatesTracker:
    """Random states of a rank's own, of which there are none: what a model draws is the same on any ranks."""

    def add(self, name: str, seed: int) -> None:
        """Nothing."""

    def reset(self) -> None:
        """Nothing."""

    def get_states(self) -> dict[str, torch.Tensor]:
        """There are none."""
        return {}

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        """Nothing."""

    def fork(self, name: str = "model-parallel-rng") -> AbstractContextManager[None]:
        """What is drawn in here is drawn as everywhere."""
        return nullcontext()


def get_cuda_rng_tracker() -> CudaRNGStatesTracker:
    """One."""
    return CudaRNGStatesTracker()


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """``torch.manual_seed``: of tensors that are cut each rank draws its part of what one process draws."""
    torch.manual_seed(seed)


def model_parallel_reconfigure_tp_seed(seed: int) -> None:
    """Nothing: there is one seed."""


__getattr__ = or_absent(
    __name__,
    "deepspeed.checkpointing",
    {
        "CheckpointFunction": "call deepspeed.checkpointing.checkpoint(function, *inputs)",
        "detach_variable partition_activations gather_partitioned_activations extract_tensors merge_tensors "
        "get_partitioned_activations_for_backward get_cpu_activations_for_backward get_partition_size "
        "get_partition_start get_offloaded_activations_for_backward restore_offloaded_activations "
        "is_activation_to_checkpoint": (
            "Plan(recompute_inputs=) says where the inputs of what is computed again lie"
        ),
        "config": "say the section activation_checkpointing as a dict: deepspeed.initialize(config=)",
        "offload_activations": 'plan={"recompute_inputs": "host"} lays them on the host',
    },
    elsewhere={"checkpointing": __name__},
)
