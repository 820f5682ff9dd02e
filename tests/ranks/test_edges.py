"""DTensors at their edges: from plain tensors and back, their values, copies and views."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import espalier
from espalier import DTensor, Mesh, Partial, Replicate, Shard, distribute_tensor, layout_of, local_map

R, P = Replicate(), Partial()
S = Shard


def line(world: int) -> Mesh:
    return Mesh.from_env({"tensor": world})


def grid() -> Mesh:
    return Mesh.from_env({"data": 2, "tensor": 2})


def count(*shape: int) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel()), dtype=torch.float64).view(shape)


def from_parts(rank: int, world: int) -> None:
    mesh = line(world)
    local = torch.full((2, 3), float(rank + 1), requires_grad=True)
    x = DTensor.from_local(local, mesh, [S(0)])
    assert x.shape == (2 * world, 3) and x.placements == (S(0),) and x.device_mesh is mesh
    (x * 3).sum().backward()
    assert type(local.grad) is torch.Tensor and torch.equal(local.grad, torch.full((2, 3), 3.0))
    assert torch.equal(x.full_tensor()[:, 0], torch.arange(2 * world).div(2, rounding_mode="floor") + 1.0)

    whole = DTensor.from_local(local.detach(), mesh, [P])
    assert whole.shape == (2, 3)
    assert torch.equal(whole.full_tensor(), torch.full((2, 3), world * (world + 1) / 2))

    # 5 rows on 3 ranks are cut 2, 2, 1; on 4: 2, 2, 1, 0
    rows = len(torch.arange(5).tensor_split(list(range(2, 2 * world, 2)))[rank])
    uneven = DTensor.from_local(torch.full((rows, 2), float(rank)), mesh, [S(0)], shape=(5, 2))
    assert uneven.full_tensor()[:, 0].tolist() == [0, 0, 1, 1, 2][:5]
    with pytest.raises(ValueError, match="pass the right shape="):
        DTensor.from_local(torch.zeros(2, 2), mesh, [S(0)], shape=(5, 2)) if rows != 2 else refuse()
    with pytest.raises(TypeError, match="DTensor already"):
        DTensor.from_local(x, mesh, [S(0)])

    same = torch.ones(3)
    DTensor.from_local(same, mesh, run_check=True)
    DTensor.from_local(same + rank, mesh, [S(0)], run_check=True)
    mended = DTensor.from_local(same + rank, mesh, [R], run_check=True)
    assert torch.equal(mended.to_local(), same), "coordinate 0's values, as in torch"
    with pytest.raises(ValueError, match="do not make one tensor"):
        DTensor.from_local(torch.ones(3 + (rank == 1)), mesh, [R], run_check=True)
    with pytest.raises(ValueError, match="do not make one tensor"):
        DTensor.from_local(torch.ones(3 + (rank == 1)), mesh, [S(0)], shape=(3 * world,), run_check=True)
    with pytest.raises(ValueError, match="do not make one tensor"):
        DTensor.from_local(same.to(torch.float64 if rank else torch.int64), mesh, run_check=True)
    DTensor.from_local(same + rank, mesh, [R])


def refuse() -> None:
    raise ValueError("pass the right shape=")


@pytest.mark.parametrize("world", [3, 4])
def test_from_local(ranks: Any, world: int) -> None:
    ranks(world, from_parts)


def to_parts(rank: int, world: int) -> None:
    mesh = line(world)
    value = count(4, 2)
    x = distribute_tensor(value.requires_grad_(), mesh, [S(0)])
    part = x.to_local()
    assert type(part) is torch.Tensor
    (part * (rank + 1)).sum().backward()
    assert isinstance(x.grad, DTensor) and x.grad.placements == (S(0),)
    assert torch.equal(x.grad.full_tensor()[:, 0], torch.tensor([1.0, 1, 2, 2], dtype=torch.float64))

    w = distribute_tensor(value, mesh, [R])
    w.to_local().sum().backward()
    assert torch.equal(w.grad.full_tensor(), torch.ones_like(value))
    w.grad = None
    with torch.no_grad():
        assert torch.equal(w.to_local(), value)
    assert type(w.detach().to_local()) is torch.Tensor
    (w.to_local(grad_placements=[R]) * 3).sum().backward()
    assert isinstance(w.grad, DTensor) and torch.equal(w.grad.full_tensor(), torch.full_like(value, 3))
    w.grad = None
    (w.to_local(grad_placements=[P]) * (rank + 1)).sum().backward()
    assert torch.equal(w.grad.full_tensor(), torch.full_like(value, 3))  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="do not fit"):
        x.to_local(grad_placements=[S(1)])

    w.grad = None
    (w.redistribute(mesh, [S(1)]).full_tensor() * 5).sum().backward()
    assert torch.equal(w.grad.full_tensor(), torch.full_like(value, 5))  # type: ignore[union-attr]
    w.grad = None
    (w.full_tensor(grad_placements=[P]) * (rank + 1)).sum().backward()
    assert torch.equal(w.grad.full_tensor(), torch.full_like(value, 3))  # type: ignore[union-attr]


def test_to_local_and_full_tensor(ranks: Any) -> None:
    ranks(2, to_parts)


def every_way(rank: int, world: int) -> None:
    mesh = grid()
    value = count(5, 3)
    weights = torch.linspace(1, 2, 15, dtype=torch.float64).view(5, 3)
    states = [list(p) for p in itertools.product([R, S(0), S(1)], repeat=2)]
    for src, dst in itertools.product(states, [*states, [P, R], [S(0), P], [P, P]]):
        x = distribute_tensor(value.clone().requires_grad_(), mesh, src)
        y = x.redistribute(mesh, dst)
        assert y.placements == tuple(dst) and y.shape == x.shape
        assert torch.equal(y.full_tensor(), value), (src, dst)
        (y * distribute_tensor(weights, mesh)).sum().backward()
        assert isinstance(x.grad, DTensor) and x.grad.placements == tuple(src)
        torch.testing.assert_close(x.grad.full_tensor(), weights)
    assert torch.equal(x.redistribute(line(4), [S(1)]).full_tensor(), value)
    with pytest.raises(ValueError, match="needs placements"):
        x.redistribute(mesh)


def test_redistribute(ranks: Any) -> None:
    ranks(4, every_way)


def nested(rank: int, world: int) -> None:
    mesh = grid()
    for n in (1, 2, 3, 5, 6, 7, 9):
        for placements in ([S(0), S(0)], [S(0), S(1)], [S(1), S(1)], [S(1), S(0)]):
            value = count(n, 5)
            x = distribute_tensor(value.requires_grad_(), mesh, placements)
            assert torch.equal(x.full_tensor(), value), (n, placements)
            out = (x.exp() * 2).sin()
            torch.testing.assert_close(out.full_tensor(), (value.exp() * 2).sin())
            x.square().sum().backward()
            assert torch.equal(x.grad.full_tensor(), 2 * value.detach())  # type: ignore[union-attr]


def test_uneven_nested_shards(ranks: Any) -> None:
    ranks(4, nested)


def distributed(rank: int, world: int) -> None:
    mesh = grid()
    own = torch.full((4, 2), float(rank))
    for placements in ([S(0), R], [S(0), S(1)], [R, R]):
        x = distribute_tensor(own, mesh, placements)
        assert not x.full_tensor().any(), "rank 0's values"
    with espalier.ledger(mesh) as book:
        x = distribute_tensor(own, mesh, [R, R], src_data_rank=None)
    assert not book.entries and torch.equal(x.to_local(), own)
    p = distribute_tensor(nn.Parameter(torch.ones(3)), mesh)
    assert isinstance(p, nn.Parameter) and isinstance(p, DTensor) and p.is_leaf and p.requires_grad
    assert not isinstance(x, nn.Parameter)
    again = distribute_tensor(x, mesh, [S(0), R])
    assert again.placements == (S(0), R)
    with pytest.raises(TypeError, match="distribute_tensor"):
        DTensor(torch.ones(2))


def test_distribute_tensor(ranks: Any) -> None:
    ranks(4, distributed)


def made(rank: int, world: int) -> None:
    mesh = grid()
    for placements in ([R, R], [S(0), S(0)], [S(1), P], [P, P]):
        options: dict[str, Any] = {"device_mesh": mesh, "placements": placements}
        assert torch.equal(espalier.zeros(3, 5, **options).full_tensor(), torch.zeros(3, 5))
        assert torch.equal(espalier.ones((3, 5), **options).full_tensor(), torch.ones(3, 5))
        whole = espalier.full((3, 5), 7, dtype=torch.int64, **options)
        assert torch.equal(whole.full_tensor(), torch.full((3, 5), 7))
    x = espalier.ones(3, device_mesh=mesh, dtype=torch.float64, requires_grad=True)
    assert x.requires_grad and x.is_leaf and x.dtype == torch.float64 and x.placements == (R, R)
    assert espalier.empty(3, 5, device_mesh=mesh, placements=[S(0), S(1)]).shape == (3, 5)
    y = x.new_zeros(4)
    assert isinstance(y, DTensor) and y.placements == (R, R)
    z = torch.zeros_like(distribute_tensor(count(4, 2), mesh, [S(0), R]))
    assert z.placements == (S(0), R) and z.shape == (4, 2)


def test_factories(ranks: Any) -> None:
    ranks(4, made)


def mapped(rank: int, world: int) -> None:
    mesh = line(world)
    x = distribute_tensor(count(4, 2).requires_grad_(), mesh, [S(0)])
    w = distribute_tensor(torch.ones(2, dtype=torch.float64, requires_grad=True), mesh)

    def body(a: torch.Tensor, b: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor, str]:
        assert type(a) is torch.Tensor and type(b) is torch.Tensor
        return a * b * scale, (a * b).sum(), "text"

    run = local_map(body, out_placements=([S(0)], [P], None), in_placements=([S(0)], [R]))
    y, total, text = run(x, w, 2.0)
    assert text == "text" and y.placements == (S(0),) and total.item() == 28
    (y.sum() + total).backward()
    # what each rank does with w differs, so its gradients are added
    assert torch.equal(w.grad.full_tensor(), 3 * count(4, 2).sum(0))  # type: ignore[union-attr]
    assert torch.equal(x.grad.full_tensor(), torch.full((4, 2), 3.0, dtype=torch.float64))  # type: ignore[union-attr]

    with pytest.raises(ValueError, match="argument 0 lies as"):
        run(x.redistribute(mesh, [R]), w, 2.0)
    bring = local_map(body, ([S(0)], [P], None), ([S(0)], [R]), redistribute_inputs=True)
    assert bring(x.redistribute(mesh, [R]), w, 2.0)[1].item() == 28

    @local_map(out_placements=[R], in_grad_placements=([R],))
    def twice(a: torch.Tensor) -> torch.Tensor:
        return 2 * a

    w.grad = None
    twice(w).sum().backward()
    assert torch.equal(w.grad.full_tensor(), torch.full((2,), 2.0, dtype=torch.float64))  # type: ignore[union-attr]
    assert type(twice(torch.ones(2))) is torch.Tensor, "without DTensors the function itself"
    with pytest.raises(ValueError, match="holds None"):
        local_map(lambda a: a, out_placements=None)(x)


def test_local_map(ranks: Any) -> None:
    ranks(2, mapped)


def seen(rank: int, world: int) -> None:
    mesh = line(world)
    part = DTensor.from_local(torch.tensor(rank - 1.0), mesh, [P])  # -1 + 0 = -1 on two ranks
    assert part.item() == -1 and float(part) == -1 and int(part) == -1 and bool(part)
    assert not bool(DTensor.from_local(torch.tensor(2.0 * rank - 1), mesh, [P])), "-1 + 1"
    assert f"{part:.1f}" == "-1.0" and part.tolist() == -1
    assert bool(part < 0) and bool(part == -1)
    index = DTensor.from_local(torch.tensor(rank), mesh, [P])
    assert [5, 6, 7][index] == 6
    x = distribute_tensor(count(5, 2), mesh, [S(0)])
    assert x.tolist() == count(5, 2).tolist() and x.numpy().shape == (5, 2) and len(x) == 5
    assert [row.tolist() for row in x] == count(5, 2).tolist()
    assert x.stride() == (2, 1) and x.numel() == 10 and x.size(-1) == 2 and x.dim() == 2
    with espalier.ledger(mesh) as book:
        text = repr(part) + str(part) + repr(x)
        assert "local=" in text and "P(sum)" in text and x.ndim == 2
        assert "DTensor" in text and "tensor2" in text, "the type, the mesh's axes"
        assert "placements=(Partial(sum),)" in text and "placements=(Shard(dim=0),)" in text
    assert not book.entries
    if rank == 0:
        repr(part)  # on one rank alone


def test_values_are_global_and_repr_is_local(ranks: Any) -> None:
    ranks(2, seen)


STRIDES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "itself": lambda x: x,
    "T": lambda x: x.T,
    "T again": lambda x: x.T.contiguous(),
    "product": lambda x: x.T * 2,
    "slice": lambda x: x.view(8, 2, 3)[:, :, 1:],
    "one row": lambda x: x.reshape(4, 2, 6).transpose(0, 1),
    "one column": lambda x: x.reshape(12, 4).T,
    "one column again": lambda x: x.reshape(12, 4).T.contiguous(),
    "unsqueeze": lambda x: x.unsqueeze(1),
    "transpose": lambda x: x.view(8, 2, 3).transpose(0, 2),
    "permute": lambda x: x.view(8, 2, 3).permute(1, 0, 2),
    "expand": lambda x: x.unsqueeze(0).expand(3, 8, 6),
    "channels last": lambda x: x.view(2, 4, 3, 2).to(memory_format=torch.channels_last),
    "as_strided": lambda x: x.T.as_strided((4, 3), (2, 1), 1),
}


def strided(rank: int, world: int) -> None:
    mesh, value = line(world), count(8, 6)
    for placements, (name, view) in itertools.product(([R], [S(0)], [S(1)]), STRIDES.items()):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", espalier.GatherWarning)
            mine, right = view(distribute_tensor(value, mesh, placements)), view(value)
        if name == "slice" and placements == [S(1)]:
            continue  # of a dim that is cut: it has memory of its own
        is_any = not mine.to_local().numel()  # torch gives what has no elements any strides
        with espalier.ledger(mesh) as book:
            assert is_any or mine.stride() == right.stride(), (name, placements, mine.stride())
            assert is_any or mine.stride(-1) == right.stride(-1)
            assert is_any or mine.is_contiguous() == right.is_contiguous(), (name, placements)
            if right.ndim == 4 and not is_any:
                assert mine.is_contiguous(memory_format=torch.channels_last)
        assert not book.entries
        assert torch.equal(mine.full_tensor(), right), (name, placements)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_strides_are_those_of_the_global_tensor(ranks: Any, world: int) -> None:
    ranks(world, strided)


def copied(rank: int, world: int) -> None:
    mesh = line(world)
    net = nn.Linear(4, 3)
    net.weight = distribute_tensor(net.weight, mesh, [S(0)])  # type: ignore[assignment]
    net.bias = distribute_tensor(net.bias, mesh, [R])  # type: ignore[assignment]
    net(torch.ones(2, 4)).sum().backward()
    twin = copy.deepcopy(net)
    for p, q in zip(net.parameters(), twin.parameters(), strict=True):
        assert isinstance(q, nn.Parameter) and isinstance(q, DTensor) and q is not p and q.requires_grad
        assert layout_of(q) is layout_of(p) and q._local_tensor.data_ptr() != p._local_tensor.data_ptr()
        assert torch.equal(q.full_tensor(), p.full_tensor())
        assert p.grad is not None and q.grad is None  # as torch copies parameters
    state = net.state_dict()
    assert list(state) == ["weight", "bias"] and all(isinstance(v, DTensor) for v in state.values())
    with torch.no_grad():
        twin.weight.zero_()
    assert net.weight.full_tensor().any()  # type: ignore[operator]
    twin.load_state_dict(state)
    assert torch.equal(twin.weight.full_tensor(), net.weight.full_tensor())  # type: ignore[operator]
    assert layout_of(twin.weight) is layout_of(net.weight)
    whole = {name: torch.ones(tuple(v.shape)) for name, v in state.items()}
    twin.load_state_dict(whole)
    assert torch.equal(twin.weight.full_tensor(), torch.ones(3, 4))  # type: ignore[operator]
    shared = nn.ModuleList([net, net])
    pair = copy.deepcopy(shared)
    assert pair[0].weight is pair[1].weight
    with pytest.raises(RuntimeError, match="leaves"):
        copy.deepcopy(net.weight * 2)


def test_copies_and_states(ranks: Any) -> None:
    ranks(2, copied)


def aliases(rank: int, world: int) -> None:
    mesh = line(world)
    x = distribute_tensor(count(4, 6), mesh, [S(0)])
    expected = count(4, 6)
    for make in (lambda a: a.t(), lambda a: a[:, 1:3], lambda a: a.view(4, 2, 3), lambda a: a.unsqueeze(0)):
        view, plain = make(x), make(expected)
        before = layout_of(view)
        view.mul_(2)
        plain.mul_(2)
        assert layout_of(view) is before
        assert torch.equal(x.full_tensor(), expected) and torch.equal(view.full_tensor(), plain)
    row = x[:, 0]
    row += 5
    expected[:, 0] += 5
    x[:, 2] = 7
    expected[:, 2] = 7
    assert torch.equal(x.full_tensor(), expected) and torch.equal(row.full_tensor(), expected[:, 0])
    data = x.detach()
    data.zero_()
    assert not x.full_tensor().any()


def test_views_alias(ranks: Any) -> None:
    ranks(2, aliases)


def in_place(rank: int, world: int) -> None:
    mesh = grid()
    other = count(5, 4) + 1
    for placements in itertools.product([R, S(0), S(1)], repeat=2):
        x, y = distribute_tensor(count(5, 4), mesh, placements), count(5, 4)
        own, local = layout_of(x), x.to_local().data_ptr()
        for theirs in ([R, R], [S(0), S(1)], [S(1), R], [P, R]):
            given = distribute_tensor(other, mesh).redistribute(mesh, theirs)
            x += given
            y += other
            x.mul_(0.5).sub_(given, alpha=2).clamp_(min=-3)
            y.mul_(0.5).sub_(other, alpha=2).clamp_(min=-3)
            x.copy_(x + given)
            y.copy_(y + other)
            assert layout_of(x) is own and x.to_local().data_ptr() == local
            torch.testing.assert_close(x.full_tensor(), y)
        w = distribute_tensor(other.clone().requires_grad_(), mesh, placements)
        out = w * 2
        out.add_(distribute_tensor(other, mesh, [S(1), R])).mul_(out.detach().clone())
        assert out.placements == w.placements
        out.sum().backward()
        torch.testing.assert_close(w.grad.full_tensor(), 6 * other)  # type: ignore[union-attr]


def test_in_place_keeps_the_layout(ranks: Any) -> None:
    ranks(4, in_place)
