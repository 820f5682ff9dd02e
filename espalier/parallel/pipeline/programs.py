"""From a trace and the places where stages begin to the programs of the stages."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from espalier.blocks import named_tensors_in, parameters_in
from espalier.parallel.pipeline.arguments import Part, Ref, leaves, mapped
from espalier.parallel.pipeline.model_stand_ins import ModelStandIns
from espalier.parallel.pipeline.objects import PLAIN, holds_tensors
from espalier.parallel.pipeline.record import (
    Again,
    Answer,
    CallSpan,
    ModuleCall,
    Op,
    SplitError,
    TorchState,
    Trace,
    all_having_it,
    answered,
    name_of,
)
from espalier.tensor.before import is_of_torch
from espalier.torch_private import own_buffers, own_parameters

_STATISTICS = frozenset("running_mean running_var num_batches_tracked".split())


# ---- a program: calls in order, on values by number


Env = dict[int, torch.Tensor]


def _devices_by_name(func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The arguments of a call, with a device where there is the name of one."""
    if func is torch.Tensor.to and len(args) > 1 and isinstance(args[1], str):
        args = (args[0], torch.device(args[1]), *args[2:])
    if isinstance(kwargs.get("device"), str):
        kwargs = {**kwargs, "device": torch.device(kwargs["device"])}
    return args, kwargs


class ProgramStep:
    """One call of a program.

    Args:
        func: a torch function, or a module's name.
        name: for messages.
        args, kwargs, out: trees with a :class:`Ref` for each tensor, and a :class:`Part` for each module that
            is given to another.
        state: what torch is told meanwhile, if it is not what it is told around the program.
        reads: whether Python's control flow read what it gives.

    Attributes:
        inputs, outputs: the values that it is given and gives.
        free: values that nothing needs after it.
        answers: what was asked of tensors within it when it was traced: where they have no data, it gets the
            same.
        meets: whether it calls collectives, to which ranks of other stages do not come.
        again: in what it is computed again, if it is.
        is_local: whether each stage that needs what it gives makes it of the batch for itself.
    """

    __slots__ = (
        "_args", "_flat", "_kwargs", "_out", "_state", "again", "answers", "free", "func", "inputs",
        "is_local", "meets", "name", "outputs", "reads",
    )  # fmt: skip

    def __init__(
        self,
        func: Any,
        name: str,
        args: Any,
        kwargs: Any,
        out: Any,
        state: TorchState | None,
        reads: bool = False,
    ) -> None:
        self.func, self.name, self.reads = func, name, reads
        args, kwargs = _devices_by_name(func, args, kwargs)
        self._args, self._kwargs, self._out, self._state = args, kwargs, out, state
        inner = [x for x in (*args, *kwargs.values()) if type(x) is not Ref]
        self._flat = not any(leaves(x, (Ref, Part, torch.device)) for x in inner)
        self.inputs = tuple(ref.number for ref in leaves((args, kwargs), Ref))
        self.outputs = tuple(ref.number for ref in leaves(out, Ref))
        self.free: tuple[int, ...] = ()
        self.answers: tuple[Answer, ...] = ()
        self.meets = self.is_local = False
        self.again: Again | None = None

    def generators(self) -> list[torch.Generator]:
        """Those that it is given."""
        return leaves((self._args, self._kwargs), torch.Generator)

    def by(self, func: Callable[..., Any]) -> ProgramStep:
        """The step that calls something else in place of what this one does."""
        step = ProgramStep(func, self.name, self._args, self._kwargs, self._out, self._state, self.reads)
        step.free, step.answers, step.meets, step.again = self.free, self.answers, self.meets, self.again
        step.is_local = self.is_local
        return step

    def run(self, env: Env, modules: Mapping[str, nn.Module], was: torch.device, here: torch.device) -> Any:
        """Call it on what is in ``env``, and put there what it gives.

        Args:
            was, here: the device of the trace, in whose place is the one of now; so it is in that of others
                of its kind, over which a program may have laid its layers by hand.
        """
        func: Any = modules[self.func] if type(self.func) is str else self.func
        if self.answers and here.type == "meta":
            func = partial(answered, func, self.answers)
        if self.meets:
            func = partial(all_having_it, func)
        if self._flat:
            args = [env[a.number] if type(a) is Ref else a for a in self._args]
            kwargs = {k: env[a.number] if type(a) is Ref else a for k, a in self._kwargs.items()}
        else:

            def filled(x: Any) -> Any:
                if type(x) is Ref:
                    return env[x.number]
                if type(x) is Part:
                    return modules[x.name]
                return here if type(x) is torch.device and x.type == was.type else x

            args, kwargs = mapped(filled, (self._args, self._kwargs))
        if self._state is None:
            out = func(*args, **kwargs)
        else:
            with torch.set_grad_enabled(self._state.grad), self._state.cast_again(was.type):
                out = func(*args, **kwargs)
        self._keep(out, env)
        return out

    def _keep(self, out: Any, env: Env) -> None:
        if type(self._out) is Ref:
            env[self._out.number] = out
        else:
            tensors, wanted = leaves(out, torch.Tensor), leaves(self._out, Ref)
            if len(tensors) != len(wanted):
                raise SplitError(
                    f"{self.name!r} gave {len(tensors)} tensors, and {len(wanted)} when it was traced. A "
                    "stage is called as it was traced: let the number not depend on what its forward "
                    "remembers."
                )
            env.update((ref.number, x) for ref, x in zip(wanted, tensors, strict=True))
        for n in self.free:
            env.pop(n, None)


