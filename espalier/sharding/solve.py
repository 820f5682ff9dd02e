"""From letters to layouts: the one engine that all rules share.

For one mesh axis, a spec allows these signatures:

* all operands replicated, all outputs too;
* for a letter: operands that have it are sharded on that dim, the others replicated; outputs that
  have it are sharded, outputs that lack it are Partial (if the spec says how it is reduced);
* for a group in which the function is linear: those operands Partial, the others replicated,
  outputs Partial.

Where a rule has not decided itself, the cheapest is taken, axis by axis: first by the elements that the
operands' transitions send, then by the fewest new Partials, then by the fewest operands touched. A value
is never sharded without need: a letter is considered only where some operand is sharded on it already; and
where one is, no value stays Partial, for then the work can be shared. Turning a replicated operand into
a Partial is charged as the reduction that it makes necessary later.

Then *defer* is put in: along an axis where any output is sharded or Partial, or any operand is
deferred, each replicated operand must be deferred, or its gradient would miss the other ranks' share.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from espalier.layout import Layout, same_cuts
from espalier.layout.layout import AxisState, D, R, is_partial, state_name
from espalier.mesh import Mesh
from espalier.sharding.spec import DONE, Letter, Operand, Placed, Spec


class Candidate(NamedTuple):
    """What one axis may do: the operands' states, the outputs', and the letter that is cut."""

    ins: tuple[AxisState, ...]
    outs: tuple[AxisState, ...]
    letter: Letter | None


# elements that the operands' transitions send, new Partials, operands touched
Price = tuple[float, int, int]
Options = list[tuple[Price, Candidate]]


def solve(spec: Spec, operands: list[Operand], mesh: Mesh) -> Placed | None:
    """The layouts to bring the operands to, and those of the outputs.

    Returns:
        None if an operand that is written in place cannot keep its layout.
    """
    options = weigh(spec, operands, mesh)
    return None if options is None else place(spec, operands, options, mesh)


def weigh(spec: Spec, operands: list[Operand], mesh: Mesh) -> list[Options] | None:
    """For each axis what it may do and at which price, cheapest first; an axis' choice is its first.

    Returns:
        None if an operand that is written in place cannot keep its layout.
    """
    operands = _read(spec, operands, mesh)
    cuts: dict[Letter, list[int]] = {}
    weighed: list[Options] = []
    for axis in range(mesh.ndim):
        options = [
            (_price(spec, candidate, operands, axis, mesh), candidate)
            for candidate in _candidates(spec, operands, axis, cuts, mesh)
            if _keeps(spec, candidate, operands, axis)
        ]
        if not options:
            return None
        options.sort(key=lambda option: option[0])
        weighed.append(options)
        letter = options[0][1].letter
        if letter is not None:
            cuts.setdefault(letter, []).append(axis)
    return weighed


def _read(spec: Spec, operands: list[Operand], mesh: Mesh) -> list[Operand]:
    """The operands; in the place of unread ones some that ask for nothing."""
    if not spec.unread:
        return operands
    return [
        Operand(o.index, Layout.replicated(mesh, o.shape), o.dtype, o.path) if i in spec.unread else o
        for i, o in enumerate(operands)
    ]


def _candidates(
    spec: Spec, operands: list[Operand], axis: int, cuts: dict[Letter, list[int]], mesh: Mesh
) -> Iterator[Candidate]:
    if axis in spec.decided:
        yield Candidate(*spec.decided[axis])
        return
    states = [o.layout.axes[axis] for o in operands]
    replicated: tuple[AxisState, ...] = (R,) * len(operands)
    yield Candidate(replicated, (R,) * len(spec.outs), None)
    if any(isinstance(s, int) for s in states):
        tried: set[Letter] = set()
        for dims, state in zip(spec.ins, states, strict=True):
            letter = dims[state] if isinstance(state, int) else None
            if letter is None or letter in tried or letter in spec.blocked:
                continue
            tried.add(letter)
            if _fits(spec, letter, cuts, axis, mesh):
                candidate = _sharded(spec, letter)
                if candidate is not None:
                    yield candidate
    ops = {s for s in states if is_partial(s)}
    # where a shard could share the work no value stays Partial, unless it is written to
    stays = spec.inplace is not None and states[spec.inplace] in ops
    if len(ops) == 1 and ops <= {"sum", "avg"} and (stays or not any(isinstance(s, int) for s in states)):
        op = ops.pop()
        for group in spec.linear:
            if any(states[i] == op for i in group):
                ins = tuple(op if i in group else R for i in range(len(operands)))
                yield Candidate(ins, (op,) * len(spec.outs), None)
    for k, (ways_in, ways_out) in enumerate(spec.ways):
        if any(s == t and s != R for s, t in zip(states, ways_in, strict=True)):
            yield Candidate(ways_in, ways_out, ("way", k))


def _fits(spec: Spec, letter: Letter, cuts: dict[Letter, list[int]], axis: int, mesh: Mesh) -> bool:
    sizes = tuple(mesh.shape[a] for a in (*cuts.get(letter, ()), axis))
    return all(same_cuts(size, factor, sizes) for size, factor in spec.factors.get(letter, ()))


def _sharded(spec: Spec, letter: Letter) -> Candidate | None:
    outs: list[AxisState] = []
    contracted = False
    for dims in spec.outs:
        if letter in dims:
            outs.append(dims.index(letter))
        elif letter in spec.reduce:
            op = spec.reduce[letter]
            outs.append(R if op == DONE else op)
            contracted = contracted or op != DONE
        else:
            return None
    ins: list[AxisState] = []
    for i, dims in enumerate(spec.ins):
        if letter in dims:
            ins.append(dims.index(letter))
        else:
            ins.append("sum" if contracted and i in spec.addends else R)
    return Candidate(tuple(ins), tuple(outs), letter)


def _keeps(spec: Spec, candidate: Candidate, operands: list[Operand], axis: int) -> bool:
    """Whether what is written to stays where it is."""
    written = [*spec.buffers, *([] if spec.inplace is None else [spec.inplace])]
    states = [operands[i].layout.axes[axis] for i in written]
    if any(candidate.ins[i] != (R if s == D else s) for i, s in zip(written, states, strict=True)):
        return False
    return spec.inplace is None or candidate.outs[0] == candidate.ins[spec.inplace]


def _price(spec: Spec, candidate: Candidate, operands: list[Operand], axis: int, mesh: Mesh) -> Price:
    n = mesh.shape[axis]
    sent, touched = 2.0 * spec.sends.get(candidate.letter, 0) * (n - 1) / n, 0
    for operand, target in zip(operands, candidate.ins, strict=True):
        elements = sent_for(operand, target, axis, mesh)
        if elements is not None:
            touched += 1
            sent += elements
    for i in spec.passes.get(candidate.letter, ()):
        sent += sent_for(operands[i], R, axis, mesh) or 0
    return sent, sum(is_partial(s) for s in candidate.outs), touched


def sent_for(operand: Operand, target: AxisState, axis: int, mesh: Mesh) -> float | None:
    """Elements sent to bring an operand to a state along an axis; None if it is there."""
    state, n = operand.layout.axes[axis], mesh.shape[axis]
    if state == target or (state == D and target == R):
        return None
    whole = math.prod(operand.layout.padded_shape) * (n if isinstance(state, int) else 1)
    return whole * (n - 1) / n * _rounds(state, target)


def _rounds(state: AxisState, target: AxisState) -> float:
    """Passes over the whole buffer that a transition takes; all-to-all moves one piece of n."""
    if is_partial(state):
        return 1.0 if isinstance(target, int) else 2.0
    if isinstance(state, int):
        return 0.5 if isinstance(target, int) else 2.0 if is_partial(target) else 1.0
    return 2.0 if is_partial(target) else 0.0


def place(spec: Spec, operands: list[Operand], weighed: list[Options], mesh: Mesh) -> Placed:
    """The layouts that follow from each axis' first option."""
    chosen = [options[0][1] for options in weighed]
    before, operands = operands, _read(spec, operands, mesh)
    order = _order(spec, operands, chosen)
    deferred = [
        any(s != R for s in c.outs) or c.letter is not None or any(o.layout.axes[a] == D for o in operands)
        for a, c in enumerate(chosen)
    ]
    if spec.inplace is not None:
        # what is written keeps its layout, so replicated it stays as deferred as it was
        for a, state in enumerate(operands[spec.inplace].layout.axes):
            if state in (R, D):
                deferred[a] = state == D

    def layout(states: list[AxisState], shape: tuple[int, ...]) -> Layout:
        states = [D if s == R and deferred[a] else s for a, s in enumerate(states)]
        dims = [
            tuple(sorted((a for a, s in enumerate(states) if s == d), key=order.index))
            for d in range(len(shape))
        ]
        return Layout.of(mesh, tuple(states), tuple(dims), shape)

    ins = tuple(
        before[i].layout if i in spec.unread else layout([c.ins[i] for c in chosen], o.shape)
        for i, o in enumerate(operands)
    )
    outs = []
    for k, shape in enumerate(spec.shapes):
        states = [c.outs[k] for c in chosen]
        out = layout(states, tuple(shape))
        # what a runner reduced itself is replicated in every sense
        done = tuple(
            R if s == D and c.letter is not None else s for s, c in zip(out.axes, chosen, strict=True)
        )
        outs.append(Layout.of(mesh, done, out.cuts, out.shape))
    return Placed(mesh, ins, tuple(outs))


