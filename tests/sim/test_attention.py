"""Attention over a cut sequence on the simulated device: a mask's values are not asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import espalier
from espalier import Mesh, Shard
from tests.sim.transport import Shared


def masked(shared: Shared, rank: int, world: int) -> set[str]:
    """A ring of blocks some of which a mask hides: what the device tells. Values are those of the CPU."""
    mesh = Mesh.from_env({"context": world})
    torch.manual_seed(0)
    plain: list[Any] = [torch.randn(2, 1, 8, 4, dtype=torch.float64).requires_grad_() for _ in range(3)]
    half = torch.arange(8) // 4
    mask = half.unsqueeze(1) == half  # each rank's queries see its own keys
    expected: Any = F.scaled_dot_product_attention(plain[0], plain[1], plain[2], attn_mask=mask)
    expected.square().sum().backward()
    cut: list[Any] = [
        espalier.distribute_tensor(x.detach().to("sim"), mesh, [Shard(2)]).requires_grad_() for x in plain
    ]
    seen: Any = espalier.distribute_tensor(mask.to("sim"), mesh, [Shard(0)])
    with espalier.ledger(mesh) as book, shared.sim.watched() as told:
        out: Any = F.scaled_dot_product_attention(cut[0], cut[1], cut[2], attn_mask=seen)
        out.square().sum().backward()
    assert {op for _, op in book.by_op()} <= {"pass_on", "all_reduce"}, book
    torch.testing.assert_close(out.full_tensor().cpu(), expected)
    for x, y in zip(cut, plain, strict=True):
        torch.testing.assert_close(espalier.full_tensor(x.grad).cpu(), y.grad)
    return {telling.kind for telling in told}


@pytest.mark.world(2)
def test_a_mask_keeps_no_host_waiting(on_sim: Callable[..., list[Any]]) -> None:
    assert on_sim(2, masked) == [set(), set()]
