"""Whether this process does anything: what its threads compute, its sockets carry, its children do.

For the watch over ranks (:mod:`espalier.faults.watchdog`): a rank that is busy does not hang, however long.
On systems without ``/proc`` only the computing is seen.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import select
import signal
import socket
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate, chain, repeat, takewhile
from operator import attrgetter, call, itemgetter
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final, NamedTuple, TypeVar

import torch.distributed as dist

from espalier.device import mark

_T = TypeVar("_T")

_PROC: Final = Path("/proc")
_CPU_SHARE: Final = 0.01  # of a core: less is not work
_BYTES: Final = 32_768  # a second, over sockets: less is not traffic
# threads that turn over without anything to do: gloo's loop, the store's server
_IDLERS: Final = ("gloo_tcp_loop", "pt_tcpstore", "pt_gloo_runloop")
# where a program waits for something outside of it, by the module that its innermost frame is in
_OUTSIDE: Final = frozenset(
    "socket ssl http urllib urllib3 requests subprocess select selectors multiprocessing concurrent asyncio "
    "queue shutil fsspec s3fs gcsfs".split()
)
_DEBUGGERS: Final = frozenset("bdb pdb cmd IPython ipdb".split())
_ACKED: Final = 120  # where tcp_info has the bytes that were acknowledged, and after them those received
_RESENT: Final = 2  # and how often it has sent again what was not
_TRIES: Final = 3  # so often, with nothing in between: it does not arrive

_LIBRARY: Final = (str(Path(__file__).parents[1]), str(Path(os.__file__).parent), "<")
_PACKAGES: Final = f"{os.sep}site-packages{os.sep}"
_COLLECTIVES: Final = tuple(
    str(folder) + os.sep for folder in (Path(dist.__file__).parent, Path(__file__).parents[1] / "comm")
)


class Look(NamedTuple):
    """What the main thread is at.

    Attributes:
        state: ``"busy"``; ``"waits"`` in a collective; ``"idle"``; ``"outside"``: waits for what is not the
            program's; ``"held"``: by a debugger.
        where: the line of the program, and the innermost one.
        resends: whether a connection sends again and again what the other end does not acknowledge.
    """

    state: str
    where: str
    resends: bool = False


class Activity:
    """The process's activity, look by look.

    Args:
        own: native ids of the threads that look, which are left out.
        port: the store's; its traffic is the watch's own.
    """

    def __init__(self, own: Collection[int], port: int | None) -> None:
        self._own, self._port = own, port
        self._main = threading.main_thread()
        self._at = time.monotonic()
        self._cpu = self._computed()
        self._besides: tuple[int, float] | None = None
        self._resends = False

    def look(self, hard: bool) -> Look:
        """What the process did since the last look; ``hard``: also at what costs more to see."""
        now = time.monotonic()
        passed, self._at = max(now - self._at, 1e-3), now
        before, self._cpu = self._cpu, self._computed()
        besides = (self._carried(), self._of_children()) if hard else None
        last, self._besides = self._besides, besides
        moved = worked = False
        if besides is not None and last is not None:
            moved = besides[0] - last[0] > _BYTES * passed
            worked = besides[1] - last[1] > _CPU_SHARE * passed
        seen = _seen(self._main.ident or 0)
        if seen is None:
            return Look("busy", "")
        main, every = (b - a > _CPU_SHARE * passed for a, b in zip(before, self._cpu, strict=True))
        if main or moved or _state(os.getpid(), self._main.native_id) in _READY:
            return Look("busy", seen.where)
        if seen.communicates:
            # what other threads of the program do meanwhile is no part of its progress
            return Look("waits", seen.where, self._resends)
        if seen.held:
            return Look("held", seen.where)
        if every or worked:
            return Look("busy", seen.where)
        return Look("outside" if seen.outside else "idle", seen.where)

    def _computed(self) -> tuple[float, float]:
        """Seconds that the main thread has computed, and all."""
        main, total, seen = 0.0, 0.0, False
        with contextlib.suppress(OSError):
            for task in (_PROC / "self/task").iterdir():
                with contextlib.suppress(OSError, ValueError, IndexError):
                    number = int(task.name)
                    if number in self._own or (task / "comm").read_text().startswith(_IDLERS):
                        continue
                    spent = int((task / "schedstat").read_text().split()[0]) / 1e9
                    main += spent if number == self._main.native_id else 0.0
                    total, seen = total + spent, True
        return (main, total) if seen else (time.process_time(), time.process_time())

    def _carried(self) -> int:
        """Bytes that its TCP connections have sent and received, but for the store's."""
        total, self._resends = 0, False
        with contextlib.suppress(OSError):
            for entry in (_PROC / "self/fd").iterdir():
                with contextlib.suppress(OSError, struct.error, ValueError):
                    if os.readlink(entry).startswith("socket:"):
                        total += self._of_socket(int(entry.name))
        return total

    def _of_socket(self, descriptor: int) -> int:
        with socket.socket(fileno=os.dup(descriptor)) as one:
            if one.family not in (socket.AF_INET, socket.AF_INET6) or one.type != socket.SOCK_STREAM:
                return 0
            if self._port in (one.getsockname()[1], one.getpeername()[1]):
                return 0
            info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192)
            self._resends |= info[_RESENT] >= _TRIES
            acked, received = struct.unpack_from("=QQ", info, _ACKED)
            return int(acked + received)

    def _of_children(self) -> float:
        """Seconds that processes started by this one, and by them, have computed."""
        parents: dict[int, tuple[int, float]] = {}
        with contextlib.suppress(OSError):
            for entry in _PROC.iterdir():
                if entry.name.isdecimal() and (stat := _stat(int(entry.name))) is not None:
                    parents[int(entry.name)] = int(stat[1]), (int(stat[11]) + int(stat[12])) / _TICKS
        total, family = 0.0, {os.getpid()}
        while born := {pid for pid, (parent, _) in parents.items() if parent in family} - family:
            family |= born
            total += sum(parents[pid][1] for pid in born)
        return total


