"""The engine: forward, backward, step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from espalier.comm import Ledger
from espalier.comm.verdict import Faults
from espalier.comm.watch import Pulse
from espalier.engine import tables
from espalier.engine.accumulation import Accumulation, Count
from espalier.engine.batches import Batches, loss_of
from espalier.engine.lasting import Lasting
from espalier.engine.live import Watch, watch
from espalier.engine.norm import Norm, clip_of, scale_gradients, share_of
from espalier.engine.predict import called, entered, generate, plain_output
from espalier.engine.recompute import Policy, chosen, recompute
from espalier.engine.runs import Runs
from espalier.engine.scaling import LossScaler
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
from espalier.tensor.dispatch import tensors_in
from espalier.tensor.dry_autocast import DryAutocast
from espalier.tensor.fallback import tree_map
from espalier.tensor.rules.counts import Ahead

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
        self._loss_fn, self._arranged = loss_fn, arranged
        self._recomputed, self._policy = chosen(module, plan), recompute_policy
        self._data: DataAxis | None = None
        self.arrangement: Arrangement | None = None
        self.steps = 0
        self._syncing, self._has_gradients = True, False
        self._watch: Watch | None = None
        # that of this rank's stages, in a pipeline: what one batch's tensors lie on
        self._here = at(mesh, "pipe", mesh.coordinate[0]) if plan.pipe > 1 else mesh
        self._batches = Batches(self._here, plan)
        self._evaluation = Accumulation(plan.accumulate, count, self._here, self._batches.axes)
        self._accumulation = self._evaluation if plan.accumulate > 1 else None
        precision = plan.precision
        self.scaler = LossScaler(precision.loss_scale) if precision.scales else None
        self._casts = DryAutocast() if mesh.is_dry and precision.autocast else None
        self._traffic, self._counts = Traffic(mesh), Ahead()
        self.pulse = Pulse(Faults())
        self._runs = Runs()
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
        if self._accumulation is None:
            return self._forward(batch)
        return self._accumulation.forward(batch, self._forward)

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

        With ``Plan(accumulate=k)`` only the k-th since the last step reduces them, where the stage allows it.
        """
        assert self._data is not None, "call the engine on a batch first"
        of_step, self._has_gradients = self._accumulation, True
        self._data.gradients.begin(self._syncing and (of_step is None or of_step.done == of_step.size - 1))
        with self._watch or nullcontext(), self._casts or nullcontext():
            if self.scaler is not None:
                self.scaler.scaled(loss)
            if of_step is None:
                loss.backward()
                self.loss = loss.detach()
            else:
                of_step.backward(loss)
                self.loss = of_step.loss
            self._data.end_backward()

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

        With ``Plan(accumulate=k)`` that batch ends here, if fewer than k micro-batches are left.
        """
        assert self._data is not None, "call the engine on a batch first"
        self._data.gradients.finish()
        factor = None if self._accumulation is None else self._accumulation.factor()
        if factor is not None:
            scale_gradients([p for p in self.module.parameters() if isinstance(p, DTensor)], factor)

    def step(self) -> bool:
        """Finish the gradients, clip, update, and forget the gradients.

        In float16 nothing is updated if a gradient of any rank has overflowed: then :attr:`scale` falls.
        Nor is it where the :attr:`guard` skips the step.

        Returns:
            whether it updated. With ``Plan(accumulate=k)`` it does so after every k-th backward, or after
            :meth:`finish_gradients`, and nothing else.

        Raises:
            ValueError: there is no optimizer.
            FloatingPointError: gradients overflow at the lowest scale allowed.
            SpikeError: the :attr:`guard` does not let the step be made; nothing was updated.
        """
        if self.optimizer is None:
            raise ValueError("This engine has no optimizer: pass one to initialize(model, optimizer, ...).")
        of_step = self._accumulation
        if of_step is not None and not of_step.complete:
            return False
        assert self._data is not None
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

        finite = True
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
                    self._data.update(self.optimizer, partial(update, factor=factor, runs=runs))
                    if self._watch is not None and self._watch.fit(self._data, self.optimizer):
                        self._watch = None
            arrived()
        finally:
            forget_gradients(self.optimizer)
            self._forget()
            self._traffic.end()
        self.steps += 1
        self.pulse.step = self.steps + 1
        return finite

    def _finished(self) -> dict[str, torch.Tensor]:
        """Of each gradient, finished, what this rank counts in the norm."""
        assert self._data is not None
        self._data.gradients.finish()
        return self._data.counted()

    def _start_norm(
        self, counted: Mapping[str, torch.Tensor]
    ) -> tuple[Callable[[], tuple[torch.Tensor, torch.Tensor | None]], Callable[[], Any]]:
        """What gives norm and loss, when they are there, and what gives the gradients' factor."""
        factor = None if self._accumulation is None else self._accumulation.factor()
        told = () if self.guard is None or self.loss is None else (share_of(self.loss, self.mesh),)
        norm = Norm(list(counted.values()), self.loss, self.mesh, told)

        def wait() -> tuple[torch.Tensor, torch.Tensor | None]:
            if told:  # one number for all ranks, where each has a loss of its own that should be equal
                self._judged = norm.more()[0]
            return norm.wait()

        return wait, lambda: factor

    def _admitted(self, guard: Guard, norm: torch.Tensor, counted: Mapping[str, torch.Tensor]) -> bool:
        loss = self.loss if self._judged is None else self._judged
        value = 0.0 if loss is None else float(loss)
        return guard.admits(self.steps + 1, value, float(norm), counted, self._names, self.mesh)

    def zero_grad(self) -> None:
        """Forget the gradients, and the micro-batches that made them."""
        assert self._data is not None, "call the engine on a batch first"
        self.module.zero_grad(set_to_none=True)
        self._forget()
        self._traffic.end(done=False)

    def _forget(self) -> None:
        """What was known of the gradients."""
        self._laid_out().gradients.forget()
        if self._accumulation is not None:
            self._accumulation.reset()
        self._has_gradients = False

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
        """
        for part in parts:
            phase("forward")
            loss = self.forward(part)
            phase("backward")
            self.backward(loss)
            del loss
        if self._accumulation is not None:
            self._accumulation.closed = True

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
