"""torch's Muon on matrices that are cut: each is made whole on one rank, and orthogonalized there.

Muon (K. Jordan et al., 2024) puts in the place of a matrix of momenta the nearest orthogonal one, in
bfloat16. Done piece by piece, each of its products would be summed over ranks, and round otherwise than on
one process, which shows in the third digit of an update. Here the matrices of one shape are dealt out to the
ranks that hold their pieces: one all-to-all brings each to its rank, another takes it back. A rank sends 4
bytes for each element that it holds, less what it keeps; it computes its share of the matrices; and the
values are those of one process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from espalier.comm.redistribute import move
from espalier.layout import Layout
from espalier.tensor.dtensor import DTensor, plain, redistribute, stamp
from espalier.torch_private import muon_rate, orthogonalized, raw

_Kind = tuple[Layout, torch.device]


def dealing(step: Callable[..., None]) -> Callable[..., None]:
    """The update of a group of matrices: torch's, where none is cut, and else ours."""

    def muon(
        params: Sequence[torch.Tensor],
        grads: Sequence[torch.Tensor],
        muon_momentum_bufs: Sequence[torch.Tensor],
        **options: Any,
    ) -> None:
        cut = [type(p) is DTensor and not p._layout.is_plain for p in params]
        if options.get("has_complex") or not any(cut):
            step(params, grads, muon_momentum_bufs, **options)
            return
        held = [*zip(params, grads, muon_momentum_bufs, cut, strict=True)]
        whole = [one[:3] for one in held if not one[3]]
        if whole:
            step(*zip(*whole, strict=True), **options)
        _update([one[:3] for one in held if one[3]], options)

    return muon


def _update(held: Sequence[tuple[Any, ...]], options: dict[str, Any]) -> None:
    """What torch's update does, of matrices that are cut: parameters, gradients, momenta."""
    rate, momentum = options["lr"], options["momentum"]
    rate = rate.item() if isinstance(rate, torch.Tensor) else rate
    updates = []
    for p, grad, buffer in held:
        if grad.ndim != 2:
            raise ValueError("Param gradient must be a 2D matrix")
        buffer.lerp_(grad, 1 - momentum)
        update = grad.lerp(buffer, momentum) if options["nesterov"] else buffer
        updates.append(redistribute(update, p._layout.own.undeferred))
    orders = [options[name] for name in ("ns_coefficients", "ns_steps", "eps")]
    for (p, *_), update in zip(held, _orthogonal(updates, orders), strict=True):
        p.mul_(1 - rate * options["weight_decay"])
        p.add_(update, alpha=-muon_rate(rate, options["adjust_lr_fn"], p.shape))


def _orthogonal(updates: Sequence[DTensor], orders: Sequence[Any]) -> list[DTensor]:
    """The matrices orthogonalized, in bfloat16, each where it was."""
    alike: dict[_Kind, list[int]] = {}
    for place, update in enumerate(updates):
        alike.setdefault((update._layout, update.device), []).append(place)
    done: dict[int, DTensor] = {}
    for (layout, _), places in alike.items():
        with raw():
            pieces = torch.stack([plain(updates[place]).bfloat16() for place in places])
            here, there = _stacked(layout, len(places))
            matrices = move(pieces, here, there)
            for matrix in matrices:
                matrix.copy_(orthogonalized(matrix, *orders))
            for place, piece in zip(places, move(matrices, there, here).unbind(), strict=True):
                done[place] = stamp(piece, layout)
    return [done[place] for place in range(len(updates))]


def _stacked(layout: Layout, count: int) -> tuple[Layout, Layout]:
    """So many matrices of a layout, one on the other: cut as they are, and dealt out whole."""
    shape = (count, *layout.shape)
    axes = tuple(state + 1 if isinstance(state, int) else state for state in layout.axes)
    dealt = tuple(0 if isinstance(state, int) else state for state in layout.axes)
    here = Layout.of(layout.mesh, axes, ((), *layout.cuts), shape)
    return here, Layout.of(layout.mesh, dealt, (layout.order, (), ()), shape)
