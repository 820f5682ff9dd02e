"""Losses that plain loops make of what a model in stages gives: those of one process, or what to write."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.utils.data import DataLoader, TensorDataset

import espalier

TOLERANCE = 1e-10
Loss = Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]


class Heads(nn.Module):
    """Gives what its form says, of several heads."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.body, self.a, self.b = (
            nn.Sequential(nn.Linear(6, 8), nn.Tanh()),
            nn.Linear(8, 4),
            nn.Linear(8, 4),
        )

    def forward(self, x: torch.Tensor) -> Any:
        h = self.body(x)
        a, b = self.a(h), self.b(h)
        return {"one": a, "pair": (a, b), "dict": {"a": a, "b": b}, "nested": (a, [b, None, {"c": a + b}])}[
            self.form
        ]


def of_pair(out: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    a, b = out
    left, right = b.chunk(2, -1)
    return F.cross_entropy(a, y) + (left - right.detach()).square().mean() + b.flatten(1).norm(dim=1).mean()


def of_dict(out: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return sum(F.cross_entropy(logits, y) * (1.0 if name == "a" else 0.5) for name, logits in out.items())


def of_nested(out: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    a, (b, nothing, more) = out
    assert nothing is None
    return F.cross_entropy(a, y) + b.square().mean() + more["c"].abs().mean()


def without_grad(out: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    losses = F.cross_entropy(out, y, reduction="none")
    with torch.no_grad():
        weights = (1 - out.softmax(-1).gather(1, y[:, None]).squeeze(1)) ** 2
    return (weights * losses).mean()


def of_distribution(out: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    dist = torch.distributions.Categorical(logits=out)
    return -(dist.log_prob(y) * x[:, 0]).mean() - 0.1 * dist.entropy().mean()


def of_shapes(out: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    n, k = out.shape
    assert out.dim() == out.ndim == 2 and len(out) == n and out.dtype == torch.float64
    labels = torch.arange(out.size(0), device=out.device)
    similar = F.normalize(out, dim=-1) @ F.normalize(out, dim=-1).t()
    one_hot = torch.zeros_like(out).scatter_(1, y.view(-1, 1), 1.0)
    return F.cross_entropy(similar * 5, labels) + (out * one_hot).sum() / (n * k)


def written(out: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    kept, total = torch.zeros(8, 4, dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    kept[:, :2] = out.detach()[:, 1:3]
    kept.add_(out.detach())
    total += F.cross_entropy(out, y)
    scaled = out / 2
    scaled[:, 0] = 0
    scaled.mul_(3.0)
    return total + (kept * out).mean() + scaled.square().mean()


def by_rows(out: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    counts = torch.zeros(4, 4, dtype=torch.float64)
    for target, guess in zip(y, out.argmax(-1), strict=True):
        counts[target.long(), guess.long()] += 1
    rows = torch.stack([F.cross_entropy(row[None], t[None]) for row, t in zip(out, y, strict=True)])
    return rows.mean() * counts.diagonal().sum() + rows.sum()


def of_long_chain(out: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """More calls one after the other than Python lets functions call each other, each of one used twice."""
    for _ in range(200):
        out = out - 0.01 * out.tanh()
    return F.cross_entropy(out, y)


def of_weights(out: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Of rows, which are cut with them, and of classes, as many as rows, which are not."""
    weights, is_last = x[:, 2:].abs() + 0.5, (y == 3).double()
    wide = torch.cat([out, out], -1)
    of_classes = torch.linspace(0.5, 2, 8, dtype=torch.float64)
    targets = (wide > 0).double()
    parts = [
        F.l1_loss(out, x[:, 2:], weight=weights, reduction="sum"),
        F.binary_cross_entropy(out[:, 0].sigmoid(), is_last, weight=weights[:, 1], reduction="sum"),
        F.binary_cross_entropy_with_logits(
            wide, targets, weight=of_classes, pos_weight=2 * of_classes, reduction="sum"
        ),
    ]
    return (parts[0] + parts[1] + parts[2]) / 32


OF_PARTS: dict[Loss, str] = {of_dict: "dict", without_grad: "one", of_long_chain: "one", of_weights: "one"}
OF_WHOLE: dict[Loss, str] = {
    of_pair: "pair",
    of_nested: "nested",
    of_distribution: "one",
    of_shapes: "one",
    written: "one",
    by_rows: "one",
}


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(step)
    return torch.randn(8, 6, generator=g, dtype=torch.float64), torch.randint(0, 4, (8,), generator=g)


def trained(make: Callable[[], nn.Module], loss_of: Loss, plan: dict[str, Any] | None) -> Any:
    torch.manual_seed(0)
    random.seed(0)
    model: Any = make().double()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    if plan is not None:
        model = espalier.prepare(model, optimizer, plan=plan)[0]
    losses = []
    for step in range(3):
        x, y = batch(step)
        loss = loss_of(model(x), x, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model.state_dict() if plan is None else model.engine.full_state_dict()


def same(make: Callable[[], nn.Module], loss_of: Loss, plan: dict[str, Any]) -> None:
    losses, state = trained(make, loss_of, plan)
    of_one, expected = trained(make, loss_of, None)
    for a, b in zip(losses, of_one, strict=True):
        assert abs(a - b) < TOLERANCE, (loss_of.__name__, plan, losses, of_one)
    for name, x in expected.items():
        assert torch.allclose(state[name], x, rtol=0, atol=TOLERANCE), (loss_of.__name__, plan, name)


def losses(rank: int, world: int) -> None:
    for loss_of, form in (OF_PARTS | OF_WHOLE).items():
        same(lambda form=form: Heads(form), loss_of, {"pipe": 2})
    for loss_of, form in OF_PARTS.items():
        same(lambda form=form: Heads(form), loss_of, {"pipe": 2, "accumulate": 2})


class Rolls(nn.Module):
    """Python's dice say which layers run; a layer has no features."""

    def __init__(self, root: bool) -> None:
        super().__init__()
        self.root = root
        self.blocks = nn.ModuleList(Rolled() for _ in range(4))
        self.last = nn.Linear(6, 4)
        self.none, self.back = nn.Parameter(torch.empty(0, 6)), nn.Parameter(torch.empty(4, 0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            if not self.root or random.random() < 0.5:
                x = block(x)
        return self.last(x) + F.linear(F.linear(x, self.none), self.back)


class Rolled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.layer(x))


def cross_entropy(out: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(out, y)


def odd_models(rank: int, world: int) -> None:
    same(lambda: Rolls(False), cross_entropy, {"pipe": 2})
    with pytest.warns(UserWarning, match="Python's"):
        same(lambda: Rolls(True), cross_entropy, {"pipe": 2})


class Gives(nn.Module):
    """A distribution."""

    def __init__(self, checks: bool) -> None:
        super().__init__()
        self.a, self.b, self.checks = nn.Linear(6, 8), nn.Linear(8, 4), checks

    def forward(self, x: torch.Tensor) -> Any:
        loc = self.b(torch.tanh(self.a(x)))
        return torch.distributions.Normal(loc, 1.0, validate_args=self.checks)


class Code:
    """Has tensors in a way of its own."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


class Encodes(Gives):
    def __init__(self) -> None:
        super().__init__(False)

    def forward(self, x: torch.Tensor) -> Code:
        return Code(super().forward(x).mean)


@dataclass
class Result:
    logits: torch.Tensor
    loss: Any = None


class GivesResult(nn.Module):
    """A dataclass."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> Result:
        return Result(self.b(torch.tanh(self.a(x))))


def of_result(out: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(out.logits, y) if out.loss is None else out.loss


# lays a model, an optimizer, loaders out, as `espalier.prepare` does, or leaves them
Lay = Callable[..., tuple[Any, ...]]


def laid(plan: dict[str, Any] | None, *given: Any) -> tuple[Any, ...]:
    return given if plan is None else espalier.prepare(*given, plan=plan)


def same_numbers(rank: int, world: int, loop: Callable[[Lay], list[float]]) -> None:
    """A loop gives the same on one process and in a pipeline."""
    results = []
    for plan in (None, {"pipe": 2}):
        torch.manual_seed(0)
        results.append(loop(partial(laid, plan)))
    assert max(abs(a - b) for a, b in zip(*results, strict=True)) < TOLERANCE, results


def of_dataclass(rank: int, world: int) -> None:
    same(GivesResult, of_result, {"pipe": 2})


def several_calls(lay: Lay) -> list[float]:
    net = Heads("one").double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model, _ = lay(net, optimizer)
    seen: list[float] = []
    for step in range(3):
        x, y = batch(step)
        other = model(x + 0.1).detach()
        loss = F.mse_loss(model(x), other) * 0.5 if step else F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.inference_mode():
            seen += [loss.item(), model(batch(step + 9)[0]).sum().item()]
    return seen


class Writes(nn.Module):
    """Continues what it is given by what it holds likeliest."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.body, self.out = nn.Embedding(7, 6), nn.Linear(6, 6), nn.Linear(6, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.body(self.table(x)).cumsum(1).tanh())

    @torch.no_grad()
    def generate(self, x: torch.Tensor, n: int) -> torch.Tensor:
        for _ in range(n):
            x = torch.cat([x, self(x)[:, -1:].argmax(-1)], 1)
        return x


def own_text(lay: Lay) -> list[float]:
    """A model learns of what a method of its own has written, by stages that it did not call as a whole."""
    model: Any = Writes().double()
    optimizer: Any = torch.optim.SGD(model.parameters(), 0.5)
    model, optimizer = lay(model, optimizer)
    seen: list[float] = []
    for _ in range(3):
        text = model.generate(torch.arange(4)[:, None], 3)
        weights = (text[:, 1:] % 2).double() + 0.5
        with torch.no_grad():
            before = model(text[:, :-1]).log_softmax(-1)
        after = model(text[:, :-1]).log_softmax(-1)
        chosen = (after - before).gather(-1, text[:, 1:, None])[..., 0].exp()
        optimizer.zero_grad()
        (loss := (chosen * weights).mean()).backward()
        optimizer.step()
        seen += [loss.item(), float(espalier.full_tensor(text).sum())]
    return seen


def rows_of_a_loader(lay: Lay) -> list[float]:
    """They lie in stages, each rank's in its own, and go nowhere else, neither as inputs nor in losses."""
    model: Any = Heads("one").double()
    optimizer: Any = torch.optim.SGD(model.parameters(), 0.5)
    rows = TensorDataset(*batch(0))
    loader: Any = DataLoader(rows, batch_size=4, shuffle=True)
    model, optimizer, loader = lay(model, optimizer, loader)
    seen: list[float] = []
    torch.manual_seed(1)
    for _ in range(2):
        for x, y in loader:
            loss = (F.cross_entropy(model(x), y, reduction="none") * (y + 1)).mean()
            loss = loss * torch.zeros(len(y), 4).scatter_(1, y.long()[:, None], 1.0)[:, 0].add(1).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen.append(loss.item())
    return seen


def some_parameters(lay: Lay) -> list[float]:
    """``loss.backward(inputs=...)`` adds to the gradients of these."""
    net = Heads("pair").double()
    optimizer = torch.optim.SGD(net.parameters(), 0.5)
    model, _ = lay(net, optimizer)
    seen: list[float] = []
    for step in range(3):
        x, y = batch(step)
        a, b = model(x)
        optimizer.zero_grad()
        of_b = F.cross_entropy(b, y)
        of_b.backward(retain_graph=True, inputs=list(net.b.parameters()))
        (loss := F.cross_entropy(a, y)).backward()
        optimizer.step()
        seen += [of_b.item(), loss.item()]
    return seen


def written(lay: Lay) -> list[float]:
    """What is written to is another to all that share its memory, from then on."""
    net = Heads("one").double()
    optimizer = torch.optim.SGD(net.parameters(), 0.5)
    model, _ = lay(net, optimizer)
    seen: list[float] = []
    for step in range(3):
        x, y = batch(step)
        out = model(x)
        out[0] = 0.5
        before, same = out.mean(), out
        left = out[:, :2]
        if step:
            seen.append(before.item())
        left += 1
        out.clamp_(-1, 1.5)
        half = out / 2
        total = half.sum()
        half.mul_(3)
        meets = half.t() @ half
        squares = torch.diagonal(meets).add_(-1).square_().sum()
        rows, columns = torch.where(out.detach()[out.detach().mean(1) > 0] > 0.2)
        loss = F.cross_entropy(same, y) + 0.01 * (before + squares - total + meets.sum())
        loss = loss + 0.1 * (out[rows, columns] * left.sum()).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen += [
            loss.item(),
            before.item(),
            total.item(),
            squares.item(),
            out.sum().item(),
            left.mean().item(),
        ]
    return seen


class OfItsOwn(nn.Module):
    """Is given nothing: what it learns from are buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.linspace(-1, 1, 16).view(8, 2))
        self.features, self.scale = Heads("one").body, nn.Parameter(torch.tensor(0.5))
        self.features[0] = nn.Linear(2, 8)

    def forward(self) -> torch.Tensor:
        distances = torch.cdist(self.features(self.seen), self.features(self.seen))
        return (-distances.square() / self.scale.exp()).exp().logsumexp(1).mean()


def of_nothing(lay: Lay) -> list[float]:
    net = OfItsOwn().double()
    optimizer = torch.optim.SGD(net.parameters(), 0.5)
    model, _ = lay(net, optimizer)
    seen: list[float] = []
    for _ in range(3):
        optimizer.zero_grad()
        (loss := model()).backward()
        optimizer.step()
        seen.append(loss.item())
    return seen


class Judged(nn.Module):
    """A model that makes its loss itself."""

    def __init__(self, loss: Callable[..., Any]) -> None:
        super().__init__()
        self.inner, self.loss = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 4)), loss

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.loss(self.inner(x), labels)
        return found


def of_all_labels(rank: int, world: int) -> None:
    x, y, plan = batch(0)[0], torch.tensor([3, 3, 1, 0, 2, 2, 1, 2]), {"pipe": 2, "accumulate": 2}
    counted = lambda z, y: F.cross_entropy(z, y, 1 / (1 + torch.bincount(y, minlength=4).double()))  # noqa: E731
    engine = espalier.initialize(Judged(counted).double(), None, plan)
    with pytest.raises(ValueError, match="counts of each class"):
        engine.accumulate(engine.cut({"x": x, "labels": y}))
        engine.finish_gradients()
    for loss in (
        lambda z, y: F.cross_entropy(z, y) * (2 if (y == 3).any() else 1),
        lambda z, y: F.cross_entropy(z, y) / len(y.unique()),
    ):
        engine = espalier.initialize(Judged(loss).double(), None, plan)
        with pytest.warns(UserWarning, match="all labels of a micro-batch together"):
            engine.accumulate(engine.cut({"x": x, "labels": y}))
        engine.finish_gradients()
        engine.zero_grad()
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*together")
            engine.accumulate(engine.cut({"x": x[:4].repeat(2, 1), "labels": y[:4].repeat(2)}))


def told(rank: int, world: int) -> None:
    def model_of(net: nn.Module, **more: Any) -> Any:
        return espalier.prepare(
            net.double(), torch.optim.SGD(net.parameters(), lr=0.1), plan={"pipe": 2, **more}
        )[0]

    x, y = batch(0)
    model = model_of(Heads("one"))
    out = model(x)
    assert model(torch.cat([out, out[:, :2]], 1).detach()).shape == (8, 4)
    twin = copy.deepcopy(model)
    assert twin(x).shape == (8, 4)
    twin = copy.deepcopy(model)
    of_twin = torch.optim.SGD(twin.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"SGD is to train a copy(.|\n)*full_state_dict"):
        twin(x)
    del of_twin
    with pytest.warns(UserWarning), torch.no_grad():  # a check of values keeps a model in one stage
        assert model_of(Gives(True))(x).mean.shape == (8, 4)
    model = model_of(Encodes())
    with torch.no_grad():
        code = model(x)
    assert type(code) is Code and code.x.shape == (8, 4)
    table = nn.Sequential(nn.Embedding(6, 8, sparse=True), nn.Linear(8, 4))
    with pytest.raises(ValueError, match=r"SparseAdam(.|\n)*dense(.|\n)*Adagrad"):
        espalier.initialize(table, torch.optim.SparseAdam(table[0].parameters()), {"data": 2})
    with pytest.warns(UserWarning, match=r"'0': sparse=True(.|\n)*same updates"):
        model_of(table)
    assert not table[0].sparse
    lazy = nn.Sequential(nn.LazyLinear(4))
    with pytest.raises(ValueError, match=r"0.weight(.|\n)*lazy(.|\n)*on a batch once"):
        espalier.initialize(lazy, None, {"data": 2})
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 8, bias=False))
    memory = torch.randn(4, 16)
    net[2].weight.data = memory[:, :8].t()
    net[1].weight.data = memory[:, 8:12]  # beside it
    espalier.initialize(copy.deepcopy(net), None, {"data": 2})
    net[1].weight.data = memory[:, 7:11]
    with pytest.raises(
        ValueError, match=r"1.weight and 2.weight of(.|\n)*share memory(.|\n)*b.weight = a.weight"
    ):
        espalier.initialize(net, None, {"data": 2})
    told_of_ties()
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    model = model_of(net)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):  # not: it cannot be divided
        model(torch.ones(4, 5, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"laid out at its first call(.|\n)*Call it once before"):
        functional_call(model, {name: p * 1.0 for name, p in model.named_parameters()}, (x,))
    F.cross_entropy(model(x), y).backward()
    with pytest.raises(TypeError, match="put the transform into the model's forward"):
        torch.vmap(torch.sin)(model(x))
    loss = F.cross_entropy(model(x), y)
    with torch.no_grad():
        net[0].bias.add_(1.0)  # type: ignore[operator]  # as model.apply(init) does, or weights that are loaded
    with pytest.raises(ValueError, match=r"written to since the model was called(.|\n)*before"):
        loss.item()
    assert F.cross_entropy(model(x), y).item() > 0
    net.append(nn.Linear(4, 4).double())
    with pytest.raises(ValueError, match=r"'3' \(Linear\) came later"):
        F.cross_entropy(model(x), y).backward()


def told_of_ties() -> None:
    """What shares memory with parameters does so no longer: another model's, a flat buffer, frozen ones."""
    net = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    target, flat = nn.Linear(4, 4), torch.randn(20)
    target.weight.data = net[0].weight.data
    net[1].weight.data = flat[:16].view(4, 4)
    net[3].weight.data = net[2].requires_grad_(False).weight.data
    net[3].requires_grad_(False)
    kept, as_bytes = net.state_dict(), net[0].bias.detach().view(torch.uint8)  # what is sent of it, say
    with pytest.warns(UserWarning) as told:
        espalier.initialize(net, None, {"data": 2})
    said = {str(w.message).partition(" of Sequential ")[::2][0]: str(w.message) for w in told}
    assert [*said] == ["2.weight and 3.weight", "0.weight", "1.weight"], said
    assert "and parameters of another model" in said["0.weight"] and "stretches of" in said["1.weight"]
    assert target.weight.shape == kept["1.weight"].shape and flat.shape == (20,) and as_bytes.shape == (16,)


def test_losses_of_what_stages_give(ranks: Any) -> None:
    ranks(2, losses)


def test_dice_and_layers_without_features(ranks: Any) -> None:
    ranks(2, odd_models)


def test_calls_that_need_no_gradients_beside_one_that_does(ranks: Any) -> None:
    ranks(2, of_dataclass)
    ranks(2, same_numbers, several_calls)


@pytest.mark.filterwarnings("ignore:.*in several stages or branches:espalier.GatherWarning")
def test_text_of_its_own_rows_of_loaders_and_gradients_of_some_parameters(ranks: Any) -> None:
    ranks(2, same_numbers, own_text)
    ranks(2, same_numbers, rows_of_a_loader)
    ranks(2, same_numbers, some_parameters)


def test_outputs_that_are_written_to(ranks: Any) -> None:
    ranks(2, same_numbers, written)


def test_models_that_are_given_nothing(ranks: Any) -> None:
    ranks(2, same_numbers, of_nothing)


def test_what_cannot_be_made_of_it_is_told(ranks: Any) -> None:
    ranks(2, of_all_labels)
    ranks(2, told)
