"""The micro-batches of a run, as the stages of this rank compute them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from espalier.comm.collectives import broadcast
from espalier.comm.control import gather_objects
from espalier.comm.dry import values_of
from espalier.engine.accumulation import Accumulation, Number, is_given, tell_of_labels, with_labels
from espalier.engine.batches import loss_of
from espalier.engine.model_call import ModelCall, plain_output
from espalier.engine.observing import Observers
from espalier.engine.passes import Phase
from espalier.engine.recompute import StageRecomputation
from espalier.engine.stage_draws import Draws, StageDraws
from espalier.faults.watchdog import Watchdog
from espalier.layout import gradient_layout
from espalier.mesh import Mesh
from espalier.parallel.compose import Stages, Undivided, WholeProgram
from espalier.parallel.data.gradients import Gradients
from espalier.parallel.pipeline import ActionKind, Schedule
from espalier.parallel.pipeline.arguments import leaves
from espalier.parallel.pipeline.left import LeftByForwards
from espalier.parallel.pipeline.objects import closed, opened, sendable
from espalier.parallel.pipeline.remembered import Memory, Snapshot, copied, put, snapshot
from espalier.parallel.pipeline.runtime import InferredShapes, Tensors
from espalier.parallel.pipeline.single_rank import SingleRank, as_plain
from espalier.parallel.pipeline.split import Split, StageProgram
from espalier.parallel.pipeline.weight_gradients import DeferredWeightGrads, PutOffDry
from espalier.parallel.schedules.actions import Action
from espalier.tensor import DTensor, plain, stamp
from espalier.tensor.observers import watching
from espalier.torch_private import gradient_hooks, hooks_after_gradient, raw
from espalier.trees import tree_map


class StageContext(NamedTuple):
    """What the stages of this rank need to compute micro-batches.

    Attributes:
        mesh: with the axis ``pipe``.
        gradients: of each stage of this rank.
        scale: by which the loss is multiplied before the backward pass.
        pulse: is told of each action.
        memory: what modules set, for all ranks.
        observers: the program's hooks that look at modules.
        begin: is called before a micro-batch's forward pass.
    """

    call: ModelCall
    mesh: Mesh
    stages: Stages
    accumulation: Accumulation
    gradients: Sequence[Gradients]
    scale: float
    pulse: Watchdog
    memory: Memory
    observers: Observers
    begin: Callable[[], None]


class Foreseen(NamedTuple):
    """What is known of a call of the model as it is made.

    Attributes:
        heard: what its forward goes by of the numbers and objects among its inputs; None: all that they are.
        wanting: of each tensor that it gives, whether gradients go back through it; none: not known.
        draws: what it draws; None: that is seen when it runs.
    """

    heard: tuple[Any, ...] | None = None
    wanting: tuple[bool, ...] = ()
    draws: Draws | None = None


def foreseen(of: StageContext, parts: Sequence[Any]) -> Foreseen:
    """What is known of a call that may train, of a model that is divided.

    Args:
        parts: its micro-batches.
    """
    call, is_dry = of.call, of.mesh.is_dry

    def agreed(part: Any) -> tuple[Split, InferredShapes]:
        inputs = call.entered(part)
        with call.autocast():
            (split,) = of.stages.split.at_all([tree_map(zeros_where_unknown, inputs) if is_dry else inputs])
        assert isinstance(split, Split)
        return split, of.stages.shape_inference(split, inputs, call.in_stage)

    split, first = agreed(parts[0])
    wanting = first.wanting
    for part in parts[1:] if split.reads else ():  # which may go another way
        _, other = agreed(part)
        both = zip(wanting, other.wanting, strict=False)
        wanting = tuple(a or b for a, b in both) if len(wanting) == len(other.wanting) else ()
    is_seen_later = is_dry or split.remembers or split.dice is not None  # of another split than the first
    heard = None if split.questions is None else split.questions.answers()
    if split.given:
        heard = (split,)
    return Foreseen(heard, wanting, None if is_seen_later else first.draws)


class MicroBatches:
    """The micro-batches of one run.

    Args:
        phase: is told when a ``"forward"`` and when a ``"backward"`` begins.
        counts: whether it is to be known what each loss is a mean over.
        model: another one of the same modules, which is to run in its place.
    """

    def __init__(
        self,
        of: StageContext,
        parts: Sequence[Any],
        phase: Phase,
        counts: bool,
        model: nn.Module | None = None,
    ) -> None:
        self._of, self.phase, self._counts = of, phase, counts
        self.losses: dict[int, tuple[torch.Tensor, Number]] = {}
        self._call, self._stages, mesh = of.call, of.stages, of.mesh
        self._model = model = of.call.module if model is None else model
        self._parts = [self._typed(part) for part in parts]
        self._inputs = [self._entered(part) for part in self._parts]
        known = [tree_map(zeros_where_unknown, x) if mesh.is_dry else x for x in self._inputs]
        with of.call.autocast():
            self._splits: list[Split | Undivided] = list(of.stages.split.at_all(known))
            for i, split in enumerate(self._splits):
                if self._set_up(split, model):  # which the next ones find
                    self._splits[i + 1 :] = of.stages.split.at_all(known[i + 1 :])
        if counts:
            self._tell_of_labels()
        shape_inference = of.stages.shape_inference
        self._followed = of.accumulation.followed if counts else None
        of_parts = zip(self._splits, self._inputs, strict=True)
        of_model = loss_of if of.call.loss_fn is None else None
        self.agreed: list[InferredShapes] = []
        for split, inputs in of_parts:
            last = self.agreed[-1] if self.agreed else None
            agreed = shape_inference(split, inputs, self._called, self._followed, of_model, last)
            self.agreed.append(agreed)
        self._fit: dict[StageProgram, bool] = {}
        self._is_plain, self._later = False, DeferredWeightGrads()
        self._put_off: set[tuple[int, int]] = set()
        writing = filter(self._left_by, of.stages.local)
        self._left = {stage: LeftByForwards(partial(self._left_by, stage)) for stage in writing}
        rolling = [split.dice for split in self._splits if split.dice is not None]
        draws_in = self.draws, rolling, self._draws_in_loss(), model.training
        self._random = StageDraws(of.call, mesh, of.stages, *draws_in)
        self._before: Snapshot | None = None
        self._writes: Mapping[str, int] = {}
        if not mesh.is_dry:
            if any(split.remembers for split in self._splits):
                whole = [split for split in self._splits if isinstance(split, Undivided)]
                unmarked = whole[0].unmarked if whole and of.stages.has_last else ()
                self._before = snapshot(model, bool(whole), unmarked)
            names = frozenset().union(*(split.writes for split in self._splits))
            self._writes = {name: of.stages.home(name) for name in sorted(names)}
        if model is not of.call.module:
            self._splits = [split.on(model) for split in self._splits]

    @property
    def draws(self) -> list[Draws]:
        """What each micro-batch draws."""
        return [of.draws for of in self.agreed]

    def _tell_of_labels(self) -> None:
        """Warn where micro-batches go their own ways through the model by what their labels are."""
        splits = [split for split in dict.fromkeys(self._splits) if isinstance(split, Split)]
        if len(splits) < 2:
            return
        labels = {i for i, x in enumerate(leaves(self._inputs[0], torch.Tensor)) if is_given(x)}
        if any(split.parts_from(splits[0], labels) for split in splits[1:]):
            tell_of_labels()

    def _set_up(self, split: Split | Undivided, model: nn.Module) -> bool:
        """Let a model have what a first forward sets beside what stages compute; whether there is any."""
        modules = dict(model.named_modules()) if split.first and not self._of.mesh.is_dry else {}
        for (name, key, is_buffer), value in split.first.items() if modules else ():
            put(modules[name], key, copied(value), is_buffer)
        return bool(modules)

    def at(self, action: Action) -> None:
        """An action begins: the watch over ranks may ask which."""
        self._of.pulse.action = action
        self._of.observers.begin(action)

    def leave(self) -> None:
        """When all are through."""
        self._of.pulse.action = ""
        self._of.observers.begin(None)
        self._random.leave()
        if self._before is not None:
            has_failed = self._of.stages.runtime.failure is not None
            self._of.memory.tell(self._model, self._before, has_failed)
        if self._writes:
            self._of.memory.tell_buffers(self._model, self._writes)

    def _typed(self, part: Any) -> Any:
        return with_labels(self._call.batches.typed(part))

    def _entered(self, part: Any) -> Any:
        return tree_map(self._call.cast, self._call.parted(part)[0])

    def _called(self, program: Any, received: Tensors, inputs: Any, runner: Any) -> Any:
        return self._call.in_stage(program, received, inputs, runner)

    def _runner(self, stage: int, micro_batch: int) -> Any:
        """What does a stage's steps on one rank, or some again; None: they are done on DTensors, once."""
        program = self._splits[micro_batch].stages[stage]
        if torch.is_grad_enabled() and program.is_again:
            known = self._of.stages.again
            return known.get(program) or known.setdefault(program, StageRecomputation(program))
        alone = self.agreed[micro_batch].alone.get(stage)
        if alone is None or self._of.mesh.is_dry or not self._fits(program):
            return None
        return partial(alone, plain=True) if self._is_plain else alone

    def _fits(self, program: StageProgram) -> bool:
        if program not in self._fit:
            self._fit[program] = SingleRank.fits(program, self._followed)
        return self._fit[program]

    @contextmanager
    def open(self, schedule: Schedule) -> Iterator[None]:
        """While open, what can be done once is not done for each micro-batch."""
        last, local = len(self._splits[0].stages) - 1, self._stages.local
        alone = [of.alone[stage] for of in self.agreed for stage in local if stage in of.alone]
        programs = dict.fromkeys(of.stages[stage] for of in self._splits for stage in local)
        is_dry = self._of.mesh.is_dry
        whole = len(alone) == len(self.agreed) * len(local) and all(map(self._fits, programs))
        rank = self._of.mesh.coordinate[self._of.mesh.axis("pipe")]
        self._put_off = _awaited_last(schedule, rank) if torch.is_grad_enabled() else set()
        self._is_plain = whole and all(of.lasts for of in alone) and not any(map(_is_hooked, programs))
        with (
            as_plain(*programs) if self._is_plain and not is_dry else nullcontext(),
            self._followed.open()
            if whole and not is_dry and last in local and self._followed is not None
            else nullcontext(),
        ):
            try:
                yield
            finally:
                for left in self._left.values():
                    left.go_on()

    def forward(self, stage: int, micro_batch: int, received: Tensors) -> Sequence[torch.Tensor]:
        programs, runner = self._splits[micro_batch].stages, self._runner(stage, micro_batch)
        put_off = (stage, micro_batch) in self._put_off
        self._of.begin()
        if torch.is_grad_enabled() and stage in self._left:
            self._left[stage].forward(micro_batch)
        with self._puts_off(programs[stage]) if put_off else nullcontext():
            if stage + 1 < len(programs):
                return self._computed(micro_batch, programs[stage], received, runner)
            return self._last(micro_batch, programs[stage], received, runner)

    def _computed(self, micro_batch: int, program: Any, received: Tensors, runner: Any) -> Any:
        """What a stage gives; it draws what one process would draw in its place."""
        compute = partial(self._called, program, received, self._inputs[micro_batch], runner)
        rolls = program.number == self._splits[micro_batch].dice
        return self._random.of_stage(program.number, micro_batch, rolls, compute)

    def _left_by(self, stage: int) -> dict[str, torch.Tensor]:
        """What forwards of a stage write to."""
        programs = dict.fromkeys(of.stages[stage] for of in self._splits)
        return {name: x for program in programs for name, x in program.left().items()}

    def _puts_off(self, program: StageProgram) -> AbstractContextManager[None]:
        written = set(map(id, program.left().values()))  # a forward may give them other memory
        parameters = [p for p in program.parameters() if id(p) not in written]
        if not self._of.mesh.is_dry:
            return self._later.of(parameters)
        is_done = self._is_plain and self._call.casts is None  # as autocast's casts are between
        return watching(PutOffDry(parameters, self._later)) if is_done else nullcontext()

    def _last(self, micro_batch: int, program: Any, received: Tensors, runner: Any) -> Sequence[torch.Tensor]:
        part = self._parts[micro_batch]

        def forward(part: Any) -> torch.Tensor:
            output = self._computed(micro_batch, program, received, runner)
            return self._random.of_loss(partial(self._call.loss, output, part))

        loss, number = self._of.accumulation.counted(part, forward) if self._counts else (forward(part), None)
        with raw():
            kept = plain(loss).detach()
        self.losses[micro_batch] = stamp(kept, loss._layout) if type(loss) is DTensor else kept, number
        return [loss]

    def _draws_in_loss(self) -> bool | None:
        """Whether losses draw random numbers: None if that is to be seen, by all ranks."""
        call = self._call
        if call.loss_fn is None:
            return False  # the model's forward makes it
        return call.seen_to_draw.get(self._model.training) if call.loss_draws is None else call.loss_draws

    def weight(self, micro_batch: int) -> torch.Tensor:
        loss, number = self.losses[micro_batch]
        weight = self._of.accumulation.weigh(loss, number)
        with raw():
            # where the gradient is a sum over ranks, one of them gives it
            summed = gradient_layout(loss._layout).partial if type(loss) is DTensor else ()
            gives = not any(self._call.mesh.coordinate[a] for a in summed)
            scale, bare = self._of.scale if gives else 0.0, plain(loss)
            if weight is not None and scale == 1:
                return weight.to(bare.dtype).view(bare.shape)
            one = torch.full_like(bare, scale)
            return one if weight is None else one * weight.to(one)

    def hold_backward(self, stage: int, micro_batch: int) -> None:
        if stage in self._left:
            self._left[stage].backward(micro_batch)
        self._part(stage).hold()

    def begin_backward(self, stage: int, micro_batch: int, last: bool) -> None:
        if stage in self._left:
            self._left[stage].backward(micro_batch)
        self._part(stage).begin(last)

    def end_backward(self, stage: int, micro_batch: int) -> None:
        self._later.do()
        if stage in self._left:
            self._left[stage].end(micro_batch)
        self._part(stage).flush()

    def _part(self, stage: int) -> Gradients:
        return self._of.gradients[self._stages.local.index(stage)]


