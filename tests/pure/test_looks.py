"""Looks at a model beforehand: at copies, which leave no traces, or in words why not."""

from __future__ import annotations

import copy
import io
import random
import threading
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import espalier
from espalier.parallel.pipeline.record import SplitError
from espalier.parallel.pipeline.split import split
from espalier.parallel.tensor.infer import InferenceWarning, Sample, infer
from espalier.tensor.copies import Apart, apart
from espalier.tensor.traces import untraced

CALLS: list[int] = []
KNOWN: dict[str, Any] = {"generator": torch.Generator().manual_seed(1), "numpy": np.random.default_rng(1)}
TOTAL = 0


def counted(x: torch.Tensor) -> torch.Tensor:
    """A function of the user's own that a forward calls."""
    global TOTAL
    TOTAL += 1
    CALLS.append(TOTAL)
    KNOWN["last"] = x
    torch.rand((), generator=KNOWN["generator"])
    KNOWN["numpy"].random()
    return x


class Net(nn.Module):
    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)
        self.teacher = nn.Linear(8, 8).requires_grad_(False)
        self.half = self.teacher.weight.detach()[:4]  # a view
        self.hidden = [nn.Linear(8, 8)]
        self.nested = {"calls": [0]}
        self.generator = torch.Generator().manual_seed(2)
        self.note = lambda x: (self.nested["calls"].append(1), x)[1]
        self.computed = self.up.weight * 2  # no leaf

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Net.calls += 1
        x.add_(1)
        with torch.no_grad():
            self.teacher.weight.mul_(0.5)
            self.teacher.bias.data = self.teacher.bias.data + 1
            self.hidden[0].weight.zero_()
            self.half.add_(1)
        random.random()
        np.random.rand()  # noqa: NPY002
        torch.rand(2)
        torch.rand(2, generator=self.generator)
        return self.note(counted(x + self.down(torch.relu(self.up(x))))).sum()


def traces(net: Net, x: torch.Tensor, seen: list[int]) -> list[Any]:
    python = copy.deepcopy((CALLS, TOTAL, Net.calls, list(KNOWN), seen, net.nested, random.getstate()))
    state = [net.generator, KNOWN["generator"]]
    numpy = KNOWN["numpy"].bit_generator.state, np.random.get_state()[2]  # noqa: NPY002
    tensors = [*net.state_dict().values(), net.half, net.hidden[0].weight, x, torch.get_rng_state()]
    return [python, numpy, [t.detach().tolist() for t in (*tensors, *(g.get_state() for g in state))]]


def test_a_look_leaves_no_traces() -> None:
    net, x, seen = Net(), torch.ones(2, 8), []
    net.register_forward_hook(lambda *_: seen.append(1))
    net.up.register_forward_pre_hook(lambda *_, log=seen: log.append(2))
    before = traces(net, x, seen)
    assert infer(net, x, 2)
    assert traces(net, x, seen) == before
    net(x)
    assert [CALLS, TOTAL, Net.calls, seen, net.nested] == [[1], 1, 1, [2, 1], {"calls": [0, 1]}]
    assert traces(net, x, seen) != before


