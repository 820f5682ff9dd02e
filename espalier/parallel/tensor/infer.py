"""Tensor-parallel layouts for a model that nobody described.

The model runs once on a small batch while each torch call is watched, and the rules' own letters
(``espalier.tensor.rules``) tell how dims relate. A parameter that brings a new dim into the
activations (a Linear's output features, say) opens a *stream*; the stream follows that dim
through pointwise functions, views, attention heads, until

* it is contracted with another parameter (column then row), or reduced inside a loss over a
  sharded vocabulary: the stream is *closed*, and can be cut with one reduction at its end; or
* it *leaks*: into a norm, a residual sum, a slice, something that needs it whole.

Every closed stream that does not leak may be cut on the tensor axis, in all parameters it meets;
trials decide (``espalier.parallel.tensor.trial``). So may an *uneven* one, whose heads (of keys and values,
say) the ranks do not divide: its pieces lie elsewhere before and after a view, something travels there, and
it is cut if a trial shows that this pays. Embeddings are cut over the vocabulary, and heads over classes,
where that saves a real share of the model; a table of positions is not.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from espalier.layout import Layout, same_cuts
from espalier.mesh import Mesh
from espalier.tensor.apart import NotCopiedError, apart
from espalier.tensor.fallback import _entrance
from espalier.tensor.rules import RULES
from espalier.tensor.rules.spec import Letter, Operand, Spec
from espalier.trees import tensors_in, tree_map

# an embedding, or a head over classes, below this share of all parameters is not worth its messages
_LARGE_SHARE = 0.005

Stream = int
Cut = tuple[str, int]  # a parameter's name and the dim
Around = Callable[[nn.Module], AbstractContextManager[Any]]


class Group(dict[str, int]):
    """Parameters that are cut together, or not at all, by name, and of each the dim.

    Attributes:
        uneven: cutting them moves data inside.
    """

    uneven = False

    def within(self, prefix: str) -> Group:
        """The same, by their names in a module."""
        group = Group({name.removeprefix(prefix): dim for name, dim in self.items()})
        group.uneven = self.uneven
        return group


class InferenceWarning(UserWarning):
    """A model's tensor-parallel layouts could not be inferred; its parameters stay whole."""


def infer(model: nn.Module, batch: Any, ranks: int, around: Around = nullcontext) -> list[Group]:
    """What a tensor axis of ``ranks`` may cut.

    Args:
        model: a plain module; a copy of it is run forward once on ``batch``, without gradients.
        batch: arguments of the model: a dict, tuple or tensor.
        around: see :func:`run_once`.
    """
    watch = _Watch(model, ranks)
    try:
        run_once(model, batch, around, watch.of)
    except NotCopiedError as error:
        warnings.warn(
            f"The tensor-parallel layouts of {type(model).__name__} are inferred from a run of a copy, and "
            f"there can be none, so its parameters stay whole on the tensor axis. {error}. Let it have a "
            "__deepcopy__, or pass initialize(..., layouts={'*.up': 'column', '*.down': 'row'}).",
            InferenceWarning,
            stacklevel=3,
        )
        return []
    except Exception as error:
        warnings.warn(
            f"The tensor-parallel layouts of {type(model).__name__} could not be inferred, so its parameters "
            f"stay whole on the tensor axis: running it once failed with {type(error).__name__}: {error}. "
            "Pass initialize(..., layouts={'*.up': 'column', '*.down': 'row'}).",
            InferenceWarning,
            stacklevel=3,
        )
        return []
    return watch.result()


def run_once(model: nn.Module, batch: Any, *around: Around) -> None:
    """Run a copy of a plain model forward, without gradients: the model and all else are left as they were.

    Args:
        around: each gives of the copy what is open meanwhile.

    Raises:
        NotCopiedError: it, or the batch, cannot be copied.
    """
    with apart(model, batch) as twin, torch.no_grad(), ExitStack() as stack:
        for opened in around:
            stack.enter_context(opened(twin.module))
        if isinstance(twin.given, Mapping):
            twin.module(**twin.given)
        else:
            twin.module(*(twin.given if isinstance(twin.given, tuple | list) else (twin.given,)))


