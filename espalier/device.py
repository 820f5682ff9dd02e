"""What the library knows about devices: which there are, their streams, memory, generators and backends.

Over ``torch.accelerator`` and the accelerator's own module (``torch.cuda``, ``torch.xpu``, ``torch.npu``, or
that of a plugin). Elsewhere a device is asked what it can do, never what it is called.
"""

from __future__ import annotations

import importlib.util
import math
import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from espalier.torch_private import allocator_settings, backend_for, set_allocator_settings

# methods of tensors that move them to a kind of device
MOVES = tuple(name for name in ("cpu", "cuda", "xpu") if hasattr(torch.Tensor, name))

# what names the devices that a process sees
VISIBLE: Final = tuple(
    "CUDA_VISIBLE_DEVICES HIP_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES ZE_AFFINITY_MASK "
    "ASCEND_RT_VISIBLE_DEVICES".split()
)
# what NCCL must be told so that ranks may share a device
_SHARING = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_MAX_CTAS": "2"}

# of the matrices by whose products a device is kept busy, and how many of these
_LEAD_SIDE, _MOST_LEADS = 2048, 4096

DESCRIBED = '"cpu", or the accelerator\'s type ("cuda", "xpu", ...)'


def is_accelerator(device: torch.device | str) -> bool:
    """Whether a device computes apart from the host, in memory of its own."""
    kind = device if isinstance(device, str) else device.type
    return kind not in ("cpu", "meta")


def accelerator() -> str | None:
    """The type of this machine's accelerator, if torch and the machine have one."""
    if not torch.accelerator.is_available():
        return None
    current = torch.accelerator.current_accelerator()
    return None if current is None else current.type


def count() -> int:
    """How many of its devices this process sees."""
    return torch.accelerator.device_count() if torch.accelerator.is_available() else 0


def current(kind: str) -> torch.device:
    """The device of a type that this process uses."""
    if not is_accelerator(kind) or kind != accelerator():
        return torch.device(kind)
    return torch.device(kind, torch.accelerator.current_device_index())


def names() -> list[str]:
    """The accelerator's devices, as their maker calls them, with their memory."""
    devices = [torch.device(accelerator() or "cpu", i) for i in range(count())]
    return [f"{name(device)} ({total_memory(device) / 1e9:.0f} GB)" for device in devices]


def name(device: torch.device) -> str:
    """What an accelerator's maker calls it."""
    return str(torch.get_device_module(device.type).get_device_name(device.index))


# ---- which device a rank takes


def choose(kind: str | None, local_rank: int, local_size: int, *, apart: bool = False) -> torch.device:
    """The device of a rank: its own accelerator, if every rank of the machine can have one, else the CPU.

    Args:
        kind: a device type, of which it must be; None: whatever there is. That it is the CPU beside an
            accelerator is said in a warning.
        apart: each rank has an environment of its own, in which it may see its own device alone.

    Raises:
        ValueError: there is no such type, or there are too few devices of it.
    """
    there = accelerator()
    if kind not in (None, "cpu", there) and not _is_known(kind):
        raise ValueError(f"device type {kind!r}: expected {DESCRIBED} or None")
    if kind == "cpu":
        return torch.device("cpu")
    devices = count() if kind in (None, there) else 0
    if there is not None and devices >= max(local_size, local_rank + 1):
        return torch.device(there, local_rank)
    if there is not None and devices and is_shared():
        return torch.device(there, local_rank % devices)
    if there is not None and devices == 1 and apart and any(name in os.environ for name in VISIBLE):
        return torch.device(there, 0)
    if kind is not None:
        raise ValueError(
            f"{local_size} ranks on this machine need a device of type {kind!r} each, but {devices} "
            f"{'is' if devices == 1 else 'are'} visible: start fewer ranks, or use device type 'cpu'"
        )
    if devices and local_rank == 0:
        warnings.warn(
            f"Ranks compute on the CPU: {local_size} of them on this machine need a device of type {there!r} "
            f"each, but {devices} {'is' if devices == 1 else 'are'} visible. Start {devices}, or say that it "
            "is meant: Mesh.from_env(axes, 'cpu').",
            stacklevel=3,
        )
    return torch.device("cpu")


def is_shared() -> bool:
    """Whether ranks of a machine may share its devices: for tests, by NCCL from 2.30 on."""
    return os.environ.get("ESPALIER_SHARE_DEVICE") == "1"


def _is_known(kind: str | None) -> bool:
    """Whether torch has a device type of that name that may compute."""
    try:
        return is_accelerator(torch.device(kind or "").type)
    except RuntimeError:
        return False


def use(device: torch.device) -> None:
    """Let this process use a device from now on."""
    if is_accelerator(device):
        torch.accelerator.set_device_index(device)


