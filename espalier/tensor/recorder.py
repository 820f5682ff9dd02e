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
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import compress
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from espalier.comm.redistribute import redistribute_by
from espalier.device import autocast_types
from espalier.mesh import Mesh
from espalier.tensor.dry_runs import has_mask
from espalier.tensor.dtensor import DTensor
from espalier.tensor.fallback import writes
from espalier.tensor.random import draw_key
from espalier.tensor.saved import close_saving, gather_before_backward, hold, open_saving
from espalier.tensor.surroundings import HolderSlot
from espalier.torch_private import all_given, raw, set_grad_enabled, torch_functions_on, version_of
from espalier.trees import leaves, tensors_in, tree_map

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
        self._first_versions = {i: version(place.get()) for i, place in places.items()}
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
        self._versions.append((x, self._first_versions.get(id(x), version(x))))
        return node

    @property
    def written(self) -> list[int]:
        """Which of the inputs but keys were written to in place (of inference tensors nobody knows)."""
        marks = [m for m, s in zip(self._versions, self.sources, strict=True) if not isinstance(s, Key)]
        return [i for i, (x, before) in enumerate(marks) if version(x) != before or before < 0]

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
        by_mask = name == "__getitem__" and has_mask(args[1:])
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


def version(x: torch.Tensor) -> int:
    """How often it was written to."""
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
