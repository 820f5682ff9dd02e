"""A model as the stages of a pipeline.

``split`` runs the model once, on stand-ins for its parameters, and writes down what happens; the stages are
pieces of that record. A module that lies in one stage is called as it is; only what stands between such
modules is repeated call by call. The model itself is not changed.
"""

from __future__ import annotations

import copy
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn

from espalier.blocks import named_parameters_in, named_tensors_in, parameters_in, parts
from espalier.parallel.pipeline.arguments import Ref, leaves, mapped
from espalier.parallel.pipeline.balance import (
    Segment,
    balance,
    bounds_of,
    joined,
    labels_of,
    segments_of,
    whole_blocks,
)
from espalier.parallel.pipeline.model_stand_ins import OF_TORCH, Marks, ModelStandIns, equal
from espalier.parallel.pipeline.numbers import KINDS, Questions, numbers_in
from espalier.parallel.pipeline.objects import closed, traced_output
from espalier.parallel.pipeline.programs import Divided, Env, ProgramStep, SentValue, marked, parted, same
from espalier.parallel.pipeline.record import SplitError, TorchState, Trace, ValuesError
from espalier.parallel.pipeline.trace import told_as_own, trace
from espalier.tensor import DTensor, full_tensor
from espalier.tensor.loans import here
from espalier.tensor.names import Reads
from espalier.tensor.observers import tell
from espalier.texts import few
from espalier.torch_private import disable_modes, getter, own_buffers, own_modules, own_parameters, raw

Runner = Callable[["StageProgram", Env, torch.device], None]
_TRACES = 64  # kept for batches of different shapes
_ALIKE = 16  # and of the same shapes
_QUESTIONED = 5  # of those that differ in numbers alone
_dtype = getter("dtype")
_requires_grad = getter("requires_grad")
_NOT_ASKED = OF_TORCH | {"training", "forward"}  # a trace is told of these otherwise
ByPlaces = tuple[Sequence[int], Sequence[int]]  # where stages begin, and calls that are not made whole


