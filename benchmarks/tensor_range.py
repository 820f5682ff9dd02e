"""The range test of the tensor modes: memory of a rank against batch and hidden size, mode by mode.

After the range tests of the Colossal-AI paper (arXiv 2110.14883): a model of two linear layers, h to 4h to h,
here with its residual sum, on sequences of 512, is run forward and backward, and the most bytes of tensors
that live at once on a rank are taken: parameters, gradients, activations, and what is gathered or under
way. Meshes are dry, so they may have 512 ranks. Bars, at the largest sizes on 8 ranks, as the paper has them:
2.5D at least 44 % below 1D, 3D at least 65 %; and the law of each mode: where activations are nearly all of
it, a rank's peak falls as 1/q² in 2D, 1/(dq²) in 2.5D, and at least as 1/q² in 3D.

Then small ones are run for real, on gloo ranks of this machine. What counts tensors there makes each
collective work on a copy, so that a panel more lives: the peaks must be within 1.25 of the dry run's.

    python benchmarks/tensor_range.py
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from matplotlib import rc_context
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from torch import nn

import espalier
from espalier import Layout, Mesh, Plan, Replicate, Shard
from espalier.parallel import arrange
from espalier.tensor import stamp
from espalier.tensor.live_memory import LiveMemory

PICTURE = Path(__file__).parents[1] / "docs" / "pictures" / "tensor-range.svg"
SEQUENCE = 512
BATCHES, AT_HIDDEN = (32, 64, 128, 256, 512), 4096
WIDTHS, AT_BATCH = (1024, 2048, 4096, 8192, 16384), 512
COLOURS = {"1d": "#8b968f", "2d": "#2f5d8c", "2.5d": "#c98a1b", "3d": "#b4472e"}


def modes(ranks: int) -> dict[str, Plan]:
    """The modes that so many ranks can form: squares in 2d, two squares or more in 2.5d, a cube."""
    found = {"1d": Plan(tensor=ranks)}
    if round(ranks**0.5) ** 2 == ranks or ranks > 8:
        found["2d"] = Plan(tensor=ranks, tensor_mode="2d")
    depth = {8: 2, 64: 4, 512: 8}.get(ranks)
    if depth is not None:
        found["2.5d"] = Plan(tensor=ranks, tensor_mode="2.5d", depth=depth)
    if round(ranks ** (1 / 3)) ** 3 == ranks:
        found["3d"] = Plan(tensor=ranks, tensor_mode="3d")
    return found


class Layers(nn.Module):
    """Two linear layers and the residual sum."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x))


def peak(mesh: Mesh, plan: Plan, batch: int, hidden: int, sequence: int = SEQUENCE) -> int:
    """The most bytes of tensors on a rank, forward and backward."""
    device = "meta" if mesh.is_dry else "cpu"
    with torch.device("meta"):
        net = Layers(hidden)
    layouts = arrange(net, plan, mesh, table={"up": "column", "down": "row"})
    assert layouts is not None
    memory = LiveMemory()
    for name, _ in list(net.named_parameters()):
        module, _, own = name.rpartition(".")
        local = stamp(torch.zeros(layouts[name].local_shape, device=device), layouts[name])
        net.get_submodule(module)._parameters[own] = local.requires_grad_()  # type: ignore[assignment]
        memory.hold(local)
    inside = {"1d": None, "3d": "k"}.get(plan.tensor_mode, "col")
    places: list[Any] = [Replicate()] * mesh.ndim
    for axis in plan.batch_axes:
        places[mesh.axis(axis)] = Shard(0)
    if inside is not None:
        places[mesh.axis(inside)] = Shard(2)
    layout = Layout(mesh, places, (batch, sequence, hidden))
    x = stamp(torch.zeros(layout.local_shape, device=device), layout).requires_grad_()
    memory.hold(x)
    for _ in range(2):  # the first time rules are asked, with tensors of their own
        memory.peak = 0
        net.zero_grad()
        x.grad = None
        with memory:
            net(x).sum().backward()
    return memory.peak


def dry(plan: Plan, batch: int, hidden: int) -> int:
    """The peak on the first rank of a dry mesh."""
    return peak(Mesh.dry(plan.axes), plan, batch, hidden)


def on_ranks(mesh: Mesh, plan: Plan, batch: int, hidden: int, sequence: int) -> tuple[int, int]:
    """The peak on a rank of this machine, and the one foretold."""
    foretold = peak(Mesh.dry(plan.axes, mesh.coordinate), plan, batch, hidden, sequence)
    return peak(mesh, plan, batch, hidden, sequence), foretold


Table = dict[tuple[int, int], dict[str, int]]


def swept(ranks: int) -> Table:
    """(batch, hidden) to mode to peak."""
    sizes = [(b, AT_HIDDEN) for b in BATCHES] + [(AT_BATCH, h) for h in WIDTHS if h != AT_HIDDEN]
    return {size: {mode: dry(plan, *size) for mode, plan in modes(ranks).items()} for size in sizes}


