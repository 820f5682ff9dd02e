"""Compiled: ``espalier.compile`` beside ``torch.compile`` of the plain block, and beside itself uncompiled.

The work is that of ``_blocks.py``: forward and backward pass of one transformer block of width
256, one thread a rank. Inductor compiles for the CPU, so a C++ compiler must be there.

* On one process, mesh of one rank: nothing is sent, and the graph that is recorded is that of the plain
  block. What Espalier adds is the look at its inputs on each call: at most a tenth.
* On two gloo ranks, cut as ``tensor_axis.py`` cuts: the same four all-reduces, now inside the
  compiled graphs. Compiled must not be slower than uncompiled.

* On one process, a GPT of 12 equal blocks, each compiled: two steps from nothing, after which all is
  compiled. Blocks that are alike are compiled once, as torch's are: at most a tenth more than those take.

Before steps are timed, outputs and gradients are compared with those of the plain block.
The first step of each, compilation included, is timed once; caches on disk are left out of it.

    python benchmarks/compile.py
"""

from __future__ import annotations

import os
import sys
import time
from copy import deepcopy

# no kernels from earlier runs: a first step is to be that of a new program; torch reads it when imported
os.environ.setdefault("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "1")

import torch
import torch.distributed as dist
from _blocks import BATCH, COLUMN, RANKS, ROW, TOKENS, Block, Entrant
from _common import MISSED, Contender, Report, in_turns, on_ranks, slowest_rank
from torch import nn

import espalier
from espalier.mesh.process import finish, start
from espalier.models import build

WIDTH, ROUNDS = 256, 60
SIZES = {"vocab_size": 256, "max_positions": 32, "hidden": 64, "heads": 4}
LAYERS, COMPILATIONS = 12, 2


def laid_out(whole: Block, ranks: int, *, compiled: bool) -> tuple[nn.Module, espalier.Mesh]:
    """The block on a mesh of so many ranks."""
    layouts = dict.fromkeys(COLUMN, "column") | dict.fromkeys(ROW, "row")
    engine = espalier.initialize(deepcopy(whole), plan={"tensor": ranks}, layouts=layouts)
    return (espalier.compile(engine.module) if compiled else engine.module), engine.mesh


def compare(ranks: int) -> int:
    """What each rank runs; rank 0 prints."""
    rank = start("cpu").rank if ranks > 1 else 0
    torch.set_num_threads(1)
    torch.manual_seed(0)
    whole, x, upstream = Block(WIDTH), torch.randn(BATCH, TOKENS, WIDTH), torch.randn(BATCH, TOKENS, WIDTH)
    ready = dist.barrier if ranks > 1 else bool
    entrants: dict[str, Entrant] = {}
    for name, compiled in (("Espalier", False), ("Espalier, compiled", True)):
        block, mesh = laid_out(whole, ranks, compiled=compiled)
        laid = (espalier.distribute_tensor(t, mesh) for t in (x, upstream))
        entrants[name] = Entrant(block, *laid, ready=ready)
    if ranks == 1:
        entrants["plain"] = Entrant(deepcopy(whole), x.clone(), upstream, ready=ready)
        plain = deepcopy(whole)
        plain.compile()
        entrants["plain, compiled"] = Entrant(plain, x.clone(), upstream, ready=ready)
    first = {}
    for name, entrant in entrants.items():
        begin = time.perf_counter()
        entrant.contender().run()
        first[name] = time.perf_counter() - begin
        entrant.check(name, whole, x, upstream, rank, ranks)
    times = in_turns(
        {name: entrant.contender() for name, entrant in entrants.items()}, rounds=ROUNDS, warmup=3
    )
    status = 0
    times = slowest_rank(times) if ranks > 1 else times
    if rank == 0:
        report, work = Report(), f"block of width {WIDTH}, {ranks} rank(s)"
        if ranks == 1:
            report.add(work, times, "Espalier, compiled", "plain, compiled", 1.10)
            report.add(work, times, "plain, compiled", "plain")
            report.add(work, times, "Espalier", "plain")
        report.add(work, times, "Espalier, compiled", "Espalier", 1.0 if ranks > 1 else None)
        status = MISSED if report.show() else 0
        shown = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in first.items())
        print(f"first step: {shown}\n", flush=True)
    if ranks > 1:
        finish()
    return status


def equal_blocks(by_espalier: bool, layers: int) -> Contender:
    """Two steps of a new GPT with compiled blocks; the first of ours is recorded, not run as graphs."""
    ids = torch.randint(0, SIZES["vocab_size"], (2, SIZES["max_positions"]))
    batch = {"input_ids": ids, "labels": ids}

    def run() -> None:
        model = build("gpt", SIZES | {"layers": layers})
        optimizer = torch.optim.AdamW(model.parameters())
        if by_espalier:
            engine = espalier.initialize(model, optimizer, {}, compile=True)
            for _ in range(2):
                engine.train_step(batch)
            return
        for block in model.get_submodule("blocks").children():
            block.compile()
        for _ in range(2):
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    return Contender(run, torch.compiler.reset)


def compilation() -> int:
    """Time until all blocks of a model are compiled."""
    several, one = f"Espalier, {LAYERS} blocks", "Espalier, 1 block"
    contenders = {
        several: equal_blocks(True, LAYERS),
        one: equal_blocks(True, 1),
        "torch": equal_blocks(False, LAYERS),
    }
    times = in_turns(contenders, rounds=COMPILATIONS, warmup=1)
    report, work = Report(), "compilation of a GPT's blocks"
    report.add(work, times, several, "torch", 1.10)
    report.add(work, times, several, one)
    return MISSED if report.show() else 0


def main() -> int:
    """One process, then two ranks; the exit status is 1 if a bar was missed."""
    status = max(compare(1), compilation())
    return on_ranks(__file__, RANKS) or int(bool(status))


if __name__ == "__main__":
    sys.exit(compare(RANKS) if "--rank" in sys.argv else main())
