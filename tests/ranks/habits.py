"""A loop around a prepared model, compared with the same loop on one process."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import espalier

TOLERANCE = 1e-9
Lay = Callable[..., Any]  # a model and optimizers, as they are or prepared


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(8, 6, dtype=torch.float64, generator=generator)
    return x, torch.randint(0, 4, (8,), generator=generator)


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    x, y = batch(step)
    return F.cross_entropy(model(x), y)


def stepped(loss: torch.Tensor, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    """The loss, by which a step was made."""
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> torch.Tensor:
    """The loss before a step."""
    return stepped(loss_of(model, step), optimizer)


def numbers(values: list[Any]) -> torch.Tensor:
    return torch.cat([espalier.full_tensor(torch.as_tensor(v)).detach().flatten().double() for v in values])


def as_it_is(model: nn.Module, *more: Any) -> Any:
    """What ``prepare`` gives, of plain torch."""
    return (model, *more) if more else model


def compare(
    program: Any, plans: Iterable[tuple[dict[str, Any], dict[str, Any]]], tolerance: float = TOLERANCE
) -> None:
    """That a program gives by each plan, and with these options of ``prepare``, what plain torch gives."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        torch.manual_seed(0)
        expected = numbers(program(as_it_is))
        for plan, options in plans:
            torch.manual_seed(0)
            given = numbers(program(partial(espalier.prepare, plan=plan, **options)))
            apart = (given - expected).abs().max().item()
            assert apart < tolerance, f"{program.__name__} under {plan}, {options}: {apart}"
    finally:
        torch.set_default_dtype(before)
