"""Passes through the stages of a pipeline: all micro-batches of a step together, by a schedule."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import nullcontext
from typing import Any, NoReturn, cast

import torch
from torch import nn

from espalier.blocks import named_parameters_in, parameters_in
from espalier.comm import move
from espalier.comm.collectives import broadcast, sum_whole
from espalier.comm.control import agree, any_says, numbers_of_all
from espalier.device import is_accelerator
from espalier.engine.accumulation import Number, averaged
from espalier.engine.awaited import Awaited, entering
from espalier.engine.call_states import LoopCalls
from espalier.engine.calls import keep
from espalier.engine.copies import Copies
from espalier.engine.full_model import output_with_stand_ins
from espalier.engine.looks import let_look, tell_of_writes
from espalier.engine.micro_batches import (
    Foreseen,
    MicroBatches,
    Prediction,
    StageContext,
    foreseen,
    zeros_where_unknown,
)
from espalier.engine.model_run import ModelRun
from espalier.engine.norm import Rider, share_of
from espalier.engine.observing import Observers
from espalier.engine.one_by_one import OneByOne
from espalier.engine.own_graphs import any_tells, beside, come_unannounced, tried
from espalier.engine.passes import (
    Backward,
    Direct,
    Judge,
    Loss,
    Passes,
    Phase,
    plain_output,
    refuse_stand_ins,
)
from espalier.engine.seen import Around
from espalier.engine.shared_parameters import SharedParameters
from espalier.engine.stage_draws import Draws, random_states
from espalier.engine.told_gradients import ToldGradients
from espalier.engine.waiting import WaitingForStages
from espalier.layout import Layout
from espalier.meanwhile import having
from espalier.mesh.parts import among
from espalier.parallel import Arrangement, arrange, everywhere
from espalier.parallel.compose import Stages, Undivided, refuse_unlike_stages
from espalier.parallel.data.gradients import gradient_of
from espalier.parallel.data.zero import ZeroState
from espalier.parallel.pipeline import ActionKind, Schedule, SplitError
from espalier.parallel.pipeline.arguments import cloned
from espalier.parallel.pipeline.measure import measured_by_all
from espalier.parallel.pipeline.remembered import Memory
from espalier.tensor import DTensor, full_tensor, plain, stamp
from espalier.tensor.asked import Asked, apart
from espalier.tensor.before import Before, places, reached
from espalier.tensor.draws import States
from espalier.tensor.dtensor import layout_of
from espalier.tensor.fallback import GatherWarning
from espalier.tensor.loans import written_mark
from espalier.tensor.meshes import brought
from espalier.tensor.observers import tell
from espalier.torch_private import raw, setter
from espalier.trees import tree_map

_STAND_INS = (
    "Other tensors stand in the place of a model's parameters (torch.func.functional_call), and it is in a "
    "pipeline"
)
_SLOW = (
    ": it is computed whole, on every rank, with all these tensors. Right, but slow. Such programs (inner "
    "loops of meta-learning) train quicker under a plan without pipe."
)
_REFUSED = (
    ". There that goes for inputs that all ranks give whole, which no other call has yet to compute, and "
    "where no two stages have copies of a parameter: put the call into the model's forward, or train under a "
    "plan without pipe."
)
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_set_grad = setter("grad")
_TELLS = 2.0**-20  # beside a number of ranks


class Staged(Passes):
    """All micro-batches of a step together, through stages that lie on different ranks."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._stages: Stages | None = None
        self._axis = self.mesh.axis("pipe")
        self._here = self.mesh.coordinate[self._axis]
        self._dtype: torch.dtype | None = None  # of the loss
        self._factor: torch.Tensor | None = None
        self._weighs = self._is_finished = self._is_known = self._is_of_loop = self.counts_one = False
        self.loop_calls = LoopCalls()
        self.observers = Observers(self.call.module, self.mesh)
        self.last_factor: torch.Tensor | None = None  # of the gradients of the last pass
        self.memory, self._is_called = Memory(self.mesh), False  # by a loop
        self._later: list[Callable[[], None]] | None = None  # what is to be done behind a pass beside
        self._runs = 0
        self._copies, self._alone = Copies(self), OneByOne(self)
        self._held = frozenset[int]()  # ids of parameters, once they are laid out
        self._taken: Mapping[torch.nn.Parameter, torch.Tensor] = {}  # see taken_gradients
        self.beside: Sequence[torch.Tensor] = ()  # what gets gradients of a pass beside the model
        self._told: ToldGradients | None = None  # on a dry mesh stages say nothing of them

    # ---- to lay out

    def arrange(self, batch: Any, **options: Any) -> Arrangement | None:
        if batch is None:
            return None
        call, module = self.call, self.call.module
        inputs = call.parted(dict(batch) if isinstance(batch, Mapping) else batch)[0]
        example = tree_map(self._example, inputs)
        costs, unmeasured = None, None
        if self.plan.balance == "measured":
            try:
                costs = self._measured(example)
            except SplitError as error:
                unmeasured = error
        try:
            stages = self._stages = Stages(module, self.plan, self.mesh, example, costs)
        except SplitError:
            refuse_unlike_stages(self.mesh, ["cannot be divided"])
            raise
        refuse_unlike_stages(self.mesh, stages.split.described())
        if unmeasured is not None and not isinstance(stages.split, Undivided):
            raise unmeasured
        sample, rows = call.sample(batch), call.batches.share(batch)
        arrangement = arrange(
            module, self.plan, call.mesh, batch=sample, rows=rows, stages=stages.meshes, **options
        )
        assert arrangement is not None
        arrangement.parts = stages.parts
        stages.prepare(arrangement, call.mesh)
        return arrangement

    def _example(self, x: Any) -> Any:
        """An input to trace the model on."""
        if self.mesh.is_dry:
            return zeros_where_unknown(x)
        return full_tensor(x) if isinstance(x, torch.Tensor) else x

    def _measured(self, example: Any) -> Mapping[str, float]:
        """The time that parts of the model take on so many rows as a rank computes."""
        if self.mesh.is_dry:
            raise ValueError(
                'balance = "measured" needs the devices that will compute: a dry run has none. Say where '
                "stages begin: Plan(cuts=engine.stages.split.cuts) of a real run."
            )
        rows, low = self.call.batches.share(example), self.plan.precision.parameters
        dtype = None if low is None else getattr(torch, low)

        def cut(x: Any) -> Any:
            return self.call.cast(x[:rows] if isinstance(x, torch.Tensor) and x.ndim else x)

        with self.call.autocast():
            whole = self.plan.recompute != "none"
            part = tree_map(cut, example)
            return measured_by_all(self.mesh, self.call.module, part, divide=not whole, dtype=dtype)

    def begin(self, data: ZeroState) -> None:
        self.seen.watch(m.p for m in data.members)
        self.seen.watch_clipping()
        self.waiting = WaitingForStages(data, self.seen, is_dry=self.mesh.is_dry)
        tag = 2 * (self.plan.pipe * self.plan.stages_per_rank)  # behind those of stages
        self._shared = SharedParameters(data, self.stages, self.mesh, tag)
        users = self.stages.users
        self.mesh.copied = tuple(name for name, of in users.items() if len(of) > 1)
        places = {}
        for name, p in named_parameters_in(self.call.module):
            lies = layout_of(p).mesh
            is_part = self.mesh.copied and lies.within is self.mesh
            places[name] = among(self.mesh, self._axis, users[name]) if is_part else lies
            if is_part:
                p._place = places[name]  # type: ignore[attr-defined]  # see espalier.tensor.meshes
        home, is_first = self.stages.home, self.call.mesh.rank == 0
        self._told = None if self.mesh.is_dry else ToldGradients(self.mesh, self._here, is_first, home)
        around: weakref.WeakMethod[Around] = weakref.WeakMethod(self.make_beside)
        if self.mesh.asked is None:
            self.mesh.asked = Asked(self.mesh)
        self.seen.show_all(places, weakref.WeakMethod(self._dtype_of_gradient), around)
        data.gradients.announce(come_unannounced)
        self.mesh.beside = beside
        self._shared.share_values()
        self._copies.lay_out(self.call.module)
        self._held = frozenset(map(id, parameters_in(self.call.module)))

    def copied(self, memo: dict[int, Any]) -> nn.Module:
        return self._copies.made(self.call.module, memo)

    @property
    def stages(self) -> Stages:
        if self._stages is None:
            raise ValueError("A pipeline is split by its first batch: call engine.train_step on one first.")
        return self._stages

    @property
    def is_idle(self) -> bool:
        return isinstance(self.stages.split, Undivided) and not self.stages.has_last

    def calls_whole(self, modules: Iterable[nn.Module]) -> bool:
        return {m for program in self.stages.split.stages for m in program.inner}.issuperset(modules)

    def before(self) -> Before:
        """What a forward pass may change, as it is now on this rank."""
        self.memory.hidden.show(self.call.module)
        modules, written = reached(self.call.module), self.stages.split.written
        names = {id(p): name for name, p in named_parameters_in(self.call.module)}
        held = [(name, table[key]) for name, table, key in places(modules)]
        may_change = {
            name: x
            for name, x in held
            if not x.is_meta and (not x.requires_grad or written is None or names.get(id(x)) in written)
        }
        return Before(modules, may_change, None, [], whole=True)

    def saves(self, name: str) -> bool:
        return self.stages.home(name) == self._here

    def everywhere(self, name: str, x: torch.Tensor) -> torch.Tensor:
        if self.data is None:  # every rank has the whole model yet
            return super().everywhere(name, x)
        dtype = x.dtype
        if x.is_floating_point() and self.plan.precision.parameters is not None:
            dtype = torch.float32  # of masters, where they are
        if self.saves(name):
            whole = everywhere(x, self.call.mesh).detach().to(dtype)
        else:
            whole = torch.empty(x.shape, dtype=dtype, device=self.mesh.device())
        return broadcast(whole, self.mesh, self._axis, self.stages.home(name))

    # ---- passes

    def one_by_one(self, what: str) -> Direct:
        raise ValueError(
            f"{what}: with {self.plan} the micro-batches of a step pass through the stages together. Call "
            "engine.train_step(batch), or engine.accumulate(parts) and engine.step(); to evaluate, "
            "engine.evaluate(parts)."
        )

    def follow_all(self, out: Any) -> None:
        """Nothing: what is made beside the stages goes back by itself."""

    def forward(self, batch: Any) -> torch.Tensor:
        """The loss of a batch: to come, or, under ``torch.no_grad()``, plain, the same on every rank."""
        if torch.is_grad_enabled():
            return cast(torch.Tensor, self._alone.loss(batch))
        ((loss, _),) = self._passed([batch], counts=False)
        return self.of_last(averaged([(loss, None)]))

    def backward(self, loss: torch.Tensor) -> None:
        self._alone.backward(loss)

    def train(self, parts: Iterable[Any], phase: Phase, forward: Loss, backward: Backward) -> None:
        parts = list(parts)
        if self.keeps_gradients and not self.has_gradients:  # a loop's, which it has not dropped
            self.zero_grad()
        self._is_of_loop = False
        if self.averaging.closed or not parts:
            raise ValueError(
                "engine.accumulate takes all micro-batches of one step: call engine.step() before the next."
                if parts
                else "There are no micro-batches to train on."
            )
        data = self._laid_out(parts[0])
        for part in parts:
            self._begins(part)
        are_parts = len(parts) > 1 or self.counts_one
        work = MicroBatches(self._context(data), parts, phase, counts=are_parts)
        for gradients in data.gradients.parts:
            gradients.hold()
        self._weighs, self._factor, self.last_factor = are_parts, None, None
        self._is_finished = self._is_known = False
        self.seen.admit()
        self.has_gradients = True
        self._run(work, self.stages.schedule(len(parts)))
        data.end_step()
        self.averaging.closed = True
        self.loss = self.averaging.loss
        self.seen.bar()
        if self.waiting.are_due:
            self.finish_gradients(self.beside)
            self.waiting.hand()

    def call_waiting(self) -> None:
        self.waiting.tell()

    def evaluate(self, parts: Iterable[Any]) -> torch.Tensor:
        losses: list[tuple[torch.Tensor, Number]] = []
        some: list[Any] = []
        for part in parts:
            some.append(part)
            if len(some) == 4 * self.plan.pipe:
                losses += self._passed(some)
                some = []
        losses += self._passed(some)
        return self.of_last(averaged(losses))

    def output(self, inputs: Any, model: nn.Module | None = None) -> Any:
        """What the model gives for inputs, or a copy of it: plain, on every rank."""
        data = self._laid_out(self.call.alone(inputs))
        work = Prediction(self._context(data), [inputs], lambda name: None, counts=False, model=model)
        schedule = self.stages.schedule(1, only=ActionKind.F)
        self._run(work, schedule)
        self.of_last(self._zero)
        return work.everywhere(schedule.stage_to_rank[-1])

    def written(self) -> tuple[int, int]:
        """How many runs there were, and how often parameters were written to: what else has is not told."""
        return self._runs, sum(written_mark(p)[0] for p in parameters_in(self.call.module))

    def lay_out(self, inputs: Any) -> None:
        """Lay the model out for these inputs, unless it is."""
        self._laid_out(self.call.alone(inputs))

    def outputs(self, inputs: Any, rows: str, batch: Any = None) -> Any:
        """See :class:`~espalier.engine.passes.Passes`; ``batch``: they are of one micro-batch of several."""
        if torch.is_inference_mode_enabled():  # what is traced is told of writes by versions
            with torch.inference_mode(False), torch.no_grad():
                return self.outputs(cloned(inputs), rows)
        entered, made_by = entering(tree_map(self._on_all_ranks, inputs))
        held = [*parameters_in(self.call.module)]
        if not (self._held.issuperset(map(id, held)) or all(isinstance(p, nn.Parameter) for p in held)):
            return self._with_stand_ins(entered, is_refused=rows == "own" or bool(made_by))
        self.observers.take()
        with self.observers.quiet():
            call = ModelRun(self, entered, rows, made_by, keep, batch)
            with call.dropped_by_error():
                out = self._called(call)
        if self.observers.look_forward and not self.mesh.is_dry:
            self.observers.tell_of_divided(self.stages.split.divided)
            let_look(call, self.observers, inputs, out)
        return out

    def _with_stand_ins(self, inputs: Any, is_refused: bool) -> Any:
        """What the model gives with other tensors in the place of its parameters, for one call.

        Raises:
            NotImplementedError: that is not done for such inputs, or copies of parameters.
        """
        if self.data is None:
            refuse_stand_ins(self.call.module)
        if is_refused or self.mesh.copied or self.mesh.is_dry:
            raise NotImplementedError(_STAND_INS + _REFUSED)
        tell(_STAND_INS + _SLOW, GatherWarning)
        with self.call.autocast():
            out = output_with_stand_ins(self.call.module, self.everywhere, self.mesh, inputs)
        return out if torch.is_grad_enabled() else plain_output(out)

    def _called(self, call: ModelRun) -> Any:
        if not torch.is_grad_enabled():
            return call.value()
        if not self._is_called:
            call.lay_out()
            self._is_called = True
            if isinstance(split := self.stages.split, Undivided):
                was = self.written()[1]
                call.look()  # which shows what it sets, too
                split.writes_weights |= any_says(self.written()[1] != was, self.mesh)
            elif call.is_whole and call.batch is None and (split.remembers or split.dice is not None):
                call.look()
            self.memory.hidden.note(self.stages.split.sets, self.stages.split.tensors)
        elif isinstance(self.stages.split, Undivided):
            self.seen.show_later()  # a parametrization's, say
        call.foresee()
        self.hide()
        if self.stages.split.writes_weights:
            tell_of_writes(self.plan.accumulate)
            call.value()  # a penalty on weights, and who else reads them, is to find what it has written
        elif self.observers.look_forward and not self.mesh.is_dry:
            call.value()
        return Awaited(call)

    def foreseen(self, parts: Sequence[Any]) -> Foreseen:
        """What is known of a call of the model as it is made, of its micro-batches."""
        split = self.stages.split
        if isinstance(split, Undivided) or split.remembers or split.dice is not None:
            return Foreseen()  # it is another at each call, perhaps
        assert self.data is not None
        return foreseen(self._context(self.data), parts)

    def drawn_to(self, draws: Draws | None) -> States | None:
        """Where generators are once a model has drawn; None: where they were, or not known."""
        return None if draws is None else random_states([draws], (), self.mesh)[1]

    def _on_all_ranks(self, x: Any) -> Any:
        """An input, plain, if it lies on all ranks, as what a method gave does; rows of loaders do not, and
        what was made of them lies as they do."""
        if type(x) is not DTensor or x._layout.mesh is not self.mesh:
            return x
        x, batches = cast(DTensor, x.detach()), self.call.batches
        return brought(x, batches.mesh) if batches.is_cut_as(x) else x.full_tensor()

    def hide(self) -> None:
        """Of the tensors that a loop's call sets, let those who ask know that it has yet to run."""
        self.memory.hidden.hide(self.call.module)

    def _context(self, data: ZeroState) -> StageContext:
        self.observers.tell_of_others(self.stages)
        self.memory.hidden.show(self.call.module)
        scale = 1.0 if self.scaler is None else self.scaler.scale
        parts, averaging, pulse = data.gradients.parts, self.averaging, self.pulse
        context = self.call, self.mesh, self.stages, averaging, parts, scale, pulse, self.memory
        return StageContext(*context, self.observers, data.begin_micro_batch)

    def _run(self, work: MicroBatches, schedule: Schedule) -> None:
        assert self.data is not None
        self._runs += 1
        self.data.begin_forward()
        self.mesh.beside = None  # what stages compute goes back as it is
        try:
            watch, casts = self.watch or nullcontext(), self.call.casts or nullcontext()
            with apart(self.mesh), watch, casts, work.open(schedule):
                self.stages.runtime.run(schedule, work.agreed, work)
        finally:
            self.mesh.beside = beside
        work.leave()
        if self.mesh.is_dry and self._failure is not None:
            raise self._failure

    def _passed(self, parts: Sequence[Any], counts: bool = True) -> list[tuple[torch.Tensor, Number]]:
        """The loss of each micro-batch, and what it is a mean over; on all but the last stage, nothings."""
        if not parts:
            return []
        data = self._laid_out(parts[0])
        work = MicroBatches(self._context(data), parts, lambda name: None, counts)
        self._run(work, self.stages.schedule(len(parts), only=ActionKind.F))
        nothing = self._zero
        return [work.losses.get(i, (nothing, None)) for i in range(len(parts))]

    @property
    def _zero(self) -> torch.Tensor:
        """What ranks without a number give to sums."""
        return torch.zeros((), dtype=torch.float64, device=self.mesh.device())

    def of_last(self, value: torch.Tensor) -> torch.Tensor:
        """A whole number of the last stage's, on all ranks.

        Raises:
            Exception: what a rank has met in its stage, on all ranks.
        """
        zero, gives = self._zero, self.stages.has_last and self.call.mesh.rank == 0
        sums = [value.to(zero) if gives else zero, zero if self._failure is None else zero + 1]
        number, failed = sum_whole(torch.stack(sums), self.mesh).unbind()
        self._see(failed)
        return number.clone()

    def _see(self, failed: torch.Tensor, tells: bool = False) -> bool:
        """Give up, on all ranks, if so many have failed; else whether any rank ``tells`` something.

        Such a rank has added :data:`_TELLS`. What the host knows nobody asks the device for.

        Raises:
            Exception: what a rank has met in its stage.
        """
        if self.mesh.is_dry:
            return False
        if is_accelerator(failed.device):
            codes = numbers_of_all([int(self._failure is not None) + 2 * tells], self.mesh)
            has_failed, is_told = (any(code & bit for (code,) in codes) for bit in (1, 2))
        else:
            number = failed.item()
            has_failed, is_told = number >= 1, number % 1 > 0
        if has_failed:
            self._give_up()
        return is_told

    @property
    def _failure(self) -> Exception | None:
        return self.stages.runtime.failure

    def _give_up(self) -> NoReturn:
        failure, self.stages.runtime.failure = self._failure, None
        if self._told is not None:
            self._told.forget()
        self.zero_grad()
        agree(failure, self.mesh, range(self.mesh.ndim))
        raise AssertionError("a rank has failed")

    # ---- gradients, and what the last stage knows

    def forget(self) -> None:
        self.accumulation = self.averaging
        super().forget()

    def finish_gradients(self, beside: Iterable[torch.Tensor] = ()) -> None:
        super().finish_gradients(beside)
        self._alone.finish()

    @property
    def keeps_gradients(self) -> bool:
        return self._is_of_loop

    def taken_gradients(self) -> dict[torch.nn.Parameter, torch.Tensor]:
        """What a loop has not dropped yet, finished; the parameters have no gradients then."""
        with raw():
            grads = {p: gradient_of(p) for p in parameters_in(self.call.module)}
        taken = {p: grad for p, grad in grads.items() if grad is not None}
        if taken or self.averaging.closed:
            self.zero_grad()
        self._taken = taken
        return taken

    def add_gradients(self, taken: Mapping[torch.nn.Parameter, torch.Tensor]) -> None:
        """Add what was taken to the gradients of a pass, as a loop on one process does."""
        self._is_of_loop, self._taken = True, {}
        if not taken:
            return
        with raw():
            for p, grad in taken.items():
                if (new := gradient_of(p)) is None:
                    p.grad = grad
                else:
                    lies = layout_of(grad, layout_of(p).mesh)  # one given by hand is whole
                    plain(new).add_(plain(grad if lies is new._layout else move(grad, lies, new._layout)))
        self.seen.note()

    def make_beside(self, go: Callable[[], None]) -> None:
        """A backward pass through a graph of parameters, on all ranks: what it gives is added.

        Raises:
            ValueError: the engine scales losses, and could not scale this one.
        """
        if self.mesh.is_dry:
            return go()
        if self.scaler is not None:
            raise ValueError(
                f"backward() of what is made of parameters alone: in {self.plan.precision} the engine scales "
                "losses, and knows nothing of this one. Compute in bfloat16, which needs no scale; or change "
                "p.grad before the step."
            )
        assert self.data is not None
        earlier, gradients = self.taken_gradients(), self.data.gradients
        later: list[Callable[[], None]] = []
        gradients.begin(True)
        try:
            with having(self, _later=later):
                error = tried(go)
        finally:
            if gradients.is_idle:
                gradients.stop()
            else:
                self.data.end_backward()
                gradients.finish()
            self._drop_unneeded(gradients.without)
            self.waiting.hand()
            self.add_gradients(earlier)
        self.has_gradients = self._is_finished = self._is_known = self.averaging.closed = True
        self._tell_of_gradients(error)
        self.seen.note()
        self.call_waiting()
        for through_stages in later:
            through_stages()

    def when_beside_is_over(self, through_stages: Callable[[], None]) -> None:
        """Make a pass through the stages; behind one of :meth:`make_beside`, where that has led to it."""
        if self._later is None:
            through_stages()
        else:
            self._later.append(through_stages)

    def _drop_unneeded(self, without: Set[int]) -> None:
        """Gradients of copies that no rank used; and, without data, of what lies on other ranks."""
        with raw():
            for p in parameters_in(self.call.module):
                if id(p) in without:
                    p.grad = None  # also what is shown of it
                elif not layout_of(p).mesh.is_member:
                    _set_grad(p, None)

    def _tell_of_gradients(self, error: Exception | None = None) -> None:
        """Let all ranks know which gradients stages have; or raise on all what one has met."""
        if self._told is not None and any_tells(self._tells_of_gradients(), error, self.mesh):
            self._told.turn()

    @property
    def has_new(self) -> bool:
        """Each pass sums them; but a step that is not to wait for sums is none of all ranks."""
        return self.has_gradients

    def finish(self) -> None:
        assert self.data is not None
        self.seen.admit()
        if self.seen.are_given and not self.has_gradients:  # no pass has made any
            self._is_finished = self._is_known = True
        if not self._is_finished:
            self._is_finished = True
            self.data.gradients.finish()
            self._shared.sum_gradients()
        elif self.seen.are_given:
            self.data.gradients.finish()
            self._drop_unneeded(self.data.gradients.without)

    def counted(self) -> dict[str, torch.Tensor]:
        assert self.data is not None
        self.finish()
        return {name: grad for name, grad in self.data.counted().items() if self.saves(name)}

    def riders(self, judge: Judge | None = None) -> list[Rider]:
        return [] if self._is_known else [Rider(self._shares(), self._hear)]

    def agree(self) -> None:
        if self._is_known:
            return
        tells = self._tells_of_gradients()
        *shares, failed = self._shares()
        with raw():
            shares.append(failed + _TELLS if tells else failed)
        *numbers, failed = sum_whole(torch.stack(shares), self.mesh).unbind()
        if self._see(failed, tells):
            assert self._told is not None
            self._told.turn()
        self._know(numbers)

    def _tells_of_gradients(self) -> bool:
        assert self.data is not None
        if self._told is None:
            return False
        named: Iterable[tuple[str, torch.Tensor]] = ((m.name, m.p) for m in self.data.members)
        if isinstance(self.stages.split, Undivided):
            named = named_parameters_in(self.call.module)  # those that came later, too
        return self._told.say(named, self._taken)

    def _dtype_of_gradient(self, name: str, p: torch.Tensor) -> torch.dtype | None:
        """Of a parameter of other ranks; None if it has no gradient."""
        if self._told is None:
            return p.dtype if p.requires_grad else None
        return self._told.dtype_of(name, p)

    def factor(self) -> torch.Tensor | None:
        factor, self._factor = self._factor, None
        return factor

    def _shares(self) -> list[torch.Tensor]:
        """What this rank gives to the sums: the loss, its dtype, the factor of gradients, failures."""
        with raw():
            zero = self._zero
            failed = zero if self._failure is None else zero + 1
            if self.loss is None or not self.stages.has_last:
                return [zero, zero, zero, failed]
            first = self.call.mesh.rank == 0
            factor = self.averaging.factor()
            code = _DTYPES.index(self.loss.dtype) if first else 0
            return [
                share_of(self.loss, self.call.mesh).to(zero),
                zero + code,
                zero if factor is None or not first else factor.to(zero),
                failed,
            ]

    def _hear(self, sums: Sequence[torch.Tensor]) -> None:
        """Know what ranks told, as all do.

        Raises:
            Exception: what a rank has met in its stage, on all ranks.
        """
        *numbers, failed = sums
        self._see(failed)
        self._know(numbers)

    def _know(self, sums: Sequence[torch.Tensor]) -> None:
        """Know the loss and the factor of gradients, as all ranks do."""
        with raw():
            loss, code, factor = sums
            if self._dtype is None:
                self._dtype = self.loss.dtype if self.loss is not None and self.stages.has_last else None
                if self._dtype is None and not self.mesh.is_dry:
                    self._dtype = _DTYPES[int(code.item())]
            lies = Layout.replicated(self.mesh, ())
            self.loss = stamp(loss.to(self._dtype or torch.float32).clone(), lies)
            if self._weighs:
                self._factor = self.last_factor = torch.where(factor == 0, torch.ones_like(factor), factor)
        self._is_known = True
