"""``loss = engine(batch)`` and ``engine.backward(loss)`` in pipelines, as under any other plan."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import espalier

BATCHES, ROWS = 6, 4
Told = tuple[list[float | bool], dict[str, torch.Tensor]]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.drop, self.norm = (
            nn.Linear(8, 16),
            nn.Linear(16, 8, bias=False),
            nn.Dropout(0.2),
            nn.BatchNorm1d(8),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.norm(x + self.drop(self.down(torch.tanh(self.up(x)))))
        return out


class Net(nn.Module):
    """With dropout and batch norm: micro-batches are no parts of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.out = nn.ModuleList(Block() for _ in range(3)), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        for block in self.blocks:
            x = block(x)
        scores = self.out(x)
        return scores if labels is None else {"loss": F.cross_entropy(scores, labels), "scores": scores}


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Of which the losses are means over more and fewer labels."""
    draw = torch.Generator().manual_seed(3)
    made = []
    for i in range(BATCHES):
        labels = torch.randint(0, 5, (ROWS,), generator=draw)
        labels[: i % 3] = -100
        made.append((torch.randn(ROWS, 8, dtype=torch.float64, generator=draw), labels))
    return made


def cross_entropy(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(scores, labels)


def contrastive(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """In which rows meet."""
    return F.cross_entropy(scores @ scores.T, torch.arange(len(scores)))


KINDS: dict[str, dict[str, Any]] = {
    "of the model": {},
    "of a function": {"loss_fn": cross_entropy},
    "asked early": {"loss_fn": cross_entropy},
    "rows": {"loss_fn": cross_entropy},
    "halved": {"loss_fn": cross_entropy},
    "penalized": {"loss_fn": cross_entropy},
    "of an output": {},
    "in an output": {},
    "of parts of an output": {},
    "clipped": {"loss_fn": cross_entropy, "max_grad_norm": 0.1},
    "counted": {"loss_fn": cross_entropy, "count": lambda batch: int((batch[1] != -100).sum())},
    "added up": {"loss_fn": cross_entropy, "count": "sum"},
    "meeting": {"loss_fn": contrastive, "count": lambda batch: len(batch[0])},
    "cut short": {"loss_fn": cross_entropy},
    "evaluated": {"loss_fn": cross_entropy},
}


LOSSES: dict[str, Callable[[espalier.Engine, Any], torch.Tensor]] = {
    "of an output": lambda engine, batch: F.cross_entropy(engine(x=batch[0]), batch[1]),
    "in an output": lambda engine, batch: engine(x=batch[0], labels=batch[1])["loss"],
    "of parts of an output": lambda engine, batch: F.cross_entropy(
        engine(x=batch[0], labels=batch[1])["scores"][:, :3], batch[1].clamp(max=2)
    ),
}


def trained(plan: Mapping[str, Any], kind: str) -> Told:
    """What a loop was told, and its parameters."""
    torch.manual_seed(0)
    net = Net().double()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    engine = espalier.initialize(net, optimizer, plan, **KINDS[kind])
    told: list[float | bool] = []
    for i, (x, labels) in enumerate(batches()):
        batch: Any = {"x": x, "labels": labels} if kind == "of the model" else (x, labels)
        if kind == "rows":
            here = engine.batch_rows(ROWS)
            batch = engine.local_batch((x[here], labels[here]), size=ROWS)
        loss = LOSSES.get(kind, lambda engine, batch: engine(batch))(engine, batch)
        if kind == "asked early":
            told.append(loss.item())
        if kind == "halved":
            loss = loss * 0.5
        if kind == "penalized":
            loss = loss + 0.1 * net.out.weight.square().sum()
        engine.backward(loss)
        told.append(loss.item())
        if kind == "cut short" and i == 1:
            engine.finish_gradients()
        told.append(engine.step())
        if kind == "evaluated":
            net.eval()
            with torch.no_grad():
                told.append(float(engine(batch)))
            net.train()
    told.append(float(engine.grad_norm))
    assert engine.loss is not None
    told.append(float(engine.loss))
    return told, engine.state_dict()


def alone(rank: int, world: int, accumulate: int, kinds: list[str]) -> dict[str, Told]:
    return {kind: trained({"accumulate": accumulate}, kind) for kind in kinds}


def as_one(rank: int, world: int, plan: Mapping[str, Any], expected: dict[str, Told]) -> None:
    for kind, (told, state) in expected.items():
        with pytest.warns(UserWarning, match="pass") if plan.get("accumulate", 1) > 1 else nullcontext():
            found, found_state = trained(plan, kind)
        assert found == pytest.approx(told, abs=1e-12), (plan, kind)
        assert [type(x) for x in found] == [type(x) for x in told], (plan, kind)
        for name, x in state.items():
            assert (found_state[name] - x).abs().max() < 1e-12, (plan, kind, name)


def compare(ranks: Any, world: int, plan: dict[str, Any], kinds: list[str]) -> None:
    (expected,) = ranks(1, alone, plan.get("accumulate", 1), kinds)
    ranks(world, as_one, plan, expected)


@pytest.mark.parametrize(
    "plan",
    [{"pipe": 2}, {"pipe": 2, "accumulate": 3}, {"pipe": 2, "accumulate": 2, "schedule": "zb-h1"}],
    ids=str,
)
def test_a_loop_of_the_engine_trains_as_on_one_process(ranks: Any, plan: dict[str, Any]) -> None:
    """Losses, whether a step updated, norms, parameters and buffers."""
    whole = ROWS % plan.get("accumulate", 1) == 0  # else batch norms see one row where stages are found
    compare(ranks, 2, plan, [kind for kind in KINDS if whole or kind not in LOSSES])


@pytest.mark.world(4)
def test_with_data(ranks: Any) -> None:
    some = ["of the model", "rows", "counted", "meeting"]
    compare(ranks, 4, {"pipe": 2, "data": 2, "zero": 2, "accumulate": 2}, some)


def refuse(rank: int, world: int) -> None:
    x, labels = batches()[0]
    torch.manual_seed(0)
    net, loss_of = Net().double(), nn.Linear(5, 1).double()
    optimizer = torch.optim.SGD([*net.parameters(), *loss_of.parameters()], lr=0.1)
    warnings.simplefilter("ignore")
    engine = espalier.initialize(
        net, optimizer, {"pipe": 2, "accumulate": 2}, loss_fn=lambda scores, y: cross_entropy(scores, y)
    )

    def refused(match: str, call: Callable[[], Any]) -> None:
        with pytest.raises(ValueError, match=match):
            call()

    loss = engine((x, labels))
    refused(r"write engine\.backward\(loss\)", loss.backward)
    asked = engine(x=x, labels=labels)["loss"]
    asked.item()  # of micro-batches of its own, by which batch norms go
    refused("makes of outputs(.|\n)*after engine.backward", lambda: engine.backward(asked))
    refused("no call of this engine", lambda: engine.backward(torch.ones(())))
    refused(
        "beside the model(.|\n)*train_step",
        lambda: engine.backward(loss_of(engine((x, labels)).view(1, 1).expand(1, 5)).mean()),
    )
    engine.backward(loss)
    refused(r"optimizer\.step\(\) after 1 of Plan\(accumulate=2\)", optimizer.step)
    kept = copy.copy([p.grad for p in net.parameters()])
    optimizer.zero_grad()
    assert any(grad is not None for grad in kept)
    refused(r"zero_grad\(\) after 1 of", lambda: engine.backward(engine((x, labels))))
    engine.zero_grad()
    for stepped in (False, True):
        engine.backward(engine((x, labels)))
        if stepped:
            refused("gradients of 2 micro-batches are finished", lambda: engine.backward(engine((x, labels))))
        assert engine.step() is stepped
    refused("several calls", lambda: engine.backward(engine((x, labels)) + engine((x, labels))))
    engine.train_step((x, labels))  # as ever


def test_what_is_refused_says_what_to_do(ranks: Any) -> None:
    ranks(2, refuse)
