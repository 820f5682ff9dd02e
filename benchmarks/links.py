"""Tensor modes on limited links: one transformer block on 8 ranks, each behind a link of its own.

Every rank lives in a network namespace; veth pairs join them to a bridge, and ``tc``'s token bucket limits
what each may send (Linux, root). The work is the forward and backward pass of one block (a GPT-2 with a small
vocabulary) in modes 1d, 2d (2 x 4), 2.5d (2 x 2 x 2) and 3d (2 x 2 x 2), in turns at each bandwidth, on the
same ranks; all must find the same loss.

What is predicted is ``a + b / bandwidth``: *a* is the step's time with no limit, *b* the bytes that a rank
sends by the ledger (the rank that sends most). Two modes cross where their lines do, at
``(b1 - b2) / (a2 - a1)``: below that bandwidth the one that sends less is faster, whatever it costs to
compute in smaller pieces.

Bars: no measured step is further from its prediction than a factor of 1.5; for 2d 2, as gloo hands a panel to
the three others of a row in a tree: its root sends twice, and not all links are busy at a time. Crossings
have no bar: that of lines whose slopes differ by a factor of 2 moves by as much where one of them is off by a
quarter. They are printed as the ledger foretells them, as the bytes do that the links themselves have counted
(more: a sum by gloo onto one of n ranks sends 1 + 1/n times what a chain would), and as the measured curves
show them (straight lines between the points, over 1 / bandwidth; of several the slowest).

    sudo .venv/bin/python benchmarks/links.py --write docs/pictures/links.svg

Timings mean something on a quiet machine alone. Where no namespaces can be made it says so and ends well.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import shutil
import signal
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from _common import Contender, Row, in_turns, slowest_rank, table
from _namespaces import namespaces, on_hosts, shell

import espalier
from espalier.mesh.process import finish, start
from espalier.models import build

RANKS: Final = 8
PLANS: Final[dict[str, dict[str, Any]]] = {
    "1d": {"tensor": RANKS},
    "2d": {"tensor": RANKS, "tensor_mode": "2d"},
    "2.5d": {"tensor": RANKS, "tensor_mode": "2.5d", "depth": 2},
    "3d": {"tensor": RANKS, "tensor_mode": "3d"},
}
ROWS, TOKENS, WIDTH = 16, 128, 128
MEGABITS: Final = (2000, 500, 150, 50)  # a second and rank
NEAR: Final = {"1d": 1.5, "2d": 2.0, "2.5d": 1.5, "3d": 1.5}
LINK: Final = "eth0"


@contextlib.contextmanager
def limited() -> Iterator[list[str]]:
    """A namespace for each rank, its link prepared for a token bucket."""
    with namespaces(RANKS, LINK) as names:
        for name in names:
            # packets small beside the bucket
            shell("ip", "-n", name, "link", "set", LINK, "gso_max_size", "16384")
            limit(100, "-n", name)  # fails here and not on a rank where the kernel has no token bucket
        yield names


def limit(megabits: int | None, *where: str) -> None:
    """Let this namespace, or that of ``-n name``, send no more than so many a second."""
    if megabits is None:
        shell("tc", *where, "qdisc", "delete", "dev", LINK, "root")
    else:
        bucket = ("tbf", "rate", f"{megabits}mbit", "burst", "32kb", "limit", "64mb")
        shell("tc", *where, "qdisc", "replace", "dev", LINK, "root", *bucket)


def contender(engine: espalier.Engine, ids: torch.Tensor, losses: list[float]) -> Contender:
    """Forward and backward of a step, all ranks at once."""

    def work() -> None:
        loss = engine({"input_ids": ids, "labels": ids})
        engine.backward(loss)
        losses[:] = [float(espalier.full_tensor(loss.detach()))]

    def before() -> None:
        engine.zero_grad()
        dist.barrier()

    return Contender(work, before)


def sent() -> int:
    """Bytes that have gone out of this namespace."""
    return int(Path(f"/sys/class/net/{LINK}/statistics/tx_bytes").read_text())


def measure(rounds: int, to: Path) -> None:
    """What each rank runs; rank 0 writes."""
    process = start("cpu")
    try:
        sizes = {"vocab_size": 64, "max_positions": TOKENS, "hidden": WIDTH, "heads": 8, "layers": 1}
        ids = torch.randint(64, (ROWS, TOKENS), generator=torch.Generator().manual_seed(0))
        limit(None)
        contenders, counts, losses = {}, [], []
        for name, plan in PLANS.items():
            torch.manual_seed(0)
            model = build("gpt2", sizes)
            engine = espalier.initialize(model, torch.optim.SGD(model.parameters()), plan)
            loss: list[float] = []
            contenders[name] = each = contender(engine, ids, loss)
            for _ in range(2):
                each.before()
                gone = sent()
                with espalier.ledger(engine.mesh) as book:
                    each.run()
                dist.barrier()
                gone = sent() - gone
            counts.append([sum(book.by_axis().values()), gone])
            losses.append(loss)
        most = torch.tensor(counts)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        times = {}
        for megabits in (None, *MEGABITS):
            if megabits is not None:
                limit(megabits)
            # the step with no limit is in all predictions, and short
            taken = slowest_rank(in_turns(contenders, rounds=rounds if megabits else 3 * rounds, warmup=1))
            times[megabits or 0] = {name: statistics.median(each) for name, each in taken.items()}
        limit(2000)
        found = {"bytes": dict(zip(PLANS, most.tolist(), strict=True)), "times": times, "losses": losses}
        if process.rank == 0:
            to.write_text(json.dumps(found))
    finally:
        finish()


class Found:
    """What was measured, and what follows from it.

    Attributes:
        bytes: by the ledger, of the rank that sends most.
        on_link: the same by the link's own count.
        times: by megabits (0: no limit) and mode, seconds.
    """

    def __init__(self, found: dict[str, Any]) -> None:
        self.bytes = {name: both[0] for name, both in found["bytes"].items()}
        self.on_link = {name: both[1] for name, both in found["bytes"].items()}
        self.times = {int(megabits): times for megabits, times in found["times"].items()}

    def predicted(self, name: str, megabits: float) -> float:
        """Seconds of a step."""
        return float(self.times[0][name]) + self.bytes[name] * 8 / (megabits * 1e6)

    def foretold(self, one: str, other: str, sent: Mapping[str, int]) -> float | None:
        """Megabits at which the lines of so many bytes cross; None where one mode is ahead at all."""
        more, later = sent[one] - sent[other], self.times[0][other] - self.times[0][one]
        return more * 8e-6 / later if more * later > 0 else None

    def crossing(self, one: str, other: str) -> float | None:
        """Megabits at which the measured curves cross; of several the slowest."""
        points = [(0.0, 0), *((1 / megabits, megabits) for megabits in MEGABITS)]
        apart = [(x, self.times[at][one] - self.times[at][other]) for x, at in points]
        for (x, before), (y, after) in reversed(list(itertools.pairwise(apart))):
            if before * after < 0:
                return 1 / (x + (y - x) * before / (before - after))
        return None


def show(found: Found) -> int:
    """Print the tables; how many bars are missed."""
    rows: list[Row] = [("mode", "ledger MB", "link MB", "Mbit/s", "step", "predicted", "ratio", "bar", "")]
    missed = 0
    for name in PLANS:
        first = (name, f"{found.bytes[name] / 1e6:.2f}", f"{found.on_link[name] / 1e6:.2f}")
        rows.append((*first, "no limit", f"{found.times[0][name]:.3f} s", "", "", "", ""))
        for megabits in MEGABITS:
            step, predicted = found.times[megabits][name], found.predicted(name, megabits)
            ratio = step / predicted
            holds = 1 / NEAR[name] <= ratio <= NEAR[name]
            missed += not holds
            line = (str(megabits), f"{step:.3f} s", f"{predicted:.3f} s", f"{ratio:.2f}", f"x {NEAR[name]:g}")
            rows.append(("", "", "", *line, "PASS" if holds else "MISS"))
    print(table(rows, left=(0, 8)))
    rows = [("modes cross at, Mbit/s", "by the ledger", "by the links' bytes", "measured")]
    for one, other in itertools.combinations(PLANS, 2):
        foretold = (found.foretold(one, other, sent) for sent in (found.bytes, found.on_link))
        texts = ["never" if at is None else f"{at:.0f}" for at in (*foretold, found.crossing(one, other))]
        rows.append((f"{one}, {other}", *texts))
    print("\n" + table(rows))
    return missed


def draw(found: Found, to: Path) -> None:
    """Step time over bandwidth: points measured, lines predicted, a ring where lines cross."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    matplotlib.rcParams["svg.hashsalt"] = "espalier"
    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    low, high = min(MEGABITS), max(MEGABITS)
    along = [low * (high / low) ** (i / 100) for i in range(101)]
    for n, name in enumerate(PLANS):
        label = f"{name}: {found.bytes[name] / 1e6:.1f} MB a rank, {found.times[0][name]:.2f} s with no limit"
        axes.plot(along, [found.predicted(name, x) for x in along], color=f"C{n}", linewidth=1)
        axes.plot(MEGABITS, [found.times[x][name] for x in MEGABITS], "o:", color=f"C{n}", label=label)
    for one, other in itertools.combinations(PLANS, 2):
        at = found.foretold(one, other, found.bytes)
        if at is not None and low <= at <= high:
            height = found.predicted(one, at)
            axes.plot(at, height, "o", color="black", fillstyle="none", markersize=11)
            axes.annotate(f"{one}, {other}", (at, height), xytext=(6, 10), textcoords="offset points")
    axes.set(xscale="log", yscale="log", xlabel="Mbit/s that a rank may send", ylabel="seconds a step")
    axes.set_title(
        "points: measured; lines: step with no limit + bytes / bandwidth; rings: where these cross"
    )
    axes.title.set_fontsize(9)
    axes.legend()
    figure.savefig(to, metadata={"Date": None} if to.suffix == ".svg" else None)
    print(f"wrote {to}")


