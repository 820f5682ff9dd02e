"""What a stage's forward writes to: gradients as where one micro-batch follows another."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from espalier.parallel.pipeline import ActionKind, generate, split
from espalier.parallel.pipeline.left import LeftByForwards
from espalier.parallel.schedules.actions import Action

PARTS = 4


class Writing(nn.Module):
    """What has a weight to which its forward writes."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(6, 6, dtype=torch.float64))


class NormalisedData(Writing):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.w.data.copy_(F.normalize(self.w.data + 0.1 * x.detach().mean(0), dim=1))
        return F.linear(x, self.w).tanh()


class NormalisedWithoutGrad(Writing):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.w.copy_(F.normalize(self.w + 0.1 * x.mean(0), dim=1))
        return F.linear(x, self.w).tanh()


class WritesAfterUse(Writing):
    """On one process the backward pass finds what was written after the use."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.linear(x, self.w).tanh()
        self.w.data.mul_(0.9).add_(0.1 * x.detach().mean(0))
        return y


class Quantized(nn.Module):
    """A codebook follows averages, and is to be orthogonal."""

    average: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.codebook = nn.Parameter(torch.randn(5, 6, dtype=torch.float64))
        self.register_buffer("average", torch.randn(5, 6, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        nearest = torch.cdist(x.detach(), self.codebook.detach()).argmin(-1)
        with torch.no_grad():
            self.average.mul_(0.9).add_(F.one_hot(nearest, 5).to(x.dtype).t() @ x.detach(), alpha=0.1)
            self.codebook.data.copy_(self.average)
        code = F.embedding(nearest, self.codebook)
        unit = F.normalize(self.codebook, dim=-1)
        return x + 0.1 * code + (unit @ unit.t()).square().mean()


class BufferInProducts(nn.Module):
    codebook: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codebook", torch.randn(6, 6, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = (x @ self.codebook.t()).softmax(-1) @ self.codebook
        self.codebook.data.mul_(0.9).add_(0.1 * x.detach().mean(0))
        return x + y


class Bounded(nn.Module):
    """An embedding brings rows to a norm when they are asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(7, 6, max_norm=0.5, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        picked = (x.detach()[:, 0].abs() * 3).long() % 7
        return x + self.rows(picked) + F.linear(F.linear(x, self.rows.weight), self.rows.weight.t())


class Restarted(Writing):
    """Written to where values say so: with those of the run for shapes, it is not."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.detach().mean() > 0.5:
            self.w.data.mul_(0.5).add_(x.detach().mean(0))
        return F.linear(x, self.w).tanh()


class OwnSpectralNorm(Writing):
    def __init__(self) -> None:
        super().__init__()
        self.u = nn.Parameter(torch.randn(6, dtype=torch.float64), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        v = F.normalize(self.w.data.t() @ self.u.data, dim=0)
        self.u.data = F.normalize(self.w.data @ v, dim=0)
        return x + F.linear(x, self.w / self.u.dot(self.w @ v))


MODELS = [
    NormalisedData, NormalisedWithoutGrad, WritesAfterUse, Quantized, BufferInProducts, Bounded,
    OwnSpectralNorm, Restarted,
]  # fmt: skip


def net(writing: nn.Module) -> nn.Sequential:
    linears = [nn.Linear(6, 6, dtype=torch.float64) for _ in range(4)]
    nn.init.constant_(linears[0].bias, 1.0)
    return nn.Sequential(linears[0], writing, linears[1], nn.Tanh(), *linears[2:])


def _after(action: Action) -> set[Action]:
    """What of another stage comes before an action."""
    kind, stage, m = action
    if kind is ActionKind.F:
        return {Action(kind, 0, m)} if stage else set()
    return set() if stage else {Action(kind, 1, m)}


@pytest.mark.parametrize("kind", ["1f1b", "gpipe"])
@pytest.mark.parametrize("make", MODELS)
def test_gradients_are_of_what_the_own_forward_left(make: Callable[[], nn.Module], kind: str) -> None:
    torch.manual_seed(0)
    one = net(make())
    piped = copy.deepcopy(one)
    parts = torch.randn(PARTS, 4, 6, dtype=torch.float64).unbind()
    for x in parts:
        one(x).square().mean().backward()
    stages = split(piped, 2, parts[0], ["2"]).stages
    left = [LeftByForwards(stage.left) for stage in stages]
    given: dict[tuple[int, int], tuple[torch.Tensor, ...]] = {}
    gave: dict[tuple[int, int], tuple[torch.Tensor, ...]] = {}
    waiting = [list(row) for row in generate(kind, ranks=2, micro_batches=PARTS).actions]
    done: set[Action] = set()
    while any(waiting):
        row = next(row for row in waiting if row and _after(row[0]) <= done)
        action = row.pop(0)
        done.add(action)
        _, stage, m = action
        if action.kind is ActionKind.F:
            left[stage].forward(m)
            came = tuple(x.detach().requires_grad_() for x in gave[0, m]) if stage else ()
            given[stage, m], out = came, stages[stage](came, parts[m])
            gave[stage, m] = out if isinstance(out, tuple) else (out.square().mean(),)
            continue
        left[stage].backward(m)
        torch.autograd.backward(gave[stage, m], None if stage else [x.grad for x in given[1, m]])
        left[stage].end(m)
    for of in left:
        of.go_on()
    for (name, p), q in zip(one.named_parameters(), piped.parameters(), strict=True):
        assert torch.allclose(p, q, rtol=0, atol=1e-12), name
        if p.requires_grad:
            assert torch.allclose(p.grad, q.grad, rtol=0, atol=1e-12), name  # type: ignore[arg-type]
    for (name, b), c in zip(one.named_buffers(), piped.buffers(), strict=True):
        assert torch.allclose(b, c, rtol=0, atol=1e-12), name


def test_running_means_of_norms_are_not_kept() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6), nn.Linear(6, 6))
    stages = split(model, 2, torch.randn(4, 6), ["2"]).stages
    assert [stage.left() for stage in stages] == [{}, {}]
