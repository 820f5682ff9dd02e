"""Stages of one rank compute on plain tensors, where nobody can tell; else on DTensors."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import espalier
from espalier.tensor import DTensor

CASES = ("plain", "drops", "hooks", "recomputes", "tells")
WIDTH, RATE = 6, 0.3


class Part(nn.Module):
    """Remembers on what it computed, and counts its calls in a buffer that it makes anew."""

    calls: torch.Tensor

    def __init__(self, case: str) -> None:
        super().__init__()
        self.inner, self.case = nn.Linear(WIDTH, WIDTH), case
        self.register_buffer("calls", torch.zeros((), dtype=torch.float64))
        self.seen: set[type] = set()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not x.is_meta:
            self.seen |= {type(x), type(x + self.inner.weight[0])}
        self.calls = self.calls + 1
        out = checkpoint(self.inner, x, use_reentrant=False) if self.case == "recomputes" else self.inner(x)
        if self.case == "drops":
            out = nn.functional.dropout(out, 0.5, self.training)
        return out.tanh() * 2


class Net(nn.Sequential):
    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(super().forward(x), target)


def computes(rank: int, world: int) -> None:
    for case in CASES:
        torch.manual_seed(0)
        net = Net(*(Part(case) for _ in range(4))).double()
        plain, told = copy.deepcopy(net), list[type]()
        for part in net:
            if case == "hooks":
                part.inner.register_forward_hook(lambda module, given, out, told=told: told.append(type(out)))
            if case == "tells":
                part.inner.weight.register_post_accumulate_grad_hook(
                    lambda p, told=told: told.append(type(p))
                )
        sgd, plan = torch.optim.SGD(net.parameters(), lr=RATE), {"pipe": world, "accumulate": 2}
        engine = espalier.initialize(net, sgd, plan)
        for _ in range(3):
            x, target = torch.randn(2, 4, WIDTH).double()
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", ".* has a hook, and lies in a stage of another rank")
                loss = engine.train_step({"x": x, "target": target}).item()
            assert all(type(p) is DTensor for p in net.parameters())
            if case != "drops":  # which draws otherwise in one process
                wanted = plain(x, target)
                wanted.backward()
                with torch.no_grad():
                    for p in plain.parameters():
                        p -= RATE * p.grad
                        p.grad = None
                assert abs(loss - wanted.item()) < 1e-12, case
        mine = [part for part in net if not part.inner.weight.is_meta]
        expected = torch.Tensor if case in ("plain", "tells") else DTensor
        assert [part.seen for part in mine] == [{expected}] * 2, (case, mine[0].seen)
        assert (DTensor in told) == (case in ("hooks", "tells")) and torch.Tensor not in told, case
        assert all(part.calls.item() == 6 for part in mine)


def test_nobody_can_tell(ranks: Any) -> None:
    ranks(2, computes)
