"""Scripts as people have them: what stands around a model before it is prepared, and how they use loaders."""

from __future__ import annotations

import copy
import random
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

import espalier
from espalier.comm.control import gather_objects
from espalier.parallel.pipeline.model_stand_ins import ModelStandIns
from espalier.parallel.pipeline.record import SplitError

F64 = torch.float64
TOLERANCE = 1e-12
Say = Callable[..., None]

BEFORE = """
import random
import torch
from torch import nn

random.seed(0)
drawn = random.Random(0).random()
nets = [nn.Linear(4, 4), nn.Linear(4, 2)]
optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
schedules = [torch.optim.lr_scheduler.StepLR(x, 1, 0.5) for x in optimizers]

import espalier

models = [espalier.prepare(*both, plan={"zero": 3})[0] for both in zip(nets, optimizers)]
models[1](models[0](torch.ones(2, 4))).sum().backward()
for optimizer, schedule in zip(optimizers, schedules):
    optimizer.step()
    schedule.step()
print(random.random() == drawn, [x.param_groups[0]["lr"] for x in optimizers])
"""


def test_what_was_there_before_the_package_was_loaded() -> None:
    """Schedules have wrapped the step of before, Python's numbers are those of its seed; two models meet."""
    done = subprocess.run([sys.executable, "-W", "error", "-c", BEFORE], capture_output=True, text=True)
    assert done.stdout == "True [0.05, 0.05]\n", done.stderr


class Rows(Dataset[Any]):
    """Rows, to which something is done that the program says."""

    def __init__(self, change: Callable[[torch.Tensor, Rows], torch.Tensor] | None = None) -> None:
        draw = torch.Generator().manual_seed(0)
        self.rows = [torch.randn(6, dtype=F64, generator=draw) for _ in range(22)]
        self.change, self.own, self.numpys = change, random.Random(3), np.random.default_rng(3)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        row = self.rows[i]
        return (row if self.change is None else self.change(row, self)), i % 3


class Unequal(Rows):
    """Sequences of which no two that follow each other are as long."""

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        return self.rows[i].expand(2 + i % 4, 6), i % 3


def mixed(rows: list[Any]) -> Any:
    x, y = default_collate(rows)
    share, order = np.random.beta(1.0, 1.0), torch.randperm(len(x))  # noqa: NPY002
    return share * x + (1 - share) * x[order], y


def rolled(rows: list[Any]) -> Any:
    x, y = default_collate(rows)
    return x + 0.1 * x.roll(1, 0), y


def padded(rows: list[Any], batch_first: bool) -> Any:
    return pad_sequence([x for x, _ in rows], batch_first), torch.tensor([y for _, y in rows])


def named(rows: list[Any]) -> Any:
    x, y = default_collate(rows)
    return x, y, [f"row {i}" for i in y.tolist()]


def samples(rows: list[Any]) -> Any:
    """As torchvision's detectors are given them."""
    return tuple(zip(*rows, strict=True))


def classes(net: Any, batch: Any, say: Say) -> torch.Tensor:
    if len(batch) > 2:
        say(len(batch[2]), *map(len, batch[2]))
    out = net(batch[0])
    return F.cross_entropy(out if out.ndim == 2 else out.mean(int(len(batch[1]) == len(out))), batch[1])


def listed(net: Any, batch: Any, say: Say) -> torch.Tensor:
    xs, ys = batch
    return F.cross_entropy(net(torch.stack(list(xs))), torch.tensor(ys))


LOADED: dict[str, tuple[Callable[[], Dataset[Any]], dict[str, Any], Any]] = {
    "torch": (lambda: Rows(lambda x, _: x + torch.randn(6, dtype=F64)), {}, classes),
    "python": (lambda: Rows(lambda x, _: x.flip(0) if random.random() < 0.5 else x), {}, classes),
    "numpy": (lambda: Rows(lambda x, _: x * np.random.rand()), {}, classes),  # noqa: NPY002
    "own": (lambda: Rows(lambda x, s: x * s.own.random() + s.numpys.random()), {}, classes),
    "mixed": (Rows, {"collate_fn": mixed}, classes),
    "rolled": (Rows, {"collate_fn": rolled}, classes),
    "padded": (Unequal, {"collate_fn": partial(padded, batch_first=True)}, classes),
    "time first": (Unequal, {"collate_fn": partial(padded, batch_first=False)}, classes),
    "named": (Rows, {"collate_fn": named}, classes),
    "samples": (Rows, {"collate_fn": samples}, listed),
}


