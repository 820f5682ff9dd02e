"""Tensor parallelism over two gloo ranks: Espalier, a block written by hand, torch, megatron-core.

*blocks*: the work is the forward and backward pass of one pre-norm transformer block: 8 heads, an MLP of four
times the width, batch 8, 128 tokens, float32, fused attention, one thread a rank. Its input needs a
gradient, as that of any block but the first does. ``benchmarks/_blocks.py`` has the contestants:

* *by hand*: two autograd functions, f (identity forward, all-reduce backward) and g (the reverse), around
  linear layers of local size, as in Shoeybi et al. 2019. Plain tensors, four all-reduces, in place; no
  library between the code and c10d. This is what Espalier is held to.
* *Espalier*: the plain block, ``espalier.initialize`` with ``layouts=``; nothing in the block is changed.
  It sends the same four all-reduces.
* *torch*: ``parallelize_module`` with ``ColwiseParallel`` and ``RowwiseParallel``, as its users write them:
  local tensors between the layers, and a block that views its heads by ``-1``. Backward, q, k and v each
  reduce their input's gradient: six all-reduces. *torch, prepared*: with ``PrepareModuleInput`` around
  attention besides, which is the remedy for that where attention is a module of its own.
* *megatron-core*: its ColumnParallelLinear and RowParallelLinear, if installed. Q, K and V each reduce too.
* *..., sequence*: the same with Megatron's sequence parallelism (Korthikanti et al. 2022): the input is cut
  along the sequence. By hand, as in megatron-core, what is gathered is kept as a shard; torch's
  ``SequenceParallel`` keeps the whole.
  megatron-core's needs a GPU.

*gpt*: the work is a step of training (forward, backward, AdamW) of a whole GPT of such blocks, causal, with
embedding, head and cross-entropy cut over the vocabulary (``benchmarks/_gpts.py``). At width 128 what lies
around the products weighs more. Losses of some steps are compared with those of one process. All others step
by torch's AdamW with ``foreach=True``, which is faster here than its default on a CPU, a loop; Espalier is
given ``AdamW(model.parameters(), rate)`` and takes torch's fused kernel by itself. Besides, it computes the
gradients' norm.

Before anything is timed, outputs, the input's gradient and all parameters' gradients of all
are compared with those of the same block on one process.

A timing begins when both ranks are ready and is that of the slower rank.

    python benchmarks/tensor_axis.py [blocks] [gpt]
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Iterable, Sequence

import _gpts
import torch
from _blocks import (
    BATCH,
    RANKS,
    TOKENS,
    Block,
    Entrant,
    Megatron,
    MegatronCore,
    by_espalier,
    by_torch,
)
from _common import MISSED, Report, Times, in_turns, on_ranks, slowest_rank
from torch.distributed.tensor import Replicate, Shard

import espalier
from espalier.mesh.process import finish, start

WIDTHS, ROUNDS = (256, 512), 40


def entrants(whole: Block, x: torch.Tensor, upstream: torch.Tensor, rank: int) -> dict[str, Entrant]:
    """All that are able to enter here."""
    laid_out = by_espalier(whole)
    mesh = laid_out.mesh
    tensor = mesh.axis("tensor")

    def typed(x: torch.Tensor, *, cut: bool) -> torch.Tensor:
        there = [Shard(1) if cut and axis == tensor else Replicate() for axis in range(mesh.ndim)]
        return espalier.distribute_tensor(x, mesh, there)

    def part(x: torch.Tensor) -> torch.Tensor:
        return x.chunk(RANKS, 1)[rank].clone()

    alone, sequence = Megatron(whole, rank), Megatron(whole, rank, sequence=True)
    found = {
        "by hand": Entrant(alone, x.clone(), upstream),
        "Espalier": Entrant(laid_out, typed(x, cut=False), typed(upstream, cut=False)),
        "torch": Entrant(by_torch(whole), x.clone(), upstream),
        "torch, prepared": Entrant(by_torch(whole, prepared=True), x.clone(), upstream),
        "by hand, sequence": Entrant(sequence, part(x), part(upstream), cut=True, finish=sequence.finish),
        "Espalier, sequence": Entrant(
            by_espalier(whole, sequence=True), typed(x, cut=True), typed(upstream, cut=True), cut=True
        ),
        "torch, sequence": Entrant(by_torch(whole, sequence=True), part(x), part(upstream), cut=True),
    }
    if _has_megatron():
        found["megatron-core"] = Entrant(MegatronCore(whole, rank), x.clone(), upstream)
    return found


BARS = (
    ("Espalier", "by hand", 1.10),
    ("Espalier", "torch", 0.70),
    ("Espalier", "torch, prepared", None),
    ("Espalier", "megatron-core", 1.0),
    ("Espalier, sequence", "by hand, sequence", 1.10),
    ("Espalier, sequence", "torch, sequence", 0.70),
    ("torch", "by hand", None),
    ("torch, sequence", "by hand, sequence", None),
    ("megatron-core", "by hand", None),
)


GPT_BARS = (
    *(bar for bar in BARS if "prepared" not in bar[1]),
    ("by hand", "one process", None),
    ("Espalier", "one process", None),
)


def blocks(report: Report, rank: int) -> None:
    """One block, of each width."""
    for width in WIDTHS:
        torch.manual_seed(0)
        whole, x, upstream = (
            Block(width),
            torch.randn(BATCH, TOKENS, width),
            torch.randn(BATCH, TOKENS, width),
        )
        found = entrants(whole, x, upstream, rank)
        for name, entrant in found.items():
            entrant.check(name, whole, x, upstream, rank)
        contenders = {name: entrant.contender() for name, entrant in found.items()}
        times = slowest_rank(in_turns(contenders, rounds=ROUNDS, warmup=3))
        _judge(report, f"block of width {width}, {RANKS} ranks", times, BARS)


def gpt(report: Report, rank: int) -> None:
    """A whole GPT, with its optimizer."""
    torch.manual_seed(1)
    found = _gpts.entrants(rank, _has_megatron())
    _gpts.check(found, steps=4, tolerance=1e-4)
    times = slowest_rank(in_turns({k: _gpts.contender(v) for k, v in found.items()}, rounds=ROUNDS, warmup=3))
    _judge(report, f"GPT of {_gpts.SMALL}, {RANKS} ranks", times, GPT_BARS)


def _judge(
    report: Report, work: str, times: dict[str, Times], bars: Iterable[tuple[str, str, float | None]]
) -> None:
    for mine, other, limit in bars:
        if mine in times and other in times:
            report.add(work, times, mine, other, limit)


def _has_megatron() -> bool:
    if importlib.util.find_spec("megatron") is None:
        return False
    from megatron.core import parallel_state

    if not parallel_state.is_initialized():
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=RANKS)
    return True


PARTS = {"blocks": blocks, "gpt": gpt}


def compare(parts: Sequence[str]) -> int:
    """What each rank runs; rank 0 prints."""
    process = start("cpu")
    torch.set_num_threads(1)
    report = Report()
    for part in parts:
        PARTS[part](report, process.rank)
    status = 0
    if process.rank == 0:
        print("outputs and gradients, and the GPT's losses, agree with those of one process\n")
        status = MISSED if report.show() else 0
    finish()
    return status


def main() -> int:
    """Start the ranks; the exit status is rank 0's."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], default=[], help="by default both")
    given = parser.parse_args()
    parts = given.parts or list(PARTS)
    if given.rank:
        return compare(parts)
    if importlib.util.find_spec("megatron") is None:
        print("megatron-core is not installed: it is left out (pip install --no-deps megatron-core)\n")
    return on_ranks(__file__, RANKS, *parts)


if __name__ == "__main__":
    sys.exit(main())
