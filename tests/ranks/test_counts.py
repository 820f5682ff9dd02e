"""The counts that means of losses divide by: sent before the model runs, and right in any case."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import espalier


class Classes(nn.Module):
    """Classes of rows; ``change`` is what it does to the targets first."""

    change = "nothing"

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 5)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        logits = self.linear(x)
        if self.change == "copied":
            y = y.clone()
        elif self.change == "written":
            y[:, 0] = -100
        elif self.change == "other":
            y = (y + 1) % 5
        loss = F.cross_entropy(logits.flatten(0, 1), y.reshape(-1), ignore_index=-100)
        if self.change == "twice":
            loss = loss + 0.5 * F.cross_entropy(2 * logits.flatten(0, 1), y.reshape(-1))
        return loss


def batch(seed: int, rows: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 5, (rows, 3), generator=draw)
    y[: rows // 2] = torch.where(torch.rand(rows // 2, 3, generator=draw) < 0.6, -100, y[: rows // 2])
    return torch.randn(rows, 3, 4, generator=draw, dtype=torch.float64), y


def counted(rank: int, world: int) -> None:
    torch.manual_seed(0)
    net = Classes().double()
    plain = Classes().double()
    plain.load_state_dict(net.state_dict())
    engine = espalier.initialize(net, torch.optim.SGD(net.parameters(), lr=0.0), {"data": world})
    changes = "nothing nothing copied nothing written nothing other twice twice nothing".split()
    early = []
    for seed, change in enumerate(changes):
        net.change = plain.change = change
        x, y = batch(seed, 7 if seed == 5 else 8)
        expected = plain(x, y.clone())
        with espalier.ledger(engine.mesh) as book:
            note = lambda *_, book=book: early.append(len(book.entries))  # noqa: E731
            hook = net.linear.register_forward_pre_hook(note)
            loss = engine((x, y))
            hook.remove()
        assert len(book.entries) >= 1
        assert abs(loss.item() - expected.item()) < 1e-12, change
        engine.backward(loss)
        engine.finish_gradients()
        expected.backward()
        for p, q in zip(net.parameters(), plain.parameters(), strict=True):
            assert torch.allclose(espalier.full_tensor(p.grad), q.grad, rtol=0, atol=1e-12), change
        engine.zero_grad()
        plain.zero_grad()
    # of 7 rows the ranks hold different shapes: nothing is sent ahead
    assert early == [0, 1, 1, 0, 1, 0, 0, 0, 1, 1], early


def test_counts_are_sent_before_the_model_runs(ranks: Any) -> None:
    ranks(2, counted)


def refused(rank: int, world: int) -> str:
    torch.manual_seed(0)
    net = Classes().double()
    engine = espalier.initialize(net, None, {"data": world})
    x, y = batch(0)
    engine((x, y))
    y[-1, -1] = 7  # of the last rank's rows alone
    with pytest.raises(IndexError, match="Target 7 is out of bounds") as met:
        engine((x, y))
    assert abs(engine(batch(0)).item()) < 100
    return str(met.value)


def test_a_target_out_of_range_is_refused_on_all_ranks(ranks: Any) -> None:
    assert len({*ranks(2, refused)}) == 1
