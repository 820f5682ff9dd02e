"""Why a call's tensors are placed as they are: the solver's options in words."""

from __future__ import annotations

from typing import Any, NamedTuple

from espalier.layout.layout import AxisState, R, V, is_partial, state_name
from espalier.mesh import Mesh
from espalier.tensor.rules.solve import Candidate, Options, place, sent_for, weigh
from espalier.tensor.rules.spec import Operand, Placed, Spec


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
    found = []
    for axis, options in enumerate(weighed):
        if mesh.shape[axis] > 1:
            shown = tuple(_option(candidate, operands, axis, mesh) for _, candidate in options)
            told = _reason(spec, operands, axis, options, shown)
            found.append(Choice(mesh.names[axis], shown, told))
    return place(spec, operands, weighed, mesh), found


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
    told = []
    taken = allowed[0]
    letters = {candidate.letter for candidate in allowed}
    for i, (operand, target) in enumerate(zip(operands, taken.ins, strict=True)):
        state: AxisState = operand.layout.axes[axis]
        if state == target or state in (R, V) or any(c.ins[i] == state for c in allowed):
            continue
        if is_partial(state):
            if not any(i in group for group in spec.linear):
                told.append(f"it is not linear in input {i}, so the {state_name(state)} is reduced first")
            elif any(isinstance(o.layout.axes[axis], int) for o in operands):
                told.append(f"input {i} is {state_name(state)}, but another is cut and the work is shared")
            else:
                told.append(f"it is not linear in these inputs together, so input {i} is reduced first")
        elif isinstance(state, int):
            letter = spec.ins[i][state]
            if letter is None or letter in spec.blocked:
                told.append(f"dim {state} of input {i} must be whole")
            elif letter not in letters:
                told.append(f"dim {state} of input {i} cannot be cut here as it is")
    return told
