"""A checkpoint that is read: box by box, so that nobody ever holds more than its own part and one box."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from espalier.checkpoint.errors import CheckpointError
from espalier.checkpoint.files import check, damaged, read
from espalier.checkpoint.folder import INDEX, SEAL, checkpoints, newest, open_index
from espalier.checkpoint.sources import Entry, Source, open_source
from espalier.checkpoint.values import decode
from espalier.layout.regions import Box, overlap


def open_any(path: str | os.PathLike[str]) -> Source:
    """A checkpoint of ours, the newest whole one of a folder of them, or weights of another format.

    Raises:
        FormatError: there are none, or they cannot be read.
    """
    path = Path(path)
    if path.is_dir() and not _is_ours(path) and (found := checkpoints(path)):
        path = newest(path) or found[0]  # which says what is wrong with it
        return Checkpoint(path)
    return Checkpoint(path) if _is_ours(path) else open_source(path)


def _is_ours(path: Path) -> bool:
    return (path / SEAL).exists() or (path / INDEX).exists()


class Checkpoint(Source):
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
            for name, of in self._of.items():
                boxes = self.index.tensors[of]
                self.entries[name] = Entry(boxes.shape, boxes.dtype)
            self.values = decode(self.index.values, self.read)
        # whatever stands in the place of values
        except Exception as error:
            said = str(error).splitlines() or [type(error).__name__]
            raise CheckpointError(damaged(self.path / INDEX, said[0].removesuffix("."))) from error
        self.trees = frozenset(("model", "optimizer"))

    def same(self, name: str) -> Any:
        return self._of[name]

    def fill(self, name: str, local: torch.Tensor, box: Box) -> None:
        """See :meth:`Source.fill`.

        Raises:
            CheckpointError: a file is damaged.
        """
        boxes = self.index.tensors[self._of[name]]
        for stored in boxes.boxes:
            common = overlap(stored.box, box)
            if common is not None:
                values = read(self.path, name, boxes, stored)
                local[common.within(box)] = values[common.within(stored.box)].to(local.device)

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
        all_boxes = [(name, b, stored) for name, b in self.index.tensors.items() for stored in b.boxes]
        for name, boxes, stored in all_boxes[part::parts]:
            check(self.path, name, boxes, stored)
