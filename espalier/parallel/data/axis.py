"""The data axis of a plan: parameters, gradients and states in chunks, as the stage says."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._C import DisableTorchFunctionSubclass as raw

from espalier.comm import Pending
from espalier.comm.flat import start_gather
from espalier.layout import Layout
from espalier.mesh import Mesh
from espalier.parallel.data.budget import Budget
from espalier.parallel.data.chunks import Chunk, Lane, Member, line_up, show
from espalier.parallel.data.gathered import bring_home, home_of, show_pieces
from espalier.parallel.data.gathering import Gathering
from espalier.parallel.data.gradients import AllGradients, Gradients, gradient_of
from espalier.parallel.data.inplace import InPlace, take_over
from espalier.parallel.data.masters import Masters, cast
from espalier.parallel.data.residency import Shelf, choose
from espalier.parallel.data.stages import STAGES
from espalier.parallel.data.streaming import Step, Streaming
from espalier.parallel.data.units import by_part, by_size, by_unit, smallest
from espalier.parallel.offload import Offload
from espalier.parallel.plan import Plan
from espalier.tensor import plain, stamp
from espalier.tensor.deferred import lay_out_parameters

_grad: Any = torch.Tensor.grad


class DataAxis:
    """What a plan does along its data axes.

    Attributes:
        stage: the row of the table of stages.
        members: all parameters.
        gradients: finishes gradients; of each of the model's ``parts``, and of what several share, by itself.
        gathering: gathers parameters; None where they stay whole.
        chunks: of the trained parameters.
        masters: float32 copies of parameters, for the optimizer.
    """

    def __init__(
        self,
        model: nn.Module,
        layouts: Mapping[str, Layout],
        mesh: Mesh,
        plan: Plan,
        parts: Sequence[Collection[str]] = (),
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        self.mesh, self.stage = mesh, STAGES[plan.zero]
        axes = tuple(mesh.axis(name) for name in plan.data_axes)
        alone = all(mesh.shape[a] == 1 for a in axes)
        if alone:
            self.stage = STAGES[_alone(plan.offload)]
        low = plan.precision.parameters
        dtype = None if low is None else getattr(torch, low)
        # what lies on a mesh without this rank has no values here
        named = [(name, p) for name, p in model.named_parameters() if layouts[name].mesh.is_member]
        self.members = [
            Member(name, p, layouts[name], *_own(axes, layouts[name], mesh), dtype) for name, p in named
        ]
        self._frozen = [m for m in self.members if not m.p.requires_grad]
        cut = self.stage.parameters == "S"
        used: list[tuple[list[nn.Module], Chunk]] = []
        groups: list[list[Chunk]] = []
        for members in by_part(self.members, parts):
            if cut:
                users = by_unit(members, model)
                used += users
                groups.append([chunk for _, chunk in users if chunk.members[0].p.requires_grad][::-1])
            else:
                trained = [m for m in members if m.p.requires_grad]
                groups.append(by_size(trained[::-1], plan.chunk_megabytes))
        self.chunks = [chunk for group in groups for chunk in group]
        chunks = [chunk for _, chunk in used] if cut else self.chunks
        self._shelf = self._place(chunks, plan.offload)
        self.masters = Masters(self.chunks, pieces=self.stage.states == "S")
        self._keeps = False  # gradients, in the step under way
        self._in_place = InPlace(self.masters) if plan.gradients == "in-place" else None
        self.streaming = self._streamed()
        if self.streaming is not None and optimizer is not None:
            self.streaming.reserve(optimizer)
        self._lay_out(chunks)
        self._copied = self._lined_up(plan.chunk_megabytes * 1e6)
        self.gathering = None
        if cut:
            self.gathering = Gathering(used, mesh, plan.prefetch_megabytes * 1e6, self._shelf)
        self.masters.remember()
        reduce = None if plan.precision.reduce is None else getattr(torch, plan.precision.reduce)
        if reduce is torch.float32:
            with raw():
                for m in (m for chunk in self.masters.chunks for m in chunk.members):
                    m.p.grad_dtype = reduce  # several uses, and micro-batches, add up in it too
        on_sent = None if self.gathering is None else self.gathering.sent
        # along axes of one rank nothing is left to sum
        done = alone and self.stage.gradients == "R" and self._in_place is None
        summed = [[c for c in group if not done or _is_summed(c, mesh)] for group in groups]
        more: Any = {"dtype": reduce, "on_sent": on_sent, "shelf": self._shelf, "in_place": self._in_place}
        self.gradients = AllGradients([Gradients(group, mesh, axes, self.stage, **more) for group in summed])
        self.budget: Budget | None = None
        if self.streaming is not None and plan.offload.budget_gigabytes is not None:
            kinds = {"states": self.chunks, "gradients": self.chunks, "parameters": chunks if cut else []}
            self.budget = Budget(plan.offload, kinds, self.streaming, mesh)

    def _streamed(self) -> Streaming | None:
        """Updates the chunks that have a turn of their own, if any have."""
        moved = [chunk for chunk in self.chunks if chunk.has_turn]
        shelf = self._shelf or Shelf(self.mesh.device(), None, dry=self.mesh.is_dry)
        return Streaming(moved, shelf, self.mesh, self.stage.states == "S", self._turn) if moved else None

    def _lay_out(self, chunks: Sequence[Chunk]) -> None:
        """Lay the parameters out; each chunk goes where it lies as soon as it has all of them."""
        cut = self.stage.parameters == "S"
        by_id = {id(m.p): m for m in self.members}
        chunk_of = {id(m.p): chunk for chunk in chunks for m in chunk.members}
        missing = {id(chunk): len(chunk.members) for chunk in chunks}

        def come(p: nn.Parameter) -> None:
            chunk = chunk_of.get(id(p))
            if chunk is None:
                cast(by_id[id(p)])
                return
            missing[id(chunk)] -= 1
            if missing[id(chunk)] == 0:
                self._move_in(chunk)

        lay_out_parameters([(m.p, m.shard if cut else m.full) for m in self.members], come)

    def _move_in(self, chunk: Chunk) -> None:
        """Let a chunk's parameters, which are laid out, go where they lie between their uses."""
        if chunk.has_master:
            self.masters.make(chunk)
        for m in chunk.members:
            cast(m)
        if self.streaming is not None:
            self.streaming.leave_master(chunk)
        if self.stage.parameters == "S":
            bring_home(chunk)
            self._leave_home(chunk)
        if self._shelf is not None:
            self._shelf.settle()

    def _lined_up(self, most: float) -> set[int]:
        """Let whole parameters that the optimizer updates lie one after the other.

        Returns:
            by ``id``, the members of which it updates copies of this rank's pieces; they have so many bytes.
        """
        plainly = [chunk for chunk in self.chunks if chunk.master is None and not chunk.places]
        if self.stage.states == "R":
            for chunk in plainly:
                line_up(chunk)
        if self.stage.states == "R" or self.stage.parameters == "S":
            return set()
        return smallest(plainly, most)

    def _place(self, chunks: Sequence[Chunk], offload: Offload) -> Shelf | None:
        """Give each chunk its places; gives where to put what is off the device."""
        for i, chunk in enumerate(chunks):
            chunk.number = i
        for kind, share in offload.shares.items():
            of = chunks if kind == "parameters" else self.chunks
            if share.place != "device":
                ratio = 1.0 if share.ratio == "auto" else share.ratio
                for chunk, away in zip(of, choose([chunk.largest for chunk in of], ratio), strict=True):
                    if away:
                        chunk.places[kind] = share.place
        used = {place for chunk in chunks for place in chunk.places.values()}
        if not used:
            return None
        directory = offload.directory if "disk" in used else None
        return Shelf(self.mesh.device(), directory, dry=self.mesh.is_dry)

    @property
    def resized(self) -> list[torch.UntypedStorage]:
        """Storages that are emptied and filled as their parameters are used."""
        return [] if self.gathering is None else [x for g in self.gathering.held for x in g.storages]

    def watched(self, outside: Callable[[torch.Tensor], object]) -> list[torch.Tensor]:
        """What lives on the device between steps; ``outside`` is told of what is to be off it from now on."""
        if self._shelf is not None:
            self._shelf.watched_by(outside)
        held = []
        for chunk in self.chunks if self.gathering is None else [g.chunk for g in self.gathering.held]:
            for x, kind in ((chunk.home, "parameters"), (chunk.master, "states")):
                if x is not None and kind in chunk.places:
                    outside(x)
                elif x is not None:
                    held.append(x)
        return held if self.gathering is not None else [*held, *(plain(m.p.detach()) for m in self.members)]

    def fit(self, peak: int, optimizer: torch.optim.Optimizer) -> bool:
        """See :meth:`Budget.fit`; says whether the budget is settled."""
        assert self.budget is not None
        self._settle()
        self.budget.fit(peak, optimizer)
        self.masters.remember()
        return self.budget.is_settled

    def begin_forward(self) -> None:
        """Before the model is called.

        Raises:
            ValueError: a parameter that was frozen when this was made needs a gradient now.
            RuntimeError: gradients stand where the parameters stood, and others are wanted.
        """
        if self._in_place is not None and torch.is_grad_enabled():
            self._in_place.check("Another forward pass is possible under torch.no_grad()")
        thawed = [m.name for m in self._frozen if m.p.requires_grad]
        if thawed:
            named = ", ".join(thawed[:3]) + (", ..." if len(thawed) > 3 else "")
            raise ValueError(
                f"{named}: needed no gradient when the engine was made, and does now; nobody would sum it "
                "over the ranks. Call requires_grad_(True) before initialize; (False) is fine at any time."
            )
        self.gradients.drop_unseen()
        if self.gathering is not None:
            self.gathering.begin()
            if self._in_place is not None:
                self.masters.follow()

    def end_backward(self) -> None:
        """After a backward pass."""
        self.gradients.flush()
        self.end_step()

    def end_step(self) -> None:
        """After the last backward pass of a step."""
        if self.gathering is not None:
            self.gathering.end()

    def counted(self) -> dict[str, torch.Tensor]:
        """Of each gradient what this rank alone counts in a sum over the mesh; plain, in the model's order.

        That is its piece along the data axis, on coordinate 0 of the axes along which others hold the same.
        So every stage adds up the same numbers in the same order.
        """
        found = {}
        alone = self.mesh.size() == 1 and not self.mesh.is_dry
        with raw():
            for m in self.members:
                if not m.counts:
                    continue
                grad: Any = _grad.__get__(m.p) if alone else None
                if grad is not None:  # however it lies, it is all of it
                    found[m.name] = plain(grad).contiguous()
                    continue
                if (grad := gradient_of(m.p)) is None:
                    continue
                here, layout = plain(grad), grad._layout
                assert layout.is_firm or all(self.mesh.shape[a] == 1 for a in layout.partial), "to reduce"
                if layout.axes[m.lane.axes[0]] != m.dim:
                    here = m.piece(here)
                # what is off a dry mesh's device stands on one element
                found[m.name] = here if self.mesh.is_dry and 0 in here.stride() else here.contiguous()
        return found

    @contextmanager
    def precise(self) -> Iterator[None]:
        """While open, each parameter that has a master is that, lying as the stage says of states."""
        self._settle()
        away = [] if self.gathering is None else [g.chunk for g in self.gathering.held if g.is_away]
        others = [chunk for chunk in away if chunk.master is None]
        with self._shown([*self.masters.chunks, *others], on_device=True):
            yield

    @contextmanager
    def stored(self) -> Iterator[None]:
        """While open, each parameter that has a master is that, wherever it is kept."""
        self._settle()
        with self._shown(self.masters.chunks):
            yield

    @contextmanager
    def updating(self, *, exchange: bool = True, keep: bool = False) -> Iterator[None]:
        """While open, each trained parameter is what the optimizer is to update here, with its gradient.

        That is the parameter, its master, or this rank's piece of either; a master's gradient is float32.
        After it, all ranks compute with what was updated, if there was an ``exchange``; and parameters have
        their gradients again, if these are to be kept.
        """
        self._settle()
        with self._opened(self.chunks, keep):
            yield
        if exchange:
            self._exchange()
        for chunk in self.chunks:
            chunk.own = None

    def place(self, optimizer: torch.optim.Optimizer) -> None:
        """Before the first step: states go where the plan says.

        Raises:
            DiskError: there is no space for them.
        """
        if self.streaming is not None:
            self.streaming.place(optimizer)

    def update(self, optimizer: torch.optim.Optimizer, step: Step, keep: bool = False) -> None:
        """One step of the optimizer, by ``step(optimizer)`` where nothing is off the device.

        Args:
            keep: gradients stay (not those in the parameters' memory).

        Raises:
            DiskError: see :meth:`Streaming.agree`.
        """
        if self.streaming is None:
            with self.updating(keep=keep):
                step(optimizer)
            return
        self._settle()
        self._keeps = keep
        with self._opened([chunk for chunk in self.chunks if not chunk.has_turn], keep):
            self.streaming.update(optimizer, step)
        self._exchange()
        self.streaming.agree()

    @contextmanager
    def _turn(self, chunk: Chunk, on_host: bool) -> Iterator[None]:
        """While open, a chunk of which something is off the device is what the optimizer updates."""
        self.gradients.bring(chunk, on_host=on_host)
        if "parameters" in chunk.places:
            assert self._shelf is not None
            (chunk.home,) = self._shelf.take(f"parameters-{chunk.number}", home_of(chunk), on_host=on_host)
            show_pieces(chunk, chunk.home)
        take_over(chunk)
        with self._opened([chunk], self._keeps):
            yield
        if self._keeps:
            self.gradients.leave(chunk)
        elif "gradients" in chunk.places:
            chunk.gradient = None
        if chunk.lent:
            assert self._in_place is not None
            self._in_place.restore(chunk)
        elif chunk.master is not None:
            self.masters.write(chunk)
        self._leave_home(chunk)

    def _leave_home(self, chunk: Chunk) -> None:
        """Start to take this rank's pieces of parameters away, if they are to be off the device."""
        if "parameters" in chunk.places:
            assert self._shelf is not None and chunk.home is not None

            def away(shown: list[torch.Tensor]) -> None:
                show_pieces(chunk, shown[0])
                chunk.is_written = False

            self._shelf.put(f"parameters-{chunk.number}", [chunk.home], chunk.places["parameters"], away)

    @contextmanager
    def _opened(self, chunks: Sequence[Chunk], keep: bool = False) -> Iterator[None]:
        """While open, the parameters of chunks are what the optimizer updates, with its gradients."""
        chunks = [c for c in chunks if self.stage.states == "S" or c.master is not None]
        kept = [_gradients(chunk) for chunk in chunks] if keep else []
        grads = [self._take_gradients(chunk) for chunk in chunks]
        if self._copied:
            for chunk in chunks:
                if chunk.master is None and not chunk.places:
                    self._cut_out(chunk)
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
        for give_back in kept:
            give_back()

    def _cut_out(self, chunk: Chunk) -> None:
        """Find this rank's pieces of whole parameters; copies of small ones, one after the other."""
        chunk.own = pieces = list(chunk.views().pieces)
        some = [i for i, m in enumerate(chunk.members) if id(m) in self._copied]
        if some:
            with raw(), torch.no_grad():
                before = [pieces[i] for i in some]
                sizes = [piece.numel() for piece in before]
                copies = torch.empty(sum(sizes), dtype=chunk.dtype, device=chunk.device).split(sizes)
                after = [copy.view(piece.shape) for copy, piece in zip(copies, before, strict=True)]
                torch._foreach_copy_(after, before)
            for i, copy in zip(some, after, strict=True):
                pieces[i] = copy

    def _settle(self) -> None:
        """Parameters are what they are between passes, and what others have changed is known."""
        if self.gathering is not None:
            self.gathering.begin()
        self.masters.follow()

    @contextmanager
    def _shown(self, chunks: Sequence[Chunk], *, on_device: bool = False) -> Iterator[None]:
        """While open, the parameters of chunks are what the optimizer updates, or copies on the device."""
        kept = []
        with raw():
            for chunk in chunks:
                updated = chunk.own if chunk.master is None else self.masters.of(chunk)
                whole = chunk.views() if self.gathering is None else None
                here = [plain(m.p.data) for m in chunk.members] if whole is None else whole.wholes
                if updated is None:
                    updated = here if whole is None else whole.pieces
                for m, x, shown in zip(chunk.members, here, updated, strict=True):
                    kept.append((m, x, m.p._layout))  # type: ignore[attr-defined]
                    layout = m.shard if self.stage.states == "S" else m.full
                    show(m.p, shown.to(chunk.device) if on_device else shown, layout)
        try:
            yield
        finally:
            with raw():
                for m, x, layout in kept:
                    show(m.p, x, layout)

    def _take_gradients(self, chunk: Chunk) -> list[torch.Tensor | None]:
        """The gradients of a chunk's members, off them, as the optimizer needs them."""
        found: list[torch.Tensor | None] = []
        dtype = chunk.dtype if chunk.master is None else chunk.master.dtype
        with raw():
            for m in chunk.members:
                grad = gradient_of(m.p)
                if grad is not None and chunk.places:
                    grad = self._beside(chunk, grad)
                if grad is not None and grad.dtype is not dtype:
                    layout = grad._layout
                    grad = stamp(plain(grad).to(dtype), layout)
                m.p.__dict__.pop("_reduced", None)
                _grad.__set__(m.p, None)
                found.append(grad)
            if chunk.master is not None:
                chunk.gradient = None  # else both would live on while the optimizer works
        return found

    def _beside(self, chunk: Chunk, grad: torch.Tensor) -> torch.Tensor:
        """A gradient where the chunk's parameters are updated: on the device or in the host's memory."""
        there = chunk.master if chunk.master is not None else chunk.home
        if self._shelf is None or there is None or there.device == grad.device:
            return grad
        to = self._shelf.to_host if there.device.type == "cpu" else self._shelf.to_device
        return stamp(to([plain(grad)])[0], grad._layout)  # type: ignore[attr-defined]

    def _exchange(self) -> None:
        """Let all ranks compute with what each has updated."""
        for chunk in self.masters.chunks:
            if not chunk.has_turn:
                self.masters.write(chunk)
        if self.stage.states == "S" and self.stage.parameters == "R":
            with raw():
                self._exchange_pieces()
        self.masters.remember()

    def _exchange_pieces(self) -> None:
        """Gather each chunk's pieces into the parameters, a few chunks at a time."""
        under_way = deque[tuple[Chunk, torch.Tensor, Pending]]()

        def land() -> None:
            chunk, rows, pending = under_way.popleft()
            pending.wait()
            chunk.unpack(rows, chunk.views().places)

        for chunk in self.chunks:
            lane = chunk.lane
            rows = chunk.rows(lane.n, chunk.dtype)
            if chunk.master is not None:
                rows[lane.here].copy_(chunk.master)
            else:
                torch._foreach_copy_(chunk.pieces(rows[lane.here]), chunk.own or chunk.views().pieces)
                chunk.own = None
            under_way.append((chunk, rows, start_gather(rows, None, lane.mesh, lane.axis)))
            if len(under_way) > 2:
                land()
        while under_way:
            land()