def trained(kind: str, plan: dict[str, int] | None) -> list[float]:
    """Losses, and what is drawn after them."""
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(3)
    dataset, options, loss_of = LOADED[kind]
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    loader: Any = DataLoader(dataset(), batch_size=8, shuffle=True, **options)
    model: Any = net
    if plan is not None:
        model, optimizer, loader = espalier.prepare(net, optimizer, loader, plan=plan)
    said: list[float] = []
    for _ in range(2):
        for batch in loader:
            optimizer.zero_grad()
            loss = loss_of(model, batch, lambda *x: said.extend(map(float, x)))
            loss.backward()
            optimizer.step()
            said.append(loss.item())
    return [*said, random.random(), float(np.random.rand()), torch.rand(()).item()]  # noqa: NPY002


def batches_of_one_process(rank: int, world: int, kind: str, plan: dict[str, int]) -> None:
    expected = trained(kind, None)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        found = trained(kind, plan)
    told = [x for x in seen if "Each rank loads all rows" in str(x.message)]
    assert len(told) == ("data" in plan), [str(x.message) for x in seen]
    assert len(found) == len(expected)
    assert max(abs(a - b) for a, b in zip(found, expected, strict=True)) < TOLERANCE, (found, expected)


@pytest.mark.parametrize("kind", LOADED)
def test_batches_that_hang_together(ranks: Any, kind: str) -> None:
    ranks(2, batches_of_one_process, kind, {"data": 2})


@pytest.mark.parametrize("kind", ["torch", "time first", "samples"])
def test_batches_that_all_ranks_load_anyway(ranks: Any, kind: str) -> None:
    ranks(2, batches_of_one_process, kind, {"tensor": 2})


def loader_of(plan: dict[str, int] | None, dataset: Dataset[Any] | None = None, **more: Any) -> Any:
    net, loader = nn.Linear(6, 3), DataLoader(dataset or Rows(), batch_size=8, shuffle=True, **more)
    if plan is not None:
        loader = espalier.prepare(net, loader, plan=plan)[1]
    torch.manual_seed(5)
    return loader


def ways(plan: dict[str, int] | None) -> Iterator[Any]:
    """Programs that use a loader; each gives what it has seen."""
    loader = loader_of(plan)
    yield len(loader.dataset), loader.batch_size, loader.drop_last, len(loader.sampler), len(loader)
    seen = []
    for x, _ in loader:  # a batch is looked at in the midst of an epoch
        seen.append((x.sum().item(), next(iter(loader))[0].sum().item()))
    yield seen
    yield [(x - y).sum().item() for (x, _), (y, _) in zip(loader, loader, strict=True)]
    upcoming = iter(loader)
    yield torch.rand(()).item(), next(upcoming)[0].sum().item()
    dataset = Rows()
    growing = loader_of(plan, dataset)
    counted = []
    for _ in range(3):
        counted.append((len(growing), sorted(x.sum().item() for x, _ in growing)))
        dataset.rows += dataset.rows[:5]
    yield counted


def numbers(of: Any) -> list[float]:
    """All that a container holds."""
    return [x for y in of for x in numbers(y)] if isinstance(of, list | tuple) else [float(of)]


def loaders(rank: int, world: int) -> None:
    for plan in ({"data": world}, {"tensor": world}):
        for found, expected in zip(list(ways(plan)), list(ways(None)), strict=True):
            assert numbers(found) == pytest.approx(numbers(expected), abs=TOLERANCE)
    loader = loader_of({"data": world})
    assert isinstance(loader.dataset, Rows)
    with pytest.raises(ValueError, match=r"collate_fn of a loader cannot be set(.|\n)*before"):
        loader.collate_fn = mixed
    with pytest.raises(AttributeError):
        loader.nothing  # noqa: B018


def test_ways_with_loaders(ranks: Any) -> None:
    ranks(2, loaders)


def seeds_of_workers(rank: int, world: int) -> None:
    """What workers draw is what those of one process do, also of workers that stay for the next epoch."""
    for stays in (False, True):
        forked: dict[str, Any] = {"num_workers": 2, "multiprocessing_context": "fork"}
        seen = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of forks beside threads; of rows that all ranks load
            for plan in ({"data": world}, None):
                loader = loader_of(plan, LOADED["torch"][0](), persistent_workers=stays, **forked)
                seen.append([x.sum().item() for _ in range(2) for x, _ in loader])
        assert seen[0] == pytest.approx(seen[1], abs=TOLERANCE), stays


