"""Gradients along the data axis: summed chunk by chunk while the backward pass goes on.

The parameters are *deferred* along the axis (see ``espalier.layout``): backward leaves their gradients
Partial, and what is here finishes them, as the stage says. Chunks are sent in one order, the same on all
ranks (Li et al. 2020, PyTorch Distributed): after the first step that in which they were ready in it, on
rank 0. At most so many are under way.
"""

from __future__ import annotations

import json
import weakref
from collections import Counter, deque
from collections.abc import Callable, Sequence, Set
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec

import torch

from espalier.comm import Work
from espalier.comm.backend import Summing
from espalier.comm.collectives import start_gather, start_sum, start_total, sum_everywhere
from espalier.comm.control import told_by_first
from espalier.device import moved
from espalier.layout import Layout, gradient_layout
from espalier.layout.layout import R, is_partial
from espalier.meanwhile import call_if_there
from espalier.mesh import Mesh
from espalier.parallel.data import masters
from espalier.parallel.data.chunks import Chunk, ShardedParam, ShardGroup
from espalier.parallel.data.residency import OffloadStore
from espalier.parallel.data.stages import ZeroStage
from espalier.tensor import DTensor, plain, stamp
from espalier.tensor.loans import was_handed_out
from espalier.tensor.waiting import LastHook
from espalier.torch_private import getter, raw, setter

_grad, _set_grad = getter("grad"), setter("grad")
Over = tuple[ShardGroup, tuple[int, ...], int]
P = ParamSpec("P")
AT_ONCE = 2  # chunks on their way to their sums


