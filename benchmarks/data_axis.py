"""Training along the data axis: Espalier's stages 0 to 3 beside their peers, on 2 and 4 gloo ranks.

Two plain GPTs (4 layers of width 128 and 128 tokens, 6 of 384 and 256 tokens; vocabulary 2,048, head
tied to the embedding), batch 4 a rank, float32, ``torch.optim.AdamW(parameters, lr)`` for all, one thread a
rank. The contestants take turns step by step in the same processes, on the same batches; the losses of all
steps are compared with those of one process that has the whole batch.

What the user writes is the same for all; what is done differs in one thing more than the sending: torch takes
a loop over parameters for such an optimizer on the CPU, and Espalier picks torch's fused kernel itself. The
bars compare what a user gets. *ddp-fused* and *fsdp2-fused* are the peers with that kernel asked for by hand.

* *single*: that process.
* *alone*, *alone, its share*: each rank computes with its rows and sends nothing; the optimizer updates
  all parameters, or one n-th of them.
* *flat*: gradients in one buffer, reduced by hand after backward.
* *ddp*, *redundancy*: torch's ``DistributedDataParallel``, alone and with ``ZeroRedundancyOptimizer``.
* *fsdp1*, *fsdp2*, *fsdp2-kept*: torch's FSDP, a unit a block; *kept*: without resharding after forward.
* *deepspeed1* to *3*: DeepSpeed's engine, where it is installed.
* *zero0* to *3*: ``espalier.initialize(model, optimizer, {"data": n, "zero": ...})``.

A timing begins when all ranks are ready and is that of the slowest. Ratios are medians over the rounds of
ratios within a round. Memory is the peak in a step of
all storages that operations have given since the contestant was built and that still live: parameters,
gradients, states, buffers, activations; what a kernel or c10d's threads use inside themselves is not seen. It
is that of the rank that has the most. Bytes are those that the kernel's loopback carried in a step, a rank,
as rank 0 saw them: the median over the steps.
*To the limit* is the step's time over that of *alone* (from ZeRO-1 on: *its share*) and the bytes at the
rate that gloo reaches here with large buffers.

    python benchmarks/data_axis.py [--world 2] [--model small] [--only zero3 fsdp2] [--seconds 240]
        [--write PAGE]
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from _common import Contender, Section, duration, in_turns, ratio_of, slowest_rank
from _contestants import CONTESTANTS, SIZES, Step, Work, able
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import espalier

SECONDS = 40.0  # of timing, for each model and number of ranks, if not said otherwise
MOST, FEWEST = 30, 3  # rounds
WARM = 3  # steps before
TOLERANCE = 1e-3
LOOPBACK = Path("/sys/class/net/lo/statistics/tx_bytes")


class Rival(NamedTuple):
    """A claim: ``mine`` takes at most ``small`` (``large``) times the time of ``other``, and less memory."""

    mine: str
    other: str
    small: float
    large: float


RIVALS = (
    Rival("zero0", "ddp", 1.0, 1.0),
    Rival("zero1", "redundancy", 1.0, 1.0),
    Rival("zero2", "fsdp2-kept", 0.8, 0.8),
    Rival("zero3", "fsdp2", 0.65, 0.9),
    *(Rival(f"zero{n}", f"deepspeed{n}", 1.0, 1.0) for n in (1, 2, 3)),
)


class Result(NamedTuple):
    """Of one contestant: seconds of each round, peak bytes, bytes sent a step and rank, losses."""

    seconds: list[float]
    peak: int
    sent: float
    losses: list[float]


# ---- on the ranks


def measure(
    mesh: espalier.Mesh, model: str, names: Sequence[str], budget: float
) -> tuple[dict[str, Result], float]:
    """Build the contestants and let them run in turns, ``budget`` seconds; with gloo's bytes a second."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    work = Work(SIZES[model], mesh)
    speed = bandwidth(mesh)
    steps: dict[str, Counting] = {}
    peaks = {}
    for name in names:
        steps[name], peaks[name] = built(CONTESTANTS[name], work)
    turns = {name: Contender(step, dist.barrier) for name, step in steps.items()}
    start = time.perf_counter()
    times = in_turns(turns, rounds=FEWEST, warmup=0)
    each = (time.perf_counter() - start) / FEWEST
    more = torch.tensor(min(MOST, int(budget / each)) - FEWEST)
    dist.broadcast(more, 0)
    if more > 0:
        for name, seconds in in_turns(turns, rounds=int(more), warmup=0).items():
            times[name] += seconds
    times = slowest_rank(times)
    most = torch.tensor([peaks[name] for name in names])
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return {
        name: Result(
            times[name],
            int(peak),
            statistics.median(steps[name].sent[WARM:]) / work.ranks,
            mean_losses(name, steps[name]),
        )
        for name, peak in zip(names, most.tolist(), strict=True)
    }, speed


