"""What is written down of a forward pass, of which the programs of stages are made."""

from __future__ import annotations

import pickle
import sys
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from espalier.blocks import named_parameters_in
from espalier.layout import Layout
from espalier.meanwhile import having
from espalier.parallel.pipeline.observed import Observed
from espalier.tensor import DTensor, full_tensor, recorder, stamp
from espalier.tensor.before import is_of_torch
from espalier.tensor.copies import Apart, apart
from espalier.tensor.dry_runs import OpCost
from espalier.tensor.dtensor import full_value, is_sparse, layout_of
from espalier.tensor.names import ABSENT, MOST_HELD, made_in, shown_by
from espalier.tensor.rules.across_ranks import AllHaveIt, meets_ranks
from espalier.tensor.traces import generator_state, is_array, may_change
from espalier.torch_private import (
    HOOK_OPTIONS,
    HOOKS,
    STATE_HOOKS,
    TABLES,
    DispatchMode,
    FakeTensor,
    FakeTensorMode,
    all_given,
    forward_hooks,
    memory_id,
    own_buffers,
    own_parameters,
    raw,
    sparse_values,
    version_of,
)
from espalier.trees import leaves as leaves_of
from espalier.trees import tree_map

_OF_MODEL = ("parameter", "buffer")


class SplitError(ValueError):
    """A model cannot be split so; the message says what stands in the way, and where."""


class ValuesError(SplitError):
    """The forward of a module that was to be divided depends on values that its stages compute.

    Attributes:
        module: its name; empty for the model.
    """

    def __init__(self, module: str, message: str) -> None:
        super().__init__(message)
        self.module = module

    def __reduce__(self) -> Any:
        return type(self), (self.module, *self.args)


def storage_of(x: torch.Tensor) -> int:
    """A number that views of one tensor share, while it lives."""
    if is_sparse(x):
        x = sparse_values(x.detach().to_sparse_coo())
    return memory_id(x)


class Value(NamedTuple):
    """A tensor of a trace.

    Attributes:
        number: its place in ``Trace.values``.
        tensor: what stood for it in the trace.
        source: where it comes from: ``("batch", i)``, ``("parameter", name)``, ``("buffer", name)``,
            ``("constant", None)``, or ``("op", i)``.
        local: whether it depends on the batch, on buffers and on constants alone.
        grad: whether the loss has a gradient with respect to it.
    """

    number: int
    tensor: torch.Tensor
    source: tuple[str, Any]
    local: bool
    grad: bool

    @property
    def storage(self) -> int:
        """A number that views of one tensor share."""
        return storage_of(self.tensor)


class TorchState(NamedTuple):
    """What torch was told beside the arguments: whether gradients are recorded, and autocast."""

    grad: bool
    cast: tuple[bool, torch.dtype]

    @classmethod
    def now(cls, kind: str) -> TorchState:
        """As it is, on a type of device."""
        return cls(torch.is_grad_enabled(), (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)))

    def cast_again(self, kind: str) -> AbstractContextManager[Any]:
        """While open, autocast is as it was."""
        enabled, dtype = self.cast
        return torch.autocast(kind, dtype, enabled)


@dataclass
class Op:
    """A torch call, or the call of a module that could not be looked into.

    Attributes:
        func: what was called; a module's name for a module.
        args, kwargs, out: trees with a :class:`Ref` for each tensor.
        reads: the values it was given.
        makes: the values that are new.
        writes: storages that it wrote to.
        local: whether all that it makes is local.
        read: what it read out of a tensor: Python's control flow may hang on it.
        state: see :class:`TorchState`.
        work: what it costs.
        call: the innermost module call around it.
    """

    func: Callable[..., Any] | str
    args: Any
    kwargs: Any
    out: Any
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    writes: frozenset[int]
    local: bool
    read: bool
    state: TorchState
    work: OpCost
    call: int


@dataclass
class ModuleCall:
    """A call of a module: the ops from ``start`` to ``end`` happened in it.

    Attributes:
        number: its place in ``Trace.calls``.
        name: the module's.
        parent: number of the call around it; -1 for the model's own.
        state: when it was called.
        args, kwargs, out: trees with a :class:`Ref` for each tensor.
    """

    number: int
    name: str
    parent: int
    start: int
    state: TorchState
    args: Any
    kwargs: Any
    end: int = -1
    out: Any = None


