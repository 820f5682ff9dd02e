"""How results are shown on the terminal."""

from collections.abc import Sequence

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from espalier.parallel.pipeline import Timeline, check
from espalier.parallel.pipeline.draw import terminal
from espalier.train.inspect import HEAD, Row
from espalier.train.progress import readable_time
from espalier.train.trainer import Preempted, Summary
from espalier.train.verify import Difference, Verification

_WIDE = 2000  # characters


def tell_summary(console: Console, summary: Summary) -> None:
    """Show how a training run ended."""
    if summary.sample is not None:
        console.print(Panel(Text(summary.sample), title="a sample of what it writes", expand=False))
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column()
    ranks = "rank" if summary.ranks == 1 else "ranks"
    table.add_row(
        "trained",
        f"{summary.parameters:,} parameters, {summary.steps} steps, "
        f"{readable_time(summary.seconds)} on {summary.ranks} {ranks}",
    )
    table.add_row("final loss", f"{summary.loss:.4f} nats, validation {summary.val_loss:.4f}")
    if summary.entropy is not None:
        gap = summary.entropy - summary.val_loss
        side = "below" if gap >= 0 else "ABOVE"
        table.add_row(
            "unigram entropy",
            f"{summary.entropy:.4f} nats: validation is {abs(gap):.4f} {side} what token counts alone give",
        )
    if summary.bubble is not None:
        measured, predicted = summary.bubble
        table.add_row(
            "pipeline", f"idle for {measured:.1%} of the last step, {predicted:.1%} by its schedule"
        )
    for name, path in summary.files.items():
        table.add_row(name, path)
    console.print(table, highlight=False)


def tell_checkpoints(console: Console, found: Sequence[Row]) -> None:
    """Show what checkpoints there are, and what is wrong with those that cannot be loaded."""
    lines = [HEAD]
    for row in found:
        cells = row.cells or ("",) * (len(HEAD) - 2)
        lines.append((row.name, *cells, "no" if row.problem else "yes"))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    right = (False, True, False, True, True, True, False)
    for line in lines:
        parts = [
            cell.rjust(n) if end else cell.ljust(n) for cell, n, end in zip(line, widths, right, strict=True)
        ]
        _say(console, "  ".join(parts).rstrip())
    for row in found:
        if row.problem:
            _say(console, row.problem)


def _say(console: Console, line: str) -> None:
    console.print(line, highlight=False, markup=False, soft_wrap=True)


def tell_preempted(console: Console, left: Preempted) -> None:
    """Show where a run left off that was asked to."""
    saved = (
        f"saved in {left.saved}: go on with --resume"
        if left.saved
        else "nothing saved, for want of [checkpoint]"
    )
    console.print(f"asked to leave, and left after step {left.step}; {saved}", highlight=False, markup=False)


def tell_verification(console: Console, found: Verification) -> None:
    """Show a comparison, step by step, and whether it passed."""
    for notice in found.notices:
        console.print(f"note: {notice}", highlight=False, markup=False)
    axes = " × ".join(f"{axis} {size}" for axis, size in found.plan.items())
    console.print(
        f"{found.model}, {found.parameters:,} parameters, float64: {axes} against one process",
        highlight=False,
        markup=False,
    )
    table = Table()
    for name in ("step", "loss", "Δ loss", "Δ grad norm", "Δ gradients", "Δ parameters"):
        table.add_column(name, justify="right", no_wrap=True)
    for step in found.steps:
        cells = (_cell(difference, found.tolerance) for difference in step.differences)
        table.add_row(str(step.step), f"{step.reference_loss:.6f}", *cells)
    console.print(table)
    for kind in ("gradients", "parameters"):
        worst = max(
            (getattr(step, kind) for step in found.steps), key=lambda d: d.value, default=Difference()
        )
        if worst.where:
            console.print(
                f"largest difference in {kind}: {worst.value:.2e} in {worst.where}",
                highlight=False,
                markup=False,
            )
    verdict, style = ("PASS", "bold green") if found.passed else ("FAIL", "bold red")
    console.print(
        Text.assemble(
            (verdict, style), f": largest difference {found.worst:.2e}, tolerance {found.tolerance:.0e}"
        )
    )


def tell_schedule(console: Console, timeline: Timeline) -> None:
    """Draw a schedule's timeline, one line a rank, and say below what it costs."""
    schedule = timeline.schedule
    report = check(schedule)
    console.print(f"{str(schedule).partition(chr(10))[0]}", highlight=False, markup=False)
    colours = console.color_system is not None
    # in a file there is room for every number
    for line in terminal(timeline, console.width if colours else _WIDE, colours=colours):
        console.print(line, no_wrap=True, crop=colours, overflow="ignore")
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column()
    work = max(timeline.busy) / schedule.micro_batches
    table.add_row(
        "bubble",
        f"{timeline.bubble:g}, as long as {timeline.bubble / work:.3g} micro-batches; "
        f"{timeline.bubble_fraction:.1%} of all ranks' time",
    )
    table.add_row("step", f"{timeline.step_time:g}, without a bubble {max(timeline.busy):g}")
    held = ", ".join(f"{number:g}" for number in report.live)
    table.add_row("live micro-batches", f"{held} on ranks 0 to {schedule.ranks - 1}")
    crossings = sum(map(int.__ne__, schedule.stage_to_rank, schedule.stage_to_rank[1:]))
    table.add_row("messages", f"{report.messages}: both ways, {crossings} crossings between ranks")
    console.print(table, highlight=False)


def _cell(difference: Difference, tolerance: float) -> Text:
    return Text(f"{difference.value:.2e}", style="" if difference.value <= tolerance else "bold red")
