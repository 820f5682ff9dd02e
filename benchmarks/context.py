"""The context axis: how long a sequence may be, who works how much, what is sent, and how long it takes.

On dry meshes, any machine:

* the peak of a rank as a sequence and the ranks that share it grow together (bar: eight times the sequence
  on eight ranks at 1.1 times the peak of one), ring, Ulysses and gathered keys and values side by side;
* the work of the ranks on a causal sequence, if each does its own and if they help each other (bar: the
  busiest does at most 1.03 times the mean);
* a BERT under one memory cap: the largest batch and the longest sequence by 1D tensor parallelism, with and
  without sequence parallelism, and by the bidirectional ring (Li et al., 2021), with and without ZeRO 3 along
  its axis (bar: on 16 ranks and more the ring's sequence is at least as long; on few its whole head weighs).

On real gloo ranks: the same peak, measured over all tensors of a step on eight ranks; and, with ``--times``,
the ring in turns with the gathered form and with torch's own ring. torch's ``context_parallel`` does not run
on CPUs (its DTensor has no strategy for their kernel), so its two loops, which are private, are called with
that kernel. Timings mean something on a quiet machine alone.

    python benchmarks/context.py [--times]
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from _common import Contender, Report, Section, in_turns, slowest_rank
from torch.distributed import _functional_collectives as functional

import espalier
from espalier import Mesh, Shard
from espalier.comm.row_exchange import spans_of
from espalier.models import build
from espalier.tensor.rules.ring import job

MIB = 2**20
GPT = {"vocab_size": 256, "max_positions": 2**18, "hidden": 256, "heads": 8, "layers": 4, "ffn": 1024}
SMALL = {**GPT, "hidden": 64, "ffn": 256, "layers": 2, "max_positions": 8192}
BERT = {"vocab_size": 30522, "hidden": 1024, "heads": 16, "layers": 2}
CAP = 4 * 2**30


def batch(rows: int, tokens: int) -> dict[str, torch.Tensor]:
    """Tokens on the current device."""
    ids = torch.zeros(rows, tokens, dtype=torch.int64)
    return {"input_ids": ids, "labels": ids}


def peak(kind: str, sizes: dict[str, Any], rows: int, tokens: int, **plan: Any) -> espalier.DryReport:
    """One step of SGD, dry."""
    with torch.device("meta"):
        model, data = build(kind, sizes), batch(rows, tokens)
    return espalier.dry_run(model, plan, data, optimizer=torch.optim.SGD(model.parameters()))


def growing() -> Section:
    """Sequence and ranks grow together."""
    found = Section(
        "A sequence as long as its ranks are many",
        "Peak of a rank in a step of a GPT (4 layers, hidden 256), 4,096 tokens a rank; what it sends.",
        [("ranks", "tokens", "ring", "Ulysses", "gathered", "ring sends", "Ulysses sends")],
    )
    peaks = {}
    for n in (1, 2, 4, 8, 16, 64):
        kinds = {}
        for kind in ("ring", "ulysses", "gather"):
            if kind != "ulysses" or n <= 8:
                kinds[kind] = peak("gpt", GPT, 1, 4096 * n, context=n, context_kind=kind)
        peaks[n] = kinds["ring"].peak_bytes
        sent = [f"{sum(r.ledger.by_axis().values()) / MIB:.0f} MiB" for r in kinds.values()]
        row = [f"{r.peak_bytes / MIB:.0f} MiB" for r in kinds.values()]
        if "ulysses" not in kinds:
            row.insert(1, "too few heads")
            sent.insert(1, "")
        found.rows.append((str(n), f"{4096 * n:,}", *row, *sent[:2]))
    found.bar("peak of 8 ranks with 8 times the sequence, over that of one", peaks[8] / peaks[1], 1.1)
    found.bar("the same for 64", peaks[64] / peaks[1], 1.1)
    return found


def balance() -> Section:
    """Scores that each rank computes."""
    found = Section(
        "Work on a causal sequence",
        "Scores that the busiest rank computes and the idlest, over the mean.",
        [("ranks", "tokens", "each its own: most", "least", "helping: most", "least")],
    )
    for n, tokens in ((4, 16384), (8, 16384), (8, 10001), (64, 2**18)):
        have = spans_of(espalier.Layout(Mesh.dry({"context": n}), [Shard(0)], [tokens]), 0)
        sizes = [end - start for ((start, end),) in have]
        row = []
        for helping in (False, True):
            work = [scores(sizes, rank, helping) for rank in range(n)]
            mean = sum(work) / n
            row += [max(work) / mean, min(work) / mean]
        found.rows.append((str(n), f"{tokens:,}", *(f"{x:.3f}" for x in row)))
        found.bar(f"busiest of {n} ranks that help, {tokens:,} tokens", row[2], 1.03)
    return found


def scores(sizes: list[int], rank: int, helping: bool) -> int:
    """Scores that a rank computes, of stretches of these sizes."""
    own = sizes[rank] * (sizes[rank] + 1) // 2
    if not helping:
        return own + sizes[rank] * sum(sizes[:rank])
    jobs = (job(sizes, rank, step) for step in range(1, len(sizes) // 2 + 1))
    return own + sum((of.rows[1] - of.rows[0]) * sizes[of.early] for of in jobs)


def largest(peak_of: Callable[[int], int], cap: int) -> int:
    """The most that stays below ``cap`` bytes, of what the peak grows with, far out in a line."""
    high, peaks = 1, {0: 0, 1: peak_of(1)}
    while peaks[high] <= cap:
        high *= 2
        peaks[high] = peak_of(high)
    low = high // 2
    while high - low > 1:
        share = (cap - peaks[low]) / (peaks[high] - peaks[low])
        middle = min(max(low + int(share * (high - low)), low + 1), high - 1)
        peaks[middle] = peak_of(middle)
        low, high = (middle, high) if peaks[middle] <= cap else (low, middle)
        if high - low > 1 and low + 1 not in peaks:
            peaks[low + 1] = peak_of(low + 1)
            if peaks[low + 1] > cap:
                return low
            low += 1
    return low


def encoder() -> Section:
    """1D tensor parallelism against the bidirectional ring."""
    found = Section(
        "A BERT under one memory cap",
        "2 layers, hidden 1,024, 16 heads, 30,522 tokens, SGD, 4 GiB. The largest batch of 512 tokens, "
        "and the longest sequence (in steps of 512) of a batch of 4, that one step takes.",
        [
            (
                "ranks",
                "batch: 1D",
                "+ sequence",
                "ring",
                "+ ZeRO 3",
                "tokens: 1D",
                "+ sequence",
                "ring",
                "+ ZeRO 3",
            )
        ],
    )

    def most(rows: int | None, plan: dict[str, Any]) -> int:
        def peak_of(k: int) -> int:
            shape = (k, 512) if rows is None else (rows, 512 * k)
            return peak("bert", {**BERT, "max_positions": shape[1]}, *shape, **plan).peak_bytes

        return largest(peak_of, CAP)

    for n in (4, 16, 64):
        ring = {"context": n, "context_kind": "ring"}
        plans = [{"tensor": n}, {"tensor": n, "sequence_parallel": True}, ring, {**ring, "zero": 3}]
        rows = [most(None, plan) for plan in plans]
        tokens = [512 * most(4, plan) for plan in plans]
        found.rows.append((str(n), *(f"{k:,}" for k in (*rows, *tokens))))
        if n > 4:
            found.bar(f"longest of 1D over the ring's, {n} ranks", tokens[0] / tokens[2], 1.0)
    return found


def measured(mesh: Mesh) -> int:
    """The most that all tensors of a step take on this rank."""
    torch.manual_seed(0)
    n = mesh.size()
    model = build("gpt", SMALL)
    plan = {"context": n, "context_kind": "ring"}
    engine = espalier.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), plan)
    data = batch(1, 1024 * n)
    engine.train_step(data)
    watch = engine.watch()
    with watch:
        engine.train_step(data)
    return watch.peak


def real() -> Section:
    """The same on real ranks."""
    found = Section(
        "On real ranks",
        "All tensors of a step of a small GPT (2 layers, hidden 64), 1,024 tokens for each gloo rank.",
        [("ranks", "tokens", "peak of the fullest rank")],
    )
    peaks = {}
    for n in (1, 2, 8):
        peaks[n] = max(espalier.spawn(measured, {"w": n}))
        found.rows.append((str(n), f"{1024 * n:,}", f"{peaks[n] / MIB:.2f} MiB"))
    found.bar("peak of 8 ranks with 8 times the sequence, over that of one", peaks[8] / peaks[1], 1.1)
    return found


def turns(mesh: Mesh, tokens: int, causal: bool) -> dict[str, list[float]]:
    """Forward and backward of one attention, 4 heads of 64, in turns."""
    n, shape = mesh.size(), (1, 4, tokens, 64)
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(shape, generator=generator) for _ in range(4)]
    contenders = {}
    for kind in ("ring", "ulysses", "gather"):
        told = mesh.telling(context=kind)
        q, k, v, up = (espalier.distribute_tensor(x, told, [Shard(2)]) for x in whole)
        contenders[kind] = ours([q, k, v], up, causal)
    parts = [x.chunk(n, 2)[mesh.rank].contiguous() for x in whole]
    contenders["gathered by hand"] = by_hand(parts, mesh.rank, n, causal)
    contenders["torch's ring"] = torchs(parts, causal)
    return slowest_rank(in_turns(contenders, rounds=15, warmup=2))


def ours(inputs: list[torch.Tensor], up: torch.Tensor, causal: bool) -> Contender:
    """Of DTensors that are cut along the sequence."""
    leaves = [x.requires_grad_() for x in inputs]

    def run() -> None:
        F.scaled_dot_product_attention(*leaves, is_causal=causal).backward(up)

    return Contender(run, lambda: ready(leaves))


def by_hand(parts: list[torch.Tensor], rank: int, n: int, causal: bool) -> Contender:
    """Keys and values gathered; a causal rank takes those that it needs."""
    *inputs, up = parts
    q, k, v = (x.requires_grad_() for x in inputs)
    # torch 2.13 renamed it
    gather: Any = (
        getattr(functional, "all_gather_single_autograd", None) or functional.all_gather_tensor_autograd
    )
    rows = q.shape[2]
    seen = torch.ones(rows, n * rows, dtype=torch.bool).tril(rank * rows) if causal else None

    def run() -> None:
        keys, values = (gather(x, 2, dist.group.WORLD) for x in (k, v))
        F.scaled_dot_product_attention(q, keys, values, attn_mask=seen).backward(up)

    return Contender(run, lambda: ready([q, k, v]))


def torchs(parts: list[torch.Tensor], causal: bool) -> Contender:
    """The loops behind torch's ``context_parallel``; of causal ones the data is in their order already."""
    from torch.distributed.tensor.experimental._context_parallel import _attention as peer

    forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

    def once(query: Any, key: Any, value: Any, is_causal: bool, **_: Any) -> Any:
        return forward(query, key, value, 0.0, is_causal)

    def back(query: Any, key: Any, value: Any, out: Any, logsumexp: Any, is_causal: bool, grad: Any) -> Any:
        return backward(grad, query, key, value, out, logsumexp, 0.0, is_causal)

    q, k, v, up = (x.detach() for x in parts)
    group = dist.group.WORLD

    def run() -> None:
        peer._cp_options.enable_load_balance = causal
        out, lse = peer._templated_ring_attention(group, 2, once, q, k, v, is_causal=causal)[:2]
        peer._templated_ring_attention_backward(group, 2, back, up, "grad", q, k, v, out, lse, causal)

    return Contender(run, dist.barrier)


def ready(leaves: list[torch.Tensor]) -> None:
    """Before the clock starts: gradients dropped, all ranks there."""
    for x in leaves:
        x.grad = None
    dist.barrier()


def times() -> int:
    """The table of times; the exit status."""
    report = Report()
    for tokens, causal in ((2048, False), (2048, True), (512, True)):
        found = espalier.spawn(turns, {"context": 2}, tokens, causal)[0]
        work = f"{tokens:,} tokens, {'causal' if causal else 'both sides'}, 2 ranks"
        limit = 1.1 if tokens > 1000 else None
        report.add(work, found, "ring", "torch's ring", limit)
        report.add(work, found, "ring", "gathered by hand", limit)
        report.add(work, found, "ulysses", "ring")
        report.add(work, found, "gather", "gathered by hand")
    return report.show()


if __name__ == "__main__":
    if "--times" in sys.argv:
        sys.exit(times())
    missed = 0
    for section in (growing, balance, encoder, real):
        done = section()
        print(done.text(), flush=True)
        missed += done.missed
    sys.exit(1 if missed else 0)
