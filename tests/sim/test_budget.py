"""What lies off the device by the memory that it has: by default, and as steps come to need more or less."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch

import espalier
from tests.ranks.test_engine import batch, model
from tests.sim.transport import Shared

SHORT, LONG = 2, 64
ROWS = [SHORT] * 5 + [LONG] * 4  # of the batches
PLAN = {"offload": {"states": "auto"}, "chunk_megabytes": 0.01}


class Run(NamedTuple):
    """Of a training: its losses, and of each step the chunks that are away after it, and the peak."""

    losses: list[float]
    away: list[int]
    peaks: list[int]


def trained(free: int | None, sizes: Sequence[int] = ROWS, **plan: Any) -> Run:
    """On a device with so many bytes free, or what there is."""
    sim: Any = torch.get_device_module("sim")
    gc.collect()  # what an engine before it held
    net = model("gpt", layers=1).float()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    run = Run([], [], [])
    with pytest.MonkeyPatch.context() as patch:
        if free is not None:
            patch.setattr(sim, "mem_get_info", lambda device=None: (free - sim.memory_allocated(), free))
        engine = espalier.initialize(net, optimizer, {**PLAN, **plan})
        engine.lay_out()
        watch = engine.watch()
        for seed, rows in enumerate(sizes):
            watch.restart()
            run.losses.append(engine.train_step(batch(rows, seed)).item())
            run.peaks.append(watch.peak)
            data = engine._data
            assert data is not None
            run.away.append(sum("states" in chunk.places for chunk in data.chunks))
    return run


def by_memory(shared: Shared, rank: int, world: int) -> list[Run]:
    """With room for everything, and with less than a long batch needs, by a third of the states."""
    roomy = trained(None)
    return [roomy, trained(less_by_a_third(roomy))]


def less_by_a_third(roomy: Run) -> int:
    """So many bytes that a third of the states does not fit into the last step, a long one."""
    states = 2 * sum(p.nbytes for p in model("gpt", layers=1).float().parameters())
    return int((roomy.peaks[-1] - states / 3) / 0.9)


def test_what_fits_no_longer_goes_away(on_sim: Callable[..., list[Any]]) -> None:
    ((roomy, tight),) = on_sim(1, by_memory)
    assert roomy.away[4:] == [0] * 5  # by default there is as much as the device has
    assert tight.away[4] == 0 and tight.away[-1] > 0
    assert tight.peaks[-1] < roomy.peaks[-1]
    assert tight.losses == pytest.approx(roomy.losses, rel=1e-5)


def in_turn(shared: Shared, rank: int, world: int) -> list[Run]:
    """Batches that are long and short in turn, where the last rank alone has too little for long ones."""
    plan = {"data": world, "zero": 1}
    sizes = [*ROWS, *[SHORT] * 12, *([LONG] + [SHORT] * 12) * 2]
    roomy = trained(None, [SHORT] * 5 + [LONG], **plan)
    return [trained(less_by_a_third(roomy) if rank == world - 1 else None, sizes, **plan)]


@pytest.mark.long
def test_what_fits_again_comes_back(on_sim: Callable[..., list[Any]], figures: list[str]) -> None:
    """On all ranks at once; after eight steps, and after more each time that it was for nothing."""
    (one,), (other,) = on_sim(2, in_turn)
    assert one.away == other.away and one.losses == other.losses
    first, away = len(ROWS), other.away
    assert away[first - 1] > 0
    assert away[first : first + 7] == [away[first - 1]] * 7 and away[first + 8] == 0
    # the first of two more long batches sends them away; twelve short ones are then too few to be believed
    moves = sum(a != b for a, b in pairwise(away[first:]))
    figures.append(f"a budget, 3 turns from long to short batches: {moves} changes of place")
    assert moves == 2 and away[-1] > 0
