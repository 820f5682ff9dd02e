"""``espalier.compile``: a region of a program on DTensors as one compiled graph.

The first call with inputs of one kind runs as ever and is recorded (see ``espalier.tensor.recorder``):
what it comes down to on this rank is a graph on plain local tensors, with the collectives in it.
AOTAutograd traces that graph forward and backward and hands both to the backend. Later calls with inputs
of that kind run what was compiled.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.autograd.graph import saved_tensors_hooks

from espalier.blocks import around
from espalier.comm.custom_ops import observed, tracers
from espalier.device import autocast_types
from espalier.layout import Layout
from espalier.tensor.bucketing import Bucketing
from espalier.tensor.dispatch import is_strict
from espalier.tensor.dtensor import DTensor, plain, stamp
from espalier.tensor.loans import await_values
from espalier.tensor.names import made_in
from espalier.tensor.observers import tell, watchers
from espalier.tensor.random import draw_key
from espalier.tensor.reached import Reached
from espalier.tensor.recorder import Key, Recorder, Refused, version
from espalier.tensor.ring_rewriting import RingRewriting
from espalier.tensor.saved import outer_hooks
from espalier.tensor.surroundings import (
    CONSTANTS,
    SIZE,
    AttributeGuard,
    HolderSlot,
    Surroundings,
    identity,
    same,
    watched,
)
from espalier.tensor.ways import Ways
from espalier.texts import expect
from espalier.torch_private import (
    HOOKS,
    LOSES_SECOND_DERIVATIVES,
    aot_eager,
    compile_call,
    compiler,
    forward_hooks,
    getter,
    inductor,
    memory_id,
    method,
    raw,
    set_versions,
)
from espalier.trees import flatten, unflatten

Backend = Callable[[torch.fx.GraphModule, list[torch.Tensor]], Callable[..., Any]]
Tracing = Callable[[Callable[..., Any], Sequence[torch.Tensor]], Any]

# the C functions themselves: this is the way of every call
_stride = method("stride")
_shape, _device, _dtype, _needs_gradient = map(getter, ("shape", "device", "dtype", "requires_grad"))
_BUCKET = 25.0  # megabytes of one message
_LIMIT = 16  # kinds of inputs for which one region is compiled, while gradients are wanted, and while not


def compile(  # torch's own name for it
    model: Any = None,
    *,
    fullgraph: bool = True,
    dynamic: bool | None = None,
    backend: str | Backend = "inductor",
    mode: str | None = None,
    options: dict[str, Any] | None = None,
    disable: bool = False,
    bucket_megabytes: float = _BUCKET,
    async_tensor_parallel: bool = False,
) -> Any:
    """Compile a module or a function of DTensors: one graph, collectives included.

    A module is changed in place (as by ``nn.Module.compile``: names of parameters stay) and given
    back; of a function a compiled one is given. The region is recorded and compiled anew for each
    kind of inputs: layouts, shapes, dtypes, strides, what needs a gradient, arguments that are no
    tensors, attributes of the modules (``training``, ...), grad mode, autocast. Python's own effects
    (prints, lists that grow) happen when it is recorded and not again. On dry meshes, under dispatch
    modes, and while it is explained or sanitized, the region runs uncompiled.

    Args:
        model: an ``nn.Module`` or a function; without one, a decorator is given.
        fullgraph: a region is one graph, or an error; False: what cannot be one runs as it is written, with a
            warning.
        dynamic: taken for torch's sake; shapes are always static, so True is an error.
        backend: as in ``torch.compile``: a name, or ``backend(graph_module, example_inputs)``. The
            graph module works on local tensors.
        mode: as in ``torch.compile``, for inductor.
        options: as in ``torch.compile``, for inductor.
        disable: give ``model`` back as it is.
        bucket_megabytes: collectives of one kind, axis and dtype that do not wait for one another become one
            message of at most so many megabytes, begun early; 0 leaves them as they are. So for the backends
            ``"inductor"`` and ``"aot_eager"``.
        async_tensor_parallel: products of a sequence that is gathered, and those whose sum is cut along the
            sequence, go on while pieces of it travel; for the same backends.

    Raises:
        ValueError: ``dynamic=True``, or options for another backend than inductor.
        RuntimeError: (when called, by ``fullgraph``) the region reads a tensor's value, sets or hooks
            tensors, or uses a tensor that is no argument and belongs to no module; the message names the
            remedy.
    """
    if model is None:

        def decorate(model: Any) -> Any:
            return compile(
                model, fullgraph=fullgraph, dynamic=dynamic, backend=backend, mode=mode, options=options,
                disable=disable, bucket_megabytes=bucket_megabytes,
                async_tensor_parallel=async_tensor_parallel,
            )  # fmt: skip

        return decorate
    expect("espalier.compile: the model", model, Callable, "a module or a function")
    if dynamic:
        raise ValueError("espalier.compile: shapes are static; leave dynamic= out.")
    if disable:
        return model
    rewrite = _rewriting(bucket_megabytes, async_tensor_parallel)
    compiler = _backend(backend, mode, options, rewrite)
    if isinstance(model, torch.nn.Module):
        for hook in list(forward_hooks(model)[0].values()):
            getattr(hook, "leave", lambda: None)()  # what looks at the first step
        compile_call(model, lambda call: Region(call, model, compiler, fullgraph))
        return model
    return Region(model, model, compiler, fullgraph)


def compile_forward(module: torch.nn.Module, backend: Backend) -> Region:
    """Compile what a module's ``forward`` is now; hooks, and what is put around it later, stay outside.

    So its parameters may be gathered before each call, and released after it. A copy runs as it is
    written; so does, with a warning, what cannot be one graph.
    """
    region = Region(module.forward, module, backend, fullgraph=False)

    def call(self: Any, own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return region(*args, **kwargs) if region.owner is self else own(*args, **kwargs)

    around(module, call)
    return region


def compiler_of_blocks(
    backend: str | Backend,
    async_tensor_parallel: bool = False,
    tracing: Callable[[], Tracing] | None = None,
) -> Backend:
    """What compiles programs of blocks.

    Args:
        backend: as for :func:`compile`.
        async_tensor_parallel: as for :func:`compile`.
        tracing: gives for a program the way of its tracing, ``way(program, tensors)``: what the program
            gives for tensors, as it is traced.
    """
    compiler = _backend(backend, None, None, _rewriting(_BUCKET, async_tensor_parallel))
    return compiler if tracing is None else _traced(compiler, tracing)


def _traced(compiler: Backend, tracing: Callable[[], Tracing]) -> Backend:
    """A compiler of programs, which are traced in a way of their own."""

    def compile(module: fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        taken, program = module.graph.find_nodes(op="placeholder"), fx.Interpreter(module).run
        way = tracing()

        def whole(*tensors: torch.Tensor) -> Any:
            return way(program, tensors) if tracers() else program(*tensors)

        graph = fx.Graph()
        outputs: Any = module.graph.output_node().args[0]
        out = graph.call_function(whole, tuple(graph.placeholder(node.name) for node in taken))
        graph.output(tuple(graph.call_function(operator.getitem, (out, i)) for i in range(len(outputs))))
        return compiler(fx.GraphModule(torch.nn.Module(), graph), inputs)

    return compile


def _rewriting(bucket_megabytes: float, by_ring: bool) -> Callable[[fx.Graph], None] | None:
    """What is done to a region's graphs."""
    passes: list[Callable[[fx.Graph], None]] = [RingRewriting()] if by_ring else []
    if bucket_megabytes:
        passes.append(Bucketing(bucket_megabytes * 1e6))

    def rewrite(graph: fx.Graph) -> None:
        for each in passes:
            each(graph)

    return rewrite if passes else None


