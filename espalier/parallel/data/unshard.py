"""The whole parameters of a chunk that is cut between its uses (ZeRO-3): gathered, shown, released."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from espalier.blocks import parameters_in
from espalier.comm import Work
from espalier.comm.collectives import Fetching, start_gather
from espalier.comm.functions import OwnFunction
from espalier.device import beside, wait_for
from espalier.mesh import Mesh
from espalier.parallel.data.chunks import Appearance, Chunk, ShardedParam, show
from espalier.parallel.data.float8_rows import Float8Rows, agree_on_scales
from espalier.parallel.data.masters import merge, values_of
from espalier.parallel.data.residency import MEMORIES, OffloadStore
from espalier.parallel.data.stand_ins import ShardedStandIn, refuse_recorded, whole_of
from espalier.tensor import plain, stamp
from espalier.tensor.dry_autocast import autocast_dtype
from espalier.tensor.dtensor import DTensor
from espalier.tensor.loans import is_handed_out, keep_apart, stamp_alias, written_mark
from espalier.tensor.saved import saving_sources
from espalier.torch_private import (
    base_of,
    current_graph_task_id,
    foreach_copy_,
    forward_hooks,
    memory_id,
    method,
    open_transform,
    own_parameters,
    raw,
    read_version,
    set_versions,
)
from espalier.trees import tensors_in, tree_map

_address = method("data_ptr")


class _Marks(NamedTuple):
    """What tells whether a chunk's parameters were written to: see ``written_mark``.

    Attributes:
        times: how often data of those that are cut was handed out.
        versions, addresses: of all.
        uncut: the marks of those that are not cut.
    """

    times: int
    versions: list[int]
    addresses: list[int]
    uncut: list[tuple[int, int, int]]


class Unsharded:
    """The storage of a chunk's whole parameters: filled while they are used, of no size between.

    Attributes:
        is_whole: whether the parameters show it, as they do for modules that are running and use it.
        is_kept: whether it is filled while they show their pieces: a module is to use it soon.
        users: modules that are running and use it.
        marks: uses in a forward pass whose backward is to come, and will tell when it is done.
        open: calls whose backward has begun, and is not known to be done.
        is_recorded: whether a backward of such a call has a graph, whose own backward, to come, needs them.
        rows, pending: what is on its way to it; ``rows``, too, have memory only then.
        bring: has it filled, with what comes next.
    """

    def __init__(
        self,
        number: int,
        chunk: Chunk,
        store: OffloadStore | None,
        bring: Callable[[], None],
        float8: Collection[str] = (),
    ) -> None:
        self.number, self.chunk, self._store, self.bring = number, chunk, store, bring
        eight = float8 and chunk.shard_group.n > 1 and any(m.name in float8 for m in chunk.members)
        self.float8 = Float8Rows(chunk, float8) if eight else None
        with raw():
            self._flat = chunk.line(chunk.dtype)
            self._whole = chunk.whole_in(self._flat)
            self.storage = self._flat.untyped_storage()
            self._bytes = self.storage.nbytes()
            shard_group = chunk.shard_group
            fetches = Fetching.serves(shard_group.mesh, shard_group.axis, chunk.device) and not eight
            own = [m.piece(whole) for m, whole in zip(chunk.members, self._whole.tensors, strict=True)]
            but = shard_group.here if fetches else None
            places = chunk.in_wholes(self._whole.tensors, but)
            self.storage.resize_(0)
            # views last, though what they look at comes and goes
            self.rows = chunk.rows(shard_group.n, chunk.dtype)
            # what is fetched from others comes after what is here
            self._into = [*(own if fetches else ()), *(view for there in places for view in there)]
            self._outof = chunk.in_rows(self.rows, places, but)
            self._fetching = Fetching(self.rows, shard_group.mesh, shard_group.axis) if fetches else None
            self._own: torch.Tensor | None = None
            self._taken: list[torch.Tensor] = []  # from off the device, until they are sent
            self._row: torch.Tensor | None = None  # in 8 bits, while it is sent
            self._arriving = _Room(self.rows)
            self._carried = self._arriving if self.float8 is None else _Room(self.float8.rows)
            self._ps = [m.p for m in chunk.members]
            self._cut = tuple(m.p for m in chunk.members if m.dim is not None)
            self._uncut = [m.p for m in chunk.members if m.dim is None]
            self._count_versions(1)
        # what is to be seen of the parameters when they began to be whole, or their pieces to be sent
        self._times, self._marks = 0, _Marks(0, [], [], [])
        self.is_whole = self.is_kept = False
        self._hidden: Appearance | None = None  # what the parameters show in place of their pieces
        self.users = self.marks = 0
        self.open: set[_Call] = set()
        self.is_recorded = False
        self.pending: Work[Any] | None = None
        self._brought: torch.Event | None = None
        # of the whole parameters, on the rank that has most of them
        self.nbytes = chunk.largest * chunk.dtype.itemsize

    @property
    def storages(self) -> list[torch.UntypedStorage]:
        """All that are emptied and filled."""
        rooms = [self._arriving] if self.float8 is None else [self._arriving, self._carried]
        return [self.storage, *(room.storage for room in rooms)]

    @property
    def is_away(self) -> bool:
        """Whether this rank's pieces are off the device."""
        return "parameters" in self.chunk.places

    @property
    def is_filled(self) -> bool:
        """Whether the parameters are whole, or can be without a gather."""
        return self.is_whole or self.is_kept

    @property
    def _key(self) -> str:
        return f"parameters-{self.chunk.number}"

    def read(self) -> None:
        """Start to read this rank's pieces, where they are on disk."""
        if self.is_away and not self.is_filled and self.pending is None:
            assert self._store is not None
            self._store.start(self._key, home_of(self.chunk))

    def start(self) -> None:
        """Start to gather, unless that is done or under way."""
        if self.is_whole or self.pending is not None:
            return
        assert self.chunk.home is not None
        self._recheck()
        if self.is_kept:
            return
        with raw():
            self._marks = self._marks_now()
            own = self.chunk.home
            shard_group = self.chunk.shard_group
            mesh, axis = shard_group.mesh, shard_group.axis
            self._carried.open()
            # what computes meanwhile waits neither for the copy nor for the gather; these are of one stream
            stream = None if self._store is None or not self.is_away else self._store.bringing
            if mesh.shape[axis] > 1 and mesh.order(axis) is not None:
                stream = None  # the ranks' rows are sorted when they are there, by the stream that asked
            with beside(stream, self.chunk.device):
                if self.is_away:
                    assert self._store is not None
                    (own,) = self._taken = self._store.take(self._key, home_of(self.chunk))
                if self.chunk.lent:
                    own = values_of(self.chunk)
                if self.float8 is not None:
                    if not self.float8.is_scaled:
                        agree_on_scales([self.float8])
                    self._row = self.float8.pack(own)
                    self.pending = start_gather(self.float8.rows, self._row, mesh, axis)
                elif self._fetching is None:
                    self.pending = start_gather(self.rows, own, mesh, axis)
                else:
                    self.pending, self._own = self._fetching.start(own), own
            self._brought = None if stream is None else stream.record_event()

    def _await(self) -> None:
        """Wait for what is under way; on an accelerator its stream does."""
        assert self.pending is not None
        self.pending.wait()
        wait_for(self._brought, self.chunk.device)
        self._brought = None

    def fill(self) -> None:
        """Wait for what is under way, and let the parameters be whole."""
        if self.is_whole:
            return
        if not self.is_kept:
            self._take_in()
        with raw():
            self._count_versions(-1)
            self.chunk.show(self._whole)
            self._marks = self._marks_now()
        self.is_whole, self.is_kept = True, False

    def _take_in(self) -> None:
        self._await()
        if self._marks_now() != self._marks:  # what came is out of date, on all ranks
            self._let_go()
            self.start()
            self._await()
        with raw():
            self.storage.resize_(self._bytes)
            if self.float8 is not None:
                self._arriving.open()
                self.float8.unpack(self.rows)
            outof = self._outof if self._own is None else [*self.chunk.pieces(self._own), *self._outof]
            if self._into:
                foreach_copy_(self._into, outof)
        self._let_go()

    def _let_go(self) -> None:
        self.pending = self._own = self._row = None
        if self._taken and self._store is not None:
            self._store.tell_outside(self._taken)  # of a CPU it is what lies on the host
        self._taken = []
        self._arriving.close()
        self._carried.close()

    def release(self) -> None:
        """Let the parameters be pieces again, with what was written to them, and give the memory back."""
        self.rest()
        self._empty()

    def unused(self) -> None:
        """Let the parameters be pieces again, if no module computes with them, or will in a backward pass."""
        if self.is_whole and not self.users and not self.marks and not self.is_recorded:
            self.open.clear()
            self.release()

    def _recheck(self) -> None:
        """Let go of what is kept, if the pieces were written to: so they were on all ranks."""
        self.adopt()
        if self.is_kept and (self.is_open or self._marks_now() != self._marks):
            self._empty()

    def _empty(self) -> None:
        self.storage.resize_(0)
        self.is_kept = False

    def rest(self) -> None:
        """Let the parameters be pieces again, and keep the memory filled for the next use.

        Who uses them meanwhile is no module that has them gathered for its backward pass.
        """
        if not self.is_whole:
            return
        assert self.chunk.home is not None
        is_replaced = (self.is_open or self._marks_now() != self._marks) and self._keep_written()
        # a parameter that changed its device before backward would get a second accumulator of gradients
        is_off = self.chunk.home.device != self.chunk.device
        hides = is_off and (torch.is_grad_enabled() or self._hidden is not None)
        with raw():
            home = self.chunk.home
            if hides:
                nothing = float("nan") if home.is_floating_point() else 0
                home = self._flat.new_full((), nothing).expand(home.shape)
            self._count_versions(1)
            resting = self.chunk.resting_in(home)
            self.chunk.show(resting)
            self._hidden = resting if hides else None
        self.is_whole, self.is_kept = False, True
        if self.is_away:
            self.chunk.marks = list(map(written_mark, self._ps))
        self._marks = self._marks_now()
        if is_replaced:
            self._empty()

    def copy_of(self, m: ShardedParam) -> torch.Tensor | None:
        """A copy of a whole parameter whose values are kept here while it shows its piece, if they are."""
        if self.float8 is not None:
            return None
        self._recheck()
        with raw():
            return self._whole.tensors[m.number].clone() if self.is_kept else None

    def fetched(self, m: ShardedParam) -> torch.Tensor | None:
        """A copy of a whole parameter whose pieces are off the device, for a call that is recorded."""
        if self.float8 is not None:
            return None
        self.start()
        self.fill()
        with raw():
            whole = self._whole.tensors[m.number].clone()
        if not self.users and not self.marks:
            self.release()
        return whole

    def hidden(self, m: ShardedParam) -> torch.Tensor | None:
        """This rank's piece of a parameter that shows another on the device for the time being."""
        if self._hidden is None or self.is_whole:
            return None
        assert self.chunk.home is not None
        with raw():
            return list(self.chunk.pieces(self.chunk.home))[m.number]

    def reveal(self) -> None:
        """No backward pass is to come: let the parameters be their pieces, where these are off the device."""
        if self._hidden is not None and not self.is_whole:
            assert self.chunk.home is not None
            self.adopt()
            show_pieces(self.chunk, self.chunk.home)
            self._hidden = None

    def drop(self, *, reveals: bool, is_over: bool = True) -> None:
        """Let go of what was gathered for nothing, and of parameters that no module is using.

        Args:
            is_over: a backward pass has been, whatever is recorded.
        """
        if self.is_recorded and not is_over:
            return
        self.marks, self.is_recorded = 0, False
        self.open.clear()
        if self.pending is not None:
            self._await()
            self._let_go()
        if not self.users:
            self.release()
            if reveals:
                self.reveal()

    @property
    def is_open(self) -> bool:
        """Whether somebody may write to the parameters so that no version counts it."""
        return any(map(is_handed_out, self._ps if self._times else self._uncut))

    def handed_out(self) -> None:
        """Be told that somebody gets an alias of a cut parameter's data."""
        self._times += 1

    def _marks_now(self) -> _Marks:
        uncut = list(map(written_mark, self._uncut))
        with raw():
            return _Marks(
                self._times, list(map(read_version, self._ps)), list(map(_address, self._ps)), uncut
            )

    def _keep_written(self) -> bool:
        """Let this rank's pieces have what was written to the whole parameters: the same on all ranks.

        Whether it is elsewhere than what was gathered, which is out of date then: ``p.data = ...``.
        """
        now, before = self._marks_now(), self._marks
        every = self.is_open or now.times != before.times or now.uncut != before.uncut
        with raw(), torch.no_grad():
            for i, m in enumerate(self.chunk.members):
                same = now.versions[i] == before.versions[i] and now.addresses[i] == before.addresses[i]
                if every or not same:
                    self._keep(m, m.piece(plain(m.p.detach())))
        return now.addresses != before.addresses

    def adopt(self) -> None:
        """Take in what somebody has put in place of a cut parameter's data (``p.data = ...``)."""
        assert self.chunk.home is not None
        if self.is_whole:
            return
        with raw(), torch.no_grad():
            pieces = self.chunk.pieces(self.chunk.home) if self._hidden is None else self._hidden.tensors
            if list(map(_address, self._ps)) == list(map(_address, pieces)):
                return
            for m, piece in zip(self.chunk.members, pieces, strict=True):
                if m.p.data_ptr() != piece.data_ptr() and piece.numel():
                    new = plain(m.p.data)
                    keep_apart(m.p, piece)
                    show(m.p, piece, m.rest)
                    self._keep(m, new)
            self._empty()

    def _keep(self, m: ShardedParam, piece: torch.Tensor) -> None:
        """Let this rank's piece of a parameter be these values."""
        chunk = self.chunk
        if self.is_whole and self.float8 is not None:
            before = chunk.pieces(self.float8.own())[m.number]
            piece = self.float8.unrounded(m, before, piece.to(before))
        if chunk.lent:  # gradients stand in its place
            assert chunk.master is not None
            merge(chunk.pieces(chunk.master)[m.number], piece)
            return
        assert chunk.home is not None
        here = chunk.pieces(chunk.home)[m.number]
        values = piece.to(here)
        if here.is_meta or not torch.equal(here, values):
            here.copy_(values)
            m.is_written = chunk.is_written = True
            if m.dim is not None:
                m.p._source.forget()  # type: ignore[attr-defined]

    def _count_versions(self, by: int) -> None:
        """Let autograd take a released parameter for one that was written to.

        If backward asks for it, and no hook has had it gathered, that is an error, never a wrong number.
        """
        if set_versions is not None:
            set_versions(self._cut, tuple([read_version(p) + by for p in self._cut]))


