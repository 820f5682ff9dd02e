"""Rows sent along an axis, to each coordinate as many as it is to get: differentiable, to any order."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from espalier.comm import collectives as door
from espalier.mesh import Mesh


def send_rows(x: torch.Tensor, mesh: Mesh, axis: int, gets: list[int], gives: list[int]) -> torch.Tensor:
    """The rows that the coordinates of an axis have for this one: an uneven all-to-all.

    Backward, each gradient goes back to where its row came from.

    Args:
        x: [rows, ...]: first those for coordinate 0, then those for 1, and so on.
        gets, gives: how many come from and go to each.
    """
    return x if mesh.shape[axis] == 1 else _apply(x, mesh, axis, gets, gives)


class _Send(torch.autograd.Function):
    espalier = True
    meets = True  # others, backward

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, mesh: Mesh, axis: int, gets: list[int], gives: list[int]
    ) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.back = mesh, axis, gives, gets
        each = math.prod(x.shape[1:])
        flat = door.send(x.reshape(-1), mesh, axis, [n * each for n in gets], [n * each for n in gives])
        return flat.view(sum(gets), *x.shape[1:])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> Any:
        return None if grad is None else send_rows(grad, *ctx.back), None, None, None, None


_apply: Callable[..., torch.Tensor] = super(torch.autograd.Function, _Send).apply

__all__ = ["send_rows"]
