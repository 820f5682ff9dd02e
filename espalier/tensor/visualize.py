"""Which rank holds which box of a tensor, as a table."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from espalier.layout import Layout, local_box
from espalier.layout.layout import V, is_partial
from espalier.tensor.dtensor import DTensor

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
    found: dict[Spans, dict[tuple[int, ...], list[int]]] = {}
    for place, where in enumerate(itertools.product(*map(range, layout.mesh.shape))):
        box = local_box(layout, where)
        if 0 not in box.sizes:
            spans = tuple((o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))
            key = tuple(c for axis, c in enumerate(where) if axis not in layout.partial)
            found.setdefault(spans, {}).setdefault(key, []).append(layout.mesh.ranks[place])
    return {
        box: f"{layout.mesh.device_type}:{_ranks(list(groups.values()))}" for box, groups in found.items()
    }


def _ranks(groups: list[list[int]]) -> str:
    if all(len(group) == 1 for group in groups):
        return _runs([group[0] for group in groups])
    return ",".join("+".join(map(str, group)) for group in groups)


def _runs(ranks: list[int]) -> str:
    """Ranks with runs of three and more as ``first-last``."""
    parts = []
    for _, run in itertools.groupby(enumerate(sorted(ranks)), lambda pair: pair[1] - pair[0]):
        own = [rank for _, rank in run]
        parts += [f"{own[0]}-{own[-1]}"] if len(own) > 2 else list(map(str, own))
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
    widths = [max(len(line[i]) for line in grid) for i in range(len(grid[0]))]
    lines = [
        "  ".join(f"{cell:<{w}}" for cell, w in zip(line, widths, strict=True)).rstrip() for line in grid
    ]
    return [*([table.title] if table.title else []), *(line for line in lines if line)]


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
            told = f"Shard({state})"
        elif is_partial(state):
            told = f"Partial({state}), {n} ranks hold one addend each" if n > 1 else f"Partial({state})"
        else:
            told = type(placement).__name__ + (" (varied)" if state == V else "")
        notes.append(f"{name}: {told}")
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
