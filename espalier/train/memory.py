"""How much memory this process has used."""

import resource
import sys
from pathlib import Path

import torch


def peak_memory(device: torch.device) -> int:
    """Bytes: peak of the CUDA device's allocations, or this process's peak resident memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # Linux's ru_maxrss is inherited through exec, so that a child would show its parent's peak.
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def readable_bytes(count: float) -> str:
    """A byte count in the unit that leaves one to four digits before the point."""
    for unit in ("B", "KB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
