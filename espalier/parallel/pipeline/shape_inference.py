"""What stages tell one another is agreed before a step: every rank runs the whole model without data.

For that it has a twin of the model on a dry mesh, which has the shape of one stage's and is seen from this
rank's coordinates. So shapes, dtypes and layouts of what is sent need no messages, a dry run of the pipeline
knows them too, and each stage draws the random values that one process would draw in its place.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from functools import partial
from itertools import compress
from types import FunctionType
from typing import Any

import torch
from torch import nn

from espalier.blocks import parameters_in
from espalier.layout import Layout
from espalier.mesh import Mesh
from espalier.parallel.pipeline.arguments import leaves as leaves_of_output
from espalier.parallel.pipeline.objects import opened
from espalier.parallel.pipeline.observed import Observed
from espalier.parallel.pipeline.record import SplitError
from espalier.parallel.pipeline.remembered import copied, form_of, may_be_told, put, value_at
from espalier.parallel.pipeline.runtime import InferredShapes, Tensors, Wire, wire_of
from espalier.parallel.pipeline.single_rank import Followed, SingleRank, SingleRankStudy
from espalier.parallel.pipeline.split import Split, StageProgram
from espalier.tensor import DTensor, stamp
from espalier.tensor.before import Before, reached
from espalier.tensor.copies import Apart, on_meta
from espalier.tensor.draws import Draw, Drawing, States, draw_again, equal, restore, states
from espalier.tensor.dry_autocast import as_if_for_cpu
from espalier.tensor.dtensor import layout_of
from espalier.tensor.traces import put_back, untraced
from espalier.torch_private import HOOKS, TABLES, own_buffers, own_parameters, raw, unchecked_distributions
from espalier.trees import flatten, nodes_from, unflatten

_MOST_KNOWN = 256

Forward = Callable[[Any, Tensors, Any, Any], Any]


def twin_of(model: nn.Module) -> nn.Module:
    """A copy of a model without data; a hook that cannot do without is not called there."""
    copied = Apart(model, stand=on_meta)
    copied.forget()
    twin = copied.module
    for module in twin.modules():
        for hooks in (vars(module)[name] for name in HOOKS if name in vars(module)):
            for key in [key for key, hook in hooks.items() if isinstance(hook, Observed)]:
                del hooks[key]  # which sees what ranks compute
            hooks.update({k: _Lenient(hook) for k, hook in hooks.items() if not _is_torch(hook)})
    return twin


class _Lenient:
    """A hook that asks for values, perhaps, where there are none."""

    def __init__(self, hook: Callable[..., Any]) -> None:
        self._hook = hook

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self._hook(*args, **kwargs)
        except Exception:
            return None


def _remove_hooks(theirs: nn.Module, ours: nn.Module) -> None:
    """Let a twin's module have no hooks that the program has taken away since."""
    for name in HOOKS:
        hooks = vars(theirs).get(name, {})
        for key in [key for key, hook in hooks.items() if isinstance(hook, _Lenient)]:
            if key not in vars(ours).get(name, {}):
                del hooks[key]


def _is_torch(hook: Any) -> bool:
    """Whether torch's own parametrizations hook in: without them a module has no weight."""
    return type(hook).__module__.startswith("torch.nn.utils.")


