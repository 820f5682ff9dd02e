"""Where weights come from: files of any known format, as names, shapes and boxes that can be read.

Nothing is read but what is asked for: a rank reads the boxes that it holds, so that nobody ever holds more
than its own part and one box. What others pickled is read without executing any of it:
``torch.distributed.checkpoint`` pickles its metadata, and a pickle may call whatever it names. Here it is
given records without behaviour in place of the classes that such a file has, made anew for each file, and
nothing else. Values come from ``torch.load(weights_only=True)``.
"""

from __future__ import annotations

import errno
import io
import json
import os
import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from espalier.checkpoint.folder import INDEX, SEAL, TORCH, checkpoints, newest, open_index
from espalier.checkpoint.index import CheckpointError, FormatError, TensorInfo, decode, inside, numbers
from espalier.checkpoint.tensor_file import check, damaged, read
from espalier.checkpoint.zero_files import is_zero, read_zero, tagged
from espalier.layout.layout import Box, overlap
from espalier.tensor.observers import tell
from espalier.texts import few
from espalier.trees import named_leaves

SHARDS = ".safetensors.index.json"
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
TREES = ("model", "module", "state_dict", "model_state_dict")
"""Dicts that hold the weights in files of others."""


class TensorSource(ABC):
    """Tensors by name, of which boxes can be read, and plain values by name.

    Names of what was nested are joined by dots, as ``torch.distributed.checkpoint`` does.

    Attributes:
        path: of the file or folder.
        entries: what there is.
        values: what is no tensor.
        trees: first parts of names that stand for a nested dict.
        without: why its optimizer cannot be read, and what to do; empty if it can, or there is none.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.without = path, ""
        self.entries: dict[str, TensorInfo] = {}
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
        tensor = self._read(name, box)
        if tuple(tensor.shape) != tuple(box.sizes) or tensor.dtype is not entry.dtype:
            raise FormatError(
                f"{self.path}: {name} should be {entry.dtype} of the shape {list(box.sizes)} there, and is "
                f"{tensor.dtype} of {list(tensor.shape)}: the file is damaged. Use another copy."
            )
        return tensor

    def fill(self, name: str, local: torch.Tensor, box: Box) -> None:
        """Read what a rank holds of a tensor: its box, into ``local``, which has another dtype perhaps.

        Raises:
            FormatError: see :meth:`read`.
        """
        local.copy_(self.read(name, box))

    def under(self, prefix: str) -> dict[str, TensorInfo]:
        """The tensors whose names begin so, by the rest of their names."""
        return {n.removeprefix(prefix): entry for n, entry in self.entries.items() if n.startswith(prefix)}

    def same(self, name: str) -> Any:
        """What is equal for names of one and the same tensor."""
        return name

    @abstractmethod
    def _read(self, name: str, box: Box) -> torch.Tensor: ...


def open_any(path: str | os.PathLike[str]) -> TensorSource:
    """What stands at a path: a checkpoint of ours, the newest whole one of a folder of them, a file of
    safetensors or of ``torch.save``, or a folder of one of these, sharded or not, of
    ``torch.distributed.checkpoint``, or of DeepSpeed's checkpoints.

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


def _folder(path: Path) -> TensorSource:
    path = _iteration(path)
    if (path / SEAL).exists() or (path / INDEX).exists():
        return Checkpoint(path)
    if saved := checkpoints(path):
        first = newest(path) or saved[0]
        if first != saved[0]:
            words = f"{saved[0]} is damaged: {first} is taken (espalier checkpoint {path} lists them)."
            tell(words)
        return Checkpoint(first)  # which says what is wrong with it
    if (path / TORCH).is_file():
        return Distributed(path)
    if is_zero(tagged(path)):
        return Loaded(path, read_zero(tagged(path)))
    for ending in (SHARDS, ".bin.index.json"):
        if saved := sorted(path.glob(f"*{ending}")):
            return _indexed(_only(saved, path))
    for pattern in ("*.safetensors", "*.pt", "*.pth", "*.bin", "*.ckpt"):
        if saved := sorted(x for x in path.glob(pattern) if x.is_file()):
            return _file(_only(saved, path))
    raise FormatError(
        f"{path} holds no weights: expected .metadata of a distributed checkpoint, *.safetensors (with "
        "*.safetensors.index.json, if there are several), or a file of torch.save (*.pt, *.pth, *.bin)."
    )


