"""Ranks that try layouts of a model each try a part, and choose what one alone would."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from espalier.blocks import blocks
from espalier.mesh import Mesh
from espalier.parallel.tensor import infer
from espalier.parallel.tensor.infer import Chosen, choose


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up, self.down = nn.Linear(16, width), nn.Linear(width, 16)
        self.gate, self.out = nn.Linear(16, width), nn.Linear(width, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.down(self.up(self.norm(x)).relu())
        return x + self.out(self.gate(x).sigmoid())


class Looking(Block):
    """A block that asks for a value, which a run without data has not."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if x.sum().item() < 1e9 else x


class Net(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(32), Block(width), Looking(32), Block(32)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def choices(rank: int, world: int) -> list[Any]:
    mesh, batch, runs = Mesh.from_env({"tensor": world}), (torch.ones(1, 4, 16),), [0]
    tried = infer._tried

    def counted(*args: Any) -> Any:
        runs[0] += 1
        return tried(*args)

    infer._tried = counted
    said: list[Any] = []
    try:
        # of the last the ranks have other models, of which each must find out by itself
        for width in (64, 64 + 32 * rank):
            net = Net(width)
            for among in (None, mesh):
                runs[0] = 0
                chosen = choose(net, 2, blocks(net), batch=batch, rows=2, sequence="auto", among=among)
                said.append((chosen, runs[0]))
    finally:
        infer._tried = tried
    return said


def test_ranks_share_trials(ranks: Any) -> None:
    said = ranks(3, choices)
    for alone, together, own, other in said:
        assert alone == (said[0][0][0], 17), "two kinds of four ways with both boundaries, and one that fails"
        assert isinstance(alone[0], Chosen) and alone[0].cut
        assert any("NoValueError" in why for why in alone[0].why.values())
        assert together[0] == alone[0]
        assert other[0] == own[0]
    assert sum(together[1] for _, together, *_ in said) < 17 + 3
    assert max(together[1] for _, together, *_ in said) < 17 / 2