class Again(NamedTuple):
    """What ``torch.utils.checkpoint`` was called on: it is computed again in the backward pass.

    Attributes:
        start, end: the ops from ``start`` to before ``end`` happened in it.
        calls: the number of the first module call in it, if there is one.
        contexts: its ``context_fn``, if it has one.
    """

    start: int
    end: int
    calls: int
    contexts: Callable[[], Any] | None

    def has(self, unit: CallSpan) -> bool:
        """Whether something is done in it."""
        within = self.start <= unit.start and unit.end <= self.end
        return within and (unit.call is None or unit.call.number >= self.calls)  # else it is around this


@dataclass
class Trace:
    """What :func:`trace` found.

    Attributes:
        values, ops, calls: in the order of the program.
        out: the model's output.
        inputs: numbers of the values of the batch's tensors, in the order of ``leaves(batch)``.
        sources: number of the value of each parameter and buffer that is used, by ``(kind, name)``.
        state: around the model.
        device: on which it was traced.
        changed: what each module's forward did that is not in the ops.
        remembers: whether any set attributes or buffers, be it the first time alone.
        sets: the attributes that they set, by module's name and their own.
        tensors: those of them that hold tensors.
        first: what a first forward alone sets, and where, if its values are known: of the batch, say.
        sharing: of modules that set what others hold, too (a dict, say), the names of these.
        dice: names of the modules that draw random numbers which are not torch's.
        drawing: by ids of generators that torch's calls are given, the operations that draw from them.
        containers: names of modules that hold the outermost lists of blocks, and of the model.
        bound: storages that were written to and hold what is not local, and whether it has gradients.
        constants: by their numbers, the model's own tensors that are none of the others.
        answers: what was asked of tensors (``bool(x)``, ``x[:, i]``), in order, each with the number of the
            innermost call around it, and that of the operation that asked, if it is one.
        meets: names of modules that were called whole, and call collectives, or wait at barriers; and
            autograd functions (their ``apply``) that do.
        may_write: names of modules that were called whole on some values, and may write to what they hold on
            others: their code says ``.data``. What is written otherwise torch counts.
        again: what is computed again in the backward pass, as the model says, the inner ones first.
    """

    device: torch.device
    state: TorchState
    values: list[Value] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    calls: list[ModuleCall] = field(default_factory=list)
    out: Any = None
    inputs: list[int] = field(default_factory=list)
    sources: dict[tuple[str, str], int] = field(default_factory=dict)
    changed: dict[str, list[str]] = field(default_factory=dict)
    remembers: bool = False
    sets: set[tuple[str, str]] = field(default_factory=set)
    tensors: set[tuple[str, str]] = field(default_factory=set)
    first: dict[Any, Any] = field(default_factory=dict)
    sharing: dict[str, set[str]] = field(default_factory=dict)
    dice: set[str] = field(default_factory=set)
    drawing: dict[int, list[int]] = field(default_factory=dict)
    containers: frozenset[str] = frozenset()
    bound: dict[int, bool] = field(default_factory=dict)
    constants: dict[int, torch.Tensor] = field(default_factory=dict)
    answers: list[tuple[int, int, Answer]] = field(default_factory=list)
    meets: set[Any] = field(default_factory=set)
    may_write: set[str] = field(default_factory=set)
    again: list[Again] = field(default_factory=list)

    @property
    def written(self) -> set[str]:
        """The names of parameters and buffers that are written to."""
        written = {s for op in self.ops for s in op.writes}
        return {v.source[1] for v in self.values if v.source[0] in _OF_MODEL and v.storage in written}

    def writes_to(self, names: Iterable[str]) -> set[str]:
        """Of parameters and buffers those that are written to, or may be."""
        written, within = self.written, tuple(f"{name}." if name else "" for name in self.may_write)
        return {name for name in names if name in written or name.startswith(within)}

    def answered(self, start: int, call: ModuleCall | None) -> tuple[Answer, ...]:
        """What was asked within a call, or by an operation; nothing where torch read nothing."""
        if call is None:
            answers = [answer for _, op, answer in self.answers if op == start]
        else:
            within = {call.number}
            for inner in self.calls[call.number + 1 :] if self.answers else ():
                if inner.parent not in within:
                    break
                within.add(inner.number)
            answers = [answer for number, _, answer in self.answers if number in within]
        return tuple(answers) if any(a != Answer(None, {}) for a in answers) else ()

    def meets_ranks(self, start: int, end: int) -> bool:
        """Whether some of the operations from ``start`` to before ``end`` call collectives."""
        return any(op.func in self.meets or meets_ranks(op.func) for op in self.ops[start:end])

    def chain(self, op: int) -> list[ModuleCall]:
        """The module calls around an operation, outermost first."""
        calls_around = []
        number = self.ops[op].call
        while number >= 0:
            calls_around.append(self.calls[number])
            number = self.calls[number].parent
        return calls_around[::-1]

    def made(self, call: ModuleCall, module: nn.Module, out: Any, ref: Callable[[Any], Any]) -> Any:
        """What a module gives in a call that ends now; if it is what it was given, as it is, a view of that.

        Else no stage would have something to do in the call, and make it: the next time it may do something.
        """
        is_own = isinstance(out, torch.Tensor) and call.name and not is_of_torch(module)
        if not is_own or any(not op.local for op in self.ops[call.start :]):
            return out
        given = {x.number for x in leaves((call.args, call.kwargs), Ref)}
        return out.view_as(out) if ref(out).number in given else out

    def where(self, op: int) -> str:
        """In words, the module in whose forward an operation is called."""
        chain = self.chain(op)
        return f"the forward of {chain[-1].name or 'the model'!r}" if chain else "the forward of the model"


