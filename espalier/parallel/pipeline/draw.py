"""Timelines as pictures: on a terminal, and as SVG or PNG."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from espalier.parallel.pipeline.actions import Kind
from espalier.parallel.pipeline.check import live
from espalier.parallel.pipeline.simulate import Span, Timeline

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.text import Text

# Face of a rank's stages in turn, dark to light, by kind.
_FACES = {
    Kind.F: ("#2f5d8c", "#7fa8d1", "#1d3f66", "#b3cce6"),
    Kind.B: ("#2a6f4e", "#7fb897", "#174a32", "#b6d9c5"),
    Kind.I: ("#1f7f86", "#8cc7ca", "#125358", "#bfe0e2"),
    Kind.W: ("#c98a1b", "#e6c07a", "#93630e", "#f1dcb2"),
}
# On terminals the same from the 16 colours that all have.
_STYLES = {
    Kind.F: ("white on blue", "black on bright_blue"),
    Kind.B: ("white on green", "black on bright_green"),
    Kind.I: ("white on cyan", "black on bright_cyan"),
    Kind.W: ("black on yellow", "black on bright_yellow"),
}
_NAMES = {Kind.F: "forward", Kind.B: "backward", Kind.I: "backward, of inputs", Kind.W: "of weights"}
_INK, _FAINT, _IDLE = "#22302a", "#8b968f", "#eef1ef"


def _look(looks: Mapping[Kind, Sequence[str]], timeline: Timeline, span: Span) -> str:
    """Of a table of looks, that of a span."""
    kind, stage, _ = span.action
    schedule = timeline.schedule
    its = looks[kind]
    return its[schedule.stages_of(schedule.rank_of(stage)).index(stage) % len(its)]


def _on(face: str) -> str:
    """A colour to write with on a face."""
    light = sum(int(face[at : at + 2], 16) for at in (1, 3, 5)) > 380
    return _INK if light else "#ffffff"


def terminal(timeline: Timeline, width: int, *, colours: bool = True) -> list[Text]:
    """One line a rank, a cell an action, as wide as it took, its micro-batch in it where that fits.

    Args:
        timeline: predicted or measured.
        width: characters of a line; the drawing takes no more than it needs for all numbers.
        colours: False for a terminal that has none: cells then say ``F0``, ``B0``.
    """
    from rich.text import Text

    spans = [span for row in timeline.spans for span in row]
    names = [f"rank {rank:>{len(str(len(timeline.spans) - 1))}} " for rank in range(len(timeline.spans))]
    shortest = min((span.end - span.start for span in spans if span.end > span.start), default=1.0)
    label = len(str(timeline.schedule.micro_batches - 1)) + (0 if colours else 1)
    room = max(10, width - len(names[0]))
    fits = room * shortest / timeline.step_time if timeline.step_time else 1.0
    # cells of one width where there is room for all numbers
    scale = (min(label + 1, int(fits)) if fits >= label else fits) / shortest
    lines = []
    for name, row in zip(names, timeline.spans, strict=True):
        line, at = Text(name), 0
        for span in row:
            start, end = (min(room, round(time * scale)) for time in (span.start, span.end))
            line.append(" " * (start - at))
            number = f"{'' if colours else span.action.kind}{span.action.micro_batch}"
            cell = f"{number if len(number) <= end - start else '':<{end - start}}"
            line.append(cell, style=_look(_STYLES, timeline, span) if colours else "")
            at = max(at, end)
        lines.append(line)
    if colours:
        legend = Text(" " * len(names[0]))
        for kind in _kinds([timeline]):
            legend.append("  ", style=_STYLES[kind][0]).append(f" {_NAMES[kind]}   ")
        if timeline.schedule.stages > timeline.schedule.ranks:
            legend.append("  ", style=_STYLES[Kind.F][1]).append(" lighter: a rank's second stage")
        lines.append(legend)
    return lines


def _kinds(timelines: Iterable[Timeline]) -> list[Kind]:
    """The kinds of actions that there are."""
    found = {span.action.kind for timeline in timelines for row in timeline.spans for span in row}
    return [kind for kind in _FACES if kind in found]


def figure(timelines: Mapping[str, Timeline], columns: int = 1) -> Figure:
    """A picture of timelines, one below the other on one scale, each with its title.

    Args:
        timelines: by title; predicted and measured ones, or several schedules.
        columns: beside each other.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    ranks = max(len(timeline.spans) for timeline in timelines.values())
    rows = -(-len(timelines) // columns)
    drawn = Figure(
        figsize=(9.6 * columns, rows * (0.75 + 0.34 * ranks) + 0.5), layout="constrained", facecolor="#ffffff"
    )
    grid = drawn.subplots(rows, columns, squeeze=False, sharex=True)
    longest = max(timeline.step_time for timeline in timelines.values())
    for axes, (title, timeline) in zip(grid.flat, timelines.items(), strict=False):
        _panel(axes, title, timeline, longest)
    for axes in list(grid.flat)[len(timelines) :]:
        axes.set_visible(False)
    several = any(timeline.schedule.stages > timeline.schedule.ranks for timeline in timelines.values())
    kinds = _kinds(timelines.values())
    patches = [Patch(facecolor=_FACES[kind][0], label=_NAMES[kind]) for kind in kinds]
    if several:
        patches += [Patch(facecolor=_FACES[Kind.F][1], label="lighter: a rank's second stage")]
    drawn.legend(handles=patches, loc="outside lower center", ncols=len(patches), frameon=False, fontsize=9)
    return drawn


def _panel(axes: Any, title: str, timeline: Timeline, longest: float) -> None:
    """One timeline."""
    per_unit = 880 / longest / 7.0  # about as many characters fit a unit of time
    for rank, row in enumerate(timeline.spans):
        axes.barh(rank, timeline.step_time, 0.84, color=_IDLE, linewidth=0)
        faces = [_look(_FACES, timeline, span) for span in row]
        widths = [span.end - span.start for span in row]
        axes.barh(
            [rank] * len(row),
            widths,
            0.84,
            left=[span.start for span in row],
            color=faces,
            edgecolor="#ffffff",
            linewidth=0.5,
        )
        for span, wide, face in zip(row, widths, faces, strict=True):
            label = str(span.action.micro_batch)
            if wide * per_unit >= len(label) + 0.3:
                middle = (span.start + span.end) / 2
                axes.text(middle, rank, label, ha="center", va="center_baseline", size=7.5, color=_on(face))
    axes.set(xlim=(0, longest), ylim=(len(timeline.spans) - 0.4, -0.6))
    axes.set_yticks(
        range(len(timeline.spans)), [f"rank {rank}" for rank in range(len(timeline.spans))], size=8.5
    )
    axes.tick_params(length=0, axis="y")
    axes.tick_params(labelsize=8, colors=_FAINT, axis="x")
    axes.spines[["top", "right", "left", "bottom"]].set_visible(False)
    axes.set_title(title, loc="left", size=10.5, color=_INK, weight="bold")
    axes.set_title(summary(timeline), loc="right", size=9, color=_FAINT)


def summary(timeline: Timeline) -> str:
    """Bubble and live micro-batches in a line."""
    most = max(live(timeline.schedule))
    return f"{timeline.bubble_fraction:.0%} of the time idle, {most:g} live micro-batch{'es' * (most != 1)}"


def draw(path: str | Path, timelines: Mapping[str, Timeline], columns: int = 1) -> None:
    """Write a picture of timelines.

    Args:
        path: ``*.svg`` or ``*.png``.
        timelines, columns: see `figure`.

    Raises:
        ValueError: for another ending.
    """
    path = Path(path)
    if path.suffix not in PICTURES:
        raise ValueError(f"{path}: expected a name that ends in .svg or .png")
    figure(timelines, columns).savefig(path, dpi=150)


PICTURES: Sequence[str] = (".svg", ".png")
