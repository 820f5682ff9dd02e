"""``colossalai.launch*`` and ``colossalai.core``: the configuration of a program, and its ranks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from espalier.compat.colossalai.config import Settings, load
from espalier.mesh.process import running_rank, running_size, start

_config: ContextVar[Settings] = ContextVar("config")


class GlobalContext:
    """``gpc``: the configuration, and this process's place in the world."""

    @property
    def config(self) -> Settings:
        """As ``launch`` was given it; empty before."""
        return _config.get(Settings())

    def get_global_rank(self) -> int:
        """This process's."""
        return running_rank()

    def get_world_size(self, parallel_mode: Any = None) -> int:
        """Ranks in all: axes and their sizes are in ``engine.mesh``."""
        return running_size()

    def get_local_rank(self, parallel_mode: Any = None) -> int:
        """This process's number on its host."""
        return int(os.environ.get("LOCAL_RANK", "0"))

    def is_initialized(self, parallel_mode: Any = None) -> bool:
        """Whether there is a world."""
        return dist.is_initialized()

    def destroy(self) -> None:
        """Nothing: the world ends with the process."""


global_context = GlobalContext()


def launch(
    config: str | Path | Mapping[str, Any] | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    host: str | None = None,
    port: int | None = None,
    backend: str | None = None,
    local_rank: int | None = None,
    seed: int = 1024,
    verbose: bool = True,
) -> None:
    """Join the world, take the configuration, seed the generators.

    Args:
        config: a dict, or a Python file.
        rank, world_size, host, port, local_rank: as the environment says, where they are not given.
        backend: ``"gloo"`` is for the CPU; else the device chooses.
    """
    variables = {
        "RANK": rank,
        "WORLD_SIZE": world_size,
        "MASTER_ADDR": host,
        "MASTER_PORT": port,
        "LOCAL_RANK": local_rank,
    }
    os.environ.update({name: str(value) for name, value in variables.items() if value is not None})
    _config.set(load(config))
    if not dist.is_initialized() and "RANK" in os.environ:
        os.environ.setdefault("LOCAL_RANK", os.environ["RANK"])
        os.environ.setdefault("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"])
        start("cpu" if backend == "gloo" else None)
    torch.manual_seed(seed)


def launch_from_torch(
    config: Any = None, backend: str | None = None, seed: int = 1024, verbose: bool = True
) -> None:
    """Of a world that torchrun, or ``espalier run``, has started."""
    launch(config, backend=backend, seed=seed, verbose=verbose)


def launch_from_slurm(
    config: Any, host: str, port: int, backend: str | None = None, seed: int = 1024, verbose: bool = True
) -> None:
    """Of a world that srun has started."""
    launch(config, *_from("SLURM_PROCID", "SLURM_NPROCS"), host, port, backend, seed=seed, verbose=verbose)


def launch_from_openmpi(
    config: Any, host: str, port: int, backend: str | None = None, seed: int = 1024, verbose: bool = True
) -> None:
    """Of a world that mpirun has started."""
    ranks = _from("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
    here = int(os.environ.get("OMPI_COMM_WORLD_LOCAL_RANK", "0"))
    launch(config, *ranks, host, port, backend, here, seed=seed, verbose=verbose)


def _from(rank: str, size: str) -> tuple[int, int]:
    if rank not in os.environ or size not in os.environ:
        raise ValueError(
            f"{rank} and {size} are not in the environment: this process was started by another launcher. "
            "Under torchrun or espalier run call launch_from_torch(config)."
        )
    return int(os.environ[rank]), int(os.environ[size])
