"""Parameters that were frozen when the engine was made, and are trained later."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import espalier
from espalier.engine.awaited import Awaited

TOLERANCE = 1e-9
AT, STEPS = 2, 5


class Net(nn.Module):
    """Blocks of which the first and the embedding are thawed one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8)) for _ in range(3)
        )
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 5)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x)
        return F.cross_entropy(self.head(self.norm(x).mean(1)), labels)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, 16, (8, 4), generator=generator), torch.randint(0, 5, (8,), generator=generator)


def frozen_net(dtype: torch.dtype = torch.float64) -> Net:
    torch.manual_seed(0)
    net = Net().to(dtype)
    for module in (net.embed, net.blocks[0], net.blocks[1]):
        module.requires_grad_(False)
    net.blocks[2][0].bias.requires_grad_(False)  # within a layer that is trained
    return net


def optimizer_of(net: nn.Module, everything: bool) -> torch.optim.Optimizer:
    held = [p for p in net.parameters() if everything or p.requires_grad]
    return torch.optim.AdamW(held, lr=1e-2)


def thaw(net: Net, optimizer: torch.optim.Optimizer, step: int, everything: bool) -> None:
    """In two steps; the second takes what shares a chunk with the first."""
    parts: list[nn.Parameter] = []
    if step == AT:
        parts = [*net.blocks[1].parameters(), net.blocks[0][0].weight, net.blocks[2][0].bias]
    elif step == AT + 1:
        parts = [*net.embed.parameters(), *list(net.blocks[0].parameters())[1:]]
    for p in parts:
        p.requires_grad_(True)
    if parts and not everything:
        optimizer.add_param_group({"params": parts, "lr": 2e-2})


def trained(
    net: Net, optimizer: torch.optim.Optimizer, model: Any, everything: bool, clip: bool, start: int = 0
) -> list[torch.Tensor]:
    """Losses and norms of a plain loop."""
    seen = []
    for step in range(start, STEPS):
        thaw(net, optimizer, step, everything)
        loss = model(*batch(step))
        loss.backward()
        if clip:
            seen.append(torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1))
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.detach())
    return seen


def whole(x: Any) -> torch.Tensor:
    if isinstance(x, Awaited):
        return x._value()
    return espalier.full_tensor(x) if isinstance(x, espalier.DTensor) else torch.as_tensor(x)


def compared(plan: dict[str, Any], everything: bool, clip: bool, near: float = TOLERANCE) -> None:
    dtype = torch.float32 if "precision" in plan else torch.float64
    nets = [frozen_net(dtype) for _ in range(2)]
    optimizers = [optimizer_of(net, everything) for net in nets]
    model = espalier.prepare(nets[0], optimizers[0], plan=plan)[0]
    got = trained(nets[0], optimizers[0], model, everything, clip)
    expected = trained(nets[1], optimizers[1], nets[1], everything, clip)
    for i, (a, b) in enumerate(zip(got, expected, strict=True)):
        assert (whole(a).double() - b.double()).abs() < near, (plan, everything, i)
    state = model.engine.full_state_dict()
    for name, x in nets[1].state_dict().items():
        assert (state[name] - x).abs().max() < near, (plan, everything, name)


HOST = {"states": "host", "gradients": "host", "parameters": "host"}


def on_two(rank: int, world: int) -> None:
    for everything in (False, True):
        for zero in range(4):
            compared({"data": 2, "zero": zero}, everything, clip=zero % 2 == 0)
        compared({"tensor": 2}, everything, clip=True)
        compared({"data": 2, "zero": 3, "offload": HOST}, everything, clip=True)
        compared({"data": 2, "zero": 1, "offload": {"states": "host"}}, everything, clip=False)
    low = {"precision": "bfloat16"}
    for zero in range(4):
        compared({"data": 2, "zero": zero, **low}, everything=zero % 2 == 0, clip=False, near=0.1)
    compared({"data": 2, "zero": 2, **low, "gradients": "in-place"}, everything=True, clip=False, near=0.1)
    compared({"data": 2, "zero": 2, **low, "offload": {"states": "host"}}, True, False, near=0.1)


def in_stages(rank: int, world: int) -> None:
    for everything in (False, True):
        compared({"pipe": 2}, everything, clip=True)
    compared(
        {"pipe": 2, "accumulate": 2, "schedule": "interleaved", "stages_per_rank": 2},
        everything=False,
        clip=False,
    )


def on_four(rank: int, world: int) -> None:
    compared({"data": 2, "tensor": 2, "zero": 3}, everything=False, clip=True)
    compared({"tensor": 4, "tensor_mode": "2d"}, everything=False, clip=True)
    compared({"data": 2, "replicate": 2, "zero": 2}, everything=True, clip=True)
    compared({"data": 2, "pipe": 2, "zero": 1}, everything=False, clip=True)


def test_what_was_frozen_is_trained_later(ranks: Any) -> None:
    ranks(2, on_two)
    ranks(2, in_stages)
    ranks(4, on_four)


def saved_and_loaded(rank: int, world: int, folder: Path) -> None:
    """A run that thaws goes on in one that trains all from the start, and the other way round."""

    def started(plan: dict[str, Any], is_frozen: bool) -> tuple[Net, torch.optim.Optimizer, Any]:
        net = frozen_net()
        if not is_frozen:
            net.requires_grad_(True)
        optimizer = optimizer_of(net, everything=True)
        model = espalier.prepare(net, optimizer, plan=plan)[0]
        model.engine.lay_out(batch(0))
        return net, optimizer, model

    def steps(net: Net, optimizer: torch.optim.Optimizer, model: Any, start: int, end: int) -> None:
        for step in range(start, end):
            thaw(net, optimizer, step, everything=True)
            model(*batch(step)).backward()
            optimizer.step()
            optimizer.zero_grad()

    middle = AT + 2
    for i, plan in enumerate(({"data": 2, "zero": 2}, {"data": 2, "zero": 3}, {"tensor": 2})):
        for was_frozen in (True, False):
            of_one = frozen_net()
            if not was_frozen:
                of_one.requires_grad_(True)
            steps(of_one, optimizer_of(of_one, True), of_one, 0, STEPS)
            net, optimizer, model = started(plan, was_frozen)
            steps(net, optimizer, model, 0, middle)
            model.engine.save(folder / f"{i}-{was_frozen}")
            for is_frozen in (True, False):
                other = {"data": 2, "zero": 1 if (i + was_frozen + is_frozen) % 2 else 3}
                net, optimizer, model = started(other, is_frozen)
                model.engine.load(folder / f"{i}-{was_frozen}")
                net.requires_grad_(True)
                steps(net, optimizer, model, middle, STEPS)
                state = model.engine.full_state_dict()
                for name, x in of_one.state_dict().items():
                    assert (state[name] - x).abs().max() < TOLERANCE, (plan, other, is_frozen, name)


def test_what_was_thawed_is_saved_and_loaded(ranks: Any, tmp_path: Path) -> None:
    ranks(2, saved_and_loaded, tmp_path)
