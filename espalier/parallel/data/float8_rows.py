"""Weights of 8-bit products travel in 8 bits (ZeRO-3).

A product rounds its weight to 8 bits, by a power of two that brings the largest value near the dtype's own
(see :mod:`espalier.tensor.rules.float8`). Here each rank rounds its piece so before it is sent; the power is
that of the whole weight, for which the ranks take the largest of their values before each forward pass. What
arrives is shown in the model's dtype, which holds 8 bits times a power of two as they are: the product rounds
each value to itself.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from espalier.comm.collectives import all_reduce
from espalier.parallel.data.chunks import Chunk, ShardedParam, ShardGroup
from espalier.parallel.data.masters import values_of
from espalier.tensor.rules.float8 import FORWARD, factor_of
from espalier.torch_private import raw


class Float8Rows:
    """A chunk's rows as they travel: of some members one byte for an element, of the others all.

    Attributes:
        rows: [n, bytes]; their storage may be emptied between the times.
        members: those in 8 bits.
    """

    def __init__(self, chunk: Chunk, names: Collection[str]) -> None:
        self.members = [m for m in chunk.members if m.name in names and m.dim is not None]
        self._chunk, self._columns = chunk, list[tuple[int, int]]()
        eight, at = {m.number for m in self.members}, 0
        for m in chunk.members:
            nbytes = m.slot * (1 if m.number in eight else chunk.dtype.itemsize)
            self._columns.append((at, at + nbytes))
            at += nbytes
        self._places = {m.number: i for i, m in enumerate(self.members)}
        self.rows = torch.empty(chunk.shard_group.n, at, dtype=torch.uint8, device=chunk.device)
        self._factors: torch.Tensor | None = None

    @property
    def shard_group(self) -> ShardGroup:
        """The ranks among which they travel."""
        return self._chunk.shard_group

    @property
    def is_scaled(self) -> bool:
        """Whether the ranks have agreed on scales for what the weights are now."""
        return self._factors is not None

    def own(self) -> torch.Tensor:
        """This rank's pieces."""
        assert self._chunk.home is not None
        return values_of(self._chunk) if self._chunk.lent else self._chunk.home

    def largest(self, home: torch.Tensor) -> torch.Tensor:
        """Of each member in 8 bits the largest value, in the pieces in ``home``, without its sign."""
        pieces = self._chunk.pieces(home)
        largest = [
            pieces[m.number].abs().amax() if pieces[m.number].numel() else home.new_zeros(())
            for m in self.members
        ]
        return torch.stack(largest).float()

    def scale_by(self, largest: torch.Tensor | None) -> None:
        """Take the factors for values of which these are the largest on all ranks; None: not known yet."""
        self._factors = None if largest is None else factor_of(largest, FORWARD)

    def pack(self, own: torch.Tensor) -> torch.Tensor:
        """This rank's row, of the pieces in ``own``."""
        row = torch.empty_like(self.rows[0])
        for m, slot, (start, stop) in zip(
            self._chunk.members, self._chunk.slots(own), self._columns, strict=True
        ):
            bits = self._eight(m, slot) if m.number in self._places else slot
            row[start:stop].copy_(bits.view(torch.uint8))
        return row

    def unpack(self, rows: torch.Tensor) -> None:
        """Give ``rows`` [n, size], of the chunk's dtype, the values that came."""
        for m, slots, (start, stop) in zip(
            self._chunk.members, self._chunk.slots(rows), self._columns, strict=True
        ):
            came = self.rows[:, start:stop]
            if m.number in self._places:
                slots.copy_(came.view(FORWARD).float() / self._factor(m))
            else:
                slots.copy_(came.view(rows.dtype))

    def unrounded(self, m: ShardedParam, before: torch.Tensor, shown: torch.Tensor) -> torch.Tensor:
        """This rank's piece of a whole weight that was written to: as it was before, where it was not."""
        if m.number not in self._places or not self.is_scaled or before.is_meta:
            return shown
        travelled = (self._eight(m, before).float() / self._factor(m)).to(before.dtype)
        return torch.where(shown == travelled, before, shown)

    def _factor(self, m: ShardedParam) -> torch.Tensor:
        assert self._factors is not None, "scales are taken before the first gather"
        return self._factors[self._places[m.number]]

    def _eight(self, m: ShardedParam, x: torch.Tensor) -> torch.Tensor:
        most = torch.finfo(FORWARD).max
        return (x.float() * self._factor(m)).clamp(-most, most).to(FORWARD)


def agree_on_scales(all_rows: Sequence[Float8Rows]) -> None:
    """Find the largest values of weights among the ranks that share them: a message for all chunks."""
    groups: dict[object, list[Float8Rows]] = {}
    for rows in all_rows:
        groups.setdefault(rows.shard_group, []).append(rows)
    with raw(), torch.no_grad():
        for group in groups.values():
            largest = torch.cat([rows.largest(rows.own()) for rows in group])
            shard_group = group[0].shard_group
            largest = all_reduce(largest, shard_group.mesh, shard_group.axis, "max")
            for rows, part in zip(group, largest.split([len(rows.members) for rows in group]), strict=True):
                rows.scale_by(part)
