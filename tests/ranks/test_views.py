"""Writes through views: also where the view had to be a copy, the tensor it was taken from is written."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from espalier import Mesh, Replicate, Shard, distribute_tensor, full_tensor

Write = Callable[[torch.Tensor], Any]


def _added(h: torch.Tensor) -> None:
    h[1:3] += 1


def _later(h: torch.Tensor) -> None:
    top, bottom = h[:2], h[2:]
    top.add_(bottom)


WRITES: dict[str, Write] = {
    "a slice": lambda h: h[1:3].mul_(3),
    "a slice, in place by an operator": _added,
    "a row": lambda h: h[2].zero_(),
    "a column": lambda h: h[:, 1].add_(5),
    "every other row": lambda h: h[::2].mul_(2),
    "narrow": lambda h: h.narrow(0, 1, 2).fill_(1.0),
    "a view": lambda h: h.view(-1).mul_(2),
    "a view that does not fit the cuts": lambda h: h.view(3, 8).mul_(2),
    "a slice of a view": lambda h: h.view(-1)[3:7].mul_(2),
    "a view of a slice": lambda h: h[1:3].view(-1)[1:5].exp_(),
    "a slice of a transpose": lambda h: h.t()[1:3].mul_(2),
    "a diagonal": lambda h: h.diagonal().mul_(3),
    "an item of a slice": lambda h: h[1:3].__setitem__(0, 4.0),
    "one slice, then another": lambda h: (h[1:3].mul_(2), h[0:2].mul_(3)),
    "two slices of one gathering": _later,
    "a copy": lambda h: h[1:3].copy_(h[0:2] * 2),
    "an activation": lambda h: F.relu(h[0:3], inplace=True),
    "a list of tensors": lambda h: torch._foreach_mul_([h[1:3]], 2.0),
    "pieces": lambda h: [piece.mul_(2) for piece in h.detach().split(3)],
    "rows": lambda h: [row.mul_(2) for row in h.detach().unbind(0)],
    "no view": lambda h: h[[0, 2]].mul_(2),
    "in place, of another shape": lambda h: h.t_().unsqueeze_(0).mul_(2).squeeze_().t_(),
}


def writes(rank: int, world: int) -> list[str]:
    mesh = Mesh.from_env({"a": world})
    value = torch.linspace(-2, 2, 24, dtype=torch.float64).view(4, 6)
    wrong = []
    for name, write in WRITES.items():
        for at in (Replicate(), Shard(0), Shard(1)):
            for grad in (True, False):
                found = []
                for on in (True, False):
                    x = value.clone().requires_grad_(grad)
                    x = distribute_tensor(x, mesh, [at]) if on else x
                    h = x * 1
                    write(h)
                    if grad:
                        h.square().sum().backward()
                    found.append([full_tensor(t.detach()) for t in ((h, x.grad) if grad else (h,))])  # type: ignore[union-attr]
                if not all(torch.equal(a, b) for a, b in zip(*found, strict=True)):
                    wrong.append(f"{name}, {at}, grad {grad}")
    return wrong


@pytest.mark.filterwarnings("ignore::espalier.GatherWarning")
def test_writes_reach_what_a_view_was_taken_of(ranks: Any) -> None:
    assert not any(ranks(2, writes))