class _Room:
    """The memory of a buffer, which comes and goes."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self.storage = buffer.untyped_storage()
        self._nbytes = self.storage.nbytes()
        self.close()

    def open(self) -> None:
        """Let it have its size."""
        self.storage.resize_(self._nbytes)

    def close(self) -> None:
        """Give the memory back."""
        self.storage.resize_(0)


def bring_home(chunk: Chunk) -> None:
    """Put the pieces of a chunk's parameters into one buffer."""
    with raw():
        chunk.home = chunk.flat(chunk.dtype)
        chunk.bring_together(chunk.resting_in(chunk.home))


def show_pieces(chunk: Chunk, home: torch.Tensor) -> None:
    """Let the parameters of a chunk be this rank's pieces, as they stand in a flat ``home``."""
    chunk.home = home
    with raw():
        chunk.show(chunk.resting_in(home))
    chunk.marks = [written_mark(m.p) for m in chunk.members]


def home_of(chunk: Chunk) -> list[torch.Tensor]:
    """This rank's pieces off the device; copied, where a parameter was written to since it showed them."""
    assert chunk.home is not None
    if chunk.places["parameters"] in MEMORIES:
        return [chunk.home]
    ps = [m.p for m in chunk.members]
    written = chunk.marks != list(map(written_mark, ps)) or any(map(is_handed_out, ps))
    chunk.is_written = chunk.is_written or written
    return [chunk.home.clone() if chunk.is_written else chunk.home]


