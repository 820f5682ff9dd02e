"""DeepSpeed's folders of checkpoints: ``latest`` names the one to go on from, a folder of its tag holds it.

What is in there is Espalier's own, which loads under any plan. Folders that DeepSpeed wrote are read too.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from espalier.checkpoint import newest
from espalier.checkpoint.folder import SEAL
from espalier.checkpoint.zero_files import is_zero, run_of
from espalier.comm.control import gather_objects
from espalier.compat.deepspeed.config import Config
from espalier.engine import Engine
from espalier.tensor.observers import tell

_LATEST = "latest"
_COUNTERS = ("micro_steps", "global_steps", "global_samples")


class Saved(Protocol):
    """What of DeepSpeed's engine is saved, beside Espalier's."""

    settings: Config
    lr_scheduler: Any
    global_rank: int
    world_size: int
    micro_steps: int

    @property
    def engine(self) -> Engine:
        """Espalier's."""


def save(engine: Saved, folder: Path, tag: str, client_state: Mapping[str, Any], latest: bool) -> None:
    """See :meth:`DeepSpeedEngine.save_checkpoint`."""
    extra: dict[str, Any] = {
        "client_state": dict(client_state),
        "counters": {name: getattr(engine, name) for name in _COUNTERS},
    }
    if hasattr(engine.lr_scheduler, "state_dict"):
        extra["lr_scheduler"] = engine.lr_scheduler
    later = bool(engine.settings.values.get("datastates_ckpt"))
    engine.engine.save(folder / tag, asynchronous=later, **extra)
    if latest and engine.global_rank == 0:
        (folder / f".{_LATEST}").write_text(tag, "utf-8")
        (folder / f".{_LATEST}").replace(folder / _LATEST)
    _together(engine, None)


def load(
    engine: Saved, folder: Path, tag: str | None, model_only: bool, with_schedule: bool
) -> tuple[str | None, Any]:
    """See :meth:`DeepSpeedEngine.load_checkpoint`."""
    if tag is None:
        path = folder / _LATEST
        named = path.read_text("utf-8").strip() if path.is_file() else None
        tag = _together(engine, None if named is None else whole_tag(folder, named))
    if tag is None:
        warnings.warn(f"{folder} has no file {_LATEST!r}: nothing was loaded. Give tag=...", stacklevel=3)
        return None, {}
    here = folder / tag
    if is_zero(here):
        return str(here), _take_theirs(engine, here, model_only, with_schedule)
    objects = {}
    if with_schedule and not model_only and hasattr(engine.lr_scheduler, "load_state_dict"):
        objects["lr_scheduler"] = engine.lr_scheduler
    extra = engine.engine.load(here, model_only=model_only, **objects)
    if not model_only:
        for name in _COUNTERS:
            setattr(engine, name, extra["counters"][name])
    return str(here), extra["client_state"]


def whole_tag(folder: Path, tag: str) -> str:
    """A tag, or that of the newest whole checkpoint, where its own is not: its program died meanwhile."""
    if newest(folder / tag) is not None or is_zero(folder / tag):
        return tag
    saved = [(path / SEAL, of.name) for of in folder.iterdir() if of.is_dir() and (path := newest(of))]
    if not saved:
        return tag
    _, found = max(saved, key=lambda each: each[0].stat().st_mtime_ns)
    words = f"{folder / _LATEST} names {tag!r}, whose checkpoint is not whole: {found!r} is taken."
    tell(words)
    return found


def _take_theirs(engine: Saved, here: Path, model_only: bool, with_schedule: bool) -> dict[str, Any]:
    """Go on from what DeepSpeed wrote; gives its client state."""
    run = run_of(here)
    engine.engine.load_weights(here, optimizer=not model_only)
    if not model_only:
        for name, value in run.counters.items():
            setattr(engine, name, value)
        engine.engine.steps = run.counters.get("global_steps", 0)
        engine.micro_steps = engine.engine.steps * engine.engine.plan.accumulate
        if with_schedule and run.schedule is not None and hasattr(engine.lr_scheduler, "load_state_dict"):
            engine.lr_scheduler.load_state_dict(run.schedule)
    return dict(run.client_state)


def _together(engine: Saved, value: Any) -> Any:
    """Rank 0's value, on all ranks, once all are there."""
    return gather_objects(value, engine.engine.mesh)[0] if engine.world_size > 1 else value
