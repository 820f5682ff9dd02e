"""The update of chunks whose states are off the device: one after the other, within one optimizer step.

While a chunk is updated the states of the next are read and those of the one before are written. States in
the host's memory are updated there, where the optimizer has a fused kernel for it, after the device was
given its own part to do (Ren et al. 2021, ZeRO-Offload; Rajbhandari et al. 2021, ZeRO-Infinity).
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Container, Iterator, MutableMapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import compress
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from espalier.comm.control import agree, numbers_of_all
from espalier.device import host_threads, is_accelerator, reached, synchronize, wait_for
from espalier.layout import Layout
from espalier.mesh import Mesh
from espalier.parallel.apart import shadow_of, updates_each_alone
from espalier.parallel.data import masters
from espalier.parallel.data.chunks import Appearance, Chunk, shown
from espalier.parallel.data.residency import DiskError, OffloadStore
from espalier.parallel.fused import has_host_kernel, holding
from espalier.parallel.plan import Place, Updater
from espalier.parallel.several import parts_of
from espalier.tensor import plain, stamp
from espalier.tensor.dtensor import DTensor
from espalier.tensor.loans import was_handed_out
from espalier.tensor.observers import tell
from espalier.torch_private import getter, raw, setter

# ---- which of the chunks whose states lie in the host's memory the device updates, by measured speeds
#
# The host updates a chunk where its states lie; the device has them brought, and sent back. Both work at the
# same time, so an update is over soonest where both need equally long for their shares (Ren et al. 2021,
# ZeRO-Offload; Wang et al. 2024, Deep Optimizer States).


_MEASURED: tuple[Updater | None, ...] = (None, "host", None, "device")
"""Whom the first updates measure: before each is one that makes states, or brings kernels and counts."""


class UpdateShares:
    """How the host and the device share the update of what lies in the host's memory.

    Args:
        updater: who updates; ``"auto"``: both, as the first updates show.

    Attributes:
        share: of the bytes, that which the device updates.
        speeds: of those measured, bytes of states that were updated in a second, copies included.
    """

    def __init__(self, updater: Updater, mesh: Mesh) -> None:
        self._mesh, self._seen = mesh, 0
        there = is_accelerator(mesh.device()) and not mesh.is_dry
        self.share = 1.0 if updater == "device" else 0.0
        self.speeds: dict[str, float] = {}
        self._is_decided = updater != "auto" or not there

    @property
    def is_asked(self) -> bool:
        """Whether it is not the host alone."""
        return self.share > 0 or bool(self.speeds) or not self._is_decided

    def by_device(self, sizes: Sequence[int]) -> list[bool]:
        """Which chunks of such sizes, in the order of the update, the device updates: evenly spread."""
        share = self.share if self._is_decided else float(_MEASURED[self._seen // 2 * 2 + 1] == "device")
        chosen, ahead = [], 0.0
        for size in sizes:
            ahead += share * size
            chosen.append(share > 0 and ahead >= size / 2)
            ahead -= size * chosen[-1]
        return chosen

    @contextmanager
    def measured(self, nbytes: Callable[[], int]) -> Iterator[None]:
        """An update of chunks, of which all ranks have some.

        Args:
            nbytes: gives those of their states, on this rank.
        """
        if self._is_decided:
            yield
            return
        who = _MEASURED[self._seen]
        if who is not None:
            synchronize(self._mesh.device())
        start = time.perf_counter()
        yield
        self._seen += 1
        if who is not None:
            synchronize(self._mesh.device())
            self._note(who, nbytes(), time.perf_counter() - start)

    def _note(self, who: str, nbytes: int, seconds: float) -> None:
        """Take in a measurement: what counts is the slowest rank's, on all of them."""
        picoseconds = int(1e12 * seconds / max(nbytes, 1))
        slowest = max(took for (took,) in numbers_of_all([picoseconds], self._mesh))
        self.speeds[who] = 1e12 / max(slowest, 1)
        if self._seen == len(_MEASURED):
            host, device = self.speeds["host"], self.speeds["device"]
            self.share, self._is_decided = device / (host + device), True

    def __str__(self) -> str:
        if not self._is_decided:
            return "updates: how the host and the device share them is being measured"
        speeds = ", ".join(f"the {who} {speed / 1e9:.3g} GB/s" for who, speed in self.speeds.items())
        how = f" ({speeds} of states)" if speeds else ""
        return f"updates of states on the host: {self.share:.0%} by the device{how}"


