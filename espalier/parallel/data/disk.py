"""Tensors in files: what a rank keeps on disk between its uses.

One file for each key. A file is written under another name and renamed when it is whole, so whatever goes
wrong leaves the one before. Data stands in pieces, and behind it a table with a checksum for each.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import shutil
import socket
import struct
import time
import warnings
import weakref
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch

from espalier.files import PIECE, get, memory_of, pieces_of, put

_ALIGN = 64
_TAIL = struct.Struct("<8sQQII")  # magic, bytes of data, generation, pieces, checksum of table and these
_MAGIC = b"ESPALIER"
_PREFIX = "espalier-"
_SPARE = "spare"
# macOS has no such call: there a full disk shows while data is written
_take_space = getattr(os, "posix_fallocate", lambda file, start, size: os.ftruncate(file, size))


class DiskError(RuntimeError):
    """A file could not be written or read, or holds other bytes than were written."""


class _Part(NamedTuple):
    """Where a tensor stands in its file."""

    offset: int
    shape: torch.Size
    dtype: torch.dtype


class _Record(NamedTuple):
    generation: int
    size: int
    parts: list[_Part]
    tail: int  # bytes of what stands behind the data; there may be more, which is kept free


class Disk:
    """A folder of a rank's own, and one thread that reads and writes there.

    Args:
        directory: the folder is made in here, and removed when this object or its process ends. Folders
            that processes left which were killed are found and removed.

    Raises:
        DiskError: nothing can be written there.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)
        self._records: dict[str, _Record] = {}
        self._reserved: dict[str, int] = {}
        self._spare = 0
        self._generation = 0
        name = f"{_PREFIX}{socket.gethostname()}-{os.getpid()}-{time.time_ns():x}"
        self.folder, hidden = self.directory / name, self.directory / f".{name}"
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            _remove_stale(self.directory)
            hidden.mkdir()
            lock = os.open(hidden / "lock", os.O_RDWR | os.O_CREAT)
            fcntl.flock(lock, fcntl.LOCK_EX)  # the kernel lets it go when the process ends, however it ends
            hidden.rename(self.folder)
        except OSError as error:
            raise DiskError(
                f"Nothing can be written to {self.directory}: {error.strerror}. "
                "Name another folder: offload = {directory = ...}."
            ) from error
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="espalier-disk")
        self._end = weakref.finalize(self, _close, self._thread, self.folder, lock)

    def close(self) -> None:
        """Remove all files."""
        self._end()

    def free(self) -> int:
        """Bytes that can still be written."""
        s = os.statvfs(self.directory)
        return s.f_bavail * s.f_frsize

    def reserve(self, key: str, nbytes: int) -> None:
        """Take the space for a file that will be written later, and for one beside those that are replaced.

        Raises:
            DiskError: there is not enough.
        """
        path = self.folder / key
        try:
            self._allocate(path, nbytes)
            self._spare = max(self._spare, nbytes)
            self._allocate(self.folder / _SPARE, self._spare)
        except OSError as error:
            path.unlink(missing_ok=True)
            raise self._failed("reserved", path, nbytes, error) from error
        self._reserved[key] = nbytes

    def release(self, key: str) -> None:
        """Give the space of a file back."""
        self._records.pop(key, None)
        self._reserved.pop(key, None)
        (self.folder / key).unlink(missing_ok=True)

    def write(
        self,
        key: str,
        tensors: Sequence[torch.Tensor],
        *,
        after: Callable[[], object] | None = None,
        keep: bool = False,
    ) -> Future[None]:
        """Start to write contiguous CPU tensors, which must stay as they are until that is done.

        Args:
            after: is called first, by the thread: waits until the tensors are filled.
            keep: the space that was reserved beyond that of these tensors, for more of them later.

        Returns:
            whose ``result()`` raises :class:`DiskError`; what was there before is there still, then.
        """

        def run() -> None:
            if after is not None:
                after()
            self._write(key, tensors, keep)

        return self._thread.submit(run)

    def read(self, key: str, tensors: Sequence[torch.Tensor]) -> Future[None]:
        """Start to fill contiguous CPU tensors, of the shapes and dtypes written.

        Returns:
            whose ``result()`` raises :class:`DiskError` where the file is not what was written.
        """
        return self._thread.submit(self._read, key, tensors)

    def mapped(self, key: str) -> list[torch.Tensor]:
        """The tensors as last written, over a mapping of the file: they take memory only as they are read.

        They keep these values, whatever is written later; what is written into them reaches no file.
        Checksums are not looked at.
        """
        record = self._records[key]
        with open(self.folder / key, "rb") as file:
            mapping = mmap.mmap(file.fileno(), record.size + 1, access=mmap.ACCESS_COPY)
        out = []
        for offset, shape, dtype in record.parts:
            count = shape.numel()
            flat = (
                torch.frombuffer(mapping, dtype=dtype, count=count, offset=offset)
                if count
                else torch.empty(0, dtype=dtype)
            )
            out.append(flat.view(shape))
        return out

    def empty(self, key: str, *, pin: bool = False) -> list[torch.Tensor]:
        """Uninitialized CPU tensors, in one buffer, of the shapes and dtypes written."""
        record = self._records[key]
        buffer = torch.empty(record.size, dtype=torch.uint8, device="cpu", pin_memory=pin)
        return [
            buffer[offset : offset + shape.numel() * dtype.itemsize].view(dtype).view(shape)
            for offset, shape, dtype in record.parts
        ]

    # ---- in the thread

    def _allocate(self, path: Path, nbytes: int, tensors: int = 1) -> None:
        pieces = -(-nbytes // PIECE) + tensors
        with open(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b") as file:
            _take_space(file.fileno(), 0, nbytes + 4 * pieces + _TAIL.size)

    def _write(self, key: str, tensors: Sequence[torch.Tensor], keep: bool) -> None:
        parts, size = [], 0
        for t in tensors:
            parts.append(_Part(size, t.shape, t.dtype))
            size += -(-t.numel() * t.element_size() // _ALIGN) * _ALIGN
        path = self.folder / f"{key}.new"
        self._generation += 1
        table = bytearray()
        room = max(size, self._reserved.get(key, 0)) if keep else size
        try:
            self._begin(key, path)
            # all space is taken before the first byte is written
            self._allocate(path, room, len(parts))
            with open(path, "r+b", buffering=0) as file:
                for part, t in zip(parts, tensors, strict=True):
                    for start, piece in pieces_of(memory_of(t)):
                        table += struct.pack("<I", zlib.crc32(piece))
                        put(file.fileno(), piece, part.offset + start)
                head = _TAIL.pack(_MAGIC, size, self._generation, len(table) // 4, 0)
                tail = _TAIL.pack(*_TAIL.unpack(head)[:-1], zlib.crc32(bytes(table) + head))
                put(file.fileno(), memoryview(bytes(table) + tail), size)
                file.truncate(room + len(table) + len(tail))
            path.replace(self.folder / key)
        except OSError as error:
            path.unlink(missing_ok=True)
            raise self._failed("written", self.folder / key, size, error) from error
        finally:
            self._keep_spare()
        self._records[key] = _Record(self._generation, size, parts, len(table) + len(tail))
        if not keep:
            self._reserved.pop(key, None)

    def _begin(self, key: str, path: Path) -> None:
        """Let a file begin with space that was reserved for it: nobody has seen what is in there."""
        reserved = self.folder / (_SPARE if key in self._records else key)
        if reserved.exists():
            reserved.replace(path)

    def _keep_spare(self) -> None:
        """Reserve anew what the next file begins with; without space that shows when it is written."""
        if self._spare:
            with contextlib.suppress(OSError):
                self._allocate(self.folder / _SPARE, self._spare)

    def _failed(self, done: str, path: Path, nbytes: int, error: OSError) -> DiskError:
        remedy = "Look at the disk"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            remedy = f"Make space in {self.directory}"
        return DiskError(
            f"{path} could not be {done}: {error.strerror}. {nbytes:,} bytes were needed, {self.free():,} "
            f"are free. {remedy}, or name another folder: offload = {{directory = ...}}."
        )

    def _read(self, key: str, tensors: Sequence[torch.Tensor]) -> None:
        record, path = self._records[key], self.folder / key
        try:
            with open(path, "rb", buffering=0) as file:
                tail = os.pread(file.fileno(), record.tail, record.size)
                table, tail = tail[: -_TAIL.size], tail[-_TAIL.size :]
                found = _TAIL.unpack(tail) if len(tail) == _TAIL.size else None
                head = b"" if found is None else _TAIL.pack(*found[:-1], 0)
                wanted = (_MAGIC, record.size, record.generation, len(table) // 4)
                if found is None or found[:-1] != wanted or found[-1] != zlib.crc32(table + head):
                    raise DiskError(_damaged(path, "its table of checksums is not the one written"))
                checks = iter(struct.unpack(f"<{len(table) // 4}I", table))
                for part, t in zip(record.parts, tensors, strict=True):
                    assert (part.shape, part.dtype) == (t.shape, t.dtype)
                    for start, piece in pieces_of(memory_of(t)):
                        got = get(file.fileno(), piece, part.offset + start)
                        at = f"bytes {part.offset + start:,} to {part.offset + start + len(piece):,}"
                        if got < len(piece):
                            raise DiskError(_damaged(path, f"{at} end after {got:,}"))
                        if zlib.crc32(piece) != next(checks):
                            raise DiskError(_damaged(path, f"{at} are not those written"))
        except OSError as error:
            raise DiskError(_damaged(path, str(error.strerror))) from error


def _damaged(path: Path, what: str) -> str:
    return (
        f"{path} is damaged: {what}. This process cannot go on from it: look at the disk, and start again "
        "from a checkpoint."
    )


def _close(thread: ThreadPoolExecutor, folder: Path, lock: int) -> None:
    thread.shutdown(wait=True, cancel_futures=True)
    shutil.rmtree(folder, ignore_errors=True)
    os.close(lock)


def _remove_stale(directory: Path) -> None:
    """Remove folders whose process is gone: nobody holds their lock."""
    for folder in sorted(directory.glob(f"{_PREFIX}*-*-*")):
        try:
            lock = os.open(folder / "lock", os.O_RDWR)
        except OSError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            continue  # its process runs
        else:
            size = sum(file.stat().st_size for file in folder.iterdir())
            shutil.rmtree(folder, ignore_errors=True)
            warnings.warn(
                f"Removed {folder} ({size:,} bytes), which a process left that was killed.", stacklevel=4
            )
        finally:
            os.close(lock)


__all__ = ["Disk", "DiskError"]
