"""What the benchmarks share: timing in turns, ratios of paired timings, the table of bars."""

from __future__ import annotations

import gc
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from espalier.mesh.launch import LaunchError, launch

Times = list[float]
Row = tuple[str, ...]
MISSED = 3  # the exit status of a rank that saw a bar missed


def on_ranks(script: str, ranks: int, *words: str) -> int:
    """Run a benchmark's file on ranks, with ``--rank`` and more words; the exit status: 1 if one failed."""
    try:
        launch([str(Path(script).resolve()), "--rank", *words], ranks)
    except LaunchError as error:
        if error.exit_code != MISSED:
            print(error, file=sys.stderr)
        return 1
    return 0


@dataclass(frozen=True)
class Contender:
    """One way to do the work that is compared.

    Attributes:
        run: the work itself; what it returns is dropped while the clock runs.
        before: called before every timed stretch, untimed (dropping gradients, waiting for other ranks).
    """

    run: Callable[[], object]
    before: Callable[[], object] = lambda: None


def step(
    module: nn.Module, x: torch.Tensor, upstream: torch.Tensor, ready: Callable[[], object] = lambda: None
) -> Contender:
    """Forward, then backward from a given gradient of the output; the input needs one too.

    Args:
        ready: called, untimed, when the gradients are dropped.
    """
    x.requires_grad_()

    def run() -> None:
        module(x).backward(upstream)

    def before() -> None:
        x.grad = None
        module.zero_grad()
        ready()

    return Contender(run, before)


@dataclass
class Bar:
    """One claim: seconds of ``mine`` are at most ``limit`` times those of ``other``.

    Without a limit it is shown for information and cannot fail.
    """

    work: str
    mine: str
    other: str
    seconds: float
    other_seconds: float
    ratio: float
    limit: float | None = None

    @property
    def missed(self) -> bool:
        """Whether the claim does not hold."""
        return self.limit is not None and self.ratio > self.limit


@dataclass
class Report:
    """The bars of a run, printed as one table."""

    bars: list[Bar] = field(default_factory=list)

    def add(
        self, work: str, times: Mapping[str, Times], mine: str, other: str, limit: float | None = None
    ) -> None:
        """Compare two contenders of :func:`in_turns` by :func:`ratio_of`."""
        ratio = ratio_of(times, mine, other)
        a, b = statistics.median(times[mine]), statistics.median(times[other])
        self.bars.append(Bar(work, mine, other, a, b, ratio, limit))

    def show(self) -> int:
        """Print the table; gives the exit status: 1 if a bar was missed."""
        rows: list[Row] = [("work", "", "time", "against", "its time", "ratio", "bar", "")]
        print(table([*rows, *map(_row, self.bars)], left=(0, 1, 3, 7)))
        missed = sum(bar.missed for bar in self.bars)
        bars = sum(bar.limit is not None for bar in self.bars)
        print(f"\n{bars - missed} of {bars} bars hold" + (f", {missed} missed" if missed else ""))
        return 1 if missed else 0


def table(rows: Sequence[Row], left: Sequence[int] = (0,)) -> str:
    """Rows, the header first, as text in columns; those in ``left`` begin at their left edge."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(
            c.ljust(w) if j in left else c.rjust(w) for j, (c, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    return "\n".join([lines[0], "  ".join("-" * w for w in widths), *lines[1:]])


def _row(bar: Bar) -> Row:
    limit = "" if bar.limit is None else f"<= {bar.limit:g}"
    verdict = "" if bar.limit is None else "MISS" if bar.missed else "PASS"
    times = duration(bar.seconds), duration(bar.other_seconds)
    return bar.work, bar.mine, times[0], bar.other, times[1], f"{bar.ratio:.2f}", limit, verdict


def ratio_of(times: Mapping[str, Times], mine: str, other: str) -> float:
    """The median over rounds of the ratio within a round.

    Both timings of a round lie close together in time, so what else the machine does meanwhile
    weighs on both; the median drops the rounds in which it weighed on one alone.
    """
    return statistics.median(a / b for a, b in zip(times[mine], times[other], strict=True))


def duration(seconds: float) -> str:
    """A time with its unit."""
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} µs"


def in_turns(
    contenders: Mapping[str, Contender],
    *,
    rounds: int,
    calls: int = 1,
    warmup: int = 5,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Times]:
    """Seconds a call, for each contender and round.

    In each round every contender makes ``calls`` calls under one clock, in an order drawn anew, alike on
    all ranks: what one leaves behind (caches, memory, threads that go to sleep) falls to all of the others.
    Garbage is collected between the timings and not during them.

    Args:
        rounds: how many times all have their turn.
        calls: calls in a row under the clock; more than one for work of microseconds.
        warmup: calls before anything is timed (caches fill, memory is had).
        clock: seconds; ``time.process_time`` for work of one thread that waits for nothing, so that
            what other programs take of the machine does not count.
    """
    times: dict[str, Times] = {name: [] for name in contenders}
    for contender in contenders.values():
        for _ in range(warmup):
            contender.before()
            contender.run()
    names: Sequence[str] = list(contenders)
    enabled = gc.isenabled()
    gc.collect()
    gc.freeze()  # what lives already is not looked through again: collections in between take no time
    gc.disable()
    try:
        for i in range(rounds):
            if i % 10 == 0:
                gc.collect()
            for name in random.Random(i).sample(names, len(names)):
                times[name].append(_timed(contenders[name], calls, clock))
    finally:
        gc.unfreeze()
        if enabled:
            gc.enable()
    return times


def _timed(contender: Contender, calls: int, clock: Callable[[], float]) -> float:
    run = contender.run
    contender.before()
    repeat = range(calls)
    start = clock()
    for _ in repeat:
        run()
    return (clock() - start) / calls


def slowest_rank(times: dict[str, Times]) -> dict[str, Times]:
    """Each timing as the slowest of the ranks took it (a collective over all)."""
    table = torch.tensor(list(times.values()), dtype=torch.float64)
    dist.all_reduce(table, dist.ReduceOp.MAX)
    return dict(zip(times, table.tolist(), strict=True))


@dataclass
class Section:
    """A table, and the claims about it: what was measured, the bar, whether it holds."""

    title: str
    words: str
    rows: list[Row] = field(default_factory=list)
    bars: list[tuple[str, float, float]] = field(default_factory=list)

    def bar(self, claim: str, value: float, limit: float) -> None:
        """``value`` is to be at most ``limit``."""
        self.bars.append((claim, value, limit))

    def claims(self) -> list[str]:
        """Each bar in a line."""
        return [
            f"{'PASS' if value <= limit else 'MISS'}  {claim}: {value:.2f} (bar {limit:g})"
            for claim, value, limit in self.bars
        ]

    @property
    def missed(self) -> int:
        """How many bars do not hold."""
        return sum(value > limit for _, value, limit in self.bars)

    def text(self) -> str:
        """For a terminal."""
        return "\n".join([f"== {self.title}", table(self.rows), "", *self.claims(), ""])

    def markdown(self) -> str:
        """For the docs."""
        head, *rest = [f"| {' | '.join(row)} |" for row in self.rows]
        line = "|".join(["", "---", *["--:"] * (len(self.rows[0]) - 1), ""])
        claims = [f"- {claim}" for claim in self.claims()]
        return "\n".join([f"## {self.title}", "", self.words, "", head, line, *rest, "", *claims, ""])
