"""Which checkpoint a load takes, and what it leaves open."""

from __future__ import annotations

import os
from collections.abc import Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any

from espalier.checkpoint import Checkpoint, CheckpointError, checkpoints
from espalier.checkpoint.folder import INDEX
from espalier.comm.control import gather_objects
from espalier.engine.checkpointing import EngineState, agreed, restore
from espalier.mesh import Mesh
from espalier.parallel.data.zero import ZeroState
from espalier.tensor.observers import tell


class Loads:
    """Loads checkpoints into an engine, and knows what the last load has left open.

    Attributes:
        runs: names of those that the engine goes on from.
    """

    def __init__(self) -> None:
        self._failed = ""  # what a load met when it had changed parameters
        self._positions_left = 0  # which no loader has taken
        self.runs: list[str] = []

    def newest(
        self,
        own: EngineState,
        directory: str | os.PathLike[str],
        data: ZeroState | None,
        extra: Mapping[str, Any],
        model_only: bool,
    ) -> Mapping[str, Any]:
        """Take over a checkpoint, or the newest whole one of a folder; the rest as for :func:`restore`."""
        paths = candidates(directory, own.mesh)
        for path, following in zip_longest(paths, paths[1:]):
            try:
                checkpoint = opened(path, own.mesh)
                values = self._restored(own, checkpoint, data, extra, model_only)
            except CheckpointError as error:
                if following is None:
                    raise
                tell(f"{error} Now {following} is tried.")
            else:
                break
        if not model_only:
            self.runs = [*dict.fromkeys((*self.runs, *checkpoint.index.runs))]
            self._positions_left = len((values.get("loaders") or ())[len(own.loaders) :])
        return values

    def _restored(self, own: EngineState, checkpoint: Checkpoint, *how: Any) -> Mapping[str, Any]:
        try:
            values = restore(own, checkpoint, *how)
        except CheckpointError as error:
            self._failed = str(error)
            raise
        self._failed = ""
        return values

    def check(self) -> None:
        """See that parameters are not partly those of a damaged checkpoint, partly those from before.

        Raises:
            CheckpointError: they are.
        """
        if self._failed:
            raise CheckpointError(
                f"A load has failed, and parameters are partly what was there before: {self._failed} "
                "Load a whole checkpoint, or make model and engine anew to start at the beginning."
            )

    def tell_of_late(self) -> None:
        """A loader is made: warn if it comes too late for a position."""
        if self._positions_left:
            self._positions_left -= 1
            tell(
                "This loader begins at its first batch: it is made after engine.load, and the checkpoint has "
                "a position that no loader has taken. Make loaders before engine.load, as when it was saved."
            )


def candidates(directory: str | os.PathLike[str], mesh: Mesh) -> list[Path]:
    """The checkpoint that a folder is, or those that it has, newest first (a collective).

    Raises:
        CheckpointError: on all ranks, if there is none.
    """
    paths: list[Path] = []
    error: OSError | None = None
    if mesh.rank == 0:
        path = Path(directory)
        try:
            if path.is_dir() and not (path / INDEX).exists():
                paths = checkpoints(path)
            elif path.exists():
                paths = [path]
        except OSError as met:
            error = met
    agreed(error, mesh)
    paths = gather_objects(paths, mesh)[0]
    if not paths:
        raise CheckpointError(
            f"There is no checkpoint in {directory}. Name a folder that engine.save wrote to."
        )
    return paths


def opened(path: Path, mesh: Mesh) -> Checkpoint:
    """A checkpoint (a collective).

    Raises:
        CheckpointError: on all ranks, if one of them cannot read it.
    """
    error: Exception | None = None
    try:
        checkpoint = Checkpoint(path)
    except CheckpointError as met:
        error = met
    agreed(error, mesh)
    return checkpoint
