"""``colossalai.cluster``: a rank among all."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch.distributed as dist

from espalier.compat.absent import or_absent
from espalier.mesh.process import running_rank, running_size


class DistCoordinator:
    """Who this rank is, and what one of them does for all.

    Attributes:
        rank, world_size, local_rank: 0 of 1 in a process without a world.
    """

    def __init__(self) -> None:
        self.rank, self.world_size = running_rank(), running_size()
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))

    def is_master(self, process_group: Any = None) -> bool:
        """Whether it is the first, of a group."""
        return (self.rank if process_group is None else dist.get_rank(process_group)) == 0

    def is_node_master(self) -> bool:
        """Whether it is the first on its host."""
        return self.local_rank == 0

    def is_last_process(self, process_group: Any = None) -> bool:
        """Whether it is the last, of a group."""
        return running_rank(process_group) == running_size(process_group) - 1

    def print_on_master(self, msg: str, process_group: Any = None) -> None:
        """Print on the first."""
        if self.is_master(process_group):
            print(msg, flush=True)

    def print_on_node_master(self, msg: str) -> None:
        """Print on the first of each host."""
        if self.is_node_master():
            print(msg, flush=True)

    def block_all(self, process_group: Any = None) -> None:
        """Until all ranks are there."""
        if dist.is_initialized():
            dist.barrier(process_group)

    @contextmanager
    def priority_execution(self, executor_rank: int = 0, process_group: Any = None) -> Iterator[None]:
        """One rank does what is in here before the others do."""
        first = (self.rank if process_group is None else dist.get_rank(process_group)) == executor_rank
        if not first:
            self.block_all(process_group)
        yield
        if first:
            self.block_all(process_group)

    def on_master_only(self, process_group: Any = None) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """A function that runs on the first alone, and gives None elsewhere."""

        def decorated(function: Callable[..., Any]) -> Callable[..., Any]:
            @wraps(function)
            def call(*args: Any, **kwargs: Any) -> Any:
                return function(*args, **kwargs) if self.is_master(process_group) else None

            return call

        return decorated

    def destroy(self, process_group: Any = None) -> None:
        """Leave the world."""
        if dist.is_initialized():
            dist.destroy_process_group(process_group)


__all__ = ["DistCoordinator"]

__getattr__ = or_absent(
    __name__,
    "colossalai.cluster",
    {
        "ProcessGroupMesh ProcessGroupManager DeviceMeshManager DeviceMeshInfo": (
            "espalier.Mesh.from_env({...}) has named axes and their groups"
        )
    },
    elsewhere={"device_mesh_manager dist_coordinator process_group_manager process_group_mesh": __name__},
)
