"""Compiled blocks that are recomputed, on the simulated device: what is kept of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import espalier
from tests.ranks.test_compile import Graphs
from tests.sim.plans import parts
from tests.sim.transport import Shared


def peaks(shared: Shared, rank: int, world: int) -> dict[tuple[bool, str], int]:
    """The most bytes that a step took, by whether blocks are compiled and how they are recomputed."""
    found = {}
    for compiled in (False, True):
        for kind in ("none", "full"):
            net, optimizer, batches = parts({"changes": {"layers": 6}})
            graphs = Graphs()
            plan = {"recompute": kind}
            engine = espalier.initialize(net, optimizer, plan, compile=graphs if compiled else False)
            for batch in batches[:2]:
                engine.train_step(batch)
            before = torch.get_device_module("sim").memory_allocated()
            shared.sim.c.sim_restart_peak()
            engine.train_step(batches[2])
            found[compiled, kind] = torch.get_device_module("sim").max_memory_allocated() - before
            assert len(graphs.backward) == 6 * compiled
            del engine, net, optimizer
    return found


def test_recomputed_graphs_keep_no_more_than_blocks(on_sim: Callable[..., list[Any]]) -> None:
    (found,) = on_sim(1, peaks)
    assert found[False, "full"] < 0.6 * found[False, "none"]
    assert found[True, "full"] < 1.1 * found[False, "full"], found
