"""Training on DTensors directly: optimizers, clipping, checkpointing, hooks, and what the graph keeps."""

from __future__ import annotations

import copy
import gc
import itertools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import espalier
from espalier import DTensor, Mesh, Partial, Replicate, Shard, distribute_tensor, layout_of, local_map
from espalier.tensor import inputs as moves

R, P = Replicate(), Partial()
S = Shard
F64 = torch.float64
PLACEMENTS = [[R, R], [S(0), R], [S(1), R], [S(0), S(1)], [S(0), S(0)]]


def line(world: int) -> Mesh:
    return Mesh.from_env({"tensor": world})


def grid() -> Mesh:
    return Mesh.from_env({"data": 2, "tensor": 2})


def values(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


def parameters(mesh: Mesh) -> tuple[list[DTensor], list[nn.Parameter]]:
    """A parameter for each layout, and the same plain."""
    plain = [nn.Parameter(values(5, 3, seed=i)) for i in range(len(PLACEMENTS))]
    laid = [distribute_tensor(p, mesh, at) for p, at in zip(plain, PLACEMENTS, strict=True)]
    return laid, plain


def loss_of(weights: Any, x: torch.Tensor) -> torch.Tensor:
    return sum((F.linear(x, w).tanh() * (i + 1)).square().sum() for i, w in enumerate(weights))  # type: ignore[return-value]


def apart(laid: list[DTensor], plain: list[nn.Parameter], what: Callable[[Any], Any]) -> float:
    pairs = zip(laid, plain, strict=True)
    return max((what(a).full_tensor() - what(b)).abs().max().item() for a, b in pairs)


def steps(rank: int, world: int, make: type[torch.optim.Optimizer], options: dict[str, Any]) -> None:
    mesh = grid()
    laid, plain = parameters(mesh)
    ours, theirs = make(laid, **options), make(plain, **options)  # type: ignore[arg-type]
    for step in range(3):
        x = values(4, 3, seed=10 + step)
        loss, expected = loss_of(laid, distribute_tensor(x, mesh, [S(0), R])), loss_of(plain, x)
        loss.backward()
        expected.backward()
        assert abs(loss.item() - expected.item()) < 1e-10
        assert apart(laid, plain, lambda p: p.grad) < 1e-11
        ours.step()
        theirs.step()
        assert apart(laid, plain, lambda p: p) < 1e-12
        ours.zero_grad()
        theirs.zero_grad()
    for p, at in zip(laid, PLACEMENTS, strict=True):
        assert p.placements == tuple(at) and p.is_leaf and p.grad is None
        for name, value in ours.state[p].items():
            assert name == "step" or layout_of(value) is layout_of(p), name


@pytest.mark.parametrize("how", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW"])
def test_optimizers_step_on_dtensors(ranks: Any, name: str, how: dict[str, bool]) -> None:
    options = {"lr": 0.05, "weight_decay": 0.1, **({"momentum": 0.9} if name == "SGD" else {}), **how}
    ranks(4, steps, getattr(torch.optim, name), options)


def clips(rank: int, world: int, foreach: bool | None) -> None:
    mesh = grid()
    for kind in (2.0, 1.0, float("inf")):
        for limit in (0.1, 1e6):
            laid, plain = parameters(mesh)
            x = values(4, 3)
            loss_of(laid, distribute_tensor(x, mesh, [S(0), R])).backward()
            loss_of(plain, x).backward()
            found = nn.utils.clip_grad_norm_(laid, limit, kind, foreach=foreach)
            expected = nn.utils.clip_grad_norm_(plain, limit, kind)
            assert abs(found.item() - expected.item()) < 1e-10, (kind, limit)
            assert apart(laid, plain, lambda p: p.grad) < 1e-12
    total = nn.utils.get_total_norm([p.grad for p in laid if p.grad is not None], foreach=foreach)
    assert abs(total.item() - nn.utils.get_total_norm([p.grad for p in plain]).item()) < 1e-10  # type: ignore[misc]


@pytest.mark.parametrize("foreach", [None, True, False])
def test_clipping_sees_the_global_norm(ranks: Any, foreach: bool | None) -> None:
    ranks(4, clips, foreach)


LISTS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "lerp_": lambda a, b: torch._foreach_lerp_([a], [b], 0.3),
    "copy_": lambda a, b: torch._foreach_copy_([a], [b]),
    "mul": lambda a, b: torch._foreach_mul([a], [b])[0],
    "mul by one tensor": lambda a, b: torch._foreach_mul([a], b.sum())[0],
    "mul by scalars": lambda a, b: torch._foreach_mul([a], [b.norm()])[0],
}


def mixed_lists(rank: int, world: int) -> None:
    """Calls on lists where plain tensors, which are whole, stand beside DTensors."""
    mesh = line(world)
    a, b = values(2, 4), values(2, 4, seed=1)
    halves = DTensor.from_local(b * (0.25, 0.75)[rank], mesh, [Partial()])
    for name, call in LISTS.items():
        for laid in (*(distribute_tensor(b, mesh, [at]) for at in (S(0), S(1), R)), halves):
            for swapped in (False, True) if not name.endswith("_") else (False,):
                ours, plain = (a.clone(), laid), (a.clone(), b.clone())
                got = call(*ours[::-1]) if swapped else call(*ours)
                expected = call(*plain[::-1]) if swapped else call(*plain)
                pair = (ours[0], plain[0]) if name.endswith("_") else (got, expected)
                assert (espalier.full_tensor(pair[0]) - pair[1]).abs().max() < 1e-12, (name, laid, swapped)


def test_lists_of_plain_tensors_and_dtensors(ranks: Any) -> None:
    ranks(2, mixed_lists)


WRITES: dict[str, Callable[[list[torch.Tensor], list[torch.Tensor]], Any]] = {
    "mul_": lambda a, b: torch._foreach_mul_(a, 0.7),
    "add_": lambda a, b: torch._foreach_add_(a, b, alpha=0.5),
    "addcmul_": lambda a, b: torch._foreach_addcmul_(a, b, b),
    "clamp_max_": lambda a, b: torch._foreach_clamp_max_(a, 0.1),
    "copy_": lambda a, b: torch._foreach_copy_(a, b),
    "zero_": lambda a, b: torch._foreach_zero_(a),
}


def written_addends(rank: int, world: int) -> None:
    """In place on what is a sum over the ranks, as gradients by hand are: whoever holds it has the result."""
    mesh = line(world)
    a, b = values(2, 4), values(2, 4, seed=1)
    for name, call in WRITES.items():
        for at in (S(0), R):
            addend = DTensor.from_local(a * (0.25, 0.75)[rank], mesh, [Partial()])
            cut = distribute_tensor(a, mesh, [S(1)])
            other = distribute_tensor(b, mesh, [at])
            held = [addend, cut]
            expected = [a.clone(), a.clone()]
            call(held, [other, other])
            call(expected, [b, b])
            for x, y in zip((addend, cut), expected, strict=True):
                assert (espalier.full_tensor(x) - y).abs().max() < 1e-12, (name, at)


def test_lists_of_addends_are_written_to(ranks: Any) -> None:
    ranks(2, written_addends)


def averaged(rank: int, world: int) -> None:
    """An average of weights that was made of the model before it was laid out."""
    for plan in ({"tensor": 2}, {"data": 2, "zero": 3}):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 2), nn.Tanh(), nn.Linear(2, 4)).double()
        of_each = [(m, torch.optim.SGD(m.parameters(), lr=0.5)) for m in (net, copy.deepcopy(net))]
        model = espalier.prepare(*of_each[0], plan=plan)[0]
        averages = []
        for m, (held, optimizer) in zip((model, of_each[1][0]), of_each, strict=True):
            ema = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
            averages.append(torch.optim.swa_utils.AveragedModel(held, multi_avg_fn=ema))
            for step in range(3):
                m(values(4, 4, seed=step)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                averages[-1].update_parameters(held)
        for p, q in zip(*(x.parameters() for x in averages), strict=True):
            assert (espalier.full_tensor(p) - q).abs().max() < 1e-12, plan


def test_an_average_of_weights_made_before_the_layout(ranks: Any) -> None:
    ranks(2, averaged)


def checkpointed(rank: int, world: int) -> None:
    mesh = grid()
    value = values(4, 3)
    found = []
    for use in (False, True):
        torch.manual_seed(3)
        w = distribute_tensor(nn.Parameter(values(6, 3, seed=1)), mesh, [R, S(0)])
        v = distribute_tensor(nn.Parameter(values(3, 6, seed=2)), mesh, [S(0), S(1)])
        x = distribute_tensor(value.clone().requires_grad_(), mesh, [S(0), R])

        def block(x: torch.Tensor, w: torch.Tensor = w, v: torch.Tensor = v) -> torch.Tensor:
            return F.dropout(F.linear(F.dropout(F.linear(x, w).relu(), 0.3), v), 0.4)

        y = checkpoint(block, x, use_reentrant=False) if use else block(x)
        after = torch.rand(3)
        (y * y).sum().backward()
        found.append([y.full_tensor(), *(t.grad.full_tensor() for t in (x, w, v)), after])  # type: ignore[union-attr]
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)
    assert found[0][1].any()


