"""The training loop behind the command line, which every rank runs; and the checkpoints of a run."""

from __future__ import annotations

import json
import math
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from espalier.checkpoint import Checkpoint, CheckpointError, checkpoints, newest
from espalier.checkpoint.folder import INDEX, cannot
from espalier.comm import ledger
from espalier.comm.control import gather_objects
from espalier.engine import SpikeError
from espalier.parallel import Plan, PlanError
from espalier.parallel.pipeline import Timeline
from espalier.parallel.schedules.simulate import can_draw, draw
from espalier.texts import listed
from espalier.torch_private import set_last_rates
from espalier.train.building import (
    build_model,
    build_optimizer,
    build_schedule,
    count_of,
    step_flops,
    weights_of,
)
from espalier.train.corpus import Corpus, prepare
from espalier.train.data import BatchSource, training_batches, validation_batches
from espalier.train.evaluation import Evaluator, Judge
from espalier.train.facts import held_by_kind, slow_products
from espalier.train.job import Job
from espalier.train.metrics import Progress, Record, Silent, draw_loss, readable_bytes
from espalier.train.model_spec import OwnSpec
from espalier.train.outputs import WEIGHTS, sample, write_companions
from espalier.train.page import PAGE, to_toml
from espalier.train.runlog import RunLog, RunTaken, is_finished
from espalier.train.trackers import Callback
from espalier.trees import named_leaves

BEST = "best"
"""Folder, in that of a run, of its best checkpoint."""


class TrainingError(RuntimeError):
    """Training cannot go on; the message says why and what to try."""


@dataclass(frozen=True)
class Preempted:
    """A run that was asked to leave (SIGTERM, SIGUSR1, a closed terminal, Ctrl-C), and has.

    Attributes:
        step: the last that was done.
        saved: the checkpoint of it; empty where the job saves none.
        interrupted: whether Ctrl-C asked.
    """

    step: int
    saved: str
    interrupted: bool = False


@dataclass(frozen=True)
class Summary:
    """How a run ended.

    Attributes:
        loss: last training loss, nats.
        val_loss: validation loss at the end, nats.
        entropy: unigram entropy of the training tokens, nats; None for random data.
        parameters: of the model.
        steps: optimizer steps done.
        seconds: of training, without preparation and the final report.
        ranks: that trained.
        sample: generated text; None where none was asked for.
        files: what was written, by what it is.
        bubble: the part of their time in the last step in which a pipeline's ranks did not compute, and what
            its schedule has of it with the same times of its actions; None without a pipeline.
    """

    loss: float
    val_loss: float
    entropy: float | None
    parameters: int
    steps: int
    seconds: float
    ranks: int
    sample: str | None
    files: dict[str, str]
    bubble: tuple[float, float] | None = None