# ---- parameters that are cut along the data axis (ZeRO-3, FSDP): whole while a module computes with them
#
# Between its uses a parameter is a ``Shard`` along the data axis, and says so. Hooks of the modules gather
# a chunk before their forward, and again before their backward, into the same storage, so that what
# autograd saved of it is valid then. What is used in which order is recorded; from the second time on the
# next chunks are gathered while this one computes. Where a pass leaves that order, chunks are gathered when
# they are needed.


_OBJECTS = 3
"""So many objects of classes of their own, one within another, are looked into for what a module gives."""


class Use(NamedTuple):
    """One use of a chunk by a module: ``phase`` is ``"forward"`` or ``"backward"``."""

    phase: str
    chunk: int


class Prefetcher:
    """Gathers chunks before modules use them and releases them after.

    Args:
        chunks: with the modules that use each.
        ahead: at most so many bytes of chunks are gathered before they are needed.
        store: where this rank's pieces are, if not on the device.
        float8: the names of weights that travel in 8 bits.
    """

    def __init__(
        self,
        chunks: Sequence[tuple[Sequence[nn.Module], Chunk]],
        mesh: Mesh,
        ahead: float,
        store: OffloadStore | None = None,
        float8: Collection[str] = (),
    ) -> None:
        self.mesh, self._ahead = mesh, ahead
        bring = partial(_brought, weakref.ref(self))
        self.held = [
            Unsharded(i, chunk, store, partial(bring, i), float8) for i, (_, chunk) in enumerate(chunks)
        ]
        mesh.emptied.update({memory_id(g.storage): g for g in self.held})
        self._largest = max((g.nbytes for g in self.held), default=0)
        self._of = {id(g.chunk): g for g in self.held}
        # as last seen, with and without gradients
        self.orders: dict[bool, list[Use]] = {}
        self._seen: list[Use] = []
        self._again: dict[bool, set[int]] = {}  # chunks that its forward uses more than once
        by_module: dict[nn.Module, list[Unsharded]] = {}
        for (modules, _), g in zip(chunks, self.held, strict=True):
            for module in modules:
                by_module.setdefault(module, []).append(g)
            for m in g.chunk.members:
                if m.dim is not None:
                    m.rest = m.shard.loan()
                    is_off = partial(_is_elsewhere, g.chunk)
                    source = ShardedStandIn(m, g.bring, g, is_off)
                    m.p._source = source  # type: ignore[attr-defined]
                    stamp(m.p, m.rest)
        self._watched: weakref.WeakKeyDictionary[nn.Module, tuple[list[Unsharded], Callable[[], None]]]
        self._watched = weakref.WeakKeyDictionary()
        for module, used in by_module.items():
            self._watch(module, used)

    def agree_on_scales(self) -> None:
        """Before a forward pass: of what is gathered in 8 bits."""
        agree_on_scales([g.float8 for g in self.held if g.float8 is not None])

    @property
    def chunk_of(self) -> dict[int, Chunk]:
        """By ``id`` of a parameter, the chunk that has it."""
        return {id(m.p): g.chunk for g in self.held for m in g.chunk.members}

    # ---- hooks

    def gather_before(self, block: nn.Module) -> None:
        """Let all that a block uses be gathered before it, and nothing within it."""
        inside = [m for m in block.modules() if m in self._watched]
        around = [m for m in self._watched if any(part is block for part in m.modules())]  # itself, too
        chunk_of = self.chunk_of
        used = dict.fromkeys(g for m in inside for g in self._watched[m][0])
        used |= dict.fromkeys(self._of[id(chunk_of[id(p)])] for p in parameters_in(block))
        missing = used.keys() - {g for m in around for g in self._watched[m][0]}
        if missing or any(m is not block for m in inside):
            for module in inside:
                self._watched.pop(module)[1]()
            self._watch(block, list(used))

    def _watch(self, module: nn.Module, used: list[Unsharded]) -> None:
        watched = weakref.ref(module)  # a copy of the module has its hooks too
        looks_up = _only_looks_up(module, used)
        running: list[_Call] = []

        def enter(module: nn.Module, args: Any, kwargs: Any) -> Any:
            if module is not watched() or open_transform() is not None:  # that gathers what it meets
                return None
            refuse_recorded()
            call = _Call(self._need, used, self.mesh)
            running.append(call)
            for g in used:
                g.users += 1
                self._need(g)
            marked = _marked((args, kwargs), call.done)
            if marked is not None and not _in_backward():
                for g in used:
                    g.marks += 1
            return marked

        def leave(module: nn.Module, args: Any, out: Any) -> Any:
            if module is not watched() or not running or open_transform() is not None:
                return None
            call = running.pop()
            call.end()
            for g in used:
                g.users -= 1
            before = out
            out = self._own_memory(out, used)
            if not (looks_up and len(forward_hooks(module)[1]) == 1):
                out = _before_backward(out, call.needed)
            if not _in_backward():  # else its backward follows
                for g in used:
                    if not g.users and not g.is_recorded:
                        if self._is_kept(g):
                            g.rest()
                        else:
                            g.release()
            return None if out is before else out

        before = module.register_forward_pre_hook(enter, with_kwargs=True)
        after = module.register_forward_hook(leave, always_call=True)

        def undo() -> None:
            before.remove()
            after.remove()

        self._watched[module] = used, undo

    def _own_memory(self, out: Any, used: list[Unsharded]) -> Any:
        """What a module gives, with copies of the views of its parameters."""
        stores = {memory_id(g.storage) for g in used}
        with raw():
            views = {
                id(x): None
                for x in tensors_in(out, objects=_OBJECTS)
                if not isinstance(x, nn.Parameter) and x.layout is torch.strided and memory_id(x) in stores
            }
        return tree_map(lambda x: x.clone() if id(x) in views else x, out) if views else out

    def bring(self, g: Unsharded) -> None:
        """Let a chunk be whole, if it is not."""
        if not g.is_whole:
            self._need(g)

    def sent(self, chunk: Chunk) -> None:
        """The gradients of a chunk have been taken: backward is done with it, if nothing else will say so."""
        g = self._of[id(chunk)]
        if not g.users and not g.marks and not g.is_recorded and not torch.is_grad_enabled():
            g.open.clear()
            g.release()

    # ---- order

    def begin(self, *, reveals: bool = True) -> None:
        """A new pass over the model begins: remember what the last one used."""
        if self._seen:
            trained = self._seen[-1].phase == "backward"
            self.orders[trained] = self._seen
            times = Counter(use.chunk for use in self._seen if use.phase == "forward")
            self._again[trained] = {chunk for chunk, n in times.items() if n > 1}
        self._seen = []
        for g in self.held:
            g.users = 0
        self.end(reveals=reveals, is_over=reveals)
        for g in self.held:
            g.adopt()
            if g.float8 is not None:
                g.float8.scale_by(None)  # weights may have changed

    def end(self, *, reveals: bool = True, is_over: bool = True) -> None:
        """A backward pass is over: release all, drop what was gathered for nothing."""
        for g in self.held:
            g.drop(reveals=reveals, is_over=is_over)
        self.forget()

    def forget(self) -> None:
        """What stood in for parameters is out of date."""
        for g in self.held:
            for m in g.chunk.members:
                if m.dim is not None:
                    m.p._source.forget()  # type: ignore[attr-defined]

    @property
    def order(self) -> list[Use]:
        """What is expected of this pass."""
        return self.orders.get(_trains(), [])

    @property
    def recorded(self) -> list[Use]:
        """The uses of the last whole pass of training."""
        whole = bool(self._seen) and self._seen[-1].phase == "backward"
        return self._seen if whole else self.orders.get(True, [])

    def _need(self, g: Unsharded) -> None:
        use = Use("backward" if _in_backward() else "forward", g.number)
        if g.is_whole and self._seen and self._seen[-1] == use:
            if not _in_backward() and self.order[len(self._seen) : len(self._seen) + 1] == [use]:
                self._seen.append(use)  # the first time it was released between the two
            return  # what comes next is under way
        self._seen.append(use)
        g.start()
        at, order = len(self._seen), self.order
        if order[at - 1 : at] == [use]:
            self._look_ahead(g, order[at:])
        g.fill()

    def _look_ahead(self, now: Unsharded, coming: list[Use]) -> None:
        """Start what is needed next, and nothing for the pass after this.

        The next chunk comes whatever its size, so that it travels while this one computes; what goes beyond
        it is bounded, and is no more than the largest.
        """
        comes = self._ahead > 0
        budget = min(self._ahead, self._largest)
        budget -= sum(g.nbytes for g in self.held if g.pending is not None and g is not now)
        for i, use in enumerate(coming):
            g = self.held[use.chunk]
            if use.phase == self._seen[-1].phase:
                if g.is_filled or g.pending is not None:
                    comes = comes and (g.is_filled or g is now)
                    continue
                if (comes or g.nbytes <= budget) and not g.is_open:
                    comes, budget = False, budget - g.nbytes
                    g.start()
                    continue
            return self._read_ahead(coming[i:])

    def _read_ahead(self, coming: list[Use]) -> None:
        """Read from disk what will be gathered next."""
        budget = self._ahead
        for use in coming:
            g = self.held[use.chunk]
            budget -= g.nbytes
            g.read()
            if budget < 0:
                return

    def _is_kept(self, g: Unsharded) -> bool:
        """Whether a chunk stays whole after a use: it would be the next gathered, or is used again soon."""
        order, at = self.order, len(self._seen)
        if torch.is_grad_enabled() and g.chunk.stays:
            return True
        if order[at - 1 : at] != self._seen[-1:]:
            return False
        for use in order[at:]:
            if use.chunk == g.number:
                break
            if not self.held[use.chunk].is_filled:
                again = g.number in self._again.get(_trains(), ()) and Use("forward", g.number) in order[at:]
                if not again:
                    return False
                break
        else:
            return False
        kept = sum(other.nbytes for other in self.held if other.is_filled and not other.users)
        return kept <= self._ahead


