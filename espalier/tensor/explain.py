"""What a program does on its mesh, call by call, and why.

An :class:`Explanation` has a row for each call: where it stands in the user's program, how its
tensors lay and how the rule wanted them, what was sent for that and what the backward pass sends
for it, and for each axis what else the rule would have allowed, at which price.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import get_gradient_edge

from espalier.comm import Collective, Entry
from espalier.layout import Layout, local_box
from espalier.layout.layout import AxisState, D, R, is_partial, state_name
from espalier.mesh import Mesh
from espalier.sharding.solve import Choice, choices
from espalier.tensor.dispatch import ask
from espalier.tensor.dtensor import DTensor, plain
from espalier.tensor.inputs import at
from espalier.tensor.observers import (
    Trail,
    Watcher,
    in_backward,
    library_function,
    module_path,
    site,
    user_frame,
    watching,
)
from espalier.texts import expect, in_columns
from espalier.torch_private import raw
from espalier.trees import nodes_from, tensors_in

_WIDTH = 108


class TensorRow(NamedTuple):
    """A tensor of a call.

    Attributes:
        shape: the global shape.
        states: one per axis, as layouts print them; None for a plain tensor.
        placed: those that the rule brought it to; None if it stayed.
    """

    shape: tuple[int, ...]
    states: tuple[str, ...] | None
    placed: tuple[str, ...] | None = None

    def __str__(self) -> str:
        states = "plain" if self.states is None else " ".join(self.states)
        moved = "" if self.placed is None else f" -> {' '.join(self.placed)}"
        return f"{list(self.shape)} {states}{moved}"


@dataclass
class Row:
    """One call.

    Attributes:
        op: the function's name.
        where: ``file:line`` of the user's program.
        module: the module whose ``forward`` called it, by its name in the outermost one.
        how: ``"rule"``; ``"entered"`` (it has no rule, those that it calls follow); ``"gathered"`` (it
            has none, and ran on whole tensors on every rank); ``"traffic"`` (no call: the library's own).
        phase: ``"forward"``, or ``"backward"`` for what runs there (recomputation, hooks, reductions).
        depth: how many calls it stands in.
        inputs, outputs: its tensors, inputs in the order of the rule's parameters.
        sent: what was sent while it ran.
        sent_backward: what the backward pass sent for it.
        choices: for each axis of size > 1 what the rule allowed, the one taken first.
        notes: what else is to be known.
    """

    op: str
    where: str
    module: str = ""
    how: str = "rule"
    phase: str = "forward"
    depth: int = 0
    inputs: tuple[TensorRow, ...] = ()
    outputs: tuple[TensorRow, ...] = ()
    sent: list[Entry] = field(default_factory=list)
    sent_backward: list[Entry] = field(default_factory=list)
    choices: list[Choice] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def _kind(self) -> Any:
        """Rows of one kind are printed once; layers of a model differ in a number of the module's name."""
        values = dataclasses.asdict(self) | {"module": re.sub(r"\d+", "*", self.module)}
        return repr(values)


class Explanation(Watcher):
    """What was seen; grows while it is being watched.

    Attributes:
        rows: one for each call, in order.
        axes: name to size of the mesh's axes.
        result: what the explained function returned.
    """

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.axes: dict[str, int] = {}
        self.result: Any = None
        self._stack: list[Row] = []
        self._trail: Trail[Row] = Trail()

    # ---- what is printed

    @property
    def totals(self) -> dict[str, dict[str, int]]:
        """Axis to bytes that this rank sent, ``{"forward": ..., "backward": ...}``.

        What crosses several axes at once stands under their names (``"data,tensor"``).
        """
        total: dict[str, Counter[str]] = {axis: Counter(forward=0, backward=0) for axis in self.axes}
        for row in self.rows:
            for phase, events in ((row.phase, row.sent), ("backward", row.sent_backward)):
                for event in events:
                    total.setdefault(event.axis, Counter(forward=0, backward=0))[phase] += event.bytes
        return {axis: dict(phases) for axis, phases in total.items()}

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain data, for ``json.dump``."""
        rows = [
            dataclasses.asdict(row)
            | {
                "inputs": [x._asdict() for x in row.inputs],
                "outputs": [x._asdict() for x in row.outputs],
                "sent": [x._asdict() for x in row.sent],
                "sent_backward": [x._asdict() for x in row.sent_backward],
                "choices": [choice.to_dict() for choice in row.choices],
            }
            for row in self.rows
        ]
        return {"axes": self.axes, "totals": self.totals, "rows": rows}

    def __str__(self) -> str:
        axes = " × ".join(f"{name} {n}" for name, n in self.axes.items()) or "no mesh was met"
        lines = [f"{axes}: states below are in this order"]
        times: Counter[str] = Counter(row._kind() for row in self.rows)
        for row in self.rows:
            n = times.pop(row._kind(), 0)
            if n:
                lines += ["", *_shown(row, n)]
        totals = [["axis".ljust(12), "bytes sent forward", "backward".rjust(18)]]
        totals += [[axis, *(f"{n:,}" for n in phases.values())] for axis, phases in self.totals.items()]
        return "\n".join([*lines, "", *in_columns(totals, "<>")])

    def __repr__(self) -> str:
        return f"Explanation({len(self.rows)} rows)"

    # ---- what is seen

    def around(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], go: Callable[[], Any]) -> Any:
        """A row for a call, unless it gives no tensor and sends nothing."""
        row = self._row(_name(func))
        row.inputs = tuple(_tensor(x) for x in tensors_in((args, kwargs)))
        with raw():
            details = _details(func, args, kwargs)
        place = len(self.rows)
        self.rows.append(row)
        self._stack.append(row)
        try:
            with self._trail.made_by(row):
                out = go()
        finally:
            self._stack.pop()
        results = [x for x in tensors_in(out) if type(x) is DTensor]
        row.outputs = tuple(_tensor(x) for x in results)
        for x in results[:1]:
            self._met(x._layout.mesh)
        if details is not None:
            row.inputs, row.choices, row.notes = details
        elif len(self.rows) > place + 1 and row.op != "backward":
            row.how = "entered"
        elif row.sent:
            row.how = "gathered"
        if not results and not row.sent and len(self.rows) == place + 1:
            self.rows.pop()
        return out

    def saw(self, event: Collective) -> None:
        """A collective: of the call that runs, or of the one whose backward runs."""
        self._met(event.mesh)
        sent = Entry(event.op, event.where, event.sent)
        owner = self._trail.here() if in_backward() else None
        if owner is not None and not (self._stack and self._stack[-1].phase == "backward"):
            owner.sent_backward.append(sent)
            return
        if self._stack and (self._stack[-1].phase == "backward" or not in_backward()):
            self._stack[-1].sent.append(sent)
            return
        row = self._row(library_function())
        row.how = "traffic"
        last = self.rows[-1] if self.rows else None
        if last is None or (last.how, last.op, last.where) != (row.how, row.op, row.where):
            self.rows.append(row)
            last = row
        last.sent.append(sent)

    def _row(self, op: str) -> Row:
        phase = "backward" if in_backward() else "forward"
        return Row(op, site(user_frame()[1]), module_path(), phase=phase, depth=len(self._stack))

    def _met(self, mesh: Mesh) -> None:
        if not self.axes:
            self.axes = dict(zip(mesh.names, mesh.shape, strict=True))


@contextmanager
def explaining() -> Iterator[Explanation]:
    """Explain all calls of DTensors in a stretch of program: the explanation grows meanwhile.

    >>> with espalier.explaining() as seen:            # doctest: +SKIP
    ...     engine.train_step(batch)
    >>> print(seen)                                    # doctest: +SKIP
    """
    seen = Explanation()
    with watching(seen):
        yield seen


def explain(fn: Callable[..., Any], *inputs: Any, backward: bool = True, **kwargs: Any) -> Explanation:
    """Run a function and tell what its calls did on the mesh, what that sent, and why.

    Collective wherever the function is; each rank gets its own explanation, of what itself sent. On a
    dry mesh nothing is computed, so a plan for any number of ranks can be explained on one machine.

    Args:
        fn: a model, a layer, a loss, ``engine.train_step``, ...; called once with the other arguments.
        backward: then run the backward pass from all results that need gradients (from ones; no
            ``.grad`` is changed), to tell what it sends.
    """
    with explaining() as seen:
        seen.result = fn(*inputs, **kwargs)
        if backward:
            _backward(seen.result)
    return seen


def _backward(result: Any) -> None:
    with raw():
        if not isinstance(result, torch.Tensor | tuple | list | dict):
            result = getattr(result, "__dict__", None)  # a model's output of a class of its own
        ends = [plain(x) for x in tensors_in(result) if x.requires_grad and x.is_floating_point()]
        ends = [x for x in ends if x.grad_fn is not None]
        leaves = [get_gradient_edge(x) for x in _accumulated([x.grad_fn for x in ends])]
        ones = [torch.ones_like(x) for x in ends]
    if leaves:
        # intercepted again: hooks and recomputation see DTensors
        torch.autograd.grad(ends, leaves, ones, allow_unused=True)


def _accumulated(nodes: list[Any]) -> list[torch.Tensor]:
    """The leaves that a graph reaches."""
    leaves = {id(node.variable): node.variable for node in nodes_from(nodes) if hasattr(node, "variable")}
    return list(leaves.values())


def _details(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[TensorRow, ...], list[Choice], list[str]] | None:
    """How a rule places a call's inputs, and why; None if none does."""
    asked = ask(func, args, kwargs)
    if asked is None:
        return None
    spec, operands, mesh = asked
    solved = choices(spec, operands, mesh)
    if solved is None:
        return None
    placed, per_axis = solved
    inputs, notes = [], []
    for i, (operand, dst) in enumerate(zip(operands, placed.ins, strict=True)):
        src = operand.layout
        moved = None if src is dst or i == spec.inplace else _states(dst)
        inputs.append(TensorRow(tuple(src.shape), _states(src), moved))
        deferred = [name for name, n, s, t in _axes(mesh, src, dst) if n > 1 and s == R and t == D]
        if deferred and moved and torch.is_grad_enabled() and at(args, kwargs, operand.path).requires_grad:
            notes.append(
                f"defer: input {i} is replicated along {' and '.join(deferred)}, the result is not, so its "
                "gradient will be all-reduced"
            )
    if spec.inplace is not None:
        notes.append(f"input {spec.inplace} is written in place, so its layout stays")
    return tuple(inputs), per_axis, notes


def _axes(mesh: Mesh, src: Layout, dst: Layout) -> Iterator[tuple[str, int, AxisState, AxisState]]:
    return zip(mesh.names, mesh.shape, src.axes, dst.axes, strict=True)


def _tensor(x: torch.Tensor) -> TensorRow:
    if type(x) is DTensor:
        return TensorRow(tuple(x._layout.shape), _states(x._layout))
    with raw():
        return TensorRow(tuple(x.shape), None)


def _states(layout: Layout) -> tuple[str, ...]:
    return tuple(state_name(s) for s in layout.axes)


def _name(func: Any) -> str:
    name = getattr(func, "__name__", None) or str(func)
    if name in ("__get__", "__set__"):
        owner = getattr(getattr(func, "__self__", None), "__name__", "")
        return owner or name
    return name


def _shown(row: Row, times: int) -> list[str]:
    """A row in print."""
    module = row.module if times == 1 else re.sub(r"\d+", "*", row.module)
    where = row.where if len(row.where) < 60 else "/".join(row.where.split(os.sep)[-2:])
    parts = [*([module] if module else []), where]
    parts += [f"{times} times"] if times > 1 else []
    parts += ["in the backward pass"] if row.phase == "backward" else []
    how = {"rule": "", "entered": " (entered)", "gathered": " (no rule: gathered)", "traffic": " (traffic)"}
    indent = "  " * row.depth
    lines = [f"{row.op + how[row.how]:<28} {', '.join(parts)}"]
    for word, tensors in (("in ", row.inputs), ("out", row.outputs)):
        if tensors:
            lines += _wrapped(f"  {word}  ", [str(x) for x in _cut(tensors)], "   ")
    for word, events in (("sends", row.sent), ("backward sends", row.sent_backward)):
        if events:
            lines += _wrapped(f"  {word} ", _summed(events), ", ")
    moved = bool(row.sent) or any(x.placed is not None for x in row.inputs)
    for choice in row.choices:
        # that a value which lies well stays where it is goes without saying
        if choice.told and (moved or choice.makes_partial):
            lines += _wrapped(f"  {choice.axis}: ", [choice.told], "")
    for note in row.notes:
        lines += _wrapped("  ", [note], "")
    return [indent + line for line in lines]


def _cut(tensors: tuple[TensorRow, ...]) -> list[Any]:
    return [*tensors[:6], f"and {len(tensors) - 6} more"] if len(tensors) > 7 else list(tensors)


def _summed(events: list[Entry]) -> list[str]:
    total: dict[tuple[str, str], list[int]] = {}
    for op, axis, sent in events:
        total.setdefault((op, axis), []).append(sent)
    return [
        f"{op} along {axis}{f' {len(sent)} times' if len(sent) > 1 else ''} ({sum(sent):,} B)"
        for (op, axis), sent in total.items()
    ]


def _wrapped(head: str, parts: list[str], between: str) -> list[str]:
    # a part is broken only if it alone is too long
    joined = between.join(part.replace(" ", "\0") if len(part) < 80 else part for part in parts)
    width, inset = _WIDTH, " " * len(head)
    return [
        line.replace("\0", " ")
        for line in textwrap.wrap(joined, width, initial_indent=head, subsequent_indent=inset)
    ]


# ---- which rank holds which box of a tensor, as a table


Span = tuple[int, int]
Spans = tuple[Span, ...]

# 256-colour codes with a light foreground and a dark one in turn
_COLOURS = (24, 130, 29, 89, 60, 94, 66, 53, 31, 136, 35, 125, 61, 100, 67, 54)


class _Table(NamedTuple):
    """One table: its title, the spans of its rows and columns, and who holds each cell."""

    title: str
    rows: list[Span]
    columns: list[Span]
    cells: dict[tuple[Span, Span], str]


def visualize_sharding(dtensor: DTensor | Layout, header: str = "", use_rich: bool = False) -> None:
    """Print which rank holds which box of a tensor; no collective.

    As torch's function of this name it prints on the first rank of the mesh alone, so all ranks may call
    it. Any number of dims: a table has the first two dims that are cut (of up to two dims, these), there
    is one table for each piece of the others. Ranks with a comma between them hold the same, those with
    a plus hold addends.

    Args:
        dtensor: a DTensor, or a layout alone, on a dry mesh too.
        header: printed above.
        use_rich: in colour, one for each box, where the terminal has colours.
    """
    expect("visualize_sharding: what is shown", dtensor, (DTensor, Layout), "a DTensor, or a Layout")
    layout = dtensor if isinstance(dtensor, Layout) else dtensor._layout
    if not layout.mesh.is_member or (layout.mesh.rank and not layout.mesh.is_dry):
        return
    if use_rich:
        _print_rich(layout, header)
        return
    lines = [*([header] if header else []), _title(layout)]
    for table in _tables(layout):
        lines += ["", *_text(table, layout)]
    print("\n".join([*lines, "", *_notes(layout)]))


def _tables(layout: Layout) -> Iterator[_Table]:
    boxes = _holders(layout)
    if not boxes:
        return
    ndim = len(layout.shape)
    cut = [d for d in range(ndim) if len({box[d] for box in boxes}) > 1]
    shown = list(range(ndim)) if ndim <= 2 else sorted([*cut, *(d for d in range(ndim) if d not in cut)][:2])
    others = [d for d in range(ndim) if d not in shown]
    pieces = [sorted({box[d] for box in boxes}) for d in others]
    for piece in itertools.product(*pieces):
        here = {
            box: who
            for box, who in boxes.items()
            if all(box[d] == p for d, p in zip(others, piece, strict=True))
        }
        keys = {box: _cell(box, shown) for box in here}
        title = ", ".join(_named(d, p) for d, p in zip(others, piece, strict=True))
        rows, columns = (sorted({key[i] for key in keys.values()}) for i in (0, 1))
        yield _Table(title, rows, columns, {keys[box]: who for box, who in here.items()})


def _cell(box: Spans, shown: Sequence[int]) -> tuple[Span, Span]:
    spans = [box[d] for d in shown] + [(0, 1)] * 2
    return spans[0], spans[1]


def _holders(layout: Layout) -> dict[Spans, str]:
    """Each box that is not empty, and in words the ranks that hold it."""
    holders: dict[Spans, dict[tuple[int, ...], list[int]]] = {}
    for place, where in enumerate(itertools.product(*map(range, layout.mesh.shape))):
        box = local_box(layout, where)
        if 0 not in box.sizes:
            spans = tuple((o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))
            key = tuple(c for axis, c in enumerate(where) if axis not in layout.partial)
            holders.setdefault(spans, {}).setdefault(key, []).append(layout.mesh.ranks[place])
    return {
        box: f"{layout.mesh.device_type}:{_ranks(list(groups.values()))}" for box, groups in holders.items()
    }


def _ranks(groups: list[list[int]]) -> str:
    if all(len(group) == 1 for group in groups):
        return _runs([group[0] for group in groups])
    return ",".join("+".join(map(str, group)) for group in groups)


def _runs(ranks: list[int]) -> str:
    """Ranks with runs of three and more as ``first-last``."""
    parts = []
    for _, run in itertools.groupby(enumerate(sorted(ranks)), lambda pair: pair[1] - pair[0]):
        run_ranks = [rank for _, rank in run]
        parts += [f"{run_ranks[0]}-{run_ranks[-1]}"] if len(run_ranks) > 2 else list(map(str, run_ranks))
    return ",".join(parts)


def _named(dim: int, span: Span) -> str:
    return f"dim {dim}: {span[0]}" if span[1] == span[0] + 1 else f"dim {dim}: {span[0]}-{span[1] - 1}"


def _headings(table: _Table, layout: Layout) -> tuple[list[str], list[str]]:
    """The names of the rows and of the columns; empty where there is no such dim."""
    titled = {int(part.split()[1].rstrip(":")) for part in table.title.split(", ") if part}
    dims = [d for d in range(len(layout.shape)) if d not in titled]
    rows = [_named(dims[0], span) for span in table.rows] if dims else [""]
    columns = [_named(dims[1], span) for span in table.columns] if len(dims) > 1 else [""]
    return rows, columns


def _text(table: _Table, layout: Layout) -> list[str]:
    rows, columns = _headings(table, layout)
    cells = [[table.cells.get((r, c), "") for c in table.columns] for r in table.rows]
    grid = [["", *columns], *([name, *line] for name, line in zip(rows, cells, strict=True))]
    return [*([table.title] if table.title else []), *filter(None, in_columns(grid, "<"))]


def _title(layout: Layout) -> str:
    mesh = layout.mesh
    axes = " × ".join(f"{name} {n}" for name, n in zip(mesh.names, mesh.shape, strict=True))
    return f"{list(layout.shape)} on {axes}" + (": no elements" if 0 in layout.shape else "")


def _notes(layout: Layout) -> list[str]:
    """What each axis does, and who holds nothing."""
    notes = []
    for name, n, state, placement in zip(
        layout.mesh.names, layout.mesh.shape, layout.axes, layout.placements, strict=True
    ):
        if isinstance(state, int):
            note = f"Shard({state})"
        elif is_partial(state):
            note = f"Partial({state}), {n} ranks hold one addend each" if n > 1 else f"Partial({state})"
        else:
            note = type(placement).__name__ + (" (deferred)" if state == D else "")
        notes.append(f"{name}: {note}")
    orders = [cut for cut in layout.cuts if list(cut) != sorted(cut)]
    notes += ["cut " + ", then ".join(layout.mesh.names[a] for a in cut) for cut in orders]
    places = zip(layout.mesh.ranks, itertools.product(*map(range, layout.mesh.shape)), strict=True)
    empty = [rank for rank, where in places if 0 in local_box(layout, where).sizes]
    if empty and 0 not in layout.shape:
        notes.append(f"nothing is held by {layout.mesh.device_type}:{_runs(empty)}")
    return notes


def _print_rich(layout: Layout, header: str) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    colours = itertools.cycle(_COLOURS)
    console.print(Text("\n".join([*([header] if header else []), _title(layout)])))
    for table in _tables(layout):
        rows, columns = _headings(table, layout)
        drawn = Table(title=table.title or None, title_justify="left", show_header=any(columns))
        for heading in ("", *columns):
            drawn.add_column(heading)
        for name, r in zip(rows, table.rows, strict=True):
            who = [table.cells.get((r, c), "") for c in table.columns]
            drawn.add_row(name, *(Text(w, style=f"white on color({next(colours)})") for w in who))
        console.print(drawn)
    console.print(Text("\n".join(_notes(layout))))