class _Watch(TorchFunctionMode):
    def __init__(self, model: nn.Module, ranks: int) -> None:
        super().__init__()
        self.mesh = Mesh.dry({"tensor": ranks})
        self.ranks = ranks
        self.names: dict[int, str] = {}
        self.sizes = {name: p.numel() for name, p in model.named_parameters()}
        self.shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        self.parent: list[Stream] = []
        self.cuts: dict[Cut, Stream] = {}
        self.closed: set[Stream] = set()
        self.contracted: set[Stream] = set()  # those that are closed by another parameter
        self.leaked: set[Stream] = set()
        self.uneven: set[Stream] = set()
        self.tables: dict[Cut, int] = {}  # and the rows looked up for one row of the batch
        # tensors are kept alive so that an id never names two of them
        self.tags: dict[int, tuple[torch.Tensor, dict[int, Stream]]] = {}

    def of(self, copy: nn.Module) -> _Watch:
        """Itself, to watch a copy of the model."""
        self.names = {id(p): name for name, p in copy.named_parameters()}
        return self

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if RULES.get(func) is None and RULES.special(func) is None:
            for inner in (RULES.body(func), _entrance(func)):
                if inner is not None:
                    with self:
                        out = inner(*args, **kwargs)
                    if out is not NotImplemented:
                        return out
        tensors = tensors_in((args, kwargs))
        known = any(id(t) in self.tags or id(t) in self.names for t in tensors)
        # the rule is asked before the call, which may write in place
        spec = self._spec(func, args, kwargs) if known and RULES.special(func) is None else None
        out = func(*args, **kwargs)
        results = tensors_in(out)
        if known and results and RULES.special(func) is None:
            self._follow(spec, tensors, results)
        return out

    def _spec(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Spec | None:
        rule = RULES.get(func)
        if rule is None:
            return None
        count = iter(range(10**9))

        def operand(x: Any) -> Any:
            if isinstance(x, torch.Tensor):
                return Operand(next(count), Layout.replicated(self.mesh, x.shape), x.dtype, ())
            return x

        if "input" in kwargs:
            args, kwargs = (kwargs["input"], *args), {k: v for k, v in kwargs.items() if k != "input"}
        try:
            return rule(*tree_map(operand, args), **tree_map(operand, kwargs))
        except TypeError:
            return None

    def _follow(self, spec: Spec | None, tensors: list[torch.Tensor], results: list[torch.Tensor]) -> None:
        if spec is None or len(spec.ins) != len(tensors):
            for t in tensors:
                self._leak_all(t)
            return
        at = self._letters(spec, tensors)
        for letter, members in at.items():
            stream = self._join(letter, members, spec, results)
            if stream is None:
                continue
            for k, dims in enumerate(spec.outs):
                if letter in dims and k < len(results):
                    held = self.tags.setdefault(id(results[k]), (results[k], {}))[1]
                    held[dims.index(letter)] = stream
        for t, dims in zip(tensors, spec.ins, strict=True):
            for dim, stream in self._tags(t).items():
                if dims[dim] is None or dims[dim] in spec.blocked:
                    self.leaked.add(self._root(stream))

    def _letters(
        self, spec: Spec, tensors: list[torch.Tensor]
    ) -> dict[Letter, list[tuple[torch.Tensor, int]]]:
        at: dict[Letter, list[tuple[torch.Tensor, int]]] = {}
        for t, dims in zip(tensors, spec.ins, strict=True):
            for dim, letter in enumerate(dims):
                if letter is not None and letter not in spec.blocked:
                    at.setdefault(letter, []).append((t, dim))
        return at

    def _join(
        self, letter: Letter, members: list[tuple[torch.Tensor, int]], spec: Spec, results: list[torch.Tensor]
    ) -> Stream | None:
        """The stream that a letter of a call stands for, if any."""
        named = [(self.names[id(t)], dim) for t, dim in members if id(t) in self.names]
        others = [(t, dim) for t, dim in members if id(t) not in self.names]
        streams = {self._root(s) for t, dim in others if (s := self._tags(t).get(dim)) is not None}
        kept = any(letter in dims for dims in spec.outs)
        if not streams:
            if others or not named:
                return None
            if not kept:
                # looked up, not multiplied: the rows of an embedding
                looked_up = results[0].shape[:-1].numel() if results else 0
                self.tables.update({cut: max(looked_up, self.tables.get(cut, 0)) for cut in named})
                return None
            if len(named) == 1 and len(self.shapes[named[0][0]]) < 2 and len(members) == len(spec.ins):
                return None  # a lone vector (a norm's weight, a bias alone) opens nothing
        stream = self._union(streams)
        for cut in named:
            self._union({stream, self._root(self.cuts.setdefault(cut, stream))})
        stream = self._root(stream)
        if any(self._tags(t).get(dim) is None and not _small(t, members) for t, dim in others):
            self.leaked.add(stream)  # met by something whole, as in a residual sum
        if not all(same_cuts(size, factor, (self.ranks,)) for size, factor in spec.factors.get(letter, ())):
            self.uneven.add(stream)
        if kept and letter in spec.sends:
            self.leaked.add(stream)  # a norm over it can be, but for a message of its own
        if not kept:
            if letter in spec.reduce and (named or spec.reduce[letter] == "done"):
                self.closed.add(stream)
                if named:
                    self.contracted.add(stream)
            else:
                self.leaked.add(stream)
        return stream

    def _tags(self, t: torch.Tensor) -> dict[int, Stream]:
        return self.tags[id(t)][1] if id(t) in self.tags else {}

    def _leak_all(self, t: torch.Tensor) -> None:
        self.leaked.update(self._root(s) for s in self._tags(t).values())
        name = self.names.get(id(t))
        self.leaked.update(self._root(s) for (other, _), s in self.cuts.items() if other == name)

    def _root(self, stream: Stream) -> Stream:
        while self.parent[stream] != stream:
            stream = self.parent[stream]
        return stream

    def _union(self, streams: set[Stream]) -> Stream:
        if not streams:
            self.parent.append(len(self.parent))
            return self.parent[-1]
        first = min(streams)
        for s in streams:
            self.parent[s] = first
        for group in (self.closed, self.contracted, self.leaked, self.uneven):
            if group & streams:
                group.add(first)
        return first

    def result(self) -> list[Group]:
        uneven = {self._root(s) for s in self.uneven}
        leaked = {self._root(s) for s in self.leaked}
        closed = {self._root(s) for s in self.closed} - leaked
        contracted = {self._root(s) for s in self.contracted}
        groups: dict[Any, Group] = {}
        found: set[str] = set()

        def cut(name: str, dim: int, group: Any) -> None:
            if name not in found:
                found.add(name)
                groups.setdefault(group, Group())[name] = dim
                groups[group].uneven = group in uneven

        for (name, dim), stream in self.cuts.items():
            root = self._root(stream)
            if root in closed and self.shapes[name][dim] >= self.ranks:
                cut(name, dim, root)
        for (name, dim), looked_up in self.tables.items():
            # of a table of positions most is looked up, and what is looked up would be sent
            if self.shapes[name][dim] > 2 * looked_up:
                cut(name, dim, name)
        least = _LARGE_SHARE * sum(self.sizes.values())
        return [
            group
            for key, group in groups.items()
            if key in contracted or sum(self.sizes[name] for name in group) >= least
        ]


def _small(t: torch.Tensor, members: list[tuple[torch.Tensor, int]]) -> bool:
    """Whether a whole tensor can follow a cut stream for free: a vector, mask or table, no activation."""
    return t.ndim < max(m.ndim for m, _ in members)
