"""DTensor towards its users: torch's names, leaves, optimizers, checkpointing, hooks, errors, memory."""

from __future__ import annotations

import copy
import itertools
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import espalier
from espalier import DTensor, GatherWarning, Layout, Mesh, Partial, Replicate, Shard, distribute_tensor

F64 = torch.float64


def mesh_of(world: int) -> Mesh:
    return Mesh.from_env({"axis": world})


def seeded(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(sum(shape)))


def lay_out_module(module: nn.Module, mesh: Mesh, places: list) -> nn.Module:
    """Lay the parameters out, going round the placements given."""
    turn = itertools.cycle(places)
    for owner in list(module.modules()):
        for name, p in list(owner.named_parameters(recurse=False)):
            place = next(turn)
            dim = p.ndim - 1 if place == "last" else 0
            placements = [Replicate()] if place is None else [Shard(dim)]
            owner.register_parameter(name, distribute_tensor(p, mesh, placements, src_data_rank=None))
    return module


# ---- local and global


def edges(rank: int, world: int) -> None:
    mesh = mesh_of(world)
    whole = seeded(5, 3)
    for placements in ([Replicate()], [Shard(0)], [Shard(1)]):
        x = distribute_tensor(whole, mesh, placements)
        assert torch.equal(x.full_tensor(), whole) and x.shape == whole.shape
        again = DTensor.from_local(x.to_local(), mesh, placements, shape=whole.shape)
        assert torch.equal(again.full_tensor(), whole)
        assert torch.equal(x.redistribute(placements=[Shard(0)]).full_tensor(), whole)
        assert x.tolist() == whole.tolist() and len(x) == 5 and x.stride() == whole.stride()
    total = DTensor.from_local(torch.tensor(float(rank + 1)), mesh, [Partial()])
    right = world * (world + 1) / 2
    assert (
        total.item() == right
        and float(total) == right
        and bool(total == right)
        and f"{total:.1f}" == f"{right:.1f}"
    )
    assert "P(sum)" in repr(total) and str(total) == repr(total), "printing never communicates"
    average = DTensor.from_local(torch.tensor(float(rank)), mesh, [Partial("avg")])
    assert average.item() == (world - 1) / 2
    for op, value in (("max", world - 1), ("min", 0)):
        assert DTensor.from_local(torch.tensor(float(rank)), mesh, [Partial(op)]).item() == value


def edges_have_gradients(rank: int, world: int) -> None:
    mesh = mesh_of(world)
    whole = seeded(4, 3)
    x = distribute_tensor(whole.clone().requires_grad_(), mesh, [Replicate()])
    # nothing said: taken as the same on all ranks, which it is
    (x.to_local() ** 2).sum().backward()
    assert torch.equal(x.grad.full_tensor(), 2 * whole)
    x.grad = None
    # every rank uses another row
    (x.to_local(grad_placements=[Partial()])[rank] ** 2).sum().backward()
    right = torch.zeros(4, 3, dtype=F64)
    right[:world] = 2 * whole[:world]
    assert torch.equal(x.grad.full_tensor(), right)
    x.grad = None
    (x.to_local(grad_placements=[Replicate()]) ** 2).sum().backward()
    assert torch.equal(x.grad.full_tensor(), 2 * whole)
    with pytest.raises(ValueError, match="do not fit"):
        x.to_local(grad_placements=[Shard(0)])
    local = torch.ones(2, 3, dtype=F64, requires_grad=True)
    y = DTensor.from_local(local, mesh, [Shard(0)])
    (y * torch.arange(1.0, 2 * world + 1, dtype=F64).unsqueeze(1)).sum().backward()
    assert torch.equal(local.grad[:, 0], torch.tensor([2.0 * rank + 1, 2.0 * rank + 2], dtype=F64))


