"""The runtime: what a schedule says, done by this rank.

What crosses from stage to stage is each rank's local tensor, to the rank of the same coordinates in the next
stage; layouts, shapes and dtypes are agreed before (see ``shape_inference``). Once it is sent, a stage's
output is let go: of the graph only the edge that backward starts from is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import compress
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from espalier.comm import Work
from espalier.comm.collectives import open_lanes, receive_from, send_to
from espalier.device import is_accelerator
from espalier.layout import Layout
from espalier.layout.layout import AxisState
from espalier.mesh import Mesh
from espalier.parallel.pipeline.measure import Stopwatch, gathered
from espalier.parallel.pipeline.single_rank import SingleRank
from espalier.parallel.pipeline.weight_gradients import backward_for_inputs
from espalier.parallel.schedules.actions import Action, ActionKind, Schedule
from espalier.parallel.schedules.simulate import Timeline
from espalier.tensor import DTensor, plain, stamp
from espalier.tensor.draws import Draw
from espalier.tensor.dtensor import layout_of, redistribute
from espalier.torch_private import base_of, raw

Tensors = tuple[torch.Tensor, ...]
_RECEIVES = (ActionKind.RECV_F, ActionKind.RECV_B)
_OTHER = {
    ActionKind.SEND_F: ActionKind.RECV_F,
    ActionKind.SEND_B: ActionKind.RECV_B,
    ActionKind.RECV_F: ActionKind.SEND_F,
    ActionKind.RECV_B: ActionKind.SEND_B,
}


class Wire(NamedTuple):
    """A tensor that crosses from a stage to the next, as all ranks know it.

    Attributes:
        shape: of this rank's part.
        lies: states of the mesh's axes, cuts and global shape; None for a plain tensor.
        has_gradient: whether it needs a gradient.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    lies: tuple[tuple[AxisState, ...], tuple[tuple[int, ...], ...], tuple[int, ...]] | None
    has_gradient: bool


class InferredShapes(NamedTuple):
    """What is known of a micro-batch before it runs.

    Attributes:
        wires: of each stage but the last, its outputs.
        returns: of each of them, whether a gradient may come back: what the loss hangs on has one.
        tells: whether a stage tells the one before which of these have.
        draws: what each stage draws from torch's generators.
        alone: how stages of this rank are run on it alone; without those that are run on DTensors.
        after: the attributes that modules set, by module's name and their own, as they are then.
        wanting: of each tensor that the model gives, whether gradients go back through it; none: not known.
    """

    wires: tuple[tuple[Wire, ...], ...]
    returns: tuple[tuple[bool, ...], ...]
    tells: bool
    draws: tuple[tuple[Draw, ...], ...]
    alone: Mapping[int, SingleRank]
    after: Mapping[tuple[str, str], Any] = MappingProxyType({})
    wanting: tuple[bool, ...] = ()


class StageWork(Protocol):
    """What a runtime is to do: a step's micro-batches, and what the stages compute."""

    def at(self, action: Action) -> None:
        """An action begins."""

    def phase(self, name: str) -> None:
        """A ``"forward"`` or a ``"backward"`` begins."""

    def forward(self, stage: int, micro_batch: int, received: Tensors) -> Sequence[torch.Tensor]:
        """A stage's outputs; of the last one, the loss."""

    def weight(self, micro_batch: int) -> torch.Tensor:
        """The gradient with which the backward pass of a loss begins, plain."""

    def hold_backward(self, stage: int, micro_batch: int) -> None:
        """Before a backward pass for a stage's inputs: weights that cannot wait get gradients in it."""

    def begin_backward(self, stage: int, micro_batch: int, last: bool) -> None:
        """Before weights get gradients; ``last``: for the last time in this step."""

    def end_backward(self, stage: int, micro_batch: int) -> None:
        """After it: they get what was put off while their inputs' gradients were on their way."""


