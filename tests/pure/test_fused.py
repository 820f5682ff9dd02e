"""Fused kernels: chosen where they may be, and an element's bits don't hang on how tensors are cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import espalier
from espalier.engine.update import FlatParams, update
from espalier.parallel.fused import fuse, holding

N = 517
CUTS = [[N], [48, N - 48], [7, N - 7], [3, 5, N - 8], [1] * 70 + [N - 70], [17] * 30 + [7]]
OPTIONS: dict[str, tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]] = {
    "Adam": (torch.optim.Adam, {"weight_decay": 0.1}),
    "AdamW": (torch.optim.AdamW, {"eps": 0.0}),
    "amsgrad": (torch.optim.AdamW, {"amsgrad": True, "maximize": True, "lr": torch.tensor(0.01)}),
    "SGD": (torch.optim.SGD, {}),
    "momentum": (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1, "nesterov": True}),
    "dampening": (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.3, "maximize": True}),
    "Adagrad": (torch.optim.Adagrad, {"lr_decay": 0.1, "weight_decay": 0.1}),
}


def trained(name: str, cut: list[int], dtype: torch.dtype, step: Callable[..., None]) -> list[torch.Tensor]:
    """Parameters and states after some steps, put together again."""
    kind, options = OPTIONS[name]
    drawn = torch.Generator().manual_seed(0)
    params = [nn.Parameter(x.clone()) for x in torch.randn(N, generator=drawn).to(dtype).split(cut)]
    optimizer = kind(params, **{"lr": 0.01, **options})
    for _ in range(4):
        for p, grad in zip(params, torch.randn(N, generator=drawn).to(dtype).split(cut), strict=True):
            p.grad = grad.clone()
        step(optimizer)
    assert all(p.shape == s.shape for p in params for n, s in state_of(optimizer, p) if n != "step")
    names = [n for n, _ in state_of(optimizer, params[0]) if n != "step"]
    states = [torch.cat([optimizer.state[p][n] for p in params]) for n in names]
    assert all(s == 4 for p in params for n, s in state_of(optimizer, p) if n == "step")
    return [torch.cat([p.detach() for p in params]), *states]


def state_of(optimizer: torch.optim.Optimizer, p: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    return [(name, x) for name, x in optimizer.state.get(p, {}).items() if x is not None]


def by_kernel(optimizer: torch.optim.Optimizer) -> None:
    with holding(optimizer) as substitutes:
        fuse(optimizer, substitutes)
        assert optimizer.param_groups[0]["fused"] is True
        optimizer.step()
    assert optimizer.param_groups[0]["fused"] is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_bits_do_not_hang_on_the_cut(name: str, dtype: torch.dtype) -> None:
    kernel = by_kernel
    if OPTIONS[name][0] is torch.optim.SGD and dtype.itemsize == 2:  # torch's kernel is wrong
        kernel = update
    expected = trained(name, CUTS[0], dtype, kernel)
    assert len(expected) == {"SGD": 1, "Adam": 3, "AdamW": 3, "amsgrad": 4}.get(name, 2)
    for cut in CUTS[1:] if kernel is by_kernel else ():
        for found, x in zip(trained(name, cut, dtype, kernel), expected, strict=True):
            assert found.equal(x), cut
    if dtype is not torch.float16:  # in which the other forms of Adam lose small squares
        close = {"rtol": 0.02, "atol": 0.02} if dtype is torch.bfloat16 else {}
        plain = trained(name, CUTS[0], dtype, lambda optimizer: optimizer.step())
        for found, x in zip(plain, expected, strict=True):
            torch.testing.assert_close(found, x, **close)


@pytest.mark.parametrize("name", ["AdamW", "momentum", "Adagrad"])
def test_stretches_joined_and_not_are_the_same(name: str) -> None:
    def joined(optimizer: torch.optim.Optimizer) -> None:
        # neighbours in one buffer, whose gradients are so too
        params = optimizer.param_groups[0]["params"]
        if not runs:
            for of in (list(params), [p.grad for p in params]):
                for x, part in zip(of, torch.cat([x.detach() for x in of]).split(cut), strict=True):
                    x.data = part
        else:
            grads = torch.cat([p.grad for p in params]).split(cut)
            for p, grad in zip(params, grads, strict=True):
                p.grad = grad
        runs.append(seen.setdefault(id(optimizer), FlatParams()))
        update(optimizer, runs=runs[-1])

    expected = trained(name, CUTS[0], torch.float32, by_kernel)
    for cut in CUTS[1:]:
        runs: list[FlatParams] = []
        seen: dict[int, FlatParams] = {}
        assert all(
            a.equal(b) for a, b in zip(trained(name, cut, torch.float32, joined), expected, strict=True)
        )


def held(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it takes the fused kernel."""
    group = optimizer.param_groups[0]
    for p in group["params"]:
        p.grad = torch.ones_like(p)
    with holding(optimizer) as substitutes:
        fuse(optimizer, substitutes)
        return bool(group["fused"])


