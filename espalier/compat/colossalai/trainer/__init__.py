"""``colossalai.trainer``: a loop over epochs, and hooks at its moments."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Sized
from typing import Any

import torch

from espalier.comm.control import gather_objects
from espalier.compat.colossalai.engine import Engine
from espalier.compat.colossalai.trainer import hooks
from espalier.compat.colossalai.trainer.hooks import BaseHook
from espalier.compat.colossalai.utils import share_of
from espalier.texts import refuse

__all__ = ["Trainer", "hooks"]


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