def _order(spec: Spec, operands: list[Operand], chosen: list[Candidate]) -> list[int]:
    """The axes in cutting order: as an operand has it that is cut by all of a letter's axes.

    What is written to has the first word, for its layout stays.
    """
    cuts: dict[Letter, list[int]] = {}
    for axis, candidate in enumerate(chosen):
        if candidate.letter is not None:
            cuts.setdefault(candidate.letter, []).append(axis)
    order = list(range(len(chosen)))
    pairs = list(zip(operands, spec.ins, strict=True))
    for i in (*spec.buffers, *([] if spec.inplace is None else [spec.inplace])):
        pairs.insert(0, (operands[i], spec.ins[i]))
    for letter, axes in cuts.items():
        for operand, dims in pairs:
            if len(axes) > 1 and letter in dims:
                cut = [a for a in operand.layout.cuts[dims.index(letter)] if a in axes]
                if len(cut) == len(axes):
                    slots = sorted(axes)
                    for slot, axis in zip(slots, cut, strict=True):
                        order[slot] = axis
                    break
    if spec.ways:
        _keep_order(operands[0].layout, chosen, order)
    return order


def _keep_order(layout: Layout, chosen: list[Candidate], order: list[int]) -> None:
    """Let axes that come to cut one dim of the output do so as they cut the first operand: outer dims first.

    So of dims that are merged, those of the outer one need not be exchanged.
    """
    cut: dict[int, list[tuple[int, int, int]]] = {}
    for axis, candidate in enumerate(chosen):
        to, state = candidate.outs[0], layout.axes[axis]
        if isinstance(to, int) and isinstance(state, int):
            cut.setdefault(to, []).append((state, layout.cuts[state].index(axis), axis))
    for places in cut.values():
        slots = sorted(order.index(axis) for *_, axis in places)
        for slot, (*_, axis) in zip(slots, sorted(places), strict=True):
            order[slot] = axis


