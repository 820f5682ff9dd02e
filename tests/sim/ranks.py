"""Ranks with a simulated device each: processes of a pool (tests/pool.py), given one when first asked."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.sim.device import install
from tests.sim.transport import NAME, Group, Shared, register

_shared: list[Shared] = []


def on_device(rank: int, world: int, library: Path, fn: Callable[..., Any], *args: Any) -> Any:
    """``fn(shared, rank, world, *args)`` on a rank whose default process group is that of its device."""
    os.environ["SIM_DEVICES"] = str(world)
    if not _shared:
        _shared.append(register(install(library)))
    torch.accelerator.set_device_index(rank)
    if not isinstance(dist.group.WORLD, Group):
        # the pool's world is of the CPU: its ranks meet again
        store = dist.PrefixStore("sim", dist.distributed_c10d._get_default_store())
        dist.barrier()  # nobody goes while another is still on its way to it
        dist.destroy_process_group()
        dist.init_process_group(
            f"cpu:gloo,sim:{NAME}", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60)
        )
    _shared[0].log.clear()
    return fn(_shared[0], rank, world, *args)