def train(
    job: Job,
    progress: Progress | None = None,
    *,
    resume: bool = False,
    callbacks: Sequence[Callback] = (),
) -> Summary | Preempted | None:
    """Train the job's model on this rank.

    Args:
        job: what to train.
        progress: told how it goes; only rank 0's is used.
        resume: go on from the job's newest checkpoint, if there is one.
        callbacks: told of each record and event, on every rank.

    Returns:
        The summary on rank 0, None on the others; on all, `Preempted` where a signal asked to leave.

    Raises:
        TrainingError: when the loss is no longer finite, or gradients overflow at the lowest loss scale.
    """
    import espalier

    dtype = getattr(torch, job.train.dtype)
    text = prepare(job)
    with espalier.deferred():
        model = build_model(job.model, job.train.seed, dtype)
        optimizer = build_optimizer(job.optimizer, model)
    parameters = sum(p.numel() for p in model.parameters())
    options: dict[str, Any] = {"max_grad_norm": job.clip, "count": count_of(job.model), "spikes": job.spikes}
    options["compile"] = job.train.compile
    engine = espalier.initialize(model, optimizer, job.plan, **options)
    schedule = build_schedule(job.optimizer, optimizer, job.train.steps)
    first = engine.mesh.rank == 0
    loop = Loop(
        job,
        engine,
        model,
        schedule,
        training_batches(
            job,
            text,
            size=job.train.batch_size,
            sequence=job.train.sequence,
            seed=job.train.seed,
            dtype=dtype,
        ),
        validation_batches(job, text, dtype=dtype),
        (progress or Silent()) if first else Silent(),
        callbacks,
        None if text is None else text.entropy,
    )
    if first and progress is not None and (words := slow_products(engine)) is not None:
        progress.say(words)
    with engine.pulse.signals.saving(), _interruptible() as interrupted:
        records = loop.run(resume=resume)
        engine.wait_saved()
    if loop.left is not None:
        loop.left = replace(loop.left, interrupted=bool(interrupted))
        saved = f"saved in {loop.left.saved}" if loop.left.saved else "nothing saved"
        loop.log.event("left", f"asked to leave, after step {loop.left.step}; {saved}")
        loop.log.close("left")
        return loop.left
    loop.take_best()
    engine.export(job.out / WEIGHTS, metadata={"job": json.dumps(job.raw, default=str)})
    timeline = engine.timeline() if job.plan.pipe > 1 and loop.steps_made else None
    summary = _finish(job, text, records, parameters, engine.mesh.size(), timeline) if first else None
    loop.log.close()
    return summary


@contextmanager
def _interruptible() -> Iterator[list[int]]:
    """While open, a first Ctrl-C asks to save and leave, as SIGTERM does, and is listed; a second ends."""
    came: list[int] = []
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before is not signal.default_int_handler:
        yield came
        return

    def ask(number: int, frame: object) -> None:
        signal.signal(signal.SIGINT, before)
        came.append(number)
        signal.raise_signal(signal.SIGTERM)

    signal.signal(signal.SIGINT, ask)
    try:
        yield came
    finally:
        signal.signal(signal.SIGINT, before)