def backends(device: torch.device) -> dict[str, Any]:
    """What ``init_process_group`` is told, so that tensors of a device travel, and those of the CPU."""
    if not is_accelerator(device):
        return {"backend": "gloo"}
    if is_shared():
        for name, value in _SHARING.items():
            os.environ.setdefault(name, value)
    of_device = dist.get_default_backend_for_device(device.type)
    return {"backend": f"cpu:gloo,{device.type}:{of_device}", "device_id": device}


# NCCL's from torch 2.15 on: see :func:`of_further_groups`
_BOUND = tuple(
    vars(dist)[name] for name in ("ProcessGroupNCCL2", "ProcessGroupNCCLLazy") if hasattr(dist, name)
)


def of_further_groups(world: Any, by_pairs: bool) -> dict[str, Any]:
    """What ``new_group`` is told in a world that is bound to a device.

    Up to torch 2.14 nothing. From then on NCCL binds each group to a device when it is made: by itself to
    that which ``LOCAL_RANK`` numbers, or this rank's place in the world. And all messages in a group stand in
    one queue, but of its backend "nccl-lazy".

    Args:
        by_pairs: each two ranks are to have a queue of their own for messages.
    """
    device = world.bound_device_id
    backend = None if device is None or not _BOUND else backend_for(world, device)
    if not isinstance(getattr(backend, "wrapped_pg", backend), _BOUND):
        return {}
    return {"device_id": device, **({"backend": "nccl-lazy"} if by_pairs else {})}


def known_backends() -> list[str]:
    """The backends of this torch by which tensors of some device are exchanged where nobody chose."""
    defaults = dict.fromkeys(dist.Backend.default_device_backend_map.values())
    return [name for name in defaults if dist.is_backend_available(name)]


def of_world() -> str:
    """The type of device whose tensors the running world's ranks exchange."""
    kind = accelerator()
    return "cpu" if kind is None or backend_of(kind) in (None, dist.Backend.GLOO) else kind


def backend_of(kind: str, group: dist.ProcessGroup | None = None) -> str | None:
    """By which backend a group, or the world, exchanges tensors of a device type, if by any."""
    pairs = (pair.partition(":") for pair in dist.get_backend_config(group).split(","))
    return {device: backend for device, _, backend in pairs}.get(kind)


# ---- streams and events


def new_stream(device: torch.device) -> torch.Stream | None:
    """A further stream of a device; None where there are none."""
    return torch.Stream(device) if _has_streams(device) else None


def _has_streams(device: torch.device) -> bool:
    return is_accelerator(device) and hasattr(torch.get_device_module(device.type), "Stream")


def current_stream(device: torch.device) -> torch.Stream:
    """That on which a device computes now."""
    return torch.accelerator.current_stream(device)


def on(stream: torch.Stream | None) -> AbstractContextManager[object]:
    """While open, what is asked of the device goes to that stream."""
    return nullcontext() if stream is None else stream


def copy_by(
    stream: torch.Stream | None,
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
    device: torch.device,
    after: torch.Event | None = None,
) -> torch.Event | None:
    """Copy between memories, (into, out of), by a stream that waits for the current one, or for ``after``.

    Returns:
        the event after which all is there; None: it is.
    """
    if stream is None:
        for into, outof in pairs:
            into.copy_(outof)
        return None
    if after is None:
        stream.wait_stream(current_stream(device))
    else:
        stream.wait_event(after)
    with on(stream):
        for pair in pairs:
            pair[0].copy_(pair[1], non_blocking=True)
            for t in pair:
                if is_accelerator(t.device):
                    t.record_stream(stream)
    return stream.record_event()


@contextmanager
def beside(stream: torch.Stream | None, device: torch.device) -> Iterator[None]:
    """While open, what is asked of a device goes to a stream that has waited for the current one."""
    if stream is not None:
        stream.wait_stream(current_stream(device))
    with on(stream):
        yield


def reached(device: torch.device) -> torch.Event | None:
    """What says that a device has done all that it was given so far; None: it has."""
    return current_stream(device).record_event() if _has_streams(device) else None


def wait_for(event: torch.Event | None, device: torch.device) -> None:
    """Let what a device is given from now on wait for an event."""
    if event is not None:
        current_stream(device).wait_event(event)


def timed_event(device: torch.device) -> torch.Event:
    """A mark behind all that a device was given, which knows when it came past it (``elapsed_time``)."""
    event = torch.Event(device, enable_timing=True)
    event.record(current_stream(device))
    return event


def synchronize(device: torch.device) -> None:
    """Let the host wait until a device has done all that it was given: for a clock, never in a usual step."""
    if is_accelerator(device):
        torch.accelerator.synchronize(device)


