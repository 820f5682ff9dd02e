"""Masters: float32 copies of parameters that the model computes with in 16 bits.

The optimizer updates them, and its states are float32 as they are (Micikevicius et al. 2017, Mixed Precision
Training). They lie as the stage says of states: whole on every rank, or this rank's pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.graph import increment_version

from espalier.device import is_accelerator
from espalier.layout import Layout
from espalier.parallel.data.chunks import Chunk, ShardedParam, show
from espalier.parallel.data.residency import OffloadStore
from espalier.tensor import plain, stamp
from espalier.tensor.dtensor import DTensor
from espalier.tensor.loans import StandIn, is_handed_out, written_mark
from espalier.torch_private import current_graph_task_id, foreach_copy_, raw


def make(chunk: Chunk) -> None:
    """Take the values of a chunk's parameters, which are in full precision yet."""
    with raw():
        chunk.master = chunk.buffer(torch.float32)
        for m, master in zip(chunk.members, chunk.masters, strict=True):
            master.copy_(_part_here(m))


def follow(chunks: Sequence[Chunk]) -> None:
    """Where a parameter was changed by others (``load_state_dict``), its master takes the values over."""
    with raw():
        for chunk in chunks:
            for m, master in zip(chunk.members, chunk.masters, strict=True):
                if is_changed(m) and not chunk.lent:
                    merge(master, _part_here(m))
                    m.is_written = False


def is_changed(m: ShardedParam) -> bool:
    """Whether others may have written to a parameter since :func:`remember`."""
    return m.is_written or m.seen != written_mark(m.p) or is_handed_out(m.p)


def write(chunk: Chunk, store: OffloadStore | None = None) -> None:
    """Round a master into the parameters, as far as these are not exchanged.

    Args:
        store: copies where the two lie apart.
    """
    assert chunk.master is not None
    with raw(), torch.no_grad():
        if chunk.home is not None:
            into, outof = [chunk.home], [chunk.master]
        elif not chunk.by_piece:
            into, outof = [plain(m.p.detach()) for m in chunk.members], list(chunk.masters)
        else:
            return
        if store is not None and chunk.master.is_cpu and is_accelerator(into[0].device):
            store.spread(into, outof)
        else:
            foreach_copy_(into, outof)


def remember(chunks: Sequence[Chunk]) -> None:
    """Parameters hold what their masters, or the host's copies, say: a change from now on is by others."""
    with raw():
        for m in (m for chunk in chunks for m in chunk.members):
            m.seen = written_mark(m.p)