class Gradients:
    """Finishes the gradients of parameters that are deferred along the data axes.

    Args:
        chunks: of parameters that need gradients, in the order in which they are sent.
        axes: the mesh axes over which gradients of any chunk are summed.
        stage: how gradients lie.
        dtype: in which they are sent and summed; None for their own.
        on_sent: called with a chunk whose gradients have been taken.
        store: where finished gradients go that are to be off the device.

    Attributes:
        shared: by ``id``, parameters whose gradients others add to when they are finished: they have one then
            in any case, zeros if no rank used them.
        without: those of them that no rank used.
    """

    def __init__(
        self,
        chunks: Sequence[Chunk],
        mesh: Mesh,
        axes: Sequence[int],
        stage: ZeroStage,
        dtype: torch.dtype | None = None,
        on_sent: Callable[[Chunk], None] | None = None,
        store: OffloadStore | None = None,
    ) -> None:
        self.mesh, self.axes, self.stage = mesh, tuple(axes), stage
        self.chunks: list[Chunk] = []
        self.reduced = False
        self._dtype, self._on_sent, self._store = dtype, on_sent, store
        self._sending, self._is_begun, self._is_open, self._is_shown = True, False, False, False
        self._next, self._blank = 0, False  # whose turn it is; whether something came without values
        self._is_whole = True  # the pass that began last makes the gradient whole
        self.unannounced: Callable[[bool], None] | None = None
        self._looks_ahead = False
        self._come_again: bool | None = None  # gradients, in passes with others within; None: not known yet
        self._nested = mesh.nests  # before this pass
        self.shared: Set[int] = frozenset()
        self.without: set[int] = set()
        self._had: set[int] = set()  # parameters with a gradient when this pass began
        self._flying: deque[tuple[Chunk, torch.Tensor, Summing]] = deque()
        self._spreading: deque[tuple[Chunk, Work[Any]]] = deque()
        self._parts: dict[int, list[torch.Tensor]] = {}
        # of the chunks summed along the same axes, and trained from the same time on, the last one's rows end
        # with a flag for each of their parameters: has it a gradient anywhere?
        self._last: dict[Over, Chunk] = {}
        self._here: dict[Over, list[float]] = {}
        self._flags: Counter[Over] = Counter()
        self._since: dict[int, int] = {}
        self._summed_flags: dict[Over, torch.Tensor] = {}
        self._layouts: dict[int, Layout] = {}
        # the parameters as they became ready in the first backward pass; None once the order is known
        self._came: list[int] | None = None
        self._numbered: dict[int, Chunk] = {}
        self.add(chunks)

    def add(self, chunks: Sequence[Chunk]) -> None:
        """Finish the gradients of these chunks, too: they are sent last until a backward pass has been seen.

        Those that were there keep their flags: what is under way, or was summed before, is as it was.
        """
        if not chunks:
            return
        since = len(set(self._since.values()))
        self._since.update({chunk.number: since for chunk in chunks})
        self.chunks += chunks
        for chunk in chunks:
            over = self._over(chunk)
            self._last[over] = chunk
            self._here[over] = []
            self._flags[over] += len(chunk.members)
            self._numbered[chunk.number] = chunk
        self._came = []
        for chunk in chunks:
            # of its parameters any may be the last: ranks have their gradients in other orders
            for m in chunk.members:
                if m.p.requires_grad:
                    self.watch(chunk, m)

    def watch(self, chunk: Chunk, m: ShardedParam) -> None:
        """Be told when a member of a chunk, which needs gradients by now, has one."""
        if chunk.number not in self._numbered:
            return  # nothing is left to sum
        # Python's collector does not see what such hooks hold: it would never find a cycle through them
        with raw():
            m.p.register_post_accumulate_grad_hook(LastHook(_brought, weakref.ref(self), chunk.number))
        if self._looks_ahead:
            self._watch_before(m)

    def _over(self, chunk: Chunk) -> Over:
        """The axes along which the gradients of a chunk are summed, and since when they are."""
        return chunk.shard_group, chunk.outer, self._since[chunk.number]

    def _extra(self, chunk: Chunk) -> int:
        """The flags that a chunk carries."""
        over = self._over(chunk)
        return self._flags[over] if chunk is self._last[over] else 0

    def hold(self) -> None:
        """Before the backward passes of a step: what gets gradients before :meth:`begin` waits for it."""
        self._sending, self._is_begun, self._is_open = False, True, True

    def begin(self, last: bool) -> None:
        """Before a backward pass; ``last`` of those that make one gradient.

        What ``p.grad`` shows, finished or not, is added to.

        Raises:
            RuntimeError: gradients that are finished stand where it would need parameters.
        """
        masters.check_at_hand(self.chunks, "Call one of them before the next backward pass")
        self._had.clear()
        with raw():
            for chunk in self.chunks:
                are_pieces = [self._add_to(m) for m in chunk.members]
                if self.reduced or self._is_shown or any(are_pieces):
                    self._reopen(chunk)
        self.reduced = self._is_shown = False
        self._is_begun = self._is_open = True
        self._is_whole = last
        self._sending = last or self.stage.addends == "S"
        self._next, self._blank = 0, False
        if self._came:
            self._came.clear()
        for chunk in self.chunks:
            chunk.came.clear()

    def drop_unseen(self) -> None:
        """Let go of finished pieces that somebody has dropped the sight of (``optimizer.zero_grad()``)."""
        if not self.reduced or not self.chunks or self.chunks[0].gradient is None:
            return
        if not any("_reduced" in m.p.__dict__ for chunk in self.chunks for m in chunk.members):
            for chunk in self.chunks:
                chunk.gradient = None

    def _add_to(self, m: ShardedParam) -> bool:
        """A gradient that is the same on several ranks becomes an addend: that of one of them.

        Returns:
            whether it was given by hand as a cut parameter lies: then it is shown as this rank's piece.
        """
        grad = _grad(m.p)
        if grad is None:
            return False
        self._had.add(id(m.p))
        if type(grad) is DTensor and m.dim is not None and grad._layout.cuts == m.shard.cuts != m.full.cuts:
            m.p.__dict__["_reduced"] = grad
            _set_grad(m.p, None)
            return True
        if self._is_same(m):
            if any(self.mesh.coordinate[a] for a in (*m.outer, *m.shard_group.axes)):
                plain(grad).zero_()
            stamp(grad, gradient_layout(m.full))
        return False

    def _is_same(self, m: ShardedParam) -> bool:
        """Whether a parameter has a gradient, or a piece of it, that is no addend: finished, or by hand."""
        grad = _grad(m.p)
        if type(grad) is not DTensor:
            return "_reduced" in m.p.__dict__
        return not any(is_partial(grad._layout.axes[a]) for a in (*m.outer, *m.shard_group.axes))

    def _reopen(self, chunk: Chunk) -> None:
        """This rank's pieces of gradients become addends again, with what others have made of them."""
        shown = [m.p.__dict__.pop("_reduced", None) for m in chunk.members]
        if all(grad is None for grad in shown):
            chunk.gradient = None  # there are none, or somebody has dropped them
            return
        extra = self._extra(chunk)
        if chunk.gradient is None or chunk.gradient.numel() != chunk.size + extra:
            chunk.gradient = chunk.flat(self._dtype or chunk.dtype, extra)
        if self.mesh.is_dry:
            return
        chunk.gradient[chunk.size :].zero_()
        for m, piece, grad in zip(chunk.members, chunk.pieces(chunk.gradient), shown, strict=True):
            if grad is not None:
                self._had.add(id(m.p))
            if grad is None or any(
                self.mesh.coordinate[a] for a in m.outer if not is_partial(grad._layout.axes[a])
            ):
                piece.zero_()
            elif plain(grad).data_ptr() != piece.data_ptr():
                piece.copy_(plain(grad))

    def _come(self, number: int, p: torch.Tensor) -> None:
        if torch.is_grad_enabled() and any(self.mesh.shape[axis] > 1 for axis in self.axes):
            raise ValueError(
                "backward(create_graph=True): ranks sum gradients behind it, which no graph records. Write "
                "grads = torch.autograd.grad(loss, parameters, create_graph=True): these are whole, and have "
                "a graph; for the step p.grad = grad.detach()."
            )
        if not self._is_open and self.unannounced is not None:
            with raw():
                is_finished = any(self._is_same(m) for chunk in self.chunks for m in chunk.members)
            self.unannounced(is_finished)
            self._look_ahead()
        chunk = self._numbered[number]
        chunk.came.append(p)
        if self._came is not None and self._sending:
            self._came.append(id(p))
        if len(chunk.came) < len(chunk.members) or not self._sending:
            return
        if self._come_again or (self._come_again is None and self.mesh.nests != self._nested):
            return
        while self._next < len(self.chunks) and not self.chunks[self._next].missing:
            self._send(self.chunks[self._next])

    def see_begin(self) -> None:
        """A backward pass begins, that nobody may tell of: gradients that are finished are not to be met."""
        if self._looks_ahead or self._is_open or not self.reduced:
            return
        with raw():
            are_there = any(
                _grad(m.p) is not None or "_reduced" in m.p.__dict__
                for chunk in self.chunks
                for m in chunk.members
            )
        if are_there:
            self._look_ahead()

    def _look_ahead(self) -> None:
        """Be told, from now on, before a gradient is added to what there is, and not only after.

        A program that makes passes that nobody tells of makes more, onto gradients that are finished: of a
        GAN's losses the generator's adds to the discriminator's, which has had its step.
        """
        if self._looks_ahead:
            return
        self._looks_ahead = True
        for m in (m for chunk in self.chunks for m in chunk.members):
            self._watch_before(m)

    def _watch_before(self, m: ShardedParam) -> None:
        with raw():
            trains = m.p.requires_grad  # a GAN's discriminator may be frozen for the time of this pass
            m.p.requires_grad_(True)
            m.p.register_hook(partial(call_if_there, weakref.WeakMethod(self._come_before)))
            m.p.requires_grad_(trains)

    def _come_before(self, grad: torch.Tensor) -> None:
        if not self._is_open and self.unannounced is not None:
            self.unannounced(False)

    def flush(self) -> None:
        """After a backward pass: send what it has not filled, if this one sends."""
        if self.mesh.nests != self._nested:
            self._see_nested()
            self._nested = self.mesh.nests
        if self._sending:
            while self._next < len(self.chunks):
                self._send(self.chunks[self._next])
        self._is_open = False

    def _see_nested(self) -> None:
        """Know whether gradients come several times in a pass: of each backward pass within it.

        Raises:
            RuntimeError: one has come after what there was of it was sent.
        """
        again = any(len(chunk.came) > len({*map(id, chunk.came)}) for chunk in self.chunks)
        if again and self._sending and self._come_again is False:
            raise RuntimeError(
                "A parameter is used in several blocks that are computed again by reentrant checkpointing, "
                "and was not in the first backward pass: parts of its gradient were sent before all had "
                "come. Write checkpoint(..., use_reentrant=False)."
            )
        self._come_again = bool(self._come_again) or again

    @property
    def is_idle(self) -> bool:
        """Whether the backward pass that has begun has brought nothing."""
        return not any(chunk.came for chunk in self.chunks)

    def stop(self) -> None:
        """After a backward pass that has brought nothing: what there was before is as it was."""
        if not self._sending or not (self._had or any(chunk.gradient is not None for chunk in self.chunks)):
            self._is_begun = self._is_open = False
        elif self._is_whole:
            self.finish()
        else:
            self.flush()
            self.show()

    def show(self) -> None:
        """After a backward pass that is not the last: let ``p.grad`` be what there is so far."""
        if self.stage.addends != "S" or self._is_shown or self.reduced:
            return
        if any(chunk.in_place for chunk in self.chunks):
            return
        while self._flying:
            self._land()
        if self._store is not None:
            self._store.settle()
        with raw():
            self._hand_out(is_whole=False)
        self._is_shown = True

    def _send(self, chunk: Chunk) -> None:
        self._next += 1
        if len(self._flying) == AT_ONCE:
            self._land()
        n = chunk.shard_group.n
        with raw():
            grads = [_grad(m.p) for m in chunk.members]
            self._blank = self._blank or any(g is None for g in grads)
            dtype = self._dtype or chunk.dtype
            locals_sent = [None if g is None else plain(g) for g in grads]
            here, extra = self._here[self._over(chunk)], self._extra(chunk)
            had = [id(m.p) in self._had for m in chunk.members]
            here += [float(g is not None or before) for g, before in zip(grads, had, strict=True)]
            if self.stage.gradients == "R":
                rows, flags, self._parts[id(chunk)] = chunk.line_up(n, dtype, locals_sent, extra)
            else:
                rows = chunk.rows(n, dtype, extra)
                chunk.pack(rows, locals_sent)
                flags = rows[:, chunk.size :]
            if extra:
                if all(here):
                    flags.fill_(1)
                else:
                    flags.copy_(moved(torch.tensor(here, dtype=dtype, device="cpu"), rows.device))
                here.clear()
            for m in chunk.members:
                _set_grad(m.p, None)
        del grads, locals_sent  # before what they are sent by takes memory, too
        if self._on_sent is not None:
            self._on_sent(chunk)
        shard_group, under_way = chunk.shard_group, None
        if self.stage.gradients == "R" and not chunk.outer:
            under_way = start_total(rows, shard_group.mesh, shard_group.axis)
        self._flying.append((chunk, rows, under_way or start_sum(rows, shard_group.mesh, shard_group.axis)))

    def _land(self) -> None:
        """Wait for the oldest sum."""
        chunk, rows, summing = self._flying.popleft()
        if self.stage.gradients == "R":
            chunk.gradient = rows.view(-1)
            summing.wait(self._own_row(chunk))
            if summing.everywhere:
                return
            if self._is_summed_early(chunk):
                self._sum_outer(chunk)
                while len(self._spreading) == AT_ONCE:
                    self._arrive()
                self._spread(chunk)
            elif not chunk.outer:
                self._spread(chunk)
            return
        del rows
        if chunk.gradient is not None:
            self.bring(chunk)
            summing.wait(chunk.gradient, add=True)
            self.leave(chunk)
            return
        chunk.gradient = summing.place
        if chunk.gradient is None:
            chunk.gradient = chunk.flat(self._dtype or chunk.dtype, self._extra(chunk))
        summing.wait(chunk.gradient)
        if self._is_summed_early(chunk):
            self._sum_outer(chunk)
            self._put_in_place(chunk)
        self.leave(chunk, new=True)

    def _is_summed_early(self, chunk: Chunk) -> bool:
        """Whether a chunk's gradients go to their place before the backward pass is over.

        Its copies' ranks must sum in this rank's order: those along the axes that have agreed on it do.
        """
        return chunk.in_place and all(axis in self.axes for axis in chunk.outer)

    def _sum_outer(self, chunk: Chunk) -> None:
        """Sum what is this rank's over the axes along which others have the same."""
        assert chunk.gradient is not None
        pieces = self._own_row(chunk) if self.stage.gradients == "R" else chunk.gradient
        for axis in chunk.outer:
            sum_everywhere(pieces, self.mesh, axis)

    def _put_in_place(self, chunk: Chunk) -> None:
        """Let a chunk's gradients, which are finished, take the place of its parameters."""
        assert chunk.gradient is not None
        if self._extra(chunk):
            self._summed_flags[self._over(chunk)] = self._flags_of(chunk).clone()
        with raw():
            parts = self._parts.pop(id(chunk), None) or chunk.pieces(chunk.gradient)
            self._parts[id(chunk)] = masters.lend(chunk, parts)
        chunk.gradient = None

    def bring(self, chunk: Chunk, *, on_host: bool = False) -> None:
        """Let what a chunk has of its gradients be on the device, or in the host's memory."""
        if "gradients" not in chunk.places or chunk.gradient is None:
            return
        assert self._store is not None
        if self._store.is_leaving(_key(chunk)):
            self._store.settle()
        shown = [m.p.__dict__.get("_reduced") for m in chunk.members]
        written = any(grad is not None and was_handed_out(grad) for grad in shown)
        taken = self._store.take(_key(chunk), [chunk.gradient], on_host=on_host, written=written)
        _show_moved(chunk, *taken)

    def leave(self, chunk: Chunk, *, new: bool = False) -> None:
        """Start to take the gradients of a chunk away, if they are to be off the device.

        Args:
            new: there were none; a program may hold those of before, which it has dropped.
        """
        if "gradients" not in chunk.places or chunk.gradient is None:
            return
        assert self._store is not None
        self._store.settle()
        away = chunk.places["gradients"]
        self._store.put(
            _key(chunk), [chunk.gradient], away, lambda shown: _show_moved(chunk, *shown), new=new
        )

    def _rows(self, chunk: Chunk) -> torch.Tensor:
        assert chunk.gradient is not None
        return chunk.gradient.view(chunk.shard_group.n, -1)

    def _own_row(self, chunk: Chunk) -> torch.Tensor:
        return self._rows(chunk)[chunk.shard_group.here]

    def _spread(self, chunk: Chunk) -> None:
        """Start to give all ranks the sums of a chunk."""
        shard_group = chunk.shard_group
        self._spreading.append(
            (chunk, start_gather(self._rows(chunk), None, shard_group.mesh, shard_group.axis))
        )

    def _arrive(self) -> None:
        """Wait until the oldest of them is everywhere."""
        chunk, pending = self._spreading.popleft()
        pending.wait()
        if chunk.in_place:
            self._put_in_place(chunk)

    def finish(self) -> None:
        """Wait until every gradient is the sum over the axes, and lies as the stage says.

        A parameter that no rank used keeps ``grad = None``; one that some rank used has it on all.
        """
        if not self.chunks or (self.reduced and not self._has_others()):
            return
        if self.reduced or not self._sending or not self._is_begun:
            self.begin(last=True)
            for chunk in self.chunks:
                chunk.came.extend(m.p for m in chunk.members if m.p.grad is not None)
        self.flush()
        while self._flying:
            self._land()
        # in an order that hangs on no rank: the copies' ranks may have sent theirs in others
        for chunk in sorted(self.chunks, key=lambda chunk: chunk.number):
            if not chunk.outer or self._is_summed_early(chunk):
                continue
            whole = self.stage.gradients == "R"
            if not whole:
                self.bring(chunk)
            self._sum_outer(chunk)
            if whole:
                self._spread(chunk)
            elif chunk.in_place:
                self._put_in_place(chunk)
            else:
                self.leave(chunk)
        while self._spreading:
            self._arrive()
        if self._store is not None:
            self._store.settle()
        with raw():
            self._hand_out()
        self.reduced, self._is_begun = True, False

    def _has_others(self) -> bool:
        """Whether somebody has put a gradient that does not lie as finished ones do in the place of one."""
        with raw():
            for m in (m for chunk in self.chunks for m in chunk.members):
                grad = _grad(m.p)
                known = grad is None or getattr(grad, "_layout", None) is self._layouts.get(id(m), grad)
                if not known and not (self.stage.gradients == "R" and self._is_same(m)):
                    return True
        return False

    def _hand_out(self, *, is_whole: bool = True) -> None:
        used = self._used()
        whole = self.stage.gradients == "R"
        unused = set() if used is None else {key for key, is_used in used.items() if not is_used}
        self.without = unused & self.shared if is_whole else set()
        for chunk in self.chunks:
            if whole or chunk.in_place:
                parts = self._parts.pop(id(chunk))
            else:
                assert chunk.gradient is not None
                parts = chunk.pieces(chunk.gradient)
            for m, part in zip(chunk.members, parts, strict=True):
                layout = self._finished(m) if is_whole else self._summed(m, m.shard_group.axes)
                if id(m.p) in unused and id(m.p) not in self.without:
                    _set_grad(m.p, None)
                elif whole:
                    wide = m.p.grad_dtype
                    _set_grad(m.p, stamp(part if part.dtype is wide else part.to(wide), layout))
                else:
                    m.p._reduced = stamp(part, layout)  # type: ignore[attr-defined]
            if whole:
                chunk.gradient = None

    def _finished(self, m: ShardedParam) -> Layout:
        """How a finished gradient lies."""
        known = self._layouts.get(id(m))
        if known is None:
            known = self._layouts[id(m)] = self._summed(m, (*m.outer, *m.shard_group.axes))
        return known

    def _summed(self, m: ShardedParam, axes: Sequence[int]) -> Layout:
        """How a gradient lies that was summed along some axes."""
        layout = gradient_layout(m.full if self.stage.gradients == "R" else m.shard)
        for axis in axes:
            if is_partial(layout.axes[axis]):
                layout = layout.with_axis(axis, R)
        return layout

    def _used(self) -> dict[int, bool] | None:
        """For each parameter, whether a rank has a gradient for it; None where this one has them all."""
        if self.mesh.is_dry or not (self._blank or any(chunk.missing for chunk in self.chunks)):
            return None
        used: dict[int, bool] = {}
        for over, last in self._last.items():
            flags = (self._summed_flags[over] if last.in_place else self._flags_of(last)).tolist()
            members = [m for chunk in self.chunks if self._over(chunk) == over for m in chunk.members]
            used.update((id(m.p), n != 0) for m, n in zip(members, flags, strict=True))  # complex ones, too
        return used

    def _flags_of(self, last: Chunk) -> torch.Tensor:
        """What stands behind the gradients of a chunk."""
        assert last.gradient is not None
        start = last.elements if self.stage.gradients == "R" else last.size
        return last.gradient[start : start + self._flags[self._over(last)]]

    def _settle_order(self) -> None:
        """From now on chunks are sent as they became ready; those that did not, last."""
        at = {key: i for i, key in enumerate(self._came or ())}
        ids = [[id(m.p) for m in chunk.members] for chunk in self.chunks]
        last = [max(at.get(key, len(at)) for key in of) for of in ids]
        came = sorted(range(len(last)), key=last.__getitem__)
        if len(came) > 1:
            agreed_order = told_by_first(self.mesh, self.axes, json.dumps(came), "order")
            self.chunks = [self.chunks[i] for i in json.loads(agreed_order)]
            self._last = {self._over(chunk): chunk for chunk in self.chunks}
        self._came = None

    def forget(self) -> None:
        """After a step: there are no gradients, nor are any under way."""
        while self._flying:
            self._land()
        while self._spreading:
            self._arrive()
        if self._store is not None:
            self._store.settle()
        self._parts.clear()
        self._summed_flags.clear()
        self.settle()
        for chunk in self.chunks:
            chunk.gradient = None
            chunk.came.clear()
            masters.restore(chunk)
        self._had.clear()
        self.reduced = self._is_begun = self._is_open = self._is_shown = False

    def have_shared(self) -> None:
        """Others have added to what they share: none that there is is to be dropped."""
        self.without = set()

    def settle(self) -> None:
        """After a step, also if its gradients stay: from now on the order of chunks is known."""
        if self._came:
            self._settle_order()