class StageProgram:
    """What one stage does.

    Attributes:
        number: of the stage.
        inputs: what it receives from the stage before.
        outputs: what it sends to the next one; empty for the last stage.
        result: shape and dtype of the tensors in the model's output, of the last stage.
        wanting: of each of them, whether gradients go back through it, as far as the trace knows.
        uses: names of the parameters and buffers that it uses.
        steps: what it calls, in order.
        batch_values: values of the batch, by their numbers.
        inner: the modules in it.
        is_opaque: whether it has some that could not be looked into.
        is_again: whether some is computed again in the backward pass, as the model says.
        held: values that it has from elsewhere than the batch and the stage before, by their numbers.
    """

    def __init__(self, divided: Divided, number: int, model: nn.Module) -> None:
        self.number, last = number, number == divided.number - 1
        self._in = divided.crossing(number - 1) if number else []
        self._out = [] if last else divided.crossing(number)
        self.inputs: tuple[SentValue, ...] = tuple(divided.described(n) for n in self._in)
        self.outputs: tuple[SentValue, ...] = tuple(divided.described(n) for n in self._out)
        self.uses, self.is_opaque = divided.uses(number), divided.is_opaque(number)
        self._leaves = divided.left(number)
        self._written = divided.written_in(number) if number else set()
        self._body = divided.body(number)
        self.steps = self._body.steps
        self.is_again = any(step.again for step in self.steps)
        self.batch_values = frozenset(
            source.number for source in self._body.sources if source.kind == "batch"
        )
        self.held = frozenset(source.number for source in self._body.sources if source.kind != "batch")
        self._result = traced_output(divided.trace.out) if last else None
        tensors = [divided.trace.values[r.number].tensor for r in leaves(self._result, Ref)]
        self.result = tuple((tuple(x.shape), x.dtype) for x in tensors)
        self.wanting = tuple(divided.has_gradient(r.number) for r in leaves(self._result, Ref))
        self._is_last = last
        self._bind(model)

    def __call__(self, received: Sequence[torch.Tensor], batch: Any, runner: Runner | None = None) -> Any:
        """The stage's forward.

        Args:
            received: what the stage before gave.
            batch: the micro-batch, of the shapes that the program was made for.
            runner: has the :attr:`steps` done, by :meth:`do`.

        Returns:
            a tuple of tensors for the next stage; of the last stage, the model's output.
        """
        if len(received) != len(self._in):
            raise ValueError(
                f"Stage {self.number} was given {len(received)} tensors, expected {len(self._in)}: "
                f"{', '.join(v.name for v in self.inputs) or 'none'}."
            )
        tensors = leaves(batch, torch.Tensor)
        env = self._body.begin(self._model, tensors)
        for n, x in zip(self._in, received, strict=True):
            env[n] = x.clone() if n in self._written else x
        # a model that is given nothing computes where its parameters are
        here = ((*tensors, *received) or leaves(list(env.values()), torch.Tensor))[0].device
        if runner is None:
            self.do(self.steps, env, here)
        else:
            runner(self, env, here)
        if not self._is_last:
            return tuple(env[n] for n in self._out)
        return closed(self.rebuilt([env[r.number] for r in leaves(self._result, Ref)]))

    def generators(self) -> list[torch.Generator]:
        """Those of the model's own that it draws from."""
        return [x for step in self.steps for x in step.generators()]

    def do(self, steps: Iterable[ProgramStep], env: Env, here: torch.device) -> None:
        """Do some of the steps."""
        modules, was = self._modules, self._body.device
        for step in steps:
            step.run(env, modules, was, here)

    def called(self, steps: Iterable[ProgramStep]) -> list[nn.Module]:
        """The modules that some of the steps call."""
        return [self._modules[step.func] for step in steps if isinstance(step.func, str)]

    @property
    def begins(self) -> int:
        """How many of the steps, at the beginning, make what each stage makes of the batch for itself."""
        others = {source.number for source in self._body.sources if source.kind == "parameter"}
        others.update(self._in)
        waits = (isinstance(s.func, str) or not others.isdisjoint(s.inputs) for s in self.steps)
        return next((i for i, is_own in enumerate(waits) if is_own), len(self.steps))

    @property
    def holders(self) -> list[nn.Module]:
        """The modules whose own parameters and buffers it may use."""
        owners = [self._modules[name.rpartition(".")[0]] for name in self.uses]
        return list(dict.fromkeys([*self.inner, *owners]))

    def holds(self, step: ProgramStep) -> bool:
        """Whether a step uses parameters or buffers."""
        if isinstance(step.func, str) and _has_tensors(self._modules[step.func]):
            return True
        numbers = {source.number for source in self._body.sources if source.kind in ("parameter", "buffer")}
        return not numbers.isdisjoint(step.inputs)

    def parameters(self) -> list[torch.Tensor]:
        """The parameters that it uses."""
        return [table[key] for table, key in self._parameters]

    def buffers(self) -> list[torch.Tensor]:
        """The buffers that it uses."""
        return [table[key] for table, key in self._buffers]

    def left(self) -> dict[str, torch.Tensor]:
        """The parameters and buffers that its forward writes to, by name, whose values gradients hang on."""
        return {name: x for name, table, key in self._left if (x := table.get(key)) is not None}

    def rebuilt(self, tensors: Sequence[torch.Tensor]) -> Any:
        """The model's output, of the tensors in it; objects are taken apart."""
        remaining = iter(tensors)
        return mapped(lambda x: next(remaining) if type(x) is Ref else x, self._result)

    def on(self, model: nn.Module) -> StageProgram:
        """The same program for another model of the same modules, by their names."""
        other = copy.copy(self)
        other._bind(model)
        return other

    def _bind(self, model: nn.Module) -> None:
        self._model, self._modules = model, dict(model.named_modules())
        called = self.called(self.steps)
        self.inner = tuple(dict.fromkeys(m for outer in called for m in outer.modules()))
        places = [(self._modules[owner], key) for owner, _, key in (n.rpartition(".") for n in self.uses)]
        self._parameters = [(own_parameters(m), key) for m, key in places if key in own_parameters(m)]
        self._buffers = [(own_buffers(m), key) for m, key in places if key in own_buffers(m)]
        tables = [own_parameters(m) if key in own_parameters(m) else own_buffers(m) for m, key in places]
        named = zip(self.uses, tables, places, strict=True)
        self._left = [(name, table, key) for name, table, (_, key) in named if name in self._leaves]


