"""Saving: each rank writes its part to a file of its own, and the first makes a checkpoint of them all.

Each box of a tensor is written once, by one of the ranks that hold it, all about as much. Ranks tell one
another through the folder that their part is there: a thread does this while the program trains, so it takes
part in no collective. How it went the ranks agree on: at once, or in :meth:`Saver.wait`.
"""

from __future__ import annotations

import atexit
import errno
import json
import math
import os
import secrets
import socket
import sys
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from espalier.checkpoint.folder import (
    Committed,
    cannot,
    commit,
    final_of,
    hidden,
    prepare,
    settle,
    tidy,
    withdraw,
)
from espalier.checkpoint.index import Boxes, CheckpointError, Index, TensorInfo
from espalier.checkpoint.tensor_file import LARGEST, TensorFile
from espalier.comm.control import agree, any_says, gather_objects
from espalier.device import current_stream, host_buffer, new_stream, on, wait_for
from espalier.files import bytes_of, write_file
from espalier.layout import Layout, chunk_bounds, local_box
from espalier.layout.layout import Box
from espalier.mesh import Mesh
from espalier.tensor.observers import tell
from espalier.texts import few, whole
from espalier.torch_private import version_of


class Saver:
    """Saves the trees of one mesh, one after the other.

    Args:
        mesh: of the ranks that save; all of them call each method but :meth:`wait_staged`.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self._staging: Staging | None = None
        self._work: SaveWork | None = None
        self._token, self._count, self._whose = "", 0, ""

    def save(
        self,
        directory: Path,
        give: Callable[[], tuple[Index, Mapping[str, Lying]]],
        *,
        keep: int | None = None,
        asynchronous: bool = False,
        durable: bool = False,
    ) -> Path:
        """Write a checkpoint.

        Args:
            directory: the folder in which its own is made.
            give: gives what is to be in it beside the tensors, and these, in one order on all ranks. What it
                raises on one rank is raised on all.
            keep: how many checkpoints are to be in the folder when this one outlives a crash.
            asynchronous: go on at once. What is ``steady`` must not change until :meth:`wait_staged`; how it
                ends is said by :meth:`wait`, or the next save.
            durable: return when the checkpoint outlives a crash of the machine, and let it not be there
                before. Else it comes to do so meanwhile, which :meth:`wait` waits for.

        Returns:
            the checkpoint's folder.

        Raises:
            CheckpointError: on all ranks, if it could not be written.
            ValueError: on all ranks, if ``keep`` is less than 1.
        """
        self.wait()
        mesh = self.mesh
        error: Exception | None = None
        index, own_boxes, sums = Index(), list[OwnBox](), dict[str, int | None]()
        try:
            index, tree = give()
            own_boxes, sums = boxes_to_write(tree), _sums_beside(index, tree)
        except Exception as met:
            error = met  # others are not to wait for this rank
        place = socket.gethostname(), str(Path(directory).resolve())
        of_ranks = gather_objects((secrets.token_hex(4), keep, place, sums), mesh)
        token, keep, *_ = of_ranks[0]
        self._token = self._token or token
        self._whose = self._whose or _this_run()
        _see_some_stay(keep)
        _see_one_folder([place for _, _, place, _ in of_ranks])
        agree(error, mesh, range(mesh.ndim))
        _see_what_differs([sums for *_, sums in of_ranks])
        self._count += 1
        index.ranks, index.whose = mesh.size(), self._whose
        index.runs = [*(name for name in index.runs if name != self._token), self._token]
        folder = hidden(directory, index.step, f"{self._token}{self._count}")
        if asynchronous:
            self._staging = self._staging or Staging(mesh)
            staging, durable = self._staging, True
        else:
            staging = None
        work = SaveWork(mesh, folder, index, own_boxes, keep, durable=durable, staging=staging)
        if not asynchronous:
            work.write()
            self._see(work, work.written)
            work.commit()
            self._see(work, work.committed)
            _tell_aside(work)
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
            atexit.unregister(work.tell)
            self._see(work, *work.pending)
            _tell_aside(work)

    def _see(self, work: SaveWork, *done: Future[None]) -> None:
        """Raise on all ranks what one of them has met, and undo the checkpoint."""
        for each in done:
            error = _error_of(each)
            try:
                failed = any_says(error is not None, self.mesh)
            except BaseException:  # a rank has gone, maybe after all was written: what is whole stays
                work.give_up(undo=False)
                raise
            if failed:
                try:
                    agree(error, self.mesh, range(self.mesh.ndim))
                except Exception as met:
                    work.give_up(undo=True)
                    raise CheckpointError(str(met)) from met


def _this_run() -> str:
    return f"begun {time.strftime('%Y-%m-%d %H:%M:%S')}, process {os.getpid()} on {socket.gethostname()}"


def _tell_aside(work: SaveWork) -> None:
    """Warn, once, of another run's checkpoint that was in the place of this one."""
    if words := work.aside_in_words():
        tell(words)


