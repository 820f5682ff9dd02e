"""Programs drawn by lot: stateful modules, writes to parameters, modules chosen by data or by count, random
draws, modules used several times, second derivatives, parametrizations; and plans for them."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from tests.zoo.cases import Batch, Case

ROWS, WIDTH, CLASSES, IDS = 8, 8, 5, 11
Tensor = torch.Tensor


class Dense(nn.Module):
    """A layer, perhaps under a parametrization."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.line = nn.Linear(WIDTH, WIDTH)
        if kind == "spectral":
            parametrizations.spectral_norm(self.line)
        elif kind == "weight":
            parametrizations.weight_norm(self.line)
        elif kind == "own":
            parametrize.register_parametrization(self.line, "weight", Mirrored())

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.line(x))


class Mirrored(nn.Module):
    """A symmetric matrix."""

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * (x + x.t())


class Counted(nn.Module):
    """What it gives hangs on how often it was called: it counts on itself, in a list, and in a buffer."""

    number: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.line, self.calls, self.seen = nn.Linear(WIDTH, WIDTH), 0, []  # type: ignore[var-annotated]
        self.register_buffer("number", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(self.calls)
        self.number += 1
        return torch.tanh(self.line(x) * (1 + 0.1 * len(self.seen)) + 0.01 * self.number)


class Follower(nn.Module):
    """A second set of weights that follows the first, written to in forward in one of four ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.own = how, nn.Linear(WIDTH, WIDTH)
        self.mean = copy.deepcopy(self.own).requires_grad_(False)

    @torch.no_grad()
    def follow(self) -> None:
        for m, p in zip(self.mean.parameters(), self.own.parameters(), strict=True):
            if self.how == "mul":
                m.mul_(0.8).add_(p, alpha=0.2)
            elif self.how == "lerp":
                m.lerp_(p, 0.2)
            elif self.how == "copy":
                m.copy_(0.8 * m + 0.2 * p)
            else:
                m.data = 0.8 * m.data + 0.2 * p.data

    def forward(self, x: Tensor) -> Tensor:
        self.follow()
        return torch.tanh(self.own(x)) + self.mean(x).detach()


class Chosen(nn.Module):
    """One of some modules: by the values it sees, by a count, or by Python's dice."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.calls = how, 0
        self.parts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.how == "values":
            i = int(x.detach().abs().sum() * 10) % 3
        else:
            i = random.randrange(3) if self.how == "dice" else self.calls % 3
        return torch.tanh(self.parts[i](x))


class Experts(nn.Module):
    """Each row goes to one of some modules; one that none chose is not called."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.parts = nn.Linear(WIDTH, 5), nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        weight, chosen = self.gate(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for i, part in enumerate(self.parts):
            (rows,) = torch.where(chosen == i)
            if len(rows):
                out = out.index_add(0, rows, torch.tanh(part(x[rows])) * weight[rows, None])
        return out


class Twice(nn.Module):
    """One layer, used twice, and its weight once more."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(F.linear(torch.tanh(self.line(self.line(x))), self.line.weight.t()))


class Noisy(nn.Module):
    """Random numbers, as people draw them."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.line = how, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.line(x)
        if self.how == "like":
            return torch.tanh(h + 0.1 * torch.randn_like(h))
        if self.how == "dropout":
            return F.dropout(torch.tanh(h), 0.3, self.training)
        if self.how == "scalar":
            return torch.tanh(h * torch.rand(()).to(h.dtype))
        return torch.tanh(h[torch.randperm(len(h))])


class Slope(nn.Module):
    """A gradient within forward, through which a gradient flows."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Softplus(), nn.Linear(WIDTH, 1))

    def forward(self, x: Tensor) -> Tensor:
        at = x if x.requires_grad else x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(self.energy(at).sum(), at, create_graph=True)
        return x - 0.3 * slope


class Bank(nn.Module):
    """A buffer that remembers, written to at some rows."""

    bank: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("bank", torch.randn(4, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.line(x))
        out = h + (h @ self.bank.t().clone()).softmax(-1) @ self.bank.clone()
        with torch.no_grad():
            self.bank[1:3] = 0.9 * self.bank[1:3] + 0.1 * h.mean(0)
        return out


class Normed(nn.Module):
    """A norm over the batch, whose statistics are buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.line, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.norm(self.line(x)))


BRICKS: dict[str, Callable[[random.Random], nn.Module]] = {
    "dense": lambda lot: Dense(lot.choice(["plain", "spectral", "weight", "own"])),
    "counted": lambda lot: Counted(),
    "follower": lambda lot: Follower(lot.choice(["mul", "lerp", "copy", "data"])),
    "chosen": lambda lot: Chosen(lot.choice(["values", "count", "dice"])),
    "experts": lambda lot: Experts(),
    "twice": lambda lot: Twice(),
    "noisy": lambda lot: Noisy(lot.choice(["like", "dropout", "scalar", "permutation"])),
    "slope": lambda lot: Slope(),
    "bank": lambda lot: Bank(),
    "normed": lambda lot: Normed(),
}


class Drawn(nn.Module):
    """Some of these, one after the other or beside each other, some of them used again."""

    def __init__(self, lot: random.Random) -> None:
        super().__init__()
        self.embed = nn.Embedding(IDS, WIDTH, max_norm=2.0 if lot.random() < 0.3 else None)
        names = [lot.choice(sorted(BRICKS)) for _ in range(lot.randint(2, 4))]
        self.blocks = nn.ModuleList(BRICKS[name](lot) for name in names)
        self.order = [*range(len(names)), *(lot.randrange(len(names)) for _ in range(lot.randint(0, 1)))]
        self.residual, self.names = [lot.random() < 0.5 for _ in self.order], names
        self.head = nn.Linear(WIDTH, CLASSES)
        if lot.random() < 0.2:
            self.blocks[0].requires_grad_(False)

    def forward(self, x: Tensor, ids: Tensor, y: Tensor) -> Tensor:
        x = x + self.embed(ids)
        for i, beside in zip(self.order, self.residual, strict=True):
            x = x + self.blocks[i](x) if beside else self.blocks[i](x)
        return F.cross_entropy(self.head(x), y)


def case(seed: int) -> Case:
    """The program of a seed."""

    def build() -> nn.Module:
        return Drawn(random.Random(seed))

    def draw(model: nn.Module, generator: torch.Generator) -> Iterator[Batch]:
        yield {
            "x": torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64),
            "ids": torch.randint(0, IDS, (ROWS,), generator=generator),
            "y": torch.randint(0, CLASSES, (ROWS,), generator=generator),
        }

    return Case(f"drawn/{seed}", build, draw)


def plan(seed: int) -> dict[str, Any]:
    """A plan for it, of two ranks or four."""
    lot = random.Random(1000 + seed)
    sizes = dict.fromkeys(("data", "replicate", "tensor", "pipe"), 1)
    for _ in range(lot.choice([1, 1, 2])):
        sizes[lot.choice(["data", "data", "tensor", "tensor", "replicate", "pipe"])] *= 2
    if sizes["pipe"] == 4:
        sizes |= {"pipe": 2, "data": 2}
    found: dict[str, Any] = {axis: n for axis, n in sizes.items() if n > 1}
    found["zero"] = lot.choice([1, 2, 3] if sizes["replicate"] > 1 else [0, 1, 2, 3, 3])
    if sizes["tensor"] == 4 and lot.random() < 0.7:
        found["tensor_mode"] = "2d"
    elif sizes["tensor"] > 1:
        found["sequence_parallel"] = lot.choice([False, True])
    if sizes["pipe"] > 1:
        found["accumulate"] = lot.choice([2, 4])
    elif lot.random() < 0.3:
        found["accumulate"] = 2
    found["recompute"] = lot.choice(["none", "none", "full", "selective"])
    found["chunk_megabytes"] = lot.choice([25.0, 0.001])
    found["prefetch_megabytes"] = lot.choice([50.0, 0.0])
    return found
