"""From a trace and the places where stages begin to the programs of the stages."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from espalier.parallel.pipeline.record import Call, Op, SplitError, Trace
from espalier.parallel.pipeline.refusals import refuse_lost
from espalier.parallel.pipeline.standing import Standing, name_of
from espalier.parallel.pipeline.steps import Body, Source, Step, Unit
from espalier.parallel.pipeline.trees import Ref, leaves


class Value(NamedTuple):
    """A tensor that travels from a stage to the next one.

    Attributes:
        name: the module or function that made it.
        shape: of the global tensor.
        dtype: its dtype.
        made: the stage that made it (or changed it last).
        used: the last stage that uses it.
        grad: whether a gradient comes back.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    made: int
    used: int
    grad: bool


class Divided:
    """A trace, divided at operations.

    Args:
        trace: the trace.
        bounds: numbers of the operations with which the second stage and the next ones begin.
        model: the model.
        standing: how its author made it.
    """

    def __init__(self, trace: Trace, bounds: Sequence[int], model: nn.Module, standing: Standing) -> None:
        self.trace, self.bounds, self.number = trace, list(bounds), len(bounds) + 1
        self._modules = dict(model.named_modules())
        every = *model.named_parameters(), *model.named_buffers()
        self._canonical = {id(x): name for name, x in every}
        # storages that hold what is not local, at any time
        self._bound = trace.bound.keys() | {
            v.storage for v in trace.values if not v.local and v.source[0] != "parameter"
        }
        self._standing = standing
        self._opened: set[int] = set()
        while True:
            self.units = self._units()
            self._of_op: dict[int, Unit] = {i: u for u in self.units for i in range(u.start, u.end)}
            self._find_uses()
            if not self._open_leaks():
                break
        refuse_lost(trace, self.bounds, self.units, self._modules, standing)
        self._refuse_shared_values()
        self._refuse_shared_state()

    # ---- units

    def _units(self) -> list[Unit]:
        found: list[Unit] = []
        i = 0
        while i < len(self.trace.ops):
            call = next((c for c in self.trace.chain(i) if self._whole(c)), None)
            found.append(Unit(i, i + 1, None) if call is None else Unit(call.start, call.end, call))
            i = found[-1].end
        return found

    def _whole(self, call: Call) -> bool:
        """Whether a module lies in one stage, and is to be called there."""
        if call.number in self._opened or any(call.start < b < call.end for b in self.bounds):
            return False
        inner = self.trace.ops[call.start : call.end]
        if call.name in self.trace.containers and any(op.read for op in inner) and not self._loses(call):
            return False  # what it reads is known where the program is chosen
        return any(not self._is_local(op) for op in inner)

    def _loses(self, call: Call) -> bool:
        return call.name in self.trace.changed or self._standing.hooked(self._modules[call.name])

    def _refuse_shared_values(self) -> None:
        sources = {v.storage: v.source for v in self.trace.values if v.source[0] in ("parameter", "buffer")}
        written: dict[str, tuple[str, int]] = {}
        for unit in self.units:
            for s in self._changes(unit) & sources.keys():
                kind, name = sources[s]
                written[name] = kind, self.stage(unit.start)
        for unit in self.units:
            for name in self._uses(unit) & written.keys():
                kind, stage = written[name]
                if self.stage(unit.start) != stage:
                    raise SplitError(
                        f"The {kind} {name!r} is written to in stage {stage} and used in stage "
                        f"{self.stage(unit.start)} too, which would not see it. Give cuts such that one "
                        "stage has all its uses."
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
        rolling = set().union(*(called.get(name, set()) for name in self.trace.dice))
        if len(rolling) > 1:
            raise SplitError(
                f"{', '.join(map(repr, sorted(self.trace.dice)))} draw random numbers from Python's or "
                f"NumPy's generator in the stages {sorted(rolling)}, of which each would draw the same. Draw "
                "them with torch (torch.rand), or give cuts such that one stage has all of them."
            )
        self.dice = next(iter(rolling), None)

    def _changes(self, unit: Unit) -> set[int]:
        return {s for op in self.trace.ops[unit.start : unit.end] for s in op.writes}

    def _is_local(self, op: Op) -> bool:
        values = self.trace.values
        kept = op.writes.union(values[n].storage for n in op.makes)
        return op.local and not kept & self._bound

    def _on_demand(self, unit: Unit) -> bool:
        return unit.call is None and self._is_local(self.trace.ops[unit.start])

    def stage(self, op: int) -> int:
        """The stage in which an operation is done, if it is not a local one."""
        return bisect_right(self.bounds, op)

    def _reads(self, unit: Unit) -> list[int]:
        if unit.call is None:
            return list(self.trace.ops[unit.start].reads)
        return [r.number for r in leaves((unit.call.args, unit.call.kwargs), Ref)]

    def _gives(self, unit: Unit) -> list[int]:
        """What others can get of a unit."""
        if unit.call is None:
            return list(self.trace.ops[unit.start].makes)
        return [r.number for r in leaves(unit.call.out, Ref) if self._made(r.number, unit)]

    def _made(self, number: int, unit: Unit) -> bool:
        kind, i = self.trace.values[number].source
        return kind == "op" and unit.start <= i < unit.end

    def _writes(self, unit: Unit) -> set[int]:
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
        found: set[str] = set()
        for unit in self.units:
            if self.stage(unit.start) == stage:
                found |= self._uses(unit)
        return found

    def _uses(self, unit: Unit) -> set[str]:
        sources = (
            self.trace.values[n].source for op in self.trace.ops[unit.start : unit.end] for n in op.reads
        )
        found = {name for kind, name in sources if kind in ("parameter", "buffer")}
        if unit.call is not None:
            module = self._modules[unit.call.name]
            every = *module.parameters(), *module.buffers()
            found |= {self._canonical[id(x)] for x in every if id(x) in self._canonical}
        return found

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

    def described(self, number: int, stage: int) -> Value:
        """A value that a stage sends."""
        value = self.trace.values[number]
        unit = self._of_op[value.source[1]]
        op = self.trace.ops[unit.start]
        return Value(
            unit.call.name if unit.call is not None else name_of(op.func),
            tuple(value.tensor.shape),
            value.tensor.dtype,
            max(m for m in self.makers[number] if m <= stage),
            self.last[number],
            value.grad or self.trace.bound.get(value.storage, False),
        )

    # ---- programs

    def body(self, stage: int) -> Body:
        """The steps of a stage."""
        units = [u for u in self.units if self.stage(u.start) == stage and not self._on_demand(u)]
        keep = set(self.crossing(stage)) if stage < self.number - 1 else set()
        if stage == self.number - 1:
            keep |= {r.number for r in leaves(self.trace.out, Ref)}
        end = self.bounds[stage] if stage < len(self.bounds) else len(self.trace.ops)
        received = set(self.crossing(stage - 1)) if stage else set()
        return self._body(units, keep, received, end)

    def guards(self) -> tuple[Body, list[Any]] | None:
        """The steps that read the batch for Python's control flow, and what they read; None if there are "
        "none."""
        found = [Unit(i, i + 1, None) for i, op in enumerate(self.trace.ops) if op.read]
        found = [u for u in found if self._hangs_on_batch(u.start)]
        if not found:
            return None
        return self._body(found, set(), set(), len(self.trace.ops)), [
            self.trace.ops[u.start].out for u in found
        ]

    def _hangs_on_batch(self, op: int) -> bool:
        seen: set[int] = set()
        waiting = [op]
        while waiting:
            for n in self.trace.ops[waiting.pop()].reads:
                kind, at = self.trace.values[n].source
                if kind in ("batch", "buffer"):
                    return True
                if kind == "op" and at not in seen:
                    seen.add(at)
                    waiting.append(at)
        return False

    def _body(self, units: Iterable[Unit], keep: set[int], received: set[int], end: int) -> Body:
        units = list(units)
        given = {n for u in units for n in self._gives(u)} | received
        demanded = {n for u in units for n in self._reads(u)} | keep
        local = self._local_ops(demanded - given, end)
        every = sorted([*units, *(Unit(i, i + 1, None) for i in local)])
        written = {s for u in every for s in self._writes(u)}
        needed = {n for u in every for n in self._reads(u)} | keep
        sources = [self._source(n, written) for n in sorted(needed) if self.trace.values[n].source[0] != "op"]
        self._check_received(received, written)
        steps = [self._step(u) for u in every]
        seen = set(keep)
        for step, unit in zip(reversed(steps), reversed(every), strict=True):
            used = set(self._reads(unit)) | set(self._gives(unit))
            step.free = tuple(used - seen)
            seen |= used
        return Body(sources, steps, self.trace.device)

    def _local_ops(self, demanded: set[int], end: int) -> set[int]:
        """The operations that make local values, and what they need."""
        found: set[int] = set()
        writers: dict[int, list[int]] = {}
        for i, op in enumerate(self.trace.ops[:end]):
            for s in op.writes if op.local else ():
                writers.setdefault(s, []).append(i)
        waiting = list(demanded)
        seen = set(waiting)
        while waiting:
            value = self.trace.values[waiting.pop()]
            made = [value.source[1]] if value.source[0] == "op" else []
            for i in [*made, *writers.get(value.storage, [])]:
                if i not in found:
                    found.add(i)
                    fresh = set(self.trace.ops[i].reads) - seen
                    seen |= fresh
                    waiting.extend(fresh)
        return found

    def _source(self, number: int, written: set[int]) -> Source:
        value = self.trace.values[number]
        kind, place = value.source
        if kind == "batch":
            return Source(number, kind, place, value.storage in written)
        if kind == "constant":
            return Source(number, kind, self.trace.constants[number], False)
        return Source(number, kind, place, False)

    def _check_received(self, received: set[int], written: set[int]) -> None:
        shared: dict[int, int] = {}
        for n in received:
            s = self.trace.values[n].storage
            shared[s] = shared.get(s, 0) + 1
        for s in written & shared.keys():
            if shared[s] > 1:
                raise SplitError(
                    "Two views of one tensor cross into a stage that writes to one of them in place, which "
                    "the other "
                    "would not see. Write x = x + y in place of x += y there, or cut elsewhere."
                )

    def written_in(self, stage: int) -> set[int]:
        """Of the values that a stage receives, those it writes to in place."""
        units = [u for u in self.units if self.stage(u.start) == stage]
        written = {s for u in units for s in self._writes(u)}
        return {n for n in self.crossing(stage - 1) if self.trace.values[n].storage in written}

    def _step(self, unit: Unit) -> Step:
        done: Any = self.trace.ops[unit.start] if unit.call is None else unit.call
        func = done.func if unit.call is None else unit.call.name
        state = None if done.state == self.trace.state else done.state
        reads = unit.call is None and done.read
        step = Step(func, name_of(func), done.args, done.kwargs, done.out, state, reads)
        step.answers = self.trace.answered(unit.start, unit.call)
        return step
