"""The engine as a module: what the model gives, losses made outside, optimizers made after it, own rows."""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import espalier
from espalier import full_tensor
from espalier.comm.control import gather_objects

TOLERANCE = 1e-10


class Out(NamedTuple):
    loss: torch.Tensor | None
    logits: torch.Tensor
    tokens: torch.Tensor
    made: torch.Tensor  # rows that the forward has made and filled
    places: torch.Tensor


OF_ROWS = ("logits", "made", "places")


class Net(nn.Module):
    """Gives its own loss where it has labels, logits, and rows of which each has become three."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 4)
        self.register_buffer("scale", torch.tensor(0.5, dtype=torch.float64))

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Out:
        logits = self.last(torch.tanh(self.first(x))) * self.scale
        loss = None if labels is None else F.cross_entropy(logits, labels)
        made = torch.zeros(len(x), 2, dtype=x.dtype)
        made[:, 1] = logits[:, 0]
        return Out(loss, logits, x.repeat_interleave(3, 0) * self.scale, made, torch.arange(len(x)))


def rows(step: int, n: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(n, 6, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 4, (n,), generator=generator)


def net() -> Net:
    torch.manual_seed(0)
    return Net().double()


def own_loss(out: Out, y: torch.Tensor) -> torch.Tensor:
    """Of rows alone, beside what the model says itself."""
    loss = F.cross_entropy(out.logits, y) + 0.1 * out.logits.square().mean()
    loss = loss + 0.1 * ((out.made[:, 1] - y) * (1.0 + out.places)).square().mean()
    return loss if out.loss is None else loss + 0.3 * out.loss


def compare(engine: espalier.Engine, plain: nn.Module, what: Any) -> None:
    for name, x in engine.state_dict().items():
        assert (x - plain.state_dict()[name]).abs().max() < TOLERANCE, (what, name)


def of_all(rank: int, world: int, plan: dict[str, Any]) -> None:
    """Global outputs: DTensors, from which a loss is made as on one process."""
    ours, plain = net(), net()
    engine = espalier.initialize(ours, None, plan)
    engine.attach(torch.optim.AdamW(engine.parameters(), lr=0.05))
    theirs = torch.optim.AdamW(plain.parameters(), lr=0.05)
    with pytest.raises(ValueError, match="held by two of the optimizers"):
        engine.attach(torch.optim.SGD(ours.parameters(), lr=0.1))
    for step in range(3):
        x, y = rows(step)
        found = []
        for model, optimizer in ((engine, engine.optimizer), (plain, theirs)):
            assert optimizer is not None
            out = model(x=x, labels=y) if step < 2 else model(x, y)
            loss = own_loss(out, y)
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
            found.append([full_tensor(t) for t in (loss, norm, out.loss, out.logits)])
        for a, b in zip(*found, strict=True):
            assert (a - b).abs().max() < TOLERANCE, (plan, step)
    compare(engine, plain, plan)
    before = {name: x.clone() for name, x in engine.state_dict().items()}
    assert engine.eval() is engine and not ours.training and not engine.training
    assert engine.device == torch.device("cpu") and set(dict(engine.named_parameters())) == {
        name for name, _ in plain.named_parameters()
    }
    engine.load_state_dict(net().state_dict())
    compare(engine, net(), plan)
    keys = engine.load_state_dict({n: x for n, x in before.items() if "first" not in n} | {"odd": x}, False)
    assert keys == (["first.weight", "first.bias"], ["odd"])
    with pytest.raises(ValueError, match="is missing"):
        engine.load_state_dict({"first.weight": before["first.weight"]})
    engine.load_state_dict({f"module.{n}": x for n, x in before.items()})
    compare(engine, plain, plan)


def of_own(rank: int, world: int, plan: dict[str, Any], held: list[int], accumulate: int) -> None:
    """Each rank's rows in, its outputs out, the mean of its losses: as the sum over all ranks says."""
    ours, plain = net(), net()
    engine = espalier.initialize(ours, None, {**plan, "accumulate": accumulate})
    made = espalier.EngineModule(engine, "own")
    optimizer = torch.optim.AdamW(made.parameters(), lr=0.05)
    theirs = torch.optim.AdamW(plain.parameters(), lr=0.05)
    place = engine.mesh.coordinate[engine.mesh.axis("data")] if "data" in engine.mesh.names else 0
    begin = sum(held[:place])
    mine = slice(begin, begin + held[place])
    for step in range(3):
        losses = []
        for part in range(accumulate):
            x, y = rows(7 * step + part, sum(held))
            out = made(x[mine], labels=y[mine])
            out.logits.mul_(1)  # programs write to what they were given
            loss = own_loss(out, y[mine])
            if step == 1:
                engine.backward(loss)
            else:
                loss.backward()
            losses.append(loss)
            whole = plain(x, y)
            cuts = [slice(sum(held[:i]), sum(held[: i + 1])) for i in range(len(held))]
            parts = [
                own_loss(whole._replace(**{key: getattr(whole, key)[cut] for key in OF_ROWS}), y[cut])
                for cut in cuts
            ]
            (torch.stack(parts).mean() / accumulate).backward()
            assert type(out.logits) is torch.Tensor
            assert (out.logits - whole.logits[mine]).abs().max() < TOLERANCE
            if len(set(held)) == 1:
                assert torch.equal(out.tokens, whole.tokens[3 * mine.start : 3 * mine.stop])
            assert (loss - parts[place]).abs() < TOLERANCE
        if step == 1:
            mean = torch.stack(parts).mean()
            assert accumulate > 1 or (full_tensor(engine.loss) - mean).abs() < TOLERANCE
        nn.utils.clip_grad_norm_(made.parameters(), 0.1)
        nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        theirs.step()
        theirs.zero_grad()
        compare(engine, plain, (plan, held, accumulate, step))
    with torch.no_grad():
        x, y = rows(99, sum(held))
        assert (made.eval()(x[mine]).logits - plain(x).logits[mine]).abs().max() < TOLERANCE
    assert engine.optimizer is optimizer and engine.steps == 3
    assert set(made.state_dict()) == set(plain.state_dict()) and made.scale is ours.scale
    with pytest.raises(ValueError, match="a cast of a prepared model is too late"):
        made.to(torch.float16)
    assert made.to(torch.float64) is made and ours.first.weight.dtype == torch.float64


