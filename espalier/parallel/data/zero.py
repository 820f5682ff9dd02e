"""The data axis of a plan: parameters, gradients and states in chunks, as the stage says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import increment_version

from espalier.blocks import named_parameters_in
from espalier.layout import Layout, gradient_layout
from espalier.mesh import Mesh
from espalier.parallel.data import masters
from espalier.parallel.data.budget import Budget
from espalier.parallel.data.chunks import (
    Chunk,
    ShardedParam,
    ShardGroup,
    by_part,
    by_size,
    by_unit,
    copy_smallest,
    set_gradient,
    show,
    shown,
)
from espalier.parallel.data.exchange import Exchange
from espalier.parallel.data.gradients import AllGradients, Gradients, gradient_of, shown_gradient
from espalier.parallel.data.offloaded_step import (
    OffloadedChunk,
    OffloadedStep,
    OptimizerStates,
    OptimizerStep,
)
from espalier.parallel.data.prefetch import Prefetcher
from espalier.parallel.data.residency import Carried, OffloadStore, choose
from espalier.parallel.data.stages import STAGES
from espalier.parallel.data.unshard import bring_home, home_of, show_pieces
from espalier.parallel.plan import PLACES, Offload, Plan, Updater
from espalier.tensor import plain, stamp
from espalier.tensor.deferred import lay_out_parameters
from espalier.tensor.live_memory import unseen
from espalier.tensor.loans import Written
from espalier.tensor.rules.meta import of_dtensors
from espalier.tensor.waiting import Seen, WaitingHooks
from espalier.torch_private import (
    as_in_backward,
    getter,
    gradient_hooks,
    memory_id,
    method,
    raw,
    setter,
    taken_gradient_hooks,
    taken_hooks_after,
)

# the C functions themselves: this is the way of every step
_grad, _set_grad, _in_a_row = getter("grad"), setter("grad"), method("is_contiguous")


class ZeroState:
    """What a plan does along its data axes.

    Attributes:
        stage: the row of the table of stages.
        members: all parameters.
        gradients: finishes gradients; of each of the model's ``parts``, and of what several share, by itself.
        prefetcher: gathers parameters; None where they stay whole.
        exchange: gathers those that stay whole, after an update of pieces.
        chunks: of the trained parameters.
        copies: how many pieces have so many bytes; the smallest of them are copied for an update.
        lines: the trained parameters of each part as they go into chunks, where these are by size.
        own: the ``id`` of each of the model's parameters here.
        has_thawed: whether parameters that were frozen have come to be trained; who has seen it unsets it.
        strangers: what sees to optimizers that step by themselves (see ``Mesh.strangers``), for it to live.
    """

    def __init__(
        self,
        model: nn.Module,
        layouts: Mapping[str, Layout],
        mesh: Mesh,
        plan: Plan,
        parts: Sequence[Collection[str]] = (),
        optimizer: torch.optim.Optimizer | None = None,
        float8: Collection[str] = (),
    ) -> None:
        self.mesh, self.stage, self._plan, self._parts = mesh, STAGES[plan.zero], plan, parts
        axes = tuple(mesh.axis(name) for name in plan.data_axes)
        self._is_alone = all(mesh.shape[a] == 1 for a in axes)
        if self._is_alone:
            self.stage = STAGES[_alone(plan.offload)]
        low = plan.precision.parameters
        dtype = None if low is None else getattr(torch, low)
        # what lies on a mesh without this rank has no values here
        named = [(name, p) for name, p in named_parameters_in(model) if layouts[name].mesh.is_member]
        by_piece = self.stage.states == "S"
        place = {id(p): i for i, (_, p) in enumerate(named)}
        self.exchange = Exchange(mesh.device(), place, is_dry=mesh.is_dry)
        self.members = [
            ShardedParam(name, p, layouts[name], *_own(axes, layouts[name], mesh), dtype, by_piece)
            for name, p in named
        ]
        self.own = {id(m.p) for m in self.members}
        self._frozen = [m for m in self.members if not m.p.requires_grad]
        self._waiting: list[tuple[nn.Parameter, WaitingHooks]] = []
        self.has_thawed = False
        self.strangers: Any = None
        cut = self.stage.parameters == "S"
        used: list[tuple[list[nn.Module], Chunk]] = []
        groups: list[list[Chunk]] = []
        self.lines: list[list[ShardedParam]] = []
        for members in by_part(self.members, parts):
            if cut:
                users = by_unit(members, model)
                used += users
                groups.append([chunk for _, chunk in users if chunk.members[0].p.requires_grad][::-1])
            else:
                trained = [m for m in members if m.p.requires_grad][::-1]
                self.lines.append(trained)
                groups.append(by_size(trained, plan.chunk_megabytes))
        self.chunks = [chunk for group in groups for chunk in group]
        chunks = [chunk for _, chunk in used] if cut else self.chunks
        self._numbers = 0
        self._handed_out: list[Written] = []  # masters that a program may write to
        self._store = self._place(chunks, plan.offload)
        self._mastered = [chunk for chunk in self.chunks if chunk.has_master]
        self._keeps, self._shows_gradients = False, True  # in the step under way
        self._in_place = plan.gradients == "in-place"
        for chunk in self._mastered:
            chunk.in_place = self._in_place
        self.copies: Counter[int] = Counter()
        self.offloaded_step = self._streamed(plan.offload.update)
        if optimizer is not None:
            self.reserve(optimizer)
        self._lay_out(chunks, [p for _, p in named_parameters_in(model)])
        self._line_up(self.chunks)
        self.prefetcher = None
        if cut:
            eight = () if plan.offload.parameters.place != "device" else float8
            self.prefetcher = Prefetcher(used, mesh, plan.prefetch_megabytes * 1e6, self._store, eight)
        masters.remember(self._mastered)
        reduce = None if plan.precision.reduce is None else getattr(torch, plan.precision.reduce)
        self._add_up_in_float32(self._mastered)
        on_sent = None if self.prefetcher is None else self.prefetcher.sent
        self.gradients = AllGradients(
            [
                Gradients(self._summed(group), mesh, axes, self.stage, reduce, on_sent, self._store)
                for group in groups
            ]
        )
        self.budget: Budget | None = None
        if self.offloaded_step is not None and plan.offload.is_by_budget:
            kinds = {"states": self.chunks, "gradients": self.chunks, "parameters": chunks if cut else []}
            self.budget = Budget(plan.offload, kinds, self.offloaded_step, mesh)

    def _add_up_in_float32(self, chunks: Sequence[Chunk]) -> None:
        """Several uses of their members, and micro-batches, add up in it, where the plan sums in it."""
        if self._plan.precision.reduce == "float32":
            with raw():
                for m in (m for chunk in chunks for m in chunk.members):
                    m.p.grad_dtype = torch.float32

    def _summed(self, chunks: Sequence[Chunk]) -> list[Chunk]:
        """Those whose gradients are to be finished: along axes of one rank nothing is left to sum."""
        done = self._is_alone and self.stage.gradients == "R" and not self._in_place
        return [chunk for chunk in chunks if not done or _is_summed(chunk, self.mesh)]

    def _thaw(self) -> None:
        """Train the parameters from now on that have come to need gradients: on all ranks at the same call.

        Where parameters are cut, they have chunks already; the others get new ones. What shares a chunk with
        them is trained as what was frozen after this was made: it gets no gradient.
        """
        thawed = [m for m in self._frozen if m.p.requires_grad]
        if not thawed:
            return
        self._frozen = [m for m in self._frozen if not m.p.requires_grad]
        cut = self.stage.parameters == "S"
        chunk_of = {} if self.prefetcher is None else self.prefetcher.chunk_of
        groups: list[list[Chunk]] = []
        for members, gradients in zip(by_part(thawed, self._parts), self.gradients.parts, strict=True):
            chunks_here = {id(c): c for c in (chunk_of[id(m.p)] for m in members[::-1])} if cut else {}
            groups.append([chunk for chunk in chunks_here.values() if not chunk.is_trained])
            if not cut:
                groups[-1] = by_size(members[::-1], self._plan.chunk_megabytes)
            for m in members:
                if cut and chunk_of[id(m.p)].is_trained:
                    gradients.watch(chunk_of[id(m.p)], m)
        chunks = [chunk for group in groups for chunk in group]
        for chunk in () if cut else chunks:
            chunk.number, self._numbers = self._numbers, self._numbers + 1
        for kind in self._plan.offload.shares.keys() - {"parameters"}:
            _send_away(chunks, kind, self._plan.offload)
        for chunk in chunks:
            chunk.is_trained = True
            if chunk.has_master:
                chunk.in_place = self._in_place
                masters.make(chunk)
        mastered = [chunk for chunk in chunks if chunk.has_master]
        masters.remember(mastered)
        self._add_up_in_float32(mastered)
        self.chunks += chunks
        self._mastered += mastered
        if self.offloaded_step is None:
            self.offloaded_step = self._streamed(self._plan.offload.update)
        else:
            self.offloaded_step.away += [OffloadedChunk(chunk) for chunk in chunks if chunk.has_turn]
        if self.offloaded_step is not None:
            for chunk in chunks:
                self.offloaded_step.leave_master(chunk)
        if self._store is not None:
            self._store.settle()
        self._line_up(chunks)
        for gradients, group in zip(self.gradients.parts, groups, strict=True):
            gradients.add(self._summed(group))
        self.has_thawed = True

    def _streamed(self, updater: Updater) -> OffloadedStep | None:
        """Updates the chunks that have a turn of their own, if any have."""
        moved = [chunk for chunk in self.chunks if chunk.has_turn]
        store = self._store or OffloadStore(self.mesh.device(), None, dry=self.mesh.is_dry)
        fetch = None if self._store is None or self.mesh.is_dry else self._fetch
        return OffloadedStep(moved, store, self.mesh, self._turn, fetch, updater) if moved else None

    def _lay_out(self, chunks: Sequence[Chunk], parameters: Sequence[nn.Parameter]) -> None:
        """Lay the parameters out; each chunk goes where it lies as soon as it has all of them.

        Hooks that were put on them before see whole gradients, as those that come after do. Those that are
        called when a gradient has been added wait where parameters are cut, which are whole by then: an
        optimizer within the backward pass, say, updates pieces. In a pipeline all wait: micro-batches and
        stages bring addends.

        Args:
            parameters: those of the model, also of other ranks.
        """
        cut = self.stage.parameters == "S"
        by_id = {id(m.p): m for m in self.members}
        chunk_of = {id(m.p): chunk for chunk in chunks for m in chunk.members}
        missing = {id(chunk): len(chunk.members) for chunk in chunks}

        def come(p: nn.Parameter) -> None:
            chunk = chunk_of.get(id(p))
            if chunk is None:
                masters.cast(by_id[id(p)])
                return
            missing[id(chunk)] -= 1
            if missing[id(chunk)] == 0:
                self._move_in(chunk)

        if is_staged := self._plan.pipe > 1:
            self._waiting = [
                (p, WaitingHooks(taken_gradient_hooks(p), taken_hooks_after(p))) for p in parameters
            ]
        elif cut or self.stage.gradients == "S":
            self._waiting = [(m.p, WaitingHooks(None, taken_hooks_after(m.p))) for m in self.members]
        for m in () if is_staged else self.members:
            hooks = gradient_hooks(m.p)
            hooks.update({n: of_dtensors(hook, gradient_layout(m.full)) for n, hook in hooks.items()})
        lay_out_parameters([(m.p, m.shard if cut else m.full) for m in self.members], come)
        for p, waiting in self._waiting:
            p._waiting = waiting  # type: ignore[attr-defined]

    def _move_in(self, chunk: Chunk) -> None:
        """Let a chunk's parameters, which are laid out, go where they lie between their uses."""
        if chunk.has_master:
            masters.make(chunk)
        for m in chunk.members:
            masters.cast(m)
        if self.offloaded_step is not None:
            self.offloaded_step.leave_master(chunk)
        if self.stage.parameters == "S":
            bring_home(chunk)
            self._leave_home(chunk)
        if self._store is not None:
            self._store.settle()

    def _line_up(self, chunks: Sequence[Chunk]) -> None:
        """Let what the optimizer updates of whole parameters lie one after the other.

        This rank's pieces of them are copied for it, as far as they fit into a chunk of the plan's size.
        """
        plainly = [chunk for chunk in chunks if chunk.master is None and not chunk.places]
        if self.stage.states == "R":
            for chunk in plainly:
                chunk.whole = chunk.line(chunk.dtype)
                chunk.bring_together(chunk.whole_in(chunk.whole))
        elif self.stage.parameters == "R":
            self.copies += copy_smallest(plainly, self._plan.chunk_megabytes * 1e6)

    def _place(self, chunks: Sequence[Chunk], offload: Offload) -> OffloadStore | None:
        """Give each chunk its number and places; gives where to put what is off the device."""
        for chunk in chunks:
            chunk.number, self._numbers = self._numbers, self._numbers + 1
        for kind in offload.shares:
            _send_away(chunks if kind == "parameters" else self.chunks, kind, offload)
        used = {share.place for share in offload.away.values() if share.ratio}
        if not used:
            return None
        directory = offload.directory if "disk" in used else None
        return OffloadStore(self.mesh.device(), directory, dry=self.mesh.is_dry)

    @property
    def carried(self) -> Counter[Carried]:
        """Bytes that went between the device and other places so far."""
        return Counter() if self._store is None else Counter(self._store.carried)

    @property
    def away_bytes(self) -> dict[str, int]:
        """Bytes of this rank that lie off the device between their uses, by place."""
        return {} if self._store is None else {p: n for p in PLACES[1:] if (n := self._store.bytes_at(p))}

    @property
    def resized(self) -> list[torch.UntypedStorage]:
        """Storages that are emptied and filled as their parameters are used."""
        return [] if self.prefetcher is None else [x for g in self.prefetcher.held for x in g.storages]

    def watched(
        self, outside: Callable[[torch.Tensor], object], inside: Callable[[torch.Tensor], object]
    ) -> list[torch.Tensor]:
        """What lives on the device between steps; both are told of what is off it or on it from now on."""
        if self._store is not None:
            self._store.watched_by(outside, inside)
        living = []
        for chunk in self.chunks if self.prefetcher is None else [g.chunk for g in self.prefetcher.held]:
            for x, kind in ((chunk.home, "parameters"), (chunk.master, "states")):
                if x is not None and kind in chunk.places:
                    outside(x)
                elif x is not None:
                    living.append(x)
        return (
            living if self.prefetcher is not None else [*living, *(plain(m.p.detach()) for m in self.members)]
        )

    def fit(self, peak: int, optimizer: torch.optim.Optimizer) -> bool:
        """See :meth:`Budget.fit`; says whether the budget is settled."""
        assert self.budget is not None
        if self.budget.is_settled and not self.budget.is_to_change(peak):
            return True
        self._settle()
        self.budget.fit(peak, optimizer)
        masters.remember(self._mastered)
        return self.budget.is_settled

    def gather_before(self, blocks: Iterable[nn.Module]) -> None:
        """Where parameters are cut, let all that one of these uses be gathered before it is called."""
        if self.prefetcher is not None:
            for block in blocks:
                self.prefetcher.gather_before(block)

    def begin_micro_batch(self) -> None:
        """Before the forward pass of one of several that are under way."""
        for g in () if self.prefetcher is None else self.prefetcher.held:
            if not g.users:  # who uses a weight beside its module finds this rank's piece
                g.rest()

    def begin_forward(self) -> None:
        """Before the model is called.

        Raises:
            RuntimeError: gradients stand where the parameters stood, and others are wanted.
        """
        if torch.is_grad_enabled():
            masters.check_at_hand(self.chunks, "Another forward pass is possible under torch.no_grad()")
        self.gradients.drop_unseen()
        if self.prefetcher is not None:
            self.prefetcher.begin(reveals=False)  # an earlier forward may have its backward pass yet to come
            if self._in_place:
                masters.follow(self._mastered)
            self.prefetcher.agree_on_scales()
        self._thaw()

    @property
    def hooks_wait(self) -> bool:
        """Whether the program has put hooks on parameters that wait for finished gradients."""
        return any(hooks.are_there for _, hooks in self._waiting)

    def hand_gradients(self, seen: Seen = attrgetter("grad")) -> None:
        """Call the hooks that wait for finished gradients, and may put others in their place.

        Args:
            seen: gives what a program finds in ``p.grad``.
        """
        parameters = {id(p): p for p, _ in self._waiting}

        def has_gradient(x: Any) -> bool:
            p = parameters.get(id(x))
            return p is None or seen(p) is not None

        with as_in_backward(has_gradient):
            for p, hooks in self._waiting:
                hooks.hand(p, seen)

    def tell_of_gradients(self, seen: Seen = attrgetter("grad")) -> None:
        """Call the hooks that wait until parameters have finished gradients."""
        for p, hooks in self._waiting:
            hooks.tell(p, seen)

    def end_backward(self) -> None:
        """After a backward pass."""
        self.gradients.flush()
        self.end_step()

    def end_step(self) -> None:
        """After the last backward pass of a step."""
        if self.prefetcher is not None:
            self.prefetcher.end()

    def counted(self) -> dict[str, torch.Tensor]:
        """Of each gradient what this rank alone counts in a sum over the mesh; plain, in the model's order.

        That is its piece along the data axis, on coordinate 0 of the axes along which others hold the same.
        So every stage adds up the same numbers in the same order.
        """
        gradients = {}
        alone = self.mesh.size() == 1 and not self.mesh.is_dry
        with raw():
            members = [m for m in self.members if m.counts]
            for m, grad in zip(members, map(_grad, [m.p for m in members]), strict=True):
                if alone and grad is not None:  # however it lies, it is all of it
                    is_ready = type(grad) is torch.Tensor and _in_a_row(grad)
                    gradients[m.name] = grad if is_ready else plain(grad).contiguous()
                    continue
                grad = shown_gradient(m.p, grad)
                if grad is None:
                    continue
                here, layout = plain(grad), grad._layout
                assert layout.is_firm or all(self.mesh.shape[a] == 1 for a in layout.partial), "to reduce"
                if layout.axes[m.shard_group.axes[0]] != m.dim:
                    here = m.piece(here)
                # what is off a dry mesh's device stands on one element
                gradients[m.name] = here if self.mesh.is_dry and 0 in here.stride() else here.contiguous()
        return gradients

    def rooms(self) -> dict[int, int]:
        """By ``id``, the elements that a trained parameter has for itself where it is now, with its padding.

        While it is what the optimizer updates. Those that lie in no buffer of ours are left out.
        """
        with raw():
            return {key: room for chunk in self.chunks for key, room in chunk.rooms().items()}

    @contextmanager
    def precise(self, *, on_device: bool = True) -> Iterator[None]:
        """While open, each parameter that has a master is that, lying as the stage says of states.

        Args:
            on_device: copies of what is kept elsewhere, parameters without a master too.
        """
        self._settle()
        looks = [(chunk, chunk.updated()) for chunk in self._mastered]
        if on_device:
            away = [] if self.prefetcher is None else [g.chunk for g in self.prefetcher.held if g.is_away]
            looks += [(chunk, chunk.updated()) for chunk in away if chunk.master is None]
            with raw():
                looks = [(c, x._replace(tensors=[t.to(c.device) for t in x.tensors])) for c, x in looks]
        with shown(looks):
            yield

    def held_masters(self) -> dict[int, torch.Tensor]:
        """The masters by the ``id`` of their parameters, lying as the stage says of states.

        What is written to them comes into the parameters, where both are this rank's pieces on the device: no
        rank need tell another. Else they are copies.
        """
        self._settle()
        shares = self.shares_masters
        with raw(), torch.no_grad():
            held: dict[int, torch.Tensor] = {
                id(m.p): stamp(master.detach() if shares else master.clone(), m.updated)
                for chunk in self._mastered
                for m, master in zip(chunk.members, chunk.masters, strict=True)
            }
            self._handed_out += [Written(x) for x in held.values()] if shares else []
        return held

    @property
    def shares_masters(self) -> bool:
        """Whether what :meth:`held_masters` gives are no copies."""
        return (self._is_alone or self.stage.parameters == "S") and self._store is None

    def _take_in_masters(self) -> None:
        """Let parameters be what a program has written to their masters."""
        written = [x for x in self._handed_out if x.is_new()]
        self._handed_out = [x for x in self._handed_out if x.is_held]
        if written:
            with raw():
                increment_version([m.p for chunk in self._mastered for m in chunk.members])
            for chunk in self._mastered:
                masters.write(chunk)
            masters.remember(self._mastered)

    @contextmanager
    def updating(
        self, *, keep: bool = False, exchange: bool = True, turns: bool = False, gradients: bool = True
    ) -> Iterator[None]:
        """While open, each trained parameter is what the optimizer is to update here, with its gradient.

        That is the parameter, its master, or this rank's piece of either; a master's gradient is float32.
        After it, all ranks compute with what was updated, if there was an ``exchange``; and parameters have
        their gradients again, if these are to be kept.

        Args:
            turns: chunks that have a turn of their own are to have it meanwhile.
            gradients: to be shown; between micro-batches there are none that fit what is updated.
        """
        self._settle()
        self._keeps, self._shows_gradients = keep, gradients
        with self._opened([chunk for chunk in self.chunks if not (turns and chunk.has_turn)], keep):
            yield
        if exchange:
            self._exchange()
        for chunk in self.chunks:
            chunk.own = None
        if turns and self.offloaded_step is not None:
            self.offloaded_step.agree()

    def reserve(self, optimizer: torch.optim.Optimizer) -> None:
        """See that there is space for states that the plan puts on disk.

        Raises:
            DiskError: there is none.
        """
        if self.offloaded_step is not None:
            self.offloaded_step.reserve(optimizer)

    def place(self, optimizer: torch.optim.Optimizer) -> None:
        """Before the first step: states go where the plan says.

        Raises:
            DiskError: there is no space for them.
        """
        if self.offloaded_step is not None:
            self.offloaded_step.place(optimizer)

    def update(
        self,
        optimizer: torch.optim.Optimizer,
        step: OptimizerStep,
        keep: bool = False,
        states: OptimizerStates | None = None,
    ) -> None:
        """One step of the optimizer, by ``step(optimizer)`` where nothing is off the device.

        Args:
            keep: gradients stay (not those in the parameters' memory).
            states: of all parameters, where the optimizer is one of several; by default its own.

        Raises:
            DiskError: see :meth:`OffloadedStep.agree`.
        """
        with self.updating(keep=keep, turns=True):
            if self.offloaded_step is None:
                step(optimizer)
            else:
                self.offloaded_step.update(optimizer, step, optimizer.state if states is None else states)

    def fill(self, fill: Callable[[nn.Parameter], None], states: OptimizerStates) -> None:
        """Have each trained parameter filled while it, with its states, is what the optimizer updates.

        So values go where an update puts them: to masters and pieces, on the device or off it.

        Raises:
            DiskError: see :meth:`OffloadedStep.agree`.
        """

        def visit(chunk: Chunk) -> None:
            for m in chunk.members:
                fill(m.p)

        with self.updating(keep=True, turns=True, gradients=False):
            for chunk in self.chunks:
                if not chunk.has_turn:
                    visit(chunk)
            if self.offloaded_step is not None:
                self.offloaded_step.each(states, visit)

    def set_apart(self, later: Sequence[torch.Tensor]) -> None:
        """Let parameters that a program has made of the memory of others have memory of their own.

        ``weight_norm`` does so with a weight. That of chunks is given what the ranks have updated of these.
        """
        with raw(), torch.no_grad():
            held = {memory for chunk in self.chunks for memory in chunk.memories}
            for p in later:
                if memory_id(p) in held:
                    show(p, plain(p.data).clone(), p._layout)  # type: ignore[attr-defined]

    @contextmanager
    def _turn(self, chunk: Chunk, on_host: bool) -> Iterator[None]:
        """While open, a chunk of which something is off the device is what the optimizer updates."""
        self.gradients.bring(chunk, on_host=on_host)
        if "parameters" in chunk.places:
            assert self._store is not None
            (chunk.home,) = self._store.take(f"parameters-{chunk.number}", home_of(chunk), on_host=on_host)
            show_pieces(chunk, chunk.home)
        masters.take_over(chunk)
        with self._opened([chunk], self._keeps, on_host):
            yield
        if self._keeps:
            self.gradients.leave(chunk)
        elif "gradients" in chunk.places:
            chunk.gradient = None
        if chunk.lent:
            masters.restore(chunk)
        elif chunk.master is not None:
            masters.write(chunk, self._store)
        self._leave_home(chunk)

    def _leave_home(self, chunk: Chunk) -> None:
        """Start to take this rank's pieces of parameters away, if they are to be off the device."""
        if "parameters" in chunk.places:
            assert self._store is not None and chunk.home is not None

            def away(shown: list[torch.Tensor]) -> None:
                show_pieces(chunk, shown[0])
                chunk.is_written = False

            self._store.put(f"parameters-{chunk.number}", [chunk.home], chunk.places["parameters"], away)

    @contextmanager
    def _opened(self, chunks: Sequence[Chunk], keep: bool = False, on_host: bool = False) -> Iterator[None]:
        """While open, the parameters of chunks are what the optimizer updates, with its gradients."""
        chunks = [c for c in chunks if c.by_piece or c.master is not None]
        kept = [_gradients(chunk) for chunk in chunks] if keep else []
        for chunk in chunks:
            chunk.cut_out()
        with shown([(chunk, chunk.updated(self._take_gradients(chunk, on_host))) for chunk in chunks]):
            yield
        for give_back in kept:
            give_back()

    def _settle(self) -> None:
        """Parameters are what they are between passes, and what others have changed is known."""
        self.exchange.finish()
        if self.prefetcher is not None:
            self.prefetcher.begin()
        self._thaw()
        if self._handed_out:
            self._take_in_masters()
        masters.follow(self._mastered)
        if self.offloaded_step is not None:
            self.offloaded_step.follow()

    def _take_gradients(self, chunk: Chunk, on_host: bool = False) -> list[torch.Tensor | None]:
        """The gradients of a chunk's members, off them, as the optimizer needs them, maybe on the host."""
        gradients: list[torch.Tensor | None] = []
        dtype = chunk.dtype if chunk.master is None else chunk.master.dtype
        with raw():
            grads = [gradient_of(m.p) if self._shows_gradients else None for m in chunk.members]
            if chunk.places:
                grads = self._beside(chunk, grads)
            for m, grad in zip(chunk.members, grads, strict=True):
                if grad is not None and grad.dtype is not dtype:
                    layout = grad._layout
                    with unseen() if on_host else nullcontext():
                        other = plain(grad).to(dtype)
                    if on_host and self._store is not None:
                        self._store.tell_outside([other])
                    grad = stamp(other, layout)
                m.p.__dict__.pop("_reduced", None)
                _set_grad(m.p, None)
                gradients.append(grad)
            if chunk.master is not None:
                chunk.gradient = None  # else both would live on while the optimizer works
        return gradients

    def _beside(self, chunk: Chunk, grads: Sequence[Any]) -> list[Any]:
        """Gradients where the chunk's parameters are updated: on the device or in the host's memory."""
        updated = chunk.master if chunk.master is not None else chunk.home
        there = chunk.device if updated is None else updated.device
        away = [grad for grad in grads if grad is not None and grad.device != there]
        if self._store is None or not away:
            return list(grads)
        to = self._store.to_host if there.type == "cpu" else self._store.to_device
        moved = to([plain(grad) for grad in away])
        brought = {id(g): stamp(x, g._layout) for g, x in zip(away, moved, strict=True)}
        return [brought.get(id(grad), grad) for grad in grads]

    def _fetch(self, chunk: Chunk, ready: torch.Event | None) -> None:
        """Start to bring to the host what the update of a chunk there reads of the device."""
        assert self._store is not None
        if not chunk.copied and not chunk.lent:
            with raw(), torch.no_grad():
                grads = [gradient_of(m.p) for m in chunk.members]
                is_there = self.offloaded_step is not None and self.offloaded_step.has_copies(chunk)
                wanted = chunk.master is None and chunk.home is None and not is_there
                here = chunk.updated().tensors if wanted else []
                self._store.fetch([*here, *(plain(grad) for grad in grads if grad is not None)], ready)

    def _exchange(self) -> None:
        """Let all ranks compute with what each has updated."""
        for chunk in self._mastered:
            if not chunk.has_turn:
                masters.write(chunk)
        if self.stage.states == "S" and self.stage.parameters == "R":
            with raw():
                self.exchange.gather(self.chunks)
        masters.remember(self._mastered)
        if self.offloaded_step is not None:
            self.offloaded_step.remember()


