"""Where tensors lie between their uses: on the device, in the host's memory, on disk.

A residency is a value for each chunk and kind (parameters, gradients, states). What is away is brought
before it is needed and taken away after, by a stream of its own on an accelerator, by a thread for the disk.
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
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from espalier.device import copy_by, host_buffer, is_accelerator, new_stream, pins, wait_for
from espalier.files import PIECE, get, memory_of, pieces_of, put
from espalier.parallel.plan import Place
from espalier.tensor import plain
from espalier.torch_private import disable_modes, raw

T = TypeVar("T")
Tensors = list[torch.Tensor]
# places off the device where tensors stay as they are: what is written to a stand-in is there at once
MEMORIES = frozenset[Place](("host",))


class Carried(NamedTuple):
    """What goes to a place off the device, or comes from it.

    Attributes:
        kind: ``"parameters"``, ``"gradients"``, ``"states"`` (with masters).
        place: ``"host"`` or ``"disk"``.
        way: ``"away"``, ``"back"`` to the device, or ``"to host"``, where an update is done in its memory.
    """

    kind: str
    place: Place
    way: str


class _Item:
    """What is known of the tensors under one key.

    Attributes:
        host: their buffers on the host; None where they are in a file only.
        going: a file being written from ``host``.
        coming: a buffer being filled from a file.
        shapes: and dtypes.
        shown: the stand-ins, and ``marks`` of them as they were handed out.
        event: the last copy on the stream of its own.
    """

    def __init__(self) -> None:
        self.place: Place = "device"
        self.host: Tensors | None = None
        self.going: Future[None] | None = None
        self.coming: tuple[Tensors, Future[None]] | None = None
        self.shapes: list[tuple[torch.Size, torch.dtype]] = []
        self.shown: Tensors = []
        self.marks: list[tuple[int, int]] = []
        self.event: Any = None


class _Fetched(NamedTuple):
    """A tensor of the device, and a copy that is on its way to the host."""

    tensor: torch.Tensor
    copy: torch.Tensor
    event: torch.Event | None

    def serves(self, t: torch.Tensor) -> bool:
        """Whether it is that tensor, which stands in the same place."""
        return (t.shape, t.dtype, t.stride()) == (self.copy.shape, self.copy.dtype, self.tensor.stride())


class OffloadStore:
    """Lists of tensors under keys, off the device.

    Between ``put`` and ``take`` stand-ins take their place: tensors of the same values that can be read at
    any time. On the host they are the tensors themselves; on disk, mappings of a file. A change that
    others make to a stand-in, or another tensor in its place, counts: ``take`` then gives that.

    Attributes:
        errors: what files could not take.
        bringing: a stream for what is brought before it is needed; None where the device has none.
        carried: bytes that went between the device and other places so far (see :data:`Carried`).

    Args:
        device: where the program computes.
        directory: for files; None where nothing is on disk.
        dry: nothing has values; what is away takes no memory.
    """

    def __init__(self, device: torch.device, directory: str | None, *, dry: bool = False) -> None:
        self.device, self._dry = device, dry
        self.disk = None if directory is None or dry else Disk(directory)
        self._items: dict[str, _Item] = {}
        self._leaving: deque[tuple[str, Callable[[Tensors], object]]] = deque()
        self.errors: list[DiskError] = []
        self._outside: list[Callable[[torch.Tensor], object]] = []
        self._down, self._up = new_stream(device), new_stream(device)  # at once, both ways
        self._fetched: dict[tuple[torch.device, int], _Fetched] = {}
        self.bringing = new_stream(device)
        self.carried: Counter[Carried] = Counter()

    def put(
        self,
        key: str,
        tensors: Sequence[torch.Tensor],
        place: Place,
        then: Callable[[Tensors], object],
        *,
        keep: bool = False,
    ) -> None:
        """Start to take tensors away; the caller lets go of them.

        Args:
            then: is called with their stand-ins when they are away, by :meth:`settle`.
            keep: the space on disk that was reserved for more.
        """
        item = self._items.setdefault(key, _Item())
        with raw(), torch.no_grad():
            contiguous = [plain(t.detach()).contiguous() for t in tensors]
            item.place = place
            item.shapes = [(t.shape, t.dtype) for t in contiguous]
            self._carry(key, place, "away")
            if self._dry:
                item.host = [t.new_empty(()).expand(t.shape) for t in contiguous]
            elif place in MEMORIES:
                item.host = self._onto_host(item, contiguous)
            else:
                assert self.disk is not None
                item.host = contiguous if all(t.device.type == "cpu" for t in contiguous) else None
                item.host = self._onto_host(item, contiguous)
                event, item.event = item.event, None
                wait = None if event is None else event.synchronize
                item.going = self.disk.write(key, item.host, after=wait, keep=keep)
        self._leaving.append((key, then))

    def _carry(self, key: str, place: Place, way: str) -> None:
        self.carried[Carried(key.partition("-")[0], place, way)] += self.nbytes(key)

    def nbytes(self, key: str) -> int:
        """Bytes of what was put last."""
        item = self._items.get(key)
        return 0 if item is None else sum(shape.numel() * dtype.itemsize for shape, dtype in item.shapes)

    def bytes_at(self, place: str) -> int:
        """Bytes that lie at a place between their uses."""
        return sum(self.nbytes(key) for key, item in self._items.items() if item.place == place)

    def forget(self, key: str) -> None:
        """Give the memory or the file of tensors back."""
        self._items.pop(key, None)
        if self.disk is not None:
            self.disk.release(key)

    def is_leaving(self, key: str) -> bool:
        """Whether what was put is not away yet."""
        return any(key == k for k, _ in self._leaving)

    def settle(self, keep: int = 0) -> None:
        """Wait until what was put is away, but for the last ``keep``.

        What could not be written stays in memory, and the error among ``errors``.
        """
        while len(self._leaving) > keep:
            key, then = self._leaving.popleft()
            item = self._items[key]
            if item.event is not None:
                item.event.synchronize()
                item.event = None
            if item.going is not None:
                going, item.going = item.going, None
                try:
                    going.result()
                    item.host = None
                except DiskError as error:
                    self.errors.append(error)
            if item.host is not None:
                shown = item.host
            else:
                assert self.disk is not None
                with _unseen():
                    shown = self.disk.mapped(key)
                self._tell(shown)
            item.shown, item.marks = shown, [_mark(t) for t in shown]
            then(shown)

    def start(self, key: str, shown: Sequence[torch.Tensor]) -> None:
        """Start to bring tensors back, of which these are the stand-ins."""
        item = self._items.get(key)
        if item is None or item.host is not None or item.coming is not None or self._changed(item, shown):
            return
        assert self.disk is not None
        buffers = self.disk.empty(key, pin=pins(self.device))
        item.coming = buffers, self.disk.read(key, buffers)

    def take(self, key: str, shown: Sequence[torch.Tensor], *, on_host: bool = False) -> Tensors:
        """The tensors whose stand-ins these are, on the device or on the host.

        On the host they are those that the next ``put`` would fill: to change them in place is enough.

        Raises:
            DiskError: the file is not what was written.
        """
        item = self._items.get(key)
        with raw(), torch.no_grad():
            shown = [plain(t.detach()) for t in shown]
            if item is not None:
                item.shown = []
                self._carry(key, item.place, "to host" if on_host else "back")
            if item is None or self._changed(item, shown):
                tensors = [t.clone() if t.device.type == "cpu" else t for t in shown]
                if item is not None:
                    item.host = item.coming = None
            elif self._dry:
                return [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in item.shapes]
            elif item.host is not None:
                wait_for(item.event, self.device)  # it may be on its way there yet
                tensors = item.host
            else:
                self.start(key, shown)
                assert item.coming is not None
                (tensors, filled), item.coming = item.coming, None
                filled.result()
            return self.to_host(tensors) if on_host else self.to_device(tensors)

    def _changed(self, item: _Item, shown: Sequence[torch.Tensor]) -> bool:
        if self._dry:
            return len(shown) != len(item.shapes)
        marks = [_mark(t) for t in shown]
        if item.place in MEMORIES:
            return [m[0] for m in marks] != [m[0] for m in item.marks]
        return marks != item.marks

    def watched_by(self, outside: Callable[[torch.Tensor], object]) -> None:
        """Tell ``outside`` of tensors that take none of the device's memory, or of what stands for it."""
        self._outside.append(outside)
        for item in self._items.values():
            self._tell(item.shown)

    def _tell(self, tensors: Tensors) -> None:
        for tell in self._outside:
            for t in tensors:
                tell(t)

    # ---- between the device and the host

    def _onto_host(self, item: _Item, tensors: Tensors) -> Tensors:
        host = item.host
        if host is None or [(t.shape, t.dtype) for t in host] != item.shapes:
            with _unseen():
                host = [self.empty(t) for t in tensors]
            if item.place in MEMORIES:
                self._tell(host)
        item.event = self.copy(host, tensors)
        return host

    def empty(self, like: torch.Tensor) -> torch.Tensor:
        """A buffer on the host: pinned where there is a device."""
        return host_buffer(like.shape, like.dtype, pin=pins(self.device))

    def fetch(self, tensors: Sequence[torch.Tensor], ready: torch.Event | None) -> None:
        """Start to copy tensors of the device that :meth:`to_host` will be asked for, unchanged.

        Args:
            ready: after which they are; so the copies wait for none that goes the other way.
        """
        there = [t.detach() for t in tensors if is_accelerator(t.device)]
        copies = [self.empty(t) for t in there]
        event = self.copy(copies, there, ready)
        for t, copy in zip(there, copies, strict=True):
            self._fetched[_place(t)] = _Fetched(t, copy, event)

    def drop_fetched(self) -> None:
        """Nobody will ask for what was fetched."""
        self._fetched.clear()

    def to_host(self, tensors: Sequence[torch.Tensor]) -> Tensors:
        """Tensors in the host's memory, when they are there."""
        known = [self._fetched.pop(_place(t), None) for t in tensors]
        fetched = [f if f is not None and f.serves(t) else None for f, t in zip(known, tensors, strict=True)]
        out, pairs = [], []
        for f, t in zip(fetched, tensors, strict=True):
            out.append(f.copy if f is not None else t if t.device.type == "cpu" else self.empty(t))
            if f is None:
                pairs.append((out[-1], t))
        events = [f.event for f in fetched if f is not None]
        if pairs:
            events.append(self.copy([into for into, _ in pairs], [t for _, t in pairs]))
        for event in {id(event): event for event in events if event is not None}.values():
            event.synchronize()
        return out

    def spread(self, into: Sequence[torch.Tensor], outof: Sequence[torch.Tensor]) -> None:
        """Round tensors in the host's memory into ones of the device, whose current stream waits for it.

        The host rounds, so that no more is sent than arrives, and does not wait.
        """
        rounded = [self.empty(t) for t in into]
        for copy, t in zip(rounded, outof, strict=True):
            copy.copy_(t)
        wait_for(self.copy(into, rounded), self.device)

    def to_device(self, tensors: Sequence[torch.Tensor]) -> Tensors:
        """Tensors on the device; the current stream waits until they are there."""
        if all(t.device == self.device for t in tensors):
            return list(tensors)
        out = [torch.empty(t.shape, dtype=t.dtype, device=self.device) for t in tensors]
        event = self.copy(out, tensors)
        wait_for(event, self.device)
        return out

    def copy(
        self,
        into: Sequence[torch.Tensor],
        outof: Sequence[torch.Tensor],
        ready: torch.Event | None = None,
    ) -> torch.Event | None:
        """Copy between memories by a stream of its own; gives what says that it is done, if that is later."""
        pairs = [(a, b) for a, b in zip(into, outof, strict=True) if _place(a) != _place(b) and b.numel()]
        up = any(is_accelerator(a.device) for a, _ in pairs)
        return copy_by(self._up if up else self._down, pairs, self.device, ready)