def on_two(rank: int, world: int) -> None:
    for plan in ({"data": 2}, {"data": 2, "zero": 3}, {"tensor": 2}):
        of_all(rank, world, plan)
    of_own(rank, world, {"data": 2}, [4, 4], 1)
    of_own(rank, world, {"data": 2, "zero": 2}, [1, 4], 2)
    of_own(rank, world, {"data": 2, "zero": 3}, [3, 3], 2)
    of_own(rank, world, {"tensor": 2}, [5], 1)
    of_one_batch(rank, world)
    of_rows_that_are_nearly_alike(rank, world)
    views(rank, world, [2, 2])
    views(rank, world, [1, 3])
    beside(rank, world, {"data": 2})
    beside(rank, world, {"data": 2, "zero": 3})
    scaled(rank, world)
    seeded_apart(rank, world)
    staged(rank, world)
    prepared(rank, world)


class Views(nn.Module):
    """Puts views together along the rows, before its layers and behind them, and takes some apart."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        several = self.layer(torch.cat([x, y, x + y]))
        first = several.chunk(3)[0]
        tokens = torch.stack([first] * 5, 1)  # five of each row
        by_view = torch.stack([first, first * 2])
        return (
            torch.cat((several, self.layer(x))),
            tokens.flatten(0, 1),
            torch.cat((tokens.reshape(-1, 3), tokens.reshape(-1, 3) + 1)),
            by_view.tanh().reshape(-1, 3),
            first.repeat(4, 1).sin(),
        )


def views(rank: int, world: int, held: list[int]) -> None:
    """This rank's rows of each view, one view after the other, as a model of its rows alone gives them."""
    torch.manual_seed(0)
    ours, plain = Views().double(), Views().double()
    ours.load_state_dict(plain.state_dict())
    made = espalier.EngineModule(espalier.initialize(ours, None, {"data": world}), "own")
    x, y = (part[sum(held[:rank]) : sum(held[: rank + 1])] for part in rows(1, 2 * sum(held))[0].chunk(2))
    weights = torch.arange(1.0, 3 * len(x) * 10 + 1, dtype=torch.float64).view(-1, 3)
    for outputs in (made(x, y), plain(x, y)):
        sum((out.sin() * weights[: len(out)]).sum() for out in outputs).backward()
    for ours_out, plain_out in zip(made(x, y), plain(x, y), strict=True):
        assert ours_out.shape == plain_out.shape and (ours_out - plain_out).abs().max() < TOLERANCE
    grads = gather_objects(plain.layer.weight.grad, made.engine.mesh)
    mean = torch.stack(grads).mean(0)
    assert (full_tensor(ours.layer.weight.grad) - mean).abs().max() < TOLERANCE


