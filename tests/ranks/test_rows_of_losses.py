"""Losses whose targets have several numbers a row, in pipelines with micro-batches: those of one process."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import espalier

TOLERANCE = 1e-10
CLASSES, ROWS, LENGTH = 8, 4, 6  # as many classes as tests of weights need to be mistaken for rows
Loss = Callable[[Any, torch.Tensor], torch.Tensor]


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(CLASSES, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2))
        self.out = nn.Linear(6, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.table(x)
        for block in self.blocks:
            x = block(x)
        return self.out(x)


def viewed(out: Any, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(out[: len(y)].view(-1, CLASSES), y.view(-1))


def by_sizes(out: Any, y: torch.Tensor) -> torch.Tensor:
    b, t, c = out.shape
    return F.cross_entropy(out.view(b * t, c), y.view(b * t), ignore_index=1, label_smoothing=0.1)


def shifted(out: Any, y: torch.Tensor) -> torch.Tensor:
    logits, labels = out[..., :-1, :].contiguous(), y[..., 1:].contiguous()
    return F.cross_entropy(logits.view(-1, logits.size(-1)), labels.view(-1))


def weighed(out: Any, y: torch.Tensor) -> torch.Tensor:
    weight = torch.linspace(1, 2, CLASSES, dtype=torch.float64)
    return F.cross_entropy(out.flatten(0, 1), y.flatten(), weight)


def masked(out: Any, y: torch.Tensor) -> torch.Tensor:
    each = F.cross_entropy(out.view(-1, CLASSES), y.view(-1), reduction="none")
    return (each * (y.view(-1) > 2)).sum() / ROWS


def one_hot(out: Any, y: torch.Tensor) -> torch.Tensor:
    return (out.view(-1, CLASSES).softmax(-1) - F.one_hot(y, CLASSES).view(-1, CLASSES)).square().mean()


def gathered(out: Any, y: torch.Tensor) -> torch.Tensor:
    return -out.log_softmax(-1).view(-1, CLASSES).gather(1, y.view(-1, 1)).mean()


def picked(out: Any, y: torch.Tensor) -> torch.Tensor:
    return -out.view(-1, CLASSES).log_softmax(-1)[torch.arange(y.numel()), y.view(-1)].mean()


def picked_last(out: Any, y: torch.Tensor) -> torch.Tensor:
    from_the_end = y[:, -1] - CLASSES
    return -out[:, -1].log_softmax(-1)[torch.arange(len(y)), from_the_end].mean()


def picked_by_range(out: Any, y: torch.Tensor) -> torch.Tensor:
    last, rows = out[:, -1].log_softmax(-1), range(len(y))
    return -(last[rows, y[:, -1]] + last[[*rows], y[:, 0]] + last[np.arange(len(y)), y[:, 1]]).mean()


def binary(out: Any, y: torch.Tensor) -> torch.Tensor:
    return F.binary_cross_entropy_with_logits(out[..., 0].flatten(), (y.flatten() > 3).double())


def chosen(out: Any, y: torch.Tensor) -> torch.Tensor:
    mask = y > 3
    return F.cross_entropy(out[mask], y[mask])


def chosen_of_all(out: Any, y: torch.Tensor) -> torch.Tensor:
    mask = (y % 3 == 0).view(-1)
    return F.cross_entropy(out.reshape(-1, CLASSES)[mask], y.reshape(-1)[mask], reduction="sum") / mask.sum()


def by_time(out: Any, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(out.transpose(0, 1).reshape(-1, CLASSES), y.t().reshape(-1))


def smoothed(out: Any, y: torch.Tensor) -> torch.Tensor:
    likely = out.view(-1, CLASSES).log_softmax(-1)
    wanted = torch.full_like(likely, 0.1).scatter_(1, y.view(-1, 1), 0.9)
    return F.kl_div(likely, wanted, reduction="batchmean")


def stacked(out: Any, y: torch.Tensor) -> torch.Tensor:
    both = torch.stack([out[:, 0], out[:, 1]], 1).flatten(0, 1)
    return F.cross_entropy(both, torch.stack([y[:, 0], y[:, 1]], 1).flatten())


def some(out: Any, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(out[:2, 0], y[:2, 0])


def one(out: Any, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(out[0], y[0])


def half(out: Any, y: torch.Tensor) -> torch.Tensor:
    scores = out.mean((1, 2))
    return -F.logsigmoid(scores[: ROWS // 2] - scores[ROWS // 2 :]).mean()


def backwards(out: Any, y: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(out.mean((1, 2)).flip(0), torch.arange(ROWS).double())


def of_others(out: Any, y: torch.Tensor) -> torch.Tensor:
    z = out.mean(1)
    return F.triplet_margin_loss(z, z + 0.1, z.roll(1, 0))


def contrasted(out: Any, y: torch.Tensor) -> torch.Tensor:
    z = F.normalize(out.mean(1), dim=-1)
    return F.cross_entropy(z @ z.t() * 5, torch.arange(z.size(0)))


def contrasted_at_a_scale(out: Any, y: torch.Tensor) -> torch.Tensor:
    z = out.mean(1)
    alike = out.square().mean() * z @ z.t()
    return (alike.logsumexp(1) - alike.diagonal()).mean()


def compared(out: Any, y: torch.Tensor) -> torch.Tensor:
    z = out.mean(1)
    return F.cosine_similarity(z.unsqueeze(1), z.unsqueeze(0), dim=-1).mean()


def apart(out: Any, y: torch.Tensor) -> torch.Tensor:
    z = out.mean(1)
    return (z[:, None] - z[None]).square().mean()


def far(out: Any, y: torch.Tensor) -> torch.Tensor:
    z = out.mean(1)
    return torch.cdist(z, z).square().mean()


def summed(out: Any, y: torch.Tensor) -> torch.Tensor:
    z = out.mean(1)
    return torch.einsum("id,jd->ij", z, z).mean()


def of_so_many(out: Any, y: torch.Tensor) -> torch.Tensor:
    return out.view(ROWS, -1).mean(1).square().mean()


BY_PLACE = (
    some,
    one,
    half,
    backwards,
    of_others,
    contrasted,
    contrasted_at_a_scale,
    compared,
    apart,
    far,
    summed,
    of_so_many,
)
LOSSES = (
    viewed,
    by_sizes,
    shifted,
    weighed,
    masked,
    one_hot,
    gathered,
    picked,
    picked_last,
    picked_by_range,
    binary,
    chosen,
    chosen_of_all,
    smoothed,
    stacked,
)


def numbers(losses: Sequence[Loss], plan: dict[str, Any] | None) -> dict[str, list[float]]:
    """Of two steps for each loss, one after the other."""
    torch.manual_seed(0)
    model: Any = Tagger().double()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    if plan is not None:
        model, optimizer = espalier.prepare(model, optimizer, plan=plan)
    seen: dict[str, list[float]] = {}
    for step in range(2 * len(losses)):
        generator = torch.Generator().manual_seed(step)
        x, y = torch.randint(CLASSES, (2, ROWS, LENGTH), generator=generator)
        loss_of = losses[step // 2]
        loss = loss_of(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen.setdefault(loss_of.__name__, []).append(loss.item())
    state = model.state_dict() if plan is None else model.engine.full_state_dict()
    return seen | {name: x.flatten().tolist() for name, x in state.items()}


def in_stages(rank: int, world: int, plan: dict[str, Any], *losses: Loss) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=espalier.GatherWarning)  # a mask of rows that are cut
        found = numbers(losses, plan)
    for name, expected in numbers(losses, None).items():
        assert max(abs(a - b) for a, b in zip(found[name], expected, strict=True)) < TOLERANCE, (name, plan)


def hardest(out: Any, y: torch.Tensor) -> torch.Tensor:
    each = F.cross_entropy(out[:, 0], y[:, 0], reduction="none")
    return each.topk(3).values.mean() + each.max() + each.std()


def spread(out: Any, y: torch.Tensor) -> torch.Tensor:
    z = out.mean(1)
    z = (z - z.mean(0)) / z.std(0)
    return (z.t() @ z / ROWS - torch.eye(CLASSES, dtype=z.dtype)).square().sum()


def weighed_by_all(out: Any, y: torch.Tensor) -> torch.Tensor:
    each = F.cross_entropy(out[:, 0], y[:, 0], reduction="none")
    return (each.detach().softmax(0) * each).sum() + each[each > each.detach().quantile(0.5)].mean()


OF_ALL = (*BY_PLACE, by_time, hardest, spread, weighed_by_all)


def in_stages_with_steps(rank: int, world: int) -> None:
    """Losses are known to be of all rows or not, and each is computed as it is: one after the other."""
    plan = {"pipe": 2, "accumulate": 2} if world == 2 else {"pipe": 2, "data": 2, "accumulate": 2}
    in_stages(rank, world, plan, *OF_ALL, shifted, picked)
    if world == 2:
        in_stages(rank, world, {"pipe": 2}, *OF_ALL)


def test_targets_of_several_numbers_a_row(ranks: Any) -> None:
    ranks(2, in_stages, {"pipe": 2, "accumulate": 2}, *LOSSES)


def test_their_rows_are_shared(ranks: Any) -> None:
    ranks(4, in_stages, {"data": 2, "pipe": 2, "accumulate": 2}, shifted, picked, chosen)


@pytest.mark.filterwarnings("ignore:A loss is one of all rows")
@pytest.mark.parametrize("world", [2, 4])
def test_losses_of_all_rows(ranks: Any, world: int) -> None:
    ranks(world, in_stages_with_steps)