def _of_each(
    method: Callable[Concatenate[Gradients, P], None],
) -> Callable[Concatenate[AllGradients, P], None]:
    @wraps(method)
    def of_each(self: AllGradients, *args: P.args, **kwargs: P.kwargs) -> None:
        for part in self.parts:
            method(part, *args, **kwargs)

    return of_each


class AllGradients:
    """The gradients of a model's parts, each finished by itself: those of a pipeline's stages.

    Attributes:
        parts: in the order of the model.
    """

    def __init__(self, parts: Sequence[Gradients]) -> None:
        self.parts = list(parts)

    begin = _of_each(Gradients.begin)
    flush = _of_each(Gradients.flush)
    drop_unseen = _of_each(Gradients.drop_unseen)
    stop = _of_each(Gradients.stop)
    show = _of_each(Gradients.show)
    settle = _of_each(Gradients.settle)
    have_shared = _of_each(Gradients.have_shared)
    finish = _of_each(Gradients.finish)
    forget = _of_each(Gradients.forget)

    def share(self, ps: Set[int]) -> None:
        """Others add to the gradients of these parameters, by ``id``, when they are finished."""
        for part in self.parts:
            part.shared = ps

    @property
    def without(self) -> set[int]:
        """See :class:`Gradients`."""
        return set().union(*(part.without for part in self.parts))

    def announce(self, unannounced: Callable[[bool], None]) -> None:
        """Have this called when a gradient comes outside a pass: is what it adds to finished?"""
        for part in self.parts:
            part.unannounced = unannounced
            part.mesh.before_going.add(part)

    @property
    def chunks(self) -> list[Chunk]:
        """In the order in which they are sent."""
        return [chunk for part in self.parts for chunk in part.chunks]

    @property
    def is_idle(self) -> bool:
        """See :meth:`Gradients.is_idle`; where nothing is summed, nobody can tell."""
        return bool(self.chunks) and all(part.is_idle for part in self.parts)

    def bring(self, chunk: Chunk, *, on_host: bool = False) -> None:
        """See :meth:`Gradients.bring`."""
        if self.parts:
            self.parts[0].bring(chunk, on_host=on_host)

    def leave(self, chunk: Chunk) -> None:
        """See :meth:`Gradients.leave`."""
        if self.parts:
            self.parts[0].leave(chunk)


