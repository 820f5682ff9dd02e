"""What ranks write to a disk and read of it, all at once, as offload does."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch

from espalier.comm import all_reduce
from espalier.mesh import Mesh
from espalier.parallel.data.disk import Disk, DiskError
from espalier.planner.calibrate.timing import together

BYTES = 2**26  # of each rank, at a time
_TIMES, _SECONDS = 5, 3.0  # at most, each way
_KEY = "calibrate"


def speeds(mesh: Mesh, folder: Path, nbytes: int = BYTES) -> dict[str, Any]:
    """Of all ranks together, 10^9 bytes a second; the space that is free; empty where nothing can be written.

    The files are removed at the end.
    """
    try:
        disk = Disk(folder)
    except DiskError:
        disk = None
    if not all_reduce(torch.tensor(float(disk is not None)), mesh, 0, "min"):
        if disk is not None:
            disk.close()
        return {}
    assert disk is not None
    try:
        free = disk.free()
        room = all_reduce(torch.tensor(float(free > 4 * mesh.size() * nbytes)), mesh, 0, "min")
        if not room:
            return {}
        written = [torch.rand(nbytes // 4)]
        wrote = together(lambda: disk.write(_KEY, written).result(), _TIMES, mesh, _SECONDS)
        buffers = disk.empty(_KEY)
        read = together(partial(_read, disk, buffers), _TIMES, mesh, _SECONDS)
    finally:
        disk.close()
    every = mesh.size() * nbytes / 1e9
    return {
        "directory": str(folder),
        "capacity_gb": free / 1e9,
        "write_gbs": every / wrote.seconds,
        "read_gbs": every / read.seconds,
        "spread": max(wrote.spread, read.spread),
    }


def _read(disk: Disk, buffers: list[torch.Tensor]) -> None:
    disk.read(_KEY, buffers).result()
