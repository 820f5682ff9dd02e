"""Ranks that are given different batches where one is expected.

Who comes from data parallelism by hand gives each rank its own rows. As a global batch, of which each rank
computes its part, all but one in n of them would be left out, and the loss would fall all the same. So in the
first step each rank's batches become one number, and its sums over the ranks ride on the message of the norm.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Self

import torch
from torch import nn

from espalier.comm.control import numbers_of_all
from espalier.engine.batches import Batches
from espalier.mesh import Mesh
from espalier.parallel.plan import Plan
from espalier.tensor import DTensor
from espalier.tensor.dtensor import is_sparse, refuse_nested
from espalier.tensor.observers import tell
from espalier.torch_private import open_transform, raw
from espalier.trees import tensors_in

_SAMPLES = 2**20  # of a tensor, that are looked at
_APART = 1e-4  # rounding is less (a batch that each rank computed by itself); another batch is about 1 away
_SAME_ROWS = 1e-6  # the rounding of the sums alone


class GivenBatches:
    """The global batches of the first step, as this rank was given them.

    Ranks are compared with those of the same place, along an axis whose others may do with less of the batch.

    Args:
        place: this rank's, of so many ``places``.
        readers: how many ranks may have rows of their own: then others than the first's are expected of them.
        own: this rank among those that may, and how many there are: ranks of one number have the same rows.

    Attributes:
        is_open: whether they are still to be compared.
    """

    def __init__(
        self, mesh: Mesh, place: int, places: int, readers: int = 1, own: tuple[int, int] = (0, 1)
    ) -> None:
        self._mesh, self._place, self._places, self._readers = mesh, place, places, readers
        self._own = own
        self.is_open = mesh.size() > 1
        self._sum: torch.Tensor | float = 0.0
        self._weight = 0
        self._is_own = False
        self._compared, self._looks = False, True
        self._undo: Callable[[], object] = lambda: None

    @classmethod
    def of(cls, batches: Batches, plan: Plan, mesh: Mesh) -> Self:
        """Those of a plan, on all of its mesh."""
        here = batches.mesh  # in a pipeline that of this rank's stages
        # a stage may do with a part of the batch
        place = mesh.coordinate[mesh.axis("pipe")] if plan.pipe > 1 else 0
        # ranks of tensor axes that cut rows may well be given the same ones
        readers = math.prod(here.shape[a] for a in batches.axes if here.names[a] in plan.data_axes)
        # of a sequence that is cut ranks may have been given their parts
        apart = [*batches.axes, *(a for a, name in enumerate(here.names) if name == "context")]
        own = here.place(apart), math.prod(here.shape[a] for a in apart)
        return cls(mesh, place, plan.pipe, readers, own)

    def note(self, batch: Any, own: bool = False) -> None:
        """Look at a batch that is about to be trained on; ``own``: at this rank's rows of one."""
        self._is_own |= own
        if not self.is_open or not torch.is_grad_enabled():
            return
        for x in tensors_in(dict(batch) if isinstance(batch, Mapping) else batch):
            if not isinstance(x, DTensor):
                self._weight += 1
                if not self._mesh.is_dry and x.numel():
                    self._sum = self._sum + self._weight * _mark(x).to(self._mesh.device())

    def look_at(self, module: nn.Module) -> None:
        """Look, until they are compared, at batches, too, with which the program calls the model itself."""
        if not self.is_open or not self._looks:
            return
        of, model = weakref.ref(self), weakref.ref(module)  # a copy of the module has the hook, too

        def look(called: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
            given = of()
            if given is None or torch.compiler.is_compiling() or open_transform() is not None:
                return
            if called is model():
                given.note([args, named])

        self._undo = module.register_forward_pre_hook(look, with_kwargs=True).remove
        vars(look)["leave"] = self._undo

    def look_away(self) -> None:
        """Leave these calls alone: the program trains by what stands around the model."""
        self._looks = False
        self._undo()

    def compare(self, parameters: Iterable[torch.Tensor]) -> None:
        """See, once, that ranks have the same gradients, of calls that the engine knows nothing of.

        Raises:
            ValueError: on all ranks, if they have not.
        """
        if self._compared or not self.is_open or self._mesh.is_dry:
            return
        with raw():
            marks = [_mark(p.grad) * i for i, p in enumerate(parameters, 1) if p.grad is not None]
            mark = float(sum(marks)) / len(marks) ** 2 if marks else 0.0
        (lowest, *_, highest) = sorted(numbers_of_all([round(mark / _APART)], self._mesh))
        if highest[0] - lowest[0] > 1:
            raise ValueError(_ALONE)
        self._compared = True

    def shares(self) -> list[torch.Tensor]:
        """What this rank gives to the sums; nothing once they were compared."""
        if not self.is_open:
            return []
        with raw():
            of, each = self._own if self._is_own else (0, 1)
            sums = torch.zeros(self._places, each, 3, dtype=torch.float64, device=self._mesh.device())
            if self._weight:
                mark = self._sum / self._weight**2
                for i, value in enumerate((1.0, mark, mark * mark)):
                    sums[self._place, of, i] = value
            return list(sums.view(-1).unbind())

    def check(self, sums: Sequence[torch.Tensor]) -> None:
        """Compare.

        Raises:
            ValueError: on all ranks, if they were given different batches.
        """
        self._sum, self._weight = 0.0, 0
        if not self._mesh.is_dry:
            with raw():
                rows = torch.stack(list(sums)).view(self._places, -1, 3).cpu()
            if max(_apart(rows.flatten(0, 1)), default=0.0) > _APART:
                raise ValueError(_OF_ONE_BATCH if self._is_own else _DIFFERENT)
            apart = _apart(rows.sum(1))
            if apart and max(apart) <= _SAME_ROWS and self._is_own and self._readers > 1:
                tell(_SAME)
        self.is_open = False
        self._undo()


def _apart(sums: torch.Tensor) -> list[float]:
    """How far marks are apart, of each place that has some: by their number, sum and sum of squares."""
    return [math.sqrt(max(squares / n - (of / n) ** 2, 0.0)) for n, of, squares in sums.tolist() if n]


@torch.no_grad()
def _mark(x: torch.Tensor) -> torch.Tensor:
    """A number of about 1 that hangs on all elements (on some, of a large tensor) and their order."""
    with raw():
        refuse_nested(x)
        if is_sparse(x):
            x = x.detach().to_sparse_coo().coalesce().values()
        x = torch.view_as_real(x.detach().resolve_conj()) if x.is_complex() else x.detach()
        flat = x.reshape(-1)
        flat = flat[:: -(-flat.numel() // _SAMPLES)].to(torch.float64).nan_to_num(0.0, 0.0, 0.0)
        wave = (
            torch.arange(1.0, 1 + flat.numel(), dtype=torch.float64, device=flat.device).mul_(math.e).sin_()
        )
        of_shape = math.sin(x.ndim + math.e * x.shape.numel())  # small, as large sums round more
        return (flat @ wave) / flat.norm().clamp(min=1e-30) + of_shape


_DIFFERENT = (
    "The ranks were given different batches. A batch of plain tensors is the whole global batch, equal on "
    "all ranks: each rank computes its rows of it, and those that it alone was given would be left out. "
    "Nothing was updated. If each rank loads its own rows (a DistributedSampler), write "
    "engine(engine.local_batch(batch)) in place of engine(batch), and so with train_step; or train what "
    'espalier.prepare(model, optimizer, rows="own") gives. Else give all ranks the same batch: one order, '
    "one seed."
)


_ALONE = (
    "optimizer.step(): the ranks have different gradients. The model, which is laid out at the first batch "
    "that the engine is given, is not yet: these are of calls of the model itself, which each rank made "
    "whole, on a batch of its own. Give all ranks the same, or train by engine(batch), by "
    'engine.outputs(inputs), or what espalier.prepare(model, optimizer, rows="own") gives.'
)


_OF_ONE_BATCH = (
    "Ranks that share the model's layers, along tensor axes, were given different rows. They work on one "
    "batch together, and rows of all but one of them would be left out. Nothing was updated. Give them the "
    "same rows: let samplers count the ranks that read rows of their own, DistributedSampler(data, "
    "num_replicas=ranks // tensor, rank=rank // tensor) where tensor is the last axis of the plan."
)


_SAME = (
    "All ranks gave the model the very same rows: a step computes what one rank alone would. If a DataLoader "
    "reads the whole dataset on every rank, give it a DistributedSampler; or give it to espalier.prepare, "
    "which cuts its batches over the ranks."
)