def _own(axes: tuple[int, ...], full: Layout, mesh: Mesh) -> tuple[tuple[int, ...], ShardGroup]:
    """Axes along which a parameter is the same, and its gradient is summed: copies, and those that cut it.

    The latter are among those of data. Along others that it is deferred along it is copied.
    """
    same_axes = [a for a in axes if not isinstance(full.axes[a], int)]
    copies = [a for a in same_axes if mesh.names[a] == "replicate"]
    more = [a for a in full.deferred if a not in axes and mesh.shape[a] > 1]
    return (*copies, *more), ShardGroup.along(mesh, [a for a in same_axes if a not in copies])


def _gradients(chunk: Chunk) -> Callable[[], None]:
    """What gives a chunk's parameters the gradients again that they have now."""
    flat = chunk.gradient
    with raw():
        before = [(m.p, m.p.__dict__.get("_reduced"), _grad(m.p)) for m in chunk.members]

    def give_back() -> None:
        chunk.gradient = flat
        with raw():
            for p, reduced, grad in before:
                set_gradient(p, grad)
                if reduced is not None:
                    p._reduced = reduced  # type: ignore[attr-defined]

    return give_back


def _is_summed(chunk: Chunk, mesh: Mesh) -> bool:
    return any(mesh.shape[a] > 1 for a in chunk.outer)


def _send_away(chunks: Sequence[Chunk], kind: str, offload: Offload) -> None:
    """Give chunks their place for a kind, as far as the plan has it off the device."""
    share = offload.shares[kind]
    if share.place == "device":
        return
    ratio = 1.0 if share.ratio == "auto" else share.ratio
    for chunk, away in zip(chunks, choose([chunk.largest for chunk in chunks], ratio), strict=True):
        if away:
            chunk.places[kind] = share.place


def _alone(offload: Offload) -> int:
    """The stage of a data axis of one rank: what is off the device lies there in pieces."""
    if offload.parameters.place != "device":
        return 3
    return 2 if offload.gradients.place != "device" else 0
