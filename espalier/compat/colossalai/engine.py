"""``colossalai.initialize`` and its engine, over Espalier's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from espalier.compat.absent import Absent, or_absent
from espalier.compat.colossalai.config import plan_of
from espalier.compat.colossalai.core import global_context
from espalier.compat.common import counts_one
from espalier.device import choose_algorithms
from espalier.engine import Engine as Inner
from espalier.engine import EngineModule
from espalier.engine import initialize as lay_on_mesh
from espalier.mesh.process import running_size
from espalier.parallel import Plan
from espalier.tensor import full_tensor
from espalier.texts import refuse

Criterion = Callable[[Any, Any], torch.Tensor]


class Engine(EngineModule):
    """What ``colossalai.initialize`` gives: called like the model, on this rank's rows.

    Attributes:
        engine: Espalier's.
        model: the model.
        optimizer: its optimizer.
        criterion: ``criterion(output, labels)``.
    """

    def __init__(self, engine: Inner, criterion: Criterion | None) -> None:
        super().__init__(engine, rows="own")
        self.criterion = criterion

    @property
    def model(self) -> nn.Module:
        """See the class."""
        return self.module

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """See the class."""
        return self.engine.optimizer

    @property
    def uses_pipeline(self) -> bool:
        """Whether the model is cut into stages: then :meth:`execute_schedule` trains."""
        return bool(self.engine.plan.pipe > 1)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of a step; those of micro-batches stay until it is made."""
        passes = self.engine.passes
        if passes.accumulation is None or passes.is_complete or self.uses_pipeline:
            self.engine.zero_grad()

    @property
    def schedule(self) -> Absent:
        """Not there: a use says what to do."""
        return Absent(
            "engine.schedule",
            "execute_schedule takes pairs (inputs, labels) from its iterator, and "
            "initialize(..., plan=Plan(schedule=...)) says the schedule of a pipeline",
        )

    def backward_by_grad(self, tensor: torch.Tensor, grad: torch.Tensor) -> None:
        """Gradients of an output whose own is given."""
        tensor.backward(grad)

    def backward(self, loss: torch.Tensor) -> None:
        """Gradients of this rank's loss; those of the ranks are averaged."""
        self.engine.backward(loss)

    def step(self) -> bool:
        """Update, after the last of ``gradient_accumulation`` batches.

        Returns:
            whether it did.
        """
        return self.engine.step()

    def execute_schedule(
        self,
        data_iter: Iterator[Any],
        forward_only: bool = False,
        return_loss: bool = True,
        return_output_label: bool = True,
    ) -> tuple[Any, Any, torch.Tensor | None]:
        """Forward (and backward, unless ``forward_only``) of the next batch, through stages if there are any.

        Args:
            data_iter: gives pairs ``(inputs, labels)`` of this rank's rows, on every rank.

        Returns:
            output, labels and loss; those not asked for are None. In a pipeline there is an output with
            ``forward_only`` alone.
        """
        inputs, labels = next(data_iter)
        if not self.uses_pipeline or forward_only:
            with torch.set_grad_enabled(not forward_only):
                output = self(inputs)
                loss = None if self.criterion is None else self.criterion(output, labels)
            if not forward_only:
                assert loss is not None, "training needs a criterion"
                self.backward(loss)
            shown = (output, labels) if return_output_label else (None, None)
            return (*shown, loss.detach() if return_loss and loss is not None else None)
        loss = piped(self.engine, self.engine.cut(self.engine.local_batch((inputs, labels))))
        return None, labels if return_output_label else None, loss if return_loss else None


def piped(engine: Inner, parts: Iterable[Any]) -> torch.Tensor:
    """Forward and backward of micro-batches through the stages; the loss of all of it, on every rank."""
    engine.accumulate(parts)
    engine.finish_gradients()
    assert engine.loss is not None
    return full_tensor(engine.loss).detach()


def initialize(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    criterion: Criterion | None = None,
    train_dataloader: Iterable[Any] | None = None,
    test_dataloader: Iterable[Any] | None = None,
    lr_scheduler: Any = None,
    ophooks: Any = None,
    verbose: bool = True,
    *,
    config: Mapping[str, Any] | None = None,
    plan: Plan | None = None,
    **options: Any,
) -> tuple[Engine, Any, Any, Any]:
    """``colossalai.initialize``, on Espalier.

    Args:
        train_dataloader, test_dataloader: give this rank's rows (``utils.get_dataloader`` makes such); they
            come back as they are.
        config: by default what ``launch`` was given.
        plan: in place of what the configuration says.
        options: more for :func:`espalier.initialize`: ``layouts=``, ``example=``.

    Returns:
        engine, both loaders, schedule.
    """
    if ophooks:
        refuse("initialize", [("ophooks", ophooks, "torch's hooks work on modules: leave it out")])
    ranks = running_size()
    found = global_context.config if config is None else config
    choose_algorithms(found.get("cudnn_benchmark"), found.get("cudnn_deterministic"))
    if plan is None:
        plan = plan_of(found, ranks)
    if plan.accumulate > 1:
        options.setdefault("count", counts_one)
    inner = lay_on_mesh(model, optimizer, plan, loss_fn=criterion if plan.pipe > 1 else None, **options)
    return Engine(inner, criterion), train_dataloader, test_dataloader, lr_scheduler


__all__ = ["Engine", "initialize"]

__getattr__ = or_absent(
    __name__,
    "colossalai.engine",
    {
        "gradient_accumulation": "gradient_accumulation in the configuration says it",
        "BaseGradientHandler DataParallelGradientHandler ZeROGradientHandler "
        "PipelineSharedModuleGradientHandler SequenceParallelGradientHandler MoeGradientHandler": (
            "gradients are summed by the layouts of their parameters"
        ),
        "BaseSchedule NonPipelineSchedule PipelineSchedule PipelineScheduleV2 InterleavedPipelineSchedule "
        "get_tensor_shape": (
            "engine.execute_schedule runs the plan's: initialize(..., plan=Plan(schedule=...))"
        ),
    },
    elsewhere={"gradient_handler schedule": __name__},
)
