"""Tensors to files and back, with checksums; files and folders made to last."""

from __future__ import annotations

import os
import zlib
from pathlib import Path

import torch

from espalier.checkpoint.errors import CheckpointError
from espalier.checkpoint.frames import ALIGN, frame_of
from espalier.checkpoint.index import Boxes, Stored
from espalier.checkpoint.pieces import Piece

PIECE = 1 << 22
_PUSH = 1 << 23


class TensorFile:
    """A file of tensors being written.

    Attributes:
        size: bytes so far.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.size = path, 0
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
        for begin in range(0, len(data), PIECE):
            part = data[begin : begin + PIECE]
            crc = zlib.crc32(part, crc)
            self._put(part, at + begin)
        head, tail = frame.around(crc)
        self._put(memoryview(head), start)
        self._put(memoryview(tail), at + len(data))
        self.size = at + len(data) + len(tail)
        if self.size - self._pushed > _PUSH and hasattr(os, "posix_fadvise"):
            # the disk begins now, and close() has less to wait for
            os.posix_fadvise(self._file, self._pushed, self.size - self._pushed, os.POSIX_FADV_DONTNEED)
            self._pushed = self.size
        if known is not None:
            self._scalars[known] = start, crc
        return Stored(piece.box, self.path.name, start, crc)

    def _put(self, data: memoryview, at: int) -> None:
        done = 0
        while done < len(data):
            done += os.pwrite(self._file, data[done:], at + done)

    def close(self, *, last: bool = True) -> None:
        """Close it; ``last``: see that it outlives a crash of the machine."""
        if self._file >= 0:
            file, self._file = self._file, -1
            try:
                if last:
                    os.fsync(file)
            finally:
                os.close(file)


def bytes_of(x: torch.Tensor) -> memoryview:
    """The bytes of a tensor in the host's memory, in order; a copy where they do not stand there so."""
    x = x.detach().cpu().resolve_conj().resolve_neg().contiguous()
    if not x.numel():
        return memoryview(b"")
    return memoryview(x.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


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
            for begin in range(0, len(into), PIECE):
                part = into[begin : begin + PIECE]
                done = 0
                while done < len(part):
                    got = os.preadv(file, [part[done:]], at + begin + done)
                    if not got:
                        raise CheckpointError(damaged(path, f"it ends within {name}"))
                    done += got
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
    """See that a box stands in its file as it was written, its frame too.

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
        if found != head or file.read(len(tail)) != tail:
            raise CheckpointError(damaged(path, f"the frame of {name} is not the one that was written"))


def damaged(path: Path, what: str) -> str:
    """The words of an error."""
    return (
        f"{path} is damaged: {what}. Load another checkpoint (espalier checkpoint {path.parent.parent} lists "
        "them), and look at the disk."
    )


def write_file(path: Path, content: bytes) -> None:
    """A file that is there whole or not at all, and outlives a crash of the machine."""
    hidden = path.with_name(f".{path.name}.new")
    with open(hidden, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    hidden.rename(path)


def sync_folder(path: Path) -> None:
    """What was renamed in a folder stays so."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
