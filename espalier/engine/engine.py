"""The engine: forward, backward, step; and what of it outlives it."""

from __future__ import annotations

import json
import os
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.utils.data import Dataset

from espalier.blocks import named_parameters_in, parameters_in
from espalier.checkpoint import Index, Lying, Saver
from espalier.comm import Ledger
from espalier.engine import report
from espalier.engine.accumulation import Count
from espalier.engine.beside import beside_model, counted_beside, held_beside, make_equal
from espalier.engine.checkpointing import (
    EngineState,
    WeightsFormat,
    await_before_handing_out,
    export,
    gradients_of,
    held,
    index_and_tree,
    load_weights,
    named_values,
    set_parameters,
    state_of,
    take_state,
    whole_values,
)
from espalier.engine.compiling import compilable, compile_blocks
from espalier.engine.counting import tell_libraries
from espalier.engine.full_model import full_copy
from espalier.engine.given import Rows, check_export, check_prompt, check_rows, name_own, rows_in
from espalier.engine.loader import Loader, Orders
from espalier.engine.loads import Loads
from espalier.engine.model_call import LossFunction, ModelCall
from espalier.engine.norm import Guard, Judgement, LossScaler, Norm, Rider, clip_of
from espalier.engine.passes import Direct, Judge, Passes, Phase
from espalier.engine.recompute import Policy, chosen, recompute
from espalier.engine.report import Memory, MoveOrder, PeakMemory, follow_peak
from espalier.engine.seen import give_back, held_gradients
from espalier.engine.staged import Staged
from espalier.engine.states import lay_out_states, sum_states
from espalier.engine.steps import bind, tell_of_others
from espalier.engine.surface import AsModel, Surface, bound
from espalier.engine.tied import refuse_shared, tell_of_shared
from espalier.engine.together import finish_together, follow_leader, settle_together
from espalier.engine.update import (
    FlatParams,
    check_closures,
    check_optimizer,
    check_plan_of_closures,
    forget_gradients,
    steps_by_closure,
    update_model,
)
from espalier.faults.watchdog import Watchdog
from espalier.layout import Layout
from espalier.mesh import Mesh
from espalier.mesh.parts import at
from espalier.models.sampling import generate as continued
from espalier.models.sampling import keepers
from espalier.parallel import Arrangement, Plan, lay_out_model
from espalier.parallel.compose import Stages
from espalier.parallel.data.residency import Carried
from espalier.parallel.data.zero import ZeroState
from espalier.parallel.pipeline import Timeline
from espalier.parallel.pipeline.arguments import cloned
from espalier.parallel.several import Optimizers, Several, as_one, parts_of
from espalier.tensor import DTensor, redistribute
from espalier.tensor.asked import apart
from espalier.tensor.compiled import Backend
from espalier.tensor.deferred import share_random_state
from espalier.tensor.meshes import lie_in_each_stage
from espalier.tensor.observers import tell
from espalier.tensor.told import as_addends
from espalier.tensor.uncompiled import follow_compiler
from espalier.torch_private import parametrized_values


