"""The micro-batches of a pipeline's step, or of an evaluation: what a stage does with each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch._C import DisableTorchFunctionSubclass as raw

from espalier.comm.collectives import broadcast
from espalier.comm.words import words_of_all
from espalier.engine.accumulation import Number
from espalier.engine.batches import loss_of
from espalier.engine.predict import entered, plain_output
from espalier.layout import gradient_layout
from espalier.mesh import Mesh
from espalier.parallel.pipeline.actions import Action, Kind, Schedule
from espalier.parallel.pipeline.agreement import taken_apart
from espalier.parallel.pipeline.alone import Alone, as_plain
from espalier.parallel.pipeline.chances import Dice, States, draw_again, restore, states
from espalier.parallel.pipeline.later import Later
from espalier.parallel.pipeline.runtime import Agreed, Trees
from espalier.parallel.pipeline.split import StageProgram
from espalier.parallel.pipeline.trees import leaves
from espalier.parallel.pipeline.undivided import WholeProgram
from espalier.tensor import DTensor, plain, stamp
from espalier.tensor.seeding import stream_of
from espalier.trees import tree_map

if TYPE_CHECKING:
    from espalier.engine.pipeline import PipelineEngine


class Step:
    """The micro-batches of one run."""

    def __init__(
        self, engine: PipelineEngine, parts: Sequence[Any], phase: Callable[[str], Any], counts: bool
    ) -> None:
        self._engine, self.phase, self._counts = engine, phase, counts
        self.losses: dict[int, tuple[torch.Tensor, Number]] = {}
        self._stages = engine.stages
        self._parts = [self._typed(part) for part in parts]
        self._inputs = [self._entered(part) for part in self._parts]
        known = [tree_map(engine._plain, x) if engine.mesh.is_dry else x for x in self._inputs]
        with engine._autocast():
            self._splits = self._stages.split.at_all(known)
        agreement = self._stages.agreement
        accumulation = engine._accumulation
        assert accumulation is not None
        self._followed = accumulation.followed if counts else None
        of_parts = zip(self._splits, self._inputs, strict=True)
        of_model = loss_of if engine._loss_fn is None else None
        self.agreed = [agreement(*of, self._called, self._followed, of_model) for of in of_parts]
        self._fit: dict[StageProgram, bool] = {}
        self._is_plain, self._later = False, Later()
        self._put_off: set[tuple[int, int]] = set()
        self._device = engine.mesh.device()
        self._states, self._after = _random_states(self.agreed, self._stages.local, engine.mesh)
        self._dice: Dice | None = None
        rolling = [of.dice for of in self._splits if of.dice is not None]
        if rolling and not engine.mesh.is_dry:
            stream_of(engine.mesh)  # agreed on by all at once, not by one stage alone
            self._dice = Dice(engine.mesh, self._stages.places[max(rolling)])

    def at(self, action: Action) -> None:
        """An action begins: the watch over ranks may ask which."""
        self._engine.pulse.action = action

    def leave(self) -> None:
        """When all are through."""
        self._engine.pulse.action = ""
        if self._after is not None:
            restore(self._device, self._after)
        if self._dice is not None:
            self._dice.tell()

    def _typed(self, part: Any) -> Any:
        return self._engine._batches.typed(part)

    def _entered(self, part: Any) -> Any:
        engine = self._engine
        return tree_map(engine._cast, engine._parted(part)[0])

    def _called(self, program: Any, received: Trees, inputs: Any, runner: Any) -> Any:
        with self._engine._autocast():
            return program(received, inputs, runner)

    def _runner(self, stage: int, micro_batch: int) -> Any:
        """What does a stage's steps on one rank; None: they are done on DTensors."""
        alone = self.agreed[micro_batch].alone.get(stage)
        if alone is None or not self._fits(self._splits[micro_batch].stages[stage]):
            return None
        return partial(alone, plain=True) if self._is_plain else alone

    def _fits(self, program: StageProgram) -> bool:
        if program not in self._fit:
            self._fit[program] = Alone.fits(program, self._followed)
        return self._fit[program]

    @contextmanager
    def open(self, schedule: Schedule) -> Iterator[None]:
        """While open, what can be done once is not done for each micro-batch."""
        last, local = len(self._splits[0].stages) - 1, self._stages.local
        alone = [of.alone[stage] for of in self.agreed for stage in local if stage in of.alone]
        programs = dict.fromkeys(of.stages[stage] for of in self._splits for stage in local)
        whole = len(alone) == len(self.agreed) * len(local) and all(map(self._fits, programs))
        rank = self._engine.mesh.coordinate[self._engine._axis]
        self._put_off = _awaited_last(schedule, rank) if torch.is_grad_enabled() else set()
        self._is_plain = whole and all(of.lasts for of in alone) and not any(map(_is_hooked, programs))
        with (
            as_plain(*programs) if self._is_plain else nullcontext(),
            self._followed.open()
            if whole and last in local and self._followed is not None
            else nullcontext(),
        ):
            yield

    def forward(self, stage: int, micro_batch: int, received: Trees) -> Sequence[torch.Tensor]:
        if (stage, micro_batch) in self._states:
            restore(self._device, self._states[stage, micro_batch])
        programs, runner = self._splits[micro_batch].stages, self._runner(stage, micro_batch)
        put_off = (stage, micro_batch) in self._put_off
        with self._later.of(programs[stage].parameters()) if put_off else nullcontext():
            if stage + 1 < len(programs):
                return taken_apart(
                    self._called(programs[stage], received, self._inputs[micro_batch], runner)
                )[0]
            return self._last(micro_batch, programs[stage], received, runner)

    def _last(self, micro_batch: int, program: Any, received: Trees, runner: Any) -> Sequence[torch.Tensor]:
        engine, part = self._engine, self._parts[micro_batch]

        def forward(part: Any) -> torch.Tensor:
            output = self._called(program, received, self._inputs[micro_batch], runner)
            with engine._autocast():
                return engine._loss_in(output, engine._parted(part)[1])

        accumulation = engine._accumulation
        assert accumulation is not None
        loss, number = accumulation.counted(part, forward) if self._counts else (forward(part), None)
        with raw():
            kept = plain(loss).detach()
        self.losses[micro_batch] = stamp(kept, loss._layout) if type(loss) is DTensor else kept, number
        return [loss]

    def weight(self, micro_batch: int) -> torch.Tensor:
        accumulation = self._engine._accumulation
        assert accumulation is not None
        loss, number = self.losses[micro_batch]
        weight = accumulation.weigh(loss, number)
        with raw():
            # where the gradient is a sum over ranks, one of them gives it
            summed = gradient_layout(loss._layout).partial if type(loss) is DTensor else ()
            given = not any(self._engine._here.coordinate[a] for a in summed)
            scale, bare = self._engine.scale if given else 0.0, plain(loss)
            if weight is not None and scale == 1:
                return weight.to(bare.dtype).view(bare.shape)
            one = torch.full_like(bare, scale)
            return one if weight is None else one * weight.to(one)

    def begin_backward(self, stage: int, last: bool) -> None:
        self._part(stage).begin(last)

    def end_backward(self, stage: int) -> None:
        self._later.do()
        self._part(stage).flush()

    def _part(self, stage: int) -> Any:
        assert self._engine._data is not None
        return self._engine._data.gradients.parts[self._stages.local.index(stage)]


