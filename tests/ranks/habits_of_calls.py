"""How programs call models, and what they hold of what these give."""

from __future__ import annotations

from collections import OrderedDict
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import espalier
from tests.ranks.habits import batch, compare, stepped


class Known(nn.Module):
    """Knows who trains it, and takes what it is given by place and by name."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 4)
        self.trainer: dict[str, Any] = {}

    def forward(self, *args: Any, **named: Any) -> torch.Tensor:
        (x,) = args
        return self.down(torch.relu(self.up(x))) * named["scale"]


def models_that_know_their_trainer(prepare: Any) -> list[Any]:
    """What has the prepared model is an attribute of the model."""
    model, out = Known(), list[Any]()
    prepared, optimizer = prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    model.trainer = {"model": prepared, "optimizer": optimizer}
    for step in range(2):
        x, y = batch(step)
        out.append(stepped(F.cross_entropy(prepared(x, scale=2.0), y), optimizer))
    assert prepared.trainer["model"] is prepared
    return [*out, *model.parameters()]


class Pairs(nn.Module):
    """Gives its loss, and more, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        out = self.down(torch.relu(self.up(x)))
        return {"loss": F.cross_entropy(out, y), "right": (out.argmax(1) == y).double().mean()}


def outputs_made_anew(prepare: Any) -> list[Any]:
    """As Lightning's ``apply_to_collection`` makes them."""
    model, out = Pairs(), list[Any]()
    model, optimizer = prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    for step in range(2):
        given = model(*batch(step))
        stepped(given["loss"], optimizer)
        made = type(given)(OrderedDict((name, x.detach()) for name, x in given.items()))
        out += [made["loss"], made["right"]]
    return [*out, *model.parameters()]


class Returns(nn.Module):
    """Adds values of last states to rewards, of which the first dim is no rows."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Linear(6, 1)

    def forward(self, rewards: torch.Tensor, last: torch.Tensor, trains: bool = False) -> torch.Tensor:
        value = self.value(last)[:, 0]
        return rewards.flip(0).cumsum(0) + (value if trains else value.detach())


def inputs_without_rows(rank: int) -> None:
    """Each rank's are computed after the other's, if nothing goes back."""
    for plan in ({"data": 2}, {"data": 2, "zero": 3}, {"tensor": 2}):
        model = Returns()
        own = rank if "data" in plan else 0
        given = torch.arange(15.0).view(5, 3) * (1 + own), torch.ones(3, 6) * (1 + own)
        right = model(*given)
        model = espalier.prepare(model, torch.optim.SGD(model.parameters(), 0.1), plan=plan, rows="own")[0]
        told = pytest.warns(UserWarning, match="one after the other") if "data" in plan else nullcontext()
        with told:
            torch.testing.assert_close(model(*given), right)
        if "data" in plan:
            with pytest.raises(ValueError, match="do not fit together"):
                model(*given, trains=True)


def compare_calls(rank: int) -> None:
    """All of it, under plans."""
    plans: tuple[dict[str, Any], ...] = ({"data": 2, "zero": 3}, {"tensor": 2}, {"pipe": 2})
    compare(models_that_know_their_trainer, [(plan, {}) for plan in plans])
    compare(outputs_made_anew, [(plan, {}) for plan in plans])
    inputs_without_rows(rank)
