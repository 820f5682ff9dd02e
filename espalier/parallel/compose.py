"""Where the strategies meet: from a plan to the layout of every parameter."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from fnmatch import fnmatch
from functools import cached_property, partial
from itertools import zip_longest
from typing import Any, NoReturn, cast
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from espalier.blocks import around, blocks, called, named_parameters_in, named_tensors_in, parameters_in
from espalier.comm.control import compared_with_first, gather_objects
from espalier.layout import Layout, Placement, Replicate, Shard
from espalier.mesh import Mesh
from espalier.mesh.parts import at
from espalier.parallel.branches import Branches, found_branches, homes_of, leave_out, place_branches
from espalier.parallel.data.zero import ZeroState
from espalier.parallel.experts import left_out, send_tokens, stacked
from espalier.parallel.pipeline.objects import closed
from espalier.parallel.pipeline.record import SplitError, all_having_it
from espalier.parallel.pipeline.remembered import Place, says_data
from espalier.parallel.pipeline.runtime import InferredShapes, Runtime
from espalier.parallel.pipeline.shape_inference import ShapeInference, twin_of
from espalier.parallel.pipeline.split import Split, StageProgram, refuse_later, split
from espalier.parallel.pipeline.trace import own_error
from espalier.parallel.plan import Offload, Plan
from espalier.parallel.schedules.actions import Action, ActionKind, Schedule, with_messages
from espalier.parallel.schedules.generate import find_schedule
from espalier.parallel.tensor.infer import Chosen, choose, infer
from espalier.parallel.tensor.sequence_parallel import cut_inputs, cut_sequences, is_norm
from espalier.parallel.tensor.tables import Cuts, Table, by_grid, kinds_from, kinds_of, table_for
from espalier.tensor import lay_out
from espalier.tensor.copies import NotCopiedError, apart
from espalier.tensor.deferred import make_the_rest_real
from espalier.tensor.dtensor import DTensor, is_sparse, kind_of, note_kind, plain, set_by_program
from espalier.tensor.modules import unwatched
from espalier.tensor.observers import tell
from espalier.tensor.rules.float8 import MULTIPLE, float8_linear, refused
from espalier.torch_private import (
    converts_itself,
    gradient_hooks,
    hooks_after_gradient,
    own_buffers,
    own_parameters,
    raw,
    swap_impls,
    use_count,
)


class Arrangement(dict[str, Layout]):
    """The layout of every parameter, by name.

    Attributes:
        chosen: what was chosen on the tensor axis.
        branches: the modules that are branches, and of which number.
        parts: of a pipeline, the names of the parameters that each stage of this rank uses.
        float8: the names of the layers whose products are of 8-bit floats.
    """

    chosen: Chosen
    branches: Branches
    parts: tuple[frozenset[str], ...] = ()
    float8: tuple[str, ...] = ()


def arrange(
    model: nn.Module,
    plan: Plan,
    mesh: Mesh,
    *,
    table: Table | None = None,
    branches: Branches | None = None,
    batch: Any = None,
    rows: int = 1,
    stages: Mapping[int, Mesh] | None = None,
) -> Arrangement | None:
    """The layout of every parameter of a model under a plan.

    On the data axes parameters are replicated and deferred while the model computes with them: their
    gradients are reduced chunk by chunk (``espalier.parallel.data``). So are, on the tensor axis, those of
    norms that meet shards of a sequence. On the tensor axes parameters are cut by a table of name patterns
    (``table``, or the model's own), or, for a model nobody described, by what a run on ``batch`` (of one row)
    and trials of its blocks (of ``rows``) show (1d), that run alone
    (3d), or all alike (2d, 2.5d). Experts (``espalier.parallel.experts``) are cut one from another, along the
    expert axis and the tensor axes. A pipeline's parameters lie on the meshes of their ``stages`` (by their
    ids).

    Returns:
        name to layout; None if a batch is needed and missing.

    Raises:
        ValueError: there is an expert axis and there are no experts.
    """
    table = table if table is not None else table_for(model)
    if plan.tensor_mode == "1d":
        among = None if mesh.is_dry or mesh.size() == 1 else mesh
        options: Any = {"table": table, "batch": batch, "rows": rows, "sequence": plan.sequence_parallel}
        with left_out(model):
            chosen = choose(model, plan.tensor, blocks(model), among=among, **options)
        cuts = None if chosen is None else _on_a_line(model, chosen.cut)
    else:
        chosen = Chosen({}, False, f"{plan.tensor_mode}: matrices both ways, vectors with their features")
        cuts = _on_a_grid(model, plan, table, batch)
    if chosen is None or cuts is None:
        return None
    experts = stacked(model)
    if plan.expert > 1 and not experts:
        raise ValueError(
            f"expert = {plan.expert}, but {type(model).__name__} has no experts: no module with num_experts, "
            "parameters [num_experts, ...] and forward(hidden, top_k_index, top_k_weights). Leave expert out."
        )
    apart = tuple(axis for axis in ("expert", *plan.tensor_axes) if axis in mesh.names)
    layouts = Arrangement()
    layouts.chosen, layouts.branches = chosen, found_branches(model, branches, plan.branch)
    if apart:
        chosen.why.update(dict.fromkeys(experts, "experts, one from another"))
    homes = homes_of(model, layouts.branches, mesh, stages or {})
    for name, p in named_parameters_in(model):
        places: list[Placement] = [Replicate()] * mesh.ndim
        order: list[str] = []
        for dim, axes in enumerate((apart,) if name in experts else cuts.get(name, ())):
            order += axes
            for axis in axes:
                places[mesh.axis(axis)] = Shard(dim)
        deferred = [a for a in plan.data_axes if a not in order]
        home = homes.get(id(p), mesh)
        layouts[name] = Layout(home, places, tuple(p.shape), order=order, deferred=deferred)
    if chosen.sequence:
        _defer(model, layouts, mesh.axis("tensor"))
    return layouts


def _defer(model: nn.Module, layouts: Arrangement, axis: int) -> None:
    """Let the engine sum the gradients of norms, which meet shards of the sequence (design, section 3.1)."""
    met = {id(p) for module in model.modules() if is_norm(module) for p in module.parameters()}
    for name, p in named_parameters_in(model):
        if id(p) in met:
            layouts[name] = layouts[name].with_deferred([axis])


def _on_a_line(model: nn.Module, cut: Mapping[str, int]) -> dict[str, Cuts]:
    """1d: the tensor axis cuts the dims chosen."""
    shared: dict[int, Cuts] = {}
    for name, p in named_parameters_in(model, remove_duplicate=False):
        if name in cut:
            shared[id(p)] = tuple(("tensor",) if d == cut[name] else () for d in range(p.ndim))
    return {name: shared[id(p)] for name, p in named_parameters_in(model) if id(p) in shared}


def _on_a_grid(model: nn.Module, plan: Plan, table: Table | None, batch: Any) -> dict[str, Cuts] | None:
    """2d, 2.5d and 3d: every matrix both ways; in a cube it matters which layers follow which."""
    if table is not None:
        kinds = kinds_of(model, table)
    elif plan.tensor_mode != "3d" or plan.tensor == 1:
        kinds = {}
    elif batch is None:
        return None
    else:
        with left_out(model):
            groups = infer(model, batch, plan.tensor_axes["k"])
        kinds = kinds_from(model, {name: dim for group in groups for name, dim in group.items()})
    return by_grid(model, plan.tensor_mode, kinds, plan.tensor_axes)


def lay_out_model(
    model: nn.Module,
    layouts: Arrangement,
    mesh: Mesh,
    plan: Plan,
    optimizer: torch.optim.Optimizer | None = None,
) -> ZeroState:
    """Make every parameter a DTensor, in place: who holds it (an optimizer, a tie) goes on holding it.

    Rank 0's values are sent to all, so ranks that were seeded differently train one model all the
    same. Buffers are sent too and stay plain tensors: every rank holds the same.

    Args:
        layouts: of the parameters while the model computes with them.
        optimizer: whose states will need space on disk, where the plan puts them there.

    Raises:
        ValueError: a parameter was laid out already.
        DiskError: there is no space for the states.
    """
    _refuse_laid_out(model)
    _leave_earlier_graphs(model)
    _note_kinds(model)
    if plan.precision.compute == "float8":
        layouts.float8 = _in_float8(model, layouts, mesh, plan.precision.keep)
    data = _share_parameters(model, layouts, mesh, plan, optimizer)
    send_tokens(model)
    place_branches(model, layouts.branches, mesh)
    _share_buffers(model, mesh, plan.precision.buffers)
    if layouts.chosen.sequence:
        inputs, asynchronous = blocks(model).values(), plan.async_tensor_parallel
        cut_sequences(model, layouts, mesh.axis("tensor"), inputs, asynchronous)
    if plan.context > 1:  # where a sequence is made inside the model: of an image, say
        cut_inputs(blocks(model).values(), mesh.axis("context"))
    torch.clear_autocast_cache()  # the user's may hold parameters, cast, from when they were whole
    return data


def _in_float8(model: nn.Module, layouts: Arrangement, mesh: Mesh, keep: Iterable[str]) -> tuple[str, ...]:
    """Let the linear layers of a model's blocks multiply 8-bit floats, in place; their names.

    Not those of the names to keep, those that anyone gave another forward, and those whose weight has a dim
    that is no multiple of 16 on every rank.

    Raises:
        ValueError: the device has no such products, or there is no such layer.
    """
    if not mesh.is_dry and (reason := refused(mesh.device())):
        raise ValueError(f'precision = "float8": {mesh.device_type} cannot multiply 8-bit floats: {reason}')
    inside = {id(m) for block in blocks(model).values() for m in block.modules()}
    names = []
    for name, module in model.named_modules():
        if id(module) not in inside or type(module).forward is not nn.Linear.forward:
            continue
        kept = "forward" in vars(module) or any(fnmatch(name, pattern) for pattern in keep)
        if not kept and _in_sixteens(layouts[f"{name}.weight"]):
            around(module, _float8)
            names.append(name)
            why = layouts.chosen.why.get(f"{name}.weight", layouts.chosen.rest)
            layouts.chosen.why[f"{name}.weight"] = f"{why}, float8" if why else "float8"
    if not names:
        raise ValueError(
            'precision = "float8": no linear layer in a list of blocks has a weight whose dims are multiples '
            f'of {MULTIPLE} on every rank. Take precision = "bfloat16".'
        )
    return tuple(names)


def _in_sixteens(layout: Layout) -> bool:
    ways = [math.prod(layout.mesh.shape[axis] for axis in cut) for cut in layout.cuts]
    return all(size % (MULTIPLE * n) == 0 for size, n in zip(layout.shape, ways, strict=True))


def _float8(module: nn.Module, own: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    x = args[0] if args else kwargs["input"]
    return float8_linear(x, cast("Any", module).weight, cast("Any", module).bias)


def _refuse_laid_out(model: nn.Module) -> None:
    for name, p in named_parameters_in(model):
        if isinstance(p, DTensor) and not vars(p).get("_is_cut_early"):
            raise ValueError(
                f"The parameter {name} is a DTensor already. Give initialize() the plain model, once: "
                "where a notebook's cell is run again, run the one that builds the model before it. Models "
                "that share it put into one, both = nn.ModuleDict({'a': a, 'b': b}), prepare that, and call "
                "its parts, both['a'](x)."
            )


def _note_kinds(model: nn.Module) -> None:
    """Let parameters of classes of their own be known as such."""
    for name, p in named_parameters_in(model):
        note_kind(p)
        kind: Any = kind_of(p)
        answers = None if kind is DTensor else getattr(kind.__torch_function__, "__func__", None)
        if answers not in (None, torch.Tensor.__torch_function__.__func__):  # type: ignore[attr-defined]
            tell(
                f"The parameter {name} is a {kind.__name__}, whose class says itself what functions of "
                "torch do with it (__torch_function__). On a mesh it is an ordinary tensor to them. Let the "
                "module's forward call what the class would do."
            )


def _leave_earlier_graphs(model: nn.Module) -> None:
    """Let graphs that were recorded of plain parameters keep these, and say so if they go back.

    A gradient that comes by them is of a whole parameter, and of no rank's part of the batch. Graphs that
    nobody goes back through (the weight that a pruned layer made last) are left in peace.
    """
    if swap_impls is None or use_count is None:
        return
    for name, p in named_parameters_in(model):
        if not p.requires_grad or not p.is_leaf or use_count(p) == 1:
            continue
        if gradient_hooks(p) or hooks_after_gradient(p):
            continue  # they would go with the graph
        get_gradient_edge(p).node.register_prehook(partial(_refuse_earlier, name))
        grad = p.grad
        swap_impls(p, nn.Parameter(p.detach()))
        p.grad = grad


def _refuse_earlier(name: str, grads: Any) -> NoReturn:
    raise ValueError(
        f"{name} was used in what goes back before the engine laid the parameters out, which a batch is "
        "needed for: the gradient is not of what the parameter is now. Call the model first, and take "
        "penalties on its parameters after; or give initialize(..., example=batch), or call "
        "engine.lay_out(batch), before the first step."
    )


def _share_parameters(
    model: nn.Module,
    layouts: Arrangement,
    mesh: Mesh,
    plan: Plan,
    optimizer: torch.optim.Optimizer | None,
) -> ZeroState:
    """Parameters lie as the layouts say, and between their uses as the plan's stage says."""
    low = plan.precision.parameters
    with unwatched(model):
        leave_out(model, layouts, None if low is None else getattr(torch, low))
        uses = Counter(id(p) for m in model.modules() for p in own_parameters(m).values() if p is not None)
        weights = [(f"{name}.weight", model.get_submodule(name).weight) for name in layouts.float8]
        float8 = {name for name, weight in weights if uses[id(weight)] == 1}
        return ZeroState(model, layouts, mesh, plan, layouts.parts, optimizer, float8)


