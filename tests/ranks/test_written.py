"""Parameters that forward writes to: after every step they are what one process has, under every stage."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import espalier
from tests.ranks.test_engine import TOLERANCE, apart

Write = Callable[[Any], object]


def multiply(p: Any) -> None:
    with torch.no_grad():
        p.mul_(0.9).add_(0.01)


def copy_to(p: Any) -> None:
    with torch.no_grad():
        p.copy_(p.clamp(-0.3, 0.3))


def assign(p: Any) -> None:
    p.data = p.data * 0.9


def through_data(p: Any) -> None:
    p.data.mul_(0.8)


def through_detach(p: Any) -> None:
    p.detach().clamp_(-0.2, 0.2)


def one_row(p: Any) -> None:
    with torch.no_grad():
        p[0] = 0.5
        p[1].mul_(2)


def several(p: Any) -> None:
    with torch.no_grad():
        torch._foreach_mul_([p], 0.7)


WRITES: list[Write] = [multiply, copy_to, assign, through_data, through_detach, one_row, several]


class Writing(nn.Linear):
    """Writes to its weight, then uses it; or does that in its parent's stead."""

    write: Write | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.write is not None:
            self.write(self.weight)
        return super().forward(x)


class Net(nn.Module):
    """Writes within a block, before all blocks, and after them to what no backward pass reads."""

    def __init__(self, within: Write, before: Write, after: Write) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 6, max_norm=1.0)
        self.blocks = nn.ModuleList([Writing(6, 6) for _ in range(4)])
        self.head, self.idle = nn.Linear(6, 3), nn.Linear(6, 5)
        self.blocks[1].write = within
        self._before, self._after = before, after

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        self._before(self.blocks[2].weight)
        self._before(self.embed.weight)
        for block in self.blocks:
            x = torch.tanh(block(x))
        x = self.head(x)
        self._after(self.idle.weight)
        self._after(self.embed.weight)
        return F.cross_entropy(x, ids % 3)


class Teacher(nn.Module):
    """A target that follows the model (BYOL, MoCo), and codes that follow the batch (VQ-VAE)."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 6)
        self.online = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        self.target = copy.deepcopy(self.online).requires_grad_(False)
        self.codes = nn.Parameter(torch.randn(9, 6), requires_grad=False)
        self.how = how

    @torch.no_grad()
    def follow(self) -> None:
        for p, q in zip(self.online.parameters(), self.target.parameters(), strict=True):
            if self.how == "mul":
                q.mul_(0.9).add_(p, alpha=0.1)
            elif self.how == "assign":
                q.data = q.data * 0.9 + p.data * 0.1
            elif self.how == "data":
                q.data.mul_(0.9).add_(p.data * 0.1)
            else:
                q.detach().lerp_(p.detach(), 0.1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        if self.how != "mul":
            self.follow()
        with torch.no_grad():
            wanted = self.target(x * 1.1) + self.codes[ids]
        found = self.online(x)
        if self.how == "mul":
            self.follow()
        with torch.no_grad():
            self.codes.index_add_(0, ids, x * 0.1)
            self.codes[ids[:2]] = 0.5
        return F.mse_loss(found, wanted)


def batch(step: int) -> torch.Tensor:
    return torch.randint(0, 9, (8,), generator=torch.Generator().manual_seed(step))


def optimizer_of(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-2)


def exact(net: nn.Module, plan: dict[str, Any], steps: int = 3) -> None:
    plain = copy.deepcopy(net)
    theirs = optimizer_of(plain)
    cut = {"blocks.1" if isinstance(net, Net) else "target.0": "column"}
    layouts = cut if "tensor" in plan else None
    engine = espalier.initialize(net, optimizer_of(net), plan, max_grad_norm=1.0, layouts=layouts)
    for step in range(steps):
        loss, expected = engine.train_step(batch(step)), plain(batch(step))
        expected.backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        theirs.step()
        theirs.zero_grad()
        assert abs(loss.item() - expected.item()) < TOLERANCE, step
        assert apart(net, plain, gradients=False) < TOLERANCE, step


def nets() -> list[nn.Module]:
    turned = [*WRITES[3:], *WRITES[:3]], [*WRITES[5:], *WRITES[:5]]
    torch.manual_seed(0)
    found = [Net(*three) for three in zip(WRITES, *turned, strict=True)]
    return [net.double() for net in (*found, *map(Teacher, ("mul", "assign", "data", "detach")))]


def written(rank: int, world: int, plans: list[dict[str, Any]], every: int = 1) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", espalier.GatherWarning)  # of a table whose rows are cut
        for plan in plans:
            for net in nets()[::every]:
                exact(net, plan)


STAGES = [{"data": 2, "zero": 3}, {"data": 2, "zero": 3, "prefetch_megabytes": 0}]
OTHERS = [
    {"data": 2, "zero": 0},
    {"data": 2, "zero": 1, "recompute": "full"},
    {"data": 2, "zero": 3, "recompute": "full"},
]


def test_stage_3(ranks: Any) -> None:
    ranks(2, written, STAGES)


def test_other_stages_and_recomputation(ranks: Any) -> None:
    ranks(2, written, OTHERS, 2)


def test_four_ranks(ranks: Any) -> None:
    ranks(4, written, [{"data": 4, "zero": 3}, {"data": 2, "tensor": 2, "zero": 3}], 3)


@pytest.mark.parametrize("place", ["host", "disk"])
def test_off_the_device(ranks: Any, tmp_path: Path, place: str) -> None:
    offload = {"parameters": place, "directory": str(tmp_path)}
    ranks(2, written, [{"data": 2, "zero": 3, "offload": offload}], 2)


def masters(rank: int, world: int) -> None:
    for more in ({}, {"gradients": "in-place"}):
        for zero in range(4):
            for net in nets()[:-4]:
                net = net.float()
                plain = copy.deepcopy(net).bfloat16()
                still = torch.optim.SGD(net.parameters(), lr=0.0)
                plan = {"data": world, "zero": zero, "precision": "bfloat16", **more}
                engine = espalier.initialize(net, still, plan)
                before = engine.full_state_dict()["head.weight"].clone()
                for step in range(2):
                    engine.train_step(batch(step))
                    plain(batch(step))
                    for name, p in plain.named_parameters():
                        here = espalier.full_tensor(dict(net.named_parameters())[name].detach())
                        assert torch.equal(here, p), (name, zero, step)
                after = engine.full_state_dict()
                assert torch.equal(after["head.weight"], before), "nobody wrote to it"
                assert torch.equal(after["blocks.1.weight"].bfloat16(), plain.blocks[1].weight)


def test_masters_take_over_what_was_written(ranks: Any) -> None:
    ranks(2, masters)
