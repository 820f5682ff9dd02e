"""Two hosts, one of which is cut off in mid-run and comes back: training resumes by itself, same losses.

The hosts are network namespaces joined by a bridge (Linux, root, iproute2); on each runs torchrun with
``espalier train JOB.toml --resume``, as docs/faults.md has it, one rank a host, and they meet by torchrun's
c10d rendezvous at the first one's address. They share a folder for checkpoints, as hosts share a file system.

Then the second host's link is taken down and all its processes are killed; torchrun is started there again
and looks for the first. That one's rank is stopped by the watch over ranks; its agent starts it again
alone, on half the data axis (``[elastic] min_data = 1``), from the last checkpoint. Then the link is up:
the first agent sees the other waiting and asks its rank to leave, which saves; both go on together. In the
end both agents are asked to leave: however fast it trains, and however late a host is back, the job has
steps left till then.

Bar: all losses are those of one process that nobody disturbed, within float64's 1e-9.

    sudo .venv/bin/python benchmarks/hosts.py

Where no namespaces can be made it says so and ends well.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from _namespaces import hub_of, namespaces, shell

LINK: Final = "eth0"
NEAR: Final = 1e-9
EACH: Final = 20  # steps on both hosts, on one, and on both again, at the least
JOB: Final = """
[model]
kind = "module"
build = "slow:build"
labels = "next"
vocab_size = 64
max_positions = 32

[data]
kind = "tokens"

[plan]
data = {ranks}

[optimizer]
lr = 1e-4

[train]
steps = 1_000_000
batch_size = 16
sequence = 32
log_every = 1
dtype = "float64"
eval_batches = 1

[checkpoint]
every = 10

[elastic]
min_data = 1
"""
# steps that sleep leave the cores to hosts that lose and find each other
MODEL: Final = """
import time
from espalier.models import GPT, GPTConfig

class Slow(GPT):
    def forward(self, *given, **named):
        time.sleep(0.1)
        return super().forward(*given, **named)

def build():
    return Slow(GPTConfig(vocab_size=64, max_positions=32, hidden=32, layers=2, heads=2))