class Loop:
    """The steps of a run on one rank.

    Args:
        job: what to train.
        engine: from `espalier.initialize`.
        model: the engine's model, to switch between training and evaluation.
        schedule: learning-rate schedule, moved on once a step.
        batches: to train on.
        validation: to validate on.
        progress: told how it goes.
        callbacks: told of each record and event.
        entropy: of the training tokens.

    Attributes:
        left: that a signal asked to leave, and when.
        steps_made: by this process.
        log: of the run, once it runs.
    """

    log: RunLog

    def __init__(
        self,
        job: Job,
        engine: Any,
        model: nn.Module,
        schedule: LambdaLR,
        batches: BatchSource,
        validation: BatchSource,
        progress: Progress,
        callbacks: Sequence[Callback] = (),
        entropy: float | None = None,
    ) -> None:
        self._job = job
        self._callbacks, self._entropy = callbacks, entropy
        self._engine = engine
        self._model = model
        self._schedule = schedule
        self._batches = batches
        self._progress = progress
        self._keeper = RunCheckpoints(job, engine, schedule, progress)
        self._evaluator = Evaluator(job, engine, validation)
        self._judge = self._keeper.judge
        self.left: Preempted | None = None
        self.steps_made = 0

    def run(self, *, resume: bool = False) -> list[Record]:
        """Do all steps; return the records, which rank 0 also writes to ``metrics.jsonl``.

        Args:
            resume: those after the newest checkpoint.
        """
        log = self._open(self._begin(resume))
        engine, steps, rollbacks = self._engine, self._job.train.steps, 0
        try:
            with self._progress:
                while engine.steps < steps and self.left is None and not self._stopped():
                    try:
                        self._one(engine.steps + 1, log)
                    except SpikeError as spike:
                        rollbacks += 1
                        self._roll_back(spike, rollbacks, log)
                        continue
                    if engine.pulse.to_leave(engine.steps) and engine.steps < steps:
                        self.left = Preempted(engine.steps, str(self._keeper.save() or ""))
        except RunTaken as error:
            raise TrainingError(str(error)) from error
        except BaseException as error:
            log.fail(error)
            raise
        return log.records

    def _open(self, after: int) -> RunLog:
        """The run's log, which goes on after a step."""
        job, engine = self._job, self._engine
        self.log = RunLog(
            job.out,
            engine,
            name=job.name,
            steps=job.train.steps,
            tokens=self._tokens_per_batch(),
            unit=job.unit,
            flops=step_flops(job) if engine.mesh.rank == 0 else None,
            entropy=self._entropy,
            job=to_toml(job.raw),
            track=job.train.track,
            callbacks=self._callbacks,
            after=after,
        )
        if after:
            self.log.event("resume", f"goes on after step {after}")
        return self.log

    def _one(self, step: int, log: RunLog) -> None:
        """A step, and what is written of it."""
        settings = self._job.train
        last = step == settings.steps
        evaluate = last or (settings.eval_every > 0 and step % settings.eval_every == 0)
        due = step == 1 or evaluate or step % settings.log_every == 0
        rate = float(self._schedule.get_last_lr()[0])
        keeps = due and log.keeps(evaluate)
        loss, updated, sent, held = self._step(step, due, keeps)
        log.count()
        if due and (updated or last):
            value = self._finite(loss, step, log.records) if updated else math.nan
            log.stop()
            norm, measured = self._norm(), self._evaluate(step) if evaluate else {}
            record = log.write(
                step,
                value,
                lr=rate,
                val_loss=measured.pop("loss", None),
                metrics=measured,
                norm=norm,
                sent=sent,
                held=held,
            )
            self._progress.show(record)
        self._keeper.after(step, self._batches.size)

    def _roll_back(self, spike: SpikeError, times: int, log: RunLog) -> None:
        """Load the last checkpoint, and leave the batch of the spike out.

        Raises:
            TrainingError: the job wants to stop, there is no checkpoint, or it was too often.
        """
        cause = f"step {spike.step}: {spike}"
        limit = None if self._job.spikes is None else self._job.spikes.limit
        if not spike.rollback or limit is None:
            raise TrainingError(cause) from spike
        if times > limit:
            raise TrainingError(f"{cause}. That was rollback {times}: spikes.limit = {limit}") from spike
        if not self._keeper.roll_back():
            raise TrainingError(f"{cause}. There is no checkpoint yet to roll back to") from spike
        self._keeper.barred.add(spike.step)
        log.back_to(self._engine.steps)
        words = f"{cause}; back to step {self._engine.steps}, and on without that batch"
        log.event("rollback", words)
        self._progress.say(words)

    def _begin(self, resume: bool) -> int:
        """Start, or take up what was saved; gives the number of steps done."""
        engine, steps = self._engine, self._job.train.steps
        if not resume:
            self._keeper.begin()
        if resume or self._job.weights is not None:
            rows, size = engine.micro_batches(self._batches.size)[0]
            engine.lay_out(engine.local_batch(self._batches.batch(1, rows), size))
        if self._job.weights is not None:  # also where there is nothing to resume yet
            engine.load_weights(weights_of(self._job))
        if not resume:
            return 0
        self._keeper.resume()
        done: int = engine.steps
        if done > steps or (done == steps and self._is_finished()):
            raise ValueError(
                f"The checkpoint is of step {done}, and train.steps = {steps}: there is nothing left to do. "
                "To train on, give more: --set train.steps=..."
            )
        return done

    def _is_finished(self) -> bool:
        """Whether the run in this folder has written its results; one that was killed before has still to."""
        return any(
            gather_objects(self._engine.mesh.rank == 0 and is_finished(self._job.out), self._engine.mesh)
        )

    def _step(
        self, step: int, count: bool, weigh: bool
    ) -> tuple[torch.Tensor, bool, dict[str, int], dict[str, int] | None]:
        """The loss of a step, whether it was made or left out, the bytes sent by axis, and held by kind."""
        engine = self._engine
        engine.pulse.step = step
        if step in self._keeper.barred:
            engine.steps = step
            self._schedule.step()
            return torch.tensor(math.nan), False, {}, None
        with ledger(engine.mesh) if count else nullcontext() as book:
            engine.accumulate(
                engine.local_batch(self._batches.batch(step, rows), size)
                for rows, size in engine.micro_batches(self._batches.size)
            )
            held = None
            if weigh:
                engine.finish_gradients()
                held = held_by_kind(engine)
            try:
                engine.step()
            except SpikeError:
                raise
            except FloatingPointError as error:
                raise TrainingError(f"step {step}: {error}") from error
        self._schedule.step()
        self.steps_made += 1
        message = "" if engine.guard is None else engine.guard.told
        if message:
            self.log.event("spike", f"step {step} is left out: {message}")
            self._progress.say(f"step {step} is left out: {message}")
        return engine.loss, not message, book.by_axis() if book is not None else {}, held

    def _evaluate(self, step: int) -> dict[str, float]:
        """What a validation measures; the best model so far is kept."""
        measured = self._evaluator.measure()
        if self._judge is not None and self._judge.see(measured, step):
            self._keeper.keep_best()
        return measured

    def _stopped(self) -> bool:
        """Whether validations have not become better for long enough; a last checkpoint is saved, then."""
        if self._judge is None or not self._judge.has_enough:
            return False
        name, best = self._job.evaluation.best_by if self._job.evaluation else "loss", self._judge.best
        reason = f"step {self._engine.steps}: {name} is not better than {best:.4f} of step {self._judge.step}"
        words = f"{reason} for {self._judge.waited} validations: that is enough"
        self.log.event("stopped", words)
        self._progress.say(words)
        self._keeper.save()
        return True

    def take_best(self) -> None:
        """Go back to the weights of the best validation, if they were kept."""
        if self._judge is not None and self._keeper.load_best():
            self._progress.say(f"the weights are those of step {self._judge.step}, the best validation")

    def _norm(self) -> float | None:
        """The gradient's norm; None where the step was skipped for want of one."""
        norm = _number(self._engine.grad_norm)
        return norm if norm is None or math.isfinite(norm) else None

    def _finite(self, loss: torch.Tensor, step: int, records: list[Record]) -> float:
        value = float(loss.item())
        if math.isfinite(value):
            return value
        before = f"it was {records[-1].loss:.4f} at step {records[-1].step}" if records else "from the start"
        norm = _number(self._engine.grad_norm)
        clip = self._job.clip
        raise TrainingError(
            f"the loss is {value} at step {step} ({before}; gradient norm now {norm}). "
            f"Try a lower optimizer.lr (now {self._job.optimizer.lr:g}), a longer optimizer.warmup "
            f"(now {self._job.optimizer.warmup} steps) or "
            f"{'clipping, train.clip = 1.0' if clip is None else f'a lower train.clip (now {clip:g})'}. "
            f"Metrics up to here are in {self._job.out}/metrics.jsonl"
        )

    def _tokens_per_batch(self) -> int:
        return self._batches.size * (1 if self._job.unit == "images" else self._job.train.sequence)


