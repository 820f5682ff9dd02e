"""``colossalai.trainer``: a loop over epochs, and hooks at its moments."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Iterable, Sequence, Sized
from pathlib import Path
from typing import Any

import torch

from espalier.comm.control import gather_objects
from espalier.compat.absent import or_absent
from espalier.compat.colossalai.engine import Engine
from espalier.compat.colossalai.logging import get_dist_logger
from espalier.compat.colossalai.utils import MultiTimer, share_of
from espalier.mesh.process import running_rank
from espalier.texts import refuse


class Trainer:
    """Trains an engine for epochs.

    Attributes:
        engine: trains.
        cur_epoch: the number of this epoch, from 0.
        cur_step: batches done so far.
        max_epochs, max_steps, steps_per_epoch: as :meth:`fit` was asked.
        states: ``states["metrics"]["train"]`` and ``["test"]`` hold what hooks have told.
        has_updated: whether the last batch has ended a step.
    """

    def __init__(self, engine: Engine, timer: Any = None, logger: Any = None, schedule: Any = None) -> None:
        if schedule is not None:
            reason = "initialize(..., plan=Plan(schedule=...)) says it: leave it out"
            refuse("Trainer", [("schedule", schedule, reason)])
        self.engine, self.logger, self._timer = engine, logger, timer
        self.cur_epoch = self.cur_step = self.max_epochs = 0
        self.max_steps: int | None = None
        self.steps_per_epoch = 0
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

    def rows_a_second(self, rows: int, seconds: float) -> float:
        """Of all ranks that have rows of their own."""
        shares = gather_objects((rows, seconds), self.engine.engine.mesh)
        plan = self.engine.engine.plan
        share = share_of(plan, 0)[0]
        slowest = max(s for _, s in shares)
        return sum(n for n, _ in shares) * share / len(shares) / slowest if slowest else 0.0

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
            test_interval: epochs from one evaluation to the next; the first comes after the first epoch.
        """
        self.max_epochs, self.max_steps = epochs, max_steps
        self.steps_per_epoch = len(train_dataloader) if isinstance(train_dataloader, Sized) else 0
        self._hooks = sorted(hooks or (), key=lambda hook: hook.priority)
        self._call("after_hook_is_attached")
        self._call("before_train")
        while self.cur_epoch < epochs and not self._stops:
            self._call("before_train_epoch")
            self._time("start", "Train-epoch")
            self.engine.train()
            for batch in train_dataloader:
                if max_steps is not None and self.cur_step >= max_steps:
                    self._stops = True
                    break
                self._call("before_train_iter")
                self._time("start", "Train-step")
                self.engine.zero_grad()
                results = self.engine.execute_schedule(iter([batch]), return_output_label=return_output_label)
                self.has_updated = self.engine.step()
                self._time("stop", "Train-step")
                self.cur_step += 1
                self._call("after_train_iter", *results)
            self._time("stop", "Train-epoch")
            self._call("after_train_epoch")
            if test_dataloader is not None and self.cur_epoch % test_interval == 0:
                self.evaluate(test_dataloader)
            self.cur_epoch += 1
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
            self._time("start", "Test-step")
            results = self.engine.execute_schedule(iter([batch]), forward_only=True)
            self._time("stop", "Test-step")
            self._call("after_test_iter", *results)
        self._call("after_test_epoch")
        self._call("after_test")
        self.engine.train()

    def predict(self, data: torch.Tensor | Sequence[Any]) -> Any:
        """What the model gives for this rank's rows."""
        self.engine.eval()
        with torch.no_grad():
            return self.engine(*data) if isinstance(data, list | tuple) else self.engine(data)

    def _time(self, action: str, name: str) -> None:
        if self._timer is not None:
            getattr(self._timer, action)(name)

    def _call(self, moment: str, *arguments: Any) -> None:
        for hook in self._hooks:
            getattr(hook, moment)(self, *arguments)


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


class _EpochHook(BaseHook):
    """Does the same behind each epoch, of training (``"train"``) and of evaluation (``"test"``)."""

    def after_train_epoch(self, trainer: Trainer) -> None:
        """Tell."""
        self._tell(trainer, "train")

    def after_test_epoch(self, trainer: Trainer) -> None:
        """Tell."""
        self._tell(trainer, "test")

    @abstractmethod
    def _tell(self, trainer: Trainer, mode: str) -> None: ...


class LossHook(_EpochHook):
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

    def _tell(self, trainer: Trainer, mode: str) -> None:
        trainer.tell(mode, "Loss", trainer.mean(sum(self._losses), len(self._losses)))


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


class LogMetricByEpochHook(_EpochHook):
    """Logs the metrics of an epoch on rank 0."""

    def __init__(self, logger: Any = None, interval: int = 1, priority: int = 10) -> None:
        super().__init__(priority)
        self._logger, self._every = logger or get_dist_logger(), interval

    def _tell(self, trainer: Trainer, mode: str) -> None:
        if trainer.cur_epoch % self._every == 0:
            metrics = ", ".join(
                f"{name} {value:.4g}" for name, value in trainer.states["metrics"][mode].items()
            )
            line = f"[Epoch {trainer.cur_epoch} / {mode.capitalize()}]: {metrics}"
            self._logger.info(line, ranks=[0])


class LogMetricByStepHook(BaseHook):
    """Keeps the loss of a batch in ``trainer.states["step_metrics"]``."""

    def after_train_iter(self, trainer: Trainer, output: Any, label: Any, loss: Any) -> None:
        """Keep."""
        trainer.states["step_metrics"] = {} if loss is None else {"loss": float(loss)}

    after_test_iter = after_train_iter


