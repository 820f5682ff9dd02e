"""torch.distributed.tensor's functions under our name: sources, factories, dtypes, gradients at the edges."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn

import espalier
from espalier import DTensor, Layout, Mesh, Partial, Replicate, Shard, distribute_tensor, layout_of, local_map
from espalier.tensor.dispatch import forget
from espalier.tensor.rules import RULES

F64 = torch.float64
R, P = Replicate(), Partial()
S = Shard


def grid() -> Mesh:
    return Mesh.from_env({"a": 2, "b": 2})


def seeded(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(sum(shape)))


# ---- distribute_tensor


def sources(rank: int, world: int) -> None:
    mesh = grid()
    every = [R, S(0), S(1), P, Partial("max"), Partial("avg"), Partial("product")]
    for source in itertools.product(range(2), range(2)):
        whole = seeded(5, 3)
        # values that only the source has: on the others not even the device's
        own = whole if mesh.coordinate == source else torch.full((5, 3), float("nan"), dtype=F64)
        for placements in itertools.product(every, every):
            x = distribute_tensor(own, mesh, placements, src_data_rank=source)
            assert torch.equal(x.full_tensor(), whole), (source, placements)
        for dtype in (torch.bool, torch.int16, torch.complex64):
            x = distribute_tensor(own.to(dtype), mesh, [S(1), S(0)], src_data_rank=source)
            assert torch.equal(x.full_tensor(), whole.to(dtype))
    own = torch.full((4,), float(rank))
    assert distribute_tensor(own, mesh, [S(0), R], src_data_rank=1).full_tensor().tolist() == [3.0] * 4
    for wrong in (2, -1, (0, 2), (0,)):
        with pytest.raises(ValueError, match="src_data_rank"):
            distribute_tensor(own, mesh, [S(0), R], src_data_rank=wrong)
    line = Mesh.from_env({"a": 4})
    assert distribute_tensor(own, line, [S(0)], src_data_rank=2).full_tensor().tolist() == [2.0] * 4
    flat = Mesh.from_env({"a": 4, "none": 1})
    assert distribute_tensor(own, flat, [S(0), R], src_data_rank=2).full_tensor().tolist() == [2.0] * 4


def sent(rank: int, world: int) -> None:
    # the source sends pieces; nobody sends what nobody asked for
    mesh = grid()
    with espalier.ledger(mesh) as real:
        distribute_tensor(torch.zeros(8, 6), mesh, [S(0), S(1)])
        distribute_tensor(torch.zeros(8, 6), mesh, [R, S(0)], src_data_rank=1)
    scattered = [(e.op, e.axis, e.bytes) for e in real.entries]
    half, quarter = 4 * 6 * 4, 4 * 3 * 4
    first = {
        0: [("scatter", "a", half), ("scatter", "b", quarter)],
        1: [("scatter", "a", 0), ("scatter", "b", 0)],
        2: [("scatter", "a", 0), ("scatter", "b", quarter)],
        3: [("scatter", "a", 0), ("scatter", "b", 0)],
    }[rank]
    second = [("scatter", "b", half if rank == 3 else 0)]
    assert scattered == [*first, *second, ("broadcast", "a", half if rank >= 2 else 0)]
    dry = Mesh.dry({"a": 2, "b": 2}, coordinate=mesh.coordinate)
    with espalier.ledger(dry) as book:
        distribute_tensor(torch.zeros(8, 6), dry, [S(0), S(1)])
        distribute_tensor(torch.zeros(8, 6), dry, [R, S(0)], src_data_rank=1)
    assert book == real


def deferred(rank: int, world: int) -> None:
    # a model built on the meta device, laid out, then filled
    mesh = Mesh.from_env({"axis": world})
    with torch.device("meta"):
        model = nn.Linear(6, 5, dtype=F64)
    with espalier.ledger(mesh) as book:
        for name, p in list(model.named_parameters()):
            model.register_parameter(name, nn.Parameter(distribute_tensor(p, mesh, [S(0)])))
    assert not book.entries and model.weight.is_meta and isinstance(model.weight, DTensor)
    model.to_empty(device="cpu")
    torch.manual_seed(1)
    model.reset_parameters()
    assert isinstance(model.weight, DTensor) and model.weight.placements == (S(0),)
    assert model.weight.shape == (5, 6) and model.weight.full_tensor().std() > 0
    x = seeded(2, 6)
    whole = torch.nn.functional.linear(x, model.weight.full_tensor(), model.bias.full_tensor())
    torch.testing.assert_close(model(x).full_tensor(), whole)


# ---- factories


def factories(rank: int, world: int) -> None:
    mesh = grid()
    for placements in ([R, R], [S(0), R], [S(0), S(0)], [P, S(0)], [Partial("max"), Partial("avg")]):
        options: dict[str, Any] = {"device_mesh": mesh, "placements": placements}
        for made, right in (
            (espalier.arange(7, **options), torch.arange(7)),
            (espalier.arange(1, 2, 0.3, **options), torch.arange(1, 2, 0.3)),
            (espalier.arange(5, dtype=F64, **options), torch.arange(5, dtype=F64)),
            (espalier.linspace(-1, 2, 7, **options), torch.linspace(-1, 2, 7)),
            (
                espalier.linspace(0, 1, steps=5, dtype=F64, **options),
                torch.linspace(0, 1, steps=5, dtype=F64),
            ),
            (espalier.logspace(0, 2, 5, base=2.0, **options), torch.logspace(0, 2, 5, base=2.0)),
            (espalier.full((3,), -2.5, **options), torch.full((3,), -2.5)),
            (espalier.full([4], 3.0, layout=torch.strided, **options), torch.full([4], 3.0)),
        ):
            if "avg" in str(placements) and not made.is_floating_point():
                continue
            assert torch.equal(made.full_tensor(), right) and made.dtype == right.dtype, (placements, right)
    assert torch.equal(
        espalier.full((2,), 3.0, device_mesh=mesh, placements=[Partial("product"), P]).full_tensor(),
        torch.full((2,), 3.0),
    )
    for placements in ([R, R], [S(0), S(1)], [S(1), S(1)]):
        options = {"device_mesh": mesh, "placements": placements}
        assert torch.equal(espalier.eye(5, **options).full_tensor(), torch.eye(5))
        assert torch.equal(espalier.eye(3, 5, dtype=F64, **options).full_tensor(), torch.eye(3, 5, dtype=F64))
        torch.manual_seed(2)
        drawn = espalier.randint(-3, 9, (5, 6), **options)
        torch.manual_seed(2)
        whole = espalier.randint(-3, 9, (5, 6), device_mesh=mesh)
        assert drawn.dtype == torch.int64 and torch.equal(drawn.full_tensor(), whole.full_tensor())
        assert whole.min().item() >= -3 and whole.max().item() < 9 and len(whole.full_tensor().unique()) > 6
        assert espalier.randint(high=2, size=(3,), dtype=torch.int32, device_mesh=mesh).dtype == torch.int32
        base = espalier.rand(5, 6, **options, requires_grad=True)
        assert base.is_leaf and base.requires_grad
        for like in (torch.zeros_like, torch.ones_like, torch.empty_like, torch.rand_like, torch.randn_like):
            assert like(base).placements == base.placements and like(base).shape == base.shape
        assert torch.full_like(base, 2).placements == base.placements
    with pytest.raises(ValueError, match="cannot be Partial"):
        espalier.randint(0, 2, (3,), device_mesh=mesh, placements=[P, R])
    with pytest.raises(ValueError, match="less than high"):
        espalier.randint(2, 2, (3,), device_mesh=mesh)
    with pytest.raises(ValueError, match="strided"):
        espalier.zeros(3, device_mesh=mesh, layout=torch.sparse_coo)


# ---- redistribute in other dtypes


def dtypes(rank: int, world: int) -> None:
    mesh = Mesh.from_env({"axis": world})
    value = seeded(6, 3)
    low = value.to(torch.bfloat16)
    for src, dst in itertools.product([R, S(0), S(1)], [R, S(0), S(1)]):
        x = distribute_tensor(value.requires_grad_(), mesh, [src])
        with espalier.ledger(mesh) as book:
            y = x.redistribute(placements=[dst], forward_dtype=torch.bfloat16)
        assert y.dtype == torch.bfloat16 and y.placements == (dst,)
        assert torch.equal(y.full_tensor(), low)
        narrow = sum(e.bytes for e in book.entries)
        with espalier.ledger(mesh) as book:
            x.redistribute(placements=[dst])
        assert 4 * narrow == sum(e.bytes for e in book.entries), "a quarter of the bytes"
        with espalier.ledger(mesh) as book:
            (y.to(F64) * value.detach()).sum().backward()
        assert x.grad.dtype == F64 and torch.equal(x.grad.full_tensor(), low.to(F64))
        # backward in float32, forward as it is
        x.grad = None
        y = x.redistribute(placements=[dst], backward_dtype=torch.float32)
        assert y.dtype == F64 and torch.equal(y.full_tensor(), value)
        (y * value.detach()).sum().backward()
        assert torch.equal(x.grad.full_tensor(), value.detach().float().to(F64))
    # addends are cast as they are, each: that is what was asked for
    total = DTensor.from_local(torch.tensor([1.0 + rank], dtype=F64, requires_grad=True), mesh, [P])
    half = total.redistribute(placements=[R], forward_dtype=torch.float16)
    assert half.dtype == torch.float16 and half.full_tensor().item() == world * (world + 1) / 2
    average = DTensor.from_local(torch.tensor([1.0 + rank], requires_grad=True), mesh, [Partial("avg")])
    mean = average.redistribute(placements=[R], forward_dtype=F64)
    assert abs(mean.full_tensor().item() - (world + 1) / 2) < 1e-12
    (g,) = torch.autograd.grad(mean.sum(), average)
    torch.testing.assert_close(g.full_tensor(), torch.tensor([1.0 / world]))
    # twice differentiable
    x = distribute_tensor(value.detach().requires_grad_(), mesh, [S(0)])
    y = x.redistribute(placements=[R], forward_dtype=torch.float32, backward_dtype=torch.float32)
    (g,) = torch.autograd.grad((y.to(F64) ** 3).sum(), x, create_graph=True)
    (gg,) = torch.autograd.grad(g.sum(), x)
    torch.testing.assert_close(gg.full_tensor(), 6 * value.detach(), rtol=1e-6, atol=1e-6)


# ---- gradients at the edges


def grads_of_parts(rank: int, world: int) -> None:
    mesh = Mesh.from_env({"axis": world})
    factor = torch.arange(1.0, world + 1)[rank]
    # replicated: whole on every rank, or asked for as addends
    for grads, right in ((None, 6.0), ([R], 6.0), ([P], None)):
        local = torch.ones(3, requires_grad=True)
        x = DTensor.from_local(local, mesh, [R], grad_placements=grads)
        assert layout_of(x) is Layout.replicated(mesh, (3,))
        (x * 6).sum().backward()
        if right is not None:
            assert torch.equal(local.grad, torch.full((3,), right))
        else:
            total = DTensor.from_local(local.grad, mesh, [P]).full_tensor()
            assert torch.equal(total, torch.full((3,), 6.0))
    for placement in (S(0), P):
        for grads in (None, [R if placement is P else S(0)]):
            local = torch.ones(3, requires_grad=True)
            x = DTensor.from_local(local, mesh, [placement], grad_placements=grads)
            (x * 6).sum().backward()
            assert torch.equal(local.grad, torch.full((3,), 6.0))
    with pytest.raises(ValueError, match="do not fit"):
        DTensor.from_local(torch.ones(3), mesh, [S(0)], grad_placements=[R])

    # a Partial through to_local and from_local keeps its gradient (pytorch 172932)
    for steps in (0, 1, 3):
        local = (factor * seeded(4)).requires_grad_()
        x = DTensor.from_local(local, mesh, [P])
        for _ in range(steps):
            x = DTensor.from_local(x.to_local(), mesh, [P])
        (x.redistribute(placements=[R]) ** 2).sum().backward()
        whole = seeded(4) * world * (world + 1) / 2
        torch.testing.assert_close(local.grad, 2 * whole)
    # the same for the other placements
    for placement, said in itertools.product((R, S(0), S(1)), (True, False)):
        start = seeded(5, 4).requires_grad_()
        x = distribute_tensor(start, mesh, [placement])
        part = x.to_local(grad_placements=[placement] if said else None)
        y = DTensor.from_local(part, mesh, [placement], shape=(5, 4))
        (y**2).sum().backward()
        assert torch.equal(x.grad.full_tensor(), 2 * start.detach())
    # of an average each rank has its share, wherever backward starts
    for start in (lambda x: x.sum(), lambda x: x.redistribute(placements=[R]).sum(), lambda x: x):
        local = torch.ones(1, requires_grad=True)
        x = start(DTensor.from_local(local, mesh, [Partial("avg")]))
        for given in (None, torch.ones(x.shape)):
            local.grad = None
            x.backward(given, retain_graph=True)
            torch.testing.assert_close(local.grad, torch.full((1,), 1 / world))
    with pytest.raises(ValueError, match="has no gradient"):
        DTensor.from_local(torch.ones((), requires_grad=True), mesh, [Partial("max")]).backward()
    # .item() and comparison of a Partial see its value (pytorch 144054)
    total = DTensor.from_local(torch.tensor(1.0), mesh, [P])
    assert total.item() == world and bool(total == world) and bool(total > world - 0.5)
    # what ranks with run_check take from coordinate 0 still has a gradient on each
    local = torch.full((2,), float(rank), requires_grad=True)
    x = DTensor.from_local(local, mesh, [R], run_check=True)
    (x + 1).square().sum().backward()
    assert torch.equal(local.grad, torch.full((2,), 2.0)) and local[0].item() == rank


def unsaid(rank: int, world: int) -> None:
    """Gradients of what leaves the type without a word: as torch's, but compared."""
    mesh = Mesh.from_env({"a": world}) if world < 4 else grid()
    every = [R] * mesh.ndim
    cut = [S(0), *every[1:]]
    value = seeded(8, 3)

    def leaf(placements: Any = every, dtype: torch.dtype = F64) -> DTensor:
        return distribute_tensor(value.to(dtype, copy=True).requires_grad_(), mesh, placements)

    # what all ranks do alike: several uses, several meshes, a second time over the same graph
    x, y = leaf(), leaf(cut)
    with espalier.ledger(mesh) as book:
        loss = (x.to_local() ** 2).sum() + (x.to_local().exp() * x[0].to_local()).sum()
        loss.backward(retain_graph=True)
        loss.backward()
    assert not book.entries, "compared beside the traffic"
    right = value.clone().requires_grad_()
    (2 * ((right**2).sum() + (right.exp() * right[0]).sum())).backward()
    torch.testing.assert_close(x.grad.full_tensor(), right.grad)
    (y.full_tensor() ** 3).sum().backward()
    torch.testing.assert_close(y.grad.full_tensor(), 3 * value**2)
    z = leaf()
    (g,) = torch.autograd.grad((z.to_local() ** 3).sum(), z, create_graph=True)
    (gg,) = torch.autograd.grad(g.sum(), z)
    torch.testing.assert_close(gg.full_tensor(), 6 * value)
    again = torch.utils.checkpoint.checkpoint(lambda a: a.to_local().tanh().sum(), z, use_reentrant=False)
    again.backward()
    # rounding may differ: as much as a sum in another order does
    for dtype in (F64, torch.float32, torch.bfloat16):
        near = 1 + rank * 2 * torch.finfo(dtype).eps
        low = leaf(dtype=dtype)
        (low.to_local() * torch.tensor(near, dtype=F64).to(dtype)).sum().backward()
    # what needs no gradient, or is not differentiated, sends nothing
    if rank == 0:
        for free in (x.detach().to_local(), x.to_local().shape, repr(x), x.to_local().detach().sum().item()):
            assert free is not None
        with torch.no_grad():
            x.to_local().sum()

    differing: list[tuple[str, Any]] = [
        ("to_local", lambda: (leaf().to_local() * (rank + 1)).sum()),
        ("to_local", lambda: leaf().to_local()[rank].sum()),
        ("to_local", lambda: leaf().to_local()[:, rank % 3].sum()),  # as long, elsewhere
        ("to_local", lambda: (leaf(dtype=torch.float32).to_local() * (1 + 0.01 * rank)).sum()),
        ("to_local", lambda: (leaf().to_local() * (float("nan") if rank else 1)).sum()),
        ("to_local", lambda: z.to_local().sum() + (x.to_local().sum() if rank else 0)),
        ("full_tensor", lambda: (leaf(cut).full_tensor() * (rank + 1)).sum()),
        ("full_tensor", lambda: leaf(cut).sum().full_tensor() * (rank + 1)),
    ]
    for call, compute in differing:
        loss, line = compute(), compute.__code__.co_firstlineno
        with pytest.raises(ValueError, match=rf"{call} \(tests/ranks/test_api.py:{line}\)") as caught:
            loss.backward()
        assert f"{call}(grad_placements=[Partial()" in str(caught.value)
    # along one axis alone
    if mesh.ndim == 2:
        loss = (leaf().to_local() * (mesh.coordinate[1] + 1)).sum()
        with pytest.raises(ValueError, match=r"to_local\(grad_placements=\[Replicate\(\), Partial\(\)\]\)"):
            loss.backward()
        half = leaf(cut)
        loss = (half.to_local() * (mesh.coordinate[1] + 1)).sum()
        with pytest.raises(ValueError, match=r"to_local\(grad_placements=\[Shard\(0\), Partial\(\)\]\)"):
            loss.backward()
        half.grad = None
        (half.to_local(grad_placements=[S(0), P]) * (mesh.coordinate[1] + 1)).sum().backward()
        assert torch.equal(half.grad.full_tensor(), torch.full((8, 3), 3.0, dtype=F64))
    # nothing of it stays behind
    x.grad = None
    (x.to_local() * 2).sum().backward()
    assert torch.equal(x.grad.full_tensor(), torch.full((8, 3), 2.0, dtype=F64))


