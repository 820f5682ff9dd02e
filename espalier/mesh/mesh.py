"""The mesh: ranks laid out on named axes.

A mesh is one of three things to the code above it, and all three look the same:

* *real*: ranks of an initialised ``torch.distributed`` world (a ``DeviceMesh`` underneath);
* *single*: one process, every axis of size 1, no process group at all;
* *dry*: any shape, no other process. Collectives on it return tensors of the right shape
  without moving anything, so the code that trains also predicts.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from espalier.mesh.process import start

MAX_AXES = 8


class Mesh:
    """Ranks on named axes; immutable.

    Use :meth:`from_env`, :meth:`from_torch`, :meth:`single` or :meth:`dry`.

    Attributes:
        names: the axes' names, outermost first.
        shape: the axes' sizes, in the same order.
        coordinate: this rank's position on each axis.
        device_type: where local tensors live (``"cpu"``, ``"cuda"``; ``"meta"`` on a dry mesh).
        ledgers: the open ledgers that traffic on this mesh is written to (see ``espalier.comm``).
        lately: what was gathered last, for the next operation that wants the same (a cache of one).
    """

    def __init__(
        self,
        names: tuple[str, ...],
        shape: tuple[int, ...],
        *,
        coordinate: tuple[int, ...],
        device_type: str,
        device_mesh: DeviceMesh | None = None,
        is_dry: bool = False,
    ) -> None:
        _check_axes(names, shape)
        self.names = names
        self.shape = shape
        self.coordinate = coordinate
        self.device_type = device_type
        self.is_dry = is_dry
        self.ledgers: list[Any] = []
        self.lately: Any = None
        self._device_mesh = device_mesh
        self._groups: list[dist.ProcessGroup | None] = [None] * len(names)
        self._index = {name: i for i, name in enumerate(names)}
        if device_mesh is not None:
            self._groups = [device_mesh.get_group(i) if n > 1 else None for i, n in enumerate(shape)]

    @staticmethod
    def from_env(axes: Mapping[str, int], device_type: str | None = None) -> Mesh:
        """A mesh over all ranks of the running world, the last axis varying fastest.

        Under torchrun (or ``espalier run``) the world is joined first, if the program has not done so.

        Args:
            axes: name to size; their product must be the world's size.
            device_type: ``"cpu"`` or ``"cuda"``; by default what the process group runs on.

        Raises:
            ValueError: the sizes don't multiply to the number of ranks.
        """
        names, shape = tuple(axes), tuple(int(n) for n in axes.values())
        _check_axes(names, shape)
        if not dist.is_initialized() and "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            start(device_type)
        running = dist.is_initialized()
        world = dist.get_world_size() if running else 1
        needed = math.prod(shape)
        if needed != world:
            given = " × ".join(f"{k} {v}" for k, v in axes.items())
            raise ValueError(
                f"The mesh {given} needs {needed} rank(s), but {world} are running. Start {needed} ranks "
                f"(espalier run -n {needed} ..., torchrun --nproc-per-node {needed} ...) or change the axes."
            )
        if not running:
            return Mesh.single(names, device_type or "cpu")
        if device_type is None:
            device_type = "cuda" if "nccl" in dist.get_backend() else "cpu"
        return Mesh.from_torch(init_device_mesh(device_type, shape, mesh_dim_names=names))

    @staticmethod
    def from_torch(device_mesh: DeviceMesh) -> Mesh:
        """The mesh over a ``DeviceMesh``; the same object every time it is asked for."""
        known: Mesh | None = getattr(device_mesh, "_espalier_mesh", None)
        if known is not None:
            return known
        shape = tuple(device_mesh.mesh.shape)
        names = device_mesh.mesh_dim_names or tuple(f"axis{i}" for i in range(len(shape)))
        coordinate = device_mesh.get_coordinate()
        if coordinate is None:
            raise ValueError(
                f"Rank {dist.get_rank()} is not part of the DeviceMesh {device_mesh}. "
                "Build the mesh on the ranks that it names, or leave this rank out of the program."
            )
        mesh = Mesh(
            tuple(names),
            shape,
            coordinate=tuple(coordinate),
            device_type=device_mesh.device_type,
            device_mesh=device_mesh,
        )
        device_mesh._espalier_mesh = mesh  # type: ignore[attr-defined]
        return mesh

    @staticmethod
    def single(names: tuple[str, ...] = ("data",), device_type: str = "cpu") -> Mesh:
        """One process alone: every axis has size 1 and no process group is needed."""
        return Mesh(tuple(names), (1,) * len(names), coordinate=(0,) * len(names), device_type=device_type)

    @staticmethod
    def dry(
        axes: Mapping[str, int], coordinate: tuple[int, ...] | None = None, device_type: str = "meta"
    ) -> Mesh:
        """A mesh of any shape without processes, seen from one coordinate (by default the first)."""
        names, shape = tuple(axes), tuple(int(n) for n in axes.values())
        return Mesh(
            names,
            shape,
            coordinate=coordinate or (0,) * len(names),
            device_type=device_type,
            is_dry=True,
        )

    @property
    def size(self) -> int:
        """Number of ranks."""
        return math.prod(self.shape)

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def rank(self) -> int:
        """This rank's place in the mesh, the last axis counted fastest."""
        place = 0
        for here, n in zip(self.coordinate, self.shape, strict=True):
            place = place * n + here
        return place

    def axis(self, axis: int | str) -> int:
        """The index of an axis given by name or index."""
        if isinstance(axis, str):
            if axis not in self._index:
                raise ValueError(f"The mesh has no axis {axis!r}; its axes are {', '.join(self.names)}.")
            return self._index[axis]
        if not -self.ndim <= axis < self.ndim:
            raise ValueError(f"The mesh has no axis {axis}; it has {self.ndim}: {', '.join(self.names)}.")
        return axis % self.ndim

    def group(self, axis: int | str) -> dist.ProcessGroup:
        """The process group of the ranks that differ from this one along ``axis`` only."""
        group = self._groups[self.axis(axis)]
        assert group is not None, "axes of size 1 and dry meshes have no process group"
        return group

    def to_torch(self) -> DeviceMesh:
        """The ``DeviceMesh`` underneath.

        Raises:
            ValueError: a dry or single mesh has none.
        """
        if self._device_mesh is None:
            raise ValueError(
                f"{self!r} stands on no torch DeviceMesh: it is "
                f"{'dry' if self.is_dry else 'a single process without a process group'}."
            )
        return self._device_mesh

    def device(self) -> torch.device:
        """The device on which this rank's local tensors live."""
        if self.device_type == "cuda":
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device(self.device_type)

    def __deepcopy__(self, memo: dict[int, Any]) -> Mesh:
        return self

    def __repr__(self) -> str:
        axes = " × ".join(f"{name} {n}" for name, n in zip(self.names, self.shape, strict=True))
        return f"Mesh({axes}{', dry' if self.is_dry else ''}, {self.device_type})"


