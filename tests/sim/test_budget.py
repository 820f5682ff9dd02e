"""What lies off the device by the memory that it has: by default, and when a step comes to need more."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

import espalier
from tests.ranks.test_engine import batch, model
from tests.sim.transport import Shared

ROWS = [2] * 5 + [64] * 4  # of the batches
PLAN = {"offload": {"states": "auto"}, "chunk_megabytes": 0.01}


class Run(NamedTuple):
    """Of a training: its losses, and of each step the chunks that are away after it, and the peak."""

    losses: list[float]
    away: list[int]
    peaks: list[int]


def trained(free: int | None) -> Run:
    """On a device with so many bytes free, and what there is."""
    sim: Any = torch.get_device_module("sim")
    gc.collect()  # what an engine before it held
    net = model("gpt").float()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    run = Run([], [], [])
    with pytest.MonkeyPatch.context() as patch:
        if free is not None:
            patch.setattr(sim, "mem_get_info", lambda device=None: (free - sim.memory_allocated(), free))
        engine = espalier.initialize(net, optimizer, PLAN)
        for seed, rows in enumerate(ROWS):
            sim.reset_peak_memory_stats()
            run.losses.append(engine.train_step(batch(rows, seed)).item())
            run.peaks.append(sim.max_memory_allocated())
            data = engine._data
            assert data is not None
            run.away.append(sum("states" in chunk.places for chunk in data.chunks))
    return run


def by_memory(shared: Shared, rank: int, world: int) -> list[Run]:
    """With room for everything, and with less than a long batch needs, by a third of the states."""
    roomy = trained(None)
    states = 2 * sum(p.nbytes for p in model("gpt").float().parameters())
    return [roomy, trained(int((roomy.peaks[-1] - states / 3) / 0.9))]


def test_what_fits_no_longer_goes_away(on_sim: Callable[..., list[Any]]) -> None:
    ((roomy, tight),) = on_sim(1, by_memory)
    assert roomy.away[4:] == [0] * 5  # by default there is as much as the device has
    assert tight.away[4] == 0 and tight.away[-1] > 0
    assert tight.peaks[-1] < roomy.peaks[-1]
    assert tight.losses == pytest.approx(roomy.losses, rel=1e-5)
