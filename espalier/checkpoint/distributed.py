"""A folder of torch's distributed checkpoint, or of our own, written by one process, piece by piece."""

from __future__ import annotations

import io
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from espalier.checkpoint.files import TensorFile
from espalier.checkpoint.folder import TORCH, commit, hidden, prepare
from espalier.checkpoint.index import Boxes, Index
from espalier.checkpoint.pieces import Piece
from espalier.checkpoint.sinks import Target
from espalier.checkpoint.sources import Entry
from espalier.checkpoint.values import encode
from espalier.files import write_file
from espalier.layout.regions import Box
from espalier.tensor.seeding import without_tag

_FILE = "__0_0.distcp"
_RANDOM = "random.torch"


class FolderSink(Target):
    """A folder being written.

    Args:
        out: the folder; for a checkpoint of ours the one in which that of step 0 is made.
        entries: tensors by their whole names, ``model.NAME``.
        ties: further names.
        values: for torch's tools, by their whole names.
        ours: make a checkpoint that ``engine.load(model_only=True)`` takes, too.
    """

    def __init__(
        self,
        out: Path,
        entries: Mapping[str, Entry],
        ties: Mapping[str, str],
        values: Mapping[str, Any],
        *,
        ours: bool = False,
    ) -> None:
        self._out, self._values, self._ours = out, values, ours
        if ours:
            self._hidden = hidden(out, 0, secrets.token_hex(4))
            prepare(self._hidden)
        else:
            self._hidden = out.with_name(f".{out.name}.partial")
            shutil.rmtree(self._hidden, ignore_errors=True)
            self._hidden.mkdir(parents=True)
        self._file = TensorFile(self._hidden / _FILE)
        tensors = {name: Boxes(entry.dtype, entry.shape) for name, entry in entries.items()}
        self._index = Index(tensors=tensors, aliases=dict(ties))

    def write(self, name: str, start: int, box: Box, piece: torch.Tensor) -> None:
        """See :meth:`Target.write`."""
        self._index.tensors[name].boxes.append(self._file.write(Piece(name, box, piece)))

    def _clear(self) -> None:
        self._file.close()
        shutil.rmtree(self._hidden, ignore_errors=True)

    def _commit(self) -> None:
        index = self._index
        if self._ours:
            state = without_tag(torch.get_rng_state())
            index.tensors[_RANDOM] = Boxes(state.dtype, tuple(state.shape))
            self.write(_RANDOM, 0, Box((0,), tuple(state.shape)), state)
            given: dict[str, Any] = {"steps": 0, "scaler": None, "extra": {}, "model": {}}
            index.values = {key: encode(value, key, lambda at, _: at) for key, value in given.items()}
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
        write_file(self._hidden / TORCH, index.to_torch(places))
        self._hidden.rename(self._out)


__all__ = ["FolderSink"]
