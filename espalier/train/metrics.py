"""What a run leaves behind: metrics, a picture, the model."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

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
    found = []
    for line in path.read_text("utf-8").splitlines():
        try:
            record = Record(**json.loads(line))
        except (ValueError, TypeError):
            continue
        if record.step <= last:
            found.append(replace(record, memory=tuple(record.memory)))
    return found


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