"""
ALONE: Final = """
from espalier.train.job import Job
from espalier.train.trainer import train
train(Job.load("job.toml"))
"""
AGENT: Final = (
    "-m torch.distributed.run --nnodes 1:2 --nproc-per-node 1 --max-restarts 5 --rdzv-backend c10d "
    "--rdzv-id run --rdzv-endpoint 10.77.0.1:29400 --monitor-interval 0.5"
).split()


class Program:
    """One that trains in a folder, and what it says."""

    def __init__(self, folder: Path, log: str) -> None:
        self.folder, self.log = folder, folder / log
        self.process: subprocess.Popen[bytes] | None = None

    def run(self, command: list[str], **environment: str) -> None:
        """Start it."""
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                command, cwd=self.folder, env=os.environ | environment, stdout=log, stderr=subprocess.STDOUT
            )

    def kill(self) -> None:
        """End it, if it runs."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def said(self) -> str:
        """What it wrote."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""


class Host(Program):
    """One of the machines, and its torchrun."""

    def __init__(self, name: str, number: int, folder: Path) -> None:
        super().__init__(folder, f"host{number}.log")
        self.name, self.number = name, number

    def start(self) -> None:
        """Run torchrun on it."""
        # the others' agents give a host up after six seconds: no sooner, a busy machine is late
        conf = f"is_host={self.number == 0},last_call_timeout=2,join_timeout=300,"
        conf += "keep_alive_interval=1,keep_alive_max_attempt=6,read_timeout=240"
        own = ["--rdzv-conf", conf, "--local-addr", f"10.77.0.{self.number + 1}"]
        program = ["-m", "espalier", "train", "job.toml", "--resume"]
        self.run(
            ["ip", "netns", "exec", self.name, sys.executable, *AGENT, *own, *program],
            GLOO_SOCKET_IFNAME=LINK,
            OMP_NUM_THREADS="1",
            TORCH_CPP_LOG_LEVEL="ERROR",
            # an agent that stays tells the address of its store but once, one that joins later waits for it
            TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",
        )

    def kill(self) -> None:
        """End all its processes, as a power cut would."""
        found = subprocess.run(["ip", "netns", "pids", self.name], capture_output=True, text=True).stdout
        for pid in found.split():
            with contextlib.suppress(OSError):
                os.kill(int(pid), signal.SIGKILL)
        super().kill()


def records(folder: Path) -> list[dict[str, Any]]:
    """The metrics so far."""
    path = folder / "runs/job/metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    with contextlib.suppress(ValueError):
        return [json.loads(line) for line in lines]
    return []


def until(what: str, holds: Callable[[], bool], programs: Sequence[Program], limit: float = 120) -> None:
    """Wait for it, while all of these run."""
    end = time.monotonic() + limit
    while not holds():
        late = time.monotonic() > end
        if late or any(each.process is not None and each.process.poll() is not None for each in programs):
            why = f"not within {limit:.0f} s" if late else "one has ended before"
            said = (f"-- {each.log.name}:\n{each.said()[-3000:]}" for each in programs)
            raise RuntimeError("\n".join([f"{what}: {why}", *said]))
        time.sleep(0.05)
    print(what, flush=True)


def disturbed(folder: Path, alone: Program) -> list[dict[str, Any]]:
    """The run on two hosts; the one without any begins while the first waits for the second in vain."""
    with namespaces(2, LINK) as names:
        hosts = [Host(name, i, folder) for i, name in enumerate(names)]
        first, second = hosts

        def train(count: int) -> Callable[[], bool]:
            return lambda: [len(r["memory"]) for r in records(folder)[-EACH:]] == [count] * EACH

        try:
            first.start()
            second.start()
            until("both train", train(2), hosts)
            shell("ip", "-n", hub_of(names), "link", "set", "port1", "down")
            second.kill()
            print(f"the second host is cut off, at step {len(records(folder))}", flush=True)
            second.start()
            alone.run([sys.executable, "-c", ALONE], OMP_NUM_THREADS="1")
            until("the first trains on alone", train(1), hosts)
            shell("ip", "-n", hub_of(names), "link", "set", "port1", "up")
            print(f"the second host is back, at step {len(records(folder))}", flush=True)
            until("both train again", train(2), hosts)
            agents = [host.process for host in hosts if host.process is not None]
            for agent in agents:
                agent.terminate()
            for agent in agents:
                agent.wait(120)
            found = records(folder)
            if not (folder / f"runs/job/checkpoints/step-{len(found):08}").is_dir():
                raise RuntimeError(f"step {len(found)} was not saved\n{first.said()[-3000:]}")
            report = next((line for line in first.said().splitlines() if line.startswith("espalier: ")), "")
            print(f"its rank was told: {report}", flush=True)
            return found
        finally:
            for host in hosts:
                host.kill()


def main() -> int:
    """Run both, and compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.parse_args()
    if sys.platform != "linux" or os.geteuid() != 0 or shutil.which("ip") is None:
        print("skipped: network namespaces need Linux, root and ip")
        return 0
    with tempfile.TemporaryDirectory(prefix="espalier-hosts-") as name:
        folders = [Path(name, each) for each in ("quiet", "hosts")]
        for ranks, folder in enumerate(folders, 1):
            folder.mkdir()
            (folder / "job.toml").write_text(JOB.format(ranks=ranks))
            (folder / "slow.py").write_text(MODEL)
        try:
            with namespaces(1, LINK):
                pass
        except OSError as error:
            print(f"skipped: no network namespaces here: {error}")
            return 0
        alone = Program(folders[0], "alone.log")
        try:
            found = disturbed(folders[1], alone)
            until("one process has trained alone", lambda: len(records(folders[0])) >= len(found), [alone])
        finally:
            alone.kill()
        wanted = records(folders[0])[: len(found)]
        far = max(abs(a["loss"] - b["loss"]) for a, b in zip(wanted, found, strict=True))
        by_ranks = {n: sum(len(r["memory"]) == n for r in found) for n in (1, 2)}
        print(f"{len(found)} steps, {by_ranks[2]} of them on two hosts, {by_ranks[1]} on one")
        print(f"largest difference in loss from one process undisturbed: {far:.1e} (bar {NEAR:.0e})")
        return int(far > NEAR)


if __name__ == "__main__":
    sys.exit(main())
