"""Saving: each rank writes its pieces to a file of its own, and the first makes a checkpoint of them all.

What ranks tell one another while files are written goes through the folder: a thread writes while the
program trains, so it takes part in no collective. How it went the ranks agree on in :meth:`Saver.wait`.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch

from espalier.checkpoint.errors import CheckpointError
from espalier.checkpoint.files import TensorFile, write_file
from espalier.checkpoint.folder import cannot, commit, prepare
from espalier.checkpoint.index import Boxes, Index
from espalier.checkpoint.pieces import Lying, Piece, pieces
from espalier.comm.agreement import agree
from espalier.comm.words import words_of_all
from espalier.mesh import Mesh

_POLL = 0.002  # seconds between two looks for the parts of others
PATIENCE = 600.0  # seconds without anything new from others


class Saver:
    """Saves the trees of one mesh, one after the other.

    Args:
        mesh: of the ranks that save; all of them call each method.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self._buffers: dict[str, torch.Tensor] = {}
        self._written: Future[Index] | None = None
        self._committed: Future[Path] | None = None
        self._given_up = threading.Event()

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
                raise CheckpointError(said if rank == 0 else f"rank {mesh.ranks[rank]}: {said}") from error
        folder = told[0][1]
        assert folder is not None
        if asynchronous:
            found = self._staged(found)
        self._start(folder, index, found, keep, asynchronous)
        if not asynchronous:
            self.wait()
        return directory / folder.name[1:].rpartition(".")[0]

    def wait(self) -> None:
        """Until what is being written is written.

        Raises:
            CheckpointError: on all ranks, if it could not be.
        """
        if self._written is None or self._committed is None:
            return
        written, committed = self._written, self._committed
        self._written = self._committed = None
        axes = range(self.mesh.ndim)
        try:
            agree(_error_of(written), self.mesh, axes)
        except (RuntimeError, ValueError) as error:
            self._given_up.set()
            _error_of(committed)
            raise _as_ours(error) from error
        try:
            agree(_error_of(committed), self.mesh, axes)
        except (RuntimeError, ValueError) as error:
            raise _as_ours(error) from error

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

    def _start(
        self, folder: Path, index: Index, found: list[Piece], keep: int | None, asynchronous: bool
    ) -> None:
        self._written, self._committed = Future(), Future()
        self._given_up = threading.Event()
        work = _Work(self.mesh, folder, index, found, keep, self._given_up)
        given = self._written, self._committed
        if asynchronous:
            threading.Thread(target=work.run, args=given, name="espalier-checkpoint").start()
        else:
            work.run(*given)


class _Work:
    """What one rank does for one checkpoint, in a thread."""

    def __init__(
        self,
        mesh: Mesh,
        folder: Path,
        index: Index,
        found: list[Piece],
        keep: int | None,
        given_up: threading.Event,
    ) -> None:
        self.rank, self.ranks = mesh.rank, mesh.size()
        self.folder, self.index, self.found = folder, index, found
        self.keep, self.given_up = keep, given_up

    def run(self, written: Future[Index], committed: Future[Path]) -> None:
        """Write; on the first rank, wait for the others, and commit."""
        try:
            self._write()
            written.set_result(self.index)
        except BaseException as error:
            written.set_exception(error)
            committed.set_exception(error)
            return
        try:
            if self.rank == 0:
                self._gather()
                commit(self.folder, self.index, self.keep)
            committed.set_result(self.folder)
        except OSError as error:
            committed.set_exception(CheckpointError(cannot(f"{self.folder} cannot be written", error)))
        except BaseException as error:
            committed.set_exception(error)

    def _write(self) -> None:
        try:
            file = TensorFile(self.folder / f"__{self.rank}_0.distcp")
            try:
                for piece in self.found:
                    entry = self.index.tensors[piece.name]
                    entry.boxes.append(file.write(piece))
            finally:
                file.close()
            self.index.files[file.path.name] = file.size
            self.index.tensors = {n: e for n, e in self.index.tensors.items() if e.boxes}
            if self.rank != 0:
                write_file(self.folder / _part(self.rank), self.index.to_json())
        except OSError as error:
            raise CheckpointError(cannot(f"{self.folder} cannot be written", error)) from error

    def _gather(self) -> None:
        """Wait for the parts of the others."""
        missing = list(range(1, self.ranks))
        deadline = time.monotonic() + PATIENCE
        while missing:
            rank = missing[0]
            part = self.folder / _part(rank)
            if part.exists():
                self.index.merge(Index.from_json(part.read_bytes(), str(part)))
                part.unlink()
                missing.pop(0)
                deadline = time.monotonic() + PATIENCE
            elif self.given_up.is_set():
                raise CheckpointError(f"{self.folder} was given up: another rank could not write its part.")
            elif time.monotonic() > deadline:
                raise CheckpointError(
                    f"{self.folder}: nothing came from rank {rank} for {PATIENCE:g} seconds. Is the "
                    "folder the same on all hosts?"
                )
            else:
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


def _as_ours(error: Exception) -> CheckpointError:
    return error if isinstance(error, CheckpointError) else CheckpointError(str(error))