def wrong_edges(rank: int, world: int) -> None:
    mesh = mesh_of(world)
    with pytest.raises(ValueError, match="gave a part of the shape"):
        DTensor.from_local(torch.zeros(5), mesh, [Shard(0)], shape=(3,))
    with pytest.raises(ValueError, match="makes a new leaf"):
        distribute_tensor(torch.zeros(3, requires_grad=True) * 2, mesh)
    with pytest.raises(TypeError, match="cannot be called"):
        DTensor(torch.zeros(3))
    x = distribute_tensor(torch.zeros(4), mesh, [Shard(0)])
    with pytest.raises(RuntimeError, match="one element"):
        x.requires_grad_().backward()


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


def local_mapped(rank: int, world: int) -> None:
    mesh = mesh_of(world)
    x = distribute_tensor(seeded(5, 3).requires_grad_(), mesh, [Shard(0)])
    w = distribute_tensor(seeded(3).requires_grad_(), mesh, [Replicate()])
    split = local_shape = x._layout.local_shape
    assert split

    def body(a: torch.Tensor, b: torch.Tensor, factor: int) -> torch.Tensor:
        assert type(a) is torch.Tensor and tuple(a.shape) == tuple(local_shape)
        return (Double.apply(a) * b * factor).sum()

    mapped = espalier.local_map(body, out_placements=[Partial()], in_placements=([Shard(0)], [Replicate()]))
    out = mapped(x, w, 3)
    right_x, right_w = seeded(5, 3).requires_grad_(), seeded(3).requires_grad_()
    right = (right_x * 2 * right_w * 3).sum()
    torch.testing.assert_close(out.full_tensor(), right)
    out.backward()
    right.backward()
    torch.testing.assert_close(x.grad.full_tensor(), right_x.grad)
    torch.testing.assert_close(w.grad.full_tensor(), right_w.grad)
    with pytest.raises(ValueError, match="redistribute_inputs=True"):
        espalier.local_map(body, [Partial()], ([Replicate()], None))(x, w, 3)
    turned = espalier.local_map(body, [Partial()], ([Shard(0)], None), redistribute_inputs=True)
    torch.testing.assert_close(turned(x.redistribute(placements=[Shard(1)]), w, 3).full_tensor(), right)


def factories(rank: int, world: int) -> None:
    mesh = mesh_of(world)
    for placements in ([Replicate()], [Shard(0)], [Shard(1)], [Partial()]):
        for made, right in (
            (espalier.zeros(5, 2, device_mesh=mesh, placements=placements), torch.zeros(5, 2)),
            (espalier.ones((5, 2), device_mesh=mesh, placements=placements), torch.ones(5, 2)),
            (espalier.full((5, 2), 3, device_mesh=mesh, placements=placements), torch.full((5, 2), 3)),
        ):
            assert torch.equal(made.full_tensor(), right) and made.dtype == right.dtype
    x = espalier.empty(5, 2, device_mesh=mesh, placements=[Shard(0)], dtype=F64, requires_grad=True)
    assert x.is_leaf and x.requires_grad and x.shape == (5, 2)
    for name in ("zeros", "ones", "empty"):
        assert getattr(x, f"new_{name}")(3, 2).shape == (3, 2)


