"""A tensor in a file, as ``torch.save`` frames it: a zip archive in which the data stands as it is.

The frame is made here, not by torch, because the checksum that the archive needs is the one that a
checkpoint needs as well: data is read once. ``torch.load`` and torch's distributed checkpoint read it.
"""

from __future__ import annotations

import io
import pickle
import struct
import zlib
from collections import OrderedDict
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

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
        kind = torch.storage._dtype_to_storage_type_map().get(self._dtype)
        if kind is None:
            return "storage", torch.UntypedStorage, "0", "cpu", n * self._dtype.itemsize
        return "storage", getattr(torch, kind), "0", "cpu", n


class _Tensor:
    def __init__(self, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        self.dtype, self.shape = dtype, shape

    def __reduce__(self) -> Any:
        stride = torch.empty(self.shape, device="meta").stride()
        given: tuple[Any, ...] = (_Storage(), 0, self.shape, stride, False, OrderedDict())
        if self.dtype in torch.storage._dtype_to_storage_type_map():
            return torch._utils._rebuild_tensor_v2, given
        return torch._utils._rebuild_tensor_v3, (*given, self.dtype)


def _pickled(dtype: torch.dtype, shape: tuple[int, ...]) -> bytes:
    out = io.BytesIO()
    _Pickler(out, dtype, shape).dump(_Tensor(dtype, shape))
    return out.getvalue()