class LogTimingByEpochHook(_EpochHook):
    """Logs how long batches and epochs took, on rank 0.

    Args:
        timer: the one that the trainer was given.
        ignore_num_train_steps: how many first batches are left out of the mean.
    """

    def __init__(
        self,
        timer: MultiTimer,
        logger: Any = None,
        interval: int = 1,
        priority: int = 10,
        log_eval: bool = True,
        ignore_num_train_steps: int = 0,
    ) -> None:
        super().__init__(priority)
        self._timer, self._logger, self._every = timer, logger or get_dist_logger(), interval
        self._evaluates, self._ignored = log_eval, ignore_num_train_steps

    def _tell(self, trainer: Trainer, mode: str) -> None:
        if mode == "test" and not self._evaluates:
            return
        name = mode.capitalize()
        times = self._timer.history(f"{name}-step")[self._ignored if mode == "train" else 0 :]
        if trainer.cur_epoch % self._every == 0 and times:
            mean = sum(times) / len(times)
            step = f"{name}-step: last = {times[-1]:.4g} s, mean = {mean:.4g} s | #steps = {len(times)}"
            line = f"[Epoch {trainer.cur_epoch} / {name}]: {step}"
            self._logger.info(line, ranks=[0])


class ThroughputHook(_EpochHook):
    """Rows a second, of all ranks: ``trainer.states["metrics"][...]["Throughput"]``.

    Args:
        ignored_steps: how many first batches are left out.
        tflop_per_step, use_local: no effect: rows of all ranks are counted.
    """

    def __init__(
        self, ignored_steps: int = 0, priority: int = 10, tflop_per_step: int = 0, use_local: bool = False
    ) -> None:
        super().__init__(priority)
        self._ignored, self._begun, self._batches = ignored_steps, 0.0, 0
        self._rows, self._seconds = 0, 0.0

    def before_train_epoch(self, trainer: Trainer) -> None:
        """Begin."""
        self._rows, self._seconds = 0, 0.0

    before_test_epoch = before_train_epoch

    def before_train_iter(self, trainer: Trainer) -> None:
        """Begin a batch."""
        self._begun = time.perf_counter()

    before_test_iter = before_train_iter

    def after_train_iter(self, trainer: Trainer, output: Any, label: Any, loss: Any) -> None:
        """Count its rows."""
        self._batches += 1
        if self._batches > self._ignored:
            self._rows += len(label) if label is not None else 0
            self._seconds += time.perf_counter() - self._begun

    after_test_iter = after_train_iter

    def _tell(self, trainer: Trainer, mode: str) -> None:
        trainer.tell(mode, "Throughput", trainer.rows_a_second(self._rows, self._seconds))


class TensorboardHook(_EpochHook):
    """Writes the loss of each batch, and the metrics of an epoch, for TensorBoard.

    Args:
        log_dir: the folder; a rank's files are in one of its own.
        ranks: that write; by default rank 0, as metrics are of all ranks.
        parallel_mode: no effect: ranks are those of the world.
    """

    def __init__(
        self,
        log_dir: str,
        ranks: Sequence[int] | None = None,
        parallel_mode: Any = None,
        priority: int = 10,
    ) -> None:
        super().__init__(priority)
        from torch.utils.tensorboard import SummaryWriter

        rank = running_rank()
        writes = rank in (ranks if ranks is not None else (0,))
        self.writer: Any = SummaryWriter(f"{log_dir}/rank_{rank}") if writes else None

    def after_train_iter(self, trainer: Trainer, output: Any, label: Any, loss: Any) -> None:
        """Write."""
        if self.writer is not None and loss is not None:
            self.writer.add_scalar("Loss/train", float(loss), trainer.cur_step)

    def after_train(self, trainer: Trainer) -> None:
        """End."""
        if self.writer is not None:
            self.writer.close()

    def _tell(self, trainer: Trainer, mode: str) -> None:
        for name, value in trainer.states["metrics"][mode].items():
            if self.writer is not None and (name, mode) != ("Loss", "train"):
                self.writer.add_scalar(f"{name}/{mode}", value, trainer.cur_step)


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


class LoadCheckpointHook(BaseHook):
    """Loads what :class:`SaveCheckpointHook` saved before training begins.

    Args:
        finetune: the weights alone, and from the first epoch on.
        epoch, strict, suffix: no effect: the newest is loaded, and names must be the model's.
    """

    def __init__(
        self,
        checkpoint_dir: str | Path = ".",
        epoch: int = -1,
        finetune: bool = False,
        strict: bool = False,
        suffix: str = "",
        priority: int = 10,
    ) -> None:
        super().__init__(priority)
        self._folder, self._finetune = Path(checkpoint_dir), finetune

    def before_train(self, trainer: Trainer) -> None:
        """Load."""
        trainer.engine.engine.load(self._folder, model_only=self._finetune)


__all__ = [
    "AccuracyHook",
    "BaseHook",
    "LRSchedulerHook",
    "LoadCheckpointHook",
    "LogMemoryByEpochHook",
    "LogMetricByEpochHook",
    "LogMetricByStepHook",
    "LogTimingByEpochHook",
    "LossHook",
    "SaveCheckpointHook",
    "TensorboardHook",
    "ThroughputHook",
    "Trainer",
]

__getattr__ = or_absent(
    __name__,
    "colossalai.trainer.hooks",
    {"MetricHook": "BaseHook is the base of all: trainer.tell(mode, name, value) keeps a metric"},
    elsewhere={"hooks": __name__},
)