def _iteration(path: Path) -> Path:
    """The folder that Megatron's tracker names; the folder itself if there is none."""
    tracker = path / "latest_checkpointed_iteration.txt"
    if not tracker.is_file():
        return path
    with reading(tracker, "Megatron's tracker"):
        said = tracker.read_text("utf-8").strip()
        return path / (said if said == "release" else f"iter_{int(said):07d}")


def _only(paths: list[Path], path: Path) -> Path:
    if len(paths) > 1:
        names = few([x.name for x in paths], 4)
        raise FormatError(f"{path} holds {len(paths)} of a kind ({names}): give the path of one of them.")
    return paths[0]


def _file(path: Path) -> TensorSource:
    if not path.is_file():
        raise FormatError(f"{path} is no file. Give a file or folder with weights.")
    with reading(path, "a file"), path.open("rb") as file:
        start = file.read(9)
    if path.suffix == ".safetensors" or start[8:9] == b"{":
        return Safetensors(path)
    return TorchFile(path)


class Safetensors(TensorSource):
    """One file of safetensors."""

    def __init__(self, path: Path) -> None:
        from safetensors import safe_open

        super().__init__(path)
        with reading(path, "safetensors"):
            self._file = safe_open(path, framework="pt")
            for name in self._file.keys():  # noqa: SIM118 - not a mapping
                piece = self._file.get_slice(name)
                dtype = piece.get_dtype()
                if dtype not in DTYPES:
                    raise FormatError(
                        f"{path}: {name} is of the dtype {dtype}, which is unknown. Save it in another."
                    )
                self.entries[name] = TensorInfo(tuple(piece.get_shape()), DTYPES[dtype])

    def _read(self, name: str, box: Box) -> torch.Tensor:
        with reading(self.path, "safetensors"):
            if not box.sizes:
                tensor: torch.Tensor = self._file.get_tensor(name)
                return tensor
            piece: torch.Tensor = self._file.get_slice(name)[box.slices]
            return piece


class Loaded(TensorSource):
    """Tensors in dicts and lists that are in memory, or mapped."""

    def __init__(self, path: Path, loaded: Mapping[str, Any]) -> None:
        super().__init__(path)
        self._tensors: dict[str, torch.Tensor] = {}
        values: dict[str, Any] = {}
        for name, x in flat(loaded):
            is_plain = isinstance(x, torch.Tensor) and x.layout is torch.strided and not x.is_quantized
            if is_plain and not is_extra_state(name):
                self._tensors[name] = x.detach()
                self.entries[name] = TensorInfo(tuple(x.shape), x.dtype)
            else:
                values[name] = x
        self.values = values
        self.trees = frozenset(str(name) for name, x in loaded.items() if isinstance(x, Mapping))

    def _read(self, name: str, box: Box) -> torch.Tensor:
        return self._tensors[name][box.slices]

    def same(self, name: str) -> Any:
        x = self._tensors[name]
        return x.untyped_storage().data_ptr(), x.storage_offset(), x.stride(), x.shape


class TorchFile(Loaded):
    """One file of ``torch.save``, mapped rather than loaded."""

    def __init__(self, path: Path) -> None:
        with reading(path, "what torch.save writes"):
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
        super().__init__(path, loaded)


def flat(tree: Any) -> Iterator[tuple[str, Any]]:
    """The leaves of dicts, and of lists that have dicts or tensors in them, with their names."""
    return named_leaves(tree, _is_tree)


def _is_tree(name: str, x: Any) -> bool:
    if is_extra_state(name):
        return False
    kinds = (Mapping, list, torch.Tensor)
    return isinstance(x, Mapping) or (isinstance(x, list) and any(isinstance(y, kinds) for y in x))


def is_extra_state(name: str) -> bool:
    """Whether an item of a state dict is what a module's ``get_extra_state`` gave."""
    return name.rpartition(".")[2] == "_extra_state"


class Sharded(TensorSource):
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
    with reading(path, "the index of sharded weights"):
        index = json.loads(path.read_text("utf-8"))
        files = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(files, dict):
            raise FormatError(
                f"{path} has no weight_map, which says the file of each name. Use another copy."
            )
        return Sharded(path, {str(name): inside(path.parent, file) for name, file in files.items()})


class _Stretch(NamedTuple):
    """Where a piece lies."""

    box: Box
    file: Path
    offset: int
    length: int