class Engine(Surface):
    """Trains one model under one plan. Made by :func:`initialize`.

    It answers to the names of ``nn.Module`` that programs use: ``train()``, ``eval()``, ``parameters()``,
    ``state_dict()``, ``load_state_dict()``, ``device`` and their kin.

    With ``Plan(pipe=...)`` a step is made by :meth:`train_step`, or by :meth:`accumulate` and :meth:`step`.

    Attributes:
        module: the model given, its parameters now DTensors.
        optimizer: the optimizer given; several as one :class:`Several`, whose ``parts`` they are.
        plan: the plan.
        mesh: the mesh.
        grad_norm: the global gradient norm before clipping (a plain scalar tensor), after a step.
        steps: that were done, also those that did not update because a gradient had overflowed.
        scaler: scales the loss in float16; None in other precisions.
        guard: judges each step before its update; None where nothing is judged.
        passes: how micro-batches go through the model, and the gradients that come of them.
        arrangement: the layouts of the parameters, once they are known, and why.
        gives_whole_states: whether ``state_dict()`` of its optimizers has whole plain tensors on every rank
            (a collective), as that of an :class:`EngineModule`; else it has this rank's parts, as that of
            :attr:`module`.
        gives_own_rows: whether what it has given is of this rank's rows alone.
        led: engines of other models whose parameters its optimizer has, too.
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
        self.arrangement: Arrangement | None = None
        self.steps = 0
        self.scaler = LossScaler(plan.precision.loss_scale) if plan.precision.scales else None
        self.guard: Guard | None = None
        self.is_stepping = self.gives_whole_states = self.gives_own_rows = False
        self.led: list[Engine] = []
        self._leader: Engine | None = None  # which makes the steps of its optimizer in its place
        self._arranged, self._policy, self._recomputed = arranged, recompute_policy, chosen(module, plan)
        kind: type[Passes] = Direct
        here = mesh
        if plan.pipe > 1:
            kind, here = Staged, at(mesh, "pipe", mesh.coordinate[mesh.axis("pipe")])
        self._call = ModelCall(module, plan, here, loss_fn)
        trains = optimizer is not None
        self._compiled: list[nn.Module] = []
        self._undo_recompute: Callable[[], None] = lambda: None
        self._runs: FlatParams | None = None
        self._peaks = weakref.WeakSet[PeakMemory]()
        self._judgement: Judgement | None = None  # of gradients that stay
        self.passes = kind(self._call, mesh, count, self.scaler, trains, self.lay_out)
        self._saver: Saver | None = None
        self._loaders: tuple[Loader, ...] = ()
        self._loads = Loads()
        if optimizer is not None:
            self._bind(optimizer)
        self._drew_apart = share_random_state(mesh)
        follow_compiler(self)

    def _bind(self, added: torch.optim.Optimizer) -> None:
        """Let steps of an optimizer, of each of several, and of all that there are, be the engine's."""
        self._leader = follow_leader(added, self)
        if self._leader is not None:
            return
        make_equal([p for p in beside_model(self.module, added) if type(p) is not DTensor], self.mesh)
        for part in {self.optimizer or added, *parts_of(added)}:
            if steps_by_closure(part):
                part.register_step_post_hook(partial(_count, weakref.ref(self)))
            else:
                bind(part, self)

    def step_by_closure(self, optimizer: torch.optim.Optimizer, step: Callable[[], Any]) -> Any:
        """A step that calls a closure after it has changed parameters: the optimizer's own, of whole ones.

        Raises:
            ValueError: the plan has what only the engine's own step knows how to take.
        """
        check_plan_of_closures(optimizer, self.plan, stages=True)
        out = step()
        self._count_step()
        return out

    def _count_step(self) -> None:
        """A step was made by the optimizer alone."""
        self.steps += 1
        self.passes.updates += 1
        self.passes.has_gradients = False
        self.pulse.step = self.steps + 1

    def attach(self, optimizer: Optimizers, *, instead: bool = False) -> None:
        """Train with an optimizer, or several, made after the engine on the engine's parameters.

        It goes beside those that are there, and has other parameters.

        Args:
            instead: it takes their place.

        Raises:
            ValueError: its parameters are not the model's, or another's; states lie off the device already.
        """
        added = as_one(optimizer)
        check_optimizer(added, self.module, self.plan)
        before = [] if self.optimizer is None or instead else parts_of(self.optimizer)
        whole = Several([*before, *parts_of(added)]) if before else added
        check_closures(whole, self.plan)
        if self.passes.updates and self._data is not None and self._data.offloaded_step is not None:
            raise ValueError(
                f"engine.attach({type(added).__name__}): states of the optimizers lie off the device already "
                f"({self.plan}). Attach all optimizers before the first step."
            )
        self.optimizer, self._judgement = whole, None
        self.passes.train_from_now()
        self._bind(added)
        if self._data is not None:
            self._data.reserve(whole)
            self._begin_updates(added, self._data)

    def has_optimizer(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether it steps this optimizer, alone or beside others."""
        return self.optimizer is not None and optimizer in (self.optimizer, *parts_of(self.optimizer))

    def resize(self, accumulate: int) -> None:
        """Let steps have another number of micro-batches from now on, as if the plan had said so.

        Raises:
            ValueError: a step is begun, or no plan has so many.
        """
        if self.passes.may_step:
            raise ValueError(
                f"engine.resize({accumulate}): a step is begun. Call it behind engine.step() or zero_grad()."
            )
        self.plan = Plan(**{**dict(self.plan), "accumulate": accumulate})
        self.passes.resize(accumulate)

    def compile(self, backend: str | Backend = "inductor") -> None:
        """Compile each block of the model, as ``initialize(..., compile=backend)`` does."""
        self._compile(compilable(self.module, self.plan), backend)

    def _compile(self, blocks: Sequence[nn.Module], backend: str | Backend) -> None:
        """Let each of these be one graph, before whose calls all is gathered that they are cut of."""
        self._undo_recompute()  # a graph stands within, and runs again
        compile_blocks(self.module, blocks, self.plan, self._recomputed, backend, self._policy)
        self._compiled += blocks
        if self._data is not None:
            self._data.gather_before(blocks)
            self._recompute()

    def lay_out(self, batch: Any = None, layouts: Mapping[str, str] | None = None) -> None:
        """Lay the parameters out; without a batch only if none is needed to know how.

        Args:
            layouts: in place of those that :func:`espalier.initialize` was given.
        """
        if self._data is not None:
            return
        if torch.is_inference_mode_enabled():  # parameters are to be trained
            with torch.inference_mode(False), torch.no_grad():
                return self.lay_out(cloned(batch), layouts)
        arranged = self._arranged if layouts is None else {**self._arranged, "table": layouts}
        arrangement = self.passes.arrange(batch, **arranged)
        if arrangement is None:
            return
        self.arrangement = arrangement
        refuse_shared(self.module)
        tell_of_shared(self.module)
        tell_libraries(self)
        gradients = held_gradients(self.module) if self.gives_whole_states else []
        data = lay_out_model(self.module, arrangement, self._call.mesh, self.plan, self.optimizer)
        self.passes.data = data
        parametrized_values().clear()  # they were made of what parameters were before
        data.gather_before(self._compiled)
        self._recompute()
        if self.optimizer is not None:
            self._begin_updates(self.optimizer, data)
        self.passes.begin(data)
        give_back(gradients)

    def _recompute(self) -> None:
        inputs, policy = self.plan.recompute_inputs, self._policy
        self._undo_recompute = recompute(self.module, self._recomputed, inputs, policy)

    def _begin_updates(self, optimizer: torch.optim.Optimizer, data: ZeroState) -> None:
        """The model and its optimizer are there: states lie as the plan says."""
        lay_out_states(optimizer, data, self._whole_among, self.plan.precision.parameters is not None)
        if data.offloaded_step is None:
            self._runs = FlatParams(data.rooms)
        self.passes.watch = None if data.budget is None else self.watch()

    def _whole_among(self) -> Mesh | None:
        return self.mesh if self.gives_whole_states and not self.mesh.is_dry else None

    @property
    def _data(self) -> ZeroState | None:
        return self.passes.data

    def _to_fill(self) -> ZeroState | None:
        """What loads fill; None before the first batch, if that says how parameters lie: the plain model."""
        self.lay_out()
        if self._data is None and not any(x.is_meta for x in parameters_in(self.module)):
            return None
        return self._laid_out()

    def _laid_out(self) -> ZeroState:
        if self._data is None:
            raise ValueError(
                "How the parameters lie is inferred from the first batch, and there was none yet. Before "
                "this, pass one as initialize(..., example=batch), or call engine.lay_out(batch)."
            )
        return self._data

    @property
    def stages(self) -> Stages:
        """The model as the stages of a pipeline, and what runs them.

        Raises:
            ValueError: it was not laid out yet, or the plan has none.
        """
        return self.passes.stages

    @property
    def loss(self) -> torch.Tensor | None:
        """Of the batch, or of its micro-batches so far, after a backward (detached)."""
        return self.passes.loss

    @property
    def pulse(self) -> Watchdog:
        """What this rank is at, for the watch over ranks that die or hang."""
        return self.passes.pulse

    # ---- batches

    def batch_rows(self, size: int) -> slice:
        """The rows of a global batch of ``size`` that this rank computes (and needs to load)."""
        return self._call.batches.rows(rows_in(size))

    def micro_batches(self, size: int) -> list[tuple[slice, int]]:
        """For each micro-batch of a global batch of ``size`` rows: those this rank computes, and its size."""
        rows = [(start, n, self._call.batches.rows(n)) for start, n in self._call.batches.cuts(rows_in(size))]
        return [(slice(start + own.start, start + own.stop), n) for start, n, own in rows]

    def cut(self, batch: Any) -> list[Any]:
        """A global batch as micro-batches, ``Plan.accumulate`` if it has so many rows.

        Raises:
            ValueError: its tensors don't have the same number of rows.
        """
        return self._call.batches.cut(batch)

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
        batches = self._call.batches
        batch = batches.gathered(rows) if size is None else batches.local(rows, size)
        if self.plan.pipe > 1:
            lie_in_each_stage(batch, self.mesh)
        return batch

    def loader(
        self,
        dataset: Dataset[Any],
        batch_size: int = 1,
        shuffle: bool = False,
        *,
        seed: int | Orders = 0,
        drop_last: bool = False,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        **options: Any,
    ) -> Loader:
        """Global batches of a dataset; each rank loads its rows, and :meth:`save` knows where they stand.

        Iterating gives an epoch's batches, as :meth:`local_batch` gives them: for a call of the engine,
        :meth:`train_step` or the like. After :meth:`load` it goes on behind the last batch that was given
        before the save, on any number of ranks. Make it before :meth:`load`; of several, in the same order.

        Args:
            dataset: has ``__len__`` and ``__getitem__``, the same on all ranks.
            batch_size: rows of the global batch.
            shuffle: draw the rows of each epoch in another order.
            seed: of these orders; or a function that gives, when an epoch begins, the state of a
                ``torch.Generator`` whose ``randperm`` is its order, the same on all ranks.
            drop_last: leave out what is left at an epoch's end; else it is a smaller batch.
            collate_fn: makes a batch of a list of rows, as for torch's ``DataLoader``. What it makes on one
                rank must fit what it makes on the others: pad to one length.
            options: further ones of torch's ``DataLoader``, as ``num_workers``.

        Raises:
            ValueError: the dataset has no length, or ``options`` say how rows are drawn.
        """
        self._loads.tell_of_late()
        loader = Loader(
            self.local_batch,
            self.batch_rows,
            self._call.batches.parts,
            dataset,
            batch_size,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
            collate_fn=collate_fn,
            options=options,
        )
        self._loaders = (*self._loaders, loader)
        return loader

    # ---- the three calls, and one for all

    def __call__(self, *batch: Any, **named: Any) -> Any:
        """The loss of a batch: a scalar, the same on every rank (``loss.item()`` is no collective).

        Args:
            batch: plain tensors are the *global* batch, equal on all ranks, and are cut; what
                :meth:`local_batch` gave is taken as it is. With ``Plan(accumulate=k)`` it is one micro-batch.
                Several arguments, or ``named`` ones, are the model's own: ``engine(**batch)`` gives what the
                model gives, as :meth:`outputs` does.

        In a pipeline the loss is computed when it goes back, and its value, if it is asked for before, in a
        forward pass of its own, for which all ranks must ask.

        Raises:
            ValueError: there is no loss, or it is not one number; what it is a mean over cannot be seen
                (``accumulate`` above 1).
        """
        if named or len(batch) != 1:
            return self.outputs(bound(self.module, batch, named))
        loss = self.forward(batch[0])
        if not isinstance(loss, DTensor):
            return loss
        return redistribute(loss, Layout.replicated(self.mesh, loss.shape))

    def forward(self, batch: Any) -> torch.Tensor:
        """As a call, but the loss may still be Partial: :meth:`step` adds :attr:`loss` up with the norm."""
        return self.passes.forward(batch)

    def outputs(self, inputs: Any, rows: Rows = "all") -> Any:
        """What the model gives, for a program that makes the loss itself: ``loss.backward()`` goes back.

        So does :meth:`backward`. In float16 gradients are scaled where they enter the model. With
        ``Plan(accumulate=k)`` each call is a micro-batch; all count alike if losses go back by themselves.

        Args:
            inputs: of the model: a dict (keywords), a tuple or list, or a tensor.
            rows: ``"all"``: plain tensors are the global batch, equal on all ranks, and outputs are DTensors,
                global too. ``"whole"``: the same, but outputs are plain and whole on every rank.
                ``"own"``: plain tensors are this rank's rows, as many as it likes, and outputs are plain, of
                these rows alone; the ranks' losses are averaged. Ranks that differ on no axis that shares the
                batch give the same rows. Outputs without dims (the model's own loss) are of the whole batch.

        In a pipeline outputs are not there before the backward passes begin: what is given stands for them
        (:class:`~espalier.engine.awaited.Awaited`), keeps what is made of it, and does it when the loss goes
        back. Under ``torch.no_grad()`` outputs are plain there.
        """
        if check_rows(rows) == "own" and self._drew_apart:
            self._tell_of_draws()
        self.gives_own_rows |= rows == "own"
        tell_libraries(self)
        return self.passes.outputs(dict(inputs) if isinstance(inputs, Mapping) else inputs, rows)

    def _tell_of_draws(self) -> None:
        self._drew_apart = False
        tell(
            "This rank had drawn other random numbers than rank 0, or was seeded apart (manual_seed(seed + "
            "rank)), when the model was laid out. From then on all ranks draw rank 0's, so that what the "
            "model's forward draws is the same. What each rank is to draw for its own rows (noise, steps of "
            "a diffusion) take from a generator of its own: torch.Generator().manual_seed(seed + rank)."
        )

    def follow(self, x: torch.Tensor) -> None:
        """Let a backward pass through a tensor, made of this engine's model, be one of the engine's.

        As through the loss that a call gives: whoever calls ``backward``, gradients are finished after it.
        """
        self.passes.one_by_one("engine.follow(x)").follow(x)

    @torch.no_grad()
    def evaluate(self, parts: Iterable[Any]) -> torch.Tensor:
        """The loss of several batches as one, without gradients: a plain scalar, the same on every rank.

        Args:
            parts: batches, as the engine is called on them; each weighs by what its loss is a mean over. In
                a pipeline they pass through the stages one behind the other. Or one batch by itself.

        Raises:
            ValueError: that cannot be seen, or there is none.
        """
        return self.passes.evaluate([parts] if self._call.is_batch(parts) else self._call.parts(parts))

    @torch.no_grad()
    def predict(self, inputs: Any) -> Any:
        """What the model gives, without gradients: its output, with plain whole tensors, on every rank.

        Args:
            inputs: of the model, equal on all ranks: a dict (keywords), a tuple or list, or a tensor.
        """
        tell_libraries(self)
        return self.passes.output(dict(inputs) if isinstance(inputs, Mapping) else inputs)

    def generate(self, ids: torch.Tensor, max_new_tokens: int, **options: Any) -> torch.Tensor:
        """Continue ``ids`` [batch, sequence], equal on all ranks: ``model(input_ids=...).logits`` says how.

        ``options``: see :func:`espalier.models.generate`.
        """
        check_prompt(ids, max_new_tokens)
        self.lay_out(self._call.alone({"input_ids": ids}))
        # a context axis cuts sequences, and stages may cut the modules that keep them
        may_keep = self.plan.context == 1 and self.passes.calls_whole(keepers(self.module))
        options["cache"] = options.get("cache", True) and may_keep
        # on the host, whose generator of random numbers is in the same state on all ranks
        model = cast(Any, AsModel(self.module, self.predict))
        return continued(model, ids.cpu(), max_new_tokens, **options).to(ids.device)

    def backward(self, loss: torch.Tensor) -> None:
        """Gradients of the loss; their reduction over the data axis goes on meanwhile.

        After it every ``p.grad`` is the gradient of the whole batch, times :attr:`scale`, and what there was
        before is added to. ``loss.backward()`` does the same, where neither :attr:`scale` nor ``accumulate``
        ask for more. With ``Plan(accumulate=k)`` only the k-th since the last step reduces gradients, where
        the stage allows it. In a pipeline each of the k passes through the stages alone, which takes longer
        than :meth:`train_step`.

        Raises:
            ValueError: there was no batch yet; or, with ``accumulate``, it is not one micro-batch's loss.
        """
        self.passes.backward(loss)

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward passes in here only accumulate; the next one outside reduces for all.

        In a pipeline each reduces: the gradients are the same.
        """
        return self.passes.no_sync()

    def finish_gradients(self) -> None:
        """Wait until every ``p.grad`` is the gradient of the whole batch, times :attr:`scale`.

        After :meth:`no_sync`; or with ``Plan(accumulate=k)``, whose batch ends here if fewer than k
        micro-batches are left.
        """
        self.passes.finish_gradients([] if self.optimizer is None else held_beside(self.optimizer))

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
        if steps_by_closure(self.optimizer):
            raise ValueError(
                f"engine.step(): {type(self.optimizer).__name__} asks for the loss itself. Write "
                "optimizer.step(closure), whose closure drops the gradients, calls loss = engine(batch) and "
                "engine.backward(loss), and gives the loss."
            )
        first = self._leader or self
        if not any(x.passes.may_step for x in (first, *first.led)):
            raise ValueError(
                "engine.step(): there are no gradients since the last step. Call loss = engine(batch) and "
                "engine.backward(loss) first."
            )
        return self.passes.is_complete and self._step(self.optimizer)

    def step_in_loop(self, optimizer: torch.optim.Optimizer) -> bool:
        """A step that the program has asked an optimizer for; False: there is nothing to update.

        Raises:
            ValueError: see :meth:`step`; the micro-batches of a step are not all there; a step would drop
                gradients that another of several optimizers waits for.
        """
        of_step = self.passes.accumulation
        if self.optimizer is None or not any(x.passes.may_step_in_loop() for x in (self, *self.led)):
            return False
        if of_step is not None and not of_step.complete and (of_step.done or not self.passes.seen.are_given):
            raise ValueError(
                f"optimizer.step() after {of_step.done} of Plan(accumulate={of_step.size}) micro-batches. "
                "Write engine.step() in its place, after each: it updates after the last one, says so, and "
                "drops the gradients then. Or call engine.finish_gradients() first, if the batch ends here."
            )
        keep = self.passes.keeps_gradients and self.plan.gradients != "in-place"
        if not keep and optimizer is not self.optimizer:
            raise ValueError(
                f"{type(optimizer).__name__}.step(): with {self.plan} a step drops all gradients, and this "
                f"is one of {len(parts_of(self.optimizer))} optimizers. Write engine.step() in place of all "
                "of their steps."
            )
        self._step(optimizer, keep)
        return True

    def _step(self, optimizer: torch.optim.Optimizer, keep: bool = False) -> bool:
        """:meth:`step`; gradients stay if they are to be kept.

        Another of several optimizers, which steps after one, finds what that was told of the gradients.
        """
        if self._leader is not None:
            return self._leader._step(optimizer, keep)
        with apart(self.mesh):
            return self._stepped(optimizer, keep)

    def _stepped(self, optimizer: torch.optim.Optimizer, keep: bool) -> bool:
        passes, data, known, seen = self.passes, self._laid_out(), self._judgement, self.passes.seen
        if known is not None and (passes.has_gradients or optimizer in known.stepped):
            known = None
        self._loads.check()
        passes.check_step()
        seen.check()
        passes.finish()
        of_led, others = finish_together(self.led)
        is_own = known is None and self.gives_own_rows
        beside = counted_beside(self.optimizer or optimizer, self.plan, self.mesh, is_own=is_own)
        counted = {**passes.counted(), **of_led, **beside}
        losses: list[torch.Tensor] = []
        under_way = Norm([*counted.values()], self.mesh, self._riders(losses.append))
        judgement = known or Judgement(self._factor())

        def norm() -> torch.Tensor:
            factor = judgement.factor
            self.grad_norm = under_way.wait() if factor is None else under_way.wait() * factor
            return self.grad_norm

        with self._stepping(optimizer, keep):
            if known is None:
                judgement.may_update = self._admits(counted, losses, norm)
            del counted
            factor = judgement.factor
            if self.max_grad_norm is not None:
                clip = (self.max_grad_norm / (norm() + 1e-6)).clamp(max=1.0)
                factor = clip if factor is None else clip * factor
            with passes.watch or nullcontext():
                if judgement.may_update:
                    self.wait_staged()
                    whole = self.optimizer or optimizer
                    update_model(optimizer, whole, data, factor, seen, self._runs, keep=keep, others=others)
                    passes.updates += 1
                    if passes.watch is not None and passes.watch.fit(data, whole):
                        passes.watch = None
            norm()
        judgement.stepped.add(optimizer)
        if known is None:
            self._judgement = judgement if keep else None
            self.steps += 1
            self.pulse.step = self.steps + 1
        return judgement.may_update

    @contextmanager
    def _stepping(self, optimizer: torch.optim.Optimizer, keep: bool) -> Iterator[None]:
        """Inside, the step of an optimizer is its own; then its gradients are forgotten, or kept."""
        passes = self.passes
        self.is_stepping = passes.seen.is_stepping = True
        try:
            with as_addends(self.mesh):
                yield
        finally:
            self.is_stepping = passes.seen.is_stepping = False
            passes.has_gradients = False
            if keep:
                self._laid_out().gradients.settle()
            else:
                forget_gradients(optimizer)
                passes.forget()
            passes.traffic.end()
            settle_together(self.led, keep=keep)

    def _factor(self) -> torch.Tensor | float | None:
        """What makes those of the batch of the gradients as they are."""
        factor = self.passes.factor()
        return factor if self.scaler is None else self.scaler.divided(factor)

    def _admits(
        self,
        counted: Mapping[str, torch.Tensor],
        losses: Sequence[torch.Tensor],
        norm: Callable[[], torch.Tensor],
    ) -> bool:
        """Whether the loss scale and the guard let a step be made with its gradients."""
        guard = self.guard
        if guard is not None:
            guard.told = ""
        if self.scaler is not None and not self.scaler.update(norm(), counted, self._names, self.mesh):
            return False
        if guard is None or self.mesh.is_dry:
            return True
        size = float(norm())
        loss = float(losses[0] if losses else 0.0 if self.loss is None else self.loss)
        return guard.admits(self.steps + 1, loss, size, counted, self._names, self.mesh)

    def _riders(self, judge: Judge) -> list[Rider]:
        """What the ranks tell one another with the norm; the guard's ``judge`` is given one loss for all."""
        riders = self.passes.riders(None if self.guard is None else judge)
        if shares := self.passes.first_batches.shares():
            riders.append(Rider(shares, self._compare))
        return riders

    def _compare(self, sums: Sequence[torch.Tensor]) -> None:
        """See that ranks were given the same batches, by what they say of them.

        Raises:
            ValueError: on all ranks; there are no gradients then.
        """
        try:
            self.passes.first_batches.check(sums)
        except ValueError:
            self.zero_grad()
            raise

    def zero_grad(self) -> None:
        """Forget the gradients, and the micro-batches that made them."""
        self.passes.zero_grad()

    def train_step(self, batch: Any) -> torch.Tensor:
        """Forward, backward, step, on the batch's rows in ``Plan.accumulate`` micro-batches.

        Returns:
            the loss of the whole batch, detached.
        """
        self.accumulate(self.cut(batch))
        self.step()
        assert self.loss is not None
        return self.loss

    def accumulate(self, parts: Iterable[Any], phase: Phase = lambda name: None) -> None:
        """Forward and backward of all micro-batches of a step: :meth:`step` is next.

        Args:
            parts: what :meth:`cut` gives, or of each of the :meth:`micro_batches` the :meth:`local_batch`; a
                batch by itself is cut.
            phase: is told when a ``"forward"`` and when a ``"backward"`` begins.

        With ``Plan(accumulate=...)`` ``p.grad`` can be read after :meth:`finish_gradients`.

        Raises:
            ValueError: in a pipeline: there are no micro-batches, or the last ones wait for a step.
        """
        self.passes.train(self._call.parts(parts), phase, self.forward, self.backward)
        self.passes.call_waiting()

    @property
    def scale(self) -> float:
        """By which the loss is multiplied before a backward pass, and so the gradients until the step."""
        return 1.0 if self.scaler is None else self.scaler.scale

    @property
    def skipped(self) -> int:
        """Steps that did not update because a gradient had overflowed."""
        return 0 if self.scaler is None else self.scaler.skipped

    # ---- what outlives the engine

    @property
    def _names(self) -> list[str]:
        """The parameters'."""
        return [name for name, _ in named_parameters_in(self.module)]

    @property
    def _state(self) -> EngineState:
        kept = self.scaler, self._loaders, self.passes.everywhere
        return EngineState(self.module, self.optimizer, self.mesh, *kept)

    def save(
        self,
        directory: str | os.PathLike[str],
        *,
        asynchronous: bool = False,
        durable: bool = False,
        keep: int | None = None,
        **extra: Any,
    ) -> Path:
        """Save all that a run needs to go on, between two steps (a collective: every rank must call).

        Model, optimizer, scaler, random state, :attr:`steps` and the position of each :meth:`loader`, as any
        plan on any number of ranks can load them. The checkpoint is visible once it is whole.

        Args:
            directory: where the checkpoint's own folder, ``step-00000100``, is made.
            asynchronous: return at once; copy to the host's memory and write meanwhile. Updates wait until
                what they change is copied; :meth:`wait_staged` does, too. :meth:`wait_saved`, or the next
                save, raises what went wrong.
            durable: return when the checkpoint outlives a crash of the machine. Else it is there, and
                outlives this process; it comes to outlive the machine's crash meanwhile, as after
                :meth:`wait_saved`, and older ones stay until then. Asynchronous saves are there only when
                they do.
            keep: how many checkpoints of this run, and of those it goes on from, to leave in ``directory``:
                the newest. None: all.
            extra: plain values, tensors, arrays of numpy, or objects with ``state_dict()``, the same on all
                ranks.

        Returns:
            the checkpoint's folder.

        Raises:
            ValueError: something in ``extra`` or the optimizer cannot be saved; there are gradients; ``keep``
                is less than 1.
            CheckpointError: on all ranks, if it could not be written; those before it are as they were.
        """
        if self.mesh.is_dry:
            raise ValueError("A dry mesh holds no values: there is nothing to save.")
        self._loads.check()
        if self.passes.holds_gradients:
            raise ValueError("There are gradients, which no checkpoint holds: save after engine.step().")
        tell_of_others(self.optimizer, parameters_in(self.module))
        data, values = self._laid_out(), dict(named_values(self._state, self.steps))
        self._saver = self._saver or Saver(self.mesh)
        self.wait_staged()  # masters may follow what was written to parameters
        # what is kept for later is none of inference mode: one evaluates in it, and saves the best
        with torch.inference_mode(False), torch.no_grad(), data.precise(on_device=False):
            saves = self.passes.saves

            def give() -> tuple[Index, Mapping[str, Lying]]:
                index, tree = index_and_tree(self.module, self.optimizer, self.mesh, values, extra, saves)
                plan = json.dumps(self.plan.model_dump(), default=str)
                index.step, index.plan, index.runs = self.steps, json.loads(plan), [*self._loads.runs]
                return index, tree

            path = self._saver.save(
                Path(directory), give, keep=keep, asynchronous=asynchronous, durable=durable
            )
        if asynchronous:
            await_before_handing_out(self.module, self.optimizer, weakref.WeakMethod(self.wait_staged))
        return path

    def wait_staged(self) -> None:
        """Until an asynchronous save has copied parameters and states: from then on they may be written to.

        What the engine itself does waits by itself. No collective.
        """
        if self._saver is not None:
            self._saver.wait_staged()

    def wait_saved(self) -> None:
        """Until the checkpoint that is being written is there, and outlives a crash (a collective).

        Raises:
            CheckpointError: on all ranks, if it could not be written.
        """
        if self._saver is not None:
            self._saver.wait()

    def load(
        self, directory: str | os.PathLike[str], *, model_only: bool = False, **extra: Any
    ) -> dict[str, Any]:
        """Go on where a checkpoint was saved, under any plan (a collective: every rank must call).

        Data goes on, too, if it comes from a :meth:`loader`. Where a shuffled ``DataLoader`` of torch stands
        is not known, of which a warning tells. Before the first batch, where that says how parameters lie,
        every rank reads the whole state; after it, or after :meth:`lay_out`, what it holds.

        Args:
            directory: a checkpoint, or a folder of them: then the newest whole one, and where that turns out
                to be damaged, with a warning, the one before.
            model_only: leave optimizer, scaler, random state and :attr:`steps` as they are.
            extra: objects with ``load_state_dict()``, by the names under which they were saved.

        Returns:
            what was saved as ``extra``.

        Raises:
            ValueError: model or optimizer differ from what was saved, listing all that does: nothing is
                changed, then. The model has no memory yet (:func:`espalier.deferred`) and its layouts are not
                known: call :meth:`lay_out` on a batch first, or pass ``example=`` to :func:`initialize`.
            CheckpointError: on all ranks, if there is none, or a file is damaged. Where values were read by
                then, steps and saves are refused until a load ends well.
        """
        data = self._to_fill()
        self.wait_saved()
        self.zero_grad()
        with torch.inference_mode(False):
            values = self._loads.newest(self._state, directory, data, extra, model_only)
        self.steps = self.steps if model_only else values["steps"]
        return dict(values["extra"])

    def _precise(self) -> AbstractContextManager[None]:
        """While open, parameters that have float32 masters are these."""
        self.wait_staged()
        return nullcontext() if self._data is None else self._data.precise()

    def full_state_dict(self) -> dict[str, Any]:
        """The model's state dict with plain whole tensors (a collective: every rank must call).

        Parameters that have float32 masters are these.
        """
        with self._precise():
            return state_of(self.module, self.passes.everywhere)

    def full_model(self) -> nn.Module:
        """A copy of the model as on one process, plain and whole, on every rank (a collective).

        Parameters that have float32 masters are these; nothing of the plan is around its modules. It is what
        ``torch.jit.trace``, ``torch.export`` and ``torch.onnx`` are given in the model's place.
        """
        with self._precise():
            return full_copy(self.module, self.passes.everywhere)

    def full_parameter(self, parameter: nn.Parameter) -> torch.Tensor:
        """The plain whole value of one parameter on every rank, of its float32 master if it has one (a
        collective)."""
        (name,) = name_own(self.module, {parameter: None})
        with torch.no_grad(), self._precise():
            return self.passes.everywhere(name, parameter)

    def held_parameter(self, parameter: nn.Parameter) -> torch.Tensor:
        """A copy of what this rank holds of one parameter, of its float32 master if it has one: a DTensor.

        Nothing is sent.
        """
        with torch.no_grad(), self._precise():
            return held(parameter)

    def set_parameter(self, parameter: nn.Parameter, value: torch.Tensor) -> None:
        """Let one parameter, and its float32 master, be a tensor (a collective): whole and the same on all
        ranks, or a DTensor."""
        self.set_parameters({parameter: value})

    def set_parameters(self, values: Mapping[torch.Tensor, torch.Tensor]) -> None:
        """:meth:`set_parameter`, of several."""
        name_own(self.module, values)
        self.wait_staged()
        set_parameters(self._state, self._to_fill(), values)

    def held_masters(self) -> dict[int, torch.Tensor]:
        """The float32 masters on this rank by the ``id`` of their parameters, as DTensors. Nothing is sent.

        Where :attr:`shares_masters` a program may write to them; else they are copies.
        """
        self.wait_staged()
        return {} if self._data is None else self._data.held_masters()

    @property
    def shares_masters(self) -> bool:
        """Whether :meth:`held_masters` gives no copies: parameters are cut as their masters are."""
        return self._data is not None and self._data.shares_masters

    def _take_state(self, load: Callable[[], Any]) -> Any:
        """Have the model take a state dict by its own ``load_state_dict``."""
        self.wait_staged()
        return take_state(self._state, self._to_fill(), load)

    def _whole_values(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """A state dict whose DTensors are plain and global on every rank, also those that lie as parameters
        do."""
        return whole_values(state, self.mesh, self.passes.everywhere)

    def full_gradients(self) -> dict[str, torch.Tensor | None]:
        """The gradients as plain whole tensors (a collective: every rank must call), by parameter.

        They are those of the whole batch after ``finish_gradients()``. None: no rank has one.
        """
        return gradients_of(self.module, self.mesh, self.passes.everywhere)

    def load_weights(self, path: str | Path | Mapping[str, Any], *, optimizer: bool = False) -> None:
        """Take the model's weights from files of another format; each rank reads what it holds (collective).

        Args:
            path: a file of safetensors or of ``torch.save``, a folder of one of these, as Hugging Face has
                them, or of ``torch.distributed.checkpoint``; or a state dict of plain whole tensors, the same
                on all ranks. Values are rounded to the parameters' dtype, or that of their float32 masters.
                What was pickled is read without executing any of it.
            optimizer: take the optimizer's states and options too, which lie beside the model's weights, as
                torch's ``get_state_dict`` or ``optimizer.state_dict`` gives them.

        Raises:
            ValueError: it cannot be read, or holds the weights of another model.
        """
        self.wait_staged()
        load_weights(self._state, self._to_fill(), path, optimizer)

    def export(
        self,
        path: str | Path,
        format: str = "safetensors",
        *,
        dtype: torch.dtype | None = None,
        shard_gigabytes: float = 5.0,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        """Write the model's weights as others read them: rank 0 does, piece by piece (collective).

        Args:
            path: a new folder; for ``"torch"`` a new file. ``.../NAME.safetensors`` is one file, with all
                names of a tensor that has several; it takes the place of one that is there.
            format: ``"safetensors"``, as Hugging Face's ``save_pretrained`` writes it, with the config of the
                model if it has one; ``"torch"``, a state dict by ``torch.save``; ``"dcp"``, a folder of
                ``torch.distributed.checkpoint`` with the dict ``model``.
            dtype: of floating-point tensors; by default the parameters', or float32 where they have masters.
            shard_gigabytes: (10^9 bytes) of a file of safetensors, where there are several.
            metadata: texts for the header, where it is one.

        Raises:
            ValueError: it cannot be written.
        """
        check_export(dtype, shard_gigabytes)
        self.wait_staged()
        form = WeightsFormat(format, dtype, int(shard_gigabytes * 1e9), metadata)
        export(self.module, self._laid_out(), self.passes, path, form)

    # ---- what there is to know

    def watch(self) -> PeakMemory:
        """A watch over the device's memory: ``with watch: ...``, then ``watch.peak`` in bytes.

        It counts what the engine holds and what is computed while it is open. On a CPU what is in the
        ``"host"``'s memory does not count, as if there were a device.
        """
        return follow_peak(self.module, self.optimizer, self._laid_out(), self._peaks)

    def masters(self) -> list[torch.Tensor]:
        """The float32 masters on this rank, in flat buffers; none where parameters are not cast."""
        if self._data is None:
            return []
        return [chunk.master for chunk in self._data.chunks if chunk.master is not None]

    def memory(self) -> Memory:
        """What this rank holds now: parameters, gradients, states, ...; printed, a table.

        Gradients are there from the backward pass (whose last sums :meth:`finish_gradients` waits for) to the
        step, states from the first step on.
        """
        return report.memory(self.module, self.optimizer, self._laid_out(), str(self.plan))

    def carried(self) -> Counter[Carried]:
        """Bytes that went between the device and the places that ``plan.offload`` names, so far."""
        return self._laid_out().carried

    def order(self) -> MoveOrder:
        """The chunks that move along the data axis in a step, in their order; printed, a table."""
        return report.order(self._laid_out())

    def ledger(self) -> Ledger:
        """What crossed which axis in the last step that was recorded; printed, a table.

        The first two steps are (the second is like all that follow), and those that begin within
        :meth:`recording`; others pay nothing.

        Raises:
            ValueError: there was no step yet.
        """
        if self.passes.traffic.last is None:
            raise ValueError("No step was recorded yet: call engine.ledger() after engine.step().")
        return self.passes.traffic.last

    def recording(self) -> AbstractContextManager[None]:
        """While open, the ledger of each step that begins is kept."""
        return self.passes.traffic.asked()

    def timeline(self) -> Timeline:
        """When each rank along the axis ``pipe`` did what in the last step; all of them call this.

        ``timeline.predicted()`` is what the schedule promises with the same times of its actions;
        :func:`espalier.parallel.schedules.simulate.draw` draws both.

        Raises:
            ValueError: there was no step yet, or the plan has no pipeline.
        """
        return self.stages.runtime.timeline()

    @property
    def resized(self) -> list[torch.UntypedStorage]:
        """Storages that are emptied and filled as their parameters are used."""
        return [] if self._data is None else self._data.resized


def _count(engine: weakref.ref[Engine], optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Behind a step that an optimizer made by itself."""
    sum_states(optimizer)
    if (here := engine()) is not None:
        here._count_step()
