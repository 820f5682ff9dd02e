"""What a stage's forwards write to, as each micro-batch under way has left it.

A model may write to its parameters and buffers in its forward: a codebook that follows averages, weights that
are brought to a norm. On one process a micro-batch goes back before the next one writes. In a pipeline the
next ones have written by then: so its backward pass finds what is written to as its own forward has left it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from espalier.tensor.before import put_values, values_of
from espalier.torch_private import raw, set_versions, version_of

Tensors = Mapping[str, torch.Tensor]


class _State(NamedTuple):
    """Tensors, their values and versions at a time."""

    tensors: Tensors
    values: Tensors
    versions: tuple[int, ...]

    @classmethod
    def now(cls, tensors: Tensors) -> _State:
        with raw():
            versions = tuple(map(version_of, tensors.values()))
        return cls(tensors, values_of(tensors), versions)

    def put(self) -> None:
        """Let them be so again."""
        put_values(self.tensors, self.values)
        if set_versions is not None:  # else torch refuses what was written to, if not by x.data
            with raw():
                set_versions(tuple(self.tensors.values()), self.versions)


class LeftByForwards:
    """What the forwards of one stage in a run write to.

    Args:
        written: gives the tensors that they write to, by name, as they are bound at a time.
    """

    def __init__(self, written: Callable[[], Tensors]) -> None:
        self._written = written
        self._under_way: set[int] = set()
        self._states: dict[int, _State] = {}  # as micro-batches have left it
        self._last = self._now = -1  # the micro-batch whose forward came last, and the one it is as left by

    def forward(self, micro_batch: int) -> None:
        """Before the forward of a micro-batch: it finds what the one before has left."""
        self.go_on()
        if self._last in self._under_way:
            if self._last not in self._states:
                self._states[self._last] = _State.now(self._written())
        else:
            self._states.pop(self._last, None)
        self._under_way.add(micro_batch)
        self._last = self._now = micro_batch

    def backward(self, micro_batch: int) -> None:
        """Before a backward pass: it finds what the micro-batch's forward has left."""
        if micro_batch == self._now:
            return
        if self._now == self._last:  # a backward pass may have written to it
            self._states[self._last] = _State.now(self._written())
        self._states[micro_batch].put()
        self._now = micro_batch

    def end(self, micro_batch: int) -> None:
        """A micro-batch has gone back."""
        self._under_way.discard(micro_batch)
        if micro_batch != self._last:
            del self._states[micro_batch]

    def go_on(self) -> None:
        """Let all be as the last forward has left it."""
        if self._now != self._last:
            self._states[self._last].put()
            self._now = self._last
