"""Ranks are killed while they save, again and again: the newest checkpoint is whole every time.

One run goes on through all kills. Its ranks, one or two, load the newest checkpoint, train, and save after
each step, now at once, now beside the training, keeping two. At a random moment of a save all of them, or
one and then the others, get SIGKILL. Then, and again in the ranks that come next, the newest checkpoint is
compared with its checksums, and the state of model and optimizer with what it was when it was saved.

Bar: no kill of 200 leaves a folder whose newest checkpoint does not load, or goes back by more than the save
that was under way.

    python benchmarks/kill.py
"""

from __future__ import annotations

import multiprocessing
import random
import re
import shutil
import sys
import tempfile
import time
import zlib
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import espalier
from espalier.checkpoint import Checkpoint, newest

KILLS = 200
ROWS, WIDTH = 4, 96


def digest(engine: espalier.Engine) -> int:
    """Of model and optimizer."""
    assert engine.optimizer is not None
    tensors = list(engine.full_state_dict().values())
    for p in engine.module.parameters():
        states = engine.optimizer.state[p]
        tensors += [espalier.full_tensor(states[key]) for key in sorted(states)]  # in any order
    return zlib.crc32(b"".join(x.detach().contiguous().view(-1).numpy().tobytes() for x in tensors))


def built(ranks: int) -> espalier.Engine:
    """A small model, of which each rank saves a part."""
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(12)))
    plan = {"data": ranks, "zero": 2 if ranks > 1 else 0}
    loss = nn.functional.mse_loss
    return espalier.initialize(net, torch.optim.AdamW(net.parameters()), plan, loss_fn=loss)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The same for all ranks and runs."""
    given = torch.Generator().manual_seed(step)
    return torch.randn(ROWS, WIDTH, generator=given), torch.randn(ROWS, WIDTH, generator=given)


def run(rank: int, ranks: int, meeting: str, folder: str, asynchronous: bool, told: Connection) -> None:
    """One rank, until it is killed: tells what it loaded, and when each save begins and ends."""
    torch.set_num_threads(1)
    if ranks > 1:
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks)
    engine = built(ranks)
    engine.lay_out(batch(0))
    if newest(folder) is not None:
        engine.load(folder)
        told.send(("loaded", engine.steps, digest(engine)))
    while True:
        engine.train_step(batch(engine.steps))
        told.send(("saving", engine.steps, digest(engine)))
        engine.save(folder, asynchronous=asynchronous, keep=2)
        if asynchronous:
            told.send(("going on", engine.steps, 0))
            engine.wait_saved()
        told.send(("saved", engine.steps, 0))


class Chain:
    """The run that goes on through kills.

    Args:
        context: by which ranks are forked, if not from a process of this run's own.

    Attributes:
        at: how many kills met the ranks in which state of a save.
        wrong: what went wrong.
    """

    def __init__(self, folder: Path, seed: int = 0, context: Any = None) -> None:
        self.folder, self.at, self.wrong = folder, Counter[str](), list[str]()
        if context is None:
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload(["espalier.api", "torch._dynamo"])
        self._context = context
        self._random, self._digests = random.Random(seed), dict[int, int]()
        self._saved, self._lasts, self._kills = 0, [0.02], 0

    def kill(self) -> None:
        """Start the ranks, let them save a few times, kill them within a save, and look."""
        self._kills += 1
        ranks = self._random.choice((1, 2))
        pipes = [self._context.Pipe(duplex=False) for _ in range(ranks)]
        meeting = self.folder.parent / f"meeting-{self._kills}"
        asynchronous = self._random.random() < 0.5
        all_ranks: list[Any] = []
        for rank, (_, told) in enumerate(pipes):
            given = (rank, ranks, str(meeting), str(self.folder), asynchronous, told)
            all_ranks.append(self._context.Process(target=run, args=given))
            all_ranks[-1].start()
        try:
            self._follow(pipes[0][0], self._random.randrange(1, 4))
            time.sleep(self._random.uniform(0, 1.2) * sorted(self._lasts)[len(self._lasts) // 2])
        finally:
            self._random.shuffle(all_ranks)
            for process in all_ranks:
                process.kill()
                time.sleep(self._random.choice((0, 0.005)))
            for process in all_ranks:
                process.join()
        while pipes[0][0].poll():
            self._hear(*pipes[0][0].recv())
        self._look()

    def _follow(self, told: Connection, saves: int) -> None:
        """Listen until so many saves have ended, and one more has begun."""
        began = 0.0
        while True:
            if not told.poll(60):
                raise RuntimeError("a rank said nothing for a minute")
            word, step, found = told.recv()
            self._hear(word, step, found)
            if word == "saving":
                if not saves:
                    return
                began = time.perf_counter()
            elif word == "saved":
                saves -= 1
                self._lasts.append(time.perf_counter() - began)

    def _hear(self, word: str, step: int, found: int) -> None:
        """Take down what was told."""
        if word == "saving":
            self._digests[step] = found
        elif word == "saved":
            self._saved = step
        elif word == "loaded" and found != self._digests[step]:
            self.wrong.append(f"kill {self._kills}: step {step} is not as it was saved")

    def _look(self) -> None:
        """See what the kill has left."""
        names = sorted(p.name for p in self.folder.iterdir()) if self.folder.exists() else []
        state = "no save under way"
        for name in names:
            if re.fullmatch(r"\.step-\d+\.saving-\w+", name):
                inside = {p.name for p in (self.folder / name).iterdir()}
                state = "files being written"
                if "__0_0.distcp" not in inside:
                    state = "no file yet"
                elif "index.json" in inside:
                    state = "index written"
            elif "leaving" in name or "replaced" in name:
                state = "an old one being removed"
        self.at[state] += 1
        found = newest(self.folder) if names else None
        if found is None:
            if self._saved:
                self.wrong.append(f"kill {self._kills}: no whole checkpoint among {names}")
            return
        checkpoint = Checkpoint(found)
        checkpoint.verify()
        if checkpoint.index.step < self._saved:
            self.wrong.append(f"kill {self._kills}: step {self._saved} was saved, {found.name} is the newest")
        self._saved = checkpoint.index.step


def main() -> int:
    """Kill, and tell."""
    folder = Path(tempfile.mkdtemp(prefix="espalier-kill-"))
    chain, begun = Chain(folder / "checkpoints"), time.perf_counter()
    try:
        for _ in range(KILLS):
            chain.kill()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    for state, n in chain.at.most_common():
        print(f"{n:5} kills: {state}")
    print(*chain.wrong, sep="\n")
    print(
        f"{KILLS} kills in {time.perf_counter() - begun:.0f} s, {chain._saved} steps trained: "
        f"{len(chain.wrong)} wrong. {'MISS' if chain.wrong else 'PASS'}"
    )
    return 1 if chain.wrong else 0


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from benchmarks import kill

    sys.exit(kill.main())
