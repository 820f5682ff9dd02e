"""Training by a plan on the simulated device, and what it makes the device tell."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn

import espalier
from tests.ranks.test_engine import batch
from tests.ranks.test_pipeline import model
from tests.sim.order import Entry
from tests.sim.transport import Shared

STEPS = 3


class Run(NamedTuple):
    """Of one rank.

    Attributes:
        told: of all steps but the first: (kind, what, where), and how often.
        calls: what the rank asked its communicators for, and waited for, from the beginning on.
        losses: of all steps.
        weights: the model's, whole, after the last; of rank 0 alone.
    """

    told: Counter[tuple[str, str, str]]
    calls: list[Entry]
    losses: list[float]
    weights: dict[str, torch.Tensor]


class Regression(nn.Module):
    """Its loss is a plain mean, and one of its parameters has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(37, 8), nn.Linear(8, 1)
        self.unused = nn.Parameter(torch.zeros(4))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
        out = self.head(self.embed(input_ids)).squeeze(-1)
        return SimpleNamespace(loss=(out - labels.to(out.dtype)).square().mean())


class Recurs(nn.Module):
    """Goes on from what it gave last, and counts."""

    def __init__(self) -> None:
        super().__init__()
        self.l, self.calls = nn.Linear(8, 8), 0
        self.h: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = torch.tanh(self.l(x) if self.h is None else self.l(x) + self.h) * (1 + 0.1 * self.calls)
        self.h = x.detach()
        return x


@dataclass
class Loss:
    """What a model gives."""

    loss: torch.Tensor


class Recurrent(nn.Module):
    """Its layers remember."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(37, 8), nn.Linear(8, 1)
        self.layers = nn.ModuleList([Recurs(), Recurs()])

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Loss:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        out = self.head(x).squeeze(-1)
        return Loss((out - labels.to(out.dtype)).square().mean())


OWN: dict[str, Callable[[], nn.Module]] = {"regression": Regression, "recurrent": Recurrent}


def counted(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Over how many elements that is a mean, as a tensor on the device: the batch is not there yet."""
    return torch.ones(batch["labels"].shape, device=torch.accelerator.current_accelerator()).sum()


def built(kind: str, changes: dict[str, Any]) -> nn.Module:
    """A model with weights drawn always alike."""
    if kind not in OWN:
        return model(kind, **changes)
    torch.manual_seed(1)
    return OWN[kind]()


def parts(case: Mapping[str, Any]) -> tuple[nn.Module, torch.optim.Optimizer, list[dict[str, torch.Tensor]]]:
    """A model, its optimizer, and a batch for each step."""
    net = built(case.get("kind", "gpt"), case.get("changes", {})).to(case.get("dtype", torch.float64))
    optimizer = case.get("optimizer", torch.optim.AdamW)(net.parameters(), lr=1e-2)
    return net, optimizer, [batch(8, step) for step in range(STEPS)]


def trained(
    shared: Shared, rank: int, world: int, plan: dict[str, Any], case: Mapping[str, Any], folder: str
) -> Run:
    """Train a model by a plan.

    Args:
        case: ``kind`` of the model, ``changes`` of its sizes, ``dtype``, ``optimizer``; whether to count
            ``kernels``; ``default``: whether tensors are made on the device.
        folder: for what is on disk.
    """
    if "directory" in plan.get("offload", {}):
        plan = {**plan, "offload": {**plan["offload"], "directory": folder}}
    net, optimizer, batches = parts(case)
    with torch.device("sim") if case.get("default") else nullcontext():
        engine = espalier.initialize(net, optimizer, plan, max_grad_norm=0.5, **case.get("more", {}))
        assert engine.mesh.device().type == "sim"
        losses = [engine.train_step(batches[0])]
        with shared.sim.watched(kernels=case.get("kernels", False)) as told:
            losses += [engine.train_step(one) for one in batches[1:]]
    calls = list(shared.log)
    weights = {name: x.cpu() for name, x in engine.full_state_dict().items()}
    return Run(
        Counter({(of.kind, of.what, of.where): times for of, times in told.items()}),
        calls,
        [loss.item() for loss in losses],
        weights if rank == 0 else {},
    )


def alone(case: Mapping[str, Any]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights of the same training by plain torch, on the CPU."""
    net, optimizer, batches = parts(case)
    losses = []
    for one in batches:
        loss = net(**one).loss
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, net.state_dict()