# ---- what a forward pass asks of tensors (``bool(x)``, ``x[:, i]``), for runs on tensors without data
#
# A module that lies within one stage may decide by values. Where the model is traced, it runs by itself on
# some values, and what it asks is noted; where a stage runs without data, to agree on shapes, it gets the
# same answers, and so goes the same way; and what a tensor's values give a size (``x[mask]``, ``nonzero``)
# has the same one. What it computes is not touched by them: there it asks what it has.


_NAMES = """
    __bool__ __int__ __float__ __index__ __complex__ __contains__ item tolist equal allclose is_nonzero
    """.split()
ASKING = frozenset(
    getattr(owner, name) for name in _NAMES for owner in (torch, torch.Tensor) if hasattr(owner, name)
)
_SIZED = """
    nonzero argwhere masked_select unique unique_consecutive bincount where __getitem__
    """.split()
SIZED = frozenset(
    getattr(owner, name) for name in _SIZED for owner in (torch, torch.Tensor) if hasattr(owner, name)
)
# answers that shapes and dtypes give
METADATA = recorder.METADATA | {"broadcast_shapes", "broadcast_tensors_shapes"}
_QUIET = METADATA | {"__get__", "__set__", full_value.__name__}


class Answer(NamedTuple):
    """What one call was told, of those that may ask.

    Attributes:
        out: what a function that does nothing else gave; None of another one.
        read: of another one, the numbers that torch read out of its tensors of no dimension, by their
            places among these.
        sized: of one whose sizes are told by values, what it gave, with a :class:`_Sized` for each tensor.
    """

    out: Any
    read: dict[int, Any]
    sized: Any = None


class _Sized(NamedTuple):
    """A tensor of a size that values told."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class _Read(DispatchMode):
    """Notes which tensors torch reads, and what."""

    def __init__(self) -> None:
        super().__init__()
        self.scalars: list[tuple[torch.Tensor, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._local_scalar_dense.default:
            self.scalars.append((args[0], out))
        return out


def _scalars(args: Any, kwargs: Any) -> list[torch.Tensor]:
    with raw():
        return [x for x in leaves((args, kwargs), torch.Tensor) if not x.ndim]


def _is_sized(func: Callable[..., Any], args: Any, kwargs: Any) -> bool:
    """Whether the sizes of what a function gives are told by values."""
    if func not in SIZED:
        return False
    name = func.__name__
    if name == "where":
        return len(args) + len(kwargs) == 1
    if name != "__getitem__":
        return True
    with raw():
        return any(x.dtype in (torch.bool, torch.uint8) and x.ndim for x in leaves(args[1], torch.Tensor))


def _sized(x: Any) -> Any:
    return _Sized(tuple(x.shape), x.dtype) if isinstance(x, torch.Tensor) else x


def _made(answer: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """What hangs on the tensors given, without data, of the sizes that were told."""
    like = next((x for x in tensors if type(x) is DTensor), None)
    graded = [x for x in tensors if x.requires_grad]

    def built(x: Any) -> Any:
        if type(x) is not _Sized:
            return x
        out: torch.Tensor = torch.empty(x.shape, dtype=x.dtype, device="meta")
        if like is not None:
            out = stamp(out, Layout.replicated(layout_of(like).mesh, x.shape))
        for one in graded if x.dtype.is_floating_point else ():
            out = out + 0 * one.sum().to(x.dtype)
        return out

    return tuple(map(built, answer)) if type(answer) is tuple else built(answer)


def heard(func: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, Answer | None]:
    """What a function gives, and what it was told; None if it is none that may ask."""
    if func in ASKING:
        out = func(*args, **kwargs)
        return out, Answer(out, {})
    if _is_sized(func, args, kwargs):
        out = func(*args, **kwargs)
        return out, Answer(None, {}, tuple(map(_sized, out)) if isinstance(out, tuple) else _sized(out))
    if getattr(func, "__name__", "") in _QUIET or not (scalars := _scalars(args, kwargs)):
        return func(*args, **kwargs), None
    with _Read() as read:
        out = func(*args, **kwargs)
    places = {id(x): i for i, x in enumerate(scalars)}
    return out, Answer(None, {places[id(x)]: said for x, said in read.scalars if id(x) in places})


class AnswerRecorder(TorchFunctionMode):
    """Notes the answers.

    Attributes:
        answers: in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.answers: list[Answer] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out, answer = heard(func, args, all_given(func, kwargs))
        if answer is not None:
            self.answers.append(answer)
        return out


