"""Machines played by network namespaces, joined by a bridge (Linux, root, iproute2)."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator


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