def lists_as_indices(rank: int, world: int) -> None:
    """As torch reads them: some are tuples, which it says it will change."""
    mesh, x = mesh_of(world), seeded(5, 4)
    rows, columns = torch.tensor([0, 3, 4]), torch.tensor([1, 0, 2])
    lists = (
        [rows, columns],
        [slice(1, 4), slice(0, 2)],
        [[0, 2], [1, 3]],
        [0, 2],
        [2, slice(1, 3)],
        [None, rows],
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Using a non-tuple sequence")
        for index in lists:
            for place in (Shard(0), Shard(1), Replicate()):
                cut, whole = distribute_tensor(x.clone(), mesh, [place]), x.clone()
                assert torch.equal(cut[index].full_tensor(), whole[index]), (index, place)
                cut[index], whole[index] = 7.0, 7.0
                assert torch.equal(cut.full_tensor(), whole), (index, place)


def nested_uneven(rank: int, world: int) -> None:
    mesh = Mesh.from_env({"one": 2, "two": 2})
    whole = torch.arange(5.0, dtype=F64)
    for order in (("one", "two"), ("two", "one")):
        layout = Layout(mesh, [Shard(0), Shard(0)], (5,), order=order)
        x = espalier.tensor.lay_out(whole, layout)
        assert torch.equal(x.full_tensor(), whole)
        assert torch.equal((x + x.redistribute(placements=[Shard(0), Shard(0)])).full_tensor(), 2 * whole)


# ---- leaves


def copies(rank: int, world: int) -> None:
    mesh = mesh_of(world)
    model = lay_out_module(nn.Linear(3, 5, dtype=F64), mesh, [0, 0])
    assert isinstance(model.weight, nn.Parameter) and isinstance(model.weight, DTensor)
    model(seeded(2, 3)).sum().backward()
    twin = copy.deepcopy(model)
    assert isinstance(twin.weight, nn.Parameter) and twin.weight.placements == (Shard(0),)
    assert model.weight.grad is not None and twin.weight.grad is None  # as of torch's parameters
    with torch.no_grad():
        twin.weight.zero_()
    assert model.weight.full_tensor().any()
    twin.load_state_dict(model.state_dict())
    assert torch.equal(twin.weight.full_tensor(), model.weight.full_tensor())
    twin.load_state_dict({"weight": torch.ones(5, 3, dtype=F64), "bias": torch.zeros(5, dtype=F64)})
    assert torch.equal(twin.weight.full_tensor(), torch.ones(5, 3, dtype=F64))
    assert twin.weight.placements == (Shard(0),)
    shared = nn.ModuleList([model, model])
    assert len({id(p) for p in copy.deepcopy(shared).parameters()}) == 2
    assert twin.zero_grad() is None and twin.weight.grad is None


OPTIMIZERS = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    "Adam": {"lr": 0.1, "amsgrad": True},
    "AdamW": {"lr": 0.1, "weight_decay": 0.1},
    "Adagrad": {"lr": 0.1},
    "RMSprop": {"lr": 0.1, "centered": True},
    "NAdam": {"lr": 0.1},
    "Adadelta": {"lr": 0.1},
    "Adamax": {"lr": 0.1},
    "RAdam": {"lr": 0.1},
    "ASGD": {"lr": 0.1},
    "Rprop": {"lr": 0.1},
}
FUSED = ("SGD", "Adam", "AdamW", "Adagrad")


def optimizers(rank: int, world: int) -> list[str]:
    mesh, wrong = mesh_of(world), []
    for name, options in OPTIMIZERS.items():
        for kind in ("for-loop", "foreach", *(["fused"] if name in FUSED else [])):
            chosen = {"foreach": kind == "foreach"} | ({"fused": True} if kind == "fused" else {})
            if kind == "fused":
                del chosen["foreach"]
            torch.manual_seed(0)
            plain = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()
            model = lay_out_module(copy.deepcopy(plain), mesh, [0, None, "last", 0])
            pair = [
                (m, getattr(torch.optim, name)(m.parameters(), **options, **chosen)) for m in (model, plain)
            ]
            for step in range(3):
                for m, optimizer in pair:
                    optimizer.zero_grad(set_to_none=step != 1)
                    F.mse_loss(m(seeded(4, 3) * (step + 1)), seeded(4, 2)).backward()
                    if step == 2:
                        norm = nn.utils.clip_grad_norm_(m.parameters(), 0.05, foreach=kind != "for-loop")
                        if m is model:
                            kept = espalier.full_tensor(norm)
                        elif not torch.allclose(kept, norm, rtol=1e-10):
                            wrong.append(f"clip_grad_norm_ ({kind}): {kept} is not {norm}")
                    optimizer.step()
            for (key, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
                if not torch.allclose(p.full_tensor(), q, rtol=1e-10, atol=1e-12):
                    wrong.append(f"{name} ({kind}): {key} is off by {(p.full_tensor() - q).abs().max():.2e}")
    return wrong


def hooks(rank: int, world: int) -> None:
    mesh = mesh_of(world)
    seen = []
    for placements in ([Replicate()], [Shard(0)]):
        x = distribute_tensor(seeded(4).requires_grad_(), mesh, placements)
        x.register_hook(lambda g: seen.append(g) or g * 2)
        x.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad))
        y = x * 3
        y.retain_grad()
        y.register_hook(lambda g: seen.append(g))
        y.sum().backward()
        assert all(isinstance(g, DTensor) and g.shape == (4,) for g in seen) and len(seen) == 3
        assert torch.equal(x.grad.full_tensor(), torch.full((4,), 6.0, dtype=F64))
        assert torch.equal(y.grad.full_tensor(), torch.ones(4, dtype=F64))
        seen.clear()


