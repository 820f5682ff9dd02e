"""Tensors to files and back, with checksums."""

from __future__ import annotations

import os
import zlib
from pathlib import Path

import torch

from espalier.checkpoint.errors import CheckpointError
from espalier.checkpoint.frames import ALIGN, frame_of
from espalier.checkpoint.index import Boxes, Stored
from espalier.checkpoint.pieces import Piece
from espalier.files import bytes_of, get, pieces_of, put

_PUSH = 1 << 23


class TensorFile:
    """A file of tensors being written.

    Args:
        push: let the disk begin at once, so that :meth:`close` has less to wait for.

    Attributes:
        size: bytes so far.
    """

    def __init__(self, path: Path, *, push: bool = True) -> None:
        self.path, self.size = path, 0
        self._push = push and hasattr(os, "posix_fadvise")
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        self._pushed = 0
        self._scalars: dict[tuple[torch.dtype, bytes], tuple[int, int]] = {}

    def write(self, piece: Piece) -> Stored:
        """Append what is on the host or on a device; equal numbers without dims stand there once."""
        data = bytes_of(piece.values)
        known = (piece.values.dtype, bytes(data)) if not piece.box.sizes else None
        if known is not None and known in self._scalars:
            return Stored(piece.box, self.path.name, *self._scalars[known])
        frame = frame_of(piece.values.dtype, piece.box.sizes)
        start = -(-self.size // ALIGN) * ALIGN
        at, crc = start + frame.start, 0
        for begin, part in pieces_of(data):
            crc = zlib.crc32(part, crc)
            put(self._file, part, at + begin)
        head, tail = frame.around(crc)
        put(self._file, memoryview(head), start)
        put(self._file, memoryview(tail), at + len(data))
        self.size = at + len(data) + len(tail)
        if self._push and self.size - self._pushed > _PUSH:
            os.posix_fadvise(self._file, self._pushed, self.size - self._pushed, os.POSIX_FADV_DONTNEED)
            self._pushed = self.size
        if known is not None:
            self._scalars[known] = start, crc
        return Stored(piece.box, self.path.name, start, crc)

    def close(self, *, last: bool = True) -> None:
        """Close it; ``last``: see that it outlives a crash of the machine."""
        if self._file >= 0:
            file, self._file = self._file, -1
            try:
                if last:
                    os.fsync(file)
            finally:
                os.close(file)


def read(folder: Path, name: str, entry: Boxes, stored: Stored) -> torch.Tensor:
    """A box of a tensor, on the CPU.

    Raises:
        CheckpointError: the file holds something else than what was written, or cannot be read.
    """
    sizes = stored.box.sizes
    values = torch.empty(sizes, dtype=entry.dtype, device="cpu")
    into = bytes_of(values)
    path, at = folder / stored.file, stored.start + frame_of(entry.dtype, sizes).start
    crc = 0
    try:
        file = os.open(path, os.O_RDONLY)
        try:
            for begin, part in pieces_of(into):
                if get(file, part, at + begin) < len(part):
                    raise CheckpointError(damaged(path, f"it ends within {name}"))
                crc = zlib.crc32(part, crc)
        finally:
            os.close(file)
    except OSError as error:
        raise CheckpointError(damaged(path, str(error.strerror))) from error
    if crc != stored.crc:
        stretch = f"bytes {at:,} to {at + len(into):,}"
        raise CheckpointError(damaged(path, f"{stretch} (of {name}) are not those that were written"))
    return values


def check(folder: Path, name: str, entry: Boxes, stored: Stored) -> None:
    """See that a box stands in its file as it was written, its frame and what follows that, too.

    Raises:
        CheckpointError: it does not.
    """
    values = read(folder, name, entry, stored)
    frame = frame_of(entry.dtype, stored.box.sizes)
    size = values.numel() * values.element_size()
    head, tail = frame.around(stored.crc)
    path = folder / stored.file
    with open(path, "rb") as file:
        file.seek(stored.start)
        found = file.read(len(head))
        file.seek(size, os.SEEK_CUR)
        intact = found == head and file.read(len(tail)) == tail
        # up to where the next one would begin
        if not intact or any(file.read(-file.tell() % ALIGN)):
            raise CheckpointError(damaged(path, f"the frame of {name} is not the one that was written"))


def damaged(path: Path, what: str) -> str:
    """The words of an error."""
    return (
        f"{path} is damaged: {what}. Load another checkpoint (espalier checkpoint {path.parent.parent} lists "
        "them), and look at the disk."
    )
