"""The memory that tensors take while a program runs: each storage, from first appearance to release."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as raw
from torch.utils._python_dispatch import TorchDispatchMode


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

    Args:
        resized: storages whose owners change their sizes; these are read after every operation.
    """

    def __init__(self, resized: Iterable[torch.UntypedStorage] = ()) -> None:
        super().__init__()
        self.phase = ""
        self.peak = 0
        self.peak_at = ""
        self._live = _Live()
        self._resized = list(resized)
        self._live.sizes.update((storage._cdata, 0) for storage in self._resized)

    @property
    def now(self) -> int:
        """The bytes that live."""
        return self._live.now + sum(storage.nbytes() for storage in self._resized)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with raw():  # beneath autograd tensors are local, whatever class they bear
            out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, torch.Tensor):
                self.hold(x)
        now = self.now
        if now > self.peak:
            self.peak, self.peak_at = now, self.phase
        return out

    def ignore(self, x: torch.Tensor) -> None:
        """Never count a tensor's storage: it takes none of the device's memory."""
        with raw():
            storage = x.untyped_storage()
        self._live.now -= self._live.sizes.get(storage._cdata, 0)
        if storage._cdata not in self._live.sizes:
            weakref.finalize(storage, _release, self._live, storage._cdata)
        self._live.sizes[storage._cdata] = 0

    def hold(self, x: torch.Tensor) -> None:
        """Count a tensor's storage until it is released."""
        with raw():
            storage = x.untyped_storage()
        live, key = self._live, storage._cdata
        if key in live.sizes:
            return
        live.sizes[key] = storage.nbytes()
        live.now += storage.nbytes()
        weakref.finalize(storage, _release, live, key)


def _release(live: _Live, key: int) -> None:
    live.now -= live.sizes.pop(key, 0)


__all__ = ["LiveMemory"]
