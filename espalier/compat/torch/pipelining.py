"""``torch.distributed.pipelining``: ``pipeline``, stages, and schedules by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining import SplitPoint
from torch.distributed.pipelining.microbatch import merge_chunks

from espalier.comm.control import gather_objects
from espalier.compat.plans import plan_for_world
from espalier.compat.torch.data_parallel import Said
from espalier.engine import Engine, initialize
from espalier.engine.module import optimizer_of
from espalier.engine.passes import plain_output
from espalier.parallel.schedules import Schedule
from espalier.parallel.schedules.torchs import interleaved_zero_bubble, looped_bfs
from espalier.tensor import full_tensor
from espalier.texts import refuse
from espalier.trees import tree_map


class PipelineStage:
    """This rank's place in a pipeline, as ``torch.distributed.pipelining.PipelineStage``.

    Args:
        submodule: the whole model: each rank holds all of it until it is laid out. It is cut where the
            :func:`pipeline` that built this says, else where stages are about equal.
        stage_index: this rank's stage; of several on a rank the schedule knows.
        num_stages: all stages.
        device, input_args, output_args, group, output_grads, input_grads, get_mesh: no effect: the engine
            knows.
        dw_builder: None: the engine takes gradients of weights apart.

    Attributes:
        submod: the model, on whose parameters the optimizer is built.
    """

    def __init__(
        self,
        submodule: nn.Module,
        stage_index: int,
        num_stages: int,
        device: Any = None,
        input_args: Any = None,
        output_args: Any = None,
        output_grads: Any = None,
        input_grads: Any = None,
        group: Any = None,
        dw_builder: Any = None,
        get_mesh: Any = None,
        *,
        cuts: tuple[str, ...] | None = None,
    ) -> None:
        told = "gradients of weights are taken apart by the engine: expected None"
        refuse("PipelineStage", [("dw_builder", "...", told)] if dw_builder is not None else [])
        self.submod, self.stage_index, self.num_stages = submodule, stage_index, num_stages
        self.cuts = cuts

    @property
    def is_first(self) -> bool:
        """Whether it is given the inputs."""
        return self.stage_index == 0

    @property
    def is_last(self) -> bool:
        """Whether it is given the targets."""
        return self.stage_index == self.num_stages - 1


class Pipe:
    """A model and where it is cut, as :func:`pipeline` gives it."""

    def __init__(self, module: nn.Module, cuts: tuple[str, ...]) -> None:
        self.module, self.cuts = module, cuts
        self.num_stages = len(cuts) + 1

    def build_stage(self, stage_index: int, device: Any = None, group: Any = None) -> PipelineStage:
        """A stage of it."""
        return build_stage(self.module, stage_index, self, device, group)

    def get_stage_module(self, stage_idx: int) -> nn.Module:
        """The model: each rank holds all of it until it is laid out."""
        return self.module

    def info(self) -> Pipe:
        """What :func:`build_stage` asks for: itself."""
        return self


def build_stage(
    stage_module: nn.Module, stage_index: int, pipe_info: Pipe, device: Any = None, group: Any = None
) -> PipelineStage:
    """A stage of what :func:`pipeline` gave: of its ``get_stage_module(...)`` and ``info()``."""
    stages, cuts = pipe_info.num_stages, pipe_info.cuts
    return PipelineStage(stage_module, stage_index, stages, device, group=group, cuts=cuts)


def pipeline(
    module: nn.Module,
    mb_args: Any = (),
    mb_kwargs: Mapping[str, Any] | None = None,
    split_spec: Mapping[str, SplitPoint] | None = None,
    split_policy: Any = None,
) -> Pipe:
    """A model and where it is cut.

    Args:
        mb_args, mb_kwargs: no effect: the first batch is what the model is traced on.
        split_spec: names of modules at which stages begin, or behind which they do.
        split_policy: None.

    Raises:
        MistakeError: a module does not exist, there is none behind it, or there is a ``split_policy``.
    """
    mistakes: list[tuple[str, Any, str]] = (
        [("split_policy", "...", "say where by split_spec")] if split_policy is not None else []
    )
    names = [name for name, _ in module.named_modules()]
    cuts = []
    for name, point in (split_spec or {}).items():
        after = [n for n in names if n > "" and not n.startswith(f"{name}.")]
        if name not in names:
            mistakes.append((f"split_spec.{name}", point, "there is no such module"))
        elif point is SplitPoint.BEGINNING:
            cuts.append(name)
        elif after.index(name) + 1 < len(after):
            cuts.append(after[after.index(name) + 1])
        else:
            mistakes.append((f"split_spec.{name}", point, "there is nothing behind it"))
    refuse("pipeline", mistakes)
    return Pipe(module, tuple(cuts))


class _Schedule:
    """Makes the steps of a pipeline, by the name of its class.

    All ranks call :meth:`step`; the rank of the first stage gives inputs, that of the last targets.

    Args:
        stage: this rank's, or its stages.
        n_microbatches: ``Plan(accumulate=...)``.
        loss_fn: ``loss_fn(output, target)``, a mean over rows or a sum.
        args_chunk_spec, kwargs_chunk_spec, output_merge_spec: None: rows are cut.
        scale_grads: True: gradients are those of the batch, whatever its micro-batches.
        plan: keys of a :class:`~espalier.Plan` that hold in place of these.
    """

    schedule: str | Callable[[int, int, int], Schedule] = ""

    def __init__(
        self,
        stage: PipelineStage | list[PipelineStage],
        n_microbatches: int,
        loss_fn: Callable[[Any, Any], torch.Tensor] | None = None,
        args_chunk_spec: Any = None,
        kwargs_chunk_spec: Any = None,
        output_merge_spec: Any = None,
        scale_grads: bool = True,
        *,
        plan: Said = None,
    ) -> None:
        whole = "rows are cut: expected None"
        specs = {"args": args_chunk_spec, "kwargs": kwargs_chunk_spec, "output_merge": output_merge_spec}
        mistakes = [(f"{name}_spec", "...", whole) for name, spec in specs.items() if spec is not None]
        if not scale_grads:
            mistakes.append(("scale_grads", "False", "gradients are those of the whole batch: expected True"))
        refuse(type(self).__name__, mistakes)
        self._stages = stage if isinstance(stage, list) else [stage]
        self._loss_fn, self._plan = loss_fn, plan
        first = self._stages[0]
        each = len(self._stages)
        ranks, kind = first.num_stages // each, type(self).schedule
        self._said: dict[str, Any] = {
            "pipe": ranks,
            "schedule": kind if isinstance(kind, str) else kind(ranks, n_microbatches, each),
            "accumulate": n_microbatches,
            "cuts": first.cuts,
        }
        if each > 1:
            self._said["stages_per_rank"] = each
        self._made: Engine | None = None
        self._kept: list[tuple[Any, torch.Tensor]] = []  # output and loss of micro-batches, in the last stage
        self._loss_options: Mapping[str, Any] = {}

    @property
    def engine(self) -> Engine:
        """The engine that trains the model; it is made now, if it was not."""
        if self._made is None:
            model = self._stages[0].submod
            plan = plan_for_world(self._said, self._plan)
            loss_fn = None if self._loss_fn is None else self._kept_loss
            self._made = initialize(model, optimizer_of(model), plan, loss_fn=loss_fn)
        return self._made

    def _kept_loss(self, output: Any, target: Any) -> torch.Tensor:
        """The program's loss of a micro-batch, of which it may ask for what it was made of."""
        assert self._loss_fn is not None
        loss = self._loss_fn(output, target, **self._loss_options)
        detached = tree_map(lambda x: x.detach() if isinstance(x, torch.Tensor) else x, output)
        self._kept.append((detached, loss.detach()))
        return loss

    def step(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Any] | None = None,
        return_outputs: bool = True,
        loss_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Forward and backward of a batch; forward alone without a loss function, or in :meth:`eval`.

        Args:
            args, kwargs: inputs, from the first stage's rank; others may leave them out.
            target: from the last stage's rank.
            losses: takes the loss of each micro-batch; where the last stage is not, their mean as often.
            return_outputs: whether the rank of the last stage is given the output, of the whole batch.
            loss_kwargs: more arguments of the loss function, from the last stage's rank.

        Returns:
            the output, on the last stage's rank; else None.
        """
        engine = self.engine
        self._kept, self._loss_options = [], dict(loss_kwargs or {})
        has_inputs = bool(args or kwargs)
        said = gather_objects(
            ((args, kwargs) if has_inputs and engine.mesh.rank == 0 else None, None if has_inputs else target)
            if engine.mesh.size() > 1
            else None,
            engine.mesh,
        )
        if engine.mesh.size() > 1:
            args, kwargs = next(x[0] for x in said if x[0] is not None)
            target = next((x[1] for x in reversed(said) if x[1] is not None), target)
        inputs = kwargs or (args[0] if len(args) == 1 else args)
        is_last = any(stage.is_last for stage in self._stages)
        if self._loss_fn is None or (target is None and not torch.is_grad_enabled()):
            output = engine.predict(inputs)
            return output if is_last and return_outputs else None
        if not torch.is_grad_enabled():
            loss = engine.evaluate(engine.cut((inputs, target)))
        else:
            engine.accumulate(engine.cut((inputs, target)))
            engine.finish_gradients()
            assert engine.loss is not None
            loss = engine.loss
        n = engine.plan.accumulate
        kept, self._kept = self._kept[-n:], []  # before them may stand what the model was split by
        if losses is not None:
            losses[:] = [full_tensor(x) for _, x in kept] if len(kept) == n else [loss] * n
        if not return_outputs or len(kept) != n:
            return None
        return merge_chunks([plain_output(x) for x, _ in kept], None)

    def eval(self, *args: Any, **kwargs: Any) -> Any:
        """:meth:`step` without gradients."""
        with torch.no_grad():
            return self.step(*args, **kwargs)


class ScheduleGPipe(_Schedule):
    """All forward passes, then all backward passes."""

    schedule = "gpipe"


class Schedule1F1B(_Schedule):
    """One forward, one backward pass in turn."""

    schedule = "1f1b"


class _Several(_Schedule):
    """A schedule of several stages a rank.

    Args:
        stages: this rank's.
        backward_requires_autograd: True.
        defer_pp_recv: no effect: what arrives is waited for where it is used.
    """

    def __init__(
        self,
        stages: list[PipelineStage],
        n_microbatches: int,
        loss_fn: Callable[[Any, Any], torch.Tensor] | None = None,
        args_chunk_spec: Any = None,
        kwargs_chunk_spec: Any = None,
        output_merge_spec: Any = None,
        scale_grads: bool = True,
        backward_requires_autograd: bool = True,
        defer_pp_recv: bool = False,
        *,
        plan: Said = None,
    ) -> None:
        if not backward_requires_autograd:
            expected = "gradients are autograd's: expected True"
            refuse(type(self).__name__, [("backward_requires_autograd", False, expected)])
        specs = args_chunk_spec, kwargs_chunk_spec, output_merge_spec
        super().__init__(stages, n_microbatches, loss_fn, *specs, scale_grads, plan=plan)


class ScheduleInterleaved1F1B(_Several):
    """The same, with several stages a rank."""

    schedule = "interleaved"


class ScheduleLoopedBFS(_Several):
    """All forward passes of one of a rank's stages after another, then all backward passes."""

    schedule = staticmethod(looped_bfs)

    def __init__(
        self,
        stages: list[PipelineStage],
        n_microbatches: int,
        loss_fn: Callable[[Any, Any], torch.Tensor] | None = None,
        output_merge_spec: Any = None,
        scale_grads: bool = True,
        backward_requires_autograd: bool = True,
        defer_pp_recv: bool = False,
        *,
        plan: Said = None,
    ) -> None:
        more = output_merge_spec, scale_grads, backward_requires_autograd, defer_pp_recv
        super().__init__(stages, n_microbatches, loss_fn, None, None, *more, plan=plan)


