"""Saving: each rank writes its pieces to a file of its own, and the first makes a checkpoint of them all.

What ranks tell one another while files are written goes through the folder: a thread writes while the
program trains, so it takes part in no collective. How it went the ranks agree on in :meth:`Saver.wait`.
"""

from __future__ import annotations

import secrets
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch

from espalier.checkpoint.errors import CheckpointError
from espalier.checkpoint.files import TensorFile
from espalier.checkpoint.folder import cannot, commit, prepare
from espalier.checkpoint.index import Boxes, Index
from espalier.checkpoint.pieces import Lying, Piece, pieces
from espalier.comm.agreement import agree
from espalier.comm.words import words_of_all
from espalier.files import write_file
from espalier.mesh import Mesh

_POLL = 0.002  # seconds between two looks for the parts of others
PATIENCE = 600.0  # seconds without anything new from others
_AT_THE_END = 20.0  # the same, when this process's program has ended


class Saver:
    """Saves the trees of one mesh, one after the other.

    Args:
        mesh: of the ranks that save; all of them call each method.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self._buffers: dict[str, torch.Tensor] = {}
        self._work: _Work | None = None

    def save(
        self,
        directory: Path,
        index: Index,
        tree: Mapping[str, Lying],
        *,
        keep: int | None = None,
        asynchronous: bool = False,
    ) -> Path:
        """Write a checkpoint.

        Args:
            directory: the folder in which its own is made.
            index: what is to be in it beside the tensors.
            tree: the tensors, in one order on all ranks.
            keep: how many checkpoints are to be in the folder after it.
            asynchronous: go on when the values are copied to the host's memory; how it ends is said by
                :meth:`wait`, or the next save.

        Returns:
            the checkpoint's folder.

        Raises:
            CheckpointError: on all ranks, if it could not be written.
        """
        self.wait()
        mesh, error = self.mesh, None
        index.ranks = mesh.size()
        folder: Path | None = None
        found: list[Piece] = []
        try:
            if mesh.rank == 0:
                folder = prepare(directory, index.step, secrets.token_hex(4))
            found = pieces(tree)
        except (CheckpointError, ValueError) as met:
            error = met
        told = words_of_all((None if error is None else str(error), folder), mesh)
        for rank, (said, _) in enumerate(told):
            if said is not None:
                if folder is not None:
                    shutil.rmtree(folder, ignore_errors=True)
                raise CheckpointError(said if rank == 0 else f"rank {mesh.ranks[rank]}: {said}") from error
        folder = told[0][1]
        assert folder is not None
        if not asynchronous:
            self._work = _Work(mesh, folder, index, found, keep)
            self._work.write()
            self.wait()
        else:
            work = self._work = _Work(mesh, folder, index, self._staged(found), keep, apart=True)
            threading.Thread(target=work.both, name="espalier-checkpoint").start()
        return directory / folder.name[1:].rpartition(".")[0]

    def wait(self) -> None:
        """Until what is being written is written.

        Raises:
            CheckpointError: on all ranks, if it could not be.
        """
        if self._work is None:
            return
        work, self._work = self._work, None
        axes = range(self.mesh.ndim)
        try:
            agree(_error_of(work.written), self.mesh, axes)
            if not work.apart:
                work.commit()
            agree(_error_of(work.committed), self.mesh, axes)
        except (RuntimeError, ValueError) as error:
            work.given_up.set()
            if self.mesh.rank == 0:
                if work.apart:
                    _error_of(work.committed)
                shutil.rmtree(work.folder, ignore_errors=True)
            raise CheckpointError(str(error)) from error

    def _staged(self, found: list[Piece]) -> list[Piece]:
        """The pieces, copied to the host's memory, in buffers that are used again."""
        out, buffers = [], {}
        pin = self.mesh.device_type == "cuda"
        for piece in found:
            key = f"{piece.name} {piece.box.offsets}"
            buffer = self._buffers.get(key)
            if buffer is None or (buffer.shape, buffer.dtype) != (piece.values.shape, piece.values.dtype):
                shape, dtype = piece.values.shape, piece.values.dtype
                buffer = torch.empty(shape, dtype=dtype, device="cpu", pin_memory=pin)
            buffer.copy_(piece.values, non_blocking=pin)
            buffers[key] = buffer
            out.append(piece._replace(values=buffer))
        self._buffers = buffers
        if pin:
            torch.cuda.current_stream().synchronize()
        return out