def _brought(prefetcher: weakref.ref[Prefetcher], number: int) -> None:
    owner = prefetcher()
    if owner is not None:
        owner.bring(owner.held[number])


def _only_looks_up(module: nn.Module, used: Sequence[Unsharded]) -> bool:
    """Whether a module's backward reads none of its parameters, and fills gradients while these are cut.

    Autograd keeps a gradient as it comes if its strides are the parameter's.
    """
    if type(module) is not nn.Embedding or module.max_norm is not None or module.sparse:
        return False
    weight = own_parameters(module).get("weight")  # none if it is made of others, before each call
    members = [(g, m) for g in used for m in g.chunk.members if m.p is weight]
    return weight is not None and all(m.dim == 0 and not g.is_away for g, m in members)


def _is_elsewhere(chunk: Chunk) -> bool:
    return chunk.home is not None and chunk.home.device != chunk.device


def _in_backward() -> bool:
    return current_graph_task_id() != -1


def _trains() -> bool:
    return torch.is_grad_enabled() or _in_backward()


class _Call:
    """A call of a module that uses chunks: they are whole from its backward's begin to its end.

    Within it modules may use the same, and be done before it is.
    """

    def __init__(self, need: Callable[[Unsharded], None], used: Sequence[Unsharded], mesh: Mesh) -> None:
        self._need, self._used = need, used
        self._low = None if _in_backward() else autocast_dtype(used[0].chunk.device.type)
        self._saving = None if self._low is None else saving_sources(mesh, self._low)
        if self._saving is not None:
            self._saving.__enter__()

    def end(self) -> None:
        """It has run: nothing of what autocast has made of its parameters may outlive them."""
        if self._saving is not None:
            self._saving.__exit__(None, None, None)
        if self._low is not None:
            torch.clear_autocast_cache()

    def needed(self, *_: Any) -> None:
        """Its backward begins; called once more for each output, and for what that is a view of."""
        for g in self._used:
            g.open.add(self)
            self._need(g)

    def done(self) -> None:
        """Its backward has come by its inputs."""
        for g in self._used:
            g.open.discard(self)
            g.marks = max(g.marks - 1, 0)
            # with gradients backward is recorded: to be gone through too
            g.is_recorded = g.is_recorded or torch.is_grad_enabled()
            if not (g.users or g.open or g.chunk.stays or g.is_recorded):
                g.release()


