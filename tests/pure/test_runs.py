"""Parameters that lie one after the other in memory are updated as one, and nobody sees it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from espalier.engine.update import ELEMENTWISE, FlatParams
from espalier.parallel.fused import holding

SHAPES = [(3, 5), (7,), (2, 2, 3), (4,), (1,)]
Optimizer = torch.optim.Optimizer


def laid(values: list[torch.Tensor]) -> list[nn.Parameter]:
    """Parameters that are views of one buffer."""
    parts = torch.cat([x.reshape(-1) for x in values]).split([x.numel() for x in values])
    return [nn.Parameter(part.view(x.shape)) for part, x in zip(parts, values, strict=True)]


def give(params: list[nn.Parameter], grads: list[torch.Tensor | None]) -> None:
    """Gradients that are views of one buffer."""
    sizes = [p.numel() for p in params]
    parts = torch.cat(
        [torch.zeros(n) if g is None else g.reshape(-1) for n, g in zip(sizes, grads, strict=True)]
    )
    for p, part, g in zip(params, parts.split(sizes), grads, strict=True):
        p.grad = None if g is None else part.view(p.shape)


def calls(optimizer: Optimizer) -> list[int]:
    """How many tensors it holds in each step, from now on."""
    found: list[int] = []
    step = optimizer.step

    def counted(*args: Any) -> Any:
        found.append(sum(p.grad is not None for group in optimizer.param_groups for p in group["params"]))
        return step(*args)

    optimizer.step = counted  # type: ignore[method-assign]
    return found


class Pair:
    """An optimizer that steps with runs, and the same one without."""

    def __init__(self, make: Callable[[list[nn.Parameter]], Optimizer]) -> None:
        torch.manual_seed(0)
        values = [torch.randn(shape) for shape in SHAPES]
        self.params, self.plain = laid(values), [nn.Parameter(x.clone()) for x in values]
        self.optimizer, self.reference = make(self.params), make(self.plain)
        self.runs, self.held = FlatParams(), calls(self.optimizer)

    def step(self, without: tuple[int, ...] = ()) -> None:
        grads = [None if i in without else torch.randn(shape) for i, shape in enumerate(SHAPES)]
        give(self.params, grads)
        for p, grad in zip(self.plain, grads, strict=True):
            p.grad = None if grad is None else grad.clone()
        with joined(self.runs, self.optimizer):
            self.optimizer.step()
        self.reference.step()
        self.same()

    def same(self) -> None:
        """Bit by bit."""
        for mine, theirs in zip(self.params, self.plain, strict=True):
            assert mine.equal(theirs)
            own, known = self.optimizer.state.get(mine, {}), self.reference.state.get(theirs, {})
            assert own.keys() == known.keys()
            for name, x in known.items():
                assert own[name].equal(x) if isinstance(x, torch.Tensor) else own[name] == x, name
        assert self.optimizer.param_groups[0]["params"][0] is self.params[0]


@contextmanager
def joined(runs: FlatParams, optimizer: Optimizer) -> Iterator[None]:
    with holding(optimizer) as substitutes:
        runs.join(optimizer, substitutes)
        yield


def makers() -> dict[str, Callable[[list[nn.Parameter]], Optimizer]]:
    found = {kind.__name__: lambda params, kind=kind: kind(params, lr=0.01) for kind in ELEMENTWISE}
    found["momentum"] = lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9, nesterov=True)
    found["amsgrad"] = lambda params: torch.optim.AdamW(params, lr=torch.tensor(0.01), amsgrad=True)
    found["centered"] = lambda params: torch.optim.RMSprop(params, lr=0.01, momentum=0.5, centered=True)
    return found


@pytest.mark.parametrize("name", makers())
def test_updates_are_the_same(name: str) -> None:
    pair = Pair(makers()[name])
    for _ in range(3):
        pair.step()
    assert pair.held == [1, 1, 1]
    saved = copy.deepcopy(pair.optimizer.state_dict())
    assert saved.keys() == pair.reference.state_dict().keys()
    pair.optimizer.load_state_dict(saved)
    pair.step()
    assert pair.held[-1] == 1


def adam(params: list[nn.Parameter]) -> Optimizer:
    return torch.optim.Adam(params, lr=0.01, weight_decay=0.1)


def test_a_parameter_without_a_gradient_stays_as_it_is() -> None:
    pair = Pair(adam)
    pair.step()
    pair.step(without=(1,))
    assert pair.held == [1, 2]  # the first alone, and a run of three
    pair.step()  # it is a step behind: it has a run of its own, as have those before and behind it
    assert pair.held[-1] == len(SHAPES)
    pair.step(without=(1,))


def test_what_others_change_in_between_is_seen() -> None:
    pair = Pair(adam)
    pair.step()
    for optimizer, params in ((pair.optimizer, pair.params), (pair.reference, pair.plain)):
        optimizer.state[params[2]]["exp_avg"] = torch.ones(SHAPES[2])
        optimizer.state[params[3]]["step"].fill_(7.0)
        del optimizer.state[params[4]]
    pair.step()
    for params in (pair.params, pair.plain):
        params[0].data = params[0].data.clone().neg()
    pair.step()
    assert pair.held[-1] > 1
    for optimizer in (pair.optimizer, pair.reference):
        optimizer.param_groups[0]["lr"] = 0.5
    pair.step()


def test_groups_are_respected() -> None:
    def two_groups(params: list[nn.Parameter]) -> Optimizer:
        groups = [{"params": params[:3]}, {"params": params[3:], "weight_decay": 0.5}]
        return torch.optim.AdamW(groups, lr=0.1)

    pair = Pair(two_groups)
    pair.step()
    pair.step()
    assert pair.held == [2, 2]


def padded(values: list[torch.Tensor]) -> tuple[torch.Tensor, list[nn.Parameter]]:
    """Parameters of 16 elements each and fewer, in one buffer of ones."""
    flat = torch.ones(16 * len(values))
    parts = [part[: x.numel()].view(x.shape) for part, x in zip(flat.split(16), values, strict=True)]
    torch._foreach_copy_(parts, values)
    return flat, [nn.Parameter(part) for part in parts]


def test_what_is_free_between_them_is_no_hindrance() -> None:
    values = [torch.randn(shape) for shape in SHAPES]
    _, params = padded(values)
    theirs, grads = [nn.Parameter(x.clone()) for x in values], padded(values)[1]
    ours, reference = (torch.optim.AdamW(ps, lr=0.1) for ps in (params, theirs))
    runs, held = FlatParams(lambda: {id(p): 16 for p in params}), calls(ours)
    for _ in range(3):
        for p, plain, grad in zip(params, theirs, grads, strict=True):
            p.grad, plain.grad = grad.detach(), grad.detach().clone()
        with joined(runs, ours):
            ours.step()
        reference.step()
    assert held == [1, 1, 1]
    assert all(map(torch.equal, params, theirs))


@pytest.mark.parametrize("knows", [True, False])
def test_what_is_between_them_and_somebody_elses_is_left_alone(knows: bool) -> None:
    values = [torch.randn(shape) for shape in SHAPES]
    _, params = padded(values)
    others, moved = padded(values)
    starts = {id(p): p.data_ptr() for p in params}

    def rooms() -> dict[int, int]:
        return {id(p): 16 for p in params if p.data_ptr() == starts[id(p)]}

    optimizer, runs = torch.optim.AdamW(params, lr=0.1), FlatParams(rooms if knows else dict)
    for step in range(2):
        for p, grad in zip(params, padded(values)[1], strict=True):
            p.grad = grad.detach()
        with joined(runs, optimizer):
            optimizer.step()
        if step == 0:  # somebody gives them memory of his own, in which the same places are free
            for p, q in zip(params, moved, strict=True):
                p.data = q.data
    between = [part[p.numel() :] for part, p in zip(others.split(16), params, strict=True)]
    assert torch.equal(torch.cat(between), torch.ones(sum(map(len, between))))
    assert not torch.equal(others[: params[0].numel()], values[0].view(-1))


def test_autograd_sees_that_parameters_were_written_to() -> None:
    params = laid([torch.ones(2), torch.ones(2)])
    optimizer, runs = torch.optim.SGD(params, lr=0.1), FlatParams()
    loss = (params[1] * params[1]).sum()
    give(params, [torch.ones(2), torch.ones(2)])
    with joined(runs, optimizer):
        optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_long_runs_are_cut() -> None:
    values = [torch.randn(2**17) for _ in range(5)]
    params = laid(values)
    give(params, [torch.randn(2**17) for _ in params])

    def held(optimizer: Optimizer) -> list[int]:
        with joined(FlatParams(), optimizer):
            return [p.numel() for p in optimizer.param_groups[0]["params"]]

    assert held(torch.optim.AdamW(params, fused=False)) == [2**18, 2**18, 2**17]
    assert held(torch.optim.AdamW(params)) == [5 * 2**17]  # a fused kernel computes nothing on the way
