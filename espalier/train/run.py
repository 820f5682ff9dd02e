"""From a job to ranks that work on it, and back to one result or one clear error.

A rank is ``python -m espalier.train.rank ACTION FOLDER``. The folder is the parent's: it holds ``job.json``,
and takes rank 0's result or any rank's reason for giving up, so that the parent can tell it once and clearly.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch
from rich.console import Console

from espalier.faults.alike import same_on_all
from espalier.faults.watchdog import watched
from espalier.files import temporary_folder
from espalier.mesh.hosts import Hosts, Task
from espalier.mesh.launch import LaunchError, launch
from espalier.mesh.process import finish, outlive_terminal, start
from espalier.planner.compare import Measured, measure
from espalier.train.building import build_model, build_optimizer, check_buildable, count_of
from espalier.train.corpus import prepare
from espalier.train.data import check_data, training_batches
from espalier.train.job import Job
from espalier.train.metrics import Display, Lines, Progress
from espalier.train.runlog import tell_of_end
from espalier.train.trackers import check_installed
from espalier.train.trainer import Preempted, RunCheckpoints, TrainingError, train
from espalier.train.verify import verify

# ---- a job's plan, predicted and run: one beside the other


def measured(job: Job, steps: int, device_type: str | None = None) -> Measured | None:
    """Train the job's model for some steps on this rank, with its own data, from weights drawn at random.

    Args:
        device_type: on which; by default what the ranks have.

    Returns:
        What they took, on rank 0; None on the others.
    """
    import espalier

    dtype = getattr(torch, job.train.dtype)
    model = build_model(job.model, job.train.seed, dtype)
    optimizer = build_optimizer(job.optimizer, model)
    options: dict[str, Any] = {"max_grad_norm": job.clip, "count": count_of(job.model)}
    if device_type is not None:
        options["mesh"] = espalier.Mesh.from_env(job.plan.axes, device_type)
    engine = espalier.initialize(model, optimizer, job.plan, **options)
    sizes = {"size": job.train.batch_size, "sequence": job.train.sequence, "seed": job.train.seed}
    batches = training_batches(job, prepare(job), **sizes, dtype=dtype)
    step = 0

    def batch() -> list[Any]:
        nonlocal step
        step += 1
        return [
            engine.local_batch(batches.batch(step, rows), size)
            for rows, size in engine.micro_batches(batches.size)
        ]

    seconds = measure(engine, batch, steps)
    return seconds if engine.mesh.rank == 0 else None


# ---- ranks that work on a job

LEAVE = ("SIGTERM", "SIGUSR1", "SIGHUP")
"""Signals that ask a run to save and leave."""

PRINTED = "ranks"
"""Folder, in that of a run, with what ranks other than the first have printed."""

Action = Literal["train", "verify", "compare"]


class RunError(RuntimeError):
    """A run that failed; the message is for the user."""


def run(
    action: Action,
    job: Job,
    *,
    port: int | None = None,
    hosts: Hosts | Task | None = None,
    debug: bool = False,
    report: Callable[[str], None] = lambda message: None,
    **options: Any,
) -> Any:
    """Do ``action`` on as many ranks as the plan has.

    Within a world that torchrun started, this process is one of the ranks;
    otherwise the ranks are started here. A plan of one rank runs in this process.

    Args:
        action: what to do.
        job: validated.
        port: where the ranks meet; a free one when None.
        hosts: the machines that take part, each of which calls this with the same job, and has an equal
            number of the ranks; or the one rank that this process is; None for this machine alone.
        debug: let tracebacks through.
        report: told what takes time beforehand.
        options: of the action: ``resume``, for training; ``steps`` and ``device_type``, to compare.

    Returns:
        The `Summary`, `Preempted`, `Verification` or `Measured`; None on torchrun's ranks other than 0.

    Raises:
        ValueError: for what is wrong with the job's model, data or plan.
        RunError: when a rank gave up, with its reason.
        LaunchError: when a rank died or the ranks could not be started.
    """
    if action == "train":
        check_installed(job.train.track)
    check_buildable(job, report)
    if isinstance(hosts, Task):
        os.environ.update(hosts.environment)
        hosts = None
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return execute(action, job, **options)
    corpus = prepare(job, report)
    size, sequence = job.train.batch_size, job.train.sequence
    if action == "verify":
        size, sequence = job.verify.batch_size or size, job.verify.sequence or sequence
    check_data(job, corpus, size=size, sequence=sequence, validated=action == "train")
    if job.plan.world_size == 1 and hosts is None:
        return execute(action, job, **options)
    if hosts is not None and job.plan.world_size % hosts.nodes:
        raise ValueError(
            f"{job.plan.world_size} ranks cannot be shared out over {hosts.nodes} nodes: change the plan, or "
            "-n RANKS to a multiple"
        )
    return _launch(action, job, port, hosts, debug, report, options)


def _launch(
    action: Action,
    job: Job,
    port: int | None,
    hosts: Hosts | None,
    debug: bool,
    report: Callable[[str], None],
    options: dict[str, Any],
) -> Any:
    """Start the ranks, and again when one has died, as often as the job says."""
    plan = job.plan
    least = job.elastic.min_data or plan.data
    if action == "train" and not options.get("resume"):
        shutil.rmtree(job.out / PRINTED, ignore_errors=True)
    before: tuple[int | None, Path | None] | None = None
    left = job.elastic.restarts if action == "train" else 0
    began = time.time()
    while True:
        try:
            return _attempt(action, job, plan.world_size, port, hosts, debug, options)
        except LaunchError as error:
            if action != "train" or error.rank is None:
                raise
            if not left:
                newest = RunCheckpoints.newest(job)
                go_on = f"\nIts newest checkpoint is {newest}: go on with --resume." if newest else ""
                if (
                    error.exit_code == -signal.SIGKILL
                    or "allocate" in str(error)
                    or "OutOfMemory" in str(error)
                ):
                    go_on += f"\n{_MEMORY}"
                tell_of_end(job.out, "failed", f"{error}{go_on}", began)
                raise LaunchError(f"{error}{go_on}", error.rank, error.exit_code, error.folder) from None
            left -= 1
            now = error.rank, RunCheckpoints.newest(job)
            # it dies again before anything new was saved
            if now == before and plan.data > least and hosts is None:
                job = resized(job, plan.data - 1)
                plan = job.plan
            before = now
            options = {**options, "resume": True}
            words = (
                f"{error}\nStarting again on {plan.world_size} rank{'s' * (plan.world_size > 1)}, "
                f"{'from ' + now[1].name if now[1] else 'from the beginning'}; {left} more times if need be."
            )
            tell_of_end(job.out, "restart", words, began)
            report(words)


def _attempt(
    action: Action,
    job: Job,
    ranks: int,
    port: int | None,
    hosts: Hosts | None,
    debug: bool,
    options: dict[str, Any],
) -> Any:
    with temporary_folder() as folder:
        handed = {"raw": job.raw, "source": job.source, "debug": debug, "options": options}
        (folder / "job.json").write_text(json.dumps(handed, default=str), "utf-8")
        argv = ["-m", "espalier.train.rank", action, str(folder)]
        try:
            with _told_to_leave():
                here = ranks if hosts is None else ranks // hosts.nodes
                logs = job.out / PRINTED if action == "train" else None
                launch(argv, here, port=port, grace=job.faults.grace, signals=LEAVE, hosts=hosts, logs=logs)
        except (LaunchError, _Told, KeyboardInterrupt) as error:
            result = _result(folder)
            if isinstance(result, Preempted):
                return replace(result, interrupted=isinstance(error, KeyboardInterrupt))
            if isinstance(error, KeyboardInterrupt):
                raise
            if isinstance(error, _Told):
                signal.raise_signal(error.number)
                raise RunError(f"stopped by {signal.Signals(error.number).name}") from None
            reasons = sorted(folder.glob("gave-up-*"))
            if not reasons or (error.exit_code or 0) < 0:
                raise
            raise RunError(reasons[0].read_text("utf-8")) from None
        return _result(folder)


def _result(folder: Path) -> Any:
    path = folder / "result"
    return pickle.loads(path.read_bytes()) if path.exists() else None


_MEMORY = (
    "If memory ran out: `espalier dry` tells what a rank of the job needs; it needs less with a larger "
    'plan.accumulate, plan.zero = 3, plan.recompute = "full" or plan.precision = "bfloat16".'
)


class _Told(BaseException):
    """A signal came that asks to leave."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