class Split:
    """A model as stages, for batches of one shape; :meth:`at` gives those for another.

    Attributes:
        cuts: names of the modules with which the second stage and the next ones begin; ``name@k`` is the k-th
            call of one.
        stages: the programs.
        segments: what the model consists of between possible cuts, with its costs.
        divided: names of modules that are called by no stage.
        whole: why modules that were to be divided lie in one stage.
        dice: the stage that draws random numbers which are not torch's; None: none does.
        remembers: whether modules set attributes or buffers.
        sets: the attributes that they set, by module's name and their own.
        tensors: those of them that they set to tensors.
        writes: the buffers that they write to, by name.
        first: what the first forward of divided modules sets, and no later one, and where.
        is_again: whether some is computed again in the backward pass, as the model says.
        questions: what was asked of the numbers among its inputs, where others may go the same way; None: it
            is for these alone.
        given: what objects of other classes among its inputs were like.
    """

    questions: Questions | None = None
    given: Sequence[Any] = ()

    def __init__(
        self, family: _Family, traced: Trace, cuts: Sequence[str], by_places: ByPlaces | None = None
    ) -> None:
        self._family, self.cuts = family, tuple(cuts)
        bounds, opened = (bounds_of(traced, cuts), ()) if by_places is None else by_places
        divided = Divided(traced, bounds, family.model, family.stand_ins, opened)
        self.stages = tuple(StageProgram(divided, i, family.model) for i in range(divided.number))
        self._guards = divided.guards()
        self.divided = frozenset(divided.repeated)
        repeated = [*map(family.model.get_submodule, sorted(divided.repeated))]
        self._attributes, self._reads = _said_of(repeated), Reads(repeated)
        self._read = _marks_of(self._reads)
        self.dice, self.remembers = divided.dice, traced.remembers
        self.sets, self.tensors = traced.sets, traced.tensors
        self.writes = frozenset(traced.writes_to(name for name, _ in family.model.named_buffers()))
        self.first = {place: x for place, x in traced.first.items() if place.module in divided.repeated}
        self.segments, self.whole = family.segments, tuple(family.whole.values())
        self.is_again = bool(traced.again)

    def on(self, model: nn.Module) -> Split:
        """The same stages of another model of the same modules, by their names."""
        other = copy.copy(self)
        other.stages = tuple(stage.on(model) for stage in self.stages)
        return other

    def at(self, batch: Any) -> Split:
        """The same stages for another batch; traced anew if its shapes, or what is read of it, are new."""
        return self.at_all([batch])[0]

    def at_all(self, batches: Iterable[Any]) -> list[Split]:
        """:meth:`at` of each; what the model is like is looked at once."""
        state = self._family.state()
        return [self._family.at(batch, state) for batch in batches]

    @property
    def written(self) -> set[str]:
        """The names of parameters and buffers that the forward writes to, for batches of whatever shape."""
        return self._family.written

    @property
    def writes_weights(self) -> bool:
        """Whether parameters are among :attr:`written`."""
        return self._family.writes_weights

    def described(self) -> list[str]:
        """What all ranks have to find alike, in words."""
        found = [f"stages that begin at {', '.join(self.cuts) or 'nothing'}"]
        for stage in self.stages:
            done = ", ".join(step.name for step in stage.steps if not step.is_local)
            sent = ", ".join(value.name for value in stage.outputs)
            found.append(f"stage {stage.number} does {done} and sends {sent or 'nothing'}")
            mark = marked(stage._body, stage._in, stage._out)
            found.append(f"what stage {stage.number} does that on comes about as {mark}")
        found += [f"the forward sets {'.'.join(filter(None, place))}" for place in sorted(self.sets)]
        found += [f"the forward writes to {name}" for name in sorted(self.writes)]
        return [*found, f"dice in stage {self.dice}", f"something is remembered: {self.remembers}"]

    @property
    def users(self) -> dict[str, tuple[int, ...]]:
        """For each parameter and buffer, by all its names, the stages that use it.

        What none does belongs to a stage of its neighbours.
        """
        model = self._family.model
        names = {id(x): name for name, x in named_tensors_in(model)}
        stages_of: dict[str, tuple[int, ...]] = {}
        before: tuple[int, ...] = (0,)
        for name, x in named_tensors_in(model, remove_duplicate=False):
            used = tuple(s.number for s in self.stages if names[id(x)] in s.uses)
            before = stages_of[name] = used or stages_of.get(names[id(x)], before[-1:])
        return stages_of

    @property
    def reads(self) -> bool:
        """Whether Python's control flow read values of its batch."""
        return self._guards is not None

    def parts_from(self, other: Split, among: Collection[int]) -> bool:
        """Whether it goes another way than another first by what Python has read of some of the batch alone.

        Args:
            among: the numbers of these tensors among the batch's.
        """
        return parted(self._guards, other._guards, among)

    def holds(self, batch: Any) -> bool:
        """Whether its modules are as they were, and what Python's control flow read of its batch, too."""
        now = _said_of(m for m, _ in self._attributes)
        if not all(equal(a, b) for (_, a), (_, b) in zip(now, self._attributes, strict=True)):
            return False
        if not equal(_marks_of(self._reads), self._read):
            return False
        if self._guards is None:
            return True
        body, wanted = self._guards
        model, tensors = self._family.model, leaves(batch, torch.Tensor)
        env, expected = body.begin(model, tensors), iter(wanted)
        modules, here = dict(model.named_modules()), tensors[0].device
        with torch.no_grad():
            for step in body.steps:
                out = step.run(env, modules, body.device, here)
                if step.reads and not same(out, next(expected)):
                    return False
        return True


