"""``torch.distributed.pipelining``: ``pipeline``, stages, and schedules by name."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.pipelining import SplitPoint
from torch.distributed.pipelining.microbatch import (
    TensorChunkSpec,
    merge_chunks,
    split_args_kwargs_into_chunks,
    sum_reducer,
)

from espalier.comm.control import gather_objects
from espalier.compat.common import LateModule, Readers, counts_one, plan_for_world
from espalier.compat.torch.data_parallel import Said
from espalier.compat.torch.fully import released
from espalier.engine import Engine, initialize
from espalier.engine.accumulation import Count
from espalier.engine.model_call import plain_output
from espalier.engine.module import optimizer_of
from espalier.engine.staged import Staged
from espalier.engine.surface import bound
from espalier.meanwhile import setting
from espalier.mesh import Mesh
from espalier.mesh.mesh import coordinate_at
from espalier.parallel import Plan
from espalier.parallel.schedules import Schedule
from espalier.parallel.schedules.generate import dual_pipe_v, interleaved_zero_bubble, looped_bfs
from espalier.parallel.tensor.tables import unstyled
from espalier.tensor import full_tensor
from espalier.texts import refuse
from espalier.trees import tensors_in, tree_map


class PipelineStage:
    """A part of a model, and its place in a pipeline, as ``torch.distributed.pipelining.PipelineStage``.

    Args:
        submodule: this stage's part of the model; what it gives goes into the next stage's. Where
            :func:`pipeline` built this, the whole model.
        stage_index, num_stages: which of all stages it is.
        device, input_args, output_args, output_grads, input_grads, get_mesh: no effect: the engine knows.
        group: no effect: ranks beside those of a pipeline are on the plan's axis ``data``, or on what
            ``plan=`` says.
        dw_builder: None: the engine takes gradients of weights apart.

    Attributes:
        submod: the module, on whose parameters the optimizer is built.
        cuts: where the whole model is cut; None: it is a part.
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
        if not 0 <= stage_index < num_stages:
            given = f"expected 0 to {num_stages - 1}, of {num_stages} stages"
            refuse("PipelineStage", [("stage_index", stage_index, given)])
        told = "gradients of weights are taken apart by the engine: expected None"
        refuse("PipelineStage", [("dw_builder", "...", told)] if dw_builder is not None else [])
        self.submod, self.stage_index, self.num_stages = submodule, stage_index, num_stages
        self.device, self.group, self.cuts = device, group, cuts

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

    @staticmethod
    def from_tracing(
        mod: nn.Module,
        example_args: tuple[Any, ...],
        example_kwargs: Mapping[str, Any] | None = None,
        split_policy: Any = None,
    ) -> Pipe:
        """As :func:`pipeline`, of a model whose ``forward`` says where it is cut."""
        return pipeline(mod, example_args, example_kwargs, split_policy=split_policy)

    def build_stage(self, stage_index: int, device: Any = None, group: Any = None) -> PipelineStage:
        """A stage of it."""
        return build_stage(self.module, stage_index, self, device, group)

    def get_stage_module(self, stage_idx: int) -> nn.Module:
        """The model: each rank holds all of it until it is laid out."""
        return self.module

    def info(self) -> Pipe:
        """What :func:`build_stage` asks for: itself."""
        return self

    def __str__(self) -> str:
        where = ", ".join(map(repr, self.cuts)) or "no module"
        return f"{self.num_stages} stages of a {type(self.module).__name__}, which begin at {where}"

    def print_readable(self) -> None:
        """Print where the model is cut."""
        print(self)


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
        mb_args, mb_kwargs: a micro-batch; without a ``split_spec`` the model is called on it once, and is cut
            at each module that comes next after a :func:`pipe_split`.
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
    if split_spec is None and (mb_args or mb_kwargs):
        cuts = _marked(module, mb_args, mb_kwargs or {})
    return Pipe(module, tuple(cuts))


_marks: ContextVar[list[str | None] | None] = ContextVar("marks", default=None)  # None: a module is awaited


def pipe_split() -> None:
    """Within a model's ``forward``: a stage begins at the module that is called next.

    :func:`pipeline` looks for it; elsewhere it does nothing.
    """
    if (marks := _marks.get()) is not None:
        marks.append(None)