def _backend(
    backend: str | Backend,
    mode: str | None,
    options: dict[str, Any] | None,
    rewrite: Callable[[fx.Graph], None] | None,
) -> Backend:
    if backend == "inductor":
        return inductor(mode, options, rewrite)
    if mode is not None or options is not None:
        raise ValueError(f"espalier.compile: mode= and options= are inductor's; the backend is {backend!r}.")
    if callable(backend):
        return backend
    return aot_eager(rewrite) if backend == "aot_eager" and rewrite else compiler(backend)


class Region:
    """A function with what was compiled of it, by kind of inputs.

    Attributes:
        owner: the function, or the module, that it hangs on.
    """

    def __init__(
        self, call: Callable[..., Any], owner: Any, backend: Backend, fullgraph: bool = True
    ) -> None:
        self._call, self.owner, self._backend, self._fullgraph = call, owner, backend, fullgraph
        self._by_state: dict[Any, _Variants] = {}  # what an evaluation, or a generation, does is no training
        self.__name__ = getattr(owner, "__name__", type(owner).__name__)
        self.__doc__ = owner.__doc__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        ways = Ways.now.get()
        return self.called(args, kwargs)[0] if ways is None else ways.call(self, args, kwargs)

    def as_written(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the function gives, without a graph."""
        return self._call(*args, **kwargs)

    def as_recorded(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The same while it is followed, and for nothing."""
        leaves, form = flatten((args, kwargs))
        places: dict[int, HolderSlot] = {}
        list(watched(self.owner, places, _objects(leaves)))
        return _followed(self._call, places, leaves, form, self._fullgraph)[2]

    def called(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, str]:
        """What it gives, and by which way: see :class:`Ways`."""
        way, run = self.way(args, kwargs)
        return run(), way

    def way(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, Callable[[], Any]]:
        """By which way a call goes, and what goes it."""
        written = "written", partial(self.as_written, args, kwargs)
        if observed() or any(watcher.inside for watcher in watchers()):
            return written
        variants = self._by_state.get(now := state())
        if variants is None:
            variants = self._by_state[now] = _Variants()
        if variants.are_refused and not variants.by_kind:
            return written
        is_flat = not kwargs and all(type(a) is DTensor for a in args)
        leaves, form = (list(args), None) if is_flat else flatten((args, kwargs))
        if variants.refused_with and not variants.refused_with.isdisjoint(map(type, leaves)):
            return written
        key = (*kinds(leaves), _repeats(leaves), form)
        for variant in variants.by_kind.get(key, ()):
            if variant.fits():
                inputs = variant.inputs(leaves)
                if variant.written and _share_memory(inputs, variant.written):
                    return written  # traced as if each had memory of its own
                run = partial(variant.run, leaves, inputs)
                return "graph", partial(_once_only, run) if LOSES_SECOND_DERIVATIVES else run
        if variants.are_refused:
            return written
        if variants.count < _LIMIT and all(map(_compilable, leaves)):
            return "recorded", partial(self._recorded, variants, key, leaves, form)
        if variants.count == _LIMIT:
            variants.count += 1
            warnings.warn(_too_many(self.__name__), stacklevel=3)
        return written

    def _recorded(self, variants: _Variants, key: Any, leaves: list[Any], form: Any) -> Any:
        variants.count += 1
        recorded, out = _record(self._call, self.owner, leaves, form, self._backend, self._fullgraph)
        if isinstance(recorded, Refused):
            objects = set(map(type, _objects(leaves)))
            variants.refused_with |= objects
            variants.are_refused |= not objects
            warnings.warn(f"{self.__name__} runs as it is written, uncompiled. {recorded}", stacklevel=3)
        else:
            variants.by_kind.setdefault(key, []).append(recorded)
            if torch.is_grad_enabled():
                self._see_twice(variants, out)
        return out

    def _see_twice(self, variants: _Variants, out: Any) -> None:
        """Let it run as it is written from now on, if what was recorded is differentiated with a graph.

        The call that is recorded has no graph of ours, so that gradients go back through its gradients.
        """

        def seen(_: torch.Tensor) -> None:
            if torch.is_grad_enabled() and not variants.are_refused:
                variants.are_refused = True
                variants.by_kind.clear()
                tell(
                    f"{self.__name__} runs as it is written, uncompiled: the program takes gradients with "
                    "create_graph=True through it, and compiled graphs have no gradients of gradients."
                )

        _at_gradients(out, seen)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self  # a copy of a module is not its owner

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self
        return Region(self._call.__get__(instance), instance, self._backend, self._fullgraph)


def _once_only(run: Callable[[], Any]) -> Any:
    """What a graph gives; with an error for a gradient of it that is recorded itself."""

    def refuse(_: torch.Tensor) -> None:
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"create_graph=True through a compiled block: with torch {torch.__version__} it has no "
                "double backward, and terms of it would be missing without a word. Leave compile out: "
                "initialize(..., compile=False), or train.compile = false; or take torch 2.13 or newer."
            )

    out = run()
    _at_gradients(out, refuse)
    return out