def test_checkpointing_with_dropout(ranks: Any) -> None:
    ranks(4, checkpointed)


def hooks(rank: int, world: int) -> None:
    mesh = line(world)
    x = distribute_tensor(values(4, 3).requires_grad_(), mesh, [S(0)])
    w = distribute_tensor(values(3).requires_grad_(), mesh, [R])
    y = x * w
    seen: list[tuple[str, Any]] = []

    def double(grad: torch.Tensor) -> torch.Tensor:
        seen.append(("y", grad))
        return grad * 2

    y.register_hook(double)
    w.register_hook(lambda grad: seen.append(("w", grad)))
    x.register_post_accumulate_grad_hook(lambda p: seen.append(("x", p.grad)))
    y.sum().backward()
    grads = dict(seen)
    assert sorted(name for name, _ in seen) == ["w", "x", "y"]
    assert all(isinstance(g, DTensor) for g in grads.values())
    assert (
        grads["y"].placements == (S(0),)
        and grads["x"].placements == (S(0),)
        and grads["w"].placements == (R,)
    )
    torch.testing.assert_close(w.grad.full_tensor(), 2 * values(4, 3).sum(0))  # type: ignore[union-attr]
    torch.testing.assert_close(x.grad.full_tensor(), (2 * values(3)).expand(4, 3))  # type: ignore[union-attr]
    torch.testing.assert_close(grads["w"].full_tensor(), 2 * values(4, 3).sum(0))
    removed = w.register_hook(lambda grad: seen.append(("again", grad)))
    removed.remove()
    (x * w).sum().backward()
    assert "again" not in dict(seen)


