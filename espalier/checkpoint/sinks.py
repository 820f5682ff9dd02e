"""Where weights go: files that others read, and folders of checkpoints, written piece by piece.

A file is laid out first: what stands before and after the tensors, and where each will be. Then pieces of
tensors arrive in order, so that no more than one is in memory. Files get their names when they are whole.
"""

from __future__ import annotations

import io
import json
import math
import os
import secrets
import shutil
import struct
import zipfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Self

import torch
from torch.serialization import skip_data

from espalier.checkpoint.folder import INDEX, SEAL, TORCH, commit, hidden, prepare, torch_metadata
from espalier.checkpoint.foreign import StoredOptimizer
from espalier.checkpoint.index import Boxes, FormatError, Index, TensorInfo, encode
from espalier.checkpoint.megatron import Composed, as_megatron, config_in, in_names_of
from espalier.checkpoint.sources import DTYPES, SHARDS, TREES, Checkpoint, TensorSource, flat, open_any
from espalier.checkpoint.tensor_file import CENTRAL, TensorFile
from espalier.files import bytes_of, write_file
from espalier.layout.layout import Box
from espalier.tensor.random import without_tag
from espalier.torch_private import FakeTensorMode, place_in_checkpoint

Read = Callable[[str, Box], torch.Tensor]
Write = Callable[[str, int, Box, torch.Tensor], None]
_AT_ONCE = 64 * 1024**2
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


class FileSink(Target):
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
        self, path: Path, entries: Mapping[str, TensorInfo], metadata: Mapping[str, str] | None = None
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

    def add_sharded(self, folder: Path, entries: Mapping[str, TensorInfo], shard_bytes: int) -> None:
        """Files of safetensors of at most a size (or one tensor), and their index, as Hugging Face has it."""
        shards: list[dict[str, TensorInfo]] = []
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
        self.add_text(folder / f"model{SHARDS}", json.dumps(index, indent=2, sort_keys=True) + "\n")

    def add_torch(self, path: Path, tree: Mapping[str, Any]) -> None:
        """A file as ``torch.save`` writes it.

        Args:
            tree: dicts and plain values, with a :class:`TensorInfo` where a tensor is to be, and a
                :class:`Tie` where one is that has another name as well. Names are those of nested dicts,
                joined by dots.
        """
        named: dict[str, torch.Tensor] = {}

        def filled(x: Any, name: str) -> Any:
            if isinstance(x, TensorInfo):
                named[name] = torch.empty(x.shape, dtype=x.dtype)
                return named[name]
            if isinstance(x, Tie):
                return named[x.name]
            if isinstance(x, Mapping):
                return {key: filled(value, f"{name}.{key}" if name else str(key)) for key, value in x.items()}
            return x

        with FakeTensorMode():
            tree_of_values = filled(tree, "")
        self._create(path).close()
        with skip_data(materialize_fake_tensors=True):
            torch.save(tree_of_values, partial(path))
        with FakeTensorMode():
            laid = torch.load(partial(path), weights_only=True)
        self._files[path] = partial(path).open("r+b")
        self._sums[path] = {}
        for name, x in flat(laid):
            if isinstance(x, torch.Tensor):
                offset = place_in_checkpoint(x)
                self._places[name] = path, offset
                self._sums[path][offset] = 0

    def _create(self, path: Path) -> BinaryIO:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = self._files[path] = partial(path).open("wb")
        return file

    def _clear(self) -> None:
        for path, file in self._files.items():
            with suppress(OSError):  # of a full disk, which was told
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


