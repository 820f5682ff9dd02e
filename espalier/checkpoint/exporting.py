"""Files of the formats that others read, laid out to be written."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from espalier.checkpoint.distributed import FolderSink
from espalier.checkpoint.pickles import FormatError
from espalier.checkpoint.reading import Checkpoint, open_any
from espalier.checkpoint.sinks import Sink, Target, Tie, stream
from espalier.checkpoint.sources import Entry, Source
from espalier.layout.regions import Box

FORMATS = ("safetensors", "torch", "dcp")
_TREES = ("model", "module", "state_dict", "model_state_dict")


def root_of(form: str) -> str:
    """What stands before the names of weights in a format that holds more than these."""
    return "model." if form in ("dcp", "espalier") else ""


def laid_out(
    path: Path,
    form: str,
    entries: Mapping[str, Entry],
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
        sink = Sink()
        sink.add_safetensors(path, entries, values)
        return sink
    if form not in (*FORMATS, "espalier"):
        raise ValueError(f"format = {form!r}: expected one of {', '.join(FORMATS)}.")
    if any(path.iterdir()) if path.is_dir() else path.exists():
        raise ValueError(f"{path} exists: nothing is written over. Give another path, or remove it first.")
    if form in ("dcp", "espalier"):
        return FolderSink(path, entries, ties, values or {}, ours=form == "espalier")
    sink = Sink()
    try:
        if form == "safetensors":
            sink.add_sharded(path, entries, shard_bytes)
        else:
            sink.add_torch(path, {**entries, **{name: Tie(of) for name, of in ties.items()}})
    except BaseException as error:
        sink.__exit__(type(error))
        raise
    return sink


def export(
    source: str | Path,
    out: str | Path,
    form: str = "safetensors",
    *,
    dtype: torch.dtype | None = None,
    shard_gigabytes: float = 5.0,
    tree: str | None = None,
    companions: str | Path | None = None,
) -> int:
    """Write the model's weights of a checkpoint as others read them, in one process, piece by piece.

    Args:
        source: a checkpoint, or weights: what :func:`open_any` reads.
        out: a new folder; for ``"torch"`` a new file.
        form: ``"safetensors"``, ``"torch"``, or ``"dcp"``, which has the optimizer of a checkpoint of ours
            too, as ``get_state_dict`` lays it out; ``"espalier"``: a folder of our own checkpoints.
        dtype: of floating-point weights; by default their own.
        shard_gigabytes: (10^9 bytes) of a file of safetensors.
        tree: the dict, of those nested in the source, that holds the weights; by default ``model`` or the
            like, or the only one.
        companions: a folder whose files beside weights (config.json, a tokenizer) are copied to the new one;
            by default the source, if it is a folder.

    Returns:
        how many tensors were written.

    Raises:
        ValueError: the source cannot be read, or nothing be written.
    """
    opened, out, root = open_any(source), Path(out), root_of(form)
    names = {f"{root}{name}": theirs for name, theirs in weights_in(opened, tree).items()}
    values: dict[str, Any] = {}
    first: dict[Any, str] = {}
    ties: dict[str, str] = {}
    for name, theirs in names.items():
        kept = first.setdefault(opened.same(theirs), name)
        if kept != name:
            ties[name] = kept
    entries = {name: opened.entries[theirs].cast(dtype) for name, theirs in names.items() if name not in ties}
    if form == "dcp" and isinstance(opened, Checkpoint):
        values = _options(opened)
        states = {name: name for name in opened.entries if name.startswith("optimizer.state.")}
        names |= states
        entries |= {name: opened.entries[name] for name in states}

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
        raise ValueError(f"{out} cannot be written: {error.strerror or error}.") from None
    return len(entries)


def _options(checkpoint: Checkpoint) -> dict[str, Any]:
    """What an optimizer keeps beside tensors, named as torch's distributed checkpoint does."""
    known = checkpoint.values.get("optimizer")
    found: dict[str, Any] = {}
    for i, group in enumerate(known["groups"] if known else ()):
        given = {**group["options"], "params": group["names"]}
        found.update({f"optimizer.param_groups.{i}.{key}": value for key, value in given.items()})
    for name, states in (known["states"] if known else {}).items():
        found.update({f"optimizer.state.{name}.{key}": value for key, value in states.items()})
    return found


def weights_in(source: Source, tree: str | None = None) -> dict[str, str]:
    """The weights' own names, and those in the source.

    Raises:
        FormatError: it is not clear which tensors they are.
    """
    if tree is None and source.trees:
        holding = [t for t in sorted(source.trees) if any(n.startswith(f"{t}.") for n in source.entries)]
        known = [t for t in _TREES if t in holding]
        if not known and len(holding) != 1:
            raise FormatError(
                f"{source.path} holds tensors under {', '.join(holding) or 'no name'}: say which are the "
                "weights, tree = NAME."
            )
        tree = (known or holding)[0]
    prefix = f"{tree}." if tree else ""
    found = {name.removeprefix(prefix): name for name in source.entries if name.startswith(prefix)}
    if not found:
        raise FormatError(f"{source.path} holds no tensors" + (f" under {tree}." if tree else "."))
    return found


def _accompanies(name: str) -> bool:
    """Whether a file beside weights says how to use them."""
    ours = ("index.json", "whole.json")  # of a checkpoint of ours
    text = name.endswith((".json", ".txt", ".model", ".jinja"))
    return text and not name.endswith(".index.json") and not name.startswith(".") and name not in ours


__all__ = ["FORMATS", "export", "laid_out", "root_of", "weights_in"]