class Device:
    """Whether an accelerator gets on with what it was given.

    A program that waits for its device keeps a core busy on some, and is not seen to wait. So a mark is
    put behind all that the device was given; a device that hangs in a collective never comes past it.

    Args:
        mark: puts one, and gives what says whether the device came past it; None where there is no device.
    """

    def __init__(self, mark: Callable[[], Callable[[], bool]] | None) -> None:
        self._put, self._since = mark, 0.0
        self._mark: Callable[[], bool] | None = None

    @classmethod
    def of_program(cls) -> Device:
        """The one that this thread's program uses."""
        return cls(mark())

    def stuck(self, now: float) -> float:
        """Seconds since it was given what it is still at, as far as these looks saw."""
        if self._put is None:
            return 0.0
        if self._mark is None or self._mark():
            self._mark, self._since = self._put(), now
        return now - self._since

    def moves(self) -> None:
        """The program has begun something new: no mark is needed."""
        self._mark = None


def computed_by(pid: int) -> float | None:
    """Seconds that another process of this machine has computed; None when it has ended or is not seen."""
    stat = _stat(pid)
    return None if stat is None or stat[0] in "ZX" else (int(stat[11]) + int(stat[12])) / _TICKS


def is_ready(pid: int) -> bool:
    """Whether a thread of another process of this machine computes or waits for a core, or for a disk."""
    threads: list[int] = []
    with contextlib.suppress(OSError):
        threads = [int(task.name) for task in (_PROC / str(pid) / "task").iterdir()]
    return any(_state(pid, thread) in _READY for thread in threads)


def machine() -> str:
    """What two processes have in common that see each other by process id."""
    space = ""
    with contextlib.suppress(OSError):
        space = os.readlink("/proc/self/ns/pid") + (_PROC / "sys/kernel/random/boot_id").read_text().strip()
    return f"{socket.gethostname()} {space}"


