"""What takes a model apart (tracers, exporters, a file of all of it) is given the one of one process."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.data import TensorDataset
from torch.utils.tensorboard import SummaryWriter

import espalier


def halved(module: nn.Module, args: Any, out: torch.Tensor) -> torch.Tensor:
    """A hook of the program's own."""
    return out * 0.5


class Net(nn.Module):
    """Tied weights, statistics, a recurrent layer, a parametrization, a block with a hook of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.first = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in "ab")
        self.norm = nn.BatchNorm1d(8)
        self.memory = nn.LSTM(8, 8, batch_first=True)
        self.turned = parametrizations.weight_norm(nn.Linear(8, 8))
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor(2.0), persistent=False)
        self.first.register_forward_hook(halved)
        self.embed.weight.no_decay = True  # type: ignore[attr-defined]

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.first(self.embed(ids))
        for block in self.blocks:
            x = x + block(x)
        x = self.norm(x.transpose(1, 2)).transpose(1, 2) * self.scale
        return self.head(self.turned(self.memory(x)[0]))


IDS = (torch.arange(8 * 6).reshape(8, 6) * 7) % 16


def trained(plan: dict[str, Any] | None, **options: Any) -> tuple[Any, nn.Module]:
    """A model after two steps, as it lies, and the same on one process."""
    torch.manual_seed(0)
    net = Net()
    models = net, copy.deepcopy(net)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
    model, optimizers[0] = espalier.prepare(models[0], optimizers[0], plan=plan, **options)
    for one, optimizer in zip((model, models[1]), optimizers, strict=True):
        for _ in range(2):
            nn.functional.cross_entropy(one(IDS).flatten(0, 1), IDS.roll(1, 1).flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
        one.eval()
    return model, models[1]


def same(what: Any, ours: torch.Tensor, plain: torch.Tensor) -> None:
    assert type(ours) is torch.Tensor and (ours - plain).abs().max() < 1e-10, what


def given_whole(plan: dict[str, Any]) -> None:
    model, plain = trained(plan)
    expected = plain(IDS)
    full = model.engine.full_model()
    assert type(full) is Net and full.head.weight is full.embed.weight
    assert full.embed.weight.no_decay and full.embed.weight.requires_grad
    same((plan, "forward"), full(IDS), expected)
    for name, x in plain.state_dict().items():
        same((plan, name), full.state_dict()[name], x)
    with pytest.raises(RuntimeError, match="Serialization of parametrized modules"):  # as on one process
        torch.save(model, io.BytesIO())
    for way in (torch.jit.trace, lambda m, ids: torch.export.export(m, (ids,)).module()):
        same((plan, way), way(model, IDS)(IDS), expected)
    # the model itself is as it was
    out = nn.functional.cross_entropy(model(IDS).flatten(0, 1), IDS.flatten())
    assert abs(out.item() - nn.functional.cross_entropy(expected.flatten(0, 1), IDS.flatten()).item()) < 1e-10


class Beside(nn.Module):
    """A module of the program around a prepared one."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.inner, self.more = inner, nn.Linear(16, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.more(self.inner(ids))


def by_other_ways(rank: int, folder: str) -> None:
    """Modules around it and within it, scripts, pictures of graphs, batches of loaders; on one rank alone."""
    plans: tuple[dict[str, Any], ...] = {"data": 2}, {"data": 2, "zero": 3}, {"tensor": 2}, {"pipe": 2}
    for plan in plans:
        model, plain = trained(plan)
        around = Beside(model)
        same((plan, "around"), torch.jit.trace(around, IDS)(IDS), Beside(plain)(IDS))
        loader = model.engine.loader(TensorDataset(IDS), batch_size=8)
        (ids,) = next(iter(loader))
        same((plan, "rows"), torch.jit.trace(model, ids)(IDS), plain(IDS))
        same((plan, "engine"), torch.jit.trace(model.engine, IDS)(IDS), plain(IDS))
        with SummaryWriter(f"{folder}/{rank}") as writer:
            writer.add_graph(model, IDS)
            for name, p in model.named_parameters():
                writer.add_histogram(name, p)
        if "data" in plan and "zero" not in plan:
            same((plan, "within"), torch.jit.trace(model.module, IDS)(IDS), plain(IDS))
            if rank == 0:
                same((plan, "alone"), torch.jit.trace(model, ids)(IDS), plain(IDS))
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
        expected = net(torch.ones(2, 4))
        model, _ = espalier.prepare(net, torch.optim.SGD(net.parameters(), lr=0.0), plan=plan)
        same((plan, "before"), torch.jit.trace(model.engine, torch.ones(2, 4))(torch.ones(2, 4)), expected)
        model(torch.ones(2, 4)).sum().backward()
        same((plan, "script"), torch.jit.script(model)(torch.ones(2, 4)), expected)
        torch.save(model, file := io.BytesIO())
        file.seek(0)
        read = torch.load(file, weights_only=False)
        assert type(read) is nn.Sequential
        same((plan, "file"), read(torch.ones(2, 4)), expected)


class OfGraph(nn.Module):
    """Has a sparse buffer, which lies whole on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("graph", torch.eye(6).to_sparse(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.sparse.mm(self.graph, self.first(x)).tanh())


def of_a_sparse_buffer() -> None:
    net, x = OfGraph(), torch.ones(6, 4)
    expected = net(x)
    model, _ = espalier.prepare(net, torch.optim.SGD(net.parameters(), lr=0.0), plan={"pipe": 2})
    model(x).sum().backward()
    full = model.engine.full_model()
    assert full.graph.is_sparse
    same("sparse", full(x), expected)


def on_two(rank: int, world: int, folder: str) -> None:
    torch.set_default_dtype(torch.float64)
    given_whole({"data": 2, "zero": 3, "recompute": "full"})
    given_whole({"tensor": 2})
    given_whole({"pipe": 2})
    by_other_ways(rank, folder)
    of_a_sparse_buffer()


def on_four(rank: int, world: int) -> None:
    torch.set_default_dtype(torch.float64)
    given_whole({"data": 2, "zero": 3, "tensor": 2})
    given_whole({"pipe": 2, "tensor": 2})


@pytest.mark.filterwarnings("ignore:.*in several stages or branches:espalier.GatherWarning")
@pytest.mark.filterwarnings("ignore:.torch.jit.* is deprecated")
@pytest.mark.filterwarnings("ignore:The tensor-parallel layouts of")
@pytest.mark.filterwarnings("ignore:OfGraph cannot be split:espalier.parallel.compose.UndividedWarning")
@pytest.mark.filterwarnings("ignore:A value is asked for that lies on ranks:espalier.GatherWarning")
@pytest.mark.filterwarnings("ignore:.first. has a hook, and lies in a stage of another rank")
@pytest.mark.filterwarnings("ignore:The tensor attributes self.memory._flat_weights")  # as on one process
@pytest.mark.filterwarnings("ignore:Converting a tensor to a Python boolean:torch.jit.TracerWarning")
@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")  # of torch 2.11
def test_a_model_is_given_as_on_one_process(ranks: Any, tmp_path: Path) -> None:
    ranks(2, on_two, str(tmp_path))
    ranks(4, on_four)
