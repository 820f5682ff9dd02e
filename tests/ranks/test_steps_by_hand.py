"""What optimizers written for one process do within a step: gradients of their own, calls on lists."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import espalier

PLANS: tuple[dict[str, Any], ...] = (
    {"data": 2},
    {"data": 2, "zero": 1},
    {"data": 2, "zero": 3},
    {"tensor": 2},
    {"pipe": 2},
)


def net() -> Any:
    torch.manual_seed(0)
    sizes = (6, 12), (12, 12), (12, 4)
    return nn.Sequential(*(nn.Sequential(nn.Linear(*size), nn.GELU()) for size in sizes)).double()


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(8, 6, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 4, (8,), generator=generator)


def of_a_drawing(model: Any, looks: bool = False) -> list[Any]:
    """Gradients that are plain tensors, in the place of those that came back."""
    out = []
    for i, p in enumerate(model.parameters()):
        if looks:
            out.append(p.grad.norm())
        p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(i), dtype=p.dtype)
    return out


def lists(model: Any) -> list[Any]:
    """By sums, which are of all ranks, and by a number for each row and each column."""
    weights = [p for p in model.parameters() if p.ndim == 2]
    grads = [p.grad.clone() for p in weights]
    out: list[Any] = []
    sums, rows = [g.sum() for g in grads], [g.norm(dim=1, keepdim=True) for g in grads]
    columns = [g.abs().sum(dim=0) for g in grads]
    plain = [torch.linspace(0.1, 1, g.shape[0], dtype=g.dtype).unsqueeze(1) for g in grads]
    for others in (sums, rows, columns, plain):
        out += [*torch._foreach_mul(grads, others), *torch._foreach_add(grads, others)]
    torch._foreach_mul_(grads, [(g * g).sum() for g in grads])
    torch._foreach_div_(grads, rows)
    torch._foreach_addcmul_(grads, columns, sums)
    torch._foreach_mul_(sums, [p.sum() for p in weights])
    for p, g in zip(weights, grads, strict=True):
        p.grad = g
    return [*out, *sums]


def trained(work: Callable[[Any], list[Any]], plan: dict[str, Any] | None) -> torch.Tensor:
    model = net()
    optimizer: Any = torch.optim.SGD(model.parameters(), 0.1)
    if plan is not None:
        model, optimizer = espalier.prepare(model, optimizer, plan=plan)
    seen: list[Any] = []
    for step in range(2):
        x, y = batch(step)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        with torch.no_grad():
            seen += work(model)
        optimizer.step()
        seen.append(loss.item())
    seen += model.state_dict().values()
    return torch.cat([espalier.full_tensor(torch.as_tensor(x)).detach().flatten().double() for x in seen])


class Named(torch.Tensor):
    """As libraries have them for images, boxes, masks."""


def named(model: Any) -> list[Any]:
    """A metric, and a loss, of what a library makes its own tensor of."""
    x, y = batch(7)
    out = model(x)
    guesses = out.argmax(-1).contiguous().as_subclass(Named).view(-1)
    assert len(guesses) == 8 and isinstance(guesses, Named)
    with torch.enable_grad():
        loss = F.cross_entropy(model(x).as_subclass(Named).as_subclass(torch.Tensor), y)
        grads = torch.autograd.grad(loss, [*model.parameters()])
    return [guesses.as_subclass(torch.Tensor).double(), loss.detach(), *grads]


def equal(
    rank: int,
    world: int,
    work: Callable[[Any], list[Any]],
    plans: tuple[dict[str, Any], ...] = PLANS,
) -> None:
    expected = trained(work, None)
    for plan in plans:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # numbers of other stages, each asked for by itself
            apart = (trained(work, plan) - expected).abs().max().item()
        assert apart < 1e-9, f"{plan}: {apart}"


def given(rank: int, world: int) -> None:
    equal(rank, world, of_a_drawing)


def seen_and_given(rank: int, world: int) -> None:
    equal(rank, world, lambda model: of_a_drawing(model, looks=True))


def on_lists(rank: int, world: int) -> None:
    equal(rank, world, lists)


def of_a_class(rank: int, world: int) -> None:
    equal(rank, world, named, PLANS[:-1])


def test_tensors_of_a_librarys_class_are_whole(ranks: Any) -> None:
    ranks(2, of_a_class)


def test_a_plain_gradient_is_the_whole_one(ranks: Any) -> None:
    ranks(2, given)
    ranks(2, seen_and_given)


def test_lists_meet_sums_and_tensors_of_other_shapes(ranks: Any) -> None:
    ranks(2, on_lists)
