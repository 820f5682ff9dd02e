"""Gradients of inputs, as adversarial training, gradient penalties and equations in derivatives take them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import espalier
from espalier.compat.torch import DistributedDataParallel

TOLERANCE = 1e-10
Work = Callable[[Callable[[torch.Tensor], torch.Tensor], torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def equation(model: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The residual of a differential equation, with second derivatives of the output."""
    x = x.clone().requires_grad_()
    u = model(x)
    (du,) = torch.autograd.grad(u.sum(), x, create_graph=True)
    (d2u,) = torch.autograd.grad(du[:, 0].sum(), x, create_graph=True)
    return (d2u[:, :1] + u * du[:, 1:2] - torch.sin(x[:, :1])).square().mean(), du


def penalty(model: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A critic's loss, whose slope is held to 1 (WGAN-GP)."""
    x = x.clone().requires_grad_()
    score = model(x)
    (slope,) = torch.autograd.grad(score, x, torch.ones_like(score), create_graph=True)
    return score.square().mean() + (slope.norm(dim=-1) - 1).square().mean(), slope


def attack(model: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Training on inputs that were moved along their gradient, without those of the parameters."""
    x = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(model(x).square().mean(), x)
    return model(x.detach() + 0.1 * grad).square().mean(), grad


def learned(model: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The input is a leaf, and a part of the loss beside the output."""
    x = x.clone().requires_grad_()
    return model(x).square().mean() + x.square().mean(), x


WORKS: tuple[Work, ...] = (equation, penalty, attack, learned)


def flux(model: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A derivative of a product of the output and its derivative by a part of the input, and a boundary; a
    parameter of the model weighs a term."""
    t, place = x[:, :1].clone().requires_grad_(), x[:, 1:].clone().requires_grad_()
    u = model(torch.cat([t, place], 1))
    one = torch.ones_like(u)
    (du,) = torch.autograd.grad(u, place, one, create_graph=True)
    (ut,) = torch.autograd.grad(u, t, one, create_graph=True)
    (dflux,) = torch.autograd.grad((u * du[:, :1]).sum(), place, create_graph=True)
    (d2u,) = torch.autograd.grad(du, place, torch.ones_like(du), create_graph=True)
    last = [*model.parameters()][-1]
    inside = (ut + dflux[:, :1] - last * d2u[:, :1] * 0.1 + u * last).square().mean()
    return inside + 2 * (model(x[:3] + 1) - 1).square().mean() + du.square().mean(), du


def parts_of(x: torch.Tensor, sizes: list[int] | None) -> list[torch.Tensor]:
    return [x] if sizes is None else list(x.split(sizes))


def compared(
    rank: int,
    wrapped: Callable[[nn.Module, Any], Any],
    sizes: list[int] | None,
    what: Any,
    works: tuple[Work, ...] = WORKS,
) -> None:
    """Three steps beside one process, which averages over the ranks' rows where each has its own."""
    for work in works:
        ours, plain = net(), net()
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (ours, plain)]
        model, optimizers[0] = wrapped(ours, optimizers[0])
        for step in range(3):
            x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
            parts = parts_of(x, sizes)
            place = rank if sizes is not None else 0
            loss, seen = work(model, parts[place])
            loss.backward()
            results = [work(plain, part) for part in parts]
            for expected, _ in results:
                expected.backward()
            for p in plain.parameters():
                p.grad /= len(parts)
            grads = [x.grad if work is learned else x for x in (seen, results[place][1])]
            for got, expected in (grads, (loss, results[place][0])):
                off = (espalier.full_tensor(got) - expected).abs().max()
                assert off < TOLERANCE, (work.__name__, what, step, float(off))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            for p, q in zip(ours.parameters(), plain.parameters(), strict=True):
                assert (espalier.full_tensor(p) - q).abs().max() < TOLERANCE, (work.__name__, what, step)


def on_two(rank: int, world: int) -> None:
    for plan in ({"data": 2}, {"data": 2, "zero": 2}, {"data": 2, "zero": 3}, {"tensor": 2}):

        def wrapped(m: nn.Module, optimizer: Any, rows: Any = "all", plan: Any = plan) -> Any:
            return espalier.prepare(m, optimizer, plan=plan, rows=rows)[:2]

        compared(rank, wrapped, None, plan)
        if "data" in plan:
            compared(rank, lambda m, o, w=wrapped: w(m, o, "own"), [4, 4], (plan, "own"))
    compared(rank, lambda m, o: espalier.prepare(m, o, plan={"data": 2}, rows="own")[:2], [5, 3], "uneven")
    compared(rank, lambda m, o: (DistributedDataParallel(m), o), [4, 4], "ddp")


def products_in_a_pipeline(rank: int, world: int) -> None:
    for work in (equation, flux):
        for plan, rows in (({"pipe": 2}, "own"), ({"pipe": 2, "accumulate": 2}, "all")):

            def wrapped(m: nn.Module, optimizer: Any, rows: Any = rows, plan: Any = plan) -> Any:
                return espalier.prepare(m, optimizer, plan=plan, rows=rows)[:2]

            compared(rank, wrapped, None, plan, (work,))


def in_a_pipeline(rank: int, world: int) -> None:
    model = espalier.prepare(net(), None, plan={"pipe": 2})[0]
    x = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).requires_grad_()
    (expected,) = torch.autograd.grad(net()(x).sum(), x)
    (given,) = torch.autograd.grad(model(x).sum(), x)
    assert (given - expected).abs().max() < 1e-12 and x.grad is None


def scaled(rank: int, world: int) -> None:
    """In float16 what a program sees of an input's gradient is without the scale of the loss."""
    plan = {"data": 2, "precision": {"compute": "float16", "loss_scale": {"init_scale": 1024.0}}}
    for rows, part in (("all", slice(None)), ("own", slice(4 * rank, 4 * rank + 4))):
        ours, plain = net().float(), net().float()
        model = espalier.prepare(ours, torch.optim.SGD(ours.parameters(), lr=0.1), plan=plan, rows=rows)[0]
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))[part]
        got, expected = x.clone().requires_grad_(), x.clone().requires_grad_()
        model(got).float().square().mean().backward()
        plain(expected).square().mean().backward()
        assert got.grad is not None and expected.grad is not None
        assert (got.grad - expected.grad).abs().max() < 1e-2 * expected.grad.abs().max(), rows


def test_gradients_of_inputs_are_those_of_one_process(ranks: Any) -> None:
    ranks(2, on_two)
    ranks(2, scaled)


def test_gradients_of_inputs_of_a_pipeline(ranks: Any) -> None:
    ranks(2, in_a_pipeline)


@pytest.mark.filterwarnings("ignore:torch.autograd.grad.*in a pipeline", "ignore:.*in several stages")
@pytest.mark.filterwarnings("ignore:A value is asked for that lies on ranks")
def test_products_with_derivatives_of_inputs_in_a_pipeline(ranks: Any) -> None:
    ranks(2, products_in_a_pipeline)
