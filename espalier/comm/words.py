"""Small messages: what every rank of a mesh has to say, on every rank."""

from __future__ import annotations

import pickle
from typing import Any

import torch

from espalier.comm import collectives as door
from espalier.mesh import Mesh


def numbers_of_all(numbers: list[int], mesh: Mesh) -> list[list[int]]:
    """The numbers that each rank gives, equally many, in the order of ranks' coordinates.

    One all-gather along each axis.
    """
    rows = torch.tensor([numbers], dtype=torch.int64, device=mesh.device())
    for axis in reversed(range(mesh.ndim)):
        rows = door.all_gather(rows, mesh, axis, 0, rows.shape[0] * mesh.shape[axis])
    found: list[list[int]] = rows.tolist()
    return found


def words_of_all(thing: Any, mesh: Mesh) -> list[Any]:
    """What each rank says (anything that can be pickled), in the order of ranks' coordinates."""
    said = pickle.dumps(thing)
    sizes = [size for (size,) in numbers_of_all([len(said)], mesh)]
    rows = torch.zeros(1, max(sizes), dtype=torch.uint8, device=mesh.device())
    rows[0, : len(said)] = torch.frombuffer(bytearray(said), dtype=torch.uint8)
    for axis in reversed(range(mesh.ndim)):
        rows = door.all_gather(rows, mesh, axis, 0, rows.shape[0] * mesh.shape[axis])
    said_by = rows.cpu().numpy()
    return [pickle.loads(row[:size].tobytes()) for row, size in zip(said_by, sizes, strict=True)]


__all__ = ["numbers_of_all", "words_of_all"]
