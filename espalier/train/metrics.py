"""What a run measures, leaves behind (``metrics.jsonl``, a picture), and shows while it goes.

Progress is shown on rank 0: by a display that redraws itself on a terminal, by plain lines elsewhere.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import torch
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from espalier.device import has_peak, process_memory
from espalier.device import peak_memory as device_peak
from espalier.files import write_file


@dataclass(frozen=True)
class Record:
    """Measurements of one logged step.

    Attributes:
        step: optimizer steps done, so 1 after the first.
        loss: mean training loss of the global batch, nats.
        grad_norm: of the whole gradient before clipping; None where it overflowed and the step was skipped.
        lr: learning rate used.
        tokens_per_second: of the global batch, since the last record (images for images).
        seconds: since training began.
        memory: bytes of each rank: peak device memory, or peak resident memory on the CPU.
        sent: bytes that this rank sent in the step, by axis.
        val_loss: mean validation loss, nats, where it was measured after this step.
        metrics: what else was, by name.
        held: bytes of each rank by kind (parameters, gradients, states, ...), where gradients are fullest.
    """

    step: int
    loss: float
    grad_norm: float | None
    lr: float
    tokens_per_second: float
    seconds: float
    memory: tuple[int, ...]
    sent: Mapping[str, int] = field(default_factory=dict)
    val_loss: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    held: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


class MetricsFile:
    """``metrics.jsonl``: one JSON object a line, on disk as soon as it is written.

    Args:
        after: go on after that step: earlier lines stay, later ones, which will be written again, go.
    """

    def __init__(self, path: Path, after: int = 0) -> None:
        self.records = _records(path, after) if after and path.exists() else []
        lines = "".join(json.dumps(asdict(record)) + "\n" for record in self.records)
        write_file(path, lines.encode())
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def write(self, record: Record) -> None:
        """Append a record."""
        self.records.append(record)
        self._file.write(json.dumps(asdict(record)) + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class Log:
    """What a run measures, and since when; rank 0 writes it to the job's ``metrics.jsonl``.

    Args:
        folder: of the results.
        writes: whether this rank writes.
        after: go on after that step.

    Attributes:
        records: so far.
        seconds: of training, up to the last record; ``marked``: when that was; ``counted``: steps since.
    """

    def __init__(self, folder: Path, writes: bool, after: int) -> None:
        self._path, self._file = folder / "metrics.jsonl", None
        if writes:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = MetricsFile(self._path, after)
        self.records: list[Record] = [] if self._file is None else list(self._file.records)
        self.seconds = self.records[-1].seconds if self.records else 0.0
        self.mark()

    def mark(self) -> None:
        """Begin to measure again."""
        self.marked, self.counted = time.perf_counter(), 0

    def write(self, record: Record) -> None:
        """Add a record."""
        self.records.append(record)
        if self._file is not None:
            self._file.write(record)
        self.mark()

    def back_to(self, step: int) -> None:
        """Forget what came after a step; the time it took stays counted."""
        self.records = [record for record in self.records if record.step <= step]
        if self._file is not None:
            self._file.close()
            self._file = MetricsFile(self._path, step)
        self.mark()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


def _records(path: Path, last: int) -> list[Record]:
    """The records of a file up to a step; a line that was cut off when its process was killed is left out."""
    records = []
    for line in path.read_text("utf-8").splitlines():
        try:
            record = Record(**json.loads(line))
        except (ValueError, TypeError):
            continue
        if record.step <= last:
            records.append(replace(record, memory=tuple(record.memory)))
    return records


def draw_loss(path: Path, records: Sequence[Record], entropy: float | None, title: str) -> None:
    """Draw training and validation loss against steps, with the unigram entropy as a dashed line."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 4.2), layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot([r.step for r in records], [r.loss for r in records], color="#2a6f4e", label="training")
    measured = [(r.step, r.val_loss) for r in records if r.val_loss is not None]
    if measured:
        axes.plot(*zip(*measured, strict=True), "o-", color="#c2572b", markersize=4, label="validation")
    if entropy is not None:
        axes.axhline(entropy, linestyle="--", color="#777777", label=f"unigram entropy {entropy:.2f}")
    axes.set(xlabel="step", ylabel="loss (nats)", title=title)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    canvas.print_png(str(path))


# ---- memory


def peak_memory(device: torch.device) -> int:
    """Bytes: peak of an accelerator's allocations, or this process's peak resident memory."""
    if has_peak(device):
        return device_peak(device)
    # Linux's ru_maxrss is inherited through exec, so that a child would show its parent's peak.
    if (told := process_memory("VmHWM")) is not None:
        return told
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def readable_bytes(count: float) -> str:
    """A byte count in the unit that leaves one to four digits before the point."""
    for unit in ("B", "KB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


# ---- live progress


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
        unit: what is counted a second: tokens, or images.
    """

    def __init__(self, steps: int, console: Console, unit: str = "tokens") -> None:
        self._steps, self._unit = steps, unit
        self._console = console

    def show(self, record: Record) -> None:
        """Write a line."""
        parts = [
            f"step {record.step:>{len(str(self._steps))}}/{self._steps}",
            *(f"{name} {text}" for name, text in fields(record, self._unit).items()),
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
        unit: what is counted a second: tokens, or images.
    """

    def __init__(self, steps: int, console: Console, title: str, unit: str = "tokens") -> None:
        self._steps, self._unit = steps, unit
        self._title = title
        self._live = Live(console=console, refresh_per_second=8, transient=False)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *stop: object) -> None:
        self._live.stop()

    def show(self, record: Record) -> None:
        """Redraw the panel."""
        remaining = readable_time(_remaining(record, self._steps))
        table = pairs(
            {"step": f"{record.step} of {self._steps}, ETA {remaining}", **fields(record, self._unit)}
        )
        bar = ProgressBar(total=self._steps, completed=record.step, width=60)
        self._live.update(Panel(Group(table, Text(), bar), title=self._title, expand=False), refresh=True)

    def say(self, message: str) -> None:
        """Print above the panel."""
        self._live.console.print(message, highlight=False, markup=False)


def fields(record: Record, unit: str = "tokens") -> dict[str, str]:
    """The measurements as short texts, by name; ``unit`` is what is counted a second."""
    shown = {"loss": f"{record.loss:.4f}"}
    if record.val_loss is not None:
        shown["val"] = f"{record.val_loss:.4f}"
    shown |= {name: f"{value:.4g}" for name, value in record.metrics.items()}
    if record.grad_norm is not None:
        shown["grad norm"] = f"{record.grad_norm:.3f}"
    shown["lr"] = f"{record.lr:.2e}"
    shown[f"{unit}/s"] = f"{record.tokens_per_second:,.0f}"
    shown["memory"] = _span(record.memory)
    sent = ", ".join(f"{axis} {readable_bytes(count)}" for axis, count in record.sent.items())
    shown["sent a step"] = sent or "nothing"
    return shown


def pairs(named: Mapping[str, str]) -> Table:
    """A table of names and what stands beside them."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column()
    for name, text in named.items():
        table.add_row(name, text)
    return table


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