class ValueSource(NamedTuple):
    """Where a value comes from that no step makes.

    Attributes:
        number: the value's.
        kind: ``"parameter"``, ``"buffer"``, ``"batch"`` or ``"constant"``.
        place: its name, its number among the batch's tensors, or itself.
        clone: whether a step writes to it, which is not to be seen outside.
    """

    number: int
    kind: str
    place: Any
    clone: bool


class ProgramBody(NamedTuple):
    """Steps in order, and what they start from; ``device``: that of the trace."""

    sources: Sequence[ValueSource]
    steps: Sequence[ProgramStep]
    device: torch.device

    def begin(self, model: nn.Module, batch: Sequence[torch.Tensor]) -> Env:
        """The values at the beginning."""
        env: Env = {}
        for number, kind, place, clone in self.sources:
            if kind == "batch":
                x = batch[place]
            elif kind == "constant":
                x = place
            else:
                owner, _, key = place.rpartition(".")
                module = model.get_submodule(owner)
                x = (own_parameters(module) if kind == "parameter" else own_buffers(module))[key]
            env[number] = x.clone() if clone else x
        return env


# ---- a trace, divided among stages


class SentValue(NamedTuple):
    """A tensor that travels from a stage to the next one.

    Attributes:
        name: the module or function that made it.
        shape: of the global tensor.
        dtype: its dtype.
        grad: whether a gradient comes back.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    grad: bool


class Divided:
    """A trace, divided at operations.

    Args:
        trace: the trace.
        bounds: numbers of the operations with which the second stage and the next ones begin.
        model: the model.
        stand_ins: how its author made it.
        opened: numbers of calls of modules that are not to be called whole.
    """

    def __init__(
        self,
        trace: Trace,
        bounds: Sequence[int],
        model: nn.Module,
        stand_ins: ModelStandIns,
        opened: Iterable[int] = (),
    ) -> None:
        self.trace, self.bounds, self.number = trace, list(bounds), len(bounds) + 1
        self._modules = dict(model.named_modules())
        self._canonical = {id(x): name for name, x in named_tensors_in(model)}
        # storages that hold what is not local, at any time
        self._bound = trace.bound.keys() | {
            v.storage for v in trace.values if not v.local and v.source[0] != "parameter"
        }
        self._stand_ins = stand_ins
        self._opened = set(opened)
        while True:
            self.units = self._units()
            self._of_op: dict[int, CallSpan] = {i: u for u in self.units for i in range(u.start, u.end)}
            self._find_uses()
            if not self._open_leaks():
                break
        self.repeated = self._repeated()
        refuse_lost(trace, self.repeated, self.units, self._modules, stand_ins)
        self._refuse_shared_values()
        self._refuse_shared_state()

    # ---- units

    def _units(self) -> list[CallSpan]:
        spans: list[CallSpan] = []
        i = 0
        while i < len(self.trace.ops):
            call = next((c for c in self.trace.chain(i) if self._whole(c)), None)
            spans.append(CallSpan(i, i + 1, None) if call is None else CallSpan(call.start, call.end, call))
            i = spans[-1].end
        return spans

    def _whole(self, call: ModuleCall) -> bool:
        """Whether a module lies in one stage, and is to be called there."""
        if call.number in self._opened or any(call.start < b < call.end for b in self.bounds):
            return False
        inner = self.trace.ops[call.start : call.end]
        if call.name in self.trace.containers and any(op.read for op in inner) and not self._loses(call):
            return False  # what it reads is known where the program is chosen
        return any(not self._is_local(op) for op in inner)

    def _repeated(self) -> set[str]:
        """The names of modules of whose forwards stages repeat the calls of torch, and not Python."""
        divided = {c.name for c in self.trace.calls if any(c.start < b < c.end for b in self.bounds)}
        return divided.union(c.name for u in self.units if u.call is None for c in self.trace.chain(u.start))

    def _loses(self, call: ModuleCall) -> bool:
        return call.name in self.trace.changed or self._stand_ins.hooked(self._modules[call.name])

    def _refuse_shared_values(self) -> None:
        sources = {v.storage: v.source for v in self.trace.values if v.source[0] in ("parameter", "buffer")}
        written: dict[str, tuple[str, int]] = {}
        for unit in self.units:
            for s in self._changes(unit) & sources.keys():
                kind, name = sources[s]
                written[name] = kind, self.stage(unit.start)
        used = [(self._uses(unit), self.stage(unit.start)) for unit in self.units]
        for names, at in [*used, (self._given(), self.number - 1)]:
            for name in names & written.keys():
                kind, stage = written[name]
                if at != stage:
                    raise SplitError(
                        f"The {kind} {name!r} is written to in stage {stage} and used in stage {at} too, "
                        "which would not see it. Give cuts such that one stage has all its uses."
                    )

        for unit in filter(self._is_asked, self.units):
            for _, name in self._origins(unit.start) & {("buffer", name) for name in written}:
                raise SplitError(
                    f"{name_of(self.trace.ops[unit.start].func)} in {self.trace.where(unit.start)}, which is "
                    f"divided among stages, reads the buffer {name!r}, to which one of them writes: others "
                    "would not know when to go another way. Read it in the module that writes to it."
                )

    def _refuse_shared_state(self) -> None:
        """What modules remember beside tensors, and generators that are not torch's, are each rank's own."""
        called: dict[str, set[int]] = {}
        for call in self.trace.calls:
            called.setdefault(call.name, set()).add(self.stage(call.start))
        for name in sorted(self.trace.changed.keys() - self.trace.dice):
            if len(stages := called.get(name, set())) > 1:
                raise SplitError(
                    f"{name!r} is called in the stages {sorted(stages)}, and its forward "
                    f"{', '.join(self.trace.changed[name])}, of which each stage would know its own calls "
                    "alone. Give cuts such that one stage has all of them."
                )
        for name, holding in self.trace.sharing.items():
            stages = set().union(*(called.get(other, set()) for other in holding))
            if len(stages) > 1:
                raise SplitError(
                    f"{', '.join(map(repr, sorted(holding)))} hold one object that the forward of {name!r} "
                    f"changes, and are called in the stages {sorted(stages)}, of which each would have its "
                    "own. Give cuts such that one stage has all of them."
                )
        rolling = set().union(*(called.get(name, set()) for name in self.trace.dice))
        if len(rolling) > 1:
            raise SplitError(
                f"{', '.join(map(repr, sorted(self.trace.dice)))} draw random numbers from Python's or "
                f"NumPy's generator in the stages {sorted(rolling)}, of which each would draw the same. Draw "
                "them with torch (torch.rand), or give cuts such that one stage has all of them."
            )
        self.dice = next(iter(rolling), None)
        for ops in self.trace.drawing.values():
            stages = {self.stage(self._of_op[op].start) for op in ops}
            if len(stages) > 1:
                named = sorted({self.trace.where(op) for op in ops})
                raise SplitError(
                    f"{', '.join(named)} draw from one torch.Generator in the stages {sorted(stages)}, of "
                    "which each would draw the same. Draw from torch's own (no generator=), give each a "
                    "generator of its own, or give cuts such that one stage has all of them."
                )

    def _changes(self, unit: CallSpan) -> set[int]:
        return {s for op in self.trace.ops[unit.start : unit.end] for s in op.writes}

    def _is_local(self, op: Op) -> bool:
        values = self.trace.values
        kept = op.writes.union(values[n].storage for n in op.makes)
        return op.local and not kept & self._bound

    def _on_demand(self, unit: CallSpan) -> bool:
        return unit.call is None and self._is_local(self.trace.ops[unit.start])

    def stage(self, op: int) -> int:
        """The stage in which an operation is done, if it is not a local one."""
        return bisect_right(self.bounds, op)

    def _reads(self, unit: CallSpan) -> list[int]:
        if unit.call is None:
            return list(self.trace.ops[unit.start].reads)
        return [r.number for r in leaves((unit.call.args, unit.call.kwargs), Ref)]

    def _gives(self, unit: CallSpan) -> list[int]:
        """What others can get of a unit."""
        if unit.call is None:
            return list(self.trace.ops[unit.start].makes)
        return [r.number for r in leaves(unit.call.out, Ref) if self._made(r.number, unit)]

    def _made(self, number: int, unit: CallSpan) -> bool:
        kind, i = self.trace.values[number].source
        return kind == "op" and unit.start <= i < unit.end

    def _writes(self, unit: CallSpan) -> set[int]:
        inner = {
            self.trace.values[n].storage for i in range(unit.start, unit.end) for n in self.trace.ops[i].makes
        }
        written = self._changes(unit)
        if unit.call is None:
            return written
        outside = {self.trace.values[n].storage for n in self._reads(unit)}
        return (written - inner) | (written & outside)

    def uses(self, stage: int) -> set[str]:
        """The parameters and buffers that a stage uses, by name."""
        names = self._given() if stage == self.number - 1 else set()
        for unit in self.units:
            if self.stage(unit.start) == stage:
                names |= self._uses(unit)
        return names

    def is_opaque(self, stage: int) -> bool:
        """Whether modules of a stage could not be looked into: they were run by themselves on some values."""
        ops = self.trace.ops
        return any(
            isinstance(op.func, str)
            for unit in self.units
            if unit.call is not None and self.stage(unit.start) == stage
            for op in ops[unit.start : unit.end]
        )

    def left(self, stage: int) -> set[str]:
        """The parameters and buffers that it writes to, or may, but for those on which no gradient hangs."""
        return {name for name in self.trace.writes_to(self.uses(stage)) if not self._is_statistic(name)}

    def _is_statistic(self, name: str) -> bool:
        """Whether it is a running mean of one of torch's norms."""
        owner, _, key = name.rpartition(".")
        return key in _STATISTICS and is_of_torch(self._modules[owner])

    def _uses(self, unit: CallSpan) -> set[str]:
        names = self._named(n for op in self.trace.ops[unit.start : unit.end] for n in op.reads)
        if unit.call is not None:
            module = self._modules[unit.call.name]
            every = *parameters_in(module), *module.buffers()
            names |= {self._canonical[id(x)] for x in every if id(x) in self._canonical}
        return names

    def _given(self) -> set[str]:
        """Those that the model gives as they are: the last stage needs them."""
        return self._named(r.number for r in leaves(self.trace.out, Ref))

    def _named(self, numbers: Iterable[int]) -> set[str]:
        sources = (self.trace.values[n].source for n in numbers)
        return {name for kind, name in sources if kind in ("parameter", "buffer")}

    # ---- what travels

    def _find_uses(self) -> None:
        """For each value that is not local, the stages that make or change it, and the last that uses it."""
        self.last: dict[int, int] = {}
        self.makers: dict[int, set[int]] = {}
        values = self.trace.values
        by_storage: dict[int, list[int]] = {}
        for unit in self.units:
            if self._on_demand(unit):
                continue
            stage = self.stage(unit.start)
            for n in self._reads(unit):
                if self.travels(n):
                    self.last[n] = max(self.last.get(n, 0), stage)
            for n in self._gives(unit):
                self.makers.setdefault(n, set()).add(stage)
                by_storage.setdefault(values[n].storage, []).append(n)
            for s in self._writes(unit):
                for n in by_storage.get(s, ()):
                    self.makers[n].add(stage)
        for r in leaves(self.trace.out, Ref):
            if self.travels(r.number):
                self.last[r.number] = self.number - 1

    def _open_leaks(self) -> bool:
        """Look into modules of which others use what they do not return (a hook has taken it, say).

        Raises:
            SplitError: one cannot be looked into.
        """
        leaked = self.last.keys() - self.makers.keys()
        for n in leaked:
            value = self.trace.values[n]
            unit = self._of_op[value.source[1]]
            call = unit.call
            if call is None or isinstance(self.trace.ops[unit.start].func, str):
                raise SplitError(
                    f"A tensor of the shape {list(value.tensor.shape)} is made in "
                    f"{self.trace.where(value.source[1])} and used outside of it, though it is none of its "
                    "outputs. A stage gets the outputs of modules: return it."
                )
            self._opened.add(call.number)
        return bool(leaked)

    def travels(self, number: int) -> bool:
        """Whether a value is one that stages send to each other, if it is needed elsewhere."""
        value = self.trace.values[number]
        return value.source[0] == "op" and value.storage in self._bound

    def crossing(self, stage: int) -> list[int]:
        """The values that a stage sends to the next one."""
        return sorted(n for n, used in self.last.items() if min(self.makers[n]) <= stage < used)

    def described(self, number: int) -> SentValue:
        """A value that a stage sends."""
        value = self.trace.values[number]
        unit = self._of_op[value.source[1]]
        op = self.trace.ops[unit.start]
        return SentValue(
            unit.call.name if unit.call is not None else name_of(op.func),
            tuple(value.tensor.shape),
            value.tensor.dtype,
            self.has_gradient(number),
        )

    def has_gradient(self, number: int) -> bool:
        """Whether gradients go back through a value."""
        value = self.trace.values[number]
        return value.grad or self.trace.bound.get(value.storage, False)

    # ---- programs

    def body(self, stage: int) -> ProgramBody:
        """The steps of a stage."""
        units = [u for u in self.units if self.stage(u.start) == stage and not self._on_demand(u)]
        keep = set(self.crossing(stage)) if stage < self.number - 1 else set()
        if stage == self.number - 1:
            keep |= {r.number for r in leaves(self.trace.out, Ref)}
        end = self.bounds[stage] if stage < len(self.bounds) else len(self.trace.ops)
        received = set(self.crossing(stage - 1)) if stage else set()
        return self._body(units, keep, received, end)

    def guards(self) -> tuple[ProgramBody, list[Any]] | None:
        """The steps that read the batch for Python's control flow, and what they read; None if there are "
        "none."""
        reads = [u for u in self.units if self._is_asked(u) and self._origins(u.start)]
        if not reads:
            return None
        return self._body(reads, set(), set(), len(self.trace.ops)), [
            self.trace.ops[u.start].out for u in reads
        ]

    def _is_asked(self, unit: CallSpan) -> bool:
        """Whether Python's control flow reads it, where stages repeat no Python."""
        return unit.call is None and self.trace.ops[unit.start].read

    def _origins(self, op: int) -> set[tuple[str, Any]]:
        """What of the batch, and which buffers, an operation depends on."""
        seen: set[int] = set()
        origins: set[tuple[str, Any]] = set()
        waiting = [op]
        while waiting:
            for n in self.trace.ops[waiting.pop()].reads:
                kind, at = self.trace.values[n].source
                if kind in ("batch", "buffer"):
                    origins.add((kind, at))
                if kind == "op" and at not in seen:
                    seen.add(at)
                    waiting.append(at)
        return origins

    def _body(self, units: Iterable[CallSpan], keep: set[int], received: set[int], end: int) -> ProgramBody:
        units = list(units)
        available = {n for u in units for n in self._gives(u)} | received
        demanded = {n for u in units for n in self._reads(u)} | keep
        local = self._local_ops(demanded - available, end)
        every = sorted([*units, *(CallSpan(i, i + 1, None) for i in local)])
        written = {s for u in every for s in self._writes(u)}
        needed = {n for u in every for n in self._reads(u)} | keep
        sources = [self._source(n, written) for n in sorted(needed) if self.trace.values[n].source[0] != "op"]
        self._check_received(received, written)
        steps = [self._step(u) for u in every]
        seen = set(keep)
        for step, unit in zip(reversed(steps), reversed(every), strict=True):
            used = set(self._reads(unit)) | set(self._gives(unit))
            step.free = tuple(used - seen)
            step.is_local = unit.call is None and unit.start in local
            seen |= used
        return ProgramBody(sources, steps, self.trace.device)

    def _local_ops(self, demanded: set[int], end: int) -> set[int]:
        """The operations that make local values, and what they need."""
        ops: set[int] = set()
        writers: dict[int, list[int]] = {}
        kept = {v.storage for v in self.trace.values if v.source[0] in ("parameter", "buffer", "constant")}
        for i, op in enumerate(self.trace.ops[:end]):
            called = self._of_op[i].call is not None  # then it is the module that writes to what it keeps
            for s in (op.writes - kept if called else op.writes) if op.local else ():
                writers.setdefault(s, []).append(i)
        waiting = list(demanded)
        seen = set(waiting)
        while waiting:
            value = self.trace.values[waiting.pop()]
            producer = [value.source[1]] if value.source[0] == "op" else []
            for i in [*producer, *writers.get(value.storage, [])]:
                if i not in ops:
                    ops.add(i)
                    fresh = set(self.trace.ops[i].reads) - seen
                    seen |= fresh
                    waiting.extend(fresh)
        return ops

    def _source(self, number: int, written: set[int]) -> ValueSource:
        value = self.trace.values[number]
        kind, place = value.source
        if kind == "batch":
            return ValueSource(number, kind, place, value.storage in written)
        if kind == "constant":
            return ValueSource(number, kind, self.trace.constants[number], False)
        return ValueSource(number, kind, place, False)

    def _check_received(self, received: set[int], written: set[int]) -> None:
        shared: dict[int, int] = {}
        for n in received:
            s = self.trace.values[n].storage
            shared[s] = shared.get(s, 0) + 1
        for s in written & shared.keys():
            if shared[s] > 1:
                raise SplitError(
                    "Two views of one tensor cross into a stage that writes to one of them in place, which "
                    "the other would not see. Write x = x + y in place of x += y there, or cut elsewhere."
                )

    def written_in(self, stage: int) -> set[int]:
        """Of the values that a stage receives, those it writes to in place."""
        units = [u for u in self.units if self.stage(u.start) == stage]
        written = {s for u in units for s in self._writes(u)}
        return {n for n in self.crossing(stage - 1) if self.trace.values[n].storage in written}

    def _step(self, unit: CallSpan) -> ProgramStep:
        done: Any = self.trace.ops[unit.start] if unit.call is None else unit.call
        func = done.func if unit.call is None else unit.call.name
        state = None if done.state == self.trace.state else done.state
        reads = unit.call is None and done.read
        step = ProgramStep(func, name_of(func), done.args, done.kwargs, done.out, state, reads)
        step.answers = self.trace.answered(unit.start, unit.call)
        has_barrier = unit.call is not None and unit.call.name in self.trace.meets
        step.meets = has_barrier or self.trace.meets_ranks(unit.start, unit.end)
        step.again = next((again for again in reversed(self.trace.again) if again.has(unit)), None)
        return step


