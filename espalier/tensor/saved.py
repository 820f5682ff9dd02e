"""What the backward pass keeps (design, section 3.3).

A gathered tensor is never saved for backward when its shard will do: while an operation runs on
gathered inputs, each that autograd saves is replaced by its shard, and gathered again for the
backward pass.

When it is gathered again must not hang on what the local operation saved: on a rank whose shard is
empty that may be nothing, and a collective that one rank leaves out stops them all. So the
gathering is tied to the operation's place in the graph, which is the same on all ranks: a hook
before the operation's node gathers, one before the node of the first gathering lets go.

The backward pass comes by them in the reverse order of the forward pass. So when it lets one go it starts
to gather the one before, if it will come by there.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.overrides import handle_torch_function

from espalier.comm import Work
from espalier.comm.custom_ops import recorders
from espalier.comm.redistribute import begin, carry_out
from espalier.layout import Layout
from espalier.mesh import Mesh
from espalier.tensor.dtensor import plain
from espalier.torch_private import (
    base_of,
    current_graph_task_id,
    keeps_graph,
    let_traces_pass_saving_hooks,
    memory_id,
    neg_view,
    passed_over,
    raw,
    saved_tensors_hooks,
    version_of,
    will_run,
)

outer_hooks = saved_tensors_hooks
_will_run: Callable[[Any], bool] = will_run


class Shard:
    """A shard from which a gathered tensor can be had again.

    Args:
        node: of the graph, that backward comes by when all are done with it; by default that of ``full``.
    """

    def __init__(
        self, shard: torch.Tensor, full: torch.Tensor, src: Layout, dst: Layout, node: Any = None
    ) -> None:
        self.src, self.dst = src, dst
        self.storage = memory_id(full)
        self._version = version_of(shard)
        self._full: torch.Tensor | None = None
        self._coming: Work[torch.Tensor] | None = None
        self._shard: Any = plain(shard.detach())
        self._outer: Callable[[Any], torch.Tensor] | None = None
        # checkpointing and offloading have the last word on what is kept
        outer = outer_hooks(True)
        if outer is not None:
            self._shard, self._outer = outer[0](self._shard), outer[1]
        node = full.grad_fn if node is None else node
        assert node is not None
        node.register_prehook(self._let_go)
        self._node = weakref.ref(node)
        self._before: weakref.ref[Shard] | None = src.mesh.kept
        src.mesh.kept = weakref.ref(self)

    def gather(self, *grads: Any) -> None:
        """Have the gathered tensor at hand (as a hook before the operation's node)."""
        # of several outputs the last may come when all that used the gathered tensor are done
        if self._full is None and self._shard is not None and not self._changed():
            self._full = self._gathered()

    def get(self) -> torch.Tensor:
        """The gathered tensor."""
        return self._gathered() if self._full is None else self._full

    def _gathered(self) -> torch.Tensor:
        if self._shard is None:
            raise RuntimeError(
                "Trying to backward through the graph a second time: pass retain_graph=True to the first."
            )
        shard = self._shard if self._outer is None else self._outer(self._shard)
        if self._changed():
            raise RuntimeError(
                f"A tensor needed for the gradient has been modified by an in-place operation: it lies as "
                f"{self.src!r}, is at version {version_of(shard)}, expected version {self._version}."
            )
        with torch.no_grad():
            return carry_out(shard, self.src, self.dst) if self._coming is None else self._arrived()

    def _changed(self) -> bool:
        """Whether it was written to since: on all ranks, and no harm if nobody asks for it."""
        return self._outer is None and version_of(self._shard) != self._version

    def _let_go(self, *grads: Any) -> None:
        self._full = None
        if self._coming is not None:
            self._arrived()
        if not keeps_graph():
            self._shard = None
        before = None if self._before is None else self._before()
        if before is not None:
            before._start()

    def _arrived(self) -> torch.Tensor:
        assert self._coming is not None
        coming, self._coming = self._coming, None
        return coming.wait()

    def __del__(self) -> None:
        if self._coming is not None:  # a backward pass broke off: what is under way must arrive
            self._arrived()

    def _start(self) -> None:
        """Start to gather, if this backward pass is sure to want it: on all ranks alike."""
        node, waits = self._node(), self._full is None and self._coming is None and self._shard is not None
        if node is None or not waits or self._outer is not None or self._changed() or not _will_run(node):
            return
        with torch.no_grad():
            self._coming = begin(self._shard, self.src, self.dst)


def hold(shard: torch.Tensor, full: torch.Tensor, src: Layout, dst: Layout) -> Shard:
    """What stands for ``full``, which was gathered from ``shard``, until the backward pass."""
    if recorders():
        return handle_torch_function(hold, (), shard, full, src, dst)
    return Shard(shard, full, src, dst)


class _Marks(NamedTuple):
    """What a lazy view does to the numbers in memory (``x.conj()``, ``x.conj().imag``)."""

    conjugates: bool
    negates: bool

    @classmethod
    def of(cls, x: torch.Tensor) -> _Marks:
        return cls(x.is_conj(), x.is_neg())

    def put_on(self, x: torch.Tensor) -> torch.Tensor:
        x = x.conj() if self.conjugates != x.is_conj() else x
        return neg_view(x) if self.negates != x.is_neg() else x


class _View:
    def __init__(self, source: Shard, seen: torch.Tensor) -> None:
        self.source = source
        self.geometry = (seen.shape, seen.stride(), seen.storage_offset())
        self._in_order, self._dtype, self._marks = seen.is_contiguous(), seen.dtype, _Marks.of(seen)

    def get(self) -> torch.Tensor:
        (shape, stride, offset), full = self.geometry, self.source.get()
        if full.dtype is not self._dtype:  # numbers seen as pairs, or pairs as numbers
            full = full.new_empty(0, dtype=self._dtype).set_(full.untyped_storage(), offset, shape, stride)
        elif self._in_order and full.is_contiguous() and full.numel() == shape.numel():
            full = full.view(shape)  # which tells a compiler more
        else:
            full = full.as_strided(shape, stride, offset)
        return self._marks.put_on(full)


class Outer:
    """What hooks around those that are open now have made of a tensor."""

    def __init__(self, held: Any, unpack: Callable[[Any], torch.Tensor]) -> None:
        self.held, self.unpack = held, unpack

    def get(self) -> torch.Tensor:
        """The tensor."""
        return self.unpack(self.held)


def by_outer(x: torch.Tensor, outer: tuple[Callable[..., Any], Callable[..., Any]] | None) -> Any:
    """What is kept of a tensor that is left to the hooks around."""
    return x if outer is None else Outer(outer[0](x), outer[1])


def unpacked(kept: Any) -> torch.Tensor:
    """The tensor that was kept, whatever of it."""
    whole: torch.Tensor = kept if isinstance(kept, torch.Tensor) else kept.get()
    return whole


@contextmanager
def saving_shards(shards: Sequence[Shard]) -> Iterator[None]:
    """While open, autograd saves shards in place of gathered tensors."""
    hooks = open_saving(shards)
    try:
        yield
    finally:
        close_saving(hooks)


def open_saving(shards: Sequence[Shard]) -> torch.autograd.graph.saved_tensors_hooks:
    """Begin to save shards in place of gathered tensors."""
    if recorders():
        return handle_torch_function(open_saving, (), shards)
    sources = {shard.storage: shard for shard in shards}
    outer = outer_hooks(True)

    def pack(x: torch.Tensor) -> torch.Tensor | _View | Outer:
        source = sources.get(memory_id(x))
        if source is not None:
            return _View(source, x)
        return by_outer(x, outer)

    hooks = _Saving(passed_over(pack, outer), unpacked)
    hooks.__enter__()
    return hooks


class _Saving(torch.autograd.graph.saved_tensors_hooks):
    """Hooks that a tracer comes by, too: what it sees saved is what the backward graph is given."""

    def __enter__(self) -> None:
        self._passed = let_traces_pass_saving_hooks(False)
        super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        let_traces_pass_saving_hooks(self._passed)


def close_saving(hooks: torch.autograd.graph.saved_tensors_hooks) -> None:
    """End what :func:`open_saving` began."""
    if recorders():
        handle_torch_function(close_saving, (), hooks)
    else:
        hooks.__exit__()


def saving_places(mesh: Mesh) -> AbstractContextManager[object]:
    """While open, autograd saves of tensors whose memory is emptied between its uses where they lie.

    So a graph that a backward pass records (``create_graph``) may have them filled when it is gone through;
    no hook of a module stands before its nodes. ``mesh.emptied`` knows those memories: from the address of
    each storage to what has a ``storage``, and a method ``bring`` that fills it, called on all ranks alike.
    """
    if not mesh.emptied or outer_hooks(True) is not None or recorders():
        return nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(partial(_place_of, mesh.emptied), _filled)


def saving_sources(mesh: Mesh, low: torch.dtype) -> torch.autograd.graph.saved_tensors_hooks | None:
    """Hooks by which autograd saves, in place of what autocast has made of a parameter, where that lies.

    Of those parameters alone whose memory is emptied between its uses (``mesh.emptied``): a cast would stay
    whole, and is made again for the backward pass. None where no graph is made, others have a say in what
    is kept, or a program is recorded.

    Args:
        low: the dtype that autocast casts to.
    """
    if not torch.is_grad_enabled() or outer_hooks(True) is not None or recorders():
        return None
    return _Saving(passed_over(partial(_source_of, mesh.emptied, low), None), _filled)


class _Emptied:
    """Where a tensor lies in a memory that may be emptied, until it is asked for."""

    def __init__(self, memory: Any, x: torch.Tensor) -> None:
        self._memory, self._dtype, self._device = memory, x.dtype, x.device
        self._geometry, self._marks = (x.storage_offset(), tuple(x.shape), x.stride()), _Marks.of(x)

    def get(self) -> torch.Tensor:
        self._memory.bring()
        empty = torch.empty(0, dtype=self._dtype, device=self._device)
        return self._marks.put_on(empty.set_(self._memory.storage, *self._geometry))


def _place_of(emptied: Mapping[int, Any], x: torch.Tensor) -> torch.Tensor | _Emptied:
    with raw():
        memory = emptied.get(memory_id(x)) if x.layout is torch.strided else None
        return x if memory is None else _Emptied(memory, plain(x.detach()))


class _Cast(NamedTuple):
    """Of which parameter a tensor is a cast, or a view of one, and where that lies."""

    leaf: torch.Tensor
    version: int
    source: _Emptied
    dtype: torch.dtype
    geometry: tuple[Any, ...]

    def get(self) -> torch.Tensor:
        whole = self.source.get()
        if version_of(self.leaf) != self.version:
            raise RuntimeError(
                "A parameter was written to between a forward pass under autocast and its backward, which "
                "needs it as it was: it is cut by the plan, and no copy is kept. Take the step after the "
                "backward pass, or call the model again."
            )
        return whole.to(self.dtype).as_strided(*self.geometry)


def _source_of(emptied: Mapping[int, Any], low: torch.dtype, x: torch.Tensor) -> torch.Tensor | _Cast:
    if x.dtype is not low:
        return x
    with raw():
        base = base_of(x)
        node = (x if base is None else base).grad_fn
        if node is None or node.name() != "ToCopyBackward0":
            return x
        before = node.next_functions[0][0]
        if before is not None and before.name() == "AliasBackward0":  # a dry run's is without its class
            before = before.next_functions[0][0]
        leaf = getattr(before, "variable", None)
        memory = None if leaf is None else emptied.get(memory_id(leaf))
        if leaf is None or memory is None:
            return x
        lies = _Emptied(memory, plain(leaf.detach()))
        return _Cast(leaf, version_of(leaf), lies, low, (x.shape, x.stride(), x.storage_offset()))


def _filled(kept: torch.Tensor | _Emptied | _Cast) -> torch.Tensor:
    if isinstance(kept, torch.Tensor):
        return kept
    with raw(), torch.no_grad():
        return kept.get()


def gather_before_backward(out: Any, shards: Sequence[Shard]) -> None:
    """Gather again when the backward pass reaches the operation that made ``out``."""
    if recorders():
        return handle_torch_function(gather_before_backward, (), out, shards)
    for x in out if isinstance(out, tuple | list) else (out,):
        if isinstance(x, torch.Tensor) and x.grad_fn is not None:
            for shard in shards:
                x.grad_fn.register_prehook(shard.gather)


def apart(out: Any, gathered: Sequence[torch.Tensor]) -> Any:
    """The outputs, each with a place of its own in the graph.

    A function may give back what it was given: on some ranks only, where their sizes happen to be right.
    """
    if isinstance(out, tuple | list):
        return type(out)(apart(x, gathered) for x in out) if type(out) in (tuple, list) else out
    if isinstance(out, torch.Tensor) and any(x.grad_fn is out.grad_fn for x in gathered):
        return out.view_as(out)
    return out


def keep_in_step(out: Any) -> None:
    """After an operation of which some rank may hold nothing: let checkpointing count alike on all ranks.

    Non-reentrant checkpointing starts to recompute when a tensor that it dropped is asked for, and
    stops when the last one is saved again. On nothing an operation may save nothing, and ranks that
    recompute at different places call different collectives. So here each drops a tensor more, and
    asks for it where the backward pass reaches the operation.
    """
    outer = outer_hooks(True)
    if outer is None or recorders() or not torch.is_grad_enabled():
        return
    packed, asked = outer[0](torch.empty(0)), set()

    def ask(*grads: Any) -> None:
        task = current_graph_task_id()
        if task not in asked:
            asked.add(task)
            outer[1](packed)

    for x in out if isinstance(out, tuple | list) else (out,):
        if isinstance(x, torch.Tensor) and x.grad_fn is not None:
            x.grad_fn.register_prehook(ask)


def beside_saved(x: Any) -> Any:
    """Another tensor for an index that came out of a sort or a maximum on a dry mesh.

    It is saved as it is, and what is saved must be plain there.
    """
    saved = type(x) is torch.Tensor and not x.is_floating_point()
    return x.view_as(x) if saved else x