def locals_as_torch_names_them(rank: int, world: int) -> None:
    mesh = Mesh.from_env({"axis": world})
    p = nn.Parameter(distribute_tensor(seeded(6, 2), mesh, [S(0)]))
    assert isinstance(p, nn.Parameter) and isinstance(p, DTensor)
    local = p._local_tensor
    assert type(local) is torch.Tensor and not local.requires_grad
    local.mul_(2)
    assert torch.equal(p.full_tensor(), 2 * seeded(6, 2))


# ---- local_map


def mapped(rank: int, world: int) -> None:
    mesh = Mesh.from_env({"axis": world})

    # nested arguments and results, counted one by one
    def body(pair: tuple[torch.Tensor, int], more: dict[str, torch.Tensor], *, w: torch.Tensor) -> Any:
        x, n = pair
        return {"y": x * n + more["z"], "both": [(x * w).sum(), n]}

    x, z = (distribute_tensor(seeded(5, 3).requires_grad_(), mesh, [S(0)]) for _ in range(2))
    w = distribute_tensor(seeded(3).requires_grad_(), mesh)
    run = local_map(body, ([S(0)], [P], None), ([S(0)], None, [S(0)]))
    out = run((x, 2), {"z": z}, w=w)
    # the parts are uneven: 5 rows on the ranks
    assert out["both"][1] == 2 and out["y"].shape == (5, 3)
    value, weight = seeded(5, 3).requires_grad_(), seeded(3).requires_grad_()
    right = value * 2 + value.detach(), (value * weight).sum()
    torch.testing.assert_close(out["y"].full_tensor(), right[0])
    torch.testing.assert_close(out["both"][0].full_tensor(), right[1])
    (out["y"].sum() + out["both"][0]).backward()
    (right[0].sum() + right[1]).backward()
    torch.testing.assert_close(x.grad.full_tensor(), value.grad)
    torch.testing.assert_close(w.grad.full_tensor(), weight.grad)

    # all replicated: every rank computes the same, its gradient is the whole one
    local_map(lambda a: a * 3, [R])(w).sum().backward()
    torch.testing.assert_close(w.grad.full_tensor(), weight.grad + 3)

    with pytest.raises(ValueError, match="out_placements speaks of 2"):
        local_map(lambda a: a, ([R], [R]))(w)
    with pytest.raises(ValueError, match="holds None"):
        local_map(lambda a: a, None)(w)
    with pytest.raises(ValueError, match="int came out"):
        local_map(lambda a: 1, [R])(w)
    with pytest.raises(ValueError, match="1 positional"):
        local_map(lambda a: a, [R], ([R], [R]))(w)
    with pytest.raises(ValueError, match="do not make one tensor"):
        local_map(lambda a: a[: 2 - (rank == 0)], [S(0)])(x)


