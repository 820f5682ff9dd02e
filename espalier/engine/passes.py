"""Passes: how the micro-batches of a step go through a model, forward and backward.

One after the other, each as the program asks for it (:class:`Direct`); or all of a step together through the
stages of a pipeline (``espalier.engine.staged``). Whoever asks for a backward pass, the engine or a plain
loop: it begins before its first gradient and ends after its last, when gradients are those of the whole batch
on all ranks. What the engine gives away says so itself: a hook runs when its gradient comes, and has autograd
call back at the end.
"""

from __future__ import annotations

import copy
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from espalier.blocks import parameters_in
from espalier.device import has_peak
from espalier.engine.accumulation import Accumulation, Count, with_labels
from espalier.engine.backward_hooks import BackwardHooks, gone_back, times
from espalier.engine.batches import Own
from espalier.engine.given_batches import GivenBatches
from espalier.engine.lengths import UnlikeError
from espalier.engine.model_call import ModelCall, check_loss, plain_output, refuse_stand_ins
from espalier.engine.norm import LossScaler, Rider, loss_riders, scale_gradients, share_of
from espalier.engine.own_loop import OwnLoop
from espalier.engine.report import PeakMemory, Traffic
from espalier.engine.seen import SeenGradients, gradient_seen
from espalier.faults.settings import Faults
from espalier.faults.watchdog import Watchdog
from espalier.layout import Layout, Replicate
from espalier.meanwhile import call_if_there, having
from espalier.mesh import Mesh
from espalier.parallel import Arrangement, arrange, everywhere
from espalier.parallel.compose import Stages
from espalier.parallel.data.gradients import gradient_of
from espalier.parallel.data.zero import ZeroState
from espalier.parallel.pipeline.arguments import floats_as_parameters, mapped
from espalier.tensor import DTensor, stamp
from espalier.tensor.observers import tell
from espalier.tensor.rules.joint_failure import CountsAhead
from espalier.tensor.told import Telling, is_zeroed
from espalier.torch_private import getter, is_a_view, raw
from espalier.trees import tensors_in, tree_map

_grad = getter("grad")
Phase = Callable[[str], Any]
Loss = Callable[[Any], torch.Tensor]
Backward = Callable[[torch.Tensor], None]
Judge = Callable[[torch.Tensor], None]