def _see_some_stay(keep: int | None) -> None:
    """See that the checkpoint that is about to be written is not taken away at once.

    Raises:
        ValueError: it would be.
    """
    if keep is not None and whole("keep", keep, least=-math.inf) < 1:
        raise ValueError(
            f"keep = {keep}: so many checkpoints would stay in the folder, not even this one. Give 1 or "
            "more, or None, which keeps all."
        )


def _see_one_folder(places: Sequence[Sequence[str]]) -> None:
    """See that the ranks of a host save to one folder: else each would wait for the others' parts in its own.

    Raises:
        CheckpointError: they don't; on all ranks.
    """
    of_host: dict[str, str] = {}
    for host, folder in places:
        if (other := of_host.setdefault(host, folder)) != folder:
            raise CheckpointError(
                f"Ranks save one checkpoint to several folders, {other} and {folder}. Give the same on all "
                "ranks: a name with the time, or with a random part, is to be made by one rank and told."
            )


_SMALL = 1 << 16  # bytes of a tensor that is summed up
_FEW = 1000  # values


def _sums_beside(index: Index, tree: Mapping[str, Lying]) -> dict[str, int | None]:
    """Checksums of what is saved beside the model, by where it stands; the names of tensors end in $.

    None: of a tensor that is large, or not the same on all ranks anyway.
    """
    sums: dict[str, int | None] = {}

    def add(at: str, value: Any) -> None:
        if isinstance(value, dict) and not any(key.startswith("$") for key in value):
            for key, x in value.items():
                add(f"{at}.{key}", x)
        elif len(sums) < _FEW:
            sums[at] = zlib.crc32(json.dumps(value).encode())

    add("extra", index.values.get("extra", {}))
    for name, (x, layout, _) in tree.items():
        if name.startswith("extra."):
            alike = layout.mesh.is_member and not layout.order and x.device.type == "cpu"
            sums[f"{name}$"] = zlib.crc32(bytes_of(x)) if alike and x.nbytes <= _SMALL else None
    return sums


def _see_what_differs(of_ranks: Sequence[Mapping[str, int | None]]) -> None:
    """Warn of what ranks say differently under one name: one of them is written.

    Raises:
        ValueError: some have tensors that others don't; on all ranks.
    """
    given: dict[str, set[int | None]] = {}
    for sums in of_ranks:
        for at, crc in sums.items():
            given.setdefault(at, set()).add(crc)
    apart = [at for at, crcs in given.items() if len(crcs - {None}) > 1]
    alone = [at for at in given if at.endswith("$") and not all(at in sums for sums in of_ranks)]
    advice = "Gather what each rank has, and give it on all (torch.distributed.all_gather_object)."
    if alone:
        raise ValueError(f"engine.save: some ranks alone give the tensor {_plain_name(alone[0])!r}. {advice}")
    if apart:
        names = few([*map(_plain_name, sorted(apart))])
        words = (
            f"engine.save: ranks give {names} different values, and one of them is saved for all. {advice}"
        )
        tell(words)


def _plain_name(at: str) -> str:
    return at.removeprefix("extra.").removesuffix("$")


def index_of(tree: Mapping[str, Lying]) -> dict[str, Boxes]:
    """The tensors of a tree, without boxes yet."""
    return {
        name: Boxes(TensorInfo(tuple(layout.shape), local.dtype)) for name, (local, layout, _) in tree.items()
    }


def _error_of(future: Future[Any]) -> Exception | None:
    error = future.exception()
    if error is not None and not isinstance(error, Exception):
        raise error
    return error


# ---- what one rank does

_POLL = 0.002  # seconds between two looks for the parts of others
PATIENCE = 600.0  # seconds without anything new from others
_AT_THE_END = 20.0  # the same, when this process's program has ended