class Counting:
    """A step that goes through the batches and keeps the losses, and how much the loopback sent meanwhile."""

    def __init__(self, step: Step) -> None:
        self._step = step
        self.losses: list[torch.Tensor] = []
        self.sent: list[float] = []

    def __call__(self) -> None:
        """The next step."""
        before = loopback()
        self.losses.append(self._step(len(self.losses)))
        self.sent.append(loopback() - before)


def loopback() -> float:
    """Bytes that the kernel's loopback has sent so far, whoever they are from."""
    return float(LOOPBACK.read_text()) if LOOPBACK.exists() else float("nan")


def built(contestant: Callable[[Work], Step], work: Work) -> tuple[Counting, int]:
    """A contestant that has warmed up, and its peak bytes in the last step of that."""
    gc.collect()
    with Live() as live:
        step = Counting(contestant(work))
        for _ in range(WARM):
            gc.collect()
            dist.barrier()
            live.peak = 0
            step()
    return step, live.peak


class Live(TorchDispatchMode):
    """Follows every storage that an operation gives; ``peak`` is the most bytes that have lived at once."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._held: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """After each operation add up what lives: storages may have been resized."""
        if any(issubclass(kind, TorchDTensor) for kind in types):
            return NotImplemented  # it comes back with the local tensors
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **(kwargs or {}))
            for x in tree_leaves(out):
                if isinstance(x, torch.Tensor) and not isinstance(x, TorchDTensor):
                    storage = x.untyped_storage()
                    self._held[id(storage)] = weakref.ref(storage)
        alive = [(key, storage) for key, held in self._held.items() if (storage := held()) is not None]
        self._held = {key: self._held[key] for key, _ in alive}
        self.peak = max(self.peak, sum(storage.nbytes() for _, storage in alive))
        return out


def bandwidth(mesh: espalier.Mesh, megabytes: int = 16) -> float:
    """Bytes a second that each rank sends in gloo's all-gather of large buffers; the best of some."""
    n, best = mesh.size(), 0.0
    own = torch.ones(megabytes * 1_000_000 // 4 // n)
    rows = torch.empty(n * own.numel())
    for _ in range(8):
        dist.barrier()
        start = time.perf_counter()
        dist.all_gather_into_tensor(rows, own)
        best = max(best, (n - 1) * own.nbytes / (time.perf_counter() - start))
    slowest = torch.tensor(best, dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MIN)
    return float(slowest)


def mean_losses(name: str, step: Counting) -> list[float]:
    """Of all rows, for each step."""
    losses = torch.stack([espalier.full_tensor(x) for x in step.losses])
    dist.all_reduce(losses)
    return (losses if name == "single" else losses / dist.get_world_size()).tolist()


# ---- the table


def compared(model: str, ranks: int, names: Sequence[str], budget: float) -> Section:
    """Measure one model on so many ranks, for ``budget`` seconds or a few rounds."""
    results, speed = espalier.spawn(measure, {"data": ranks, "tensor": 1}, model, names, budget)[0]
    size = SIZES[model]
    section = Section(
        f"{size.layers} layers of {size.hidden}, {ranks} ranks",
        f"{size.sequence} tokens, batch {4 * ranks}; {len(results['single'].seconds)} rounds; gloo sends "
        f"{speed / 1e9:.2f} GB/s a rank.",
        [("", "step", "over single", "peak memory", "sent a rank", "to the limit")],
    )
    seconds = {name: result.seconds for name, result in results.items()}
    for name, result in results.items():
        check(name, result.losses, results["single"].losses)
        taken = statistics.median(result.seconds)
        shared = name[-1] in "123" or name.startswith(("redundancy", "fsdp2"))
        least = statistics.median(seconds["alone, its share" if shared else "alone"]) + result.sent / speed
        section.rows.append(
            (
                name,
                duration(taken),
                f"{ratio_of(seconds, name, 'single'):.2f}",
                f"{result.peak / 1e6:.1f} MB",
                f"{result.sent / 1e6:.2f} MB",
                "" if name in ("single", "alone", "alone, its share") else f"{taken / least:.2f}",
            )
        )
    for rival in RIVALS:
        if rival.mine in results and rival.other in results:
            limit = rival.small if model == "small" else rival.large
            section.bar(
                f"time of {rival.mine} over {rival.other}",
                ratio_of(seconds, rival.mine, rival.other),
                limit,
            )
            peak = results[rival.mine].peak / results[rival.other].peak
            section.bar(f"peak memory of {rival.mine} over {rival.other}", peak, 1.0)
    return section


def check(name: str, losses: Sequence[float], expected: Sequence[float]) -> None:
    """Every step's loss is that of one process."""
    if name.startswith("alone"):
        return
    off = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
    if not off <= TOLERANCE:
        raise ValueError(f"{name}: a loss is {off:.1e} away from that of one process; at most {TOLERANCE:g}")


def main() -> int:
    """Measure, print, perhaps write; 1 if a bar was missed."""
    parser = argparse.ArgumentParser(description="Training along the data axis, beside the peers.")
    parser.add_argument("--world", nargs="*", type=int, default=[2, 4], metavar="RANKS")
    parser.add_argument("--model", nargs="*", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--only", nargs="*", metavar="CONTESTANT", help="of: " + ", ".join(CONTESTANTS))
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of timing, for each table")
    parser.add_argument("--write", metavar="FILE", help="a Markdown page of the tables")
    asked = parser.parse_args()
    wanted = ["single", "alone", "alone, its share", *(asked.only or CONTESTANTS)]
    names = [name for name in CONTESTANTS if name in wanted and able(name)]
    if any(name in wanted and not able(name) for name in CONTESTANTS):
        print("DeepSpeed is not installed and left out; with it: pip install deepspeed==0.19.0")
    before, sections = os.getloadavg()[0], []
    for model in asked.model:
        for ranks in asked.world:
            sections.append(compared(model, ranks, names, asked.seconds))
            print(sections[-1].text(), flush=True)
    missed = sum(s.missed for s in sections)
    print(f"{sum(len(s.bars) for s in sections) - missed} of {sum(len(s.bars) for s in sections)} bars hold")
    if asked.write:
        with open(asked.write, "w", encoding="utf-8") as page:
            command = " ".join(["python benchmarks/data_axis.py", *sys.argv[1:]])
            introduction = INTRODUCTION.format(command=command, before=before, after=os.getloadavg()[0])
            page.write("\n".join([introduction, *(s.markdown() for s in sections)]))
    return 1 if missed else 0


INTRODUCTION = f"""# Figures of the data axis

Espalier's ZeRO stages beside their peers (torch {torch.__version__}, DeepSpeed 0.19.0), in one run of

    {{command}}

on two CPU cores, one thread a rank, gloo over the loopback. On four ranks each core serves two. The head of
that file says what the contestants are and how each figure is taken. The machine's load average was
{{before:.1f}} before the run and {{after:.1f}} after it (the ranks themselves make 2 to 4); what else runs
there slows all down, and moves the ratios.
"""

if __name__ == "__main__":
    sys.exit(main())