def test_what_is_said_is_done() -> None:
    def parameter(dtype: torch.dtype = torch.float32, **given: Any) -> list[nn.Parameter]:
        return [nn.Parameter(torch.ones(20, dtype=dtype, **given))]

    assert held(torch.optim.AdamW(parameter())) and held(torch.optim.SGD(parameter(), lr=0.1, fused=True))
    for said in ({"fused": False}, {"foreach": True}, {"foreach": False}, {"differentiable": True}):
        assert not held(torch.optim.AdamW(parameter(), **said))
    # where there is no kernel for it, or torch's is wrong
    assert not held(torch.optim.SGD(parameter(torch.bfloat16), lr=0.1, fused=True))
    assert not held(torch.optim.AdamW(parameter(torch.complex64)))
    assert not held(torch.optim.AdamW([*parameter(), *parameter(torch.complex64)]))
    assert not held(torch.optim.AdamW(parameter(device="meta")))

    class Own(torch.optim.AdamW):
        pass

    assert not held(Own(parameter()))
    # without values the states of a dry run must be there
    dry = torch.optim.AdamW(parameter(device="meta"))
    dry.param_groups[0]["params"][0].grad = torch.ones(20, device="meta")
    dry.step()
    assert held(dry)


def test_momenta_that_begin_later() -> None:
    a, b = nn.Parameter(torch.ones(20)), nn.Parameter(torch.ones(20))
    optimizer = torch.optim.SGD([a, b], lr=0.1, momentum=0.9)
    for grads in ((1.0, None), (1.0, 2.0), (1.0, 2.0)):
        for p, value in zip((a, b), grads, strict=True):
            p.grad = None if value is None else torch.full((20,), value)
        update(optimizer)
    torch.testing.assert_close(a, torch.full((20,), 1 - 0.1 * (1 + 1.9 + 2.71)))
    torch.testing.assert_close(b, torch.full((20,), 1 - 0.1 * (2 + 3.8)))


def test_pieces_that_are_not_contiguous_and_single_numbers() -> None:
    def trained(kept: bool) -> tuple[list[torch.Tensor], list[dict[str, Any]]]:
        torch.manual_seed(0)
        whole, grads = torch.randn(6, 8), torch.randn(3, 6, 8)
        params = [whole[:, 1:6], torch.tensor(2.0)] if kept else [whole[:, 1:6].clone(), torch.tensor(2.0)]
        params = list(map(nn.Parameter, params))
        assert params[0].is_contiguous() is not kept
        optimizer = torch.optim.AdamW(params, lr=0.1)
        for grad in grads:
            params[0].grad = grad[:, 1:6] if kept else grad[:, 1:6].clone()
            params[1].grad = torch.tensor(0.5)
            update(optimizer)
        return params, [optimizer.state[p] for p in params]

    (mine, my_states), (plain, states) = trained(True), trained(False)
    assert all(a.equal(b) for a, b in zip(mine, plain, strict=True))
    assert all(a[name].equal(b[name]) for a, b in zip(my_states, states, strict=True) for name in b)
    assert [x["step"] for x in states] == [3, 3] and states[1]["exp_avg"].ndim == 0


class Mean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(20, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).square().mean()


def test_hooks_see_the_optimizer_as_it_was_given() -> None:
    model = Mean()
    params = list(model.parameters())
    optimizer, seen = torch.optim.AdamW(params, lr=0.1), []

    def look(*_: Any) -> None:
        (group,) = optimizer.param_groups
        assert group["fused"] is None and all(a is b for a, b in zip(group["params"], params, strict=True))
        seen.append((params[1].grad.norm().item(), len(optimizer.state)))  # type: ignore[union-attr]

    handles = optimizer.register_step_pre_hook(look), optimizer.register_step_post_hook(look)
    engine = espalier.initialize(model, optimizer, {"accumulate": 2}, max_grad_norm=1e-3)
    for _ in range(2):
        engine.train_step(torch.ones(2, 20))
    assert 0 < seen[0][0] < 1e-3
    assert [states for _, states in seen] == [0, 2, 2, 2]
    assert [*optimizer._optimizer_step_pre_hooks] == [handles[0].id]
    assert [*optimizer._optimizer_step_post_hooks] == [handles[1].id]


class Doubly(torch.optim.SGD):
    """Its step and its base's each run the hooks."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def test_a_step_that_calls_its_base_s_updates_once() -> None:
    found = []
    for offload in ({}, {"states": "host"}):
        torch.manual_seed(0)
        model, calls = Mean(), []
        torch.optim.SGD(model.parameters())  # so that torch has put hooks into its step
        optimizer = Doubly(model.parameters(), lr=0.1, momentum=0.9)
        optimizer.register_step_post_hook(lambda *_, calls=calls: calls.append(0))
        engine = espalier.initialize(model, optimizer, {"offload": offload})
        for _ in range(3):
            engine.train_step(torch.ones(2, 20))
        assert len(calls) == 3
        found.append(engine.full_state_dict()["layer.weight"])
    assert torch.equal(*found)
