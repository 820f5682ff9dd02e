"""Ways to train a GPT along the data axis: ours, torch's, DeepSpeed's, and by hand.

Each is a function of a :class:`Work` that gives a step: a function of the number of the batch, which
trains on it and gives the mean loss of this rank's rows (or of all rows), detached.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import espalier
from espalier.models import GPT2, GPT2Config
from espalier.models.gpt2 import Block

BATCH, BATCHES, RATE = 4, 4, 1e-3

Step = Callable[[int], torch.Tensor]


@dataclass(frozen=True)
class Size:
    """Of a GPT."""

    layers: int
    hidden: int
    heads: int
    sequence: int
    vocabulary: int = 2048


SIZES = {"small": Size(4, 128, 4, 128), "large": Size(6, 384, 6, 256)}


@dataclass(frozen=True)
class Work:
    """What all contestants do: the model, and the global batches [batch, ids and labels, sequence]."""

    size: Size
    mesh: espalier.Mesh

    @property
    def ranks(self) -> int:
        """That share the batch."""
        return self.mesh.size()

    @property
    def rank(self) -> int:
        """This one."""
        return self.mesh.coordinate[0]

    def model(self) -> GPT2:
        """The same on every rank and for every contestant."""
        torch.manual_seed(0)
        size = self.size
        config = GPT2Config(
            vocab_size=size.vocabulary,
            max_positions=size.sequence,
            layers=size.layers,
            hidden=size.hidden,
            heads=size.heads,
        )
        return GPT2(config)

    def batch(self, number: int) -> dict[str, torch.Tensor]:
        """A global batch."""
        draw = torch.Generator().manual_seed(number % BATCHES)
        shape = (BATCH * self.ranks, self.size.sequence + 1)
        ids = torch.randint(0, self.size.vocabulary, shape, generator=draw)
        return {"input_ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}

    def own(self, number: int) -> dict[str, torch.Tensor]:
        """This rank's rows of it."""
        rows = slice(self.rank * BATCH, (self.rank + 1) * BATCH)
        return {name: x[rows].contiguous() for name, x in self.batch(number).items()}


def adamw(parameters: Iterable[torch.Tensor], fused: bool | None = None) -> torch.optim.Optimizer:
    """As torch makes it by default, or with its fused kernel."""
    return torch.optim.AdamW(parameters, lr=RATE, fused=fused)


def plain(
    model: nn.Module,
    batches: list[dict[str, torch.Tensor]],
    optimizer: torch.optim.Optimizer,
    reduce: Callable[[], object] = lambda: None,
) -> Step:
    """The loop that everyone writes."""

    def step(number: int) -> torch.Tensor:
        loss: torch.Tensor = model(**batches[number % BATCHES]).loss
        loss.backward()
        reduce()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _own(work: Work) -> list[dict[str, torch.Tensor]]:
    return [work.own(i) for i in range(BATCHES)]


def single(work: Work) -> Step:
    """One process with the whole global batch; the others wait."""
    if work.rank:
        return lambda number: torch.zeros(())
    model = work.model()
    return plain(model, [work.batch(i) for i in range(BATCHES)], adamw(model.parameters()))


def alone(work: Work, share: int = 1) -> Step:
    """Each rank with its rows and nobody else; the optimizer updates one in ``share`` of the parameters."""
    model = work.model()
    if share == 1:
        return plain(model, _own(work), adamw(model.parameters()))
    pieces = [nn.Parameter(p.detach().flatten()[: -(-p.numel() // share)]) for p in model.parameters()]

    def cut() -> None:
        for p, piece in zip(model.parameters(), pieces, strict=True):
            assert p.grad is not None
            piece.grad, p.grad = p.grad.flatten()[: piece.numel()], None

    return plain(model, _own(work), adamw(pieces), cut)


def flat(work: Work) -> Step:
    """One buffer of all gradients, reduced when backward is done."""
    model = work.model()
    parameters = list(model.parameters())

    def reduce() -> None:
        grads = [p.grad for p in parameters if p.grad is not None]
        buffer = torch.cat([g.view(-1) for g in grads])
        dist.all_reduce(buffer)
        buffer /= work.ranks
        parts = buffer.split([g.numel() for g in grads])
        torch._foreach_copy_([g.view(-1) for g in grads], list(parts))

    return plain(model, _own(work), adamw(parameters), reduce)


def ddp(work: Work, fused: bool | None = None) -> Step:
    """torch's DistributedDataParallel."""
    model = DistributedDataParallel(work.model())
    return plain(model, _own(work), adamw(model.parameters(), fused))


def redundancy(work: Work, fused: bool | None = None) -> Step:
    """The same with its ZeroRedundancyOptimizer."""
    model = DistributedDataParallel(work.model())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=RATE, fused=fused)
    return plain(model, _own(work), optimizer)


def fsdp1(work: Work) -> Step:
    """torch's FullyShardedDataParallel, a unit for each block."""
    policy = ModuleWrapPolicy({Block})
    model = FullyShardedDataParallel(
        work.model(), auto_wrap_policy=policy, use_orig_params=True, device_id=torch.device("cpu")
    )
    return plain(model, _own(work), adamw(model.parameters()))


def fsdp2(work: Work, again: bool = True, fused: bool | None = None) -> Step:
    """torch's fully_shard on each block and the root; ``again`` sharded after forward, or not."""
    model = work.model()
    mesh = init_device_mesh("cpu", (work.ranks,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=again)
    fully_shard(model, mesh=mesh, reshard_after_forward=again)
    return plain(model, _own(work), adamw(model.parameters(), fused))


def deepspeed(work: Work, stage: int) -> Step:
    """DeepSpeed's engine; buckets of 25 MB, as large as ours and DDP's."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed as library

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    model, bucket = work.model(), int(25e6 / 4)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": BATCH,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": bucket,
            "allgather_bucket_size": bucket,
            "stage3_prefetch_bucket_size": bucket,
        },
    }
    engine = library.initialize(model=model, optimizer=adamw(model.parameters()), config=config)[0]
    batches = _own(work)

    def step(number: int) -> torch.Tensor:
        loss: torch.Tensor = engine(**batches[number % BATCHES]).loss
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


def ours(work: Work, stage: int) -> Step:
    """Espalier's engine."""
    model = work.model()
    engine = espalier.initialize(
        model, adamw(model.parameters()), {"data": work.ranks, "zero": stage}, mesh=work.mesh
    )
    batches = [engine.local_batch(work.own(i), BATCH * work.ranks) for i in range(BATCHES)]

    def step(number: int) -> torch.Tensor:
        return engine.train_step(batches[number % BATCHES])

    return step


CONTESTANTS: dict[str, Callable[[Work], Step]] = {
    "single": single,
    "alone": alone,
    "alone, its share": lambda work: alone(work, work.ranks),
    "flat": flat,
    "ddp": ddp,
    "ddp-fused": partial(ddp, fused=True),
    "redundancy": redundancy,
    "fsdp1": fsdp1,
    "fsdp2": fsdp2,
    "fsdp2-kept": partial(fsdp2, again=False),
    "fsdp2-fused": partial(fsdp2, fused=True),
    **{f"deepspeed{stage}": partial(deepspeed, stage=stage) for stage in (1, 2, 3)},
    **{f"zero{stage}": partial(ours, stage=stage) for stage in range(4)},
}


def able(name: str) -> bool:
    """Whether what a contestant needs is installed."""
    return not name.startswith("deepspeed") or importlib.util.find_spec("deepspeed") is not None