# ---- why a call's tensors are placed as they are: the solver's options in words


class Option(NamedTuple):
    """What one axis could do: the inputs' and the outputs' states, and the bytes sent to get there.

    The bytes are an estimate for each axis by itself; what is sent in the end goes by the cheapest route.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    bytes: int

    def __str__(self) -> str:
        if all(s == R for s in (*self.inputs, *self.outputs)):
            return f"all replicated: {self.bytes:,} B"
        return f"{', '.join(self.inputs)} => {', '.join(self.outputs)}: {self.bytes:,} B"


class Choice(NamedTuple):
    """The options of one axis, the one taken first, and the reason in words (empty: nothing to say)."""

    axis: str
    options: tuple[Option, ...]
    told: str

    @property
    def makes_partial(self) -> bool:
        """Whether the option taken leaves a reduction to be done that no input had."""
        taken = self.options[0]
        return any(s.startswith("P") and s not in taken.inputs for s in taken.outputs)

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return {"axis": self.axis, "options": [o._asdict() for o in self.options], "told": self.told}


def choices(spec: Spec, operands: list[Operand], mesh: Mesh) -> tuple[Placed, list[Choice]] | None:
    """What the solver places, and for each axis of size > 1 what it had to choose from."""
    weighed = weigh(spec, operands, mesh)
    if weighed is None:
        return None
    per_axis = []
    for axis, options in enumerate(weighed):
        if mesh.shape[axis] > 1:
            shown = tuple(_option(candidate, operands, axis, mesh) for _, candidate in options)
            reason = _reason(spec, operands, axis, options, shown)
            per_axis.append(Choice(mesh.names[axis], shown, reason))
    return place(spec, operands, weighed, mesh), per_axis


def _option(candidate: Candidate, operands: list[Operand], axis: int, mesh: Mesh) -> Option:
    sent = sum(
        (sent_for(o, s, axis, mesh) or 0) * o.dtype.itemsize
        for o, s in zip(operands, candidate.ins, strict=True)
    )
    return Option(tuple(map(state_name, candidate.ins)), tuple(map(state_name, candidate.outs)), round(sent))


def _reason(
    spec: Spec, operands: list[Operand], axis: int, options: Options, shown: tuple[Option, ...]
) -> str:
    (price, _), *others = options
    parts = _excluded(spec, operands, axis, [candidate for _, candidate in options])
    if others:
        nearest = others[0][0]
        if price[0] < nearest[0]:
            why = "sends least"
        elif price[1] < nearest[1]:
            why = "sends as little and leaves less Partial"
        elif price[2] < nearest[2]:
            why = "sends as little and touches fewer inputs"
        else:
            why = "equals the others"
        parts.insert(0, f"{shown[0]} {why}; or {'; or '.join(map(str, shown[1:]))}")
    return ". ".join(parts)


def _excluded(spec: Spec, operands: list[Operand], axis: int, allowed: list[Candidate]) -> list[str]:
    """Why inputs that no option leaves as they are could not stay so."""
    reasons = []
    taken = allowed[0]
    letters = {candidate.letter for candidate in allowed}
    for i, (operand, target) in enumerate(zip(operands, taken.ins, strict=True)):
        state: AxisState = operand.layout.axes[axis]
        if state == target or state in (R, D) or any(c.ins[i] == state for c in allowed):
            continue
        if is_partial(state):
            if not any(i in group for group in spec.linear):
                reasons.append(f"it is not linear in input {i}, so the {state_name(state)} is reduced first")
            elif any(isinstance(o.layout.axes[axis], int) for o in operands):
                reasons.append(f"input {i} is {state_name(state)}, but another is cut and the work is shared")
            else:
                reasons.append(f"it is not linear in these inputs together, so input {i} is reduced first")
        elif isinstance(state, int):
            letter = spec.ins[i][state]
            if letter is None or letter in spec.blocked:
                reasons.append(f"dim {state} of input {i} must be whole")
            elif letter not in letters:
                reasons.append(f"dim {state} of input {i} cannot be cut here as it is")
    return reasons
