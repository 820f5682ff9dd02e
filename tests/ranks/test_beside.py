"""Optimizers that hold more than the model: parameters of a loss, or of a head that the loop calls itself."""

from __future__ import annotations

import copy
import io
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import espalier
from espalier.compat.torch import DistributedDataParallel
from tests.ranks.habits import Lay, as_it_is, batch, compare, numbers
from tests.ranks.habitual import net

TOLERANCE = 1e-10
ADAMW = partial(torch.optim.AdamW, lr=0.05)
MOMENTUM = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
ADAFACTOR = partial(torch.optim.Adafactor, lr=0.05)


class Margins(nn.Module):
    """A loss with parameters, of which one goes by a keyword that losses have constants in."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.temperature = nn.LayerNorm(8), nn.Parameter(torch.tensor(0.7))
        self.prototypes = nn.Parameter(torch.randn(4, 8))

    def forward(self, features: Any, y: torch.Tensor) -> Any:
        cosines = F.linear(F.normalize(self.norm(features)), F.normalize(self.prototypes))
        return F.cross_entropy((cosines - 0.2 * F.one_hot(y, 4)) / self.temperature.exp(), y)


def in_one_optimizer(make: Any, lay: Lay) -> list[Any]:
    """Of groups, clipped together, and taken up again in the middle."""
    model, margins, out = net(6, 8), Margins(), []
    both = [*model.parameters(), *margins.parameters()]
    groups = [{"params": model.parameters()}, {"params": margins.parameters(), "lr": 0.2}]
    model, optimizer = lay(model, make(groups))
    saved: list[Any] = []
    for step in range(5):
        if step == 3:
            for held, state in zip((model, margins, optimizer), saved, strict=True):
                held.load_state_dict(state)
        x, y = batch(step % 3)
        loss = margins(model(x), y) + 0.01 * margins.prototypes.square().sum()
        optimizer.zero_grad()
        loss.backward()
        out += [loss.item(), nn.utils.clip_grad_norm_(both, 0.3).item(), margins.temperature.grad.item()]
        optimizer.step()
        if step == 1:
            saved = copy.deepcopy([model.state_dict(), margins.state_dict(), optimizer.state_dict()])
    return [*out, *both]


def in_two_optimizers(lay: Lay) -> list[Any]:
    """One is of the loss alone."""
    model, margins, out = net(6, 8), Margins(), []
    model, *optimizers = lay(model, ADAMW(model.parameters()), MOMENTUM(margins.parameters()))
    for step in range(3):
        x, y = batch(step)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = margins(model(x), y)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        out.append(loss.item())
    return [*out, *model.parameters(), *margins.parameters()]


def made_outside(lay: Lay) -> list[Any]:
    """What is made of a parameter, before the model is called, and of one that only some steps use."""
    choice, heads = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.randn(3, 4, 8))
    seldom, model, out = nn.Parameter(torch.eye(4)), net(6, 8), []
    model, optimizer = lay(model, MOMENTUM([*model.parameters(), choice, heads, seldom]))
    for step in range(3):
        x, y = batch(step)
        head = (choice.softmax(0)[:, None, None] * heads).sum(0)
        logits = F.linear(model(x), head)
        loss = F.cross_entropy(logits @ seldom if step == 1 else logits, y)
        optimizer.zero_grad()
        loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()
        out.append(loss.item())
    return [*out, *model.parameters(), choice, heads, seldom]


def normalized(lay: Lay) -> list[Any]:
    """A head with statistics of the batch, as wide as the batch is long: each call counts once in them."""
    model, out = net(6, 8), list[Any]()
    head = nn.Sequential(
        nn.BatchNorm1d(8), nn.Linear(8, 8), nn.BatchNorm1d(8, momentum=None), nn.Linear(8, 4)
    )
    head[1].load_state_dict({"weight": torch.eye(8), "bias": torch.ones(8)})  # alike on all ranks
    head[1].requires_grad_(False)
    model, optimizer = lay(model, MOMENTUM([*model.parameters(), *filter(_is_trained, head.parameters())]))
    for step in range(5):
        x, y = batch(step)
        logits = head(model(x))
        if step % 2:  # looked at before, and after
            out.append(logits.detach().square().mean().item())
        loss = F.cross_entropy(logits, y)
        if step == 2:
            loss = 0.5 * (loss + F.cross_entropy(head(model(2 * x)), y))
        optimizer.zero_grad()
        loss.backward()
        out.append((logits.argmax(-1) == y).sum().item())
        optimizer.step()
        with torch.no_grad():
            out.append(head(model(-x)).mean().item())
    return [*out, *head.state_dict().values(), *model.parameters()]


def _is_trained(p: nn.Parameter) -> bool:
    return p.requires_grad


PLANS: tuple[dict[str, Any], ...] = (
    {"data": 2},
    {"data": 2, "zero": 3},
    {"tensor": 2},
    {"pipe": 2},
    {"pipe": 2, "accumulate": 2},
    {"data": 2, "zero": 2, "offload": {"states": "host"}},
)


def trained_together(rank: int, world: int) -> None:
    programs = {
        partial(in_one_optimizer, ADAMW): PLANS,
        partial(in_one_optimizer, ADAFACTOR): PLANS[1:2],
        in_two_optimizers: PLANS[1:4],
        made_outside: PLANS[:4],
        normalized: PLANS[:4],
    }
    torch.set_default_dtype(torch.float64)
    for program, plans in programs.items():
        torch.manual_seed(0)
        expected = numbers(program(as_it_is))
        for plan in plans:
            # the first rank's values count, as of the model's; stages have their own ranks'
            torch.manual_seed(0 if "pipe" in plan else rank)
            apart = (numbers(program(partial(espalier.prepare, plan=plan))) - expected).abs().max()
            assert apart < TOLERANCE, f"{program} under {plan}: {apart}"


@pytest.mark.filterwarnings("ignore:.*in several stages or branches:espalier.GatherWarning")
@pytest.mark.filterwarnings("ignore:A value is asked for that lies on ranks:espalier.GatherWarning")
def test_of_a_loss(ranks: Any) -> None:
    ranks(2, trained_together)


def of_own_rows(rank: int, world: int) -> None:
    """Each rank makes a loss of its rows: the loss's parameters are not to come apart."""
    torch.set_default_dtype(torch.float64)
    trained = []
    for wrap in (None, DistributedDataParallel):
        torch.manual_seed(0)
        model, margins = net(6, 8), Margins()
        model = model if wrap is None else wrap(model)
        optimizer = ADAMW([*model.parameters(), *margins.parameters()])
        for step in range(3):
            x, y = batch(step)
            if wrap is not None:
                x, y = x[4 * rank :][:4], y[4 * rank :][:4]
            optimizer.zero_grad()
            margins(model(x), y).backward()
            optimizer.step()
        trained.append(numbers([*model.parameters(), *margins.parameters()]))
    assert (trained[0] - trained[1]).abs().max() < TOLERANCE