class _Family:
    """One model's splits at the same cuts, by the shapes of batches.

    Args:
        is_cut: whether it was said where: then nothing is left whole that cannot be divided so.

    Attributes:
        whole: modules that lie in one stage, as they cannot be divided, and why.
    """

    def __init__(
        self, model: nn.Module, stand_ins: ModelStandIns, device: torch.device, is_cut: bool = False
    ) -> None:
        self.model, self.stand_ins, self.device = model, stand_ins, device
        self.cuts: tuple[str, ...] = ()
        self.is_cut = is_cut
        self.whole: dict[str, ValuesError] = {}
        self.segments: list[Segment] = []
        self.written, self.writes_weights = set[str](), False
        self.known: OrderedDict[Any, list[Split]] = OrderedDict()
        self.of_numbers: OrderedDict[Any, _OfNumbers] = OrderedDict()  # whichever numbers are in a batch
        self._modules = tuple(model.modules())
        self._inner = [own_modules(m) for m in self._modules]
        self._children = [child for table in self._inner for child in table.values()]
        self._held = [own_parameters(m) for m in self._modules]
        self._parameters = {id(p): p for p in parameters_in(model)}
        self._places = [*map(id, self._now_held())]
        self._names = [name for name, _ in named_parameters_in(model)]
        self._users: dict[str, tuple[int, ...]] | None = None
        self._buffers = [own_buffers(m) for m in self._modules]

    def trace(self, batch: Any, as_plain: Callable[[Any], Any] | None = None) -> Trace:
        """A trace for a batch; ``as_plain``: what stands in it for its tensors, else their whole values."""
        whole = dict(self.whole)
        with disable_modes():  # who counts memory or operations is not to count these
            while True:
                try:
                    traced = trace(mapped(as_plain or _plain, batch), self.device, self.stand_ins, self.whole)
                    self.written |= traced.written | traced.writes_to(self._names)
                    self.writes_weights = not self.written.isdisjoint(self._names)
                    return traced
                except ValuesError as error:
                    if not error.module or self.is_cut or error.module in self.whole:
                        self.whole = whole
                        raise
                    self.whole[error.module] = error

    def at(self, batch: Any, state: Any) -> Split:
        of_numbers = self.with_numbers(batch, state)
        if of_numbers is not None and (known := of_numbers.at(batch)) is not None:
            return known
        key, given = (*self.key(batch), *state), _given(batch)
        same = [one for one in self.known.setdefault(key, []) if equal(one.given, given)]
        self.known.move_to_end(key)
        if (known := next((one for one in same if one.holds(batch)), None)) is not None:
            return known
        found = None
        with told_as_own():
            if same and not any(candidate.reads for candidate in same):
                # attributes are others, maybe on this rank alone (it saved the model): nothing may be sent
                found = self.checked(traced := self.trace(batch, _of_that_shape))
            if found is None or found.reads:
                found = self.checked(traced := self.trace(batch))
        if of_numbers is not None:
            of_numbers.note(found, traced, partial(self._questioned, batch))
        found.given, alike = given, self.known[key]
        if len(alike) == _ALIKE:
            del alike[0]
            _tell_of_traces()
        alike.append(found)
        if len(self.known) > _TRACES:
            self.known.popitem(last=False)
        return found

    def with_numbers(self, batch: Any, state: Any) -> _OfNumbers | None:
        """What is known of batches like one, whichever numbers they have; None: it has none."""
        if not numbers_in(batch):
            return None
        key = *self.key(batch, with_numbers=False), *state
        known = self.of_numbers.setdefault(key, _OfNumbers())
        self.of_numbers.move_to_end(key)
        if len(self.of_numbers) > _TRACES:
            self.of_numbers.popitem(last=False)
        return known

    def _questioned(self, batch: Any, as_given: Trace) -> Questions | None:
        """What a forward asks of the numbers in a batch; None: that cannot be said."""
        questions = Questions()
        try:
            traced = self.trace(batch, lambda x: questions.stand(_plain(x)))
        except Exception:  # they are used in a way that takes nothing else for them
            return None
        return questions if questions.are_all(traced, as_given) else None

    def checked(self, traced: Trace) -> Split:
        """The stages of a trace: they begin where the first batch's do, or where others' parameters are used.

        Raises:
            SplitError: parameters are used in another order than that in which they lie.
        """
        try:
            if missing := [cut for cut in self.cuts if cut not in labels_of(traced)]:
                raise SplitError(
                    f"Stages begin at {', '.join(map(repr, missing))}, which the model's forward does not "
                    "call this time, and calls others in another order than with the first batch. Let it "
                    "call them in one order, or plan without pipe."
                )
            found = Split(self, traced, self.cuts)
            self.check_places(found)
        except SplitError:
            if self._users is None or (by_places := self._by_places(traced, self._users)) is None:
                raise
            found = Split(self, traced, self.cuts, by_places)
            self.check_places(found)
        return found

    def _by_places(self, traced: Trace, users: Mapping[str, tuple[int, ...]]) -> ByPlaces | None:
        """Where stages begin in a trace of another path through the model, by where its parameters lie.

        None if they are used in another order.
        """
        modules = dict(self.model.named_modules())
        names = {id(p): name for name, p in named_parameters_in(self.model)}

        def used(module: nn.Module) -> list[str]:
            return [names[id(p)] for p in parameters_in(module)]

        bounds: list[int] = []
        last = -1
        for i, op in enumerate(traced.ops):
            sources = (traced.values[n].source for n in op.reads)
            needed = {name for kind, name in sources if kind == "parameter"}
            needed.update(used(modules[op.func]) if isinstance(op.func, str) else ())
            if not needed:
                continue
            fitting = set.intersection(*(set(users[name]) for name in needed))
            stage = min((s for s in fitting if s >= len(bounds)), default=None)
            if stage is None:
                return None
            begins = next((call.start for call in traced.chain(i) if call.start > last), i)
            bounds += [begins] * (stage - len(bounds))
            last = i
        bounds += [len(traced.ops)] * (len(self.cuts) - len(bounds))
        opened = [
            call.number
            for call in traced.calls
            if any(bisect_right(bounds, call.start) not in users[name] for name in used(modules[call.name]))
        ]
        return bounds, opened

    def check_places(self, split: Split) -> None:
        """See that stages use what they have: parameters lie where the first batch used them.

        Raises:
            SplitError: one is used in another stage.
        """
        users = split.users
        if self._users is None:
            self._users = users
            return
        of = self._users_by_id()
        for name, p in named_parameters_in(self.model):
            here = tuple(program.number for program in split.stages if name in program.uses)
            known = of.get(id(p)) or self._users.get(name, here)
            if wrong := set(here).difference(known):
                if id(p) in of and self._placed(self._now_held()):
                    raise SplitError(
                        f"{name!r} is a parameter that stages {[*of[id(p)]]} had with the first batch, by "
                        f"which it lies there, and is used in stage {min(wrong)} now: parameters were tied "
                        "or exchanged since (a.weight = b.weight). Do that before espalier.prepare or "
                        "initialize, where stages get copies of it; or train under a plan without pipe."
                    )
                raise SplitError(
                    f"{name!r} is used in stage {min(wrong)} this time, and in {[*self._users[name]]} with "
                    "the first batch, by which it lies there: the forward calls modules in another order. "
                    "Let it call them in one order, or train under a plan without pipe."
                )

    def _users_by_id(self) -> dict[int, tuple[int, ...]]:
        """The stages that used each parameter with the first batch."""
        assert self._users is not None
        return {i: self._users[name] for i, name in zip(self._parameters, self._names, strict=True)}

    def _now_held(self) -> list[torch.Tensor]:
        """The parameters that modules have now, module after module."""
        return [p for table in self._held for p in table.values() if p is not None]

    def _placed(self, held: Iterable[torch.Tensor]) -> tuple[int, ...]:
        """Which parameter is where, by their order at first; nothing while each is where it was."""
        ids = [*map(id, held)]
        if ids == self._places:
            return ()
        order = {i: n for n, i in enumerate(self._parameters)}
        return tuple(order.get(i, -1) for i in ids)

    def key(self, batch: Any, with_numbers: bool = True) -> Any:
        """What a trace depends on of a batch, beside its values."""

        def of(x: Any) -> Any:
            if isinstance(x, torch.Tensor):
                return tuple(x.shape), x.dtype
            if not _is_plain(x) or (type(x) in KINDS and not with_numbers):
                return type(x)
            return x

        leaf_keys = map(of, leaves(batch))
        names = tuple(batch) if isinstance(batch, Mapping) else None
        return names, tuple(leaf_keys)

    def state(self) -> tuple[Any, ...]:
        """What it depends on of the model and of torch.

        Raises:
            SplitError: the model has other modules than when it was divided, or parameters that nobody laid
                out.
        """
        if [child for table in self._inner for child in table.values()] != self._children:
            known = {id(m) for m in self._modules}
            new = [
                f"{name!r} ({type(m).__name__})"
                for name, m in self.model.named_modules()
                if id(m) not in known
            ]
            raise SplitError(
                f"The model has other modules than when it was divided among stages: "
                f"{few(new) + ' came later' if new else 'some are gone'}. Stages hold what it had "
                "then. Let it have all its modules before the first batch, or train under a plan without "
                "pipe."
            )
        held = self._now_held()
        later = [p for p in held if id(p) not in self._parameters]
        if any(type(p) is not DTensor or isinstance(p, nn.Parameter) for p in later):
            refuse_later(self.model, self._parameters)
        with raw():  # past DTensor's Python getters: this is asked at every step
            kinds = tuple([(_dtype(p), _requires_grad(p)) for p in held])
        buffers = tuple(
            [
                (i, *[(k, b.shape, b.dtype, b.requires_grad) for k, b in table.items() if b is not None])
                for i, table in enumerate(self._buffers)
                if table
            ]
        )
        modes = tuple([m.training for m in self._modules])
        return modes, kinds, self._placed(held), buffers, TorchState.now(self.device.type)