class _Work:
    """What one rank does for one checkpoint.

    Attributes:
        apart: a thread does it; else the program, which commits once the ranks have agreed that all wrote.
        written: when this rank's file is.
        committed: on the first rank, when the checkpoint is there; on others with ``written``.
        given_up: set when another rank has failed.
    """

    def __init__(
        self,
        mesh: Mesh,
        folder: Path,
        index: Index,
        found: Sequence[Piece],
        keep: int | None,
        apart: bool = False,
    ) -> None:
        self.rank, self.ranks, self.apart = mesh.rank, mesh.size(), apart
        self.folder, self.index, self.found, self.keep = folder, index, found, keep
        self.written, self.committed = Future[None](), Future[None]()
        self.given_up = threading.Event()

    def write(self) -> None:
        """Write this rank's file."""
        self._do(self.written, self._write)

    def commit(self) -> None:
        """On the first rank, wait for the others, and make a checkpoint of it."""
        self._do(self.committed, self._commit)

    def both(self) -> None:
        """One after the other."""
        self.write()
        self.commit()

    def _do(self, done: Future[None], work: Callable[[], None]) -> None:
        try:
            work()
            done.set_result(None)
        except OSError as error:
            done.set_exception(CheckpointError(cannot(f"{self.folder} could not be written", error)))
        except BaseException as error:
            done.set_exception(error)

    def _commit(self) -> None:
        if self.rank == 0 and self.written.exception() is None:
            self._gather()
            commit(self.folder, self.index, self.keep)

    def _write(self) -> None:
        file = TensorFile(self.folder / f"__{self.rank}_0.distcp")
        try:
            for piece in self.found:
                self.index.tensors[piece.name].boxes.append(file.write(piece))
        finally:
            file.close()
        self.index.files[file.path.name] = file.size
        if self.rank != 0:
            self.index.tensors = {name: e for name, e in self.index.tensors.items() if e.boxes}
            write_file(self.folder / _part(self.rank), self.index.to_json())

    def _gather(self) -> None:
        """Wait for the parts of the others."""
        missing = deque(range(1, self.ranks))
        since = time.monotonic()
        while missing:
            part = self.folder / _part(missing[0])
            if part.exists():
                self.index.merge(Index.from_json(part.read_bytes(), str(part)))
                part.unlink()
                missing.popleft()
                since = time.monotonic()
                continue
            waited, limit = time.monotonic() - since, PATIENCE
            if not threading.main_thread().is_alive():
                limit = _AT_THE_END
            if self.given_up.is_set() or waited > limit:
                why = "it failed" if self.given_up.is_set() else f"nothing came in {waited:.0f} seconds"
                raise CheckpointError(
                    f"{self.folder} was given up: rank {missing[0]} brought no part of it ({why}). "
                    "The folder must be the same on all hosts."
                )
            time.sleep(_POLL)
        self.index.check_whole()


def index_of(tree: Mapping[str, Lying]) -> dict[str, Boxes]:
    """The tensors of a tree, without boxes yet."""
    return {name: Boxes(local.dtype, tuple(layout.shape)) for name, (local, layout) in tree.items()}


def _part(rank: int) -> str:
    return f"part-{rank}.json"


def _error_of(future: Future[Any]) -> Exception | None:
    error = future.exception()
    if error is not None and not isinstance(error, Exception):
        raise error
    return error