_READY: Final = ("R", "D")
_TICKS: Final = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


def _stat(pid: int, thread: int | None = None) -> list[str] | None:
    """The fields of a process's or thread's ``stat`` from its state on."""
    path = _PROC / str(pid) / ("stat" if thread is None else f"task/{thread}/stat")
    try:
        return path.read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None


def _state(pid: int, thread: int | None) -> str:
    stat = _stat(pid, thread)
    return stat[0] if stat else ""


class _Seen(NamedTuple):
    where: str
    communicates: bool
    held: bool
    outside: bool


class _Frame(NamedTuple):
    file: str
    line: int | None
    function: str


def _seen(thread: int) -> _Seen | None:
    """What the frames of a thread tell; None where it has none."""
    stacks = _stacks()
    frames = stacks.get(thread)
    if not frames:
        return None
    modules = [_module(frame) for frame in frames]
    return _Seen(
        _site(frames),
        any(_communicates(each[0]) for each in stacks.values() if each),
        not _DEBUGGERS.isdisjoint(modules),
        modules[0] in _OUTSIDE,
    )


def _stacks() -> dict[int, list[_Frame]]:
    """The frames of each other thread, innermost first, by its identifier.

    Read in one call of C, during which no other thread runs: of frames that Python takes one by one the first
    ones have returned by the last, and who holds a frame holds what its function's names held, tensors too.
    CPython 3.11 asks for more. Where it collects garbage as it makes a frame object, it writes into memory of
    what the thread runs now: none is collected here. And ``faulthandler``, which would write all this in one
    call, ends the process where it meets a thread of C++ that is just becoming one of Python's.
    """
    frames: dict[int, FrameType] = {}
    threads: list[int] = []
    stacks: list[list[tuple[CodeType, int | None]]] = []
    innermost = map(itemgetter(slice(1, None)), _in_turn(frames.items()))
    outwards = map(accumulate, map(chain, innermost, repeat(repeat("f_back"))), repeat(getattr))
    lines = map(map, repeat(attrgetter("f_code", "f_lineno")), map(takewhile, repeat(bool), outwards))
    steps: list[Callable[[], object]] = [
        partial(frames.update, chain.from_iterable(map(dict.items, map(call, [sys._current_frames])))),
        partial(threads.extend, _in_turn(frames)),
        partial(stacks.extend, map(list, lines)),
        frames.clear,
    ]
    if gc.isenabled() and sys.version_info < (3, 12):
        steps = [gc.disable, *steps, gc.enable]
    deque(map(call, steps), maxlen=0)
    own = threading.get_ident()
    return {
        thread: [_Frame(code.co_filename, line, code.co_name) for code, line in stack]
        for thread, stack in zip(threads, stacks, strict=True)
        if thread != own
    }


def _in_turn(collection: Iterable[_T]) -> Iterator[_T]:
    """What is in it when the first is asked for."""
    return chain.from_iterable((collection,))


def _module(frame: _Frame) -> str:
    """The first name of a module of the standard library or of a package; empty for others."""
    _, found, inside = frame.file.rpartition(_PACKAGES)
    if not found:
        inside = frame.file.removeprefix(_LIBRARY[1] + os.sep)
        if inside == frame.file:
            return ""
    return inside.partition(os.sep)[0].removesuffix(".py")


def _communicates(frame: _Frame) -> bool:
    return frame.file.startswith(_COLLECTIVES)


def _site(frames: Sequence[_Frame]) -> str:
    """The user's line, and after it the innermost one, if that is not the same."""
    outer = next((frame for frame in frames if not _foreign(frame)), None)
    if outer is None:
        return _line(frames[0])
    return _line(outer) if outer is frames[0] else f"{_line(outer)}, within {_line(frames[0])}"


def _foreign(frame: _Frame) -> bool:
    return frame.file.startswith(_LIBRARY) or _PACKAGES in frame.file


