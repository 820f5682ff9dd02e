"""How long something takes, on all ranks at once."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from espalier.comm import all_reduce
from espalier.mesh import Mesh

_FEWEST, _MOST = 3, 200  # times that something is done


class Took(NamedTuple):
    """Seconds of one call: the lower quartile, and how far apart the middle half of all were, as a share."""

    seconds: float
    spread: float


def timed(runs: Sequence[Callable[[], object]], budget: float) -> Took:
    """What a call takes, done again and again for about so many seconds, at least a few times.

    Calls too short for a clock are taken together. The first, which fill caches and make the allocator keep
    what it has, are not counted. The clock is that of this thread: it stands while others have the core.

    Args:
        runs: the same work on other memory each, in turn; what they give is kept until its turn is over. In
            a program, too, what an operation reads and writes was last touched some operations ago.
    """
    clock, count = time.thread_time, len(runs)
    kept: list[object] = [run() for run in runs]
    began = clock()
    for i, run in enumerate(runs):
        kept[i] = run()
    once = max((clock() - began) / count, 1e-7)
    inner = count * max(1, int(1e-4 / (once * count)))
    times: list[float] = []
    end = time.perf_counter() + budget
    while len(times) < _FEWEST or (len(times) < _MOST and time.perf_counter() < end):
        began = clock()
        for i in range(inner):
            kept[i % count] = runs[i % count]()
        times.append((clock() - began) / inner)
    return _quiet(times)


def together(run: Callable[[], object], times: int, mesh: Mesh, seconds: float = math.inf) -> Took:
    """What a call in which all ranks take part takes: as many times on each, from a common start.

    No more are begun after ``seconds``, but at least a few.
    """
    run()
    took: list[float] = []
    while len(took) < times:
        enough = len(took) >= _FEWEST and sum(took) > seconds
        if all_reduce(torch.tensor(float(enough)), mesh, 0, "max"):  # and so all begin at once
            break
        began = time.perf_counter()
        run()
        took.append(time.perf_counter() - began)
    return _quiet(took)


def _quiet(times: Sequence[float]) -> Took:
    """The lower quartile: others on the machine make work slower, even by its own clock, and never faster."""
    low, middle, high = statistics.quantiles(times, n=4)
    return Took(low, (high - low) / middle)


def level(mesh: Mesh) -> None:
    """Wait for all ranks."""
    all_reduce(torch.zeros(1), mesh, 0)


def taken_by_others(seconds: float = 0.3) -> float:
    """The share of a core's time that others have while this process wants all of it."""
    began, used = time.perf_counter(), time.thread_time()
    while time.perf_counter() - began < seconds:
        pass
    return max(0.0, 1 - (time.thread_time() - used) / (time.perf_counter() - began))
