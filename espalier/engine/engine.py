"""The engine: forward, backward, step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._C import DisableTorchFunctionSubclass as raw

from espalier.comm import Ledger
from espalier.comm.verdict import Faults
from espalier.comm.watch import Pulse
from espalier.engine import tables
from espalier.engine.accumulation import Accumulation, Count
from espalier.engine.batches import Batches, loss_of
from espalier.engine.given import GivenBatches
from espalier.engine.lasting import Lasting
from espalier.engine.live import Watch, watch
from espalier.engine.norm import Norm, clip_of, scale_gradients, share_of
from espalier.engine.passes import Passes, bind
from espalier.engine.predict import called, entered, generate, plain_output
from espalier.engine.recompute import Policy, chosen, recompute
from espalier.engine.runs import Runs
from espalier.engine.scaling import LossScaler
from espalier.engine.seen import SeenGradients
from espalier.engine.spikes import Guard
from espalier.engine.tables import Memory, Order, Traffic
from espalier.engine.update import forget_gradients, lay_out_states, update
from espalier.layout import Layout
from espalier.mesh import Mesh
from espalier.mesh.parts import at
from espalier.parallel import Arrangement, Plan, arrange, lay_out_model
from espalier.parallel.data.axis import DataAxis
from espalier.tensor import DTensor, full_tensor, redistribute
from espalier.tensor.deferred import share_random_state
from espalier.tensor.dry_autocast import DryAutocast
from espalier.tensor.rules.counts import Ahead
from espalier.trees import tensors_in, tree_map

_grad: Any = torch.Tensor.grad
LossFunction = Callable[[Any, Any], torch.Tensor]


class Engine(Lasting):
    """Trains one model under one plan. Made by :func:`initialize`.

    Attributes:
        module: the model given, its parameters now DTensors.
        optimizer: the optimizer given.
        plan: the plan.
        mesh: the mesh.
        loss: of the batch, or of its micro-batches so far, after a backward (detached).
        grad_norm: the global gradient norm before clipping (a plain scalar tensor), after a step.
        steps: that were done, also those that did not update because a gradient had overflowed.
        scaler: scales the loss in float16; None in other precisions.
        guard: judges each step before its update; None where nothing is judged.
        pulse: what this rank is at, for the watch over ranks that die or hang.
        arrangement: the layouts of the parameters, once they are known, and why.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        plan: Plan,
        mesh: Mesh,
        loss_fn: LossFunction | None,
        arranged: Mapping[str, Any],
        max_grad_norm: float | None,
        count: Count | None = None,
        recompute_policy: Policy | None = None,
    ) -> None:
        self.module, self.optimizer, self.plan, self.mesh = module, optimizer, plan, mesh
        self.max_grad_norm = clip_of(plan, max_grad_norm)
        self.grad_norm: torch.Tensor | None = None
        self.loss: torch.Tensor | None = None
        self._given: torch.Tensor | None = None  # of the last call
        self._loss_fn, self._arranged = loss_fn, arranged
        self._recomputed, self._policy = chosen(module, plan), recompute_policy
        self._data: DataAxis | None = None
        self.arrangement: Arrangement | None = None
        self.steps = 0
        self._syncing, self._has_gradients, self._finishes = True, False, True
        self._is_within = False  # accumulate()
        self._watch: Watch | None = None
        # that of this rank's stages, in a pipeline: what one batch's tensors lie on
        self._here = at(mesh, "pipe", mesh.coordinate[0]) if plan.pipe > 1 else mesh
        self._batches = Batches(self._here, plan)
        # a stage may do with a part of the batch
        self._given_batches = GivenBatches(mesh, mesh.coordinate[0] if plan.pipe > 1 else 0, plan.pipe)
        self._evaluation = Accumulation(plan.accumulate, count, self._here, self._batches.axes)
        self._accumulation = self._evaluation if plan.accumulate > 1 else None
        precision = plan.precision
        self.scaler = LossScaler(precision.loss_scale) if precision.scales else None
        self._casts = DryAutocast() if mesh.is_dry and precision.autocast else None
        self._traffic, self._counts = Traffic(mesh), Ahead()
        self.pulse = Pulse(Faults())
        self._runs = Runs()
        self._passes = Passes(
            self._begin_backward, self._end_backward, self._refused_backward, self._have_gradients
        )
        self.is_stepping = False
        self._seen = SeenGradients(module, plan)
        if optimizer is not None:
            bind(optimizer, self)
        self.guard: Guard | None = None
        self._judged: torch.Tensor | None = None
        share_random_state(mesh)

    def lay_out(self, batch: Any = None) -> None:
        """Lay the parameters out; without a batch only if none is needed to know how."""
        if self._data is not None:
            return
        sample = None if batch is None else tree_map(self._sample, self._parted(batch)[0])
        if (found := self._arrange(batch, sample, **self._arranged, rows=self._batches.share(batch))) is None:
            return
        self.arrangement = found
        self._data = lay_out_model(self.module, found, self._here, self.plan, self.optimizer)
        torch.clear_autocast_cache()  # the user's may hold parameters, cast, from when they were whole
        if self._accumulation is not None:
            self._seen.watch(m.p for m in self._data.members)
        if self.plan.pipe == 1:
            self._data.gradients.announce(self._passes.come_late)
        recompute(self.module, self._recomputed, self.plan.recompute_inputs, self._policy)
        if self.optimizer is not None:
            with self._data.updating(exchange=False):
                lay_out_states(self.optimizer)
            self._data.place(self.optimizer)
            self._watch = None if self._data.budget is None else self.watch()

    def _arrange(self, batch: Any, sample: Any, **given: Any) -> Arrangement | None:
        return arrange(self.module, self.plan, self.mesh, batch=sample, **given)

    def watch(self) -> Watch:
        """A watch over the device's memory: ``with watch: ...``, then ``watch.peak`` in bytes.

        It counts what the engine holds and what is computed while it is open. On a CPU what is in the
        ``"host"``'s memory does not count, as if there were a device.
        """
        return watch(self.module, self.optimizer, self._laid_out())

    def _sample(self, x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        device = next(self.module.parameters()).device
        return full_tensor(x)[:1].to(device) if x.ndim else full_tensor(x).to(device)

    # ---- batches

    def batch_rows(self, size: int) -> slice:
        """The rows of a global batch of ``size`` that this rank computes (and needs to load)."""
        return self._batches.rows(size)

    def micro_batches(self, size: int) -> list[tuple[slice, int]]:
        """For each micro-batch of a global batch of ``size`` rows: those this rank computes, and its size."""
        rows = [(start, n, self._batches.rows(n)) for start, n in self._batches.cuts(size)]
        return [(slice(start + own.start, start + own.stop), n) for start, n, own in rows]

    def cut(self, batch: Any) -> list[Any]:
        """A global batch as micro-batches, ``Plan.accumulate`` if it has so many rows.

        Raises:
            ValueError: its tensors don't have the same number of rows.
        """
        return self._batches.cut(batch)

    def local_batch(self, rows: Any, size: int | None = None) -> Any:
        """The rows that this rank has loaded, typed as its part of a global batch.

        Args:
            rows: a tensor, or a dict, tuple or list of them, rows first; None from a rank that has none left
                (then there is no size).
            size: rows of the global batch, of which these are the ``batch_rows(size)``. Without it the ranks
                agree on it by one small message: every rank must call. They may bring different numbers of
                rows: what some have too many goes to others.

        Returns:
            the global batch; None on every rank if no rank has rows left.

        Raises:
            ValueError: these are not the rows of ``size``; or, on every rank, the ranks' batches do not fit
                together.
        """
        return self._batches.gathered(rows) if size is None else self._batches.local(rows, size)

    def _parted(self, batch: Any) -> tuple[Any, Any]:
        """What the model is called on, and what the loss function gets beside its output."""
        if self._loss_fn is not None and isinstance(batch, tuple | list) and len(batch) == 2:
            return batch[0], batch[1]
        return batch, batch

    def _cast(self, x: Any) -> Any:
        """An input as the model computes: floats in the dtype of its parameters, where these are cast."""
        low = self.plan.precision.parameters
        floats = low is not None and isinstance(x, torch.Tensor) and x.is_floating_point()
        return x.to(getattr(torch, str(low))) if floats else x

    def _autocast(self) -> AbstractContextManager[Any]:
        """What the forward pass runs under."""
        if (name := self.plan.precision.autocast) is None:
            return nullcontext()
        dtype = getattr(torch, name)
        return self._casts.autocast(dtype) if self._casts else torch.autocast(self.mesh.device_type, dtype)

    @property
    def scale(self) -> float:
        """By which the loss is multiplied before a backward pass, and so the gradients until the step."""
        return 1.0 if self.scaler is None else self.scaler.scale

    @property
    def skipped(self) -> int:
        """Steps that did not update because a gradient had overflowed."""
        return 0 if self.scaler is None else self.scaler.skipped

    # ---- the three calls, and one for all

    def __call__(self, batch: Any) -> torch.Tensor:
        """The loss of a batch: a scalar, the same on every rank (``loss.item()`` is no collective).

        Args:
            batch: plain tensors are the *global* batch, equal on all ranks, and are cut; what
                :meth:`local_batch` gave is taken as it is. With ``Plan(accumulate=k)`` it is one micro-batch.

        Raises:
            ValueError: there is no loss, or it is not one number; what it is a mean over cannot be seen
                (``accumulate`` above 1).
        """
        loss = self.forward(batch)
        if not isinstance(loss, DTensor):
            return loss
        return redistribute(loss, Layout.replicated(self.mesh, loss.shape))

    def forward(self, batch: Any) -> torch.Tensor:
        """As a call, but the loss may still be Partial: :meth:`step` adds :attr:`loss` up with the norm."""
        if torch.is_grad_enabled() and self.optimizer is not None:
            self._traffic.begin()
            self._given_batches.note(batch)
        of_step = self._accumulation
        loss = self._forward(batch) if of_step is None else of_step.forward(batch, self._forward)
        if loss.requires_grad:
            self.follow(loss)
            self._given = loss.detach()
        return loss

    def follow(self, x: torch.Tensor) -> None:
        """Let a backward pass through a tensor, made of this engine's model, be one of the engine's.

        As through the loss that a call gives: whoever calls ``backward``, gradients are finished after it.
        """
        self._passes.follow(x)

    def evaluate(self, parts: Iterable[Any]) -> torch.Tensor:
        """The loss of several batches as one, without gradients: a plain scalar, the same on every rank.

        Args:
            parts: batches, as the engine is called on them; each weighs by what its loss is a mean over.

        Raises:
            ValueError: that cannot be seen, or there is none.
        """
        with torch.no_grad():
            return self._evaluation.evaluate(parts, self._forward)

    @torch.no_grad()
    def predict(self, inputs: Any) -> Any:
        """What the model gives, without gradients: its output, with plain whole tensors, on every rank.

        Args:
            inputs: of the model, equal on all ranks: a dict (keywords), a tuple or list, or a tensor.
        """
        self.lay_out(inputs if self._loss_fn is None else (inputs, None))
        return self._output(entered(self, dict(inputs) if isinstance(inputs, Mapping) else inputs))

    def _output(self, inputs: Any) -> Any:
        assert self._data is not None
        self._data.begin_forward()
        return plain_output(called(self, inputs))

    def generate(self, ids: torch.Tensor, max_new_tokens: int, **options: Any) -> torch.Tensor:
        """Continue ``ids`` [batch, sequence], equal on all ranks: ``model(input_ids=...).logits`` says how.

        ``options``: see :func:`espalier.models.generate`.
        """
        return generate(self, ids, max_new_tokens, **options)

    def _forward(self, batch: Any) -> torch.Tensor:
        self.lay_out(batch)
        assert self._data is not None
        self._data.begin_forward()
        batch = self._batches.typed(batch)
        inputs, targets = self._parted(batch)
        with self._counts.of(tensors_in(batch)):
            output = called(self, tree_map(self._cast, inputs))
            with self._autocast():
                return self._loss_in(output, targets)

    def _loss_in(self, output: Any, targets: Any) -> torch.Tensor:
        """The loss of what the model gives."""
        loss = self._loss_fn(output, targets) if self._loss_fn is not None else loss_of(output)
        if loss.numel() != 1:
            raise ValueError(
                f"The loss has the shape {list(loss.shape)}, expected one number. "
                "Reduce it in the model, or pass loss_fn= to initialize."
            )
        return loss

    def backward(self, loss: torch.Tensor) -> None:
        """Gradients of the loss; their reduction over the data axis goes on meanwhile.

        After it every ``p.grad`` is the gradient of the whole batch, times :attr:`scale`, and what there was
        before is added to. ``loss.backward()`` does the same, where neither :attr:`scale` nor ``accumulate``
        ask for more. With ``Plan(accumulate=k)`` only the k-th since the last step reduces gradients, where
        the stage allows it.

        Raises:
            ValueError: there was no batch yet; or, with ``accumulate``, it is not one micro-batch's loss.
        """
        of_step = self._accumulation
        if self._data is None:
            raise ValueError("There is no loss to go back from: call loss = engine(batch) first.")
        if of_step is not None:
            of_step.check()
            self._check_kept(of_step)
        with self._watch or nullcontext(), self._casts or nullcontext(), self._passes.open():
            if self.scaler is not None:
                self.scaler.scaled(loss)
            if of_step is None:
                loss.backward()
                self.loss = loss.detach()
            else:
                of_step.backward(loss)
                self.loss = of_step.loss

    def _check_kept(self, of_step: Accumulation) -> None:
        """See that the gradients of a step's micro-batches so far are there."""
        if of_step.done and not self._is_within and not self._shows_gradients():
            raise ValueError(
                f"zero_grad() after {of_step.done} of Plan(accumulate={of_step.size}) micro-batches has "
                "dropped their gradients. Leave it out: engine.step() drops them when it has updated. To "
                "begin anew, call engine.zero_grad()."
            )

    def _begin_backward(self) -> None:
        of_step = self._accumulation
        assert self._data is not None
        is_last = of_step is None or of_step.done == of_step.size - 1
        self._data.gradients.begin(self._syncing and is_last)
        self._finishes = self._syncing and is_last

    def _end_backward(self, asked: bool) -> None:
        assert self._data is not None
        gradients = self._data.gradients
        if not asked and gradients.is_idle:
            gradients.stop()  # torch.autograd.grad, or a pass of others: no gradients are added
            return
        self._has_gradients = True
        self.loss = self.loss if asked else self._given
        self._data.end_backward()
        if self._is_within and self._accumulation is not None:
            return  # what is under way may be so until the step
        if self._finishes:
            self.finish_gradients()
        else:
            gradients.show()

    def _refused_backward(self) -> str:
        """Why a loss must not go back without the engine's being asked, if it must not."""
        if self.scaler is not None:
            reason = f"in {self.plan.precision} the engine scales the loss"
        elif self._accumulation is not None:
            reason = f"with Plan(accumulate={self._accumulation.size}) the engine weighs micro-batches"
        elif self._casts is not None or (self._watch is not None and self.mesh.device_type != "cuda"):
            reason = "here the engine looks at the backward pass"
        else:
            return ""
        return f"loss.backward(): {reason}. Write engine.backward(loss) in its place."

    def _have_gradients(self) -> bool:
        with raw():
            return any(_grad.__get__(p) is not None for p in self.module.parameters())

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes in here only accumulate; the next one outside reduces for all."""
        before, self._syncing = self._syncing, False
        try:
            yield
        finally:
            self._syncing = before

    def finish_gradients(self) -> None:
        """Wait until every ``p.grad`` is the gradient of the whole batch, times :attr:`scale`.

        After :meth:`no_sync`; or with ``Plan(accumulate=k)``, whose batch ends here if fewer than k
        micro-batches are left.
        """
        if self._data is None or not self._may_step():
            raise ValueError(
                "engine.finish_gradients(): there are no gradients. Call loss = engine(batch) and "
                "engine.backward(loss) first."
            )
        self._seen.admit()
        self._data.gradients.finish()
        factor = None if self._accumulation is None else self._accumulation.factor()
        if factor is not None:
            scale_gradients([p for p in self.module.parameters() if isinstance(p, DTensor)], factor)
        self._seen.note()

    def step(self) -> bool:
        """Finish the gradients, clip, update, and forget the gradients.

        In float16 nothing is updated if a gradient of any rank has overflowed: then :attr:`scale` falls.
        Nor is it where the :attr:`guard` skips the step.

        ``optimizer.step()`` does the same, and leaves gradients for ``zero_grad()`` to drop, where they don't
        stand in the parameters' memory and ``accumulate`` is 1.

        Returns:
            whether it updated. With ``Plan(accumulate=k)`` it does so after every k-th backward, or after
            :meth:`finish_gradients`, and nothing else.

        Raises:
            ValueError: there is no optimizer, or no gradient.
            FloatingPointError: gradients overflow at the lowest scale allowed.
            SpikeError: the :attr:`guard` does not let the step be made; nothing was updated.
        """
        if self.optimizer is None:
            raise ValueError("This engine has no optimizer: pass one to initialize(model, optimizer, ...).")
        if not self._may_step():
            raise ValueError(
                "engine.step(): there are no gradients since the last step. Call loss = engine(batch) and "
                "engine.backward(loss) first."
            )
        of_step = self._accumulation
        if of_step is not None and not of_step.complete:
            return False
        return self._step(self.optimizer)

    def _may_step(self) -> bool:
        """Whether there are gradients: of a backward pass, or given by hand."""
        return self._has_gradients or self._shows_gradients()

    def _holds_gradients(self) -> bool:
        """Whether a step is begun: nobody has dropped its gradients."""
        return self._has_gradients and (self._seen.is_barred or self._shows_gradients())

    def _shows_gradients(self) -> bool:
        """Whether a parameter shows a gradient, or a piece of one, to the program."""
        return any(p.grad is not None for p in self.module.parameters())

    def step_in_loop(self) -> bool:
        """A step that the program has asked the optimizer for; False: there is nothing to update.

        Raises:
            ValueError: see :meth:`step`; the micro-batches of a step are not all there.
        """
        of_step = self._accumulation
        if self.optimizer is None or self._data is None or not self._may_step():
            return False
        if of_step is not None and not of_step.complete:
            raise ValueError(
                f"optimizer.step() after {of_step.done} of Plan(accumulate={of_step.size}) micro-batches. "
                "Write engine.step() in its place, after each: it updates after the last one, says so, and "
                "drops the gradients then. Or call engine.finish_gradients() first, if the batch ends here."
            )
        self._step(self.optimizer, keep=of_step is None and self.plan.gradients != "in-place")
        return True

    def _step(self, optimizer: torch.optim.Optimizer, keep: bool = False) -> bool:
        """:meth:`step`; gradients stay if they are to be kept."""
        assert self._data is not None
        self._seen.check()
        counted = self._finished()
        wait, given = self._start_norm(counted)
        if self.scaler is not None:
            given = self.scaler.divided(given)

        def arrived() -> torch.Tensor:
            self.grad_norm, self.loss = wait()
            factor = given()
            if factor is not None:
                self.grad_norm = self.grad_norm * factor
            return self.grad_norm

        finite = self.is_stepping = True
        if self.guard is not None:
            self.guard.told = ""
        if self.scaler is not None:
            finite = self.scaler.update(arrived(), counted, self._names, self.mesh)
        try:
            if finite and self.guard is not None and not self.mesh.is_dry:
                finite = self._admitted(self.guard, arrived(), counted)
            del counted
            factor = given()
            if self.max_grad_norm is not None:
                clip = (self.max_grad_norm / (arrived() + 1e-6)).clamp(max=1.0)
                factor = clip if factor is None else clip * factor
            with self._watch or nullcontext():
                if finite:
                    self.wait_staged()
                    runs = self._runs if self._data.streaming is None else None
                    self._data.update(optimizer, partial(update, factor=factor, runs=runs), keep)
                    if self._watch is not None and self._watch.fit(self._data, optimizer):
                        self._watch = None
            arrived()
        finally:
            self.is_stepping = False
            self._has_gradients = False
            if keep:
                self._data.gradients.settle()
            else:
                forget_gradients(optimizer)
                self._forget()
            self._traffic.end()
        self.steps += 1
        self.pulse.step = self.steps + 1
        return finite

    def _finished(self) -> dict[str, torch.Tensor]:
        """Of each gradient, finished, what this rank counts in the norm."""
        assert self._data is not None
        self._seen.admit()
        self._data.gradients.finish()
        return self._data.counted()

    def _start_norm(
        self, counted: Mapping[str, torch.Tensor]
    ) -> tuple[Callable[[], tuple[torch.Tensor, torch.Tensor | None]], Callable[[], Any]]:
        """What gives norm and loss, when they are there, and what gives the gradients' factor."""
        factor = None if self._accumulation is None else self._accumulation.factor()
        told = [] if self.guard is None or self.loss is None else [share_of(self.loss, self.mesh)]
        given = self._given_batches.shares()
        norm = Norm(list(counted.values()), self.loss, self.mesh, [*told, *given])
        self._compare(norm.more()[len(told) :] if given else ())

        def wait() -> tuple[torch.Tensor, torch.Tensor | None]:
            if told:  # one number for all ranks, where each has a loss of its own that should be equal
                self._judged = norm.more()[0]
            return norm.wait()

        return wait, lambda: factor

    def _compare(self, sums: Sequence[torch.Tensor]) -> None:
        """See that ranks were given the same batches, by what they say of them.

        Raises:
            ValueError: on all ranks; there are no gradients then.
        """
        if sums:
            try:
                self._given_batches.check(sums)
            except ValueError:
                self.zero_grad()
                raise

    def _admitted(self, guard: Guard, norm: torch.Tensor, counted: Mapping[str, torch.Tensor]) -> bool:
        loss = self.loss if self._judged is None else self._judged
        value = 0.0 if loss is None else float(loss)
        return guard.admits(self.steps + 1, value, float(norm), counted, self._names, self.mesh)

    def zero_grad(self) -> None:
        """Forget the gradients, and the micro-batches that made them."""
        self._seen.forget()
        self.module.zero_grad(set_to_none=True)
        if self._data is not None:
            self._forget()
        self._traffic.end(done=False)

    def _forget(self) -> None:
        """What was known of the gradients."""
        self._laid_out().gradients.forget()
        if self._accumulation is not None:
            self._accumulation.reset()
        self._has_gradients = False
        self._seen.forget()

    def train_step(self, batch: Any) -> torch.Tensor:
        """Forward, backward, step, on the batch's rows in ``Plan.accumulate`` micro-batches.

        Returns:
            the loss of the whole batch, detached.
        """
        self.accumulate(self.cut(batch))
        self.step()
        assert self.loss is not None
        return self.loss

    def accumulate(self, parts: Iterable[Any], phase: Callable[[str], Any] = lambda name: None) -> None:
        """Forward and backward of all micro-batches of a step: :meth:`step` is next.

        Args:
            parts: what :meth:`cut` gives, or of each of the :meth:`micro_batches` the :meth:`local_batch`.
            phase: is told when a ``"forward"`` and when a ``"backward"`` begins.

        With ``Plan(accumulate=...)`` ``p.grad`` can be read after :meth:`finish_gradients`.
        """
        self._is_within = True
        try:
            for part in parts:
                phase("forward")
                loss = self.forward(part)
                phase("backward")
                self.backward(loss)
                del loss
        finally:
            self._is_within = False
        if self._accumulation is not None:
            self._accumulation.closed = True
            self._seen.bar()

    def masters(self) -> list[torch.Tensor]:
        """The float32 masters on this rank, in flat buffers; none where parameters are not cast."""
        if self._data is None:
            return []
        return [chunk.master for chunk in self._data.chunks if chunk.master is not None]

    # ---- what there is to know

    def memory(self) -> Memory:
        """What this rank holds now: parameters, gradients, states, ...; printed, a table.

        Gradients are there from the backward pass (whose last sums :meth:`finish_gradients` waits for) to the
        step, states from the first step on.
        """
        return tables.memory(self.module, self.optimizer, self._laid_out(), str(self.plan))

    def order(self) -> Order:
        """The chunks that move along the data axis in a step, in their order; printed, a table."""
        return tables.order(self._laid_out())

    def ledger(self) -> Ledger:
        """What crossed which axis in the last step that was recorded; printed, a table.

        The first two steps are (the second is like all that follow), and those that begin within
        :meth:`recording`; others pay nothing.

        Raises:
            ValueError: there was no step yet.
        """
        if self._traffic.last is None:
            raise ValueError("No step was recorded yet: call engine.ledger() after engine.step().")
        return self._traffic.last

    def recording(self) -> AbstractContextManager[None]:
        """While open, the ledger of each step that begins is kept."""
        return self._traffic.asked()

    def _laid_out(self) -> DataAxis:
        if self._data is None:
            raise ValueError(
                "How the parameters lie is inferred from the first batch, and there was none yet. Before "
                "this, pass one as initialize(..., example=batch), or call engine.lay_out(batch)."
            )
        return self._data

    @property
    def resized(self) -> list[torch.UntypedStorage]:
        """Storages that are emptied and filled as their parameters are used."""
        return [] if self._data is None else self._data.resized


__all__ = ["Engine", "LossFunction"]
