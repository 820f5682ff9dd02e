"""What a call of a model in stages finds, and leaves, beside its output: generators, buffers, its memory.

On one process a forward runs once. In a pipeline that of one call may run several times: where a value is
asked for, in the training pass, for a loss that goes back again. Each time it draws the same numbers, and
finds what the first run has found; and what it leaves, it leaves once.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Protocol, cast

import torch

from espalier.engine.model_call import ModelCall
from espalier.meanwhile import having
from espalier.mesh import Mesh
from espalier.parallel.compose import Stages
from espalier.parallel.pipeline.remembered import Memory
from espalier.tensor import DTensor
from espalier.tensor.before import Before
from espalier.tensor.draws import States, equal, restore, states
from espalier.tensor.loans import written_mark
from espalier.tensor.traces import Generators, names_put_back


@dataclass
class LoopCalls:
    """What the calls of a model in stages, by a plain loop, know of one another.

    Attributes:
        numbers: theirs.
        to_run: those that have not run yet, in their order.
        draws: whether such a one draws random numbers; None: not known.
        runs_at_call: whether one of which it is not known what it draws runs at once: the program draws
            before its loss goes back.
        keeps_outputs: whether outputs of training passes are kept behind the first step.
        output_shapes: what is given, on ``meta``, by what that follows from.
        row_dims: the dim of each tensor in it that has the rows.
        known_losses: by what is done in them, whether losses are computed on parts of the rows.
    """

    numbers: Iterator[int] = field(default_factory=count)
    to_run: list[Any] = field(default_factory=list)
    draws: bool | None = None
    runs_at_call: bool = False
    keeps_outputs: bool = False
    output_shapes: dict[Hashable, Any] = field(default_factory=dict)
    row_dims: dict[Hashable, list[int | None]] = field(default_factory=dict)
    known_losses: dict[Hashable, bool] = field(default_factory=dict)


class Surroundings(Protocol):
    """What passes through stages work on; see :class:`~espalier.engine.staged.Staged`."""

    call: ModelCall
    mesh: Mesh
    memory: Memory
    loop_calls: LoopCalls

    @property
    def stages(self) -> Stages: ...
    def before(self) -> Before: ...
    def hide(self) -> None: ...


class CallStates:
    """Of one call.

    Args:
        has_graph: whether gradients are recorded in it: it is to train, and may have a training pass.
        trains: whether the model was in training mode.
    """

    def __init__(self, passes: Surroundings, has_graph: bool, trains: bool) -> None:
        self._passes, self._has_graph, self._trains = passes, has_graph, trains
        self._device = passes.mesh.device()
        self._drawn_from: tuple[States, Generators] | None = None  # by the training pass
        # before it drew, or a value was computed in its place; what its loss is to draw from
        self._begins: States | None = None
        self._buffers: Before | None = None  # as they were, where that pass has written to them
        self._loss_begins: States | None = None

    @property
    def changes(self) -> bool:
        """Whether a call of the model leaves something that later ones find, beside torch's generators."""
        split = self._passes.stages.split
        return bool(split.written) or split.remembers or split.dice is not None

    @property
    def may_change(self) -> bool:
        """Whether it does, or draws."""
        return self.changes or self._passes.loop_calls.draws is not False

    @property
    def has_trained(self) -> bool:
        """Whether there was a training pass."""
        return self._drawn_from is not None

    @property
    def has_run(self) -> bool:
        """Whether there was one, or another pass that has written in its place."""
        return self.has_trained or self._buffers is not None

    def have_drawn(self, ends: States) -> None:
        """The program goes on as if the model, which runs later, had drawn up to here."""
        self._begins = states(self._device)
        restore(self._device, ends)

    @contextmanager
    def untouched(self) -> Iterator[None]:
        """While open, passes may be made that leave no trace: they draw what the training pass draws.

        They find what it found, where it is known that there are others.
        """
        passes, device = self._passes, self._device
        drawn, before = states(device), passes.before()
        if self._buffers is not None:
            self._buffers.put()
        if self._drawn_from is not None:
            torchs, others = self._drawn_from
            restore(device, torchs)
            others.restore()
        elif self._begins is not None:
            restore(device, self._begins)
        try:
            with passes.memory.undone(), names_put_back(passes.call.module):
                yield
        finally:
            restore(device, drawn)
            before.put()
            if self._has_graph and not self.has_trained:
                passes.hide()

    @contextmanager
    def looking(self) -> Iterator[None]:
        """While open, the output is computed in the place of a training pass, which may never come.

        Later calls draw behind it.
        """
        device = self._device
        ends, has_drawn = cast(States | None, None), self._begins is not None
        try:
            with self._in_place():
                begins = states(device)
                try:
                    yield
                finally:
                    ends, others = states(device), Generators()
        finally:
            if ends is not None and self._has_graph and not self.has_trained:
                if not has_drawn:  # whether it fails, or its loss goes back
                    self._begins = begins
                    restore(device, ends)
                others.restore()
                if self._trains:
                    loop = self._passes.loop_calls
                    loop.draws = loop.draws or not equal(begins, ends)

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        passes, device = self._passes, self._device
        if not self._has_graph:
            yield
        elif self.has_run or not self.changes:
            with self.untouched():
                yield
        else:
            drawn, before = states(device), passes.before()
            if self._begins is not None:
                restore(device, self._begins)
            try:
                with names_put_back(passes.call.module):
                    yield
            finally:
                restore(device, drawn)
            self._buffers = before
            passes.hide()  # what has no gradient yet

    @contextmanager
    def training(self, loss_draws: bool, stays: bool) -> Iterator[None]:
        """While open, a training pass is made: it draws, and finds, what a pass before it has.

        Args:
            loss_draws: whether the loss draws, too.
            stays: whether there may be another one.
        """
        gone: AbstractContextManager[None] = nullcontext()
        if self.has_trained:
            gone = self.untouched()
        elif self._buffers is not None:
            gone = self._again()
        elif stays and self._trains and self.changes:
            self._buffers = self._passes.before()
        with gone, self._drawing(loss_draws):
            yield

    @contextmanager
    def _again(self) -> Iterator[None]:
        """While open, a pass finds buffers as another one did that has written to them, and leaves them."""
        assert self._buffers is not None
        self._passes.memory.hidden.show(self._passes.call.module)
        back = self._buffers.swap()
        try:
            with self._passes.memory.undone():
                yield
        finally:
            back()

    @contextmanager
    def _drawing(self, loss_draws: bool) -> Iterator[None]:
        device, now = self._device, states(self._device)
        if self._drawn_from is None:
            self._drawn_from = self._begins or now, Generators()
            if self._begins is not None and not equal(self._begins, now):
                restore(device, self._begins)
                self._loss_begins = now
        with having(self._passes.call, loss_draws=loss_draws, loss_begins=self._loss_begins):
            yield

    @contextmanager
    def undone_by_error(self) -> Iterator[None]:
        """While open, a pass that fails leaves no trace of these."""
        drawn, before = states(self._device), self._passes.before()
        was = self._drawn_from, self._loss_begins
        try:
            yield
        except Exception:
            self._drawn_from, self._loss_begins = was
            restore(self._device, drawn)
            before.put()
            raise