def test_seeds_of_workers(ranks: Any) -> None:
    ranks(2, seeds_of_workers)


def beside_outputs(rank: int, world: int) -> None:
    """A batch of a loader comes first in a call, and what a pipeline has yet to compute after it."""
    torch.manual_seed(0)
    x, z = torch.randn(8, 6, dtype=F64), torch.randn(8, 3, dtype=F64)
    y = torch.arange(8) % 3
    made: dict[str, Callable[[Any, Any, Any], Any]] = {
        "accuracy": lambda p, y, z: (
            y.view(1, -1).expand_as(p.topk(2, 1)[1].t()).eq(p.topk(2, 1)[1].t()).sum()
        ),
        "eq": lambda p, y, z: y.eq(p.argmax(1)).sum(),
        "mul": lambda p, y, z: z.mul(p).mean(),
        "where": lambda p, y, z: torch.where(y[:, None] > 0, p, z).mean(),
        "gather": lambda p, y, z: z.gather(1, p.argmax(1, keepdim=True)).sum(),
        "cat": lambda p, y, z: torch.cat([z, p]).square().mean(),
        "mse": lambda p, y, z: F.mse_loss(z, p),
        "bmm": lambda p, y, z: torch.einsum("ij,ij->i", z, p).mean(),
        "normal": lambda p, y, z: torch.distributions.Normal(p, 1.0).log_prob(z).mean(),
    }
    for name, make in made.items():
        values = []
        for plan in (None, {"pipe": 2}):
            torch.manual_seed(1)
            net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
            loader: Any = DataLoader(TensorDataset(x, y, z), batch_size=8)
            model: Any = net
            if plan is not None:
                model, loader = espalier.prepare(net, loader, plan=plan)
            for rows, labels, targets in loader:
                out = model(rows)
                value = make(out, labels, targets)
                values.append(value.item())
                if value.requires_grad:
                    value.backward()
                    with warnings.catch_warnings():
                        warnings.simplefilter("ignore")  # of what lies in another stage
                        weight = next(iter(model.parameters()))
                        values.append(weight.grad.square().sum().item())
        half = len(values) // 2
        assert values[:half] == pytest.approx(values[half:], abs=TOLERANCE), (name, values)


def test_batches_beside_outputs_of_stages(ranks: Any) -> None:
    ranks(2, beside_outputs)


def profiled(rank: int, world: int) -> None:
    """torch's profiler holds what it has recorded: rank 0 may ask alone for a loss all the same."""
    losses = []
    for plan in (None, {"data": world}, {"tensor": world}):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)).double()
        model: Any = net if plan is None else espalier.prepare(net, plan=plan)
        losses.append([])
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True, profile_memory=True
        ):
            for step in range(2):
                draw = torch.Generator().manual_seed(step)
                out = model(torch.randn(8, 6, generator=draw, dtype=F64))
                cross, square = F.cross_entropy(out, torch.arange(8) % 3), out.square().sum()
                loss = cross + square
                loss.backward()
                if rank == 0:
                    losses[-1] += [loss.item(), cross.item(), square.item()]
                with torch.no_grad():
                    for p in model.parameters():
                        p -= 0.1 * p.grad
                        p.grad = None
    assert losses[0] == pytest.approx(losses[1], abs=TOLERANCE)
    assert losses[0] == pytest.approx(losses[2], abs=TOLERANCE)
    staged = espalier.prepare(nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3)), plan={"pipe": world})
    record = torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True, profile_memory=True
    )
    with record, pytest.raises(RuntimeError, match=r"torch's profiler holds it(.|\n)*schedule"):
        staged.get_parameter("0.weight").sum().item()
        staged(torch.randn(8, 6))


@pytest.mark.filterwarnings("ignore:.*Profiler clears events")  # of torch 2.11
def test_profilers(ranks: Any) -> None:
    ranks(2, profiled)


def compiled(rank: int, world: int) -> None:
    """``model.compile()`` of a prepared model is told to change nothing."""
    losses = []
    for plan in (None, {"data": world}, {"data": world, "zero": 3}):
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
        if plan is not None:
            model = espalier.prepare(model, plan=plan)
            with pytest.warns(UserWarning, match="runs as it is written"):
                model.compile(backend="eager")
        loss = model(torch.ones(8, 6, dtype=F64)).square().sum()
        loss.backward()
        losses.append(loss.item())
    assert losses == pytest.approx([losses[0]] * 3, abs=TOLERANCE)