def mapped_dry() -> Any:
    dry = Mesh.dry({"axis": 4}, coordinate=(1,))
    x = espalier.zeros(6, 3, device_mesh=dry, placements=[S(0)])
    return local_map(lambda a: a.sum(1), [S(0)])(x)


def test_local_map_on_a_dry_mesh() -> None:
    out = mapped_dry()
    assert out.shape == (6,) and out.to_local().shape == (2,)


@torch.library.custom_op("tests::outer_sum", mutates_args=())
def outer_sum(x: torch.Tensor, n: int, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return (x @ w) * n, x.relu()


@outer_sum.register_fake
def _(x: torch.Tensor, n: int, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape[0], w.shape[1]), torch.empty_like(x)


def nested(rank: int, world: int) -> None:
    """Tensors with rows of several lengths are refused in words, wherever they meet DTensors."""
    mesh = Mesh.from_env({"data": 2})
    rows = [seeded(3, 4), seeded(2, 4)]
    whole = distribute_tensor(torch.cat(rows), mesh, [R])
    offsets = torch.tensor([0, 3, 5])

    def ragged(layout: torch.layout) -> torch.Tensor:
        return torch.nested.nested_tensor(rows, layout=layout)

    class Within(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            values = super().forward(x)
            made = torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, 1, len(x)]))
            return super().forward(made)

    def called(model: nn.Module, x: torch.Tensor, plan: dict[str, Any], **options: Any) -> None:
        espalier.prepare(model.double(), plan=plan, **options)(x)

    trials: list[Any] = [
        lambda: torch.nested.nested_tensor_from_jagged(whole, offsets),
        lambda: torch.nested.as_nested_tensor([whole[:3], whole[3:]], layout=torch.jagged),
        lambda: torch.nested.as_nested_tensor([whole[:3], whole[3:]]),
        lambda: called(Within(4, 4), seeded(4, 4), {"data": 2}),
        lambda: called(nn.Sequential(*[nn.Linear(4, 4)] * 2), ragged(torch.jagged), {"pipe": 2}),
    ]
    for layout in (torch.jagged, torch.strided):
        x = ragged(layout)
        trials += [
            lambda x=x: distribute_tensor(x, mesh, [S(0)]),
            lambda x=x: DTensor.from_local(x, mesh, [R]),
            lambda x=x: whole[0] + x,
            lambda x=x: called(nn.Linear(4, 4), x, {"data": 2}),
            lambda x=x: called(nn.Linear(4, 4), x, {"data": 2, "zero": 3}, rows="own"),
        ]
    for i, trial in enumerate(trials):
        with pytest.raises(ValueError, match="A nested tensor has no layout"):
            trial()
            raise AssertionError(i)


