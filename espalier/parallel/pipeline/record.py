"""What is written down of a forward pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from espalier.parallel.pipeline.answers import Answer
from espalier.tensor.flops import Work


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
    return int(x.untyped_storage()._cdata)


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


class State(NamedTuple):
    """What torch was told beside the arguments: whether gradients are recorded, and autocast."""

    grad: bool
    cast: tuple[bool, torch.dtype]

    @classmethod
    def now(cls, kind: str) -> State:
        """As it is, on a type of device."""
        return cls(torch.is_grad_enabled(), (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)))


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
        state: see :class:`State`.
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
    state: State
    work: Work
    call: int


@dataclass
class Call:
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
    state: State
    args: Any
    kwargs: Any
    end: int = -1
    out: Any = None


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
        dice: names of the modules that draw random numbers which are not torch's.
        containers: names of modules that hold the outermost lists of blocks, and of the model.
        bound: storages that were written to and hold what is not local, and whether it has gradients.
        constants: by their numbers, the model's own tensors that are none of the others.
        answers: what was asked of tensors (``bool(x)``, ``x[:, i]``), in order, each with the number of the
            innermost call around it, and that of the operation that asked, if it is one.
    """

    device: torch.device
    state: State
    values: list[Value] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    out: Any = None
    inputs: list[int] = field(default_factory=list)
    sources: dict[tuple[str, str], int] = field(default_factory=dict)
    changed: dict[str, list[str]] = field(default_factory=dict)
    dice: set[str] = field(default_factory=set)
    containers: frozenset[str] = frozenset()
    bound: dict[int, bool] = field(default_factory=dict)
    constants: dict[int, torch.Tensor] = field(default_factory=dict)
    answers: list[tuple[int, int, Answer]] = field(default_factory=list)

    def answered(self, start: int, call: Call | None) -> tuple[Answer, ...]:
        """What was asked within a call, or by an operation; nothing where torch read nothing."""
        if call is None:
            found = [answer for _, op, answer in self.answers if op == start]
        else:
            within = {call.number}
            for inner in self.calls[call.number + 1 :] if self.answers else ():
                if inner.parent not in within:
                    break
                within.add(inner.number)
            found = [answer for number, _, answer in self.answers if number in within]
        return tuple(found) if any(a != Answer(None, {}) for a in found) else ()

    def chain(self, op: int) -> list[Call]:
        """The module calls around an operation, outermost first."""
        found = []
        number = self.ops[op].call
        while number >= 0:
            found.append(self.calls[number])
            number = self.calls[number].parent
        return found[::-1]

    def where(self, op: int) -> str:
        """In words, the module in whose forward an operation is called."""
        chain = self.chain(op)
        return f"the forward of {chain[-1].name or 'the model'!r}" if chain else "the forward of the model"
