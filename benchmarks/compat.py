"""Compat: a loop around a wrapper beside the same loop on the engine; the wrapper may cost at most 3 %.

Two gloo ranks train a GPT on their own rows, one thread a rank. Both sides compute the same: a step through
``espalier.compat.torch`` (outputs handed out, the loss outside, ``loss.backward()``, ``optimizer.step()``),
and one through ``engine.local_batch``, ``engine.backward`` and ``engine.step`` with the loss function inside.

    python benchmarks/compat.py
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from _common import MISSED, Contender, Report, in_turns, on_ranks, slowest_rank
from torch import nn
from torch.nn import functional as F

import espalier
from espalier.compat.torch import DistributedDataParallel, FullyShardedDataParallel
from espalier.mesh.process import finish, start

WIDTH, TOKENS, VOCABULARY, ROUNDS = 256, 128, 512, 40


def model() -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, batch_first=True, norm_first=True)
    body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), body, nn.Linear(WIDTH, VOCABULARY))


def loss_of(out: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(out.flatten(0, 1), ids.flatten())


def compare() -> int:
    """What each rank runs; rank 0 prints."""
    rank = start("cpu").rank
    torch.set_num_threads(1)
    ids = torch.randint(VOCABULARY, (4, TOKENS), generator=torch.Generator().manual_seed(rank))
    report, status = Report(), 0
    for name, wrap, plan in (
        ("DistributedDataParallel", DistributedDataParallel, {"data": 2}),
        ("FullyShardedDataParallel", FullyShardedDataParallel, {"data": 2, "zero": 3}),
    ):
        net = model()
        engine = espalier.initialize(net, torch.optim.AdamW(net.parameters()), plan, loss_fn=loss_of)
        wrapped = wrap(model())
        optimizer = torch.optim.AdamW(wrapped.parameters())

        def native(engine: espalier.Engine = engine) -> None:
            engine.backward(engine(engine.local_batch((ids, ids))))
            engine.step()

        def through(wrapped: nn.Module = wrapped, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.zero_grad()
            loss_of(wrapped(ids), ids).backward()
            optimizer.step()

        contenders = {"engine": Contender(native, dist.barrier), name: Contender(through, dist.barrier)}
        times = slowest_rank(in_turns(contenders, rounds=ROUNDS, warmup=3))
        report.add(f"step of a GPT of width {WIDTH}", times, name, "engine", 1.03)
        wrong = max((x - wrapped.engine.state_dict()[n]).abs().max() for n, x in engine.state_dict().items())
        assert wrong < 1e-3, f"{name} trains another model: {wrong}"
    if rank == 0:
        status = MISSED if report.show() else 0
    finish()
    return status


if __name__ == "__main__":
    sys.exit(compare() if "--rank" in sys.argv else on_ranks(__file__, 2))
