"""Torch's database of operators on DTensors, ours and torch's: how each call ends."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor import Replicate
from torch.testing._internal.common_methods_invocations import op_db

import espalier

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the sweep is the tests' own

from tests.ranks.op_trials import is_random, name_of, trials
from tests.ranks.ours import Ours
from tests.ranks.sweep import CLASSES, Sweep

HUNG = "ended"
FEW = 1
LIMIT = 15  # seconds for the calls of an operator; then it counts as one that hangs


class Theirs:
    """Torch's DTensor."""

    type = TorchDTensor

    def mesh(self, world: int) -> Any:
        """A mesh over the process group."""
        return init_device_mesh("cpu", (dist.get_world_size(),))

    @contextmanager
    def watch(self) -> Iterator[list[str]]:
        """It has no fallback."""
        yield []

    def is_refusal(self, error: BaseException) -> bool:
        """Any error counts as a refusal, whatever it says."""
        return True


def swept(mesh: espalier.Mesh, library: str, start: int, notes: str) -> None:
    """The calls of the operators from the ``start``th on, in their plain form; random ones are left out.

    Rank 0 notes the worst outcome of each operator, and before that that it begins: a call whose
    collectives do not fit each other may end the process, or never end.
    """
    warnings.simplefilter("ignore")
    sweep = Sweep(Ours() if library == "Espalier" else Theirs(), mesh.rank, mesh.size())
    with open(notes if mesh.rank == 0 else os.devnull, "a", encoding="utf-8", buffering=1) as page:
        for index, op in enumerate(op_db):
            # torch draws random values otherwise on purpose
            if index < start or is_random(op):
                continue
            page.write(f"{index} {name_of(op)} {HUNG}\n")
            signal.alarm(LIMIT)  # ends the process
            outcomes = ["rule"]
            for trial in trials(op, seed=0, few=FEW):
                if trial.form == "function":
                    # torch refuses plain tensors among DTensors; that is not what is compared here
                    whole = tuple(Replicate() if p is None else p for p in trial.placements)
                    finding = sweep.attempt(replace(trial, placements=whole))
                    outcomes += [finding.outcome] if finding is not None else []
            if len(outcomes) > 1:
                page.write(f"{index} {name_of(op)} {max(outcomes, key=CLASSES.index)}\n")
            else:
                page.write(f"{index} {name_of(op)} none\n")


def outcomes(library: str) -> dict[str, str]:
    """For each operator how the worst of its calls ends, on two ranks."""
    found: dict[str, str] = {}
    start = 0
    with tempfile.TemporaryDirectory() as folder:
        notes = Path(folder, "notes")
        while True:
            ended = True
            try:
                espalier.spawn(swept, {"axis": 2}, library, start, str(notes))
            except Exception:
                ended = False
            lines = [line.split() for line in notes.read_text("utf-8").splitlines()]
            found |= {name: outcome for _, name, outcome in lines}
            if ended or start > int(lines[-1][0]):
                return {name: outcome for name, outcome in found.items() if outcome != "none"}
            start = int(lines[-1][0]) + 1
