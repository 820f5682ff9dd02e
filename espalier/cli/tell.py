"""How results and mistakes are shown on the terminal."""

from __future__ import annotations

import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.text import Text

if TYPE_CHECKING:
    from espalier.parallel.pipeline import Timeline
    from espalier.train.trainer import Preempted, Row, Summary
    from espalier.train.verify import Difference, Verification

_WIDE = 2000  # characters


def tell_summary(console: Console, summary: Summary) -> None:
    """Show how a training run ended."""
    from rich.panel import Panel

    from espalier.train.metrics import pairs, readable_time

    if summary.sample is not None:
        console.print(Panel(Text(summary.sample), title="a sample of what it writes", expand=False))
    steps, ranks = (
        f"{n} {one}{'' if n == 1 else 's'}" for n, one in ((summary.steps, "step"), (summary.ranks, "rank"))
    )
    rows = {
        "trained": f"{summary.parameters:,} parameters, {steps}, {readable_time(summary.seconds)} on {ranks}",
        "final loss": f"{summary.loss:.4f} nats, validation {summary.val_loss:.4f}",
    }
    if summary.entropy is not None:
        gap = summary.entropy - summary.val_loss
        side = "below" if gap >= 0 else "ABOVE"
        text = f"{summary.entropy:.4f} nats: validation is {abs(gap):.4f} {side} what token counts alone give"
        rows["unigram entropy"] = text
    if summary.bubble is not None:
        measured, predicted = summary.bubble
        rows["pipeline"] = f"idle for {measured:.1%} of the last step, {predicted:.1%} by its schedule"
    console.print(pairs({**rows, **summary.files}), highlight=False)


def tell_checkpoints(console: Console, table: Sequence[Row]) -> None:
    """Show what checkpoints there are, and what is wrong with those that cannot be loaded."""
    from espalier.texts import in_columns
    from espalier.train.trainer import HEAD

    lines = [HEAD]
    for row in table:
        cells = row.cells or ("",) * (len(HEAD) - 2)
        lines.append((row.name, *cells, "no" if row.problem else "yes"))
    for text in in_columns(lines, "<><>>><"):
        say(console, text)
    for row in table:
        if row.problem:
            say(console, row.problem)


def say(console: Console, line: str) -> None:
    console.print(line, highlight=False, markup=False, soft_wrap=True)


def tell_preempted(console: Console, left: Preempted) -> None:
    """Show where a run left off that was asked to."""
    saved = (
        f"saved in {left.saved}: go on with --resume"
        if left.saved
        else "nothing saved, for want of [checkpoint]"
    )
    why = "interrupted" if left.interrupted else "asked to leave, and left"
    console.print(f"{why} after step {left.step}; {saved}", highlight=False, markup=False, soft_wrap=True)


def tell_verification(console: Console, verification: Verification) -> None:
    """Show a comparison, step by step, and whether it passed."""
    from rich.table import Table

    from espalier.train.verify import Difference

    for notice in verification.notices:
        console.print(f"note: {notice}", highlight=False, markup=False)
    console.print(
        f"{verification.model}, {verification.parameters:,} parameters, float64: {verification.plan} "
        "against one process",
        highlight=False,
        markup=False,
    )
    table = Table()
    for name in ("step", "loss", "Δ loss", "Δ grad norm", "Δ gradients", "Δ parameters"):
        table.add_column(name, justify="right", no_wrap=True)
    for step in verification.steps:
        cells = (_cell(difference, verification.tolerance) for difference in step.differences)
        table.add_row(str(step.step), f"{step.reference_loss:.6f}", *cells)
    console.print(table)
    for kind in ("gradients", "parameters"):
        worst = max(
            (getattr(step, kind) for step in verification.steps), key=lambda d: d.value, default=Difference()
        )
        if worst.where:
            console.print(
                f"largest difference in {kind}: {worst.value:.2e} in {worst.where}",
                highlight=False,
                markup=False,
            )
    verdict, style = ("PASS", "bold green") if verification.passed else ("FAIL", "bold red")
    console.print(
        Text.assemble(
            (verdict, style),
            f": largest difference {verification.worst:.2e}, tolerance {verification.tolerance:.0e}",
        )
    )


