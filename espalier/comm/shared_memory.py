"""Messages between processes of one host, through memory that they share.

Each process has one *segment*: memory without a name (a memfd), which its peers open by way of ``/proc`` and
map. So nothing is left behind, whatever becomes of the processes, only the same user's processes can open it,
and no limit of ``/dev/shm`` counts. A message lies in a block of its sender's segment, from which its readers
take it in place; a line in the sender's queue for a reader says where. A semaphore counts the lines of a
queue, another at the head of a block those who have read it, who so give it back. What waits looks again and
again for a moment, if the host has a core for each process, and sleeps then.

A message's sender needs nothing more of its reader: what is sent is on its way, whatever the program does
next, and takes as much of the host's memory until it has been read. A process that ends, or leaves its world,
is noticed by those who wait for it.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import queue
import select
import socket
import struct
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, ClassVar, Final, NamedTuple

import torch
import torch.distributed as dist

from espalier.device import cores, host_memory
from espalier.mesh import Mesh
from espalier.mesh.process import is_fake
from espalier.torch_private import default_store, disable_modes, dispatch_modes, when_world_ends

TRANSPORT: Final = "ESPALIER_TRANSPORT"

_SEMAPHORE: Final = 64  # bytes that one may take: a line of the cache, so that neighbours don't disturb
_LINES: Final = 1 << 14  # of a queue, and blocks that may be on their way
# queues of a reader: one a thread that reads, the program and the courier, so that none wakes the other
PROGRAM: Final = 0
COURIER: Final = 1
_LANES: Final = 2
_LINE: Final = struct.Struct("qqqq")  # channel, tag, bytes, where
_PAGE: Final = mmap.PAGESIZE
# of the host's memory, by all ranks, beyond which large blocks are not kept for the next
_KEPT: Final = 1 / 16
_LARGE: Final = 1 << 20
_SLICE: Final = 0.1  # seconds between two looks at whether a peer lives
_FAREWELL: Final = 5.0  # seconds that one who leaves stays for those that have not taken its last messages
_LOOKS: Final = 300  # before it sleeps
_ADDRESSES: Final = 1 << 46  # half of what a process has
_TOKEN: Final = 16  # bytes by which a segment is known


class _Time(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _C:
    """What is used of the C library; calls that may take long let other threads run."""

    def __init__(self) -> None:
        short, long = ctypes.PyDLL(None, use_errno=True), ctypes.CDLL(None, use_errno=True)
        pointer = ctypes.c_void_p
        self.init, self.post, self.take = short.sem_init, short.sem_post, short.sem_trywait
        self.init.argtypes = [pointer, ctypes.c_int, ctypes.c_uint]
        self.post.argtypes = self.take.argtypes = [pointer]
        self._clock_wait, self._timed_wait = getattr(long, "sem_clockwait", None), long.sem_timedwait
        self._timed_wait.argtypes = [pointer, ctypes.POINTER(_Time)]
        if self._clock_wait is not None:
            self._clock_wait.argtypes = [pointer, ctypes.c_int, ctypes.POINTER(_Time)]
        self.copy, self.copy_much = short.memcpy, long.memcpy
        for copy in (self.copy, self.copy_much):
            copy.argtypes, copy.restype = [pointer, pointer, ctypes.c_size_t], None

    def sleep(self, semaphore: int) -> bool:
        """Take from a semaphore, or wake up in a moment; says whether it did not take."""
        # without glibc 2.30 by a clock that may be set
        now = (time.time() if self._clock_wait is None else time.monotonic()) + _SLICE
        until = ctypes.byref(_Time(int(now), int(now % 1 * 1e9)))
        if self._clock_wait is None:
            return bool(self._timed_wait(semaphore, until))
        return bool(self._clock_wait(semaphore, time.CLOCK_MONOTONIC, until))


class _Segment:
    """A process' memory, as it or a peer sees it.

    Attributes:
        address: where it begins in this process.
        blocks: where blocks may begin.
    """

    def __init__(self, descriptor: int, nbytes: int, world: int) -> None:
        self.memory = mmap.mmap(descriptor, nbytes)
        self.nbytes = nbytes
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        queues = _LANES * world
        self._queues = _SEMAPHORE * (1 + queues)
        self.blocks = -(-(self._queues + queues * _LINES * _LINE.size) // _PAGE) * _PAGE
        self._whole: dict[torch.dtype, torch.Tensor] = {}

    def semaphore(self, queue: int) -> int:
        """The address of what counts a queue's lines."""
        return self.address + _SEMAPHORE * (1 + queue)

    def line(self, queue: int, number: int) -> int:
        """Where a line of a queue stands."""
        return self._queues + (queue * _LINES + number % _LINES) * _LINE.size

    def view(self, at: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """What lies there. Nobody who watches what a program does is to see it."""
        strides, elements = [], 1
        for size in reversed(shape):
            strides.append(elements)
            elements *= size
        with disable_modes() if dispatch_modes() else contextlib.nullcontext():
            whole = self._whole.get(dtype)
            if whole is None:
                count = self.nbytes // dtype.itemsize
                whole = self._whole[dtype] = torch.frombuffer(self.memory, dtype=dtype, count=count)
            return whole.as_strided(shape, strides[::-1], at // dtype.itemsize)


class _Lane:
    """A queue of another process' segment that is for this one, and what has come by it."""

    def __init__(self, segment: _Segment, queue: int) -> None:
        self.queue, self.semaphore = queue, segment.semaphore(queue)
        self.read = 0
        self.streams: dict[tuple[int, int, int], _Stream] = {}


class _Peer:
    """What is known of another process, and of what it has sent here."""

    def __init__(self, segment: _Segment, pid: int, here: int) -> None:
        self.segment = segment
        self.lanes = [_Lane(segment, here * _LANES + lane) for lane in range(_LANES)]
        with contextlib.suppress(OSError, AttributeError):
            self._process: int | None = os.pidfd_open(pid)
            self._looks = select.poll()
            self._looks.register(self._process, select.POLLIN)
            return
        self._process, self._pid = None, pid

    def has_left(self) -> bool:
        """Whether it has ended, or given up its world."""
        if self.segment.memory[0]:
            return True
        if self._process is not None:
            return bool(self._looks.poll(0))
        try:
            os.kill(self._pid, 0)
        except ProcessLookupError:
            return True
        return False

    def close(self) -> None:
        if self._process is not None:
            os.close(self._process)
            self._process = None


class _Stream:
    """Messages of one kind and length from one peer: how many were awaited, came, and are not yet taken."""

    __slots__ = ("awaited", "came", "there")

    def __init__(self) -> None:
        self.awaited = self.came = 0
        self.there: dict[int, int] = {}


class Expected:
    """A message that is to come from a peer. One that is let go of is thrown away when it comes."""

    __slots__ = ("_host", "_lane", "_number", "_peer", "_stream", "nbytes", "source")

    def __init__(
        self, host: Host, source: int, channel: int, tag: int, nbytes: int, lane: int = PROGRAM
    ) -> None:
        self._host, self.source, self.nbytes = host, source, nbytes
        self._peer = host.peer(source)
        self._lane = self._peer.lanes[lane]
        with host.lock:
            stream = self._lane.streams.get((channel, tag, nbytes))
            if stream is None:
                stream = self._lane.streams[channel, tag, nbytes] = _Stream()
            self._stream, self._number = stream, stream.awaited
            stream.awaited += 1

    def wait(self, limit: float) -> _Taken:
        """The message, when it has come.

        Raises:
            RuntimeError: its sender has gone, or the limit, in seconds, has passed.
        """
        there, number = self._stream.there, self._number
        if number not in there:
            self._host.hear(self._peer, self._lane, self.source, there, number, limit)
        at = there.pop(number)
        self._number = -1
        return _Taken(self._host, self._peer.segment, at, self.nbytes)

    def __del__(self) -> None:
        if self._number >= 0:
            with contextlib.suppress(Exception):
                self._host.forget(self._peer, self._stream, self._number)


class _Taken(NamedTuple):
    """A message that has come; to be given back when it has been read."""

    host: Host
    segment: _Segment
    at: int
    nbytes: int

    def view(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """It, in its sender's memory."""
        return self.segment.view(self.at, tuple(shape), dtype)

    def copy_to(self, out: torch.Tensor) -> None:
        """Fill a contiguous tensor with it, and give it back."""
        self.host.copy(out.data_ptr(), self.segment.address + self.at, self.nbytes)
        self.give_back()

    def give_back(self) -> None:
        """Its sender may use the memory again, when all have said so."""
        self.host.c.post(self.segment.address + self.at - _SEMAPHORE)


class _Block:
    """Memory of a message.

    Attributes:
        at: where the message begins; its semaphore stands before it.
        readers: how many have not given it back.
    """

    __slots__ = ("at", "readers", "room")

    def __init__(self, at: int, room: int) -> None:
        self.at, self.room, self.readers = at, room, 0


class Courier:
    """A thread that does what must go on beside the program, one after the other, in the order given."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="espalier-courier", daemon=True).start()

    def do(self, job: Callable[[], Any]) -> Future[Any]:
        """Its result, or its error, when its turn has come and it is done."""
        future: Future[Any] = Future()
        self._jobs.put((job, future))
        return future

    def close(self) -> None:
        """No more will come."""
        self._jobs.put(None)

    def _run(self) -> None:
        while (task := self._jobs.get()) is not None:
            job, future = task
            try:
                with torch.no_grad():
                    future.set_result(job())
            except BaseException as error:
                future.set_exception(error)
            del task, job, future  # with what they hold


class Host:
    """This process among those of its host, in the running world.

    Args:
        store: by which the ranks of the world find each other.

    Attributes:
        of_world: the running world, and its host (a cache).
        lock: of what its threads share.
        c: the C library's calls.
    """

    of_world: ClassVar[tuple[Any, Host | None]] = (None, None)

    def __init__(self, store: dist.Store) -> None:
        self.rank, self._world = dist.get_rank(), dist.get_world_size()
        self.lock, self._pid = threading.RLock(), os.getpid()
        self._store = store
        self._peers: dict[int, _Peer] = {}
        self._places: dict[int, dict[str, Any]] = {}
        self._free: dict[int, list[_Block]] = {}
        self._sent: deque[_Block] = deque()
        self._posted: dict[int, int] = {}
        self._spare = 0
        self._kept = int(_KEPT * host_memory() / self._world)
        self._own: _Segment | None = None
        self._descriptor = -1
        self._looks = _LOOKS
        self._has_warned = False
        self._courier: Courier | None = None
        if is_fake():  # nobody is there to say where it is
            place = {"host": _host_name(), "why": "", "space": None}
            self._places = dict.fromkeys(range(self._world), place)
        else:
            store.set(f"place/{self.rank}", json.dumps(self._begin()))

    @classmethod
    def here(cls) -> Host:
        """That of the running world; made when first asked for."""
        world = dist.group.WORLD
        if cls.of_world[0] is not world or cls.of_world[1] is None:
            host = cls(dist.PrefixStore("espalier.host", default_store()))
            cls.of_world = (world, host)
            when_world_ends(host.close)
        known = cls.of_world[1]
        assert known is not None
        return known

    def _begin(self) -> dict[str, Any]:
        """Make the segment; what peers are to know of it."""
        wanted = os.environ.get(TRANSPORT, "shared")
        if wanted not in ("shared", "gloo"):
            raise ValueError(f"{TRANSPORT}={wanted!r}: expected 'shared' or 'gloo'.")
        host = _host_name()
        if wanted == "gloo" or sys.platform != "linux":
            return {"host": host, "why": "", "space": None}
        import resource  # unknown to other systems

        try:
            self.c = _C()
            # addresses, not memory: that is taken where messages lie
            nbytes = min(4 * host_memory(), _ADDRESSES // self._world // _PAGE * _PAGE)
            most = resource.getrlimit(resource.RLIMIT_AS)[0]
            if 0 <= most < (self._world + 1) * nbytes:
                raise OSError("addresses are limited (ulimit -v)")
            self._descriptor = os.memfd_create("espalier", os.MFD_CLOEXEC)
            os.ftruncate(self._descriptor, nbytes)
            self._own = own = _Segment(self._descriptor, nbytes, self._world)
            for each in range(_LANES * self._world):
                if self.c.init(own.semaphore(each), 1, 0):
                    raise OSError(ctypes.get_errno(), "sem_init")
            self._end = own.blocks
            token = os.urandom(_TOKEN)
            own.memory[_TOKEN : 2 * _TOKEN] = token
            # as a peer would: where /proc is hidden, or the process not to be looked into, it fails
            os.close(os.open(f"/proc/{os.getpid()}/fd/{self._descriptor}", os.O_RDWR | os.O_CLOEXEC))
            space = os.readlink("/proc/self/ns/pid")
        except (OSError, ValueError, AttributeError) as error:
            self.close()
            return {"host": host, "why": f"{type(error).__name__}: {error}", "space": ""}
        return {
            "host": host,
            "why": "",
            "space": f"{space} of user {os.getuid()}",
            "pid": os.getpid(),
            "descriptor": self._descriptor,
            "nbytes": nbytes,
            "token": token.hex(),
        }

    def _place(self, rank: int) -> dict[str, Any]:
        known = self._places.get(rank)
        if known is None:
            known = self._places[rank] = json.loads(self._store.get(f"place/{rank}"))
        return known

    def homes(self, ranks: Sequence[int]) -> list[list[int]]:
        """Those of ``ranks`` that share memory, by their indices, host by host in the order of the first.

        It waits for what they say; all of them find the same. Who shares none stands alone.
        """
        places = [self._place(rank) for rank in ranks]
        hosts, alone = self.hosts(ranks), [[i] for i in range(len(ranks))]
        if any(place["space"] is None for place in places):  # it is not wished
            return alone
        for members in hosts:
            why = self._why_not([ranks[i] for i in members], [places[i] for i in members])
            if why:
                if not self._has_warned and self.rank == min(ranks[i] for i in members):
                    self._has_warned = True
                    warnings.warn(
                        f"Ranks of one host talk through gloo, which is slower than shared memory: {why}. "
                        f"{TRANSPORT}=gloo silences this.",
                        stacklevel=2,
                    )
                return alone
        return hosts

    def hosts(self, ranks: Sequence[int]) -> list[list[int]]:
        """Those of ``ranks`` on each host, by their indices, in the order of the first."""
        by_host: dict[str, list[int]] = {}
        for i, rank in enumerate(ranks):
            by_host.setdefault(self._place(rank)["host"], []).append(i)
        return list(by_host.values())

    def elsewhere(self, ranks: Sequence[int]) -> frozenset[int]:
        """Those of ``ranks`` that are not on this one's host, by their indices."""
        own = self._place(self.rank)["host"]
        return frozenset(i for i, rank in enumerate(ranks) if self._place(rank)["host"] != own)

    @staticmethod
    def _why_not(ranks: Sequence[int], places: Sequence[dict[str, Any]]) -> str:
        """What keeps ranks of one host from sharing memory."""
        if len(ranks) == 1:
            return ""
        for rank, place in zip(ranks, places, strict=True):
            if place["why"]:
                return f"rank {rank}: {place['why']}"
        if len({place["space"] for place in places}) == 1:
            return ""
        spaces = (f"rank {rank} in {p['space']}" for rank, p in zip(ranks, places, strict=True))
        return f"they cannot see each other: {', '.join(spaces)}"

    def open(self, ranks: Sequence[int]) -> None:
        """Meet these ranks, which share memory.

        Raises:
            RuntimeError: one has gone already.
        """
        for rank in ranks:
            if rank != self.rank and rank not in self._peers:
                self._peers[rank] = _Peer(self._opened(rank), self._place(rank)["pid"], self.rank)
        if len(self._peers) + 1 > cores():
            self._looks = 1

    def _opened(self, rank: int) -> _Segment:
        place = self._place(rank)
        try:
            path = f"/proc/{place['pid']}/fd/{place['descriptor']}"
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise RuntimeError(f"{_gone(rank)} ({error})") from None
        try:
            if os.fstat(descriptor).st_size == place["nbytes"]:
                segment = _Segment(descriptor, place["nbytes"], self._world)
                if segment.memory[_TOKEN : 2 * _TOKEN].hex() == place["token"]:
                    return segment
        finally:
            os.close(descriptor)
        raise RuntimeError(_gone(rank))  # what it had is something else by now

    @property
    def courier(self) -> Courier:
        """What hands on, beside the program."""
        with self.lock:
            self._courier = self._courier or Courier()
            return self._courier

    def peer(self, rank: int) -> _Peer:
        """A rank that was met."""
        return self._peers[rank]

    def copy(self, to: int, source: int, nbytes: int) -> None:
        """Copy memory, other threads running if it takes long."""
        (self.c.copy if nbytes < 1 << 16 else self.c.copy_much)(to, source, nbytes)

    def send(self, x: torch.Tensor, to: Sequence[int], channel: int, tag: int, lane: int = PROGRAM) -> None:
        """Send contiguous ``x`` to some ranks; it may change at once."""
        own, nbytes = self._own, x.nbytes
        assert own is not None
        with self.lock:
            block = self._room(nbytes)
            block.readers = len(to)
            self.copy(own.address + block.at, x.data_ptr(), nbytes)
            for rank in to:
                to_queue = rank * _LANES + lane
                number = self._posted.get(to_queue, 0)
                self._posted[to_queue] = number + 1
                _LINE.pack_into(own.memory, own.line(to_queue, number), channel, tag, nbytes, block.at)
                self.c.post(own.semaphore(to_queue))
            self._sent.append(block)

    def _room(self, nbytes: int) -> _Block:
        """A block for a message."""
        self._collect()
        room = max(_PAGE, 1 << (nbytes + _SEMAPHORE - 1).bit_length())
        own = self._own
        assert own is not None
        free = self._free.get(room)
        if free:
            self._spare -= room
            return free.pop()
        if self._end + room > own.nbytes:
            raise MemoryError(
                f"Rank {self.rank} has {len(self._sent)} messages on their way to other ranks of its host, "
                f"which do not take them, and no room for one of {nbytes} bytes more."
            )
        block = _Block(self._end + _SEMAPHORE, room)
        self._end += room
        if self.c.init(own.address + block.at - _SEMAPHORE, 1, 0):
            raise OSError(ctypes.get_errno(), "sem_init")
        return block

    def _collect(self) -> None:
        """Take back blocks that all their readers have given back."""
        sent, own = self._sent, self._own
        assert own is not None
        while len(sent) >= _LINES:
            block = sent[0]
            self._wait_for_readers(block)
            if not self._is_back(block):
                continue
            self._put_back(sent.popleft())
        for _ in range(min(len(sent), 8)):
            block = sent.popleft()
            if self._is_back(block):
                self._put_back(block)
            else:
                sent.append(block)

    def _is_back(self, block: _Block) -> bool:
        assert self._own is not None
        at = self._own.address + block.at - _SEMAPHORE
        while block.readers and not self.c.take(at):
            block.readers -= 1
        return not block.readers

    def _wait_for_readers(self, block: _Block) -> None:
        """Sleep until a reader gives a block back, or for a moment."""
        assert self._own is not None
        if not self.c.sleep(self._own.address + block.at - _SEMAPHORE):
            block.readers -= 1
            return
        for rank, peer in self._peers.items():
            if peer.has_left():
                raise RuntimeError(_gone(rank))

    def _put_back(self, block: _Block) -> None:
        assert self._own is not None
        self._free.setdefault(block.room, []).append(block)
        self._spare += block.room
        if self._spare > self._kept and block.room >= _LARGE:
            # but for the page with its semaphore
            with contextlib.suppress(OSError, ValueError, AttributeError):
                self._own.memory.madvise(mmap.MADV_REMOVE, block.at - _SEMAPHORE + _PAGE, block.room - _PAGE)

    def hear(
        self, peer: _Peer, lane: _Lane, rank: int, there: dict[int, int], number: int, limit: float
    ) -> None:
        """Listen to a peer until a message is there."""
        take, at = self.c.take, lane.semaphore
        looks, ends = self._looks, 0.0
        while True:
            while not take(at):
                with self.lock:
                    self._read(peer, lane)
            if number in there:
                return
            looks -= 1
            if looks > 0:
                continue
            now = time.monotonic()
            ends = ends or now + limit
            if not self.c.sleep(at):
                with self.lock:
                    self._read(peer, lane)
            elif number not in there and peer.has_left():
                if not take(at):  # it said something before
                    with self.lock:
                        self._read(peer, lane)
                    continue
                raise RuntimeError(_gone(rank))
            elif now > ends:
                raise RuntimeError(
                    f"Rank {self.rank} has waited for rank {rank} for {limit:g} seconds: timed out."
                )
            if number in there:
                return

    def _read(self, peer: _Peer, lane: _Lane) -> None:
        """Take note of the next line of a peer's queue."""
        line = peer.segment.line(lane.queue, lane.read)
        lane.read += 1
        channel, tag, nbytes, at = _LINE.unpack_from(peer.segment.memory, line)
        stream = lane.streams.get((channel, tag, nbytes))
        if stream is None:
            stream = lane.streams[channel, tag, nbytes] = _Stream()
        if stream.there.get(stream.came) == -1:
            del stream.there[stream.came]
            self.c.post(peer.segment.address + at - _SEMAPHORE)
        else:
            stream.there[stream.came] = at
        stream.came += 1

    def forget(self, peer: _Peer, stream: _Stream, number: int) -> None:
        """Nobody waits for a message any more."""
        if os.getpid() != self._pid:  # in a fork, of which the peer knows nothing
            return
        with self.lock:
            at = stream.there.pop(number, None)
            if at is None:
                stream.there[number] = -1
            else:
                self.c.post(peer.segment.address + at - _SEMAPHORE)

    def close(self) -> None:
        """Tell those who wait for this process that nothing more will come."""
        if os.getpid() != self._pid:
            return
        if self._courier is not None:
            self._courier.close()
        if self._own is not None:
            self._own.memory[0] = 1
            self._see_off()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        for peer in self._peers.values():
            peer.close()

    def _see_off(self) -> None:
        """Stay a while for who has not taken what was sent: one may not have opened this memory yet."""
        until = time.monotonic() + _FAREWELL
        while time.monotonic() < until:
            with self.lock:
                while self._sent and self._is_back(self._sent[0]):
                    self._put_back(self._sent.popleft())
            if not self._sent or all(peer.has_left() for peer in self._peers.values()):
                return
            time.sleep(0.002)


def _host_name() -> str:
    # one machine's network namespaces are hosts of their own: so hosts are played, and containers set apart
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/net')}"
    return socket.gethostname()


def _gone(rank: int) -> str:
    return f"Connection closed by peer: rank {rank} has ended, or left the process group"


def announce() -> None:
    """Tell the ranks of a world that was joined how this one is reached."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        Host.here()


Mesh.joined = (*Mesh.joined, announce)
