"""``colossalai.trainer``: a loop over epochs, and hooks at its moments."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from espalier.comm.control import gather_objects
from espalier.compat.colossalai.engine import Engine
from espalier.compat.colossalai.logging import get_dist_logger


class BaseHook:
    """Is called at the moments of a run; those of the lowest ``priority`` first."""

    def __init__(self, priority: int = 10) -> None:
        self.priority = priority

    def after_hook_is_attached(self, trainer: Trainer) -> None:
        """Once."""

    def before_train(self, trainer: Trainer) -> None:
        """Once."""

    def after_train(self, trainer: Trainer) -> None:
        """Once."""

    def before_train_epoch(self, trainer: Trainer) -> None:
        """Each epoch."""

    def after_train_epoch(self, trainer: Trainer) -> None:
        """Each epoch."""

    def before_train_iter(self, trainer: Trainer) -> None:
        """Each batch."""

    def after_train_iter(self, trainer: Trainer, output: Any, label: Any, loss: Any) -> None:
        """Each batch."""

    def before_test(self, trainer: Trainer) -> None:
        """Each evaluation."""

    def after_test(self, trainer: Trainer) -> None:
        """Each evaluation."""

    def before_test_epoch(self, trainer: Trainer) -> None:
        """Each evaluation."""

    def after_test_epoch(self, trainer: Trainer) -> None:
        """Each evaluation."""

    def before_test_iter(self, trainer: Trainer) -> None:
        """Each batch of an evaluation."""

    def after_test_iter(self, trainer: Trainer, output: Any, label: Any, loss: Any) -> None:
        """Each batch of an evaluation."""


class LossHook(BaseHook):
    """Means of the losses of an epoch, over all ranks: ``trainer.states["metrics"]["train"]["Loss"]``."""

    def __init__(self, priority: int = 0) -> None:
        super().__init__(priority)
        self._losses: list[float] = []

    def before_train_epoch(self, trainer: Trainer) -> None:
        """Begin."""
        self._losses = []

    before_test_epoch = before_train_epoch

    def after_train_iter(self, trainer: Trainer, output: Any, label: Any, loss: Any) -> None:
        """Take one."""
        if loss is not None:
            self._losses.append(float(loss))

    after_test_iter = after_train_iter

    def after_train_epoch(self, trainer: Trainer) -> None:
        """Tell."""
        trainer.tell("train", "Loss", trainer.mean(sum(self._losses), len(self._losses)))

    def after_test_epoch(self, trainer: Trainer) -> None:
        """Tell."""
        trainer.tell("test", "Loss", trainer.mean(sum(self._losses), len(self._losses)))


class AccuracyHook(BaseHook):
    """The share of right answers of an evaluation, over all ranks.

    Args:
        accuracy_func: ``accuracy_func(output, labels)`` gives the number of right ones.
    """

    def __init__(self, accuracy_func: Any, priority: int = 0) -> None:
        super().__init__(priority)
        self._count, self._right, self._all = accuracy_func, 0.0, 0

    def before_test_epoch(self, trainer: Trainer) -> None:
        """Begin."""
        self._right, self._all = 0.0, 0

    def after_test_iter(self, trainer: Trainer, output: Any, label: Any, loss: Any) -> None:
        """Count."""
        self._right += float(self._count(output, label))
        self._all += len(label)

    def after_test_epoch(self, trainer: Trainer) -> None:
        """Tell."""
        trainer.tell("test", "Accuracy", trainer.mean(self._right, self._all))


class LRSchedulerHook(BaseHook):
    """Steps a schedule each epoch, or each batch that updates."""

    def __init__(
        self, lr_scheduler: Any, by_epoch: bool, store_lr_in_state: bool = True, priority: int = 1
    ) -> None:
        super().__init__(priority)
        self.lr_scheduler, self.by_epoch = lr_scheduler, by_epoch

    def after_train_epoch(self, trainer: Trainer) -> None:
        """By epoch."""
        if self.by_epoch:
            self._step(trainer)

    def after_train_iter(self, trainer: Trainer, output: Any, label: Any, loss: Any) -> None:
        """By batch."""
        if not self.by_epoch and trainer.has_updated:
            self._step(trainer)

    def _step(self, trainer: Trainer) -> None:
        self.lr_scheduler.step()
        trainer.tell("train", "LR", self.lr_scheduler.get_last_lr()[0])


class LogMetricByEpochHook(BaseHook):
    """Logs the metrics of an epoch on rank 0."""

    def __init__(self, logger: Any = None, interval: int = 1, priority: int = 10) -> None:
        super().__init__(priority)
        self._logger, self._every = logger or get_dist_logger(), interval

    def after_train_epoch(self, trainer: Trainer) -> None:
        """Tell."""
        self._tell(trainer, "train")

    def after_test_epoch(self, trainer: Trainer) -> None:
        """Tell."""
        self._tell(trainer, "test")

    def _tell(self, trainer: Trainer, mode: str) -> None:
        if trainer.cur_epoch % self._every == 0:
            metrics = ", ".join(
                f"{name} {value:.4g}" for name, value in trainer.states["metrics"][mode].items()
            )
            line = f"[Epoch {trainer.cur_epoch} / {mode.capitalize()}]: {metrics}"
            self._logger.info(line, ranks=[0])


class LogMemoryByEpochHook(BaseHook):
    """Logs what the engine holds, on rank 0."""

    def __init__(self, logger: Any = None, interval: int = 1, priority: int = 10, **_: Any) -> None:
        super().__init__(priority)
        self._logger, self._every = logger or get_dist_logger(), interval

    def after_train_epoch(self, trainer: Trainer) -> None:
        """Tell."""
        if trainer.cur_epoch % self._every == 0:
            self._logger.info(str(trainer.engine.engine.memory()), ranks=[0])


class SaveCheckpointHook(BaseHook):
    """Saves each ``interval`` epochs, for ``engine.engine.load``."""

    def __init__(
        self, interval: int = 1, checkpoint_dir: str | Path = ".", model: Any = None, priority: int = 10
    ) -> None:
        super().__init__(priority)
        self._every, self._folder = interval, Path(checkpoint_dir)

    def after_train_epoch(self, trainer: Trainer) -> None:
        """Save."""
        if trainer.cur_epoch % self._every == 0:
            trainer.engine.engine.save(self._folder)


class Trainer:
    """Trains an engine for epochs.

    Attributes:
        engine: trains.
        cur_epoch, cur_step: done so far.
        states: ``states["metrics"]["train"]`` and ``["test"]`` hold what hooks have told.
        has_updated: whether the last batch has ended a step.
    """

    def __init__(self, engine: Engine, timer: Any = None, logger: Any = None, schedule: Any = None) -> None:
        self.engine, self.logger = engine, logger
        self.cur_epoch = self.cur_step = 0
        self.states: dict[str, Any] = {"metrics": {"train": {}, "test": {}}}
        self.has_updated = False
        self._hooks: list[BaseHook] = []
        self._stops = False

    def stop_training(self) -> None:
        """Let this epoch be the last."""
        self._stops = True

    def tell(self, mode: str, name: str, value: float) -> None:
        """Keep a metric."""
        self.states["metrics"][mode][name] = value

    def mean(self, total: float, count: float) -> float:
        """Of all ranks' totals and counts."""
        shares = gather_objects((total, count), self.engine.engine.mesh)
        return sum(x for x, _ in shares) / max(sum(n for _, n in shares), 1)

    def fit(
        self,
        train_dataloader: Iterable[Any],
        epochs: int,
        max_steps: int | None = None,
        test_dataloader: Iterable[Any] | None = None,
        test_interval: int = 1,
        hooks: Sequence[BaseHook] | None = None,
        display_progress: bool = False,
        return_output_label: bool = True,
    ) -> None:
        """Train.

        Args:
            epochs: in all.
            max_steps: batches at most.
            test_interval: epochs from one evaluation to the next.
        """
        self._hooks = sorted(hooks or (), key=lambda hook: hook.priority)
        self._call("after_hook_is_attached")
        self._call("before_train")
        while self.cur_epoch < epochs and not self._stops:
            self._call("before_train_epoch")
            self.engine.train()
            for batch in train_dataloader:
                if max_steps is not None and self.cur_step >= max_steps:
                    self._stops = True
                    break
                self._call("before_train_iter")
                self.engine.zero_grad()
                results = self.engine.execute_schedule(iter([batch]), return_output_label=return_output_label)
                self.has_updated = self.engine.step()
                self.cur_step += 1
                self._call("after_train_iter", *results)
            self.cur_epoch += 1
            self._call("after_train_epoch")
            if test_dataloader is not None and self.cur_epoch % test_interval == 0:
                self.evaluate(test_dataloader)
        self._call("after_train")

    def evaluate(self, test_dataloader: Iterable[Any], hooks: Sequence[BaseHook] | None = None) -> None:
        """Evaluate, with the hooks of ``fit`` if none are given."""
        if hooks is not None:
            self._hooks = sorted(hooks, key=lambda hook: hook.priority)
        self.engine.eval()
        self._call("before_test")
        self._call("before_test_epoch")
        for batch in test_dataloader:
            self._call("before_test_iter")
            self._call("after_test_iter", *self.engine.execute_schedule(iter([batch]), forward_only=True))
        self._call("after_test_epoch")
        self._call("after_test")
        self.engine.train()

    def predict(self, data: torch.Tensor | Sequence[Any]) -> Any:
        """What the model gives for this rank's rows."""
        self.engine.eval()
        with torch.no_grad():
            return self.engine(*data) if isinstance(data, list | tuple) else self.engine(data)

    def _call(self, moment: str, *arguments: Any) -> None:
        for hook in self._hooks:
            getattr(hook, moment)(self, *arguments)


hooks = SimpleNamespace(
    **{
        kind.__name__: kind
        for kind in (
            BaseHook,
            LossHook,
            AccuracyHook,
            LRSchedulerHook,
            LogMetricByEpochHook,
            LogMemoryByEpochHook,
            SaveCheckpointHook,
        )
    }
)
