"""The job of a command, on as many ranks as it is given."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def load(path: Path, overrides: list[str], ranks: int | None) -> Any:
    """Load a job, its data axis sized so that the plan has ``ranks`` ranks, where a number is given.

    Raises:
        ValueError: when the job has mistakes or its other axes do not divide ``ranks``.
    """
    from espalier.train.job import Job

    job = Job.load(path, overrides)
    if job.auto:
        from espalier.train.foresight import planned

        return planned(job, ranks)
    plan = job.plan
    if ranks is None or ranks == plan.world_size:
        return job
    others = plan.world_size // plan.data
    if ranks % others:
        rest = " × ".join(
            f"{name} {size}"
            for name, size in plan.axes.items()
            if name not in ("data", "expert") and size > 1
        )
        below = ranks - ranks % others
        near = [str(n) for n in (below, below + others) if n]
        raise ValueError(
            f"-n {ranks} does not fit the plan of {path}: its other axes ({rest}) multiply to {others}, so "
            f"it must be a multiple of {others}, as {' or '.join(near)}; or change the plan, "
            "--set plan.<axis>=<size>"
        )
    return Job.load(path, [*overrides, f"plan.data={ranks // others}"])
