"""Machines played by network namespaces, joined by a bridge (Linux, root, iproute2)."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence


def shell(*words: str) -> None:
    """A command that must end well; what it says is in the error."""
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{' '.join(words)}: {done.stderr.strip() or done.returncode}")


@contextlib.contextmanager
def namespaces(count: int, link: str) -> Iterator[list[str]]:
    """So many, with a link of that name each, 10.77.0.1 and on, and one more for the bridge.

    All are gone at the end, with all in them. The bridge's end of the i-th link is ``port<i>`` in
    ``hub_of(names)``.
    """
    hub, *names = (f"espalier-{os.getpid()}-{name}" for name in ("hub", *range(count)))
    made: list[str] = []
    try:
        for name in (hub, *names):
            shell("ip", "netns", "add", name)
            made.append(name)
        shell("ip", "-n", hub, "link", "add", "hub", "up", "type", "bridge")
        for i, name in enumerate(names):
            veth = ("type", "veth", "peer", "name", f"port{i}", "netns", hub)
            shell("ip", "link", "add", link, "netns", name, "mtu", "9000", *veth)
            shell("ip", "-n", hub, "link", "set", f"port{i}", "mtu", "9000", "master", "hub", "up")
            shell("ip", "-n", name, "address", "add", f"10.77.0.{i + 1}/24", "dev", link)
            shell("ip", "-n", name, "link", "set", link, "up")
            shell("ip", "-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in made:
            subprocess.run(["ip", "netns", "delete", name])


def hub_of(names: list[str]) -> str:
    """The namespace of the bridge."""
    return names[0].rpartition("-")[0] + "-hub"


def on_hosts(names: Sequence[str], link: str, *words: str) -> int:
    """Start a rank in the namespace that is named for it, and wait; the first status that is not 0.

    Args:
        words: a Python script and what it is told.
    """
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for rank, name in enumerate(names):
            given: dict[str, object] = {
                "RANK": rank,
                "WORLD_SIZE": len(names),
                "LOCAL_RANK": names[:rank].count(name),
                "LOCAL_WORLD_SIZE": names.count(name),
            }
            given |= {"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": 29500}
            # without the warning that the addresses have no names
            given |= {"GLOO_SOCKET_IFNAME": link, "OMP_NUM_THREADS": 1, "TORCH_CPP_LOG_LEVEL": "ERROR"}
            environment = os.environ | {key: str(value) for key, value in given.items()}
            command = ["ip", "netns", "exec", name, sys.executable, *words]
            ranks.append(subprocess.Popen(command, env=environment))
        while any(each.poll() is None for each in ranks):
            if any(each.returncode for each in ranks):
                time.sleep(1)  # what the others say, too
                break
            time.sleep(0.1)
        return next((each.returncode for each in ranks if each.returncode), 0)
    finally:
        for each in ranks:
            each.kill()
        for each in ranks:
            each.wait()
