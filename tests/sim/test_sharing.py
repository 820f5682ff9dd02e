"""Who updates states in the host's memory: the host, the device, or both by their measured speeds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

import espalier
from espalier.parallel.data import offloaded_step
from tests.ranks.test_engine import batch, model
from tests.sim.transport import Shared

STEPS = 8


class Run(NamedTuple):
    """Of a training: its losses, of each step the elements that each updated, and what is told at the end."""

    losses: list[float]
    elements: list[dict[str, int]]
    told: str


class Clock:
    """Goes by what is updated: seconds for an element, by whom."""

    def __init__(self, host: float, device: float) -> None:
        self.now, self._seconds = 0.0, {"host": host, "device": device}
        self.elements: dict[str, int] = {}

    def work(self, params: list[torch.Tensor]) -> None:
        who = "host" if params[0].is_cpu else "device"
        n = sum(p.numel() for p in params)
        self.now += n * self._seconds[who]
        self.elements[who] = self.elements.get(who, 0) + n


def trained(update: str, clock: Clock, world: int) -> Run:
    net = model("gpt", layers=1).double()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    offload = {"states": "host", "update": update}
    plan = {"data": world, "zero": 1 if world > 1 else 0, "offload": offload, "chunk_megabytes": 0.002}
    engine = espalier.initialize(net, optimizer, plan)
    run, kernel = Run([], [], ""), torch._fused_adamw_

    def watched_kernel(params: list[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        clock.work(params)
        return kernel(params, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "_fused_adamw_", watched_kernel)
        patch.setattr(offloaded_step.time, "perf_counter", lambda: clock.now)
        for step in range(STEPS):
            clock.elements = {"host": 0, "device": 0}
            run.losses.append(engine.train_step(batch(4, step)).item())
            run.elements.append(clock.elements)
        patch.undo()
    return run._replace(told=str(engine.memory()))


def by_each(shared: Shared, rank: int, world: int) -> dict[str, Run]:
    """The last rank's host is slow: a third of the device's speed, where others are as fast as it."""
    host = 3e-9 if rank == world - 1 else 1e-9
    return {update: trained(update, Clock(host, 1e-9), world) for update in ("host", "device", "auto")}


@pytest.mark.parametrize("world", [1, 2])
def test_the_host_and_the_device_share_an_update(
    on_sim: Callable[..., list[Any]], figures: list[str], world: int
) -> None:
    """As their speeds say, on all ranks alike; and values are the same."""
    runs = on_sim(world, by_each)
    for run in runs:
        for other in ("device", "auto"):  # kernels of two kinds round the ends of tensors in their own way
            assert run[other].losses == pytest.approx(run["host"].losses, rel=1e-13)
        assert not any(n["device"] for n in run["host"].elements)
        assert not any(n["host"] for n in run["device"].elements)
        shares = [n["device"] / (n["host"] + n["device"]) for n in run["auto"].elements]
        assert shares[:4] == [0, 0, 1, 1] and len(set(shares[4:])) == 1
        assert shares[4] == pytest.approx(0.75, abs=0.12)  # in whole chunks
        assert "updates" not in run["host"].told
        assert "75% by the device (the host " in run["auto"].told
    figures.append(
        f"updates on {world} rank(s), the device 3 times as fast: {shares[4]:.0%} are the device's"
    )
