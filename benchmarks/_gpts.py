"""A whole GPT cut over two ranks, and one step of training it: by hand, Espalier, torch, megatron-core.

Layers of :mod:`_blocks`, causal, between an embedding and a head that are cut over the vocabulary, and a
cross-entropy that never sees all of it. There are no embeddings of positions: the causal mask tells them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from _blocks import (
    BATCH,
    COLUMN,
    RANKS,
    ROW,
    TOKENS,
    Block,
    Megatron,
    MegatronCore,
    columns_of,
    enter,
    leave,
    scatter,
    styles,
    sum_gradients,
)
from _common import Contender
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

import espalier

WORDS = 1024
RATE = 1e-3


class Size(NamedTuple):
    """Of a GPT."""

    layers: int
    width: int

    def __str__(self) -> str:
        """As tables have it."""
        return f"{self.layers} x {self.width}"


SMALL, LARGE = Size(4, 128), Size(6, 384)


class GPT(nn.Module):
    """Written for one device."""

    def __init__(self, blocks: Iterable[nn.Module], width: int, share: int = 1) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS // share, width)
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, WORDS // share, bias=False)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The loss; ids and labels [batch, tokens]."""
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def plain(size: Size = SMALL) -> GPT:
    """The same weights on each call."""
    torch.manual_seed(0)
    return GPT((Block(size.width, causal=True) for _ in range(size.layers)), size.width)


def take(mine: GPT, whole: GPT, rank: int) -> None:
    """Copy this rank's part of what lies outside of blocks."""
    with torch.no_grad():
        for a, b in ((mine.embed, whole.embed), (mine.head, whole.head)):
            a.weight.copy_(b.weight.chunk(RANKS, 0)[rank])