def _finish(
    job: Job,
    text: Corpus | None,
    records: list[Record],
    parameters: int,
    ranks: int,
    timeline: Timeline | None,
) -> Summary:
    """Write the results; on rank 0 only."""
    out, last = job.out, records[-1]
    assert last.val_loss is not None
    entropy = None if text is None else text.entropy
    files = {"metrics": str(out / "metrics.jsonl")}
    if can_draw():
        files["loss"] = str(out / "loss.png")
        draw_loss(out / "loss.png", records, entropy, f"{job.name}, {_describe(job, ranks)}")
    files["model"] = str(out / WEIGHTS)
    files |= write_companions(job, text)
    written, tokenizer = None, None if text is None else text.tokenizer
    if tokenizer is not None and job.train.sample_tokens and job.facts.labels in ("next", "same"):
        try:
            written = sample(job, tokenizer, out / WEIGHTS)
        except Exception as error:  # of the user's own model: what was trained is kept all the same
            if not isinstance(job.model, OwnSpec):
                raise
            reason = (
                f"none: it is called with input_ids alone, and gives logits ({type(error).__name__}: {error})"
            )
            files["sample"] = reason
        else:
            files["sample"] = str(out / "sample.txt")
            Path(files["sample"]).write_text(written, "utf-8")
    tracked = [job.train.track] if isinstance(job.train.track, str) else job.train.track or []
    files |= {word: str(out / word) for word in tracked}
    files["report"] = str(out / PAGE)
    bubble = None
    if timeline is not None:
        if can_draw():
            files["timeline"] = str(out / "timeline.svg")
            draw(files["timeline"], {"predicted": timeline.predicted(), "measured": timeline})
        bubble = timeline.bubble_fraction, timeline.predicted().bubble_fraction
    return Summary(
        last.loss, last.val_loss, entropy, parameters, last.step, last.seconds, ranks, written, files, bubble
    )


