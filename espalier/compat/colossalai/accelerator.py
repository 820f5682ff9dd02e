"""``colossalai.accelerator``: the machine's, or its CPU, in torch's words."""

from __future__ import annotations

import platform
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from espalier.compat.absent import Absent, or_absent
from espalier.compat.deepspeed.accelerator import Accelerator
from espalier.device import current, use
from espalier.device import name as name_of

Device = torch.device | int | None


class BaseAccelerator(Accelerator):
    """What programs ask of ``get_accelerator()``."""

    @property
    def name(self) -> str:
        """As torch names it."""
        return self._kind

    @property
    def communication_backend(self) -> str:
        """What carries its tensors between ranks."""
        return self.communication_backend_name()

    @property
    def is_synchronous(self) -> bool:
        """Whether the host waits for each operation."""
        return self.is_synchronized_device()

    def get_version(self) -> str:
        """Of what it is programmed by; on the CPU that of Python."""
        found = getattr(torch.version, self._kind, None) if self.is_available() else None
        return platform.python_version() if found is None else str(found)

    def get_current_device(self) -> torch.device:
        """The one in use."""
        return current(self._kind)

    def set_device(self, device: Device = None) -> None:
        """Use one, by default this process's; nothing on the CPU."""
        if self.is_available() and device is not None:
            use(self._at(device))

    def get_device_name(self, device: Device = None) -> str:
        """As its maker names it."""
        return name_of(self._at(device)) if self.is_available() else platform.processor()

    def get_device_properties(self, device: Device = None) -> Any:
        """As torch tells them; None on the CPU."""
        return self._module.get_device_properties(self._at(device)) if self.is_available() else None

    def set_to_device(self, models: Any) -> Any:
        """A model, or each of a list, on the device."""
        if isinstance(models, list) and len(models) > 1:
            return [x.to(self.get_current_device()) for x in models]
        return (models[0] if isinstance(models, list) else models).to(self.get_current_device())

    def seed(self) -> None:
        """Another one, of the generator's own."""
        torch.seed()

    seed_all = seed

    def autocast(
        self, enabled: bool = True, dtype: torch.dtype = torch.float16, cache_enabled: bool = True
    ) -> AbstractContextManager[Any]:
        """``torch.autocast`` of the device."""
        return torch.autocast(self._kind, dtype=dtype, enabled=enabled, cache_enabled=cache_enabled)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(name={self.name})"

    def _at(self, device_index: Device) -> torch.device:
        return device_index if isinstance(device_index, torch.device) else super()._at(device_index)

    def __getattr__(self, name: str) -> Any:
        found = super().__getattr__(name)
        if isinstance(found, Absent) and self.is_available() and hasattr(self._module, name):
            return getattr(self._module, name)
        return found


CpuAccelerator = CudaAccelerator = NpuAccelerator = BaseAccelerator


def get_accelerator() -> BaseAccelerator:
    """The machine's."""
    return BaseAccelerator()


def set_accelerator(accelerator: Any = None) -> None:
    """Nothing: it is the one that the machine has."""


auto_set_accelerator: Callable[..., None] = set_accelerator

__all__ = [
    "BaseAccelerator",
    "CpuAccelerator",
    "CudaAccelerator",
    "NpuAccelerator",
    "auto_set_accelerator",
    "get_accelerator",
    "set_accelerator",
]

__getattr__ = or_absent(
    __name__,
    "colossalai.accelerator",
    {},
    elsewhere={
        "api base_accelerator cpu_accelerator cuda_accelerator npu_accelerator": __name__,
    },
)
