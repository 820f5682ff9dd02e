"""From a job to ranks that work on it, and back to one result or one clear error."""

import json
import os
import pickle
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from espalier.mesh.launch import LaunchError, launch
from espalier.parallel import Plan
from espalier.train.build import check_buildable
from espalier.train.data import prepare
from espalier.train.job import Job
from espalier.train.keeping import Keeper
from espalier.train.trainer import Preempted
from espalier.train.worker import execute, resized

LEAVE = ("SIGTERM", "SIGUSR1")
"""Signals that ask a run to save and leave."""

Action = Literal["train", "verify"]


class RunError(RuntimeError):
    """A run that failed; the message is for the user."""


def run(
    action: Action,
    job: Job,
    *,
    port: int | None = None,
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
        debug: let tracebacks through.
        report: told what takes time beforehand.
        options: of the action: ``resume``, for training.

    Returns:
        The `Summary`, `Preempted` or `Verification`; None on torchrun's ranks other than 0.

    Raises:
        ValueError: for what is wrong with the job's model, data or plan.
        RunError: when a rank gave up, with its reason.
        LaunchError: when a rank died or the ranks could not be started.
    """
    check_buildable(job)
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return execute(action, job, **options)
    prepare(job, report)
    if Plan.from_dict(dict(job.plan)).world_size == 1:
        return execute(action, job, **options)
    return _launch(action, job, port, debug, report, options)


def _launch(
    action: Action,
    job: Job,
    port: int | None,
    debug: bool,
    report: Callable[[str], None],
    options: dict[str, Any],
) -> Any:
    """Start the ranks, and again when one has died, as often as the job says."""
    plan = Plan.from_dict(dict(job.plan))
    least = job.elastic.min_data or plan.data
    before: tuple[int | None, Path | None] | None = None
    left = job.elastic.restarts if action == "train" else 0
    while True:
        try:
            return _attempt(action, job, plan.world_size, port, debug, options)
        except LaunchError as error:
            if not left or error.rank is None:
                raise
            left -= 1
            now = error.rank, Keeper.newest(job)
            if now == before and plan.data > least:  # it dies again before anything new was saved
                job = resized(job, plan.data - 1)
                plan = Plan.from_dict(dict(job.plan))
            before = now
            options = {**options, "resume": True}
            report(
                f"{error}\nStarting again on {plan.world_size} rank{'s' * (plan.world_size > 1)}, "
                f"{'from ' + now[1].name if now[1] else 'from the beginning'}; {left} more times if need be."
            )


def _attempt(
    action: Action, job: Job, ranks: int, port: int | None, debug: bool, options: dict[str, Any]
) -> Any:
    with tempfile.TemporaryDirectory(prefix="espalier-run-") as name:
        folder = Path(name)
        handed = {"raw": job.raw, "source": job.source, "debug": debug, "options": options}
        (folder / "job.json").write_text(json.dumps(handed, default=str), "utf-8")
        argv = ["-m", "espalier.train.worker", action, name]
        try:
            with _told_to_leave():
                launch(argv, ranks, port=port, grace=job.faults.grace, signals=LEAVE)
        except (LaunchError, _Told) as error:
            result = _result(folder)
            if isinstance(result, Preempted):
                return result
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
