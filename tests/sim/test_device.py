"""The simulated device itself: what goes wrong on it is seen, what is right is not told."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import espalier
from tests.sim.order import Asked, Deadlock, Entry, Waited, check
from tests.sim.transport import Shared

pytestmark = pytest.mark.world(1)


def device() -> torch.device:
    return torch.device("sim", torch.accelerator.current_device_index())


def on_a_side_stream(before: bool, after: bool) -> None:
    """Change a tensor there, and use it here, with waits or without."""
    x, here, side = torch.ones(8, device=device()), torch.accelerator.current_stream(), torch.Stream(device())
    if before:
        side.wait_stream(here)
    with side:
        x.add_(1)
    x.record_stream(side)
    if after:
        here.wait_stream(side)
    x * 2


def freed_early(recorded: bool) -> None:
    """Give a tensor's memory back while a side stream reads it."""
    x, here, side = torch.ones(8, device=device()), torch.accelerator.current_stream(), torch.Stream(device())
    side.wait_stream(here)
    with side:
        y = x + 1
    if recorded:
        x.record_stream(side)
    del x
    here.wait_stream(side)
    y.record_stream(here)


def read_from_pinned(waits: bool) -> None:
    """Copy to pinned memory beside the program, and read there."""
    there = torch.empty(8, pin_memory=True)
    there.copy_(torch.ones(8, device=device()), non_blocking=True)
    if waits:
        torch.accelerator.current_stream().synchronize()
    assert there[0] == 1
    some_python()


def written_to_pinned() -> None:
    """Change pinned memory that is being copied from."""
    there = torch.ones(8, pin_memory=True)
    x = there.to(device(), non_blocking=True)
    assert there[0] == 1  # may be read meanwhile
    there.zero_()
    some_python()
    del x


def touched() -> None:
    x = torch.ones(8, device=device())
    ctypes.memset(x.data_ptr(), 0, 4)
    some_python()


def some_python() -> None:
    """Accesses of the host are told between two instructions of the interpreter."""
    for i in range(20):
        str(i)


def trains() -> None:
    """A module, autograd, autocast and an optimizer, without a fault and without a sync."""
    with device():
        net = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(net.parameters())
    x = torch.ones(3, 4, device=device())
    with torch.autocast("sim", torch.bfloat16):
        y = net(x)
    assert y.dtype == torch.bfloat16
    y.float().square().mean().backward()
    optimizer.step()


TRIALS: dict[str, tuple[Callable[[], Any], set[str]]] = {
    "all waits": (lambda: on_a_side_stream(True, True), set()),
    "no wait before": (lambda: on_a_side_stream(False, True), {"race"}),
    "no wait after": (lambda: on_a_side_stream(True, False), {"race"}),
    "freed early": (lambda: freed_early(False), {"freed"}),
    "freed early, recorded": (lambda: freed_early(True), set()),
    "pinned": (lambda: read_from_pinned(True), {"sync"}),
    "pinned, no wait": (lambda: read_from_pinned(False), {"host"}),
    "pinned, written": (written_to_pinned, {"host"}),
    "host access": (touched, {"host"}),
    "item": (lambda: torch.ones(8, device=device()).sum().item(), {"sync"}),
    "a copy to the host": (lambda: torch.ones(8, device=device()).cpu(), {"sync"}),
    "a copy from pageable memory": (lambda: torch.ones(8).to(device(), non_blocking=True), {"sync"}),
    "values that make a shape": (lambda: torch.ones(8, device=device()).nonzero(), {"sync"}),
    "a mask": (lambda: torch.ones(8, device=device())[torch.ones(8, device=device()) > 0], {"sync"}),
    "repeats": (lambda: torch.arange(3, device=device()).repeat_interleave(2), set()),
    "mixed": (lambda: torch.where(torch.ones(8, device=device()) > 0, torch.ones(8), 0.0), {"mixed"}),
    "a number of the host": (lambda: torch.ones(8, device=device()) + torch.tensor(1.0), set()),
    "training": (trains, set()),
}


def kinds(shared: Shared, rank: int, world: int, name: str) -> dict[str, str]:
    """What a trial makes the device tell."""
    torch.ones(1, device=device())
    with shared.sim.watched() as told:
        TRIALS[name][0]()
    return {telling.kind: telling.where for telling in told}


@pytest.mark.parametrize("name", TRIALS)
def test_what_goes_wrong_is_seen(on_sim: Callable[..., list[Any]], name: str) -> None:
    (told,) = on_sim(1, kinds, name)
    assert set(told) == TRIALS[name][1], told


