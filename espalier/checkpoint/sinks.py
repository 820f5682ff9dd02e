"""Where weights go: files of safetensors and of ``torch.save``, written piece by piece.

A file is laid out first: what stands before and after the tensors, and where each will be. Then pieces of
tensors arrive in order, so that no more than one is in memory. Files get their names when they are whole.
"""

from __future__ import annotations

import json
import math
import os
import struct
import zipfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Self

import torch
from torch._subclasses import FakeTensorMode
from torch.serialization import skip_data

from espalier.checkpoint.frames import CENTRAL
from espalier.checkpoint.pickles import FormatError
from espalier.checkpoint.sources import DTYPES, INDEX, Entry, flat
from espalier.files import bytes_of, write_file
from espalier.layout.regions import Box

Read = Callable[[str, Box], torch.Tensor]
Write = Callable[[str, int, Box, torch.Tensor], None]

PIECE = 64 * 1024**2
"""Bytes of a tensor that are in memory at a time."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_CRC, _LENGTHS = 16, slice(10, 13)  # in an entry of an archive's directory
_LOCAL = 30  # bytes before the name that precedes a record


class Tie(NamedTuple):
    """Another name of a tensor that has one before."""

    name: str


class Target(ABC):
    """What weights are written to; it is there when the ``with`` block ends well."""

    @abstractmethod
    def write(self, name: str, start: int, box: Box, piece: torch.Tensor) -> None:
        """A box of a tensor, which begins at its byte ``start``; they come in order."""

    @abstractmethod
    def _commit(self) -> None:
        """All was written."""

    @abstractmethod
    def _clear(self) -> None:
        """Close files, and remove what is not to stay."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, *error: Any) -> None:
        try:
            if kind is None:
                self._commit()
        finally:
            self._clear()


class Sink(Target):
    """Files of safetensors and of ``torch.save``."""

    def __init__(self) -> None:
        self._places: dict[str, tuple[Path, int]] = {}
        self._files: dict[Path, BinaryIO] = {}
        self._sums: dict[Path, dict[int, int]] = {}  # by where a tensor begins
        self._texts: dict[Path, str] = {}

    def write(self, name: str, start: int, box: Box, piece: torch.Tensor) -> None:
        """See :meth:`Target.write`."""
        path, offset = self._places[name]
        data = bytes_of(piece)
        file = self._files[path]
        file.seek(offset + start)
        file.write(data)
        if path in self._sums:
            self._sums[path][offset] = zlib.crc32(data, self._sums[path][offset])

    def add_text(self, path: Path, text: str) -> None:
        """A small file, written when the others are whole."""
        self._texts[path] = text

    def add_safetensors(
        self, path: Path, entries: Mapping[str, Entry], metadata: Mapping[str, str] | None = None
    ) -> None:
        """A file of safetensors (header of JSON; format of huggingface/safetensors)."""
        header: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}
        at = 0
        for name, entry in entries.items():
            if entry.dtype not in _NAMES:
                raise FormatError(
                    f"{name} is of {entry.dtype}, which safetensors cannot hold: export another format."
                )
            header[name] = {
                "dtype": _NAMES[entry.dtype],
                "shape": list(entry.shape),
                "data_offsets": [at, at + entry.nbytes],
            }
            at += entry.nbytes
        text = json.dumps(header, separators=(",", ":")).encode("utf-8")
        text += b" " * (-len(text) % 8)
        file = self._create(path)
        file.write(struct.pack("<Q", len(text)) + text)
        for name in entries:
            self._places[name] = path, 8 + len(text) + header[name]["data_offsets"][0]
        file.truncate(8 + len(text) + at)

    def add_sharded(self, folder: Path, entries: Mapping[str, Entry], shard_bytes: int) -> None:
        """Files of safetensors of at most a size (or one tensor), and their index, as Hugging Face has it."""
        shards: list[dict[str, Entry]] = []
        room = 0
        for name, entry in entries.items():
            if not shards or (entry.nbytes > room and shards[-1]):
                shards.append({})
                room = shard_bytes
            shards[-1][name] = entry
            room -= entry.nbytes
        if len(shards) <= 1:
            self.add_safetensors(folder / "model.safetensors", entries)
            return
        files = {f"model-{i:05d}-of-{len(shards):05d}.safetensors": s for i, s in enumerate(shards, 1)}
        for file, shard in files.items():
            self.add_safetensors(folder / file, shard)
        total = {
            "total_parameters": sum(math.prod(e.shape) for e in entries.values()),
            "total_size": sum(e.nbytes for e in entries.values()),
        }
        index = {"metadata": total, "weight_map": {name: file for file, s in files.items() for name in s}}
        self.add_text(folder / f"model{INDEX}", json.dumps(index, indent=2, sort_keys=True) + "\n")

    def add_torch(self, path: Path, tree: Mapping[str, Any]) -> None:
        """A file as ``torch.save`` writes it.

        Args:
            tree: dicts and plain values, with an :class:`Entry` where a tensor is to be, and a :class:`Tie`
                where one is that has another name as well. Names are those of nested dicts, joined by dots.
        """
        named: dict[str, torch.Tensor] = {}

        def filled(x: Any, name: str) -> Any:
            if isinstance(x, Entry):
                named[name] = torch.empty(x.shape, dtype=x.dtype)
                return named[name]
            if isinstance(x, Tie):
                return named[x.name]
            if isinstance(x, Mapping):
                return {key: filled(value, f"{name}.{key}" if name else str(key)) for key, value in x.items()}
            return x

        with FakeTensorMode():
            given = filled(tree, "")
        self._create(path).close()
        with skip_data(materialize_fake_tensors=True):
            torch.save(given, partial(path))
        with FakeTensorMode():
            laid = torch.load(partial(path), weights_only=True)
        self._files[path] = partial(path).open("r+b")
        self._sums[path] = {}
        for name, x in flat(laid):
            if isinstance(x, torch.Tensor):
                offset = int(x.untyped_storage()._checkpoint_offset or 0)
                self._places[name] = path, offset
                self._sums[path][offset] = 0

    def _create(self, path: Path) -> BinaryIO:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = self._files[path] = partial(path).open("wb")
        return file

    def _clear(self) -> None:
        for path, file in self._files.items():
            file.close()
            with suppress(OSError):
                partial(path).unlink(missing_ok=True)

    def _commit(self) -> None:
        for path, file in self._files.items():
            if path in self._sums:
                _put_checksums(file, self._sums[path])
            file.flush()
            os.fsync(file.fileno())
        for path in self._files:
            os.replace(partial(path), path)
        for path, text in self._texts.items():
            write_file(path, text.encode())