def _at_gradients(out: Any, hook: Callable[[torch.Tensor], None]) -> None:
    """Have this called with each gradient that comes to what a region gave."""
    with raw():
        for x in flatten(out)[0]:
            if isinstance(x, torch.Tensor) and x.requires_grad:
                x.register_hook(hook)


@dataclass
class _Variants:
    """What was compiled of a region in one of torch's states, by kind of inputs.

    Attributes:
        count: how often it was tried.
        are_refused: whether it was no graph: from then on a new kind runs as it is written.
        refused_with: kinds of arguments with which it is none: caches.
    """

    by_kind: dict[Any, list[_Variant]] = field(default_factory=dict)
    count: int = 0
    are_refused: bool = False
    refused_with: set[type] = field(default_factory=set)


def state() -> Any:
    """What of torch's state decides about the program beside the inputs."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        tuple(
            torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) for kind in autocast_types()
        ),
        torch.get_default_dtype(),
        is_strict.get(),
    )


def kinds(inputs: Sequence[Any]) -> list[Any]:
    """What of each input decides about the program: of tensors all but their values."""
    await_values([x for x in inputs if isinstance(x, torch.Tensor)])
    with raw():
        return [_kind(x) for x in inputs]


def _kind(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        where = x._layout if type(x) is DTensor else (tuple(_shape(x)), _device(x))
        return (where, _dtype(x), _needs_gradient(x), _stride(x))
    if isinstance(x, CONSTANTS):
        return (type(x), x)
    return (type(x), id(x))


def _objects(leaves: Sequence[Any]) -> list[Any]:
    """Arguments that are neither tensors nor constants."""
    return [x for x in leaves if not isinstance(x, (torch.Tensor, *CONSTANTS))]


def _repeats(leaves: list[Any]) -> Any:
    """Which arguments are one tensor, if any are."""
    tensors = [id(x) for x in leaves if isinstance(x, torch.Tensor)]
    return None if len(set(tensors)) == len(tensors) else tuple(map(tensors.index, tensors))


def _share_memory(tensors: list[torch.Tensor], written: list[int]) -> bool:
    """Whether others see what is written to some."""
    memories = [memory_id(x) for x in tensors]
    return any(memories.count(memories[i]) > 1 for i in written)


def _too_many(name: str) -> str:
    return (
        f"espalier.compile: {name} was called with more than {_LIMIT} kinds of inputs; from now on a new "
        "kind runs uncompiled. Keep shapes, layouts and arguments that are no tensors from changing (pad "
        "batches, pass numbers as tensors)."
    )


def _compilable(x: Any) -> bool:
    """Dry runs count what the program does, so they run it as it is."""
    if type(x) is DTensor:
        return not x._layout.mesh.is_dry
    return not isinstance(x, torch.Tensor) or x.device.type != "meta"


class _Variant:
    """A region compiled for one kind of inputs.

    Attributes:
        written: which inputs, keys left out, are written to in place.
    """

    def __init__(
        self,
        compiled: Callable[..., Any],
        recorder: Recorder,
        guards: list[AttributeGuard],
        outputs: list[Any],
        form: Any,
        given: list[Any],
    ) -> None:
        self.written = recorder.written
        self._given = given  # is known by ``id``, so it is to stay
        self._compiled, self._sources, self._around = compiled, recorder.sources, Surroundings(guards)
        self._outputs, self._form = outputs, form
        self._draws = any(isinstance(s, Key) for s in self._sources)
        self._silent: list[int] | None = None  # inputs that are written to, and no version says so
        self._places = [s for s in self._sources if type(s) is HolderSlot]
        self._kinds = kinds([place.get() for place in self._places])

    def fits(self) -> bool:
        """Whether modules and their tensors are as they were when it was recorded."""
        try:
            return self._around.are_same() and self._kinds == kinds(
                [holder[key] for holder, key in self._places]
            )
        except (KeyError, IndexError, ValueError):  # deleted meanwhile
            return False

    def inputs(self, leaves: list[Any]) -> list[torch.Tensor]:
        """The local tensors that the graph takes, keys of random operations left out."""
        with raw():
            return [
                plain(leaves[s] if isinstance(s, int) else s.holder[s.key])
                for s in self._sources if not isinstance(s, Key)
            ]  # fmt: skip

    def run(self, leaves: list[Any], inputs: list[torch.Tensor]) -> Any:
        """The outputs for arguments of this kind."""
        kept = inputs
        if self._draws:
            rest = iter(inputs)
            inputs = [
                torch.tensor(draw_key(s.mesh, s.generator), dtype=torch.int64)
                if isinstance(s, Key)
                else next(rest)
                for s in self._sources
            ]
        if self._silent == []:
            results = self._compiled(inputs)
        else:
            before = [*map(version, kept)]
            results = self._compiled(inputs)
            self._hush(kept, before)
        outs = []
        for what, which, layout in self._outputs:
            if what == "computed":
                outs.append(results[which] if layout is None else stamp(results[which], layout))
            elif what == "source":
                outs.append(leaves[which] if type(which) is int else which.get())
            else:
                outs.append(which)
        return unflatten(outs, self._form)

    def _hush(self, inputs: list[torch.Tensor], before: list[int]) -> None:
        """Take back what versions a graph counted that the program does not: of a norm's statistics.

        Else calls before it, that kept these, could not go back.
        """
        if self._silent is None:
            counted = [i for i, x in enumerate(inputs) if version(x) != before[i] and i not in self.written]
            self._silent = counted if set_versions is not None else []
        if self._silent:
            set_versions(tuple(inputs[i] for i in self._silent), tuple(before[i] for i in self._silent))


def _followed(
    call: Callable[..., Any], places: dict[int, HolderSlot], leaves: list[Any], form: Any, fullgraph: bool
) -> tuple[Recorder, list[Any], Any]:
    """Run a region once; what it did, what it was given, and what it gave."""
    for place in places.values():
        place.get().__dict__.pop("_moved", None)  # what was moved before would not be seen to move
        await_values((place.get(),))
    recorder = Recorder(places, fullgraph)
    entered = list(leaves)
    first: dict[int, int] = {}
    for i, x in enumerate(leaves):
        if isinstance(x, torch.Tensor):
            at = first.setdefault(id(x), i)
            entered[i] = _fresh(x) if at == i else entered[at]
            if at == i:
                recorder.take(entered[i], i)
    args, kwargs = unflatten(entered, form) if form is not None else (tuple(entered), {})
    with recorder:
        out = call(*args, **kwargs)
    return recorder, entered, out


def _record(
    call: Callable[..., Any], owner: Any, leaves: list[Any], form: Any, backend: Backend, fullgraph: bool
) -> tuple[_Variant | Refused, Any]:
    """Run the region once, and compile what it did, or tell why that cannot be."""
    places: dict[int, HolderSlot] = {}
    given = _objects(leaves)
    guards = list(watched(owner, places, given))
    recorder, entered, out = _followed(call, places, leaves, form, fullgraph)
    results, out_form = flatten(out)
    positions: dict[Any, int] = {}
    outputs: list[Any] = []
    try:
        if recorder.refused is not None:
            raise recorder.refused
        if not fullgraph:
            _refuse_hooks(owner)
        _refuse_changes(guards, owner, given, places)
        numbers = {node: i for i, node in enumerate(n for n in recorder.graph.nodes if n.op == "placeholder")}
        outputs += [_output(x, recorder, numbers, positions) for x in results]
        pairs = zip(outputs, results, strict=True)
        trained = {which for (what, which, _), x in pairs if what == "computed" and x.requires_grad}
        wanted = {node: i for node, i in positions.items() if i in trained}
        of_some = _reached(recorder, entered, wanted, fullgraph)
    except Refused as refused:
        if fullgraph:
            raise
        leaf_of = {id(x): leaf for x, leaf in zip(entered, leaves, strict=True)}
        return refused, unflatten([leaf_of.get(id(x), x) for x in results], out_form)
    module = recorder.finish(positions)
    taken = module.graph.find_nodes(op="placeholder")
    reached = Reached({i: of_some[n] for i, n in enumerate(taken) if n in of_some}, frozenset(trained))
    # what is traced keeps for its backward pass what it is given: not what the caller would have kept for it
    apart = nullcontext() if outer_hooks(True) is None else saved_tensors_hooks(lambda x: x, lambda x: x)
    with apart:
        compiled = backend(module, [_example(source, entered) for source in recorder.sources])
    for i, (what, which, _) in enumerate(outputs):
        if what == "source" and type(which) is int:
            results[i] = leaves[which]
    variant = _Variant(partial(reached.call, compiled), recorder, guards, outputs, out_form, given)
    return variant, unflatten(results, out_form)


def _fresh(x: torch.Tensor) -> torch.Tensor:
    """The tensor again without what was remembered on it."""
    with raw():
        y = plain(x) if type(x) is DTensor else x.view_as(x)
    return stamp(y, x._layout) if type(x) is DTensor else y


def _output(x: Any, recorder: Recorder, numbers: dict[Any, int], positions: dict[Any, int]) -> Any:
    if not isinstance(x, torch.Tensor):
        if not isinstance(x, CONSTANTS):
            raise Refused(
                f"espalier.compile: the region returns a {type(x).__name__}. Return tensors, numbers, or "
                "tuples, lists and dicts of them (or register the class with torch.utils._pytree)."
            )
        return ("constant", x, None)
    node = recorder.node(x)
    if node in numbers:
        return ("source", recorder.sources[numbers[node]], None)
    # what a graph gives is no loan: its source is not there to be told of writes
    layout: Layout | None = x._layout.own if type(x) is DTensor else None
    return ("computed", positions.setdefault(node, len(positions)), layout)


def _given_by(source: Any, entered: list[Any]) -> torch.Tensor:
    """An input of a graph that is no key."""
    x: torch.Tensor = source.get() if type(source) is HolderSlot else entered[source]
    return x


def _example(source: Any, entered: list[Any]) -> torch.Tensor:
    """A plain tensor of the same kind as an input, for the tracer."""
    if type(source) is Key:
        return torch.zeros((), dtype=torch.int64)
    x = _given_by(source, entered)
    with raw():
        like = torch.empty_strided(tuple(x.shape), _stride(x), dtype=x.dtype, device=x.device)
        return like.requires_grad_(x.requires_grad)


def _reached(
    recorder: Recorder, entered: list[Any], wanted: Mapping[fx.Node, int], fullgraph: bool
) -> dict[fx.Node, frozenset[int]]:
    """The parameters on which some outputs hang that have gradients, and others do not; and which, by number.

    Args:
        wanted: the outputs that have gradients, with their numbers.

    Raises:
        Refused: if no ``fullgraph``, and such an input is no parameter, or is written to. Where a loss does
            not use the outputs that hang on it, none of what made it has a gradient: other graphs would make
            zeros of that.
    """
    if len(wanted) < 2:
        return {}
    outputs: dict[fx.Node, set[int]] = {}
    for node in reversed(recorder.graph.nodes):
        own = {wanted[node]} if node in wanted else set[int]()
        outputs[node] = own.union(*(outputs[user] for user in node.users))
    of_some: dict[fx.Node, frozenset[int]] = {}
    all_nodes, written = recorder.graph.find_nodes(op="placeholder"), set(recorder.written)
    of_tensors = -1  # keys are none of what may be written
    for node, source in zip(all_nodes, recorder.sources, strict=True):
        of_tensors += not isinstance(source, Key)
        if not node.users or isinstance(source, Key) or not _given_by(source, entered).requires_grad:
            continue
        if len(outputs[node]) == len(wanted):
            continue
        if type(source) is HolderSlot and of_tensors not in written:
            of_some[node] = frozenset(outputs[node])
        elif not fullgraph:
            raise Refused(
                f"espalier.compile: of the region's {len(wanted)} outputs that are trained, some hang on "
                "other arguments than others. A graph gives gradients of zero where a loss does not use "
                "one, and none is right. Let the module give one such output, or some that hang on the same."
            )
    return of_some


def _refuse_hooks(owner: Any) -> None:
    """Raise if modules within have hooks of the program's, of which a graph has what they do to tensors."""
    modules = owner.named_modules() if isinstance(owner, torch.nn.Module) else ()
    for name, module in modules:
        hooks = [hook for table in HOOKS for hook in module.__dict__[table].values()]
        if name and not all(made_in(hook, "torch", "espalier") for hook in hooks):
            raise Refused(
                f"espalier.compile: {name} has hooks, which run when the region is recorded and not again. "
                "Put them on the region itself, or take them away."
            )


def _refuse_changes(
    guards: list[AttributeGuard], owner: Any, given: Sequence[Any], places: dict[int, HolderSlot]
) -> None:
    """Raise if the region itself changed what it hangs on: compiled, it would not."""
    after: dict[int, HolderSlot] = {}
    now = {(identity(holder), key): value for holder, key, value in watched(owner, after, given)}
    before = {(identity(holder), key): value for holder, key, value in guards}
    changed = [k for _, k in before.keys() ^ now.keys()]
    both = [at for at in before.keys() & now.keys() if at[1] is not SIZE]  # which names, is told
    changed += [at[1] for at in both if not same(before[at], now[at])]
    changed += [places.get(i, after.get(i)).key for i in places.keys() ^ after.keys()]  # type: ignore[union-attr]
    if changed:
        raise Refused(
            f"espalier.compile: the region sets {', '.join(sorted(map(str, set(changed))))} when it runs; "
            "compiled, it would not. Return the value, or write a number that changes into a buffer in place "
            "(use_cache=False: then there is no cache of keys and values to fill)."
        )
