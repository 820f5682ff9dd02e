"""Recording: the local program that a call of a model comes down to, as a graph.

A :class:`Recorder` is a torch function mode. While the model runs on DTensors, as ever, it sees each call
that the dispatcher makes on local tensors and each move between layouts, and writes it down
as a node of a ``torch.fx`` graph on plain tensors. What does not depend on values (layouts, rules,
shapes, Python's control flow) has happened by then and leaves no trace.
"""

from __future__ import annotations

import inspect
import operator
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import compress
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from espalier.blocks import around
from espalier.comm.custom_ops import observed, tracers
from espalier.comm.redistribute import redistribute_by
from espalier.device import autocast_types
from espalier.layout import Layout
from espalier.mesh import Mesh
from espalier.tensor.bucketing import Bucketing
from espalier.tensor.dispatch import is_strict
from espalier.tensor.dtensor import DTensor, plain, stamp
from espalier.tensor.fallback import writes
from espalier.tensor.loans import await_values
from espalier.tensor.names import made_in
from espalier.tensor.observers import watchers
from espalier.tensor.random import draw_key
from espalier.tensor.reached import Reached
from espalier.tensor.ring_rewriting import RingRewriting
from espalier.tensor.saved import close_saving, gather_before_backward, hold, open_saving, outer_hooks
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
from espalier.torch_private import (
    HOOKS,
    all_given,
    aot_eager,
    compile_call,
    compiler,
    getter,
    inductor,
    memory_id,
    method,
    raw,
    set_grad_enabled,
    set_versions,
    torch_functions_on,
    version_of,
)
from espalier.trees import flatten, leaves, tensors_in, tree_map, unflatten

# answers that layouts, shapes and dtypes decide
METADATA = frozenset(
    """
    size stride dim ndimension numel nelement element_size storage_offset is_contiguous is_floating_point
    is_complex is_signed is_inference is_conj is_neg is_same_size get_device is_set_to dim_order result_type
    untyped_storage is_shared is_pinned is_tensor is_storage can_cast has_names is_coalesced type _is_view
    __len__ __hash__ __repr__ __format__ __class__
    """.split()
)
_OF_DATA = frozenset("nonzero argwhere masked_select unique unique_consecutive _unique2 bincount".split())
_SAVING = frozenset([hold, open_saving, close_saving, gather_before_backward])
_SEEDING = frozenset("manual_seed seed set_rng_state get_rng_state initial_seed".split())
_SIMPLE = (
    fx.Node, int, float, bool, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format
)  # fmt: skip


class Refused(RuntimeError):
    """A program that cannot be compiled as one graph; the message says why and what to do."""


class Key(NamedTuple):
    """An input that is drawn anew for each run: the key of a random operation."""

    mesh: Mesh
    generator: torch.Generator | None = None


