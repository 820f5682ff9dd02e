"""Where weights come from: files of any known format, as names, shapes and boxes that can be read.

Nothing is read but what is asked for: a rank reads the boxes that it holds.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from espalier.checkpoint.pickles import FormatError, Record, read_metadata, read_value, told
from espalier.layout.regions import Box, overlap
from espalier.trees import named_leaves

INDEX = ".safetensors.index.json"
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "BOOL": torch.bool,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
"""The dtypes of safetensors, by their names there."""


class Entry(NamedTuple):
    """What is known of a tensor before it is read."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Of all of it."""
        return math.prod(self.shape) * self.dtype.itemsize

    def cast(self, dtype: torch.dtype | None) -> Entry:
        """The same in another dtype, if it is of floats and there is one."""
        return self if dtype is None or not self.dtype.is_floating_point else Entry(self.shape, dtype)


class Source(ABC):
    """Tensors by name, of which boxes can be read, and plain values by name.

    Names of what was nested are joined by dots, as ``torch.distributed.checkpoint`` does.

    Attributes:
        path: of the file or folder.
        entries: what there is.
        values: what is no tensor.
        trees: first parts of names that stand for a nested dict.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries: dict[str, Entry] = {}
        self.values: Mapping[str, Any] = {}
        self.trees: frozenset[str] = frozenset()

    def read(self, name: str, box: Box | None = None) -> torch.Tensor:
        """A box of a tensor, on the CPU; by default all of it.

        Raises:
            FormatError: the file does not hold what it said.
        """
        entry = self.entries[name]
        box = box if box is not None else Box((0,) * len(entry.shape), entry.shape)
        if 0 in box.sizes:
            return torch.empty(box.sizes, dtype=entry.dtype)
        found = self._read(name, box)
        if tuple(found.shape) != tuple(box.sizes) or found.dtype is not entry.dtype:
            raise FormatError(
                f"{self.path}: {name} should be {entry.dtype} of the shape {list(box.sizes)} there, and is "
                f"{found.dtype} of {list(found.shape)}: the file is damaged. Use another copy."
            )
        return found

    def fill(self, name: str, local: torch.Tensor, box: Box) -> None:
        """Read what a rank holds of a tensor: its box, into ``local``, which has another dtype perhaps.

        Raises:
            FormatError: see :meth:`read`.
        """
        local.copy_(self.read(name, box))

    def under(self, prefix: str) -> dict[str, Entry]:
        """The tensors whose names begin so, by the rest of their names."""
        return {n.removeprefix(prefix): entry for n, entry in self.entries.items() if n.startswith(prefix)}

    def same(self, name: str) -> Any:
        """What is equal for names of one and the same tensor."""
        return name

    @abstractmethod
    def _read(self, name: str, box: Box) -> torch.Tensor: ...


def open_source(path: str | Path) -> Source:
    """The source at a path: a file of safetensors or of ``torch.save``, or a folder of one of these, sharded
    or not, or of ``torch.distributed.checkpoint``.

    Raises:
        FormatError: there is none, or it cannot be read.
    """
    path = Path(path)
    if not path.exists():
        raise FormatError(f"{path} does not exist. Give a file or folder with weights.")
    if path.is_dir():
        return _folder(path)
    if path.name.endswith(".index.json"):
        return _indexed(path)
    return _file(path)


def _folder(path: Path) -> Source:
    if (path / ".metadata").is_file():
        return Distributed(path)
    for ending in (INDEX, ".bin.index.json"):
        if found := sorted(path.glob(f"*{ending}")):
            return _indexed(_only(found, path))
    for pattern in ("*.safetensors", "*.pt", "*.pth", "*.bin", "*.ckpt"):
        if found := sorted(x for x in path.glob(pattern) if x.is_file()):
            return _file(_only(found, path))
    raise FormatError(
        f"{path} holds no weights: expected .metadata of a distributed checkpoint, *.safetensors (with "
        "*.safetensors.index.json, if there are several), or a file of torch.save (*.pt, *.pth, *.bin)."
    )


def _only(found: list[Path], path: Path) -> Path:
    if len(found) > 1:
        names = ", ".join(x.name for x in found[:4])
        raise FormatError(f"{path} holds {len(found)} of a kind ({names}): give the path of one of them.")
    return found[0]


def _file(path: Path) -> Source:
    if not path.is_file():
        raise FormatError(f"{path} is no file. Give a file or folder with weights.")
    with told(path, "a file"), path.open("rb") as file:
        start = file.read(9)
    if path.suffix == ".safetensors" or start[8:9] == b"{":
        return Safetensors(path)
    return TorchFile(path)


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


class Safetensors(Source):
    """One file of safetensors."""

    def __init__(self, path: Path) -> None:
        from safetensors import safe_open

        super().__init__(path)
        with told(path, "safetensors"):
            self._file = safe_open(path, framework="pt")
            for name in self._file.keys():  # noqa: SIM118 - not a mapping
                piece = self._file.get_slice(name)
                dtype = piece.get_dtype()
                if dtype not in DTYPES:
                    raise FormatError(
                        f"{path}: {name} is of the dtype {dtype}, which is unknown. Save it in another."
                    )
                self.entries[name] = Entry(tuple(piece.get_shape()), DTYPES[dtype])

    def _read(self, name: str, box: Box) -> torch.Tensor:
        with told(self.path, "safetensors"):
            if not box.sizes:
                found: torch.Tensor = self._file.get_tensor(name)
                return found
            piece: torch.Tensor = self._file.get_slice(name)[box.slices]
            return piece


class TorchFile(Source):
    """One file of ``torch.save``: tensors in dicts and lists, mapped rather than loaded."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        with told(path, "what torch.save writes"):
            try:
                loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            except RuntimeError as error:
                if "mmap" not in str(error):  # files of before torch 1.6 cannot be mapped
                    raise
                loaded = torch.load(path, map_location="cpu", weights_only=True)
        if not isinstance(loaded, Mapping):
            raise FormatError(
                f"{path} holds a {type(loaded).__name__}, expected a state dict, or a dict of such. "
                "Give another file."
            )
        self._tensors: dict[str, torch.Tensor] = {}
        values: dict[str, Any] = {}
        for name, x in flat(loaded):
            if isinstance(x, torch.Tensor) and x.layout is torch.strided and not x.is_quantized:
                self._tensors[name] = x.detach()
                self.entries[name] = Entry(tuple(x.shape), x.dtype)
            else:
                values[name] = x
        self.values = values
        self.trees = frozenset(str(name) for name, x in loaded.items() if isinstance(x, Mapping))

    def _read(self, name: str, box: Box) -> torch.Tensor:
        return self._tensors[name][box.slices]

    def same(self, name: str) -> Any:
        x = self._tensors[name]
        return x.untyped_storage().data_ptr(), x.storage_offset(), x.stride(), x.shape