def backward_where_nothing_is_recorded(rank: int, world: int) -> None:
    """In a hook (a deep equilibrium solves for its gradient there), and under no_grad."""

    def grads(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
        z = torch.tanh(x * w)
        start = z.detach().requires_grad_()
        again = torch.tanh(start * w)

        def solve(grad: torch.Tensor) -> torch.Tensor:
            assert not torch.is_grad_enabled()
            solved = grad
            for _ in range(3):
                solved = torch.autograd.grad(again, start, solved, retain_graph=True)[0] + grad
            return solved

        z.register_hook(solve)
        loss = z.square().sum()
        with torch.no_grad():
            loss.backward()
        assert x.grad is not None and w.grad is not None
        return [x.grad, w.grad]

    mesh = line(world)
    x, w = values(4, 3), values(3)
    right = grads(x.clone().requires_grad_(), w.clone().requires_grad_())
    found = grads(*(distribute_tensor(v.clone().requires_grad_(), mesh, [p]) for v, p in ((x, S(0)), (w, R))))
    for g, due in zip(found, right, strict=True):
        torch.testing.assert_close(espalier.full_tensor(g), due)


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        assert type(x) is torch.Tensor
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return 2 * grad


def custom_functions(rank: int, world: int) -> None:
    mesh = line(world)
    x = distribute_tensor(values(4, 3).requires_grad_(), mesh, [S(0)])
    y = local_map(Twice.apply, out_placements=[S(0)])(x)
    y.sum().backward()
    torch.testing.assert_close(x.grad.full_tensor(), torch.full((4, 3), 2.0, dtype=F64))  # type: ignore[union-attr]
    plain = torch.ones(2, requires_grad=True)
    Twice.apply(plain).sum().backward()
    assert torch.equal(plain.grad, torch.full((2,), 2.0))  # type: ignore[arg-type]


@contextmanager
def watched() -> Iterator[tuple[dict[int, torch.UntypedStorage], list[weakref.ref[torch.Tensor]]]]:
    """What autograd keeps (storages by address), and what the dispatcher has moved."""
    kept: dict[int, torch.UntypedStorage] = {}
    moved: list[weakref.ref[torch.Tensor]] = []
    original = moves.redistribute_by

    def pack(x: torch.Tensor) -> torch.Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage()
        return x

    def redistribute_by(x: torch.Tensor, way: Any) -> torch.Tensor:
        out = original(x, way)
        moved.append(weakref.ref(out))
        return out

    moves.redistribute_by = redistribute_by  # type: ignore[assignment]
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            yield kept, moved
    finally:
        moves.redistribute_by = original


def keeps_shards(rank: int, world: int) -> None:
    mesh = line(world)
    # rows of the batch and of the weight on one axis: the smaller, the weight, is gathered (as FSDP does)
    x, w, u = values(64, 8), values(12, 8, seed=1).requires_grad_(), values(12, 12, seed=2).requires_grad_()
    laid_x = distribute_tensor(x, mesh, [S(0)])
    laid_w, laid_u = (distribute_tensor(t, mesh, [S(0)]) for t in (w, u))
    with watched() as (kept, moved):
        h = F.linear(laid_x, laid_w)
        y = F.linear(h, laid_u)
    assert h.placements == y.placements == (S(0),)
    gc.collect()
    assert len(moved) == 2 and all(m() is None for m in moved), "the gathered weights live on"
    sizes = sorted(s.nbytes() for s in kept.values())
    # this rank's rows of x and h, for the gradients of the weights, and the shards of the weights
    allowed = sum(t.to_local().nbytes for t in (laid_x, h.detach(), laid_w.detach(), laid_u.detach()))
    assert sum(sizes) <= allowed, (sizes, allowed)
    (y * y).sum().backward()
    expected = F.linear(F.linear(x, w), u)
    (expected * expected).sum().backward()
    for a, b in ((laid_w, w), (laid_u, u)):
        torch.testing.assert_close(a.grad.full_tensor(), b.grad)  # type: ignore[union-attr]

    # the same for an activation, cut along the sequence and gathered for a weight cut by columns
    a = distribute_tensor(values(2, 6, 8, seed=3).requires_grad_(), mesh, [S(1)])
    column = distribute_tensor(values(40, 8, seed=4).requires_grad_(), mesh, [S(0)])
    with watched() as (kept, moved):
        z = F.linear(a.sin(), column)
    assert z.placements == (S(2),)
    gc.collect()
    assert [m() for m in moved if m() is not None] == []
    assert sum(s.nbytes() for s in kept.values()) <= 2 * a.to_local().nbytes + column.to_local().nbytes
    z.square().sum().backward()
    wholes = [t.detach().full_tensor().requires_grad_() for t in (a, column)]
    F.linear(wholes[0].sin(), wholes[1]).square().sum().backward()
    for t, whole in zip((a, column), wholes, strict=True):
        torch.testing.assert_close(t.grad.full_tensor(), whole.grad)  # type: ignore[union-attr]


def keeps_what_it_must(rank: int, world: int) -> None:
    """Double backward through a kept graph, and a change of the shard between forward and backward."""
    mesh = line(world)
    x = distribute_tensor(values(64, 8), mesh, [S(0)])
    w = distribute_tensor(values(12, 8, seed=1).requires_grad_(), mesh, [S(0)])
    x.requires_grad_()
    loss = F.linear(x, w).square().sum()
    loss.backward(retain_graph=True)
    first = [t.grad.full_tensor().clone() for t in (x, w)]  # type: ignore[union-attr]
    x.grad = w.grad = None
    loss.backward()
    for before, t in zip(first, (x, w), strict=True):
        assert torch.equal(before, t.grad.full_tensor())  # type: ignore[union-attr]
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    loss = F.linear(x, w).square().sum()
    with torch.no_grad():
        w.mul_(2)
    with pytest.raises(RuntimeError, match="modified"):
        loss.backward()


def shares_the_reduction(rank: int, world: int) -> None:
    mesh = line(world)
    x = distribute_tensor(values(2, 3, 8).requires_grad_(), mesh, [R])
    weights = [distribute_tensor(values(8, 8, seed=i).requires_grad_(), mesh, [S(0)]) for i in range(3)]
    h = x * 2
    with espalier.ledger(mesh) as book:
        q, k, v = (F.linear(h, w) for w in weights)
        loss = (q * k * v).sum()
        assert not book.entries
        loss.backward()
    assert [e.op for e in book.entries] == ["all_reduce"] and book.entries[0].bytes == 2 * 3 * 8 * 8
    wholes = [t.detach().full_tensor().requires_grad_() for t in (x, *weights)]
    q, k, v = (F.linear(wholes[0] * 2, w) for w in wholes[1:])
    (q * k * v).sum().backward()
    for t, whole in zip((x, *weights), wholes, strict=True):
        torch.testing.assert_close(t.grad.full_tensor(), whole.grad)  # type: ignore[union-attr]
    # the same of a gather: one forward, one again for the gradients of the weights, one reduce-scatter
    h = distribute_tensor(values(2, 2, 8).requires_grad_(), mesh, [S(1)]) * 2
    with espalier.ledger(mesh) as book:
        q, k, v = (F.linear(h, w) for w in weights)
        assert q.placements == (S(2),)
        (q * k * v).sum().backward()
    assert [e.op for e in book.entries] == ["all_gather", "all_gather", "reduce_scatter"]


def gathers_ahead(rank: int, world: int) -> None:
    """What the backward pass needs next is gathered before the gradient of what it had is summed."""
    mesh = line(world)
    sizes = (8, 10, 12, 14)
    x = distribute_tensor(values(64, 8), mesh, [S(0)])
    weights = [
        distribute_tensor(values(n, m, seed=n).requires_grad_(), mesh, [S(0)])
        for m, n in itertools.pairwise(sizes)
    ]
    sent = {n * m * 4: n for m, n in itertools.pairwise(sizes)}

    def forward() -> torch.Tensor:
        y = x
        for w in weights:
            y = F.linear(y, w).tanh()
        return y.square().sum()

    loss = forward()
    other = forward()  # its shards come last, and no backward pass by them
    with espalier.ledger(mesh) as book:
        loss.backward(retain_graph=True)
    expected = [("g", 14), ("g", 12), ("s", 14), ("g", 10), ("s", 12), ("s", 10)]
    names = {"all_gather": "g", "reduce_scatter": "s"}
    assert [(names[e.op], sent[e.bytes]) for e in book.entries] == expected
    y = x.full_tensor()
    wholes = [w.detach().full_tensor().requires_grad_() for w in weights]
    for w in wholes:
        y = F.linear(y, w).tanh()
    y.square().sum().backward()
    for w, plain in zip(weights, wholes, strict=True):
        torch.testing.assert_close(w.grad.full_tensor(), plain.grad)  # type: ignore[union-attr]
    # of a pass that needs the last layers alone, and of one that breaks off while something is under way
    with espalier.ledger(mesh) as book:
        torch.autograd.grad(loss, weights[1:], retain_graph=True)
    assert [(names[e.op], sent[e.bytes]) for e in book.entries] == [*expected[:3], ("s", 12)]

    def stop(grad: torch.Tensor) -> None:
        raise RuntimeError("enough")

    y = F.linear(F.linear(x, weights[0]).tanh(), weights[1])
    y = F.linear(y.tanh(), weights[2])
    handle = weights[2].register_hook(stop)
    with pytest.raises(RuntimeError, match="enough"):
        y.square().sum().backward()
    handle.remove()
    del y
    gc.collect()
    for w in weights:
        w.grad = None
    other.backward()
    for w, plain in zip(weights, wholes, strict=True):
        torch.testing.assert_close(w.grad.full_tensor(), plain.grad)  # type: ignore[union-attr]


def gathers_no_value_in_vain(rank: int, world: int) -> None:
    """The backward pass of what is linear needs no value, so nothing is gathered again for it."""
    mesh = line(world)
    x = distribute_tensor(values(5, 4), mesh, [S(0)]).requires_grad_()
    total = torch.cat([x[:1].clone(), x.flip(0)]).cumsum(0).sum()
    with espalier.ledger(mesh) as book:
        total.backward()
    assert all(entry.op != "all_gather" for entry in book.entries), book
    plain = values(5, 4).requires_grad_()
    torch.cat([plain[:1].clone(), plain.flip(0)]).cumsum(0).sum().backward()
    assert torch.equal(x.grad.full_tensor(), plain.grad)


@pytest.mark.parametrize(
    "body",
    [
        hooks,
        backward_where_nothing_is_recorded,
        custom_functions,
        keeps_shards,
        keeps_what_it_must,
        gathers_ahead,
        gathers_no_value_in_vain,
        shares_the_reduction,
    ],
)
def test_graphs(ranks: Any, body: Any) -> None:
    ranks(2, body)
