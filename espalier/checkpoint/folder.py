"""Folders of checkpoints: what is in one, which is the newest, how one comes and goes.

A checkpoint is made in a hidden folder, and renamed when it is whole: what bears the name of a step is
whole. It is taken away in the same manner, backwards.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import re
import secrets
import shutil
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from espalier.checkpoint.index import CheckpointError, Index
from espalier.checkpoint.tensor_file import damaged, frame_of
from espalier.files import hold, is_held, sync, write_file
from espalier.torch_private import storage_info

INDEX, SEAL, TORCH = "index.json", "whole.json", ".metadata"
_REPLACED = ".replaced"
_STEP = re.compile(r"step-(\d+)(\.replaced)?")
_OURS = re.compile(r"\.step-\d+\.(saving|leaving)-\w+")


def name_of(step: int) -> str:
    """The name of a step's checkpoint."""
    return f"step-{step:08}"


class Seal(NamedTuple):
    """What is written last.

    Attributes:
        crc, size: of the index.
        serial: one more than that of any checkpoint that was in the folder: a run that went back and on
            again has saved its newest last, whatever its step.
    """

    crc: int
    size: int
    serial: int

    @staticmethod
    def on(content: bytes, serial: int) -> Seal:
        """That of an index."""
        return Seal(zlib.crc32(content), len(content), serial)

    @staticmethod
    def read(path: Path) -> Seal | None:
        """That of a checkpoint; None if it has none that can be read."""
        try:
            fields = json.loads((path / SEAL).read_bytes())
            seal = Seal(*(int(fields[key]) for key in ("index", "bytes", "serial")))
            return seal if fields["check"] == seal._check() else None
        except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
            return None

    def to_json(self) -> bytes:
        """The content of its file."""
        fields = {"index": self.crc, "bytes": self.size, "serial": self.serial, "check": self._check()}
        return json.dumps(fields).encode()

    def _check(self) -> int:
        return zlib.crc32(repr(tuple(self)).encode())


def checkpoints(directory: str | os.PathLike[str]) -> list[Path]:
    """The checkpoints in a folder, the one that was saved last first, whole or not.

    When one was saved whose seal is damaged nobody knows: it comes first, so that who loads hears of it.
    """
    paths = []
    with os.scandir(directory) as entries:
        for entry in entries:
            match = _STEP.fullmatch(entry.name)
            if match and entry.is_dir():
                seal = Seal.read(Path(entry.path))
                serial = seal.serial if seal else math.inf
                paths.append((serial, int(match[1]), match[2] is None, Path(entry.path)))
    return [path for *_, path in sorted(paths, reverse=True)]


def open_index(path: Path) -> Index:
    """The index of a checkpoint whose files are there, and of the right sizes.

    Raises:
        CheckpointError: it is not whole.
    """
    try:
        content = (path / INDEX).read_bytes()
    except OSError as error:
        raise CheckpointError(
            f"{path} is no checkpoint: {INDEX}: {error.strerror}. Name a folder step-... that engine.save "
            "made, or the folder that it stands in."
        ) from error
    seal = Seal.read(path)
    if seal is None:
        raise CheckpointError(damaged(path / SEAL, "it cannot be read"))
    if seal != Seal.on(content, seal.serial):
        raise CheckpointError(damaged(path / INDEX, "it is not what was written"))
    index = Index.from_json(content, str(path / INDEX))
    for name, size in index.files.items():
        try:
            bytes_there = (path / name).stat().st_size
        except OSError as error:
            raise CheckpointError(damaged(path / name, str(error.strerror))) from error
        if bytes_there != size:
            raise CheckpointError(damaged(path / name, f"it has {bytes_there:,} bytes instead of {size:,}"))
    return index


def newest(directory: str | os.PathLike[str]) -> Path | None:
    """The whole checkpoint in a folder that was saved last; None if it has none, or does not exist.

    Whole: all that was written is there. Checksums of the values are looked at as these are loaded.
    """
    return next((path for path, index in _whole(directory)), None)


