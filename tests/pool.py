"""One pool of gloo worker processes for a whole pytest session.

``ranks(n, fn, *args)`` (a fixture, see ``conftest.py``) calls ``fn(rank, world, *args)`` on ``n`` persistent
processes that share a default process group of exactly ``n`` ranks, and returns the list of their results.
``fn`` must be a top-level function of an importable module: it is pickled by name.

A worker may cost seconds (it imports torch), a new world some ten milliseconds, a call about one millisecond.
Hence processes stay for the session, a world stays as long as calls ask for the same ``n``, and an exception
that every rank gets over costs a new world only. Processes are killed, and started again by the next call,
when one of them hangs or dies.

Only the standard library is imported here: the workers set their environment before torch loads.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

MAX_RANKS = 16
TIMEOUT = 120.0
# In which the ranks of a world must meet. Of 8,000 worlds on a busy machine the slowest took nine seconds;
# three times in whole runs of the suite the ranks of one waited for each other for ever, nobody knows why.
MEETING = 60.0
# How long the other ranks may take to notice that one has failed before they are killed.
GRACE = 5.0
# Tests leave sub-groups behind, and each gloo group owns threads and sockets: a new world sheds them.
CALLS_PER_WORLD = 50


class RankError(RuntimeError):
    """A rank raised, died or hung: ``rank`` was the first, ``original`` is its exception if picklable."""

    def __init__(self, message: str, rank: int, original: BaseException | None = None) -> None:
        super().__init__(message)
        self.rank = rank
        self.original = original


class Skip(Exception):
    """``pytest.skip()`` was called on a rank."""


# What all pools have asked for: there is one process to fork from, which the first that needs it starts.
_PRELOADED: dict[str, None] = {}
# A filter as ``warnings.filterwarnings`` takes it: action, message, category, module, line number.
Filter = tuple[str, str, type[Warning], str, int]


@dataclass(frozen=True)
class World:
    """A default process group: the file that tells where its ranks meet, and how many they are."""

    store: str
    size: int


@dataclass(frozen=True)
class Call:
    """What the parent sends to a worker. ``work`` is the pickled ``(fn, args)``."""

    world: World
    work: bytes
    filters: tuple[Filter, ...]
    timeout: float


@dataclass(frozen=True)
class Leave:
    """Tells a worker that is no part of the next world to give up the one it is in."""


@dataclass(frozen=True)
class Failure:
    """An exception on a worker, as text, and as an object where that can be pickled."""

    summary: str
    trace: str
    original: bytes | None
    skipped: bool
    met: bool


# --- the worker's side -------------------------------------------------------------------------------------


def worker_main(rank: int, conn: Connection, dump: str) -> None:
    """Serve calls until the parent closes the connection or dies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business: it kills the workers
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["ESPALIER_FAULTS"] = "off"  # the pool watches over its workers itself
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        # Who is woken waits for a core: gloo's threads would spin for a lock that the one they displace has.
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    threading.Thread(target=_die_with_parent, daemon=True).start()
    with open(dump, "w") as stacks:
        faulthandler.enable()
        if hasattr(signal, "SIGUSR1"):
            faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        from tests.preloaded import torch

        torch.set_num_threads(1)
        gc.freeze()  # what is imported stays: no collection looks through it
        gc.set_threshold(10_000)  # looking through what calls make took 5 % of their time
        _serve(rank, conn)
        _leave()
        sys.stdout.flush()
        sys.stderr.flush()
        # gloo's threads may outlive the interpreter's teardown and abort ("terminate called ...").
        os._exit(0)


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def _serve(rank: int, conn: Connection) -> None:
    current: World | None = None
    while True:
        try:
            message: Call | Leave | None = pickle.loads(conn.recv_bytes())
        except (EOFError, OSError):
            return
        if message is None:
            return
        if isinstance(message, Leave):
            _leave()
            current = None
            continue
        failure, met = None, False
        try:
            if message.world != current:
                _leave()
                _join(message.world, rank, message.timeout)
                current = message.world
            met = True
            reply = pickle.dumps(("done", _call(message, rank)))
        except BaseException as error:
            failure = _describe(error, met)
            reply = pickle.dumps(("failed", failure))
        sys.stdout.flush()
        sys.stderr.flush()
        # what a call leaves no later one looks through: neither collections nor searches for optimizers
        gc.collect()
        gc.freeze()
        conn.send_bytes(reply)
        if failure is not None:
            # Closing our sockets makes the ranks that wait for us fail at once instead of timing out.
            _leave()
            current = None
            conn.send_bytes(pickle.dumps(("left", None)))