class Prediction(MicroBatches):
    """One batch, of which the model's output is wanted, not its loss.

    Attributes:
        tensors: among the output, whole; of a rank without the last stage, None.
        output: of a model that is not divided, all of it.
    """

    tensors: list[torch.Tensor] | None = None
    output: Any = None

    def __init__(self, of: StageContext, *args: Any, **options: Any) -> None:
        # in evaluation a forward may go another way by that (torch's encoders): as the program called it
        asked = of.call.asked
        self._was_asked = asked is not None and asked.grad
        self._has_graph = self._was_asked and not of.call.module.training
        with torch.set_grad_enabled(self._has_graph):
            super().__init__(of, *args, **options)

    def _called(self, program: Any, received: Tensors, inputs: Any, runner: Any) -> Any:
        # what could not be looked into may take gradients itself
        with torch.set_grad_enabled(self._was_asked if program.is_opaque else self._has_graph):
            return super()._called(program, received, inputs, runner)

    def _draws_in_loss(self) -> bool:
        return False  # there is none

    def _typed(self, part: Any) -> Any:
        return self._call.entered(part)

    def _entered(self, part: Any) -> Any:
        return part

    def _last(self, micro_batch: int, program: Any, received: Tensors, runner: Any) -> Sequence[torch.Tensor]:
        whole = plain_output(opened(self._computed(micro_batch, program, received, runner)))
        if isinstance(program, WholeProgram):  # no other rank knows its form
            self.output = whole
        self.tensors = leaves(whole, torch.Tensor)
        return [torch.zeros(())]  # where a loss would be

    def everywhere(self, source: int) -> Any:
        """The output on all ranks."""
        mesh, program = self._of.mesh, self._splits[0].stages[-1]
        if isinstance(program, WholeProgram):
            output = gather_objects(sendable(self.output), mesh["pipe"])[source]
            if isinstance(output, Exception):
                raise output
            return closed(output)
        outputs = []
        for i, (shape, dtype) in enumerate(program.result):
            if self.tensors is None:
                whole = torch.empty(shape, dtype=dtype, device=mesh.device())
            else:
                whole = self.tensors[i].to(mesh.device(), dtype)
            outputs.append(broadcast(whole, mesh, mesh.axis("pipe"), source))
        output = sendable(program.rebuilt(outputs))
        if isinstance(output, Exception):
            raise output
        return closed(output)


