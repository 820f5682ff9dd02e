"""Draw the pictures of the documentation: ``python docs/draw.py`` writes docs/pictures/*.svg.

The same versions give the same bytes. ``--png FOLDER`` writes PNGs there instead, to look at;
``--check`` writes nothing and fails where a picture on disk is not what would be drawn.

What can be taken from the code is taken from it: the shards from layouts, the transitions from
the table in espalier/layout/transitions.py, the house from pyproject.toml's import contract.
"""

from __future__ import annotations

import argparse
import io
import math
import re
import sys
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.patches import Arc, Circle, FancyArrowPatch, FancyBboxPatch, Rectangle

from espalier.layout import TABLE, Layout, Partial, Placement, Replicate, Shard, local_box
from espalier.mesh import Mesh
from espalier.parallel.pipeline import KINDS, Costs, find_schedule, simulate
from espalier.parallel.schedules.simulate import figure as pipeline_figure

HERE = Path(__file__).parent
PICTURES = HERE / "pictures"

INK, FAINT, PAPER = "#22302a", "#8b968f", "#ffffff"
GREEN, BLUE, AMBER, RED = "#2a6f4e", "#2f5d8c", "#c98a1b", "#b4472e"
SOFT_GREEN, SOFT_BLUE, SOFT_AMBER, SOFT_RED = "#d5e8dc", "#d6e3f0", "#f6e7c8", "#f3d8d0"
SOFT_GREY = "#eef1ef"

R, S, P = Replicate, Shard, Partial


def new_figure(width: float, height: float) -> tuple[Figure, object]:
    """A white figure with one axes that fills it, in inches, y upwards."""
    figure = Figure(figsize=(width, height), facecolor=PAPER)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(0, height))
    axes.set_axis_off()
    return figure, axes


def write(axes, x, y, text, size=10.0, color=INK, **options) -> None:
    """Text, centred unless told otherwise."""
    axes.text(x, y, text, **{"ha": "center", "va": "center", "size": size, "color": color, **options})


def box(axes, x, y, w, h, face=PAPER, edge=INK, width=1.2, round_=0.06, **options) -> None:
    """A rounded box whose lower left corner is (x, y)."""
    axes.add_patch(
        FancyBboxPatch(
            (x + round_, y + round_),
            w - 2 * round_,
            h - 2 * round_,
            boxstyle=f"round,pad={round_}",
            facecolor=face,
            edgecolor=edge,
            linewidth=width,
            **options,
        )
    )


def arrow(axes, start, end, color=INK, bend=0.0, width=1.4, **options) -> None:
    """An arrow from point to point."""
    axes.add_patch(
        FancyArrowPatch(
            start,
            end,
            connectionstyle=f"arc3,rad={bend}",
            arrowstyle="-|>",
            mutation_scale=12,
            color=color,
            linewidth=width,
            shrinkA=0,
            shrinkB=0,
            **options,
        )
    )


# ---- one tensor, several layouts

_RANK_FACES = (SOFT_GREEN, SOFT_BLUE, SOFT_AMBER, SOFT_RED)
_RANK_EDGES = (GREEN, BLUE, AMBER, RED)