def _call(call: Call, rank: int) -> Any:
    import torch

    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    # torch's compiler turns it off in processes that have compiled, and what is checked is asked of all ranks
    torch.distributions.Distribution.set_default_validate_args(__debug__)
    with warnings.catch_warnings():
        warnings.resetwarnings()
        for action, message, category, module, line in call.filters:
            warnings.filterwarnings(action, message, category, module, line, append=True)  # type: ignore[arg-type]
        fn, args = pickle.loads(call.work)
        return fn(rank, call.world.size, *args)


def _join(world: World, rank: int, timeout: float) -> None:
    import torch.distributed as dist

    from espalier.torch_private import set_group_timeout

    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world.size),
        "LOCAL_WORLD_SIZE": str(world.size),
    }
    limit = timedelta(seconds=min(timeout, MEETING))
    store = _store(world, rank, limit)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world.size, timeout=limit)
    set_group_timeout(timedelta(seconds=timeout))


def _store(world: World, rank: int, limit: timedelta) -> Any:
    """Where the ranks meet, and agree later: the first has it, and leaves its port in a file.

    One that is a file is asked anew every ten milliseconds, and read from its beginning.
    """
    import torch.distributed as dist

    told, end = Path(world.store), time.monotonic() + limit.total_seconds()
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        part = told.with_suffix(".part")
        part.write_text(str(store.port))
        part.replace(told)
        return store
    while not told.exists():
        if time.monotonic() > end:
            raise TimeoutError("rank 0 has not told where to meet")
        time.sleep(0.001)
    return dist.TCPStore("127.0.0.1", int(told.read_text()), wait_for_workers=False)


def _leave() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def _describe(error: BaseException, met: bool) -> Failure:
    # Text only, no values of variables: to print a distributed tensor may communicate, and so hang.
    summary = "".join(traceback.format_exception_only(error)).strip()
    trace = "".join(traceback.format_exception(error))
    traceback.clear_frames(error.__traceback__)
    original = None
    with contextlib.suppress(Exception):
        original = pickle.dumps(error)
        pickle.loads(original)
    return Failure(summary, trace, original, skipped=type(error).__name__ == "Skipped", met=met)


# --- the parent's side -------------------------------------------------------------------------------------


@dataclass
class Worker:
    """One process of the pool and the parent's end of its pipe."""

    process: BaseProcess
    conn: Connection
    dump: Path


@dataclass
class Outcome:
    """What has come back from the ranks of one call so far."""

    results: dict[int, Any] = field(default_factory=dict)
    failures: dict[int, Failure] = field(default_factory=dict)
    deaths: dict[int, int | None] = field(default_factory=dict)
    settled: set[int] = field(default_factory=set)

    @property
    def good(self) -> bool:
        """No rank has failed or died."""
        return not self.failures and not self.deaths

    @property
    def met(self) -> bool:
        """The ranks have met, or it was not that they did not by which they failed."""
        return all(failure.met for failure in self.failures.values())


