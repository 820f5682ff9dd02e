"""What ranks take to send: collectives by size, messages, and what goes on beside them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from espalier.comm import all_gather, all_reduce, all_to_all, ledger, reduce_scatter
from espalier.comm.collectives import all_reduce_, open_lanes, receive_from, send_to
from espalier.device import is_accelerator, synchronize
from espalier.mesh import Mesh
from espalier.parallel.data.disk import Disk, DiskError
from espalier.planner.calibrate.timing import level, together

_SIZES = (2**8, 2**12, 2**15, 2**18, 2**20, 2**22)  # elements of float32
_SIZES_THERE = (2**10, 2**14, 2**18, 2**21, 2**24, 2**26)  # of accelerators
_EACH, _FEWEST, _MOST = 2**24, 12, 96  # elements that are sent of each size, in at least so many times
_SIDE, _SIDE_THERE = 384, 4096  # of the matrices that are multiplied beside a collective
_TRIES = 5


def collectives(
    mesh: Mesh, say: Callable[[str], object], sizes: Sequence[int] | None = None
) -> dict[str, Any]:
    """By name, rows of bytes that a rank sends and microseconds; their spreads; and what goes on beside."""
    measured: dict[str, Any] = {"collectives": {}, "spreads": [], "beside": 1.0}
    if mesh.size() == 1:
        return measured
    device = mesh.device()
    if sizes is None:
        sizes = _SIZES_THERE if is_accelerator(device) else _SIZES
    say(f"collectives among {mesh.size()} ranks")
    for elements in sizes:
        for run in _kinds(mesh, elements):
            with ledger(mesh) as book:
                run()
            entry = book.entries[0]
            took = together(run, _times(elements), mesh, device=device)
            measured["collectives"].setdefault(entry.op, []).append((float(entry.bytes), took.seconds * 1e6))
            measured["spreads"].append(took.spread)
    say("messages from one rank to the next")
    open_lanes(mesh, 0, {(0, 1), (1, 0)})  # as pipelines do
    for elements in sizes:
        took = together(partial(_there_and_back, mesh, elements), _times(elements), mesh, device=device)
        measured["collectives"].setdefault("send", []).append(
            (4.0 * elements, _of_two(took.seconds, mesh) * 5e5)
        )
    say("what goes on beside a collective")
    measured["beside"] = beside(mesh, sizes[-1])
    return measured


def _times(elements: int) -> int:
    return min(_MOST, max(_FEWEST, _EACH // elements))


def _kinds(mesh: Mesh, elements: int) -> Iterator[Callable[[], object]]:
    n = mesh.size()
    whole = torch.ones(-(-elements // n) * n, device=mesh.device())
    part = torch.ones(-(-elements // n), device=mesh.device())
    rows = whole.view(n, -1)
    yield lambda: all_reduce_(whole, mesh, 0).wait()
    yield lambda: all_gather(part, mesh, 0, 0, len(whole))
    yield lambda: reduce_scatter(whole, mesh, 0, 0)
    yield lambda: all_to_all(rows, mesh, 0, 0, 1, n * rows.shape[1])


def _there_and_back(mesh: Mesh, elements: int) -> None:
    """A message from the first rank to the second, and one back; the others do nothing."""
    here, like = mesh.coordinate[0], [((elements,), torch.float32)]
    if here == 0:
        send_to([torch.ones(elements, device=mesh.device())], mesh, 0, 1, 0).wait()
        receive_from(like, mesh, 0, 1, 0).wait()
    elif here == 1:
        got = receive_from(like, mesh, 0, 0, 0).wait()
        send_to(got, mesh, 0, 0, 0).wait()


def _of_two(seconds: float, mesh: Mesh) -> float:
    """What a message took the two ranks that it is of; the others had no part in it."""
    if mesh.size() == 2:
        return seconds
    own = torch.tensor(seconds if mesh.coordinate[0] < 2 else 0.0, dtype=torch.float64)
    return float(all_reduce(own, mesh, 0)) / 2


def beside(mesh: Mesh, elements: int) -> float:
    """The share of the time of a sum of so many elements that a program which computes does not lose."""
    device = mesh.device()
    side = _SIDE_THERE if is_accelerator(device) else _SIDE
    x, a = torch.ones(elements, device=device), torch.randn(side, side, device=device)
    clock = time.perf_counter

    def seconds(send: bool, products: int) -> float:
        level(mesh)
        began = clock()
        work = all_reduce_(x, mesh, 0, beside=True) if send else None
        for _ in range(products):
            a @ a
        if work is not None:
            work.wait()
        synchronize(device)
        return clock() - began

    seconds(True, 1)
    sent = min(seconds(True, 0) for _ in range(_TRIES))
    products = max(1, round(1.5 * sent / max(min(seconds(False, 8) for _ in range(_TRIES)) / 8, 1e-6)))
    # all ranks do as many
    products = round(float(all_gather(torch.tensor([float(products)]), mesh, 0, 0, mesh.size()).mean()))
    computed = min(seconds(False, products) for _ in range(_TRIES))
    both = min(seconds(True, products) for _ in range(_TRIES))
    return min(1.0, max(0.0, (sent + computed - both) / min(sent, computed)))


# ---- what ranks write to a disk and read of it, all at once, as offload does

BYTES = 2**26  # of each rank, at a time
_TIMES, _SECONDS = 5, 3.0  # at most, each way
_KEY = "calibrate"


def speeds(mesh: Mesh, folder: Path, nbytes: int = BYTES) -> dict[str, Any]:
    """Of all ranks together, 10^9 bytes a second; the space that is free; empty where nothing can be written.

    The files are removed at the end.
    """
    try:
        disk = Disk(folder)
    except DiskError:
        disk = None
    if not all_reduce(torch.tensor(float(disk is not None)), mesh, 0, "min"):
        if disk is not None:
            disk.close()
        return {}
    assert disk is not None
    try:
        free = disk.free()
        room = all_reduce(torch.tensor(float(free > 4 * mesh.size() * nbytes)), mesh, 0, "min")
        if not room:
            return {}
        written = [torch.rand(nbytes // 4)]
        wrote = together(lambda: disk.write(_KEY, written).result(), _TIMES, mesh, _SECONDS)
        buffers = disk.empty(_KEY)
        read = together(partial(_read, disk, buffers), _TIMES, mesh, _SECONDS)
    finally:
        disk.close()
    every = mesh.size() * nbytes / 1e9
    return {
        "directory": str(folder),
        "capacity_gb": free / 1e9,
        "write_gbs": every / wrote.seconds,
        "read_gbs": every / read.seconds,
        "spread": max(wrote.spread, read.spread),
    }


def _read(disk: Disk, buffers: list[torch.Tensor]) -> None:
    disk.read(_KEY, buffers).result()
