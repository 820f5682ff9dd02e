"""``torch.sim``: the Python side of the simulated device, and what it tells of a program.

:func:`install` is for processes of tests only: from then on torch has an accelerator, named ``sim``.
"""

from __future__ import annotations

import atexit
import ctypes
import sys
import types
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

_LIBRARY = "espalier/"
_DEPTH = 3  # so many of the library's functions are named, from the inside out


class Telling(NamedTuple):
    """One kind of thing seen at one place.

    ``kind``: ``race``, ``host`` (an access to closed memory), ``mixed``, ``freed``, ``sync``, or ``kernel``.
    """

    kind: str
    what: str
    where: str


class Simulated:
    """The device of this process. It tells while it is watched; one is enough, see :func:`install`."""

    def __init__(self, library: Path) -> None:
        self.c = ctypes.CDLL(str(library))
        for name in ("sim_most", "sim_allocated", "sim_most_pinned", "sim_most_taken"):
            getattr(self.c, name).restype = ctypes.c_int64
        self.c.sim_access.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_char_p]
        self._tellings: Counter[Telling] | None = None
        # held here: C keeps the bare address
        self._heard = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p)(self._hear)
        self.c.sim_start(self._heard)
        atexit.register(self.c.sim_silence)

    def _hear(self, kind: bytes, what: bytes) -> None:
        if self._tellings is not None:
            self._tellings[Telling(kind.decode(), what.decode(), _place())] += 1

    @contextmanager
    def watched(self, *, kernels: bool = False) -> Iterator[Counter[Telling]]:
        """What is told while this is open; of each operator too if ``kernels`` are asked for."""
        before, self._tellings = self._tellings, Counter()
        self.c.sim_tell_kernels(kernels)
        try:
            yield self._tellings
        finally:
            self._tellings = before
            self.c.sim_tell_kernels(False)

    @contextmanager
    def emulating(self) -> Iterator[None]:
        """Copies made meanwhile are the emulation's own: no program waits for them."""
        self.c.sim_emulate(1)
        try:
            yield
        finally:
            self.c.sim_emulate(-1)

    def access(self, x: torch.Tensor, *, write: bool, by: str) -> None:
        """Note that the current stream reads or writes a contiguous tensor."""
        self.c.sim_access(x.data_ptr(), x.nbytes, int(write), by.encode())


def _place() -> str:
    """The library's functions under way, the innermost first; else the innermost of anybody's."""
    frame: types.FrameType | None = sys._getframe()
    for _ in range(2):  # the caller, and who made it call; none: a thread of autograd's own
        frame = None if frame is None else frame.f_back
    nearest = "?"
    inside: list[str] = []
    while frame is not None and len(inside) < _DEPTH:
        name = frame.f_code.co_filename
        at = name.rfind(_LIBRARY)
        if at >= 0 and "/tests/" not in name:
            inside.append(f"{name[at + len(_LIBRARY) :]}:{frame.f_code.co_qualname.split('.<locals>')[0]}")
        elif nearest == "?":
            nearest = f"{Path(name).name}:{frame.f_code.co_qualname}"
        frame = frame.f_back
    return " < ".join(inside) or nearest


_installed: list[Simulated] = []


def install(library: Path) -> Simulated:
    """Give torch the device, once in a process."""
    if not _installed:
        torch.utils.rename_privateuse1_backend("sim")
        _installed.append(Simulated(library))
        module = _module(_installed[0])
        torch._register_device_module("sim", module)
        sys.modules["torch.sim"] = module
        torch.utils.generate_methods_for_privateuse1_backend()
    return _installed[0]


def _module(sim: Simulated) -> Any:
    """What ``torch.cuda`` is to CUDA, in what is asked of it."""
    module: Any = types.ModuleType("torch.sim")

    def get_rng_state(device: Any = None) -> torch.Tensor:
        return torch.zeros(16, dtype=torch.uint8)

    def nothing(*_: Any, **__: Any) -> None:
        """Its kernels draw from the CPU's generator."""

    module.Stream, module.Event = torch.Stream, torch.Event
    module.is_available = module.is_initialized = lambda: True
    module._is_in_bad_fork = lambda: False
    module.device_count = sim.c.sim_devices
    module.current_device = torch.accelerator.current_device_index
    module.set_device = torch.accelerator.set_device_index
    module.current_stream = torch.accelerator.current_stream
    module.synchronize = torch.accelerator.synchronize
    module.manual_seed = module.manual_seed_all = module.set_rng_state = nothing
    module.get_rng_state = get_rng_state
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    module.memory_allocated = lambda device=None: sim.c.sim_allocated()
    module.max_memory_allocated = lambda device=None: sim.c.sim_most()
    module.memory_reserved = module.memory_allocated
    module.mem_get_info = lambda device=None: ((1 << 34) - sim.c.sim_allocated(), 1 << 34)
    module.reset_peak_memory_stats = lambda device=None: sim.c.sim_restart_peak()
    module.get_device_name = lambda device=None: "a simulated device"
    module.get_device_properties = lambda device=None: types.SimpleNamespace(total_memory=1 << 34)
    return module
