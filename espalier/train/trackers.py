"""What else is told how a run goes: TensorBoard, Weights & Biases and MLflow, by a word in the job file."""

from __future__ import annotations

import os
import re
import time
import tomllib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from espalier.texts import did_you_mean, expect
from espalier.train.metrics import Record

# ---- who is told how a run goes


class Run(Protocol):
    """A run, as callbacks see it: a :class:`~espalier.train.runlog.RunLog`.

    Attributes:
        folder: of the run.
        name: of the run.
        job: what it was asked to do, as the text of its file; None where nothing is known.
        first: whether this rank writes.
        engine: that trains.
    """

    folder: Path
    name: str
    job: str | None
    first: bool
    engine: Any

    @property
    def records(self) -> Sequence[Record]:
        """So far; on the first rank also those from before the run was resumed."""


@dataclass(frozen=True)
class Event:
    """Something that happened to a run.

    Attributes:
        kind: ``"spike"``, ``"rollback"``, ``"restart"``, ``"resume"``, ``"sample"``, ``"left"``
            or ``"failed"``.
        text: in words; of a sample, what the model wrote.
        step: steps done.
        at: when, as ISO 8601 in UTC.
    """

    kind: str
    text: str
    step: int
    at: str


class Callback(Protocol):
    """Told how a run goes, on every rank, each of which calls it at the same steps.

    A subclass overrides what it wants to hear; a tracker writes where ``run.first`` holds.
    """

    def begin(self, run: Run) -> None:
        """The run begins, or goes on."""

    def record(self, record: Record) -> None:
        """A step was measured."""

    def event(self, event: Event) -> None:
        """Something happened."""

    def end(self, status: str) -> None:
        """The run is over: ``"finished"``, ``"left"`` or ``"failed"``."""


# ---- trackers

TRACKERS = ("tensorboard", "wandb", "mlflow")
"""The words."""


def trackers(track: str | Iterable[str]) -> list[Callback]:
    """A tracker for each word.

    Raises:
        ValueError: there is none of that name, or its package is missing.
    """
    expect("track", track, Iterable, f"one of {', '.join(TRACKERS)}, or several of these")
    words = [track] if isinstance(track, str) else list(track)
    callbacks: list[Callback] = []
    for word in words:
        if word not in TRACKERS:
            hint = did_you_mean(word, TRACKERS, f"expected one of {', '.join(TRACKERS)}")
            raise ValueError(f"track = {word!r}: there is no such tracker; {hint}")
        kinds: dict[str, Callable[[], Callback]] = {
            "tensorboard": TensorBoard, "wandb": WeightsAndBiases, "mlflow": MLflow,
        }  # fmt: skip
        callbacks.append(_Spared(word, kinds[word]()))
    return callbacks


class _Spared:
    """A tracker whose failure, once the run has begun, does not end it: a server may be gone for hours."""

    def __init__(self, word: str, tracker: Callback) -> None:
        self._word, self._tracker, self._over = word, tracker, False

    def begin(self, run: Run) -> None:
        self._tracker.begin(run)

    def record(self, record: Record) -> None:
        self._tell(lambda: self._tracker.record(record))

    def event(self, event: Event) -> None:
        self._tell(lambda: self._tracker.event(event))

    def end(self, status: str) -> None:
        self._tell(lambda: self._tracker.end(status))

    def _tell(self, what: Callable[[], None]) -> None:
        if self._over:
            return
        try:
            what()
        except Exception as error:
            self._over = True
            warnings.warn(
                f"track = {self._word!r} is told nothing more, for it failed: "
                f"{type(error).__name__}: {error}. The run goes on; its folder and report have all of it.",
                stacklevel=2,
            )


def _asked(run: Run) -> dict[str, Any]:
    """The plan, and the other tables of the job where there is one."""
    try:
        job = tomllib.loads(run.job or "")
    except tomllib.TOMLDecodeError:  # a loop's own words
        job = {"job": run.job}
    return {**job, "plan": run.engine.plan.model_dump(mode="json")}