def values(shared: Shared, rank: int, world: int) -> dict[str, Any]:
    """The same numbers as on the CPU, views, memory, and who holds a module's tied weights."""
    torch.manual_seed(3)
    x = torch.randn(6, 4)
    on = x.to(device())
    assert on.t()[1:3].contiguous().cpu().equal(x.t()[1:3])
    assert torch.allclose((on @ on.t()).softmax(-1).cpu(), (x @ x.t()).softmax(-1))
    tied = nn.ModuleList([nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)])
    tied[1].weight = tied[0].weight
    tied.to(device())
    assert tied[0].weight is tied[1].weight and tied[0].weight.device == device()
    before = torch.sim.memory_allocated()  # type: ignore[attr-defined]
    big = torch.empty(1 << 20, dtype=torch.uint8, device=device())
    allocated = torch.sim.memory_allocated() - before  # type: ignore[attr-defined]
    del big
    return {"allocated": allocated, "left": torch.sim.memory_allocated() - before}  # type: ignore[attr-defined]


def test_values_are_those_of_the_cpu(on_sim: Callable[..., list[Any]]) -> None:
    assert on_sim(1, values) == [{"allocated": 1 << 20, "left": 0}]


def summed(shared: Shared, rank: int, world: int, waits: bool) -> tuple[set[str], list[Entry]]:
    x = torch.full((4,), float(rank + 1), device=device())
    with shared.sim.watched() as told:
        work = dist.all_reduce(x, async_op=True)
        if waits:
            work.wait()
        else:
            with shared.without_waits():
                work.wait()
        y = x * 2
    assert y.cpu().tolist() == [6.0] * 4
    return {telling.kind for telling in told}, shared.log


@pytest.mark.world(2)
def test_a_collective_is_waited_for(on_sim: Callable[..., list[Any]]) -> None:
    for told, _ in on_sim(2, summed, False):
        assert told == {"race"}
    results = on_sim(2, summed, True)
    assert all(told == set() for told, _ in results)
    assert check([log for _, log in results]) == 2  # ends


# ---- NCCL's order


def asked(number: int, rank: int, kind: str, peer: int, batch: int | None = None) -> Asked:
    return Asked(number, "pipe", 2, rank, kind, peer, 64, batch)


def swap(rank: int, batch: int | None = None) -> list[Entry]:
    """Send to the other, receive from it, wait for both."""
    ends = [asked(0, rank, "send", 1 - rank, batch), asked(1, rank, "recv", 1 - rank, batch)]
    return [*ends, Waited(0), Waited(1)]


def test_a_swap_needs_a_batch() -> None:
    with pytest.raises(Deadlock, match="rank 0 stands at"):
        check([swap(0), swap(1)])
    assert check([swap(0, 5), swap(1, 8)]) == 2
    one, other = swap(1)[:2]
    assert check([swap(0), [other, one, Waited(1), Waited(0)]]) == 2


def test_other_calls_are_told() -> None:
    sums = [
        Asked(0, "data", 2, rank, kind, None, 8, None) for rank, kind in enumerate(["all_reduce", "reduce"])
    ]
    with pytest.raises(Deadlock, match="different calls"):
        check([[call] for call in sums])
    with pytest.raises(Deadlock):
        check([[sums[0]], []])


class Counted(nn.Module):
    """As a metric of torchmetrics: what it adds up is no buffer, and goes where the module goes."""

    def __init__(self) -> None:
        super().__init__()
        self.total = torch.zeros(())

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Counted:
        self.total = fn(self.total)
        return super()._apply(fn, recurse)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.seen = nn.Linear(4, 4), Counted()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


def laid_out_with_states(shared: Shared, rank: int, world: int, later: bool) -> str:
    with espalier.deferred() if later else nullcontext():
        counting = Counting()
        model = nn.Sequential(counting)
    prepared = espalier.prepare(model, plan={})
    prepared(torch.ones(2, 4, device=device()))
    return counting.seen.total.device.type


@pytest.mark.parametrize("later", [False, True])
def test_states_that_modules_move_themselves_come_to_the_device(
    on_sim: Callable[..., list[Any]], later: bool
) -> None:
    assert on_sim(1, laid_out_with_states, later) == ["sim"]


def rates_of_fused_kernels(shared: Shared, rank: int, world: int) -> list[tuple[torch.dtype, bool]]:
    """Whether torch's fused kernel is asked for, by the dtype of a rate that lies on the device."""
    asked: list[bool] = []
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("espalier.parallel.fused.fused_devices", lambda: ["sim"])
        patch.setattr(torch, "_fused_adamw_", lambda *_, **__: asked.append(True))
        for dtype in (torch.float32, torch.float64):
            asked.clear()
            model = nn.Linear(4, 4).to(device())
            rate = torch.tensor(0.1, dtype=dtype, device=device())
            optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
            prepared, optimizer = espalier.prepare(model, optimizer, plan={})
            prepared(torch.ones(2, 4, device=device())).sum().backward()
            optimizer.step()
            found.append((dtype, bool(asked)))
    return found


def test_a_rate_that_kernels_of_devices_do_not_read_is_not_given_to_them(
    on_sim: Callable[..., list[Any]],
) -> None:
    assert on_sim(1, rates_of_fused_kernels) == [[(torch.float32, True), (torch.float64, False)]]