def _describe(job: Job, ranks: int) -> str:
    table = job.raw.get("plan", {})
    axes = " × ".join(f"{axis} {size}" for axis, size in table.items() if isinstance(size, int))
    count = f"{ranks} rank{'' if ranks == 1 else 's'}"
    return f"{count}: {axes}" if axes else count


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


# ---- a run's checkpoints: saved as it goes, taken up again by ``--resume``, and listed for people


class RunCheckpoints:
    """Saves a run every so many steps, and once more at its end.

    Args:
        job: of which ``[checkpoint]`` says where and when; without that table nothing is saved.
        engine: from ``espalier.initialize``.
        schedule: of the learning rate.
        progress: told what was resumed.

    Attributes:
        barred: steps whose batches are left out, after a rollback.
        judge: knows the best validation, where the job asks for it.
    """

    def __init__(self, job: Job, engine: Any, schedule: LambdaLR, progress: Progress) -> None:
        self._job, self._engine, self._schedule, self._progress = job, engine, schedule, progress
        self._samples = 0
        self.barred: set[int] = set()
        self._saved: dict[str, Any] = {}
        self._kept: tuple[int, Path] | None = None
        self.judge = None if job.evaluation is None else Judge(job.evaluation)

    def resume(self) -> None:
        """Go on from the newest whole checkpoint, if there are some.

        Raises:
            ValueError: the job has no table ``[checkpoint]``, or what it trains differs from what was saved.
            CheckpointError: there are checkpoints, and all are damaged; or none can be written there.
        """
        directory = self._directory()
        if directory is None:
            raise ValueError("--resume: the job has no table [checkpoint], so it saves none. Add one.")
        see_writable(directory)
        if not self._has_some(directory):
            self._progress.say(f"no checkpoint in {directory}: starting at the beginning")
            return
        engine = self._engine
        try:
            self._load(directory)
        except CheckpointError as error:
            raise CheckpointError(
                f"{error} No other in {directory} is whole, so there is nothing to go on from. Remove them "
                "all to start at the beginning."
            ) from error
        saved = self._saved
        self._progress.say(f"resumed after step {engine.steps}, {self._samples:,} samples")
        lines = list(differences(saved["job"], _plain(self._job.raw)))
        self._take_options(saved["job"].get("optimizer", {}))
        if lines:
            self._progress.say(listed("this job is not the one that was saved:", lines))

    def roll_back(self) -> bool:
        """Go back to the last checkpoint; whether there is one."""
        directory = self._directory()
        self._engine.wait_saved()
        if directory is None or not self._has_some(directory):
            return False
        self._load(directory)
        return True

    def _has_some(self, directory: Path) -> bool:
        """Whether there are checkpoints, whole or not: where all are damaged no run begins anew."""
        mesh = self._engine.mesh
        return any(gather_objects(mesh.rank == 0 and has_checkpoints(directory), mesh))

    def _load(self, directory: Path) -> None:
        self._saved = self._engine.load(directory, schedule=self._schedule)
        self._samples = self._saved["samples"]
        self.barred |= set(self._saved.get("barred", ()))
        if self._engine.guard is not None and "guard" in self._saved:
            self._engine.guard.load_state_dict(self._saved["guard"])
        if self.judge is not None and "judge" in self._saved:
            self.judge.take(self._saved["judge"])

    def begin(self) -> None:
        """Start a run of its own.

        Raises:
            ValueError: the folder has another run's checkpoints.
            CheckpointError: none can be written to it.
        """
        directory = self._directory()
        if self.judge is not None and self._engine.mesh.rank == 0:
            shutil.rmtree(self._job.out / BEST, ignore_errors=True)
        if directory is not None and has_checkpoints(directory):
            saved = newest(directory) or checkpoints(directory)[0]
            raise ValueError(
                f"{directory} has checkpoints of an earlier run (the newest is {saved.name}). Go on with "
                "that by --resume, name another folder by --set checkpoint.directory=..., or remove them."
            )
        if directory is not None:
            see_writable(directory)

    def keep_best(self) -> None:
        """Keep what is there now as the best model."""
        if self._job.evaluation is not None and self._job.evaluation.keep_best:
            self._engine.save(self._job.out / BEST, keep=1, job=_plain(self._job.raw))

    def load_best(self) -> bool:
        """Take the weights of the best validation, unless they are there; whether there were some."""
        judge, section = self.judge, self._job.evaluation
        if judge is None or section is None or not section.keep_best or judge.step in (0, self._engine.steps):
            return False
        folder = self._job.out / BEST / f"step-{judge.step:08}"
        mesh = self._engine.mesh
        if not gather_objects(folder.is_dir() if mesh.rank == 0 else None, mesh)[0]:
            self._progress.say(
                f"the best validation, of step {judge.step}, is not kept any more: no {folder}"
            )
            return False
        damage: CheckpointError | None = None
        try:
            Checkpoint(folder).verify(mesh.rank, mesh.size())  # a load that fails has changed weights
        except CheckpointError as met:
            damage = met
        if words := next((str(x) for x in gather_objects(damage, mesh) if x is not None), ""):
            self._progress.say(
                f"the best validation, of step {judge.step}, cannot be loaded: {words} The weights are "
                f"those of step {self._engine.steps}, the last"
            )
            return False
        self._engine.load(folder, model_only=True)
        return True

    def after(self, step: int, size: int) -> None:
        """A step on so many samples is done: save, if it is time."""
        self._samples += size
        section = self._job.checkpoint
        if section is None:
            return
        last = step == self._job.train.steps
        if last or (section.every and step % section.every == 0):
            self.save(asynchronous=section.asynchronous and not last)

    def save(self, *, asynchronous: bool = False) -> Path | None:
        """Save now, if the job says where."""
        section, directory = self._job.checkpoint, self._directory()
        if section is None or directory is None:
            return None
        if self._kept is not None and self._kept[0] == self._engine.steps:
            self._engine.wait_saved()
            return self._kept[1]
        path: Path = self._engine.save(
            directory,
            asynchronous=asynchronous,
            durable=section.durable,
            keep=section.keep,
            schedule=self._schedule,
            samples=self._samples,
            barred=sorted(self.barred),
            **({} if self._engine.guard is None else {"guard": self._engine.guard.state_dict()}),
            **({} if self.judge is None else {"judge": self.judge.state()}),
            job=_plain(self._job.raw),
        )
        self._kept = self._engine.steps, path
        return path

    def _directory(self) -> Path | None:
        return _directory(self._job)

    @staticmethod
    def newest(job: Job) -> Path | None:
        """A job's newest whole checkpoint."""
        directory = _directory(job)
        return None if directory is None else newest(directory)

    def _take_options(self, saved: Mapping[str, Any]) -> None:
        """What the job now says otherwise of its optimizer holds from now on."""
        now = _plain(self._job.raw).get("optimizer", {})
        fresh = build_optimizer(self._job.optimizer, self._engine.module).param_groups
        for group, wanted in zip(self._engine.optimizer.param_groups, fresh, strict=True):
            for key in self._job.optimizer.arguments:
                if now.get(key) != saved.get(key) and key in group:
                    group["initial_lr" if key == "lr" else key] = wanted[key]
        rate = self._schedule.lr_lambdas[0](self._schedule.last_epoch)
        self._schedule.base_lrs = [g["initial_lr"] for g in self._engine.optimizer.param_groups]
        rates = [base * rate for base in self._schedule.base_lrs]
        set_last_rates(self._schedule, rates)
        for group, lr in zip(self._engine.optimizer.param_groups, rates, strict=True):
            group["lr"] = lr


