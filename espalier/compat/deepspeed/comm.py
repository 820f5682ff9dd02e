"""``deepspeed.comm``: torch.distributed under this name; ``engine.ledger()`` tells what was sent."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import wraps
from types import FunctionType
from typing import Any

import torch
import torch.distributed as _dist
from torch.distributed.device_mesh import init_device_mesh

from espalier.compat.absent import or_absent
from espalier.compat.deepspeed.groups import init_distributed
from espalier.device import accelerator
from espalier.mesh.process import running_rank as get_rank
from espalier.mesh.process import running_size as get_world_size

__all__ = [
    "all_gather_coalesced",
    "all_reduce_coalesced",
    "allgather_fn",
    "barrier",
    "configure",
    "get_all_ranks_from_group",
    "get_global_rank",
    "get_local_rank",
    "get_rank",
    "get_world_group",
    "get_world_size",
    "has_all_gather_into_tensor",
    "has_all_reduce_coalesced",
    "has_coalescing_manager",
    "has_reduce_scatter_tensor",
    "inference_all_reduce",
    "init_distributed",
    "initialize_mesh_device",
    "log_summary",
    "reduce_scatter_fn",
    "reset_log",
]

# of DeepSpeed's functions: what its log of messages takes
_LOGGED = frozenset({"prof", "log_name", "debug"})


def get_local_rank() -> int:
    """This rank's number on its host."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def barrier(group: Any = None, async_op: bool = False, device_ids: Any = None, **_: Any) -> Any:
    """Until all ranks are there; a process by itself is."""
    return _dist.barrier(group, async_op, device_ids) if _dist.is_initialized() else None


def get_world_group() -> Any:
    """That of all ranks."""
    return _dist.group.WORLD


def get_global_rank(group: Any = None, group_rank: int = 0) -> int:
    """The world's number of a rank of a group."""
    return group_rank if group is None else _dist.get_global_rank(group, group_rank)


def get_all_ranks_from_group(group: Any = None) -> list[int]:
    """The world's numbers of a group's ranks."""
    return _dist.get_process_group_ranks(_dist.group.WORLD if group is None else group)


def initialize_mesh_device(mesh_shape: Sequence[int], mesh_dim_names: Sequence[str]) -> Any:
    """A ``DeviceMesh`` of torch's."""
    return init_device_mesh(accelerator() or "cpu", tuple(mesh_shape), mesh_dim_names=tuple(mesh_dim_names))


def allgather_fn(output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any = None,
                 async_op: bool = False, **_: Any) -> Any:  # fmt: skip
    """``torch.distributed.all_gather_into_tensor``."""
    return _dist.all_gather_into_tensor(output_tensor, input_tensor, group, async_op)


def reduce_scatter_fn(output_tensor: torch.Tensor, tensor: torch.Tensor, op: Any = _dist.ReduceOp.SUM,
                      group: Any = None, async_op: bool = False, **_: Any) -> Any:  # fmt: skip
    """``torch.distributed.reduce_scatter_tensor``."""
    return _dist.reduce_scatter_tensor(output_tensor, tensor, op, group, async_op)


def inference_all_reduce(tensor: torch.Tensor, op: Any = _dist.ReduceOp.SUM, group: Any = None) -> Any:
    """``torch.distributed.all_reduce``."""
    return _dist.all_reduce(tensor, op, group)


class _All:
    """Several transfers that are under way, as one."""

    def __init__(self, works: Sequence[Any]) -> None:
        self._works = works

    def wait(self) -> None:
        """For all of them."""
        for work in self._works:
            work.wait()


def _one_by_one(works: Sequence[Any], async_op: bool) -> _All | None:
    return _All(works) if async_op else None


def all_reduce_coalesced(tensors: Sequence[torch.Tensor], op: Any = _dist.ReduceOp.SUM, group: Any = None,
                         async_op: bool = False) -> Any:  # fmt: skip
    """Each summed over the ranks."""
    return _one_by_one([_dist.all_reduce(x, op, group, async_op) for x in tensors], async_op)


def all_gather_coalesced(output_tensors: Sequence[torch.Tensor], input_tensors: Sequence[torch.Tensor],
                         group: Any = None, async_op: bool = False) -> Any:  # fmt: skip
    """Each gathered from the ranks."""
    pairs = zip(output_tensors, input_tensors, strict=True)
    return _one_by_one([allgather_fn(out, x, group, async_op) for out, x in pairs], async_op)


def has_all_gather_into_tensor() -> bool:
    """Yes."""
    return True


has_reduce_scatter_tensor = has_all_reduce_coalesced = has_all_gather_into_tensor


def has_coalescing_manager() -> bool:
    """No: what belongs together is one message."""
    return False


def configure(*args: Any, **kwargs: Any) -> None:
    """Nothing: ``comms_logger`` of the configuration keeps every step's ledger."""


def log_summary(show_straggler: bool = False, return_dict: bool = False) -> None:
    """Nothing: ``print(engine.engine.ledger())`` tells what a step has sent."""


def reset_log() -> None:
    """Nothing is kept."""


def _less_logged(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of torch's that also takes what DeepSpeed's log of messages takes."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **{key: x for key, x in kwargs.items() if key not in _LOGGED})

    return call


def _of_torch(name: str) -> Any:
    found = getattr(_dist, name)
    return _less_logged(found) if isinstance(found, FunctionType) else found


__getattr__ = or_absent(
    __name__,
    "deepspeed.comm",
    {
        "cdb TorchBackend CCLBackend init_deepspeed_backend set_backend timed_op": "call torch's",
        "mpi_discovery in_aml in_aws_sm in_dlts patch_aml_env_for_torch_nccl_backend "
        "patch_aws_sm_env_for_torch_nccl_backend": "init_distributed() reads the launcher's environment",
        "get_logged_comm_ops get_comm_operation_count has_comm_data comms_logger timers timer_summary": (
            "engine.engine.ledger() tells what a step has sent"
        ),
        "enable_symm_mem_for_group": "leave it out",
        "backend ccl mori torch pg_utils utils constants": "call torch.distributed's functions",
        "config": "say the section comms_logger as a dict: deepspeed.initialize(config=)",
    },
    _of_torch,
    elsewhere={"comm reduce_op": __name__},
)
