"""Live progress on rank 0: a display that redraws itself on a terminal, plain lines elsewhere."""

from types import TracebackType
from typing import Protocol, Self

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from espalier.train.memory import readable_bytes
from espalier.train.metrics import Record


class Progress(Protocol):
    """Shows how a run goes; used as a context manager."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...

    def show(self, record: Record) -> None:
        """Show the measurements of a step."""
        ...

    def say(self, message: str) -> None:
        """Show a line that stays."""
        ...


class Silent:
    """Shows nothing: for all ranks but the first."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *stop: object) -> None:
        return None

    def show(self, record: Record) -> None:
        """Nothing."""

    def say(self, message: str) -> None:
        """Nothing."""


class Lines(Silent):
    """One line a record, for files and pipes.

    Args:
        steps: optimizer steps of the run.
        console: where to write.
    """

    def __init__(self, steps: int, console: Console) -> None:
        self._steps = steps
        self._console = console

    def show(self, record: Record) -> None:
        """Write a line."""
        parts = [
            f"step {record.step:>{len(str(self._steps))}}/{self._steps}",
            *(f"{name} {text}" for name, text in fields(record).items()),
        ]
        remaining = _remaining(record, self._steps)
        self.say("  ".join([*parts, f"ETA {readable_time(remaining)}"]))

    def say(self, message: str) -> None:
        """Write a line."""
        self._console.print(message, highlight=False, markup=False, soft_wrap=True)


class Display(Silent):
    """A panel that redraws itself, on a terminal.

    Args:
        steps: optimizer steps of the run.
        console: the terminal.
        title: of the panel.
    """

    def __init__(self, steps: int, console: Console, title: str) -> None:
        self._steps = steps
        self._title = title
        self._live = Live(console=console, refresh_per_second=8, transient=False)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *stop: object) -> None:
        self._live.stop()

    def show(self, record: Record) -> None:
        """Redraw the panel."""
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim")
        table.add_column()
        table.add_row(
            "step", f"{record.step} of {self._steps}, ETA {readable_time(_remaining(record, self._steps))}"
        )
        for name, text in fields(record).items():
            table.add_row(name, text)
        bar = ProgressBar(total=self._steps, completed=record.step, width=60)
        self._live.update(Panel(Group(table, Text(), bar), title=self._title, expand=False), refresh=True)

    def say(self, message: str) -> None:
        """Print above the panel."""
        self._live.console.print(message, highlight=False, markup=False)


def fields(record: Record) -> dict[str, str]:
    """The measurements as short texts, by name."""
    shown = {"loss": f"{record.loss:.4f}"}
    if record.val_loss is not None:
        shown["val"] = f"{record.val_loss:.4f}"
    if record.grad_norm is not None:
        shown["grad norm"] = f"{record.grad_norm:.3f}"
    shown["lr"] = f"{record.lr:.2e}"
    shown["tokens/s"] = f"{record.tokens_per_second:,.0f}"
    shown["memory"] = _span(record.memory)
    sent = ", ".join(f"{axis} {readable_bytes(count)}" for axis, count in record.sent.items())
    shown["sent a step"] = sent or "nothing"
    return shown


def readable_time(seconds: float) -> str:
    """Minutes and seconds, with hours where there are any."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _remaining(record: Record, steps: int) -> float:
    return record.seconds / max(record.step, 1) * (steps - record.step)


def _span(memory: tuple[int, ...]) -> str:
    """Each rank's memory, or the range where the ranks are many."""
    if len(memory) > 4:
        return f"{readable_bytes(min(memory))} to {readable_bytes(max(memory))} on {len(memory)} ranks"
    return " | ".join(readable_bytes(count) for count in memory)
