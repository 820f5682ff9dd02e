"""``colossalai.utils``: loaders of a rank's rows, and small things that programs take from there."""

from __future__ import annotations

import argparse
import time
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

from espalier.compat.colossalai.config import plan_of
from espalier.compat.colossalai.core import global_context
from espalier.device import accelerator, current
from espalier.parallel import Plan


def get_default_parser() -> argparse.ArgumentParser:
    """A parser that knows ``--config`` and what ``launch`` takes."""
    parser = argparse.ArgumentParser()
    for name, kind in (("config", str), ("host", str), ("port", int), ("world_size", int), ("rank", int)):
        parser.add_argument(f"--{name}", type=kind)
    parser.add_argument("--local_rank", type=int)
    parser.add_argument("--backend", type=str, default=None)
    return parser


def get_dataloader(
    dataset: Dataset[Any],
    shuffle: bool = False,
    seed: int = 1024,
    add_sampler: bool = True,
    drop_last: bool = False,
    pin_memory: bool = False,
    num_workers: int = 0,
    **options: Any,
) -> DataLoader[Any]:
    """A loader of this rank's rows, under the plan of the configuration that ``launch`` was given.

    ``batch_size`` counts, as there, the rows of all ranks that share a model.

    Args:
        add_sampler: else it gives the same to all ranks.
    """
    options |= {"drop_last": drop_last, "pin_memory": pin_memory, "num_workers": num_workers}
    if not add_sampler:
        return DataLoader(dataset, shuffle=shuffle, **options)
    ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    plan = plan_of(global_context.config, ranks)
    share, here = share_of(plan, rank)
    among, size = share // plan.data, options.get("batch_size", 1)
    if size % among:
        raise ValueError(
            f"get_dataloader(batch_size={size}): expected a multiple of {among}, as {plan} cuts it so."
        )
    options["batch_size"] = size // among
    return DataLoader(dataset, sampler=sampler_of(dataset, share, here, shuffle, seed, drop_last), **options)


def share_of(plan: Plan, rank: int) -> tuple[int, int]:
    """How many ranks share the batch, and which of them a rank is.

    Those are the ranks of the data axis; under 2D, 2.5D and 3D the tensor axes that cut rows share it too.
    """
    places: dict[str, int] = {}
    for name, n in reversed(plan.axes.items()):
        rank, places[name] = divmod(rank, n)
    share, here = 1, 0
    for name in plan.batch_axes:
        share, here = share * plan.axes[name], here * plan.axes[name] + places[name]
    return share, here


def sampler_of(
    dataset: Dataset[Any], share: int, here: int, shuffle: bool, seed: int, drop_last: bool
) -> DistributedSampler[Any]:
    """Which rows a rank loads."""
    return DistributedSampler(
        cast(Any, dataset), num_replicas=share, rank=here, shuffle=shuffle, seed=seed, drop_last=drop_last
    )


def get_current_device() -> torch.device:
    """This process's."""
    return current(accelerator() or "cpu")


def is_dp_rank_0() -> bool:
    """Whether this rank has the first rows of a batch."""
    ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    return share_of(plan_of(global_context.config, ranks), rank)[1] == 0


class MultiTimer:
    """Times by name."""

    def __init__(self, on: bool = True) -> None:
        self._on, self._begun, self._times = on, dict[str, float](), dict[str, list[float]]()

    def start(self, name: str) -> None:
        """Begin."""
        self._begun[name] = time.perf_counter()

    def stop(self, name: str, keep_in_history: bool = False) -> None:
        """End."""
        if self._on and name in self._begun:
            self._times.setdefault(name, []).append(time.perf_counter() - self._begun.pop(name))

    def get_elapsed_time(self, name: str) -> float:
        """The last, in seconds."""
        return self._times[name][-1]

    def history(self, name: str) -> list[float]:
        """All, in seconds."""
        return [*self._times.get(name, ())]
