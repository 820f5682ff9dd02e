"""The job of a command, on as many ranks as it is given."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def load(path: Path, overrides: list[str], ranks: int | None, *, resume: bool = False) -> Any:
    """Load a job, its data axis sized so that the plan has ``ranks`` ranks, where a number is given.

    Args:
        resume: whether it must have checkpoints to go on from.

    Raises:
        ValueError: when the job has mistakes or its other axes do not divide ``ranks``.
    """
    from espalier.train.job import Job

    job = Job.load(path, overrides, ranks=ranks, resume=resume)
    if job.auto:
        from espalier.train.foresight import planned

        return planned(job, ranks)
    return job
