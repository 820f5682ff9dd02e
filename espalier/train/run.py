"""From a job to ranks that work on it, and back to one result or one clear error."""

import json
import os
import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from espalier.mesh.launch import LaunchError, launch
from espalier.train.build import check_buildable
from espalier.train.data import prepare
from espalier.train.job import Job
from espalier.train.worker import execute

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
        The `Summary` or `Verification`; None on torchrun's ranks other than 0.

    Raises:
        ValueError: for what is wrong with the job's model, data or plan.
        RunError: when a rank gave up, with its reason.
        LaunchError: when a rank died or the ranks could not be started.
    """
    import espalier

    check_buildable(job)
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return execute(action, job, **options)
    prepare(job, report)
    ranks = espalier.Plan.from_dict(dict(job.plan)).world_size
    if ranks == 1:
        return execute(action, job, **options)
    return _launch(action, job, ranks, port, debug, options)


def _launch(
    action: Action, job: Job, ranks: int, port: int | None, debug: bool, options: dict[str, Any]
) -> Any:
    with tempfile.TemporaryDirectory(prefix="espalier-run-") as name:
        folder = Path(name)
        handed = {"raw": job.raw, "source": job.source, "debug": debug, "options": options}
        (folder / "job.json").write_text(json.dumps(handed, default=str), "utf-8")
        try:
            launch(["-m", "espalier.train.worker", action, name], ranks, port=port)
        except LaunchError as error:
            reasons = sorted(folder.glob("gave-up-*"))
            if not reasons or (error.exit_code or 0) < 0:
                raise
            raise RunError(reasons[0].read_text("utf-8")) from None
        return pickle.loads((folder / "result").read_bytes())