class _Answers(TorchFunctionMode):
    """Gives them again to what asks a tensor without data."""

    def __init__(self, answers: Iterable[Answer]) -> None:
        super().__init__()
        self._left = deque(answers)

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        asks, sized = func in ASKING, _is_sized(func, args, kwargs)
        quiet = (
            not asks and not sized and (getattr(func, "__name__", "") in _QUIET or not _scalars(args, kwargs))
        )
        if quiet or not self._left:
            return func(*args, **kwargs)
        answer = self._left.popleft()
        if asks or sized:
            tensors = leaves((args, kwargs), torch.Tensor)
            if not any(x.is_meta for x in tensors):
                return func(*args, **kwargs)
            return _made(answer.sized, tensors) if sized else answer.out
        if answer.read:
            places = iter(range(len(_scalars(args, kwargs))))

            def answer_for(x: Any) -> Any:
                if not isinstance(x, torch.Tensor) or x.ndim:
                    return x
                return answer.read.get(next(places), x)

            args, kwargs = mapped(answer_for, (args, kwargs))
        return func(*args, **kwargs)


def answered(func: Callable[..., Any], answers: Iterable[Answer], *args: Any, **kwargs: Any) -> Any:
    """Call a function whose questions to tensors without data have these answers."""
    with _Answers(answers):
        return func(*args, **kwargs)


