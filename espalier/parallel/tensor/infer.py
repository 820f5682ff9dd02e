"""Tensor-parallel layouts for a model that nobody described.

The model runs once on a small batch while each torch call is watched, and the rules' own letters
(``espalier.tensor.rules``) tell how dims relate. A parameter that brings a new dim into the
activations (a Linear's output features, say) opens a *stream*; the stream follows that dim
through pointwise functions, views, attention heads, until

* it is contracted with another parameter (column then row), or reduced inside a loss over a
  sharded vocabulary: the stream is *closed*, and can be cut with one reduction at its end; or
* it *leaks*: into a norm, a residual sum, a slice, something that needs it whole.

Every closed stream that does not leak may be cut on the tensor axis, in all parameters it meets;
trials decide (``espalier.parallel.tensor.infer``). So may an *uneven* one, whose heads (of keys and values,
say) the ranks do not divide: its pieces lie elsewhere before and after a view, something travels there, and
it is cut if a trial shows that this pays. Embeddings are cut over the vocabulary, and heads over classes,
where that saves a real share of the model; a table of positions is not.
"""

from __future__ import annotations

import copy
import itertools
import pickle
import textwrap
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from espalier.blocks import called, named_parameters_in, parameters_in
from espalier.comm import ledger
from espalier.comm.control import said_by_some
from espalier.comm.dry import know, values_of
from espalier.layout import Layout, Placement, Replicate, Shard, same_cuts
from espalier.mesh import Mesh
from espalier.parallel.tensor.sequence_parallel import SEQUENCE, cut_sequences
from espalier.parallel.tensor.tables import Table, by_table
from espalier.sharding.spec import Letter, Operand, Spec
from espalier.tensor.api import knows
from espalier.tensor.copies import NotCopiedError, apart, on_meta
from espalier.tensor.dry_runs import Recalled
from espalier.tensor.dtensor import DTensor, plain, redistribute, stamp
from espalier.tensor.fallback import _entrance, function_of
from espalier.tensor.live_memory import DryMemory
from espalier.tensor.modules import lay_out_parameter
from espalier.tensor.rules import RULES
from espalier.torch_private import raw, without_torch_functions
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


class Choices:
    """What was found of the layouts of one model, for its next runs, be it with fewer of its blocks.

    Args:
        model: with all of its blocks: what is a large share is one of this.

    Attributes:
        parameters: elements of its parameters.
        inferred: groups and calls, by ranks and the parameters' names.
        tried: what blocks cost and why they were not tried, by all that this hangs on.
    """

    def __init__(self, model: nn.Module) -> None:
        self.parameters = sum(p.numel() for p in parameters_in(model))
        self.inferred: dict[Any, tuple[list[Group], Calls]] = {}
        self.tried: dict[Any, tuple[dict[Any, Cost], str]] = {}


@dataclass(frozen=True)
class Sample:
    """Arguments to look at a model with.

    Attributes:
        row: of one row.
        whole: of the batch: where a model does not take one row (its states are [layers, rows, ...], a
            parameter has one for each row, the batch has no dim of rows), it is looked at with these.
    """

    row: Any
    whole: Any


choices: ContextVar[Choices | None] = ContextVar("espalier.choices", default=None)
"""Of the model that is laid out; None: it is of no interest to other runs."""


def infer(model: nn.Module, batch: Any, ranks: int, around: Around = nullcontext) -> list[Group]:
    """What a tensor axis of ``ranks`` may cut.

    Args:
        model: a plain module; a copy of it is run forward once on ``batch``, without gradients.
        batch: arguments of the model: a dict, tuple or tensor, or a sample of them.
        around: see :func:`run_once`.
    """
    shared = choices.get()
    recorder = _StreamRecorder(model, ranks, None if shared is None else shared.parameters)
    given = batch.row if isinstance(batch, Sample) else batch
    try:
        run_once(model, given, around, recorder.of)
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
        if isinstance(batch, Sample):
            return infer(model, batch.whole, ranks, around)
        _try_plain(model, batch)
        warnings.warn(
            f"The tensor-parallel layouts of {type(model).__name__} could not be inferred, so its parameters "
            f"stay whole on the tensor axis: running it once failed with {type(error).__name__}: {error}. "
            "Pass initialize(..., layouts={'*.up': 'column', '*.down': 'row'}).",
            InferenceWarning,
            stacklevel=3,
        )
        return []
    return recorder.result()


