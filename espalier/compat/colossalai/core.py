"""``colossalai.launch*`` and ``colossalai.core``: the configuration of a program, and its ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist

from espalier.compat.colossalai.config import ParallelMode, Settings, load, plan_of
from espalier.compat.common import Axes
from espalier.mesh import Mesh
from espalier.mesh.process import running_rank, running_size, start
from espalier.parallel import Plan

P = ParamSpec("P")
T = TypeVar("T")
_config: ContextVar[Settings] = ContextVar("config")


class GlobalContext:
    """``gpc``: the configuration, and this process's place in the world, by what ranks share."""

    @property
    def config(self) -> Settings:
        """As ``launch`` was given it; empty before."""
        return _config.get(Settings())

    @property
    def _plan(self) -> Plan:
        return plan_of(self.config, running_size())

    def _axes(self, parallel_mode: ParallelMode) -> Axes:
        plan = self._plan
        return Axes.among(Mesh.from_env(plan.axes), _names(plan, parallel_mode))

    def get_global_rank(self) -> int:
        """This process's."""
        return running_rank()

    def get_world_size(self, parallel_mode: ParallelMode = ParallelMode.GLOBAL) -> int:
        """Ranks of this one's group."""
        return self._axes(parallel_mode).size

    def get_local_rank(self, parallel_mode: ParallelMode | None = None) -> int:
        """This process's number in its group; without a mode, on its host."""
        if parallel_mode is None:
            return int(os.environ.get("LOCAL_RANK", "0"))
        return self._axes(parallel_mode).rank

    def get_ranks_in_group(self, parallel_mode: ParallelMode = ParallelMode.GLOBAL) -> list[int]:
        """The world's numbers of this one's group."""
        return self._axes(parallel_mode).ranks

    def get_group(self, parallel_mode: ParallelMode = ParallelMode.GLOBAL) -> Any:
        """This rank's process group: all of its ranks must ask."""
        return self._axes(parallel_mode).group()

    def is_initialized(self, parallel_mode: ParallelMode = ParallelMode.GLOBAL) -> bool:
        """Whether there is a world, and ranks that share this."""
        if parallel_mode in (ParallelMode.GLOBAL, ParallelMode.DATA, ParallelMode.MODEL):
            return dist.is_initialized()
        return dist.is_initialized() and self.get_world_size(parallel_mode) > 1

    def is_first_rank(self, parallel_mode: ParallelMode = ParallelMode.GLOBAL) -> bool:
        """Whether this is the first of its group."""
        return self.get_local_rank(parallel_mode) == 0

    def is_last_rank(self, parallel_mode: ParallelMode = ParallelMode.GLOBAL) -> bool:
        """Whether this is the last of its group."""
        axes = self._axes(parallel_mode)
        return axes.rank == axes.size - 1

    def get_next_global_rank(self, parallel_mode: ParallelMode = ParallelMode.GLOBAL) -> int:
        """The world's number of the next in its group; behind the last is the first."""
        axes = self._axes(parallel_mode)
        return axes.ranks[(axes.rank + 1) % axes.size]

    def get_prev_global_rank(self, parallel_mode: ParallelMode = ParallelMode.GLOBAL) -> int:
        """The world's number of the one before in its group."""
        axes = self._axes(parallel_mode)
        return axes.ranks[axes.rank - 1]

    def is_pipeline_first_stage(self, ignore_virtual: bool = False) -> bool:
        """Whether this rank has the first stage."""
        return self.is_first_rank(ParallelMode.PIPELINE)

    def is_pipeline_last_stage(self, ignore_virtual: bool = False) -> bool:
        """Whether this rank has the last stage."""
        return self.is_last_rank(ParallelMode.PIPELINE)

    @property
    def data_parallel_size(self) -> int:
        """Ranks that have rows of their own of the same part of the model."""
        return self.get_world_size(ParallelMode.DATA)

    @property
    def pipeline_parallel_size(self) -> int:
        """Ranks of a pipeline."""
        return self._plan.pipe

    @property
    def tensor_parallel_size(self) -> int:
        """Ranks that share each layer."""
        return self.get_world_size(ParallelMode.TENSOR)

    def load_config(self, config: str | Path | Mapping[str, Any]) -> None:
        """Take a configuration, as ``launch`` does."""
        _config.set(load(config))

    def set_seed(self, seed: int) -> None:
        """``torch.manual_seed``: values do not hang on layouts."""
        torch.manual_seed(seed)

    def destroy(self) -> None:
        """Nothing: the world ends with the process."""


def _names(plan: Plan, mode: ParallelMode) -> Iterable[str]:
    """The axes along which the ranks of a group differ."""
    data = [name for name in plan.data_axes if name != "context"]
    tensor = [*plan.tensor_axes, "context"]  # of the two, there is one
    named: dict[ParallelMode, Iterable[str]] = {
        ParallelMode.GLOBAL: plan.axes,
        ParallelMode.DATA: data,
        ParallelMode.MODEL: ["pipe", *tensor],
        ParallelMode.PIPELINE: ["pipe"],
        ParallelMode.TENSOR: tensor,
        ParallelMode.SEQUENCE: ["context"],
        ParallelMode.SEQUENCE_DP: [*data, "context"],
        ParallelMode.PARALLEL_1D: ["tensor"],
    }
    if mode not in named:
        raise ValueError(
            f"{mode}: ranks are not counted by the edges of a tensor's mesh here, as nothing is cut by hand: "
            "give the model whole rows (of utils.get_dataloader); ParallelMode.TENSOR has all ranks that "
            "share a layer, and engine.engine.mesh its axes."
        )
    return named[mode]


global_context = GlobalContext()


def _or_without(leaves_it: Callable[[tuple[Any, ...]], bool]) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """A function whose first argument, the configuration, programs of today leave out.

    Args:
        leaves_it: tells so of its arguments without names.
    """

    def decorated(function: Callable[P, T]) -> Callable[P, T]:
        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            given: Any = (None, *args) if leaves_it(args) else args
            return function(*given, **kwargs)

        return call

    return decorated


def _is_number(args: tuple[Any, ...], at: int) -> bool:
    return len(args) > at and (isinstance(args[at], int) or str(args[at]).isdecimal())


@_or_without(lambda args: _is_number(args, 0))
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
        config: a dict, or a Python file; may be left out, as of Colossal-AI 0.4 on.
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


@_or_without(lambda args: bool(args) and args[0] in dist.Backend.backend_list)
def launch_from_torch(
    config: Any = None, backend: str | None = None, seed: int = 1024, verbose: bool = True
) -> None:
    """Of a world that torchrun, or ``espalier run``, has started."""
    launch(config, backend=backend, seed=seed, verbose=verbose)


@_or_without(lambda args: _is_number(args, 1))
def launch_from_slurm(
    config: Any = None,
    host: str | None = None,
    port: int | None = None,
    backend: str | None = None,
    seed: int = 1024,
    verbose: bool = True,
) -> None:
    """Of a world that srun has started."""
    launch(config, *_from("SLURM_PROCID", "SLURM_NPROCS"), host, port, backend, seed=seed, verbose=verbose)


@_or_without(lambda args: _is_number(args, 1))
def launch_from_openmpi(
    config: Any = None,
    host: str | None = None,
    port: int | None = None,
    backend: str | None = None,
    seed: int = 1024,
    verbose: bool = True,
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
