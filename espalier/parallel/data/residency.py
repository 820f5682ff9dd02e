"""Where tensors lie between their uses: on the device, in the host's memory, on disk.

A residency is a value for each chunk and kind (parameters, gradients, states). What is away is brought
before it is needed and taken away after, by a stream of its own on an accelerator, by a thread for the disk.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch

from espalier.device import copy_by, host_buffer, is_accelerator, new_stream, pins, wait_for
from espalier.parallel.data.disk import Disk, DiskError
from espalier.parallel.plan import Place
from espalier.tensor import plain
from espalier.tensor.live_memory import unseen
from espalier.torch_private import holders_of_memory, raw, version_of

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
        self._watches: list[tuple[Callable[[torch.Tensor], object], Callable[[torch.Tensor], object]]] = []
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
        new: bool = False,
    ) -> None:
        """Start to take tensors away; the caller lets go of them.

        Args:
            then: is called with their stand-ins when they are away, by :meth:`settle`.
            keep: the space on disk that was reserved for more.
            new: these are others than those that went before, whose stand-ins somebody may hold: then they
                get memory of their own.
        """
        item = self._items.setdefault(key, _Item())
        if new and item.host is not None and any(map(_is_held, item.host)):
            item.host = None
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
                with unseen():
                    shown = self.disk.mapped(key)
            self.tell_outside(shown)
            item.shown, item.marks = shown, [_mark(t) for t in shown]
            then(shown)

    def start(self, key: str, shown: Sequence[torch.Tensor]) -> None:
        """Start to bring tensors back, of which these are the stand-ins."""
        item = self._items.get(key)
        if item is None or item.host is not None or item.coming is not None or self._changed(item, shown):
            return
        assert self.disk is not None
        with unseen():  # the host's memory, which a CPU computes with when it is taken
            buffers = self.disk.empty(key, pin=pins(self.device))
        item.coming = buffers, self.disk.read(key, buffers)

    def take(
        self, key: str, shown: Sequence[torch.Tensor], *, on_host: bool = False, written: bool = False
    ) -> Tensors:
        """The tensors whose stand-ins these are, on the device or on the host.

        On the host they are those that the next ``put`` would fill: to change them in place is enough.

        Args:
            written: others may have written to these so that no version counts it (``x.data``).

        Raises:
            DiskError: the file is not what was written.
        """
        item = self._items.get(key)
        with raw(), torch.no_grad():
            shown = [plain(t.detach()) for t in shown]
            if item is not None:
                item.shown = []
                self._carry(key, item.place, "to host" if on_host else "back")
            if item is None or self._changed(item, shown, written):
                tensors = [t.clone() if t.device.type == "cpu" else t for t in shown]
                if item is not None:
                    item.host = item.coming = None
            elif self._dry:
                with unseen() if on_host else nullcontext():
                    tensors = [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in item.shapes]
                self.tell_outside(tensors if on_host else [])
                return tensors
            elif item.host is not None:
                wait_for(item.event, self.device)  # it may be on its way there yet
                tensors = item.host
            else:
                self.start(key, shown)
                assert item.coming is not None
                (tensors, filled), item.coming = item.coming, None
                filled.result()
            there = self.to_host(tensors) if on_host else self.to_device(tensors)
            self._tell(there, is_outside=on_host)
            return there

    def _changed(self, item: _Item, shown: Sequence[torch.Tensor], written: bool = False) -> bool:
        if self._dry:
            return len(shown) != len(item.shapes)
        marks = [_mark(t) for t in shown]
        if item.place in MEMORIES:
            return [m[0] for m in marks] != [m[0] for m in item.marks]
        return written or marks != item.marks

    def watched_by(
        self, outside: Callable[[torch.Tensor], object], inside: Callable[[torch.Tensor], object]
    ) -> None:
        """Tell ``outside`` of tensors that take none of the device's memory, or of what stands for it.

        And ``inside`` of those that take some of it again: a CPU computes with what is in the host's memory.
        """
        self._watches.append((outside, inside))
        for item in self._items.values():
            self.tell_outside(item.shown)

    def tell_outside(self, tensors: Tensors) -> None:
        """Tell those that watch the device's memory of tensors that take none of it."""
        self._tell(tensors, is_outside=True)

    def _tell(self, tensors: Tensors, *, is_outside: bool) -> None:
        for outside, inside in self._watches:
            for t in tensors:
                (outside if is_outside else inside)(t)

    # ---- between the device and the host

    def _onto_host(self, item: _Item, tensors: Tensors) -> Tensors:
        host = item.host
        if host is None or [(t.shape, t.dtype) for t in host] != item.shapes:
            with unseen():
                host = [self.empty(t) for t in tensors]
        # of a CPU what is there already is what was brought: it goes when :meth:`settle` says so
        apart = [a for a, b in zip(host, tensors, strict=True) if _place(a) != _place(b)]
        self.tell_outside(apart)
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

    def to_host(self, tensors: Sequence[torch.Tensor], also: torch.Event | None = None) -> Tensors:
        """Tensors in the host's memory, when they are there, and when another copy is done."""
        known = [self._fetched.pop(_place(t), None) for t in tensors]
        fetched = [f if f is not None and f.serves(t) else None for f, t in zip(known, tensors, strict=True)]
        out, pairs = [], []
        for f, t in zip(fetched, tensors, strict=True):
            out.append(f.copy if f is not None else t if t.device.type == "cpu" else self.empty(t))
            if f is None:
                pairs.append((out[-1], t))
        events = [also, *(f.event for f in fetched if f is not None)]
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


def _is_held(x: torch.Tensor) -> bool:
    """Whether others than the store have a tensor over the memory of one of its own."""
    return holders_of_memory(x) > 1


def _place(t: torch.Tensor) -> tuple[torch.device, int]:
    with raw():
        return t.device, t.data_ptr() if t.device.type != "meta" else id(t)


def _mark(t: torch.Tensor) -> tuple[int, int]:
    """Changes when a tensor is written to, or is another."""
    with raw():
        return t.data_ptr(), version_of(t)


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
