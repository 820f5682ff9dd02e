"""What a checkpoint holds and where: our own index, in JSON, and the same for torch's tools.

Only the index is read when a checkpoint of ours is loaded. torch's ``.metadata`` is a pickle: it is written
so that ``torch.distributed.checkpoint`` and its converters can read the tensors.
"""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from espalier.checkpoint.errors import CheckpointError
from espalier.checkpoint.frames import frame_of
from espalier.checkpoint.sources import inside, numbers
from espalier.layout.regions import Box

VERSION = 1


class Stored(NamedTuple):
    """A box of a tensor in a file.

    Attributes:
        box: which one.
        file: its name in the checkpoint's folder.
        start: where its frame begins, bytes.
        crc: of its data.
    """

    box: Box
    file: str
    start: int
    crc: int


@dataclass
class Boxes:
    """Where a tensor stands: its boxes together are all of it, and none of them overlap."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    boxes: list[Stored] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Of its values."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass
class Index:
    """What a checkpoint holds.

    Attributes:
        step: optimizer steps done.
        plan: under which it was saved, in print and as a table.
        ranks: that saved it.
        tensors: by name.
        aliases: other names of some of them.
        values: all that is no tensor, encoded (:mod:`espalier.checkpoint.values`).
        files: the bytes of each.
    """

    step: int = 0
    plan: dict[str, Any] = field(default_factory=dict)
    ranks: int = 1
    tensors: dict[str, Boxes] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    files: dict[str, int] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Of all values of tensors."""
        return sum(entry.nbytes for entry in self.tensors.values())

    def merge(self, other: Index) -> None:
        """Take what another rank wrote in.

        Raises:
            CheckpointError: the two speak of different tensors by one name.
        """
        for name, entry in other.tensors.items():
            own = self.tensors.setdefault(name, Boxes(entry.dtype, entry.shape))
            if (own.dtype, own.shape) != (entry.dtype, entry.shape):
                raise CheckpointError(
                    f"{name} is {list(own.shape)}, {own.dtype} on some ranks, {list(entry.shape)}, "
                    f"{entry.dtype} on others."
                )
            own.boxes += entry.boxes
        self.files.update(other.files)
        _merge_values(self.values, other.values)

    def check_whole(self) -> None:
        """See that the boxes of each tensor are all of it, and that there is a tensor for each name.

        Raises:
            CheckpointError: parts are missing, or there twice.
        """
        if lost := [name for name, of in self.aliases.items() if of not in self.tensors]:
            raise CheckpointError(f"{lost[0]} is another name of a tensor that is not there.")
        for name, entry in self.tensors.items():
            found = sum(math.prod(stored.box.sizes) for stored in entry.boxes)
            if found != math.prod(entry.shape):
                raise CheckpointError(
                    f"Of {name}, {list(entry.shape)}, {found:,} elements are in the checkpoint instead of "
                    f"{math.prod(entry.shape):,}."
                )

    # ---- as JSON

    def to_json(self) -> bytes:
        """The index as a file's content."""
        names = list(self.files)
        number = {name: i for i, name in enumerate(names)}
        tensors = {
            name: {
                "dtype": str(entry.dtype).removeprefix("torch."),
                "shape": entry.shape,
                "boxes": [(*s.box, number[s.file], s.start, s.crc) for s in entry.boxes],
            }
            for name, entry in self.tensors.items()
        }
        said = {
            "format": "espalier",
            "version": VERSION,
            "step": self.step,
            "plan": self.plan,
            "ranks": self.ranks,
            "files": [(name, self.files[name]) for name in names],
            "values": self.values,
            "aliases": self.aliases,
            "tensors": tensors,
        }
        return json.dumps(said, separators=(",", ":")).encode()

    @staticmethod
    def from_json(text: bytes, where: str) -> Index:
        """Read what :meth:`to_json` gave.

        Raises:
            CheckpointError: it is nothing of the kind.
        """
        try:
            said = json.loads(text)
            if said["format"] != "espalier" or not 0 < said["version"] <= VERSION:
                raise CheckpointError(
                    f"{where} is of version {said['version']} of the format {said['format']!r}; this "
                    f"Espalier reads versions 1 to {VERSION} of 'espalier': use one that is as new."
                )
            folder = Path(where).parent
            files = [(inside(folder, name).name, numbers([size])[0]) for name, size in said["files"]]
            tensors = {name: _boxes(name, entry, files) for name, entry in said["tensors"].items()}
            aliases = {str(name): str(of) for name, of in said["aliases"].items()}
            step, ranks = numbers([said["step"], said["ranks"]])
            plan, values = dict(said["plan"]), dict(said["values"])
            return Index(step, plan, ranks, tensors, aliases, values, dict(files))
        except CheckpointError:
            raise
        except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
            raise CheckpointError(
                f"{where} is no index of a checkpoint: {type(error).__name__}: {error}. Use another one."
            ) from error

    # ---- for torch's tools

    def to_torch(self, values: Mapping[str, tuple[str, int, int]] | None = None) -> bytes:
        """The content of torch's ``.metadata``.

        Args:
            values: where those stand that torch's tools are to find: file, first byte, bytes.
        """
        described: dict[str, Any] = {}
        where: dict[MetadataIndex, _StorageInfo] = {}
        paths = {}
        of = {**{name: name for name in self.tensors}, **self.aliases}
        for name, source in of.items():
            entry = self.tensors[source]
            chunks = []
            for stored in entry.boxes:
                offsets, sizes = torch.Size(stored.box.offsets), torch.Size(stored.box.sizes)
                chunks.append(ChunkStorageMetadata(offsets, sizes))
                frame = frame_of(entry.dtype, stored.box.sizes)
                size = frame.start + math.prod(sizes) * entry.dtype.itemsize + len(frame.tail)
                where[MetadataIndex(name, offsets)] = _StorageInfo(stored.file, stored.start, size)
            properties = TensorProperties(dtype=entry.dtype)
            described[name] = TensorStorageMetadata(properties, torch.Size(entry.shape), chunks)
            paths[name] = _path(name)
        for name, (file, start, size) in (values or {}).items():
            described[name], paths[name] = BytesStorageMetadata(), _path(name)
            where[MetadataIndex(name)] = _StorageInfo(file, start, size)
        meta = Metadata(described, planner_data=paths, storage_data=where, storage_meta=StorageMeta())
        if hasattr(meta, "version"):
            meta.version = "1.0.0"
        return pickle.dumps(meta)