def _part(m: ShardedParam, x: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Of a parameter's values here, which lie so, those of which the master is here."""
    return m.piece(x) if m.by_piece and layout is m.full else x


def _part_here(m: ShardedParam) -> torch.Tensor:
    return _part(m, plain(m.p.detach()), m.p._layout)  # type: ignore[attr-defined]


def cast(m: ShardedParam) -> None:
    """Let a parameter hold its values in the dtype in which the model computes."""
    with raw():
        show(m.p, plain(m.p.detach()).to(m.dtype), m.p._layout)  # type: ignore[attr-defined]


def merge(master: torch.Tensor, values: torch.Tensor) -> None:
    """Let a master be what others have written to its parameter; what they left stays in full precision."""
    with torch.no_grad():
        here = master.to(values.device)
        master.copy_(torch.where(values == here.to(values.dtype), here, values.to(here.dtype)))


# ---- gradients in the memory of the parameters that they belong to (Fang et al. 2021, PatrickStar)
#
# When a chunk's gradients are there, the backward pass has used its parameters for the last time. Their
# values are those of the float32 masters, rounded: so the memory of what this rank updates of them holds
# the gradients until the step, and is filled from the masters after it. Who reads a parameter meanwhile
# gets a copy.


def check_at_hand(chunks: Sequence[Chunk], what: str) -> None:
    """See that all parameters are at hand for something.

    Raises:
        RuntimeError: they are not.
    """
    if any(chunk.lent for chunk in chunks):
        raise RuntimeError(_LENT.format(what))


def lend(chunk: Chunk, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Put gradients where this rank updates a chunk's parameters; gives them as they lie there."""
    with raw(), torch.no_grad():
        if chunk.home is None or chunk.home.device == chunk.device:  # else nothing is shown now
            follow([chunk])
        places = chunk.kept()
        foreach_copy_(places, list(gradients))
        increment_version([m.p for m in chunk.members])  # autograd sees if a graph still needs one
        chunk.lent = [_CopyStandIn(chunk, m) for m in chunk.members]
        return [place.detach() for place in places]


def restore(chunk: Chunk) -> None:
    """Round masters into the parameters, in place of the gradients, if these are there."""
    if not chunk.lent:
        return
    take_over(chunk)
    with raw(), torch.no_grad():
        foreach_copy_(chunk.kept(), chunk.masters)
        for lent in chunk.lent:
            lent.end()
    chunk.lent = []
    remember([chunk])


class _CopyStandIn(StandIn):
    """In place of a parameter whose memory holds its gradient: a copy of what it was."""

    def __init__(self, chunk: Chunk, m: ShardedParam) -> None:
        self._chunk, self.member, self.recorded = chunk, m, m.full
        self._before: Any = m.p.__dict__.get("_source")
        self._copy: DTensor | None = None
        m.p._source = self  # type: ignore[attr-defined]
        if self._before is None:
            stamp(m.p, m.full.loan())

    @property
    def _master(self) -> torch.Tensor:
        return self._chunk.masters[self.member.number]

    def stand_in(self, func: Callable[..., Any] | None) -> DTensor:
        """The copy, whole or cut as the parameter was; what is written to it counts."""
        p, unrecorded = self.member.p, getattr(func, "__name__", "") in ("detach", "__get__", "__set__")
        if torch.is_grad_enabled() and p.requires_grad and not unrecorded:
            if current_graph_task_id() == -1:
                raise RuntimeError(_LENT.format(f"{self.member.name} can be read under torch.no_grad()"))
            with raw():  # recomputed, for a gradient of something else
                return stamp(plain(self._filled().detach()).requires_grad_(), self._filled()._layout)
        return self._filled()

    def takes(self, func: Callable[..., Any]) -> bool:
        """The values are the copy's; all else is the parameter's own."""
        return func is not torch.Tensor.requires_grad_

    def handed_out(self) -> None:
        """As the parameter's own source."""
        if self._before is not None:
            self._before.handed_out()

    def _filled(self) -> DTensor:
        if self._copy is None:
            m = self.member
            with raw(), torch.no_grad():
                copy = plain(m.p.detach()).clone()
                self._part(copy).copy_(self._master)
                self._copy = stamp(copy, m.p._layout.own)  # type: ignore[attr-defined]
        return self._copy

    def _part(self, x: torch.Tensor) -> torch.Tensor:
        """Of what a parameter is here, that of which the master is."""
        return _part(self.member, x, self.member.p._layout.own)  # type: ignore[attr-defined]

    def take_over(self) -> None:
        """Let the master have what was written to the copy, which is over."""
        copy, self._copy = self._copy, None
        if copy is not None and not copy.is_meta:
            merge(self._master, self._part(plain(copy.detach())))

    def forget(self) -> None:
        """What stood in for the parameter is out of date."""
        if self._before is not None:
            self._before.forget()

    def end(self) -> None:
        """The parameter is itself again."""
        p = self.member.p
        if self._before is None:
            stamp(p, p._layout.own)  # type: ignore[attr-defined]
            del p._source  # type: ignore[attr-defined]
        else:
            p._source = self._before  # type: ignore[attr-defined]


def take_over(chunk: Chunk) -> None:
    """Let masters have what others have written to parameters since the gradients took their place."""
    with raw(), torch.no_grad():
        for lent in chunk.lent:
            lent.take_over()


def values_of(chunk: Chunk) -> torch.Tensor:
    """What stood in a chunk's ``home`` before its gradients."""
    take_over(chunk)
    assert chunk.master is not None
    with raw():
        return chunk.master.detach().to(chunk.device, chunk.dtype)


_LENT = (
    "Since the backward pass the gradients stand where the parameters stood (gradients = 'in-place'), until "
    "engine.step() or engine.zero_grad(). {}."
)
