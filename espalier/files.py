"""Bytes to files and back, in pieces; files that are there whole or not at all, and last; own folders."""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

PIECE = 1 << 22
"""Bytes that are read or written, and summed up, at a time."""


def memory_of(x: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, as bytes."""
    assert x.is_contiguous() and x.device.type == "cpu"
    if not x.numel():
        return memoryview(b"")
    return memoryview(x.detach().view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def bytes_of(x: torch.Tensor) -> memoryview:
    """The bytes of a tensor in the host's memory, in order; a copy where they do not stand there so."""
    return memory_of(x.detach().cpu().resolve_conj().resolve_neg().contiguous())


def pieces_of(data: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Data in pieces, and where each begins."""
    for start in range(0, len(data), PIECE):
        yield start, data[start : start + PIECE]


def put(file: int, data: memoryview, at: int) -> None:
    """Write all of it to a place in a file."""
    done = 0
    while done < len(data):
        done += os.pwrite(file, data[done:], at + done)


def get(file: int, into: memoryview, at: int) -> int:
    """Read from a place in a file; gives how many bytes there were."""
    done = 0
    while done < len(into):
        n = os.preadv(file, [into[done:]], at + done)
        if n == 0:
            break
        done += n
    return done


def write_file(path: Path, content: bytes, *, last: bool = True) -> None:
    """A file that is there whole or not at all; ``last``: it outlives a crash of the machine, too."""
    hidden = path.with_name(f".{path.name}.new")
    with open(hidden, "wb") as file:
        file.write(content)
        if last:
            file.flush()
            os.fsync(file.fileno())
    hidden.rename(path)


def sync(path: Path) -> None:
    """What is in a file, or was renamed in a folder, outlives a crash of the machine."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


# ---- what belongs to a process, which the kernel lets go when it ends, however it ends

_LOCK = "held"


def hold(path: Path) -> int:
    """Open a file, or a folder: until it is closed, or this process has ended, :func:`is_held` says so of it.

    Several may hold one. A file system without locks knows of none.
    """
    file = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR | os.O_CREAT)
    with suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_SH)
    return file


def is_held(path: Path) -> bool:
    """Whether a process that lives holds it, or may, as it is another user's."""
    try:
        file = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    else:
        return False
    finally:
        os.close(file)


def own_folder() -> tuple[Path, int]:
    """A folder of this process for a while, and the file by which it is held; what killed ones left goes.

    What is to stay there goes on without the file ``held``. It names the host: hosts may share the folder for
    temporary files, and not see each other's locks there.
    """
    prefix, host = "espalier-", socket.gethostname()
    for left in Path(tempfile.gettempdir()).glob(f"{prefix}*/{_LOCK}"):
        with suppress(OSError):
            if left.read_text() == host and not is_held(left):
                shutil.rmtree(left.parent, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    new = folder / f"{_LOCK}.new"
    new.write_text(host)
    file = hold(new)
    if is_held(new):  # else this file system has no locks, and nobody could tell
        new.rename(folder / _LOCK)
    return folder, file


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """:func:`own_folder`, gone afterwards."""
    folder, file = own_folder()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(file)