def _share_buffers(model: nn.Module, mesh: Mesh, low: str | None) -> None:
    """Every rank has the first one's buffers, which stay plain tensors.

    What a module without parameters holds beside them, and moves itself, comes to the device, too.

    Args:
        low: the dtype to which those of floats are cast; None: none is.
    """
    home = mesh.within or mesh
    shared: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    if not mesh.is_dry:
        make_the_rest_real(model)
    for module in model.modules():
        for name, b in own_buffers(module).items():
            if b is not None:
                if id(b) not in shared:
                    whole = _shared(b, home, mesh)
                    if low is not None and whole.is_floating_point():
                        whole = whole.to(getattr(torch, low))
                    shared[id(b)] = b, whole
                own_buffers(module)[name] = shared[id(b)][1]
    for module in () if mesh.is_dry else model.modules():
        if converts_itself(module) and next(parameters_in(module), None) is None:
            module.to(mesh.device())


def _shared(b: torch.Tensor, home: Mesh, mesh: Mesh) -> torch.Tensor:
    """The first rank's values of a buffer: in it, if it is on the device, as others may hold it or a view."""
    if is_sparse(b):
        if mesh.is_dry:
            return b
        whole = gather_objects(b.cpu() if home.rank == 0 else None, home)[0].to(mesh.device())
    else:
        laid_out = lay_out(b, Layout.replicated(home, tuple(b.shape)))
        with raw():
            whole = plain(laid_out)
        is_usual = type(b) is torch.Tensor and b.is_leaf and not (b.is_meta or b.is_inference())
        if is_usual and whole.device == b.device and not mesh.is_dry:
            if torch.equal(whole, b):  # not written to, then: it may be a file's
                return b
            with suppress(RuntimeError), torch.no_grad():  # elements that share memory, say
                return b.copy_(whole)
    vars(whole).update(set_by_program(b))
    return whole


