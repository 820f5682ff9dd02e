"""Parameters that are cut along the data axis (ZeRO-3, FSDP): whole while a module computes with them.

Between its uses a parameter is a ``Shard`` along the data axis, and says so. Hooks of the modules gather a
chunk before their forward, and again before their backward, into the same storage, so that what autograd
saved of it is valid then. What is used in which order is recorded; from the second time on the next
chunks are gathered while this one computes. Where a pass leaves that order, chunks are gathered when they are
needed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._C import DisableTorchFunctionSubclass as raw

from espalier.comm import Pending
from espalier.comm.flat import start_gather
from espalier.mesh import Mesh
from espalier.parallel.data.chunks import Chunk, show
from espalier.parallel.data.residency import Shelf
from espalier.parallel.data.resting import Resting
from espalier.tensor import plain, stamp
from espalier.tensor.dispatch import tensors_in
from espalier.tensor.dtensor import DTensor
from espalier.tensor.fallback import tree_map
from espalier.tensor.loans import stamp_alias


class Use(NamedTuple):
    """One use of a chunk by a module: ``phase`` is ``"forward"`` or ``"backward"``."""

    phase: str
    chunk: int


class Gathered:
    """The storage of a chunk's whole parameters: filled while they are used, of no size between.

    Attributes:
        wholes: views of it, one for each member.
        users: modules that are running and use it.
        marks: uses in a forward pass whose backward is to come, and will tell when it is done.
        rows, pending: what is on its way to it.
    """

    def __init__(self, number: int, chunk: Chunk, shelf: Shelf | None) -> None:
        self.number, self.chunk, self._shelf = number, chunk, shelf
        with raw():
            elements = sum(m.size for m in chunk.members)
            self._flat = torch.empty(elements, dtype=chunk.dtype, device=chunk.device)
            self.wholes = chunk.wholes(self._flat)
            self._places = chunk.in_wholes(self.wholes)
            self._bytes = self._flat.untyped_storage().nbytes()
            self.storage = self._flat.untyped_storage()
            self.storage.resize_(0)
            _count_versions(chunk, 1)
        self.is_whole = self.is_hidden = False
        self.users = self.marks = 0
        self.rows: torch.Tensor | None = None
        self.pending: Pending | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the whole parameters, on the rank that has most of them."""
        return self.chunk.largest * self.chunk.dtype.itemsize

    @property
    def is_away(self) -> bool:
        """Whether this rank's pieces are off the device."""
        return "parameters" in self.chunk.places

    @property
    def _key(self) -> str:
        return f"parameters-{self.chunk.number}"

    def read(self) -> None:
        """Start to read this rank's pieces, where they are on disk."""
        if self.is_away and not self.is_whole and self.pending is None:
            assert self._shelf is not None
            self._shelf.start(self._key, home_of(self.chunk))

    def start(self) -> None:
        """Start to gather, unless that is done or under way."""
        if self.is_whole or self.pending is not None:
            return
        assert self.chunk.home is not None
        with raw():
            own = self.chunk.home
            if self.is_away:
                assert self._shelf is not None
                (own,) = self._shelf.take(self._key, home_of(self.chunk))
            lane = self.chunk.lane
            self.rows = self.chunk.rows(lane.n, self.chunk.dtype)
            self.pending = start_gather(self.rows, own, lane.mesh, lane.axis)

    def fill(self) -> None:
        """Wait for what is under way, and let the parameters be whole."""
        if self.is_whole:
            return
        assert self.pending is not None and self.rows is not None
        self.pending.wait()
        with raw():
            self.storage.resize_(self._bytes)
            self.chunk.unpack(self.rows, self._places)
            _count_versions(self.chunk, -1)
            for m, whole in zip(self.chunk.members, self.wholes, strict=True):
                show(m.p, whole, m.full)
        self.rows = self.pending = None
        self.is_whole = True

    def release(self) -> None:
        """Let the parameters be pieces again, and give the memory back."""
        if not self.is_whole:
            return
        assert self.chunk.home is not None
        # a parameter that changed its device before backward would get a second accumulator of gradients
        self.is_hidden = self.chunk.home.device != self.chunk.device and torch.is_grad_enabled()
        with raw():
            home = self.chunk.home
            if self.is_hidden:
                nothing = float("nan") if home.is_floating_point() else 0
                home = self._flat.new_full((), nothing).expand(home.shape)
            _count_versions(self.chunk, 1)
            for m, piece in zip(self.chunk.members, self.chunk.pieces(home), strict=True):
                show(m.p, piece, m.rest)
        self.storage.resize_(0)
        self.is_whole = False
        self.chunk.versions = [m.p._version for m in self.chunk.members]

    def reveal(self) -> None:
        """No backward pass is to come: let the parameters be their pieces, where these are off the device."""
        if self.is_hidden and not self.is_whole:
            assert self.chunk.home is not None
            show_pieces(self.chunk, self.chunk.home)
            self.is_hidden = False

    def drop(self) -> None:
        """Let go of what was gathered for nothing, and of parameters that no module is using."""
        self.marks = 0
        if self.pending is not None:
            self.pending.wait()
            self.rows = self.pending = None
        if not self.users:
            self.release()
            self.reveal()

    def adopt(self) -> None:
        """Take in what somebody has put in place of a parameter's data (``p.data = ...``)."""
        assert self.chunk.home is not None
        if self.is_whole:
            return
        with raw():
            for m, piece in zip(self.chunk.members, self.chunk.pieces(self.chunk.home), strict=True):
                if m.p.data_ptr() != piece.data_ptr() and piece.numel():
                    new = plain(m.p.data)
                    show(m.p, piece, m.rest)
                    m.p.detach().copy_(new)


