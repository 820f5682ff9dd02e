"""Outputs of several calls of a model in stages: drawn and remembered as on one process, in their modes."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import espalier


class Marked(nn.Module):
    """A layer whose outputs tell which call it was."""

    def __init__(self, draw: str) -> None:
        super().__init__()
        self.l, self._draw, self._calls = nn.Linear(3, 3), draw, 0
        self._generator = torch.Generator().manual_seed(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._draw == "python":
            by = torch.tensor([random.random() for _ in range(3)])
        elif self._draw == "own":
            by = torch.randn(3, generator=self._generator)
        else:
            self._calls += 1
            by = torch.full((3,), float(self._calls))
        out: torch.Tensor = self.l(x) + by
        return out


Meet = Callable[[Any, Any], Any]
MEET: list[Meet] = [
    lambda a, b: (a * b).mean(),
    lambda a, b: (a + 2 * b).square().mean(),
    lambda a, b: (b * a.detach()).mean(),
]


def losses(layer: nn.Module, meet: Meet, plan: dict[str, int]) -> list[float]:
    torch.manual_seed(0)
    random.seed(0)
    model: Any = nn.Sequential(nn.Linear(3, 3), layer, nn.Linear(3, 3))
    model, optimizer = espalier.prepare(model, torch.optim.SGD(model.parameters(), 0.01), plan=plan)
    found = []
    for _ in range(2):
        loss = meet(model(torch.ones(2, 3)), model(torch.ones(2, 3)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return [*found, torch.rand(()).item(), random.random()]


def called_in_another_mode(plan: dict[str, int]) -> list[float]:
    """The model is called in one mode, and the loss goes back in the other."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5), nn.Linear(3, 3))
    model, optimizer = espalier.prepare(model, torch.optim.SGD(model.parameters(), 0.1), plan=plan)
    found = []
    for mode in (True, False, True):
        model.train(mode)
        out = model(torch.ones(4, 3))
        model.train(not mode)
        loss = out.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert model.training is not mode
        found.append(loss.item())
    return found


class Whole(nn.Sequential):
    """Cannot be divided, and draws from Python's generator, too."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x) + random.random()
        return x if x.sum() < 1e9 else -x


def drawn_in_between(plan: dict[str, int], *layers: nn.Module, kind: Any = nn.Sequential) -> list[float]:
    """Another model, and the program itself, draw behind a call whose loss has yet to go back."""
    torch.manual_seed(0)
    random.seed(0)
    norm = nn.BatchNorm1d(3)
    net: Any = kind(nn.Linear(3, 3), nn.Dropout(0.5), norm, *layers, nn.Linear(3, 3))
    plain: Any = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.2), nn.Linear(3, 3))
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    model, optimizer = espalier.prepare(net, optimizer, plan=plan)
    teacher, found = espalier.prepare(plain, plan=plan), []
    for step in range(4):
        out = model(torch.eye(3)[: 2 + step % 2])
        if step == 2:
            found.append(out.mean().item())
        with torch.set_grad_enabled(step % 2 == 0):
            by = teacher(torch.ones(2 + step % 2, 3)).detach()
        loss = (out * torch.rand(3) - by * random.random()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found += [loss.item(), torch.rand(()).item(), random.random()]
    return found


class Picky(nn.Module):
    """Takes no rows that are not finite."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.isnan().any():
            raise ValueError("not finite")
        return x


def passed_over(plan: dict[str, int]) -> list[float]:
    """Calls end in an error, which the program passes over; of one nothing is asked."""
    torch.manual_seed(0)
    layers = nn.Linear(3, 3), nn.Dropout(0.5), nn.Linear(3, 3), Picky(), nn.Linear(3, 3)
    model: Any = nn.Sequential(*layers)
    model, optimizer = espalier.prepare(model, torch.optim.SGD(model.parameters(), 0.1), plan=plan)
    found = []
    for step in range(5):
        optimizer.zero_grad()
        x = torch.ones(4, 2 if step == 0 else 3)
        try:
            out = model(x if step in (0, 4) else x / 0 - x / 0)
            if step < 3:
                loss = out.square().mean()
                found += [loss.item()] if step == 1 else []
                loss.backward()
                raise AssertionError("it is passed over")
        except (RuntimeError, ValueError) as error:
            assert step < 4, error
    with pytest.warns(UserWarning, match="nothing was asked") if "pipe" in plan else nullcontext():
        loss = model(torch.ones(4, 3)).square().mean()
        found.append(loss.item())
    loss.backward()
    optimizer.step()
    words = r"^(addmm: )?mat1 and mat2 shapes cannot be multiplied \(4x5 and 3x3\)$"
    with pytest.raises(RuntimeError, match=words):
        model(torch.ones(4, 5)).sum().backward()
    return [*found, model(torch.ones(4, 3)).sum().item()]


def all_of_it(rank: int, world: int, expected: list[list[float]] | None) -> list[list[float]]:
    torch.set_default_dtype(torch.float64)
    plan = {"pipe": world} if world > 1 else {"data": 1}
    try:
        found = [
            losses(layer, meet, plan)
            for meet in MEET
            for layer in (nn.Dropout(0.5), *map(Marked, ("python", "own", "count")))
        ]
        found.append(called_in_another_mode(plan))
        found.append(drawn_in_between(plan))
        found.append(drawn_in_between(plan, Marked("python")))
        found.append(drawn_in_between(plan, Marked("count")))
        found.append(drawn_in_between(plan, kind=Whole))
        found.append(passed_over(plan))
    finally:
        torch.set_default_dtype(torch.float32)
    for given, right in zip(found, expected or found, strict=True):
        assert given == pytest.approx(right, rel=1e-9, abs=1e-12)
    return found


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_calls_that_meet_are_those_of_one_process(ranks: Any) -> None:
    ranks(2, all_of_it, ranks(1, all_of_it, None)[0])