def _own(axes: tuple[int, ...], full: Layout, mesh: Mesh) -> tuple[tuple[int, ...], Lane]:
    """Axes along which a parameter is the same, and its gradient is summed: copies, and those that cut it.

    The latter are among those of data. Along others that it is varied along it is copied.
    """
    own = [a for a in axes if not isinstance(full.axes[a], int)]
    copies = [a for a in own if mesh.names[a] == "replicate"]
    more = [a for a in full.varied if a not in axes and mesh.shape[a] > 1]
    return (*copies, *more), Lane.along(mesh, [a for a in own if a not in copies])


def _gradients(chunk: Chunk) -> Callable[[], None]:
    """What gives a chunk's parameters the gradients again that they have now."""
    flat = chunk.gradient
    with raw():
        held = [(m.p, m.p.__dict__.get("_reduced"), _grad.__get__(m.p)) for m in chunk.members]

    def give_back() -> None:
        chunk.gradient = flat
        with raw():
            for p, reduced, grad in held:
                _grad.__set__(p, grad)
                if reduced is not None:
                    p._reduced = reduced  # type: ignore[attr-defined]

    return give_back


def _is_summed(chunk: Chunk, mesh: Mesh) -> bool:
    return any(mesh.shape[a] > 1 for a in chunk.outer)


def _alone(offload: Offload) -> int:
    """The stage of a data axis of one rank: what is off the device lies there in pieces."""
    if offload.parameters.place != "device":
        return 3
    return 2 if offload.gradients.place != "device" else 0
