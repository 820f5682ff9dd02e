"""Two hosts with two ranks each: one rank a host speaks for it, or each for itself.

The hosts are network namespaces joined by a bridge; ``tc``'s token bucket limits what each may send (Linux,
root). A GPT is trained on four ranks, as Espalier does it (memory within a host, gloo between) and by gloo
alone, in turns, on the same ranks: data parallelism (stage 0) and ZeRO-3.

Bars: the same losses; what the links have counted is at most 5 % more than the ledger tells of a step
(packets' heads); half of what goes out by gloo alone; and at a limit of 200 Mbit/s a step takes at most 0.75
of its time.

    sudo .venv/bin/python benchmarks/two_hosts.py

Where no namespaces can be made it says so and ends well.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist
from _common import Contender, Row, in_turns, slowest_rank, table
from _namespaces import namespaces, on_hosts, shell
from links import LINK, limit, sent

import espalier
from espalier.comm.collectives import carrier
from espalier.comm.gloo import Gloo
from espalier.mesh.process import finish, start
from espalier.models import build

HOSTS, RANKS, ROUNDS, MEGABITS = 2, 4, 5, 200
PLANS: Final = {"stage 0": {"data": RANKS}, "ZeRO-3": {"data": RANKS, "zero": 3}}
SIZES: Final = {"vocab_size": 512, "max_positions": 64, "hidden": 256, "heads": 8, "layers": 4}
WIRE, HALF, FASTER = 1.05, 0.52, 0.75


def contender(plan: dict[str, int], *, flat: bool) -> tuple[espalier.Engine, Contender, list[float]]:
    """A step of training; ``flat``: by gloo alone."""
    torch.manual_seed(0)
    model = build("gpt2", SIZES)
    engine = espalier.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), plan)
    here = engine.mesh.rank // (RANKS // HOSTS)
    away = [i for i in range(RANKS) if i // (RANKS // HOSTS) != here]
    axes = (-1, *range(engine.mesh.ndim))
    ids = torch.randint(512, (8, 64), generator=torch.Generator().manual_seed(0))
    losses: list[float] = []

    def work() -> None:
        losses.append(float(engine.train_step({"input_ids": ids, "labels": ids})))

    def before() -> None:
        # engines of one plan share a mesh
        engine.mesh.carriers.clear()
        if flat:
            engine.mesh.carriers.update(dict.fromkeys(axes, Gloo(away, RANKS)))
        carrier(engine.mesh, 0, torch.device("cpu"))
        dist.barrier()

    return engine, Contender(work, before), losses


def measure(to: Path) -> None:
    """What each rank runs; rank 0 writes."""
    process = start("cpu")
    found = {}
    try:
        for name, plan in PLANS.items():
            made = {way: contender(plan, flat=way == "gloo") for way in ("hosts", "gloo")}
            counts = []
            for engine, each, _ in made.values():
                for _ in range(2):
                    each.before()
                    gone = sent()
                    with espalier.ledger(engine.mesh) as book:
                        each.run()
                    dist.barrier()
                    gone = sent() - gone
                counts.append([sum(book.beyond_host.values()), gone])
            # the ledger's are of a rank, the link's of its host
            told = torch.tensor([count[0] for count in counts])
            dist.all_reduce(told)
            most = torch.tensor([count[1] for count in counts])
            dist.all_reduce(most, dist.ReduceOp.MAX)
            if process.local_rank == 0:
                limit(MEGABITS)
            contenders = {way: each for way, (_, each, _) in made.items()}
            taken = slowest_rank(in_turns(contenders, rounds=ROUNDS, warmup=1))
            dist.barrier()
            if process.local_rank == 0:
                limit(None)
            found[name] = {
                way: {
                    "ledger": told[i].item() // HOSTS,
                    "link": most[i].item(),
                    "seconds": statistics.median(taken[way]),
                    "losses": made[way][2],
                }
                for i, way in enumerate(made)
            }
        if process.rank == 0:
            to.write_text(json.dumps(found))
    finally:
        finish()


def show(raw: dict[str, dict[str, dict[str, float]]]) -> int:
    """Print the tables; gives the number of bars missed."""
    rows: list[Row] = [
        ("plan", "way", "MB a host by the ledger", "on its link", f"s a step, {MEGABITS} Mbit/s")
    ]
    bars: list[Row] = [("plan", "what", "found", "bar", "")]
    missed = 0
    for name, ways in raw.items():
        for way, got in ways.items():
            told, gone = got["ledger"] / 1e6, got["link"] / 1e6
            rows.append((name, way, f"{told:.2f}", f"{gone:.2f}", f"{got['seconds']:.3f}"))
        ours, flat = ways["hosts"], ways["gloo"]
        far = max(abs(a - b) for a, b in zip(ours["losses"], flat["losses"], strict=True))  # type: ignore[call-overload]
        for what, value, bar in (
            ("bytes on the link, of the ledger's", ours["link"] / ours["ledger"], WIRE),
            ("bytes on the link, of gloo's", ours["link"] / flat["link"], HALF),
            ("time of gloo's", ours["seconds"] / flat["seconds"], FASTER),
            ("largest difference of losses", far, 1e-4),
        ):
            bars.append((name, what, f"{value:.3g}", f"<= {bar:g}", "PASS" if value <= bar else "MISS"))
            missed += value > bar
    print(table(rows, left=(0, 1)), table(bars, left=(0, 1, 4)), sep="\n\n")
    return missed


def main() -> int:
    """Make the hosts, run, print; 1 where a bar is missed."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank is not None:
        measure(given.rank)
        return 0
    lacking = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if os.name != "posix" or os.geteuid() != 0 or lacking:
        print(f"skipped: network namespaces need Linux, root, ip and tc{' (not found)' if lacking else ''}")
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory(prefix="espalier-") as folder, contextlib.ExitStack() as stack:
        try:
            names = stack.enter_context(namespaces(HOSTS, LINK))
            for name in names:
                # packets small beside the bucket
                shell("ip", "-n", name, "link", "set", LINK, "gso_max_size", "16384")
                limit(MEGABITS, "-n", name)  # fails here, and not on a rank
                limit(None, "-n", name)
        except OSError as error:
            print(f"skipped: no network namespaces here: {error}")
            return 0
        result = Path(folder, "found.json")
        each = [names[rank * HOSTS // RANKS] for rank in range(RANKS)]
        if on_hosts(each, LINK, str(Path(__file__).resolve()), "--rank", str(result)):
            print("a rank failed", file=sys.stderr)
            return 1
        missed = show(json.loads(result.read_text()))
    print(f"\n{missed} bars missed" if missed else "\nall bars hold")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