def main() -> int:
    """Make the namespaces, run, print, draw; 1 where a bar is missed."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--write", type=Path, help="the picture's file")
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank is not None:
        measure(given.rounds, given.rank)
        return 0
    lacking = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if os.name != "posix" or os.geteuid() != 0 or lacking:
        print(f"skipped: network namespaces need Linux, root, ip and tc{' (not found)' if lacking else ''}")
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory(prefix="espalier-") as folder, contextlib.ExitStack() as stack:
        try:
            names = stack.enter_context(limited())
        except OSError as error:
            print(f"skipped: no network namespaces here: {error}")
            return 0
        result = Path(folder, "found.json")
        words = (str(Path(__file__).resolve()), "--rank", str(result), "--rounds", str(given.rounds))
        status = on_hosts(names, LINK, *words)
        if status:
            print(f"a rank failed: {status}", file=sys.stderr)
            return 1
        raw = json.loads(result.read_text())
    losses = [loss for (loss,) in raw["losses"]]
    print(
        f"{RANKS} ranks, {ROWS} x {TOKENS} tokens, width {WIDTH}; "
        f"losses {min(losses):.6f} to {max(losses):.6f}\n"
    )
    found = Found(raw)
    missed = show(found) + (max(losses) - min(losses) > 1e-4)
    if given.write is not None:
        draw(found, given.write)
    print(f"{missed} bars missed" if missed else "all bars hold")
    return int(missed > 0)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