def _whole(directory: str | os.PathLike[str]) -> Iterator[tuple[Path, Index]]:
    if not Path(directory).is_dir():
        return
    for path in checkpoints(directory):
        try:
            yield path, open_index(path)
        except CheckpointError:
            continue


# ---- coming and going


def hidden(directory: Path, step: int, token: str) -> Path:
    """Where the checkpoint of a step is written; a token is used once."""
    return directory / f".{name_of(step)}.saving-{token}"


def _held(path: Path) -> int:
    while True:
        path.mkdir(parents=True, exist_ok=True)  # other ranks may have made it
        with suppress(FileNotFoundError):
            folder = hold(path)
            if path.exists() and os.path.samestat(os.fstat(folder), path.stat()):
                return folder
            os.close(folder)


def prepare(path: Path, *, first: bool) -> int:
    """Make the folder in which a checkpoint will be written; ``first``: remove what killed processes left of
    others.

    Returns:
        the folder, open: until it is closed, or this process ends, nobody takes it for such a one.

    Raises:
        CheckpointError: it cannot be made.
    """
    directory = path.parent
    try:
        folder = _held(path)
        for old in directory.iterdir() if first else ():
            if _OURS.fullmatch(old.name) and old != path:
                if not is_held(old):
                    _remove(old)
            elif old.name.endswith(_REPLACED) and _STEP.fullmatch(old.name):
                newer = old.with_name(old.name.removesuffix(_REPLACED))
                if not newer.exists():
                    old.rename(newer)
        return folder
    except OSError as error:
        raise CheckpointError(cannot(f"No checkpoint can be written to {directory}", error)) from error


def cannot(what: str, error: OSError) -> str:
    """The words of an error about a file."""
    return (
        f"{what}: {error.strerror}. Earlier checkpoints are as they were. Make space or name another folder."
    )


def final_of(path: Path) -> Path:
    """The name that a folder being written will have."""
    return path.with_name(path.name[1:].rpartition(".")[0])


class Committed(NamedTuple):
    """What became of a folder in which all was written.

    Attributes:
        final: the checkpoint.
        aside: where the one now stands that another run has saved of that step; None: there was none.
        whose: that run, in words.
    """

    final: Path
    aside: Path | None
    whose: str


def commit(path: Path, index: Index, *, last: bool) -> Committed:
    """Let a folder in which all was written be a checkpoint; ``last``: one that outlives a crash."""
    directory, final = path.parent, final_of(path)
    content = index.to_json()
    serials = [seal.serial for old in checkpoints(directory) if (seal := Seal.read(old))]
    write_file(path / TORCH, torch_metadata(index), last=last)
    write_file(path / INDEX, content, last=last)
    write_file(path / SEAL, Seal.on(content, max(serials, default=0) + 1).to_json(), last=last)
    if last:
        sync(path)
    replaced = final.with_name(final.name + _REPLACED)
    aside, whose = _set_aside(final, index, last=last)
    if final.exists() and not replaced.exists():
        final.rename(replaced)
    elif final.exists():
        _leave(final)
    path.rename(final)
    if last:
        sync(directory)
    return Committed(final, aside, whose)


def _set_aside(final: Path, index: Index, *, last: bool) -> tuple[Path | None, str]:
    """Where a checkpoint now stands whose place one takes that does not go on from it; and whose it is."""
    if not final.exists():
        return None, ""
    try:
        there = open_index(final)
    except CheckpointError:  # nobody can load it
        return None, ""
    if _is_of(there, index.runs):
        return None, ""
    folder = final.parent / f"of-{there.runs[-1] or 'unknown'}"
    folder.mkdir(exist_ok=True)
    aside = folder / final.name
    if aside.exists():
        _leave(aside)
    final.rename(aside)
    if last:
        sync(folder)
    return aside, there.whose


