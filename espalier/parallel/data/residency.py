"""Where tensors lie between their uses: on the device, in the host's memory, on disk.

A residency is a value for each chunk and kind (parameters, gradients, states). What is away is brought
before it is needed and taken away after, by a stream of its own on CUDA, by a thread for the disk.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as raw

from espalier.parallel.data.disk import Disk, DiskError
from espalier.parallel.offload import Place
from espalier.tensor import plain

Tensors = list[torch.Tensor]


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


class Shelf:
    """Lists of tensors under keys, off the device.

    Between ``put`` and ``take`` stand-ins take their place: tensors of the same values that can be read at
    any time. On the host they are the tensors themselves; on disk, mappings of a file. A change that
    others make to a stand-in, or another tensor in its place, counts: ``take`` then gives that.

    Attributes:
        errors: what files could not take.

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
        self._side: Any = torch.cuda.Stream(device) if device.type == "cuda" else None

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
            given = [plain(t.detach()).contiguous() for t in tensors]
            item.place = place
            item.shapes = [(t.shape, t.dtype) for t in given]
            if self._dry:
                item.host = [t.new_empty(()).expand(t.shape) for t in given]
            elif place == "host":
                item.host = self._onto_host(item, given)
            else:
                assert self.disk is not None
                item.host = given if all(t.device.type == "cpu" for t in given) else None
                item.host = self._onto_host(item, given)
                event, item.event = item.event, None
                wait = None if event is None else event.synchronize
                item.going = self.disk.write(key, item.host, after=wait, keep=keep)
        self._leaving.append((key, then))

    def nbytes(self, key: str) -> int:
        """Bytes of what was put last."""
        item = self._items.get(key)
        return 0 if item is None else sum(shape.numel() * dtype.itemsize for shape, dtype in item.shapes)

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
        buffers = self.disk.empty(key, pin=self._side is not None)
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
            if item is None or self._changed(item, shown):
                found = [t.clone() if t.device.type == "cpu" else t for t in shown]
                if item is not None:
                    item.host = item.coming = None
            elif self._dry:
                return [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in item.shapes]
            elif item.host is not None:
                found = item.host
            else:
                self.start(key, shown)
                assert item.coming is not None
                (found, filled), item.coming = item.coming, None
                filled.result()
            return self.to_host(found) if on_host else self.to_device(found)

    def _changed(self, item: _Item, shown: Sequence[torch.Tensor]) -> bool:
        if self._dry:
            return len(shown) != len(item.shapes)
        marks = [_mark(t) for t in shown]
        if item.place == "host":  # the memory is the same: a change is there already
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

    def _onto_host(self, item: _Item, given: Tensors) -> Tensors:
        host = item.host
        if host is None or [(t.shape, t.dtype) for t in host] != item.shapes:
            with _unseen():
                host = [self.empty(t) for t in given]
            if item.place == "host":
                self._tell(host)
        item.event = self.copy(host, given)
        return host

    def empty(self, like: torch.Tensor) -> torch.Tensor:
        """A buffer on the host: pinned where there is a device."""
        return torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=self._side is not None)

    def to_host(self, tensors: Sequence[torch.Tensor]) -> Tensors:
        """Tensors in the host's memory, when they are there."""
        out = [t if t.device.type == "cpu" else self.empty(t) for t in tensors]
        event = self.copy(out, tensors)
        if event is not None:
            event.synchronize()
        return out

    def to_device(self, tensors: Sequence[torch.Tensor]) -> Tensors:
        """Tensors on the device; the current stream waits until they are there."""
        if all(t.device == self.device for t in tensors):
            return list(tensors)
        out = [torch.empty(t.shape, dtype=t.dtype, device=self.device) for t in tensors]
        event = self.copy(out, tensors)
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)
        return out

    def copy(self, into: Sequence[torch.Tensor], outof: Sequence[torch.Tensor]) -> Any:
        """Copy between memories by a stream of its own; gives what says that it is done, if that is later."""
        pairs = [(a, b) for a, b in zip(into, outof, strict=True) if _place(a) != _place(b) and b.numel()]
        if self._side is None:
            for a, b in pairs:
                a.copy_(b)
            return None
        self._side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._side):
            for a, b in pairs:
                a.copy_(b, non_blocking=True)
                for t in (a, b):
                    if t.is_cuda:
                        t.record_stream(self._side)
        return self._side.record_event()


def _unseen() -> AbstractContextManager[object]:
    """While open, modes of torch don't see operations: one that counts memory is told what not to count."""
    off: Any = getattr(torch.utils._python_dispatch, "_disable_current_modes", nullcontext)
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


__all__ = ["Shelf", "choose"]