class Asserting(nn.Module):
    """As models that may be traced do."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._assert(x.shape[-1] == 8, "rows of 8")
        return self.down(self.up(x).relu())


def test_what_a_forward_asserts_is_no_obstacle() -> None:
    assert infer(Asserting(), torch.ones(1, 8), 2)


@pytest.mark.parametrize("tracked", [True, False])
def test_a_look_at_one_row_takes_batch_norm(tracked: bool) -> None:
    """Which refuses to train on one."""
    norm = nn.BatchNorm1d(32, track_running_stats=tracked)
    net = nn.Sequential(nn.Linear(8, 32), norm, nn.ReLU(), nn.Linear(32, 8))
    before = copy.deepcopy(net.state_dict())
    assert infer(net, torch.ones(1, 8), 2) == [
        {"0.weight": 0, "0.bias": 0, "1.weight": 0, "1.bias": 0, "3.weight": 1}
    ]
    assert all(torch.equal(x, before[name]) for name, x in net.state_dict().items())


def test_a_copy_has_memory_of_its_own_once_it_is_written_to() -> None:
    net = Net()
    shared: Any = torch._C._is_cow_tensor  # type: ignore[attr-defined]
    with apart(net, torch.ones(2, 8)) as twin:
        twin.module(twin.extra)
        assert shared(net.up.weight)
        assert not shared(twin.module.teacher.weight)
        assert twin.module.half.data_ptr() == twin.module.teacher.weight.data_ptr()
        kept = twin.module.up.weight
    assert kept.numel() == 0
    assert not any(shared(p) for p in net.parameters())  # or ZeRO could not empty their storages
    twin = Apart(net)
    assert twin.original(twin.module.hidden[0]) is net.hidden[0]
    assert twin.module.computed.is_leaf


class Locked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])
        self.layers[1].lock = threading.Lock()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[1](self.layers[0](x)).sum()


def test_a_copy_of_what_was_read_from_a_file_has_memory_of_its_own() -> None:
    file = io.BytesIO()
    torch.save((nn.Linear(4, 4), torch.ones(4)), file)
    file.seek(0)
    model, x = torch.load(file, weights_only=False)
    numbers = torch.from_numpy(np.ones(4))
    with apart(model, (x, numbers)) as twin:
        for of in (twin.module.weight.data, *twin.extra):
            of.add_(1)
    assert torch.equal(x, torch.ones(4)) and numbers.sum() == 4


class Made(OrderedDict[str, Any]):
    """Gives a new one of the class that it holds, as transformers' table of activations does."""

    def __getitem__(self, key: str) -> Any:
        return super().__getitem__(key)()


MADE = Made(relu=nn.ReLU, tanh=nn.Tanh)


class Activated(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        MADE["new"] = nn.GELU
        return MADE["relu"](super().forward(x))


def test_a_dict_that_makes_what_it_gives_is_put_back_as_it_held_it() -> None:
    model = Activated(4, 4)
    with untraced(model):
        model(torch.ones(2, 4))
        assert list(MADE) == ["relu", "tanh", "new"]
    assert [*MADE.items()] == [("relu", nn.ReLU), ("tanh", nn.Tanh)]


def test_a_row_that_the_model_does_not_take_is_its_own_error() -> None:
    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        infer(net, torch.ones(1, 5), 2)
    assert infer(net, torch.ones(1, 6), 2)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        infer(net, Sample(torch.ones(1, 5), torch.ones(4, 5)), 2)
    assert infer(net, Sample(torch.ones(6), torch.ones(4, 6)), 2), "of the whole batch"


def test_what_cannot_be_copied_is_named() -> None:
    net = Locked()
    with pytest.warns(InferenceWarning, match=r"layers\.1\.lock \(lock\).*layouts="):
        assert infer(net, torch.ones(1, 8), 2) == []
    with pytest.raises(SplitError, match=r"layers\.1\.lock.*__deepcopy__"):
        split(net, 2, torch.ones(1, 8))
    with torch.device("meta"):
        dry, rows = Locked(), torch.ones(4, 8)
    with pytest.warns(UserWarning, match=r"layers\.1\.lock.*lays out the model itself"):
        espalier.dry_run(dry, {"data": 2}, rows)


def test_dry_runs_leave_a_model_as_it_was() -> None:
    with torch.device("meta"):
        net, rows = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8)), torch.ones(4, 8)
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)

    net.forward = lambda x, own=net.forward: own(x).sum()  # type: ignore[method-assign]
    reports = [
        espalier.dry_run(net, plan, rows, optimizer=optimizer) for plan in ({"data": 2}, {"tensor": 2}) * 2
    ]
    assert str(reports[0]) == str(reports[2])
    assert str(reports[1]) == str(reports[3])
    assert reports[0].state_bytes > 0
    assert not optimizer.state
    assert optimizer.param_groups[0]["fused"] is True
    tables = [espalier.explain_layouts(net, {"tensor": 2}, rows) for _ in range(2)]
    assert str(tables[0]) == str(tables[1])
    assert all(type(p) is nn.Parameter for p in net.parameters())


