"""Gradients that nobody else holds are told from those that somebody does."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from espalier.comm import redistribute
from espalier.comm.redistribute import is_alone


class Calls(TorchDispatchMode):
    """Notes what is called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class Asks(torch.autograd.Function):
    espalier = True

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, answers: list[bool]) -> torch.Tensor:
        ctx.answers = answers
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.answers.append(is_alone(grad))
        return grad, None


asks: Callable[..., torch.Tensor] = super(torch.autograd.Function, Asks).apply
W = torch.ones(4, 4, requires_grad=True)


def product(x: torch.Tensor, answers: list[bool]) -> None:
    (asks(x, answers) @ W).sum().backward()


def layer(x: torch.Tensor, answers: list[bool]) -> None:
    F.linear(asks(x, answers).unsqueeze(0).expand(2, 3, 4), W, W[0]).sum().backward()


def several(x: torch.Tensor, answers: list[bool]) -> None:
    y = asks(x, answers)
    (y @ W + y @ W.t()).sum().backward()


def both_sides(x: torch.Tensor, answers: list[bool]) -> None:
    """The first that is asked shares it; then the other has it alone."""
    (asks(x, answers) + asks(x * 2, answers)).square().sum().backward()


def hooked(x: torch.Tensor, answers: list[bool]) -> None:
    kept: list[torch.Tensor] = []
    y = asks(x, answers)
    y.register_hook(kept.append)
    (y @ W).sum().backward()


def retained(x: torch.Tensor, answers: list[bool]) -> None:
    """What torch retains is a copy."""
    y = asks(x, answers)
    y.retain_grad()
    (y @ W).sum().backward()


def given(x: torch.Tensor, answers: list[bool]) -> None:
    grad = torch.ones(3, 4)
    asks(x, answers).backward(grad)


def given_as_a_view(x: torch.Tensor, answers: list[bool]) -> None:
    grad = torch.ones(12)
    asks(x, answers).view(12).backward(grad)


def aliased(x: torch.Tensor, answers: list[bool]) -> None:
    kept: list[torch.Tensor] = []
    y = asks(x, answers)
    y.register_hook(lambda grad: kept.append(grad.detach()))
    (y @ W).sum().backward()


def hooked_before_a_view(x: torch.Tensor, answers: list[bool]) -> None:
    kept: list[torch.Tensor] = []
    y = asks(x, answers).view(12)
    y.register_hook(kept.append)
    (y * 2).sum().backward()


def view(x: torch.Tensor, answers: list[bool]) -> None:
    (asks(x, answers).view(12) * torch.arange(12.0)).sum().backward()


@pytest.mark.parametrize(
    ("loss", "alone"),
    [
        (product, [True]),
        (layer, [True]),
        (several, [True]),
        (retained, [True]),
        (both_sides, [False, True]),
        (hooked, [False]),
        (given, [False]),
        (given_as_a_view, [False]),
        (aliased, [False]),
        (view, [True]),
        (hooked_before_a_view, [False]),
    ],
    ids=lambda x: x.__name__ if callable(x) else "",
)
def test_who_holds_a_gradient(loss: Callable[..., None], alone: list[bool]) -> None:
    if sys.gettrace() is not None:
        pytest.skip("who traces this holds gradients too")
    answers: list[bool] = []
    loss(torch.ones(3, 4, requires_grad=True), answers)
    assert answers == alone


def test_who_traces_the_program_is_not_overlooked() -> None:
    before, answers = sys.gettrace(), list[bool]()
    sys.settrace(lambda *_: None)
    try:
        product(torch.ones(3, 4, requires_grad=True), answers)
    finally:
        sys.settrace(before)
    assert answers == [False]


def test_who_counts_operations_does_not_see_the_probes() -> None:
    """They are made once a process, in the middle of whatever asks first: a recording had them, or not."""
    redistribute._probed.cache_clear()
    redistribute._unsaved.cache_clear()
    x = torch.ones(2, 2)
    with Calls() as calls:
        is_alone(x)
        redistribute.has_own_memory(x)
    assert calls.names == []