# ---- a model as a pipeline's stages: which rank has what, and what runs it


class UndividedWarning(UserWarning):
    """What was to be divided among stages lies in one: a module, or the whole model."""


class Stages:
    """The stages of a model under a plan.

    Args:
        mesh: with the axis ``pipe``.
        example: of the model's inputs.
        costs: of modules, by which stages are balanced; by default what is counted.

    Attributes:
        split: the model as stages.
        places: the coordinate on the axis ``pipe`` of each stage.
        local: the numbers of this rank's.
        has_last: whether the last one is among them.
        users: for each parameter, the coordinates on the axis ``pipe`` whose stages use it, in their order.
        homes: for each parameter the first of them, which counts it.
        meshes: for each parameter, by its id, the mesh on which it lies as seen from here.
        parts: the names of the parameters that each stage of this rank uses.
        runtime, shape_inference: what runs the stages, and knows what they tell one another.
        again: what does the steps of programs of which some are computed again.
    """

    def __init__(
        self, model: nn.Module, plan: Plan, mesh: Mesh, example: Any, costs: Mapping[str, float] | None = None
    ) -> None:
        self._model, self._plan, self._mesh = model, plan, mesh
        self._schedules: dict[tuple[int, ActionKind | None], Schedule] = {}
        self._kind, self._per_rank = plan.schedule, plan.stages_per_rank
        places = self.schedule(plan.accumulate).stage_to_rank
        device = torch.device("cpu") if mesh.is_dry else mesh.device()
        whole = plan.recompute != "none"  # what is computed again are whole blocks
        self.split: Split | Undivided
        try:
            self.split = split(model, len(places), example, plan.cuts, costs, device=device, divide=not whole)
        except SplitError as error:
            if own_error(error) is not None and not mesh.is_dry:
                _try_once(model, example)
            if plan.cuts is not None or isinstance(error.__cause__, NotCopiedError):
                raise
            self.split = Undivided(model, plan.pipe)
            # as one process does: the backward pass of a micro-batch before the next one's forward
            self._kind, self._per_rank = "1f1b", 1
            self._schedules.clear()
            places = self.schedule(plan.accumulate).stage_to_rank
            tell(
                f"{error} Until then the last stage computes and holds the whole model, and the other "
                f"{plan.pipe - 1} do nothing: right, but no faster than without a pipeline.",
                UndividedWarning,
            )
        else:
            for why in self.split.whole:
                tell(
                    f"{why} Until then {why.module!r} lies in one stage, however long that takes.",
                    UndividedWarning,
                )
            self._one_by_one_if_written()
        self.places = places
        here = mesh.coordinate[mesh.axis("pipe")]
        self.local = tuple(i for i, rank in enumerate(places) if rank == here)
        self.has_last = places[-1] == here
        used = self.split.users
        self.users = {name: tuple(dict.fromkeys(places[i] for i in of)) for name, of in used.items()}
        self.meshes: dict[int, Mesh] = {}
        for name, p in named_parameters_in(model):
            ranks = self.users[name]
            self.meshes[id(p)] = at(mesh, "pipe", here if here in ranks else ranks[0])
        self.homes = {name: ranks[0] for name, ranks in self.users.items()}
        self.parts = tuple(frozenset(name for name, of in used.items() if i in of) for i in self.local)
        # a block that is computed again would be so for inputs and for weights
        is_again = plan.recompute != "none" or self.split.is_again
        parts_backward = plan.zero < 3 and not is_again and plan.offload == Offload()
        self.runtime = Runtime(mesh, at(mesh, "pipe", here), parts_backward)
        self.shape_inference: Callable[..., InferredShapes]
        self.again: WeakKeyDictionary[StageProgram, Any] = WeakKeyDictionary()

    def _one_by_one_if_written(self) -> None:
        """Let micro-batches pass one after another, where forwards write to parameters that ZeRO-3 gathers.

        What a later one had written would be gathered again for the backward pass of an earlier one.
        """
        plan = self._plan
        if plan.zero < 3 or plan.accumulate == 1 or self._kind not in ("gpipe", "1f1b", "zb-h1"):
            return  # others have their stages elsewhere, or are the program's own
        names = {name for name, _ in named_parameters_in(self._model)}
        written = sorted(names.intersection(name for stage in self.split.stages for name in stage.left()))
        if written:
            self._kind = "naive"
            self._schedules.clear()
            tell(
                f"The model's forward writes to its parameter {written[0]!r}, which zero = 3 gathers for "
                "each pass. So micro-batches pass through the stages one after another, as on one process, "
                "and stages wait for each other. With zero = 2 they do not."
            )

    def home(self, name: str) -> int:
        """The coordinate on the axis ``pipe`` that counts a parameter or buffer; it may have come later."""
        if name in self.homes:
            return self.homes[name]
        while name:
            name = name.rpartition(".")[0]  # what came within a module (parametrizations) lies with that
            try:
                owner = self._model.get_submodule(name)
            except AttributeError:  # the model's own name for it
                return 0
            for of in self.split.stages:
                if owner in of.inner:
                    return self.places[of.number]
        return 0

    def prepare(self, arrangement: Arrangement, mesh: Mesh) -> None:
        """Before the model is laid out: make its twin.

        Args:
            arrangement: of the model.
            mesh: of this rank's stages.
        """
        if isinstance(self.split, Undivided):
            self.shape_inference = self.split.shape_inference
            return
        shape = dict(zip(mesh.names, mesh.shape, strict=True))
        dry = Mesh.dry(shape, mesh.coordinate).telling(**mesh.words)
        twin = twin_of(self._model)
        branches = arrangement.branches.items()
        lies = Arrangement()
        for name, lay in arrangement.items():
            number = next((k for branch, k in branches if name.startswith(f"{branch}.")), None)
            on = dry if number is None else at(dry, "branch", number)
            lies[name] = Layout.of(on, lay.axes, lay.cuts, lay.shape)
        lies.chosen, lies.branches = arrangement.chosen, arrangement.branches
        plan = self._plan
        lay_out_model(twin, lies, dry, plan.model_copy(update={"zero": 0, "offload": Offload()}))
        simple = plan.recompute == "none" and plan.offload == Offload()
        alone = self.local if simple and mesh.size() == 1 else ()
        self.shape_inference = ShapeInference(self._model, twin, dry, mesh, alone)

    def schedule(self, micro_batches: int, only: ActionKind | None = None) -> Schedule:
        """What ranks do with so many micro-batches; ``only`` actions of a kind.

        Raises:
            ValueError: the plan's schedule is for another number.
        """
        key = micro_batches, only
        if key not in self._schedules:
            self._schedules[key] = with_messages(self._made(micro_batches, only))
        return self._schedules[key]

    def _made(self, m: int, only: ActionKind | None) -> Schedule:
        plan = self._plan
        if only is not None:
            of = self.schedule(plan.accumulate)
            rows = [
                tuple(Action(only, stage, i) for i in range(m) for stage in of.stages_of(rank))
                for rank in range(of.ranks)
            ]
            return replace(of, micro_batches=m, actions=tuple(rows))
        return find_schedule(self._kind, plan.pipe, m, self._per_rank)


