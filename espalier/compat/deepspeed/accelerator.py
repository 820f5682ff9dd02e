"""``deepspeed.accelerator``: the machine's, or its CPU, in torch's words."""

from __future__ import annotations

import torch

from espalier.device import accelerator, count, current, synchronize, use


class Accelerator:
    """What programs ask of ``get_accelerator()``."""

    @property
    def _kind(self) -> str:
        return accelerator() or "cpu"

    def is_available(self) -> bool:
        """Whether there is one beside the CPU."""
        return accelerator() is not None

    def device_name(self, device_index: int | None = None) -> str:
        """As torch names it."""
        return self._kind if device_index is None or self._kind == "cpu" else f"{self._kind}:{device_index}"

    def current_device_name(self) -> str:
        """Of the one in use."""
        return self.device_name(self.current_device() if self.is_available() else None)

    def current_device(self) -> int:
        """The number of the one in use; 0 on the CPU."""
        return current(self._kind).index or 0

    def device_count(self) -> int:
        """How many there are; 1 on the CPU."""
        return count() or 1

    def set_device(self, device_index: int) -> None:
        """Use one; nothing on the CPU."""
        if self.is_available():
            use(torch.device(self._kind, device_index))

    def synchronize(self, device_index: int | None = None) -> None:
        """Wait for what is under way; nothing on the CPU."""
        if self.is_available():
            one = self.current_device() if device_index is None else device_index
            synchronize(torch.device(self._kind, one))


def get_accelerator() -> Accelerator:
    """The machine's."""
    return Accelerator()
