"""What is written down of a forward pass, of which the programs of stages are made."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from espalier.layout import Layout
from espalier.parallel.pipeline.arguments import Ref, leaves, mapped
from espalier.tensor import DTensor, recorder, stamp
from espalier.tensor.before import is_of_torch
from espalier.tensor.dry_runs import OpCost
from espalier.tensor.dtensor import full_value, is_sparse, layout_of
from espalier.tensor.rules.across_ranks import AllHaveIt, meets_ranks
from espalier.torch_private import DispatchMode, all_given, memory_id, raw, sparse_values

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


class CallSpan(NamedTuple):
    """What is done in one go: a module that is called whole, or a torch call (``call`` is None)."""

    start: int
    end: int
    call: ModuleCall | None


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
    __bool__ __int__ __float__ __index__ __complex__ __contains__ item tolist equal allclose is_nonzero numpy
    __array__
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


class _Array(NamedTuple):
    """An array of NumPy, as a value that is equal to others."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    values: bytes


def _compared(out: Any) -> Any:
    return _Array(out.dtype, out.shape, out.tobytes()) if isinstance(out, np.ndarray) else out


def _again(out: Any) -> Any:
    """What :func:`_compared` was given; a program may write to it."""
    return np.frombuffer(out.values, out.dtype).reshape(out.shape).copy() if type(out) is _Array else out


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
        return out, Answer(_compared(out), {})
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
            return _made(answer.sized, tensors) if sized else _again(answer.out)
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


def sizes_of(*tensors: torch.Tensor) -> list[tuple[int, ...]]:
    """What stages have to have again of tensors whose shapes hang on values of the batch."""
    return [tuple(x.shape) for x in tensors]


def name_of(func: Any) -> str:
    """What a torch function is called."""
    return str(getattr(func, "__name__", func))