class Passes(ABC):
    """The passes of an engine, and the gradients that come of them until the step.

    Args:
        mesh: all of it.
        count: as for ``initialize``.
        scaler: scales losses, where they are.
        trains: whether there will be steps.
        lay_out: is called on a batch that comes before the model is laid out; held weakly.

    Attributes:
        call: how the model is called.
        data: the parameters, once they are laid out.
        loss: of the batch, or of its micro-batches so far, after a backward (detached).
        averaging: the micro-batches of an evaluation, and in a pipeline those of a pass, as one batch.
        accumulation: those of a step; None where each is a batch.
        seen: what the program may see of gradients.
        has_gradients: whether a backward pass has made some since the last step.
        updates: how often the parameters were updated.
        watch: over the device's memory, while it is asked for.
        traffic: the ledgers of steps.
        first_batches: compares the ranks' batches in the first step.
        pulse: what this rank is at, for the watch over ranks that die or hang.
    """

    def __init__(
        self,
        call: ModelCall,
        mesh: Mesh,
        count: Count | None,
        scaler: LossScaler | None,
        trains: bool,
        lay_out: Callable[[Any], None],
    ) -> None:
        self.call, self.mesh, self.plan, self.scaler = call, mesh, call.plan, scaler
        self.data: ZeroState | None = None
        self.loss: torch.Tensor | None = None
        self.has_gradients = False
        self.updates = 0
        self.watch: PeakMemory | None = None
        self.averaging = Accumulation(call.plan.accumulate, count, call.mesh, call.batches.axes)
        self.accumulation: Accumulation | None = self.averaging
        self.seen = SeenGradients(call.module, mesh, call.plan, weakref.WeakMethod(self.counted), scaler)
        self.traffic = Traffic(mesh)
        self.first_batches = GivenBatches.of(call.batches, call.plan, mesh)
        self.pulse = Watchdog(Faults())
        self.is_syncing, self._last_passed = True, 0  # the mesh's count when a micro-batch last went back
        self._trains, self._lay_out = trains, weakref.WeakMethod(lay_out)

    # ---- to lay out

    def train_from_now(self) -> None:
        """There will be steps, after all."""
        self._trains = True

    def resize(self, micro_batches: int) -> None:
        """Steps have another number of micro-batches from now on."""
        self.averaging.size = self.call.batches.micro_batches = micro_batches

    @abstractmethod
    def arrange(self, batch: Any, **options: Any) -> Arrangement | None:
        """The layouts of the parameters; None if a batch is needed and missing.

        Args:
            options: more for :func:`~espalier.parallel.arrange`.
        """

    @abstractmethod
    def begin(self, data: ZeroState) -> None:
        """The model is laid out."""

    def _laid_out(self, batch: Any) -> ZeroState:
        """The parameters, laid out for this batch if it is the first.

        Raises:
            ValueError: what is to be laid out is not in its place.
        """
        if self.data is None:
            refuse_stand_ins(self.call.module)
            call_if_there(self._lay_out, batch)
        assert self.data is not None
        return self.data

    # ---- passes

    @abstractmethod
    def forward(self, batch: Any) -> torch.Tensor:
        """The loss of a micro-batch; it may still be Partial."""

    @abstractmethod
    def train(self, parts: Iterable[Any], phase: Phase, forward: Loss, backward: Backward) -> None:
        """Forward and backward of all micro-batches of a step.

        Args:
            phase: is told when a ``"forward"`` and when a ``"backward"`` begins.
            forward, backward: the engine's, of one.
        """

    def call_waiting(self) -> None:
        """Call the program's hooks that wait until parameters have the gradients of a pass."""
        return None

    @abstractmethod
    def evaluate(self, parts: Iterable[Any]) -> torch.Tensor:
        """The loss of several batches as one: a plain scalar, the same on every rank."""

    @abstractmethod
    def output(self, inputs: Any) -> Any:
        """What the model gives for inputs, with plain whole tensors, on every rank."""

    def copied(self, memo: dict[int, Any]) -> nn.Module:
        """A copy of the model as it lies, which no engine trains."""
        model: nn.Module = copy.deepcopy(self.call.module, memo)
        if self.plan.precision.parameters is not None:
            model.register_forward_pre_hook(floats_as_parameters, with_kwargs=True)
        return model

    @abstractmethod
    def outputs(self, inputs: Any, rows: str) -> Any:
        """What the model gives for inputs, for a program that makes the loss itself.

        Args:
            rows: as for :meth:`espalier.Engine.outputs`.
        """

    @abstractmethod
    def follow_all(self, out: Any) -> None:
        """Let backward passes through what a method of the model gives be the engine's, where they can be."""

    def no_sync(self) -> AbstractContextManager[None]:
        """See :meth:`espalier.Engine.no_sync`."""
        return self.syncing(False)

    def syncing(self, sums: bool) -> AbstractContextManager[None]:
        """While open, a backward pass sums gradients over the ranks, or need not."""
        return having(self, is_syncing=sums)

    @abstractmethod
    def backward(self, loss: torch.Tensor) -> None:
        """See :meth:`espalier.Engine.backward`."""

    def check_kept(self, of_step: Accumulation) -> None:
        """See that the gradients of a step's micro-batches so far are there.

        Raises:
            ValueError: the program has dropped them.
        """
        if of_step.done and self.are_dropped:
            raise ValueError(
                f"zero_grad() after {of_step.done} of Plan(accumulate={of_step.size}) micro-batches has "
                "dropped their gradients. Leave it out: engine.step() drops them when it has updated. To "
                "begin anew, call engine.zero_grad(). Passes aside (sharpness-aware steps) are of all "
                "micro-batches of a step, or of a plan with accumulate = 1."
            )

    @abstractmethod
    def one_by_one(self, what: str) -> Direct:
        """These passes, for a call (``what``) that concerns one micro-batch alone.

        Raises:
            ValueError: they go through stages together.
        """

    def _begins(self, batch: Any) -> None:
        """A batch is about to be trained on."""
        if self._trains:
            self.traffic.begin()
            self.first_batches.note(batch)

    # ---- gradients

    @property
    @abstractmethod
    def has_new(self) -> bool:
        """Whether gradients came since they were last finished."""

    def check_step(self) -> None:
        """See that gradients may be stepped by.

        Raises:
            ValueError: they are not to be summed over the ranks yet.
        """
        if self.has_new and not self.is_syncing and self.mesh.size() > 1:
            raise ValueError(
                "A step within no_sync(): each rank would step by the gradients of its own rows, and their "
                "parameters would differ from then on. End the block before the step, or leave it out. Steps "
                "of ranks by themselves (accelerate's LocalSGD) are not here: leave LocalSGD out, and every "
                "step is of all rows."
            )

    @abstractmethod
    def finish(self) -> None:
        """Wait until gradients are summed over the ranks, but for their :meth:`factor`."""

    @abstractmethod
    def counted(self) -> dict[str, torch.Tensor]:
        """Of each gradient, finished, what this rank counts in the norm."""

    @abstractmethod
    def riders(self, judge: Judge | None = None) -> list[Rider]:
        """What the ranks tell one another of the step's passes.

        Args:
            judge: is given the loss as one number for all ranks, where :attr:`loss` may be another on each.
        """

    @abstractmethod
    def agree(self) -> None:
        """Tell one another now what :meth:`factor` hangs on, by a message of its own."""

    @abstractmethod
    def factor(self) -> torch.Tensor | None:
        """What makes finished gradients those of the whole batch, told once; riders were heard before."""

    @property
    def keeps_gradients(self) -> bool:
        """Whether gradients stay after a step that a loop asks the optimizer for, until it drops them."""
        return self.accumulation is None

    @property
    def shows_gradients(self) -> bool:
        """Whether a parameter shows a gradient, or a piece of one, to the program: on all ranks alike."""
        return any(gradient_seen(p) is not None for p in parameters_in(self.call.module))

    @property
    def are_dropped(self) -> bool:
        """Whether the program has dropped gradients, or written zeros to all, since micro-batches last went
        back: on all ranks alike."""
        found = map(gradient_seen, parameters_in(self.call.module))
        return all(grad is None or is_zeroed(grad, self._last_passed) for grad in found)

    def have_passed(self) -> None:
        """A micro-batch of several has gone back."""
        self.mesh.passed += 1
        self._last_passed = self.mesh.passed

    @property
    def may_step(self) -> bool:
        """Whether there are gradients: of a backward pass, or given by hand."""
        return self.data is not None and (self.has_gradients or self.shows_gradients)

    @property
    def holds_gradients(self) -> bool:
        """Whether a step is begun: nobody has dropped its gradients."""
        return self.has_gradients and (self.seen.is_barred or self.shows_gradients)

    def may_step_in_loop(self) -> bool:
        """Whether a step that the program has asked an optimizer for is the engine's.

        Raises:
            ValueError: the model is not laid out, and ranks have gradients of their own.
        """
        if self.may_step:
            return True
        if self.data is None:
            self.first_batches.compare(parameters_in(self.call.module))
        return False

    @property
    def is_complete(self) -> bool:
        """Whether the step is due."""
        return self.accumulation is None or self.accumulation.complete

    def finish_gradients(self, beside: Iterable[torch.Tensor] = ()) -> None:
        """See :meth:`espalier.Engine.finish_gradients`.

        Args:
            beside: has gradients of the same passes, too.
        """
        if not self.may_step:
            raise ValueError(
                "engine.finish_gradients(): there are no gradients. Call loss = engine(batch) and "
                "engine.backward(loss) first."
            )
        self.finish()
        self.agree()
        self.multiply(self.factor(), beside)
        self.seen.note()

    def multiply(self, factor: torch.Tensor | None, beside: Iterable[torch.Tensor] = ()) -> None:
        """Multiply the gradients that there are; None: by 1."""
        if factor is not None:
            # of the model's own that came later too, each once
            held = {id(p): p for p in (*parameters_in(self.call.module), *beside)}
            scale_gradients([*held.values()], factor)

    def zero_grad(self) -> None:
        """Drop the gradients, and the micro-batches that made them."""
        self.seen.forget()
        with raw():  # a model's own zero_grad may be another thing
            for p in parameters_in(self.call.module):
                if gradient_of(p) is not None:
                    p.grad = None
        self.forget()
        self.traffic.end(done=False)

    def forget(self) -> None:
        """Forget what was known of the gradients."""
        if self.data is not None:
            self.data.gradients.forget()
            if self.accumulation is not None:
                self.accumulation.reset()
            self.has_gradients = False
        self.seen.forget()

    # ---- what of the model is where

    @property
    @abstractmethod
    def stages(self) -> Stages:
        """The model as stages.

        Raises:
            ValueError: it has none, or is not laid out yet.
        """

    @property
    def is_idle(self) -> bool:
        """Whether this rank has nothing of a model that could not be divided among stages."""
        return False

    def calls_whole(self, modules: Iterable[nn.Module]) -> bool:
        """Whether each of some modules is called as a whole, by one rank's stage."""
        return True

    def saves(self, name: str) -> bool:
        """Whether this rank has a share in saving a parameter of which it holds a part."""
        return True

    def everywhere(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """The plain global value of a parameter or buffer, on every rank."""
        return everywhere(x, self.mesh).detach()


class Direct(Passes):
    """Micro-batches one after the other, forward and backward each when it is asked for."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        if self.plan.accumulate == 1:
            self.accumulation = None
        self._counts = CountsAhead()
        self._hooks = BackwardHooks(self._begin_backward, self._end_backward, self._refused, self._have)
        self._last_loss: torch.Tensor | None = None
        self._is_own = False  # each rank makes a loss of its own rows
        self._finishes = True
        self._are_new = False  # gradients, since they were last finished
        self._is_within = False  # train()
        self._loop = OwnLoop(self.mesh, self._taken)

    def arrange(self, batch: Any, **options: Any) -> Arrangement | None:
        sample, rows = self.call.sample(batch), self.call.batches.share(batch)
        return arrange(self.call.module, self.plan, self.mesh, batch=sample, rows=rows, **options)

    def resize(self, micro_batches: int) -> None:
        super().resize(micro_batches)
        if micro_batches > 1 and self.accumulation is None:
            self.accumulation = self.averaging
            if self.data is not None:
                self.seen.watch(m.p for m in self.data.members)

    def begin(self, data: ZeroState) -> None:
        if self.accumulation is not None:
            self.seen.watch(m.p for m in data.members)
        self.seen.watch_clipping()
        data.gradients.announce(self._hooks.come_late)
        if self._trains:
            self.first_batches.look_at(self.call.module)

    def one_by_one(self, what: str) -> Direct:
        return self

    def forward(self, batch: Any) -> torch.Tensor:
        OwnLoop.close()
        of_step = self.accumulation
        if torch.is_grad_enabled():
            self._begins_anew()
            self._begins(batch)
        loss = self._loss_of(batch) if of_step is None else of_step.forward(batch, self._loss_of)
        if loss.requires_grad:
            self.follow(loss)
            self._last_loss = loss.detach()
        self._is_own = False
        return loss

    def _begins_anew(self) -> None:
        """Forget a step's micro-batches whose gradients the program has dropped (sharpness-aware steps)."""
        of_step = self.accumulation
        if of_step is not None and of_step.complete and self.are_dropped:
            self.forget()

    def _loss_of(self, batch: Any) -> torch.Tensor:
        call = self.call
        self._laid_out(batch).begin_forward()
        batch = with_labels(call.batches.typed(batch))
        with self._counts.of(tensors_in(batch)):
            return call.loss(call.output(tree_map(call.cast, call.parted(batch)[0])), batch)

    def outputs(self, inputs: Any, rows: str) -> Any:
        call, held, own = self.call, None, rows == "own"
        trains = torch.is_grad_enabled()
        OwnLoop.close()
        if trains:
            inputs = tree_map(partial(self._entering, own), inputs)
        if own:
            self.first_batches.note(inputs, own=True)
            try:
                inputs, held = call.batches.own(inputs)
            except UnlikeError as error:
                return self._in_turn(inputs, error)
            self.mesh.put_together.clear()
        batch = call.alone(inputs)
        if trains:
            self._begins_anew()
            self._begins(batch)
        self._laid_out(batch).begin_forward()
        typed = call.batches.typed(inputs)
        with self._counts.of(tensors_in(typed)):
            output = call.output(tree_map(call.cast, typed))
        if trains and self.accumulation is not None:
            self.accumulation.expect()
        self._last_loss, self._is_own = None, own

        def leave(x: Any) -> Any:
            share = 1.0
            if own and type(x) is torch.Tensor and self._is_of_all(x, held):
                x = DTensor.from_local(x, self.mesh)
            if own and isinstance(x, DTensor):
                x, share = call.batches.returned(x, held)
            elif rows == "whole" and isinstance(x, DTensor):
                x = x.full_tensor(grad_placements=[Replicate()] * x.device_mesh.ndim)
            if isinstance(x, torch.Tensor) and x.requires_grad:
                if type(x) is torch.Tensor and is_a_view(x):
                    x = x.clone()  # a program that writes to a view would take the hook away
                with raw():
                    x.register_hook(partial(gone_back, weakref.WeakMethod(self._come_back), share))
            return x

        self.mesh.sums_at_once = True
        given = mapped(leave, output)
        if own and call.batches.readers > 1:
            self._loop.open()
        return given

    def _in_turn(self, inputs: Any, error: UnlikeError) -> Any:
        """What the model gives for this rank's inputs, which make no batch with those of others.

        Raises:
            UnlikeError: gradients could go back through it.
        """
        of_each, here = self.call.batches.of_each(inputs)
        outs = [None if x is None else self.outputs(x, "whole") for x in of_each]
        if any(x.requires_grad for x in tensors_in(outs)):
            raise error
        tell(
            "What ranks give the model is no batch together (first dims that are no rows, other lengths): "
            "without gradients each rank's is computed by all ranks, one after the other. Give tensors "
            "that begin with rows, alike but for their number, and all are computed at once."
        )
        return outs[here]

    def _is_of_all(self, x: torch.Tensor, held: Own | None) -> bool:
        """Whether a plain tensor that the model gives has the rows of all ranks, or what was made of them."""
        has_rows = held is not None and x.shape[:1] == (held.size,)
        return x.requires_grad or (has_rows and all(x is not b for b in self.call.module.buffers()))

    def _taken(self, x: DTensor) -> torch.Tensor:
        """What a loop uses beside this rank's rows, plain."""
        own, share = self.call.batches.beside(x)
        if own.requires_grad:
            with raw():
                own.register_hook(partial(gone_back, weakref.WeakMethod(self._come_back), share))
        return own

    def _entering(self, own: bool, x: Any) -> Any:
        """An input, whose gradient is to be that of the loss that the program sees."""
        factor = self.call.batches.readers if own else 1
        if not isinstance(x, torch.Tensor) or not x.requires_grad or isinstance(x, DTensor):
            return x
        if factor == 1 and self.scaler is None:
            return x
        entering = x.view_as(x)
        entering.register_hook(partial(gone_back, weakref.WeakMethod(self._give_back), factor))
        return entering

    def _give_back(self, grad: torch.Tensor, factor: float) -> torch.Tensor:
        """The gradient of an input, in which the engine's own factors are."""
        return times(grad, factor if self.scaler is None else factor / self.scaler.scale)

    def _come_back(self, grad: torch.Tensor, share: float) -> torch.Tensor:
        """The gradient of an output has come, of a loss made elsewhere."""
        if not self._hooks.is_open:
            self._hooks.come(is_known=True)
            if self.scaler is not None:
                share *= self.scaler.scale
        return times(grad, share)

    def by_hand(self, step: Callable[..., Any], inputs: tuple[Any, ...]) -> Any:
        """What a step gives that goes back, and lets optimizers step, by itself: of this rank's rows, plain.

        Args:
            step: calls parts of the model; it gets the rows of all ranks.
            inputs: this rank's rows.
        """
        OwnLoop.close()
        self._laid_out(inputs).begin_forward()
        batch, held = self.call.batches.own(inputs)

        def leave(x: Any) -> Any:
            if not isinstance(x, DTensor):
                return x
            return self.call.batches.returned(cast(DTensor, x.detach()), held)[0]

        return mapped(leave, step(*tree_map(self.call.cast, batch)))

    def follow(self, x: torch.Tensor) -> None:
        """See :meth:`espalier.Engine.follow`."""
        self._hooks.follow(x)

    def follow_all(self, out: Any) -> None:
        for x in tensors_in(out) if self.data is not None else ():
            if x.grad_fn is not None:  # a parameter is no output
                self.follow(x)

    def train(self, parts: Iterable[Any], phase: Phase, forward: Loss, backward: Backward) -> None:
        with having(self, _is_within=True):
            for part in parts:
                phase("forward")
                loss = forward(part)
                phase("backward")
                backward(loss)
                del loss
        if self.accumulation is not None:
            self.accumulation.closed = True
            self.seen.bar()

    def evaluate(self, parts: Iterable[Any]) -> torch.Tensor:
        return self.averaging.evaluate(parts, self._loss_of)

    def output(self, inputs: Any) -> Any:
        self._laid_out(self.call.alone(inputs)).begin_forward()
        return plain_output(self.call.output(self.call.entered(inputs)))

    def backward(self, loss: torch.Tensor) -> None:
        of_step = self.accumulation
        if self.data is None:
            raise ValueError("There is no loss to go back from: call loss = engine(batch) first.")
        if of_step is not None:
            of_step.check()
            if not self._is_within:
                self.check_kept(of_step)
        check_loss(loss)
        telling = Telling((loss,))
        with self.watch or nullcontext(), self.call.casts or nullcontext(), self._hooks.open():
            if self._tells:
                telling.begin()
            if self.scaler is not None:
                self.scaler.scaled(loss)
            if of_step is None:
                loss.backward()
                self.loss = self._shared(loss.detach())
            else:
                of_step.backward(loss)
                self.loss = self._shared(of_step.loss)
        telling.end()

    @property
    def _tells(self) -> bool:
        """Whether the pass under way lets a loss of the program's own be known."""
        return self._last_loss is None and self._finishes

    def _shared(self, loss: torch.Tensor | None) -> torch.Tensor | None:
        """A loss as it is for all ranks: where each made one of its own rows, their mean."""
        readers = self.call.batches.readers
        if loss is None or not self._is_own or isinstance(loss, DTensor) or readers == 1:
            return loss
        return stamp(loss.reshape(()) / readers, Layout(self.mesh, self.call.batches.addends(), ()))

    def _begin_backward(self, asked: bool) -> None:
        OwnLoop.close()
        of_step = self.accumulation
        assert self.data is not None
        if of_step is not None and not asked:
            if of_step.done and self.are_dropped:  # a program of its own losses has dropped them
                self.forget()
                of_step.expect()
            of_step.check()
        self._finishes = self.is_syncing and (of_step is None or of_step.done == of_step.size - 1)
        self.data.gradients.begin(self._finishes)
        if not asked and self._tells and self.mesh.going:
            self.mesh.going[-1].begin()

    def _end_backward(self, asked: bool) -> None:
        assert self.data is not None
        gradients = self.data.gradients
        if not asked and gradients.is_idle:
            gradients.stop()  # torch.autograd.grad, or a pass of others: no gradients are added
            return
        self.has_gradients = True
        self.loss = self.loss if asked else self._last_loss
        self.data.end_backward()
        self._are_new = True
        if self.accumulation is not None and not asked:
            self.accumulation.pass_by()
        if self.accumulation is not None:
            self.have_passed()
        if self._is_within and self.accumulation is not None:
            return  # what is under way may be so until the step
        if self._finishes:
            self.finish_gradients()
        else:
            gradients.show()

    def _refused(self, is_known: bool = False) -> str:
        """Why a loss must not go back without the engine's being asked, if it must not.

        Args:
            is_known: whether it is made of outputs that :meth:`outputs` gave: those know what the engine does
                with a loss of its own.
        """
        looks = self.call.casts is not None or (
            self.watch is not None and not has_peak(self.mesh.device_type)
        )
        if is_known and not looks:
            return ""
        if self.scaler is not None:
            reason = f"in {self.plan.precision} the engine scales the loss"
        elif self.accumulation is not None:
            reason = f"with Plan(accumulate={self.accumulation.size}) the engine weighs micro-batches"
        elif looks:
            reason = "here the engine looks at the backward pass"
        else:
            return ""
        return f"loss.backward(): {reason}. Write engine.backward(loss) in its place."

    def _have(self) -> bool:
        with raw():
            return any(_grad(p) is not None for p in parameters_in(self.call.module))

    @property
    def has_new(self) -> bool:
        return self._are_new

    def finish(self) -> None:
        assert self.data is not None
        self.seen.admit()
        self.data.gradients.finish()
        if self._are_new:
            self._are_new = False
            self.data.tell_of_gradients()

    def counted(self) -> dict[str, torch.Tensor]:
        assert self.data is not None
        return self.data.counted()

    def riders(self, judge: Judge | None = None) -> list[Rider]:
        riders = loss_riders(self.loss, self.mesh, partial(setattr, self, "loss"))
        if judge is not None and self.loss is not None:
            riders.append(Rider([share_of(self.loss, self.mesh)], lambda sums: judge(sums[0])))
        return riders

    def agree(self) -> None:
        """Nothing: each rank knows."""

    def factor(self) -> torch.Tensor | None:
        return None if self.accumulation is None else self.accumulation.factor()

    @property
    def stages(self) -> Stages:
        raise ValueError(f"There are no stages: {self.plan} has no pipeline, Plan(pipe=...) has.")
