"""What goes between the device and the host where the host updates: nothing that is there already."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import espalier
from espalier.parallel.data.offloaded_step import OffloadedStep
from espalier.parallel.data.residency import OffloadStore
from espalier.torch_private import current_graph_task_id
from tests.sim.plans import STEPS, parts, trained
from tests.sim.transport import Shared

SINGLE = {"dtype": torch.float32}
SMALL = {**SINGLE, "changes": {"layers": 1}}


def brought(shared: Shared, rank: int, world: int, plan: dict[str, Any]) -> tuple[list[int], int]:
    """The bytes that go to the host in each update; and those of the parameters that are updated here."""
    bytes_down: list[int] = []
    held: list[int] = []
    copy, each = OffloadStore.copy, OffloadedStep.each

    def watched_copy(store: OffloadStore, into: Any, outof: Any, ready: Any = None) -> Any:
        down = [a for a, b in zip(into, outof, strict=True) if a.is_cpu and not b.is_cpu]
        bytes_down[-1:] = [sum(bytes_down[-1:]) + sum(t.nbytes for t in down)]
        return copy(store, into, outof, ready)

    def watched_each(step: OffloadedStep, *given: Any, **more: Any) -> None:
        bytes_down.append(0)
        held[:] = [sum(math.prod(m.updated.local_shape) * 4 for a in step.away for m in a.chunk.members)]
        each(step, *given, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OffloadStore, "copy", watched_copy)
        patch.setattr(OffloadedStep, "each", watched_each)
        trained(
            shared, rank, world, {"offload": {"states": "host"}, "chunk_megabytes": 0.01, **plan}, SINGLE, ""
        )
    return bytes_down, held[0]


@pytest.mark.parametrize(
    ("world", "plan"), [(1, {}), (2, {"data": 2, "zero": 1}), (2, {"data": 2, "zero": 3})], ids=str
)
def test_parameters_come_to_the_host_once(
    on_sim: Callable[..., list[Any]], figures: list[str], world: int, plan: dict[str, Any]
) -> None:
    """It has them from its last update; gradients come each time."""
    for bytes_down, held in on_sim(world, brought, plan):
        ratios = [n / held for n in bytes_down]
        assert len(ratios) == STEPS
        assert ratios == pytest.approx([2, *[1] * (STEPS - 1)], rel=0.05)
    named = f"zero {plan.get('zero', 0)}, states on the host"
    figures.append(
        f"{named:28} {world} rank(s): {ratios[0]:.2g}, then {ratios[-1]:.2g} bytes to the host a byte"
    )


def _filled(p: torch.Tensor) -> None:
    with torch.no_grad():
        p.fill_(0.25)


def _data_filled(p: torch.Tensor) -> None:
    p.data.fill_(0.25)


def _other_data(p: torch.Tensor) -> None:
    p.data = torch.full_like(p.data, 0.25)


WRITES: dict[str, Callable[[torch.Tensor], None]] = {
    "fill_": _filled,
    "data.fill_": _data_filled,
    "data =": _other_data,
}


def written(shared: Shared, rank: int, world: int, plan: dict[str, Any]) -> list[float]:
    """By each way of writing to parameters between steps: how far weights are from plain torch's."""
    far = []
    for name, away in itertools.product((*WRITES, "load_state_dict"), (True, False)):
        net, optimizer, batches = parts(SMALL)
        initial = {key: x.clone() for key, x in net.state_dict().items()}
        step: Callable[[Any], Any]
        if away:
            offload = {"offload": {"states": "host"}, "chunk_megabytes": 0.01}
            engine = espalier.initialize(net, optimizer, {**plan, **offload})
            step = engine.train_step
        else:

            def step(batch: Any, net: Any = net, optimizer: Any = optimizer) -> None:
                net(**batch).loss.backward()
                optimizer.step()
                optimizer.zero_grad()

        for i in range(4):
            step(batches[i % len(batches)])
            if i == 1 and name in WRITES:
                for p in list(net.parameters())[::3]:
                    WRITES[name](p)
            elif i == 1:
                net.load_state_dict(initial)
        weights = [espalier.full_tensor(p).detach().cpu() for p in net.parameters()]
        if away:
            ours = weights
        else:
            far.append(max(float((a - b).abs().max()) for a, b in zip(ours, weights, strict=True)))
    return far


@pytest.mark.parametrize(
    ("world", "plan"), [(1, {}), (2, {"data": 2, "zero": 1}), (2, {"data": 2, "zero": 3})], ids=str
)
def test_what_others_write_counts(on_sim: Callable[..., list[Any]], world: int, plan: dict[str, Any]) -> None:
    """The host's copy is out of date then."""
    for far in on_sim(world, written, plan):
        assert max(far) < 1e-3, far


def leaving(shared: Shared, rank: int, world: int) -> tuple[int, int]:
    """How often gradients go away, and how often while a backward pass goes on."""
    during, total = 0, 0
    put = OffloadStore.put

    def watched(store: OffloadStore, key: str, *given: Any, **more: Any) -> None:
        nonlocal during, total
        if key.startswith("gradients"):
            total += 1
            during += current_graph_task_id() != -1
        put(store, key, *given, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OffloadStore, "put", watched)
        offload = {"states": "host", "gradients": "host"}
        plan = {"data": world, "zero": 2, "offload": offload, "chunk_megabytes": 0.01}
        trained(shared, rank, world, plan, SINGLE, "")
    return during, total


@pytest.mark.parametrize("world", [1, 2])
def test_gradients_leave_while_a_backward_pass_goes_on(
    on_sim: Callable[..., list[Any]], figures: list[str], world: int
) -> None:
    """All but those of the last chunks, whose sums are under way as it ends."""
    for during, total in on_sim(world, leaving):
        assert total >= 3 * STEPS and during >= total - 2 * STEPS
    figures.append(
        f"gradients on the host        {world} rank(s): {during} of {total} leave in the backward pass"
    )