# ---- the step

OptimizerStep = Callable[[torch.optim.Optimizer], None]
OptimizerStates = MutableMapping[torch.Tensor, dict[str, Any]]
Turns = Callable[[Chunk, bool], AbstractContextManager[None]]
_grad, _set_grad = getter("grad"), setter("grad")


class _StateTensor(NamedTuple):
    """One tensor of a chunk's states; ``p`` is None for the chunk's master."""

    p: torch.Tensor | None
    name: str
    layout: Layout | None


class OffloadedChunk:
    """A chunk of which something is off the device."""

    def __init__(self, chunk: Chunk) -> None:
        self.chunk = chunk

    @property
    def place(self) -> Place:
        """Where its states lie between their uses."""
        return self.chunk.places.get("states", "device")

    @property
    def parameters(self) -> list[torch.Tensor]:
        """Those in it."""
        return [m.p for m in self.chunk.members]

    @property
    def key(self) -> str:
        """That of its states in the store."""
        return f"states-{self.chunk.number}"

    def states(self, states: OptimizerStates) -> tuple[list[_StateTensor], list[torch.Tensor]]:
        """All its states that are no single numbers."""
        what, tensors = [], []
        for m in self.chunk.members:
            for name, x in states.get(m.p, {}).items():
                if isinstance(x, torch.Tensor) and x.ndim:
                    what.append(_StateTensor(m.p, name, x._layout if type(x) is DTensor else None))
                    tensors.append(x)
        if self.chunk.master is not None:
            what.append(_StateTensor(None, "master", None))
            tensors.append(self.chunk.master)
        return what, tensors

    def set(
        self, states: OptimizerStates, what: Sequence[_StateTensor], tensors: Sequence[torch.Tensor]
    ) -> None:
        """Put others in the place of these states."""
        with raw():
            for state, x in zip(what, tensors, strict=True):
                if state.p is None:
                    self.chunk.master = x
                else:
                    laid = x if state.layout is None else stamp(x.detach(), state.layout)
                    states[state.p][state.name] = laid


class _Copies(NamedTuple):
    """What the host made of a chunk's parameters, in its memory, and when the device has it."""

    tensors: list[torch.Tensor]
    sent: torch.Event | None


