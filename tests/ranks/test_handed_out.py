"""Losses that write into tensors of their own, or take rows by number, in a pipeline: as on one process."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import espalier

TOLERANCE = 1e-10
ROWS = 8
Numbers = list[Any]


class Net(nn.Module):
    """With dropout, and two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(6, 12), nn.Linear(12, 12), nn.Linear(12, 4)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.drop(torch.tanh(self.first(x)))
        return self.last(F.gelu(self.second(h))), h


def written(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """By a mask of what is known."""
    out, _ = model(x)
    losses = torch.zeros(ROWS)
    losses[y > 1] = F.cross_entropy(out, y, reduction="none")[y > 1]
    losses[y <= 1] = out[y <= 1].square().mean(1) * 0.5
    return losses.mean()


def binned(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A histogram of scores, which others than the output are in, too."""
    out, h = model(x)
    bins = torch.zeros(4).scatter_add_(0, y, torch.sigmoid(out.sum(1)))
    return (bins * torch.arange(4.0)).sum() + h.mean()


def of_two_calls(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    a, b = model(x)[0], model(-x)[0]
    both = torch.empty(2, ROWS, 4)
    both[0], both[1] = a, b
    return both.std(0).mean() + both.mean()


def with_penalty(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    out, _ = model(x)
    picked = torch.zeros(ROWS)
    picked[:] = out.gather(1, y[:, None])[:, 0]
    return -picked.mean() + 1e-2 * sum(p.square().sum() for p in model.parameters())


def row_by_row(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    out, _ = model(x)
    total = torch.zeros(())
    for row, label in zip(out, y, strict=True):
        total = total + F.cross_entropy(row, label) * (1 + label)
    return total / len(y)


def by_size(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    out, _ = model(x)
    n, _ = out.shape
    similar = out @ out.T - 5 * torch.eye(out.size(0))
    mask = torch.zeros((n, n)).index_fill_(0, torch.tensor([0, out.shape[0] - 1]), 1.0)
    return (similar.log_softmax(1) * mask).sum() / n


def by_count(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Tensors made by the sizes of an output, as numbers of their own, and numbers made of these."""
    out, _ = model(x)
    n, m = out.shape
    assert n == ROWS > m and {n: 1}[len(out)] and m in (n // 2, 4)
    first = torch.zeros(n, m)
    first[:, 0] = 1.0
    wide = first + torch.ones(m).expand(n, m) + out.new_zeros(n, m) + torch.full((n, m), 0.5)
    place = torch.arange(n) / len(out) + torch.linspace(0, 1, out.size(0)) + torch.empty(n).fill_(0.1)
    far = (torch.arange(n * m) % 5).view(n, m)
    return (out.view(n, -1) * wide * place[:, None] + far).square().sum() / (n * m)


def in_place(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    out, _ = model(x)
    similar = out @ out.T
    similar.diagonal().mul_(0.5)
    return similar.logsumexp(1).mean()


def hooked(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    out, _ = model(x)
    out.register_hook(lambda grad: grad / grad.norm())
    return F.cross_entropy(out, y)


LOSSES = (written, binned, of_two_calls, with_penalty, row_by_row, by_size, by_count, in_place, hooked)


def run(loss_of: Callable[..., torch.Tensor], plan: dict[str, Any] | None, rows: str = "all") -> torch.Tensor:
    torch.manual_seed(0)
    model: Any = Net()
    model.drop.p = 0.0
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    if plan is not None:
        model, optimizer = espalier.prepare(model, optimizer, plan=plan, rows=rows)
    seen: Numbers = []
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(ROWS, 6, generator=generator).requires_grad_()
        y = torch.randint(0, 4, (ROWS,), generator=generator)
        loss = loss_of(model, x, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen += [loss.item(), x.grad]
    return torch.cat(
        [espalier.full_tensor(torch.as_tensor(v)).detach().flatten() for v in (*seen, *model.parameters())]
    )


def compared(rank: int, world: int, plans: list[dict[str, Any]], rows: str = "all") -> None:
    torch.set_default_dtype(torch.float64)
    try:
        for loss_of in LOSSES:
            expected = run(loss_of, None)
            for plan in plans:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", espalier.GatherWarning)
                    warnings.filterwarnings("ignore", "A loss is one of all rows")
                    warnings.filterwarnings("ignore", "Outputs of two calls of the model meet")
                    apart = (run(loss_of, plan, rows) - expected).abs().max().item()
                assert apart < TOLERANCE, (loss_of.__name__, plan, apart)
    finally:
        torch.set_default_dtype(torch.float32)


def test_losses_that_write_and_count_equal_one_process(ranks: Any) -> None:
    ranks(2, compared, [{"pipe": 2}, {"pipe": 2, "accumulate": 2}])


def test_losses_of_rows_that_are_all(ranks: Any) -> None:
    """Each rank's own, where no axis shares the batch."""
    ranks(2, compared, [{"pipe": 2, "accumulate": 2}], "own")


@pytest.mark.world(4)
def test_losses_that_write_and_count_equal_one_process_on_four(ranks: Any) -> None:
    ranks(4, compared, [{"data": 2, "pipe": 2, "accumulate": 2}, {"tensor": 2, "pipe": 2}])


def contrastive(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    z = F.normalize(model(x)[0], dim=1)
    return F.cross_entropy(5 * z @ z.T, torch.arange(ROWS))


def of_two_views(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    a, b = (F.normalize(model(view)[0], dim=1) for view in (x, -x))
    return F.cross_entropy(5 * a @ b.T, torch.arange(ROWS)) + a.std()


def summed(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x)[0], y, reduction="sum") / 10


def normed(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    out, h = model(x)
    return out.norm() + h.logsumexp(0).mean()


def mean(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x)[0], y)


OF_OWN = (
    written,
    binned,
    of_two_calls,
    with_penalty,
    row_by_row,
    by_size,
    by_count,
    in_place,
    contrastive,
    of_two_views,
    summed,
)


def of_ranks(loss_of: Callable[..., torch.Tensor], plan: dict[str, Any] | None) -> torch.Tensor:
    """What is trained is the mean of the losses that two ranks make of their own rows."""
    torch.manual_seed(0)
    model: Any = Net()
    model.drop.p = 0.0
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    place = 0
    if plan is not None:
        model, optimizer = espalier.prepare(model, optimizer, plan=plan, rows="own")
        place = model.engine.mesh.coordinate[model.engine.mesh.axis("data")]
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        x, y = (
            torch.randn(2 * ROWS, 6, generator=generator),
            torch.randint(0, 4, (2 * ROWS,), generator=generator),
        )
        parts = [*zip(x.chunk(2), y.chunk(2), strict=True)]
        loss = loss_of(model, *parts[place])
        if plan is None:
            loss = (loss + loss_of(model, *parts[1])) / 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return torch.cat([espalier.full_tensor(p).detach().flatten() for p in model.parameters()])


class Gives(Net):
    """Makes its loss itself, of the rows of all ranks: a mean, or a sum over a number that it is told."""

    def forward(self, x: torch.Tensor, y: torch.Tensor, number: int | None = None) -> Any:
        out, _ = super().forward(x)
        if number is None:
            return {"loss": F.cross_entropy(out, y), "logits": out}
        return {"loss": F.cross_entropy(out, y, reduction="sum") / number, "logits": out}


def given(number: int | None, plan: dict[str, Any] | None) -> torch.Tensor:
    torch.manual_seed(0)
    model: Any = Gives()
    model.drop.p = 0.0
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    seen: Numbers = []
    place = slice(None)
    if plan is not None:
        model, optimizer = espalier.prepare(model, optimizer, plan=plan, rows="own")
        reader = model.engine.mesh.coordinate[model.engine.mesh.axis("data")]
        place = slice(reader * ROWS // 2, (reader + 1) * ROWS // 2)
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        x, y = torch.randn(ROWS, 6, generator=generator), torch.randint(0, 4, (ROWS,), generator=generator)
        loss = model(x[place], y[place], number)["loss"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen.append(loss.item())
    ends = [espalier.full_tensor(p).detach().flatten() for p in model.parameters()]
    return torch.cat([torch.tensor(seen), *ends])


def own_rows(rank: int, world: int) -> None:
    torch.set_default_dtype(torch.float64)
    plans: list[dict[str, Any]] = [{"data": 2, "pipe": 2}, {"data": 2, "pipe": 2, "accumulate": 2, "zero": 1}]
    try:
        for loss_of in (*OF_OWN, normed, mean):
            expected = of_ranks(loss_of, None)
            for plan in plans:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", espalier.GatherWarning)
                    if loss_of is not mean:
                        warnings.filterwarnings("ignore", "A loss is one of all rows")
                    warnings.filterwarnings("ignore", "Outputs of two calls of the model meet")
                    apart = (of_ranks(loss_of, plan) - expected).abs().max().item()
                assert apart < TOLERANCE, (loss_of.__name__, plan, apart)
        for number in (None, ROWS):
            expected = given(number, None)
            for plan in plans:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", espalier.GatherWarning)
                    warnings.filterwarnings("ignore", "A loss is one of all rows")
                    apart = (given(number, plan) - expected).abs().max().item()
                assert apart < TOLERANCE, (number, plan, apart)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.world(4)
def test_losses_of_own_rows_are_those_of_ranks(ranks: Any) -> None:
    ranks(4, own_rows)


def drawn(rank: int, world: int) -> None:
    """What the model draws is what it draws without such a loss; a loss that draws is told what to do."""
    torch.manual_seed(0)
    model, optimizer = Net(), None
    model, optimizer = espalier.prepare(model, torch.optim.SGD(model.parameters(), 0.1), plan={"pipe": 2})
    x, seen = torch.randn(ROWS, 6), []
    for writes in (False, True):
        torch.manual_seed(1)
        out, _ = model(x)
        into = torch.zeros(ROWS, 4)
        if writes:
            with pytest.warns(UserWarning, match="A loss is one of all rows"):
                into[:] = out
        loss = (into if writes else out).square().mean()
        optimizer.zero_grad()
        loss.backward()
        seen.append(
            torch.cat(
                [
                    loss.detach().reshape(1),
                    *(espalier.full_tensor(p.grad).flatten() for p in model.parameters()),
                ]
            )
        )
    assert torch.allclose(*seen, atol=1e-6)
    out, _ = model(x)
    with pytest.raises(TypeError, match="draws random numbers"):
        torch.zeros(ROWS, 4)[:] = F.dropout(out, 0.5)
    loss = out.mean()
    loss.backward()


@pytest.mark.filterwarnings("ignore:A value is asked for that lies on ranks")
def test_what_is_drawn_stays(ranks: Any) -> None:
    ranks(2, drawn)