def _marked(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[str]:
    """The modules that are called next after a :func:`pipe_split`, seen in a call."""
    marks: list[str | None] = []
    buffers = {x: x.clone() for x in module.buffers()}

    def enter(name: str, *_: Any) -> None:
        if marks and marks[-1] is None:
            marks[-1] = name

    with ExitStack() as hooks, setting(_marks, marks), torch.no_grad(), torch.random.fork_rng():
        for name, m in module.named_modules():
            hooks.enter_context(m.register_forward_pre_hook(partial(enter, name)))
        module(*args, **kwargs)
        for x, before in buffers.items():
            x.copy_(before)
    if None in marks:
        reason = "no module is called behind it: expected one, at which the next stage begins"
        refuse("pipeline", [("pipe_split()", "...", reason)])
    return [name for name in marks if name is not None]


class _Whole(nn.Module):
    """Stages one behind the other, as one model: what each gives is what the next is called on."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        super().__init__()
        for i, part in enumerate(parts):
            self.add_module(str(i), part)

    def forward(self, args: tuple[Any, ...], kwargs: tuple[Mapping[str, Any], ...]) -> Any:
        """What the last stage gives.

        Args:
            args: of the first stage.
            kwargs: of each stage.
        """
        for stage, named in zip(self.children(), kwargs, strict=True):
            out = stage(*args, **named)
            args = tuple(out) if isinstance(out, tuple | list) else (out,)
        return out


class _Given(NamedTuple):
    """What a rank gives to a step.

    Attributes:
        place: which part of the batch is this rank's, where several pipelines share it.
        stages: the rank's.
        inputs: ``args`` and ``kwargs`` of its first stage, of each micro-batch; None: none.
        targets: for its last, of each micro-batch; None: none.
        is_by_rows: whether inputs are cut, and outputs joined, by rows.
        is_cut: whether the program has cut them.
    """

    place: int
    stages: tuple[int, ...]
    inputs: tuple[Sequence[tuple[Any, ...]], Sequence[Mapping[str, Any]]] | None
    targets: list[Any] | None
    is_by_rows: bool
    is_cut: bool


class _Schedule:
    """Makes the steps of a pipeline, by the name of its class.

    All ranks call :meth:`step`; the rank of the first stage gives inputs, that of the last targets. Where
    several pipelines are beside each other (on the axis ``data``), each gives its own rows, or one of them
    gives all.

    Args:
        stage: this rank's, or its stages.
        n_microbatches: ``Plan(accumulate=...)``.
        loss_fn: ``loss_fn(output, target)``, a mean over rows or a sum.
        args_chunk_spec, kwargs_chunk_spec: how inputs are cut, as torch's; by default by rows.
        output_merge_spec: how outputs of micro-batches are joined, as torch's; by default by rows.
        scale_grads: whether gradients are those of the mean of the micro-batches' losses, which all count
            alike; else of their sum.
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
        self._stages = stage if isinstance(stage, list) else [stage]
        self._loss_fn, self._plan = loss_fn, plan
        self._specs, self._merge_spec = (args_chunk_spec, kwargs_chunk_spec), output_merge_spec
        self._count: Count = counts_one if scale_grads else "sum"
        first = self._stages[0]
        each = len(self._stages)
        wrapped: dict[str, Any] = {}
        self._layouts: dict[str, str] = {}  # of modules that parallelize_module has cut
        for one in self._stages:
            one.submod, said = _unwrapped(one.submod)
            meshes, layouts, cuts_sequences = unstyled(one.submod)
            wrapped |= said
            if meshes:
                wrapped |= {"tensor": meshes[0].size()}
                wrapped["sequence_parallel"] = cuts_sequences or wrapped.get("sequence_parallel", False)
            inside = "" if one.cuts is not None else f"{one.stage_index}."
            self._layouts |= {f"{inside}{name}": how for name, how in layouts.items()}
        ranks, kind = first.num_stages // each, type(self).schedule
        if ranks * each != first.num_stages:
            reason = f"expected the same number on each rank: {first.num_stages} stages are no multiple of it"
            refuse(type(self).__name__, [("stages", each, reason)])
        self._said: dict[str, Any] = {
            **wrapped,
            "pipe": ranks,
            "schedule": kind if isinstance(kind, str) else kind(ranks, n_microbatches, each),
            "accumulate": n_microbatches,
            "cuts": first.cuts if first.cuts is not None else [str(i) for i in range(1, first.num_stages)],
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
            plan = plan_for_world(self._said, self._plan)
            mesh = self._mesh(plan)
            model = self._stages[0].submod if self._is_whole else self._joined(mesh)
            loss_fn = None if self._loss_fn is None else self._kept_loss
            of_all = gather_objects(self._layouts, mesh) if mesh.size() > 1 else [self._layouts]
            layouts = {name: how for of in of_all for name, how in of.items()}
            options: dict[str, Any] = {"loss_fn": loss_fn, "count": self._count, "layouts": layouts or None}
            self._made = initialize(model, optimizer_of(model), plan, mesh=mesh, **options)
            self._place = Readers(mesh, plan).place
        return self._made

    @property
    def _is_whole(self) -> bool:
        """Whether each rank has the whole model, and not its stages alone."""
        return self._stages[0].cuts is not None

    def _mesh(self, plan: Plan) -> Mesh:
        """The mesh on which this rank has the stages that the program gave it.

        Raises:
            MistakeError: none has; on all ranks.
        """
        here, axes = self._stages[0].stage_index, plan.axes
        known = Mesh.from_env(axes)
        if plan.pipe == 1:
            return known
        inner = {name: n for name, n in axes.items() if name != "pipe"} | {"pipe": plan.pipe}
        places = [x % plan.pipe if x < plan.pipe else -1 for x in gather_objects(here, known)]
        for order in (axes, inner):
            mesh = Mesh.from_env(order)
            if all(place == _along(order, "pipe", rank) for rank, place in enumerate(places)):
                return mesh
        reason = (
            f"on rank {known.rank}; a pipeline's ranks are next to each other, or as far apart as there are "
            f"pipelines: expected {_along(axes, 'pipe', known.rank)} or {_along(inner, 'pipe', known.rank)}"
        )
        refuse(type(self).__name__, [("stage_index", here, reason)])
        raise AssertionError

    def _joined(self, mesh: Mesh) -> nn.Module:
        """The stages of all ranks as one model; this rank's are the very modules that it gave."""
        own = {stage.stage_index: stage.submod for stage in self._stages}
        parts: dict[int, nn.Module] = {}
        for rank, packed in enumerate(gather_objects(_packed(own), mesh) if mesh.size() > 1 else []):
            if isinstance(packed, str):
                reason = (
                    f"they travel to all ranks once, and cannot ({packed}): expected modules that can be "
                    "pickled; or the whole model on each rank, cut by pipeline(model, ...)"
                )
                refuse(type(self).__name__, [("stages", f"of rank {rank}", reason)])
            else:
                parts = {**pickle.loads(packed), **parts}
        parts |= own
        missing = sorted({*range(self._stages[0].num_stages)} - {*parts})
        if missing:
            reason = f"no rank has {', '.join(map(str, missing))}: expected each stage on one"
            refuse(type(self).__name__, [("stages", sorted(parts), reason)])
        return _Whole([parts[i] for i in sorted(parts)])

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
        arg_mbs: list[tuple[Any, ...]] | None = None,
        kwarg_mbs: list[dict[str, Any]] | None = None,
        target_mbs: list[Any] | None = None,
        finalize_gradients: bool = True,
        **kwargs: Any,
    ) -> Any:
        """Forward and backward of a batch; forward alone without a loss function, or in :meth:`eval`.

        Args:
            args, kwargs: inputs, from the first stage's rank; others may leave them out. Where each rank has
                its part of the model, ``kwargs`` are those of its own first stage.
            target: from the last stage's rank.
            losses: takes the loss of each micro-batch; where the last stage is not, their mean as often.
            return_outputs: whether the rank of the last stage is given the output, of the whole batch.
            loss_kwargs: more arguments of the loss function, from the last stage's rank.
            arg_mbs, kwarg_mbs, target_mbs: in place of ``args``, ``kwargs`` and ``target`` those of each
                micro-batch, as torch takes them from 2.14 on.
            finalize_gradients: no effect: sums over the ranks add up to the same, whenever they are made.

        Returns:
            the output, on the last stage's rank; else None.
        """
        engine, n = self.engine, self.engine.plan.accumulate
        self._kept, self._loss_options = [], dict(loss_kwargs or {})
        of_all = self._given((args, kwargs, target), (arg_mbs, kwarg_mbs, target_mbs), n)
        inputs = self._inputs(of_all, n)
        targets = self._targets(of_all)
        spans = self._spans(of_all)
        is_last = any(stage.is_last for stage in self._stages)
        if self._loss_fn is None or not (targets or torch.is_grad_enabled()):
            if all(x.is_by_rows and not x.is_cut for x in of_all):
                inputs = [joined(inputs)]
            outputs = [engine.predict(x) for x in inputs]
            if spans is not None:
                outputs = [_own_rows(outputs[0], spans)]
            return merge_chunks(outputs, self._merge_spec) if is_last and return_outputs else None
        if not targets:
            expected = "none was given on any rank: expected it from the rank of the last stage"
            refuse(type(self).__name__, [("target", None, expected)])
        parts = list(zip(inputs, targets, strict=True))
        if not torch.is_grad_enabled():
            loss = engine.evaluate(parts)
        else:
            passes = engine.passes
            earlier = passes.taken_gradients() if isinstance(passes, Staged) else {}
            engine.accumulate(parts)
            engine.finish_gradients()
            if isinstance(passes, Staged):
                passes.add_gradients(earlier)  # as on one process, until the program drops them
            assert engine.loss is not None
            loss = engine.loss
        kept, self._kept = self._kept[-n:], []  # before them may stand what the model was split by
        has_all = len(kept) == n
        outputs, told = [plain_output(x) for x, _ in kept], [full_tensor(x) for _, x in kept]
        if spans is not None and has_all:  # as each of several pipelines has its own
            outputs = [_own_rows(x, [span]) for x, span in zip(outputs, spans, strict=True)]
            own = next(x.targets for x in of_all if x.place == self._place and x.targets is not None)
            with torch.no_grad():
                several = zip(outputs, own, strict=True) if losses is not None else ()
                told = [self._loss_fn(*each, **self._loss_options) for each in several]
        if losses is not None:
            losses[:] = told if has_all else [loss] * n
        return merge_chunks(outputs, self._merge_spec) if return_outputs and has_all else None

    def _spans(self, of_all: Sequence[_Given]) -> list[tuple[int, int, int]] | None:
        """Of each micro-batch where this pipeline's rows begin, how many there are, and how many all have.

        None where they are all its own.
        """
        rows = {
            x.place: [_rows(part) for part in zip(*x.inputs, strict=True)]
            for x in of_all
            if x.inputs is not None and (self._is_whole or 0 in x.stages)
        }
        if len(rows) < 2 or self._place not in rows:
            return None
        before = [of for place, of in rows.items() if place < self._place]
        starts = [sum(of[i] for of in before) for i in range(len(rows[self._place]))]
        sizes = map(sum, zip(*rows.values(), strict=True))
        return [*zip(starts, rows[self._place], sizes, strict=True)]

    def _given(self, whole: tuple[Any, Any, Any], cut: tuple[Any, Any, Any], n: int) -> list[_Given]:
        """What each rank gives to a step of ``n`` micro-batches: inputs and targets, or those that it cut.

        Raises:
            MistakeError: it gives both, or not as many as there are micro-batches.
        """
        is_cut = any(x is not None for x in cut)
        args, kwargs, target = whole
        inputs, targets = None, None if target is None else _cut(target, n)
        if is_cut:
            both = bool(args or kwargs or target is not None)
            named = zip(("arg_mbs", "kwarg_mbs", "target_mbs"), cut, strict=True)
            odd = [(k, x) for k, x in named if x is not None and not (isinstance(x, list) and len(x) == n)]
            mistakes = [(k, f"of type {type(x).__name__}", f"expected a list of {n}") for k, x in odd]
            expected = "or those of micro-batches, not both: leave args, kwargs and target out"
            refuse("step", [*mistakes, *([("inputs", "of the batch", expected)] if both else [])])
            args, kwargs, targets = cut
            if args is not None or kwargs is not None:
                inputs = args or [()] * n, kwargs or [{}] * n
        elif args or kwargs:
            inputs = split_args_kwargs_into_chunks(args, kwargs, n, *self._specs)
        stages = tuple(x.stage_index for x in self._stages)
        by_rows = self._specs == (None, None) and self._merge_spec is None
        own = _Given(self._place, stages, inputs, targets, by_rows, is_cut)
        return gather_objects(own, self.engine.mesh) if self.engine.mesh.size() > 1 else [own]

    def _inputs(self, of_all: Sequence[_Given], n: int) -> list[Any]:
        """The model's inputs of each micro-batch; of all pipelines that give some.

        Raises:
            MistakeError: none does, or one of fewer rows than micro-batches; or several do, and rows are not
                what they are cut by.
        """
        few = min((len(x.inputs[0]) for x in of_all if x.inputs is not None), default=n)
        if few < n:
            refuse("step", [("inputs", f"of {few} rows", f"expected one for each of {n} micro-batches")])
        cut = []
        for place in sorted({x.place for x in of_all}):
            giving = [x for x in of_all if x.place == place and x.inputs is not None]
            if any(self._is_whole or 0 in x.stages for x in giving):
                cut.append(self._of_one(giving, n))
        if not cut:
            expected = "none were given on any rank: expected them from the rank of the first stage"
            refuse(type(self).__name__, [("inputs", "()", expected)])
        if len(cut) > 1 and not all(x.is_by_rows for x in of_all):
            reason = "several pipelines share a batch, and their rows are joined: expected None"
            refuse(type(self).__name__, [("chunk_spec", "...", reason)])
        return [joined(parts) for parts in zip(*cut, strict=True)]

    def _of_one(self, giving: Sequence[_Given], n: int) -> list[Any]:
        """The same of one pipeline, whose ranks give these."""
        if self._is_whole:
            assert giving[0].inputs is not None
            module = self._stages[0].submod
            return [bound(module, a, k) for a, k in zip(*giving[0].inputs, strict=True)]
        args: Sequence[Any] = []
        named: list[Sequence[Mapping[str, Any]]] = [[{}] * n] * self._stages[0].num_stages
        for x in giving:
            assert x.inputs is not None
            named[x.stages[0]] = x.inputs[1]
            args = x.inputs[0] if x.stages[0] == 0 else args
        return list(zip(args, zip(*named, strict=True), strict=True))

    def _targets(self, of_all: Sequence[_Given]) -> list[Any]:
        """The target of each micro-batch; of all pipelines that give one."""
        last = {x.place: x.targets for x in of_all if x.targets is not None}
        return [joined(parts) for parts in zip(*(last[place] for place in sorted(last)), strict=True)]

    def eval(self, *args: Any, **kwargs: Any) -> Any:
        """:meth:`step` without gradients."""
        with torch.no_grad():
            return self.step(*args, **kwargs)


def _unwrapped(module: nn.Module) -> tuple[nn.Module, dict[str, Any]]:
    """A stage's module without its wrapper, and the keys of a plan that this asks for."""
    if isinstance(module, LateModule):
        return module.module, released(module.module) | module.said
    return module, released(module)


def _packed(parts: Mapping[int, nn.Module]) -> bytes | str:
    """A rank's stages as they travel, or why they cannot."""
    try:
        return pickle.dumps(parts)
    except Exception as error:  # whatever an attribute of a module says to it
        return f"{type(error).__name__}: {error}"


def _along(axes: Mapping[str, int], name: str, rank: int) -> int:
    """A rank's coordinate on one axis, of axes that are said outermost first."""
    return coordinate_at(rank, [*axes.values()])[[*axes].index(name)]


def _rows(given: Any) -> int:
    """How many rows the inputs of a micro-batch have."""
    return max((x.shape[0] for x in tensors_in(given) if x.ndim), default=0)


def _own_rows(output: Any, spans: Sequence[tuple[int, int, int]]) -> Any:
    """Of what came of micro-batches, one behind the other, what is of the rows of one pipeline."""
    size = sum(of for *_, of in spans)

    def own(x: Any) -> Any:
        each, odd = divmod(x.shape[0], max(size, 1)) if isinstance(x, torch.Tensor) and x.ndim else (0, 1)
        if odd:
            return x
        parts, at = [], 0
        for start, n, of in spans:
            parts.append(x.narrow(0, (at + start) * each, n * each))
            at += of
        return torch.cat(parts)

    return tree_map(own, output)


def _cut(target: Any, n: int) -> list[Any]:
    """A target as those of micro-batches, cut as torch cuts."""

    def part(i: int, x: Any) -> Any:
        return x.tensor_split(n)[i] if isinstance(x, torch.Tensor) else x

    return [tree_map(partial(part, i), target) for i in range(n)]


def joined(parts: Sequence[Any]) -> Any:
    """The rows of several batches, one behind the other, as one."""
    first = parts[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(list(parts)) if len(parts) > 1 else first
    if isinstance(first, Mapping):
        return {name: joined([part[name] for part in parts]) for name in first}
    if isinstance(first, tuple | list):
        return type(first)(joined(of) for of in zip(*parts, strict=True))
    return first


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
        max_active_stages, unshard_lookahead, defer_reduce_grad_wait, max_outstanding_sends: of torch 2.15; no
            effect: how much is under way at once is the engine's affair.
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
        max_active_stages: int = 3,
        unshard_lookahead: str | tuple[int, ...] = "full",
        *,
        defer_reduce_grad_wait: bool = False,
        max_outstanding_sends: int | None = None,
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
        max_active_stages: int = 3,
        unshard_lookahead: str | tuple[int, ...] = "full",
        *,
        defer_reduce_grad_wait: bool = False,
        max_outstanding_sends: int | None = None,
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


class ScheduleDualPipeV(_Several):
    """Two stages a rank, laid out as a V. Passes that overlap in torch's run one behind the other."""

    schedule = staticmethod(dual_pipe_v)


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
        ScheduleDualPipeV,
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
    "TensorChunkSpec",
    "build_stage",
    "get_schedule_class",
    "pipe_split",
    "pipeline",
    "sum_reducer",
]
