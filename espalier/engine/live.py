"""The memory of a device while an engine runs."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from espalier.parallel.data.axis import DataAxis
from espalier.tensor.live import LiveMemory


class Watch:
    """The peak of a device's memory while this is open; may be opened again.

    On CUDA the allocator tells it, elsewhere :class:`LiveMemory`.

    Args:
        live: follows what lives where there is no allocator to ask; holds what was there before.
    """

    def __init__(self, device: torch.device, live: LiveMemory) -> None:
        self._device, self.live = device, live
        self.restart()

    def restart(self) -> None:
        """Begin a new peak."""
        self.live.peak = 0
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)

    @property
    def peak(self) -> int:
        """The most bytes since then."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        return self.live.peak

    def fit(self, data: DataAxis, optimizer: torch.optim.Optimizer) -> bool:
        """Place chunks by the memory that a step took; says whether the budget is settled."""
        settled = data.fit(self.peak, optimizer)
        self.restart()
        return settled

    def __enter__(self) -> None:
        if self._device.type != "cuda":
            self.live.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self._device.type != "cuda":
            self.live.__exit__(*error)


def watch(module: nn.Module, optimizer: torch.optim.Optimizer | None, data: DataAxis) -> Watch:
    """A watch that begins with what an engine holds."""
    found = Watch(data.mesh.device(), LiveMemory(data.resized))
    states = optimizer.state.values() if optimizer is not None else ()
    held = [x for state in states for x in state.values() if isinstance(x, torch.Tensor)]
    for x in (*data.watched(found.live.ignore), *module.buffers(), *held):
        found.live.hold(x)
    return found


__all__ = ["LiveMemory", "Watch", "watch"]
