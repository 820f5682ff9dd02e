"""The data axis of a plan: parameters, gradients and states in chunks, as the stage says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._C import DisableTorchFunctionSubclass as raw

from espalier.comm.flat import start_gather
from espalier.layout import Layout
from espalier.mesh import Mesh
from espalier.parallel.data.chunks import Chunk, Member, show
from espalier.parallel.data.gathering import Gathering
from espalier.parallel.data.gradients import Gradients
from espalier.parallel.data.masters import Masters, cast
from espalier.parallel.data.stages import STAGES
from espalier.parallel.data.units import by_size, by_unit
from espalier.parallel.plan import Plan
from espalier.tensor import plain, stamp
from espalier.tensor.modules import lay_out_parameter

_grad: Any = torch.Tensor.grad


class DataAxis:
    """What a plan does along its data axes.

    Attributes:
        stage: the row of the table of stages.
        members: all parameters.
        gradients: finishes gradients.
        gathering: gathers parameters; None where they stay whole.
        chunks: of the trained parameters.
        masters: float32 copies of parameters, for the optimizer.
    """

    def __init__(self, model: nn.Module, layouts: Mapping[str, Layout], mesh: Mesh, plan: Plan) -> None:
        self.mesh, self.stage = mesh, STAGES[plan.zero]
        axes = [mesh.axis(name) for name in plan.data_axes]
        if all(mesh.shape[a] == 1 for a in axes):
            self.stage = STAGES[0]
        self.axis = axes[-1]
        low = plan.precision.parameters
        dtype = None if low is None else getattr(torch, low)
        named = list(model.named_parameters())
        self.members = [Member(name, p, layouts[name], self.axis, dtype) for name, p in named]
        cut = self.stage.parameters == "S"
        for m in self.members:
            lay_out_parameter(m.p, m.shard if cut else m.full)
        if cut:
            used = by_unit(self.members, model)
            self.chunks = [chunk for _, chunk in used if chunk.members[0].p.requires_grad][::-1]
        else:
            self.chunks = by_size([m for m in self.members if m.p.requires_grad][::-1], plan.chunk_megabytes)
        self.masters = Masters(self.chunks, pieces=self.stage.states == "S")
        for m in self.members:
            cast(m)
        self.gathering = None
        if cut:
            for _, chunk in used:
                _bring_home(chunk)
            self.gathering = Gathering(used, mesh, self.axis, plan.prefetch_megabytes * 1e6)
        self.masters.remember()
        alone = all(mesh.shape[a] == 1 for a in axes)
        self.gradients = Gradients(
            [] if alone else self.chunks,
            mesh,
            axes,
            self.stage,
            on_sent=None if self.gathering is None else self.gathering.sent,
        )

    def begin_forward(self) -> None:
        """Before the model is called."""
        if self.gathering is not None:
            self.gathering.begin()

    def end_backward(self) -> None:
        """After a backward pass."""
        self.gradients.flush()
        if self.gathering is not None:
            self.gathering.end()

    def counted(self) -> list[torch.Tensor]:
        """Of each gradient what this rank alone counts in a sum over the mesh; plain, in the model's order.

        That is its piece along the data axis, on coordinate 0 of the axes along which others hold the same.
        So every stage adds up the same numbers in the same order.
        """
        found = []
        with raw():
            for m in self.members:
                grad: Any = m.p.grad
                if grad is None or not m.counts:
                    continue
                layout = grad._layout
                assert not any(self.mesh.shape[a] > 1 for a in layout.partial), "reduce gradients first"
                here = plain(grad)
                if layout.axes[self.axis] != m.dim:
                    here = m.piece(here)
                found.append(here.contiguous())
        return found

    @contextmanager
    def precise(self) -> Iterator[None]:
        """While open, each parameter that has a master is that, lying as the stage says of states."""
        self._settle()
        with self._shown(self.masters.chunks):
            yield

    @contextmanager
    def updating(self, *, exchange: bool = True) -> Iterator[None]:
        """While open, each trained parameter is what the optimizer is to update here, with its gradient.

        That is the parameter, its master, or this rank's piece of either; a master's gradient is float32.
        After it, all ranks compute with what was updated, if there was an ``exchange``.
        """
        self._settle()
        chunks = self.chunks if self.stage.states == "S" else self.masters.chunks
        grads = [self._take_gradients(chunk) for chunk in chunks]
        with self._shown(chunks):
            with raw():
                for chunk in chunks:
                    for m, grad in zip(chunk.members, grads.pop(0), strict=True):
                        _grad.__set__(m.p, grad)
            try:
                yield
            finally:
                with raw():
                    for m in (m for chunk in chunks for m in chunk.members):
                        _grad.__set__(m.p, None)
        if exchange:
            self._exchange()

    def _settle(self) -> None:
        """Parameters are what they are between passes, and what others have changed is known."""
        if self.gathering is not None:
            self.gathering.begin()
        self.masters.follow()

    @contextmanager
    def _shown(self, chunks: Sequence[Chunk]) -> Iterator[None]:
        """While open, the parameters of chunks are what the optimizer updates."""
        kept = []
        with raw():
            for chunk in chunks:
                masters = None if chunk.master is None else self.masters.of(chunk)
                for i, m in enumerate(chunk.members):
                    here = plain(m.p.detach())
                    kept.append((m, here, m.p._layout))  # type: ignore[attr-defined]
                    if masters is not None:
                        show(m.p, masters[i], m.shard if self.stage.states == "S" else m.full)
                    else:
                        show(m.p, here if self.gathering is not None else m.piece(here), m.shard)
        try:
            yield
        finally:
            with raw():
                for m, here, layout in kept:
                    show(m.p, here, layout)

    def _take_gradients(self, chunk: Chunk) -> list[torch.Tensor | None]:
        """The gradients of a chunk's members, off them, as the optimizer needs them."""
        found: list[torch.Tensor | None] = []
        with raw():
            for m in chunk.members:
                grad = m.p.grad
                if grad is not None and chunk.master is not None:
                    layout = grad._layout  # type: ignore[attr-defined]
                    grad = stamp(plain(grad).to(chunk.master.dtype), layout)
                m.p.__dict__.pop("_reduced", None)
                _grad.__set__(m.p, None)
                found.append(grad)
            if chunk.master is not None:
                chunk.gradient = None  # else both would live on while the optimizer works
        return found

    def _exchange(self) -> None:
        """Let all ranks compute with what each has updated."""
        for chunk in self.masters.chunks:
            self.masters.write(chunk)
        if self.stage.states == "S" and self.stage.parameters == "R":
            under_way = []
            n = self.mesh.shape[self.axis]
            with raw():
                for chunk in self.chunks:
                    own, rows = chunk.flat(chunk.dtype), chunk.rows(n, chunk.dtype)
                    if chunk.master is not None:
                        own.copy_(chunk.master)
                    else:
                        pieces = [m.piece(plain(m.p.detach())) for m in chunk.members]
                        torch._foreach_copy_(chunk.pieces(own), pieces)
                    under_way.append((chunk, rows, start_gather(rows, own, self.mesh, self.axis), own))
                for chunk, rows, pending, _ in under_way:
                    pending.wait()
                    chunk.unpack(rows, [plain(m.p.detach()) for m in chunk.members])
        self.masters.remember()


def _bring_home(chunk: Chunk) -> None:
    """Put the pieces of a chunk's parameters into one buffer."""
    with raw():
        chunk.home = chunk.flat(chunk.dtype)
        for m, piece in zip(chunk.members, chunk.pieces(chunk.home), strict=True):
            piece.copy_(plain(m.p.detach()))
            show(m.p, piece, m.shard)
