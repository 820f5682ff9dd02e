"""Gradients along the data axis: summed chunk by chunk while the backward pass goes on.

The parameters are *varied* along the axis (see ``espalier.layout``): backward leaves their gradients
Partial, and what is here finishes them, as the stage says. Chunks are sent in one order, the same on all
ranks (Li et al. 2020, PyTorch Distributed): after the first step that in which they were ready in it, on
rank 0. At most so many are under way.
"""

from __future__ import annotations

import json
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as raw

from espalier.comm import Pending
from espalier.comm.flat import Summing, start_gather, start_sum, sum_everywhere
from espalier.comm.side import told_by_first
from espalier.layout import Layout, gradient_layout
from espalier.layout.layout import R, is_partial
from espalier.mesh import Mesh
from espalier.parallel.data.chunks import Chunk, Member
from espalier.parallel.data.residency import Shelf
from espalier.parallel.data.stages import Stage
from espalier.tensor import plain, stamp

_grad: Any = torch.Tensor.grad
_AT_ONCE = 2  # messages under way


class Gradients:
    """Finishes the gradients of parameters that are varied along the data axes.

    Args:
        chunks: of parameters that need gradients, in the order in which they are sent.
        axes: the mesh axes over which gradients are summed; chunks are cut along the last of them.
        stage: how gradients lie.
        dtype: in which they are sent and summed; None for their own.
        on_sent: called with a chunk whose gradients have been taken.
        shelf: where finished gradients go that are to be off the device.
    """

    def __init__(
        self,
        chunks: Sequence[Chunk],
        mesh: Mesh,
        axes: Sequence[int],
        stage: Stage,
        dtype: torch.dtype | None = None,
        on_sent: Callable[[Chunk], None] | None = None,
        shelf: Shelf | None = None,
    ) -> None:
        self.mesh, self.axes, self.stage = mesh, tuple(axes), stage
        self.chunks = list(chunks)
        self.reduced = False
        self._dtype, self._on_sent, self._shelf = dtype, on_sent, shelf
        self._sending = True
        self._next = 0
        self._flying: deque[tuple[Chunk, torch.Tensor, Summing]] = deque()
        self._spreading: deque[Pending] = deque()
        self._place = {id(m.p): (chunk, i) for chunk in self.chunks for i, m in enumerate(chunk.members)}
        self._number = {id(chunk): i for i, chunk in enumerate(self.chunks)}
        # the last chunk's rows end with a flag for each parameter: has it a gradient anywhere?
        self._flags = len(self._place)
        self._here: list[float] = []
        self._layouts: dict[int, Layout] = {}
        # the numbers of chunks as they became ready in the first backward pass; None once that is the order
        self._came: list[int] | None = []
        # Python's collector does not see what such hooks hold: it would never find a cycle through them
        ready = weakref.WeakMethod(self._ready)
        for chunk in self.chunks:
            for m in chunk.members:
                m.p.register_post_accumulate_grad_hook(lambda p: _call(ready, p))

    @property
    def _axis(self) -> int:
        return self.axes[-1]

    def begin(self, last: bool) -> None:
        """Before a backward pass; ``last`` of those that make one gradient."""
        if self.reduced:
            for chunk in self.chunks:
                for i, m in enumerate(chunk.members):
                    self._reopen(chunk, i, m)
        self.reduced = False
        self._sending = last or self.stage.addends == "S"
        self._next = 0
        if self._came:
            self._came.clear()
        for chunk in self.chunks:
            chunk.missing = set(range(len(chunk.members)))

    def _reopen(self, chunk: Chunk, i: int, m: Member) -> None:
        """What is finished becomes an addend again."""
        grad = m.p.grad
        with raw():
            if self.stage.gradients == "R":
                if grad is not None:
                    own = plain(grad)
                    if any(self.mesh.coordinate[a] for a in self.axes):
                        own.zero_()
                    _grad.__set__(m.p, stamp(own, gradient_layout(m.full)))
                return
            piece = chunk.pieces(chunk.gradient)[i] if chunk.gradient is not None else None
            if piece is None:
                return
            if grad is None:
                piece.zero_()
            elif plain(grad).data_ptr() != piece.data_ptr():
                piece.copy_(plain(grad))
            if any(self.mesh.coordinate[a] for a in self.axes[:-1]):
                piece.zero_()
            m.p.grad = None

    def _ready(self, parameter: torch.Tensor) -> None:
        if not self._sending:
            return
        chunk, i = self._place[id(parameter)]
        chunk.missing.discard(i)
        if self._came is not None and not chunk.missing:
            self._came.append(self._number[id(chunk)])
        while self._next < len(self.chunks) and not self.chunks[self._next].missing:
            self._send(self.chunks[self._next])

    def flush(self) -> None:
        """After a backward pass: send what it has not filled, if this one sends."""
        if self._sending:
            while self._next < len(self.chunks):
                self._send(self.chunks[self._next])

    def _send(self, chunk: Chunk) -> None:
        last = self._next == len(self.chunks) - 1
        self._next += 1
        if len(self._flying) == _AT_ONCE:
            self._land()
        n = self.mesh.shape[self._axis]
        with raw():
            grads = [_grad.__get__(m.p) for m in chunk.members]
            dtype = self._dtype or chunk.dtype
            given = [None if g is None else plain(g) for g in grads]
            self._here += [float(g is not None) for g in grads]
            extra = self._flags if last else 0
            if self.stage.gradients == "R":
                rows, flags = chunk.line_up(n, dtype, given, extra)
            else:
                rows = chunk.rows(n, dtype, extra)
                chunk.pack(rows, given)
                flags = rows[:, chunk.size :]
            if last:
                flags.copy_(torch.tensor(self._here, dtype=dtype, device=rows.device))
                self._here.clear()
            for m in chunk.members:
                _grad.__set__(m.p, None)
        if self._on_sent is not None:
            self._on_sent(chunk)
        self._flying.append((chunk, rows, start_sum(rows, self.mesh, self._axis)))

    def _land(self) -> None:
        """Wait for the oldest sum."""
        chunk, rows, summing = self._flying.popleft()
        if self.stage.gradients == "R":
            chunk.gradient = rows.view(-1)
            summing.wait(self._own_row(chunk))
            if len(self.axes) == 1:
                self._spread(chunk)
            return
        del rows
        if chunk.gradient is not None:
            self.bring(chunk)
            summing.wait(chunk.gradient, add=True)
            self._leave(chunk)
            return
        extra = self._flags if chunk is self.chunks[-1] else 0
        chunk.gradient = chunk.flat(self._dtype or chunk.dtype, extra)
        summing.wait(chunk.gradient)
        self._leave(chunk)

    def bring(self, chunk: Chunk, *, on_host: bool = False) -> None:
        """Let what a chunk has of its gradients be on the device, or in the host's memory."""
        if "gradients" not in chunk.places or chunk.gradient is None:
            return
        assert self._shelf is not None
        if self._shelf.is_leaving(_key(chunk)):
            self._shelf.settle()
        before = chunk.pieces(chunk.gradient)
        (chunk.gradient,) = self._shelf.take(_key(chunk), [chunk.gradient], on_host=on_host)
        for m, old, new in zip(chunk.members, before, chunk.pieces(chunk.gradient), strict=True):
            reduced = m.p.__dict__.get("_reduced")
            if reduced is not None and plain(reduced).data_ptr() == old.data_ptr():
                m.p._reduced = stamp(new, reduced._layout)  # type: ignore[attr-defined]

    def _leave(self, chunk: Chunk) -> None:
        """Start to take the gradients of a chunk away, if they are to be off the device."""
        if "gradients" in chunk.places:
            assert self._shelf is not None and chunk.gradient is not None

            def away(shown: list[torch.Tensor]) -> None:
                (chunk.gradient,) = shown

            self._shelf.settle()
            self._shelf.put(_key(chunk), [chunk.gradient], chunk.places["gradients"], away)

    def _rows(self, chunk: Chunk) -> torch.Tensor:
        assert chunk.gradient is not None
        return chunk.gradient.view(self.mesh.shape[self._axis], -1)

    def _own_row(self, chunk: Chunk) -> torch.Tensor:
        return self._rows(chunk)[self.mesh.coordinate[self._axis]]

    def _spread(self, chunk: Chunk) -> None:
        """Start to give all ranks the sums of a chunk."""
        self._spreading.append(start_gather(self._rows(chunk), None, self.mesh, self._axis))

    def finish(self) -> None:
        """Wait until every gradient is the sum over the axes, and lies as the stage says.

        A parameter that no rank used keeps ``grad = None``; one that some rank used has it on all.
        """
        if self.reduced or not self.chunks:
            return
        if not self._sending:
            self.begin(last=True)
            for chunk in self.chunks:
                chunk.missing = {i for i, m in enumerate(chunk.members) if m.p.grad is None}
        self.flush()
        while self._flying:
            self._land()
        for axis in self.axes[:-1]:
            for chunk in self.chunks:
                assert chunk.gradient is not None
                if self.stage.gradients == "R":
                    sum_everywhere(self._own_row(chunk), self.mesh, axis)
                    if axis == self.axes[-2]:
                        self._spread(chunk)
                    continue
                self.bring(chunk)
                sum_everywhere(chunk.gradient, self.mesh, axis)
                self._leave(chunk)
        while self._spreading:
            self._spreading.popleft().wait()
        if self._shelf is not None:
            self._shelf.settle()
        with raw():
            self._hand_out()
        self.reduced = True

    def _hand_out(self) -> None:
        used, number = self._used(), 0
        for chunk in self.chunks:
            assert chunk.gradient is not None
            whole = self.stage.gradients == "R"
            parts = chunk.wholes(chunk.gradient) if whole else chunk.pieces(chunk.gradient)
            for m, part in zip(chunk.members, parts, strict=True):
                layout = self._finished(m)
                if used is not None and not used[number]:
                    _grad.__set__(m.p, None)
                elif whole:
                    _grad.__set__(m.p, stamp(part.to(m.p.grad_dtype), layout))
                else:
                    m.p._reduced = stamp(part, layout)  # type: ignore[attr-defined]
                number += 1
            if whole:
                chunk.gradient = None

    def _finished(self, m: Member) -> Layout:
        """How a finished gradient lies."""
        known = self._layouts.get(id(m))
        if known is None:
            known = gradient_layout(m.full if self.stage.gradients == "R" else m.shard)
            for axis in self.axes:
                if is_partial(known.axes[axis]):
                    known = known.with_axis(axis, R)
            self._layouts[id(m)] = known
        return known

    def _used(self) -> list[bool] | None:
        """For each parameter, whether a rank has a gradient for it; None where this one has them all."""
        if self.mesh.is_dry or not any(chunk.missing for chunk in self.chunks):
            return None
        last = self.chunks[-1]
        assert last.gradient is not None
        start = last.elements if self.stage.gradients == "R" else last.size
        return [n > 0 for n in last.gradient[start : start + self._flags].tolist()]

    def _settle_order(self) -> None:
        """From now on chunks are sent as they became ready; those that did not, last."""
        came = list(dict.fromkeys(self._came or ()))
        came += [i for i in range(len(self.chunks)) if i not in came]
        if len(came) > 1:
            told = told_by_first(self.mesh, self.axes, json.dumps(came), "order")
            self.chunks = [self.chunks[i] for i in json.loads(told)]
        self._came = None

    def forget(self) -> None:
        """After a step: there are no gradients, nor are any under way."""
        while self._flying:
            self._land()
        while self._spreading:
            self._spreading.popleft().wait()
        if self._shelf is not None:
            self._shelf.settle()
        if self._came:
            self._settle_order()
        for chunk in self.chunks:
            chunk.gradient = None
        self.reduced = False


def _call(method: weakref.WeakMethod[Any], p: torch.Tensor) -> None:
    found = method()
    if found is not None:
        found(p)


def _key(chunk: Chunk) -> str:
    return f"gradients-{chunk.number}"