def test_a_module_that_torch_compiles_runs_as_it_is_written() -> None:
    made = []

    def backend(graph: Any, inputs: Any) -> Any:
        made.append(graph)
        return graph

    inner = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))
    inner[0].compile(backend=backend)
    net = torch.compile(inner, backend=backend)
    plan = {"data": 1}
    with pytest.warns(UserWarning, match=r"torch\.compile.*espalier\.compile"):
        engine = espalier.initialize(
            net, torch.optim.SGD(net.parameters()), plan, loss_fn=lambda out, _: out.sum()
        )
    engine.train_step((torch.ones(4, 8), torch.ones(4)))
    assert infer(inner, torch.ones(1, 8), 2)
    assert not made


def test_what_torch_compiles_runs_as_it_is_written_where_it_meets_what_is_laid_out() -> None:
    made = []

    def backend(graph: Any, inputs: Any) -> Any:
        made.append(graph)
        return graph

    act = torch.compile(lambda x: x.sin() + x, backend=backend, fullgraph=True)
    net = nn.Sequential(nn.Linear(8, 4))
    net.register_forward_hook(lambda module, args, out: act(out))
    net = espalier.prepare(net, plan={"data": 1})
    whole = torch.compile(lambda: {"of": net(torch.ones(4, 8))}, backend=backend)
    with pytest.warns(UserWarning, match=r"<lambda> was compiled by torch.compile.*engine\.compile\(\)"):
        out = whole()["of"]
    assert not made
    plain = out.full_tensor().detach()
    assert torch.equal(act(plain), plain.sin() + plain)
    assert made


def test_load_before_the_first_batch_says_what_to_pass() -> None:
    """Where there is no memory yet to load into."""
    with torch.device("meta"):
        net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))
    mesh = espalier.Mesh.dry({"data": 1, "tensor": 2})
    engine = espalier.initialize(net, None, {"tensor": 2}, mesh=mesh)
    with pytest.raises(ValueError, match=r"example=batch.*lay_out\(batch\)"):
        engine.load("nowhere")


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # of Adagrad
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad])
def test_sparse_tables_have_the_same_updates(kind: Any) -> None:
    """Their gradients are dense here; rows that no batch has stay as they are."""
    options = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    tables = []
    for ours in (False, True):
        torch.manual_seed(0)
        net = nn.Sequential(nn.EmbeddingBag(10, 4, sparse=True, mode="sum"), nn.Linear(4, 3)).double()
        model, optimizer = net, kind(net.parameters(), lr=0.1, **options)
        if ours:
            with pytest.warns(UserWarning, match="'0': sparse=True"):
                model, optimizer = espalier.prepare(net, optimizer, plan={"data": 1})
        for i in range(3):
            model(torch.arange(12).view(4, 3) % (7 - i)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        tables.append(espalier.full_tensor(net[0].weight).detach())
    assert (tables[0] - tables[1]).abs().max() < 1e-12


BAGS = torch.arange(4) * 2
SPARSE: dict[str, Any] = {
    "look-up": lambda i, table: F.embedding(i, table, sparse=True),
    "padding": lambda i, table: F.embedding(i, table, 2, sparse=True),
    "counted": lambda i, table: F.embedding(i, table, scale_grad_by_freq=True, sparse=True),
    "torch.embedding": lambda i, table: torch.embedding(table, i, sparse=True),
    "bags": lambda i, table: F.embedding_bag(i.view(4, 2), table, sparse=True, mode="sum"),
    "bags apart": lambda i, table: F.embedding_bag(i, table, BAGS, sparse=True, mode="sum"),
}


@pytest.mark.filterwarnings("ignore::espalier.tensor.fallback.GatherWarning")
@pytest.mark.parametrize("name", SPARSE)
def test_a_sparse_look_up_says_what_to_write(name: str) -> None:
    """Where there is a gradient, whatever was looked up before without one."""
    net = nn.Embedding(10, 4)
    table, ids = net.weight.detach().clone(), torch.arange(8)
    net.forward = lambda x: SPARSE[name](x, net.weight)  # type: ignore[method-assign]
    model = espalier.prepare(net, plan={"data": 1})
    for _ in range(2):
        with torch.no_grad():
            assert torch.equal(espalier.full_tensor(model(ids)), SPARSE[name](ids, table))
        with pytest.raises(NotImplementedError, match=r"sparse=True(.|\n)*Adagrad"):
            model(ids)
    net.weight.requires_grad_(False)
    assert torch.equal(espalier.full_tensor(model(ids)), SPARSE[name](ids, table))
