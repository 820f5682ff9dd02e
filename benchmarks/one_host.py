"""Ranks of one host through shared memory, beside peers over gloo and beside themselves over gloo.

Every contestant steps by torch's fused AdamW: the peers are asked for it by hand where Espalier takes it by
itself, so that what is compared is the sending. The contestants take turns step by step in the same
processes, on the same batches; the losses of all are compared with those of one process.

* *tensor*: the GPT of ``benchmarks/_gpts.py`` (4 x 128 and 6 x 384, 2 ranks) by Espalier, by hand as Megatron
  has it, over gloo, and by torch's ``parallelize_module``; *sequence*: with Megatron's sequence parallelism.
* *data*: the GPT of ``benchmarks/_contestants.py`` (4 x 128 and 6 x 384, 2 ranks): stages 0 and 1 beside DDP
  and ``ZeroRedundancyOptimizer``, stage 3 beside FSDP2.
* *pipe*: 1F1B of ``benchmarks/pipeline.py`` (4 x 128, 2 ranks, 4 and 8 micro-batches) beside torch's, and
  beside the loop by hand over the same shared memory.
* *four*: Espalier's plans on four ranks, which the machine's cores share, over shared memory and over gloo.

Of each contestant the table also tells the Python functions that one step calls on the rank that calls most,
and the CPU time of that rank's main thread.

*..., gloo* is Espalier with ``ESPALIER_TRANSPORT=gloo``. A timing begins when all ranks are ready and is that
of the slowest; ratios are medians over the rounds of ratios within a round. *Scatter* is the distance of the
ratio's quartiles from its median, the larger of the two: a bar holds where the median is within it.

    python benchmarks/one_host.py [tensor] [data] [pipe] [four] [--rounds 30] [--write PAGE]
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import _contestants as data_axis
import _gpts
import pipeline as pipes
import torch
import torch.distributed as dist
from _blocks import BATCH, TOKENS
from _common import Contender, Row, Times, duration, in_turns, ratio_of, slowest_rank, table
from torch.distributed.tensor.parallel import loss_parallel

import espalier
from espalier.comm.collectives import carrier
from espalier.comm.gloo import Gloo

ROUNDS, WARM, CHECKED, TOLERANCE = 30, 3, 3, 1e-3
GLOO: Final = ", gloo"

Step = Callable[[int], Any]


class Claim(NamedTuple):
    """``mine`` takes at most ``bar`` times the time of ``other``."""

    mine: str
    other: str
    bar: float


class Result(NamedTuple):
    """Of one contestant: seconds of each round; Python functions called and CPU seconds of a step."""

    seconds: Times
    calls: int
    cpu: float


class Case(NamedTuple):
    """Contestants that take turns, and what is claimed of them."""

    title: str
    axes: dict[str, int]
    build: Callable[[espalier.Mesh], dict[str, Step]]
    claims: tuple[Claim, ...]


# ---- the contestants


def tensor(size: _gpts.Size, mesh: espalier.Mesh) -> dict[str, Step]:
    """Steps of a GPT cut over two ranks."""
    torch.manual_seed(1)
    batch = tuple(torch.randint(0, _gpts.WORDS, (BATCH, TOKENS)) for _ in range(2))
    rank = mesh.rank
    hand = _gpts.ByHand(_gpts.plain(size), rank)
    cut = _gpts.ByHand(_gpts.plain(size), rank, sequence=True)
    fused = partial(_gpts.stepping, batch=batch, kernel="fused")
    theirs = partial(fused, around=loss_parallel)
    ways = {
        "one process": fused(_gpts.plain(size)),
        "by hand": fused(hand),
        "by hand, sequence": fused(cut, finish=cut.finish),
        "torch": theirs(_gpts.by_torch(_gpts.plain(size), sequence=False)),
        "tensor": _gpts.by_espalier(batch, size, mesh),
        "tensor, gloo": _gpts.by_espalier(batch, size, mesh),
        "tensor, sequence": _gpts.by_espalier(batch, size, mesh, sequence_parallel=True),
    }
    return {name: partial(lambda step, number: step(), step) for name, step in ways.items()}


def data(model: str, mesh: espalier.Mesh) -> dict[str, Step]:
    """Steps of the stages and their peers."""
    work = data_axis.Work(data_axis.SIZES[model], mesh)
    ways: dict[str, Callable[..., Step]] = {
        "one process": data_axis.CONTESTANTS["single"],
        "DDP": partial(data_axis.ddp, fused=True),
        "ZeroRedundancyOptimizer": partial(data_axis.redundancy, fused=True),
        "FSDP2": partial(data_axis.fsdp2, fused=True),
        **{f"stage {n}": partial(data_axis.ours, stage=n) for n in (0, 1, 3)},
        **{f"stage {n}{GLOO}": partial(data_axis.ours, stage=n) for n in (0, 3)},
    }
    return {name: mean_of_ranks(name, way(work)) for name, way in ways.items()}


def mean_of_ranks(name: str, step: Step) -> Step:
    """A step that gives the loss of all rows, where ranks have their own: looked at only when checked."""

    def mean(number: int) -> Any:
        loss = step(number)
        if number >= CHECKED:
            return loss
        loss = espalier.full_tensor(loss).clone()
        dist.all_reduce(loss)
        return loss if name == "one process" else loss / dist.get_world_size()

    return mean


class HandOverMemory(pipes.Hand):
    """The loop by hand, which sends as Espalier does."""

    def __init__(self, work: pipes.Work, mesh: espalier.Mesh) -> None:
        super().__init__(work, "1f1b", fused=True)
        self.mesh, self.axis = mesh, mesh.axis("pipe")

    def send(self, x: torch.Tensor, peer: int, tag: int) -> Any:
        x = x.contiguous()
        return carrier(self.mesh, self.axis, x.device).send([x], self.mesh, self.axis, peer, tag)

    def receive(self, x: torch.Tensor, peer: int, tag: int) -> Any:
        return carrier(self.mesh, self.axis, x.device).receive([x], self.mesh, self.axis, peer, tag)


def pipe(micro_batches: int, mesh: espalier.Mesh) -> dict[str, Step]:
    """Steps of 1F1B."""
    work = pipes.Work(mesh.rank, mesh.size(), 4, micro_batches)
    made = {
        "one process": pipes.single(work).step,
        "by hand, gloo": pipes.Hand(work, "1f1b", fused=True).step,
        "by hand, memory": HandOverMemory(work, mesh).step,
        "torch": pipes.theirs(work, "1f1b", fused=True).step,
        "1F1B": pipes.ours(work, "1f1b", mesh).step,
        "1F1B, gloo": pipes.ours(work, "1f1b", mesh).step,
    }
    return {name: summed(step) for name, step in made.items()}


def summed(step: Step) -> Step:
    """A step that gives the loss, which one rank has, on all."""

    def all_have(number: int) -> Any:
        loss = step(number)
        if number >= CHECKED:
            return loss
        loss = loss.clone()
        dist.all_reduce(loss)
        return loss

    return all_have


FOUR: Final[dict[str, dict[str, Any]]] = {
    "stage 0": {"data": 4},
    "stage 2": {"data": 4, "zero": 2},
    "stage 3": {"data": 4, "zero": 3},
    "tensor": {"tensor": 4},
    "tensor, sequence": {"tensor": 4, "sequence_parallel": True},
    "data x tensor": {"data": 2, "tensor": 2},
    "pipe": {"pipe": 4, "accumulate": 8, "schedule": "1f1b"},
    "context": {"context": 4},
}


def plan_of_four(plan: dict[str, Any], mesh: espalier.Mesh) -> dict[str, Step]:
    """One plan, over memory and over gloo; and one process."""
    work = data_axis.Work(data_axis.SIZES["small"], mesh)
    batches = [work.batch(i) for i in range(data_axis.BATCHES)]

    def engine() -> Step:
        model = work.model()
        optimizer = data_axis.adamw(model.parameters())
        made = espalier.initialize(model, optimizer, plan, mesh=mesh)

        def step(number: int) -> Any:
            loss = made.train_step(batches[number % data_axis.BATCHES])
            return espalier.full_tensor(loss) if number < CHECKED else loss

        return step

    if mesh.rank:
        alone: Step = lambda number: torch.zeros(())  # noqa: E731
    else:
        model = work.model()
        alone = data_axis.plain(model, batches, data_axis.adamw(model.parameters(), fused=True))
    return {"one process": summed(alone), "memory": engine(), "gloo": engine()}


# ---- on the ranks


def measure(
    mesh: espalier.Mesh, build: Callable[[espalier.Mesh], dict[str, Step]], rounds: int
) -> dict[str, Result]:
    """Let the contestants run in turns; their losses are those of one process."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    over_gloo = dict.fromkeys((-1, *range(mesh.ndim)), Gloo([], mesh.size()))

    def onto(name: str) -> None:
        mesh.carriers.clear()
        if name.endswith(GLOO) or name == "gloo":
            mesh.carriers.update(over_gloo)

    steps = build(mesh)
    numbers = dict.fromkeys(steps, 0)
    losses: dict[str, list[float]] = {}

    def run(name: str) -> Any:
        numbers[name] += 1
        return steps[name](numbers[name] - 1)

    for name in steps:
        onto(name)
        losses[name] = [float(espalier.full_tensor(torch.as_tensor(run(name)))) for _ in range(CHECKED)]
    for name, found in losses.items():
        off = max(abs(a - b) for a, b in zip(found, losses["one process"], strict=True))
        if not off <= TOLERANCE:
            raise ValueError(f"{name}: a loss is {off:.1e} from that of one process; at most {TOLERANCE:g}")

    def before(name: str) -> None:
        onto(name)
        dist.barrier()

    turns = {name: Contender(partial(run, name), partial(before, name)) for name in steps}
    times = slowest_rank(in_turns(turns, rounds=rounds, warmup=WARM))
    own: list[list[float]] = []
    for turn in turns.values():
        turn.before()
        calls = called_by(turn.run)
        cpu = []
        for _ in range(CHECKED):
            turn.before()
            start = time.thread_time()
            turn.run()
            cpu.append(time.thread_time() - start)
        own.append([calls, statistics.median(cpu)])
    most = torch.tensor(own, dtype=torch.float64)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return {name: Result(times[name], int(most[i, 0]), float(most[i, 1])) for i, name in enumerate(times)}


