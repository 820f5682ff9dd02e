"""Metrics of libraries that add up over ranks by themselves: each row counts once, whatever ranks share."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import espalier

# as torchmetrics has it
METRIC = """
import torch
import torch.distributed as dist


class Metric:
    process_group = dist_sync_fn = None

    def __init__(self, **more):
        vars(self).update(more)
        self._reductions = {"total": sum, "rows": sum, "seen": None}
        self.reset()

    def reset(self):
        self.total, self.rows, self.seen = torch.zeros(()), torch.zeros(4, dtype=torch.long), []

    def update(self, loss, classes):
        self.total = self.total + loss
        self.rows += torch.bincount(classes, minlength=4)
        self.seen.append(classes)

    def sync(self, dist_sync_fn=None, process_group=None, should_sync=True, distributed_available=None):
        if not should_sync or not dist.is_initialized():
            return
        group = process_group or self.process_group
        for name, reduction in self._reductions.items():
            x = getattr(self, name)
            x = x if reduction else torch.cat(x)
            of_all = [torch.zeros_like(x) for _ in range(dist.get_world_size(group))]
            dist.all_gather(of_all, x.contiguous(), group)
            setattr(self, name, sum(of_all) if reduction else of_all)

    def compute(self):
        self.sync(dist_sync_fn=self.dist_sync_fn)
        out = self.total, self.rows, torch.cat(self.seen)
        self.reset()
        return out
"""
# as ignite has it
DISTRIBUTED = """
import torch
import torch.distributed as dist


def get_world_size():
    return dist.get_world_size() if dist.is_initialized() else 1


def get_rank():
    return dist.get_rank() if dist.is_initialized() else 0


def all_reduce(tensor, op="SUM", group=None):
    if get_world_size() > 1:
        is_number = not isinstance(tensor, torch.Tensor)
        tensor = torch.tensor(tensor) if is_number else tensor
        dist.all_reduce(tensor, group=group)
        return tensor.item() if is_number else tensor
    return tensor


def all_gather(tensor, group=None):
    of_all = [torch.zeros_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(of_all, tensor, group)
    return torch.cat(of_all)


def broadcast(tensor, src=0, safe_mode=False):
    held = [tensor]
    dist.broadcast_object_list(held, src)
    return held[0]
"""
SUMS = """
import ignite.distributed as idist


class Sum:
    def __init__(self):
        self.total, self.rows = 0.0, []

    def update(self, loss, classes):
        self.total += loss
        self.rows.append(classes)

    def compute(self):
        import torch

        total, rows, result = idist.all_reduce(self.total), torch.cat(self.rows), None
        if idist.get_world_size() > 1:
            rows = idist.all_gather(rows)
        if idist.get_rank() == 0:
            result = torch.bincount(rows, minlength=4).double().tolist()
        return total, idist.broadcast(result, src=0) if idist.get_world_size() > 1 else result
"""
PACKAGES = {
    "torchmetrics": "",
    "torchmetrics.metric": METRIC,
    "ignite": "",
    "ignite.distributed": DISTRIBUTED,
    "ignite.metrics": SUMS,
}


@contextmanager
def installed() -> Iterator[dict[str, ModuleType]]:
    before = {name: sys.modules.get(name) for name in PACKAGES}
    made = {name: ModuleType(name) for name in PACKAGES}
    sys.modules.update(made)
    made["ignite"].distributed = made["ignite.distributed"]  # type: ignore[attr-defined]
    try:
        for name, text in PACKAGES.items():
            exec(text, vars(made[name]))
        yield made
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)).double()


def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    draw = torch.Generator().manual_seed(1)
    for _ in range(3):
        x = torch.randn(8, 4, generator=draw, dtype=torch.float64)
        yield x, torch.randint(0, 4, (8,), generator=draw)


def evaluated(net: Any, packages: dict[str, ModuleType], part: slice = slice(None)) -> Iterator[Any]:
    """Sums over the rows of three batches: of what the model gives, and of numbers and rows as they are."""
    kinds = packages["torchmetrics.metric"].Metric, packages["ignite.metrics"].Sum
    metrics = [kind() for kind in kinds for _ in range(2)]
    for x, y in batches():
        x, y = x[part], y[part]
        out = net(x)
        losses = F.cross_entropy(out, y, reduction="none").sum()
        losses.backward()
        classes = out.argmax(-1)
        for metric, loss, found in zip(
            metrics, 2 * [losses.detach(), losses.item()], 2 * [classes, y], strict=True
        ):
            metric.update(loss, found)
    for metric in metrics:
        yield from metric.compute()


def numbers(values: Iterator[Any]) -> list[list[float]]:
    given = [torch.as_tensor(espalier.full_tensor(x) if torch.is_tensor(x) else x) for x in values]
    return [x.double().reshape(-1).tolist() for x in given]


def counted(rank: int, world: int, plans: list[dict[str, int]]) -> None:
    with installed() as packages, pytest.MonkeyPatch.context() as alone:
        alone.setattr(dist, "is_initialized", lambda: False)
        expected = numbers(evaluated(model(), packages))
    for plan in plans:
        with installed() as packages, warnings.catch_warnings():
            warnings.simplefilter("error")  # nothing is added up of what all ranks have
            net = model()
            net, _ = espalier.prepare(net, torch.optim.SGD(net.parameters(), 0.0), plan=plan)
            given = numbers(evaluated(net, packages))
            assert packages["ignite.distributed"].get_world_size() == world  # to the program itself
        for a, b in zip(given, expected, strict=True):
            assert a == pytest.approx(b, abs=1e-9), plan


@pytest.mark.parametrize("plans", [[{"data": 2}, {"data": 2, "zero": 3}, {"tensor": 2}], [{"pipe": 2}]])
def test_programs_of_one_process(ranks: Any, plans: list[dict[str, int]]) -> None:
    ranks(2, counted, plans)


def counted_apart(rank: int, world: int, plan: dict[str, int]) -> None:
    """Each rank has rows of its own, or those of the ranks with which it shares a layer."""
    with installed() as packages, pytest.MonkeyPatch.context() as alone:
        alone.setattr(dist, "is_initialized", lambda: False)
        expected = numbers(evaluated(model(), packages))
    with installed() as packages:
        net = model()
        net = espalier.prepare(net, torch.optim.SGD(net.parameters(), 0.0), plan=plan, rows="own")[0]
        n, reader = plan.get("data", 1), net.engine.mesh.coordinate[net.engine.mesh.axis("data")]
        given = numbers(evaluated(net, packages, slice(reader * 8 // n, (reader + 1) * 8 // n)))
    for a, b in zip(given, expected, strict=True):
        assert sorted(a) == pytest.approx(sorted(b), abs=1e-9)


@pytest.mark.parametrize("plan", [{"data": 2}, {"tensor": 2}, {"data": 2, "tensor": 2}])
def test_rows_of_each_rank(ranks: Any, plan: dict[str, int]) -> None:
    ranks(math.prod(plan.values()), counted_apart, plan)
