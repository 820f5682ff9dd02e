"""Blocks whose programs are alike are compiled once; those that only look so on one rank are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

import espalier
from espalier.engine import compiling
from espalier.tensor.compiled import compiler_of_blocks

PRELOAD = ["torch._dynamo.backends.common", "torch._inductor.pattern_matcher"]


class Block(nn.Module):
    """Two layers that a tensor axis cuts, twice."""

    def __init__(self, number: int, hidden: int, scale: float) -> None:
        super().__init__()
        self.number, self.scale = number, scale
        self.up, self.down = nn.Linear(4, hidden), nn.Linear(hidden, 4)
        self.up_too, self.down_too = nn.Linear(4, hidden), nn.Linear(hidden, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[b, 4] to [b, 4]."""
        x = x + self.scale * self.down(self.up(x).relu())
        return x + self.down_too(self.up_too(x).tanh())


class Net(nn.Module):
    """A list of blocks."""

    def __init__(self, hidden: list[int], scales: list[float]) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(map(Block, range(len(hidden)), hidden, scales))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[b, 4] to a loss."""
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def losses_of(net: Net, step: Callable[[torch.Tensor], float]) -> list[float]:
    generator = torch.Generator().manual_seed(1)
    return [step(torch.randn(4, 4, generator=generator, dtype=torch.float64)) for _ in range(3)]


def _compiled_once(rank: int, world: int, hidden: list[int], scales: list[float], programs: int) -> None:
    torch.manual_seed(0)
    net = Net(hidden, scales).double()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)

    def alone(x: torch.Tensor) -> float:
        loss = net(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    expected = losses_of(net, alone)
    counts = []

    def counted(*args: Any) -> Any:
        compiler = compiler_of_blocks(*args)
        return lambda module, inputs: (counts.append(module), compiler(module, inputs))[1]

    torch.manual_seed(0)
    net = Net(hidden, scales).double()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    with patch.object(compiling, "compiler_of_blocks", counted):
        engine = espalier.initialize(net, optimizer, {"tensor": world}, compile="aot_eager")
    found = losses_of(net, lambda x: float(engine.train_step(x)))
    assert found == pytest.approx(expected, rel=0, abs=1e-12)
    assert len(counts) == programs


@pytest.mark.parametrize(
    ("world", "hidden", "scales", "programs"),
    [
        (1, [4, 4, 4], [1.0, 1.0, 1.0], 1),
        (2, [4, 4, 4], [1.0, 1.0, 1.0], 1),
        (2, [4, 4, 4], [1.0, 0.5, 1.0], 2),
        (2, [4, 4, 4], [0.0, -0.0, 0.0], 2),
        # the first rank has four features of each
        (2, [8, 7, 8, 7], [1.0] * 4, 2),
    ],
)
def test_blocks_that_are_alike_are_compiled_once(
    ranks: Any, world: int, hidden: list[int], scales: list[float], programs: int
) -> None:
    ranks(world, _compiled_once, hidden, scales, programs)