class ScheduleInterleavedZeroBubble(_Several):
    """Interleaved 1F1B, whose gradients of weights fill the bubbles."""

    schedule = staticmethod(interleaved_zero_bubble)


class ScheduleZBVZeroBubble(_Several):
    """Two stages a rank, laid out as a V, whose backward passes fill the bubbles."""

    schedule = "zbv"


class ScheduleDualPipeV(_Schedule):
    """Refused: a forward and a backward pass of two micro-batches at one time are nothing that this has."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        reason = "its overlapped passes are not here: ScheduleZBVZeroBubble lies as a V too, and idles less"
        refuse("pipelining", [("ScheduleDualPipeV", "...", reason)])


def pipe_split() -> None:
    """Refused: where a model is cut is said by names, as its ``forward`` is not written anew.

    Raises:
        MistakeError: always.
    """
    expected = 'leave it out, and write pipeline(..., split_spec={"name.of.a.module": SplitPoint.BEGINNING})'
    refuse("pipelining", [("pipe_split()", "...", expected)])


def get_schedule_class(schedule_name: str) -> type[_Schedule]:
    """A schedule by torch's name for it, in capitals or not.

    Raises:
        MistakeError: there is none of this name here.
    """
    classes = (
        ScheduleGPipe,
        Schedule1F1B,
        ScheduleInterleaved1F1B,
        ScheduleLoopedBFS,
        ScheduleInterleavedZeroBubble,
        ScheduleZBVZeroBubble,
    )
    by_name = {kind.__name__.removeprefix("Schedule").lower(): kind for kind in classes}
    if schedule_name.lower() not in by_name:
        names = ", ".join(kind.__name__.removeprefix("Schedule") for kind in classes)
        expected = f"expected {names}; more are said by plan={{'schedule': 'zb-h1'}}, see docs/pipeline.md"
        refuse("get_schedule_class", [("schedule_name", schedule_name, expected)])
    return by_name[schedule_name.lower()]


__all__ = [
    "Pipe",
    "PipelineStage",
    "Schedule1F1B",
    "ScheduleDualPipeV",
    "ScheduleGPipe",
    "ScheduleInterleaved1F1B",
    "ScheduleInterleavedZeroBubble",
    "ScheduleLoopedBFS",
    "ScheduleZBVZeroBubble",
    "SplitPoint",
    "build_stage",
    "get_schedule_class",
    "pipe_split",
    "pipeline",
]
