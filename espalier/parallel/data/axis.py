"""The data axis of a plan: parameters, gradients and states in chunks, as the stage says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
from espalier.parallel.data.stages import STAGES
from espalier.parallel.data.units import by_size, by_unit
from espalier.parallel.plan import Plan
from espalier.tensor import plain
from espalier.tensor.modules import lay_out_parameter

_grad: Any = torch.Tensor.grad


class DataAxis:
    """What a plan does along its data axes.

    Attributes:
        stage: the row of the table of stages.
        members: all parameters.
        gradients: finishes gradients.
        gathering: gathers parameters; None where they stay whole.
    """

    def __init__(self, model: nn.Module, layouts: Mapping[str, Layout], mesh: Mesh, plan: Plan) -> None:
        self.mesh, self.stage = mesh, STAGES[plan.zero]
        axes = [mesh.axis(name) for name in plan.data_axes]
        if all(mesh.shape[a] == 1 for a in axes):
            self.stage = STAGES[0]
        self.axis = axes[-1]
        self.members = [Member(name, p, layouts[name], self.axis) for name, p in model.named_parameters()]
        cut = self.stage.parameters == "S"
        for m in self.members:
            lay_out_parameter(m.p, m.shard if cut else m.full)
        trained = [m for m in self.members if m.p.requires_grad]
        self.gathering = None
        if cut:
            used = by_unit(self.members, model)
            for _, chunk in used:
                _bring_home(chunk)
            self.gathering = Gathering(used, mesh, self.axis, plan.prefetch_megabytes * 1e6)
            self.chunks = [chunk for _, chunk in used if chunk.members[0].p.requires_grad][::-1]
        else:
            alone = all(mesh.shape[a] == 1 for a in axes)
            self.chunks = [] if alone else by_size(trained[::-1], plan.chunk_megabytes)
        self.gradients = Gradients(
            self.chunks,
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

    @contextmanager
    def updating(self, *, exchange: bool = True) -> Iterator[None]:
        """While open, each trained parameter is what the optimizer is to update here, with its gradient.

        After it, all ranks compute with what was updated, if there was an ``exchange``.
        """
        if self.stage.states == "R":
            yield
            return
        kept = []
        with raw():
            for m in (m for chunk in self.chunks for m in chunk.members):
                whole, reduced = plain(m.p.detach()), m.p.__dict__.pop("_reduced", None)
                kept.append((m, whole))
                show(m.p, whole if self.gathering is not None else m.piece(whole), m.shard)
                _grad.__set__(m.p, reduced)
        try:
            yield
        finally:
            with raw():
                for m, whole in kept:
                    _grad.__set__(m.p, None)
                    show(m.p, whole, m.shard if self.gathering is not None else m.full)
        if exchange and self.stage.parameters == "R":
            self._exchange()

    def _exchange(self) -> None:
        """Give all ranks the pieces that each has updated."""
        under_way = []
        n = self.mesh.shape[self.axis]
        with raw():
            for chunk in self.chunks:
                own, rows = chunk.flat(chunk.dtype), chunk.rows(n, chunk.dtype)
                torch._foreach_copy_(chunk.pieces(own), [m.piece(plain(m.p.detach())) for m in chunk.members])
                under_way.append((chunk, rows, start_gather(rows, own, self.mesh, self.axis), own))
            for chunk, rows, pending, _ in under_way:
                pending.wait()
                chunk.unpack(rows, [plain(m.p.detach()) for m in chunk.members])


def _bring_home(chunk: Chunk) -> None:
    """Put the pieces of a chunk's parameters into one buffer."""
    with raw():
        chunk.home = chunk.flat(chunk.dtype)
        for m, piece in zip(chunk.members, chunk.pieces(chunk.home), strict=True):
            piece.copy_(plain(m.p.detach()))
            show(m.p, piece, m.shard)
