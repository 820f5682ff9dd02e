"""Saving: each rank writes its pieces to a file of its own, and the first makes a checkpoint of them all.

How it went the ranks agree on: at once, or in :meth:`Saver.wait` (:mod:`espalier.checkpoint.work`).
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from espalier.checkpoint.errors import CheckpointError
from espalier.checkpoint.folder import final_of, hidden
from espalier.checkpoint.index import Boxes, Index
from espalier.checkpoint.pieces import Lying, Piece, pieces
from espalier.checkpoint.work import Staging, Work
from espalier.comm.agreement import agree
from espalier.comm.words import words_of_all
from espalier.mesh import Mesh


class Saver:
    """Saves the trees of one mesh, one after the other.

    Args:
        mesh: of the ranks that save; all of them call each method but :meth:`wait_staged`.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self._staging: Staging | None = None
        self._work: Work | None = None
        self._token, self._count = "", 0

    def save(
        self,
        directory: Path,
        index: Index,
        tree: Mapping[str, Lying],
        *,
        keep: int | None = None,
        asynchronous: bool = False,
        durable: bool = False,
    ) -> Path:
        """Write a checkpoint.

        Args:
            directory: the folder in which its own is made.
            index: what is to be in it beside the tensors.
            tree: the tensors, in one order on all ranks.
            keep: how many checkpoints are to be in the folder when this one outlives a crash.
            asynchronous: go on at once. What is ``steady`` must not change until :meth:`wait_staged`; how it
                ends is said by :meth:`wait`, or the next save.
            durable: return when the checkpoint outlives a crash of the machine, and let it not be there
                before. Else it comes to do so meanwhile, which :meth:`wait` waits for.

        Returns:
            the checkpoint's folder.

        Raises:
            CheckpointError: on all ranks, if it could not be written.
        """
        self.wait()
        mesh = self.mesh
        if not self._token:
            self._token = words_of_all(secrets.token_hex(4), mesh)[0]
        self._count += 1
        index.ranks = mesh.size()
        folder = hidden(directory, index.step, f"{self._token}{self._count}")
        error, found = None, list[Piece]()
        try:
            found = pieces(tree)
        except ValueError as met:
            error = met  # others are not to wait for this rank
        if asynchronous:
            self._staging = self._staging or Staging(mesh)
            staging, durable = self._staging, True
        else:
            staging = None
        work = Work(mesh, folder, index, found, keep, durable=durable, staging=staging, error=error)
        if not asynchronous:
            work.write()
            self._see(work, work.written)
            work.commit()
            self._see(work, work.committed)
        self._work = work
        work.begin(apart=asynchronous)
        if durable and not asynchronous:
            self.wait()
        return final_of(folder)

    def wait_staged(self) -> None:
        """Until what is being saved may change; no collective."""
        if self._work is not None:
            self._work.wait_staged()

    def wait(self) -> None:
        """Until what is being written is written, and outlives a crash of the machine.

        Raises:
            CheckpointError: on all ranks, if it could not be.
        """
        if self._work is not None:
            work, self._work = self._work, None
            self._see(work, *work.pending)

    def _see(self, work: Work, *done: Future[None]) -> None:
        """Raise on all ranks what one of them has met."""
        try:
            for each in done:
                agree(_error_of(each), self.mesh, range(self.mesh.ndim))
        except (RuntimeError, ValueError) as error:
            work.give_up()
            raise CheckpointError(str(error)) from error


def index_of(tree: Mapping[str, Lying]) -> dict[str, Boxes]:
    """The tensors of a tree, without boxes yet."""
    return {name: Boxes(local.dtype, tuple(layout.shape)) for name, (local, layout, _) in tree.items()}


def _error_of(future: Future[Any]) -> Exception | None:
    error = future.exception()
    if error is not None and not isinstance(error, Exception):
        raise error
    return error