class Pool:
    """Persistent gloo workers. Call it: ``pool(n, fn, *args, timeout=120.0)``.

    Args:
        preload: modules that take long to import, which all calls together need: most workers share it.
        forked: rank 0, too, comes from the process that has imported them, and so begins in no time.
    """

    def __init__(
        self, timeout: float = TIMEOUT, preload: Sequence[str] = (), *, forked: bool = False
    ) -> None:
        self.timeout = timeout
        self.preload = preload
        self.forked = forked
        self._workers: list[Worker] = []
        self._world: World | None = None
        self._calls = 0
        self._worlds = 0
        self._folder: Path | None = None

    def __call__(self, n: int, fn: Callable[..., Any], *args: Any, timeout: float | None = None) -> list[Any]:
        """Run ``fn(rank, n, *args)`` on ranks 0 to n - 1 and return their results in the order of the ranks.

        Raises ``RankError`` with the traceback of the first rank that failed, and with every rank's Python
        stack where the call did not end within ``timeout`` seconds.
        """
        if not 1 <= n <= MAX_RANKS:
            raise ValueError(f"the pool has 1 to {MAX_RANKS} ranks, asked for {n}")
        limit = self.timeout if timeout is None else timeout
        name = f"{fn.__module__}.{fn.__qualname__}"
        work = pickle.dumps((fn, args))
        try:
            outcome = self._once(n, work, limit)
            if not outcome.met:
                # what is tested has not begun: other processes may try it once more
                print(self._explain(name, n, limit, outcome), file=sys.stderr)
                self.kill()
                outcome = self._once(n, work, limit)
            if len(outcome.settled) < n or outcome.deaths:
                error = self._explain(name, n, limit, outcome)
                self.kill()
                raise error
        except RankError:
            raise
        except BaseException:
            self.kill()
            raise
        if outcome.failures:
            self._world = None
            raise self._explain(name, n, limit, outcome)
        return [outcome.results[rank] for rank in range(n)]

    def _once(self, n: int, work: bytes, limit: float) -> Outcome:
        """Call ``work`` on n ranks, which meet first where they are no world yet."""
        self._grow(n)
        call = Call(self._meet(n), work, tuple(_filters()), limit)
        for worker in self._workers[:n]:
            with contextlib.suppress(OSError):  # it died between two calls: _collect sees that
                worker.conn.send_bytes(pickle.dumps(call))
        return self._collect(n, limit)

    def pids(self) -> list[int]:
        """The process ids of the live workers."""
        return [worker.process.pid for worker in self._workers if worker.process.pid is not None]

    def close(self) -> None:
        """Ask the workers to leave, kill those that don't, and remove the pool's files."""
        for worker in self._workers:
            with contextlib.suppress(OSError):
                worker.conn.send_bytes(pickle.dumps(None))
        deadline = time.monotonic() + GRACE
        for worker in self._workers:
            worker.process.join(max(0.0, deadline - time.monotonic()))
        self.kill()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def kill(self) -> None:
        """End all workers at once; the next call starts new ones."""
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.join()
            worker.conn.close()
        self._workers.clear()
        self._world = None

    def _grow(self, n: int) -> None:
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="espalier-ranks-"))
        for rank in range(len(self._workers), n):
            context = _context(rank > 0 or self.forked, self.preload)
            ours, theirs = context.Pipe()
            dump = self._folder / f"stacks-{rank}"
            process = context.Process(target=worker_main, args=(rank, theirs, str(dump)), name=f"rank-{rank}")
            process.start()
            theirs.close()
            self._workers.append(Worker(process, ours, dump))

    def _meet(self, n: int) -> World:
        """The world of the last call if it has n ranks and is not worn out, else a new one."""
        self._calls += 1
        if self._world is None or self._world.size != n or self._calls > CALLS_PER_WORLD:
            assert self._folder is not None
            self._calls = 1
            self._worlds += 1
            self._world = World(str(self._folder / f"world-{self._worlds}"), n)
            for worker in self._workers[n:]:
                with contextlib.suppress(OSError):
                    worker.conn.send_bytes(pickle.dumps(Leave()))
        return self._world

    def _collect(self, n: int, limit: float) -> Outcome:
        """Wait until every rank has answered, at most ``limit`` seconds, or GRACE after the first failure."""
        outcome = Outcome()
        sources: dict[Any, int] = {}
        for rank, worker in enumerate(self._workers[:n]):
            sources[worker.conn] = rank
            sources[worker.process.sentinel] = rank
        deadline = time.monotonic() + limit
        while len(outcome.settled) < n:
            waiting = [source for source, rank in sources.items() if rank not in outcome.settled]
            ready = wait(waiting, max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            good_before = outcome.good
            for rank in dict.fromkeys(sources[source] for source in ready):
                self._receive(rank, outcome)
            if good_before and not outcome.good:
                deadline = min(deadline, time.monotonic() + GRACE)
        return outcome

    def _receive(self, rank: int, outcome: Outcome) -> None:
        worker = self._workers[rank]
        try:
            if not worker.conn.poll():
                raise EOFError
            kind, content = pickle.loads(worker.conn.recv_bytes())
        except (EOFError, OSError):
            worker.process.join(GRACE)
            outcome.deaths[rank] = worker.process.exitcode
            outcome.settled.add(rank)
            return
        if kind == "failed":
            outcome.failures[rank] = content
            return
        if kind == "done":
            outcome.results[rank] = content
        outcome.settled.add(rank)

    def _explain(self, name: str, n: int, limit: float, outcome: Outcome) -> Exception:
        missing = [rank for rank in range(n) if rank not in outcome.settled and rank not in outcome.failures]
        others = [f"rank {rank}: {failure.summary}" for rank, failure in outcome.failures.items()]
        if outcome.deaths:
            rank, code = next(iter(outcome.deaths.items()))
            head = f"rank {rank} of {n} died in {name}: {_exit_text(code)}"
            return RankError("\n".join([head, *others]), rank)
        if outcome.failures:
            rank, failure = next(iter(outcome.failures.items()))
            if failure.skipped:
                return Skip(failure.summary.partition(": ")[2])
            original = pickle.loads(failure.original) if failure.original is not None else None
            lines = [f"rank {rank} of {n} raised in {name}: {failure.summary}", failure.trace.rstrip()]
            if others[1:]:
                lines += ["after it:", *others[1:]]
            if missing:
                lines.append(f"ranks {missing} did not end within {GRACE:g} s of it and were killed")
            return RankError("\n".join(lines), rank, original)
        lines = [f"{name} on {n} ranks: no answer from ranks {missing} within {limit:g} s"]
        lines += [f"--- rank {rank} was at\n{self._stacks(rank)}" for rank in missing]
        return RankError("\n".join(lines), missing[0])

    def _stacks(self, rank: int) -> str:
        """Where a worker's Python threads are."""
        worker = self._workers[rank]
        if not hasattr(signal, "SIGUSR1") or worker.process.pid is None or not worker.dump.exists():
            return "(unknown)"
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker.process.pid, signal.SIGUSR1)
        for _ in range(20):
            text = worker.dump.read_text().strip()
            if text:
                return text
            time.sleep(0.05)
        return "(it did not say)"


def _context(forked: bool, preload: Sequence[str]) -> Any:
    """How a worker starts. None is forked from here: this process has torch's threads, and may hold locks.

    Rank 0 is spawned. The others are forked from a process that has imported what takes seconds, and done
    nothing else. So rank 0 hashes strings otherwise than they: an order that comes from a set will differ.
    """
    if not forked or sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    return forks(preload)


def forks(preload: Sequence[str] = ()) -> Any:
    """By which processes are forked from one that has imported what tests and pools have asked for so far."""
    context = multiprocessing.get_context("forkserver")
    _PRELOADED.update(dict.fromkeys(preload))
    context.set_forkserver_preload(["tests.preloaded", *_PRELOADED])
    return context


def _filters() -> Iterator[Filter]:
    """The warning filters in force, first match first: a worker treats warnings as the running test does."""
    filters: Iterable[Any] = warnings.filters
    for action, message, category, module, line in filters:
        yield action, _pattern(message), category, _pattern(module), line


def _pattern(regex: Any) -> str:
    if regex is None:
        return ""
    return regex if isinstance(regex, str) else str(regex.pattern)


def _exit_text(code: int | None) -> str:
    if code is None:
        return "it closed its pipe and still runs"
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}"
