"""Activation recomputation: what a block computed is dropped, and computed again for its backward pass.

Chen et al. 2016 (Training Deep Nets with Sublinear Memory Cost); selective: Korthikanti et al. 2022.
It is torch's non-reentrant checkpointing around the ``forward`` of each block, so that modules and
parameters keep their names, and hooks of modules (gathering along the data axis) fall outside of it.
"""

from __future__ import annotations

import copy
import fnmatch
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint, noop_context_fn

from espalier.blocks import around, blocks, parts, segments
from espalier.comm.custom_ops import recorders, recording
from espalier.comm.redistribute import carry_out
from espalier.device import copy_by, host_buffer_like, new_stream, pins, wait_for
from espalier.engine.selective import Policy, keep_products, selective_contexts
from espalier.layout import Layout
from espalier.layout.layout import D, R
from espalier.parallel import Plan
from espalier.parallel.data.chunks import cut_dim
from espalier.parallel.pipeline.programs import Env, ProgramStep
from espalier.parallel.pipeline.record import Again
from espalier.parallel.pipeline.split import StageProgram
from espalier.tensor import DTensor, plain
from espalier.tensor.before import Before, places, reached, slots
from espalier.tensor.compiled import Region
from espalier.tensor.fallback import layouts_of, stamped
from espalier.tensor.live_memory import unseen
from espalier.tensor.saved import by_outer, outer_hooks, unpacked
from espalier.tensor.ways import Ways
from espalier.texts import listed, similar
from espalier.torch_private import (
    function_mode_stack,
    memory_id,
    open_transform,
    own_buffers,
    own_modules,
    own_parameters,
    passed_over,
    raw,
    version_of,
)
from espalier.trees import tensors_in, tree_map


def chosen(model: nn.Module, plan: Plan) -> dict[str, str]:
    """For each block that is to be recomputed, by name, ``"full"`` or ``"selective"``.

    Blocks are the elements of the model's lists; of a model without lists its children (see
    :func:`~espalier.blocks.segments`).

    Raises:
        ValueError: patterns match none of them.
    """
    if plan.recompute == "none":
        return {}
    # a pipeline divides what lists stand in
    names = list(parts(model) if plan.pipe > 1 else segments(model))
    if not isinstance(plan.recompute, str):
        names = list(dict.fromkeys([*blocks(model), *names]))
    if isinstance(plan.recompute, str):
        return dict.fromkeys(names, plan.recompute)
    wrong = [
        f"{pattern!r} matches no block{_close(pattern, names)}"
        for pattern in plan.recompute
        if not fnmatch.filter(names, pattern)
    ]
    if wrong:
        raise ValueError(listed(f"recompute: blocks of {type(model).__name__}:", wrong))
    choices = {}
    for name in names:
        kind = next((k for p, k in plan.recompute.items() if fnmatch.fnmatchcase(name, p)), "none")
        if kind != "none":
            choices[name] = kind
    # of two, one within the other, the inner one
    return {n: k for n, k in choices.items() if not any(other.startswith(f"{n}.") for other in choices)}


def _close(pattern: str, names: Sequence[str]) -> str:
    close = similar(pattern, names, 3, 0.4) or names[:3]
    return f"; close: {', '.join(close)}"


def recompute(
    model: nn.Module, kinds: Mapping[str, str], inputs: str, policy: Policy | None = None
) -> Callable[[], None]:
    """Let blocks be recomputed, in place.

    Args:
        kinds: see :func:`chosen`.
        inputs: what is kept of a block's inputs: see ``Plan.recompute_inputs``.
        policy: in place of :func:`~espalier.engine.selective.keep_products`.

    Returns:
        What takes it away again.
    """
    selective, hosted = partial(selective_contexts, policy or keep_products), _Hosted()
    undone = ExitStack()
    for name, kind in kinds.items():
        contexts = selective if kind == "selective" else noop_context_fn
        undone.callback(_wrap(model.get_submodule(name), contexts, inputs, hosted))
    return undone.close


def recompute_in_graphs(model: nn.Module, regions: Mapping[str, Region], inputs: str, policy: Policy) -> None:
    """Let blocks be compiled to graphs that keep what is kept of them, and compute the rest again themselves.

    A call that runs as it is written is recomputed as ever; one that is recorded keeps nothing.

    Args:
        regions: what is compiled of each, by :class:`~espalier.engine.selective.Tracing`.
    """
    hosted = _Hosted()
    for name, region in regions.items():
        _wrap(model.get_submodule(name), partial(selective_contexts, policy), inputs, hosted, region)


