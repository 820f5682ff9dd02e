"""Tensors in a file and back, with checksums, each framed as ``torch.save`` does it.

A frame is a zip archive in which the data stands as it is. It is made here, not by torch, because the
checksum that the archive needs is the one that a checkpoint needs as well: data is read once.
``torch.load`` and torch's distributed checkpoint read it.
"""

from __future__ import annotations

import io
import os
import pickle
import struct
import zlib
from collections import OrderedDict
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from espalier.checkpoint.index import CheckpointError, StoredBox, TensorInfo
from espalier.files import bytes_of, get, pieces_of, put
from espalier.layout.layout import Box
from espalier.torch_private import dtypes_of_storages, rebuild_tensor, rebuild_tensor_of_dtype

# ---- frames

ALIGN = 64
LARGEST = 1 << 26  # bytes of a tensor in one frame: far below where archives need 64-bit sizes

_NAME = "archive"
_LOCAL = struct.Struct("<4s5H3I2H")
CENTRAL = struct.Struct("<4s6H3I5H2I")
_END = struct.Struct("<4s4H2IH")
_CRC = 14  # where a checksum stands in a local header


class Frame(NamedTuple):
    """What stands before and after a tensor's data.

    Attributes:
        head, tail: in which the checksum of the data is still to be put,
        at: where in each of them.
    """

    head: bytes
    tail: bytes
    at: tuple[int, int]

    @property
    def start(self) -> int:
        """Where the data stands."""
        return len(self.head)

    def around(self, crc: int) -> tuple[bytes, bytes]:
        """Head and tail for data of this checksum."""
        word = struct.pack("<I", crc)
        head, tail = self.at
        return (
            self.head[:head] + word + self.head[head + 4 :],
            self.tail[:tail] + word + self.tail[tail + 4 :],
        )


@lru_cache(maxsize=4096)
def frame_of(dtype: torch.dtype, shape: tuple[int, ...]) -> Frame:
    """The frame of a contiguous tensor; its data is aligned if it begins at a multiple of ``ALIGN``."""
    size = torch.Size(shape).numel() * dtype.itemsize
    head, tail, table = bytearray(), bytearray(), bytearray()
    part, before, at = head, 0, (0, 0)  # bytes before the part
    files = {"data.pkl": _pickled(dtype, shape), "byteorder": b"little", "data/0": None, "version": b"3\n"}
    for name, content in files.items():
        path, extra, begun = f"{_NAME}/{name}".encode(), b"", before + len(part)
        crc, n = (0, size) if content is None else (zlib.crc32(content), len(content))
        if content is None:
            pad = -(begun + _LOCAL.size + len(path) + 4) % ALIGN
            extra = struct.pack("<2sH", b"FB", pad) + b"Z" * pad
            at = begun + _CRC, len(table) + _CRC + 2
        common = (0, 0, 0, 0, crc, n, n, len(path))
        part += _LOCAL.pack(b"PK\3\4", 20, *common, len(extra)) + path + extra
        table += CENTRAL.pack(b"PK\1\2", 20, 20, *common, 0, 0, 0, 0, 0, begun) + path
        if content is None:
            part, before = tail, len(head) + size
        else:
            part += content
    begun = before + len(tail)
    at = at[0], len(tail) + at[1]
    tail += table + _END.pack(b"PK\5\6", 0, 0, len(files), len(files), len(table), begun, 0)
    return Frame(bytes(head), bytes(tail), at)


class _Storage:
    """Stands for the data in the pickle."""


class _Pickler(pickle.Pickler):
    def __init__(self, file: Any, dtype: torch.dtype, shape: Sequence[int]) -> None:
        super().__init__(file, protocol=2)
        self._dtype, self._shape = dtype, shape

    def persistent_id(self, obj: Any) -> Any:
        if type(obj) is not _Storage:
            return None
        n = torch.Size(self._shape).numel()
        kind = dtypes_of_storages().get(self._dtype)
        if kind is None:
            return "storage", torch.UntypedStorage, "0", "cpu", n * self._dtype.itemsize
        return "storage", getattr(torch, kind), "0", "cpu", n


class _Tensor:
    def __init__(self, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        self.dtype, self.shape = dtype, shape

    def __reduce__(self) -> Any:
        stride = torch.empty(self.shape, device="meta").stride()
        arguments: tuple[Any, ...] = (_Storage(), 0, self.shape, stride, False, OrderedDict())
        if self.dtype in dtypes_of_storages():
            return rebuild_tensor, arguments
        return rebuild_tensor_of_dtype, (*arguments, self.dtype)


def _pickled(dtype: torch.dtype, shape: tuple[int, ...]) -> bytes:
    out = io.BytesIO()
    _Pickler(out, dtype, shape).dump(_Tensor(dtype, shape))
    return out.getvalue()


# ---- files

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

    def write(self, box: Box, values: torch.Tensor) -> StoredBox:
        """Append what is on the host or on a device; equal numbers without dims stand there once."""
        data = bytes_of(values)
        known = (values.dtype, bytes(data)) if not box.sizes else None
        if known is not None and known in self._scalars:
            return StoredBox(box, self.path.name, *self._scalars[known])
        frame = frame_of(values.dtype, box.sizes)
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
        return StoredBox(box, self.path.name, start, crc)

    def close(self, *, last: bool = True) -> None:
        """Close it; ``last``: see that it outlives a crash of the machine."""
        if self._file >= 0:
            file, self._file = self._file, -1
            try:
                if last:
                    os.fsync(file)
            finally:
                os.close(file)


def read(folder: Path, name: str, info: TensorInfo, stored: StoredBox) -> torch.Tensor:
    """A box of a tensor, on the CPU.

    Raises:
        CheckpointError: the file holds something else than what was written, or cannot be read.
    """
    sizes = stored.box.sizes
    values = torch.empty(sizes, dtype=info.dtype, device="cpu")
    into = bytes_of(values)
    path, at = folder / stored.file, stored.start + frame_of(info.dtype, sizes).start
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


def check(folder: Path, name: str, info: TensorInfo, stored: StoredBox) -> None:
    """See that a box stands in its file as it was written, its frame and what follows that, too.

    Raises:
        CheckpointError: it does not.
    """
    values = read(folder, name, info, stored)
    frame = frame_of(info.dtype, stored.box.sizes)
    size = values.numel() * values.element_size()
    head, tail = frame.around(stored.crc)
    path = folder / stored.file
    with open(path, "rb") as file:
        file.seek(stored.start)
        stored_head = file.read(len(head))
        file.seek(size, os.SEEK_CUR)
        intact = stored_head == head and file.read(len(tail)) == tail
        # up to where the next one would begin
        if not intact or any(file.read(-file.tell() % ALIGN)):
            raise CheckpointError(damaged(path, f"the frame of {name} is not the one that was written"))


def damaged(path: Path, what: str) -> str:
    """The words of an error."""
    return (
        f"{path} is damaged: {what}. Load another checkpoint (espalier checkpoint {path.parent.parent} lists "
        "them), and look at the disk."
    )