def see_writable(directory: Path) -> None:
    """See that checkpoints can be written to a folder: not after hours, when the first is due.

    Raises:
        CheckpointError: they can't.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise CheckpointError(cannot(f"No checkpoint can be written to {directory}", error)) from error


def has_checkpoints(directory: Path) -> bool:
    """Whether there are some in a folder, whole or not.

    Raises:
        CheckpointError: it cannot be read.
    """
    try:
        return directory.exists() and bool(checkpoints(directory))
    except OSError as error:
        raise CheckpointError(f"No checkpoints can be read in {directory}: {error.strerror}.") from error


def _directory(job: Job) -> Path | None:
    section = job.checkpoint
    if section is None:
        return None
    return Path(section.directory) if section.directory is not None else job.out / "checkpoints"


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """What two jobs say differently, a line each."""
    before, after = (dict(named_leaves(x, lambda _, y: isinstance(y, Mapping))) for x in (then, now))
    for key in sorted(before.keys() | after.keys()):
        if before.get(key) != after.get(key):
            yield f"{key}: {_shown(before, key)} then, {_shown(after, key)} now"


def _shown(values: Mapping[str, Any], key: str) -> str:
    return json.dumps(values[key]) if key in values else "not given"


def _plain(raw: Mapping[str, Any]) -> Any:
    """A job's tables as JSON knows them."""
    return json.loads(json.dumps(raw, default=str))


