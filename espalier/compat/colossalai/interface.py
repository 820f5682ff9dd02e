"""``colossalai.interface``: what ``booster.boost`` gives."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from espalier.comm.control import gather_objects
from espalier.compat.absent import or_absent
from espalier.compat.colossalai.engine import piped
from espalier.compat.common import Readers
from espalier.engine import EngineModule
from espalier.engine import initialize as lay_on_mesh
from espalier.parallel import Plan
from espalier.tensor import full_tensor
from espalier.trees import tensors_in, tree_map


class Boosted(EngineModule):
    """A model that an engine trains: a call takes and gives this rank's rows."""

    def __init__(self, model: nn.Module, optimizer: Any, plan: Plan, options: dict[str, Any]) -> None:
        criteria: list[Callable[[Any, Any], torch.Tensor]] = []

        def loss(output: Any, batch: Any) -> torch.Tensor:
            return criteria[-1](output, batch)

        engine = lay_on_mesh(model, optimizer, plan, loss_fn=loss, **options)
        super().__init__(engine, rows="own")
        self._criteria = criteria

    def judge_by(self, criterion: Callable[[Any, Any], torch.Tensor]) -> None:
        """Take a criterion for the passes that follow."""
        self._criteria[:] = [criterion]

    def pass_through(
        self, rows: Any, criterion: Callable[[Any, Any], torch.Tensor], keeps: bool = False
    ) -> tuple[torch.Tensor, Any]:
        """Forward and backward of this rank's rows through the stages.

        Args:
            keeps: whether outputs are wanted.

        Returns:
            the loss of all rows, on every rank; and, where the last stage is, outputs of this rank's rows,
            with None for what has no rows (the model's own loss). None elsewhere.
        """
        parts = self.engine.cut(self.engine.local_batch(rows))
        if not keeps:
            self.judge_by(criterion)
            return piped(self.engine, parts), None
        kept: list[Any] = []

        def judge(output: Any, inputs: Any) -> torch.Tensor:
            kept.append(tree_map(lambda x: x.detach() if isinstance(x, torch.Tensor) else x, output))
            return criterion(output, inputs)

        self.judge_by(criterion)
        self.engine.lay_out(parts[0])  # which may try the criterion
        self.judge_by(judge)
        loss = piped(self.engine, parts)
        total, own = self._rows_of(rows)
        return loss, _merged(kept, total, own) if kept else None

    def _rows_of(self, batch: Any) -> tuple[int, slice]:
        """How many rows the ranks have brought, and which of them are this one's (a collective)."""
        mesh = self.engine.mesh
        count = next((len(x) for x in tensors_in(batch) if x.ndim), 0)
        counts = gather_objects(count, mesh)
        readers = Readers(mesh, self.engine.plan)
        by_place = [counts[first] for first in readers.firsts]
        before = sum(by_place[: readers.place])
        return sum(by_place), slice(before, before + count)

    def unwrap(self) -> nn.Module:
        """The model."""
        return self.module

    def _force_wait_all_gather(self) -> None:
        """Nothing, though Colossal-AI's programs call it: whoever reads a parameter waits for it."""


def _merged(kept: list[Any], total: int, own: slice) -> Any:
    """Outputs of micro-batches as one of a rank's rows (a collective of those who have them)."""

    def whole(parts: tuple[torch.Tensor, ...]) -> torch.Tensor | None:
        if not parts[0].ndim:
            return None
        joined = torch.cat([full_tensor(x) for x in parts])
        return joined[own] if len(joined) == total else joined

    leaves = iter([whole(parts) for parts in zip(*map(tensors_in, kept), strict=True)])
    return tree_map(lambda x: next(leaves) if isinstance(x, torch.Tensor) else x, kept[0])


def show(optimizer: torch.optim.Optimizer, engine: Callable[[], Any]) -> None:
    """Let an optimizer have the methods of an ``OptimizerWrapper``.

    Args:
        engine: gives the one that it trains by, when it is asked.
    """
    here = weakref.ref(optimizer)

    def parameters() -> Iterator[torch.Tensor]:
        made = here()
        assert made is not None
        return (p for group in made.param_groups for p in group["params"])

    def backward(loss: torch.Tensor, inputs: Any = None, retain_graph: bool = False) -> None:
        loss.backward(inputs=inputs, retain_graph=retain_graph)

    def backward_by_grad(
        tensor: torch.Tensor, grad: torch.Tensor, inputs: Any = None, retain_graph: bool = False
    ) -> None:
        tensor.backward(grad, retain_graph=retain_graph, inputs=inputs)

    def get_grad_norm(norm_type: float = 2.0, **_: Any) -> float | None:
        norm = getattr(engine(), "grad_norm", None)
        return None if norm is None else float(norm)

    vars(optimizer).update(
        backward=backward,
        backward_by_grad=backward_by_grad,
        clip_grad_by_norm=lambda max_norm, *args, **options: nn.utils.clip_grad_norm_(
            list(parameters()), max_norm, *args, **options
        ),
        clip_grad_by_value=lambda clip_value, *args, **options: nn.utils.clip_grad_value_(
            list(parameters()), clip_value, *args, **options
        ),
        get_grad_norm=get_grad_norm,
        optim=weakref.proxy(optimizer),
        sync_grad=lambda: None,  # done behind the backward pass
        unwrap=here,
    )


ModelWrapper = Boosted
OptimizerWrapper = torch.optim.Optimizer  # optimizers stay as they are


__all__ = [
    "ModelWrapper",
    "OptimizerWrapper",
]


__getattr__ = or_absent(
    __name__,
    "colossalai.interface",
    {
        "pretrained": "from_pretrained of transformers reads weights",
        "AMPModelMixin": "plugins say the precision",
        "DistributedOptim": "optimizers stay as they are: parameters know how they lie",
        "PretrainedManager": "from_pretrained of transformers reads weights",
    },
    elsewhere={"model optimizer": __name__},
)
