"""Files of the formats that others read, laid out to be written."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal, get_args

from espalier.checkpoint.sinks import Sink, Tie
from espalier.checkpoint.sources import Entry

Format = Literal["safetensors", "torch"]
FORMATS: tuple[str, ...] = get_args(Format)


def laid_out(
    path: Path, form: str, entries: Mapping[str, Entry], ties: Mapping[str, str], shard_bytes: int
) -> Sink:
    """What is to be written to a path, where there is nothing yet.

    Args:
        form: ``"safetensors"``: a folder as Hugging Face has them, where a tensor of several names has one;
            ``"torch"``: a file of ``torch.save`` with a state dict of all names.
        ties: names of tensors that have another, to that.
        shard_bytes: of a file of safetensors.

    Raises:
        ValueError: there is no such format, or something is at the path.
        OSError: it cannot be made.
    """
    if form not in FORMATS:
        raise ValueError(f"format = {form!r}: expected one of {', '.join(FORMATS)}.")
    if any(path.iterdir()) if path.is_dir() else path.exists():
        raise ValueError(f"{path} exists: nothing is written over. Give another path, or remove it first.")
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


__all__ = ["FORMATS", "Format", "laid_out"]
