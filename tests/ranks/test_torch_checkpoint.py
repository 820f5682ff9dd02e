"""torch.distributed.checkpoint, its helpers for state dicts, and pickles, of what lies as DTensors."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.tensor as theirs
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

import espalier
from espalier import DTensor, Layout, Mesh, Partial, Replicate, Shard, distribute_tensor

F64 = torch.float64
R = Replicate()
# placements on two axes, and the order in which the axes cut
LAYOUTS: list[tuple[list[Any], Any]] = [
    ([R, R], None),
    ([Shard(0), R], None),
    ([R, Shard(1)], None),
    ([Shard(0), Shard(1)], None),
    ([Shard(0), Shard(0)], None),
    ([Shard(0), Shard(0)], (1, 0)),
]


def net_of(mesh: Mesh | None, place: tuple[list[Any], Any] | None, seed: int = 0) -> nn.Module:
    """A small model: uneven sizes, ranks that hold nothing, a scalar."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 7, bias=False)).to(F64)
    net.register_parameter("scale", nn.Parameter(torch.tensor(2.0, dtype=F64)))
    net.register_buffer("seen", torch.arange(3.0))
    if mesh is not None and place is not None:
        for module in net.modules():
            for name, p in list(module.named_parameters(recurse=False)):
                # a row or a column less where there is none: a bias has but one dim
                fits = [s if not isinstance(s, Shard) or s.dim < p.ndim else R for s in place[0]]
                setattr(module, name, nn.Parameter(distribute_tensor(p.detach(), mesh, fits, order=place[1])))
    return net


def trained(net: nn.Module, steps: int = 2) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    for _ in range(steps):
        step(net, optimizer)
    return optimizer