def refuse_unlike_stages(mesh: Mesh, found: list[str]) -> None:
    """See that all ranks have divided the model alike.

    Raises:
        ValueError: they have not.
    """
    if mesh.is_dry:
        return
    said, alike = compared_with_first(mesh, b"", json.dumps(found).encode(), "stages")
    if alike:
        return
    first = json.loads(said)
    pairs = zip_longest(found, first, fillvalue="nothing more")
    here, there = next((pair for pair in pairs if pair[0] != pair[1]), ("", ""))
    where = f" Here: {here}; on the first rank: {there}." if here else ""
    raise ValueError(
        f"The model's forward is not the same on all ranks.{where} In a pipeline each rank finds the "
        "stages by itself: what a forward does may not hang on which rank it is (get_rank(), environment "
        "variables), nor on the order of a set, another one in each process without one PYTHONHASHSEED "
        "(espalier run sets it). Do that outside of the model, or train under a plan without pipe."
    )


def _try_once(model: nn.Module, inputs: Any) -> None:
    """Call a copy of a model, on all ranks: an error for such inputs is the program's, whatever the plan."""
    if not any(x.is_meta for x in (*parameters_in(model), *model.buffers())):
        with apart(model, inputs) as twin, torch.enable_grad():  # forwards may take gradients
            called(twin.module, closed(twin.extra))


