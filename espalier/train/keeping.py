"""A run's checkpoints: saved as it goes, and taken up again by ``espalier train --resume``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch.optim.lr_scheduler import LambdaLR

from espalier.checkpoint import checkpoints, newest
from espalier.comm.words import words_of_all
from espalier.train.job import Job
from espalier.train.progress import Progress
from espalier.trees import named_leaves


class Keeper:
    """Saves a run every so many steps, and once more at its end.

    Args:
        job: of which ``[checkpoint]`` says where and when; without that table nothing is saved.
        engine: from ``espalier.initialize``.
        schedule: of the learning rate.
        progress: told what was resumed.

    Attributes:
        barred: steps whose batches are left out, after a rollback.
    """

    def __init__(self, job: Job, engine: Any, schedule: LambdaLR, progress: Progress) -> None:
        self._job, self._engine, self._schedule, self._progress = job, engine, schedule, progress
        self._samples = 0
        self.barred: set[int] = set()
        self._saved: dict[str, Any] = {}
        self._kept: tuple[int, Path] | None = None

    def resume(self) -> None:
        """Go on from the newest whole checkpoint, if there is one.

        Raises:
            ValueError: the job has no table ``[checkpoint]``, or what it trains differs from what was saved.
            CheckpointError: a file is damaged.
        """
        directory = self._directory()
        if directory is None:
            raise ValueError("--resume: the job has no table [checkpoint], so it saves none. Add one.")
        mesh = self._engine.mesh
        found = words_of_all(newest(directory) if mesh.rank == 0 else None, mesh)[0]
        if found is None:
            self._progress.say(f"no checkpoint in {directory}: starting at the beginning")
            return
        engine = self._engine
        self._load(directory)
        saved = self._saved
        self._progress.say(f"resumed after step {engine.steps}, {self._samples:,} samples")
        lines = list(differences(saved["job"], _plain(self._job.raw)))
        self._take_options(saved["job"].get("optimizer", {}))
        if lines:
            self._progress.say("\n  ".join(["this job is not the one that was saved:", *lines]))

    def roll_back(self) -> bool:
        """Go back to the last checkpoint; whether there is one."""
        directory, mesh = self._directory(), self._engine.mesh
        self._engine.wait_saved()
        found = newest(directory) if directory is not None and mesh.rank == 0 else None
        if directory is None or words_of_all(found, mesh)[0] is None:
            return False
        self._load(directory)
        return True

    def _load(self, directory: Path) -> None:
        self._saved = self._engine.load(directory, schedule=self._schedule)
        self._samples = self._saved["samples"]
        self.barred |= set(self._saved.get("barred", ()))
        if self._engine.guard is not None and "guard" in self._saved:
            self._engine.guard.load_state_dict(self._saved["guard"])

    def begin(self) -> None:
        """Start a run of its own.

        Raises:
            ValueError: the folder has another run's checkpoints.
        """
        directory = self._directory()
        if directory is not None and directory.is_dir() and (found := checkpoints(directory)):
            raise ValueError(
                f"{directory} has checkpoints of an earlier run (the newest is {found[0].name}). Go on with "
                "that by --resume, name another folder by --set checkpoint.directory=..., or remove them."
            )

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
        arguments = self._job.optimizer.arguments
        for key in sorted(now.keys() | saved.keys()):
            if now.get(key) == saved.get(key) or key not in arguments:
                continue
            for group in self._engine.optimizer.param_groups:
                group["initial_lr" if key == "lr" else key] = arguments[key]
        rate = self._schedule.lr_lambdas[0](self._schedule.last_epoch)
        self._schedule.base_lrs = [g["initial_lr"] for g in self._engine.optimizer.param_groups]
        self._schedule._last_lr = [base * rate for base in self._schedule.base_lrs]
        for group, lr in zip(self._engine.optimizer.param_groups, self._schedule._last_lr, strict=True):
            group["lr"] = lr


def _directory(job: Job) -> Path | None:
    section = job.checkpoint
    if section is None:
        return None
    return Path(section.directory) if section.directory is not None else job.out / "checkpoints"


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """What two jobs say differently, a line each."""
    before, after = (dict(named_leaves(x, lambda y: isinstance(y, Mapping))) for x in (then, now))
    for key in sorted(before.keys() | after.keys()):
        if before.get(key) != after.get(key):
            yield f"{key}: {_shown(before, key)} then, {_shown(after, key)} now"


def _shown(values: Mapping[str, Any], key: str) -> str:
    return json.dumps(values[key]) if key in values else "not given"


def _plain(raw: Mapping[str, Any]) -> Any:
    """A job's tables as JSON knows them."""
    return json.loads(json.dumps(raw, default=str))