class ShapeInference:
    """What is agreed of micro-batches, by their shapes.

    Args:
        model: the twin's original: whether its modules train, and parameters need gradients, is followed.
        twin: laid out on ``mesh``.
        mesh: dry, of one stage.
        here: that of this rank's stages.
        alone: the stages to find out how they are run on one rank.
    """

    def __init__(
        self, model: nn.Module, twin: nn.Module, mesh: Mesh, here: Mesh, alone: Collection[int] = ()
    ) -> None:
        self._model, self._twin, self._mesh, self._here, self._alone = model, twin, mesh, here, alone
        # each parameter as its original's, which is kept so that its id is no other's
        both = zip(parameters_in(model), parameters_in(twin), strict=True)
        self._twins = {id(p): (p, dry_p) for p, dry_p in both}
        self._known: dict[Any, InferredShapes] = {}
        self._sets = set[tuple[str, str]]()  # what forwards set by themselves, of whichever split
        self._switches = _Switches(model)

    def __call__(
        self,
        split: Split,
        inputs: Any,
        forward: Forward,
        followed: Followed | None = None,
        loss_of: Callable[[Any], Any] | None = None,
        last: InferredShapes | None = None,
    ) -> InferredShapes:
        """What is agreed of a micro-batch.

        Args:
            split: the model as stages for it.
            inputs: of the model, as DTensors.
            forward: ``forward(program, received, inputs, runner)`` calls a stage.
            followed: the values that are followed in the last stage.
            loss_of: what finds the loss in what the last stage gives; by default it may hang on all of that.
            last: of the micro-batch before, which finds what this one begins with.
        """
        leaves, form = flatten(inputs)
        # a split is one for whether modules train, and parameters need gradients
        self._sets |= split.sets
        remembered = {place: value_at(self._model, *place) for place in sorted(self._sets)}
        if last is not None:
            remembered |= {place: x for place, x in last.after.items() if place in remembered}
        # other ways may be gone by these
        ways = tuple(map(form_of, remembered.values())), self._switches.now(split.sets)
        told = tuple(_told(x) for x in leaves if isinstance(x, torch.Tensor))  # a split is for all else
        finds = followed is None, loss_of is None
        key = (split, str(form), told, torch.is_grad_enabled(), finds, ways)
        if len(self._known) > _MOST_KNOWN:
            self._known.clear()
        if key not in self._known:
            for ours, theirs in zip(self._model.modules(), self._twin.modules(), strict=True):
                theirs.training = ours.training
                _set_alike(theirs, ours)
                _remove_hooks(theirs, ours)
                for name, b in own_buffers(ours).items():
                    _follow(own_buffers(theirs), name, b)
                for name, p in own_parameters(ours).items():
                    if id(p) in self._twins and name in own_parameters(theirs):
                        own_parameters(theirs)[name] = self._twins[id(p)][1]
            held, of_twin = [*parameters_in(self._model)], [*parameters_in(self._twin)]
            if len(held) != len(of_twin):
                raise SplitError(
                    f"The model has {len(held)} parameters, and had {len(of_twin)} when it was divided among "
                    "stages, which hold what it had then. Let it have all its parameters before the first "
                    "batch, or train under a plan without pipe."
                )
            for p, dry_p in zip(held, of_twin, strict=True):
                dry_p.requires_grad = p.requires_grad
            for (name, attribute), value in remembered.items():
                if may_be_told(value):
                    put(self._twin.get_submodule(name), attribute, copied(value))
            dry = unflatten([self._bare(x) for x in leaves], form)
            programs = [program.on(self._twin) for program in split.stages]
            with untraced(self._model):  # nor does who counts memory or operations count the twin's
                self._known[key] = self._run(programs, dry, forward, followed, loss_of, remembered)
        return self._known[key]

    def _bare(self, x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        layout = layout_of(x, self._mesh)
        layout = Layout.of(self._mesh, layout.axes, layout.cuts, layout.shape)
        bare = stamp(torch.empty(layout.local_shape, dtype=x.dtype, device="meta"), layout)
        return bare.requires_grad_(x.requires_grad)

    @as_if_for_cpu()
    def _run(
        self,
        programs: Sequence[StageProgram],
        inputs: Any,
        forward: Forward,
        followed: Followed | None,
        loss_of: Callable[[Any], Any] | None,
        sets: Iterable[tuple[str, str]],
    ) -> InferredShapes:
        device = torch.device("cpu") if self._here.is_dry else self._here.device()
        drawn, before = states(device), Before(reached(self._twin), {}, None, [], whole=True)
        own = [put_back(x) for program in programs for x in program.generators()]
        wires, draws = [], []
        alone: dict[int, SingleRank] = {}
        received: Callable[[], Tensors] = tuple
        graph = _Graph([*parameters_in(self._twin), *flatten(inputs)[0]])
        try:
            for i, program in enumerate(programs):
                started, last = states(device), i + 1 == len(programs)
                # parameters are DTensors when something is computed again in the backward pass
                is_alone = i in self._alone and not (program.is_again and torch.is_grad_enabled())
                study = SingleRankStudy(program, followed if last else None) if is_alone else None
                with unchecked_distributions(), Drawing(None if self._here.is_dry else device) as drawing:
                    entered = received()
                    graph.enter(entered)
                    out = forward(program, entered, inputs, study)
                    graph.leave(out, last, loss_of)
                draws.append(tuple(drawing.draws))
                if not self._here.is_dry:
                    _check(drawing.draws, started, device)
                if study is not None:
                    inferred = study.found(partial(_once_more, forward, program, received, inputs))
                    if inferred is not None:
                        alone[i] = inferred.on(self._here)
                if last:
                    break
                bare = tuple(map(wire_of, out))
                # autocast does nothing without data; the trace knows what it does
                dtypes = (value.dtype for value in program.outputs)
                wires.append(tuple(w._replace(dtype=d) for w, d in zip(bare, dtypes, strict=True)))
                received = partial(_received, out, bare)
            values = {place: value_at(self._twin, *place) for place in sets}
            after = {place: copied(x) for place, x in values.items() if may_be_told(x)}
        finally:
            restore(device, drawn)
            before.put()
            for back in filter(None, own):
                back()
        returns = graph.returns()
        tells = not graph.is_sure
        wanting = _wanting(out, programs, inputs)
        return InferredShapes(tuple(wires), returns, tells, tuple(draws), alone, after, wanting)


_NAMES = (list, tuple, set, frozenset)
_FUNCTIONS = (FunctionType, partial)


def _is_switch(name: str, x: Any) -> bool:
    """Whether an attribute of a module is one by which its forward may go another way: a flag, a name."""
    if name in TABLES:
        return False
    if type(x) in _NAMES:
        return all(type(y) is str for y in x)
    return isinstance(x, str | bool | int | float | None)


def _set_alike(theirs: nn.Module, ours: nn.Module) -> None:
    """Let a twin's module be switched as its original is now.

    A flag that came later, and is none of its class, may stand for hooks.
    """
    table, switches = vars(theirs), [name for name, x in vars(ours).items() if _is_switch(name, x)]
    known = {name for name in switches if name in table or hasattr(type(theirs), name)}
    later = {name for name, x in vars(ours).items() if name not in table and isinstance(x, _FUNCTIONS)}
    table.update({name: copy.copy(vars(ours)[name]) for name in known})  # to names either may add its own
    table.update({name: vars(ours)[name] for name in later})


class _Switches:
    """What programs set of a model's modules between calls, and their forwards go by.

    Adapters that are switched off and on, say: modules that lie in one stage are called as they are, so that
    no trace knows of it.
    """

    def __init__(self, model: nn.Module) -> None:
        self._tables = [(name, vars(module)) for name, module in model.named_modules()]
        self._looked: list[tuple[int, list[str]]] = [(-1, [])] * len(self._tables)

    def now(self, sets: Collection[tuple[str, str]]) -> tuple[Any, ...]:
        """What they are; not what forwards set by themselves."""
        found: list[Any] = []
        for i, (module, table) in enumerate(self._tables):
            size, names = self._looked[i]
            if size != len(table):
                names = [k for k, x in table.items() if _is_switch(k, x) and (module, k) not in sets]
                self._looked[i] = len(table), names
            for name in names:
                x = table.get(name)
                if type(x) in _NAMES:  # one that was empty may have got others, hooks or tensors
                    found.append(tuple([y for y in x if type(y) is str]) if x else ())
                else:
                    found.append(bool(x) if type(x) in (int, float) else x)
        return tuple(found)


def _follow(buffers: dict[str, Any], name: str, b: torch.Tensor | None) -> None:
    """Let a twin have a buffer as its original has it now: one that came later, or has another shape."""
    was = buffers.get(name)
    if b is None or was is None or (was.shape, was.dtype) != (b.shape, b.dtype):
        buffers[name] = None if b is None else torch.empty(b.shape, dtype=b.dtype, device="meta")


class _Graph:
    """What hangs on what, in a run without data: the nodes of autograd's at the borders of stages.

    Attributes:
        is_sure: whether the loss hangs on all that it may hang on.

    Args:
        leaves: parameters, and inputs of the model.
    """

    def __init__(self, leaves: Iterable[Any]) -> None:
        self.is_sure = True
        self._leaves = set(map(id, leaves))
        self._ins: list[list[Any]] = []
        self._outs: list[list[Any]] = []

    def enter(self, received: Tensors) -> None:
        """What a stage is given."""
        self._ins.append(_nodes_of(received))

    def leave(self, out: Any, is_last: bool, loss_of: Callable[[Any], Any] | None) -> None:
        """What it has given; of the last one, where the loss is in it."""
        if is_last and loss_of is not None and torch.is_grad_enabled():
            with suppress(ValueError):  # the last stage itself will say so
                out = loss_of(out)
        roots = _nodes_of_output(out) if is_last else _nodes_of(out)
        if loss_of is None and is_last and len(set(roots) - {None}) > 1:
            self.is_sure = False  # a loss function may take one output, and leave others
        self._outs.append(roots)

    def returns(self) -> tuple[tuple[bool, ...], ...]:
        """Of each tensor at each border, whether the loss may hang on it."""
        by_border: list[tuple[bool, ...]] = []
        roots = self._outs[-1]
        for ins, outs in zip(self._ins[:0:-1], self._outs[-2::-1], strict=True):
            reached = self._reached(roots, set(ins))
            self.is_sure = self.is_sure and reached is not None
            back = tuple(x is not None and (reached is None or x in reached) for x in ins)
            by_border.append(back)
            roots = list(compress(outs, back))
        return tuple(by_border[::-1])

    def _reached(self, roots: Sequence[Any], ins: Collection[Any]) -> set[Any] | None:
        """The nodes that these lead to; None if something stands there that hides what is behind it."""
        reached = set()
        for node in nodes_from(roots, ins):
            if node not in ins and hasattr(node, "variable") and id(node.variable) not in self._leaves:
                return None
            reached.add(node)
        return reached


def _wanting(out: Any, programs: Sequence[StageProgram], inputs: Any) -> tuple[bool, ...]:
    """Whether gradients go back through each tensor that a model gives; none: not known.

    Where a module decides by values, they go back wherever they may.
    """
    with raw():
        wanting = tuple(x.requires_grad for x in leaves_of_output(opened(out), torch.Tensor))
        given = any(x.requires_grad for x in flatten(inputs)[0] if isinstance(x, torch.Tensor))
    if not any(program.is_opaque for program in programs):
        return wanting
    traced = programs[-1].wanting
    if given or len(traced) != len(wanting):
        return ()
    return tuple(a or b for a, b in zip(wanting, traced, strict=True))


def _nodes_of(tensors: Tensors) -> list[Any]:
    with raw():
        return [x.grad_fn for x in tensors]


def _nodes_of_output(out: Any) -> list[Any]:
    """Those of all that a model gives, in objects too: it crosses to no other stage."""
    with raw():
        return [x.grad_fn for x in leaves_of_output(opened(out), torch.Tensor)]


def _once_more(
    forward: Forward, program: StageProgram, received: Callable[[], Tensors], inputs: Any, alone: SingleRank
) -> None:
    forward(program, received(), inputs, alone)


def _received(tensors: Tensors, wires: Sequence[Wire]) -> Tensors:
    return tuple(_fresh(x, wire) for x, wire in zip(tensors, wires, strict=True))


def _fresh(x: torch.Tensor, wire: Wire) -> torch.Tensor:
    """A tensor as the next stage gets it."""
    bare = torch.empty(wire.shape, dtype=wire.dtype, device="meta")
    bare = bare.requires_grad_(wire.has_gradient).view_as(bare)
    return stamp(bare, layout_of(x)) if type(x) is DTensor else bare


def _check(draws: Sequence[Draw], started: States, device: torch.device) -> None:
    """See that what was noted is what a stage has drawn since.

    Raises:
        RuntimeError: it is not.
    """
    now = states(device)
    restore(device, started)
    draw_again(draws, device)
    if not equal(states(device), now):
        raise RuntimeError(
            "A stage has changed the state of torch's random generator: it was seeded anew, or drew as many "
            "numbers as its values say. Other stages could not know where to go on. Draw from a "
            "torch.Generator of the module's own, or plan without pipe."
        )


def _told(x: torch.Tensor) -> Any:
    return tuple(x.shape), x.dtype, x.requires_grad, x._layout if type(x) is DTensor else None
