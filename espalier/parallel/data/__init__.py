"""The data axis: DDP, ZeRO and FSDP as one mechanism, chunks of parameters, gradients and states.

:class:`SimpleZeRO` is all of it in forty lines: begin there. What the other files add is speed (flat buffers,
gathers ahead of their use, sums beside the backward pass) and places (the host's memory, disk), not meaning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from espalier.comm import all_gather, all_reduce, reduce_scatter
from espalier.layout import chunk_bounds
from espalier.mesh import Mesh
from espalier.parallel.data.stages import STAGES


class SimpleZeRO:
    """ZeRO, one parameter after the other, as the table in ``stages`` says; stage 0 is DDP, stage 3 FSDP.

    Args:
        model: plain, and the same on every rank.
        make_optimizer: called with the parameters, or pieces of them, that this rank updates.
        mesh: the ranks, on one axis.
        stage: 0 to 3.
    """

    def __init__(
        self,
        model: nn.Module,
        make_optimizer: Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer],
        mesh: Mesh,
        stage: int,
    ) -> None:
        self.model, self.mesh, self.lies = model, mesh, STAGES[stage]
        self.parameters = list(model.parameters())
        self.shapes = [p.shape for p in self.parameters]
        self.is_cut = self.lies.states == "S"
        self.updated = [self._piece(p) if self.is_cut else p for p in self.parameters]
        self.optimizer = make_optimizer(self.updated)
        self._rest()

    def train_step(self, micro_batches: Sequence[Any], loss_of: Callable[[Any, Any], torch.Tensor]) -> float:
        """One update. Each rank gives its own rows; the mean of all ranks' mean losses is descended.

        Args:
            micro_batches: what ``loss_of(model, micro_batch)`` takes, one after the other.
        """
        share = 1 / (len(micro_batches) * self.mesh.size())
        total = torch.zeros((), dtype=torch.float64)
        if self.lies.parameters == "S":
            self._gather()
        for i, rows in enumerate(micro_batches):
            loss = loss_of(self.model, rows) * share
            loss.backward()
            total += loss.detach()
            if self.lies.addends == "S" or i + 1 == len(micro_batches):
                self._sum_gradients()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._rest()
        return all_reduce(total, self.mesh, 0).item()

    def _sum_gradients(self) -> None:
        """Add up the ranks' addends: whole on every rank, or each rank the piece that it updates."""
        for p, updated in zip(self.parameters, self.updated, strict=True):
            addend, p.grad = p.grad, None
            if addend is not None:
                summed = reduce_scatter(addend.flatten(), self.mesh, 0, 0)
                whole = summed if self.is_cut else all_gather(summed, self.mesh, 0, 0, p.numel())
                whole = whole.view_as(updated)
                updated.grad = whole if updated.grad is None else updated.grad + whole

    def _rest(self) -> None:
        """Leave parameters as they lie between steps: whole, or let go of (the pieces are kept)."""
        if self.lies.parameters == "S":
            for p in self.parameters:
                p.data = p.new_empty(0)
        elif self.is_cut:
            self._gather()

    def _gather(self) -> None:
        for p, piece, shape in zip(self.parameters, self.updated, self.shapes, strict=True):
            p.data = all_gather(piece.detach(), self.mesh, 0, 0, shape.numel()).view(shape)

    def _piece(self, p: torch.Tensor) -> nn.Parameter:
        bounds = chunk_bounds(p.numel(), self.mesh.size(), self.mesh.rank)
        return nn.Parameter(p.detach().flatten().narrow(0, *bounds).clone())