def _dotted(table: Mapping[str, Any], head: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _dotted(value, f"{head}{key}.")
        else:
            yield f"{head}{key}", value


def check_installed(words: Iterable[str]) -> None:
    """See, before any rank is there, that the trackers' packages are.

    Raises:
        ValueError: one is missing.
    """
    for word in words:
        try:
            there = find_spec(word) is not None
        except ValueError:  # a module that was put in its place
            there = True
        if not there:
            raise _missing(word, word)


def _missing(word: str, package: str) -> ValueError:
    return ValueError(
        f"track = {word!r} needs the package {package}, which is not installed: "
        f"pip install {package}, or espalier[track]"
    )


def scalars(record: Record) -> Iterator[tuple[str, float]]:
    """The numbers of a record by name, as trackers draw them."""
    yield "train/loss", record.loss
    if record.val_loss is not None:
        yield "validation/loss", record.val_loss
    for name, value in record.metrics.items():
        yield f"validation/{name}", value
    if record.grad_norm is not None:
        yield "train/grad_norm", record.grad_norm
    yield "train/lr", record.lr
    yield "speed/tokens_per_second", record.tokens_per_second
    yield "memory/largest_peak_bytes", max(record.memory)
    for axis, count in record.sent.items():
        yield f"sent_bytes/{axis}", count


class TensorBoard:
    """Writes events to ``tensorboard`` in the run's folder: ``tensorboard --logdir RUN``."""

    def __init__(self) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise _missing("tensorboard", "tensorboard") from None
        self._kind: Any = SummaryWriter
        self._writer: Any = None

    def begin(self, run: Run) -> None:
        """Open the file, on the first rank."""
        if run.first:
            done = run.records[-1].step + 1 if run.records else None
            self._writer = self._kind(str(run.folder / "tensorboard"), purge_step=done)
            if run.job is not None:
                self._writer.add_text("job", "\n".join(f"    {x}" for x in run.job.splitlines()))  # as code

    def record(self, record: Record) -> None:
        """Write the numbers."""
        if self._writer is not None:
            for name, value in scalars(record):
                self._writer.add_scalar(name, value, record.step)

    def event(self, event: Event) -> None:
        """Write the words."""
        if self._writer is not None:
            self._writer.add_text(event.kind, event.text, event.step)

    def end(self, status: str) -> None:
        """Close the file."""
        if self._writer is not None:
            self._writer.close()


class WeightsAndBiases:
    """Writes to ``wandb`` in the run's folder, offline unless ``WANDB_MODE`` says otherwise.

    ``wandb sync RUN/wandb/offline-run-*`` sends it later. A run that goes on after a restart goes on there.
    """

    def __init__(self) -> None:
        try:
            import wandb
        except ImportError:
            raise _missing("wandb", "wandb") from None
        self._wandb: Any = wandb
        self._run: Any = None

    def begin(self, run: Run) -> None:
        """Open the run, on the first rank."""
        if run.first:
            mode = os.environ.get("WANDB_MODE", "offline")
            # what it prints of a run that is sent nowhere stands in the summary and the report
            settings = self._wandb.Settings(silent=mode in ("offline", "disabled"))
            noted = run.folder / "wandb-run"
            goes_on = bool(run.records) and noted.exists()
            self._run = self._wandb.init(
                dir=str(run.folder),
                name=run.name,
                mode=mode,
                config=_asked(run),
                id=noted.read_text("utf-8") if goes_on else None,
                resume="allow" if goes_on else None,
                reinit="create_new",
                settings=settings,
            )
            noted.write_text(self._run.id, "utf-8")

    def record(self, record: Record) -> None:
        """Write the numbers."""
        if self._run is not None:
            self._run.log(dict(scalars(record)), step=record.step)

    def event(self, event: Event) -> None:
        """Write the words."""
        if self._run is not None:
            self._run.summary[f"{event.kind} at step {event.step}"] = event.text

    def end(self, status: str) -> None:
        """Close the run."""
        if self._run is not None:
            self._run.finish(exit_code=0 if status == "finished" else 1)


_LONGEST, _TEXT = 500, 5000  # characters of a parameter, and of a tag, that all servers take


def _name(key: str) -> str:
    """As MLflow takes names: traffic along several axes has commas, patterns of parameters have stars."""
    return re.sub(r"[^\w./ -]", "_", key)


class MLflow:
    """Writes to the server that ``MLFLOW_TRACKING_URI`` names, or to ``mlflow.db`` in the run's folder.

    ``mlflow ui --backend-store-uri sqlite:///RUN/mlflow.db`` shows the latter. The experiment is that of
    ``MLFLOW_EXPERIMENT_NAME``, or ``espalier``. A run that goes on after a restart goes on there, too.
    """

    def __init__(self) -> None:
        try:
            from mlflow import MlflowClient
            from mlflow.entities import Metric
        except ImportError:
            raise _missing("mlflow", "mlflow") from None
        self._kind: Any = MlflowClient
        self._metric: Any = Metric
        self._client: Any = None
        self._run = ""

    def begin(self, run: Run) -> None:
        """Open the run, on the first rank."""
        if not run.first:
            return
        where = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{(run.folder / 'mlflow.db').absolute()}"
        self._client = self._kind(tracking_uri=where)
        noted = run.folder / "mlflow-run"
        if run.records and noted.exists():
            self._run = noted.read_text("utf-8")
            self._client.update_run(self._run, status="RUNNING")
            return
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "espalier")
        known = self._client.get_experiment_by_name(name)
        number = self._client.create_experiment(name) if known is None else known.experiment_id
        self._run = self._client.create_run(number, run_name=run.name).info.run_id
        noted.write_text(self._run, "utf-8")
        for key, value in _dotted(_asked(run)):
            self._client.log_param(self._run, _name(key), str(value)[:_LONGEST])

    def record(self, record: Record) -> None:
        """Write the numbers."""
        if self._client is not None:
            now = int(time.time() * 1000)
            metrics = [self._metric(_name(key), x, now, record.step) for key, x in scalars(record)]
            self._client.log_batch(self._run, metrics)

    def event(self, event: Event) -> None:
        """Write the words."""
        if self._client is not None:
            self._client.set_tag(self._run, f"{event.kind} at step {event.step}", event.text[:_TEXT])

    def end(self, status: str) -> None:
        """Close the run."""
        if self._client is not None:
            self._client.set_terminated(self._run, "FINISHED" if status == "finished" else "FAILED")