def _boxes(name: str, entry: Mapping[str, Any], files: Sequence[tuple[str, int]]) -> Boxes:
    """Where a tensor stands, by an index.

    Raises:
        ValueError: nowhere, or outside of itself.
    """
    found = Boxes(_dtype(entry["dtype"]), numbers(entry["shape"]))
    for offsets, sizes, *at in entry["boxes"]:
        file, start, crc = numbers(at)
        box = Box(numbers(offsets), numbers(sizes))
        if any(o + n > size for o, n, size in zip(*box, found.shape, strict=True)):
            raise ValueError(f"a part of {name} is outside of it")
        found.boxes.append(Stored(box, files[file][0], start, crc))
    return found


def _path(name: str) -> tuple[str | int, ...]:
    """Where something stands in nested dicts and lists: those of the model and of ``get_state_dict``."""
    first, *rest = name.split(".", 1)
    if first == "optimizer" and rest:
        kind, _, inner = rest[0].partition(".")
        of, _, key = inner.rpartition(".")
        if kind in ("state", "param_groups") and of:
            return first, kind, int(of) if kind == "param_groups" and of.isdigit() else of, key
    return first, *rest


def _merge_values(into: dict[str, Any], other: Mapping[str, Any]) -> None:
    for key, value in other.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge_values(into[key], value)
        else:
            into.setdefault(key, value)


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"torch has no dtype {name!r}")
    return found