def test_of_own_rows(ranks: Any) -> None:
    ranks(2, of_own_rows)


def resumed(rank: int, world: int, folder: str) -> None:
    """A checkpoint has them, and their states, and another plan reads it."""

    def made(plan: dict[str, Any]) -> Any:
        model, margins = net(6, 8), Margins()
        held = [*model.parameters(), *margins.parameters()]
        return *espalier.prepare(model, ADAMW(held), plan=plan), margins

    def trained(model: Any, optimizer: Any, margins: Any, steps: range) -> torch.Tensor:
        for step in steps:
            x, y = batch(step)
            optimizer.zero_grad()
            margins(model(x), y).backward()
            optimizer.step()
        return numbers([*model.parameters(), *margins.parameters()])

    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    first = made({"data": 2, "zero": 3})
    trained(*first, range(2))
    first[0].engine.save(folder)
    expected = trained(*first, range(2, 4))
    for plan in ({"data": 2, "zero": 3}, {"tensor": 2}, {"pipe": 2}):
        second = made(plan)
        if "pipe" in plan or "tensor" in plan:
            second[0].engine.lay_out(batch(0)[0])
        second[0].engine.load(folder)
        assert (trained(*second, range(2, 4)) - expected).abs().max() < TOLERANCE


@pytest.mark.filterwarnings("ignore:A value is asked for that lies on ranks:espalier.GatherWarning")
def test_checkpoints(ranks: Any, tmp_path: Path) -> None:
    ranks(2, resumed, str(tmp_path))