class _OfNumbers:
    """The splits for batches that differ in numbers alone.

    Attributes:
        traces: how many were made.
    """

    def __init__(self) -> None:
        self._asked: list[Split] = []  # whose questions are known
        self.traces = 0

    def at(self, batch: Any) -> Split | None:
        """The one for a batch, if it is among those of which it is known what they ask of its numbers."""
        numbers = numbers_in(batch) if self._asked else ()
        for one in self._asked:
            is_asked = one.questions is not None and one.questions.hear_the_same(numbers)
            if is_asked and equal(one.given, _given(batch)) and one.holds(batch):
                return one
        return None

    def note(self, found: Split, traced: Trace, questioned: Callable[[Trace], Questions | None]) -> None:
        """There is another one; from the second on it is seen what the forward asks of numbers."""
        self.traces += 1
        if 1 < self.traces <= _QUESTIONED:
            found.questions = questioned(traced)
            self._asked += [found] if found.questions is not None else []
        elif self.traces == _ALIKE + 1:
            _tell_of_numbers()


def refuse_later(model: nn.Module, known: Container[int] | None = None) -> NoReturn:
    """Refuse parameters that nobody has laid out.

    Args:
        known: the ids of others, which may be plain; None: all that are no DTensors came later.
    """

    def is_later(p: torch.Tensor) -> bool:
        if known is None:
            return type(p) is not DTensor
        return id(p) not in known and (type(p) is not DTensor or isinstance(p, nn.Parameter))

    new = [repr(name) for name, p in named_parameters_in(model) if is_later(p)]
    raise SplitError(
        "The model has other parameters than when it was divided among stages: "
        f"{few(new)} came later, each rank with its own. Give the values to a parameter that "
        "there was (p.data = value, p.copy_(value), load_state_dict without assign=True), or train under "
        "a plan without pipe."
    )


