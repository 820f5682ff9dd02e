"""Recording: the local program that a call of a model comes down to, as a graph.

A :class:`Recorder` is a torch function mode. While the model runs on DTensors, as ever, it sees each call
that the dispatcher makes on local tensors and each move between layouts, and writes it down
as a node of a ``torch.fx`` graph on plain tensors. What does not depend on values (layouts, rules,
shapes, Python's control flow) has happened by then and leaves no trace.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from espalier.comm.moves import travel
from espalier.mesh import Mesh
from espalier.tensor.dtensor import DTensor
from espalier.tensor.fallback import writes
from espalier.tensor.random import draw_key
from espalier.tensor.saved import close_saving, gather_before_backward, hold, open_saving
from espalier.trees import leaves, tensors_in, tree_map

_intercepted = torch._C._is_torch_function_enabled

# answers that layouts, shapes and dtypes decide
_METADATA = frozenset(
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


class Place(NamedTuple):
    """Where a tensor is kept that is no argument: ``holder[key]``."""

    holder: Any
    key: Any

    def get(self) -> Any:
        """What is there now; None if nothing is."""
        try:
            return self.holder[self.key]
        except (KeyError, IndexError, ValueError):
            return None


class Key(NamedTuple):
    """An input that is drawn anew for each run: the key of a random operation."""

    mesh: Mesh
    generator: torch.Generator | None = None


class Recorder(TorchFunctionMode):
    """Writes down what happens on local tensors while it is on.

    Args:
        places: where the tensors are kept that the program may use beside its arguments, by ``id``.

    Attributes:
        graph: the graph so far.
        sources: for each placeholder where its value comes from: the index of an argument, a
            :class:`Place` or a :class:`Key`.
    """

    records = True

    def __init__(self, places: Mapping[int, Place]) -> None:
        super().__init__()
        self.graph = fx.Graph()
        self.sources: list[int | Place | Key] = []
        self._versions: list[tuple[torch.Tensor, int]] = []
        self._places = places
        self._kept: dict[int, tuple[Any, fx.Node]] = {}
        self._nodes: Any = WeakTensorKeyDictionary()
        self._start = self.graph.call_function(operator.pos, (0,))  # placeholders go before it
        self._grad = self._first_grad = torch.is_grad_enabled()
        self._cast = _autocast()

    def take(self, x: torch.Tensor, source: int | Place | Key) -> fx.Node:
        """Make ``x`` an input of the graph."""
        with self.graph.inserting_before(self._start):
            node = self.graph.placeholder(f"x{len(self.sources)}")
        self.sources.append(source)
        self._nodes[x] = node
        self._versions.append((x, _version(x)))
        return node

    @property
    def writes(self) -> bool:
        """Whether an input was written to in place (of inference tensors nobody knows)."""
        return any(_version(x) != before or before < 0 for x, before in self._versions)

    def node(self, x: torch.Tensor) -> fx.Node:
        """The node that made ``x``."""
        found: fx.Node | None = self._nodes.get(x)
        if found is None:
            place = self._places.get(id(x))
            if place is None or place.get() is not x:
                raise Refused(
                    f"espalier.compile: a tensor of the shape {list(x.shape)} is used that is neither an "
                    "argument, nor kept by a module, nor by a variable of the function. Pass it as an "
                    "argument or make it a buffer (register_buffer)."
                )
            found = self.take(x, place)
        return found

    def finish(self, outputs: Iterable[fx.Node]) -> fx.GraphModule:
        """The graph as a module that takes the inputs and gives a tuple."""
        if self._grad != self._first_grad:
            self.graph.call_function(torch._C._set_grad_enabled, (self._first_grad,))
        self.graph.output(tuple(outputs))
        self.graph.erase_node(self._start)
        self.graph.lint()
        return fx.GraphModule(torch.nn.Module(), self.graph)

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if _intercepted() and any(t is DTensor for t in types):
            with self:
                return DTensor.__torch_function__(func, types, args, kwargs)
        if func is draw_key:
            key = torch.tensor(func(*args), dtype=torch.int64)
            self.take(key, Key(*args))
            return key
        self._refuse_reading(func, args)
        name, before = getattr(func, "__name__", ""), tensors_in((args, kwargs))
        out = func(*args, **kwargs)
        if func in _SAVING:
            self._keep(func, args, out)
        elif func is torch.Tensor.as_subclass:
            self._nodes[out] = self.node(args[0])
        elif tensors_in(out) or (before and name != "__set__" and writes(func)):
            self._write(func, args, kwargs, out, before)
        elif before and not _is_metadata(func):
            raise Refused(_reading(func))
        return out

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
        if func is travel and args[1].operations is None:
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
            self.graph.call_function(torch._C._set_grad_enabled, (grad,))
            self._grad = grad
        if _autocast() != self._cast:
            raise Refused(
                "espalier.compile: torch.autocast is switched inside the compiled region. Open it around the "
                "call of the region."
            )


def _autocast() -> tuple[Any, ...]:
    return tuple(
        (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")
    )


def _version(x: torch.Tensor) -> int:
    with torch._C.DisableTorchFunctionSubclass():
        return -1 if x.is_inference() else x._version


def _is_metadata(func: Callable[..., Any]) -> bool:
    name = getattr(func, "__name__", "")
    return name == "__get__" or name in _METADATA


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
    if plain and not isinstance(func, torch.Tensor) and module.startswith("torch"):
        return graph.call_function(func, args, kwargs)
    return _bound(graph, func, args, kwargs)


def _bound(graph: fx.Graph, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> fx.Node:
    """A call with arguments that no graph can print: they are kept by a function made for it."""
    given = [x for x in leaves((args, kwargs), sought=()) if isinstance(x, fx.Node)]

    def call(*tensors: Any) -> Any:
        values = iter(tensors)

        def fill(x: Any) -> Any:
            return next(values) if isinstance(x, _Slot) else x

        return func(*tree_map(fill, template[0]), **tree_map(fill, template[1]))

    def blank(x: Any) -> Any:
        return _Slot() if isinstance(x, fx.Node) else x

    template = tree_map(blank, (args, kwargs))
    call.__name__ = call.__qualname__ = _title(func, args)
    return graph.call_function(call, tuple(given))


class _Slot:
    """Where a tensor stands among the arguments of a recorded call."""


def _title(func: Callable[..., Any], args: tuple[Any, ...]) -> str:
    if func is travel:
        return "_then_".join(args[1].operations) or "vary"
    owner = getattr(func, "__self__", None)
    name = f"{owner.__name__}_apply" if isinstance(owner, type) else getattr(func, "__name__", "call")
    return "".join(c if c.isalnum() else "_" for c in name)