# ---- tensors that it is given, and that are written to before it has run


Mark = tuple[torch.Tensor, int]  # and how often it was written to, but past autograd (x.data)


def marks_of(tensors: Iterable[torch.Tensor]) -> list[Mark]:
    """Of plain tensors, what tells later whether they were written to."""
    return [(x, written_mark(x)[0]) for x in tensors if not isinstance(x, DTensor) and not x.is_inference()]


def refuse_changed(marks: Iterable[Mark]) -> None:
    """See that tensors are as they were.

    Raises:
        ValueError: one was written to.
    """
    changed = next((x for x, mark in marks if written_mark(x)[0] != mark), None)
    if changed is not None:
        raise ValueError(
            f"A tensor of shape {tuple(changed.shape)} was written to since the model, "
            "or what is made of its output, was given it. In a pipeline that is computed when the loss goes "
            "back, or when a value is asked for: ask before the write (x.item(), x.detach().sum()), or give "
            "a copy (x.clone())."
        )


def asked_after_step() -> ValueError:
    """A value is asked for that was not kept, and hangs on parameters that a step has changed since."""
    return ValueError(
        "A value of the model's output is asked for after optimizer.step(). In a pipeline it was not "
        "kept, and the parameters are others now. Ask for it before the step (x.item(), x.detach().sum()); "
        "or after the first step too: then the output is kept in each, but not what is made of it with "
        "parameters, as by a call of one of the model's modules."
    )