class _Loss(torch.autograd.Function):
    """The mean cross-entropy of logits cut over the words: three all-reduces of one number a token."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor, first: int) -> torch.Tensor:
        top = logits.amax(-1, keepdim=True)
        dist.all_reduce(top, dist.ReduceOp.MAX)
        chances = (logits - top).exp_()
        here = labels - first
        elsewhere = (here < 0) | (here >= logits.shape[-1])
        here = here.masked_fill(elsewhere, 0).unsqueeze(-1)
        found = (logits.gather(-1, here) - top).squeeze(-1).masked_fill_(elsewhere, 0.0)
        dist.all_reduce(found)
        total = chances.sum(-1, keepdim=True)
        dist.all_reduce(total)
        ctx.save_for_backward(chances.div_(total), here, elsewhere)
        return (total.log_().squeeze(-1) - found).mean()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        chances, here, elsewhere = ctx.saved_tensors
        given = chances.clone()
        given.scatter_add_(-1, here, elsewhere.to(given.dtype).sub_(1.0).unsqueeze(-1))
        return given.mul_(grad / elsewhere.numel()), None, None


class ByHand(GPT):
    """Blocks, embedding, head and loss for one rank of two."""

    def __init__(self, whole: GPT, rank: int, *, sequence: bool = False) -> None:
        blocks = [Megatron(b, rank, sequence=sequence) for b in whole.blocks]
        super().__init__(blocks, whole.embed.embedding_dim, RANKS)
        take(self, whole, rank)
        self.first, self.sequence = rank * WORDS // RANKS, sequence

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The loss."""
        here = ids - self.first
        elsewhere = (here < 0) | (here >= WORDS // RANKS)
        found = self.embed(here.masked_fill(elsewhere, 0)).masked_fill(elsewhere.unsqueeze(-1), 0.0)
        x = scatter(found) if self.sequence else leave(found)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        logits = columns_of(x, self.head.weight, None)[0] if self.sequence else self.head(enter(x))
        return _Loss.apply(logits, labels, self.first)

    def finish(self) -> None:
        """Under sequence parallelism: sum the gradients of what met shards, in one message."""
        if self.sequence:
            met = [*self.norm.parameters()]
            for block in self.blocks:
                met += block.met()
            sum_gradients(met)


class ByMegatronCore(GPT):
    """Its column and row linears, vocabulary embedding and cross-entropy."""

    def __init__(self, whole: GPT, rank: int) -> None:
        from megatron.core.tensor_parallel import VocabParallelEmbedding

        blocks, width = [MegatronCore(b, rank) for b in whole.blocks], whole.embed.embedding_dim
        super().__init__(blocks, width, RANKS)
        config = blocks[0].config
        self.embed = VocabParallelEmbedding(WORDS, width, init_method=nn.init.zeros_, config=config)
        self.head = blocks[0].column(width, WORDS, bias=False)
        with torch.no_grad():
            for mine, theirs in ((self.embed, whole.embed), (self.head.inner, whole.head)):
                mine.weight.copy_(theirs.weight.chunk(RANKS, 0)[rank])

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The loss."""
        from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return vocab_parallel_cross_entropy(self.head(self.norm(x)), labels).mean()


def by_torch(whole: GPT, *, sequence: bool) -> GPT:
    """Given to ``parallelize_module``."""
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tensor",))
    between = Shard(1) if sequence else Replicate()
    table: dict[str, ParallelStyle] = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "head": ColwiseParallel(input_layouts=between, output_layouts=Shard(-1), use_local_output=False),
    }
    if sequence:
        table["norm"] = SequenceParallel()
    for i in range(len(whole.blocks)):
        table |= {f"blocks.{i}.{name}": style for name, style in styles(sequence=sequence).items()}
    return parallelize_module(whole, mesh, table)


Step = Callable[[], torch.Tensor]


def stepping(
    model: nn.Module,
    batch: tuple[torch.Tensor, torch.Tensor],
    finish: Callable[[], None] = lambda: None,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    kernel: str = "foreach",
) -> Step:
    """A loop's body, as a user writes it; AdamW with its ``foreach`` or its ``fused`` kernel."""
    kinds: dict[bool, list[nn.Parameter]] = {}
    for p in model.parameters():
        kinds.setdefault(isinstance(p, TorchDTensor), []).append(p)
    # torch's foreach takes no list of both kinds
    optimizer = torch.optim.AdamW([{"params": group} for group in kinds.values()], RATE, **{kernel: True})

    def run() -> torch.Tensor:
        optimizer.zero_grad()
        with around():
            loss = model(*batch)
            loss.backward()
        finish()
        optimizer.step()
        found: torch.Tensor = loss.detach()
        return found.full_tensor() if isinstance(found, TorchDTensor) else found

    return run


def by_espalier(
    batch: tuple[torch.Tensor, torch.Tensor],
    size: Size = SMALL,
    mesh: espalier.Mesh | None = None,
    **plan: Any,
) -> Step:
    """The plain model and ``espalier.initialize``."""
    model = plain(size)
    layouts = {"embed": "vocab", "head": "column"}
    layouts |= {f"blocks.*.{name}": "column" for name in COLUMN}
    layouts |= {f"blocks.*.{name}": "row" for name in ROW}
    optimizer = torch.optim.AdamW(model.parameters(), RATE)
    engine = espalier.initialize(model, optimizer, {"tensor": RANKS, **plan}, mesh=mesh, layouts=layouts)
    ids, labels = batch
    return lambda: engine.train_step({"ids": ids, "labels": labels})


def entrants(rank: int, megatron_core: bool) -> dict[str, Step]:
    """All that are able to enter here: a step of each, which gives the loss."""
    batch = tuple(torch.randint(0, WORDS, (BATCH, TOKENS)) for _ in range(2))
    hand, cut = ByHand(plain(), rank), ByHand(plain(), rank, sequence=True)
    found = {
        "one process": stepping(plain(), batch),
        "by hand": stepping(hand, batch),
        "Espalier": by_espalier(batch),
        "torch": stepping(by_torch(plain(), sequence=False), batch, around=loss_parallel),
        "by hand, sequence": stepping(cut, batch, cut.finish),
        "Espalier, sequence": by_espalier(batch, sequence_parallel=True),
        "torch, sequence": stepping(by_torch(plain(), sequence=True), batch, around=loss_parallel),
    }
    if megatron_core:
        found["megatron-core"] = stepping(ByMegatronCore(plain(), rank), batch)
    return found


def check(found: dict[str, Step], steps: int, tolerance: float) -> None:
    """Compare the losses of the first steps with those of one process."""
    expected = [found["one process"]().item() for _ in range(steps)]
    for name, step in found.items():
        if name == "one process":
            continue
        for i, wanted in enumerate(expected):
            got = step().item()
            if abs(got - wanted) > tolerance:
                raise ValueError(f"{name}: the loss of step {i} is {got}, on one process {wanted}")


def contender(step: Step) -> Contender:
    """A step, which all begin together."""
    return Contender(step, dist.barrier)