def all_having_it(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function whose collectives give what all ranks would get that had what this one has."""
    with AllHaveIt():
        return func(*args, **kwargs)


# ---- programs of stages: calls in order, on values by number


Env = dict[int, torch.Tensor]


class CallSpan(NamedTuple):
    """What is done in one go: a module that is called whole, or a torch call (``call`` is None)."""

    start: int
    end: int
    call: ModuleCall | None


def _devices_by_name(func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The arguments of a call, with a device where there is the name of one."""
    if func is torch.Tensor.to and len(args) > 1 and isinstance(args[1], str):
        args = (args[0], torch.device(args[1]), *args[2:])
    if isinstance(kwargs.get("device"), str):
        kwargs = {**kwargs, "device": torch.device(kwargs["device"])}
    return args, kwargs


class ProgramStep:
    """One call of a program.

    Args:
        func: a torch function, or a module's name.
        name: for messages.
        args, kwargs, out: trees with a :class:`Ref` for each tensor, and a :class:`Part` for each module that
            is given to another.
        state: what torch is told meanwhile, if it is not what it is told around the program.
        reads: whether Python's control flow read what it gives.

    Attributes:
        inputs, outputs: the values that it is given and gives.
        free: values that nothing needs after it.
        answers: what was asked of tensors within it when it was traced: where they have no data, it gets the
            same.
        meets: whether it calls collectives, to which ranks of other stages do not come.
        again: in what it is computed again, if it is.
        is_local: whether each stage that needs what it gives makes it of the batch for itself.
    """

    __slots__ = (
        "_args", "_flat", "_kwargs", "_out", "_state", "again", "answers", "free", "func", "inputs",
        "is_local", "meets", "name", "outputs", "reads",
    )  # fmt: skip

    def __init__(
        self,
        func: Any,
        name: str,
        args: Any,
        kwargs: Any,
        out: Any,
        state: TorchState | None,
        reads: bool = False,
    ) -> None:
        self.func, self.name, self.reads = func, name, reads
        args, kwargs = _devices_by_name(func, args, kwargs)
        self._args, self._kwargs, self._out, self._state = args, kwargs, out, state
        inner = [x for x in (*args, *kwargs.values()) if type(x) is not Ref]
        self._flat = not any(leaves(x, (Ref, Part, torch.device)) for x in inner)
        self.inputs = tuple(ref.number for ref in leaves((args, kwargs), Ref))
        self.outputs = tuple(ref.number for ref in leaves(out, Ref))
        self.free: tuple[int, ...] = ()
        self.answers: tuple[Answer, ...] = ()
        self.meets = self.is_local = False
        self.again: Again | None = None

    def generators(self) -> list[torch.Generator]:
        """Those that it is given."""
        return leaves((self._args, self._kwargs), torch.Generator)

    def by(self, func: Callable[..., Any]) -> ProgramStep:
        """The step that calls something else in place of what this one does."""
        step = ProgramStep(func, self.name, self._args, self._kwargs, self._out, self._state, self.reads)
        step.free, step.answers, step.meets, step.again = self.free, self.answers, self.meets, self.again
        step.is_local = self.is_local
        return step

    def run(self, env: Env, modules: Mapping[str, nn.Module], was: torch.device, here: torch.device) -> Any:
        """Call it on what is in ``env``, and put there what it gives.

        Args:
            was, here: the device of the trace, in whose place is the one of now; so it is in that of others
                of its kind, over which a program may have laid its layers by hand.
        """
        func: Any = modules[self.func] if type(self.func) is str else self.func
        if self.answers and here.type == "meta":
            func = partial(answered, func, self.answers)
        if self.meets:
            func = partial(all_having_it, func)
        if self._flat:
            args = [env[a.number] if type(a) is Ref else a for a in self._args]
            kwargs = {k: env[a.number] if type(a) is Ref else a for k, a in self._kwargs.items()}
        else:

            def filled(x: Any) -> Any:
                if type(x) is Ref:
                    return env[x.number]
                if type(x) is Part:
                    return modules[x.name]
                return here if type(x) is torch.device and x.type == was.type else x

            args, kwargs = mapped(filled, (self._args, self._kwargs))
        if self._state is None:
            out = func(*args, **kwargs)
        else:
            with torch.set_grad_enabled(self._state.grad), self._state.cast_again(was.type):
                out = func(*args, **kwargs)
        self._keep(out, env)
        return out

    def _keep(self, out: Any, env: Env) -> None:
        if type(self._out) is Ref:
            env[self._out.number] = out
        else:
            tensors, wanted = leaves(out, torch.Tensor), leaves(self._out, Ref)
            if len(tensors) != len(wanted):
                raise SplitError(
                    f"{self.name!r} gave {len(tensors)} tensors, and {len(wanted)} when it was traced. A "
                    "stage is called as it was traced: let the number not depend on what its forward "
                    "remembers."
                )
            env.update((ref.number, x) for ref, x in zip(wanted, tensors, strict=True))
        for n in self.free:
            env.pop(n, None)


class ValueSource(NamedTuple):
    """Where a value comes from that no step makes.

    Attributes:
        number: the value's.
        kind: ``"parameter"``, ``"buffer"``, ``"batch"`` or ``"constant"``.
        place: its name, its number among the batch's tensors, or itself.
        clone: whether a step writes to it, which is not to be seen outside.
    """

    number: int
    kind: str
    place: Any
    clone: bool


class ProgramBody(NamedTuple):
    """Steps in order, and what they start from; ``device``: that of the trace."""

    sources: Sequence[ValueSource]
    steps: Sequence[ProgramStep]
    device: torch.device

    def begin(self, model: nn.Module, batch: Sequence[torch.Tensor]) -> Env:
        """The values at the beginning."""
        env: Env = {}
        for number, kind, place, clone in self.sources:
            if kind == "batch":
                x = batch[place]
            elif kind == "constant":
                x = place
            else:
                owner, _, key = place.rpartition(".")
                module = model.get_submodule(owner)
                x = (own_parameters(module) if kind == "parameter" else own_buffers(module))[key]
            env[number] = x.clone() if clone else x
        return env


# ---- what stands for a model's parameters while it is traced, and that the model is left as it was


DICTS = (dict, OrderedDict, defaultdict, Counter)  # what modules may remember things in


class ModelStandIns:
    """A model as its author made it: made before anything is laid out, hooked in or replaced.

    Args:
        model: the model.
        device: on which stand-ins claim to be.
        dtype: of parameters' stand-ins, if these are floats; None: their own.
    """

    def __init__(self, model: nn.Module, device: torch.device, dtype: torch.dtype | None = None) -> None:
        self.model, self.device, self._dtype = model, device, dtype
        self._forwards = {id(m): vars(m)["forward"] for m in model.modules() if "forward" in vars(m)}

    def hooked(self, module: nn.Module) -> bool:
        """Whether a module has hooks, but for this library's and transformers' own."""
        hooks = [hook for of in hooks_of(module) for hook in of.values()]
        if module is self.model:  # whose arguments and output are known to all who look
            hooks = [hook for hook in hooks if not isinstance(hook, Observed)]
        return any(not made_in(hook, "espalier", "transformers") for hook in hooks)

    @contextmanager
    def apart(self, fake: FakeTensorMode, extra: Any = None) -> Iterator[Apart]:
        """A copy of the model as its author made it, to be run while this is open, and of ``extra``.

        Its parameters are fakes.

        Raises:
            SplitError: it has other parameters.
        """
        with apart(self.model, extra, partial(self._stand, fake), self._as_made) as twin:
            names, others = ([n for n, _ in named_parameters_in(m)] for m in (self.model, twin.module))
            if names != others:
                raise SplitError(
                    f"{type(self.model).__name__} cannot be split: a copy of it (copy.deepcopy) is made "
                    "anew, with parameters of other names. A model is split by what a copy of it does."
                )
            with uncached(caching(twin.module.modules()), extra):
                yield twin

    @staticmethod
    def snapshot(model: nn.Module) -> dict[str, dict[str, Any]]:
        """The Python attributes of all modules, and what their buffers are, for :meth:`changes`."""
        marks = Marks()
        return {name: _remembered(m, marks) for name, m in model.named_modules()}

    @staticmethod
    def changes(model: nn.Module, before: Mapping[str, Mapping[str, Any]]) -> dict[str, list[str]]:
        """The names of attributes and buffers that are others now, by module.

        Raises:
            SplitError: a module was made meanwhile.
        """
        changed, marks = {}, Marks()
        for name, m in model.named_modules():
            if name not in before:
                raise SplitError(
                    f"{name!r} ({type(m).__name__}) was made within the forward pass: stages hold the "
                    "modules that the model had when it was divided. Let it have them all before the first "
                    "batch (call what makes it before espalier.prepare), or train under a plan without pipe."
                )
            was, now = before[name], _remembered(m, marks)
            keys = [k for k in {**was, **now} if k not in was or k not in now or not equal(was[k], now[k])]
            if keys:
                changed[name] = keys
        return changed

    @staticmethod
    def sharing(model: nn.Module, changes: Mapping[str, Iterable[str]]) -> dict[str, set[str]]:
        """For modules whose attributes have changed, all that hold one of these objects."""
        holders: dict[int, set[str]] = {}
        for name, m in model.named_modules():
            for key, x in vars(m).items():
                if key not in TABLES and (isinstance(x, torch.Tensor) or may_change(x)):
                    holders.setdefault(id(x), set()).add(name)
        sharing: dict[str, set[str]] = {}
        for name, keys in changes.items():
            attributes = vars(model.get_submodule(name))
            sharing[name] = set().union(*(holders.get(id(attributes.get(key)), set()) for key in keys))
        return {name: holding for name, holding in sharing.items() if len(holding) > 1}

    def _as_made(self, m: nn.Module) -> dict[str, Any]:
        """What a module's author made of it, where this library has put its own."""
        attributes: dict[str, Any] = {}
        for name in HOOKS:
            hooks = vars(m).get(name, {})
            others = {k: hook for k, hook in hooks.items() if not made_in(hook, "espalier")}
            if len(others) < len(hooks):
                attributes[name] = type(hooks)(others)
        now, then = vars(m).get("forward"), self._forwards.get(id(m))
        if now is not then:
            attributes["forward"] = ABSENT if then is None else then
        return attributes

    def _stand(self, fake: FakeTensorMode, x: torch.Tensor) -> torch.Tensor:
        """What stands for a parameter or buffer."""
        if not isinstance(x, nn.Parameter):
            return self._copied(x, fake)
        cast = self._dtype is not None and x.is_floating_point()
        stand = self._fake(x, fake, self._dtype if cast else None).requires_grad_(x.requires_grad)
        stand._is_param = True
        return stand

    def _fake(self, x: torch.Tensor, fake: FakeTensorMode, dtype: torch.dtype | None = None) -> torch.Tensor:
        # made as torch makes it of an operation, and in a fifth of the time
        bare = torch.empty(tuple(x.shape), dtype=dtype or x.dtype, device="meta")
        return FakeTensor(fake, bare, self.device)

    def _copied(self, b: torch.Tensor, fake: FakeTensorMode) -> torch.Tensor:
        if type(b) is DTensor and not b.is_meta:
            b = full_tensor(b)
        return self._fake(b, fake) if b.is_meta else b.detach().clone().to(self.device)


def caching(modules: Iterable[nn.Module]) -> list[Any]:
    """Configurations of transformers' models that ask for a cache of keys and values.

    A cache is an object that blocks write to, and would have to travel from stage to stage.
    """
    configs = {
        id(c): c for m in modules if getattr(c := getattr(m, "config", None), "use_cache", None) is True
    }
    return list(configs.values())


@contextmanager
def uncached(configs: Sequence[Any], inputs: Any) -> Iterator[None]:
    """While open, a call of models that ask for caches of keys and values, unasked by its inputs, fills none.

    Their masks stay those of a call that fills one: transformers takes positions that begin anew within a row
    for those of several sequences only where there is no cache.
    """
    given = inputs if isinstance(inputs, Mapping) else {}
    unasked = given.get("use_cache") is None and given.get("position_ids") is not None
    masks = sys.modules.get("transformers.masking_utils")
    with ExitStack() as stack:
        for config in configs:
            stack.enter_context(having(config, use_cache=False))
        if configs and unasked and hasattr(masks, "find_packed_sequence_indices"):
            stack.enter_context(having(masks, find_packed_sequence_indices=lambda position_ids: None))
        yield


def _remembered(m: nn.Module, marks: Marks) -> dict[str, Any]:
    """What a forward may set: of tensors, how often they were written to, too; of buffers, which they are."""
    with raw():
        held = {k: marks.of(x) for k, x in vars(m).items() if k not in OF_TORCH}
    return {**held, **own_buffers(m)}


class Marks:
    """What values are like now, to compare with later: with what containers and the program's objects hold.

    Each object is looked at once.

    Args:
        counts: whether of tensors it is told, too, how often they were written to, and of generators of
            random numbers what they have drawn.
    """

    def __init__(self, *, counts: bool = True) -> None:
        self._counts = counts
        self._known: dict[int, Any] = {}  # by id of objects, which stay where they are meanwhile
        self._left = 0

    def of(self, x: Any) -> Any:
        """Of an attribute."""
        self._left = MOST_HELD
        return self._mark(x)

    def _mark(self, x: Any) -> Any:
        if type(x) in _PLAIN:
            return x
        if isinstance(x, torch.Tensor):
            return (x, version_of(x)) if self._counts and not isinstance(x, nn.Parameter) else x
        if type(x) in (list, tuple, deque):
            return [*map(self._mark, x)]
        if is_array(x):
            return x.dtype, x.shape, x.tobytes()
        if type(x) in DICTS:
            return {k: self._mark(y) for k, y in x.items()}
        if type(x) is set:
            return set(x)
        if self._counts and (state := generator_state(x)) is not None:
            drawn = state[1]
            return drawn.numpy().tobytes() if isinstance(drawn, torch.Tensor) else pickle.dumps(drawn)
        held = shown_by(x)
        if held is None:
            return x
        if id(x) not in self._known:
            self._known[id(x)] = type(x)  # where it is within itself
            if hasattr(type(x), "save_pretrained"):
                held = {k: y for k, y in held.items() if k not in _NOTED_BY_A_SAVE}
            self._left -= len(held)
            marked = (type(x), {k: self._mark(y) for k, y in held.items()}) if self._left > 0 else x
            self._known[id(x)] = x if self._left <= 0 else marked
        return self._known[id(x)]


OF_TORCH = frozenset({*TABLES, *HOOKS, *HOOK_OPTIONS, *STATE_HOOKS})  # attributes of modules
# in a configuration of transformers, on the one rank that saves the model; no forward asks for it
_NOTED_BY_A_SAVE = frozenset({"architectures", "dtype"})
_PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size})


