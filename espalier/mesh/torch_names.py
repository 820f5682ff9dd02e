"""The names under which torch's ``DeviceMesh`` is asked, so that a mesh of ours may stand in its place."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import device_mesh as torch_meshes
from torch.distributed.device_mesh import DeviceMesh

if TYPE_CHECKING:
    from espalier.mesh.mesh import Mesh

# where torch keeps the meshes whose ``with`` blocks are open
_open = getattr(torch_meshes, "_mesh_resources", None)


class TorchNames:
    """Base of :class:`espalier.Mesh`: what torch's ``DeviceMesh`` answers, under the same names."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    coordinate: tuple[int, ...]
    _device_mesh: DeviceMesh | None

    @property
    def mesh_dim_names(self) -> tuple[str, ...]:
        """The axes' names."""
        return self.names

    @property
    def mesh(self: Mesh) -> torch.Tensor:  # type: ignore[misc]
        """The ranks' numbers in the world, in the shape of the mesh."""
        return torch.tensor(self.ranks, dtype=torch.int, device="cpu").view(self.shape)

    def size(self: Mesh, mesh_dim: int | str | None = None) -> int:  # type: ignore[misc]
        """Number of ranks, of the mesh or of one axis."""
        return math.prod(self.shape) if mesh_dim is None else self.shape[self.axis(mesh_dim)]

    def get_rank(self: Mesh) -> int:  # type: ignore[misc]
        """This process's rank in the world."""
        return self.world_rank

    def get_local_rank(self: Mesh, mesh_dim: int | str | None = None) -> int:  # type: ignore[misc]
        """This rank's coordinate on an axis, which may be left out where there is only one."""
        return self.coordinate[self._one_axis(mesh_dim)]

    def get_coordinate(self: Mesh) -> tuple[int, ...] | None:  # type: ignore[misc]
        """This rank's coordinate on each axis; None on a rank outside the mesh."""
        return self.coordinate if self.is_member else None

    def get_group(self: Mesh, mesh_dim: int | str | None = None) -> dist.ProcessGroup:  # type: ignore[misc]
        """The process group along an axis, which may be left out where there is only one.

        Raises:
            ValueError: a dry or single mesh has none.
        """
        return self.to_torch().get_group(self._one_axis(mesh_dim))

    def get_all_groups(self: Mesh) -> list[dist.ProcessGroup]:  # type: ignore[misc]
        """The process group of each axis."""
        return [self.get_group(axis) for axis in range(self.ndim)]

    def _one_axis(self: Mesh, axis: int | str | None) -> int:  # type: ignore[misc]
        if axis is None and self.ndim > 1:
            raise ValueError(f"{self!r} has {self.ndim} axes: say which of {', '.join(self.names)} is meant.")
        return self.axis(0 if axis is None else axis)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, DeviceMesh):
            return self._device_mesh is not None and self._device_mesh == other
        return self is other

    def __hash__(self) -> int:
        return id(self) if self._device_mesh is None else hash(self._device_mesh)

    def __enter__(self: Mesh) -> Mesh:  # type: ignore[misc]
        _open.mesh_stack.append(self if self._device_mesh is None else self._device_mesh)  # type: ignore[union-attr]
        return self

    def __exit__(self, *error: Any) -> None:
        _open.mesh_stack.pop()  # type: ignore[union-attr]


def current_mesh() -> Mesh | DeviceMesh:
    """The mesh whose ``with`` block is open, ours or torch's, the innermost.

    Raises:
        ValueError: there is none.
    """
    stack = getattr(_open, "mesh_stack", None)
    if not stack:
        raise ValueError("No mesh was given. Pass device_mesh=, or call inside `with mesh:`.")
    mesh: Mesh | DeviceMesh = stack[-1]
    return mesh
