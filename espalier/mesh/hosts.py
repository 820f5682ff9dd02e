"""Which machines take part in a run, told by the caller or by what started it; and who is awaited.

What the environment says is read by a pure function (:func:`told_by`). :class:`Meeting` tells, while the
machines look for each other, which of them is waited for, and where.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

PORT = 29500
_SILENT, _AGAIN = 2.0, 10.0  # seconds before the first word, and between two


@dataclass(frozen=True)
class Hosts:
    """The machines of a run, and which of them this is.

    Attributes:
        nodes: how many.
        node: this one, from 0.
        host: where the first one is: a name or an address.
        port: where it listens.
        source: who says so.
    """

    nodes: int
    node: int
    host: str
    port: int = PORT
    source: str = "the options"

    @property
    def endpoint(self) -> str:
        """Host and port."""
        return f"{self.host}:{self.port}"

    def __str__(self) -> str:
        return f"node {self.node} of {self.nodes}, the first is {self.endpoint} (by {self.source})"


@dataclass(frozen=True)
class Task:
    """One rank, started by a launcher that has started all of them: what torchrun would have set."""

    environment: Mapping[str, str]


def find_hosts(nodes: int | None, node: int | None, rendezvous: str | None) -> Hosts | Task | None:
    """The machines of a run, by options, or, where these are silent, by the environment; None for this alone.

    Args:
        nodes: how many; None where the options don't say.
        node: which this is.
        rendezvous: HOST or HOST:PORT of the first.

    Raises:
        ValueError: a part is missing, and nothing else tells it.
    """
    launcher = None if nodes == 1 else told_by(os.environ, socket.gethostname(), nodes)
    if nodes is None and node is None and rendezvous is None:
        return launcher
    if isinstance(launcher, Task):
        raise ValueError(
            "each rank was started by a launcher (srun, mpirun), one process for each: leave --nodes out, or "
            "start one process a machine (srun --ntasks-per-node=1, mpirun --npernode 1)"
        )
    total = nodes or (launcher.nodes if launcher else None)
    this = node if node is not None else launcher.node if launcher else None
    first = rendezvous or (launcher.endpoint if launcher else None)
    if total == 1:
        return None
    missing = [
        option
        for option, value in (("--nodes N", total), ("--node-rank K", this), ("--rdzv HOST:PORT", first))
        if value is None
    ]
    if missing or total is None or this is None or first is None:
        raise ValueError(
            f"several machines need {', '.join(missing)} too: on each the same but for the node rank, as "
            "--nodes 2 --node-rank 0 --rdzv first-host:29500"
        )
    if not 0 <= this < total:
        raise ValueError(f"--node-rank {this}: expected 0 to {total - 1}, for there are {total} nodes")
    host, _, port = first.rpartition(":") if ":" in first else (first, "", str(PORT))
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"--rdzv {first}: expected HOST:PORT of the first node, as first-host:29500")
    return Hosts(
        total, this, host, int(port), launcher.source if launcher and nodes is None else "the options"
    )


def told_by(environ: Mapping[str, str], hostname: str, nodes: int | None = None) -> Hosts | Task | None:
    """What SLURM, Open MPI or Kubernetes say of a run of several machines; None where none of them does.

    Args:
        environ: the environment.
        hostname: this machine's.
        nodes: how many there are, where Kubernetes does not say.
    """
    if "RANK" in environ and "WORLD_SIZE" in environ:
        return None  # torchrun has spoken
    return _by_slurm(environ) or _by_open_mpi(environ) or _by_kubernetes(environ, hostname, nodes)


def _by_slurm(environ: Mapping[str, str]) -> Hosts | Task | None:
    try:
        tasks, nodes = int(environ["SLURM_STEP_NUM_TASKS"]), int(environ["SLURM_STEP_NUM_NODES"])
        hosts = expand(environ["SLURM_STEP_NODELIST"])
        rank, node = environ["SLURM_PROCID"], int(environ["SLURM_NODEID"])
        port = 20000 + int(environ.get("SLURM_JOB_ID", "0")) % 20000
    except (KeyError, ValueError):
        return None
    if not hosts or tasks == 1:
        return None
    if tasks == nodes:
        return Hosts(nodes, node, hosts[0], port, "SLURM")
    variables = {"RANK": rank, "WORLD_SIZE": str(tasks), "LOCAL_RANK": environ.get("SLURM_LOCALID", "0")}
    return Task({**variables, "MASTER_ADDR": hosts[0], "MASTER_PORT": str(port)})


def _by_open_mpi(environ: Mapping[str, str]) -> Hosts | Task | None:
    try:
        size, rank = int(environ["OMPI_COMM_WORLD_SIZE"]), int(environ["OMPI_COMM_WORLD_RANK"])
        here = int(environ["OMPI_COMM_WORLD_LOCAL_SIZE"])
    except (KeyError, ValueError):
        return None
    # the machine that mpirun runs on, which is the first of its ranks unless it was told otherwise
    uri = environ.get("OMPI_MCA_orte_hnp_uri") or environ.get("PMIX_SERVER_URI2", "")
    address = re.search(r"tcp4?://([\d.]+)", uri)
    host = environ.get("MASTER_ADDR") or (address[1] if address else "")
    if size == 1 or not host:
        return None
    port = int(environ.get("MASTER_PORT", PORT))
    if here == 1:
        return Hosts(size, rank, host, port, "Open MPI")
    variables = {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(here)}
    variables["LOCAL_RANK"] = environ.get("OMPI_COMM_WORLD_LOCAL_RANK", "0")
    return Task({**variables, "MASTER_ADDR": host, "MASTER_PORT": str(port)})


def _by_kubernetes(environ: Mapping[str, str], hostname: str, nodes: int | None) -> Hosts | None:
    # Kubeflow's training operator sets what torchrun would read
    if environ.get("PET_NNODES", "").isdecimal() and int(environ["PET_NNODES"]) > 1:
        first = environ.get("PET_RDZV_ENDPOINT") or environ.get("PET_MASTER_ADDR", "")
        node = environ.get("PET_NODE_RANK", environ.get("JOB_COMPLETION_INDEX", ""))
        host, _, port = first.partition(":")
        port = port or environ.get("PET_MASTER_PORT", str(PORT))
        if host and node.isdecimal() and port.isdecimal():
            return Hosts(int(environ["PET_NNODES"]), int(node), host, int(port), "Kubeflow")
    # an indexed job, whose pods are NAME-0, NAME-1, ... below a headless service
    index = environ.get("JOB_COMPLETION_INDEX", "")
    if nodes is not None and index.isdecimal() and "KUBERNETES_SERVICE_HOST" in environ:
        first = re.sub(r"-\d+(?=\.|$)", "-0", hostname, count=1)
        return Hosts(nodes, int(index), environ.get("MASTER_ADDR", first), PORT, "Kubernetes")
    return None


def expand(nodelist: str) -> list[str]:
    """The hosts of SLURM's short form: ``a[01-03,7],b`` are a01, a02, a03, a7, b."""
    hosts = []
    for name, inner, rest in re.findall(r"([^,\[\]]+)(?:\[([^\]]*)\])?([^,\[\]]*)", nodelist):
        for part in inner.split(",") if inner else [""]:
            low, _, high = part.partition("-")
            numbers = range(int(low), int(high) + 1) if high else [low]
            hosts += [f"{name}{str(number).zfill(len(low)) if high else number}{rest}" for number in numbers]
    return hosts


