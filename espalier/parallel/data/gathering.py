"""Parameters that are cut along the data axis (ZeRO-3, FSDP): whole while a module computes with them.

Between its uses a parameter is a ``Shard`` along the data axis, and says so. Hooks of the modules gather a
chunk before their forward, and again before their backward, into the same storage, so that what autograd
saved of it is valid then. What is used in which order is recorded; from the second time on the next
chunks are gathered while this one computes. Where a pass leaves that order, chunks are gathered when they are
needed.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._C import DisableTorchFunctionSubclass as raw

from espalier.mesh import Mesh
from espalier.parallel.data.chunks import Chunk
from espalier.parallel.data.gathered import Gathered
from espalier.parallel.data.residency import Shelf
from espalier.parallel.data.resting import Resting
from espalier.tensor import stamp
from espalier.tensor.dtensor import DTensor
from espalier.tensor.loans import stamp_alias
from espalier.trees import tensors_in, tree_map

_OBJECTS = 3
"""So many objects of classes of their own, one within another, are looked into for what a module gives."""


class Use(NamedTuple):
    """One use of a chunk by a module: ``phase`` is ``"forward"`` or ``"backward"``."""

    phase: str
    chunk: int


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
        bring = partial(_brought, weakref.ref(self))
        self.held = [Gathered(i, chunk, shelf, partial(bring, i)) for i, (_, chunk) in enumerate(chunks)]
        mesh.emptied.update({g.storage._cdata: g for g in self.held})
        self._largest = max((g.nbytes for g in self.held), default=0)
        self._of = {id(g.chunk): g for g in self.held}
        # as last seen, with and without gradients
        self.orders: dict[bool, list[Use]] = {}
        self._seen: list[Use] = []
        self._again: dict[bool, set[int]] = {}  # chunks that its forward uses more than once
        by_module: dict[nn.Module, list[Gathered]] = {}
        for (modules, _), g in zip(chunks, self.held, strict=True):
            for module in modules:
                by_module.setdefault(module, []).append(g)
            for m in g.chunk.members:
                if m.dim is not None:
                    m.rest = m.shard.loan()
                    source = Resting(m, g.bring, partial(_is_elsewhere, g.chunk), g.handed_out)
                    m.p._source = source  # type: ignore[attr-defined]
                    stamp(m.p, m.rest)
        for module, used in by_module.items():
            self._watch(module, used)

    # ---- hooks

    def _watch(self, module: nn.Module, used: list[Gathered]) -> None:
        watched = weakref.ref(module)  # a copy of the module has its hooks too
        looks_up = _only_looks_up(module, used)

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
            out = self._own_memory(out, used)
            if not (looks_up and len(module._forward_hooks) == 1):
                out = _before_backward(out, lambda *_: self._needed_again(used))
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
                for x in tensors_in(out, objects=_OBJECTS)
                if not isinstance(x, nn.Parameter)
                and x.layout is torch.strided
                and x.untyped_storage()._cdata in stores
            }
        return tree_map(lambda x: x.clone() if id(x) in views else x, out) if views else out

    def _needed_again(self, used: list[Gathered]) -> None:
        for g in used:
            self._need(g)

    def bring(self, g: Gathered) -> None:
        """Let a chunk be whole, if it is not."""
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
            trained = self._seen[-1].phase == "backward"
            self.orders[trained] = self._seen
            times = Counter(use.chunk for use in self._seen if use.phase == "forward")
            self._again[trained] = {chunk for chunk, n in times.items() if n > 1}
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
        return self.orders.get(_trains(), [])

    @property
    def recorded(self) -> list[Use]:
        """The uses of the last whole pass of training."""
        whole = bool(self._seen) and self._seen[-1].phase == "backward"
        return self._seen if whole else self.orders.get(True, [])

    def _need(self, g: Gathered) -> None:
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

    def _look_ahead(self, now: Gathered, coming: list[Use]) -> None:
        """Start what is needed next: no more than the largest chunk, and nothing for the pass after this."""
        budget = min(self._ahead, self._largest)
        budget -= sum(g.nbytes for g in self.held if g.pending is not None and g is not now)
        for i, use in enumerate(coming):
            g = self.held[use.chunk]
            if use.phase == self._seen[-1].phase:
                if g.is_whole or g.pending is not None:
                    continue
                if g.nbytes <= budget and not g.is_open:
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
        """Whether a chunk stays whole after a use: it would be the next gathered, or is used again soon."""
        order, at = self.order, len(self._seen)
        if torch.is_grad_enabled() and g.chunk.stays:
            return True
        if order[at - 1 : at] != self._seen[-1:]:
            return False
        for use in order[at:]:
            if use.chunk == g.number:
                break
            if not self.held[use.chunk].is_whole:
                again = g.number in self._again.get(_trains(), ()) and Use("forward", g.number) in order[at:]
                if not again:
                    return False
                break
        else:
            return False
        kept = sum(other.nbytes for other in self.held if other.is_whole and not other.users)
        return kept <= self._ahead


def _brought(gathering: weakref.ref[Gathering], number: int) -> None:
    found = gathering()
    if found is not None:
        found.bring(found.held[number])


def _only_looks_up(module: nn.Module, used: Sequence[Gathered]) -> bool:
    """Whether a module's backward reads none of its parameters, and fills gradients while these are cut.

    Autograd keeps a gradient as it comes if its strides are the parameter's.
    """
    if type(module) is not nn.Embedding or module.max_norm is not None or module.sparse:
        return False
    weight = module._parameters.get("weight")  # none if it is made of others, before each call
    members = [(g, m) for g in used for m in g.chunk.members if m.p is weight]
    return weight is not None and all(m.dim == 0 and not g.is_away for g, m in members)


def _is_elsewhere(chunk: Chunk) -> bool:
    return chunk.home is not None and chunk.home.device != chunk.device


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _trains() -> bool:
    return torch.is_grad_enabled() or _in_backward()


class _Mark(torch.autograd.Function):
    """A node before a module: its backward runs when all gradients have come out of the module."""

    espalier = True

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
            if x._is_view() and x._base is not None and x._base.grad_fn is not None:
                x._base.grad_fn.register_prehook(need)
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