def called_by(run: Callable[[], object]) -> int:
    """How many Python functions are called, generators resumed too; C++ threads apart."""
    count = 0

    def look(frame: Any, event: str, arg: Any) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(look)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count


# ---- the table


def cases() -> dict[str, list[Case]]:
    """All that is measured, by part."""
    small, large = _gpts.SMALL, _gpts.LARGE
    of_tensor = (
        Claim("tensor", "by hand", 0.72),
        Claim("tensor", "torch", 0.50),
        Claim("tensor, sequence", "by hand, sequence", 0.70),
    )
    of_data = (Claim("stage 0", "DDP", 0.95), Claim("stage 3", "FSDP2", 0.60))
    of_pipe = (Claim("1F1B", "by hand, memory", 1.03), Claim("1F1B", "torch", 0.97))
    two = {"data": 1, "tensor": 1}
    return {
        "tensor": [
            Case(f"tensor, GPT {size}", two | {"tensor": 2}, partial(tensor, size), claims)
            for size, claims in ((small, of_tensor), (large, (Claim("tensor", "by hand", 0.90),)))
        ],
        "data": [
            Case(f"data, GPT {size}", two | {"data": 2}, partial(data, model), claims)
            for size, model, claims in (
                (small, "small", of_data),
                (large, "large", (Claim("stage 0", "DDP", 0.99),)),
            )
        ],
        "pipe": [
            Case(f"1F1B, GPT {small}, {m} micro-batches", two | {"pipe": 2}, partial(pipe, m), of_pipe)
            for m in (4, 8)
        ],
        "four": [
            Case(
                f"{name}, 4 ranks",
                dict(espalier.Plan.from_dict(plan).axes),
                partial(plan_of_four, plan),
                (Claim("memory", "gloo", 1.0),),
            )
            for name, plan in FOUR.items()
        ],
    }


