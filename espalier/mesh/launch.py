"""Run a program on several local ranks through torchrun's own elastic agent, and report failures well.

The program's side is in ``espalier.mesh.process``. When a rank fails, :func:`launch` stops the others and
raises one :class:`LaunchError` that says which rank was the cause and quotes its standard error.
"""

from __future__ import annotations

import atexit
import codecs
import contextlib
import json
import logging
import math
import os
import pickle
import re
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import fields
from multiprocessing import util
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist
import torch.multiprocessing
from torch.multiprocessing import ProcessRaisedException

from espalier.files import own_folder, temporary_folder
from espalier.mesh.hosts import Hosts, meeting, own_address, settings_for
from espalier.mesh.mesh import Mesh, names_and_sizes
from espalier.mesh.process import (
    ACCOUNT,
    FOLDER,
    PATIENCE,
    STOPPED,
    finish,
    first_line,
    is_consequence,
    note_file,
    start,
    use_loopback,
)
from espalier.texts import expect

_TAIL_LINES = 30
# sets have one order in all ranks: programs call modules, and so the ranks one another, in it
_ONE_ORDER = {"PYTHONHASHSEED": "0"}
_TRACE = re.compile(r"\[rank\d+\]: ?")
_FRAME = '  File "'
_OF_CPP = re.compile(
    r"frame #\d+: |<omitting python frames>|Exception raised from .*\(most recent call first\)"
)
_OF_LIBRARY = re.compile(
    rf"{_FRAME}({re.escape(str(Path(__file__).parent.parent))}|.*/(site|dist)-packages)/"
)