def split(
    model: nn.Module,
    number: int,
    example: Any,
    cuts: Sequence[str] | None = None,
    costs: Mapping[str, float] | None = None,
    *,
    device: torch.device | None = None,
    memory: float | None = None,
    divide: bool = True,
) -> Split:
    """Divide a model into stages.

    Args:
        model: any module; it is not changed, and may lie on the meta device.
        number: of stages.
        example: a micro-batch, as plain tensors: a dict (keywords), a tuple or list, or one tensor.
        cuts: names of the ``number - 1`` modules with which stages begin; by default such that the slowest
            stage is as fast as can be.
        costs: of modules, by name, in any unit; by default their operations and bytes, counted.
        device: on which it will run; by default that of its parameters.
        memory: bytes of parameters that a stage may hold at most.
        divide: whether a stage may begin within a block if that is much better, without being told to.

    Raises:
        SplitError: listing what is wrong with the cuts; there are too few places for cuts; or the model does
            what stages cannot do (see ``docs/pipeline.md``).
    """
    family = _family(model, device, is_cut=cuts is not None)
    traced = family.trace(example)
    family.segments = segments_of(traced, family.model, family.stand_ins, costs)
    if not divide:
        family.segments = whole_blocks(family.segments)
    if cuts is None:
        division = _balanced(family, traced, number, memory, lambda: _anywhere(traced, family, costs, divide))
    elif len(cuts) == number - 1:
        division = Split(family, traced, cuts)
    else:
        raise SplitError(f"{number} stages begin at {number - 1} cuts, got {len(cuts)}: {list(cuts)}.")
    family.cuts = division.cuts
    family.check_places(division)
    state, division.given = family.state(), _given(example)
    family.known[(*family.key(example), *state)] = [division]
    if (of_numbers := family.with_numbers(example, state)) is not None:
        of_numbers.traces = 1
    return division