def tell_schedule(console: Console, timeline: Timeline) -> None:
    """Draw a schedule's timeline, one line a rank, and say below what it costs."""
    from espalier.parallel.pipeline import check
    from espalier.parallel.schedules.simulate import terminal
    from espalier.train.metrics import pairs

    schedule = timeline.schedule
    report = check(schedule)
    console.print(f"{str(schedule).partition(chr(10))[0]}", highlight=False, markup=False)
    colours = console.color_system is not None
    # in a file there is room for every number
    for line in terminal(timeline, console.width if colours else _WIDE, colours=colours):
        console.print(line, no_wrap=True, crop=colours, overflow="ignore")
    work = max(timeline.busy) / schedule.micro_batches
    live = ", ".join(f"{number:.3g}" for number in report.live)
    crossings = sum(map(int.__ne__, schedule.stage_to_rank, schedule.stage_to_rank[1:]))
    share = f"{timeline.bubble / work:.3g}"
    rows = {
        "bubble": f"{timeline.bubble:g}, as long as {share} micro-batch{'es' * (share != '1')}; "
        f"{timeline.bubble_fraction:.1%} of all ranks' time",
        "step": f"{timeline.step_time:g}, without a bubble {max(timeline.busy):g}",
        "live micro-batches": f"{live} on ranks 0 to {schedule.ranks - 1}",
        "messages": f"{report.messages}: both ways, {crossings} crossings between ranks",
    }
    console.print(pairs(rows), highlight=False)


def _cell(difference: Difference, tolerance: float) -> Text:
    return Text(f"{difference.value:.2e}", style="" if difference.value <= tolerance else "bold red")


@contextmanager
def one_clear_message(debug: bool) -> Iterator[None]:
    """Turn every error into a message and exit code 2; with ``debug``, let it through."""
    reported: set[str] = set()

    def tell(message: Warning | str, *_: Any) -> None:
        if str(message) not in reported:
            reported.add(str(message))
            complain(f"note: {message}")

    try:
        with warnings.catch_warnings():
            warnings.showwarning = tell  # type: ignore[assignment]
            yield
    except typer.Exit:
        raise
    except KeyboardInterrupt:
        complain("interrupted; all ranks have been stopped")
        raise typer.Exit(130) from None
    except typer.Abort:  # Ctrl-C or Ctrl-D where a question was asked
        typer.echo(err=True)
        complain("interrupted; nothing is written")
        raise typer.Exit(130) from None
    except Exception as error:
        if debug:
            raise
        complain(_message(error) + _place(error))
        raise typer.Exit(2) from None


def _place(error: Exception) -> str:
    """A line that says where in the user's own files an error came up; nothing where that was elsewhere."""
    ours = "<", str(Path(__file__).parent.parent), sys.prefix, sys.base_prefix
    frames = [x for x in traceback.extract_tb(error.__traceback__) if not x.filename.startswith(ours)]
    frames = [x for x in frames if "-packages" not in x.filename]
    if not frames:
        return ""
    last = frames[-1]
    return f"\nIt came up in {last.filename}, line {last.lineno}, in {last.name}: {last.line}"


def _message(error: Exception) -> str:
    if isinstance(error, ValueError):
        return str(error)
    from espalier.mesh.launch import LaunchError
    from espalier.train.run import RunError
    from espalier.train.trainer import TrainingError

    if isinstance(error, LaunchError | RunError | TrainingError):
        return str(error)
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}. Give another path, or see to this one."
    return f"{type(error).__name__}: {error}\nThis was not foreseen; --debug shows where it comes from."


def complain(message: str) -> None:
    """Show a mistake, or a note."""
    Console(stderr=True).print(f"espalier: {message}", highlight=False, markup=False, soft_wrap=True)
