"""Ranks that are given different batches where one is expected: told before the first update.

Who comes from data parallelism by hand gives each rank its own rows. As a global batch, of which each rank
computes its part, all but one in n of them would be left out, and the loss would fall all the same. So in the
first step each rank's batches become one number, and its sums over the ranks ride on the message of the norm.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as raw

from espalier.mesh import Mesh
from espalier.tensor.dtensor import DTensor
from espalier.trees import tensors_in

_SAMPLES = 2**20  # of a tensor, that are looked at
_APART = 1e-4  # rounding is less (a batch that each rank computed by itself); another batch is about 1 away


class GivenBatches:
    """The global batches of the first step, as this rank was given them.

    Ranks are compared with those of the same place, along an axis whose others may do with less of the batch.

    Args:
        place: this rank's, of so many ``places``.

    Attributes:
        is_open: whether they are still to be compared.
    """

    def __init__(self, mesh: Mesh, place: int, places: int) -> None:
        self._mesh, self._place, self._places = mesh, place, places
        self.is_open = mesh.size() > 1
        self._sum: torch.Tensor | float = 0.0
        self._weight = 0

    def note(self, batch: Any) -> None:
        """Look at a batch that is about to be trained on."""
        if not self.is_open or not torch.is_grad_enabled():
            return
        for x in tensors_in(dict(batch) if isinstance(batch, Mapping) else batch):
            if not isinstance(x, DTensor):
                self._weight += 1
                if not self._mesh.is_dry and x.numel():
                    self._sum = self._sum + self._weight * _mark(x).to(self._mesh.device())

    def shares(self) -> list[torch.Tensor]:
        """What this rank gives to the sums; nothing once they were compared."""
        if not self.is_open:
            return []
        with raw():
            found = torch.zeros(self._places, 3, dtype=torch.float64, device=self._mesh.device())
            if self._weight:
                mark = self._sum / self._weight**2
                for i, value in enumerate((1.0, mark, mark * mark)):
                    found[self._place, i] = value
            return list(found.view(-1).unbind())

    def check(self, sums: Sequence[torch.Tensor]) -> None:
        """Compare.

        Raises:
            ValueError: on all ranks, if they were given different batches.
        """
        self._sum, self._weight = 0.0, 0
        if not self._mesh.is_dry:
            with raw():
                told = torch.stack(list(sums)).view(-1, 3).tolist()
            for n, of, squares in told:
                if n and math.sqrt(max(squares / n - (of / n) ** 2, 0.0)) > _APART:
                    raise ValueError(_DIFFERENT)
        self.is_open = False


@torch.no_grad()
def _mark(x: torch.Tensor) -> torch.Tensor:
    """A number of about 1 that hangs on all elements (on some, of a large tensor) and their order."""
    with raw():
        x = torch.view_as_real(x.detach().resolve_conj()) if x.is_complex() else x.detach()
        flat = x.reshape(-1)
        flat = flat[:: -(-flat.numel() // _SAMPLES)].to(torch.float64).nan_to_num(0.0, 0.0, 0.0)
        wave = (
            torch.arange(1.0, 1 + flat.numel(), dtype=torch.float64, device=flat.device).mul_(math.e).sin_()
        )
        return (flat @ wave) / flat.norm().clamp(min=1e-30) + float(x.ndim + x.shape.numel() % 1009)


_DIFFERENT = (
    "The ranks were given different batches. A batch of plain tensors is the whole global batch, equal on "
    "all ranks: each rank computes its rows of it, and those that it alone was given would be left out. "
    "Nothing was updated. If each rank loads its own rows (a DistributedSampler), write "
    "engine(engine.local_batch(batch)) in place of engine(batch), and so with train_step. Else give all "
    "ranks the same batch: one order, one seed."
)

__all__ = ["GivenBatches"]
