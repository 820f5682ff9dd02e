"""The training loop behind the command line; every rank runs it."""

import json
import math
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from espalier.comm import all_gather, ledger
from espalier.engine import SpikeError, UnseenCountError
from espalier.engine.pipeline import PipelineEngine
from espalier.mesh import Mesh
from espalier.models import generate
from espalier.parallel.pipeline import Timeline
from espalier.parallel.pipeline.draw import draw
from espalier.train.build import build_model, build_optimizer, build_schedule, count_of
from espalier.train.data import Batches, prepare, training_batches, validation_batches
from espalier.train.job import Job
from espalier.train.keeping import Keeper
from espalier.train.memory import peak_memory
from espalier.train.metrics import Log, Record, draw_loss
from espalier.train.progress import Progress, Silent
from espalier.train.text import Text


class TrainingError(RuntimeError):
    """Training cannot go on; the message says why and what to try."""


@dataclass(frozen=True)
class Preempted:
    """A run that was asked to leave (SIGTERM, SIGUSR1), and has.

    Attributes:
        step: the last that was done.
        saved: the checkpoint of it; empty where the job saves none.
    """

    step: int
    saved: str


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


def train(job: Job, progress: Progress | None = None, *, resume: bool = False) -> Summary | Preempted | None:
    """Train the job's model on this rank.

    Args:
        job: what to train.
        progress: told how it goes; only rank 0's is used.
        resume: go on from the job's newest checkpoint, if there is one.

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
    plan = espalier.Plan.from_dict(dict(job.plan))
    given: dict[str, Any] = {"max_grad_norm": job.clip, "count": count_of(job.model)}
    given["spikes"] = None if job.spikes is None else espalier.Spikes(**job.spikes.model_dump())
    engine = espalier.initialize(model, optimizer, plan, **given)
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
    )
    with engine.pulse.signals.saving():
        records = loop.run(resume=resume)
        engine.wait_saved()
    if loop.left is not None:
        return loop.left
    engine.export(job.out / "model.safetensors", metadata={"job": json.dumps(job.raw, default=str)})
    timeline = engine.timeline() if isinstance(engine, PipelineEngine) else None
    if not first:
        return None
    return _finish(job, text, records, parameters, engine.mesh.size(), timeline)


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
    """

    def __init__(
        self,
        job: Job,
        engine: Any,
        model: nn.Module,
        schedule: LambdaLR,
        batches: Batches,
        validation: Batches,
        progress: Progress,
    ) -> None:
        self._job = job
        self._engine = engine
        self._model = model
        self._schedule = schedule
        self._batches = batches
        self._validation = validation
        self._progress = progress
        self._keeper = Keeper(job, engine, schedule, progress)
        self.left: Preempted | None = None

    def run(self, *, resume: bool = False) -> list[Record]:
        """Do all steps; return the records, which rank 0 also writes to ``metrics.jsonl``.

        Args:
            resume: those after the newest checkpoint.
        """
        log = Log(self._job.out, self._engine.mesh.rank == 0, self._begin(resume))
        engine, steps, rollbacks = self._engine, self._job.train.steps, 0
        try:
            with self._progress:
                while engine.steps < steps and self.left is None:
                    try:
                        self._one(engine.steps + 1, log)
                    except SpikeError as spike:
                        rollbacks += 1
                        self._roll_back(spike, rollbacks, log)
                        continue
                    if engine.pulse.to_leave(engine.steps) and engine.steps < steps:
                        self.left = Preempted(engine.steps, str(self._keeper.save() or ""))
        finally:
            log.close()
        return log.records

    def _one(self, step: int, log: Log) -> None:
        """A step, and what is written of it."""
        settings = self._job.train
        last = step == settings.steps
        evaluate = last or (settings.eval_every > 0 and step % settings.eval_every == 0)
        due = step == 1 or evaluate or step % settings.log_every == 0
        rate = float(self._schedule.get_last_lr()[0])
        loss, made, sent = self._step(step, due)
        log.counted += 1
        if due and (made or last):
            value = self._finite(loss, step, log.records) if made else math.nan
            elapsed = time.perf_counter() - log.marked
            log.seconds += elapsed
            record = Record(
                step=step,
                loss=value,
                grad_norm=self._norm(),
                lr=rate,
                tokens_per_second=log.counted * self._tokens_per_batch() / elapsed,
                seconds=log.seconds,
                memory=gather_memory(self._engine.mesh),
                sent=sent,
                val_loss=self._evaluate() if evaluate else None,
            )
            log.write(record)
            self._progress.show(record)
        self._keeper.after(step, self._batches.size)

    def _roll_back(self, spike: SpikeError, times: int, log: Log) -> None:
        """Load the last checkpoint, and leave the batch of the spike out.

        Raises:
            TrainingError: the job wants to stop, there is no checkpoint, or it was too often.
        """
        told = f"step {spike.step}: {spike}"
        limit = None if self._job.spikes is None else self._job.spikes.limit
        if not spike.rollback or limit is None:
            raise TrainingError(told) from spike
        if times > limit:
            raise TrainingError(f"{told}. That was rollback {times}: spikes.limit = {limit}") from spike
        if not self._keeper.roll_back():
            raise TrainingError(f"{told}. There is no checkpoint yet to roll back to") from spike
        self._keeper.barred.add(spike.step)
        log.back_to(self._engine.steps)
        self._progress.say(f"{told}; back to step {self._engine.steps}, and on without that batch")

    def _begin(self, resume: bool) -> int:
        """Start, or take up what was saved; gives the number of steps done."""
        engine, steps = self._engine, self._job.train.steps
        if not resume:
            self._keeper.begin()
        if resume or self._job.weights is not None:
            rows, size = engine.micro_batches(self._batches.size)[0]
            engine.lay_out(engine.local_batch(self._batches.batch(1, rows), size))
        if self._job.weights is not None:  # also where there is nothing to resume yet
            engine.load_weights(self._job.weights)
        if not resume:
            return 0
        self._keeper.resume()
        done: int = engine.steps
        if done >= steps:
            raise ValueError(
                f"The checkpoint is of step {done}, and train.steps = {steps}: there is nothing left to do. "
                "To train on, give more: --set train.steps=..."
            )
        return done

    def _step(self, step: int, count: bool) -> tuple[torch.Tensor, bool, dict[str, int]]:
        """The loss of a step, whether it was made or left out, and the bytes sent along each axis."""
        engine = self._engine
        engine.pulse.step = step
        if step in self._keeper.barred:
            engine.steps = step
            self._schedule.step()
            return torch.tensor(math.nan), False, {}
        with ledger(engine.mesh) if count else nullcontext() as book:
            engine.accumulate(
                engine.local_batch(self._batches.batch(step, rows), size)
                for rows, size in engine.micro_batches(self._batches.size)
            )
            try:
                engine.step()
            except SpikeError:
                raise
            except FloatingPointError as error:
                raise TrainingError(f"step {step}: {error}") from error
        self._schedule.step()
        told = "" if engine.guard is None else engine.guard.told
        if told:
            self._progress.say(f"step {step} is left out: {told}")
        return engine.loss, not told, book.by_axis() if book is not None else {}

    def _evaluate(self) -> float:
        self._model.eval()
        try:
            loss = float(self._engine.evaluate(self._validation_parts()))
        except UnseenCountError:  # batches weigh alike, then; nobody trains in micro-batches so
            with torch.no_grad():
                losses = [self._engine(part).item() for part in self._validation_parts()]
            loss = sum(losses) / len(losses)
        self._model.train()
        return loss

    def _validation_parts(self) -> Iterator[Any]:
        engine, batches = self._engine, self._validation
        for step in range(self._job.train.eval_batches):
            for rows, size in engine.micro_batches(batches.size):
                yield engine.local_batch(batches.batch(step, rows), size)

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
        images = self._job.facts.image is not None
        return self._batches.size * (1 if images else self._job.train.sequence)


