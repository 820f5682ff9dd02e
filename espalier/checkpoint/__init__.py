"""Checkpoints: what any plan saved, any other loads, on any number of ranks.

A checkpoint is a folder of torch's distributed checkpoint. Each rank has written boxes of tensors to a file
of its own; ``index.json`` says where each box stands and what its checksum is, and is all that is trusted
when it is read (:class:`Checkpoint`). Nothing in here knows of plans: trees of tensors that lie somehow
(:class:`Lying`) go in, boxes come out.

Other formats: ``sources`` reads them (a :class:`Checkpoint` is a source as well), ``sinks``
writes them. Whatever bytes :func:`newest` and :class:`Checkpoint` meet, they raise nothing but
:class:`CheckpointError`.
"""

from espalier.checkpoint.folder import checkpoints, newest
from espalier.checkpoint.index import CheckpointError, FormatError, Index, encode
from espalier.checkpoint.saver import Lying, Saver
from espalier.checkpoint.sinks import export
from espalier.checkpoint.sources import Checkpoint, open_any
from espalier.tensor.stored import teach_torch

teach_torch()

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "FormatError",
    "Index",
    "Lying",
    "Saver",
    "checkpoints",
    "encode",
    "export",
    "newest",
    "open_any",
]
