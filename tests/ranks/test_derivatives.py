"""Derivatives of every order and kind, in every layout, against the same program on plain tensors."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad

from espalier import (
    DTensor,
    Layout,
    Mesh,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    full_tensor,
    local_map,
    prepare,
)
from espalier.comm.row_exchange import send_rows
from espalier.tensor import redistribute

R, P = Replicate(), Partial()
S = Shard
F64 = torch.float64
Program = Callable[..., torch.Tensor]


def values(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed)) / 2


def orders(f: Program, *inputs: torch.Tensor, upto: int = 3) -> list[torch.Tensor]:
    """The value and all first, second and third derivatives, each of a nonlinear function of those before."""
    out = f(*inputs)
    found: list[torch.Tensor] = [out]
    loss = (out * out * out).sum() * 0.1
    for _ in range(upto):
        grads = torch.autograd.grad(loss, inputs, create_graph=True, materialize_grads=True)
        found += grads
        loss = sum((g * g).sum() for g in grads) * 0.01
    return found


def differ(given: list[torch.Tensor], wanted: list[torch.Tensor]) -> list[str]:
    wrong = []
    for i, (a, b) in enumerate(zip(given, wanted, strict=True)):
        a, b = full_tensor(a.detach()), b.detach()
        if a.shape != b.shape or (a - b).abs().max() > 1e-10 * max(b.abs().max(), 1):
            wrong.append(
                f"result {i}: off by {(a - b).abs().max().item():.1e}" if a.shape == b.shape else "shape"
            )
    return wrong


def laid(x: torch.Tensor, mesh: Mesh, placements: list[Any]) -> DTensor:
    """A leaf; where it is Partial each rank holds an addend of its own."""
    found = distribute_tensor(x, mesh, [R] * mesh.ndim).redistribute(placements=placements).detach()
    for axis, p in enumerate(placements):
        if isinstance(p, Partial):
            with torch.no_grad():
                found.to_local().add_(mesh.coordinate[axis] - (mesh.shape[axis] - 1) / 2)
    return found.requires_grad_()


# --- every transition, alone and combined ------------------------------------------------------------------


def along(rank: int, world: int, axes: dict[str, int], shape: tuple[int, ...], every: int) -> list[str]:
    """x in one layout brought to another and used there, beside a weight that forces more moves."""
    mesh = Mesh.from_env(axes)
    states: list[Any] = [R, S(0), S(1), P, Partial("avg"), "D"]
    x, w = values(*shape), values(shape[1], 4, seed=1)
    wrong = []
    wanted = orders(lambda x, w: (x.sin() + x) @ w, x.requires_grad_(), w.requires_grad_())
    pairs = itertools.product(
        itertools.product(states[:4], repeat=mesh.ndim), itertools.product(states, repeat=mesh.ndim)
    )
    for i, (src, dst) in enumerate(itertools.islice(pairs, None, None, every)):
        to = Layout(
            mesh,
            [R if s == "D" else s for s in dst],
            shape,
            deferred=[i for i, s in enumerate(dst) if s == "D"],
        )

        def move(x: DTensor, w: DTensor, to: Layout = to) -> torch.Tensor:
            return (x.sin() + redistribute(x, to)) @ w

        at = (R, S(0), S(1))[i % 3]
        found = orders(move, laid(x, mesh, list(src)), laid(w, mesh, [at] * mesh.ndim))
        wrong += [f"{src} to {to}, weight {at}: {text}" for text in differ(found, wanted)]
    return wrong


@pytest.mark.parametrize(
    ("axes", "shape", "every"),
    [({"a": 2}, (4, 6), 1), ({"a": 3}, (5, 7), 3), ({"a": 2}, (1, 3), 2), ({"a": 2, "b": 2}, (3, 5), 31)],
    ids=str,
)
def test_transitions(ranks: Any, axes: dict[str, int], shape: tuple[int, ...], every: int) -> None:
    world = 4 if len(axes) > 1 else axes["a"]
    assert not any(ranks(world, along, axes, shape, every))


# --- programs ----------------------------------------------------------------------------------------------

PROGRAMS: dict[str, Program] = {
    "two linears": lambda x, w: F.linear(F.linear(x, w).sin(), w.t()),
    "softmax": lambda x, w: F.linear(x, w).softmax(-1),
    "layer norm": lambda x, w: F.linear(F.layer_norm(x, (6,), w[0]), w),
    "attention": lambda x, w: (F.linear(x, w) @ w @ x.t()).softmax(-1) @ x,
    "logsumexp": lambda x, w: F.linear(x, w).logsumexp(-1) * x.logsumexp(0).sum(),
    "norms": lambda x, w: x.norm() * w.norm(dim=0) + x.norm(dim=1).sum(),
    "pieces": lambda x, w: torch.cat([a * b for a, b in zip(x.split(2), w.split(2), strict=False)]),
    "slices": lambda x, w: x[1:3] * w[2:4] + w[:1].sin(),
    "reductions": lambda x, w: x.mean(0) * w.sum(0) + x.var() * w.prod(),
    "loss": lambda x, w: F.mse_loss(F.linear(x, w), F.linear(x, w).detach().flip(0)) * x,
    "written": lambda x, w: (x * 1).mul_(w[0]).add_(x[0].sin()),
}


def programs(rank: int, world: int) -> list[str]:
    mesh = Mesh.from_env({"a": world})
    x, w = values(4, 6).requires_grad_(), values(8, 6, seed=1).requires_grad_()
    wrong = []
    for name, f in PROGRAMS.items():
        wanted = orders(f, x, w, upto=2)
        for at in itertools.product((R, S(0), S(1), P), (R, S(0), S(1))):
            found = orders(f, *(laid(t, mesh, [p]) for t, p in zip((x, w), at, strict=True)), upto=2)
            wrong += [f"{name} on {at}: {text}" for text in differ(found, wanted)]
    return wrong


@pytest.mark.filterwarnings("ignore::espalier.GatherWarning")
def test_programs(ranks: Any) -> None:
    assert not any(ranks(2, programs))


# --- forward mode ------------------------------------------------------------------------------------------


def duals(rank: int, world: int) -> list[str]:
    """Tangents lie as their primals do, and move with them."""
    mesh = Mesh.from_env({"a": world})
    x, w, t = (values(*shape, seed=i) for i, shape in enumerate([(4, 6), (8, 6), (4, 6)]))
    wrong = []
    for name, f in PROGRAMS.items():
        if name in ("pieces", "slices", "written", "layer norm"):
            continue  # an exchange of rows and a norm over sharded dims have no forward mode, and say so
        for at, recorded in itertools.product(itertools.product((R, S(0), S(1)), repeat=2), (False, True)):
            found = []
            for on in (True, False):
                a, b, d = (
                    (distribute_tensor(v, mesh, [p]) for v, p in zip((x, w, t), (*at, R), strict=True))
                    if on
                    else (x, w, t)
                )
                with forward_ad.dual_level():
                    dual = forward_ad.make_dual(a.detach().requires_grad_(recorded), d)
                    found.append(forward_ad.unpack_dual(f(dual, b)).tangent)
            assert isinstance(found[0], DTensor)
            wrong += [f"{name} on {at}: {text}" for text in differ(found[:1], found[1:])]
    laid_x = distribute_tensor(x, mesh, [S(0)])
    with pytest.raises(TypeError, match="local_map"):
        torch.func.functionalize(torch.sin)(laid_x)
    # those written over torch.autograd.grad are right
    for transform in (
        torch.autograd.functional.jacobian,
        lambda f, x: torch.autograd.functional.vjp(f, x, x)[1],
    ):
        wrong += differ([transform(torch.sin, laid_x)], [transform(torch.sin, x)])
    return wrong


@pytest.mark.filterwarnings("ignore::espalier.GatherWarning", "ignore:.*torch.jit.script")
def test_forward_mode(ranks: Any) -> None:
    assert not any(ranks(2, duals))


# --- no derivative -----------------------------------------------------------------------------------------


class Nothing(torch.autograd.Function):
    """Hands its input on, and has no gradient for it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> None:
        return None


