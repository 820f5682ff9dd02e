"""Pipelines whose inputs want gradients: attacks, prompts, models before the model, and calls upon calls."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import espalier
from tests.ranks.habits import Lay, batch, compare, stepped
from tests.ranks.habitual import net

TOLERANCE = 1e-10
SGD = partial(torch.optim.SGD, lr=0.2)


def attacks(lay: Lay) -> list[Any]:
    """By ``x.grad``, and by ``torch.autograd.grad``, which adds to no gradient."""
    model, out = net(), list[Any]()
    model, optimizer = lay(model, SGD(model.parameters()))
    for step in range(2):
        x, y = batch(step)
        x.requires_grad_()
        F.cross_entropy(model(x), y).backward()
        optimizer.zero_grad()
        near = (x + 0.1 * x.grad.sign()).detach()
        noise = torch.full_like(x, 0.01).requires_grad_()
        of_rows = F.cross_entropy(model(near + noise), y, reduction="none") / len(y)
        (slope,) = torch.autograd.grad(torch.unbind(of_rows) if step else of_rows.sum(), noise)
        assert noise.grad is None and all(p.grad is None for p in model.parameters())
        loss = F.cross_entropy(model(near + slope), y)
        out += [x.grad, slope, stepped(loss, optimizer).item()]
    return [*out, *model.parameters()]


def encoders(lay: Lay) -> list[Any]:
    """A model that no engine knows makes what the stages are given, and a hook sees gradients once."""
    encoder, model, prompt, seen = net(6, 5), net(5, 4), nn.Parameter(torch.ones(6)), list[Any]()
    held = [*model.parameters(), *encoder.parameters(), prompt]
    held[0].register_hook(lambda grad: seen.append(grad.norm().item()))
    model, optimizer = lay(model, SGD(held))
    losses = [F.cross_entropy(model(encoder(x + prompt)), y) for x, y in map(batch, range(1))]
    losses = [stepped(loss, optimizer).item() for loss in losses]
    x, y = batch(1)
    losses.append(stepped(F.cross_entropy(model(encoder(x * prompt)), y), optimizer).item())
    return [*losses, *seen, *held]


def dreams(lay: Lay) -> list[Any]:
    """Of a model that is not trained."""
    model, dream = lay(net().requires_grad_(False)), batch(0)[0].requires_grad_()
    optimizer = torch.optim.Adam([dream], 0.1)
    losses = [stepped(-model(dream)[:, 1].mean(), optimizer).item() for _ in range(3)]
    return [*losses, dream]


def generators(lay: Lay) -> list[Any]:
    """Two models, of which one is called on what the other gives."""
    maker, judge, out = net(6, 6), net(6, 1), list[Any]()
    maker, of_maker = lay(maker, SGD(maker.parameters()))
    judge, of_judge = lay(judge, SGD(judge.parameters()))
    for step in range(2):
        x = batch(step)[0]
        made = maker(x.flip(0))
        apart = F.softplus(-judge(x)).mean() + F.softplus(judge(made.detach())).mean()
        out += [stepped(apart, of_judge).item(), stepped(F.softplus(-judge(made)).mean(), of_maker).item()]
    return [*out, *maker.parameters(), *judge.parameters()]


def chains(lay: Lay) -> list[Any]:
    """A model that is called on what it gave, with a hook that sees the whole gradient."""
    model, out = net(6, 6), list[Any]()
    next(model.parameters()).register_hook(lambda grad: out.append(grad.norm().item()))
    model, optimizer = lay(model, SGD(model.parameters()))
    for step in range(2):
        x, y = batch(step)
        again = model(torch.tanh(model(x)) + x)
        out.append(stepped(F.cross_entropy(model(again)[:, :4], y), optimizer).item())
    return [*out, *model.parameters()]


def views(lay: Lay) -> list[Any]:
    """Two views whose rows meet in one loss, and numbers of each; a third call meets both."""
    model, margin, out = (
        nn.Sequential(net(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.0), net(8, 6)),
        0.5,
        list[Any](),
    )
    scale = nn.Parameter(torch.tensor(2.0))
    model, optimizer = lay(model, SGD([*model.parameters(), scale]))
    for step in range(3):
        x, _ = batch(step)
        a, b = (F.normalize(model(x + shift), dim=1) for shift in (0.1, -0.2))
        logits = a @ b.t() if step != 1 else b @ a.t()
        loss = F.cross_entropy(logits * scale, torch.arange(len(x)))
        if step:
            far = model(x.flip(0))
            loss = loss + F.triplet_margin_loss(a, b, far, margin) - 0.1 * a.std(0).mean() * far.std()
            out.append(loss.item())
        out.append(stepped(loss, optimizer).item())
    return [*out, *model.parameters(), *model.buffers(), scale]


def rescaled(lay: Lay) -> list[Any]:
    """What has met another call is written to, and meets it again: each time it is what it was then."""
    model, out = nn.Sequential(net(6, 8), nn.BatchNorm1d(8), net(8, 4)), list[Any]()
    model, optimizer = lay(model, SGD(model.parameters()))
    for step in range(2):
        x, _ = batch(step)
        far, near = model(-x) + 1.0, model(x)
        loss = (far - near).square().mean()
        far.mul_(2.0)
        loss = loss + (far + near.square()).square().mean()
        far[:, :2] = 0.5
        both = far.clone() if step else near.clone()
        both.add_(near if step else far)
        loss = loss + both.square().mean()
        out.append(stepped(loss + (far - near.tanh()).abs().mean(), optimizer).item())
    return [*out, *model.parameters(), *model.buffers()]


def meetings(lay: Lay) -> list[Any]:
    """Sums of losses of two calls go on as one number, and two models' outputs meet."""
    model, judge, out = net(6, 4), net(6, 4), list[Any]()
    model, of_model = lay(model, SGD(model.parameters()))
    judge, of_judge = lay(judge, SGD(judge.parameters()))
    for step in range(2):
        x, y = batch(step)
        both = (F.cross_entropy(model(x), y) + F.cross_entropy(model(-x), y)).square()
        out.append(stepped(both, of_model).item())
        kl = F.kl_div(
            model(x).log_softmax(1), judge(x).log_softmax(1), log_target=True, reduction="batchmean"
        )
        out.append(stepped(kl, of_judge).item())
        of_model.step()
        of_model.zero_grad()
    return [*out, *model.parameters(), *judge.parameters()]