class OffloadedStep:
    """Updates the chunks of which something is off the device.

    Args:
        chunks: these, in the order of the update.
        store: where what is off the device lies.
        turns: gives, for a chunk, the context in which its parameters are what the optimizer updates; they
            and their gradients are on the host if that is asked for and they lie there anyway.
        fetch: starts to bring to the host what an update there reads of a chunk; after an event it is ready.

    Attributes:
        shares: how the host and the device share the update of what lies in the host's memory.
    """

    def __init__(
        self,
        chunks: Sequence[Chunk],
        store: OffloadStore,
        mesh: Mesh,
        turns: Turns,
        fetch: Callable[[Chunk, torch.Event | None], None] | None = None,
        updater: Updater = "host",
    ) -> None:
        self.shares = UpdateShares(updater, mesh)
        self.away = [OffloadedChunk(chunk) for chunk in chunks]
        self.store, self._mesh, self._turns, self._fetch = store, mesh, turns, fetch
        # by chunk: they need not come again while nobody else writes to the parameters
        self._copies: dict[Chunk, _Copies] = {}
        self._just_made: list[Chunk] = []
        self._apart: WeakKeyDictionary[torch.optim.Optimizer, bool] = WeakKeyDictionary()
        self._has_warned = False

    def has_copies(self, chunk: Chunk) -> bool:
        """Whether the host has a chunk's parameters from its last update."""
        return chunk in self._copies

    def follow(self) -> None:
        """Let go of copies of what others have written to, or the device updates: its kernels tell nobody."""
        with raw():
            for chunk in list(self._copies):
                stays = chunk.places.get("states") == "host"
                if not stays or any(map(masters.is_changed, chunk.members)):
                    del self._copies[chunk]

    def remember(self) -> None:
        """What the host has just updated is everywhere: a change from now on is by others."""
        masters.remember(self._just_made)
        self._just_made.clear()

    def reserve(self, optimizer: torch.optim.Optimizer) -> None:
        """Take the space for all states, before there are any (a collective, if any are on disk).

        Raises:
            DiskError: there is not enough of it, on some rank.
        """
        disk = self.store.disk
        on_disk = [a for a in self.away if a.place == "disk"]
        try:
            sizes = [self._expected(optimizer, a) for a in on_disk]
            if disk is not None and sizes:
                for a, size in zip(on_disk, sizes, strict=True):
                    disk.reserve(a.key, size)
        except DiskError as error:
            self.store.errors.append(error)
        self.agree()

    def leave_master(self, chunk: Chunk) -> None:
        """Start to take a chunk's master away, which is all that there is of its states yet."""
        if chunk.master is not None and "states" in chunk.places:
            master, chunk.master = chunk.master, None

            def away(shown: list[torch.Tensor]) -> None:
                (chunk.master,) = shown

            self.store.put(OffloadedChunk(chunk).key, [master], chunk.places["states"], away, keep=True)

    def place(self, optimizer: torch.optim.Optimizer) -> None:
        """Take away what states there are before the first step, beside masters.

        Raises:
            DiskError: something could not be written, on some rank.
        """
        for a in self.away:
            if any(state.p is not None for state in a.states(optimizer.state)[0]):
                self.store.settle()
                self.leave(optimizer.state, a)
        self.store.settle()
        self.agree()

    def update(self, optimizer: torch.optim.Optimizer, step: OptimizerStep, states: OptimizerStates) -> None:
        """One step of the optimizer: it counts once, for schedulers too.

        The optimizer updates what is on the device; then what is away is updated by shadows of it that hold
        a chunk each: of one that does not update each parameter by itself, all is brought at once. What goes
        wrong is said by :meth:`agree`.

        Args:
            states: of all parameters, also those that others of several optimizers update.
        """
        if not self._is_apart(optimizer):
            return self._update_together(optimizer, step, states)
        away = {id(p) for a in self.away for p in a.parameters}
        shadows = {id(a.chunk): shadow_of(optimizer, a.parameters) for a in self.away}
        updated = [a for a in self.away if shadows[id(a.chunk)].param_groups]
        on_host = all(map(has_host_kernel, parts_of(optimizer)))

        with holding(optimizer):
            for group in optimizer.param_groups:
                group["params"] = [p for p in group["params"] if id(p) not in away]
            step(optimizer)
        in_host = [a for a in updated if a.place == "host"] if on_host else []
        with self.shares.measured(partial(self._nbytes, in_host)) if in_host else nullcontext():
            held = {id(p) for group in optimizer.param_groups for p in group["params"]}
            on_cpu: dict[int, torch.Tensor] = {}

            def visit(chunk: Chunk) -> None:
                if chunk.look is not None and chunk.look.tensors[0].is_cpu:
                    _read_by_host(shadows[id(chunk)], on_cpu)
                step(shadows[id(chunk)])

            self.each(states, visit, on_host, updated, held)

    def _is_apart(self, optimizer: torch.optim.Optimizer) -> bool:
        if optimizer not in self._apart:
            device = torch.device("cpu") if self._mesh.is_dry else self._mesh.device()
            self._apart[optimizer] = updates_each_alone(optimizer, device)
        return self._apart[optimizer]

    def _update_together(
        self, optimizer: torch.optim.Optimizer, step: OptimizerStep, states: OptimizerStates
    ) -> None:
        if not self._has_warned:
            self._has_warned = True
            tell(
                f"{type(optimizer).__name__} does not update each parameter by itself (it makes a number of "
                "all of them, say, or keeps tensors elsewhere than in its state): all that is offloaded is "
                "on the device at once in each update, which takes memory and time. One whose step gives "
                "the same for one parameter alone is updated a part at a time."
            )
        here = {id(p) for group in optimizer.param_groups for p in group["params"]}
        updated = [a for a in self.away if any(id(p) in here for p in a.parameters)]
        with self._careful():
            with ExitStack() as turns:
                for a in updated:
                    self._bring(states, a)
                    self._copies.pop(a.chunk, None)
                    turns.enter_context(self._turns(a.chunk, False))
                step(optimizer)
            for a in updated:
                self.leave(states, a)

    def agree(self) -> None:
        """Raise on all ranks what went wrong with files on one of them (a collective, if any are used).

        Raises:
            DiskError: what was updated could not be written: it stays in memory, all parameters and states
                are those after the step, and the next step tries again. Or a file is damaged: then the
                chunks from that one on are not updated.
        """
        errors, self.store.errors = self.store.errors, []
        if any("disk" in a.chunk.places.values() for a in self.away):
            agree(errors[0] if errors else None, self._mesh, range(self._mesh.ndim))

    # ---- one chunk after the other

    def each(
        self,
        states: OptimizerStates,
        visit: Callable[[Chunk], None],
        on_host: bool = False,
        of: Sequence[OffloadedChunk] | None = None,
        held: Container[int] | None = None,
    ) -> None:
        """Let each chunk that is away have its turn: it is what the optimizer updates, with its states.

        Args:
            on_host: in the host's memory, if its states lie off the device.
            of: those of them that are meant; by default all.
            held: by ``id`` the parameters that ``visit`` may write to; by default all.
        """
        of = self.away if of is None else of
        ahead = on_host and is_accelerator(self.store.device)
        by_host = self._by_host() if on_host else []
        ready = reached(self.store.device)
        with self._careful():
            for i, a in enumerate(of):
                there = a in by_host
                self._bring(states, a, on_host=there)
                # so that three chunks are here at most: one leaves, one has its turn, one comes
                self.store.settle(keep=len(a.chunk.places.keys() - {"gradients"}))
                for following in of[i + 1 : i + 2]:
                    self.store.start(following.key, following.states(states)[1])
                # and the host updates one while what it reads of the next comes, and the one before goes back
                for one in of[i + 1 if i else 0 : i + 2] if ahead else ():
                    if one in by_host and self._fetch is not None:
                        self._fetch(one.chunk, ready)
                if not there:
                    self._copies.pop(a.chunk, None)
                with self._turns(a.chunk, there):
                    if there and is_accelerator(self.store.device):
                        self._visit_on_host(a.chunk, states, visit, held)
                    else:
                        visit(a.chunk)
                self.leave(states, a)

    @contextmanager
    def _careful(self) -> Iterator[None]:
        """Updates of chunks: an error of the disk is kept, and what was put away is away after them."""
        try:
            yield
        except DiskError as error:
            self.store.errors.append(error)
        finally:
            self.store.drop_fetched()
            self.store.settle()

    def _bring(self, states: OptimizerStates, a: OffloadedChunk, *, on_host: bool = False) -> None:
        """Let a chunk's states be there: :meth:`leave` takes them away again."""
        if a.place != "device":
            what, shown = a.states(states)
            written = any(map(was_handed_out, shown))
            a.set(states, what, self.store.take(a.key, shown, on_host=on_host, written=written))

    def _by_host(self) -> list[OffloadedChunk]:
        """Those that the host updates."""
        in_host = [a for a in self.away if a.place == "host"]
        shared = zip(in_host, self.shares.by_device([a.chunk.largest for a in in_host]), strict=True)
        return [a for a in self.away if a.place == "disk"] + [a for a, is_devices in shared if not is_devices]

    def _nbytes(self, of: Sequence[OffloadedChunk]) -> int:
        return sum(self.store.nbytes(a.key) for a in of)

    def _visit_on_host(
        self,
        chunk: Chunk,
        states: OptimizerStates,
        visit: Callable[[Chunk], None],
        held: Container[int] | None,
    ) -> None:
        """A turn with copies of parameters and gradients in the host's memory."""
        known = self._copies.pop(chunk, _Copies([], None))
        with raw(), torch.no_grad():
            here = [plain(m.p.detach()) for m in chunk.members]
            grads = [_grad(m.p) for m in chunk.members]
            wanted = [] if known.tensors else here
            host = self.store.to_host([*wanted, *(plain(g) for g in grads if g is not None)], known.sent)
            copies, on_host = iter(host[len(wanted) :]), known.tensors or host[: len(here)]
            for m in chunk.members:
                _set_grad(m.p, None)
                for name, state in states.get(m.p, {}).items():
                    if isinstance(state, torch.Tensor) and not state.ndim:
                        states[m.p][name] = state.to("cpu")
            there = [None if grad is None else _laid_as(grad, next(copies)) for grad in grads]
        with shown([(chunk, Appearance(on_host, chunk.now().layouts, there))]):
            with host_threads():
                visit(chunk)
            # what others update may be asked for by a backward pass that is under way
            may = [held is None or id(m.p) in held for m in chunk.members]
            with raw(), torch.no_grad():
                sent = self.store.copy([*compress(here, may)], [*compress(on_host, may)])
                wait_for(sent, self.store.device)
        with raw():
            for m, grad in zip(chunk.members, grads, strict=True):
                _set_grad(m.p, grad)
        if all(is_accelerator(t.device) for t in here):
            self._copies[chunk] = _Copies(on_host, sent)
            self._just_made.append(chunk)

    def leave(self, states: OptimizerStates, a: OffloadedChunk) -> None:
        """Start to take a chunk's states away."""
        what, tensors = a.states(states)
        if tensors and a.place != "device":
            self.store.put(a.key, tensors, a.place, lambda shown: a.set(states, what, shown))
            a.set(states, what, [torch.empty(0) for _ in tensors])  # lets go of them

    def _expected(self, optimizer: torch.optim.Optimizer, a: OffloadedChunk) -> int:
        """Bytes of a chunk's states, by a step of the optimizer on the ``meta`` device."""
        held_elements = a.chunk.size if a.chunk.by_piece else a.chunk.elements
        master = 4 * held_elements if a.chunk.has_master else 0
        return master + sum(self._expected_of(part, a) for part in parts_of(optimizer))

    def _expected_of(self, optimizer: torch.optim.Optimizer, a: OffloadedChunk) -> int:
        shadow = shadow_of(optimizer, a.parameters)
        shadow.state = defaultdict(dict)
        elements = 0
        with raw():
            shapes = {id(m.p): m.updated.local_shape for m in a.chunk.members}
            for group in shadow.param_groups:
                dtype = torch.float32 if a.chunk.has_master else a.chunk.dtype
                like = [torch.empty(shapes[id(p)], dtype=dtype, device="meta") for p in group["params"]]
                for x in like:
                    x.grad = torch.empty_like(x)
                elements += sum(x.numel() * x.element_size() for x in like)
                group["params"] = like
                group.update({key: False for key in ("fused", "foreach") if key in group})
        as_most = 2 * elements  # two states a parameter
        if not self._is_apart(optimizer):  # it might count a trial
            return as_most
        try:
            shadow.step()
        except Exception:  # one that does not run without values
            return as_most
        states = [x for state in shadow.state.values() for x in state.values() if isinstance(x, torch.Tensor)]
        return sum(x.numel() * x.element_size() + 64 for x in states if x.ndim)


def _laid_as(grad: torch.Tensor, copy: torch.Tensor) -> torch.Tensor:
    """A copy of a gradient, which is plain where a rank is alone on its axis."""
    return stamp(copy, grad._layout) if type(grad) is DTensor else copy


def _read_by_host(shadow: torch.optim.Optimizer, on_cpu: dict[int, torch.Tensor]) -> None:
    """Let an update in the host's memory find rates that are tensors of the device there.

    Torch brings them by a copy that its kernel does not wait for.

    Args:
        on_cpu: those that are there, by ``id``.
    """
    for group in (group for part in parts_of(shadow) for group in part.param_groups):
        for key, x in group.items():
            if isinstance(x, torch.Tensor) and is_accelerator(x.device):
                group[key] = on_cpu[id(x)] = on_cpu[id(x)] if id(x) in on_cpu else x.cpu()
        if group.get("capturable"):
            group["capturable"] = False  # which is for kernels of the device