class Matching(nn.Module):
    """Gives features; the loop uses the rest of it."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 4), nn.Linear(4, 3)
        self.scale, self.unused = nn.Parameter(torch.tensor(0.7)), nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.body(x))


def matched(model: Any, features: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A loss of features and of parameters; some meet values of the rows that nothing goes back from."""
    loss = F.cross_entropy(model.scale.exp() * features, y) + F.cross_entropy(model.head(features), y % 3)
    with torch.no_grad():
        aims = torch.softmax(features.detach() @ model.head.weight.t(), 1)
    loss = loss - (aims * F.log_softmax(features[:, :3], 1)).sum(1).mean()
    return loss + 0.1 * model.head.weight.norm()


def beside(rank: int, world: int, plan: dict[str, Any]) -> None:
    """A loop uses parameters beside this rank's own rows: the mean of the ranks' losses goes back."""
    torch.manual_seed(0)
    ours, plain = Matching().double(), Matching().double()
    ours.load_state_dict(plain.state_dict())
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.2) for model in (ours, plain)]
    made = espalier.EngineModule(espalier.initialize(ours, optimizers[0], plan), "own")
    for step in range(2):
        parts = [*zip(*(part.chunk(world) for part in rows(step)), strict=True)]
        x, y = parts[rank]
        loss = matched(ours, made(x), y)
        losses = [matched(plain, plain(a), b) for a, b in parts]
        assert abs(loss.item() - losses[rank].item()) < TOLERANCE
        loss.backward()
        torch.stack(losses).mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    compare(made.engine, plain, plan)


def of_one_batch(rank: int, world: int) -> None:
    """Ranks that share layers work on one batch: other rows of each are no batch of theirs."""
    model = net()
    made = espalier.EngineModule(espalier.initialize(model, None, {"tensor": 2}), "own")
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
    x, y = rows(rank)
    F.cross_entropy(made(x).logits, y).backward()
    with pytest.raises(ValueError, match="share the model's layers(.|\n)*num_replicas=ranks // tensor"):
        optimizer.step()


class OfMany(nn.Linear):
    """Is given many tensors."""

    def forward(self, x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + sum(x.sum(1, keepdim=True) for x in others)


def of_rows_that_are_nearly_alike(rank: int, world: int) -> None:
    """Ranks with rows of their own are not told that these are the same, where a little of much differs."""
    drawn = torch.Generator().manual_seed(298)  # by chance the numbers that are compared are close
    x = [torch.randn(2, 6, generator=drawn) for _ in range(2)][rank]
    model = OfMany(6, 4)
    made = espalier.EngineModule(espalier.initialize(model, None, {"data": 2}), "own")
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
    made(x, *[torch.ones(2, 6)] * 11).square().mean().backward()
    optimizer.step()


def scaled(rank: int, world: int) -> None:
    """float16: gradients are scaled where a loss made outside enters the model; one step overflows."""
    found = []
    for outside in (True, False):
        model = net().float()
        engine = espalier.initialize(
            model, torch.optim.SGD(model.parameters(), lr=0.1), {"data": 2, "precision": "float16"}
        )
        with pytest.warns(UserWarning, match="the very same rows(.|\n)*DistributedSampler"):
            for step in range(3):
                x, y = rows(step, 4)
                out = engine.outputs((x.float() * (1e9 if step == 1 else 1),), rows="own")
                loss = F.cross_entropy(out.logits.float(), y)
                loss.backward() if outside else engine.backward(loss)
                engine.step()
        assert engine.skipped == 1
        found.append(engine.state_dict())
    for name, x in found[0].items():
        assert (x - found[1][name]).abs().max() < 1e-4, name


def seeded_apart(rank: int, world: int) -> None:
    """Ranks with rows of their own that were to draw other numbers are told that they do not."""
    x, _ = rows(0)
    for seed, tells in ((5, False), (5 + rank, rank > 0)):
        model = net()
        torch.manual_seed(seed)
        engine = espalier.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), {"data": 2})
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                engine.outputs((x,), rows="own")
        told = [str(one.message) for one in caught if "seeded apart" in str(one.message)]
        assert len(told) == int(tells) and all("torch.Generator()" in one for one in told), told