def autograd_functions(rank: int, world: int) -> None:
    mesh = mesh_of(world)
    for placements in ([Replicate()], [Shard(0)], [Shard(1)]):
        value = seeded(4, 3).requires_grad_()
        x = distribute_tensor(value.detach().clone().requires_grad_(), mesh, placements)
        (g,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
        (gg,) = torch.autograd.grad((g * g).sum(), x)
        (h,) = torch.autograd.grad((value**3).sum(), value, create_graph=True)
        (hh,) = torch.autograd.grad((h * h).sum(), value)
        torch.testing.assert_close(espalier.full_tensor(gg), hh)


# ---- models


def checkpointed(rank: int, world: int) -> None:
    from torch.utils.checkpoint import checkpoint

    mesh = mesh_of(world)
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Dropout(0.5), nn.Linear(8, 4)).double()
    for places in ([0, 0, "last", None], [None], [0], ["last", 0]):
        model = lay_out_module(copy.deepcopy(plain), mesh, places)
        grads = []
        for again in (False, True):
            model.zero_grad()
            torch.manual_seed(1)
            x = distribute_tensor(seeded(5, 4).requires_grad_(), mesh, [Shard(0)])
            out = checkpoint(model, x, use_reentrant=False) if again else model(x)
            out.pow(2).sum().backward()
            grads.append([x.grad.full_tensor(), *(p.grad.full_tensor() for p in model.parameters())])
        for a, b in zip(*grads, strict=True):
            torch.testing.assert_close(a, b)


def saved_shapes(rank: int, world: int) -> None:
    mesh, n = mesh_of(world), 4 * world
    weight = distribute_tensor(seeded(n, n).requires_grad_(), mesh, [Shard(0)])
    values = [seeded(3 * world, n), seeded(3 * world, n)]
    # sequence-parallel activations go through gathered weights, then gathered go through sharded weights
    leaves = [distribute_tensor(v.clone().requires_grad_(), mesh, [Shard(0)]) for v in values]
    kept: list[torch.Size] = []

    def pack(x: torch.Tensor) -> torch.Tensor:
        assert type(x) is torch.Tensor or isinstance(x, DTensor)
        with torch._C.DisableTorchFunctionSubclass():
            kept.append(x.shape)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        x = leaves[0] * leaves[1]
        h = F.linear(x, weight)
        out = (h.tanh() @ weight.T).sum()
    assert (n, n) not in kept and (3 * world, n) not in kept, kept
    out.backward()
    right = [v.clone().requires_grad_() for v in (*values, seeded(n, n))]
    (F.linear(right[0] * right[1], right[2]).tanh() @ right[2].T).sum().backward()
    for leaf, plain in zip((*leaves, weight), right, strict=True):
        torch.testing.assert_close(leaf.grad.full_tensor(), plain.grad)


