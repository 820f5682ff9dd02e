"""Modules that data chooses: experts, layers in another order or left out. Against one process, float64."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import espalier
from tests.ranks.test_written import exact


class Experts(nn.Module):
    """Rows go to the expert that a gate says; one without rows is not called."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.embed, self.gate = nn.Embedding(9, 6), nn.Linear(6, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)) for _ in range(4)
        )
        self.out, self.how = nn.Linear(6, 3), how

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        weight, which = self.gate(x).softmax(-1).max(-1)
        y = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            mine = which == i
            if self.how == "where":
                if mine.any():
                    y = torch.where(mine[:, None], expert(x) * weight[:, None], y)
                continue
            rows = mine.nonzero().squeeze(-1)
            if self.how == "all" or rows.numel():
                given = expert(x[rows]) * weight[rows, None]
                y = y.index_add(0, rows, given) if self.how == "add" else y.index_put((rows,), given)
        return F.cross_entropy(self.out(x + y), ids % 3)


class Turns(nn.Module):
    """The batch says in which order layers come, and which are left out; one is there twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(9, 6), nn.Linear(6, 3)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(5))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        order = x.detach().sum(0)[:5].argsort().tolist()
        for i in (*order[: 2 + int(ids[0]) % 3], order[0]):
            x = torch.tanh(self.layers[i](x))
        return F.cross_entropy(self.out(x), ids % 3)


class Local(nn.Module):
    """Each rank sends its rows to experts by itself: one that has no rows there has no gradient for it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(9, 6), nn.Linear(6, 3)
        self.first, self.experts, self.last = (
            nn.ModuleList(nn.Linear(6, 6, bias=False) for _ in range(n)) for n in (2, 4, 2)
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.first:
            x = torch.tanh(layer(x))
        call: Any = self.send
        if isinstance(x, espalier.DTensor):
            call = espalier.local_map(self.send, out_placements=x.placements)
        x = x + call(x, ids, *[expert.weight for expert in self.experts])
        for layer in self.last:
            x = torch.tanh(layer(x))
        return F.cross_entropy(self.out(x), ids % 3)

    @staticmethod
    def send(x: torch.Tensor, ids: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        y = torch.zeros_like(x)
        for i, weight in enumerate(weights):
            rows = (ids % 4 == i).nonzero().squeeze(-1)
            if rows.numel():
                y = y.index_add(0, rows, x[rows] @ weight)
        return y


def routed(rank: int, world: int, plans: list[dict[str, Any]]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", espalier.GatherWarning)  # of shapes that hang on values
        for plan in plans:
            torch.manual_seed(0)
            for net in (Experts("add"), Experts("all"), Experts("where"), Turns(), Local()):
                exact(net.double(), {"data": world, **plan}, steps=4)


PLANS: list[dict[str, Any]] = [
    {"zero": 3},
    {"zero": 3, "prefetch_megabytes": 0},
    {"zero": 3, "recompute": "full"},
    {"zero": 2, "chunk_megabytes": 0.0005},
    {"zero": 0, "chunk_megabytes": 0.0005},
]


def test_modules_that_data_chooses(ranks: Any) -> None:
    ranks(2, routed, PLANS)


def test_on_four_ranks(ranks: Any) -> None:
    ranks(4, routed, PLANS[:2])


class Scales(nn.Module):
    """Writes in place to what modules give: views of products, of more than two dims."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x.sin())
            x *= 2
        return x.square().mean()


def scales(rank: int, world: int) -> None:
    torch.manual_seed(0)
    net = Scales().double()
    plain = copy.deepcopy(net)
    plan = {"data": world, "zero": 3, "chunk_megabytes": 0.0001, "prefetch_megabytes": 0.0}
    engine = espalier.initialize(net, torch.optim.SGD(net.parameters(), lr=0.1), plan)
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(3):
        x = torch.randn(4, 5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        loss = plain(x)
        theirs.zero_grad()
        loss.backward()
        theirs.step()
        assert abs(engine.train_step((x,)).item() - loss.item()) < 1e-12
    state = engine.full_state_dict()
    assert all((state[name] - value).abs().max() < 1e-12 for name, value in plain.state_dict().items())


def test_outputs_that_are_written_to_in_place(ranks: Any) -> None:
    ranks(2, scales)