class Distributed(TensorSource):
    """A folder of ``torch.distributed.checkpoint``: pieces of tensors in files, and ``.metadata``."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._pieces: dict[str, list[_Stretch]] = {}
        metadata = path / TORCH
        record = read_metadata(metadata)
        with reading(metadata, "the metadata of a distributed checkpoint"):
            self._take(record)

    def _take(self, record: Pickled) -> None:
        kept, stored = record.get("state_dict_metadata"), record.get("storage_data")
        if not isinstance(kept, dict) or not isinstance(stored, dict):
            raise TypeError("it does not say what is where")
        places: dict[tuple[str, Any], Pickled] = {}
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
            self.entries[str(name)] = TensorInfo(shape, dtype)
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

    def _stored(self, info: Pickled, box: Box) -> _Stretch:
        if info.get("transform_descriptors"):
            raise FormatError(
                f"{self.path} was written with extensions ({info.get('transform_descriptors')}), which are "
                "not read here. Save it without."
            )
        offset, length = numbers((info.get("offset"), info.get("length")))
        return _Stretch(box, inside(self.path, info.get("relative_path")), offset, length)

    def _read(self, name: str, box: Box) -> torch.Tensor:
        out = torch.zeros(box.sizes, dtype=self.entries[name].dtype)
        stored = ((piece.box, partial(_read_piece, name, piece)) for piece in self._pieces[name])
        if missing := out.numel() - _fill_from(stored, out, box):
            what = "in no file" if missing > 0 else "there twice"
            raise FormatError(
                f"{self.path}: {abs(missing):,} elements of {name} are {what}. Use another copy."
            )
        return out


def _read_piece(name: str, piece: _Stretch) -> torch.Tensor:
    tensor = read_value(piece.file, piece.offset, piece.length)
    if not isinstance(tensor, torch.Tensor) or tuple(tensor.shape) != piece.box.sizes:
        raise FormatError(
            f"{piece.file} does not hold the piece of {name} that .metadata says. Use another copy."
        )
    return tensor


def _fill_from(
    stored: Iterable[tuple[Box, Callable[[], torch.Tensor]]], local: torch.Tensor, box: Box
) -> int:
    """Copy a box of a tensor out of those that are stored; gives how many elements there were."""
    copied = 0
    for each, read_values in stored:
        common = overlap(each, box)
        if common is not None:
            into = local[common.within(box)]
            into.copy_(read_values()[common.within(each)])
            copied += into.numel()
    return copied


class _Values(Mapping[str, Any]):
    """Plain values, read when asked for."""

    def __init__(self, stored: Mapping[str, _Stretch]) -> None:
        self._stored = stored

    def __getitem__(self, name: str) -> Any:
        at = self._stored[name]
        return read_value(at.file, at.offset, at.length)

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)


# ---- what others pickled

_PLANNED = ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData")
_MEGATRON = ("MCoreMetadata", "MCoreSavePlan")
_METADATA = "torch.distributed.checkpoint.metadata"
_CLASSES = {
    (_METADATA, "Metadata"),
    (_METADATA, "TensorStorageMetadata"),
    (_METADATA, "BytesStorageMetadata"),
    (_METADATA, "ChunkStorageMetadata"),
    (_METADATA, "TensorProperties"),
    (_METADATA, "MetadataIndex"),
    (_METADATA, "StorageMeta"),
    (_METADATA, "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    *(("torch.distributed.checkpoint.planner", name) for name in _PLANNED),
    *(("megatron.core.dist_checkpointing.strategies.torch", name) for name in _MEGATRON),
}
_PATHS = ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath", "Path")


class Pickled:
    """What stands for an object of a pickle.

    Attributes:
        kind: the name of its class.
        args: with which it was made.
        state: that was set on it: a dict of attributes, as a rule.
    """

    kind = ""
    args: tuple[Any, ...] = ()
    state: Any = None

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def get(self, name: str, default: Any = None) -> Any:
        """One of the attributes."""
        return self.state.get(name, default) if isinstance(self.state, dict) else default

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other


def read_metadata(path: Path) -> Pickled:
    """The metadata of a distributed checkpoint, as records.

    Raises:
        FormatError: it cannot be read, or asks for something that such a file has no use for.
    """
    with reading(path, "the metadata of a distributed checkpoint"):
        metadata = _Unpickler(io.BytesIO(path.read_bytes())).load()
        if not isinstance(metadata, Pickled) or metadata.kind not in ("Metadata", "MCoreMetadata"):
            raise FormatError(
                f"{path} holds no metadata of a distributed checkpoint, but something else. Use another copy."
            )
        return metadata


def read_value(path: Path, offset: int, length: int) -> Any:
    """What ``torch.save`` wrote into part of a file: tensors and plain values, and nothing else."""
    with reading(path, "what torch.save writes"), path.open("rb") as file:
        file.seek(offset)
        stored_bytes = file.read(length)
        if len(stored_bytes) < length:
            raise FormatError(
                f"{path} ends at byte {offset + len(stored_bytes):,}, expected {offset + length:,}: it is "
                "cut off. Use another copy."
            )
        return torch.load(io.BytesIO(stored_bytes), map_location="cpu", weights_only=True)


_WHAT_TORCH_MET = "WeightsUnpickler error:"  # before it stands what to do of one's own


@contextmanager
def reading(path: Path, what: str) -> Iterator[None]:
    """Tell whatever goes wrong while a file is read as ``what`` in one sentence."""
    try:
        yield
    except FormatError:
        raise
    # a broken file makes its readers fail in any way
    except Exception as error:
        if isinstance(error, OSError) and error.errno != errno.EINVAL:  # else it points before its beginning
            raise FormatError(f"{path} cannot be read: {error.strerror or error}.") from None
        said = str(error).rpartition(_WHAT_TORCH_MET)[2].strip() or type(error).__name__
        first = said.splitlines()[0].split(". ")[0][:200]
        raise FormatError(
            f"{path} cannot be read as {what}: {first}. It is damaged, of another format, or holds "
            "objects of classes, which are not loaded, for they could run any code. Save tensors and plain "
            "values only, or use another copy."
        ) from None


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self._known: dict[tuple[str, str], Any] = {}

    def find_class(self, module: str, name: str) -> Any:
        key = module, name
        if key not in self._known:
            self._known[key] = _stand_in(module, name)
        return self._known[key]

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("it refers to something outside of it")


def _stand_in(module: str, name: str) -> Callable[..., Any] | type | torch.dtype:
    """What a pickle gets for a name; nothing that outlives it can be changed through that."""
    if (module, name) in _CLASSES:
        return type(name, (Pickled,), {"kind": name})
    if (module, name) == ("torch", "Size"):
        return tuple
    if (module, name) == ("collections", "OrderedDict"):
        return type(name, (dict,), {})
    if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
        dtype: torch.dtype = getattr(torch, name)
        return dtype
    if module.split(".")[0] == "pathlib" and name in _PATHS:
        return lambda *parts: "/".join(map(str, parts))
    if (module, name) in (("torch.serialization", "_get_layout"), ("builtins", "getattr")):
        return lambda *named: str(named[-1])  # of a tensor's layout, of an enumeration: of no use here
    raise pickle.UnpicklingError(f"it asks for {module}.{name}, which metadata has no use for"[:180])


# ---- checkpoints of ours


class Checkpoint(TensorSource):
    """A whole checkpoint.

    Args:
        path: its folder, ``.../step-00000100``.

    Attributes:
        index: what it holds.
        entries: the tensors, also by their other names.

    Raises:
        CheckpointError: it is not whole.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(Path(path))
        self.index = open_index(self.path)
        self._of = {name: name for name in self.index.tensors} | self.index.aliases
        try:
            self.index.check_whole()
            self.entries = {name: self.index.tensors[of].info for name, of in self._of.items()}
            self.values = decode(self.index.values, self.read)
        # whatever stands in the place of values
        except Exception as error:
            said = str(error).splitlines() or [type(error).__name__]
            raise CheckpointError(damaged(self.path / INDEX, said[0].removesuffix("."))) from error
        self.trees = frozenset(("model", "optimizer"))

    def same(self, name: str) -> Any:
        return self._of[name]

    def fill(self, name: str, local: torch.Tensor, box: Box) -> None:
        """See :meth:`TensorSource.fill`.

        Raises:
            CheckpointError: a file is damaged.
        """
        tensor = self.index.tensors[self._of[name]]
        stored = ((s.box, partial(read, self.path, name, tensor.info, s)) for s in tensor.boxes)
        _fill_from(stored, local, box)

    def _read(self, name: str, box: Box) -> torch.Tensor:
        out = torch.empty(box.sizes, dtype=self.entries[name].dtype)
        self.fill(name, out, box)
        return out

    def verify(self, part: int = 0, parts: int = 1) -> None:
        """Compare each tensor with its checksum.

        Args:
            part, parts: look at one of so many parts, so that ranks can share the work.

        Raises:
            CheckpointError: one differs.
        """
        all_boxes = [(name, b.info, stored) for name, b in self.index.tensors.items() for stored in b.boxes]
        for name, info, stored in all_boxes[part::parts]:
            check(self.path, name, info, stored)