def shared_gather(rank: int, world: int) -> None:
    """Three projections of one sharded input gather it once, and reduce its gradient once."""
    mesh, n = mesh_of(world), 4 * world
    # the input is long, so it is cheaper to leave the weights where they are cut
    x = distribute_tensor(seeded(world, n).requires_grad_(), mesh, [Shard(0)])
    weights = [distribute_tensor(seeded(n, n).requires_grad_(), mesh, [Shard(0)]) for _ in range(3)]
    h = x * 1
    with espalier.ledger(mesh) as forward:
        outs = [F.linear(h, w) for w in weights]
    assert [e.op for e in forward.entries] == ["all_gather"]
    with espalier.ledger(mesh) as back:
        sum(o.sum() for o in outs).backward()
    # the loss, and the input again with its gradient
    assert sorted(e.op for e in back.entries) == ["all_gather", "reduce_scatter"], back.entries
    assert mesh.lately is None or mesh.lately[0]() is not None
    del h, outs
    assert mesh.lately is None


def attention_modules(rank: int, world: int) -> None:
    mesh = mesh_of(world)
    torch.manual_seed(0)
    encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, dtype=F64)
    attention = nn.MultiheadAttention(8, 2, dtype=F64)
    for places in ([None], [0], ["last", 0], [0, None, "last"]):
        for training in (True, False):
            for block in (encoder, attention):
                block.train(training)
                model = lay_out_module(copy.deepcopy(block), mesh, places)
                shape = (4, 3, 8) if block is encoder else (3, 4, 8)
                results = []
                for m in (model, block):
                    m.zero_grad()
                    x = seeded(*shape)
                    if m is model:
                        x = distribute_tensor(x, mesh, [Shard(1 if block is attention else 0)])
                    out = m(x, x, x)[0] if block is attention else m(x)
                    (out * out).sum().backward()
                    results.append([out, *(p.grad for p in m.parameters())])
                for a, b in zip(*results, strict=True):
                    torch.testing.assert_close(espalier.full_tensor(a), b)


def unruled(rank: int, world: int) -> None:
    mesh = mesh_of(world)
    value = torch.eye(3, dtype=F64) + seeded(3, 3) / 10
    x = distribute_tensor(value.clone().requires_grad_(), mesh, [Shard(0)])
    plain = value.clone().requires_grad_()
    with pytest.warns(GatherWarning, match="register_rule") as caught:
        out = torch.linalg.tensorinv(x, 1)
        torch.linalg.tensorinv(x, 1)
    assert len(caught) == 1
    torch.testing.assert_close(out.full_tensor(), torch.linalg.inv(plain))
    out.pow(2).sum().backward()
    torch.linalg.inv(plain).pow(2).sum().backward()
    torch.testing.assert_close(x.grad.full_tensor(), plain.grad)


def strictly(rank: int, world: int) -> None:
    mesh = mesh_of(world)
    x = distribute_tensor(seeded(4), mesh, [Shard(0)])
    assert torch.equal((x + torch.ones(4)).full_tensor(), seeded(4) + 1)
    with espalier.strict():
        assert torch.equal((x * torch.tensor(2.0)).full_tensor(), seeded(4) * 2)
        with pytest.raises(ValueError, match="strict"):
            x + torch.ones(4)


ALL = (
    edges, edges_have_gradients, wrong_edges, local_mapped, factories, copies, hooks, autograd_functions,
    checkpointed, saved_shapes, shared_gather, attention_modules, unruled, strictly, lists_as_indices,
)  # fmt: skip


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("what", ALL, ids=lambda f: f.__name__)
def test_dtensor(ranks, world, what):
    ranks(world, what)


@pytest.mark.world(4)
def test_uneven_nested_shards(ranks):
    ranks(4, nested_uneven)


@pytest.mark.parametrize("world", [2, 3])
def test_optimizers_step_as_on_one_rank(ranks, world):
    for wrong in ranks(world, optimizers):
        assert not wrong, "\n".join(wrong)
