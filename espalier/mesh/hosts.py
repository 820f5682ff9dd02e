"""Which machines take part in a run, told by the caller or by what started it; and who is awaited.

What the environment says is read by a pure function (:func:`told_by`). :class:`Meeting` tells, while the
machines look for each other, which of them is waited for, and where.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

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
    said = {} if rendezvous is None else {"MASTER_ADDR": rendezvous.rpartition(":")[0] or rendezvous}
    launcher = None if nodes == 1 else told_by({**os.environ, **said}, socket.gethostname(), nodes)
    if nodes is None and node is None and rendezvous is None:
        return launcher
    if isinstance(launcher, Task):
        raise ValueError(
            "each rank was started by a launcher (srun, mpirun), one process for each: leave --nodes, "
            "--node-rank and --rdzv out, or start one process a machine (srun --ntasks-per-node=1, mpirun "
            "--npernode 1, mpiexec -ppn 1)"
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
    """What SLURM, MPI or Kubernetes say of a run of several machines; None where none of them does.

    Args:
        environ: the environment.
        hostname: this machine's.
        nodes: how many there are, where Kubernetes does not say.

    Raises:
        ValueError: MPI's launcher does not say where the first machine is, nor does anything else.
    """
    if "RANK" in environ and "WORLD_SIZE" in environ:
        return None  # torchrun has spoken
    # mpirun may have started its helpers by srun, of which the ranks then inherit the variables
    by_mpi = _by_open_mpi(environ)
    if by_mpi is None and environ.get("PMI_SIZE") != environ.get("SLURM_STEP_NUM_TASKS"):
        by_mpi = _by_hydra(environ)
    return by_mpi or _by_slurm(environ) or _by_kubernetes(environ, hostname, nodes)


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
    # the machine that mpirun runs on, which is the first of its ranks unless it was told otherwise
    uri = environ.get("OMPI_MCA_orte_hnp_uri") or environ.get("PMIX_SERVER_URI2", "")
    told = re.search(r"tcp4?://([\d.,]+)", uri)
    # newer ones name what each machine's own helper listens at, which no other reaches
    addresses = [x for x in told[1].split(",") if not x.startswith("127.")] if told else []
    names = "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"
    return _by_mpi(environ, *names, "OMPI_COMM_WORLD_LOCAL_RANK", "Open MPI", next(iter(addresses), ""))


def _by_hydra(environ: Mapping[str, str]) -> Hosts | Task | None:
    names = "PMI_SIZE", "PMI_RANK", "MPI_LOCALNRANKS", "MPI_LOCALRANKID"
    return _by_mpi(environ, *names, "MPI", "")


def _by_mpi(
    environ: Mapping[str, str], size: str, rank: str, here: str, place: str, source: str, first: str
) -> Hosts | Task | None:
    """What the variables of these names say.

    Args:
        first: where the first rank is, if the launcher says so.

    Raises:
        ValueError: nothing says it.
    """
    try:
        total, number, local = int(environ[size]), int(environ[rank]), int(environ[here])
        port = int(environ.get("MASTER_PORT", PORT))
    except (KeyError, ValueError):
        return None
    if total == 1:
        return None
    host = environ.get("MASTER_ADDR") or ("127.0.0.1" if local == total else first)
    host = host or next(iter(expand(environ.get("SLURM_JOB_NODELIST", ""))), "")
    if not host:
        raise ValueError(
            f"{source} has started {total} processes on several machines, and nothing says where the first "
            "is: MASTER_ADDR is missing. Hand it on, as mpirun -x MASTER_ADDR=first-host ... (Open MPI) or "
            "mpiexec -genv MASTER_ADDR first-host ... (MPICH, Intel MPI)."
        )
    if local == 1:
        return Hosts(total, number, host, port, source)
    variables = {"RANK": str(number), "WORLD_SIZE": str(total), "LOCAL_WORLD_SIZE": str(local)}
    variables["LOCAL_RANK"] = environ.get(place, "0")
    return Task({**variables, "MASTER_ADDR": host, "MASTER_PORT": str(port)})


def unjoined(environ: Mapping[str, str]) -> str:
    """What to tell of a process that is alone, though a launcher has started several; "" of others."""
    with contextlib.suppress(ValueError):
        if told_by(environ, "") is None:
            return ""
    return (
        "srun or mpirun has started several processes, but RANK and WORLD_SIZE are not set: each is alone. "
        "For one world of all of them start `espalier run SCRIPT.py` in place of `python SCRIPT.py`, or set "
        "them, MASTER_ADDR and MASTER_PORT too"
    )


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
        self._store: dist.TCPStore | None = None
        self._signing: threading.Thread | None = None
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
        while not self._done.wait(0.2):
            waits, why = self._look()
            if not waits:
                if awaited:
                    self._say(f"{self._me()}: all {self._hosts.nodes} nodes are there")
                return
            now = time.monotonic()
            if now - begun > _SILENT and (now - said > _AGAIN or waits != awaited):
                self._say(f"{self._me()} waits for {waits}{why}")
                said, awaited = now, waits

    def _look(self) -> tuple[str, str]:
        """Who is awaited, and what is known of why; nobody, once all are there."""
        why = self._reach()
        if why:
            return self._name(0), why
        if self._store is None:
            if self._signing is None or not self._signing.is_alive():
                self._signing = threading.Thread(target=self._sign_in, name="espalier-sign-in", daemon=True)
                self._signing.start()
                self._signing.join(1.0)
            if self._store is None:
                why = f": what answers at {self._hosts.endpoint} is not it; has another program that port?"
                return self._name(0), why
        try:
            missing = [n for n in range(self._hosts.nodes) if not self._store.check([_signed(n)])]
            if not missing:
                self._compare([json.loads(self._store.get(_signed(n))) for n in range(self._hosts.nodes)])
        except (dist.DistError, RuntimeError):
            self._store = None
            return self._name(0), ""
        return ", ".join(map(self._name, missing)), self._misled() if self._hosts.node == 0 else ""

    def _reach(self) -> str:
        """What stands in the way of the first machine; nothing if it answers."""
        host, port = self._hosts.host, self._hosts.port
        try:
            socket.create_connection((host, port), timeout=1.0).close()
        except socket.gaierror:
            return f": the name {host} is not known here"
        except OSError as error:
            why = (error.strerror or "no answer").lower()
            return f": nothing answers at {self._hosts.endpoint} ({why}){self._misled()}"
        return ""

    def _misled(self) -> str:
        """Whether this machine is not the one that its number says; asked where one is awaited."""
        host, node = self._hosts.host, self._hosts.node
        try:
            with socket.socket() as probe:
                probe.bind((host, 0))
        except OSError:
            return "" if node else f"; {host} is no address of this machine: is it the first?"
        is_alone = own_address(host, self._hosts.port).startswith("127.")  # several nodes on one machine
        return f"; {host} is this machine: is it not node 0?" if node and not is_alone else ""

    def _sign_in(self) -> None:
        hosts = self._hosts
        try:
            store = dist.TCPStore(
                hosts.host, hosts.port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=5)
            )
            mine = json.dumps([hosts.nodes, self._ranks, socket.gethostname(), os.getpid()])
            there = store.compare_set(_signed(hosts.node), "", mine).decode()
            if there != mine:
                self._say(
                    f"{self._me()}: a node {hosts.node} was there before, on {json.loads(there)[2]}; each "
                    "machine needs a --node-rank of its own"
                )
                store.set(_signed(hosts.node), mine)  # or it was this one, started again
            self._store = store
        except (dist.DistError, RuntimeError):
            return

    def _compare(self, nodes: Sequence[Sequence[Any]]) -> None:
        """Tell which machines were told of other numbers than this one."""
        for n, (total, ranks, host, _) in enumerate(nodes):
            if (total, ranks) != (self._hosts.nodes, self._ranks):
                self._say(
                    f"{self._me()} was told --nodes {self._hosts.nodes} and to start {self._ranks} of the "
                    f"ranks, but node {n}, on {host}, --nodes {total} and to start {ranks}: give all the same"
                )

    def _me(self) -> str:
        return f"{self._name(self._hosts.node)} on {socket.gethostname()}"

    def _name(self, node: int) -> str:
        first, last = node * self._ranks, (node + 1) * self._ranks - 1
        return f"node {node} (rank{f's {first} to {last}' if last > first else f' {first}'})"


def _signed(node: int) -> str:
    return f"espalier/node/{node}"


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
