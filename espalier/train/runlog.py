"""What a run leaves in its folder: its measurements, what happened to it, what it was, and the page of them.

======================= ====================================================================
file                    content
======================= ====================================================================
``metrics.jsonl``       a :class:`~espalier.train.metrics.Record` a line
``events.jsonl``        an :class:`~espalier.train.trackers.Event` a line: spikes, rollbacks, restarts
``run.json``            what does not change: plan, ranks, who holds what, versions, the job
``report.html``         all of it as one page, written anew as the run goes
======================= ====================================================================
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from espalier.comm.control import gather_objects, numbers_of_all
from espalier.files import write_file
from espalier.mesh import Mesh
from espalier.mesh.process import is_consequence
from espalier.texts import shown, whole
from espalier.train.facts import facts_of, held_by_kind, timeline_of
from espalier.train.metrics import Log, Record, peak_memory
from espalier.train.page import lines_of, write_page
from espalier.train.trackers import Callback, Event, trackers

_EVERY = 15.0  # seconds between two pages
_HEAD = ("run", "name", "status", "began", "updated")  # what ``run.json`` has beside the facts
_ENDS = ("finished", "left", "failed")
_LOOK = 1.0  # ...and between two looks at whose the folder is


class RunTaken(RuntimeError):
    """Another run has begun in the folder of this one."""


class RunUnwritten(ValueError):
    """What a run measures cannot be written to its folder."""


class RunLog:
    """Writes a run's folder, and tells callbacks. Of all ranks the first writes.

    >>> with RunLog("runs/mine", engine, tokens=16 * 128) as log:      # doctest: +SKIP
    ...     for batch in batches:
    ...         log.step(engine.train_step(batch), lr=1e-3)

    Args:
        folder: of the run; ``espalier watch FOLDER`` shows it while it goes.
        engine: from :func:`espalier.initialize`.
        name: by default that of the folder.
        steps: optimizer steps of the whole run, if known.
        tokens: of a global batch (or images), for tokens a second; ``unit``: what they are called.
        flops: floating-point operations of a step of the plain model, forward and backward, without what is
            computed again; by default 6 for each parameter and token.
        entropy: a loss to draw as a line, nats.
        job: what the run was asked to do, as the text of its file.
        every: steps between two records, in :meth:`step`.
        track: ``"tensorboard"``, ``"wandb"``, ``"mlflow"``, or several, as in a job's ``train.track``.
        callbacks: told beside.
        after: go on after that step: what is recorded of later ones goes.

    Attributes:
        records: so far.
        seconds: of training, up to the last record.
        first: whether this rank writes.
        facts: what ``run.json`` has, once the parameters are laid out; on the first rank.
    """

    def __init__(
        self,
        folder: str | Path,
        engine: Any,
        *,
        name: str | None = None,
        steps: int | None = None,
        tokens: int | None = None,
        unit: str = "tokens",
        flops: int | None = None,
        entropy: float | None = None,
        job: str | None = None,
        every: int = 10,
        track: str | Iterable[str] = (),
        callbacks: Sequence[Callback] = (),
        after: int = 0,
    ) -> None:
        if not hasattr(engine, "ledger") or not hasattr(engine, "mesh"):
            found = (
                "it is that model's .engine" if hasattr(engine, "engine") else "espalier.initialize gives one"
            )
            raise TypeError(
                f"RunLog(folder, engine): the engine is {shown(engine)}, expected an Engine: {found}."
            )
        whole("RunLog: every", every, 1)
        whole("RunLog: after", after)
        for what, count in (("steps", steps), ("tokens", tokens), ("flops", flops)):
            if count is not None:
                whole(f"RunLog: {what}", count)
        self.folder, self.engine = Path(folder), engine
        self.name, self.first = name or self.folder.resolve().name, engine.mesh.rank == 0
        self.tokens, self.every, self.job = tokens, every, job
        self._known: dict[str, Any] = {"steps": steps, "tokens": tokens, "flops": flops, "entropy": entropy}
        self._known |= {"job": job, "unit": unit}
        self._callbacks = [*trackers(track), *callbacks]
        engine.pulse.farewells.add(self)
        try:
            self._log = Log(self.folder, self.first, after)
        except OSError as error:
            said = f"{self.folder} cannot be a run's folder: {error.strerror}. Name another."
            raise RunUnwritten(said) from error
        # those that were known, until a step tells anew: none may be left to do
        known = _head(self.folder) if self.first and after else {}
        self.facts: dict[str, Any] = {key: fact for key, fact in known.items() if key not in _HEAD}
        self._status, self._written, self._page, self._elapsed = "running", 0, 0.0, 0.0
        self._began, self._looked = str(known.get("began", _now())), -_LOOK
        self._own = f"process {os.getpid()} on {socket.gethostname()}, {uuid.uuid4().hex[:8]}"
        if self.first and not after:
            for name in ("events.jsonl", "run.json"):
                (self.folder / name).unlink(missing_ok=True)
        for callback in self._callbacks:
            callback.begin(self)

    @property
    def records(self) -> list[Record]:
        """So far."""
        return self._log.records

    @property
    def seconds(self) -> float:
        """Of training, up to the last record."""
        return self._log.seconds

    def step(
        self, loss: torch.Tensor | float, *, lr: float | None = None, val_loss: float | None = None
    ) -> Record | None:
        """A step of training is done (every rank must call); what was measured, where it was time for it.

        Args:
            loss: of the global batch.
            lr: that was used; by default that of the optimizer's first group.
            val_loss: where it was measured after this step.
        """
        self._log.counted += 1
        step = self.engine.steps
        if step != 1 and step % self.every and val_loss is None:
            return None
        value, sent = float(loss), self.engine.ledger().by_axis()
        held = held_by_kind(self.engine) if self.keeps(val_loss is not None) else None
        return self.write(step, value, lr=lr, val_loss=val_loss, sent=sent, held=held)

    def count(self) -> None:
        """A step is done that may not be measured."""
        self._log.counted += 1

    def stop(self) -> None:
        """The time of the steps since the last record ends here, whatever is done before they are written."""
        self._elapsed = self._elapsed or time.perf_counter() - self._log.marked

    def keeps(self, validated: bool) -> bool:
        """Whether the next record is one that tells memory by kind: the first two, and validated ones."""
        return validated or self._written < 2  # not by records: of a resumed run only the first rank has them

    def write(
        self,
        step: int,
        loss: float,
        *,
        lr: float | None = None,
        val_loss: float | None = None,
        metrics: Mapping[str, float] | None = None,
        norm: float | None = None,
        sent: Mapping[str, int] | None = None,
        held: Mapping[str, int] | None = None,
    ) -> Record:
        """Record a step (every rank must call).

        Args:
            metrics: what else was measured, by name.
            norm: of the gradient; by default the engine's.
            sent: bytes that this rank sent in it, by axis.
            held: bytes of this rank by kind (see :meth:`held`), on all ranks or on none; a pipeline's
                timeline is kept with them.

        Raises:
            RunTaken: on the first rank, where another run has begun in the folder.
            RunUnwritten: on the first rank, where the folder cannot be written to: a full disk.
        """
        engine, log = self.engine, self._log
        self.stop()
        elapsed, self._elapsed = self._elapsed, 0.0
        log.seconds += elapsed
        if norm is None and engine.grad_norm is not None:
            norm = float(engine.grad_norm)
        if lr is None:
            lr = float(engine.optimizer.param_groups[0]["lr"])
        tokens = (self.tokens or 0) * log.counted / elapsed
        record = Record(
            step=step,
            loss=loss,
            grad_norm=norm,
            lr=lr,
            tokens_per_second=tokens,
            seconds=log.seconds,
            memory=gather_memory(engine.mesh),
            sent=dict(sent or {}),
            val_loss=val_loss,
            metrics=dict(metrics or {}),
            held={} if held is None else _by_kind(gather_objects(dict(held), engine.mesh)),
        )
        if not self._written:  # the parameters lie from the first step on
            self.facts.update(facts_of(engine, self._known))
        if held is not None and engine.plan.pipe > 1:
            self.facts["timeline"] = timeline_of(engine)
        if self.first and self._written:
            self._keep(val_loss is not None)
        with self._writing():
            log.write(record)
        self._written += 1
        for callback in self._callbacks:
            callback.record(record)
        self._show(val_loss is not None)
        log.mark()
        return record

    def event(self, kind: str, text: str) -> None:
        """Note that something happened (every rank must call)."""
        event = Event(kind, text, self.engine.steps, _now())
        if self.first:
            append(self.folder, event)
        for callback in self._callbacks:
            callback.event(event)

    def back_to(self, step: int) -> None:
        """Forget what was recorded after a step; the time it took stays counted."""
        self._log.back_to(step)

    def close(self, status: str = "finished", **more: Any) -> None:
        """End the run: write the page for the last time.

        Args:
            status: ``"finished"``, ``"left"`` or ``"failed"``.
            more: further facts, for ``run.json``.
        """
        if status not in _ENDS:
            raise ValueError(f"RunLog.close: status is {shown(status)}, expected one of {', '.join(_ENDS)}.")
        self.facts.update(more)
        self._end(status)
        self._show(True)

    def _end(self, status: str) -> None:
        if self._status == "running":
            self._status = status
            self._log.close()
            for callback in self._callbacks:
                callback.end(status)

    def _keep(self, now: bool) -> None:
        """Keep the folder, if it is time to look: where two runs go on in one, the later has it.

        Torch's rendezvous forgets for good a host that gave no sign of life for a while, and lets a host that
        joins then begin by itself, beside it.
        """
        if not self._is_time(now) and time.monotonic() - self._looked <= _LOOK:
            return
        self._looked = time.monotonic()
        whose = _head(self.folder).get("run", self._own)
        if whose != self._own:
            self._end("left")
            raise RunTaken(
                f"another run has begun in {self.folder} ({whose}). This one ends: both would write over "
                "each other"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """End the run with an error."""
        if self._status != "running":
            return
        status = "left" if isinstance(error, KeyboardInterrupt | SystemExit) else "failed"
        verdict = self.engine.pulse.verdict_on(error)
        if verdict is not None and not self.first:
            self.farewell(verdict.ranks, verdict.text)
        with contextlib.suppress(OSError, RunUnwritten):  # the error is to be told, not one more
            if self.first:
                said = str(error).strip() if verdict is None else verdict.text
                append(self.folder, Event(status, said or type(error).__name__, self.engine.steps, _now()))
            self.close(status)

    def farewell(self, gone: Collection[int], text: str) -> None:
        """Tell that the run failed, if no rank before this one is there to do so.

        Args:
            gone: ranks of the world that cannot.
        """
        mesh = self.engine.mesh
        if self._status == "running" and [r for r in mesh.ranks if r not in gone][:1] == [mesh.world_rank]:
            self._status = "failed"
            with contextlib.suppress(OSError):
                tell_of_end(self.folder, "failed", text)

    def _is_time(self, now: bool) -> bool:
        return now or time.monotonic() - self._page > _EVERY or self._written < 3

    def _show(self, now: bool) -> None:
        """Write ``run.json`` and the page, if it is time."""
        if not self.first or not self._is_time(now):
            return
        self._page = time.monotonic()
        head = dict(zip(_HEAD, (self._own, self.name, self._status, self._began, _now()), strict=True))
        text = json.dumps({**head, **self.facts}, default=str)
        with self._writing():
            write_file(self.folder / "run.json", text.encode(), last=False)
            write_page(self.folder)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RunUnwritten(
                f"What is measured cannot be written to {self.folder}: {error.strerror}. Checkpoints that"
                " were saved are as they were: make space, and go on from the newest (--resume)."
            ) from error


def is_finished(folder: Path) -> bool:
    """Whether the run in a folder has come to its end, and left its results."""
    return bool(_head(folder).get("status") == "finished")


def _head(folder: Path) -> dict[str, Any]:
    """What ``run.json`` says; nothing where it cannot be read."""
    with contextlib.suppress(OSError, ValueError):
        return dict(json.loads((folder / "run.json").read_text("utf-8")))
    return {}


def append(folder: Path, event: Event) -> None:
    """Add an event to a run's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "events.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(event)) + "\n")