def _brought(gradients: weakref.ref[Gradients], number: int, p: torch.Tensor) -> None:
    """A backward pass has brought a parameter's gradient: called for each of them."""
    if (there := gradients()) is not None:
        there._come(number, p)


def gradient_of(p: torch.Tensor) -> Any:
    """``p.grad``, past DTensor's Python getter where it would say the same."""
    return shown_gradient(p, _grad(p))


def shown_gradient(p: torch.Tensor, grad: Any) -> Any:
    """What ``p.grad`` says where torch has ``grad``."""
    if grad is None:
        return p.__dict__.get("_reduced")
    return grad if type(grad) is DTensor else p.grad


def _show_moved(chunk: Chunk, flat: torch.Tensor) -> None:
    """Gradients of a chunk are elsewhere now."""
    assert chunk.gradient is not None
    before, chunk.gradient = chunk.pieces(chunk.gradient), flat
    for m, old, new in zip(chunk.members, before, chunk.pieces(flat), strict=True):
        reduced = m.p.__dict__.get("_reduced")
        if reduced is not None and plain(reduced).data_ptr() == old.data_ptr():
            m.p._reduced = stamp(new, reduced._layout)  # type: ignore[attr-defined]


def _key(chunk: Chunk) -> str:
    return f"gradients-{chunk.number}"
