"""How long something takes, on all ranks at once."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from espalier.comm import all_reduce
from espalier.mesh import Mesh

_FEWEST, _MOST = 3, 200  # times that something is done


class Took(NamedTuple):
    """Seconds of one call: the middle one, and how far apart the middle half of all were, as a share."""

    seconds: float
    spread: float


def timed(run: Callable[[], object], budget: float) -> Took:
    """What a call takes, done again and again for about so many seconds, at least a few times.

    Calls too short for a clock are taken together. The first, which fills caches and makes the allocator
    keep what it has, is not counted. The clock is that of this thread: it stands while others have the core.
    """
    run()
    clock = time.thread_time
    began = clock()
    run()
    once = max(clock() - began, 1e-7)
    inner = max(1, int(1e-4 / once))
    times: list[float] = []
    end = time.perf_counter() + budget
    while len(times) < _FEWEST or (len(times) < _MOST and time.perf_counter() < end):
        began = clock()
        for _ in range(inner):
            run()
        times.append((clock() - began) / inner)
    middle = statistics.median(times)
    low, _, high = statistics.quantiles(times, n=4)
    return Took(middle, (high - low) / middle)


def together(run: Callable[[], object], times: int, mesh: Mesh) -> Took:
    """What a call in which all ranks take part takes: as many times on each, from a common start."""
    run()
    took: list[float] = []
    for _ in range(times):
        level(mesh)
        began = time.perf_counter()
        run()
        took.append(time.perf_counter() - began)
    middle = statistics.median(took)
    low, _, high = statistics.quantiles(took, n=4)
    return Took(middle, (high - low) / middle)


def level(mesh: Mesh) -> None:
    """Wait for all ranks."""
    all_reduce(torch.zeros(1), mesh, 0)


def taken_by_others(seconds: float = 0.3) -> float:
    """The share of a core's time that others have while this process wants all of it."""
    began, used = time.perf_counter(), time.thread_time()
    while time.perf_counter() - began < seconds:
        pass
    return max(0.0, 1 - (time.thread_time() - used) / (time.perf_counter() - began))
