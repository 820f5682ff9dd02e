"""Collectives of torch.distributed that a program calls on DTensors: they are of the whole value."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_functions
import torch.nn.functional as F
from torch import nn

import espalier
from espalier import DTensor, Mesh, Partial, Placement, Replicate, Shard
from espalier.tensor.fallback import on_wholes
from espalier.tensor.rules.across_ranks import meets_ranks

# its name before torch 2.13
scattered = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
VALUE = torch.arange(10.0, dtype=torch.float64).reshape(5, 2)


def laid(mesh: Mesh, placement: Placement) -> DTensor:
    if isinstance(placement, Partial):
        part = VALUE * 3 if mesh.rank else VALUE * (1 - 3 * (mesh.size() - 1))
        return DTensor.from_local(part, mesh, [placement])
    return espalier.distribute_tensor(VALUE.clone(), mesh, [placement])


@contextmanager
def told(words: str) -> Iterator[None]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    said = [str(each.message) for each in caught if "of a DTensor" in str(each.message)]
    assert [words in text for text in said] == ([True] if words else []), said
    assert all(each.filename == __file__ for each in caught if words in str(each.message))


def equal(x: torch.Tensor, value: torch.Tensor) -> None:
    whole = x.full_tensor() if isinstance(x, DTensor) else x
    assert torch.equal(whole, value), (x, value)


def refused(call: Callable[..., Any], *args: Any, words: str) -> None:
    with pytest.raises(NotImplementedError, match=words):
        call(*args)


def calls(rank: int, world: int) -> None:
    mesh = Mesh.from_env({"data": world})
    for placement in (Shard(0), Shard(1), Partial(), Replicate()):
        x = laid(mesh, placement)
        with told("adds it up once for each rank"):
            dist.all_reduce(x)
        equal(x, world * VALUE)
        assert x.placements == (placement,)
        with told("adds it up"):
            work = dist.all_reduce(x, async_op=True)
        assert work is not None
        work.wait()
        equal(x, world**2 * VALUE)
        with told(""):
            dist.all_reduce(x, op=dist.ReduceOp.MAX)
        equal(x, world**2 * VALUE)
        x = laid(mesh, placement)
        with told("adds it up"):
            dist.reduce(x, 0)
        equal(x, world * VALUE)
        x = laid(mesh, placement)
        with told(""):
            dist.broadcast(x, 1)
        equal(x, VALUE)
        given: list[list[torch.Tensor]] = [[torch.zeros_like(x) for _ in range(world)] for _ in range(2)]
        given[1] = [torch.zeros_like(VALUE) for _ in range(world)]
        for out in given:
            with told("gives it once for each rank"):
                dist.all_gather(out, x)
            for each in out:
                equal(each, VALUE)
        flat = torch.zeros(5 * world, 2, dtype=torch.float64)
        with told("gives it once for each rank"):
            dist.all_gather_into_tensor(flat, x)
        equal(flat, VALUE.repeat(world, 1))
        with told("gives it once for each rank"):
            dist.gather(x, given[1] if rank == 0 else None, 0)
        part = torch.zeros(5, dtype=torch.float64)
        with told("adds it up"):
            scattered(part, x.t().reshape(10))
        equal(part, world * VALUE[:, rank])
        refused(dist.reduce_scatter, x, [VALUE] * world, words="into a DTensor.*plain tensor")
        refused(dist.recv, x, words="one value of all ranks")
        if not isinstance(placement, Replicate):
            refused(dist.send, x, 1 - rank, words="one value of all ranks")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        alone = laid(Mesh.single(), Replicate())
        dist.all_reduce(alone, group=dist.new_group([rank], use_local_synchronization=True))
        equal(alone, VALUE)


@pytest.mark.world(2)
def test_whole_values_are_sent(ranks: Any) -> None:
    ranks(2, calls)


def of_losses(rank: int, world: int, plan: dict[str, int], rows: str) -> None:
    """What scripts print of a loss, before it goes back and behind: the mean of all ranks."""
    generator = torch.Generator().manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    x = torch.randn(8, 3, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 2, (8,), generator=generator)
    expected = F.cross_entropy(net(x), y).item()
    net, _ = espalier.prepare(net, torch.optim.SGD(net.parameters(), 0.1), plan=plan, rows=rows)
    if rows == "own":
        n, reader = plan["data"], net.engine.mesh.coordinate[net.engine.mesh.axis("data")]
        x, y = x.chunk(n)[reader], y.chunk(n)[reader]
    for is_over in (False, True):
        loss = F.cross_entropy(net(x), y)
        if is_over:
            loss.backward()
        mean, others = loss.detach().clone(), [torch.zeros_like(loss) for _ in range(world)]
        dist.all_gather(others, mean)
        dist.all_reduce(mean)
        work = dist.all_reduce(largest := mean.clone(), dist.ReduceOp.MAX, async_op=True)
        assert work is not None
        work.wait()
        for value in (mean / world, largest / world, sum(others) / world):
            assert float(value) == pytest.approx(expected, abs=1e-12)
        if not is_over:
            loss.backward()
    if plan.get("pipe", 1) > 1:
        loss = F.cross_entropy(net(x), y)
        with pytest.raises(TypeError, match=r"Give it x\.detach\(\)\.clone\(\)"):
            dist.all_reduce(loss)
        assert "yet to compute" in repr(loss), "asks nobody"
        loss.backward()
        assert repr([loss]) == repr([torch.tensor(loss.item(), dtype=torch.float64)])


@pytest.mark.filterwarnings("ignore:torch.distributed.all_")
@pytest.mark.parametrize(
    ("plan", "rows"),
    [
        ({"data": 2}, "all"),
        ({"pipe": 2}, "all"),
        ({"data": 2, "pipe": 2}, "all"),
        ({"data": 2, "pipe": 2}, "own"),
        ({"data": 2}, "own"),
    ],
)
def test_losses_that_scripts_reduce_by_hand(ranks: Any, plan: dict[str, int], rows: str) -> None:
    ranks(math.prod(plan.values()), of_losses, plan, rows)


def summed(x: torch.Tensor) -> torch.Tensor:
    total = x.clone()
    dist.all_reduce(total)
    return total


class Reduced(torch.autograd.Function):
    """As tensor parallelism by hand has it: a sum on the way back, by a function of its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return summed(grad)


