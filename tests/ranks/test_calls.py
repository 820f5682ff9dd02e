"""What a torch call on DTensors does: composites, fallback, ``out=``, mixed operands, strict mode."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import espalier
from espalier import (
    DTensor,
    GatherWarning,
    Mesh,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
    layout_of,
)
from espalier.tensor import fallback
from espalier.tensor.rules import RULES

R, P = Replicate(), Partial()
S = Shard
F64 = torch.float64


def line(world: int) -> Mesh:
    return Mesh.from_env({"tensor": world})


def values(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


def spread(net: nn.Module, mesh: Mesh, pick: Callable[[str, torch.Tensor], list[Placement]]) -> None:
    """Lay the parameters of a module on a mesh."""
    for module in net.modules():
        for name, p in list(module.named_parameters(recurse=False)):
            setattr(module, name, distribute_tensor(p, mesh, pick(name, p)))


def shards(name: str, p: torch.Tensor) -> list[Placement]:
    return [S(0)]


def whole(name: str, p: torch.Tensor) -> list[Placement]:
    return [R]


def rows_and_columns(name: str, p: torch.Tensor) -> list[Placement]:
    return [S(p.ndim - 1)]


def compare(net: nn.Module, plain: nn.Module, run: Callable[[nn.Module, torch.Tensor], Any], x: Any) -> None:
    """Values and all gradients against the plain module; ``x`` is the DTensor."""
    value = x.full_tensor().detach().requires_grad_()
    x = x.detach().requires_grad_()
    found, expected = run(net, x), run(plain, value)
    weights = values(*expected.shape, seed=9)
    assert isinstance(found, DTensor)
    torch.testing.assert_close(found.full_tensor(), expected)
    (found * distribute_tensor(weights, x.device_mesh)).sum().backward()
    (expected * weights).sum().backward()
    torch.testing.assert_close(x.grad.full_tensor(), value.grad)
    for (name, p), q in zip(net.named_parameters(), plain.parameters(), strict=True):
        assert isinstance(p.grad, DTensor), name
        torch.testing.assert_close(
            p.grad.full_tensor(), q.grad, msg=lambda text, name=name: f"{name}: {text}"
        )


def multihead(rank: int, world: int) -> None:
    mesh = line(world)
    for pick in (whole, shards, rows_and_columns):
        for placement in (R, S(0), S(1), S(2)):
            for options in ({}, {"need_weights": False}, {"average_attn_weights": False}):
                nets = []
                for _ in range(2):
                    torch.manual_seed(1)
                    nets.append(nn.MultiheadAttention(8, 4, batch_first=True, dtype=F64))
                net, plain = nets
                spread(net, mesh, pick)
                x = distribute_tensor(values(4, 3, 8), mesh, [placement])

                def run(m: nn.Module, x: torch.Tensor, options: dict[str, Any] = options) -> torch.Tensor:
                    out, weights = m(x, x, x, **options)
                    return out if weights is None else out + weights.sum()

                compare(net, plain, run, x)


def encoder(rank: int, world: int) -> None:
    mesh = line(world)
    for pick in (whole, shards):
        for placement in (R, S(0), S(1)):
            for train in (True, False):
                nets = []
                for _ in range(2):
                    torch.manual_seed(1)
                    made = nn.TransformerEncoderLayer(8, 2, 16, 0.0, "gelu", batch_first=True, dtype=F64)
                    nets.append(made.train(train))
                spread(nets[0], mesh, pick)
                x = distribute_tensor(values(4, 3, 8), mesh, [placement])
                causal = nn.Transformer.generate_square_subsequent_mask(3, dtype=F64)
                compare(*nets, lambda m, x: m(x), x)
                for net in nets:
                    net.zero_grad()
                compare(*nets, lambda m, x, causal=causal: m(x, src_mask=causal, is_causal=True), x)


def entered(rank: int, world: int, body: Callable[[int, int], None]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", GatherWarning)
        body(rank, world)


@pytest.mark.parametrize("body", [multihead, encoder])
def test_composites_are_entered(ranks: Any, body: Any) -> None:
    ranks(2, entered, body)


def falls_back(rank: int, world: int) -> None:
    mesh = line(world)
    fallback._warn.cache_clear()
    ops: list[Callable[..., Any]] = [torch.linalg.tensorinv, torch.linalg.tensorsolve]
    for op in ops:
        assert RULES.get(op) is None and RULES.body(op) is None
        rest = [values(3, seed=4)] if op is torch.linalg.tensorsolve else [1]
        for placements in ([S(0)], [S(1)], [R]):
            value = values(3, 3).requires_grad_()
            x = distribute_tensor(value, mesh, placements)
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                for _ in range(3):
                    found = op(x, *rest)
            gathered = [w for w in told if w.category is GatherWarning]
            assert len(told) == len(gathered) == (placements != [R]), (
                op,
                placements,
                [str(w.message) for w in told],
            )
            for w in gathered:
                assert op.__name__ in str(w.message) and repr(layout_of(x)) in str(w.message)
            expected = op(value, *rest)
            torch.testing.assert_close(found.full_tensor(), expected)
            weights = values(*expected.shape, seed=2)
            (found * weights).sum().backward()
            (expected * weights).sum().backward()
            torch.testing.assert_close(x.grad.full_tensor(), value.grad)  # type: ignore[union-attr]
            assert x.grad.placements == tuple(placements)  # type: ignore[union-attr]


def falls_back_with_many(rank: int, world: int) -> None:
    """Several outputs, several inputs, in place, and a Partial."""
    mesh = line(world)
    value = values(5, 3)
    x = distribute_tensor(value, mesh, [S(0)])
    with pytest.warns(GatherWarning, match="histogram"):
        top = torch.histogram(x, 4)
    expected = torch.histogram(value, 4)
    assert type(top) is type(expected)
    assert torch.equal(top.hist.full_tensor(), expected.hist)
    assert torch.equal(top.bin_edges.full_tensor(), expected.bin_edges)
    mask, others = value > 0, values(15, seed=7)
    with pytest.warns(GatherWarning, match="masked_scatter_"):
        x.masked_scatter_(mask, others)
    torch.testing.assert_close(x.full_tensor(), value.masked_scatter(mask, others))
    assert x.placements == (S(0),)
    part = DTensor.from_local(values(3, 3, seed=rank), mesh, [P])
    with pytest.warns(GatherWarning, match="inv"):
        found = torch.linalg.tensorinv(part, 1)
    torch.testing.assert_close(found.full_tensor(), torch.linalg.inv(part.full_tensor()))


@pytest.mark.parametrize("body", [falls_back, falls_back_with_many])
def test_functions_without_a_rule(ranks: Any, body: Any) -> None:
    ranks(2, body)


def given_out(rank: int, world: int) -> None:
    mesh = line(world)
    a, b = values(4, 3), values(4, 3, seed=1)
    for x_in, y_in, z_in in (([S(0)], [S(0)], [S(0)]), ([S(0)], [R], [S(1)]), ([P], [S(1)], [R])):
        x, y = (distribute_tensor(v, mesh).redistribute(mesh, p) for v, p in ((a, x_in), (b, y_in)))
        z = espalier.zeros(4, 3, device_mesh=mesh, placements=z_in, dtype=F64)
        own = layout_of(z)
        result = torch.add(x, y, alpha=2, out=z)
        assert result is z and layout_of(z) is own
        torch.testing.assert_close(z.full_tensor(), a + 2 * b)
        m = espalier.zeros(4, 4, device_mesh=mesh, placements=z_in, dtype=F64)
        torch.mm(x, y.t(), out=m)
        torch.testing.assert_close(m.full_tensor(), a @ b.t())
    top, where = (espalier.zeros(4, device_mesh=mesh, dtype=t) for t in (F64, torch.int64))
    torch.max(distribute_tensor(a, mesh, [S(0)]), 1, out=(top, where))
    assert torch.equal(top.full_tensor(), a.amax(1)) and torch.equal(where.full_tensor(), a.argmax(1))


def mixes(rank: int, world: int) -> None:
    mesh = line(world)
    a, b = values(4, 3), values(4, 3, seed=1)
    for placements in ([S(0)], [S(1)], [R], [P]):
        x = distribute_tensor(a, mesh).redistribute(mesh, placements).requires_grad_()
        plain = b.clone().requires_grad_()
        out = plain * x + x - torch.tensor(2.0, dtype=F64)
        torch.testing.assert_close(out.full_tensor(), b * a + a - 2)
        out.sum().backward()
        # the gradient of a plain operand is that of a replicated one: whole on every rank
        assert type(plain.grad) is torch.Tensor
        torch.testing.assert_close(plain.grad, a)
        torch.testing.assert_close(x.grad.full_tensor(), b + 1)  # type: ignore[union-attr]
    net = nn.Linear(3, 2, dtype=F64)
    assert isinstance(F.relu(net(x.detach())), DTensor)
    with pytest.raises(ValueError, match="lie on 2 meshes"):
        x + espalier.zeros(4, 3, device_mesh=Mesh.from_env({"other": world}), dtype=F64)
    assert (x + espalier.zeros(4, 3, device_mesh=line(world), dtype=F64)).shape == (4, 3)


def functional(rank: int, world: int) -> None:
    mesh = line(world)
    net = nn.Linear(3, 4, dtype=F64)
    weights = {name: values(*p.shape, seed=5).requires_grad_() for name, p in net.named_parameters()}
    laid = {name: distribute_tensor(w, mesh, [S(0)]) for name, w in weights.items()}
    value = values(5, 3)
    found = torch.func.functional_call(net, laid, (distribute_tensor(value, mesh, [R]),))
    expected = torch.func.functional_call(net, weights, (value,))
    assert isinstance(found, DTensor) and found.placements == (S(1),)
    torch.testing.assert_close(found.full_tensor(), expected)
    found.square().sum().backward()
    expected.square().sum().backward()
    for name, w in weights.items():
        torch.testing.assert_close(laid[name].grad.full_tensor(), w.grad)  # type: ignore[union-attr]


def unrecorded(rank: int, world: int) -> None:
    mesh = line(world)
    value = values(4, 4)
    w = distribute_tensor(value.clone().requires_grad_(), mesh, [S(1)])
    for context in (torch.no_grad, torch.inference_mode):
        x = distribute_tensor(value, mesh, [S(0)])
        with context():
            for _ in range(2):
                out = F.linear(x, w).relu() + x
                out = out.softmax(-1).sum(0)
            assert not out.requires_grad and out.grad_fn is None
            expected = (F.linear(value, value).relu() + value).softmax(-1).sum(0)
            torch.testing.assert_close(out.full_tensor(), expected)
            assert out.is_inference() == (context is torch.inference_mode)
    # what was cached while nothing was recorded does not keep gradients away
    out = F.linear(distribute_tensor(value, mesh, [S(0)]), w)
    out.sum().backward()
    torch.testing.assert_close(w.grad.full_tensor(), value.sum(0).expand(4, 4))  # type: ignore[union-attr]


@pytest.mark.parametrize("body", [given_out, mixes, functional, unrecorded])
def test_calls(ranks: Any, body: Any) -> None:
    ranks(2, body)


def strictly(rank: int, world: int) -> None:
    mesh = line(world)
    x = distribute_tensor(values(4, 3), mesh, [S(0)])
    plain, scalar = values(4, 3), torch.tensor(2.0, dtype=F64)
    calls: list[Callable[[], Any]] = [
        lambda: x + plain,
        lambda: plain + x,
        lambda: torch.cat([x, plain]),
        lambda: F.linear(x, weight=plain),
        lambda: torch.cdist(x, plain),
        lambda: x.copy_(plain),
    ]
    # refused whether or not the call was made, and cached, before
    for cached in (False, True):
        with espalier.strict():
            for call in calls:
                with pytest.raises(
                    ValueError, match=r"plain among DTensors, which espalier.strict\(\) refuses"
                ):
                    call()
            assert (x * scalar + 1).placements == (S(0),)
            assert torch.equal((x + x).full_tensor(), 2 * x.full_tensor())
            assert torch.equal(plain + plain, 2 * plain)
        if not cached:
            for call in calls:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", GatherWarning)
                    call()
    with espalier.strict(), pytest.raises(KeyError):
        raise KeyError
    x + plain


def test_strict_mode_refuses_plain_tensors(ranks: Any) -> None:
    ranks(2, strictly)


def numbers_as_tensors(rank: int, world: int) -> None:
    """Sizes, bounds and places as 0-dim tensors: each time by their value, also those of a Partial."""
    mesh = line(world)
    whole = values(12, 6)
    calls: list[Callable[[torch.Tensor, Any], Any]] = [
        lambda x, n: x.view(n, 2, -1),
        lambda x, n: x.reshape((n, 72 // int(n))),
        lambda x, n: x[:1].expand(n, 6),
        lambda x, n: x.repeat(1, n),
        lambda x, n: x.narrow(0, n, 2),
        lambda x, n: torch.narrow(x, 1, 1, n),
        lambda x, n: x[n:],
        lambda x, n: x[n - 1 : n + 1, ..., :n],
        lambda x, n: x[:, n],
        lambda x, n: x.unflatten(0, (n, -1)),
        lambda x, n: x.roll(n, 0),
        lambda x, n: x.split(n)[1],
        lambda x, n: torch.chunk(x, n)[-1],
        lambda x, n: x.select(0, n),
        lambda x, n: x.topk(n, 0).values,
        lambda x, n: F.pad(x, (n, 0, 0, n)),
        lambda x, n: x.new_ones(n, 2),
        lambda x, n: torch.zeros(n, 2) + x[:1, :2],
        lambda x, n: x.tril(n),
    ]
    for places in ([R], [S(0)], [S(1)]):
        x = distribute_tensor(whole, mesh, places)
        for i, call in enumerate(calls):
            for n in (2, 3, 4, 2):
                n = 3 if n == 4 and i in (11,) else n
                addend = torch.tensor(n if rank == 0 else 0)
                sizes = [torch.tensor(n), distribute_tensor(torch.tensor(n), mesh, [R])]
                for size in (*sizes, DTensor.from_local(addend, mesh, [P])):
                    found, expected = call(x, size), call(whole, n)
                    assert found.shape == expected.shape, (i, places, n, size)
                    assert torch.equal(espalier.full_tensor(found), expected), (i, places, n, size)
    y = distribute_tensor(whole.clone(), mesh, [S(0)])
    plain = whole.clone()
    for n in (2, 5):
        y[torch.tensor(n) :] = n
        plain[n:] = n
    assert torch.equal(y.full_tensor(), plain)


def test_numbers_may_be_tensors(ranks: Any) -> None:
    ranks(2, numbers_as_tensors)


def by_name(rank: int, world: int) -> None:
    """Arguments by torch's own names: as by their places, nothing gathered."""
    mesh = line(world)
    x, y, z = values(4, 3, 5), values(4, 5, 2, seed=1), values(4, 1, 2, seed=2)
    calls: list[Callable[..., torch.Tensor]] = [
        lambda x, y, z: z.baddbmm(batch1=x, batch2=y, beta=0.5, alpha=2.0),
        lambda x, y, z: torch.baddbmm(input=z, batch1=x, batch2=y),
        lambda x, y, z: torch.bmm(x, mat2=y),
        lambda x, y, z: x.matmul(other=y),
        lambda x, y, z: torch.addcmul(x, tensor1=x, tensor2=x, value=2),
        lambda x, y, z: torch.swapaxes(x, axis0=1, axis1=2),
        lambda x, y, z: torch.max(x, other=-x),
        lambda x, y, z: torch.outer(x[:, 0, 0], vec2=y[:, 0, 0]),
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error", GatherWarning)
        for i, call in enumerate(calls):
            found = call(*(distribute_tensor(t, mesh, [S(0)]) for t in (x, y, z)))
            torch.testing.assert_close(found.full_tensor(), call(x, y, z), msg=lambda m, i=i: f"{i}: {m}")
            assert S(0) in found.placements  # type: ignore[attr-defined]


def test_arguments_by_name(ranks: Any) -> None:
    ranks(2, by_name)
