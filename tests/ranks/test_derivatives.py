"""Derivatives of every order and kind, in every layout, against the same program on plain tensors."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad

from espalier import DTensor, Layout, Mesh, Partial, Replicate, Shard, distribute_tensor, full_tensor
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
    states: list[Any] = [R, S(0), S(1), P, Partial("avg"), "V"]
    x, w = values(*shape), values(shape[1], 4, seed=1)
    wrong = []
    wanted = orders(lambda x, w: (x.sin() + x) @ w, x.requires_grad_(), w.requires_grad_())
    pairs = itertools.product(
        itertools.product(states[:4], repeat=mesh.ndim), itertools.product(states, repeat=mesh.ndim)
    )
    for i, (src, dst) in enumerate(itertools.islice(pairs, None, None, every)):
        to = Layout(
            mesh,
            [R if s == "V" else s for s in dst],
            shape,
            varied=[i for i, s in enumerate(dst) if s == "V"],
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


@pytest.mark.filterwarnings("ignore::espalier.GatherWarning", "ignore:.*torch.jit.script:DeprecationWarning")
def test_forward_mode(ranks: Any) -> None:
    assert not any(ranks(2, duals))