def keep_busy(device: torch.device, seconds: float) -> None:
    """Let an accelerator compute for about so long: what it is asked for meanwhile waits in its queue."""
    matrix, takes = _lead(device)
    for _ in range(min(_MOST_LEADS, math.ceil(seconds / takes))):
        matrix @ matrix


@lru_cache(maxsize=8)
def _lead(device: torch.device) -> tuple[torch.Tensor, float]:
    """A matrix, and the seconds that its product with itself takes, but for the first time."""
    matrix = torch.ones(_LEAD_SIDE, _LEAD_SIDE, device=device)
    times = []
    for _ in range(4):
        synchronize(device)
        began = time.perf_counter()
        matrix @ matrix
        synchronize(device)
        times.append(time.perf_counter() - began)
    return matrix, max(min(times[1:]), 1e-6)


def mark() -> Callable[[], Callable[[], bool]] | None:
    """What puts a mark behind all that the current device was given, and says whether it came past it.

    None where there is no accelerator.
    """
    kind = accelerator()
    if kind is None:
        return None
    device = current(kind)

    def put() -> Callable[[], bool]:
        event = torch.Event(device)
        event.record(current_stream(device))
        return event.query

    return put


# ---- from the host, without waiting for it


def moved(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor on a device; from the host by pinned memory: the program does not wait for the copy."""
    if x.device.type != "cpu" or not is_accelerator(device) or not pins(device):
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)


def number(value: float, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """A number on a device, which a kernel writes there: nothing is copied."""
    return torch.full((), value, dtype=dtype, device=device)


# ---- memory


def pins(device: torch.device) -> bool:
    """Whether a device copies faster, and beside the program, from and to pinned memory of the host."""
    return _has_streams(device)


def host_buffer(shape: Sequence[int], dtype: torch.dtype, *, pin: bool) -> torch.Tensor:
    """A tensor in the host's memory, uninitialized; ``pin``: a device copies from and to it by itself."""
    if pin:
        _pin_no_more_than_is_used()
    return torch.empty(torch.Size(shape), dtype=dtype, device="cpu", pin_memory=pin)


@lru_cache(maxsize=1)
def _pin_no_more_than_is_used() -> None:
    """Let torch not round pinned buffers above a megabyte up to powers of two, if nobody chose otherwise.

    What lasts is made once, and what is made anew has the size of what was given back: rounding would help
    nobody find a buffer again, and take up to twice the memory. torch before 2.13 always rounds.
    """
    said = allocator_settings()
    if said is None or "pinned_max" in said:
        return
    try:
        set_allocator_settings(",".join(filter(None, (said, "pinned_max_round_threshold_mb:1"))))
    except (RuntimeError, ValueError) as error:
        warnings.warn(
            f"Pinned memory is rounded up to powers of two: torch does not take its settings ({error}).",
            stacklevel=3,
        )


def host_buffer_like(x: torch.Tensor, *, pin: bool) -> torch.Tensor:
    """The same, of the shape, dtype and order in memory of a tensor."""
    if pin:
        _pin_no_more_than_is_used()
    return torch.empty_like(x, device="cpu", pin_memory=pin)


def module_of(kind: str) -> Any:
    """Torch's module for a kind of device, as ``torch.cpu``."""
    return torch.get_device_module(kind)


def has_peak(device: torch.device | str) -> bool:
    """Whether a device's allocator knows how much was allocated at most."""
    kind = device if isinstance(device, str) else device.type
    return is_accelerator(kind) and hasattr(torch.get_device_module(kind), "max_memory_allocated")


def peak_memory(device: torch.device) -> int:
    """The most bytes that were allocated since the start, or :func:`restart_peak`."""
    return int(torch.get_device_module(device.type).max_memory_allocated(device))


def total_memory(device: torch.device) -> int:
    """The bytes of an accelerator's memory, whoever has them."""
    properties = torch.get_device_module(device.type).get_device_properties(device.index)
    return int(properties.total_memory)


def room(device: torch.device) -> int | None:
    """The bytes of a device's memory that this process has, or that are free; None: that cannot be asked."""
    if not is_accelerator(device):
        return None
    module: Any = torch.get_device_module(device.type)
    if not hasattr(module, "mem_get_info"):
        return None
    return int(module.mem_get_info(device)[0] + module.memory_reserved(device))


def restart_peak(device: torch.device) -> None:
    """Begin a new peak."""
    torch.get_device_module(device.type).reset_peak_memory_stats(device)


# ---- the host beside a device


def process_memory(field: str) -> int | None:
    """Bytes of this process, where Linux tells: ``"VmRSS"``, what it has; ``"VmHWM"``, at most so far."""
    try:
        lines = Path("/proc/self/status").read_text("utf-8").splitlines()
    except OSError:
        return None
    sizes = (int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))
    return next(sizes, None)