def _line(frame: _Frame) -> str:
    path = Path(frame.file)
    return f"{path.parent.name}/{path.name}:{frame.line} in {frame.function}"


# ---- signals that ask a rank to leave, heard while its main thread is in C++ too


_PATIENCE: Final = (
    1.5  # seconds in which the cause of a SIGTERM may be found: torchrun sends it when a rank died
)
_LEAVE: Final = tuple(
    getattr(signal, name) for name in ("SIGTERM", "SIGUSR1", "SIGHUP") if hasattr(signal, name)
)


class Signals:
    """What this process was told by signals.

    Python's own handlers run when the main thread comes back to Python: one that waits for other ranks never
    does. So the interpreter is told to write the signal's number to a pipe, and a thread hears.

    Attributes:
        asked: whether the process shall save and leave.
    """

    def __init__(self) -> None:
        self.asked = False
        self._saves = False
        self._terminated = 0.0
        self._pipe = -1, -1  # left open: a thread may still read
        self._before: dict[int, Any] = {}
        self._process = os.getpid()
        self._wakes = False

    def hear(self) -> None:
        """Hear of SIGTERM, where nobody else does; only the main thread may ask for it."""
        self._pipe = os.pipe()
        for end in self._pipe:
            os.set_blocking(end, False)
        if threading.current_thread() is not threading.main_thread():
            return
        self._take(signal.SIGTERM)

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """While open SIGTERM, SIGUSR1 and SIGHUP ask this process to save and leave; it survives them."""
        main = threading.current_thread() is threading.main_thread()
        had = set(self._before)
        self._saves = True
        for number in _LEAVE if main else ():
            self._take(number)
        try:
            yield
        finally:
            self._saves = False
            for number in set(self._before) - had:
                signal.signal(number, self._before.pop(number))

    def _take(self, number: int) -> None:
        if signal.getsignal(number) is not signal.SIG_DFL:
            return
        if not self._wakes and self._pipe[1] >= 0:
            before = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
            if before != -1:
                signal.set_wakeup_fd(before)  # somebody else's, an event loop's
            self._wakes = before == -1
            os.register_at_fork(after_in_child=self._in_child)
        self._before[number] = signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() == self._process:
            self._note(number)

    def _note(self, number: int) -> None:
        if self._saves and number in _LEAVE:
            self.asked = True  # it leaves by itself, and may take its time
        elif number == signal.SIGTERM and not self._terminated:
            self._terminated = time.monotonic()

    def _in_child(self) -> None:
        """A forked child (of a data loader) dies of signals as any other."""
        if self._wakes:
            signal.set_wakeup_fd(-1)
        for number, before in self._before.items():
            signal.signal(number, before)
        self._before.clear()
        self._wakes = False

    def came(self, timeout: float) -> bool:
        """Wait for a signal, or for :meth:`wake`; whether something came."""
        if not select.select([self._pipe[0]], [], [], timeout)[0]:
            return False
        with contextlib.suppress(OSError):
            for number in os.read(self._pipe[0], 64):
                if number in self._before:
                    self._note(number)
        return True

    def wake(self) -> None:
        """End a wait."""
        with contextlib.suppress(OSError):
            os.write(self._pipe[1], b"\0")

    def fatal(self) -> bool:
        """Whether the process shall die of SIGTERM now: it came, no other cause showed, and nobody saves."""
        came = self._terminated
        return came > 0 and not self._saves and time.monotonic() - came >= _PATIENCE

    def die(self) -> None:
        """As if nobody had heard."""
        ctypes.CDLL(None).signal(int(signal.SIGTERM), 0)
        os.kill(os.getpid(), signal.SIGTERM)

    def forget(self) -> None:
        """Put back what was before; only the main thread may, others leave it to the end of the process."""
        if threading.current_thread() is not threading.main_thread():
            return
        if self._wakes:
            signal.set_wakeup_fd(-1)
            self._wakes = False
        for number, before in self._before.items():
            signal.signal(number, before)
        self._before.clear()
