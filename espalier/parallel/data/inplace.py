"""Gradients in the memory of the parameters that they belong to (Fang et al. 2021, PatrickStar).

When a chunk's gradients are there, the backward pass has used its parameters for the last time. Their values
are those of the float32 masters, rounded: so the memory of what this rank updates of them holds the gradients
until the step, and is filled from the masters after it. Who reads a parameter meanwhile gets a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as raw
from torch.autograd.graph import increment_version

from espalier.parallel.data.chunks import Chunk
from espalier.parallel.data.masters import Masters, merge
from espalier.tensor import plain, stamp
from espalier.tensor.dtensor import DTensor
from espalier.tensor.loans import Elsewhere


class InPlace:
    """Lends the memory of parameters to their gradients.

    Args:
        masters: of the chunks for which this is done.
    """

    def __init__(self, masters: Masters) -> None:
        self._masters = masters
        for chunk in masters.chunks:
            chunk.in_place = True

    def check(self, what: str) -> None:
        """See that all parameters are at hand for something.

        Raises:
            RuntimeError: they are not.
        """
        if any(chunk.lent for chunk in self._masters.chunks):
            raise RuntimeError(_LENT.format(what))

    def lend(self, chunk: Chunk, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Put gradients where this rank updates a chunk's parameters; gives them as they lie there."""
        with raw(), torch.no_grad():
            if chunk.home is None or chunk.home.device == chunk.device:  # else nothing is shown now
                self._masters.follow([chunk])
            places = self._masters.places(chunk)
            torch._foreach_copy_(places, list(gradients))
            increment_version([m.p for m in chunk.members])  # autograd sees if a graph still needs one
            chunk.lent = [Lent(self._masters, chunk, i) for i in range(len(chunk.members))]
            return [place.detach() for place in places]

    def restore(self, chunk: Chunk) -> None:
        """Round masters into the parameters, in place of the gradients."""
        if not chunk.lent:
            return
        take_over(chunk)
        with raw(), torch.no_grad():
            torch._foreach_copy_(self._masters.places(chunk), self._masters.of(chunk))
            for lent in chunk.lent:
                lent.end()
        chunk.lent = []
        self._masters.remember([chunk])


class Lent(Elsewhere):
    """In place of a parameter whose memory holds its gradient: a copy of what it was."""

    def __init__(self, masters: Masters, chunk: Chunk, i: int) -> None:
        self._masters, self._chunk, self._i = masters, chunk, i
        self.member = m = chunk.members[i]
        self.recorded = m.full
        self._before: Any = m.p.__dict__.get("_source")
        self._copy: DTensor | None = None
        m.p._source = self  # type: ignore[attr-defined]
        if self._before is None:
            stamp(m.p, m.full.loan())

    @property
    def _master(self) -> torch.Tensor:
        return self._masters.of(self._chunk)[self._i]

    def stand_in(self, func: Callable[..., Any] | None) -> DTensor:
        """The copy, whole or cut as the parameter was; what is written to it counts."""
        p, unrecorded = self.member.p, getattr(func, "__name__", "") in ("detach", "__get__", "__set__")
        if torch.is_grad_enabled() and p.requires_grad and not unrecorded:
            if torch._C._current_graph_task_id() == -1:
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
        own = self.member.p._layout.own  # type: ignore[attr-defined]
        return self._masters.part(self.member, x, own)

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