def marked(body: ProgramBody, received: Sequence[int], sent: Sequence[int]) -> str:
    """A hash of what steps are given, and a stage sends, by how these values come about.

    What each stage makes of the batch for itself is all the same: it may come in any order, as that of a set
    is another one in each process, or be there already, where a program has kept it for such sizes.
    """
    marks = {s.number: s.place if s.kind == "parameter" else "local" for s in body.sources}
    marks |= {n: f"received {i}" for i, n in enumerate(received)}
    done: list[str] = []
    for step in body.steps:
        if step.is_local:
            marks |= dict.fromkeys(step.outputs, "local")
            continue
        mark = hashlib.sha256(repr((step.name, [marks[n] for n in step.inputs])).encode()).hexdigest()
        marks |= dict.fromkeys(step.outputs, mark)  # which of them a rank takes is its own affair
        done.append(mark)
    return hashlib.sha256(repr([done, [marks[n] for n in sent]]).encode()).hexdigest()[:8]


# ---- what stages cannot do again, and so refuse, in words


def refuse_lost(
    trace: Trace,
    repeated: Iterable[str],
    units: Sequence[CallSpan],
    modules: Mapping[str, nn.Module],
    stand_ins: ModelStandIns,
) -> None:
    """Refuse what the stages would lose of a forward pass.

    Raises:
        SplitError: a module that is divided has hooks or changes itself, or one that is called whole uses
            what it was not given.
    """
    for name in sorted(repeated):
        said = f"{name or 'the model'!r} ({type(modules[name]).__name__})"
        if stand_ins.hooked(modules[name]):
            raise SplitError(
                f"{said} has hooks, and is divided among stages: they would never be called. Hook modules "
                "that lie in one stage, or give cuts at modules outside of it."
            )
        if name in trace.changed:
            raise SplitError(
                f"The forward of {said}, which is divided among stages, {', '.join(trace.changed[name])}. "
                "The stages compute only its tensors again: this would be lost. Give cuts at modules outside "
                "of it, or move this into a module that lies in one stage."
            )
    own_sources = {
        v.storage: v.source for v in trace.values if v.source[0] in ("parameter", "buffer", "constant")
    }
    for unit in units:
        if unit.call is not None:
            _refuse_hidden(trace, unit, unit.call)
            continue
        op = trace.ops[unit.start]
        for s in op.writes & own_sources.keys():
            kind, name = own_sources[s]
            raise SplitError(
                f"{name_of(op.func)} in {trace.where(unit.start)}, which is divided among stages, writes to "
                f"the {kind} {name!r}: each stage would have another one. Give cuts at modules outside of "
                "it, or let a module that lies in one stage do it."
            )