def staged(rank: int, world: int) -> None:
    plain, model = net(), net()
    engine = espalier.initialize(model, None, {"pipe": 2, "cuts": ["last"]})
    x, _ = rows(0)
    with torch.no_grad():
        out = engine(x=x)
        assert (out.logits - plain(x).logits).abs().max() < TOLERANCE
        assert (engine.outputs((x,), "own").logits - plain(x).logits).abs().max() < TOLERANCE


def prepared(rank: int, world: int) -> None:
    """A loop around what ``prepare`` gives draws the rows, and has the losses, of one process."""
    x, y = rows(3, 22)
    found, kept = [], None
    for ours in (True, False, True):
        torch.manual_seed(5)
        model: Any = net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        loader: Any = DataLoader(TensorDataset(x, y), batch_size=4, shuffle=True)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        if ours:
            torch.manual_seed(5 + rank)
            model, optimizer, loader, schedule = espalier.prepare(
                model, optimizer, loader, schedule, plan={"dp": 2, "zero_stage": 2}
            )
        else:
            torch.manual_seed(5)
        losses = []
        for _ in range(2):
            for inputs, labels in loader:
                optimizer.zero_grad()
                out = model(inputs)
                loss = F.cross_entropy(out.logits, labels)
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            schedule.step()
        found.append(losses)
    assert len(found[0]) == 12
    for a, b in zip(*found[:2], strict=True):
        assert abs(a - b) < TOLERANCE
    assert found[2] == found[0]
    own = DataLoader(TensorDataset(x, y), batch_size=3, sampler=DistributedSampler(TensorDataset(x, y)))
    engine = model.engine
    _, cut = espalier.prepare(net(), own, plan={"dp": 2})
    sizes = [batch[0].shape[0] for batch in cut]
    assert sizes == [6, 6, 6, 4] and len(cut) == 4
    del engine, kept


def test_outputs_and_losses_made_outside(ranks: Any) -> None:
    ranks(2, on_two)


def on_four(rank: int, world: int) -> None:
    of_own(rank, world, {"data": 2, "tensor": 2}, [3, 3], 1)
    of_own(rank, world, {"data": 2, "tensor": 2, "zero": 3}, [2, 3], 2)


def test_own_rows_beside_another_axis(ranks: Any) -> None:
    ranks(4, on_four)


def test_a_plan_under_names_that_people_know() -> None:
    plan = espalier.Plan(
        dp=2, pp=2, tp=2, cp=2, schedule="1F1B", bf16=True, micro_batches=4, max_grad_norm=1.0
    )
    assert plan == espalier.Plan(
        data=2, pipe=2, tensor=2, context=2, precision="bfloat16", accumulate=4, clip=1.0
    )
    assert espalier.Plan(fsdp=4, precision="autocast-bf16") == espalier.Plan(
        data=4, zero=3, precision="autocast-bfloat16"
    )
    assert espalier.Plan(pp=2, schedule="Interleaved1F1B", stages_per_rank=2).schedule == "interleaved"
    with pytest.raises(ValueError, match=r"2 mistakes(.|\n)*dp(.|\n)*leave one of them out"):
        espalier.Plan(data=2, zero=1, fsdp=2)