def _is_of(index: Index, runs: Sequence[str]) -> bool:
    """Whether one of these runs saved it."""
    return index.runs[-1] in runs


def settle(final: Path) -> None:
    """Let a checkpoint outlive a crash, whose ranks' files do."""
    for name in (TORCH, INDEX, SEAL):
        sync(final / name)
    sync(final)
    sync(final.parent)


def tidy(final: Path, keep: int | None, runs: Sequence[str]) -> None:
    """A checkpoint outlives a crash: remove what it replaces, and the oldest of its runs but ``keep``."""
    directory = final.parent
    replaced = [path for path in checkpoints(directory) if path.name.endswith(_REPLACED)]
    gone = [old for old in replaced if old.with_name(old.name.removesuffix(_REPLACED)).exists()]
    if keep is not None:
        gone += [old for old, of in _whole(directory) if old not in gone and _is_of(of, runs)][keep:]
    for old in gone:
        with suppress(OSError):  # what is to be kept is there
            _leave(old)


def withdraw(path: Path, *, there: bool, aside: Path | None) -> None:
    """Undo what was done for a checkpoint; ``there``: it has its name; ``aside``: where another is now."""
    final = final_of(path)
    shutil.rmtree(path, ignore_errors=True)
    with suppress(OSError):
        if there:
            _leave(final)
        replaced = final.with_name(final.name + _REPLACED)
        if replaced.exists() and not final.exists():
            replaced.rename(final)
        if aside is not None and not final.exists():
            aside.rename(final)


def _leave(path: Path) -> None:
    token = secrets.token_hex(4)
    hidden = path.with_name(f".{path.name.removesuffix(_REPLACED)}.leaving-{token}")
    path.rename(hidden)
    _remove(hidden)


def _remove(path: Path) -> None:
    """As far as that goes; of a link only itself."""
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


# ---- for torch's tools


def torch_metadata(index: Index, values: Mapping[str, tuple[str, int, int]] | None = None) -> bytes:
    """The content of torch's ``.metadata``, a pickle by which torch's tools find the tensors.

    Args:
        values: where those stand that torch's tools are to find: file, first byte, bytes.
    """
    described: dict[str, Any] = {}
    where: dict[MetadataIndex, Any] = {}
    paths = {}
    of = {**{name: name for name in index.tensors}, **index.aliases}
    for name, source in of.items():
        entry = index.tensors[source]
        chunks = []
        for stored in entry.boxes:
            offsets, sizes = torch.Size(stored.box.offsets), torch.Size(stored.box.sizes)
            chunks.append(ChunkStorageMetadata(offsets, sizes))
            frame = frame_of(entry.info.dtype, stored.box.sizes)
            size = frame.start + math.prod(sizes) * entry.info.dtype.itemsize + len(frame.tail)
            where[MetadataIndex(name, offsets)] = storage_info(stored.file, stored.start, size)
        properties = TensorProperties(dtype=entry.info.dtype)
        described[name] = TensorStorageMetadata(properties, torch.Size(entry.info.shape), chunks)
        paths[name] = _path(name)
    for name, (file, start, size) in (values or {}).items():
        described[name], paths[name] = BytesStorageMetadata(), _path(name)
        where[MetadataIndex(name)] = storage_info(file, start, size)
    meta = Metadata(described, planner_data=paths, storage_data=where, storage_meta=StorageMeta())
    if hasattr(meta, "version"):
        meta.version = "1.0.0"
    return pickle.dumps(meta)


def _path(name: str) -> tuple[str | int, ...]:
    """Where something stands in nested dicts and lists: those of the model and of ``get_state_dict``."""
    first, *rest = name.split(".", 1)
    if first == "optimizer" and rest:
        kind, _, inner = rest[0].partition(".")
        of, _, key = inner.rpartition(".")
        if kind in ("state", "param_groups") and of:
            return first, kind, int(of) if kind == "param_groups" and of.isdigit() else of, key
    return first, *rest
