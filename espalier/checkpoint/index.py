"""What a checkpoint holds and where: an index in JSON, which alone is read when a checkpoint is loaded.

Values that are no tensors stand in it too, exactly: no code is run to read them.
"""

from __future__ import annotations

import argparse
import base64
import json
import math
import sys
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import torch

from espalier.layout.layout import Box
from espalier.texts import dtype_name


class FormatError(ValueError):
    """A file that cannot be read as what it should be; the message says which, why, and what to do."""


class CheckpointError(FormatError):
    """A checkpoint could not be written, read or found; the message says why and what to do."""


VERSION = 1


class TensorInfo(NamedTuple):
    """What is known of a tensor before it is read."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Of all of it."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{list(self.shape)}, {self.dtype}"

    def cast(self, dtype: torch.dtype | None) -> TensorInfo:
        """The same in another dtype, if it is of floats and there is one."""
        return self if dtype is None or not self.dtype.is_floating_point else TensorInfo(self.shape, dtype)


class StoredBox(NamedTuple):
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

    info: TensorInfo
    boxes: list[StoredBox] = field(default_factory=list)


@dataclass
class Index:
    """What a checkpoint holds.

    Attributes:
        step: optimizer steps done.
        plan: under which it was saved, in print and as a table.
        ranks: that saved it.
        tensors: by name.
        aliases: other names of some of them.
        values: all that is no tensor, by :func:`encode`.
        files: the bytes of each.
        runs: names of the run that saved it, last, and of those that it goes on from.
        whose: that run, in words.
    """

    step: int = 0
    plan: dict[str, Any] = field(default_factory=dict)
    ranks: int = 1
    tensors: dict[str, Boxes] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    files: dict[str, int] = field(default_factory=dict)
    runs: list[str] = field(default_factory=lambda: [""])  # nobody knows
    whose: str = ""

    @property
    def nbytes(self) -> int:
        """Of all values of tensors."""
        return sum(entry.info.nbytes for entry in self.tensors.values())

    def merge(self, other: Index) -> None:
        """Take what another rank wrote in.

        Raises:
            CheckpointError: the two speak of different tensors by one name.
        """
        for name, entry in other.tensors.items():
            boxes = self.tensors.setdefault(name, Boxes(entry.info))
            if boxes.info != entry.info:
                raise CheckpointError(f"{name} is {boxes.info} on some ranks, {entry.info} on others.")
            boxes.boxes += entry.boxes
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
            elements = sum(math.prod(stored.box.sizes) for stored in entry.boxes)
            size = math.prod(entry.info.shape)
            if elements != size:
                raise CheckpointError(
                    f"Of {name}, {list(entry.info.shape)}, {elements:,} elements are in the checkpoint "
                    f"instead of {size:,}."
                )

    # ---- as JSON

    def to_json(self) -> bytes:
        """The index as a file's content."""
        names = list(self.files)
        number = {name: i for i, name in enumerate(names)}
        tensors = {
            name: {
                "dtype": dtype_name(entry.info.dtype),
                "shape": entry.info.shape,
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
            "runs": self.runs,
            "whose": self.whose,
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
            runs, whose = [str(name) for name in said.get("runs") or [""]], str(said.get("whose", ""))
            return Index(step, plan, ranks, tensors, aliases, values, dict(files), runs, whose)
        except CheckpointError:
            raise
        except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
            raise CheckpointError(
                f"{where} is no index of a checkpoint: {type(error).__name__}: {error}. Use another one."
            ) from error


def _boxes(name: str, entry: Mapping[str, Any], files: Sequence[tuple[str, int]]) -> Boxes:
    """Where a tensor stands, by an index.

    Raises:
        ValueError: nowhere, or outside of itself.
    """
    boxes = Boxes(TensorInfo(numbers(entry["shape"]), _dtype(entry["dtype"])))
    for offsets, sizes, *at in entry["boxes"]:
        file, start, crc = numbers(at)
        box = Box(numbers(offsets), numbers(sizes))
        if any(o + n > size for o, n, size in zip(*box, boxes.info.shape, strict=True)):
            raise ValueError(f"a part of {name} is outside of it")
        boxes.boxes.append(StoredBox(box, files[file][0], start, crc))
    return boxes


def _merge_values(into: dict[str, Any], other: Mapping[str, Any]) -> None:
    for key, value in other.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge_values(into[key], value)
        else:
            into.setdefault(key, value)


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch has no dtype {name!r}")
    return dtype


def inside(folder: Path, name: Any) -> Path:
    """The file of that name in a folder, and nowhere else.

    Raises:
        FormatError: it would be outside.
    """
    plain = isinstance(name, str) and name not in ("", ".", "..") and not set(name) & set("/\\\0")
    if not plain:
        raise FormatError(
            f"{folder} refers to the file {name!r:.200}, which is no plain name of a file beside it. "
            "Files elsewhere are not read: use a checkpoint from a source that you trust."
        )
    return folder / name


def numbers(sizes: Any) -> tuple[int, ...]:
    """A tuple of sizes or offsets.

    Raises:
        TypeError: something else was found.
    """
    if not isinstance(sizes, tuple | list) or not all(type(n) is int and 0 <= n < 2**62 for n in sizes):
        raise TypeError(f"{sizes!r:.80} are no sizes")
    return tuple(sizes)


# ---- plain values

Take = Callable[[str, torch.Tensor], str]
Give = Callable[[str], torch.Tensor]


def encode(value: Any, at: str, tensor: Take) -> Any:
    """What JSON can say of a value.

    Args:
        at: where it stands, for errors and the names of tensors.
        tensor: takes a tensor in it and the name of its place, which others may have too; gives the one by
            which it will be known.

    Raises:
        ValueError: it, or something in it, is none of the plain values.
    """
    if value is None or type(value) in (bool, str, int):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if isinstance(value, torch.Tensor):
        return {"$tensor": tensor(at, value)}
    if isinstance(value, tuple | list | deque):
        items = [encode(x, f"{at}.{i}", tensor) for i, x in enumerate(value)]
        if isinstance(value, list):
            return items
        if isinstance(value, tuple):
            return {"$tuple": items}
        return {"$deque": items} if value.maxlen is None else {"$window": [value.maxlen, items]}
    if isinstance(value, Mapping):
        return _encode_mapping(value, at, tensor)
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, complex):
        return {"$complex": [repr(value.real), repr(value.imag)]}
    if isinstance(value, torch.dtype):
        return {"$dtype": dtype_name(value)}
    if isinstance(value, torch.device):
        return {"$device": str(value)}
    if isinstance(value, argparse.Namespace):
        return {"$namespace": _encode_mapping(vars(value), at, tensor)}
    if isinstance(value, PurePath):
        return {"$path": str(value)}
    if isinstance(value, set | frozenset):
        return {"$set": [encode(x, at, tensor) for x in sorted(value, key=repr)]}
    if hasattr(value, "item") and getattr(value, "shape", None) == ():  # a number of numpy's
        return encode(value.item(), at, tensor)
    if _is_array(value):
        with suppress(TypeError, ValueError):  # of texts or objects, say
            return {"$array": tensor(at, torch.from_numpy(value.copy()))}
    for kind in (bool, int, float, str):
        if isinstance(value, kind):  # an enum's member, say
            return encode(kind(value), at, tensor)
    raise ValueError(
        f"{at} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be saved. Give "
        "numbers, strings, paths, tensors, arrays, or lists, tuples, sets, dicts and Namespaces of them, or "
        "an object with state_dict()."
    )


def _is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")  # where nobody has loaded it, none is there
    return numpy is not None and type(value) is numpy.ndarray


def _encode_mapping(value: Mapping[Any, Any], at: str, tensor: Take) -> Any:
    plain = all(type(key) is str and not key.startswith("$") for key in value)
    kind = (
        "$counter" if isinstance(value, Counter) else "$ordered" if isinstance(value, OrderedDict) else None
    )
    if plain and kind is None:
        return {key: encode(x, f"{at}.{key}", tensor) for key, x in value.items()}
    pairs = [[encode(k, f"{at}.{k}", tensor), encode(x, f"{at}.{k}", tensor)] for k, x in value.items()]
    return {kind or "$dict": pairs}


def decode(value: Any, tensor: Give) -> Any:
    """The value again.

    Raises:
        ValueError: there is no such kind of value.
    """
    if isinstance(value, list):
        return [decode(x, tensor) for x in value]
    if not isinstance(value, dict):
        return value
    if len(value) != 1 or not next(iter(value)).startswith("$"):
        return {key: decode(x, tensor) for key, x in value.items()}
    ((kind, content),) = value.items()
    if kind == "$float":
        return float(content)
    if kind == "$tensor":
        return tensor(content)
    if kind == "$bytes":
        return base64.b64decode(content)
    if kind == "$complex":
        return complex(float(content[0]), float(content[1]))
    if kind == "$dtype":
        return _dtype(content)
    if kind == "$device":
        return torch.device(content)
    if kind == "$namespace":
        return argparse.Namespace(**decode(content, tensor))
    if kind == "$path":
        return Path(content)
    if kind == "$set":
        return {decode(x, tensor) for x in content}
    if kind == "$array":
        return tensor(content).numpy()
    if kind in ("$tuple", "$deque"):
        items = [decode(x, tensor) for x in content]
        return tuple(items) if kind == "$tuple" else deque(items)
    if kind == "$window":
        return deque((decode(x, tensor) for x in content[1]), maxlen=content[0])
    if kind in ("$dict", "$ordered", "$counter"):
        pairs = {decode(k, tensor): decode(x, tensor) for k, x in content}
        return {"$dict": dict, "$ordered": OrderedDict, "$counter": Counter}[kind](pairs)
    raise ValueError(f"A value of the kind {kind!r} is not known; the checkpoint is of a later version.")
