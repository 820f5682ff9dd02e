"""Where weights come from: files of any known format, as names, shapes and boxes that can be read.

Nothing is read but what is asked for: a rank reads the boxes that it holds, so that nobody ever holds more
than its own part and one box. What others pickled is read without executing any of it:
``torch.distributed.checkpoint`` pickles its metadata, and a pickle may call whatever it names. Here it is
given records without behaviour in place of the classes that such a file has, made anew for each file, and
nothing else. Values come from ``torch.load(weights_only=True)``.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from espalier.checkpoint.folder import INDEX, SEAL, TORCH, checkpoints, newest, open_index
from espalier.checkpoint.index import CheckpointError, FormatError, TensorInfo, decode, inside, numbers
from espalier.checkpoint.tensor_file import check, damaged, read
from espalier.checkpoint.zero_files import is_zero, read_zero, tagged
from espalier.layout.layout import Box, overlap
from espalier.texts import listed
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
    """

    def __init__(self, path: Path) -> None:
        self.path = path
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
    if (path / SEAL).exists() or (path / INDEX).exists():
        return Checkpoint(path)
    if saved := checkpoints(path):
        return Checkpoint(newest(path) or saved[0])  # which says what is wrong with it
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


def _only(paths: list[Path], path: Path) -> Path:
    if len(paths) > 1:
        names = ", ".join(x.name for x in paths[:4])
        raise FormatError(f"{path} holds {len(paths)} of a kind ({names}): give the path of one of them.")
    return paths[0]


def _file(path: Path) -> TensorSource:
    if not path.is_file():
        raise FormatError(f"{path} is no file. Give a file or folder with weights.")
    with told(path, "a file"), path.open("rb") as file:
        start = file.read(9)
    if path.suffix == ".safetensors" or start[8:9] == b"{":
        return Safetensors(path)
    return TorchFile(path)


class Safetensors(TensorSource):
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
                self.entries[name] = TensorInfo(tuple(piece.get_shape()), DTYPES[dtype])

    def _read(self, name: str, box: Box) -> torch.Tensor:
        with told(self.path, "safetensors"):
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
            if isinstance(x, torch.Tensor) and x.layout is torch.strided and not x.is_quantized:
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
        super().__init__(path, loaded)


def flat(tree: Any) -> Iterator[tuple[str, Any]]:
    """The leaves of dicts, and of lists that have dicts or tensors in them, with their names."""
    return named_leaves(tree, _is_tree)


def _is_tree(x: Any) -> bool:
    kinds = (Mapping, list, torch.Tensor)
    return isinstance(x, Mapping) or (isinstance(x, list) and any(isinstance(y, kinds) for y in x))


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
    with told(path, "the index of sharded weights"):
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
        with told(metadata, "the metadata of a distributed checkpoint"):
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
    with told(path, "the metadata of a distributed checkpoint"):
        metadata = _Unpickler(io.BytesIO(path.read_bytes())).load()
        if not isinstance(metadata, Pickled) or metadata.kind != "Metadata":
            raise FormatError(
                f"{path} holds no metadata of a distributed checkpoint, but something else. Use another copy."
            )
        return metadata


def read_value(path: Path, offset: int, length: int) -> Any:
    """What ``torch.save`` wrote into part of a file: tensors and plain values, and nothing else."""
    with told(path, "what torch.save writes"), path.open("rb") as file:
        file.seek(offset)
        stored_bytes = file.read(length)
        if len(stored_bytes) < length:
            raise FormatError(
                f"{path} ends at byte {offset + len(stored_bytes):,}, expected {offset + length:,}: it is "
                "cut off. "
                "Use another copy."
            )
        return torch.load(io.BytesIO(stored_bytes), map_location="cpu", weights_only=True)


@contextmanager
def told(path: Path, what: str) -> Iterator[None]:
    """Tell whatever goes wrong while a file is read as ``what`` in one sentence."""
    try:
        yield
    except FormatError:
        raise
    except OSError as error:
        raise FormatError(f"{path} cannot be read: {error.strerror or error}.") from None
    # a broken file makes its readers fail in any way
    except Exception as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
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


# ---- which name in a file is which name of a model


def tied(model: nn.Module) -> dict[str, str]:
    """Names of a model's state dict whose tensor has another name too, to that name.

    That is the one that Hugging Face's models keep, else the first.
    """
    later = [re.compile(pattern) for pattern in getattr(model, "_tied_weights_keys", None) or ()]
    of: dict[int, list[str]] = {}
    for name, x in model.state_dict(keep_vars=True).items():
        of.setdefault(id(x), []).append(name)
    first_names = {}
    for names in of.values():
        kept = next((n for n in names if not any(p.search(n) for p in later)), names[0])
        first_names.update({name: kept for name in names if name != kept})
    return first_names