@contextmanager
def _told_to_leave() -> Iterator[None]:
    """While open, a signal that asks to leave, and that was handed on to the ranks, is an exception."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def tell(number: int, frame: object) -> None:
        raise _Told(number)

    numbers = [getattr(signal, name) for name in LEAVE if hasattr(signal, name)]
    before = {n: signal.signal(n, tell) for n in numbers if signal.getsignal(n) is signal.SIG_DFL}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# ---- one rank

GAVE_UP = 3
"""Exit code of a rank that left its reason in the folder."""

PREEMPTED = 75
"""Exit code of a run that was asked to leave, saved, and left (sysexits.h: try again later)."""


_ONE_JOB = "Every machine needs the same job file, and the same options of the command."


def execute(action: str, job: Job, keep: Callable[[Any], None] | None = None, **options: Any) -> Any:
    """Do ``action`` on this rank; its result on rank 0, None elsewhere.

    Args:
        keep: called with the result before any rank leaves: once one has, all may be ended.
        options: of the action, as for :func:`run`.

    Raises:
        ValueError: when the job does not fit this world.
        TrainingError: when training cannot go on.
    """
    world = start(options.get("device_type")).world_size
    try:
        if job.faults.watch:
            watched(job.faults)
        else:
            os.environ["ESPALIER_FAULTS"] = "off"  # else the first mesh would begin one
        given = {name: str(value) for name, value in options.items()}
        same_on_all("the same job", {**job.raw, "options": given}, _ONE_JOB)
        return _done(action, job, keep, world, options)
    finally:
        finish()


def _done(
    action: str, job: Job, keep: Callable[[Any], None] | None, world: int, options: dict[str, Any]
) -> Any:
    if action == "train":
        job = fitted(job, world)
        if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) and job.checkpoint is not None:
            options["resume"] = True
    result = _ACTIONS[action](job, **options)
    if keep is not None:
        keep(result)
    return result


def fitted(job: Job, ranks: int) -> Job:
    """The job on so many ranks: with fewer than its plan has, the data axis shrinks as far as it may."""
    plan = job.plan
    others = plan.world_size // plan.data
    least = job.elastic.min_data
    if least is None or ranks >= plan.world_size or ranks % others or ranks // others < least:
        return job
    return resized(job, ranks // others)


def resized(job: Job, data: int) -> Job:
    """The job with another data axis."""
    return Job.from_dict({**job.raw, "plan": {**job.raw.get("plan", {}), "data": data}}, source=job.source)


def _train(job: Job, resume: bool = False) -> Any:
    console = Console()
    progress: Progress = Lines(job.train.steps, console, job.unit)
    if console.is_terminal and sys.stdout.isatty():  # a notebook's cell has colours, but nothing goes up
        progress = Display(job.train.steps, console, job.name, job.unit)
    return train(job, progress, resume=resume)


_ACTIONS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {"train": _train, "verify": verify, "compare": measured}
)


def main(argv: list[str]) -> int:
    """What a rank's process does; its exit code."""
    outlive_terminal()
    action, folder = argv[0], Path(argv[1])
    handed = json.loads((folder / "job.json").read_text("utf-8"))

    def keep(result: Any) -> None:
        if result is not None and os.environ.get("RANK", "0") == "0":
            (folder / "result").write_bytes(pickle.dumps(result))

    try:
        job = Job.from_dict(handed["raw"], source=handed["source"])
        result = execute(action, job, keep, **handed["options"])
    except (ValueError, TrainingError) as error:
        if handed["debug"]:
            raise
        (folder / f"gave-up-{os.environ.get('RANK', '0')}").write_text(str(error), "utf-8")
        return GAVE_UP
    return PREEMPTED if isinstance(result, Preempted) else 0
