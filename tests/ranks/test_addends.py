"""Addends that become their sum where they are: whoever knew them, or holds them still, sees no harm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import espalier
from espalier import Mesh, Partial, Replicate, Shard
from espalier.tensor import inputs

Program = Callable[..., torch.Tensor]


def product(x: Any, w: Any) -> Any:
    return F.linear(x, w)


def layer(x: Any, w: Any, v: Any) -> Any:
    """The usual way."""
    return (product(x, w) + v).square().sum()


def used_again(x: Any, w: Any, v: Any) -> Any:
    """By several calls, after it was summed, and by its name."""
    h = product(x, w)
    y = h + v
    return (y * h).sum() + h.cos().sum() + (h @ h.t()).sum()


def used_before(x: Any, w: Any, v: Any) -> Any:
    """By calls that take addends as they are."""
    h = product(x, w)
    twice, cut = h * 2, h[1:]
    return (h + v).square().sum() + (twice.square()).sum() + cut.square().sum()


def saved(x: Any, w: Any, v: Any) -> Any:
    """Backward of the scaling needs the addends."""
    h = product(x, w)
    y = h * v.sum()
    return (h + v).square().sum() + y.square().sum()


def saved_by_hooks(x: Any, w: Any, v: Any) -> Any:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        return saved(x, w, v)


def viewed(x: Any, w: Any, v: Any) -> Any:
    h = product(x, w)
    rows = h.view(2, 2, 4)
    y = h + v
    return (rows * v[:2]).square().sum() + y.square().sum()


def both_sides(x: Any, w: Any, v: Any) -> Any:
    h = product(x, w)
    return (h * h).sum() + (h + v).square().sum()


def twice_in_a_call(x: Any, w: Any, v: Any) -> Any:
    h = product(x, w)
    return torch.cat([h.sin(), torch.stack([h, h.exp()]).sum(0), torch.where(v > 0, h, h), v]).square().sum()


def written(x: Any, w: Any, v: Any) -> Any:
    h = product(x, w)
    y = h + v
    h.mul_(3)
    return (y * 2).square().sum() + h.square().sum()


def detached(x: Any, w: Any, v: Any) -> Any:
    h = product(x, w)
    before = h.detach()
    y = h + v
    return (y * before).sum() + (y * h.detach()).sum()


def retained(x: Any, w: Any, v: Any) -> Any:
    h = product(x, w)
    h.retain_grad()
    return (h + v).square().sum()


def hooked(x: Any, w: Any, v: Any) -> Any:
    h = product(x, w)
    h.register_hook(lambda grad: grad * 2)
    y = (h + v).square().sum()
    h.register_hook(lambda grad: grad * 3)
    return y + h.square().sum()


def penalty(x: Any, w: Any, v: Any) -> Any:
    """Second derivatives, through what knew the addends and through what knows the sum."""
    h = product(x, w)
    y = (h * 2).square().sum() + ((h + v) ** 3).sum()
    (grad,) = torch.autograd.grad(y, x, create_graph=True)
    return y + grad.square().sum()


def of_itself(x: Any, w: Any, v: Any) -> Any:
    """Derivatives by the addends."""
    h = product(x, w)
    y = (h + v).square().sum() + (h**3).sum()
    (grad,) = torch.autograd.grad(y, h, create_graph=True)
    return y + (grad * h).sum()


def biased(x: Any, w: Any, v: Any) -> Any:
    return (F.linear(torch.stack([x, x]), w, v[0]) + v).square().sum()


PROGRAMS: list[Program] = [
    layer, used_again, used_before, saved, saved_by_hooks, viewed, both_sides, twice_in_a_call, written,
    detached, retained, hooked, penalty, of_itself, biased,
]  # fmt: skip


PRODUCTS = ("MmBackward0", "AddmmBackward0", "ViewBackward0", "UnsafeViewBackward0")


def values(program: Program, *leaves: torch.Tensor) -> list[torch.Tensor]:
    loss = program(*leaves)
    return [loss, *torch.autograd.grad(loss, leaves)]


def whole(x: Any) -> torch.Tensor:
    return x.full_tensor(grad_placements=[Replicate()]) if isinstance(x, espalier.DTensor) else x


def same_values(rank: int, world: int) -> dict[str, tuple[int, float]]:
    """Of each program how many products were summed in place, and how far it is from one process."""
    mesh = Mesh.from_env({"tensor": world})
    torch.manual_seed(0)
    alone = [torch.randn(n, m, dtype=torch.float64) for n, m in ((4, 6), (4, 6), (4, 4))]
    lies = [Shard(1)], [Shard(1)], [Replicate()]
    told = {}
    for program in PROGRAMS:
        sums: list[str] = []
        with pytest.MonkeyPatch.context() as patch:

            def noted(x: Any, y: Any, sums: list[str] = sums, swap: Any = inputs.swapped) -> None:
                sums.append(type(x.grad_fn).__name__)
                swap(x, y)

            patch.setattr(inputs, "swapped", noted)
            leaves = [
                espalier.distribute_tensor(x, mesh, at).requires_grad_()
                for x, at in zip(alone, lies, strict=True)
            ]
            mine = [whole(x) for x in values(program, *leaves)]
        wanted = values(program, *(x.clone().requires_grad_() for x in alone))
        apart = max(
            (a - b).abs().max().item() / b.abs().max().item() for a, b in zip(mine, wanted, strict=True)
        )
        told[program.__name__] = sum(name in PRODUCTS for name in sums), apart
    x, w, _ = (espalier.distribute_tensor(x, mesh, at) for x, at in zip(alone, lies, strict=True))
    h = product(x, w)
    h + 1
    assert h.placements == (Partial(),), "without a graph somebody may hold what is to be summed later"
    return told


@pytest.mark.world(2)
def test_whoever_knows_addends_sees_no_harm(ranks: Callable[..., list[Any]]) -> None:
    for told in ranks(2, same_values):
        assert all(apart < 1e-12 for _, apart in told.values()), told
        sums = {name: n for name, (n, _) in told.items()}
        assert sums["layer"] and sums["used_again"], told
        unseen = ("used_before", "saved", "saved_by_hooks", "viewed", "detached", "retained")
        assert not any(sums[name] for name in unseen), told