# ---- what is in a folder of checkpoints


class Row(NamedTuple):
    """One checkpoint.

    Attributes:
        name: of its folder.
        cells: step, plan, ranks, tensors, bytes; empty where its index cannot be read.
        problem: why it cannot be loaded; None if it can.
    """

    name: str
    cells: tuple[str, ...]
    problem: str | None


HEAD: tuple[str, ...] = ("checkpoint", "step", "saved under", "ranks", "tensors", "bytes", "whole")


def rows(directory: Path, *, verify: bool = False) -> Iterator[Row]:
    """A row for each checkpoint, the one that was saved last first.

    Args:
        directory: one of them, or a folder of them.
        verify: compare all values with their checksums.

    Raises:
        ValueError: there are none.
    """
    if not directory.is_dir():
        raise ValueError(f"{directory} is no folder. Give one that engine.save, or espalier train, wrote to.")
    paths = [directory] if (directory / INDEX).exists() else checkpoints(directory)
    if not paths:
        raise ValueError(f"There is no checkpoint in {directory}.")
    for path in paths:
        cells: tuple[str, ...] = ()
        try:
            index = Checkpoint(path).index
            cells = (
                f"{index.step:,}",
                _plan(index.plan),
                str(index.ranks),
                f"{len(index.tensors):,}",
                readable_bytes(index.nbytes),
            )
            if verify:
                Checkpoint(path).verify()
        except CheckpointError as error:
            yield Row(path.name, cells, str(error))
        else:
            yield Row(path.name, cells, None)


def _plan(table: dict[str, object]) -> str:
    try:
        return str(Plan.from_dict(table))
    except PlanError:  # of a later version
        return ", ".join(f"{key} = {value}" for key, value in table.items())
