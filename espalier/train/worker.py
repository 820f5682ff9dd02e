"""One rank of a run: ``python -m espalier.train.worker ACTION FOLDER``.

The folder is the parent's: it holds ``job.json``, and takes rank 0's result or
any rank's reason for giving up, so that the parent can tell it once and clearly.
"""

import json
import os
import pickle
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rich.console import Console

from espalier.comm.watch import watched
from espalier.mesh.process import finish, start
from espalier.parallel import Plan
from espalier.train.job import Job
from espalier.train.progress import Display, Lines, Progress
from espalier.train.trainer import Preempted, TrainingError, train
from espalier.train.verify import verify

GAVE_UP = 3
"""Exit code of a rank that left its reason in the folder."""

PREEMPTED = 75
"""Exit code of a run that was asked to leave, saved, and left (sysexits.h: try again later)."""


def execute(action: str, job: Job, **options: Any) -> Any:
    """Do ``action`` on this rank; its result on rank 0, None elsewhere.

    Args:
        options: of the action: ``resume``, for training.

    Raises:
        ValueError: when the job does not fit this world.
        TrainingError: when training cannot go on.
    """
    world = start().world_size
    if job.faults.watch:
        watched(job.faults.settings)
    else:
        os.environ["ESPALIER_FAULTS"] = "off"  # else the first mesh would begin one
    if action == "train":
        job = fitted(job, world)
        if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) and job.checkpoint is not None:
            options["resume"] = True
    try:
        return _ACTIONS[action](job, **options)
    finally:
        finish()


def fitted(job: Job, ranks: int) -> Job:
    """The job on so many ranks: with fewer than its plan has, the data axis shrinks as far as it may."""
    plan = Plan.from_dict(dict(job.plan))
    others = plan.world_size // plan.data
    least = job.elastic.min_data
    if least is None or ranks >= plan.world_size or ranks % others or ranks // others < least:
        return job
    return resized(job, ranks // others)


def resized(job: Job, data: int) -> Job:
    """The job with another data axis."""
    return Job.from_dict({**job.raw, "plan": {**job.plan, "data": data}}, source=job.source)


def _train(job: Job, resume: bool = False) -> Any:
    console = Console()
    progress: Progress = Lines(job.train.steps, console)
    if console.is_terminal:
        progress = Display(job.train.steps, console, job.name)
    return train(job, progress, resume=resume)


_ACTIONS: Mapping[str, Callable[..., Any]] = MappingProxyType({"train": _train, "verify": verify})


def main(argv: list[str]) -> int:
    """Run as a process; the exit code."""
    action, folder = argv[0], Path(argv[1])
    handed = json.loads((folder / "job.json").read_text("utf-8"))
    try:
        result = execute(action, Job.from_dict(handed["raw"], source=handed["source"]), **handed["options"])
    except (ValueError, TrainingError) as error:
        if handed["debug"]:
            raise
        (folder / f"gave-up-{os.environ.get('RANK', '0')}").write_text(str(error), "utf-8")
        return GAVE_UP
    if isinstance(result, Preempted):
        if os.environ.get("RANK", "0") == "0":
            (folder / "result").write_bytes(pickle.dumps(result))
        return PREEMPTED
    if result is not None:
        (folder / "result").write_bytes(pickle.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
