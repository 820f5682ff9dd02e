"""Tensors in files: what a rank keeps on disk between its uses.

One file for each key. A file is written under another name and renamed when it is whole, so whatever goes
wrong leaves the one before. Data stands in pieces, and behind it a table with a checksum for each. Where the
file system takes it, pieces go past the page cache: what was read or written once will not be asked for again
before much else was, and the host's memory has better uses.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import shutil
import socket
import struct
import threading
import time
import warnings
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple, TypeVar

import torch
from xxhash import xxh3_64_intdigest

from espalier.device import host_buffer
from espalier.files import PIECE, get, hold, is_held, memory_of, put

T = TypeVar("T")

_ALIGN = 64
_BLOCK = 4096  # direct requests begin and end at multiples of it, in memory and in files
_TAIL = struct.Struct("<8sQQQQ")  # magic, bytes of data, generation, pieces, checksum of table and these
_MAGIC = b"ESPALIER"
_PREFIX = "espalier-"
_SPARE = "spare"
_REQUESTS = 4  # under way at a time: one alone leaves most of a disk idle
# macOS has no such call: there a full disk shows while data is written
_take_space = getattr(os, "posix_fallocate", lambda file, start, size: os.ftruncate(file, size))


class DiskError(RuntimeError):
    """A file could not be written or read, or holds other bytes than were written."""


class _Extent(NamedTuple):
    """Where a tensor stands in its file."""

    offset: int
    shape: torch.Size
    dtype: torch.dtype


class _FileIndex(NamedTuple):
    generation: int
    size: int
    parts: list[_Extent]
    tail: int  # bytes of what stands behind the data; there may be more, which is kept free


class Disk:
    """A folder of a rank's own, and one thread that reads and writes there, by several requests at a time.

    Attributes:
        is_direct: whether these go past the page cache.

    Args:
        directory: the folder is made in here, and removed when this object or its process ends. Folders
            that processes left which were killed are found and removed.

    Raises:
        DiskError: nothing can be written there.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)
        self._records: dict[str, _FileIndex] = {}
        self._reserved: dict[str, int] = {}
        self._spare = 0
        self._mapped: set[str] = set()  # keys whose files others may see as they are now
        self._naming = threading.Lock()
        self._generation = 0
        name = f"{_PREFIX}{socket.gethostname()}-{os.getpid()}-{time.time_ns():x}"
        self.folder, hidden = self.directory / name, self.directory / f".{name}"
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            _remove_stale(self.directory)
            hidden.mkdir()
            lock = hold(hidden / "lock")
            self.is_direct = _takes_direct(hidden)
            hidden.rename(self.folder)
        except OSError as error:
            raise DiskError(
                f"Nothing can be written to {self.directory}: {error.strerror}. "
                "Name another folder: offload = {directory = ...}."
            ) from error
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="espalier-disk")
        self._requests = ThreadPoolExecutor(_REQUESTS, thread_name_prefix="espalier-disk-request")
        self._buffers: SimpleQueue[torch.Tensor | None] = SimpleQueue()  # a piece each, made when first used
        for _ in range(_REQUESTS):
            self._buffers.put(None)
        self._end = weakref.finalize(self, _close, (self._thread, self._requests), self.folder, lock)

    def close(self) -> None:
        """Remove all files."""
        for pool in (self._thread, self._requests):
            pool.shutdown(wait=True, cancel_futures=True)
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

        Those of :meth:`empty` are filled where they are; others by a copy.

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
        with self._naming, open(self.folder / key, "rb") as file:
            self._mapped.add(key)
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
        buffer = _aligned(record.size, pin=pin)
        return [
            buffer[offset : offset + shape.numel() * dtype.itemsize].view(dtype).view(shape)
            for offset, shape, dtype in record.parts
        ]

    # ---- in the thread

    def _allocate(self, path: Path, nbytes: int) -> None:
        with open(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b") as file:
            table = 8 * -(-nbytes // PIECE) + _TAIL.size
            _take_space(file.fileno(), 0, _to_block(nbytes) + _to_block(table))

    @contextlib.contextmanager
    def _opened(self, path: Path) -> Iterator[int]:
        file = os.open(path, os.O_RDWR | (os.O_DIRECT if self.is_direct else 0))
        try:
            yield file
        finally:
            os.close(file)

    def _write(self, key: str, tensors: Sequence[torch.Tensor], keep: bool) -> None:
        parts, size = [], 0
        for t in tensors:
            parts.append(_Extent(size, t.shape, t.dtype))
            size += -(-t.numel() * t.element_size() // _ALIGN) * _ALIGN
        size = _to_block(size)
        path = self.folder / f"{key}.new"
        self._generation += 1
        room = max(size, self._reserved.get(key, 0)) if keep else size
        try:
            self._begin(key, path)
            # all space is taken before the first byte is written
            self._allocate(path, room)
            with self._opened(path) as file:
                line = _line_of(tensors, parts, size)

                def write(start: int, stop: int) -> int:
                    with self._piece(line, start, stop) as piece:
                        if line is None:
                            for here, there, nbytes in _overlaps(parts, tensors, start, stop):
                                ctypes.memmove(piece.data_ptr() + here, there, nbytes)
                        put(file, memory_of(piece), start)
                        return xxh3_64_intdigest(memory_of(piece))

                sums = self._at_once(write, _pieces(size))
                table = struct.pack(f"<{len(sums)}Q", *sums)
                head = _TAIL.pack(_MAGIC, size, self._generation, len(sums), 0)
                tail = _TAIL.pack(*_TAIL.unpack(head)[:-1], xxh3_64_intdigest(table + head))
                last = memory_of(_aligned(_to_block(len(table) + len(tail))))
                last[: len(table) + len(tail)] = table + tail
                put(file, last, size)
                os.ftruncate(file, room + len(table) + len(tail))
            self._install(key, path)
        except OSError as error:
            path.unlink(missing_ok=True)
            raise self._failed("written", self.folder / key, size, error) from error
        finally:
            self._keep_spare()
        self._records[key] = _FileIndex(self._generation, size, parts, len(table) + len(tail))
        if not keep:
            self._reserved.pop(key, None)

    @contextlib.contextmanager
    def _piece(self, line: torch.Tensor | None, start: int, stop: int) -> Iterator[torch.Tensor]:
        """The memory of a piece of a file: of the line in which all tensors stand, or a buffer's."""
        if line is not None:
            yield line[start:stop]
            return
        buffer = self._buffers.get()
        if buffer is None:
            buffer = _aligned(PIECE)
        try:
            yield buffer[: stop - start]
        finally:
            self._buffers.put(buffer)

    def _at_once(self, request: Callable[..., T], of: Sequence[tuple[int, ...]]) -> list[T]:
        """Requests, several under way, and what they give; when one fails the others have ended, too."""
        under_way = [self._requests.submit(request, *one) for one in of]
        wait(under_way)
        return [one.result() for one in under_way]

    def _begin(self, key: str, path: Path) -> None:
        """Let a file begin with space that was reserved for it: nobody has seen what is in there."""
        reserved = self.folder / (_SPARE if key in self._records else key)
        if reserved.exists():
            reserved.replace(path)

    def _install(self, key: str, path: Path) -> None:
        """Put a file in its place. What stood there is the spare space now: to free it takes milliseconds."""
        place, spare = self.folder / key, self.folder / _SPARE
        with self._naming:
            if not self._spare or key not in self._records or key in self._mapped:
                path.replace(place)
                self._mapped.discard(key)
                return
            place.replace(spare)
            try:
                path.replace(place)
            except OSError:
                spare.replace(place)
                raise

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
            with self._opened(path) as file:
                wanted = (_MAGIC, record.size, record.generation, -(-record.size // PIECE))
                sums = _sums(path, file, record, wanted)
                assert [part[1:] for part in record.parts] == [(t.shape, t.dtype) for t in tensors]
                line = _line_of(tensors, record.parts, record.size)

                def read(start: int, stop: int, wanted: int) -> None:
                    with self._piece(line, start, stop) as piece:
                        get(file, memory_of(piece), start)
                        if xxh3_64_intdigest(memory_of(piece)) != wanted:
                            said = f"bytes {start:,} to {stop:,} are not those written"
                            raise DiskError(_damaged(path, said))
                        if line is None:
                            for here, there, nbytes in _overlaps(record.parts, tensors, start, stop):
                                ctypes.memmove(there, piece.data_ptr() + here, nbytes)

                pieces = zip(_pieces(record.size), sums, strict=True)
                self._at_once(read, [(start, stop, wanted) for (start, stop), wanted in pieces])
        except OSError as error:
            raise DiskError(_damaged(path, str(error.strerror))) from error


def _sums(path: Path, file: int, record: _FileIndex, wanted: tuple[object, ...]) -> tuple[int, ...]:
    """The checksums of a file's pieces.

    Raises:
        DiskError: what stands behind the data is not what was written.
    """
    last = memory_of(_aligned(_to_block(record.tail)))
    there = os.fstat(file).st_size
    if there < record.size + record.tail:
        raise DiskError(_damaged(path, f"it ends after {there:,} of {record.size + record.tail:,} bytes"))
    get(file, last, record.size)
    table, tail = bytes(last[: record.tail - _TAIL.size]), last[record.tail - _TAIL.size : record.tail]
    *said, checksum = _TAIL.unpack(tail)
    if tuple(said) != wanted or checksum != xxh3_64_intdigest(table + _TAIL.pack(*said, 0)):
        raise DiskError(_damaged(path, "its table of checksums is not the one written"))
    return struct.unpack(f"<{len(table) // 8}Q", table)


def _takes_direct(folder: Path) -> bool:
    """Whether files in a folder can be read and written past the page cache, by our blocks."""
    path = folder / "direct"
    block = mmap.mmap(-1, _BLOCK)  # begins at a page
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT)
        try:
            return os.pwrite(file, block, 0) == _BLOCK and os.preadv(file, [block], 0) == _BLOCK
        finally:
            os.close(file)
    except (OSError, AttributeError):  # macOS has no such flag
        return False
    finally:
        path.unlink(missing_ok=True)


def _to_block(nbytes: int) -> int:
    return -(-nbytes // _BLOCK) * _BLOCK


def _aligned(nbytes: int, *, pin: bool = False) -> torch.Tensor:
    """Uninitialized bytes of the host's memory that begin at a block."""
    if pin:  # these begin at a page, but for the allocator's sake
        buffer = host_buffer((nbytes,), torch.uint8, pin=True)
        if buffer.data_ptr() % _BLOCK == 0:
            return buffer
    buffer = host_buffer((nbytes + _BLOCK,), torch.uint8, pin=pin)
    return buffer[-buffer.data_ptr() % _BLOCK :][:nbytes]


def _pieces(size: int) -> list[tuple[int, int]]:
    """Where the pieces of a file begin and end."""
    return [(start, min(start + PIECE, size)) for start in range(0, size, PIECE)]


def _line_of(tensors: Sequence[torch.Tensor], parts: Sequence[_Extent], size: int) -> torch.Tensor | None:
    """The memory in which tensors stand as in their file, as bytes; None where they don't."""
    full = [(t, part.offset) for t, part in zip(tensors, parts, strict=True) if t.numel()]
    if not full:
        return None
    storage = full[0][0].untyped_storage()
    first = full[0][0].data_ptr() - full[0][1]
    if any(t.data_ptr() - offset != first for t, offset in full) or first % _BLOCK:
        return None
    start = first - storage.data_ptr()
    if any(t.untyped_storage().data_ptr() != storage.data_ptr() for t, _ in full):
        return None
    if start < 0 or start + size > storage.nbytes():
        return None
    return torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage, start, (size,), (1,))


def _overlaps(
    parts: Sequence[_Extent], tensors: Sequence[torch.Tensor], start: int, stop: int
) -> Iterator[tuple[int, int, int]]:
    """What of tensors stands in a part of their file: where behind its start, its address, its bytes."""
    first = bisect_right([part.offset for part in parts], start) - 1
    for part, t in zip(parts[first:], tensors[first:], strict=True):
        if part.offset >= stop:
            break
        begin, end = max(start, part.offset), min(stop, part.offset + t.numel() * t.element_size())
        if begin < end:
            yield begin - start, t.data_ptr() + begin - part.offset, end - begin


def _damaged(path: Path, what: str) -> str:
    return (
        f"{path} is damaged: {what}. This process cannot go on from it: look at the disk, and start again "
        "from a checkpoint."
    )


def _close(threads: Sequence[ThreadPoolExecutor], folder: Path, lock: int) -> None:
    # Waits for none: garbage may be collected where a thread starts or ends, which others would wait for.
    # None is at work either, as what it does keeps the disk.
    for pool in threads:
        pool.shutdown(wait=False, cancel_futures=True)
    shutil.rmtree(folder, ignore_errors=True)
    os.close(lock)


def _remove_stale(directory: Path) -> None:
    """Remove folders whose process is gone: nobody holds their lock."""
    for folder in sorted(directory.glob(f"{_PREFIX}*-*-*")):
        if not (folder / "lock").exists() or is_held(folder / "lock"):
            continue
        with contextlib.suppress(FileNotFoundError):  # another process removes it, too
            size = sum(file.stat().st_size for file in folder.iterdir())
            shutil.rmtree(folder, ignore_errors=True)
            warnings.warn(
                f"Removed {folder} ({size:,} bytes), which a process left that was killed.", stacklevel=4
            )