def _wrap(
    block: nn.Module,
    contexts: Callable[..., Any],
    inputs: str,
    hosted: _Hosted,
    region: Region | None = None,
) -> Callable[[], None]:
    """Let a block be recomputed, but where a region of it runs as a graph that does so itself."""
    written, recorded = _Written(contexts), _Written(noop_context_fn)

    def call(self: nn.Module, own: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or open_transform() is not None:  # whose tensors no checkpoint knows
            return own(*args, **kwargs)
        by_id = {id(x): x for x in tensors_in((args, kwargs))}
        way = "written"
        if region is not None and region.owner is self:
            way, run = region.way(args, kwargs)
            if way == "graph":
                with _keeping(inputs, list(by_id.values()), hosted):
                    return run()
        places = {key: _Placeholder(i) for i, key in enumerate(by_id)}
        tree = tree_map(lambda x: places.get(id(x), _held(x)), (args, kwargs))
        del args, kwargs
        around_it = (recorded if way == "recorded" else written).contexts
        with _keeping(inputs, list(by_id.values()), hosted):
            return _checkpointed(own, tree, list(by_id.values()), partial(around_it, self))

    return around(block, call)


def _checkpointed(
    own: Callable[..., Any], tree: Any, tensors: Sequence[torch.Tensor], contexts: Callable[[], Any]
) -> Any:
    """A call in torch's non-reentrant checkpointing.

    Args:
        tree: its arguments, with a :class:`_Placeholder` for each of ``tensors``.
    """
    again = _BlockCall(own, tree, tensors)
    with raw():
        given = [plain(x) for x in tensors]
    out = checkpoint(again, *given, use_reentrant=False, context_fn=contexts)
    torch.clear_autocast_cache()  # which would keep what was cast of the block until the forward pass ends
    return out


class StageRecomputation:
    """Does the steps of a stage; what its model calls by ``torch.utils.checkpoint`` is computed again.

    What it writes to beside its outputs counts once: in which order micro-batches come back must not be seen.
    """

    def __init__(self, program: StageProgram) -> None:
        self._parts = [
            _Part(program, tuple(some), again)
            for again, some in groupby(program.steps, lambda step: step.again)
        ]

    def __call__(self, program: StageProgram, env: Env, here: torch.device) -> None:
        """Do them, and put into ``env`` what they give."""
        for part in self._parts:
            if part.written is None or open_transform() is not None:
                program.do(part.steps, env, here)
            else:
                part.run(part.written, program, env, here)


class _Part:
    """Steps of a stage that stand together in one checkpoint, or in none.

    Attributes:
        written: what they write to beside what they give; None: they are not computed again.
    """

    def __init__(self, program: StageProgram, steps: Sequence[ProgramStep], again: Again | None) -> None:
        self.steps = steps
        self.written = None if again is None else _Written(again.contexts or noop_context_fn)
        made: dict[int, None] = {}
        used: dict[int, None] = {}
        for step in steps:
            used.update((n, None) for n in step.inputs if n not in made)
            made.update(dict.fromkeys(step.outputs))
        self._freed = {n for step in steps for n in step.free}
        self._held = [n for n in used if n in program.held]
        self._given = [n for n in used if n not in program.held]
        self._left = [n for n in made if n not in self._freed]
        self._tree: Any = ([_Placeholder(i) for i in range(len(self._given))],), {}

    def run(self, written: _Written, program: StageProgram, env: Env, here: torch.device) -> None:
        """Do them now and in the backward pass, and put into ``env`` what they give."""
        held = {n: env[n] for n in self._held}

        def own(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            inner = {**held, **dict(zip(self._given, tensors, strict=True))}
            program.do(self.steps, inner, here)
            return [inner[n] for n in self._left]

        contexts = partial(written.contexts, *program.called(self.steps))
        out = _checkpointed(own, self._tree, [env[n] for n in self._given], contexts)
        for n in self._freed:
            env.pop(n, None)
        env.update(zip(self._left, out, strict=True))


class _Placeholder:
    """Stands for a tensor among a call's arguments."""

    def __init__(self, number: int) -> None:
        self.number = number


class _BlockCall:
    """A block's call, given its local tensors: the first time, and again for the backward pass.

    Both times the block sees new DTensors: what is remembered on one (its moved form) must not tell the two
    apart. And what autograd keeps is plain, so that modes find local shapes only. Function modes (a default
    device, say) do not reach into a backward pass: those of the first time hold the second time too.
    """

    def __init__(self, own: Callable[..., Any], tree: Any, inputs: Sequence[torch.Tensor]) -> None:
        self._own, self._tree, self._layouts = own, tree, layouts_of(inputs)
        self._modes = function_mode_stack() if recorders() else ()
        self._ways = Ways()

    def __call__(self, *tensors: torch.Tensor) -> Any:
        inputs = stamped(tensors, self._layouts)

        def value(x: Any) -> Any:
            if isinstance(x, _Placeholder):
                return inputs[x.number]
            return x.take() if isinstance(x, _Cache) else x

        args, kwargs = tree_map(value, self._tree)
        with ExitStack() as stack:
            stack.enter_context(self._ways.followed())
            if self._modes and not recorders():
                for mode in self._modes:
                    stack.enter_context(mode)
            out = self._own(*args, **kwargs)
        tree_map(lambda x: x.settle() if isinstance(x, _Cache) else x, self._tree)
        return out


class _Written:
    """What blocks write to: known, by which modules are in training mode, from its first computation."""

    def __init__(self, contexts: Callable[..., Any]) -> None:
        self._contexts = contexts
        self._names: dict[tuple[bool, ...], set[str]] = {}
        self._types: list[type] = []
        self._known: set[str] = set()
        self._modules: list[nn.Module] = []
        self._places: list[tuple[str, dict[str, Any], str]] = []
        self._slots: list[tuple[dict[str, Any], str]] = []
        self._shape: list[int] = []

    def contexts(self, *blocks: nn.Module) -> tuple[Any, Any]:
        """Around the first computation of blocks and the later ones, in ``torch.utils.checkpoint``'s sense.

        These find what the block writes to as the first did, and leave it as it is.
        """
        first, again = self._contexts()
        if recording():
            return first, again
        if self._shape != self._shape_of(blocks):
            self._look_at(blocks)
        modes = tuple(m.training for m in self._modules)
        found = {name: holder.get(key) for name, holder, key in self._places}
        tensors = {name: x for name, x in found.items() if isinstance(x, torch.Tensor)}
        before = Before(
            self._modules,
            {n: x for n, x in tensors.items() if not x.is_meta},
            self._names.get(modes),
            [(table, key, x) for table, key in self._slots if (x := table.get(key)) is not None],
        )

        def settle() -> None:
            self._names[modes] = before.settle()

        around = _Around(first, at_end=settle)
        return around, _Around(_Once(again, around), before)

    def _look_at(self, blocks: Sequence[nn.Module]) -> None:
        """Find what is in these blocks: others (a copy's) have other tensors, and modules come and go."""
        self._modules = [*dict.fromkeys(m for block in blocks for m in reached(block))]
        self._places, self._slots = places(self._modules), slots(self._modules)
        types, known = [type(m) for m in self._modules], {name for name, *_ in self._places}
        if types != self._types or not known <= self._known:  # what is written to of these is not known
            self._types, self._known, self._names = types, known, {}
        self._shape = self._shape_of(blocks)

    def _shape_of(self, blocks: Sequence[nn.Module]) -> list[int]:
        """What tells other blocks, and other modules or tensors in them, from those that were looked at."""
        shape = [*map(id, blocks)]
        for m in self._modules:
            shape += map(len, (vars(m), own_parameters(m), own_buffers(m)))
            shape += map(id, own_modules(m).values())
        return shape


class _Around:
    """A context around a computation of a block.

    Args:
        before: what it finds as it was, and leaves as it is.
        at_end: is called when it closes without an error.
    """

    def __init__(
        self,
        inner: AbstractContextManager[Any],
        before: Before | None = None,
        at_end: Callable[[], None] = lambda: None,
    ) -> None:
        self._inner, self._before, self._at_end = inner, before, at_end
        self._back: Callable[[], None] = lambda: None
        self.is_open = False

    def __enter__(self) -> None:
        self.is_open = True
        if self._before is not None:
            self._back = self._before.swap()
        self._inner.__enter__()

    def __exit__(self, *error: Any) -> Any:
        swallowed = self._inner.__exit__(*error)
        self.is_open = False
        self._back()
        if error[0] is None:
            self._at_end()
        return swallowed


class _Once:
    """What gives a computation the results that the first one kept (selective recomputation): but once.

    They are let go of then. And before the first one has ended, where a block takes gradients itself, not
    all are there. Without them all is computed again.
    """

    def __init__(self, inner: AbstractContextManager[Any], first: _Around) -> None:
        self._inner, self._first = inner, first
        self._entered: AbstractContextManager[Any] = nullcontext()
        self._is_used = False

    def __enter__(self) -> None:
        whole = self._is_used or self._first.is_open
        self._entered = nullcontext() if whole else self._inner
        self._is_used = self._is_used or not whole
        self._entered.__enter__()

    def __exit__(self, *error: Any) -> Any:
        return self._entered.__exit__(*error)


class _Cache:
    """A cache of keys and values, or of states (transformers'), to which blocks write."""

    def __init__(self, cache: Any) -> None:
        self._original, self._before = cache, _copied(cache)
        with raw():
            self._held: list[tuple[torch.Tensor, int]] | None = [(x, version_of(x)) for x in _inside(cache)]

    def take(self) -> Any:
        """The cache given; from the second time on, one as that was before the first."""
        cache, self._original = self._original, None
        return _copied(self._before) if cache is None else cache

    def settle(self) -> None:
        """After the first computation.

        Raises:
            ValueError: it has written to what the cache held before, which is not there any more.
        """
        held, self._held = self._held or (), None
        with raw():
            if any(version_of(x) != version for x, version in held):
                raise ValueError(
                    f"recompute: a block writes in place to what its {type(self._before).__name__} held "
                    "already, and could not be computed again from that. Train with use_cache=False, or with "
                    "a cache that is empty at first, or leave this block out of recompute."
                )


def _held(x: Any) -> Any:
    return _Cache(x) if hasattr(x, "get_seq_length") and hasattr(x, "update") else x


def _is_cache(x: Any) -> bool:
    """Whether it is a cache, or a layer of one: it has methods that write to it."""
    simple = isinstance(x, torch.Tensor | nn.Module | type) or not hasattr(x, "__dict__")
    return not simple and any(name.startswith("update") for name in dir(type(x)))


def _copied(x: Any) -> Any:
    """A copy of a cache, its layers and lists; tensors and all else are shared."""
    if isinstance(x, dict | list | tuple):
        return tree_map(_copied, x)
    if not _is_cache(x):
        return x
    twin = copy.copy(x)
    vars(twin).update({name: _copied(value) for name, value in vars(x).items()})
    return twin


def _inside(x: Any) -> list[torch.Tensor]:
    """The tensors that a cache holds."""
    if isinstance(x, torch.Tensor):
        return [x]
    if isinstance(x, list | tuple):
        return [tensor for value in x for tensor in _inside(value)]
    inside = x if isinstance(x, dict) else vars(x) if _is_cache(x) else {}
    return [tensor for value in inside.values() for tensor in _inside(value)]


# ---- what is kept of a block's inputs


def _keeping(inputs: str, tensors: Sequence[torch.Tensor], hosted: _Hosted) -> AbstractContextManager[Any]:
    """While open, what is saved of the inputs that need gradients is saved as the plan says."""
    if inputs == "whole":
        return nullcontext()
    kept: dict[Any, Layout | None] = {}
    for x in tensors:
        if x.requires_grad and not isinstance(x, nn.Parameter):
            with raw():
                kept[_identity(x)] = _sharded(x) if inputs == "sharded" else None
    outer = outer_hooks(True)
    call = hosted.next() if inputs == "host" else None

    def pack(x: torch.Tensor) -> Any:
        with raw():
            key = _identity(x)
        if key not in kept or (inputs == "sharded" and kept[key] is None):
            return by_outer(x, outer)
        return _Slice(x, kept[key], outer) if call is None else _OnHost(x, call)

    return saved_tensors_hooks(passed_over(pack, outer), unpacked)


def _identity(x: torch.Tensor) -> Any:
    return memory_id(x), x.storage_offset(), tuple(x.shape), tuple(x.stride())


def _sharded(x: torch.Tensor) -> Layout | None:
    """Where ``x`` lies when it is cut along the tensor axis; None if it cannot be, or is already."""
    if type(x) is not DTensor or "tensor" not in x._layout.mesh.names:
        return None
    layout = x._layout.own
    axis = layout.mesh.axis("tensor")
    n = layout.mesh.shape[axis]
    whole = [d for d, cut in enumerate(layout.cuts) if not cut and layout.shape[d] >= n]
    if n == 1 or layout.axes[axis] not in (R, D) or not whole:
        return None
    dim = cut_dim([layout.shape[d] for d in whole], n)
    assert dim is not None
    return layout.with_axis(axis, whole[dim])


class _Slice:
    """This rank's slice of an input that is replicated along the tensor axis."""

    def __init__(self, x: torch.Tensor, layout: Layout | None, outer: Any) -> None:
        assert layout is not None
        self._layout = layout
        self._full, self._stride = layout.with_axis(layout.mesh.axis("tensor"), R), x.stride()
        with torch.no_grad(), raw():
            piece = plain(carry_out(plain(x.detach()), self._full, layout)).clone()
        self._held: Any = by_outer(piece, outer)

    def get(self) -> torch.Tensor:
        piece = unpacked(self._held)
        with torch.no_grad(), raw():
            return _in_memory(carry_out(piece, self._layout, self._full), self._stride)


class _Hosted:
    """The calls of a model's blocks whose inputs go to the host's memory.

    The device's copies have a stream for each way. As the inputs of a call come back, those of the call
    before it, which the backward pass wants next, are fetched beside what is computed.
    """

    def __init__(self) -> None:
        self._last: weakref.ref[_HostedCall] | None = None
        self._streams: dict[torch.device, tuple[torch.Stream | None, torch.Stream | None]] = {}

    def next(self) -> _HostedCall:
        """A further call."""
        call = _HostedCall(self, self._last)
        self._last = weakref.ref(call)
        return call

    def streams(self, device: torch.device) -> tuple[torch.Stream | None, torch.Stream | None]:
        """Those that copy to the host, and back."""
        if device not in self._streams:
            self._streams[device] = new_stream(device), new_stream(device)
        return self._streams[device]


class _HostedCall:
    """A block's call: its inputs, which hold it, and the call before it."""

    def __init__(self, of: _Hosted, before: weakref.ref[_HostedCall] | None) -> None:
        self.of, self._before = of, before
        self.inputs: list[weakref.ref[_OnHost]] = []

    def fetch_before(self) -> None:
        """Start to fetch the inputs of the call before this one, if anyone is to ask for them."""
        before = None if self._before is None else self._before()
        self._before = None  # once
        for known in () if before is None else before.inputs:
            if (x := known()) is not None:
                x.fetch()


class _OnHost:
    """An input in (pinned) host memory."""

    def __init__(self, x: torch.Tensor, call: _HostedCall) -> None:
        self._device, self._dry, self._call = x.device, x.is_meta, call
        self._coming: tuple[torch.Tensor, torch.Event | None] | None = None
        with torch.no_grad(), raw():
            self._stride = x.stride()
            if self._dry:
                self._held = torch.empty((), dtype=x.dtype, device=x.device).expand(x.shape)
                return
            with unseen():  # it takes none of the device's memory
                self._held = host_buffer_like(x, pin=pins(x.device))
                # the forward pass goes on meanwhile
                self._event = copy_by(call.of.streams(x.device)[0], [(self._held, x)], x.device)
        call.inputs.append(weakref.ref(self))

    def fetch(self) -> None:
        """Start to bring it back, beside the program, where the device has streams."""
        up = self._call.of.streams(self._device)[1]
        if up is not None and self._coming is None:
            with torch.no_grad(), raw():
                here = torch.empty_like(self._held, device=self._device)
                if self._event is not None:
                    up.wait_event(self._event)
                self._coming = here, copy_by(up, [(here, self._held)], self._device)

    def get(self) -> torch.Tensor:
        if self._dry:
            return _in_memory(self._held, self._stride)
        self.fetch()
        coming, self._coming = self._coming, None
        self._call.fetch_before()
        if coming is None:
            return _in_memory(self._held.to(self._device, non_blocking=True, copy=True), self._stride)
        wait_for(coming[1], self._device)
        return _in_memory(coming[0], self._stride)


def _in_memory(x: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    """``x`` with its elements where they were: a block that is run again must find it as the first time."""
    if x.stride() == stride:
        return x
    sizes = [1 if step == 0 else n for n, step in zip(x.shape, stride, strict=True)]
    out = torch.empty_strided(sizes, stride, dtype=x.dtype, device=x.device)
    return out.copy_(x[tuple(slice(n) for n in sizes)]).expand(x.shape)
