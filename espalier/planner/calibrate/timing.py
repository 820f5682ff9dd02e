"""How long something takes, on all ranks at once.

On an accelerator by marks in its stream, which lie behind work that keeps it busy while the host asks for
what is timed: what a short kernel takes is not what the host takes to start it.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from espalier.comm import all_reduce
from espalier.device import is_accelerator, keep_busy, synchronize, timed_event
from espalier.mesh import Mesh

_FEWEST, _MOST = 3, 200  # times that something is done
_QUEUE = 256  # calls that a device is asked for ahead: drivers hold a thousand kernels
_BACK_TO_BACK = 8  # messages that are timed as one, on a device
_CPU = torch.device("cpu")
_PIECE = 20_000  # rounds of an empty loop, under a millisecond


class Took(NamedTuple):
    """Seconds of one call: the lower quartile, and how far apart the middle half of all were, as a share."""

    seconds: float
    spread: float


def timed(runs: Sequence[Callable[[], object]], budget: float, device: torch.device = _CPU) -> Took:
    """What a call takes, done again and again for about so many seconds, at least a few times.

    Calls too short for a clock are taken together. The first, which fill caches and make the allocator keep
    what it has, are not counted. The clock is that of this thread: it stands while others have the core.

    Args:
        runs: the same work on other memory each, in turn; what they give is kept until its turn is over. In
            a program, too, what an operation reads and writes was last touched some operations ago.
        device: that does it.
    """
    if is_accelerator(device):
        return _timed_there(runs, budget, device)
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
    return quiet(times)


def _timed_there(runs: Sequence[Callable[[], object]], budget: float, device: torch.device) -> Took:
    """:func:`timed` on an accelerator: its own time."""
    clock, count = time.perf_counter, len(runs)
    kept: list[object] = [run() for run in runs]
    synchronize(device)
    began = clock()
    for i, run in enumerate(runs):
        kept[i] = run()
    asked = (clock() - began) / count
    synchronize(device)
    once = max((clock() - began) / count, 1e-7)
    inner = count * max(1, min(_QUEUE, int(1e-3 / once)) // count)
    times: list[float] = []
    end = clock() + budget
    while len(times) < _FEWEST or (len(times) < _MOST and clock() < end):
        keep_busy(device, 2 * asked * inner)
        first = timed_event(device)
        for i in range(inner):
            kept[i % count] = runs[i % count]()
        last = timed_event(device)
        last.synchronize()
        times.append(max(first.elapsed_time(last) * 1e-3, 1e-9) / inner)
    return quiet(times)


def together(
    run: Callable[[], object],
    times: int,
    mesh: Mesh,
    seconds: float = math.inf,
    device: torch.device = _CPU,
) -> Took:
    """What a call in which all ranks take part takes: as many times on each, from a common start.

    No more are begun after ``seconds``, but at least a few.

    Args:
        device: whose stream carries it: there some are timed as one, as a program sends them.
    """
    there = is_accelerator(device)
    run()
    synchronize(device)
    took: list[float] = []
    while len(took) < times:
        enough = len(took) >= _FEWEST and sum(took) > seconds
        if all_reduce(torch.tensor(float(enough)), mesh, 0, "max"):  # and so all begin at once
            break
        if there:
            first = timed_event(device)
            for _ in range(_BACK_TO_BACK):
                run()
            last = timed_event(device)
            last.synchronize()
            took.append(max(first.elapsed_time(last) * 1e-3, 1e-9) / _BACK_TO_BACK)
            continue
        began = time.perf_counter()
        run()
        took.append(time.perf_counter() - began)
    return quiet(took)


def quiet(times: Sequence[float]) -> Took:
    """The lower quartile: others on the machine make work slower, even by its own clock, and never faster."""
    low, middle, high = statistics.quantiles(times, n=4)
    return Took(low, (high - low) / middle)


def level(mesh: Mesh) -> None:
    """Wait for all ranks."""
    all_reduce(torch.zeros(1), mesh, 0)


class Taken(NamedTuple):
    """What others have of a core while this process wants all of it.

    Attributes:
        share: of its time.
        pieces: seconds of pieces of work, all the same, by this thread's clock: they differ where a virtual
            machine's core is a part of a real one, which no other clock shows.
    """

    share: float
    pieces: list[float]


def taken_by_others(seconds: float = 0.3) -> Taken:
    """What others have of a core, for so long."""
    pieces = []
    began, used = time.perf_counter(), time.thread_time()
    while time.perf_counter() - began < seconds:
        start = time.thread_time()
        for _ in range(_PIECE):
            pass
        pieces.append(time.thread_time() - start)
    share = 1 - (time.thread_time() - used) / (time.perf_counter() - began)
    return Taken(max(0.0, share), pieces)


def slowed(pieces: Sequence[float]) -> float:
    """By how much more than at its best a core takes in the middle, as a share."""
    return statistics.median(pieces) / min(pieces) - 1