class Recorder(TorchFunctionMode):
    """Writes down what happens on local tensors while it is on.

    Args:
        places: where the tensors are kept that the program may use beside its arguments, by ``id``.
        fullgraph: what no graph can have is an error; else it is noted, and the program runs to its end.

    Attributes:
        refused: what was noted so.
        graph: the graph so far.
        sources: for each placeholder where its value comes from: the index of an argument, a
            :class:`HolderSlot` or a :class:`Key`.
    """

    records = True

    def __init__(self, places: Mapping[int, HolderSlot], fullgraph: bool = True) -> None:
        super().__init__()
        self.refused: Refused | None = None
        self._fullgraph = fullgraph
        self.graph = fx.Graph()
        self.sources: list[int | HolderSlot | Key] = []
        self._versions: list[tuple[torch.Tensor, int]] = []
        self._places = places
        self._first_versions = {i: _version(place.get()) for i, place in places.items()}
        self._kept: dict[int, tuple[Any, fx.Node]] = {}
        self._nodes: Any = WeakTensorKeyDictionary()
        self._start = self.graph.call_function(operator.pos, (0,))  # placeholders go before it
        self._grad = self._first_grad = torch.is_grad_enabled()
        self._cast = _autocast()

    def take(self, x: torch.Tensor, source: int | HolderSlot | Key) -> fx.Node:
        """Make ``x`` an input of the graph."""
        with self.graph.inserting_before(self._start):
            node = self.graph.placeholder(f"x{len(self.sources)}")
        self.sources.append(source)
        self._nodes[x] = node
        # of what is taken as it is written to the version is another already
        self._versions.append((x, self._first_versions.get(id(x), _version(x))))
        return node

    @property
    def written(self) -> list[int]:
        """Which of the inputs but keys were written to in place (of inference tensors nobody knows)."""
        marks = [m for m, s in zip(self._versions, self.sources, strict=True) if not isinstance(s, Key)]
        return [i for i, (x, before) in enumerate(marks) if _version(x) != before or before < 0]

    def node(self, x: torch.Tensor) -> fx.Node:
        """The node that made ``x``."""
        made_by: fx.Node | None = self._nodes.get(x)
        if made_by is None:
            place = self._places.get(id(x))
            if place is None or place.get() is not x:
                raise Refused(
                    f"espalier.compile: a tensor of the shape {list(x.shape)} is used that is neither an "
                    "argument, nor kept by a module, nor by a variable of the function. Pass it as an "
                    "argument or make it a buffer (register_buffer)."
                )
            made_by = self.take(x, place)
        return made_by

    def finish(self, outputs: Iterable[fx.Node]) -> fx.GraphModule:
        """The graph as a module that takes the inputs and gives a tuple."""
        if self._grad != self._first_grad:
            self.graph.call_function(set_grad_enabled, (self._first_grad,))
        self.graph.output(tuple(outputs))
        self.graph.erase_node(self._start)
        self._drop_unused()
        self.graph.lint()
        return fx.GraphModule(torch.nn.Module(), self.graph)

    def _drop_unused(self) -> None:
        """Take out inputs that the graph does nothing with: their gradients would be zeros, and not none.

        Keys stay, as each is drawn.
        """
        nodes = self.graph.find_nodes(op="placeholder")
        stay = [bool(node.users) or isinstance(s, Key) for node, s in zip(nodes, self.sources, strict=True)]
        for node in compress(nodes, map(operator.not_, stay)):
            self.graph.erase_node(node)
        self.sources, self._versions = [*compress(self.sources, stay)], [*compress(self._versions, stay)]

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = all_given(func, kwargs)
        if torch_functions_on() and any(t is DTensor for t in types):
            with self:
                return DTensor.__torch_function__(func, types, args, kwargs)
        if func is draw_key:
            key = torch.tensor(func(*args), dtype=torch.int64)
            self.take(key, Key(*args))
            return key
        before = tensors_in((args, kwargs))
        with self._noting():
            self._refuse_reading(func, args)
        out = func(*args, **kwargs)
        if self.refused is None:
            with self._noting():
                self._note(func, args, kwargs, out, before)
        return out

    @contextmanager
    def _noting(self) -> Iterator[None]:
        """Inside, what no graph can have is noted, if it is no error."""
        try:
            yield
        except Refused as refused:
            if self._fullgraph:
                raise
            self.refused = self.refused or refused

    def _note(
        self, func: Callable[..., Any], args: Any, kwargs: Any, out: Any, before: list[torch.Tensor]
    ) -> None:
        name = getattr(func, "__name__", "")
        if func in _SAVING:
            self._keep(func, args, out)
        elif func is torch.Tensor.as_subclass:
            self._nodes[out] = self.node(args[0])
        elif tensors_in(out) or (before and name != "__set__" and writes(func)):
            self._write(func, args, kwargs, out, before)
        elif before and not _is_metadata(func):
            raise Refused(_reading(func))

    def _refuse_reading(self, func: Callable[..., Any], args: tuple[Any, ...]) -> None:
        name = getattr(func, "__name__", "")
        by_mask = name == "__getitem__" and any(
            x.dtype in (torch.bool, torch.uint8) for x in tensors_in(args[1:])
        )
        one = name == "where" and len(args) == 1
        if name in _OF_DATA or by_mask or one:
            raise Refused(
                f"espalier.compile: the shape of what {name} gives hangs on values. Leave this part out of "
                "the compiled region, or write it with masks (torch.where(condition, a, b))."
            )
        if func is redistribute_by and args[1].operations is None:
            raise Refused(
                "espalier.compile: a region cannot move tensors to another mesh. Do so outside of it."
            )
        if name in _SEEDING:
            raise Refused(f"espalier.compile: {name}() inside a compiled region. Call it outside.")

    def _write(
        self, func: Callable[..., Any], args: Any, kwargs: Any, out: Any, before: list[torch.Tensor]
    ) -> None:
        self._follow_state()
        args, kwargs = tree_map(self._operand, args), tree_map(self._operand, kwargs)
        node = _call(self.graph, func, args, kwargs)
        known = {id(x) for x in before}
        self._assign(out, node, known)

    def _keep(self, func: Callable[..., Any], args: Any, out: Any) -> None:
        """What the backward pass keeps, and gathers again, is part of the program."""
        self._kept[id(out)] = out, _call(self.graph, func, tree_map(self._operand, args), {})

    def _operand(self, x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            return self.node(x)
        if id(x) in self._kept:
            return self._kept[id(x)][1]
        return tuple(x) if isinstance(x, torch.Size) else x

    def _assign(self, out: Any, node: fx.Node, known: set[int]) -> None:
        if isinstance(out, torch.Tensor):
            if id(out) not in known:
                self._nodes[out] = node
        elif isinstance(out, tuple | list):
            for i, x in enumerate(out):
                if tensors_in(x):
                    self._assign(x, self.graph.call_function(operator.getitem, (node, i)), known)
        elif out is not None:
            raise Refused(f"espalier.compile: an operation gives a {type(out).__name__} with tensors in it.")

    def _follow_state(self) -> None:
        grad = torch.is_grad_enabled()
        if grad != self._grad:
            self.graph.call_function(set_grad_enabled, (grad,))
            self._grad = grad
        if _autocast() != self._cast:
            raise Refused(
                "espalier.compile: torch.autocast is switched inside the compiled region. Open it around the "
                "call of the region."
            )


def _autocast() -> tuple[Any, ...]:
    return tuple(
        (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in autocast_types()
    )


def _version(x: torch.Tensor) -> int:
    with raw():
        return version_of(x)


def _is_metadata(func: Callable[..., Any]) -> bool:
    name = getattr(func, "__name__", "")
    return name == "__get__" or name in METADATA


def _reading(func: Callable[..., Any]) -> str:
    name = getattr(func, "__name__", str(func))
    if name == "__set__":
        what = f"the attribute {getattr(func.__self__, '__name__', '')} of a tensor is set"  # type: ignore[attr-defined]
    elif "hook" in name or name in ("retain_grad", "backward", "grad"):
        what = f"{name} is called"
    else:
        what = f"{name} reads a tensor's value, on which Python's control flow could hang"
    return (
        f"espalier.compile: inside the compiled region {what}. Leave this part out of the region: compile "
        "the modules around it, each on its own."
    )


def _call(graph: fx.Graph, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> fx.Node:
    name = getattr(func, "__name__", "")
    owner = getattr(func, "__self__", None)
    if name == "__get__" and inspect.isgetsetdescriptor(owner):
        attribute = owner.__name__
        if attribute == "data":
            return graph.call_method("detach", args[:1])
        return graph.call_function(getattr, (args[0], attribute))
    values = leaves((args, kwargs), sought=())
    plain = all(isinstance(x, _SIMPLE) or x is None or x is Ellipsis for x in values)
    if plain and args and isinstance(args[0], fx.Node) and getattr(torch.Tensor, name, None) is func:
        return graph.call_method(name, args, kwargs)
    module = getattr(func, "__module__", None) or "torch"
    # not every function of torch stands under its name: that of x ** 2 does not
    if plain and module.startswith("torch") and getattr(sys.modules.get(module), name, None) is func:
        return graph.call_function(func, args, kwargs)
    nodes = [x for x in leaves((args, kwargs), sought=()) if isinstance(x, fx.Node)]
    return graph.call_function(Bound(func, args, kwargs), tuple(nodes))


class Bound:
    """A call with arguments that no graph can print: it keeps them, and takes the tensors among them.

    Attributes:
        function: what is called.
        template: ``(args, kwargs)``, with a :class:`Slot` for each tensor.
    """

    def __init__(self, function: Callable[..., Any], args: Any, kwargs: Any) -> None:
        self.function = function
        self.template = tree_map(lambda x: Slot() if isinstance(x, fx.Node) else x, (args, kwargs))
        self.__name__ = self.__qualname__ = _title(function, args)  # for those who read the graph

    def __call__(self, *tensors: Any) -> Any:
        values = iter(tensors)
        args, kwargs = tree_map(lambda x: next(values) if isinstance(x, Slot) else x, self.template)
        return self.function(*args, **kwargs)


class Slot:
    """Where a tensor stands among the arguments of a recorded call."""


def _title(func: Callable[..., Any], args: tuple[Any, ...]) -> str:
    if func is redistribute_by:
        return "_then_".join(args[1].operations) or "defer"
    owner = getattr(func, "__self__", None)
    name = f"{owner.__name__}_apply" if isinstance(owner, type) else getattr(func, "__name__", "call")
    return "".join(c if c.isalnum() else "_" for c in name)


# ---- ``espalier.compile``: a region of a program on DTensors as one compiled graph
#
# The first call with inputs of one kind runs as ever and is recorded (see ``espalier.tensor.compiled``):
# what it comes down to on this rank is a graph on plain local tensors, with the collectives in it.
# AOTAutograd traces that graph forward and backward and hands both to the backend. Later calls with inputs
# of that kind run what was compiled.


Backend = Callable[[torch.fx.GraphModule, list[torch.Tensor]], Callable[..., Any]]
Tracing = Callable[[Callable[..., Any], Sequence[torch.Tensor]], Any]

# the C functions themselves: this is the way of every call
_stride = method("stride")
_shape, _device, _dtype, _needs_gradient = map(getter, ("shape", "device", "dtype", "requires_grad"))
_BUCKET = 25.0  # megabytes of one message
_LIMIT = 16  # kinds of inputs for which one region is compiled


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
    if dynamic:
        raise ValueError("espalier.compile: shapes are static; leave dynamic= out.")
    if disable:
        return model
    rewrite = _rewriting(bucket_megabytes, async_tensor_parallel)
    compiler = _backend(backend, mode, options, rewrite)
    if isinstance(model, torch.nn.Module):
        compile_call(model, lambda call: Region(call, model, compiler, fullgraph))
        return model
    return Region(model, model, compiler, fullgraph)


def compile_forward(module: torch.nn.Module, backend: Backend, fullgraph: bool = True) -> Region:
    """Compile what a module's ``forward`` is now; hooks, and what is put around it later, stay outside.

    So its parameters may be gathered before each call, and released after it. A copy runs as it is written.

    Args:
        fullgraph: as of :func:`compile`.
    """
    region = Region(module.forward, module, backend, fullgraph)

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
        self._is_refused = False
        self._refused_with: set[type] = set()  # kinds of arguments with which it is no graph: caches
        self._variants: dict[Any, list[_Variant]] = {}
        self._count = 0
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
        if self._is_refused or observed() or any(watcher.inside for watcher in watchers()):
            return written
        is_flat = not kwargs and all(type(a) is DTensor for a in args)
        leaves, form = (list(args), None) if is_flat else flatten((args, kwargs))
        if self._refused_with and not self._refused_with.isdisjoint(map(type, leaves)):
            return written
        key = (state(), *kinds(leaves), _repeats(leaves), form)
        for variant in self._variants.get(key, ()):
            if variant.fits():
                inputs = variant.inputs(leaves)
                if variant.written and _share_memory(inputs, variant.written):
                    return written  # traced as if each had memory of its own
                return "graph", partial(variant.run, leaves, inputs)
        if self._count < _LIMIT and all(map(_compilable, leaves)):
            return "recorded", partial(self._recorded, key, leaves, form)
        if self._count == _LIMIT:
            self._count += 1
            warnings.warn(_too_many(self.__name__), stacklevel=3)
        return written

    def _recorded(self, key: Any, leaves: list[Any], form: Any) -> Any:
        self._count += 1
        recorded, out = _record(self._call, self.owner, leaves, form, self._backend, self._fullgraph)
        if isinstance(recorded, Refused):
            self._refused_with |= set(map(type, _objects(leaves)))
            self._is_refused = not self._refused_with
            warnings.warn(f"{self.__name__} runs as it is written, uncompiled. {recorded}", stacklevel=3)
        else:
            self._variants.setdefault(key, []).append(recorded)
        return out

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self  # a copy of a module is not its owner

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self
        return Region(self._call.__get__(instance), instance, self._backend, self._fullgraph)


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
            before = [*map(_version, kept)]
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
            counted = [i for i, x in enumerate(inputs) if _version(x) != before[i] and i not in self.written]
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
        y = x.as_subclass(torch.Tensor) if type(x) is DTensor else x.view_as(x)
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
