"""Values that lie on other ranks alone: nobody takes what is not there for them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import espalier
from espalier.layout import Layout
from espalier.mesh.parts import at
from espalier.tensor import lay_out

WRITES: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "add_": lambda x, p: x.mul_(0.9).add_(p, alpha=0.1),
    "copy_": lambda x, p: x.copy_(p),
    "lerp_": lambda x, p: x.lerp_(p, 0.1),
    "setitem": lambda x, p: x.__setitem__(slice(None), p),
    "iadd": lambda x, p: x.__iadd__(p),
    "index_copy_": lambda x, p: x.index_copy_(0, torch.arange(4), p),
    "scatter_add_": lambda x, p: x.scatter_add_(0, torch.zeros(4, 3, dtype=torch.int64), p),
    "out": lambda x, p: torch.mul(p, 2, out=x),
    "no rule": lambda x, p: x.put_(torch.arange(12), p),
}


def written(rank: int, world: int) -> None:
    mesh = espalier.Mesh.from_env({"pipe": 2, "data": 1})
    home = at(mesh, "pipe", 1)
    whole = torch.arange(12.0).view(4, 3)
    p = lay_out(whole, Layout.replicated(home, (4, 3)))
    for name, write in WRITES.items():
        x, expected = torch.ones(4, 3), torch.ones(4, 3)
        write(expected, whole)
        if rank == 1:
            write(x, p)
            assert torch.equal(x, expected), name
        else:
            with pytest.raises(ValueError, match=r"are on ranks \[1\](.|\n)*full_state_dict"):
                write(x, p)


def average_of_a_pipeline(rank: int, world: int) -> None:
    """What was copied before the first batch is whole, and takes up what lies in stages."""
    net = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3)).double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = espalier.prepare(net, optimizer, plan={"pipe": 2})[0]
    average = copy.deepcopy(net)
    model(torch.randn(8, 6, dtype=torch.float64)).square().mean().backward()
    optimizer.step()
    expected = {name: x.clone() for name, x in average.state_dict().items()}
    for name, x in model.engine.full_state_dict().items():
        expected[name].mul_(0.9).add_(x, alpha=0.1)
    with pytest.warns(espalier.GatherWarning, match="each is brought to all ranks"), torch.no_grad():
        for p, q in zip(net.parameters(), average.parameters(), strict=True):
            q.mul_(0.9).add_(p, alpha=0.1)
    for name, x in average.state_dict().items():
        torch.testing.assert_close(x, expected[name], rtol=0, atol=1e-12)
    with pytest.raises(RuntimeError, match="full_state_dict"):
        average.load_state_dict(net.state_dict())
    average.load_state_dict(model.engine.full_state_dict())


def test_what_is_not_there_is_written_nowhere(ranks: Any) -> None:
    ranks(2, written)
    ranks(2, average_of_a_pipeline)