def test_they_are_known_where_dtensors_come_into_them() -> None:
    """As they may where models are prepared already when another is recorded: its backward pass hung."""
    kinds = dist_functions._AllReduce, dist_functions._AllGather
    assert all(meets_ranks(f.apply) and meets_ranks(on_wholes(f)) for f in kinds)
    assert not meets_ranks(Reduced.apply) and not meets_ranks(on_wholes(Reduced))


class Codebook(nn.Module):
    """Sums over ranks what it counts, as codebooks and norms of other libraries do."""

    def __init__(self, decides: bool) -> None:
        super().__init__()
        self.line, self._decides = nn.Linear(6, 6), decides
        self.register_buffer("total", torch.zeros(6))
        self.register_buffer("seen", torch.zeros(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.line(x)
        if self._decides and h.square().sum() > 1e9:
            return x
        with torch.no_grad():
            total, parts = h.sum(0), [torch.empty(6, dtype=h.dtype) for _ in range(dist.get_world_size())]
            dist.all_reduce(total)
            dist.all_gather(parts, h.mean(0))
            dist.broadcast(parts[0], 0)
            self.total.lerp_(total, 0.5)
            self.seen.add_(torch.stack(parts).sum(0))
        h = h + 0.1 * dist_functions.all_reduce(h) - 0.2 * sum(dist_functions.all_gather(h))
        return Reduced.apply(h) + self.total  # type: ignore[no-untyped-call]


class Decides(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if self[0](x).sum() < 1e9 else x


def of_forward(rank: int, world: int, plan: dict[str, int]) -> None:
    """In a stage they are as if all ranks came to them; so a process that calls them has the same."""
    x, y = torch.linspace(-1, 1, 24).view(4, 6).double(), torch.arange(4)
    for kind in (nn.Sequential, Decides):
        found = []
        for given in (None, plan):
            torch.manual_seed(0)
            inner = Codebook(False), nn.Tanh(), Codebook(True), nn.Linear(6, 4)
            net = kind(nn.Linear(6, 6), *inner).double()
            optimizer = torch.optim.SGD(net.parameters(), 0.1)
            model: Any = net
            if given is not None:
                model, optimizer = espalier.prepare(net, optimizer, plan=given)
            for _ in range(3):
                loss = F.cross_entropy(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                found.append(torch.tensor(loss.item(), dtype=torch.float64))
            found += [espalier.full_tensor(v).clone() for v in model.state_dict().values()]
        half = len(found) // 2
        for a, b in zip(found[:half], found[half:], strict=True):
            assert (a - b).abs().max() < 1e-10, (kind, a, b)


class Guided(nn.Module):
    """A student, and a teacher that it is called beside."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = (
            nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 4)) for _ in "12"
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.student(x)  # type: ignore[no-any-return]

    def guide(self, x: torch.Tensor) -> torch.Tensor:
        return self.teacher(x)  # type: ignore[no-any-return]


class Centered(nn.Module):
    """A loss that follows the mean of all ranks' rows, as DINO's does."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(4).double())

    def forward(self, teacher: torch.Tensor, student: torch.Tensor) -> torch.Tensor:
        loss = -((teacher - self.center).softmax(-1) * student.log_softmax(-1)).sum(-1).mean()
        with torch.no_grad():
            center = teacher.mean(0)
            parts = [torch.ones_like(center) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, center)
            dist.all_reduce(center)
            center = center / dist.get_world_size() + torch.stack(parts).mean(0)
            self.center.data = self.center * 0.9 + center * 0.1
        return loss


def of_parts(rank: int, world: int) -> None:
    """Of what a part of the model gives, which is in one stage alone; its values are there on all ranks."""
    found = []
    for plan in (None, {"pipe": 2}):
        torch.manual_seed(0)
        model, loss_fn = Guided().double(), Centered()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        if plan is not None:
            model, optimizer = espalier.prepare(model, optimizer, plan=plan)
        for step in range(3):
            x = torch.linspace(-1, 1 + step, 96).view(16, 6).double()
            with torch.no_grad():
                teacher = model.guide(x)
            loss = loss_fn(teacher, model(x))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found += [torch.tensor(v) for v in (loss.item(), teacher.square().mean().item())]
        found += [loss_fn.center, *map(espalier.full_tensor, model.student.parameters())]
    half = len(found) // 2
    for a, b in zip(found[:half], found[half:], strict=True):
        assert type(b) is torch.Tensor and (a - b).abs().max() < 1e-10, (a, b)


@pytest.mark.filterwarnings("ignore:torch.distributed.all_")
@pytest.mark.filterwarnings("ignore:A value is asked for that lies on ranks:espalier.GatherWarning")
@pytest.mark.filterwarnings("ignore:.*in several stages or branches:espalier.GatherWarning")
def test_collectives_on_what_parts_of_a_model_give(ranks: Any) -> None:
    ranks(2, of_parts)


@pytest.mark.filterwarnings("ignore:torch.distributed.(all_|nn)")
@pytest.mark.filterwarnings("ignore:The autograd function")
@pytest.mark.filterwarnings("ignore:Graph cannot be split|.*cannot be split")
@pytest.mark.parametrize("plan", [{"pipe": 2}, {"data": 2, "pipe": 2}])
def test_collectives_in_a_models_forward(ranks: Any, plan: dict[str, int]) -> None:
    ranks(math.prod(plan.values()), of_forward, plan)