def test_compiled_in_place(ranks: Any) -> None:
    ranks(2, compiled)


def taught(rank: int, world: int) -> None:
    """A teacher of each rank's own follows a student in stages: all ranks have its weights."""
    torch.manual_seed(0)
    student, teacher = (nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double() for _ in "ab")
    plain, beside = copy.deepcopy(student), copy.deepcopy(teacher)
    x = torch.randn(8, 6, dtype=F64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what lies in other stages
        for net, follower in ((plain, beside), (espalier.prepare(student, plan={"pipe": world}), teacher)):
            (net(x) - follower(x).detach()).square().mean().backward()
            with torch.no_grad():
                for p, q in zip(net.parameters(), follower.parameters(), strict=True):
                    p -= 0.1 * p.grad
                    q.data.mul_(0.9).add_(0.1 * p.detach().data)
            follower[0].weight.data.copy_(next(iter(net.parameters())).data)
            assert all(type(q.data) is torch.Tensor for q in follower.parameters())
    for p, q in zip(beside.parameters(), teacher.parameters(), strict=True):
        assert torch.allclose(p, q, rtol=0, atol=TOLERANCE)


def test_teachers_of_their_own_beside_stages(ranks: Any) -> None:
    ranks(2, taught)


def equations(rank: int, world: int) -> None:
    """A residual of second derivatives, and values at the border: two calls of the model in one loss."""
    losses, weights = [], []
    for plan in (None, {"data": world, "zero": 3}, {"data": world, "zero": 3, "recompute": "full"}):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)).double()
        optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
        model: Any = net
        if plan is not None:
            model, optimizer = espalier.prepare(net, optimizer, plan=plan)
        losses.append([])
        for step in range(3):
            draw = torch.Generator().manual_seed(step)
            x, border = (torch.randn(8, 2, generator=draw, dtype=F64) for _ in "ab")
            x.requires_grad_()
            u = model(x)
            (first,) = torch.autograd.grad(u, x, torch.ones_like(u), create_graph=True)
            (second,) = torch.autograd.grad(first, x, torch.ones_like(first), create_graph=True)
            loss = (first[:, :1] - second[:, 1:]).square().mean() + (model(border) - 1).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
            u = model(x)  # a graph that nobody goes back through
            torch.autograd.grad(u, x, torch.ones_like(u), create_graph=True)
        weights.append(torch.cat([espalier.full_tensor(p).detach().reshape(-1) for p in model.parameters()]))
    for found, held in zip(losses[1:], weights[1:], strict=True):
        assert found == pytest.approx(losses[0], abs=TOLERANCE)
        assert torch.allclose(held, weights[0], rtol=0, atol=1e-10)


def test_second_derivatives_beside_another_call(ranks: Any) -> None:
    ranks(2, equations)


def best(rank: int, world: int, folder: str) -> None:
    """The best accuracy is a tensor that ranks have parts of; rank 0 writes it down, and all read it."""
    model = espalier.prepare(nn.Linear(6, 3).double(), plan={"data": world})
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        right = model(torch.randn(8, 6, generator=draw, dtype=F64)).argmax(1) == torch.arange(8) % 3
    sums = right.reshape(-1).float().sum(0, keepdim=True).mul_(100 / 8)
    best_so_far: Any = max(sums[0] * 1.0, 0)
    assert best_so_far > 0
    if rank == 0:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            torch.save({"best": best_so_far}, f"{folder}/best.pt")
    gather_objects(None, model.engine.mesh)
    assert torch.load(f"{folder}/best.pt")["best"].item() == best_so_far.item() > 0


def test_metrics_in_files(ranks: Any, tmp_path: Path) -> None:
    ranks(2, best, str(tmp_path))


def test_modules_that_a_forward_makes() -> None:
    """As BYOL's programs make their target, where a stage runs it."""
    model = nn.Sequential(nn.Linear(6, 3))
    before = ModelStandIns.snapshot(model)
    assert not ModelStandIns.changes(model, before)
    model.target = copy.deepcopy(model[0])
    with pytest.raises(SplitError, match=r"'target' \(Linear\) was made within the forward pass"):
        ModelStandIns.changes(model, before)
