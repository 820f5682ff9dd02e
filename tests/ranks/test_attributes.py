"""What a program has set on parameters and buffers is there under every plan, and so is who shares them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import espalier
from espalier.tensor.dtensor import set_by_program

PLANS: list[dict[str, Any]] = [
    {"data": 4, "zero": 3},
    {"data": 4, "zero": 1, "precision": "bfloat16"},
    {"data": 4, "zero": 3, "offload": {"parameters": "host", "states": "host"}},
    {"tensor": 4, "tensor_mode": "2d"},
    {"pipe": 2, "data": 2},
    {"pipe": 2, "tensor": 2},
    {"pipe": 2, "data": 2, "zero": 3},
    {"branch": 2, "data": 2},
]


class Scaled(nn.Linear):
    """Its forward reads what was set on its weight and buffer, and writes to the buffer."""

    seen: torch.Tensor

    def __init__(self, seen: torch.Tensor) -> None:
        super().__init__(8, 8)
        self.register_buffer("seen", seen)
        self.first = self.seen[:1]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.seen.add_(1.0)
        return torch.tanh(super().forward(x)) * self.weight.scale * self.seen.scale  # type: ignore[attr-defined]


class Net(nn.Module):
    """Layers of which two share a buffer, and first and last a weight; one bias is not to be trained."""

    def __init__(self, is_branched: bool) -> None:
        super().__init__()
        shared = torch.zeros(4)
        self.layers = nn.ModuleList(Scaled(shared if i < 2 else torch.zeros(4)) for i in range(4))
        if not is_branched:
            self.layers[3].weight = self.layers[0].weight
        self.branches = nn.ModuleList(nn.Linear(8, 8) for _ in range(2)) if is_branched else None

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return (p for name, p in self.named_parameters(recurse=recurse) if name != "layers.1.bias")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x if self.branches is None else self.branches[0](x) + self.branches[1](x)


def tensors_of(net: Net) -> list[torch.Tensor]:
    return [x for _, x in (*net.named_parameters(), *net.named_buffers())]


def made(is_branched: bool) -> Net:
    torch.manual_seed(0)
    net = Net(is_branched)
    for i, x in enumerate(tensors_of(net)):
        x.scale, x._optim = 1 + i / 10, {"lr": i}  # type: ignore[attr-defined]
    return net


def trained(net: Net, optimizer: Any) -> list[torch.Tensor]:
    for step in range(2):
        x = torch.randn(8, 8, generator=torch.Generator().manual_seed(step))
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    layers: list[Scaled] = list(net.layers)  # type: ignore[arg-type]
    views = [layer.first for layer in layers]
    return [loss.detach(), *net.state_dict().values(), *net.buffers(), *views]


def compared(rank: int, world: int, is_deferred: bool) -> None:
    torch.set_default_dtype(torch.float64)
    for plan in PLANS:
        is_branched = "branch" in plan
        if is_deferred and is_branched:
            continue
        alone = made(is_branched)
        expected = trained(alone, torch.optim.SGD(alone.parameters(), 0.1))
        if is_deferred:
            with espalier.deferred():
                net = made(is_branched)
        else:
            net = made(is_branched)
            shared = net.layers[0].seen
            shared.add_(rank)  # the first rank's counts
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        branches = {"branches.0": 0, "branches.1": 1} if is_branched else None
        given, optimizer = espalier.prepare(net, optimizer, plan=plan, branches=branches)
        found = trained(given, optimizer)
        assert is_deferred or net.layers[0].seen is net.layers[1].seen is shared
        for x, own in zip(tensors_of(net), tensors_of(alone), strict=True):
            assert set_by_program(x) == vars(own), f"{plan}: {set_by_program(x)}"
        updated = [p for group in optimizer.param_groups for p in group["params"]]
        assert [p._optim for p in updated] == [p._optim for p in alone.parameters()], plan  # type: ignore[attr-defined]
        far = 0.05 if "precision" in plan else 1e-12
        for a, b in zip(found, expected, strict=True):
            assert (espalier.full_tensor(a).double() - b).abs().max() < far, plan


@pytest.mark.parametrize("is_deferred", [False, True])
def test_they_stay(ranks: Any, is_deferred: bool) -> None:
    ranks(4, compared, is_deferred)
