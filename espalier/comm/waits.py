"""How long a program waits for what ranks send one another, axis by axis, on the CPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from espalier.comm.backend import Summing, Work
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
        self._open: dict[str, tuple[float, int]] = {}  # since when, and how many

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

    def time(self, axis: str, run: Callable[[], Any]) -> Any:
        """Do what an axis is waited for, and give what it gives."""
        self._deep += 1
        began = time.perf_counter()
        try:
            return run()
        finally:
            self._deep -= 1
            if not self._deep:  # what waits may wait for others itself
                self.waited[axis] = self.waited.get(axis, 0.0) + time.perf_counter() - began

    def follow(self, axis: str, begun: Any) -> None:
        """Something is under way along an axis, until it is waited for."""
        began, wait, under_way = time.perf_counter(), begun.wait, True
        since, count = self._open.get(axis, (began, 0))
        self._open[axis] = (since if count else began), count + 1

        def waits(*args: Any, **kwargs: Any) -> Any:
            nonlocal under_way
            if under_way:
                under_way = False
                since, count = self._open[axis]
                self._open[axis] = since, count - 1
                if count == 1:
                    self.beside[axis] = self.beside.get(axis, 0.0) + time.perf_counter() - since
            return self.time(axis, lambda: wait(*args, **kwargs))

        begun.wait = waits


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


@contextmanager
def waiting() -> Iterator[Waits]:
    """Take the time of all that is sent on the CPU while this is open, on meshes that have sent before.

    An accelerator's collectives are not among them: its streams wait, and not the program.
    """
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