def contiguous_boxes(entry: TensorInfo, most: int = _AT_ONCE) -> Iterator[tuple[int, Box]]:
    """A tensor as boxes of at most so many bytes whose elements are contiguous, with where each begins.

    Yields:
        the first byte of a box in the tensor, and the box.
    """
    start = 0
    for box in Box((0,) * len(entry.shape), entry.shape).parts(most // entry.dtype.itemsize):
        yield start, box
        start += math.prod(box.sizes) * entry.dtype.itemsize


def stream(entries: Mapping[str, TensorInfo], read: Read, write: Write, most: int = _AT_ONCE) -> None:
    """Read tensors piece by piece, and write them."""
    for name, entry in entries.items():
        for start, box in contiguous_boxes(entry, most):
            write(name, start, box, read(name, box))


# ---- folders of torch, and of ours

_FILE = "__0_0.distcp"
_RANDOM = "random.torch"


class FolderSink(Target):
    """A folder being written.

    Args:
        out: the folder; for a checkpoint of ours the one in which that of step 0 is made.
        entries: tensors by their whole names, ``model.NAME``.
        ties: further names.
        values: for torch's tools, by their whole names.
        ours: make a checkpoint that ``engine.load`` takes, too; the optimizer's part of ``values`` is for it.
        files: further ones, by name.
    """

    def __init__(
        self,
        out: Path,
        entries: Mapping[str, TensorInfo],
        ties: Mapping[str, str],
        values: Mapping[str, Any],
        *,
        ours: bool = False,
        files: Mapping[str, bytes] | None = None,
    ) -> None:
        self._out, self._values, self._ours, self._beside = out, values, ours, files or {}
        if ours:
            self._hidden = hidden(out, 0, secrets.token_hex(4))
            self._held = prepare(self._hidden, first=True)
        else:
            self._hidden = partial(out)
            shutil.rmtree(self._hidden, ignore_errors=True)
            self._hidden.mkdir(parents=True)
        self._file = TensorFile(self._hidden / _FILE)
        tensors = {name: Boxes(entry) for name, entry in entries.items()}
        self._index = Index(tensors=tensors, aliases=dict(ties))

    def write(self, name: str, start: int, box: Box, piece: torch.Tensor) -> None:
        """See :meth:`Target.write`."""
        self._index.tensors[name].boxes.append(self._file.write(box, piece))

    def _clear(self) -> None:
        self._file.close()
        shutil.rmtree(self._hidden, ignore_errors=True)
        if self._ours:
            os.close(self._held)

    def _commit(self) -> None:
        index = self._index
        if self._ours:
            state = without_tag(torch.get_rng_state())
            index.tensors[_RANDOM] = Boxes(TensorInfo(tuple(state.shape), state.dtype))
            self.write(_RANDOM, 0, Box((0,), tuple(state.shape)), state)
            values: dict[str, Any] = {"steps": 0, "scaler": None, "extra": {}, "model": {}, **self._values}
            index.values = {key: encode(value, key, lambda at, _: at) for key, value in values.items()}
        self._file.close()
        index.files[_FILE] = self._file.size
        if self._ours:
            commit(self._hidden, index, last=True)
            return
        places = {}
        with (self._hidden / "__0_1.distcp").open("wb") as file:
            for name, value in self._values.items():
                buffer = io.BytesIO()
                torch.save(value, buffer)
                places[name] = file.name.rpartition("/")[2], file.tell(), buffer.tell()
                file.write(buffer.getvalue())
        for name, content in self._beside.items():
            write_file(self._hidden / name, content)
        write_file(self._hidden / TORCH, torch_metadata(index, places))
        self._hidden.rename(self._out)


# ---- formats

FORMATS = ("safetensors", "torch", "dcp")


def root_of(form: str) -> str:
    """What stands before the names of weights in a format that holds more than these."""
    return "model." if form in ("dcp", "espalier") else ""


def laid_out(
    path: Path,
    form: str,
    entries: Mapping[str, TensorInfo],
    ties: Mapping[str, str],
    shard_bytes: int,
    values: Mapping[str, Any] | None = None,
) -> Target:
    """What is to be written to a path, where there is nothing yet, or a file of safetensors.

    Args:
        form: ``"safetensors"``: a folder as Hugging Face has them, where a tensor of several names has one;
            ``"torch"``: a file of ``torch.save`` with a state dict of all names; ``"dcp"``: a folder of
            ``torch.distributed.checkpoint``; ``"espalier"``: a folder of our own checkpoints; ``"file"``: one
            of safetensors, with all names.
        entries: tensors, their names with :func:`root_of` the format.
        ties: names of tensors that have another, to that.
        shard_bytes: of a file of safetensors.
        values: of ``"dcp"``, beside tensors; of ``"file"``, texts for its header.

    Raises:
        ValueError: there is no such format, or something is at the path.
        OSError: it cannot be made.
    """
    if form == "file":
        sink = FileSink()
        sink.add_safetensors(path, entries, values)
        return sink
    if form not in (*FORMATS, "espalier"):
        raise ValueError(f"format = {form!r}: expected one of {', '.join(FORMATS)}.")
    _see_free(path)
    if form in ("dcp", "espalier"):
        return FolderSink(path, entries, ties, values or {}, ours=form == "espalier")
    sink = FileSink()
    try:
        if form == "safetensors":
            sink.add_sharded(path, entries, shard_bytes)
        else:
            sink.add_torch(path, {**entries, **{name: Tie(of) for name, of in ties.items()}})
    except BaseException as error:
        sink.__exit__(type(error))
        raise
    return sink


def _see_free(path: Path) -> None:
    if any(path.iterdir()) if path.is_dir() else path.exists():
        raise ValueError(f"{path} exists: nothing is written over. Give another path, or remove it first.")


def export(
    source: str | Path,
    out: str | Path,
    form: str = "safetensors",
    *,
    dtype: torch.dtype | None = None,
    shard_gigabytes: float = 5.0,
    tree: str | None = None,
    companions: str | Path | None = None,
    optimizer: bool = False,
) -> int:
    """Write the model's weights of a checkpoint as others read them, in one process, piece by piece.

    Args:
        source: a checkpoint, or weights: what :func:`open_any` reads.
        out: a new folder; for ``"torch"`` a new file.
        form: ``"safetensors"``, ``"torch"``, or ``"dcp"``, which has the optimizer of a checkpoint of ours
            too, as ``get_state_dict`` lays it out; ``"megatron"``: a folder of Megatron-core's
            (``torch_dist``), with it as well; ``"universal"``: a folder of DeepSpeed's universal
            checkpoints; ``"espalier"``: a folder of our own.
        dtype: of floating-point weights; by default their own.
        shard_gigabytes: (10^9 bytes) of a file of safetensors.
        tree: the dict, of those nested in the source, that holds the weights; by default ``model`` or the
            like, or the only one.
        companions: a folder whose files beside weights (config.json, a tokenizer) are copied to the new one;
            by default the source, if it is a folder. Its config.json says Megatron's names from others'.
        optimizer: of ``"espalier"``: take the optimizer that lies beside the weights, by names, too.

    Returns:
        how many tensors were written.

    Raises:
        ValueError: the source cannot be read, or nothing be written.
    """
    config = config_in(Path(companions if companions is not None else source))
    if companions is not None and config is None:
        raise FormatError(
            f"{companions} has no config.json: give the folder of a model of transformers, as its "
            "save_pretrained writes it."
        )
    opened, out, root = in_names_of(open_any(source), config), Path(out), root_of(form)
    names = {f"{root}{name}": theirs for name, theirs in weights_in(opened, tree).items()}
    values: dict[str, Any] = {}
    first: dict[Any, str] = {}
    ties: dict[str, str] = {}
    for name, theirs in names.items():
        kept = first.setdefault(opened.same(theirs), name)
        if kept != name:
            ties[name] = kept
    entries = {name: opened.entries[theirs].cast(dtype) for name, theirs in names.items() if name not in ties}
    if form == "universal":
        if dtype not in (None, torch.float32):
            raise ValueError("DeepSpeed's universal checkpoints hold float32: leave dtype out.")
        return _export_universal(opened, out, {n: x for n, x in names.items() if n not in ties})
    if form == "megatron":
        return _export_megatron(opened, out, {n: x for n, x in names.items() if n not in ties}, config, dtype)
    if form == "dcp" and isinstance(opened, Checkpoint | Composed):
        values = _options(opened)
        states = {name: name for name in opened.entries if name.startswith("optimizer.state.")}
        names |= states
        entries |= {name: opened.entries[name] for name in states}
    if form == "espalier" and optimizer:
        states, values = _named_optimizer(opened, names)
        names |= states
        entries |= {name: opened.entries[theirs] for name, theirs in states.items()}

    def read(name: str, box: Box) -> torch.Tensor:
        return opened.read(names[name], box).to(entries[name].dtype)

    try:
        with laid_out(out, form, entries, ties, int(shard_gigabytes * 1e9), values) as sink:
            stream(entries, read, sink.write)
        folder = Path(companions if companions is not None else source)
        if form == "safetensors" and folder.is_dir():
            for file in sorted(folder.iterdir()):
                if file.is_file() and _accompanies(file.name):
                    shutil.copyfile(file, out / file.name)
    except OSError as error:
        raise ValueError(cannot_be_written(out, error)) from None
    return len(entries)


def cannot_be_written(path: Path, error: OSError) -> str:
    """The words of an error about weights that are written."""
    return f"{path} cannot be written: {error.strerror or error}. Make space, or name another place."


def _named_optimizer(
    opened: TensorSource, weights: Mapping[str, str]
) -> tuple[dict[str, str], dict[str, Any]]:
    """Names of states, with those in the source; and what a checkpoint of ours says of an optimizer."""
    root = root_of("espalier")
    own = [name.removeprefix(root) for name in weights]
    reader = StoredOptimizer(opened, (), {name: name for name in own})
    counts = [opened.read(theirs) for at, theirs in reader.tensors.items() if at.endswith(".step")]
    steps = int(max((float(x) for x in counts if x.numel() == 1), default=0))
    for group in reader.groups:
        options = group["options"]
        group["options"] = {k: x.item() if isinstance(x, torch.Tensor) else x for k, x in options.items()}
    said = {"class": None, "groups": reader.groups, "states": reader.states}
    return {f"optimizer.state.{at}": theirs for at, theirs in reader.tensors.items()}, {
        "optimizer": said,
        "steps": steps,
    }


def _export_megatron(
    opened: TensorSource,
    out: Path,
    weights: Mapping[str, str],
    config: Mapping[str, Any] | None,
    dtype: torch.dtype | None,
) -> int:
    """A folder of Megatron's, with the optimizer that :func:`_options` knows."""
    _see_free(out)
    options = _options(opened) if isinstance(opened, Checkpoint | Composed) else {}
    megatron = as_megatron(opened, config, weights, options)
    entries = {
        key: entry if key.startswith("optimizer.") else entry.cast(dtype)
        for key, entry in megatron.tensors.entries.items()
    }

    def read(key: str, box: Box) -> torch.Tensor:
        return megatron.tensors.read(key, box).to(entries[key].dtype)

    with FolderSink(out, entries, {}, megatron.values, files=megatron.files) as sink:
        stream(entries, read, sink.write)
    return len(entries)


def _export_universal(opened: TensorSource, out: Path, weights: Mapping[str, str]) -> int:
    """A folder of DeepSpeed's universal checkpoints; its files are written one after the other."""
    _see_free(out)
    universal = as_universal(
        opened, weights, _options(opened) if isinstance(opened, Checkpoint | Composed) else {}
    )
    hidden = partial(out)
    shutil.rmtree(hidden, ignore_errors=True)
    try:
        for file, theirs in universal.tensors.items():
            entry = opened.entries[theirs].cast(torch.float32)
            with FileSink() as sink:
                sink.add_torch(hidden / file, {"param": entry})
                for start, box in contiguous_boxes(entry):
                    sink.write("param", start, box, opened.read(theirs, box).to(entry.dtype))
        for file, value in universal.values.items():
            (hidden / file).parent.mkdir(parents=True, exist_ok=True)
            torch.save(value, hidden / file)
        write_file(hidden / LATEST, universal.tag.encode())
        hidden.rename(out)
    finally:
        shutil.rmtree(hidden, ignore_errors=True)
    return len(universal.tensors)


def _options(checkpoint: Checkpoint | Composed) -> dict[str, Any]:
    """What an optimizer keeps beside tensors, named as torch's distributed checkpoint does."""
    if isinstance(checkpoint, Composed):
        return dict(checkpoint.values)
    known = checkpoint.values.get("optimizer")
    options: dict[str, Any] = {}
    for i, group in enumerate(known["groups"] if known else ()):
        group_options = {**group["options"], "params": group["names"]}
        options.update({f"optimizer.param_groups.{i}.{key}": value for key, value in group_options.items()})
    for name, states in (known["states"] if known else {}).items():
        options.update({f"optimizer.state.{name}.{key}": value for key, value in states.items()})
    return options


def weights_in(source: TensorSource, tree: str | None = None) -> dict[str, str]:
    """The weights' own names, and those in the source.

    Raises:
        FormatError: it is not clear which tensors they are.
    """
    if tree is None and source.trees:
        holding = [t for t in sorted(source.trees) if any(n.startswith(f"{t}.") for n in source.entries)]
        known = [t for t in TREES if t in holding]
        if not known and len(holding) != 1:
            raise FormatError(
                f"{source.path} holds tensors under {', '.join(holding) or 'no name'}: say which are the "
                "weights, tree = NAME."
            )
        tree = (known or holding)[0]
    prefix = f"{tree}." if tree else ""
    names = {name.removeprefix(prefix): name for name in source.entries if name.startswith(prefix)}
    if not names:
        raise FormatError(f"{source.path} holds no tensors" + (f" under {tree}." if tree else "."))
    return names


def _accompanies(name: str) -> bool:
    """Whether a file beside weights says how to use them."""
    text = name.endswith((".json", ".txt", ".model", ".jinja"))
    return (
        text and not name.endswith(".index.json") and not name.startswith(".") and name not in (INDEX, SEAL)
    )


# ---- DeepSpeed's universal checkpoints: a parameter has a folder, with a file for each of its tensors

_VERSION = "0.19.8"  # of DeepSpeed, whose files these are
LATEST = "latest_universal"


class Universal(NamedTuple):
    """What a universal checkpoint has.

    Attributes:
        tag: the folder in it.
        tensors: by file, names in the source.
        values: by file.
    """

    tag: str
    tensors: Mapping[str, str]
    values: Mapping[str, Any]


def as_universal(source: TensorSource, weights: Mapping[str, str], options: Mapping[str, Any]) -> Universal:
    """A model and its optimizer as DeepSpeed loads them with ``{"checkpoint": {"load_universal": true}}``.

    A parameter has a folder there, with a file for its float32 values and one for each kind of states.

    Args:
        weights: names of a model, and those in the source.
        options: ``optimizer.param_groups.NUMBER.KEY``.

    Raises:
        FormatError: there is no optimizer, or its parameters have counts of steps that differ.
    """
    groups: dict[str, dict[str, Any]] = {}
    for name, value in options.items():
        start, _, key = name.rpartition(".")
        if start.startswith("optimizer.param_groups."):
            groups.setdefault(start, {})[key] = value
    if not groups:
        raise FormatError(
            f"{source.path} has no optimizer, and DeepSpeed's universal checkpoint is one of an optimizer's "
            "weights: export safetensors or torch, and load that into the model before deepspeed.initialize."
        )
    tag, tensors, steps = "universal", dict[str, str](), dict[str, float]()
    trained = [name for group in groups.values() for name in group.pop("params")]
    for name in trained:
        tensors[f"{tag}/zero/{name}/fp32.pt"] = weights[name]
        for kind, entry in source.under(f"optimizer.state.{name}.").items():
            theirs = f"optimizer.state.{name}.{kind}"
            if kind == "step":
                steps[name] = float(source.read(theirs))
            elif entry.shape == source.entries[weights[name]].shape:
                tensors[f"{tag}/zero/{name}/{kind}.pt"] = theirs
    if len(set(steps.values())) > 1:
        raise FormatError(f"{source.path} has parameters of other counts of steps, which DeepSpeed has not.")
    step = max(steps.values(), default=0.0)
    listed = [{**group, "params": [i]} for i, group in enumerate(groups.values())]
    values: dict[str, Any] = {f"{tag}/zero/{name}/step.pt": torch.tensor(x) for name, x in steps.items()}
    values[f"{tag}/zero/optimizer_state.pt"] = {
        "param_groups": listed,
        "optimizer_state_dict": {"state": {0: {"step": torch.tensor(step)}}, "param_groups": listed},
        "ds_version": _VERSION,
    }
    shapes = {name: torch.Size(source.entries[weights[name]].shape) for name in trained}
    common = {
        "module": {},
        "buffer_names": [],
        "param_shapes": [shapes],
        "optimizer": None,
        "lr_scheduler": None,
        "dp_world_size": 1,
        "mp_world_size": 1,
        "global_steps": int(step),
        "skipped_steps": 0,
        "ds_version": _VERSION,
        "universal_checkpoint_info": {"universal_checkpoint_version": 0.2},
    }
    for stage in ("", "zero_pp_rank_0_"):  # the third has names of its own
        values[f"{tag}/{stage}mp_rank_00_model_states.pt"] = common
    return Universal(tag, tensors, values)
