"""How a rank joins its world and leaves it.

A rank calls :func:`start` before it communicates and :func:`finish` when it is done: under torchrun, under
``espalier.mesh.launch`` or alone. The first rank to fail leaves at once, so that the others, which wait for
it, fail within seconds too; under ``launch`` it notes when, which tells the cause from the consequences.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import gc
import io
import os
import re
import socket
import sys
import time
import traceback
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from espalier.device import backends, choose, count, use
from espalier.torch_private import forget_failed_world, set_group_timeout

# Names the folder of a launch, where the ranks leave their notes of failure.
FOLDER = "ESPALIER_LAUNCH_FOLDER"
# Where, in it, the watch over the ranks leaves its verdict; and the exit code of ranks that it stopped.
ACCOUNT = "account"
STOPPED = 76
STANDARD_TIMEOUT = 600.0
# In which the ranks of a world, once all are there, must have found each other, and how often they try.
MEETING = 60.0
TRIES = 2

# Errors that a rank sees because another one has gone, and how long such a rank lets that one die first.
_CONSEQUENCE = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|remote process exited|NCCL.*(abort|remote error)",
    re.IGNORECASE,
)
# a rank that leaves closes its connections a while before its process ends: longer on a busy machine
PATIENCE = 3.0


class Exits:
    """Who is told that this process leaves its world, and by what error.

    Each answers whether that stands in a report already.
    """

    listeners: ClassVar[tuple[Callable[[BaseException | None], bool], ...]] = ()

    @classmethod
    def tell(cls, error: BaseException | None) -> bool:
        """Tell all of them."""
        answers = [tell(error) for tell in cls.listeners]
        return any(answers)


class World:
    """What belongs to the running world and goes with it: a new one begins with nothing."""

    _own: ClassVar[tuple[Any, dict[str, Any]]] = (None, {})

    @classmethod
    def own(cls) -> dict[str, Any]:
        """By what it is; a process without a world has its own."""
        if cls._own[0] is not dist.group.WORLD:
            cls._own = (dist.group.WORLD, {})
        return cls._own[1]

    @classmethod
    def forget(cls) -> None:
        """Let go of it: process groups must not outlive the interpreter."""
        cls._own = (None, {})


atexit.register(World.forget)


@dataclass(frozen=True)
class Process:
    """This process's place in its world: rank of ``world_size``, ``local_rank`` on its node, its device."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device


