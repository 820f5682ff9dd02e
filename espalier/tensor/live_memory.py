"""The memory that tensors take while a program runs: each storage, from first appearance to release."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch

from espalier.torch_private import DispatchMode, TorchDispatchMode, disable_modes, memory_id, raw


@dataclass
class _Live:
    now: int = 0
    sizes: dict[int, int] = field(default_factory=dict)


class LiveMemory(TorchDispatchMode):
    """While open, follows every storage that an operation gives.

    Attributes:
        phase: what the program is at, as the caller says.
        peak: the most bytes that have lived at once.
        peak_at: the phase then.
        peaks: of each phase.
        aside: bytes that live, and count in no peak from now on.

    Args:
        resized: storages whose owners change their sizes; these are read after every operation.
    """

    looks_on = True

    def __init__(self, resized: Iterable[torch.UntypedStorage] = ()) -> None:
        super().__init__()
        self.phase = ""
        self.peak = 0
        self.peak_at = ""
        self.peaks: dict[str, int] = {}
        self.aside = 0
        self._live = _Live()
        self._resized = list(resized)
        self._live.sizes.update((memory_id(storage), 0) for storage in self._resized)

    @property
    def now(self) -> int:
        """The bytes that live."""
        return self._live.now + sum(storage.nbytes() for storage in self._resized)

    def follow(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call an operation, and see what it gives."""
        with raw():  # beneath autograd tensors are local, whatever class they bear
            out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, torch.Tensor):
                self.hold(x)
        now = self.now - self.aside
        if now > self.peaks.get(self.phase, 0):
            self.peaks[self.phase] = now
        if now > self.peak:
            self.peak, self.peak_at = now, self.phase
        return out

    __torch_dispatch__ = follow

    def ignore(self, x: torch.Tensor) -> None:
        """Count a tensor's storage no longer: it takes none of the device's memory."""
        self._set(x, 0)

    def count(self, x: torch.Tensor) -> None:
        """Count a tensor's storage, whether it was ignored or not."""
        with raw():
            self._set(x, x.untyped_storage().nbytes())

    def _set(self, x: torch.Tensor, nbytes: int) -> None:
        with raw():
            storage = x.untyped_storage()
        live, key = self._live, memory_id(storage)
        live.now += nbytes - live.sizes.get(key, 0)
        if key not in live.sizes:
            weakref.finalize(storage, _release, live, key)
        live.sizes[key] = nbytes

    def hold(self, x: torch.Tensor) -> None:
        """Count a tensor's storage until it is released, unless it is ignored."""
        with raw():
            storage = x.untyped_storage()
        if memory_id(storage) not in self._live.sizes:
            self.count(x)


class DryMemory(LiveMemory, DispatchMode):
    """The same of a run without data."""

    __torch_dispatch__ = LiveMemory.follow


def unseen() -> AbstractContextManager[object]:
    """While open, modes don't see operations: of what takes none of the device's memory."""
    context: AbstractContextManager[object] = disable_modes()
    return context


def _release(live: _Live, key: int) -> None:
    live.now -= live.sizes.pop(key, 0)