MeshLike = Mesh | DeviceMesh


def as_mesh(mesh: MeshLike) -> Mesh:
    """Take Espalier's mesh or torch's ``DeviceMesh``."""
    if isinstance(mesh, Mesh):
        return mesh
    if isinstance(mesh, DeviceMesh):
        return Mesh.from_torch(mesh)
    raise TypeError(
        f"Expected an espalier.Mesh or a torch DeviceMesh, got {type(mesh).__name__}. "
        "Build one with espalier.Mesh.from_env({'data': 2, 'tensor': 2}) or init_device_mesh(...)."
    )


def _check_axes(names: tuple[str, ...], shape: tuple[int, ...]) -> None:
    wrong = []
    if len(names) != len(shape):
        wrong.append(f"{len(names)} names for {len(shape)} sizes")
    if len(set(names)) != len(names):
        wrong.append("an axis name stands twice")
    if not 0 < len(names) <= MAX_AXES:
        wrong.append(f"1 to {MAX_AXES} axes are possible, not {len(names)}")
    wrong += [
        f"axis {k!r} has size {n}; a size is at least 1" for k, n in zip(names, shape, strict=False) if n < 1
    ]
    if wrong:
        raise ValueError(f"Not a mesh: names {names}, sizes {shape}: " + "; ".join(wrong) + ".")
