"""Optimizers of the program's own, updated apart: as offloaded chunks, and as stages of a pipeline."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import espalier
from espalier.parallel.apart import makes_one_of_all, updates_each_alone
from tests.ranks.test_habits import Lookahead
from tests.ranks.test_sums_of_losses import layers

TOLERANCE = 1e-10
Params = Any


class Own(torch.optim.Optimizer):
    """Momentum by hand."""

    def __init__(self, params: Params, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "d": 0.5})

    @property
    def held(self) -> list[tuple[dict[str, Any], torch.Tensor]]:
        pairs = [(group, p) for group in self.param_groups for p in group["params"]]
        return [(group, p) for group, p in pairs if p.grad is not None]

    def factor(self) -> Any:
        return 1.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        factor = self.factor()
        for group, p in self.held:
            state = self.state[p]
            state.setdefault("m", torch.zeros_like(p)).mul_(0.9).add_(p.grad)  # type: ignore[arg-type]
            p.add_(state["m"] * (factor * group["lr"]), alpha=-1.0)


class Limited(Own):
    """By the norm of all gradients."""

    def factor(self) -> Any:
        squares = [(p.grad**2).sum() for _, p in self.held]  # type: ignore[operator]
        return (0.2 / (sum(squares, torch.zeros(())).sqrt() + 1e-6)).clamp(max=1.0)


class Estimating(Own):
    """By a number of all that goes from step to step in the options."""

    def factor(self) -> Any:
        total = sum((p.grad * p).sum().item() for _, p in self.held)  # type: ignore[operator]
        for group in self.param_groups:
            group["d"] = 0.9 * group["d"] + 0.01 * total
        return 1.0 + self.param_groups[0]["d"] if self.param_groups else 1.0


class Counting(Own):
    """By how often it was called, which it notes in a list."""

    def __init__(self, params: Params) -> None:
        super().__init__(params)
        self.calls: list[int] = []

    def factor(self) -> Any:
        self.calls.append(len(self.calls))
        return 1.0 / len(self.calls)


class Listing(Own):
    """Keeps tensors in the order of the parameters."""

    def __init__(self, params: Params) -> None:
        super().__init__(params)
        self.means = [torch.zeros_like(p) for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        every = [p for group in self.param_groups for p in group["params"]]
        for mean, p in zip(self.means, every, strict=True):
            if p.grad is not None:
                p.sub_(mean.lerp_(p.grad, 0.3), alpha=0.1)


def averaging(params: Params) -> torch.optim.Optimizer:
    """Around another."""
    return Lookahead(torch.optim.Adam(params, 0.05))


class Counted(Own):
    """By a count of its own, which is a number: each update of a part finds the same."""

    calls = 0

    def factor(self) -> Any:
        self.calls += 1
        return 1.0 / self.calls


class Stacked(Own):
    """Computes with all parameters of a shape at once."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        of_shape: dict[tuple[int, ...], list[torch.Tensor]] = {}
        for _, p in self.held:
            of_shape.setdefault(tuple(p.shape), []).append(p)
        for shape, params in of_shape.items():
            grads = torch.stack([p.grad for p in params])  # type: ignore[misc]
            if len(shape) == 2:
                grads = grads @ grads.mT @ grads / (grads.flatten(1).norm(dim=1)[:, None, None] ** 2 + 1e-12)
            for p, grad in zip(params, grads, strict=True):
                p.sub_(grad, alpha=0.1)


class Clipping(Own):
    """By torch's function, which takes the norm over all stages."""

    def factor(self) -> Any:
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 0.2)
        return 1.0


class Noisy(Own):
    def factor(self) -> Any:
        return 1.0 + 0.5 * torch.rand(())


ALONE = (Own, Counted, Stacked)
TOGETHER = (Limited, Estimating, Counting, Listing, averaging, Clipping)
OF_ALL = (Limited, Estimating)
KINDS: tuple[Callable[[Params], torch.optim.Optimizer], ...] = (*ALONE, *TOGETHER)


def net() -> nn.Module:
    torch.manual_seed(0)
    return layers()


def trained(kind: Callable[[Params], torch.optim.Optimizer], plan: dict[str, Any] | None) -> torch.Tensor:
    model: Any = net()
    optimizer: Any = kind(model.parameters())
    if plan is not None:
        model, optimizer = espalier.prepare(model, optimizer, plan=plan)
    seen: list[Any] = []
    for step in range(4):
        generator = torch.Generator().manual_seed(step)
        x, y = torch.randn(8, 6, generator=generator), torch.randint(0, 4, (8,), generator=generator)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen.append(loss.item())
    seen += model.state_dict().values()
    return torch.cat([torch.as_tensor(x).detach().flatten().double() for x in seen])


def same(rank: int, world: int, folder: Path) -> None:
    torch.set_default_dtype(torch.float64)
    disk = {"parameters": "disk", "states": "disk", "directory": str(folder)}
    half = {"states": {"place": "host", "ratio": 0.5}}
    small = {"chunk_megabytes": 0.0005, "prefetch_megabytes": 0.0005}
    plans: list[dict[str, Any]] = [
        {"data": 2, "zero": 1, "offload": {"gradients": "host", "states": "host"}, **small},
        {"data": 2, "zero": 3, "offload": disk, **small},
        {"tensor": 2, "zero": 1, "offload": half, **small},
        {"pipe": 2},
    ]
    try:
        for kind in KINDS:
            expected = trained(kind, None)
            for plan in plans:
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    if "pipe" in plan and kind in OF_ALL:
                        with pytest.raises(ValueError, match="makes something of all its parameters"):
                            trained(kind, plan)
                        continue
                    if "pipe" in plan and kind is averaging:
                        continue  # refused in words: it writes to parameters of other stages
                    apart = (trained(kind, plan) - expected).abs().max().item()
                assert apart < TOLERANCE, f"{kind} under {plan}: {apart}"
                said = any("does not update each parameter by itself" in str(w.message) for w in caught)
                assert said == ("offload" in plan and kind in TOGETHER), (kind, plan)
    finally:
        torch.set_default_dtype(torch.float32)


def test_offloaded_updates_and_stages_equal_one_process(ranks: Any, tmp_path: Path) -> None:
    ranks(2, same, tmp_path)


def test_what_an_optimizer_does_is_tried() -> None:
    cpu, before = torch.device("cpu"), torch.get_rng_state()
    for kind in (*KINDS, Noisy, torch.optim.AdamW, torch.optim.LBFGS):
        optimizer = kind(net().parameters())
        kept = [p.detach().clone() for group in optimizer.param_groups for p in group["params"]]
        torch.set_rng_state(before)
        alone = kind in (*ALONE, torch.optim.AdamW)
        assert updates_each_alone(optimizer, cpu) == alone, kind
        assert makes_one_of_all(optimizer) == (kind in OF_ALL), kind
        assert torch.equal(torch.get_rng_state(), before) and not optimizer.state
        assert getattr(optimizer, "calls", []) in ([], 0)
        held = [p for group in optimizer.param_groups for p in group["params"]]
        assert all(p.grad is None and torch.equal(p, was) for p, was in zip(held, kept, strict=True))