def _try_plain(model: nn.Module, batch: Any) -> None:
    """Run a copy as it is: an error then is the program's, whatever the plan.

    But of one that tells of what is missing, or of another kind: what a program has put in a forward's place
    may know the model alone, not a copy.
    """
    if any(x.is_meta for x in (*parameters_in(model), *model.buffers(), *tensors_in(batch))):
        return
    with suppress(AttributeError, NameError, TypeError):
        run_once(model, batch, lambda copy: torch.enable_grad())


def run_once(model: nn.Module, batch: Any, *around: Around) -> None:
    """Run a copy of a plain model forward, without gradients: the model and all else are left as they were.

    Args:
        around: each gives of the copy what is open meanwhile.

    Raises:
        NotCopiedError: it, or the batch, cannot be copied.
    """
    with apart(model, batch) as twin, torch.no_grad(), ExitStack() as stack:
        if any(p.is_meta for p in parameters_in(twin.module)):
            stack.enter_context(Recalled())
        for opened in around:
            stack.enter_context(opened(twin.module))
        stack.enter_context(_OfOneRow())
        called(twin.module, twin.extra)


class _OfOneRow(TorchFunctionMode):
    """Batch norm takes the one row of a sample, which it refuses to train on."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        call = _normed if func is nn.functional.batch_norm else func
        return call(*args, **(kwargs or {}))


def _normed(
    x: torch.Tensor,
    mean: torch.Tensor | None,
    var: torch.Tensor | None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    training: bool = False,
    *further: Any,
    **options: Any,
) -> torch.Tensor:
    if training:  # by numbers that it keeps, which is laid out alike
        mean = x.new_zeros(x.shape[1]) if mean is None else mean
        var = x.new_ones(x.shape[1]) if var is None else var
    return nn.functional.batch_norm(x, mean, var, weight, bias, False, *further, **options)


class _StreamRecorder(TorchFunctionMode):
    def __init__(self, model: nn.Module, ranks: int, parameters: int | None) -> None:
        super().__init__()
        self.mesh = Mesh.dry({"tensor": ranks})
        self.ranks = ranks
        self.names: dict[int, str] = {}
        self.sizes = {name: p.numel() for name, p in named_parameters_in(model)}
        self.parameters = sum(self.sizes.values()) if parameters is None else parameters
        self.shapes = {name: tuple(p.shape) for name, p in named_parameters_in(model)}
        self.parent: list[Stream] = []
        self.cuts: dict[Cut, Stream] = {}
        self.closed: set[Stream] = set()
        self.contracted: set[Stream] = set()  # those that are closed by another parameter
        self.leaked: set[Stream] = set()
        self.uneven: set[Stream] = set()
        self.tables: dict[Cut, int] = {}  # and the rows looked up for one row of the batch
        # tensors are kept alive so that an id never names two of them
        self.tags: dict[int, tuple[torch.Tensor, dict[int, Stream]]] = {}

    def of(self, copy: nn.Module) -> _StreamRecorder:
        """Itself, to watch a copy of the model."""
        self.names = {id(p): name for name, p in named_parameters_in(copy)}
        return self

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if (function := function_of(func)) is not None:
            knows(function)  # what the program has done before is to make no difference
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
                    tags = self.tags.setdefault(id(results[k]), (results[k], {}))[1]
                    tags[dims.index(letter)] = stream
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
        cut_names: set[str] = set()

        def cut(name: str, dim: int, group: Any) -> None:
            if name not in cut_names:
                cut_names.add(name)
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
        least = _LARGE_SHARE * self.parameters
        return [
            group
            for key, group in groups.items()
            if key in contracted or sum(self.sizes[name] for name in group) >= least
        ]


def _small(t: torch.Tensor, members: list[tuple[torch.Tensor, int]]) -> bool:
    """Whether a whole tensor can follow a cut stream for free: a vector, mask or table, no activation."""
    return t.ndim < max(m.ndim for m, _ in members)


# ---- blocks under candidate layouts: what each would send, and hold, on a mesh without processes
#
# A candidate says which groups of a block's parameters are cut, and whether what lies between blocks is
# whole or cut over the sequence. A copy of the block on the ``meta`` device goes forward and backward in
# these layouts; the ledger and the live memory of that run are its cost. Blocks that are alike are tried
# once.


# a trained parameter's bytes: itself, its gradient, two states
_COPIES = 4
_MOST = 4  # groups of which all subsets are tried


@dataclass(frozen=True)
class Cost:
    """What a block costs one rank in a step, in bytes.

    Attributes:
        forward, backward: sent along the tensor axis.
        kept: by the forward pass for the backward pass.
        held: parameters, their gradients and states.
    """

    forward: int
    backward: int
    kept: int
    held: int

    @property
    def total(self) -> int:
        """What is compared: a byte sent weighs as much as a byte of memory."""
        return self.forward + self.backward + self.kept + self.held


@dataclass
class BlockKind:
    """Blocks that are alike.

    Attributes:
        names: of the blocks.
        block: the first of them.
        groups: of its parameters, by their names in it.
        key: what is the same of them.
        costs: by the groups that are cut and whether the sequence is; none if it was not tried.
        untried: why not.
    """

    names: list[str]
    block: nn.Module
    groups: list[Group]
    key: Any
    costs: dict[tuple[tuple[int, ...], bool], Cost] = field(default_factory=dict)
    untried: str = "it was not called"

    def best(self, sequence: bool) -> tuple[int, ...]:
        """The groups to cut."""
        if not self.costs:
            return tuple(i for i, group in enumerate(self.groups) if not group.uneven)
        tried = [cut for cut, s in self.costs if s == sequence]
        # of equals the one that cuts most
        return min(tried, key=lambda cut: (self.costs[cut, sequence].total, -len(cut)))


class Calls:
    """The first call of each block: its arguments, as shapes."""

    def __init__(self) -> None:
        self.of: dict[str, tuple[Any, Any]] = {}

    @contextmanager
    def watching(self, blocks: Mapping[str, nn.Module]) -> Iterator[None]:
        """While open, note calls; those of an earlier run are forgotten."""
        of = self.of = {}

        def note(name: str, block: nn.Module, args: Any, kwargs: Any) -> None:
            with without_torch_functions(), suppress(Exception):
                # what a block may write to (a cache of keys and values) is noted as it is before
                of.setdefault(name, copy.deepcopy(tree_map(_shape_of, (args, kwargs))))

        with ExitStack() as hooks:
            for name, block in blocks.items():
                hooks.enter_context(block.register_forward_pre_hook(partial(note, name), with_kwargs=True))
            yield


def _shape_of(x: Any) -> Any:
    if not isinstance(x, torch.Tensor):
        return x
    shape = torch.empty_like(x, device="meta")
    values = None if x.is_floating_point() else values_of(x)
    return shape if values is None else know(shape, values)


def kinds_of(blocks: Mapping[str, nn.Module], groups: Sequence[Group]) -> list[BlockKind]:
    """Blocks that are alike in type, parameters and groups."""
    kinds: dict[Any, BlockKind] = {}
    for name, block in blocks.items():
        prefix = f"{name}."
        block_groups = [
            group.within(prefix) for group in groups if group and all(p.startswith(prefix) for p in group)
        ]
        shapes = tuple(
            (key, tuple(p.shape), p.dtype, p.requires_grad) for key, p in named_parameters_in(block)
        )
        key = type(block), shapes, tuple(tuple(sorted(group.items())) for group in block_groups)
        kinds.setdefault(key, BlockKind([], block, block_groups, key)).names.append(name)
    return list(kinds.values())


@dataclass
class _Trials:
    """All ways to lay out blocks of a kind, for a mesh of the tensor axis alone.

    Args:
        kind: of blocks.
        call: a block's arguments, for one row.
        mesh: a dry one.
        rows: of the batch that a rank computes.
        boundaries: whether the sequence is cut: what is tried.
        free: whether a group may be left whole.
    """

    kind: BlockKind
    call: tuple[Any, Any]
    mesh: Mesh
    rows: int
    boundaries: tuple[bool, ...]
    free: bool

    @property
    def key(self) -> Any:
        """All that the costs hang on."""
        return self.kind.key, self.mesh.shape, self.rows, self.boundaries, self.free

    @property
    def ways(self) -> list[tuple[tuple[int, ...], bool]]:
        """The groups that are cut, and whether the sequence is."""
        n = len(self.kind.groups)
        sizes = (n,) if not self.free else range(n + 1) if n <= _MOST else (0, n - 1, n)
        cuts = itertools.chain.from_iterable(itertools.combinations(range(n), k) for k in sizes)
        return list(itertools.product(cuts, self.boundaries))

    def run(self, numbers: Iterable[int], recalled: Recalled) -> _Part:
        """The costs of some of the ways, up to the first that cannot be run without data, and why not."""
        costs: dict[int, Cost] = {}
        ways = self.ways
        for number in numbers:
            cut, sequence = ways[number]
            dims = {name: dim for i in cut for name, dim in self.kind.groups[i].items()}
            try:
                with apart(self.kind.block, self.call, stand=on_meta) as twin:
                    args, kwargs = _inputs(twin.extra, self.mesh, self.rows, sequence)
                    costs[number] = _tried(twin.module, args, kwargs, dims, self.mesh, sequence, recalled)
            except Exception as error:
                return costs, (number, textwrap.shorten(f"{type(error).__name__}: {error}", 100))
        return costs, None

    def note(self, parts: Sequence[_Part]) -> None:
        """Take over what has been found of all ways: nothing, if one of them cannot be run."""
        failures = [failure for _, failure in parts if failure is not None]
        if failures:
            self.kind.untried = min(failures)[1]
            return
        ways = self.ways
        costs = {number: cost for costs, _ in parts for number, cost in costs.items()}
        self.kind.costs.update((ways[number], costs[number]) for number in sorted(costs))


# of some of a kind's ways: their costs by number; the first that cannot be run, and why
_Part = tuple[dict[int, Cost], tuple[int, str] | None]
_HELPERS = 16  # ranks that share trials


def _try_out(trials: Sequence[_Trials], among: Mesh | None) -> None:
    """Note the costs of kinds in all ways; none of one whose block cannot run without data.

    Args:
        among: whose ranks each try a part, all at this place of the program; None: this one tries all.
    """
    shared, recalled = choices.get(), Recalled()
    n = 1 if among is None else min(among.size(), _HELPERS)

    def part(place: int) -> list[_Part]:
        parts, before = [], 0
        for trial in trials:
            count = len(trial.ways)
            parts.append(trial.run(range((place - before) % n, count, n), recalled))
            before += count
        return parts

    if shared is not None:
        for trial in trials:
            if trial.key in shared.tried:
                costs, trial.kind.untried = shared.tried[trial.key]
                trial.kind.costs.update(costs)
        trials = [trial for trial in trials if trial.key not in shared.tried]
    if among is None:
        all_parts = [part(0)]
    else:
        # what a rank found of other blocks than these (its model is another) is of no use here
        what = [(t.kind.names, str(t.key)) for t in trials]
        own = part(among.rank) if among.rank < n else []
        said = said_by_some(among, n, pickle.dumps((what, own)), "trials of layouts")
        heard = [pickle.loads(message) for message in said]
        all_parts = [parts if other == what else part(place) for place, (other, parts) in enumerate(heard)]
    for i, trial in enumerate(trials):
        trial.note([parts[i] for parts in all_parts])
        if shared is not None:
            shared.tried[trial.key] = dict(trial.kind.costs), trial.kind.untried


def _tried(
    twin: nn.Module,
    args: Any,
    kwargs: Any,
    dims: Mapping[str, int],
    mesh: Mesh,
    sequence: bool,
    recalled: Recalled,
) -> Cost:
    layouts = {}
    for name, p in named_parameters_in(twin):
        placement: Placement = Shard(dims[name]) if name in dims else Replicate()
        layouts[name] = Layout(mesh, [placement], tuple(p.shape))
        lay_out_parameter(p, layouts[name])
    if sequence:
        cut_sequences(twin, layouts, 0, ())
    memory, kept_bytes = DryMemory(), 0
    for p in parameters_in(twin):
        memory.hold(p)
        with raw():
            kept_bytes += p.nbytes * (_COPIES if p.requires_grad else 1)
    with warnings.catch_warnings(), torch.enable_grad(), recalled, memory:
        warnings.simplefilter("ignore")
        before = memory.now
        with ledger(mesh) as forward:
            out = next(x for x in tensors_in(twin(*args, **kwargs)) if type(x) is DTensor)
            # what the next block gets
            out = redistribute(out, _between(mesh, out.shape, sequence))
        kept = memory.now - before
        with ledger(mesh) as backward:
            with raw():
                end = plain(out)
                ones = torch.ones_like(end)
            torch.autograd.backward(end, ones)
    sent, returned = (sum(entry.bytes for entry in book.entries) for book in (forward, backward))
    return Cost(sent, returned, kept, kept_bytes)


def _inputs(call: tuple[Any, Any], mesh: Mesh, rows: int, sequence: bool) -> tuple[Any, Any]:
    """A block's arguments as a batch of so many rows has them: the first activation in its layout."""
    args, kwargs = call
    first = next(x for x in tensors_in((args, kwargs)) if x.is_floating_point())
    features = first.shape[-1]

    def sharded(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        if not (x.is_floating_point() and x.ndim == first.ndim and x.shape[-1] == features):
            return x  # the same for every row, or so taken
        layout = _between(mesh, (rows, *x.shape[1:]), sequence and x is first)
        return stamp(x.new_empty(layout.local_shape), layout).requires_grad_()

    inputs: tuple[Any, Any] = tree_map(sharded, (args, kwargs))
    return inputs


def _between(mesh: Mesh, shape: Sequence[int], sequence: bool) -> Layout:
    layout = Layout.replicated(mesh, tuple(shape))
    return layout.with_axis(0, SEQUENCE) if sequence and len(shape) == 3 else layout


# ---- which parameters the tensor axis cuts, and what lies between blocks: a table, or what trials show


_TABLE = "the table"


@dataclass(frozen=True)
class Chosen:
    """Layouts on the tensor axis.

    Attributes:
        cut: for each parameter that is cut, by name, the dim.
        sequence: whether activations between blocks are cut over the sequence.
        rest: the reason for parameters of which ``why`` says nothing.
        why: for parameters by name, and for ``""`` (the sequence), the reason.
    """

    cut: dict[str, int]
    sequence: bool
    rest: str = ""
    why: dict[str, str] = field(default_factory=dict)


def choose(
    model: nn.Module,
    ranks: int,
    blocks: Mapping[str, nn.Module],
    *,
    table: Table | None = None,
    batch: Any = None,
    rows: int = 1,
    sequence: bool | Literal["auto"] = False,
    among: Mesh | None = None,
) -> Chosen | None:
    """The layouts of a model on a tensor axis.

    A table decides on the parameters. Without one they are tried: each kind of block in all ways to cut the
    groups of parameters that the rules allow to cut (see :mod:`~espalier.parallel.tensor.infer`). With
    ``sequence="auto"`` both boundaries are tried, and the cheaper one is taken for all blocks.

    Args:
        ranks: of the tensor axis.
        blocks: by name.
        batch: the model's arguments, of one row, or a sample of them.
        rows: that a rank computes at a time.
        among: whose ranks all choose here: each tries a part, and tells the others of it.

    Returns:
        None if a batch is needed and missing.
    """
    if ranks == 1:
        return Chosen({}, False, "no tensor axis")
    described = None if table is None else by_table(model, table)
    if described is not None and sequence != "auto":
        return Chosen(described, sequence, _TABLE)
    if batch is None:
        return None
    groups, calls = _groups(model, ranks, blocks, described, batch)
    boundaries: tuple[bool, ...] = (False, True) if sequence == "auto" else (sequence,)
    kinds, mesh = kinds_of(blocks, groups), Mesh.dry({"tensor": ranks})
    trials = [
        _Trials(kind, calls.of[kind.names[0]], mesh, rows, boundaries, described is None)
        for kind in kinds
        if kind.names[0] in calls.of and (kind.groups or len(boundaries) > 1)
    ]
    if trials:
        _try_out(trials, among)
    tried = [kind for kind in kinds if kind.costs]
    totals = {s: sum(len(k.names) * k.costs[k.best(s), s].total for k in tried) for s in boundaries}
    cuts = min(totals, key=lambda s: (totals[s], s))
    chosen = Chosen(
        described or {}, cuts, "a cut of it would be undone at once" if described is None else _TABLE
    )
    chosen.why[""] = _of_boundary(totals, bool(tried))
    if described is None:
        _take(chosen, groups, kinds)
    return chosen


def _groups(
    model: nn.Module,
    ranks: int,
    blocks: Mapping[str, nn.Module],
    described: Mapping[str, int] | None,
    batch: Any,
) -> tuple[list[Group], Calls]:
    """What may be cut together, and each block's first call."""
    shared, calls = choices.get(), Calls()
    known = ranks, described is None, tuple(name for name, _ in named_parameters_in(model))
    if shared is not None and known in shared.inferred:
        return shared.inferred[known]

    def watching(copy: nn.Module) -> AbstractContextManager[None]:
        return calls.watching({name: copy.get_submodule(name) for name in blocks})

    if described is None:
        groups = infer(model, batch, ranks, watching)
    else:
        groups = [Group({p: d for p, d in described.items() if p.startswith(f"{name}.")}) for name in blocks]
        with suppress(Exception):  # then nothing is tried
            run_once(model, batch.row if isinstance(batch, Sample) else batch, watching)
    if shared is not None:
        shared.inferred[known] = groups, calls
    return groups, calls


def _take(chosen: Chosen, groups: Sequence[Group], kinds: list[BlockKind]) -> None:
    """Cut the groups whose trial says so; of those that were not tried the even ones."""
    for group in groups:
        if not group.uneven:
            chosen.cut.update(group)
        chosen.why.update(dict.fromkeys(group, f"{_untried(group)} (it is in no block to be tried)"))
    for kind in kinds:
        best = kind.best(chosen.sequence)
        for i, group in enumerate(kind.groups):
            why = f"{_untried(group)} (its block was not tried: {kind.untried})"
            if kind.costs:
                why = _of_group(kind, i, best, chosen.sequence)
            for block in kind.names:
                for p, dim in group.items():
                    name = f"{block}.{p}"
                    chosen.why[name] = why
                    chosen.cut.pop(name, None)
                    if i in best:
                        chosen.cut[name] = dim


def _untried(group: Group) -> str:
    return "cutting it would move data inside" if group.uneven else "cut, for it can be"


def _of_group(kind: BlockKind, i: int, best: tuple[int, ...], sequence: bool) -> str:
    other = tuple(sorted({*best} ^ {i}))
    if (other, sequence) not in kind.costs:
        return "the cheapest of what was tried"
    cut, whole = (best, other) if i in best else (other, best)
    a, b = kind.costs[cut, sequence], kind.costs[whole, sequence]
    sent = a.forward + a.backward - b.forward - b.backward
    than = f"{abs(sent):,} B {'less' if sent < 0 else 'more'}"
    return f"cut, it sends {than} and frees {b.kept + b.held - a.kept - a.held:,} B"


def _of_boundary(totals: Mapping[bool, int], tried: bool) -> str:
    if len(totals) == 1:
        return "the plan"
    if not tried:
        return "no block could be tried"
    return f"bytes sent and held by all blocks: {totals[True]:,} cut, {totals[False]:,} whole"