class Prediction(Step):
    """One batch, of which the model's output is wanted, not its loss.

    Attributes:
        tensors: among the output, whole; of a rank without the last stage, None.
        output: of a model that is not divided, all of it.
    """

    tensors: list[torch.Tensor] | None = None
    output: Any = None

    def _typed(self, part: Any) -> Any:
        return entered(self._engine, part)

    def _entered(self, part: Any) -> Any:
        return part

    def _last(self, micro_batch: int, program: Any, received: Trees, runner: Any) -> Sequence[torch.Tensor]:
        output = self._called(program, received, self._inputs[micro_batch], runner)
        whole = plain_output(output)
        if isinstance(program, WholeProgram):  # no other rank knows its form
            self.output = whole
        self.tensors = leaves(whole, torch.Tensor)
        return [torch.zeros(())]  # where a loss would be

    def everywhere(self, source: int) -> Any:
        """The output on all ranks."""
        mesh, program = self._engine.mesh, self._splits[0].stages[-1]
        if isinstance(program, WholeProgram):
            return words_of_all(self.output, mesh["pipe"])[source]
        found = []
        for i, (shape, dtype) in enumerate(program.result):
            if self.tensors is None:
                whole = torch.empty(shape, dtype=dtype, device=mesh.device())
            else:
                whole = self.tensors[i].to(mesh.device(), dtype)
            found.append(broadcast(whole, mesh, self._engine._axis, source))
        return program.rebuilt(found)


def _is_hooked(program: StageProgram) -> bool:
    """Whether somebody is told of its parameters in the backward pass, and expects DTensors."""
    with raw():
        return any(p._backward_hooks or p._post_accumulate_grad_hooks for p in program.parameters())


def _awaited_last(schedule: Schedule, rank: int) -> set[tuple[int, int]]:
    """Stages of a rank, and the last micro-batch of each, whose gradients another rank waits for to end.

    Of others too it could have inputs' gradients sooner; but each call of a layer takes longer then, and most
    of the time the other rank has something else to do.
    """
    places = schedule.stage_to_rank
    last = {stage: micro for kind, stage, micro in schedule.actions[rank] if kind is Kind.B}
    return {(stage, micro) for stage, micro in last.items() if stage and places[stage - 1] != rank}


def _random_states(
    agreed: Sequence[Agreed], local: Sequence[int], mesh: Mesh
) -> tuple[dict[tuple[int, int], States], States | None]:
    """The states of torch's generators before each stage of this rank and micro-batch, and after all.

    They are those of one process, which does a micro-batch after the other.
    """
    found: dict[tuple[int, int], States] = {}
    if mesh.is_dry or not any(draws for of in agreed for draws in of.draws):
        return found, None
    if mesh.size() > 1:
        stream_of(mesh)  # agreed on by all at once, not by each stage for each micro-batch
    device = mesh.device()
    before = states(device)
    for micro, of in enumerate(agreed):
        for stage, draws in enumerate(of.draws):
            if stage in local:
                found[stage, micro] = states(device)
            draw_again(draws, device)
    after = states(device)
    restore(device, before)
    return found, after