def layouts() -> Figure:
    """A 4 × 6 tensor on a mesh data 2 × tensor 2, laid in six ways."""
    rows, columns = 4, 6
    cell = 0.15
    figure, axes = new_figure(10.6, 6.9)
    cases: list[tuple[str, str, Sequence[Placement]]] = [
        ("[Replicate(), Replicate()]", "a parameter that nothing cuts", (R(), R())),
        ("[Shard(0), Replicate()]", "a batch: rows over data", (S(0), R())),
        ("[Replicate(), Shard(1)]", "a row-parallel weight: columns over tensor", (R(), S(1))),
        ("[Shard(0), Shard(1)]", "an activation inside a parallel layer", (S(0), S(1))),
        ("[Shard(0), Shard(0)]", "one dim cut twice: data first, then tensor", (S(0), S(0))),
        ("[Shard(0), Partial()]", "the output of a row-parallel layer", (S(0), P())),
    ]
    for i, (title, use, placements) in enumerate(cases):
        left, bottom = 0.35 + 3.45 * (i % 3), 3.55 - 3.35 * (i // 3)
        _one_layout(axes, left, bottom, cell, (rows, columns), title, use, placements)
    return figure


def _one_layout(axes, left, bottom, cell, shape, title, use, placements) -> None:
    rows = shape[0]
    pitch_x, pitch_y = 1.45, 1.08
    write(axes, left + 1.52, bottom + 2.98, title, 9.5, weight="bold", family="DejaVu Sans Mono")
    write(axes, left + 1.52, bottom + 2.74, use, 8.2, FAINT)
    for t in range(2):
        write(axes, left + 0.9 + t * pitch_x, bottom + 2.43, f"tensor {t}", 8, FAINT)
    for d in range(2):
        write(axes, left + 0.06, bottom + 1.8 - d * pitch_y, f"data {d}", 8, FAINT, rotation=90)
        for t in range(2):
            rank = 2 * d + t
            x, top = left + 0.45 + t * pitch_x, bottom + 2.1 - d * pitch_y
            mesh = Mesh.dry({"data": 2, "tensor": 2}, coordinate=(d, t))
            layout = Layout(mesh, placements, shape)
            held = local_box(layout)
            box(
                axes,
                x - 0.16,
                top - rows * cell - 0.22,
                6 * cell + 0.32,
                rows * cell + 0.4,
                SOFT_GREY,
                "none",
            )
            _grid(axes, x, top, cell, (0, 0), shape, facecolor=PAPER, edgecolor="#d5dad7", zorder=2)
            _grid(
                axes, x, top, cell, held.offsets, held.sizes, facecolor=_RANK_FACES[rank],
                edgecolor=_RANK_EDGES[rank], hatch="////" if layout.partial else None, zorder=3,
            )  # fmt: skip
            write(axes, x + 3 * cell, top - rows * cell - 0.11, f"rank {rank}", 7, _RANK_EDGES[rank])
    if any(p.is_partial() for p in placements):
        write(
            axes,
            left + 1.52,
            bottom + 0.02,
            "hatched: an addend; the value is the sum over tensor",
            7.6,
            FAINT,
        )


def _grid(axes, x, top, cell, offsets, sizes, edgecolor, zorder, **look) -> None:
    """A box of a matrix whose upper left corner is (x, top), with lines between its elements."""
    (r, c), (rows, columns) = offsets, sizes
    left, bottom = x + c * cell, top - (r + rows) * cell
    w, h = columns * cell, rows * cell
    axes.add_patch(Rectangle((left, bottom), w, h, edgecolor=edgecolor, linewidth=1, zorder=zorder, **look))
    lines = [((left + i * cell, bottom), (left + i * cell, bottom + h)) for i in range(1, columns)]
    lines += [((left, bottom + i * cell), (left + w, bottom + i * cell)) for i in range(1, rows)]
    axes.add_collection(LineCollection(lines, colors=edgecolor, linewidths=0.6, zorder=zorder))


# ---- the table of transitions

_NODE = {"R": (2.5, 6.0), "D": (8.5, 6.0), "S": (2.5, 1.75), "P": (8.5, 1.75)}
_SAYS = {
    "R": ("Replicate", "the same value\non every rank", GREEN, SOFT_GREEN),
    "D": ("deferred", "the same value,\nused differently", BLUE, SOFT_BLUE),
    "S": ("Shard(d)", "disjoint slices\nalong dim d", AMBER, SOFT_AMBER),
    "P": ("Partial", "addends:\nthe value is their sum", RED, SOFT_RED),
}
_SHORT = {
    "all_reduce": "all-reduce",
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "all_to_all": "all-to-all",
    "slice": "own slice",
    "pad": "own slice among zeros",
    "keep": "keep on coordinate 0",
    "identity": "nothing",
}
_TALKS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
_RADIUS = 0.78


def transitions() -> Figure:
    """The states as a graph; each edge says what it does forward and backward."""
    figure, axes = new_figure(11.0, 8.1)
    write(axes, 5.5, 7.78, "Transitions of one tensor along one mesh axis", 13, weight="bold")
    write(axes, 4.0, 7.42, "bold: forward", 9, weight="bold")
    write(axes, 5.4, 7.42, "blue: backward", 9, BLUE)
    write(axes, 7.3, 7.42, "thick edge: sends bytes forward", 9, FAINT)
    for (src, dst), (forward, backward) in TABLE.items():
        if src != dst:
            _edge(axes, src, dst, forward, backward)
    forward, backward = TABLE["S", "S"]
    _loop(axes, *_NODE["S"])
    _label(axes, 0.78, 1.2, "to another dim:\n" + _SHORT[forward], _SHORT[backward])
    for name, (title, text, edge, face) in _SAYS.items():
        x, y = _NODE[name]
        axes.add_patch(Circle((x, y), _RADIUS, facecolor=face, edgecolor=edge, linewidth=2, zorder=5))
        write(axes, x, y + 0.36, title, 11, edge, weight="bold", zorder=6)
        write(axes, x, y + 0.02, text, 7.4, zorder=6)
        gradient = {"D": "P", "P": "D"}.get(name, name)
        write(axes, x, y - 0.38, f"gradient: {_SAYS[gradient][0]}", 7.4, BLUE, zorder=6)
    return figure


def _edge(axes, src, dst, forward, backward) -> None:
    (x0, y0), (x1, y1) = _NODE[src], _NODE[dst]
    length = math.hypot(x1 - x0, y1 - y0)
    ux, uy = (x1 - x0) / length, (y1 - y0) / length
    nx, ny = uy, -ux  # to the right of the way
    aside = 0.17
    gap = _RADIUS * 0.99
    start = (x0 + ux * gap + nx * aside, y0 + uy * gap + ny * aside)
    end = (x1 - ux * gap + nx * aside, y1 - uy * gap + ny * aside)
    talks = forward in _TALKS
    arrow(axes, start, end, INK if talks else FAINT, width=2.4 if talks else 1.1, zorder=2)
    # diagonals: a quarter of the way, so that the labels stay clear of the crossing
    share = 0.25 if x0 != x1 and y0 != y1 else 0.5
    mx, my = start[0] + (end[0] - start[0]) * share, start[1] + (end[1] - start[1]) * share
    if x0 == x1:
        _label(axes, mx + 0.82 * nx, my, _SHORT[forward], _SHORT[backward])
        return
    angle = math.degrees(math.atan2(uy, ux))
    if abs(angle) > 90:
        angle -= math.copysign(180, angle)
    up = (-math.sin(math.radians(angle)), math.cos(math.radians(angle)))
    side = 1 if nx * up[0] + ny * up[1] > 0 else -1
    first, second = (0.34, 0.12) if side > 0 else (0.24, 0.46)
    for text, away, look in (
        (_SHORT[forward], first, {"weight": "bold", "size": 8.6}),
        (_SHORT[backward], second, {"color": BLUE, "size": 8}),
    ):
        at = mx + nx * away, my + ny * away
        write(axes, *at, text, rotation=angle, rotation_mode="anchor", zorder=4, **look)


def _loop(axes, x, y) -> None:
    """An edge from a node to itself, at its lower left."""
    radius, toward = 0.5, 45.0  # the loop's centre is on the node's rim, at its lower left
    center = x - _RADIUS * math.cos(math.radians(toward)), y - _RADIUS * math.sin(math.radians(toward))
    reach = math.degrees(math.acos(radius / (2 * _RADIUS)))  # where the two circles meet
    axes.add_patch(
        Arc(
            center,
            2 * radius,
            2 * radius,
            theta1=toward + reach,
            theta2=350 + toward - reach,
            color=INK,
            linewidth=2.4,
        )
    )
    tail, tip = (
        (center[0] + radius * math.cos(a), center[1] + radius * math.sin(a))
        for a in (math.radians(toward - reach - 12), math.radians(toward - reach))
    )
    arrow(axes, tail, tip, INK, width=2.4, zorder=6)


def _label(axes, x, y, forward, backward) -> None:
    lines = forward.count("\n")
    write(axes, x, y + 0.1 + 0.08 * lines, forward, 8.6, weight="bold", zorder=4)
    write(axes, x, y - 0.12 - 0.08 * lines, backward, 8, BLUE, zorder=4)


# ---- column then row


def megatron() -> Figure:
    """The two linear layers of an MLP on two ranks of the tensor axis."""
    figure, axes = new_figure(11.4, 5.5)
    write(axes, 5.7, 5.22, "An MLP on tensor 2: column, then row", 13, weight="bold")
    lanes = (3.55, 1.95)
    for rank, y in enumerate(lanes):
        edge, face = (GREEN, SOFT_GREEN) if rank == 0 else (BLUE, SOFT_BLUE)
        box(axes, 0.15, y - 0.62, 11.1, 1.24, "#f7f9f8", "none")
        write(axes, 0.42, y, f"rank {rank}", 9, edge, rotation=90, weight="bold")
        _matrix(axes, 1.2, y, 6, 4, GREEN, SOFT_GREY, "x")
        arrow(axes, (1.72, y), (2.68, y))
        _matrix(axes, 3.25, y, 4, 4, edge, face, "W₁", cut=("columns", rank))
        arrow(axes, (3.85, y), (4.5, y))
        _matrix(axes, 5.15, y, 6, 4, edge, face, "h", cut=("columns", rank))
        arrow(axes, (5.8, y), (6.45, y))
        _matrix(axes, 7.05, y, 4, 4, edge, face, "W₂", cut=("rows", rank))
        arrow(axes, (7.62, y), (8.2, y))
        _matrix(axes, 8.7, y, 6, 4, edge, face, "addend", hatch=True)
        arrow(axes, (9.2, y), (10.1, y))
        _matrix(axes, 10.6, y, 6, 4, GREEN, SOFT_GREY, "y")
    heads = [
        (1.2, "x", "Replicate", GREEN),
        (3.25, "linear", "column", INK),
        (5.15, "h = gelu(x W₁)", "Shard(hidden)", AMBER),
        (7.05, "linear", "row", INK),
        (8.7, "h W₂", "Partial", RED),
        (10.6, "y", "Replicate", GREEN),
    ]
    for x, top, bottom, color in heads:
        write(axes, x, 4.72, top, 9)
        write(axes, x, 4.47, bottom, 9, color, weight="bold")
    for x, title, forward, backward in (
        (2.2, "defer", "forward: nothing", "backward: all-reduce"),
        (9.65, "P → R", "forward: all-reduce", "backward: nothing"),
    ):
        box(axes, x - 0.17, 1.35, 0.34, 2.8, PAPER, INK, 1.4, zorder=4)
        write(axes, x, 2.75, title, 10, rotation=90, weight="bold", zorder=5)
        write(axes, x, 1.08, forward, 8.6, weight="bold" if "all" in forward else "normal")
        write(axes, x, 0.84, backward, 8.6, weight="bold" if "all" in backward else "normal", color=BLUE)
    write(axes, 5.95, 1.0, "no communication between the two layers: each rank keeps its half of h", 9, FAINT)
    write(
        axes,
        5.7,
        0.34,
        "Neither box stands in the model. defer is put in because the first layer's output differs\n"
        "along the axis and x does not; P → R because what follows (a norm, say) needs the value.",
        8.6,
    )
    return figure


def _matrix(axes, x, y, columns, rows, edge, face, label, cut=None, hatch=False) -> None:
    cell = 0.15
    w, h = columns * cell, rows * cell
    left, bottom = x - w / 2, y - h / 2
    style = {"edgecolor": "#c9d0cc", "linewidth": 0.8, "zorder": 2}
    axes.add_patch(Rectangle((left, bottom), w, h, facecolor=PAPER, **style))
    if cut is not None and cut[0] == "columns":
        left, w = left + cut[1] * w / 2, w / 2
    elif cut is not None:
        h = h / 2
        bottom = bottom + (1 - cut[1]) * h
    axes.add_patch(
        Rectangle(
            (left, bottom), w, h, facecolor=face, edgecolor=edge, linewidth=1.3, zorder=3,
            hatch="////" if hatch else None,
        )
    )  # fmt: skip
    back = {"facecolor": face, "edgecolor": "none", "pad": 0.8} if hatch else None
    write(
        axes, left + w / 2, bottom + h / 2, label, 8, edge if face != SOFT_GREY else INK, zorder=4, bbox=back
    )


# ---- the house

_LIVES = {
    "cli": "train, verify, dry, run, doctor",
    "train": "the trainer: jobs, data, progress",
    "engine": "initialize, forward / backward / step, the dry run",
    "compat": "other systems' interfaces",
    "planner": "costs, search",
    "parallel": "the plan; strategies, schedules",
    "checkpoint": "save, load, reshard",
    "tensor": "DTensor, the dispatcher, rules, random values",
    "sharding": "the language of rules; the solver",
    "faults": "ranks that die or hang",
    "comm": "the one door to the network: gloo, NCCL, the ledger",
    "layout": "layouts, regions, transitions, routes: pure",
    "mesh": "named axes over ranks; how processes start",
    "models": "plain models, without a word of parallelism",
    "blocks": "of a model",
    "files": "on disk",
    "texts": "tables",
    "trees": "containers",
    "later": "slow imports",
    "device": "what is known of devices",
    "torch_private": "every private name of torch",
    "meanwhile": "values that hold for a while",
}


def house() -> Figure:
    """The layers of pyproject.toml's import contract, ground floor at the bottom."""
    contract = tomllib.loads((HERE.parent / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"]
    layers = next(c["layers"] for c in contract["contracts"] if c["type"] == "layers")
    storeys = [re.findall(r"\w+", layer) for layer in layers]
    step, left, width = 0.62, 0.5, 9.0
    height = step * len(storeys)
    figure, axes = new_figure(10.0, height + 1.5)
    base = 0.62
    axes.plot(
        [left - 0.25, left + width / 2, left + width + 0.25],
        [base + height + 0.02, base + height + 0.62, base + height + 0.02],
        color=INK,
        linewidth=1.6,
        solid_joinstyle="round",
    )
    write(axes, left + width / 2, base + height + 0.25, "espalier", 12, GREEN, weight="bold")
    for i, rooms in enumerate(reversed(storeys)):
        y = base + i * step
        room = width / len(rooms)
        for k, name in enumerate(rooms):
            home = HERE.parent / "espalier" / name
            built = home.is_dir() or home.with_suffix(".py").is_file()
            box(
                axes, left + k * room + 0.03, y + 0.03, room - 0.06, step - 0.06,
                SOFT_GREEN if built else PAPER, GREEN if built else FAINT,
                linestyle="-" if built else (0, (4, 3)),
            )  # fmt: skip
            x = left + k * room + 0.2
            write(axes, x, y + step / 2, name, 10.5, GREEN if built else FAINT, ha="left", weight="bold")
            text = _LIVES.get(name, "") if built else "not built yet"
            x += 1.35 if len(rooms) == 1 else 1.2 if len(rooms) == 2 else 0.7
            write(
                axes,
                x,
                y + step / 2,
                text,
                8.4 if len(rooms) == 1 else 7.6,
                INK if built else FAINT,
                ha="left",
            )
    axes.plot([left - 0.35, left + width + 0.35], [base - 0.02] * 2, color=INK, linewidth=2.2)
    write(
        axes,
        left + width / 2,
        0.3,
        "Each storey imports only from those below it; rooms side by side do not know each other.",
        9,
        FAINT,
    )
    return figure


def schedules() -> Figure:
    """Every pipeline schedule of 4 ranks and 8 micro-batches, simulated: F = I = W of a stage."""
    kinds = {kind: simulate(find_schedule(kind)) for kind in KINDS}
    # on one scale: a stage takes half as long where a rank has two
    halves = Costs(0.5, 0.5, 0.5)
    kinds |= {kind: simulate(find_schedule(kind), halves) for kind in ("interleaved", "zbv")}
    kinds.pop("naive")  # so long that the others could not be read on its scale
    return pipeline_figure(kinds)


DRAWINGS: dict[str, Callable[[], Figure]] = {
    "layouts": layouts,
    "transitions": transitions,
    "megatron-mlp": megatron,
    "house": house,
    "schedules": schedules,
}


def svg(figure: Figure) -> bytes:
    """The figure as SVG, without a date."""
    buffer = io.BytesIO()
    FigureCanvasSVG(figure).print_svg(buffer, metadata={"Date": None, "Creator": None})
    # no trailing blanks, so that tools which trim them change nothing
    return b"\n".join(line.rstrip() for line in buffer.getvalue().splitlines()) + b"\n"


def main() -> None:
    """Draw everything."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--png", type=Path, metavar="FOLDER", help="write PNGs there instead")
    parser.add_argument("--check", action="store_true", help="write nothing; fail where a picture is stale")
    parser.add_argument(
        "only", nargs="*", metavar="PICTURE", help=f"of {', '.join(DRAWINGS)}; by default all"
    )
    options = parser.parse_args()
    matplotlib.rcParams.update({"svg.hashsalt": "espalier", "svg.fonttype": "path", "hatch.linewidth": 0.6})
    stale = []
    chosen = {name: draw for name, draw in DRAWINGS.items() if not options.only or name in options.only}
    for name, draw in chosen.items():
        if options.png is not None:
            options.png.mkdir(parents=True, exist_ok=True)
            FigureCanvasAgg(draw()).print_png(options.png / f"{name}.png")
            continue
        path, drawn = PICTURES / f"{name}.svg", svg(draw())
        if options.check:
            if not path.exists() or path.read_bytes() != drawn:
                stale.append(name)
            continue
        PICTURES.mkdir(exist_ok=True)
        path.write_bytes(drawn)
        print(f"{path.relative_to(HERE.parent)}  {len(drawn) / 1000:.0f} kB")
    if stale:
        sys.exit(f"not up to date: {', '.join(stale)}; run python docs/draw.py")


if __name__ == "__main__":
    main()