def step(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    x = torch.linspace(-1, 1, 20, dtype=F64).view(4, 5)
    (net(x).square().mean() * net.scale).backward()
    optimizer.step()
    optimizer.zero_grad()


def whole(tree: Any) -> Any:
    """Plain copies of what a tree holds."""
    if isinstance(tree, dict):
        return {key: whole(x) for key, x in tree.items()}
    return espalier.full_tensor(tree).detach().clone() if isinstance(tree, torch.Tensor) else tree


def same(a: Any, b: Any) -> None:
    assert sorted(map(str, a)) == sorted(map(str, b))
    for key, x in a.items():
        if isinstance(x, dict):
            same(x, b[key])
        elif isinstance(x, torch.Tensor):
            torch.testing.assert_close(x, b[key], rtol=0, atol=0)


def any_layout_into_any_other(rank: int, world: int, folder: str) -> None:
    mesh = Mesh.from_env({"a": 2, "b": world // 2})
    plain = net_of(None, None)
    right = trained(plain)
    wanted = whole({"model": plain.state_dict(), "optim": get_optimizer_state_dict(plain, right)["state"]})
    after = copy.deepcopy(plain)
    later = torch.optim.AdamW(after.parameters(), lr=0.1)
    later.load_state_dict(right.state_dict())
    step(after, later)
    for i, place in enumerate([None, *LAYOUTS]):
        net = net_of(mesh, place)
        optimizer = trained(net)
        model, optim = get_state_dict(net, optimizer)
        dcp.save({"model": model, "optim": optim}, checkpoint_id=f"{folder}/{i}")
        got = whole({"model": model, "optim": optim["state"]})
        for name, x in wanted["model"].items():
            torch.testing.assert_close(got["model"][name], x, rtol=1e-12, atol=1e-12)
        for j, other in enumerate([None, *LAYOUTS]):
            new = net_of(mesh, other, seed=1)
            again = torch.optim.AdamW(new.parameters(), lr=0.5)
            model, optim = get_state_dict(new, again)
            layouts = {n: x._layout for n, x in model.items() if isinstance(x, DTensor)}
            tree = {"model": model, "optim": optim}
            dcp.load(tree, checkpoint_id=f"{folder}/{i}")
            same(whole({"model": tree["model"], "optim": tree["optim"]["state"]}), got)
            set_state_dict(new, again, model_state_dict=tree["model"], optim_state_dict=tree["optim"])
            assert all(x._layout is layouts[n] for n, x in new.state_dict().items() if n in layouts), (i, j)
            step(new, again)  # the states lie as their parameters, and are those that were saved
            for name, x in whole(new.state_dict()).items():
                torch.testing.assert_close(x, after.state_dict()[name], rtol=1e-12, atol=1e-12)


def beside_torchs_own(rank: int, world: int, folder: str) -> None:
    """What torch's DTensor saves ours loads, and the other way round."""
    mesh = Mesh.from_env({"a": 2, "b": world // 2})
    value = torch.arange(35.0).view(7, 5)
    for i, (place, order) in enumerate(LAYOUTS[:-1]):
        ours = distribute_tensor(value, mesh, place, order=order)
        torchs = theirs.distribute_tensor(value, mesh.to_torch(), place)
        dcp.save({"x": ours}, checkpoint_id=f"{folder}/ours{i}")
        dcp.save({"x": torchs}, checkpoint_id=f"{folder}/theirs{i}")
        for other, cut in LAYOUTS[:-1]:
            got: dict[str, Any] = {"x": distribute_tensor(torch.zeros(7, 5), mesh, other, order=cut)}
            dcp.load(got, checkpoint_id=f"{folder}/theirs{i}")
            assert torch.equal(got["x"].full_tensor(), value)
            got = {"x": theirs.distribute_tensor(torch.zeros(7, 5), mesh.to_torch(), other)}
            dcp.load(got, checkpoint_id=f"{folder}/ours{i}")
            assert torch.equal(got["x"].full_tensor(), value)


def edges_of_checkpoints(rank: int, world: int, folder: str) -> None:
    mesh = Mesh.from_env({"a": 2, "b": world // 2})
    value = torch.arange(15.0).view(5, 3)
    x = distribute_tensor(value, mesh, [Shard(0), Shard(1)])
    # changed while it is written; a transposed one; one of no elements
    tree = {"x": x, "in": {"t": x.T, "none": distribute_tensor(torch.zeros(0, 3), mesh, [Shard(0), R])}}
    writing = dcp.async_save(tree, checkpoint_id=f"{folder}/async")
    x.zero_()
    writing.result()
    got: dict[str, Any] = {"x": torch.zeros(5, 3), "in": {"t": torch.zeros(3, 5), "none": torch.zeros(0, 3)}}
    dcp.load(got, checkpoint_id=f"{folder}/async")
    assert torch.equal(got["x"], value) and torch.equal(got["in"]["t"], value.T)
    # one that is on the meta device is made by the load
    empty = distribute_tensor(torch.zeros(5, 3, device="meta"), mesh, [Shard(0), Shard(0)], order=(1, 0))
    got = {"x": empty}
    dcp.load(got, checkpoint_id=f"{folder}/async")
    assert got["x"]._layout is empty._layout and torch.equal(got["x"].full_tensor(), value)
    # what some of the ranks hold
    half = Mesh.from_env({"c": 2}, ranks=[1, 0])
    dcp.save({"x": distribute_tensor(value, half, [Shard(1)])}, checkpoint_id=f"{folder}/half")
    got = {"x": distribute_tensor(torch.zeros(5, 3), half, [Shard(0)])}
    dcp.load(got, checkpoint_id=f"{folder}/half")
    if half.is_member:
        assert torch.equal(got["x"].full_tensor(), value)
    # sums are refused, and by all ranks
    addend = DTensor.from_local(torch.ones(5, 3), mesh, [Partial(), R])
    with pytest.raises(dcp.CheckpointException, match="redistribute"):
        dcp.save({"addend": addend}, checkpoint_id=f"{folder}/sum")
    with pytest.raises(dcp.CheckpointException, match="redistribute"):
        dcp.load({"x": addend}, checkpoint_id=f"{folder}/half")
    view = distribute_tensor(value, mesh, [Shard(0), R])[1:3]
    if view._layout.own is not view._layout:
        dcp.save({"x": value[1:3]}, checkpoint_id=f"{folder}/rows")
        with pytest.raises(dcp.CheckpointException, match="would not reach"):
            dcp.load({"x": view}, checkpoint_id=f"{folder}/rows")


OPTIONS = [
    {"full_state_dict": True},
    {"full_state_dict": True, "cpu_offload": True},
    {"cpu_offload": True},
    {"flatten_optimizer_state_dict": True},
]


def the_helpers(rank: int, world: int) -> None:
    mesh = Mesh.from_env({"a": 2, "b": world // 2})
    for place in LAYOUTS:
        net = net_of(mesh, place)
        optimizer = trained(net)
        wanted = whole(get_model_state_dict(net))
        states = whole(get_optimizer_state_dict(net, optimizer)["state"])
        for given in OPTIONS:
            options = StateDictOptions(**given)
            model = get_model_state_dict(net, options=options)
            optim = get_optimizer_state_dict(net, optimizer, options=options)
            if given.get("full_state_dict"):
                here = not given.get("cpu_offload") or rank == 0
                assert here == bool(model)
                if here:
                    assert not any(type(x) is DTensor for x in model.values())
                    same(model, wanted)
                    same(optim["state"], states)
            model, optim = copy.deepcopy((model, optim))
            if given.get("cpu_offload") and given.get("full_state_dict"):
                options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
            new = net_of(mesh, place, seed=1)
            again = trained(new, 1)
            set_model_state_dict(new, model, options=options)
            set_optimizer_state_dict(new, again, optim, options=options)
            same(whole(new.state_dict()), wanted)
            got = get_optimizer_state_dict(new, again)["state"]
            same(whole(got), states)
            for (name, p), (other, q) in zip(net.named_parameters(), new.named_parameters(), strict=True):
                assert name == other and p._layout is q._layout
                for key, x in again.state[q].items():
                    before = optimizer.state[p][key]
                    assert type(x) is type(before) and x.shape == before.shape
                    assert type(x) is not DTensor or x._layout is before._layout
            step(new, again)
        # from the meta device: the parameters are made by the load
        with torch.device("meta"):
            new = net_of(mesh, place, seed=1)
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*_get_pg_default_device.*|Multiple backends.*")  # torch's own
            set_model_state_dict(new, dict(wanted) if rank == 0 else {}, options=options)
        same(whole(new.state_dict()), wanted)


def engines(rank: int, world: int, folder: str) -> None:
    """What one plan trained another goes on with, by torch's checkpoints alone."""
    batches = [torch.randn(8, 5, dtype=F64, generator=torch.Generator().manual_seed(i)) for i in range(4)]

    def engine_of(plan: dict[str, Any]) -> Any:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).to(F64)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
        return espalier.initialize(net, optimizer, plan, loss_fn=lambda out, batch: out.square().mean())

    straight = engine_of({"data": world})
    losses = [float(straight.train_step((x, x))) for x in batches]
    plans = [{"data": world}, {"data": world, "zero": 1}, {"data": world, "zero": 3}, {"tensor": world}]
    for i, plan in enumerate(plans):
        first = engine_of(plan)
        for x in batches[:2]:
            first.train_step((x, x))
        model, optim = get_state_dict(first.module, first.optimizer)
        dcp.save({"model": model, "optim": optim}, checkpoint_id=f"{folder}/{i}")
        for other in plans:
            second = engine_of(other)
            second.lay_out((batches[0], batches[0]))
            model, optim = get_state_dict(second.module, second.optimizer)
            tree = {"model": model, "optim": optim}
            dcp.load(tree, checkpoint_id=f"{folder}/{i}")
            set_state_dict(
                second.module, second.optimizer, model_state_dict=model, optim_state_dict=tree["optim"]
            )
            again = [float(second.train_step((x, x))) for x in batches[2:]]
            torch.testing.assert_close(again, losses[2:], rtol=1e-10, atol=1e-12)
        # the optimizer's own door: what one process saved, in the middle of a run
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).to(F64)
        optimizer = torch.optim.AdamW(plain.parameters(), lr=0.05)
        for x in batches[:2]:
            plain(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        third = engine_of(plan)
        third.train_step((batches[3], batches[3]))
        third.module.load_state_dict(plain.state_dict())
        third.optimizer.load_state_dict(optimizer.state_dict())
        again = [float(third.train_step((x, x))) for x in batches[2:]]
        torch.testing.assert_close(again, losses[2:], rtol=1e-10, atol=1e-12)


def pickled(rank: int, world: int, folder: str) -> None:
    mesh = Mesh.from_env({"a": 2, "b": world // 2})
    value = torch.arange(35.0).view(7, 5)
    inner = mesh["b"]
    tree = {
        str(i): distribute_tensor(value, mesh, place, order=order) for i, (place, order) in enumerate(LAYOUTS)
    }
    tree["part"] = distribute_tensor(value, inner, [Shard(0)])
    tree["sum"] = DTensor.from_local(value.clone(), mesh, [Partial(), R])
    tree["view"] = tree["0"].T
    tree["parameter"] = nn.Parameter(tree["3"].detach())
    path = Path(folder) / f"{rank}.pt"
    torch.save(tree, path)
    buffer = pickle.dumps(tree)
    for got in (
        torch.load(path, weights_only=True),
        torch.load(path, weights_only=False),
        pickle.loads(buffer),
    ):
        for name, x in tree.items():
            assert type(got[name]) is DTensor and got[name]._layout is x._layout, name
            assert torch.equal(got[name].to_local(), x.to_local())
            assert got[name].requires_grad == x.requires_grad and got[name].is_leaf
            assert isinstance(got[name], nn.Parameter) == (name == "parameter")
        got["view"].add_(1)
        assert torch.equal(tree["view"].full_tensor(), value.T), "the memory is its own"
    twin = copy.copy(tree["1"])
    twin.add_(1)
    assert torch.equal(tree["1"].full_tensor(), value + 1) and twin._layout is tree["1"]._layout
    net = net_of(mesh, LAYOUTS[3])
    optimizer = trained(net)
    buffer = io.BytesIO()
    torch.save({"model": net.state_dict(), "optim": optimizer.state_dict()}, buffer)
    buffer.seek(0)
    new = net_of(mesh, LAYOUTS[3], seed=1)
    again = torch.optim.AdamW(new.parameters())
    held = torch.load(buffer, weights_only=True)
    new.load_state_dict(held["model"])
    again.load_state_dict(held["optim"])
    step(net, optimizer)
    step(new, again)
    same(whole(new.state_dict()), whole(net.state_dict()))
    module = pickle.loads(pickle.dumps(net))
    same(whole(module.state_dict()), whole(net.state_dict()))
    assert pickle.loads(pickle.dumps(mesh)) is mesh and pickle.loads(pickle.dumps(inner)) is inner
    layout = Layout(mesh, [Shard(0), Shard(0)], (7, 5), order=(1, 0), deferred=())
    assert pickle.loads(pickle.dumps(layout)) is layout
    # another's part is refused; what is whole on each rank is not a part
    other = torch.load(Path(folder) / f"{rank}.pt", weights_only=True)
    dist.barrier()
    neighbour = Path(folder) / f"{(rank + 1) % world}.pt"
    with pytest.raises(ValueError, match="Let each rank load what it saved"):
        torch.load(neighbour, weights_only=True)
    torch.save(other["0"], Path(folder) / f"whole{rank}.pt")
    dist.barrier()
    assert torch.load(Path(folder) / "whole0.pt")._layout is tree["0"]._layout


@pytest.mark.world(4)
def test_any_layout_loads_what_any_other_saved_on_four(ranks: Any, tmp_path: Path) -> None:
    ranks(4, any_layout_into_any_other, str(tmp_path))


@pytest.mark.world(2)
def test_any_layout_loads_what_any_other_saved_on_two(ranks: Any, tmp_path: Path) -> None:
    ranks(2, any_layout_into_any_other, str(tmp_path))


@pytest.mark.world(4)
def test_torchs_own_dtensor(ranks: Any, tmp_path: Path) -> None:
    ranks(4, beside_torchs_own, str(tmp_path))


@pytest.mark.world(4)
def test_edges(ranks: Any, tmp_path: Path) -> None:
    ranks(4, edges_of_checkpoints, str(tmp_path))


@pytest.mark.world(4)
def test_helpers_for_state_dicts(ranks: Any) -> None:
    ranks(4, the_helpers)


@pytest.mark.world(2)
def test_plans_go_on_with_what_others_trained(ranks: Any, tmp_path: Path) -> None:
    ranks(2, engines, str(tmp_path))


@pytest.mark.world(4)
@pytest.mark.filterwarnings("ignore:A pickle of a tensor that is cut")
def test_pickles(ranks: Any, tmp_path: Path) -> None:
    ranks(4, pickled, str(tmp_path))
