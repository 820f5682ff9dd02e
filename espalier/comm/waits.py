"""How long a program waits for what ranks send one another, axis by axis.

On an accelerator its stream waits, and not the program: there the times are between marks in that stream.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from espalier.comm.backend import Summing, Work
from espalier.comm.collectives import carrier
from espalier.device import is_accelerator, synchronize, timed_event
from espalier.mesh import Mesh


class Waits:
    """Seconds by axis.

    Attributes:
        waited: in which the program did nothing else: it sent, or waited for what others send.
        beside: in which something was under way while the program went on; at most so long was it really.
    """

    def __init__(self) -> None:
        self.waited: dict[str, float] = {}
        self.beside: dict[str, float] = {}
        self._deep = 0
        self._open: dict[str, tuple[Any, int]] = {}  # since when, and how many

    def clear(self) -> None:
        """Forget all."""
        self.waited.clear()
        self.beside.clear()

    @property
    def now(self) -> bool:
        """Whether the program waits, or sends."""
        return self._deep > 0

    @property
    def total(self) -> float:
        """Seconds waited, along all axes."""
        return sum(self.waited.values())

    def settle(self) -> None:
        """Wait until all that was done is in the numbers."""

    def spent(self, run: Callable[[], object]) -> Callable[[], float]:
        """Do something; what it gives says, when all is settled, the seconds that were not waited."""
        began, before = time.perf_counter(), self.total
        run()
        seconds = time.perf_counter() - began - (self.total - before)
        return lambda: seconds

    def _mark(self) -> Any:
        """This moment."""
        return time.perf_counter()

    def _add(self, to: dict[str, float], axis: str, since: Any, till: Any) -> None:
        """Note the time between two moments."""
        to[axis] = to.get(axis, 0.0) + till - since

    def time(self, axis: str, run: Callable[[], Any]) -> Any:
        """Do what an axis is waited for, and give what it gives."""
        self._deep += 1
        began = self._mark()
        try:
            return run()
        finally:
            self._deep -= 1
            if not self._deep:  # what waits may wait for others itself
                self._add(self.waited, axis, began, self._mark())

    def follow(self, axis: str, begun: Any) -> None:
        """Something is under way along an axis, until it is waited for."""
        began, wait, under_way = self._mark(), begun.wait, True
        since, count = self._open.get(axis, (began, 0))
        self._open[axis] = (since if count else began), count + 1

        def waits(*args: Any, **kwargs: Any) -> Any:
            nonlocal under_way
            if under_way:
                under_way = False
                since, count = self._open[axis]
                self._open[axis] = since, count - 1
                if count == 1:
                    self._add(self.beside, axis, since, self._mark())
            return self.time(axis, lambda: wait(*args, **kwargs))

        begun.wait = waits


class StreamWaits(Waits):
    """The same of an accelerator: seconds in which the stream that computes did nothing else."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._spans: list[tuple[dict[str, float], str, torch.Event, torch.Event]] = []

    def clear(self) -> None:
        """Forget all."""
        super().clear()
        self._spans.clear()

    def settle(self) -> None:
        """Wait until all that was done is in the numbers."""
        synchronize(self._device)
        for to, axis, since, till in self._spans:
            to[axis] = to.get(axis, 0.0) + _between(since, till)
        self._spans.clear()

    def spent(self, run: Callable[[], object]) -> Callable[[], float]:
        """Do something; what it gives says, when all is settled, the seconds that were not waited."""
        began, first = self._mark(), len(self._spans)
        run()
        ended, within = self._mark(), self._spans[first:]
        waits = [(since, till) for to, _, since, till in within if to is self.waited]
        return lambda: _between(began, ended) - sum(_between(*span) for span in waits)

    def _mark(self) -> torch.Event:
        return timed_event(self._device)

    def _add(self, to: dict[str, float], axis: str, since: torch.Event, till: torch.Event) -> None:
        self._spans.append((to, axis, since, till))


def _between(since: torch.Event, till: torch.Event) -> float:
    seconds: float = since.elapsed_time(till) / 1e3
    return seconds


class _Timed:
    """A backend whose calls along an axis are timed."""

    def __init__(self, backend: Any, axis: str, waits: Waits) -> None:
        self.backend, self._axis, self._waits = backend, axis, waits

    def __getattr__(self, name: str) -> Any:
        inner = getattr(self.backend, name)
        if name == "beyond" or not callable(inner):
            return inner

        def call(*args: Any, **kwargs: Any) -> Any:
            out = self._waits.time(self._axis, lambda: inner(*args, **kwargs))
            if isinstance(out, Work | Summing):
                self._waits.follow(self._axis, out)
            return out

        return call


def waiting(device: torch.device) -> AbstractContextManager[Waits]:
    """Take the time of all that is sent on a device while this is open, on meshes that there are."""
    return _on_accelerator(device) if is_accelerator(device) else _on_cpu()


@contextmanager
def _on_accelerator(device: torch.device) -> Iterator[Waits]:
    waits = StreamWaits(device)
    meshes = [mesh for mesh in Mesh.known if mesh.device_type == device.type and not mesh.is_dry]
    for mesh in meshes:
        for axis in range(-1, mesh.ndim):
            name = mesh.names[axis] if axis >= 0 else ",".join(mesh.names)
            mesh.timed[axis] = _Timed(carrier(mesh, axis, device), name, waits)
    try:
        yield waits
    finally:
        for mesh in meshes:
            mesh.timed.clear()


@contextmanager
def _on_cpu() -> Iterator[Waits]:
    waits, timed = Waits(), []
    for mesh in Mesh.known:
        for axis, backend in mesh.carriers.items():
            name = mesh.names[axis] if axis >= 0 else ",".join(mesh.names)
            mesh.carriers[axis] = _Timed(backend, name, waits)
            timed.append((mesh, axis, backend))
    try:
        yield waits
    finally:
        for mesh, axis, backend in timed:
            if axis in mesh.carriers:
                mesh.carriers[axis] = backend