def pairs(lay: Lay) -> list[Any]:
    """Two towers and their scale in one model, two views by one model, and a triplet."""
    model, towers, out = net(6, 5), Towers(), list[Any]()
    model, optimizer = lay(model, SGD(model.parameters()))
    towers, of_towers = lay(towers, SGD(towers.parameters()))
    for step in range(3):
        x, _ = batch(step)
        a, b = (F.normalize(model(x + shift), dim=1) for shift in (0.1, -0.2))
        loss = F.cross_entropy(a @ b.t(), torch.arange(len(x)))
        if step:
            loss = loss + F.triplet_margin_loss(a, b, model(x.flip(0)))
        out.append(stepped(loss, optimizer).item())
        one, other, scale = towers(x, x.cos())
        logits = scale * one @ other.t()
        out.append(stepped(F.cross_entropy(logits, torch.arange(len(x))), of_towers).item())
    return [*out, *model.parameters(), *towers.parameters()]


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other, self.scale = net(6, 4), net(6, 4), nn.Parameter(torch.tensor(0.5))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.one(x), self.other(y), self.scale.exp()


def meet(rank: int, world: int) -> None:
    plans = [{"pipe": 2}] if world == 2 else [{"pipe": 2, "tensor": 2}, {"pipe": 2, "data": 2, "zero": 3}]
    for program in (views, rescaled, meetings):
        compare(program, [(plan, {}) for plan in plans], TOLERANCE)
    in_parts: dict[str, Any] = {"pipe": 2, "accumulate": 2, "data": world // 2}
    for program in (pairs, meetings):
        compare(program, [(in_parts, {})], TOLERANCE)
    if world == 2:
        x = batch(0)[0].float()
        model = net(6, 4)
        model, _ = espalier.prepare(model, SGD(model.parameters()), plan={"pipe": 2})
        for kept in (model(x).detach(), model(x).detach() * 2):
            with pytest.raises(TypeError, match=r"another call of the model(.|\n)*Make a new one"):
                kept.add_(model(-x))


@pytest.mark.filterwarnings("ignore:Outputs of two calls of the model meet in a loss")
@pytest.mark.filterwarnings("ignore:A loss is one of all rows")
@pytest.mark.filterwarnings("ignore:A value is asked for that lies on ranks:espalier.GatherWarning")
@pytest.mark.filterwarnings("ignore:.*in several stages or branches:espalier.GatherWarning")
@pytest.mark.filterwarnings("ignore:The tensor-parallel layouts of")
@pytest.mark.parametrize("world", [2, 4])
def test_outputs_of_several_calls_meet(ranks: Any, world: int) -> None:
    ranks(world, meet)


PROGRAMS: tuple[Callable[[Lay], list[Any]], ...] = (attacks, encoders, dreams, generators, chains)


def compared(rank: int, world: int) -> None:
    plans: list[dict[str, Any]] = [{"pipe": 2}, {"pipe": 2, "accumulate": 2}]
    if world == 4:
        plans = [{"pipe": 2, "data": 2}, {"pipe": 2, "tensor": 2}]
    for program in PROGRAMS:
        compare(program, [(plan, {}) for plan in plans], TOLERANCE)


@pytest.mark.filterwarnings("ignore:A loss is one of all rows")
@pytest.mark.filterwarnings("ignore:A value is asked for that lies on ranks:espalier.GatherWarning")
@pytest.mark.filterwarnings("ignore:.*in several stages or branches:espalier.GatherWarning")
@pytest.mark.filterwarnings("ignore:The tensor-parallel layouts of")
@pytest.mark.parametrize("world", [2, 4])
def test_as_on_one_process(ranks: Any, world: int) -> None:
    ranks(world, compared)


class Parts(nn.Module):
    """Gives a dict, and takes one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = net(6, 6), net(6, 6)

    def forward(self, x: Any) -> dict[str, torch.Tensor]:
        return {"x": self.last(self.first(x["x"] if isinstance(x, dict) else x))}


def told(rank: int, world: int) -> None:
    model = Parts()
    model, _ = espalier.prepare(model, SGD(model.parameters()), plan={"pipe": 2})
    x = batch(0)[0].float()
    with pytest.raises(ValueError, match=r"a dict, goes into another(.|\n)*the tensors in it"):
        model(model(x))


def told_of_own_rows(rank: int, world: int) -> None:
    model, x = net(), batch(0)[0].float()
    model, _ = espalier.prepare(model, SGD(model.parameters()), plan={"data": 2, "pipe": 2}, rows="own")
    with pytest.raises(TypeError, match=r"rows of its own(.|\n)*x\.detach"):
        model(x * nn.Parameter(torch.ones(6))).sum().backward()
    with pytest.warns(UserWarning, match=r"rows of its own(.|\n)*x\.grad stays as it is"):
        model(x.clone().requires_grad_()).sum().backward()


def test_refused(ranks: Any) -> None:
    ranks(2, told)


@pytest.mark.world(4)
def test_refused_of_own_rows(ranks: Any) -> None:
    ranks(4, told_of_own_rows)


class Chooses(torch.autograd.Function):
    """Asks for a value where no answers of a trace are given."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return x * 2 if t[0] < t[1] else x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return grad * 2, None


class Chosen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return Chooses.apply(self.enter(x), t)  # type: ignore[no-any-return]


class OfChosen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.chosen, self.head = Chosen(), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.chosen(x, torch.linspace(0, 1, 3)))  # type: ignore[no-any-return]


