"""A checkpoint that is read: box by box, so that nobody ever holds more than its own part and one box."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from espalier.checkpoint.files import check, read
from espalier.checkpoint.folder import open_index
from espalier.checkpoint.sources import Entry, Source
from espalier.checkpoint.values import decode
from espalier.layout.regions import Box, overlap


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
        for name, of in self._of.items():
            boxes = self.index.tensors[of]
            self.entries[name] = Entry(boxes.shape, boxes.dtype)
        self.values = decode(self.index.values, self.read)

    def under(self, prefix: str) -> dict[str, Entry]:
        """The tensors whose names begin so, by the rest of their names."""
        return {
            name.removeprefix(prefix): entry
            for name, entry in self.entries.items()
            if name.startswith(prefix)
        }

    def fill(self, name: str, local: torch.Tensor, box: Box) -> None:
        """Read what a rank holds of a tensor: its box, into ``local``, which has another dtype perhaps.

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
