"""``deepspeed.accelerator``: the machine's, or its CPU, in torch's words."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from espalier.compat.absent import Absent, or_absent
from espalier.device import (
    accelerator,
    backend_of,
    count,
    current,
    current_stream,
    get_rng_state,
    has_peak,
    host_buffer_like,
    host_memory,
    module_of,
    new_stream,
    on,
    peak_memory,
    restart_peak,
    set_rng_state,
    synchronize,
    timed_event,
    total_memory,
    use,
)


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

    # ---- what it can

    def communication_backend_name(self) -> str:
        """What carries its tensors between ranks."""
        there = backend_of(self._kind) if torch.distributed.is_initialized() else None
        return there or torch.distributed.get_default_backend_for_device(self._kind)

    def supported_dtypes(self) -> list[torch.dtype]:
        """Of parameters."""
        return [torch.float32, torch.bfloat16, *([torch.float16] if self.is_fp16_supported() else [])]

    def is_bf16_supported(self) -> bool:
        """Yes: the CPU computes in it too."""
        return not self.is_available() or bool(getattr(self._module, "is_bf16_supported", bool)())

    def is_fp16_supported(self) -> bool:
        """Yes."""
        return True

    def is_synchronized_device(self) -> bool:
        """Whether the host waits for each operation: so it does where it computes by itself."""
        return not self.is_available()

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies on it."""
        return tensor.device.type == self._kind

    def is_triton_supported(self) -> bool:
        """Not to be asked: models run as they are written."""
        return False

    # ---- random numbers

    def manual_seed(self, seed: int) -> None:
        """``torch.manual_seed``."""
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def initial_seed(self) -> int:
        """What it began with."""
        return torch.initial_seed()

    def random(self) -> Any:
        """``torch.random``."""
        return torch.random

    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        """That of the device."""
        return get_rng_state(self._at(device_index)) if self.is_available() else torch.get_rng_state()

    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        """That of the device."""
        if self.is_available():
            set_rng_state(self._at(device_index), new_state)
        else:
            torch.set_rng_state(new_state)

    # ---- memory; a CPU has no allocator that counts: 0

    @property
    def _module(self) -> Any:
        return module_of(self._kind)

    def _at(self, device_index: int | None) -> torch.device:
        return torch.device(self._kind, self.current_device() if device_index is None else device_index)

    def _counted(self, name: str, device_index: int | None) -> int:
        count_of = getattr(self._module, name, None) if self.is_available() else None
        return 0 if count_of is None else int(count_of(self._at(device_index)))

    def memory_allocated(self, device_index: int | None = None) -> int:
        """Bytes of tensors."""
        return self._counted("memory_allocated", device_index)

    def memory_reserved(self, device_index: int | None = None) -> int:
        """Bytes that the allocator keeps."""
        return self._counted("memory_reserved", device_index)

    memory_cached = memory_reserved

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        """At most, since the last :meth:`reset_peak_memory_stats`."""
        return peak_memory(self._at(device_index)) if has_peak(self._kind) else 0

    def max_memory_reserved(self, device_index: int | None = None) -> int:
        """At most, too."""
        return self._counted("max_memory_reserved", device_index)

    max_memory_cached = max_memory_reserved

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        """Begin a new peak."""
        if has_peak(self._kind):
            restart_peak(self._at(device_index))

    reset_max_memory_allocated = reset_max_memory_cached = reset_peak_memory_stats

    def total_memory(self, device_index: int | None = None) -> int:
        """Bytes that it has; on the CPU those of the host."""
        if self.is_available():
            return total_memory(self._at(device_index))
        return host_memory()

    def available_memory(self, device_index: int | None = None) -> int:
        """Bytes that are free; on the CPU those of the host."""
        if self.is_available():
            return self.total_memory(device_index) - self.memory_allocated(device_index)
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")

    def empty_cache(self) -> None:
        """Give back what the allocator keeps."""
        if self.is_available():
            self._module.empty_cache()

    def pin_memory(self, tensor: torch.Tensor, align_bytes: int = 1) -> torch.Tensor:
        """A copy that the device reads by itself; the tensor where there is none."""
        return host_buffer_like(tensor, pin=True).copy_(tensor) if self.is_available() else tensor

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether it is one."""
        return tensor.is_pinned()

    # ---- streams, and marks for a profiler

    def Stream(self, **options: Any) -> Any:
        """One of the device; None on the CPU."""
        return new_stream(self._at(None)) if self.is_available() else None

    def stream(self, stream: Any) -> AbstractContextManager[object]:
        """What is computed in here goes to it."""
        return nullcontext() if stream is None else on(stream)

    def current_stream(self, device_index: int | None = None) -> Any:
        """That in use; None on the CPU."""
        return current_stream(self._at(device_index)) if self.is_available() else None

    def Event(self, **options: Any) -> Any:
        """One of the device, which knows times; None on the CPU."""
        return timed_event(self._at(None)) if self.is_available() else None

    def range_push(self, msg: str) -> None:
        """Nothing: ``torch.profiler.record_function`` marks what belongs together."""

    def range_pop(self) -> None:
        """Nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name.endswith("Tensor"):  # FloatTensor, HalfTensor, ...
            return getattr(self._module if self.is_available() else torch, name)
        return Absent(
            f"get_accelerator().{name}", "ask torch.accelerator, or torch.get_device_module(device_name())"
        )


def get_accelerator() -> Accelerator:
    """The machine's."""
    return Accelerator()


_OF_TORCH = "torch tells which accelerator there is: get_accelerator() speaks of it"

__getattr__ = or_absent(
    __name__,
    "deepspeed.accelerator",
    {
        "abstract_accelerator DeepSpeedAccelerator set_accelerator is_current_accelerator_supported "
        "cpu_accelerator cuda_accelerator hpu_accelerator klxpu_accelerator mlu_accelerator mps_accelerator "
        "npu_accelerator sdaa_accelerator supa_accelerator xpu_accelerator": _OF_TORCH,
    },
    elsewhere={"real_accelerator": __name__},
)