def _count_versions(chunk: Chunk, by: int) -> None:
    """Let autograd take a released parameter for one that was written to.

    If a backward pass asks for it, and no hook has had it gathered, that is an error, never a wrong number.
    """
    if _set_versions is not None:
        ps = tuple(m.p for m in chunk.members if m.dim is not None)
        _set_versions(ps, tuple(p._version + by for p in ps))


# private, so it may go
_set_versions: Any = getattr(torch._C._autograd, "_unsafe_set_version_counter", None)


class Gathering:
    """Gathers chunks before modules use them and releases them after.

    Args:
        chunks: with the modules that use each.
        ahead: at most so many bytes of chunks are gathered before they are needed.
        shelf: where this rank's pieces are, if not on the device.
    """

    def __init__(
        self,
        chunks: Sequence[tuple[Sequence[nn.Module], Chunk]],
        mesh: Mesh,
        ahead: float,
        shelf: Shelf | None = None,
    ) -> None:
        self.mesh, self._ahead = mesh, ahead
        self.held = [Gathered(i, chunk, shelf) for i, (_, chunk) in enumerate(chunks)]
        self._of = {id(g.chunk): g for g in self.held}
        # as last seen, with and without gradients
        self.orders: dict[bool, list[Use]] = {}
        self._seen: list[Use] = []
        by_module: dict[nn.Module, list[Gathered]] = {}
        for (modules, _), g in zip(chunks, self.held, strict=True):
            for module in modules:
                by_module.setdefault(module, []).append(g)
            for m in g.chunk.members:
                if m.dim is not None:
                    m.rest = m.shard.loan()
                    source = Resting(m, partial(self._bring, g), partial(_is_elsewhere, g.chunk))
                    m.p._source = source  # type: ignore[attr-defined]
                    stamp(m.p, m.rest)
        for module, used in by_module.items():
            self._watch(module, used)

    # ---- hooks

    def _watch(self, module: nn.Module, used: list[Gathered]) -> None:
        watched = weakref.ref(module)  # a copy of the module has its hooks too

        def enter(module: nn.Module, args: Any, kwargs: Any) -> Any:
            if module is not watched():
                return None
            for g in used:
                g.users += 1
                self._need(g)
            marked = _marked((args, kwargs), lambda: self._done(used))
            if marked is not None and not _in_backward():
                for g in used:
                    g.marks += 1
            return marked

        def leave(module: nn.Module, args: Any, out: Any) -> Any:
            if module is not watched():
                return None
            for g in used:
                g.users -= 1
            given = out
            out = _before_backward(self._own_memory(out, used), lambda *_: self._needed_again(used))
            if not _in_backward():  # else its backward follows
                for g in used:
                    if not g.users and not self._is_kept(g):
                        g.release()
            return None if out is given else out

        module.register_forward_pre_hook(enter, with_kwargs=True)
        module.register_forward_hook(leave, always_call=True)

    def _own_memory(self, out: Any, used: list[Gathered]) -> Any:
        """What a module gives, with copies of the views of its parameters."""
        stores = {g.storage._cdata for g in used}
        with raw():
            views = {
                id(x): None
                for x in _all_tensors(out)
                if not isinstance(x, nn.Parameter)
                and x.layout is torch.strided
                and x.untyped_storage()._cdata in stores
            }
        return tree_map(lambda x: x.clone() if id(x) in views else x, out) if views else out

    def _needed_again(self, used: list[Gathered]) -> None:
        for g in used:
            self._need(g)

    def _bring(self, g: Gathered) -> None:
        if not g.is_whole:
            self._need(g)

    def _done(self, used: list[Gathered]) -> None:
        for g in used:
            g.marks = max(g.marks - 1, 0)
            # with gradients backward is recorded: to be gone through too
            if not g.users and not g.chunk.stays and not torch.is_grad_enabled():
                g.release()

    def sent(self, chunk: Chunk) -> None:
        """The gradients of a chunk have been taken: backward is done with it, if nothing else will say so."""
        g = self._of[id(chunk)]
        if not g.users and not g.marks and not torch.is_grad_enabled():
            g.release()

    # ---- order

    def begin(self) -> None:
        """A new pass over the model begins: remember what the last one used."""
        if self._seen:
            self.orders[self._seen[-1].phase == "backward"] = self._seen
        self._seen = []
        for g in self.held:
            g.users = 0
        self.end()
        for g in self.held:
            g.adopt()

    def end(self) -> None:
        """A backward pass is over: release all, drop what was gathered for nothing."""
        for g in self.held:
            g.drop()
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
        return self.orders.get(torch.is_grad_enabled() or _in_backward(), [])

    @property
    def recorded(self) -> list[Use]:
        """The uses of the last whole pass of training."""
        whole = bool(self._seen) and self._seen[-1].phase == "backward"
        return self._seen if whole else self.orders.get(True, [])

    def _need(self, g: Gathered) -> None:
        use = Use("backward" if _in_backward() else "forward", g.number)
        if not (self._seen and self._seen[-1] == use and g.is_whole):
            self._seen.append(use)
        g.start()
        at, order = len(self._seen), self.order
        if order[at - 1 : at] == [use]:
            self._look_ahead(g, order[at:])
        g.fill()

    def _look_ahead(self, now: Gathered, coming: list[Use]) -> None:
        """Start what is needed next: no more than the largest chunk, and nothing for the pass after this."""
        budget = min(self._ahead, max(g.nbytes for g in self.held))
        budget -= sum(g.nbytes for g in self.held if g.pending is not None and g is not now)
        for i, use in enumerate(coming):
            g = self.held[use.chunk]
            if use.phase == self._seen[-1].phase:
                if g.is_whole or g.pending is not None:
                    continue
                if g.nbytes <= budget:
                    budget -= g.nbytes
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

    def _is_kept(self, g: Gathered) -> bool:
        at = len(self._seen)
        next_is = self.order[at : at + 1] == [Use("backward", g.number)]
        return torch.is_grad_enabled() and (next_is or g.chunk.stays)