def own_address(host: str, port: int) -> str:
    """The address by which this machine reaches another, and is reached by it; its name if it has none."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])
    return socket.gethostname()


class Meeting:
    """Tells, while machines look for each other, which is waited for; used as a context manager.

    Each signs in at the store that the first one opens; nothing is said where all are there within seconds.

    Args:
        hosts: of the run, and which of them this is.
        ranks: of each machine.
        say: told a line.
    """

    def __init__(self, hosts: Hosts, ranks: int, say: Callable[[str], None]) -> None:
        self._hosts, self._ranks, self._say = hosts, ranks, say
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="espalier-meeting", daemon=True)

    def __enter__(self) -> Meeting:
        self._thread.start()
        return self

    def __exit__(self, *stop: object) -> None:
        self._done.set()
        self._thread.join(1.0)

    def _watch(self) -> None:
        begun, said = time.monotonic(), 0.0
        awaited = ""
        store: dist.TCPStore | None = None
        while not self._done.wait(0.2):
            waits = self._reach()
            if waits is None:
                try:
                    store = store or self._sign_in()
                    missing = self._missing(store)
                except (dist.DistError, RuntimeError):
                    store, missing = None, []
                    waits = self._name(0)
                if waits is None and not missing:
                    if awaited:
                        self._say(f"{self._me()}: all {self._hosts.nodes} nodes are there")
                    return
                waits = waits or ", ".join(self._name(node) for node in missing)
            now = time.monotonic()
            if now - begun > _SILENT and (now - said > _AGAIN or waits != awaited):
                self._say(f"{self._me()} waits for {waits}")
                said, awaited = now, waits

    def _reach(self) -> str | None:
        """What stands in the way of the first machine; None if it answers."""
        host, port = self._hosts.host, self._hosts.port
        try:
            socket.create_connection((host, port), timeout=1.0).close()
        except socket.gaierror:
            return f"{self._name(0)}: the name {host} is not known here"
        except OSError as error:
            why = error.strerror or "no answer"
            return f"{self._name(0)}: nothing answers at {self._hosts.endpoint} ({why.lower()})"
        return None

    def _sign_in(self) -> dist.TCPStore:
        hosts = self._hosts
        store = dist.TCPStore(
            hosts.host, hosts.port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=5)
        )
        store.set(f"espalier/node/{hosts.node}", socket.gethostname())
        return store

    def _missing(self, store: dist.TCPStore) -> list[int]:
        return [n for n in range(self._hosts.nodes) if not store.check([f"espalier/node/{n}"])]

    def _me(self) -> str:
        return f"{self._name(self._hosts.node)} on {socket.gethostname()}"

    def _name(self, node: int) -> str:
        first, last = node * self._ranks, (node + 1) * self._ranks - 1
        return f"node {node} (rank{f's {first} to {last}' if last > first else f' {first}'})"


@contextlib.contextmanager
def meeting(hosts: Hosts | None, ranks: int) -> Iterator[None]:
    """A :class:`Meeting` that speaks on standard error; none for one machine."""
    if hosts is None:
        yield
        return
    with Meeting(hosts, ranks, lambda line: print(f"espalier: {line}", file=sys.stderr, flush=True)):
        yield


def settings_for(hosts: Hosts) -> dict[str, str]:
    """What ranks need in their environment, where it is silent: gloo's interface, by the way to the first.

    Raises:
        ValueError: the interface that it names is one that no other machine reaches.
    """
    address = own_address(hosts.host, hosts.port)
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    if interface == "lo" and not address.startswith("127."):
        raise ValueError(
            f"GLOO_SOCKET_IFNAME={interface}: no other machine reaches this one's loopback, and the ranks of "
            f"{hosts.nodes} would wait for each other. Unset it, or name the interface that has {address}."
        )
    if interface is not None or sys.platform != "linux":
        return {}
    name = _interface(address)
    return {} if name is None else {"GLOO_SOCKET_IFNAME": name}


def _interface(address: str) -> str | None:
    """The network interface that has an address."""
    import fcntl
    import struct

    names: Sequence[str] = [name for _, name in socket.if_nameindex()]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for name in names:
            with contextlib.suppress(OSError):
                asked = struct.pack("256s", name.encode()[:15])
                got = fcntl.ioctl(probe.fileno(), 0x8915, asked)  # SIOCGIFADDR
                if socket.inet_ntoa(got[20:24]) == address:
                    return name
    return None