def flat(tree: Any) -> Iterator[tuple[str, Any]]:
    """The leaves of dicts, and of lists that have dicts or tensors in them, with their names."""
    return named_leaves(tree, _is_tree)


def _is_tree(x: Any) -> bool:
    held = (Mapping, list, torch.Tensor)
    return isinstance(x, Mapping) or (isinstance(x, list) and any(isinstance(y, held) for y in x))


class Sharded(Source):
    """Several files, and which names are in which."""

    def __init__(self, path: Path, files: Mapping[str, Path]) -> None:
        super().__init__(path)
        opened = {file: _file(file) for file in dict.fromkeys(files.values())}
        self._parts = {name: opened[file] for name, file in files.items()}
        for name, part in self._parts.items():
            if name not in part.entries:
                raise FormatError(
                    f"{path} says that {name} is in {part.path.name}, and it is not. Use another copy."
                )
            self.entries[name] = part.entries[name]

    def _read(self, name: str, box: Box) -> torch.Tensor:
        return self._parts[name].read(name, box)


def _indexed(path: Path) -> Sharded:
    with told(path, "the index of sharded weights"):
        index = json.loads(path.read_text("utf-8"))
        files = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(files, dict):
            raise FormatError(
                f"{path} has no weight_map, which says the file of each name. Use another copy."
            )
        return Sharded(path, {str(name): inside(path.parent, file) for name, file in files.items()})


