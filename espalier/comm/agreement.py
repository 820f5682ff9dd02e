"""Agreement on failure: what one rank's values make impossible fails alike on all that would wait for it."""

from __future__ import annotations

import builtins
import contextlib
from collections.abc import Iterable
from typing import Any

import torch

from espalier.comm import collectives as door
from espalier.comm.traced import symbolic
from espalier.mesh import Mesh

# how torch refuses values; checkpointing ends its recomputation by an exception of another kind
REFUSALS = (RuntimeError, ValueError, IndexError)

_ROOM = 2048  # bytes of an error's words


def looks(mesh: Mesh) -> bool:
    """Whether values are looked at: on a CPU, as by torch itself; a look at others waits for the device."""
    return mesh.device_type == "cpu" and not mesh.is_dry and not symbolic()


def agree(error: Exception | None, mesh: Mesh, axes: Iterable[int]) -> None:
    """Raise on all ranks along the axes, which all call this, what the first that failed met.

    One all-reduce of a byte along each axis, where nobody failed.

    Raises:
        Exception: this rank's own error, or one of the type and words of another's.
    """
    axes = tuple(axes)
    device = mesh.device() if mesh.device_type == "cuda" else torch.device("cpu")
    failed = torch.zeros(1, dtype=torch.uint8, device=device)
    if error is not None:
        failed.fill_(1)
    for axis in axes:
        door.all_reduce_(failed, mesh, axis, "max").wait()
    if not failed.item():
        return
    text = b"" if error is None else f"{mesh.world_rank} {type(error).__name__} {error}".encode()[:_ROOM]
    words = torch.zeros(1, _ROOM, dtype=torch.uint8, device="cpu")
    words[0, : len(text)] = torch.tensor(list(text), dtype=torch.uint8)
    words = words.to(device)
    for axis in axes:
        rows = door.all_gather(words, mesh, axis, 0, mesh.shape[axis])
        words = rows[rows[:, 0].nonzero()[:1, 0]] if rows[:, 0].any() else words
    told = bytes(words[0].tolist()).rstrip(b"\0").decode(errors="replace")
    rank, name, said = told.split(" ", 2)
    if int(rank) == mesh.world_rank and error is not None:
        raise error
    met = _made(name, said)
    met.add_note(f"Met by rank {rank}.")
    raise met from error


def _made(name: str, said: str) -> Exception:
    """An error of that type, if there is one that needs words alone."""
    kinds: list[Any] = [getattr(builtins, name, None)]
    known = [*REFUSALS]
    while known:
        kind = known.pop()
        kinds += [kind] if kind.__name__ == name else []
        known += kind.__subclasses__()
    for kind in kinds:
        with contextlib.suppress(TypeError):
            return kind(said)  # type: ignore[no-any-return]
    return RuntimeError(said)