# ---- a model that cannot be divided among stages: the last one computes all of it, the others nothing
#
# That is right, and slow: one rank of the axis ``pipe`` computes and holds what one process would. It is
# what is left where a forward pass changes the model, takes gradients, or decides by values between its
# modules.


class WholeProgram(StageProgram):
    """What a stage does that has all of a model, or nothing.

    Args:
        model: what it computes; None: nothing.
    """

    is_opaque, is_again = True, False

    def __init__(self, number: int, model: nn.Module | None) -> None:
        self.number, self._whole = number, model
        self.inputs, self.outputs, self.steps, self.batch_values = (), (), (), frozenset()
        self.inner = () if model is None else tuple(model.modules())

    def __call__(self, received: Sequence[torch.Tensor], batch: Any, runner: Any = None) -> Any:
        """The model's output; of a stage that does nothing, no tensors."""
        return () if self._whole is None else all_having_it(called, self._whole, closed(batch))

    def parameters(self) -> list[torch.Tensor]:
        """The parameters that it uses."""
        return [] if self._whole is None else list(parameters_in(self._whole))

    def buffers(self) -> list[torch.Tensor]:
        """The buffers that it uses."""
        return [] if self._whole is None else list(self._whole.buffers())

    def left(self) -> dict[str, torch.Tensor]:
        """Nothing: a micro-batch goes back before the next one writes to anything."""
        return {}


