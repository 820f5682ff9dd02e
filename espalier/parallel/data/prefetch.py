"""Parameters that are cut along the data axis (ZeRO-3, FSDP): whole while a module computes with them.

Between its uses a parameter is a ``Shard`` along the data axis, and says so. Hooks of the modules gather
a chunk before their forward, and again before their backward, into the same storage, so that what
autograd saved of it is valid then. What is used in which order is recorded; from the second time on the
next chunks are gathered while this one computes. Where a pass leaves that order, chunks are gathered when
they are needed.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from espalier.blocks import parameters_in
from espalier.comm.functions import OwnFunction
from espalier.mesh import Mesh
from espalier.parallel.data.chunks import Chunk
from espalier.parallel.data.float8_rows import agree_on_scales
from espalier.parallel.data.residency import OffloadStore
from espalier.parallel.data.stand_ins import ShardedStandIn, refuse_recorded, whole_of
from espalier.parallel.data.unshard import Unsharded
from espalier.tensor import stamp
from espalier.tensor.dry_autocast import autocast_dtype
from espalier.tensor.dtensor import DTensor
from espalier.tensor.loans import stamp_alias
from espalier.tensor.saved import saving_sources
from espalier.torch_private import (
    base_of,
    current_graph_task_id,
    forward_hooks,
    memory_id,
    open_transform,
    own_parameters,
    raw,
)
from espalier.trees import tensors_in, tree_map

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
