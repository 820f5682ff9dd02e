"""Checkpoints: what any plan saved, any other loads, on any number of ranks.

A checkpoint is a folder of torch's distributed checkpoint. Each rank has written boxes of tensors to a file
of its own; ``index.json`` says where each box stands and what its checksum is, and is all that is trusted
when it is read (:class:`Checkpoint`). Nothing in here knows of plans: trees of tensors that lie somehow
(:class:`Lying`) go in, boxes come out.

Other formats: ``sources`` reads them (a :class:`Checkpoint` is a source as well), ``sinks`` and
``exporting`` write them. Whatever bytes :func:`newest` and :class:`Checkpoint` meet, they raise nothing but
:class:`CheckpointError`.
"""

from espalier.checkpoint.errors import CheckpointError
from espalier.checkpoint.exporting import export
from espalier.checkpoint.folder import checkpoints, newest
from espalier.checkpoint.index import Index
from espalier.checkpoint.pieces import Lying
from espalier.checkpoint.reading import Checkpoint, open_any
from espalier.checkpoint.saver import Saver
from espalier.checkpoint.torch_dicts import install
from espalier.checkpoint.values import encode

install()

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "Index",
    "Lying",
    "Saver",
    "checkpoints",
    "encode",
    "export",
    "newest",
    "open_any",
]
