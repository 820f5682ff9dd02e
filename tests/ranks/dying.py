"""Worlds in which a rank does something bad: ``python -m tests.ranks.dying FOLDER NAME:RANKS:WHO ...``.

Some worlds run at a time, each with a process that holds its store, as torchrun's agent does; all are forked
from this one, which has torch imported. FOLDER/<world> gets what its ranks wrote, and how they ended.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import espalier
from espalier.later import uncollected

with uncollected():
    import torch
    import torch._dynamo  # what optimizers import: here, once for all ranks
    import torch.distributed as dist
    from torch import nn

    from espalier.checkpoint import newest
    from espalier.comm import all_reduce
    from espalier.mesh.launch import leave
    from espalier.mesh.process import finish

FAULTS = espalier.Faults(limit=4.0, outside=30.0)
AT = 3
AT_A_TIME = 5


def main(folder: Path, worlds: list[str]) -> None:
    """Start all, or come back as a rank of one."""
    waiting, running = [*worlds], 0
    while waiting or running:
        if waiting and running < AT_A_TIME:
            place = folder / waiting.pop(0)
            if not os.fork():
                host(place)
                return
            running += 1
        else:
            assert os.wait()[1] == 0
            running -= 1


def host(place: Path) -> None:
    """Hold a world's store while it lasts, or come back as one of its ranks."""
    kind, size, who = place.name.split(":")
    place.mkdir()
    told = [os.pipe() for _ in range(int(size))]
    ranks: dict[int, int] = {}
    for rank, (heard, _) in enumerate(told):
        pid = os.fork()
        if not pid:
            become(rank, int(size), int(os.read(heard, 16)), place, kind != "host")
            if kind == "bare":
                move(rank == int(who), place)
            else:
                train(kind, rank == int(who), place)
            return
        ranks[pid] = rank
    # it has threads, and may hold locks: so it comes after all forks
    store = dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=300)
    )
    port = str(store.port).encode()
    if kind == "host":
        del store  # the first rank has it, and takes it along
    for _, to in told:
        os.write(to, port)
    while ranks:
        pid, status = os.wait()
        end = json.dumps([os.waitstatus_to_exitcode(status), time.time()])
        (place / f"end{ranks.pop(pid)}").write_text(end)


def become(rank: int, size: int, port: int, place: Path, agent: bool) -> None:
    """Be a rank, as torchrun would have started it; its ``agent`` has the store."""
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.environ |= {name: str(value) for name, value in names.items()}
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": str(agent),
    }
    for stream, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(place / f"{name}{rank}", os.O_WRONLY | os.O_CREAT, 0o600), stream)


def train(kind: str, bad: bool, place: Path) -> None:
    """Five steps; in the third the bad one does it."""
    if kind == "exit" and bad:  # an agent's, once the others have ended
        atexit.register(signal.raise_signal, signal.SIGTERM)
    torch.manual_seed(0)
    size = int(os.environ["WORLD_SIZE"])
    model: nn.Module = nn.Linear(8, 4).double()
    plan = espalier.Plan(data=size, zero=2 if kind == "differ" else 0)
    if kind == "pipe":
        model, plan = nn.Sequential(model, nn.Linear(4, 4).double()), espalier.Plan(pipe=size, accumulate=2)
    optimizer = torch.optim.SGD(model.parameters())
    engine = espalier.initialize(model, optimizer, plan, loss_fn=nn.functional.mse_loss, faults=FAULTS)
    batch = torch.randn(8, 8).double(), torch.randn(8, 4).double()
    if kind == "leave":
        leave_when_asked(engine, batch, bad, place)
        return
    with espalier.RunLog(place / "run", engine):
        for step in range(1, 6):
            if step == AT and bad:
                print("these are its last words", file=sys.stderr, flush=True)
                time.sleep(1)  # words go out with the next sign of life
                (place / "deed").write_text(str(time.time()))
                if misbehave(kind, engine):
                    continue
            if kind == "save" and step >= AT - 1:  # the last of two waits for the first, and for the dead
                engine.save(place / "checkpoints", asynchronous=True, keep=1)
                while newest(place / "checkpoints") is None:
                    time.sleep(0.01)
            engine.train_step(batch)
    if kind == "end":  # the others wait for each other, and give up their world
        (place / "deed").write_text(str(time.time()))
        if bad:
            raise ValueError("a bad end")
        finish()
    print("trained", flush=True)


def leave_when_asked(
    engine: espalier.Engine, batch: tuple[torch.Tensor, ...], bad: bool, place: Path
) -> None:
    """All ranks are asked; the bad one takes longer, in a step and after it, than a SIGTERM leaves others."""
    slow = 2.5 if bad else 0.0
    (place / "deed").write_text(str(time.time()))
    with engine.pulse.signals.saving():
        os.kill(os.getpid(), signal.SIGTERM)
        compute(slow)
        while not engine.pulse.to_leave(engine.steps):
            engine.train_step(batch)
        print("left after step", engine.steps, flush=True)
    compute(slow)
    finish()


def compute(seconds: float) -> None:
    """With a share of a core, which is work, too."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for _ in range(50):
            torch.randn(64, 64) @ torch.randn(64, 64)
        time.sleep(0.05)


def move(bad: bool, place: Path) -> None:
    """Without an engine, the bad one sleeps while the others wait for it."""
    mesh = espalier.Mesh.from_env({"data": int(os.environ["WORLD_SIZE"])})
    for step in range(1, 6):
        if step == AT and bad:
            (place / "deed").write_text(str(time.time()))
            time.sleep(1000)
        all_reduce(torch.ones(2), mesh, 0)


def misbehave(kind: str, engine: espalier.Engine) -> bool:
    """Do what the test asks for; whether to leave the step out."""
    if kind in ("kill", "pipe", "host", "save"):
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "raise":
        raise ValueError("a bad thing")
    elif kind == "sleep":
        time.sleep(1000)
    elif kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif kind == "exit":
        sys.exit(0)
    elif kind == "differ":
        all_reduce(torch.ones(5), engine.mesh, 0)
    elif kind == "compute":
        compute(2 * FAULTS.limit)
    elif kind == "patient":
        with engine.pulse.patient():
            time.sleep(2.5 * FAULTS.limit)
    return kind == "skip"


if __name__ == "__main__":
    gc.freeze()  # what is imported lies in pages that all share
    main(Path(sys.argv[1]), sys.argv[2:])
    leave()
