"""ZeRO-1 and 2 on the simulated device: updated parameters arrive under the next forward pass."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import espalier
from espalier.blocks import blocks
from espalier.parallel.data import exchange
from espalier.parallel.data.zero import ZeroState
from tests.sim.plans import STEPS, parts, trained
from tests.sim.transport import Shared

CASE = {"changes": {"layers": 4}}


def arrivals(shared: Shared, rank: int, world: int, plan: dict[str, Any], waits: bool) -> tuple[Any, Any]:
    """The chunks that have not been waited for as a forward pass begins, and as each block does.

    And the faults that were told.
    """
    seen: list[list[int]] = []
    begin, call = ZeroState.begin_forward, nn.Module.__call__
    data: list[ZeroState] = []
    there: set[int] = set()

    def watched_begin(self: ZeroState) -> None:
        begin(self)
        data[:] = [self]
        seen.append([len(self.exchange.arriving)])

    def watched_call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if id(self) in there:
            seen[-1].append(len(data[0].exchange.arriving))
        return call(self, *args, **kwargs)

    def initialize(net: nn.Module, *args: Any, **kwargs: Any) -> Any:
        there.update(map(id, blocks(net).values()))
        return made(net, *args, **kwargs)

    made = espalier.initialize
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ZeroState, "begin_forward", watched_begin)
        patch.setattr(nn.Module, "__call__", watched_call)
        patch.setattr(espalier, "initialize", initialize)
        if not waits:
            patch.setattr(exchange, "wait_for", lambda event, device: None)
        run = trained(shared, rank, world, {"data": world, "chunk_megabytes": 0.05, **plan}, CASE, "")
    return seen[1:], {kind for kind, _, _ in run.told}


@pytest.mark.world(2)
@pytest.mark.parametrize(
    "plan",
    [{"zero": 1}, {"zero": 2, "precision": "bfloat16", "chunk_megabytes": 0.0125}],
    ids=["1", "2, masters"],
)
def test_parameters_arrive_under_the_next_forward_pass(
    on_sim: Callable[..., list[Any]], figures: list[str], plan: dict[str, Any]
) -> None:
    """All are under way when it begins, and each block waits for its own alone."""
    found = on_sim(2, arrivals, plan, True)
    for seen, told in found:
        assert not told
        assert len(seen) == STEPS - 1
        for counts in seen:
            assert counts[0] > 4 and counts == sorted(counts, reverse=True)
            assert 0 < counts[-1] < counts[1] <= counts[0]
    named = f"zero {plan['zero']}, gathers under way"
    figures.append(f"{named:28} 2 ranks: {found[0][0][-1]} as a forward pass begins, and each block")


@pytest.mark.world(2)
def test_a_wait_that_is_left_out_is_seen(on_sim: Callable[..., list[Any]]) -> None:
    """The test above can fail."""
    assert all("race" in told for _, told in on_sim(2, arrivals, {"zero": 1}, False))


def _changed(p: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        p.mul_(2)
    return p.full_tensor() / 2  # type: ignore[attr-defined]


READS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "an operation": lambda p: p * 1,
    "a call on lists": lambda p: torch._foreach_add([p], 0.0)[0],
    "data": lambda p: p.data,
    "detach": lambda p: p.detach(),
    "full_tensor": lambda p: p.full_tensor(),  # type: ignore[attr-defined]
    "to_local": lambda p: p.to_local(),  # type: ignore[attr-defined]
    "_local_tensor": lambda p: p._local_tensor,  # type: ignore[attr-defined]
    "redistribute": lambda p: p.redistribute(placements=p.placements, forward_dtype=torch.float32),  # type: ignore[attr-defined]
    "deepcopy": copy.deepcopy,
    "pickle": lambda p: p.__reduce_ex__(4)[1][0],
    "a write": _changed,
}


def read(shared: Shared, rank: int, world: int) -> dict[str, Any]:
    """What is read of a parameter behind a step, on rank 0 alone, by each way; and what is told meanwhile."""
    net, optimizer, batches = parts(CASE)
    engine = espalier.initialize(net, optimizer, {"data": world, "zero": 1, "chunk_megabytes": 0.05})
    p = list(net.parameters())[-1]
    found: dict[str, Any] = {}
    for name, way in READS.items():
        engine.train_step(batches[0])
        assert engine._data is not None
        waiting = len(engine._data.exchange.arriving)
        values = torch.empty(0)
        with shared.sim.watched() as told:
            if rank == 0:
                with torch.no_grad():
                    x = way(p)
                    x = x.to_local() if isinstance(x, espalier.DTensor) else x
                values = x.cpu().double()
        still = len(engine._data.exchange.arriving)
        kinds = {telling.kind for telling in told} - {"sync"}
        if name == "a write" and rank == 1:  # what all ranks do
            _changed(p)
        whole = engine.full_state_dict()
        key = next(key for key, q in net.named_parameters() if q is p)
        scale = 2 if name == "a write" else 1
        found[name] = kinds, waiting, still, values, whole[key].cpu().double() / scale
    return found


@pytest.mark.world(2)
def test_whoever_reads_a_parameter_waits_for_it(on_sim: Callable[..., list[Any]]) -> None:
    """By whatever way, on one rank alone: its chunk, and no other."""
    first, second = on_sim(2, read)
    for name, (kinds, waiting, still, values, whole) in first.items():
        assert not kinds, name
        assert waiting - still == 1, name
        assert torch.allclose(values, whole, rtol=1e-6, atol=0 if name != "redistribute" else 1e-6), name
        assert second[name][1] == second[name][2] == waiting, name