def _is_hooked(program: StageProgram) -> bool:
    """Whether somebody is told of its parameters in the backward pass, and expects DTensors."""
    with raw():
        return any(gradient_hooks(p) or hooks_after_gradient(p) for p in program.parameters())


def _awaited_last(schedule: Schedule, rank: int) -> set[tuple[int, int]]:
    """Stages of a rank, and the last micro-batch of each, whose gradients another rank waits for to end.

    Of others too it could have inputs' gradients sooner; but each call of a layer takes longer then, and most
    of the time the other rank has something else to do.
    """
    places = schedule.stage_to_rank
    last = {stage: micro for kind, stage, micro in schedule.actions[rank] if kind is ActionKind.B}
    return {(stage, micro) for stage, micro in last.items() if stage and places[stage - 1] != rank}


def zeros_where_unknown(x: Any) -> Any:
    """An input of a dry mesh to trace the model on: where its values are not known, zeros.

    What other ranks have of it is like what the played one has.
    """
    if not isinstance(x, torch.Tensor):
        return x
    values = values_of(x)
    if values is None or not values.numel():
        return torch.zeros(x.shape, dtype=x.dtype)
    for dim, size in enumerate(x.shape):
        values = values.index_select(dim, torch.arange(size) % values.shape[dim])
    return values.clone()