def start(device_type: str | None = None, timeout: float = STANDARD_TIMEOUT) -> Process:
    """Join the world that torchrun's environment describes, or make a world of one where there is none.

    ``device_type`` is ``"cpu"`` (gloo), the accelerator's type (on CUDA: NCCL, and gloo for tensors on the
    CPU) or None: the accelerator if every local rank can have one of its own, else the CPU. ``timeout``, in
    seconds, is how long a collective may wait for the other ranks. Torch computes with as many threads as
    ``OMP_NUM_THREADS`` says.

    Where torch.distributed is initialized already, that world is kept and described. Raises ``ValueError``
    where the environment is incomplete or lacks devices, ``RuntimeError`` where the ranks cannot meet.
    """
    place = _read_environment()
    rank, world_size, local_rank, local_size, apart = place or (0, 1, 0, 1, False)
    if dist.is_initialized():
        rank, world_size = dist.get_rank(), dist.get_world_size()
    device = choose(device_type, local_rank, local_size, apart=apart)
    if dist.is_initialized():
        return Process(rank, world_size, local_rank, device)

    threads = os.environ.get("OMP_NUM_THREADS", "")
    if threads.isdecimal() and int(threads) > 0:
        torch.set_num_threads(int(threads))
    if local_size == world_size:
        use_loopback(os.environ)
    use(device)
    options = backends(device)
    if place is None:
        # A store inside the process: a world of one needs no port.
        options |= {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    try:
        if world_size > 1 and options["backend"] == dist.Backend.GLOO:
            _meet(rank, world_size, timeout)
        else:
            dist.init_process_group(**options, timeout=timedelta(seconds=timeout))
    except RuntimeError as error:
        meeting = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise RuntimeError(
            f"rank {rank} of {world_size} could not meet the others at {meeting}: {first_line(error)}\n"
            "Is the port free on rank 0's machine, and reachable from here?"
        ) from error
    atexit.register(_leave_quietly)
    if world_size > 1:
        die_fast(rank)
    return Process(rank, world_size, local_rank, device)


def _meet(rank: int, world_size: int, timeout: float) -> None:
    """Join a world of gloo, once more where the ranks waited for each other in vain.

    That is rare, and nobody knows why. All ranks try again, or none: each tells how it went.

    Raises:
        RuntimeError: a rank has not come in ``timeout`` seconds, or they have not met in the last try.
    """
    patience = timedelta(seconds=timeout)
    store, *_ = next(dist.rendezvous("env://", timeout=patience))
    # torchrun's store outlives a world, and this process may have more than one
    store = dist.PrefixStore(f"start {store.add(f'started {rank}', 1)}", store)
    limit = timedelta(seconds=min(timeout, MEETING))
    for attempt in range(TRIES):
        _told_by_all(store, f"here {attempt}", rank, world_size, "", patience)
        error = ""
        try:
            dist.init_process_group(
                dist.Backend.GLOO,
                store=dist.PrefixStore(f"attempt {attempt}", store),
                rank=rank,
                world_size=world_size,
                timeout=limit,
            )
        except RuntimeError as failure:
            error = first_line(failure) or type(failure).__name__
        told = _told_by_all(store, f"met {attempt}", rank, world_size, error, 2 * limit)
        if not any(told):
            set_group_timeout(patience)
            return
        if dist.is_initialized():
            dist.destroy_process_group()
        forget_failed_world()
    failed = next(i for i, words in enumerate(told) if words)
    raise RuntimeError(f"rank {failed}: {told[failed]} (tried {TRIES} times)")


def _told_by_all(
    store: dist.Store, what: str, rank: int, world_size: int, words: str, limit: timedelta
) -> list[str]:
    """What each rank has to say, in order, when all have said it."""
    store.set(f"{what} {rank}", words)
    keys = [f"{what} {i}" for i in range(world_size)]
    store.wait(keys, limit)
    return [store.get(key).decode() for key in keys]


def finish() -> None:
    """Wait for the other ranks, give the process group up and flush; nothing happens without a group.

    In a ``finally`` block that an exception is passing through, the other ranks are not waited for: they may
    never come. Gloo's threads must not outlive this: at interpreter exit they would abort the process.
    """
    if not dist.is_initialized():
        return
    error = sys.exc_info()[1]
    try:
        if error is None:
            try:
                dist.barrier()
            except RuntimeError as met:  # another rank has gone
                _note_failure(dist.get_rank(), met, Exits.tell(met))
                raise
        elif isinstance(error, Exception):
            # Before the group goes, which makes the other ranks fail in their turn.
            _note_failure(dist.get_rank(), error, Exits.tell(error))
        if not isinstance(error, Exception):
            Exits.tell(error)
    finally:
        dist.destroy_process_group()
        gc.collect()  # what nobody reaches any more may hold groups of its own
        _flush()


def _read_environment() -> tuple[int, int, int, int, bool] | None:
    """Rank, world size, local rank and local world size as torchrun sets them; None if it sets nothing.

    What of the local ones is missing the launcher of the tasks may tell. Last whether it has given each an
    environment of its own.
    """
    if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
        return None
    required = ["RANK", "WORLD_SIZE"]
    if not dist.is_initialized():
        required += ["MASTER_ADDR", "MASTER_PORT"]
    missing = [name for name in required if not os.environ.get(name)]
    if missing:
        raise ValueError(
            f"the environment has only a part of what torchrun sets: {', '.join(missing)} missing. "
            "Start with `espalier run` or `torchrun`, or unset RANK and WORLD_SIZE for a single process."
        )
    values: dict[str, int] = {}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT"):
        text = os.environ.get(name)
        if text is None:
            continue
        if not text.isdecimal():
            raise ValueError(f"{name}={text!r} in the environment: expected a whole number")
        values[name] = int(text)
    if values["RANK"] >= values["WORLD_SIZE"]:
        raise ValueError(f"RANK={values['RANK']} but WORLD_SIZE={values['WORLD_SIZE']}: ranks start at 0")
    rank, world_size = values["RANK"], values["WORLD_SIZE"]
    by_launcher = _told_by_launcher(world_size)
    # where nobody says, devices are dealt out in turn, as torch's DeviceMesh does
    local_rank, local_size = by_launcher or (rank % max(count(), 1), 1)
    local = values.get("LOCAL_RANK", local_rank), values.get("LOCAL_WORLD_SIZE", local_size)
    return rank, world_size, *local, by_launcher is not None


# of launchers that start each rank by themselves: how many they have started, this one's place among those of
# its machine, and how many these are
_LAUNCHERS = (
    ("SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)


def _told_by_launcher(world_size: int) -> tuple[int, int] | None:
    """The local rank and the local world size, if the tasks of a launcher are the ranks of the world."""
    for names in _LAUNCHERS:
        tasks, place, here = (os.environ.get(name, "") for name in names)
        if tasks != str(world_size) or not place.isdecimal():
            continue
        # SLURM's is a list, one for each node: 8(x2),4
        of_nodes = re.findall(r"(\d+)(?:\(x(\d+)\))?", here)
        sizes = [int(n) for n, times in of_nodes for _ in range(int(times or 1))]
        node = int(os.environ.get("SLURM_NODEID", "0")) if len(sizes) > 1 else 0
        return int(place), sizes[node] if node < len(sizes) else int(place) + 1
    return None


def use_loopback(environment: MutableMapping[str, str]) -> None:
    """Make gloo use the loopback: by itself it looks up the host's name, which need not resolve."""
    if "GLOO_SOCKET_IFNAME" not in environment and sys.platform == "linux":
        if any(name == "lo" for _, name in socket.if_nameindex()):
            environment["GLOO_SOCKET_IFNAME"] = "lo"


class _Terminal(io.FileIO):
    """A terminal that may be closed while the program still has something to save."""

    def write(self, data: Any, /) -> int:
        """What is written to a closed one goes nowhere."""
        try:
            return super().write(data)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            return memoryview(data).nbytes


def outlive_terminal() -> None:
    """Let this process go on printing when its terminal is closed."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and stream.isatty():
            raw = io.BufferedWriter(_Terminal(stream.fileno(), "w", closefd=False))
            own = io.TextIOWrapper(raw, stream.encoding, "replace", line_buffering=True)
            setattr(sys, name, own)


def die_fast(rank: int) -> None:
    """Let an uncaught exception end the process at once, by way of the hook that was there before.

    The usual end of an interpreter may wait for gloo's threads, which wait for the other ranks.
    """
    report = sys.excepthook
    if getattr(report, "of_espalier", False):
        return

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not dist.is_initialized() and not Exits.listeners:
            report(kind, error, trace)
            return
        reported = Exits.tell(error)
        _note_failure(rank, error, reported)
        if not reported or FOLDER in os.environ:
            report(kind, error, trace)
        _flush()
        os._exit(130 if issubclass(kind, KeyboardInterrupt) else STOPPED if reported else 1)

    hook.of_espalier = True  # type: ignore[attr-defined]
    sys.excepthook = hook


def _note_failure(rank: int, error: BaseException, reported: bool) -> None:
    """Write down, for the launcher, what failed; the file's time says when. The first note stays."""
    text = "".join(traceback.format_exception_only(error))
    folder = os.environ.get(FOLDER)
    if folder is None:
        return
    with contextlib.suppress(OSError), open(note_file(Path(folder), rank), "x", encoding="utf-8") as note:
        note.write(text)
    if is_consequence(text) and not reported:
        time.sleep(PATIENCE)


def _leave_quietly() -> None:
    if dist.is_initialized():
        with contextlib.suppress(Exception):
            dist.destroy_process_group()


def running_rank(group: dist.ProcessGroup | None = None) -> int:
    """This rank's number, in a group; 0 of a process without a world."""
    return dist.get_rank(group) if dist.is_initialized() else 0


def running_size(group: dist.ProcessGroup | None = None) -> int:
    """How many ranks there are, in a group; 1 of a process without a world."""
    return dist.get_world_size(group) if dist.is_initialized() else 1


def is_fake() -> bool:
    """Whether the running world is torch's of one process, in which nobody else is there (backend "fake")."""
    return dist.get_backend() == "fake"


def is_consequence(text: str) -> bool:
    """Whether an error's text says no more than that another rank has gone."""
    return _CONSEQUENCE.search(text) is not None


def note_file(folder: Path, rank: int) -> Path:
    """Where a rank notes its failure."""
    return folder / f"rank{rank}.failure"


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


def first_line(error: BaseException) -> str:
    """The first line of an error's message: torch appends C++ stacks to its own."""
    return str(error).strip().partition("\n")[0]