class _Live:
    """A micro-batch in a stage, from its forward to the end of its backward pass."""

    def __init__(self, leaves: list[torch.Tensor], edges: list[GradientEdge]) -> None:
        self.leaves, self.edges = leaves, edges
        self.later: Callable[[], None] | None = None


class Runtime:
    """Runs schedules on this rank.

    Args:
        mesh: with the axis ``pipe``.
        stage_mesh: of the ranks of this rank's stages.
        parts_backward: whether weights' gradients may be put off (see ``backward``); else all that ``I`` and
            ``W`` say is done by ``I``.

    Attributes:
        live: micro-batches that stages of this rank hold now; ``most``: the most of them in the last run.
        failure: what a computation of this rank has met. It then goes on with zeros, so that others, who
            wait for its messages, come to the end and can be told.
    """

    def __init__(self, mesh: Mesh, stage_mesh: Mesh, parts_backward: bool) -> None:
        self._mesh, self._stage_mesh, self._parts = mesh, stage_mesh, parts_backward
        self._axis = mesh.axis("pipe")
        self._is_ahead = is_accelerator(mesh.device_type)  # a host, of its device
        self.live: dict[tuple[int, int], _Live] = {}
        self.failure: Exception | None = None
        self.most = 0
        self._trained: tuple[Schedule, Stopwatch] | None = None
        self._row: Sequence[Action] = ()
        self._early: list[Action] = []
        self._there: dict[Action, tuple[int, int]] = {}
        self._clear()

    def _clear(self) -> None:
        self.live.clear()
        self._inbox: dict[Action, Work[list[torch.Tensor]]] = {}
        self._outbox: dict[Action, list[torch.Tensor]] = {}
        self._sending: list[tuple[Action, Work[Any]]] = []
        self._ending: Action | None = None

    def run(self, schedule: Schedule, agreed: Sequence[InferredShapes], work: StageWork) -> None:
        """Do this rank's row.

        Args:
            schedule: with its messages (``with_messages``).
            agreed: of each micro-batch.
        """
        self._schedule, self._agreed, self._work = schedule, agreed, work
        self.failure, self.most = None, 0
        self._watch = Stopwatch(self._stage_mesh.device())
        if torch.is_grad_enabled():
            self._trained = schedule, self._watch
        row = schedule.actions[self._mesh.coordinate[self._axis]]
        if row is not self._row:
            self._row, self._early = row, self._posted_early(row)
            self._there = self._matched(row)
            open_lanes(self._mesh, self._axis, self._pairs())
        self._last = {
            a.stage: a for a in row if a.kind in (ActionKind.B, ActionKind.W if self._parts else ActionKind.I)
        }
        try:
            for action in self._early:
                work.at(action)
                if not action.kind.computes:
                    self._message(action)
                    continue
                if self._ending is not None:
                    self._tried(self._end)
                self._tried(partial(self._compute, action))
                if self.failure is not None:
                    self._stand_in(action)
            self._tried(self._end)
            for _, pending in self._sending:
                pending.wait()
        finally:
            self._clear()

    def _tried(self, do: Callable[[], None]) -> None:
        """Compute something, unless something else went wrong already."""
        if self.failure is None:
            try:
                do()
            except Exception as error:
                self.failure = error
                self.live.clear()

    def _posted_early(self, row: Sequence[Action]) -> list[Action]:
        """The row, each receive before the computation that it stands behind.

        So what is sent arrives while this rank computes.
        """
        row_actions: list[Action] = []
        at: int | None = None  # the last computation
        for action in row:
            if action.kind in _RECEIVES and at is not None:
                row_actions.insert(at, action)
                at += 1
                continue
            at = len(row_actions) if action.kind.computes else at
            row_actions.append(action)
        return row_actions

    def _matched(self, row: Sequence[Action]) -> dict[Action, tuple[int, int]]:
        """For each message of a row, with whom it is, and the place of its other end in that one's row."""
        rows: dict[int, dict[Action, int]] = {}
        ends = {}
        for action in row:
            if action.kind.computes:
                continue
            peer = self._schedule.peer(action)
            if peer not in rows:
                early = self._posted_early(self._schedule.actions[peer])
                rows[peer] = {other: place for place, other in enumerate(early)}
            kind, stage, micro = action
            to = stage + (1 if kind in (ActionKind.SEND_F, ActionKind.RECV_B) else -1)
            ends[action] = peer, rows[peer][Action(_OTHER[kind], to, micro)]
        return ends

    def _pairs(self) -> set[tuple[int, int]]:
        """Who sends to whom, of all ranks along the axis."""
        rows = enumerate(self._schedule.actions)
        sends = ((rank, a) for rank, row in rows for a in row if a.kind in _OTHER and a.kind not in _RECEIVES)
        return {(rank, self._schedule.peer(a)) for rank, a in sends}

    # ---- messages

    def _wires(self, action: Action) -> list[Wire]:
        """What crosses in a message."""
        kind, stage, micro = action
        ahead = kind in (ActionKind.SEND_F, ActionKind.RECV_B)
        border, agreed = stage if ahead else stage - 1, self._agreed[micro]
        if kind in (ActionKind.SEND_F, ActionKind.RECV_F):
            return list(agreed.wires[border])
        back = list(compress(agreed.wires[border], agreed.returns[border]))
        return [*back, Wire((len(back),), torch.uint8, None, False)] if agreed.tells and back else back

    def _message(self, action: Action) -> None:
        if action.kind in _RECEIVES:
            self._receive(action)
        else:
            self._send(action)

    def _send(self, action: Action) -> None:
        # what was sent is let go: on the CPU no more than one is on its way; a device would stand still for
        # it, so there those that have arrived
        for sent, pending in [*self._sending]:
            same = (sent.kind, sent.stage) == (action.kind, action.stage)
            if pending.has_ended if self._is_ahead else same:
                pending.wait()
                self._sending.remove((sent, pending))
        xs, peer = self._outbox.pop(action), self._schedule.peer(action)
        self._sending.append((action, send_to(xs, self._mesh, self._axis, peer, _tag(action))))

    def _receive(self, action: Action) -> None:
        like = [(wire.shape, wire.dtype) for wire in self._wires(action)]
        peer = self._schedule.peer(action)
        self._inbox[action] = receive_from(like, self._mesh, self._axis, peer, _tag(action))

    def _hand_over(self, send: Action, xs: list[torch.Tensor]) -> None:
        """What a stage has made, to be sent, or to be taken by another stage of this rank."""
        kind, stage, micro = send
        ahead = kind is ActionKind.SEND_F
        to = stage + (1 if ahead else -1)
        if self._schedule.rank_of(to) == self._schedule.rank_of(stage):
            self._inbox[Action(ActionKind.RECV_F if ahead else ActionKind.RECV_B, to, micro)] = Work.done(xs)
        else:
            self._outbox[send] = xs

    def _take(self, kind: ActionKind, stage: int, micro: int) -> list[torch.Tensor]:
        action = Action(kind, stage, micro)
        xs = self._inbox.pop(action).wait()
        self._let_go(action)
        self._watch.start()
        return xs

    def _let_go(self, came: Action) -> None:
        """Let go what was sent to where a message came from, if that was sent after it was awaited there."""
        peer, place = self._there.get(came, (-1, -1))
        for sent, pending in [*self._sending]:
            to, received = self._there[sent]
            if to == peer and received < place:
                pending.wait()
                self._sending.remove((sent, pending))

    def timeline(self) -> Timeline:
        """When all ranks along the axis ``pipe``, which all call this, did what in the last step.

        Waiting for messages is no part of an action.

        Raises:
            ValueError: there was none.
        """
        if self._trained is None or self._mesh.is_dry:
            raise ValueError("No step has been timed: call engine.train_step(batch) first, on a real mesh.")
        schedule, stopwatch = self._trained
        return gathered(stopwatch.spans(), schedule, self._mesh, self._axis)

    # ---- computation

    def _compute(self, action: Action) -> None:
        self._watch.start()
        self._work.phase("forward" if action.kind is ActionKind.F else "backward")
        if action.kind is ActionKind.F:
            self._f(action)
        elif action.kind is ActionKind.W:
            self._w(action)
        else:
            parted = action.kind is ActionKind.I and self._parts
            self._backward(action, parted)
            if not parted:
                self._ending = action  # when what it has made is on its way
                return
        self._watch.stop(action)

    def _stand_in(self, action: Action) -> None:
        """What others wait for, without what it should be."""
        kind, stage, micro = action
        came, sent = (
            (ActionKind.RECV_F, ActionKind.SEND_F)
            if kind is ActionKind.F
            else (ActionKind.RECV_B, ActionKind.SEND_B)
        )
        to = stage + (1 if kind is ActionKind.F else -1)
        if (coming := self._inbox.pop(Action(came, stage, micro), None)) is not None:
            coming.wait()
        send = Action(sent, stage, micro)
        if kind is not ActionKind.W and 0 <= to < self._schedule.stages and send not in self._outbox:
            device = self._stage_mesh.device()
            zeros = [torch.zeros(w.shape, dtype=w.dtype, device=device) for w in self._wires(send)]
            self._hand_over(send, zeros)

    def _f(self, action: Action) -> None:
        _, stage, micro = action
        leaves: list[torch.Tensor] = []
        received: Tensors = ()
        if stage:
            wires = self._agreed[micro].wires[stage - 1]
            entered = []
            with raw(), torch.enable_grad():  # what an evaluation only passes on is to want one, as agreed
                for x, wire in zip(self._take(ActionKind.RECV_F, stage, micro), wires, strict=True):
                    if wire.has_gradient:
                        leaves.append(x.requires_grad_())
                        x = x.view_as(x)  # no leaf, on which a mark or another class would stay
                    lies = None if wire.lies is None else Layout.of(self._stage_mesh, *wire.lies)
                    entered.append(x if lies is None else stamp(x, lies))
            received = tuple(entered)
            del entered
        outs = list(self._work.forward(stage, micro, received))
        del received
        goes_back, edges = torch.is_grad_enabled(), list[GradientEdge]()
        with raw():
            if stage + 1 < self._schedule.stages:
                wires = self._agreed[micro].wires[stage]
                if len(outs) == len(wires):
                    outs = [*map(_as_agreed, outs, wires)]
                _check(outs, wires, stage)
                self._hand_over(Action(ActionKind.SEND_F, stage, micro), [plain(x.detach()) for x in outs])
                if goes_back:
                    edges = [*map(get_gradient_edge, compress(outs, self._agreed[micro].returns[stage]))]
            elif goes_back and outs[0].requires_grad:
                edges = [get_gradient_edge(outs[0])]
        if goes_back:
            self.live[stage, micro] = _Live(leaves, edges)
            self.most = max(self.most, len(self.live))

    def _w(self, action: Action) -> None:
        if self._parts:
            later = self.live[action.stage, action.micro_batch].later
            assert later is not None, "I comes before W"
            self._begin(action)
            later()
            self._ended(action)

    def _backward(self, action: Action, parted: bool) -> None:
        _, stage, micro = action
        live = self.live[stage, micro]
        if stage + 1 == self._schedule.stages:
            grads = [self._work.weight(micro)] if live.edges else []
        else:
            grads = self._take(ActionKind.RECV_B, stage, micro)
            if self._agreed[micro].tells and grads:
                came = grads.pop()
                if not came.is_meta:
                    there = came.tolist()
                    grads, live.edges = [*compress(grads, there)], [*compress(live.edges, there)]
        leaves = live.leaves
        if parted:
            self._work.hold_backward(stage, micro)
            live.later = backward_for_inputs(live.edges, grads, leaves, self._mesh.is_dry)
        else:
            self._begin(action)
            if live.edges:
                torch.autograd.backward(tuple(live.edges), tuple(grads))
        live.edges = []
        if stage:
            self._hand_over(Action(ActionKind.SEND_B, stage, micro), self._returned(stage, micro, leaves))
        live.leaves = []

    def _returned(self, stage: int, micro: int, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The gradients of a stage's inputs that go back.

        Raises:
            RuntimeError: one has come that nobody waits for.
        """
        agreed, border = self._agreed[micro], stage - 1
        returns = [
            b for b, w in zip(agreed.returns[border], agreed.wires[border], strict=True) if w.has_gradient
        ]
        gradients = []
        for i, (x, is_awaited) in enumerate(zip(leaves, returns, strict=True)):
            if is_awaited:
                gradients.append(torch.zeros_like(x) if x.grad is None else x.grad)
            elif x.grad is not None:
                raise RuntimeError(
                    f"Stage {stage} has a gradient for its input {i}, of the shape {list(x.shape)}, on which "
                    "the loss did not hang when the stage was run without data. What hangs on what must "
                    "follow from shapes and from whether the model trains."
                )
        if agreed.tells and gradients:
            there = [x.grad is not None for x in compress(leaves, returns)]
            gradients.append(torch.tensor(there, dtype=torch.uint8, device=gradients[0].device))
        return gradients

    def _begin(self, action: Action) -> None:
        _, stage, micro = action
        self._work.begin_backward(stage, micro, self._last[stage] == action)

    def _end(self) -> None:
        """The end of a backward pass, behind the messages that follow it."""
        action, self._ending = self._ending, None
        if action is not None:
            self._ended(action)
            self._watch.stop(action)

    def _ended(self, action: Action) -> None:
        del self.live[action.stage, action.micro_batch]
        self._work.end_backward(action.stage, action.micro_batch)


def _check(outs: Sequence[torch.Tensor], wires: Sequence[Wire], stage: int) -> None:
    """See that a stage gives what was agreed.

    Raises:
        RuntimeError: it does not.
    """
    wires_made = [wire_of(x) for x in outs]
    if wires_made != list(wires):
        raise RuntimeError(
            f"Stage {stage} gives other tensors than when it was run without data: {wires_made}, and there "
            f"{list(wires)}. What it gives must follow from shapes and from whether the model trains."
        )


def _as_agreed(x: torch.Tensor, wire: Wire) -> torch.Tensor:
    """What a stage gives, in the layout that was agreed on: which one it has may hang on values."""
    if type(x) is not DTensor or wire.lies is None:
        return x
    axes, cuts, shape = wire.lies
    layout = layout_of(x)
    if layout.shape != shape or (layout.axes, layout.cuts) == (axes, cuts):
        return x
    return redistribute(x, Layout.of(layout.mesh, axes, cuts, shape))


def wire_of(x: torch.Tensor) -> Wire:
    """What is to be known of a tensor that crosses."""
    with raw():
        # torch lets views of parameters require gradients under no_grad, too, and they lead nowhere
        of = base_of(x) if x.grad_fn is None else None
        grad = x.requires_grad and not (of is not None and of.requires_grad)
        shape, dtype = tuple(x.shape), x.dtype
    if type(x) is not DTensor:
        return Wire(shape, dtype, None, grad)
    layout = layout_of(x)
    return Wire(shape, dtype, (layout.axes, layout.cuts, tuple(layout.shape)), grad)


def _tag(action: Action) -> int:
    """Of a message: which border of stages it crosses, and in which direction."""
    forward = action.kind in (ActionKind.SEND_F, ActionKind.RECV_F)
    ahead = action.kind in (ActionKind.SEND_F, ActionKind.RECV_B)
    border = action.stage if ahead else action.stage - 1
    return 2 * border + (0 if forward else 1)
