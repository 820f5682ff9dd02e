"""Compiled blocks that are recomputed, on the simulated device: what is kept of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import espalier
from tests.ranks.test_compile import Graphs
from tests.sim.plans import parts
from tests.sim.transport import Shared


def memory(shared: Shared, rank: int, world: int) -> dict[tuple[bool, str], tuple[int, int]]:
    """What a forward pass keeps, and the most bytes that a step took.

    By whether blocks are compiled and how they are recomputed.
    """
    found = {}
    device = torch.get_device_module("sim")
    for compiled in (False, True):
        for kind in ("none", "full", "selective"):
            net, optimizer, batches = parts({"changes": {"layers": 4}})
            graphs = Graphs()
            plan = {"recompute": kind}
            engine = espalier.initialize(net, optimizer, plan, compile=graphs if compiled else False)
            for batch in batches[:2]:
                engine.train_step(batch)
            before = device.memory_allocated()
            loss = engine(batches[2])
            kept = device.memory_allocated() - before
            del loss
            before = device.memory_allocated()
            shared.sim.c.sim_restart_peak()
            engine.train_step(batches[2])
            found[compiled, kind] = kept, device.max_memory_allocated() - before
            assert len(graphs.backward) == compiled
            del engine, net, optimizer
    return found


@pytest.mark.long
def test_recomputed_graphs_keep_no_more_than_blocks(on_sim: Callable[..., list[Any]]) -> None:
    (found,) = on_sim(1, memory)
    (none, peak), (full, lowest), (selective, lower) = (
        found[False, kind] for kind in ("none", "full", "selective")
    )
    assert lowest < 0.6 * peak and full < selective < 0.7 * none
    assert found[True, "full"][1] < 1.1 * lowest, found
    # of its last product a graph keeps nothing: nobody asks for it
    assert full < found[True, "selective"][0] < selective, found
    assert found[True, "selective"][1] < 1.1 * lower, found
