"""Whether nobody else holds a gradient, or a result, so that a sum may be done in place of it.

Autograd hands one tensor to all who are to get the same: both sides of a sum, a hook of the program's. Python
counts who holds its objects, and torch who holds tensors and their memory. What the counts are where nobody
else holds it hangs on versions of both, so a probe is sent through a graph, once, and asked.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from espalier.torch_private import base_of, disable_modes, memory_uses, raw, use_count

Uses = tuple[int, ...]


def is_alone(x: torch.Tensor) -> bool:
    """Of a gradient, asked by the ``backward`` that is given it, which will not use it afterwards."""
    return _uses(x) in _unshared()


def has_own_memory(x: torch.Tensor) -> bool:
    """Of a result: no other tensor shares its memory, and no graph holds it; Python may."""
    return _graph_uses(x) in _unsaved()


def _uses(x: torch.Tensor) -> Uses:
    uses = _graph_uses(x)
    return (sys.getrefcount(x), *uses) if uses else ()


def _graph_uses(x: torch.Tensor) -> Uses:
    if use_count is None or memory_uses is None:
        return ()
    base = base_of(x)
    # a program that holds the base of a view is known by Python's count alone
    of_base = () if base is None else (sys.getrefcount(base), use_count(base))
    return use_count(x), memory_uses(x), *of_base


@cache
def _unsaved() -> frozenset[Uses]:
    """The uses of what came out of a kernel, and of a view of such a one, as graphs see them."""
    with raw(), disable_modes(), torch.enable_grad():
        x = torch.zeros(2, 2, device="cpu", requires_grad=True)
        uses = [_graph_uses(x * 1), _graph_uses((x * 1).view(4))]
    return frozenset(each for each in uses if each[:1] == (1,))


def _unshared() -> frozenset[Uses]:
    # who traces the program holds what its frames hold
    if sys.gettrace() is not None or sys.getprofile() is not None or use_count is None:
        return frozenset()
    return _probed()


@cache
def _probed() -> frozenset[Uses]:
    """The uses of a gradient that came out of a kernel, and of a view of such a one.

    Torch 2.11 counts the list of a node's arguments as a holder, 2.13 does not. So one that a second node
    gets is probed, too: counts that both have say nothing.
    """
    own: list[Uses] = []
    shared: list[Uses] = []
    with raw(), disable_modes(), torch.enable_grad():
        x = torch.zeros(2, 2, device="cpu", requires_grad=True)
        for out in (
            _probe(x, own) * 1,
            _probe(x, own).view(4) * 1,
            (_probe(x, shared) + _probe(x, shared)) * 1,
            (_probe(x, shared) + _probe(x, shared)).view(4) * 1,
        ):
            torch.autograd.backward(out, torch.ones_like(out))
    return frozenset(own) - frozenset(shared)


def _asked(x: torch.Tensor) -> Uses:
    """As :func:`is_alone` asks."""
    return _uses(x)


class _Probe(torch.autograd.Function):
    espalier = True

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seen: list[Uses]) -> torch.Tensor:
        ctx.seen = seen
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.seen.append(_asked(grad))
        return grad, None


_probe: Callable[..., torch.Tensor] = super(torch.autograd.Function, _Probe).apply
