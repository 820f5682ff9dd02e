"""What one rank does for one checkpoint: copies its pieces, writes them, makes them last.

Ranks tell one another through the folder that their part is there: a thread does this while the program
trains, so it takes part in no collective.
"""

from __future__ import annotations

import errno
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import torch

from espalier.checkpoint.errors import CheckpointError
from espalier.checkpoint.files import TensorFile
from espalier.checkpoint.folder import cannot, commit, final_of, prepare, settle, tidy, withdraw
from espalier.checkpoint.index import Index
from espalier.checkpoint.pieces import Piece
from espalier.files import write_file
from espalier.mesh import Mesh

_POLL = 0.002  # seconds between two looks for the parts of others
PATIENCE = 600.0  # seconds without anything new from others
_AT_THE_END = 20.0  # the same, when this process's program has ended


class Staging:
    """Copies of pieces in the host's memory, in buffers that are used again.

    Args:
        side: a stream of its own; None on a CPU.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.side: Any = torch.cuda.Stream(mesh.device()) if mesh.device_type == "cuda" else None
        self._buffers: dict[str, torch.Tensor] = {}

    def begin(self, found: Sequence[Piece]) -> tuple[list[Piece], list[tuple[torch.Tensor, Piece]]]:
        """Copy what may change at any time.

        Returns:
            the pieces as copies, and of those that are still to be filled the buffer and what goes into it.
        """
        out, later, buffers = [], [], {}
        pin = self.side is not None
        for piece in found:
            key = f"{piece.name} {piece.box.offsets}"
            buffer = self._buffers.get(key)
            if buffer is None or (buffer.shape, buffer.dtype) != (piece.values.shape, piece.values.dtype):
                shape, dtype = piece.values.shape, piece.values.dtype
                buffer = torch.empty(shape, dtype=dtype, device="cpu", pin_memory=pin)
            buffers[key] = buffer
            out.append(piece._replace(values=buffer))
            if piece.steady:
                later.append((buffer, piece))
            else:
                buffer.copy_(piece.values, non_blocking=pin)
        self._buffers = buffers
        if pin:
            self.side.wait_stream(torch.cuda.current_stream())
        return out, later

    def fill(self, later: Sequence[tuple[torch.Tensor, Piece]]) -> Any:
        """Start to fill buffers; gives the event after which they, and all copies before, are there."""
        pin = self.side is not None
        with torch.cuda.stream(self.side) if pin else nullcontext():
            for buffer, piece in later:
                buffer.copy_(piece.values, non_blocking=pin)
        return self.side.record_event() if pin else None


class Work:
    """What one rank does for one checkpoint.

    Attributes:
        staged: when what updates change has been copied, or, on CUDA, an event of which it has.
        written: when this rank's file is.
        committed: on the first rank, when the checkpoint is there; on others with ``written``.
        synced: when this rank's file outlives a crash of the machine.
        settled: on the first rank, when the checkpoint does, and the oldest have gone.
        pending: of these what the ranks are still to agree on.
        given_up: set when another rank has failed.

    Args:
        durable: let nothing be there before it outlives a crash of the machine.
        staging: copies the pieces first; None: they are as they stay.
        error: what kept this rank from having any.
    """

    def __init__(
        self,
        mesh: Mesh,
        folder: Path,
        index: Index,
        found: Sequence[Piece],
        keep: int | None,
        *,
        durable: bool,
        staging: Staging | None = None,
        error: Exception | None = None,
    ) -> None:
        self.rank, self.ranks, self._durable = mesh.rank, mesh.size(), durable
        self.folder, self.index, self.keep = folder, index, keep
        self.staged, self.written, self.committed = Future[Any](), Future[None](), Future[None]()
        self.synced, self.settled = Future[None](), Future[None]()
        self.given_up = threading.Event()
        self._staging, self._found = staging, list(found)
        self._later: list[tuple[torch.Tensor, Piece]] = []
        if staging is not None:
            self._found, self._later = staging.begin(found)
        # one that is gathered for its uses counts down while it is, and never up but by a change
        self._versions = [(piece, piece.values._version) for _, piece in self._later]
        self._changed = ""
        self._lock, self._error = threading.Lock(), error
        self._file: TensorFile | None = None
        self._final: Path | None = None
        self._same = 0  # that folder, whatever its name
        self._thread: threading.Thread | None = None

    def begin(self, *, apart: bool) -> None:
        """Let a thread do what is left; ``apart``: that is all."""

        self.pending = (self.written if apart else self.synced), self.settled

        def run() -> None:
            if apart:
                self._do(self.staged, self._stage)
                self.write()
                self.commit()
            self._do(self.synced, self._sync)
            self._do(self.settled, self._settle)

        self._thread = threading.Thread(target=run, name="espalier-checkpoint")
        self._thread.start()

    def write(self) -> None:
        """Write this rank's file."""
        self._do(self.written, self._write)

    def commit(self) -> None:
        """On the first rank, wait for the others, and make a checkpoint of it."""
        self._do(self.committed, self._commit)

    def wait_staged(self) -> None:
        """Until updates may change what is saved: for work done from now on."""
        if self._staging is None or self.staged.exception() is not None:
            return  # it is told with what was written
        self._check()
        event = self.staged.result()
        if event is not None:
            torch.cuda.current_stream().wait_event(event)

    def give_up(self) -> None:
        """What was done for it is undone."""
        self.given_up.set()
        if self._thread is not None:
            self._thread.join()
        if self._file is not None:
            self._file.close(last=False)
        if self.rank == 0:
            withdraw(self.folder, there=self._final is not None)

    # ---- what the thread does

    def _do(self, done: Future[Any], work: Callable[[], Any]) -> None:
        try:
            done.set_result(work())
        except OSError as error:
            done.set_exception(CheckpointError(cannot(f"{self.folder} could not be written", error)))
        except BaseException as error:
            done.set_exception(error)

    def _stage(self) -> Any:
        assert self._staging is not None
        event = self._staging.fill(self._later)
        if event is None:
            self._check()
        return event

    def _check(self) -> None:
        """See that nobody has written to what was to be copied; once, before an update does."""
        with self._lock:
            versions, self._versions = self._versions, []
            changed = [piece.name for piece, version in versions if piece.values._version > version]
            self._changed = self._changed or ", ".join(changed[:3])

    def _write(self) -> None:
        if self._error is not None:
            raise self._error
        if self._staging is not None:
            event = self.staged.result()
            if event is not None:
                event.synchronize()
            self._check()
            self._later = []
            if self._changed:
                raise CheckpointError(
                    f"{self._changed} was written to while an asynchronous save copied it, so step "
                    f"{self.index.step} was not saved. Call engine.wait_staged() before you write to "
                    "parameters or optimizer states yourself."
                )
        if self.rank == 0:
            prepare(self.folder)
        else:
            self.folder.mkdir(parents=True, exist_ok=True)
        self._file = file = TensorFile(self.folder / f"__{self.rank}_0.distcp", push=self._durable)
        try:
            for piece in self._found:
                self.index.tensors[piece.name].boxes.append(file.write(piece))
        except BaseException:
            file.close(last=False)
            raise
        if self._durable:
            file.close()
        self._found = []
        self.index.files[file.path.name] = file.size
        if self.rank != 0:
            self.index.tensors = {name: e for name, e in self.index.tensors.items() if e.boxes}
            write_file(self.folder / _part(self.rank), self.index.to_json(), last=False)

    def _commit(self) -> None:
        if self.rank == 0:
            self.written.result()
            self._same = self.folder.stat().st_ino
            self._of_others(self.folder, _part, self._merge)
            self.index.check_whole()
            self._final = commit(self.folder, self.index, last=self._durable)

    def _merge(self, part: Path) -> None:
        self.index.merge(Index.from_json(part.read_bytes(), str(part)))

    def _sync(self) -> None:
        self.written.result()
        if not self._durable:
            assert self._file is not None
            self._file.close()
            if self.rank != 0:
                with suppress(FileNotFoundError):  # somebody has taken it away already
                    write_file(final_of(self.folder) / self._synced(self.rank), b"", last=False)

    def _settle(self) -> None:
        if self.rank == 0:
            self.committed.result()
            self.synced.result()
            assert self._final is not None
            try:
                if not self._durable:
                    self._of_others(self._final, self._synced, lambda part: None)
                    settle(self._final)
            except FileNotFoundError:
                if self._final.exists() and self._final.stat().st_ino == self._same:
                    raise
                return  # somebody has taken it away already, or put another in its place
            tidy(self._final, self.keep)

    def _synced(self, rank: int) -> str:
        return f"synced-{self.folder.name.rpartition('-')[2]}-{rank}"

    def _of_others(self, folder: Path, name: Callable[[int], str], take: Callable[[Path], None]) -> None:
        """Wait for a file of each of the others, take it and remove it."""
        missing = deque(range(1, self.ranks))
        since = time.monotonic()
        while missing:
            part = folder / name(missing[0])
            if part.exists():
                take(part)
                part.unlink()
                missing.popleft()
                since = time.monotonic()
                continue
            if folder.stat().st_ino != self._same:
                raise FileNotFoundError(errno.ENOENT, "another is in its place", str(folder))
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


def _part(rank: int) -> str:
    return f"part-{rank}.json"


__all__ = ["PATIENCE", "Staging", "Work"]