def _balanced(
    family: _Family, traced: Trace, number: int, memory: float | None, more: Callable[[], list[Segment]]
) -> Split:
    """The best split at blocks or, where these are too few or cannot be cut so, at any place that can be."""
    first_error: SplitError | None = None
    few = True  # whether places are all that was missing
    for some in (lambda: family.segments, lambda: whole_blocks(family.segments), more):
        tried = some()
        try:
            division = Split(family, traced, balance(tried, number, memory))
        except SplitError as error:
            few = few and number > len(tried)
            if first_error is None or few:
                first_error = error
        else:
            division.segments = family.segments = tried
            return division
    assert first_error is not None
    raise first_error


def _anywhere(
    traced: Trace, family: _Family, costs: Mapping[str, float] | None, divide: bool
) -> list[Segment]:
    """What a model consists of between all places where it may be cut alone, however deep."""
    whole = () if divide else tuple(f"{name}." for name in parts(family.model))
    every = segments_of(
        traced, family.model, family.stand_ins, costs, lambda label: not label.startswith(whole)
    )
    legal = {every[0].name}
    for segment in every[1:]:
        if segment.name.startswith(whole):
            continue
        try:
            Divided(traced, bounds_of(traced, [segment.name]), family.model, family.stand_ins)
        except SplitError:
            continue
        legal.add(segment.name)
    return joined(every, lambda segment: segment.name in legal)