def hooks_in(model: nn.Module) -> dict[str, list[int]]:
    """By the names of modules that have any, which hooks their forwards have."""
    found: dict[str, list[int]] = {}
    for name, module in model.named_modules():
        before, after = forward_hooks(module)
        if before or after:
            found[name] = [*before, *after]
    return found


def hooks_of(module: nn.Module) -> list[Mapping[int, Any]]:
    """What is called before and after a module's forward and backward: torch's own tables."""
    return [vars(module).get(name, {}) for name in HOOKS]


def observed(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Those of modules that have hooks which a program has put there, and no library, nor themselves."""

    def is_of_program(hook: Any) -> bool:
        is_own = isinstance(getattr(hook, "__self__", None), nn.Module) or isinstance(hook, Observed)
        return not is_own and not made_in(hook, "espalier", "torch", "transformers")

    return [m for m in modules if any(is_of_program(h) for of in hooks_of(m) for h in of.values())]


def newly_hooked(model: nn.Module, before: Mapping[str, list[int]]) -> list[str]:
    """The names of modules that have other hooks now than :func:`hooks_in` said."""
    return [name for name, keys in hooks_in(model).items() if keys != before.get(name)]


def is_flag_of_hooks(value: Any, name: str, hooked: Iterable[str]) -> bool:
    """Whether an attribute that a forward has set says, as it seems, that it has put hooks.

    They are those of each model and copy, so that the flag is told to no other, which has none.

    Args:
        name: the module's.
        hooked: the modules that have got hooks.
    """
    return type(value) is bool and any(not name or f"{inner}.".startswith(f"{name}.") for inner in hooked)


def equal(a: Any, b: Any) -> bool:
    """Whether attributes are the same; tensors, if they are one."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if type(a) in (list, tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    if isinstance(a, weakref.ref):  # whose == is that of what they refer to: an operation, of tensors
        return a() is b()
    if type(a) is dict:
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    try:
        return not isinstance(a, torch.Tensor) and bool(a == b)
    except Exception:
        return False


_COMPARED = (int, float, complex, str, type(None), torch.dtype)


def unlike(first: Trace, again: Trace) -> list[str]:
    """The modules that compute something else in a second run: not only what depends on the batch alone."""
    one, other = _by_module(first), _by_module(again)
    return [name for name in one if not equal(one[name], other.get(name))]


def _by_module(trace: Trace) -> dict[str, list[Any]]:
    """What each module's forward does itself, with shapes in the place of tensors."""

    def described(x: Any) -> Any:
        if not isinstance(x, Ref):
            return x if isinstance(x, _COMPARED) else type(x)
        value = trace.values[x.number]
        return "local" if value.local else tuple(value.tensor.shape)

    done: dict[str, list[Any]] = {}
    for op in trace.ops:
        if not op.local:
            name = trace.calls[op.call].name if op.call >= 0 else ""
            given = leaves(mapped(described, (op.args, op.kwargs)))
            done.setdefault(name, []).append([op.func, *given])
    return done


def sizes_of(*tensors: torch.Tensor) -> list[tuple[int, ...]]:
    """What stages have to have again of tensors whose shapes hang on values of the batch."""
    return [tuple(x.shape) for x in tensors]


def name_of(func: Any) -> str:
    """What a torch function is called."""
    return str(getattr(func, "__name__", func))


# ---- arguments and outputs of modules as trees: whatever containers they come in


class Ref(NamedTuple):
    """A value of a trace, in the place of the tensor."""

    number: int


class Part:
    """A module of the model, in its place: one that is given to another module.

    Attributes:
        name: the module's.
    """

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


_SOUGHT = (torch.Tensor, Ref)


def mapped(fn: Callable[[Any], Any], tree: Any) -> Any:
    """``fn`` on every leaf of tuples, lists, dicts, slices, and dataclasses that hold tensors."""
    return tree_map(fn, tree, _SOUGHT)


def refilled(tree: Any, tensors: Iterable[Any]) -> Any:
    """The same with others in the place of its tensors, in their order."""
    remaining = iter(tensors)
    return mapped(lambda x: next(remaining) if isinstance(x, torch.Tensor) else x, tree)


def leaves(tree: Any, kind: type | tuple[type, ...] = object) -> list[Any]:
    """The leaves of a kind, in the order of :func:`mapped`."""
    return leaves_of(tree, kind, _SOUGHT)


class Arguments(NamedTuple):
    """What a model is called with where some arguments can have no name, and others have one."""

    args: tuple[Any, ...]
    named: dict[str, Any]


def called(model: Callable[..., Any], batch: Any) -> Any:
    """What a model gives for a batch: a dict (keywords), a tuple or list, :class:`Arguments`, one value."""
    if isinstance(batch, Arguments):
        return model(*batch.args, **batch.named)
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple | list) else model(batch)