@dataclasses.dataclass
class Weighed:
    by: torch.Tensor
    name: str


class OfObjects(nn.Module):
    """Is called with an object that has rows, and with a dataclass of others."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6), nn.Tanh())
        self.head = nn.Linear(6, 4)

    def forward(self, of: Any, weighed: Weighed) -> torch.Tensor:
        return self.head(self.layers(of.inner) * weighed.by)


class Sloped(OfObjects):
    """Cannot be divided."""

    def forward(self, of: Any, weighed: Weighed) -> torch.Tensor:
        x = of.inner.detach().requires_grad_()
        with torch.enable_grad():
            out = super().forward(SimpleNamespace(inner=x), weighed)
            (slope,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        return out + slope.square().mean(-1, keepdim=True)


def trained_on_objects(lay: Lay) -> list[Any]:
    return on_objects(lay, OfObjects())


def undivided_on_objects(lay: Lay) -> list[Any]:
    return on_objects(lay, Sloped())


def on_objects(lay: Lay, model: Any) -> list[Any]:
    out = list[Any]()
    model, optimizer = lay(model, torch.optim.Adam(model.parameters(), 0.05))
    for step in range(3):
        x, y = batch(step)
        given = SimpleNamespace(inner=x, number=step), Weighed(x.cos(), f"step {step}")
        out.append(stepped(F.cross_entropy(model(*given), y), optimizer).item())
    with torch.no_grad():
        out.append(model(*given))
    return [*out, *model.parameters()]


def looked_at_objects(lay: Lay) -> list[Any]:
    """A hook sees them as they were given, once a call; a penalty is on gradients of a tensor in one."""
    model, out = OfObjects(), list[Any]()
    model.register_forward_hook(
        lambda m, args, result: out.append(args[0].inner.detach() * result.sum().item())
    )
    model, optimizer = lay(model, torch.optim.Adam(model.parameters(), 0.05))
    for step in range(2):
        x, y = batch(step)
        made = model(SimpleNamespace(inner=x.requires_grad_(), number=step), Weighed(x.detach().cos(), ""))
        (slope,) = torch.autograd.grad(made.square().sum(), x, create_graph=True)
        stepped(F.cross_entropy(made, y) + slope.square().mean(), optimizer)
    return [*out, *model.parameters()]


def objects_as_inputs(rank: int, world: int) -> None:
    compare(trained_on_objects, [({"pipe": 2, "accumulate": number}, {}) for number in (1, 2)])
    for program in (undivided_on_objects, looked_at_objects):
        compare(program, [({"pipe": 2}, {})])
    x, _ = batch(0)
    model: Any = espalier.prepare(OfObjects().double(), plan={"pipe": 2})
    locked = [SimpleNamespace(inner=x, by=x, lock=threading.Lock()) for _ in "ab"]
    with pytest.raises(TypeError, match=r"called with SimpleNamespace, in which no tensor is seen"):
        model(*locked).sum().backward()
    model = espalier.prepare(OfChosen().double(), plan={"pipe": 2})
    with pytest.raises(ValueError, match=r"asks for a value there(.|\n)*without pipe"):
        model(x).sum().backward()


@pytest.mark.filterwarnings("ignore:A value is asked for that lies on ranks:espalier.GatherWarning")
@pytest.mark.filterwarnings("ignore::espalier.parallel.compose.UndividedWarning")
@pytest.mark.filterwarnings("ignore:(.|\\n)*the model is computed once more, whole")
@pytest.mark.filterwarnings("ignore:(.|\\n)*model runs once more, without gradients")
def test_objects_as_inputs(ranks: Any) -> None:
    ranks(2, objects_as_inputs)
