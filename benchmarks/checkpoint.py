"""What a checkpoint costs: beside plain ``torch.save``, and beside training.

Two ranks train a GPT under ZeRO-2; parameters and AdamW's states are some 300 MB, of which each rank writes
half. In turns:

* ``engine.save``: checksums, index, a name only when whole; ``fsync`` of it all goes on when it returns;
* plain ``torch.save`` of the same tensors from each rank to a file of its own;
* ``engine.save(durable=True)``: ``fsync`` of every file and folder first;
* ``torch.save``, and ``fsync`` of its file;
* some steps of which the first begins an asynchronous save, and the same steps without.

Bars: a save takes at most 1.3 times as long as ``torch.save``, without ``fsync`` and with it; an asynchronous
one keeps the program (in ``engine.save``, and where the next update waits until what it changes is copied)
for less than a tenth of that. For information: how much longer the steps beside it take, all told: the ranks
share their cores and their memory with what copies and writes.

    python benchmarks/checkpoint.py [FOLDER]
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from _common import MISSED, Contender, Report, in_turns, on_ranks

import espalier
from espalier.checkpoint.saver import boxes_to_write
from espalier.engine.checkpointing import tree_of
from espalier.models import build

SIZES = {"vocab_size": 8192, "hidden": 512, "heads": 8, "layers": 5, "max_positions": 64}
ROUNDS, STEPS = 9, 4


def batch(step: int) -> dict[str, torch.Tensor]:
    """Random tokens, the same on all ranks."""
    ids = torch.randint(0, 8192, (2, 64), generator=torch.Generator().manual_seed(step))
    return {"input_ids": ids, "labels": ids}


def durable(path: Path) -> None:
    """Wait until a file is on the disk."""
    file = os.open(path, os.O_RDONLY)
    os.fsync(file)
    os.close(file)


class Trial:
    """An engine on this rank, and the same tensors for ``torch.save``."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(0)
        net = build("gpt", SIZES)
        self.engine = espalier.initialize(net, torch.optim.AdamW(net.parameters()), {"data": 2, "zero": 2})
        self.engine.train_step(batch(0))
        self.folder, self.file = folder / "ours", folder / f"plain-{self.engine.mesh.rank}.pt"
        assert self.engine.optimizer is not None
        tree = tree_of(net, self.engine.optimizer, self.engine.mesh)
        self.tensors = {f"{p.name} {p.box.offsets}": p.values.clone() for p in boxes_to_write(tree)}
        self.spent, self.kept = 0.0, list[float]()
        timed = self._timed(type(self.engine).wait_staged)
        self.engine.wait_staged = MethodType(timed, self.engine)  # type: ignore[method-assign]
        self.nbytes = sum(x.numel() * x.element_size() for x in self.tensors.values())

    def plain(self, *, last: bool) -> None:
        """Each rank's file; all wait for all, as they do for a checkpoint."""
        torch.save(self.tensors, self.file)
        if last:
            durable(self.file)
        dist.barrier()

    def save(self, **given: Any) -> None:
        """A checkpoint."""
        self.engine.save(self.folder, **given)

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """The same; the time that it takes is added up."""

        def timed(*args: Any, **given: Any) -> Any:
            begun = time.perf_counter()
            try:
                return call(*args, **given)
            finally:
                self.spent += time.perf_counter() - begun

        return timed

    def beside(self) -> None:
        """Some steps, of which the first comes after an asynchronous save has begun."""
        self.spent = 0.0
        self._timed(self.save)(asynchronous=True)
        self.steps()
        self.kept.append(self.spent)

    def steps(self) -> None:
        """Some steps."""
        for step in range(STEPS):
            self.engine.train_step(batch(step))

    def clear(self) -> None:
        """Nothing is under way, and nothing that was written waits for the disk."""
        self.engine.wait_saved()
        self.file.unlink(missing_ok=True)
        if self.engine.mesh.rank == 0:
            shutil.rmtree(self.folder, ignore_errors=True)
        dist.barrier()


def main() -> int:
    """Compare, on this rank; the first prints."""
    torch.set_num_threads(1)
    trial = Trial(Path(os.environ["ESPALIER_BENCHMARK"]))
    steps = f"{STEPS} steps"
    contenders = {
        "save": Contender(trial.save, trial.clear),
        "torch.save": Contender(lambda: trial.plain(last=False), trial.clear),
        "save, durable": Contender(lambda: trial.save(durable=True), trial.clear),
        "torch.save, fsync": Contender(lambda: trial.plain(last=True), trial.clear),
        f"{steps} and a save": Contender(trial.beside, trial.clear),
        steps: Contender(trial.steps, trial.clear),
    }
    times = in_turns(contenders, rounds=ROUNDS, warmup=1)
    times["kept by an asynchronous save"] = trial.kept[-ROUNDS:]
    trial.clear()
    report, work = Report(), f"{trial.nbytes / 1e6:.0f} MB a rank"
    report.add(work, times, "save", "torch.save", 1.3)
    report.add(work, times, "save, durable", "torch.save, fsync", 1.3)
    report.add(work, times, "kept by an asynchronous save", "save", 0.1)
    report.add(work, times, f"{steps} and a save", steps)
    missed = torch.tensor(report.show() if dist.get_rank() == 0 else 0)
    dist.all_reduce(missed)
    return MISSED if missed else 0


if __name__ == "__main__":
    if "--rank" in sys.argv:
        sys.exit(main())
    given = sys.argv[1] if len(sys.argv) > 1 else None
    place = Path(tempfile.mkdtemp(prefix="espalier-benchmark-", dir=given))
    os.environ["ESPALIER_BENCHMARK"] = str(place)
    try:
        status = on_ranks(__file__, 2)
    finally:
        shutil.rmtree(place)
    sys.exit(status)