def gather_memory(mesh: Mesh) -> tuple[int, ...]:
    """Peak memory in bytes of every rank, in the order of ranks; every rank must call it."""
    values = torch.tensor([peak_memory(mesh.device())], dtype=torch.int64, device=mesh.device())
    for axis in reversed(range(mesh.ndim)):
        values = all_gather(values, mesh, axis, 0, values.numel() * mesh.shape[axis])
    return tuple(values.tolist())


def _finish(
    job: Job,
    text: Text | None,
    records: list[Record],
    parameters: int,
    ranks: int,
    timeline: Timeline | None,
) -> Summary:
    """Write the results; on rank 0 only."""
    out, last = job.out, records[-1]
    assert last.val_loss is not None
    entropy = None if text is None else text.entropy
    files = {"metrics": str(out / "metrics.jsonl"), "loss": str(out / "loss.png")}
    draw_loss(out / "loss.png", records, entropy, f"{job.name}, {_describe(job, ranks)}")
    files["model"] = str(out / "model.safetensors")
    sample = None
    if text is not None:
        text.tokenizer.save(str(out / "tokenizer.json"))
        files["tokenizer"] = str(out / "tokenizer.json")
        if job.train.sample_tokens and job.facts.labels in ("next", "same"):
            sample = _sample(job, text)
            files["sample"] = str(out / "sample.txt")
            Path(files["sample"]).write_text(sample, "utf-8")
    bubble = None
    if timeline is not None:
        files["timeline"] = str(out / "timeline.svg")
        draw(files["timeline"], {"predicted": timeline.predicted(), "measured": timeline})
        bubble = timeline.bubble_fraction, timeline.predicted().bubble_fraction
    return Summary(
        last.loss, last.val_loss, entropy, parameters, last.step, last.seconds, ranks, sample, files, bubble
    )


def _sample(job: Job, text: Text) -> str:
    """Text written by the plain model with the trained weights: the layout is gone from it."""
    from safetensors.torch import load_file

    model = job.model.build()
    model.load_state_dict(load_file(job.out / "model.safetensors"))
    tokenizer = text.tokenizer
    prompt = torch.tensor([tokenizer.encode(job.train.prompt).ids])
    ids = generate(
        model,
        prompt,
        job.train.sample_tokens,
        temperature=job.train.temperature,
        top_k=50,
        generator=torch.Generator().manual_seed(job.train.seed),
        max_positions=job.train.sequence,
    )
    return str(tokenizer.decode(ids[0].tolist()))


def _describe(job: Job, ranks: int) -> str:
    axes = " × ".join(f"{axis} {size}" for axis, size in job.plan.items() if isinstance(size, int))
    count = f"{ranks} rank{'' if ranks == 1 else 's'}"
    return f"{count}: {axes}" if axes else count


def _number(value: Any) -> float | None:
    return None if value is None else float(value)