def _refuse_hidden(trace: Trace, unit: CallSpan, call: ModuleCall) -> None:
    numbers = {r.number for r in leaves((call.args, call.kwargs), Ref)}
    for i in range(unit.start, unit.end):
        for n in trace.ops[i].reads:
            value = trace.values[n]
            kind, at = value.source
            outside = kind == "batch" or (kind == "op" and not unit.start <= at < unit.end)
            if outside and n not in numbers:
                raise SplitError(
                    f"{call.name!r} uses a tensor of the shape {list(value.tensor.shape)} that was made "
                    "outside of it and is none of its arguments. A stage hands modules their arguments: pass "
                    "it as one."
                )
    for x in leaves((call.args, call.kwargs)):
        if not isinstance(x, PLAIN) and holds_tensors(x):
            raise SplitError(
                f"{call.name!r} is given a {type(x).__name__} that holds tensors, which cannot travel "
                "between stages. Pass the tensors themselves; for a cache of keys and values, "
                "use_cache=False."
            )


# ---- what Python's control flow reads of a batch: answers that other batches must give, too

Guards = tuple[ProgramBody, list[Any]]


def same(a: Any, b: Any) -> bool:
    """Whether two answers are one."""
    if isinstance(a, torch.Tensor) or hasattr(a, "dtype"):
        return bool((torch.as_tensor(a) == torch.as_tensor(b)).all())
    return bool(a == b)


def parted(one: Guards | None, other: Guards | None, among: Collection[int]) -> bool:
    """Whether the first answers that differ hang on some of the batch's tensors alone, by their numbers."""
    for (own, a), (its, b) in zip(_answers_of(one, among), _answers_of(other, among), strict=False):
        if not same(a, b):
            return own and its
    return False


def _answers_of(guards: Guards | None, among: Collection[int]) -> Iterator[tuple[bool, Any]]:
    """What was read, in order, and whether it hangs on some of the batch's tensors alone."""
    if guards is None:
        return
    body, wanted = guards
    hang = {x.number for x in body.sources if x.kind == "batch" and x.place in among}
    fixed, expected = {x.number for x in body.sources if x.kind == "constant"}, iter(wanted)
    for step in body.steps:
        is_own = not hang.isdisjoint(step.inputs) and (hang | fixed).issuperset(step.inputs)
        hang.update(step.outputs if is_own else ())
        if step.reads:
            yield is_own, next(expected)
