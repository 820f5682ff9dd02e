"""How programs call models, and what they hold of what these give."""

from __future__ import annotations

from collections import OrderedDict
from contextlib import nullcontext
from typing import Any
from warnings import catch_warnings, simplefilter

import pytest
import torch
from torch import nn
from torch.func import functional_call, stack_module_state
from torch.nn import functional as F

import espalier
from tests.ranks.habits import batch, compare, stepped
from tests.ranks.habitual import Encoder


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


class Targets(nn.Module):
    """Gives much without gradients: under ``no_grad``, detached, as integers, of a frozen part, of the batch
    alone; and more of it by an attribute, and by values of the batch."""

    gives = "all"

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 6), nn.Linear(6, 4)
        self.teacher = nn.Linear(6, 4).requires_grad_(False)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> dict[str, Any]:
        hidden = torch.relu(self.up(x))
        scores = self.down(hidden)
        with torch.no_grad():
            keys = self.up(x).cos()
        return {
            "scores": scores.detach() if self.gives == "targets" else scores,
            "keys": keys,
            "hidden": hidden.detach(),
            "codes": scores.argmax(-1),
            "taught": self.teacher(x),
            "mask": x > 0,
            "through": self.teacher(hidden),
            "loss": hidden.mean() if mask.any() else x.new_zeros(()),
            "nothing": None,
            "width": x.shape[1],
        }


def outputs_without_gradients(prepare: Any) -> list[Any]:
    """They go into the losses, and the calls, of others: no gradient goes back through them."""
    model, out = Targets(), list[Any]()
    trained = [p for p in model.parameters() if p.requires_grad]
    model, optimizer = prepare(model, torch.optim.SGD(trained, 0.1))
    for step in range(4):
        x, y = batch(step)
        model.gives = "targets" if step == 2 else "all"
        given = model(x, torch.full((8,), step % 2 == 1))
        model.gives = "all"
        out.append([float(one.requires_grad) for one in given.values() if isinstance(one, torch.Tensor)])
        out.append(torch.as_tensor(given["width"]))
        other = model(torch.cat([given["keys"][:, :2], x[:, 2:]], 1), y > 0)["scores"]
        loss = F.mse_loss(other, given["scores" if step == 2 else "taught"]) + given["loss"]
        loss = (
            loss + (given["through"] * given["hidden"][:, :4]).mean() + (other * given["mask"][:, :4]).mean()
        )
        out.append(stepped(loss, optimizer))
        with torch.no_grad():
            assert given["scores"].shape == (8, 4)  # a question that changes nothing of it
        with pytest.raises(RuntimeError):
            model(x, y > 0)["keys"].sum().backward()
    model.requires_grad_(False)
    assert not model(x, y > 0)["scores"].requires_grad
    through = model(x.requires_grad_(), y > 0)["scores"]
    through.square().mean().backward()
    return [*out, x.grad, *model.parameters()]


def inner_loops(prepare: Any) -> list[Any]:
    """Weights of one's own, made of the model's: a loss goes back through their steps."""
    model, out = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4)), list[Any]()
    model, optimizer = prepare(model, torch.optim.SGD(model.parameters(), 0.1))

    def loss(weights: Any, step: int) -> torch.Tensor:
        x, y = batch(step)
        return F.cross_entropy(functional_call(model, weights, (x,)), y)

    for step in range(2):
        weights = dict(model.named_parameters())
        first = F.cross_entropy(model(batch(step)[0]), batch(step)[1])
        for inner in (first, None):
            gone = loss(weights, step) if inner is None else inner
            grads = torch.autograd.grad(gone, [*weights.values()], create_graph=True)
            weights = {name: p - 0.1 * g for (name, p), g in zip(weights.items(), grads, strict=True)}
        out.append(stepped(loss(weights, step + 5), optimizer))
    model.eval()
    held = {name: p.detach() for name, p in model.named_parameters()}
    grads = torch.func.grad(loss)(held, 3)
    rows = torch.vmap(lambda row: model(row[None]))(batch(4)[0])
    return [*out, *grads.values(), rows, *model.parameters(), *model.buffers()]


def models_side_by_side(prepare: Any) -> list[Any]:
    """As one, with stacked weights."""
    models = [Encoder(), Encoder()]
    prepared = [prepare(model, torch.optim.SGD(model.parameters(), 0.1))[0] for model in models]
    with torch.no_grad():
        out = [model(batch(0)[0]) for model in prepared]
    for model in prepared:
        model.eval()
    x, held = batch(1)[0], stack_module_state(prepared)
    return [*out, torch.vmap(lambda *of: functional_call(prepared[0], of, (x,)))(*held)]


def compare_calls(rank: int) -> None:
    """All of it, under plans."""
    compare(outputs_without_gradients, [({"pipe": 2}, {}), ({"pipe": 2, "accumulate": 2}, {})])
    with catch_warnings():
        simplefilter("ignore", UserWarning)  # in pipelines the model is computed whole
        for program in (inner_loops, models_side_by_side):
            compare(program, [({"pipe": 2}, {}), ({"data": 2, "zero": 3}, {})])
    plans: tuple[dict[str, Any], ...] = ({"data": 2, "zero": 3}, {"tensor": 2}, {"pipe": 2})
    compare(models_that_know_their_trainer, [(plan, {}) for plan in plans])
    compare(outputs_made_anew, [(plan, {}) for plan in plans])
    inputs_without_rows(rank)
