"""What a validation measures, and what follows: which model was the best so far, and when to stop."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from espalier.engine import UnseenCountError
from espalier.models.sampling import logits_of
from espalier.train.data import BatchSource
from espalier.train.job import Job
from espalier.train.sections import EvaluationSection


class Judge:
    """Looks at validations, one after the other.

    Args:
        section: what is better, and how long to wait for it.

    Attributes:
        best: the best value so far.
        step: when that was.
        waited: validations since.
    """

    def __init__(self, section: EvaluationSection) -> None:
        self._section = section
        self.best: float | None = None
        self.step, self.waited = 0, 0

    def see(self, measured: Mapping[str, float], step: int) -> bool:
        """Whether this is the best validation so far."""
        value = measured[self._section.best_by]
        sign = 1 if self._section.upward else -1
        better = self.best is None or sign * (value - self.best) > self._section.least
        if better and math.isfinite(value):
            self.best, self.step, self.waited = value, step, 0
            return True
        self.waited += 1
        return False

    @property
    def has_enough(self) -> bool:
        """Whether it is time to stop."""
        return 0 < self._section.patience <= self.waited

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"best": self.best, "step": self.step, "waited": self.waited}

    def take(self, state: Mapping[str, Any]) -> None:
        """From a checkpoint."""
        self.best, self.step, self.waited = state["best"], state["step"], state["waited"]


class Evaluator:
    """Measures a model on the validation's batches; every rank must call.

    Args:
        job: says what is measured, and on how many batches.
        engine: of the model.
        batches: to validate on.
    """

    def __init__(self, job: Job, engine: Any, batches: BatchSource) -> None:
        self._job, self._engine, self._batches = job, engine, batches

    def measure(self) -> dict[str, float]:
        """The loss, in nats, and what else the job names."""
        module = self._engine.module
        module.eval()
        try:
            measured = {"loss": self._loss()}
            names = () if self._job.evaluation is None else self._job.evaluation.metrics
            if "perplexity" in names:
                measured["perplexity"] = math.exp(min(measured["loss"], 700.0))
            if "accuracy" in names:
                measured["accuracy"] = self._accuracy()
            return measured
        finally:
            module.train()

    def _loss(self) -> float:
        try:
            return float(self._engine.evaluate(self._parts()))
        except UnseenCountError:  # batches weigh alike, then; nobody trains in micro-batches so
            with torch.no_grad():
                losses = [self._engine(part).item() for part in self._parts()]
            return sum(losses) / len(losses)

    def _parts(self) -> Iterator[Any]:
        engine, batches = self._engine, self._batches
        for step in range(self._job.train.eval_batches):
            for rows, size in engine.micro_batches(batches.size):
                yield engine.local_batch(batches.batch(step, rows), size)

    def _accuracy(self) -> float:
        """The share of labels that are what the model finds likeliest."""
        right = total = 0
        for step in range(self._job.train.eval_batches):
            batch = self._batches.batch(step)
            labels = batch["labels"]
            inputs = {name: x for name, x in batch.items() if name != "labels"}
            logits = logits_of(self._engine.predict(inputs)).cpu()
            if self._job.facts.labels == "same":
                logits, labels = logits[:, :-1], labels[:, 1:]
            counts = labels != -100
            right += int((logits.argmax(-1) == labels)[counts].sum())
            total += int(counts.sum())
        return right / max(total, 1)