def cores() -> int:
    """How many of the host's this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def host_memory() -> int:
    """Bytes of the host's memory; 0 where the system does not tell."""
    if "SC_PHYS_PAGES" not in getattr(os, "sysconf_names", ()):
        return 0
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@contextmanager
def host_threads() -> Iterator[None]:
    """While open, torch computes on the host with this rank's share of its cores.

    Ranks beside accelerators have one thread each, as torchrun says, and the cores idle.
    """
    before = torch.get_num_threads()
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    share = cores() // (int(local) if local.isdecimal() and int(local) else 1)
    torch.set_num_threads(max(before, share))
    try:
        yield
    finally:
        torch.set_num_threads(before)


# ---- generators of random values


def get_rng_state(device: torch.device) -> torch.Tensor:
    """The state of an accelerator's generator, bytes in the host's memory."""
    with torch.device("cpu"):  # some make it where the program makes its tensors
        state: torch.Tensor = torch.get_device_module(device.type).get_rng_state(device)
    return state


def seed_generator(device: torch.device, seed: int) -> None:
    """Seed its default generator, and no other device's."""
    with torch.accelerator.device_index(device.index):
        torch.get_device_module(device.type).manual_seed(seed)


def set_rng_state(device: torch.device, state: torch.Tensor) -> None:
    """Let it go on from there."""
    torch.get_device_module(device.type).set_rng_state(state, device)


# ---- kinds of kernels

EXACT: Final = "exact, and slow: without TF32, without flash attention"
FASTER: Final = (
    'plan.precision = "bfloat16", or torch.set_float32_matmul_precision("high") in your own script'
)


def choose_algorithms(tries: bool | None, is_repeatable: bool | None) -> None:
    """How an accelerator's convolutions are computed; None leaves it as it is.

    Args:
        tries: whether the fastest algorithm is sought by trying each.
        is_repeatable: whether only those are taken that give the same each time.
    """
    if tries is not None:
        torch.backends.cudnn.benchmark = tries
    if is_repeatable is not None:
        torch.backends.cudnn.deterministic = is_repeatable


def is_exact() -> bool:
    """Whether accelerators multiply float32 in full, as torch lets them by default: see ``EXACT``."""
    return torch.get_float32_matmul_precision() == "highest"


def autocast_types() -> tuple[str, ...]:
    """The device types that have autocasts here."""
    current = torch.accelerator.current_accelerator()
    return ("cpu",) if current is None else ("cpu", current.type)


def has_grouped_products(kind: str) -> bool:
    """Whether torch multiplies groups of rows by matrices of their own in one kernel there."""
    return kind == "cuda" and hasattr(torch.nn.functional, "grouped_mm")


def has_triton(device: torch.device) -> bool:
    """Whether kernels of our own run there: those of Triton, on CUDA from 8.0 on, and on XPU.

    ``ESPALIER_TRITON=0`` turns them off; then torch's own operations do the same, in more kernels.
    """
    return device.type in ("cuda", "xpu") and _knows_triton(device)


@lru_cache(maxsize=64)
def _knows_triton(device: torch.device) -> bool:
    if os.environ.get("ESPALIER_TRITON") == "0" or importlib.util.find_spec("triton") is None:
        return False
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0)


def on_device_of(x: torch.Tensor) -> AbstractContextManager[object]:
    """While open, the device of a tensor is the one that this process uses."""
    return torch.accelerator.device_index(x.device.index) if is_accelerator(x.device) else nullcontext()


def has_flash_attention(device: torch.device) -> bool:
    """Whether torch's flash attention, for 16 bits and grouped queries, runs there: on CUDA from 8.0 on.

    ``torch.backends.cuda.enable_flash_sdp(False)`` turns it off, as it does for torch's own function.
    """
    backend: Any = torch.backends.cuda
    return _knows_flash(device) and bool(backend.flash_sdp_enabled())


@lru_cache(maxsize=64)
def attention_kernels() -> tuple[bool, bool, bool]:
    """Which of torch's kernels of attention may be taken: flash, memory-efficient, written out."""
    backend: Any = torch.backends.cuda
    return backend.flash_sdp_enabled(), backend.mem_efficient_sdp_enabled(), backend.math_sdp_enabled()


def _knows_flash(device: torch.device) -> bool:
    """Whether torch was built with it, for such a device."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    there: bool = torch.backends.cuda.is_flash_attention_available()
    return there and torch.cuda.get_device_capability(device) >= (8, 0)


def has_efficient_attention(kind: str) -> bool:
    """Whether torch's memory-efficient attention, which gives lse in multiples of 32, runs there: on CUDA."""
    return kind == "cuda"