def told(ranks: int, table: Table) -> None:
    """Print the peaks and how far each lies below 1D."""
    print(f"\n{ranks} ranks: {', '.join(f'{mode} ({plan})' for mode, plan in modes(ranks).items())}")
    names = list(modes(ranks))
    print(f"{'batch':>6} {'hidden':>6}  " + "  ".join(f"{name:>17}" for name in names))
    for (batch, hidden), peaks in sorted(table.items(), key=lambda item: (item[0][1] != AT_HIDDEN, item[0])):
        cells = [f"{v / 2**30:8.2f} GiB {v / peaks['1d'] - 1:+4.0%}" for v in peaks.values()]
        print(f"{batch:>6} {hidden:>6}  " + "  ".join(f"{cell:>17}" for cell in cells))


def drawn(tables: dict[int, Table]) -> None:
    """Write the picture: a row for the batch, one for the hidden size, a column for each number of ranks."""
    figure = Figure(figsize=(3.2 * len(tables), 5.6), layout="constrained", facecolor="white")
    axes = figure.subplots(2, len(tables), squeeze=False)
    for column, (ranks, table) in enumerate(tables.items()):
        lines = (
            (BATCHES, lambda b: (b, AT_HIDDEN), "batch"),
            (WIDTHS, lambda h: (AT_BATCH, h), "hidden size"),
        )
        for row, (sizes, key, name) in enumerate(lines):
            plot = axes[row][column]
            for mode in modes(ranks):
                peaks = [table[key(n)][mode] / 2**30 for n in sizes]
                plot.plot(sizes, peaks, "o-", color=COLOURS[mode], label=mode, markersize=3)
            plot.set(xscale="log", yscale="log", xlabel=name, xticks=sizes, xticklabels=sizes)
            plot.minorticks_off()
            if row == 0:
                plot.set_title(f"{ranks} ranks", fontsize=10)
            if column == 0:
                at = f"hidden {AT_HIDDEN}" if row == 0 else f"batch {AT_BATCH}"
                plot.set_ylabel(f"GiB a rank ({at})")
            plot.tick_params(labelsize=7)
            plot.legend(fontsize=7)
    with rc_context({"svg.hashsalt": "espalier", "svg.fonttype": "none"}):
        FigureCanvasSVG(figure).print_svg(PICTURE, metadata={"Date": None})


def laws() -> list[tuple[str, float]]:
    """Of each mode the peak on one mesh by that on one whose side is twice as long."""
    small: list[dict[str, Any]] = [
        {"tensor": 16, "tensor_mode": "2d"},
        {"tensor": 32, "tensor_mode": "2.5d", "depth": 2},
        {"tensor": 64, "tensor_mode": "3d"},
    ]
    found = []
    for given in small:
        more = 8 if given["tensor_mode"] == "3d" else 4
        few, many = Plan(**given), Plan(**{**given, "tensor": given["tensor"] * more})
        found.append((few.tensor_mode, dry(few, 256, 256) / dry(many, 256, 256)))
    return found


def main() -> int:
    """Print the tables and the bars, draw the picture; 1 where a bar is missed."""
    tables = {ranks: swept(ranks) for ranks in (4, 8, 64, 512)}
    for ranks, table in tables.items():
        told(ranks, table)
    drawn(tables)
    print(f"\ndrawn: {PICTURE.relative_to(PICTURE.parents[2])}\n")
    failed = False

    def bar(what: str, found: str, wanted: str, held: bool) -> None:
        nonlocal failed
        failed |= not held
        print(f"{what:<60} {found:>9}  bar {wanted:<9} {'held' if held else 'MISSED'}")

    for mode, least in (("2.5d", 0.44), ("3d", 0.65)):
        for size in ((BATCHES[-1], AT_HIDDEN), (AT_BATCH, WIDTHS[-1])):
            peaks = tables[8][size]
            below = 1 - peaks[mode] / peaks["1d"]
            what = f"8 ranks, batch {size[0]}, hidden {size[1]}: {mode} below 1d"
            bar(what, f"{below:.1%}", f">= {least:.0%}", below >= least)
    for mode, ratio in laws():
        bar(f"{mode}: the peak falls, where the side doubles, by", f"{ratio:.2f}", ">= 3.9", ratio >= 3.9)
    for ranks in (4, 8):
        for mode, plan in modes(ranks).items():
            pairs = espalier.spawn(on_ranks, plan.axes, plan, 16, 64, 32)
            ratio = max(real / foretold for real, foretold in pairs)
            bar(
                f"{ranks} ranks here, {mode}: the peak by the one foretold",
                f"{ratio:.2f}",
                "<= 1.25",
                ratio <= 1.25,
            )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