def tell_of_end(folder: Path, kind: str, text: str, since: float = 0.0) -> None:
    """Add why ranks have ended, in place of what those said that lost their connections by it.

    Args:
        kind: ``"failed"``, which the run is from now on, or ``"restart"``.
        text: why.
        since: (as ``time.time()`` counts) nothing is said of a run that was written to before it alone.
    """
    written = [
        path.stat().st_mtime for name in ("run.json", "metrics.jsonl") if (path := folder / name).is_file()
    ]
    if max(written, default=-1.0) < since:
        return
    head, events = {"name": folder.resolve().name, **_head(folder)}, list(lines_of(folder / "events.jsonl"))
    step = max((int(x["step"]) for x in lines_of(folder / "metrics.jsonl")), default=0)
    if events and events[-1]["kind"] == "failed":
        last = events.pop()
        if not is_consequence(last["text"]) and last["text"] not in text:
            return  # it has said it itself
        step = last["step"]
    events.append(asdict(Event(kind, text, step, _now())))
    write_file(folder / "events.jsonl", "".join(json.dumps(x) + "\n" for x in events).encode(), last=False)
    if kind == "failed":
        facts = json.dumps({**head, "status": kind, "updated": _now()}, default=str)
        write_file(folder / "run.json", facts.encode(), last=False)
    write_page(folder)


def gather_memory(mesh: Mesh) -> tuple[int, ...]:
    """Peak memory in bytes of every rank, in the order of ranks; every rank must call it."""
    return tuple(count for (count,) in numbers_of_all([peak_memory(mesh.device())], mesh))


def _by_kind(held: Sequence[Mapping[str, int]]) -> dict[str, tuple[int, ...]]:
    """Each rank's bytes by kind, as each kind's by rank."""
    kinds = dict.fromkeys(kind for of in held for kind in of)
    return {kind: tuple(of.get(kind, 0) for of in held) for kind in kinds}


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