def _is_elsewhere(chunk: Chunk) -> bool:
    return chunk.home is not None and chunk.home.device != chunk.device


def show_pieces(chunk: Chunk, home: torch.Tensor) -> None:
    """Let the parameters of a chunk be this rank's pieces, as they stand in a flat ``home``."""
    chunk.home = home
    with raw():
        for m, piece in zip(chunk.members, chunk.pieces(home), strict=True):
            show(m.p, piece, m.rest)
    chunk.versions = [m.p._version for m in chunk.members]


def home_of(chunk: Chunk) -> list[torch.Tensor]:
    """This rank's pieces off the device; copied, where a parameter was written to since it showed them."""
    assert chunk.home is not None
    if chunk.places["parameters"] == "host":
        return [chunk.home]
    chunk.is_written = chunk.is_written or chunk.versions != [m.p._version for m in chunk.members]
    return [chunk.home.clone() if chunk.is_written else chunk.home]


def _all_tensors(tree: Any, depth: int = 3) -> list[torch.Tensor]:
    """The tensors in what a module gives: in containers, and in objects of classes of its own."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, tuple | list | dict):
        found = list(tree.values()) if isinstance(tree, dict) else tree
    else:
        found = list(getattr(tree, "__dict__", {}).values()) if depth else []
        depth -= 1
    return [t for x in found for t in _all_tensors(x, depth)]


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


class _Mark(torch.autograd.Function):
    """A node before a module: its backward runs when all gradients have come out of the module."""

    espalier = True

    @staticmethod
    def forward(ctx: Any, done: Callable[[], None], *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.done = done
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
    with raw():
        outs = dict(zip(inputs, _mark(done, *inputs.values()), strict=True))
        for key, x in inputs.items():
            if type(x) is DTensor:
                stamp_alias(outs[key], x)
    return tree_map(lambda x: outs.get(id(x), x), tree)


def _before_backward(out: Any, need: Callable[..., None]) -> Any:
    """What a module gives; before its backward ``need`` is called.

    It must come before other hooks of the last operation, which may gather or recompute: so in a node of
    its own. What then is written to in place goes past that node, and has the hook on its own one.
    """

    def hooked(x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or x.grad_fn is None:
            return x
        x.grad_fn.register_prehook(need)
        with raw():
            alias = x.view_as(x)
            alias = stamp_alias(alias, x) if type(x) is DTensor else alias
        assert alias.grad_fn is not None
        alias.grad_fn.register_prehook(need)
        return alias

    if torch.is_grad_enabled():
        if isinstance(out, torch.Tensor) or type(out) in (tuple, list):
            return tree_map(hooked, out)
        for x in _all_tensors(out):
            hooked(x)
    return out