def _unseen() -> AbstractContextManager[object]:
    """While open, modes of torch don't see operations: one that counts memory is told what not to count."""
    off: Any = disable_modes or nullcontext
    return off()


def _place(t: torch.Tensor) -> tuple[torch.device, int]:
    with raw():
        return t.device, t.data_ptr() if t.device.type != "meta" else id(t)


def _mark(t: torch.Tensor) -> tuple[int, int]:
    """Changes when a tensor is written to, or is another."""
    with raw():
        return t.data_ptr(), t._version


def choose(sizes: Sequence[int], ratio: float) -> list[bool]:
    """Which chunks are away so that these have about that share of the bytes: the last ones.

    They are used in order, so at any time before the first use the last are needed furthest in the future.
    """
    wanted, away = ratio * sum(sizes), 0.0
    out = []
    for size in reversed(sizes):
        out.append(ratio > 0 and away + size / 2 <= wanted)
        away += size
    return out[::-1]


# ---- tensors in files: what a rank keeps on disk between its uses
#
# One file for each key. A file is written under another name and renamed when it is whole, so whatever goes
# wrong leaves the one before. Data stands in pieces, and behind it a table with a checksum for each.


_ALIGN = 64
_TAIL = struct.Struct("<8sQQII")  # magic, bytes of data, generation, pieces, checksum of table and these
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
        self._requests = ThreadPoolExecutor(_REQUESTS, thread_name_prefix="espalier-disk-request")
        self._end = weakref.finalize(self, _close, (self._thread, self._requests), self.folder, lock)

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
        buffer = host_buffer((record.size,), torch.uint8, pin=pin)
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
            parts.append(_Extent(size, t.shape, t.dtype))
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

                def write(at: int, piece: memoryview) -> int:
                    put(file.fileno(), piece, at)
                    return zlib.crc32(piece)

                sums = self._at_once(write, [*_placed(parts, tensors)])
                table += struct.pack(f"<{len(sums)}I", *sums)
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
        self._records[key] = _FileIndex(self._generation, size, parts, len(table) + len(tail))
        if not keep:
            self._reserved.pop(key, None)

    def _at_once(self, request: Callable[..., T], of: Sequence[tuple[Any, ...]]) -> list[T]:
        """Requests, several under way, and what they give; when one fails the others have ended, too."""
        under_way = [self._requests.submit(request, *one) for one in of]
        wait(under_way)
        return [one.result() for one in under_way]

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
                tail_fields = _TAIL.unpack(tail) if len(tail) == _TAIL.size else None
                head = b"" if tail_fields is None else _TAIL.pack(*tail_fields[:-1], 0)
                wanted = (_MAGIC, record.size, record.generation, len(table) // 4)
                if (
                    tail_fields is None
                    or tail_fields[:-1] != wanted
                    or tail_fields[-1] != zlib.crc32(table + head)
                ):
                    raise DiskError(_damaged(path, "its table of checksums is not the one written"))
                assert [part[1:] for part in record.parts] == [(t.shape, t.dtype) for t in tensors]

                def read(at: int, piece: memoryview, wanted: int) -> None:
                    got, said = get(file.fileno(), piece, at), f"bytes {at:,} to {at + len(piece):,}"
                    if got < len(piece):
                        raise DiskError(_damaged(path, f"{said} end after {got:,}"))
                    if zlib.crc32(piece) != wanted:
                        raise DiskError(_damaged(path, f"{said} are not those written"))

                sums = struct.unpack(f"<{len(table) // 4}I", table)
                pieces = zip(_placed(record.parts, tensors), sums, strict=True)
                self._at_once(read, [(at, piece, wanted) for (at, piece), wanted in pieces])
        except OSError as error:
            raise DiskError(_damaged(path, str(error.strerror))) from error


def _placed(parts: Sequence[_Extent], tensors: Sequence[torch.Tensor]) -> Iterator[tuple[int, memoryview]]:
    """The pieces of tensors, and where each stands in their file."""
    for part, t in zip(parts, tensors, strict=True):
        for start, piece in pieces_of(memory_of(t)):
            yield part.offset + start, piece


def _damaged(path: Path, what: str) -> str:
    return (
        f"{path} is damaged: {what}. This process cannot go on from it: look at the disk, and start again "
        "from a checkpoint."
    )


def _close(threads: Sequence[ThreadPoolExecutor], folder: Path, lock: int) -> None:
    for pool in threads:
        pool.shutdown(wait=True, cancel_futures=True)
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