class _Mark(OwnFunction):
    """A node before a module: its backward runs when all gradients have come out of the module."""

    @staticmethod
    def forward(ctx: Any, done: Callable[[], None], *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.done = done
        ctx.set_materialize_grads(False)  # what made an input that the loss does not hang on gets no gradient
        return tuple(x.detach() for x in inputs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        ctx.done()
        return (None, *grads)


_mark: Callable[..., tuple[torch.Tensor, ...]] = super(torch.autograd.Function, _Mark).apply


def _marked(tree: Any, done: Callable[[], None]) -> Any:
    """A module's inputs behind a :class:`_Mark`; as they are if none of them needs a gradient."""
    inputs = {id(x): x for x in tensors_in(tree) if x.requires_grad}
    if not inputs or not torch.is_grad_enabled():
        return None
    # a parameter that is cut shows its piece: who is given it as an argument is to have all of it
    inputs = {key: whole_of(x) for key, x in inputs.items()}
    with raw():
        outs = dict(zip(inputs, _mark(done, *inputs.values()), strict=True))
        for key, x in inputs.items():
            if type(x) is DTensor:
                stamp_alias(outs[key], x)
    return tree_map(lambda x: outs.get(id(x), x), tree)


def _before_backward(out: Any, need: Callable[..., None]) -> Any:
    """What a module gives; before its backward ``need`` is called.

    It must come before other hooks of the last operation, which may gather or recompute: so in a node of
    its own. What then is written to in place goes past that node, and has the hook on its own one, or, where
    it is a view (of linear's product, if that has more than two dims), on the one of what it views.
    """

    def hooked(x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or x.grad_fn is None:
            return x
        x.grad_fn.register_prehook(need)
        with raw():
            base = base_of(x)
            if base is not None and base.grad_fn is not None:
                base.grad_fn.register_prehook(need)
            alias = x.view_as(x)
            alias = stamp_alias(alias, x) if type(x) is DTensor else alias
        assert alias.grad_fn is not None
        alias.grad_fn.register_prehook(need)
        return alias

    if torch.is_grad_enabled():
        if isinstance(out, torch.Tensor) or type(out) in (tuple, list):
            return tree_map(hooked, out)
        for x in tensors_in(out, objects=_OBJECTS):
            hooked(x)
    return out