class Staging:
    """Copies of boxes in the host's memory, in buffers that are used again.

    Attributes:
        side: a stream of its own; None on a CPU.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.device = mesh.device()
        self.side = new_stream(self.device)
        self._buffers: dict[str, torch.Tensor] = {}

    def begin(self, own_boxes: Sequence[OwnBox]) -> tuple[list[OwnBox], list[tuple[torch.Tensor, OwnBox]]]:
        """Copy what may change at any time.

        Returns:
            the pieces as copies, and of those that are still to be filled the buffer and what goes into it.
        """
        out, later, buffers = [], [], {}
        pin = self.side is not None
        for piece in own_boxes:
            key = f"{piece.name} {piece.box.offsets}"
            buffer = self._buffers.get(key)
            if buffer is None or (buffer.shape, buffer.dtype) != (piece.values.shape, piece.values.dtype):
                buffer = host_buffer(piece.values.shape, piece.values.dtype, pin=pin)
            buffers[key] = buffer
            out.append(piece._replace(values=buffer))
            if piece.steady:
                later.append((buffer, piece))
            else:
                buffer.copy_(piece.values, non_blocking=pin)
        self._buffers = buffers
        if self.side is not None:
            self.side.wait_stream(current_stream(self.device))
        return out, later

    def fill(self, later: Sequence[tuple[torch.Tensor, OwnBox]]) -> Any:
        """Start to fill buffers; gives the event after which they, and all copies before, are there."""
        pin = self.side is not None
        with on(self.side):
            for buffer, piece in later:
                buffer.copy_(piece.values, non_blocking=pin)
        return None if self.side is None else self.side.record_event()


class SaveWork:
    """What one rank does for one checkpoint.

    Attributes:
        staged: when what updates change has been copied, or, by a stream, an event of which it has.
        written: when this rank's file is.
        committed: on the first rank, when the checkpoint is there; on others with ``written``.
        synced: when this rank's file outlives a crash of the machine.
        settled: on the first rank, when the checkpoint does, and the oldest have gone.
        pending: of these what the ranks are still to agree on.
        given_up: set when another rank has failed.

    Args:
        durable: let nothing be there before it outlives a crash of the machine.
        staging: copies the boxes first; None: they are as they stay.
    """

    def __init__(
        self,
        mesh: Mesh,
        folder: Path,
        index: Index,
        own_boxes: Sequence[OwnBox],
        keep: int | None,
        *,
        durable: bool,
        staging: Staging | None = None,
    ) -> None:
        self.rank, self.ranks, self._durable = mesh.rank, mesh.size(), durable
        self.folder, self.index, self.keep = folder, index, keep
        self.staged, self.written, self.committed = Future[Any](), Future[None](), Future[None]()
        self.synced, self.settled = Future[None](), Future[None]()
        self.given_up = threading.Event()
        self._staging, self._pieces = staging, list(own_boxes)
        self._later: list[tuple[torch.Tensor, OwnBox]] = []
        self._lock = threading.Lock()
        self._error: Exception | None = None
        if staging is not None:
            try:
                self._pieces, self._later = staging.begin(own_boxes)
            except (MemoryError, RuntimeError) as error:  # others are not to wait for this rank
                self._error = error
        # one that is gathered for its uses counts down while it is, and never up but by a change
        self._versions = [(piece, version_of(piece.values)) for _, piece in self._later]
        self._changed = ""
        self._file: TensorFile | None = None
        self._done: Committed | None = None
        self._is_told = False
        self._held: int | None = None
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
        atexit.register(self.tell)  # threads have ended by then

    def tell(self) -> None:
        """Say what went wrong, where the program has ended without having asked; what is not whole goes."""
        errors = [error for done in self.pending if done.done() and (error := done.exception()) is not None]
        if errors:
            print(f"espalier: {errors[0]}", file=sys.stderr, flush=True)
            self.give_up(undo=False)
        elif words := self.aside_in_words():
            print(f"espalier: {words}", file=sys.stderr, flush=True)

    def aside_in_words(self) -> str:
        """What became of another run's checkpoint of this step, once; empty where there was none."""
        if self._done is None or self._done.aside is None or self._is_told:
            return ""
        self._is_told = True
        final, aside, whose = self._done
        return (
            f"{final} was of another run ({whose or 'it does not say which'}), from which this one does not "
            f"go on. It stands in {aside} now. Let each run, and each engine, save to a folder of its own: "
            f"engine.load of {final.parent} takes what was saved last, whoever did. A run goes on from "
            "another, and takes its place, after engine.load."
        )

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
        wait_for(self.staged.result(), self._staging.device)

    def give_up(self, *, undo: bool) -> None:
        """What is not a checkpoint yet does not become one; ``undo``: what is one is none any more."""
        self.given_up.set()
        if self._thread is not None:
            self._thread.join()
        if self._file is not None:
            self._file.close(last=False)
        self._let_go()
        if self.rank == 0 and (undo or self._done is None):
            done = self._done
            withdraw(self.folder, there=done is not None, aside=None if done is None else done.aside)

    def _let_go(self) -> None:
        folder, self._held = self._held, None
        if folder is not None:
            os.close(folder)

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
            changed = [piece.name for piece, version in versions if version_of(piece.values) > version]
            self._changed = self._changed or few(changed)

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
        self._held = prepare(self.folder, first=self.rank == 0)
        self._file = file = TensorFile(self.folder / f"__{self.rank}_0.distcp", push=self._durable)
        try:
            for piece in self._pieces:
                self.index.tensors[piece.name].boxes.append(file.write(piece.box, piece.values))
        except BaseException:
            file.close(last=False)
            raise
        if self._durable:
            file.close()
        self._pieces = []
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
            self._done = commit(self.folder, self.index, last=self._durable)
        self._let_go()

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
            assert self._done is not None
            final = self._done.final
            try:
                if not self._durable:
                    self._of_others(final, self._synced, lambda part: None)
                    settle(final)
            except FileNotFoundError:
                if final.exists() and final.stat().st_ino == self._same:
                    raise
                return  # somebody has taken it away already, or put another in its place
            tidy(final, self.keep, self.index.runs)

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