def scatter(times: dict[str, Times], claim: Claim) -> float:
    """How far the quartiles of a ratio are from its median, at most."""
    ratios = sorted(a / b for a, b in zip(times[claim.mine], times[claim.other], strict=True))
    if len(ratios) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(ratios, n=4)
    return max(middle - low, high - middle)


def main() -> int:
    """Measure, print, perhaps write; 1 if a bar was missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parts = cases()
    parser.add_argument("parts", nargs="*", choices=[[], *parts], default=[], help="by default all")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--write", metavar="FILE", help="a Markdown page of the tables")
    asked = parser.parse_args()
    times: list[Row] = [("work", "", "step", "over one process", "Python calls", "CPU of a rank")]
    bars: list[Row] = [("work", "", "against", "ratio", "scatter", "bar", "")]
    missed = 0
    for case in (case for part in asked.parts or parts for case in parts[part]):
        results = espalier.spawn(measure, case.axes, case.build, asked.rounds)[0]
        got = {name: result.seconds for name, result in results.items()}
        for name, result in results.items():
            over = f"{ratio_of(got, name, 'one process'):.2f}"
            step = duration(statistics.median(result.seconds))
            times.append((case.title, name, step, over, f"{result.calls:,}", duration(result.cpu)))
        for claim in case.claims:
            ratio, around = ratio_of(got, claim.mine, claim.other), scatter(got, claim)
            verdict = (
                "PASS" if ratio <= claim.bar else "PASS (scatter)" if ratio - around <= claim.bar else "MISS"
            )
            missed += verdict == "MISS"
            words = f"{ratio:.2f}", f"{around:.2f}", f"<= {claim.bar:g}", verdict
            bars.append((case.title, claim.mine, claim.other, *words))
            print("  ".join(bars[-1]), flush=True)
    print("", table(times, left=(0, 1)), table(bars, left=(0, 1, 2, 6)), sep="\n\n")
    print(f"\n{len(bars) - 1 - missed} of {len(bars) - 1} bars hold")
    if asked.write:
        with open(asked.write, "w", encoding="utf-8") as page:
            page.write("\n\n".join([introduction(), markdown(bars), "## All times", markdown(times)]) + "\n")
    return 1 if missed else 0


def introduction() -> str:
    """The head of the page."""
    command = " ".join(["python benchmarks/one_host.py", *sys.argv[1:]])
    return f"""# Figures of one host

Ranks of one host through the memory that they share, beside peers over gloo (torch {torch.__version__}), in
one run of

    {command}

on {os.cpu_count()} CPU cores, one thread a rank, everybody with torch's fused AdamW. The head of that file
says what is compared. *Scatter* is how far the quartiles of a ratio lie from its median; a bar holds where
the median is within it. *Python calls* are the Python functions of a step on the rank with most.

## Bars"""


def markdown(rows: Sequence[Row]) -> str:
    """A table for the docs."""
    head, *rest = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([head, "|" + "---|" * len(rows[0]), *rest])


if __name__ == "__main__":
    sys.exit(main())