def in_segments(
    model: nn.Module, example: Any, device: torch.device | None, dtype: torch.dtype | None, divide: bool
) -> tuple[list[str], Sequence[StageProgram], ModelStandIns]:
    """A model divided wherever it may be: the pieces' names, their programs, and what can stand in for it.

    Args:
        dtype: of its parameters, if they are floats; None: their own.
        divide: whether blocks are divided, too.

    Raises:
        SplitError: it cannot be divided so.
    """
    family = _family(model, device, dtype)
    traced = family.trace(example)
    names = [p.name for p in segments_of(traced, family.model, family.stand_ins) if divide or not p.within]
    return names, Split(family, traced, names[1:]).stages, family.stand_ins


def _family(
    model: nn.Module, device: torch.device | None, dtype: torch.dtype | None = None, is_cut: bool = False
) -> _Family:
    if device is None:
        device = next((p.device for p in parameters_in(model) if not p.is_meta), torch.device("cpu"))
    return _Family(model, ModelStandIns(model, device, dtype), device, is_cut)


def _has_tensors(m: nn.Module) -> bool:
    return bool([*parameters_in(m), *m.buffers()])


def _tell_of_traces() -> None:
    tell(
        f"The model was traced {_ALIKE} times for batches of one shape, and is again: attributes of modules "
        "that are divided among stages, or objects that it is given, have other values each time, or the "
        "forward reads other ones of the batch. Keep a number that changes in a buffer, or in a module that "
        "lies in one stage."
    )


def _tell_of_numbers() -> None:
    tell(
        f"The model was traced for {_ALIKE} numbers that it was given, and is for each that is new: its "
        "forward goes by them, or computes with them. Give what it computes with as a tensor "
        "(torch.tensor(beta)), and leave out what it only prints."
    )


def _given(batch: Any) -> list[Any]:
    """What objects among a model's inputs are like, which its forward may ask for all that they hold."""
    marks = Marks(counts=False)
    others = [x for x in leaves(batch) if not (isinstance(x, torch.Tensor) or _is_plain(x))]
    return [x if isinstance(x, nn.Module) else marks.of(x) for x in others]


def _said_of(modules: Iterable[nn.Module]) -> list[tuple[nn.Module, dict[str, Any]]]:
    """What the program, or modules within, may have set of these and their forwards may ask for."""
    marks = Marks(counts=False)
    return [
        (
            m,
            {
                name: marks.of(x)
                for name, x in vars(m).items()
                if name not in _NOT_ASKED and not type(x).__module__.startswith("espalier.")
            },
        )
        for m in modules
    ]


def _marks_of(reads: Reads) -> list[Any]:
    marks = Marks(counts=False)
    return [marks.of(x) for x in reads.now()]


def _plain(x: Any) -> Any:
    return full_tensor(x) if type(x) is DTensor else x


def _of_that_shape(x: Any) -> Any:
    """A plain tensor like the whole of what lies on ranks, of the rows that are here; nothing is sent."""
    if type(x) is not DTensor:
        return x
    layout, own = here(x)
    for dim, size in enumerate(layout.shape):
        n = own.shape[dim]
        if not n and size:
            own = own.new_zeros(layout.shape)
        elif n != size:
            own = own.index_select(dim, torch.arange(size, device=own.device) % n)
    return own.requires_grad_(x.requires_grad)


def _is_plain(x: Any) -> bool:
    return isinstance(x, int | float | complex | bool | str | type(None))