def functions_of(y: torch.Tensor) -> set[str]:
    """The names of the autograd functions that a value hangs on."""
    seen, stack = set(), [y.grad_fn]
    while stack:
        node = stack.pop()
        if node is not None and node not in seen:
            seen.add(node)
            stack += [beyond for beyond, _ in node.next_functions]
    return {node._forward_cls.__name__ for node in seen if hasattr(node, "_forward_cls")}  # type: ignore[union-attr]


def undefined(rank: int, world: int) -> None:
    mesh, face = Mesh.from_env({"a": world}), Mesh.from_env({"a": 2, "b": world // 2})
    target = distribute_tensor(torch.arange(8) % 4, mesh)

    def heads(q: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q.view(1, 1, 8, 8), q.view(1, 1, 8, 8), q.view(1, 1, 8, 8))

    cases: dict[str, tuple[Program, Mesh, tuple[Any, ...]]] = {
        "_Move": (lambda x, w: x.redistribute(placements=[S(1)]) + w, mesh, (S(0),)),
        "_MoveAs": (
            lambda x, w: x.redistribute(placements=[R], forward_dtype=torch.float32) + w, mesh, (S(0),)
        ),
        "_Exchange": (lambda x, w: x[1:7] + w[:6], mesh, (S(0),)),
        "_Standardize": (lambda x, w: F.layer_norm(x, (8,)) + w, mesh, (S(1),)),
        "_VocabularyParallel": (lambda x, w: F.cross_entropy(x + w, target), mesh, (S(1),)),
        "_Ring": (lambda x, w: heads(x + w), mesh, (S(0),)),
        "_SummaProduct": (lambda x, w: x @ w, face, (S(0), S(1))),
        "_Send": (lambda x, w: local_map(sent, x.placements)(x, w), mesh, (S(0),)),
    }  # fmt: skip

    def sent(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        gets, gives = ([2 * (i == (rank + to) % world) for i in range(world)] for to in (-1, 1))
        return send_rows(x + w, mesh, 0, gets, gives)

    for name, (f, on, placements) in cases.items():
        x, w = (distribute_tensor(values(8, 8, seed=i), on, placements).requires_grad_() for i in (1, 2))
        inner = x * 2
        inner.register_hook(lambda grad: pytest.fail("a hook without a gradient"))
        y = f(inner, w)
        assert name in functions_of(y), (name, functions_of(y))
        Nothing.apply(y).sum().backward()  # type: ignore[no-untyped-call]
        assert x.grad is None and w.grad is None, name


@pytest.mark.filterwarnings("ignore::espalier.GatherWarning")
def test_what_has_no_gradient_has_none_in_every_layout(ranks: Any) -> None:
    ranks(4, undefined)


def beside(rank: int, world: int) -> None:
    """A rank that does not use what others do meets them backward all the same."""
    mesh = Mesh.from_env({"a": world})
    x = distribute_tensor(values(4, 6), mesh, [S(0)])
    w = distribute_tensor(values(6, seed=1), mesh).requires_grad_()
    v = distribute_tensor(values(4, 6, seed=2), mesh, [S(1)]).requires_grad_()
    u = distribute_tensor(values(4, 6, seed=3), mesh, [S(0)]).requires_grad_()
    gate = distribute_tensor(values(4, 6, seed=4), mesh, [S(0)]).requires_grad_()

    def body(*inputs: torch.Tensor) -> torch.Tensor:
        x, w, v, _, gate = inputs
        return x * gate + w + v if rank else x * gate

    moved = v.redistribute(placements=[S(0)])
    local_map(body, [S(0)])(x, w, moved, u, gate).sum().backward()
    rows = torch.arange(4).unsqueeze(1) >= 2
    assert w.grad is not None and v.grad is not None and gate.grad is not None
    assert torch.equal(full_tensor(w.grad), torch.full((6,), 2.0, dtype=F64))
    assert torch.equal(full_tensor(v.grad), rows.to(F64).expand(4, 6))
    assert torch.equal(full_tensor(gate.grad), full_tensor(x))
    assert u.grad is None


def test_ranks_that_use_different_inputs(ranks: Any) -> None:
    ranks(2, beside)


def curvature(net: torch.nn.Module, optimizer: Any) -> list[torch.Tensor]:
    """Steps by gradients, and by second derivatives along drawn directions (Hutchinson)."""
    draw = torch.Generator().manual_seed(1)
    for _ in range(2):
        x = torch.randn(8, 4, generator=draw, dtype=F64)
        parameters = list(net.parameters())
        loss = net(x).square().mean()
        grads = torch.autograd.grad(loss, parameters, create_graph=True)
        along = [torch.randn(p.shape, generator=draw, dtype=F64) for p in parameters]
        second = torch.autograd.grad(grads, parameters, along)
        for p, grad, other in zip(parameters, grads, second, strict=True):
            p.grad = grad.detach() + 0.1 * other
        optimizer.step()
        optimizer.zero_grad()
    return parameters


def of_a_prepared_model(rank: int, world: int, plan: dict[str, Any]) -> None:
    def parts() -> tuple[torch.nn.Module, Any]:
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4)).double()
        return net, torch.optim.SGD(net.parameters(), 0.1)

    expected = curvature(*parts())
    net, optimizer = prepare(*parts(), plan=plan)
    for p, own in zip(curvature(net, optimizer), expected, strict=True):
        torch.testing.assert_close(full_tensor(p), own, rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match=r"torch\.autograd\.grad\(loss, parameters, create_graph=True\)"):
        net(torch.ones(8, 4, dtype=F64)).square().mean().backward(create_graph=True)


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("plan", [{"data": 2}, {"data": 2, "zero": 3}])
def test_second_derivatives_of_a_prepared_model(ranks: Any, plan: dict[str, Any]) -> None:
    ranks(2, of_a_prepared_model, plan)


def into_stages(rank: int, world: int) -> None:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4)).double()
    x = torch.ones(8, 4, dtype=F64)
    expected = net(x)
    net, _ = prepare(net, torch.optim.SGD(net.parameters(), 0.1), plan={"pipe": 2})
    with forward_ad.dual_level():
        with pytest.raises(NotImplementedError, match="stages do not hand tangents on"):
            net(forward_ad.make_dual(x, x))
        torch.testing.assert_close(full_tensor(net(x).detach()), expected.detach())


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
def test_tangents_of_inputs_of_stages_are_refused(ranks: Any) -> None:
    """They were lost: none came out."""
    ranks(2, into_stages)