# ---- who writes what

SHARED = 1 << 20  # bytes of a box from which on those that hold it write a part each


class Lying(NamedTuple):
    """A tensor, as this rank holds it.

    Attributes:
        local: what is here, plain; None where only the others' part is to be told.
        layout: how it lies.
        steady: whether nothing but updates changes it.
    """

    local: torch.Tensor
    layout: Layout
    steady: bool = False


class OwnBox(NamedTuple):
    """What this rank writes of a tensor: the values of a box of it."""

    name: str
    box: Box
    values: torch.Tensor
    steady: bool = False


class _HeldBox(NamedTuple):
    """What is here of tensors that lie alike: a box, as which of how many copies, among whom."""

    box: Box
    n: int
    here: int
    group: tuple[object, ...]
    first: bool


def boxes_to_write(tree: Mapping[str, Lying]) -> list[OwnBox]:
    """What this rank writes. All ranks have the tree in one order.

    Raises:
        ValueError: a tensor is Partial.
    """
    own_boxes = []
    written: dict[tuple[object, ...], list[int]] = {}  # bytes, of the ranks that hold the same
    places: dict[Layout, _HeldBox] = {}  # parameters share layouts with states
    for name, (local, layout, steady) in tree.items():
        if not layout.is_firm:
            raise ValueError(f"{name} is {layout!r}: sums that are still to be done cannot be saved.")
        if not layout.mesh.is_member:
            continue
        if layout not in places:
            first = not any(layout.mesh.coordinate[a] for a in layout.order)
            places[layout] = _HeldBox(local_box(layout), *_copies(layout), first)
        box, n, here, group, first = places[layout]
        size = math.prod(box.sizes) * local.element_size()
        share: Box | None = box
        if size >= SHARED and n > 1:
            share = _cut(box, n, here)
        else:
            loads = written.setdefault(group, [0] * n)
            least = loads.index(min(loads))
            loads[least] += size
            if least != here:
                share = None
        if share is not None and (size or first):
            for part in share.parts(LARGEST // local.element_size()):
                own_boxes.append(OwnBox(name, part, local[part.within(box)], steady))
    return own_boxes


def _copies(layout: Layout) -> tuple[int, int, tuple[object, ...]]:
    """How many ranks hold the same box, which of them this is, and what they have in common."""
    mesh = layout.mesh
    cut = set(layout.order)
    along = [a for a in range(mesh.ndim) if a not in cut and mesh.shape[a] > 1]
    return math.prod(mesh.shape[a] for a in along), mesh.place(along), (tuple(mesh.ranks), tuple(along))


def _cut(box: Box, n: int, index: int) -> Box | None:
    """Part ``index`` of n along the longest dim; None if that is too short."""
    dim = max(range(len(box.sizes)), key=lambda d: box.sizes[d])
    start, length = chunk_bounds(box.sizes[dim], n, index)
    return box.narrowed(dim, start, length) if length else None