class Undivided:
    """A model as stages of which the last has all, as :class:`~espalier.parallel.pipeline.split.Split`."""

    def __init__(self, model: nn.Module, number: int) -> None:
        self._model, last = model, number - 1
        self.cuts: tuple[str, ...] = ()
        self.dice, self.remembers, self.written, self.is_again = last, True, None, False
        self.divided = frozenset[str]()
        self.sets: set[tuple[str, str]] = set()
        self.tensors: set[tuple[str, str]] = set()
        self.writes: frozenset[str] = frozenset()  # what is written to is found out each time
        self.writes_weights = any(own_parameters(model.get_submodule(name)) for name in self.unmarked)
        self.first: dict[Place, Any] = {}
        self.stages = tuple(WholeProgram(i, model if i == last else None) for i in range(number))
        nothing = ((),) * last
        self._agreed = InferredShapes(nothing, nothing, False, ((),) * number, {})

    def on(self, model: nn.Module) -> Undivided:
        """The same of another model."""
        return Undivided(model, len(self.stages))

    @cached_property
    def unmarked(self) -> frozenset[str]:
        """The modules whose buffers may be written to without a mark: code around them says ``.data``."""
        saying = [(name, m) for name, m in self._model.named_modules() if says_data(m)]
        return frozenset(name for at, m in saying for name, _ in m.named_modules(prefix=at))

    def described(self) -> list[str]:
        """What all ranks have to find alike, in words."""
        return ["the model is not divided"]

    def at_all(self, batches: Iterable[Any]) -> list[Undivided]:
        """The same for each batch.

        Raises:
            SplitError: the model has parameters that nobody laid out.
        """
        if any(type(p) is not DTensor for p in parameters_in(self._model)):
            refuse_later(self._model)
        return [self for _ in batches]

    @property
    def users(self) -> dict[str, tuple[int, ...]]:
        """For each parameter and buffer, by all its names, the stage that uses it."""
        last = (len(self.stages) - 1,)
        return {name: last for name, _ in named_tensors_in(self._model, remove_duplicate=False)}

    def shape_inference(self, *_: Any) -> InferredShapes:
        """In the place of a ``ShapeInference``: nothing is sent."""
        return self._agreed
