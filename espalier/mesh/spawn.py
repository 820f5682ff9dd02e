"""Local ranks from inside a program: a function on a mesh, without a launcher."""

from __future__ import annotations

import atexit
import math
import os
import pickle
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from multiprocessing import util
from pathlib import Path
from typing import Any, NoReturn

import torch.multiprocessing
from torch.multiprocessing import ProcessRaisedException

from espalier.mesh.mesh import Mesh
from espalier.mesh.process import PATIENCE, finish, is_consequence, start, use_loopback

_FAILED = ".failed"  # how the name ends under which a rank leaves what it raised


def spawn(
    fn: Callable[..., Any], axes: Mapping[str, int], *args: Any, device_type: str | None = None
) -> list[Any]:
    """Run ``fn(mesh, *args)`` on new local processes, one for each rank of a mesh.

    Args:
        fn: a function that other processes can import (defined at the top of a module).
        axes: name to size, as for :meth:`Mesh.from_env`.
        args: passed on, pickled.
        device_type: ``"cpu"`` or ``"cuda"``; by default what the machine has.

    Returns:
        What each rank returned, in the order of the ranks (plain, picklable values).

    Raises:
        torch.multiprocessing.ProcessRaisedException: a rank raised; the message holds its traceback,
            and the other ranks have been stopped.
    """
    n = math.prod(axes.values())
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="espalier-") as folder:
        work = (fn, dict(axes), args, n, port, folder, device_type)
        try:
            torch.multiprocessing.spawn(_rank, work, nprocs=n)  # type: ignore[no-untyped-call]
        except Exception:
            _raise_cause(Path(folder), n)
            raise
        return [pickle.loads(Path(folder, str(rank)).read_bytes()) for rank in range(n)]


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
    _leave()


def _raise_cause(folder: Path, n: int) -> None:
    """Raise what a rank has left, whichever rank was seen to end first."""
    for rank in range(n):
        left = folder / f"{rank}{_FAILED}"
        if left.exists():
            pid, text = pickle.loads(left.read_bytes())
            message = f"\n\n-- Process {rank} terminated with the following error:\n{text}"
            raise ProcessRaisedException(message, rank, pid) from None


def _leave() -> NoReturn:
    """End this process, whose result is written, as the interpreter would, but for taking itself apart.

    Threads of gloo's that a program holds on to (in a model of torch's DDP, say) would abort it then.
    """
    util._exit_function()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