def _put_checksums(file: BinaryIO, sums: Mapping[int, int]) -> None:
    """Put the checksums of records, by where their data begins, into an archive made before these."""
    with zipfile.ZipFile(file) as archive:
        at, records = archive.start_dir, archive.infolist()
    for record in records:
        file.seek(record.header_offset + _LOCAL - 4)
        data = record.header_offset + _LOCAL + sum(struct.unpack("<2H", file.read(4)))
        file.seek(at)
        entry = CENTRAL.unpack(file.read(CENTRAL.size))
        if data in sums:
            word = struct.pack("<I", sums[data])
            file.seek(at + _CRC)
            file.write(word)
            file.seek(data + record.file_size)
            if file.read(4) == b"PK\7\10":  # stands behind the data as well
                file.seek(data + record.file_size + 4)
                file.write(word)
        at += CENTRAL.size + sum(entry[_LENGTHS])


def partial(path: Path) -> Path:
    """The name of a file that is not whole yet."""
    return path.with_name(f".{path.name}.partial")


def pieces(entry: Entry, most: int = PIECE) -> Iterator[tuple[int, Box]]:
    """A tensor as boxes of at most so many bytes whose elements are contiguous, with where each begins.

    Yields:
        the first byte of a box in the tensor, and the box.
    """
    start = 0
    for box in Box((0,) * len(entry.shape), entry.shape).parts(most // entry.dtype.itemsize):
        yield start, box
        start += math.prod(box.sizes) * entry.dtype.itemsize


def stream(entries: Mapping[str, Entry], read: Read, write: Write, most: int = PIECE) -> None:
    """Read tensors piece by piece, and write them."""
    for name, entry in entries.items():
        for start, box in pieces(entry, most):
            write(name, start, box, read(name, box))


__all__ = ["PIECE", "Read", "Sink", "Target", "Tie", "Write", "pieces", "stream"]