class _Stored(NamedTuple):
    """Where a piece lies."""

    box: Box
    file: Path
    offset: int
    length: int


class Distributed(Source):
    """A folder of ``torch.distributed.checkpoint``: pieces of tensors in files, and ``.metadata``."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._pieces: dict[str, list[_Stored]] = {}
        metadata = path / ".metadata"
        record = read_metadata(metadata)
        with told(metadata, "the metadata of a distributed checkpoint"):
            self._take(record)

    def _take(self, record: Record) -> None:
        kept, stored = record.get("state_dict_metadata"), record.get("storage_data")
        if not isinstance(kept, dict) or not isinstance(stored, dict):
            raise TypeError("it does not say what is where")
        places: dict[tuple[str, Any], Record] = {}
        for index, info in stored.items():
            offset = index.get("offset")
            places[str(index.get("fqn")), offset if offset is None else numbers(offset)] = info
        values = {}
        for name, what in kept.items():
            if what.kind == "BytesStorageMetadata":
                values[str(name)] = self._stored(places[name, None], Box((), ()))
                continue
            dtype, shape = what.get("properties").state[0], numbers(what.get("size"))
            if not isinstance(dtype, torch.dtype):
                raise TypeError(f"{name} has no dtype")
            self.entries[str(name)] = Entry(shape, dtype)
            pieces = self._pieces[str(name)] = []
            for chunk in what.get("chunks"):
                box = Box(numbers(chunk.get("offsets")), numbers(chunk.get("sizes")))
                within = len(box.offsets) == len(box.sizes) == len(shape)
                if not within or any(o + n > size for o, n, size in zip(*box, shape, strict=True)):
                    raise ValueError(f"a piece of {name} is outside of it")
                if 0 not in box.sizes:
                    pieces.append(self._stored(places[name, box.offsets], box))
        self.values = _Values(values)
        paths = record.get("planner_data")
        if isinstance(paths, dict):
            self.trees = frozenset(str(p[0]) for p in paths.values() if isinstance(p, tuple) and len(p) > 1)

    def same(self, name: str) -> Any:
        return tuple(self._pieces[name]) or name

    def _stored(self, info: Record, box: Box) -> _Stored:
        if info.get("transform_descriptors"):
            raise FormatError(
                f"{self.path} was written with extensions ({info.get('transform_descriptors')}), which are "
                "not read here. Save it without."
            )
        offset, length = numbers((info.get("offset"), info.get("length")))
        return _Stored(box, inside(self.path, info.get("relative_path")), offset, length)

    def _read(self, name: str, box: Box) -> torch.Tensor:
        out = torch.zeros(box.sizes, dtype=self.entries[name].dtype)
        missing = out.numel()
        for piece in self._pieces[name]:
            common = overlap(piece.box, box)
            if common is None:
                continue
            found = read_value(piece.file, piece.offset, piece.length)
            if not isinstance(found, torch.Tensor) or tuple(found.shape) != piece.box.sizes:
                raise FormatError(
                    f"{piece.file} does not hold the piece of {name} that .metadata says. Use another copy."
                )
            into = out[common.within(box)]
            into.copy_(found[common.within(piece.box)])
            missing -= into.numel()
        if missing:
            what = "in no file" if missing > 0 else "there twice"
            raise FormatError(
                f"{self.path}: {abs(missing):,} elements of {name} are {what}. Use another copy."
            )
        return out


class _Values(Mapping[str, Any]):
    """Plain values, read when asked for."""

    def __init__(self, stored: Mapping[str, _Stored]) -> None:
        self._stored = stored

    def __getitem__(self, name: str) -> Any:
        at = self._stored[name]
        return read_value(at.file, at.offset, at.length)

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)


def numbers(given: Any) -> tuple[int, ...]:
    """A tuple of sizes or offsets.

    Raises:
        TypeError: something else was found.
    """
    if not isinstance(given, tuple | list) or not all(type(n) is int and 0 <= n < 2**62 for n in given):
        raise TypeError(f"{given!r:.80} are no sizes")
    return tuple(given)


__all__ = ["DTYPES", "INDEX", "Entry", "Source", "flat", "inside", "numbers", "open_source"]