class LaunchError(RuntimeError):
    """A launch that failed. The message is the whole report.

    ``rank`` is the first rank that failed and ``exit_code`` its status (negative: the signal that killed it);
    both are None where no process had been started. ``folder`` holds what ranks wrote that the
    message does not show; None where that is nothing.
    """

    def __init__(
        self, message: str, rank: int | None = None, exit_code: int | None = None, folder: Path | None = None
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.exit_code = exit_code
        self.folder = folder


def launch(
    argv: Sequence[str],
    nproc: int,
    *,
    env: Mapping[str, str] | None = None,
    port: int | None = None,
    grace: int = 5,
    signals: Sequence[str] = ("SIGTERM",),
    hosts: Hosts | None = None,
    logs: Path | None = None,
) -> None:
    """Run ``python *argv`` on ``nproc`` ranks of this machine and wait until all have ended well.

    ``argv`` is what would follow ``python``: ``["train.py", "--fast"]`` or ``["-m", "package.module"]``.
    The ranks get torchrun's environment, this process's, and ``env``; one thread each unless
    ``OMP_NUM_THREADS`` says otherwise, and one order of sets unless ``PYTHONHASHSEED`` does. They meet at
    ``port`` on the loopback, by default a free one.

    Rank 0 writes to this process's standard output itself, so a terminal stays one; its standard error is
    copied to ours as it comes. What the other ranks print goes to files, and in the end, where they printed
    anything, to the folder ``logs``, if one is given: ``rank1.stdout``, ``rank1.stderr``.

    With ``hosts`` they are one machine's ranks of several, each of which calls this; all meet at the first.
    Whom a machine waits for is told after seconds.

    The ``signals``, if they come, are handed on to the ranks, which have ``grace`` seconds to end (30 where
    torch's agent lets nobody choose, as in 2.11).

    Raises ``LaunchError`` as soon as a rank fails, with the last lines of standard error of the one to blame;
    all others are stopped then, and what else they wrote is kept: in ``logs``, or a folder that the message
    names. Ctrl-C (``KeyboardInterrupt``) and SIGTERM stop them too, and on Linux so does the death of this
    process, however it dies.
    """
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    _check_request(argv, nproc, hosts.port if hosts is not None and hosts.node == 0 else port)
    folder, held = own_folder()
    settings = {**_settings(hosts), **(env or {}), FOLDER: str(folder)}
    count = 1 if hosts is None else hosts.nodes
    config = LaunchConfig(
        min_nodes=count,
        max_nodes=count,
        nproc_per_node=nproc,
        **_rendezvous(hosts, folder.name, port),
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(log_dir=str(folder)),
        # unless SIGINT is asked for it is left to Python: it stops the ranks with SIGTERM, without tracebacks
        signals_to_handle=",".join(filter(_is_heard, {*signals, "SIGHUP", "SIGQUIT"})),
        **_grace(LaunchConfig, grace),
    )
    stopped: int | None = None
    kept: list[Path] = []
    try:
        around = _environment(settings), _quiet_agent(), _own_signals(), _follow(folder)
        with ExitStack() as stack:
            for each in (*around, _kept(folder, logs, kept), meeting(hosts, nproc)):
                stack.enter_context(each)
            try:
                elastic_launch(config, sys.executable)(*_guarded(argv, folder))
            except ChildFailedError as error:
                exits = {rank: failure.exitcode for rank, failure in error.failures.items()}
                first = 0 if hosts is None else hosts.node * nproc
                launch_error = _explain(exits, nproc * count, folder, range(first, first + nproc), logs)
                kept += _not_shown(folder, launch_error.rank)
                raise launch_error from None
            except SignalException as error:
                stopped = int(error.sigval)
            except dist.DistError as error:
                raise LaunchError(f"the ranks could not be started: {first_line(error)}") from error
    finally:
        if logs is None and kept:
            _clear(folder, kept)
        else:
            shutil.rmtree(folder, ignore_errors=True)
        os.close(held)
    if stopped is not None:
        signal.raise_signal(stopped)  # the caller's own handler, or the end of this process
        raise LaunchError(f"stopped by {signal.Signals(stopped).name}")


def _settings(hosts: Hosts | None) -> dict[str, str]:
    """What the environment of ranks has beside ours."""
    settings = of_ranks()
    if hosts is None:
        use_loopback(settings)
    else:
        settings |= settings_for(hosts)
    return settings


def of_ranks() -> dict[str, str]:
    """What the environment of every rank has, whoever starts it, unless it says otherwise."""
    return _unless_said({"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **_ONE_ORDER})


def _unless_said(settings: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in settings.items() if name not in os.environ}


def _is_heard(name: str) -> bool:
    """Whether this process does not ignore a signal, as under `nohup`: the agent would end on it then."""
    number = getattr(signal, name, None)
    return number is None or signal.getsignal(number) is not signal.SIG_IGN


def _grace(config: type, seconds: int) -> dict[str, Any]:
    """How long ranks have to end, as torch's elastic agent takes it; torch 2.11's takes nothing."""
    known = {field.name for field in fields(config)}
    return {"shutdown_timeout": seconds} if "shutdown_timeout" in known else {}


def _rendezvous(hosts: Hosts | None, name: str, port: int | None) -> dict[str, Any]:
    """Where the agents of the machines meet, as torch's elastic agent takes it."""
    if hosts is None:
        return {
            "run_id": name,
            "rdzv_backend": "c10d",
            "rdzv_endpoint": f"127.0.0.1:{port or 0}",
            "rdzv_configs": {"is_host": True},
            "local_addr": "127.0.0.1",
        }
    return {
        "run_id": f"espalier-{hosts.port}",
        "rdzv_backend": "static",
        "rdzv_endpoint": hosts.endpoint,
        "rdzv_configs": {"rank": hosts.node, "timeout": 900},
        "local_addr": own_address(hosts.host, hosts.port),
    }


def _check_request(argv: Sequence[str], nproc: int, port: int | None) -> None:
    if nproc < 1:
        raise ValueError(f"nproc={nproc}: at least one process is needed")
    if isinstance(argv, str) or not argv:
        raise ValueError(f"argv={argv!r}: expected what follows `python`, such as ['train.py', '--fast']")
    if not argv[0].startswith("-") and not Path(argv[0]).exists():
        raise LaunchError(f"no such file: {argv[0]}")
    if port is None:
        return
    if not 0 < port < 65536:
        raise ValueError(f"port={port}: expected 1 to 65535")
    # The agent would take the one who holds the port for its own rendezvous, and wait for an answer.
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            raise LaunchError(
                f"port {port} cannot be used ({error.strerror}): choose another one, "
                "or none to have a free one picked"
            ) from error


def _guarded(argv: Sequence[str], folder: Path) -> list[str]:
    """The arguments of the Python that becomes a rank."""
    guard = Path(__file__).with_name("_guard.py")
    return ["-S", "-E", str(guard), str(folder), str(os.getpid()), sys.executable, *argv]


def _stderr(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.stderr"


@contextlib.contextmanager
def _environment(settings: Mapping[str, str]) -> Iterator[None]:
    """Our own environment, changed for a while: the agent hands it on and lets nothing be added."""
    before = dict(os.environ)
    os.environ.update(settings)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


@contextlib.contextmanager
def _quiet_agent() -> Iterator[None]:
    """Keep the agent's log messages, which bury a rank's own error, off the terminal."""
    loggers = [
        logging.getLogger(name)
        for name in list(logging.root.manager.loggerDict)
        if name.startswith(("torch.distributed.elastic", "torch.distributed.launcher"))
    ]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextlib.contextmanager
def _own_signals() -> Iterator[None]:
    """Put the caller's signal handlers back: the agent leaves its own behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    names = ("SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGINT")
    numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:
                signal.signal(number, handler)


@contextlib.contextmanager
def _follow(folder: Path) -> Iterator[None]:
    """Copy rank 0's standard error to ours, byte for byte as it comes, until any rank notes a failure.

    What is said after that is the report's matter: it must stand there once, and alone.
    """
    done = threading.Event()
    path = _stderr(folder, 0)

    def copy() -> None:
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        offset = 0
        while True:
            last = done.is_set()
            data = b""
            with contextlib.suppress(FileNotFoundError), open(path, "rb") as source:
                source.seek(offset)
                data = source.read()
                offset += len(data)
            if _noted(folder):
                return
            if data:
                sys.stderr.write(decoder.decode(data))
                sys.stderr.flush()
            if last:
                return
            done.wait(0.1)

    thread = threading.Thread(target=copy, name="espalier-stderr", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


@contextlib.contextmanager
def _kept(folder: Path, logs: Path | None, also: Sequence[Path]) -> Iterator[None]:
    """Add what ranks have printed to files that outlive the launch, however it ends.

    Args:
        also: what of the first rank is kept as well, known in the end.
    """
    try:
        yield
    finally:
        printed = [path for path in folder.glob("rank*.std*") if path in also or not path.match("rank0.*")]
        for path in sorted(path for path in printed if logs is not None and path.stat().st_size):
            assert logs is not None
            logs.mkdir(parents=True, exist_ok=True)
            with path.open("rb") as source, (logs / path.name).open("ab") as kept:
                shutil.copyfileobj(source, kept)


def _not_shown(folder: Path, blamed: int | None) -> list[Path]:
    """What ranks have written, but for what stands in the report, says the same, or that others have gone."""
    rest = []
    quote = [] if blamed is None else _tail(_own_words(folder, blamed))
    for path in sorted(path for path in folder.glob("rank*.std*") if path.stat().st_size):
        rank = int(path.stem.removeprefix("rank"))
        # what the first rank wrote before was on the terminal, as it came
        quoted = path.suffix == ".stderr" and _own_words(folder, rank) == quote
        note = note_file(folder, rank)
        if note.exists():
            consequence = is_consequence(note.read_text("utf-8", errors="replace"))
            redundant = consequence and (
                rank == 0 or all(map(_TRACE.match, path.read_text("utf-8").splitlines()))
            )
        else:
            redundant = rank == 0
        if not quoted and not redundant:
            rest.append(path)
    return rest


def _own_words(folder: Path, rank: int) -> list[str]:
    """The lines that a rank wrote to standard error, without what torch puts before those of a traceback."""
    path = _stderr(folder, rank)
    text = path.read_text(encoding="utf-8", errors="replace").rstrip() if path.exists() else ""
    return [_TRACE.sub("", line) for line in text.splitlines()]


def _tail(lines: list[str]) -> list[str]:
    """The last lines, without C++'s stacks; of more than these without a traceback's frames of libraries, but
    for the last.
    """
    lines = [line for line in lines if not _OF_CPP.match(line)]
    if len(lines) <= _TAIL_LINES:
        return lines
    groups: list[list[str]] = []  # a frame is one
    for line in lines:
        if line.startswith("    ") and groups and groups[-1][0].startswith(_FRAME):
            groups[-1].append(line)
        else:
            groups.append([line])
    following = [*(group[0] for group in groups[1:]), ""]
    kept = [
        group
        for group, after in zip(groups, following, strict=True)
        if not (_OF_LIBRARY.match(group[0]) and after.startswith(_FRAME))
    ]
    return [line for group in kept for line in group][-_TAIL_LINES:]


def _clear(folder: Path, kept: Sequence[Path]) -> None:
    """Remove all else."""
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        elif path not in kept:
            path.unlink()


def _explain(
    exits: Mapping[int, int], nproc: int, folder: Path, here: range, logs: Path | None
) -> LaunchError:
    """One report for the failure of a launch, given the exit codes of the ranks that did not end well.

    Args:
        nproc: ranks of all hosts.
        here: those of this one.
        logs: where what ranks wrote is kept, if not in ``folder``.
    """
    ranks, account, silent = _account(folder)
    rank = min(exits.keys() | _noted(folder), key=lambda rank: _blame(rank, exits, folder))
    if ranks and _blame(rank, exits, folder)[0]:
        rank = ranks[0]
    code = exits.get(rank, STOPPED if rank not in here else 0 if rank in ranks else 1)
    if rank in ranks and code in (0, -signal.SIGTERM):
        # it has left while others waited for it; SIGTERM is the agent's, while it was on its way out
        code, lines = 1, account
    elif rank in ranks and silent and code == -signal.SIGKILL:
        lines = account  # it was the watch that has ended it
    else:
        lines = [f"rank {rank} of {nproc} failed: {_exit_text(code)}", *account]
    if rank not in here:
        ours = f"ranks {here[0]} to {here[-1]} were" if len(here) > 1 else f"rank {here[0]} was"
        lines = [f"rank {rank} of {nproc} failed, on another host: {ours} stopped", *account]
        place = (logs or folder) if _not_shown(folder, rank) else None
        if place is not None:
            lines.append(f"What they wrote on this host: {place}")
        return LaunchError("\n".join(lines), rank, code, place)
    words = _own_words(folder, rank)
    tail = _tail(words)
    if rank == 0 and code > 0 and tail and not note_file(folder, 0).exists():
        lines.append("What it wrote to standard error stands above.")
    elif tail:
        of_libraries = "" if set(tail) >= set(words[-len(tail) :]) else ", without frames of libraries"
        lines.append(f"The last it wrote to standard error{of_libraries}:")
        lines += [f"    {line}" for line in tail]
    else:
        lines.append("It wrote nothing to standard error.")
    # SIGTERM is what the agent sends to those that still run.
    others = [
        f"rank {other} ({_exit_text(status)})"
        for other, status in sorted(exits.items())
        if other != rank and status not in (-signal.SIGTERM, STOPPED)
    ]
    if others:
        lines.append(f"After it failed: {', '.join(others)}.")
    place = (logs or folder) if _not_shown(folder, rank) else None
    where = "" if place is None else f" What else they wrote: {place}"
    lines.append(f"All ranks have been stopped.{where}")
    return LaunchError("\n".join(lines), rank, code, place)


def _account(folder: Path) -> tuple[list[int], list[str], bool]:
    """Whom the watch over the ranks blames, what it tells, and whether they gave no sign of life; nothing,
    where there was none."""
    path = folder / ACCOUNT
    if not path.exists():
        return [], [], False
    verdict = json.loads(path.read_text("utf-8"))
    return verdict["ranks"], verdict["text"].splitlines(), bool(verdict.get("silent"))


def _noted(folder: Path) -> set[int]:
    """The ranks that have noted a failure."""
    return {int(path.stem.removeprefix("rank")) for path in folder.glob("rank*.failure")}


def _blame(rank: int, exits: Mapping[int, int], folder: Path) -> tuple[int, int]:
    """Sort key: who is the cause of a failure comes first.

    A rank that was killed from without or by a fault cannot be a consequence. Of exceptions the earliest is
    to blame, but not one that speaks of a lost connection. An abort is what NCCL's watchdog and gloo's
    threads do when a peer has gone, and SIGTERM comes from the agent.
    """
    code = exits.get(rank, 1)
    if code < 0 and -code not in (signal.SIGTERM, signal.SIGABRT):
        return 0, rank
    note = note_file(folder, rank)
    if note.exists():
        consequence = is_consequence(note.read_text(encoding="utf-8", errors="replace"))
        return (4 if consequence else 1), note.stat().st_mtime_ns
    if code == -signal.SIGABRT:
        return 3, rank
    return (5 if code < 0 else 2), rank


def _exit_text(code: int) -> str:
    if code == STOPPED:
        return f"stopped with the others, exit code {code}"
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        name = signal.Signals(-code).name
        hint = " (as the kernel does when memory runs out)" if -code == signal.SIGKILL else ""
        return f"killed by {name}{hint}"
    return f"killed by signal {-code}"


# ---- local ranks from inside a program: a function on a mesh, without a launcher


_MOST_SPAWNED = 1024
_FAILED = ".failed"  # how the name ends under which a rank leaves what it raised


def spawn(
    fn: Callable[..., Any], axes: Mapping[str, int], *args: Any, device_type: str | None = None
) -> list[Any]:
    """Run ``fn(mesh, *args)`` on new local processes, one for each rank of a mesh.

    Args:
        fn: a function that other processes can import (defined at the top of a module); or one of a
            notebook's cell, of a prompt, or within another, which is sent with what it uses.
        axes: name to size, as for :meth:`Mesh.from_env`.
        args: passed on, pickled.
        device_type: ``"cpu"``, or an accelerator's; by default what the machine has.

    Returns:
        What each rank returned, in the order of the ranks (plain, picklable values).

    Raises:
        torch.multiprocessing.ProcessRaisedException: a rank raised; the message holds its traceback,
            and the other ranks have been stopped.
    """
    expect("spawn: fn", fn, Callable, "a function of a mesh")
    _, sizes = names_and_sizes(axes)
    n = math.prod(sizes)
    if n > _MOST_SPAWNED:
        raise ValueError(
            f"spawn: {n:,} processes on this machine are too many, expected up to {_MOST_SPAWNED:,}."
        )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with temporary_folder() as folder:
        work = (_portable(fn), dict(axes), args, n, port, str(folder), device_type)
        try:
            with _environment(_unless_said(_ONE_ORDER)):
                torch.multiprocessing.spawn(_rank, work, nprocs=n)  # type: ignore[no-untyped-call]
        except Exception:
            _raise_cause(folder, n)
            raise
        return [pickle.loads((folder / str(rank)).read_bytes()) for rank in range(n)]


class _ByValue:
    """A function that other processes cannot import, as bytes."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        import cloudpickle

        self._content: bytes = cloudpickle.dumps(fn)

    def __call__(self, *args: Any) -> Any:
        return pickle.loads(self._content)(*args)


def _portable(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The function, in a form that reaches other processes."""
    name = getattr(fn, "__qualname__", "")
    shown = getattr(fn, "__module__", None) == "__main__" and not hasattr(sys.modules["__main__"], "__file__")
    return _ByValue(fn) if shown or "<" in name else fn


def _rank(
    rank: int,
    fn: Callable[..., Any],
    axes: dict[str, int],
    args: tuple[Any, ...],
    n: int,
    port: int,
    folder: str,
    device_type: str | None,
) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(n),
        "LOCAL_WORLD_SIZE": str(n),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    use_loopback(os.environ)
    start(device_type)
    try:
        try:
            result = fn(Mesh.from_env(axes), *args)
            Path(folder, str(rank)).write_bytes(pickle.dumps(result))
        except Exception as error:
            if not is_consequence(str(error)):
                # before `finish` tells other ranks, which may be seen to stop sooner than this one
                note = os.getpid(), traceback.format_exc()
                Path(folder, f"{rank}{_FAILED}").write_bytes(pickle.dumps(note))
            raise
        finally:
            finish()
    except Exception as error:
        if is_consequence(str(error)):
            # let the rank that is the cause be seen to fail first
            time.sleep(PATIENCE)
        raise
    leave()


def _raise_cause(folder: Path, n: int) -> None:
    """Raise what a rank has left, whichever rank was seen to end first."""
    for rank in range(n):
        left = folder / f"{rank}{_FAILED}"
        if left.exists():
            pid, text = pickle.loads(left.read_bytes())
            message = f"\n\n-- Process {rank} terminated with the following error:\n{text}"
            raise ProcessRaisedException(message, rank, pid) from None


def leave(code: int = 0) -> NoReturn:
    """End this process as the interpreter would, but for taking itself apart.

    That takes a second once torch and its compiler are imported. And threads of gloo's that a program holds
    on to (in a model of torch's DDP, say) would abort it then.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    util._exit_function()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # a closed pipe, a full disk
            stream.flush()
    os._exit(code)
