"""Two hosts, one of which is cut off in mid-run and comes back: training resumes by itself, same losses.

The hosts are network namespaces joined by a bridge (Linux, root, iproute2); on each runs torchrun with
``espalier train JOB.toml --resume``, as docs/faults.md has it, one rank a host, and they meet by torchrun's
c10d rendezvous at the first one's address. They share a folder for checkpoints, as hosts share a file system.

Then the second host's link is taken down and all its processes are killed. The first one's rank is stopped
by the watch over ranks; its agent starts it again alone, on half the data axis (``[elastic] min_data = 1``),
from the last checkpoint. Then the link is up and torchrun runs on the second host again: the first agent sees
it waiting and asks its rank to leave, which saves; both go on together.

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
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from _namespaces import hub_of, namespaces, shell

LINK: Final = "eth0"
NEAR: Final = 1e-9
JOB: Final = """
[model]
kind = "gpt"
vocab_size = 64
max_positions = 32
hidden = 32
layers = 2
heads = 2

[data]
kind = "tokens"

[plan]
data = 2

[optimizer]
lr = 1e-2
schedule = "cosine"

[train]
steps = {steps}
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
AGENT: Final = (
    "-m torch.distributed.run --nnodes 1:2 --nproc-per-node 1 --max-restarts 5 --rdzv-backend c10d "
    "--rdzv-id run --rdzv-endpoint 10.77.0.1:29400 --monitor-interval 0.5"
).split()


class Host:
    """One of the machines."""

    def __init__(self, name: str, number: int, folder: Path) -> None:
        self.name, self.number, self.folder = name, number, folder
        self.agent: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Run torchrun on it."""
        # heartbeats fast enough for a short run; a host is given up by its agents after twice a second
        conf = f"is_host={self.number == 0},last_call_timeout=3,join_timeout=300,"
        conf += "keep_alive_interval=1,keep_alive_max_attempt=4"
        own = ["--rdzv-conf", conf, "--local-addr", f"10.77.0.{self.number + 1}"]
        program = ["-m", "espalier", "train", "job.toml", "--resume"]
        environment = os.environ | {
            "GLOO_SOCKET_IFNAME": LINK,
            "OMP_NUM_THREADS": "1",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            # an agent that stays tells the address of its store but once, one that joins later waits for it
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }
        with open(self.folder / f"host{self.number}.log", "ab") as log:
            self.agent = subprocess.Popen(
                ["ip", "netns", "exec", self.name, sys.executable, *AGENT, *own, *program],
                cwd=self.folder,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def kill(self) -> None:
        """End all its processes, as a power cut would."""
        found = subprocess.run(["ip", "netns", "pids", self.name], capture_output=True, text=True).stdout
        for pid in found.split():
            with contextlib.suppress(OSError):
                os.kill(int(pid), signal.SIGKILL)
        if self.agent is not None:
            self.agent.wait()

    def said(self) -> str:
        """What it wrote."""
        return (self.folder / f"host{self.number}.log").read_text(errors="replace")


def records(folder: Path) -> list[dict[str, Any]]:
    """The metrics so far."""
    path = folder / "runs/job/metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    with contextlib.suppress(ValueError):
        return [json.loads(line) for line in lines]
    return []


def until(what: str, holds: Callable[[], bool], hosts: list[Host], limit: float = 240) -> None:
    """Wait for it."""
    end = time.monotonic() + limit
    while not holds():
        if time.monotonic() > end:
            raise TimeoutError(
                f"{what}: not within {limit:.0f} s\n" + "\n".join(h.said()[-3000:] for h in hosts)
            )
        time.sleep(0.05)
    print(what, flush=True)


def disturbed(folder: Path, steps: int) -> list[dict[str, Any]]:
    """The run on two hosts."""
    with namespaces(2, LINK) as names:
        hosts = [Host(name, i, folder) for i, name in enumerate(names)]
        first, second = hosts

        def last() -> int:
            return max((r["step"] for r in records(folder)), default=0)

        def ranks() -> int:
            return len(records(folder)[-1]["memory"]) if last() else 0

        try:
            first.start()
            second.start()
            until("both train", lambda: last() >= steps // 5 and ranks() == 2, hosts)
            shell("ip", "-n", hub_of(names), "link", "set", "port1", "down")
            second.kill()
            print(f"the second host is cut off, at step {last()}", flush=True)
            until("the first trains on alone", lambda: ranks() == 1, hosts)
            shell("ip", "-n", hub_of(names), "link", "set", "port1", "up")
            second.start()
            print(f"the second host is back, at step {last()}", flush=True)
            until("both train again", lambda: ranks() == 2, hosts)
            until("done", lambda: first.agent is not None and first.agent.poll() is not None, hosts)
            assert first.agent is not None
            if first.agent.returncode:
                raise RuntimeError(f"torchrun ended with {first.agent.returncode}\n{first.said()[-3000:]}")
            report = next((line for line in first.said().splitlines() if line.startswith("espalier: ")), "")
            print(f"its rank was told: {report}", flush=True)
            return records(folder)
        finally:
            for host in hosts:
                host.kill()


def main() -> int:
    """Run both, and compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=600)
    steps = parser.parse_args().steps
    if sys.platform != "linux" or os.geteuid() != 0 or shutil.which("ip") is None:
        print("skipped: network namespaces need Linux, root and ip")
        return 0
    with tempfile.TemporaryDirectory(prefix="espalier-hosts-") as name:
        folders = [Path(name, each) for each in ("quiet", "hosts")]
        for folder in folders:
            folder.mkdir()
            (folder / "job.toml").write_text(JOB.format(steps=steps))
        try:
            with namespaces(1, LINK):
                pass
        except OSError as error:
            print(f"skipped: no network namespaces here: {error}")
            return 0
        command = [sys.executable, "-m", "espalier", "train", "job.toml", "--set", "plan.data=1"]
        # beside the hosts, which wait now and then
        alone = subprocess.Popen(command, cwd=folders[0], stdout=subprocess.DEVNULL)
        try:
            found = disturbed(folders[1], steps)
            if alone.wait():
                raise subprocess.CalledProcessError(alone.returncode, command)
        finally:
            alone.kill()
            alone.wait()
        wanted = records(folders[0])
        far = max(abs(a["loss"] - b["loss"]) for a, b in zip(wanted, found, strict=True))
        by_ranks = {n: sum(len(r["memory"]) == n for r in found) for n in (1, 2)}
        print(f"{len(found)} steps, {by_ranks[2]} of them on two hosts, {by_ranks[1]} on one")
        print(f"largest difference in loss from one process undisturbed: {far:.1e} (bar {NEAR:.0e})")
        return int(far > NEAR)


if __name__ == "__main__":
    sys.exit(main())
