"""Masters: float32 copies of parameters that the model computes with in 16 bits.

The optimizer updates them, and its states are float32 as they are (Micikevicius et al. 2017, Mixed Precision
Training). They lie as the stage says of states: whole on every rank, or this rank's pieces.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch._C import DisableTorchFunctionSubclass as raw

from espalier.layout import Layout
from espalier.parallel.data.chunks import Chunk, Member, show
from espalier.tensor import plain
from espalier.tensor.loans import is_handed_out, written_mark


class Masters:
    """The masters of chunks whose members compute in a lower precision.

    Args:
        chunks: of trained parameters.
        pieces: whether a master is this rank's pieces of its parameters (the stage cuts states).
    """

    def __init__(self, chunks: Sequence[Chunk], pieces: bool) -> None:
        self._pieces = pieces
        self._seen: dict[int, tuple[int, int, int]] = {}
        self.chunks = [c for c in chunks if c.members[0].is_cast]

    def make(self, chunk: Chunk) -> None:
        """Take the values of parameters, which are in full precision and are cast then."""
        elements = chunk.size if self._pieces else chunk.elements
        with raw():
            chunk.master = torch.empty(elements, dtype=torch.float32, device=chunk.device)
            for m, master in zip(chunk.members, self.of(chunk), strict=True):
                master.copy_(self._part(m))
                cast(m)

    def of(self, chunk: Chunk) -> list[torch.Tensor]:
        """The members' parts of a chunk's master, each in its own shape."""
        assert chunk.master is not None
        return chunk.pieces(chunk.master) if self._pieces else chunk.wholes(chunk.master)

    def part(self, m: Member, x: torch.Tensor, layout: Layout) -> torch.Tensor:
        """Of a parameter's values here, which lie so, those of which the master is here."""
        return m.piece(x) if self._pieces and layout is m.full else x

    def _part(self, m: Member) -> torch.Tensor:
        return self.part(m, plain(m.p.detach()), m.p._layout)  # type: ignore[attr-defined]

    def places(self, chunk: Chunk) -> list[torch.Tensor]:
        """Where the parameters have what the masters are of."""
        if chunk.home is not None:
            return chunk.pieces(chunk.home)
        views = chunk.views()
        return views.pieces if self._pieces else views.wholes

    def follow(self, chunks: Sequence[Chunk] | None = None) -> None:
        """Where a parameter was changed by others (``load_state_dict``), its master takes the values over."""
        with raw():
            for chunk in self.chunks if chunks is None else chunks:
                for m, master in zip(chunk.members, self.of(chunk), strict=True):
                    changed = m.is_written or self._seen[id(m)] != written_mark(m.p) or is_handed_out(m.p)
                    if changed and not chunk.lent:
                        merge(master, self._part(m))
                        m.is_written = False

    def write(self, chunk: Chunk) -> None:
        """Round masters into the parameters, as far as these are not exchanged."""
        assert chunk.master is not None
        with raw():
            if chunk.home is not None:
                chunk.home.copy_(chunk.master)
            elif not self._pieces:
                torch._foreach_copy_([plain(m.p.detach()) for m in chunk.members], self.of(chunk))

    def remember(self, chunks: Sequence[Chunk] | None = None) -> None:
        """Parameters hold what their masters say: a change from now on is by others."""
        with raw():
            for chunk in self.chunks if chunks is None else chunks:
                for m in chunk.members:
                    self._seen[id(m)] = written_mark(m.p)


def cast(m: Member) -> None:
    """Let a parameter hold its values in the dtype in which the model computes."""
    with raw():
        show(m.p, plain(m.p.detach()).to(m.dtype), m.p._layout)  # type: ignore[attr-defined]


def merge(master: torch.Tensor, values: torch.Tensor) -> None:
    """Let a master be what others have written to its parameter; what they left stays in full precision."""
    with torch.no_grad():
        here = master.to(values.device)
        master.copy_(torch.where(values == here.to(values.dtype), here, values.to(here.dtype)))