def shardings(rank: int, world: int) -> None:
    mesh = grid()
    seen: list[Any] = []

    @espalier.register_sharding(torch.ops.tests.outer_sum.default)
    def _(x: Any, n: int, w: Any) -> Any:
        seen.append((tuple(x.shape), x.ndim, n))
        return [
            ([R, R], [R, None, R]),
            ([S(0), S(0)], [S(0), None, R]),
            ([S(-1), R], [R, None, S(1)]),
            ([P, S(1)], [S(1), None, S(0)]),
        ]

    x, w = seeded(5, 6), seeded(6, 3)
    right = (x @ w) * 2, x.relu()
    for px, pw in itertools.product(itertools.product([R, S(0), S(1), P], repeat=2), repeat=2):
        mine = distribute_tensor(x, mesh, px), distribute_tensor(w, mesh, pw)
        out = outer_sum(mine[0], 2, mine[1])
        for got, wanted in zip(out, right, strict=True):
            torch.testing.assert_close(got.full_tensor(), wanted)
    first, second = outer_sum(
        distribute_tensor(x, mesh, [S(0), S(1)]), 2, distribute_tensor(w, mesh, [R, S(0)])
    )
    assert first.placements == (S(0), P) and second.placements == (S(0), S(1))
    assert ((5, 6), 2, 2) in seen

    known = {f: RULES.get(f) for f in RULES.functions()}

    @espalier.register_sharding([torch.ops.aten.logaddexp2.default])
    def _(a: Any, b: Any) -> Any:
        return [([S(0)], [S(0), S(0)])]

    a = distribute_tensor(x, mesh, [S(0), R])
    assert (
        torch.logaddexp2(a, a).placements == (S(0), R) == torch.ops.aten.logaddexp2.default(a, a).placements
    )
    for function, rule in known.items():
        RULES.add(function, rule)
    forget()
    with pytest.raises(ValueError, match="writes to its inputs"):
        espalier.register_sharding(torch.ops.aten.relu_.default)

    @espalier.register_sharding(torch.ops.tests.outer_sum.default)
    def _(x: Any, n: int, w: Any) -> Any:
        return [([S(0)], [S(0), None, R])]

    with pytest.raises(ValueError, match=r"2 output\(s\)"):
        outer_sum(mine[0], 2, mine[1])


ON_FOUR = [shardings, sources, sent, factories, unsaid]
ON_ANY = [deferred, dtypes, grads_of_parts, unsaid, locals_as_torch_names_them, mapped]


@pytest.mark.parametrize("check", ON_FOUR)
@pytest.mark.world(4)
def test_on_a_grid(ranks: Any, check: Any) -> None:
    ranks(4, check)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("check", ON_ANY)
def test_on_a_line(ranks: Any, check: Any, world: int) -> None:
    ranks(world, check)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@pytest.mark.filterwarnings("ignore:__getitem__ has no sharding rule")
def test_nested_tensors(ranks: Any) -> None:
    ranks(2, nested)