def bounded(lay: Lay) -> list[Any]:
    """Two models, each prepared by itself: their gradients are bounded as one vector, by the plan."""
    encoder, decoder = net(6, 8), net(8, 4)
    held = [*encoder.parameters(), *decoder.parameters()]
    encoder, optimizer = lay(encoder, MOMENTUM(held))
    decoder = lay(decoder)
    for step in range(3):
        x, y = batch(step)
        optimizer.zero_grad()
        F.cross_entropy(decoder(encoder(x)), y).backward()
        if lay is as_it_is:
            nn.utils.clip_grad_norm_(held, 0.1)
        optimizer.step()
    return held


def refused(rank: int, world: int) -> None:
    compare(bounded, [({"data": 2, "clip": 0.1, "zero": zero}, {}) for zero in (0, 3)])
    encoder, decoder = net(6, 8), net(8, 4)
    both = [*encoder.parameters(), *decoder.parameters()]
    with pytest.raises(ValueError, match="autocast-bfloat16"):
        espalier.prepare(encoder, MOMENTUM(both), plan={"data": 2, "precision": "autocast-float16"})
    for plan, said in (({"pipe": 2}, "pipe"), ({"data": 2, "accumulate": 2}, "accumulate")):
        encoder, decoder = net(6, 8), net(8, 4)
        held = MOMENTUM([*encoder.parameters(), *decoder.parameters()])  # which the first call finds
        encoder, decoder = (espalier.prepare(m, plan=plan) for m in (encoder, decoder))
        with pytest.raises(ValueError, match=rf"two models(.|\n)*go with {said}(.|\n)*nn.ModuleDict"):
            decoder(encoder(batch(0)[0].float()))
        del held
    for plan, told in (
        ({"data": 2, "zero": 3}, pytest.raises(ValueError, match=r"SGD.step\(\): the engine(.|\n)*is gone")),
        (
            {"data": 2},
            pytest.warns(UserWarning, match="is gone(.|\n)*right only where all are given the same"),
        ),
    ):
        model = net(6, 4)
        alone = MOMENTUM(model.parameters())
        espalier.prepare(model, alone, plan=plan)  # nobody keeps what it gives
        model(batch(0)[0].float()).sum().backward()
        with told:
            alone.step()
    encoder, decoder = net(6, 8), net(8, 4)
    held, plan = MOMENTUM([*encoder.parameters(), *decoder.parameters()]), {"data": 2, "zero": 3}
    espalier.prepare(encoder, held, plan=plan)
    with pytest.raises(ValueError, match=r"two models(.|\n)*the other's engine is gone"):
        espalier.prepare(decoder, held, plan=plan)
    (x, y), table, model = batch(0), nn.Parameter(torch.randn(4, 8)), net(6, 8)
    held, plan = [*model.parameters(), table], {"pipe": 2, "accumulate": 2}
    model, _ = espalier.prepare(model, MOMENTUM(held), plan=plan)
    with pytest.warns(UserWarning, match="A loss is one of all rows"):
        (model(x.float()) - table[y]).square().mean().backward()
    assert table.grad is not None


def test_refused(ranks: Any) -> None:
    ranks(2, refused)


def pickled(rank: int, world: int) -> None:
    """A file has the value of a loss that a pipeline made, and of one that it is yet to make."""
    model = net()
    model, _ = espalier.prepare(model, MOMENTUM(model.parameters()), plan={"pipe": 2})
    x, y = batch(0)
    loss = F.cross_entropy(model(x.float()), y)
    for has_gone_back in (False, True):
        if has_gone_back:
            loss.backward()
        file = io.BytesIO()
        torch.save({"loss": loss}, file)
        file.seek(0)
        read = torch.load(file)["loss"]
        assert type(read) is torch.Tensor and abs(read.item() - loss.item()) < 1e-6


def test_losses_in_files(ranks: Any) -> None:
    ranks(2, pickled)