def load_into(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Take the weights of a plain model from files of any known format.

    Raises:
        FormatError: see :class:`Foreign`.
    """
    source = Foreign(open_any(path), model, None)
    with torch.no_grad():
        for name, x in model.state_dict(keep_vars=True).items():
            if f"model.{name}" in source.entries:
                x.copy_(source.read(f"model.{name}"))


# what peft puts into the names of weights that have an adapter, or a copy that is trained
_ADAPTED = re.compile(r"(?<=\.)(base_layer|original_module|modules_to_save\.default)\.")


class Foreign(TensorSource):
    """A source under a model's names: ``model.NAME``, and ``optimizer.state.NAME.KEY`` for optimizer states.

    There names may have something before them (``model.``, ``module.``), or lack what Hugging Face's models
    with a head put before those of the model without (``transformer.``). One name of a tied tensor is enough.
    What peft has put into a model stays as it is where the source lacks it: adapters; the weights they were
    put around have their names of before there.

    Args:
        model: whose names they are.
        optimizer: of the model; None to leave its states.

    Attributes:
        values: ``optimizer``: its ``groups`` (``names`` of parameters and ``options``), and ``states`` that
            are no tensors.

    Raises:
        FormatError: tensors are missing, have another shape, or are there and not in the model; there are no
            states, or those of another optimizer.
    """

    def __init__(
        self, source: TensorSource, model: nn.Module, optimizer: torch.optim.Optimizer | None
    ) -> None:
        super().__init__(source.path)
        self._source = source
        state = model.state_dict(keep_vars=True)
        ties = tied(model)
        wanted = {n: tuple(x.shape) for n, x in state.items() if hasattr(x, "shape")}
        before = {name: _ADAPTED.sub("", name) for name in wanted}
        base = getattr(model, "base_model_prefix", "") or ""
        cut, prefix = _rule(base, list(before.values()), source.entries)
        names_of: dict[str, list[str]] = {name: [] for name in wanted if name not in ties}
        for name in wanted:
            spelled = (prefix + n.removeprefix(cut) for n in (name, before[name]))
            theirs = next((n for n in spelled if n in source.entries), None)
            if theirs is not None:
                names_of[ties.get(name, name)].append(theirs)
        around = {name.partition(".base_layer.")[0] + "." for name in wanted if ".base_layer." in name}
        adapters = {
            name for name, names in names_of.items() if not names and any(name.startswith(a) for a in around)
        }
        adapters = {name for name in adapters if before[name] == name}
        self._kept = {f"model.{name}" for name in adapters}
        for name in adapters:
            del names_of[name]
        used = {theirs for names in names_of.values() for theirs in names}
        left = [n for n in source.entries if n.startswith(prefix) and n not in used]
        self._check(model, {name: (wanted[name], names) for name, names in names_of.items()}, left)
        self._names = {f"model.{n}": names_of[ties.get(n, n)] for n in wanted if n not in adapters}
        if optimizer is not None:
            names = {id(x): name for name, x in reversed(state.items())}
            order = [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
            known = {name.removeprefix(cut): names[id(x)] for name, x in state.items() if id(x) in names}
            reader = _Optimizer(source, order, known, optimizer)
            self._names |= {f"optimizer.state.{at}": [theirs] for at, theirs in reader.tensors.items()}
            self.values = {"optimizer": {"groups": reader.groups, "states": reader.states}}
        self.entries = {name: source.entries[theirs[0]] for name, theirs in self._names.items()}

    def _check(
        self,
        model: nn.Module,
        shapes_and_names: Mapping[str, tuple[tuple[int, ...], list[str]]],
        left: Iterable[str],
    ) -> None:
        there = self._source.entries
        wrong = [f"{name} is missing" for name, (_, names) in shapes_and_names.items() if not names]
        for name, (shape, names) in shapes_and_names.items():
            shapes = {there[theirs].shape for theirs in names}
            wrong += [f"{name} is {list(shape)}, there {list(s)}" for s in shapes if s != shape]
        ignored = [re.compile(p) for p in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()]
        wrong += [f"{name} is not in the model" for name in left if not any(p.search(name) for p in ignored)]
        if wrong:
            first = f"{self.path} does not hold the weights of this {type(model).__name__}:"
            raise FormatError(
                listed(first, wrong, 8)
                + "\nBuild the model that the file was saved from, or give another file."
            )

    def fill(self, name: str, local: torch.Tensor, box: Box) -> None:
        """See :meth:`TensorSource.fill`."""
        if name not in self._kept:
            super().fill(name, local, box)

    def _read(self, name: str, box: Box) -> torch.Tensor:
        first, *others = self._names[name]
        value = self._source.read(first, box)
        for other in others:
            if not torch.equal(self._source.read(other, box), value):
                raise FormatError(
                    f"{self.path}: {first} and {other} differ, and are one tensor in this model. Build the "
                    "model without the tie, or give another file."
                )
        return value


_GROUPS = re.compile(r"(?P<tree>(?:.*\.)?)param_groups\.")
_BESIDE = ("params", "param_names", "initial_lr")  # what lies among options, and is none


class _Optimizer:
    """What a source holds of an optimizer, as torch's ``get_state_dict`` or ``state_dict`` lay it out.

    Args:
        order: names of the parameters, as the optimizer holds them.
        known: names in the source, to those.

    Attributes:
        tensors: ``NAME.KEY`` to the name in the source.
        states: by name and key, those that are no tensors.
        groups: names and options.
    """

    def __init__(
        self,
        source: TensorSource,
        order: Sequence[str],
        known: Mapping[str, str],
        optimizer: torch.optim.Optimizer,
    ) -> None:
        every = [*source.entries, *source.values]
        trees = {match["tree"] for name in every if (match := _GROUPS.match(name))}
        if len(trees) != 1:
            raise FormatError(
                f"{source.path} holds {len(trees) or 'no'} optimizers: expected one beside the weights, as "
                "state and param_groups of get_state_dict or state_dict. Load without optimizer=True."
            )
        tree = trees.pop()
        self.tensors: dict[str, str] = {}
        self.states: dict[str, dict[str, Any]] = {}
        self.groups: list[dict[str, Any]] = []
        of = self._read_groups(source, f"{tree}param_groups.", order, known)
        for theirs in every:
            word, _, key = theirs.removeprefix(f"{tree}state.").rpartition(".")
            if not theirs.startswith(f"{tree}state.") or word not in of:
                continue
            if theirs in source.entries:
                self.tensors[f"{of[word]}.{key}"] = theirs
            else:
                self.states.setdefault(of[word], {})[key] = source.values[theirs]
        self._check(source, order, optimizer)

    def _read_groups(
        self, source: TensorSource, start: str, order: Sequence[str], known: Mapping[str, str]
    ) -> dict[str, str]:
        """Options by groups; gives the name for each word by which states call a parameter."""
        options: dict[str, dict[str, Any]] = {}
        for name in [*source.values, *source.entries]:
            if name.startswith(start):
                group, _, key = name.removeprefix(start).rpartition(".")
                value = source.read(name) if name in source.entries else source.values[name]
                options.setdefault(group, {})[key] = value
        of: dict[str, str] = {}
        for group, group_options in options.items():
            words = group_options.get(
                "params", [group]
            )  # a group for each parameter, where they were flattened
            for word in words if isinstance(words, list | tuple) else [words]:
                if isinstance(word, int) and len(of) < len(order):
                    of[str(word)] = order[len(of)]  # numbered as they come
                elif str(word) in known:
                    of[str(word)] = known[str(word)]
            names = [of[str(word)] for word in words if str(word) in of]
            kept = {key: value for key, value in group_options.items() if key not in _BESIDE}
            self.groups.append({"names": names, "options": kept})
        return of

    def _check(self, source: TensorSource, order: Sequence[str], optimizer: torch.optim.Optimizer) -> None:
        there = {name for group in self.groups for name in group["names"]}
        wrong = [f"{name} is not in it" for name in order if name not in there]
        keys = {key for group in optimizer.param_groups for key in group}
        strange = {key for group in self.groups for key in group["options"]} - keys
        wrong += [f"it has the option {key}, which this one has not" for key in sorted(strange)]
        if wrong:
            first = f"{source.path} does not hold the state of this {type(optimizer).__name__}:"
            raise FormatError(
                listed(first, wrong, 8)
                + "\nBuild the optimizer that was saved, or load without optimizer=True."
            )


def _rule(base: str, wanted: Collection[str], there: Mapping[str, Any]) -> tuple[str, str]:
    """What to take from the beginning of each name, and what to put there, so that most are found."""
    cuts = ("", f"{base}.") if base else ("",)

    def rules() -> Iterable[tuple[str, str]]:
        for cut in cuts:
            prefixes = dict.fromkeys(["", *(f"{tree}." for tree in TREES)])
            for name in [*wanted][:1] + [*wanted][-1:]:
                short = name.removeprefix(cut)
                ends = (other.removesuffix(short) for other in there if other.endswith(f".{short}"))
                prefixes.update(dict.fromkeys(ends))
            yield from ((cut, prefix) for prefix in prefixes)

    return max(rules(), key=lambda rule: sum(rule[1] + n.removeprefix(rule[0]) in there for n in wanted))


__all__ = ["Foreign", "load_into", "tied"]
